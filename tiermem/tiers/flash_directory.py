"""A flash directory: whose it is, what it can do, what may still be taken from it, and what went wrong in it."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import mmap
import os
import re
import stat
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

from tiermem.errors import ConfigError, DirectoryInUse, TierFull, TierIOError
from tiermem.layout import PAGE_BYTES
from tiermem.tiers.os_calls import MEMORY_FILESYSTEMS, FileCalls, LinuxCalls, errno_name
from tiermem.units import format_size

_log = logging.getLogger(__name__)

LOCK_NAME = "tiermem.lock"
_OWN_FILE = re.compile(r"(segment-[A-Za-z0-9_-]{0,40}-[0-9a-f]{16}|probe-[0-9]+)\.tiermem")
_NOT_SUPPORTED = {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP}
_HEADROOM = 0.02  # of the free space, for the file system's own metadata
_NEW_FILE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW


class FlashDirectory:
    """Held by one daemon from `open` to `close`. All methods may be called from any thread.

    Claims of all jobs' segment files are counted here, so that `used_bytes` <= `capacity_bytes` whatever jobs come and
    go.
    """

    def __init__(self, path: Path, lock_fd: int, calls: FileCalls) -> None:
        """Use `open`."""
        self.path = path
        self.calls = calls
        self.direct_io = True
        """False where the file system refuses O_DIRECT: I/O then goes through the page cache, slower and at more CPU
        time.
        """
        self.preallocates = True
        """False where the file system refuses fallocate: a full disk then shows at a write instead of at `reserve`."""
        self.reclaimed_files = 0
        self.reclaimed_bytes = 0
        self.capacity_bytes = 0
        self._lock_fd = lock_fd
        self._lock = threading.Lock()  # owner: this directory; held for arithmetic only
        self._used_bytes = 0  # guarded by _lock
        self._errors: dict[str, int] = {}  # guarded by _lock
        self._checksum_failures = 0  # guarded by _lock
        self._read_bytes = 0  # guarded by _lock
        self._written_bytes = 0  # guarded by _lock
        self._unwritten_bytes = 0  # guarded by _lock
        self._paths: set[Path] = set()  # guarded by _lock
        self._closed = False  # guarded by _lock

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        quota_bytes: int | None,
        *,
        allow_memory_filesystem: bool = False,
        calls: FileCalls | None = None,
    ) -> Self:
        """Make the directory (0700) if it is missing, lock it, remove what a killed daemon left, and probe what it can
        do.

        Capacity is `quota_bytes`, or what is free now less 2 %. Raises DirectoryInUse naming the holder, or ConfigError
        naming path and remedy (tmpfs and ramfs are refused: they are DRAM). Files of others in the directory are never
        touched.
        """
        directory = Path(path).absolute()
        calls = calls or LinuxCalls()
        if quota_bytes is not None and quota_bytes < PAGE_BYTES:
            raise ConfigError(
                f"quota of {quota_bytes} bytes for flash directory {directory} is too small; give at least {PAGE_BYTES}"
            )
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            kind = MEMORY_FILESYSTEMS.get(calls.filesystem_magic(str(directory)))
            if kind and not allow_memory_filesystem:
                raise ConfigError(
                    f"flash directory {directory} is on {kind}, which is DRAM; "
                    "name a directory on a disk, or set allow_memory_filesystem"
                )
            lock_fd = _lock_directory(directory)
        except OSError as error:
            raise _unusable(directory, error) from error
        opened = cls(directory, lock_fd, calls)
        try:
            opened._reclaim()
            opened._probe()
            free_bytes = calls.free_bytes(str(directory))
        except OSError as error:
            os.close(lock_fd)
            raise _unusable(directory, error) from error
        limit = int(free_bytes * (1 - _HEADROOM)) if quota_bytes is None else quota_bytes
        opened.capacity_bytes = limit // PAGE_BYTES * PAGE_BYTES
        return opened

    @property
    def used_bytes(self) -> int:
        """Bytes of all segment files, whether their frames are held or free for recycling."""
        with self._lock:
            return self._used_bytes

    @property
    def errors(self) -> dict[str, int]:
        """Refusals of the operating system by errno name, since `open`."""
        with self._lock:
            return dict(self._errors)

    @property
    def checksum_failures(self) -> int:
        with self._lock:
            return self._checksum_failures

    def count_checksum_failure(self) -> None:
        """The store read bytes from here that are not those it wrote."""
        with self._lock:
            self._checksum_failures += 1

    @property
    def traffic_bytes(self) -> tuple[int, int]:
        """Bytes read and written since `open`, as counted by `count_traffic`."""
        with self._lock:
            return self._read_bytes, self._written_bytes

    def count_traffic(self, read_bytes: int, written_bytes: int) -> None:
        """The store has moved bytes from and to here."""
        with self._lock:
            self._read_bytes += read_bytes
            self._written_bytes += written_bytes

    @property
    def unwritten_bytes(self) -> int:
        """What all jobs have taken room for here and not written yet: how far behind the directory is."""
        with self._lock:
            return self._unwritten_bytes

    def count_unwritten(self, nbytes: int) -> None:
        """Room for `nbytes` was taken; negative: they were written, or will not be."""
        with self._lock:
            self._unwritten_bytes += nbytes
            assert self._unwritten_bytes >= 0, self._unwritten_bytes

    def claim(self, most_bytes: int, least_bytes: int, multiple: int) -> int:
        """Take quota for a file's growth: between least and most, a multiple of `multiple` if less than most. Raises
        TierFull.
        """
        with self._lock:
            left = self.capacity_bytes - self._used_bytes
            claimed = min(most_bytes, left // multiple * multiple)
            if claimed < least_bytes:
                raise TierFull(
                    f"flash directory {self.path} has no room for {format_size(least_bytes)}: "
                    f"{format_size(self._used_bytes)} of "
                    f"{format_size(self.capacity_bytes)} are taken; raise its quota or add a directory"
                )
            self._used_bytes += claimed
            return claimed

    def unclaim(self, nbytes: int) -> None:
        """Give quota back."""
        with self._lock:
            assert 0 <= nbytes <= self._used_bytes, (nbytes, self._used_bytes)
            self._used_bytes -= nbytes

    def free_bytes(self) -> int:
        """What the file system has left now. Raises TierIOError."""
        try:
            return self.calls.free_bytes(str(self.path))
        except OSError as error:
            raise self.failure("ask for the free space", error, 0) from error

    def new_file(self, job_key: str) -> tuple[Path, int]:
        """Create the empty segment file of a job: (path, descriptor), O_DIRECT where possible. Raises TierFull or
        TierIOError.
        """
        path = self.path / segment_name(job_key)
        try:
            fd = self.calls.open(str(path), _NEW_FILE | (os.O_DIRECT if self.direct_io else 0), 0o600)
        except OSError as error:
            raise self.failure("create a segment file", error, 0) from error
        with self._lock:
            self._paths.add(path)
        return path, fd

    def remove_file(self, path: Path) -> None:
        """Unlink a segment file. A refusal is counted and logged; the next daemon reclaims the file."""
        with self._lock:
            self._paths.discard(path)
        try:
            path.unlink()
        except OSError as error:
            _log.warning("%s", self.failure(f"unlink {path.name}", error, 0))

    def failure(self, action: str, error: OSError, nbytes: int, offset: int | None = None) -> TierFull | TierIOError:
        """Count `error` and put it into words: TierFull for a full disk or quota, else TierIOError with its errno."""
        name = errno_name(error.errno)
        with self._lock:
            self._errors[name] = self._errors.get(name, 0) + 1
        at = "" if offset is None else f" at byte {offset}"
        text = f"flash directory {self.path}: could not {action} ({nbytes} bytes{at}): {name}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return TierFull(f"{text}; free space on its file system, lower the quota or add a directory")
        return TierIOError(error.errno, f"{text}; check the device and the kernel log")

    def close(self) -> None:
        """Unlink segment files that are still there and release the lock. Idempotent.

        The empty lock file stays: unlinking it would let two daemons lock two files of that name.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            left = tuple(self._paths)
        for path in left:
            self.remove_file(path)
        try:
            os.ftruncate(self._lock_fd, 0)
        except OSError as error:
            _log.warning("%s", self.failure(f"empty {LOCK_NAME}", error, 0))
        os.close(self._lock_fd)

    def _reclaim(self) -> None:
        """Remove regular files that bear our names; the lock proves that nobody alive uses them."""
        with os.scandir(self.path) as entries:
            leftovers = [entry for entry in entries if _OWN_FILE.fullmatch(entry.name)]
        for entry in leftovers:
            info = entry.stat(follow_symlinks=False)
            if not stat.S_ISREG(info.st_mode):
                continue
            os.unlink(entry.path)
            self.reclaimed_files += 1
            self.reclaimed_bytes += info.st_blocks * 512
        if self.reclaimed_files:
            _log.warning(
                "flash directory %s: reclaimed %d files, %d bytes, left by a daemon that was killed",
                self.path,
                self.reclaimed_files,
                self.reclaimed_bytes,
            )

    def _probe(self) -> None:
        """Find out whether O_DIRECT and fallocate work here, by using them."""
        try:
            self._with_probe_file(os.O_DIRECT, self._write_a_page)
        except OSError as error:
            if error.errno not in _NOT_SUPPORTED:
                raise
            self._with_probe_file(0, self._write_a_page)
            self.direct_io = False
            _log.warning(
                "flash directory %s: O_DIRECT refused (%s); using the page cache", self.path, errno_name(error.errno)
            )
        try:
            self._with_probe_file(0, lambda fd: self.calls.fallocate(fd, 0, PAGE_BYTES))
        except OSError as error:
            if error.errno not in _NOT_SUPPORTED:
                raise
            self.preallocates = False
            _log.warning(
                "flash directory %s: fallocate refused (%s); files are sparse", self.path, errno_name(error.errno)
            )

    def _with_probe_file(self, flags: int, use: Callable[[int], None]) -> None:
        path = self.path / f"probe-{os.getpid()}.tiermem"
        try:
            fd = self.calls.open(str(path), _NEW_FILE | flags, 0o600)
            try:
                use(fd)
            finally:
                os.close(fd)
        finally:
            with suppress(FileNotFoundError):  # a refused O_DIRECT leaves the file on some file systems, not on others
                path.unlink()

    def _write_a_page(self, fd: int) -> None:
        page = mmap.mmap(-1, PAGE_BYTES)
        if self.calls.pwritev(fd, [memoryview(page)], 0) != PAGE_BYTES:
            raise OSError(errno.EIO, "short write of one page")


def segment_name(job_key: str) -> str:
    """File name of a job's segment. The key is data: readable characters of it, then a digest that keeps different keys
    apart.
    """
    readable = re.sub(r"[^A-Za-z0-9_-]+", "_", job_key)[:40]
    return f"segment-{readable}-{hashlib.sha256(job_key.encode(errors='surrogatepass')).hexdigest()[:16]}.tiermem"


def _lock_directory(directory: Path) -> int:
    fd = os.open(directory / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()} {datetime.now(UTC).isoformat(timespec='seconds')}\n".encode(), 0)
    except BlockingIOError as error:
        pid, _, since = os.pread(fd, 128, 0).decode(errors="replace").strip().partition(" ")
        os.close(fd)
        raise DirectoryInUse(
            f"flash directory {directory} is in use by process {pid or '(unknown)'} since {since or '(unknown)'}; "
            "stop that daemon or name another directory"
        ) from error
    except OSError:
        os.close(fd)
        raise
    return fd


def _unusable(directory: Path, error: OSError) -> ConfigError | TierFull:
    name = errno_name(error.errno)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return TierFull(f"flash directory {directory} is full ({name}); free space or name another directory")
    return ConfigError(
        f"flash directory {directory} cannot be used: {error.strerror} ({name}); make it writable or name another one"
    )
