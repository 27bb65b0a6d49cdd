"""Variants that take turns in bursts of steps, each in a process of its own that keeps its heap.

Where bytes move beside the computation, turns of one step would let a variant write back and load ahead for nothing
while another one computes. So each runs a burst of several steps, the first of which does not count (what was done
while others ran is used up in it), and then its disk rests: it is stopped between its bursts, daemon and all.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.paced import ROOT
from tiermem.planner.recorded import Traffic

PLAIN = "plain"
CHILD = "benchmarks.burst_child"


def add_burst_arguments(
    parser: argparse.ArgumentParser, bursts: int, steps: int, time_limit_s: float, full: str
) -> None:
    """Options of every benchmark that takes turns in bursts. `full`: what `--full` does."""
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--bursts", type=int, default=bursts, help=f"of each variant (default {bursts})")
    parser.add_argument(
        "--steps", type=int, default=steps, help=f"steps of a burst, the first not counted (default {steps})"
    )
    parser.add_argument("--threads", type=int, default=cores, help="torch's (default: as many as cores)")
    parser.add_argument("--flash", type=Path, metavar="DIR", help="on the disk to use (default: as tiermem chooses)")
    parser.add_argument(
        "--time-limit",
        type=float,
        default=time_limit_s,
        metavar="S",
        help=f"what has not begun by then is a row (default {time_limit_s:g})",
    )
    parser.add_argument("--full", action="store_true", help=full)


@dataclass(frozen=True, slots=True)
class Recorded:
    """Of a step of a variant, by part: the least that it moves, and the bytes that updates write."""

    least: dict[str, Traffic]
    updated: dict[str, float]

    @property
    def whole(self) -> Traffic:
        parts = self.least.values()
        return Traffic(sum(t.read_bytes for t in parts), sum(t.written_bytes for t in parts))


@dataclass(slots=True)
class Burster:
    """One variant's process. `steps` are those that count, `losses` those of all."""

    name: str
    process: subprocess.Popen[str]
    errors: Path
    steps: list[dict[str, float]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    bursts: list[float] = field(default_factory=list)  # median seconds of a step, a burst each

    def burst(self, steps: int, dropped: int = 1) -> None:
        """Run steps, of which the first `dropped` do not count."""
        print(f"{self.name}: {steps} steps", file=sys.stderr, flush=True)
        taken = self.ask({"do": "steps", "number": steps})
        self.losses += [step["loss"] for step in taken]
        self.steps += taken[dropped:]
        if taken[dropped:]:
            self.bursts.append(statistics.median(step["wall_s"] for step in taken[dropped:]))

    def record(self) -> Recorded:
        """A few steps more, recorded."""
        answer = self.ask({"do": "record"})
        return Recorded({label: Traffic(*moved) for label, moved in answer["least"].items()}, answer["updated"])

    def end(self) -> None:
        self.ask({"do": "end"})

    def ask(self, command: dict[str, Any]) -> Any:
        """Let it go on for one command. Raises SystemExit with its last words where it fails."""
        self._signal(signal.SIGCONT)
        assert self.process.stdin is not None and self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(command) + "\n")
            self.process.stdin.flush()
        answer = self.answer()
        if command["do"] != "end":
            self._signal(signal.SIGSTOP)
        return answer

    def answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            status = self.process.wait()
            words = self.errors.read_text(encoding="utf-8", errors="replace")[-2000:]
            raise SystemExit(f"{self.name!r} failed with status {status}:\n{words}")
        return json.loads(line)

    def _signal(self, number: int) -> None:
        """To the process and what it started; the daemon stops last and goes on first."""
        with contextlib.suppress(psutil.NoSuchProcess):
            me = psutil.Process(self.process.pid)
            family = [me, *me.children(recursive=True)]
            for each in family if number == signal.SIGSTOP else reversed(family):
                each.send_signal(number)

    def median(self, name: str) -> float:
        """Of a value over the steps that count."""
        return statistics.median(step[name] for step in self.steps)

    def mean(self, name: str) -> float:
        return statistics.mean(step[name] for step in self.steps)


@contextlib.contextmanager
def started(
    name: str, arguments: Sequence[str], environment: Mapping[str, str] | None = None, module: str = CHILD
) -> Iterator[Burster]:
    """The process, ready and stopped; `environment` is added to this one's. It is gone afterwards, with what it
    started.
    """
    with tempfile.TemporaryDirectory() as folder:
        errors = Path(folder) / "stderr"
        with errors.open("w") as stderr:
            process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                cwd=ROOT,
                env={**os.environ, **(environment or {})},
            )
        burster = Burster(name, process, errors)
        try:
            burster.answer()
            burster._signal(signal.SIGSTOP)
            yield burster
        finally:
            _end(process)


def _end(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        family = psutil.Process(process.pid).children(recursive=True)
        for each in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.send_signal(signal.SIGCONT)
        process.kill()
        psutil.wait_procs(family, timeout=10)  # a daemon ends with its owner
    process.communicate()


def take_turns(variant: Burster, base: Burster, bursts: int, steps: int) -> float:
    """Let both run so many bursts of so many steps, in turns; the median over the bursts of the base's step time over
    the variant's. Raises SystemExit where their losses differ.
    """
    mine, others = len(variant.bursts), len(base.bursts)
    for turn in range(bursts):
        for each in (base, variant) if turn % 2 == 0 else (variant, base):
            each.burst(steps)
    check_losses(variant, base)
    return statistics.median(b / v for v, b in zip(variant.bursts[mine:], base.bursts[others:], strict=True))


def check_losses(variant: Burster, base: Burster) -> None:
    """A faster run that computes something else is not a result. As many losses as both have are compared."""
    for step, (mine, other) in enumerate(zip(variant.losses, base.losses, strict=False), 1):
        if mine != other:
            raise SystemExit(f"step {step}: loss {mine!r} of {variant.name!r}, {other!r} of {base.name!r}")
