"""The grant protocol between the real client and the real daemon where every message comes late, by a different time
each: grants cross demands, reports cross grants, two jobs go on at once.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.integration.daemon_process import Daemon, serve
from tests.integration.delaying_proxy import delaying_proxy
from tests.integration.scripts import BlockModel, Script, Training, begin, compare, default_loss, managed, run

LONGEST_S = 0.01


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with serve(tmp_path_factory.mktemp("delays"), dram="16MiB") as served:
        yield served


@pytest.fixture(autouse=True)
def quickly_switching_threads() -> Iterator[None]:
    usual_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(usual_s)


def evaluates_in_between(step: int, model: nn.Module, optimizer: torch.optim.Optimizer, data: Any) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        loss = default_loss(model, next(data))
    model.train()
    return loss


def evaluates_in_the_middle(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Between a forward and its backward, other units are needed."""
    loss = default_loss(model, batch)
    with torch.no_grad():
        other = default_loss(model, batch.flip(0))
    return loss + other


SCRIPTS: dict[str, dict[str, Any]] = {
    "a step like the one before": {},
    "evaluation between steps": {"between": evaluates_in_between},
    "evaluation in the middle of a step": {"loss": evaluates_in_the_middle},
    "accumulation, gradients kept": {"microbatches": 2, "set_to_none": False},
}


def script(fields: dict[str, Any], checkpointing: str = "") -> Script:
    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=3e-3)

    return Script(lambda: BlockModel(checkpointing=checkpointing, dropout=0.1), optimizer, steps=5, **fields)


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("name", SCRIPTS)
def test_bit_for_bit(name: str, seed: int, daemon: Daemon, tmp_path: Path) -> None:
    oracle = script(SCRIPTS[name], checkpointing="" if seed == 1 else "nonreentrant")
    with delaying_proxy(daemon.socket, tmp_path / "late.sock", seed, LONGEST_S) as late:
        seen = run(oracle, attached=True, endpoint=str(late))
    assert compare(run(oracle, attached=False), seen) == []
    assert seen.stats is not None
    assert seen.stats.pushes["used"] > 0, "no grant came ahead: nothing has crossed anything"


def test_two_jobs_at_once(daemon: Daemon, tmp_path: Path) -> None:
    oracle = Script(BlockModel, lambda model: torch.optim.AdamW(model.parameters(), lr=3e-3), steps=4)
    trainings = [begin(oracle), begin(oracle)]

    def train(training: Training, late: Path) -> None:
        with managed(training, endpoint=str(late)):
            training.steps(oracle.steps)

    with (
        delaying_proxy(daemon.socket, tmp_path / "late.sock", 3, LONGEST_S) as late,
        ThreadPoolExecutor(len(trainings)) as threads,
    ):
        for job in [threads.submit(train, training, late) for training in trainings]:
            job.result()
    plain = run(oracle, attached=False)
    assert [compare(plain, training.finish()) for training in trainings] == [[], []]
