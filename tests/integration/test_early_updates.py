"""Updates inside backward: confirmed by `step()` or undone, and nobody can tell; or opted in for, and what would tell
is refused.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tiermem
from tests.integration.daemon_process import Daemon, serve
from tests.integration.scripts import (
    BlockModel,
    Script,
    begin,
    compare,
    default_loss,
    managed,
    run,
    stats_of_equal_runs,
)
from tiermem.errors import InvalidArgument, Unsupported
from tiermem.units import MIB
from tiermem_client.rhythm import PROBES

DRAM = 3 * MIB  # less than half of the state
STEPS = 6  # two that probe, then two that try everything

Make = Callable[[nn.Module], torch.optim.Optimizer]
Act = Callable[[nn.Module, torch.optim.Optimizer], Any]


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with serve(tmp_path_factory.mktemp("early"), dram="64MiB") as served:
        yield served


def adamw(**options: Any) -> Make:
    return lambda model: torch.optim.AdamW(model.parameters(), lr=3e-3, **options)


def blocks(act: Act | None = None, make: Make | None = None, **fields: Any) -> Script:
    """`act` comes between backward and `step()`."""
    make = make or adamw()
    made: dict[int, torch.optim.Optimizer] = {}

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        made[id(model)] = make(model)
        return made[id(model)]

    def between(model: nn.Module) -> Any:
        return None if act is None else act(model, made[id(model)])

    options = {"steps": STEPS, "dram": str(DRAM), "clip": between, **fields}
    return Script(lambda: BlockModel(width=64, blocks=12, tied=True, around=True, dropout=0.1), optimizer, **options)


def seen_of(script: Script, daemon: Daemon) -> tiermem.TrainerStats:
    return stats_of_equal_runs(script, daemon.endpoint)


# -- confirmed


def _nothing(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    return None


def _gradients_read(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    return [p.grad.norm() for p in model.parameters() if p.grad is not None]


def _weights_read(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    return [p.detach().norm() for p in model.parameters()]


def _state_read(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    return [{k: v.clone() for k, v in state.items()} for state in optimizer.state.values()]


def _evaluated(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    model.eval()
    with torch.no_grad():
        out = model(torch.arange(12).reshape(2, 6)).clone()
    model.train()
    return out


def _saved(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    return {k: v.clone() for k, v in model.state_dict().items()}, copy.deepcopy(optimizer.state_dict())


@pytest.mark.parametrize(
    "act", [_nothing, _gradients_read, _weights_read, _state_read, _evaluated, _saved], ids=lambda act: act.__name__
)
def test_who_only_looks_sees_the_values_before_the_step(act: Act, daemon: Daemon) -> None:
    early = seen_of(blocks(act), daemon).early
    assert early.confirmed > 12
    assert early.undone == 0


@pytest.mark.parametrize(
    "make",
    [
        adamw(fused=True),
        adamw(amsgrad=True, foreach=True),
        lambda model: torch.optim.SGD(model.parameters(), lr=0.01),
        lambda model: torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
        lambda model: torch.optim.NAdam(model.parameters(), lr=1e-3),
        lambda model: torch.optim.Adafactor(model.parameters(), lr=1e-3),
        lambda model: torch.optim.Rprop(model.parameters(), lr=1e-3),
    ],
    ids=["fused", "amsgrad", "sgd", "momentum", "nadam", "adafactor", "rprop"],
)
def test_other_optimizers(make: Make, daemon: Daemon) -> None:
    stats = seen_of(blocks(make=make), daemon)
    assert stats.early.undone == 0


def test_tiles(daemon: Daemon) -> None:
    script = Script(lambda: BlockModel(width=384, blocks=3), adamw(), steps=STEPS, dram="16MiB")
    assert seen_of(script, daemon).early.confirmed > 3


@pytest.mark.parametrize("set_to_none", [False, True])
def test_accumulation(set_to_none: bool, daemon: Daemon) -> None:
    assert seen_of(blocks(microbatches=3, set_to_none=set_to_none), daemon).early.confirmed > 12


@pytest.mark.parametrize("kind", ["reentrant", "nonreentrant"])
def test_checkpointing(kind: str, daemon: Daemon) -> None:
    def model() -> nn.Module:
        return BlockModel(width=64, blocks=12, tied=True, dropout=0.1, checkpointing=kind)

    assert seen_of(Script(model, adamw(), steps=STEPS, dram=str(DRAM)), daemon).early.confirmed > 12


def test_rates_that_change_after_the_step(daemon: Daemon) -> None:
    def schedule(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)

    stats = seen_of(blocks(scheduler=schedule), daemon)
    assert (stats.early.confirmed > 12, stats.early.undone) == (True, 0)


def test_the_optimizer_sees_one_step_at_a_time_where_scalars_are_kept(daemon: Daemon) -> None:
    def keep() -> tuple[list[float], Script]:
        seen: list[float] = []
        kept: list[Any] = []

        def look(step: int, model: nn.Module, optimizer: Any, data: Any) -> None:
            if not kept:
                kept.append(optimizer.state[next(iter(model.parameters()))]["step"])
            seen.append(float(kept[0]))

        return seen, blocks(between=look)

    seen, script = keep()
    run(script, attached=True, endpoint=daemon.endpoint)
    assert seen == [float(n) for n in range(1, STEPS + 1)]


# -- undone


def _clipped(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    return torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def _rate_changed(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    for group in optimizer.param_groups:
        group["lr"] *= 0.9


def _gradient_dropped(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    model.get_parameter("blocks.3.up.weight").grad = None


def _gradient_changed(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    grad = model.get_parameter("blocks.3.up.weight").grad
    assert grad is not None
    grad.mul_(0.5)


def _gradients_zeroed(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    optimizer.zero_grad(set_to_none=False)


def _weight_changed(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    with torch.no_grad():
        model.get_parameter("blocks.3.up.weight").mul_(0.99)


def _state_changed(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    if state := optimizer.state.get(model.get_parameter("blocks.3.up.weight")):
        state["exp_avg"].mul_(0.5)


def _counter_changed(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    if state := optimizer.state.get(model.get_parameter("blocks.3.up.weight")):
        state["step"] += 1


def _loaded(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    state = copy.deepcopy(optimizer.state_dict())
    for value in state["state"].values():
        value["exp_avg"].mul_(0.5)
    optimizer.load_state_dict(state)


def late(act: Act) -> Act:
    """The same, at the last step but one only."""
    calls: dict[int, int] = {}

    def once(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        calls[id(model)] = calls.get(id(model), 0) + 1
        return act(model, optimizer) if calls[id(model)] == STEPS - 1 else None

    return once


UNDO = [
    _clipped, _rate_changed, _gradient_dropped, _gradient_changed, _gradients_zeroed, _weight_changed, _state_changed,
    _counter_changed, _loaded,
]  # fmt: skip


@pytest.mark.parametrize("act", UNDO, ids=lambda act: act.__name__)
def test_who_changes_something_gets_another_update(act: Act, daemon: Daemon) -> None:
    """At the fifth step, when everything is tried; and at every step."""
    assert seen_of(blocks(late(act)), daemon).early.undone > 0
    seen_of(blocks(act), daemon)


def test_gradient_scaling_with_a_skipped_step(daemon: Daemon) -> None:
    fields: dict[str, Any] = {"scaler": True, "autocast": True, "autocast_dtype": torch.float16}
    for fused in (False, True):
        assert seen_of(blocks(make=adamw(fused=fused), **fields), daemon).early.confirmed == 0


def _loop(daemon: Daemon | None, body: Callable[[int, nn.Module, Any, torch.Tensor], Any], steps: int = 7) -> Any:
    """A loop of the test's own, with tiermem or without; everything that it leaves."""
    training = begin(blocks())
    if daemon is None:
        seen = [body(i, training.model, training.optimizer, training.batch()) for i in range(steps)]
        return seen, training.finish()
    with managed(training, endpoint=daemon.endpoint) as job:
        seen = [body(i, training.model, training.optimizer, training.batch()) for i in range(steps)]
        assert job.stats().early.confirmed > 0
    return seen, training.finish()


def _both(daemon: Daemon, body: Callable[[int, nn.Module, Any, torch.Tensor], Any], steps: int = 7) -> None:
    plain, with_tiermem = _loop(None, body, steps), _loop(daemon, body, steps)
    assert compare(plain[1], with_tiermem[1]) == []
    assert all(map(torch.equal, plain[0], with_tiermem[0]))


def test_a_step_that_is_skipped(daemon: Daemon) -> None:
    def body(i: int, model: nn.Module, optimizer: Any, batch: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = default_loss(model, batch)
        loss.backward()
        if i != 5:
            optimizer.step()
        return loss.detach().clone()

    _both(daemon, body)


def test_another_backward_before_the_step(daemon: Daemon) -> None:
    def body(i: int, model: nn.Module, optimizer: Any, batch: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        for _ in range(2 if i == 5 else 1):
            loss = default_loss(model, batch)
            loss.backward()
        optimizer.step()
        return loss.detach().clone()

    _both(daemon, body)


def test_a_graph_that_is_kept_and_run_again(daemon: Daemon) -> None:
    def body(i: int, model: nn.Module, optimizer: Any, batch: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = default_loss(model, batch)
        loss.backward(retain_graph=i > 3)
        if i > 3:
            (0.5 * loss).backward()
        optimizer.step()
        return loss.detach().clone()

    _both(daemon, body)


def test_an_exception_inside_backward(daemon: Daemon) -> None:
    def body(i: int, model: nn.Module, optimizer: Any, batch: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = default_loss(model, batch)
        if i == 5:
            handle = model.get_parameter("blocks.2.norm.weight").register_hook(_fails)
            with pytest.raises(ArithmeticError):
                loss.backward()
            handle.remove()
            optimizer.zero_grad()
            loss = default_loss(model, batch)
        loss.backward()
        optimizer.step()
        return loss.detach().clone()

    _both(daemon, body)


def _fails(grad: torch.Tensor) -> None:
    raise ArithmeticError("in the middle of backward")


def test_it_stops_where_flash_has_no_room_for_twins(daemon: Daemon) -> None:
    state = 16 * sum(p.numel() for p in blocks().model().parameters())
    stats = seen_of(blocks(attach_options={"flash": int(1.3 * state)}), daemon)
    assert PROBES < stats.early.confirmed < 12
    assert any("not inside backward any more" in text for text in stats.fallbacks), stats.fallbacks


def test_it_can_be_switched_off(daemon: Daemon) -> None:
    stats = seen_of(blocks(attach_options={"optimizer_in_backward": False}), daemon)
    assert (stats.early.confirmed, stats.early.undone) == (0, 0)


# -- opted in


def opted_in(act: Act | None = None, **fields: Any) -> Script:
    return blocks(act, keeps_grads=False, attach_options={"optimizer_in_backward": True}, **fields)


@pytest.mark.parametrize("dram", [str(DRAM), "32MiB"])
@pytest.mark.parametrize("set_to_none", [False, True])
def test_opted_in(dram: str, set_to_none: bool, daemon: Daemon) -> None:
    assert seen_of(opted_in(dram=dram, set_to_none=set_to_none), daemon).early.confirmed > 12 * (STEPS - 2)


def test_opted_in_with_accumulation_and_tiles(daemon: Daemon) -> None:
    assert seen_of(opted_in(microbatches=3), daemon).early.confirmed > 12
    options = {"optimizer_in_backward": True}
    script = Script(
        lambda: BlockModel(width=384, blocks=3), adamw(fused=True), steps=4, dram="16MiB", keeps_grads=False,
        attach_options=options,
    )  # fmt: skip
    assert seen_of(script, daemon).early.confirmed > 3


@pytest.mark.parametrize("act", [_clipped, _gradients_read, _gradient_changed], ids=lambda act: act.__name__)
def test_who_needs_all_gradients_is_refused_at_the_first_step(act: Act, daemon: Daemon) -> None:
    with pytest.raises(Unsupported, match=r"optimizer_in_backward=True uses gradients up .* attached without it"):
        run(opted_in(act, steps=1), attached=True, endpoint=daemon.endpoint)


@pytest.mark.parametrize("act", [_weights_read, _state_read, _evaluated], ids=lambda act: act.__name__)
def test_who_looks_at_what_is_updated_already_is_refused(act: Act, daemon: Daemon) -> None:
    with pytest.raises(Unsupported, match="used between backward and step"):
        run(opted_in(act), attached=True, endpoint=daemon.endpoint)


@pytest.mark.parametrize("act", [_rate_changed, _gradient_dropped], ids=lambda act: act.__name__)
def test_a_step_that_asks_for_another_update_is_refused(act: Act, daemon: Daemon) -> None:
    with pytest.raises(Unsupported, match="asks for another update"):
        run(opted_in(late(act)), attached=True, endpoint=daemon.endpoint)


def test_gradient_scaling_is_refused(daemon: Daemon) -> None:
    script = opted_in(scaler=True, autocast=True, autocast_dtype=torch.float16)
    with pytest.raises(Unsupported, match="GradScaler"):
        run(script, attached=True, endpoint=daemon.endpoint)


def test_without_an_optimizer_there_is_nothing_to_opt_in_for(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="no optimizer"):
        tiermem.attach(BlockModel(), flash=tmp_path, endpoint="embedded", optimizer_in_backward=True)
