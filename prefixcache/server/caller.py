"""Who calls: set by the interceptor around each call, read by the servicer within it."""

from __future__ import annotations

from contextvars import ContextVar

# The authenticated tenant of the call that this task serves; empty where the server asks for no keys.
TENANT: ContextVar[str] = ContextVar("tenant", default="")
