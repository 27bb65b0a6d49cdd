"""Optimizer state that lives in the store: one OPTIM bundle set per group, cut where the parameters are.

State tensors as large as their parameter live in bundles; scalars (`step`) stay in the process, shared between the
shadow and the user's `optimizer.state`. A tiled group has a range per state tensor, so that the user sees one tensor
while updates see tiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tiermem.bundle import Kind, TensorSpec
from tiermem.layout import TENSOR_ALIGN_BYTES
from tiermem.units import round_up
from tiermem_client.memory import Bundle
from tiermem_client.residency import Residency
from tiermem_client.shadow import OptimizerForm, StateForm
from tiermem_client.storage_swap import alias
from tiermem_client.units import Group, ManagedParameter


@dataclass(slots=True, frozen=True)
class StatePlace:
    """Where one state tensor lies: `address` for life, readable while `bundles` are leased."""

    form: StateForm
    address: int
    bundles: tuple[Bundle, ...]

    def tensor(self, shape: Sequence[int], stride: Sequence[int] | None = None, first: int = 0) -> torch.Tensor:
        """A view of the place from element `first` on."""
        size = self.form.dtype.itemsize
        count = 1
        for n in shape:
            count *= n
        return alias(
            self.address + first * size,
            count * size,
            self.form.dtype,
            tuple(shape),
            None if stride is None else tuple(stride),
            0,
            self.bundles[0].range.device,
        )


@dataclass(slots=True, eq=False)
class StateStore:
    """The OPTIM bundles of one group, made for forms that a probe or a loaded checkpoint has shown."""

    group: Group
    places: dict[nn.Parameter, dict[str, StatePlace]] = field(default_factory=dict)
    sets: list[list[Bundle]] = field(default_factory=list)  # each is one range: bundles side by side

    @property
    def bundles(self) -> list[Bundle]:
        return [bundle for bundles in self.sets for bundle in bundles]

    @property
    def stored(self) -> bool:
        return bool(self.sets) and self.sets[0][0].stored

    @property
    def forms(self) -> dict[nn.Parameter, tuple[StateForm, ...]]:
        """What it has places for."""
        return {p: tuple(place.form for place in places.values()) for p, places in self.places.items()}

    def fits(self, forms: dict[nn.Parameter, tuple[StateForm, ...]]) -> bool:
        """Whether the places are those that these forms need."""
        return {p: {f.key: f for f in fs} for p, fs in forms.items() if fs} == {
            p: {k: place.form for k, place in places.items()} for p, places in self.places.items() if places
        }

    def build(
        self,
        forms: dict[nn.Parameter, tuple[StateForm, ...]],
        residency: Residency,
        heir_of: StateStore | None = None,
    ) -> None:
        """Make room for these forms; what was stored before is discarded. `heir_of`: whose place its bundles, made for
        the same forms, are to take.
        """
        residency.discard(self.bundles)
        for bundles in self.sets:
            residency.free_range(bundles)
        self.places, self.sets = {}, []
        members = [m for m in self.group.parameters if forms.get(m.parameter)]
        if not members:
            return
        if self.group.tiled:
            for member in members:
                for form in forms[member.parameter]:
                    self._add_tiles(member, form, residency, heir_of)
        else:
            self._add_packed(members, forms, residency, heir_of)

    def _add_packed(
        self,
        members: list[ManagedParameter],
        forms: dict[nn.Parameter, tuple[StateForm, ...]],
        residency: Residency,
        heir_of: StateStore | None,
    ) -> None:
        offset, specs, offsets = 0, [], []
        for member in members:
            for form in forms[member.parameter]:
                nbytes = member.parameter.numel() * form.dtype.itemsize
                dtype = str(form.dtype).removeprefix("torch.")
                specs.append(TensorSpec(f"{member.name}.{form.key}", dtype, member.shape, offset, nbytes))
                offsets.append((member.parameter, form, offset))
                offset += round_up(max(1, nbytes), TENSOR_ALIGN_BYTES)
        old = () if heir_of is None else heir_of.sets[0]
        bundles = residency.new_bundles([(Kind.OPTIM, self.group.unit, offset, tuple(specs))], old)
        self.sets.append(bundles)
        for parameter, form, at in offsets:
            place = StatePlace(form, bundles[0].range.address + at, tuple(bundles))
            self.places.setdefault(parameter, {})[form.key] = place

    def _add_tiles(
        self, member: ManagedParameter, form: StateForm, residency: Residency, heir_of: StateStore | None
    ) -> None:
        itemsize, total = form.dtype.itemsize, member.parameter.numel()
        requests = []
        for first in range(0, total, self.group.tile_elements):
            count = min(self.group.tile_elements, total - first)
            spec = TensorSpec(
                f"{member.name}.{form.key}", str(form.dtype).removeprefix("torch."), (count,), 0, count * itemsize
            )
            requests.append((Kind.OPTIM, self.group.unit, count * itemsize, (spec,)))
        bundles = residency.new_bundles(requests, () if heir_of is None else heir_of.sets[len(self.sets)])
        self.sets.append(bundles)
        self.places.setdefault(member.parameter, {})[form.key] = StatePlace(
            form, bundles[0].range.address, tuple(bundles)
        )


def forms_of(parameter: nn.Parameter, state: dict[str, Any]) -> tuple[StateForm, ...]:
    """The large state tensors in a state dictionary, in its order."""
    return tuple(StateForm(k, v.dtype) for k, v in state.items() if is_large(parameter, v))


def is_large(parameter: nn.Parameter, value: Any) -> bool:
    """Whether a state value goes to the store: a tensor with as many elements as its parameter, which has more than
    one.
    """
    return isinstance(value, torch.Tensor) and value.numel() == parameter.numel() > 1


def probed_forms(forms: dict[nn.Parameter, OptimizerForm]) -> dict[nn.Parameter, tuple[StateForm, ...]]:
    return {p: f.states for p, f in forms.items()}
