"""What is used next, and when: predicted accesses joined with what they have used and how long they took."""

from __future__ import annotations

import itertools

import pytest

from tiermem.bundle import BundleSpec, Kind, Mode
from tiermem.lookahead import HORIZON, Lookahead, LookaheadOptions, Policy, placement_for
from tiermem.placement.belady import Belady
from tiermem.placement.lru import LeastRecentlyUsed
from tiermem.plan import Access, Phase
from tiermem.stats import PredictionOutcome
from tiermem.testing.fakes import FakeClock

LANE = "main"
UNITS = ("a", "b", "c")
SPECS = {"a": 1, "b": 2, "c": 3}
GRADS = {unit: spec + 10 for unit, spec in SPECS.items()}
SECONDS = {Phase.FORWARD: 1.0, Phase.BACKWARD: 2.0}


def spec(number: int) -> BundleSpec:
    return BundleSpec(number, Kind.PARAM, "unit", 64)


class Lane:
    """Plays a lane: steps of three units forward and back, in which every access uses its bundles at once."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.lookahead = Lookahead(self.clock.now_s)

    def access(self, unit: str, phase: Phase, uses: bool = True) -> None:
        self.lookahead.accessed(LANE, Access(unit, phase))
        if uses:
            self.lookahead.used(LANE, spec(SPECS[unit]), Mode.READ)
            if phase == Phase.BACKWARD:
                self.lookahead.used(LANE, spec(GRADS[unit]), Mode.CREATE)
            self.clock.advance(SECONDS[phase])

    def step(self) -> None:
        for unit in UNITS:
            self.access(unit, Phase.FORWARD)
        for unit in reversed(UNITS):
            self.access(unit, Phase.BACKWARD)

    def upcoming(self, count: int) -> list[tuple[int, Mode, float]]:
        uses = itertools.islice(self.lookahead.upcoming(LANE), count)
        return [(use.spec, use.mode, use.due_s - self.clock.now_s()) for use in uses]


@pytest.fixture
def lane() -> Lane:
    return Lane()


def test_nothing_is_foreseen_before_anything_repeats(lane: Lane) -> None:
    assert lane.upcoming(9) == []
    lane.lookahead.used(LANE, spec(1), Mode.READ)  # adopting a model: no access is under way
    lane.access("a", Phase.FORWARD)
    assert lane.upcoming(9) == []
    assert lane.lookahead.next_use(1) is None
    assert lane.lookahead.outcomes()[PredictionOutcome.RIGHT] == 0


def test_uses_follow_in_order_with_the_times_they_took(lane: Lane) -> None:
    for _ in range(4):
        lane.step()
    lane.access("a", Phase.FORWARD, uses=False)
    R, C = Mode.READ, Mode.CREATE
    assert lane.upcoming(10) == [
        (1, R, 0.0),  # of the access under way
        (2, R, 1.0),
        (3, R, 2.0),
        (3, R, 3.0),
        (13, C, 3.0),
        (2, R, 5.0),
        (12, C, 5.0),
        (1, R, 7.0),
        (11, C, 7.0),
        (1, R, 9.0),
    ]


def test_what_the_access_under_way_has_used_is_behind(lane: Lane) -> None:
    for _ in range(4):
        lane.step()
    lane.lookahead.accessed(LANE, Access("a", Phase.FORWARD))
    assert lane.lookahead.next_use(1) == 0
    lane.lookahead.used(LANE, spec(1), Mode.READ)
    assert lane.lookahead.next_use(1) == 5, "its backward"
    assert lane.lookahead.next_use(2) == 1
    assert lane.lookahead.next_use(99) is None


def test_another_order_is_noticed_at_once(lane: Lane) -> None:
    for _ in range(4):
        lane.step()
    lane.access("a", Phase.FORWARD)
    assert lane.upcoming(1)[0][0] == SPECS["b"]
    lane.access("c", Phase.FORWARD)
    assert lane.lookahead.outcomes()[PredictionOutcome.WRONG] >= 1
    assert lane.upcoming(1)[0][0] in (SPECS["c"], SPECS["a"]), "what came after c before"


def test_it_never_runs_dry_while_training_repeats_itself(lane: Lane) -> None:
    for _ in range(4):
        lane.step()
    for _ in range(HORIZON):
        lane.step()
        assert len(lane.upcoming(HORIZON // 2)) == HORIZON // 2


def test_lanes_are_told_apart(lane: Lane) -> None:
    for _ in range(4):
        lane.step()
    assert list(lane.lookahead.upcoming("worker")) == []
    lane.lookahead.accessed("worker", Access("a", Phase.UPDATE))
    assert lane.upcoming(1)[0][0] == SPECS["a"], "main begins another step"


def test_policies_by_name() -> None:
    def never(bundle: int) -> None:
        return None

    assert isinstance(placement_for(LookaheadOptions(), never), Belady)
    assert isinstance(placement_for(LookaheadOptions(Policy("lru")), never), LeastRecentlyUsed)
