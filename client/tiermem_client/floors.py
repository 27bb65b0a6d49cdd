"""The largest set of bundles that a lane uses together: what the daemon must promise before anything runs (no
hold-and-wait).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from torch import nn

from tiermem_client.early_updates import InBackward
from tiermem_client.grads import GradBook
from tiermem_client.memory import Bundle
from tiermem_client.residency import Residency
from tiermem_client.units import Unit
from tiermem_client.updates import Updater


class Floor(NamedTuple):
    """What has to fit at once, and whether it lets updates be deferred; if they were to be and are not, the bytes that
    are missing for it, and in which tier.
    """

    bundles: list[Bundle]
    deferred: bool = False
    missing_bytes: int = 0
    tier: str = "DRAM"


def choose_floor(
    units: Iterable[Unit], book: GradBook, updater: Updater | None, residency: Residency, deferred: bool
) -> Floor:
    """With deferred updates, where they are wanted and what they need fits into DRAM and the device; else the least."""
    frame_bytes = residency.session.opened.frame_bytes

    def frames_for(nbytes: int) -> int:
        return max(1, -(-nbytes // frame_bytes))

    units = list(units)
    least = main_floor(units, book, updater, frames_for)
    if updater is None or not deferred:
        return Floor(least)
    floor = main_floor(units, book, updater, frames_for, deferred=True)
    missing = sum(frames_for(bundle.spec.nbytes) for bundle in floor) - residency.session.frames
    if missing > 0:
        return Floor(least, missing_bytes=missing * frame_bytes)
    if on_device := residency.memory.missing_bytes(floor):
        return Floor(least, missing_bytes=on_device, tier="the device")
    return Floor(floor, deferred=True)


def main_floor(
    units: Iterable[Unit],
    book: GradBook,
    updater: Updater | None,
    frames_for: Callable[[int], int],
    deferred: bool = False,
) -> list[Bundle]:
    """The set with most frames among: a unit's forward inside the units around it; a group's backward with its
    gradients beside them; one group's update, if deferred beside the units around, if inside backward beside the unit.
    """
    units = list(units)
    around = _around(units)
    sets: list[list[Bundle]] = []
    for unit in units:
        outer = [b for u in around.get(unit, ()) for b in u.bundles]
        inside = list(dict.fromkeys([*outer, *unit.bundles]))
        sets.append(inside)
        for group in unit.groups:
            for store in book.stores.get(group, ()):
                sets.append(list(dict.fromkeys([*inside, *store.bundles])))
        if updater is not None and updater.early.mode is InBackward.OPTED_IN:
            sets += [list(dict.fromkeys([*inside, *s])) for group in unit.groups for s in updater.working_sets(group)]
        if updater is not None and deferred and outer:
            sets += [list(dict.fromkeys([*outer, *s])) for group in unit.groups for s in updater.working_sets(group)]
    if updater is not None:
        sets += updater.working_sets()
    return max(sets, key=lambda s: sum(frames_for(b.spec.nbytes) for b in s), default=[])


def _around(units: list[Unit]) -> dict[Unit, list[Unit]]:
    """For each unit, the units whose modules contain one of its modules: their forward runs around its own."""
    inner: dict[nn.Module, list[Unit]] = {}
    for unit in units:
        for module in unit.modules:
            for child in module.modules():
                if child is not module:
                    inner.setdefault(child, []).append(unit)
    return {u: list(dict.fromkeys(o for m in u.modules for o in inner.get(m, ()) if o is not u)) for u in units}
