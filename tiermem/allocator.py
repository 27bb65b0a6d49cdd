"""Frames of an arena or a segment file: which are free, and which bundles must go so that others fit. Pure: no clock,
lock or I/O.

Because an extent is any list of frames there is no external fragmentation: n frames can be had exactly when n <= free
frames + frames of idle extents (DESIGN section 4; property-tested in tests/property/test_arena_theorem.py). Slack is
below one frame per extent.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import TypeVar

from tiermem.errors import InvalidArgument, TierFull

Run = tuple[int, int]
"""(first frame, number of frames), the number at least one."""

_Key = TypeVar("_Key", bound=Hashable)


class OutOfFrames(TierFull):
    """Fewer frames are free than were asked for. `short` says how many fewer. Nothing was changed."""

    def __init__(self, wanted: int, free: int) -> None:
        super().__init__(f"{wanted} frames wanted, {free} free, {wanted - free} short; free or evict extents first")
        self.wanted = wanted
        self.free = free

    @property
    def short(self) -> int:
        return self.wanted - self.free


class FrameAllocator:
    """Hands out frames [0, frames) as runs. Not thread-safe: its owner's lock guards it.

    Invariant: free runs are sorted, disjoint, not adjacent, inside [0, frames), and sum to `free_frames`.
    """

    def __init__(self, frames: int) -> None:
        if frames < 0:
            raise InvalidArgument(f"an allocator of {frames} frames cannot be; give 0 or more")
        self._frames = frames
        self._starts: list[int] = [0] if frames else []
        self._counts: list[int] = [frames] if frames else []
        self._free_frames = frames

    @property
    def frames(self) -> int:
        """All frames, free and held."""
        return self._frames

    @property
    def free_frames(self) -> int:
        return self._free_frames

    @property
    def free_runs(self) -> tuple[Run, ...]:
        """The free runs in order of address."""
        return tuple(zip(self._starts, self._counts, strict=True))

    def take(self, n: int) -> tuple[Run, ...]:
        """Take `n` >= 1 frames in few runs: the smallest run that holds all if there is one, else the longest runs
        first.

        Raises OutOfFrames, changing nothing, exactly when n > free_frames. Cost is linear in the number of free runs.
        """
        if n < 1:
            raise InvalidArgument(f"{n} frames cannot be taken; ask for at least 1")
        if n > self._free_frames:
            raise OutOfFrames(n, self._free_frames)
        index = self._best_fit(n)
        if index is not None:
            return (self._cut(index, n),)
        taken: list[Run] = []
        wanted = n
        # Longest first keeps the list short; the last piece is a best fit again, so that long runs are not nibbled at.
        for start in [start for _, start in sorted(zip(self._counts, self._starts, strict=True), reverse=True)]:
            index = self._best_fit(wanted)
            if index is not None:
                taken.append(self._cut(index, wanted))
                break
            run = self._cut(bisect_left(self._starts, start), wanted)
            taken.append(run)
            wanted -= run[1]
        return tuple(taken)

    def give(self, runs: Iterable[Run]) -> None:
        """Give runs back; neighbours are joined. Raises ValueError, changing nothing, for frames that are free or out
        of range.
        """
        given = sorted(runs)
        for i, (first, count) in enumerate(given):
            if count < 1 or first < 0 or first + count > self._frames:
                raise ValueError(f"run ({first}, {count}) is not inside [0, {self._frames}); give back what was taken")
            if i and given[i - 1][0] + given[i - 1][1] > first:
                raise ValueError(
                    f"run ({first}, {count}) overlaps {given[i - 1]} in the same list; give every frame back once"
                )
            at = bisect_left(self._starts, first)
            if (at < len(self._starts) and self._starts[at] < first + count) or (at and self._end(at - 1) > first):
                raise ValueError(f"run ({first}, {count}) is free already, in part or whole: a double free")
        for first, count in given:
            self._insert(first, count)

    def grow(self, extra: int) -> None:
        """Add `extra` >= 0 free frames at the end."""
        if extra < 0:
            raise InvalidArgument(f"an allocator cannot grow by {extra} frames; give 0 or more")
        self._frames += extra
        if extra:
            self._insert(self._frames - extra, extra)

    def check_invariants(self, held_runs: Iterable[Run]) -> None:
        """Raise AssertionError unless the free runs and `held_runs` partition [0, frames)."""
        assert sum(self._counts) == self._free_frames, (self._counts, self._free_frames)
        for i in range(1, len(self._starts)):
            assert self._end(i - 1) < self._starts[i], f"free runs {self.free_runs[i - 1 : i + 1]} touch or overlap"
        position = 0
        for first, count in sorted((*self.free_runs, *held_runs)):
            assert count >= 1, (first, count)
            assert first == position, f"frames [{position}, {first}) are neither free nor held, or held twice"
            position += count
        assert position == self._frames, f"frames [{position}, {self._frames}) are neither free nor held"

    def _end(self, index: int) -> int:
        return self._starts[index] + self._counts[index]

    def _best_fit(self, n: int) -> int | None:
        fits = ((count, index) for index, count in enumerate(self._counts) if count >= n)
        return min(fits, default=(0, None))[1]

    def _cut(self, index: int, n: int) -> Run:
        """Take up to `n` frames from the front of the free run at `index`."""
        first, count = self._starts[index], self._counts[index]
        n = min(n, count)
        if n == count:
            del self._starts[index], self._counts[index]
        else:
            self._starts[index], self._counts[index] = first + n, count - n
        self._free_frames -= n
        return first, n

    def _insert(self, first: int, count: int) -> None:
        at = bisect_left(self._starts, first)
        self._free_frames += count
        if at < len(self._starts) and first + count == self._starts[at]:
            count += self._counts[at]
            del self._starts[at], self._counts[at]
        if at and self._end(at - 1) == first:
            self._counts[at - 1] += count
        else:
            self._starts.insert(at, first)
            self._counts.insert(at, count)


def choose_victims(need: int, free: int, idle: Iterable[tuple[_Key, int]]) -> tuple[_Key, ...] | None:
    """Whom to evict so that `need` frames are free: keys of `idle`, or None exactly when need > free + all idle frames.

    `idle` yields (key, frames) of extents neither leased nor busy, best victim first, and is read only as far as
    needed. A victim that a later, larger one made superfluous is spared, the least preferred victims first.
    """
    chosen: list[tuple[_Key, int]] = []
    surplus = free - need
    victims = iter(idle)
    while surplus < 0:
        victim = next(victims, None)
        if victim is None:
            return None
        chosen.append(victim)
        surplus += victim[1]
    kept: list[_Key] = []
    for key, frames in reversed(chosen):
        if frames <= surplus:
            surplus -= frames
        else:
            kept.append(key)
    return tuple(reversed(kept))


def byte_ranges(runs: Sequence[Run], frame_bytes: int, offset: int, nbytes: int) -> Iterator[tuple[int, int]]:
    """Where bytes [offset, offset + nbytes) of an extent lie: (first byte, length) per run touched, in the extent's
    order.

    Raises InvalidArgument if the range is not inside the runs.
    """
    room = sum(count for _, count in runs) * frame_bytes
    if offset < 0 or nbytes < 0 or offset + nbytes > room:
        raise InvalidArgument(f"bytes [{offset}, {offset + nbytes}) are not inside an extent of {room} bytes")
    for first, count in runs:
        length = count * frame_bytes
        if offset < length and nbytes:
            part = min(length - offset, nbytes)
            yield first * frame_bytes + offset, part
            nbytes -= part
            offset = 0
        else:
            offset = max(0, offset - length)
