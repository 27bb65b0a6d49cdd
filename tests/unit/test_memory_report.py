"""Memory that is really taken is seen, and by kind."""

from __future__ import annotations

import mmap
import os
import threading

from tiermem.units import MIB
from tiermem_client.memory_report import PeakAnonymous, process_memory


def touched(nbytes: int, flags: int) -> mmap.mmap:
    memory = mmap.mmap(-1, nbytes, flags=flags)
    for offset in range(0, nbytes, mmap.PAGESIZE):
        memory[offset] = 1
    return memory


def test_anonymous_and_shared_memory_are_told_apart() -> None:
    before = process_memory()
    private = touched(32 * MIB, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with_private = process_memory()
    shared = touched(32 * MIB, mmap.MAP_SHARED | mmap.MAP_ANONYMOUS)
    with_both = process_memory()
    assert 28 * MIB < with_private.anonymous_bytes - before.anonymous_bytes < 36 * MIB
    assert 28 * MIB < with_private.data_bytes - before.data_bytes < 36 * MIB
    assert abs(with_both.anonymous_bytes - with_private.anonymous_bytes) < 4 * MIB
    assert 28 * MIB < with_both.shared_bytes - with_private.shared_bytes < 36 * MIB
    assert with_both.peak_resident_bytes >= with_both.anonymous_bytes
    private.close()
    shared.close()


def test_a_peak_that_is_over_is_remembered() -> None:
    with PeakAnonymous() as peak:
        before_bytes = process_memory().anonymous_bytes
        memory = touched(64 * MIB, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        threading.Event().wait(0.1)
        memory.close()
        assert process_memory().anonymous_bytes - before_bytes < 32 * MIB
        assert peak.peak_bytes - before_bytes > 56 * MIB
    after_bytes = peak.peak_bytes
    later = touched(2 * 64 * MIB, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    assert peak.peak_bytes == after_bytes
    later.close()


def test_the_sampler_is_a_named_daemon_thread_that_ends_and_says_that_it_samples() -> None:
    with PeakAnonymous() as peak:
        (thread,) = [thread for thread in threading.enumerate() if "peak-anonymous" in thread.name]
        assert thread.daemon
        assert thread.name.startswith("tiermem-")
        assert peak.sampled is True
    assert not thread.is_alive()


def test_it_reads_this_process() -> None:
    with open(f"/proc/{os.getpid()}/statm") as statm:
        resident_bytes = int(statm.read().split()[1]) * mmap.PAGESIZE
    memory = process_memory()
    assert abs(memory.peak_resident_bytes - resident_bytes) < resident_bytes
    assert memory.anonymous_bytes < memory.peak_resident_bytes
