"""A second place for a group's parameters and state, so that an update can be computed before it is sure to be wanted.

Twins are bundles as large as the group's own, with shadows over them. An update fills them from the group's bytes and
runs there; to confirm it, the daemon lets each take the place of the bundle that it is the twin of
(`Residency.supersede`): no byte moves. To undo it, they are discarded.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Any

import torch

from tiermem.bundle import Mode
from tiermem.plan import Phase
from tiermem_client.memory import Bundle
from tiermem_client.optimizer_state import StateStore, is_large
from tiermem_client.pieces import GroupUpdate, Piece, of_tile, shadow_at
from tiermem_client.residency import Residency


@dataclass(slots=True, eq=False)
class Twin:
    """Of one group. `pieces` are those of the update, in their order, with shadows over the twins of its parameters;
    their `state` is what the update has made.
    """

    update: GroupUpdate
    parameters: list[Bundle] = field(default_factory=list)
    store: StateStore = field(init=False)
    pieces: dict[Piece, Piece] = field(default_factory=dict)

    @classmethod
    def of(cls, update: GroupUpdate, residency: Residency) -> Twin:
        """Declare the bundles. They hold nothing yet."""
        twin = cls(update)
        own = update.group.bundles
        requests = [(b.spec.kind, b.spec.unit, b.spec.nbytes, b.spec.tensors) for b in own]
        twin.parameters = residency.new_bundles(requests, own)
        twin.store = StateStore(update.group)
        twin.store.build(update.store.forms, residency, update.store)
        away = twin.parameters[0].address - update.group.bundles[0].address
        for piece in update.pieces:
            shadow = shadow_at(piece.managed, piece.first, piece.count, piece.whole, away)
            twin.pieces[piece] = Piece(piece.managed, piece.first, piece.count, piece.tile, shadow)
        return twin

    @property
    def fits(self) -> bool:
        """Whether the group's state still has the form that it was made for."""
        return self.store.fits(self.update.store.forms)

    @property
    def pairs(self) -> list[tuple[Bundle, Bundle]]:
        """Every bundle of the group that an update changes, with its twin."""
        own = [*self.update.group.bundles, *self.update.store.bundles]
        return list(zip(own, self.bundles, strict=True))

    @property
    def bundles(self) -> list[Bundle]:
        return [*self.parameters, *self.store.bundles]

    def pairs_of(self, tile: int) -> list[tuple[Bundle, Bundle]]:
        """Those of one transaction."""
        own, mine = self.update.bundles_of_state(tile), [b for s in self.store.sets for b in of_tile(s, tile)]
        parameters = zip(of_tile(self.update.group.bundles, tile), of_tile(self.parameters, tile), strict=True)
        return [*parameters, *zip(own, mine, strict=True)]

    def fill(self, pieces: list[Piece]) -> None:
        """Copy what the update starts from; both places are leased."""
        for own, twin in self.pairs_of(pieces[0].tile):
            ctypes.memmove(twin.address, own.address, own.spec.nbytes)
        for piece in pieces:
            self.pieces[piece].state = {key: self._copy(piece, key, value) for key, value in piece.state.items()}

    def _copy(self, piece: Piece, key: str, value: Any) -> Any:
        if key in piece.stored:
            return self.pieces[piece].state_view(self.store, key, value)
        return value.clone() if isinstance(value, torch.Tensor) else value

    def in_place(self, piece: Piece) -> bool:
        """Whether the update has left every large state tensor where it was, under the same names."""
        state = self.pieces[piece].state
        return state.keys() == piece.state.keys() and all(
            value.data_ptr() == self.pieces[piece].state_view(self.store, key, value).data_ptr()
            for key, value in state.items()
            if is_large(piece.shadow, value)
        )

    def discard(self, residency: Residency) -> None:
        residency.discard(self.bundles)

    def free(self, residency: Residency) -> None:
        """Give the places up too."""
        self.discard(residency)
        for bundles in [self.parameters, *self.store.sets]:
            residency.free_range(bundles)


def lease_for(residency: Residency, twin: Twin, tile: int, held: list[Bundle]) -> list[tuple[Bundle, Bundle]]:
    """Lease what one transaction needs beside gradients, adding it to `held`. Returns the pairs."""
    pairs = twin.pairs_of(tile)
    own = [bundle for bundle, _ in pairs]
    residency.accessed(f"{twin.update.group.unit}/{own[0].spec.spec_id}", Phase.UPDATE)
    for bundles, mode in ((own, Mode.READ), ([other for _, other in pairs], Mode.CREATE)):
        residency.acquire(bundles, mode)
        held += bundles
    return pairs
