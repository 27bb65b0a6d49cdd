"""grpc.health.v1, reflection, sd_notify and the log, through their real clients and sockets."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import os
import socket
from collections.abc import Coroutine, Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from tiermem_daemon.health import SERVICE, Health, Notifier, register_reflection
from tiermem_daemon.logs import configure_logging

Status = health_pb2.HealthCheckResponse.ServingStatus


def run(test: Coroutine[object, object, None]) -> None:
    asyncio.run(test)


def test_health_follows_what_it_is_told_and_a_shutdown_is_final(tmp_path: Path) -> None:
    async def test() -> None:
        server = grpc.aio.server()
        health = Health(server)
        address = f"unix:{tmp_path}/h.sock"
        server.add_insecure_port(address)
        await health.set_serving(False)
        await server.start()
        async with grpc.aio.insecure_channel(address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)

            async def statuses() -> set[int]:
                return {(await stub.Check(health_pb2.HealthCheckRequest(service=s))).status for s in ("", SERVICE)}

            assert SERVICE == "tiermem.rpc.v1.TierMem"
            assert (await statuses(), health.serving) == ({Status.NOT_SERVING}, False)
            await health.set_serving(True)
            assert (await statuses(), health.serving) == ({Status.SERVING}, True)
            await health.shutdown()
            assert (await statuses(), health.serving) == ({Status.NOT_SERVING}, False)
            await health.set_serving(True)
            assert (await statuses(), health.serving) == ({Status.NOT_SERVING}, False)
            with pytest.raises(grpc.aio.AioRpcError) as unknown:
                await stub.Check(health_pb2.HealthCheckRequest(service="other"))
            assert unknown.value.code() == grpc.StatusCode.NOT_FOUND
        await server.stop(None)

    run(test())


def test_reflection_lists_our_service(tmp_path: Path) -> None:
    async def test() -> None:
        server = grpc.aio.server()
        Health(server)
        register_reflection(server)
        address = f"unix:{tmp_path}/r.sock"
        server.add_insecure_port(address)
        await server.start()
        async with grpc.aio.insecure_channel(address) as channel:
            ask = reflection_pb2.ServerReflectionRequest(list_services="")
            stub = reflection_pb2_grpc.ServerReflectionStub(channel)
            names = [
                service.name
                async for answer in stub.ServerReflectionInfo(iter([ask]))
                for service in answer.list_services_response.service
            ]
        await server.stop(None)
        assert {SERVICE, "grpc.health.v1.Health"} <= set(names)

    run(test())


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, socket.socket]]:
    """A service manager's end: NOTIFY_SOCKET and the socket behind it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.settimeout(5)
        name = str(tmp_path / "notify") if request.param == "path" else f"@tiermem-test-{os.getpid()}"
        listening.bind(name.replace("@", "\0"))
        yield name, listening


def test_the_service_manager_is_told(manager: tuple[str, socket.socket]) -> None:
    address, listening = manager
    notifier = Notifier.from_environ({"NOTIFY_SOCKET": address})
    assert notifier.watchdog_interval_s is None
    notifier.ready("serving at /x")
    notifier.watchdog()
    notifier.status("3 sessions")
    notifier.stopping()
    assert [listening.recv(1000).decode() for _ in range(4)] == [
        "READY=1\nSTATUS=serving at /x",
        "WATCHDOG=1",
        "STATUS=3 sessions",
        "STOPPING=1\nSTATUS=stopping",
    ]


def test_without_a_service_manager_nothing_happens_and_a_lost_one_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Notifier.from_environ({}).ready("x")
    assert caplog.records == []
    Notifier.from_environ({"NOTIFY_SOCKET": str(tmp_path / "gone")}).watchdog()
    assert "WATCHDOG=1" in caplog.text


def test_the_watchdog_is_petted_twice_per_period_and_only_by_the_process_meant() -> None:
    environ = {"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "7"}
    assert Notifier.from_environ(environ, pid=7).watchdog_interval_s == 15.0
    assert Notifier.from_environ(environ, pid=8).watchdog_interval_s is None
    assert Notifier.from_environ({"WATCHDOG_USEC": "1000000"}).watchdog_interval_s == 0.5


@pytest.fixture
def root_logger() -> Iterator[logging.Logger]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield root
    root.handlers[:] = handlers
    root.setLevel(level)


def test_json_log_lines_hold_one_object_each(root_logger: logging.Logger) -> None:
    stream = io.StringIO()
    configure_logging("info", "json", stream)
    log = logging.getLogger("tiermem.x")
    log.debug("not shown")
    log.info("job %r\nopened", "ä")
    try:
        raise ValueError("why")
    except ValueError:
        log.exception("failed")
    first, second = map(json.loads, stream.getvalue().splitlines())
    assert first["message"] == "job 'ä'\nopened"
    assert (first["level"], first["logger"]) == ("info", "tiermem.x")
    assert second["exception"].endswith("ValueError: why")


def test_text_log(root_logger: logging.Logger) -> None:
    stream = io.StringIO()
    configure_logging("warning", "text", stream)
    logging.getLogger("tiermem.x").info("not shown")
    logging.getLogger("tiermem.x").warning("disk %d", 5)
    assert stream.getvalue().endswith("WARNING tiermem.x: disk 5\n")
