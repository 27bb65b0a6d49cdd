"""What a process has in memory, by kind, from /proc/self/status, and the highest value of the anonymous part.

Anonymous memory (RssAnon) is what a training script allocates; the job's DRAM arena is shared memory (RssShmem) and is
counted by the daemon. Standard library only, so that a script can measure a run without tiermem with it.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from types import TracebackType

SAMPLE_INTERVAL_S = 0.01


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """Bytes. `peak_resident_bytes` is the kernel's own maximum of the whole resident set since the process started."""

    anonymous_bytes: int
    shared_bytes: int
    data_bytes: int
    peak_resident_bytes: int


def process_memory() -> ProcessMemory:
    """This process now: RssAnon, RssShmem, VmData and VmHWM. 20 to 50 microseconds."""
    with open("/proc/self/status", "rb") as status:
        text = status.read()
    fields = {line.split(b":")[0]: line for line in text.splitlines()}

    def value(name: bytes) -> int:
        return int(fields[name].split()[1]) * 1024

    return ProcessMemory(
        anonymous_bytes=value(b"RssAnon"),
        shared_bytes=value(b"RssShmem"),
        data_bytes=value(b"VmData"),
        peak_resident_bytes=value(b"VmHWM"),
    )


class PeakAnonymous:
    """Context manager: the highest anonymous memory of this process between entering and leaving.

    Sampled every 10 ms by a daemon thread (the kernel keeps no such maximum): a peak shorter than that can be missed,
    as can one within a single call that keeps the GIL. `peak_bytes` may be read at any time from any thread.
    """

    sampled = True

    def __init__(self) -> None:
        self._peak_bytes = 0  # guarded by _lock
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="tiermem-peak-anonymous-sampler", daemon=True)

    @property
    def peak_bytes(self) -> int:
        """The maximum so far, this instant included while entered."""
        if not self._stop.is_set():
            self._sample()
        with self._lock:
            return self._peak_bytes

    def __enter__(self) -> PeakAnonymous:
        self._sample()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._sample()
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(SAMPLE_INTERVAL_S):
            self._sample()

    def _sample(self) -> None:
        now_bytes = process_memory().anonymous_bytes
        with self._lock:
            self._peak_bytes = max(self._peak_bytes, now_bytes)
