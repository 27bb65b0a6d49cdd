"""Domain values to messages and back. Everything that arrives is checked here before any state sees it: a field out of
range raises ProtocolError naming field and value. Tables travel as packed little-endian integers (a message object per
row is 4 times slower).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence

from tiermem.bundle import BundleSpec, Kind, Mode, TensorSpec
from tiermem.errors import Code, ProtocolError
from tiermem.file_pieces import Adoption
from tiermem.grants.messages import ClientBody, Commit, DaemonBody, Demand, Discard, Done, Grant, Refuse
from tiermem.rpc.v1 import tiermem_pb2 as pb

PROTOCOL = 1
MAX_MESSAGE_BYTES = 16 << 20
_MAX_SPECS = 1 << 16  # in one message: the event loop decodes it at one go
_MAX_FLOOR = 1 << 20
_MAX_TENSORS = 1 << 16
_MAX_NAME = 4096
_MAX_DIMENSIONS = 64


def pack_u64(values: Iterable[int]) -> bytes:
    """Little-endian uint64, back to back."""
    items = tuple(values)
    return struct.pack(f"<{len(items)}Q", *items)


def _unpack(data: bytes, letter: str, width: int, columns: int, field: str) -> list[tuple[int, ...]]:
    if len(data) % (width * columns):
        raise ProtocolError(f"{field} has {len(data)} bytes, not a multiple of {width * columns}")
    flat = struct.unpack(f"<{len(data) // width}{letter}", data)
    return [flat[i : i + columns] for i in range(0, len(flat), columns)]


def _in_range(value: int, low: int, high: int, field: str) -> int:
    if not low <= value <= high:
        raise ProtocolError(f"{field} is {value}, outside {low} .. {high}")
    return value


def _mode(value: int) -> Mode:
    try:
        return Mode(value)
    except ValueError:
        raise ProtocolError(f"mode is {value}, which does not exist") from None


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


def decode_client(message: pb.ClientMessage) -> ClientBody:
    """One of the grant protocol's messages. Raises ProtocolError for any other body."""
    match message.WhichOneof("body"):
        case "demand":
            d = message.demand
            held = frozenset(row[0] for row in _unpack(d.held, "Q", 8, 1, "demand.held"))
            return Demand(_name(d.lane, "demand.lane"), d.epoch, held, d.target, _mode(d.mode))
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
            return Discard(tuple(row[0] for row in _unpack(message.discard.bundles, "Q", 8, 1, "discard.bundles")))
        case other:
            raise ProtocolError(f"message {other!r} is not expected here")


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
            runs = struct.pack(f"<{2 * len(message.runs)}I", *(v for run in message.runs for v in run))
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
                )
            )
        case Refuse():
            return pb.DaemonMessage(
                refuse=pb.Refuse(lane=message.lane, answers=message.answers, code=message.code, message=message.message)
            )


def decode_grant(grant: pb.Grant, frames: int) -> Grant:
    """Raises ProtocolError for runs outside the arena of `frames` frames."""
    runs = _unpack(grant.runs, "I", 4, 2, "grant.runs")
    for first, count in runs:
        if count < 1 or first + count > frames:
            raise ProtocolError(f"grant {grant.serial} names frames {first} .. {first + count} of an arena of {frames}")
    return Grant(
        grant.serial,
        grant.lane,
        grant.epoch,
        grant.bundle,
        _mode(grant.mode),
        grant.version,
        _as_runs(runs),
        grant.answers,
    )


def _as_runs(rows: Sequence[tuple[int, ...]]) -> tuple[tuple[int, int], ...]:
    return tuple((first, count) for first, count in rows)


def decode_refuse(refuse: pb.Refuse) -> Refuse:
    """A code of a newer daemon becomes INTERNAL, its text stays."""
    code = Code(refuse.code) if refuse.code in Code.__members__ else Code.INTERNAL
    return Refuse(refuse.lane, refuse.answers, code, refuse.message)
