"""Configuration: precedence, origins, refusals."""

from __future__ import annotations

from pathlib import Path

import pytest

from tiermem.config import (
    KEYS,
    FlashDirectory,
    Host,
    LoadedConfig,
    Size,
    default_socket,
    load_config,
    socket_candidates,
)
from tiermem.errors import ConfigError, InvalidArgument
from tiermem.units import GIB, MIB


@pytest.fixture
def host(tmp_path: Path) -> Host:
    home, cwd = tmp_path / "home", tmp_path / "cwd"
    home.mkdir()
    cwd.mkdir()
    return Host(home, cwd, uid=1000, memory_total_bytes=8 * GIB, system_file=tmp_path / "etc.toml")


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_defaults_need_no_file(host: Host) -> None:
    loaded = load_config({}, {}, None, host)
    config = loaded.config
    assert config.daemon.socket == host.home / ".cache/tiermem/run/tiermemd.sock"
    assert (config.daemon.metrics_port, config.daemon.metrics_host) == (None, "127.0.0.1")
    assert (config.dram.default_job_share, config.mover.workers_per_directory) == (0.5, 4)
    assert (config.sessions.alive_interval_s, config.flash) == (1.0, ())
    assert loaded.dram_bytes == 4 * GIB
    assert loaded.origins == dict.fromkeys(KEYS, "default")


def test_command_line_beats_environment_beats_file_and_every_origin_is_kept(host: Host) -> None:
    file = write(
        host.cwd / "t.toml",
        '[dram]\nsize = "1GiB"\n[daemon]\nlog_level = "debug"\nmetrics_port = 0\n[mover]\nworkers_per_directory = 2\n',
    )
    environ = {"TIERMEM_DRAM__SIZE": "2GiB", "TIERMEM_DAEMON__METRICS_PORT": "9876", "PATH": "/bin"}
    loaded = load_config({"dram.size": "25%", "daemon.log_level": None}, environ, file, host)
    assert loaded.dram_bytes == 2 * GIB  # a quarter of 8 GiB
    assert loaded.config.daemon.metrics_port == 9876
    assert loaded.config.daemon.log_level == "debug"
    assert loaded.config.mover.workers_per_directory == 2
    assert loaded.origins["dram.size"] == "command line"
    assert loaded.origins["daemon.metrics_port"] == "environment variable TIERMEM_DAEMON__METRICS_PORT"
    assert loaded.origins["daemon.log_level"] == str(file)
    assert loaded.origins["daemon.log_format"] == "default"


def test_the_users_file_is_read_before_the_systems(host: Host) -> None:
    write(host.system_file, '[dram]\nsize = "1GiB"\n')
    assert load_config({}, {}, None, host).origins["dram.size"] == str(host.system_file)
    user = write(host.home / ".config/tiermem/tiermem.toml", '[dram]\nsize = "2GiB"\n')
    assert load_config({}, {}, None, host).origins["dram.size"] == str(user)
    other = write(host.home / "xdg/tiermem/tiermem.toml", '[dram]\nsize = "3GiB"\n')
    loaded = load_config({}, {"XDG_CONFIG_HOME": str(host.home / "xdg")}, None, host)
    assert (loaded.origins["dram.size"], loaded.dram_bytes) == (str(other), 3 * GIB)


def test_flash_directories_from_each_layer(host: Host) -> None:
    file = write(host.cwd / "t.toml", '[[flash]]\npath = "cache"\nsize = "50%"\n[[flash]]\npath = "/mnt/b"\n')

    def flash(cli: dict[str, object], environ: dict[str, str]) -> tuple[FlashDirectory, ...]:
        return load_config(cli, environ, file, host).config.flash

    from_file = (
        FlashDirectory(path=host.cwd / "cache", size=Size(percent=50)),  # relative to the file
        FlashDirectory(path=Path("/mnt/b")),
    )
    assert flash({}, {}) == from_file
    assert [d.limit_bytes(1000) for d in from_file] == [500, 1000]
    assert flash({}, {"TIERMEM_FLASH": "/mnt/c:1GiB,~/d"}) == (
        FlashDirectory(path=Path("/mnt/c"), size=Size(nbytes=GIB)),
        FlashDirectory(path=host.home / "d"),
    )
    assert flash({"flash": ("e:0.5MiB", "/a:b")}, {"TIERMEM_FLASH": "/mnt/c"}) == (
        FlashDirectory(path=host.cwd / "e", size=Size(nbytes=MIB // 2)),
        FlashDirectory(path=Path("/a:b")),  # a colon in a name, not a size
    )
    assert flash({}, {"TIERMEM_FLASH": ""}) == ()


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ('[dram]\nszie = "1GiB"\n', ["'dram.szie'", "t.toml", "'dram.size'"]),
        ("[drma]\nsize = 1\n", ["'drma'", "t.toml", "'dram'"]),
        ("dram = 5\n", ["dram", "5", "t.toml"]),
        ('[dram]\nsize = "much"\n', ["dram.size", "'much'", "t.toml"]),
        ('[dram]\nsize = "0%"\n', ["dram.size", "'0%'", "t.toml"]),
        ("[dram]\nsize = 0\n", ["dram.size", "above zero", "t.toml"]),
        ("[dram]\nsize = true\n", ["dram.size", "True", "t.toml"]),
        ("[dram]\ndefault_job_share = 1.5\n", ["dram.default_job_share", "1.5", "t.toml"]),
        ('[mover]\nworkers_per_directory = "4"\n', ["mover.workers_per_directory", "'4'", "t.toml"]),
        ("[daemon]\nmetrics_port = 70000\n", ["daemon.metrics_port", "70000", "t.toml"]),
        ('[daemon]\nlog_level = "loud"\n', ["daemon.log_level", "loud", "t.toml"]),
        ("[daemon]\nsocket = 5\n", ["daemon.socket", "5", "t.toml"]),
        ('[[flash]]\npath = "/a"\nsze = 1\n', ["'flash.sze'", "t.toml", "'flash.size'"]),
        ('[[flash]]\nsize = "1GiB"\n', ["flash.path", "t.toml"]),
        ('[[flash]]\npath = "/a"\nsize = "x"\n', ["flash.size", "'x'", "/a", "t.toml"]),
        ('[[flash]]\npath = "/a"\n[[flash]]\npath = "/b/../a"\n', ["/a", "twice", "t.toml"]),
        ('flash = "/a"\n', ["flash", "t.toml"]),
        ("[dram\n", ["t.toml", "TOML"]),
    ],
)
def test_a_wrong_file_is_refused_with_key_value_and_file(host: Host, text: str, names: list[str]) -> None:
    file = write(host.cwd / "t.toml", text)
    with pytest.raises(ConfigError) as refused:
        load_config({}, {}, file, host)
    assert [name for name in names if name not in str(refused.value)] == []


def test_unknown_environment_variables_are_refused_with_the_nearest_name(host: Host) -> None:
    with pytest.raises(ConfigError, match=r"TIERMEM_DRAM_SIZE.*TIERMEM_DRAM__SIZE"):
        load_config({}, {"TIERMEM_DRAM_SIZE": "1GiB"}, None, host)
    with pytest.raises(ConfigError, match=r"dram\.size = 'x' in environment variable TIERMEM_DRAM__SIZE"):
        load_config({}, {"TIERMEM_DRAM__SIZE": "x"}, None, host)


def test_variables_of_the_training_process_are_left_to_it(host: Host) -> None:
    environ = {"TIERMEM_ENDPOINT": "unix:/x", "TIERMEM_TIMEOUT_S": "not read here"}
    assert load_config({}, environ, None, host) == load_config({}, {}, None, host)


def test_a_named_file_must_exist(host: Host) -> None:
    with pytest.raises(ConfigError, match=r"missing\.toml cannot be read"):
        load_config({}, {}, Path("missing.toml"), host)


def test_unknown_option_key_is_refused(host: Host) -> None:
    with pytest.raises(ConfigError, match=r"dram\.sizes.*dram\.size"):
        load_config({"dram.sizes": 1}, {}, None, host)


def test_lists_of_users(host: Host) -> None:
    def uids(loaded: LoadedConfig) -> tuple[int, ...]:
        return loaded.config.daemon.allowed_uids

    assert uids(load_config({}, {"TIERMEM_DAEMON__ALLOWED_UIDS": "1000,1001"}, None, host)) == (1000, 1001)
    file = write(host.cwd / "t.toml", "[daemon]\nallowed_uids = [7]\n")
    assert uids(load_config({}, {}, file, host)) == (7,)


def test_default_socket_follows_service_then_user_session_then_user(host: Host) -> None:
    root = Host(host.home, host.cwd, uid=0, memory_total_bytes=GIB)
    service = {"RUNTIME_DIRECTORY": "/run/a:/run/b", "XDG_RUNTIME_DIR": "/run/user/5"}
    assert default_socket(service, host) == Path("/run/a/tiermemd.sock")
    assert default_socket({"XDG_RUNTIME_DIR": "/run/user/5"}, host) == Path("/run/user/5/tiermem/tiermemd.sock")
    assert default_socket({}, root) == Path("/run/tiermem/tiermemd.sock")
    assert socket_candidates({}, root) == (Path("/run/tiermem/tiermemd.sock"),)
    assert socket_candidates({}, host)[1:] == (Path("/run/tiermem/tiermemd.sock"),)


def test_a_socket_path_that_the_kernel_cannot_hold_is_refused(host: Host) -> None:
    longest = "/" + "s" * 103
    assert load_config({"daemon.socket": longest}, {}, None, host).config.daemon.socket == Path(longest)
    with pytest.raises(ConfigError, match="104 bytes"):
        load_config({"daemon.socket": longest + "s"}, {}, None, host)


def test_sizes() -> None:
    assert Size.parse("12.5%").of(80) == 10
    assert Size.parse("1KiB").of(5) == Size.parse(1024).of(5) == 1024
    assert [str(Size.parse(text)) for text in ("50%", "1KiB")] == ["50%", "1024"]
    for wrong in ("101%", "-1", "", "5 XB", None, 1.5):
        with pytest.raises(InvalidArgument):
            Size.parse(wrong)


def test_the_machine_is_described(tmp_path: Path) -> None:
    host = Host.current()
    assert host.home.is_absolute()
    assert host.cwd.is_absolute()
    assert 16 * MIB < host.memory_total_bytes < 1 << 50
