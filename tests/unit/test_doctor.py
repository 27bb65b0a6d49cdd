"""What the doctor measures on this machine, and what it makes of measurements."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from tiermem.config import FlashDirectory, Host, Size, load_config
from tiermem.units import GIB, MIB
from tiermem_daemon import doctor
from tiermem_daemon.doctor import Finding, Level

REFUSED = OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))


def test_every_line_but_a_good_one_says_what_to_do(tmp_path: Path) -> None:
    host = Host(tmp_path, tmp_path, uid=1, memory_total_bytes=16 * MIB, system_file=tmp_path / "none.toml")
    loaded = load_config({"flash": (str(tmp_path), str(tmp_path / "gone"))}, {}, None, host)
    findings = list(doctor.diagnose(loaded))
    assert {f.check for f in findings} == {
        "shared memory",
        "page moves",
        "mappings",
        "memory",
        "gpu",
        "locked memory",
        f"flash {tmp_path}",
        f"flash {tmp_path}/gone",
    }
    assert [f for f in findings if bool(f.remedy) == (f.level is Level.OK)] == []
    assert os.listdir(tmp_path) == []  # the test file is gone


def test_no_directory_is_a_warning(tmp_path: Path) -> None:
    host = Host(tmp_path, tmp_path, uid=1, memory_total_bytes=16 * MIB, system_file=tmp_path / "none.toml")
    *_, last = doctor.diagnose(load_config({}, {}, None, host))
    assert (last.check, last.level) == ("flash", Level.WARN)
    assert "--flash" in last.remedy


def levels(findings: list[Finding]) -> list[Level]:
    return [finding.level for finding in findings]


def test_judgements() -> None:
    assert levels([doctor.judge_sealing(None), doctor.judge_sealing(REFUSED)]) == [Level.OK, Level.FAIL]
    assert levels([doctor.judge_page_moves(None), doctor.judge_page_moves(REFUSED)]) == [Level.OK, Level.WARN]
    assert levels([doctor.judge_map_count(n) for n in (65530, 65529, 16384, 16383)]) == [
        Level.OK,
        Level.WARN,
        Level.WARN,
        Level.FAIL,
    ]
    assert levels([doctor.judge_memory(n, 100) for n in (90, 91, 101)]) == [Level.OK, Level.WARN, Level.FAIL]
    assert doctor.judge_gpu("NVRM version: 1").text == "NVRM version: 1"
    assert levels(
        [
            doctor.judge_memlock(None, GIB, True),
            doctor.judge_memlock(GIB, GIB, True),
            doctor.judge_memlock(MIB, GIB, True),
            doctor.judge_memlock(MIB, GIB, False),
        ]
    ) == [Level.OK, Level.OK, Level.WARN, Level.OK]
    assert levels([doctor.judge_filesystem("d", kind) for kind in ("ext4", "tmpfs", "nfs4")]) == [
        Level.OK,
        Level.WARN,
        Level.WARN,
    ]
    assert levels([doctor.judge_direct_io("d", None), doctor.judge_direct_io("d", REFUSED)]) == [Level.OK, Level.WARN]
    assert levels([doctor.judge_preallocation("d", e) for e in (None, REFUSED)]) == [Level.OK, Level.WARN]


@pytest.mark.parametrize(
    ("size", "free_bytes", "level"),
    [("2GiB", 2 * GIB, Level.OK), ("2GiB", GIB, Level.FAIL), ("50%", GIB, Level.WARN), (None, 2 * GIB, Level.OK)],
)
def test_room(size: str | None, free_bytes: int, level: Level) -> None:
    directory = FlashDirectory(path=Path("/d"), size=None if size is None else Size.parse(size))
    assert doctor.judge_room("d", directory, free_bytes).level is level


def test_a_directory_that_cannot_be_used_fails_with_one_line(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    [finding] = doctor.examine_directory(FlashDirectory(path=file))
    assert finding.level is Level.FAIL
    assert "mkdir" in finding.remedy
    if os.getuid() != 0:  # root may write everywhere
        closed = tmp_path / "closed"
        closed.mkdir(0o500)
        [finding] = doctor.examine_directory(FlashDirectory(path=closed))
        assert (finding.level, "writable" in finding.text) == (Level.FAIL, True)


def test_a_left_over_test_file_is_an_error_of_the_directory(tmp_path: Path) -> None:
    (tmp_path / f".tiermem-doctor-{os.getpid()}").touch()
    *_, last = doctor.examine_directory(FlashDirectory(path=tmp_path))
    assert (last.level, "File exists" in last.text) == (Level.FAIL, True)


def test_filesystems_are_told_apart() -> None:
    assert doctor.filesystem_of(Path("/proc/self")) == "proc"
    assert doctor.filesystem_of(Path("/dev/shm/none")) == "tmpfs"


def test_this_kernel_can_do_what_linux_5_13_can() -> None:
    if tuple(map(int, os.uname().release.split(".")[:2])) < (5, 13):
        pytest.skip("mremap(DONTUNMAP) of shared memory came with Linux 5.13")
    assert doctor.probe_page_moves() is None
    assert doctor.probe_sealing() is None
