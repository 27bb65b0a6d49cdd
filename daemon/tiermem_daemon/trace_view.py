"""Fetching a job's trace from a running daemon, and choosing the part to write."""

from __future__ import annotations

import time
from pathlib import Path

import grpc

from tiermem import trace_file
from tiermem.errors import InvalidArgument
from tiermem.rpc import codec
from tiermem.rpc.status import error_from_rpc
from tiermem.rpc.v1 import tiermem_pb2 as pb
from tiermem.rpc.v1 import tiermem_pb2_grpc as pb_grpc
from tiermem.trace import ProcessTrace, step_window, within

_TIMEOUT_S = 10.0
_OPTIONS = [("grpc.max_receive_message_length", codec.MAX_MESSAGE_BYTES)]
LONGEST_STEP_S = 3600.0
"""How far back a whole step is looked for."""

WITHOUT_STEPS_S = 10.0
"""What is taken where there is none."""


def fetch(socket: Path, job: str, seconds: float) -> tuple[str, list[ProcessTrace]]:
    """The job's name, and what it did in the last `seconds`. Raises NotFound, InvalidArgument, DaemonUnavailable,
    ProtocolError.
    """
    with grpc.insecure_channel(f"unix:{socket}", options=_OPTIONS) as channel:
        try:
            stub = pb_grpc.TierMemStub(channel)  # type: ignore[no-untyped-call]  # generated
            answer = stub.GetTrace(pb.GetTraceRequest(job=job, seconds=seconds), timeout=_TIMEOUT_S)
        except grpc.RpcError as error:
            raise error_from_rpc(error) from error
    processes = [
        ProcessTrace(p.name, p.pid, codec.decode_spans(p.spans).spans, tuple(p.notes)) for p in answer.processes
    ]
    return answer.job, processes


def save(socket: Path, path: Path, job: str = "", seconds: float | None = None) -> str:
    """Write the last whole step of the job, or what it did in the last `seconds`; a line that says what was written.

    Raises InvalidArgument for a path that cannot be written, before anything is asked; and as `fetch`.
    """
    if seconds is not None and seconds <= 0:
        raise InvalidArgument(f"--seconds {seconds:g} is no time; give more than 0")
    trace_file.check_target(path)
    name, processes = fetch(socket, job, LONGEST_STEP_S if seconds is None else seconds)
    window = step_window(span for process in processes for span in process.spans) if seconds is None else None
    what = "its last step"
    if window is None:
        now_s = time.monotonic()
        seconds = WITHOUT_STEPS_S if seconds is None else seconds
        window, what = (now_s - seconds, now_s), f"the last {seconds:g} s"
    processes = within(processes, *window)
    trace_file.write(path, processes)
    spans = sum(len(process.spans) for process in processes)
    lines = [f"{path}: job {name}, {what}, {spans} spans; open it in https://ui.perfetto.dev or chrome://tracing"]
    lines += [f"note: {process.name}: {note}" for process in processes for note in process.notes]
    return "\n".join(lines)
