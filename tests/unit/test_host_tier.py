"""HostTier: what stays, what goes, and in which order."""

from __future__ import annotations

import torch

from prefixcache.cache.host_tier import HostTier
from prefixcache.kv.layout import KVLayout
from prefixcache.kv.page_pool import PagePool
from prefixcache.metrics import Metrics
from prefixcache.tree.node import PageDigest

LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, head_dim=4, dtype=torch.bfloat16, page_size=4)
CPU = torch.device("cpu")


class Rig:
    """A host tier below a device pool whose pages hold their own numbers."""

    def __init__(self, num_host_pages: int, num_device_pages: int = 32) -> None:
        self.device = PagePool(LAYOUT, num_device_pages, CPU)
        for page in range(num_device_pages):
            self.page(page).fill_(page + 1)
        self.metrics = Metrics()
        self.tier = HostTier(PagePool(LAYOUT, num_host_pages, CPU), self.device, self.metrics.tiers)

    def page(self, page: int) -> torch.Tensor:
        size = LAYOUT.page_size
        return self.device.kv[:, :, page * size : (page + 1) * size]

    def held(self, *pages: int) -> list[int]:
        """Which of these are held, one by one; looking changes what was used last."""
        return [
            page for page in pages if self.tier.restore(names(page), [31]) and bool((self.page(31) == page + 1).all())
        ]


def names(*pages: int) -> list[PageDigest]:
    return [PageDigest(bytes([page]) * 16, bytes([page]) * 32) for page in pages]


def test_what_comes_back_is_what_was_put() -> None:
    rig = Rig(8)
    rig.tier.put([3, 4, 5], names(3, 4, 5))
    for page in (3, 4, 5):
        rig.page(page).zero_()

    assert rig.tier.restore(names(3, 4, 5), [20, 21, 22]) == 3

    assert [float(rig.page(page).unique()) for page in (20, 21, 22)] == [4.0, 5.0, 6.0]
    assert rig.tier.num_pages == 3


def test_only_the_unbroken_beginning_comes_back() -> None:
    rig = Rig(8)
    rig.tier.put([0, 1, 3], names(0, 1, 3))
    assert rig.tier.restore(names(0, 1, 2, 3), [20, 21, 22, 23]) == 2
    assert rig.tier.restore(names(2, 3), [20, 21]) == 0
    assert float(rig.page(22).unique()) == 23.0, "a page was written that was not announced"


def test_tails_go_before_heads() -> None:
    rig = Rig(4)
    rig.tier.put([0, 1, 2, 3], names(0, 1, 2, 3))
    rig.tier.put([10, 11], names(10, 11))
    assert rig.held(0, 1, 2, 3, 10, 11) == [0, 1, 10, 11]


def test_a_run_longer_than_the_tier_leaves_its_head() -> None:
    rig = Rig(3)
    rig.tier.put(list(range(10)), names(*range(10)))
    assert rig.held(*range(10)) == [0, 1, 2]
    assert rig.tier.num_pages == rig.tier.capacity_pages == 3


def test_the_least_recently_used_goes_first() -> None:
    rig = Rig(4)
    rig.tier.put([0, 1], names(0, 1))
    rig.tier.put([2, 3], names(2, 3))
    rig.tier.restore(names(0, 1), [20, 21])  # used again
    rig.tier.put([10, 11], names(10, 11))
    assert rig.held(0, 1, 2, 3, 10, 11) == [0, 1, 10, 11]


def test_what_is_held_already_is_not_copied_again_but_counts_as_used() -> None:
    rig = Rig(3)
    rig.tier.put([0, 1, 2], names(0, 1, 2))
    rig.tier.put([25], names(2))  # the same page, computed anew
    rig.tier.put([10], names(10))
    assert rig.tier.num_pages == 3
    assert rig.held(0, 1, 2, 10) == [0, 2, 10]


def test_it_is_told_apart_by_proof() -> None:
    rig = Rig(3)
    rig.tier.put([0], names(0))
    (name,) = names(0)
    assert rig.tier.restore([name._replace(proof=b"\xff" * 32)], [20]) == 0


def test_what_moves_and_what_makes_room_is_counted() -> None:
    rig = Rig(3)
    rig.tier.put([0, 1, 2, 3], names(0, 1, 2, 3))
    rig.tier.put([0], names(0))  # held already
    rig.tier.restore(names(0, 1), [20, 21])

    def moved(what: str) -> float | None:
        return rig.metrics.registry.get_sample_value(f"prefixcache_tier_{what}_bytes_total", {"tier": "host"})

    assert moved("saved") == 4 * LAYOUT.bytes_per_page
    assert moved("loaded") == 2 * LAYOUT.bytes_per_page
    assert rig.tier.num_evicted_pages == 1


def test_a_cleared_tier_holds_nothing_and_has_all_its_room() -> None:
    rig = Rig(3)
    rig.tier.put([3, 4, 5], names(3, 4, 5))

    assert rig.tier.clear() == 3

    assert rig.tier.num_pages == 0
    assert rig.held(3, 4, 5) == []
    rig.tier.put([6, 7, 8], names(6, 7, 8))
    assert rig.held(6, 7, 8) == [6, 7, 8]
