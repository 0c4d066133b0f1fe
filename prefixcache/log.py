"""Logging set-up, and the one line that every finished request leaves.

Nothing in here ever sees a prompt, a token id, generated text or a cache salt, so none of them can reach a log.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any, Literal, TextIO

LogFormat = Literal["text", "json"]

_REQUESTS = logging.getLogger("prefixcache.requests")


@dataclass(frozen=True, slots=True)
class RequestLine:
    """What is said about one finished call. The keys are fixed; a value that is not known is None."""

    request_id: str
    method: str
    outcome: str
    code: str
    peer: str
    total_ms: float
    tenant: str | None = None
    queue_ms: float | None = None
    prefill_ms: float | None = None
    ttft_ms: float | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None


def log_request(line: RequestLine) -> None:
    """Writes the line of one finished request."""
    _REQUESTS.info("request", extra={"fields": asdict(line)})


def setup_logging(level: str, log_format: LogFormat) -> None:
    """Sends all logs of the process to standard error, one line each, replacing any earlier set-up."""
    handler = StderrHandler()
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(True)


class StderrHandler(logging.StreamHandler[TextIO]):
    """Writes to what `sys.stderr` is at the time, so that lines go above a spinner and not through it."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


class TextFormatter(logging.Formatter):
    """One line for people: time, level, logger, message, then `key=value` for each field that has a value."""

    def format(self, record: logging.LogRecord) -> str:
        parts = [_timestamp(record), record.levelname, record.name, record.getMessage()]
        parts += [f"{key}={_plain(value)}" for key, value in _fields(record).items() if value is not None]
        line = " ".join(parts)
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonFormatter(logging.Formatter):
    """One JSON object a line; the fields of a request stand beside `time`, `level`, `logger` and `message`."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": _timestamp(record),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        entry |= {key: _rounded(value) for key, value in _fields(record).items()}
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry)


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    return getattr(record, "fields", {})


def _timestamp(record: logging.LogRecord) -> str:
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03d}Z"


def _plain(value: Any) -> str:
    """A value as one word; text with blanks, quotes or control characters is quoted, so it cannot forge a line."""
    if isinstance(value, str):
        is_one_word = value.isascii() and value.isprintable() and not set(value) & set(' "=')
        return value if is_one_word else json.dumps(value)
    return str(_rounded(value))


def _rounded(value: Any) -> Any:
    return round(value, 3) if isinstance(value, float) else value
