"""One transaction of an update: the bundles of a group, or of a tile of it, are leased, updated by the shadow optimizer
and committed together.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from tiermem.bundle import Mode
from tiermem.errors import TiermemError
from tiermem.plan import Phase
from tiermem_client.grads import GradBook
from tiermem_client.heap import large_blocks_mapped
from tiermem_client.memory import Bundle
from tiermem_client.optimizer_state import forms_of, is_large
from tiermem_client.pending import Asked
from tiermem_client.pieces import GroupUpdate, Piece, of_tile
from tiermem_client.residency import Residency
from tiermem_client.shadow import StepRecord, shadow_step


class Transactions:
    """Runs them, one at a time in a thread. The caller has torch's modes set for it (`own_modes`)."""

    def __init__(self, optimizer: torch.optim.Optimizer, residency: Residency, book: GradBook) -> None:
        self.optimizer, self.residency, self.book = optimizer, residency, book

    def run(
        self, update: GroupUpdate, record: StepRecord, asked_for: Mapping[nn.Parameter, Asked], pieces: list[Piece]
    ) -> None:
        """Update these pieces of a group, with their state; and gradients, where the optimizer changes them."""
        tile = pieces[0].tile
        asked = [asked_for[p.managed.parameter] for p in pieces]
        parameters = of_tile(update.group.bundles, tile)
        grads = list(dict.fromkeys(b for a in asked if not a.zero for b in of_tile(a.slot.store.bundles, tile)))
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
            grads_now = self._prepare(pieces, asked)
            versions = [grad._version for grad in grads_now]
            members = [(a.index, p.shadow) for a, p in zip(asked, pieces, strict=True)]
            states = {p.shadow: p.state for p in pieces}
            fresh = not all(states.values())  # new state is anonymous until it has been moved
            with large_blocks_mapped() if fresh else contextlib.nullcontext():
                shadow_step(self.optimizer, record, members, states)
            for bundle in parameters:
                bundle.written = True
            for piece, gradient, grad, version in zip(pieces, asked, grads_now, versions, strict=True):
                piece.state = states[piece.shadow]
                piece.shadow.grad = None
                if grad._version != version or record.unscales_silently:
                    update.changes_grads = True
                    self._keep_changed(piece, gradient, grad)
            held += self._absorb(update, pieces, tile, held)
            self.residency.conclude(held)
        finally:
            self.residency.release(held)

    def _keep_changed(self, piece: Piece, asked: Asked, grad: torch.Tensor) -> None:
        """The optimizer wrote to a gradient (SGD with nesterov does), which the script may read afterwards."""
        slot = asked.slot
        if asked.changes:  # made before the step for optimizers that were seen to do this
            raise TiermemError(
                f"{type(self.optimizer).__name__} has changed the gradient of {piece.managed.name!r}, which it did not "
                "in earlier steps"
            )
        slot.answers.clear()
        if asked.zero and asked.still_there:  # it saw zeros that nobody has stored
            piece.grad_view(self.book.writable(slot)).copy_(grad)
        if not asked.zero or asked.still_there:
            for bundle in of_tile(slot.store.bundles, piece.tile):
                bundle.written = True

    def _prepare(self, pieces: list[Piece], asked: list[Asked]) -> list[torch.Tensor]:
        grads = []
        for piece, gradient in zip(pieces, asked, strict=True):
            grad = gradient.grad_of(piece)
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
        forms = update.store.forms
        update.store.build({**forms, **{p: fs for p, fs in needed.items() if fs}}, self.residency)
