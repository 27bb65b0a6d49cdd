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
    open("/dev/shm/tiermem-leak-test", "w").close()

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
    "file /dev/shm/tiermem-leak-test",
]


def test_every_kind_of_leak_fails_its_test_and_is_named(tmp_path: Path) -> None:
    conftest = (Path(__file__).parents[1] / "conftest.py").read_text()
    (tmp_path / "conftest.py").write_text(re.sub(r"SETTLE_S = [\d.]+", "SETTLE_S = 0.3", conftest))
    (tmp_path / "test_it.py").write_text(TESTS)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(tmp_path),
        str(tmp_path),
    ]
    env = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    finally:
        Path("/dev/shm/tiermem-leak-test").unlink(missing_ok=True)
    output = done.stdout
    assert [name for name in NAMED if not re.search(name, output)] == [], output
    assert output.count("the test left behind:") >= len(NAMED)
    assert "7 passed, 5 errors" in output
