"""The composition root of tiermemd: builds everything from a configuration, serves until told to end, takes it down in
reverse.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import shutil
import signal
import stat
import sys
from collections.abc import Callable
from pathlib import Path

import grpc

from tiermem import __version__
from tiermem.clock import MonotonicClock
from tiermem.config import SIDE_SOCKET_SUFFIX, LoadedConfig
from tiermem.errors import ConfigError, TiermemError
from tiermem.lookahead import LookaheadOptions, Policy
from tiermem.mover import Mover
from tiermem.rpc import codec
from tiermem.rpc.v1 import tiermem_pb2_grpc as pb_grpc
from tiermem.store import TensorStore
from tiermem.tiers.base import Tier
from tiermem.tiers.flash_directory import FlashDirectory
from tiermem.tiers.os_calls import FileCalls, LinuxCalls
from tiermem.units import format_size
from tiermem_daemon.exporter import Exporter
from tiermem_daemon.health import Health, Notifier, register_reflection
from tiermem_daemon.listener import ProcessWatch, SideSocket
from tiermem_daemon.logs import configure_logging
from tiermem_daemon.metrics import make_registry
from tiermem_daemon.options import ServeOptions
from tiermem_daemon.runtime_directory import prepare_runtime_directory
from tiermem_daemon.service import TierMemService

_log = logging.getLogger("tiermem.app")
_SWITCH_INTERVAL_S = 5e-4  # a mover thread that hashes must not hold up the control plane for a whole default interval
_STREAM_GRACE_S = 0.5


def run(
    loaded: LoadedConfig,
    options: ServeOptions,
    open_store: Callable[[LoadedConfig, ServeOptions], TensorStore] | None = None,
) -> int:
    """Serve until SIGTERM, SIGINT or the owner's end; the exit code. Raises TiermemError where it cannot start.

    `open_store`: for benchmarks, which serve another store than the one that is configured.
    """
    configure_logging(loaded.config.daemon.log_level, loaded.config.daemon.log_format)
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    try:
        return asyncio.run(_serve(loaded, options, open_store or _open_store))
    except TiermemError as error:
        _announce(options, f"{error.code}: {error}")
        raise


def _announce(options: ServeOptions, line: str) -> None:
    """Tell whoever started us, once."""
    if options.ready_fd is not None:
        with contextlib.suppress(OSError):  # nobody listens any more
            os.write(options.ready_fd, line.replace("\n", " ").encode() + b"\n")
            os.close(options.ready_fd)


async def _serve(
    loaded: LoadedConfig, options: ServeOptions, open_store: Callable[[LoadedConfig, ServeOptions], TensorStore]
) -> int:
    config, loop, stopped = loaded.config, asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    async with contextlib.AsyncExitStack() as stack:
        _watch_owner(options, stopped, stack)
        runtime_mode = 0o711 if config.daemon.allowed_uids else 0o700
        stack.enter_context(prepare_runtime_directory(config.daemon.socket, runtime_mode))
        store = open_store(loaded, options)
        stack.push_async_callback(asyncio.to_thread, store.close)
        side = SideSocket(
            Path(f"{config.daemon.socket}{SIDE_SOCKET_SUFFIX}"),
            owner_uid=os.getuid(),
            allowed_uids=config.daemon.allowed_uids,
        )
        await side.start()
        stack.push_async_callback(side.stop)
        service = TierMemService(store, side, config.sessions.alive_interval_s, options.embedded)
        server, health = await _start_grpc(config.daemon.socket, bool(config.daemon.allowed_uids), service)

        async def stop_serving() -> None:
            await health.shutdown()
            await service.close()
            await server.stop(_STREAM_GRACE_S)

        stack.push_async_callback(stop_serving)
        if config.daemon.metrics_port is not None:
            exporter = Exporter(
                config.daemon.metrics_host,
                config.daemon.metrics_port,
                make_registry(store.snapshot),
                healthy=lambda: True,
                ready=lambda: health.serving,
            )
            stack.callback(exporter.close)
            _log.info("metrics on http://%s:%d/metrics", config.daemon.metrics_host, exporter.port)
        notifier = Notifier.from_environ(os.environ)
        status = f"{format_size(store.dram_bytes)} of DRAM, flash in {', '.join(str(d.path) for d in config.flash)}"
        _log.info("tiermemd %s serves on %s: %s", __version__, config.daemon.socket, status)
        notifier.ready(status)
        _announce(options, "READY")
        gc.freeze()  # what exists now stays; collections look at what sessions make
        await _wait(stopped, notifier)
        _log.info("stopping")
        notifier.stopping()
    _remove_directories(options)
    return 0


async def _wait(stopped: asyncio.Event, notifier: Notifier) -> None:
    while not stopped.is_set():
        try:
            await asyncio.wait_for(stopped.wait(), notifier.watchdog_interval_s)
        except TimeoutError:
            notifier.watchdog()


def _watch_owner(options: ServeOptions, stopped: asyncio.Event, stack: contextlib.AsyncExitStack) -> None:
    """An embedded daemon ends with its trainer, however that ends."""
    if options.owner_pid is None:
        return
    try:
        pidfd = os.pidfd_open(options.owner_pid)
    except OSError as error:
        _remove_directories(options)
        raise ConfigError(f"--owner-pid {options.owner_pid}: no such process ({error.strerror})") from error
    watch = ProcessWatch(pidfd, stopped.set)
    stack.callback(os.close, pidfd)
    stack.callback(watch.close)


def _remove_directories(options: ServeOptions) -> None:
    """An owner that was killed cannot do it. One that lives does it too, and reads the log first where we fail."""
    for directory in options.remove_at_exit:
        shutil.rmtree(directory, ignore_errors=True)


def _open_store(loaded: LoadedConfig, options: ServeOptions) -> TensorStore:
    config = loaded.config
    if not config.flash:
        raise ConfigError(
            "no flash directory is configured; give --flash DIR[:SIZE], or a [[flash]] table in the configuration file"
        )
    calls, wrap = _faults(options.fault_script)
    with contextlib.ExitStack() as undo:
        directories = []
        for entry in config.flash:
            limit = None if entry.size is None else entry.limit_bytes(_free_bytes(entry.path))
            directory = FlashDirectory.open(entry.path, limit)
            directory.calls = calls  # after the probing, so that a script counts the jobs' calls only
            undo.callback(directory.close)
            directories.append(directory)
        clock = MonotonicClock()
        file_place = len(directories)  # beside the directories: a client's file may be on a disk that hangs
        mover = Mover(file_place + 1, workers_per_place=config.mover.workers_per_directory, clock=clock)
        share = config.dram.default_job_share
        lookahead = LookaheadOptions(Policy(config.placement.policy), config.placement.lookahead)
        store = TensorStore(loaded.dram_bytes, directories, mover, clock, share, wrap, file_place, lookahead)
        undo.pop_all()
    return store


def _free_bytes(path: Path) -> int:
    """Of the file system that holds, or will hold, the directory."""
    while not path.exists() and path != path.parent:
        path = path.parent
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize


def _faults(script: str | None) -> tuple[FileCalls, Callable[[Tier], Tier]]:
    """Scripted faults for tests; without a script, the real thing."""
    if not script:
        return LinuxCalls(), lambda tier: tier
    from tiermem.testing.fakes import FaultyTier
    from tiermem.testing.faults import FaultyCalls, parse_fault_script

    faults = parse_fault_script(script)
    _log.warning("FAULTS ARE INJECTED: %s", script)
    return FaultyCalls(LinuxCalls(), faults), lambda tier: FaultyTier(tier, faults)


async def _start_grpc(socket: Path, shared: bool, service: TierMemService) -> tuple[grpc.aio.Server, Health]:
    server = grpc.aio.server(
        options=[
            ("grpc.max_send_message_length", codec.MAX_MESSAGE_BYTES),
            ("grpc.max_receive_message_length", codec.MAX_MESSAGE_BYTES),
            ("grpc.so_reuseport", 0),
        ]
    )
    pb_grpc.add_TierMemServicer_to_server(service, server)  # type: ignore[no-untyped-call]
    health = Health(server)
    register_reflection(server)
    previous = os.umask(0o177)
    try:
        try:
            bound = server.add_insecure_port(f"unix:{socket}")
        except RuntimeError as error:
            raise ConfigError(f"socket {socket} cannot be bound: {error}") from error
        if not bound:
            raise ConfigError(f"socket {socket} cannot be bound; choose another --socket")
        await health.set_serving(True)
        await server.start()
    finally:
        os.umask(previous)
    socket.chmod(stat.S_IRUSR | stat.S_IWUSR | (0o066 if shared else 0))
    return server, health
