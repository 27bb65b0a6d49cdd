"""How an arena is divided: frames, the bundle cap, and the chunk in which transfers and digests are cut (DESIGN section
4).
"""

from __future__ import annotations

from dataclasses import dataclass

from tiermem.errors import InvalidArgument
from tiermem.units import GIB, KIB, MIB, format_size, round_up

PAGE_BYTES = 4 * KIB
TENSOR_ALIGN_BYTES = 64
MIN_ARENA_BYTES = MIB
MAX_FRAMES = 8192  # the kernel allows a process 65,530 mappings; every frame may be one
_MAX_CAP_BYTES = 64 * MIB
_LEAST_CAP_FRAMES = 16
_MAX_CHUNK_BYTES = 16 * MIB
_MAX_DEVICE_FRAMES = 32768  # each is an allocation of the driver's


@dataclass(frozen=True, slots=True)
class ArenaLayout:
    """All sizes are bytes and multiples of `frame_bytes`; `frames * frame_bytes == arena_bytes`."""

    arena_bytes: int
    frame_bytes: int
    frames: int
    bundle_cap_bytes: int
    chunk_bytes: int

    def frames_for(self, nbytes: int) -> int:
        """Frames of an extent of `nbytes`; at least one, so that an empty bundle has an address too."""
        return max(1, -(-nbytes // self.frame_bytes))


def arena_layout(arena_bytes: int) -> ArenaLayout:
    """Layout of an arena of `arena_bytes` rounded down to whole frames. Raises InvalidArgument below 1 MiB.

    A frame is arena / 512 rounded down to a power of two, at least 4 KiB and at most 512 KiB; above 4 GiB it doubles
    until there are at most 8,192 frames. The bundle cap is min(64 MiB, arena / 8), and at least 16 frames: a tile of
    one tensor is whole frames long in every dtype of up to 16 bytes an element.
    """
    if arena_bytes < MIN_ARENA_BYTES:
        raise InvalidArgument(
            f"a DRAM arena of {format_size(arena_bytes)} is too small; give at least {format_size(MIN_ARENA_BYTES)}"
        )
    frame_bytes = min(512 * KIB, max(PAGE_BYTES, 1 << (arena_bytes // 512).bit_length() - 1))
    if arena_bytes > 4 * GIB:
        while arena_bytes // frame_bytes > MAX_FRAMES:
            frame_bytes *= 2
    frames = arena_bytes // frame_bytes
    cap_bytes = max(_LEAST_CAP_FRAMES * frame_bytes, min(_MAX_CAP_BYTES, arena_bytes // 8) // frame_bytes * frame_bytes)
    chunk_bytes = min(cap_bytes, round_up(min(_MAX_CHUNK_BYTES, max(frame_bytes, cap_bytes // 4)), frame_bytes))
    return ArenaLayout(frames * frame_bytes, frame_bytes, frames, cap_bytes, chunk_bytes)


@dataclass(frozen=True, slots=True)
class DeviceLayout:
    """How a device's memory is divided; bytes are multiples of `frame_bytes`."""

    frame_bytes: int
    frames: int
    bundle_cap_bytes: int


def device_layout(nbytes: int, granularity_bytes: int, arena_cap_bytes: int) -> DeviceLayout:
    """Layout of `nbytes` of device memory, whose frames are multiples of the driver's granularity, under an arena with
    that bundle cap. Raises InvalidArgument where a bundle would have fewer than 16 frames.
    """
    frame_bytes = granularity_bytes
    while nbytes // frame_bytes > _MAX_DEVICE_FRAMES:
        frame_bytes *= 2
    cap_bytes = min(arena_cap_bytes, nbytes // 8) // frame_bytes * frame_bytes
    least_bytes = _LEAST_CAP_FRAMES * frame_bytes
    if cap_bytes < least_bytes:
        least = format_size(8 * least_bytes)
        raise InvalidArgument(
            f"{format_size(cap_bytes)}, the most that a bundle could have, are fewer than {_LEAST_CAP_FRAMES} frames "
            f"of {format_size(frame_bytes)} on a device of {format_size(nbytes)}; give it and dram at least {least}"
        )
    return DeviceLayout(frame_bytes, nbytes // frame_bytes, cap_bytes)
