"""Copies of managed tensors that outlive residency: each in an unlinked file, mapped, so that a `state_dict()` of a
model that does not fit in memory stays within the budget (file pages can be written out and dropped).
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import torch

SMALL_BYTES = 64 << 10


class PrivateCopies:
    """Makes copies in files under `directory` (created on first use). The caller leases what it copies from."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def copy(self, source: torch.Tensor) -> torch.Tensor:
        """A dense copy with the source's size and stride; its memory is a file's, except for small ones."""
        dense = bool(torch.ops.aten.is_non_overlapping_and_dense.default(source))
        stride = source.stride() if dense else torch.empty(source.shape, device="meta").stride()
        nbytes = source.numel() * source.element_size()
        if nbytes < SMALL_BYTES:
            return torch.empty_strided(source.shape, stride, dtype=source.dtype).copy_(source)
        self._directory.mkdir(parents=True, exist_ok=True)
        fd, path = tempfile.mkstemp(prefix="copy-", dir=self._directory)
        try:
            os.posix_fallocate(fd, 0, nbytes)
            raw = torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8)
        finally:
            os.close(fd)
            os.unlink(path)
        twin = torch.empty(0, dtype=source.dtype).set_(raw.untyped_storage(), 0, source.shape, stride)
        return twin.copy_(source)
