"""EQ and cached tokens: what every equivalence test asserts of a reply."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cache

import pytest

from prefixcache.request import Namespace
from tests.support.in_process import Stream
from tests.support.models import tiny_model
from tests.support.oracle import CLEAR_GAP, Oracle, Rescore, unchanged

LOGPROB_TOLERANCE = 1e-4


@cache
def oracle(family: str) -> Oracle:
    """The oracle of one family; one per process, since it remembers."""
    return Oracle(tiny_model(family))


def assert_exact(
    stream: Stream, oracle: Oracle, *, rescore: Rescore = unchanged, stop_token_ids: Collection[int] = ()
) -> None:
    """EQ for a greedy reply: the oracle's tokens, and its log-probabilities within 1e-4.

    Where rounding may choose between two tokens (they are closer than `CLEAR_GAP`), either is right; from there on
    the reply is held to the oracle's log-probabilities of the tokens that it chose.
    """
    prompt, tokens = stream.request.prompt_token_ids, tuple(stream.token_ids)
    max_tokens = stream.request.sampling.max_tokens
    expected = oracle.generate(prompt, max_tokens, rescore=rescore, stop_token_ids=stop_token_ids, draft=tokens)
    differing = [i for i, (ours, theirs) in enumerate(zip(tokens, expected.token_ids, strict=False)) if ours != theirs]
    if differing:
        first = differing[0]
        assert expected.gaps[first] <= CLEAR_GAP, f"token {first} is {tokens[first]}, not {expected.token_ids[first]}"
    else:
        assert tokens == expected.token_ids
    assert stream.logprobs == pytest.approx(oracle.logprobs_of(prompt, tokens), abs=LOGPROB_TOLERANCE)


class Known:
    """What earlier requests have computed, kept as plain token lists: how much of a prompt must be found."""

    def __init__(self) -> None:
        self._lists: dict[Namespace, list[Sequence[int]]] = {}

    def add(self, stream: Stream) -> None:
        """Note a finished request: K/V exists for its prompt and for all but the last token of each sample."""
        request = stream.request
        for reply in stream.replies if request.use_cache else ():
            self._lists.setdefault(request.namespace, []).append(request.prompt_token_ids + reply.token_ids[:-1])

    def num_cached_tokens(self, stream: Stream) -> int:
        """How many prompt tokens a request must find, the last one excepted."""
        request = stream.request
        if not request.use_cache:
            return 0
        prompt = request.prompt_token_ids
        known = self._lists.get(request.namespace, ())
        return min(max((common_length(prompt, tokens) for tokens in known), default=0), len(prompt) - 1)


def common_length(a: Sequence[int], b: Sequence[int]) -> int:
    """How many leading tokens two lists have in common."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
