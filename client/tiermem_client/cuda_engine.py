"""Copies between pinned host memory and a GPU, on a stream for each direction."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from tiermem.errors import TiermemError
from tiermem.stats import DeviceKind, DeviceLink, LinkStats
from tiermem.trace import Span
from tiermem_client.copy_engine import Event, Moment, Piece
from tiermem_client.cuda_driver import Driver, TimedMoment


class CudaEngine:
    """A `CopyEngine`. The times of copies are the device's, brought to this process's clock at the beginning."""

    kind = DeviceKind.CUDA

    def __init__(self, driver: Driver, on_span: Callable[[Span], None] = lambda span: None) -> None:
        self.name, self._driver, self._on_span = driver.device, driver, on_span
        self._stats = {self.kind.inward: LinkStats(), self.kind.outward: LinkStats()}
        self._streams: dict[DeviceLink, Any] = {link: driver.stream() for link in self._stats}
        self._under_way: dict[DeviceLink, deque[tuple[Event, TimedMoment, TimedMoment]]] = {
            link: deque() for link in self._stats
        }
        self._began = driver.mark(self._streams[self.kind.inward])
        self._began.wait()
        self._began_s = time.monotonic()
        self._pinned: int | None = None
        self._closed = False

    def pin(self, address: int, nbytes: int) -> str:
        """Pin the host memory of the copies, until `close`. Why that was not possible, or nothing: copies from and to
        pageable memory work too, through memory of the driver's, and slower.
        """
        try:
            self._driver.register(address, nbytes)
        except TiermemError as error:
            return str(error)
        self._pinned = address
        return ""

    def h2d(self, pieces: Sequence[Piece], after: Sequence[Moment] = ()) -> Event:
        return self._ask(self.kind.inward, pieces, after)

    def d2h(self, pieces: Sequence[Piece], after: Sequence[Moment] = ()) -> Event:
        return self._ask(self.kind.outward, pieces, after)

    def _ask(self, link: DeviceLink, pieces: Sequence[Piece], after: Sequence[Moment]) -> Event:
        self._account(link)
        stream, asked_s = self._streams[link], time.monotonic()
        for moment in after:
            self._driver.follow(stream, moment)
        began = self._driver.mark(stream)
        self._driver.copy(stream, pieces, link is self.kind.inward)
        ended = self._driver.mark(stream)
        event = Event(link, tuple(pieces), asked_s, ended, tuple(after))
        self._under_way[link].append((event, began, ended))
        return event

    def wait(self, event: Event) -> None:
        event.complete.wait()

    def query(self, event: Event) -> bool:
        return event.complete.is_set()

    def links(self) -> dict[DeviceLink, LinkStats]:
        for link in self._stats:
            self._account(link)
        return dict(self._stats)

    def _account(self, link: DeviceLink) -> None:
        """Count the copies that are complete."""
        under_way = self._under_way[link]
        while under_way and under_way[0][2].is_set():
            event, began, ended = under_way.popleft()
            start_s = self._began_s + self._began.seconds_until(began)
            seconds, before = began.seconds_until(ended), self._stats[link]
            self._stats[link] = LinkStats(
                before.bytes + event.nbytes,
                before.transfers + 1,
                before.seconds + seconds,
                before.queue_seconds + max(0.0, start_s - event.asked_s),
            )
            self._on_span(Span(str(link), "copy", start_s, start_s + seconds, event.nbytes, detail=self.name))

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for link, under_way in self._under_way.items():
            if under_way:
                under_way[-1][2].wait()
            self._account(link)
        if self._pinned is not None:
            self._driver.unregister(self._pinned)
