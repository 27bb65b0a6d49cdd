"""The side socket: proves who a trainer is, and passes it the descriptor of its arena.

It lies beside the gRPC socket (`<socket>.fd`), because gRPC carries neither credentials nor descriptors. AF_UNIX,
SOCK_SEQPACKET; every packet is one JSON object. The daemon sends

    {"protocol": 1, "token": "<32 hex digits>"}                at once; the token goes into Open on the gRPC stream
    {"arena": true, ...} with one descriptor (SCM_RIGHTS)      after Open was accepted
    {"protocol": 1, "error": {"code": ..., "message": ...}}    instead of the token; the connection is closed

and the client, after its arena has come, files that frozen weights may be read from (`file_receiver`):

    {"file": n} with one descriptor (SCM_RIGHTS)               n is the client's number, named in Adopt later
    {"file": n}  or  {"error": {"code": ..., "message": ...}}  the daemon's answer to it: taken, or refused and closed

What arrives from a client before its token is claimed closes the connection. A token can be claimed once, by one Open;
a connection that nobody claims is closed after ten seconds.
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import secrets
import socket
import struct
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiermem.errors import AccessDenied, DaemonUnavailable, NotFound, ResourceExhausted, TiermemError, Unsupported

PROTOCOL = 1
TOKEN_BYTES = 16

_UCRED = struct.Struct("iII")  # pid, uid, gid of SO_PEERCRED
_SO_PEERPIDFD = 77  # Linux 6.5; not in the socket module
_ACCEPT_PAUSE_S = 1.0

_log = logging.getLogger(__name__)


class Peer:
    """A trainer whose token was claimed. The claimer owns it: `close` gives back connection and pidfd.

    `pidfd` names the process that connected, even after its number was given to another; readable means: it has exited.
    """

    def __init__(self, connection: socket.socket, pid: int, uid: int, gid: int, pidfd: int) -> None:
        self.connection = connection
        self.pid = pid
        self.uid = uid
        self.gid = gid
        self.pidfd = pidfd
        self._closed = False

    def close(self) -> None:
        """Idempotent. A ProcessWatch on `pidfd` has to be closed before."""
        if not self._closed:
            self._closed = True
            self.connection.close()
            os.close(self.pidfd)

    def __str__(self) -> str:
        return f"process {self.pid} of user id {self.uid}"


@dataclass(frozen=True, slots=True)
class _Unclaimed:
    peer: Peer
    timer: asyncio.TimerHandle


class SideSocket:
    """All methods belong to the event loop's thread. `stop` leaves claimed peers to their owners."""

    def __init__(
        self,
        path: Path,
        *,
        owner_uid: int | None = None,
        allowed_uids: Collection[int] = (),
        unclaimed_timeout_s: float = 10.0,
        unclaimed_limit: int = 64,
    ) -> None:
        """`owner_uid` (this process's by default) and root may connect always, `allowed_uids` too."""
        self._path = path
        self._uids = {0, os.getuid() if owner_uid is None else owner_uid, *allowed_uids}
        self._mode = 0o666 if allowed_uids else 0o600
        self._unclaimed_timeout_s = unclaimed_timeout_s
        self._unclaimed_limit = unclaimed_limit
        self._unclaimed: dict[bytes, _Unclaimed] = {}
        self._listening: socket.socket | None = None

    async def start(self) -> None:
        """Bind and listen. The path has to be free (`prepare_runtime_directory`). Raises OSError."""
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            listening.setblocking(False)
            listening.bind(str(self._path))
            self._path.chmod(self._mode)  # before anyone can connect: `listen` comes after
            listening.listen(self._unclaimed_limit)
        except OSError:
            listening.close()
            raise
        self._listening = listening
        asyncio.get_running_loop().add_reader(listening, self._accept)

    async def stop(self) -> None:
        """Close the socket, remove its path and drop every unclaimed connection. Idempotent."""
        if self._listening is None:
            return
        asyncio.get_running_loop().remove_reader(self._listening)
        self._listening.close()
        self._listening = None
        self._path.unlink(missing_ok=True)
        for token in list(self._unclaimed):
            self._drop(token)

    @property
    def path(self) -> Path:
        """Where clients connect."""
        return self._path

    @property
    def unclaimed(self) -> int:
        """Connections that hold a token which no Open has named yet."""
        return len(self._unclaimed)

    def claim(self, token: bytes) -> Peer | None:
        """The peer that was given `token`; None where it is unknown, was claimed before, or its connection is gone."""
        entry = self._unclaimed.pop(bytes(token), None)
        if entry is None:
            return None
        self._forget(entry)
        return entry.peer

    async def send_descriptor(self, peer: Peer, fd: int, payload: dict[str, Any], timeout_s: float = 5.0) -> None:
        """Pass a copy of `fd`, with `payload`. Raises DaemonUnavailable where the peer has left or does not read."""
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    try:
                        socket.send_fds(peer.connection, [_packet(payload)], [fd])
                    except BlockingIOError:
                        await _writable(peer.connection)
                    else:
                        return
        except TimeoutError as error:
            raise DaemonUnavailable(f"{peer} has not read its side socket for {timeout_s:g} s") from error
        except OSError as error:
            raise DaemonUnavailable(
                f"{peer} closed its side socket before it got its arena: {error.strerror}"
            ) from error

    def _accept(self) -> None:
        assert self._listening is not None  # the reader is removed before
        while True:
            try:
                connection, _ = self._listening.accept()
            except BlockingIOError:
                return
            except ConnectionAbortedError:
                continue
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    raise
                # The socket stays readable: without a pause the loop would spin.
                _log.warning("side socket: cannot accept (%s); trying again in %g s", error.strerror, _ACCEPT_PAUSE_S)
                loop = asyncio.get_running_loop()
                loop.remove_reader(self._listening)
                loop.call_later(_ACCEPT_PAUSE_S, self._resume)
                return
            self._admit(connection)

    def _resume(self) -> None:
        if self._listening is not None:
            asyncio.get_running_loop().add_reader(self._listening, self._accept)

    def _admit(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        pid, uid, gid = _UCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
        try:
            if uid not in self._uids:
                raise AccessDenied(f"user id {uid} may not use this daemon; add it to daemon.allowed_uids")
            if len(self._unclaimed) >= self._unclaimed_limit:
                raise ResourceExhausted(f"{self._unclaimed_limit} connections wait for their session; try again later")
            peer = Peer(connection, pid, uid, gid, _open_pidfd(connection, pid))
        except TiermemError as error:
            _log.warning("side socket: process %d refused: %s", pid, error)
            _send_last(connection, {"protocol": PROTOCOL, "error": {"code": error.code.value, "message": str(error)}})
            return
        token = secrets.token_bytes(TOKEN_BYTES)
        try:
            connection.send(_packet({"protocol": PROTOCOL, "token": token.hex()}))
        except OSError as error:
            _log.info("side socket: %s hung up: %s", peer, error.strerror)
            peer.close()
            return
        loop = asyncio.get_running_loop()
        loop.add_reader(connection, self._drop, token)  # end of file, or input that no correct client sends
        self._unclaimed[token] = _Unclaimed(peer, loop.call_later(self._unclaimed_timeout_s, self._drop, token))

    def _drop(self, token: bytes) -> None:
        entry = self._unclaimed.pop(token)
        self._forget(entry)
        _log.info("side socket: %s left without a session", entry.peer)
        entry.peer.close()

    def _forget(self, entry: _Unclaimed) -> None:
        entry.timer.cancel()
        asyncio.get_running_loop().remove_reader(entry.peer.connection)


class ProcessWatch:
    """Calls `on_exit` once, in the event loop, when the process behind `pidfd` has exited. Does not close it."""

    def __init__(self, pidfd: int, on_exit: Callable[[], object]) -> None:
        self._loop = asyncio.get_running_loop()
        self._pidfd = pidfd
        self._on_exit = on_exit
        self._watching = True
        self._loop.add_reader(pidfd, self._exited)

    def close(self) -> None:
        """Stop watching; `on_exit` is not called any more. Idempotent; to be called before the pidfd is closed."""
        if self._watching:
            self._watching = False
            self._loop.remove_reader(self._pidfd)

    def _exited(self) -> None:
        self.close()
        self._on_exit()


async def _writable(connection: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_writer(connection, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_writer(connection)


def _packet(payload: dict[str, Any]) -> bytes:
    return json.dumps(payload, separators=(",", ":")).encode()


def _send_last(connection: socket.socket, payload: dict[str, Any]) -> None:
    with connection:
        try:
            connection.send(_packet(payload))
        except OSError as error:
            _log.info("side socket: a refused process did not wait for the reason: %s", error.strerror)


def _open_pidfd(connection: socket.socket, pid: int) -> int:
    """From the connection where the kernel can: exact even if the number was reused, and across pid namespaces."""
    try:
        raw = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD, 4)
        return int.from_bytes(raw, "little")
    except OSError as error:
        if error.errno != errno.ENOPROTOOPT:
            raise NotFound(f"process {pid} has exited before it was asked who it is: {error.strerror}") from error
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        raise Unsupported(
            f"process {pid} cannot be watched: {error.strerror}; let trainer and daemon share a pid namespace"
        ) from error
