"""What the ledger is told of the future, by whoever predicts it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple, Protocol

from tiermem.bundle import BundleSpec, Mode
from tiermem.plan import Access


class Use(NamedTuple):
    """A bundle's expected use, by its form, as ids of bundles that are made anew in every step do not recur. `due_s`:
    when, on the clock of who predicts it. `place`: a number that uses of one access share, and others do not. A tuple,
    as thousands are made at a time.
    """

    spec: int
    mode: Mode
    due_s: float = math.inf
    place: int = 0


class Foresight(Protocol):
    """Called under the store's lock; pure bookkeeping. Whatever it says costs transfers at most."""

    def accessed(self, lane: str, access: Access) -> bool:
        """The lane begins an access; the uses that follow belong to it. Whether something else is foreseen now than
        before, and not merely the same uses one access nearer.
        """

    def used(self, lane: str, spec: BundleSpec, mode: Mode) -> None:
        """The lane uses a bundle of this form."""

    def upcoming(self, lane: str) -> Iterable[Use]:
        """The uses that the lane will make next, nearest first; read as far as needed, and not kept."""


class NothingForeseen:
    """The foresight of who knows nothing: bundles are served on demand."""

    def accessed(self, lane: str, access: Access) -> bool:
        return False

    def used(self, lane: str, spec: BundleSpec, mode: Mode) -> None:
        pass

    def upcoming(self, lane: str) -> Iterable[Use]:
        return ()
