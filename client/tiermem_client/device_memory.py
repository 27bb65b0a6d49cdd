"""Tensors that lie in device memory: frames of it enter their ranges while they are used, and stay filled as copies
until others need the room.

The bytes' home is DRAM (or flash below it): a copy is filled from the frames of a lease, and what was written is
brought back into them before it is committed, or before the copy leaves. Which copies leave, and which come ahead of
their use, is decided here, next to the copies' events, on predictions of the same kind as the daemon's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tiermem.bundle import Mode
from tiermem.device_cache import DeviceCache, DeviceCopy
from tiermem.errors import ResourceExhausted, TiermemError
from tiermem.grants.table import Lease
from tiermem.lookahead import Lookahead
from tiermem.placement.belady import Belady
from tiermem.plan import Access
from tiermem.stats import DeviceReport, TierStats
from tiermem.units import format_size
from tiermem_client.address_space import AddressSpace, Range
from tiermem_client.copy_engine import CopyEngine, Event, Extent, pieces_between
from tiermem_client.device_space import DeviceSpace
from tiermem_client.memory import Bundle, DeviceStats, MemoryStats

_LANE = "main"
_AHEAD_SHARE = 0.5
"""The part of the device that may be filled ahead of its use."""


class DeviceMemory:
    """`arena` is home of the bytes, `space` the device's memory, which is taken over, as is the engine. The caller
    holds the client lock.
    """

    keeps_copies = True

    def __init__(
        self,
        arena: AddressSpace,
        space: DeviceSpace,
        cap_bytes: int,
        engine: CopyEngine,
        foresight: Lookahead,
        unpinned: str = "",
    ) -> None:
        self.device, self.unpinned = torch.device(space.device), unpinned
        self.frame_bytes, self.bundle_cap_bytes = space.frame_bytes, cap_bytes
        self._arena, self._space, self._engine, self._foresight = arena, space, engine, foresight
        self._cache = DeviceCache(space.frames, Belady(foresight.next_use))
        self._bundles: dict[int, Bundle] = {}  # of forms, as soon as they are leased for the first time
        self._coming: dict[int, Event] = {}
        self._going: dict[int, Event] = {}
        self._closed = False

    # -- the contract of Memory

    def reserve(self, nbytes: int) -> Range:
        return self._space.reserve(nbytes)

    def release(self, range_: Range) -> None:
        self._space.release(range_)

    def is_here(self, bundle: Bundle) -> bool:
        return self._cache.get(bundle.spec.spec_id) is not None

    def leased(self, bundle: Bundle) -> None:
        self._bundles[bundle.spec.spec_id] = bundle

    def entered(self, bundle: Bundle, mode: Mode) -> None:
        key = bundle.spec.spec_id
        self._foresight.used(_LANE, bundle.spec, mode)
        copy = self._cache.get(key)
        if copy is None:
            self._cache.counts.misses += 1
            for victim in self._cache.victims(self._frames(bundle)):
                self._evict(victim)
            copy = self._fill(bundle)
        else:
            self._cache.counts.hits += 1
        self._settle(key)
        self._cache.hold(key)
        try:
            self._space.map(bundle.range, bundle.offset_bytes, copy.runs)
        except TiermemError:
            self._cache.let_go(key)
            raise

    def left(self, bundle: Bundle) -> None:
        key = bundle.spec.spec_id
        copy = self._copy(key)
        self._space.unmap(bundle.range, bundle.offset_bytes, copy.runs)
        self._cache.let_go(key)
        copy.dirty = copy.dirty or bundle.written

    def store(self, bundles: Sequence[Bundle]) -> None:
        for bundle in bundles:
            copy = self._cache.get(bundle.spec.spec_id)
            if copy is not None and (copy.dirty or bundle.written):
                self._bring_back(bundle, copy)
        for bundle in bundles:
            self._settle(bundle.spec.spec_id)

    def ended(self, bundle: Bundle) -> None:
        self._settle(bundle.spec.spec_id)
        copy = self._cache.get(bundle.spec.spec_id)
        assert copy is None or not copy.dirty, f"the lease of {bundle.spec} ends before what was written is in it"

    def forget(self, bundle: Bundle) -> None:
        key = bundle.spec.spec_id
        self._settle(key)
        if self._cache.get(key) is not None:
            self._drop(bundle)

    def missing_bytes(self, together: Sequence[Bundle]) -> int:
        return max(0, sum(map(self._frames, together)) - self._cache.frames) * self.frame_bytes

    def check_floor(self, together: Sequence[Bundle]) -> None:
        frames = sum(map(self._frames, together))
        if self.missing_bytes(together):
            names = ", ".join(sorted({bundle.spec.unit for bundle in together}))
            wanted, there_is = (format_size(n * self.frame_bytes) for n in (frames, self._cache.frames))
            raise ResourceExhausted(
                f"{wanted} are computed with at once (in {names}), and the {self._engine.name} device has {there_is}; "
                "give it that much"
            )

    def accessed(self, access: Access) -> None:
        """What is entered from now on belongs to this. Copies that will be used soon are asked for."""
        self._foresight.accessed(_LANE, access)
        self._fill_ahead()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._engine.close()
            self._space.close()

    # -- statistics

    def stats(self) -> MemoryStats:
        counts = self._cache.counts
        used = TierStats(self._cache.frames * self.frame_bytes, self._cache.used_frames * self.frame_bytes)
        device = DeviceStats(self._engine.name, counts.hits, counts.misses, counts.evictions)
        kind, links = self._engine.kind, self._engine.links()
        return MemoryStats(device, DeviceReport(kind, used, links[kind.inward], links[kind.outward]))

    # -- copies

    def _frames(self, bundle: Bundle) -> int:
        return max(1, -(-bundle.spec.nbytes // self.frame_bytes))

    def _copy(self, key: int) -> DeviceCopy:
        copy = self._cache.get(key)
        assert copy is not None, f"form {key} has no copy on the device"
        return copy

    def _fill(self, bundle: Bundle) -> DeviceCopy:
        """A copy of what is in the lease's frames, coming; nothing comes where nothing has been written yet."""
        assert bundle.lease is not None, f"{bundle.spec} has neither a copy on the device nor a lease"
        copy = self._cache.take(bundle.spec.spec_id, self._frames(bundle))
        if (bundle.version > 0 or bundle.owed) and not bundle.blank:
            pieces = pieces_between(self._in_arena(bundle.lease), self._on_device(bundle, copy), bundle.spec.nbytes)
            self._coming[bundle.spec.spec_id] = self._engine.h2d(pieces, self._space.settled(copy.runs))
        return copy

    def _bring_back(self, bundle: Bundle, copy: DeviceCopy) -> None:
        """Ask for the copy's bytes in the lease's frames."""
        lease = bundle.lease
        assert lease is not None and lease.mode.writes, f"{bundle.spec} was written without a lease for it"
        pieces = pieces_between(self._on_device(bundle, copy), self._in_arena(lease), bundle.spec.nbytes)
        self._going[bundle.spec.spec_id] = self._engine.d2h(pieces, self._space.settled(copy.runs))
        copy.dirty = False

    def _in_arena(self, lease: Lease) -> Extent:
        return Extent(lease.grant.runs, self._arena.frame_bytes, self._arena.home)

    def _on_device(self, bundle: Bundle, copy: DeviceCopy) -> Extent:
        """While it is held, its frames are in its range and not at home."""
        if copy.held:
            return Extent(((0, copy.frames),), self.frame_bytes, bundle.address)
        return Extent(copy.runs, self.frame_bytes, self._space.home)

    def _settle(self, key: int) -> None:
        """Wait for what is under way."""
        for events in (self._coming, self._going):
            if (event := events.pop(key, None)) is not None:
                self._engine.wait(event)

    def _evict(self, key: int) -> None:
        copy = self._copy(key)
        if copy.dirty:
            self._bring_back(self._bundles[key], copy)
        self._settle(key)
        self._drop(self._bundles[key])
        self._cache.counts.evictions += 1

    def _drop(self, bundle: Bundle) -> None:
        self._cache.drop(bundle.spec.spec_id)
        self._space.vacate(bundle.range, bundle.offset_bytes)

    def _fill_ahead(self) -> None:
        """Ask for copies of what is used next and leased already, as far as room can be made without waiting."""
        room = int(self._cache.frames * _AHEAD_SHARE)
        for use in self._foresight.upcoming(_LANE):
            bundle = self._bundles.get(use.spec)
            if bundle is None or self._cache.get(use.spec) is not None:
                continue
            frames = self._frames(bundle)
            room -= frames
            if room < 0:
                return
            if bundle.lease is None or use.mode is Mode.CREATE:
                continue
            distance = self._foresight.next_use(use.spec)
            victims = self._cache.victims_ahead(frames, self._foresight.next_use, distance or 0)
            if victims is None or not self._cleaned(victims):
                return
            for victim in victims:
                self._evict(victim)
            self._fill(bundle)

    def _cleaned(self, keys: Sequence[int]) -> bool:
        """Whether all of them can leave without a wait; what is dirty is on its way back afterwards."""
        for key in keys:
            copy = self._copy(key)
            if copy.dirty:
                self._bring_back(self._bundles[key], copy)
        under_way = [e for key in keys for e in (self._coming.get(key), self._going.get(key)) if e is not None]
        return all(self._engine.query(event) for event in under_way)

    def check_invariants(self) -> None:
        """Raise AssertionError where a written copy could be lost."""
        self._cache.check_invariants()
        for key, copy in self._cache.copies():
            bundle = self._bundles[key]
            assert copy.held == (bundle.holders > 0), bundle
            assert not copy.dirty or bundle.writable, f"{bundle.spec} is dirty on the device without a lease"
