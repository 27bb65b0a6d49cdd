"""The metrics table, the collector over one snapshot, and the HTTP endpoint."""

from __future__ import annotations

import dataclasses
import http.client
import shutil
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from tiermem import __version__
from tiermem.errors import Code, ConfigError
from tiermem.notices import NoticeKind
from tiermem.stats import (
    DeviceLink,
    DirectoryStats,
    EvictReason,
    JobStats,
    Link,
    LinkStats,
    StallCause,
    StoreStats,
    TierStats,
)
from tiermem_daemon.exporter import Exporter
from tiermem_daemon.metrics import TABLE, make_registry

EMPTY = StoreStats(tiers={}, links={}, directories=(), jobs=(), sessions_opened=0, sessions_ended={}, errors={})
BUSY = StoreStats(
    tiers={"dram": TierStats(100, 60), "flash": TierStats(1000, 500)},
    links={Link.FLASH_TO_DRAM: LinkStats(bytes=7, transfers=2, seconds=0.5, queue_seconds=0.25, queued_bytes=3)},
    directories=(
        DirectoryStats("/a", 600, 300, errors={"EIO": 1, "EROFS": 2}, checksum_failures=1, written_bytes=11),
        DirectoryStats("/b", 400, 200, errors={"EIO": 3}, direct_io=False, read_bytes=13),
    ),
    jobs=(
        JobStats(
            "tune", "s1", 1, tiers={"dram": TierStats(50, 20)}, leases=2, leased_bytes=8, dirty_bytes=4, waiting=1
        ),
        JobStats(
            "tune",
            "s2",
            2,
            tiers={"dram": TierStats(50, 30)},
            leases=1,
            leased_bytes=2,
            bytes_by_kind={"activation": 6, "param": 1},
        ),
        JobStats("other", "s3", 3, tiers={"flash": TierStats(50, 5)}),
    ),
    sessions_opened=9,
    sessions_ended={"died": 2},
    errors={"TIER_FULL": 4},
    hits=21,
    misses=22,
    creates=23,
    commits=24,
    evictions={EvictReason.DEMAND: 25},
    stall_seconds={StallCause.LOAD: 2.5},
    notices={NoticeKind.FILE_REFUSED: 26},
)

Series = dict[tuple[str, frozenset[tuple[str, str]]], float]


def parse(text: str) -> Series:
    """Every tiermem series; raises where one occurs twice."""
    series: Series = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = (sample.name, frozenset(sample.labels.items()))
            assert key not in series
            series[key] = sample.value
    return {key: value for key, value in series.items() if key[0].startswith("tiermem_")}


def scrape(stats: StoreStats) -> Series:
    return parse(generate_latest(make_registry(lambda: stats)).decode())


def value(series: Series, name: str, **labels: str) -> float:
    return series[name, frozenset((key.rstrip("_"), text) for key, text in labels.items())]


def test_every_number_of_a_snapshot_arrives() -> None:
    series = scrape(BUSY)
    for expected, name, labels in [
        (1, "tiermem_build_info", {"version": __version__}),
        (100, "tiermem_tier_capacity_bytes", {"tier": "dram"}),
        (500, "tiermem_tier_used_bytes", {"tier": "flash"}),
        (50, "tiermem_job_tier_used_bytes", {"job": "tune", "tier": "dram"}),  # two ranks of one job
        (5, "tiermem_job_tier_used_bytes", {"job": "other", "tier": "flash"}),
        (6, "tiermem_job_kind_bytes", {"job": "tune", "kind": "activation"}),
        (0, "tiermem_job_kind_bytes", {"job": "tune", "kind": "optim"}),
        (4, "tiermem_job_dirty_bytes", {"job": "tune"}),
        (1, "tiermem_job_waiting_demands", {"job": "tune"}),
        (21, "tiermem_hits_total", {}),
        (22, "tiermem_misses_total", {}),
        (23, "tiermem_creates_total", {}),
        (24, "tiermem_commits_total", {}),
        (25, "tiermem_evictions_total", {"from_": "dram", "to": "flash", "reason": "demand"}),
        (7, "tiermem_transfer_bytes_total", {"link": "flash_to_dram"}),
        (2, "tiermem_transfers_total", {"link": "flash_to_dram"}),
        (0.5, "tiermem_transfer_seconds_total", {"link": "flash_to_dram"}),
        (0.25, "tiermem_transfer_queue_seconds_total", {"link": "flash_to_dram"}),
        (3, "tiermem_transfer_queued_bytes", {"link": "flash_to_dram"}),
        (2.5, "tiermem_stall_seconds_total", {"cause": "load"}),
        (3, "tiermem_sessions", {}),
        (9, "tiermem_sessions_opened_total", {}),
        (2, "tiermem_sessions_ended_total", {"reason": "died"}),
        (3, "tiermem_leases", {}),
        (10, "tiermem_pinned_bytes", {}),
        (4, "tiermem_errors_total", {"code": "TIER_FULL"}),
        (4, "tiermem_io_errors_total", {"errno": "EIO"}),
        (2, "tiermem_io_errors_total", {"errno": "EROFS"}),
        (26, "tiermem_client_notices_total", {"kind": "file_refused"}),
        (1, "tiermem_checksum_failures_total", {}),
        (600, "tiermem_flash_capacity_bytes", {"directory_index": "0"}),
        (200, "tiermem_flash_used_bytes", {"directory_index": "1"}),
        (13, "tiermem_flash_read_bytes_total", {"directory_index": "1"}),
        (11, "tiermem_flash_written_bytes_total", {"directory_index": "0"}),
        (0, "tiermem_flash_direct_io", {"directory_index": "1"}),
    ]:
        assert value(series, name, **labels) == expected, (name, labels)
    assert {name for name, _ in series} == {row.name for row in TABLE}


def test_known_label_sets_are_there_at_zero_from_the_start() -> None:
    series = scrape(EMPTY)
    for link in (*Link, *DeviceLink):
        assert value(series, "tiermem_transfer_bytes_total", link=link) == 0
    for code in Code:
        assert value(series, "tiermem_errors_total", code=code) == 0
    for kind in NoticeKind:
        assert value(series, "tiermem_client_notices_total", kind=kind) == 0
    for cause in StallCause:
        assert value(series, "tiermem_stall_seconds_total", cause=cause) == 0
    for errno in ("EIO", "ENOSPC"):
        assert value(series, "tiermem_io_errors_total", errno=errno) == 0
    for tier in ("dram", "flash", "emulated", "cuda"):
        assert value(series, "tiermem_tier_used_bytes", tier=tier) == 0
    assert value(series, "tiermem_evictions_total", from_="dram", to="flash", reason="demand") == 0
    missing = {row.name for row in TABLE} - {name for name, _ in series}
    assert all(name.startswith(("tiermem_job_", "tiermem_flash_")) for name in missing)


def test_totals_stay_when_a_job_ends() -> None:
    before, after = scrape(BUSY), scrape(dataclasses.replace(BUSY, jobs=()))
    gone = {name for name, _ in before.keys() - after.keys()}
    assert gone == {
        "tiermem_job_tier_used_bytes",
        "tiermem_job_kind_bytes",
        "tiermem_job_dirty_bytes",
        "tiermem_job_waiting_demands",
    }
    assert all(after[key] == number for key, number in before.items() if key[0].endswith("_total"))


def test_names_follow_prometheus_conventions() -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (Debian package prometheus)")
    text = generate_latest(make_registry(lambda: BUSY))
    checked = subprocess.run([promtool, "check", "metrics"], input=text, capture_output=True, timeout=30)
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, b"", b"")


class GrowingStore:
    """Fills and grows by turns: two of its snapshots put together would show used above capacity."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls = 0  # guarded by _lock

    def snapshot(self) -> StoreStats:
        with self._lock:
            self._calls += 1
            capacity = 10 * self._calls
        return dataclasses.replace(EMPTY, tiers={"dram": TierStats(capacity, capacity)})


def test_no_scrape_mixes_snapshots() -> None:
    store = GrowingStore()
    registry = make_registry(store.snapshot)
    scraped: list[Series] = []

    def scrape_often() -> None:
        for _ in range(20):
            scraped.append(parse(generate_latest(registry).decode()))

    threads = [threading.Thread(target=scrape_often) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seen = [value(series, "tiermem_tier_used_bytes", tier="dram") for series in scraped]
    assert seen == [value(series, "tiermem_tier_capacity_bytes", tier="dram") for series in scraped]
    assert sorted(seen) == [10.0 * call for call in range(1, 61)]  # one snapshot each


@contextmanager
def exporter(healthy: Callable[[], bool], ready: Callable[[], bool]) -> Iterator[Exporter]:
    with closing(Exporter("127.0.0.1", 0, make_registry(lambda: BUSY), healthy, ready)) as served:
        yield served


def get(port: int, path: str) -> tuple[int, str]:
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=10)) as connection:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()


def test_the_endpoint_serves_metrics_and_both_probes() -> None:
    state = {"healthy": True, "ready": False}
    with exporter(lambda: state["healthy"], lambda: state["ready"]) as served:
        status, text = get(served.port, "/metrics?x=1")
        assert status == 200
        assert parse(text) == scrape(BUSY)
        assert "process_resident_memory_bytes" in text
        assert get(served.port, "/healthz") == (200, "ok\n")
        assert get(served.port, "/readyz") == (503, "not ok\n")
        state.update(healthy=False, ready=True)
        assert get(served.port, "/healthz")[0] == 503
        assert get(served.port, "/readyz")[0] == 200
        status, text = get(served.port, "/")
        assert status == 404
        assert "/metrics" in text
    with pytest.raises(ConnectionRefusedError):
        get(served.port, "/healthz")


def test_two_daemons_have_two_endpoints() -> None:
    with exporter(lambda: True, lambda: True) as first, exporter(lambda: True, lambda: True) as second:
        assert first.port != second.port
        assert get(first.port, "/metrics")[0] == get(second.port, "/metrics")[0] == 200


def test_a_port_in_use_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"metrics_port = {port}.*Address already in use"):
            Exporter("127.0.0.1", port, make_registry(lambda: EMPTY), lambda: True, lambda: True)


def test_an_idle_scraper_does_not_hold_the_end() -> None:
    with exporter(lambda: True, lambda: True) as served, socket.create_connection(("127.0.0.1", served.port)):
        served.close()


def test_a_failing_snapshot_is_logged_and_the_endpoint_lives(caplog: pytest.LogCaptureFixture) -> None:
    calls = iter([ZeroDivisionError("broken"), None])

    def snapshot() -> StoreStats:
        if (error := next(calls)) is not None:
            raise error
        return EMPTY

    with closing(Exporter("127.0.0.1", 0, make_registry(snapshot), lambda: True, lambda: True)) as served:
        with pytest.raises(http.client.RemoteDisconnected):
            get(served.port, "/metrics")
        assert get(served.port, "/metrics")[0] == 200
    assert "ZeroDivisionError: broken" in caplog.text
