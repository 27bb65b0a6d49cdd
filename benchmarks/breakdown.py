"""Where a step of an attached job spends time in tiermem's own Python: clocks around its entry points, put there from
outside.

Time is exclusive: what a clocked function spends in another clocked one is counted there, under a path such as
`unpack > hold > lease`. Only the process that calls `instrument` is changed, and for good.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

BELOW = " > "


class Parts:
    """Exclusive seconds and calls by path, since `taken` was last called. For one thread: RuntimeError in another."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._owner = threading.get_ident()
        self._open: list[tuple[str, list[float]]] = []  # path, and the seconds of what is clocked below
        self._tallies: dict[str, list[float]] = {}

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function with a clock around it."""
        clock, opened, tallies, ident = self._clock, self._open, self._tallies, threading.get_ident

        def call(*args: Any, **kwargs: Any) -> Any:
            if ident() != self._owner:
                raise RuntimeError(f"{part} is called from another thread, which has no clock")
            path = f"{opened[-1][0]}{BELOW}{part}" if opened else part
            below = [0.0]
            opened.append((path, below))
            began_s = clock()
            try:
                return function(*args, **kwargs)
            finally:
                took_s = clock() - began_s
                opened.pop()
                if opened:
                    opened[-1][1][0] += took_s
                tally = tallies.setdefault(path, [0.0, 0])
                tally[0] += took_s - below[0]
                tally[1] += 1

        return call

    def taken(self) -> dict[str, tuple[float, int]]:
        """What was counted, which begins at zero again. Not inside a clocked call."""
        counted = {path: (seconds, int(calls)) for path, (seconds, calls) in self._tallies.items()}
        self._tallies.clear()
        return counted


def whole(parts: Mapping[str, tuple[float, int]], path: str) -> float:
    """Seconds of a part with everything below it."""
    return sum(seconds for other, (seconds, _) in parts.items() if other == path or other.startswith(path + BELOW))


def call_cost_s(calls: int = 20_000) -> float:
    """What a clock adds to one call: the fastest of five tries with it, less the fastest without."""

    def nothing(value: object) -> None:
        pass

    def seconds(function: Callable[[object], None]) -> float:
        began_s = time.perf_counter()
        for _ in range(calls):
            function(None)
        return time.perf_counter() - began_s

    timed = Parts().timed("nothing", nothing)
    return (min(seconds(timed) for _ in range(5)) - min(seconds(nothing) for _ in range(5))) / calls


def instrument(parts: Parts) -> None:
    """Put clocks around what hooks and the optimizer's step call. Before `attach`, which keeps bound methods."""
    from tiermem_client import (
        grad_handles,
        grads,
        guard,
        pieces,
        residency,
        saved_tensors,
        shadow,
        shown_state,
        unit_hooks,
        updates,
    )

    def clock(owner: Any, name: str, part: str, wrap: Callable[[Any], Any] = lambda call: call) -> None:
        raw = owner.__dict__[name]
        setattr(owner, name, wrap(parts.timed(part, getattr(raw, "__func__", raw))))

    for cls in (unit_hooks._Enter, unit_hooks._EnterInner, unit_hooks._EnterRoot):
        clock(cls, "__call__", "enter")
    for left in (unit_hooks._Leave, unit_hooks._LeaveInner, unit_hooks._LeaveRoot):
        clock(left, "__call__", "leave")
    clock(guard.GuardBook, "open", "classes")
    clock(guard.GuardBook, "shut", "classes")
    clock(guard.Guard, "__torch_function__", "guard", classmethod)
    clock(residency.Residency, "acquire", "acquire")
    clock(residency.Residency, "release", "release")
    clock(residency.Residency, "discard", "discard")
    clock(saved_tensors.SavedTensorHooks, "push", "push")
    clock(saved_tensors.SavedTensorHooks, "pop", "pop")
    clock(saved_tensors.SavedTensorHooks, "unpack", "unpack")
    clock(saved_tensors.SavedTensorHooks, "hold", "hold")
    clock(saved_tensors.SavedTensorHooks, "end_task", "end of backward")
    _clock_pack(parts, saved_tensors.SavedTensorHooks)
    clock(grads._Accumulated, "__call__", "gradient")
    clock(grads, "_copy", "copy")
    clock(grad_handles.GradHandle, "__new__", "new handle", staticmethod)
    clock(grad_handles.GradHandle, "__init__", "finalizer")
    clock(grad_handles.GradHandle, "__torch_dispatch__", "operation on a handle", classmethod)
    clock(grad_handles._Drop, "__call__", "handle dropped")
    clock(updates.Updater, "_before_step", "update")
    clock(updates.Updater, "_after_step", "put gradients back")
    clock(updates.Updater, "_prepare", "prepare")
    clock(updates.Updater, "_absorb", "absorb")
    clock(updates, "shadow_step", "shadow")
    clock(pieces.GroupUpdate, "bundles_of_state", "bundles of state")
    clock(shown_state.ShownState, "show", "show")
    plain_step = shadow.plain_step
    setattr(shadow, "plain_step", lambda cls: parts.timed("arithmetic", plain_step(cls)))  # noqa: B010 - as above


def _clock_pack(parts: Parts, hooks: Any) -> None:
    """The pack hook is a closure, made anew at every push."""
    pair = hooks._pair

    def clocked(self: Any, below: Any) -> Any:
        pack, unpack = pair(self, below)
        return parts.timed("pack", pack), unpack

    hooks._pair = clocked
