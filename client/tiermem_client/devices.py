"""The `device` of attach: text such as "emulated:4GiB" as a memory for the job's tensors."""

from __future__ import annotations

import fcntl
import os
import time
from dataclasses import dataclass

from tiermem.errors import InvalidArgument, ResourceExhausted, Unsupported
from tiermem.layout import MIN_ARENA_BYTES, ArenaLayout, arena_layout
from tiermem.lookahead import Lookahead
from tiermem.units import format_size, parse_size
from tiermem_client.address_space import AddressSpace
from tiermem_client.copy_engine import EmulatedEngine
from tiermem_client.device_memory import DeviceMemory
from tiermem_client.memory import HostMemory, Memory
from tiermem_client.session import Session

_EMULATED = "emulated"
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


@dataclass(frozen=True, slots=True)
class DeviceChoice:
    """An emulated device of `nbytes` of ordinary memory."""

    nbytes: int


def parse_device(text: str | None) -> DeviceChoice | None:
    """None for None and "cpu": tensors stay in the frames of the arena. Raises InvalidArgument, Unsupported."""
    if text is None or text == "cpu":
        return None
    kind, _, size = str(text).partition(":")
    if kind == "cuda":
        raise Unsupported(
            f"device={text!r}: a tier in the memory of a GPU is not built yet; leave device out to train on the CPU, "
            "or try three tiers with device='emulated:SIZE'"
        )
    if kind != _EMULATED:
        raise InvalidArgument(f"device={text!r} is not known; give 'emulated:SIZE', or leave it out")
    nbytes = parse_size(size) if size else 0
    if nbytes < MIN_ARENA_BYTES:
        raise InvalidArgument(
            f"device={text!r} has no room for anything; give at least {format_size(MIN_ARENA_BYTES)}, "
            "as in 'emulated:256MiB'"
        )
    return DeviceChoice(nbytes)


def memory_for(choice: DeviceChoice | None, session: Session) -> Memory:
    """What the job's tensors are to lie in. Raises InvalidArgument, ResourceExhausted, Unsupported."""
    arena, cap_bytes = session.address_space, session.opened.bundle_cap_bytes
    if choice is None:
        return HostMemory(arena, cap_bytes)
    arena.home  # noqa: B018  raises where the kernel's page moves leave none
    layout = arena_layout(choice.nbytes)
    space = _emulated_space(layout)
    engine = EmulatedEngine(on_span=session.trace.add)
    return DeviceMemory(arena, space, min(cap_bytes, layout.bundle_cap_bytes), engine, Lookahead(time.monotonic))


def _emulated_space(layout: ArenaLayout) -> AddressSpace:
    fd = os.memfd_create("tiermem-emulated-device", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, layout.arena_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except OSError as error:
        os.close(fd)
        raise ResourceExhausted(
            f"{format_size(layout.arena_bytes)} for the emulated device could not be had ({error}); give a smaller one"
        ) from error
    return AddressSpace(fd, layout.arena_bytes, layout.frame_bytes)
