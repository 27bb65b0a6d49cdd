"""What one update works on: shadow Parameters over the store's bytes, whole ones or tiles of a large one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tiermem_client.memory import Bundle
from tiermem_client.optimizer_state import StateStore, is_large
from tiermem_client.shadow import OptimizerForm
from tiermem_client.storage_swap import alias
from tiermem_client.units import Group, ManagedParameter


@dataclass(slots=True, eq=False)
class Piece:
    """What one shadow Parameter stands for: a whole parameter, or `count` elements of a tiled one from `first` on."""

    managed: ManagedParameter
    first: int
    count: int
    tile: int
    shadow: nn.Parameter = field(repr=False)  # the text of a tensor reads bytes, which may not be here
    state: dict[str, Any] = field(default_factory=dict, repr=False)
    # The large tensors of `state` that are in the store.
    stored: dict[str, torch.Tensor] = field(default_factory=dict, repr=False)

    @property
    def whole(self) -> bool:
        return self.tile < 0

    @property
    def settled(self) -> bool:
        """Whether every large state tensor is in the store: the usual case after the first step."""
        large = {k: v for k, v in self.state.items() if is_large(self.shadow, v)}
        return large.keys() == self.stored.keys() and all(v is self.stored[k] for k, v in large.items())

    def grad_view(self, real: torch.Tensor) -> torch.Tensor:
        return real if self.whole else real.view(-1)[self.first : self.first + self.count]

    def state_view(self, store: StateStore, key: str, like: torch.Tensor) -> torch.Tensor:
        place = store.places[self.managed.parameter][key]
        dense = bool(torch.ops.aten.is_non_overlapping_and_dense.default(like))
        return place.tensor(like.shape, like.stride() if dense else None, self.first)


@dataclass(slots=True, eq=False)
class GroupUpdate:
    """One group's update: its pieces, and the bundle indices that each step of it needs. `changes_grads`: the optimizer
    has been seen to write to gradients of the group.
    """

    group: Group
    store: StateStore
    pieces: list[Piece]
    tiled: bool
    changes_grads: bool = False

    def bundles_of_state(self, tile: int) -> list[Bundle]:
        """The OPTIM bundles that a tile's update needs; all for tile -1."""
        return [b for bundles in self.store.sets for b in of_tile(bundles, tile)]

    def batches(self, pieces: list[Piece]) -> list[list[Piece]]:
        """The pieces of each transaction."""
        return [[piece] for piece in pieces] if self.tiled or not pieces else [pieces]


def plan_update(group: Group, forms: dict[nn.Parameter, OptimizerForm], store: StateStore) -> GroupUpdate:
    """A large parameter whose optimizer works element by element is updated in tiles, everything else whole."""
    members = group.parameters
    alone = len(members) == 1 and members[0].whole and members[0].parameter in forms
    if group.tiled and alone and forms[members[0].parameter].elementwise:
        total, step = members[0].parameter.numel(), group.tile_elements
        starts = range(0, total, step)
        pieces = [_piece(members[0], first, min(step, total - first), first // step) for first in starts]
        return GroupUpdate(group, store, pieces, True)
    return GroupUpdate(group, store, [_piece(m, 0, m.parameter.numel(), -1) for m in members], False)


def of_tile(bundles: list[Bundle], tile: int) -> list[Bundle]:
    """One tile's bundle, or all for tile -1."""
    return list(bundles) if tile < 0 else [bundles[tile]]


def _piece(managed: ManagedParameter, first: int, count: int, tile: int) -> Piece:
    return Piece(managed, first, count, tile, shadow_at(managed, first, count, tile < 0))


def shadow_at(managed: ManagedParameter, first: int, count: int, whole: bool, away_bytes: int = 0) -> nn.Parameter:
    """A Parameter over the parameter's place in the store, or over `count` elements of it from `first` on; or over a
    place that lies `away_bytes` after it.
    """
    storage, source = managed.storage, managed.parameter
    address, size = storage.address + away_bytes, source.element_size()
    if whole:
        view = alias(
            address,
            storage.nbytes,
            source.dtype,
            managed.shape,
            managed.stride,
            managed.storage_offset,
            source.device,
        )
    else:
        view = alias(address + first * size, count * size, source.dtype, (count,), device=source.device)
    shadow = nn.Parameter(view, requires_grad=source.requires_grad)
    shadow.__dict__.update({k: v for k, v in source.__dict__.items() if not k.startswith("_")})
    return shadow
