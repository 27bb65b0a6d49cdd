"""Fields of messages that both codecs have. Tables travel as packed little-endian integers (a message object per row is
4 times slower).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

from tiermem.errors import ProtocolError

_MAX_NAME = 4096


def pack_u64(values: Iterable[int]) -> bytes:
    """Little-endian uint64, back to back."""
    items = tuple(values)
    return struct.pack(f"<{len(items)}Q", *items)


def unpack_u64(data: bytes, field: str, columns: int = 1) -> tuple[int, ...]:
    """What `pack_u64` has packed, of whole rows. Raises ProtocolError for any other length."""
    if len(data) % (8 * columns):
        raise ProtocolError(f"{field} has {len(data)} bytes, not a multiple of {8 * columns}")
    return struct.unpack(f"<{len(data) // 8}Q", data)


def unpack_rows(data: bytes, columns: int, field: str) -> list[tuple[int, ...]]:
    """The rows of a table. Raises as `unpack_u64`."""
    flat = unpack_u64(data, field, columns)
    return [flat[i : i + columns] for i in range(0, len(flat), columns)]


def in_range(value: int, low: int, high: int, field: str) -> int:
    """The value. Raises ProtocolError outside low .. high."""
    if not low <= value <= high:
        raise ProtocolError(f"{field} is {value}, outside {low} .. {high}")
    return value


def short_name(text: str, where: str) -> str:
    """The text. Raises ProtocolError for one that is too long for a name."""
    if len(text) > _MAX_NAME:
        raise ProtocolError(f"{where}: a name of {len(text)} characters is longer than {_MAX_NAME}")
    return text
