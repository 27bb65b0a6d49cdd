"""Where gradients lie: one slot for each parameter in the GRAD bundles of its group."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

import torch

from tiermem_client.folding import Answer, Operation
from tiermem_client.memory import Bundle
from tiermem_client.storage_swap import alias
from tiermem_client.units import Group, ManagedParameter


@dataclass(slots=True, eq=False)
class GradSlot:
    """Where a parameter's gradient lies. `owners` counts live handles; `zero`: the bytes count as zeros, whatever lies
    there; `generation`: how often it was zeroed or dropped; `used_up`: an update inside backward has had it. `changes`
    are still to be made of the bytes, in order; `answers` are of the bytes as they are.
    """

    store: GradStore
    managed: ManagedParameter
    offset_bytes: int
    nbytes: int
    stride: tuple[int, ...]
    dtype: torch.dtype
    owners: int = 0
    zero: bool = True
    generation: int = 0
    used_up: bool = False
    changes: list[Operation] = field(default_factory=list)
    answers: dict[Hashable, Answer] = field(default_factory=dict, repr=False)
    _real: torch.Tensor | None = field(default=None, repr=False)

    @property
    def real(self) -> torch.Tensor:
        """The tensor over the slot's bytes, one for life; valid while the group's bundles are leased."""
        if self._real is None:
            place, shape = self.store.bundles[0].range, self.managed.shape
            address = place.address + self.offset_bytes
            self._real = alias(address, self.nbytes, self.dtype, shape, self.stride, device=place.device)
        return self._real


@dataclass(slots=True, eq=False)
class GradStore:
    """The GRAD bundles of one group: one, or a tile for each PARAM tile."""

    group: Group
    bundles: list[Bundle]
    slots: dict[torch.nn.Parameter, GradSlot]

    @property
    def stored(self) -> bool:
        return self.bundles[0].stored
