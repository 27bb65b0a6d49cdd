"""The store without I/O decides as any other, and keeps no byte: it is for measuring."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest

from tiermem.bundle import BundleSpec, Kind, Mode
from tiermem.grants.messages import Grant
from tiermem.grants.table import GrantTable, Lease
from tiermem.job_store import JobStore
from tiermem.layout import arena_layout
from tiermem.stats import Link
from tiermem.store import TensorStore
from tiermem.testing.null_store import capped_layout, null_store
from tiermem.units import GIB, MIB

CAP_BYTES = GIB
ARENA_BYTES = 64 * GIB  # more than any machine of the tests has


@pytest.fixture
def store() -> Iterator[TensorStore]:
    made = null_store(ARENA_BYTES, CAP_BYTES, workers=2)
    yield made
    made.check_invariants()
    made.close()


class Client:
    """A client of one job that waits for every answer."""

    def __init__(self, job: JobStore) -> None:
        self.job, self.table, self.answered = job, GrantTable(["main"]), threading.Event()
        job.wake = self.answered.set

    def lease(self, target: int, mode: Mode) -> Lease:
        waiter = self.table.demand("main", target, mode)
        self.send()
        while waiter.open:
            assert self.answered.wait(20.0), "no answer"
            self.answered.clear()
            while self.job.outbox:
                self.table.receive(self.job.outbox.popleft())
        assert waiter.lease is not None
        return waiter.lease

    def write(self, grant: Grant) -> None:
        self.table.commit([(grant.serial, grant.version + 1)])
        self.table.done(grant.serial)
        self.send()

    def send(self) -> None:
        while self.table.outbox:
            self.job.receive(self.table.outbox.popleft())


def test_bundles_larger_than_the_memory_come_and_go(store: TensorStore) -> None:
    job = store.open_job("null", os.getpid(), ARENA_BYTES, 0)
    job.declare([BundleSpec(1, Kind.PARAM, "unit", CAP_BYTES)])
    job.admit("main", [1])
    client = Client(job)
    bundles = []
    for _ in range(100):
        grant = client.lease(1, Mode.CREATE).grant
        bundles.append(grant.bundle)
        client.write(grant)
    assert client.lease(bundles[0], Mode.READ).grant.version == 1
    links = job.snapshot().links
    assert links[Link.DRAM_TO_FLASH].bytes >= 36 * CAP_BYTES
    assert links[Link.FLASH_TO_DRAM].bytes == CAP_BYTES
    assert os.fstat(job.arena_fd).st_blocks == 0, "somebody has touched the arena"


def test_a_layout_with_another_cap_is_the_usual_one_otherwise() -> None:
    usual, mine = arena_layout(ARENA_BYTES), capped_layout(CAP_BYTES, ARENA_BYTES)
    assert (mine.frames, mine.frame_bytes) == (usual.frames, usual.frame_bytes)
    assert mine.bundle_cap_bytes == mine.chunk_bytes == CAP_BYTES
    assert capped_layout(GIB, 64 * MIB).bundle_cap_bytes == 8 * MIB, "an eighth of the arena at most"
