"""Other processes and other jobs beside an attached one: DataLoader workers, forked children, several models."""

from __future__ import annotations

import copy
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import tiermem
from tests.integration.daemon_process import trainer
from tests.integration.scripts import VOCAB, BlockModel, batches, default_loss, differences
from tests.integration.served import Attach, Served, not_attached, served_in, train, weights
from tests.integration.tiny_training import plain_fingerprint

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    resource_tracker.ensure_running()  # a process and a pipe that multiprocessing keeps
    with served_in(tmp_path_factory.mktemp("daemon")) as running:
        yield running


class Tokens(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randint(0, VOCAB, (10,), generator=torch.Generator().manual_seed(index))


class Scores(Tokens):
    """A dataset that asks the model, which a worker process cannot."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __getitem__(self, index: int) -> torch.Tensor:
        return super().__getitem__(index) + int(next(self.model.parameters()).sum().item() * 0)


def made(model: Callable[[], nn.Module] = BlockModel, seed: int = 0) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    module = model()
    return module, torch.optim.AdamW(module.parameters(), lr=3e-3)


@pytest.mark.parametrize(("context", "persistent"), [("fork", False), ("fork", True), ("spawn", True)])
def test_loader_workers(context: str, persistent: bool, served: Served) -> None:
    """Workers are started while attached; each epoch anew, or kept."""

    def script(attach: Attach) -> Any:
        model, optimizer = made()
        job = attach(model, optimizer)
        loader = DataLoader(
            Tokens(), 3, shuffle=True, num_workers=2, multiprocessing_context=context, persistent_workers=persistent
        )
        seen = []
        for _ in range(2):
            for batch in loader:
                optimizer.zero_grad()
                loss = default_loss(model, batch)
                loss.backward()
                optimizer.step()
                seen.append(loss.detach().clone())
        job.detach()
        return seen, weights(model), copy.deepcopy(optimizer.state_dict())

    served.same(script)


def test_loader_worker_that_asks_the_model(served: Served) -> None:
    """The worker's typed error arrives here; training goes on, bit for bit."""
    plain, plain_optimizer = made()
    expected = train(plain, plain_optimizer, batches(1))
    model, optimizer = made()
    with served.with_options() as other:
        job = other.attach(model, optimizer)
        loader = DataLoader(Scores(model), 3, num_workers=1, multiprocessing_context="fork")
        with pytest.raises(tiermem.errors.Unsupported, match="a forked child cannot use managed tensors"):
            next(iter(loader))
        seen = train(model, optimizer, batches(1))
        job.detach()
    assert differences([expected, weights(plain)], [seen, weights(model)]) == []


def in_child(action: Callable[[], Any]) -> tuple[str, int]:
    """Fork, do it there; the error's text (or "a value"), and the signal that ended the child."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        text = "a value"
        try:
            action()
        except BaseException as error:  # noqa: BLE001 - whatever it is, the parent tells
            text = f"{type(error).__name__}: {error}"
        os.write(writing, text.encode())
        os._exit(0)
    os.close(writing)
    with open(reading) as pipe:
        text = pipe.read()
    return text, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def bypass(model: Any) -> float:
    with torch._C.DisableTorchFunctionSubclass():
        return float(model.head.weight.sum())


CHILDREN: dict[str, Callable[[Any, Any, tiermem.Job], Any]] = {
    "reads a parameter": lambda model, optimizer, job: model.head.weight.sum().item(),
    "runs the model": lambda model, optimizer, job: model(torch.zeros(1, 4, dtype=torch.long)),
    "saves the model": lambda model, optimizer, job: model.state_dict(),
    "copies the model": lambda model, optimizer, job: copy.deepcopy(model),
    "saves the optimizer": lambda model, optimizer, job: optimizer.state_dict(),
    "reads optimizer state": lambda model, optimizer, job: optimizer.state[model.head.weight]["exp_avg"].sum(),
    "reads a gradient": lambda model, optimizer, job: model.head.weight.grad.sum(),
    "steps": lambda model, optimizer, job: optimizer.step(),
    "detaches": lambda model, optimizer, job: job.detach(),
    "asks for statistics": lambda model, optimizer, job: job.stats(),
}
HARMLESS: dict[str, Callable[[Any, Any, tiermem.Job], Any]] = {
    "does nothing": lambda model, optimizer, job: None,
    "closes": lambda model, optimizer, job: job.close(),
    "looks at shapes": lambda model, optimizer, job: [p.shape for p in model.parameters()],
    "drops the gradients": lambda model, optimizer, job: optimizer.zero_grad(),
}


@pytest.mark.parametrize("dram", ["1MiB", "8MiB"], ids=["spilled", "resident"])
def test_forked_children(dram: str, served: Served) -> None:
    """A child that touches what is managed gets a typed error at once, or, past every guard, a fault; never a value.
    The parent does not notice.
    """

    def script(attach: Attach, children: bool = False) -> Any:
        model, optimizer = made()
        job = attach(model, optimizer)
        data = batches(1)
        seen = train(model, optimizer, data, 2)
        if children:
            for name, action in CHILDREN.items():
                text, code = in_child(lambda action=action: action(model, optimizer, job))  # type: ignore[misc]
                assert (text[:11], code) == ("Unsupported", 0), f"a child that {name}: {text!r}, exit code {code}"
            for name, action in HARMLESS.items():
                text, code = in_child(lambda action=action: action(model, optimizer, job))  # type: ignore[misc]
                assert (text, code) == ("a value", 0), f"a child that {name}: {text!r}, exit code {code}"
            assert in_child(lambda: bypass(model)) == ("", -signal.SIGSEGV)
        seen += train(model, optimizer, data, 2)
        job.detach()
        return seen, weights(model), copy.deepcopy(optimizer.state_dict())

    plain = script(not_attached)
    with served.with_options(dram=dram, spills=False) as other:
        managed = script(other.attach, children=True)
    assert differences(plain, managed) == []


@pytest.mark.parametrize("dram", ["1MiB", "8MiB"], ids=["spilled", "resident"])
def test_a_child_forked_while_the_trace_is_written_does_not_wait_for_it(dram: str, served: Served) -> None:
    model, optimizer = made()
    with tiermem.attach(model, optimizer, dram=dram, endpoint=served.daemon.endpoint, job=f"forking-{dram}") as job:
        train(model, optimizer, batches(1), 1)
        told: list[tuple[str, int]] = []

        def fork_and_forward(module: Any, args: Any) -> None:
            hook.remove()
            with job.residency.session.trace._lock:  # as if another thread had it at that moment
                told.append(in_child(lambda: model(torch.zeros(1, 4, dtype=torch.long))))

        inside = next(m for m in model.blocks[1].modules() if isinstance(m, torch.nn.Linear))
        hook = inside.register_forward_pre_hook(fork_and_forward)
        train(model, optimizer, batches(1), 1)
        ((text, code),) = told
        assert (text[:11], code) == ("Unsupported", 0), f"{text!r}, exit code {code}"


def test_two_jobs_in_one_process(served: Served) -> None:
    """Steps of two models alternate; one goes on after the other has ended."""

    def script(attach: Attach) -> Any:
        pairs = [made(seed=seed) for seed in (0, 1)]
        jobs = [attach(*pair) for pair in pairs]
        data = [batches(seed) for seed in (0, 1)]
        seen: list[Any] = [train(*pairs[i % 2], data[i % 2], 1) for i in range(6)]
        jobs[0].detach()
        seen += [train(*pairs[1], data[1], 1), train(*pairs[0], data[0], 1)]
        jobs[1].detach()
        return seen, [weights(model) for model, _ in pairs]

    served.same(script)


def test_teacher_and_student_are_two_jobs(served: Served) -> None:
    """Both run inside one forward and backward."""

    def script(attach: Attach) -> Any:
        teacher, _ = made(lambda: BlockModel(width=96), 1)
        student, optimizer = made(lambda: BlockModel(width=48, around=True))
        teacher.requires_grad_(False)
        jobs = [attach(student, optimizer), attach(teacher)]
        seen, data = [], batches(1)
        for _ in range(3):
            batch = next(data)
            optimizer.zero_grad()
            loss = ((student(batch) - teacher(batch)) ** 2).mean()
            loss.backward()
            optimizer.step()
            seen.append(loss.detach().clone())
        for job in jobs:
            job.detach()
        return seen, weights(student), weights(teacher)

    served.same(script)


def test_two_jobs_in_two_processes(served: Served, tmp_path: Path) -> None:
    """At the same time, in arenas of one daemon: each ends with the weights and state of a plain run."""
    script = f"""
        model, optimizer, data = make()
        job = tiermem.attach(model, optimizer, dram=DRAM, endpoint={served.daemon.endpoint!r}, job=input())
        say("attached"); input()
        train(model, optimizer, data, 4)
        job.detach()
        say("ends", fingerprint(model, optimizer))
    """
    with ExitStack() as stack:
        processes = []
        for name in ("one", "two"):
            (tmp_path / name).mkdir()
            processes.append(stack.enter_context(trainer(script, tmp_path / name)))
            processes[-1].tell(name)
        for process in processes:
            process.expect("attached")
        for process in processes:
            process.tell()
        assert [process.expect("ends") for process in processes] == [[plain_fingerprint(4)]] * 2
        assert [process.wait() for process in processes] == [0, 0]
