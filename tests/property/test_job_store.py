"""A real store, its mover's threads and real tiers against a dictionary of what was committed."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from tiermem.stats import EvictReason, JobStats, Link
from tiermem.testing.store_machine import MemoryStoreMachine, StoreMachine
from tiermem.units import MIB

MACHINES = [StoreMachine, MemoryStoreMachine]


@pytest.mark.parametrize("machine", MACHINES)
def test_bytes_are_returned_as_they_were_committed(machine: type[StoreMachine]) -> None:
    seen: list[JobStats] = []
    faults: list[int] = []

    class Watched(machine):  # type: ignore[valid-type,misc]
        def close(self) -> None:
            seen.append(self.store.snapshot())
            faults.append(self.faults.fired)
            super().close()

    run_state_machine_as_test(Watched, settings=settings(max_examples=25, stateful_step_count=40))
    # What the machine is there to try did happen.
    assert sum(stats.misses for stats in seen) > 100
    assert sum(stats.evictions[EvictReason.DEMAND] for stats in seen) > 100
    assert all(sum(stats.links[link].bytes for stats in seen) > 10 * MIB for link in Link)
    assert sum(sum(stats.refusals.values()) for stats in seen) > 5
    assert sum(faults) > 5


@pytest.mark.stress
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("machine", MACHINES)
def test_many_steps(machine: type[StoreMachine]) -> None:
    run_state_machine_as_test(machine, settings=settings(max_examples=250, stateful_step_count=60))
