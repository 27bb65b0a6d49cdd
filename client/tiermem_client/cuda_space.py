"""Frames of a GPU's memory that enter fixed ranges of addresses, by the driver's virtual memory management.

Every frame is an allocation of its own. It is mapped at its place from `home` on for good, which is where copies go,
and in a range as well while it is used there; a tensor over a range keeps its address for life. A mapping stays after
its use until its frames are wanted elsewhere or its copy leaves, so that what stays on the device costs no call.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tiermem.allocator import Run
from tiermem.errors import InvalidArgument, TiermemError
from tiermem.units import round_up
from tiermem_client.address_space import Range
from tiermem_client.copy_engine import Moment
from tiermem_client.cuda_driver import Driver

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Place:
    """Frames that are mapped somewhere in a range. `used`: computing may still be asked for there; otherwise `done` is
    when the last of it is (None: it is).
    """

    address: int
    runs: tuple[Run, ...]
    used: bool = True
    done: Moment | None = None
    leaving: bool = False

    def frames(self) -> list[int]:
        return [frame for first, count in self.runs for frame in range(first, first + count)]


class CudaSpace:
    """Takes `frames` frames of device memory at once. Raises ResourceExhausted, Unsupported."""

    def __init__(self, driver: Driver, frames: int, frame_bytes: int) -> None:
        if frame_bytes % driver.granularity_bytes:
            raise InvalidArgument(f"frames of {frame_bytes} bytes are not multiples of {driver.granularity_bytes}")
        self.device, self.frames, self.frame_bytes = driver.device, frames, frame_bytes
        self._driver = driver
        self._ids = itertools.count(1)
        self._ranges: dict[int, Range] = {}
        self._places: dict[tuple[int, int], _Place] = {}  # by range and offset
        self._users: list[_Place | None] = [None] * frames  # of each frame: where it was used last
        self._leaving: list[tuple[int, int]] = []
        self._handles: list[Any] = []
        self._mapped_at_home = 0  # frames
        self._closed = False
        self.home = driver.reserve(frames * frame_bytes)
        try:
            for frame in range(frames):
                self._handles.append(driver.create(frame_bytes))
                driver.map(self.home + frame * frame_bytes, frame_bytes, self._handles[frame])
                self._mapped_at_home += 1
            driver.allow(self.home, frames * frame_bytes)
        except TiermemError:
            self.close()
            raise

    def reserve(self, nbytes: int) -> Range:
        if nbytes <= 0:
            raise InvalidArgument(f"a range of {nbytes} bytes has no address; give at least 1")
        size = round_up(nbytes, self.frame_bytes)
        range_ = Range(next(self._ids), self._driver.reserve(size), size, self._driver.device)
        self._ranges[range_.id] = range_
        return range_

    def release(self, range_: Range) -> None:
        for key in [key for key in self._places if key[0] == range_.id]:
            assert not self._places[key].used, f"range {range_.id} is released while offset {key[1]} is used"
            self._clear(key)
        del self._ranges[range_.id]
        self._driver.free(range_.address, range_.nbytes)

    def map(self, range_: Range, offset_bytes: int, runs: Sequence[Run]) -> None:
        self._sweep()
        key, wanted = (range_.id, offset_bytes), tuple(runs)
        place = self._places.get(key)
        if place is not None and place.runs != wanted:
            self._clear(key)
            place = None
        if place is None:
            place = _Place(range_.address + offset_bytes, wanted)
            self._enter(place)
            self._places[key] = place
        for moment in self.settled(wanted):  # of another stream, perhaps: nothing is written here before
            self._driver.follow(None, moment)
        place.used, place.done, place.leaving = True, None, False
        for frame in place.frames():
            self._users[frame] = place

    def _enter(self, place: _Place) -> None:
        at, size = place.address, self.frame_bytes
        try:
            for frame in place.frames():
                self._driver.map(at, size, self._handles[frame])
                at += size
            self._driver.allow(place.address, at - place.address)
        except TiermemError:
            if at > place.address:
                self._driver.unmap(place.address, at - place.address)
            raise

    def unmap(self, range_: Range, offset_bytes: int, runs: Sequence[Run]) -> None:
        place = self._places[range_.id, offset_bytes]
        assert place.used and place.runs == tuple(runs), f"{tuple(runs)} are not used at {place}"
        place.used, place.done = False, self._driver.mark()

    def settled(self, runs: Sequence[Run]) -> list[Moment]:
        users = {self._users[frame] for first, count in runs for frame in range(first, first + count)}
        moments = [self._done(place) for place in users if place is not None]
        return [moment for moment in moments if moment is not None]

    def _done(self, place: _Place) -> Moment | None:
        """When all computing that was asked for there is done; None where it is."""
        if place.used:
            return self._driver.mark()
        if place.done is not None and place.done.is_set():
            place.done = None
        return place.done

    def vacate(self, range_: Range, offset_bytes: int) -> None:
        key = (range_.id, offset_bytes)
        place = self._places.get(key)
        if place is not None:
            assert not place.used, f"what is used at {place} leaves the device"
            place.leaving = True
            self._leaving.append(key)
        self._sweep()

    def _sweep(self) -> None:
        """Unmap what has left, as soon as nothing computes there."""
        waiting = []
        for key in self._leaving:
            place = self._places.get(key)
            if place is None or not place.leaving:
                continue  # its range is gone, or it was mapped again
            if self._done(place) is None:
                self._clear(key)
            else:
                waiting.append(key)
        self._leaving = waiting

    def _clear(self, key: tuple[int, int]) -> None:
        """Unmap a place, when nothing computes there any more."""
        place = self._places[key]
        if place.done is not None:
            place.done.wait()
            place.done = None
        self._driver.unmap(place.address, len(place.frames()) * self.frame_bytes)
        del self._places[key]

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            self._give_back()
        except TiermemError as error:  # a device that has failed takes nothing back; the process's end frees it
            _log.warning("device memory was not given back: %s", error)

    def _give_back(self) -> None:
        self._driver.synchronize()
        for place in self._places.values():
            self._driver.unmap(place.address, len(place.frames()) * self.frame_bytes)
        for range_ in self._ranges.values():
            self._driver.free(range_.address, range_.nbytes)
        if self._mapped_at_home:
            self._driver.unmap(self.home, self._mapped_at_home * self.frame_bytes)
        for handle in self._handles:
            self._driver.destroy(handle)
        self._driver.free(self.home, self.frames * self.frame_bytes)

    def check_invariants(self) -> None:
        """Raise AssertionError where a frame is used in two places, or places overlap."""
        used = [frame for place in self._places.values() if place.used for frame in place.frames()]
        assert len(used) == len(set(used)), "a frame is used in two places"
        spans = sorted((p.address, p.address + len(p.frames()) * self.frame_bytes) for p in self._places.values())
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans)), "places overlap"
