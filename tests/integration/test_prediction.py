"""What the daemon predicts of real scripts, from what the trainer reports: the share of accesses, after a few steps,
that were the ones predicted. It depends on the order of accesses alone, not on time.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import tiermem
from tests.integration.daemon_process import Daemon, serve
from tests.integration.scripts import batches, default_loss

DRAM = "1MiB"
WARM_UP, MEASURED = 6, 10


class Blocks(nn.Module):
    """Ten blocks between an embedding and a head; `drop` skips blocks at random, `experts` sends each batch through two
    of four in every block.
    """

    def __init__(self, drop: float = 0.0, experts: int = 0, checkpointed: bool = False) -> None:
        super().__init__()
        self.drop, self.experts, self.checkpointed = drop, experts, checkpointed
        self.embed = nn.Embedding(64, 64)
        width = max(1, experts)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64)) for _ in range(10 * width)
        )
        self.head = nn.Linear(64, 64)
        self.choice = random.Random(3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        for layer in range(10):
            if self.training and self.choice.random() < self.drop:
                continue
            chosen = sorted(self.choice.sample(range(self.experts), 2)) if self.experts else [0]
            for expert in chosen:
                block = self.blocks[layer * max(1, self.experts) + expert]
                hidden = hidden + (
                    checkpoint(block, hidden, use_reentrant=False) if self.checkpointed else block(hidden)
                )
        return self.head(hidden)  # type: ignore[no-any-return]


Loop = Callable[[nn.Module, torch.optim.Optimizer, Iterator[torch.Tensor], int], None]


def micro_steps(model: nn.Module, data: Iterator[torch.Tensor], count: int) -> None:
    for _ in range(count):
        (default_loss(model, next(data)) / count).backward()


def one(model: nn.Module, optimizer: torch.optim.Optimizer, data: Iterator[torch.Tensor], step: int) -> None:
    micro_steps(model, data, 1)
    optimizer.step()
    optimizer.zero_grad()


def accumulating(model: nn.Module, optimizer: torch.optim.Optimizer, data: Iterator[torch.Tensor], step: int) -> None:
    micro_steps(model, data, 4)
    optimizer.step()
    optimizer.zero_grad()


def evaluating(model: nn.Module, optimizer: torch.optim.Optimizer, data: Iterator[torch.Tensor], step: int) -> None:
    one(model, optimizer, data, step)
    if step % 3 == 2:
        model.eval()
        with torch.no_grad():
            for _ in range(2):
                model(next(data))
        model.train()


def generating(model: nn.Module, optimizer: torch.optim.Optimizer, data: Iterator[torch.Tensor], step: int) -> None:
    one(model, optimizer, data, step)
    if step % 4 == 3:
        model.eval()
        with torch.no_grad():
            tokens = next(data)[:1, :4]
            for _ in range(6):
                tokens = torch.cat([tokens, model(tokens)[:, -1:].argmax(-1)], dim=1)
        model.train()


def last_partial(model: nn.Module, optimizer: torch.optim.Optimizer, data: Iterator[torch.Tensor], step: int) -> None:
    """An epoch of four steps, the last of which has fewer micro-steps and a smaller batch."""
    micro_steps(model, data, 2 if step % 4 < 3 else 1)
    optimizer.step()
    optimizer.zero_grad()


def varying(model: nn.Module, optimizer: torch.optim.Optimizer, data: Iterator[torch.Tensor], step: int) -> None:
    micro_steps(model, data, 1 + (7 * step) % 3)
    optimizer.step()
    optimizer.zero_grad()


CASES: dict[str, tuple[Callable[[], nn.Module], Loop, float]] = {
    "plain": (Blocks, one, 1.0),
    "checkpointed": (lambda: Blocks(checkpointed=True), one, 1.0),
    "accumulation": (Blocks, accumulating, 1.0),
    "evaluation": (Blocks, evaluating, 0.99),
    "generation": (Blocks, generating, 0.98),
    "last partial step": (Blocks, last_partial, 0.99),
    "varying micro-steps": (Blocks, varying, 0.97),
    "layer drop": (lambda: Blocks(drop=0.15), one, 0.80),
    "random experts": (lambda: Blocks(experts=4), one, 0.65),  # nothing can know the next forward's, nor the update's
}


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with serve(tmp_path_factory.mktemp("prediction"), dram="16MiB") as served:
        yield served


@pytest.mark.parametrize("case", CASES)
def test_accuracy(case: str, daemon: Daemon) -> None:
    check_accuracy(case, *CASES[case], daemon, optimizer_in_backward=False)


def test_measuring_whether_updates_inside_backward_pay_costs_few_predictions(daemon: Daemon) -> None:
    """By default a few steps are tried either way: where that changes, the order is another one."""
    check_accuracy("trial", Blocks, one, 0.95, daemon, optimizer_in_backward=None)


def check_accuracy(
    case: str,
    make: Callable[[], nn.Module],
    loop: Loop,
    least: float,
    daemon: Daemon,
    optimizer_in_backward: bool | None,
) -> None:
    torch.manual_seed(0)
    model = make().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = batches(1)
    options: dict[str, Any] = {"dram": DRAM, "endpoint": daemon.endpoint, "job": case}
    with tiermem.attach(model, optimizer, **options, optimizer_in_backward=optimizer_in_backward) as job:
        for step in range(WARM_UP):
            loop(model, optimizer, data, step)
        before = job.stats()
        for step in range(WARM_UP, WARM_UP + MEASURED):
            loop(model, optimizer, data, step)
        after = job.stats()
    outcomes = {name: after.predictions[name] - before.predictions[name] for name in after.predictions}
    accuracy = outcomes["right"] / sum(outcomes.values())
    assert accuracy >= least, outcomes
    assert after.pushes["used"] > before.pushes["used"]
    assert after.links["flash_to_dram"].bytes > before.links["flash_to_dram"].bytes, "everything fitted"
    if case in ("layer drop", "random experts"):
        assert outcomes["wrong"] > 0, "the case shows nothing"


def test_nothing_is_reported_where_everything_fits(daemon: Daemon) -> None:
    torch.manual_seed(0)
    model = Blocks()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with tiermem.attach(model, optimizer, dram="8MiB", endpoint=daemon.endpoint, job="fits") as job:
        for step in range(3):
            one(model, optimizer, batches(1), step)
        assert sum(job.stats().predictions.values()) == 0
        assert job.stats().pushes["sent"] == 0
