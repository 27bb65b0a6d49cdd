"""How near a step that does not fit into DRAM comes to what the hardware allows, and to the plain step: models of 134M
and 374M parameters in float32, with a half and a quarter of their state as DRAM, and each way of updating.

The plain script and a variant take turns in bursts of steps (`bursts.py`). What a step moves at least comes from the
accesses that the variant really made (`recording.py`, `tiermem.planner`), what the hardware allows from the disk and
from the plain steps of the same run.
"""

from __future__ import annotations

import argparse
import os
import shlex
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.bursts import PLAIN, Burster, Recorded, add_burst_arguments, started, take_turns
from benchmarks.disk import digest_rate, measure_rates, parent_of
from benchmarks.load import OtherLoad
from benchmarks.report import Machine, Report, Row
from benchmarks.shapes import SHAPES, Shape
from tiermem.planner.bounds import DiskRates, PhaseWork, phase_bound_s, resource_bound_s
from tiermem.planner.recorded import Traffic, compute_by_phase
from tiermem.units import MIB, format_size

TITLE = "step time and bytes of models that do not fit into DRAM, beside what the hardware allows"
TARGET = 0.90
WAYS = ("deferred", "optimistic", "opted in", "barrier")
WARM_UP = {"optimistic": 11}  # steps until it is known whether updates inside backward pay
LEARNED = 4  # steps until accesses are learned


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", action="append", choices=SHAPES, help="may be repeated (default 134M and 374M)")
    parser.add_argument(
        "--budget", type=float, action="append", help="a fraction of the state; may be repeated (default .5 .25)"
    )
    parser.add_argument("--way", action="append", choices=WAYS, help="may be repeated (default: all)")
    add_burst_arguments(
        parser, bursts=2, steps=3, time_limit_s=1140, full="an eighth of the state too, three bursts, no time limit"
    )


@dataclass(frozen=True, slots=True)
class Case:
    """One variant."""

    shape: Shape
    budget: float
    way: str

    @property
    def name(self) -> str:
        return f"{self.shape.name} {self.way} at {self.budget:g}"

    @property
    def dram_mib(self) -> int:
        return int(self.budget * self.shape.state_bytes) // MIB


@dataclass(frozen=True, slots=True)
class Bounds:
    """Seconds of a step, and what it moves at least."""

    resource_s: float
    phase_s: float
    least: Traffic


def run(args: argparse.Namespace) -> Report:
    """Raises SystemExit where a run fails, or computes other losses than the plain one."""
    if args.bursts < 1 or args.steps < 2 or any(not 0 < budget < 1 for budget in args.budget or ()):
        raise SystemExit("give --bursts 1 or more, --steps 2 or more, and --budget between 0 and 1")
    machine = Machine.here()
    if args.full:
        args.time_limit, args.bursts = float("inf"), max(3, args.bursts)
    parent = parent_of(args.flash)
    end_s = time.monotonic() + args.time_limit
    measured: list[Measured] = []
    with OtherLoad() as other, tempfile.TemporaryDirectory(prefix="benchmark-", dir=parent) as folder:
        disk = measure_rates(Path(folder))
        for shape in args.shape or ("134M", "374M"):
            measured += _measure(args, SHAPES[shape], Path(folder), end_s)
        disk = disk.best_of(measure_rates(Path(folder)))
    digests = digest_rate()
    rows = [_row(each, disk, digests) for each in measured]
    worst = [float(str(row["phase"])) for row in rows if row["note"] is None]
    if not worst:
        raise SystemExit("nothing was measured within the time limit")
    return Report(
        benchmark="oversubscribed",
        what="the worst of phase bound over step time",
        figure=min(worst),
        bound=1.0,
        target=TARGET,
        machine=machine,
        command=command_of("oversubscribed", args),
        rows=rows,
        notes=(
            disk_note(disk),
            "computing alone is the plain run's step in the same turns and the digests, shared by all cores; that "
            "system calls take CPU time too, and a thread that is late holds up the others, is left out: cpu_s is the "
            "CPU time of trainer and daemon over the cores, and no step is shorter than that",
            "plain, phase, resource: the plain step, the phase bound and the resource bound over the step",
            "least: Belady's order over the accesses that the variant made, in all of its DRAM",
            "every loss was equal to the plain run's",
            *beaten(rows),
            f"other processes kept {other.cores:.1f} cores busy (the trainers and daemons of the runs are in it)",
        ),
    )


def _cases(args: argparse.Namespace, shape: Shape) -> Iterator[Case]:
    for budget in args.budget or ((0.5, 0.25, 0.125) if args.full else (0.5, 0.25)):
        for way in args.way or WAYS:
            yield Case(shape, budget, way)


@dataclass(frozen=True, slots=True)
class Measured:
    """What a variant's steps were (medians), beside the plain ones of the same turns; None where there was no time."""

    case: Case
    over_plain: float = 0.0
    plain: Mapping[str, float] | None = None
    variant: Mapping[str, float] | None = None
    recorded: Recorded | None = None


def _measure(args: argparse.Namespace, shape: Shape, folder: Path, end_s: float) -> Iterator[Measured]:
    common = ["--shape", shape.name, "--threads", str(args.threads)]
    with started(f"{shape.name} {PLAIN}", [*common, "--mode", PLAIN]) as plain:
        plain.burst(2, dropped=2)
        for case in _cases(args, shape):
            if time.monotonic() > end_s:
                yield Measured(case)
                continue
            mine = [*common, "--mode", case.way, "--dram", f"{case.dram_mib}MiB", "--flash", str(folder / "flash")]
            with started(case.name, mine) as variant:
                warm_up = WARM_UP.get(case.way, LEARNED)
                variant.burst(warm_up, dropped=warm_up)
                over_plain = take_turns(variant, plain, args.bursts, args.steps)
                recorded = variant.record()
                variant.end()
            yield Measured(case, over_plain, medians(plain), medians(variant), recorded)


def medians(burster: Burster) -> dict[str, float]:
    """Of everything over the steps that count; bytes are means."""
    names = burster.steps[0]
    return {name: burster.mean(name) if name.endswith("_bytes") else burster.median(name) for name in names}


def bounds_of(plain: Mapping[str, float], recorded: Recorded, disk: DiskRates, digests: float) -> Bounds:
    """From the plain run's phases and what was recorded of the variant. Digests are computing, shared by all cores."""
    cores, phases = len(os.sched_getaffinity(0)), []
    for label, seconds in compute_by_phase(
        plain["forward_s"], plain["backward_s"], plain["update_s"], recorded.updated
    ):
        least = recorded.least.get(label, Traffic())
        hashing_s = (least.read_bytes + least.written_bytes) / digests / cores
        phases.append(PhaseWork(label, seconds + hashing_s, least.read_bytes, least.written_bytes))
    return Bounds(resource_bound_s(phases, disk), phase_bound_s(phases, disk), recorded.whole)


def _row(measured: Measured, disk: DiskRates, digests: float) -> Row:
    case, plain, variant, recorded = measured.case, measured.plain, measured.variant, measured.recorded
    row: dict[str, object] = dict.fromkeys(("step_s", "plain_s", "plain", "phase", "resource", "cpu_s", "stall_s"))
    row |= dict.fromkeys(("read bytes", "written bytes", "least bytes", "over least"))
    row |= {"early": None, "note": "not within the time limit"}
    if plain is not None and variant is not None and recorded is not None:
        bounds = bounds_of(plain, recorded, disk, digests)
        step_s, moved = variant["wall_s"], variant["read_bytes"] + variant["written_bytes"]
        least = bounds.least.read_bytes + bounds.least.written_bytes
        row = {
            "step_s": step_s,
            "plain_s": plain["wall_s"],
            "plain": measured.over_plain,
            "phase": bounds.phase_s / step_s,
            "resource": bounds.resource_s / step_s,
            "cpu_s": variant["cpu_s"] / len(os.sched_getaffinity(0)),
            "stall_s": variant["stall_s"],
            "read bytes": variant["read_bytes"],
            "written bytes": variant["written_bytes"],
            "least bytes": least,
            "over least": moved / least if least else None,
            "early": round(variant["early"]),
            "note": None,
        }
    return {"shape": case.shape.name, "budget": case.budget, "way": case.way, **row}


def beaten(rows: Iterable[Row]) -> list[str]:
    """A note where a step was shorter than its resource bound."""
    most = max((float(str(row["resource"])) for row in rows if row["resource"] is not None), default=0.0)
    if most <= 1:
        return []
    return [
        f"NOT A BOUND: a step was {most:.2f} times as fast as its resource bound, so the disk did better than when it "
        "was measured alone, and phase and resource flatter by as much at least"
    ]


def disk_note(disk: DiskRates) -> str:
    read, write, both = (format_size(round(rate)) for rate in (disk.read, disk.write, disk.both))
    return f"the disk with digests: reads {read}/s, writes {write}/s, both at once {both}/s each"


def command_of(name: str, args: argparse.Namespace) -> str:
    """What was asked for, without directories."""
    words = [f"python -m benchmarks {name}"]
    for option in ("shape", "budget", "way"):
        words += [f"--{option} {shlex.quote(str(value))}" for value in getattr(args, option, None) or ()]
    words += [f"--bursts {args.bursts}", f"--steps {args.steps}", f"--threads {args.threads}"]
    return " ".join([*words, *(["--full"] if args.full else []), *(["--flash DIR"] if args.flash else [])])


if __name__ == "__main__":
    import sys

    from benchmarks.__main__ import main

    sys.exit(main(["oversubscribed", *sys.argv[1:]]))
