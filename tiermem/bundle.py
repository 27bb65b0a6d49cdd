"""Tensors, bundles and the ways of using them: the vocabulary of DESIGN section 2."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Kind(enum.IntEnum):
    """What a bundle holds. Numbers are those of the protocol."""

    PARAM = 1
    GRAD = 2
    OPTIM = 3
    ACTIVATION = 4


class Mode(enum.IntEnum):
    """How a lease may use a bundle. Numbers are those of the protocol.

    CREATE: no load, the extent holds no bytes yet. READ: bytes stay as they are. UPDATE: dirty once committed. CONSUME:
    read, then free.
    """

    CREATE = 1
    READ = 2
    UPDATE = 3
    CONSUME = 4

    @property
    def writes(self) -> bool:
        return self in (Mode.CREATE, Mode.UPDATE)

    def covers(self, wanted: Mode) -> bool:
        """Whether a grant of this mode suffices for an access of mode `wanted`."""
        return self == wanted or wanted == Mode.READ or (self == Mode.CREATE and wanted == Mode.UPDATE)


class TierName(enum.StrEnum):
    """Tiers as they are called in metrics, messages and statistics."""

    DRAM = "dram"
    FLASH = "flash"
    EMULATED = "emulated"
    CUDA = "cuda"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor inside a bundle. `offset_bytes` is from the bundle's first byte; `dtype` is torch's name without the
    prefix.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset_bytes: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class BundleSpec:
    """The form of a bundle: what `create` makes. `spec_id` is the client's number for it, unique within a session.

    `heir_of`: the form whose place a bundle of this one is to take (`Supersede`); 0 for none.
    """

    spec_id: int
    kind: Kind
    unit: str
    nbytes: int
    tensors: tuple[TensorSpec, ...] = ()
    heir_of: int = 0

    def __str__(self) -> str:
        return f"{self.kind.name.lower()} of {self.unit or '(root)'} ({self.nbytes} bytes)"
