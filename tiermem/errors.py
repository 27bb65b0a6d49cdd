"""One small tree of errors with stable codes.

The core and the client raise these; `tiermem.rpc.status` maps codes to gRPC status and back, in one place. Every
message names the offending value and the remedy.
"""

from __future__ import annotations

import enum


class Code(enum.StrEnum):
    """Stable names of what went wrong. Values never change meaning; they appear in messages, metrics and logs."""

    INTERNAL = "INTERNAL"
    INVALID_ARGUMENT = "INVALID_ARGUMENT"
    CONFIG = "CONFIG"
    NOT_FOUND = "NOT_FOUND"
    PERMISSION_DENIED = "PERMISSION_DENIED"
    UNSUPPORTED = "UNSUPPORTED"
    RESOURCE_EXHAUSTED = "RESOURCE_EXHAUSTED"
    WORKING_SET_TOO_LARGE = "WORKING_SET_TOO_LARGE"
    TIER_FULL = "TIER_FULL"
    IO_ERROR = "IO_ERROR"
    DATA_LOSS = "DATA_LOSS"
    DIRECTORY_IN_USE = "DIRECTORY_IN_USE"
    DAEMON_UNAVAILABLE = "DAEMON_UNAVAILABLE"
    DAEMON_TIMEOUT = "DAEMON_TIMEOUT"
    PROTOCOL = "PROTOCOL"


class TiermemError(Exception):
    """Base of every error that tiermem raises on purpose. `code` is stable, the text is for people."""

    code: Code = Code.INTERNAL


class InvalidArgument(TiermemError, ValueError):
    """An argument, or a field of a protocol message, has a value that cannot be served."""

    code = Code.INVALID_ARGUMENT


class ConfigError(InvalidArgument):
    """A configuration file, environment variable or option is unknown or malformed. Names key, value and origin."""

    code = Code.CONFIG


class NotFound(TiermemError, LookupError):
    """A handle, job or path does not exist, or belongs to someone else (the two are not told apart)."""

    code = Code.NOT_FOUND


class AccessDenied(TiermemError):
    """The peer's user id may not use this daemon, or a token is not its own."""

    code = Code.PERMISSION_DENIED


class Unsupported(TiermemError):
    """The script does something that tiermem cannot do exactly; refused instead of approximated."""

    code = Code.UNSUPPORTED


class ResourceExhausted(TiermemError):
    """Admission refused: floors, quotas or arenas do not fit. Nothing was changed."""

    code = Code.RESOURCE_EXHAUSTED


class WorkingSetTooLarge(ResourceExhausted):
    """A demand goes beyond the lane's budget with what the lane already holds."""

    code = Code.WORKING_SET_TOO_LARGE


class TierFull(TiermemError):
    """A tier has no room. Names directory (or tier) and bytes. The bundle's bytes stay where they were."""

    code = Code.TIER_FULL


class TierIOError(TiermemError, OSError):
    """The operating system refused a read or write. Names directory, bytes and errno. The source bytes are intact."""

    code = Code.IO_ERROR


class DataLoss(TiermemError):
    """Bytes read back are not the bytes that were stored, or the only copy was torn by a crash. Never zeros instead."""

    code = Code.DATA_LOSS


class DirectoryInUse(TiermemError):
    """Another daemon holds the lock of a flash directory."""

    code = Code.DIRECTORY_IN_USE


class DaemonUnavailable(TiermemError, ConnectionError):
    """The daemon cannot be reached, refused the session, or died."""

    code = Code.DAEMON_UNAVAILABLE


class DaemonTimeout(DaemonUnavailable, TimeoutError):
    """The daemon has been silent for longer than the deadline."""

    code = Code.DAEMON_TIMEOUT


class ProtocolError(TiermemError):
    """A message that no correct peer sends. The session that sent it is closed."""

    code = Code.PROTOCOL


_BY_CODE: dict[Code, type[TiermemError]] = {
    cls.code: cls
    for cls in (
        InvalidArgument,
        ConfigError,
        NotFound,
        AccessDenied,
        Unsupported,
        ResourceExhausted,
        WorkingSetTooLarge,
        TierFull,
        TierIOError,
        DataLoss,
        DirectoryInUse,
        DaemonUnavailable,
        DaemonTimeout,
        ProtocolError,
    )
}


def error_for(code: str, message: str) -> TiermemError:
    """The typed error for a code received over the wire; an unknown code (a newer peer) becomes the base class."""
    try:
        cls = _BY_CODE.get(Code(code), TiermemError)
    except ValueError:
        return TiermemError(f"{code}: {message}")
    return cls(message)
