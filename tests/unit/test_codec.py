from __future__ import annotations

import struct
from typing import Any, TypeVar, cast

import pytest
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

from tiermem.bundle import BundleSpec, Kind, Mode, TensorSpec
from tiermem.errors import Code, ProtocolError, TiermemError, error_for
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
    Supersede,
    Surrender,
    Used,
    Void,
)
from tiermem.notices import MAX_COUNT, MAX_TEXT, Notice, NoticeKind
from tiermem.plan import Access, Phase
from tiermem.rpc import codec
from tiermem.rpc import grants as grant_codec
from tiermem.rpc.fields import pack_u64
from tiermem.rpc.v1 import tiermem_pb2 as pb
from tiermem.stats import DeviceKind, DeviceReport, LinkStats, TierStats

CAP_BYTES = 1 << 20
FRAMES = 512
_M = TypeVar("_M", bound=Message)

u64 = st.integers(0, 2**64 - 1)
names = st.text(max_size=30).filter(lambda text: text.isprintable())
modes = st.sampled_from(Mode)
demands = st.builds(Demand, names, u64, st.frozensets(u64, max_size=20), u64, modes)
commits = st.builds(
    Commit,
    st.lists(st.tuples(u64, u64, st.integers(1, 2**62)), max_size=20).map(tuple),
    st.lists(st.tuples(u64, u64), max_size=20).map(tuple),
)
discards = st.builds(Discard, st.lists(u64, max_size=20).map(tuple))
supersedes = st.builds(Supersede, st.lists(st.tuples(u64, u64), max_size=20).map(tuple))
dones = st.builds(Done, st.lists(u64, max_size=9).map(tuple))
runs = st.integers(0, FRAMES - 1).flatmap(lambda at: st.tuples(st.just(at), st.integers(1, FRAMES - at)))
grants = st.builds(
    Grant, u64, names, u64, st.integers(0, 2**32 - 1), u64, modes, u64, st.lists(runs, max_size=20).map(tuple), u64
)
refusals = st.builds(Refuse, names, u64, st.sampled_from(Code), st.text(max_size=50))


def wire(message: _M) -> _M:
    """As it arrives at the other end."""
    return type(message).FromString(message.SerializeToString())


@st.composite
def specs(draw: st.DrawFn, number: int = 0) -> BundleSpec:
    nbytes = draw(st.integers(1, CAP_BYTES))
    tensors = []
    for name in draw(st.lists(names, max_size=4)):
        size = draw(st.integers(0, nbytes))
        offset = draw(st.integers(0, nbytes - size))
        shape = tuple(draw(st.lists(st.integers(0, 1 << 48), max_size=5)))
        tensors.append(TensorSpec(name, draw(names), shape, offset, size))
    numbers = st.integers(0, 2**32 - 1)
    return BundleSpec(draw(numbers), draw(st.sampled_from(Kind)), draw(names), nbytes, tuple(tensors), draw(numbers))


voids = st.builds(Void, names, u64, st.frozensets(u64, max_size=9))
uses = st.builds(Used, st.lists(u64, max_size=9).map(tuple))
accesses = st.builds(Accessed, names, st.builds(Access, names, st.sampled_from(Phase), st.booleans()))


@given(demands | commits | discards | supersedes | voids | uses | accesses | dones)
def test_what_a_client_says_arrives(message: ClientBody) -> None:
    assert grant_codec.decode_client(wire(grant_codec.encode_client(message))) == message


@given(grants | refusals | st.builds(Surrender, names))
def test_what_a_daemon_says_arrives(message: DaemonBody) -> None:
    sent = wire(grant_codec.encode_daemon(message))
    received: DaemonBody
    if sent.WhichOneof("body") == "grant":
        received = grant_codec.decode_grant(sent.grant, FRAMES)
    elif sent.WhichOneof("body") == "grants":
        [received] = grant_codec.decode_grants(sent.grants, FRAMES)
    elif sent.WhichOneof("body") == "surrender":
        received = Surrender(sent.surrender.lane)
    else:
        received = grant_codec.decode_refuse(sent.refuse)
    assert received == message


@given(st.lists(grants | refusals | st.builds(Surrender, names), max_size=9), st.integers(0, 3))
def test_what_a_daemon_has_decided_arrives_in_order(decided: list[DaemonBody], kinds: int) -> None:
    """Grants of one lane and epoch that were pushed, as most are, and all others."""
    some = [
        m._replace(lane="main", epoch=n % 2, answers=0) if isinstance(m, Grant) and n % 4 < kinds else m
        for n, m in enumerate(decided)
    ]
    arrived: list[DaemonBody] = []
    for sent in map(wire, grant_codec.encode_decided(some)):
        match sent.WhichOneof("body"):
            case "grants":
                arrived += grant_codec.decode_grants(sent.grants, FRAMES)
            case "grant":
                arrived.append(grant_codec.decode_grant(sent.grant, FRAMES))
            case "refuse":
                arrived.append(grant_codec.decode_refuse(sent.refuse))
            case other:
                assert other == "surrender"
                arrived.append(Surrender(sent.surrender.lane))
    assert arrived == some


def test_grants_that_were_pushed_together_are_one_message() -> None:
    pushed = [Grant(n, "main", 3, 5, n, Mode.READ, 1, ((n, 1), (9, 2)), 0) for n in range(4)]
    answer = pushed[0]._replace(answers=3)
    sent = grant_codec.encode_decided([*pushed, answer, pushed[0]._replace(epoch=4), pushed[1]._replace(lane="worker")])
    assert [message.WhichOneof("body") for message in sent] == ["grants", "grant", "grants", "grants"]
    assert grant_codec.decode_grants(sent[0].grants, FRAMES) == pushed


@pytest.mark.parametrize(
    ("rows", "runs", "match"),
    [
        (b"123", b"", "grants.rows has 3 bytes"),
        (struct.pack("<3Q3I", 1, 2, 3, 4, 2, 0), b"1234567", "grants.runs has 7 bytes"),
        (struct.pack("<3Q3I", 1, 2, 3, 4, 2, 2), struct.pack("<2I", 0, 1), "has 1 runs, its rows have 2"),
        (struct.pack("<3Q3I", 1, 2, 3, 4, 2, 0), struct.pack("<2I", 0, 1), "has 1 runs, its rows have 0"),
        (struct.pack("<3Q3I", 1, 2, 3, 4, 9, 0), b"", "mode is 9"),
        (struct.pack("<3Q3I", 1, 2, 3, 4, 2, 1), struct.pack("<2I", FRAMES, 1), f"names frames {FRAMES}"),
        (struct.pack("<3Q3I", 1, 2, 3, 4, 2, 1), struct.pack("<2I", 0, 0), "names frames 0 .. 0"),
    ],
)
def test_absurd_tables_of_grants_are_refused(rows: bytes, runs: bytes, match: str) -> None:
    with pytest.raises(ProtocolError, match=match):
        grant_codec.decode_grants(pb.Grants(lane="main", rows=rows, runs=runs), FRAMES)


@given(st.lists(specs(), min_size=1, max_size=4))
def test_forms_of_bundles_arrive(declared: list[BundleSpec]) -> None:
    sent = wire(codec.encode_specs(declared))
    assert codec.decode_specs(sent.declare, CAP_BYTES) == declared


adoptions = st.builds(
    Adoption,
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**32 - 1),
    st.lists(st.integers(0, 2**62), max_size=20).map(tuple),
    st.lists(u64, max_size=20).map(tuple),
)


@given(adoptions)
def test_an_adoption_arrives(adoption: Adoption) -> None:
    assert codec.decode_adopt(wire(codec.encode_adopt(adoption)).adopt) == adoption


counts = st.builds(LinkStats, st.integers(0, 1 << 62), st.integers(0, 1 << 40), st.floats(0, 1e9), st.floats(0, 1e9))
device_reports = st.builds(
    lambda kind, capacity, used, inward, outward: DeviceReport(
        kind, TierStats(capacity, min(used, capacity)), inward, outward
    ),
    st.sampled_from(DeviceKind),
    st.integers(0, 1 << 60),
    st.integers(0, 1 << 60),
    counts,
    counts,
)


@given(device_reports)
def test_a_report_of_a_device_arrives(report: DeviceReport) -> None:
    assert codec.decode_device_report(wire(codec.encode_device_report(report)).device_report) == report


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"capacity_bytes": (1 << 60) + 1}, "device_report.capacity_bytes is 1152921504606846977"),
        ({"capacity_bytes": 10, "used_bytes": 11}, r"device_report.used_bytes is 11, outside 0 .. 10"),
        ({"inward": pb.DeviceLinkCount(bytes=1 << 63)}, "device_report.inward.bytes is"),
        ({"outward": pb.DeviceLinkCount(seconds=float("nan"))}, "device_report.outward has taken nan s"),
        ({"outward": pb.DeviceLinkCount(queue_seconds=-1.0)}, "has taken -1.0 s, which is no time"),
        ({"kind": 0}, "device_report.kind is 0, which does not exist"),
    ],
)
def test_absurd_reports_of_a_device_are_refused(fields: dict[str, Any], match: str) -> None:
    with pytest.raises(ProtocolError, match=match):
        codec.decode_device_report(wire(pb.DeviceReport(**{"kind": pb.DEVICE_KIND_CUDA, **fields})))


notices = st.builds(Notice, st.sampled_from(NoticeKind), st.text(max_size=MAX_TEXT), st.integers(1, MAX_COUNT))


@given(notices)
def test_a_notice_arrives(notice: Notice) -> None:
    assert codec.decode_notice(wire(codec.encode_notice(notice)).notice) == notice


def test_a_text_that_is_too_long_is_cut_by_who_sends_it() -> None:
    sent = codec.encode_notice(Notice(NoticeKind.FILE_REFUSED, "x" * (MAX_TEXT + 1)))
    assert codec.decode_notice(sent.notice).text == "x" * MAX_TEXT


def test_kinds_of_notices_are_those_of_the_protocol() -> None:
    assert {f"NOTICE_KIND_{kind.name}" for kind in NoticeKind} == {*pb.NoticeKind.keys()} - {"NOTICE_KIND_UNSPECIFIED"}


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"kind": 0}, "notice.kind is 0"),
        ({"kind": 99}, "notice.kind is 99"),
        ({"kind": -1}, "notice.kind is -1"),
        ({"count": 0}, "notice.count is 0"),
        ({"count": MAX_COUNT + 1}, f"notice.count is {MAX_COUNT + 1}, outside 1 .. {MAX_COUNT}"),
        ({"text": "x" * (MAX_TEXT + 1)}, f"notice.text: characters is {MAX_TEXT + 1}"),
    ],
    ids=str,
)
def test_absurd_notices_are_refused(fields: dict[str, Any], match: str) -> None:
    with pytest.raises(ProtocolError, match=match):
        codec.decode_notice(wire(pb.Notice(**({"kind": 1, "count": 1} | fields))))


def test_numbers_are_packed_little_endian() -> None:
    assert pack_u64([1, 2**64 - 1]) == bytes([1, 0, 0, 0, 0, 0, 0, 0] + [255] * 8)
    assert pack_u64([]) == b""


# -- what is out of range is refused, naming field and value


@pytest.mark.parametrize(
    ("adopt", "match"),
    [
        (pb.Adopt(offsets=bytes(7)), "adopt.offsets has 7 bytes"),
        (pb.Adopt(digests=bytes(9)), "adopt.digests has 9 bytes"),
        (pb.Adopt(offsets=pack_u64([2**63])), f"adopt offset is {2**63}"),
    ],
    ids=["odd offsets", "odd digests", "offset beyond any file"],
)
def test_absurd_adoptions_are_refused(adopt: pb.Adopt, match: str) -> None:
    with pytest.raises(ProtocolError, match=match):
        codec.decode_adopt(wire(adopt))


def demand(mode: int = 2, lane: str = "main", held: bytes = b"") -> pb.ClientMessage:
    return pb.ClientMessage(demand=pb.Demand(lane=lane, epoch=1, held=held, mode=cast("Any", mode)))


@pytest.mark.parametrize(
    ("message", "match"),
    [
        (demand(mode=0), "mode is 0"),
        (demand(mode=5), "mode is 5"),
        (demand(mode=2**31 - 1), f"mode is {2**31 - 1}"),
        (demand(mode=-1), "mode is -1"),
        (demand(lane="m" * 4097), "demand.lane: a name of 4097"),
        (demand(held=b"1234567"), "demand.held has 7 bytes"),
        (pb.ClientMessage(commit=pb.Commit(updated=bytes(16))), "commit.updated has 16 bytes"),
        (pb.ClientMessage(commit=pb.Commit(consumed=bytes(8))), "commit.consumed has 8 bytes"),
        (pb.ClientMessage(commit=pb.Commit(updated=bytes(24))), "commit version is 0"),
        (pb.ClientMessage(commit=pb.Commit(updated=pack_u64([1, 1, 2**63]))), f"commit version is {2**63}"),
        (pb.ClientMessage(discard=pb.Discard(bundles=bytes(9))), "discard.bundles has 9 bytes"),
        (pb.ClientMessage(supersede=pb.Supersede(pairs=bytes(24))), "supersede.pairs"),
        (pb.ClientMessage(open=pb.Open(job="x")), "'open' is not expected here"),
        (pb.ClientMessage(close=pb.Close()), "'close' is not expected here"),
        (pb.ClientMessage(), "None is not expected here"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_absurd_messages_of_a_client_are_refused(message: pb.ClientMessage, match: str) -> None:
    with pytest.raises(ProtocolError, match=match):
        grant_codec.decode_client(wire(message))


def tensor(**fields: object) -> pb.TensorSpec:
    values: dict[str, object] = {"name": "w", "dtype": "float32", "shape": [4], "offset_bytes": 0, "nbytes": 16}
    return pb.TensorSpec(**(values | fields))  # type: ignore[arg-type]


def spec(*tensors: pb.TensorSpec, **fields: object) -> pb.Spec:
    values: dict[str, object] = {"spec_id": 3, "kind": 1, "unit": "layers.0", "nbytes": 64}
    return pb.Spec(tensors=tensors, **(values | fields))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("declared", "match"),
    [
        (spec(nbytes=0), "spec 3: nbytes is 0"),
        (spec(nbytes=-1), "spec 3: nbytes is -1"),
        (spec(nbytes=CAP_BYTES + 1), f"spec 3: nbytes is {CAP_BYTES + 1}, outside 1 .. {CAP_BYTES}"),
        (spec(nbytes=2**63 - 1), f"nbytes is {2**63 - 1}"),
        (spec(kind=0), "kind is 0"),
        (spec(kind=99), "kind is 99"),
        (spec(unit="u" * 4097), "a name of 4097"),
        (spec(tensor(nbytes=-1)), "tensor nbytes is -1"),
        (spec(tensor(nbytes=65)), "tensor nbytes is 65"),
        (spec(tensor(offset_bytes=-4)), "tensor offset is -4"),
        (spec(tensor(offset_bytes=49)), "tensor offset is 49, outside 0 .. 48"),
        (spec(tensor(offset_bytes=2**63 - 1)), f"tensor offset is {2**63 - 1}"),
        (spec(tensor(shape=[1] * 65)), "tensor dimensions is 65"),
        (spec(tensor(shape=[4, -1])), "tensor dimension is -1"),
        (spec(tensor(shape=[2**48 + 1])), f"tensor dimension is {2**48 + 1}"),
        (spec(tensor(name="n" * 4097)), "a name of 4097"),
        (spec(tensor(dtype="d" * 4097)), "a name of 4097"),
        (spec(*[tensor(nbytes=0)] * 65537), "number of tensors is 65537"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_absurd_forms_are_refused(declared: pb.Spec, match: str) -> None:
    good = spec(tensor())
    assert len(codec.decode_specs(pb.Declare(specs=[good]), CAP_BYTES)) == 1
    with pytest.raises(ProtocolError, match=match):
        codec.decode_specs(pb.Declare(specs=[good, declared]), CAP_BYTES)


def test_an_empty_declaration_is_refused() -> None:
    with pytest.raises(ProtocolError, match="number of specs is 0"):
        codec.decode_specs(pb.Declare(), CAP_BYTES)


def test_too_many_forms_at_once_are_refused() -> None:
    with pytest.raises(ProtocolError, match="number of specs is 65537"):
        codec.decode_specs(pb.Declare(specs=[pb.Spec()] * 65537), CAP_BYTES)


def test_an_admission_arrives_or_is_refused() -> None:
    assert codec.decode_admit(wire(pb.Admit(lane="main", floor_specs=[3, 3, 2**32 - 1]))) == ("main", [3, 3, 2**32 - 1])
    with pytest.raises(ProtocolError, match=r"admit\.lane: a name of 4097"):
        codec.decode_admit(pb.Admit(lane="m" * 4097))
    with pytest.raises(ProtocolError, match=r"admit\.floor_specs: number of specs is 1048577"):
        codec.decode_admit(pb.Admit(lane="main", floor_specs=[1] * (2**20 + 1)))


@pytest.mark.parametrize(
    ("first", "count"), [(FRAMES, 1), (0, FRAMES + 1), (FRAMES - 1, 2), (3, 0), (2**32 - 1, 2**32 - 1)]
)
def test_frames_outside_the_arena_are_refused(first: int, count: int) -> None:
    sent = grant_codec.encode_daemon(Grant(8, "main", 1, 2, 5, Mode.READ, 1, ((0, 1), (first, count)), 1))
    with pytest.raises(ProtocolError, match=f"grant.runs names frames {first} "):
        grant_codec.decode_grant(sent.grant, FRAMES)


def test_absurd_grants_are_refused() -> None:
    for grant, match in [
        (pb.Grant(answers=1, mode=cast("Any", 1), runs=bytes(4)), "grant.runs has 4"),
        (pb.Grant(answers=1, mode=cast("Any", 9)), "mode is 9"),
        (pb.Grant(serial=7), "grant 7 answers no demand"),
    ]:
        with pytest.raises(ProtocolError, match=match):
            grant_codec.decode_grant(grant, FRAMES)


def test_a_code_of_a_newer_daemon_is_internal_and_keeps_its_text() -> None:
    refuse = grant_codec.decode_refuse(pb.Refuse(lane="main", answers=4, code="TOO_SHINY", message="polish less"))
    assert refuse == Refuse("main", 4, Code.INTERNAL, "polish less")
    error = error_for(refuse.code, refuse.message)
    assert type(error) is TiermemError
    assert str(error) == "polish less"
