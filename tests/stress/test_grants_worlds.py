"""The grant protocol's worlds that take minutes; tests/property/test_grants_world.py has the small ones."""

from __future__ import annotations

import pytest

from tiermem.testing.grants_explorer import explore
from tiermem.testing.grants_world import World
from tiermem.testing.grants_worlds import LARGER, walk

pytestmark = pytest.mark.stress


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("name", LARGER)
def test_no_state_of_a_larger_world_breaks_an_invariant(name: str) -> None:
    seen = explore(World(LARGER[name]), seconds=240)
    print(f"{name}: {seen}")
    assert seen.complete or seen.states > 10_000


@pytest.mark.timeout(1500)
def test_many_random_walks_through_larger_worlds() -> None:
    assert sum(walk(seed, 400) for seed in range(1_000, 2_000)) > 130_000
