"""Making room in DRAM: who may leave, what is on its way out already, and whom a demand sends away. Pure; the ledger
acts on it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from tiermem.allocator import choose_victims
from tiermem.placement.base import Placement
from tiermem.residency import BundleRecord, State


@dataclass(frozen=True, slots=True)
class Evictions:
    """Ids of bundles: `drop` are clean, their frames are free at once; `write` are dirty, theirs are free when the
    write-back has ended and the bundle is dropped. `awaited` are in transfer already, and leave when it has ended.
    """

    drop: tuple[int, ...]
    write: tuple[int, ...]
    awaited: tuple[int, ...]


def choose_evictions(
    need_frames: int,
    free_frames: int,
    bundles: Collection[BundleRecord],
    pinned: Collection[int],
    placement: Placement,
    flash_quota_frames: int,
) -> Evictions | None:
    """Whom to evict so that `need_frames` are free once everything that is on its way out has left; None where that is
    too little.

    `pinned` are bundles that stay: leased, asked for, or needed sooner. A load in flight that nobody has asked for can
    leave when it has ended; it is counted on only where the others do not suffice, and nobody is sent away for it. A
    dirty victim for whose second flash copy there is no room yet is not named: the write-backs in flight come first,
    and when one has ended this is asked again. What a lane may demand always fits beside what is leased or asked for
    (budgets), so for a demand the answer is never None.
    """
    coming = [r for r in bundles if _leaves_by_itself(r, pinned)]
    idle = {r.bundle_id: r for r in bundles if r.state in (State.CLEAN, State.DIRTY) and r.bundle_id not in pinned}
    order = [idle[b] for b in placement.eviction_order(idle)]
    candidates = [(r, r.frames) for r in order]
    victims = choose_victims(need_frames, free_frames + sum(r.frames for r in coming), candidates)
    if victims is None:
        coming += [r for r in bundles if r.state == State.LOADING and r.bundle_id not in pinned]
        victims = choose_victims(need_frames, free_frames + sum(r.frames for r in coming), candidates)
        if victims is None:
            return None
    drop, write = [], []
    flash_free = flash_quota_frames - flash_frames(bundles)
    for record in victims:
        if record.state == State.CLEAN:
            drop.append(record.bundle_id)
        elif record.frames <= flash_free:
            flash_free -= record.frames
            write.append(record.bundle_id)
    return Evictions(tuple(drop), tuple(write), tuple(r.bundle_id for r in coming))


def flash_frames(bundles: Iterable[BundleRecord]) -> int:
    """Most flash frames that bundles hold: their copies, and beside them those that write-backs in flight make.

    A copy in a file of the client's takes none. A doomed bundle may be counted for a write-back that was a load.
    """
    return sum(
        r.frames
        * (
            (r.flash_version > 0 and not r.external) + (r.state in (State.WRITING, State.DOOMED))
        )  # both: never in place
        for r in bundles
    )


def _leaves_by_itself(record: BundleRecord, pinned: Collection[int]) -> bool:
    return record.state == State.DOOMED or (record.state == State.WRITING and record.bundle_id not in pinned)
