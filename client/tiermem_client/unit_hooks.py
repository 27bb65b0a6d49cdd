"""Module hooks: a unit's bundles are leased while its forward runs, and saved tensors go through ours."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._compile import _disable_dynamo
from torch.utils.hooks import RemovableHandle

from tiermem.bundle import Mode
from tiermem.plan import Phase
from tiermem_client.compiled import Cuts, not_traced, refuse_capture, region, stream_is_capturing
from tiermem_client.grads import GradBook
from tiermem_client.hook_objects import LeavesNoCopy
from tiermem_client.residency import Residency
from tiermem_client.saved_tensors import SavedTensorHooks
from tiermem_client.units import Unit


@dataclass(slots=True)
class _Entry:
    """One running forward of a unit: whether it leased the bundles itself or holds them for backward, whether the node
    that recomputes it needs them for nothing else, whether it pushed hooks, and the versions it began with.
    """

    leased: bool = False
    held: bool = False
    loose: bool = False
    pushed: bool = False
    versions: tuple[int, ...] = ()


@dataclass(slots=True, eq=False)
class UnitHooks:
    """Hooks of all units of a model. `enter` and `leave` pair also when a forward raises (hooks are called always).

    `park` is called before a unit is entered outside backward; `grouped` is one whose access has been reported for
    several microbatches together.
    """

    residency: Residency
    saved: SavedTensorHooks
    book: GradBook
    on_enter: Callable[[Unit], None] = lambda unit: None
    on_leave: Callable[[Unit], None] = lambda unit: None
    cuts: Cuts = field(default_factory=Cuts)
    capturing: Callable[[], bool] = stream_is_capturing
    park: Callable[[Unit], None] | None = None
    grouped: Unit | None = None
    _entries: dict[Unit, list[_Entry]] = field(default_factory=dict)

    def install(self, model: nn.Module, units: list[Unit]) -> Callable[[], None]:
        """Hook every unit's modules, the modules with parameters inside them, and the root; returns the undo."""
        handles: list[RemovableHandle] = []
        outer, inner, root = _HookPlace(), _HookPlace(), _HookPlace()
        hooked = {module for unit in units for module in unit.modules}
        for unit in units:
            for module in unit.modules:
                handles += outer.hook(module, _Enter(self, unit, module), _Leave(self, unit, module))
            for module in _inner_modules(unit, hooked):
                handles += inner.hook(module, _EnterInner(self, unit, module), _LeaveInner(self, unit, module))
        pushed: list[bool] = []
        cuts = None if model in hooked else self.cuts
        handles += root.hook(model, _EnterRoot(self.saved, model, pushed, cuts), _LeaveRoot(self.saved, model, pushed))

        def undo() -> None:
            for handle in handles:
                handle.remove()

        return undo

    @_disable_dynamo
    def enter(self, unit: Unit) -> None:
        """The unit's forward, or one inside it, begins."""
        entries = self._entries.setdefault(unit, [])
        entry = _Entry()
        entries.append(entry)
        entry.pushed = self.saved.push()
        if len(entries) > 1:
            return
        if self.capturing():
            refuse_capture(f"unit {unit.name!r}")
        self.book.settle()
        if self.saved.in_backward():  # a recomputation: backward often goes on with the same unit
            self.residency.accessed(unit.name, Phase.RECOMPUTE)
            entry.loose = self.saved.hold(unit, unit.bundles)
            entry.held = True
        else:
            self.saved.abandon()
            self.residency.bring_up_to_date(unit.bundles)
            if unit is not self.grouped:
                self.residency.accessed(unit.name, Phase.FORWARD, unit.modules[0].training)
            self.residency.acquire(unit.bundles, Mode.READ)
            entry.leased = True
        self.on_enter(unit)
        entry.versions = tuple(p._version for p in unit.parameters)

    @_disable_dynamo
    def leave(self, unit: Unit) -> None:
        """It has ended, or raised."""
        entries = self._entries.get(unit)
        if not entries:  # a hook before ours raised
            return
        entry = entries.pop()
        if entry.pushed:
            self.saved.pop()
        if not (entry.leased or entry.held):
            return
        try:
            changed = {p for p, v in zip(unit.parameters, entry.versions, strict=True) if p._version != v}
            if changed:
                self._take_changes(unit, changed)
        finally:
            self.on_leave(unit)
            self.residency.left(unit.name)
            if entry.leased:
                self.residency.release(unit.bundles)
            if entry.loose:
                self.saved.loosen(unit)

    def _take_changes(self, unit: Unit, changed: set[nn.Parameter]) -> None:
        """The forward changed parameters in place (an initialisation on first use, a power iteration): make that the
        newest version.
        """
        bundles = [b for g in unit.groups if any(m.parameter in changed for m in g.parameters) for b in g.bundles]
        self.residency.acquire(bundles, Mode.UPDATE)
        for bundle in bundles:
            bundle.written = True
        self.residency.release(bundles)

    def running(self, unit: Unit) -> bool:
        return bool(self._entries.get(unit))


def _inner_modules(unit: Unit, hooked: set[nn.Module]) -> list[nn.Module]:
    """Modules with parameters of their own inside a unit. Some libraries run them without the unit's own call, as when
    a block's `forward` is wrapped by a checkpoint: the recomputation calls the inside only.
    """
    inside = dict.fromkeys(m for top in unit.modules for m in top.modules() if m not in hooked)
    own = set(unit.parameters)
    return [m for m in inside if any(p in own for p in m.parameters(recurse=False))]


class _HookPlace:
    """A pair of hooks under the same two ids in many modules. torch.compile guards on the ids of hooks: with ids of its
    own in every module, it would compile equal blocks one by one, up to its limit, and run the rest uncompiled.
    """

    def __init__(self) -> None:
        self._enter_id = RemovableHandle.next_id
        RemovableHandle.next_id += 2

    def hook(self, module: nn.Module, enter: Any, leave: Any) -> list[RemovableHandle]:
        """Around everything: before the hooks that exist, and after them; also where the forward raises."""
        following, RemovableHandle.next_id = RemovableHandle.next_id, self._enter_id
        try:
            return [
                module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True),
                module.register_forward_hook(leave, with_kwargs=True, always_call=True),
            ]
        finally:
            RemovableHandle.next_id = following


@dataclass(slots=True, frozen=True)
class _Enter(LeavesNoCopy):
    hooks: UnitHooks
    unit: Unit
    module: nn.Module

    @not_traced
    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if module is self.module:
            if (current := region()) is not None:
                self.hooks.cuts.entered(current, self.unit, self.unit.name)
            if self.hooks.park is not None and not self.hooks.saved.in_backward():
                self.hooks.park(self.unit)
            self.hooks.enter(self.unit)


@dataclass(slots=True, frozen=True)
class _Leave(LeavesNoCopy):
    hooks: UnitHooks
    unit: Unit
    module: nn.Module

    @_disable_dynamo
    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if module is self.module:
            self.hooks.leave(self.unit)


@dataclass(slots=True, frozen=True)
class _EnterInner(LeavesNoCopy):
    """Traced code needs none inside a unit, since the unit's own hook has broken the graph around it."""

    hooks: UnitHooks
    unit: Unit
    module: nn.Module

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not torch.compiler.is_compiling() and module is self.module:
            self.hooks.enter(self.unit)


@dataclass(slots=True, frozen=True)
class _LeaveInner(LeavesNoCopy):
    hooks: UnitHooks
    unit: Unit
    module: nn.Module

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if not torch.compiler.is_compiling() and module is self.module:
            self.hooks.leave(self.unit)


@dataclass(slots=True, frozen=True)
class _EnterRoot(LeavesNoCopy):
    """Our saved-tensor hooks cover the whole forward of the model, so that a parameter used around its blocks is packed
    too. `pushed` is shared with the hook that leaves.
    """

    saved: SavedTensorHooks
    module: nn.Module
    pushed: list[bool]
    cuts: Cuts | None

    @not_traced
    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if module is self.module:
            if self.cuts is not None and (current := region()) is not None:
                self.cuts.entered(current, module, "the model")
            self.pushed.append(self.saved.push())


@dataclass(slots=True, frozen=True)
class _LeaveRoot(LeavesNoCopy):
    saved: SavedTensorHooks
    module: nn.Module
    pushed: list[bool]

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if module is self.module and self.pushed and self.pushed.pop():
            self.saved.pop()
