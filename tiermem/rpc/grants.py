"""The grant protocol's values to messages and back. Everything that arrives is checked here before a machine sees it: a
field out of range raises ProtocolError naming field and value.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterable, Iterator, Sequence

from tiermem.allocator import Run
from tiermem.bundle import Mode
from tiermem.errors import Code, ProtocolError
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
    Supersede,
    Surrender,
    Used,
    Void,
)
from tiermem.plan import Access, Phase
from tiermem.rpc.fields import in_range, pack_u64, short_name, unpack_rows, unpack_u64
from tiermem.rpc.v1 import tiermem_pb2 as pb

MAX_BATCH = 256
"""Messages in a batch: an event loop decodes it at one go."""
BODIES = frozenset({"demand", "void", "used", "accessed", "commit", "done", "discard", "supersede"})
"""What `decode_client` takes."""
_RUN = struct.Struct("<2I")
_ROW = struct.Struct("<3Q3I")  # of Grants
_MODES = {int(mode): mode for mode in Mode}


def _mode(value: int) -> Mode:
    mode = _MODES.get(value)
    if mode is None:
        raise ProtocolError(f"mode is {value}, which does not exist")
    return mode


def _phase(value: int) -> Phase:
    try:
        return Phase(value)
    except ValueError:
        raise ProtocolError(f"accessed.kind is {value}, which does not exist") from None


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
        case Done(serials):
            return pb.ClientMessage(done=pb.Done(serials=pack_u64(serials)))
        case Discard(bundles):
            return pb.ClientMessage(discard=pb.Discard(bundles=pack_u64(bundles)))
        case Supersede(pairs):
            return pb.ClientMessage(supersede=pb.Supersede(pairs=pack_u64(b for pair in pairs for b in pair)))


def encode_together(items: Sequence[ClientBody | pb.ClientMessage]) -> pb.ClientMessage:
    """One message for up to MAX_BATCH of them, in order; neighbouring Used become one, and so do Done."""
    encoded = [item if isinstance(item, pb.ClientMessage) else encode_client(item) for item in _joined(items)]
    return encoded[0] if len(encoded) == 1 else pb.ClientMessage(batch=pb.ClientBatch(messages=encoded))


def _joined(items: Iterable[ClientBody | pb.ClientMessage]) -> Iterator[ClientBody | pb.ClientMessage]:
    for kind, run in itertools.groupby(items, type):
        if kind is Used:
            yield Used(_serials(run))
        elif kind is Done:
            yield Done(_serials(run))
        else:
            yield from run


def _serials(messages: Iterable[object]) -> tuple[int, ...]:
    return tuple(serial for message in messages if isinstance(message, Used | Done) for serial in message.serials)


def decode_client(message: pb.ClientMessage) -> ClientBody:
    """One of the grant protocol's messages. Raises ProtocolError for any other body."""
    match message.WhichOneof("body"):
        case "demand":
            d = message.demand
            held = frozenset(unpack_u64(d.held, "demand.held"))
            return Demand(short_name(d.lane, "demand.lane"), d.epoch, held, d.target, _mode(d.mode))
        case "void":
            v = message.void
            return Void(short_name(v.lane, "void.lane"), v.epoch, frozenset(unpack_u64(v.held, "void.held")))
        case "used":
            return Used(unpack_u64(message.used.serials, "used.serials"))
        case "accessed":
            a = message.accessed
            access = Access(short_name(a.unit, "accessed.unit"), _phase(a.kind), a.training)
            return Accessed(short_name(a.lane, "accessed.lane"), access)
        case "commit":
            updated = unpack_rows(message.commit.updated, 3, "commit.updated")
            consumed = unpack_rows(message.commit.consumed, 2, "commit.consumed")
            return Commit(
                tuple((s, b, in_range(v, 1, 1 << 62, "commit version")) for s, b, v in updated),
                tuple((s, b) for s, b in consumed),
            )
        case "done":
            return Done(unpack_u64(message.done.serials, "done.serials"))
        case "discard":
            return Discard(unpack_u64(message.discard.bundles, "discard.bundles"))
        case "supersede":
            return Supersede(tuple((o, n) for o, n in unpack_rows(message.supersede.pairs, 2, "supersede.pairs")))
        case other:
            raise ProtocolError(f"message {other!r} is not expected here")


def messages_of(batch: pb.ClientBatch) -> Sequence[pb.ClientMessage]:
    """The messages of a batch. Raises ProtocolError for none, too many, and those that travel alone."""
    in_range(len(batch.messages), 1, MAX_BATCH, "batch: number of messages")
    for message in batch.messages:
        if (body := message.WhichOneof("body")) in (None, "open", "close", "batch"):
            raise ProtocolError(f"a batch with message {body!r}, which is not expected there")
    return batch.messages


def encode_decided(bodies: Iterable[DaemonBody]) -> list[pb.DaemonMessage]:
    """Messages in order; neighbouring grants that were pushed in one epoch of a lane are one."""
    encoded: list[pb.DaemonMessage] = []
    for pushed, run in itertools.groupby(bodies, _pushed_in):
        if pushed is None:
            encoded += map(encode_daemon, run)
        else:
            encoded.append(_encode_pushed(*pushed, run))
    return encoded


def _pushed_in(body: DaemonBody) -> tuple[str, int] | None:
    return (body.lane, body.epoch) if isinstance(body, Grant) and not body.answers else None


def _encode_pushed(lane: str, epoch: int, grants: Iterable[DaemonBody]) -> pb.DaemonMessage:
    rows: list[bytes] = []
    flat: list[int] = []
    for grant in grants:
        assert isinstance(grant, Grant)
        serial, _, _, spec, bundle, mode, version, runs, _ = grant
        rows.append(_ROW.pack(serial, bundle, version, spec, mode, len(runs)))
        for run in runs:
            flat += run
    table = pb.Grants(lane=lane, epoch=epoch, rows=b"".join(rows), runs=struct.pack(f"<{len(flat)}I", *flat))
    return pb.DaemonMessage(grants=table)


def encode_daemon(message: DaemonBody) -> pb.DaemonMessage:
    match message:
        case Grant(answers=0):
            return _encode_pushed(message.lane, message.epoch, (message,))
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
    """Raises ProtocolError for runs outside the arena of `frames` frames, and where it answers nothing."""
    if not grant.answers:
        raise ProtocolError(f"grant {grant.serial} answers no demand")
    return Grant(
        grant.serial,
        grant.lane,
        grant.epoch,
        grant.spec,
        grant.bundle,
        _mode(grant.mode),
        grant.version,
        tuple(_runs(grant.runs, frames, "grant.runs")),
        grant.answers,
    )


def decode_grants(grants: pb.Grants, frames: int) -> list[Grant]:
    """Raises ProtocolError as `decode_grant`, and where there are more runs than the rows say, or fewer."""
    if len(grants.rows) % _ROW.size:
        raise ProtocolError(f"grants.rows has {len(grants.rows)} bytes, not a multiple of {_ROW.size}")
    runs = _runs(grants.runs, frames, "grants.runs")
    lane, epoch, at = grants.lane, grants.epoch, 0
    decoded = []
    for serial, bundle, version, spec, mode, count in _ROW.iter_unpack(grants.rows):
        mine = tuple(runs[at : at + count])
        at += count
        decoded.append(Grant(serial, lane, epoch, spec, bundle, _mode(mode), version, mine, 0))
    if at != len(runs):
        raise ProtocolError(f"grants.runs has {len(runs)} runs, its rows have {at}")
    return decoded


def _runs(data: bytes, frames: int, field: str) -> list[Run]:
    if len(data) % _RUN.size:
        raise ProtocolError(f"{field} has {len(data)} bytes, not a multiple of {_RUN.size}")
    runs: list[Run] = list(_RUN.iter_unpack(data))
    for first, count in runs:
        if count < 1 or first + count > frames:
            raise ProtocolError(f"{field} names frames {first} .. {first + count} of an arena of {frames}")
    return runs


def decode_refuse(refuse: pb.Refuse) -> Refuse:
    """A code of a newer daemon becomes INTERNAL, its text stays."""
    code = Code(refuse.code) if refuse.code in Code.__members__ else Code.INTERNAL
    return Refuse(refuse.lane, refuse.answers, code, refuse.message)
