"""Stand-ins: a clock to be set by hand, tiers without a disk, and wrappers that make a tier slow or faulty."""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Sequence

from tiermem.allocator import FrameAllocator, OutOfFrames
from tiermem.errors import TierFull, TierIOError
from tiermem.layout import ArenaLayout
from tiermem.testing.faults import FaultScript, Spoil, flip, half
from tiermem.tiers.base import Extent, Tier, check_range, closed_error
from tiermem.tiers.os_calls import errno_name


class FakeClock:
    """A clock that moves only when told to. Any thread."""

    def __init__(self, now_s: float = 0.0) -> None:
        self._lock = threading.Lock()  # owner: this clock
        self._now_s = now_s  # guarded by _lock

    def now_s(self) -> float:
        with self._lock:
            return self._now_s

    def advance(self, seconds: float) -> None:
        with self._lock:
            self._now_s += seconds


def page_aligned(data: bytes) -> memoryview:
    """A writable copy of `data` that starts at a page boundary, as tiers want their views."""
    view = memoryview(mmap.mmap(-1, max(1, len(data))))[: len(data)]
    view[:] = data
    return view


class NullTier:
    """Accounts like any tier and keeps no byte: `write` drops, `read` leaves its views as they are.

    It meets the contract but for round trips (`TierContract.keeps_bytes` is False for it). For measuring what the store
    costs by itself.
    """

    def __init__(self, layout: ArenaLayout, capacity_bytes: int, name: str = "null") -> None:
        self.layout = layout
        self._name = name
        self._lock = threading.Lock()  # owner: this tier
        self._allocator = FrameAllocator(capacity_bytes // layout.frame_bytes)  # guarded by _lock
        self._held: set[Extent] = set()  # guarded by _lock
        self._closed = False  # guarded by _lock

    @property
    def name(self) -> str:
        return self._name

    @property
    def capacity_bytes(self) -> int:
        return self._allocator.frames * self.layout.frame_bytes

    @property
    def used_bytes(self) -> int:
        with self._lock:
            return sum(extent.frames for extent in self._held) * self.layout.frame_bytes

    def reserve(self, nbytes: int) -> Extent:
        with self._lock:
            self._check_open()
            try:
                extent = Extent(nbytes, self._allocator.take(self.layout.frames_for(nbytes)))
            except OutOfFrames as error:
                raise TierFull(f"tier {self._name} has no room for {nbytes} bytes: {error}") from error
            self._held.add(extent)
            return extent

    def free(self, extent: Extent) -> None:
        with self._lock:
            if extent not in self._held:
                raise ValueError(
                    f"{extent} is not held in tier {self._name}; it was freed before, or comes from elsewhere"
                )
            self._held.remove(extent)
            self._allocator.give(extent.runs)

    def read(self, extent: Extent, offset: int, views: Sequence[memoryview]) -> None:
        self._check(extent, offset, views)

    def write(self, extent: Extent, offset: int, views: Sequence[memoryview]) -> None:
        self._check(extent, offset, views)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._held.clear()

    def check_invariants(self) -> None:
        with self._lock:
            if not self._closed:
                self._allocator.check_invariants(run for extent in self._held for run in extent.runs)

    def _check(self, extent: Extent, offset: int, views: Sequence[memoryview]) -> int:
        with self._lock:
            self._check_open()
        return check_range(extent, offset, views)

    def _check_open(self) -> None:
        if self._closed:
            raise closed_error(self._name)


class MemoryTier(NullTier):
    """A tier in private memory: the whole contract without a file. Each extent's bytes are kept apart, as long as it is
    held.
    """

    def __init__(self, layout: ArenaLayout, capacity_bytes: int, name: str = "memory") -> None:
        super().__init__(layout, capacity_bytes, name)
        self._bytes: dict[Extent, bytearray] = {}  # guarded by _lock; the arrays' bytes are the extents' users'

    def reserve(self, nbytes: int) -> Extent:
        extent = super().reserve(nbytes)
        with self._lock:
            self._bytes[extent] = bytearray(nbytes)
        return extent

    def free(self, extent: Extent) -> None:
        super().free(extent)
        with self._lock:
            self._bytes.pop(extent, None)

    def read(self, extent: Extent, offset: int, views: Sequence[memoryview]) -> None:
        self._check(extent, offset, views)
        stored = memoryview(self._array(extent))
        for view in views:
            view[:] = stored[offset : offset + view.nbytes]
            offset += view.nbytes

    def write(self, extent: Extent, offset: int, views: Sequence[memoryview]) -> None:
        self._check(extent, offset, views)
        stored = memoryview(self._array(extent))
        for view in views:
            stored[offset : offset + view.nbytes] = view
            offset += view.nbytes

    def _array(self, extent: Extent) -> bytearray:
        with self._lock:
            return self._bytes[extent]


class _Wrapper:
    """A tier that hands everything on to another one."""

    def __init__(self, tier: Tier) -> None:
        self.inner = tier

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def capacity_bytes(self) -> int:
        return self.inner.capacity_bytes

    @property
    def used_bytes(self) -> int:
        return self.inner.used_bytes

    def reserve(self, nbytes: int) -> Extent:
        return self.inner.reserve(nbytes)

    def free(self, extent: Extent) -> None:
        self.inner.free(extent)

    def read(self, extent: Extent, offset: int, views: Sequence[memoryview]) -> None:
        self.inner.read(extent, offset, views)

    def write(self, extent: Extent, offset: int, views: Sequence[memoryview]) -> None:
        self.inner.write(extent, offset, views)

    def close(self) -> None:
        self.inner.close()

    def check_invariants(self) -> None:
        self.inner.check_invariants()


class SlowTier(_Wrapper):
    """Reads and writes take `delay_s` longer, asleep on the calling thread."""

    def __init__(self, tier: Tier, delay_s: float) -> None:
        super().__init__(tier)
        self.delay_s = delay_s

    def read(self, extent: Extent, offset: int, views: Sequence[memoryview]) -> None:
        time.sleep(self.delay_s)
        super().read(extent, offset, views)

    def write(self, extent: Extent, offset: int, views: Sequence[memoryview]) -> None:
        time.sleep(self.delay_s)
        super().write(extent, offset, views)


class FaultyTier(_Wrapper):
    """Meets the faults of `script` whose target is the tier's name; see `tiermem.testing.faults` for what they do.

    A refused call does nothing else. ENOSPC and EDQUOT become TierFull, other errnos TierIOError, as in a real tier.
    """

    def __init__(self, tier: Tier, script: FaultScript) -> None:
        super().__init__(tier)
        self._script = script

    def reserve(self, nbytes: int) -> Extent:
        self._spoil("reserve", nbytes)
        return super().reserve(nbytes)

    def read(self, extent: Extent, offset: int, views: Sequence[memoryview]) -> None:
        spoil = self._spoil("read", sum(view.nbytes for view in views))
        super().read(extent, offset, half(views) if spoil is Spoil.SHORT else views)
        if spoil is Spoil.FLIP:
            flip(views)

    def write(self, extent: Extent, offset: int, views: Sequence[memoryview]) -> None:
        spoil = self._spoil("write", sum(view.nbytes for view in views))
        if spoil is Spoil.SHORT:
            views = half(views)
        elif spoil is Spoil.FLIP:
            views = [page_aligned(b"".join(views))]
            flip(views)
        super().write(extent, offset, views)

    def _spoil(self, operation: str, nbytes: int) -> Spoil | None:
        action = self._script.next(self.name, operation)
        if action is None or isinstance(action, Spoil):
            return action
        text = f"tier {self.name}: scripted fault in {operation} of {nbytes} bytes: {errno_name(action)}"
        if errno_name(action) in ("ENOSPC", "EDQUOT"):
            raise TierFull(text)
        raise TierIOError(action, text)
