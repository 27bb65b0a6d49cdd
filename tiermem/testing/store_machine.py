"""A hypothesis machine that drives a real JobStore, threads and all, against a dictionary of what was committed.

It plays the client: a GrantTable, and the arena mapped through its descriptor as a trainer maps it. Run
`StoreMachine.TestCase`; a subclass brings another flash tier with `new_flash`. Needs hypothesis.
"""

from __future__ import annotations

import errno
import itertools
import mmap
import os
import random
import tempfile
import threading
from pathlib import Path

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tiermem.allocator import byte_ranges
from tiermem.bundle import BundleSpec, Kind, Mode, TensorSpec
from tiermem.clock import MonotonicClock
from tiermem.digest import digest
from tiermem.errors import DataLoss, TierFull, TierIOError, WorkingSetTooLarge
from tiermem.file_pieces import Adoption
from tiermem.grants.table import GrantTable, Lease, Waiter
from tiermem.job_store import JobStore
from tiermem.layout import ArenaLayout, arena_layout
from tiermem.mover import Mover
from tiermem.testing.fakes import FaultyTier, MemoryTier
from tiermem.testing.faults import FaultScript, Spoil
from tiermem.tiers.base import Tier
from tiermem.tiers.dram import DramTier
from tiermem.tiers.flash import FlashTier
from tiermem.tiers.flash_directory import FlashDirectory
from tiermem.units import MIB

LANE = "main"
WAIT_S = 20.0
ARENA_BYTES = MIB
FLASH_BYTES = 8 * MIB
MOST_BUNDLES = 40
"""At most 5 MiB of bundles: five times the arena, and never more than flash takes."""

SIZES = (1, 4095, 4096, 4097, 40_000, 65_536, 100_000, 131_072)
"""Bundle sizes in bytes, up to the cap of a 1 MiB arena: whole frames or not, one chunk or several."""


class ArmedFaults(FaultScript):
    """Faults that are armed as a test goes on; each meets the next call of its operation, once."""

    def __init__(self) -> None:
        super().__init__(())
        self._guard = threading.Lock()  # owner: this script
        self._armed: dict[str, Spoil | int] = {}  # guarded by _guard
        self._fired = 0  # guarded by _guard

    def arm(self, operation: str, action: Spoil | int) -> None:
        with self._guard:
            self._armed[operation] = action

    def disarm(self) -> None:
        with self._guard:
            self._armed.clear()

    @property
    def fired(self) -> int:
        """How many faults have happened."""
        with self._guard:
            return self._fired

    def next(self, target: str, operation: str) -> Spoil | int | None:
        with self._guard:
            action = self._armed.pop(operation, None)
            self._fired += action is not None
            return action


FAULTS = st.sampled_from(
    [
        ("read", errno.EIO),
        ("read", Spoil.FLIP),
        ("write", errno.EIO),
        ("write", errno.ENOSPC),
        ("reserve", errno.ENOSPC),
        ("reserve", errno.EIO),
    ]
)


class StoreMachine(RuleBasedStateMachine):
    """Invariant: bytes under a lease that is not being written are the newest committed ones, faults or not.

    No rule has a precondition: whom an armed fault meets is up to the mover's threads, so what may follow would not
    repeat. A rule without anything to do does nothing.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layout = arena_layout(ARENA_BYTES)
        self.folder = tempfile.TemporaryDirectory(prefix="tiermem-store-machine-")
        self.directory = FlashDirectory.open(Path(self.folder.name) / "flash", 64 * MIB, allow_memory_filesystem=True)
        self.faults = ArmedFaults()
        self.mover = Mover(1)
        self.flash = self.new_flash(self.layout, self.directory)
        ids = itertools.count(1)
        self.store = JobStore(
            "machine",
            "session",
            0,
            self.layout,
            DramTier(self.layout),
            FaultyTier(self.flash, self.faults),
            [self.directory],
            self.mover,
            MonotonicClock(),
            lambda: next(ids),
        )
        self.arena = mmap.mmap(self.store.arena_fd, self.layout.arena_bytes, mmap.MAP_SHARED)
        self.answered = threading.Event()
        self.store.wake = self.answered.set
        self.store.declare([BundleSpec(i, Kind.OPTIM, f"unit{i}", n) for i, n in enumerate(SIZES)])
        self.files = 0
        self.store.admit(LANE, [len(SIZES) - 1])
        self.table = GrantTable([LANE])
        self.leases: dict[int, Lease] = {}  # by bundle
        self.committed: dict[int, bytes] = {}  # the model: newest bytes by bundle
        self.sizes: dict[int, int] = {}
        self.faults_seen = 0

    def new_flash(self, layout: ArenaLayout, directory: FlashDirectory) -> Tier:
        """The flash tier under test."""
        return FlashTier([directory], layout, "machine", FLASH_BYTES)

    # -- playing the client

    def send(self) -> None:
        while self.table.outbox:
            self.store.receive(self.table.outbox.popleft())

    def read_answers(self) -> None:
        while self.store.outbox:
            self.table.receive(self.store.outbox.popleft())

    def wait(self, waiter: Waiter) -> None:
        while waiter.open:
            self.answered.clear()
            self.read_answers()
            assert not waiter.open or self.answered.wait(WAIT_S), f"no answer to {waiter.demand}"
        self.read_answers()

    def acquire(self, wishes: list[tuple[int, int, Mode]]) -> list[int]:
        """Demand (target, size, mode) at once, as several threads would. Returns the bundles now leased.

        What is refused must not fit, or a fault has happened; what does not fit must be refused.
        """
        needed = {bundle: self.layout.frames_for(self.sizes[bundle]) for bundle in self.leases}
        waiters, fits = [], []
        for number, (target, nbytes, mode) in enumerate(wishes):
            name = target if mode != Mode.CREATE else -1 - number
            fits.append(sum((needed | {name: self.layout.frames_for(nbytes)}).values()) <= self.layout.frames)
            if fits[-1]:
                needed[name] = self.layout.frames_for(nbytes)
            waiters.append(self.table.demand(LANE, target, mode))
        self.send()
        leased, failed = [], False
        for waiter, fit, (_, nbytes, _) in zip(waiters, fits, wishes, strict=True):
            self.wait(waiter)
            if waiter.error is None:
                assert waiter.lease is not None
                leased.append(self.begin(waiter.lease, nbytes))
                assert fit or self.faults.fired > self.faults_seen, f"granted beyond the budget: {waiter.demand}"
            elif fit:
                failed = True
                assert isinstance(waiter.error, TierIOError | TierFull | DataLoss), waiter.error
                assert self.faults.fired > self.faults_seen, f"refused for nothing: {waiter.error}"
            else:
                assert isinstance(waiter.error, WorkingSetTooLarge | TierIOError | TierFull | DataLoss), waiter.error
        self.send()
        if failed:
            assert self.mover.wait_idle(WAIT_S)  # what failed together with it is heard of by then
            self.faults_seen = self.faults.fired
        return leased

    def begin(self, lease: Lease, nbytes: int) -> int:
        bundle = lease.grant.bundle
        if (old := self.leases.get(bundle)) is not None:  # an upgrade
            assert old.grant.runs == lease.grant.runs, "a leased bundle moved"
            self.table.done(old.grant.serial)
        self.leases[bundle], self.sizes[bundle] = lease, nbytes
        return bundle

    def bytes_of(self, bundle: int) -> bytes:
        return b"".join(self.arena[at : at + n] for at, n in self.spans(bundle))

    def spans(self, bundle: int) -> list[tuple[int, int]]:
        runs = self.leases[bundle].grant.runs
        return list(byte_ranges(runs, self.layout.frame_bytes, 0, self.sizes[bundle]))

    def write(self, bundle: int, data: bytes) -> None:
        for at, n in self.spans(bundle):
            self.arena[at : at + n], data = data[:n], data[n:]

    def release(self, bundle: int) -> None:
        self.table.done(self.leases.pop(bundle).grant.serial)
        self.send()

    def pick(self, bundles: list[int], choice: int) -> int:
        return bundles[choice % len(bundles)]

    def idle(self) -> list[int]:
        return [bundle for bundle in self.committed if bundle not in self.leases]

    # -- what may happen

    @initialize(specs=st.lists(st.integers(4, len(SIZES) - 1), min_size=16, max_size=30))
    def fill(self, specs: list[int]) -> None:
        """About twice the arena, as a training state is several times the memory that it has."""
        for number, spec in enumerate(specs):
            self.create(spec, number, keep=False)

    @rule(spec=st.integers(0, len(SIZES) - 1), seed=st.integers(0, 999), keep=st.booleans())
    def create(self, spec: int, seed: int, keep: bool) -> None:
        if len(self.committed) >= MOST_BUNDLES:
            return
        for bundle in self.acquire([(spec, SIZES[spec], Mode.CREATE)]):
            self.commit([bundle], seed)
            if not keep:
                self.release(bundle)

    @rule(size=st.sampled_from(SIZES), offset=st.sampled_from([0, 1, 4096, 5000]), seed=st.integers(0, 999))
    def adopt(self, size: int, offset: int, seed: int) -> None:
        """A bundle of two tensors that is in a file in another order."""
        if len(self.committed) >= MOST_BUNDLES:
            return
        self.files += 1
        number, name = self.files, f"file{self.files}"
        data = random.Random(seed).randbytes(size)
        half = size // 2
        path = Path(self.folder.name) / name
        path.write_bytes(bytes(offset) + data[half:] + data[:half])
        self.store.add_file(number, os.open(path, os.O_RDONLY))
        tensors = (
            TensorSpec("a", "uint8", (half,), 0, half),
            TensorSpec("b", "uint8", (size - half,), half, size - half),
        )
        spec = BundleSpec(len(SIZES) + number, Kind.PARAM, name, size, tensors)
        self.store.declare([spec])
        chunk = self.layout.chunk_bytes
        digests = tuple(digest([memoryview(data)[at : at + chunk]]) for at in range(0, size, chunk))
        bundle = self.store.adopt(Adoption(spec.spec_id, number, (offset + size - half, offset), digests))
        self.committed[bundle], self.sizes[bundle] = data, size

    @rule(spec=st.integers(0, len(SIZES) - 1))
    def create_and_think_better_of_it(self, spec: int) -> None:
        for bundle in self.acquire([(spec, SIZES[spec], Mode.CREATE)]):
            self.release(bundle)

    @rule(
        choices=st.lists(st.integers(0, 999), min_size=1, max_size=5),
        mode=st.sampled_from([Mode.READ, Mode.UPDATE]),
        fault=st.none() | FAULTS,
    )
    def lease_several(self, choices: list[int], mode: Mode, fault: tuple[str, Spoil | int] | None) -> None:
        if not self.idle():
            return
        if fault is not None:
            self.faults.arm(*fault)
        chosen = {self.pick(self.idle(), choice) for choice in choices}
        for bundle in self.acquire([(b, self.sizes[b], mode) for b in sorted(chosen)]):
            assert self.bytes_of(bundle) == self.committed[bundle], f"bundle {bundle} read back wrong"

    @rule(choice=st.integers(0, 999))
    def upgrade(self, choice: int) -> None:
        if not any(lease.mode == Mode.READ for lease in self.leases.values()):
            return
        bundle = self.pick([b for b, lease in self.leases.items() if lease.mode == Mode.READ], choice)
        self.acquire([(bundle, self.sizes[bundle], Mode.UPDATE)])

    @rule(seed=st.integers(0, 999))
    def update_all(self, seed: int) -> None:
        if not any(lease.mode.writes for lease in self.leases.values()):
            return
        self.commit([bundle for bundle, lease in self.leases.items() if lease.mode.writes], seed)

    def commit(self, bundles: list[int], seed: int) -> None:
        """Write random bytes and make them the newest, in one transaction."""
        for bundle in bundles:
            self.committed[bundle] = random.Random(seed + bundle).randbytes(self.sizes[bundle])
            self.write(bundle, self.committed[bundle])
        grants = [self.leases[bundle].grant for bundle in bundles]
        self.table.commit([(grant.serial, grant.version + 1) for grant in grants])
        self.send()

    @rule(choice=st.integers(0, 999))
    def release_one(self, choice: int) -> None:
        if not self.leases:
            return
        self.release(self.pick(list(self.leases), choice))

    @rule()
    def release_all(self) -> None:
        if not self.leases:
            return
        for bundle in list(self.leases):
            self.release(bundle)

    @rule(choice=st.integers(0, 999))
    def consume(self, choice: int) -> None:
        if not self.idle():
            return
        bundle = self.pick(self.idle(), choice)
        for leased in self.acquire([(bundle, self.sizes[bundle], Mode.CONSUME)]):
            assert self.bytes_of(leased) == self.committed.pop(leased)
            self.table.commit([], [self.leases.pop(leased).grant.serial])
            self.send()

    @rule(choices=st.lists(st.integers(0, 999), min_size=1, max_size=3), replaced=st.booleans())
    def discard(self, choices: list[int], replaced: bool) -> None:
        """`replaced`: the first gives its place to another of its size, if there is one."""
        if not self.idle():
            return
        chosen = {self.pick(self.idle(), choice) for choice in choices}
        for bundle in chosen:
            del self.committed[bundle]
        first = min(chosen)
        heir = next((b for b in self.idle() if self.sizes[b] == self.sizes[first]), None)
        if replaced and heir is not None:
            chosen.remove(first)
            self.table.supersede([(first, heir)])
        self.table.discard(chosen)
        self.send()

    @rule(fault=FAULTS)
    def arm(self, fault: tuple[str, Spoil | int]) -> None:
        self.faults.arm(*fault)

    # -- what holds

    @invariant()
    def frames_and_extents_add_up(self) -> None:
        self.store.check_invariants()
        stats = self.store.snapshot()
        for tier in stats.tiers.values():
            assert 0 <= tier.used_bytes <= tier.capacity_bytes, stats
        assert stats.leases == len(self.leases)
        frames = sum(self.layout.frames_for(self.sizes[bundle]) for bundle in self.leases)
        assert stats.leased_bytes == frames * self.layout.frame_bytes
        assert stats.waiting == 0

    @invariant()
    def leased_bytes_stay(self) -> None:
        for bundle in self.leases:
            assert self.bytes_of(bundle) == self.committed[bundle], f"bundle {bundle} changed under its lease"

    def teardown(self) -> None:
        """Every byte is there; then the end comes while transfers are under way, and nothing is left."""
        try:
            self.faults.disarm()
            self.release_all()
            for bundle in sorted(self.committed):
                self.faults_seen = self.faults.fired  # a fault's late echo is no excuse from here on
                assert self.acquire([(bundle, self.sizes[bundle], Mode.UPDATE)]) == [bundle]
                assert self.bytes_of(bundle) == self.committed[bundle], f"bundle {bundle} was lost"
                self.commit([bundle], bundle)
                self.release(bundle)
            for bundle in sorted(self.committed):
                self.table.demand(LANE, bundle, Mode.READ)
            self.send()
        finally:
            self.close()
        stats = self.store.snapshot()
        assert all(tier.used_bytes == 0 for tier in stats.tiers.values()), stats
        assert (stats.bundles, stats.leases, stats.leased_bytes, stats.dirty_bytes, stats.waiting) == (0, 0, 0, 0, 0)
        assert self.flash.used_bytes == 0
        assert self.directory.used_bytes == 0

    def close(self) -> None:
        """Of the store and everything around it."""
        self.arena.close()
        self.store.close()
        assert self.mover.wait_idle(WAIT_S)
        assert self.mover.close(WAIT_S)
        self.directory.close()
        self.folder.cleanup()


class MemoryStoreMachine(StoreMachine):
    """The same without a disk: faster, so more steps."""

    def new_flash(self, layout: ArenaLayout, directory: FlashDirectory) -> Tier:
        return MemoryTier(layout, FLASH_BYTES)
