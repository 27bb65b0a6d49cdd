"""Step time of examples/finetune_smollm2.py: plain, with everything in DRAM, and with a fraction of it.

Every run is a process of its own; the variants take turns, so that a machine that is slower for a while is slower for
all of them. The first step of a run is dropped: it creates the optimizer's state. What a step moves and waits for is
the difference between a whole run and a run of one step, so that attaching is not counted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.disk import Bandwidth, measure_bandwidth, parent_of
from benchmarks.load import OtherLoad
from benchmarks.report import Machine, Report, Row
from tiermem.stats import Link
from tiermem.units import format_size

TITLE = "step time of the example: plain, all in DRAM, and a fraction of it in DRAM"
SCRIPT = Path(__file__).resolve().parent.parent / "examples" / "finetune_smollm2.py"
PLAIN = "plain"
BUSY_CORES = 0.2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=2, help="runs of each variant (default 2)")
    parser.add_argument("--steps", type=int, default=4, help="steps of a run, the first not counted (default 4)")
    parser.add_argument(
        "--dram", action="append", help="a variant; may be repeated (default 3GiB and 512MiB; the figure is the last's)"
    )
    parser.add_argument(
        "--threads", type=int, action="append", help="torch's threads; may be repeated (default: torch's own choice)"
    )
    parser.add_argument("--flash", type=Path, metavar="DIR", help="on the disk to use (default: as tiermem chooses)")


@dataclass(slots=True)
class Variant:
    """One way of running the example, and what its runs gave. `startup` is the run of one step (None for plain)."""

    name: str
    threads: int | None
    startup: dict[str, Any] | None = None
    runs: list[dict[str, Any]] = field(default_factory=list)
    other_cores: list[float] = field(default_factory=list)  # busy with other things, for each of `runs`

    @property
    def step_s(self) -> float:
        """Median over all steps but each run's first."""
        steps_s: list[float] = [seconds for run in self.runs for seconds in run["step_s"][1:]]
        return statistics.median(steps_s)

    def per_step(self, total: str, link: Link | None = None) -> float:
        """Mean over the runs of what a step adds to a total of the result (`links`: of one link)."""
        if self.startup is None:
            return 0.0

        def value(result: dict[str, Any]) -> float:
            return float(result[total] if link is None else result[total][link])

        steps = len(self.runs[0]["step_s"]) - 1
        return (statistics.mean(map(value, self.runs)) - value(self.startup)) / steps


def run(args: argparse.Namespace) -> Report:
    """Raises SystemExit where a run fails or computes something else than the plain run."""
    if args.steps < 2 or args.rounds < 1:
        raise SystemExit("give --steps 2 or more (the first is dropped) and --rounds 1 or more")
    machine = Machine.here()
    parent = parent_of(args.flash)
    with tempfile.TemporaryDirectory(prefix="benchmark-", dir=parent) as folder:
        disk = measure_bandwidth(Path(folder))
        variants = _measure(args, Path(folder))
    _check_equal(variants)
    rows, bounds_s = [], []
    for variant in variants:
        plain = next(v for v in variants if v.name == PLAIN and v.threads == variant.threads)
        bounds_s.append(_bound_s(variant, plain, disk))
        rows.append(_row(variant, plain, bounds_s[-1]))
    figure = next(i for i, v in enumerate(variants) if v.name == _drams(args)[-1])
    plain_s = next(v for v in variants if v.name == PLAIN and v.threads == variants[figure].threads).step_s
    return Report(
        benchmark="example",
        what=f"median step time with {variants[figure].name} of DRAM over that of the plain script",
        figure=variants[figure].step_s / plain_s,
        bound=bounds_s[figure] / plain_s,
        target=None,
        machine=machine,
        command=_command(args),
        rows=rows,
        notes=(
            f"the disk alone reads {format_size(round(disk.read))}/s and writes {format_size(round(disk.write))}/s",
            "bound: the plain step, or a link's bytes over its bandwidth alone, whichever is longer; that reads and "
            "writes share one disk, and hashing and I/O the CPU, is left out",
            "every loss and the sha256 of all weights were equal in all runs of the same thread count",
            *_warnings(variants),
        ),
    )


def _warnings(variants: Sequence[Variant]) -> list[str]:
    worst = max(cores for variant in variants for cores in variant.other_cores)
    if worst < BUSY_CORES:
        return []
    return [
        f"NOT A QUIET MACHINE: other processes kept up to {worst:.1f} cores busy; threads that wait for each other "
        "then become several times slower, with tiermem and without: measure again"
    ]


def _drams(args: argparse.Namespace) -> list[str]:
    return list(args.dram or ["3GiB", "512MiB"])


def _measure(args: argparse.Namespace, folder: Path) -> list[Variant]:
    variants = [Variant(name, threads) for threads in args.threads or [None] for name in (PLAIN, *_drams(args))]
    for variant in variants:
        if variant.name != PLAIN:
            variant.startup = _run_example(variant, 1, folder)
    for _ in range(args.rounds):
        for variant in variants:
            with OtherLoad() as other:
                variant.runs.append(_run_example(variant, args.steps, folder))
            variant.other_cores.append(other.cores)
    return variants


def _run_example(variant: Variant, steps: int, folder: Path) -> dict[str, Any]:
    result = folder / "result.json"
    command = [sys.executable, str(SCRIPT), "--steps", str(steps), "--json", str(result)]
    command += ["--plain"] if variant.name == PLAIN else ["--dram", variant.name, "--flash", str(folder / "flash")]
    command += [] if variant.threads is None else ["--threads", str(variant.threads)]
    threads = "torch's choice of" if variant.threads is None else variant.threads
    print(f"{variant.name}, {threads} threads, {steps} steps ...", file=sys.stderr, flush=True)
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{SCRIPT.name} ({variant.name}) failed with status {done.returncode}:\n{done.stderr[-2000:]}")
    loaded: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    return loaded


def _check_equal(variants: Sequence[Variant]) -> None:
    """A faster run that computes something else is not a result."""
    for threads in {variant.threads for variant in variants}:
        same = [variant for variant in variants if variant.threads == threads]
        first = same[0].runs[0]
        for variant in same:
            for result in variant.runs:
                if (result["losses"], result["weights_sha256"]) != (first["losses"], first["weights_sha256"]):
                    raise SystemExit(f"{variant.name} computed other losses or weights than {same[0].name}")


def _bound_s(variant: Variant, plain: Variant, disk: Bandwidth) -> float:
    read_s = variant.per_step("links", Link.FLASH_TO_DRAM) / disk.read
    write_s = variant.per_step("links", Link.DRAM_TO_FLASH) / disk.write
    return max(plain.step_s, read_s, write_s)


def _row(variant: Variant, plain: Variant, bound_s: float) -> Row:
    attached = variant.name != PLAIN
    return {
        "variant": variant.name,
        "threads": variant.runs[0]["config"]["threads"],
        "step_s": variant.step_s,
        "over plain": variant.step_s / plain.step_s,
        "bound_s": bound_s,
        "over bound": variant.step_s / bound_s,
        "read bytes": variant.per_step("links", Link.FLASH_TO_DRAM) if attached else None,
        "written bytes": variant.per_step("links", Link.DRAM_TO_FLASH) if attached else None,
        "hits": round(variant.per_step("hits")) if attached else None,
        "misses": round(variant.per_step("misses")) if attached else None,
        "stall share": variant.per_step("stall_s") / variant.step_s if attached else None,
        "other cores": max(variant.other_cores),
    }


def _command(args: argparse.Namespace) -> str:
    words = ["python -m benchmarks example", f"--rounds {args.rounds}", f"--steps {args.steps}"]
    words += [f"--dram {dram}" for dram in args.dram or ()]
    words += [f"--threads {threads}" for threads in args.threads or ()]
    return " ".join([*words, *(["--flash DIR"] if args.flash else [])])


if __name__ == "__main__":
    from benchmarks.__main__ import main

    sys.exit(main(["example", *sys.argv[1:]]))
