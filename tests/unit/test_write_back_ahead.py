"""What has to leave is written back before the demand that needs its room: nobody waits for a write where the disk
keeps up.
"""

from __future__ import annotations

import math
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tiermem.bundle import BundleSpec, Kind, Mode
from tiermem.clock import MonotonicClock
from tiermem.grants.effects import WriteBack
from tiermem.grants.foresight import Use
from tiermem.grants.messages import Used
from tiermem.grants.table import GrantTable, Lease
from tiermem.lookahead import LookaheadOptions
from tiermem.mover import Mover
from tiermem.plan import Access, Phase
from tiermem.residency import State
from tiermem.stats import EvictReason, Link, StallCause
from tiermem.store import TensorStore
from tiermem.testing.ledger_driver import CREATE, ONE, READ, THREE, TWO, UPDATE, Ledger
from tiermem.tiers.flash_directory import FlashDirectory
from tiermem.units import KIB, MIB

WAIT_S = 20.0
LANE = "main"
BUNDLE_BYTES = 128 * KIB  # the cap of a 1 MiB arena, which holds eight
BUNDLES = 14
FEWEST_WRITTEN_BYTES = (BUNDLES - 8) * BUNDLE_BYTES  # in a round, whatever the policy
WARM_UP, MEASURED = 3, 3  # rounds


# -- the decision


def test_a_write_back_for_a_load_begins_before_anybody_asks() -> None:
    ledger = Ledger(frames=4, ahead=4)
    needed = ledger.make_in_flash(THREE)
    dirty = ledger.make(TWO)
    ledger.foresight.uses["main"] = [Use(THREE, UPDATE, 9.0)]
    effects = ledger.machine.receive(Used(()))
    assert WriteBack(dirty, 9.0) in effects, "it is due when the room is needed"
    ledger.act(effects)
    assert not ledger.machine.pins.open
    ledger.written(dirty)
    assert ledger.state(dirty) == State.FLASH
    ledger.loaded(needed)
    ledger.demand(needed, UPDATE)
    assert (ledger.sends[-1].waited_for, ledger.writes) == (None, [])


def test_a_write_back_for_what_will_be_created_begins_before_anybody_asks() -> None:
    """Gradients and optimizer state are made anew: their room is not read from flash, but somebody must leave."""
    ledger = Ledger(frames=4, ahead=4)
    dirty = ledger.make(TWO)
    ledger.foresee((THREE, CREATE))
    assert ledger.writes == [dirty]
    ledger.written(dirty)
    ledger.foresight.uses.clear()
    ledger.demand(THREE, CREATE)
    assert (ledger.sends[-1].waited_for, ledger.writes) == (None, [])


def test_without_foresight_the_demand_waits_for_the_write_back() -> None:
    """What the two tests before would see if nothing were written ahead."""
    ledger = Ledger(frames=4)
    dirty = ledger.make(TWO)
    ledger.foresee((THREE, CREATE))
    assert ledger.writes == []
    ledger.demand(THREE, CREATE)
    assert ledger.writes == [dirty]
    ledger.written(dirty)
    assert ledger.sends[-1].waited_for is StallCause.ROOM


def test_what_is_needed_sooner_is_not_written_back_ahead() -> None:
    ledger = Ledger(frames=4, ahead=4)
    dirty = ledger.make(TWO)
    ledger.make(ONE)
    ledger.foresee((TWO, READ), (ONE, READ), (THREE, CREATE))
    assert (ledger.writes, ledger.state(dirty)) == ([], State.DIRTY)


# -- a job, its threads and its files


class Trainer:
    """Updates each of its bundles in turn, round after round: all are dirty, and every one that comes sends one away.

    The disk keeps up: what the store has begun is done before the next bundle is used.
    """

    def __init__(self, store: TensorStore, mover: Mover) -> None:
        self.job = store.open_job("job", os.getpid(), MIB, 8 * MIB)
        self._mover = mover
        self._table = GrantTable([LANE])
        self._answered = threading.Event()
        self.job.wake = self._answered.set
        self.job.declare([BundleSpec(n, Kind.OPTIM, f"layers.{n}", BUNDLE_BYTES) for n in range(BUNDLES)])
        self.job.admit(LANE, [0])
        self._bundles: dict[int, int] = {}  # by form

    def round(self) -> None:
        for form in range(BUNDLES):
            self._table.accessed(LANE, Access(f"layers.{form}", Phase.UPDATE))
            self._send()
            assert self._mover.wait_idle(WAIT_S)
            self._take_all()
            lease = self._lease(form)
            self._bundles[form] = lease.grant.bundle
            self._table.commit([(lease.grant.serial, lease.grant.version + 1)])
            self._table.done(lease.grant.serial)
            self._send()
            self._take_all()

    def _lease(self, form: int) -> Lease:
        target, mode = (self._bundles[form], Mode.UPDATE) if form in self._bundles else (form, Mode.CREATE)
        [lease] = self._table.take(LANE, [target], mode)
        if lease is not None:
            return lease
        waiter = self._table.demand(LANE, target, mode)
        self._send()
        while True:
            self._take_all()
            if not waiter.open:
                break
            assert self._answered.wait(WAIT_S)
            self._answered.clear()
        assert waiter.lease is not None, waiter.error
        return waiter.lease

    def _send(self) -> None:
        messages = list(self._table.outbox)
        self._table.outbox.clear()
        self.job.receive(*messages)

    def _take_all(self) -> None:
        while self.job.outbox:
            self._table.receive(self.job.outbox.popleft())

    def counts(self) -> Counter[str]:
        """By what the trace says: demands, and bytes that were written while somebody waited for them or ahead."""
        found: Counter[str] = Counter()
        for span in self.job.trace.since(0.0).spans:
            if span.track.startswith("demand "):
                found["demands"] += 1
            elif span.track.startswith(f"{Link.DRAM_TO_FLASH} "):
                found["waited for" if span.due_s == -math.inf else "ahead"] += span.nbytes
        return found


@pytest.fixture
def new_trainer(tmp_path: Path) -> Iterator[Callable[[float], Trainer]]:
    stores: list[TensorStore] = []

    def new(lookahead: float) -> Trainer:
        directory = FlashDirectory.open(tmp_path / "flash", 64 * MIB, allow_memory_filesystem=True)
        mover = Mover(1)
        options = LookaheadOptions(share=lookahead)
        stores.append(TensorStore(2 * MIB, [directory], mover, MonotonicClock(), lookahead=options))
        return Trainer(stores[-1], mover)

    yield new
    for store in stores:
        store.check_invariants()
        store.close()


def test_nobody_waits_for_a_write_back_where_the_disk_keeps_up(new_trainer: Callable[[float], Trainer]) -> None:
    trainer = new_trainer(0.5)
    for _ in range(WARM_UP):
        trainer.round()
    before, evicted_before = trainer.counts(), trainer.job.snapshot().evictions
    for _ in range(MEASURED):
        trainer.round()
    counts, evicted = trainer.counts() - before, trainer.job.snapshot().evictions
    assert counts["ahead"] >= MEASURED * FEWEST_WRITTEN_BYTES, "nobody had to leave: nothing is shown"
    assert (counts["waited for"], counts["demands"]) == (0, 0)
    assert evicted[EvictReason.DEMAND] == evicted_before[EvictReason.DEMAND]
    assert evicted[EvictReason.LOOKAHEAD] > evicted_before[EvictReason.LOOKAHEAD]


def test_demands_wait_for_write_backs_where_nothing_runs_ahead(new_trainer: Callable[[float], Trainer]) -> None:
    """What the test before looks at does count."""
    trainer = new_trainer(0.0)
    for _ in range(WARM_UP):
        trainer.round()
    before = trainer.counts()
    trainer.round()
    counts = trainer.counts() - before
    assert counts["waited for"] >= FEWEST_WRITTEN_BYTES
    assert (counts["ahead"], counts["demands"]) == (0, BUNDLES)
