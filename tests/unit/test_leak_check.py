"""The leak check of conftest.py itself: a leaking test fails and the leak is named; a tidy one passes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

TESTS = """
import mmap, os, subprocess, threading
KEPT = []

def test_file():
    KEPT.append(os.open("/etc/hostname", os.O_RDONLY))

def test_thread():
    threading.Thread(target=threading.Event().wait, args=(20,), name="tiermem-x", daemon=True).start()

def test_child():
    KEPT.append(subprocess.Popen(["sleep", "20"]))

def test_mapping():
    fd = os.memfd_create("y")
    os.ftruncate(fd, 4096)
    KEPT.append(mmap.mmap(fd, 4096))
    os.close(fd)

def test_shared_file():
    open("SHARED/tiermem-unnamed", "w").close()

def test_own_shared_file():
    open(f"SHARED/tiermem-mine-{os.getpid()}", "w").close()

def test_shared_file_of_a_process_that_has_ended():
    ended = subprocess.Popen(["true"])
    ended.wait()
    open(f"SHARED/tiermem-ended-{ended.pid}", "w").close()

def test_shared_file_of_somebody_else():
    open(f"SHARED/tiermem-others-{os.getppid()}", "w").close()

def test_tidy():
    with open("/etc/hostname"):
        pass
    subprocess.run(["true"], check=True)

def test_the_end_is_tidied():
    KEPT[1].kill()
    KEPT[1].wait()
"""

NAMED = [
    r"open file \d+: /etc/hostname",
    "thread tiermem-x",
    r"child process \d+: sleep 20",
    "shared memory /memfd:y",
    "file .*/shared/tiermem-unnamed",
    r"file .*/shared/tiermem-mine-\d+",
    r"file .*/shared/tiermem-ended-\d+",
]


def test_every_kind_of_leak_fails_its_test_and_is_named(tmp_path: Path) -> None:
    """In a directory for /dev/shm, as what is left there would fail the tests that run beside this one."""
    shared = tmp_path / "shared"
    shared.mkdir()
    conftest = (Path(__file__).parents[1] / "conftest.py").read_text()
    for name, value in (("SETTLE_S", "0.3"), ("SHARED_DIRECTORY", f"Path({str(shared)!r})")):
        conftest, count = re.subn(rf"^{name} = .*$", f"{name} = {value}", conftest, flags=re.MULTILINE)
        assert count == 1
    (tmp_path / "conftest.py").write_text(conftest)
    (tmp_path / "test_it.py").write_text(TESTS.replace("SHARED", str(shared)))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    command += ["--rootdir", str(tmp_path), str(tmp_path)]
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    env = {**inherited, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    output = done.stdout
    assert [name for name in NAMED if not re.search(name, output)] == [], output
    assert output.count("the test left behind:") >= len(NAMED)
    assert "10 passed, 7 errors" in output
