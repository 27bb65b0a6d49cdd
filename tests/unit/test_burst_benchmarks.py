"""The pure parts of the benchmarks that run in bursts: shapes, rows, bounds. Nothing is timed."""

from __future__ import annotations

import argparse

import pytest

from benchmarks.__main__ import BENCHMARKS
from benchmarks.bursts import Recorded
from benchmarks.disk import digest_rate
from benchmarks.oversubscribed import Case, Measured, _row, beaten, bounds_of, command_of
from benchmarks.shapes import SHAPES, batches, build
from tiermem.planner.bounds import DiskRates
from tiermem.planner.recorded import Traffic

DISK = DiskRates(100.0, 100.0, 100.0)
PLAIN = {"wall_s": 7.0, "forward_s": 2.0, "backward_s": 4.0, "update_s": 1.0}


def test_a_shape_says_how_many_parameters_its_model_has() -> None:
    shape = SHAPES["5M"]
    model = build(shape)
    assert sum(p.numel() for p in model.parameters()) == shape.parameters
    assert shape.state_bytes == 16 * shape.parameters
    first, second = (next(batches(shape, 32, 2)) for _ in range(2))
    assert first.shape == (2, 32) and bool((first == second).all()), "every loop has the same batches"


@pytest.mark.parametrize(("name", "millions"), [("134M", 134), ("374M", 374)])
def test_shapes_have_the_size_of_their_name(name: str, millions: int) -> None:
    assert round(SHAPES[name].parameters / 1e6) == millions


def test_a_row_sets_the_step_beside_what_the_hardware_allows() -> None:
    recorded = Recorded({"forward": Traffic(600.0, 0.0), "backward": Traffic(0.0, 100.0)}, {"forward": 1.0})
    bounds = bounds_of(PLAIN, recorded, DISK, digests=1e12)
    assert bounds.phase_s == pytest.approx(6.0 + 4.0)
    assert bounds.resource_s == pytest.approx(7.0)
    variant = {"wall_s": 20.0, "cpu_s": 1.0, "stall_s": 0.0, "read_bytes": 900.0, "written_bytes": 500.0, "early": 0.0}
    row = _row(Measured(Case(SHAPES["5M"], 0.25, "deferred"), 0.5, PLAIN, variant, recorded), DISK, 1e12)
    assert row["phase"] == pytest.approx(0.5)
    assert row["resource"] == pytest.approx(0.35)
    assert row["over least"] == pytest.approx(2.0)


def test_what_there_was_no_time_for_is_a_row_that_says_so() -> None:
    case = Case(SHAPES["5M"], 0.25, "deferred")
    names = (*PLAIN, "cpu_s", "stall_s", "read_bytes", "written_bytes", "early")
    row = _row(Measured(case), DISK, 1.0)
    whole = _row(Measured(case, 1.0, PLAIN, dict.fromkeys(names, 1.0), Recorded({}, {})), DISK, 1.0)
    assert row["note"] == "not within the time limit"
    assert list(row) == list(whole)


def test_a_step_that_beats_its_bound_is_said_to() -> None:
    rows: list[dict[str, object]] = [{"resource": 0.5}, {"resource": None}]
    assert beaten(rows) == []
    [note] = beaten([*rows, {"resource": 1.25}])
    assert "NOT A BOUND" in note and "1.25" in note


def test_the_command_gives_the_same_again_without_directories() -> None:
    parser = argparse.ArgumentParser()
    BENCHMARKS["oversubscribed"].add_arguments(parser)
    asked = ["--shape", "5M", "--way", "opted in", "--flash", "/somewhere", "--threads", "1"]
    command = command_of("oversubscribed", parser.parse_args(asked))
    assert "--way 'opted in'" in command and "/somewhere" not in command


def test_digests_have_a_rate() -> None:
    assert digest_rate(2) > 1e6
