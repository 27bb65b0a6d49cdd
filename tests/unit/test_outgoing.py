"""Messages that wait together travel together, in their order; those that must travel alone do."""

from __future__ import annotations

import threading

import pytest

from tiermem.errors import ProtocolError
from tiermem.grants.messages import Accessed, ClientBody, Commit, Discard, Done, Used
from tiermem.plan import Access, Phase
from tiermem.rpc import grants
from tiermem.rpc.fields import pack_u64
from tiermem.rpc.v1 import tiermem_pb2 as pb
from tiermem_client.outgoing import ClientLock, Outgoing


def done(serial: int) -> pb.ClientMessage:
    return pb.ClientMessage(done=pb.Done(serials=pack_u64([serial])))


def test_what_waits_is_one_batch_in_order() -> None:
    outgoing = Outgoing()
    for serial in range(5):
        outgoing.put(done(serial))
    outgoing.close()
    [batch] = outgoing
    assert [grants.decode_client(message) for message in batch.batch.messages] == [Done((n,)) for n in range(5)]
    assert list(grants.messages_of(batch.batch)) == list(batch.batch.messages)


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
    for serial in range(3 * grants.MAX_BATCH + 1):
        outgoing.put(done(serial))
    outgoing.close()
    sent = list(outgoing)
    assert [len(m.batch.messages) or 1 for m in sent] == [grants.MAX_BATCH] * 3 + [1]


@pytest.mark.parametrize(
    "inner",
    [
        [],
        [pb.ClientMessage()],
        [pb.ClientMessage(open=pb.Open())],
        [done(1), pb.ClientMessage(close=pb.Close())],
        [pb.ClientMessage(batch=pb.ClientBatch(messages=[done(1)]))],
        [done(1)] * (grants.MAX_BATCH + 1),
    ],
    ids=["empty", "no body", "open", "close", "a batch", "too many"],
)
def test_what_no_client_sends_is_refused(inner: list[pb.ClientMessage]) -> None:
    with pytest.raises(ProtocolError, match="batch"):
        grants.messages_of(pb.ClientBatch(messages=inner))


ACCESS = Accessed("main", Access("layers.1", Phase.FORWARD))


def decoded(message: pb.ClientMessage) -> list[ClientBody]:
    return [grants.decode_client(m) for m in (message.batch.messages or (message,))]


def test_values_are_encoded_in_their_order_and_neighbouring_uses_and_ends_are_one() -> None:
    outgoing = Outgoing()
    outgoing.put(Used((1,)), Used((2,)), ACCESS, Used((3,)))
    outgoing.put(done(7), Used((4,)))
    outgoing.put(Used((5,)), Commit(((4, 9, 2),)), Done((4,)), Done((6,)))
    outgoing.close()
    [batch] = outgoing
    assert decoded(batch) == [
        Used((1, 2)),
        ACCESS,
        Used((3,)),
        Done((7,)),
        Used((4, 5)),
        Commit(((4, 9, 2),)),
        Done((4, 6)),
    ]
    assert outgoing.sent == 1


def test_nothing_is_lost_where_more_waits_than_a_batch_takes() -> None:
    outgoing = Outgoing()
    discards = [Discard((n,)) for n in range(grants.MAX_BATCH + 5)]
    outgoing.put(*discards)
    outgoing.put(pb.ClientMessage(close=pb.Close()))
    outgoing.close()
    *batches, last = outgoing
    assert [one for batch in batches for one in decoded(batch)] == discards
    assert last.WhichOneof("body") == "close"


def test_what_does_not_press_waits_for_what_does() -> None:
    outgoing = Outgoing(linger_s=60.0)
    outgoing.put(Done((1,)), pressing=False)
    outgoing.put(ACCESS, pressing=False)
    outgoing.put(Used((2,)))
    assert decoded(next(iter(outgoing))) == [Done((1,)), ACCESS, Used((2,))]


def test_what_does_not_press_is_sent_after_a_while_and_before_an_end() -> None:
    outgoing = Outgoing(linger_s=0.001)
    sent = iter(outgoing)
    outgoing.put(ACCESS, pressing=False)
    outgoing.put(Done((1,)), pressing=False)
    assert decoded(next(sent)) == [ACCESS, Done((1,))]
    outgoing.put(Done((2,)), pressing=False)
    assert decoded(next(sent)) == [Done((2,))]
    outgoing = Outgoing(linger_s=60.0)
    outgoing.put(Done((3,)), pressing=False)
    outgoing.close()
    assert [decoded(message) for message in outgoing] == [[Done((3,))]]


def test_a_lock_hands_over_once_at_the_end_of_the_outermost_section() -> None:
    calls: list[int] = []
    lock = ClientLock(lambda: calls.append(1))
    with lock:
        with lock:
            pass
        assert calls == []
    assert calls == [1]
    with pytest.raises(ValueError, match="mine"), lock:
        raise ValueError("mine")
    assert calls == [1, 1], "what was decided before an error was decided all the same"


def test_a_lock_hands_over_before_a_wait_in_any_depth() -> None:
    calls: list[str] = []
    lock = ClientLock(lambda: calls.append(threading.current_thread().name))

    def answer() -> None:
        with lock:
            lock.notify_all()

    with lock, lock:
        other = threading.Thread(target=answer, name="answer")
        other.start()
        assert lock.wait(20.0)
        assert calls == [threading.current_thread().name, "answer"]
    other.join()
    assert len(calls) == 3
    with lock:  # the depth is right again
        pass
    assert len(calls) == 4
