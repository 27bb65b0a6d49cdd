"""The directory of the daemon's sockets: private, and held by one live daemon."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
import struct
from pathlib import Path

from tiermem.config import SIDE_SOCKET_SUFFIX
from tiermem.errors import AccessDenied, ConfigError, DirectoryInUse

_LOCK_SUFFIX = ".lock"
_UCRED = struct.Struct("iII")  # pid, uid, gid of SO_PEERCRED


class RuntimeLock:
    """Held while the daemon lives; the kernel gives it back however the daemon ends."""

    def __init__(self, fd: int) -> None:
        self._fd: int | None = fd

    def close(self) -> None:
        """Let another daemon have the sockets. Idempotent."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def __enter__(self) -> RuntimeLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def prepare_runtime_directory(socket_path: Path, mode: int = 0o700) -> RuntimeLock:
    """Make `socket_path` and its side socket's path free to bind, and keep them for this process.

    Creates the parent directory with `mode` where missing, and removes the sockets of a dead daemon. Raises
    DirectoryInUse where a daemon lives, AccessDenied where the directory is a link, another user's or writable by
    others, ConfigError where something that is not a socket has the path.
    """
    directory = socket_path.parent
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        try:
            directory.mkdir(mode)
        except FileExistsError:
            pass  # checked below, like one of our own
        else:
            directory.chmod(mode)  # whatever the umask took away
        _check_directory(directory)
        lock = _lock(socket_path)
    except OSError as error:
        raise ConfigError(f"runtime directory {directory}: {error.strerror}; choose another --socket") from error
    try:
        for path in (socket_path, Path(f"{socket_path}{SIDE_SOCKET_SUFFIX}")):
            _remove_stale(path)
    except BaseException:
        lock.close()
        raise
    return lock


def _check_directory(directory: Path) -> None:
    status = directory.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise AccessDenied(f"runtime directory {directory} is a link or no directory; choose another --socket")
    if status.st_uid not in (os.getuid(), 0):
        raise AccessDenied(f"runtime directory {directory} belongs to user id {status.st_uid}; choose another --socket")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise AccessDenied(f"runtime directory {directory} is writable by others; choose a private one for --socket")


def _lock(socket_path: Path) -> RuntimeLock:
    """A lock, not a connection, decides between two daemons that start at once, or against one that is stopped."""
    path = f"{socket_path}{_LOCK_SUFFIX}"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(fd)
        raise DirectoryInUse(
            f"a daemon is already running at {socket_path}{_listener(socket_path)}; stop it or choose another --socket"
        ) from error
    return RuntimeLock(fd)


def _remove_stale(path: Path) -> None:
    """The lock keeps tiermem's daemons apart; the connection spares a socket that some other program listens at."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(status.st_mode):
        raise ConfigError(f"{path} exists and is not a socket; remove it or choose another --socket")
    if who := _listener(path):
        raise DirectoryInUse(f"another program is already running at {path}{who}; stop it or choose another --socket")
    path.unlink()


def _listener(path: Path) -> str:
    """ " (pid N)" of whoever accepts connections at `path`; empty where nobody does."""
    for kind in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET):
        with socket.socket(socket.AF_UNIX, kind) as probe:
            probe.setblocking(False)
            code = probe.connect_ex(str(path))
            if code == errno.EPROTOTYPE:
                continue
            if code == errno.EAGAIN:  # a full backlog: alive, and too busy to be asked who it is
                return " (pid unknown)"
            if code == 0:
                pid, _, _ = _UCRED.unpack(probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
                return f" (pid {pid})"
    return ""
