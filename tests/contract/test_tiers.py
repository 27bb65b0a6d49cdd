from __future__ import annotations

import errno
import os
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tiermem.digest import digest
from tiermem.errors import ResourceExhausted, TierFull, TierIOError
from tiermem.layout import PAGE_BYTES
from tiermem.testing import (
    FaultyCalls,
    FaultyTier,
    MemoryTier,
    NullTier,
    SlowTier,
    page_aligned,
    parse_fault_script,
)
from tiermem.testing.tier_contract import TierContract
from tiermem.tiers.base import Extent, Tier
from tiermem.tiers.dram import DramTier, Prefault
from tiermem.tiers.flash import FlashTier
from tiermem.tiers.flash_directory import FlashDirectory
from tiermem.tiers.os_calls import MADV_POPULATE_WRITE, MADV_REMOVE, FileCalls, LinuxCalls
from tiermem.units import MIB

LAYOUT = TierContract.layout
FRAME = LAYOUT.frame_bytes


def open_directory(path: Path, quota_bytes: int | None = 64 * MIB, calls: FileCalls | None = None) -> FlashDirectory:
    return FlashDirectory.open(path, quota_bytes, allow_memory_filesystem=True, calls=calls)


class Refusing(LinuxCalls):
    """madvise refuses one advice."""

    def __init__(self, advice: int, number: int) -> None:
        self.advice, self.number = advice, number

    def madvise(self, address: int, nbytes: int, advice: int) -> None:
        if advice == self.advice:
            raise OSError(self.number, "scripted")
        super().madvise(address, nbytes, advice)


class TestDramTier(TierContract):
    @pytest.fixture
    def tier(self) -> Iterator[DramTier]:
        tier = DramTier(LAYOUT)
        yield tier
        tier.close()

    def test_all_pages_are_present_from_the_start(self, tier: DramTier) -> None:
        assert tier.prefault is Prefault.POPULATE
        assert os.fstat(tier.fd).st_blocks * 512 == LAYOUT.arena_bytes

    def test_the_file_is_sealed_against_resizing(self, tier: DramTier) -> None:
        for size in (0, 2 * LAYOUT.arena_bytes):
            with pytest.raises(PermissionError):
                os.ftruncate(tier.fd, size)
        assert not os.get_inheritable(tier.fd)

    def test_views_are_the_memory_itself(self, tier: DramTier) -> None:
        runs = ((7, 2), (3, 1))
        views = tier.views(runs, FRAME, FRAME + 10)
        assert [view.nbytes for view in views] == [FRAME, 10]
        views[0][0], views[1][9] = 1, 2
        assert os.pread(tier.fd, 1, 8 * FRAME) == b"\1"
        assert os.pread(tier.fd, 1, 3 * FRAME + 9) == b"\2"

    def test_close_gives_memory_back_while_the_descriptor_is_held_elsewhere(self) -> None:
        tier = DramTier(LAYOUT)
        held = os.dup(tier.fd)
        try:
            tier.views(((0, 1),), 0, 5)[0][:] = b"hello"
            tier.close()
            assert os.fstat(held).st_blocks == 0
            assert os.pread(held, 5, 0) == bytes(5)
        finally:
            os.close(held)

    def test_close_with_a_view_still_held_keeps_addresses_not_memory(self, caplog: pytest.LogCaptureFixture) -> None:
        tier = DramTier(LAYOUT)
        held = os.dup(tier.fd)
        [view] = tier.views(((0, 1),), 0, 5)
        view[:] = b"hello"
        tier.close()
        assert "views of it are held" in caplog.text
        assert os.fstat(held).st_blocks == 0
        os.close(held)
        assert bytes(view) == bytes(5)

    def test_an_old_kernel_is_reported_and_served_by_touching(self, caplog: pytest.LogCaptureFixture) -> None:
        tier = DramTier(LAYOUT, calls=Refusing(MADV_POPULATE_WRITE, errno.EINVAL))
        assert tier.prefault is Prefault.TOUCH
        assert os.fstat(tier.fd).st_blocks * 512 == LAYOUT.arena_bytes
        assert "MADV_POPULATE_WRITE" in caplog.text
        tier.close()

    def test_too_little_memory_is_refused_and_leaves_nothing(self) -> None:
        before = set(os.listdir("/proc/self/fd"))
        with pytest.raises(ResourceExhausted, match=r"8 MiB .*ENOMEM"):
            DramTier(LAYOUT, calls=Refusing(MADV_POPULATE_WRITE, errno.ENOMEM))
        assert set(os.listdir("/proc/self/fd")) <= before

    def test_a_refused_removal_is_logged_and_the_rest_is_closed(self, caplog: pytest.LogCaptureFixture) -> None:
        tier = DramTier(LAYOUT, calls=Refusing(MADV_REMOVE, errno.EINVAL))
        fd = tier.fd
        tier.close()
        assert "MADV_REMOVE" in caplog.text
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)


class TestFlashTierOneDirectory(TierContract):
    @pytest.fixture
    def tier(self, tmp_path: Path) -> Iterator[FlashTier]:
        directory = open_directory(tmp_path / "flash")
        tier = FlashTier([directory], LAYOUT, "job-1", 2 * MIB)
        yield tier
        tier.close()
        assert directory.used_bytes == 0
        assert directory.errors == {}
        directory.close()
        assert os.listdir(tmp_path / "flash") == ["tiermem.lock"]


class TestFlashTierTwoDirectories(TierContract):
    one_place = False

    @pytest.fixture
    def tier(self, tmp_path: Path) -> Iterator[FlashTier]:
        directories = [open_directory(tmp_path / "a", 3 * MIB), open_directory(tmp_path / "b", MIB)]
        tier = FlashTier(directories, LAYOUT, "job/../1", None)
        assert tier.capacity_bytes == 4 * MIB
        yield tier
        tier.close()
        for directory in directories:
            assert directory.used_bytes == 0
            directory.close()

    def test_whole_extents_take_turns(self, tier: FlashTier) -> None:
        extents = [tier.reserve(2 * FRAME) for _ in range(6)]
        assert [extent.place for extent in extents] == [0, 1, 0, 1, 0, 1]

    def test_a_full_directory_is_passed_over(self, tier: FlashTier) -> None:
        places = [tier.reserve(FRAME).place for _ in range(4 * MIB // FRAME)]
        assert places[:4] == [0, 1, 0, 1]
        assert (places.count(0), places.count(1)) == (3 * MIB // FRAME, MIB // FRAME)


class TestFlashTierThroughThePageCache(TierContract):
    """A file system that knows neither O_DIRECT nor fallocate."""

    @pytest.fixture
    def tier(self, tmp_path: Path) -> Iterator[FlashTier]:
        script = parse_fault_script("os.pwritev:1:EINVAL,os.fallocate:1+:EOPNOTSUPP")
        directory = open_directory(tmp_path, calls=FaultyCalls(LinuxCalls(), script))
        assert not directory.direct_io
        assert not directory.preallocates
        tier = FlashTier([directory], LAYOUT, "job", MIB)
        yield tier
        tier.close()
        directory.close()


class TestMemoryTier(TierContract):
    @pytest.fixture
    def tier(self) -> MemoryTier:
        return MemoryTier(LAYOUT, 2 * MIB)


class TestNullTier(TierContract):
    keeps_bytes = False

    @pytest.fixture
    def tier(self) -> NullTier:
        return NullTier(LAYOUT, 2 * MIB)


class TestSlowTier(TierContract):
    @pytest.fixture
    def tier(self) -> SlowTier:
        return SlowTier(MemoryTier(LAYOUT, MIB), 0.0005)


class TestFaultyTierWithoutFaults(TierContract):
    @pytest.fixture
    def tier(self) -> FaultyTier:
        return FaultyTier(MemoryTier(LAYOUT, MIB), parse_fault_script("memory.read:100000:EIO"))


@pytest.fixture
def data() -> bytes:
    return random.Random(7).randbytes(4 * FRAME)


def read_back(tier: Tier, extent: Extent) -> bytes:
    into = page_aligned(bytes(extent.nbytes))
    tier.read(extent, 0, [into])
    return bytes(into)


class TestFaultyTier:
    def tier(self, script: str) -> FaultyTier:
        return FaultyTier(MemoryTier(LAYOUT, MIB, "flash"), parse_fault_script(script))

    def test_the_nth_call_fails_and_only_it(self, data: bytes) -> None:
        tier = self.tier("flash.write:2:EIO")
        extent = tier.reserve(len(data))
        tier.write(extent, 0, [page_aligned(data)])
        with pytest.raises(TierIOError, match="EIO") as caught:
            tier.write(extent, 0, [page_aligned(bytes(len(data)))])
        assert caught.value.errno == errno.EIO
        assert read_back(tier, extent) == data
        tier.write(extent, 0, [page_aligned(bytes(len(data)))])

    def test_a_plus_means_from_then_on(self) -> None:
        tier = self.tier("flash.reserve:2+:ENOSPC")
        tier.reserve(1)
        for _ in range(3):
            with pytest.raises(TierFull, match="ENOSPC"):
                tier.reserve(1)
        assert tier.used_bytes == FRAME

    @pytest.mark.parametrize("operation", ["read", "write"])
    def test_a_flipped_bit_is_seen_by_the_digest_only(self, data: bytes, operation: str) -> None:
        tier = self.tier(f"flash.{operation}:1:flip")
        extent = tier.reserve(len(data))
        source = page_aligned(data)
        tier.write(extent, 0, [source])
        assert source == data
        got = read_back(tier, extent)
        assert sum((a ^ b).bit_count() for a, b in zip(got, data, strict=True)) == 1
        assert digest([memoryview(got)]) != digest([source])

    @pytest.mark.parametrize("operation", ["read", "write"])
    def test_short_moves_half_and_says_nothing(self, data: bytes, operation: str) -> None:
        tier = self.tier(f"flash.{operation}:1:short")
        extent = tier.reserve(len(data))
        tier.write(extent, 0, [page_aligned(data)])
        assert read_back(tier, extent) == data[: len(data) // 2] + bytes(len(data) // 2)


def test_digest_does_not_depend_on_the_cut(data: bytes) -> None:
    view = memoryview(data)
    assert digest([view[:10], view[10:10], view[10:]]) == digest([view]) != digest([view[1:]])


class FlashWithFaults:
    """A flash tier over a directory whose system calls follow a script, from after the directory was probed."""

    def __init__(self, path: Path, script: str, *, layout_frames: int = 64) -> None:
        self.script = parse_fault_script(script)
        self.directory = open_directory(path, calls=LinuxCalls())
        self.directory.calls = FaultyCalls(LinuxCalls(), self.script)
        self.tier = FlashTier([self.directory], LAYOUT, "job", layout_frames * FRAME)

    def __enter__(self) -> FlashWithFaults:
        return self

    def __exit__(self, *_: object) -> None:
        self.tier.check_invariants()
        self.tier.close()
        assert self.directory.used_bytes == 0
        self.directory.close()


def test_short_counts_are_continued(tmp_path: Path, data: bytes) -> None:
    with FlashWithFaults(tmp_path, "os.preadv:1:short,os.preadv:2:short,os.pwritev:1:short") as flash:
        extent = flash.tier.reserve(len(data))
        flash.tier.write(extent, 0, [page_aligned(data)])
        assert read_back(flash.tier, extent) == data
        assert (flash.script.calls("os", "pwritev"), flash.script.calls("os", "preadv")) == (2, 3)
        assert flash.directory.errors == {}


def test_a_count_that_ends_inside_a_page_is_continued_from_the_page(tmp_path: Path, data: bytes) -> None:
    class Uneven(LinuxCalls):
        def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            return min(super().pwritev(fd, buffers, offset), 3 * PAGE_BYTES - 100)

    with FlashWithFaults(tmp_path, "") as flash:
        flash.directory.calls = Uneven()
        extent = flash.tier.reserve(len(data))
        flash.tier.write(extent, 0, [page_aligned(data[:FRAME]), page_aligned(data[FRAME:])])
        assert read_back(flash.tier, extent) == data


def test_more_views_than_one_call_takes(tmp_path: Path) -> None:
    data = random.Random(8).randbytes(1030 * PAGE_BYTES + 3)
    with FlashWithFaults(tmp_path, "", layout_frames=512) as flash:
        extent = flash.tier.reserve(len(data))
        source = page_aligned(data)
        flash.tier.write(extent, 0, [source[at : at + PAGE_BYTES] for at in range(0, len(data), PAGE_BYTES)])
        assert flash.script.calls("os", "pwritev") == 2
        assert read_back(flash.tier, extent) == data


def test_a_count_below_a_page_is_an_error(tmp_path: Path) -> None:
    with FlashWithFaults(tmp_path, "os.preadv:1:short") as flash:
        extent = flash.tier.reserve(PAGE_BYTES)
        with pytest.raises(TierIOError, match=r"read .*EIO"):
            read_back(flash.tier, extent)


@pytest.mark.parametrize("operation", ["read", "write"])
def test_a_refused_transfer_names_directory_bytes_and_errno(tmp_path: Path, data: bytes, operation: str) -> None:
    call = {"read": "preadv", "write": "pwritev"}[operation]
    with FlashWithFaults(tmp_path, f"os.{call}:1:EIO") as flash:
        extent = flash.tier.reserve(len(data))
        views = [page_aligned(data)]
        with pytest.raises(TierIOError, match=f"{tmp_path}.*{operation}.*{len(data)} bytes.*EIO") as caught:
            getattr(flash.tier, operation)(extent, 0, views)
        assert caught.value.errno == errno.EIO
        assert flash.directory.errors == {"EIO": 1}
        flash.tier.write(extent, 0, views)
        assert read_back(flash.tier, extent) == data


def test_a_disk_full_at_a_write_is_tier_full(tmp_path: Path, data: bytes) -> None:
    with FlashWithFaults(tmp_path, "os.pwritev:1:ENOSPC") as flash:
        extent = flash.tier.reserve(len(data))
        with pytest.raises(TierFull, match=f"{tmp_path}.*ENOSPC"):
            flash.tier.write(extent, 0, [page_aligned(data)])
        assert flash.directory.errors == {"ENOSPC": 1}


def test_a_partial_allocation_is_cut_away_and_the_claim_given_back(tmp_path: Path) -> None:
    with FlashWithFaults(tmp_path, "os.fallocate:1:ENOSPC") as flash:
        with pytest.raises(TierFull, match=f"{tmp_path}.*ENOSPC"):
            flash.tier.reserve(8 * FRAME)
        [file] = tmp_path.glob("segment-*")
        assert file.stat().st_size == file.stat().st_blocks == 0
        assert flash.directory.used_bytes == flash.tier.used_bytes == 0
        assert flash.tier.reserve(8 * FRAME).frames == 8


def test_a_growth_that_fails_for_another_reason_is_an_io_error(tmp_path: Path) -> None:
    with FlashWithFaults(tmp_path, "os.fallocate:1:EIO") as flash:
        with pytest.raises(TierIOError, match=r"grow .*EIO"):
            flash.tier.reserve(1)
        assert flash.directory.errors == {"EIO": 1}


def test_a_directory_that_fails_is_passed_over(tmp_path: Path) -> None:
    bad = open_directory(tmp_path / "bad")
    bad.calls = FaultyCalls(LinuxCalls(), parse_fault_script("os.fallocate:1+:EIO"))
    good = open_directory(tmp_path / "good")
    tier = FlashTier([bad, good], LAYOUT, "job", MIB)
    assert [tier.reserve(FRAME).place for _ in range(3)] == [1, 1, 1]
    assert bad.used_bytes == 0
    assert bad.errors == {"EIO": 3}
    tier.check_invariants()
    tier.close()
    bad.close()
    good.close()


def test_jobs_share_a_directorys_quota(tmp_path: Path) -> None:
    directory = open_directory(tmp_path, 8 * FRAME)
    first, second = (FlashTier([directory], LAYOUT, key, None) for key in ("a", "b"))
    held = [first.reserve(FRAME) for _ in range(8)]
    with pytest.raises(TierFull, match="quota"):
        second.reserve(1)
    first.free(held[0])
    first.close()
    assert second.reserve(8 * FRAME).frames == 8
    assert directory.used_bytes == directory.capacity_bytes == 8 * FRAME
    second.close()
    directory.close()


def test_a_job_key_is_data_not_a_path(tmp_path: Path) -> None:
    directory = open_directory(tmp_path / "flash")
    tiers = [FlashTier([directory], LAYOUT, key, None) for key in ("../../evil", "..-..-evil", "", "ä" * 300, "\0")]
    names = {path.name for path in (tmp_path / "flash").iterdir()} - {"tiermem.lock"}
    assert len(names) == len(tiers)
    assert os.listdir(tmp_path) == ["flash"]
    for tier in tiers:
        tier.close()
    directory.close()


def test_a_file_is_closed_only_when_its_last_transfer_has_ended(tmp_path: Path, data: bytes) -> None:
    class CloseDuringWrite(LinuxCalls):
        def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            tier.close()
            assert os.listdir(tmp_path) == ["tiermem.lock"]
            assert directory.used_bytes > 0
            return super().pwritev(fd, buffers, offset)

    directory = open_directory(tmp_path)
    tier = FlashTier([directory], LAYOUT, "job", MIB)
    extent = tier.reserve(len(data))
    directory.calls = CloseDuringWrite()
    tier.write(extent, 0, [page_aligned(data)])
    assert directory.used_bytes == 0
    directory.close()


@pytest.fixture
def small_filesystem(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    path = tmp_path / "small"
    path.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tiermem-test", path], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"mounting is not permitted here: {mounted.stderr.strip()}")
    yield path
    subprocess.run(["umount", path], check=True)


def test_a_really_full_disk(small_filesystem: Path, data: bytes) -> None:
    directory = open_directory(small_filesystem, 16 * MIB)
    tier = FlashTier([directory], LAYOUT, "job", None)
    kept = tier.reserve(len(data))
    tier.write(kept, 0, [page_aligned(data)])
    extents: list[Extent] = []
    with pytest.raises(TierFull, match=f"{small_filesystem}.*ENOSPC"):
        extents.extend(iter(lambda: tier.reserve(FRAME), None))
    assert len(extents) * FRAME >= 0.8 * MIB
    assert tier.used_bytes == len(data) + len(extents) * FRAME == directory.used_bytes
    assert directory.errors == {"ENOSPC": 1}
    tier.check_invariants()
    assert read_back(tier, kept) == data
    tier.free(extents.pop())
    tier.write(tier.reserve(FRAME), 0, [page_aligned(bytes(FRAME))])
    tier.close()
    assert os.statvfs(small_filesystem).f_bavail * os.statvfs(small_filesystem).f_frsize >= MIB - 2 * PAGE_BYTES
    directory.close()


def test_the_capacity_without_a_quota_leaves_headroom(small_filesystem: Path) -> None:
    directory = open_directory(small_filesystem, None)
    assert 0.95 * MIB < directory.capacity_bytes <= 0.98 * MIB
    tier = FlashTier([directory], LAYOUT, "job", None)
    for _ in range(tier.capacity_bytes // FRAME):
        tier.reserve(FRAME)
    assert directory.errors == {}
    tier.close()
    directory.close()


def test_the_testing_package_needs_no_pytest() -> None:
    code = "import sys, tiermem.testing; assert 'pytest' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": os.pathsep.join(sys.path)})
