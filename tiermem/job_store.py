"""One job's tensors: its arena, its flash extents, its ledger, and the transfers between them.

Threads: `receive`, `declare`, `admit` come from the service; completions come from the mover's workers. `_lock` guards
the ledger, the flash copies and the counters; it is never held across I/O. Messages for the client go to `outbox` in
the order in which the ledger decided them, under the lock; `wake` is called afterwards, from whatever thread it was.
"""

from __future__ import annotations

import math
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from tiermem.allocator import Run
from tiermem.bundle import BundleSpec
from tiermem.clock import Clock
from tiermem.digest import digest
from tiermem.errors import DaemonUnavailable, DataLoss, InvalidArgument, ProtocolError, ResourceExhausted, TiermemError
from tiermem.file_pieces import Adoption, FilePiece, pieces_of, pieces_within
from tiermem.grants.effects import Effect, FreeFlash, Load, Send, WriteBack
from tiermem.grants.ledger import GrantLedger
from tiermem.grants.messages import ClientBody, DaemonBody, Demand
from tiermem.grants.pins import Lane
from tiermem.layout import ArenaLayout
from tiermem.mover import Mover, Prepared, Transfer
from tiermem.placement.lru import LeastRecentlyUsed
from tiermem.residency import State
from tiermem.stats import EvictReason, JobStats, Link, StallCause, TierStats
from tiermem.tiers.base import Extent, Tier
from tiermem.tiers.dram import DramTier
from tiermem.tiers.flash_directory import FlashDirectory
from tiermem.tiers.os_calls import LinuxCalls
from tiermem.tiers.source_file import SourceFile
from tiermem.units import format_size


@dataclass(frozen=True, slots=True)
class FlashCopy:
    """Where a bundle's bytes lie in flash, and the xxh3 digest of each chunk, taken in DRAM just before the write."""

    extent: Extent
    digests: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FileCopy:
    """A bundle's bytes in a file of the client's, and the digest of each chunk's pieces as the client has seen them."""

    file: SourceFile
    pieces: tuple[FilePiece, ...]
    digests: tuple[int, ...]


@dataclass(slots=True)
class _CopyInProgress:
    """What a write-back has so far. Chunks run in parallel, each with its own index."""

    digests: list[int]
    extent: Extent | None = None


MAX_FILES = 256
"""Descriptors of a client that one job keeps open."""


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
        self._ledger = GrantLedger(  # guarded by _lock
            dram.allocator,
            layout.frame_bytes,
            layout.frames_for,
            flash.capacity_bytes // layout.frame_bytes,
            layout.bundle_cap_bytes // layout.frame_bytes,
            LeastRecentlyUsed(),
            next_bundle_id,
            ", ".join(str(directory.path) for directory in directories),
        )
        self._file_place = file_place
        self._files: dict[int, SourceFile] = {}  # guarded by _lock; by the client's number
        self._copies: dict[int, FlashCopy | FileCopy] = {}  # guarded by _lock
        self._asked_at: dict[tuple[str, int], float] = {}  # guarded by _lock
        self._stall_s = dict.fromkeys(StallCause, 0.0)  # guarded by _lock
        self._closed = False  # guarded by _lock

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
            chunks = len(self._chunks(spec.nbytes))
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

    def receive(self, message: ClientBody) -> None:
        """Act on one message. Raises ProtocolError before anything is changed."""
        with self._lock:
            if self._closed:
                return
            if isinstance(message, Demand):
                self._asked_at[message.lane, message.epoch] = self._clock.now_s()
            effects = self._ledger.receive(message)
            work = self._prepare(effects)
        self._perform(work)

    # -- effects

    def _prepare(self, effects: list[Effect]) -> list[Transfer]:
        """Under the lock: queue messages in order, free flash, turn the rest into work that is done without it.

        Freeing does no I/O. It is done here so that flash never holds more than the ledger accounts for, and so that
        `close` finds nothing left to be freed when it hears that the transfers have drained.
        """
        work: list[Transfer] = []
        for effect in effects:
            match effect:
                case Send():
                    self._count_stall(effect)
                    self.outbox.append(effect.message)
                case Load():
                    work.append(self._load(effect.bundle))
                case WriteBack():
                    work.append(self._write_back(effect.bundle))
                case FreeFlash():
                    copy = self._copies.pop(effect.bundle, None)
                    if isinstance(copy, FlashCopy):
                        self._flash.free(copy.extent)
        if self._closed and self._ledger.drained:
            self._drained.notify_all()
        return work

    def _perform(self, work: list[Transfer]) -> None:
        for transfer in work:
            self._mover.submit(transfer)
        self.wake()

    def _count_stall(self, effect: Send) -> None:
        asked_at = self._asked_at.pop((effect.message.lane, effect.message.answers), None)
        if effect.waited_for is not None and asked_at is not None:
            self._stall_s[effect.waited_for] += self._clock.now_s() - asked_at

    def _chunks(self, nbytes: int) -> list[tuple[int, int]]:
        size = self.layout.chunk_bytes
        return [(offset, min(size, nbytes - offset)) for offset in range(0, nbytes, size)]

    def _load(self, bundle: int) -> Transfer:
        record, copy = self._ledger.bundles[bundle], self._copies[bundle]
        spec, runs = record.spec, record.runs
        spans = zip(self._chunks(spec.nbytes), copy.digests, strict=True)
        match copy:
            case FlashCopy(extent, _):
                place = extent.place
                chunks = [partial(self._read_chunk, spec, runs, extent, span, expected) for span, expected in spans]
            case FileCopy():
                place = self._file_place
                chunks = [partial(self._read_file_chunk, spec, runs, copy, span, expected) for span, expected in spans]
        done = partial(self._load_done, bundle)
        return Transfer(Link.FLASH_TO_DRAM, spec.nbytes, Prepared(place, chunks), done, -math.inf, self.session)

    def _read_chunk(
        self, spec: BundleSpec, runs: tuple[Run, ...], extent: Extent, span: tuple[int, int], expected: int
    ) -> None:
        views = self._dram.views(runs, *span)
        self._flash.read(extent, span[0], views)
        self._directories[extent.place].count_traffic(span[1], 0)
        if digest(views) != expected:
            directory = self._directories[extent.place]
            directory.count_checksum_failure()
            raise DataLoss(
                f"{spec} of job {self.job!r}: {format_size(span[1])} at offset {span[0]} read back from "
                f"{directory.path} are not "
                "what was written; check the drive, and restore the job from its last checkpoint"
            )

    def _read_file_chunk(
        self, spec: BundleSpec, runs: tuple[Run, ...], copy: FileCopy, span: tuple[int, int], expected: int
    ) -> None:
        filled: list[memoryview] = []
        for piece in pieces_within(copy.pieces, *span):
            views = self._dram.views(runs, piece.bundle_offset, piece.nbytes)
            copy.file.read(piece.file_offset, views)
            filled += views
        if digest(filled) != expected:
            raise DataLoss(
                f"{spec} of job {self.job!r}: {copy.file.path} has been changed since attach; frozen weights are read "
                "from there while the job runs: put the file back as it was, and attach again"
            )

    def _load_done(self, bundle: int, error: TiermemError | None) -> None:
        with self._lock:
            effects = self._ledger.loaded(bundle) if error is None else self._ledger.load_failed(bundle, error)
            work = self._prepare(effects)
        self._perform(work)

    def _write_back(self, bundle: int) -> Transfer:
        record = self._ledger.bundles[bundle]
        spans = self._chunks(record.spec.nbytes)
        copy = _CopyInProgress([0] * len(spans))
        prepare = partial(self._reserve_copy, record.spec, record.runs, spans, copy)
        done = partial(self._write_done, bundle, copy)
        return Transfer(Link.DRAM_TO_FLASH, record.spec.nbytes, prepare, done, -math.inf, self.session)

    def _reserve_copy(
        self, spec: BundleSpec, runs: tuple[Run, ...], spans: list[tuple[int, int]], copy: _CopyInProgress
    ) -> Prepared:
        extent = copy.extent = self._flash.reserve(spec.nbytes)
        return Prepared(
            extent.place, [partial(self._write_chunk, runs, extent, copy, i, span) for i, span in enumerate(spans)]
        )

    def _write_chunk(
        self, runs: tuple[Run, ...], extent: Extent, copy: _CopyInProgress, index: int, span: tuple[int, int]
    ) -> None:
        views = self._dram.views(runs, *span)
        copy.digests[index] = digest(views)
        self._flash.write(extent, span[0], views)
        self._directories[extent.place].count_traffic(0, span[1])

    def _write_done(self, bundle: int, copy: _CopyInProgress, error: TiermemError | None) -> None:
        with self._lock:
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
        self._perform(work)

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
            used_frames = 0 if self._closed else frames.frames - frames.free_frames
            return JobStats(
                job=self.job,
                session=self.session,
                pid=self.pid,
                tiers={
                    "dram": TierStats(self.layout.arena_bytes, used_frames * frame_bytes),
                    "flash": TierStats(self._flash.capacity_bytes, self._flash.used_bytes),
                },
                links=self._mover.links(self.session),
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
                stall_seconds=dict(self._stall_s),
                waiting=len(ledger.pins.open),
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
