"""One job of `benchmarks.scale`: python -m benchmarks.scale_job SOCKET ARENA-BYTES STEPS WARM-UP STEP-SECONDS. Says
"ready" on a line after the warm-up, waits for a line, and answers with a line of JSON; stays until its input ends.

The session, its grant table, the residency and the address space are a trainer's own. The arena's pages are absent and
nobody touches them, so a move of frames costs its system calls and their bookkeeping, but no pages.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.scale_model import Model
from tiermem_client.address_space import AddressSpace
from tiermem_client.channel import dial
from tiermem_client.memory import Bundle, HostMemory
from tiermem_client.page_moves import Headroom, MoveCounters, RemapMover, kernel_remap, reserve_addresses
from tiermem_client.residency import Residency
from tiermem_client.session import Session

_TIMEOUT_S = 120.0
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_libc = ctypes.PyDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]


class SparseMover(RemapMover):
    """As a trainer's, but the arena's pages stay absent."""

    def __init__(self, fd: int, arena_bytes: int, counters: MoveCounters, headroom: Headroom) -> None:
        self._counters, self._nbytes, self._headroom, self._remap = counters, arena_bytes, headroom, kernel_remap
        self.home = reserve_addresses(arena_bytes, 2 << 20)
        flags = mmap.MAP_SHARED | _MAP_FIXED | _MAP_NORESERVE
        if _libc.mmap(self.home, arena_bytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, 0) != self.home:
            raise OSError(ctypes.get_errno(), "the sparse arena cannot be mapped")


class SparseSpace(AddressSpace):
    """With that mover, whatever the kernel knows."""

    def _choose_mover(self, fd: int, arena_bytes: int, *_: Any) -> SparseMover:
        return SparseMover(fd, arena_bytes, self._counters, self._headroom)


class ClockedMemory(HostMemory):
    """Tells the CPU seconds of moving frames from the rest."""

    frames_s = 0.0

    def leased(self, bundle: Bundle) -> None:
        before_s = time.thread_time()
        super().leased(bundle)
        self.frames_s += time.thread_time() - before_s

    def ended(self, bundle: Bundle) -> None:
        before_s = time.thread_time()
        super().ended(bundle)
        self.frames_s += time.thread_time() - before_s


def run(session: Session, steps: int, warm_up: int, step_s: float) -> dict[str, Any]:
    """The row of this job: numbers of one step, in the mean. Raises SystemExit where bundles are not what they were
    made to be.
    """
    pause_s = 0.0
    memory = ClockedMemory(session.address_space, session.opened.bundle_cap_bytes)
    residency = Residency(session, memory)
    model = Model(residency, lambda: time.sleep(pause_s))
    model.adopt()
    pause_s = step_s / model.pauses
    for _ in range(warm_up):
        model.step()
    print("ready", flush=True)
    sys.stdin.readline()
    stats = residency.stats
    before = (stats.local, stats.ahead, stats.demands, *session.messages, memory.frames_s)
    cpu_s, wall_s = time.process_time(), time.perf_counter()
    for _ in range(steps):
        model.step()
    cpu_s, wall_s = time.process_time() - cpu_s, time.perf_counter() - wall_s
    after = (stats.local, stats.ahead, stats.demands, *session.messages, memory.frames_s)
    local, ahead, demands, sent, heard, frames_s = ((b - a) / steps for a, b in zip(before, after, strict=True))
    if local + ahead + demands != model.leases:
        raise SystemExit(f"a step leased {local + ahead + demands} bundles, not {model.leases}")
    return {
        "cpu_s": cpu_s / steps,
        "wall_s": wall_s / steps,
        "frames_s": frames_s,
        "leases": model.leases,
        "asked": demands,
        "sent": sent,
        "heard": heard,
        "tensors": model.tensors,
        "parameters": model.parameters,
        "pauses": model.pauses,
    }


def main() -> int:
    socket, arena_bytes, steps, warm_up, step_s = sys.argv[1:]
    connection = dial(Path(socket), _TIMEOUT_S)
    session = Session(connection, f"scale-{os.getpid()}", int(arena_bytes), 0, _TIMEOUT_S, SparseSpace)
    try:
        print(json.dumps(run(session, int(steps), int(warm_up), float(step_s))), flush=True)
        sys.stdin.read()
    finally:
        session.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
