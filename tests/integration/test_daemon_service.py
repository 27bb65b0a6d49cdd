"""`tiermem serve` as an operator meets it: options, sockets, health, reflection, metrics, status, its end."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

import tiermem
from tests.integration.daemon_process import Daemon, StartRefused, environment, serve, start_daemon, within
from tests.integration.tiny_training import DRAM, make, train
from tiermem.rpc.v1 import tiermem_pb2 as pb
from tiermem.rpc.v1 import tiermem_pb2_grpc as pb_grpc
from tiermem.units import MIB


def cli(*words: str, environ: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tiermem_daemon", *words]
    return subprocess.run(command, env=environment(environ), capture_output=True, text=True, timeout=30, check=False)


def metrics_of(daemon: Daemon) -> tuple[str, dict[str, float]]:
    """The page, and its samples by name with labels."""
    port = re.search(r"metrics on http://127\.0\.0\.1:(\d+)/metrics", daemon.log)
    assert port is not None, daemon.log
    with urllib.request.urlopen(f"http://127.0.0.1:{port[1]}/metrics", timeout=5) as answer:
        text = answer.read().decode()
    samples = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
    return text, {name: float(value) for name, _, value in samples}


@pytest.mark.parametrize(
    ("environ", "dram", "expected_bytes"),
    [({}, None, 16 * MIB), ({"TIERMEM_DRAM__SIZE": "12MiB"}, None, 12 * MIB),
     ({"TIERMEM_DRAM__SIZE": "12MiB"}, "8MiB", 8 * MIB)],
    ids=["file", "environment before file", "command line before environment"],
)  # fmt: skip
def test_configuration_comes_from_file_environment_and_command_line(
    tmp_path: Path, environ: dict[str, str], dram: str | None, expected_bytes: int
) -> None:
    config = tmp_path / "tiermem.toml"
    config.write_text(
        '[daemon]\nlog_format = "json"\n[dram]\nsize = "16MiB"\n'
        f'[[flash]]\npath = "{tmp_path / "one"}"\nsize = "4MiB"\n'
        f'[[flash]]\npath = "{tmp_path / "two"}"\nsize = "6MiB"\n'
    )
    with serve(tmp_path, dram=dram, flash=[], options=["--config", str(config)], environ=environ) as daemon:
        stats = daemon.stats()
        assert stats.tiers["dram"].capacity_bytes == expected_bytes
        assert [(d.path, d.capacity_bytes) for d in stats.directories] == [
            (str(tmp_path / "one"), 4 * MIB),
            (str(tmp_path / "two"), 6 * MIB),
        ]
        assert all(json.loads(line)["level"] == "info" for line in daemon.log.splitlines())


@pytest.mark.parametrize(
    ("flash", "options", "environ", "text"),
    [
        ([], [], {}, "no flash directory"),
        (["/proc/tiermem-flash"], [], {}, "/proc/tiermem-flash"),
        (["DIR:0"], [], {}, "above zero"),
        (["DIR"], ["--dram", "banana"], {}, "banana"),
        (["DIR"], [], {"TIERMEM_DRAM__SIZ": "1GiB"}, "did you mean"),
        (["DIR"], ["--config", "nowhere.toml"], {}, "nowhere.toml"),
    ],
)
def test_a_daemon_that_cannot_start_says_why_in_one_line(
    tmp_path: Path, flash: Sequence[str], options: Sequence[str], environ: dict[str, str], text: str
) -> None:
    places = [place.replace("DIR", str(tmp_path / "flash")) for place in flash]
    with pytest.raises(StartRefused) as caught:
        start_daemon(tmp_path, flash=places, options=options, environ=environ)
    assert text in caught.value.line
    assert "Traceback" not in caught.value.line
    assert caught.value.code == 2


def test_sockets_are_private_and_gone_at_the_end(tmp_path: Path) -> None:
    with serve(tmp_path) as daemon:
        side = Path(f"{daemon.socket}.fd")
        assert stat.S_IMODE(daemon.socket.parent.stat().st_mode) == 0o700
        assert stat.S_IMODE(daemon.flash[0].stat().st_mode) == 0o700
        for path in (daemon.socket, side):
            assert stat.S_ISSOCK(path.stat().st_mode)
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
        asked_s = time.monotonic()
        assert daemon.stop() == 0, daemon.log
        took_s = time.monotonic() - asked_s
        assert took_s <= 2.0, f"the daemon took {took_s:.2f} s to end"
        assert not daemon.socket.exists()
        assert not side.exists()
        assert "stopping" in daemon.log


def test_health_is_what_probes_and_people_see(tmp_path: Path) -> None:
    with serve(tmp_path, options=["--metrics-port", "0"]) as daemon:
        assert daemon.health() == "SERVING"
        told = cli("health", "--socket", str(daemon.socket))
        assert (told.returncode, told.stdout.strip()) == (0, "SERVING")
        port = re.search(r"127\.0\.0\.1:(\d+)", daemon.log)
        assert port is not None
        for probe in ("healthz", "readyz"):
            with urllib.request.urlopen(f"http://127.0.0.1:{port[1]}/{probe}", timeout=5) as answer:
                assert answer.status == 200
    assert cli("health", "--socket", str(daemon.socket)).returncode == 3
    assert cli("status", "--socket", str(daemon.socket)).returncode == 3


def test_reflection_lists_the_services(tmp_path: Path) -> None:
    with serve(tmp_path) as daemon, grpc.insecure_channel(daemon.endpoint) as channel:
        ask = reflection_pb2.ServerReflectionRequest(list_services="")
        (answer,) = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([ask]), timeout=5)
        names = {service.name for service in answer.list_services_response.service}
        assert {"tiermem.rpc.v1.TierMem", "grpc.health.v1.Health"} <= names


def test_info_describes_the_daemon(tmp_path: Path) -> None:
    with serve(tmp_path) as daemon, grpc.insecure_channel(daemon.endpoint) as channel:
        stub = pb_grpc.TierMemStub(channel)  # type: ignore[no-untyped-call]
        info = stub.GetInfo(pb.GetInfoRequest(), timeout=5)
        assert (info.version, info.pid, info.embedded) == (tiermem.__version__, daemon.pid, False)
        assert info.side_socket == f"{daemon.socket}.fd"
        assert info.dram_capacity_bytes == info.dram_free_bytes == 8 * MIB


_FROM_THE_START = (
    'tiermem_tier_used_bytes{tier="dram"}',
    'tiermem_tier_used_bytes{tier="flash"}',
    "tiermem_hits_total",
    "tiermem_misses_total",
    'tiermem_evictions_total{from="dram",reason="demand",to="flash"}',
    'tiermem_transfer_bytes_total{link="flash_to_dram"}',
    'tiermem_transfer_bytes_total{link="dram_to_flash"}',
    'tiermem_transfer_seconds_total{link="flash_to_dram"}',
    'tiermem_stall_seconds_total{cause="load"}',
    'tiermem_stall_seconds_total{cause="room"}',
    "tiermem_sessions",
    "tiermem_sessions_opened_total",
    'tiermem_sessions_ended_total{reason="died"}',
    "tiermem_leases",
    'tiermem_errors_total{code="TIER_FULL"}',
    'tiermem_io_errors_total{errno="EIO"}',
    'tiermem_io_errors_total{errno="ENOSPC"}',
    "tiermem_checksum_failures_total",
)
_MOVING = (
    "tiermem_misses_total",
    "tiermem_creates_total",
    "tiermem_commits_total",
    'tiermem_evictions_total{from="dram",reason="demand",to="flash"}',
    'tiermem_transfer_bytes_total{link="flash_to_dram"}',
    'tiermem_transfer_bytes_total{link="dram_to_flash"}',
    'tiermem_transfer_seconds_total{link="flash_to_dram"}',
    'tiermem_flash_written_bytes_total{directory_index="0"}',
)


def test_metrics_while_a_job_runs(tmp_path: Path) -> None:
    on_demand = {"TIERMEM_PLACEMENT__LOOKAHEAD": "0"}  # so that there are misses in every step
    with serve(tmp_path, options=["--metrics-port", "0"], environ=on_demand) as daemon:
        text, before = metrics_of(daemon)
        assert {name: before[name] for name in _FROM_THE_START} == dict.fromkeys(_FROM_THE_START, 0.0)
        assert before['tiermem_tier_capacity_bytes{tier="dram"}'] == 8 * MIB
        model, optimizer, data = make()
        with tiermem.attach(model, optimizer, dram=DRAM, endpoint=daemon.endpoint, job="seen"):
            last = before
            for _ in range(3):
                train(model, optimizer, data)
                text, now = metrics_of(daemon)
                for tier in ("dram", "flash"):
                    used = now[f'tiermem_tier_used_bytes{{tier="{tier}"}}']
                    assert 0 < used <= now[f'tiermem_tier_capacity_bytes{{tier="{tier}"}}']
                assert now["tiermem_sessions"] == 1
                assert all(now[name] > last[name] for name in _MOVING), [n for n in _MOVING if now[n] <= last[n]]
                fell = [name for name in last if "_total" in name and now.get(name, -1.0) < last[name]]
                assert not fell
                last = now
        _, after = metrics_of(daemon)
        assert after["tiermem_sessions"] == after['tiermem_tier_used_bytes{tier="dram"}'] == 0
        assert after['tiermem_sessions_ended_total{reason="closed"}'] == 1
        assert not [name for name in last if "_total" in name and after.get(name, -1.0) < last[name]]
    if promtool := shutil.which("promtool"):
        checked = subprocess.run(
            [promtool, "check", "metrics"], input=text, capture_output=True, text=True, check=False
        )
        assert checked.returncode == 0, checked.stdout + checked.stderr


def _told_at_rest(job: tiermem.Job, daemon: Daemon) -> tuple[tiermem.TrainerStats, dict[str, Any]]:
    """What the job and the command say at the same instant: the daemon goes on ahead of the script for a while."""
    for _ in range(50):
        before = job.stats()
        told = cli("status", "--socket", str(daemon.socket), "--json")
        assert told.returncode == 0, told.stderr
        if job.stats() == before:
            return before, json.loads(told.stdout)
    raise AssertionError("the daemon does not come to rest while the script does nothing")


def test_status_agrees_with_the_job(tmp_path: Path) -> None:
    with serve(tmp_path) as daemon:
        model, optimizer, data = make()
        with tiermem.attach(model, optimizer, dram=DRAM, endpoint=daemon.endpoint, job="seen") as job:
            train(model, optimizer, data, 2)
            mine, table = _told_at_rest(job, daemon)
            (row,) = table["jobs"]
            assert (row["job"], row["pid"]) == ("seen", os.getpid())
            for name in ("hits", "misses", "creates", "evictions", "bytes_by_kind", "dirty_bytes"):
                assert row[name] == getattr(mine, name), name
            for link, moved in mine.links.items():
                assert row["links"][link]["bytes"] == table["links"][link]["bytes"] == moved.bytes > 0
            assert row["tiers"]["dram"] == {
                "capacity_bytes": mine.tiers["dram"].capacity_bytes,
                "used_bytes": mine.tiers["dram"].used_bytes,
            }
            one = cli("status", "--socket", str(daemon.socket), "--json", "--job", "seen")
            assert json.loads(one.stdout)["jobs"] == [row]
            assert "seen" in cli("status", "--socket", str(daemon.socket)).stdout
            assert cli("status", "--socket", str(daemon.socket), "--job", "other").returncode == 9
        within(2, daemon.left_of_jobs)


def test_links_agree_with_what_the_kernel_counted(tmp_path: Path) -> None:
    """Within 5 %: pages that are written for a bundle's last bytes, and the file system's own."""
    with serve(tmp_path) as daemon:
        if not daemon.stats().directories[0].direct_io:
            pytest.skip("the file system has no O_DIRECT: the kernel counts what leaves the page cache")
        model, optimizer, data = make(width=160, blocks=4)
        with tiermem.attach(model, optimizer, dram="4MiB", endpoint=daemon.endpoint) as job:
            train(model, optimizer, data)
            before, links_before = daemon.disk_bytes(), job.stats().links
            train(model, optimizer, data, 4)
            links = job.stats().links
            within(
                5, lambda: "a transfer is under way" if any(s.queued_bytes for s in job.stats().links.values()) else ""
            )
            links, after = job.stats().links, daemon.disk_bytes()
        for index, link in enumerate(("flash_to_dram", "dram_to_flash")):
            moved, counted = links[link].bytes - links_before[link].bytes, after[index] - before[index]
            assert moved > 8 * MIB, f"{link}: {moved} bytes show nothing"
            assert abs(moved - counted) <= 0.05 * counted, f"{link}: {moved} bytes, the kernel counted {counted}"
