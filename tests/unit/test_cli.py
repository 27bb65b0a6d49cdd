"""The commands, through click's runner; the daemon behind them is a gRPC server of the test's own."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
import tomllib
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from click.testing import CliRunner, Result
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from tiermem import __version__
from tiermem.config import Host, LoadedConfig, load_config
from tiermem.errors import Code, DirectoryInUse, error_for
from tiermem.rpc.v1 import tiermem_pb2 as pb
from tiermem.rpc.v1 import tiermem_pb2_grpc as pb_grpc
from tiermem.stats import DirectoryStats, JobStats, Link, LinkStats, StallCause, StoreStats, TierStats
from tiermem.units import GIB, MIB
from tiermem_daemon.cli import EXIT_CODES, main, serve_main
from tiermem_daemon.health import SERVICE
from tiermem_daemon.options import ServeOptions

REPOSITORY = Path(__file__).parents[2]
STATS = StoreStats(
    tiers={"dram": TierStats(4 * GIB, GIB), "flash": TierStats(100 * GIB, 7 * GIB)},
    links={Link.FLASH_TO_DRAM: LinkStats(bytes=2 * GIB, transfers=9, seconds=2.0)},
    directories=(DirectoryStats("/mnt/a", 100 * GIB, 7 * GIB, errors={"EIO": 3}, direct_io=False),),
    jobs=(
        JobStats(
            "tune", "s1", 77, tiers={"dram": TierStats(GIB, 13 * MIB)}, hits=41, stall_seconds={StallCause.LOAD: 1.5}
        ),
    ),
    sessions_opened=1,
    sessions_ended={},
    errors={"IO_ERROR": 3, "DATA_LOSS": 0},
)

Invoke = Callable[..., Result]


@pytest.fixture
def invoke(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Invoke:
    """Runs `tiermem` for a user without any configuration."""
    for name in ("XDG_CONFIG_HOME", "RUNTIME_DIRECTORY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))

    def invoke(*arguments: str | Path) -> Result:
        return CliRunner().invoke(main, [str(argument) for argument in arguments], catch_exceptions=False)

    return invoke


class Daemon(pb_grpc.TierMemServicer):
    """Answers GetStatus as a daemon does."""

    def GetStatus(self, request: pb.GetStatusRequest, context: grpc.ServicerContext) -> pb.GetStatusResponse:
        if request.job not in ("", "tune"):
            context.abort(grpc.StatusCode.NOT_FOUND, f"NOT_FOUND: no job {request.job!r} is running here")
        return pb.GetStatusResponse(stats_json=json.dumps(dataclasses.asdict(STATS)).encode())


@contextmanager
def running(socket: Path, status: int) -> Iterator[None]:
    socket.parent.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(2) as pool:
        server = grpc.server(pool)
        pb_grpc.add_TierMemServicer_to_server(Daemon(), server)  # type: ignore[no-untyped-call]  # generated
        servicer = health.HealthServicer()
        servicer.set(SERVICE, status)
        health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
        server.add_insecure_port(f"unix:{socket}")
        server.start()
        yield
        server.stop(None).wait()


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Path]:
    """A daemon at the user's default socket."""
    socket = tmp_path / "run" / "tiermem" / "tiermemd.sock"
    with running(socket, health_pb2.HealthCheckResponse.SERVING):
        yield socket


def test_status_shows_tiers_links_directories_and_jobs(invoke: Invoke, daemon: Path) -> None:
    for arguments in ((), ("--socket", daemon)):
        result = invoke("status", *arguments)
        assert result.exit_code == 0
        words = result.output.split()
        for word in ("dram", "25", "flash_to_dram", "/mnt/a", "EIO", "tune", "77", "41", "IO_ERROR"):
            assert word in words, result.output
        for text in ("4 GiB", "1 GiB/s", "13 MiB", "1.5 s", "page cache"):
            assert text in result.output
        assert "DATA_LOSS" not in result.output  # nothing was lost


def test_status_as_json_is_the_snapshot(invoke: Invoke, daemon: Path) -> None:
    result = invoke("status", "--json", "--job", "tune")
    assert json.loads(result.output) == json.loads(json.dumps(dataclasses.asdict(STATS)))


def test_an_error_of_the_daemon_is_one_line_and_its_code(invoke: Invoke, daemon: Path) -> None:
    result = invoke("status", "--job", "other")
    assert (result.exit_code, result.stdout) == (9, "")
    assert result.stderr == "tiermem: no job 'other' is running here\n"


def test_no_daemon_is_exit_code_3_and_one_line(invoke: Invoke, tmp_path: Path) -> None:
    for command in ("status", "health"):
        result = invoke(command, "--socket", tmp_path / "none.sock")
        assert (result.exit_code, result.stdout) == (3, "")
        assert result.stderr.startswith(f"tiermem: no daemon answers at {tmp_path}/none.sock")
        assert result.stderr.count("\n") == 1
        (tmp_path / "dead.sock").touch()
        result = invoke(command, "--socket", tmp_path / "dead.sock")
        assert (result.exit_code, result.stderr.count("\n")) == (3, 1)


@pytest.mark.parametrize(("status", "code"), [("SERVING", 0), ("NOT_SERVING", 1)])
def test_health_is_an_exit_code(invoke: Invoke, tmp_path: Path, status: str, code: int) -> None:
    with running(tmp_path / "h.sock", health_pb2.HealthCheckResponse.ServingStatus.Value(status)):
        result = invoke("health", "--socket", tmp_path / "h.sock")
    assert (result.exit_code, result.output) == (code, f"{status}\n")


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch) -> list[tuple[LoadedConfig, ServeOptions]]:
    """Stands for the daemon itself; collects what it is started with."""
    calls: list[tuple[LoadedConfig, ServeOptions]] = []

    def run(loaded: LoadedConfig, options: ServeOptions) -> int:
        calls.append((loaded, options))
        if options.fault_script == "in use":
            raise DirectoryInUse("flash directory /x is in use; give another")
        return 17

    module = types.ModuleType("tiermem_daemon.app")
    module.__dict__["run"] = run
    monkeypatch.setitem(sys.modules, "tiermem_daemon.app", module)
    return calls


def test_serve_hands_over_every_option(
    invoke: Invoke, app: list[tuple[LoadedConfig, ServeOptions]], tmp_path: Path
) -> None:
    (tmp_path / "c.toml").write_text("[mover]\nworkers_per_directory = 9\n")
    options = "--owner-pid 5 --ready-fd 6 --embedded --fault-script x --dram 1GiB --metrics-port 0 --log-level debug"
    result = invoke(
        "serve",
        *options.split(),
        *("--log-format", "json", "--flash", "/a:2GiB", "--flash", "/b"),
        *("--config", tmp_path / "c.toml", "--socket", "/s"),
    )
    assert result.exit_code == 17
    [(loaded, given)] = app
    assert given == ServeOptions(owner_pid=5, ready_fd=6, embedded=True, fault_script="x")
    config = loaded.config
    assert loaded.dram_bytes == GIB
    assert (config.daemon.metrics_port, config.daemon.log_level, config.daemon.log_format) == (0, "debug", "json")
    assert config.mover.workers_per_directory == 9
    assert config.daemon.socket == Path("/s")
    assert [(str(d.path), d.limit_bytes(1)) for d in config.flash] == [("/a", 2 * GIB), ("/b", 1)]


def test_serve_without_flash_is_refused_with_the_remedy(
    invoke: Invoke, app: list[tuple[LoadedConfig, ServeOptions]]
) -> None:
    result = invoke("serve")
    assert (result.exit_code, app) == (2, [])
    assert "--flash DIR" in result.stderr


def test_an_error_while_serving_is_one_line(invoke: Invoke, app: list[tuple[LoadedConfig, ServeOptions]]) -> None:
    result = invoke("serve", "--flash", "/x", "--fault-script", "in use")
    assert (result.exit_code, result.stderr) == (6, "tiermem: flash directory /x is in use; give another\n")


def test_tiermemd_is_tiermem_serve(
    invoke: Invoke, app: list[tuple[LoadedConfig, ServeOptions]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["tiermemd", "--flash", "/x"])
    with pytest.raises(SystemExit) as end:
        serve_main()
    assert (end.value.code, len(app)) == (17, 1)


def test_every_error_has_an_exit_code_of_its_kind() -> None:
    assert EXIT_CODES.keys() == set(Code)
    assert all(1 <= code <= 11 for code in EXIT_CODES.values())
    assert EXIT_CODES[error_for("DAEMON_TIMEOUT", "").code] == EXIT_CODES[error_for("DAEMON_UNAVAILABLE", "").code] == 3


def test_config_show_prints_what_the_loader_reads_again(invoke: Invoke, tmp_path: Path) -> None:
    options = ("--dram", "12.5%", "--flash", "/a:1GiB", "--flash", '/b "c"', "--metrics-port", "0")
    result = invoke("config", "show", *options)
    assert result.exit_code == 0
    file = tmp_path / "shown.toml"
    file.write_text(result.output)
    host = Host(tmp_path, tmp_path, uid=1, memory_total_bytes=GIB)
    shown = load_config({}, {}, file, host).config
    given = json.loads(invoke("config", "show", "--json", *options).output)
    assert shown.dram.size.of(8) == 1
    assert [str(d.path) for d in shown.flash] == ["/a", '/b "c"'] == [d["path"] for d in given["config"]["flash"]]
    assert given["config"]["daemon"]["metrics_port"] == shown.daemon.metrics_port == 0
    assert given["origins"]["dram.size"] == "command line"
    assert given["origins"]["mover.workers_per_directory"] == "default"


def test_config_show_names_origins(invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / ".config" / "tiermem" / "tiermem.toml"
    file.parent.mkdir(parents=True)
    file.write_text("[sessions]\nalive_interval_s = 3.5\n")
    monkeypatch.setenv("TIERMEM_DRAM__SIZE", "1GiB")
    lines = invoke("config", "show", "--origin", "--log-level", "error").output.splitlines()
    assert f"alive_interval_s = 3.5  # {file}" in lines
    assert "size = 1073741824  # environment variable TIERMEM_DRAM__SIZE (1 GiB)" in lines
    assert 'log_level = "error"  # command line' in lines
    assert "# metrics_port is off  # default" in lines
    assert "# no [[flash]] directory  # default" in lines
    tomllib.loads("\n".join(lines))


def test_a_wrong_configuration_is_one_line_everywhere(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIERMEM_DRAM__SIZ", "1GiB")
    for command in (["serve"], ["status"], ["doctor"], ["health"], ["config", "show"]):
        result = invoke(*command)
        assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
        assert "TIERMEM_DRAM__SIZE" in result.stderr


def test_doctor_prints_lines_and_json(invoke: Invoke, tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    good = invoke("doctor", "--flash", tmp_path)
    assert "ok    shared memory: " in good.output
    bad = invoke("doctor", "--flash", gone)
    assert bad.exit_code == 1
    assert f"fail  flash {gone}: is not a directory\n      -> mkdir" in bad.output
    table = json.loads(invoke("doctor", "--json", "--flash", gone).output)
    assert [row["level"] for row in table if row["check"] == f"flash {gone}"] == ["fail"]


def test_version(invoke: Invoke) -> None:
    assert invoke("version").output == f"tiermem {__version__}\n"


def test_the_example_file_is_accepted_and_tells_the_defaults(tmp_path: Path) -> None:
    host = Host(tmp_path, tmp_path, uid=0, memory_total_bytes=GIB, system_file=tmp_path / "none.toml")
    example = load_config({}, {}, REPOSITORY / "daemon/systemd/tiermem.example.toml", host).config
    default = load_config({}, {}, None, host).config
    for section in ("daemon", "dram", "mover", "sessions"):
        assert getattr(example, section) == getattr(default, section)
    assert [str(d.path) for d in example.flash] == ["/var/lib/tiermem"]


def test_the_unit_file_is_valid(tmp_path: Path) -> None:
    systemd_analyze = shutil.which("systemd-analyze")
    if systemd_analyze is None:
        pytest.skip("systemd-analyze is not installed")
    text = (REPOSITORY / "daemon/systemd/tiermemd.service").read_text()
    unit = tmp_path / "tiermemd.service"
    unit.write_text(text.replace("/usr/bin/tiermemd", sys.executable))
    checked = subprocess.run([systemd_analyze, "verify", unit], capture_output=True, text=True, timeout=60)
    assert (checked.returncode, checked.stderr) == (0, "")


def test_the_containers_fit_together() -> None:
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    compose = yaml.safe_load((REPOSITORY / "docker/compose.yaml").read_text())
    prometheus = yaml.safe_load((REPOSITORY / "docker/prometheus.yml").read_text())
    dockerfile = (REPOSITORY / "docker/Dockerfile").read_text()
    assert set(compose["services"]) == {"tiermemd", "prometheus"}
    [target] = prometheus["scrape_configs"][0]["static_configs"][0]["targets"]
    host, port = target.split(":")
    assert host in compose["services"]
    assert f"EXPOSE {port}" in dockerfile
    used = {volume.split(":")[0] for s in compose["services"].values() for volume in s["volumes"]}
    assert {name for name in used if name.isalpha()} <= set(compose["volumes"])
    # What the image sets for the daemon, the daemon accepts.
    environ = dict(
        line.strip().removeprefix("ENV ").removesuffix(" \\").split("=", 1)
        for line in dockerfile.splitlines()
        if line.strip().startswith(("TIERMEM_", "RUNTIME_DIRECTORY"))
    )
    loaded = load_config({}, environ, None, Host(Path("/"), Path("/"), 990, GIB, Path("/none")))
    assert str(loaded.config.daemon.metrics_port) == port
    assert loaded.config.daemon.socket == Path("/run/tiermem/tiermemd.sock")
    assert [str(d.path) for d in loaded.config.flash] == ["/var/lib/tiermem"]
