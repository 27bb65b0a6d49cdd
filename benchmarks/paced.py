"""Variants of the example that take turns step by step, each in a process of its own that keeps its heap.

On a shared machine a slow phase lasts longer than a step. Two runs one after the other may lie in different phases; two
steps one after the other rarely do. So every variant runs one step when it is told to, the others wait meanwhile, and
what counts is the ratio within a round. The order of the variants is turned around from round to round.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.load import OtherLoad

ROOT = Path(__file__).resolve().parent.parent
STEP, END = "step", "end"
DROPPED = 2  # the first step creates the optimizer's state, the second is the first to find it


@dataclass(frozen=True, slots=True)
class Variant:
    """One way of running the example: its arguments, but for `--steps`. `instrumented`: with the clocks of
    `breakdown.py`.
    """

    name: str
    arguments: tuple[str, ...]
    instrumented: bool = False


@dataclass(frozen=True, slots=True)
class Step:
    """What a child says of one step. `cpu_s` is of all its threads, `daemon_cpu_s` of its own children.

    `phases_s`: seconds in the calls that the loop makes, by name. `parts`: exclusive seconds and calls, by the path of
    parts (empty unless the variant is instrumented).
    """

    loss: float
    wall_s: float
    cpu_s: float
    daemon_cpu_s: float
    phases_s: Mapping[str, float]
    parts: Mapping[str, tuple[float, int]]


@dataclass(frozen=True, slots=True)
class PacedRun:
    """One variant's steps, those dropped left out; `losses` are of all. `demands` and `stall_s`: of the whole run."""

    variant: Variant
    steps: tuple[Step, ...]
    losses: tuple[float, ...]
    weights_sha256: str
    threads: int
    demands: int
    stall_s: float
    call_s: float  # what one call of an instrumented function costs more than a plain one; 0.0 where there is none


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and quartiles."""

    median: float
    lower: float
    upper: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of two values or more."""
        lower, median, upper = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, lower, upper)


def turns(variants: int, round_: int) -> list[int]:
    """The order of a round: every second one is turned around, so that nobody is always first."""
    order = list(range(variants))
    return order if round_ % 2 == 0 else order[::-1]


def ratios(run: PacedRun, base: PacedRun, value: Callable[[Step], float]) -> Spread:
    """Of one run's steps over the other's, round by round. Raises ValueError where they have not the same rounds."""
    return Spread.of([value(mine) / value(other) for mine, other in zip(run.steps, base.steps, strict=True)])


def median_of(run: PacedRun, value: Callable[[Step], float]) -> float:
    return statistics.median(map(value, run.steps))


def check_equal(runs: Sequence[PacedRun]) -> None:
    """A faster run that computes something else is not a result. Raises SystemExit naming the two."""
    first = runs[0]
    for run in runs[1:]:
        for step, (mine, other) in enumerate(zip(run.losses, first.losses, strict=True), 1):
            if mine != other:
                raise SystemExit(
                    f"step {step}: loss {mine!r} of {run.variant.name!r}, {other!r} of {first.variant.name!r}"
                )
        if run.weights_sha256 != first.weights_sha256:
            raise SystemExit(f"{run.variant.name!r} ends with other weights than {first.variant.name!r}")
        if run.threads != first.threads:
            raise SystemExit(f"{run.variant.name!r} ran with {run.threads} threads, not {first.threads}")


def paced(variants: Sequence[Variant], rounds: int, dropped: int = DROPPED) -> tuple[list[PacedRun], float]:
    """Run all variants for `dropped` + `rounds` steps, in turns; the runs in the order of `variants`, and how many
    cores other processes kept busy meanwhile. All variants are in memory together.

    Raises SystemExit with a child's last words where one fails, or where not all compute the same (`check_equal`).
    """
    with OtherLoad() as other:
        with contextlib.ExitStack() as stack:
            children = [stack.enter_context(_started(variant, dropped + rounds)) for variant in variants]
            for child in children:
                child.answer()  # that it is ready
            steps: list[list[Step]] = [[] for _ in variants]
            for round_ in range(dropped + rounds):
                _say(f"round {round_ + 1}/{dropped + rounds} of {', '.join(v.name for v in variants)}")
                for turn in turns(len(variants), round_):
                    steps[turn].append(_step(children[turn].ask(STEP)))
            runs = [_run(c.variant, mine, c.ask(END), dropped) for c, mine in zip(children, steps, strict=True)]
    check_equal(runs)
    return runs, other.cores


def _step(answer: Mapping[str, Any]) -> Step:
    parts = {path: (float(seconds), int(calls)) for path, (seconds, calls) in answer["parts"].items()}
    return Step(**{**answer, "parts": parts})


def _run(variant: Variant, steps: Sequence[Step], last: Mapping[str, Any], dropped: int) -> PacedRun:
    return PacedRun(variant, tuple(steps[dropped:]), tuple(step.loss for step in steps), **last)


@dataclass(slots=True)
class _Child:
    variant: Variant
    process: subprocess.Popen[str]
    errors: Path

    def ask(self, command: str) -> dict[str, Any]:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(command + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise self._failure() from None
        return self.answer()

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise self._failure()
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _failure(self) -> SystemExit:
        status = self.process.wait()
        words = self.errors.read_text(encoding="utf-8", errors="replace")[-2000:]
        return SystemExit(f"the child {self.variant.name!r} ended with status {status}:\n{words}")


@contextlib.contextmanager
def _started(variant: Variant, steps: int) -> Iterator[_Child]:
    command = [sys.executable, "-m", "benchmarks.paced_child", *(["--instrumented"] if variant.instrumented else [])]
    command += ["--", *variant.arguments, "--steps", str(steps)]
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        errors = Path(folder) / "stderr"
        with errors.open("w") as stderr:
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True, cwd=ROOT
            )
        with process:
            try:
                yield _Child(variant, process, errors)
            except BaseException:
                _end(process)
                raise
        if process.returncode:
            words = errors.read_text(encoding="utf-8", errors="replace")[-2000:]
            raise SystemExit(
                f"the child {variant.name!r} failed at its end, with status {process.returncode}:\n{words}"
            )


def _end(process: subprocess.Popen[str]) -> None:
    """End a child whose sibling failed, and what it started."""
    with contextlib.suppress(psutil.NoSuchProcess):
        started = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        psutil.wait_procs(started, timeout=10)  # a daemon ends with its owner


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
