"""Clipping and scaling: bit for bit as the plain script's, and without moving bytes for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm

import tiermem
from tests.integration.daemon_process import Daemon, serve
from tests.integration.scripts import BlockModel, Script, begin, managed, stats_of_equal_runs
from tiermem.units import MIB

STEPS = 7

Clip = Callable[[nn.Module], Any]


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with serve(tmp_path_factory.mktemp("folded"), dram="64MiB") as served:
        yield served


def blocks(clip: Clip | None, **fields: Any) -> Script:
    """Less than half of the state fits."""
    make = fields.pop("make", lambda model: torch.optim.AdamW(model.parameters(), lr=3e-3))
    options = {"steps": STEPS, "dram": str(3 * MIB), "keeps_grads": False, "clip": clip, **fields}
    return Script(lambda: BlockModel(width=64, blocks=12, tied=True, around=True, dropout=0.1), make, **options)


def seen_of(script: Script, daemon: Daemon) -> tiermem.TrainerStats:
    return stats_of_equal_runs(script, daemon.endpoint)


def grads(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def clipped(model: nn.Module) -> Any:
    return clip_grad_norm_(model.parameters(), 0.1).clone()


def not_reached(model: nn.Module) -> Any:
    return clip_grad_norm_(model.parameters(), 1e6).clone()


def clipped_twice(model: nn.Module) -> Any:
    return clipped(model), clip_grad_norm_(model.parameters(), 0.05, norm_type=torch.inf).clone()


def clipped_by_value(model: nn.Module) -> Any:
    clip_grad_value_(model.parameters(), 1e-3)
    return get_total_norm(grads(model)).clone()


def read_afterwards(model: nn.Module) -> Any:
    norm = clipped(model)
    return norm, [g.clone() for g in grads(model)]


def read_before(model: nn.Module) -> Any:
    return [g.clone() for g in grads(model)], clipped(model)


def changed_by_hand(model: nn.Module) -> Any:
    by = torch.tensor(0.5)
    for g in grads(model):
        g.mul_(by)
        g.div_(3)
    by.fill_(77.0)
    return [torch.linalg.vector_norm(g, 1).clone() for g in grads(model)]


def written_in_between(model: nn.Module) -> Any:
    before = clipped(model)
    for g in grads(model):
        g.mul_(0.5)
        g.add_(1e-3)
    return before, clipped(model)


def some_zeroed(model: nn.Module) -> Any:
    norm = clipped(model)
    for g in grads(model)[::3]:
        g.zero_()
    return norm, clipped(model)


ACTS = [
    clipped,
    not_reached,
    clipped_twice,
    clipped_by_value,
    read_afterwards,
    read_before,
    changed_by_hand,
    written_in_between,
    some_zeroed,
]


@pytest.mark.parametrize("act", ACTS, ids=lambda act: act.__name__)
def test_whatever_is_done_to_gradients_gives_the_plain_scripts_bits(act: Clip, daemon: Daemon) -> None:
    seen_of(blocks(act), daemon)


@pytest.mark.parametrize("keeps_grads", [True, False])
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("deferred", [True, False])
def test_gradients_after_the_step(keeps_grads: bool, set_to_none: bool, deferred: bool, daemon: Daemon) -> None:
    options = {"deferred": deferred}
    fields = {"set_to_none": set_to_none, "keeps_grads": keeps_grads, "attach_options": options}
    seen_of(blocks(clipped, **fields), daemon)


@pytest.mark.parametrize(
    "make",
    [
        lambda m: torch.optim.AdamW(m.parameters(), lr=3e-3, fused=True),
        lambda m: torch.optim.AdamW(m.parameters(), lr=3e-3, foreach=True, amsgrad=True),
        lambda m: torch.optim.SGD(m.parameters(), lr=0.01, momentum=0.9, nesterov=True),
        lambda m: torch.optim.SGD(m.parameters(), lr=0.01, momentum=0.9, nesterov=True, foreach=True),
        lambda m: torch.optim.Adafactor(m.parameters(), lr=0.01),
    ],
    ids=["fused", "foreach", "nesterov", "nesterov foreach", "adafactor"],
)
def test_optimizers(make: Callable[[nn.Module], torch.optim.Optimizer], daemon: Daemon) -> None:
    """Those that write to gradients among them, and then somebody reads them."""

    def after(step: int, model: nn.Module, optimizer: Any, scheduler: Any) -> Any:
        return [g.norm().clone() for g in grads(model)]

    seen_of(blocks(clipped, make=make, between=after), daemon)
    seen_of(blocks(clipped, make=make), daemon)


@pytest.mark.parametrize("act", [clipped, not_reached, read_afterwards], ids=lambda act: act.__name__)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_grad_scaler(act: Clip, dtype: torch.dtype, daemon: Daemon) -> None:
    """The second step's loss is infinite: it is skipped, and the scale changes."""
    seen_of(blocks(act, scaler=True, autocast=True, autocast_dtype=dtype), daemon)


def test_grad_scaler_with_a_fused_optimizer_which_unscales_by_itself(daemon: Daemon) -> None:
    make = lambda m: torch.optim.AdamW(m.parameters(), lr=3e-3, fused=True)  # noqa: E731
    seen_of(blocks(None, make=make, scaler=True, autocast=True, autocast_dtype=torch.float16), daemon)


def test_parameters_of_low_precision(daemon: Daemon) -> None:
    seen_of(blocks(clipped, dtype=torch.bfloat16, dram=str(2 * MIB)), daemon)


@pytest.mark.parametrize("microbatches", [2, 3])
def test_accumulation_after_a_change(microbatches: int, daemon: Daemon) -> None:
    """A change that waits comes before what the next backward adds."""

    def body(i: int, model: nn.Module, optimizer: Any, scheduler: Any) -> Any:
        return None

    def backward(loss: torch.Tensor) -> None:
        loss.backward()
        for g in grads(models[-1]):
            g.mul_(0.7)

    models: list[nn.Module] = []
    script = blocks(clipped, microbatches=microbatches, backward=backward, between=body)
    model = script.model

    def made() -> nn.Module:
        models.append(model())
        return models[-1]

    seen_of(dataclasses.replace(script, model=made), daemon)


def test_a_change_after_the_step_does_not_reach_its_update(daemon: Daemon) -> None:
    def after(step: int, model: nn.Module, optimizer: Any, scheduler: Any) -> Any:
        for g in grads(model):
            g.mul_(100.0)
        return None

    seen_of(blocks(clipped, between=after, set_to_none=False), daemon)
    seen_of(blocks(None, between=after, set_to_none=False), daemon)


def test_clipping_undoes_what_was_updated_inside_backward_and_a_factor_of_one_does_not(daemon: Daemon) -> None:
    early = seen_of(blocks(clipped), daemon).early
    assert early.confirmed == 0
    assert early.undone > 0
    early = seen_of(blocks(not_reached), daemon).early
    assert early.confirmed > 12
    assert early.undone == 0


def large(clip: Clip | None, **fields: Any) -> Script:
    """An embedding larger than a bundle, so that it is updated in tiles."""

    def model() -> nn.Module:
        return BlockModel(width=512, blocks=3)

    make = lambda m: torch.optim.AdamW(m.parameters(), lr=3e-3)  # noqa: E731
    options = {"steps": 5, "dram": "20MiB", "keeps_grads": False, "clip": clip, **fields}
    return Script(model, make, **options)


def test_tiles(daemon: Daemon) -> None:
    seen_of(large(clipped), daemon)
    seen_of(large(read_afterwards), daemon)


def scaled(model: nn.Module) -> None:
    for g in grads(model):
        g.mul_(0.5)


# -- bytes


@pytest.mark.parametrize("act", [clipped, clipped_by_value, scaled], ids=lambda act: act.__name__)
def test_no_bytes_are_moved_for_it(act: Clip, daemon: Daemon) -> None:
    """Neither leases nor bytes of a step are more than without."""

    def counts(clip: Clip | None) -> tuple[int, int]:
        options = {"optimizer_in_backward": False}
        training = begin(blocks(clip, attach_options=options))
        with managed(training, endpoint=daemon.endpoint) as job:
            training.steps(4)
            before = _counts(job.stats())
            training.steps(4)
            leases, nbytes = (b - a for a, b in zip(before, _counts(job.stats()), strict=True))
        return leases, nbytes

    leases, nbytes = counts(None)
    clipped_leases, clipped_bytes = counts(act)
    assert clipped_leases == leases
    assert clipped_bytes <= 1.1 * nbytes, "loads ahead and write-backs differ a little from run to run"


def _counts(stats: tiermem.TrainerStats) -> tuple[int, int]:
    residency = stats.residency
    acquired = residency.local + residency.ahead + residency.demands
    return acquired, stats.links["flash_to_dram"].bytes + stats.links["dram_to_flash"].bytes
