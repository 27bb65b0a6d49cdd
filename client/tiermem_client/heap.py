"""What malloc keeps. glibc serves large tensors from its heap once one of that size has been freed, and a freed block
between live ones is neither reused for an aligned request of the same size nor given back: the process keeps what it
no longer has. Where tiermem frees much that was anonymous, it says so to malloc.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Iterator

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_MAPPED_FROM_BYTES = 1 << 20  # above the many small activations; a mapping costs a page fault per 4 KiB when it is used
_MOST_BYTES = 32 << 20  # glibc's own upper limit of its growing threshold, where a training process soon is anyway
_libc = ctypes.CDLL(None)
_lock = threading.Lock()  # owner: this module
_users = 0  # guarded by _lock


def trim_heap() -> bool:
    """Give free heap pages back to the system. False where the C library has no such call (not glibc)."""
    if not hasattr(_libc, "malloc_trim"):
        return False
    _libc.malloc_trim(0)
    return True


def map_large_blocks() -> bool:
    """From now on every block of 1 MiB or more is a mapping of its own, which `free` returns at once, until as many
    calls of `unmap_large_blocks`. Process-wide. It costs 3 to 5 % of a step's CPU time where all state is resident,
    so only jobs that do not fit ask for it. False without glibc.
    """
    return _count(1)


def unmap_large_blocks() -> None:
    """The reverse of one `map_large_blocks`."""
    _count(-1)


def _count(change: int) -> bool:
    global _users
    if not hasattr(_libc, "mallopt"):
        return False
    with _lock:
        _users += change
        _libc.mallopt(_M_MMAP_THRESHOLD, _MAPPED_FROM_BYTES if _users else _MOST_BYTES)
        _libc.mallopt(_M_TRIM_THRESHOLD, 2 * _MOST_BYTES)
    return True


@contextlib.contextmanager
def large_blocks_mapped() -> Iterator[None]:
    """`map_large_blocks` inside."""
    map_large_blocks()
    try:
        yield
    finally:
        unmap_large_blocks()
