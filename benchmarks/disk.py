"""How fast a directory's disk is when nothing else uses it: the bandwidth in every bound.

The pattern is that of the flash tier (O_DIRECT, 16 MiB at a time, several threads, a preallocated file that has been
written before), without hashing, queues or a daemon.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tiermem.units import GIB, MIB

CHUNK_BYTES = 16 * MIB
READERS, WRITERS = 4, 2  # as many as the mover lets at one directory


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """Bytes a second, each direction measured alone."""

    read: float
    write: float


def measure_bandwidth(directory: Path, nbytes: int = GIB) -> Bandwidth:
    """Write, overwrite and read a file of `nbytes` (whole chunks) in `directory`; it is gone afterwards. Raises OSError
    where the directory's file system refuses O_DIRECT or has no room.
    """
    chunks = nbytes // CHUNK_BYTES
    fd, path = tempfile.mkstemp(prefix="bandwidth-", dir=directory)
    try:
        os.posix_fallocate(fd, 0, chunks * CHUNK_BYTES)
        direct = os.open(path, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
    finally:
        os.close(fd)
        os.unlink(path)
    try:
        _seconds(direct, os.pwritev, chunks, WRITERS)  # the first write of a fresh file is slower
        write_s = _seconds(direct, os.pwritev, chunks, WRITERS)
        read_s = _seconds(direct, os.preadv, chunks, READERS)
    finally:
        os.close(direct)
    return Bandwidth(read=chunks * CHUNK_BYTES / read_s, write=chunks * CHUNK_BYTES / write_s)


def _seconds(fd: int, move: Callable[[int, list[mmap.mmap], int], int], chunks: int, threads: int) -> float:
    buffers = [mmap.mmap(-1, CHUNK_BYTES) for _ in range(threads)]
    for buffer in buffers:
        buffer[:] = os.urandom(CHUNK_BYTES)  # what compresses would look too fast on some disks

    def work(thread: int) -> None:
        for chunk in range(thread, chunks, threads):
            moved = move(fd, [buffers[thread]], chunk * CHUNK_BYTES)
            if moved != CHUNK_BYTES:
                raise OSError(f"{moved} of {CHUNK_BYTES} bytes moved")

    started_s = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, range(threads)))
    seconds = time.perf_counter() - started_s
    for buffer in buffers:
        buffer.close()
    return seconds
