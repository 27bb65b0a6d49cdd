"""The optimizer's step, group by group, with the caller's own arithmetic (barrier: everything is updated inside
`step()`).

Our hook runs after all of the user's step pre-hooks: it updates every group through a shadow, then takes the gradients
away, so that the caller's own `step` finds nothing to do but its counters; our post-hook, before all of the user's,
puts them back. Gradients are kept: `zero_grad` frees them, as in plain torch.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tiermem.bundle import Mode
from tiermem.errors import Unsupported
from tiermem_client.grads import GradBook, GradHandle, GradSlot
from tiermem_client.heap import large_blocks_mapped
from tiermem_client.optimizer_state import StateStore, forms_of, is_large
from tiermem_client.residency import Bundle, Residency
from tiermem_client.shadow import OptimizerForm, StepRecord, shadow_step
from tiermem_client.storage_swap import alias
from tiermem_client.units import Group, ManagedParameter

_set_version: Callable[[tuple[torch.Tensor, ...], tuple[int, ...]], None] = (
    torch._C._autograd._unsafe_set_version_counter
)


@dataclass(slots=True, eq=False)
class Piece:
    """What one shadow Parameter stands for: a whole parameter, or `count` elements of a tiled one from `first` on."""

    managed: ManagedParameter
    first: int
    count: int
    tile: int
    shadow: nn.Parameter
    state: dict[str, Any] = field(default_factory=dict)

    @property
    def whole(self) -> bool:
        return self.tile < 0

    def grad_view(self, real: torch.Tensor) -> torch.Tensor:
        return real if self.whole else real.view(-1)[self.first : self.first + self.count]

    def state_view(self, store: StateStore, key: str, like: torch.Tensor) -> torch.Tensor:
        place = store.places[self.managed.parameter][key]
        dense = bool(torch.ops.aten.is_non_overlapping_and_dense.default(like))
        return place.tensor(like.shape, like.stride() if dense else None, self.first)


@dataclass(slots=True, eq=False)
class GroupUpdate:
    """One group's update: its pieces, and the bundle indices that each step of it needs."""

    group: Group
    store: StateStore
    pieces: list[Piece]
    tiled: bool


@dataclass(slots=True)
class StepInProgress:
    """One `step()`, until all of it is committed. `handles` are the gradients that it was begun with.

    An error of the daemon interrupts a step between two transactions. Called again with the same gradients, `step()`
    goes on with what is not `done`: nothing is updated twice.
    """

    record: StepRecord
    handles: dict[nn.Parameter, weakref.ref[GradHandle]]
    done: set[Piece] = field(default_factory=set)
    versioned: set[nn.Parameter] = field(default_factory=set)

    def goes_on_with(self, handles: dict[nn.Parameter, GradHandle]) -> bool:
        return len(handles) == len(self.handles) and all(
            p in self.handles and self.handles[p]() is h for p, h in handles.items()
        )


class Updater:
    """Streams `optimizer` over the groups. Used by the user's thread only."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        residency: Residency,
        book: GradBook,
        groups: Iterable[Group],
        forms: dict[nn.Parameter, OptimizerForm],
    ) -> None:
        self.optimizer, self.residency, self.book = optimizer, residency, book
        self.updates = [self._plan(group, forms) for group in groups]
        self.steps = 0
        self.on_state: Callable[[torch.Tensor, list[Bundle]], None] = lambda tensor, bundles: None
        self._taken: list[tuple[nn.Parameter, GradHandle]] = []
        self._step: StepInProgress | None = None

    def _plan(self, group: Group, forms: dict[nn.Parameter, OptimizerForm]) -> GroupUpdate:
        members = group.parameters
        alone = (
            len(members) == 1
            and members[0].whole
            and members[0].parameter in forms
            and forms[members[0].parameter].elementwise
        )
        store = StateStore(group)
        store.build(
            {p: form.states for p, form in forms.items() if any(m.parameter is p for m in members)}, self.residency
        )
        if group.tiled and alone:
            total, step = members[0].parameter.numel(), group.tile_elements
            pieces = [
                _piece(members[0], first, min(step, total - first), first // step) for first in range(0, total, step)
            ]
            return GroupUpdate(group, store, pieces, True)
        return GroupUpdate(group, store, [_piece(m, 0, m.parameter.numel(), -1) for m in members], False)

    # -- hooks

    def install(self) -> Callable[[], None]:
        """Hook the optimizer; returns the undo."""
        optimizer = self.optimizer
        pre, post = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
        optimizer._optimizer_step_pre_hooks = _OursLast(pre)
        optimizer._optimizer_step_post_hooks = _OursFirst(post)
        handles = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]
        optimizer._optimizer_step_pre_hooks.ours = handles[0].id
        optimizer._optimizer_step_post_hooks.ours = handles[1].id

        def undo() -> None:
            for handle in handles:
                handle.remove()

        return undo

    def _before_step(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if any(a is not None for a in args[1:]) or any(v is not None for v in kwargs.values()):
            raise Unsupported(
                "step(closure) re-evaluates the model inside the update, which cannot be streamed; "
                "call step() without one"
            )
        self._restore()
        taken: dict[nn.Parameter, tuple[int, GradHandle]] = {}
        for index, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                if type(parameter.grad) is GradHandle:
                    taken[parameter] = (index, parameter.grad)
        handles = {p: handle for p, (_, handle) in taken.items()}
        if self._step is None or not self._step.goes_on_with(handles):
            references = {p: weakref.ref(handle) for p, handle in handles.items()}
            self._step = StepInProgress(StepRecord.capture(optimizer), references)
        self.book.settle()
        owner = {p: update for update in self.updates for p in self._update_group(update, self._step, taken)}
        self._step = None
        for parameter in taken:  # in the optimizer's order, which is that of its state_dict
            self._show_state(owner[parameter], parameter)
        self.steps += 1
        for parameter, (_, handle) in taken.items():
            self._taken.append((parameter, handle))
            parameter.grad = None

    def _after_step(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._restore()

    def _restore(self) -> None:
        """Put the gradients back; also after a step of the user's that raised."""
        while self._taken:
            parameter, handle = self._taken.pop()
            if parameter.grad is None:
                parameter.grad = handle

    # -- the update

    def _update_group(
        self, update: GroupUpdate, step: StepInProgress, taken: dict[nn.Parameter, tuple[int, GradHandle]]
    ) -> tuple[nn.Parameter, ...]:
        """Update a group's parameters that have gradients; returns them."""
        pieces = [piece for piece in update.pieces if piece.managed.parameter in taken]
        for batch in [[piece] for piece in pieces] if update.tiled or not pieces else [pieces]:
            if batch[0] not in step.done:
                self._update(update, batch, step.record, taken)
                step.done.update(batch)
        parameters = tuple(dict.fromkeys(p.managed.parameter for p in pieces))
        changed = tuple(p for p in parameters if p not in step.versioned)
        _set_version(changed, tuple(p._version + 1 for p in changed))
        step.versioned.update(changed)
        return parameters

    def _update(
        self,
        update: GroupUpdate,
        pieces: list[Piece],
        record: StepRecord,
        taken: dict[nn.Parameter, tuple[int, GradHandle]],
    ) -> None:
        """One transaction: parameters, gradients where the optimizer changes them, and state of these pieces."""
        tile = pieces[0].tile
        slots = [taken[p.managed.parameter][1].slot for p in pieces]
        parameters = _of_tile(update.group.bundles, tile)
        grads = list(dict.fromkeys(b for slot in slots if not slot.zero for b in _of_tile(slot.store.bundles, tile)))
        state = self._state_bundles(update.store, tile)
        stored = [b for b in state if b.bundle_id is not None]
        blank = [b for b in state if b.bundle_id is None]  # had before anything changes, as there may be no room
        held: list[Bundle] = []
        try:
            for bundles, mode in (
                (parameters, Mode.UPDATE),
                (grads, Mode.UPDATE),
                (stored, Mode.UPDATE),
                (blank, Mode.CREATE),
            ):
                self.residency.acquire(bundles, mode)
                held += bundles
            shadows = self._prepare(pieces, slots)
            members = [(taken[p.managed.parameter][0], p.shadow) for p in pieces]
            states = {p.shadow: p.state for p in pieces}
            with (
                contextlib.nullcontext() if all(states.values()) else large_blocks_mapped()
            ):  # new state is moved out
                shadow_step(self.optimizer, record, members, states)
            for bundle in parameters:
                bundle.written = True
            for piece, slot, grad in zip(pieces, slots, shadows, strict=True):
                piece.state = states[piece.shadow]
                piece.shadow.grad = None
                if grad._version and not slot.zero:
                    for bundle in _of_tile(slot.store.bundles, tile):
                        bundle.written = True
            held += self._absorb(update, pieces, tile, held)
            self.residency.commit(held)
        finally:
            self.residency.release(held)

    def _prepare(self, pieces: list[Piece], slots: list[GradSlot]) -> list[torch.Tensor]:
        grads = []
        for piece, slot in zip(pieces, slots, strict=True):
            whole = self.book.readable(slot) if slot.zero else slot.real
            grad = piece.grad_view(whole)
            piece.shadow.grad = grad
            grads.append(grad)
        return grads

    def _state_bundles(self, store: StateStore, tile: int) -> list[Bundle]:
        return [b for bundles in store.sets for b in _of_tile(bundles, tile)]

    def _absorb(self, update: GroupUpdate, pieces: list[Piece], tile: int, held: list[Bundle]) -> list[Bundle]:
        """Bring state tensors that the step has made into the store; returns what it leased for that. Marks state as
        written.
        """
        store = update.store
        forms = store.places
        needed = {p.managed.parameter: forms_of(p.shadow, p.state) for p in pieces}
        if any(
            {f.key: f for f in fs} != {k: pl.form for k, pl in forms.get(p, {}).items()}
            for p, fs in needed.items()
            if fs
        ):
            self._rebuild(update, needed, held)
        created = [b for b in self._state_bundles(store, tile) if b.bundle_id is None] if any(needed.values()) else []
        self.residency.acquire(created, Mode.CREATE)
        for piece in pieces:
            for key, value in piece.state.items():
                if is_large(piece.shadow, value):
                    view = piece.state_view(store, key, value)
                    if value.data_ptr() != view.data_ptr():
                        view.copy_(value)
                        piece.state[key] = view
        if any(needed.values()):
            for bundle in self._state_bundles(store, tile):
                bundle.written = True
        return created

    def _rebuild(self, update: GroupUpdate, needed: dict[nn.Parameter, tuple[Any, ...]], held: list[Bundle]) -> None:
        """The state has another form than was known: take all of it out, and make room for what there is now."""
        old = update.store.bundles
        leased = [b for b in old if b not in held and b.bundle_id is not None]
        self.residency.acquire(leased, Mode.READ)
        for piece in update.pieces:
            piece.state = {k: v.clone() if is_large(piece.shadow, v) else v for k, v in piece.state.items()}
        self.residency.commit([b for b in held if b in old])
        self.residency.release([*leased, *(b for b in held if b in old)])
        held[:] = [b for b in held if b not in old]
        forms = {p: tuple(place.form for place in places.values()) for p, places in update.store.places.items()}
        update.store.build({**forms, **{p: fs for p, fs in needed.items() if fs}}, self.residency)

    # -- what the user sees

    def _show_state(self, update: GroupUpdate, parameter: nn.Parameter) -> None:
        """Make `optimizer.state[parameter]` name the stored tensors and the live scalars."""
        piece = next(p for p in update.pieces if p.managed.parameter is parameter)
        if not piece.state:
            return
        visible = self.optimizer.state[parameter]
        for key in [k for k in visible if k not in piece.state]:
            del visible[key]
        for key, value in piece.state.items():
            if is_large(piece.shadow, value):
                place = update.store.places[parameter][key]
                shown = visible.get(key)
                if not isinstance(shown, torch.Tensor) or shown.data_ptr() != place.address:
                    shape, stride = (value.shape, value.stride()) if piece.whole else (parameter.shape, None)
                    visible[key] = place.tensor(shape, stride)
                    self.on_state(visible[key], list(place.bundles))
            else:
                visible[key] = value

    def show_all(self) -> None:
        """Show stored state anew, after `on_state` was set."""
        for update in self.updates:
            for parameter in update.store.places:
                visible = self.optimizer.state.get(parameter)
                for key, place in update.store.places[parameter].items():
                    if visible and key in visible:
                        self.on_state(visible[key], list(place.bundles))

    def adopt(self) -> None:
        """Take state that exists in `optimizer.state` (from earlier steps, or a checkpoint) into the store; the tensors
        are copied.
        """
        for update in self.updates:
            self._adopt_group(update)

    def _adopt_group(self, update: GroupUpdate) -> None:
        state = self.optimizer.state
        present = {
            p.managed.parameter: dict(state[p.managed.parameter])
            for p in update.pieces
            if state.get(p.managed.parameter)
        }
        if not present:
            for piece in update.pieces:
                piece.state = {}
            return
        forms = {p: forms_of(p, values) for p, values in present.items()}
        known = {p: tuple(place.form for place in places.values()) for p, places in update.store.places.items()}
        if not update.store.fits({**known, **{p: fs for p, fs in forms.items() if fs}}):
            update.store.build({**known, **{p: fs for p, fs in forms.items() if fs}}, self.residency)
        for batch in [[piece] for piece in update.pieces] if update.tiled else [update.pieces]:
            bundles = self._state_bundles(update.store, batch[0].tile) if any(forms.values()) else []
            fresh = [b for b in bundles if b.bundle_id is None]
            old = [b for b in bundles if b.bundle_id is not None]
            self.residency.acquire(fresh, Mode.CREATE)
            self.residency.acquire(old, Mode.UPDATE)
            for piece in batch:
                piece.state = {}
                for key, value in present.get(piece.managed.parameter, {}).items():
                    if is_large(piece.managed.parameter, value):
                        part = value if piece.whole else value.reshape(-1)[piece.first : piece.first + piece.count]
                        view = piece.state_view(update.store, key, part)
                        view.copy_(part)
                        piece.state[key] = view
                    else:
                        piece.state[key] = value.clone() if isinstance(value, torch.Tensor) else value
            for bundle in bundles:
                bundle.written = True
            self.residency.release(bundles)
        for parameter in present:
            self._show_state(update, parameter)

    def give_back(self) -> None:
        """Put ordinary tensors in the place of stored ones in `optimizer.state`."""
        self.on_state = lambda tensor, bundles: None  # guards have been taken away
        if self._step is not None:  # an error interrupted it: what it has updated has its new state
            for update in self.updates:
                for parameter in dict.fromkeys(p.managed.parameter for p in update.pieces):
                    if parameter in self._step.versioned:
                        self._show_state(update, parameter)
        for update in self.updates:
            for parameter, places in update.store.places.items():
                visible = self.optimizer.state.get(parameter)
                if not visible:
                    continue
                bundles = self.state_bundles_of(parameter)
                self.residency.acquire(bundles, Mode.READ)
                for key in places:
                    if key in visible:
                        visible[key] = visible[key].clone()
                self.residency.release(bundles)

    def working_sets(self) -> list[list[Bundle]]:
        """The bundles of each transaction, for the floor."""
        sets = []
        for update in self.updates:
            stores = self.book.stores.get(update.group, ())
            for tile in sorted({piece.tile for piece in update.pieces}):
                grads = [b for store in stores for b in _of_tile(store.bundles, tile)]
                sets.append([*_of_tile(update.group.bundles, tile), *grads, *self._state_bundles(update.store, tile)])
        return sets

    def state_bundles_of(self, parameter: nn.Parameter) -> list[Bundle]:
        """What must be leased to read the parameter's large state tensors."""
        for update in self.updates:
            places = update.store.places.get(parameter)
            if places:
                return [
                    b
                    for b in dict.fromkeys(b for place in places.values() for b in place.bundles)
                    if b.bundle_id is not None
                ]
        return []

    def state_addresses_of(self, parameter: nn.Parameter) -> frozenset[int]:
        """Where the parameter's stored state tensors begin."""
        return frozenset(place.address for u in self.updates for place in u.store.places.get(parameter, {}).values())


def _piece(managed: ManagedParameter, first: int, count: int, tile: int) -> Piece:
    storage, source = managed.storage, managed.parameter
    size = source.element_size()
    if tile < 0:
        view = alias(
            storage.address, storage.nbytes, source.dtype, managed.shape, managed.stride, managed.storage_offset
        )
    else:
        view = alias(storage.address + first * size, count * size, source.dtype, (count,))
    shadow = nn.Parameter(view, requires_grad=source.requires_grad)
    shadow.__dict__.update({k: v for k, v in source.__dict__.items() if not k.startswith("_")})
    return Piece(managed, first, count, tile, shadow)


def _of_tile(bundles: list[Bundle], tile: int) -> list[Bundle]:
    return list(bundles) if tile < 0 else [bundles[tile]]


class _Placed(OrderedDict[int, Any]):
    """Hooks with ours at one end of the order, however late the user's were registered. Weakly referenceable, as
    handles need it.
    """

    ours: int = -1


class _OursLast(_Placed):
    def values(self) -> Any:
        return [hook for key, hook in self.items() if key != self.ours] + [
            hook for key, hook in self.items() if key == self.ours
        ]


class _OursFirst(_Placed):
    def values(self) -> Any:
        return [hook for key, hook in self.items() if key == self.ours] + [
            hook for key, hook in self.items() if key != self.ours
        ]
