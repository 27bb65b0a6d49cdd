"""More than 6 GB of parameters, gradients and Adam state under 1 GiB of anonymous memory and 1 GiB of DRAM tier."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integration.daemon_process import REPOSITORY, environment

GIB = 1 << 30

TRAINER = """
import contextlib, hashlib, json, resource, sys
import torch
from tests.integration.scripts import BlockModel, default_loss
from tiermem_client.memory_report import PeakAnonymous
mode, flash, limit = sys.argv[1], sys.argv[2], int(sys.argv[3])
torch.set_num_threads(1)
torch.manual_seed(0)
if limit:
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
job = None
if mode == "tiermem":
    import tiermem
with PeakAnonymous() as peak:
    with tiermem.empty_init(flash) if mode == "tiermem" else contextlib.nullcontext():
        model = BlockModel(width=1280, blocks=31)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    if mode == "tiermem":
        job = tiermem.attach(model, optimizer, dram="1GiB", flash=flash, endpoint="embedded")
    losses, norms = [], []
    for step in range(2):
        optimizer.zero_grad()
        loss = default_loss(model, (torch.arange(64).view(2, 32) * (step + 3)) % 64)
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
        losses.append(loss.item())
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().contiguous().view(-1).view(torch.uint8).numpy())
state = sum(p.numel() for p in model.parameters()) * 16
seen = {"losses": losses, "norms": norms, "sha": digest.hexdigest()}
print(json.dumps({**seen, "state": state, "peak": peak.peak_bytes}))
if job is not None:
    job.close()
"""


def train(mode: str, flash: Path, limit_bytes: int) -> Any:
    command = [sys.executable, "-c", TRAINER, mode, str(flash), str(limit_bytes)]
    where: dict[str, Any] = {"cwd": REPOSITORY, "env": environment()}
    return subprocess.run(command, **where, capture_output=True, text=True, check=False, timeout=700)


@pytest.mark.stress
def test_six_gigabytes_train_under_a_limit_of_one(tmp_path: Path) -> None:
    ours = train("tiermem", tmp_path / "flash", GIB)
    assert ours.returncode == 0, ours.stderr[-3000:]
    died = train("plain", tmp_path / "flash", GIB)
    assert died.returncode != 0
    assert "can't allocate memory" in died.stderr
    plain = train("plain", tmp_path / "flash", 0)
    assert plain.returncode == 0, plain.stderr[-3000:]
    seen, expected = json.loads(ours.stdout), json.loads(plain.stdout)
    assert seen["state"] > 6e9
    assert seen["peak"] < GIB
    assert expected["peak"] > seen["state"]
    assert {k: seen[k] for k in ("losses", "norms", "sha")} == {k: expected[k] for k in ("losses", "norms", "sha")}
