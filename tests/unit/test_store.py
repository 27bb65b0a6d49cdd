from __future__ import annotations

import errno
import itertools
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tiermem import job_store
from tiermem.bundle import BundleSpec, Kind, Mode, TensorSpec
from tiermem.clock import MonotonicClock
from tiermem.digest import digest
from tiermem.errors import DaemonUnavailable, InvalidArgument, ProtocolError, ResourceExhausted, TierIOError
from tiermem.file_pieces import Adoption
from tiermem.grants.messages import Commit, DaemonBody, Demand, Done, Grant, Refuse
from tiermem.job_store import JobStore
from tiermem.mover import Mover
from tiermem.stats import Link, StoreStats
from tiermem.store import TensorStore
from tiermem.testing import FaultyTier, SlowTier, parse_fault_script
from tiermem.tiers.base import Tier
from tiermem.tiers.flash_directory import FlashDirectory
from tiermem.tiers.os_calls import FileCalls, LinuxCalls
from tiermem.units import KIB, MIB

WAIT_S = 20.0
DRAM_BYTES = 8 * MIB
BUNDLE_BYTES = 128 * KIB  # the cap of a 1 MiB arena, which holds eight

NewStore = Callable[..., TensorStore]


@pytest.fixture
def new_store(tmp_path: Path) -> Iterator[NewStore]:
    """Stores with one flash directory each, closed at the end: nothing may be left then."""
    stores: list[tuple[TensorStore, FlashDirectory]] = []

    def new(
        wrap_flash: Callable[[Tier], Tier] = lambda tier: tier, calls: FileCalls | None = None, share: float = 0.5
    ) -> TensorStore:
        path = tmp_path / f"flash{len(stores)}"
        directory = FlashDirectory.open(path, 64 * MIB, allow_memory_filesystem=True, calls=calls)
        store = TensorStore(DRAM_BYTES, [directory], Mover(1), MonotonicClock(), share, wrap_flash)
        stores.append((store, directory))
        return store

    yield new
    for store, directory in stores:
        store.check_invariants()
        store.close()
        assert store.free_dram_bytes == store.dram_bytes
        assert directory.used_bytes == 0


class Breakable(LinuxCalls):
    """No file can be made while it is broken."""

    broken = False

    def open(self, path: str, flags: int, mode: int) -> int:
        if self.broken:
            raise OSError(errno.EIO, "scripted")
        return super().open(path, flags, mode)


class Client:
    """A client of one job that sends one demand at a time."""

    def __init__(self, job: JobStore) -> None:
        self.job = job
        self.epoch = 0
        self.answered = threading.Event()
        job.wake = self.answered.set
        job.declare([BundleSpec(1, Kind.OPTIM, "layers.0", BUNDLE_BYTES)])
        job.admit("main", [1])

    def demand(self, target: int, mode: Mode) -> DaemonBody:
        self.ask(target, mode)
        while not self.job.outbox:
            assert self.answered.wait(WAIT_S)
            self.answered.clear()
        return self.job.outbox.popleft()

    def ask(self, target: int, mode: Mode) -> None:
        self.epoch += 1
        self.job.receive(Demand("main", self.epoch, frozenset(), target, mode))

    def use(self, target: int, mode: Mode) -> int:
        """Lease, commit if it writes, release. Returns the bundle."""
        grant = self.demand(target, mode)
        assert isinstance(grant, Grant), grant
        if mode.writes:
            self.job.receive(Commit(((grant.serial, grant.bundle, grant.version + 1),)))
        self.job.receive(Done((grant.serial,)))
        return grant.bundle


def open_job(store: TensorStore, job: str = "job", dram_bytes: int = MIB, flash_bytes: int = 8 * MIB) -> JobStore:
    return store.open_job(job, os.getpid(), dram_bytes, flash_bytes)


# -- admission


@pytest.mark.parametrize("name", ["", "a\nb", "tab\t", "x" * 201, "\x00"])
def test_a_job_needs_a_printable_name(new_store: NewStore, name: str) -> None:
    with pytest.raises(InvalidArgument, match="printable"):
        open_job(new_store(), name)


def test_a_name_is_taken_while_its_job_runs(new_store: NewStore) -> None:
    store = new_store()
    first = open_job(store, "träining 1")
    with pytest.raises(InvalidArgument, match="'träining 1' is running"):
        open_job(store, "träining 1")
    assert store.job("träining 1") is first
    store.close_job(first, "closed")
    assert store.job("träining 1") is None
    assert open_job(store, "träining 1").session != first.session


def test_arenas_never_exceed_the_dram_tier(new_store: NewStore) -> None:
    store = new_store()
    open_job(store, "a", 5 * MIB)
    assert store.free_dram_bytes == 3 * MIB
    with pytest.raises(ResourceExhausted) as caught:
        open_job(store, "b", 4 * MIB)
    for part in ("'b'", "4 MiB", "3 MiB", "8 MiB", "dram="):
        assert part in str(caught.value)
    assert store.free_dram_bytes == 3 * MIB
    open_job(store, "b", 3 * MIB)
    assert store.free_dram_bytes == 0


def test_without_a_size_a_job_gets_a_share_of_what_is_free(new_store: NewStore) -> None:
    store = new_store(share=0.5)
    assert open_job(store, "a", 0).layout.arena_bytes == 4 * MIB
    assert open_job(store, "b", 0).layout.arena_bytes == 2 * MIB
    assert open_job(store, "c", 0).layout.arena_bytes == 1 * MIB
    assert open_job(store, "d", 0).layout.arena_bytes == 1 * MIB, "never less than the smallest arena"
    with pytest.raises(ResourceExhausted, match="0 B of 8 MiB are free"):
        open_job(store, "e", 0)


@pytest.mark.parametrize("dram_bytes", [-1, -MIB, 1, MIB - 1])
def test_a_size_that_makes_no_arena_is_refused(new_store: NewStore, dram_bytes: int) -> None:
    store = new_store()
    with pytest.raises(InvalidArgument, match="1 MiB"):
        open_job(store, dram_bytes=dram_bytes)
    assert store.free_dram_bytes == DRAM_BYTES


def test_an_absurd_size_is_refused(new_store: NewStore) -> None:
    store = new_store()
    with pytest.raises(ResourceExhausted):
        open_job(store, dram_bytes=2**59)
    with pytest.raises(InvalidArgument, match="-1 bytes of flash"):
        open_job(store, flash_bytes=-1)
    assert store.free_dram_bytes == DRAM_BYTES
    assert store.snapshot().sessions_opened == 0


def test_flash_is_what_was_asked_for_or_all_there_is(new_store: NewStore) -> None:
    store = new_store()
    assert open_job(store, "a", flash_bytes=5 * MIB).flash_quota_bytes == 5 * MIB
    assert open_job(store, "b", flash_bytes=0).flash_quota_bytes == 64 * MIB
    assert open_job(store, "c", flash_bytes=2**50).flash_quota_bytes == 64 * MIB


def test_a_job_whose_flash_cannot_be_had_leaves_nothing_behind(new_store: NewStore) -> None:
    """The arena is made first: it must not be leaked (the leak check of all tests looks for its memfd)."""
    calls = Breakable()
    store = new_store(calls=calls)
    calls.broken = True
    with pytest.raises(TierIOError, match="EIO"):
        open_job(store)
    calls.broken = False
    assert store.free_dram_bytes == DRAM_BYTES
    assert store.job("job") is None
    open_job(store)


# -- the end of jobs


def test_totals_never_fall_when_jobs_end(new_store: NewStore) -> None:
    store = new_store()
    job = open_job(store)
    client = Client(job)
    bundles = [client.use(1, Mode.CREATE) for _ in range(12)]
    for bundle in bundles:
        client.use(bundle, Mode.UPDATE)
    client.demand(2**40, Mode.READ)
    before = store.snapshot()
    store.close_job(job, "died")
    after = store.snapshot()
    assert (before.creates, before.commits, after.creates, after.commits) == (12, 24, 12, 24)
    assert before.hits + before.misses == after.hits + after.misses == 12
    assert min(before.misses, sum(before.evictions.values())) >= 4
    assert after.evictions == before.evictions
    assert after.stall_seconds == before.stall_seconds
    assert before.errors == after.errors == {"NOT_FOUND": 1}
    assert all(after.links[link].bytes >= before.links[link].bytes > 0 for link in Link)
    assert (before.jobs[0].job, after.jobs) == ("job", ())
    assert (before.sessions_opened, before.sessions_ended) == (1, {})
    assert (after.sessions_opened, after.sessions_ended) == (1, {"died": 1})
    assert all(tier.used_bytes == 0 for tier in after.tiers.values())


def test_a_job_ends_once(new_store: NewStore) -> None:
    store = new_store()
    job = open_job(store)
    store.close_job(job, "closed")
    store.close_job(job, "died")
    assert store.snapshot().sessions_ended == {"closed": 1}
    again = open_job(store)
    store.close_job(job, "died")  # of the same name, but not the one that runs
    assert store.job("job") is again


def test_a_message_after_the_end_is_ignored(new_store: NewStore) -> None:
    """The stream may still hold some when the process is known to be gone."""
    store = new_store()
    client = Client(open_job(store))
    store.close_job(client.job, "died")
    client.job.receive(Done((99,)))
    assert not client.job.outbox


def slow(delay_s: float) -> Callable[[Tier], Tier]:
    return lambda tier: SlowTier(tier, delay_s)


@pytest.mark.parametrize("ends_with", [Mode.READ, Mode.CREATE])
def test_a_job_ends_while_its_transfers_are_under_way(
    new_store: NewStore, ends_with: Mode, caplog: pytest.LogCaptureFixture
) -> None:
    """Killed in the middle of loads and write-backs: they drain, everything comes back, and nothing is logged as a
    bug.
    """
    store = new_store(slow(0.02))
    for attempt in range(4):
        job = open_job(store, f"job {attempt}")
        client = Client(job)
        bundles = [client.use(1, Mode.CREATE) for _ in range(12)]
        for bundle in bundles[:3]:
            client.ask(1 if ends_with == Mode.CREATE else bundle, ends_with)
        assert job.snapshot().waiting > 0
        store.close_job(job, "died")
        stats = job.snapshot()
        assert all(tier.used_bytes == 0 for tier in stats.tiers.values())
        assert (stats.bundles, stats.waiting, stats.leases) == (0, 0, 0)
    assert not [record for record in caplog.records if record.levelname in ("ERROR", "CRITICAL")]


def test_the_store_closes_with_jobs_running(new_store: NewStore) -> None:
    store = new_store(slow(0.01))
    clients = [Client(open_job(store, name)) for name in ("a", "b")]
    for client in clients:
        for _ in range(10):
            client.use(1, Mode.CREATE)
        client.ask(1, Mode.CREATE)
    store.close()
    stats = store.snapshot()
    assert stats.jobs == ()
    assert stats.sessions_ended == {"shutdown": 2}
    assert all(tier.used_bytes == 0 for tier in stats.tiers.values())


def test_jobs_do_not_notice_each_others_faults(new_store: NewStore) -> None:
    script = parse_fault_script("flash.write:1+:EIO")
    faulty: list[bool] = [True]  # the first job's flash
    store = new_store(lambda tier: FaultyTier(tier, script) if faulty.pop(0) else tier)
    faulty.append(False)
    broken, sound = Client(open_job(store, "broken")), Client(open_job(store, "sound"))
    for _ in range(8):
        broken.use(1, Mode.CREATE)
    refusal = broken.demand(1, Mode.CREATE)
    assert isinstance(refusal, Refuse)
    assert "EIO" in refusal.message
    assert store.snapshot().errors == {"IO_ERROR": 1}
    for _ in range(20):
        sound.use(1, Mode.CREATE)
    assert broken.job.snapshot().dirty_bytes == 8 * BUNDLE_BYTES, "nothing is lost"


# -- snapshots


def test_every_snapshot_is_consistent_whatever_goes_on(new_store: NewStore) -> None:
    store = new_store()
    stop = threading.Event()
    failures: list[BaseException] = []

    def work(name: str) -> None:
        try:
            for round_ in range(3):
                job = open_job(store, f"{name} {round_}", 2 * MIB if name == "a" else MIB)
                client = Client(job)
                bundles = [client.use(1, Mode.CREATE) for _ in range(20)]
                for bundle in bundles:
                    client.use(bundle, Mode.UPDATE)
                store.close_job(job, "closed")
        except BaseException as error:
            failures.append(error)
            raise
        finally:
            stop.set()

    threads = [threading.Thread(target=work, args=(name,), name=f"tiermem-test-{name}") for name in "ab"]
    for thread in threads:
        thread.start()
    snapshots: list[StoreStats] = []
    while not stop.is_set() or any(thread.is_alive() for thread in threads):
        snapshots.append(store.snapshot())
        store.check_invariants()
    for thread in threads:
        thread.join()
    assert not failures
    assert len(snapshots) > 20
    for stats in snapshots:
        for tier in stats.tiers.values():
            assert 0 <= tier.used_bytes <= tier.capacity_bytes, stats
        for job in stats.jobs:
            assert job.leased_bytes <= job.tiers["dram"].used_bytes <= job.tiers["dram"].capacity_bytes, job
            assert job.dirty_bytes <= job.tiers["dram"].used_bytes, job
        assert len(stats.jobs) + sum(stats.sessions_ended.values()) <= stats.sessions_opened
    for earlier, later in itertools.pairwise(snapshots):
        for field in ("sessions_opened", "hits", "misses", "creates", "commits"):
            assert getattr(earlier, field) <= getattr(later, field), field
        assert all(earlier.evictions[reason] <= later.evictions[reason] for reason in earlier.evictions)
        assert all(earlier.links[link].bytes <= later.links[link].bytes for link in earlier.links)
    assert store.snapshot().sessions_ended == {"closed": 6}


# -- files of a client


def passed_in(path: Path, data: bytes = bytes(100)) -> int:
    """A descriptor as it comes from a client; its name is gone, as it may be."""
    path.write_bytes(data)
    fd = os.open(path, os.O_RDONLY)
    path.unlink()
    return fd


def test_files_of_a_client_are_bounded_and_end_with_the_job(
    new_store: NewStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each descriptor is closed, taken or refused (the suite looks for what is left open)."""
    monkeypatch.setattr(job_store, "MAX_FILES", 2)
    store = new_store()
    job = open_job(store)
    job.add_file(7, passed_in(tmp_path / "a"))
    with pytest.raises(ProtocolError, match="file 7 was passed in before"):
        job.add_file(7, passed_in(tmp_path / "b"))
    job.add_file(8, passed_in(tmp_path / "c"))
    with pytest.raises(ResourceExhausted, match="2 files"):
        job.add_file(9, passed_in(tmp_path / "d"))
    store.close_job(job, "closed")
    with pytest.raises(DaemonUnavailable, match="has ended"):
        job.add_file(10, passed_in(tmp_path / "e"))


def test_an_adopted_bundle_is_read_from_its_file_until_it_is_written(new_store: NewStore, tmp_path: Path) -> None:
    store = new_store()
    client = Client(job := open_job(store))
    data = os.urandom(BUNDLE_BYTES)
    job.add_file(0, passed_in(tmp_path / "weights", b"header!" + data))
    job.declare([BundleSpec(2, Kind.PARAM, "w", BUNDLE_BYTES, (TensorSpec("w", "uint8", (), 0, BUNDLE_BYTES),))])
    chunk = job.layout.chunk_bytes
    digests = tuple(digest([memoryview(data)[at : at + chunk]]) for at in range(0, BUNDLE_BYTES, chunk))
    bundle = job.adopt(Adoption(2, 0, (7,), digests))
    assert job.snapshot().tiers["dram"].used_bytes == 0
    assert client.use(bundle, Mode.READ) == bundle
    assert job.snapshot().links[Link.FLASH_TO_DRAM].bytes == BUNDLE_BYTES
    assert job.snapshot().tiers["flash"].used_bytes == 0
    client.use(bundle, Mode.UPDATE)
    for _ in range(8):
        client.use(1, Mode.CREATE)
    assert job.snapshot().links[Link.DRAM_TO_FLASH].bytes > 0
    store.check_invariants()
    assert client.use(bundle, Mode.READ) == bundle
    store.check_invariants()
