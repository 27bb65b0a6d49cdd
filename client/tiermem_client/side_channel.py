"""The trainer's end of the side socket: who we are, proven by the kernel, and the descriptor of our arena.

The protocol is described where it is served, in tiermem_daemon.listener.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from pathlib import Path
from typing import Any

from tiermem.errors import AccessDenied, DaemonTimeout, DaemonUnavailable, ProtocolError, error_for

PROTOCOL = 1
_PACKET_BYTES = 64 * 1024
_FD = struct.Struct("i")


class SideChannel:
    """One connection, used by one thread: `connect`, `receive_descriptor`, `send_file` for each file, `close`."""

    def __init__(self) -> None:
        self._socket: socket.socket | None = None
        self._path = Path()

    def connect(self, path: Path, timeout_s: float) -> bytes:
        """The token for Open. Raises DaemonUnavailable, DaemonTimeout, AccessDenied, ProtocolError."""
        if self._socket is not None:
            raise ProtocolError(f"the side channel is connected to {self._path}; close it first")
        self._path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._socket.settimeout(timeout_s)
            try:
                self._socket.connect(str(path))
            except TimeoutError as error:
                raise self._silent(timeout_s) from error
            except PermissionError as error:
                raise AccessDenied(f"{path}: {error.strerror}; the daemon's user has to allow yours") from error
            except OSError as error:
                raise DaemonUnavailable(f"no daemon answers at {path}: {error.strerror or error}") from error
            hello, fds = self._receive(timeout_s)
            _close_all(fds)
            if (spoken := hello.get("protocol")) != PROTOCOL:
                raise ProtocolError(f"the daemon at {path} speaks side protocol {spoken!r}, not {PROTOCOL}")
            try:
                return bytes.fromhex(hello["token"])
            except (KeyError, TypeError, ValueError) as error:
                raise ProtocolError(f"the daemon at {path} sent no token but {hello!r}") from error
        except BaseException:
            self.close()
            raise

    def receive_descriptor(self, timeout_s: float) -> tuple[int, dict[str, Any]]:
        """The descriptor (close-on-exec; the caller's to close) and what was sent with it. Raises as `connect` does."""
        payload, fds = self._receive(timeout_s)
        if len(fds) != 1:
            _close_all(fds)
            raise ProtocolError(f"the daemon at {self._path} sent {len(fds)} descriptors with {payload!r}, not 1")
        return fds[0], payload

    def send_file(self, number: int, fd: int, timeout_s: float) -> None:
        """Pass a copy of `fd` to the daemon, which knows it as `number` from then on. Raises the daemon's refusal
        (InvalidArgument, ResourceExhausted), DaemonUnavailable, DaemonTimeout.
        """
        if self._socket is None:
            raise ProtocolError("the side channel is not connected")
        self._socket.settimeout(timeout_s)
        try:
            socket.send_fds(self._socket, [json.dumps({"file": number}).encode()], [fd])
        except TimeoutError as error:
            raise self._silent(timeout_s) from error
        except OSError as error:
            raise DaemonUnavailable(f"the daemon at {self._path} closed the side socket: {error.strerror}") from error
        answer, fds = self._receive(timeout_s)
        _close_all(fds)
        if answer.get("file") != number:
            raise ProtocolError(f"the daemon at {self._path} answered file {number} with {answer!r}")

    def close(self) -> None:
        """Idempotent. Descriptors received stay open."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def __enter__(self) -> SideChannel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _receive(self, timeout_s: float) -> tuple[dict[str, Any], list[int]]:
        if self._socket is None:
            raise ProtocolError("the side channel is not connected")
        self._socket.settimeout(timeout_s)
        try:
            # Not socket.recv_fds: up to Python 3.11 it drops the flag, and every child process would inherit the arena.
            packet, ancillary, _, _ = self._socket.recvmsg(
                _PACKET_BYTES, socket.CMSG_LEN(_FD.size), socket.MSG_CMSG_CLOEXEC
            )
        except TimeoutError as error:
            raise self._silent(timeout_s) from error
        except OSError as error:
            raise DaemonUnavailable(f"the daemon at {self._path} closed the side socket: {error.strerror}") from error
        fds = [_FD.unpack(data)[0] for _, kind, data in ancillary if kind == socket.SCM_RIGHTS]
        try:
            if not packet:
                raise DaemonUnavailable(f"the daemon at {self._path} closed the side socket")
            return self._decode(packet), fds
        except BaseException:
            _close_all(fds)
            raise

    def _decode(self, packet: bytes) -> dict[str, Any]:
        try:
            payload = json.loads(packet)
        except ValueError as error:
            raise ProtocolError(f"the daemon at {self._path} sent no JSON but {packet[:80]!r}") from error
        if not isinstance(payload, dict):
            raise ProtocolError(f"the daemon at {self._path} sent no object but {payload!r}")
        refusal = payload.get("error")
        if isinstance(refusal, dict):
            raise error_for(str(refusal.get("code")), f"{self._path}: {refusal.get('message')}")
        return payload

    def _silent(self, timeout_s: float) -> DaemonTimeout:
        return DaemonTimeout(f"the daemon at {self._path} has been silent for {timeout_s:g} s")


def _close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
