from __future__ import annotations

import mmap
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tiermem.allocator import FrameAllocator, Run
from tiermem.stats import DeviceLink
from tiermem.trace import Span
from tiermem_client.copy_engine import EmulatedEngine, Extent, Pace, Piece, pieces_between

NUMBERS = 1000
SLOW = Pace(latency_s=0.2)


@pytest.fixture
def spans() -> list[Span]:
    return []


@pytest.fixture
def engine(spans: list[Span]) -> Iterator[EmulatedEngine]:
    engine = EmulatedEngine(SLOW, spans.append)
    yield engine
    engine.close()


def piece(source: torch.Tensor, target: torch.Tensor) -> Piece:
    return Piece(source.data_ptr(), target.data_ptr(), source.numel() * source.element_size())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_the_target_is_nan_until_the_copy_is_complete(dtype: torch.dtype, engine: EmulatedEngine) -> None:
    source, target = torch.arange(NUMBERS).to(dtype), torch.zeros(NUMBERS, dtype=dtype)
    event = engine.h2d([piece(source, target)])
    if not engine.query(event):
        assert target.isnan().all() or engine.query(event)
    engine.wait(event)
    assert engine.query(event)
    assert torch.equal(target, source)


def test_what_a_copy_reads_may_not_change_before_it_is_complete(engine: EmulatedEngine) -> None:
    source, target = torch.ones(NUMBERS), torch.zeros(NUMBERS)
    event = engine.d2h([piece(source, target)])
    source.fill_(2.0)
    engine.wait(event)
    assert torch.equal(target, torch.full((NUMBERS,), 2.0)), "it was copied at once: nothing would find a missing wait"


def test_directions_do_not_wait_for_each_other_and_one_keeps_its_order(spans: list[Span]) -> None:
    engine = EmulatedEngine(Pace(latency_s=0.0), spans.append)
    first, second, third, fourth = torch.ones(NUMBERS), *(torch.zeros(NUMBERS) for _ in range(3))
    events = [engine.h2d([piece(first, second)]), engine.h2d([piece(second, third)])]
    other = engine.d2h([piece(first, fourth)])
    engine.wait(events[1])
    engine.wait(other)
    assert torch.equal(third, first)
    engine.close()
    engine.close()
    links = engine.links()
    assert (links[DeviceLink.DRAM_TO_EMULATED].transfers, links[DeviceLink.EMULATED_TO_DRAM].transfers) == (2, 1)
    assert links[DeviceLink.DRAM_TO_EMULATED].bytes == 2 * 4 * NUMBERS
    assert sorted(span.track for span in spans) == ["dram_to_emulated", "dram_to_emulated", "emulated_to_dram"]
    assert all(span.detail == "emulated" for span in spans)


def test_a_link_is_no_faster_than_its_pace(spans: list[Span]) -> None:
    nbytes, rate = 1 << 20, float(10 << 20)
    engine = EmulatedEngine(Pace(0.0, rate), spans.append)
    source, target = torch.ones(nbytes // 4), torch.zeros(nbytes // 4)
    engine.wait(engine.h2d([piece(source, target)]))
    engine.close()
    assert spans[0].end_s - spans[0].start_s >= nbytes / rate


@st.composite
def extents(draw: st.DrawFn, frame_bytes: int, nbytes: int) -> tuple[Run, ...]:
    """Frames for `nbytes`, taken from an allocator in which others lie about."""
    frames = max(1, -(-nbytes // frame_bytes))
    total = 2 * frames + 8
    allocator = FrameAllocator(total)
    allocator.take(total)
    free = draw(st.lists(st.integers(0, total - 1), min_size=frames, max_size=total, unique=True))
    allocator.give((frame, 1) for frame in free)
    return allocator.take(frames)


@given(st.data(), st.integers(1, 200), st.sampled_from([(16, 16), (16, 64), (64, 16)]))
def test_pieces_bring_every_byte_to_its_place(data: st.DataObject, nbytes: int, frame_bytes: tuple[int, int]) -> None:
    source, target = (
        Extent(data.draw(extents(size, nbytes)), size, home) for size, home in zip(frame_bytes, (0, 1000), strict=True)
    )
    pieces = pieces_between(source, target, nbytes)
    read, written = ([a for at, n in extent.spans() for a in range(at, at + n)][:nbytes] for extent in (source, target))
    copied = [(s + i, t + i) for s, t, n in pieces for i in range(n)]
    assert copied == list(zip(read, written, strict=True))
    assert all(n > 0 for _, _, n in pieces)


def test_one_engine_closes_with_what_was_asked_for() -> None:
    memory = mmap.mmap(-1, 1 << 20)
    source, target = torch.frombuffer(memory, dtype=torch.uint8)[: 1 << 19], torch.zeros(1 << 19, dtype=torch.uint8)
    source.fill_(7)
    engine = EmulatedEngine(Pace(0.05))
    event = engine.h2d([piece(source, target)])
    engine.close()
    assert engine.query(event)
    assert torch.equal(target, source)
