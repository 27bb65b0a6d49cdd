"""The optimizer's step, group by group, with the caller's own arithmetic.

Our hook runs after all of the user's step pre-hooks: it records the step and makes each group's part of it pending,
then takes the gradients away, so that the caller's own `step` finds nothing to do but its counters; our post-hook,
before all of the user's, puts them back. Gradients are kept: `zero_grad` frees them, as in plain torch.

*Deferred*: a group is updated when something of it is needed next, mostly by its unit's next forward: its parameters
are loaded once for both. Otherwise, where everything fits anyway, or where somebody could see that it was not, it is
updated inside `step()`.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._compile import _disable_dynamo

from tiermem.errors import Unsupported
from tiermem.trace import STEPS, Span
from tiermem_client.compiled import refuse_capture, stream_is_capturing
from tiermem_client.early_updates import EarlyUpdates, InBackward
from tiermem_client.grad_handles import GradHandle
from tiermem_client.grads import GradBook
from tiermem_client.hook_order import OursFirst, OursLast
from tiermem_client.memory import Bundle
from tiermem_client.optimizer_state import StateStore
from tiermem_client.pending import Asked, PendingUpdate, SettlingState, StepInProgress, is_watched
from tiermem_client.pieces import GroupUpdate, of_tile, plan_update
from tiermem_client.residency import Residency
from tiermem_client.shadow import OptimizerForm, StepRecord, as_called_from_python, own_modes
from tiermem_client.shown_state import ShownState
from tiermem_client.transactions import Transactions
from tiermem_client.units import Group

_set_version: Callable[[tuple[torch.Tensor, ...], tuple[int, ...]], None] = (
    torch._C._autograd._unsafe_set_version_counter
)

_past_guards = torch._C.DisableTorchFunctionSubclass


class Updater:
    """Streams `optimizer` over the groups. `step()` is the user's thread's; any thread may apply what is pending.

    `deferred`: groups wait until they are needed.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        residency: Residency,
        book: GradBook,
        groups: Iterable[Group],
        forms: dict[nn.Parameter, OptimizerForm],
        in_backward: InBackward = InBackward.NEVER,
    ) -> None:
        self.optimizer, self.residency, self.book = optimizer, residency, book
        self.transactions = Transactions(optimizer, residency, book)
        self.updates = [self._plan(group, forms) for group in groups]
        self.shown = ShownState(optimizer, residency, self.updates)
        self.steps = 0
        self.deferred = False
        self.on_step: Callable[[], None] = lambda: None
        self.on_barrier: Callable[[str], None] = lambda text: None  # called once
        self._began_s = 0.0
        self.capturing: Callable[[], bool] = stream_is_capturing
        self._taken: list[tuple[nn.Parameter, GradHandle]] = []
        self._step: StepInProgress | None = None
        self._pending: dict[nn.Parameter, PendingUpdate] = {}  # changed under the client lock
        self._updated: set[nn.Parameter] = set()
        self._barrier_told = False
        self.early = EarlyUpdates(self, self.updates, in_backward)
        book.on_accumulated = self.early.accumulated
        book.closed = in_backward is InBackward.OPTED_IN

    def _plan(self, group: Group, forms: dict[nn.Parameter, OptimizerForm]) -> GroupUpdate:
        store, mine = StateStore(group), {m.parameter for m in group.parameters}
        store.build({p: form.states for p, form in forms.items() if p in mine}, self.residency)
        return plan_update(group, forms, store)

    def watch_state(self) -> None:
        """Reading `optimizer.state` applies what is pending."""
        plain: Any = self.optimizer.state
        watched: Any = SettlingState(dict(dict.items(plain)), self.settle)
        self.optimizer.state = watched

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

        self.watch_state()

        def undo() -> None:
            for handle in handles:
                handle.remove()
            optimizer.state = defaultdict(dict, dict.items(optimizer.state))

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
        self.residency.session.check_usable()
        self._restore()
        taken: dict[nn.Parameter, tuple[int, GradHandle]] = {}
        with _past_guards():
            for index, group in enumerate(optimizer.param_groups):
                for parameter in group["params"]:
                    if type(grad := parameter.grad) is GradHandle:
                        taken[parameter] = (index, grad)
        handles = {p: handle for p, (_, handle) in taken.items()}
        if self._step is None or not self._step.goes_on_with(handles):
            self._begin(taken, handles)
        assert self._step is not None
        for pending in self._step.pending:
            if not pending.finished and not self._may_wait(pending):
                self._apply(pending)
        done = {p: part.update for part in self._step.pending if part.finished for p in part.asked}
        done |= self._step.early
        self._step = None
        self.steps += 1
        with _past_guards():
            for parameter, (_, handle) in taken.items():  # in the optimizer's order, which is that of its state_dict
                if parameter in done:
                    self.shown.show(done[parameter], parameter)
                self._taken.append((parameter, handle))
                parameter.grad = None

    def _begin(
        self, taken: dict[nn.Parameter, tuple[int, GradHandle]], handles: dict[nn.Parameter, GradHandle]
    ) -> None:
        """Make the parts of a new step pending; what is left of one before is applied first."""
        if self._step is not None:
            self._forget(self._step)
        mine = {
            u: dict.fromkeys(p.managed.parameter for p in u.pieces if p.managed.parameter in taken)
            for u in self.updates
        }
        for pending in set(self._pending.values()):
            if mine[pending.update]:
                self._apply(pending)
        record = StepRecord.capture(self.optimizer)
        self._change_now(handles, record)
        self.book.settle()
        asked = {p: Asked.now(index, handle.slot) for p, (index, handle) in taken.items()}
        early = self.early.stepped(asked, record)
        parts = [
            PendingUpdate.of(update, record, {p: asked[p] for p in parameters})
            for update, parameters in mine.items()
            if parameters and update not in early
        ]
        self._queue(parts)
        done = {p: update for update in early for p in mine[update]}
        if self.early.mode is InBackward.OPTIMISTIC:
            _bump(done)
        self._step = StepInProgress(parts, {p: weakref.ref(handle) for p, handle in handles.items()}, done)

    def _change_now(self, handles: Mapping[nn.Parameter, GradHandle], record: StepRecord) -> None:
        """Make the changes that wait of gradients which the optimizer writes to, or may."""
        self.book.questions.stepped()
        for update in self.updates:
            for parameter in dict.fromkeys(piece.managed.parameter for piece in update.pieces):
                writes = update.changes_grads or record.unscales_silently or parameter not in self._updated
                if writes and (handle := handles.get(parameter)) is not None:
                    self.book.make_changes(handle.slot)

    def _queue(self, parts: list[PendingUpdate]) -> None:
        with self.residency.session.lock:
            for pending in parts:
                self.residency.outdate(pending.bundles, partial(self._apply, pending))
                self._pending.update(dict.fromkeys(pending.asked, pending))
                _bump(pending.asked)

    def was_updated(self, parameters: Mapping[nn.Parameter, Asked]) -> bool:
        """Whether each of them has been updated before, so that its state is known."""
        return self._updated.issuperset(parameters)

    def apply_now(self, pending: PendingUpdate) -> None:
        """Update a group in place; its parameters have a new version."""
        self._queue([pending])
        self._apply(pending)

    def _forget(self, step: StepInProgress) -> None:
        """A step that was interrupted is not gone on with: another one is asked for."""
        for pending in step.pending:
            if not pending.finished:
                self._end(pending)

    def _may_wait(self, pending: PendingUpdate) -> bool:
        """Whether nobody could tell that the group is not updated yet."""
        if not self.deferred or self.residency.keeps_idle:
            return False
        if not self._updated.issuperset(pending.asked):  # what state there will be, and in which order, is not known
            return False
        who = self._who_could_tell(pending)
        if who and not self._barrier_told:
            self._barrier_told = True
            self.on_barrier(f"update: of {pending.update.group.unit!r} (at least) inside step(), as {who}")
        return not who

    def _who_could_tell(self, pending: PendingUpdate) -> str:
        """What of the script's would show that a group is not updated yet; empty where nothing would."""
        state: Any = self.optimizer.state
        if not isinstance(state, SettlingState):
            return "optimizer.state was replaced"
        if any(is_watched(state, piece) for piece in pending.pieces):
            return "the script keeps an entry of optimizer.state, or a tensor in it"
        if any(bundle.holders for bundle in pending.bundles):
            return "the script keeps an array or a storage of its tensors"
        return ""

    def waiting(self) -> list[PendingUpdate]:
        """What is pending now."""
        return list(dict.fromkeys(self._pending.values()))

    def settle(self, parameter: nn.Parameter | None = None) -> None:
        """Apply what is pending for a parameter, or for all. Raises as the update would have, inside `step()`."""
        self.early.looked_at(parameter)
        if self._pending:
            some = list(self._pending.values()) if parameter is None else [self._pending.get(parameter)]
            for pending in dict.fromkeys(some):
                if pending is not None:
                    self._apply(pending)

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

    def _apply(self, pending: PendingUpdate) -> None:
        """Update a group, unless that is done or under way here. One thread does it; the others wait."""
        lock, me = self.residency.session.lock, threading.get_ident()
        with lock:
            if pending.thread == me:
                return
            while pending.thread and not pending.finished:
                self.residency.session.check_usable()
                lock.wait(1.0)
            if pending.finished:
                return
            pending.thread = me
        try:
            with own_modes(), as_called_from_python():
                self.book.settle()
                for batch in pending.update.batches(pending.pieces):
                    if batch and batch[0] not in pending.done:
                        self.transactions.run(pending.update, pending.record, pending.asked, batch)
                        pending.done.update(batch)
                self.book.settle()
            self._end(pending)
        finally:
            with lock:
                pending.thread = 0
                lock.notify_all()
        self._updated.update(pending.asked)
        if self._step is None:  # it was deferred
            with _past_guards():
                for parameter in pending.asked:
                    self.shown.show(pending.update, parameter)

    def _end(self, pending: PendingUpdate) -> None:
        with self.residency.session.lock:
            pending.finished = True
            self.residency.updated(pending.bundles)
            for parameter in pending.asked:
                del self._pending[parameter]
            for store in pending.stores:
                self.book.discard_if_idle(store)

    def working_sets(self, group: Group | None = None) -> list[list[Bundle]]:
        """The bundles of each transaction, of a group or of all, for the floor."""
        sets = []
        for update in self.updates:
            if group is not None and update.group is not group:
                continue
            stores = self.book.stores.get(update.group, ())
            for tile in sorted({piece.tile for piece in update.pieces}):
                grads = [b for store in stores for b in of_tile(store.bundles, tile)]
                sets.append([*of_tile(update.group.bundles, tile), *grads, *update.bundles_of_state(tile)])
        return sets

    def conclude(self) -> frozenset[nn.Parameter]:
        """Apply all that is pending, but for a step that an error interrupted: it stays as it is. What that has updated
        is returned; its state has not been shown.
        """
        self.book.closed = False
        self.early.end()
        step, self._step = self._step, None
        if step is not None:
            self._forget(step)
        self.settle()
        parts = [] if step is None else step.pending
        return frozenset(piece.managed.parameter for pending in parts for piece in pending.done)


def _bump(parameters: Iterable[nn.Parameter]) -> None:
    """The step changes them: a graph that has saved them is stale."""
    changed = tuple(parameters)
    _set_version(changed, tuple(p._version + 1 for p in changed))


@_disable_dynamo
def _refuse_compiled() -> None:
    """Called from what torch.compile has made of `step`, since it does not trace into this."""
    raise Unsupported(
        "torch.compile of optimizer.step() computes in another order than the step that tiermem streams, "
        "with other roundings; compile the model (or a function of forward and loss) and call step() outside"
    )
