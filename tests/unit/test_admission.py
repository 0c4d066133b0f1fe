"""Places in a queue, its pace, and deadlines that cannot be met."""

from __future__ import annotations

import pytest

from prefixcache.engine.admission import Ahead, Pace, Places, check_deadline
from prefixcache.errors import DeadlinePassed, Overloaded


def test_places_are_bounded_in_all_and_for_each_tenant():
    places = Places("requests", max_waiting=5, max_share=3, retry_after_ms=70)
    for _ in range(3):
        places.take("greedy")
    with pytest.raises(Overloaded, match=r"tenant's share of the queue is full \(3 requests wait\)") as caught:
        places.take("greedy")
    assert caught.value.retry_after_ms == 70
    places.take("modest")
    places.take("other")
    with pytest.raises(Overloaded, match=r"^the queue is full \(5 requests wait\)"):
        places.take("modest")
    places.give_back("greedy")
    places.take("modest")
    places.give_back("modest")
    places.take("greedy")
    with pytest.raises(Overloaded):
        places.take("late")


def test_pace_is_that_of_the_queue_that_waits_now():
    pace = Pace()
    for second in range(4):
        assert pace.seconds(10, second) == 0.0  # too little is known
        pace.observe(num_admitted=1, num_waiting=5, now_s=second)
    assert pace.seconds(10, now_s=4) == pytest.approx(10 * 4 / 4)
    assert pace.seconds(10, now_s=8) == pytest.approx(10 * 8 / 4)  # nothing has moved since
    pace.observe(num_admitted=5, num_waiting=0, now_s=9)
    assert pace.seconds(10, now_s=9) == 0.0


@pytest.mark.parametrize("left_s", [0.0, -1.0])
def test_a_deadline_that_has_passed(left_s: float):
    with pytest.raises(DeadlinePassed):
        check_deadline(left_s, 0.0, [], Pace(), 0.0)


def test_a_prompt_that_takes_too_long_alone_need_not_come_again():
    check_deadline(2.0, 2.4, [], Pace(), 0.0)
    with pytest.raises(Overloaded, match=r"in 2\.00 s, cannot be met: what is not cached .* takes 2\.60 s") as caught:
        check_deadline(2.0, 2.6, [], Pace(), 0.0)
    assert caught.value.retry_after_ms is None


def test_what_is_ahead_counts_once_for_each_prefix():
    ahead = [Ahead(b"a", 1.0, True), Ahead(b"a", 1.5, True), Ahead(b"b", 0.5, False)]
    check_deadline(2.0, 0.4, ahead, Pace(), 0.0)
    with pytest.raises(Overloaded, match=r"queue and prompt take 2\.60 s") as caught:
        check_deadline(2.0, 0.6, ahead, Pace(), 0.0)
    assert caught.value.retry_after_ms == 600


def test_a_queue_that_moves_slowly_is_too_long():
    pace = Pace()
    for second in range(4):
        pace.observe(1, 5, second)
    waiting = [Ahead(bytes([index]), 0.0, True) for index in range(3)]
    check_deadline(3.0, 0.1, waiting, pace, 4.0)
    with pytest.raises(Overloaded, match=r"queue and prompt take 3\.10 s"):
        check_deadline(2.0, 0.1, waiting, pace, 4.0)
    check_deadline(2.0, 0.1, [Ahead(b"", 0.0, False)] * 9, pace, 4.0)  # these have left the queue
