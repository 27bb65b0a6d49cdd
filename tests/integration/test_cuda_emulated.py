"""The device tier of a GPU, whose driver is emulated and whose tensors are the CPU's: everything of it but CUDA itself
(`tests/gpu` has that).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import tiermem
from tests.fake_cuda import FakeDriver
from tests.integration.daemon_process import Daemon, serve
from tests.integration.scripts import BlockModel, Script, compare, run
from tests.integration.tiny_training import make, train
from tiermem.errors import InvalidArgument, ResourceExhausted, TiermemError, Unsupported
from tiermem.notices import NoticeKind
from tiermem.units import KIB, MIB
from tiermem_client import devices
from tiermem_client.relocation import Relocation

GPU_BYTES = 16 * MIB
LARGE, SMALL = 16 * MIB, 2 * MIB


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with serve(tmp_path_factory.mktemp("gpu"), dram="64MiB") as served:
        yield served


@pytest.fixture
def drivers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[FakeDriver]]:
    """What attach makes of its device, in order."""
    made: list[FakeDriver] = []

    def driver(index: int) -> FakeDriver:
        made.append(FakeDriver(GPU_BYTES, lag_s=2e-4))
        return made[-1]

    monkeypatch.setattr(devices, "CudaDriver", driver)
    monkeypatch.setattr(devices, "require_cuda", lambda index: None)
    monkeypatch.setattr(devices.DeviceChoice, "device", torch.device("cpu"))
    yield made
    for each in made:
        assert (each.mapped, each.reserved, each.handles, each.pinned) == ({}, {}, {}, {})
        each.close()


@pytest.fixture
def moves(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is made in host memory, and the device is elsewhere."""
    monkeypatch.setattr(Relocation, "_is_there", lambda self, device: False)


def blocks(dram: int, device: int) -> Script:
    return Script(
        lambda: BlockModel(width=64, blocks=12, tied=True, around=True, dropout=0.1),
        lambda model: torch.optim.AdamW(model.parameters(), lr=3e-3),
        steps=3,
        dram=str(dram),
        attach_options={"device": f"cuda:0:{device}"},
    )


@pytest.mark.parametrize("dram", [LARGE, SMALL])
@pytest.mark.parametrize("device", [LARGE, SMALL])
def test_bit_for_bit_wherever_it_fits(dram: int, device: int, daemon: Daemon, drivers: list[FakeDriver]) -> None:
    seen = run(blocks(dram, device), attached=True, endpoint=daemon.endpoint)
    assert compare(run(blocks(dram, device), attached=False), seen) == []
    assert seen.stats is not None and seen.stats.device is not None
    assert seen.stats.tiers["cuda"].capacity_bytes == device
    assert (seen.stats.device.evictions > 0) == (device == SMALL)
    assert (seen.stats.links["dram_to_cuda"].bytes > 0) == (device == SMALL)
    assert seen.stats.fallbacks == ()


@pytest.mark.parametrize("dram", [LARGE, SMALL])
def test_a_model_from_host_memory_goes_and_comes_back(
    dram: int, daemon: Daemon, drivers: list[FakeDriver], moves: None
) -> None:
    oracle = blocks(dram, SMALL)
    oracle.warm_steps = 2  # optimizer state and gradients that exist go along
    seen = run(oracle, attached=True, endpoint=daemon.endpoint)
    assert compare(run(oracle, attached=False), seen) == []


def test_buffers_go_and_come_back_with_their_values(daemon: Daemon, drivers: list[FakeDriver], moves: None) -> None:
    """One that two modules share stays one."""

    class Counting(torch.nn.Module):
        seen: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(3))
            self.body = torch.nn.Linear(3, 3)
            self.body.register_buffer("shared", self.seen)

        def forward(self, x: torch.Tensor) -> Any:
            self.seen += 1
            return self.body(x)

    model = Counting()
    before = model.seen
    with tiermem.attach(model, dram=LARGE, endpoint=daemon.endpoint, device=f"cuda:0:{SMALL}"):
        assert model.seen is not before
        assert model.body.shared is model.seen
        model(torch.ones(3))
        assert before.tolist() == [0.0, 0.0, 0.0], "it was computed with in host memory"
    assert model.seen is before
    assert model.body.shared is before
    assert before.tolist() == [1.0, 1.0, 1.0]


def test_an_attach_that_fails_leaves_everything_where_it_was(
    daemon: Daemon, drivers: list[FakeDriver], moves: None
) -> None:
    class Whole(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            inner = torch.nn.Sequential(torch.nn.Linear(512, 1024), torch.nn.Linear(1024, 512))
            self.blocks = torch.nn.ModuleList([inner])

    whole = Whole()
    before = {name: (value.clone(), value.data_ptr()) for name, value in whole.named_parameters()}
    with pytest.raises(ResourceExhausted, match=r"4\.0 MiB are computed with at once"):
        tiermem.attach(whole, dram=LARGE, endpoint=daemon.endpoint, device=f"cuda:0:{2 * MIB}")
    for key, value in whole.named_parameters():
        assert torch.equal(value, before[key][0])
        assert value.data_ptr() == before[key][1]


def test_memory_that_cannot_be_pinned_is_told(
    daemon: Daemon, drivers: list[FakeDriver], monkeypatch: pytest.MonkeyPatch
) -> None:
    refusal = TiermemError("CUDA_ERROR_OUT_OF_MEMORY from cuMemHostRegister on cuda:0")
    monkeypatch.setattr(FakeDriver, "register", lambda self, address, nbytes: (_ for _ in ()).throw(refusal))
    model, optimizer, data = make()
    with tiermem.attach(model, optimizer, dram=LARGE, endpoint=daemon.endpoint, device=f"cuda:0:{SMALL}") as job:
        train(model, optimizer, data, 1)
        (told,) = job.stats().fallbacks
        assert "pageable" in told and "CUDA_ERROR_OUT_OF_MEMORY" in told
        job.flush()
        [row] = [row for row in daemon.stats().jobs if row.job == job.name]
        assert row.notices[NoticeKind.PAGEABLE_COPIES] == 1


@pytest.mark.parametrize(
    ("device", "error", "remedy"),
    [
        ("cuda:0", Unsupported, "leave device out"),
        ("cuda", Unsupported, "sees no CUDA device"),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_is_refused(device: str, error: type[Exception], remedy: str, daemon: Daemon) -> None:
    model, optimizer, _ = make()
    with pytest.raises(error, match=remedy):
        tiermem.attach(model, optimizer, dram=LARGE, endpoint=daemon.endpoint, device=device)


@pytest.mark.parametrize(
    ("device", "error", "remedy"),
    [
        ("cuda:0:1KiB", InvalidArgument, "as in 'cuda:256MiB'"),
        ("cuda:0:1GiB:2", InvalidArgument, "too many parts"),
        ("cuda:many", InvalidArgument, "'many' is not understood"),
        ("cuda:", InvalidArgument, "no room for anything"),
        ("cuda:0:1MiB", InvalidArgument, "give it and dram at least"),
        ("cuda:0:1GiB", ResourceExhausted, "OUT_OF_MEMORY"),
    ],
)
def test_what_cannot_be_had_is_refused(
    device: str, error: type[Exception], remedy: str, daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = FakeDriver(GPU_BYTES, granularity_bytes=16 * KIB)
    monkeypatch.setattr(devices, "CudaDriver", lambda index: driver)
    monkeypatch.setattr(devices, "require_cuda", lambda index: None)
    monkeypatch.setattr(devices.DeviceChoice, "device", torch.device("cpu"))
    model, optimizer, _ = make()
    with pytest.raises(error, match=remedy):
        tiermem.attach(model, optimizer, dram=LARGE, endpoint=daemon.endpoint, device=device)


def test_mapping_that_does_not_alias_is_refused(
    daemon: Daemon, drivers: list[FakeDriver], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = FakeDriver._map
    offsets = iter(range(1 << 30, 1 << 31, MIB))
    monkeypatch.setattr(FakeDriver, "_map", lambda self, at, nbytes, offset: real(self, at, nbytes, next(offsets)))
    model, optimizer, _ = make()
    with pytest.raises(Unsupported, match="differs between them"):
        tiermem.attach(model, optimizer, dram=LARGE, endpoint=daemon.endpoint, device=f"cuda:0:{SMALL}")


def test_half_of_what_is_free_is_taken_where_nothing_is_said(daemon: Daemon, drivers: list[FakeDriver]) -> None:
    model, optimizer, _ = make()
    with tiermem.attach(model, optimizer, dram=LARGE, endpoint=daemon.endpoint, device="cuda:0") as job:
        assert job.stats().tiers["cuda"].capacity_bytes == GPU_BYTES // 2
