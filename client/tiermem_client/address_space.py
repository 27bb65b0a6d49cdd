"""Virtual memory for tensors: frames of the job's memfd enter and leave fixed ranges of addresses (DESIGN section 4).

Every bundle owns one *range* for life. A frame (a fixed-size piece of the job's shared memory) is at *home* or in
exactly one range; moving it moves page-table entries, not bytes. What holds no frame is PROT_NONE: a stray access is
SIGSEGV with the Python line (faulthandler), never a wrong number. How frames move, and the fallback: `page_moves`.

Threading: no lock here. The caller holds the client lock around every method.
"""

from __future__ import annotations

import ctypes
import fcntl
import itertools
import logging
import mmap
import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from tiermem.errors import InvalidArgument, TiermemError, Unsupported
from tiermem.units import round_up
from tiermem_client.page_moves import (
    HUGE_BYTES,
    FileMover,
    Headroom,
    Mechanism,
    MoveCounters,
    Mover,
    Remap,
    RemapMover,
    Run,
    kernel_remap,
    protect_hole,
    release_addresses,
    reserve_addresses,
)

__all__ = ["AddressSpace", "AddressSpaceStats", "Mechanism", "Range", "Run"]

_log = logging.getLogger(__name__)

_HISTORY_EVENTS = 256
_NO_FRAME = -1


@dataclass(frozen=True, slots=True)
class Range:
    """Addresses `address .. address + nbytes`, constant from `reserve` to `release`. `nbytes` is whole frames; `device`
    is torch's name of the memory.
    """

    id: int
    address: int
    nbytes: int
    device: str = "cpu"


@dataclass(frozen=True, slots=True)
class AddressSpaceStats:
    """`mapped_bytes`, `ranges` and `reserved_bytes` are now, the rest is since construction. A move is one run.

    `splits` counts moves that crossed kernel mappings and were done in parts; `seconds` is inside `map` and `unmap`.
    """

    mechanism: Mechanism
    mapped_bytes: int
    ranges: int
    reserved_bytes: int
    moves: int
    moved_bytes: int
    syscalls: int
    splits: int
    seconds: float


class AddressSpace:
    """The trainer's side of one job's DRAM arena.

    `fd` is a memfd of at least `arena_bytes`, sealed against shrinking. The call closes it, also when it
    raises; where mremap works no descriptor of the arena stays open. `frame_bytes` is a power of two, at least a page.
    `mechanism=None` probes the kernel, by `remap` (an argument, so that tests can be another kernel). Raises
    InvalidArgument, ResourceExhausted.
    """

    def __init__(
        self,
        fd: int,
        arena_bytes: int,
        frame_bytes: int,
        *,
        mechanism: Mechanism | None = None,
        remap: Remap = kernel_remap,
    ) -> None:
        self._counters = MoveCounters()
        try:
            _check_arena(fd, arena_bytes, frame_bytes)
            self._headroom = Headroom()
            try:
                mover = self._choose_mover(fd, arena_bytes, frame_bytes, mechanism, remap)
            except TiermemError:
                self._headroom.close()
                raise
        finally:
            os.close(fd)
        self.mechanism = mover.mechanism
        self._mover: Mover | None = mover  # None once closed
        self.frame_bytes = frame_bytes
        self._addresses = [0] * (arena_bytes // frame_bytes)  # where each frame is; 0 is home
        self._ranges: dict[int, Range] = {}
        self._places: dict[int, list[int]] = {}  # of each range: the frame at each place
        self._ids = itertools.count(1)
        self._history: deque[tuple[str, int, int, tuple[Run, ...]]] = deque(maxlen=_HISTORY_EVENTS)
        _live.add(self)

    def reserve(self, nbytes: int) -> Range:
        """A range of at least `nbytes`, PROT_NONE until frames are mapped. From 2 MiB on it starts at a multiple of
        2 MiB, below at one of the frame size. Raises InvalidArgument, ResourceExhausted.
        """
        self._open_mover()
        if nbytes <= 0:
            raise InvalidArgument(f"a range of {nbytes} bytes has no address; give at least 1")
        size = round_up(nbytes, self.frame_bytes)
        address = reserve_addresses(size, HUGE_BYTES if nbytes >= HUGE_BYTES else self.frame_bytes)
        range_ = Range(next(self._ids), address, size)
        self._ranges[range_.id] = range_
        self._places[range_.id] = [_NO_FRAME] * (size // self.frame_bytes)
        return range_

    def release(self, range_: Range) -> None:
        """Give the addresses back; its frames must be home. Nothing may point there any more."""
        frames = [frame for frame in self._frames_in(range_) if frame != _NO_FRAME]
        if frames:
            raise self._misuse(f"range {range_.id} is released with frames in it", frames)
        del self._ranges[range_.id], self._places[range_.id]
        release_addresses(range_.address, range_.nbytes)

    def map(self, range_: Range, offset_bytes: int, runs: Sequence[Run]) -> None:
        """Bring the frames of `runs`, pairs (first frame, count), side by side into the range from `offset_bytes` on;
        from then on they are readable and writable there. All or nothing.

        Raises InvalidArgument; ResourceExhausted (too many mappings); TiermemError, with the history, for a frame that
        is not home or a place that is taken.
        """
        mover, places, first, frames = self._plan(range_, offset_bytes, runs)
        addresses, address, end = self._addresses, range_.address + offset_bytes, first + len(frames)
        for start, count in runs:
            if any(addresses[start : start + count]):
                away = [frame for frame in frames if addresses[frame]]
                raise self._misuse(f"frames to be mapped into range {range_.id} + {offset_bytes} are not home", away)
        if places[first:end].count(_NO_FRAME) != len(frames):
            taken = [frame for frame in places[first:end] if frame != _NO_FRAME]
            raise self._misuse(f"range {range_.id} + {offset_bytes} is taken", taken)
        self._move(mover.enter, mover.leave, address, runs)
        places[first:end] = frames
        for start, count in runs:
            stop = address + count * self.frame_bytes
            addresses[start : start + count] = range(address, stop, self.frame_bytes)
            address = stop
        self._history.append(("map", range_.id, offset_bytes, tuple(runs)))

    def unmap(self, range_: Range, offset_bytes: int, runs: Sequence[Run]) -> None:
        """Take the frames of `runs` home from where `map` brought them, in this order. All or nothing; raises alike."""
        mover, places, first, frames = self._plan(range_, offset_bytes, runs)
        end = first + len(frames)
        if places[first:end] != frames:
            raise self._misuse(f"range {range_.id} + {offset_bytes} holds {places[first:end]}, not {frames}", frames)
        self._move(mover.leave, mover.enter, range_.address + offset_bytes, runs)
        places[first:end] = [_NO_FRAME] * len(frames)
        for start, count in runs:
            self._addresses[start : start + count] = [0] * count
        self._history.append(("unmap", range_.id, offset_bytes, tuple(runs)))

    @property
    def frames(self) -> int:
        return len(self._addresses)

    @property
    def home(self) -> int:
        """Where frame 0 is while it is at home; the others follow. Raises Unsupported where frames move by mmap."""
        home = self._open_mover().home
        if home is None:
            raise Unsupported("frames that move by mmap have no home in this process; use Linux 5.13 or newer")
        return home

    def address(self, range_: Range) -> int:
        """The first address of a range that is reserved here; InvalidArgument for any other."""
        self._frames_in(range_)
        return range_.address

    def as_buffer(self, range_: Range, offset_bytes: int, nbytes: int) -> ctypes.Array[ctypes.c_ubyte]:
        """Memory for `torch.frombuffer` or `memoryview`. Owns nothing; usable while frames are mapped there."""
        address = self.address(range_)
        if offset_bytes < 0 or nbytes < 0 or offset_bytes + nbytes > range_.nbytes:
            raise InvalidArgument(f"{nbytes} bytes at {offset_bytes} are not inside {range_}")
        return (ctypes.c_ubyte * nbytes).from_address(address + offset_bytes)

    @property
    def moved(self) -> tuple[int, float]:
        """Moves and their seconds since construction; cheaper than `stats`."""
        return self._counters.moves, self._counters.seconds

    def stats(self) -> AddressSpaceStats:
        return AddressSpaceStats(
            mechanism=self.mechanism,
            mapped_bytes=self.frame_bytes * sum(1 for address in self._addresses if address),
            ranges=len(self._ranges),
            reserved_bytes=sum(range_.nbytes for range_ in self._ranges.values()),
            moves=self._counters.moves,
            moved_bytes=self._counters.moved_bytes,
            syscalls=self._counters.syscalls,
            splits=self._counters.splits,
            seconds=self._counters.seconds,
        )

    def close(self) -> None:
        """Unmap everything; idempotent. A tensor that still points here is a fault from now on."""
        if self._mover is None:
            return
        mover, self._mover = self._mover, None
        _live.discard(self)
        for range_ in self._ranges.values():
            release_addresses(range_.address, range_.nbytes)
        mover.close()
        self._headroom.close()
        self._ranges.clear()
        self._places.clear()
        self._addresses = [0] * len(self._addresses)

    def check_invariants(self) -> None:
        """Raise AssertionError unless every frame is at home or at exactly one place, and both tables say the same."""
        placed = [
            (frame, self._ranges[id_].address + place * self.frame_bytes)
            for id_, frames in self._places.items()
            for place, frame in enumerate(frames)
            if frame != _NO_FRAME
        ]
        told = [(frame, address) for frame, address in enumerate(self._addresses) if address]
        assert sorted(placed) == told, f"the ranges hold {sorted(placed)}, the frames say {told}"
        spans = sorted((range_.address, range_.address + range_.nbytes) for range_ in self._ranges.values())
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans)), f"ranges overlap: {spans}"

    def close_in_child(self) -> None:
        """For a forked child, which inherits no frames: make the gaps PROT_NONE, so that a touch dies there instead of
        reading whatever the child's allocator would put in them, and close the object without unmapping.
        """
        if self._mover is None:
            return
        for id_, frames in self._places.items():
            for first, count in _as_runs(place for place, frame in enumerate(frames) if frame != _NO_FRAME):
                protect_hole(self._ranges[id_].address + first * self.frame_bytes, count * self.frame_bytes)
        home = _as_runs(frame for frame, address in enumerate(self._addresses) if not address)
        self._mover.forget_in_child(home, self.frame_bytes)
        self._mover = None

    def _choose_mover(
        self, fd: int, arena_bytes: int, frame_bytes: int, mechanism: Mechanism | None, remap: Remap
    ) -> Mover:
        if mechanism is not Mechanism.MMAP:
            mover = RemapMover(fd, arena_bytes, self._counters, self._headroom, remap)
            supported = False
            try:
                supported = mover.supported(frame_bytes)
            finally:
                if not supported:
                    mover.close()
            if supported:
                return mover
            if mechanism is Mechanism.MREMAP:
                raise InvalidArgument("no mremap(DONTUNMAP) of shared memory here; use Linux 5.13 or Mechanism.MMAP")
            _log.warning("no mremap(DONTUNMAP) of shared memory (Linux 5.13 has it): frames move by mmap, slower")
        return FileMover(fd, self._counters)

    def _plan(self, range_: Range, offset_bytes: int, runs: Sequence[Run]) -> tuple[Mover, list[int], int, list[int]]:
        """(mover, the range's places, the first one, the frames in order), after checks that need no other table."""
        mover, places = self._open_mover(), self._frames_in(range_)
        frames: list[int] = []
        for start, count in runs:
            if count < 1 or start < 0 or start + count > len(self._addresses):
                raise InvalidArgument(f"run ({start}, {count}) is outside the arena's {len(self._addresses)} frames")
            frames.extend(range(start, start + count))
        if len(runs) > 1 and len(set(frames)) != len(frames):
            raise InvalidArgument(f"runs {list(runs)} name a frame twice")
        nbytes = len(frames) * self.frame_bytes
        if offset_bytes < 0 or offset_bytes % self.frame_bytes or offset_bytes + nbytes > range_.nbytes:
            raise InvalidArgument(
                f"{nbytes} bytes at {offset_bytes} are not whole frames of {self.frame_bytes} bytes inside {range_}"
            )
        return mover, places, offset_bytes // self.frame_bytes, frames

    def _move(
        self,
        forward: Callable[[int, int, int], None],
        back: Callable[[int, int, int], None],
        address: int,
        runs: Sequence[Run],
    ) -> None:
        """Move run by run; if one fails, those before it go back."""
        started_s = time.perf_counter()
        self._headroom.hold()
        done: list[tuple[int, int, int]] = []
        try:
            for start, count in runs:
                piece = (start * self.frame_bytes, address, count * self.frame_bytes)
                forward(*piece)
                done.append(piece)
                address += piece[2]
        except TiermemError:
            with self._headroom.given_up():
                for piece in reversed(done):
                    back(*piece)
            raise
        counters = self._counters
        counters.moves += len(done)
        for piece in done:
            counters.moved_bytes += piece[2]
        counters.seconds += time.perf_counter() - started_s

    def _frames_in(self, range_: Range) -> list[int]:
        if self._ranges.get(range_.id) is not range_:  # `reserve` makes one for each
            raise InvalidArgument(f"{range_} is not reserved here (released, or of another address space)")
        return self._places[range_.id]

    def _open_mover(self) -> Mover:
        if self._mover is None:
            raise InvalidArgument("the address space is closed (or this process is a forked child of its owner)")
        return self._mover

    def _misuse(self, what: str, frames: Iterable[int]) -> TiermemError:
        where = ", ".join(f"{frame} at {self._addresses[frame]:#x}" for frame in frames)
        events = "; ".join(f"{verb} {list(runs)} range {id_} + {offset}" for verb, id_, offset, runs in self._history)
        return TiermemError(f"{what} (frames, 0x0 is home: {where}); history: {events or 'none'}")


def _check_arena(fd: int, arena_bytes: int, frame_bytes: int) -> None:
    if frame_bytes < mmap.PAGESIZE or frame_bytes & (frame_bytes - 1):
        raise InvalidArgument(f"a frame of {frame_bytes} bytes is not a power of two of at least {mmap.PAGESIZE}")
    if arena_bytes <= 0 or arena_bytes % frame_bytes:
        raise InvalidArgument(f"an arena of {arena_bytes} bytes is not whole frames of {frame_bytes} bytes")
    held_bytes = os.fstat(fd).st_size
    if held_bytes < arena_bytes:
        raise InvalidArgument(f"the descriptor holds {held_bytes} bytes, not the arena's {arena_bytes}")
    if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
        raise InvalidArgument("the arena is not sealed against shrinking (F_SEAL_SHRINK): any access could be SIGBUS")


def _as_runs(numbers: Iterable[int]) -> list[Run]:
    """Ascending numbers as runs (first, count)."""
    runs: list[Run] = []
    for number in numbers:
        if runs and number == sum(runs[-1]):
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((number, 1))
    return runs


_live: weakref.WeakSet[AddressSpace] = weakref.WeakSet()


def _close_all_in_child() -> None:
    for space in list(_live):
        space.close_in_child()


os.register_at_fork(after_in_child=_close_all_in_child)
