"""The oracle: the same script with and without tiermem, in an arena far smaller than its state; every loss, gradient,
parameter and optimizer state must be equal, bit for bit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import tiermem
from tests.integration.scripts import VOCAB, BlockModel, NoLists, Script, batches, compare, default_loss, run


def llama(tied: bool, reentrant: bool | None = None) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        shape: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 4}
        shape["num_attention_heads"] = 4
        config = LlamaConfig(vocab_size=VOCAB, num_key_value_heads=2, tie_word_embeddings=tied, **shape)
        model: Any = LlamaForCausalLM(config).train()
        if reentrant is not None:
            enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
            enable({"use_reentrant": reentrant})
        return model  # type: ignore[no-any-return]

    return make


def gpt2() -> nn.Module:
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, n_positions=16, n_embd=64, n_layer=3, n_head=4)).train()  # type: ignore[no-any-return]


def wide_blocks() -> nn.Module:
    return BlockModel(width=80, blocks=6)


def wide_vocabulary(**options: Any) -> Callable[[], nn.Module]:
    """Its feed-forward matrices and embedding are larger than a bundle may be."""
    return lambda: BlockModel(width=512, blocks=1, **options)


def around(checkpointing: str) -> Callable[[], nn.Module]:
    return lambda: BlockModel(around=True, dropout=0.1, checkpointing=checkpointing)


def adamw(**options: Any) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda model: torch.optim.AdamW(model.parameters(), lr=3e-3, **options)


def sgd(**options: Any) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda model: torch.optim.SGD(model.parameters(), lr=0.05, **options)


def two_groups(model: nn.Module) -> torch.optim.Optimizer:
    decay = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim <= 1]
    return torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.1}, {"params": rest, "lr": 1e-2, "weight_decay": 0.0}], lr=3e-3
    )


def clip(model: nn.Module) -> Any:
    return torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)


def clip_value(model: nn.Module) -> Any:
    torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)


def cosine(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4)


def evaluate(step: int, model: nn.Module, optimizer: Any, data: Any) -> Any:
    model.eval()
    with torch.no_grad():
        out = model(next(data))
    model.train()
    return getattr(out, "logits", out).clone()


def generate(step: int, model: Any, optimizer: Any, data: Any) -> Any:
    model.eval()
    tokens = model.generate(next(data)[:1], max_new_tokens=4, do_sample=False, pad_token_id=0)
    model.train()
    return tokens


def both_state_dicts(step: int, model: nn.Module, optimizer: Any, data: Any) -> Any:
    saved = {k: v.clone() for k, v in model.state_dict().items()}
    state = optimizer.state_dict()
    if step == 1:  # perturb and load back, so that loading matters
        model.load_state_dict({k: v * 0.5 if v.is_floating_point() else v for k, v in saved.items()})
        model.load_state_dict(saved)
        optimizer.load_state_dict(state)
    return saved


def step_on_zeros(step: int, model: nn.Module, optimizer: Any, data: Any) -> Any:
    """A step without a backward: momentum goes on, and nesterov writes to the zeroed gradients."""
    optimizer.zero_grad(set_to_none=False)
    optimizer.step()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


CASES: dict[str, Script] = {
    "nesterov on zeroed gradients": Script(
        BlockModel, sgd(momentum=0.9, nesterov=True, foreach=True), between=step_on_zeros, set_to_none=False
    ),
    "llama tied, AdamW": Script(llama(True), adamw()),
    "llama untied, AdamW fused": Script(llama(False), adamw(fused=True)),
    "llama untied, AdamW foreach": Script(llama(False), adamw(foreach=True)),
    "gpt2 with dropout": Script(gpt2, adamw()),
    "no ModuleList": Script(NoLists, adamw()),
    "a parameter used around its blocks": Script(lambda: BlockModel(around=True), adamw()),
    "tied blocks": Script(lambda: BlockModel(tied=True), adamw(fused=True)),
    "SGD with momentum": Script(BlockModel, sgd(momentum=0.9, nesterov=True)),
    "SGD without state": Script(wide_blocks, sgd()),
    "two parameter groups": Script(BlockModel, two_groups),
    "clipping by norm": Script(BlockModel, adamw(), clip=clip),
    "clipping by value": Script(BlockModel, adamw(), clip=clip_value),
    "LR scheduler": Script(BlockModel, adamw(), scheduler=cosine),
    "accumulation": Script(BlockModel, adamw(), microbatches=3),
    "accumulation, tied, zeroed in place, clipped": Script(
        lambda: BlockModel(tied=True), adamw(fused=True), microbatches=2, set_to_none=False, clip=clip
    ),
    "checkpointing, not reentrant": Script(llama(False, False), adamw()),
    "checkpointing, reentrant": Script(llama(False, True), adamw()),
    "checkpointing around a root parameter": Script(around("nonreentrant"), adamw()),
    "checkpointing, reentrant, dropout": Script(around("reentrant"), adamw()),
    "state_dict of both, loaded back": Script(BlockModel, adamw(), between=both_state_dicts),
    "state_dict of both, llama tied": Script(llama(True), adamw(fused=True), between=both_state_dicts),
    "generate between steps": Script(llama(True), adamw(), between=generate),
    "evaluation between steps": Script(lambda: BlockModel(dropout=0.1), adamw(), between=evaluate),
    "attached after two steps": Script(BlockModel, adamw(), warm_steps=2),
    "attached after two steps, llama tied, fused": Script(llama(True), adamw(fused=True), warm_steps=2),
    "bf16": Script(wide_blocks, adamw(fused=True), dtype=torch.bfloat16),
    "bf16 autocast": Script(BlockModel, adamw(), autocast=True),
    "GradScaler with a skipped step": Script(BlockModel, adamw(), scaler=True, clip=clip),
    "GradScaler, fused": Script(BlockModel, adamw(fused=True), scaler=True),
    "tiles: an embedding above the cap": Script(wide_vocabulary(tied=True), adamw(fused=True), dram="10MiB"),
    "tiles, SGD momentum, accumulation": Script(
        wide_vocabulary(), sgd(momentum=0.9), dram="10MiB", microbatches=2, clip=clip
    ),
    "tiles, whole tensor (Adafactor)": Script(
        wide_vocabulary(), lambda m: torch.optim.Adafactor(m.parameters()), dram="14MiB"
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_bit_for_bit(name: str, tmp_path: Path) -> None:
    script = CASES[name]
    plain = run(script, attached=False, flash="")
    managed = run(script, attached=True, flash=str(tmp_path / "flash"))
    assert compare(plain, managed) == []
    assert managed.stats is not None
    assert managed.stats.links["flash_to_dram"].bytes > 0, "everything fitted: the case shows nothing"


RESIDENT = (
    "llama tied, AdamW",
    "llama untied, AdamW fused",
    "SGD without state",
    "clipping by norm",
    "accumulation, tied, zeroed in place, clipped",
    "checkpointing around a root parameter",
    "state_dict of both, loaded back",
    "attached after two steps",
    "GradScaler with a skipped step",
    "tiles: an embedding above the cap",
)


@pytest.mark.parametrize("name", RESIDENT)
def test_bit_for_bit_when_everything_fits(name: str, tmp_path: Path) -> None:
    script = dataclasses.replace(CASES[name], dram="256MiB")
    plain = run(script, attached=False, flash="")
    managed = run(script, attached=True, flash=str(tmp_path / "flash"))
    assert compare(plain, managed) == []
    assert managed.stats is not None
    assert managed.stats.links["flash_to_dram"].bytes == 0


def test_a_step_asks_nobody_when_everything_fits(tmp_path: Path) -> None:
    asked: list[int] = []

    def demands(step: int, model: nn.Module, optimizer: Any, data: Any) -> None:
        asked.append(job.residency.stats.demands)

    torch.manual_seed(0)
    model = BlockModel()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    with tiermem.attach(model, optimizer, dram="64MiB", flash=tmp_path / "flash", endpoint="embedded") as job:
        data = batches(1)
        for step in range(4):
            optimizer.zero_grad()
            default_loss(model, next(data)).backward()
            clip(model)
            optimizer.step()
            demands(step, model, optimizer, data)
    assert asked[1] == asked[2] == asked[3], f"demands after each step: {asked}"
