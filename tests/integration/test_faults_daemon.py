"""A daemon may die, stop or be there twice: the trainer gets a typed error in time, and what was left is reclaimed."""

from __future__ import annotations

import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import tiermem
from tests.integration.daemon_process import (
    Daemon,
    StartRefused,
    serve,
    start_daemon,
    torch_exit_s,
    trainer,
    within,
)
from tests.integration.scripts import BlockModel
from tests.integration.tiny_training import DRAM, fingerprint, make, plain_fingerprint, train
from tiermem.errors import DaemonTimeout, DaemonUnavailable, TiermemError

DEATH_LIMIT_S = 5.0  # what the client promises


@contextmanager
def attached(
    daemon: Daemon, timeout_s: float = 20.0
) -> Iterator[tuple[tiermem.Job, BlockModel, torch.optim.Optimizer, Iterator[torch.Tensor]]]:
    """A job after one step; closed with the context, as the daemon may be gone."""
    model, optimizer, data = make()
    job = tiermem.attach(model, optimizer, dram=DRAM, endpoint=daemon.endpoint, job="job", timeout_s=timeout_s)
    try:
        train(model, optimizer, data)
        yield job, model, optimizer, data
    finally:
        job.close()


@contextmanager
def later(delay_s: float, daemon: Daemon, number: int) -> Iterator[list[float]]:
    """Send a signal after a while; the list then holds when."""
    sent: list[float] = []

    def send() -> None:
        sent.append(time.monotonic())
        daemon.signal(number)

    timer = threading.Timer(delay_s, send)
    timer.start()
    try:
        yield sent
    finally:
        timer.join()


def test_kill_9_between_two_steps_is_a_typed_error(tmp_path: Path) -> None:
    with serve(tmp_path) as daemon, attached(daemon) as (job, model, optimizer, data):
        killed_s = time.monotonic()
        daemon.kill()
        with pytest.raises(DaemonUnavailable) as caught:
            train(model, optimizer, data, 100)
        took_s = time.monotonic() - killed_s
        assert not isinstance(caught.value, DaemonTimeout)
        assert took_s <= DEATH_LIMIT_S, f"the error came after {took_s:.2f} s"
        with pytest.raises(DaemonUnavailable):
            job.stats()
        with pytest.raises(DaemonUnavailable):
            train(model, optimizer, data)


def test_kill_9_while_the_trainer_waits_is_a_typed_error(tmp_path: Path) -> None:
    """The daemon is stopped first, so that a demand is certainly open when it dies."""
    with serve(tmp_path) as daemon, attached(daemon) as (_, model, optimizer, data):
        daemon.signal(signal.SIGSTOP)
        with later(0.5, daemon, signal.SIGKILL) as killed, pytest.raises(DaemonUnavailable):
            train(model, optimizer, data, 100)
        took_s = time.monotonic() - killed[0]
        assert took_s <= DEATH_LIMIT_S, f"the error came after {took_s:.2f} s"
        daemon.process.wait()


def test_a_stopped_daemon_is_a_timeout_with_a_hint(tmp_path: Path) -> None:
    with serve(tmp_path) as daemon, attached(daemon, timeout_s=1.5) as (job, model, optimizer, data):
        daemon.signal(signal.SIGSTOP)
        stopped_s = time.monotonic()
        with pytest.raises(DaemonTimeout, match=f"kill -CONT {daemon.pid}"):
            train(model, optimizer, data, 100)
        took_s = time.monotonic() - stopped_s
        assert 0.4 <= took_s <= DEATH_LIMIT_S, f"the error came after {took_s:.2f} s of silence, 1.5 s were allowed"
        with pytest.raises(DaemonTimeout):
            job.stats()


def test_a_daemon_that_is_continued_in_time_was_only_slow(tmp_path: Path) -> None:
    with serve(tmp_path) as daemon:
        model, optimizer, data = make()
        job = tiermem.attach(model, optimizer, dram=DRAM, endpoint=daemon.endpoint, timeout_s=10)
        try:
            train(model, optimizer, data)
            daemon.signal(signal.SIGSTOP)
            with later(2.0, daemon, signal.SIGCONT) as continued:
                train(model, optimizer, data)
                assert continued, "the step did not need the daemon: the case shows nothing"
            train(model, optimizer, data)
            job.detach()
        finally:
            job.close()
        assert fingerprint(model, optimizer) == plain_fingerprint(3)


def test_attaching_to_a_stopped_daemon_is_a_timeout(tmp_path: Path) -> None:
    with serve(tmp_path) as daemon:
        daemon.signal(signal.SIGSTOP)
        model, optimizer, data = make()
        asked_s = time.monotonic()
        with pytest.raises(DaemonTimeout, match="stopped"):
            tiermem.attach(model, optimizer, dram=DRAM, endpoint=daemon.endpoint, timeout_s=1)
        took_s = time.monotonic() - asked_s
        assert took_s <= DEATH_LIMIT_S, f"the error came after {took_s:.2f} s"
        train(model, optimizer, data, 2)
        assert fingerprint(model, optimizer) == plain_fingerprint(2)


def test_attaching_where_no_daemon_is_says_so(tmp_path: Path) -> None:
    model, optimizer, _ = make()
    with pytest.raises(DaemonUnavailable, match=r"nowhere\.sock"):
        tiermem.attach(model, optimizer, dram=DRAM, endpoint=tmp_path / "nowhere.sock", timeout_s=1)


def test_a_second_daemon_on_a_directory_is_refused(tmp_path: Path) -> None:
    with serve(tmp_path) as daemon, attached(daemon) as (_, model, optimizer, data):
        with pytest.raises(StartRefused) as caught:
            start_daemon(tmp_path, name="second")
        assert caught.value.line.startswith("DIRECTORY_IN_USE: ")
        assert str(daemon.flash[0]) in caught.value.line
        assert f"process {daemon.pid}" in caught.value.line
        assert caught.value.code == 6
        train(model, optimizer, data)  # the first one has not noticed


def test_a_second_daemon_on_a_socket_is_refused(tmp_path: Path) -> None:
    with serve(tmp_path) as daemon:
        with pytest.raises(StartRefused) as caught:
            start_daemon(tmp_path, flash=[tmp_path / "other"])
        assert caught.value.line.startswith("DIRECTORY_IN_USE: ")
        assert f"pid {daemon.pid}" in caught.value.line
        assert caught.value.code == 6
        assert daemon.health() == "SERVING"


def test_what_a_killed_daemon_left_is_reclaimed_at_the_next_start(tmp_path: Path) -> None:
    with serve(tmp_path) as daemon, attached(daemon):
        daemon.kill()
        (segment,) = daemon.segments()
        assert segment.stat().st_blocks > 0
        assert daemon.socket.exists()
    foreign = daemon.flash[0] / "segment-notes.txt"
    foreign.write_text("mine")
    with serve(tmp_path) as second:
        assert not segment.exists()
        assert foreign.read_text() == "mine"
        assert "reclaimed 1 files" in second.log
        assert second.left_of_jobs() == ""
        with attached(second) as (_, model, optimizer, data):
            train(model, optimizer, data)


def test_a_service_trainer_whose_daemon_was_killed_ends_within_two_seconds(tmp_path: Path) -> None:
    script = f"""
    model, optimizer, data = make()
    job = tiermem.attach(model, optimizer, dram=DRAM, endpoint={str(tmp_path / "run" / "tiermemd.sock")!r})
    train(model, optimizer, data)
    say("ready")
    input()
    train(model, optimizer, data)
    """
    torch_s = torch_exit_s(tmp_path)
    with serve(tmp_path) as daemon, trainer(script, tmp_path) as victim:
        victim.expect("ready")
        daemon.kill()
        killed_s = time.monotonic()
        victim.tell()
        assert victim.wait(20) == 1
        took_s = time.monotonic() - killed_s
        assert "DaemonUnavailable" in victim.errors
        assert took_s - torch_s <= 2.0, f"the trainer took {took_s:.2f} s to end, torch alone {torch_s:.2f} s"


def test_detach_after_the_daemons_death_is_a_typed_error(tmp_path: Path) -> None:
    with serve(tmp_path) as daemon, attached(daemon) as (job, _, _, _):
        daemon.kill()
        with pytest.raises(TiermemError):
            job.detach()


def test_a_daemon_ends_with_its_owner(tmp_path: Path) -> None:
    """An embedded daemon is a daemon with an owner, and ends within 2 s of the owner's death."""
    private = tmp_path / "private"
    private.mkdir()
    with subprocess.Popen(["sleep", "60"]) as owner:
        options = ["--owner-pid", str(owner.pid), "--remove-at-exit", str(private)]
        with serve(tmp_path, flash=[private / "flash"], options=options) as daemon:
            owner.kill()
            killed_s = time.monotonic()
            within(2.0, lambda: "the daemon runs" if daemon.process.poll() is None else "", since_s=killed_s)
            assert daemon.process.returncode == 0, daemon.log
            assert not private.exists()
