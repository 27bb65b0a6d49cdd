"""What happened when, in one process: spans in a bounded ring, and several processes' spans as one trace for people.

All times are seconds of the operating system's monotonic clock, which the processes of one machine share
(`tiermem.clock`). The form is the Trace Event Format ("JSON Object Format") that chrome://tracing and
https://ui.perfetto.dev read: docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

CAPACITY = 1 << 15
"""Spans that one process keeps of one job: minutes of training."""

STEPS = "steps"
UNITS = "units"
WAITS = "waits"
_ORDER = (STEPS, UNITS, WAITS)  # from the top; the rest by name


class Span(NamedTuple):
    """Something that took from `start_s` to `end_s` (an event where they are equal) on `track`: a row of the picture,
    on which one thing happens at a time.

    `nbytes`: moved, 0 where nothing was. `bundle`, `epoch`: of the demand that it is about, or 0. `due_s`: when it is
    needed; -inf: somebody waits; None: there is no such time. A tuple, as one is made at every access.
    """

    track: str
    name: str
    start_s: float
    end_s: float
    nbytes: int = 0
    bundle: int = 0
    epoch: int = 0
    due_s: float | None = None
    detail: str = ""


class Recording(NamedTuple):
    """Spans of a window, oldest end first; not `complete` where older ones of it were overwritten."""

    spans: tuple[Span, ...]
    complete: bool = True


class TraceRing:
    """The newest `capacity` spans. Any thread may call; the lock is held for an append or a copy, and none is taken
    inside.
    """

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._lock = threading.Lock()
        self._spans: deque[Span] = deque(maxlen=capacity)  # guarded by _lock
        self._lost_s = -math.inf  # guarded by _lock; the latest end of what was overwritten

    def add(self, span: Span) -> None:
        spans = self._spans
        with self._lock:
            if len(spans) == spans.maxlen and spans[0].end_s > self._lost_s:
                self._lost_s = spans[0].end_s
            spans.append(span)

    def since(self, start_s: float) -> Recording:
        """What ended at `start_s` or later."""
        with self._lock:
            spans, lost_s = list(self._spans), self._lost_s
        return Recording(tuple(span for span in spans if span.end_s >= start_s), lost_s < start_s)


@dataclass(frozen=True, slots=True)
class ProcessTrace:
    """One process's part of a trace. `notes`: what is missing, for people."""

    name: str
    pid: int
    spans: tuple[Span, ...]
    notes: tuple[str, ...] = ()


def step_window(spans: Iterable[Span]) -> tuple[float, float] | None:
    """From the end of the last but one event on the track of steps to the end of the last one: a whole step. None where
    there are not two.
    """
    ends = sorted(span.end_s for span in spans if span.track == STEPS)
    return (ends[-2], ends[-1]) if len(ends) >= 2 else None


def within(processes: Iterable[ProcessTrace], start_s: float, end_s: float) -> list[ProcessTrace]:
    """The spans that are at least partly in the window; what only touches its start belongs to the time before."""
    return [
        ProcessTrace(p.name, p.pid, tuple(s for s in p.spans if s.end_s > start_s and s.start_s <= end_s), p.notes)
        for p in processes
    ]


def chrome_trace(processes: Sequence[ProcessTrace]) -> dict[str, Any]:
    """The trace as a JSON object. A demand of one process that another one has answered is joined by an arrow."""
    events: list[dict[str, Any]] = []
    asked: dict[int, list[dict[str, Any]]] = {}
    pids: set[int] = set()
    for index, process in enumerate(processes):
        pid = process.pid
        while pid in pids:  # containers have their own numbers
            pid += 1 << 22
        pids.add(pid)
        events.append(_metadata(pid, "process_name", {"name": process.name}))
        events.append(_metadata(pid, "process_sort_index", {"sort_index": index}))
        for tid, (row, spans) in enumerate(_rows(process.spans), 1):
            events.append(_metadata(pid, "thread_name", {"name": row}, tid))
            events.append(_metadata(pid, "thread_sort_index", {"sort_index": tid}, tid))
            for span in spans:
                event = _event(pid, tid, span)
                events.append(event)
                if span.epoch and span.end_s > span.start_s:
                    asked.setdefault(span.epoch, []).append(event)
    for epoch, ends in asked.items():
        if len(ends) == 2 and ends[0]["pid"] != ends[1]["pid"]:
            events += [_arrow_end("s", epoch, ends[0]), {**_arrow_end("f", epoch, ends[1]), "bp": "e"}]
    notes = [f"{process.name}: {note}" for process in processes for note in process.notes]
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"clock": "CLOCK_MONOTONIC", "notes": "; ".join(notes)},
    }


def _rows(spans: Iterable[Span]) -> list[tuple[str, list[Span]]]:
    """Tracks from the top down. Where things on a track overlap (demands of two threads), it has more than one row:
    viewers draw what overlaps as if one was called by the other.
    """
    tracks: dict[str, list[Span]] = {}
    for span in sorted(spans, key=lambda s: (s.start_s, s.end_s)):
        tracks.setdefault(span.track, []).append(span)
    rows: list[tuple[str, list[Span]]] = []
    for track in sorted(tracks, key=lambda t: (_ORDER.index(t) if t in _ORDER else len(_ORDER), t)):
        parts: list[list[Span]] = []
        for span in tracks[track]:
            free = next((part for part in parts if part[-1].end_s <= span.start_s), None)
            if free is None:
                parts.append([span])
            else:
                free.append(span)
        rows += [(track if number == 1 else f"{track} ({number})", part) for number, part in enumerate(parts, 1)]
    return rows


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def _event(pid: int, tid: int, span: Span) -> dict[str, Any]:
    event = {
        "name": span.name,
        "cat": span.track.partition(" ")[0],
        "ph": "X",
        "pid": pid,
        "tid": tid,
        "ts": _us(span.start_s),
        "args": _arguments(span),
    }
    if span.end_s > span.start_s:
        event["dur"] = round(_us(span.end_s) - _us(span.start_s), 3)
    else:
        event |= {"ph": "i", "s": "t"}
    return event


def _arguments(span: Span) -> dict[str, Any]:
    arguments: dict[str, Any] = {}
    for key, value in (("bytes", span.nbytes), ("bundle", span.bundle), ("epoch", span.epoch), ("detail", span.detail)):
        if value:
            arguments[key] = value
    if span.due_s is not None:
        # JSON has no infinity
        arguments |= {"slack_ms": round((span.due_s - span.end_s) * 1e3, 3)} if math.isfinite(span.due_s) else {}
        arguments["due"] = _us(span.due_s) if math.isfinite(span.due_s) else "somebody waits"
    return arguments


def _metadata(pid: int, name: str, arguments: dict[str, object], tid: int = 0) -> dict[str, Any]:
    return {"name": name, "ph": "M", "pid": pid, "tid": tid, "ts": 0, "args": arguments}


def _arrow_end(phase: str, epoch: int, event: dict[str, Any]) -> dict[str, Any]:
    where = {key: event[key] for key in ("pid", "tid", "ts")}
    return {"name": "demand", "cat": "demand", "ph": phase, "id": epoch, **where}
