"""Time as an argument, so that decisions can be tested without waiting."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Monotonic seconds; safe from any thread."""

    def now_s(self) -> float: ...


class MonotonicClock:
    """The operating system's monotonic clock."""

    def now_s(self) -> float:
        return time.monotonic()
