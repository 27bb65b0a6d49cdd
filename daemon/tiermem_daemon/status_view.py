"""Asking a running daemon how it is, and showing the answer to people."""

from __future__ import annotations

from pathlib import Path
from typing import TextIO

import grpc
import msgspec
from grpc_health.v1 import health_pb2, health_pb2_grpc
from rich.console import Console
from rich.progress_bar import ProgressBar
from rich.table import Table

from tiermem.errors import ProtocolError
from tiermem.rpc.status import error_from_rpc
from tiermem.rpc.v1 import tiermem_pb2 as pb
from tiermem.rpc.v1 import tiermem_pb2_grpc as pb_grpc
from tiermem.stats import DeviceKind, JobStats, StoreStats, TierStats
from tiermem.units import format_size
from tiermem_daemon.health import SERVICE

_TIMEOUT_S = 5.0
_BAR_COLUMNS = 24


def fetch(socket: Path, job: str = "") -> bytes:
    """A StoreStats snapshot as JSON, of one job if one is named. Raises DaemonUnavailable, NotFound."""
    with grpc.insecure_channel(f"unix:{socket}") as channel:
        try:
            stub = pb_grpc.TierMemStub(channel)  # type: ignore[no-untyped-call]  # generated
            answer = stub.GetStatus(pb.GetStatusRequest(job=job), timeout=_TIMEOUT_S)
        except grpc.RpcError as error:
            raise error_from_rpc(error) from error
    return bytes(answer.stats_json)


def check_health(socket: Path) -> str:
    """ "SERVING" or "NOT_SERVING". Raises DaemonUnavailable or DaemonTimeout."""
    with grpc.insecure_channel(f"unix:{socket}") as channel:
        ask = health_pb2.HealthCheckRequest(service=SERVICE)
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(ask, timeout=_TIMEOUT_S)
        except grpc.RpcError as error:
            raise error_from_rpc(error) from error
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))


def decode(stats_json: bytes) -> StoreStats:
    """Fields that this version does not know are ignored. Raises ProtocolError for anything else."""
    try:
        return msgspec.json.decode(stats_json, type=StoreStats)
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"the daemon's status is not understood ({error}); install its version") from error


def show(stats: StoreStats, stream: TextIO) -> None:
    """Tables of tiers, links, flash directories and jobs; counts of what went wrong, where anything did."""
    console = Console(file=stream, highlight=False, width=None if stream.isatty() else 120)
    console.print(_tiers(stats.tiers))
    console.print(_links(stats))
    console.print(_directories(stats))
    if stats.jobs:
        console.print(_jobs(stats.jobs))
        for job in stats.jobs:
            if job.notices:
                told = ", ".join(f"{kind} {count}" for kind, count in sorted(job.notices.items()))
                console.print(f"job {job.job} reports: {told}", markup=False)
    else:
        console.print("no job is running")
    if troubles := {code: count for code, count in stats.errors.items() if count}:
        console.print("errors: " + ", ".join(f"{code} {count}" for code, count in sorted(troubles.items())))


def _tiers(tiers: dict[str, TierStats]) -> Table:
    table = _table("tier", ">used", ">capacity", "", ">%")
    for name, tier in tiers.items():
        if name in set(DeviceKind) and not tier.capacity_bytes:
            continue  # no trainer has one
        bar = ProgressBar(total=max(1, tier.capacity_bytes), completed=tier.used_bytes, width=_BAR_COLUMNS)
        percent = f"{100 * tier.used_bytes / max(1, tier.capacity_bytes):.0f}"
        table.add_row(name, format_size(tier.used_bytes), format_size(tier.capacity_bytes), bar, percent)
    return table


def _links(stats: StoreStats) -> Table:
    table = _table("link", ">moved", ">transfers", ">rate in I/O", ">queued", ">time queued")
    absent = [kind for kind in DeviceKind if not stats.tiers.get(kind, TierStats()).capacity_bytes]
    unused = {link for kind in absent for link in (kind.inward, kind.outward)}
    for name, link in stats.links.items():
        if name in unused and not link.bytes:
            continue
        rate = f"{format_size(round(link.bytes / link.seconds))}/s" if link.seconds else "-"
        queue = f"{link.queue_seconds:.1f} s"
        table.add_row(name, format_size(link.bytes), str(link.transfers), rate, format_size(link.queued_bytes), queue)
    return table


def _directories(stats: StoreStats) -> Table:
    table = _table("flash directory", ">used", ">capacity", ">written", "I/O", "errors")
    for directory in stats.directories:
        errors = [f"{name} {count}" for name, count in sorted(directory.errors.items())]
        if directory.checksum_failures:
            errors.append(f"checksum {directory.checksum_failures}")
        table.add_row(
            directory.path,
            format_size(directory.used_bytes),
            format_size(directory.capacity_bytes),
            format_size(directory.written_bytes),
            "direct" if directory.direct_io else "page cache",
            ", ".join(errors) or "none",
        )
    return table


def _jobs(jobs: tuple[JobStats, ...]) -> Table:
    names = ["dram", "flash", *(kind for kind in DeviceKind if any(kind in job.tiers for job in jobs))]
    columns = [f">{name}" for name in names]
    table = _table("job", ">pid", *columns, ">dirty", ">bundles", ">leases", ">hits", ">misses", ">waits")
    for job in jobs:
        tiers = [format_size(job.tiers[name].used_bytes) if name in job.tiers else "-" for name in names]
        counts = [job.bundles, job.leases, job.hits, job.misses]
        waits = f"{sum(job.stall_seconds.values()):.1f} s"
        table.add_row(job.job, str(job.pid), *tiers, format_size(job.dirty_bytes), *map(str, counts), waits)
    return table


def _table(*columns: str) -> Table:
    """A column whose name begins with ">" is set to the right."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column.lstrip(">"), justify="right" if column.startswith(">") else "left", overflow="fold")
    return table
