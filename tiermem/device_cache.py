"""Which bundles have a copy in device memory, in which frames, and who leaves for others. Pure: no clock, lock or I/O.

A copy is *held* while the computation uses its addresses, *dirty* while it is newer than the bytes in DRAM. Only copies
that nobody holds leave, in the order of a placement policy; a dirty one must be copied back before. As extents are any
list of frames, n frames can be had exactly when n <= free + frames that nobody holds (`tiermem.allocator`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tiermem.allocator import FrameAllocator, Run, choose_victims
from tiermem.errors import TiermemError, WorkingSetTooLarge
from tiermem.placement.base import Placement


@dataclass(slots=True, eq=False)
class DeviceCopy:
    """A bundle's bytes on the device; `runs` in order."""

    runs: tuple[Run, ...]
    held: bool = False
    dirty: bool = False

    @property
    def frames(self) -> int:
        return sum(count for _, count in self.runs)


@dataclass(slots=True)
class DeviceCounts:
    """Since the start: entries that found their copy, those that made one, and copies that left for others."""

    hits: int = 0
    misses: int = 0
    evictions: int = 0


class DeviceCache:
    """Bundles are named by numbers. Not thread-safe: its owner's lock guards it."""

    def __init__(self, frames: int, placement: Placement) -> None:
        self._allocator = FrameAllocator(frames)
        self._placement = placement
        self._copies: dict[int, DeviceCopy] = {}
        self.counts = DeviceCounts()

    @property
    def frames(self) -> int:
        return self._allocator.frames

    @property
    def used_frames(self) -> int:
        return self._allocator.frames - self._allocator.free_frames

    def get(self, bundle: int) -> DeviceCopy | None:
        return self._copies.get(bundle)

    def copies(self) -> Iterator[tuple[int, DeviceCopy]]:
        return iter(self._copies.items())

    def victims(self, frames: int) -> tuple[int, ...]:
        """Who must leave so that `take` succeeds, first to leave first. Raises WorkingSetTooLarge where what is held
        leaves too little.
        """
        chosen = self._choose(frames, lambda _: True)
        if chosen is None:
            held = {bundle: copy.frames for bundle, copy in self._copies.items() if copy.held}
            raise WorkingSetTooLarge(
                f"{frames} frames of device memory wanted, {self.frames} there are, of which {sum(held.values())} are "
                f"in use at once (by {len(held)} bundles); give a larger device budget"
            )
        return chosen

    def victims_ahead(self, frames: int, next_use: Callable[[int], int | None], use: int) -> tuple[int, ...] | None:
        """As `victims`, for a copy that is used in `use` accesses only: nothing leaves that is used before. None where
        that is not enough.
        """

        def later(bundle: int) -> bool:
            distance = next_use(bundle)
            return distance is None or distance > use

        return self._choose(frames, later)

    def _choose(self, frames: int, may_leave: Callable[[int], bool]) -> tuple[int, ...] | None:
        free = self._allocator.free_frames
        if frames <= free:
            return ()
        order = self._placement.eviction_order([b for b, copy in self._copies.items() if not copy.held])
        return choose_victims(frames, free, ((b, self._copies[b].frames) for b in order if may_leave(b)))

    def take(self, bundle: int, frames: int) -> DeviceCopy:
        """Frames for a bundle that has no copy. Raises OutOfFrames where victims have not left."""
        if bundle in self._copies:
            raise TiermemError(f"bundle {bundle} has a copy on the device already: {self._copies[bundle]}")
        copy = self._copies[bundle] = DeviceCopy(self._allocator.take(frames))
        self._placement.used(bundle)
        return copy

    def hold(self, bundle: int) -> None:
        """The computation uses it from now on."""
        self._placement.used(bundle)
        self._copies[bundle].held = True

    def let_go(self, bundle: int) -> None:
        """It does not any more; the copy stays until others need the room."""
        self._placement.used(bundle)
        self._copies[bundle].held = False

    def drop(self, bundle: int) -> None:
        """The copy is gone, whatever was in it. Raises TiermemError where it is held."""
        copy = self._copies[bundle]
        if copy.held:
            raise TiermemError(f"bundle {bundle} leaves the device while it is used: {copy}")
        del self._copies[bundle]
        self._placement.forget(bundle)
        self._allocator.give(copy.runs)

    def check_invariants(self) -> None:
        """Raise AssertionError unless free frames and copies partition the device."""
        self._allocator.check_invariants([run for copy in self._copies.values() for run in copy.runs])
