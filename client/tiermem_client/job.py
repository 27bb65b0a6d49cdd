"""What `attach` returns: the job's statistics, and its end."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import nn

from tiermem.bundle import Mode
from tiermem.errors import InvalidArgument, TiermemError, Unsupported
from tiermem.notices import MAX_COUNT, Notice, NoticeKind
from tiermem.stats import LinkStats, TierStats
from tiermem.trace import STEPS, Span
from tiermem_client.activations import ActivationStats
from tiermem_client.address_space import AddressSpaceStats
from tiermem_client.early_updates import EarlyStats
from tiermem_client.embedded import EmbeddedDaemon
from tiermem_client.grad_handles import GradHandle
from tiermem_client.grads import GradBook
from tiermem_client.memory import DeviceStats
from tiermem_client.relocation import Relocation
from tiermem_client.residency import Residency, ResidencyStats
from tiermem_client.storage_swap import evacuate
from tiermem_client.trace_recordings import TraceRecordings
from tiermem_client.units import ManagedStorage
from tiermem_client.updates import Updater
from tiermem_client.vertical import Vertical

_log = logging.getLogger("tiermem.job")


@dataclass(frozen=True, slots=True)
class TrainerStats:
    """One instant of a job, the daemon's counters and the trainer's.

    `hits` and `misses` are demands answered at once and after a transfer; `residency` counts all acquisitions, also
    those that needed no demand. `predictions` are accesses by whether they had been predicted ("right", "wrong",
    "unknown"), `pushes` grants sent ahead of demands and those of them that were used. `stall_s` is the time in which
    the script waited for the daemon, `leases` what it holds now. `fallbacks` names every mechanism that is not the
    first choice; results are the same. `inexact` names what is not bit for bit what the plain script computes, and the
    remedy. `adopted_file_bytes` are frozen weights that are read from the file they were loaded from, and never written
    to flash. `device`: of the tier above DRAM, where there is one. `pending_updates`: groups that a `step()` is to
    update still. `early`: groups that were updated inside backward. `activations`: what was offloaded and recomputed.
    """

    job: str
    hits: int
    misses: int
    creates: int
    stall_s: float
    links: dict[str, LinkStats]
    tiers: dict[str, TierStats]
    bytes_by_kind: dict[str, int]
    evictions: dict[str, int]
    predictions: dict[str, int]
    pushes: dict[str, int]
    dirty_bytes: int
    leases: int
    residency: ResidencyStats
    address_space: AddressSpaceStats
    fallbacks: tuple[str, ...] = ()
    inexact: tuple[str, ...] = ()
    adopted_file_bytes: int = 0
    device: DeviceStats | None = None
    pending_updates: int = 0
    early: EarlyStats = field(default_factory=EarlyStats)
    activations: ActivationStats = field(default_factory=ActivationStats)

    @property
    def hit_ratio(self) -> float:
        """Share of demands that did not wait for a transfer; 1.0 before the first."""
        return self.hits / (self.hits + self.misses) if self.hits + self.misses else 1.0


@dataclass(slots=True, eq=False)
class Job:
    """A running attachment. `detach` gives the tensors back to ordinary memory; so does leaving it as a context."""

    name: str
    model: nn.Module = field(repr=False)
    residency: Residency = field(repr=False)
    storages: dict[int, ManagedStorage] = field(repr=False)
    book: GradBook = field(repr=False)
    updater: Updater | None = field(repr=False)
    daemon: EmbeddedDaemon | None
    notices: list[Notice] = field(default_factory=list, repr=False)
    reported: int = field(default=0, repr=False)  # of the notices
    undo: list[Callable[[], None]] = field(default_factory=list, repr=False)
    vertical: Vertical | None = field(default=None, repr=False)
    adopted: list[ManagedStorage] = field(default_factory=list, repr=False)  # storages whose bytes are in the store
    adopted_file_bytes: int = 0
    activations: ActivationStats = field(default_factory=ActivationStats, repr=False)
    attached: bool = True
    device_told_s: float = 0.0  # on time.monotonic()
    recordings: TraceRecordings = field(init=False, repr=False)
    relocation: Relocation = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.relocation = Relocation(self.residency.memory.device, self.storages)
        self.recordings = TraceRecordings(self.residency.session)

    def stats(self) -> TrainerStats:
        """Counters of this job, from the daemon and from here. Raises DaemonUnavailable or DaemonTimeout."""
        table: dict[str, Any] = json.loads(self.residency.session.status())["jobs"][0]
        with self.residency.session.lock:
            space, memory = self.residency.session.address_space.stats(), self.residency.memory.stats()
            stall_s, leases = self.residency.session.stall_s, self.residency.session.table.leases
            mine = dataclasses.replace(self.residency.stats)
        return TrainerStats(
            job=self.name,
            hits=table["hits"],
            misses=table["misses"],
            creates=table["creates"],
            stall_s=stall_s,
            links={**{k: LinkStats(**v) for k, v in table["links"].items()}, **memory.links},
            tiers={**{k: TierStats(**v) for k, v in table["tiers"].items()}, **memory.tiers},
            bytes_by_kind=table["bytes_by_kind"],
            evictions=table["evictions"],
            predictions=table["predictions"],
            pushes=table["pushes"],
            dirty_bytes=table["dirty_bytes"],
            leases=leases,
            residency=mine,
            address_space=space,
            fallbacks=tuple(notice.text for notice in self.notices if notice.kind.exact),
            inexact=tuple(notice.text for notice in self.notices if not notice.kind.exact),
            adopted_file_bytes=self.adopted_file_bytes,
            device=memory.device,
            pending_updates=0 if self.updater is None else len(self.updater.waiting()),
            activations=dataclasses.replace(self.activations),
            early=EarlyStats() if self.updater is None else dataclasses.replace(self.updater.early.stats),
        )

    def note(self, kind: NoticeKind, text: str) -> None:
        """Keep and log what is done in another way than the first choice; `report` tells the daemon."""
        self.notices.append(Notice(kind, text))
        _log.log(logging.INFO if kind.exact else logging.WARNING, "job %r: %s", self.name, text)

    def report(self) -> None:
        """Tell the daemon what was noted since the last time, in one message for each kind."""
        new, self.reported = self.notices[self.reported :], len(self.notices)
        for kind in dict.fromkeys(notice.kind for notice in new):
            texts = [notice.text for notice in new if notice.kind is kind]
            self.residency.session.notice(Notice(kind, texts[0], min(len(texts), MAX_COUNT)))

    def begin(self) -> None:
        """Everything is in place: the first step begins, as the trace has it."""
        now_s = time.monotonic()
        self.residency.session.trace.add(Span(STEPS, "attached", now_s, now_s))
        if self.updater is not None:
            self.updater.on_step = self._step_ended

    def _step_ended(self) -> None:
        self.recordings.step_ended()
        self._report_device(_REPORT_INTERVAL_S)

    def _report_device(self, interval_s: float = 0.0) -> None:
        """Tell the daemon what the device holds, unless it was told within `interval_s`."""
        now_s, report = time.monotonic(), self.residency.memory.stats().report
        if report is not None and now_s - self.device_told_s >= interval_s:
            self.device_told_s = now_s
            self.residency.session.report_device(report)

    def accumulate(
        self, body: Callable[[Any], Any], batches: Iterable[Any], seeds: Iterable[int] | None = None
    ) -> list[Any]:
        """Gradient accumulation in which all microbatches pass a unit before the next unit runs: parameters and
        gradients are fetched once for all of them, at the price of activations of all.

        `body(batch)` is the loop's own body up to backward: forward, loss, `loss.backward()` (or accelerate's, or of a
        scaled loss), `.item()`; or it returns the loss, and backward is called for it. All bodies wait at their
        backward until it has run for all together, so what follows it sees the whole gradient. Returns what the bodies
        returned, in order. `optimizer.step()` and accelerate's `accumulate` stay outside.

        Losses and gradients are bit for bit those of `for batch in batches: body(batch)`, but for the order of summing
        up in parameters that a microbatch uses more than once (tied weights), and where a body calls backward more than
        once: `stats().inexact` and a warning say so. A forward that draws random numbers needs `seeds`, one for each
        microbatch; the reference is that loop with `torch.manual_seed(seed)` before each body. What bodies do up to
        their backward, they do with the last batch first.

        Raises Unsupported (random numbers without seeds, or of Python or numpy; forwards that change buffers or
        parameters, as batch statistics do, where the order matters; gradients that are not zero; nested calls;
        create_graph), InvalidArgument, and whatever a body raises. Then no gradient has changed, unless it came after
        backward; small buffers have their old values.
        """
        if self.vertical is None or not self.attached:
            raise Unsupported(f"job {self.name!r} has ended; accumulate needs an attached model")
        seeds = None if seeds is None else list(seeds)
        return self.vertical.accumulate(body, list(batches), seeds)

    def trace(self, path: str | os.PathLike[str], steps: int = 1) -> None:
        """Record from now until the optimizer has ended `steps` steps, and write the file then: units, waits, transfers
        and grants of trainer and daemon, for https://ui.perfetto.dev. Without an optimizer, and where the job ends
        before, it is written when the job ends. An existing file is replaced.

        Raises InvalidArgument (no step at all; a path that cannot be written), DaemonUnavailable (the job has ended). A
        file that cannot be written in the end is an error in the log.
        """
        if steps < 1:
            raise InvalidArgument(f"steps={steps}; a trace shows at least one")
        self.recordings.begin(Path(path), steps if self.updater is not None else 0)

    def flush(self) -> None:
        """Commit everything that was written and let go of what is kept leased for the next operation."""
        with self.residency.session.lock:
            self.residency.run_unreferenced()
            self.book.settle()
            self.residency.release_idle()
            self._report_device()

    def detach(self) -> None:
        """Bring every parameter, gradient and state tensor into ordinary memory, remove all hooks and end the session.
        Idempotent.

        The memory must have room for all of them. After an error nothing more is moved, and the session is ended.
        """
        if not self.attached:
            return
        self.attached = False
        try:
            self._give_back()
        finally:
            self._end()

    def close(self) -> None:
        """End the session without bringing anything back: the tensors are gone, touching one is a fault. For a process
        that exits.
        """
        if self.attached:
            self.attached = False
            self._end()

    def abandon(self) -> None:
        """Undo a failed attach: bring back what was moved, then end the session."""
        self.attached = False
        try:
            self._give_back()
        finally:
            self._end()

    def _give_back(self) -> None:
        while self.undo:
            self.undo.pop()()
        interrupted = frozenset() if self.updater is None else self.updater.conclude()
        for storage in self.storages.values():
            for managed in storage.parameters:
                handle = managed.parameter.grad
                if isinstance(handle, GradHandle):
                    managed.parameter.grad = None if handle.slot.used_up else handle.read().clone()
        self.book.settle()
        if self.updater is not None:
            self.updater.shown.give_back(interrupted)
        while self.adopted:
            group = self.adopted[-1].group
            assert group is not None
            self.residency.acquire(group.bundles, Mode.READ)
            while self.adopted and self.adopted[-1].group is group:
                storage = self.adopted.pop()
                if not self.relocation.fetch(storage):
                    evacuate(storage.storage, tensors=storage.tensors)
            self.residency.release(group.bundles)
        self.relocation.back(None if self.updater is None else self.updater.shown.optimizer)

    def _end(self) -> None:
        with contextlib.suppress(ValueError):
            _live.remove(self)
        with contextlib.ExitStack() as ends:
            if self.daemon is not None:
                ends.callback(self.daemon.stop)
            ends.callback(self.residency.session.close)
            ends.callback(self.residency.memory.close)  # first: copies under way use the arena's addresses
            self.recordings.finish()

    def __enter__(self) -> Job:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, TiermemError):
            self.close()
        else:
            self.detach()


_live: list[Job] = []
_REPORT_INTERVAL_S = 1.0
_EXIT_PATIENCE_S = 0.5  # a process that exits does not wait for a daemon that is stopped or hung


def remember(job: Job) -> None:
    """Jobs that the interpreter's exit must end."""
    _live.append(job)


def close_all() -> None:
    """At exit: end what was not detached."""
    for job in list(_live):
        try:
            job.recordings.finish(_EXIT_PATIENCE_S)
            job.residency.memory.close()
            job.residency.session.close(_EXIT_PATIENCE_S)
            job.close()
        except TiermemError as error:
            _log.warning("job %r did not end cleanly: %s", job.name, error)
