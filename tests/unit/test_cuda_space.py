"""Frames of a GPU's memory, on an emulated driver."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest

from tests.fake_cuda import FakeDriver
from tiermem.errors import InvalidArgument, ResourceExhausted, TiermemError
from tiermem.stats import DeviceKind, DeviceLink
from tiermem.trace import Span
from tiermem_client.address_space import Range
from tiermem_client.copy_engine import Piece
from tiermem_client.cuda_engine import CudaEngine
from tiermem_client.cuda_space import CudaSpace

FRAME = 4096
FRAMES = 8


@pytest.fixture
def driver() -> Iterator[FakeDriver]:
    driver = FakeDriver(FRAMES * FRAME)
    yield driver
    driver.close()


@pytest.fixture
def space(driver: FakeDriver) -> Iterator[CudaSpace]:
    space = CudaSpace(driver, FRAMES, FRAME)
    yield space
    space.check_invariants()
    space.close()
    assert (driver.mapped, driver.reserved, driver.handles) == ({}, {}, {})


@pytest.fixture
def engine(driver: FakeDriver) -> Iterator[CudaEngine]:
    engine = CudaEngine(driver)
    yield engine
    engine.close()


def fill(address: int, value: int, frames: int = 1) -> None:
    ctypes.memset(address, value, frames * FRAME)


def read(address: int) -> int:
    return ctypes.string_at(address, 1)[0]


def mapped_in(driver: FakeDriver, range_: Range) -> int:
    return sum(size for at, size in driver.mapped.items() if range_.address <= at < range_.address + range_.nbytes)


def test_frames_lie_side_by_side_in_a_range_and_at_home(space: CudaSpace) -> None:
    for frame in range(FRAMES):
        fill(space.home + frame * FRAME, frame)
    range_ = space.reserve(3 * FRAME)
    space.map(range_, 0, ((6, 2), (1, 1)))
    assert [read(range_.address + n * FRAME) for n in range(3)] == [6, 7, 1]
    fill(range_.address + FRAME, 0x77)
    assert read(space.home + 7 * FRAME) == 0x77
    space.unmap(range_, 0, ((6, 2), (1, 1)))


def test_what_comes_back_to_its_place_costs_no_call(space: CudaSpace, driver: FakeDriver) -> None:
    range_ = space.reserve(FRAME)
    space.map(range_, 0, ((3, 1),))
    space.unmap(range_, 0, ((3, 1),))
    driver.failures["map"] = driver.failures["allow"] = TiermemError("nothing is mapped anew")
    space.map(range_, 0, ((3, 1),))
    space.unmap(range_, 0, ((3, 1),))
    assert mapped_in(driver, range_) == FRAME


def test_other_frames_come_when_nothing_computes_there_any_more(space: CudaSpace, driver: FakeDriver) -> None:
    range_ = space.reserve(2 * FRAME)
    fill(space.home, 1, 2)
    fill(space.home + 4 * FRAME, 2, 2)
    space.map(range_, 0, ((0, 2),))
    space.unmap(range_, 0, ((0, 2),))
    space.map(range_, 0, ((4, 2),))
    assert read(range_.address) == 2
    space.unmap(range_, 0, ((4, 2),))


def test_a_place_that_was_vacated_is_unmapped_as_soon_as_nothing_computes_there(
    space: CudaSpace, driver: FakeDriver
) -> None:
    range_, other = space.reserve(FRAME), space.reserve(FRAME)
    space.map(range_, 0, ((0, 1),))
    driver.hold_computing()
    space.unmap(range_, 0, ((0, 1),))
    space.vacate(range_, 0)
    assert mapped_in(driver, range_) == FRAME, "kernels that were asked for use it still"
    driver.computing_goes_on()
    space.map(other, 0, ((1, 1),))
    assert mapped_in(driver, range_) == 0
    space.unmap(other, 0, ((1, 1),))


def test_a_place_that_is_used_again_before_it_was_unmapped_stays(space: CudaSpace, driver: FakeDriver) -> None:
    range_ = space.reserve(FRAME)
    space.map(range_, 0, ((0, 1),))
    driver.hold_computing()
    space.unmap(range_, 0, ((0, 1),))
    space.vacate(range_, 0)
    space.map(range_, 0, ((0, 1),))
    driver.computing_goes_on()
    space.vacate(space.reserve(FRAME), 0)  # looks at what waits
    assert mapped_in(driver, range_) == FRAME
    space.unmap(range_, 0, ((0, 1),))


@pytest.mark.parametrize("inside", [True, False])
def test_copies_wait_for_what_computes_with_their_frames(
    inside: bool, space: CudaSpace, engine: CudaEngine, driver: FakeDriver
) -> None:
    range_, host = space.reserve(FRAME), ctypes.create_string_buffer(b"\x42" * FRAME, FRAME)
    space.map(range_, 0, ((5, 1),))
    driver.hold_computing()
    if not inside:
        space.unmap(range_, 0, ((5, 1),))
    unused = engine.h2d([Piece(ctypes.addressof(host), space.home, FRAME)], space.settled(((0, 1),)))
    engine.wait(unused)
    event = engine.h2d([Piece(ctypes.addressof(host), space.home + 5 * FRAME, FRAME)], space.settled(((4, 2),)))
    assert not engine.query(event)
    fill(range_.address, 0x17)  # what computes goes on writing
    assert read(space.home + 5 * FRAME) == 0x17
    driver.computing_goes_on()
    engine.wait(event)
    assert read(space.home + 5 * FRAME) == 0x42
    if inside:
        space.unmap(range_, 0, ((5, 1),))


def test_a_range_is_released_when_nothing_computes_in_it(space: CudaSpace, driver: FakeDriver) -> None:
    range_ = space.reserve(2 * FRAME)
    space.map(range_, FRAME, ((0, 1),))
    space.unmap(range_, FRAME, ((0, 1),))
    space.release(range_)
    assert range_.address not in driver.reserved


@pytest.mark.parametrize("call", ["create", "map", "allow"])
def test_what_fails_at_the_beginning_takes_nothing(call: str) -> None:
    driver = FakeDriver(FRAMES * FRAME)
    driver.failures[call] = ResourceExhausted("no")
    with pytest.raises(ResourceExhausted, match="no"):
        CudaSpace(driver, FRAMES, FRAME)
    assert (driver.mapped, driver.reserved, driver.handles) == ({}, {}, {})


def test_more_than_the_device_has_takes_nothing(driver: FakeDriver) -> None:
    with pytest.raises(ResourceExhausted, match="OUT_OF_MEMORY"):
        CudaSpace(driver, FRAMES + 1, FRAME)
    assert (driver.mapped, driver.reserved, driver.handles) == ({}, {}, {})


@pytest.mark.parametrize("call", ["map", "allow"])
def test_what_fails_later_leaves_no_part_mapped(call: str, space: CudaSpace, driver: FakeDriver) -> None:
    range_ = space.reserve(2 * FRAME)
    driver.failures[call] = TiermemError("no")
    with pytest.raises(TiermemError, match="no"):
        space.map(range_, 0, ((0, 2),))
    assert mapped_in(driver, range_) == 0
    space.map(range_, 0, ((0, 2),))
    space.unmap(range_, 0, ((0, 2),))


def test_a_device_that_has_failed_does_not_hide_the_first_error(
    driver: FakeDriver, caplog: pytest.LogCaptureFixture
) -> None:
    space = CudaSpace(driver, FRAMES, FRAME)
    driver.failures["synchronize"] = TiermemError("CUDA_ERROR_ILLEGAL_ADDRESS")
    space.close()
    space.close()
    assert "CUDA_ERROR_ILLEGAL_ADDRESS" in caplog.text


def test_frames_are_what_the_driver_can_map(driver: FakeDriver) -> None:
    with pytest.raises(InvalidArgument, match="1000 bytes are not multiples of 4096"):
        CudaSpace(driver, 4, 1000)
    space = CudaSpace(driver, 4, FRAME)
    with pytest.raises(InvalidArgument, match="give at least 1"):
        space.reserve(0)
    space.close()


def test_copies_are_counted_and_in_the_trace_on_one_clock(driver: FakeDriver) -> None:
    spans: list[Span] = []
    engine = CudaEngine(driver, spans.append)
    source, target = ctypes.create_string_buffer(b"\x01" * 5000, 5000), ctypes.create_string_buffer(5000)
    addresses = ctypes.addressof(source), ctypes.addressof(target)
    event = engine.h2d([Piece(*addresses, 5000)])
    engine.wait(event)
    back = engine.d2h([Piece(*addresses, 1000)])
    engine.wait(back)
    links = engine.links()
    assert {link: (moved.bytes, moved.transfers) for link, moved in links.items()} == {
        DeviceLink.DRAM_TO_CUDA: (5000, 1),
        DeviceLink.CUDA_TO_DRAM: (1000, 1),
    }
    assert engine.kind is DeviceKind.CUDA
    assert all(moved.seconds >= 1e-4 for moved in links.values())
    assert [(span.track, span.nbytes) for span in spans] == [("dram_to_cuda", 5000), ("cuda_to_dram", 1000)]
    assert spans[0].start_s >= event.asked_s - 1e-3
    assert spans[0].end_s <= spans[1].start_s
    engine.close()


def test_memory_is_pinned_until_the_end_or_the_reason_is_told(driver: FakeDriver) -> None:
    engine = CudaEngine(driver)
    assert engine.pin(4096, 8192) == ""
    assert driver.pinned == {4096: 8192}
    engine.close()
    engine.close()
    assert driver.pinned == {}
    driver.failures["register"] = TiermemError("CUDA_ERROR_NOT_PERMITTED from cuMemHostRegister on fake:0")
    refused = CudaEngine(driver)
    assert "CUDA_ERROR_NOT_PERMITTED" in refused.pin(4096, 8192)
    refused.close()


def test_the_end_waits_for_copies_under_way(driver: FakeDriver) -> None:
    engine = CudaEngine(FakeDriver(FRAME, latency_s=0.05))
    source, target = ctypes.create_string_buffer(b"\x05" * 100, 100), ctypes.create_string_buffer(100)
    engine.d2h([Piece(ctypes.addressof(source), ctypes.addressof(target), 100)])
    engine.close()
    assert target.raw == source.raw
