"""A training step as values: which unit runs in which phase, and the bundles that it uses then."""

from __future__ import annotations

import enum
from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple

from tiermem.bundle import Mode


class Phase(enum.IntEnum):
    """Why a unit is used. RECOMPUTE is the forward of a checkpointed unit inside backward."""

    FORWARD = 1
    BACKWARD = 2
    RECOMPUTE = 3
    UPDATE = 4


class Access(NamedTuple):
    """One use of a unit. `training`: a backward is to follow its forward (the module's mode; not whether autograd
    records, which a reentrant checkpoint switches off). A tuple, as it is hashed and compared at every access.
    """

    unit: Hashable
    phase: Phase
    training: bool = True


@dataclass(frozen=True, slots=True)
class BundleUse:
    """A bundle, or its form where bundles come and go with every step (gradients), as one access uses it.

    `bundle` is the number of either; who makes the value says which.
    """

    bundle: int
    mode: Mode
    nbytes: int


@dataclass(frozen=True, slots=True)
class PlannedAccess:
    """An access and everything that it uses; these bundles are in DRAM together."""

    access: Access
    uses: tuple[BundleUse, ...]

    @property
    def nbytes(self) -> int:
        return sum(use.nbytes for use in self.uses)


Plan = tuple[PlannedAccess, ...]
"""Accesses in the order in which they are expected, or were seen."""
