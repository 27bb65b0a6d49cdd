"""Finding a daemon and dialling it: endpoint resolution, the gRPC channel, the version handshake. No module-level
channel: a forked child must not inherit one by accident.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import grpc

from tiermem.config import Host, socket_candidates
from tiermem.errors import DaemonUnavailable, InvalidArgument
from tiermem.rpc import codec
from tiermem.rpc.status import error_from_rpc
from tiermem.rpc.v1 import tiermem_pb2 as pb
from tiermem.rpc.v1 import tiermem_pb2_grpc as pb_grpc

EMBEDDED = "embedded"
_OPTIONS = [
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_send_message_length", codec.MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", codec.MAX_MESSAGE_BYTES),
]


def resolve_endpoint(endpoint: str | os.PathLike[str] | None, environ: Mapping[str, str]) -> Path | None:
    """The socket to dial, or None for an embedded daemon: the argument, else TIERMEM_ENDPOINT, else a running service,
    else embedded.

    Raises InvalidArgument for a form that is not a Unix socket's path ("unix:/path" or "/path").
    """
    text = os.fspath(endpoint) if endpoint is not None else environ.get("TIERMEM_ENDPOINT", "")
    if text == EMBEDDED:
        return None
    if text:
        path = text.removeprefix("unix:")
        if "://" in text or (not path.startswith(("/", "~", ".")) and ":" in path):
            raise InvalidArgument(
                f"endpoint {text!r} is not a Unix socket; give unix:/path/tiermemd.sock, or 'embedded'"
            )
        return Path(path).expanduser()
    return next((socket for socket in socket_candidates(environ, Host.current()) if _is_socket(socket)), None)


def _is_socket(path: Path) -> bool:
    try:
        return stat.S_ISSOCK(path.stat().st_mode)
    except OSError:
        return False


@dataclass(frozen=True, slots=True)
class Connection:
    """A dialled daemon: the channel, its stub, and what it said of itself."""

    socket: Path
    channel: grpc.Channel
    stub: pb_grpc.TierMemStub
    info: pb.GetInfoResponse

    def close(self) -> None:
        self.channel.close()


def dial(socket: Path, timeout_s: float) -> Connection:
    """Connect and shake hands. Raises DaemonUnavailable or DaemonTimeout naming the socket and the remedy."""
    channel = grpc.insecure_channel(f"unix:{socket.absolute()}", options=_OPTIONS)
    stub = pb_grpc.TierMemStub(channel)  # type: ignore[no-untyped-call]
    try:
        info = stub.GetInfo(pb.GetInfoRequest(), timeout=timeout_s)
    except grpc.RpcError as error:
        channel.close()
        cause = error_from_rpc(error)
        raise type(cause)(f"no tiermem daemon answers at {socket}: {cause}") from error
    if info.protocol != codec.PROTOCOL:
        channel.close()
        raise DaemonUnavailable(
            f"the daemon at {socket} (tiermem {info.version}) speaks protocol {info.protocol}, this client "
            f"{codec.PROTOCOL}; install the same version on both sides"
        )
    return Connection(socket, channel, stub, info)
