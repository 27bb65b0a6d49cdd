"""Real processes for the integration tests: a daemon in a directory of its own, and trainers that talk over pipes."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tiermem.stats import StoreStats
from tiermem_daemon import status_view

REPOSITORY = Path(__file__).parents[2]
START_TIMEOUT_S = 30.0
_PRELUDE = """
import os, signal, sys, time
import torch
import tiermem, tiermem.errors
from tests.integration.tiny_training import DRAM, fingerprint, make, say, train
"""


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's without settings of tiermem, with the packages of the repository, and `extra`."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("TIERMEM_", "XDG_"))}
    paths = [str(REPOSITORY), str(REPOSITORY / "daemon"), str(REPOSITORY / "client")]
    return {**clean, "PYTHONPATH": os.pathsep.join(paths), **(extra or {})}


def within(limit_s: float, complaint: Callable[[], str], since_s: float | None = None) -> float:
    """Seconds from `since_s` (default: now) until there was nothing to complain about; fails after `limit_s`."""
    started_s = time.monotonic() if since_s is None else since_s
    while text := complaint():
        elapsed_s = time.monotonic() - started_s
        assert elapsed_s <= limit_s, f"after {elapsed_s:.2f} s of {limit_s:g} s: {text}"
        time.sleep(0.01)
    return time.monotonic() - started_s


class StartRefused(Exception):
    """The daemon did not start: the line that it announced, and its exit code."""

    def __init__(self, line: str, code: int) -> None:
        super().__init__(f"{line} (exit code {code})")
        self.line, self.code = line, code


@dataclass
class Daemon:
    """A running `tiermem serve`."""

    process: subprocess.Popen[bytes]
    socket: Path
    flash: tuple[Path, ...]
    log_path: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def endpoint(self) -> str:
        return f"unix:{self.socket}"

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def stats(self) -> StoreStats:
        """As `tiermem status` sees it."""
        return status_view.decode(status_view.fetch(self.socket))

    def health(self) -> str:
        return status_view.check_health(self.socket)

    def files(self) -> list[str]:
        """What its descriptors are."""
        found = []
        for name in os.listdir(f"/proc/{self.pid}/fd"):
            try:
                found.append(os.readlink(f"/proc/{self.pid}/fd/{name}"))
            except FileNotFoundError:  # closed meanwhile
                continue
        return sorted(found)

    def settled_files(self) -> list[str]:
        """`files` without the connections of clients that have just left: the fewest within a few tries."""
        tries = []
        for _ in range(6):
            tries.append(self.files())
            time.sleep(0.03)
        return min(tries, key=len)

    def segments(self) -> list[Path]:
        """Flash files of jobs."""
        return [path for directory in self.flash for path in directory.glob("segment-*.tiermem")]

    def disk_bytes(self) -> tuple[int, int]:
        """Bytes that the kernel has read from and written to disks for it."""
        lines = Path(f"/proc/{self.pid}/io").read_text().splitlines()
        table = dict(line.split(": ") for line in lines)
        return int(table["read_bytes"]), int(table["write_bytes"])

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        """kill -9, and wait."""
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        """SIGTERM, and the exit code."""
        self.process.terminate()
        return self.process.wait(10)

    def left_of_jobs(self) -> str:
        """What jobs still have of it, as a complaint; empty where nothing."""
        stats = self.stats()
        maps = Path(f"/proc/{self.pid}/maps").read_text()
        left = {
            "jobs": [job.job for job in stats.jobs],
            "bytes in tiers": {name: tier.used_bytes for name, tier in stats.tiers.items() if tier.used_bytes},
            "flash files": [path.name for path in self.segments()],
            "descriptors": [name for name in self.files() if "memfd" in name or "segment" in name or "pidfd" in name],
            "mappings": [line for line in maps.splitlines() if "memfd" in line],
        }
        return "; ".join(f"{what}: {value}" for what, value in left.items() if value)


def start_daemon(
    directory: Path,
    *,
    dram: str | None = "8MiB",
    flash: Sequence[str | Path] | None = None,
    options: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
    name: str = "tiermemd",
) -> Daemon:
    """Start one and wait until it is ready. Raises StartRefused. `flash`: "DIR[:SIZE]", by default one below
    `directory`.
    """
    socket = directory / "run" / f"{name}.sock"
    log_path = directory / f"{name}.log"
    places = [str(place) for place in (flash if flash is not None else [directory / "flash"])]
    command = [sys.executable, "-m", "tiermem_daemon", "serve", "--socket", str(socket)]
    command += [word for place in places for word in ("--flash", place)]
    command += [] if dram is None else ["--dram", dram]
    ready, child_end = os.pipe()
    try:
        with open(log_path, "ab") as log:
            process = subprocess.Popen(
                [*command, "--ready-fd", str(child_end), *options],
                pass_fds=[child_end],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment(environ),
            )
    finally:
        os.close(child_end)
    line = _first_line(ready)
    if line != "READY":
        try:
            code = process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
        raise StartRefused(line or log_path.read_text(errors="replace"), code)
    return Daemon(process, socket, tuple(Path(_directory_of(place)) for place in places), log_path)


def _directory_of(place: str) -> str:
    path, colon, size = place.rpartition(":")
    return path if colon and size[:1].isdecimal() else place


def _first_line(fd: int) -> str:
    text, deadline_s = b"", time.monotonic() + START_TIMEOUT_S
    try:
        while not text.endswith(b"\n"):
            if not select.select([fd], [], [], max(0.0, deadline_s - time.monotonic()))[0]:
                break
            piece = os.read(fd, 4096)
            if not piece:
                break
            text += piece
    finally:
        os.close(fd)
    return text.decode().strip()


@contextmanager
def serve(directory: Path, **options: object) -> Iterator[Daemon]:
    """`start_daemon`, ended with the context whatever state it is in."""
    daemon = start_daemon(directory, **options)  # type: ignore[arg-type]
    try:
        yield daemon
    finally:
        _end(daemon.process)


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGCONT)
        process.terminate()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise


@dataclass
class Trainer:
    """A training process that runs a script. Both sides speak in lines: `say` and `expect`, `tell` and `input`."""

    process: subprocess.Popen[bytes]
    error_path: Path
    lines: list[str] = field(default_factory=list)
    _rest: bytes = b""

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def errors(self) -> str:
        return self.error_path.read_text(errors="replace")

    def expect(self, word: str, timeout_s: float = 30.0) -> list[str]:
        """The words of the next line that begins with `word`, without it."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            line = self._next_line(deadline_s)
            assert line is not None, f"no line {word!r} but {self.lines}; standard error:\n{self.errors[-3000:]}"
            self.lines.append(line)
            if line.split()[:1] == [word]:
                return line.split()[1:]

    def _next_line(self, deadline_s: float) -> str | None:
        assert self.process.stdout is not None
        fd = self.process.stdout.fileno()
        while b"\n" not in self._rest:
            if not select.select([fd], [], [], max(0.0, deadline_s - time.monotonic()))[0]:
                return None
            piece = os.read(fd, 4096)
            if not piece:
                return None
            self._rest += piece
        line, _, self._rest = self._rest.partition(b"\n")
        return line.decode()

    def tell(self, line: str = "") -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line.encode() + b"\n")
        self.process.stdin.flush()

    def wait(self, timeout_s: float = 30.0) -> int:
        return self.process.wait(timeout_s)


@contextmanager
def trainer(script: str, directory: Path, environ: Mapping[str, str] | None = None) -> Iterator[Trainer]:
    """Run `script` after the prelude (torch, tiermem and the tiny training are imported); killed with the context."""
    path, error_path = directory / "script.py", directory / "trainer.err"
    path.write_text(_PRELUDE + textwrap.dedent(script))
    with open(error_path, "wb") as errors:
        process = subprocess.Popen(
            [sys.executable, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=environment(environ),
        )
    try:
        yield Trainer(process, error_path)
    finally:
        process.kill()
        process.wait()
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.close()
        process.stdout.close()


def torch_exit_s(directory: Path) -> float:
    """What a training process without tiermem needs to end here and now: seconds on a machine under load."""
    script = """
    model, optimizer, data = make()
    train(model, optimizer, data)
    say("ready")
    input()
    """
    with trainer(script, directory) as plain:
        plain.expect("ready")
        ending_s = time.monotonic()
        plain.tell()
        assert plain.wait() == 0, plain.errors
        return time.monotonic() - ending_s


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
