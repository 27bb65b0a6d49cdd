from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tiermem.placement.base import Placement
from tiermem.placement.lru import LeastRecentlyUsed


def lru(*uses: int) -> Placement:
    placement = LeastRecentlyUsed()
    for bundle in uses:
        placement.used(bundle)
    return placement


def test_the_least_recently_used_leaves_first() -> None:
    assert lru(1, 2, 3, 1).eviction_order([1, 2, 3]) == [2, 3, 1]


def test_what_was_never_used_leaves_before_everything() -> None:
    assert lru(1, 2).eviction_order([2, 9, 1]) == [9, 1, 2]


def test_a_forgotten_bundle_is_as_if_never_used() -> None:
    placement = lru(1, 2)
    placement.forget(2)
    placement.forget(77)  # unknown: ignored
    assert placement.eviction_order([1, 2]) == [2, 1]


@given(st.lists(st.integers(0, 9)), st.sets(st.integers(0, 12)))
def test_only_candidates_are_ordered_each_once(uses: list[int], candidates: set[int]) -> None:
    order = lru(*uses).eviction_order(candidates)
    assert sorted(order) == sorted(candidates)
    last = [max((i for i, used in enumerate(uses) if used == bundle), default=-1) for bundle in order]
    assert last == sorted(last)
