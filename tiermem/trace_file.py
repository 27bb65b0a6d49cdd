"""A trace's file: there as a whole, or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from tiermem.errors import InvalidArgument, TierIOError
from tiermem.trace import ProcessTrace, chrome_trace


def check_target(path: Path) -> None:
    """Raises InvalidArgument where no file could be written, by writing an empty one beside it."""
    temporary = _temporary(path)
    try:
        if path.is_dir():
            raise InvalidArgument(f"trace file {path} is a directory; name a file in it")
        temporary.touch(exist_ok=False)
        temporary.unlink()
    except OSError as error:
        raise InvalidArgument(
            f"trace file {path} cannot be written ({error.strerror}); name a file in a directory that exists and that "
            "you may write to"
        ) from error


def write(path: Path, processes: Sequence[ProcessTrace]) -> None:
    """Replace the file. Raises TierIOError, and leaves what was there."""
    temporary = _temporary(path)
    try:
        try:
            with temporary.open("x", encoding="utf-8") as file:
                json.dump(chrome_trace(processes), file, separators=(",", ":"), allow_nan=False)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise TierIOError(
            f"trace file {path} was not written ({error.strerror}); make room or choose another"
        ) from error


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}")
