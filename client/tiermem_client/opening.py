"""Before anything of a script is touched: the daemon, the connection and the session of a job."""

from __future__ import annotations

import itertools
import os
import sys
from pathlib import Path

import psutil
from torch import nn

from tiermem.errors import InvalidArgument
from tiermem.layout import arena_layout
from tiermem.units import MIB, parse_size
from tiermem_client.channel import dial, resolve_endpoint
from tiermem_client.embedded import EmbeddedDaemon
from tiermem_client.session import Session
from tiermem_client.shadow import OptimizerForm
from tiermem_client.units import ManagedStorage

_DEFAULT_TIMEOUT_S = 20.0
_START_TIMEOUT_S = 60.0
_numbers = itertools.count(1)


def open_session(
    dram: int | str | None,
    flash: int | str | os.PathLike[str] | None,
    job: str | None,
    endpoint: str | os.PathLike[str] | None,
    timeout_s: float | None,
    storages: dict[int, ManagedStorage],
    forms: dict[nn.Parameter, OptimizerForm],
    offloads: bool = False,
) -> tuple[Session, EmbeddedDaemon | None, str]:
    """The session, the daemon that was started for it if there is none to be found, and the job's name. Arguments and
    errors are those of `attach`; `offloads`: activations too, whose bytes nobody knows beforehand.
    """
    environ = os.environ
    silence_s = _timeout(timeout_s)
    dram_bytes = 0 if dram is None else _size("dram", dram)
    socket = resolve_endpoint(endpoint, environ)
    name = job or f"{Path(sys.argv[0] or 'python').stem or 'python'}-{os.getpid()}-{next(_numbers)}"
    daemon, flash_bytes = None, 0
    if socket is None:
        dram_bytes = dram_bytes or _default_dram_bytes(storages, forms, offloads)
        arena_layout(dram_bytes)  # raises for sizes that make no arena, before a process is started
        if isinstance(flash, int):
            raise InvalidArgument(f"flash={flash} is a size; an embedded daemon needs a directory, flash='DIR[:SIZE]'")
        daemon = EmbeddedDaemon(dram_bytes, None if flash is None else os.fspath(flash), environ, _START_TIMEOUT_S)
        socket = daemon.socket
    elif flash is not None:
        flash_bytes = _size("flash", flash if isinstance(flash, int) else os.fspath(flash))
    try:
        connection = dial(socket, silence_s)
        try:
            return Session(connection, name, dram_bytes, flash_bytes, silence_s), daemon, name
        except BaseException:
            connection.close()
            raise
    except BaseException:
        if daemon is not None:
            daemon.stop()
        raise


def _size(name: str, value: int | str) -> int:
    """Zero is no size: the protocol's zero means the default, which is asked for by leaving the argument out."""
    size = parse_size(value)
    if size == 0:
        raise InvalidArgument(f"{name}={value!r} is no room at all; give a size above zero, or leave it out")
    return size


def _timeout(timeout_s: float | None) -> float:
    text = os.environ.get("TIERMEM_TIMEOUT_S", "")
    try:
        value = timeout_s if timeout_s is not None else float(text) if text else _DEFAULT_TIMEOUT_S
    except ValueError:
        raise InvalidArgument(f"TIERMEM_TIMEOUT_S is {text!r}; give seconds, such as 20") from None
    if not 0 < value < 86400:
        raise InvalidArgument(f"a timeout of {value} s is outside 0 .. 86400")
    return value


def _default_dram_bytes(
    storages: dict[int, ManagedStorage], forms: dict[nn.Parameter, OptimizerForm], offloads: bool
) -> int:
    """Half of the free memory; where nothing comes beside the state, no more than all state and its slack."""
    half = psutil.virtual_memory().available // 2
    if offloads:
        return int(half)
    state = sum(s.nbytes for s in storages.values())
    for parameter, form in forms.items():
        state += parameter.numel() * (parameter.element_size() + form.state_bytes_per_element())
    return int(min(state + state // 8 + 64 * MIB, half))
