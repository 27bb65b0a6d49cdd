"""fio as the measure of a disk: direct reads and overwrites of a preallocated file, with the best engine that the
kernel lets it use.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ENGINES = ("io_uring", "libaio", "psync")
"""In the order in which they are tried. psync has one block in flight, so it gets a process for each."""

_PROBE_BYTES = 64 * 1024
_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Stream:
    """One direction: `nbytes` (whole blocks) from `offset` of the file on, in order, with `depth` blocks in flight."""

    writes: bool
    offset: int
    nbytes: int
    depth: int


@dataclass(frozen=True, slots=True)
class Fio:
    """fio with the engine that was found, on one file of the caller's. `refused`: what was tried before, and why not.

    `memory` is fio's option `iomem` for its buffers.
    """

    program: str
    file: Path
    engine: str
    refused: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """For rows."""
        return f"fio, {self.engine}"

    def rate(self, block_bytes: int, streams: Sequence[Stream]) -> float:
        """Bytes a second of all streams together, from the first one's start to the last one's end. Raises SystemExit
        with fio's own words where it failed or moved something else than was asked for.
        """
        report = self._run(block_bytes, streams)
        if isinstance(report, str):
            raise SystemExit(f"fio failed with engine {self.engine}: {report}")
        moved = sum(int(job[way]["io_bytes"]) for job in report for way in ("read", "write"))
        wanted = sum(stream.nbytes for stream in streams)
        if moved != wanted:
            raise SystemExit(f"fio moved {moved} bytes instead of {wanted}")
        return moved / (max(int(job[way]["runtime"]) for job in report for way in ("read", "write")) / 1e3)

    def _run(self, block_bytes: int, streams: Sequence[Stream]) -> list[dict[str, Any]] | str:
        """fio's jobs, or why there are none."""
        words = [self.program, "--output-format=json", "--name=global", f"--filename={self.file}", "--direct=1"]
        words += [f"--ioengine={self.engine}", f"--bs={block_bytes}", "--overwrite=1", "--randrepeat=0"]
        for stream in streams:
            jobs = stream.depth if self.engine == "psync" else 1
            words += [f"--name={'write' if stream.writes else 'read'}", f"--rw={'write' if stream.writes else 'read'}"]
            words += [f"--offset={stream.offset}", f"--size={stream.nbytes // jobs}", f"--numjobs={jobs}"]
            words += [f"--offset_increment={stream.nbytes // jobs}", f"--iodepth={stream.depth // jobs}"]
        try:
            done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return f"it did not end within {_TIMEOUT_S:g} s"
        said = (done.stderr.strip() or done.stdout.strip())[-500:]
        try:  # remarks may come before the object
            jobs_done: list[dict[str, Any]] = json.loads(done.stdout[done.stdout.index("{") :])["jobs"]
        except (ValueError, KeyError):
            return said or f"status {done.returncode}"
        failed = [os.strerror(int(job["error"])) for job in jobs_done if job["error"]]
        if failed or done.returncode:
            return failed[0] if failed else said or f"status {done.returncode}"
        return jobs_done


def find_fio(file: Path, program: str = "fio") -> Fio:
    """fio with the first of ENGINES that reads `file`, which exists and is not empty. Raises SystemExit with the remedy
    where fio is missing, or with fio's words where no engine works.
    """
    path = shutil.which(program)
    if path is None:
        raise SystemExit(
            f"{program} is not installed, and there is nothing else to compare with: install the package `fio` "
            "(apt-get install fio, dnf install fio)"
        )
    refused: list[str] = []
    for engine in ENGINES:
        fio = Fio(path, file, engine, tuple(refused))
        report = fio._run(_PROBE_BYTES // 16, [Stream(writes=False, offset=0, nbytes=_PROBE_BYTES, depth=1)])
        if not isinstance(report, str):
            return fio
        refused.append(f"{engine}: {report}")
    raise SystemExit(f"fio can read {file} with none of its engines: {'; '.join(refused)}")
