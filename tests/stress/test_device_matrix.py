"""Every case of the matrix three tiers deep: the device and DRAM are each smaller than the state."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch

from tests.fake_cuda import FakeDriver
from tests.integration.daemon_process import Daemon, serve
from tests.integration.matrix import DIMENSIONS, EXCLUSIONS, Case, covering_cases, name, script
from tests.integration.scripts import compare, run
from tiermem_client import devices

pytestmark = pytest.mark.stress


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with serve(tmp_path_factory.mktemp("matrix"), dram="16MiB") as served:
        yield served


@pytest.fixture(params=["emulated", "cuda, driver emulated"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The device of attach, without a size."""
    drivers = []
    if request.param != "emulated":
        drivers.append(FakeDriver(1 << 30))
        monkeypatch.setattr(devices, "CudaDriver", lambda index: drivers[0])
        monkeypatch.setattr(devices, "require_cuda", lambda index: None)
        monkeypatch.setattr(devices.DeviceChoice, "device", torch.device("cpu"))
    yield "cuda:0" if drivers else "emulated"
    for driver in drivers:
        driver.close()


@pytest.mark.parametrize("case", covering_cases(DIMENSIONS, EXCLUSIONS), ids=name)
def test_bit_for_bit(case: Case, device: str, daemon: Daemon) -> None:
    two_tiers = script(case)
    three_tiers = dataclasses.replace(two_tiers, attach_options={"device": f"{device}:{two_tiers.dram}"})
    seen = run(three_tiers, attached=True, endpoint=daemon.endpoint)
    assert compare(run(two_tiers, attached=False), seen) == []
    assert seen.stats is not None and seen.stats.device is not None
    assert seen.stats.device.evictions > 0, "everything fitted on the device: the case shows nothing"
    assert seen.stats.links["flash_to_dram"].bytes > 0, "everything fitted into DRAM"
