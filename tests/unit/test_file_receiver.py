"""The files of a trainer arrive over the side socket: what is taken, what is answered, what ends the reading."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tiermem.errors import ResourceExhausted
from tiermem_daemon.file_receiver import FileReceiver

WAIT_S = 10.0
Client = Callable[[bytes, list[int]], Awaitable[Any]]


class Table:
    """Takes files on a thread, as a job does; refuses number 9."""

    def __init__(self) -> None:
        self.taken: list[int] = []
        self.threads: set[int] = set()

    def take(self, number: int, fd: int) -> None:
        self.threads.add(threading.get_ident())
        os.close(fd)
        if number == 9:
            raise ResourceExhausted("file 9 is one too many")
        self.taken.append(number)


def served(test: Callable[[Client, Table], Awaitable[None]]) -> None:
    """Run `test` with a client's end of a connection that is read; its answers are decoded."""

    async def run() -> None:
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        here.setblocking(False)
        there.settimeout(1.0)
        table = Table()
        receiver = FileReceiver(here, table.take)

        def ask(packet: bytes, fds: list[int]) -> Any:
            try:
                socket.send_fds(there, [packet], fds)
                return json.loads(there.recv(4096))
            except TimeoutError:
                return None

        try:
            async with asyncio.timeout(WAIT_S):
                await test(lambda packet, fds: asyncio.to_thread(ask, packet, fds), table)
        finally:
            receiver.close()
            receiver.close()
            here.close()
            there.close()

    asyncio.run(run())


def test_files_are_taken_one_by_one_and_answered(tmp_path: Path) -> None:
    async def test(client: Client, table: Table) -> None:
        with (tmp_path / "file").open("wb") as file:
            for number in (0, 5, 2**32 - 1):
                frame = json.dumps({"file": number}).encode()
                assert await client(frame, [file.fileno()]) == {"file": number}
        assert table.taken == [0, 5, 2**32 - 1]
        assert threading.get_ident() not in table.threads, "the loop would hang with the file's disk"

    served(test)


def test_a_refusal_is_an_answer_and_the_next_file_is_taken(tmp_path: Path) -> None:
    async def test(client: Client, table: Table) -> None:
        with (tmp_path / "file").open("wb") as file:
            answer = await client(b'{"file": 9}', [file.fileno()])
            assert answer == {"error": {"code": "RESOURCE_EXHAUSTED", "message": "file 9 is one too many"}}
            assert await client(b'{"file": 1}', [file.fileno()]) == {"file": 1}

    served(test)


@pytest.mark.parametrize(
    ("packet", "descriptors"),
    [
        (b'{"file": 1}', 0),
        (b'{"file": 1}', 2),
        (b'{"file": 1}', 100),
        (b'{"file": -1}', 1),
        (b'{"file": 4294967296}', 1),
        (b'{"file": true}', 1),
        (b'{"file": 1.0}', 1),
        (b'{"path": "/etc/shadow"}', 1),
        (b"[]", 1),
        (b"\xff\xfe", 1),
        (b"[" * 4000, 1),
        (b" " * 5000 + b'{"file": 1}', 1),
    ],
    ids=lambda value: str(value)[:24],
)
def test_what_no_client_sends_is_answered_and_ends_the_reading(tmp_path: Path, packet: bytes, descriptors: int) -> None:
    async def test(client: Client, table: Table) -> None:
        with (tmp_path / "file").open("wb") as file:
            answer = await client(packet, [file.fileno()] * descriptors)
            assert answer["error"]["code"] == "PROTOCOL"
            assert await client(b'{"file": 2}', [file.fileno()]) is None, "it is still read"
        assert table.taken == []

    served(test)


def test_a_client_that_leaves_ends_the_reading(tmp_path: Path) -> None:
    async def test() -> None:
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        here.setblocking(False)
        receiver = FileReceiver(here, lambda number, fd: os.close(fd))
        there.close()
        await asyncio.sleep(0.05)
        assert not asyncio.get_running_loop().remove_reader(here), "end of file would spin"
        receiver.close()
        here.close()

    asyncio.run(test())
