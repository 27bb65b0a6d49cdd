"""The process of one variant (`bursts.py`): a plain loop over a shape's model, some steps in a row on command.

    python -m benchmarks.burst_child --shape 134M --mode deferred --dram 512MiB ...

Commands are JSON lines of stdin, answers JSON lines of stdout; everything else that is printed goes to stderr.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import psutil
import torch

from benchmarks.bursts import PLAIN
from benchmarks.recording import Recording
from benchmarks.shapes import SHAPES, batches, build

MODES: dict[str, dict[str, Any]] = {
    PLAIN: {},
    "barrier": {"deferred": False, "optimizer_in_backward": False},
    "deferred": {"optimizer_in_backward": False},
    "optimistic": {},
    "opted in": {"optimizer_in_backward": True},
}
WARM, COUNTED = 1, 2  # recorded steps: those before that fill the cache, and those whose traffic counts


@dataclass(slots=True)
class Loop:
    """The script of the variant."""

    args: argparse.Namespace
    model: Any
    optimizer: torch.optim.Optimizer
    job: Any
    data: Iterator[torch.Tensor]
    recording: Recording | None = None
    losses: list[float] = field(default_factory=list)

    def step(self) -> dict[str, float]:
        """One optimizer step, timed; the parts are what the script's own calls take."""
        before, cpu_s = self._counters(), _cpu_s()
        parts = {"forward_s": 0.0, "backward_s": 0.0, "update_s": 0.0}
        start_s = now_s = time.perf_counter()

        def lap(name: str) -> None:
            nonlocal now_s
            then_s, now_s = now_s, time.perf_counter()
            parts[name] += now_s - then_s

        total = 0.0

        def body(batch: torch.Tensor) -> None:
            nonlocal total
            loss = self.model(input_ids=batch, labels=batch).loss / self.args.microbatches
            lap("forward_s")
            loss.backward()
            lap("backward_s")
            total += loss.item()

        micro = [next(self.data) for _ in range(self.args.microbatches)]
        if self.args.vertical:
            self.job.accumulate(body, micro)
            lap("backward_s")
        else:
            for batch in micro:
                body(batch)
        if self.recording is not None:
            self.recording.step_began()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.recording is not None:
            self.recording.step_ended()
        lap("update_s")
        self.losses.append(total)
        after = self._counters()
        moved = {name: after[name] - before[name] for name in after}
        return {"loss": total, "wall_s": now_s - start_s, "cpu_s": _cpu_s() - cpu_s, **parts, **moved}

    def _counters(self) -> dict[str, float]:
        names = ("read_bytes", "written_bytes", "stall_s", "early", "acquired")
        if self.job is None:
            return dict.fromkeys(names, 0.0)
        stats = self.job.stats()
        residency = stats.residency
        values = (
            stats.links["flash_to_dram"].bytes,
            stats.links["dram_to_flash"].bytes,
            stats.stall_s,
            stats.early.confirmed,
            residency.local + residency.ahead + residency.demands,
        )
        return dict(zip(names, values, strict=True))

    def record(self) -> dict[str, Any]:
        """A few steps more, recorded; the least that one of them moves, by part, and where updates write."""
        assert self.job is not None
        self.recording = Recording.installed()
        first = len(self.losses)
        for _ in range(WARM + COUNTED + 1):
            self.step()
        budget = int(self.job.residency.budget_frames) * int(self.job.residency.session.opened.frame_bytes)
        record = self.recording.record
        traffic = record.least_traffic(budget, WARM, COUNTED)
        return {
            "steps": len(self.losses) - first,
            "least": {label: [t.read_bytes, t.written_bytes] for label, t in traffic.items()},
            "updated": record.updated_bytes(WARM, COUNTED),
        }


def _cpu_s() -> float:
    """Of this process and its daemon."""
    me = psutil.Process()
    return float(sum(sum(p.cpu_times()[:2]) for p in [me, *me.children(recursive=True)]))


def loop_of(args: argparse.Namespace) -> Loop:
    torch.set_num_threads(args.threads)
    shape = SHAPES[args.shape]
    model = build(shape)
    if args.dtype == "bfloat16":
        for parameter in model.parameters():  # not the buffers: rotary frequencies stay as they are
            parameter.data = parameter.data.to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    job = None
    if args.mode != PLAIN:
        import tiermem

        job = tiermem.attach(model, optimizer, dram=args.dram, flash=args.flash, **MODES[args.mode], **args.options)
    return Loop(args, model, optimizer, job, batches(shape, args.sequence, args.batch))


def serve(args: argparse.Namespace, answers: Any) -> None:
    loop = loop_of(args)
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        if command["do"] == "steps":
            answer: Any = [loop.step() for _ in range(command["number"])]
        elif command["do"] == "record":
            answer = loop.record()
        elif command["do"] == "end":
            if loop.job is not None:
                loop.job.close()
            answer = {}
        else:
            raise SystemExit(f"unknown command {command!r}")
        print(json.dumps(answer), file=answers, flush=True)
        if command["do"] == "end":
            return


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--mode", choices=MODES, required=True)
    parser.add_argument("--dram")
    parser.add_argument("--flash")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--microbatches", type=int, default=1)
    parser.add_argument("--vertical", action="store_true")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--options", type=json.loads, default={}, help="more arguments of attach, as JSON")
    args = parser.parse_args()
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        os.dup2(2, 1)  # what libraries print must not be taken for an answer
        serve(args, answers)
    return 0


if __name__ == "__main__":
    sys.exit(main())
