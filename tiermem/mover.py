"""Moves bytes between tiers: deadline-ordered queues, one per flash directory, worked off by named threads in chunks.

A slow directory holds up only its own queue. Between two chunks of a transfer a worker takes whatever is most urgent
then, so an urgent read waits for one chunk at most; several workers share one transfer where nothing else waits. At
most `workers_per_place` chunks per place are in flight, hence at most that many times the chunk size in bytes.
"""

from __future__ import annotations

import enum
import heapq
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from tiermem.clock import Clock, MonotonicClock
from tiermem.errors import DaemonUnavailable, InvalidArgument, TiermemError
from tiermem.stats import Link, LinkStats

_log = logging.getLogger(__name__)

Chunk = Callable[[], None]
"""Does one chunk's blocking I/O. Raises TiermemError; anything else is taken for a bug and becomes one with code
INTERNAL.
"""

MAX_WRITERS_PER_PLACE = 2
"""Reads lose 20 to 40 % of their rate beside more writers (measured)."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """Where a transfer goes, and its chunks in order."""

    place: int
    chunks: Sequence[Chunk]


@dataclass(frozen=True, slots=True, eq=False)
class Transfer:
    """One movement of `nbytes` over `link`.

    `work` is Prepared when place and chunks are known (a read), or a function that finds them, which may block and runs
    on a thread of its own stage first (a write-back reserves flash there, and may have to grow a file). Hash in the
    chunks, not there: chunks run in parallel.

    Lower `deadline_s` (of the mover's clock; -inf is a demand) goes first, then reads before write-backs, then first
    come. `on_done(error)` is called exactly once, on a worker thread with no lock of the mover held, when no chunk is
    running any more: with None if all were done, else with the first error; chunks not begun by then are never begun. A
    function that had returned by then may have reserved something: `on_done` is where it is freed. `job` labels
    statistics.
    """

    link: Link
    nbytes: int
    work: Prepared | Callable[[], Prepared]
    on_done: Callable[[TiermemError | None], None]
    deadline_s: float = math.inf
    job: str = ""


class _State(enum.Enum):
    """Of a ticket: QUEUED -> RUNNING (a chunk was begun) -> DRAINING (none is left to begin) -> DONE.

    An error leads from QUEUED and RUNNING to DRAINING; a prepared write-back goes from DRAINING back to QUEUED.
    """

    QUEUED = "queued"
    RUNNING = "running"
    DRAINING = "draining"
    DONE = "done"


_Key = tuple[float, bool, int]  # deadline, is a write-back, serial


@dataclass(slots=True, eq=False)
class Ticket:
    """A submitted transfer, to be handed to `Mover.expedite`. Its fields are the mover's, guarded by Mover._lock."""

    transfer: Transfer
    submitted_s: float
    key: _Key
    queue: _Queue
    tallies: Sequence[_Tally]
    chunks: Sequence[Chunk] = ()
    prepared: Prepared | None = None
    begun: int = 0
    running: int = 0
    state: _State = _State.QUEUED
    error: TiermemError | None = None
    queue_s: float = 0.0
    io_s: float = 0.0

    @property
    def writes(self) -> bool:
        return self.transfer.link is Link.DRAM_TO_FLASH


class _Queue:
    """The transfers of one place, or of the preparing stage, in order. Guarded by Mover._lock (see `changed`)."""

    def __init__(self, lock: threading.Lock, most_writers: int) -> None:
        self.changed = threading.Condition(lock)
        self.most_writers = most_writers
        self.writers = 0
        self._reads: list[tuple[_Key, Ticket]] = []  # heaps; outdated entries are skipped (see _awaits)
        self._writes: list[tuple[_Key, Ticket]] = []

    @property
    def wants_writer(self) -> bool:
        """Whether a write-back that may have been passed over can begin now: a worker may sleep beside it."""
        return self.writers == self.most_writers - 1 and bool(self._writes)

    def push(self, ticket: Ticket) -> None:
        heapq.heappush(self._writes if ticket.writes else self._reads, (ticket.key, ticket))
        self.changed.notify()

    def top(self, writers_count: bool) -> Ticket | None:
        """The ticket to serve now. If `writers_count`, write-backs are passed over while there are enough writers."""
        for heap in (self._reads, self._writes):
            while heap and not self._awaits(*heap[0]):
                heapq.heappop(heap)
        writes = [] if writers_count and self.writers >= self.most_writers else self._writes[:1]
        return min(self._reads[:1] + writes, default=(None, None))[1]

    def _awaits(self, key: _Key, ticket: Ticket) -> bool:
        """Whether an entry is still the place of its ticket in the order, and there is something to begin."""
        return key == ticket.key and ticket.queue is self and ticket.state in (_State.QUEUED, _State.RUNNING)


class Mover:
    """The daemon's transfers over all places (flash directories, by index). Any thread may call any method."""

    def __init__(
        self, places: int, *, workers_per_place: int = 4, clock: Clock | None = None, name: str = "tiermem-mover"
    ) -> None:
        if places < 1 or workers_per_place < 1:
            raise InvalidArgument(
                f"{places} places with {workers_per_place} workers each cannot move anything; give at least 1 of both"
            )
        self._clock = clock or MonotonicClock()
        # Owner: this mover; never held while a chunk, a `work` function or `on_done` runs
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._serial = 0  # guarded by _lock
        self._unfinished = 0  # guarded by _lock
        self._tallies: dict[tuple[str | None, Link], _Tally] = {}  # guarded by _lock; job None: all jobs
        self._closed = False  # guarded by _lock
        self._places = [_Queue(self._lock, min(MAX_WRITERS_PER_PLACE, workers_per_place)) for _ in range(places)]
        # One thread more than there are places: a directory that hangs while a file grows in it holds up one of them,
        # not the others.
        self._preparing = _Queue(self._lock, places + 1)
        self._threads = [
            threading.Thread(target=self._work, args=(queue,), name=f"{name}-{label}-{i}", daemon=True)
            for label, queue, workers in (
                *((str(place), queue, workers_per_place) for place, queue in enumerate(self._places)),
                ("prepare", self._preparing, places + 1),
            )
            for i in range(workers)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, transfer: Transfer) -> Ticket:
        """Queue a transfer; never blocks on I/O.

        Raises DaemonUnavailable once closed and InvalidArgument for an unknown place; `on_done` is not called then.
        """
        return self.submit_all([transfer])[0]

    def submit_all(self, transfers: Sequence[Transfer]) -> list[Ticket]:
        """As `submit`, in order; all of them or none."""
        queues = [self._place(t.work.place) if isinstance(t.work, Prepared) else self._preparing for t in transfers]
        now_s = self._clock.now_s()
        with self._lock:
            if self._closed:
                raise _closed_error()
            return [self._queue(transfer, queue, now_s) for transfer, queue in zip(transfers, queues, strict=True)]

    def _queue(self, transfer: Transfer, queue: _Queue, now_s: float) -> Ticket:
        """Called under _lock."""
        work, tallies = transfer.work, self._tallies_of(transfer)
        self._serial += 1
        key = (transfer.deadline_s, transfer.link is Link.DRAM_TO_FLASH, self._serial)
        ticket = Ticket(transfer, now_s, key, queue, tallies)
        ticket.chunks = work.chunks if isinstance(work, Prepared) else (partial(self._prepare, ticket, work),)
        self._unfinished += 1
        for tally in tallies:
            tally.queued_bytes += transfer.nbytes
        queue.push(ticket)
        return ticket

    def expedite(self, ticket: Ticket, deadline_s: float) -> None:
        """Move a transfer forward, as when a prefetch turns out to be waited for. Does nothing if it is as urgent, or
        all begun.
        """
        with self._lock:
            if deadline_s < ticket.key[0]:
                ticket.key = (deadline_s, *ticket.key[1:])
                if ticket.state in (_State.QUEUED, _State.RUNNING):
                    ticket.queue.push(ticket)

    def links(self, job: str | None = None) -> dict[Link, LinkStats]:
        """Counts per link, of one job or of all. `bytes` and `transfers` are those completed without error."""
        with self._lock:
            return {link: self._tallies.get((job, link), _Tally()).snapshot() for link in Link}

    def forget(self, job: str) -> None:
        """Drop the own counts of a job whose transfers have ended; those of all jobs keep them."""
        with self._lock:
            for link in Link:
                self._tallies.pop((job, link), None)

    def idle(self) -> bool:
        """Whether every transfer's `on_done` has returned."""
        with self._lock:
            return self._unfinished == 0

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until `idle`; False if that took longer."""
        with self._lock:
            return self._idle.wait_for(lambda: self._unfinished == 0, timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Accept nothing more, fail what was not begun with DaemonUnavailable, wait for what is running, end the
        threads. Idempotent.

        False, with a warning naming them, if threads are still in I/O after `timeout_s`. Not to be called from
        `on_done`.
        """
        with self._lock:
            self._closed = True
            for queue in (*self._places, self._preparing):
                queue.changed.notify_all()
        deadline_s = time.monotonic() + timeout_s  # real seconds, whatever the mover's clock says
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        stuck = [thread.name for thread in self._threads if thread.is_alive()]
        if stuck:
            _log.warning("mover: still in I/O after %.1f s: %s", timeout_s, ", ".join(stuck))
        return not stuck

    def _place(self, place: int) -> _Queue:
        if not 0 <= place < len(self._places):
            raise InvalidArgument(f"place {place} is unknown; there are {len(self._places)} flash directories")
        return self._places[place]

    def _work(self, queue: _Queue) -> None:
        while (begun := self._begin(queue)) is not None:
            ticket, chunk = begun
            started_s = self._clock.now_s()
            error = None if chunk is None else _run(chunk, ticket.transfer)
            if self._end(ticket, chunk is not None, self._clock.now_s() - started_s, error):
                self._finish(ticket)
            del begun, ticket, chunk, error  # an error's traceback holds views of the arena; do not wait with it

    def _begin(self, queue: _Queue) -> tuple[Ticket, Chunk | None] | None:
        """Wait for the most urgent chunk and begin it; with chunk None the ticket has none. None when the thread is to
        end.
        """
        with self._lock:
            # Once closed, write-backs are only failed, which needs no writer's turn.
            while (ticket := queue.top(writers_count=not self._closed)) is None:
                if self._closed:
                    return None
                queue.changed.wait()
            if self._closed:
                ticket.error = _closed_error()
            if self._closed or not ticket.chunks:
                ticket.state = _State.DRAINING
                return ticket, None
            if ticket.state is _State.QUEUED:
                ticket.state = _State.RUNNING
                ticket.queue_s = self._clock.now_s() - ticket.submitted_s
            chunk = ticket.chunks[ticket.begun]
            ticket.begun += 1
            ticket.running += 1
            queue.writers += ticket.writes
            if ticket.begun == len(ticket.chunks):
                ticket.state = _State.DRAINING
            else:
                queue.changed.notify()  # another worker may share this transfer
            return ticket, chunk

    def _end(self, ticket: Ticket, ran: bool, seconds: float, error: TiermemError | None) -> bool:
        """Take note of a chunk's end; True for the one caller that is to finish the ticket."""
        with self._lock:
            if ran:
                ticket.running -= 1
                if ticket.writes:
                    ticket.queue.writers -= 1
                    if ticket.queue.wants_writer:
                        ticket.queue.changed.notify()
            if ticket.queue is not self._preparing:
                ticket.io_s += seconds
            if error is not None:
                ticket.error = ticket.error or error
                ticket.state = _State.DRAINING
            if ticket.state is not _State.DRAINING or ticket.running:
                return False
            if ticket.queue is self._preparing and ticket.prepared is not None:
                if not self._closed:
                    ticket.queue = self._places[ticket.prepared.place]
                    ticket.chunks, ticket.begun, ticket.state = ticket.prepared.chunks, 0, _State.QUEUED
                    ticket.queue.push(ticket)
                    return False
                ticket.error = _closed_error()
            ticket.state = _State.DONE
            for tally in ticket.tallies:
                tally.count(ticket)
            return True

    def _prepare(self, ticket: Ticket, work: Callable[[], Prepared]) -> None:
        """The one chunk of a ticket in the preparing stage."""
        prepared = work()
        self._place(prepared.place)
        ticket.prepared = prepared

    def _finish(self, ticket: Ticket) -> None:
        transfer = ticket.transfer
        try:
            transfer.on_done(ticket.error)
        except Exception:  # noqa: BLE001 - a bug in a callback must not end the worker
            _log.exception("mover: on_done of a transfer of %d bytes over %s raised", transfer.nbytes, transfer.link)
        with self._lock:
            self._unfinished -= 1
            if self._unfinished == 0:
                self._idle.notify_all()

    def _tallies_of(self, transfer: Transfer) -> list[_Tally]:
        """Called under _lock."""
        found = []
        for key in ((None, transfer.link), (transfer.job, transfer.link)):
            tally = self._tallies.get(key)
            if tally is None:
                tally = self._tallies[key] = _Tally()
            found.append(tally)
        return found


@dataclass(slots=True)
class _Tally:
    """What LinkStats is a snapshot of."""

    bytes: int = 0
    transfers: int = 0
    seconds: float = 0.0
    queue_seconds: float = 0.0
    queued_bytes: int = 0

    def count(self, ticket: Ticket) -> None:
        nbytes = ticket.transfer.nbytes
        self.queued_bytes -= nbytes
        self.seconds += ticket.io_s
        self.queue_seconds += ticket.queue_s
        if ticket.error is None:
            self.bytes += nbytes
            self.transfers += 1

    def snapshot(self) -> LinkStats:
        return LinkStats(self.bytes, self.transfers, self.seconds, self.queue_seconds, self.queued_bytes)


def _run(chunk: Chunk, transfer: Transfer) -> TiermemError | None:
    """Run a chunk; its error, a bug wrapped as INTERNAL."""
    try:
        chunk()
    except TiermemError as error:
        return error
    except Exception as bug:  # noqa: BLE001 - reported as INTERNAL, with its cause
        _log.exception("mover: a chunk of %d bytes over %s raised", transfer.nbytes, transfer.link)
        wrapped = TiermemError(
            f"moving {transfer.nbytes} bytes over {transfer.link} failed in a way that is a bug: {bug!r}; report it"
        )
        wrapped.__cause__ = bug
        return wrapped
    return None


def _closed_error() -> DaemonUnavailable:
    return DaemonUnavailable("the mover is closed; the daemon is stopping")
