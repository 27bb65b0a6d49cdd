"""The grant protocol's two machines in a hostile world: every state of small worlds, walks through larger ones, and
proof that the world's checks bite (a machine with one rule switched off is caught). C1 to C10 and I1 to I7 are the
specification's counterexamples and invariants.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from tiermem.bundle import Mode
from tiermem.errors import TiermemError
from tiermem.grants.effects import Effect
from tiermem.grants.ledger import GrantLedger
from tiermem.grants.messages import ClientBody, Commit, DaemonBody, Done, Refuse
from tiermem.grants.pins import Pins
from tiermem.grants.table import GrantTable, Waiter
from tiermem.residency import RESIDENT, BundleRecord
from tiermem.testing.grants_explorer import Exploration, Violation, explore
from tiermem.testing.grants_world import World
from tiermem.testing.grants_world_state import Config

READ, UPDATE, CREATE, CONSUME = Mode.READ, Mode.UPDATE, Mode.CREATE, Mode.CONSUME

ONE = Config(2, 4, (1,), (1, 1, 1), (("M", 1),))
TWO = replace(ONE, threads=(("M", 1), ("W", 1)), commits=1)

SMALL: dict[str, tuple[Config, int]] = {
    "3 bundles, 2 frames, read and update": (ONE, 1_500),
    "a thread that holds two": (replace(ONE, threads=(("M", 2),), modes=(READ,), commits=0), 600),
    "two threads, reading": (replace(TWO, modes=(READ,), commits=0), 12_000),
    "two threads, updating, one I/O error": (Config(2, 3, (1,), (1, 1), TWO.threads, (UPDATE,), 1, faults=1), 9_000),
    "I/O error and death anywhere": (replace(ONE, commits=1, faults=1, deaths=1), 3_500),
    "create, consume, discard, I/O error, death": (
        Config(2, 4, (1,), (1, 1), (("M", 1),), (READ, CONSUME), 1, creates=1, discards=1, faults=1, deaths=1),
        7_000,
    ),
    "create beside what is read": (Config(2, 4, (1,), (1,), (("M", 2),), (READ, CONSUME), 1, 1, 1), 1_000),
    "sizes in frames, any policy": (Config(3, 7, (1, 2), (2, 1, 2), (("M", 2),), (UPDATE,), 1, either_order=True), 300),
    "more asked for than there is": (Config(1, 4, (1,), (1, 1), (("M", 2),), commits=1), 1_000),
}

NO_SPARE = Config(2, 5, (1,), (1, 1, 1, 1), (("M", 1), ("W", 1)), (UPDATE,), 1)
"""Flash has room for one write-back at a time."""

LARGER = [
    Config(2, 4, (1,), (1, 1, 1), (("M", 2),)),
    TWO,
    Config(3, 7, (1, 2), (2, 1, 2), (("M", 3),), commits=1, either_order=True),
    NO_SPARE,
]

WALKED = [
    Config(9, 15, (1, 2, 3), (1, 2, 3, 3, 2, 1), (("M", 5), ("A", 2), ("W", 2)), (READ, UPDATE), 60, 0, 0, 3, 1, True),
    Config(8, 19, (1, 2, 3), (3, 3, 3, 1), (("M", 5), ("W", 3)), (READ, UPDATE, CONSUME), 60, 8, 6, 3, 1, True),
    Config(6, 16, (1, 2, 3), (3, 3, 3, 3, 1), (("M", 3), ("W", 3)), (READ, UPDATE), 60, 0, 2, 0, 0, True),
    Config(4, 10, (1, 2), (2, 2, 2, 2), (("M", 4), ("W", 4)), (READ, UPDATE), 60, 0, 0, 2, 0, True),
]
"""Several threads, sizes that do not fit together, flash with room for one write-back; the last asks for too much."""


@pytest.mark.parametrize("name", SMALL)
def test_no_state_of_a_small_world_breaks_an_invariant(name: str) -> None:
    config, least_states = SMALL[name]
    seen = explore(World(config), seconds=60)
    assert seen.complete
    assert seen.states >= least_states, "the world explored less than it should: did an action disappear?"


@pytest.mark.stress
@pytest.mark.timeout(700)
@pytest.mark.parametrize("config", LARGER)
def test_no_state_of_a_larger_world_breaks_an_invariant(config: Config) -> None:
    assert explore(World(config), seconds=120).states > 50_000


class Walk(RuleBasedStateMachine):
    """A walk that hypothesis shortens when it goes wrong."""

    @initialize(config=st.sampled_from(WALKED))
    def begin(self, config: Config) -> None:
        self.world = World(config)

    @rule(choice=st.integers(0, 10**6))
    def step(self, choice: int) -> None:
        actions = [action for action in self.world.actions() if action[0] != "die"]
        if actions:
            self.world.apply(actions[choice % len(actions)])

    @rule(choice=st.integers(0, 10**6))
    def settle(self, choice: int) -> None:
        self.world.drain(lambda actions: actions[choice % len(actions)])

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.drain(lambda actions: actions[0])


def test_walks_that_hypothesis_leads() -> None:
    run_state_machine_as_test(Walk, settings=settings(max_examples=30, stateful_step_count=60))


def walk(seed: int, steps: int, config: Config | None = None, ledger: Callable[..., GrantLedger] = GrantLedger) -> int:
    """A random walk, slow or fast channels, then the drain. Returns the actions done."""
    choice = random.Random(seed)
    world = World(config or choice.choice(WALKED), ledger=ledger)
    haste = choice.choice([0.05, 0.3, 0.9])
    done = 0
    for _ in range(steps):
        actions = [action for action in world.actions() if action[0] != "die" or choice.random() < 0.02]
        urgent = [action for action in actions if world.must(action)]
        if not actions:
            break
        world.apply(choice.choice(urgent if urgent and choice.random() < haste else actions))
        done += 1
    return done + world.drain(choice.choice)


def test_random_walks_through_larger_worlds() -> None:
    assert sum(walk(seed, 300) for seed in range(60)) > 8_000


@pytest.mark.stress
def test_many_random_walks_through_larger_worlds() -> None:
    assert sum(walk(seed, 400) for seed in range(1_000, 1_600)) > 80_000


# -- the world's checks bite: each machine below has one rule switched off


class DropsOldAnswers(GrantTable):
    """C1: an answer is void once the lane's epoch has moved on."""

    def receive(self, message: DaemonBody) -> Waiter | None:
        return None if message.answers < self._epoch[message.lane] else super().receive(message)


class DoneNamesBundle(GrantLedger):
    """C2: `done` ends every grant of the bundle."""

    def receive(self, message: ClientBody) -> list[Effect]:
        if isinstance(message, Done):
            bundle = self.pins.grant(message.serial).bundle
            for serial in [s for s, pin in self.pins.granted.items() if pin.bundle == bundle and s != message.serial]:
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

    def done(self, serial: int) -> None:
        super().done(serial)
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
        if not isinstance(message, Refuse):
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

    def _make_room(self, need: int) -> bool:
        quota, self._flash_quota_frames = self._flash_quota_frames, 10**9
        try:
            return super()._make_room(need)
        finally:
            self._flash_quota_frames = quota


class ServesTheYoungestFirst(GrantLedger):
    """The same answers in another order break nothing: the world does not cry wolf."""

    def receive(self, message: ClientBody) -> list[Effect]:
        effects = super().receive(message)
        self.pins.open.reverse()
        return effects


ASKS_TOO_MUCH = Config(1, 3, (1,), (1, 1), TWO.threads, (READ,), 0)

MUTANTS: list[tuple[Config, Callable[[list[str]], GrantTable], Callable[..., GrantLedger], str]] = [
    (replace(TWO, modes=(READ,)), DropsOldAnswers, GrantLedger, "I7: stuck"),
    (TWO, GrantTable, DoneNamesBundle, "I1: .* is free for the daemon"),
    (TWO, HoldsOwnLeasesOnly, GrantLedger, "held: "),
    (
        replace(ONE, threads=(("M", 2),), modes=(READ,)),
        QueuesOutsideTheLock,
        GrantLedger,
        "I6: .*WORKING_SET_TOO_LARGE",
    ),
    (replace(ONE, threads=(("M", 2),)), GrantTable, WritesBackWhatIsWritten, "I[12]: "),
    (TWO, GrantTable, GrantsWritingDuringWriteBack, "I2: .* during its write-back"),
    (ASKS_TOO_MUCH, GrantTable, ForgetsOpenDemands, "I7: stuck|1 frames demanded"),
    (ONE, GrantTable, CommitKeepsTheWriteRight, "I2: .* outlives its commit"),
    (TWO, LeasesAtWakeUp, GrantLedger, "held: "),
    (replace(ONE, faults=1), GrantTable, BelievesFailedWrites, "I4: "),
]


@pytest.mark.parametrize(
    ("config", "table", "ledger", "caught"),
    MUTANTS,
    ids=["C1", "C2", "C3", "C4", "C5", "C5, other side", "C6", "C9", "C10", "I4"],
)
def test_a_machine_without_one_rule_is_caught(
    config: Config, table: Callable[[list[str]], GrantTable], ledger: Callable[..., GrantLedger], caught: str
) -> None:
    with pytest.raises(Violation, match=caught):
        explore(World(config, table, ledger), seconds=30)


def test_write_backs_beyond_the_flash_quota_are_caught() -> None:
    """Without a shortest trace: two bundles must be written, written back, written again and evicted together."""

    config = replace(NO_SPARE, commits=1_000)
    assert sum(walk(seed, 600, config) for seed in range(10)) > 5_000

    def walk_on() -> None:
        for seed in range(100):
            walk(seed, 600, config, WritesBeyondTheFlashQuota)

    with pytest.raises(AssertionError, match=r"flash frames"):
        walk_on()


def test_a_machine_that_is_only_different_is_not_caught() -> None:
    seen: Exploration = explore(World(SMALL["two threads, reading"][0], GrantTable, ServesTheYoungestFirst), seconds=60)
    assert seen.complete
