"""Error codes to gRPC status and back: the one place where the two vocabularies meet."""

from __future__ import annotations

import grpc

from tiermem.errors import Code, DaemonTimeout, DaemonUnavailable, TiermemError, error_for

_STATUS: dict[Code, grpc.StatusCode] = {
    Code.INTERNAL: grpc.StatusCode.INTERNAL,
    Code.INVALID_ARGUMENT: grpc.StatusCode.INVALID_ARGUMENT,
    Code.CONFIG: grpc.StatusCode.INVALID_ARGUMENT,
    Code.NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    Code.PERMISSION_DENIED: grpc.StatusCode.PERMISSION_DENIED,
    Code.UNSUPPORTED: grpc.StatusCode.UNIMPLEMENTED,
    Code.RESOURCE_EXHAUSTED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Code.WORKING_SET_TOO_LARGE: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Code.TIER_FULL: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Code.IO_ERROR: grpc.StatusCode.UNAVAILABLE,
    Code.DATA_LOSS: grpc.StatusCode.DATA_LOSS,
    Code.DIRECTORY_IN_USE: grpc.StatusCode.FAILED_PRECONDITION,
    Code.DAEMON_UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    Code.DAEMON_TIMEOUT: grpc.StatusCode.DEADLINE_EXCEEDED,
    Code.PROTOCOL: grpc.StatusCode.FAILED_PRECONDITION,
}

_MAX_DETAILS_BYTES = 2000


def status_for(error: TiermemError) -> tuple[grpc.StatusCode, str]:
    """Status and details; the details begin with the stable code, so that the peer can rebuild the type.

    They are cut where gRPC, which percent-encodes them in a trailer of limited size, would lose status and all.
    """
    details = f"{error.code}: {error}".encode(errors="replace")
    cut = details if len(details) <= _MAX_DETAILS_BYTES else details[:_MAX_DETAILS_BYTES] + b" ..."
    return _STATUS[error.code], cut.decode(errors="ignore")


def error_from_rpc(error: grpc.RpcError) -> TiermemError:
    """The typed error for a failed call or stream; anything that did not come from tiermem means that the daemon is
    unavailable.
    """
    details = (error.details() if isinstance(error, grpc.Call) else None) or str(error)
    code, _, message = details.partition(": ")
    if code in Code.__members__:
        return error_for(code, message)
    if isinstance(error, grpc.Call) and error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
        return DaemonTimeout(f"the daemon did not answer in time ({details}); is it stopped? try `tiermem status`")
    return DaemonUnavailable(
        f"the connection to the daemon ended ({details}); look at its log, or start it with `tiermem serve`"
    )
