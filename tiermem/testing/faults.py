"""Scripted faults: "flash.write:3:EIO,flash.read:1:flip" is "the third write fails, the first read returns a flipped
byte".

A script is a comma-separated list of `target.operation:n:action`. The operation's n-th call (from 1) meets the fault;
`n+` means that call and all later ones. Actions are errno names, `short` (only the first half of the bytes moves, and
no error says so) and `flip` (one bit of the bytes is wrong). Targets:

- a tier's name with `reserve`, `read` and `write`: what FaultyTier wraps; - `os` with `open`, `fallocate`, `preadv` and
`pwritev`: what FaultyCalls wraps, below the tiers, where directories count errors.   There `short` is an honest short
count, which a correct caller continues.
"""

from __future__ import annotations

import enum
import errno
import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from tiermem.errors import ConfigError
from tiermem.layout import PAGE_BYTES
from tiermem.tiers.os_calls import FileCalls

_FAULT = re.compile(r"([a-z0-9_]+)\.([a-z]+):(\d+)(\+?):([A-Za-z0-9]+)")
_TIER_OPERATIONS = ("reserve", "read", "write")
_OS_OPERATIONS = ("open", "fallocate", "preadv", "pwritev")


class Spoil(enum.StrEnum):
    """Actions that are no errno: bytes are wrong though nothing is reported."""

    SHORT = "short"
    FLIP = "flip"


@dataclass(frozen=True, slots=True)
class Fault:
    """The `nth` call (and all later ones if `onwards`) of `target.operation` meets `action`: a Spoil or an errno."""

    target: str
    operation: str
    nth: int
    onwards: bool
    action: Spoil | int


class FaultScript:
    """Counts calls per target and operation and says which of them go wrong. Shared by all wrappers; any thread."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        self.faults = tuple(faults)
        self._lock = threading.Lock()  # owner: this script
        self._calls: dict[tuple[str, str], int] = {}  # guarded by _lock

    def next(self, target: str, operation: str) -> Spoil | int | None:
        """Count a call; what it meets: a Spoil, an errno, or None. The first fault of the script that applies wins."""
        with self._lock:
            n = self._calls[target, operation] = self._calls.get((target, operation), 0) + 1
        for fault in self.faults:
            hit = n >= fault.nth if fault.onwards else n == fault.nth
            if hit and (fault.target, fault.operation) == (target, operation):
                return fault.action
        return None

    def calls(self, target: str, operation: str) -> int:
        """How many calls were counted."""
        with self._lock:
            return self._calls.get((target, operation), 0)


def parse_fault_script(text: str) -> FaultScript:
    """The script that `text` describes (see the module); empty text is a script without faults. Raises ConfigError."""
    faults = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        match = _FAULT.fullmatch(part)
        if match is None or int(match[3]) < 1:
            raise ConfigError(
                f"fault {part!r} is not understood; write target.operation:n:action such as 'flash.write:3:EIO'"
            )
        target, operation, action = match[1], match[2], _action(match[5], part)
        if operation not in (_OS_OPERATIONS if target == "os" else _TIER_OPERATIONS):
            raise ConfigError(f"operation {operation!r} of fault {part!r} is unknown for target {target!r}")
        if isinstance(action, Spoil) and operation in ("reserve", "open", "fallocate"):
            raise ConfigError(f"fault {part!r} would spoil bytes, and {operation} moves none; use an errno name")
        faults.append(Fault(target, operation, int(match[3]), bool(match[4]), action))
    return FaultScript(faults)


def _action(text: str, part: str) -> Spoil | int:
    if text in set(Spoil):
        return Spoil(text)
    number = getattr(errno, text, None)
    if not isinstance(number, int):
        raise ConfigError(f"action {text!r} of fault {part!r} is unknown; use an errno name, 'short' or 'flip'")
    return number


class FaultyCalls:
    """The operating system's file calls with scripted refusals, target "os"."""

    def __init__(self, calls: FileCalls, script: FaultScript) -> None:
        self._calls = calls
        self._script = script

    def open(self, path: str, flags: int, mode: int) -> int:
        self._spoil("open")
        return self._calls.open(path, flags, mode)

    def fallocate(self, fd: int, offset: int, nbytes: int) -> None:
        try:
            self._spoil("fallocate")
        except OSError as error:
            if error.errno == errno.ENOSPC:  # as file systems do, leave behind what could be had
                self._calls.fallocate(fd, offset, nbytes // 2)
            raise
        self._calls.fallocate(fd, offset, nbytes)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        spoil = self._spoil("preadv")
        moved = self._calls.preadv(fd, half(buffers) if spoil is Spoil.SHORT else buffers, offset)
        if spoil is Spoil.FLIP:
            flip(buffers)
        return moved

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        spoil = self._spoil("pwritev")
        if spoil is not Spoil.FLIP:
            return self._calls.pwritev(fd, half(buffers) if spoil is Spoil.SHORT else buffers, offset)
        flip(buffers)
        try:
            return self._calls.pwritev(fd, buffers, offset)
        finally:
            flip(buffers)

    def filesystem_magic(self, path: str) -> int:
        return self._calls.filesystem_magic(path)

    def free_bytes(self, path: str) -> int:
        return self._calls.free_bytes(path)

    def _spoil(self, operation: str) -> Spoil | None:
        action = self._script.next("os", operation)
        if action is None or isinstance(action, Spoil):
            return action
        raise OSError(action, "scripted")


def half(views: Sequence[memoryview]) -> list[memoryview]:
    """The first half of the bytes, in whole pages where there are any."""
    nbytes = sum(view.nbytes for view in views) // 2
    nbytes -= nbytes % PAGE_BYTES if nbytes > PAGE_BYTES else 0
    kept = []
    for view in views:
        kept.append(view[:nbytes])
        nbytes -= kept[-1].nbytes
    return [view for view in kept if view.nbytes]


def flip(views: Sequence[memoryview]) -> None:
    """Flip one bit of the first non-empty view, in place; twice is not at all."""
    for view in views:
        if view.nbytes:
            view[view.nbytes // 2] ^= 1
            return
