"""The division of an arena, by the sentences of its docstring."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiermem.errors import InvalidArgument
from tiermem.layout import MAX_FRAMES, PAGE_BYTES, TENSOR_ALIGN_BYTES, arena_layout
from tiermem.units import GIB, KIB, MIB, TIB

arenas = st.one_of(st.integers(MIB, 64 * MIB), st.integers(64 * MIB, 8 * GIB), st.integers(8 * GIB, 4 * TIB))


@pytest.mark.parametrize(
    ("arena", "frame", "frames", "cap", "chunk"),
    [
        (MIB, 4 * KIB, 256, 128 * KIB, 32 * KIB),
        (8 * MIB, 16 * KIB, 512, MIB, 256 * KIB),
        (256 * MIB, 512 * KIB, 512, 32 * MIB, 8 * MIB),
        (512 * MIB, 512 * KIB, 1024, 64 * MIB, 16 * MIB),
        (4 * GIB, 512 * KIB, 8192, 64 * MIB, 16 * MIB),
        (5 * GIB, MIB, 5120, 64 * MIB, 16 * MIB),
        (1024 * GIB, 128 * MIB, 8192, 2 * GIB, 128 * MIB),
    ],
)
def test_the_sizes_that_documents_name(arena: int, frame: int, frames: int, cap: int, chunk: int) -> None:
    layout = arena_layout(arena)
    assert (layout.arena_bytes, layout.frame_bytes, layout.frames) == (arena, frame, frames)
    assert (layout.bundle_cap_bytes, layout.chunk_bytes) == (cap, chunk)


@given(arenas)
def test_the_parts_make_the_whole(arena: int) -> None:
    layout = arena_layout(arena)
    frame = layout.frame_bytes
    assert layout.frames * frame == layout.arena_bytes
    assert 0 <= arena - layout.arena_bytes < frame
    assert frame & (frame - 1) == 0
    assert frame % PAGE_BYTES == 0
    assert frame % TENSOR_ALIGN_BYTES == 0
    assert layout.bundle_cap_bytes % frame == layout.chunk_bytes % frame == 0
    assert 16 * frame <= layout.bundle_cap_bytes, "a tile of as many elements as a frame has bytes must fit"
    assert frame <= layout.chunk_bytes <= layout.bundle_cap_bytes <= layout.arena_bytes // 2


@given(arenas)
def test_no_process_gets_more_frames_than_the_kernel_has_mappings_for(arena: int) -> None:
    layout = arena_layout(arena)
    assert 128 <= layout.frames <= MAX_FRAMES
    if arena <= 4 * GIB:
        assert layout.frame_bytes <= 512 * KIB


@given(arenas, st.integers(0, 64 * MIB))
def test_an_extent_wastes_less_than_a_frame(arena: int, nbytes: int) -> None:
    layout = arena_layout(arena)
    frames = layout.frames_for(nbytes)
    assert frames * layout.frame_bytes >= nbytes
    assert (frames - 1) * layout.frame_bytes < max(1, nbytes)


def test_an_empty_extent_has_an_address() -> None:
    assert arena_layout(MIB).frames_for(0) == 1


@pytest.mark.parametrize("arena", [-1, 0, PAGE_BYTES, MIB - 1])
def test_an_arena_below_one_mebibyte_is_refused_with_the_remedy(arena: int) -> None:
    with pytest.raises(InvalidArgument, match="at least 1 MiB"):
        arena_layout(arena)
