"""What is used furthest in the future leaves first: L. A. Belady, "A study of replacement algorithms for a
virtual-storage computer", IBM Systems Journal 5(2), 1966, on predicted uses.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterable
from operator import itemgetter

from tiermem.placement.lru import LeastRecentlyUsed

_bundle = itemgetter(2)
_Rank = tuple[float, int, int]  # negative place of the next use, last use, bundle: the first leaves first


class Belady:
    """Orders by predicted next use, the furthest first. A bundle without one leaves before all that have one: a
    prediction reaches as far as a whole cycle, so what is not in it is not needed in this cycle. Among several of them,
    and of equals, the least recently used leaves first; where nothing is predicted that is LRU.

    `next_use` gives, for a bundle's id, how many accesses from now it is used (1: next), or None. It is called under
    the store's lock, and must be as pure as this.

    `moment` gives (generation, now): while the generation is the same, a bundle that is not used keeps its place, `now`
    + `next_use`. Then only bundles that have been used are asked about again; without it every candidate is, each time.
    """

    def __init__(
        self, next_use: Callable[[int], int | None], moment: Callable[[], tuple[int, int]] | None = None
    ) -> None:
        self._next_use, self._moment = next_use, moment
        self._recency = LeastRecentlyUsed()
        self._generation = -1
        self._order: list[_Rank] = []  # sorted
        self._ranks: dict[int, _Rank] = {}  # of what is in the order
        self._known: set[int] = set()  # the keys of `_ranks`
        self._used: set[int] = set()  # in the order, and used since

    def used(self, bundle_id: int) -> None:
        self._recency.used(bundle_id)
        if bundle_id in self._ranks:
            self._used.add(bundle_id)

    def forget(self, bundle_id: int) -> None:
        self._recency.forget(bundle_id)
        if bundle_id in self._ranks:
            self._used.add(bundle_id)

    def eviction_order(self, candidates: Collection[int]) -> Iterable[int]:
        if self._moment is None:
            by_recency = self._recency.eviction_order(candidates)
            distances = {bundle: self._next_use(bundle) for bundle in by_recency}
            return sorted(by_recency, key=lambda bundle: -_further(distances[bundle]))
        generation, now = self._moment()
        wanted = candidates if isinstance(candidates, set) else set(candidates)
        if generation != self._generation:
            self._generation = generation
            self._ranks = {bundle: self._rank(bundle, now) for bundle in wanted}
            self._order = sorted(self._ranks.values())
            self._known = set(self._ranks)
        else:
            self._bring_up_to_date(wanted, now)
        self._used.clear()
        return map(_bundle, self._order)

    def _bring_up_to_date(self, wanted: set[int], now: int) -> None:
        ranks, order = self._ranks, self._order
        known = self._known
        for bundle in (known - wanted) | self._used:
            del order[bisect_left(order, ranks.pop(bundle))]
            known.remove(bundle)
        for bundle in wanted - known:
            rank = ranks[bundle] = self._rank(bundle, now)
            insort(order, rank)
            known.add(bundle)

    def _rank(self, bundle: int, now: int) -> _Rank:
        return -now - _further(self._next_use(bundle)), self._recency.last_use(bundle), bundle

    def bypass(self, bundle_id: int, resident: Iterable[int]) -> bool:
        """Whether the bundle is used later than every one of `resident`: then none of them should leave for it.

        To ask for a prefetch (with the victims as `resident`), or whether to drop a bundle as soon as its lease ends.
        False where there are no others, and where one of them has no predicted use either.
        """
        others = [_further(self._next_use(bundle)) for bundle in resident]
        return bool(others) and max(others) < _further(self._next_use(bundle_id))


def _further(distance: int | None) -> float:
    return float("inf") if distance is None else distance
