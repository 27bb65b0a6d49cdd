from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tiermem.errors import ConfigError, DirectoryInUse, TierFull, TierIOError
from tiermem.layout import PAGE_BYTES, arena_layout
from tiermem.testing import FaultyCalls, parse_fault_script
from tiermem.tiers.flash import FlashTier
from tiermem.tiers.flash_directory import FlashDirectory, segment_name
from tiermem.tiers.os_calls import LinuxCalls
from tiermem.units import MIB


def open_directory(path: Path, script: str = "", quota_bytes: int | None = MIB) -> FlashDirectory:
    calls = FaultyCalls(LinuxCalls(), parse_fault_script(script))
    return FlashDirectory.open(path, quota_bytes, allow_memory_filesystem=True, calls=calls)


class OnTmpfs(LinuxCalls):
    def filesystem_magic(self, path: str) -> int:
        return 0x01021994


def test_a_missing_directory_is_made_private(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "flash"
    directory = open_directory(path)
    assert path.stat().st_mode & 0o777 == 0o700
    assert (path / "tiermem.lock").stat().st_mode & 0o777 == 0o600
    directory.close()
    directory.close()


def test_the_lock_file_names_the_holder_while_it_is_held(tmp_path: Path) -> None:
    directory = open_directory(tmp_path)
    pid, since = (tmp_path / "tiermem.lock").read_text().split()
    assert int(pid) == os.getpid()
    assert since.endswith("+00:00")
    directory.close()
    assert (tmp_path / "tiermem.lock").read_text() == ""


def test_a_second_open_is_refused_until_the_first_is_closed(tmp_path: Path) -> None:
    directory = open_directory(tmp_path)
    with pytest.raises(DirectoryInUse, match=f"{tmp_path} is in use by process {os.getpid()} since"):
        open_directory(tmp_path)
    directory.close()
    open_directory(tmp_path).close()


_HOLDER = """
import sys
from tiermem.errors import DirectoryInUse
from tiermem.layout import arena_layout
from tiermem.tiers.flash import FlashTier
from tiermem.tiers.flash_directory import FlashDirectory
directory = FlashDirectory.open(sys.argv[1], 1 << 20, allow_memory_filesystem=True)
tier = FlashTier([directory], arena_layout(1 << 20), "job", None)
tier.reserve(1)
print("held", flush=True)
sys.stdin.read()
"""


def test_another_process_holds_it_and_its_leftovers_are_reclaimed(tmp_path: Path) -> None:
    foreign = [tmp_path / "segment-mine.bin", tmp_path / "notes.tiermem", tmp_path / "segment-x-0123.tiermem"]
    for path in foreign:
        path.write_text("keep")
    link = tmp_path / segment_name("a link")
    link.symlink_to(foreign[0])
    holder = subprocess.Popen(
        [sys.executable, "-c", _HOLDER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(DirectoryInUse, match=f"in use by process {holder.pid} since"):
            open_directory(tmp_path)
        segment = tmp_path / segment_name("job")
        left_bytes = segment.stat().st_blocks * 512
        assert left_bytes > 0
        holder.kill()
    assert segment.exists()
    directory = open_directory(tmp_path)
    assert (directory.reclaimed_files, directory.reclaimed_bytes) == (1, left_bytes)
    assert not segment.exists()
    assert [path.read_text() for path in foreign] == ["keep"] * 3
    assert link.is_symlink()
    directory.close()


def test_reclaiming_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / segment_name("one")).write_bytes(bytes(8192))
    (tmp_path / "probe-12.tiermem").touch()
    directory = open_directory(tmp_path)
    assert directory.reclaimed_files == 2
    assert "reclaimed 2 files, 8192 bytes" in caplog.text
    directory.close()


def test_memory_file_systems_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"on tmpfs, which is DRAM; name a directory on a disk"):
        FlashDirectory.open(tmp_path, MIB, calls=OnTmpfs())
    FlashDirectory.open(tmp_path, MIB, allow_memory_filesystem=True, calls=OnTmpfs()).close()


def test_the_magic_number_of_a_memory_file_system_is_read() -> None:
    if not Path("/dev/shm").is_dir():
        pytest.skip("there is no /dev/shm")
    assert LinuxCalls().filesystem_magic("/dev/shm") == 0x01021994
    with pytest.raises(OSError, match="No such file"):
        LinuxCalls().filesystem_magic("/nonexistent")


@pytest.mark.parametrize("script", ["os.open:1:EINVAL", "os.pwritev:1:EINVAL", "os.pwritev:1:EOPNOTSUPP"])
def test_refused_direct_io_is_reported_and_does_without(
    tmp_path: Path, script: str, caplog: pytest.LogCaptureFixture
) -> None:
    directory = open_directory(tmp_path, script)
    assert not directory.direct_io
    assert "O_DIRECT refused" in caplog.text
    assert directory.preallocates
    directory.close()
    assert os.listdir(tmp_path) == ["tiermem.lock"]


def test_refused_fallocate_is_reported_and_does_without(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = open_directory(tmp_path, "os.fallocate:1:EOPNOTSUPP")
    assert not directory.preallocates
    assert "fallocate refused (EOPNOTSUPP)" in caplog.text
    directory.close()


def test_what_works_is_used(tmp_path: Path) -> None:
    directory = FlashDirectory.open(tmp_path, MIB, allow_memory_filesystem=True)
    assert directory.preallocates
    assert directory.capacity_bytes == MIB
    directory.close()


@pytest.mark.parametrize(
    ("script", "error"),
    [("os.pwritev:1:EIO", ConfigError), ("os.open:1:EACCES", ConfigError), ("os.pwritev:1:ENOSPC", TierFull)],
)
def test_an_unusable_directory_is_refused_and_unlocked(tmp_path: Path, script: str, error: type[Exception]) -> None:
    with pytest.raises(error, match=f"{tmp_path}.*{script.rpartition(':')[2]}"):
        open_directory(tmp_path, script)
    open_directory(tmp_path).close()


def test_a_file_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="EEXIST"):
        open_directory(tmp_path / "file")
    with pytest.raises(ConfigError, match="ENOTDIR"):
        open_directory(tmp_path / "file" / "below")


def test_too_small_a_quota_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="quota of 100 bytes"):
        open_directory(tmp_path, quota_bytes=100)


def test_claims_never_exceed_the_capacity(tmp_path: Path) -> None:
    directory = open_directory(tmp_path, quota_bytes=10 * PAGE_BYTES)
    assert directory.claim(7 * PAGE_BYTES, PAGE_BYTES, PAGE_BYTES) == 7 * PAGE_BYTES
    assert directory.claim(8 * PAGE_BYTES, PAGE_BYTES, 2 * PAGE_BYTES) == 2 * PAGE_BYTES
    with pytest.raises(TierFull, match=f"{tmp_path} has no room for 8 KiB: 36 KiB of 40 KiB"):
        directory.claim(4 * PAGE_BYTES, 2 * PAGE_BYTES, PAGE_BYTES)
    assert directory.used_bytes == 9 * PAGE_BYTES
    directory.unclaim(9 * PAGE_BYTES)
    directory.close()


def test_errors_and_checksum_failures_are_counted(tmp_path: Path) -> None:
    directory = open_directory(tmp_path)
    assert isinstance(directory.failure("write", OSError(errno.EIO, "x"), 5, 6), TierIOError)
    assert isinstance(directory.failure("write", OSError(errno.EDQUOT, "x"), 5, 6), TierFull)
    directory.failure("write", OSError(errno.EIO, "x"), 5, 6)
    directory.count_checksum_failure()
    assert directory.errors == {"EIO": 2, "EDQUOT": 1}
    assert directory.checksum_failures == 1
    directory.close()


def test_close_unlinks_segments_that_are_left(tmp_path: Path) -> None:
    directory = open_directory(tmp_path)
    tier = FlashTier([directory], arena_layout(MIB), "job", None)
    tier.reserve(1)
    directory.close()
    assert os.listdir(tmp_path) == ["tiermem.lock"]
    tier.close()


def test_a_segment_name_that_is_taken_is_an_error(tmp_path: Path) -> None:
    directory = open_directory(tmp_path)
    tier = FlashTier([directory], arena_layout(MIB), "job", None)
    with pytest.raises(TierIOError, match=r"create a segment file.*EEXIST"):
        FlashTier([directory], arena_layout(MIB), "job", None)
    tier.close()
    directory.close()
