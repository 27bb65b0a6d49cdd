"""A third tier above DRAM, emulated: the script must not notice, whatever fits where."""

from __future__ import annotations

import dataclasses
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tiermem
from tests.integration.daemon_process import Daemon, environment, serve, within
from tests.integration.scripts import BlockModel, Script, begin, compare, managed, run
from tests.integration.tiny_training import make, train
from tiermem.errors import InvalidArgument, ResourceExhausted, TiermemError
from tiermem.stats import DeviceKind, LinkStats
from tiermem.units import MIB
from tiermem_client.device_memory import DeviceMemory

LARGE, SMALL = 16 * MIB, 2 * MIB


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with serve(tmp_path_factory.mktemp("device"), dram="64MiB") as served:
        yield served


def script(dram: int, device: int, **fields: Any) -> Script:
    """6.6 MB of state: more than what is small, less than what is large."""
    options = {"attach_options": {"device": f"emulated:{device}"}, "dram": str(dram), "steps": 3, **fields}
    return Script(
        lambda: BlockModel(width=64, blocks=12, tied=True, around=True, dropout=0.1),
        lambda model: torch.optim.AdamW(model.parameters(), lr=3e-3),
        **options,
    )


@pytest.mark.parametrize("dram", [LARGE, SMALL])
@pytest.mark.parametrize("device", [LARGE, SMALL])
def test_bit_for_bit_wherever_it_fits(dram: int, device: int, daemon: Daemon) -> None:
    seen = run(script(dram, device), attached=True, endpoint=daemon.endpoint)
    assert compare(run(script(dram, device), attached=False), seen) == []
    assert seen.stats is not None and seen.stats.device is not None
    assert seen.stats.device.name == "emulated"
    assert 0 < seen.stats.tiers["emulated"].used_bytes <= seen.stats.tiers["emulated"].capacity_bytes == device
    assert (seen.stats.device.evictions > 0) == (device == SMALL)
    assert (seen.stats.links["dram_to_emulated"].bytes > 0) == (device == SMALL)
    assert (seen.stats.links["flash_to_dram"].bytes > 0) == (dram == SMALL)


@pytest.mark.parametrize("checkpointing", ["reentrant", "nonreentrant"])
def test_bit_for_bit_with_recomputation_accumulation_and_what_looks_at_everything(
    checkpointing: str, daemon: Daemon
) -> None:
    def look(step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer, data: Any) -> Any:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.001)
            norm = torch.nn.utils.parameters_to_vector(model.parameters()).norm()
        return norm, {k: v.clone() for k, v in model.state_dict().items()}, optimizer.state_dict()["state"].keys()

    oracle = dataclasses.replace(
        script(SMALL, SMALL, microbatches=2, between=look, set_to_none=False),
        model=lambda: BlockModel(width=64, blocks=12, checkpointing=checkpointing),
        clip=lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5),
    )
    plain, seen = run(oracle, attached=False), run(oracle, attached=True, endpoint=daemon.endpoint)
    assert compare(plain, seen) == []


_WITHOUT_WAITS = """
from tests.integration.scripts import compare, run
from tests.integration.test_device import LARGE, SMALL, script
from tiermem_client.copy_engine import EmulatedEngine

EmulatedEngine.wait = lambda engine, event: None
seen = run(script(LARGE, SMALL), attached=True, endpoint={endpoint!r})
print("equal" if compare(run(script(LARGE, SMALL), attached=False), seen) == [] else "different")
"""


def test_a_missing_wait_shows(daemon: Daemon) -> None:
    """The emulated device is worth something only if computing with what has not arrived is found: in the results, or
    by the engine, whose frames are not where they were.
    """
    text = _WITHOUT_WAITS.format(endpoint=str(daemon.endpoint))
    ended = subprocess.run([sys.executable, "-c", text], env=environment(), capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) in ((0, "different\n"), (-signal.SIGSEGV, "")), ended.stderr


_CLOSED_EARLY = """
import ctypes
import tiermem
import tiermem_client.devices as devices
from tests.integration.test_device import LARGE
from tests.integration.tiny_training import make
from tiermem_client.copy_engine import EmulatedEngine, Pace, Piece

engines = []
devices.EmulatedEngine = lambda **options: engines.append(EmulatedEngine(Pace(0.5), **options)) or engines[0]
model, optimizer, _ = make()
job = tiermem.attach(model, optimizer, dram=LARGE, endpoint={endpoint!r}, device=f"emulated:{{LARGE}}")
target = ctypes.create_string_buffer(4096)
engines[0].h2d([Piece(job.residency.session.address_space.home, ctypes.addressof(target), 4096)])
if {close}:
    job.close()
print("ended")
"""


@pytest.mark.parametrize("close", [True, False])
def test_copies_under_way_end_before_the_arena_does(close: bool, daemon: Daemon) -> None:
    text = _CLOSED_EARLY.format(endpoint=str(daemon.endpoint), close=close)
    ended = subprocess.run([sys.executable, "-c", text], env=environment(), capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (0, "ended\n"), ended.stderr


def test_where_everything_fits_on_the_device_a_step_moves_no_byte(daemon: Daemon) -> None:
    model, optimizer, data = make()
    with tiermem.attach(model, optimizer, dram=LARGE, endpoint=daemon.endpoint, device=f"emulated:{LARGE}") as job:
        train(model, optimizer, data, 2)
        before = job.residency.memory.stats()
        train(model, optimizer, data, 2)
        after = job.residency.memory.stats()
        assert after.links == before.links
        assert before.device is not None and after.device is not None
        assert after.device.hits > before.device.hits


def test_predicted_uses_are_filled_ahead_and_the_order_is_not_that_of_least_recent_use(daemon: Daemon) -> None:
    """A model that is run forever the same way round has no hit at all under LRU."""
    oracle = script(LARGE, SMALL, steps=8)
    training = begin(oracle)
    with managed(training, endpoint=daemon.endpoint) as job:
        training.steps(3)
        before = job.residency.memory.stats().device
        training.steps(5)
        after = job.residency.memory.stats().device
        assert before is not None and after is not None
        hits, misses = after.hits - before.hits, after.misses - before.misses
        assert hits > misses, (hits, misses)


def test_invariants_hold_between_steps(daemon: Daemon) -> None:
    training = begin(script(LARGE, SMALL))
    with managed(training, endpoint=daemon.endpoint) as job:
        memory = job.residency.memory
        assert isinstance(memory, DeviceMemory)
        for _ in range(3):
            training.steps(1)
            with job.residency.session.lock:
                memory.check_invariants()


@pytest.mark.parametrize(
    ("device", "error", "remedy"),
    [
        ("emulated", InvalidArgument, "as in 'emulated:256MiB'"),
        ("emulated:4KiB", InvalidArgument, "at least 1 MiB"),
        ("emulated:much", InvalidArgument, "'much' is not understood"),
        ("tpu:1GiB", InvalidArgument, "'tpu:1GiB' is not known"),
    ],
)
def test_what_is_no_device_is_refused_before_anything_starts(
    device: str, error: type[Exception], remedy: str, tmp_path: Path
) -> None:
    model, optimizer, _ = make()
    with pytest.raises(error, match=remedy):
        tiermem.attach(model, optimizer, dram=LARGE, device=device, flash=tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_device_too_small_for_what_is_computed_with_at_once_leaves_the_script_as_it_was(daemon: Daemon) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(512, 1024), torch.nn.Linear(1024, 512))
    before = {name: value.clone() for name, value in model.state_dict().items()}

    class Whole(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = torch.nn.ModuleList([model])

    whole = Whole()
    with pytest.raises(ResourceExhausted, match=r"4\.0 MiB are computed with at once .* give it that much"):
        tiermem.attach(whole, dram=LARGE, endpoint=daemon.endpoint, device=f"emulated:{2 * MIB}")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def _flush_until_told(job: tiermem.Job) -> None:
    for _ in range(1000):
        job.flush()
        time.sleep(0.01)


def test_the_daemon_shows_what_the_trainer_reports(daemon: Daemon) -> None:
    """Of a job while it runs, and in totals that stay."""
    links = [str(DeviceKind.EMULATED.inward), str(DeviceKind.EMULATED.outward)]
    before = daemon.stats()
    model, optimizer, data = make()
    with tiermem.attach(model, optimizer, dram=LARGE, endpoint=daemon.endpoint, device=f"emulated:{MIB}") as job:
        train(model, optimizer, data, 2)
        job.flush()
        mine, now = job.stats(), daemon.stats()
        (row,) = now.jobs
        assert row.tiers["emulated"] == now.tiers["emulated"] == mine.tiers["emulated"]
        assert row.tiers["emulated"].capacity_bytes == MIB
        for link in links:
            assert row.links[link].bytes == mine.links[link].bytes > 0
            assert now.links[link].bytes - before.links[link].bytes == mine.links[link].bytes
        moved = job.residency.memory.stats().report
        assert moved is not None
        less = dataclasses.replace(moved, inward=LinkStats())
        job.residency.session.report_device(less)
        with pytest.raises(TiermemError, match="has fallen"):
            _flush_until_told(job)
        job.close()
    within(2.0, daemon.left_of_jobs)
    after = daemon.stats()
    assert after.tiers["emulated"].capacity_bytes == 0
    assert [after.links[link].bytes for link in links] == [now.links[link].bytes for link in links]
