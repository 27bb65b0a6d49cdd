"""The pure parts of the paced benchmarks: turns, ratios, equality, clocks and rows. Nothing is timed."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator

import pytest

from benchmarks.__main__ import BENCHMARKS
from benchmarks.breakdown import Parts, whole
from benchmarks.paced import PacedRun, Spread, Step, Variant, check_equal, median_of, ratios, turns
from benchmarks.report import Machine, Report
from benchmarks.resident import ARITHMETIC, TARGET, broken_down, clock_note, compared

MACHINE = Machine("a CPU", 2, 1 << 33, "6.1", "3.11.0", "2.11.0", 0.0)


def paced_run(name: str, walls_s: list[float], parts: dict[str, tuple[float, int]] | None = None) -> PacedRun:
    steps = tuple(
        Step(2.0 - at, wall_s, wall_s / 2, 0.0, {"forward": wall_s / 4, "optimizer": wall_s / 4}, parts or {})
        for at, wall_s in enumerate(walls_s)
    )
    return PacedRun(Variant(name, ()), steps, (9.0, *(s.loss for s in steps)), "abc", 1, 0, 0.0, 1e-6)


def changed(run: PacedRun, **values: object) -> PacedRun:
    fields = {name: getattr(run, name) for name in PacedRun.__slots__}
    return PacedRun(**{**fields, **values})


@pytest.mark.parametrize("variants", [1, 2, 3])
def test_every_variant_has_one_turn_a_round_and_nobody_is_always_first(variants: int) -> None:
    rounds = [turns(variants, round_) for round_ in range(4)]
    assert all(sorted(order) == list(range(variants)) for order in rounds)
    assert rounds[1] == rounds[0][::-1] and rounds[2:] == rounds[:2]


def test_the_figure_is_the_median_of_ratios_within_rounds() -> None:
    """A slow phase that begins within a pair spoils that pair; it would move a ratio of medians tenfold."""
    plain = paced_run("plain", [1.0, 1.0, 1.0, 10.0, 10.0])
    attached = paced_run("attached", [1.5, 1.25, 12.5, 12.5, 12.5])
    spread = ratios(attached, plain, lambda step: step.wall_s)
    assert spread == Spread(median=1.25, lower=1.25, upper=1.5)
    assert median_of(attached, lambda s: s.wall_s) / median_of(plain, lambda s: s.wall_s) == 12.5
    with pytest.raises(ValueError, match="longer"):
        ratios(paced_run("attached", [1.0, 1.0]), plain, lambda step: step.wall_s)


def test_quartiles_of_an_even_number_of_ratios() -> None:
    assert Spread.of([4.0, 1.0, 2.0, 3.0]) == Spread(median=2.5, lower=1.75, upper=3.25)


def test_equal_runs_pass() -> None:
    check_equal([paced_run("plain", [1.0, 2.0]), paced_run("attached", [3.0, 4.0])])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda run: changed(run, losses=(9.0, 2.0, 1.5)), "step 3: loss 1.5 of 'attached', 1.0 of 'plain'"),
        (lambda run: changed(run, weights_sha256="other"), "'attached' ends with other weights than 'plain'"),
        (lambda run: changed(run, threads=2), "'attached' ran with 2 threads, not 1"),
    ],
)
def test_a_run_that_computes_something_else_is_no_result(change: Callable[[PacedRun], PacedRun], message: str) -> None:
    runs = [paced_run("plain", [1.0, 2.0]), change(paced_run("attached", [1.0, 2.0]))]
    with pytest.raises(SystemExit, match=message):
        check_equal(runs)


def ticking(instants: list[float]) -> Callable[[], float]:
    following: Iterator[float] = iter(instants)
    return lambda: next(following)


def test_clocked_time_is_exclusive_and_has_the_path_of_its_callers() -> None:
    parts = Parts(ticking([0.0, 1.0, 3.0, 10.0, 20.0, 25.0]))
    inner = parts.timed("inner", lambda: "value")
    outer = parts.timed("outer", inner)
    assert (outer(), inner()) == ("value", "value")
    counted = parts.taken()
    assert counted == {"outer": (8.0, 1), "outer > inner": (2.0, 1), "inner": (5.0, 1)}
    assert whole(counted, "outer") == 10.0
    assert whole({**counted, "outermost": (1.0, 1)}, "outer") == 10.0
    assert parts.taken() == {}


def test_a_clocked_call_that_raises_is_counted_and_closed() -> None:
    parts = Parts(ticking([0.0, 1.0, 2.0, 4.0]))
    with pytest.raises(ZeroDivisionError):
        parts.timed("raises", lambda: 1 // 0)()
    parts.timed("after", lambda: None)()
    assert parts.taken() == {"raises": (1.0, 1), "after": (2.0, 1)}


def test_rows_have_the_same_columns_and_parts_add_up() -> None:
    plain, attached = paced_run("plain", [1.0, 1.0]), paced_run("attached", [1.5, 1.5])
    counted = {"enter": (0.25, 10), "enter > acquire": (0.125, 5), ARITHMETIC: (0.5, 2)}
    instrumented = paced_run("instrumented", [2.0, 2.0], counted)
    rows = [*compared(plain, attached), *broken_down(plain, attached, instrumented)]
    assert len({tuple(row) for row in rows}) == 1
    by_name = {row["what"]: row for row in rows}
    assert by_name["step, wall time"]["over plain"] == 1.5
    assert by_name["enter"]["attached_s"] == 0.375 and by_name["enter"]["own_s"] == 0.25
    assert by_name["enter > acquire"]["us a call"] == 25_000.0
    assert by_name["all parts but the arithmetic"]["own_s"] == 0.375
    rest = by_name["everything else; of plain, all but optimizer"]
    assert (rest["plain_s"], rest["attached_s"]) == (0.75, 1.125)
    assert "17 clocked calls" in clock_note(instrumented)


def test_the_json_has_what_a_reader_of_the_figure_needs() -> None:
    rows = compared(paced_run("plain", [1.0, 1.0]), paced_run("attached", [1.5, 1.5]))
    report = Report("resident", "what", 1.5, 1.0, TARGET, MACHINE, "command", rows)
    loaded = json.loads(json.dumps(report.as_json()))
    assert {"figure", "target", "bound", "machine", "command", "rows"} <= loaded.keys()
    assert (loaded["target"], loaded["bound"]) == (1.03, 1.0)


def test_resident_is_registered_and_refuses_what_gives_no_quartiles() -> None:
    benchmark = BENCHMARKS["resident"]
    parser = argparse.ArgumentParser()
    benchmark.add_arguments(parser)
    for words in (["--pairs", "1"], ["--breakdown", "1"], ["--breakdown", "-2"], ["--threads", "0"]):
        with pytest.raises(SystemExit, match="give --pairs 2 or more"):
            benchmark.run(parser.parse_args(words))
