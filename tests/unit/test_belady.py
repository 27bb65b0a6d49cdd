from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest

from tiermem.bundle import Mode
from tiermem.forecast import Forecast
from tiermem.placement.base import Placement
from tiermem.placement.belady import Belady
from tiermem.placement.lru import LeastRecentlyUsed
from tiermem.plan import Access, BundleUse, Phase, Plan, PlannedAccess
from tiermem.planner.cache import (
    CacheCount,
    LruPolicy,
    OfflinePolicy,
    PredictedPolicy,
    one_bundle_a_unit,
    plan_of,
    simulate,
)
from tiermem.testing.access_sequences import SCRIPTS, Experts, Script, Update


def belady(distances: dict[int, int], *uses: int) -> Belady:
    placement = Belady(distances.get)
    for bundle in uses:
        placement.used(bundle)
    return placement


def test_the_furthest_next_use_leaves_first() -> None:
    assert belady({1: 5, 2: 9, 3: 1}, 1, 2, 3).eviction_order([1, 2, 3]) == [2, 1, 3]


def test_what_is_not_predicted_leaves_before_what_is() -> None:
    assert belady({1: 5, 2: 900}, 1, 2, 3).eviction_order([1, 2, 3]) == [3, 2, 1]


def test_without_predictions_it_is_lru() -> None:
    placement = belady({}, 1, 2, 3, 1)
    assert placement.eviction_order([1, 2, 3, 9]) == [9, 2, 3, 1]
    placement.forget(1)
    assert placement.eviction_order([1, 2]) == [1, 2]


def test_of_equals_the_least_recently_used_leaves_first() -> None:
    assert belady({1: 4, 2: 4, 3: 4}, 3, 1, 2).eviction_order([1, 2, 3]) == [3, 1, 2]


@pytest.mark.parametrize(
    ("bundle", "resident", "answer"),
    [(3, [1, 2], True), (1, [2], False), (3, [3], False), (9, [1, 2], True), (9, [1, 8], False), (3, [], False)],
)
def test_what_is_used_after_everything_resident_is_not_worth_a_place(
    bundle: int, resident: list[int], answer: bool
) -> None:
    assert belady({1: 5, 2: 9, 3: 10}).bypass(bundle, resident) == answer


def use(bundle: int, mode: Mode = Mode.READ, nbytes: int = 1) -> BundleUse:
    return BundleUse(bundle, mode, nbytes)


def test_the_forecast_learns_what_an_access_leases() -> None:
    forecast = Forecast()
    a, b = Access("a", Phase.FORWARD), Access("b", Phase.FORWARD)
    forecast.leased("main", use(7))  # before any access: nobody's
    for _ in range(2):
        forecast.began("main", a)
        forecast.leased("main", use(1))
        forecast.leased("main", use(2, Mode.UPDATE))
        forecast.began("main", b)
        forecast.leased("main", use(3))
    assert [forecast.next_use(bundle) for bundle in (1, 2, 3, 7)] == [1, 1, 2, None]
    expected = [PlannedAccess(a, (use(1), use(2, Mode.UPDATE))), PlannedAccess(b, (use(3),))]
    assert list(forecast.upcoming("main", 2)) == expected
    forecast.began("main", a)
    forecast.leased("main", use(4))
    forecast.began("main", b)
    assert [forecast.next_use(bundle) for bundle in (1, 2, 4)] == [None, None, 1]
    forecast.check_invariants()


def test_the_nearest_lane_counts_and_a_lane_that_has_ended_does_not() -> None:
    forecast = Forecast()
    units = [Access(unit, Phase.UPDATE) for unit in "abc"]
    for _ in range(2):
        for lane, order in (("main", units), ("update", units[::-1])):
            for access in order:
                forecast.began(lane, access)
                forecast.leased(lane, use(ord(str(access.unit))))
    assert forecast.next_use(ord("c")) == 1
    forecast.ended("update")
    assert forecast.next_use(ord("c")) == 3
    forecast.check_invariants()


def misses(plan: Plan, capacity: int, warm_up: int) -> tuple[int, int, int]:
    """Offline Belady's, LRU's and those of Belady on predictions."""
    policies = OfflinePolicy(plan), LruPolicy(), PredictedPolicy()
    offline, lru, predicted = (simulate(plan, capacity, policy, warm_up).misses for policy in policies)
    return offline, lru, predicted


OVER_OFFLINE = {
    "plain": (1.0, 1.0),
    "barrier update": (1.2, 1.0),
    "deferred update": (1.0, 1.0),
    "accumulation, barrier": (1.07, 1.0),
    "checkpointed segments": (1.07, 1.0),
    "everything, barrier": (1.1, 1.005),
    "random evaluations, aborted forwards": (1.04, 1.01),
    "frozen bottom": (1.25, 1.0),
    "experts": (1.28, 1.25),
    "experts, checkpointed, evaluation": (1.4, 1.31),
}
"""Misses over those of the offline policy: LRU's are at least the first, those of Belady on predictions at most the
second.
"""


@pytest.mark.parametrize("name", OVER_OFFLINE)
def test_predictions_are_good_enough_to_evict_by(name: str) -> None:
    script = SCRIPTS[name]
    steps = list(script.steps(18))
    plan = one_bundle_a_unit(access for step in steps for access in step)
    offline, lru, predicted = misses(plan, 40 if script.experts else 8, sum(map(len, steps[:6])))
    least_lru, most_predicted = OVER_OFFLINE[name]
    assert lru >= least_lru * offline
    assert predicted <= most_predicted * offline


class _UnknownLast:
    """The other rule: what has no predicted use stays longest."""

    def __init__(self, next_use: Callable[[int], int | None]) -> None:
        self._next_use = next_use
        self._recency = LeastRecentlyUsed()

    def used(self, bundle_id: int) -> None:
        self._recency.used(bundle_id)

    def forget(self, bundle_id: int) -> None:
        self._recency.forget(bundle_id)

    def eviction_order(self, candidates: Iterable[int]) -> list[int]:
        return sorted(self._recency.eviction_order(candidates), key=lambda b: -(self._next_use(b) or 0))


def with_optimizer_state(script: Script, steps: int) -> Plan:
    """Parameters are one unit of bytes, the optimizer state two."""
    numbers: dict[object, int] = {}

    def uses(access: Access) -> tuple[BundleUse, ...]:
        unit = numbers.setdefault(access.unit, len(numbers))
        if access.phase != Phase.UPDATE:
            return (use(2 * unit),)
        return use(2 * unit, Mode.UPDATE), use(2 * unit + 1, Mode.UPDATE, 2)

    return plan_of(script.accesses(steps), uses)


def test_unknown_is_further_than_any_known_use() -> None:
    """Where training repeats itself everything is predicted and the rule does not matter. With random experts an expert
    of which no use is predicted is a rare one: keeping it reads up to 6 % more in five of these, 2 % less in one.
    """

    def read_bytes(script: Script, capacity: int, order: Callable[[Callable[[int], int | None]], Placement]) -> int:
        return simulate(with_optimizer_state(script, 12), capacity, PredictedPolicy(order=order)).read_bytes

    regular = Script(blocks=12, generate_every=4, update=Update.BARRIER)
    assert read_bytes(regular, 20, Belady) == read_bytes(regular, 20, _UnknownLast)
    experts = Experts(6, 2, 2)
    cases = [
        (Script(blocks=8, experts=experts), 20),
        (Script(blocks=8, experts=experts), 30),
        (Script(blocks=8, experts=experts, evaluate_every=4, microbatches=2), 20),
        (Script(blocks=8, experts=experts, update=Update.BARRIER), 60),
        (Script(blocks=8, experts=experts, update=Update.BARRIER, evaluate_every=4), 90),
        (Script(blocks=8, experts=experts, update=Update.DEFERRED, evaluate_every=4, microbatches=2), 60),
    ]
    first, last = (
        [read_bytes(script, capacity, order) for script, capacity in cases] for order in (Belady, _UnknownLast)
    )
    assert sum(first) < sum(last)
    assert sum(f < n for f, n in zip(first, last, strict=True)) >= 5, (first, last)


LAYERS, STATE_BUNDLES = 32, 6


def layer(number: int) -> range:
    """A layer's bundles, of equal size: its weights and six of optimizer state (12 bytes a parameter beside 2)."""
    return range(number * (1 + STATE_BUNDLES), (number + 1) * (1 + STATE_BUNDLES))


def single(number: int, phase: Phase, bundle: int) -> PlannedAccess:
    return PlannedAccess(Access((number, bundle), phase), (use(bundle, _MODE[phase]),))


_MODE = {Phase.FORWARD: Mode.READ, Phase.BACKWARD: Mode.READ, Phase.UPDATE: Mode.UPDATE}


def updating_in_backward_order(steps: int) -> Plan:
    plan: list[PlannedAccess] = []
    for _ in range(steps):
        plan += [single(n, Phase.FORWARD, layer(n)[0]) for n in range(LAYERS)]
        for n in reversed(range(LAYERS)):
            plan.append(single(n, Phase.BACKWARD, layer(n)[0]))
            plan += [single(n, Phase.UPDATE, bundle) for bundle in layer(n)[1:]]
    return tuple(plan)


def updating_at_a_barrier(steps: int) -> Plan:
    plan: list[PlannedAccess] = []
    for _ in range(steps):
        plan += [single(n, Phase.FORWARD, layer(n)[0]) for n in range(LAYERS)]
        plan += [single(n, Phase.BACKWARD, layer(n)[0]) for n in reversed(range(LAYERS))]
        plan += [single(n, Phase.UPDATE, bundle) for n in range(LAYERS) for bundle in layer(n)]
    return tuple(plan)


@pytest.mark.parametrize(
    ("share", "lru", "offline", "barrier_lru", "barrier_offline"),
    [(0.25, 0.06, 0.34, 0.15, 0.41), (0.50, 0.12, 0.55, 0.21, 0.60), (0.75, 0.19, 0.77, 0.27, 0.79)],
)
def test_hit_rates_of_the_design(
    share: float, lru: float, offline: float, barrier_lru: float, barrier_offline: float
) -> None:
    """Parameters and optimizer state, a share of the bytes cached, every bundle an access, nothing resident at first.

    The design's figures (6/12/19 % and 34/55/77 %) are those of an update whose weights are still there from their
    backward, state in backward order. A pass over all layers after backward uses the weights once more, so both rates
    are higher; the gap is the same.
    """
    capacity = int(share * LAYERS * (1 + STATE_BUNDLES))
    for plan, least, most in (
        (updating_in_backward_order(10), lru, offline),
        (updating_at_a_barrier(10), barrier_lru, barrier_offline),
    ):
        warm_up = len(plan) // 5
        assert simulate(plan, capacity, LruPolicy(), warm_up).hit_rate == pytest.approx(least, abs=0.015)
        bound = simulate(plan, capacity, OfflinePolicy(plan, bypass=True), warm_up).hit_rate
        assert bound == pytest.approx(most, abs=0.025)
        predicted = simulate(plan, capacity, PredictedPolicy(bypass=True), warm_up).hit_rate
        assert predicted == pytest.approx(bound, abs=0.01)


def test_a_zig_zag_makes_lru_and_belady_equal() -> None:
    plan = one_bundle_a_unit(SCRIPTS["plain"].accesses(10))
    offline, lru, _ = misses(plan, 8, 0)
    assert offline == lru


def test_bytes_are_counted_by_what_is_read_and_what_leaves_dirty() -> None:
    def one(bundle: int, mode: Mode) -> PlannedAccess:
        return PlannedAccess(Access(bundle, Phase.UPDATE), (use(bundle, mode, 10),))

    plan = (one(1, Mode.CREATE), one(2, Mode.READ), one(3, Mode.UPDATE), one(3, Mode.CONSUME), one(1, Mode.READ))
    count = simulate(plan, 20, LruPolicy())
    assert count == CacheCount(hits=1, misses=3, creates=1, read_bytes=30, written_bytes=10)


def test_what_cannot_be_simulated_is_refused() -> None:
    both = (PlannedAccess(Access("a", Phase.FORWARD), (use(1), use(2))),)
    with pytest.raises(ValueError, match="uses 2 bytes at once, of 1"):
        simulate(both, 1, LruPolicy())
    twice = (PlannedAccess(Access("a", Phase.FORWARD), (use(1), use(1))),)
    with pytest.raises(ValueError, match="uses a bundle twice"):
        simulate(twice, 9, LruPolicy())
