"""Log lines."""

from __future__ import annotations

import json
import logging

import pytest

from prefixcache.log import RequestLine, log_request, setup_logging

LINE = RequestLine(
    request_id="abc",
    method="Generate",
    outcome="ok",
    code="OK",
    peer="ipv4:127.0.0.1:1",
    total_ms=12.34567,
    prompt_tokens=5,
    cached_tokens=0,
)


@pytest.fixture(autouse=True)
def restored_logging():
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level
    logging.captureWarnings(False)


def test_a_finished_request_is_one_line_of_text(capsys: pytest.CaptureFixture[str]):
    setup_logging("info", "text")
    log_request(LINE)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(
        "INFO prefixcache.requests request request_id=abc method=Generate outcome=ok code=OK "
        "peer=ipv4:127.0.0.1:1 total_ms=12.346 prompt_tokens=5 cached_tokens=0"
    )


def test_a_finished_request_is_one_json_object_with_fixed_keys(capsys: pytest.CaptureFixture[str]):
    setup_logging("info", "json")
    log_request(LINE)
    entry = json.loads(capsys.readouterr().err)
    assert list(entry) == [
        "time",
        "level",
        "logger",
        "message",
        "request_id",
        "method",
        "outcome",
        "code",
        "peer",
        "total_ms",
        "tenant",
        "queue_ms",
        "prefill_ms",
        "ttft_ms",
        "prompt_tokens",
        "cached_tokens",
        "completion_tokens",
    ]
    assert entry["total_ms"] == 12.346
    assert entry["ttft_ms"] is None


def test_a_request_id_cannot_forge_fields_or_lines(capsys: pytest.CaptureFixture[str]):
    setup_logging("info", "text")
    log_request(RequestLine('x" outcome=ok\nINFO', "Generate", "invalid", "INVALID_ARGUMENT", "peer", 1.0))
    (line,) = capsys.readouterr().err.splitlines()
    assert r'request_id="x\" outcome=ok\nINFO" method=Generate' in line


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_traceback_stays_with_its_line(capsys: pytest.CaptureFixture[str], log_format: str):
    setup_logging("info", log_format)  # type: ignore[arg-type]
    try:
        raise ValueError("boom")
    except ValueError:
        logging.getLogger("x").exception("it failed: %s", "badly")
    text = capsys.readouterr().err
    assert "it failed: badly" in text
    assert "ValueError: boom" in text
    if log_format == "json":
        assert "ValueError: boom" in json.loads(text)["exception"]


def test_the_level_is_a_threshold_and_a_second_set_up_replaces_the_first(capsys: pytest.CaptureFixture[str]):
    setup_logging("debug", "text")
    setup_logging("warning", "text")
    logging.getLogger("x").info("no")
    logging.getLogger("x").warning("yes")
    assert [line.rpartition(" ")[2] for line in capsys.readouterr().err.splitlines()] == ["yes"]
