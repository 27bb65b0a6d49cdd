"""For every test: what it leaves behind is named and fails it, and torch and hypothesis are set up once."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from hypothesis import settings

settings.register_profile("tiermem", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("tiermem")

SETTLE_S = 3.0
COLLECT_AFTER_S = 0.1  # collecting takes as long where torch is loaded; a connection that closes has gone before
SHARED_DIRECTORY = Path("/dev/shm")

# Opened once by a library for the whole process, on first use: gRPC's pollers, torch's and numpy's look at the machine.
_LIBRARY_FILES = ("anon_inode:[eventpoll]", "anon_inode:[eventfd]", "/dev/null", "/dev/urandom")
_LIBRARY_CHILDREN = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")


@dataclass(frozen=True, slots=True)
class Belongings:
    """What this process holds of the operating system, each as (key, text for people)."""

    files: frozenset[tuple[int, str]]
    threads: frozenset[tuple[int, str]]
    children: frozenset[tuple[int, str]]
    shared_mappings: frozenset[tuple[str, str]]
    shared_files: frozenset[str]

    @classmethod
    def now(cls) -> Belongings:
        return cls(_open_files(), _threads(), _children(), _shared_mappings(), _shared_files())

    def left_since(self, before: Belongings) -> list[str]:
        """One line for each thing that is here now and was not before."""
        return [
            *(f"open file {fd}: {target}" for fd, target in sorted(self.files - before.files)),
            *(f"thread {name}" for _, name in sorted(self.threads - before.threads)),
            *(f"child process {pid}: {command}" for pid, command in sorted(self.children - before.children)),
            *(
                f"shared memory {name} at {span}"
                for span, name in sorted(self.shared_mappings - before.shared_mappings)
            ),
            *(f"file {SHARED_DIRECTORY / name}" for name in sorted(self.shared_files - before.shared_files)),
        ]


def _open_files() -> frozenset[tuple[int, str]]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:  # the listing's own descriptor
            continue
        if target not in _LIBRARY_FILES and not target.endswith(".ttf"):  # matplotlib keeps its fonts open
            found.add((int(name), target))
    return frozenset(found)


def _threads() -> frozenset[tuple[int, str]]:
    """Ours by name, and everybody's that keep the process alive. A library's daemon threads may stay."""
    return frozenset(
        (thread.ident or 0, thread.name)
        for thread in threading.enumerate()
        if thread.name.startswith("tiermem") or not thread.daemon
    )


def _children() -> frozenset[tuple[int, str]]:
    found = set()
    for child in psutil.Process().children():
        try:
            command = " ".join(child.cmdline()) or child.name()
        except psutil.NoSuchProcess:
            continue
        except psutil.ZombieProcess:
            command = "(zombie: nobody waited for it)"
        if not any(name in command for name in _LIBRARY_CHILDREN):
            found.add((child.pid, command))
    return frozenset(found)


def _shared_mappings() -> frozenset[tuple[str, str]]:
    lines = (line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines())
    return frozenset(
        (line[0], line[5]) for line in lines if len(line) == 6 and line[5].startswith(("/memfd:", "/dev/shm/"))
    )


def _shared_files() -> frozenset[str]:
    """Only ours: other processes of the machine use the directory too, tests that run beside this one among them."""
    names = [name for name in os.listdir(SHARED_DIRECTORY) if "tiermem" in name]
    return frozenset(name for name in names if not _is_others(name))


def _is_others(name: str) -> bool:
    """Whether a name ends with the number of a process that lives and is neither this one nor below it."""
    number = name.rpartition("-")[2]
    if not number.isdecimal() or not psutil.pid_exists(int(number)):
        return False
    this = psutil.Process()
    return int(number) not in {this.pid, *(child.pid for child in this.children(recursive=True))}


@pytest.fixture(autouse=True)
def _leaves_nothing_behind() -> Iterator[None]:
    before = Belongings.now()
    yield
    left = Belongings.now().left_since(before)
    since_s = time.monotonic()
    while left and time.monotonic() - since_s < SETTLE_S:
        if time.monotonic() - since_s >= COLLECT_AFTER_S:
            gc.collect()
        time.sleep(0.02)
        left = Belongings.now().left_since(before)
    if left:
        pytest.fail("the test left behind:\n  " + "\n  ".join(left), pytrace=False)


@pytest.fixture
def tmp_path(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """As pytest's own, with a shorter name: a socket's path has 104 bytes, of which a worker's folder takes ten."""
    return tmp_path_factory.mktemp("".join(filter(str.isalnum, request.node.name))[4:16])


@pytest.fixture(autouse=True)
def _one_torch_thread() -> None:
    """With other load on the machine two OpenMP threads are several times slower than one. Does not import torch."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.get_num_threads() != 1:
        torch.set_num_threads(1)
