"""The flash tier of one job: frames of preallocated segment files, each extent in the flash directory that is least
behind with writing.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

from tiermem.allocator import FrameAllocator, byte_ranges
from tiermem.errors import InvalidArgument, TierFull, TierIOError
from tiermem.layout import ArenaLayout
from tiermem.tiers.base import Extent, check_range, closed_error
from tiermem.tiers.flash_directory import FlashDirectory
from tiermem.tiers.flash_segment import PaddedViews, Segment, cut
from tiermem.units import MIB, format_size, round_up

GROWTH_BYTES = 256 * MIB
"""How much a segment file grows by: large, because growing is a metadata operation and recycled blocks are the fast
ones.
"""


@dataclass(slots=True)
class _Place:
    """One directory's share of the tier. All fields but the first two are guarded by FlashTier._changed."""

    directory: FlashDirectory
    segment: Segment
    allocator: FrameAllocator
    growing: bool = False


class FlashTier:
    """A tier on disk. `Extent.place` is the index in `directories`; other tiers made from the same directories count
    alike.

    I/O goes straight between file and views (O_DIRECT) where the directory allows it. Several threads may reserve at
    once: while one grows a file, others take frames, or grow the file of another directory. Directories take turns
    unless one has more bytes waiting to be written, of all jobs: a slow one gets less, one that hangs nothing more.
    Files are not synced: what they hold dies with the daemon.

    `quota_bytes` bounds the job; None leaves the directories' own quotas. Raises TierFull or TierIOError if a file
    cannot be made.
    """

    def __init__(
        self,
        directories: Sequence[FlashDirectory],
        layout: ArenaLayout,
        job_key: str,
        quota_bytes: int | None,
        name: str = "flash",
    ) -> None:
        if not directories:
            raise InvalidArgument(f"tier {name} of job {job_key!r} has no directory; give at least one")
        frame_bytes = layout.frame_bytes
        room = sum(directory.capacity_bytes // frame_bytes * frame_bytes for directory in directories)
        self.layout = layout
        self.directories = tuple(directories)
        self._name = name
        self._capacity_bytes = room if quota_bytes is None else min(room, quota_bytes // frame_bytes * frame_bytes)
        self._changed = threading.Condition()  # owner: this tier; not held across I/O; notified when a growth has ended
        self._held: dict[Extent, int] = {}  # guarded by _changed; with the bytes that nobody has written yet
        self._turn = 0  # guarded by _changed; the place whose turn it is
        self._claimed_bytes = 0  # guarded by _changed; of the job's quota, growth under way included
        self._closed = False  # guarded by _changed
        self._places: list[_Place] = []  # the list itself never changes after this
        try:
            for directory in directories:
                self._places.append(_Place(directory, Segment(directory, job_key), FrameAllocator(0)))
        except (TierFull, TierIOError):
            self.close()
            raise

    @property
    def name(self) -> str:
        return self._name

    @property
    def capacity_bytes(self) -> int:
        return self._capacity_bytes

    @property
    def used_bytes(self) -> int:
        with self._changed:
            if self._closed:
                return 0
            return (
                sum(place.allocator.frames - place.allocator.free_frames for place in self._places)
                * self.layout.frame_bytes
            )

    def reserve(self, nbytes: int) -> Extent:
        """As the contract says. Grows a file where no frames are free; waits if only files that others are growing
        could serve.
        """
        frames = self.layout.frames_for(nbytes)
        refusals: dict[int, TierFull | TierIOError] = {}
        while True:
            with self._changed:
                index = self._next_place(frames, refusals)
                if index is None:
                    raise self._refusal(nbytes, refusals)
                place = self._places[index]
                if place.allocator.free_frames >= frames:
                    self._turn = (index + 1) % len(self._places)
                    extent = Extent(nbytes, place.allocator.take(frames), index)
                    self._held[extent] = nbytes
                    place.directory.count_unwritten(nbytes)
                    return extent
                short_bytes = (frames - place.allocator.free_frames) * self.layout.frame_bytes
                step_bytes = self._growth(short_bytes)
                self._claimed_bytes += step_bytes
                place.growing = True
            grown_bytes = 0
            try:
                grown_bytes = self._grow(place, step_bytes, short_bytes)
            except (TierFull, TierIOError) as error:
                refusals[index] = error
            finally:
                with self._changed:
                    place.growing = False
                    place.allocator.grow(grown_bytes // self.layout.frame_bytes)
                    self._claimed_bytes -= step_bytes - grown_bytes
                    self._changed.notify_all()

    def free(self, extent: Extent) -> None:
        with self._changed:
            if extent not in self._held:
                raise ValueError(
                    f"{extent} is not held in tier {self._name}; it was freed before, or comes from elsewhere"
                )
            place = self._places[extent.place]
            place.directory.count_unwritten(-self._held.pop(extent))
            place.allocator.give(extent.runs)

    def read(self, extent: Extent, offset: int, views: Sequence[memoryview]) -> None:
        padded, ranges = self._pages(extent, offset, views)
        segment = self._places[extent.place].segment
        for (at, _), part in zip(ranges, cut(padded.whole, [length for _, length in ranges]), strict=True):
            segment.read(at, part)
        padded.store_odd()

    def write(self, extent: Extent, offset: int, views: Sequence[memoryview]) -> None:
        padded, ranges = self._pages(extent, offset, views)
        padded.load_odd()
        segment = self._places[extent.place].segment
        for (at, _), part in zip(ranges, cut(padded.whole, [length for _, length in ranges]), strict=True):
            segment.write(at, part)
        self._count_written(extent, sum(view.nbytes for view in views))

    def close(self) -> None:
        """As the contract says; where I/O is under way, the file's blocks come back when it has ended."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            for extent, unwritten_bytes in self._held.items():
                self.directories[extent.place].count_unwritten(-unwritten_bytes)
            self._held.clear()
            self._changed.notify_all()
        for place in self._places:
            place.segment.close()

    def check_invariants(self) -> None:
        with self._changed:
            if self._closed:
                return
            for index, place in enumerate(self._places):
                place.allocator.check_invariants(
                    run for extent in self._held if extent.place == index for run in extent.runs
                )
            assert all(0 <= unwritten <= extent.nbytes for extent, unwritten in self._held.items()), self._held
            grown_bytes = sum(place.allocator.frames for place in self._places) * self.layout.frame_bytes
            assert grown_bytes <= self._claimed_bytes <= self._capacity_bytes, (
                grown_bytes,
                self._claimed_bytes,
                self._capacity_bytes,
            )

    def _count_written(self, extent: Extent, nbytes: int) -> None:
        with self._changed:
            unwritten_bytes = self._held.get(extent, 0)  # closed meanwhile, or written before
            written_bytes = min(nbytes, unwritten_bytes)
            if written_bytes:
                self._held[extent] = unwritten_bytes - written_bytes
                self.directories[extent.place].count_unwritten(-written_bytes)

    def _next_place(self, frames: int, refusals: dict[int, TierFull | TierIOError]) -> int | None:
        """The place that is least behind, in turn where several are, among those that hold `frames` or may still be
        grown; None if every place refused. Called under _changed.

        A place with free frames that refused to grow is asked again: somebody may have freed an extent meanwhile.
        """
        while True:
            if self._closed:
                raise closed_error(self._name)
            growing = False
            turns = [(self._turn + step) % len(self._places) for step in range(len(self._places))]
            for index in sorted(turns, key=lambda index: self.directories[index].unwritten_bytes):
                place = self._places[index]
                if place.allocator.free_frames >= frames:
                    return index
                if place.growing:
                    growing = True
                elif index not in refusals:
                    short_bytes = (frames - place.allocator.free_frames) * self.layout.frame_bytes
                    if self._claimed_bytes + short_bytes <= self._capacity_bytes:
                        return index
            if not growing:
                return None
            self._changed.wait()

    def _growth(self, short_bytes: int) -> int:
        """How much to ask for: a step, but only an eighth of a fair share of what the quota leaves, so that one job
        does not take a small directory whole. Called under _changed.
        """
        share_bytes = (self._capacity_bytes - self._claimed_bytes) // (8 * len(self._places))
        step_bytes = min(GROWTH_BYTES, share_bytes // self.layout.frame_bytes * self.layout.frame_bytes)
        return max(short_bytes, step_bytes)

    def _grow(self, place: _Place, most_bytes: int, least_bytes: int) -> int:
        """Bytes by which the place's file grew. I/O: no lock is held."""
        directory, frame_bytes = place.directory, self.layout.frame_bytes
        # Near the end of the disk a whole step would be refused though the bytes needed now still fit.
        wanted_bytes = max(least_bytes, min(most_bytes, round_up(directory.free_bytes() // 2, frame_bytes)))
        claimed_bytes = directory.claim(wanted_bytes, least_bytes, frame_bytes)
        try:
            place.segment.extend(claimed_bytes)
        except (TierFull, TierIOError):
            directory.unclaim(claimed_bytes)
            raise
        return claimed_bytes

    def _refusal(self, nbytes: int, refusals: dict[int, TierFull | TierIOError]) -> TierFull | TierIOError:
        if refusals and all(isinstance(error, TierIOError) for error in refusals.values()):
            return next(iter(refusals.values()))
        paths = ", ".join(str(directory.path) for directory in self.directories)
        used = (
            sum(place.allocator.frames - place.allocator.free_frames for place in self._places)
            * self.layout.frame_bytes
        )
        reasons = "; ".join(str(error) for error in refusals.values()) or "the job's quota is reached; raise it"
        return TierFull(
            f"tier {self._name} in {paths} has no room for {format_size(nbytes)}: {format_size(used)} of "
            f"{format_size(self._capacity_bytes)} are held; {reasons}"
        )

    def _pages(
        self, extent: Extent, offset: int, views: Sequence[memoryview]
    ) -> tuple[PaddedViews, list[tuple[int, int]]]:
        """Views padded to whole pages, and the ranges of the file that they are read from or written to."""
        if not 0 <= extent.place < len(self._places):
            raise InvalidArgument(f"{extent} lies in place {extent.place}; tier {self._name} has {len(self._places)}")
        check_range(extent, offset, views)
        padded = PaddedViews(views)
        nbytes = sum(view.nbytes for view in padded.whole)
        return padded, list(byte_ranges(extent.runs, self.layout.frame_bytes, offset, nbytes))
