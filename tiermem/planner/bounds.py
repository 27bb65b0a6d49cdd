"""The least time that a step can take on given hardware: no plan, order or amount of lookahead gets below it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tiermem.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class DiskRates:
    """Bytes a second of a disk, hashing included: one direction alone, and of each of them when both are busy. Raises
    InvalidArgument where one is not positive.
    """

    read: float
    write: float
    both: float

    def __post_init__(self) -> None:
        for name, rate in (("read", self.read), ("write", self.write), ("both", self.both)):
            if not rate > 0:
                raise InvalidArgument(f"the disk's rate {name!r} is {rate}; give bytes a second above 0")

    def best_of(self, other: DiskRates) -> DiskRates:
        """Each rate as the faster of two measurements: a bound is what the disk can do."""
        return DiskRates(max(self.read, other.read), max(self.write, other.write), max(self.both, other.both))

    def seconds(self, read_bytes: float, written_bytes: float) -> float:
        """The least time to read and write so much: both directions together as long as there are bytes of both, unless
        one after the other is faster.
        """
        together = min(read_bytes, written_bytes)
        alone = (read_bytes - together) / self.read + (written_bytes - together) / self.write
        in_turns = read_bytes / self.read + written_bytes / self.write
        return min(together / self.both + alone, in_turns)


@dataclass(frozen=True, slots=True)
class PhaseWork:
    """A phase of a step: seconds of computing alone, bytes over the disk."""

    name: str
    compute_s: float
    read_bytes: float = 0.0
    written_bytes: float = 0.0

    def seconds(self, disk: DiskRates) -> float:
        return max(self.compute_s, disk.seconds(self.read_bytes, self.written_bytes))


def resource_bound_s(phases: Sequence[PhaseWork], disk: DiskRates) -> float:
    """The busiest resource, over the whole step: what perfect overlap would take."""
    compute_s = sum(phase.compute_s for phase in phases)
    return max(compute_s, disk.seconds(sum(p.read_bytes for p in phases), sum(p.written_bytes for p in phases)))


def phase_bound_s(phases: Sequence[PhaseWork], disk: DiskRates) -> float:
    """The busiest resource of each phase, one phase after the other: what overlap within phases would take."""
    return sum(phase.seconds(disk) for phase in phases)
