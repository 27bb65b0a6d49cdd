"""The contract that every tier of the store meets; its executable form is `tiermem.testing.tier_contract`."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tiermem.allocator import Run
from tiermem.errors import InvalidArgument, TierIOError
from tiermem.layout import PAGE_BYTES


@dataclass(frozen=True, slots=True)
class Extent:
    """Room in a tier for `nbytes`, held by one owner until `free`.

    `runs` are (first frame, frames) in order; `place` names the part of the tier they lie in (a flash directory's
    index, else 0).
    """

    nbytes: int
    runs: tuple[Run, ...]
    place: int = 0

    @property
    def frames(self) -> int:
        return sum(n for _, n in self.runs)


class Tier(Protocol):
    """Bytes by extent. All methods may be called from any thread.

    Preconditions (the store keeps them): an extent is used only between `reserve` and `free`; nobody writes an extent
    while another thread reads or writes the same bytes. `offset` is a multiple of the frame size; `views` are
    C-contiguous byte views that start at page-aligned addresses (slices of the arena do); all but the last are whole
    pages (4 KiB) long; together they end at a page boundary of the extent or at its `nbytes`, wherever that is. Views
    are never longer than the range: a tier that can only move whole pages pads the last one itself.
    """

    @property
    def name(self) -> str:
        """Label in metrics and errors."""

    @property
    def capacity_bytes(self) -> int:
        """Most bytes that extents may take, slack included."""

    @property
    def used_bytes(self) -> int:
        """Bytes of all extents handed out, slack included; never above the capacity. Zero once closed."""

    def reserve(self, nbytes: int) -> Extent:
        """Take room; may do I/O (a file grows). Raises TierFull naming place and bytes, or TierIOError; nothing is
        changed then.
        """

    def free(self, extent: Extent) -> None:
        """Give room back. Does no I/O. Raises ValueError for an extent that is not held."""

    def read(self, extent: Extent, offset: int, views: Sequence[memoryview]) -> None:
        """Fill `views` from the extent, completely or raise TierIOError. Raises InvalidArgument for a range outside the
        extent.
        """

    def write(self, extent: Extent, offset: int, views: Sequence[memoryview]) -> None:
        """Store `views`, completely or raise TierIOError or TierFull; then the range's bytes are undefined, others are
        not.

        Raises InvalidArgument for a range outside the extent.
        """

    def close(self) -> None:
        """Give everything back to the operating system; extents are void. Idempotent.

        Afterwards `reserve`, `read` and `write` raise TierIOError (EBADF), and `free` raises ValueError.
        """

    def check_invariants(self) -> None:
        """Raise AssertionError unless free frames and extents partition the tier."""


def check_range(extent: Extent, offset: int, views: Sequence[memoryview]) -> int:
    """Length of `views` in bytes. Raises InvalidArgument unless they meet the contract's preconditions on ranges."""
    nbytes = sum(view.nbytes for view in views)
    if offset < 0 or offset % PAGE_BYTES or offset + nbytes > extent.nbytes:
        raise InvalidArgument(
            f"bytes [{offset}, {offset + nbytes}) do not lie on a page inside an extent of {extent.nbytes} bytes"
        )
    if nbytes % PAGE_BYTES and offset + nbytes != extent.nbytes:
        raise InvalidArgument(
            f"a range that ends at {offset + nbytes} ends neither on a page nor at the extent's {extent.nbytes} bytes"
        )
    for view in views[:-1]:
        if view.nbytes % PAGE_BYTES:
            raise InvalidArgument(
                f"a view of {view.nbytes} bytes is not last; only the last view may be a part of a page"
            )
    return nbytes


def closed_error(name: str) -> TierIOError:
    """What a closed tier raises."""
    return TierIOError(errno.EBADF, f"tier {name} is closed; its job has ended")
