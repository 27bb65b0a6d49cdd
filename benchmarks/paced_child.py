"""The process of one variant (`paced.py`): the example's own model, batches and loop, one step at a time on command.

    python -m benchmarks.paced_child [--instrumented] -- EXAMPLE-ARGUMENTS

Commands are lines of stdin, answers JSON lines of stdout; everything else that is printed goes to stderr. The first
answer says that it is ready, one `step` is answered after each step, and `end` after the last one.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import IO, Any

import psutil

from benchmarks.breakdown import Parts, call_cost_s, instrument
from benchmarks.example import SCRIPT
from benchmarks.paced import END, STEP, Step


def load_example() -> Any:
    """The example script as a module."""
    spec = importlib.util.spec_from_file_location(SCRIPT.stem, SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@dataclass(slots=True)
class _Optimizer:
    """The two calls that the loop makes, timed."""

    step: Callable[[], Any]
    zero_grad: Callable[[], Any]


@dataclass(slots=True)
class _Pace:
    """Waits for commands between steps, and answers with what the step before took."""

    answers: IO[str]
    steps: int
    phases: Parts
    parts: Parts
    _cpu_s: float = 0.0
    _daemon_cpu_s: float = 0.0

    def ready(self) -> None:
        self._answer({})
        self._await(STEP)

    def after_step(self, step: int, loss: float, seconds: float) -> None:
        cpu_s, daemon_cpu_s = time.process_time(), _children_cpu_s()
        phases_s = {name: seconds for name, (seconds, _) in self.phases.taken().items()}
        done = Step(loss, seconds, cpu_s - self._cpu_s, daemon_cpu_s - self._daemon_cpu_s, phases_s, self.parts.taken())
        self._answer(asdict(done))
        self._await(STEP if step + 1 < self.steps else END)

    def end(self, result: dict[str, Any]) -> None:
        self._answer(result)

    def _await(self, command: str) -> None:
        line = sys.stdin.readline().strip()
        if line != command:
            raise SystemExit(f"got the command {line!r}, expected {command!r}")
        self.phases.taken(), self.parts.taken()
        self._cpu_s, self._daemon_cpu_s = time.process_time(), _children_cpu_s()

    def _answer(self, answer: object) -> None:
        self.answers.write(json.dumps(answer) + "\n")
        self.answers.flush()


def _children_cpu_s() -> float:
    times = [child.cpu_times() for child in psutil.Process().children(recursive=True)]
    return float(sum(each.user + each.system for each in times))


def run(example: Any, instrumented: bool, answers: IO[str]) -> None:
    """As the example's own `run`, but for the pace."""
    import torch

    args = example.parse_arguments()
    if args.threads:
        torch.set_num_threads(args.threads)
    tokenizer, model = example.load(args.dtype)
    tokens = torch.tensor(tokenizer("\n".join(example.pydoc_data.topics.topics.values()))["input_ids"])
    torch.manual_seed(args.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
    phases, parts = Parts(), Parts()
    if instrumented:
        instrument(parts)
    job = None
    if not args.plain:
        import tiermem

        job = tiermem.attach(model, optimizer, dram=args.dram, flash=args.flash)
    pace = _Pace(answers, args.steps, phases, parts)
    forward = phases.timed("forward", model)
    timed = _Optimizer(phases.timed("optimizer", optimizer.step), phases.timed("zero_grad", optimizer.zero_grad))
    pace.ready()
    example.train(forward, timed, example.shuffled(tokens, args), args, pace.after_step)
    traffic = example.traffic(job)
    pace.end(
        {
            "weights_sha256": example.hash_of_weights(model),
            "threads": torch.get_num_threads(),
            "demands": traffic["hits"] + traffic["misses"],
            "stall_s": traffic["stall_s"],
            "call_s": call_cost_s() if instrumented else 0.0,
        }
    )
    if job is not None:
        job.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instrumented", action="store_true")
    parser.add_argument("example_arguments", nargs="*", metavar="EXAMPLE-ARGUMENTS")
    mine = parser.parse_args()
    sys.argv = [str(SCRIPT), *mine.example_arguments]
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        os.dup2(2, 1)  # what libraries print must not be taken for an answer
        run(load_example(), mine.instrumented, answers)
    return 0


if __name__ == "__main__":
    sys.exit(main())
