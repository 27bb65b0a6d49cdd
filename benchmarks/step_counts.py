"""One attached run of the example, and the job's counters after every step: python -m benchmarks.step_counts RESULT --
EXAMPLE-ARGUMENTS. The daemon is a service if TIERMEM_ENDPOINT names one, whose options the benchmark has chosen.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.example import SCRIPT
from benchmarks.paced_child import load_example


def counters(job: Any) -> dict[str, float]:
    """Totals since attach. `acquired`: all acquisitions, of which `demands` asked the daemon."""
    stats = job.stats()
    residency = stats.residency
    return {
        "read_bytes": stats.links["flash_to_dram"].bytes,
        "written_bytes": stats.links["dram_to_flash"].bytes,
        "loads": stats.links["flash_to_dram"].transfers,
        "acquired": residency.local + residency.ahead + residency.demands,
        "demands": residency.demands,
        "stall_s": stats.stall_s,
        "wrong": stats.predictions["wrong"],
    }


def run(example: Any) -> dict[str, Any]:
    """As the example's own `run`, attached."""
    import torch

    import tiermem

    args = example.parse_arguments()
    torch.set_num_threads(args.threads)
    tokenizer, model = example.load(args.dtype)
    tokens = torch.tensor(tokenizer("\n".join(example.pydoc_data.topics.topics.values()))["input_ids"])
    torch.manual_seed(args.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
    job = tiermem.attach(model, optimizer, dram=args.dram)
    seen, at_s = [counters(job)], [time.perf_counter()]

    def after_step(step: int, loss: float, seconds: float) -> None:
        at_s.append(time.perf_counter())
        seen.append(counters(job))

    losses, step_s = example.train(model, optimizer, example.shuffled(tokens, args), args, after_step)
    kinds = job.stats().bytes_by_kind
    job.close()
    return {
        "losses": losses,
        "step_s": step_s,
        "counters": seen,
        "state_bytes": 2 * kinds["param"] + kinds["optim"],  # gradients are as large as parameters, and gone by now
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("result", type=Path)
    parser.add_argument("example_arguments", nargs="*")
    mine = parser.parse_args()
    sys.argv = [str(SCRIPT), *mine.example_arguments]
    mine.result.write_text(json.dumps(run(load_example())), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
