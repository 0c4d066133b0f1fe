"""The errors a caller can meet, and nothing else.

`server/status.py` maps each of them to one gRPC status code; below the server nobody knows about gRPC.
"""


class PrefixCacheError(Exception):
    """Base of every error that is raised on purpose in this package."""


class InvalidRequest(PrefixCacheError):
    """One field of a request cannot be served as it stands.

    Attributes:
        field: Name of the field as it stands in the proto file, such as `temperature`.
        reason: What is wrong with it and what would be right, in one sentence.
    """

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field
        self.reason = reason


class Unauthenticated(PrefixCacheError):
    """The call carries no key, or none that is known."""


class Overloaded(PrefixCacheError):
    """The queue is full, or too long for the request's deadline; the same request may succeed a little later.

    Attributes:
        retry_after_ms: How long the client should wait before it tries again; None where waiting does not help.
    """

    def __init__(self, reason: str, retry_after_ms: int | None) -> None:
        super().__init__(reason)
        self.retry_after_ms = retry_after_ms


class DeadlinePassed(PrefixCacheError):
    """The request's deadline has passed before anything was computed for it."""


class Aborted(PrefixCacheError):
    """Somebody other than the call itself has asked for its end."""


class Unsupported(PrefixCacheError):
    """A call of a foreign protocol that this server has nothing behind; the message says why."""


class CursorExpired(PrefixCacheError):
    """A subscriber's last batch of events is not remembered; it must begin with a snapshot."""


class EventsLost(PrefixCacheError):
    """A subscriber is too slow: events that it has not read yet are forgotten; it must begin with a snapshot."""


class NotServing(PrefixCacheError):
    """The engine is starting, draining, stuck or gone; another replica may answer."""


class EngineFailed(PrefixCacheError):
    """The engine met an error that it cannot recover from; the process is about to exit."""


class ModelError(PrefixCacheError):
    """The model cannot be loaded or is not supported; the message says what to do about it."""


class ConfigError(PrefixCacheError):
    """Settings that cannot work; the message lists every problem that was found."""
