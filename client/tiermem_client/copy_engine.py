"""Copies between the frames of the arena and those of a device, and the engine that emulates a device's.

An engine's copies are asynchronous: what they read must not change, and what they write must not be read, until the
event is complete. Copies of one direction are done in the order in which they were asked for.
"""

from __future__ import annotations

import ctypes
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from tiermem.allocator import Run
from tiermem.stats import DeviceKind, DeviceLink, LinkStats
from tiermem.trace import Span
from tiermem.units import GIB, MIB


class Piece(NamedTuple):
    """Bytes that lie in one piece on both sides: addresses, and how many."""

    source: int
    target: int
    nbytes: int


class Moment(Protocol):
    """A point in the device's work: what was asked of it before is done, or not yet. A `threading.Event` is one."""

    def is_set(self) -> bool: ...

    def wait(self) -> object:
        """Return when it has come."""


class CopyEngine(Protocol):
    """Threading: one thread at a time asks and waits (the client lock)."""

    @property
    def name(self) -> str:
        """Of the device; an emulated one says so."""

    @property
    def kind(self) -> DeviceKind: ...

    def h2d(self, pieces: Sequence[Piece], after: Sequence[Moment] = ()) -> Event:
        """Copy when those moments have come. Returns at once."""

    def d2h(self, pieces: Sequence[Piece], after: Sequence[Moment] = ()) -> Event: ...

    def wait(self, event: Event) -> None:
        """Return when the copy is complete. Raises what has gone wrong with it."""

    def query(self, event: Event) -> bool:
        """Whether it is complete."""

    def links(self) -> dict[DeviceLink, LinkStats]:
        """Counters of both directions."""

    def close(self) -> None:
        """Wait for what was asked for, and end. Idempotent."""


@dataclass(slots=True, eq=False)
class Event:
    """A copy that was asked for."""

    link: DeviceLink
    pieces: tuple[Piece, ...]
    asked_s: float
    complete: Moment
    after: tuple[Moment, ...] = ()

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for piece in self.pieces)


@dataclass(frozen=True, slots=True)
class Pace:
    """A link's speed. The default is about that of PCIe 3.0 with 16 lanes."""

    latency_s: float = 20e-6
    bytes_per_s: float = 12 * GIB


_Asked = tuple[Event, threading.Event]

_POISON = 0xFF
"""In every byte it is NaN as a floating-point number of any width, and -1 as an integer."""
_SLICE_BYTES = 4 * MIB


class EmulatedEngine:
    """A device's copy engines, emulated: a thread for each direction copies in ordinary memory, late and no faster than
    `pace` allows. Until a copy is complete its target is filled with NaN, so that a missing wait shows in the results.
    """

    name = "emulated"
    kind = DeviceKind.EMULATED

    def __init__(self, pace: Pace = Pace(), on_span: Callable[[Span], None] = lambda span: None) -> None:
        self._pace, self._on_span = pace, on_span
        self._queues: dict[DeviceLink, queue.SimpleQueue[_Asked | None]] = {}
        self._stats = {self.kind.inward: LinkStats(), self.kind.outward: LinkStats()}
        self._threads = []
        for link in self._stats:
            asked = self._queues[link] = queue.SimpleQueue()
            thread = threading.Thread(target=self._run, args=(link, asked), name=f"tiermem-{link}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def h2d(self, pieces: Sequence[Piece], after: Sequence[Moment] = ()) -> Event:
        return self._ask(self.kind.inward, pieces, after)

    def d2h(self, pieces: Sequence[Piece], after: Sequence[Moment] = ()) -> Event:
        return self._ask(self.kind.outward, pieces, after)

    def _ask(self, link: DeviceLink, pieces: Sequence[Piece], after: Sequence[Moment]) -> Event:
        complete = threading.Event()
        event = Event(link, tuple(pieces), time.monotonic(), complete, tuple(after))
        for _, target, nbytes in event.pieces:
            ctypes.memset(target, _POISON, nbytes)
        self._queues[link].put((event, complete))
        return event

    def wait(self, event: Event) -> None:
        event.complete.wait()

    def query(self, event: Event) -> bool:
        return event.complete.is_set()

    def links(self) -> dict[DeviceLink, LinkStats]:
        return dict(self._stats)

    def close(self) -> None:
        for asked in self._queues.values():
            asked.put(None)
        for thread in self._threads:
            thread.join()
        self._threads.clear()

    def _run(self, link: DeviceLink, queued: queue.SimpleQueue[_Asked | None]) -> None:
        while (asked := queued.get()) is not None:
            event, complete = asked
            for moment in event.after:
                moment.wait()
            started_s = time.monotonic()
            ready_s = started_s + self._pace.latency_s
            for source, target, nbytes in _slices(event.pieces):
                ready_s += nbytes / self._pace.bytes_per_s
                if (early_s := ready_s - time.monotonic()) > 0:
                    time.sleep(early_s)
                ctypes.memmove(target, source, nbytes)
            ended_s, before = time.monotonic(), self._stats[link]
            self._stats[link] = LinkStats(
                before.bytes + event.nbytes,
                before.transfers + 1,
                before.seconds + ended_s - started_s,
                before.queue_seconds + started_s - event.asked_s,
            )
            self._on_span(Span(str(link), "copy", started_s, ended_s, event.nbytes, detail=self.name))
            complete.set()


def _slices(pieces: Sequence[Piece]) -> Iterator[Piece]:
    for source, target, nbytes in pieces:
        for at in range(0, nbytes, _SLICE_BYTES):
            yield Piece(source + at, target + at, min(_SLICE_BYTES, nbytes - at))


class Extent(NamedTuple):
    """Runs of frames, in order, in memory that begins at `home`."""

    runs: Sequence[Run]
    frame_bytes: int
    home: int

    def spans(self) -> list[tuple[int, int]]:
        """(address, bytes) of each run."""
        return [(self.home + first * self.frame_bytes, count * self.frame_bytes) for first, count in self.runs]


def pieces_between(source: Extent, target: Extent, nbytes: int) -> list[Piece]:
    """How the first `nbytes` of one extent get into another: cut where either has a gap."""
    pieces, sources, targets = [], source.spans(), target.spans()
    while nbytes:
        (read_at, readable), (write_at, writable) = sources[0], targets[0]
        step = min(readable, writable, nbytes)
        pieces.append(Piece(read_at, write_at, step))
        nbytes -= step
        sources[:1] = [(read_at + step, readable - step)] if step < readable else []
        targets[:1] = [(write_at + step, writable - step)] if step < writable else []
    return pieces
