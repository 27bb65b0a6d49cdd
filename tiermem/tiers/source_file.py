"""A file that a client has passed in: read where a frozen bundle is needed, never written."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from collections.abc import Sequence

from tiermem.errors import DataLoss, InvalidArgument, TierIOError
from tiermem.tiers.flash_segment import IOV_MAX, after
from tiermem.tiers.os_calls import FileCalls, errno_name
from tiermem.units import format_size


class SourceFile:
    """Owns the descriptor from the constructor's call on, also where that raises InvalidArgument (not a regular file,
    not open for reading) or TierIOError. Any thread may read; `close` is called when nobody reads any more.

    The file stays the client's: it may change or shrink at any time. A range that is gone is DataLoss; bytes that
    differ are found by who compares digests.
    """

    def __init__(self, fd: int, calls: FileCalls) -> None:
        try:
            try:
                found, flags = os.fstat(fd), fcntl.fcntl(fd, fcntl.F_GETFL)
                self.path = os.readlink(f"/proc/self/fd/{fd}")  # for people: never opened
            except OSError as error:
                raise TierIOError(error.errno, f"a file that was passed in cannot be used: {error.strerror}") from error
            if not stat.S_ISREG(found.st_mode):
                raise InvalidArgument("what was passed in as a source of weights is not a regular file")
            if flags & os.O_ACCMODE == os.O_WRONLY or flags & os.O_PATH:
                raise InvalidArgument("the file that was passed in as a source of weights is not open for reading")
        except BaseException:
            os.close(fd)
            raise
        self._fd, self._calls = fd, calls
        self.size_bytes = found.st_size

    def read(self, offset: int, views: Sequence[memoryview]) -> None:
        """Fill `views` from `offset` on, completely or raise TierIOError or DataLoss. Nothing stays in the page cache
        for it: the arena is the cache.
        """
        rest, at = [view for view in views if view.nbytes], offset
        while rest:
            batch = rest[:IOV_MAX]
            try:
                moved = self._calls.preadv(self._fd, batch, at)
            except OSError as error:
                wanted = format_size(sum(view.nbytes for view in batch))
                text = f"read of {wanted} at offset {at} of {self.path} failed ({errno_name(error.errno)})"
                raise TierIOError(error.errno, text) from error
            if not moved:
                raise DataLoss(
                    f"{self.path} ends before offset {at}, where weights were when they were attached; put the file "
                    "back as it was and attach again"
                )
            at += moved
            rest = after(rest, moved)
        with contextlib.suppress(OSError):  # advice that a file system does not take changes nothing
            os.posix_fadvise(self._fd, offset, at - offset, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        os.close(self._fd)
