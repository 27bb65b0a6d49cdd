"""The optimizer's step, group by group, with the caller's own arithmetic (barrier: everything is updated inside
`step()`).

Our hook runs after all of the user's step pre-hooks: it updates every group through a shadow, then takes the gradients
away, so that the caller's own `step` finds nothing to do but its counters; our post-hook, before all of the user's,
puts them back. Gradients are kept: `zero_grad` frees them, as in plain torch.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._compile import _disable_dynamo

from tiermem.bundle import Mode
from tiermem.errors import Unsupported
from tiermem.plan import Phase
from tiermem.trace import STEPS, Span
from tiermem_client.compiled import refuse_capture, stream_is_capturing
from tiermem_client.grads import GradBook, GradHandle, GradSlot
from tiermem_client.heap import large_blocks_mapped
from tiermem_client.hook_order import OursFirst, OursLast
from tiermem_client.memory import Bundle
from tiermem_client.optimizer_state import StateStore, forms_of, is_large
from tiermem_client.pieces import GroupUpdate, Piece, of_tile, plan_update
from tiermem_client.residency import Residency
from tiermem_client.shadow import OptimizerForm, StepRecord, shadow_step
from tiermem_client.shown_state import ShownState
from tiermem_client.units import Group

_set_version: Callable[[tuple[torch.Tensor, ...], tuple[int, ...]], None] = (
    torch._C._autograd._unsafe_set_version_counter
)

_past_guards = torch._C.DisableTorchFunctionSubclass


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
        self.shown = ShownState(optimizer, residency, self.updates)
        self.steps = 0
        self.on_step: Callable[[], None] = lambda: None
        self._began_s = 0.0
        self.capturing: Callable[[], bool] = stream_is_capturing
        self._taken: list[tuple[nn.Parameter, GradHandle]] = []
        self._step: StepInProgress | None = None

    def _plan(self, group: Group, forms: dict[nn.Parameter, OptimizerForm]) -> GroupUpdate:
        store, mine = StateStore(group), {m.parameter for m in group.parameters}
        store.build({p: form.states for p, form in forms.items() if p in mine}, self.residency)
        return plan_update(group, forms, store)

    # -- hooks

    def install(self) -> Callable[[], None]:
        """Hook the optimizer; returns the undo."""
        optimizer = self.optimizer
        pre, post = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
        optimizer._optimizer_step_pre_hooks = OursLast(pre)
        optimizer._optimizer_step_post_hooks = OursFirst(post)
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
        if torch.compiler.is_compiling():
            _refuse_compiled()
        if self.capturing():
            refuse_capture("optimizer.step()")
        self._began_s = time.monotonic()
        if any(a is not None for a in args[1:]) or any(v is not None for v in kwargs.values()):
            raise Unsupported(
                "step(closure) re-evaluates the model inside the update, which cannot be streamed; "
                "call step() without one"
            )
        self._restore()
        taken: dict[nn.Parameter, tuple[int, GradHandle]] = {}
        with _past_guards():
            for index, group in enumerate(optimizer.param_groups):
                for parameter in group["params"]:
                    if type(grad := parameter.grad) is GradHandle:
                        taken[parameter] = (index, grad)
        handles = {p: handle for p, (_, handle) in taken.items()}
        if self._step is None or not self._step.goes_on_with(handles):
            references = {p: weakref.ref(handle) for p, handle in handles.items()}
            self._step = StepInProgress(StepRecord.capture(optimizer), references)
        self.book.settle()
        owner = {p: update for update in self.updates for p in self._update_group(update, self._step, taken)}
        self._step = None
        self.steps += 1
        with _past_guards():
            for parameter, (_, handle) in taken.items():  # in the optimizer's order, which is that of its state_dict
                self.shown.show(owner[parameter], parameter)
                self._taken.append((parameter, handle))
                parameter.grad = None

    def _after_step(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._restore()
        self.residency.rests()
        self.residency.session.trace.add(Span(STEPS, "optimizer.step()", self._began_s, time.monotonic()))
        self.on_step()

    def _restore(self) -> None:
        """Put the gradients back; also after a step of the user's that raised."""
        with _past_guards():
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
        for batch in update.batches(pieces):
            if batch and batch[0] not in step.done:
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
        parameters = of_tile(update.group.bundles, tile)
        grads = list(dict.fromkeys(b for slot in slots if not slot.zero for b in of_tile(slot.store.bundles, tile)))
        state = update.bundles_of_state(tile)
        stored = [b for b in state if b.stored]
        blank = [b for b in state if not b.stored]  # had before anything changes, as there may be no room
        held: list[Bundle] = []
        self.residency.accessed(f"{update.group.unit}/{parameters[0].spec.spec_id}", Phase.UPDATE)
        try:
            for bundles, mode in (
                (parameters, Mode.UPDATE),
                (grads, Mode.UPDATE),
                (stored, Mode.UPDATE),
                (blank, Mode.CREATE),
            ):
                self.residency.acquire(bundles, mode)
                held += bundles
            grads_now = self._prepare(pieces, slots)
            versions = [grad._version for grad in grads_now]
            members = [(taken[p.managed.parameter][0], p.shadow) for p in pieces]
            states = {p.shadow: p.state for p in pieces}
            fresh = not all(states.values())  # new state is anonymous until it has been moved
            with large_blocks_mapped() if fresh else contextlib.nullcontext():
                shadow_step(self.optimizer, record, members, states)
            for bundle in parameters:
                bundle.written = True
            for piece, slot, grad, version in zip(pieces, slots, grads_now, versions, strict=True):
                piece.state = states[piece.shadow]
                piece.shadow.grad = None
                if grad._version != version or record.unscales_silently:
                    self._keep_changed(piece, slot, grad)
            held += self._absorb(update, pieces, tile, held)
            self.residency.conclude(held)
        finally:
            self.residency.release(held)

    def _keep_changed(self, piece: Piece, slot: GradSlot, grad: torch.Tensor) -> None:
        """The optimizer wrote to a gradient (SGD with nesterov does), which the script may read afterwards."""
        if slot.zero:  # it saw zeros that nobody has stored
            piece.grad_view(self.book.writable(slot)).copy_(grad)
        for bundle in of_tile(slot.store.bundles, piece.tile):
            bundle.written = True

    def _prepare(self, pieces: list[Piece], slots: list[GradSlot]) -> list[torch.Tensor]:
        grads = []
        for piece, slot in zip(pieces, slots, strict=True):
            whole = self.book.readable(slot) if slot.zero else slot.real
            grad = piece.grad_view(whole)
            piece.shadow.grad = grad
            grads.append(grad)
        return grads

    def _absorb(self, update: GroupUpdate, pieces: list[Piece], tile: int, held: list[Bundle]) -> list[Bundle]:
        """Bring state tensors that the step has made into the store; returns what it leased for that. Marks state as
        written.
        """
        store = update.store
        if all(piece.settled for piece in pieces):
            if any(piece.stored for piece in pieces):
                for bundle in update.bundles_of_state(tile):
                    bundle.written = True
            return []
        forms = store.places
        needed = {p.managed.parameter: forms_of(p.shadow, p.state) for p in pieces}
        if any(
            {f.key: f for f in fs} != {k: pl.form for k, pl in forms.get(p, {}).items()}
            for p, fs in needed.items()
            if fs
        ):
            self._rebuild(update, needed, held)
        created = [b for b in update.bundles_of_state(tile) if not b.stored] if any(needed.values()) else []
        self.residency.acquire(created, Mode.CREATE)
        for piece in pieces:
            for key, value in piece.state.items():
                if is_large(piece.shadow, value):
                    view = piece.state_view(store, key, value)
                    if value.data_ptr() != view.data_ptr():
                        view.copy_(value)
                        piece.state[key] = view
                    piece.stored[key] = piece.state[key]
        if any(needed.values()):
            for bundle in update.bundles_of_state(tile):
                bundle.written = True
        return created

    def _rebuild(self, update: GroupUpdate, needed: dict[nn.Parameter, tuple[Any, ...]], held: list[Bundle]) -> None:
        """The state has another form than was known: take all of it out, and make room for what there is now."""
        old = update.store.bundles
        leased = [b for b in old if b not in held and b.stored]
        self.residency.acquire(leased, Mode.READ)
        for piece in update.pieces:
            piece.stored = {}
            piece.state = {k: v.clone() if is_large(piece.shadow, v) else v for k, v in piece.state.items()}
        self.residency.commit([b for b in held if b in old])
        self.residency.release([*leased, *(b for b in held if b in old)])
        held[:] = [b for b in held if b not in old]
        forms = {p: tuple(place.form for place in places.values()) for p, places in update.store.places.items()}
        update.store.build({**forms, **{p: fs for p, fs in needed.items() if fs}}, self.residency)

    def working_sets(self) -> list[list[Bundle]]:
        """The bundles of each transaction, for the floor."""
        sets = []
        for update in self.updates:
            stores = self.book.stores.get(update.group, ())
            for tile in sorted({piece.tile for piece in update.pieces}):
                grads = [b for store in stores for b in of_tile(store.bundles, tile)]
                sets.append([*of_tile(update.group.bundles, tile), *grads, *update.bundles_of_state(tile)])
        return sets

    @property
    def interrupted(self) -> frozenset[nn.Parameter]:
        """What a step has updated that an error interrupted."""
        return frozenset() if self._step is None else frozenset(self._step.versioned)


@_disable_dynamo
def _refuse_compiled() -> None:
    """Called from what torch.compile has made of `step`, since it does not trace into this."""
    raise Unsupported(
        "torch.compile of optimizer.step() computes in another order than the step that tiermem streams, "
        "with other roundings; compile the model (or a function of forward and loss) and call step() outside"
    )
