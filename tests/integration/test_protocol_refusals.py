"""A client may send anything: each absurd value is refused by name with a typed code, costs its own session only, and
the daemon stays healthy. Raw messages over a raw channel.
"""

from __future__ import annotations

import os
import queue
import secrets
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import grpc
import pytest

from tests.integration.daemon_process import Daemon, serve, within
from tiermem.bundle import Kind, Mode
from tiermem.errors import Code
from tiermem.grants.ledger import MAX_LANES, MAX_SPECS
from tiermem.notices import MAX_COUNT, MAX_NOTICES, MAX_TEXT
from tiermem.rpc import codec
from tiermem.rpc.fields import pack_u64
from tiermem.rpc.v1 import tiermem_pb2 as pb
from tiermem.rpc.v1 import tiermem_pb2_grpc as pb_grpc
from tiermem.trace import CAPACITY
from tiermem_client.side_channel import SideChannel
from tiermem_daemon.trace_requests import MAX_UNANSWERED

_CALL_TIMEOUT_S = 15.0
_FULL = (1 << 64) - 1
_CAP = 128 << 10  # of an arena of 1 MiB
_NBYTES = 8192
_LONG = "x" * (1 << 20)


class Raw:
    """One stream on a channel of its own. `ended` is what the daemon said last: a code of ours, or gRPC's."""

    def __init__(self, daemon: Daemon, job: str = "raw", opens: bool = True) -> None:
        self._side = SideChannel()
        self.token = self._side.connect(Path(f"{daemon.socket}.fd"), 5)
        self._channel = grpc.insecure_channel(daemon.endpoint, [("grpc.use_local_subchannel_pool", 1)])
        self._out: queue.SimpleQueue[pb.ClientMessage | None] = queue.SimpleQueue()
        self.stub = pb_grpc.TierMemStub(self._channel)  # type: ignore[no-untyped-call]
        self._stream = self.stub.Session(iter(self._out.get, None), timeout=_CALL_TIMEOUT_S)
        self._waiting: list[pb.DaemonMessage] = []
        self.calls: list[object] = []  # a call that nobody has is cancelled
        self.spec, self.bundle, self.serial, self._epoch = 1, 0, 0, 0
        if opens:
            self.send(open=self.hello(job))
            assert self.next().WhichOneof("body") == "opened"

    def hello(self, job: str = "raw", **fields: object) -> pb.Open:
        given = {"token": self.token, "protocol": codec.PROTOCOL, "job": job, "dram_bytes": 1 << 20, **fields}
        return pb.Open(**given)  # type: ignore[arg-type]

    def send(self, **body: object) -> None:
        self._out.put(pb.ClientMessage(**body))  # type: ignore[arg-type]

    def next(self) -> pb.DaemonMessage:
        """The next message that is not a sign of life; those of a batch one by one."""
        while True:
            if self._waiting:
                return self._waiting.pop(0)
            message: pb.DaemonMessage = next(self._stream)
            if message.WhichOneof("body") != "alive":
                self._waiting += message.batch.messages or [message]

    def settled(self) -> Raw:
        """Declared, admitted, and with a committed bundle under lease."""
        self.declare()
        self.admit()
        self.demand(self.spec, Mode.CREATE)
        grant = self.next().grant
        self.bundle, self.serial = grant.bundle, grant.serial
        self.commit([(self.serial, self.bundle, 1)])
        return self

    def declare(self, **fields: object) -> None:
        given = {"spec_id": self.spec, "kind": Kind.PARAM, "unit": "u", "nbytes": _NBYTES, **fields}
        self.send(declare=pb.Declare(specs=[pb.Spec(**given)]))  # type: ignore[arg-type]

    def admit(self, lane: str = "main", floor: Sequence[int] = (1,)) -> pb.Admitted:
        self.send(admit=pb.Admit(lane=lane, floor_specs=floor))
        return self.next().admitted

    def send_file(self, number: int, nbytes: int) -> None:
        """Pass a file of zeros in, once; the arena comes first."""
        arena, _ = self._side.receive_descriptor(5)
        os.close(arena)
        with tempfile.TemporaryFile() as file:
            file.truncate(nbytes)
            self._side.send_file(number, file.fileno(), 5)

    def demand(self, target: int, mode: int, **fields: object) -> None:
        self._epoch += 1
        given = {"lane": "main", "epoch": self._epoch, "target": target, "mode": mode, **fields}
        self.send(demand=pb.Demand(**given))  # type: ignore[arg-type]

    def commit(self, updated: Sequence[Sequence[int]] = (), consumed: Sequence[Sequence[int]] = ()) -> None:
        flat = [pack_u64(value for row in rows for value in row) for rows in (updated, consumed)]
        self.send(commit=pb.Commit(updated=flat[0], consumed=flat[1]))

    def ended(self) -> str:
        """Read to the end: the code with which the daemon ended the stream."""
        try:
            while True:
                self.next()
        except StopIteration:
            return "OK"
        except grpc.RpcError:
            code = (self._stream.details() or "").partition(":")[0]
            return code if code in Code.__members__ else str(self._stream.code())

    def close(self) -> None:
        with suppress(ValueError):
            self.send(close=pb.Close())
        self._out.put(None)
        self._stream.cancel()
        self._channel.close()
        self._side.close()


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with serve(tmp_path_factory.mktemp("protocol")) as running:
        yield running


@pytest.fixture
def bystander(daemon: Daemon) -> Iterator[Raw]:
    """A session that does nothing wrong, and must not notice."""
    raw = Raw(daemon, "bystander").settled()
    try:
        yield raw
        raw.demand(raw.bundle, Mode.READ, held=pack_u64([raw.serial]))
        grant = raw.next().grant
        assert (grant.bundle, grant.version) == (raw.bundle, 1)
    finally:
        raw.close()


@contextmanager
def raw_session(daemon: Daemon, opens: bool = True) -> Iterator[Raw]:
    raw = Raw(daemon, opens=opens)
    try:
        yield raw
    finally:
        raw.close()


def healthy(daemon: Daemon) -> None:
    """Serving, and only the bystander has anything."""
    assert daemon.health() == "SERVING"

    def left() -> str:
        stats = daemon.stats()
        (other,) = [job for job in stats.jobs if job.job == "bystander"]
        jobs = [job.job for job in stats.jobs]
        mine = stats.tiers["dram"].used_bytes - other.tiers["dram"].used_bytes
        return "" if jobs == ["bystander"] and mine == 0 else f"{jobs} with {mine} bytes"

    within(2, left)
    assert "Traceback" not in daemon.log, daemon.log[-3000:]


# -- a session that has begun; each case is what a client sends after `settled`


def _discard(raw: Raw, *bundles: int) -> None:
    raw.send(discard=pb.Discard(bundles=pack_u64(bundles)))


def _tensor(raw: Raw, **fields: object) -> None:
    given = {"name": "t", "dtype": "float32", "shape": [4], "offset_bytes": 0, "nbytes": 16, **fields}
    raw.declare(spec_id=2, tensors=[pb.TensorSpec(**given)])  # type: ignore[arg-type]


def _commit_old_version(raw: Raw) -> None:
    raw.send(done=pb.Done(serials=pack_u64([raw.serial])))
    raw.demand(raw.bundle, Mode.UPDATE)
    raw.commit([(raw.next().grant.serial, raw.bundle, 1)])


def _commit_twice_at_once(raw: Raw) -> None:
    raw.send(done=pb.Done(serials=pack_u64([raw.serial])))
    raw.demand(raw.bundle, Mode.UPDATE)
    raw.commit([(raw.next().grant.serial, raw.bundle, 2)] * 2)


def _too_many_lanes(raw: Raw) -> None:
    for n in range(MAX_LANES):  # there is one already
        raw.send(admit=pb.Admit(lane=f"lane {n}"))


def _create_blank(raw: Raw) -> int:
    raw.demand(raw.spec, Mode.CREATE, held=pack_u64([raw.serial]))
    return raw.next().grant.bundle


def _two_readers(raw: Raw) -> None:
    """One of them uses the bundle up while the other one holds it."""
    raw.demand(raw.bundle, Mode.CONSUME, held=pack_u64([raw.serial]))
    raw.commit(consumed=[(raw.next().grant.serial, raw.bundle)])


def _consume_twice(raw: Raw) -> None:
    raw.send(done=pb.Done(serials=pack_u64([raw.serial])))
    raw.demand(raw.bundle, Mode.CONSUME)
    serial = raw.next().grant.serial
    raw.commit(consumed=[(serial, raw.bundle), (serial, raw.bundle)])


def _discard_twice(raw: Raw) -> None:
    raw.send(done=pb.Done(serials=pack_u64([raw.serial])))
    _discard(raw, raw.bundle, raw.bundle)


def _done_twice(raw: Raw) -> None:
    raw.send(done=pb.Done(serials=pack_u64([raw.serial])))
    raw.send(done=pb.Done(serials=pack_u64([raw.serial])))


def _use_a_held_lane_of_another_name(raw: Raw) -> None:
    raw.admit("second", [])
    raw.demand(raw.bundle, Mode.READ, lane="second", held=pack_u64([raw.serial]))


def _epoch_back(raw: Raw) -> None:
    raw.demand(raw.bundle, Mode.READ, held=pack_u64([raw.serial]), epoch=7)
    raw.next()
    raw.demand(raw.bundle, Mode.READ, epoch=6)


def _adopt(raw: Raw, digests: int = 8, tensors: int = 1, **fields: object) -> None:
    """Of spec 2, two pages that are one chunk, in a file of two pages; correct but for what is given."""
    raw.send_file(7, _NBYTES)
    tensor = pb.TensorSpec(name="w", dtype="float32", shape=[_NBYTES // 4], nbytes=_NBYTES)
    raw.declare(spec_id=2, tensors=[tensor] * tensors)
    given = {"spec_id": 2, "file": 7, "offsets": bytes(8 * tensors), "digests": bytes(digests), **fields}
    raw.send(adopt=pb.Adopt(**given))  # type: ignore[arg-type]


def _adopt_twice(raw: Raw) -> None:
    _adopt(raw)
    assert raw.next().adopted.bundle
    raw.send(adopt=pb.Adopt(spec_id=2, file=7, offsets=bytes(8), digests=bytes(8)))


def _notice(raw: Raw, **fields: object) -> None:
    raw.send(notice=pb.Notice(**{"kind": 1, "count": 1, **fields}))  # type: ignore[arg-type]


def _asked(raw: Raw) -> int:
    """Somebody wants a trace: the number of the question."""
    raw.calls.append(raw.stub.GetTrace.future(pb.GetTraceRequest(job="raw", seconds=1), timeout=_CALL_TIMEOUT_S))
    return raw.next().ask_trace.id


def _trace(raw: Raw, **fields: object) -> None:
    given = {"id": _asked(raw), "now_s": time.monotonic(), **fields}
    raw.send(trace=pb.Trace(**given))  # type: ignore[arg-type]


def _trace_twice(raw: Raw) -> None:
    number = _asked(raw)
    for _ in range(2):
        raw.send(trace=pb.Trace(id=number, now_s=1))


def _too_many_notices(raw: Raw) -> None:
    for _ in range(MAX_NOTICES + 1):
        _notice(raw)


BREAKS: dict[str, Callable[[Raw], None]] = {
    "spec of negative size": lambda r: r.declare(spec_id=2, nbytes=-1),
    "spec of size zero": lambda r: r.declare(spec_id=2, nbytes=0),
    "spec of 2^62 bytes": lambda r: r.declare(spec_id=2, nbytes=1 << 62),
    "spec of 2^63-1 bytes": lambda r: r.declare(spec_id=2, nbytes=(1 << 63) - 1),
    "spec above the cap": lambda r: r.declare(spec_id=2, nbytes=_CAP + 1),
    "spec of unknown kind": lambda r: r.declare(spec_id=2, kind=99),
    "spec of kind zero": lambda r: r.declare(spec_id=2, kind=0),
    "spec of negative kind": lambda r: r.declare(spec_id=2, kind=-1),
    "spec declared twice": lambda r: r.declare(),
    "spec declared twice in one message": lambda r: r.send(
        declare=pb.Declare(specs=[pb.Spec(spec_id=5, kind=1, unit="u", nbytes=64)] * 2)  # type: ignore[arg-type]
    ),
    "no specs": lambda r: r.send(declare=pb.Declare()),
    "too many specs": lambda r: r.send(declare=pb.Declare(specs=[pb.Spec()] * ((1 << 20) + 1))),
    "spec with an enormous unit": lambda r: r.declare(spec_id=2, unit=_LONG),
    "tensor with an enormous name": lambda r: _tensor(r, name=_LONG),
    "tensor with an enormous dtype": lambda r: _tensor(r, dtype=_LONG),
    "tensor of negative size": lambda r: _tensor(r, nbytes=-1),
    "tensor of negative offset": lambda r: _tensor(r, offset_bytes=-4096),
    "tensor at 2^62": lambda r: _tensor(r, offset_bytes=1 << 62),
    "tensor that leaves its bundle": lambda r: _tensor(r, offset_bytes=_NBYTES - 8),
    "tensor of negative dimension": lambda r: _tensor(r, shape=[-1]),
    "tensor of dimension 2^62": lambda r: _tensor(r, shape=[1 << 62]),
    "tensor of a thousand dimensions": lambda r: _tensor(r, shape=[1] * 1000),
    "too many tensors": lambda r: r.declare(spec_id=2, tensors=[pb.TensorSpec()] * ((1 << 16) + 1)),
    "floor of unknown specs": lambda r: r.send(admit=pb.Admit(lane="main", floor_specs=[77])),
    "floor of spec 2^32-1": lambda r: r.send(admit=pb.Admit(lane="main", floor_specs=[(1 << 32) - 1])),
    "lane with an enormous name": lambda r: r.send(admit=pb.Admit(lane=_LONG)),
    "too many lanes": _too_many_lanes,
    "demand in a lane that was not admitted": lambda r: r.demand(r.bundle, Mode.READ, lane="other"),
    "demand in a lane of 4096 emoji": lambda r: r.demand(r.bundle, Mode.READ, lane="\N{GRINNING FACE}" * 4096),
    "demand in a lane with an enormous name": lambda r: r.demand(r.bundle, Mode.READ, lane=_LONG),
    "demand of mode zero": lambda r: r.demand(r.bundle, 0),
    "demand of unknown mode": lambda r: r.demand(r.bundle, 99),
    "demand of negative mode": lambda r: r.demand(r.bundle, -1),
    "demand to create spec 2^64-1": lambda r: r.demand(_FULL, Mode.CREATE),
    "demand to create a foreign spec": lambda r: r.demand(42, Mode.CREATE),
    "demand whose epoch is zero": lambda r: r.demand(r.bundle, Mode.READ, epoch=0),
    "demand whose epoch goes back": _epoch_back,
    "demand that holds what it does not": lambda r: r.demand(r.bundle, Mode.READ, held=pack_u64([_FULL])),
    "demand that holds a table of odd length": lambda r: r.demand(r.bundle, Mode.READ, held=b"1234567"),
    "demand that holds another lane's lease": _use_a_held_lane_of_another_name,
    "commit without a lease": lambda r: r.commit([(r.serial + 1, r.bundle, 2)]),
    "commit of serial 2^64-1": lambda r: r.commit([(_FULL, r.bundle, 2)]),
    "commit of another bundle than the lease's": lambda r: r.commit([(r.serial, r.bundle + 1, 2)]),
    "commit of bundle 2^63": lambda r: r.commit([(r.serial, 1 << 63, 2)]),
    "commit of version zero": lambda r: r.commit([(r.serial, r.bundle, 0)]),
    "commit of version 2^63": lambda r: r.commit([(r.serial, r.bundle, 1 << 63)]),
    "commit of version 2^64-1": lambda r: r.commit([(r.serial, r.bundle, _FULL)]),
    "commit of an old version": _commit_old_version,
    "commit twice": lambda r: r.commit([(r.serial, r.bundle, 2)]),
    "commit of a bundle twice in one message": _commit_twice_at_once,
    "commit of a table of odd length": lambda r: r.send(commit=pb.Commit(updated=bytes(8 * 4))),
    "commit that consumes a table of odd length": lambda r: r.send(commit=pb.Commit(consumed=bytes(8 * 3))),
    "commit that consumes without a lease": lambda r: r.commit(consumed=[(r.serial + 1, r.bundle)]),
    "commit that consumes what another lease holds": _two_readers,
    "commit that consumes twice in one message": _consume_twice,
    "done without a lease": lambda r: r.send(done=pb.Done(serials=pack_u64([r.serial + 1]))),
    "done of serial 2^64-1": lambda r: r.send(done=pb.Done(serials=pack_u64([_FULL]))),
    "done twice": _done_twice,
    "done twice in one message": lambda r: r.send(done=pb.Done(serials=pack_u64([r.serial] * 2))),
    "done of a table of odd length": lambda r: r.send(done=pb.Done(serials=bytes(12))),
    "discard of a leased bundle": lambda r: _discard(r, r.bundle),
    "discard of bundle 2^64-1": lambda r: _discard(r, _FULL),
    "discard of a bundle that never was": lambda r: _discard(r, 1 << 40),
    "discard twice in one message": _discard_twice,
    "discard of a table of odd length": lambda r: r.send(discard=pb.Discard(bundles=b"123")),
    "adoption of an unknown spec": lambda r: _adopt(r, spec_id=99),
    "adoption of spec 2^32-1": lambda r: _adopt(r, spec_id=(1 << 32) - 1),
    "adoption from an unknown file": lambda r: _adopt(r, file=8),
    "adoption of a form without tensors": lambda r: _adopt(r, tensors=0),
    "adoption of tensors that overlap": lambda r: _adopt(r, tensors=2),
    "adoption with too few offsets": lambda r: _adopt(r, offsets=b""),
    "adoption with too many offsets": lambda r: _adopt(r, offsets=bytes(16)),
    "adoption with offsets of odd length": lambda r: _adopt(r, offsets=bytes(7)),
    "adoption at 2^63": lambda r: _adopt(r, offsets=pack_u64([1 << 63])),
    "adoption with too few digests": lambda r: _adopt(r, digests=0),
    "adoption with too many digests": lambda r: _adopt(r, digests=16),
    "adoption with digests of odd length": lambda r: _adopt(r, digests=3),
    "adoption twice": _adopt_twice,
    "notice of kind zero": lambda r: _notice(r, kind=0),
    "notice of unknown kind": lambda r: _notice(r, kind=99),
    "notice of negative kind": lambda r: _notice(r, kind=-1),
    "notice counted zero times": lambda r: _notice(r, count=0),
    "notice counted 2^32-1 times": lambda r: _notice(r, count=(1 << 32) - 1),
    "notice counted too often": lambda r: _notice(r, count=MAX_COUNT + 1),
    "notice with an enormous text": lambda r: _notice(r, text=_LONG),
    "notice with a text above the limit": lambda r: _notice(r, text="x" * (MAX_TEXT + 1)),
    "too many notices": _too_many_notices,
    "trace that nobody asked for": lambda r: r.send(trace=pb.Trace(id=1)),
    "trace of another number": lambda r: _trace(r, id=_FULL),
    "trace twice": _trace_twice,
    "trace at no time": lambda r: _trace(r, now_s=float("nan")),
    "trace with rows of odd length": lambda r: _trace(r, spans=pb.Spans(texts=["a"], rows=bytes(61))),
    "trace with too many rows": lambda r: _trace(r, spans=pb.Spans(texts=["a"], rows=bytes(60 * (CAPACITY + 1)))),
    "trace without the texts that it numbers": lambda r: _trace(r, spans=pb.Spans(rows=bytes(60))),
    "trace with more texts than rows": lambda r: _trace(r, spans=pb.Spans(texts=["a"])),
    "trace with an enormous text": lambda r: _trace(r, spans=pb.Spans(texts=[_LONG], rows=bytes(60))),
    "open twice": lambda r: r.send(open=r.hello()),
    "a message without a body": lambda r: r.send(),
}


@pytest.mark.parametrize("name", BREAKS)
def test_ends_the_session_with_a_protocol_error(daemon: Daemon, bystander: Raw, name: str) -> None:
    with raw_session(daemon) as raw:
        raw.settled()
        BREAKS[name](raw)
        assert raw.ended() == "PROTOCOL"
    healthy(daemon)


def test_an_adoption_beyond_the_end_of_its_file_is_refused(daemon: Daemon, bystander: Raw) -> None:
    """The file may have been cut since the client looked: the session goes on."""
    with raw_session(daemon) as raw:
        raw.settled()
        for spec in (2, 3, 4):
            raw.declare(spec_id=spec, nbytes=64, tensors=[pb.TensorSpec(nbytes=64)])
        raw.send_file(0, 64)
        for spec, offset in ((2, 1), (3, 64), (4, 1 << 62)):
            raw.send(adopt=pb.Adopt(spec_id=spec, file=0, offsets=pack_u64([offset]), digests=bytes(8)))
            answer = raw.next().adopted
            assert (answer.spec_id, answer.bundle, answer.code) == (spec, 0, "INVALID_ARGUMENT")
        raw.send(adopt=pb.Adopt(spec_id=2, file=0, offsets=bytes(8), digests=bytes(8)))
        bundle = raw.next().adopted.bundle
        raw.demand(bundle, Mode.READ)
        assert raw.next().refuse.code == "DATA_LOSS", "zero is not the digest of 64 zeros"
    healthy(daemon)


def test_another_jobs_serials_and_bundles_end_the_session(daemon: Daemon, bystander: Raw) -> None:
    for use in (
        lambda r: r.send(done=pb.Done(serials=pack_u64([bystander.serial + 5]))),
        lambda r: r.commit([(r.serial, bystander.bundle, 9)]),
        lambda r: r.commit(consumed=[(r.serial, bystander.bundle)]),
        lambda r: _discard(r, bystander.bundle),
    ):
        with raw_session(daemon) as raw:
            use(raw.settled())
            assert raw.ended() == "PROTOCOL"
    healthy(daemon)


def test_a_demand_of_another_jobs_bundle_is_refused_as_not_found(daemon: Daemon, bystander: Raw) -> None:
    """The same answer as for one that does not exist; the session goes on."""
    with raw_session(daemon) as raw:
        raw.settled()
        for target in (bystander.bundle, _FULL, 1 << 63, 0, _create_blank(raw)):
            raw.demand(target, Mode.READ)
            refuse = raw.next().refuse
            assert refuse.code == "NOT_FOUND", target
        raw.demand(raw.bundle, Mode.READ)
        assert raw.next().grant.bundle == raw.bundle
    healthy(daemon)


def test_a_working_set_beyond_the_budget_is_refused(daemon: Daemon, bystander: Raw) -> None:
    with raw_session(daemon) as raw:
        raw.declare(nbytes=_CAP)
        assert raw.admit().budget_frames == 256
        codes = []
        for _ in range(9):
            raw.demand(1, Mode.CREATE)
            message = raw.next()
            codes.append(message.refuse.code if message.WhichOneof("body") == "refuse" else "granted")
        assert codes == ["granted"] * 8 + ["WORKING_SET_TOO_LARGE"]
    healthy(daemon)


def test_a_floor_beyond_the_arena_is_refused_and_changes_nothing(daemon: Daemon, bystander: Raw) -> None:
    with raw_session(daemon) as raw:
        raw.declare(nbytes=_CAP)
        answer = raw.admit("main", [1] * 100_000)
        assert answer.code == "RESOURCE_EXHAUSTED"
        assert "100000 bundles" in answer.message
        assert raw.admit("main", [1] * 8).code == ""
    healthy(daemon)


# -- the first message


OPENS: dict[str, tuple[Callable[[Raw], pb.ClientMessage], str]] = {
    "no Open but a demand": (lambda r: pb.ClientMessage(demand=pb.Demand(lane="main", epoch=1)), "PROTOCOL"),
    "an empty message": (lambda r: pb.ClientMessage(), "PROTOCOL"),
    "wrong protocol": (lambda r: pb.ClientMessage(open=r.hello(protocol=99)), "PROTOCOL"),
    "protocol 2^32-1": (lambda r: pb.ClientMessage(open=r.hello(protocol=(1 << 32) - 1)), "PROTOCOL"),
    "protocol zero": (lambda r: pb.ClientMessage(open=r.hello(protocol=0)), "PROTOCOL"),
    "no token": (lambda r: pb.ClientMessage(open=r.hello(token=b"")), "PERMISSION_DENIED"),
    "a guessed token": (lambda r: pb.ClientMessage(open=r.hello(token=secrets.token_bytes(16))), "PERMISSION_DENIED"),
    "an enormous token": (lambda r: pb.ClientMessage(open=r.hello(token=bytes(1 << 20))), "PERMISSION_DENIED"),
    "negative DRAM": (lambda r: pb.ClientMessage(open=r.hello(dram_bytes=-1)), "INVALID_ARGUMENT"),
    "DRAM of -2^63": (lambda r: pb.ClientMessage(open=r.hello(dram_bytes=-(1 << 63))), "INVALID_ARGUMENT"),
    "DRAM of 2^62": (lambda r: pb.ClientMessage(open=r.hello(dram_bytes=1 << 62)), "INVALID_ARGUMENT"),
    "DRAM of 2^59": (lambda r: pb.ClientMessage(open=r.hello(dram_bytes=1 << 59)), "RESOURCE_EXHAUSTED"),
    "DRAM of one byte": (lambda r: pb.ClientMessage(open=r.hello(dram_bytes=1)), "INVALID_ARGUMENT"),
    "negative flash": (lambda r: pb.ClientMessage(open=r.hello(flash_bytes=-1)), "INVALID_ARGUMENT"),
    "flash of 2^62": (lambda r: pb.ClientMessage(open=r.hello(flash_bytes=1 << 62)), "INVALID_ARGUMENT"),
    "no job name": (lambda r: pb.ClientMessage(open=r.hello(job="")), "INVALID_ARGUMENT"),
    "an enormous job name": (lambda r: pb.ClientMessage(open=r.hello(job=_LONG)), "INVALID_ARGUMENT"),
    "a job name of 201 emoji": (
        lambda r: pb.ClientMessage(open=r.hello(job="\N{GRINNING FACE}" * 201)),
        "INVALID_ARGUMENT",
    ),
    "a job name with a line break": (lambda r: pb.ClientMessage(open=r.hello(job="a\nb")), "INVALID_ARGUMENT"),
    "another job's name": (lambda r: pb.ClientMessage(open=r.hello(job="bystander")), "INVALID_ARGUMENT"),
}


@pytest.mark.parametrize("name", OPENS)
def test_an_open_is_refused(daemon: Daemon, bystander: Raw, name: str) -> None:
    message, code = OPENS[name]
    before = daemon.stats().sessions_opened
    with raw_session(daemon, opens=False) as raw:
        raw._out.put(message(raw))
        assert raw.ended() == code
    assert daemon.stats().sessions_opened == before
    healthy(daemon)


def test_a_stream_that_ends_before_open_is_refused(daemon: Daemon, bystander: Raw) -> None:
    with raw_session(daemon, opens=False) as raw:
        raw._out.put(None)
        assert raw.ended() == "PROTOCOL"
    healthy(daemon)


def test_a_token_is_good_for_one_session(daemon: Daemon, bystander: Raw) -> None:
    """Neither a second time, nor by another stream while it is in use, nor after its connection has gone."""
    with raw_session(daemon) as raw, raw_session(daemon, opens=False) as thief:
        thief.send(open=thief.hello("thief", token=raw.token))
        assert thief.ended() == "PERMISSION_DENIED"
        raw.settled()
    with raw_session(daemon, opens=False) as late:
        late._side.close()
        within(2, lambda: "" if "left without a session" in daemon.log else "the daemon has not noticed")
        late.send(open=late.hello("late"))
        assert late.ended() == "PERMISSION_DENIED"
    healthy(daemon)


# -- below the messages


GARBAGE = {
    "not protobuf": b"\xff" * 64,
    "a truncated message": pb.ClientMessage(open=pb.Open(job="abcdef")).SerializeToString()[:-3],
    "text that is not UTF-8": b"\x0a\x04\x1a\x02\xff\xfe",
}


@pytest.mark.parametrize("opened", [False, True])
@pytest.mark.parametrize("name", GARBAGE)
def test_bytes_that_are_no_message_end_the_stream(daemon: Daemon, bystander: Raw, name: str, opened: bool) -> None:
    with SideChannel() as side:
        token = side.connect(Path(f"{daemon.socket}.fd"), 5)
        hello = pb.ClientMessage(open=pb.Open(token=token, protocol=codec.PROTOCOL, job="garbage", dram_bytes=1 << 20))
        payloads = [*([hello.SerializeToString()] if opened else []), GARBAGE[name]]
        with grpc.insecure_channel(daemon.endpoint, [("grpc.use_local_subchannel_pool", 1)]) as channel:
            call = channel.stream_stream(
                "/tiermem.rpc.v1.TierMem/Session", request_serializer=bytes, response_deserializer=bytes
            )
            with pytest.raises(grpc.RpcError, match="PROTOCOL: "):
                list(call(iter(payloads), timeout=_CALL_TIMEOUT_S))
    healthy(daemon)


def test_a_message_above_the_limit_ends_the_stream(daemon: Daemon, bystander: Raw) -> None:
    with raw_session(daemon) as raw:
        raw.settled()
        raw.send(discard=pb.Discard(bundles=bytes(codec.MAX_MESSAGE_BYTES + 8)))
        assert "RESOURCE_EXHAUSTED" in raw.ended()
    healthy(daemon)


def test_status_of_a_job_that_does_not_run_is_not_found(daemon: Daemon, bystander: Raw) -> None:
    for job in ("nobody", _LONG, "\N{GRINNING FACE}" * 4096):
        with pytest.raises(grpc.RpcError) as caught:
            bystander.stub.GetStatus(pb.GetStatusRequest(job=job), timeout=5)
        assert isinstance(caught.value, grpc.Call)
        assert caught.value.code() == grpc.StatusCode.NOT_FOUND


def test_a_trace_that_cannot_be_had_is_refused(daemon: Daemon, bystander: Raw) -> None:
    invalid, not_found = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND
    asks = [
        *((pb.GetTraceRequest(job=job), not_found) for job in ("nobody", _LONG, "\N{GRINNING FACE}" * 4096)),
        *((pb.GetTraceRequest(job="bystander", seconds=s), invalid) for s in (-1.0, 86401.0, float("nan"), 1e308)),
    ]
    with raw_session(daemon):
        for ask, code in [*asks, (pb.GetTraceRequest(), invalid)]:  # two jobs run
            with pytest.raises(grpc.RpcError) as caught:
                bystander.stub.GetTrace(ask, timeout=5)
            assert isinstance(caught.value, grpc.Call)
            assert caught.value.code() == code
    healthy(daemon)


def test_a_trainer_that_does_not_answer_is_left_out_of_the_trace(daemon: Daemon, bystander: Raw) -> None:
    """It is waited for half as long as the caller waits. Answers that come late do no harm, and it is not asked without
    end.
    """
    with raw_session(daemon) as raw:
        raw.settled()
        ask = pb.GetTraceRequest(job="raw", seconds=60)
        calls = [raw.stub.GetTrace.future(ask, timeout=3) for _ in range(MAX_UNANSWERED + 1)]
        notes = []
        for call in calls:
            trainer, mine = call.result().processes
            assert (trainer.spans.rows, mine.spans.complete) == (b"", True)
            assert codec.decode_spans(mine.spans).spans, "the demand of `settled`"
            notes += trainer.notes
        assert sum("has not answered within 1." in note for note in notes) == MAX_UNANSWERED
        assert sum(f"owes the answers to {MAX_UNANSWERED}" in note for note in notes) == 1
        for _ in range(MAX_UNANSWERED):
            raw.send(trace=pb.Trace(id=raw.next().ask_trace.id, now_s=1))
        raw.demand(raw.bundle, Mode.READ, held=pack_u64([raw.serial]))
        assert raw.next().grant.bundle == raw.bundle
        call = raw.stub.GetTrace.future(ask, timeout=_CALL_TIMEOUT_S)
        raw.send(trace=pb.Trace(id=raw.next().ask_trace.id, now_s=1))
        assert "its clock differs from the daemon's by -" in call.result().processes[0].notes[0]
    healthy(daemon)


def test_a_session_that_ends_answers_who_asked_for_its_trace(daemon: Daemon, bystander: Raw) -> None:
    with raw_session(daemon) as raw:
        call = raw.stub.GetTrace.future(pb.GetTraceRequest(job="raw", seconds=1), timeout=_CALL_TIMEOUT_S)
        assert raw.next().ask_trace.id
        raw.send(close=pb.Close())
        assert "has ended" in call.result().processes[0].notes[0]
    healthy(daemon)


def test_declarations_are_bounded_over_all_messages(daemon: Daemon, bystander: Raw) -> None:
    """However they are spread."""
    with raw_session(daemon) as raw:
        for first in range(0, MAX_SPECS + 1, 1 << 15):
            numbers = range(first, first + (1 << 15))
            raw.send(declare=pb.Declare(specs=[pb.Spec(spec_id=n, kind=pb.KIND_PARAM, nbytes=64) for n in numbers]))
        assert raw.ended() == "PROTOCOL"
    healthy(daemon)
