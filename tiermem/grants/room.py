"""Making room in DRAM: who may leave, what is on its way out already, and whom a demand sends away. Pure; the ledger
acts on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Set
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


class Room:
    """Whom to evict, for one need after the other, while nothing else changes than what was chosen is evicted and what
    was freed is taken. `idle` and `moving` are the ids of all `bundles` that could leave, and of those in transfer;
    `flash_free_frames` says what copies may take.

    A dirty victim for whose second flash copy there is no room yet is not named: the write-backs in flight come first,
    and when one has ended this is asked again.
    """

    def __init__(
        self,
        bundles: Mapping[int, BundleRecord],
        idle: Set[int],
        moving: Set[int],
        placement: Placement,
        flash_free_frames: Callable[[], int],
    ) -> None:
        self._bundles, self._idle, self._placement = bundles, idle, placement
        self._transfers = [bundles[b] for b in sorted(moving)]
        self._flash_free_frames = flash_free_frames
        self._flash_left: int | None = None
        self._rest: Iterator[int] | None = None
        self._read: list[BundleRecord] = []  # from it

    def evictions(self, need_frames: int, free_frames: int, pinned: Set[int]) -> Evictions | None:
        """Whom to evict so that `need_frames` are free once everything that is on its way out has left; None where that
        is too little.

        `pinned` are bundles that stay: leased, asked for, or needed sooner; they never become fewer. A load in flight
        that nobody has asked for can leave when it has ended; it is counted on only where the others do not suffice,
        and nobody is sent away for it. What a lane may demand always fits beside what is leased or asked for (budgets),
        so for a demand the answer is never None.
        """
        doomed, writing = State.DOOMED, State.WRITING
        coming = [
            r
            for r in self._transfers
            if r.state is doomed or (r.state is writing and r.bundle_id not in pinned)  # leaves by itself
        ]
        free_frames += sum(r.frames for r in coming)
        victims: tuple[BundleRecord, ...] | None = ()
        if free_frames < need_frames:
            victims = choose_victims(need_frames, free_frames, self._candidates(pinned))
        if victims is None:
            loads = [r for r in self._transfers if r.state is State.LOADING and r.bundle_id not in pinned]
            coming += loads
            free_frames += sum(r.frames for r in loads)
            victims = choose_victims(need_frames, free_frames, self._candidates(pinned))
        if victims is None:
            return None
        drop = [r for r in victims if r.state is State.CLEAN]
        write = [r for r in victims if r.state is not State.CLEAN and self._has_copy_room(r)]
        self._transfers += write
        return Evictions(_ids(drop), _ids(write), _ids(coming))

    def _candidates(self, pinned: Set[int]) -> Iterator[tuple[BundleRecord, int]]:
        if self._rest is None:
            self._rest = iter(self._placement.eviction_order(self._idle))
        idle, bundles = self._idle, self._bundles
        self._read = [record for record in self._read if record.bundle_id in idle]  # the others have left
        for record in self._read:
            if record.bundle_id not in pinned:
                yield record, record.frames
        for bundle in self._rest:
            if bundle in idle and bundle not in pinned:
                record = bundles[bundle]
                self._read.append(record)
                yield record, record.frames

    def _has_copy_room(self, record: BundleRecord) -> bool:
        if self._flash_left is None:
            self._flash_left = self._flash_free_frames()
        if record.frames > self._flash_left:
            return False
        self._flash_left -= record.frames
        return True


def _ids(records: Iterable[BundleRecord]) -> tuple[int, ...]:
    return tuple([record.bundle_id for record in records])


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
