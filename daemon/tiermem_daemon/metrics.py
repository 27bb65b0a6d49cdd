"""What Prometheus sees: one table of metrics, filled from one snapshot per scrape.

Labels are bounded. Tiers, links, causes and codes are closed sets, present at zero from the start; `directory_index`
counts the configured directories; `job` is in gauges only, for live jobs. Totals have none: they never fall.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tiermem import __version__
from tiermem.bundle import Kind, TierName
from tiermem.errors import Code
from tiermem.notices import NoticeKind
from tiermem.stats import (
    DeviceLink,
    EvictReason,
    JobStats,
    Link,
    PredictionOutcome,
    PushOutcome,
    StallCause,
    StoreStats,
)

# Seen on disks that fail or fill up; any other errno gets its own series when it first occurs.
_KNOWN_ERRNOS = ("EIO", "ENOSPC")
_KNOWN_ENDS = ("closed", "died", "disconnected", "protocol", "shutdown")

_Samples = Iterable[tuple[tuple[str, ...], float]]


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One row: `samples` yields (label values, value) out of a snapshot, each tuple of label values once."""

    name: str
    family: type[GaugeMetricFamily] | type[CounterMetricFamily]
    help: str
    labels: tuple[str, ...]
    samples: Callable[[StoreStats], _Samples]


def _value(value: Callable[[StoreStats], float]) -> Callable[[StoreStats], _Samples]:
    return lambda stats: [((), value(stats))]


def _with_zeros(known: Iterable[str], counted: Iterable[tuple[str, float]]) -> _Samples:
    table: dict[str, float] = dict.fromkeys(map(str, known), 0)
    table.update((str(key), value) for key, value in counted)
    return [((key,), value) for key, value in table.items()]


def _tier(field: str) -> Callable[[StoreStats], _Samples]:
    return lambda stats: _with_zeros(TierName, ((n, getattr(tier, field)) for n, tier in stats.tiers.items()))


def _link(field: str) -> Callable[[StoreStats], _Samples]:
    return lambda stats: _with_zeros(
        (*Link, *DeviceLink), ((link, getattr(s, field)) for link, s in stats.links.items())
    )


def _directory(field: str) -> Callable[[StoreStats], _Samples]:
    return lambda stats: [((str(i),), float(getattr(d, field))) for i, d in enumerate(stats.directories)]


def _job(field: str) -> Callable[[StoreStats], _Samples]:
    return lambda stats: _sum_by_job(stats.jobs, lambda job: [((), getattr(job, field))])


def _over_jobs(field: str) -> Callable[[StoreStats], _Samples]:
    return lambda stats: [((), sum(getattr(job, field) for job in stats.jobs))]


def _sum_by_job(jobs: Iterable[JobStats], samples: Callable[[JobStats], _Samples]) -> _Samples:
    """Ranks of one job are one series: Prometheus refuses a scrape that has a label set twice."""
    sums: defaultdict[tuple[str, ...], float] = defaultdict(float)
    for job in jobs:
        for labels, value in samples(job):
            sums[job.job, *labels] += value
    return sums.items()


def _job_tiers(stats: StoreStats) -> _Samples:
    return _sum_by_job(stats.jobs, lambda job: [((name,), tier.used_bytes) for name, tier in job.tiers.items()])


def _job_kinds(stats: StoreStats) -> _Samples:
    kinds = [kind.name.lower() for kind in Kind]
    return _sum_by_job(stats.jobs, lambda job: _with_zeros(kinds, job.bytes_by_kind.items()))


def _io_errors(stats: StoreStats) -> _Samples:
    sums: Counter[str] = Counter()
    for directory in stats.directories:
        sums.update(directory.errors)
    return _with_zeros(_KNOWN_ERRNOS, sums.items())


def _evictions(stats: StoreStats) -> _Samples:
    """Every eviction ends in flash: a clean bundle has its copy there already."""
    for (reason,), count in _with_zeros(EvictReason, stats.evictions.items()):
        yield (TierName.DRAM.value, TierName.FLASH.value, reason), count


def _session_ends(stats: StoreStats) -> _Samples:
    return _with_zeros(_KNOWN_ENDS, stats.sessions_ended.items())


def _stalls(stats: StoreStats) -> _Samples:
    return _with_zeros(StallCause, stats.stall_seconds.items())


def _predictions(stats: StoreStats) -> _Samples:
    return _with_zeros(PredictionOutcome, stats.predictions.items())


def _pushes(stats: StoreStats) -> _Samples:
    return _with_zeros(PushOutcome, stats.pushes.items())


def _notices(stats: StoreStats) -> _Samples:
    return _with_zeros(NoticeKind, stats.notices.items())


def _gauge(name: str, text: str, samples: Callable[[StoreStats], _Samples], *labels: str) -> MetricSpec:
    return MetricSpec(name, GaugeMetricFamily, text, labels, samples)


def _total(name: str, text: str, samples: Callable[[StoreStats], _Samples], *labels: str) -> MetricSpec:
    return MetricSpec(f"{name}_total", CounterMetricFamily, text, labels, samples)


TABLE: tuple[MetricSpec, ...] = (
    _gauge("tiermem_build_info", "1; the label says which version runs.", lambda _: [((__version__,), 1)], "version"),
    # Tiers.
    _gauge("tiermem_tier_capacity_bytes", "Most bytes that the tier can hold.", _tier("capacity_bytes"), "tier"),
    _gauge("tiermem_tier_used_bytes", "Bytes taken in the tier, slack included.", _tier("used_bytes"), "tier"),
    _total("tiermem_evictions", "Bundles that left a tier.", _evictions, "from", "to", "reason"),
    # Accesses.
    _total("tiermem_hits", "Accesses whose bundle was in DRAM.", _value(lambda s: s.hits)),
    _total("tiermem_misses", "Accesses that waited for flash.", _value(lambda s: s.misses)),
    _total("tiermem_creates", "Bundles created.", _value(lambda s: s.creates)),
    _total("tiermem_commits", "Commits of updated bundles.", _value(lambda s: s.commits)),
    _total("tiermem_predictions", "Accesses by whether they had been predicted.", _predictions, "outcome"),
    _total("tiermem_pushed_grants", "Grants sent ahead of demands, and those of them used.", _pushes, "outcome"),
    _total("tiermem_stall_seconds", "Seconds that demands waited.", _stalls, "cause"),
    _gauge("tiermem_leases", "Leases and grants held now.", _over_jobs("leases")),
    _gauge("tiermem_pinned_bytes", "Bytes that leases keep in DRAM.", _over_jobs("leased_bytes")),
    # Links.
    _total("tiermem_transfer_bytes", "Bytes moved over the link.", _link("bytes"), "link"),
    _total("tiermem_transfers", "Transfers finished on the link.", _link("transfers"), "link"),
    _total("tiermem_transfer_seconds", "Seconds in I/O, summed over transfers.", _link("seconds"), "link"),
    _total("tiermem_transfer_queue_seconds", "Seconds that transfers waited for I/O.", _link("queue_seconds"), "link"),
    _gauge("tiermem_transfer_queued_bytes", "Bytes of transfers that wait now.", _link("queued_bytes"), "link"),
    # Sessions and jobs.
    _gauge("tiermem_sessions", "Sessions open now.", _value(lambda s: len(s.jobs))),
    _total("tiermem_sessions_opened", "Sessions opened.", _value(lambda s: s.sessions_opened)),
    _total(
        "tiermem_sessions_ended",
        "Sessions ended.",
        lambda s: _with_zeros(_KNOWN_ENDS, s.sessions_ended.items()),
        "reason",
    ),
    _gauge("tiermem_job_tier_used_bytes", "Bytes that a live job takes in the tier.", _job_tiers, "job", "tier"),
    _gauge("tiermem_job_kind_bytes", "Bytes of a live job's bundles, wherever they are.", _job_kinds, "job", "kind"),
    _gauge("tiermem_job_dirty_bytes", "Bytes of a live job that flash does not have yet.", _job("dirty_bytes"), "job"),
    _gauge("tiermem_job_waiting_demands", "Demands of a live job that wait now.", _job("waiting"), "job"),
    # What went wrong.
    _total("tiermem_errors", "Typed errors given to clients.", lambda s: _with_zeros(Code, s.errors.items()), "code"),
    _total("tiermem_client_notices", "Fallbacks and inexact ways that trainers have reported.", _notices, "kind"),
    _total("tiermem_io_errors", "Reads and writes that the operating system refused.", _io_errors, "errno"),
    _total(
        "tiermem_checksum_failures",
        "Chunks that were read otherwise than they had been written.",
        _value(lambda s: sum(d.checksum_failures for d in s.directories)),
    ),
    # Flash directories.
    _gauge("tiermem_flash_capacity_bytes", "Most bytes.", _directory("capacity_bytes"), "directory_index"),
    _gauge("tiermem_flash_used_bytes", "Bytes taken.", _directory("used_bytes"), "directory_index"),
    _total("tiermem_flash_read_bytes", "Bytes read.", _directory("read_bytes"), "directory_index"),
    _total("tiermem_flash_written_bytes", "Bytes written: wear.", _directory("written_bytes"), "directory_index"),
    _gauge(
        "tiermem_flash_direct_io",
        "1 where I/O bypasses the page cache, 0 where the filesystem refused that.",
        _directory("direct_io"),
        "directory_index",
    ),
)


class StoreCollector(Collector):
    """`snapshot` is called once per scrape, from the thread that scrapes: used never exceeds capacity."""

    def __init__(self, snapshot: Callable[[], StoreStats]) -> None:
        self._snapshot = snapshot

    def describe(self) -> Iterator[Metric]:
        for row in TABLE:
            yield row.family(row.name, row.help, labels=row.labels)

    def collect(self) -> Iterator[Metric]:
        stats = self._snapshot()
        for row in TABLE:
            family = row.family(row.name, row.help, labels=row.labels)
            for labels, value in row.samples(stats):
                family.add_metric(labels, value)
            yield family


def make_registry(snapshot: Callable[[], StoreStats]) -> CollectorRegistry:
    """A registry of its own: two daemons in one process do not meet. With the process's CPU, memory and descriptors."""
    registry = CollectorRegistry()
    registry.register(StoreCollector(snapshot))
    ProcessCollector(registry=registry)
    return registry
