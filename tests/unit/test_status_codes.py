from __future__ import annotations

import grpc
import pytest

from tiermem.errors import Code, DaemonTimeout, DaemonUnavailable, TiermemError, error_for
from tiermem.rpc.status import error_from_rpc, status_for

TEXT = "3 MiB at offset 7: not what was written; check the drive"


class Failed(grpc.RpcError, grpc.Call):
    """How a failed call looks to grpc's caller."""

    def __init__(self, code: grpc.StatusCode, details: str | None) -> None:
        self._code, self._details = code, details

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str | None:  # type: ignore[override]  # grpc returns None where the peer said nothing
        return self._details

    def initial_metadata(self) -> tuple[()]:
        return ()

    def trailing_metadata(self) -> tuple[()]:
        return ()

    def is_active(self) -> bool:
        return False

    def time_remaining(self) -> float:
        return 0.0

    def cancel(self) -> None:
        pass

    def add_callback(self, callback: object) -> bool:
        return False


@pytest.mark.parametrize("code", Code)
def test_every_error_crosses_the_wire_as_itself(code: Code) -> None:
    sent = error_for(code, TEXT)
    status, details = status_for(sent)
    assert status not in (grpc.StatusCode.OK, grpc.StatusCode.UNKNOWN)
    received = error_from_rpc(Failed(status, details))
    assert type(received) is type(sent)
    assert received.code is code
    assert str(received) == TEXT


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (Code.NOT_FOUND, grpc.StatusCode.NOT_FOUND),
        (Code.PERMISSION_DENIED, grpc.StatusCode.PERMISSION_DENIED),
        (Code.RESOURCE_EXHAUSTED, grpc.StatusCode.RESOURCE_EXHAUSTED),
        (Code.DATA_LOSS, grpc.StatusCode.DATA_LOSS),
        (Code.INTERNAL, grpc.StatusCode.INTERNAL),
    ],
)
def test_generic_tools_see_the_usual_status(code: Code, status: grpc.StatusCode) -> None:
    assert status_for(error_for(code, TEXT))[0] is status


def test_an_empty_text_is_kept() -> None:
    received = error_from_rpc(Failed(*status_for(error_for(Code.TIER_FULL, ""))))
    assert (received.code, str(received)) == (Code.TIER_FULL, "")


@pytest.mark.parametrize("details", [None, "", "Socket closed", "SHINY: polish less"])
def test_what_tiermem_did_not_say_means_that_the_daemon_cannot_be_reached(details: str | None) -> None:
    received = error_from_rpc(Failed(grpc.StatusCode.UNAVAILABLE, details))
    assert type(received) is DaemonUnavailable
    assert "tiermem serve" in str(received)
    assert (details or "") in str(received)


def test_silence_beyond_the_deadline_is_a_timeout() -> None:
    received = error_from_rpc(Failed(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded"))
    assert type(received) is DaemonTimeout
    assert "tiermem status" in str(received)


def test_an_error_without_a_call_is_no_mystery() -> None:
    received: TiermemError = error_from_rpc(grpc.RpcError("channel is closed"))
    assert type(received) is DaemonUnavailable
    assert "channel is closed" in str(received)
