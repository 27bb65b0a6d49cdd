"""A training of 1.5 MB of state, the same in the tests' process and in trainer processes."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

import tiermem.errors
from tests.integration.scripts import BlockModel, batches, default_loss

DRAM = "1MiB"


def say(*words: object) -> None:
    """A line for whoever started this process."""
    print(*words, flush=True)


def make(width: int = 48, blocks: int = 5) -> tuple[BlockModel, torch.optim.Optimizer, Iterator[torch.Tensor]]:
    """Model, optimizer and data; always the same ones. One thread: this is too small for two."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = BlockModel(width, blocks)
    return model, torch.optim.AdamW(model.parameters(), lr=3e-3), batches(1)


def train(model: BlockModel, optimizer: torch.optim.Optimizer, data: Iterator[torch.Tensor], steps: int = 1) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        default_loss(model, next(data)).backward()
        optimizer.step()


def train_stubbornly(
    model: BlockModel,
    optimizer: torch.optim.Optimizer,
    data: Iterator[torch.Tensor],
    steps: int,
    attempts: int = 50,
    on_error: Callable[[], None] = lambda: None,
) -> list[tiermem.errors.TiermemError]:
    """As `train`, trying again what raised a typed error: a pass from its beginning, an update from where it stopped.

    Returns the errors. Raises the last one after `attempts` of them.
    """
    errors: list[tiermem.errors.TiermemError] = []

    def insist(action: Callable[[], Any]) -> None:
        while True:
            try:
                action()
            except tiermem.errors.TiermemError as error:
                errors.append(error)
                on_error()
                if len(errors) == attempts:
                    raise
            else:
                return

    for _ in range(steps):
        batch = next(data)

        def passes(batch: torch.Tensor = batch) -> None:
            optimizer.zero_grad()
            default_loss(model, batch).backward()

        insist(passes)
        insist(optimizer.step)
    return errors


def fingerprint(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """A digest of every bit of parameters and optimizer state; of ordinary tensors, so after `detach`."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(name.encode())
        digest.update(parameter.detach().numpy().tobytes())
        for key, value in sorted(optimizer.state.get(parameter, {}).items()):
            digest.update(key.encode())
            digest.update(value.detach().numpy().tobytes() if isinstance(value, torch.Tensor) else repr(value).encode())
    return digest.hexdigest()


@functools.cache
def plain_fingerprint(steps: int, width: int = 48, blocks: int = 5) -> str:
    """What a training without tiermem ends with."""
    model, optimizer, data = make(width, blocks)
    train(model, optimizer, data, steps)
    return fingerprint(model, optimizer)
