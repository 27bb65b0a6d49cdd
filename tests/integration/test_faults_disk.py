"""Disks that are full, fail or lie: a typed error that names directory and bytes, and not a bit lost. What a fault has
interrupted goes on when the fault has gone.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import tiermem
from tests.integration.daemon_process import Daemon, StartRefused, serve, start_daemon, within
from tests.integration.tiny_training import (
    DRAM,
    fingerprint,
    make,
    plain_fingerprint,
    train,
    train_stubbornly,
)
from tiermem.errors import DataLoss, TierFull, TierIOError, TiermemError


def once_each(operation: str, first: int, count: int, action: str) -> str:
    """A fault of bounded length: calls `first` to `first + count - 1`."""
    return ",".join(f"{operation}:{n}:{action}" for n in range(first, first + count))


def only(errors: list[TiermemError], kind: type[TiermemError], *texts: str) -> None:
    """All of one type, each with all the texts."""
    assert errors, "no error was seen: the case shows nothing"
    for error in errors:
        assert type(error) is kind, repr(error)
        for text in texts:
            assert text in str(error), str(error)


ON_DEMAND = {"TIERMEM_PLACEMENT__LOOKAHEAD": "0"}
"""Every transfer is somebody's who waits, so its error is seen."""

# -- faults that go away: the same job goes on


@pytest.mark.parametrize(
    ("operation", "action", "first"),
    [
        ("os.pwritev", "EIO", 30),
        ("os.pwritev", "EIO", 45),
        ("os.pwritev", "EIO", 100),
        ("os.preadv", "EIO", 30),
        ("os.preadv", "EIO", 80),
        ("os.pwritev", "ENOSPC", 60),
        ("flash.reserve", "ENOSPC", 30),
        ("flash.reserve", "ENOSPC", 60),
    ],
)
def test_a_fault_that_passes_costs_nothing(tmp_path: Path, operation: str, action: str, first: int) -> None:
    """In forward, backward or update, wherever the n-th call happens to be."""
    kind = TierFull if action == "ENOSPC" else TierIOError
    script = once_each(operation, first, 6, action)
    with serve(tmp_path, options=["--fault-script", script], environ=ON_DEMAND) as daemon:
        model, optimizer, data = make()
        job = tiermem.attach(model, optimizer, dram=DRAM, endpoint=daemon.endpoint)
        try:
            errors = train_stubbornly(model, optimizer, data, 4)
            train(model, optimizer, data)
            job.detach()
        finally:
            job.close()
        place = str(daemon.flash[0]) if operation.startswith("os.") else "flash"
        only(errors, kind, place, "bytes", action)
        assert fingerprint(model, optimizer) == plain_fingerprint(5), [str(e) for e in errors]
        stats = daemon.stats()
        if operation.startswith("os."):
            assert stats.directories[0].errors == {action: 6}
        assert stats.errors[kind.code] >= len(errors)
        within(2, daemon.left_of_jobs)


@pytest.mark.parametrize("operation", ["os.pwritev", "os.preadv"])
def test_a_fault_ahead_of_need_costs_nothing(tmp_path: Path, operation: str) -> None:
    """What was moved ahead of its use is moved again when it is needed; who waits for it by then sees the error."""
    with serve(tmp_path, options=["--fault-script", once_each(operation, 60, 6, "EIO")]) as daemon:
        model, optimizer, data = make()
        job = tiermem.attach(model, optimizer, dram=DRAM, endpoint=daemon.endpoint)
        try:
            errors = train_stubbornly(model, optimizer, data, 4)
            job.detach()
        finally:
            job.close()
        assert all(type(error) is TierIOError for error in errors), errors
        assert daemon.stats().directories[0].errors == {"EIO": 6}
        assert daemon.log_path.read_text().count("EIO") >= len(errors), "a fault that nobody waited for is logged"
        assert "nothing runs ahead until the next demand" in daemon.log_path.read_text()
        assert fingerprint(model, optimizer) == plain_fingerprint(4), [str(e) for e in errors]
        within(2, daemon.left_of_jobs)


def test_a_fault_that_stays_ends_the_training_and_nothing_else(tmp_path: Path) -> None:
    with serve(tmp_path, options=["--fault-script", "os.pwritev:40+:EIO"]) as daemon:
        model, optimizer, data = make()
        job = tiermem.attach(model, optimizer, dram=DRAM, endpoint=daemon.endpoint)
        try:
            with pytest.raises(TierIOError, match=r"could not write \S+ \(\d+ bytes at byte \d+\): EIO") as caught:
                train(model, optimizer, data, 10)
            assert str(daemon.flash[0]) in str(caught.value)
        finally:
            job.close()
        assert daemon.health() == "SERVING"
        within(2, daemon.left_of_jobs)


# -- a disk that is full


def test_a_quota_that_is_too_small_is_named(tmp_path: Path) -> None:
    """The job's quota is reached while optimizer state is made; parameters and gradients fitted."""
    with serve(tmp_path, flash=[f"{tmp_path / 'flash'}:1MiB"]) as daemon:
        model, optimizer, data = make()
        job = tiermem.attach(model, optimizer, dram=DRAM, endpoint=daemon.endpoint)
        try:
            with pytest.raises(TierFull, match=r"flash quota of 1 MiB") as caught:
                train(model, optimizer, data, 2)
            assert str(daemon.flash[0]) in str(caught.value)
            job.detach()
        finally:
            job.close()
        assert fingerprint(model, optimizer)  # every byte can be read
        within(2, daemon.left_of_jobs)


def test_a_failed_update_changes_no_parameter_whose_state_found_no_room(tmp_path: Path) -> None:
    """An update is a transaction: parameters, and the state that goes with them."""
    with serve(tmp_path, flash=[f"{tmp_path / 'flash'}:1MiB"]) as daemon:
        model, optimizer, data = make()
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        job = tiermem.attach(model, optimizer, dram=DRAM, endpoint=daemon.endpoint)
        try:
            with pytest.raises(TierFull):
                train(model, optimizer, data)
            job.detach()
        finally:
            job.close()
        for name, parameter in model.named_parameters():
            changed = not before[name].equal(parameter.detach())
            assert changed == bool(optimizer.state.get(parameter)), f"{name}: changed {changed}"


def test_an_attach_that_does_not_fit_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    with serve(tmp_path, flash=[f"{tmp_path / 'flash'}:256KiB"]) as daemon:
        model, optimizer, data = make()
        with pytest.raises(TierFull, match=r"256 KiB") as caught:
            tiermem.attach(model, optimizer, dram=DRAM, endpoint=daemon.endpoint)
        assert str(daemon.flash[0]) in str(caught.value)
        within(2, daemon.left_of_jobs)
        train(model, optimizer, data, 2)
        assert fingerprint(model, optimizer) == plain_fingerprint(2)


@contextmanager
def small_filesystem(directory: Path, nbytes: int) -> Iterator[Path]:
    """A real ext4 of its own."""
    image, mount_point = directory / "disk.img", directory / "disk"
    mount_point.mkdir()
    with open(image, "wb") as file:
        file.truncate(nbytes)
    try:
        subprocess.run(
            ["mkfs.ext4", "-q", "-O", "^has_journal", "-m", "0", str(image)], check=True, capture_output=True
        )
        subprocess.run(["mount", "-o", "loop", str(image), str(mount_point)], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        reason = error.stderr.decode().strip() if isinstance(error, subprocess.CalledProcessError) else str(error)
        pytest.skip(f"no loop-mounted ext4 here: {reason}")
    try:
        yield mount_point
    finally:
        subprocess.run(["umount", str(mount_point)], check=True)


def test_a_disk_that_really_is_full(tmp_path: Path) -> None:
    with small_filesystem(tmp_path, 16 << 20) as disk, serve(tmp_path, flash=[f"{disk / 'flash'}:8MiB"]) as daemon:
        model, optimizer, data = make()
        filler = disk / "filler"
        with open(filler, "wb") as file:  # leaves room for parameters, not for all the rest
            found = os.statvfs(disk)
            os.posix_fallocate(file.fileno(), 0, found.f_bavail * found.f_frsize - (768 << 10))
        job = tiermem.attach(model, optimizer, dram=DRAM, endpoint=daemon.endpoint)
        try:
            with pytest.raises(TierFull, match="ENOSPC") as caught:
                train_stubbornly(model, optimizer, data, 3, attempts=3)
            assert str(daemon.flash[0]) in str(caught.value)
            assert daemon.stats().directories[0].errors["ENOSPC"] > 0
            filler.unlink()
            train(model, optimizer, data)  # the job is as usable as before
            job.detach()
        finally:
            job.close()
        within(2, daemon.left_of_jobs)


def test_a_training_goes_on_bit_for_bit_when_a_full_disk_has_room_again(tmp_path: Path) -> None:
    with small_filesystem(tmp_path, 16 << 20) as disk, serve(tmp_path, flash=[f"{disk / 'flash'}:8MiB"]) as daemon:
        model, optimizer, data = make()
        filler = disk / "filler"
        with open(filler, "wb") as file:
            found = os.statvfs(disk)
            os.posix_fallocate(file.fileno(), 0, found.f_bavail * found.f_frsize - (768 << 10))
        job = tiermem.attach(model, optimizer, dram=DRAM, endpoint=daemon.endpoint)
        errors: list[TiermemError] = []
        try:
            # The disk is emptied by the first error, as an operator would.
            errors = train_stubbornly(model, optimizer, data, 3, on_error=lambda: filler.unlink(missing_ok=True))
            job.detach()
        finally:
            job.close()
        only(errors, TierFull, str(daemon.flash[0]), "ENOSPC")
        assert fingerprint(model, optimizer) == plain_fingerprint(3)


def test_a_directory_in_memory_is_refused() -> None:
    """tmpfs is DRAM; the remedy is named."""
    shm = Path("/dev/shm") / f"tiermem-test-{os.getpid()}"
    shm.mkdir()
    try:
        with pytest.raises(StartRefused, match="tmpfs, which is DRAM") as caught:
            start_daemon(shm, flash=[shm / "flash"])
        assert caught.value.code == 2
    finally:
        subprocess.run(["rm", "-r", str(shm)], check=True)


# -- bytes that are not what was written


def test_a_flipped_bit_is_data_loss_never_zeros(tmp_path: Path) -> None:
    with serve(tmp_path, options=["--fault-script", "os.preadv:30:flip"], environ=ON_DEMAND) as daemon:
        model, optimizer, data = make()
        job = tiermem.attach(model, optimizer, dram=DRAM, endpoint=daemon.endpoint)
        try:
            errors = train_stubbornly(model, optimizer, data, 3)  # it was the read: the bytes on the disk are right
            job.detach()
        finally:
            job.close()
        only(errors, DataLoss, str(daemon.flash[0]), "bytes")
        assert len(errors) == 1
        assert fingerprint(model, optimizer) == plain_fingerprint(3)
        assert daemon.stats().directories[0].checksum_failures == 1


def test_bytes_changed_on_the_disk_are_data_loss(tmp_path: Path) -> None:
    with serve(tmp_path) as daemon:
        model, optimizer, data = make()
        job = tiermem.attach(model, optimizer, dram=DRAM, endpoint=daemon.endpoint)
        try:
            train(model, optimizer, data, 2)
            _flip_all(daemon)
            for _ in range(2):  # and it stays so
                with pytest.raises(DataLoss) as caught:
                    train(model, optimizer, data)
                assert str(daemon.flash[0]) in str(caught.value)
        finally:
            job.close()
        assert daemon.stats().directories[0].checksum_failures >= 2
        assert daemon.health() == "SERVING"
        within(2, daemon.left_of_jobs)


def test_bytes_zeroed_on_the_disk_are_data_loss(tmp_path: Path) -> None:
    with serve(tmp_path) as daemon:
        model, optimizer, data = make()
        job = tiermem.attach(model, optimizer, dram=DRAM, endpoint=daemon.endpoint)
        try:
            train(model, optimizer, data, 2)
            (segment,) = daemon.segments()
            with open(segment, "r+b") as file:
                file.write(bytes(8 << 20))
                os.fsync(file.fileno())
            with pytest.raises(DataLoss):
                train(model, optimizer, data)
        finally:
            job.close()


def _flip_all(daemon: Daemon) -> None:
    """One bit of each page of the segment."""
    (segment,) = daemon.segments()
    with open(segment, "r+b") as file:
        for page in range(0, 8 << 20, 4096):
            file.seek(page)
            byte = file.read(1)
            file.seek(page)
            file.write(bytes([byte[0] ^ 1]))
        file.flush()
        os.fsync(file.fileno())
