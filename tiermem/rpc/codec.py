"""Domain values to messages and back. Everything that arrives is checked here before any state sees it: a field out of
range raises ProtocolError naming field and value. Tables travel as packed little-endian integers (a message object per
row is 4 times slower).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Sequence

from tiermem.allocator import Run
from tiermem.bundle import BundleSpec, Kind, Mode, TensorSpec
from tiermem.errors import Code, InvalidArgument, ProtocolError
from tiermem.file_pieces import Adoption
from tiermem.grants.messages import (
    Accessed,
    ClientBody,
    Commit,
    DaemonBody,
    Demand,
    Discard,
    Done,
    Grant,
    Refuse,
    Surrender,
    Used,
    Void,
)
from tiermem.notices import MAX_COUNT, MAX_TEXT, Notice, NoticeKind
from tiermem.plan import Access, Phase
from tiermem.rpc.v1 import tiermem_pb2 as pb
from tiermem.stats import DeviceLink, DeviceReport, LinkStats, TierStats
from tiermem.trace import CAPACITY, Recording, Span

PROTOCOL = 1
MAX_MESSAGE_BYTES = 16 << 20
MAX_BATCH = 64
"""Messages in a batch: an event loop decodes it at one go."""
GRANT_BODIES = frozenset({"demand", "void", "used", "accessed", "commit", "done", "discard"})
"""What `decode_client` takes."""
_MAX_SPECS = 1 << 16  # in one message: the event loop decodes it at one go
_MAX_FLOOR = 1 << 20
_MAX_TENSORS = 1 << 16
_MAX_NAME = 4096
_MAX_DIMENSIONS = 64
_MAX_TRACE_TEXT = 200
_MAX_TRACE_S = 86400.0
_MAX_DEVICE_S = 1e10
_SPAN = struct.Struct("<3I3dq2Q")
_RUN = struct.Struct("<2I")
_NOTICE_KINDS = {pb.NoticeKind.Value(f"NOTICE_KIND_{kind.name}"): kind for kind in NoticeKind}


def pack_u64(values: Iterable[int]) -> bytes:
    """Little-endian uint64, back to back."""
    items = tuple(values)
    return struct.pack(f"<{len(items)}Q", *items)


def _unpack(data: bytes, letter: str, width: int, columns: int, field: str) -> list[tuple[int, ...]]:
    if len(data) % (width * columns):
        raise ProtocolError(f"{field} has {len(data)} bytes, not a multiple of {width * columns}")
    flat = struct.unpack(f"<{len(data) // width}{letter}", data)
    return [flat[i : i + columns] for i in range(0, len(flat), columns)]


def _unpack_u64(data: bytes, field: str) -> tuple[int, ...]:
    return tuple(value for (value,) in _unpack(data, "Q", 8, 1, field))


def _in_range(value: int, low: int, high: int, field: str) -> int:
    if not low <= value <= high:
        raise ProtocolError(f"{field} is {value}, outside {low} .. {high}")
    return value


def _mode(value: int) -> Mode:
    try:
        return Mode(value)
    except ValueError:
        raise ProtocolError(f"mode is {value}, which does not exist") from None


def _phase(value: int) -> Phase:
    try:
        return Phase(value)
    except ValueError:
        raise ProtocolError(f"accessed.kind is {value}, which does not exist") from None


# -- client to daemon


def encode_client(message: ClientBody) -> pb.ClientMessage:
    match message:
        case Demand(lane, epoch, held, target, mode):
            return pb.ClientMessage(
                demand=pb.Demand(
                    lane=lane,
                    epoch=epoch,
                    held=pack_u64(held),
                    target=target,
                    mode=int(mode),  # type: ignore[arg-type]
                )
            )
        case Void(lane, epoch, held):
            return pb.ClientMessage(void=pb.Void(lane=lane, epoch=epoch, held=pack_u64(held)))
        case Used(serials):
            return pb.ClientMessage(used=pb.Used(serials=pack_u64(serials)))
        case Accessed(lane, access):
            return pb.ClientMessage(
                accessed=pb.Accessed(
                    lane=lane,
                    unit=str(access.unit),
                    kind=int(access.phase),  # type: ignore[arg-type]
                    training=access.training,
                )
            )
        case Commit(updated, consumed):
            return pb.ClientMessage(
                commit=pb.Commit(
                    updated=pack_u64(v for row in updated for v in row),
                    consumed=pack_u64(v for pair in consumed for v in pair),
                )
            )
        case Done(serial):
            return pb.ClientMessage(done=pb.Done(serial=serial))
        case Discard(bundles):
            return pb.ClientMessage(discard=pb.Discard(bundles=pack_u64(bundles)))


def encode_together(items: Sequence[ClientBody | pb.ClientMessage]) -> pb.ClientMessage:
    """One message for up to MAX_BATCH of them, in order; neighbouring Used become one."""
    encoded: list[pb.ClientMessage] = []
    used: list[int] = []
    for item in items:
        if isinstance(item, Used):
            used += item.serials
            continue
        if used:
            encoded.append(encode_client(Used(tuple(used))))
            used = []
        encoded.append(item if isinstance(item, pb.ClientMessage) else encode_client(item))
    if used:
        encoded.append(encode_client(Used(tuple(used))))
    return encoded[0] if len(encoded) == 1 else pb.ClientMessage(batch=pb.ClientBatch(messages=encoded))


def decode_client(message: pb.ClientMessage) -> ClientBody:
    """One of the grant protocol's messages. Raises ProtocolError for any other body."""
    match message.WhichOneof("body"):
        case "demand":
            d = message.demand
            held = frozenset(_unpack_u64(d.held, "demand.held"))
            return Demand(_name(d.lane, "demand.lane"), d.epoch, held, d.target, _mode(d.mode))
        case "void":
            v = message.void
            return Void(_name(v.lane, "void.lane"), v.epoch, frozenset(_unpack_u64(v.held, "void.held")))
        case "used":
            return Used(_unpack_u64(message.used.serials, "used.serials"))
        case "accessed":
            a = message.accessed
            access = Access(_name(a.unit, "accessed.unit"), _phase(a.kind), a.training)
            return Accessed(_name(a.lane, "accessed.lane"), access)
        case "commit":
            updated = _unpack(message.commit.updated, "Q", 8, 3, "commit.updated")
            consumed = _unpack(message.commit.consumed, "Q", 8, 2, "commit.consumed")
            return Commit(
                tuple((s, b, _in_range(v, 1, 1 << 62, "commit version")) for s, b, v in updated),
                tuple((s, b) for s, b in consumed),
            )
        case "done":
            return Done(message.done.serial)
        case "discard":
            return Discard(_unpack_u64(message.discard.bundles, "discard.bundles"))
        case other:
            raise ProtocolError(f"message {other!r} is not expected here")


def messages_of(batch: pb.ClientBatch) -> Sequence[pb.ClientMessage]:
    """The messages of a batch. Raises ProtocolError for none, too many, and those that travel alone."""
    _in_range(len(batch.messages), 1, MAX_BATCH, "batch: number of messages")
    for message in batch.messages:
        if (body := message.WhichOneof("body")) in (None, "open", "close", "batch"):
            raise ProtocolError(f"a batch with message {body!r}, which is not expected there")
    return batch.messages


def encode_specs(specs: Iterable[BundleSpec]) -> pb.ClientMessage:
    return pb.ClientMessage(
        declare=pb.Declare(
            specs=[
                pb.Spec(
                    spec_id=s.spec_id,
                    kind=int(s.kind),  # type: ignore[arg-type]
                    unit=s.unit,
                    nbytes=s.nbytes,
                    tensors=[
                        pb.TensorSpec(
                            name=t.name, dtype=t.dtype, shape=t.shape, offset_bytes=t.offset_bytes, nbytes=t.nbytes
                        )
                        for t in s.tensors
                    ],
                )
                for s in specs
            ]
        )
    )


def decode_specs(declare: pb.Declare, cap_bytes: int) -> list[BundleSpec]:
    """Raises ProtocolError for sizes that are negative, beyond the bundle cap, or tensors that leave their bundle."""
    _in_range(len(declare.specs), 1, _MAX_SPECS, "number of specs")
    return [_decode_spec(s, cap_bytes) for s in declare.specs]


def decode_admit(admit: pb.Admit) -> tuple[str, list[int]]:
    """Lane and floor. Raises ProtocolError for a name or a floor that is too long."""
    _in_range(len(admit.floor_specs), 0, _MAX_FLOOR, "admit.floor_specs: number of specs")
    return _name(admit.lane, "admit.lane"), list(admit.floor_specs)


def encode_adopt(adoption: Adoption) -> pb.ClientMessage:
    return pb.ClientMessage(
        adopt=pb.Adopt(
            spec_id=adoption.spec_id,
            file=adoption.file,
            offsets=pack_u64(adoption.offsets),
            digests=pack_u64(adoption.digests),
        )
    )


def decode_adopt(adopt: pb.Adopt) -> Adoption:
    """Raises ProtocolError for offsets that no file has. Whether they fit file and spec is for the store to say."""
    offsets = _unpack(adopt.offsets, "Q", 8, 1, "adopt.offsets")
    digests = _unpack(adopt.digests, "Q", 8, 1, "adopt.digests")
    return Adoption(
        adopt.spec_id,
        adopt.file,
        tuple(_in_range(at, 0, 1 << 62, "adopt offset") for (at,) in offsets),
        tuple(value for (value,) in digests),
    )


def encode_notice(notice: Notice) -> pb.ClientMessage:
    """A text that is too long is cut."""
    return pb.ClientMessage(
        notice=pb.Notice(
            kind=f"NOTICE_KIND_{notice.kind.name}",
            count=notice.count,
            text=notice.text[:MAX_TEXT],
        )
    )


def decode_notice(notice: pb.Notice) -> Notice:
    """Raises ProtocolError for a kind that does not exist (kinds are labels of a metric), a count or a text beyond the
    bounds.
    """
    kind = _NOTICE_KINDS.get(notice.kind)
    if kind is None:
        raise ProtocolError(f"notice.kind is {notice.kind}, which does not exist")
    _in_range(len(notice.text), 0, MAX_TEXT, "notice.text: characters")
    return Notice(kind, notice.text, _in_range(notice.count, 1, MAX_COUNT, "notice.count"))


def encode_device_report(report: DeviceReport) -> pb.ClientMessage:
    counts = {
        str(link): pb.DeviceLinkCount(
            bytes=moved.bytes, transfers=moved.transfers, seconds=moved.seconds, queue_seconds=moved.queue_seconds
        )
        for link, moved in report.links.items()
    }
    tier = report.tier
    message = pb.DeviceReport(capacity_bytes=tier.capacity_bytes, used_bytes=tier.used_bytes, **counts)
    return pb.ClientMessage(device_report=message)


def decode_device_report(message: pb.DeviceReport) -> DeviceReport:
    """Raises ProtocolError for numbers that no device has."""
    capacity_bytes = _in_range(message.capacity_bytes, 0, 1 << 60, "device_report.capacity_bytes")
    used_bytes = _in_range(message.used_bytes, 0, capacity_bytes, "device_report.used_bytes")
    links = {}
    for link in DeviceLink:
        count = getattr(message, link)
        for seconds in (count.seconds, count.queue_seconds):
            if not 0 <= seconds < _MAX_DEVICE_S:
                raise ProtocolError(f"device_report.{link} has taken {seconds} s, which is no time")
        moved_bytes = _in_range(count.bytes, 0, 1 << 62, f"device_report.{link}.bytes")
        links[link] = LinkStats(moved_bytes, count.transfers, count.seconds, count.queue_seconds)
    return DeviceReport(TierStats(capacity_bytes, used_bytes), links)


def decode_trace(trace: pb.Trace) -> tuple[int, float, Recording]:
    """The number that AskTrace had, the trainer's clock, what it told. Raises ProtocolError as `decode_spans`."""
    if not math.isfinite(trace.now_s):
        raise ProtocolError(f"trace.now_s is {trace.now_s}, which is no time")
    return trace.id, trace.now_s, decode_spans(trace.spans)


def trace_seconds(seconds: float, field: str) -> float:
    """Raises InvalidArgument outside 0 .. one day."""
    if not 0 <= seconds <= _MAX_TRACE_S:  # NaN is outside too
        raise InvalidArgument(f"{field} is {seconds}, outside 0 .. {_MAX_TRACE_S:g}")
    return seconds


def encode_spans(recording: Recording) -> pb.Spans:
    """The newest CAPACITY of them; texts that are too long are cut."""
    numbers: dict[str, int] = {}

    def number(text: str) -> int:
        return numbers.setdefault(text[:_MAX_TRACE_TEXT], len(numbers))

    spans = recording.spans[-CAPACITY:]
    rows = b"".join(
        _SPAN.pack(
            number(s.track),
            number(s.name),
            number(s.detail),
            s.start_s,
            s.end_s,
            math.nan if s.due_s is None else s.due_s,
            s.nbytes,
            s.bundle,
            s.epoch,
        )
        for s in spans
    )
    return pb.Spans(texts=list(numbers), rows=rows, complete=recording.complete and len(spans) == len(recording.spans))


def decode_spans(message: pb.Spans) -> Recording:
    """Raises ProtocolError for too many rows or texts, for texts that are too long or are not there, for times that are
    not finite or go back, for sizes below zero.
    """
    texts, rows = message.texts, message.rows
    if len(rows) % _SPAN.size:
        raise ProtocolError(f"spans.rows has {len(rows)} bytes, not a multiple of {_SPAN.size}")
    count = _in_range(len(rows) // _SPAN.size, 0, CAPACITY, "spans.rows: number of rows")
    _in_range(len(texts), 0, 3 * count, "spans.texts: number of texts")
    for text in texts:
        _in_range(len(text), 0, _MAX_TRACE_TEXT, "spans.texts: characters")
    names, spans = list(texts), []
    for track, name, detail, start_s, end_s, due_s, nbytes, bundle, epoch in _SPAN.iter_unpack(rows):
        _in_range(max(track, name, detail), 0, len(names) - 1, "spans: number of a text")
        if not -math.inf < start_s <= end_s < math.inf:
            raise ProtocolError(f"a span from {start_s} to {end_s} is no time")
        if due_s == math.inf:
            raise ProtocolError("a span is due at infinity")
        _in_range(nbytes, 0, 1 << 62, "spans: bytes")
        due = None if math.isnan(due_s) else due_s
        spans.append(Span(names[track], names[name], start_s, end_s, nbytes, bundle, epoch, due, names[detail]))
    return Recording(tuple(spans), message.complete)


def _decode_spec(spec: pb.Spec, cap_bytes: int) -> BundleSpec:
    where = f"spec {spec.spec_id}"
    nbytes = _in_range(spec.nbytes, 1, cap_bytes, f"{where}: nbytes")
    _in_range(len(spec.tensors), 0, _MAX_TENSORS, f"{where}: number of tensors")
    tensors = []
    for t in spec.tensors:
        size = _in_range(t.nbytes, 0, nbytes, f"{where}: tensor nbytes")
        offset = _in_range(t.offset_bytes, 0, nbytes - size, f"{where}: tensor offset")
        _in_range(len(t.shape), 0, _MAX_DIMENSIONS, f"{where}: tensor dimensions")
        shape = tuple(_in_range(n, 0, 1 << 48, f"{where}: tensor dimension") for n in t.shape)
        tensors.append(TensorSpec(_name(t.name, where), _name(t.dtype, where), shape, offset, size))
    try:
        kind = Kind(spec.kind)
    except ValueError:
        raise ProtocolError(f"{where}: kind is {spec.kind}, which does not exist") from None
    return BundleSpec(spec.spec_id, kind, _name(spec.unit, where), nbytes, tuple(tensors))


def _name(text: str, where: str) -> str:
    if len(text) > _MAX_NAME:
        raise ProtocolError(f"{where}: a name of {len(text)} characters is longer than {_MAX_NAME}")
    return text


# -- daemon to client


def encode_daemon(message: DaemonBody) -> pb.DaemonMessage:
    match message:
        case Grant():
            runs = b"".join(_RUN.pack(*run) for run in message.runs)
            return pb.DaemonMessage(
                grant=pb.Grant(
                    serial=message.serial,
                    lane=message.lane,
                    epoch=message.epoch,
                    bundle=message.bundle,
                    mode=int(message.mode),  # type: ignore[arg-type]
                    version=message.version,
                    runs=runs,
                    answers=message.answers,
                    spec=message.spec,
                )
            )
        case Surrender(lane):
            return pb.DaemonMessage(surrender=pb.Surrender(lane=lane))
        case Refuse():
            return pb.DaemonMessage(
                refuse=pb.Refuse(lane=message.lane, answers=message.answers, code=message.code, message=message.message)
            )


def decode_grant(grant: pb.Grant, frames: int) -> Grant:
    """Raises ProtocolError for runs outside the arena of `frames` frames."""
    if len(grant.runs) % _RUN.size:
        raise ProtocolError(f"grant.runs has {len(grant.runs)} bytes, not a multiple of {_RUN.size}")
    runs: tuple[Run, ...] = tuple(_RUN.iter_unpack(grant.runs))
    for first, count in runs:
        if count < 1 or first + count > frames:
            raise ProtocolError(f"grant {grant.serial} names frames {first} .. {first + count} of an arena of {frames}")
    return Grant(
        grant.serial,
        grant.lane,
        grant.epoch,
        grant.spec,
        grant.bundle,
        _mode(grant.mode),
        grant.version,
        runs,
        grant.answers,
    )


def decode_refuse(refuse: pb.Refuse) -> Refuse:
    """A code of a newer daemon becomes INTERNAL, its text stays."""
    code = Code(refuse.code) if refuse.code in Code.__members__ else Code.INTERNAL
    return Refuse(refuse.lane, refuse.answers, code, refuse.message)
