"""Any sequence of entries and exits: room is found exactly when what is held leaves it, and what is held never goes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiermem.device_cache import DeviceCache
from tiermem.errors import TiermemError, WorkingSetTooLarge
from tiermem.placement.belady import Belady
from tiermem.placement.lru import LeastRecentlyUsed

FRAMES = 12
SIZES = {bundle: 1 + bundle % 4 for bundle in range(8)}


@given(st.lists(st.tuples(st.sampled_from(["hold", "let go", "drop"]), st.sampled_from(sorted(SIZES)))))
def test_room_is_found_exactly_when_what_is_held_leaves_it(operations: list[tuple[str, int]]) -> None:
    cache = DeviceCache(FRAMES, LeastRecentlyUsed())
    held: set[int] = set()
    for operation, bundle in operations:
        copy = cache.get(bundle)
        if operation == "hold" and bundle not in held:
            if copy is None:
                in_use = sum(SIZES[b] for b in held)
                if in_use + SIZES[bundle] > FRAMES:
                    with pytest.raises(WorkingSetTooLarge, match=f"{in_use} are in use at once"):
                        cache.victims(SIZES[bundle])
                    continue
                for victim in cache.victims(SIZES[bundle]):
                    assert victim not in held
                    cache.drop(victim)
                assert cache.take(bundle, SIZES[bundle]).frames == SIZES[bundle]
            cache.hold(bundle)
            held.add(bundle)
        elif operation == "let go" and bundle in held:
            cache.let_go(bundle)
            held.discard(bundle)
        elif operation == "drop" and copy is not None:
            if bundle in held:
                with pytest.raises(TiermemError, match="while it is used"):
                    cache.drop(bundle)
            else:
                cache.drop(bundle)
        cache.check_invariants()
        assert {b for b, copy in cache.copies() if copy.held} == held
        assert cache.used_frames == sum(copy.frames for _, copy in cache.copies())


USES = st.dictionaries(st.sampled_from(sorted(SIZES)), st.integers(0, 9))


@given(USES, st.sampled_from(sorted(SIZES)), st.integers(0, 9), st.sets(st.sampled_from(sorted(SIZES))))
def test_ahead_of_a_use_nothing_leaves_that_is_used_before(
    next_use: dict[int, int], bundle: int, use: int, held: set[int]
) -> None:
    cache = DeviceCache(FRAMES, Belady(next_use.get))
    for other in SIZES:
        if other != bundle and cache.used_frames + SIZES[other] <= FRAMES:
            cache.take(other, SIZES[other])
            if other in held:
                cache.hold(other)
    free = FRAMES - cache.used_frames
    may_leave = {b: c for b, c in cache.copies() if not c.held and (next_use.get(b) is None or next_use[b] > use)}
    victims = cache.victims_ahead(SIZES[bundle], next_use.get, use)
    if victims is None:
        assert free + sum(copy.frames for copy in may_leave.values()) < SIZES[bundle]
    else:
        assert set(victims) <= may_leave.keys()
        assert free + sum(may_leave[victim].frames for victim in victims) >= SIZES[bundle]


def test_the_copy_that_is_used_furthest_leaves_first() -> None:
    next_use = {1: 2, 2: 5}
    cache = DeviceCache(6, Belady(next_use.get))
    for bundle in (1, 2, 3):
        cache.take(bundle, 2)
    assert cache.victims(2) == (3,), "one that nobody is going to use"
    assert cache.victims(4) == (3, 2)
    assert cache.victims_ahead(2, next_use.get, 3) == (3,)
    cache.hold(3)
    assert cache.victims_ahead(2, next_use.get, 3) == (2,)
    assert cache.victims_ahead(4, next_use.get, 3) is None
