"""A client's file as the daemon reads it: what is taken, what is refused, and what happens when it changes."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tiermem.errors import DataLoss, InvalidArgument, TierIOError
from tiermem.tiers.os_calls import LinuxCalls
from tiermem.tiers.source_file import SourceFile

DATA = bytes(range(256)) * 100


class Calls(LinuxCalls):
    """Reads a little at a time, and fails once `broken`."""

    broken = False

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if self.broken:
            raise OSError(errno.EIO, "scripted")
        return os.preadv(fd, [buffers[0][:1000]], offset)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "weights"
    file.write_bytes(DATA)
    return file


def test_any_range_is_read_into_any_views(path: Path) -> None:
    file = SourceFile(os.open(path, os.O_RDONLY), Calls())
    assert (file.size_bytes, file.path) == (len(DATA), str(path))
    for offset, sizes in ((0, [len(DATA)]), (1, [3, 0, 5000, 1]), (4097, [4096] * 3), (len(DATA), [])):
        views = [memoryview(bytearray(n)) for n in sizes]
        file.read(offset, views)
        assert b"".join(views) == DATA[offset : offset + sum(sizes)]
    file.close()


def test_what_is_gone_is_data_loss_and_an_error_of_the_disk_is_named(path: Path) -> None:
    calls = Calls()
    file = SourceFile(os.open(path, os.O_RDONLY), calls)
    with pytest.raises(DataLoss, match=f"weights ends before offset {len(DATA)}"):
        file.read(len(DATA) - 10, [memoryview(bytearray(11))])
    calls.broken = True
    with pytest.raises(TierIOError, match=r"offset 5 of .*weights failed \(EIO\)"):
        file.read(5, [memoryview(bytearray(11))])
    file.close()


def test_only_regular_files_that_can_be_read_are_taken(tmp_path: Path, path: Path) -> None:
    """Each descriptor is closed by the refusal (the suite looks for what is left open)."""
    ends = os.pipe()
    os.close(ends[1])
    refused: dict[str, Callable[[], int]] = {
        "a pipe": lambda: ends[0],
        "a socket": lambda: socket.socket(socket.AF_UNIX).detach(),
        "a directory": lambda: os.open(tmp_path, os.O_RDONLY),
        "a device": lambda: os.open("/dev/zero", os.O_RDONLY),
        "write only": lambda: os.open(path, os.O_WRONLY),
        "a path": lambda: os.open(path, os.O_PATH),
    }
    for make in refused.values():
        descriptor = make()
        with pytest.raises(InvalidArgument, match=r"regular file|open for reading"):
            SourceFile(descriptor, LinuxCalls())
