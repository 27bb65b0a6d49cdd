"""The few operating system calls whose refusals the tiers must handle, as an argument, so that every refusal can be
tested.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Sequence
from typing import Protocol

MADV_REMOVE = 9
MADV_POPULATE_WRITE = 23
MEMORY_FILESYSTEMS = {0x01021994: "tmpfs", 0x858458F6: "ramfs"}
"""statfs(2) f_type of file systems that live in DRAM."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long)
_libc.statfs.argtypes = (ctypes.c_char_p, ctypes.c_void_p)


class MemoryCalls(Protocol):
    """Raises OSError as the operating system does; releases the GIL."""

    def madvise(self, address: int, nbytes: int, advice: int) -> None:
        """madvise(2)."""


class FileCalls(Protocol):
    """Each raises OSError as the operating system does and releases the GIL. Called from any thread."""

    def open(self, path: str, flags: int, mode: int) -> int:
        """open(2)."""

    def fallocate(self, fd: int, offset: int, nbytes: int) -> None:
        """fallocate(2) with mode 0: the file grows to offset + nbytes."""

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """preadv(2): bytes read, which may be fewer than asked for."""

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """pwritev(2): bytes written, which may be fewer than asked for."""

    def filesystem_magic(self, path: str) -> int:
        """f_type of statfs(2), 32 bits."""

    def free_bytes(self, path: str) -> int:
        """What an unprivileged process may still allocate on the file system of `path`."""


class LinuxCalls:
    """The calls themselves."""

    def madvise(self, address: int, nbytes: int, advice: int) -> None:
        # mmap.madvise of the standard library holds the GIL; prefaulting takes about half a second per GiB.
        if _libc.madvise(address, nbytes, advice):
            raise _os_error()

    def open(self, path: str, flags: int, mode: int) -> int:
        return os.open(path, flags, mode)

    def fallocate(self, fd: int, offset: int, nbytes: int) -> None:
        # Not os.posix_fallocate: where the file system refuses, glibc imitates it with one write per block and reports
        # success.
        while _libc.fallocate(fd, 0, offset, nbytes):
            error = _os_error()
            if error.errno != errno.EINTR:
                raise error

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return os.preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return os.pwritev(fd, buffers, offset)

    def filesystem_magic(self, path: str) -> int:
        buffer = ctypes.create_string_buffer(512)  # struct statfs is 120 bytes on 64-bit Linux, f_type its first word
        if _libc.statfs(os.fsencode(path), buffer):
            raise _os_error()
        return ctypes.c_ulong.from_buffer(buffer).value & 0xFFFFFFFF

    def free_bytes(self, path: str) -> int:
        info = os.statvfs(path)
        return info.f_bavail * info.f_frsize


def errno_name(number: int | None) -> str:
    """ "EIO" for 5; the number itself where it has no name."""
    if number == errno.EOPNOTSUPP:  # the same number as ENOTSUP, which Linux manuals hardly use
        return "EOPNOTSUPP"
    return errno.errorcode.get(number or 0, str(number))


def _os_error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))
