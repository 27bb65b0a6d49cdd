"""What else the machine did while something was measured: without it, a ratio on a shared machine means nothing."""

from __future__ import annotations

import resource
import time
from dataclasses import dataclass
from types import TracebackType

import psutil


@dataclass(slots=True)
class OtherLoad:
    """Context manager around child processes that are waited for inside it.

    `cores` afterwards: how many cores were busy on average with anything but them and their own waited-for children
    (and this process). The kernel's work for their I/O counts as other load; it is small.
    """

    cores: float = 0.0
    _busy_s: float = 0.0
    _own_s: float = 0.0
    _started_s: float = 0.0

    def __enter__(self) -> OtherLoad:
        self._busy_s, self._own_s, self._started_s = _busy_s(), _own_s(), time.perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        others_s = (_busy_s() - self._busy_s) - (_own_s() - self._own_s)
        self.cores = max(0.0, others_s / (time.perf_counter() - self._started_s))


def _busy_s() -> float:
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - times.iowait - times.steal - times.guest - times.guest_nice)


def _own_s() -> float:
    return sum(
        usage.ru_utime + usage.ru_stime
        for usage in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )
