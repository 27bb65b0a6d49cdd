"""The device tier on a real GPU: the contract of its memory and copies, and the oracle three tiers deep."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch

from tests.integration.daemon_process import Daemon, serve
from tests.integration.matrix import DIMENSIONS, EXCLUSIONS, Case, covering_cases, name, script
from tests.integration.scripts import BlockModel, Script, compare, run
from tiermem.errors import InvalidArgument, ResourceExhausted
from tiermem.layout import DeviceLayout
from tiermem.units import GIB, MIB
from tiermem_client import devices
from tiermem_client.copy_engine import Piece
from tiermem_client.cuda_driver import CudaDriver
from tiermem_client.cuda_engine import CudaEngine
from tiermem_client.cuda_space import CudaSpace
from tiermem_client.storage_swap import alias

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]
DEVICE = "cuda:0"
LARGE, SMALL = "2GiB", "256MiB"


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    """Kernels that add in any order would differ without tiermem too."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with serve(tmp_path_factory.mktemp("gpu"), dram="4GiB") as served:
        yield served


@pytest.fixture
def driver() -> CudaDriver:
    return CudaDriver(0)


@pytest.fixture
def space(driver: CudaDriver) -> Iterator[CudaSpace]:
    space = CudaSpace(driver, 16, driver.granularity_bytes)
    yield space
    space.close()


@pytest.fixture
def engine(driver: CudaDriver) -> Iterator[CudaEngine]:
    engine = CudaEngine(driver)
    yield engine
    engine.close()


def over(address: int, count: int) -> torch.Tensor:
    return alias(address, 4 * count, torch.float32, (count,), device=DEVICE)


# -- the contract


def test_a_range_shows_its_frames_in_order(space: CudaSpace) -> None:
    count = space.frame_bytes // 4
    home = over(space.home, space.frames * count).view(space.frames, count)
    home.copy_(torch.arange(space.frames, device=DEVICE, dtype=torch.float32)[:, None].expand(-1, count))
    range_ = space.reserve(3 * space.frame_bytes)
    space.map(range_, 0, ((6, 2), (1, 1)))
    assert over(range_.address, 3 * count).view(3, count)[:, 0].tolist() == [6.0, 7.0, 1.0]
    space.unmap(range_, 0, ((6, 2), (1, 1)))
    space.map(range_, 0, ((0, 3),))
    assert over(range_.address, 3 * count).view(3, count)[:, -1].tolist() == [0.0, 1.0, 2.0]
    space.unmap(range_, 0, ((0, 3),))
    space.vacate(range_, 0)
    space.release(range_)


def test_copies_arrive_and_wait_for_kernels_that_use_their_frames(space: CudaSpace, engine: CudaEngine) -> None:
    count = space.frame_bytes // 4
    host = torch.full((count,), 7.0)
    assert engine.pin(host.data_ptr(), space.frame_bytes) == ""
    range_ = space.reserve(space.frame_bytes)
    space.map(range_, 0, ((3, 1),))
    tensor = over(range_.address, count)
    torch.cuda._sleep(200_000_000)
    tensor.fill_(1.0)
    seen = tensor.sum()
    space.unmap(range_, 0, ((3, 1),))
    inside = space.home + 3 * space.frame_bytes
    event = engine.h2d([Piece(host.data_ptr(), inside, space.frame_bytes)], space.settled(((3, 1),)))
    assert not engine.query(event), "it did not wait for the kernels"
    engine.wait(event)
    assert seen.item() == count
    back = torch.empty(count)
    engine.wait(engine.d2h([Piece(inside, back.data_ptr(), space.frame_bytes)]))
    assert torch.equal(back, host)
    links = engine.links()
    assert [moved.bytes for moved in links.values()] == [space.frame_bytes] * 2
    assert all(moved.seconds > 0 for moved in links.values())


def test_more_than_there_is_takes_nothing(driver: CudaDriver) -> None:
    frame_bytes = GIB
    before = driver.free_bytes()
    with pytest.raises(ResourceExhausted, match="CUDA_ERROR_OUT_OF_MEMORY"):
        CudaSpace(driver, before // frame_bytes + 4, frame_bytes)
    assert driver.free_bytes() >= before - 64 * MIB


def test_a_device_that_is_not_there_is_named() -> None:
    with pytest.raises(InvalidArgument, match="torch sees"):
        CudaDriver(torch.cuda.device_count())


# -- the oracle


def large(dram: str, device: str) -> Script:
    """820 MB of state: more than what is small, less than what is large."""
    return Script(
        lambda: BlockModel(width=512, blocks=24, tied=True, around=True, dropout=0.1),
        lambda model: torch.optim.AdamW(model.parameters(), lr=3e-3),
        steps=3,
        dram=dram,
        device=DEVICE,
        attach_options={"device": f"{DEVICE}:{device}"},
    )


@pytest.mark.parametrize("made_on", ["cpu", DEVICE])
@pytest.mark.parametrize("dram", [LARGE, SMALL])
@pytest.mark.parametrize("device", [LARGE, SMALL])
def test_bit_for_bit_wherever_it_fits(dram: str, device: str, made_on: str, daemon: Daemon) -> None:
    oracle = dataclasses.replace(large(dram, device), made_on=made_on)
    seen = run(oracle, attached=True, endpoint=daemon.endpoint)
    assert compare(run(oracle, attached=False), seen) == []
    assert seen.stats is not None and seen.stats.device is not None
    assert (seen.stats.device.evictions > 0) == (device == SMALL)
    assert seen.stats.fallbacks == (), "the arena could not be pinned"


@pytest.mark.parametrize("case", covering_cases(DIMENSIONS, EXCLUSIONS), ids=name)
def test_the_matrix_bit_for_bit(case: Case, daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models this small leave a device only where it has fewer frames than attach would give one."""
    monkeypatch.setattr(devices, "device_layout", lambda nbytes, frame_bytes, cap: DeviceLayout(frame_bytes, 20, cap))
    oracle = dataclasses.replace(script(case), device=DEVICE, attach_options={"device": f"{DEVICE}:{SMALL}"})
    seen = run(oracle, attached=True, endpoint=daemon.endpoint)
    assert compare(run(oracle, attached=False), seen) == []
    assert seen.stats is not None and seen.stats.device is not None
    assert seen.stats.device.hits + seen.stats.device.misses > 0
