"""Sizes in bytes: parsing, printing, rounding. Every size in tiermem is an int of bytes; IEC units only in text."""

from __future__ import annotations

import re

from tiermem.errors import InvalidArgument

KIB, MIB, GIB, TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40

_FACTORS = {
    "": 1,
    "B": 1,
    "KIB": KIB,
    "MIB": MIB,
    "GIB": GIB,
    "TIB": TIB,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "K": KIB,
    "M": MIB,
    "G": GIB,
    "T": TIB,
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_size(value: int | str) -> int:
    """Bytes from an int or text such as "4MiB", "1.5 GiB", "64K" (K is 1024, KB is 1000). Raises InvalidArgument."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise InvalidArgument(
            f"size {value!r} is a {type(value).__name__}; give bytes as an int or text such as '4GiB'"
        )
    if isinstance(value, int):
        size = value
    else:
        match = _SIZE.fullmatch(value)
        factor = _FACTORS.get(match[2].upper()) if match else None
        if match is None or factor is None:
            raise InvalidArgument(
                f"size {value!r} is not understood; write bytes or a number with KiB, MiB, GiB or TiB"
            )
        size = int(float(match[1]) * factor) if "." in match[1] else int(match[1]) * factor
    if not 0 <= size < 1 << 60:
        raise InvalidArgument(f"size {value!r} is outside 0 .. 2^60 bytes")
    return size


def format_size(nbytes: int) -> str:
    """Short text for people: "13.5 MiB"."""
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if size == int(size) else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def round_up(value: int, multiple: int) -> int:
    """The least multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple
