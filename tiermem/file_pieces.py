"""Where a bundle's bytes lie in a file that is not tiermem's own: frozen weights stay in their checkpoint. Pure; the
trainer and the daemon cut and hash alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from tiermem.bundle import BundleSpec


class FilePiece(NamedTuple):
    """`nbytes` from `file_offset` of the file are the bundle's from `bundle_offset` on."""

    file_offset: int
    bundle_offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Adoption:
    """A bundle of the form `spec_id` whose bytes are in the file that was passed in under number `file`.

    `offsets`: of the form's tensors in the file, one each. `digests`: per chunk of the bundle, of its pieces' bytes
    back to back (what lies between tensors is not read, and not hashed).
    """

    spec_id: int
    file: int
    offsets: tuple[int, ...]
    digests: tuple[int, ...]


def pieces_of(spec: BundleSpec, offsets: Iterable[int]) -> tuple[FilePiece, ...]:
    """One piece per tensor. Raises ValueError where their numbers differ."""
    return tuple(FilePiece(at, t.offset_bytes, t.nbytes) for t, at in zip(spec.tensors, offsets, strict=True))


def pieces_within(pieces: Iterable[FilePiece], offset: int, nbytes: int) -> Iterator[FilePiece]:
    """The parts of `pieces` inside bytes [offset, offset + nbytes) of the bundle, in order."""
    for piece in pieces:
        start = max(offset, piece.bundle_offset)
        end = min(offset + nbytes, piece.bundle_offset + piece.nbytes)
        if start < end:
            yield FilePiece(piece.file_offset + start - piece.bundle_offset, start, end - start)
