"""References without a server: the same decoder in a plain loop, and the plain transformers model."""

from __future__ import annotations

import random
from typing import Any

import torch
from transformers import PreTrainedModel

from prefixcache.bench.figures import Figure, timed_ms
from prefixcache.cache.prefix_cache import PrefixCache
from prefixcache.engine.runner import Runner
from prefixcache.engine.scheduler import Work
from prefixcache.engine.sequence import Sequence
from prefixcache.request import Namespace

_NAMESPACE = Namespace(tenant="bench")


class BareLoop:
    """Runs the project's decoder with nothing around it: no server, no scheduler, no text.

    Args:
        runner: The model.
        cache: Only to lay out pages as the server would; what is timed never calls it.
        chunk_tokens: Most tokens in one forward pass.
    """

    def __init__(self, runner: Runner, cache: PrefixCache, chunk_tokens: int) -> None:
        self._runner = runner
        self._cache = cache
        self._chunk_tokens = chunk_tokens

    def prefill_ms(self, prompts: list[list[int]]) -> Figure:
        """Time from nothing to the first token; one prompt a run, the first one does not count."""
        sequences = iter([self._sequence(prompt, namespace=None) for prompt in prompts])
        return timed_ms(lambda: self._prefill(next(sequences)), len(prompts) - 1)

    def extension_ms(self, prefix: list[int], num_new_tokens: int, repeat: int) -> Figure:
        """Time the forward pass of `num_new_tokens` on top of `prefix`, to the next token."""
        tail = random_tokens(num_new_tokens)
        self._publish(prefix)
        sequence = self._sequence(prefix + tail, namespace=_NAMESPACE)
        assert sequence.num_computed_tokens == len(prefix)
        work = [Work(sequence, num_new_tokens)]
        return timed_ms(lambda: self._tokens(work), repeat)

    def step_ms(self, prefix: list[int], num_sequences: int, num_steps: int, suffix_tokens: int) -> Figure:
        """Time decode steps of sequences that share `prefix` and each have `suffix_tokens` of their own."""
        self._publish(prefix)
        sequences = []
        for _ in range(num_sequences):
            sequence = self._sequence(prefix + random_tokens(suffix_tokens), namespace=_NAMESPACE, room=num_steps + 2)
            self._prefill(sequence)
            sequences.append(sequence)

        def step() -> None:
            for sequence, token in zip(sequences, self._tokens([Work(s, 1) for s in sequences]), strict=True):
                sequence.num_computed_tokens += 1
                sequence.token_ids.append(token)

        return timed_ms(step, num_steps)

    def _publish(self, prefix: list[int]) -> None:
        """Compute a prefix and put it into the tree, if it is not there."""
        sequence = self._sequence(prefix, namespace=_NAMESPACE)
        self._prefill(sequence)
        assert sequence.lease is not None
        self._cache.release(sequence.lease, sequence.prompt_key, len(prefix))

    def _sequence(self, tokens: list[int], namespace: Namespace | None, room: int = 1) -> Sequence:
        sequence = Sequence(0, namespace, list(tokens), max_tokens=room)
        sequence.lease = self._cache.try_acquire(namespace, sequence.prompt_key, num_tokens=len(tokens) + room)
        assert sequence.lease is not None, "the bench's cache is too small"
        sequence.num_computed_tokens = min(sequence.lease.num_cached_tokens, len(tokens) - 1)
        return sequence

    def _prefill(self, sequence: Sequence) -> None:
        while sequence.num_uncomputed_tokens:
            num_tokens = min(sequence.num_uncomputed_tokens, self._chunk_tokens)
            is_last = num_tokens == sequence.num_uncomputed_tokens
            tokens = self._tokens([Work(sequence, num_tokens)], sample=is_last)
            sequence.num_computed_tokens += num_tokens
        sequence.token_ids.append(tokens[0])

    def _tokens(self, work: list[Work], *, sample: bool = True) -> list[int]:
        hidden = self._runner.forward(work, [int(sample)] * len(work))
        if not sample:
            return []
        states = self._runner.final_states(hidden, list(range(len(work))))
        tokens: list[int] = self._runner.logits(states).argmax(-1).tolist()
        return tokens


class Transformers:
    """The plain transformers model, with its own K/V cache for decoding."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    def prefill_ms(self, prompts: list[list[int]]) -> Figure:
        """Time from nothing to the first token; one prompt a run, the first one does not count."""
        remaining = iter(prompts)
        return timed_ms(lambda: self._forward(next(remaining), None), len(prompts) - 1)

    def step_ms(self, prompt: list[int], num_steps: int) -> Figure:
        """Time decode steps behind `prompt`."""
        _, past = self._forward(prompt, None)

        def step() -> None:
            nonlocal past
            _, past = self._forward([5], past)

        return timed_ms(step, num_steps)

    @torch.inference_mode()
    def _forward(self, tokens: list[int], past: Any) -> tuple[int, Any]:
        input_ids = torch.tensor([tokens], device=self._model.device)
        output = self._model(input_ids, past_key_values=past, use_cache=True, logits_to_keep=1)
        return int(output.logits[0, -1].argmax()), output.past_key_values


def random_tokens(count: int, low: int = 100, high: int = 40_000) -> list[int]:
    """Draw tokens that no other prompt has: every prompt in the bench is new unless it repeats one on purpose."""
    return [random.randrange(low, high) for _ in range(count)]
