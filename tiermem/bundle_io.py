"""How a bundle's bytes get from one tier to the other: transfers in chunks, each hashed in DRAM just before it is
written and just after it was read.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from tiermem.allocator import Run
from tiermem.bundle import BundleSpec
from tiermem.clock import Clock
from tiermem.digest import digest
from tiermem.errors import DataLoss, TiermemError
from tiermem.file_pieces import FilePiece, pieces_within
from tiermem.mover import Chunk, Prepared, Transfer
from tiermem.stats import Link
from tiermem.tiers.base import Extent, Tier
from tiermem.tiers.dram import DramTier
from tiermem.tiers.flash_directory import FlashDirectory
from tiermem.tiers.source_file import SourceFile
from tiermem.trace import Span, TraceRing
from tiermem.units import format_size


@dataclass(frozen=True, slots=True)
class FlashCopy:
    """Where a bundle's bytes lie in flash, and the xxh3 digest of each chunk, taken in DRAM just before the write."""

    extent: Extent
    digests: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FileCopy:
    """A bundle's bytes in a file of the client's, and the digest of each chunk's pieces as the client has seen them."""

    file: SourceFile
    pieces: tuple[FilePiece, ...]
    digests: tuple[int, ...]


@dataclass(slots=True)
class CopyInProgress:
    """What a write-back has so far. Chunks run in parallel, each with its own index."""

    digests: list[int] = field(default_factory=list)
    extent: Extent | None = None


@dataclass(frozen=True, slots=True)
class BundleIO:
    """Makes the transfers of one job. `file_place`: the mover's place where clients' files are read. No state of its
    own; the chunks run on the mover's threads, and each leaves a span in `trace`.
    """

    job: str
    session: str
    chunk_bytes: int
    dram: DramTier
    flash: Tier
    directories: Sequence[FlashDirectory]
    file_place: int
    trace: TraceRing
    clock: Clock

    def chunks(self, nbytes: int) -> list[tuple[int, int]]:
        """(offset, length) of each."""
        size = self.chunk_bytes
        return [(offset, min(size, nbytes - offset)) for offset in range(0, nbytes, size)]

    def load(
        self,
        bundle: int,
        spec: BundleSpec,
        runs: tuple[Run, ...],
        copy: FlashCopy | FileCopy,
        due_s: float,
        done: Callable[[TiermemError | None], None],
    ) -> Transfer:
        """Fill the frames from the copy. A digest that differs is DataLoss."""
        spans = self.chunks(spec.nbytes)
        digests = zip(spans, copy.digests, strict=True)
        chunks: list[Chunk]
        match copy:
            case FlashCopy(extent, _):
                place = extent.place
                chunks = [partial(self._read_chunk, spec, runs, extent, span, expected) for span, expected in digests]
            case FileCopy():
                place = self.file_place
                chunks = [
                    partial(self._read_file_chunk, spec, runs, copy, span, expected) for span, expected in digests
                ]
        link = Link.FLASH_TO_DRAM
        chunks = self._traced(link, f"read {spec}", bundle, due_s, spans, chunks)
        return Transfer(link, spec.nbytes, Prepared(place, chunks), done, due_s, self.session)

    def _traced(
        self,
        link: Link,
        name: str,
        bundle: int,
        due_s: float,
        spans: Sequence[tuple[int, int]],
        chunks: Sequence[Chunk],
    ) -> list[Chunk]:
        return [
            partial(self._run_traced, link, name, bundle, due_s, nbytes, chunk)
            for (_, nbytes), chunk in zip(spans, chunks, strict=True)
        ]

    def _run_traced(self, link: Link, name: str, bundle: int, due_s: float, nbytes: int, chunk: Chunk) -> None:
        started_s, moved, detail = self.clock.now_s(), 0, "failed"
        try:
            chunk()
            moved, detail = nbytes, ""
        finally:
            track = f"{link} {threading.current_thread().name.removeprefix('tiermem-mover-')}"
            self.trace.add(Span(track, name, started_s, self.clock.now_s(), moved, bundle, 0, due_s, detail))

    def _read_chunk(
        self, spec: BundleSpec, runs: tuple[Run, ...], extent: Extent, span: tuple[int, int], expected: int
    ) -> None:
        views = self.dram.views(runs, *span)
        self.flash.read(extent, span[0], views)
        self.directories[extent.place].count_traffic(span[1], 0)
        if digest(views) != expected:
            directory = self.directories[extent.place]
            directory.count_checksum_failure()
            raise DataLoss(
                f"{spec} of job {self.job!r}: {format_size(span[1])} at offset {span[0]} read back from "
                f"{directory.path} are not "
                "what was written; check the drive, and restore the job from its last checkpoint"
            )

    def _read_file_chunk(
        self, spec: BundleSpec, runs: tuple[Run, ...], copy: FileCopy, span: tuple[int, int], expected: int
    ) -> None:
        filled: list[memoryview] = []
        for piece in pieces_within(copy.pieces, *span):
            views = self.dram.views(runs, piece.bundle_offset, piece.nbytes)
            copy.file.read(piece.file_offset, views)
            filled += views
        if digest(filled) != expected:
            raise DataLoss(
                f"{spec} of job {self.job!r}: {copy.file.path} has been changed since attach; frozen weights are read "
                "from there while the job runs: put the file back as it was, and attach again"
            )

    def write_back(
        self,
        bundle: int,
        spec: BundleSpec,
        runs: tuple[Run, ...],
        copy: CopyInProgress,
        due_s: float,
        done: Callable[[TiermemError | None], None],
    ) -> Transfer:
        """Copy the frames to a flash extent that is reserved then; `copy` is filled in meanwhile."""
        prepare = partial(self._reserve_copy, bundle, spec, runs, copy, due_s)
        return Transfer(Link.DRAM_TO_FLASH, spec.nbytes, prepare, done, due_s, self.session)

    def _reserve_copy(
        self, bundle: int, spec: BundleSpec, runs: tuple[Run, ...], copy: CopyInProgress, due_s: float
    ) -> Prepared:
        spans = self.chunks(spec.nbytes)
        copy.digests = [0] * len(spans)
        extent = copy.extent = self.flash.reserve(spec.nbytes)
        chunks = [partial(self._write_chunk, runs, extent, copy, i, span) for i, span in enumerate(spans)]
        name = f"write {spec}"
        return Prepared(extent.place, self._traced(Link.DRAM_TO_FLASH, name, bundle, due_s, spans, chunks))

    def _write_chunk(
        self, runs: tuple[Run, ...], extent: Extent, copy: CopyInProgress, index: int, span: tuple[int, int]
    ) -> None:
        views = self.dram.views(runs, *span)
        copy.digests[index] = digest(views)
        self.flash.write(extent, span[0], views)
        self.directories[extent.place].count_traffic(0, span[1])
