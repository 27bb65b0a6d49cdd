from __future__ import annotations

import pytest

from tiermem.allocator import FrameAllocator, OutOfFrames, byte_ranges, choose_victims
from tiermem.errors import Code, InvalidArgument


def test_take_prefers_the_smallest_run_that_holds_all() -> None:
    allocator = FrameAllocator(20)
    allocator.take(20)
    allocator.give([(0, 5), (8, 3), (12, 4)])
    assert allocator.take(3) == ((8, 3),)
    assert allocator.take(4) == ((12, 4),)
    assert allocator.free_runs == ((0, 5),)


def test_take_gathers_the_longest_runs_and_ends_with_a_best_fit() -> None:
    allocator = FrameAllocator(30)
    allocator.take(30)
    allocator.give([(0, 2), (4, 6), (12, 5), (20, 3)])
    assert allocator.take(13) == ((4, 6), (12, 5), (0, 2))
    assert allocator.free_runs == ((20, 3),)
    allocator.check_invariants([(2, 2), (10, 2), (17, 3), (23, 7), (4, 6), (12, 5), (0, 2)])


def test_too_large_a_request_says_how_many_are_short_and_changes_nothing() -> None:
    allocator = FrameAllocator(4)
    allocator.take(1)
    with pytest.raises(OutOfFrames, match="5 frames wanted, 3 free, 2 short") as caught:
        allocator.take(5)
    assert (caught.value.short, caught.value.code) == (2, Code.TIER_FULL)
    assert allocator.free_runs == ((1, 3),)


@pytest.mark.parametrize("count", [0, -1])
def test_nothing_cannot_be_taken(count: int) -> None:
    with pytest.raises(InvalidArgument, match=f"{count} frames"):
        FrameAllocator(4).take(count)


def test_give_joins_neighbours_on_both_sides() -> None:
    allocator = FrameAllocator(9)
    allocator.take(9)
    allocator.give([(0, 3)])
    allocator.give([(6, 3)])
    allocator.give([(3, 3)])
    assert allocator.free_runs == ((0, 9),)
    assert allocator.free_frames == 9


@pytest.mark.parametrize(
    ("runs", "reason"),
    [
        ([(0, 1)], "free already"),
        ([(1, 3)], "free already"),
        ([(3, 2)], "free already"),
        ([(2, 5)], "free already"),
        ([(8, 3)], "not inside"),
        ([(-1, 1)], "not inside"),
        ([(3, 0)], "not inside"),
        ([(6, 2), (7, 1)], "overlaps"),
        ([(6, 2), (0, 1)], "free already"),
    ],
)
def test_a_wrong_give_is_refused_and_changes_nothing(runs: list[tuple[int, int]], reason: str) -> None:
    allocator = FrameAllocator(10)
    allocator.take(10)
    allocator.give([(0, 2), (4, 2)])
    with pytest.raises(ValueError, match=reason):
        allocator.give(runs)
    assert allocator.free_runs == ((0, 2), (4, 2))
    assert allocator.free_frames == 4


def test_grow_adds_free_frames_at_the_end() -> None:
    allocator = FrameAllocator(0)
    with pytest.raises(OutOfFrames):
        allocator.take(1)
    allocator.grow(3)
    allocator.grow(0)
    allocator.take(2)
    allocator.grow(2)
    assert (allocator.frames, allocator.free_runs) == (5, ((2, 3),))


def test_a_negative_size_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="-1"):
        FrameAllocator(-1)
    with pytest.raises(InvalidArgument, match="-2"):
        FrameAllocator(1).grow(-2)


@pytest.mark.parametrize("held", [[], [(0, 3)], [(0, 2), (1, 1)], [(0, 2), (5, 1)]])
def test_check_invariants_finds_what_is_lost_or_held_twice(held: list[tuple[int, int]]) -> None:
    allocator = FrameAllocator(5)
    allocator.take(2)
    allocator.check_invariants([(0, 2)])
    with pytest.raises(AssertionError):
        allocator.check_invariants(held)


def test_no_victim_where_there_is_room() -> None:
    assert choose_victims(3, 3, [("a", 9)]) == ()


def test_victims_in_order_until_there_is_room() -> None:
    assert choose_victims(5, 1, [("a", 2), ("b", 2), ("c", 2)]) == ("a", "b")


def test_a_victim_that_a_larger_one_makes_needless_is_spared() -> None:
    assert choose_victims(8, 0, [("a", 1), ("b", 2), ("c", 8)]) == ("c",)
    assert choose_victims(9, 0, [("a", 1), ("b", 2), ("c", 8)]) == ("a", "c")


def test_of_two_needless_victims_the_later_is_spared_first() -> None:
    # One frame of surplus only: "b" is the more valuable one.
    assert choose_victims(4, 0, [("a", 1), ("b", 1), ("c", 3)]) == ("a", "c")


def test_no_choice_of_victims_suffices() -> None:
    assert choose_victims(6, 1, [("a", 2), ("b", 2)]) is None
    assert choose_victims(5, 1, [("a", 2), ("b", 2)]) == ("a", "b")


def test_byte_ranges_follow_the_extent_not_the_address() -> None:
    runs = [(10, 2), (3, 1), (5, 4)]
    assert list(byte_ranges(runs, 100, 0, 700)) == [(1000, 200), (300, 100), (500, 400)]
    assert list(byte_ranges(runs, 100, 100, 250)) == [(1100, 100), (300, 100), (500, 50)]
    assert list(byte_ranges(runs, 100, 400, 7)) == [(600, 7)]
    assert list(byte_ranges(runs, 100, 700, 0)) == []


@pytest.mark.parametrize(("offset", "nbytes"), [(0, 301), (300, 1), (-1, 1), (0, -1)])
def test_bytes_outside_the_runs_are_refused(offset: int, nbytes: int) -> None:
    with pytest.raises(InvalidArgument, match="not inside an extent of 300 bytes"):
        list(byte_ranges([(0, 1), (4, 2)], 100, offset, nbytes))
