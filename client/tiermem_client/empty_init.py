"""Models that never fit: inside `empty_init()` parameters are born in file-backed memory, which the kernel may write
out and drop, instead of anonymous memory. They are initialised as always, so values and random numbers are torch's own;
`attach` then moves them into the store and the files are gone.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tiermem_client.embedded import default_flash_directory
from tiermem_client.heap import large_blocks_mapped
from tiermem_client.private_copies import SMALL_BYTES, PrivateCopies

_lock = threading.Lock()  # owner: this module; one patched `register_parameter` at a time
_patches: list[PrivateCopies] = []  # guarded by _lock


@contextlib.contextmanager
def empty_init(directory: str | os.PathLike[str] | None = None) -> Iterator[None]:
    """Build a model, or load one with `from_pretrained`, inside.

    `directory`: where the files lie, on a disk with room for the weights (default: TIERMEM_FLASH, else the user's cache
    directory); each is unlinked as soon as it is mapped. Parameters below 64 KiB, parameters on other devices and
    buffers stay ordinary. Process-wide while it is open; may be nested, the inner directory counts.
    """
    copies = PrivateCopies(Path(directory) if directory is not None else default_flash_directory(os.environ))
    with _lock:
        _patches.append(copies)
        if len(_patches) == 1:
            nn.Module.register_parameter = _register  # type: ignore[method-assign,assignment]
    try:
        with large_blocks_mapped():  # what torch allocates for a parameter before it moves is given back at once
            yield
    finally:
        with _lock:
            _patches.remove(copies)
            if not _patches:
                nn.Module.register_parameter = _original  # type: ignore[method-assign]


_original = nn.Module.register_parameter


def _register(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
    _original(module, name, param)
    if param is not None and _movable(param):
        copies = _patches[-1]
        with torch.no_grad():
            param.data = copies.copy(param.data)


def _movable(param: Any) -> bool:
    """A plain parameter in anonymous memory: one that was moved before (tied) lies in a mapped file already."""
    return (
        type(param) is nn.Parameter
        and param.device.type == "cpu"
        and param.layout == torch.strided
        and param.numel() * param.element_size() >= SMALL_BYTES
        and param.untyped_storage().resizable()
    )
