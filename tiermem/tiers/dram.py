"""The DRAM tier: one sealed memfd per job, prefaulted, mapped by the daemon in one piece and by the trainer frame by
frame.
"""

from __future__ import annotations

import ctypes
import enum
import errno
import fcntl
import logging
import mmap
import os
import threading
from collections.abc import Sequence
from contextlib import ExitStack

import numpy as np

from tiermem.allocator import FrameAllocator, OutOfFrames, Run, byte_ranges
from tiermem.errors import ResourceExhausted, TierFull
from tiermem.layout import PAGE_BYTES, ArenaLayout
from tiermem.tiers.base import Extent, check_range, closed_error
from tiermem.tiers.os_calls import MADV_POPULATE_WRITE, MADV_REMOVE, LinuxCalls, MemoryCalls, errno_name
from tiermem.units import MIB, format_size

_log = logging.getLogger(__name__)

_PREFAULT_STEP_BYTES = 64 * MIB  # other threads of the process can map and unmap between steps


class Prefault(enum.StrEnum):
    """How the arena's pages were made present."""

    POPULATE = "populate"
    TOUCH = "touch"  # the kernel is older than 5.14: about a third slower


class DramTier:
    """A tier in shared memory of `layout.arena_bytes`, all of it present when the constructor returns.

    Two ways to account, never both at once: `reserve` and `free` (any thread), or `allocator` directly, under the lock
    of its user (the store's ledger), who then checks invariants as well. The constructor takes about half a second per
    GiB, holds no lock and releases the GIL. Raises ResourceExhausted if the memory is not there.
    """

    def __init__(self, layout: ArenaLayout, name: str = "dram", *, calls: MemoryCalls | None = None) -> None:
        self.layout = layout
        self.allocator = FrameAllocator(layout.frames)
        self._name = name
        self._calls = calls or LinuxCalls()
        # Owner: this tier; guards what is marked, and `allocator` within reserve and free
        self._lock = threading.Lock()
        self._held: set[Extent] = set()  # guarded by _lock
        self._closed = False  # guarded by _lock
        with ExitStack() as undo:
            try:
                self._fd = os.memfd_create(f"tiermem-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
                undo.callback(os.close, self._fd)
                os.ftruncate(self._fd, layout.arena_bytes)
                # A peer that could shrink the file would kill this process with SIGBUS at the next access.
                fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
                self._map = mmap.mmap(self._fd, layout.arena_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
                undo.callback(self._map.close)
                self._view = memoryview(self._map)
                undo.callback(self._view.release)
                self.prefault = self._prefault()
            except OSError as error:
                raise ResourceExhausted(
                    f"{format_size(layout.arena_bytes)} of shared memory for tier {name} could not be had "
                    f"({errno_name(error.errno)}); ask for a smaller arena or free memory"
                ) from error
            undo.pop_all()

    @property
    def name(self) -> str:
        return self._name

    @property
    def capacity_bytes(self) -> int:
        return self.layout.arena_bytes

    @property
    def used_bytes(self) -> int:
        return (self.allocator.frames - self.allocator.free_frames) * self.layout.frame_bytes

    @property
    def fd(self) -> int:
        """The memfd, to be passed to the trainer. This tier keeps owning it. Raises TierIOError once closed."""
        with self._lock:
            if self._closed:
                raise closed_error(self._name)
            return self._fd

    def views(self, runs: Sequence[Run], offset: int, nbytes: int) -> list[memoryview]:
        """Bytes [offset, offset + nbytes) of `runs` as slices of the daemon's linear view, one per run touched. Nothing
        is copied.

        The views are valid until `close`; a view that lives longer keeps addresses, not memory (its bytes read as
        zero).
        """
        with self._lock:
            if self._closed:
                raise closed_error(self._name)
            view = self._view
        return [view[at : at + length] for at, length in byte_ranges(runs, self.layout.frame_bytes, offset, nbytes)]

    def reserve(self, nbytes: int) -> Extent:
        with self._lock:
            if self._closed:
                raise closed_error(self._name)
            try:
                extent = Extent(nbytes, self.allocator.take(self.layout.frames_for(nbytes)))
            except OutOfFrames as error:
                raise TierFull(
                    f"tier {self._name} has no room for {format_size(nbytes)}: "
                    f"{format_size(error.free * self.layout.frame_bytes)} of "
                    f"{format_size(self.capacity_bytes)} are free; evict first, or give the job a larger arena"
                ) from error
            self._held.add(extent)
            return extent

    def free(self, extent: Extent) -> None:
        with self._lock:
            if extent not in self._held:
                raise ValueError(
                    f"{extent} is not held in tier {self._name}; it was freed before, or comes from elsewhere"
                )
            self._held.remove(extent)
            self.allocator.give(extent.runs)

    def read(self, extent: Extent, offset: int, views: Sequence[memoryview]) -> None:
        _copy(self.views(extent.runs, offset, check_range(extent, offset, views)), views)

    def write(self, extent: Extent, offset: int, views: Sequence[memoryview]) -> None:
        _copy(views, self.views(extent.runs, offset, check_range(extent, offset, views)))

    def close(self) -> None:
        """Give the memory back even while the trainer still holds the descriptor or a mapping (it then sees zeros).

        The caller has ended all transfers. Views that somebody still holds keep their addresses until they are dropped.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._held.clear()
            self.allocator = FrameAllocator(self.layout.frames)
        try:
            self._calls.madvise(self._address(), self.layout.arena_bytes, MADV_REMOVE)
        except OSError as error:
            # The pages then live until the last process unmaps them: a delay, not a leak.
            _log.warning(
                "tier %s: MADV_REMOVE of %d bytes refused (%s)",
                self._name,
                self.layout.arena_bytes,
                errno_name(error.errno),
            )
        os.close(self._fd)
        self._view.release()
        try:
            self._map.close()
        except BufferError:
            # The mapping object is freed with the last view; its memory is gone already.
            _log.warning(
                "tier %s: closed while views of it are held; %d bytes stay mapped", self._name, self.layout.arena_bytes
            )

    def check_invariants(self) -> None:
        """As the contract says, for extents that `reserve` handed out (a user of `allocator` checks its own)."""
        with self._lock:
            self.allocator.check_invariants(run for extent in self._held for run in extent.runs)

    def _address(self) -> int:
        # The ctypes object is a buffer export that would keep the mapping open; it dies with this expression.
        return ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def _prefault(self) -> Prefault:
        address, total = self._address(), self.layout.arena_bytes
        for at in range(0, total, _PREFAULT_STEP_BYTES):
            try:
                self._calls.madvise(address + at, min(_PREFAULT_STEP_BYTES, total - at), MADV_POPULATE_WRITE)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                _log.warning(
                    "tier %s: the kernel knows no MADV_POPULATE_WRITE (EINVAL); touching every page instead", self._name
                )
                np.frombuffer(self._view, np.uint8)[at::PAGE_BYTES] = 0
                return Prefault.TOUCH
        return Prefault.POPULATE


def _copy(sources: Sequence[memoryview], targets: Sequence[memoryview]) -> None:
    """Copy equally many bytes between two lists that are cut differently. numpy releases the GIL; slice assignment does
    not.
    """
    source, target = _arrays(sources), _arrays(targets)
    while source and target:
        n = min(source[-1].size, target[-1].size)
        np.copyto(target[-1][:n], source[-1][:n])
        for rest in (source, target):
            last = rest.pop()
            if last.size > n:
                rest.append(last[n:])


def _arrays(views: Sequence[memoryview]) -> list[np.ndarray[tuple[int], np.dtype[np.uint8]]]:
    """Non-empty views as arrays, last first, so that the next one can be popped."""
    return [np.frombuffer(view, np.uint8) for view in reversed(views) if view.nbytes]
