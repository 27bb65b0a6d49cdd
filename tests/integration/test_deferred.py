"""Updates that wait until they are needed: nothing that a script can do between `step()` and the next forward tells."""

from __future__ import annotations

import copy
import dataclasses
import gc
import io
import pickle
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import tiermem
from tests.integration.daemon_process import Daemon, serve
from tests.integration.scripts import BlockModel, Script, begin, compare, managed, run
from tiermem.bundle import Kind
from tiermem.notices import NoticeKind
from tiermem.units import MIB
from tiermem_client import attach as attach_module
from tiermem_client.device_memory import DeviceMemory
from tiermem_client.floors import Floor, choose_floor

DRAM = 2 * MIB  # a third of the state
WITH_ROOM = "16MiB"


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with serve(tmp_path_factory.mktemp("deferred"), dram="64MiB") as served:
        yield served


def adamw(**options: Any) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda model: torch.optim.AdamW(model.parameters(), lr=3e-3, **options)


def blocks(**fields: Any) -> Script:
    options = {"steps": 3, "dram": str(DRAM), "attach_options": {"optimizer_in_backward": False}, **fields}
    options.setdefault("optimizer", adamw())
    return Script(lambda: BlockModel(width=64, blocks=12, tied=True, around=True, dropout=0.1), **options)


def equal(script: Script, daemon: Daemon) -> None:
    seen = run(script, attached=True, endpoint=daemon.endpoint)
    assert compare(run(script, attached=False), seen) == []


def waiting(job: tiermem.Job) -> int:
    """Groups whose update is pending."""
    return job.stats().pending_updates


def test_updates_wait_from_the_second_step_on(daemon: Daemon) -> None:
    training = begin(blocks())
    with managed(training, endpoint=daemon.endpoint) as job:
        training.steps(1)
        assert waiting(job) == 0, "what state there will be was not known"
        training.steps(1)
        groups = len(job.updater.updates) if job.updater is not None else 0
        assert waiting(job) == groups > 12
        training.optimizer.zero_grad()
        with torch.no_grad():
            training.model(training.batch())
        assert waiting(job) == 0, "a forward used every parameter"
    seen = training.finish()
    oracle = begin(blocks())
    oracle.steps(2)
    oracle.optimizer.zero_grad()
    with torch.no_grad():
        oracle.model(oracle.batch())
    assert compare(oracle.finish(), seen) == []


def test_only_what_is_used_is_updated(daemon: Daemon) -> None:
    training = begin(blocks())
    with managed(training, endpoint=daemon.endpoint) as job:
        training.steps(2)
        before = waiting(job)
        parameter = training.model.get_parameter("blocks.3.up.weight")
        assert parameter.norm() > 0
        assert waiting(job) == before - 1


Look = Callable[[int, nn.Module, torch.optim.Optimizer, Any], Any]


def _weights(step: int, model: nn.Module, optimizer: Any, data: Any) -> Any:
    return [p.detach().clone() for p in model.parameters()]


def _scalars(step: int, model: nn.Module, optimizer: Any, data: Any) -> Any:
    return [{k: v.clone() for k, v in optimizer.state[p].items()} for p in model.parameters()]


def _gradients_after(step: int, model: nn.Module, optimizer: Any, data: Any) -> Any:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def _gradients_change(step: int, model: nn.Module, optimizer: Any, data: Any) -> Any:
    for p in model.parameters():
        if p.grad is not None:
            p.grad.mul_(2.0)
    optimizer.step()
    return None


def _rates_change(step: int, model: nn.Module, optimizer: Any, data: Any) -> Any:
    for group in optimizer.param_groups:
        group["lr"] = 1e-3 / (step + 1)
        group["betas"] = (0.8, 0.95)
    return None


def _zeroed(step: int, model: nn.Module, optimizer: Any, data: Any) -> Any:
    optimizer.zero_grad(set_to_none=False)
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def _dropped(step: int, model: nn.Module, optimizer: Any, data: Any) -> Any:
    model.zero_grad(set_to_none=True)
    gc.collect()
    return None


def _weights_change(step: int, model: nn.Module, optimizer: Any, data: Any) -> Any:
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.99)
    return None


def _model_saved(step: int, model: nn.Module, optimizer: Any, data: Any) -> Any:
    return {k: v.clone() for k, v in model.state_dict().items()}


def _optimizer_saved(step: int, model: nn.Module, optimizer: Any, data: Any) -> Any:
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    return torch.load(file)


def _both_loaded(step: int, model: nn.Module, optimizer: Any, data: Any) -> Any:
    state = copy.deepcopy(optimizer.state_dict())
    weights = copy.deepcopy(model.state_dict())
    for value in state["state"].values():
        value["exp_avg"].mul_(0.5)
    optimizer.load_state_dict(state)
    model.load_state_dict({k: v * 1.01 for k, v in weights.items()})
    return None


def _only_optimizer_loaded(step: int, model: nn.Module, optimizer: Any, data: Any) -> Any:
    state = {"state": {}, "param_groups": copy.deepcopy(optimizer.param_groups)}
    for group in state["param_groups"]:
        group["params"] = list(range(len(group["params"])))
    optimizer.load_state_dict(state)
    return None


def _evaluated(step: int, model: nn.Module, optimizer: Any, data: Any) -> Any:
    model.eval()
    with torch.inference_mode():
        out = model(next(data)).clone()
    model.train()
    return out


def _evaluated_in_bfloat16(step: int, model: nn.Module, optimizer: Any, data: Any) -> Any:
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad(), FlopCounterMode(display=False) as counted:
        out = model(next(data)).clone()
    return out, counted.get_total_flops()


def _deep_copied(step: int, model: nn.Module, optimizer: Any, data: Any) -> Any:
    return {k: v.detach().clone() for k, v in copy.deepcopy(model).named_parameters()}


def _pickled(step: int, model: nn.Module, optimizer: Any, data: Any) -> Any:
    return [pickle.loads(pickle.dumps(p)).detach() for p in model.parameters()]


def _numpy(step: int, model: nn.Module, optimizer: Any, data: Any) -> Any:
    return [torch.from_numpy(p.detach().numpy().copy()) for p in model.parameters()]


def _stepped_twice(step: int, model: nn.Module, optimizer: Any, data: Any) -> Any:
    optimizer.step()
    return None


def _in_a_thread(step: int, model: nn.Module, optimizer: Any, data: Any) -> Any:
    out = []
    batch = next(data)

    def look() -> None:
        with torch.no_grad():
            model.eval()
            out.append(model(batch).clone())

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    model.train()
    return out


def _attribute(step: int, model: nn.Module, optimizer: Any, data: Any) -> Any:
    optimizer.strength = 0.5 + step
    return None


LOOKS: list[Look] = [
    _weights, _scalars, _gradients_after, _gradients_change, _rates_change, _zeroed, _dropped, _weights_change,
    _model_saved, _optimizer_saved, _both_loaded, _only_optimizer_loaded, _evaluated, _evaluated_in_bfloat16,
    _deep_copied, _pickled, _numpy, _stepped_twice, _in_a_thread,
]  # fmt: skip


@pytest.mark.parametrize("look", LOOKS, ids=lambda look: look.__name__)
def test_bit_for_bit_whatever_comes_between(look: Look, daemon: Daemon) -> None:
    equal(blocks(between=look), daemon)


@pytest.mark.parametrize("look", [_scalars, _zeroed, _optimizer_saved, _both_loaded], ids=lambda look: look.__name__)
def test_bit_for_bit_with_a_fused_update(look: Look, daemon: Daemon) -> None:
    equal(blocks(between=look, optimizer=adamw(fused=True)), daemon)


class Strong(torch.optim.SGD):
    """Its step reads an attribute of the instance."""

    strength = 1.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"] * self.strength)


def test_attributes_of_the_optimizer_are_those_of_the_step(daemon: Daemon) -> None:
    equal(blocks(optimizer=lambda model: Strong(model.parameters(), lr=0.01), between=_attribute), daemon)


@pytest.mark.parametrize("nesterov", [False, True])
def test_gradients_that_the_optimizer_writes_to(nesterov: bool, daemon: Daemon) -> None:
    def sgd(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, nesterov=nesterov, foreach=True)

    for look in (_gradients_after, _zeroed, _gradients_change):
        equal(blocks(optimizer=sgd, between=look, set_to_none=False), daemon)


def test_gradient_scaling_changes_its_scale_after_the_step(daemon: Daemon) -> None:
    fields: dict[str, Any] = {"scaler": True, "autocast": True, "autocast_dtype": torch.float16, "steps": 5}
    for fused in (False, True):
        equal(blocks(optimizer=adamw(fused=fused), between=_gradients_after, **fields), daemon)


def test_a_tensor_as_learning_rate_may_change_in_place(daemon: Daemon) -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=torch.tensor(3e-3), foreach=False)

    def change(step: int, model: nn.Module, optimizer: Any, data: Any) -> Any:
        optimizer.param_groups[0]["lr"].mul_(0.5)

    equal(blocks(optimizer=make, between=change), daemon)


def test_updates_without_state_wait_too(daemon: Daemon) -> None:
    training = begin(blocks(optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.01)))
    with managed(training, endpoint=daemon.endpoint) as job:
        training.steps(2)
        assert waiting(job) > 12
    oracle = begin(blocks(optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.01)))
    oracle.steps(2)
    assert compare(oracle.finish(), training.finish()) == []


def test_what_keeps_a_group_from_waiting_is_told_once(daemon: Daemon) -> None:
    training = begin(blocks())
    with managed(training, endpoint=daemon.endpoint) as job:
        training.steps(1)
        kept = [training.optimizer.state[p] for p in list(training.model.parameters())[3:5]]
        training.steps(2)
        [told] = job.stats().fallbacks
        assert "keeps an entry of optimizer.state" in told
        assert job.updater is not None
        groups = len(job.updater.updates)
        assert groups - 2 <= waiting(job) < groups, "all others wait"
        assert len(kept) == 2


def test_who_holds_state_sees_every_step(daemon: Daemon) -> None:
    """An entry of `optimizer.state`, or a scalar in it, that the script kept."""
    held: dict[bool, list[Any]] = {}

    def keep(attached: bool) -> Look:
        kept: list[Any] = []

        def look(step: int, model: nn.Module, optimizer: Any, data: Any) -> Any:
            if not kept:
                first, second = list(model.parameters())[3:5]
                kept.extend([optimizer.state[first], optimizer.state[second]["step"]])
            held.setdefault(attached, []).append((float(kept[0]["step"]), float(kept[1])))

        return look

    for attached in (False, True):
        run(blocks(between=keep(attached)), attached=attached, endpoint=daemon.endpoint)
    assert held[True] == held[False] == [(float(n), float(n)) for n in range(1, 4)]


def test_an_array_over_a_parameter_sees_every_step(daemon: Daemon) -> None:
    seen: dict[bool, list[float]] = {False: [], True: []}
    for attached in (False, True):
        training = begin(blocks())

        def steps(training: Any = training, attached: bool = attached) -> None:
            array = training.model.get_parameter("blocks.3.up.weight").detach().numpy()
            for _ in range(3):
                training.steps(1)
                seen[attached].append(float(array.sum()))

        if attached:
            job = tiermem.attach(training.model, training.optimizer, dram=str(DRAM), endpoint=daemon.endpoint)
            steps()
            gc.collect()
            job.detach()
        else:
            steps()
    assert seen[True] == seen[False]


def test_a_graph_from_before_the_step_is_refused_as_in_plain_torch(daemon: Daemon) -> None:
    training = begin(blocks())
    with managed(training, endpoint=daemon.endpoint):
        training.steps(2)
        training.optimizer.zero_grad()
        loss = training.model(training.batch()).float().sum()
        loss.backward(retain_graph=True)
        training.optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        training.optimizer.zero_grad()


def test_units_that_rest_are_updated_when_they_are_used_again(daemon: Daemon) -> None:
    class Dropping(BlockModel):
        calls = 0

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            Dropping.calls += 1
            h = self.embed(tokens)
            for number, block in enumerate(self.blocks):
                if (number + Dropping.calls) % 3:
                    h = block(h)
            return self.head(h)  # type: ignore[no-any-return]

    def make() -> nn.Module:
        Dropping.calls = 0
        return Dropping(width=64, blocks=12)

    equal(dataclasses.replace(blocks(steps=6), model=make), daemon)


def test_where_everything_fits_nothing_waits(daemon: Daemon) -> None:
    training = begin(blocks(dram=WITH_ROOM))
    with managed(training, endpoint=daemon.endpoint) as job:
        training.steps(3)
        assert waiting(job) == 0


def test_deferred_false_updates_inside_step(daemon: Daemon) -> None:
    script = blocks(attach_options={"deferred": False})
    training = begin(script)
    with managed(training, endpoint=daemon.endpoint) as job:
        training.steps(4)
        assert waiting(job) == 0
    oracle = begin(script)
    oracle.steps(4)
    assert compare(oracle.finish(), training.finish()) == []


def test_where_an_update_does_not_fit_beside_the_units_around_it_is_done_inside_step(daemon: Daemon) -> None:
    training = begin(blocks())
    with managed(training, endpoint=daemon.endpoint) as job:
        updater, session = job.updater, job.residency.session
        assert updater is not None and updater.deferred
        frame_bytes = session.opened.frame_bytes
        units = list(dict.fromkeys(update.group.owner for update in updater.updates))
        floor = choose_floor(units, job.book, updater, job.residency, True)
        needed = sum(max(1, -(-bundle.spec.nbytes // frame_bytes)) for bundle in floor.bundles)
        assert (floor.deferred, floor.missing_bytes) == (True, 0)
        frames, session.frames = session.frames, needed - 1
        floor = choose_floor(units, job.book, updater, job.residency, True)
        session.frames = frames
        assert (floor.deferred, floor.missing_bytes, floor.tier) == (False, frame_bytes, "DRAM")


def test_a_device_too_small_for_deferring_still_trains(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is refused without need is a model that cannot be trained."""
    real = DeviceMemory.missing_bytes

    def missing(memory: DeviceMemory, together: Any) -> int:
        return real(memory, together) or (4096 if any(b.spec.kind is Kind.OPTIM for b in together) else 0)

    monkeypatch.setattr(DeviceMemory, "missing_bytes", missing)
    monkeypatch.setattr(DeviceMemory, "check_floor", lambda memory, together: None)
    script = blocks(attach_options={"device": f"emulated:{DRAM}"})
    seen = run(script, attached=True, endpoint=daemon.endpoint)
    assert compare(run(script, attached=False), seen) == []
    assert seen.stats is not None
    [told] = seen.stats.fallbacks
    assert "4 KiB more of the device" in told


def test_that_nothing_is_deferred_is_told(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    def without_room(units: Any, book: Any, updater: Any, residency: Any, deferred: bool) -> Floor:
        return Floor(choose_floor(units, book, updater, residency, False).bundles, missing_bytes=3)

    monkeypatch.setattr(attach_module, "choose_floor", without_room)
    training = begin(blocks())
    with managed(training, endpoint=daemon.endpoint) as job:
        training.steps(2)
        [told] = job.stats().fallbacks
        assert "inside step()" in told
        assert "more of DRAM" in told
        job.flush()
        [row] = [row for row in daemon.stats().jobs if row.job == job.name]
        assert row.notices[NoticeKind.UPDATE_BARRIER] == 1
    oracle = begin(blocks())
    oracle.steps(2)
    assert compare(oracle.finish(), training.finish()) == []


def test_a_groups_parameters_are_loaded_once_for_update_and_forward(tmp_path: Path) -> None:
    """Without foresight, so that nothing depends on timing: up the units, and down, as LRU likes it."""
    environ = {"TIERMEM_PLACEMENT__LOOKAHEAD": "0", "TIERMEM_PLACEMENT__POLICY": "lru"}

    def read_bytes(daemon: Daemon, deferred: bool) -> int:
        options = {"deferred": deferred, "optimizer_in_backward": False}
        training = begin(blocks(dram=str(2 * DRAM), attach_options=options))
        with managed(training, endpoint=daemon.endpoint) as job:
            training.steps(4)
            before = job.stats().links["flash_to_dram"].bytes
            training.steps(4)
            return job.stats().links["flash_to_dram"].bytes - before

    with serve(tmp_path, dram="64MiB", environ=environ) as served:
        deferred, barrier = read_bytes(served, True), read_bytes(served, False)
    assert deferred < 0.9 * barrier


def test_state_comes_to_be_in_the_optimizers_order(daemon: Daemon) -> None:
    """Also where a parameter is used, and updated, for the first time long after others of its group."""

    class Late(BlockModel):
        calls = 0

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            h = self.embed(tokens)
            block: Any
            for number, block in enumerate(self.blocks):
                h = block(h) if (number + self.calls) % 3 else h + block.norm(h)
            return self.head(h)  # type: ignore[no-any-return]

    def make() -> nn.Module:
        return Late(width=64, blocks=12)

    equal(dataclasses.replace(blocks(steps=5), model=make), daemon)
