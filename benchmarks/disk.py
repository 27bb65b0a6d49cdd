"""How fast a directory's disk is when nothing else uses it: the bandwidth in every bound.

The pattern is that of the flash tier (O_DIRECT, 16 MiB at a time, several threads, a preallocated file that has been
written before), without queues or a daemon; without hashing too, unless it is asked for.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import xxhash

from tiermem.planner.bounds import DiskRates
from tiermem.units import GIB, MIB
from tiermem_client.embedded import default_flash_directory

CHUNK_BYTES = 16 * MIB
READERS, WRITERS = 4, 2  # as many as the mover lets at one directory
THREADS = ((READERS, WRITERS), (2, 2), (2, 1), (1, 1))  # readers and writers, where the fastest counts


def parent_of(flash: Path | None) -> Path:
    """The directory below which a benchmark puts its files: the one that was asked for, or tiermem's own choice. It is
    made.
    """
    parent = (flash or default_flash_directory(os.environ)).resolve()
    parent.mkdir(parents=True, exist_ok=True)
    return parent


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """Bytes a second, each direction measured alone."""

    read: float
    write: float


def measure_bandwidth(directory: Path, nbytes: int = GIB) -> Bandwidth:
    """Write, overwrite and read a file of `nbytes` (whole chunks) in `directory`; it is gone afterwards. Raises OSError
    where the directory's file system refuses O_DIRECT or has no room.
    """
    with _file(directory, nbytes) as file:
        _seconds(file.writing)  # the first write of a fresh file is slower
        write_s = _seconds(file.writing)
        read_s = _seconds(file.reading)
        return Bandwidth(read=file.nbytes / read_s, write=file.nbytes / write_s)


def measure_rates(directory: Path, nbytes: int = GIB, rounds: int = 2) -> DiskRates:
    """As `measure_bandwidth`, each direction alone and both at once, with a digest of every chunk (XXH3, before a write
    and after a read): the fastest of `rounds` with each of THREADS, as a bound is what the disk can do.
    """
    with _file(directory, nbytes) as one, _file(directory, nbytes) as other:
        for file in (one, other):
            _seconds(file.writing)
        tries = [threads for threads in THREADS for _ in range(rounds)]
        read_s = min(_seconds(other.hashed_reading(readers)) for readers, _ in tries)
        write_s = min(_seconds(one.hashed_writing(writers)) for _, writers in tries)
        both_s = min(_seconds(one.hashed_writing(writers), other.hashed_reading(readers)) for readers, writers in tries)
        return DiskRates(read=one.nbytes / read_s, write=one.nbytes / write_s, both=one.nbytes / both_s)


def digest_rate(rounds: int = 20) -> float:
    """Bytes a second of one core that makes digests, the fastest of `rounds` chunks."""
    chunk = os.urandom(CHUNK_BYTES)
    seconds = []
    for _ in range(rounds):
        started_s = time.perf_counter()
        xxhash.xxh3_64_digest(chunk)
        seconds.append(time.perf_counter() - started_s)
    return CHUNK_BYTES / min(seconds)


@dataclass(frozen=True, slots=True)
class _Work:
    """Chunks to move, and how many threads do it."""

    chunks: int
    threads: int
    move: Callable[[mmap.mmap, int], None]  # buffer, offset


@dataclass(frozen=True, slots=True)
class _File:
    fd: int
    nbytes: int

    @property
    def writing(self) -> _Work:
        return self._work(WRITERS, self._write)

    @property
    def reading(self) -> _Work:
        return self._work(READERS, self._read)

    def hashed_writing(self, threads: int) -> _Work:
        def move(buffer: mmap.mmap, offset: int) -> None:
            xxhash.xxh3_64_digest(buffer)
            self._write(buffer, offset)

        return self._work(threads, move)

    def hashed_reading(self, threads: int) -> _Work:
        def move(buffer: mmap.mmap, offset: int) -> None:
            self._read(buffer, offset)
            xxhash.xxh3_64_digest(buffer)

        return self._work(threads, move)

    def _work(self, threads: int, move: Callable[[mmap.mmap, int], None]) -> _Work:
        return _Work(self.nbytes // CHUNK_BYTES, threads, move)

    def _write(self, buffer: mmap.mmap, offset: int) -> None:
        _check(os.pwritev(self.fd, [buffer], offset))

    def _read(self, buffer: mmap.mmap, offset: int) -> None:
        _check(os.preadv(self.fd, [buffer], offset))


def _check(moved: int) -> None:
    if moved != CHUNK_BYTES:
        raise OSError(f"{moved} of {CHUNK_BYTES} bytes moved")


@contextlib.contextmanager
def _file(directory: Path, nbytes: int) -> Iterator[_File]:
    whole = nbytes // CHUNK_BYTES * CHUNK_BYTES
    fd, path = tempfile.mkstemp(prefix="bandwidth-", dir=directory)
    try:
        os.posix_fallocate(fd, 0, whole)
        direct = os.open(path, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
    finally:
        os.close(fd)
        os.unlink(path)
    try:
        yield _File(direct, whole)
    finally:
        os.close(direct)


def _seconds(*works: _Work) -> float:
    """All of them at once."""
    buffers = [[mmap.mmap(-1, CHUNK_BYTES) for _ in range(work.threads)] for work in works]
    for buffer in itertools.chain(*buffers):
        buffer[:] = os.urandom(CHUNK_BYTES)  # what compresses would look too fast on some disks

    def run(work: _Work, mine: list[mmap.mmap], thread: int) -> None:
        for chunk in range(thread, work.chunks, work.threads):
            work.move(mine[thread], chunk * CHUNK_BYTES)

    started_s = time.perf_counter()
    with ThreadPoolExecutor(sum(work.threads for work in works)) as pool:
        jobs = [
            pool.submit(run, work, mine, thread)
            for work, mine in zip(works, buffers, strict=True)
            for thread in range(work.threads)
        ]
        for job in jobs:
            job.result()
    seconds = time.perf_counter() - started_s
    for buffer in itertools.chain(*buffers):
        buffer.close()
    return seconds
