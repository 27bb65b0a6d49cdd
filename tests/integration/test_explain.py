"""What `explain` says beforehand is what attach does, or refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import tiermem
from tests.integration.scripts import BlockModel


def test_bytes_are_those_of_the_job(tmp_path: Path) -> None:
    model = BlockModel()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    before = tiermem.explain(model, optimizer)
    assert [u.name for u in before.units] == [
        "blocks.0",
        "blocks.1",
        "blocks.2",
        "blocks.3",
        "blocks.4",
        "embed",
        "head",
    ]
    assert before.refusals == ()
    assert before.total_bytes == 4 * sum(p.numel() * 4 for p in model.parameters())
    with tiermem.attach(model, optimizer, dram="2MiB", flash=tmp_path / "flash", endpoint="embedded") as job:
        held = job.stats().bytes_by_kind["param"]
    assert 0 <= held - sum(u.param_bytes for u in before.units) < 64 * len(list(model.parameters()))
    text = str(before)
    assert "blocks.3" in text
    assert "used at once at most" in text


def test_refusals_are_those_of_attach(tmp_path: Path) -> None:
    model = BlockModel()
    optimizer = torch.optim.LBFGS(model.parameters())
    (refusal,) = tiermem.explain(model, optimizer).refusals
    with pytest.raises(tiermem.errors.Unsupported) as caught:
        tiermem.attach(model, optimizer, dram="2MiB", flash=tmp_path / "flash", endpoint="embedded")
    assert str(caught.value) == refusal


def test_notes_name_what_works_differently() -> None:
    model = BlockModel()
    model.embed.sparse = True
    explanation = tiermem.explain(model, torch.optim.Adafactor(model.parameters()))
    assert any("sparse=False" in note for note in explanation.notes)
    assert any("whole tensors" in note for note in explanation.notes)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inductor's own use of torch.jit
def test_a_model_compiled_as_a_whole_is_noted() -> None:
    """With inductor, whose rounding depends on where graphs end; block by block they end at the same places."""
    inside, blocks = BlockModel(), BlockModel()
    whole: Any = torch.compile(BlockModel())
    exact: Any = torch.compile(BlockModel(), backend="aot_eager")
    block: Any = torch.compile(BlockModel().blocks[0])
    inside.compile()
    for other in blocks.blocks:
        other.compile()
    blocks.blocks[0] = block
    for model in (whole, inside):
        (note,) = tiermem.explain(model).notes
        assert "the model is compiled as a whole" in note
        assert "block by block" in note
    assert tiermem.explain(blocks).notes == ()
    assert tiermem.explain(exact).notes == ()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inductor's own use of torch.jit
@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"])
def test_cuda_graphs_are_refused_by_name(mode: str, tmp_path: Path) -> None:
    """Parameters that say that they are on a CUDA device, without one."""
    fake = nn.Module()
    with FakeTensorMode():
        fake.weight = nn.Parameter(torch.empty(4, 4, device="cuda"))
    compiled: Any = torch.compile(fake, mode=mode)
    refusals = tiermem.explain(compiled).refusals
    assert any("move the model to the CPU" in text for text in refusals)
    named = [text for text in refusals if "CUDA graphs" in text]
    assert len(named) == (0 if "no-cudagraphs" in mode else 1)
    with pytest.raises(tiermem.errors.Unsupported, match="CUDA graphs" if named else "move the model to the CPU"):
        tiermem.attach(compiled, dram="2MiB", flash=tmp_path / "flash", endpoint="embedded")
    on_cpu: Any = torch.compile(BlockModel(), mode=mode)
    assert tiermem.explain(on_cpu).refusals == ()


def test_an_empty_model_is_refused_and_a_stranger_is_an_error() -> None:
    assert tiermem.explain(nn.ReLU()).refusals == ("ReLU has no parameters",)
    with pytest.raises(tiermem.errors.InvalidArgument, match="int"):
        tiermem.explain(3)  # type: ignore[arg-type]
