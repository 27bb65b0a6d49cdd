"""Checksums of stored bytes: xxh3, 64 bits, taken just before a write and verified after a read."""

from __future__ import annotations

from collections.abc import Iterable

import xxhash


def digest(views: Iterable[memoryview]) -> int:
    """xxh3_64 of the concatenated bytes. How they are cut into views makes no difference. Large views are hashed
    without the GIL.
    """
    state = xxhash.xxh3_64()
    for view in views:
        state.update(view)
    return state.intdigest()
