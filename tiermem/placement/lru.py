"""Least recently used: the order while nothing is predicted."""

from __future__ import annotations

from collections.abc import Iterable


class LeastRecentlyUsed:
    """Orders by the last use; never used goes first."""

    def __init__(self) -> None:
        self._last_use: dict[int, int] = {}
        self._uses = 0

    def used(self, bundle_id: int) -> None:
        self._uses += 1
        self._last_use[bundle_id] = self._uses

    def forget(self, bundle_id: int) -> None:
        self._last_use.pop(bundle_id, None)

    def last_use(self, bundle_id: int) -> int:
        """A number that grows with every use of any bundle; 0 for what was never used."""
        return self._last_use.get(bundle_id, 0)

    def eviction_order(self, candidates: Iterable[int]) -> list[int]:
        return sorted(candidates, key=lambda b: (self._last_use.get(b, 0), b))
