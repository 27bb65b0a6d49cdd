"""Saying how we are: grpc.health.v1 to whoever asks, sd_notify to systemd, reflection to tools."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Mapping

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from tiermem.rpc.v1 import tiermem_pb2

_log = logging.getLogger(__name__)

SERVICE = tiermem_pb2.DESCRIPTOR.services_by_name["TierMem"].full_name


class Health:
    """The health service of one grpc.aio server, for "" and the TierMem service. NOT_SERVING until told otherwise."""

    def __init__(self, server: grpc.aio.Server) -> None:
        """Registers with `server`, which has not been started yet."""
        self._servicer = health.aio.HealthServicer()  # type: ignore[attr-defined]  # bound conditionally there
        self._serving = False
        self._stopped = False
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)

    @property
    def serving(self) -> bool:
        """The last thing told; for /readyz, from any thread."""
        return self._serving

    async def set_serving(self, serving: bool) -> None:
        """Tell every watcher. Has no effect after `shutdown`. To be called once before the server starts."""
        if self._stopped:
            return
        status = health_pb2.HealthCheckResponse.ServingStatus
        self._serving = serving
        for name in ("", SERVICE):
            await self._servicer.set(name, status.SERVING if serving else status.NOT_SERVING)

    async def shutdown(self) -> None:
        """NOT_SERVING for good: new work goes elsewhere while what runs is ended."""
        self._serving, self._stopped = False, True
        await self._servicer.enter_graceful_shutdown()


def register_reflection(server: grpc.aio.Server) -> None:
    """Let grpcurl and the like list and call our services."""
    names = (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)


class Notifier:
    """sd_notify(3): one datagram each to the service manager; nothing where there is none."""

    def __init__(self, address: str | None, watchdog_interval_s: float | None = None) -> None:
        """`address`: a path, or "@name" for the abstract namespace. `watchdog_interval_s`: see `from_environ`."""
        self._address = address
        self.watchdog_interval_s = watchdog_interval_s

    @classmethod
    def from_environ(cls, environ: Mapping[str, str], pid: int | None = None) -> Notifier:
        """The interval is half of WatchdogSec, as sd_watchdog_enabled(3) asks; None where systemd does not watch."""
        usec = environ.get("WATCHDOG_USEC", "")
        ours = environ.get("WATCHDOG_PID") in (None, str(os.getpid() if pid is None else pid))
        interval_s = int(usec) / 2e6 if usec.isdecimal() and ours else None
        return cls(environ.get("NOTIFY_SOCKET") or None, interval_s)

    def ready(self, status: str) -> None:
        self._send(f"READY=1\nSTATUS={status}")

    def status(self, status: str) -> None:
        self._send(f"STATUS={status}")

    def watchdog(self) -> None:
        self._send("WATCHDOG=1")

    def stopping(self) -> None:
        self._send("STOPPING=1\nSTATUS=stopping")

    def _send(self, message: str) -> None:
        if self._address is None:
            return
        address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as datagram:
            datagram.setblocking(False)
            try:
                datagram.sendto(message.encode(), address)
            except OSError as error:
                _log.warning("service manager at %s not told %r: %s", self._address, message, error.strerror)
