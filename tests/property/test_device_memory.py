"""Leases, holders, writes, commits, discards and predictions in any order: every read sees the newest bytes, and a
commit finds them in the frames of its lease.
"""

from __future__ import annotations

import ctypes
import fcntl
import itertools
import os
import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.fake_cuda import FakeDriver
from tiermem.allocator import FrameAllocator
from tiermem.bundle import BundleSpec, Kind, Mode
from tiermem.errors import WorkingSetTooLarge
from tiermem.grants.messages import Grant
from tiermem.grants.table import Lease
from tiermem.lookahead import Lookahead
from tiermem.plan import Access, Phase
from tiermem.units import KIB
from tiermem_client.address_space import AddressSpace
from tiermem_client.copy_engine import CopyEngine, EmulatedEngine, Pace
from tiermem_client.cuda_engine import CudaEngine
from tiermem_client.cuda_space import CudaSpace
from tiermem_client.device_memory import DeviceMemory
from tiermem_client.device_space import DeviceSpace, HostSpace
from tiermem_client.memory import Bundle

ARENA_FRAME, DEVICE_FRAME = 8 * KIB, 4 * KIB
DEVICE_FRAMES = 12
SIZES = [3000, 4 * KIB, 9000, 16 * KIB, 20000, 100, 12 * KIB]


def space(frames: int, frame_bytes: int) -> AddressSpace:
    fd = os.memfd_create("tiermem-test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, frames * frame_bytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    return AddressSpace(fd, frames * frame_bytes, frame_bytes)


class Machine(RuleBasedStateMachine):
    """Plays `Residency` and the daemon: the store's bytes of a bundle lie anywhere while nothing leases it."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = itertools.count()
        self.serials = itertools.count(1)
        self.arena, self.frames = space(64, ARENA_FRAME), FrameAllocator(64)
        device, engine = self.device()
        foresight = Lookahead(lambda: float(next(self.clock)))
        self.memory = DeviceMemory(self.arena, device, 64 * KIB, engine, foresight)
        self.mine: list[Bundle] = []
        self.stored: dict[Bundle, bytes] = {}  # the newest committed version
        self.newest: dict[Bundle, bytes] = {}

    def device(self) -> tuple[DeviceSpace, CopyEngine]:
        return HostSpace(space(DEVICE_FRAMES, DEVICE_FRAME)), EmulatedEngine(Pace(latency_s=2e-4))

    @initialize()
    def declare(self) -> None:
        for number, nbytes in enumerate(SIZES, 1):
            spec = BundleSpec(number, Kind.PARAM, "unit", nbytes, ())
            self.mine.append(Bundle(spec, self.memory.reserve(nbytes)))

    def teardown(self) -> None:
        self.memory.close()
        self.arena.close()

    # -- the arena

    def lease(self, bundle: Bundle, mode: Mode) -> None:
        runs = self.frames.take(-(-bundle.spec.nbytes // ARENA_FRAME))
        form = bundle.spec.spec_id
        grant = Grant(next(self.serials), "main", 0, form, form, mode, bundle.version, runs, answers=1)
        bundle.bundle_id, bundle.lease = form, Lease(grant, mode)
        if bundle in self.stored:
            self.put(bundle, self.stored[bundle])
        self.memory.leased(bundle)

    def pieces(self, bundle: Bundle) -> list[tuple[int, int]]:
        assert bundle.lease is not None
        return [(self.arena.home + f * ARENA_FRAME, n * ARENA_FRAME) for f, n in bundle.lease.grant.runs]

    def put(self, bundle: Bundle, data: bytes) -> None:
        for address, nbytes in self.pieces(bundle):
            ctypes.memmove(address, data[:nbytes], min(nbytes, len(data)))
            data = data[nbytes:]

    def in_lease(self, bundle: Bundle) -> bytes:
        return b"".join(ctypes.string_at(*piece) for piece in self.pieces(bundle))[: bundle.spec.nbytes]

    # -- what Residency does

    @rule(number=st.integers(0, len(SIZES) - 1), writes=st.booleans(), seed=st.integers(0, 255))
    def enter(self, number: int, writes: bool, seed: int) -> None:
        bundle = self.mine[number]
        if bundle.holders:
            return
        new = bundle not in self.newest
        mode = Mode.CREATE if new and not bundle.lease else Mode.UPDATE if writes or new else Mode.READ
        if bundle.lease is None and not (mode is Mode.READ and self.memory.is_here(bundle)):
            self.lease(bundle, mode)
        elif bundle.lease is not None and mode.writes and not bundle.lease.mode.writes:
            return  # an upgrade is a new lease of the same frames: nothing that this is told of
        held = [b for b in self.mine if b.holders]
        if sum(-(-b.spec.nbytes // DEVICE_FRAME) for b in [*held, bundle]) > DEVICE_FRAMES:
            with pytest.raises(WorkingSetTooLarge):
                self.memory.entered(bundle, mode)
            return
        self.memory.entered(bundle, mode)
        bundle.holders = 1
        if not new:
            assert ctypes.string_at(bundle.address, bundle.spec.nbytes) == self.newest[bundle]
        if mode.writes:
            data = random.Random(seed).randbytes(bundle.spec.nbytes)
            ctypes.memmove(bundle.address, data, len(data))
            bundle.written, self.newest[bundle] = True, data

    @rule(number=st.integers(0, len(SIZES) - 1))
    def leave(self, number: int) -> None:
        bundle = self.mine[number]
        if bundle.holders:
            bundle.holders = 0
            self.memory.left(bundle)
            bundle.written, bundle.owed = False, bundle.owed or bundle.written

    @rule(numbers=st.sets(st.integers(0, len(SIZES) - 1)))
    def commit(self, numbers: set[int]) -> None:
        owed = [b for b in (self.mine[n] for n in sorted(numbers)) if b.written or b.owed]
        self.memory.store(owed)
        for bundle in owed:
            assert self.in_lease(bundle) == self.newest[bundle]
            self.stored[bundle] = self.newest[bundle]
            bundle.version += 1
            bundle.written = bundle.owed = False

    @rule(number=st.integers(0, len(SIZES) - 1))
    def end(self, number: int) -> None:
        """Of a reading lease also while it is held, of a writing one when what was written is committed."""
        bundle = self.mine[number]
        if bundle.lease is None or bundle.written or bundle.owed or (bundle.holders and bundle.lease.mode.writes):
            return
        self.memory.ended(bundle)
        runs, bundle.lease = bundle.lease.grant.runs, None
        for first, count in runs:  # others' bytes come there
            ctypes.memset(self.arena.home + first * ARENA_FRAME, 0xAA, count * ARENA_FRAME)
        self.frames.give(runs)
        if bundle.version == 0:
            self.memory.forget(bundle)

    @rule(number=st.integers(0, len(SIZES) - 1))
    def discard(self, number: int) -> None:
        bundle = self.mine[number]
        if bundle.holders or bundle.lease is not None:
            return
        self.memory.forget(bundle)
        bundle.version, bundle.bundle_id = 0, None
        self.newest.pop(bundle, None)
        self.stored.pop(bundle, None)

    @rule(unit=st.sampled_from("abcd"), phase=st.sampled_from(list(Phase)))
    def accessed(self, unit: str, phase: Phase) -> None:
        self.memory.accessed(Access(unit, phase))

    @rule(order=st.permutations(range(len(SIZES))), stop=st.integers(1, len(SIZES)))
    def same_way_round(self, order: list[int], stop: int) -> None:
        """Three rounds over the bundles, the last one broken off: from the second on uses are foreseen."""
        for number in [*order, *order, *order[:stop]]:
            self.memory.accessed(Access(number, Phase.FORWARD))
            self.memory.check_invariants()
            self.enter(number, False, 0)
            self.leave(number)

    @invariant()
    def nothing_written_can_be_lost(self) -> None:
        self.memory.check_invariants()


class CudaMachine(Machine):
    """The same on the space and the engine of a GPU, whose driver is emulated."""

    def device(self) -> tuple[DeviceSpace, CopyEngine]:
        self.driver = FakeDriver(DEVICE_FRAMES * DEVICE_FRAME, DEVICE_FRAME, latency_s=2e-4, lag_s=5e-4)
        self.space = CudaSpace(self.driver, DEVICE_FRAMES, DEVICE_FRAME)
        return self.space, CudaEngine(self.driver)

    @invariant()
    def frames_are_where_they_are_used(self) -> None:
        self.space.check_invariants()

    def teardown(self) -> None:
        super().teardown()
        assert (self.driver.mapped, self.driver.reserved, self.driver.handles) == ({}, {}, {})
        self.driver.close()


Machine.TestCase.settings = settings(max_examples=25, stateful_step_count=40)
CudaMachine.TestCase.settings = settings(max_examples=25, stateful_step_count=40)
TestDeviceMemory = Machine.TestCase
TestDeviceMemoryOfAGpu = CudaMachine.TestCase
