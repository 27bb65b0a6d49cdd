from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tiermem.bundle import Mode
from tiermem.forecast import Forecast
from tiermem.placement.belady import Belady
from tiermem.plan import Access, BundleUse, Phase, Plan, PlannedAccess
from tiermem.planner.cache import LruPolicy, OfflinePolicy, PredictedPolicy, simulate


def plan_of_bundles(bundles: list[int]) -> Plan:
    return tuple(PlannedAccess(Access(b, Phase.FORWARD), (BundleUse(b, Mode.READ, 1),)) for b in bundles)


def fewest_misses(bundles: list[int], capacity: int) -> int:
    """Of all choices of victims, by trying them all."""
    caches: dict[frozenset[int], int] = {frozenset(): 0}
    for bundle in bundles:
        following: dict[frozenset[int], int] = {}
        for cache, misses in caches.items():
            if bundle in cache:
                choices = [(cache, misses)]
            elif len(cache) < capacity:
                choices = [(cache | {bundle}, misses + 1)]
            else:
                choices = [(cache - {victim} | {bundle}, misses + 1) for victim in cache]
            for after, count in choices:
                following[after] = min(count, following.get(after, count))
        caches = following
    return min(caches.values())


BUNDLES = st.lists(st.integers(0, 6), max_size=40)


@given(BUNDLES, st.integers(1, 5))
@settings(deadline=None)
def test_with_perfect_prediction_no_choice_of_victims_loads_less(bundles: list[int], capacity: int) -> None:
    plan = plan_of_bundles(bundles)
    misses = simulate(plan, capacity, OfflinePolicy(plan)).misses
    assert misses == fewest_misses(bundles, capacity)
    assert misses <= simulate(plan, capacity, LruPolicy()).misses


@given(BUNDLES, st.integers(1, 5))
@settings(deadline=None)
def test_bypassing_never_loads_more(bundles: list[int], capacity: int) -> None:
    plan = plan_of_bundles(bundles)
    bypassing = simulate(plan, capacity, OfflinePolicy(plan, bypass=True)).misses
    assert bypassing <= simulate(plan, capacity, OfflinePolicy(plan)).misses


@given(st.lists(st.integers(0, 9)), st.sets(st.integers(0, 12)), st.dictionaries(st.integers(0, 12), st.integers(1, 9)))
def test_victims_are_the_candidates_each_once(uses: list[int], candidates: set[int], distances: dict[int, int]) -> None:
    placement = Belady(distances.get)
    for bundle in uses:
        placement.used(bundle)
    order = placement.eviction_order(candidates)
    assert sorted(order) == sorted(candidates)
    ranks = [distances.get(bundle, 99) for bundle in order]
    assert ranks == sorted(ranks, reverse=True)


PLANNED = st.builds(
    lambda access, modes: PlannedAccess(access, tuple(BundleUse(b, m, 1 + b % 3) for b, m in modes.items())),
    st.builds(Access, st.integers(0, 4), st.sampled_from(Phase), st.booleans()),
    st.dictionaries(st.integers(0, 7), st.sampled_from(Mode), max_size=3),
)


@given(st.lists(PLANNED, max_size=60), st.integers(9, 20), st.booleans())
@settings(deadline=None)
def test_any_plan_can_be_simulated_and_adds_up(planned: list[PlannedAccess], capacity: int, bypass: bool) -> None:
    plan = tuple(planned)
    uses = [use for access in plan for use in access.uses]
    for policy in (LruPolicy(), OfflinePolicy(plan, bypass), PredictedPolicy(bypass)):
        count = simulate(plan, capacity, policy)
        assert count.hits + count.misses + count.creates == len(uses)
        assert count.read_bytes <= sum(use.nbytes for use in uses)
        assert count.written_bytes <= sum(use.nbytes for use in uses if use.mode.writes)


@given(st.lists(PLANNED, max_size=40), st.sampled_from(["main", "update"]))
@settings(deadline=None)
def test_a_forecast_agrees_with_what_it_says_is_upcoming(planned: list[PlannedAccess], lane: str) -> None:
    forecast = Forecast()
    for access in planned:
        forecast.began(lane, access.access)
        for use in access.uses:
            forecast.leased(lane, use)
        forecast.check_invariants()
        places: dict[int, int] = {}
        for distance, upcoming in enumerate(forecast.upcoming(lane, 3 * len(planned)), 1):
            for use in upcoming.uses:
                places.setdefault(use.bundle, distance)
        assert {b: forecast.next_use(b) for b in range(8)} == {b: places.get(b) for b in range(8)}
