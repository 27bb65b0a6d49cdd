"""What malloc keeps. glibc serves large tensors from its heap once one of that size has been freed, and a freed block
between live ones is neither reused for an aligned request of the same size nor given back: the process keeps what it
no longer has. Where tiermem frees much that was anonymous, it says so to malloc.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_MAPPED_FROM_BYTES = 64 << 10
_MOST_BYTES = 32 << 20  # glibc's own upper limit of its growing threshold, where a training process soon is anyway
_libc = ctypes.CDLL(None)


def trim_heap() -> bool:
    """Give free heap pages back to the system. False where the C library has no such call (not glibc)."""
    if not hasattr(_libc, "malloc_trim"):
        return False
    _libc.malloc_trim(0)
    return True


@contextlib.contextmanager
def large_blocks_mapped() -> Iterator[None]:
    """Inside, every block from 64 KiB on is a mapping of its own, which `free` returns at once. Process-wide; without
    glibc it does nothing.
    """
    if not hasattr(_libc, "mallopt"):
        yield
        return
    _libc.mallopt(_M_MMAP_THRESHOLD, _MAPPED_FROM_BYTES)
    try:
        yield
    finally:
        _libc.mallopt(_M_MMAP_THRESHOLD, _MOST_BYTES)
        _libc.mallopt(_M_TRIM_THRESHOLD, 2 * _MOST_BYTES)
