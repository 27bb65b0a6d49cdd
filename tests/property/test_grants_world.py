"""The grant protocol's two machines in a hostile world: every state of small worlds, walks through larger ones. Longer:
tests/stress/test_grants_worlds.py. That the world's checks bite: test_grants_rules.py.
"""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from tiermem.testing.grants_explorer import explore
from tiermem.testing.grants_world import World
from tiermem.testing.grants_world_state import Config
from tiermem.testing.grants_worlds import SMALL, WALKED, walk


@pytest.mark.parametrize("name", SMALL)
def test_no_state_of_a_small_world_breaks_an_invariant(name: str) -> None:
    config, least_states = SMALL[name]
    seen = explore(World(config), seconds=60)
    assert seen.complete
    assert seen.states >= least_states, "the world explored less than it should: did an action disappear?"


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
        prediction = choice % len(self.world.config.predictions)
        self.world.drain(lambda actions: actions[choice % len(actions)], prediction)

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.drain(lambda actions: actions[0])


def test_walks_that_hypothesis_leads() -> None:
    run_state_machine_as_test(Walk, settings=settings(max_examples=30, stateful_step_count=60))


def test_random_walks_through_larger_worlds() -> None:
    assert sum(walk(seed, 300) for seed in range(60)) > 8_000
