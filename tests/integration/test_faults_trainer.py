"""A trainer may end in any way at any moment: the daemon frees what it had, other jobs do not notice, and no process,
file or directory stays.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

import pytest

import tiermem
import tiermem.errors
from tests.integration.daemon_process import Daemon, alive, serve, torch_exit_s, trainer, within
from tests.integration.tiny_training import DRAM, fingerprint, make, plain_fingerprint, train

LIMIT_S = 2.0  # what the service promises

# The trainer says "inside" in the middle of its second step; with `hang` it then stays there, holding leases.
_PLACES = {
    "forward": "model.blocks[2].register_forward_pre_hook(lambda *_: inside())",
    "backward": "model.blocks[2].register_full_backward_hook(lambda *_: inside())",
    "update": "optimizer.register_step_pre_hook(lambda *_: inside(hang=False))",
}
_SCRIPT = """
model, optimizer, data = make()
job = tiermem.attach(model, optimizer, dram=DRAM, endpoint={endpoint!r}, job="victim")
train(model, optimizer, data)

def inside(hang=True):
    child = os.fork() if {fork} else 0
    if {fork} and child == 0:
        time.sleep(60)
        os._exit(0)
    say("inside", child)
    if hang:
        time.sleep(60)

{hook}
train(model, optimizer, data, 1000)
"""


def left(daemon: Daemon, files: list[str], bystanders: list[str]) -> str:
    """What the dead job still has, as a complaint."""
    stats = daemon.stats()
    others = sum(job.tiers["dram"].used_bytes for job in stats.jobs)
    now = daemon.settled_files()
    if [job.job for job in stats.jobs] != bystanders:
        return f"jobs {[job.job for job in stats.jobs]}"
    if stats.tiers["dram"].used_bytes != others:
        return f"{stats.tiers} for {bystanders}"
    if len(daemon.segments()) != len(bystanders):
        return f"{daemon.segments()} for {bystanders}"
    if len(now) != len(files):
        return f"{len(now)} descriptors, {len(files)} before: {now}"
    return ""


@pytest.mark.parametrize(
    ("place", "fork"), [("forward", False), ("backward", False), ("update", False), ("forward", True)]
)
def test_kill_9_in_the_middle_of_a_step_frees_everything(tmp_path: Path, place: str, fork: bool) -> None:
    with serve(tmp_path) as daemon:
        files = daemon.settled_files()
        script = _SCRIPT.format(endpoint=daemon.endpoint, fork=fork, hook=_PLACES[place])
        with trainer(script, tmp_path) as victim:
            (child,) = map(int, victim.expect("inside"))
            try:
                (job,) = daemon.stats().jobs
                assert job.tiers["dram"].used_bytes > 0
                assert daemon.segments(), "nothing is in flash: the case shows nothing"
                assert place == "update" or job.leases > 0, "no lease is held: this is not the middle of a step"
                killed_s = time.monotonic()
                victim.process.kill()
                took_s = within(LIMIT_S, lambda: left(daemon, files, []), since_s=killed_s)
                within(LIMIT_S, daemon.left_of_jobs, since_s=killed_s)
                if fork:
                    assert alive(child), "the child is to outlive its parent"
                    shared = [n for n in os.listdir(f"/proc/{child}/fd") if _blocks(f"/proc/{child}/fd/{n}")]
                    status = Path(f"/proc/{child}/status").read_text()
                    assert not shared, f"the child still holds shared memory after {took_s:.2f} s"
                    assert "RssShmem:\t       0 kB" in status, status
            finally:
                if child:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(child, signal.SIGKILL)
        stats = daemon.stats()
        assert stats.sessions_ended.get("died", 0) + stats.sessions_ended.get("disconnected", 0) == 1
        assert daemon.health() == "SERVING"


def _blocks(path: str) -> bool:
    """Whether a descriptor is shared memory of ours that takes pages."""
    try:
        return "tiermem" in os.readlink(path) and "memfd" in os.readlink(path) and os.stat(path).st_blocks > 0
    except FileNotFoundError:
        return False


def test_another_job_goes_on_bit_for_bit_while_one_is_killed(tmp_path: Path) -> None:
    with serve(tmp_path) as daemon:
        model, optimizer, data = make()
        with tiermem.attach(model, optimizer, dram=DRAM, endpoint=daemon.endpoint, job="bystander"):
            train(model, optimizer, data, 2)
            files = daemon.settled_files()
            script = _SCRIPT.format(endpoint=daemon.endpoint, fork=False, hook=_PLACES["forward"])
            with trainer(script, tmp_path) as victim:
                victim.expect("inside")
                train(model, optimizer, data)
                victim.process.kill()
                killed_s = time.monotonic()
                train(model, optimizer, data)
                within(LIMIT_S + 1, lambda: left(daemon, files, ["bystander"]), since_s=killed_s)
                train(model, optimizer, data)
        assert fingerprint(model, optimizer) == plain_fingerprint(5)
        within(LIMIT_S, daemon.left_of_jobs)


def test_kill_9_while_a_job_is_being_opened_leaves_no_job(tmp_path: Path) -> None:
    """A big arena takes a while to be made; the trainer does not live to see it."""
    script = """
    model, optimizer, data = make()
    say("attaching")
    tiermem.attach(model, optimizer, dram="256MiB", endpoint={endpoint!r})
    say("attached")
    """
    with serve(tmp_path, dram="256MiB") as daemon:
        files = daemon.settled_files()
        with trainer(script.format(endpoint=daemon.endpoint), tmp_path) as victim:
            victim.expect("attaching")
            within(10, lambda: "" if any("memfd" in name for name in daemon.files()) else "no arena yet")
            victim.process.kill()
            within(LIMIT_S, lambda: left(daemon, files, []))
        model, optimizer, data = make()
        with tiermem.attach(model, optimizer, dram="256MiB", endpoint=daemon.endpoint):  # all of it is free again
            train(model, optimizer, data)


_TRAIN = "\ntrain(model, optimizer, data)"
_FORWARD = "model.blocks[2].register_forward_pre_hook(lambda *_: {})" + _TRAIN
_BACKWARD = "model.blocks[2].register_full_backward_hook(lambda *_: {})" + _TRAIN
_UPDATE = "optimizer.register_step_pre_hook(lambda *_: {})" + _TRAIN
_ENDS = {
    "falls off the end": ("", 0),
    "exception in forward": (_FORWARD.format("1 / 0"), 1),
    "exception in backward": (_BACKWARD.format("1 / 0"), 1),
    "exception in the update": (_UPDATE.format("1 / 0"), 1),
    "sys.exit in the loop": (_FORWARD.format("sys.exit(3)"), 3),
    "os._exit": ("os._exit(4)", 4),
    "SIGTERM": ("os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)", -signal.SIGTERM),
    "SIGINT in forward": (  # a shell's background jobs are born deaf to it
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        + _FORWARD.format("os.kill(os.getpid(), signal.SIGINT)"),
        -signal.SIGINT,
    ),
    "kill -9": ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
    "the daemon was killed": ("os.kill(job.daemon.pid, signal.SIGKILL)" + _TRAIN, 1),
    "the daemon was killed, nothing used since": ("os.kill(job.daemon.pid, signal.SIGKILL)", 0),
    "the daemon was stopped, nothing used since": ("os.kill(job.daemon.pid, signal.SIGSTOP)", 0),
}


@pytest.fixture(scope="module")
def torch_s(tmp_path_factory: pytest.TempPathFactory) -> float:
    """The end of a trainer is interpreter's and torch's too; what tiermem may add to it is asserted."""
    return torch_exit_s(tmp_path_factory.mktemp("plain"))


@pytest.mark.parametrize("end", _ENDS)
def test_an_embedded_daemon_and_its_directories_end_with_the_trainer(tmp_path: Path, torch_s: float, end: str) -> None:
    script = """
    model, optimizer, data = make()
    job = tiermem.attach(model, optimizer, dram=DRAM, endpoint="embedded")
    train(model, optimizer, data)
    say("pid", job.daemon.pid)
    input()
    """
    temporary, flash = tmp_path / "tmp", tmp_path / "flash"
    temporary.mkdir()
    flash.mkdir()
    code, expected = _ENDS[end]
    text = script + "".join(f"\n    {line}" for line in code.splitlines())
    with trainer(text, tmp_path, {"TMPDIR": str(temporary), "TIERMEM_FLASH": str(flash)}) as victim:
        (pid,) = map(int, victim.expect("pid"))
        assert list(flash.iterdir())
        assert list(temporary.glob("tiermem-*"))
        ending_s = time.monotonic()
        victim.tell()
        found = victim.wait(20)
        exited_s = time.monotonic() - ending_s
        assert found == expected, victim.errors
        assert exited_s - torch_s <= LIMIT_S, f"the trainer took {exited_s:.2f} s to end, torch alone {torch_s:.2f} s"
        ended_s = ending_s + exited_s
        within(LIMIT_S, lambda: f"daemon {pid} runs" if alive(pid) else "", since_s=ended_s)
        within(LIMIT_S, lambda: " ".join(p.name for p in flash.rglob("*")), since_s=ended_s)
        within(LIMIT_S, lambda: " ".join(p.name for p in temporary.glob("tiermem-*/**/*")), since_s=ended_s)
        within(LIMIT_S, lambda: " ".join(p.name for p in temporary.glob("tiermem-*")), since_s=ended_s)


def test_what_a_trainer_and_its_daemon_killed_together_left_is_reclaimed(tmp_path: Path) -> None:
    """Nobody lives to remove the private directory: a later attach does, once it cannot be one that starts."""
    script = """
    model, optimizer, data = make()
    job = tiermem.attach(model, optimizer, dram=DRAM, endpoint="embedded")
    train(model, optimizer, data)
    say("pid", job.daemon.pid)
    time.sleep(60)
    """
    flash, temporary = tmp_path / "flash", tmp_path / "tmp"
    temporary.mkdir()
    with trainer(script, tmp_path, {"TIERMEM_FLASH": str(flash), "TMPDIR": str(temporary)}) as victim:
        (pid,) = map(int, victim.expect("pid"))
        os.kill(pid, signal.SIGSTOP)  # so that it does not see the trainer's end
        victim.process.kill()
        os.kill(pid, signal.SIGKILL)
    within(LIMIT_S, lambda: f"daemon {pid} runs" if alive(pid) else "")
    (left_over,) = flash.iterdir()
    foreign = flash / "job-notes-of-mine"
    foreign.write_text("mine")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIERMEM_FLASH", str(flash))
        model, optimizer, _ = make()
        with tiermem.attach(model, optimizer, dram=DRAM, endpoint="embedded"):
            assert left_over.exists(), "it is too young to be told from one that starts"
        os.utime(left_over, (0, 0))
        with tiermem.attach(model, optimizer, dram=DRAM, endpoint="embedded"):
            assert not left_over.exists()
    assert [path.name for path in flash.iterdir()] == [foreign.name]


def test_a_forked_child_that_ends_takes_nothing_from_its_parent(tmp_path: Path) -> None:
    """Exit handlers run in a child too; the daemon, its directories and the session are the parent's."""
    script = """
    model, optimizer, data = make()
    job = tiermem.attach(model, optimizer, dram=DRAM, endpoint="embedded")
    train(model, optimizer, data, 2)
    child = os.fork()
    if child == 0:
        sys.exit(7)
    say("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    train(model, optimizer, data, 2)
    job.detach()
    say("result", fingerprint(model, optimizer))
    """
    with trainer(script, tmp_path, {"TIERMEM_FLASH": str(tmp_path / "flash")}) as parent:
        assert parent.expect("child") == ["7"]
        assert parent.expect("result") == [plain_fingerprint(4)]
        assert parent.wait() == 0, parent.errors


def test_a_trainer_ends_promptly_where_its_daemon_is_stopped(tmp_path: Path, torch_s: float) -> None:
    script = """
    model, optimizer, data = make()
    job = tiermem.attach(model, optimizer, dram=DRAM, endpoint="embedded", timeout_s=1)
    train(model, optimizer, data)
    say("pid", job.daemon.pid)
    os.kill(job.daemon.pid, signal.SIGSTOP)
    try:
        train(model, optimizer, data)
    except tiermem.errors.DaemonTimeout as error:
        say("timeout", error)
    """
    with trainer(script, tmp_path, {"TIERMEM_FLASH": str(tmp_path / "flash")}) as victim:
        (pid,) = map(int, victim.expect("pid"))
        try:
            victim.expect("timeout")
            ending_s = time.monotonic()
            assert victim.wait(20) == 0, victim.errors
            exited_s = time.monotonic() - ending_s
            assert exited_s - torch_s <= LIMIT_S, f"it took {exited_s:.2f} s to end, torch alone {torch_s:.2f} s"
            assert not alive(pid)
        finally:
            if alive(pid):
                os.kill(pid, signal.SIGKILL)


def test_sigterm_to_the_daemon_with_an_attached_job(tmp_path: Path) -> None:
    with serve(tmp_path) as daemon:
        model, optimizer, data = make()
        job = tiermem.attach(model, optimizer, dram=DRAM, endpoint=daemon.endpoint)
        try:
            train(model, optimizer, data)
            asked_s = time.monotonic()
            assert daemon.stop() == 0, daemon.log
            took_s = time.monotonic() - asked_s
            assert took_s <= LIMIT_S, f"the daemon took {took_s:.2f} s to end"
            assert daemon.segments() == []
            assert not daemon.socket.exists()
            with pytest.raises(tiermem.errors.DaemonUnavailable):
                train(model, optimizer, data)
        finally:
            job.close()
