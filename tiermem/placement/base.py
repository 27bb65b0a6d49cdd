"""Which bundle leaves DRAM first. A policy only orders; the ledger decides who may leave and how many frames are
needed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Protocol


class Placement(Protocol):
    """Called under the store's lock; pure bookkeeping, no clock, no I/O."""

    def used(self, bundle_id: int) -> None:
        """A lease of the bundle began or ended."""

    def forget(self, bundle_id: int) -> None:
        """The bundle is gone; unknown ids are ignored."""

    def eviction_order(self, candidates: Collection[int]) -> Iterable[int]:
        """The candidates, first to leave first; to be read before this is asked again."""
