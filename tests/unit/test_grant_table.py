from __future__ import annotations

import pytest

from tiermem.bundle import Mode
from tiermem.errors import Code, DaemonUnavailable, DataLoss, ProtocolError
from tiermem.grants.messages import Commit, Demand, Discard, Done, Grant, Refuse
from tiermem.grants.table import GrantTable, Lease

READ, UPDATE, CREATE, CONSUME = Mode.READ, Mode.UPDATE, Mode.CREATE, Mode.CONSUME


@pytest.fixture
def table() -> GrantTable:
    return GrantTable(["main", "worker"])


def grant(serial: int, answers: int, bundle: int = 1, mode: Mode = READ, lane: str = "main", version: int = 3) -> Grant:
    return Grant(serial, lane, answers, bundle, mode, version, ((0, 1),), answers)


def lease(table: GrantTable, serial: int, bundle: int = 1, mode: Mode = READ, lane: str = "main") -> Lease:
    waiter = table.demand(lane, bundle, mode)
    assert table.receive(grant(serial, waiter.demand.epoch, bundle, mode, lane)) is waiter
    table.outbox.clear()
    assert waiter.lease is not None
    return waiter.lease


def test_a_demand_waits_for_its_answer(table: GrantTable) -> None:
    waiter = table.demand("main", 5, READ)
    assert waiter.open
    assert list(table.outbox) == [Demand("main", 1, frozenset(), 5, READ)]
    answer = grant(9, 1, bundle=5)
    assert table.receive(answer) is waiter
    assert not waiter.open
    assert waiter.lease == Lease(answer, READ)
    assert table.leases == 1


def test_each_demand_moves_its_lanes_epoch_on(table: GrantTable) -> None:
    epochs = [table.demand(lane, 1, READ).demand.epoch for lane in ("main", "main", "worker", "main")]
    assert epochs == [1, 2, 1, 3]


def test_held_names_every_lease_of_the_lane_and_no_other(table: GrantTable) -> None:
    lease(table, 10, 1)
    lease(table, 11, 2)
    lease(table, 12, 3, lane="worker")
    assert table.demand("main", 4, READ).demand.held == {10, 11}
    assert table.demand("worker", 4, READ).demand.held == {12}
    table.done(10)
    table.commit([], [11])
    assert table.demand("main", 4, READ).demand.held == frozenset()


def test_an_answer_is_taken_in_any_epoch(table: GrantTable) -> None:
    """C1: another thread's demand does not void it."""
    first, second = table.demand("main", 1, READ), table.demand("main", 2, READ)
    table.receive(grant(21, 2, bundle=2))
    assert first.open
    table.receive(grant(20, 1))
    assert [waiter.lease is not None for waiter in (first, second)] == [True, True]


def test_an_answer_is_a_lease_from_its_delivery(table: GrantTable) -> None:
    """C10: before the waiting thread has woken, another thread's demand names it."""
    table.demand("main", 1, READ)
    table.receive(grant(20, 1))
    assert table.demand("main", 2, READ).demand.held == {20}


def test_a_refusal_ends_the_wait_with_the_daemons_error(table: GrantTable) -> None:
    waiter = table.demand("main", 1, READ)
    assert table.receive(Refuse("main", 1, Code.DATA_LOSS, "4 KiB of layer 3 are gone")) is waiter
    assert not waiter.open
    assert type(waiter.error) is DataLoss
    assert str(waiter.error) == "4 KiB of layer 3 are gone"
    assert table.leases == 0


def test_answers_to_nothing_are_refused(table: GrantTable) -> None:
    lease(table, 7)
    for answer in (grant(8, 1), grant(8, 2), grant(8, 0), Refuse("main", 1, Code.INTERNAL, ""), grant(8, 1, lane="?")):
        with pytest.raises(ProtocolError, match="answers no open demand"):
            table.receive(answer)
    assert table.leases == 1


@pytest.mark.parametrize(
    ("wanted", "granted"), [(w, g) for w in Mode for g in Mode if not g.covers(w)], ids=lambda mode: mode.name
)
def test_a_grant_for_too_little_is_refused(table: GrantTable, wanted: Mode, granted: Mode) -> None:
    waiter = table.demand("main", 1, wanted)
    with pytest.raises(ProtocolError, match="does not cover"):
        table.receive(grant(1, 1, mode=granted))
    assert waiter.open
    assert table.leases == 0


def test_a_grant_of_another_bundle_is_refused(table: GrantTable) -> None:
    waiter = table.demand("main", 1, READ)
    with pytest.raises(ProtocolError, match="another bundle"):
        table.receive(grant(1, 1, bundle=2))
    assert waiter.open
    assert table.fail(DaemonUnavailable("the session is over")) == [waiter]


def test_a_created_bundle_has_a_number_of_its_own(table: GrantTable) -> None:
    waiter = table.demand("main", 3, CREATE)
    table.receive(grant(1, 1, bundle=444, mode=CREATE))
    assert waiter.lease is not None
    assert waiter.lease.grant.bundle == 444


def test_a_commit_is_one_message_and_ends_the_right_to_write(table: GrantTable) -> None:
    written, created, used_up = lease(table, 1, 1, UPDATE), lease(table, 2, 2, CREATE), lease(table, 3, 3, CONSUME)
    table.commit([(1, 4), (2, 5)], [3])
    assert list(table.outbox) == [Commit(((1, 1, 4), (2, 2, 5)), ((3, 3),))]
    assert (written.mode, created.mode) == (READ, READ)
    assert (written.grant.version, created.grant.version) == (4, 5)
    assert table.leases == 2
    assert used_up.grant.bundle == 3
    with pytest.raises(ProtocolError, match="only read"):
        table.commit([(1, 5)])


def test_a_commit_that_is_refused_changes_nothing(table: GrantTable) -> None:
    written = lease(table, 1, 1, UPDATE)
    lease(table, 2, 2, READ)
    with pytest.raises(ProtocolError, match="only read"):
        table.commit([(1, 4), (2, 4)])
    assert (written.mode, written.grant.version) == (UPDATE, 3)
    assert not table.outbox


def test_done_is_said_once(table: GrantTable) -> None:
    lease(table, 1)
    table.done(1)
    assert list(table.outbox) == [Done(1)]
    with pytest.raises(KeyError):
        table.done(1)
    assert list(table.outbox) == [Done(1)]


def test_messages_keep_the_order_in_which_they_were_decided(table: GrantTable) -> None:
    """C4: a demand does not overtake the commit before it."""
    lease(table, 1, 1, UPDATE)
    table.commit([(1, 4)])
    table.done(1)
    table.demand("main", 2, READ)
    table.discard([1])
    assert [type(message) for message in table.outbox] == [Commit, Done, Demand, Discard]


def test_leased_bundles_are_not_discarded(table: GrantTable) -> None:
    lease(table, 1, 8)
    with pytest.raises(ProtocolError, match=r"\[8\]"):
        table.discard([7, 8])
    assert not table.outbox
    table.discard([7])
    assert list(table.outbox) == [Discard((7,))]


def test_every_wait_ends_when_the_session_does(table: GrantTable) -> None:
    waiters = [table.demand("main", 1, READ), table.demand("worker", 1, READ)]
    error = DaemonUnavailable("gone")
    assert table.fail(error) == waiters
    assert [waiter.error for waiter in waiters] == [error, error]
    assert table.fail(error) == []
    with pytest.raises(ProtocolError):
        table.receive(grant(1, 1))
