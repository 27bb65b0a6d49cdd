"""Files that a trainer passes in over its side socket: frozen weights are read from where they lie.

A descriptor, not a path: the daemon opens nothing on behalf of another user, it reads what that user has opened.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import struct
from collections.abc import Callable

from tiermem.errors import ProtocolError, ResourceExhausted, TiermemError

_log = logging.getLogger(__name__)
_PACKET_BYTES = 4096
_FD = struct.Struct("i")


class FileReceiver:
    """Reads `{"file": n}` frames, each with one descriptor, from a claimed peer's connection, and answers each before
    it reads the next. Lives on the event loop. `take(n, fd)` is called in a thread, as the file may be on a disk that
    hangs; it owns the descriptor from its call on, and a TiermemError of its is the answer.

    A frame that no correct client sends ends the reading, not the session. To be closed before the connection is.
    """

    def __init__(self, connection: socket.socket, take: Callable[[int, int], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._connection = connection
        self._take = take
        self._reading = True
        self._taking: asyncio.Task[None] | None = None
        self._loop.add_reader(connection, self._readable)

    def close(self) -> None:
        """Stop reading. Idempotent."""
        if self._reading:
            self._reading = False
            self._loop.remove_reader(self._connection)

    def _readable(self) -> None:
        try:
            # Not socket.recv_fds: up to Python 3.11 it drops the flag
            packet, ancillary, flags, _ = self._connection.recvmsg(
                _PACKET_BYTES, socket.CMSG_LEN(_FD.size), socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return
        except OSError as error:
            _log.info("side socket: reading has ended: %s", error.strerror)
            self.close()
            return
        fds = [_FD.unpack(data)[0] for _, kind, data in ancillary if kind == socket.SCM_RIGHTS]
        if not packet:
            for fd in fds:
                os.close(fd)
            self.close()
            return
        self._loop.remove_reader(self._connection)
        self._taking = self._loop.create_task(
            self._receive(packet, fds, cut=bool(flags & (socket.MSG_CTRUNC | socket.MSG_TRUNC)))
        )

    async def _receive(self, packet: bytes, fds: list[int], cut: bool) -> None:
        try:
            try:
                number = _file_number(packet, len(fds), cut)
            except TiermemError:
                for fd in fds:
                    os.close(fd)
                raise
            await asyncio.to_thread(self._take, number, fds[0])
        except TiermemError as error:
            _log.warning("side socket: a file was refused: %s", error)
            self._answer({"error": {"code": error.code.value, "message": str(error)}})
            if isinstance(error, ProtocolError):
                self._reading = False
        else:
            self._answer({"file": number})
        if self._reading:
            self._loop.add_reader(self._connection, self._readable)

    def _answer(self, payload: dict[str, object]) -> None:
        """A client that does not read its answers gets no more of them."""
        if not self._reading:
            return
        try:
            self._connection.send(json.dumps(payload, separators=(",", ":")).encode())
        except OSError as error:
            _log.info("side socket: a client did not wait for its answer: %s", error.strerror)
            self._reading = False


def _file_number(packet: bytes, descriptors: int, cut: bool) -> int:
    """The number in a frame. Raises ProtocolError, or ResourceExhausted where the descriptor could not be received."""
    try:
        frame = json.loads(packet)
    except (ValueError, RecursionError):
        frame = None
    number = frame.get("file") if isinstance(frame, dict) else None
    if type(number) is not int or not 0 <= number < 1 << 32:
        raise ProtocolError(f"the side socket takes files, numbered from 0 on, not {packet[:80]!r}")
    if cut and not descriptors:
        raise ResourceExhausted(f"file {number} lost its descriptor on the way; raise the daemon's open file limit")
    if cut or descriptors != 1:
        raise ProtocolError(f"file {number} did not come with one descriptor alone")
    return number
