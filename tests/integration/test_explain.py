"""What `explain` says beforehand is what attach does, or refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

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


def test_an_empty_model_is_refused_and_a_stranger_is_an_error() -> None:
    assert tiermem.explain(nn.ReLU()).refusals == ("ReLU has no parameters",)
    with pytest.raises(tiermem.errors.InvalidArgument, match="int"):
        tiermem.explain(3)  # type: ignore[arg-type]
