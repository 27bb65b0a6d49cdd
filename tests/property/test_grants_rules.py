"""The world's checks bite: each machine below has one rule of the grant protocol switched off, and is caught. C1 to C14
are the specification's counterexamples.

Three have no test of their own, as what they are about does not exist here: C8 (a death trusts grants that nobody has
reported) and C12 (a client that is only silent loses its frames): there is no attaching again and no expiry, the end
of a session is proven by the stream's or the process's end and frees everything that was its own. C14 (snapshots use up
spare flash): there are no snapshots; its rule, flash keeps a spare beside what is live, is
`test_write_backs_beyond_the_flash_quota_are_caught`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import pytest

from tiermem.bundle import Mode
from tiermem.errors import TiermemError
from tiermem.grants.effects import Effect, Expedite, Send
from tiermem.grants.ledger import GrantLedger
from tiermem.grants.messages import ClientBody, Commit, DaemonBody, Done, Grant, Refuse, Surrender
from tiermem.grants.pins import Lane, OpenDemand, Pins
from tiermem.grants.table import GrantTable, Lease, Waiter
from tiermem.residency import RESIDENT, BundleRecord
from tiermem.testing.grants_explorer import Exploration, explore
from tiermem.testing.grants_world import World
from tiermem.testing.grants_world_state import MAIN, Config
from tiermem.testing.grants_worlds import (
    AHEAD,
    LANES,
    MAKES,
    NO_SPARE,
    ONE,
    READ,
    RIVALS,
    SMALL,
    TIGHT,
    TWO,
    UPDATE,
    walk,
)


class DropsOldAnswers(GrantTable):
    """C1: an answer is void once the lane's epoch has moved on."""

    def receive(self, message: DaemonBody) -> Waiter | None:
        old = isinstance(message, Grant | Refuse) and 0 < message.answers < self._epoch[message.lane]
        return None if old else super().receive(message)


class DoneNamesBundle(GrantLedger):
    """C2: `done` ends every grant of the bundle."""

    def receive(self, message: ClientBody) -> list[Effect]:
        if isinstance(message, Done):
            bundles = {self.pins.grant(serial).bundle for serial in message.serials}
            others = [s for s, pin in self.pins.granted.items() if pin.bundle in bundles and s not in message.serials]
            for serial in others:
                del self.pins.granted[serial]
        return super().receive(message)


class HoldsOwnLeasesOnly(GrantTable):
    """C3: `held` leaves out what other threads lease."""

    def demand(self, lane: str, target: int, mode: Mode) -> Waiter:
        waiter = super().demand(lane, target, mode)
        waiter.demand = self.outbox[-1] = replace(waiter.demand, held=frozenset())
        return waiter


class QueuesOutsideTheLock(GrantTable):
    """C4: a demand of another thread overtakes a commit and a done."""

    def __init__(self, lanes: list[str]) -> None:
        super().__init__(lanes)
        self.late: list[ClientBody] = []

    def done(self, *serials: int) -> None:
        super().done(*serials)
        self.late.append(self.outbox.pop())

    def demand(self, lane: str, target: int, mode: Mode) -> Waiter:
        waiter = super().demand(lane, target, mode)
        self.outbox.extend(self.late)
        self.late.clear()
        return waiter


class WritesBackWhatIsWritten(GrantLedger):
    """C5: a write-back starts beside a writable grant."""

    class Loose(Pins):
        def stay(self) -> set[int]:
            readers = {pin.bundle for pin in self.granted.values() if not pin.mode.writes}
            return readers | {waiting.bundle for waiting in self.open}

    def receive(self, message: ClientBody) -> list[Effect]:
        self.pins = self.Loose(self.pins.granted, self.pins.open)
        return super().receive(message)


class GrantsWritingDuringWriteBack(GrantLedger):
    """C5, from the other side: a writable grant is given during a write-back."""

    def _grantable(self, record: BundleRecord, mode: Mode) -> bool:
        return record.state in RESIDENT


class ForgetsOpenDemands(GrantLedger):
    """C6: an open demand does not count against the budget."""

    class Blind(Pins):
        def of_lane(self, lane: str) -> set[int]:
            return {pin.bundle for pin in self.granted.values() if pin.lane == lane}

    def receive(self, message: ClientBody) -> list[Effect]:
        self.pins = self.Blind(self.pins.granted, self.pins.open)
        return super().receive(message)


class CommitKeepsTheWriteRight(GrantLedger):
    """C9: a committed grant still counts as writable."""

    def receive(self, message: ClientBody) -> list[Effect]:
        effects = super().receive(message)
        if isinstance(message, Commit):
            for serial, _, _ in message.updated:
                self.pins.granted[serial].mode = UPDATE
        return effects


class LeasesAtWakeUp(GrantTable):
    """C10: a delivered answer is not yet a lease when another thread demands."""

    def __init__(self, lanes: list[str]) -> None:
        super().__init__(lanes)
        self.asleep: set[int] = set()

    def receive(self, message: DaemonBody) -> Waiter | None:
        if isinstance(message, Grant) and message.answers:
            self.asleep.add(message.serial)
        return super().receive(message)

    def demand(self, lane: str, target: int, mode: Mode) -> Waiter:
        waiter = super().demand(lane, target, mode)
        waiter.demand = self.outbox[-1] = replace(waiter.demand, held=waiter.demand.held - self.asleep)
        self.asleep.clear()
        return waiter


class BelievesFailedWrites(GrantLedger):
    """A write-back that failed is taken for one that was made."""

    def write_failed(self, bundle: int, error: TiermemError) -> list[Effect]:
        return self.written(bundle)


class WritesBeyondTheFlashQuota(GrantLedger):
    """Write-backs start although flash has no room for their copies beside the old ones."""

    def _make_room(self, need: int, waiting: OpenDemand) -> bool:
        quota, self._flash_quota_frames = self._flash_quota_frames, 10**9
        try:
            return super()._make_room(need, waiting)
        finally:
            self._flash_quota_frames = quota


class ServesTheYoungestFirst(GrantLedger):
    """The same answers in another order break nothing: the world does not cry wolf."""

    def receive(self, message: ClientBody) -> list[Effect]:
        effects = super().receive(message)
        self.pins.open.reverse()
        return effects


class VoidsAnswers(GrantLedger):
    """C1, the daemon's side: a demand ends what its lane does not hold yet, answers on their way included."""

    class Forgetful(Pins):
        def void(self, lane: str, held: Collection[int]) -> list[int]:
            super().void(lane, held)
            return [serial for serial, pin in self.granted.items() if pin.lane == lane and serial not in held]

    def receive(self, message: ClientBody) -> list[Effect]:
        self.pins = self.Forgetful(self.pins.granted, self.pins.open)
        return super().receive(message)


class UsesWhatIsVoid(GrantTable):
    """Unused grants outlive the epoch in which they were granted (client rule 1)."""

    def _void(self, lane: str) -> None:
        self._epoch[lane] += 1


class KeepsWhatIsLate(GrantTable):
    """A grant of an epoch that is over, or of a bundle that is gone, is kept when it arrives (client rule 3)."""

    def _keep(self, grant: Grant) -> None:
        self._put(grant)


class BelievesTheGrantsVersion(GrantTable):
    """The version of a grant that a commit has overtaken is taken for the newest."""

    def _lease(self, grant: Grant, mode: Mode) -> Lease:
        lease = super()._lease(grant, mode)
        lease.grant = grant
        return lease


class TakesUnusedGrantsBack(GrantLedger):
    """C7: a shrink ends unused grants at once, without the client's word."""

    def shrink(self, name: str, target_frames: int) -> list[Effect]:
        for serial in self.pins.void(name, ()):
            self._unpin(serial)
        return super().shrink(name, target_frames)


class NeverAsksBack(GrantLedger):
    """A shrink waits for unused grants that nobody is asked for."""

    def shrink(self, name: str, target_frames: int) -> list[Effect]:
        effects = super().shrink(name, target_frames)
        return [e for e in effects if not (isinstance(e, Send) and isinstance(e.message, Surrender))]


class LoadsAheadOfDemands(GrantLedger):
    """C11: what runs ahead takes frames while a demand lacks room."""

    def _make_room(self, need: int, waiting: OpenDemand) -> bool:
        enough = super()._make_room(need, waiting)
        for lane in self.lanes.values():
            self._run_ahead(lane)
        return enough and self._frames.free_frames >= need


class NeverPauses(GrantLedger):
    """After a transfer that failed, the same is tried again at once."""

    def _run_ahead(self, lane: Lane) -> int:
        self.ahead_paused = False
        return super()._run_ahead(lane)

    def load_failed(self, bundle: int, error: TiermemError) -> list[Effect]:
        effects = super().load_failed(bundle, error)
        for lane in self.lanes.values():
            self._run_ahead(lane)
        return [*effects, *self._take_effects()]


class OneBudgetForAllLanes(GrantLedger):
    """C13: what the other lane leases counts against a lane's budget too."""

    class Mixed(Pins):
        def of_lane(self, lane: str) -> set[int]:
            return self.stay()

    def receive(self, message: ClientBody) -> list[Effect]:
        self.pins = self.Mixed(self.pins.granted, self.pins.open)
        return super().receive(message)


class KeepsPushesOfEndedBundles(GrantLedger):
    """Consume and discard leave unused grants of the bundle behind."""

    def _end(self, bundle: int) -> None:
        self._discard(self.bundles[bundle])


class HastensEverything(GrantLedger):
    """Who waits behind another demand hastens a transfer that has not begun."""

    def _serve(self) -> None:
        super()._serve()
        self._effects += [Expedite(waiting.bundle) for waiting in self.pins.open]


class EndsOneOfASet(GrantTable):
    """Of leases that end together only the first is told."""

    def done(self, *serials: int) -> None:
        super().done(*serials)
        self.outbox[-1] = Done(serials[:1])


class TakesTwiceWhatIsTakenTogether(GrantTable):
    """The grants of a set stay unused."""

    def take(self, lane: str, targets: Sequence[int], mode: Mode) -> list[Lease | None]:
        before = {key: list(grants) for key, grants in self._unused[lane].items()}
        leases = super().take(lane, targets, mode)
        if len(targets) > 1:
            self._unused[lane] = before
        return leases


ASKS_TOO_MUCH = Config(1, 3, (1,), (1, 1), TWO.threads, (READ,), 0)
WRITES_BESIDE = replace(RIVALS, modes=(UPDATE,), predictions=(((MAIN, 1, UPDATE),),))
TABLE, LEDGER = GrantTable, GrantLedger

MUTANTS: dict[str, tuple[Config, Callable[[list[str]], GrantTable], Callable[..., GrantLedger], str]] = {
    "C1": (replace(TWO, modes=(READ,)), DropsOldAnswers, LEDGER, "I1: .* is held for nobody"),
    "C1, other side": (TWO, TABLE, VoidsAnswers, "I1: .* is free for the daemon"),
    "C2": (replace(AHEAD, modes=(READ,)), TABLE, DoneNamesBundle, "I1: .* is free for the daemon"),
    "C3": (TWO, HoldsOwnLeasesOnly, LEDGER, "held: "),
    "C4": (
        replace(ONE, threads=(("M", 2),), modes=(READ,)),
        QueuesOutsideTheLock,
        LEDGER,
        "I1: .* is held for nobody",
    ),
    "C5": (replace(ONE, threads=(("M", 2),)), TABLE, WritesBackWhatIsWritten, "I[12]: "),
    "C5, pushed": (WRITES_BESIDE, TABLE, WritesBackWhatIsWritten, "I[12]: "),
    "C5, other side": (TWO, TABLE, GrantsWritingDuringWriteBack, "I2: .* during its write-back"),
    "C6": (ASKS_TOO_MUCH, TABLE, ForgetsOpenDemands, "I7: stuck|1 frames demanded"),
    "C6, pushed": (RIVALS, TABLE, ForgetsOpenDemands, "pins 2 of 1|frames demanded"),
    "C7": (replace(AHEAD, arena_frames=3, shrinks=1), TABLE, TakesUnusedGrantsBack, "I1: .* is free for the daemon"),
    "C9": (ONE, TABLE, CommitKeepsTheWriteRight, "I2: .* outlives its commit"),
    "C10": (TWO, LeasesAtWakeUp, LEDGER, "held: "),
    "C11": (SMALL["ahead of three bundles"][0], TABLE, LoadsAheadOfDemands, "I6: frames go to"),
    "C13": (LANES, TABLE, OneBudgetForAllLanes, "I6: .*WORKING_SET_TOO_LARGE"),
    "I4": (replace(ONE, faults=1), TABLE, BelievesFailedWrites, "I4: "),
    "client rule 1": (AHEAD, UsesWhatIsVoid, LEDGER, "unused: "),
    "client rule 3": (AHEAD, KeepsWhatIsLate, LEDGER, "unused: "),
    "client rule 6": (MAKES, TABLE, KeepsPushesOfEndedBundles, "I1: |KeyError|pin on bundle"),
    "newest version": (AHEAD, BelievesTheGrantsVersion, LEDGER, "version: "),
    "a shrink ends": (replace(AHEAD, arena_frames=3, shrinks=1), TABLE, NeverAsksBack, "I7: stuck with a shrink"),
    "no busy loop": (
        replace(TIGHT, modes=(READ,), commits=0, faults=-1),
        TABLE,
        NeverPauses,
        "I7: queues and mover can go in circles",
    ),
    "a set ends": (
        replace(ONE, threads=(("M", 2),), modes=(READ,)),
        EndsOneOfASet,
        LEDGER,
        "I1: .* is held for nobody",
    ),
    "a set is taken": (SMALL["ahead, two at one go"][0], TakesTwiceWhatIsTakenTogether, LEDGER, "unused: "),
    "hastens what moves": (replace(TWO, modes=(READ,)), TABLE, HastensEverything, "is to be hastened"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_machine_without_one_rule_is_caught(name: str) -> None:
    config, table, ledger, caught = MUTANTS[name]
    with pytest.raises(AssertionError, match=caught):  # most are Violations, with a trace
        explore(World(config, table, ledger), seconds=30)


def test_write_backs_beyond_the_flash_quota_are_caught() -> None:
    """Without a shortest trace: two bundles must be written, written back, written again and evicted together."""

    config = replace(NO_SPARE, commits=1_000)
    assert sum(walk(seed, 600, config) for seed in range(10)) > 5_000

    def walk_on() -> None:
        for seed in range(100):
            walk(seed, 600, config, ledger=WritesBeyondTheFlashQuota)

    with pytest.raises(AssertionError, match=r"flash frames"):
        walk_on()


def test_a_machine_that_is_only_different_is_not_caught() -> None:
    seen: Exploration = explore(
        World(SMALL["a thread that holds two"][0], GrantTable, ServesTheYoungestFirst), seconds=60
    )
    assert seen.complete
