"""A torch that has not the private calls that we look at: attach works, and says what it cannot notice."""

from __future__ import annotations

import subprocess
import sys

from tests.integration.daemon_process import REPOSITORY, environment

SCRIPT = """
import torch
from torch._C._dynamo import eval_frame
del eval_frame.get_eval_frame_callback
import tiermem
from tests.integration.scripts import BlockModel, batches, default_loss
model = BlockModel()
optimizer = torch.optim.AdamW(model.parameters())
with tiermem.attach(model, optimizer, dram="1MiB", endpoint="embedded") as job:
    default_loss(model, next(batches(1))).backward()
    optimizer.step()
    print(*job.stats().fallbacks, sep="\\n")
"""


def test_a_torch_without_a_way_to_see_compiled_regions() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=REPOSITORY, env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "a compile across units would not be noticed" in done.stdout
