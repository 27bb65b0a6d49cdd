"""What a module's forward waits for when its bundle has been granted ahead: a look-up, the frames moved into their
addresses, and the guards opened. From the entry to the exit of the hook, with the reader thread active.

Blocks are run one after the other, forever the same way round, in an arena that holds two thirds of them, so that every
block is loaded from flash ahead of its use. Hooks that had to ask the daemon are counted apart.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from benchmarks.report import Machine, Report
from tiermem.units import GIB, MIB

TITLE = "entry to exit of a module's hook whose bundle is granted already"
P50_S, P99_S, MOVE_S_PER_BYTE = 50e-6, 500e-6, 20e-3 / GIB
LEAST_BLOCKS, LEAST_ARENA_BYTES = 48, 256 * MIB  # a smaller arena has smaller frames, so more of them to move
WARM_UP = 4  # rounds in which the order is learned


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size", type=int, action="append", help="MiB of a block; may be repeated (default 1 and 8)")
    parser.add_argument("--rounds", type=int, default=20, help="rounds over 48 blocks, fewer over more (default 20)")
    parser.add_argument("--compute-ms", type=float, default=20.0, help="of a block, after its hook (default 20)")


def run(args: argparse.Namespace) -> Report:
    """Raises SystemExit where no hook found its bundle granted."""
    machine = Machine.here()
    rows: list[dict[str, Any]] = []
    worst = 0.0
    for size in args.size or [1, 8]:
        nbytes = size * MIB
        times = _measure(nbytes, args.rounds, args.compute_ms / 1e3)
        if len(times.granted_s) < 100:
            hooks = len(times.granted_s) + len(times.asked_s)
            raise SystemExit(f"only {len(times.granted_s)} of {hooks} hooks found their bundle granted")
        rows.append(_row(nbytes, times))
        worst = max(worst, *(rows[-1][f"{p} us"] / rows[-1][f"{p} allowed us"] for p in ("p50", "p99")))
    return Report(
        benchmark="grant_path",
        what="worst of p50 over its allowance and p99 over its allowance, over the sizes",
        figure=worst,
        bound=min(row["frames us"] / row["p50 allowed us"] for row in rows),
        target=1.0,
        machine=machine,
        command=_command(args),
        rows=rows,
        notes=(
            f"allowed: p50 {P50_S * 1e6:.0f} us, p99 {P99_S * 1e6:.0f} us, each and 20 ms/GiB for moving the frames in",
            "frames us: moving a bundle's frames in, measured in the same run (median); bound: nothing but that",
            "asked: hooks whose bundle had not come, because the disk was slower than the computation",
        ),
    )


def _blocks(nbytes: int) -> int:
    """As many as make an arena for two thirds of them large enough."""
    return max(LEAST_BLOCKS, LEAST_ARENA_BYTES * 3 // 2 // nbytes)


@dataclass(slots=True)
class _Times:
    """Seconds of hooks that found their bundle granted, of those that asked, and of moving frames in."""

    granted_s: list[float] = field(default_factory=list)
    asked_s: list[float] = field(default_factory=list)
    moves_s: list[float] = field(default_factory=list)

    def clear(self) -> None:
        for times in (self.granted_s, self.asked_s, self.moves_s):
            times.clear()


def _row(nbytes: int, times: _Times) -> dict[str, Any]:
    move_s = nbytes * MOVE_S_PER_BYTE
    return {
        "bundle bytes": nbytes,
        "p50 us": _percentile(times.granted_s, 50) * 1e6,
        "p50 allowed us": (P50_S + move_s) * 1e6,
        "p99 us": _percentile(times.granted_s, 99) * 1e6,
        "p99 allowed us": (P99_S + move_s) * 1e6,
        "frames us": statistics.median(times.moves_s) * 1e6,
        "granted": len(times.granted_s),
        "asked": len(times.asked_s),
        "asked p50 us": statistics.median(times.asked_s) * 1e6 if times.asked_s else None,
    }


def _percentile(values: list[float], percent: int) -> float:
    return statistics.quantiles(values, n=100)[percent - 1]


def _measure(nbytes: int, rounds: int, compute_s: float) -> _Times:
    import torch
    from torch import nn

    import tiermem
    from tiermem_client.address_space import AddressSpace
    from tiermem_client.unit_hooks import UnitHooks

    torch.set_num_threads(1)
    blocks = nn.ModuleList(nn.Linear(nbytes // 4 // 64, 64, bias=False) for _ in range(_blocks(nbytes)))
    job = tiermem.attach(blocks, dram=nbytes * len(blocks) * 2 // 3)
    times, residency = _Times(), job.residency

    def timed(enter: Callable[..., Any]) -> Callable[..., Any]:
        def hook(self: Any, unit: Any) -> None:
            demands, before_s = residency.stats.demands, time.perf_counter()
            enter(self, unit)
            seconds = time.perf_counter() - before_s
            (times.granted_s if residency.stats.demands == demands else times.asked_s).append(seconds)

        return hook

    def moving(move: Callable[..., Any]) -> Callable[..., Any]:
        def moved(*arguments: Any) -> Any:
            before_s = time.perf_counter()
            result = move(*arguments)
            times.moves_s.append(time.perf_counter() - before_s)
            return result

        return moved

    enter, map_frames = UnitHooks.enter, AddressSpace.map
    UnitHooks.enter, AddressSpace.map = timed(enter), moving(map_frames)  # type: ignore[method-assign]
    try:
        inputs = torch.ones(1, nbytes // 4 // 64)
        with torch.no_grad():
            for round_ in range(WARM_UP + max(2, rounds * LEAST_BLOCKS // len(blocks))):
                if round_ == WARM_UP:
                    times.clear()
                for block in blocks:
                    block(inputs)
                    time.sleep(compute_s)
    finally:
        UnitHooks.enter, AddressSpace.map = enter, map_frames  # type: ignore[method-assign]
        job.close()
    return times


def _command(args: argparse.Namespace) -> str:
    words = [f"python -m benchmarks grant_path --rounds {args.rounds} --compute-ms {args.compute_ms:g}"]
    return " ".join([*words, *(f"--size {size}" for size in args.size or ())])


if __name__ == "__main__":
    from benchmarks.__main__ import main

    sys.exit(main(["grant_path", *sys.argv[1:]]))
