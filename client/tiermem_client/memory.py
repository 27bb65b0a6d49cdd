"""A bundle of this job, and what it takes for its bytes to be readable at its addresses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from tiermem.bundle import BundleSpec, Mode
from tiermem.grants.table import Lease
from tiermem.plan import Access
from tiermem.stats import DeviceReport, LinkStats, TierStats
from tiermem_client.address_space import AddressSpace, Range


@dataclass(slots=True, eq=False)
class Bundle:
    """A bundle of this job. `range` and `offset_bytes` are its place for life (tiles of one tensor share a range, side
    by side).

    `bundle_id` is None while it holds no bytes in the store. `written`: bytes changed since somebody looked (whoever
    changes them says so here); `owed`: they were, under the present lease, and it has not been committed.
    """

    spec: BundleSpec
    range: Range
    offset_bytes: int = 0
    bundle_id: int | None = None
    version: int = 0
    lease: Lease | None = None
    holders: int = 0
    written: bool = False
    owed: bool = False
    blank: bool = False
    asking: bool = False

    @property
    def stored(self) -> bool:
        """Whether it holds bytes that mean something."""
        return self.bundle_id is not None and not self.blank

    @property
    def address(self) -> int:
        return self.range.address + self.offset_bytes

    @property
    def writable(self) -> bool:
        return self.lease is not None and self.lease.mode.writes


@dataclass(frozen=True, slots=True)
class DeviceStats:
    """Entries that found their bytes on the device, those that had to be filled, and copies that left for others."""

    name: str
    hits: int
    misses: int
    evictions: int


@dataclass(frozen=True, slots=True)
class MemoryStats:
    """What there is beside the daemon's tiers: the device, if there is one, and the links to it, by name."""

    device: DeviceStats | None = None
    report: DeviceReport | None = None

    @property
    def tiers(self) -> dict[str, TierStats]:
        return {} if self.report is None else {str(self.report.kind): self.report.tier}

    @property
    def links(self) -> dict[str, LinkStats]:
        return {} if self.report is None else {str(link): moved for link, moved in self.report.links.items()}


class Memory(Protocol):
    """What the computation's tensors lie in. The caller holds the client lock around every method.

    A bundle goes through `leased`, `entered`, `left`, `ended`: a lease begins, the first holder comes, the last one
    goes, the lease ends. Holders come and go several times under one lease; where a bundle `is_here` they may come
    without one.
    """

    @property
    def frame_bytes(self) -> int:
        """Ranges and the offsets in them are multiples of it."""

    @property
    def bundle_cap_bytes(self) -> int:
        """The largest bundle."""

    @property
    def device(self) -> torch.device:
        """Where the tensors are, for torch."""

    @property
    def keeps_copies(self) -> bool:
        """Whether bytes stay readable here when the lease has ended."""

    @property
    def unpinned(self) -> str:
        """Why copies go through memory that is not pinned; empty where they do not."""

    def reserve(self, nbytes: int) -> Range: ...

    def release(self, range_: Range) -> None: ...

    def is_here(self, bundle: Bundle) -> bool:
        """Whether the newest bytes can be read here without a lease."""

    def leased(self, bundle: Bundle) -> None:
        """Its first lease has begun (`bundle.lease`)."""

    def entered(self, bundle: Bundle, mode: Mode) -> None:
        """Make it readable, and writable if it has such a lease. Raises WorkingSetTooLarge, ResourceExhausted."""

    def left(self, bundle: Bundle) -> None:
        """Nobody holds it. `bundle.written` says whether bytes have changed since it was entered."""

    def store(self, bundles: Sequence[Bundle]) -> None:
        """Bring what was written into the frames of the leases: they are going to be committed."""

    def ended(self, bundle: Bundle) -> None:
        """Its lease is about to end; nobody holds it."""

    def forget(self, bundle: Bundle) -> None:
        """Its bytes mean nothing any more; nobody holds it."""

    def missing_bytes(self, together: Sequence[Bundle]) -> int:
        """How much more memory these would need to fit in together, beside DRAM; 0 where they do."""

    def check_floor(self, together: Sequence[Bundle]) -> None:
        """Raise ResourceExhausted where these do not fit together."""

    def stats(self) -> MemoryStats: ...

    def accessed(self, access: Access) -> None:
        """What is entered from now on belongs to this."""

    def close(self) -> None:
        """Give everything back. Idempotent."""


class HostMemory:
    """CPU tensors lie in the frames of the arena themselves, which enter their ranges for the duration of a lease."""

    device = torch.device("cpu")
    keeps_copies = False
    unpinned = ""

    def __init__(self, space: AddressSpace, cap_bytes: int) -> None:
        self._space = space
        self.frame_bytes, self.bundle_cap_bytes = space.frame_bytes, cap_bytes

    def reserve(self, nbytes: int) -> Range:
        return self._space.reserve(nbytes)

    def release(self, range_: Range) -> None:
        self._space.release(range_)

    def is_here(self, bundle: Bundle) -> bool:
        return False

    def leased(self, bundle: Bundle) -> None:
        assert bundle.lease is not None
        self._space.map(bundle.range, bundle.offset_bytes, bundle.lease.grant.runs)

    def entered(self, bundle: Bundle, mode: Mode) -> None:
        pass

    def left(self, bundle: Bundle) -> None:
        pass

    def store(self, bundles: Sequence[Bundle]) -> None:
        pass

    def ended(self, bundle: Bundle) -> None:
        assert bundle.lease is not None
        self._space.unmap(bundle.range, bundle.offset_bytes, bundle.lease.grant.runs)

    def forget(self, bundle: Bundle) -> None:
        pass

    def missing_bytes(self, together: Sequence[Bundle]) -> int:
        return 0

    def check_floor(self, together: Sequence[Bundle]) -> None:
        pass  # the daemon checks it at admission

    def stats(self) -> MemoryStats:
        return MemoryStats()

    def accessed(self, access: Access) -> None:
        pass

    def close(self) -> None:
        pass
