"""A store that does everything but move bytes: for measuring what deciding and talking cost by themselves.

Nothing that a job puts into it can be read again, so no configuration names it: a benchmark or a test builds it, with
`TensorStore(parts=null_parts(...))`. The arena is not prefaulted and takes no memory as long as nobody writes to it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from tiermem.allocator import Run
from tiermem.bundle import BundleSpec
from tiermem.bundle_io import BundleIO, CopyInProgress, FileCopy, FlashCopy
from tiermem.clock import MonotonicClock
from tiermem.errors import TiermemError
from tiermem.layout import ArenaLayout, arena_layout
from tiermem.lookahead import LookaheadOptions
from tiermem.mover import Mover, Prepared, Transfer
from tiermem.stats import Link
from tiermem.store import StoreParts, TensorStore
from tiermem.testing.fakes import NullTier
from tiermem.tiers.dram import DramTier
from tiermem.tiers.os_calls import MADV_POPULATE_WRITE, LinuxCalls

_NULL_FLASH_BYTES = 1 << 42


class SparseCalls(LinuxCalls):
    """Leaves the pages of an arena absent."""

    def madvise(self, address: int, nbytes: int, advice: int) -> None:
        if advice != MADV_POPULATE_WRITE:
            super().madvise(address, nbytes, advice)


@dataclass(frozen=True, slots=True)
class NullIO(BundleIO):
    """Transfers of one chunk each, which call the flash tier and touch no byte: no digests."""

    def load(
        self,
        bundle: int,
        spec: BundleSpec,
        runs: tuple[Run, ...],
        copy: FlashCopy | FileCopy,
        due_s: float,
        done: Callable[[TiermemError | None], None],
    ) -> Transfer:
        assert isinstance(copy, FlashCopy), "files are not read here"
        extent = copy.extent

        def chunk() -> None:
            self.flash.read(extent, 0, self.dram.views(runs, 0, spec.nbytes))

        prepared = Prepared(extent.place, (chunk,))
        return Transfer(Link.FLASH_TO_DRAM, spec.nbytes, prepared, done, due_s, self.session)

    def write_back(
        self,
        bundle: int,
        spec: BundleSpec,
        runs: tuple[Run, ...],
        copy: CopyInProgress,
        due_s: float,
        done: Callable[[TiermemError | None], None],
    ) -> Transfer:
        prepare = partial(self._prepare_copy, spec, runs, copy)
        return Transfer(Link.DRAM_TO_FLASH, spec.nbytes, prepare, done, due_s, self.session)

    def _prepare_copy(self, spec: BundleSpec, runs: tuple[Run, ...], copy: CopyInProgress) -> Prepared:
        extent = copy.extent = self.flash.reserve(spec.nbytes)

        def chunk() -> None:
            self.flash.write(extent, 0, self.dram.views(runs, 0, spec.nbytes))

        return Prepared(extent.place, (chunk,))


def capped_layout(cap_bytes: int, arena_bytes: int) -> ArenaLayout:
    """As `arena_layout`, with another cap (at most an eighth of the arena, in whole frames), and chunks as large."""
    layout = arena_layout(arena_bytes)
    frames = max(1, min(cap_bytes, arena_bytes // 8) // layout.frame_bytes)
    cap = frames * layout.frame_bytes
    return replace(layout, bundle_cap_bytes=cap, chunk_bytes=cap)


def null_parts(cap_bytes: int) -> StoreParts:
    """For bundles of at most `cap_bytes`."""
    return StoreParts(
        layout=partial(capped_layout, cap_bytes),
        dram=lambda layout: DramTier(layout, calls=SparseCalls()),
        flash=lambda directories, layout, job, quota_bytes: NullTier(layout, quota_bytes or _NULL_FLASH_BYTES),
        io=NullIO,
    )


def null_store(dram_bytes: int, cap_bytes: int, workers: int) -> TensorStore:
    """`workers`: threads of the mover."""
    clock = MonotonicClock()
    mover = Mover(1, workers_per_place=workers, clock=clock)
    return TensorStore(dram_bytes, [], mover, clock, lookahead=LookaheadOptions(), parts=null_parts(cap_bytes))
