"""Units whose forward runs again in backward instead of keeping what it saves: torch's checkpoint (not reentrant)
around `module.forward`, so that hooks on the module itself run once, as in the plain script.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch._compile import _disable_dynamo
from torch.utils.checkpoint import checkpoint

from tiermem.errors import Unsupported
from tiermem_client.activations import ActivationStats
from tiermem_client.unit_hooks import UnitHooks
from tiermem_client.units import Unit

_CHECKPOINT = "torch.utils.checkpoint"


def can_recompute(module: nn.Module, unit_modules: Iterable[nn.Module]) -> bool:
    """Whether running the module again saves memory: it has modules inside, and none of them is a unit of its own."""
    inside = [m for m in module.modules() if m is not module]
    return bool(inside) and not set(inside) & set(unit_modules)


def compiled_refusal(unit: Unit) -> str:
    """Why the unit cannot be recomputed; empty where it can."""
    for top in unit.modules:
        for name, module in top.named_modules():
            if getattr(module, "_compiled_call_impl", None) is not None or hasattr(module, "_orig_mod"):
                where = ".".join(part for part in (unit.name, name) if part)
                return f"{where!r} is compiled, and what runs again in backward would not be; keep or offload it"
    return ""


class Recomputed:
    """Stands in the place of `module.forward`. Copies and pickles of the model have the forward of its own again."""

    def __init__(
        self, hooks: UnitHooks, unit: Unit, module: nn.Module, stats: ActivationStats, on_kept: Callable[[str], None]
    ) -> None:
        self.__wrapped__: Callable[..., Any] = module.forward  # as inspect looks for signatures
        self._hooks, self._unit, self._module, self._stats = hooks, unit, module, stats
        self._own = "forward" in module.__dict__
        self._on_kept = on_kept

    def install(self) -> Callable[[], None]:
        """Returns the undo."""
        module, original, own = self._module, self.__wrapped__, self._own
        module.forward = self

        def undo() -> None:
            if module.__dict__.get("forward") is self:
                if own:
                    module.forward = original
                else:
                    del module.__dict__["forward"]

        return undo

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.__wrapped__, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return getattr, (self._module, "forward") if not self._own else (self.__wrapped__, "__call__")

    @_disable_dynamo
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or self._hooks.saved.in_backward():
            return self.__wrapped__(*args, **kwargs)
        if self._checkpointed():
            return self.__wrapped__(*args, **kwargs)
        caches = {id(value): _snapshot(value) for value in (*args, *kwargs.values()) if _is_cache(value)}
        before = self._versions()
        output = checkpoint(functools.partial(self._run, caches, kwargs), *args, use_reentrant=False)
        for (name, then), (_, now) in zip(before, self._versions(), strict=True):
            if now != then:
                raise Unsupported(
                    f"the forward of unit {self._unit.name!r} changes its buffer {name!r}, and would change it again "
                    "when it is recomputed; keep or offload the activations of this unit"
                )
        return output

    def _run(self, caches: dict[int, Any], kwargs: dict[str, Any], *args: Any) -> Any:
        if self._hooks.saved.in_backward():
            self._stats.recomputed += 1
            args = tuple(_snapshot(caches[id(v)]) if id(v) in caches else v for v in args)
            kwargs = {k: _snapshot(caches[id(v)]) if id(v) in caches else v for k, v in kwargs.items()}
        self._hooks.enter(self._unit)
        try:
            return self.__wrapped__(*args, **kwargs)
        finally:
            self._hooks.leave(self._unit)

    def _checkpointed(self) -> bool:
        """Whether the model checkpoints the unit itself."""
        below = self._hooks.saved.below
        if below is None or getattr(below[0], "__module__", "") != _CHECKPOINT:
            return False
        self._on_kept(f"activations: {self._unit.name!r} is recomputed by the model's own checkpointing")
        return True

    def _versions(self) -> list[tuple[str, int]]:
        return [(name, buffer._version) for name, buffer in self._module.named_buffers()]


def _is_cache(value: Any) -> bool:
    library = sys.modules.get("transformers.cache_utils")
    return library is not None and isinstance(value, library.Cache)


def _snapshot(cache: Any) -> Any:
    """A cache of keys and values as it is now: what is appended to one does not show in the other."""
    if type(cache) is not sys.modules["transformers.cache_utils"].DynamicCache:
        raise Unsupported(
            f"a {type(cache).__name__} is written to in place by a unit that is to be recomputed; "
            "call the model with use_cache=False, or keep or offload its activations"
        )
    twin = copy.copy(cache)
    twin.layers = [copy.copy(layer) for layer in cache.layers]
    return twin
