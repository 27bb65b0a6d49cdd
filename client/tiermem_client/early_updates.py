"""Updates inside backward, as soon as a group's gradients are complete: the disk would idle there, and what the update
reads besides the gradient is loaded once instead of twice.

*Optimistic*: the update is computed beside the present values (`twins`), which stay what everybody sees. `step()`
confirms it where it would compute the very same: nothing that the update has read was written since, and the step is
recorded with the same hyperparameters. Otherwise it is undone, and nobody could tell that it was. Tried where steps
before were like that, and kept to where steps become shorter by it (`rhythm`).

*Opted in*: the update is made in place and uses the gradient up. What would show that, or need the gradient, is
refused with a reason.
"""

from __future__ import annotations

import enum
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from tiermem.bundle import Mode
from tiermem.errors import ResourceExhausted, TierFull, TiermemError, Unsupported
from tiermem.units import format_size
from tiermem_client.grad_handles import GradHandle
from tiermem_client.grads import GradBook
from tiermem_client.memory import Bundle
from tiermem_client.optimizer_state import is_large
from tiermem_client.pending import Asked, PendingUpdate
from tiermem_client.pieces import GroupUpdate, Piece, of_tile
from tiermem_client.residency import Residency
from tiermem_client.rhythm import Rhythm, Trial, Trust
from tiermem_client.shadow import StepRecord, as_called_from_python, own_modes, shadow_step
from tiermem_client.twins import Twin, lease_for
from tiermem_client.units import ManagedParameter

_log = logging.getLogger("tiermem.job")
_past_guards = torch._C.DisableTorchFunctionSubclass


class InBackward(enum.Enum):
    """Whether updates are made inside backward."""

    NEVER = "never"
    OPTIMISTIC = "optimistic"
    OPTED_IN = "opted in"


@dataclass(slots=True)
class EarlyStats:
    """Groups that were updated inside backward: confirmed by `step()`, or undone. `step_s`, `deferred_step_s`: median
    seconds from one `step()` to the next with such updates and without, as last measured; None before.
    """

    confirmed: int = 0
    undone: int = 0
    step_s: float | None = None
    deferred_step_s: float | None = None


class Owner(Protocol):
    """The updater, as this needs it."""

    optimizer: torch.optim.Optimizer
    residency: Residency
    book: GradBook
    deferred: bool

    def was_updated(self, parameters: Mapping[nn.Parameter, Asked]) -> bool:
        """Whether each of them has been updated before, so that its state is known."""

    def apply_now(self, pending: PendingUpdate) -> None:
        """Update a group in place."""


@dataclass(slots=True, eq=False)
class _Early:
    """What was updated, from which gradients, with which hyperparameters. `versions`: of all that it has read."""

    asked: dict[nn.Parameter, Asked]
    record: StepRecord
    versions: dict[Bundle, int] = field(default_factory=dict)
    scalars: dict[Piece, dict[str, Any]] = field(default_factory=dict)


class EarlyUpdates:
    """Of one job. `accumulated` is called by the thread that runs backward; everything else by the user's."""

    def __init__(
        self,
        owner: Owner,
        updates: list[GroupUpdate],
        mode: InBackward,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.owner, self.mode = owner, mode
        self.stats = EarlyStats()
        self.on_stop: Callable[[str], None] = lambda text: None  # called once
        self._updates = {p.managed.parameter: update for update in updates for p in update.pieces}
        self._rhythm = Rhythm(self._updates)
        self._trust = Trust()
        self._trial = Trial()
        self._clock, self._stepped_s = clock, clock()
        self._twins: dict[GroupUpdate, Twin] = {}
        self._done: dict[GroupUpdate, _Early] = {}
        self._index: dict[nn.Parameter, int] = {}  # of each parameter's group in the step before
        self._record: StepRecord | None = None

    # -- inside backward

    def accumulated(self, managed: ManagedParameter) -> None:
        """A gradient was made or added to. Raises as an update does."""
        update = self._rhythm.accumulated(managed.parameter)
        if update is None or self.mode is InBackward.NEVER:
            return
        asked = self._asked(update)
        if not asked or not self.owner.was_updated(asked):
            return
        if self.mode is InBackward.OPTED_IN:
            self._use_up(update, asked)
        elif self._may_try(update, asked) and self._has_room(update):
            self._try(update, asked)

    def _asked(self, update: GroupUpdate) -> dict[nn.Parameter, Asked]:
        """The parameters of the group that a step now would update."""
        asked: dict[nn.Parameter, Asked] = {}
        with _past_guards():
            for piece in update.pieces:
                parameter = piece.managed.parameter
                if parameter in self._index and type(grad := parameter.grad) is GradHandle:
                    asked[parameter] = Asked.now(self._index[parameter], grad.slot)
        return asked

    def _present_record(self) -> StepRecord:
        if self._record is None:
            self._record = StepRecord.capture(self.owner.optimizer)
        return self._record

    # -- optimistic

    def _may_try(self, update: GroupUpdate, asked: Mapping[nn.Parameter, Asked]) -> bool:
        residency = self.owner.residency
        return (
            self.owner.deferred
            and not residency.keeps_idle
            and not residency.memory.keeps_copies
            and not update.changes_grads
            and self._trial.wants
            and self._trust.allows(len(self._done))
            and all(bundle.stored for bundle in update.store.bundles)
            and all(piece.settled for piece in update.pieces if piece.managed.parameter in asked)
        )

    def _has_room(self, update: GroupUpdate) -> bool:
        """Whether flash could hold twins beside everything else: what is tried must not be in the way of what is asked
        for.
        """
        bundles = [] if update in self._twins else [*update.group.bundles, *update.store.bundles]
        residency = self.owner.residency
        missing = sum(map(residency.room_for, bundles)) - residency.flash_room_bytes
        if missing > 0:
            self._stop(
                f"flash lacks {format_size(missing)} for {update.group.unit!r} to be updated beside its old values"
            )
        return missing <= 0

    def _stop(self, why: str) -> None:
        self._trust.stopped = True
        self.on_stop(f"update: not inside backward any more ({why})")

    def _try(self, update: GroupUpdate, asked: dict[nn.Parameter, Asked]) -> None:
        early = _Early(asked, self._present_record())
        pieces = [piece for piece in update.pieces if piece.managed.parameter in asked]
        twin = self._twin(update)
        try:
            with own_modes(), as_called_from_python():
                for batch in update.batches(pieces):
                    self._compute(early, twin, batch)
        except (ResourceExhausted, TierFull) as error:  # it was only tried: the step itself needs less
            twin.discard(self.owner.residency)
            self._stop(str(error))
            return
        self._done[update] = early

    def _twin(self, update: GroupUpdate) -> Twin:
        twin = self._twins.get(update)
        if twin is None or not twin.fits:
            if twin is not None:
                twin.free(self.owner.residency)
            twin = self._twins[update] = Twin.of(update, self.owner.residency)
        return twin

    def _compute(self, early: _Early, twin: Twin, pieces: list[Piece]) -> None:
        """One transaction: read parameters, gradients and state, and make their twins."""
        residency, optimizer = self.owner.residency, self.owner.optimizer
        asked = [early.asked[piece.managed.parameter] for piece in pieces]
        tile = pieces[0].tile
        stores = dict.fromkeys(one.slot.store for one in asked if not one.zero)
        grads_of = [bundle for store in stores for bundle in of_tile(store.bundles, tile)]
        held: list[Bundle] = []
        try:
            residency.acquire(grads_of, Mode.READ)  # first: backward has just made them, and holds them still
            held += grads_of
            residency.conclude(grads_of)
            self.owner.book.settle()
            pairs = lease_for(residency, twin, tile, held)
            early.versions.update({b: b.version for b in held if b.version})
            early.scalars.update({piece: _scalars(piece) for piece in pieces})
            twin.fill(pieces)
            twins = [twin.pieces[piece] for piece in pieces]
            grads = []
            for piece, other, one in zip(pieces, twins, asked, strict=True):
                grad = one.grad_of(piece)
                other.shadow.grad = grad
                grads.append((grad, grad._version))
            states = {other.shadow: other.state for other in twins}
            members = [(one.index, other.shadow) for one, other in zip(asked, twins, strict=True)]
            shadow_step(optimizer, early.record, members, states)
            for other in twins:
                other.state, other.shadow.grad = states[other.shadow], None
            if any(grad._version != version for grad, version in grads):
                raise TiermemError(
                    f"{type(optimizer).__name__} has changed a gradient, which it did not in earlier steps; "
                    "attach with optimizer_in_backward=False"
                )
            for own, other_bundle in pairs:
                other_bundle.version, other_bundle.written = own.version, True
            residency.conclude([other_bundle for _, other_bundle in pairs])
        finally:
            residency.release(held)

    # -- opted in

    def _use_up(self, update: GroupUpdate, asked: dict[nn.Parameter, Asked]) -> None:
        record, residency = self._present_record(), self.owner.residency
        pending = PendingUpdate.of(update, record, asked)
        grads = [bundle for store in pending.stores for bundle in store.bundles if bundle.stored]
        residency.acquire(grads, Mode.UPDATE)  # backward has just made them, and holds them still
        try:
            self.owner.apply_now(pending)
        finally:
            residency.release(grads)
        for one in asked.values():
            self.owner.book.use_up(one.slot)
        self._done[update] = _Early(asked, record)
        residency.outdate([*update.group.bundles, *update.store.bundles], lambda: self._refuse(update))

    def _refuse(self, update: GroupUpdate) -> None:
        raise Unsupported(
            f"parameters or state of {update.group.unit!r} are used between backward and step(), but "
            "optimizer_in_backward=True has updated them already; call step() after each backward before anything "
            "else, or attach without it"
        )

    def looked_at(self, parameter: nn.Parameter | None) -> None:
        """Somebody reads `optimizer.state`, of one parameter or of all. Raises Unsupported where that shows it."""
        if self.mode is InBackward.OPTED_IN and self._done:
            update = next(iter(self._done)) if parameter is None else self._updates.get(parameter)
            if update in self._done:
                self._refuse(update)

    # -- the step

    def stepped(self, taken: Mapping[nn.Parameter, Asked], record: StepRecord) -> list[GroupUpdate]:
        """`step()` asks for an update of `taken`: the groups that need none any more, as theirs is done. Gradients are
        settled. Raises Unsupported where an update that was opted in for is not the one that is asked for.
        """
        done, self._done, self._record = self._done, {}, None
        self._rhythm.stepped()
        self._index = {parameter: one.index for parameter, one in taken.items()}
        mine: dict[GroupUpdate, dict[nn.Parameter, Asked]] = {update: {} for update in done}
        for parameter, one in taken.items():
            if (update := self._updates.get(parameter)) in mine:
                mine[update][parameter] = one
        if self.mode is InBackward.OPTED_IN:
            return self._confirm_used_up(done, mine, record)
        right = {u: self._twins[u] for u, early in done.items() if self._confirms(early, mine[u], record, u)}
        residency = self.owner.residency
        if right:
            residency.supersede([pair for twin in right.values() for pair in twin.pairs])
        for update, early in done.items():
            if update in right:
                _take_scalars(self._twins[update], early)
            else:
                self._twins[update].discard(residency)
        self.stats.confirmed += len(right)
        self.stats.undone += len(done) - len(right)
        self._measure(bool(done))
        self._trust.stepped(update in right for update in done)
        return list(right)

    def _measure(self, tried: bool) -> None:
        """How long the step was that ends now, if it was wholly with such updates, or without."""
        now_s, before_s = self._clock(), self._stepped_s
        self._stepped_s = now_s
        trial, trust = self._trial, self._trust
        if tried is not trial.wants or (tried and not trust.whole):
            trial.interrupted()
        elif trial.stepped(now_s - before_s):
            self.stats.step_s, self.stats.deferred_step_s = trial.with_s, trial.without_s
            _log.info(
                "updates inside backward %s: %.3f s a step with them, %.3f s without",
                "pay" if trial.pays else "do not pay",
                trial.with_s,
                trial.without_s,
            )

    def _confirms(
        self, early: _Early, asked: dict[nn.Parameter, Asked], record: StepRecord, update: GroupUpdate
    ) -> bool:
        twin = self._twins[update]
        return (
            asked == early.asked
            and all(bundle.version == version and not bundle.holders for bundle, version in early.versions.items())
            and all(_same_scalars(piece, scalars) and twin.in_place(piece) for piece, scalars in early.scalars.items())
            and record.same_as(early.record)
        )

    def _confirm_used_up(
        self, done: dict[GroupUpdate, _Early], mine: dict[GroupUpdate, dict[nn.Parameter, Asked]], record: StepRecord
    ) -> list[GroupUpdate]:
        for update, early in done.items():
            self.owner.residency.updated([*update.group.bundles, *update.store.bundles])
            used_up = mine[update].keys() == early.asked.keys() and all(a.slot.used_up for a in mine[update].values())
            if not used_up or not record.same_as(early.record):
                raise Unsupported(
                    f"step() asks for another update of {update.group.unit!r} than optimizer_in_backward=True has made "
                    "inside backward (a gradient was dropped, or a hyperparameter changed after backward); set "
                    "hyperparameters before backward, or attach without it"
                )
        self.stats.confirmed += len(done)
        return list(done)

    def end(self) -> None:
        """Undo what was not confirmed, as far as it can be. The places of the twins are given back."""
        for update in self._done:
            if self.mode is InBackward.OPTED_IN:
                self.owner.residency.updated([*update.group.bundles, *update.store.bundles])
        self._done.clear()
        for twin in self._twins.values():
            twin.free(self.owner.residency)
        self._twins.clear()


def _scalars(piece: Piece) -> dict[str, Any]:
    return {
        key: value.clone() if isinstance(value, torch.Tensor) else value
        for key, value in piece.state.items()
        if key not in piece.stored
    }


def _same_scalars(piece: Piece, then: dict[str, Any]) -> bool:
    """Whether what is kept beside the large state tensors is what it was, under the same names."""
    now = {key: value for key, value in piece.state.items() if key not in piece.stored}
    return now.keys() == then.keys() and all(
        torch.equal(value, then[key]) if isinstance(value, torch.Tensor) else value == then[key]
        for key, value in now.items()
    )


def _take_scalars(twin: Twin, early: _Early) -> None:
    """The process's own state values become those that the update has made; tensors in place, as others have them."""
    for piece in early.scalars:
        for key, value in twin.pieces[piece].state.items():
            if is_large(piece.shadow, value):
                continue
            if isinstance(value, torch.Tensor) and isinstance(piece.state[key], torch.Tensor):
                piece.state[key].copy_(value)
            else:
                piece.state[key] = value
