"""A segment file: the preallocated file of one job in one flash directory, and whole-page I/O on it."""

from __future__ import annotations

import errno
import logging
import mmap
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from tiermem.layout import PAGE_BYTES
from tiermem.tiers.base import closed_error
from tiermem.tiers.flash_directory import FlashDirectory

_log = logging.getLogger(__name__)

IOV_MAX = 1024

_Vectored = Callable[[int, Sequence[memoryview], int], int]


class Segment:
    """Bytes by file offset; offsets and lengths are whole pages. Any thread may call any method.

    Errors are those of FlashDirectory.failure, counted there.
    """

    def __init__(self, directory: FlashDirectory, job_key: str) -> None:
        self.directory = directory
        self.path, self._fd = directory.new_file(job_key)
        self.size_bytes = 0  # changed by extend only, which has one caller at a time
        self._lock = threading.Lock()  # owner: this segment; not held across I/O
        self._users = 0  # guarded by _lock
        self._closed = False  # guarded by _lock

    def extend(self, nbytes: int) -> None:
        """Grow by `nbytes`, already claimed from the directory. On an error size and free space are as before."""
        directory, size = self.directory, self.size_bytes
        with self._descriptor() as fd:
            try:
                if directory.preallocates:
                    directory.calls.fallocate(fd, size, nbytes)
                else:
                    os.ftruncate(fd, size + nbytes)
            except OSError as error:
                self._truncate(fd, size)
                raise directory.failure(f"grow {self.path.name}", error, nbytes, size) from error
            self.size_bytes = size + nbytes

    def read(self, offset: int, views: Sequence[memoryview]) -> None:
        """Fill `views`, completely or raise."""
        self._move("read", self.directory.calls.preadv, offset, views)

    def write(self, offset: int, views: Sequence[memoryview]) -> None:
        """Store `views`, completely or raise."""
        self._move("write", self.directory.calls.pwritev, offset, views)

    def close(self) -> None:
        """Unlink the file; its blocks and its claim come back when the I/O under way has ended. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            last = self._users == 0
        self.directory.remove_file(self.path)
        if last:
            self._release()

    def _move(self, action: str, call: _Vectored, offset: int, views: Sequence[memoryview]) -> None:
        rest, at = [view for view in views if view.nbytes], offset
        with self._descriptor() as fd:
            while rest:
                batch = rest[:IOV_MAX]
                wanted = sum(view.nbytes for view in batch)
                try:
                    moved = call(fd, batch, at)
                    # Also the end of the file, which a preallocated file does not have inside an extent
                    if moved < PAGE_BYTES:
                        raise OSError(errno.EIO, f"{moved} of {wanted} bytes moved")
                except OSError as error:
                    raise self.directory.failure(f"{action} {self.path.name}", error, wanted, at) from error
                moved -= moved % PAGE_BYTES  # direct I/O goes on from a page boundary only
                at += moved
                rest = after(rest, moved)
            if not self.directory.direct_io:
                # The arena is the cache; a second copy in the page cache would only push other memory out.
                os.posix_fadvise(fd, offset, at - offset, os.POSIX_FADV_DONTNEED)

    @contextmanager
    def _descriptor(self) -> Iterator[int]:
        """The descriptor, kept open meanwhile: its number could otherwise come to name another file in the midst of an
        I/O.
        """
        with self._lock:
            if self._closed:
                raise closed_error(f"flash ({self.path.name})")
            self._users += 1
        try:
            yield self._fd
        finally:
            with self._lock:
                self._users -= 1
                last = self._closed and self._users == 0
            if last:
                self._release()

    def _release(self) -> None:
        os.close(self._fd)
        self.directory.unclaim(self.size_bytes)

    def _truncate(self, fd: int, size: int) -> None:
        # A refused fallocate leaves the blocks that it got allocated; cutting to the same size frees them (seen on
        # ext4).
        try:
            os.ftruncate(fd, size)
        except OSError as error:
            _log.warning(
                "%s; the space comes back when the job ends", self.directory.failure("cut back", error, 0, size)
            )


class PaddedViews:
    """Views as whole pages: where the last one ends inside a page, its odd end goes through a page of its own."""

    def __init__(self, views: Sequence[memoryview]) -> None:
        self.whole = list(views)
        self._odd: memoryview | None = None
        tail = views[-1].nbytes % PAGE_BYTES if views else 0
        if tail:
            last = self.whole.pop()
            self._odd = last[last.nbytes - tail :]
            self._page = memoryview(mmap.mmap(-1, PAGE_BYTES))
            self.whole += [last[: last.nbytes - tail], self._page]

    def load_odd(self) -> None:
        """Before a write."""
        if self._odd is not None:
            self._page[: self._odd.nbytes] = self._odd

    def store_odd(self) -> None:
        """After a read."""
        if self._odd is not None:
            self._odd[:] = self._page[: self._odd.nbytes]


def cut(views: Sequence[memoryview], lengths: Sequence[int]) -> Iterator[list[memoryview]]:
    """The concatenation of `views` in parts of the given lengths, which sum to it."""
    rest = list(reversed(views))
    for length in lengths:
        part: list[memoryview] = []
        while length:
            view = rest.pop()
            if view.nbytes > length:
                rest.append(view[length:])
                view = view[:length]
            part.append(view)
            length -= view.nbytes
        yield part


def after(views: list[memoryview], nbytes: int) -> list[memoryview]:
    """What remains of `views` beyond their first `nbytes`."""
    for i, view in enumerate(views):
        if nbytes < view.nbytes:
            return [view[nbytes:], *views[i + 1 :]]
        nbytes -= view.nbytes
    return []
