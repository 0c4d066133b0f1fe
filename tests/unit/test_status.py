"""The table of errors and statuses."""

from __future__ import annotations

import pytest
from grpc import StatusCode

from prefixcache.errors import EngineFailed, InvalidRequest, ModelError, NotServing, Overloaded
from prefixcache.metrics import Outcome
from prefixcache.server.status import status_of


@pytest.mark.parametrize(
    ("error", "code", "outcome", "message"),
    [
        (InvalidRequest("top_p", "too big"), StatusCode.INVALID_ARGUMENT, Outcome.INVALID, "top_p: too big"),
        (Overloaded("full", 250), StatusCode.RESOURCE_EXHAUSTED, Outcome.OVERLOADED, "full"),
        (NotServing("stuck"), StatusCode.UNAVAILABLE, Outcome.NOT_SERVING, "stuck"),
        (EngineFailed("boom"), StatusCode.INTERNAL, Outcome.FAILED, "boom"),
    ],
)
def test_errors_raised_on_purpose_keep_their_message(
    error: Exception, code: StatusCode, outcome: Outcome, message: str
):
    status = status_of(error, "id-1")
    assert (status.code, status.outcome, status.message) == (code, outcome, message)


def test_only_overload_pushes_back():
    assert status_of(Overloaded("full", 250), "id-1").metadata == (("grpc-retry-pushback-ms", "250"),)
    assert status_of(NotServing("stuck"), "id-1").metadata == ()


@pytest.mark.parametrize("error", [ValueError("secret"), ModelError("secret"), KeyError("secret")])
def test_an_unforeseen_error_says_where_to_look_and_nothing_else(error: Exception):
    status = status_of(error, "id-1")
    assert status.code is StatusCode.INTERNAL
    assert status.outcome is Outcome.FAILED
    assert status.message == "internal error, id=id-1"
