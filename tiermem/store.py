"""The tensor store of a node: what all jobs share (DRAM capacity, flash directories, the mover), and the jobs.

`_lock` guards the table of jobs and the totals of ended ones. A job has a lock of its own, so jobs do not wait for each
other.
"""

from __future__ import annotations

import itertools
import logging
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from tiermem.bundle_io import BundleIO
from tiermem.clock import Clock
from tiermem.errors import InvalidArgument, ResourceExhausted, TiermemError
from tiermem.job_store import JobStore
from tiermem.layout import MIN_ARENA_BYTES, ArenaLayout, arena_layout
from tiermem.lookahead import LookaheadOptions
from tiermem.mover import Mover
from tiermem.notices import NoticeKind
from tiermem.stats import (
    DeviceKind,
    DeviceLink,
    DirectoryStats,
    EvictReason,
    JobStats,
    LinkStats,
    PredictionOutcome,
    PushOutcome,
    StallCause,
    StoreStats,
    TierStats,
    sum_of_links,
)
from tiermem.tiers.base import Tier
from tiermem.tiers.dram import DramTier
from tiermem.tiers.flash import FlashTier
from tiermem.tiers.flash_directory import FlashDirectory
from tiermem.units import format_size

_log = logging.getLogger("tiermem.store")


_CLOSE_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class Totals:
    """What jobs have counted, summed; `reasons` counts how ended ones ended."""

    hits: int = 0
    misses: int = 0
    creates: int = 0
    commits: int = 0
    evictions: Counter[EvictReason] = field(default_factory=Counter)
    stall_seconds: Counter[StallCause] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    notices: Counter[NoticeKind] = field(default_factory=Counter)
    predictions: Counter[PredictionOutcome] = field(default_factory=Counter)
    pushes: Counter[PushOutcome] = field(default_factory=Counter)
    device_links: dict[DeviceLink, LinkStats] = field(default_factory=lambda: dict.fromkeys(DeviceLink, LinkStats()))

    def plus(self, jobs: Iterable[JobStats], reason: str | None = None) -> Totals:
        """These and the given jobs; with a reason they count as ended."""
        total = self
        for job in jobs:
            total = Totals(
                total.hits + job.hits,
                total.misses + job.misses,
                total.creates + job.creates,
                total.commits + job.commits,
                total.evictions + Counter(job.evictions),
                total.stall_seconds + Counter(job.stall_seconds),
                total.refusals + Counter(job.refusals),
                total.reasons + Counter([reason] if reason else []),
                total.notices + Counter(job.notices),
                total.predictions + Counter(job.predictions),
                total.pushes + Counter(job.pushes),
                {n: sum_of_links([total.device_links[n], job.links.get(n, LinkStats())]) for n in DeviceLink},
            )
        return total


def _sum_of_tiers(name: str, jobs: Iterable[JobStats]) -> TierStats:
    tiers = [job.tiers[name] for job in jobs if name in job.tiers]
    return TierStats(sum(tier.capacity_bytes for tier in tiers), sum(tier.used_bytes for tier in tiers))


def _directory_stats(directory: FlashDirectory) -> DirectoryStats:
    read_bytes, written_bytes = directory.traffic_bytes
    return DirectoryStats(
        str(directory.path),
        directory.capacity_bytes,
        directory.used_bytes,
        directory.errors,
        directory.checksum_failures,
        directory.direct_io,
        read_bytes,
        written_bytes,
    )


@dataclass(frozen=True, slots=True)
class StoreParts:
    """What a job's store is made of. No configuration names others: they are for tests and benchmarks, which build a
    `TensorStore` themselves.
    """

    layout: Callable[[int], ArenaLayout] = arena_layout
    dram: Callable[[ArenaLayout], DramTier] = DramTier
    flash: Callable[[Sequence[FlashDirectory], ArenaLayout, str, int | None], Tier] = FlashTier
    io: Callable[..., BundleIO] = BundleIO


class TensorStore:
    """All methods may be called from any thread; `open_job` and `JobStore.close` block for the memory they touch."""

    def __init__(
        self,
        dram_bytes: int,
        directories: Sequence[FlashDirectory],
        mover: Mover,
        clock: Clock,
        default_job_share: float = 0.5,
        wrap_flash: Callable[[Tier], Tier] = lambda tier: tier,
        file_place: int = 0,
        lookahead: LookaheadOptions = LookaheadOptions(),  # noqa: B008 - frozen
        parts: StoreParts = StoreParts(),
    ) -> None:
        self.dram_bytes = dram_bytes
        self._parts = parts
        self._directories, self._mover, self._clock = tuple(directories), mover, clock
        self._default_job_share = default_job_share
        self._file_place = file_place  # of the mover, for clients' files
        self._lookahead = lookahead
        self._wrap_flash = wrap_flash  # for scripted faults
        self._lock = threading.Lock()
        self._jobs: dict[str, JobStore | None] = {}  # guarded by _lock; None while it is being opened
        self._reserved: dict[str, int] = {}  # guarded by _lock: arena bytes by job
        self._ended = Totals()  # guarded by _lock
        self._opened = 0  # guarded by _lock
        self._errors: Counter[str] = Counter()  # guarded by _lock
        self._bundle_ids = itertools.count(1)  # next() is atomic

    @property
    def free_dram_bytes(self) -> int:
        with self._lock:
            return self.dram_bytes - sum(self._reserved.values())

    def open_job(self, job: str, pid: int, dram_bytes: int, flash_bytes: int) -> JobStore:
        """Give a job an arena and flash room. Sizes of 0 mean the default share of what is free, and all that the
        directories have.

        Raises InvalidArgument for a bad or taken name or size, ResourceExhausted where the arena does not fit,
        TierIOError.
        """
        if not job or len(job) > 200 or not job.isprintable():
            raise InvalidArgument(f"job name {job[:200]!r} must be 1 to 200 printable characters")
        if flash_bytes < 0:
            raise InvalidArgument(f"job {job!r} asks for {flash_bytes} bytes of flash; give 0 or more with flash=")
        with self._lock:
            free = self.dram_bytes - sum(self._reserved.values())
            wanted = dram_bytes or max(MIN_ARENA_BYTES, int(free * self._default_job_share))
            if job in self._jobs:
                raise InvalidArgument(f"job {job!r} is running here already; choose another name with job=")
            if wanted > free:
                raise ResourceExhausted(
                    f"job {job!r} asks for {format_size(wanted)} of DRAM, {format_size(free)} of "
                    f"{format_size(self.dram_bytes)} are free; ask for less with dram=, or end another job"
                )
            layout = self._parts.layout(wanted)
            self._jobs[job], self._reserved[job] = None, layout.arena_bytes
        try:
            dram = self._parts.dram(layout)
            try:
                flash = self._parts.flash(self._directories, layout, job, flash_bytes or None)
            except (TiermemError, OSError):
                dram.close()
                raise
        except (TiermemError, OSError):
            self._forget(job)
            raise
        session = secrets.token_hex(8)
        store = JobStore(
            job,
            session,
            pid,
            layout,
            dram,
            self._wrap_flash(flash),
            self._directories,
            self._mover,
            self._clock,
            lambda: next(self._bundle_ids),
            self._file_place,
            self._lookahead,
            self._parts.io,
        )
        with self._lock:
            self._jobs[job] = store
            self._opened += 1
        return store

    def close_job(self, store: JobStore, reason: str) -> None:
        """End a job and free what it had; blocks for the transfers in flight. `reason` is a bounded label ("closed",
        "died", ...).
        """
        with self._lock:
            if self._jobs.get(store.job) is not store:
                return
        try:
            store.close()
        finally:
            with self._lock:
                if self._jobs.pop(store.job, None) is store:
                    self._ended = self._ended.plus([store.snapshot()], reason)
        with self._lock:  # not after an error: transfers still use the arena, so its bytes stay taken
            self._reserved.pop(store.job, None)
        _log.info("job %r of pid %d ended: %s", store.job, store.pid, reason)

    def count_error(self, error: TiermemError) -> None:
        """An error that was reported to a client or an operator."""
        with self._lock:
            self._errors[error.code] += 1

    def job(self, name: str) -> JobStore | None:
        with self._lock:
            return self._jobs.get(name)

    def snapshot(self) -> StoreStats:
        """One instant per job. Totals include ended jobs and never fall."""
        with self._lock:
            jobs = [job for job in self._jobs.values() if job is not None]
            ended = self._ended
            opened, errors = self._opened, Counter(self._errors)
            live = tuple(job.snapshot() for job in jobs)
        directories = tuple(_directory_stats(d) for d in self._directories)
        totals = ended.plus(live)
        errors.update(totals.refusals)
        return StoreStats(
            tiers={
                "dram": TierStats(self.dram_bytes, sum(job.tiers["dram"].used_bytes for job in live)),
                "flash": TierStats(sum(d.capacity_bytes for d in directories), sum(d.used_bytes for d in directories)),
                **{str(kind): _sum_of_tiers(kind, live) for kind in DeviceKind},
            },
            links=dict[str, LinkStats]([*self._mover.links().items(), *totals.device_links.items()]),
            directories=directories,
            jobs=live,
            sessions_opened=opened,
            sessions_ended=dict(ended.reasons),
            errors=dict(errors),
            hits=totals.hits,
            misses=totals.misses,
            creates=totals.creates,
            commits=totals.commits,
            evictions={r: totals.evictions[r] for r in EvictReason},
            stall_seconds={c: totals.stall_seconds[c] for c in StallCause},
            notices={k: totals.notices[k] for k in NoticeKind},
            predictions={o: totals.predictions[o] for o in PredictionOutcome},
            pushes={o: totals.pushes[o] for o in PushOutcome},
        )

    def close(self) -> None:
        """End every job, then the mover and the directories."""
        with self._lock:
            jobs = [job for job in self._jobs.values() if job is not None]
        for job in jobs:
            try:
                self.close_job(job, "shutdown")
            except TiermemError as error:
                _log.error("job %r did not end cleanly: %s", job.job, error)
        self._mover.close(_CLOSE_TIMEOUT_S)
        for directory in self._directories:
            directory.close()

    def _forget(self, job: str) -> None:
        with self._lock:
            self._jobs.pop(job, None)
            self._reserved.pop(job, None)

    def check_invariants(self) -> None:
        with self._lock:
            jobs = [job for job in self._jobs.values() if job is not None]
            assert sum(self._reserved.values()) <= self.dram_bytes, "arenas exceed the DRAM tier"
        for job in jobs:
            job.check_invariants()
