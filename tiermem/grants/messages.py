"""The protocol's messages as values (proto/tiermem/rpc/v1/tiermem.proto on the wire). Serial numbers name grants
everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from tiermem.allocator import Run
from tiermem.bundle import Mode
from tiermem.errors import Code
from tiermem.plan import Access


class Grant(NamedTuple):
    """Daemon to client: a reservation of `bundle` (of form `spec`), whose bytes lie in `runs`.

    `answers`: the epoch of the demand it answers, or 0 for a grant that was pushed ahead of one, which is void as soon
    as the lane's epoch is newer than `epoch`. A tuple, as thousands are made in a step.
    """

    serial: int
    lane: str
    epoch: int
    spec: int
    bundle: int
    mode: Mode
    version: int
    runs: tuple[Run, ...]
    answers: int


@dataclass(frozen=True, slots=True)
class Refuse:
    """Daemon to client: the demand of epoch `answers` ends with an error; nothing was changed."""

    lane: str
    answers: int
    code: Code
    message: str


@dataclass(frozen=True, slots=True)
class Surrender:
    """Daemon to client: give the lane's unused grants back; the answer is Void."""

    lane: str


@dataclass(frozen=True, slots=True)
class Demand:
    """Client to daemon: what was not granted in time. `held`: serials of every lease of the lane; the lane's other pins
    are void.

    `target` is a bundle id, or with mode CREATE a spec id: the grant then names a fresh bundle.
    """

    lane: str
    epoch: int
    held: frozenset[int]
    target: int
    mode: Mode


@dataclass(frozen=True, slots=True)
class Void:
    """Client to daemon: the lane's unused grants are void; `held` are the serials of its leases."""

    lane: str
    epoch: int
    held: frozenset[int]


@dataclass(frozen=True, slots=True)
class Used:
    """Client to daemon: pushed grants that became leases. A hint: safety never needs it."""

    serials: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Accessed:
    """Client to daemon: what the lane does next, before the demands and uses that belong to it. A hint."""

    lane: str
    access: Access


@dataclass(frozen=True, slots=True)
class Commit:
    """Client to daemon, one transaction: (serial, bundle, version) of what was written, (serial, bundle) of what was
    used up.
    """

    updated: tuple[tuple[int, int, int], ...]
    consumed: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Done:
    """Client to daemon: the leases of these serials ended."""

    serials: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Discard:
    """Client to daemon: bundles that nobody leases and nobody will ask for again."""

    bundles: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Supersede:
    """Client to daemon, one transaction: (old, new) bundles of one size that nobody leases. The old one ends, and the
    new one is from now on of its form.
    """

    pairs: tuple[tuple[int, int], ...]


ClientBody = Demand | Void | Used | Accessed | Commit | Done | Discard | Supersede
DaemonBody = Grant | Refuse | Surrender
