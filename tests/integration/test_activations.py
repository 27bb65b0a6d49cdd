"""The oracle for activations: kept, recomputed, offloaded or mixed, every loss, gradient, parameter and state is that of
the plain script.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tiermem
from tests.integration.scripts import BlockModel, NoLists, Script, batches, compare, default_loss, run
from tests.integration.test_oracle import adamw, around, clip, gpt2, llama, sgd


def long(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Activations are above the size from which they are offloaded."""
    return default_loss(model, batch.repeat(32, 1))


SCRIPTS: dict[str, Script] = {
    "blocks": Script(BlockModel, adamw()),
    "blocks with dropout, tied": Script(lambda: BlockModel(tied=True, dropout=0.2), adamw(fused=True), clip=clip),
    "a parameter used around its blocks": Script(lambda: BlockModel(around=True), adamw()),
    "llama": Script(llama(True), adamw()),
    "gpt2 with dropout": Script(gpt2, adamw()),
    "checkpointed, not reentrant": Script(llama(False, False), adamw()),
    "checkpointed, reentrant, dropout": Script(around("reentrant"), adamw()),
    "bf16 autocast": Script(BlockModel, adamw(), autocast=True),
    "accumulation": Script(BlockModel, sgd(momentum=0.9), microbatches=3),
    "no ModuleList": Script(NoLists, adamw()),
}
MIXED = {"*.0": "keep", "*.1": "recompute", "*.2": "offload", "*": "offload"}
CHOICES: dict[str, Any] = {"keep": "keep", "recompute": "recompute", "offload": "offload", "mixed": MIXED}


def managed(script: Script, activations: Any, dram: str = "3MiB") -> Script:
    return dataclasses.replace(script, dram=dram, loss=long, attach_options={"activations": activations})


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("name", SCRIPTS)
def test_bit_for_bit(name: str, choice: str, tmp_path: Path) -> None:
    if choice == "mixed" and name == "no ModuleList":
        pytest.skip("it has no units with numbers")
    script = managed(SCRIPTS[name], CHOICES[choice])
    plain = run(script, attached=False)
    ours = run(script, attached=True, flash=str(tmp_path / "flash"))
    assert compare(plain, ours) == []
    assert ours.stats is not None
    stats = ours.stats.activations
    if choice in ("offload", "mixed"):
        assert stats.restored_bytes > 0
        assert stats.kept_bytes == 0
        assert stats.stored_bytes == 0, "the graph is gone, and its bytes are not"
    if choice in ("recompute", "mixed") and name in ("blocks", "llama", "gpt2 with dropout"):
        assert stats.recomputed > 0
