"""Sequence: one sample of one request while it is being computed.

     add            schedule            last token
───▶ WAITING ─────▶ RUNNING ──────────▶ FINISHED
        ▲              │
        └── preempt ───┘
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from prefixcache.cache.tiers import Search
from prefixcache.request import Namespace, Tier
from prefixcache.tree.lease import Lease
from prefixcache.tree.node import BYTES_PER_TOKEN, common_prefix_bytes, token_key


class SequenceState(Enum):
    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


@dataclass(slots=True, eq=False)
class Sequence:
    """Tokens of one sample, and how far its K/V is computed. Engine thread only.

    Attributes:
        arrival: Serial number in order of arrival.
        namespace: Whose cache it uses; None for none.
        token_ids: Prompt and output. The last sampled token is in it before its K/V exists.
        max_tokens: Most output tokens.
        tenant: Whose request it is, also where it uses no cache.
        reuse: False where every prompt position must really be computed.
        num_computed_tokens: Leading tokens whose K/V is in the lease's pages.
        search: What the lower tiers have of the prompt; None where they are not asked.
        cached_tokens: Prompt tokens that needed no computing, by tier, as its first lease counts them; None before.
        overtaken: In how many steps a younger sequence was computed while this one was passed over.
    """

    arrival: int
    namespace: Namespace | None
    token_ids: list[int]
    max_tokens: int
    tenant: str = ""
    reuse: bool = True
    prompt_key: bytes = b""
    num_prompt_tokens: int = 0
    state: SequenceState = SequenceState.WAITING
    lease: Lease | None = None
    num_computed_tokens: int = 0
    search: Search | None = None
    cached_tokens: dict[Tier, int] | None = None
    overtaken: int = 0
    known_tokens: tuple[int, int] = field(default=(-1, 0))  # (version of the cache, tokens known then)

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.token_ids)
        self.prompt_key = token_key(self.token_ids)

    @property
    def num_cached_tokens(self) -> int:
        return sum((self.cached_tokens or {}).values())

    @property
    def output_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def is_decoding(self) -> bool:
        """Whether it is past its prompt: one token goes in, one comes out."""
        return self.num_uncomputed_tokens == 1 and self.num_output_tokens > 0

    def key(self) -> bytes:
        """Encode all tokens, prompt and output, for the cache."""
        return self.prompt_key + token_key(self.output_ids)

    def num_key_tokens_shared(self, other: Sequence) -> int:
        """Count the leading prompt tokens that two sequences have in common, as far as they may share K/V."""
        if self.namespace is None or self.namespace != other.namespace:
            return 0
        return common_prefix_bytes(other.prompt_key, self.prompt_key, 0) // BYTES_PER_TOKEN
