"""Kernel calls that move pages of shared memory between fixed addresses, and the two ways of doing it.

Both movers give the same guarantees: a frame is readable in one place only, and a place that it left is PROT_NONE.

- ``mremap``: the memfd is mapped linearly once ("home") and its descriptor is not needed afterwards; a move is
  ``mremap(DONTUNMAP)`` and a PROT_NONE mapping over the source. Without DONTUNMAP the source would be a hole for a
  moment, and another thread's mapping could land there.
- ``mmap``: for kernels that refuse DONTUNMAP on shared memory (before 5.13). The descriptor stays open, home is mapped
  nowhere, a move maps the file: 37 to 71 ms per GiB instead of 4 to 32.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import errno
import mmap
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from tiermem.errors import ResourceExhausted, TiermemError
from tiermem.units import MIB, format_size, round_up

Run = tuple[int, int]  # (first frame, count)
Remap = Callable[[int, int, int], int]  # (source, target, bytes) -> 0 or errno

HUGE_BYTES = 2 * MIB  # both ends aligned like a page-table page: the kernel moves 512 entries at once

_PROT_NONE = 0
_MAP_FIXED, _MAP_NORESERVE, _MAP_FIXED_NOREPLACE = 0x10, 0x4000, 0x100000
_MREMAP_MAYMOVE, _MREMAP_FIXED, _MREMAP_DONTUNMAP = 1, 2, 4
_NO_ACCESS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
_FAILED = ctypes.c_void_p(-1).value

# Two handles of one library. Calls of microseconds keep the GIL: giving it up costs up to a switch interval per call
# while another thread computes in Python, and a load makes hundreds of them. Calls that touch many pages give it up.
_quick = ctypes.PyDLL(None, use_errno=True)
_slow = ctypes.CDLL(None, use_errno=True)
for _lib in (_quick, _slow):
    _lib.mmap.restype = ctypes.c_void_p
    _lib.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    _lib.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    _lib.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    _lib.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    _lib.mremap.restype = ctypes.c_void_p
    _lib.mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]


def reserve_addresses(nbytes: int, align_bytes: int) -> int:
    """The address of `nbytes` of PROT_NONE, aligned to whole pages. Raises ResourceExhausted.

    Not DONTFORK, so that a forked child keeps it and nothing else can land there.
    """
    slack_bytes = align_bytes - mmap.PAGESIZE
    start = _quick.mmap(None, nbytes + slack_bytes, _PROT_NONE, _NO_ACCESS, -1, 0)
    if start == _FAILED:
        raise _kernel_error(f"cannot reserve {format_size(nbytes)} of addresses")
    address = round_up(start, align_bytes)
    for edge, size in ((start, address - start), (address + nbytes, start + slack_bytes - address)):
        if size:
            release_addresses(edge, size)
    return address


def release_addresses(address: int, nbytes: int) -> None:
    """Unmap whatever is there."""
    if _slow.munmap(address, nbytes) != 0:
        raise _kernel_error(f"cannot unmap {format_size(nbytes)} at {address:#x}")


def protect_hole(address: int, nbytes: int) -> None:
    """Put PROT_NONE there if nothing is there."""
    _quick.mmap(address, nbytes, _PROT_NONE, _NO_ACCESS | _MAP_FIXED_NOREPLACE, -1, 0)


def _cover(address: int, nbytes: int) -> bool:
    """Put PROT_NONE there, whatever was; neighbours become one kernel mapping. False if refused (errno is set)."""
    return bool(_quick.mmap(address, nbytes, _PROT_NONE, _NO_ACCESS | _MAP_FIXED, -1, 0) == address)


def kernel_remap(source: int, target: int, nbytes: int) -> int:
    """mremap(DONTUNMAP) onto `target`. Returns 0 or the errno, and leaves it set."""
    flags = _MREMAP_MAYMOVE | _MREMAP_FIXED | _MREMAP_DONTUNMAP
    return 0 if _quick.mremap(source, nbytes, nbytes, flags, target) == target else ctypes.get_errno()


def _map_file(address: int, nbytes: int, fd: int, offset_bytes: int) -> None:
    """Map the file there, populated, not inherited by children. On an error the place is PROT_NONE."""
    flags = mmap.MAP_SHARED | mmap.MAP_POPULATE | _MAP_FIXED
    mapped = _slow.mmap(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, offset_bytes)
    if mapped != address or _quick.madvise(address, nbytes, mmap.MADV_DONTFORK) != 0:
        error = _kernel_error(f"cannot map {format_size(nbytes)} of the job's memory at {address:#x}")
        _cover(address, nbytes)
        raise error


def _kernel_error(what: str) -> TiermemError:
    """The typed error for the errno of the call that just failed."""
    number = ctypes.get_errno()
    if number != errno.ENOMEM:
        return TiermemError(f"{what}: {errno.errorcode.get(number, number)} ({os.strerror(number)})")
    with open("/proc/self/maps", "rb") as maps, open("/proc/sys/vm/max_map_count", encoding="ascii") as limit:
        count, most = sum(1 for _ in maps), int(limit.read())
    return ResourceExhausted(
        f"{what}: ENOMEM; this process has {count} memory mappings and vm.max_map_count allows {most}: raise it "
        f"(sysctl -w vm.max_map_count={4 * most}) or give a smaller dram budget, which has fewer frames"
    )


class Mechanism(enum.StrEnum):
    """How frames move; see the module's text."""

    MREMAP = "mremap"
    MMAP = "mmap"


@dataclass(slots=True)
class MoveCounters:
    """Written by a mover and its owner under the owner's lock. `splits`: moves that crossed kernel mappings."""

    moves: int = 0
    moved_bytes: int = 0
    syscalls: int = 0
    splits: int = 0
    seconds: float = 0.0


class Headroom:
    """Kernel mappings that are held only to be given up: undoing a refused move needs some, and by then there are none.

    One undone move needs at most 8 (mremap wants 6 free before it starts), and gives back as many as it takes.
    """

    _PAGES = 16

    def __init__(self) -> None:
        self._address = reserve_addresses(self._PAGES * mmap.PAGESIZE, mmap.PAGESIZE)
        self._held = False
        self.hold()

    def hold(self) -> None:
        """Take them if they are not held: pages of alternating protection. At the limit it stays undone until later."""
        if not self._held:
            pages = range(self._address, self._address + self._PAGES * mmap.PAGESIZE, 2 * mmap.PAGESIZE)
            self._held = all(_quick.mprotect(page, mmap.PAGESIZE, mmap.PROT_READ) == 0 for page in pages)

    @contextlib.contextmanager
    def given_up(self) -> Iterator[None]:
        _quick.mprotect(self._address, self._PAGES * mmap.PAGESIZE, _PROT_NONE)
        self._held = False
        try:
            yield
        finally:
            self.hold()

    def close(self) -> None:
        release_addresses(self._address, self._PAGES * mmap.PAGESIZE)


class Mover(Protocol):
    """Moves one piece of the file. `enter` and `leave` are all or nothing; they raise ResourceExhausted (the kernel
    allows no more mappings) or TiermemError. No lock: the owner serialises calls.
    """

    @property
    def mechanism(self) -> Mechanism: ...

    @property
    def home(self) -> int | None:
        """The address of the linear view, if there is one."""

    def enter(self, offset_bytes: int, address: int, nbytes: int) -> None:
        """From home (`offset_bytes` in the file) to `address`; home is PROT_NONE afterwards."""

    def leave(self, offset_bytes: int, address: int, nbytes: int) -> None:
        """From `address` home; `address` is PROT_NONE afterwards."""

    def forget_in_child(self, home_frames: Iterable[Run], frame_bytes: int) -> None:
        """In a forked child: drop what would keep the job's memory alive there, and protect the addresses of home."""

    def close(self) -> None:
        """Unmap home or close the descriptor. Once."""


class RemapMover:
    """Moves between a linear view and other addresses. Does not keep the descriptor: a forked child inherits none of
    the mappings (MADV_DONTFORK), but would inherit a descriptor and keep the memory alive with it.
    """

    mechanism = Mechanism.MREMAP

    def __init__(
        self, fd: int, arena_bytes: int, counters: MoveCounters, headroom: Headroom, remap: Remap = kernel_remap
    ) -> None:
        self._counters = counters
        self._nbytes = arena_bytes
        self._headroom = headroom
        self._remap = remap
        self.home = reserve_addresses(arena_bytes, HUGE_BYTES)
        try:
            _map_file(self.home, arena_bytes, fd, 0)
        except TiermemError:
            self.close()
            raise

    def supported(self, frame_bytes: int) -> bool:
        """Really moves one frame away and back. False where the kernel refuses DONTUNMAP on shared memory."""
        place = reserve_addresses(frame_bytes, mmap.PAGESIZE)
        try:
            failure = self._remap(self.home, place, frame_bytes)
            if failure == errno.EINVAL:
                return False
            if failure:
                raise _kernel_error("the trial move of one frame failed")
            self._shift(place, self.home, frame_bytes)
            return True
        finally:
            release_addresses(place, frame_bytes)

    def enter(self, offset_bytes: int, address: int, nbytes: int) -> None:
        self._shift(self.home + offset_bytes, address, nbytes)

    def leave(self, offset_bytes: int, address: int, nbytes: int) -> None:
        self._shift(address, self.home + offset_bytes, nbytes)

    def forget_in_child(self, home_frames: Iterable[Run], frame_bytes: int) -> None:
        for first, count in home_frames:
            protect_hole(self.home + first * frame_bytes, count * frame_bytes)

    def close(self) -> None:
        release_addresses(self.home, self._nbytes)

    def _shift(self, source: int, target: int, nbytes: int) -> None:
        self._counters.syscalls += 1
        failure = self._remap(source, target, nbytes)
        if failure == errno.EFAULT and nbytes > mmap.PAGESIZE:
            self._shift_halves(source, target, nbytes)
            return
        if failure:
            raise _kernel_error(f"cannot move {format_size(nbytes)} from {source:#x} to {target:#x}")
        self._counters.syscalls += 1
        if not _cover(source, nbytes):
            error = _kernel_error(f"cannot close {format_size(nbytes)} at {source:#x}")
            with self._headroom.given_up():
                if self._remap(target, source, nbytes) or not _cover(target, nbytes):
                    raise TiermemError(f"{error}; moving back failed too: both addresses show the frames") from error
            raise error

    def _shift_halves(self, source: int, target: int, nbytes: int) -> None:
        """The source lies in several kernel mappings, which mremap takes in one call only since Linux 6.17."""
        # An older kernel has unmapped the target before it looked at the source. Where it still stands: EEXIST.
        protect_hole(target, nbytes)
        self._counters.splits += 1
        half = nbytes // 2 // mmap.PAGESIZE * mmap.PAGESIZE
        self._shift(source, target, half)
        try:
            self._shift(source + half, target + half, nbytes - half)
        except TiermemError:
            with self._headroom.given_up():
                self._shift(target, source, half)
            raise


class FileMover:
    """Maps and unmaps pieces of the file. Keeps a descriptor of its own."""

    mechanism = Mechanism.MMAP
    home = None

    def __init__(self, fd: int, counters: MoveCounters) -> None:
        self._fd = os.dup(fd)
        self._counters = counters

    def enter(self, offset_bytes: int, address: int, nbytes: int) -> None:
        self._counters.syscalls += 2
        _map_file(address, nbytes, self._fd, offset_bytes)

    def leave(self, offset_bytes: int, address: int, nbytes: int) -> None:
        self._counters.syscalls += 1
        if not _cover(address, nbytes):
            raise _kernel_error(f"cannot close {format_size(nbytes)} at {address:#x}")

    def forget_in_child(self, home_frames: Iterable[Run], frame_bytes: int) -> None:
        os.close(self._fd)

    def close(self) -> None:
        os.close(self._fd)
