"""One of two flash directories is slow, or does not answer at all: what goes on in the other one."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tiermem.bundle import BundleSpec, Kind, Mode
from tiermem.clock import MonotonicClock
from tiermem.grants.messages import Commit, Demand, Done, Grant
from tiermem.job_store import JobStore
from tiermem.layout import arena_layout
from tiermem.mover import Mover
from tiermem.store import TensorStore
from tiermem.testing import page_aligned
from tiermem.tiers.base import Extent
from tiermem.tiers.flash import FlashTier
from tiermem.tiers.flash_directory import FlashDirectory
from tiermem.tiers.os_calls import FileCalls, LinuxCalls
from tiermem.units import KIB, MIB

WAIT_S = 20.0
BUNDLE_BYTES = 128 * KIB  # the cap of a 1 MiB arena, which holds eight
FORM = 1
HUNG, SOUND = 0, 1  # places; a new tier begins with the first


class Hanging(LinuxCalls):
    """Between `hang` and `answer` no read and no write comes back."""

    def __init__(self) -> None:
        self.entered = threading.Semaphore(0)
        self._answers = threading.Event()
        self._answers.set()

    def hang(self) -> None:
        self._answers.clear()

    def answer(self) -> None:
        self._answers.set()

    def wait_entered(self) -> None:
        """Until a call hangs."""
        assert self.entered.acquire(timeout=WAIT_S)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._wait()
        return super().preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._wait()
        return super().pwritev(fd, buffers, offset)

    def _wait(self) -> None:
        if not self._answers.is_set():
            self.entered.release()
            assert self._answers.wait(2 * WAIT_S)


@dataclass
class Node:
    """A store over two directories, the first of which can hang."""

    store: TensorStore
    calls: Hanging
    directories: list[FlashDirectory]


def open_directory(path: Path, calls: FileCalls) -> FlashDirectory:
    return FlashDirectory.open(path, 64 * MIB, allow_memory_filesystem=True, calls=calls)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    calls = Hanging()
    directories = [open_directory(tmp_path / "hung", calls), open_directory(tmp_path / "sound", LinuxCalls())]
    store = TensorStore(8 * MIB, directories, Mover(2), MonotonicClock())
    yield Node(store, calls, directories)
    calls.answer()
    store.check_invariants()
    store.close()
    assert [directory.unwritten_bytes for directory in directories] == [0, 0]
    assert [directory.used_bytes for directory in directories] == [0, 0]


class Client:
    """One job's client. It waits for the answer to one demand, and takes what else has come."""

    def __init__(self, store: TensorStore, name: str) -> None:
        self.job: JobStore = store.open_job(name, os.getpid(), MIB, 8 * MIB)
        self.granted: dict[int, Grant] = {}  # by epoch
        self._epoch = 0
        self._answered = threading.Event()
        self.job.wake = self._answered.set
        self.job.declare([BundleSpec(FORM, Kind.OPTIM, "layers.0", BUNDLE_BYTES)])
        self.job.admit("main", [FORM])

    def ask(self, target: int, mode: Mode) -> int:
        """Returns the epoch."""
        self._epoch += 1
        self.job.receive(Demand("main", self._epoch, frozenset(g.serial for g in self.granted.values()), target, mode))
        return self._epoch

    def wait(self, epoch: int) -> Grant:
        while epoch not in self.granted:
            while self.job.outbox:
                message = self.job.outbox.popleft()
                assert isinstance(message, Grant), message
                self.granted[message.answers] = message
            if epoch not in self.granted:
                assert self._answered.wait(WAIT_S), f"demand {epoch} was held up"
                self._answered.clear()
        return self.granted[epoch]

    def use(self, target: int, mode: Mode) -> int:
        """Lease, commit if it writes, release. Returns the bundle."""
        epoch = self.ask(target, mode)
        grant = self.wait(epoch)
        if mode.writes:
            self.job.receive(Commit(((grant.serial, grant.bundle, grant.version + 1),)))
        del self.granted[epoch]
        self.job.receive(Done((grant.serial,)))
        return grant.bundle

    def make(self, count: int) -> list[int]:
        return [self.use(FORM, Mode.CREATE) for _ in range(count)]


def test_loads_from_the_other_directory_go_on(node: Node) -> None:
    """Bundles lie in both, in turn. Each demand for one that does not come is followed by one for one that does."""
    client = Client(node.store, "job")
    bundles = client.make(16)
    for bundle in bundles[:8]:  # the other eight leave: one at a time, hence in turn
        client.use(bundle, Mode.READ)
    read_before = [directory.traffic_bytes[0] for directory in node.directories]
    node.calls.hang()
    waiting = []
    for hung, sound in zip(bundles[8::2], bundles[9::2], strict=True):
        waiting.append(client.ask(hung, Mode.READ))
        client.use(sound, Mode.READ)
    read = [directory.traffic_bytes[0] for directory in node.directories]
    assert [after - before for after, before in zip(read, read_before, strict=True)] == [0, 4 * BUNDLE_BYTES]
    assert client.job.snapshot().waiting == len(waiting)
    node.calls.answer()
    assert [client.wait(epoch).bundle for epoch in waiting] == bundles[8::2]


def test_another_jobs_write_backs_do_not_queue_up_in_a_directory_that_hangs(node: Node) -> None:
    """Its own tier has not met the directory yet: what counts is what all jobs have waiting there."""
    hung, other = Client(node.store, "hung"), Client(node.store, "other")
    hung.make(8)
    node.calls.hang()
    waiting = hung.ask(FORM, Mode.CREATE)
    node.calls.wait_entered()
    assert node.directories[HUNG].unwritten_bytes == BUNDLE_BYTES
    bundles = other.make(20)
    for bundle in bundles:
        other.use(bundle, Mode.UPDATE)
    assert node.directories[HUNG].unwritten_bytes == BUNDLE_BYTES
    assert node.directories[SOUND].traffic_bytes[1] >= 12 * BUNDLE_BYTES
    node.calls.answer()
    assert hung.wait(waiting).mode == Mode.CREATE


def test_what_is_resident_is_granted_while_an_older_demand_waits_for_a_directory_that_hangs(node: Node) -> None:
    client = Client(node.store, "job")
    bundles = client.make(8)
    node.calls.hang()
    waiting = client.ask(FORM, Mode.CREATE)  # the first bundle is on its way to the first directory
    node.calls.wait_entered()
    for bundle in bundles[1:]:
        client.use(bundle, Mode.UPDATE)
    node.calls.answer()
    assert client.wait(waiting).mode == Mode.CREATE


# -- where extents go


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[FlashTier]:
    directories = [open_directory(tmp_path / name, LinuxCalls()) for name in ("slow", "fast")]
    tier = FlashTier(directories, arena_layout(MIB), "job", 8 * MIB)
    yield tier
    tier.check_invariants()
    tier.close()
    for directory in directories:
        assert directory.unwritten_bytes == 0
        directory.close()


def write(tier: FlashTier, extent: Extent, offset: int = 0, nbytes: int | None = None) -> None:
    tier.write(extent, offset, [page_aligned(bytes(extent.nbytes if nbytes is None else nbytes))])


def test_what_has_been_written_at_once_goes_to_the_directories_in_turn(tier: FlashTier) -> None:
    places = []
    for _ in range(6):
        extent = tier.reserve(BUNDLE_BYTES)
        places.append(extent.place)
        write(tier, extent)
    assert places == [0, 1, 0, 1, 0, 1]


def test_a_directory_that_is_behind_gets_nothing_more_until_it_has_caught_up(tier: FlashTier) -> None:
    slow, fast = tier.reserve(BUNDLE_BYTES), tier.reserve(BUNDLE_BYTES)
    assert (slow.place, fast.place) == (0, 1)
    write(tier, fast)
    for _ in range(4):
        extent = tier.reserve(BUNDLE_BYTES)
        assert extent.place == 1
        write(tier, extent)
    write(tier, slow, 0, BUNDLE_BYTES // 2)
    assert tier.reserve(BUNDLE_BYTES // 4).place == 1  # half of it is still to be written
    write(tier, slow, BUNDLE_BYTES // 2, BUNDLE_BYTES // 2)
    assert tier.reserve(BUNDLE_BYTES).place == 0


def test_who_is_behind_does_not_depend_on_the_number_of_extents(tier: FlashTier) -> None:
    """A large bundle in one directory is as much as several small ones in the other."""
    assert tier.reserve(BUNDLE_BYTES).place == 0
    assert [tier.reserve(BUNDLE_BYTES // 4).place for _ in range(4)] == [1] * 4


def test_what_is_given_up_or_written_twice_does_not_count(tier: FlashTier) -> None:
    given_up, written = tier.reserve(BUNDLE_BYTES), tier.reserve(BUNDLE_BYTES)
    for _ in range(2):
        write(tier, written)
    write(tier, given_up, 0, BUNDLE_BYTES // 2)
    tier.free(given_up)
    tier.free(written)
    assert [directory.unwritten_bytes for directory in tier.directories] == [0, 0]


def test_a_job_that_ends_is_not_behind_any_more(tier: FlashTier) -> None:
    tier.reserve(BUNDLE_BYTES)
    tier.close()
    assert tier.directories[0].unwritten_bytes == 0
