"""`optimizer.state` as the user sees it: stored tensors under their names, scalars shared with the shadows, and the way
in and out for state that exists elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
from torch import nn

from tiermem.bundle import Mode
from tiermem_client.memory import Bundle
from tiermem_client.optimizer_state import forms_of, is_large
from tiermem_client.pieces import GroupUpdate
from tiermem_client.residency import Residency


def _nobody(tensor: torch.Tensor, bundles: list[Bundle]) -> None: ...


class ShownState:
    """Keeps the user's dictionary true after updates. `on_state` is told of every tensor that is put into it."""

    def __init__(self, optimizer: torch.optim.Optimizer, residency: Residency, updates: Sequence[GroupUpdate]) -> None:
        self.optimizer, self.residency, self.updates = optimizer, residency, updates
        self.on_state: Callable[[torch.Tensor, list[Bundle]], None] = _nobody

    def show(self, update: GroupUpdate, parameter: nn.Parameter) -> None:
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

    def unguarded(self) -> None:
        """Guards have been taken away: what is shown from now on gets none."""
        self.on_state = _nobody

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
                piece.state, piece.stored = {}, {}
            return
        forms = {p: forms_of(p, values) for p, values in present.items()}
        known = update.store.forms
        if not update.store.fits({**known, **{p: fs for p, fs in forms.items() if fs}}):
            update.store.build({**known, **{p: fs for p, fs in forms.items() if fs}}, self.residency)
        for batch in update.batches(update.pieces):
            bundles = update.bundles_of_state(batch[0].tile) if any(forms.values()) else []
            fresh = [b for b in bundles if not b.stored]
            old = [b for b in bundles if b.stored]
            self.residency.acquire(fresh, Mode.CREATE)
            self.residency.acquire(old, Mode.UPDATE)
            for piece in batch:
                piece.state, piece.stored = {}, {}
                for key, value in present.get(piece.managed.parameter, {}).items():
                    if is_large(piece.managed.parameter, value):
                        part = value if piece.whole else value.reshape(-1)[piece.first : piece.first + piece.count]
                        view = piece.state_view(update.store, key, part)
                        view.copy_(part)
                        piece.state[key] = piece.stored[key] = view
                    else:
                        piece.state[key] = value.clone() if isinstance(value, torch.Tensor) else value
            for bundle in bundles:
                bundle.written = True
            self.residency.release(bundles)
        for parameter in present:
            self.show(update, parameter)

    def give_back(self, updated: Collection[nn.Parameter]) -> None:
        """Put ordinary tensors in the place of stored ones in `optimizer.state`. `updated`: what an interrupted step
        has updated already; its state is shown first.
        """
        for update in self.updates:
            for parameter in dict.fromkeys(p.managed.parameter for p in update.pieces):
                if parameter in updated:
                    self.show(update, parameter)
        for update in self.updates:
            for parameter, places in update.store.places.items():
                visible = self.optimizer.state.get(parameter)
                if not visible:
                    continue
                bundles = self.bundles_of(parameter)
                self.residency.acquire(bundles, Mode.READ)
                for key in places:
                    if key in visible:
                        visible[key] = visible[key].clone()
                self.residency.release(bundles)

    def bundles_of(self, parameter: nn.Parameter) -> list[Bundle]:
        """What must be leased to read the parameter's large state tensors."""
        for update in self.updates:
            places = update.store.places.get(parameter)
            if places:
                return [b for b in dict.fromkeys(b for place in places.values() for b in place.bundles) if b.stored]
        return []

    def addresses_of(self, parameter: nn.Parameter) -> frozenset[int]:
        """Where the parameter's stored state tensors begin."""
        return frozenset(place.address for u in self.updates for place in u.store.places.get(parameter, {}).values())
