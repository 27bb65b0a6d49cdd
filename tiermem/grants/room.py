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
    write-back has ended and the bundle is dropped.
    """

    drop: tuple[int, ...]
    write: tuple[int, ...]


def choose_evictions(
    need_frames: int,
    free_frames: int,
    bundles: Collection[BundleRecord],
    pinned: Collection[int],
    placement: Placement,
    flash_quota_frames: int,
) -> Evictions:
    """Whom to evict so that `need_frames` are free once everything that is on its way out has left.

    `pinned` are bundles leased or asked for; they stay. A dirty victim for whose second flash copy there is no room yet
    is not named: the write-backs in flight come first, and when one has ended this is asked again. What a lane may
    demand always fits beside what is pinned (budgets), so AssertionError means that this was not kept.
    """
    coming = sum(r.frames for r in bundles if _leaves_by_itself(r, pinned))
    idle = {r.bundle_id: r for r in bundles if r.state in (State.CLEAN, State.DIRTY) and r.bundle_id not in pinned}
    order = [idle[b] for b in placement.eviction_order(idle)]
    victims = choose_victims(need_frames, free_frames + coming, [(r, r.frames) for r in order])
    assert victims is not None, f"{need_frames} frames demanded, but {free_frames} + {coming} and the idle are fewer"
    drop, write = [], []
    flash_free = flash_quota_frames - flash_frames(bundles)
    for record in victims:
        if record.state == State.CLEAN:
            drop.append(record.bundle_id)
        elif record.frames <= flash_free:
            flash_free -= record.frames
            write.append(record.bundle_id)
    return Evictions(tuple(drop), tuple(write))


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
