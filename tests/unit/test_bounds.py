"""Bounds of a step: the disk's two directions, resources and phases, and the least that recorded accesses move."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiermem.bundle import Mode
from tiermem.errors import InvalidArgument
from tiermem.plan import BundleUse, Phase
from tiermem.planner.bounds import DiskRates, PhaseWork, phase_bound_s, resource_bound_s
from tiermem.planner.recorded import AccessRecord, Traffic, compute_by_phase

RATES = st.floats(1.0, 1e3)
BYTES = st.floats(0.0, 1e6)
DISKS = st.builds(DiskRates, RATES, RATES, RATES)
PHASES = st.lists(st.builds(PhaseWork, st.just("a phase"), st.floats(0, 100), BYTES, BYTES), max_size=5)


# -- time


def test_both_directions_at_once_then_what_is_left_of_one() -> None:
    disk = DiskRates(read=100.0, write=200.0, both=80.0)
    assert disk.seconds(1000, 0) == 10.0
    assert disk.seconds(0, 1000) == 5.0
    assert disk.seconds(800, 800) == 10.0
    assert disk.seconds(1800, 800) == 20.0


def test_a_disk_that_is_slower_at_both_is_used_in_turns() -> None:
    assert DiskRates(read=100.0, write=100.0, both=10.0).seconds(1000, 1000) == 20.0


def test_each_rate_is_the_faster_of_two_measurements() -> None:
    assert DiskRates(1.0, 5.0, 2.0).best_of(DiskRates(3.0, 4.0, 1.0)) == DiskRates(3.0, 5.0, 2.0)


@pytest.mark.parametrize("rates", [(0.0, 1.0, 1.0), (1.0, -1.0, 1.0), (1.0, 1.0, float("nan"))])
def test_rates_are_positive(rates: tuple[float, float, float]) -> None:
    with pytest.raises(InvalidArgument, match="above 0"):
        DiskRates(*rates)


def test_overlap_within_phases_and_over_the_whole_step() -> None:
    disk = DiskRates(100.0, 100.0, 100.0)
    phases = [PhaseWork("forward", 10.0, 200.0, 0.0), PhaseWork("backward", 2.0, 1000.0, 0.0)]
    assert resource_bound_s(phases, disk) == 12.0
    assert phase_bound_s(phases, disk) == 20.0


@given(PHASES, DISKS)
def test_phases_one_after_the_other_are_never_faster_than_perfect_overlap(
    phases: list[PhaseWork], disk: DiskRates
) -> None:
    assert phase_bound_s(phases, disk) >= resource_bound_s(phases, disk) * (1 - 1e-9)


def test_the_update_computes_where_it_writes() -> None:
    updated = {"forward": 30.0, "backward": 90.0}
    assert compute_by_phase(1.0, 2.0, 4.0, updated) == [("forward", 2.0), ("backward", 5.0), ("update", 0.0)]
    assert compute_by_phase(1.0, 2.0, 4.0, {}) == [("forward", 1.0), ("backward", 2.0), ("update", 4.0)]


# -- bytes


def use(bundle: int, mode: Mode = Mode.READ, nbytes: int = 10) -> BundleUse:
    return BundleUse(bundle, mode, nbytes)


def recorded(*steps: list[tuple[str, BundleUse]]) -> AccessRecord:
    record = AccessRecord()
    for step in steps:
        for label, one in step:
            record.used(label, Phase.UPDATE if label == "update" else Phase.FORWARD, [one])
        record.step_ended()
    return record


def test_what_fits_moves_nothing_after_the_first_step() -> None:
    step = [("forward", use(1)), ("update", use(1, Mode.UPDATE)), ("update", use(2, Mode.UPDATE))]
    record = recorded(*[step] * 4)
    traffic = record.least_traffic(20, 1, 2)
    assert all(moved == Traffic() for moved in traffic.values())
    assert record.updated_bytes(1, 2) == {"update": 20.0}


def test_what_does_not_fit_is_counted_where_it_is_read_and_where_it_makes_room() -> None:
    step = [("forward", use(1)), ("update", use(2, Mode.UPDATE))]
    traffic = recorded(*[step] * 5).least_traffic(10, 1, 3)
    assert traffic == {"forward": Traffic(10.0, 10.0), "update": Traffic(10.0, 0.0)}


def test_what_is_freed_is_never_written_and_takes_no_room_after_its_last_use() -> None:
    record = AccessRecord()
    for _ in range(5):
        record.used("backward", Phase.BACKWARD, [use(7, Mode.CREATE)])
        record.used("update", Phase.UPDATE, [use(7, Mode.UPDATE)])
        record.used("forward", Phase.FORWARD, [use(1)])
        record.freed(7)
        record.step_ended()
    assert sum(moved.written_bytes for moved in record.least_traffic(10, 1, 3).values()) == 0.0
    assert all(moved == Traffic() for moved in record.least_traffic(20, 1, 3).values())


def test_a_bundle_that_takes_anothers_place_is_that_one_from_then_on() -> None:
    record = AccessRecord()
    for _ in range(5):
        record.used("forward", Phase.FORWARD, [use(1)])
        record.used("backward", Phase.UPDATE, [use(1), use(2, Mode.CREATE)])
        record.renamed(1, 2)
        record.step_ended()
    assert all(moved == Traffic() for moved in record.least_traffic(20, 1, 3).values())


def test_steps_that_were_not_recorded_are_refused() -> None:
    with pytest.raises(ValueError, match="2 that were recorded"):
        recorded([("forward", use(1))], [("forward", use(1))]).least_traffic(10, 1, 2)
