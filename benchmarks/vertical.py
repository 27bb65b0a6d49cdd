"""Gradient accumulation with a quarter of the state as DRAM: all microbatches unit by unit (`job.accumulate`), beside
the ordinary order and the plain script, for 1 to 16 microbatches of the 134M model.

The plain script and a variant take turns in bursts of steps (`bursts.py`).
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from benchmarks.bursts import PLAIN, add_burst_arguments, started, take_turns
from benchmarks.disk import digest_rate, measure_rates, parent_of
from benchmarks.load import OtherLoad
from benchmarks.oversubscribed import LEARNED, beaten, bounds_of, command_of, disk_note, medians
from benchmarks.report import Machine, Report, Row
from benchmarks.shapes import SHAPES
from tiermem.units import MIB

TITLE = "gradient accumulation unit by unit: step time and bytes for 1 to 16 microbatches"
TARGET = 0.88
SHOWN = 8  # the microbatches that the figure is of
FIGURE = "unit by unit"
OFFLOADED = ("--options", '{"activations": "offload"}')
ORDERS: dict[str, tuple[str, ...]] = {
    FIGURE: ("--vertical",),
    "ordinary": (),
    "unit by unit, activations offloaded": ("--vertical", *OFFLOADED),
    "ordinary, activations offloaded": OFFLOADED,
}
COLUMNS = ("step_s", "plain_s", "plain", "resource", "stall_s", "read bytes", "written bytes")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", choices=SHAPES, default="134M", help="(default 134M)")
    parser.add_argument("--budget", type=float, default=0.25, help="a fraction of the state (default 0.25)")
    parser.add_argument(
        "--microbatches", type=int, action="append", help="may be repeated; the figure is the last's (default 1 4 8)"
    )
    add_burst_arguments(
        parser, bursts=1, steps=3, time_limit_s=1080, full="1 2 4 8 16 microbatches, two bursts, no time limit"
    )


def run(args: argparse.Namespace) -> Report:
    """Raises SystemExit where a run fails, or computes other losses than the plain one."""
    if args.bursts < 1 or args.steps < 2 or not 0 < args.budget < 1 or any(m < 1 for m in args.microbatches or ()):
        raise SystemExit("give --bursts and --microbatches 1 or more, --steps 2 or more, --budget between 0 and 1")
    machine = Machine.here()
    if args.full:
        args.time_limit, args.bursts = float("inf"), max(2, args.bursts)
    counts = args.microbatches or ([1, 2, 4, 16, SHOWN] if args.full else [1, 4, SHOWN])
    shape, end_s, digests = SHAPES[args.shape], time.monotonic() + args.time_limit, digest_rate()
    parent = parent_of(args.flash)
    dram = f"{int(args.budget * shape.state_bytes) // MIB}MiB"
    rows: list[Row] = []
    figures: dict[int, float] = {}
    with OtherLoad() as other, tempfile.TemporaryDirectory(prefix="benchmark-", dir=parent) as folder:
        disk = measure_rates(Path(folder))
        for microbatches in counts:
            common = ["--shape", shape.name, "--threads", str(args.threads), "--microbatches", str(microbatches)]
            with started(f"{PLAIN}, {microbatches} microbatches", [*common, "--mode", PLAIN]) as plain:
                plain.burst(1, dropped=1)
                for order in list(ORDERS)[: 4 if microbatches == SHOWN else 2 if microbatches > 1 else 1]:
                    row: dict[str, object] = {"microbatches": microbatches, "order": order}
                    if time.monotonic() > end_s:
                        rows.append({**row, **dict.fromkeys(COLUMNS), "note": "not within the time limit"})
                        continue
                    mine = [*common, "--mode", "deferred", "--dram", dram, "--flash", str(Path(folder) / "flash")]
                    mine += ORDERS[order]
                    with started(f"{order}, {microbatches} microbatches", mine) as variant:
                        variant.burst(LEARNED, dropped=LEARNED)
                        over_plain = take_turns(variant, plain, args.bursts, args.steps)
                        recorded = variant.record()
                        variant.end()
                    seen = medians(variant)
                    bounds = bounds_of(medians(plain), recorded, disk, digests)
                    if order == FIGURE:
                        figures[microbatches] = over_plain
                    values = (
                        seen["wall_s"],
                        medians(plain)["wall_s"],
                        over_plain,
                        bounds.resource_s / seen["wall_s"],
                        seen["stall_s"],
                        seen["read_bytes"],
                        seen["written_bytes"],
                    )
                    rows.append({**row, **dict(zip(COLUMNS, values, strict=True)), "note": None})
    if not figures:
        raise SystemExit("nothing was measured within the time limit")
    last = counts[-1] if counts[-1] in figures else max(figures)
    return Report(
        benchmark="vertical",
        what=f"the plain step (all in memory) over the step unit by unit, with {last} microbatches",
        figure=figures[last],
        bound=1.0,
        target=TARGET,
        machine=machine,
        command=_command(args),
        rows=rows,
        notes=(
            disk_note(disk),
            f"{dram} of DRAM, updates deferred; plain, resource: the plain step and the resource bound over the step",
            "unit by unit there are the activations of all microbatches at once, in the script's memory or offloaded",
            "every loss was equal to the plain run's",
            *beaten(rows),
            f"other processes kept {other.cores:.1f} cores busy (the trainers and daemons of the runs are in it)",
        ),
    )


def _command(args: argparse.Namespace) -> str:
    words = [command_of("vertical", argparse.Namespace(**{**vars(args), "shape": None, "budget": None}))]
    words += [f"--shape {args.shape}", f"--budget {args.budget:g}"]
    return " ".join([*words, *(f"--microbatches {m}" for m in args.microbatches or ())])


if __name__ == "__main__":
    import sys

    from benchmarks.__main__ import main

    sys.exit(main(["vertical", *sys.argv[1:]]))
