"""What `attach` accepts and what it refuses; after a refusal model and optimizer are as they were."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import tiermem
from tests.integration.daemon_process import Daemon, serve, trainer, within
from tests.integration.scripts import BlockModel, default_loss
from tests.integration.tiny_training import DRAM, fingerprint, make, plain_fingerprint, train
from tiermem.errors import DaemonUnavailable, InvalidArgument, ResourceExhausted, TiermemError, Unsupported
from tiermem.units import MIB


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with serve(tmp_path_factory.mktemp("attach")) as running:
        yield running


@pytest.fixture(autouse=True)
def _frees_everything(daemon: Daemon) -> Iterator[None]:
    yield
    within(2, daemon.left_of_jobs)


@pytest.mark.parametrize(
    ("size", "expected_bytes"), [(2 * MIB, 2 * MIB), ("2MiB", 2 * MIB), (" 1.5 MiB ", 3 * MIB // 2)]
)
def test_sizes_are_bytes_or_text(daemon: Daemon, size: int | str, expected_bytes: int) -> None:
    model, optimizer, _ = make()
    with tiermem.attach(model, optimizer, dram=size, endpoint=daemon.endpoint, flash="64MiB") as job:
        stats = job.stats()
        assert stats.tiers["dram"].capacity_bytes == expected_bytes
        assert stats.tiers["flash"].capacity_bytes == 64 * MIB


def untouched(model: BlockModel, optimizer: torch.optim.Optimizer, data: Iterator[torch.Tensor]) -> None:
    """It trains as if nothing had been tried."""
    train(model, optimizer, data, 2)
    assert fingerprint(model, optimizer) == plain_fingerprint(2)


@pytest.mark.parametrize("endpoint", ["service", "embedded"])
@pytest.mark.parametrize("size", [-1, 0, "0", "banana", "", "-4MiB", "4 bananas", 100, 1 << 62, True, 1.5])
def test_sizes_that_make_no_sense_are_refused(daemon: Daemon, tmp_path: Path, size: object, endpoint: str) -> None:
    model, optimizer, data = make()
    where = daemon.endpoint if endpoint == "service" else "embedded"
    flash = None if endpoint == "service" else str(tmp_path / "flash")
    with pytest.raises(InvalidArgument):
        tiermem.attach(model, optimizer, dram=size, endpoint=where, flash=flash)  # type: ignore[call-overload]
    untouched(model, optimizer, data)


@pytest.mark.parametrize("flash", ["banana", "-1", 0, -1])
def test_a_services_flash_is_a_size(daemon: Daemon, flash: int | str) -> None:
    model, optimizer, _ = make()
    with pytest.raises(InvalidArgument, match="size"):
        tiermem.attach(model, optimizer, dram=DRAM, endpoint=daemon.endpoint, flash=flash)
    with tiermem.attach(model, optimizer, dram=DRAM, endpoint=daemon.endpoint, flash=32 * MIB) as job:
        assert job.stats().tiers["flash"].capacity_bytes == 32 * MIB


def test_an_embedded_daemons_flash_is_a_directory() -> None:
    model, optimizer, data = make()
    with pytest.raises(InvalidArgument, match="directory"):
        tiermem.attach(model, optimizer, dram=DRAM, endpoint="embedded", flash=32 * MIB)
    untouched(model, optimizer, data)


@pytest.mark.parametrize("form", ["unix:{}", "{}", "path"])
def test_endpoints(daemon: Daemon, form: str) -> None:
    model, optimizer, data = make()
    endpoint = daemon.socket if form == "path" else form.format(daemon.socket)
    with tiermem.attach(model, optimizer, dram=DRAM, endpoint=endpoint) as job:
        assert job.daemon is None
        train(model, optimizer, data)


@pytest.mark.parametrize("endpoint", ["http://localhost:50051", "localhost:50051", "tcp://1.2.3.4:5"])
def test_endpoints_that_are_no_socket_are_refused(endpoint: str) -> None:
    model, optimizer, data = make()
    with pytest.raises(InvalidArgument, match="not a Unix socket"):
        tiermem.attach(model, optimizer, dram=DRAM, endpoint=endpoint)
    untouched(model, optimizer, data)


def test_an_endpoint_from_the_environment(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIERMEM_ENDPOINT", daemon.endpoint)
    model, optimizer, data = make()
    with tiermem.attach(model, optimizer, dram=DRAM) as job:
        train(model, optimizer, data)
        assert job.daemon is None
        assert [row.job for row in daemon.stats().jobs] == [job.name]


def test_the_argument_is_before_the_environment(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIERMEM_ENDPOINT", "/nowhere/at/all.sock")
    model, optimizer, _ = make()
    with pytest.raises(DaemonUnavailable, match=r"/nowhere/at/all\.sock"):
        tiermem.attach(model, optimizer, dram=DRAM, timeout_s=1)
    with tiermem.attach(model, optimizer, dram=DRAM, endpoint=daemon.endpoint):
        assert daemon.stats().jobs


def test_the_default_flash_directory_is_private_and_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIERMEM_FLASH", str(tmp_path / "place"))
    model, optimizer, data = make()
    with tiermem.attach(model, optimizer, dram=DRAM, endpoint="embedded"):
        train(model, optimizer, data)
        (private,) = (tmp_path / "place").iterdir()
        assert private.stat().st_mode & 0o777 == 0o700
        assert list(private.glob("segment-*.tiermem"))
    assert list((tmp_path / "place").iterdir()) == []
    assert fingerprint(model, optimizer) == plain_fingerprint(1)


def test_without_settings_flash_is_under_the_users_cache_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TIERMEM_FLASH", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model, optimizer, _ = make()
    with tiermem.attach(model, optimizer, dram=DRAM, endpoint="embedded"):
        assert len(list((tmp_path / "tiermem" / "flash").iterdir())) == 1
    assert list((tmp_path / "tiermem" / "flash").iterdir()) == []


@pytest.mark.parametrize(("text", "argument"), [("soon", None), ("0", None), ("-1", None), ("20", 0.0), ("20", -5.0)])
def test_timeouts_that_make_no_sense_are_refused(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, text: str, argument: float | None
) -> None:
    monkeypatch.setenv("TIERMEM_TIMEOUT_S", text)
    model, optimizer, data = make()
    with pytest.raises(InvalidArgument, match=r"TIERMEM_TIMEOUT_S|timeout"):
        tiermem.attach(model, optimizer, dram=DRAM, endpoint=daemon.endpoint, timeout_s=argument)
    untouched(model, optimizer, data)


def test_a_timeout_from_the_environment(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIERMEM_TIMEOUT_S", "7.5")
    model, optimizer, _ = make()
    with tiermem.attach(model, optimizer, dram=DRAM, endpoint=daemon.endpoint) as job:
        assert job.residency.session.timeout_s == 7.5


def test_a_model_is_attached_once(daemon: Daemon) -> None:
    model, optimizer, data = make()
    with tiermem.attach(model, optimizer, dram=DRAM, endpoint=daemon.endpoint):
        train(model, optimizer, data)
        with pytest.raises(InvalidArgument, match="attached already"):
            tiermem.attach(model, optimizer, dram=DRAM, endpoint=daemon.endpoint)
        with pytest.raises(InvalidArgument, match="attached already"):
            tiermem.attach(nn.Sequential(model.blocks[0]), dram=DRAM, endpoint=daemon.endpoint)
        train(model, optimizer, data)
    assert fingerprint(model, optimizer) == plain_fingerprint(2)
    with tiermem.attach(model, optimizer, dram=DRAM, endpoint=daemon.endpoint):  # and again afterwards
        train(model, optimizer, data)
    assert fingerprint(model, optimizer) == plain_fingerprint(3)


def test_a_model_without_parameters_is_refused(daemon: Daemon) -> None:
    with pytest.raises(InvalidArgument, match="no parameters"):
        tiermem.attach(nn.Sequential(nn.ReLU()), dram=DRAM, endpoint=daemon.endpoint)


def test_what_is_no_model_or_no_optimizer_is_refused(daemon: Daemon) -> None:
    model, optimizer, data = make()
    with pytest.raises(InvalidArgument, match="Module"):
        tiermem.attach(optimizer, optimizer, endpoint=daemon.endpoint)  # type: ignore[call-overload]
    with pytest.raises(InvalidArgument, match="Optimizer"):
        tiermem.attach(model, model, endpoint=daemon.endpoint)  # type: ignore[call-overload]
    untouched(model, optimizer, data)


def test_an_optimizer_that_needs_a_closure_is_refused(daemon: Daemon) -> None:
    model, optimizer, data = make()
    with pytest.raises(Unsupported, match=r"LBFGS|closure"):
        tiermem.attach(model, torch.optim.LBFGS(model.parameters()), dram=DRAM, endpoint=daemon.endpoint)
    untouched(model, optimizer, data)


def test_a_closure_is_refused_and_the_job_goes_on(daemon: Daemon) -> None:
    model, optimizer, data = make()
    with tiermem.attach(model, optimizer, dram=DRAM, endpoint=daemon.endpoint):
        batch = next(data)

        def closure() -> torch.Tensor:
            return default_loss(model, batch)

        optimizer.zero_grad()
        default_loss(model, batch).backward()
        with pytest.raises(Unsupported, match="closure"):
            optimizer.step(closure)  # type: ignore[arg-type]
        optimizer.step()
        train(model, optimizer, data)
    assert fingerprint(model, optimizer) == plain_fingerprint(2)


def test_a_floor_that_does_not_fit_names_bundles_and_remedy(daemon: Daemon) -> None:
    model, optimizer, data = make(width=256, blocks=2)
    with pytest.raises(ResourceExhausted, match=r"param of blocks\.\d.*give the job at least [\d.]+ MiB of DRAM"):
        tiermem.attach(model, optimizer, dram=DRAM, endpoint=daemon.endpoint)
    train(model, optimizer, data, 2)
    assert fingerprint(model, optimizer) == plain_fingerprint(2, width=256, blocks=2)


def test_more_dram_than_there_is_names_what_is_free(daemon: Daemon) -> None:
    model, optimizer, data = make()
    with pytest.raises(ResourceExhausted, match=r"8 MiB of 8 MiB are free"):
        tiermem.attach(model, optimizer, dram="9MiB", endpoint=daemon.endpoint)
    untouched(model, optimizer, data)


def test_two_jobs_of_one_process_share_a_daemon(daemon: Daemon) -> None:
    one, two = make(), make(width=64, blocks=3)
    with tiermem.attach(one[0], one[1], dram=DRAM, endpoint=daemon.endpoint, job="one"):
        with tiermem.attach(two[0], two[1], dram="2MiB", endpoint=daemon.endpoint, job="two"):
            for _ in range(3):
                train(*one)
                train(*two)
            assert sorted(job.job for job in daemon.stats().jobs) == ["one", "two"]
    assert fingerprint(one[0], one[1]) == plain_fingerprint(3)
    assert fingerprint(two[0], two[1]) == plain_fingerprint(3, width=64, blocks=3)


def test_two_jobs_of_two_processes_share_a_daemon(daemon: Daemon, tmp_path: Path) -> None:
    script = f"""
    model, optimizer, data = make(width=64, blocks=3)
    with tiermem.attach(model, optimizer, dram="2MiB", endpoint={daemon.endpoint!r}, job="other"):
        train(model, optimizer, data)
        say("ready")
        input()
        train(model, optimizer, data, 2)
    say("result", fingerprint(model, optimizer))
    """
    model, optimizer, data = make()
    with trainer(script, tmp_path) as other:
        other.expect("ready")
        with tiermem.attach(model, optimizer, dram=DRAM, endpoint=daemon.endpoint, job="mine"):
            train(model, optimizer, data)
            other.tell()
            train(model, optimizer, data, 2)
            assert other.expect("result") == [plain_fingerprint(3, width=64, blocks=3)]
        assert other.wait() == 0, other.errors
    assert fingerprint(model, optimizer) == plain_fingerprint(3)


def test_a_job_name_is_used_once_at_a_time(daemon: Daemon) -> None:
    one, two = make(), make()
    with tiermem.attach(one[0], one[1], dram=DRAM, endpoint=daemon.endpoint, job="same"):
        with pytest.raises(InvalidArgument, match="'same' is running here already"):
            tiermem.attach(two[0], two[1], dram=DRAM, endpoint=daemon.endpoint, job="same")
        train(*one)
    untouched(*two)
    with tiermem.attach(two[0], two[1], dram=DRAM, endpoint=daemon.endpoint, job="same"):
        train(*two)


@pytest.mark.parametrize("name", ["x" * 201, "two\nlines"])
def test_job_names_that_make_no_sense_are_refused(daemon: Daemon, name: str) -> None:
    model, optimizer, data = make()
    with pytest.raises(TiermemError, match="job name"):
        tiermem.attach(model, optimizer, dram=DRAM, endpoint=daemon.endpoint, job=name)
    untouched(model, optimizer, data)
