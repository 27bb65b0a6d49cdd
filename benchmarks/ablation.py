"""What each part of it is worth: ways of updating with eviction of the least recently used on demand, and with eviction
by predicted next use and loads ahead; 134M parameters in float32 with a quarter of their state as DRAM.

The plain script and a variant take turns in bursts of steps (`bursts.py`).
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from benchmarks.bursts import PLAIN, add_burst_arguments, started, take_turns
from benchmarks.disk import parent_of
from benchmarks.load import OtherLoad
from benchmarks.oversubscribed import LEARNED, WARM_UP, command_of, medians
from benchmarks.report import Machine, Report, Row
from benchmarks.shapes import SHAPES
from tiermem.units import MIB

TITLE = "what each way of updating and of placing is worth, alone and together"
WAYS = ("barrier", "deferred", "optimistic", "opted in")
POLICIES = {
    "LRU on demand": {"TIERMEM_PLACEMENT__POLICY": "lru", "TIERMEM_PLACEMENT__LOOKAHEAD": "0"},
    "LRU + lookahead": {"TIERMEM_PLACEMENT__POLICY": "lru", "TIERMEM_PLACEMENT__LOOKAHEAD": "0.5"},
    "Belady + lookahead": {"TIERMEM_PLACEMENT__POLICY": "belady", "TIERMEM_PLACEMENT__LOOKAHEAD": "0.5"},
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", choices=SHAPES, default="134M", help="(default 134M)")
    parser.add_argument("--budget", type=float, default=0.25, help="a fraction of the state (default 0.25)")
    add_burst_arguments(parser, bursts=2, steps=3, time_limit_s=1140, full="three bursts, no time limit")


def run(args: argparse.Namespace) -> Report:
    """Raises SystemExit where a run fails, or computes other losses than the plain one."""
    if args.bursts < 1 or args.steps < 2 or not 0 < args.budget < 1:
        raise SystemExit("give --bursts 1 or more, --steps 2 or more, and --budget between 0 and 1")
    machine = Machine.here()
    if args.full:
        args.time_limit, args.bursts = float("inf"), max(3, args.bursts)
    shape, end_s = SHAPES[args.shape], time.monotonic() + args.time_limit
    parent = parent_of(args.flash)
    common = ["--shape", shape.name, "--threads", str(args.threads)]
    dram = f"{int(args.budget * shape.state_bytes) // MIB}MiB"
    rows: list[Row] = []
    ratios: list[float] = []
    with OtherLoad() as other, tempfile.TemporaryDirectory(prefix="benchmark-", dir=parent) as folder:
        with started(PLAIN, [*common, "--mode", PLAIN]) as plain:
            plain.burst(2, dropped=2)
            for way in WAYS:
                for policy, environment in POLICIES.items():
                    row: dict[str, object] = {"way": way, "policy": policy}
                    if time.monotonic() > end_s:
                        columns = ("plain", "step_s", "stall_s", "read bytes", "written bytes")
                        rows.append({**row, **dict.fromkeys(columns), "note": "not within the time limit"})
                        continue
                    mine = [*common, "--mode", way, "--dram", dram, "--flash", str(Path(folder) / "flash")]
                    with started(f"{way}, {policy}", mine, environment) as variant:
                        warm_up = WARM_UP.get(way, LEARNED)
                        variant.burst(warm_up, dropped=warm_up)
                        ratios.append(take_turns(variant, plain, args.bursts, args.steps))
                        variant.end()
                    seen = medians(variant)
                    row |= {"plain": ratios[-1], "step_s": seen["wall_s"], "stall_s": seen["stall_s"]}
                    row |= {"read bytes": seen["read_bytes"], "written bytes": seen["written_bytes"], "note": None}
                    rows.append(row)
    return Report(
        benchmark="ablation",
        what="speed of the fastest over the first row's (update inside step(), LRU on demand)",
        figure=max(ratios) / ratios[0],
        bound=1.0 / ratios[0],
        target=None,
        machine=machine,
        command=_command(args),
        rows=rows,
        notes=(
            f"{dram} of DRAM; plain: the plain step over the step, in the same turns",
            "bound: as fast as the plain script, which has all in memory",
            "optimistic keeps to updates inside backward only where it has measured that steps become shorter by them",
            "every loss was equal to the plain run's",
            f"other processes kept {other.cores:.1f} cores busy (the trainers and daemons of the runs are in it)",
        ),
    )


def _command(args: argparse.Namespace) -> str:
    shape, budget = args.shape, args.budget
    args = argparse.Namespace(**{**vars(args), "shape": None, "budget": None})
    return f"{command_of('ablation', args)} --shape {shape} --budget {budget:g}"


if __name__ == "__main__":
    import sys

    from benchmarks.__main__ import main

    sys.exit(main(["ablation", *sys.argv[1:]]))
