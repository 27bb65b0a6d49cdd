"""accelerate: its own loop, with the model and optimizer attached before `prepare` or after it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState

import tiermem
from tests.integration.scripts import VOCAB, BlockModel, default_loss
from tests.integration.served import Attach, Served, served_in, weights


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served_in(tmp_path_factory.mktemp("daemon")) as running:
        yield running


def accelerator(**options: Any) -> Accelerator:
    """A new one; its settings are global for a process."""
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    return Accelerator(cpu=True, **options)


def samples(count: int = 18) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, VOCAB, (10,), generator=generator) for _ in range(count)]


def loop(attach: Attach, directory: Path, prepared: bool, **options: Any) -> Any:
    """Accumulation over two batches, clipping, a schedule; states saved in the middle and loaded again."""
    torch.manual_seed(0)
    acc = accelerator(gradient_accumulation_steps=2, **options)
    model: Any = BlockModel(dropout=0.1)
    plain = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule: Any = torch.optim.lr_scheduler.CosineAnnealingLR(plain, 8)
    data: Any = torch.utils.data.DataLoader(samples(), batch_size=3, shuffle=True)  # type: ignore[arg-type]
    job = None if prepared else attach(model, plain)
    model, optimizer, data, schedule = acc.prepare(model, plain, data, schedule)
    if job is None:
        job = attach(model, optimizer)
    seen: list[Any] = []

    def epoch() -> None:
        for batch in data:
            with acc.accumulate(model):
                loss = default_loss(model, batch)
                acc.backward(loss)
                if acc.sync_gradients:
                    seen.append(acc.clip_grad_norm_(model.parameters(), 0.5).clone())
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                seen.append(loss.detach().clone())

    epoch()
    acc.save_state(str(directory))
    seen.append(safetensors.torch.load_file(directory / "model.safetensors"))
    seen.append(torch.load(directory / "optimizer.bin", weights_only=False))
    epoch()
    acc.load_state(str(directory))
    epoch()
    seen.append({name: tensor.clone() for name, tensor in acc.get_state_dict(model).items()})
    job.detach()
    return seen, weights(model), copy.deepcopy(plain.state_dict()), torch.get_rng_state()


@pytest.mark.parametrize("mixed_precision", ["no", "bf16"])
@pytest.mark.parametrize("prepared", [False, True], ids=["attached, then prepared", "prepared, then attached"])
def test_loop(prepared: bool, mixed_precision: str, served: Served, tmp_path: Path) -> None:
    served.same(lambda attach: loop(attach, tmp_path, prepared, mixed_precision=mixed_precision))


def test_bfloat16_states_are_saved_and_loaded(served: Served, tmp_path: Path) -> None:
    """Parameters that numpy has no type for (also row 18)."""

    def script(attach: Attach) -> Any:
        torch.manual_seed(0)
        acc = accelerator()
        model: Any = BlockModel(width=64).to(torch.bfloat16)
        plain = torch.optim.AdamW(model.parameters(), lr=3e-3)
        job = attach(model, plain)
        model, optimizer = acc.prepare(model, plain)
        for batch in torch.stack(samples(6)).split(3):
            acc.backward(default_loss(model, batch))
            optimizer.step()
            acc.save_state(str(tmp_path))
            acc.load_state(str(tmp_path))
        job.detach()
        return weights(model), copy.deepcopy(plain.state_dict())

    served.same(script)


def test_the_wrapped_optimizer_is_the_one_inside(served: Served) -> None:
    acc = accelerator()
    model = BlockModel()
    plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = acc.prepare(plain)
    assert optimizer is not plain
    with tiermem.attach(model, optimizer, dram="1MiB", endpoint=served.daemon.endpoint, job="wrapped"):
        default_loss(model, torch.stack(samples(3))).backward()
        optimizer.step()
        shown = plain.state[model.head.weight]["momentum_buffer"]
        assert type(shown) is not torch.Tensor  # guarded: it lives in the store
