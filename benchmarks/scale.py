"""What the control path costs at the scale of a large model: the CPU time of daemon and client in a training step of 70
billion parameters, with 1 to 8 jobs on one daemon. No byte moves: the flash tier does no I/O, there are no digests, the
arena's pages are absent, and computing is sleeping.

A daemon and a process for each job. Processes, as trainers are: a job's CPU time is its process's, and jobs do not wait
for each other's interpreter lock.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.load import OtherLoad
from benchmarks.paced import ROOT
from benchmarks.report import Machine, Report, Row
from tiermem.bundle import Mode
from tiermem.grants.messages import Commit, Done, Grant, Used
from tiermem.rpc import grants as codec
from tiermem.units import GIB, MIB

TITLE = "CPU time of the control path in a step of 70 billion parameters, with 1 to 8 jobs on a daemon"
ALLOWED_S = 0.1  # of a step, for the daemon and for the client each
JOBS = (1, 2, 4, 8)
MAIN_CAP_BYTES, SMALL_CAP_BYTES = GIB, 64 * MIB
SMALL_ARENA_BYTES = 64 * GIB  # more has frames too large for such bundles
START_TIMEOUT_S, STEP_TIMEOUT_S = 120.0, 300.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--jobs", type=int, action="append", help="jobs at once; may be repeated (default 1 2 4 8)")
    parser.add_argument("--steps", type=int, default=2, help="steps that count (default 2)")
    parser.add_argument("--warm-up", type=int, default=3, help="steps in which the order is learned (default 3)")
    parser.add_argument("--step-s", type=float, default=4.0, help="seconds of computing in a step (default 4)")
    parser.add_argument("--arena", type=int, default=256, metavar="GIB", help="of a job (default 256 GiB)")
    parser.add_argument("--no-small", action="store_true", help="without the row of 64 MiB bundles")


def run(args: argparse.Namespace) -> Report:
    """Raises SystemExit where a process fails, or a job leases other bundles than its model has."""
    machine = Machine.here()
    cases = [(MAIN_CAP_BYTES, args.arena * GIB, jobs, args.steps) for jobs in args.jobs or JOBS]
    if not args.no_small:  # a step of which has sixteen times as many leases
        cases.append((SMALL_CAP_BYTES, min(args.arena * GIB, SMALL_ARENA_BYTES), 1, 1))
    with OtherLoad() as other:
        results = [(case, *_measure(*case, args)) for case in cases]
    rows = [_row(*case[:3], daemon_s, jobs) for case, daemon_s, jobs in results]
    ratios = [_worst(daemon_s, jobs) / ALLOWED_S for case, daemon_s, jobs in results if case[0] == MAIN_CAP_BYTES]
    model = results[0][2][0]
    bound_s = max(_codec_s(jobs[0]) for case, _, jobs in results if case[0] == MAIN_CAP_BYTES)
    return Report(
        benchmark="scale",
        what="worst of the CPU time of daemon or client in a step of one job over 100 ms, over the jobs, at 1 GiB",
        figure=max(ratios),
        bound=bound_s / ALLOWED_S,
        target=1.0,
        machine=machine,
        command=_command(args),
        rows=rows,
        notes=(
            f"{model['parameters'] / 1e9:.1f} billion parameters in {model['tensors']} tensors; bfloat16 with two "
            f"float32 moments; a step of one job has {model['leases']} leases at 1 GiB",
            "ms: CPU time of the whole process; frames ms: the part of the client's that is moving frames in and out",
            f"a step computes for {args.step_s:g} s, spread over {model['pauses']} pauses at 1 GiB",
            "bound: encoding and decoding the step's leases and ends of leases alone, in both processes, over 2",
            f"other processes kept {other.cores:.1f} cores busy",
        ),
    )


def _worst(daemon_s: float, jobs: list[dict[str, Any]]) -> float:
    """CPU seconds of a step of one job: the daemon's or a client's, whichever is more."""
    return max([daemon_s, *(float(job["cpu_s"]) for job in jobs)])


def _row(cap_bytes: int, arena_bytes: int, count: int, daemon_s: float, jobs: list[dict[str, Any]]) -> Row:
    def mean(key: str) -> float:
        return statistics.mean(float(job[key]) for job in jobs)

    return {
        "jobs": count,
        "cap bytes": cap_bytes,
        "arena bytes": arena_bytes,
        "daemon ms": daemon_s * 1e3,
        "client ms": mean("cpu_s") * 1e3,
        "frames ms": mean("frames_s") * 1e3,
        "leases": round(mean("leases")),
        "asked": mean("asked"),
        "sent": round(mean("sent")),
        "heard": round(mean("heard")),
        "step s": mean("wall_s"),
    }


def _measure(
    cap_bytes: int, arena_bytes: int, count: int, steps: int, args: argparse.Namespace
) -> tuple[float, list[dict[str, Any]]]:
    """The daemon's CPU seconds for a step of one job, and what the jobs say of themselves."""
    with tempfile.TemporaryDirectory(prefix="tiermem-scale-") as folder, contextlib.ExitStack() as stack:
        daemon = stack.enter_context(_daemon(Path(folder), count * arena_bytes, cap_bytes))
        socket = str(Path(folder) / "tiermemd.sock")
        words = [socket, str(arena_bytes), str(steps), str(args.warm_up), str(args.step_s)]
        children = [stack.enter_context(_Child(f"job {n + 1}", "benchmarks.scale_job", words)) for n in range(count)]
        for child in children:
            child.line(START_TIMEOUT_S + args.warm_up * STEP_TIMEOUT_S)  # that it is ready
        before_s = _cpu_s(daemon)
        for child in children:
            child.go()
        jobs = [json.loads(child.line(steps * STEP_TIMEOUT_S)) for child in children]
        return (_cpu_s(daemon) - before_s) / steps / count, jobs


def _cpu_s(pid: int) -> float:
    """CPU time of another process, of all its threads (the number of its clock: clock_getcpuclockid(3))."""
    return time.clock_gettime(~pid << 3 | 2)


@contextlib.contextmanager
def _daemon(folder: Path, dram_bytes: int, cap_bytes: int) -> Iterator[int]:
    """The pid of a daemon without I/O, ready."""
    ready, child_end = os.pipe()
    command = [sys.executable, "-m", "benchmarks.scale_daemon", "--socket", str(folder / "tiermemd.sock")]
    command += ["--dram", str(dram_bytes), "--cap", str(cap_bytes)]
    command += ["--ready-fd", str(child_end), "--owner-pid", str(os.getpid())]
    try:
        process = subprocess.Popen(command, cwd=ROOT, pass_fds=[child_end], env=_environment())
    finally:
        os.close(child_end)
    try:
        with open(ready, "rb") as answer:
            line = answer.readline().decode().strip()
        if line != "READY":
            raise SystemExit(f"the daemon did not start: {line or 'it said nothing'}")
        yield process.pid
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class _Child:
    """A process that answers in lines. Context manager: it ends with its input."""

    def __init__(self, name: str, module: str, words: list[str]) -> None:
        self._name = name
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *words],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=_environment(),
        )

    def __enter__(self) -> _Child:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def go(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(b"go\n")
        self._process.stdin.flush()

    def line(self, timeout_s: float) -> str:
        """Raises SystemExit where it ends, or says nothing for so long."""
        assert self._process.stdout is not None
        readable, _, _ = select.select([self._process.stdout], [], [], timeout_s)
        line = self._process.stdout.readline() if readable else b""
        if not line:
            why = f"ended with exit code {self._process.wait()}" if readable else f"said nothing for {timeout_s:g} s"
            raise SystemExit(f"{self._name} {why}")
        return line.decode()


def _environment() -> dict[str, str]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("TIERMEM_")}
    return {**clean, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "OMP_NUM_THREADS": "1"}


def _codec_s(job: dict[str, Any]) -> float:
    """CPU seconds of the messages of a step, encoded and decoded, of one process of the two."""
    used_together = -(-job["leases"] // job["pauses"])
    sets = [tuple(range(n, n + used_together)) for n in range(0, job["leases"], used_together)]
    grants = [[Grant(n, "main", 1, n, n, Mode.UPDATE, 3, ((8, 16),), 0) for n in together] for together in sets]
    spoken = [m for s in sets for m in (Used(s), Commit(tuple((n, n, 4) for n in s)), Done(s))]
    started_s = time.process_time()
    for together in grants:
        for encoded in codec.encode_decided(together):
            codec.decode_grants(encoded.grants, 1 << 13)
    for message in spoken:
        codec.decode_client(codec.encode_client(message))
    return (time.process_time() - started_s) / 2


def _command(args: argparse.Namespace) -> str:
    words = [f"python -m benchmarks scale --steps {args.steps} --warm-up {args.warm_up} --step-s {args.step_s:g}"]
    words += [f"--arena {args.arena}", *(f"--jobs {jobs}" for jobs in args.jobs or ())]
    return " ".join([*words, *(["--no-small"] if args.no_small else [])])


if __name__ == "__main__":
    from benchmarks.__main__ import main

    sys.exit(main(["scale", *sys.argv[1:]]))
