"""The caller's optimizer, run on parameters of our choice: a *shadow* instance with its own groups and state. Nothing
of the user's instance is touched, and the arithmetic is the user's own code.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from types import NoneType
from typing import Any

import torch
from torch import nn
from torch.utils import _python_dispatch

from tiermem.errors import Unsupported

_OWN = ("step", "state", "param_groups")  # of a shadow; LR schedulers patch an instance's step


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What one `step()` was called with: the groups' hyperparameters and the instance's attributes, GradScaler's among
    them (tensors cloned, as they may be changed in place afterwards).
    """

    groups: tuple[dict[str, Any], ...]
    attributes: dict[str, Any]

    @classmethod
    def capture(cls, optimizer: torch.optim.Optimizer) -> StepRecord:
        groups = tuple({k: _clone(v) for k, v in g.items() if k != "params"} for g in optimizer.param_groups)
        return cls(groups, {k: _clone(v) for k, v in optimizer.__dict__.items() if k not in _OWN})

    def same_as(self, other: StepRecord) -> bool:
        """Whether an update by one computes what an update by the other does."""
        return _same(self.groups, other.groups) and _same(self.attributes, other.attributes)

    @property
    def unscales_silently(self) -> bool:
        """Whether a fused kernel divides the gradients by the scale in place, which moves no version."""
        return self.attributes.get("grad_scale") is not None


def _same(one: Any, other: Any) -> bool:
    """Equal, with tensors by their bits; what cannot be compared is the same only where it is one object."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.device == other.device and torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return isinstance(one, bool | int | float | complex | str | bytes | NoneType) and repr(one) == repr(other)


def _clone(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def shadow_step(
    optimizer: torch.optim.Optimizer,
    record: StepRecord,
    members: list[tuple[int, nn.Parameter]],
    state: dict[nn.Parameter, dict[str, Any]],
) -> None:
    """Run the optimizer's own `step` over `members` (group index, parameter with `.grad`); `state` is read and written
    in place.

    Not copy.copy: its __getstate__ drops every attribute but three. No instance `step`, no hooks.
    """
    twin: Any = object.__new__(type(optimizer))
    twin.__dict__.update(record.attributes)
    twin.state = defaultdict(dict, {p: s for p, s in state.items() if s})
    twin.param_groups = [  # own tensors: a counter that the step changes in place is one step further for every shadow
        {**{k: _clone(v) for k, v in group.items()}, "params": [p for index, p in members if index == i]}
        for i, group in enumerate(record.groups)
    ]
    with own_modes(next((p.device.type for _, p in members), "cpu")):
        plain_step(type(optimizer))(twin)
    for parameter in state:
        state[parameter] = twin.state.get(parameter, {})


def plain_step(cls: type[torch.optim.Optimizer]) -> Any:
    """The class's `step` without torch's profiling wrapper, which runs the instance's and the global hooks."""
    step = cls.step
    return getattr(step, "__wrapped__", step) if getattr(step, "hooked", False) else step


@contextlib.contextmanager
def own_modes(device_type: str = "cpu") -> Iterator[None]:
    """The update must not see the caller's inference, autocast, gradient or function modes."""
    with (
        torch.inference_mode(False),
        torch.no_grad(),
        torch.autocast(device_type, enabled=False),
        torch._C.DisableTorchFunctionSubclass(),
    ):
        yield


@contextlib.contextmanager
def as_called_from_python() -> Iterator[None]:
    """For an update in the middle of an operation: what the caller counts or records (a FlopCounterMode, say) does not
    see it, and writes move version counters, which they do not inside a `__torch_dispatch__`.
    """
    versions = torch._C.DispatchKey.ADInplaceOrView
    excluded = torch._C._dispatch_tls_is_dispatch_key_excluded(versions)
    with _python_dispatch._disable_current_modes():
        torch._C._dispatch_tls_set_dispatch_key_excluded(versions, False)
        try:
            yield
        finally:
            torch._C._dispatch_tls_set_dispatch_key_excluded(versions, excluded)


@dataclass(frozen=True, slots=True)
class StateForm:
    """One state tensor that a parameter gets: element for element as large as the parameter, or a scalar."""

    key: str
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class OptimizerForm:
    """What the optimizer does with one parameter: its large state tensors, and whether a part of it can be updated
    alone.
    """

    states: tuple[StateForm, ...]
    elementwise: bool

    def state_bytes_per_element(self) -> int:
        return sum(s.dtype.itemsize for s in self.states)


class OptimizerProbe:
    """Learns an optimizer's behaviour from tiny clones, once per (group, dtype, dimensions). Raises Unsupported for
    closures and optimizers that mix parameters.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        self._optimizer, self._device = optimizer, device
        self._record = StepRecord.capture(optimizer)
        self._forms: dict[tuple[int, torch.dtype, tuple[int, ...]], OptimizerForm] = {}

    def form(self, group: int, parameter: nn.Parameter) -> OptimizerForm:
        shape = tuple(min(n, 4) for n in parameter.shape)
        key = (group, parameter.dtype, shape)
        if key not in self._forms:
            with torch.random.fork_rng(devices=[] if self._device.type == "cpu" else [self._device]):
                self._forms[key] = self._learn(group, parameter, shape)
        return self._forms[key]

    def _learn(self, group: int, like: nn.Parameter, shape: tuple[int, ...]) -> OptimizerForm:
        name = type(self._optimizer).__name__
        generator = torch.Generator().manual_seed(7)

        def draw() -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(self._device, like.dtype)

        values, others = draw(), draw()
        grads = [(draw(), draw()) for _ in range(3)]
        try:
            whole, state = self._run(group, like, [values], [[g] for g, _ in grads])
            both, _ = self._run(group, like, [values, others], [list(g) for g in grads])
        except Exception as error:  # a stranger's optimizer may raise anything; its cause is kept
            raise Unsupported(
                f"optimizer {name} cannot be run on its own for a parameter of shape {shape}: "
                f"{type(error).__name__}: {error}; optimizers "
                "that need a closure (LBFGS) or other context are not supported"
            ) from error
        if not torch.equal(whole[0], both[0]):
            raise Unsupported(
                f"optimizer {name} mixes parameters in one update (a norm or a reduction over all of them), "
                "which cannot be "
                "done bundle by bundle with the same result"
            )
        states = tuple(
            StateForm(k, v.dtype)
            for k, v in state[0].items()
            if isinstance(v, torch.Tensor) and v.numel() == values.numel() > 1
        )
        other = any(
            isinstance(v, torch.Tensor) and v.numel() > 1 and v.numel() != values.numel() for v in state[0].values()
        )
        return OptimizerForm(states, not other and self._splits(group, like, values, [g for g, _ in grads], whole[0]))

    def _splits(
        self, group: int, like: nn.Parameter, values: torch.Tensor, grads: list[torch.Tensor], whole: torch.Tensor
    ) -> bool:
        """Whether updating flat halves as parameters of their own gives the same bits."""
        if values.numel() < 2:
            return True
        half = values.numel() // 2
        try:
            parts, _ = self._run(
                group,
                like,
                [values.flatten()[:half], values.flatten()[half:]],
                [[g.flatten()[:half], g.flatten()[half:]] for g in grads],
            )
        except Exception:  # noqa: BLE001 - a stranger's optimizer may raise anything for a flat parameter: it cannot be split
            return False
        return torch.equal(torch.cat(parts), whole.flatten())

    def _run(
        self, group: int, like: nn.Parameter, values: list[torch.Tensor], grads: list[list[torch.Tensor]]
    ) -> tuple[list[torch.Tensor], list[dict[str, Any]]]:
        parameters = [nn.Parameter(v.clone()) for v in values]
        for parameter in parameters:
            parameter.__dict__.update({k: v for k, v in like.__dict__.items() if not k.startswith("_")})
        state: dict[nn.Parameter, dict[str, Any]] = {p: {} for p in parameters}
        for row in grads:
            for parameter, grad in zip(parameters, row, strict=True):
                parameter.grad = grad.clone()
            shadow_step(self._optimizer, self._record, [(group, p) for p in parameters], state)
        return [p.detach() for p in parameters], [state[p] for p in parameters]
