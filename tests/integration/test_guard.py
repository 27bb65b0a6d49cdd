"""Managed tensors touched outside their unit's forward: the same script with and without tiermem sees the same values,
and what it writes counts.
"""

from __future__ import annotations

import copy
import functools
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import tiermem
from tests.integration.scripts import BlockModel, Script, compare, default_loss, run


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-3)


def first_weight(model: Any) -> nn.Parameter:
    weight: nn.Parameter = model.blocks[0].up.weight
    return weight


def norms(step: int, model: nn.Module, optimizer: Any, data: Any) -> Any:
    return [p.norm() for p in model.parameters()], [p.detach().abs().max().item() for p in model.parameters()]


def foreach_norms(step: int, model: nn.Module, optimizer: Any, data: Any) -> Any:
    return torch._foreach_norm(list(model.parameters()))


def scaled_in_place(step: int, model: nn.Module, optimizer: Any, data: Any) -> Any:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.99)


def scaled_by_data(step: int, model: nn.Module, optimizer: Any, data: Any) -> Any:
    first_weight(model).data.mul_(1.01)
    return first_weight(model).data.sum()


def assigned_data(step: int, model: nn.Module, optimizer: Any, data: Any) -> Any:
    weight = first_weight(model)
    weight.data = weight.data * 0.5
    return weight.detach().clone()


def item_assigned(step: int, model: nn.Module, optimizer: Any, data: Any) -> Any:
    with torch.no_grad():
        first_weight(model)[0, :3] = 0.25
    return first_weight(model)[0, :5].tolist()


def vector(step: int, model: nn.Module, optimizer: Any, data: Any) -> Any:
    flat = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(flat * 0.999, model.parameters())
    return flat.detach()


def deep_copy(step: int, model: nn.Module, optimizer: Any, data: Any) -> Any:
    twin = copy.deepcopy(model)
    assert all(type(p) is nn.Parameter for p in twin.parameters())
    return twin(next(data)).detach(), {n: p.detach().clone() for n, p in twin.named_parameters()}


def pickled(step: int, model: nn.Module, optimizer: Any, data: Any) -> Any:
    twin = pickle.loads(pickle.dumps(model))
    return {n: p.detach().clone() for n, p in twin.named_parameters()}


def saved_model(step: int, model: nn.Module, optimizer: Any, data: Any) -> Any:
    buffer = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "one": first_weight(model)}, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def as_numpy(step: int, model: nn.Module, optimizer: Any, data: Any) -> Any:
    array = first_weight(model).detach().numpy()
    array[0, 0] += 0.125  # writes through, as in torch
    seen = array[:2].tolist()
    del array
    return seen, first_weight(model)[0, 0].item()


def printed(step: int, model: nn.Module, optimizer: Any, data: Any) -> Any:
    return repr(first_weight(model).detach()[:2, :2]), repr(model.blocks[0].norm.weight)  # type: ignore[union-attr,index]


def optimizer_state(step: int, model: nn.Module, optimizer: Any, data: Any) -> Any:
    state = optimizer.state[first_weight(model)]
    seen = {k: v.clone() for k, v in state.items()}
    with torch.no_grad():
        state["exp_avg"].mul_(0.5)
    return seen


def whole_state(step: int, model: nn.Module, optimizer: Any, data: Any) -> Any:
    return [copy.deepcopy(s) for s in optimizer.state.values()], pickle.loads(pickle.dumps(optimizer.state_dict()))


def gradients(step: int, model: nn.Module, optimizer: Any, data: Any) -> Any:
    seen = [p.grad.detach().clone() for p in model.parameters() if p.grad is not None]
    stacked = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None])
    return seen, stacked, [(p.grad * p).sum() for p in model.parameters() if p.grad is not None]


def autograd_grad(step: int, model: nn.Module, optimizer: Any, data: Any) -> Any:
    parameters = [p for p in model.parameters() if p.requires_grad]
    return torch.autograd.grad(default_loss(model, next(data)), parameters)


def functional_call(step: int, model: nn.Module, optimizer: Any, data: Any) -> Any:
    other = {n: p.detach() * 0.5 for n, p in model.named_parameters()}
    return torch.func.functional_call(model, other, (next(data),)).detach()


def averaged(**options: Any) -> Callable[..., Any]:
    """An averaged model kept over the steps; made anew for each of the two runs."""
    kept: dict[int, AveragedModel] = {}

    def update(step: int, model: nn.Module, optimizer: Any, data: Any) -> Any:
        if step == 0:
            kept[id(model)] = AveragedModel(model, **options)
        kept[id(model)].update_parameters(model)
        return {n: p.detach().clone() for n, p in kept[id(model)].module.named_parameters()}

    return update


def weight_in_the_loss(model: Any, batch: torch.Tensor) -> torch.Tensor:
    """A parameter used by the loss, far from its module: regularisation and a second head through the embedding."""
    hidden = model(batch)
    again = nn.functional.linear(model.embed(batch), model.embed.weight)
    penalty = sum((p * p).sum() for p in model.parameters() if p.ndim > 1)
    loss: torch.Tensor = nn.functional.cross_entropy((hidden + again).flatten(0, 1), batch.flatten())
    total: torch.Tensor = loss + 1e-4 * penalty
    return total


def child_weight(model: Any, batch: torch.Tensor) -> torch.Tensor:
    """A block's weight used without calling the block."""
    h = model.embed(batch)
    for block in model.blocks:
        h = h + nn.functional.linear(h, block.up.weight).sum(-1, keepdim=True) * 1e-3
    return nn.functional.cross_entropy(model.head(h).flatten(0, 1), batch.flatten())


TOUCHES: dict[str, Callable[..., Any]] = {
    f.__name__.replace("_", " "): f
    for f in (
        norms, foreach_norms, scaled_in_place, scaled_by_data, assigned_data, item_assigned, vector, deep_copy, pickled,
        saved_model, as_numpy, printed, optimizer_state, whole_state, gradients, autograd_grad, functional_call,
    )
}  # fmt: skip
TOUCHES["averaged model"] = averaged()
TOUCHES["averaged model, exponential, foreach"] = averaged(multi_avg_fn=get_ema_multi_avg_fn(0.9))


@pytest.mark.parametrize("name", TOUCHES)
def test_touch_between_steps(name: str, tmp_path: Path) -> None:
    model = functools.partial(BlockModel, tied=True) if "pickle" in name else BlockModel
    script = Script(model, adamw, between=TOUCHES[name])
    plain = run(script, attached=False, flash="")
    managed = run(script, attached=True, flash=str(tmp_path / "flash"))
    assert compare(plain, managed) == []


@pytest.mark.parametrize("loss", [weight_in_the_loss, child_weight])
@pytest.mark.parametrize("tied", [False, True])
def test_parameters_used_without_their_module(loss: Callable[..., Any], tied: bool, tmp_path: Path) -> None:
    script = Script(functools.partial(BlockModel, tied=tied), adamw, loss=loss)
    plain = run(script, attached=False, flash="")
    managed = run(script, attached=True, flash=str(tmp_path / "flash"))
    assert compare(plain, managed) == []


def test_other_dtype_is_refused_and_nothing_has_changed(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = BlockModel()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    with tiermem.attach(model, adamw(model), dram="1MiB", flash=tmp_path / "flash", endpoint="embedded"):
        with pytest.raises(tiermem.errors.Unsupported, match=r"float16.*before attach"):
            model.half()
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())


def test_classes_are_plain_again_after_detach(tmp_path: Path) -> None:
    model = BlockModel()
    optimizer = adamw(model)
    with tiermem.attach(model, optimizer, dram="1MiB", flash=tmp_path / "flash", endpoint="embedded"):
        assert all(isinstance(p, nn.Parameter) and type(p) is not nn.Parameter for p in model.parameters())
        default_loss(model, torch.arange(12).view(2, 6)).backward()
        optimizer.step()
    assert all(type(p) is nn.Parameter for p in model.parameters())
    assert all(type(v) is torch.Tensor for s in optimizer.state.values() for v in s.values())
    assert all(type(p.grad) is torch.Tensor for p in model.parameters())
