"""What placement and lookahead are worth: the example at fractions of its state, with eviction of the least recently
used on demand, the same with loads ahead of predicted uses, and eviction by predicted next use (Belady) with loads
ahead.

Every run is a process and a daemon of its own. The first steps, in which the order of accesses is learned, are dropped.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.disk import parent_of
from benchmarks.load import OtherLoad
from benchmarks.paced import ROOT
from benchmarks.report import Machine, Report, Row
from tiermem.units import MIB, format_size

TITLE = "bytes, reuse and stalls of LRU, LRU with lookahead, and Belady at fractions of the state"
TARGET = 1.0
LEARNED = 3  # steps after which every access has been seen twice
START_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Variant:
    """Options of the daemon."""

    name: str
    policy: str
    lookahead: float


LRU = Variant("LRU", "lru", 0.0)
BELADY = Variant("Belady + lookahead", "belady", 0.5)
VARIANTS = (LRU, Variant("LRU + lookahead", "lru", 0.5), BELADY)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=3, help=f"steps that count, after {LEARNED} others (default 3)")
    parser.add_argument(
        "--budget", type=float, action="append", help="a fraction of the state; may be repeated (default .25 .5 .75)"
    )
    parser.add_argument("--threads", type=int, default=1, help="torch's threads (default 1)")
    parser.add_argument("--flash", type=Path, metavar="DIR", help="on the disk to use (default: as tiermem chooses)")
    parser.add_argument(
        "--time-limit",
        type=float,
        default=1080.0,
        metavar="S",
        help="what has not ended by then is a row (default 1080)",
    )


def run(args: argparse.Namespace) -> Report:
    """Raises SystemExit where a run fails, or computes other losses than the others."""
    if args.steps < 1 or args.threads < 1 or any(not 0 < budget < 1 for budget in args.budget or ()):
        raise SystemExit("give --steps 1 or more, --threads 1 or more, and --budget between 0 and 1")
    machine, budgets = Machine.here(), args.budget or [0.25, 0.5, 0.75]
    parent = parent_of(args.flash)
    deadline_s = time.monotonic() + args.time_limit
    rows: list[Row] = []
    ratios, losses = [], None
    with OtherLoad() as other:
        state_bytes = _state_bytes(args, parent)
        for budget in budgets:
            bytes_of: dict[str, float] = {}
            for variant in VARIANTS:
                result = _run(args, variant, int(budget * state_bytes), args.steps, parent, deadline_s)
                rows.append(_row(budget, variant, result))
                if result is None:
                    continue
                losses = losses or result["losses"]
                if result["losses"] != losses:
                    raise SystemExit(f"{variant.name} at {budget:.0%} computed other losses than the run before it")
                bytes_of[variant.name] = _moved(result)
            if LRU.name in bytes_of and BELADY.name in bytes_of:
                ratios.append(bytes_of[LRU.name] / bytes_of[BELADY.name])
    if not ratios:
        raise SystemExit("no budget was measured with both policies within the time limit")
    return Report(
        benchmark="placement",
        what="least of bytes moved with LRU over bytes moved with Belady, over the budgets",
        figure=min(ratios),
        bound=1.0,
        target=TARGET,
        machine=machine,
        command=_command(args),
        rows=rows,
        notes=(
            f"the state is {format_size(state_bytes)}; a budget is that fraction of it as DRAM",
            "reuse: the share of acquisitions whose bytes were not loaded for them; asked: those that asked the daemon",
            "bound: Belady's order is the best for bundles of one size, so LRU moves no less",
            "every loss was equal in all runs",
            f"other processes kept {other.cores:.1f} cores busy (the daemons and trainers of the runs are not in it)",
        ),
    )


def _state_bytes(args: argparse.Namespace, parent: Path) -> int:
    """Found out by a run of one step."""
    result = _run(args, LRU, 1 << 30, 1, parent, time.monotonic() + args.time_limit, learned=0)
    if result is None:
        raise SystemExit("one step with 1 GiB of DRAM did not end within the time limit")
    return int(result["state_bytes"])


def _run(
    args: argparse.Namespace,
    variant: Variant,
    dram_bytes: int,
    steps: int,
    parent: Path,
    deadline_s: float,
    learned: int = LEARNED,
) -> dict[str, Any] | None:
    """None where it did not end in time."""
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        return None
    print(f"{variant.name}, {format_size(dram_bytes)} ...", file=sys.stderr, flush=True)
    dram = f"{dram_bytes // MIB}MiB"
    with (
        tempfile.TemporaryDirectory(prefix="benchmark-", dir=parent) as folder,
        _daemon(variant, dram, folder) as socket,
    ):
        result = Path(folder) / "result.json"
        command = [sys.executable, "-m", "benchmarks.step_counts", str(result), "--"]
        command += ["--dram", dram, "--threads", str(args.threads), "--steps", str(learned + steps)]
        environment = {**os.environ, "TIERMEM_ENDPOINT": socket}
        try:
            done = subprocess.run(
                command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=left_s
            )
        except subprocess.TimeoutExpired:
            return None
        if done.returncode:
            raise SystemExit(f"{variant.name} at {dram} failed with status {done.returncode}:\n{done.stderr[-2000:]}")
        loaded: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
        return loaded


@contextlib.contextmanager
def _daemon(variant: Variant, dram: str, folder: str) -> Iterator[str]:
    """A service with the variant's options; gives its socket. Raises SystemExit with its last words."""
    socket = Path(folder) / "tiermemd.sock"
    environment = {key: value for key, value in os.environ.items() if not key.startswith("TIERMEM_")}
    environment |= {"TIERMEM_PLACEMENT__POLICY": variant.policy}
    environment |= {"TIERMEM_PLACEMENT__LOOKAHEAD": str(variant.lookahead)}
    command = [sys.executable, "-m", "tiermem_daemon", "serve", "--socket", str(socket), "--dram", dram]
    command += ["--flash", f"{folder}/flash"]
    log = Path(folder) / "tiermemd.log"
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
    try:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not socket.exists():
            if process.poll() is not None or time.monotonic() > deadline_s:
                raise SystemExit(f"the daemon did not start:\n{log.read_text(errors='replace')[-2000:]}")
            time.sleep(0.05)
        yield str(socket)
    finally:
        process.terminate()
        process.wait()


def _per_step(result: dict[str, Any], name: str) -> float:
    """Mean over the steps that count."""
    seen = [each[name] for each in result["counters"]]
    return float(seen[-1] - seen[LEARNED]) / (len(seen) - 1 - LEARNED)


def _moved(result: dict[str, Any]) -> float:
    return _per_step(result, "read_bytes") + _per_step(result, "written_bytes")


def _row(budget: float, variant: Variant, result: dict[str, Any] | None) -> Row:
    if result is None:
        names = ("step_s", "read bytes", "written bytes", "reuse", "asked", "stall_s")
        return {"budget": budget, "variant": variant.name, **dict.fromkeys(names), "note": "not within the time limit"}
    return {
        "budget": budget,
        "variant": variant.name,
        "step_s": statistics.median(result["step_s"][LEARNED:]),
        "read bytes": _per_step(result, "read_bytes"),
        "written bytes": _per_step(result, "written_bytes"),
        "reuse": 1 - _per_step(result, "loads") / _per_step(result, "acquired"),
        "asked": _per_step(result, "demands") / _per_step(result, "acquired"),
        "stall_s": _per_step(result, "stall_s"),
        "note": None,
    }


def _command(args: argparse.Namespace) -> str:
    words = [f"python -m benchmarks placement --steps {args.steps} --threads {args.threads}"]
    words += [f"--budget {budget:g}" for budget in args.budget or ()]
    return " ".join([*words, *(["--flash DIR"] if args.flash else [])])


if __name__ == "__main__":
    from benchmarks.__main__ import main

    sys.exit(main(["placement", *sys.argv[1:]]))
