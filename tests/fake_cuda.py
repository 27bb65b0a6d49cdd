"""A GPU's driver, emulated in ordinary memory: addresses, mappings and streams behave as the driver's, and copies come
late. What computes is the CPU, which is never behind; it seems to be so by `lag_s`, or until a test lets it go on
(`hold_computing`).
"""

from __future__ import annotations

import ctypes
import mmap
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial

from tiermem.errors import ResourceExhausted, TiermemError
from tiermem.units import KIB
from tiermem_client.copy_engine import Moment, Piece
from tiermem_client.page_moves import protect_hole, release_addresses, reserve_addresses

POISON = 0xFF
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_MAP_FIXED = 0x10


class FakeMoment:
    """A point in a stream."""

    def __init__(self, computing: bool = False) -> None:
        self.computing = computing
        self.at_s = 0.0
        self._come = threading.Event()

    def is_set(self) -> bool:
        return self._come.is_set()

    def wait(self) -> None:
        assert self._come.wait(20), "a moment that does not come was waited for"

    def set(self) -> None:
        self.at_s = time.monotonic()
        self._come.set()

    def seconds_until(self, later: FakeMoment) -> float:
        return later.at_s - self.at_s


class FakeStream:
    """A thread that does what it is asked for, in order."""

    def __init__(self) -> None:
        self._asked: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        threading.Thread(target=_work, args=(self._asked,), name="fake-stream", daemon=True).start()
        weakref.finalize(self, self._asked.put, None)

    def ask(self, work: Callable[[], object]) -> None:
        self._asked.put(work)


def _work(asked: queue.SimpleQueue[Callable[[], object] | None]) -> None:
    while (work := asked.get()) is not None:
        work()


def _end(fd: int, reserved: dict[int, int]) -> None:
    os.close(fd)
    for address, nbytes in reserved.items():
        release_addresses(address, nbytes)


class FakeDriver:
    """A `Driver` over a memfd. `capacity_bytes` is all that `create` gives; `failures` are raised, once each, by the
    calls that they are named after.
    """

    def __init__(
        self, capacity_bytes: int, granularity_bytes: int = 4 * KIB, latency_s: float = 1e-4, lag_s: float = 0.0
    ) -> None:
        self.device, self.granularity_bytes = "cpu", granularity_bytes
        self.capacity_bytes, self.created_bytes = capacity_bytes, 0
        self.failures: dict[str, TiermemError] = {}
        self.reserved: dict[int, int] = {}
        self.mapped: dict[int, int] = {}
        self.handles: dict[int, int] = {}  # offset in the memfd by handle, which is that of a size
        self.pinned: dict[int, int] = {}
        self._fd = os.memfd_create("fake-gpu", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, 1 << 40)
        self.close = weakref.finalize(self, _end, self._fd, self.reserved)
        self._next = 0
        self._latency_s, self._lag_s = latency_s, lag_s
        self._streams: list[FakeStream] = []
        self._computing = self.stream()
        self._held: list[FakeMoment] | None = None

    def _call(self, name: str) -> None:
        if name in self.failures:
            raise self.failures.pop(name)

    # -- memory

    def free_bytes(self) -> int:
        return self.capacity_bytes - self.created_bytes

    def reserve(self, nbytes: int) -> int:
        self._call("reserve")
        assert nbytes % self.granularity_bytes == 0
        address = reserve_addresses(nbytes, max(self.granularity_bytes, mmap.PAGESIZE))
        self.reserved[address] = nbytes
        return address

    def free(self, address: int, nbytes: int) -> None:
        assert self.reserved.pop(address) == nbytes
        assert not [at for at in self.mapped if address <= at < address + nbytes], "addresses are freed while mapped"
        release_addresses(address, nbytes)

    def create(self, nbytes: int) -> int:
        self._call("create")
        if self.created_bytes + nbytes > self.capacity_bytes:
            raise ResourceExhausted(
                f"CUDA_ERROR_OUT_OF_MEMORY from cuMemCreate on fake:0; {self.free_bytes()} are free"
            )
        handle, self._next = self._next, self._next + nbytes
        self.handles[handle] = nbytes
        self.created_bytes += nbytes
        return handle

    def destroy(self, handle: int) -> None:
        self.created_bytes -= self.handles.pop(handle)

    def map(self, address: int, nbytes: int, handle: int) -> None:
        self._call("map")
        assert self.handles[handle] == nbytes, "only whole handles are mapped"
        assert any(at <= address and address + nbytes <= at + size for at, size in self.reserved.items())
        assert not [at for at, size in self.mapped.items() if at < address + nbytes and address < at + size], "taken"
        self._map(address, nbytes, handle)
        self.mapped[address] = nbytes

    def _map(self, address: int, nbytes: int, offset: int) -> None:
        got = _libc.mmap(address, nbytes, 0, mmap.MAP_SHARED | _MAP_FIXED, self._fd, offset)
        assert got == address, os.strerror(ctypes.get_errno())

    def allow(self, address: int, nbytes: int) -> None:
        self._call("allow")
        assert self._whole(address, nbytes)
        assert _libc.mprotect(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE) == 0

    def unmap(self, address: int, nbytes: int) -> None:
        for at in self._whole(address, nbytes):
            del self.mapped[at]
        protect_hole(address, nbytes)

    def _whole(self, address: int, nbytes: int) -> list[int]:
        """The mappings that fill this span."""
        inside = [at for at in self.mapped if address <= at < address + nbytes]
        assert sum(self.mapped[at] for at in inside) == nbytes, "a span of parts of mappings, or with holes"
        return inside

    def register(self, address: int, nbytes: int) -> None:
        self._call("register")
        self.pinned[address] = nbytes

    def unregister(self, address: int) -> None:
        del self.pinned[address]

    # -- streams

    def stream(self) -> FakeStream:
        self._streams.append(FakeStream())
        return self._streams[-1]

    def copy(self, stream: FakeStream, pieces: Sequence[Piece], inward: bool) -> None:
        self._call("copy")

        def work() -> None:
            for _, target, nbytes in pieces:
                ctypes.memset(target, POISON, nbytes)
            time.sleep(self._latency_s)
            for source, target, nbytes in pieces:
                ctypes.memmove(target, source, nbytes)

        stream.ask(work)

    def follow(self, stream: FakeStream | None, moment: Moment) -> None:
        if stream is not None:
            stream.ask(moment.wait)
        elif not (isinstance(moment, FakeMoment) and moment.computing):
            moment.wait()

    def mark(self, stream: FakeStream | None = None) -> FakeMoment:
        moment = FakeMoment(computing=stream is None)
        if stream is not None:
            stream.ask(moment.set)
        elif self._held is not None:
            self._held.append(moment)
        elif self._lag_s:
            self._computing.ask(partial(time.sleep, self._lag_s))
            self._computing.ask(moment.set)
        else:
            moment.set()
        return moment

    def synchronize(self) -> None:
        self._call("synchronize")
        self.computing_goes_on()
        for stream in self._streams:
            self.mark(stream).wait()

    def hold_computing(self) -> None:
        """From now on what computes is behind."""
        self._held = self._held or []

    def computing_goes_on(self) -> None:
        held, self._held = self._held or [], None
        for moment in held:
            moment.set()
