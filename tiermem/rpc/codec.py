"""Domain values to messages and back, those of the grant protocol apart (`tiermem.rpc.grants`). Everything that arrives
is checked here before any state sees it: a field out of range raises ProtocolError naming field and value.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable

from tiermem.bundle import BundleSpec, Kind, TensorSpec
from tiermem.errors import InvalidArgument, ProtocolError
from tiermem.file_pieces import Adoption
from tiermem.notices import MAX_COUNT, MAX_TEXT, Notice, NoticeKind
from tiermem.rpc.fields import in_range, pack_u64, short_name, unpack_u64
from tiermem.rpc.v1 import tiermem_pb2 as pb
from tiermem.stats import DeviceKind, DeviceReport, LinkStats, TierStats
from tiermem.trace import CAPACITY, Recording, Span

PROTOCOL = 2
MAX_MESSAGE_BYTES = 16 << 20
_MAX_SPECS = 1 << 16  # in one message: the event loop decodes it at one go
_MAX_FLOOR = 1 << 20
_MAX_TENSORS = 1 << 16
_MAX_DIMENSIONS = 64
_MAX_TRACE_TEXT = 200
_MAX_TRACE_S = 86400.0
_MAX_DEVICE_S = 1e10
_SPAN = struct.Struct("<3I3dq2Q")
_NOTICE_KINDS = {pb.NoticeKind.Value(f"NOTICE_KIND_{kind.name}"): kind for kind in NoticeKind}
_DEVICE_KINDS = {pb.DeviceKind.Value(f"DEVICE_KIND_{kind.name}"): kind for kind in DeviceKind}


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
                    heir_of=s.heir_of,
                )
                for s in specs
            ]
        )
    )


def decode_specs(declare: pb.Declare, cap_bytes: int) -> list[BundleSpec]:
    """Raises ProtocolError for sizes that are negative, beyond the bundle cap, or tensors that leave their bundle."""
    in_range(len(declare.specs), 1, _MAX_SPECS, "number of specs")
    return [_decode_spec(s, cap_bytes) for s in declare.specs]


def decode_admit(admit: pb.Admit) -> tuple[str, list[int]]:
    """Lane and floor. Raises ProtocolError for a name or a floor that is too long."""
    in_range(len(admit.floor_specs), 0, _MAX_FLOOR, "admit.floor_specs: number of specs")
    return short_name(admit.lane, "admit.lane"), list(admit.floor_specs)


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
    offsets = unpack_u64(adopt.offsets, "adopt.offsets")
    digests = unpack_u64(adopt.digests, "adopt.digests")
    return Adoption(
        adopt.spec_id,
        adopt.file,
        tuple(in_range(at, 0, 1 << 62, "adopt offset") for at in offsets),
        digests,
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
    in_range(len(notice.text), 0, MAX_TEXT, "notice.text: characters")
    return Notice(kind, notice.text, in_range(notice.count, 1, MAX_COUNT, "notice.count"))


def encode_device_report(report: DeviceReport) -> pb.ClientMessage:
    tier, inward, outward = report.tier, *map(_encode_device_link, (report.inward, report.outward))
    kind = f"DEVICE_KIND_{report.kind.name}"
    message = pb.DeviceReport(
        capacity_bytes=tier.capacity_bytes, used_bytes=tier.used_bytes, inward=inward, outward=outward, kind=kind
    )
    return pb.ClientMessage(device_report=message)


def _encode_device_link(moved: LinkStats) -> pb.DeviceLinkCount:
    return pb.DeviceLinkCount(
        bytes=moved.bytes, transfers=moved.transfers, seconds=moved.seconds, queue_seconds=moved.queue_seconds
    )


def decode_device_report(message: pb.DeviceReport) -> DeviceReport:
    """Raises ProtocolError for numbers that no device has."""
    kind = _DEVICE_KINDS.get(message.kind)
    if kind is None:
        raise ProtocolError(f"device_report.kind is {message.kind}, which does not exist")
    capacity_bytes = in_range(message.capacity_bytes, 0, 1 << 60, "device_report.capacity_bytes")
    used_bytes = in_range(message.used_bytes, 0, capacity_bytes, "device_report.used_bytes")
    inward = _decode_device_link(message.inward, "device_report.inward")
    outward = _decode_device_link(message.outward, "device_report.outward")
    return DeviceReport(kind, TierStats(capacity_bytes, used_bytes), inward, outward)


def _decode_device_link(count: pb.DeviceLinkCount, name: str) -> LinkStats:
    for seconds in (count.seconds, count.queue_seconds):
        if not 0 <= seconds < _MAX_DEVICE_S:
            raise ProtocolError(f"{name} has taken {seconds} s, which is no time")
    moved_bytes = in_range(count.bytes, 0, 1 << 62, f"{name}.bytes")
    return LinkStats(moved_bytes, count.transfers, count.seconds, count.queue_seconds)


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
    count = in_range(len(rows) // _SPAN.size, 0, CAPACITY, "spans.rows: number of rows")
    in_range(len(texts), 0, 3 * count, "spans.texts: number of texts")
    for text in texts:
        in_range(len(text), 0, _MAX_TRACE_TEXT, "spans.texts: characters")
    names, spans = list(texts), []
    for track, name, detail, start_s, end_s, due_s, nbytes, bundle, epoch in _SPAN.iter_unpack(rows):
        in_range(max(track, name, detail), 0, len(names) - 1, "spans: number of a text")
        if not -math.inf < start_s <= end_s < math.inf:
            raise ProtocolError(f"a span from {start_s} to {end_s} is no time")
        if due_s == math.inf:
            raise ProtocolError("a span is due at infinity")
        in_range(nbytes, 0, 1 << 62, "spans: bytes")
        due = None if math.isnan(due_s) else due_s
        spans.append(Span(names[track], names[name], start_s, end_s, nbytes, bundle, epoch, due, names[detail]))
    return Recording(tuple(spans), message.complete)


def _decode_spec(spec: pb.Spec, cap_bytes: int) -> BundleSpec:
    where = f"spec {spec.spec_id}"
    nbytes = in_range(spec.nbytes, 1, cap_bytes, f"{where}: nbytes")
    in_range(len(spec.tensors), 0, _MAX_TENSORS, f"{where}: number of tensors")
    tensors = []
    for t in spec.tensors:
        size = in_range(t.nbytes, 0, nbytes, f"{where}: tensor nbytes")
        offset = in_range(t.offset_bytes, 0, nbytes - size, f"{where}: tensor offset")
        in_range(len(t.shape), 0, _MAX_DIMENSIONS, f"{where}: tensor dimensions")
        shape = tuple(in_range(n, 0, 1 << 48, f"{where}: tensor dimension") for n in t.shape)
        tensors.append(TensorSpec(short_name(t.name, where), short_name(t.dtype, where), shape, offset, size))
    try:
        kind = Kind(spec.kind)
    except ValueError:
        raise ProtocolError(f"{where}: kind is {spec.kind}, which does not exist") from None
    return BundleSpec(spec.spec_id, kind, short_name(spec.unit, where), nbytes, tuple(tensors), spec.heir_of)
