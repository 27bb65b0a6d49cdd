"""A configuration as text that the loader reads again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from tiermem.config import FlashDirectory, LoadedConfig, Size
from tiermem.units import format_size


def as_json(loaded: LoadedConfig) -> str:
    """{"config": the tree, "origins": by dotted key, "dram_bytes": the DRAM tier on this machine}."""
    tree: dict[str, Any] = {section: _table(value) for section, value in _sections(loaded)}
    tree["flash"] = [_table(directory) for directory in loaded.config.flash]
    return json.dumps({"config": tree, "origins": loaded.origins, "dram_bytes": loaded.dram_bytes}, indent=2)


def as_toml(loaded: LoadedConfig, with_origin: bool) -> str:
    """TOML in the order of the example file; `with_origin` adds a comment to every value."""
    return "".join(f"{line}\n" for line in _lines(loaded, with_origin))


def _lines(loaded: LoadedConfig, with_origin: bool) -> Iterator[str]:
    def comment(key: str) -> str:
        return f"  # {loaded.origins[key]}" if with_origin else ""

    for section, value in _sections(loaded):
        yield f"[{section}]"
        for name, plain in _table(value).items():
            size = f" ({format_size(loaded.dram_bytes)})" if with_origin and (section, name) == ("dram", "size") else ""
            if plain is None:
                yield f"# {name} is off{comment(f'{section}.{name}')}"
            else:
                yield f"{name} = {json.dumps(plain, ensure_ascii=False)}{comment(f'{section}.{name}')}{size}"
        yield ""
    if not loaded.config.flash:
        yield f"# no [[flash]] directory{comment('flash')}"
    for directory in loaded.config.flash:
        yield f"[[flash]]{comment('flash')}"
        for name, plain in _table(directory).items():
            if plain is not None:
                yield f"{name} = {json.dumps(plain, ensure_ascii=False)}"


def _sections(loaded: LoadedConfig) -> Iterator[tuple[str, msgspec.Struct]]:
    for name in ("daemon", "dram", "mover", "sessions"):
        yield name, getattr(loaded.config, name)


def _table(value: msgspec.Struct | FlashDirectory) -> dict[str, Any]:
    """Names and plain values. A JSON string is a TOML string for every text that has no control characters."""
    return {name: _plain(getattr(value, name)) for name in value.__struct_fields__}


def _plain(value: object) -> object:
    if isinstance(value, Size):
        return value.nbytes if value.nbytes is not None else str(value)
    return str(value) if isinstance(value, Path) else value
