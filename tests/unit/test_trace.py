"""Spans in a ring, as a trace for viewers, in a file, and over the wire."""

from __future__ import annotations

import itertools
import json
import math
import os
import struct
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tiermem import trace_file
from tiermem.bundle import BundleSpec, Kind, Mode
from tiermem.errors import InvalidArgument, ProtocolError, TierIOError
from tiermem.grants.messages import Commit, Demand, Done, Grant
from tiermem.mover import Mover
from tiermem.plan import Phase
from tiermem.rpc import codec
from tiermem.rpc.v1 import tiermem_pb2 as pb
from tiermem.stats import Link
from tiermem.store import TensorStore
from tiermem.testing import FakeClock, FaultyTier, parse_fault_script
from tiermem.tiers.flash_directory import FlashDirectory
from tiermem.trace import STEPS, UNITS, ProcessTrace, Recording, Span, TraceRing, chrome_trace, step_window, within
from tiermem.units import KIB, MIB
from tiermem_client.unit_spans import Costs, UnitSpans


def span(start_s: float, end_s: float, track: str = "t", **fields: Any) -> Span:
    return Span(track, "n", start_s, end_s, **fields)


# -- the ring


def test_a_ring_keeps_the_newest_and_says_what_is_missing() -> None:
    ring = TraceRing(3)
    for second in range(5):
        ring.add(span(second, second + 0.5))
    assert [s.start_s for s in ring.since(-math.inf).spans] == [2, 3, 4]
    assert not ring.since(1.5).complete, "the span that ended then has been overwritten"
    assert ring.since(2.0) == Recording((span(2, 2.5), span(3, 3.5), span(4, 4.5)))
    assert ring.since(3.5).spans == (span(3, 3.5), span(4, 4.5)), "what ended then counts"


def test_a_ring_is_read_while_others_write() -> None:
    ring, stop = TraceRing(64), threading.Event()

    def write() -> None:
        while not stop.is_set():
            ring.add(span(1, 2))

    writers = [threading.Thread(target=write) for _ in range(3)]
    for writer in writers:
        writer.start()
    try:
        assert all(len(ring.since(0).spans) <= 64 for _ in range(300))
    finally:
        stop.set()
        for writer in writers:
            writer.join()


def test_the_window_of_a_step_is_between_the_ends_of_two() -> None:
    ends = [span(0, 0, STEPS), span(3, 4, STEPS), span(5, 7, STEPS), span(8, 9)]
    assert step_window(ends) == (4, 7)
    assert step_window(reversed(ends)) == (4, 7)
    assert step_window(ends[:2]) == (0, 4)
    assert step_window(ends[:1]) is None


def test_a_window_has_what_is_partly_in_it() -> None:
    spans = (span(0, 1), span(0, 2), span(1, 1), span(1.5, 9), span(3, 4), span(3.1, 4))
    [cut] = within([ProcessTrace("p", 1, spans, ("note",))], 1, 3)
    assert cut == ProcessTrace("p", 1, (span(0, 2), span(1.5, 9), span(3, 4)), ("note",))


# -- the trace event format


def rows(trace: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """What is drawn, by the name of its row."""
    events = trace["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    return {
        name: [e for e in events if (e["pid"], e["tid"]) == key and e["ph"] in ("X", "i")]
        for key, name in names.items()
    }


def test_events_have_the_fields_of_their_phase_in_microseconds() -> None:
    trainer = ProcessTrace("trainer", 7, (Span(UNITS, "forward a", 1.5, 2.0, detail="d"), Span("push", "p", 3.0, 3.0)))
    trace = json.loads(json.dumps(chrome_trace([trainer])))
    assert trace["displayTimeUnit"] == "ms"
    for event in trace["traceEvents"]:
        assert {"name", "ph", "pid", "tid", "ts", "args"} <= event.keys()
        assert (event["ph"] == "X") == ("dur" in event)
    (forward,), (push,) = rows(trace)[UNITS], rows(trace)["push"]
    assert (forward["ph"], forward["ts"], forward["dur"]) == ("X", 1_500_000, 500_000)
    assert forward["args"] == {"detail": "d"}
    assert (push["ph"], push["s"], push["ts"]) == ("i", "t", 3_000_000)
    metadata = [(e["name"], e["args"]) for e in trace["traceEvents"] if e["ph"] == "M"]
    assert ("process_name", {"name": "trainer"}) in metadata
    assert ("thread_name", {"name": UNITS}) in metadata


def test_deadlines_are_numbers_or_say_that_somebody_waits() -> None:
    waits, later, none = (
        chrome_trace([ProcessTrace("p", 1, (span(1, 2, nbytes=5, bundle=9, due_s=due),))])["traceEvents"][-1]["args"]
        for due in (-math.inf, 2.25, None)
    )
    assert waits == {"bytes": 5, "bundle": 9, "due": "somebody waits"}
    assert later == {"bytes": 5, "bundle": 9, "due": 2_250_000, "slack_ms": 250}
    assert none == {"bytes": 5, "bundle": 9}


def test_what_overlaps_is_on_rows_of_its_own() -> None:
    """Viewers nest what overlaps, as if one was called by the other."""
    spans = (span(0, 4), span(1, 2), span(2, 3), span(4, 5), span(4.5, 6), span(4.6, 4.6))
    drawn = rows(chrome_trace([ProcessTrace("p", 1, spans)]))
    assert {name: len(events) for name, events in drawn.items()} == {"t": 2, "t (2)": 3, "t (3)": 1}
    for events in drawn.values():
        for one, following in itertools.pairwise(events):
            assert one["ts"] + one.get("dur", 0) <= following["ts"]


def test_an_arrow_leads_from_a_demand_to_its_answer() -> None:
    trainer = ProcessTrace("trainer", 1, (span(1, 4, epoch=6), span(5, 6, epoch=7)))
    daemon = ProcessTrace("tiermemd", 2, (span(2, 3, epoch=6), span(8, 8, epoch=7)))
    arrows = [e for e in chrome_trace([trainer, daemon])["traceEvents"] if e["ph"] in ("s", "f")]
    assert [(e["ph"], e["pid"], e["ts"], e["id"]) for e in arrows] == [("s", 1, 1e6, 6), ("f", 2, 2e6, 6)]
    assert arrows[1]["bp"] == "e"


def test_processes_of_two_containers_are_told_apart() -> None:
    trace = chrome_trace([ProcessTrace("trainer", 1, (span(0, 1),)), ProcessTrace("tiermemd", 1, (), ("is mute",))])
    assert len({e["pid"] for e in trace["traceEvents"]}) == 2
    assert trace["otherData"]["notes"] == "tiermemd: is mute"


# -- the file


def test_a_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text("old")
    trace_file.check_target(path)
    assert path.read_text() == "old"
    trace_file.write(path, [ProcessTrace("p", 1, (span(1, 2),))])
    assert json.loads(path.read_text())["traceEvents"]
    assert os.listdir(tmp_path) == ["t.json"]


def test_a_path_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    for path, match in ((tmp_path, "is a directory"), (tmp_path / "none" / "t.json", "a directory that exists")):
        with pytest.raises(InvalidArgument, match=match) as caught:
            trace_file.check_target(path)
        assert str(path) in str(caught.value)
    with pytest.raises(TierIOError, match="was not written"):
        trace_file.write(tmp_path / "none" / "t.json", [])
    assert os.listdir(tmp_path) == []


# -- over the wire


RECORDING = Recording(
    (
        Span("demand load", "read param of a", 1.25, 2.5, 3, 4, 5, 6.5, "d"),
        Span("demand load", "x", 2.5, 2.5, due_s=-math.inf),
        Span("t", "x", 3.0, 4.0),
    ),
    complete=False,
)


def test_spans_arrive_as_they_were_sent() -> None:
    for recording in (RECORDING, Recording(())):
        sent = pb.Spans.FromString(codec.encode_spans(recording).SerializeToString())
        assert codec.decode_spans(sent) == recording
    long = codec.decode_spans(codec.encode_spans(Recording((Span("t", "n" * 999, 0, 0),))))
    assert long.spans[0].name == "n" * 200
    assert codec.decode_trace(pb.Trace(id=8, now_s=2, spans=sent)) == (8, 2.0, Recording(()))


def row(*numbers: float) -> bytes:
    values = (0, 0, 0, 1.0, 2.0, math.nan, 0, 0, 0)
    return struct.pack("<3I3dq2Q", *numbers, *values[len(numbers) :])


@pytest.mark.parametrize(
    ("texts", "rows", "match"),
    [
        (["a"], row()[:-1], "spans.rows has 59 bytes, not a multiple of 60"),
        (["a"], row() * ((1 << 15) + 1), "number of rows is 32769"),
        (["a"] * 4, row(), "number of texts is 4"),
        (["a" * 201], row(), "characters is 201"),
        ([], row(), "number of a text is 0"),
        (["a"], row(0, 1), "number of a text is 1"),
        (["a"], row(0, 0, 2**32 - 1), f"number of a text is {2**32 - 1}"),
        (["a"], row(0, 0, 0, 2.0, 1.0), "from 2.0 to 1.0"),
        (["a"], row(0, 0, 0, math.nan, 1.0), "from nan"),
        (["a"], row(0, 0, 0, 1.0, math.nan), "to nan"),
        (["a"], row(0, 0, 0, -math.inf, 1.0), "from -inf"),
        (["a"], row(0, 0, 0, 1.0, math.inf), "to inf"),
        (["a"], row(0, 0, 0, 1.0, 2.0, math.inf), "due at infinity"),
        (["a"], row(0, 0, 0, 1.0, 2.0, 0.0, -1), "bytes is -1"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_absurd_spans_are_refused(texts: list[str], rows: bytes, match: str) -> None:
    assert codec.decode_spans(pb.Spans(texts=["a"], rows=row())).spans
    with pytest.raises(ProtocolError, match=match):
        codec.decode_spans(pb.Spans(texts=texts, rows=rows))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_clock_that_is_no_number_is_refused(value: float) -> None:
    with pytest.raises(ProtocolError, match=r"trace\.now_s"):
        codec.decode_trace(pb.Trace(now_s=value))


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0, 86401.0])
def test_a_time_that_nobody_asks_for_is_refused(value: float) -> None:
    assert codec.trace_seconds(86400.0, "seconds") == 86400.0
    with pytest.raises(InvalidArgument, match="seconds is"):
        codec.trace_seconds(value, "seconds")


# -- what a job leaves in it


def test_chunks_that_fail_are_in_the_trace_without_bytes(tmp_path: Path) -> None:
    """The links count no bytes either."""
    directory = FlashDirectory.open(tmp_path / "flash", 64 * MIB, allow_memory_filesystem=True)
    clock = FakeClock(5.0)
    faults = parse_fault_script("flash.write:1:EIO")
    store = TensorStore(4 * MIB, [directory], Mover(1), clock, wrap_flash=lambda tier: FaultyTier(tier, faults))
    try:
        job = store.open_job("job", 1, MIB, 8 * MIB)
        answered = threading.Event()
        job.wake = answered.set
        job.declare([BundleSpec(1, Kind.OPTIM, "a", 128 * KIB)])
        job.admit("main", [1])
        for epoch in range(1, 11):  # the arena holds eight
            job.receive(Demand("main", epoch, frozenset(), 1, Mode.CREATE))
            while not job.outbox:
                assert answered.wait(20.0)
                answered.clear()
            answer = job.outbox.popleft()
            if isinstance(answer, Grant):
                job.receive(Commit(((answer.serial, answer.bundle, 1),)))
                job.receive(Done((answer.serial,)))
        spans = job.trace.since(0.0).spans
    finally:
        store.close()
        directory.close()
    writes = [s for s in spans if s.track.startswith(Link.DRAM_TO_FLASH)]
    assert [s.detail for s in writes if not s.nbytes] == ["failed"]
    assert {s.name for s in writes} == {"write optim of a (131072 bytes)"}
    demands = Counter(s.track for s in spans if s.track.startswith("demand"))
    assert demands["demand refused"] == 1
    assert demands["demand hit"] >= 8
    assert demands.total() == 10
    assert all(s.start_s == s.end_s == 5.0 for s in spans), "times are those of the store's clock"


# -- units


class Script:
    """A clock that moves by one with every look, and the spans that come of it."""

    def __init__(self) -> None:
        self.ring, self.clock, self.costs = TraceRing(), FakeClock(), Costs(0.0, 0, 0.0)
        self.units = UnitSpans(self.ring, lambda: self.costs, self._now_s)

    def _now_s(self) -> float:
        self.clock.advance(1.0)
        return self.clock.now_s()

    def seen(self) -> list[tuple[str, float]]:
        """Names and lengths."""
        spans = self.ring.since(0).spans
        for one, following in itertools.pairwise(spans):
            assert one.end_s <= following.start_s
        return [(s.name, s.end_s - s.start_s) for s in spans]


def test_a_units_span_ends_where_it_is_left_or_the_next_begins() -> None:
    script = Script()
    units = script.units
    units.began("a", Phase.FORWARD)
    units.left("a")
    units.began("b", Phase.FORWARD)
    units.left("b")
    for unit in ("b", "b", "a", ""):
        units.began(unit, Phase.BACKWARD)
    units.rest()
    units.rest()
    assert script.seen() == [
        ("forward a", 1.0),
        ("forward b", 1.0),
        ("backward b", 1.0),
        ("backward a", 1.0),
        ("backward (root)", 1.0),
    ]


def test_a_unit_inside_another_interrupts_it() -> None:
    script = Script()
    units = script.units
    units.began("root", Phase.FORWARD)
    for inner in ("a", "b"):
        units.began(inner, Phase.FORWARD)
        units.left(inner)
    units.left("root")
    units.left("root")
    assert [name for name, _ in script.seen()] == [
        "forward root",
        "forward a",
        "forward root",
        "forward b",
        "forward root",
    ]


def test_a_recomputation_is_a_span_inside_backward() -> None:
    script = Script()
    units = script.units
    units.began("b", Phase.BACKWARD)
    units.began("a", Phase.RECOMPUTE)
    units.left("a")
    units.began("a", Phase.BACKWARD)
    units.rest()
    assert [name for name, _ in script.seen()] == ["backward b", "recompute a", "backward a"]


def test_a_span_tells_what_went_into_waiting_and_page_moves() -> None:
    script = Script()
    script.units.began("a", Phase.UPDATE)
    script.costs = Costs(0.5, 3, 0.25)
    script.units.began("b", Phase.UPDATE)
    script.units.rest()
    assert [s.detail for s in script.ring.since(0).spans] == ["waited 500.00 ms, 3 page moves in 250.00 ms", ""]
