"""The protocol's messages as values (proto/tiermem/rpc/v1/tiermem.proto on the wire). Serial numbers name grants
everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass

from tiermem.allocator import Run
from tiermem.bundle import Mode
from tiermem.errors import Code


@dataclass(frozen=True, slots=True)
class Grant:
    """Daemon to client: a reservation of `bundle`, whose bytes lie in `runs`. `answers`: the epoch of the demand it
    answers, or 0.
    """

    serial: int
    lane: str
    epoch: int
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
class Commit:
    """Client to daemon, one transaction: (serial, bundle, version) of what was written, (serial, bundle) of what was
    used up.
    """

    updated: tuple[tuple[int, int, int], ...]
    consumed: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Done:
    """Client to daemon: the lease of this serial ended."""

    serial: int


@dataclass(frozen=True, slots=True)
class Discard:
    """Client to daemon: bundles that nobody leases and nobody will ask for again."""

    bundles: tuple[int, ...]


ClientBody = Demand | Commit | Done | Discard
DaemonBody = Grant | Refuse
