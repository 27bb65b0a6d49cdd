"""The commands `tiermem` and `tiermemd`: parse, call, print.

Exit codes: 0 done, 1 internal error or a failed check, 2 usage or configuration, 3 no daemon answers, 4 not permitted,
5 no room, 6 already running, 7 I/O error, 8 data loss, 9 not found, 10 unsupported, 11 protocol. A typed error is one
line on standard error, never a traceback.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from tiermem import __version__
from tiermem.config import Host, LoadedConfig, load_config, socket_candidates
from tiermem.errors import Code, ConfigError, DaemonUnavailable, TiermemError
from tiermem_daemon.options import ServeOptions

EXIT_CODES: dict[Code, int] = {
    Code.INTERNAL: 1,
    Code.INVALID_ARGUMENT: 2,
    Code.CONFIG: 2,
    Code.DAEMON_UNAVAILABLE: 3,
    Code.DAEMON_TIMEOUT: 3,
    Code.PERMISSION_DENIED: 4,
    Code.RESOURCE_EXHAUSTED: 5,
    Code.WORKING_SET_TOO_LARGE: 5,
    Code.TIER_FULL: 5,
    Code.DIRECTORY_IN_USE: 6,
    Code.IO_ERROR: 7,
    Code.DATA_LOSS: 8,
    Code.NOT_FOUND: 9,
    Code.UNSUPPORTED: 10,
    Code.PROTOCOL: 11,
}

_Command = TypeVar("_Command", bound=Callable[..., Any])


def _options(*options: Callable[[_Command], _Command]) -> Callable[[_Command], _Command]:
    def decorate(command: _Command) -> _Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


_PATH = click.Path(path_type=Path)
_CONFIG = click.option("--config", "config_file", type=_PATH, help="TOML file instead of the user's or the system's.")
_SOCKET = click.option("--socket", type=_PATH, help="Unix socket of the daemon.")
_FLASH = click.option("--flash", multiple=True, metavar="DIR[:SIZE]", help="Flash directory; may be repeated.")
_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
_DAEMON_OPTIONS = _options(
    _CONFIG,
    _SOCKET,
    _FLASH,
    click.option("--dram", metavar="SIZE", help='DRAM of the pool, "8GiB" or "50%" of the memory.'),
    click.option("--metrics-port", type=int, help="Serve /metrics, /healthz, /readyz there; 0 takes a free port."),
    click.option("--log-level", type=click.Choice(["debug", "info", "warning", "error"])),
    click.option("--log-format", type=click.Choice(["text", "json"])),
)


class _Group(click.Group):
    """Turns every typed error into one line and its exit code."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except TiermemError as error:
            click.echo(f"tiermem: {error}", err=True)
            ctx.exit(EXIT_CODES[error.code])


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """GPU memory, pinned DRAM and NVMe flash as one pool for fine-tuning."""


@main.command()
@_DAEMON_OPTIONS
@click.option("--owner-pid", type=int, hidden=True)
@click.option("--ready-fd", type=int, hidden=True)
@click.option("--embedded", is_flag=True, hidden=True)
@click.option("--fault-script", hidden=True)
@click.option("--remove-at-exit", type=_PATH, multiple=True, hidden=True)
@click.pass_context
def serve(
    ctx: click.Context,
    /,
    owner_pid: int | None,
    ready_fd: int | None,
    embedded: bool,
    fault_script: str | None,
    remove_at_exit: tuple[Path, ...],
    **given: Any,
) -> None:
    """Run the daemon until SIGTERM."""
    loaded = _load(**given)
    if not loaded.config.flash:
        raise ConfigError("no flash directory is configured; give one with --flash DIR, TIERMEM_FLASH or [[flash]]")
    from tiermem_daemon.app import run  # the other commands need no store

    ctx.exit(run(loaded, ServeOptions(owner_pid, ready_fd, embedded, fault_script, remove_at_exit)))


@main.command()
@_options(_CONFIG, _SOCKET, _JSON)
@click.option("--job", default="", help="Only this job.")
def status(config_file: Path | None, socket: Path | None, as_json: bool, job: str) -> None:
    """Tiers, links and jobs of the running daemon."""
    from tiermem_daemon import status_view

    stats_json = status_view.fetch(_daemon_socket(config_file, socket), job)
    if as_json:
        click.echo(json.dumps(json.loads(stats_json), indent=2))
    else:
        status_view.show(status_view.decode(stats_json), sys.stdout)


@main.command()
@_options(_CONFIG, _SOCKET)
@click.option("--out", type=_PATH, required=True, help="File to write.")
@click.option("--job", default="", help="Of this job; may be left out where only one runs.")
@click.option("--seconds", type=float, help="What happened in the last so many seconds, instead of one step.")
def trace(config_file: Path | None, socket: Path | None, out: Path, job: str, seconds: float | None) -> None:
    """Write a job's last training step as a trace of trainer and daemon, for https://ui.perfetto.dev."""
    from tiermem_daemon import trace_view

    click.echo(trace_view.save(_daemon_socket(config_file, socket), out, job, seconds))


@main.command()
@_options(_CONFIG, _SOCKET)
@click.pass_context
def health(ctx: click.Context, config_file: Path | None, socket: Path | None) -> None:
    """Exit 0 where the daemon serves, 1 where it starts or stops, 3 where none answers."""
    from tiermem_daemon import status_view

    state = status_view.check_health(_daemon_socket(config_file, socket))
    click.echo(state)
    ctx.exit(0 if state == "SERVING" else 1)


@main.command()
@_options(_CONFIG, _FLASH, _JSON)
@click.pass_context
def doctor(ctx: click.Context, config_file: Path | None, flash: tuple[str, ...], as_json: bool) -> None:
    """Check this machine: what works, what does not, what to do. Exit 1 where something fails."""
    from tiermem_daemon.doctor import Level, diagnose

    findings = list(diagnose(_load(config_file=config_file, flash=flash)))
    if as_json:
        table = [{"check": f.check, "level": f.level.value, "text": f.text, "remedy": f.remedy} for f in findings]
        click.echo(json.dumps(table, indent=2))
    else:
        colours = {Level.OK: "green", Level.WARN: "yellow", Level.FAIL: "red"}
        for finding in findings:
            word = click.style(f"{finding.level.value:5}", fg=colours[finding.level])
            click.echo(f"{word} {finding.check}: {finding.text}")
            if finding.remedy:
                click.echo(f"      -> {finding.remedy}")
    ctx.exit(int(any(finding.level is Level.FAIL for finding in findings)))


@main.group()
def config() -> None:
    """The configuration."""


@config.command()
@_DAEMON_OPTIONS
@click.option("--origin", is_flag=True, help="Say where each value comes from.")
@_JSON
def show(origin: bool, as_json: bool, **given: Any) -> None:
    """The configuration that `serve` would use with the same options, as TOML."""
    from tiermem_daemon import config_view

    loaded = _load(**given)
    click.echo(config_view.as_json(loaded) if as_json else config_view.as_toml(loaded, origin), nl=as_json)


@main.command()
def version() -> None:
    """The version of tiermem."""
    click.echo(f"tiermem {__version__}")


def serve_main() -> None:
    """`tiermemd`: the same as `tiermem serve`."""
    main(["serve", *sys.argv[1:]], prog_name="tiermemd")


def _load(
    config_file: Path | None = None,
    socket: Path | None = None,
    flash: tuple[str, ...] = (),
    dram: str | None = None,
    metrics_port: int | None = None,
    log_level: str | None = None,
    log_format: str | None = None,
) -> LoadedConfig:
    options = {
        "daemon.socket": socket,
        "flash": flash or None,
        "dram.size": dram,
        "daemon.metrics_port": metrics_port,
        "daemon.log_level": log_level,
        "daemon.log_format": log_format,
    }
    return load_config(options, os.environ, config_file)


def _daemon_socket(config_file: Path | None, socket: Path | None) -> Path:
    """The one that was configured, or else the first place where a daemon has left a socket."""
    loaded = _load(config_file, socket)
    if loaded.origins["daemon.socket"] != "default":
        candidates: tuple[Path, ...] = (loaded.config.daemon.socket,)
    else:
        candidates = socket_candidates(os.environ, Host.current())
    for candidate in candidates:
        if candidate.exists():
            return candidate
    places = " or ".join(map(str, candidates))
    raise DaemonUnavailable(f"no daemon answers at {places}; start one with `tiermem serve`, or give --socket")
