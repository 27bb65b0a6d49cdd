"""A DRAM cache over flash, counted in bytes and not in time: what a placement costs on a given sequence. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from tiermem.bundle import Mode
from tiermem.forecast import Forecast
from tiermem.placement.base import Placement
from tiermem.placement.belady import Belady
from tiermem.placement.lru import LeastRecentlyUsed
from tiermem.plan import Access, BundleUse, Plan, PlannedAccess


@dataclass(frozen=True, slots=True)
class CacheCount:
    """What a simulation counted. A use of a bundle that exists is a hit or a miss; a miss reads it; making one is
    neither. `written_bytes` left DRAM because they were dirty; what is dirty in the end is not among them.
    """

    hits: int = 0
    misses: int = 0
    creates: int = 0
    read_bytes: int = 0
    written_bytes: int = 0

    @property
    def hit_rate(self) -> float:
        """Of the uses of bundles that existed; 0 where there were none."""
        return self.hits / max(1, self.hits + self.misses)

    def minus(self, earlier: CacheCount) -> CacheCount:
        """What was counted since."""
        return CacheCount(
            self.hits - earlier.hits,
            self.misses - earlier.misses,
            self.creates - earlier.creates,
            self.read_bytes - earlier.read_bytes,
            self.written_bytes - earlier.written_bytes,
        )


class SimulatedPolicy(Protocol):
    """A placement that is told what happens."""

    @property
    def placement(self) -> Placement: ...

    def began(self, number: int, planned: PlannedAccess) -> None:
        """The access of that number (from 0) begins."""

    def bypass(self, bundle: int, resident: Iterable[int]) -> bool:
        """Whether a missing bundle is used without a place in the cache."""


class LruPolicy:
    """What is predicted does not matter."""

    def __init__(self) -> None:
        self.placement = LeastRecentlyUsed()

    def began(self, number: int, planned: PlannedAccess) -> None:
        pass

    def bypass(self, bundle: int, resident: Iterable[int]) -> bool:
        return False


class PredictedPolicy:
    """Belady on the forecast that the accesses so far allow: what a running job can do. `order` makes another placement
    of the same forecast.
    """

    def __init__(
        self, bypass: bool = False, order: Callable[[Callable[[int], int | None]], Placement] | None = None
    ) -> None:
        self.forecast = Forecast()
        self._belady = Belady(self.forecast.next_use)
        self.placement = order(self.forecast.next_use) if order else self._belady
        self._bypass = bypass

    def began(self, number: int, planned: PlannedAccess) -> None:
        self.forecast.began("main", planned.access)
        for use in planned.uses:
            self.forecast.leased("main", use)

    def bypass(self, bundle: int, resident: Iterable[int]) -> bool:
        return self._bypass and self._belady.bypass(bundle, resident)


class OfflinePolicy:
    """Belady on what will really happen: the bound."""

    def __init__(self, plan: Plan, bypass: bool = False) -> None:
        self._numbers: dict[int, list[int]] = {}
        for number, planned in enumerate(plan):
            for use in planned.uses:
                self._numbers.setdefault(use.bundle, []).append(number)
        self._now = -1
        self._bypass = bypass
        self.placement = Belady(self._next_use)

    def began(self, number: int, planned: PlannedAccess) -> None:
        self._now = number

    def bypass(self, bundle: int, resident: Iterable[int]) -> bool:
        return self._bypass and self.placement.bypass(bundle, resident)

    def _next_use(self, bundle: int) -> int | None:
        numbers = self._numbers[bundle]
        index = bisect_right(numbers, self._now)
        return numbers[index] - self._now if index < len(numbers) else None


class _Cache:
    def __init__(self, capacity_bytes: int, policy: SimulatedPolicy) -> None:
        self._capacity_bytes = capacity_bytes
        self._policy = policy
        self._resident: dict[int, int] = {}  # bundle: bytes
        self._dirty: set[int] = set()
        self._used_bytes = 0
        self.hits = self.misses = self.creates = self.read_bytes = self.written_bytes = 0

    def count(self) -> CacheCount:
        return CacheCount(self.hits, self.misses, self.creates, self.read_bytes, self.written_bytes)

    def access(self, planned: PlannedAccess) -> None:
        pinned = {use.bundle for use in planned.uses}
        if len(pinned) != len(planned.uses):
            raise ValueError(f"{planned.access} uses a bundle twice: {planned.uses}")
        if planned.nbytes > self._capacity_bytes:
            raise ValueError(f"{planned.access} uses {planned.nbytes} bytes at once, of {self._capacity_bytes}")
        for use in planned.uses:
            self._use(use, pinned)

    def _use(self, use: BundleUse, pinned: set[int]) -> None:
        placement = self._policy.placement
        placement.used(use.bundle)
        if use.bundle in self._resident:
            self.hits += 1
        elif use.mode == Mode.CREATE:
            self.creates += 1
            self._admit(use, pinned)
        else:
            self.misses += 1
            self.read_bytes += use.nbytes
            idle = [bundle for bundle in self._resident if bundle not in pinned]
            full = self._used_bytes + use.nbytes > self._capacity_bytes
            if full and self._policy.bypass(use.bundle, idle):
                self.written_bytes += use.nbytes if use.mode.writes else 0
            else:
                self._admit(use, pinned)
        if use.mode == Mode.CONSUME and use.bundle in self._resident:
            self._used_bytes -= self._resident.pop(use.bundle)
            self._dirty.discard(use.bundle)
            placement.forget(use.bundle)
        elif use.mode.writes and use.bundle in self._resident:
            self._dirty.add(use.bundle)

    def _admit(self, use: BundleUse, pinned: set[int]) -> None:
        if self._used_bytes + use.nbytes > self._capacity_bytes:
            idle = [bundle for bundle in self._resident if bundle not in pinned]
            for victim in self._policy.placement.eviction_order(idle):
                nbytes = self._resident.pop(victim)
                self._used_bytes -= nbytes
                if victim in self._dirty:
                    self._dirty.discard(victim)
                    self.written_bytes += nbytes
                if self._used_bytes + use.nbytes <= self._capacity_bytes:
                    break
        self._resident[use.bundle] = use.nbytes
        self._used_bytes += use.nbytes


def simulate(plan: Plan, capacity_bytes: int, policy: SimulatedPolicy, warm_up: int = 0) -> CacheCount:
    """Run the accesses through a cache that is empty at first; the first `warm_up` of them are not counted. Raises as
    `simulate_each`.
    """
    counts = simulate_each(plan, capacity_bytes, policy)
    total = counts[-1] if counts else CacheCount()
    return total.minus(counts[warm_up - 1]) if 0 < warm_up <= len(counts) else total


def simulate_each(plan: Plan, capacity_bytes: int, policy: SimulatedPolicy) -> list[CacheCount]:
    """What had been counted after each access.

    All bundles of an access are in the cache together (ValueError where they do not fit), but for those that the policy
    lets bypass it: they are read into room outside, and written back from there.
    """
    cache, counts = _Cache(capacity_bytes, policy), []
    for number, planned in enumerate(plan):
        policy.began(number, planned)
        cache.access(planned)
        counts.append(cache.count())
    return counts


def plan_of(accesses: Iterable[Access], uses: Callable[[Access], tuple[BundleUse, ...]]) -> Plan:
    """The accesses with what each uses."""
    return tuple(PlannedAccess(access, uses(access)) for access in accesses)


def one_bundle_a_unit(accesses: Iterable[Access], nbytes: int = 1) -> Plan:
    """Every unit is one bundle, written by updates, read otherwise."""
    numbers: dict[object, int] = {}

    def uses(access: Access) -> tuple[BundleUse, ...]:
        bundle = numbers.setdefault(access.unit, len(numbers))
        return (BundleUse(bundle, Mode.UPDATE if access.phase.name == "UPDATE" else Mode.READ, nbytes),)

    return plan_of(accesses, uses)
