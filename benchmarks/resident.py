"""Step time over plain when everything fits: what tiermem costs where it has nothing to do.

The plain script and the attached one take turns step by step (`paced.py`). Then both do so again beside a third that is
attached and has clocks in tiermem's own Python (`breakdown.py`): where the difference comes from.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.breakdown import BELOW, whole
from benchmarks.example import BUSY_CORES
from benchmarks.paced import DROPPED, PacedRun, Spread, Step, Variant, median_of, paced, ratios
from benchmarks.report import Machine, Report, Row
from tiermem_client.embedded import default_flash_directory

TITLE = "step time over plain when everything fits into DRAM, and where the difference goes"
TARGET, WEAKER = 1.03, 1.05
ARITHMETIC = BELOW.join(("update", "shadow", "arithmetic"))
COLUMNS = ("what", "plain_s", "attached_s", "over plain", "lower", "upper", "own_s", "calls", "us a call", "share")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pairs", type=int, default=12, help="pairs of steps, two more are dropped (default 12)")
    parser.add_argument(
        "--breakdown", type=int, default=4, help="rounds with the instrumented run (default 4; 0: none)"
    )
    parser.add_argument("--threads", type=int, default=1, help="torch's threads (default 1)")
    parser.add_argument("--dram", default="3GiB", help="what everything fits into (default 3GiB)")
    parser.add_argument("--flash", type=Path, metavar="DIR", help="on the disk to use (default: as tiermem chooses)")


def run(args: argparse.Namespace) -> Report:
    """Raises SystemExit where a run fails, computes something else than the plain one, or does not fit."""
    if args.pairs < 2 or args.breakdown < 0 or args.breakdown == 1 or args.threads < 1:
        raise SystemExit("give --pairs 2 or more, --breakdown 2 or more (or 0), and --threads 1 or more")
    machine = Machine.here()
    parent = (args.flash or default_flash_directory(os.environ)).resolve()
    parent.mkdir(parents=True, exist_ok=True)
    threads = ("--threads", str(args.threads))
    with tempfile.TemporaryDirectory(prefix="benchmark-", dir=parent) as folder:
        attached_arguments = ("--dram", args.dram, *threads)
        variants = [
            Variant("plain", ("--plain", *threads)),
            Variant("attached", (*attached_arguments, "--flash", f"{folder}/attached")),
            Variant("instrumented", (*attached_arguments, "--flash", f"{folder}/instrumented"), instrumented=True),
        ]
        (plain, attached), other_cores = paced(variants[:2], args.pairs)
        parts, parts_cores = paced(variants, args.breakdown) if args.breakdown else ([], 0.0)
    rows = compared(plain, attached)
    notes = [
        f"median over {args.pairs} pairs of steps, one process each, in turns; the first {DROPPED} of each are dropped",
        f"the weaker promise is {WEAKER:g}; bound: a step that does nothing but the plain one's work",
        "every loss and the sha256 of all weights were equal in all runs",
    ]
    if parts:
        rows += broken_down(*parts)
        notes.append(clock_note(parts[2]))
    if max(other_cores, parts_cores) >= BUSY_CORES:
        notes.append(f"NOT A QUIET MACHINE: other processes kept up to {max(other_cores, parts_cores):.1f} cores busy")
    return Report(
        benchmark="resident",
        what=f"median of attached over plain step time, with {args.dram} of DRAM and {args.threads} thread(s)",
        figure=ratios(attached, plain, lambda step: step.wall_s).median,
        bound=1.0,
        target=TARGET,
        machine=machine,
        command=_command(args),
        rows=rows,
        notes=notes,
    )


def compared(plain: PacedRun, attached: PacedRun) -> list[Row]:
    """Wall and CPU time of a step, and wall time of each call that the loop makes, attached over plain."""
    values: list[tuple[str, Callable[[Step], float]]] = [
        ("step, wall time", lambda step: step.wall_s),
        ("step, CPU time", lambda step: step.cpu_s),
    ]
    for name in plain.steps[0].phases_s:
        values.append((name, lambda step, name=name: step.phases_s[name]))  # type: ignore[misc]
    values.append(("backward and the rest", lambda step: step.wall_s - sum(step.phases_s.values())))
    rows = [_compared(name, plain, attached, value) for name, value in values]
    daemon_s = median_of(attached, lambda step: step.daemon_cpu_s)
    return [*rows, _row("CPU time of the daemon", attached_s=daemon_s)]


def broken_down(plain: PacedRun, attached: PacedRun, instrumented: PacedRun) -> list[Row]:
    """The instrumented run: what its clocks cost, and each part with the share of a step that is its own.

    `attached_s` of a part includes the parts below it in its path, `own_s` does not.
    """
    step_s = median_of(instrumented, lambda step: step.wall_s)
    rows = [
        _compared("clocks: instrumented over attached", attached, instrumented, lambda step: step.wall_s, plain=False)
    ]
    for path in sorted({path for step in instrumented.steps for path in step.parts}):
        own_s = median_of(instrumented, lambda step, path=path: step.parts.get(path, (0.0, 0))[0])  # type: ignore[misc]
        whole_s = median_of(instrumented, lambda step, path=path: whole(step.parts, path))  # type: ignore[misc]
        calls = round(statistics.median(step.parts.get(path, (0.0, 0))[1] for step in instrumented.steps))
        rows.append(
            _row(
                path,
                attached_s=whole_s,
                own_s=own_s,
                calls=calls,
                us_a_call=whole_s / calls * 1e6 if calls else None,
                share=own_s / step_s,
            )
        )
    ours_s = median_of(instrumented, lambda step: _in_parts(step) - whole(step.parts, ARITHMETIC))
    rows.append(_row("all parts but the arithmetic", own_s=ours_s, share=ours_s / step_s))
    rest = _compared("everything else; of plain, all but optimizer", plain, instrumented, _everything_else)
    return [*rows, rest]


def _everything_else(step: Step) -> float:
    """A plain step has no parts: there the optimizer's call stands for the arithmetic."""
    return step.wall_s - (_in_parts(step) or step.phases_s["optimizer"])


def _in_parts(step: Step) -> float:
    return sum(seconds for seconds, _ in step.parts.values())


def clock_note(instrumented: PacedRun) -> str:
    calls = statistics.median(sum(calls for _, calls in step.parts.values()) for step in instrumented.steps)
    return (
        f"clocks: {calls:.0f} clocked calls in an instrumented step, {instrumented.call_s * 1e6:.2f} us each, "
        f"{calls * instrumented.call_s * 1e3:.1f} ms together; they count in the part above"
    )


def _compared(name: str, base: PacedRun, run: PacedRun, value: Callable[[Step], float], plain: bool = True) -> Row:
    """`plain`: whether the base is the plain run, whose seconds have a column."""
    spread: Spread = ratios(run, base, value)
    return _row(
        name,
        plain_s=median_of(base, value) if plain else None,
        attached_s=median_of(run, value),
        over_plain=spread.median,
        lower=spread.lower,
        upper=spread.upper,
    )


def _row(what: str, **values: float | None) -> Row:
    named = {key.replace("_", " ") if key in ("over_plain", "us_a_call") else key: v for key, v in values.items()}
    return {"what": what, **{column: named.get(column) for column in COLUMNS[1:]}}


def _command(args: argparse.Namespace) -> str:
    words: Sequence[str] = (
        "python -m benchmarks resident",
        f"--pairs {args.pairs}",
        f"--breakdown {args.breakdown}",
        f"--threads {args.threads}",
        f"--dram {args.dram}",
    )
    return " ".join([*words, *(["--flash DIR"] if args.flash else [])])


if __name__ == "__main__":
    from benchmarks.__main__ import main

    sys.exit(main(["resident", *sys.argv[1:]]))
