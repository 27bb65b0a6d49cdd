"""What is used furthest in the future leaves first: L. A. Belady, "A study of replacement algorithms for a
virtual-storage computer", IBM Systems Journal 5(2), 1966, on predicted uses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tiermem.placement.lru import LeastRecentlyUsed


class Belady:
    """Orders by predicted next use, the furthest first. A bundle without one leaves before all that have one: a
    prediction reaches as far as a whole cycle, so what is not in it is not needed in this cycle. Among several of them,
    and of equals, the least recently used leaves first; where nothing is predicted that is LRU.

    `next_use` gives, for a bundle's id, how many accesses from now it is used (1: next), or None. It is called for
    every candidate, under the store's lock, and must be as pure as this.
    """

    def __init__(self, next_use: Callable[[int], int | None]) -> None:
        self._next_use = next_use
        self._recency = LeastRecentlyUsed()

    def used(self, bundle_id: int) -> None:
        self._recency.used(bundle_id)

    def forget(self, bundle_id: int) -> None:
        self._recency.forget(bundle_id)

    def eviction_order(self, candidates: Iterable[int]) -> list[int]:
        by_recency = self._recency.eviction_order(candidates)
        distances = {bundle: self._next_use(bundle) for bundle in by_recency}
        return sorted(by_recency, key=lambda bundle: -_further(distances[bundle]))

    def bypass(self, bundle_id: int, resident: Iterable[int]) -> bool:
        """Whether the bundle is used later than every one of `resident`: then none of them should leave for it.

        To ask for a prefetch (with the victims as `resident`), or whether to drop a bundle as soon as its lease ends.
        False where there are no others, and where one of them has no predicted use either.
        """
        others = [_further(self._next_use(bundle)) for bundle in resident]
        return bool(others) and max(others) < _further(self._next_use(bundle_id))


def _further(distance: int | None) -> float:
    return float("inf") if distance is None else distance
