"""PageStore: what every store outside the process can do, and the closed list of ways in which it can fail.

Stores hold opaque values: what is in one, and whether it is still sound, is for `kv/codec.py` to say.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Protocol

Value = bytes | bytearray | memoryview  # a memoryview of plain bytes in one dimension


class PageStore(Protocol):
    """Values by key, in batches. Event loop only: all calls come from the one loop that the store lives on.

    Every call may raise StoreError, whatever it had done by then. A call that is cancelled leaves nothing behind:
    no later call can receive its answer.
    """

    async def count_leading(self, keys: Sequence[bytes]) -> int:
        """Returns how many of the first keys are there without a gap. A hint: what `read` brings is what counts."""

    async def read(self, keys: Sequence[bytes]) -> list[Value | None]:
        """Returns the values in the order of `keys`, None where there is none, and renews how long they are kept."""

    async def write(self, entries: Sequence[tuple[bytes, Value]]) -> None:
        """Stores the values, each whole or not at all, over whatever was there."""

    async def delete(self, keys: Sequence[bytes]) -> None:
        """Removes what is there."""

    async def close(self) -> None:
        """Lets go of files and connections. Every later call raises StoreClosed."""


class StoreError(Exception):
    """The store could not do it: counted and treated as a miss, never shown to a client.

    Attributes:
        kind: Name of this way to fail, for metrics and logs.
        is_answer: The store is there and said no, so that asking again at once is pointless.
    """

    kind: ClassVar[str] = "error"
    is_answer: ClassVar[bool] = True


class StoreTimeout(StoreError):
    """No answer within the time limit."""

    kind = "timeout"
    is_answer = False


class StoreUnreachable(StoreError):
    """No connection, or one that broke."""

    kind = "unreachable"
    is_answer = False


class StoreUnavailable(StoreError):
    """Not even tried, because earlier calls failed (`guard.py`)."""

    kind = "unavailable"
    is_answer = False


class StoreClosed(StoreError):
    """The store was closed by its owner."""

    kind = "closed"
    is_answer = False


class ValueTooLarge(StoreError):
    """A value above the store's limit; nothing of the call was written, and trying again would not help."""

    kind = "too_large"
    is_answer = False


class StoreFull(StoreError):
    """No room for what was to be written."""

    kind = "full"


class StoreReadOnly(StoreError):
    """The store takes no changes at present, such as a Redis replica."""

    kind = "read_only"


class StoreAuth(StoreError):
    """Wrong or missing credentials, or too few rights."""

    kind = "auth"


class StoreCluster(StoreError):
    """A cluster where none was expected, or one that cannot serve a key."""

    kind = "cluster"


class StoreUnsupported(StoreError):
    """The server lacks a command that is needed."""

    kind = "unsupported"


class StoreDamaged(StoreError):
    """The store's own structure on disk cannot be read."""

    kind = "damaged"


ERROR_KINDS = tuple(
    error.kind
    for error in (
        StoreError,
        StoreTimeout,
        StoreUnreachable,
        StoreUnavailable,
        StoreClosed,
        ValueTooLarge,
        StoreFull,
        StoreReadOnly,
        StoreAuth,
        StoreCluster,
        StoreUnsupported,
        StoreDamaged,
    )
)
