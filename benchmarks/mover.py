"""How near the mover comes to the disk: whole bundles between an arena and a flash directory, as the daemon moves them,
beside fio on the same directory with the same block size, blocks in flight and mix.

The mover, the tiers and the transfers are the daemon's, digests included; once more without digests, so that their cost
shows. fio has two turns in each round: what it is over itself is the disk's noise. Flash and fio's file have been
written all over before, as recycled blocks are.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from unittest.mock import patch

from benchmarks.fio import Fio, Stream, find_fio
from benchmarks.load import OtherLoad
from benchmarks.paced import Spread, turns
from benchmarks.report import Machine, Report, Row
from tiermem import bundle_io
from tiermem.bundle import BundleSpec, Kind
from tiermem.bundle_io import BundleIO, CopyInProgress, FlashCopy
from tiermem.clock import MonotonicClock
from tiermem.config import MoverSection
from tiermem.errors import DataLoss, TiermemError
from tiermem.layout import MIN_ARENA_BYTES, arena_layout
from tiermem.mover import MAX_WRITERS_PER_PLACE, Mover, Transfer
from tiermem.tiers.base import Extent
from tiermem.tiers.dram import DramTier
from tiermem.tiers.flash import FlashTier
from tiermem.tiers.flash_directory import FlashDirectory
from tiermem.trace import TraceRing
from tiermem.units import MIB, format_size
from tiermem_client.embedded import default_flash_directory

TITLE = "rate of the mover over fio's (io_uring) on the same directory: reads, write-backs, and both"
TARGET = 0.9
BUSY_CORES = 0.2
MOVER, UNHASHED, AGAIN = "mover", "mover without digests", "fio again"
_WAIT_S = 120.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=9, help="turns of each variant (default 9)")
    parser.add_argument("--size", type=int, default=1024, metavar="MIB", help="moved in a turn (default 1024 MiB)")
    parser.add_argument("--bundle", type=int, default=64, metavar="MIB", help="bytes of a bundle (default 64 MiB)")
    parser.add_argument(
        "--workers",
        type=int,
        default=MoverSection().workers_per_directory,
        help="mover.workers_per_directory (default %(default)s)",
    )
    parser.add_argument("--flash", type=Path, metavar="DIR", help="on the disk to use (default: as tiermem chooses)")


@dataclass(frozen=True, slots=True)
class Mix:
    """What is moved: a turn's bytes in reads, write-backs, or half of them in each."""

    name: str
    reads: bool
    writes: bool


MIXES = (
    Mix("reads", reads=True, writes=False),
    Mix("write-backs", reads=False, writes=True),
    Mix("a step's mix", reads=True, writes=True),
)


def streams(mix: Mix, nbytes: int, block_bytes: int, workers: int) -> list[Stream]:
    """The mix for fio: as many blocks in flight as the mover has, reads and writes in different halves of the file."""
    part_bytes = nbytes // (mix.reads + mix.writes) // block_bytes * block_bytes
    writers = min(MAX_WRITERS_PER_PLACE, workers)
    found = []
    if mix.reads:
        found.append(Stream(False, 0, part_bytes, max(1, workers - writers) if mix.writes else workers))
    if mix.writes:
        found.append(Stream(True, part_bytes if mix.reads else 0, part_bytes, writers))
    return found


class Job:
    """One job's arena, all of it leased, and twice as much flash; bundles that fill the arena, each with a copy in
    flash. Their bytes are random and never change, so every copy has the same digests.
    """

    def __init__(self, path: Path, nbytes: int, bundle_bytes: int, workers: int) -> None:
        layout = arena_layout(nbytes)
        if not 0 < bundle_bytes <= layout.bundle_cap_bytes:
            raise SystemExit(f"give --bundle between 1 and {layout.bundle_cap_bytes // MIB} (an eighth of --size)")
        self.chunk_bytes = min(layout.chunk_bytes, bundle_bytes)
        self._lock = threading.Lock()  # owner: this job; guards what follows, which the mover's threads change
        self._copies: list[FlashCopy] = []
        self._hashed = True
        self._left = 0
        self._errors: list[str] = []
        self._ended = threading.Event()
        self._spec = BundleSpec(0, Kind.OPTIM, "moved", bundle_bytes)
        frames = layout.frames_for(bundle_bytes)
        count = layout.frames // frames
        self.nbytes = count * bundle_bytes
        with ExitStack() as undo:
            directory = FlashDirectory.open(path, None)
            undo.callback(directory.close)
            self._flash = FlashTier([directory], layout, "benchmark", 2 * count * frames * layout.frame_bytes)
            undo.callback(self._flash.close)
            self._dram = DramTier(layout)
            undo.callback(self._dram.close)
            self._mover = Mover(1, workers_per_place=workers)
            undo.callback(self._mover.close, _WAIT_S)
            trace, clock = TraceRing(), MonotonicClock()
            self._io = BundleIO(
                "benchmark", "session", layout.chunk_bytes, self._dram, self._flash, [directory], 0, trace, clock
            )
            self._extents = [self._dram.reserve(bundle_bytes) for _ in range(count)]
            self._fill()
            self._write_all_over()
            self._undo = undo.pop_all()

    def _fill(self) -> None:
        """What compresses, or is the same everywhere, would look too fast on some disks."""
        for extent in self._extents:
            for view in self._dram.views(extent.runs, 0, extent.nbytes):
                view[:] = os.urandom(view.nbytes)

    def _write_all_over(self) -> None:
        """Every block of the files, so that no turn is the first to write one; and a copy of every bundle."""
        filler: list[Extent] = []
        for extent in self._extents:
            filler.append(self._flash.reserve(extent.nbytes))
            self._flash.write(filler[-1], 0, self._dram.views(extent.runs, 0, extent.nbytes))
        new = [CopyInProgress() for _ in self._extents]
        self._move([self._write_back(index, copy, self._note) for index, copy in enumerate(new)])
        for copy in new:
            assert copy.extent is not None
            self._copies.append(FlashCopy(copy.extent, tuple(copy.digests)))
        for taken in filler:
            self._flash.free(taken)

    def rate(self, mix: Mix, hashed: bool = True) -> float:
        """Bytes a second from the first transfer's submission to the last one's end. Each is due after the one before,
        a read and a write-back at a time in a step's mix: there the first half of the bundles is read. Unless `hashed`,
        digests are neither taken nor compared.

        Raises SystemExit where a transfer failed.
        """
        self._hashed = hashed
        try:
            with nullcontext() if hashed else patch.object(bundle_io, "digest", lambda views: 0):
                return self._rate(mix)
        finally:
            self._hashed = True

    def _rate(self, mix: Mix) -> float:
        half = len(self._extents) // 2
        reads, writes = range(len(self._extents)), range(len(self._extents))
        if mix.reads and mix.writes:
            reads, writes = reads[:half], writes[half : 2 * half]
        transfers = []
        for due, (read, write) in enumerate(zip(reads, writes, strict=True)):
            if mix.reads:
                transfers.append(self._load(read, float(due)))
            if mix.writes:
                transfers.append(self._replace_copy(write, float(due)))
        started_s = time.perf_counter()
        self._move(transfers)
        seconds = time.perf_counter() - started_s
        return len(transfers) * self._spec.nbytes / seconds

    def check(self) -> None:
        """Every byte comes back from flash as it was written. Raises SystemExit where one does not."""
        for extent in self._extents:
            for view in self._dram.views(extent.runs, 0, extent.nbytes):
                view[:] = bytes(view.nbytes)
        self._move([self._load(index, 0.0) for index in range(len(self._extents))])

    def _load(self, index: int, due_s: float) -> Transfer:
        copy = self._copies[index]
        if not self._hashed:
            copy = FlashCopy(copy.extent, (0,) * len(copy.digests))
        return self._io.load(index, self._spec, self._extents[index].runs, copy, due_s, self._note)

    def _write_back(
        self, index: int, copy: CopyInProgress, done: Callable[[TiermemError | None], None], due_s: float = 0.0
    ) -> Transfer:
        return self._io.write_back(index, self._spec, self._extents[index].runs, copy, due_s, done)

    def _replace_copy(self, index: int, due_s: float) -> Transfer:
        """A write-back as a job's: to another extent, after which the older one is free."""
        new, hashed = CopyInProgress(), self._hashed

        def done(error: TiermemError | None) -> None:
            if error is None:
                assert new.extent is not None
                with self._lock:
                    old, self._copies[index] = self._copies[index], FlashCopy(new.extent, self._copies[index].digests)
                self._flash.free(old.extent)
                if hashed and tuple(new.digests) != old.digests:
                    error = DataLoss(f"bundle {index} was hashed differently than before, though nobody has written it")
            self._note(error)

        return self._write_back(index, new, done, due_s)

    def _note(self, error: TiermemError | None) -> None:
        with self._lock:
            self._left -= 1
            if error is not None:
                self._errors.append(str(error))  # its traceback holds views of the arena
            if not self._left:
                self._ended.set()

    def _move(self, transfers: Sequence[Transfer]) -> None:
        self._ended.clear()
        with self._lock:
            self._left = len(transfers)
        for transfer in transfers:
            self._mover.submit(transfer)
        if not self._ended.wait(_WAIT_S):
            raise SystemExit(f"{len(transfers)} transfers did not end within {_WAIT_S:g} s")
        if self._errors:
            raise SystemExit(f"a transfer failed: {self._errors[0]}")

    def close(self) -> None:
        self._undo.close()


@dataclass(slots=True)
class Variant:
    """Somebody who moves a mix, and the rates of its turns in bytes a second."""

    name: str
    mix: Mix
    rate: Callable[[], float]
    rates: list[float] = field(default_factory=list)

    def over(self, other: Variant) -> Spread:
        """Round by round: the disk of a shared machine is now faster, now slower."""
        return Spread.of([mine / its for mine, its in zip(self.rates, other.rates, strict=True)])


def run(args: argparse.Namespace) -> Report:
    """Raises SystemExit where fio is missing or refuses, the directory cannot be used, or a transfer fails."""
    if args.rounds < 2 or args.workers < 1 or args.bundle < 1 or args.size * MIB < MIN_ARENA_BYTES:
        raise SystemExit("give --rounds 2 or more, --workers, --bundle and --size 1 or more")
    machine = Machine.here()
    parent = (args.flash or default_flash_directory(os.environ)).resolve()
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="benchmark-", dir=parent) as folder:
        fio = find_fio(_file(Path(folder) / "fio.bin", args.size * MIB))
        try:
            job = Job(Path(folder), args.size * MIB, args.bundle * MIB, args.workers)
        except TiermemError as error:
            raise SystemExit(f"no job could be made in {folder}: {error}") from error
        try:
            variants = _variants(job, fio, args.workers)
            fio.rate(job.chunk_bytes, streams(MIXES[1], job.nbytes, job.chunk_bytes, args.workers))  # all over, once
            with OtherLoad() as other:
                for round_ in range(args.rounds):
                    for turn in turns(len(variants), round_):
                        variants[turn].rates.append(variants[turn].rate())
            job.check()
        finally:
            job.close()
    ratios = [_of(variants, mix, MOVER).over(_of(variants, mix, fio.name)).median for mix in MIXES]
    return Report(
        benchmark="mover",
        what=f"least over the mixes of the mover's rate over that of {fio.name}, median of the rounds",
        figure=min(ratios),
        bound=1.0,
        target=TARGET,
        machine=machine,
        command=_command(args),
        rows=[_row(variant, _of(variants, variant.mix, fio.name), args.workers) for variant in variants],
        notes=(
            f"a turn moves {format_size(job.nbytes)} in bundles of {args.bundle} MiB and blocks of "
            f"{format_size(job.chunk_bytes)}; a step's mix: as many bytes read as written, a read and a write-back in "
            "turn",
            "bound: fio itself; bytes/s is the median of the rounds, over fio the median of the ratios within them, "
            "with their quartiles; what fio is over itself is noise",
            "every byte came back from flash as it was written",
            *(f"fio could not use {refusal}" for refusal in fio.refused),
            *_warnings(other.cores),
        ),
    )


def _file(path: Path, nbytes: int) -> Path:
    """Preallocated; it goes with its folder."""
    try:
        with path.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, nbytes)
    except OSError as error:
        raise SystemExit(f"no file of {format_size(nbytes)} can be made at {path}: {error.strerror}") from error
    return path


def _variants(job: Job, fio: Fio, workers: int) -> list[Variant]:
    def by_fio(mix: Mix) -> float:
        return fio.rate(job.chunk_bytes, streams(mix, job.nbytes, job.chunk_bytes, workers))

    movers: tuple[tuple[str, Callable[[Mix], float]], ...] = (
        (fio.name, by_fio),
        (MOVER, job.rate),
        (UNHASHED, partial(job.rate, hashed=False)),
        (AGAIN, by_fio),
    )
    return [Variant(name, mix, partial(rate, mix)) for mix in MIXES for name, rate in movers]


def _of(variants: Sequence[Variant], mix: Mix, name: str) -> Variant:
    return next(variant for variant in variants if (variant.mix, variant.name) == (mix, name))


def _row(variant: Variant, fio: Variant, workers: int) -> Row:
    depths = [stream.depth for stream in streams(variant.mix, 2, 1, workers)]
    ratio = variant.over(fio)
    return {
        "mix": variant.mix.name,
        "variant": variant.name,
        "in flight": " + ".join(map(str, depths)),
        "bytes/s": statistics.median(variant.rates),
        "over fio": ratio.median,
        "lower": ratio.lower,
        "upper": ratio.upper,
    }


def _warnings(cores: float) -> list[str]:
    if cores < BUSY_CORES:
        return []
    return [f"NOT A QUIET MACHINE: other processes kept {cores:.1f} cores busy, which hashing needs and fio does not"]


def _command(args: argparse.Namespace) -> str:
    words = [f"python -m benchmarks mover --rounds {args.rounds} --size {args.size} --bundle {args.bundle}"]
    return " ".join([*words, f"--workers {args.workers}", *(["--flash DIR"] if args.flash else [])])


if __name__ == "__main__":
    from benchmarks.__main__ import main

    sys.exit(main(["mover", *sys.argv[1:]]))
