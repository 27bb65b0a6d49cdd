"""The `device` of attach: text such as "cuda:0:8GiB" or "emulated:4GiB" as a memory for the job's tensors."""

from __future__ import annotations

import fcntl
import os
import time
from dataclasses import dataclass

import torch

from tiermem.errors import InvalidArgument, ResourceExhausted, Unsupported
from tiermem.layout import MIN_ARENA_BYTES, ArenaLayout, arena_layout, device_layout
from tiermem.lookahead import Lookahead
from tiermem.stats import DeviceKind
from tiermem.units import format_size, parse_size
from tiermem_client.address_space import AddressSpace
from tiermem_client.copy_engine import EmulatedEngine
from tiermem_client.cuda_driver import CudaDriver, require_cuda
from tiermem_client.cuda_engine import CudaEngine
from tiermem_client.cuda_space import CudaSpace
from tiermem_client.device_memory import DeviceMemory
from tiermem_client.device_space import HostSpace
from tiermem_client.memory import HostMemory, Memory
from tiermem_client.session import Session
from tiermem_client.storage_swap import alias

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_FORMS = "'cuda', 'cuda:0', 'cuda:0:8GiB' or 'emulated:4GiB'"
_DEFAULT_SHARE = 0.5
"""Of a GPU's free memory, where no size is given: the rest is for activations and what the libraries take."""


@dataclass(frozen=True, slots=True)
class DeviceChoice:
    """`nbytes` of a device's memory; 0: a share of what is free on it."""

    kind: DeviceKind
    index: int
    nbytes: int

    @property
    def device(self) -> torch.device:
        """Where the tensors will be, for torch."""
        return torch.device("cpu") if self.kind is DeviceKind.EMULATED else torch.device("cuda", self.index)


def parse_device(text: str | None) -> DeviceChoice | None:
    """None for None and "cpu": tensors stay in the frames of the arena. Raises InvalidArgument, Unsupported."""
    if text is None or text == "cpu":
        return None
    kind, *rest = str(text).split(":")
    if kind not in set(DeviceKind):
        raise InvalidArgument(f"device={text!r} is not known; give {_FORMS}, or leave it out")
    index = 0
    if kind == DeviceKind.CUDA:
        if rest and rest[0].isascii() and rest[0].isdigit():
            index = int(rest.pop(0))
        elif torch.cuda.is_available():
            index = torch.cuda.current_device()
        require_cuda(index)
    if len(rest) > 1:
        raise InvalidArgument(f"device={text!r} has too many parts; give {_FORMS}")
    nbytes = parse_size(rest[0]) if rest and rest[0] else 0
    if nbytes < MIN_ARENA_BYTES and (rest or kind == DeviceKind.EMULATED):
        raise InvalidArgument(
            f"device={text!r} has no room for anything; give at least {format_size(MIN_ARENA_BYTES)}, "
            f"as in '{kind}:256MiB'"
        )
    return DeviceChoice(DeviceKind(kind), index, nbytes)


def memory_for(choice: DeviceChoice | None, session: Session) -> Memory:
    """What the job's tensors are to lie in. Raises InvalidArgument, ResourceExhausted, Unsupported."""
    arena, cap_bytes = session.address_space, session.opened.bundle_cap_bytes
    if choice is None:
        return HostMemory(arena, cap_bytes)
    arena.home  # noqa: B018  raises where the kernel's page moves leave none
    if choice.kind is DeviceKind.CUDA:
        return _cuda_memory(choice, session)
    layout = arena_layout(choice.nbytes)
    space = HostSpace(_emulated_space(layout))
    engine = EmulatedEngine(on_span=session.trace.add)
    return DeviceMemory(arena, space, min(cap_bytes, layout.bundle_cap_bytes), engine, Lookahead(time.monotonic))


def _emulated_space(layout: ArenaLayout) -> AddressSpace:
    try:
        fd = os.memfd_create("tiermem-emulated-device", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, layout.arena_bytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        except OSError:
            os.close(fd)
            raise
    except OSError as error:
        raise ResourceExhausted(
            f"{format_size(layout.arena_bytes)} for the emulated device could not be had ({error}); give a smaller one"
        ) from error
    return AddressSpace(fd, layout.arena_bytes, layout.frame_bytes)


def _cuda_memory(choice: DeviceChoice, session: Session) -> DeviceMemory:
    arena, driver = session.address_space, CudaDriver(choice.index)
    nbytes = choice.nbytes or int(_DEFAULT_SHARE * driver.free_bytes())
    layout = device_layout(nbytes, driver.granularity_bytes, session.opened.bundle_cap_bytes)
    space = CudaSpace(driver, layout.frames, layout.frame_bytes)
    try:
        _check_mapping(space)
        engine = CudaEngine(driver, session.trace.add)
    except BaseException:
        space.close()
        raise
    unpinned = engine.pin(arena.home, session.opened.arena_bytes)
    return DeviceMemory(arena, space, layout.bundle_cap_bytes, engine, Lookahead(time.monotonic), unpinned)


def _check_mapping(space: CudaSpace) -> None:
    """Raise Unsupported unless what is computed in a range is found where copies read it."""
    range_ = space.reserve(space.frame_bytes)
    space.map(range_, 0, ((0, 1),))
    written, read = (
        alias(address, space.frame_bytes, torch.uint8, (space.frame_bytes,), device=space.device)
        for address in (range_.address, space.home)
    )
    differs = False
    for value in (0x5A, 0xA5):
        written.fill_(value)
        differs = differs or bool((read != value).any())
    space.unmap(range_, 0, ((0, 1),))
    space.release(range_)
    if differs:
        raise Unsupported(f"memory of {space.device} that is mapped in two places differs between them")
