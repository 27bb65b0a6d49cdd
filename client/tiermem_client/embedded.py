"""The embedded daemon: a private `tiermemd` child, used where no service runs. Same code, same protocol, tied to the
trainer's life.
"""

from __future__ import annotations

import fcntl
import logging
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from tiermem.errors import DaemonUnavailable, error_for
from tiermem.units import format_size

_log = logging.getLogger("tiermem.embedded")
_LOCK_NAME = "tiermem.lock"  # of a flash directory; the trainer does not load the tiers, which name it too
_START_GRACE_S = 120.0


def default_flash_directory(environ: Mapping[str, str]) -> Path:
    """Where an embedded daemon spills by default: under TIERMEM_FLASH, else the user's cache directory. Never a
    temporary memory filesystem by silence: the daemon refuses tmpfs with a remedy.
    """
    root = environ.get("TIERMEM_FLASH", "").partition(",")[0].partition(":")[0]
    if root:
        return Path(root).expanduser()
    cache = environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(cache) / "tiermem" / "flash"


def _reclaim(parent: Path) -> None:
    """Remove private directories whose trainer and daemon were killed together. The lock proves that no daemon lives,
    the age that none is about to start.
    """
    for directory in parent.glob("job-*-*"):
        try:
            if time.time() - directory.stat().st_mtime < _START_GRACE_S:
                continue
            with open(directory / _LOCK_NAME, "rb") as held:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(directory)
        except BlockingIOError:  # its daemon lives
            continue
        except OSError as error:
            _log.warning("%s cannot be looked at or removed: %s", directory, error)
        else:
            _log.warning("removed %s, left by a trainer and a daemon that were killed", directory)


class EmbeddedDaemon:
    """Start with the constructor, end with `stop` (idempotent). Dies with this process whatever happens to it."""

    def __init__(
        self,
        dram_bytes: int,
        flash: str | None,
        environ: Mapping[str, str],
        start_timeout_s: float,
        fault_script: str = "",
    ) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="tiermem-"))  # mode 0700
        self.socket = self._directory / "tiermemd.sock"
        self._private_flash: Path | None = None
        if flash is None:
            parent = default_flash_directory(environ)
            try:
                parent.mkdir(parents=True, exist_ok=True)
                _reclaim(parent)
                self._private_flash = Path(tempfile.mkdtemp(prefix=f"job-{os.getpid()}-", dir=parent))
            except OSError as error:
                shutil.rmtree(self._directory, ignore_errors=True)
                raise DaemonUnavailable(
                    f"no flash directory can be made in {parent}: {error}; give flash='/path/on/a/disk'"
                ) from error
            flash = str(self._private_flash)
        self._log_path = self._directory / "daemon.log"
        self._owner_pid = os.getpid()
        ready, child_end = os.pipe()
        command = [
            sys.executable,
            "-m",
            "tiermem_daemon",
            "serve",
            "--embedded",
            "--socket",
            str(self.socket),
            "--dram",
            str(dram_bytes),
            "--flash",
            flash,
            "--owner-pid",
            str(os.getpid()),
            "--ready-fd",
            str(child_end),
        ]
        for directory in self._own_directories:
            command += ["--remove-at-exit", str(directory)]
        if fault_script:
            command += ["--fault-script", fault_script]
        try:
            with open(self._log_path, "wb") as log:
                self._process = subprocess.Popen(
                    command,
                    pass_fds=[child_end],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    cwd=self._directory,
                    env=_clean(environ),
                    start_new_session=True,
                )
        finally:
            os.close(child_end)
        try:
            self._await_ready(ready, start_timeout_s)
        except BaseException:
            self.stop()
            raise
        finally:
            os.close(ready)
        _log.info("embedded daemon %d with %s of DRAM, flash in %s", self.pid, format_size(dram_bytes), flash)

    @property
    def pid(self) -> int:
        return self._process.pid

    def _await_ready(self, fd: int, timeout_s: float) -> None:
        """The daemon writes one line: READY, or CODE: message."""
        deadline, text = time.monotonic() + timeout_s, b""
        while not text.endswith(b"\n"):
            readable, _, _ = select.select([fd], [], [], max(0.0, deadline - time.monotonic()))
            if not readable:
                raise DaemonUnavailable(
                    f"the embedded daemon was not ready within {timeout_s:g} s; its log ends: {self._log_tail()}"
                )
            piece = os.read(fd, 4096)
            if not piece:
                raise DaemonUnavailable(
                    f"the embedded daemon ended while starting (exit code {self._process.wait()}): {self._log_tail()}"
                )
            text += piece
        line = text.decode(errors="replace").strip()
        if line != "READY":
            code, _, message = line.partition(": ")
            raise error_for(code, message)

    def _log_tail(self) -> str:
        return self._log_path.read_text(errors="replace")[-600:].strip() or "(empty)"

    def stop(self, timeout_s: float = 5.0) -> None:
        """Ask it to end, then make it; remove its directories. Does nothing in a forked child, whose daemon it is
        not.
        """
        if os.getpid() != self._owner_pid:
            return
        if self._process.poll() is None:
            self._process.terminate()
            self._process.send_signal(signal.SIGCONT)  # one that is stopped would not see it
            try:
                self._process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                _log.warning("embedded daemon %d did not end within %g s and was killed", self.pid, timeout_s)
                self._process.kill()
                self._process.wait()
        for directory in self._own_directories:
            shutil.rmtree(directory, ignore_errors=True)

    @property
    def _own_directories(self) -> list[Path]:
        """Made by the constructor, for this daemon alone."""
        return [d for d in (self._private_flash, self._directory) if d is not None]


def _clean(environ: Mapping[str, str]) -> dict[str, str]:
    """The child's environment. Its options come by command line: a service's TIERMEM_* settings must not reach it."""
    child = {key: value for key, value in environ.items() if not key.startswith("TIERMEM_")}
    child["PYTHONPATH"] = os.pathsep.join(
        [p for p in sys.path if p] + [child["PYTHONPATH"]] if child.get("PYTHONPATH") else [p for p in sys.path if p]
    )
    return child
