"""Memory claims, under a limit and by a formula: the trainer's anonymous memory after attach is activations and the
largest unit's gradients, whatever the size of the state.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.integration.daemon_process import REPOSITORY, environment

MIB = 1 << 20

TRAINER = """
import json, resource, sys
import torch
from tests.integration.scripts import BlockModel, default_loss
from tiermem_client.memory_report import PeakAnonymous, process_memory
mode, width, blocks, flash, headroom = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], int(sys.argv[5])
torch.set_num_threads(1)
torch.manual_seed(0)
model = BlockModel(width=width, blocks=blocks)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
state_bytes = 4 * sum(p.numel() * 4 for p in model.parameters())
batch = torch.arange(64).view(2, 32)
job = None
if mode == "tiermem":
    import tiermem
    job = tiermem.attach(model, optimizer, dram="48MiB", flash=flash, endpoint="embedded")
baseline = process_memory()
if headroom:
    limit = baseline.data_bytes + headroom
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
losses = []
with PeakAnonymous() as peak:
    for _ in range(3):
        optimizer.zero_grad()
        loss = default_loss(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
total = sum(float(p.detach().double().sum()) for p in model.parameters())
seen = {"state": state_bytes, "baseline": baseline.anonymous_bytes, "peak": peak.peak_bytes}
print(json.dumps({"losses": losses, "sum": total, **seen}))
if job is not None:
    job.close()
"""

WIDTH, BLOCKS = 512, 16
BLOCK_BYTES = 4 * (8 * WIDTH * WIDTH + 6 * WIDTH)
# Saved by autograd for 64 tokens of one block, fp32: norm's input and output, up's output, gelu's output, and down's.
ACTIVATION_BYTES = 4 * 64 * (2 * WIDTH + 8 * WIDTH + WIDTH)
SLACK_BYTES = 36 * MIB  # interpreter, message buffers, an operator's temporaries, and holes that malloc keeps


def train(mode: str, flash: Path, headroom_bytes: int = 0) -> Any:
    command = [sys.executable, "-c", TRAINER, mode, str(WIDTH), str(BLOCKS), str(flash), str(headroom_bytes)]
    return subprocess.run(
        command, cwd=REPOSITORY, env=environment(), capture_output=True, text=True, check=False, timeout=110
    )


def formula_bytes() -> int:
    """Activations of all blocks, and the largest unit's gradients: autograd's own and one transaction's new state."""
    return BLOCKS * ACTIVATION_BYTES + BLOCK_BYTES + 2 * BLOCK_BYTES


def test_peak_by_formula(tmp_path: Path) -> None:
    done = train("tiermem", tmp_path / "flash")
    assert done.returncode == 0, done.stderr[-2000:]
    seen = json.loads(done.stdout)
    grown = seen["peak"] - seen["baseline"]
    most = formula_bytes() + SLACK_BYTES
    assert seen["state"] > 4 * most, "the state is not much larger than the formula: nothing would be shown"
    assert grown <= most, f"{grown / MIB:.1f} MiB grown, the formula allows {most / MIB:.1f}"


def test_trains_under_a_limit_that_kills_the_plain_script(tmp_path: Path) -> None:
    headroom = formula_bytes() + SLACK_BYTES
    limited = train("tiermem", tmp_path / "flash", headroom)
    assert limited.returncode == 0, limited.stderr[-2000:]
    assert train("plain", tmp_path / "flash", headroom).returncode != 0
    free = train("plain", tmp_path / "flash")
    ours, plain = json.loads(limited.stdout), json.loads(free.stdout)
    assert (ours["losses"], ours["sum"]) == (plain["losses"], plain["sum"])


def test_limit_is_a_real_one() -> None:
    """RLIMIT_DATA refuses anonymous memory on this kernel; otherwise the test above would show nothing."""
    code = (
        f"import resource, mmap; resource.setrlimit(resource.RLIMIT_DATA, ({256 * MIB},) * 2); bytearray({512 * MIB})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=30)
    assert "MemoryError" in done.stderr


CHECKPOINTER = """
import io, json, sys
import torch
import transformers
import tiermem
from tiermem_client.memory_report import PeakAnonymous, process_memory
flash, folder = sys.argv[1], sys.argv[2]
torch.set_num_threads(1)
torch.manual_seed(0)
shape = dict(vocab_size=512, hidden_size=512, intermediate_size=1536, num_hidden_layers=12, num_attention_heads=8)
with tiermem.empty_init(flash):
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(num_key_value_heads=8, **shape)).float()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
job = tiermem.attach(model, optimizer, dram="64MiB", flash=flash, endpoint="embedded")
model(input_ids=torch.arange(16).view(1, 16), labels=torch.arange(16).view(1, 16)).loss.backward()
optimizer.step()
optimizer.zero_grad()
model.save_pretrained(folder + "/warm", max_shard_size="10MB")  # imports
grown = {}
def measure(name, act):
    start = process_memory().anonymous_bytes
    with PeakAnonymous() as peak:
        kept = act()
    grown[name] = peak.peak_bytes - start
    return kept
one = measure("model", model.state_dict)
two = measure("optimizer", optimizer.state_dict)
measure("save_pretrained", lambda: model.save_pretrained(folder + "/model"))
other = transformers.AutoModelForCausalLM.from_pretrained(folder + "/model", dtype=torch.float32).state_dict()
same = all(torch.equal(one[n], other[n]) for n in other) and len(other) > 50
nbytes = sum(p.numel() * 4 for p in model.parameters())
print(json.dumps({"grown": grown, "same": same, "bytes": nbytes, "kept": len(one) + len(two["state"])}))
job.close()
"""


def test_checkpoints_make_no_anonymous_copy(tmp_path: Path) -> None:
    """Both state_dicts, held at once, and `save_pretrained`: copies are file pages, not anonymous memory."""
    done = subprocess.run(
        [sys.executable, "-c", CHECKPOINTER, str(tmp_path / "flash"), str(tmp_path)],
        cwd=REPOSITORY, env=environment(), capture_output=True, text=True, check=False, timeout=110,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    seen = json.loads(done.stdout)
    assert seen["same"], "what save_pretrained wrote is not what state_dict returned"
    assert seen["bytes"] > 150 * MIB
    assert max(seen["grown"].values()) < 48 * MIB, {k: f"{v / MIB:.0f} MiB" for k, v in seen["grown"].items()}
