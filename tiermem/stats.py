"""Frozen snapshots of what the store counts: one source for metrics, `tiermem status`, `job.stats()` and benchmarks."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field

from tiermem.notices import NoticeKind


class Link(enum.StrEnum):
    """Directed paths between tiers, as they are called in metrics."""

    FLASH_TO_DRAM = "flash_to_dram"
    DRAM_TO_FLASH = "dram_to_flash"


class DeviceLink(enum.StrEnum):
    """Directed paths between DRAM and a device; the trainer moves the bytes."""

    DRAM_TO_EMULATED = "dram_to_emulated"
    EMULATED_TO_DRAM = "emulated_to_dram"
    DRAM_TO_CUDA = "dram_to_cuda"
    CUDA_TO_DRAM = "cuda_to_dram"


class DeviceKind(enum.StrEnum):
    """What a trainer's device is, and its tier's name."""

    EMULATED = "emulated"
    CUDA = "cuda"

    @property
    def inward(self) -> DeviceLink:
        """From DRAM to it."""
        return DeviceLink(f"dram_to_{self}")

    @property
    def outward(self) -> DeviceLink:
        """From it to DRAM."""
        return DeviceLink(f"{self}_to_dram")


class EvictReason(enum.StrEnum):
    """Why a bundle left DRAM."""

    DEMAND = "demand"
    LOOKAHEAD = "lookahead"


class StallCause(enum.StrEnum):
    """What a demand waited for: bytes from flash, room freed by a write-back, or the lane's own turn."""

    LOAD = "load"
    ROOM = "room"


@dataclass(frozen=True, slots=True)
class LinkStats:
    """Since the daemon (or job) started. `seconds` is the sum over transfers of their time in I/O; `queue_seconds`
    before it.
    """

    bytes: int = 0
    transfers: int = 0
    seconds: float = 0.0
    queue_seconds: float = 0.0
    queued_bytes: int = 0


@dataclass(frozen=True, slots=True)
class TierStats:
    """`used_bytes` includes slack and never exceeds `capacity_bytes`."""

    capacity_bytes: int = 0
    used_bytes: int = 0


@dataclass(frozen=True, slots=True)
class DeviceReport:
    """What a trainer says of its device; the links' counts are since its session was opened."""

    kind: DeviceKind
    tier: TierStats
    inward: LinkStats
    outward: LinkStats

    @property
    def links(self) -> dict[DeviceLink, LinkStats]:
        return {self.kind.inward: self.inward, self.kind.outward: self.outward}

    def goes_on_from(self, before: DeviceReport) -> bool:
        """Whether it is of the same kind, and no counter has fallen since."""
        pairs = ((self.inward, before.inward), (self.outward, before.outward))
        return self.kind is before.kind and all(
            later >= earlier for new, old in pairs for later, earlier in zip(_counts(new), _counts(old), strict=True)
        )


def _counts(link: LinkStats) -> tuple[float, ...]:
    return link.bytes, link.transfers, link.seconds, link.queue_seconds


def sum_of_links(links: Iterable[LinkStats]) -> LinkStats:
    """What they have counted together."""
    counts = [_counts(link) for link in links]
    nbytes, transfers, seconds, queue_seconds = (sum(column) for column in zip((0, 0, 0.0, 0.0), *counts, strict=True))
    return LinkStats(int(nbytes), int(transfers), seconds, queue_seconds)


class PredictionOutcome(enum.StrEnum):
    """What became of a prediction of the next access; UNKNOWN where there was none."""

    RIGHT = "right"
    WRONG = "wrong"
    UNKNOWN = "unknown"


class PushOutcome(enum.StrEnum):
    """What became of grants that were sent ahead of demands: used, or void."""

    SENT = "sent"
    USED = "used"


@dataclass(frozen=True, slots=True)
class JobStats:
    """One job. `tiers` by "dram", "flash" and, where the trainer has one, the DeviceKind of its device; `links` by
    the values of Link and DeviceLink; `bytes_by_kind` are live bundles' bytes ("param", "grad", "optim", "activation").
    """

    job: str
    session: str
    pid: int
    tiers: dict[str, TierStats] = field(default_factory=dict)
    links: dict[str, LinkStats] = field(default_factory=dict)
    bytes_by_kind: dict[str, int] = field(default_factory=dict)
    bundles: int = 0
    dirty_bytes: int = 0
    leases: int = 0
    leased_bytes: int = 0
    hits: int = 0
    misses: int = 0
    creates: int = 0
    commits: int = 0
    refusals: dict[str, int] = field(default_factory=dict)
    evictions: dict[EvictReason, int] = field(default_factory=dict)
    predictions: dict[PredictionOutcome, int] = field(default_factory=dict)
    pushes: dict[PushOutcome, int] = field(default_factory=dict)
    stall_seconds: dict[StallCause, float] = field(default_factory=dict)
    waiting: int = 0
    notices: dict[NoticeKind, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DirectoryStats:
    """One flash directory. `errors` by errno name ("EIO", "ENOSPC")."""

    path: str
    capacity_bytes: int
    used_bytes: int
    errors: dict[str, int] = field(default_factory=dict)
    checksum_failures: int = 0
    direct_io: bool = True
    read_bytes: int = 0
    written_bytes: int = 0


@dataclass(frozen=True, slots=True)
class StoreStats:
    """The whole daemon at one instant (one lock), so that used <= capacity holds in every snapshot.

    The fields from `hits` on are totals over all jobs since the daemon started, ended jobs included: they never fall.
    """

    tiers: dict[str, TierStats]
    links: dict[str, LinkStats]
    directories: tuple[DirectoryStats, ...]
    jobs: tuple[JobStats, ...]
    sessions_opened: int
    sessions_ended: dict[str, int]
    errors: dict[str, int]
    hits: int = 0
    misses: int = 0
    creates: int = 0
    commits: int = 0
    evictions: dict[EvictReason, int] = field(default_factory=dict)
    predictions: dict[PredictionOutcome, int] = field(default_factory=dict)
    pushes: dict[PushOutcome, int] = field(default_factory=dict)
    stall_seconds: dict[StallCause, float] = field(default_factory=dict)
    notices: dict[NoticeKind, int] = field(default_factory=dict)
