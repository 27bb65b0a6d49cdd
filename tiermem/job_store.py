"""One job's tensors: its arena, its flash extents, its ledger, and the transfers between them.

Threads: `receive`, `declare`, `admit` come from the service; completions come from the mover's workers. `_lock` guards
the ledger, the flash copies and the counters; it is never held across I/O. Messages for the client go to `outbox` in
the order in which the ledger decided them, under the lock; `wake` is called afterwards, from whatever thread it was.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from tiermem.bundle import BundleSpec, Mode
from tiermem.bundle_io import BundleIO, CopyInProgress, FileCopy, FlashCopy
from tiermem.clock import Clock
from tiermem.errors import DaemonUnavailable, InvalidArgument, ProtocolError, ResourceExhausted, TiermemError
from tiermem.file_pieces import Adoption, pieces_of
from tiermem.grants.effects import Effect, Expedite, FreeFlash, Load, Send, WriteBack
from tiermem.grants.ledger import GrantLedger
from tiermem.grants.messages import ClientBody, DaemonBody, Demand, Grant, Refuse
from tiermem.grants.pins import Lane
from tiermem.layout import ArenaLayout
from tiermem.lookahead import Lookahead, LookaheadOptions, placement_for
from tiermem.mover import Mover, Ticket, Transfer
from tiermem.notices import MAX_NOTICES, Notice, NoticeKind
from tiermem.residency import State
from tiermem.stats import DeviceReport, EvictReason, JobStats, LinkStats, PushOutcome, StallCause, TierStats
from tiermem.tiers.base import Tier
from tiermem.tiers.dram import DramTier
from tiermem.tiers.flash_directory import FlashDirectory
from tiermem.tiers.os_calls import LinuxCalls
from tiermem.tiers.source_file import SourceFile
from tiermem.trace import Span, TraceRing

_log = logging.getLogger("tiermem.job_store")

MAX_FILES = 256
"""Descriptors of a client that one job keeps open."""


@dataclass(slots=True, eq=False)
class _Flight:
    """A transfer that is to be submitted, or has been: then it has a ticket. Fields guarded by JobStore._lock."""

    transfer: Transfer
    ticket: Ticket | None = None
    urgent: bool = False


@dataclass(slots=True)
class _Work:
    """What is to be done without the lock."""

    submit: list[_Flight] = field(default_factory=list)
    expedite: list[Ticket] = field(default_factory=list)


class JobStore:
    """See the module's docstring. Created by `TensorStore.open_job`; `close` ends it, from any thread, once."""

    def __init__(
        self,
        job: str,
        session: str,
        pid: int,
        layout: ArenaLayout,
        dram: DramTier,
        flash: Tier,
        directories: Sequence[FlashDirectory],
        mover: Mover,
        clock: Clock,
        next_bundle_id: Callable[[], int],
        file_place: int = 0,
        lookahead: LookaheadOptions = LookaheadOptions(),  # noqa: B008 - frozen
        new_io: Callable[..., BundleIO] = BundleIO,
    ) -> None:
        """`file_place`: the mover's place where clients' files are read, best one of its own, as they may be on a disk
        that is slow or gone.
        """
        self.job, self.session, self.pid, self.layout = job, session, pid, layout
        self._dram, self._flash, self._directories, self._mover, self._clock = dram, flash, directories, mover, clock
        self._lock = threading.Lock()
        self._drained = threading.Condition(self._lock)
        self.outbox: deque[DaemonBody] = deque()  # guarded by _lock for appends; drained by the service
        self.wake: Callable[[], None] = lambda: None
        self.trace = TraceRing()
        self._names: dict[tuple[Mode, int], str] = {}  # guarded by _lock; what the trace calls a grant of a form
        self._evicted = 0  # guarded by _lock; evictions that the trace has
        self._lookahead = Lookahead(clock.now_s)  # guarded by _lock
        self._ledger = GrantLedger(  # guarded by _lock
            dram.allocator,
            layout.frame_bytes,
            layout.frames_for,
            flash.capacity_bytes // layout.frame_bytes,
            layout.bundle_cap_bytes // layout.frame_bytes,
            placement_for(lookahead, self._next_use, self._lookahead.moment),
            next_bundle_id,
            ", ".join(str(directory.path) for directory in directories),
            self._lookahead,
            int(lookahead.share * dram.allocator.frames),
        )
        self._io = new_io(
            job, self.session, layout.chunk_bytes, dram, flash, self._directories, file_place, self.trace, clock
        )
        self._flights: dict[int, _Flight] = {}  # guarded by _lock; by bundle
        self._files: dict[int, SourceFile] = {}  # guarded by _lock; by the client's number
        self._copies: dict[int, FlashCopy | FileCopy] = {}  # guarded by _lock
        self._asked_at: dict[tuple[str, int], float] = {}  # guarded by _lock
        self._stall_s = dict.fromkeys(StallCause, 0.0)  # guarded by _lock
        self._notices: Counter[NoticeKind] = Counter()  # guarded by _lock
        self._noticed = 0  # guarded by _lock; messages
        self._device: DeviceReport | None = None  # guarded by _lock; the newest
        self._closed = False  # guarded by _lock

    def _next_use(self, bundle: int) -> int | None:
        form = self._ledger.form_expected(bundle)
        return self._lookahead.next_use(form) if form else None

    @property
    def arena_fd(self) -> int:
        """The sealed memfd to pass to the client."""
        return self._dram.fd

    @property
    def flash_quota_bytes(self) -> int:
        return self._flash.capacity_bytes

    # -- the client's side

    def declare(self, specs: list[BundleSpec]) -> None:
        """Raises ProtocolError (the ledger's)."""
        with self._lock:
            self._ledger.declare(specs)

    def admit(self, lane: str, floor_specs: list[int]) -> Lane:
        """Raises ResourceExhausted or ProtocolError (the ledger's)."""
        with self._lock:
            return self._ledger.admit(lane, floor_specs)

    def add_file(self, number: int, fd: int) -> None:
        """Take over a client's descriptor, for `adopt` to name. It is closed with the job, or at once on an error.

        Raises InvalidArgument (not a regular file, not readable), ResourceExhausted (`MAX_FILES`), ProtocolError (the
        number is taken).
        """
        file = SourceFile(fd, LinuxCalls())
        try:
            with self._lock:
                if self._closed:
                    raise DaemonUnavailable(f"job {self.job!r} has ended")
                if number in self._files:
                    raise ProtocolError(f"file {number} was passed in before")
                if len(self._files) == MAX_FILES:
                    raise ResourceExhausted(f"job {self.job!r} has passed in {MAX_FILES} files, which are the most")
                self._files[number] = file
        except TiermemError:
            file.close()
            raise

    def adopt(self, adoption: Adoption) -> int:
        """The id of a new bundle whose bytes are in a file of the client's; no byte moves now.

        Raises ProtocolError for numbers that were never declared or do not fit the form, InvalidArgument where the file
        ends before the bytes do (it may have been cut since the client looked). Nothing is changed then.
        """
        with self._lock:
            spec, file = self._ledger.specs.get(adoption.spec_id), self._files.get(adoption.file)
            if spec is None or file is None:
                raise ProtocolError(f"spec {adoption.spec_id} or file {adoption.file} is unknown to this session")
            chunks = len(self._io.chunks(spec.nbytes))
            if not spec.tensors or len(adoption.offsets) != len(spec.tensors) or len(adoption.digests) != chunks:
                raise ProtocolError(
                    f"adoption of {spec} with {len(adoption.offsets)} offsets for {len(spec.tensors)} tensors and "
                    f"{len(adoption.digests)} digests for {chunks} chunks"
                )
            pieces = pieces_of(spec, adoption.offsets)
            ends = [0, *(piece.bundle_offset + piece.nbytes for piece in pieces)]
            if any(piece.bundle_offset < end for piece, end in zip(pieces, ends, strict=False)):
                raise ProtocolError(f"adoption of {spec}, whose tensors are out of order or overlap")
            end = max(piece.file_offset + piece.nbytes for piece in pieces)
            if end > file.size_bytes:
                raise InvalidArgument(f"{spec} ends at byte {end} of {file.path}, which has {file.size_bytes}")
            bundle = self._ledger.adopt(adoption.spec_id)
            self._copies[bundle] = FileCopy(file, pieces, adoption.digests)
            return bundle

    def report_device(self, report: DeviceReport) -> None:
        """Keep what the client says of its device. Raises ProtocolError where a counter falls: totals never do."""
        with self._lock:
            if self._device is not None and not report.goes_on_from(self._device):
                raise ProtocolError(f"device_report of job {self.job!r} has fallen: {report.links}")
            self._device = report

    def note(self, notice: Notice) -> None:
        """Count what the client says of itself. Raises ProtocolError beyond MAX_NOTICES messages."""
        with self._lock:
            if self._noticed == MAX_NOTICES:
                raise ProtocolError(f"job {self.job!r} has sent {MAX_NOTICES} notices, which are the most")
            self._noticed += 1
            self._notices[notice.kind] += notice.count

    def receive(self, *messages: ClientBody) -> None:
        """Act on messages that came together, in order. Raises ProtocolError (the ledger's)."""
        with self._lock:
            if self._closed:
                return
            for message in messages:
                if isinstance(message, Demand):
                    self._asked_at[message.lane, message.epoch] = self._clock.now_s()
            effects = self._ledger.receive_all(messages)
            work = self._prepare(effects)
        self._perform(work)

    # -- effects

    def _prepare(self, effects: list[Effect]) -> _Work:
        """Under the lock: queue messages in order, free flash, turn the rest into work that is done without it.

        Freeing does no I/O. It is done here so that flash never holds more than the ledger accounts for, and so that
        `close` finds nothing left to be freed when it hears that the transfers have drained.
        """
        work = _Work()
        for effect in effects:
            match effect:
                case Send():
                    self._take_note(effect)
                    self.outbox.append(effect.message)
                case Load(bundle, due_s):
                    record, copy = self._ledger.bundles[bundle], self._copies[bundle]
                    done = partial(self._load_done, bundle)
                    transfer = self._io.load(bundle, record.spec, record.runs, copy, due_s, done)
                    work.submit.append(self._fly(bundle, transfer))
                case WriteBack(bundle, due_s):
                    record, new = self._ledger.bundles[bundle], CopyInProgress()
                    done = partial(self._write_done, bundle, new)
                    flight = self._fly(bundle, self._io.write_back(bundle, record.spec, record.runs, new, due_s, done))
                    work.submit.append(flight)
                case Expedite(bundle):
                    flight = self._flights[bundle]
                    flight.urgent = True
                    if flight.ticket is not None:
                        work.expedite.append(flight.ticket)
                case FreeFlash():
                    old = self._copies.pop(effect.bundle, None)
                    if isinstance(old, FlashCopy):
                        self._flash.free(old.extent)
        self._trace_evictions()
        if self._closed and self._ledger.drained:
            self._drained.notify_all()
        return work

    def _trace_evictions(self) -> None:
        evicted = sum(self._ledger.evictions.values())
        if evicted != self._evicted:
            new, self._evicted, now_s = evicted - self._evicted, evicted, self._clock.now_s()
            self.trace.add(Span("evictions", f"{new} evicted", now_s, now_s))

    def _fly(self, bundle: int, transfer: Transfer) -> _Flight:
        flight = self._flights[bundle] = _Flight(transfer)
        return flight

    def _perform(self, work: _Work, failure: str = "") -> None:
        if failure:
            _log.warning("job %r: %s", self.job, failure)
        if work.submit:
            tickets = self._mover.submit_all([flight.transfer for flight in work.submit])
            with self._lock:
                for flight, ticket in zip(work.submit, tickets, strict=True):
                    flight.ticket = ticket
                    if flight.urgent:
                        work.expedite.append(ticket)
        for ticket in work.expedite:
            self._mover.expedite(ticket, -math.inf)
        self.wake()

    def _take_note(self, effect: Send) -> None:
        """Under the lock: an answer ends a stall; answers and pushes are in the trace."""
        message = effect.message
        if not isinstance(message, Grant | Refuse):
            return
        now_s = self._clock.now_s()
        asked_at = self._asked_at.pop((message.lane, message.answers), now_s)
        if effect.waited_for is not None:
            self._stall_s[effect.waited_for] += now_s - asked_at
        if isinstance(message, Refuse):
            self.trace.add(Span("demand refused", message.code, asked_at, now_s, epoch=message.answers))
            return
        name = self._names.get((message.mode, message.spec))
        if name is None:
            name = f"{message.mode.name.lower()} {self._ledger.specs[message.spec]}"
            self._names[message.mode, message.spec] = name
        track = f"demand {effect.waited_for or 'hit'}" if message.answers else "push"
        self.trace.add(Span(track, name, asked_at, now_s, bundle=message.bundle, epoch=message.answers))

    def _load_done(self, bundle: int, error: TiermemError | None) -> None:
        with self._lock:
            del self._flights[bundle]
            failure = self._failure(bundle, error)
            effects = self._ledger.loaded(bundle) if error is None else self._ledger.load_failed(bundle, error)
            work = self._prepare(effects)
        self._perform(work, failure)

    def _failure(self, bundle: int, error: TiermemError | None) -> str:
        """Under the lock: what to log afterwards; where nobody waits nobody else is told. Empty where all went well."""
        if error is None:
            return ""
        waited = "while it was waited for" if self._ledger.pins.open else "ahead of need"
        return f"{self._ledger.bundles[bundle].spec}, {waited}; nothing runs ahead until the next demand: {error}"

    def _write_done(self, bundle: int, copy: CopyInProgress, error: TiermemError | None) -> None:
        with self._lock:
            del self._flights[bundle]
            failure = self._failure(bundle, error)
            superfluous = copy.extent
            if error is None and self._ledger.bundles[bundle].state != State.DOOMED:
                assert copy.extent is not None
                old = self._copies.get(bundle)
                self._copies[bundle] = FlashCopy(copy.extent, tuple(copy.digests))
                superfluous = old.extent if isinstance(old, FlashCopy) else None
            if superfluous is not None:
                self._flash.free(superfluous)
            effects = self._ledger.written(bundle) if error is None else self._ledger.write_failed(bundle, error)
            work = self._prepare(effects)
        self._perform(work, failure)

    # -- the end, and what it looks like

    def close(self, timeout_s: float = 10.0) -> None:
        """Free everything: the client's process is gone or has said so. Waits for transfers in flight; raises
        DaemonUnavailable after `timeout_s` (a disk that does not answer), and then keeps the frames that are in
        transfer.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            work = self._prepare(self._ledger.exit())
        self._perform(work)
        with self._lock:
            if not self._drained.wait_for(lambda: self._ledger.drained, timeout_s):
                raise DaemonUnavailable(
                    f"job {self.job!r}: transfers did not end within {timeout_s} s; its arena is kept"
                )
        self._flash.close()
        self._dram.close()
        with self._lock:
            files, self._files = list(self._files.values()), {}
        for file in files:
            file.close()
        self._mover.forget(self.session)

    def snapshot(self) -> JobStats:
        """All counters at one instant."""
        with self._lock:
            ledger, frame_bytes = self._ledger, self.layout.frame_bytes
            kinds: Counter[str] = Counter()
            dirty = 0
            for record in ledger.bundles.values():
                kinds[record.spec.kind.name.lower()] += record.spec.nbytes
                dirty += record.spec.nbytes if record.state in (State.DIRTY, State.WRITING) else 0
            leased = ledger.pins.leased()
            frames = self._dram.allocator
            device_links = {} if self._device is None else self._device.links
            used_frames = 0 if self._closed else frames.frames - frames.free_frames
            return JobStats(
                job=self.job,
                session=self.session,
                pid=self.pid,
                tiers={
                    "dram": TierStats(self.layout.arena_bytes, used_frames * frame_bytes),
                    "flash": TierStats(self._flash.capacity_bytes, self._flash.used_bytes),
                    **({} if self._device is None else {str(self._device.kind): self._device.tier}),
                },
                links=dict[str, LinkStats]([*self._mover.links(self.session).items(), *device_links.items()]),
                bytes_by_kind=dict(kinds),
                bundles=len(ledger.bundles),
                dirty_bytes=dirty,
                leases=len(ledger.pins.granted),
                leased_bytes=sum(ledger.bundles[b].frames for b in leased) * frame_bytes,
                hits=ledger.hits,
                misses=ledger.misses,
                creates=ledger.creates,
                commits=ledger.commits,
                refusals=dict(ledger.refusals),
                evictions={reason: ledger.evictions[reason] for reason in EvictReason},
                predictions=self._lookahead.outcomes(),
                pushes={PushOutcome.SENT: ledger.pushes, PushOutcome.USED: ledger.pushes_used},
                stall_seconds=dict(self._stall_s),
                waiting=len(ledger.pins.open),
                notices=dict(self._notices),
            )

    def check_invariants(self) -> None:
        """The ledger's, the tiers', and: a bundle whose newest bytes are in flash has a copy there."""
        with self._lock:
            self._ledger.check_invariants()
            for bundle, record in self._ledger.bundles.items():
                if record.state in (State.FLASH, State.LOADING, State.CLEAN):
                    copy = self._copies.get(bundle)
                    assert copy is not None, f"bundle {bundle} is {record.state} without a flash copy"
                    assert record.external == isinstance(copy, FileCopy), f"bundle {bundle} is not where it should be"
            assert set(self._copies) <= set(self._ledger.bundles), "flash copies of bundles that are gone"
        self._flash.check_invariants()
