"""What every tier owes the store, as tests: subclass TierContract, give it a `tier` fixture, and pytest runs the
contract.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import ClassVar

import pytest

from tiermem.errors import InvalidArgument, TierFull, TierIOError
from tiermem.layout import PAGE_BYTES, arena_layout
from tiermem.testing.fakes import page_aligned
from tiermem.tiers.base import Extent, Tier
from tiermem.units import MIB


class TierContract:
    """Subclass as Test<Tier> and define a fixture `tier` that yields a tier with `layout`'s frames, and closes it.

    The tier must be empty and hold 32 to 1,024 frames, all of which extents of one frame can fill.
    """

    layout = arena_layout(8 * MIB)
    keeps_bytes: ClassVar[bool] = True
    """False for a tier that only accounts: its round trips are skipped."""
    one_place: ClassVar[bool] = True
    """False for a tier whose extents must lie in one of several places: n free frames may then be too scattered for n.
    """

    @pytest.fixture(autouse=True)
    def _check_invariants(self, tier: Tier) -> object:
        yield
        tier.check_invariants()

    @pytest.mark.parametrize("extra", [-1, 0, 1, 123])
    @pytest.mark.parametrize("base", ["page", "frame", "3 frames"])
    def test_round_trip_of_any_size(self, tier: Tier, base: str, extra: int) -> None:
        frame = self.layout.frame_bytes
        nbytes = {"page": PAGE_BYTES, "frame": frame, "3 frames": 3 * frame}[base] + extra
        data = _random_bytes(nbytes, seed=nbytes)
        extent = tier.reserve(nbytes)
        tier.write(extent, 0, [page_aligned(data)])
        self._expect(tier, extent, data)

    def test_round_trip_through_differently_scattered_views(self, tier: Tier) -> None:
        frame = self.layout.frame_bytes
        nbytes = 4 * frame + PAGE_BYTES + 77
        data = _random_bytes(nbytes, seed=1)
        extent = tier.reserve(nbytes)
        tier.write(extent, 0, _views(data, [0, PAGE_BYTES, 2 * frame, nbytes]))
        into = _views(bytes(nbytes), [0, frame, frame + PAGE_BYTES, 4 * frame, nbytes])
        tier.read(extent, 0, into)
        if self.keeps_bytes:
            assert b"".join(into) == data

    def test_a_part_is_written_and_read_without_touching_the_rest(self, tier: Tier) -> None:
        frame = self.layout.frame_bytes
        data = bytearray(_random_bytes(3 * frame + 5, seed=2))
        extent = tier.reserve(len(data))
        tier.write(extent, 0, [page_aligned(bytes(data))])
        data[frame : 2 * frame] = _random_bytes(frame, seed=3)
        tier.write(extent, frame, [page_aligned(bytes(data[frame : 2 * frame]))])
        data[3 * frame :] = b"12345"
        tier.write(extent, 3 * frame, [page_aligned(b"12345")])
        self._expect(tier, extent, bytes(data))
        part = page_aligned(bytes(frame))
        tier.read(extent, 2 * frame, [part])
        if self.keeps_bytes:
            assert part == data[2 * frame : 3 * frame]

    def test_an_empty_extent_has_an_address(self, tier: Tier) -> None:
        extent = tier.reserve(0)
        tier.write(extent, 0, [])
        tier.read(extent, 0, [])
        assert tier.used_bytes == self.layout.frame_bytes
        tier.free(extent)
        assert tier.used_bytes == 0

    def test_accounting_is_exact(self, tier: Tier) -> None:
        frame = self.layout.frame_bytes
        sizes = [1, frame, frame + 1, 3 * frame - 1]
        extents = []
        frames = 0
        for nbytes in sizes:
            extents.append(tier.reserve(nbytes))
            frames += -(-nbytes // frame)
            assert (extents[-1].nbytes, extents[-1].frames) == (nbytes, -(-nbytes // frame))
            assert tier.used_bytes == frames * frame <= tier.capacity_bytes
        for extent in extents:
            tier.free(extent)
            frames -= extent.frames
            assert tier.used_bytes == frames * frame

    def test_a_full_tier_refuses_and_changes_nothing(self, tier: Tier) -> None:
        frame = self.layout.frame_bytes
        first_data = _random_bytes(2 * frame, seed=4)
        first = tier.reserve(2 * frame)
        tier.write(first, 0, [page_aligned(first_data)])
        singles = self._fill(tier)
        assert tier.used_bytes == tier.capacity_bytes
        with pytest.raises(TierFull, match=tier.name):
            tier.reserve(1)
        assert tier.used_bytes == tier.capacity_bytes
        tier.check_invariants()
        self._expect(tier, first, first_data)
        tier.free(singles.pop())
        again = tier.reserve(frame)
        tier.write(again, 0, [page_aligned(_random_bytes(frame, seed=5))])
        self._expect(tier, again, _random_bytes(frame, seed=5))
        self._expect(tier, first, first_data)

    def test_a_request_beyond_the_capacity_is_refused(self, tier: Tier) -> None:
        with pytest.raises(TierFull):
            tier.reserve(tier.capacity_bytes + 1)
        assert tier.used_bytes == 0

    def test_a_double_free_is_refused(self, tier: Tier) -> None:
        kept, freed = tier.reserve(1), tier.reserve(1)
        tier.free(freed)
        with pytest.raises(ValueError, match="not held"):
            tier.free(freed)
        with pytest.raises(ValueError, match="not held"):
            tier.free(Extent(kept.nbytes, ((kept.runs[0][0], 2),), kept.place))
        assert tier.used_bytes == self.layout.frame_bytes

    def test_scattered_frames_are_recycled_into_larger_extents(self, tier: Tier) -> None:
        if not self.one_place:
            pytest.skip("frames freed here and there lie in several places")
        frame = self.layout.frame_bytes
        singles = self._fill(tier)
        for extent in singles[::2]:
            tier.free(extent)
        nbytes = len(singles[::2]) * frame - 9
        large = tier.reserve(nbytes)
        assert len(large.runs) == len(singles[::2])
        assert tier.used_bytes == tier.capacity_bytes
        data = _random_bytes(nbytes, seed=6)
        tier.write(large, 0, [page_aligned(data)])
        self._expect(tier, large, data)
        offset = 5 * frame
        tail = page_aligned(bytes(nbytes - offset))
        tier.read(large, offset, [tail])
        if self.keeps_bytes:
            assert tail == data[offset:]

    def test_threads_use_disjoint_extents_at_once(self, tier: Tier) -> None:
        def work(seed: int) -> None:
            source = random.Random(seed)
            for round_ in range(12):
                nbytes = source.randrange(1, 4 * self.layout.frame_bytes)
                data = _random_bytes(nbytes, seed=1000 * seed + round_)
                extent = tier.reserve(nbytes)
                tier.write(extent, 0, [page_aligned(data)])
                self._expect(tier, extent, data)
                tier.free(extent)

        with ThreadPoolExecutor(4) as pool:
            for future in [pool.submit(work, seed) for seed in range(4)]:
                future.result()
        assert tier.used_bytes == 0

    @pytest.mark.parametrize("operation", ["read", "write"])
    def test_a_range_outside_the_extent_is_refused(self, tier: Tier, operation: str) -> None:
        frame = self.layout.frame_bytes
        extent = tier.reserve(frame + 10)
        views = [page_aligned(bytes(11))]
        with pytest.raises(InvalidArgument, match="extent"):
            getattr(tier, operation)(extent, frame, views)
        with pytest.raises(InvalidArgument, match="extent"):
            getattr(tier, operation)(extent, -PAGE_BYTES, views)
        with pytest.raises(InvalidArgument, match="page"):
            getattr(tier, operation)(extent, 0, views)

    def test_a_closed_tier_refuses(self, tier: Tier) -> None:
        extent = tier.reserve(1)
        tier.close()
        tier.close()
        assert tier.used_bytes == 0
        with pytest.raises(TierIOError, match="closed"):
            tier.reserve(1)
        with pytest.raises(TierIOError, match="closed"):
            tier.write(extent, 0, [page_aligned(b"x")])
        with pytest.raises(TierIOError, match="closed"):
            tier.read(extent, 0, [page_aligned(b"x")])
        with pytest.raises(ValueError, match="not held"):
            tier.free(extent)

    def _fill(self, tier: Tier) -> list[Extent]:
        """Take every remaining frame, one by one."""
        left = (tier.capacity_bytes - tier.used_bytes) // self.layout.frame_bytes
        return [tier.reserve(self.layout.frame_bytes) for _ in range(left)]

    def _expect(self, tier: Tier, extent: Extent, data: bytes) -> None:
        into = page_aligned(bytes(len(data)))
        tier.read(extent, 0, [into])
        if self.keeps_bytes:
            assert into == data


def _random_bytes(nbytes: int, seed: int) -> bytes:
    return random.Random(seed).randbytes(nbytes)


def _views(data: bytes, cuts: Sequence[int]) -> list[memoryview]:
    return [page_aligned(data[begin:end]) for begin, end in pairwise(cuts)]
