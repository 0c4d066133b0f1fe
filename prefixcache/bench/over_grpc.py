"""Measurements of a running server, as a client sees them."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from prefixcache.bench.bare import random_tokens
from prefixcache.bench.figures import Figure
from prefixcache.client import AsyncClient


@dataclass(frozen=True, slots=True)
class Answer:
    """One request's times as its client saw them.

    Attributes:
        arrivals_s: When each token arrived, on `time.perf_counter`'s clock.
    """

    sent_s: float
    arrivals_s: list[float]
    prompt_tokens: int
    cached_tokens: int

    @property
    def ttft_ms(self) -> float:
        return (self.arrivals_s[0] - self.sent_s) * 1e3

    @property
    def itl_ms(self) -> list[float]:
        return [(b - a) * 1e3 for a, b in zip(self.arrivals_s, self.arrivals_s[1:], strict=False)]


class ServiceBench:
    """Sends requests to one server. Tokens are chosen greedily and never end early."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    async def ask(self, token_ids: list[int], max_tokens: int, *, use_cache: bool = True) -> Answer:
        arrivals: list[float] = []
        sent = time.perf_counter()
        async for delta in self._client.generate(
            token_ids=token_ids, max_tokens=max_tokens, temperature=0.0, ignore_eos=True, use_cache=use_cache
        ):
            arrivals += [time.perf_counter()] * len(delta.token_ids)
            usage = delta.usage
        assert len(arrivals) == max_tokens
        return Answer(sent, arrivals, usage.prompt_tokens, usage.cached_tokens)

    async def warm_up(self) -> None:
        """Run prompts that nothing measured later shares."""
        for length in (16, 300, 64):
            await self.ask(random_tokens(length), 4)

    async def cold_ttft(self, num_tokens: int, repeat: int) -> Figure:
        """TTFT of prompts never seen before."""
        answers = [await self.ask(random_tokens(num_tokens), 1) for _ in range(repeat)]
        assert all(answer.cached_tokens == 0 for answer in answers)
        return Figure([answer.ttft_ms for answer in answers], "ms")

    async def repeated_ttft(self, prompt: list[int], repeat: int) -> Figure:
        """TTFT of a prompt sent before."""
        await self.ask(prompt, 1)
        answers = [await self.ask(prompt, 1) for _ in range(repeat)]
        assert all(answer.cached_tokens == len(prompt) - 1 for answer in answers)
        return Figure([answer.ttft_ms for answer in answers], "ms")

    async def extended_ttft(self, prefix: list[int], num_new_tokens: int, repeat: int) -> Figure:
        """TTFT of a known prefix with new tokens behind it, other ones each time."""
        await self.ask(prefix, 1)
        answers = [await self.ask(prefix + random_tokens(num_new_tokens), 1) for _ in range(repeat)]
        assert all(answer.cached_tokens >= len(prefix) for answer in answers)
        return Figure([answer.ttft_ms for answer in answers], "ms")

    async def itl(self, prompt: list[int], num_tokens: int) -> Figure:
        """Time between tokens for one client."""
        answer = await self.ask(prompt, num_tokens + 2)
        return Figure(answer.itl_ms[1:], "ms")

    async def shared_throughput(
        self, prefix: list[int], num_clients: int, suffix_tokens: int, max_tokens: int, repeat: int
    ) -> Figure:
        """Output tokens a second of clients that share a known prefix, each with a tail and an answer of its own."""
        await self.ask(prefix, 1)
        values = []
        for _ in range(repeat):
            prompts = [prefix + random_tokens(suffix_tokens) for _ in range(num_clients)]
            started = time.perf_counter()
            await asyncio.gather(*(self.ask(prompt, max_tokens) for prompt in prompts))
            values.append(num_clients * max_tokens / (time.perf_counter() - started))
        return Figure(values, "tokens/s")

    async def unique_throughput(
        self, num_tokens: int, num_requests: int, max_tokens: int, repeat: int
    ) -> tuple[Figure, Figure]:
        """Output tokens a second of prompts that share nothing: with the cache, and without it, in turns."""
        rates: dict[bool, list[float]] = {True: [], False: []}
        for turn in range(2 * repeat):
            use_cache = turn % 2 == 0
            prompts = [random_tokens(num_tokens) for _ in range(num_requests)]
            started = time.perf_counter()
            await asyncio.gather(*(self.ask(prompt, max_tokens, use_cache=use_cache) for prompt in prompts))
            rates[use_cache].append(num_requests * max_tokens / (time.perf_counter() - started))
        return Figure(rates[True], "tokens/s"), Figure(rates[False], "tokens/s")
