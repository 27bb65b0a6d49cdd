"""Frozen weights that are still in the file they were loaded from: the store reads them there and never writes them.

safetensors' loader, and transformers' `from_pretrained` by it, map the file; a tensor is a part of that mapping. Where
such a tensor is frozen, its bundle is *adopted*: the daemon gets the file's descriptor and offsets, and no byte moves.

A mapping may be a private one that somebody has written to, or its name may lead to another file by now. Neither
matters: what is adopted is the file that the name leads to, after its bytes and the tensor's have been found equal; the
digests taken then are what every later read is compared with.
"""

from __future__ import annotations

import bisect
import ctypes
import logging
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tiermem.bundle import BundleSpec
from tiermem.digest import digest
from tiermem.errors import InvalidArgument, ResourceExhausted
from tiermem.file_pieces import Adoption, pieces_of, pieces_within
from tiermem_client.session import Session

_log = logging.getLogger("tiermem.file_backed")
_libc = ctypes.CDLL(None)  # gives up the GIL: a comparison takes as long as its bytes take to come from the disk
_libc.memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


@dataclass(frozen=True, slots=True)
class Mapping:
    """A part of this process's addresses, [start, end), that shows a named file from `offset` on."""

    start: int
    end: int
    offset: int
    path: str


@dataclass(frozen=True, slots=True)
class FileSource:
    """A storage's bytes seem to be in the file that the daemon knows as `file`, from `offset` on."""

    file: int
    offset: int


def file_mappings(text: str) -> list[Mapping]:
    """The mappings of files that still have their name, of /proc/self/maps (proc_pid_maps(5)), by address."""
    found = []
    for line in text.splitlines():
        addresses, _, offset, _, inode, *name = line.split(maxsplit=5)
        if inode == "0" or not name or not name[0].startswith("/") or name[0].endswith(" (deleted)"):
            continue
        start, end = (int(part, 16) for part in addresses.split("-"))
        found.append(Mapping(start, end, int(offset, 16), name[0].replace("\\012", "\n")))
    return found


class FileSources:
    """The files of one attach: looked up by address, opened and passed to the daemon once each. `close` closes this
    process's descriptors; the daemon's live as long as the job. Used by the attaching thread only.

    `refusals` says why a file could not be used: its weights are then copied like any others.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._mappings = file_mappings(Path("/proc/self/maps").read_text(errors="surrogateescape"))
        self._starts = [mapping.start for mapping in self._mappings]
        self._numbers: dict[str, int | None] = {}
        self._fds: list[int] = []
        self.refusals: list[str] = []

    def find(self, address: int, nbytes: int) -> FileSource | None:
        """Where these bytes of memory seem to lie in a file; None for other memory, and where the file is of no use."""
        index = bisect.bisect_right(self._starts, address) - 1
        if index < 0 or nbytes == 0:
            return None
        mapping = self._mappings[index]
        if address + nbytes > mapping.end:
            return None
        if mapping.path not in self._numbers:
            self._numbers[mapping.path] = self._pass(mapping.path)
        number = self._numbers[mapping.path]
        return None if number is None else FileSource(number, mapping.offset + address - mapping.start)

    def adoption(
        self, spec: BundleSpec, addresses: Sequence[int], offsets: Sequence[int], file: int, chunk_bytes: int
    ) -> Adoption | None:
        """What to say for a bundle whose tensors are at `addresses` in memory and at `offsets` in the file; None unless
        the bytes are equal. Reads all of them once, a chunk at a time.
        """
        if len(spec.tensors) != len(offsets):
            return None
        in_memory, in_file = pieces_of(spec, addresses), pieces_of(spec, offsets)
        digests = []
        buffer = memoryview(bytearray(min(chunk_bytes, spec.nbytes)))
        place = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
        for at in range(0, spec.nbytes, chunk_bytes):
            size, filled = min(chunk_bytes, spec.nbytes - at), 0
            spans = zip(pieces_within(in_memory, at, size), pieces_within(in_file, at, size), strict=True)
            for (address, _, nbytes), (offset, _, _) in spans:
                if not self._read(file, offset, buffer[filled : filled + nbytes]):
                    return None
                if _libc.memcmp(place + filled, address, nbytes):
                    return None
                filled += nbytes
            digests.append(digest([buffer[:filled]]))
        return Adoption(spec.spec_id, file, tuple(offsets), tuple(digests))

    def close(self) -> None:
        """Idempotent."""
        while self._fds:
            os.close(self._fds.pop())

    def _pass(self, path: str) -> int | None:
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe by that name would be waited for
        except OSError as error:
            self._refuse(path, error.strerror or str(error))
            return None
        number = len(self._fds)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise InvalidArgument("not a regular file")
            self._session.send_file(number, fd)
        except (InvalidArgument, ResourceExhausted) as error:
            os.close(fd)
            self._refuse(path, str(error))
            return None
        except BaseException:
            os.close(fd)
            raise
        self._fds.append(fd)
        return number

    def _refuse(self, path: str, reason: str) -> None:
        _log.warning("frozen weights are copied, not read from %s: %s", path, reason)
        self.refusals.append(f"frozen weights of {path}: copied ({reason})")

    def _read(self, file: int, offset: int, view: memoryview) -> bool:
        """Whether the file has given all bytes."""
        while view.nbytes:
            try:
                moved = os.preadv(self._fds[file], [view], offset)
            except OSError as error:
                _log.warning("frozen weights are copied: file %d cannot be read: %s", file, error.strerror)
                return False
            if not moved:
                return False
            offset, view = offset + moved, view[moved:]
        return True
