"""Messages that wait together travel together, in their order; those that must travel alone do."""

from __future__ import annotations

import pytest

from tiermem.errors import ProtocolError
from tiermem.rpc import codec
from tiermem.rpc.v1 import tiermem_pb2 as pb
from tiermem_client.outgoing import Outgoing


def done(serial: int) -> pb.ClientMessage:
    return pb.ClientMessage(done=pb.Done(serial=serial))


def test_what_waits_is_one_batch_in_order() -> None:
    outgoing = Outgoing()
    for serial in range(5):
        outgoing.put(done(serial))
    outgoing.close()
    [batch] = outgoing
    assert [message.done.serial for message in batch.batch.messages] == [0, 1, 2, 3, 4]
    assert list(codec.messages_of(batch.batch)) == list(batch.batch.messages)


def test_a_single_message_is_itself() -> None:
    outgoing = Outgoing()
    outgoing.put(done(7))
    outgoing.close()
    assert list(outgoing) == [done(7)]


@pytest.mark.parametrize(
    "alone",
    [
        pb.ClientMessage(open=pb.Open(job="a")),
        pb.ClientMessage(close=pb.Close()),
        pb.ClientMessage(declare=pb.Declare()),
        pb.ClientMessage(adopt=pb.Adopt()),
    ],
    ids=lambda message: message.WhichOneof("body"),
)
def test_some_travel_alone(alone: pb.ClientMessage) -> None:
    outgoing = Outgoing()
    for message in (done(1), done(2), alone, done(3), alone, alone):
        outgoing.put(message)
    outgoing.close()
    sent = list(outgoing)
    assert [m.WhichOneof("body") for m in sent] == ["batch", *[alone.WhichOneof("body")], "done"] + 2 * [
        alone.WhichOneof("body")
    ]


def test_no_batch_is_larger_than_the_daemon_takes() -> None:
    outgoing = Outgoing()
    for serial in range(3 * codec.MAX_BATCH + 1):
        outgoing.put(done(serial))
    outgoing.close()
    sent = list(outgoing)
    assert [len(m.batch.messages) or 1 for m in sent] == [codec.MAX_BATCH] * 3 + [1]


@pytest.mark.parametrize(
    "inner",
    [
        [],
        [pb.ClientMessage()],
        [pb.ClientMessage(open=pb.Open())],
        [done(1), pb.ClientMessage(close=pb.Close())],
        [pb.ClientMessage(batch=pb.ClientBatch(messages=[done(1)]))],
        [done(1)] * (codec.MAX_BATCH + 1),
    ],
    ids=["empty", "no body", "open", "close", "a batch", "too many"],
)
def test_what_no_client_sends_is_refused(inner: list[pb.ClientMessage]) -> None:
    with pytest.raises(ProtocolError, match="batch"):
        codec.messages_of(pb.ClientBatch(messages=inner))
