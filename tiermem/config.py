"""The daemon's configuration: one tree of frozen values, and where each value came from.

Precedence: command line, then `TIERMEM_*` environment variables (`__` nests: TIERMEM_DRAM__SIZE), then one TOML file,
then defaults. A layer that names `flash` replaces the whole list of directories. Unknown keys are errors everywhere.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import msgspec
from msgspec import Meta

from tiermem.errors import ConfigError, InvalidArgument
from tiermem.units import format_size, parse_size

ENVIRONMENT_PREFIX = "TIERMEM_"
# Read by the training process only; set for both, they are not the daemon's mistakes.
CLIENT_VARIABLES = frozenset({"TIERMEM_ENDPOINT", "TIERMEM_TIMEOUT_S"})
SYSTEM_SOCKET = Path("/run/tiermem/tiermemd.sock")
SIDE_SOCKET_SUFFIX = ".fd"

_SOCKET_PATH_BYTES = 107  # sockaddr_un.sun_path is 108 bytes with its terminator
_PERCENT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*%\s*")


@dataclass(frozen=True, slots=True)
class Size:
    """Bytes, or a share of a whole that is known only on the machine (exactly one of the two is set)."""

    nbytes: int | None = None
    percent: float | None = None

    @classmethod
    def parse(cls, value: object) -> Size:
        """From 8589934592, "8GiB" or "50%". Raises InvalidArgument."""
        match = _PERCENT.fullmatch(value) if isinstance(value, str) else None
        if match is not None:
            percent = float(match[1])
            if not 0 < percent <= 100:
                raise InvalidArgument(f"size {value!r} is outside 0% .. 100%")
            return cls(percent=percent)
        return cls(nbytes=parse_size(value))  # type: ignore[arg-type]  # parse_size names a wrong type itself

    def of(self, whole_bytes: int) -> int:
        """Bytes, where `whole_bytes` is what a percentage is a share of."""
        return self.nbytes if self.nbytes is not None else int(whole_bytes * (self.percent or 0) / 100)

    def __str__(self) -> str:
        return str(self.nbytes) if self.nbytes is not None else f"{self.percent:g}%"


class DaemonSection(msgspec.Struct, frozen=True, kw_only=True):
    """`metrics_port`: None is off, 0 chooses a free port.

    `allowed_uids`: who may attach besides root and the daemon's own user.
    """

    socket: Path
    metrics_host: str = "127.0.0.1"
    metrics_port: Annotated[int, Meta(ge=0, le=65535)] | None = None
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["text", "json"] = "text"
    allowed_uids: tuple[Annotated[int, Meta(ge=0)], ...] = ()


class DramSection(msgspec.Struct, frozen=True, kw_only=True):
    """`size`: a percentage is of the machine's memory. `default_job_share`: of the tier, if a job asks for no size."""

    size: Size = Size(percent=50)
    default_job_share: Annotated[float, Meta(gt=0, le=1)] = 0.5


class FlashDirectory(msgspec.Struct, frozen=True, kw_only=True):
    """One directory of the flash tier. `size`: a percentage is of the filesystem's free space; None is all of it."""

    path: Path
    size: Size | None = None

    def limit_bytes(self, free_bytes: int) -> int:
        """Most bytes that the directory may take when its filesystem has `free_bytes`."""
        return free_bytes if self.size is None else self.size.of(free_bytes)


class MoverSection(msgspec.Struct, frozen=True, kw_only=True):
    """I/O threads per flash directory."""

    workers_per_directory: Annotated[int, Meta(ge=1, le=64)] = 4


class PlacementSection(msgspec.Struct, frozen=True, kw_only=True):
    """`policy`: which bundle leaves DRAM first ("belady": whose predicted use is furthest; "lru" for comparison).

    `lookahead`: the part of a job's arena that may be filled ahead of predicted uses; 0 serves on demand only.
    """

    policy: Literal["belady", "lru"] = "belady"
    lookahead: Annotated[float, Meta(ge=0, le=1)] = 0.5


class SessionsSection(msgspec.Struct, frozen=True, kw_only=True):
    """`alive_interval_s`: between signs of life to every client."""

    alive_interval_s: Annotated[float, Meta(gt=0, le=60)] = 1.0


class DaemonConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that `tiermemd` can be told. Flash directories are absolute and distinct."""

    daemon: DaemonSection
    dram: DramSection
    flash: tuple[FlashDirectory, ...]
    mover: MoverSection
    placement: PlacementSection
    sessions: SessionsSection


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """`origins`: for every dotted key, "default", "command line", "environment variable NAME" or the file's path.

    `dram_bytes` is `config.dram.size` on this machine.
    """

    config: DaemonConfig
    origins: dict[str, str]
    dram_bytes: int


@dataclass(frozen=True, slots=True)
class Host:
    """What the loader must know of machine and user; passed in, so that loading depends on its arguments only."""

    home: Path
    cwd: Path
    uid: int
    memory_total_bytes: int
    system_file: Path = Path("/etc/tiermem/tiermem.toml")

    @classmethod
    def current(cls) -> Host:
        """This process's. The memory is the machine's or the container's limit (cgroup v2), whichever is less."""
        memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        limit = Path("/sys/fs/cgroup/memory.max")
        text = limit.read_text().strip() if limit.is_file() else "max"
        return cls(
            home=Path(os.path.expanduser("~")),
            cwd=Path.cwd(),
            uid=os.getuid(),
            memory_total_bytes=min(memory_bytes, int(text)) if text.isdecimal() else memory_bytes,
        )


_SECTIONS: dict[str, type[msgspec.Struct]] = {
    "daemon": DaemonSection,
    "dram": DramSection,
    "mover": MoverSection,
    "placement": PlacementSection,
    "sessions": SessionsSection,
}
_TYPES: dict[str, Any] = {
    f"{section}.{name}": hint
    for section, struct in _SECTIONS.items()
    for name, hint in get_type_hints(struct, include_extras=True).items()
    if name in struct.__struct_fields__
}
_LISTS = frozenset({"daemon.allowed_uids"})
KEYS = (*_TYPES, "flash")

_Setting = tuple[str, str, object]  # key, origin, converted value


def load_config(
    cli: Mapping[str, object],
    environ: Mapping[str, str],
    config_file: Path | None = None,
    host: Host | None = None,
) -> LoadedConfig:
    """Merge all layers. Raises ConfigError naming key, value and origin.

    `cli`: dotted keys ("dram.size"; "flash": texts "DIR[:SIZE]"); None means not given. `config_file`: must exist where
    given; otherwise $XDG_CONFIG_HOME/tiermem/tiermem.toml or /etc/tiermem/tiermem.toml is read, the first that exists.
    """
    host = host or Host.current()
    values: dict[str, Any] = {"daemon.socket": default_socket(environ, host), "flash": ()}
    origins = dict.fromkeys(KEYS, "default")
    file = _find_file(config_file, environ, host)
    from_file = _file_settings(file, host) if file is not None else ()
    for settings in (from_file, _environment_settings(environ, host), _command_line_settings(cli, host)):
        for key, origin, value in settings:
            values[key], origins[key] = value, origin
    config = DaemonConfig(
        daemon=DaemonSection(**_section(values, "daemon")),
        dram=DramSection(**_section(values, "dram")),
        flash=values["flash"],
        mover=MoverSection(**_section(values, "mover")),
        placement=PlacementSection(**_section(values, "placement")),
        sessions=SessionsSection(**_section(values, "sessions")),
    )
    _check(config, origins)
    return LoadedConfig(config, origins, dram_bytes=config.dram.size.of(host.memory_total_bytes))


def default_socket(environ: Mapping[str, str], host: Host) -> Path:
    """Where a daemon of this user listens when nothing else is said. systemd sets RUNTIME_DIRECTORY for services."""
    if runtime := environ.get("RUNTIME_DIRECTORY", "").split(":")[0]:
        return Path(runtime) / "tiermemd.sock"
    if user_runtime := environ.get("XDG_RUNTIME_DIR"):
        return Path(user_runtime) / "tiermem" / "tiermemd.sock"
    return SYSTEM_SOCKET if host.uid == 0 else host.home / ".cache" / "tiermem" / "run" / "tiermemd.sock"


def socket_candidates(environ: Mapping[str, str], host: Host) -> tuple[Path, ...]:
    """Where a client looks for a running daemon, in order: the user's own, then the system's."""
    return tuple(dict.fromkeys((default_socket(environ, host), SYSTEM_SOCKET)))


def _file_settings(path: Path, host: Host) -> Iterator[_Setting]:
    origin = str(path)
    for section, table in _document(path).items():
        if section == "flash":
            yield "flash", origin, _directories(table, origin, host.home, path.parent)
        elif section not in _SECTIONS:
            raise _unknown(section, origin, (*_SECTIONS, "flash"))
        elif not isinstance(table, dict):
            raise ConfigError(f"{section} = {table!r} in {origin}: write a table, [{section}]")
        else:
            for name, raw in table.items():
                key = f"{section}.{name}"
                if key not in _TYPES:
                    raise _unknown(key, origin, KEYS)
                yield key, origin, _convert(key, raw, origin, host.home, path.parent)


def _document(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"configuration file {path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"configuration file {path} is not TOML: {error}") from error


def _environment_settings(environ: Mapping[str, str], host: Host) -> Iterator[_Setting]:
    for name, text in sorted(environ.items()):
        if not name.startswith(ENVIRONMENT_PREFIX) or name in CLIENT_VARIABLES:
            continue
        origin = f"environment variable {name}"
        key = name.removeprefix(ENVIRONMENT_PREFIX).lower().replace("__", ".")
        items = [item for item in text.split(",") if item.strip()]
        if key == "flash":
            yield key, origin, _directories(items, origin, host.home, host.cwd)
        elif key in _TYPES:
            raw = items if key in _LISTS else text
            yield key, origin, _convert(key, raw, origin, host.home, host.cwd, textual=True)
        else:
            valid = [ENVIRONMENT_PREFIX + known.replace(".", "__").upper() for known in KEYS]
            raise _unknown(name, "the environment", (*valid, *sorted(CLIENT_VARIABLES)))


def _command_line_settings(cli: Mapping[str, object], host: Host) -> Iterator[_Setting]:
    origin = "command line"
    for key, raw in cli.items():
        if raw is None:
            continue
        if key == "flash":
            yield key, origin, _directories(raw, origin, host.home, host.cwd)
        elif key in _TYPES:
            yield key, origin, _convert(key, raw, origin, host.home, host.cwd, textual=True)
        else:
            raise _unknown(key, origin, KEYS)


def _convert(key: str, raw: object, origin: str, home: Path, base: Path, *, textual: bool = False) -> object:
    """`textual`: the layer has only text, so "4" may become a number."""
    hint = _TYPES[key]
    try:
        if hint is Size:
            return Size.parse(raw)
        if hint is Path:
            return _path(msgspec.convert(str(raw) if isinstance(raw, Path) else raw, str), home, base)
        return msgspec.convert(raw, hint, strict=not textual)
    except (msgspec.ValidationError, InvalidArgument, TypeError) as error:
        raise ConfigError(f"{key} = {raw!r} in {origin}: {error}") from error


def _directories(raw: object, origin: str, home: Path, base: Path) -> tuple[FlashDirectory, ...]:
    if not isinstance(raw, list | tuple):
        raise ConfigError(f"flash = {raw!r} in {origin}: write [[flash]] tables with path and size")
    return tuple(_directory(item, origin, home, base) for item in raw)


def _directory(item: object, origin: str, home: Path, base: Path) -> FlashDirectory:
    table = _split_directory(item) if isinstance(item, str) else item
    if not isinstance(table, dict):
        raise ConfigError(f"flash directory {item!r} in {origin}: write a table of path and size, or 'DIR[:SIZE]'")
    fields = FlashDirectory.__struct_fields__
    for name in table:
        if name not in fields:
            raise _unknown(f"flash.{name}", origin, tuple(f"flash.{field}" for field in fields))
    path, size = table.get("path"), table.get("size")
    if not isinstance(path, str) or not path:
        raise ConfigError(f"flash.path = {path!r} in {origin}: give a directory")
    try:
        return FlashDirectory(path=_path(path, home, base), size=None if size is None else Size.parse(size))
    except InvalidArgument as error:
        raise ConfigError(f"flash.size = {size!r} of {path} in {origin}: {error}") from error


def _split_directory(text: str) -> dict[str, str]:
    """What follows the last colon is a size when it begins with a digit: a directory may have colons in its name."""
    path, colon, size = text.strip().rpartition(":")
    return {"path": path, "size": size} if colon and size[:1].isdecimal() else {"path": text.strip()}


def _path(text: str, home: Path, base: Path) -> Path:
    """Absolute: "~" is the user's home; a relative path starts at `base`. Symbolic links stay as they are."""
    expanded = home / text[1:].lstrip("/") if text == "~" or text.startswith("~/") else Path(text)
    return Path(os.path.normpath(base / expanded))


def _section(values: Mapping[str, object], name: str) -> dict[str, Any]:
    return {key.partition(".")[2]: value for key, value in values.items() if key.startswith(f"{name}.")}


def _find_file(explicit: Path | None, environ: Mapping[str, str], host: Host) -> Path | None:
    if explicit is not None:
        return host.cwd / explicit
    user = Path(environ.get("XDG_CONFIG_HOME") or host.home / ".config") / "tiermem" / "tiermem.toml"
    return next((path for path in (user, host.system_file) if path.is_file()), None)


def _unknown(key: str, origin: str, valid: Sequence[str]) -> ConfigError:
    nearest = difflib.get_close_matches(key, valid, n=1, cutoff=0.0)[0]
    return ConfigError(f"unknown key {key!r} in {origin}; did you mean {nearest!r}?")


def _check(config: DaemonConfig, origins: Mapping[str, str]) -> None:
    socket = os.fsencode(str(config.daemon.socket) + SIDE_SOCKET_SUFFIX)
    if len(socket) > _SOCKET_PATH_BYTES:
        raise ConfigError(
            f"daemon.socket = {str(config.daemon.socket)!r} in {origins['daemon.socket']}: a socket's path has at most "
            f"{_SOCKET_PATH_BYTES - len(SIDE_SOCKET_SUFFIX)} bytes; choose a shorter one"
        )
    paths = [directory.path for directory in config.flash]
    for path in paths:
        if paths.count(path) > 1:
            raise ConfigError(f"flash directory {path} is given twice in {origins['flash']}; name each directory once")
    for name, size in (("dram.size", config.dram.size), *((f"flash {d.path}", d.size) for d in config.flash)):
        if size is not None and size.nbytes == 0:
            raise ConfigError(f"{name} = {format_size(0)} in {origins[name.split()[0]]}: give a size above zero")
