from __future__ import annotations

import pytest

from tiermem.bundle import Mode
from tiermem.errors import Code, DaemonUnavailable, DataLoss, ProtocolError
from tiermem.grants.messages import (
    Accessed,
    Commit,
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
from tiermem.grants.table import GrantTable, Lease
from tiermem.plan import Access, Phase

READ, UPDATE, CREATE, CONSUME = Mode.READ, Mode.UPDATE, Mode.CREATE, Mode.CONSUME
SPEC = 50  # the form of every bundle here


@pytest.fixture
def table() -> GrantTable:
    return GrantTable(["main", "worker"])


def grant(serial: int, answers: int, bundle: int = 1, mode: Mode = READ, lane: str = "main", version: int = 3) -> Grant:
    return Grant(serial, lane, answers, SPEC, bundle, mode, version, ((0, 1),), answers)


def push(serial: int, epoch: int, bundle: int = 1, mode: Mode = READ, lane: str = "main", version: int = 3) -> Grant:
    return Grant(serial, lane, epoch, SPEC, bundle, mode, version, ((0, 1),), 0)


def lease(table: GrantTable, serial: int, bundle: int = 1, mode: Mode = READ, lane: str = "main") -> Lease:
    waiter = table.demand(lane, SPEC if mode == CREATE else bundle, mode)
    assert table.receive(grant(serial, waiter.demand.epoch, bundle, mode, lane)) is waiter
    table.outbox.clear()
    assert waiter.lease is not None
    return waiter.lease


def take(table: GrantTable, lane: str, target: int, mode: Mode) -> Lease | None:
    [taken] = table.take(lane, [target], mode)
    return taken


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
    for answer in (grant(8, 1), grant(8, 2), Refuse("main", 1, Code.INTERNAL, ""), grant(8, 1, lane="?")):
        with pytest.raises(ProtocolError, match="answers no open demand"):
            table.receive(answer)
    assert table.leases == 1


@pytest.mark.parametrize(
    ("wanted", "granted"), [(w, g) for w in Mode for g in Mode if not g.covers(w)], ids=lambda mode: mode.name
)
def test_a_grant_for_too_little_is_refused(table: GrantTable, wanted: Mode, granted: Mode) -> None:
    waiter = table.demand("main", SPEC if wanted == CREATE else 1, wanted)
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
    waiter = table.demand("main", SPEC, CREATE)
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
    assert list(table.outbox) == [Done((1,))]
    with pytest.raises(KeyError):
        table.done(1)
    assert list(table.outbox) == [Done((1,))]


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


def test_a_bundle_takes_the_place_of_another_unless_one_is_leased(table: GrantTable) -> None:
    lease(table, 1, 8)
    for pair in ((7, 8), (8, 7)):
        with pytest.raises(ProtocolError, match=r"\[8\]"):
            table.supersede([(5, 6), pair])
    assert not table.outbox
    table.supersede([(5, 6)])
    assert list(table.outbox) == [Supersede(((5, 6),))]


def test_every_wait_ends_when_the_session_does(table: GrantTable) -> None:
    waiters = [table.demand("main", 1, READ), table.demand("worker", 1, READ)]
    error = DaemonUnavailable("gone")
    assert table.fail(error) == waiters
    assert [waiter.error for waiter in waiters] == [error, error]
    assert table.fail(error) == []
    with pytest.raises(ProtocolError):
        table.receive(grant(1, 1))


# -- grants that were pushed ahead of their use


@pytest.fixture
def pushed(table: GrantTable) -> GrantTable:
    """A table that has heard of bundle 1 (version 1), and whose lane is in epoch 0."""
    table.adopted(1)
    return table


def test_a_pushed_grant_becomes_a_lease_without_a_demand(pushed: GrantTable) -> None:
    assert pushed.receive(push(7, 0)) is None
    assert pushed.leases == 0
    taken = take(pushed, "main", 1, READ)
    assert taken == Lease(push(7, 0), READ)
    assert list(pushed.outbox) == [Used((7,))]
    assert take(pushed, "main", 1, READ) is None, "it was used twice"
    assert pushed.demand("main", 2, READ).demand.held == {7}


def test_a_pushed_grant_serves_its_lane_bundle_and_mode_only(pushed: GrantTable) -> None:
    pushed.receive(push(7, 0))
    for lane, bundle, mode in (("worker", 1, READ), ("main", 2, READ), ("main", 1, UPDATE), ("main", SPEC, CREATE)):
        assert take(pushed, lane, bundle, mode) is None
    pushed.receive(push(8, 0, mode=UPDATE))
    taken = take(pushed, "main", 1, UPDATE)
    assert taken is not None
    assert taken.grant.serial == 8
    assert pushed.counts.used == 1


def test_a_pushed_blank_bundle_serves_a_create_of_its_form(pushed: GrantTable) -> None:
    pushed.receive(push(7, 0, 444, CREATE, version=0))
    assert take(pushed, "main", 444, UPDATE) is None
    assert take(pushed, "main", 444, CREATE) is None, "that is a bundle, not a form"
    taken = take(pushed, "main", SPEC, CREATE)
    assert taken is not None
    assert taken.grant.bundle == 444
    pushed.commit([(7, 1)])
    pushed.receive(push(8, 0, 444, version=1))
    assert take(pushed, "main", 444, READ), "the bundle lives since it was created"


def test_a_set_is_taken_with_one_message_and_what_is_missing_is_told(pushed: GrantTable) -> None:
    for bundle in (2, 3):
        pushed.adopted(bundle)
    for serial, bundle, mode in ((7, 1, READ), (8, 2, UPDATE), (9, 3, READ)):
        pushed.receive(push(serial, 0, bundle, mode))
    taken = pushed.take("main", [3, 4, 1], READ)
    assert [None if lease is None else lease.grant.serial for lease in taken] == [9, None, 7]
    assert list(pushed.outbox) == [Used((9, 7))]
    assert pushed.unused == {8}
    assert pushed.take("main", [4], READ) == [None]
    assert len(pushed.outbox) == 1, "nothing was used, and it was said"


def test_the_grant_that_suffices_is_taken_of_several_for_a_bundle(pushed: GrantTable) -> None:
    for serial, mode in ((7, READ), (8, UPDATE), (9, READ)):
        pushed.receive(push(serial, 0, mode=mode))
    taken = take(pushed, "main", 1, UPDATE)
    assert taken is not None
    assert taken.grant.serial == 8
    assert pushed.unused == {7, 9}


def test_what_presses_is_who_waits_and_what_has_come_together(pushed: GrantTable) -> None:
    def presses() -> bool:
        return pushed.presses("main", 4)

    for bundle in range(1, 21):
        pushed.adopted(bundle)
        pushed.receive(push(100 + bundle, 0, bundle))
    assert not presses()
    pushed.take("main", range(1, 10), READ)
    assert not presses(), "11 of 20 grants are left"
    pushed.take("main", [10], READ)
    assert presses(), "half have been used"
    pushed.told()
    pushed.done(101, 102, 103)
    assert not presses(), "3 frames"
    pushed.take("main", [11], READ)
    assert not presses(), "9 are left"
    pushed.done(104)
    assert presses(), "4 frames"
    pushed.told()
    assert not presses()
    pushed.take("main", [12], READ)
    assert presses(), "few are left"
    pushed.told()
    assert not presses()
    waiter = pushed.demand("main", 9, READ)
    assert presses(), "somebody waits"
    pushed.told()
    pushed.receive(grant(30, waiter.demand.epoch, 9))
    pushed.accessed("main", Access("layers.1", Phase.FORWARD))
    assert not presses()
    pushed.receive(Surrender("main"))
    assert presses(), "it has to be answered"


def test_leases_end_together_with_one_message(table: GrantTable) -> None:
    for serial in (1, 2, 3):
        lease(table, serial, serial)
    table.done(3, 1)
    assert list(table.outbox) == [Done((3, 1))]
    assert table.demand("main", 4, READ).demand.held == {2}


def test_a_demand_ends_the_unused_grants_of_its_lane(pushed: GrantTable) -> None:
    pushed.receive(push(7, 0))
    pushed.receive(push(8, 0, lane="worker"))
    pushed.demand("main", 2, READ)
    assert take(pushed, "main", 1, READ) is None
    assert take(pushed, "worker", 1, READ)
    assert pushed.counts.voided == 1


def test_a_grant_of_an_epoch_that_is_over_is_dropped(pushed: GrantTable) -> None:
    pushed.demand("main", 2, READ)
    pushed.receive(push(7, 0))
    assert take(pushed, "main", 1, READ) is None
    pushed.receive(push(8, 1))
    assert take(pushed, "main", 1, READ)
    assert (pushed.counts.received, pushed.counts.late) == (2, 1)


def test_a_surrender_is_answered_by_who_receives_it(pushed: GrantTable) -> None:
    lease(pushed, 20, 2)
    pushed.receive(push(7, 1))
    assert pushed.receive(Surrender("main")) is None
    assert list(pushed.outbox) == [Void("main", 2, frozenset({20}))]
    assert take(pushed, "main", 1, READ) is None
    assert pushed.leases == 1


def test_a_surrender_leaves_open_demands_alone(pushed: GrantTable) -> None:
    waiter = pushed.demand("main", 1, READ)
    pushed.receive(Surrender("main"))
    assert pushed.receive(grant(20, 1)) is waiter
    assert waiter.lease is not None


def test_unused_grants_end_with_their_bundle(pushed: GrantTable) -> None:
    """Of any lane, and those that are on their way too."""
    lease(pushed, 20, 2, CONSUME)
    for serial, bundle, lane in ((7, 1, "main"), (8, 2, "worker")):
        pushed.receive(push(serial, pushed.demand(lane, 9, READ).demand.epoch, bundle, lane=lane))
    pushed.discard([1])
    pushed.commit([], [20])
    assert take(pushed, "main", 1, READ) is None
    assert take(pushed, "worker", 2, READ) is None
    pushed.receive(push(9, 2))
    assert take(pushed, "main", 1, READ) is None
    assert (pushed.counts.voided, pushed.counts.late) == (2, 1)


def test_a_lease_knows_the_newest_version_where_a_commit_has_overtaken_its_grant(pushed: GrantTable) -> None:
    """The frames hold the newest bytes whatever the grant says, and the next commit must be newer than them."""
    writing = lease(pushed, 20, 1, UPDATE)
    pushed.receive(push(7, 1, 1, UPDATE, version=3))
    pushed.commit([(20, writing.grant.version + 1)])
    pushed.done(20)
    taken = take(pushed, "main", 1, UPDATE)
    assert taken is not None
    assert taken.grant.version == 4


def test_absurd_pushes_are_refused(pushed: GrantTable) -> None:
    for message, match in (
        (push(7, 0, lane="?"), "unknown lane"),
        (push(7, 1), "has not begun"),
        (Surrender("?"), "unknown lane"),
    ):
        with pytest.raises(ProtocolError, match=match):
            pushed.receive(message)
    assert not pushed.outbox


def test_an_access_is_said_in_order(pushed: GrantTable) -> None:
    access = Access("layers.1", Phase.FORWARD)
    pushed.accessed("main", access)
    pushed.demand("main", 1, READ)
    assert list(pushed.outbox) == [Accessed("main", access), Demand("main", 1, frozenset(), 1, READ)]


def test_nothing_can_be_taken_when_the_session_is_over(pushed: GrantTable) -> None:
    pushed.receive(push(7, 0))
    pushed.fail(DaemonUnavailable("gone"))
    assert take(pushed, "main", 1, READ) is None
