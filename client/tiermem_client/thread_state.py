"""What torch keeps for each OS thread, so that several flows of one thread can have it each for themselves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import _pop_mode as _pop_function_mode
from torch.overrides import _push_mode as _push_function_mode
from torch.utils import _python_dispatch as _dispatch

_autograd = torch._C._autograd
_DEVICES = ("cpu", "cuda")


@dataclass(frozen=True, slots=True)
class ThreadState:
    """Grad mode, autocast, default hooks of saved tensors, and the stacks of function and dispatch modes."""

    grad: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    autocast_cache: bool
    saved_tensors: tuple[Any, ...]
    function_modes: tuple[Any, ...]
    dispatch_modes: tuple[Any, ...]

    @classmethod
    def taken(cls) -> ThreadState:
        """This thread's, which has empty stacks afterwards."""
        hooks: list[Any] = []
        functions: list[Any] = []
        dispatches: list[Any] = []
        while (top := _autograd._top_saved_tensors_default_hooks(True)) is not None:
            hooks.append(top)
            _autograd._pop_saved_tensors_default_hooks()
        while torch._C._len_torch_function_stack():
            functions.append(_pop_function_mode())
        while _dispatch._get_current_dispatch_mode_stack():
            dispatches.append(_dispatch._pop_mode())
        return cls(
            torch.is_grad_enabled(),
            tuple((d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in _DEVICES),
            torch.is_autocast_cache_enabled(),
            tuple(reversed(hooks)),
            tuple(reversed(functions)),
            tuple(reversed(dispatches)),
        )

    def put(self) -> None:
        """Make it this thread's, whose stacks are empty. Casts that autocast has kept are forgotten: they would be
        shared by flows whose gradients are not.
        """
        torch._C._set_grad_enabled(self.grad)
        for device, enabled, dtype in self.autocast:
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)
        torch.set_autocast_cache_enabled(self.autocast_cache)
        torch.clear_autocast_cache()
        for hooks in self.saved_tensors:
            _autograd._push_saved_tensors_default_hooks(*hooks)
        for mode in self.function_modes:
            _push_function_mode(mode)
        for mode in self.dispatch_modes:
            _dispatch._push_mode(mode)


def rng_state() -> tuple[torch.Tensor, ...]:
    """Of the default generators: the CPU's, and the current GPU's if one is in use."""
    states = [torch.get_rng_state()]
    if torch.cuda.is_initialized():
        states.append(torch.cuda.get_rng_state())
    return tuple(states)


def set_rng_state(states: tuple[torch.Tensor, ...]) -> None:
    """The reverse of `rng_state`."""
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state(states[1])


def same_rng(some: tuple[torch.Tensor, ...], others: tuple[torch.Tensor, ...]) -> bool:
    return len(some) == len(others) and all(map(torch.equal, some, others))
