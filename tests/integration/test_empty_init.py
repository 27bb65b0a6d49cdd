"""Models that never fit into anonymous memory: born in files, equal to torch's initialisation, attached and trained."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import tiermem
from tests.integration.daemon_process import REPOSITORY, environment
from tests.integration.scripts import BlockModel

MIB = 1 << 20


def test_initialisation_is_torchs_own(tmp_path: Path) -> None:
    torch.manual_seed(5)
    plain, after_plain = BlockModel(width=256, tied=True), torch.rand(3)
    torch.manual_seed(5)
    with tiermem.empty_init(tmp_path):
        born, after_born = BlockModel(width=256, tied=True), torch.rand(3)
    assert torch.equal(after_plain, after_born)
    assert born.head.weight is born.embed.weight
    for (name, one), (_, other) in zip(plain.named_parameters(), born.named_parameters(), strict=True):
        assert torch.equal(one, other), name
        assert type(other) is nn.Parameter
        assert other.requires_grad
    weight = dict(born.named_parameters())["blocks.0.up.weight"]
    assert not weight.untyped_storage().resizable(), "the weight is not in a file"
    assert list(tmp_path.iterdir()) == [], "files stay behind"


def test_the_patch_ends_with_the_context(tmp_path: Path) -> None:
    original = nn.Module.register_parameter
    with tiermem.empty_init(tmp_path), tiermem.empty_init(tmp_path):
        pass
    assert nn.Module.register_parameter is original
    assert nn.Linear(256, 256).weight.untyped_storage().resizable()


TRAINER = """
import json, resource, sys
import torch, transformers
import tiermem
from tests.integration.scripts import BlockModel, default_loss
from tiermem_client.memory_report import PeakAnonymous, process_memory
source, flash, limit = sys.argv[1], sys.argv[2], int(sys.argv[3])
torch.set_num_threads(1)
torch.manual_seed(0)
if limit:
    limit += process_memory().data_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
start = process_memory().anonymous_bytes
with PeakAnonymous() as peak:
    with tiermem.empty_init(flash):
        if source == "new":
            model = BlockModel(width=1024, blocks=12)
        else:
            model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    nbytes = sum(p.numel() * 4 for p in model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    job = tiermem.attach(model, optimizer, dram="128MiB", flash=flash, endpoint="embedded")
losses = []
for _ in range(2):
    optimizer.zero_grad()
    loss = default_loss(model, torch.arange(16).view(2, 8))
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(json.dumps({"bytes": nbytes, "grown": peak.peak_bytes - start, "losses": losses}))
job.close()
"""


SAVER = """
import sys, transformers
shape = dict(vocab_size=64, hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=8)
config = transformers.LlamaConfig(num_key_value_heads=8, **shape)
transformers.LlamaForCausalLM(config).save_pretrained(sys.argv[1])
"""


def born(source: str, flash: Path, limit_bytes: int) -> Any:
    command = [sys.executable, "-c", TRAINER, source, str(flash), str(limit_bytes)]
    done = subprocess.run(
        command, cwd=REPOSITORY, env=environment(), capture_output=True, text=True, check=False, timeout=110
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def test_a_new_model_larger_than_the_limit(tmp_path: Path) -> None:
    """The limit leaves room for code, stacks of some ten threads, activations and a block's gradients."""
    seen = born("new", tmp_path / "flash", 288 * MIB)
    assert seen["bytes"] > 380 * MIB
    assert seen["grown"] < 160 * MIB, f"{seen['grown'] / MIB:.0f} MiB anonymous for {seen['bytes'] / MIB:.0f} MiB"
    torch.manual_seed(0)
    model = BlockModel(width=1024, blocks=12)
    torch.set_num_threads(1)
    logits = model(torch.arange(16).view(2, 8))
    loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), torch.arange(16).view(2, 8)[:, 1:].flatten())
    assert loss.item() == seen["losses"][0]


def test_from_pretrained_makes_no_anonymous_copy(tmp_path: Path) -> None:
    """Without a limit: safetensors maps its file privately, which RLIMIT_DATA counts though it costs no memory."""
    saved = subprocess.run(
        [sys.executable, "-c", SAVER, str(tmp_path / "model")], env=environment(), capture_output=True, check=False
    )
    assert saved.returncode == 0, saved.stderr[-2000:]
    seen = born(str(tmp_path / "model"), tmp_path / "flash", 0)
    assert seen["bytes"] > 380 * MIB
    assert seen["grown"] < 160 * MIB, f"{seen['grown'] / MIB:.0f} MiB anonymous for {seen['bytes'] / MIB:.0f} MiB"
