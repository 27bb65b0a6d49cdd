"""What the ledger is told of the future, by whoever predicts it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from tiermem.bundle import BundleSpec, Mode
from tiermem.plan import Access


@dataclass(frozen=True, slots=True)
class Use:
    """A bundle's expected use, by its form, as ids of bundles that are made anew in every step do not recur. `due_s`:
    when, on the clock of who predicts it.
    """

    spec: int
    mode: Mode
    due_s: float = math.inf


class Foresight(Protocol):
    """Called under the store's lock; pure bookkeeping. Whatever it says costs transfers at most."""

    def accessed(self, lane: str, access: Access) -> None:
        """The lane begins an access; the uses that follow belong to it."""

    def used(self, lane: str, spec: BundleSpec, mode: Mode) -> None:
        """The lane uses a bundle of this form."""

    def upcoming(self, lane: str) -> Iterable[Use]:
        """The uses that the lane will make next, nearest first; read as far as needed, and not kept."""


class NothingForeseen:
    """The foresight of who knows nothing: bundles are served on demand."""

    def accessed(self, lane: str, access: Access) -> None:
        pass

    def used(self, lane: str, spec: BundleSpec, mode: Mode) -> None:
        pass

    def upcoming(self, lane: str) -> Iterable[Use]:
        return ()
