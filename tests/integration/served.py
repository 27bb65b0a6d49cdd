"""The same script with and without tiermem, against one daemon for a whole test module."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

import tiermem
from tests.integration.daemon_process import Daemon, serve
from tests.integration.scripts import default_loss, differences

_numbers = itertools.count(1)


class Attached(Protocol):
    """What a script may do with what `attach` returns, also where that is nothing."""

    def detach(self) -> None: ...


class Attach(Protocol):
    """The one line of a script."""

    def __call__(self, model: Any, optimizer: Any = None) -> Attached: ...


Script = Callable[[Attach], Any]


class NotAttached:
    """Stands for the job in a plain run."""

    def detach(self) -> None:
        pass


def not_attached(model: Any, optimizer: Any = None) -> Attached:
    return NotAttached()


@dataclass
class Served:
    """A daemon, and how scripts of this process attach to it. A job that had no transfer from flash shows nothing, and
    fails.
    """

    daemon: Daemon
    dram: str = "1MiB"
    spills: bool = True
    jobs: list[tiermem.Job] = field(default_factory=list)

    def attach(self, model: Any, optimizer: Any = None) -> Attached:
        """Attach as a job with a name of its own."""
        name = f"served-{next(_numbers)}"
        job = tiermem.attach(model, optimizer, dram=self.dram, endpoint=self.daemon.endpoint, job=name)
        self.jobs.append(job)
        return _Spilling(job) if self.spills else job

    def same(self, script: Script, **options: Any) -> None:
        """Run it plain and attached: what it returns must be equal, bit for bit."""
        plain = script(not_attached)
        with self.with_options(**options) as served:
            managed = script(served.attach)
        assert differences(plain, managed) == []

    @contextmanager
    def with_options(self, **options: Any) -> Iterator[Served]:
        """Jobs with other options than the module's; what a failed script left attached is closed."""
        other = Served(self.daemon, **{"dram": self.dram, "spills": self.spills, **options})
        try:
            yield other
        finally:
            for job in other.jobs:
                job.close()


@dataclass
class _Spilling:
    job: tiermem.Job

    def detach(self) -> None:
        assert self.job.stats().links["flash_to_dram"].bytes > 0, "everything fitted: the case shows nothing"
        self.job.detach()


@contextmanager
def served_in(directory: Path, dram: str = "32MiB") -> Iterator[Served]:
    """A daemon in `directory`, and the way to it."""
    with serve(directory, dram=dram) as daemon:
        yield Served(daemon)


def train(
    model: Any, optimizer: torch.optim.Optimizer, data: Iterator[torch.Tensor], steps: int = 3
) -> list[torch.Tensor]:
    """Plain training steps; the losses."""
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = default_loss(model, next(data))
        loss.backward()
        losses.append(loss.detach().clone())
        optimizer.step()
    return losses


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Private copies of all parameters and buffers."""
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers())
    return {name: tensor.detach().clone() for name, tensor in named}
