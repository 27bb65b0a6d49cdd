"""The daemon's end of the grant protocol: failures, ends of bundles and sessions, absurd messages, admission."""

from __future__ import annotations

import copy

import pytest

from tiermem.bundle import BundleSpec, Kind
from tiermem.errors import Code, DataLoss, ProtocolError, ResourceExhausted, TierFull, TierIOError
from tiermem.grants.messages import Commit, Demand, Discard, Done, Supersede
from tiermem.residency import State
from tiermem.testing.ledger_driver import CONSUME, CREATE, ONE, READ, THREE, TWO, UPDATE, Ledger, writing_back


@pytest.fixture
def ledger() -> Ledger:
    return Ledger()


# -- failures of transfers


def test_a_failed_load_refuses_who_waits_and_keeps_the_flash_copy(ledger: Ledger) -> None:
    bundle = ledger.make_in_flash(TWO)
    epochs = [ledger.demand(bundle), ledger.demand(bundle, UPDATE)]
    ledger.act(ledger.machine.load_failed(bundle, DataLoss("2 bytes differ")))
    for epoch in epochs:
        assert (ledger.refused(epoch).code, ledger.refused(epoch).message) == (Code.DATA_LOSS, "2 bytes differ")
    assert ledger.state(bundle) == State.FLASH
    ledger.loads.clear()
    ledger.demand(bundle)
    assert ledger.loads == [bundle]


def test_frames_of_a_failed_load_go_to_who_waits_for_room() -> None:
    ledger = Ledger(frames=4)
    bundle = ledger.make_in_flash(THREE)
    ledger.demand(bundle)
    waiting = ledger.demand(ONE, CREATE)
    assert ledger.granted(waiting)
    ledger.act(ledger.machine.load_failed(bundle, TierIOError(5, "EIO")))
    assert ledger.frames.free_frames == 3


def test_a_failed_write_refuses_who_waits_for_room_and_keeps_the_bytes() -> None:
    ledger, bundle, epoch = writing_back()
    ledger.act(ledger.machine.write_failed(bundle, TierFull("/flash is full: 3 bytes")))
    refusal = ledger.refused(epoch)
    assert refusal.code == Code.TIER_FULL
    for part in ("layers.2", "/flash is full: 3 bytes"):
        assert part in refusal.message
    assert ledger.state(bundle) == State.DIRTY
    assert ledger.granted(ledger.demand(bundle)).version == 1
    assert set(ledger.machine.bundles) == {bundle}, "what was to be created is forgotten"


def test_a_failed_write_lets_a_waiting_update_go_on() -> None:
    ledger = Ledger(frames=4)
    bundle, other = ledger.make(ONE), ledger.make(ONE)
    room, update = ledger.demand(THREE, CREATE), ledger.demand(bundle, UPDATE)
    assert ledger.answer(update) is None
    ledger.act(ledger.machine.write_failed(bundle, TierIOError(5, "EIO")))
    assert ledger.granted(update).version == 1
    assert ledger.refused(room).code == Code.IO_ERROR
    assert ledger.state(bundle) == State.DIRTY
    assert ledger.state(other) == State.WRITING, "which took the place of the one that was asked for"


def test_after_a_failed_write_the_next_demand_tries_again() -> None:
    ledger, bundle, _ = writing_back()
    ledger.act(ledger.machine.write_failed(bundle, TierIOError(5, "EIO")))
    ledger.writes.clear()
    epoch = ledger.demand(TWO, CREATE)
    assert ledger.writes == [bundle]
    ledger.written(bundle)
    assert ledger.granted(epoch)


# -- ends


def test_a_blank_bundle_that_nobody_wrote_is_gone(ledger: Ledger) -> None:
    grant = ledger.lease(THREE, CREATE)
    ledger.done(grant)
    assert not ledger.machine.bundles
    assert ledger.frames.free_frames == 4
    assert ledger.refused(ledger.demand(grant.bundle)).code == Code.NOT_FOUND


def test_an_update_that_wrote_nothing_ends_without_a_trace(ledger: Ledger) -> None:
    bundle = ledger.make(ONE)
    ledger.done(ledger.lease(bundle, UPDATE))
    assert (ledger.state(bundle), ledger.machine.bundles[bundle].version) == (State.DIRTY, 1)


def test_a_commit_makes_the_newest_version_and_ends_the_write_right(ledger: Ledger) -> None:
    grant = ledger.lease(ledger.make(ONE), UPDATE)
    ledger.commit(grant, 9)
    assert ledger.machine.bundles[grant.bundle].version == 9
    assert ledger.machine.pins.granted[grant.serial].mode == READ
    ledger.refuses(Commit(((grant.serial, grant.bundle, 10),)), "which is for READ")


def test_a_consumed_bundle_is_gone_with_its_flash_copy(ledger: Ledger) -> None:
    bundle = ledger.make_in_flash(TWO)
    epoch = ledger.demand(bundle, CONSUME)
    ledger.loaded(bundle)
    ledger.freed.clear()
    ledger.receive(Commit((), ((ledger.granted(epoch).serial, bundle),)))
    assert bundle not in ledger.machine.bundles
    assert (ledger.freed, ledger.frames.free_frames) == ([bundle], 4)
    assert not ledger.machine.pins.granted


def test_update_and_consume_are_one_transaction(ledger: Ledger) -> None:
    written, used = ledger.lease(ledger.make(ONE), UPDATE), ledger.lease(ledger.make(ONE), CONSUME)
    before = ledger.machine.commits
    ledger.receive(Commit(((written.serial, written.bundle, 2),), ((used.serial, used.bundle),)))
    assert ledger.machine.commits == before + 1
    assert ledger.machine.bundles[written.bundle].version == 2
    assert used.bundle not in ledger.machine.bundles


def test_discarded_bundles_are_gone(ledger: Ledger) -> None:
    bundles = (ledger.make(ONE), ledger.make(ONE))
    ledger.freed.clear()
    ledger.receive(Discard(bundles))
    assert not ledger.machine.bundles
    assert ledger.freed == list(bundles)
    assert ledger.frames.free_frames == 4


def test_a_bundle_discarded_during_its_write_back_is_doomed() -> None:
    ledger, bundle, epoch = writing_back()
    ledger.freed.clear()
    ledger.receive(Discard((bundle,)))
    assert ledger.state(bundle) == State.DOOMED
    assert ledger.answer(epoch) is None, "frames in transfer were given away"
    assert not ledger.freed
    assert ledger.refused(ledger.demand(bundle)).code == Code.NOT_FOUND
    ledger.refuses(Discard((bundle,)), "does not exist")
    ledger.written(bundle)
    assert bundle not in ledger.machine.bundles
    assert ledger.freed == [bundle]
    assert ledger.granted(epoch)


@pytest.mark.parametrize("ends_well", [True, False])
def test_a_doomed_bundle_is_freed_however_its_write_back_ends(ends_well: bool) -> None:
    ledger, bundle, epoch = writing_back()
    ledger.receive(Discard((bundle,)))
    m = ledger.machine
    ledger.act(m.written(bundle) if ends_well else m.write_failed(bundle, TierIOError(5, "EIO")))
    assert bundle not in m.bundles
    assert ledger.granted(epoch), "nobody is told of an error that does not matter"


@pytest.mark.parametrize("ends_well", [True, False])
def test_the_end_of_a_session_waits_for_its_loads(ledger: Ledger, ends_well: bool) -> None:
    """Exit with transfers in flight: their frames are freed when they have ended, everything else at once."""
    bundle, other = ledger.make_in_flash(TWO), ledger.make(ONE)
    ledger.demand(bundle)
    grant = ledger.lease(other, UPDATE)
    assert ledger.loads == [bundle]
    ledger.freed.clear()
    ledger.sent.clear()
    m = ledger.machine
    ledger.act(m.exit())
    assert (set(m.bundles), ledger.state(bundle)) == ({bundle}, State.DOOMED)
    assert not m.pins.granted
    assert not m.pins.open
    assert not m.drained
    assert ledger.freed == [other]
    ledger.act(m.loaded(bundle) if ends_well else m.load_failed(bundle, TierIOError(5, "EIO")))
    assert m.drained
    assert not m.bundles
    assert ledger.freed == [other, bundle]
    assert ledger.frames.free_frames == 4
    assert not ledger.sent
    assert grant.serial not in m.pins.granted


def test_the_end_of_a_session_waits_for_its_write_backs() -> None:
    ledger, bundle, epoch = writing_back()
    ledger.act(ledger.machine.exit())
    assert not ledger.machine.drained
    ledger.written(bundle)
    assert ledger.machine.drained
    assert not ledger.machine.bundles
    assert ledger.answer(epoch) is None


# -- messages that no correct client sends


def test_absurd_demands_are_refused_without_a_trace(ledger: Ledger) -> None:
    bundle = ledger.make(ONE)
    grant = ledger.lease(bundle)
    none: frozenset[int] = frozenset()
    ledger.refuses(Demand("worker", 9, none, bundle, READ), "'worker' was never admitted")
    ledger.refuses(Demand("main", ledger.epoch, none, bundle, READ), "is not newer")
    ledger.refuses(Demand("main", 0, none, bundle, READ), "epoch 0")
    ledger.refuses(Demand("main", 9, frozenset({grant.serial, 2**63}), bundle, READ), f"grant {2**63}")
    ledger.refuses(Demand("main", 9, none, 77, CREATE), "spec 77")


def test_a_lane_does_not_hold_the_grants_of_another(ledger: Ledger) -> None:
    grant = ledger.lease(ledger.make(ONE))
    ledger.machine.admit("worker", [])
    ledger.refuses(Demand("worker", 1, frozenset({grant.serial}), grant.bundle, READ), "of lane 'main'")


def test_absurd_commits_are_refused_without_a_trace(ledger: Ledger) -> None:
    """A transaction is whole or nothing: a good row before a bad one changes nothing either."""
    good = ledger.lease(ledger.make(ONE), UPDATE)
    reading = ledger.lease(ledger.make(ONE))
    bundle = reading.bundle
    shared = [ledger.lease(reading.bundle, mode) for mode in (UPDATE, CONSUME)]
    row = (good.serial, good.bundle, 2)
    for updated, consumed, match in [
        ([row, (2**63, bundle, 2)], [], f"grant {2**63} of bundle {bundle} is not held"),
        ([row, (good.serial, bundle, 2)], [], f"of bundle {bundle} is not held"),
        ([row, (good.serial, 2**63, 2)], [], f"of bundle {2**63} is not held"),
        ([row, (reading.serial, bundle, 2)], [], "which is for READ"),
        ([row, (shared[0].serial, shared[0].bundle, 1)], [], "version 1 .* has version 1"),
        ([row, (shared[0].serial, shared[0].bundle, 0)], [], "version 0"),
        ([row, row], [], "updates a bundle twice"),
        ([row, (good.serial, good.bundle, 3)], [], "updates a bundle twice"),
        ([row], [(good.serial, reading.bundle)], "is not held"),
        ([row], [(shared[1].serial, shared[1].bundle)], "leased elsewhere"),
        ([row], [(shared[1].serial, shared[1].bundle)] * 2, "consumes a bundle twice"),
    ]:
        ledger.refuses(Commit(tuple(updated), tuple(consumed)), match)
    ledger.receive(Commit((row,)))


def test_what_is_asked_for_is_not_consumed() -> None:
    ledger = Ledger(frames=4)
    bundle = ledger.make(ONE)
    ledger.make(ONE)
    ledger.demand(THREE, CREATE)
    consuming = ledger.lease(bundle, READ)
    waiting = ledger.demand(bundle, UPDATE)
    assert ledger.answer(waiting) is None
    ledger.refuses(Commit((), ((consuming.serial, bundle),)), "leased elsewhere")


def test_done_is_said_once(ledger: Ledger) -> None:
    grant = ledger.lease(ledger.make(ONE))
    ledger.done(grant)
    ledger.refuses(Done((grant.serial,)), "is not held")
    ledger.refuses(Done((2**63,)), f"{2**63} is not held")


def test_leases_end_together_or_not_at_all() -> None:
    ledger = Ledger()
    first, second = ledger.lease(ONE, CREATE), ledger.lease(ONE, CREATE)
    for serials, match in (((first.serial, 2**63), "is not held"), ((first.serial, first.serial), "a grant twice")):
        ledger.refuses(Done(serials), match)
    ledger.done(second, first)
    assert ledger.machine.pins.granted == {}


def test_absurd_discards_are_refused_without_a_trace(ledger: Ledger) -> None:
    idle, leased, flash = ledger.make(ONE), ledger.make(ONE), 0
    grant = ledger.lease(leased)
    ledger.refuses(Discard((idle, leased)), "leased or asked for")
    ledger.refuses(Discard((idle, idle)), "names a bundle twice")
    ledger.refuses(Discard((idle, 2**63)), "does not exist")
    ledger.refuses(Discard((flash,)), "bundle 0 does not exist")
    ledger.done(grant)
    ledger.receive(Discard((idle, leased)))


def test_what_is_asked_for_is_not_discarded(ledger: Ledger) -> None:
    bundle = ledger.make_in_flash(TWO)
    ledger.demand(bundle)
    ledger.refuses(Discard((bundle,)), "leased or asked for")


def test_a_bundle_takes_the_place_and_the_form_of_another(ledger: Ledger) -> None:
    old, new = ledger.make_in_flash(ONE), ledger.make(ONE)
    form = ledger.machine.bundles[old].spec
    ledger.freed.clear()
    ledger.receive(Supersede(((old, new),)))
    assert set(ledger.machine.bundles) == {new}
    assert ledger.machine.bundles[new].spec is form
    assert ledger.machine.newest == {form.spec_id: new}
    assert ledger.freed == [old]
    assert ledger.granted(ledger.demand(new)).bundle == new


def test_the_form_that_is_given_up_stays_with_who_was_made_of_it_last(ledger: Ledger) -> None:
    twin = BundleSpec(9, Kind.PARAM, "twin", ONE)
    ledger.machine.declare([twin])
    old, new, newer = ledger.make(ONE), ledger.make(twin.spec_id), ledger.make(twin.spec_id)
    ledger.receive(Supersede(((old, new),)))
    assert ledger.machine.newest == {ONE: new, twin.spec_id: newer}


def test_what_is_superseded_during_its_write_back_is_doomed_and_leaves_the_form_alone() -> None:
    ledger = Ledger(frames=8)
    old, new = ledger.make(THREE), ledger.make(THREE)
    form = ledger.machine.bundles[old].spec.spec_id
    ledger.demand(THREE, CREATE)
    assert ledger.writes == [old]
    ledger.receive(Supersede(((old, new),)))
    ledger.written(old)
    assert ledger.machine.newest[form] == new
    assert old not in ledger.machine.bundles


def test_absurd_successions_are_refused_without_a_trace(ledger: Ledger) -> None:
    one, other, larger = ledger.make(ONE), ledger.make(ONE), ledger.make(TWO)
    grant = ledger.lease(other)
    ledger.refuses(Supersede(((one, other),)), "leased or asked for")
    ledger.done(grant)
    ledger.refuses(Supersede(((one, other), (larger, one))), "names a bundle twice")
    ledger.refuses(Supersede(((one, 2**63),)), "does not exist")
    ledger.refuses(Supersede(((one, larger),)), "cannot supersede")
    ledger.receive(Supersede(((one, other),)))


def test_uses_of_a_form_are_expected_of_its_heir_once_there_is_one(ledger: Ledger) -> None:
    heir = BundleSpec(9, Kind.PARAM, "twin", ONE, heir_of=ONE)
    ledger.machine.declare([heir])
    old = ledger.make(ONE)
    machine = ledger.machine
    assert (machine.expected(ONE), machine.form_expected(old)) == (old, ONE)
    grant = ledger.lease(heir.spec_id, CREATE)
    assert machine.expected(ONE) == old, "it holds nothing yet"
    ledger.receive(Commit(((grant.serial, grant.bundle, 1),)))
    ledger.done(grant)
    assert (machine.expected(ONE), machine.form_expected(grant.bundle), machine.form_expected(old)) == (
        grant.bundle,
        ONE,
        0,
    )
    ledger.receive(Discard((grant.bundle,)))
    assert (machine.expected(ONE), machine.form_expected(old)) == (old, ONE)


def test_an_heir_is_as_large_as_what_it_follows(ledger: Ledger) -> None:
    for heir_of, match in ((TWO, "not as large"), (77, "never declared")):
        with pytest.raises(ProtocolError, match=match):
            ledger.machine.declare([BundleSpec(9, Kind.PARAM, "twin", ONE, heir_of=heir_of)])
    assert 9 not in ledger.machine.specs
    assert not ledger.machine.heirs


# -- declarations and admission


def test_a_form_is_declared_once(ledger: Ledger) -> None:
    four, again = BundleSpec(4, Kind.GRAD, "x", 1), BundleSpec(ONE, Kind.GRAD, "x", 1)
    for specs in ([four, again], [four, four]):
        with pytest.raises(ProtocolError, match="declared twice"):
            ledger.machine.declare(specs)
        assert 4 not in ledger.machine.specs
    ledger.machine.declare([four])
    assert ledger.machine.specs[ONE].unit == "layers.1"


def test_a_floor_that_does_not_fit_names_the_bundles() -> None:
    machine = Ledger(frames=4).machine
    before = copy.deepcopy(machine.lanes)
    with pytest.raises(ResourceExhausted) as caught:
        machine.admit("main", [ONE, THREE, TWO])
    for part in ("'main'", "3 bundles", "6 B", "4 B", "layers.3", "layers.2", "layers.1", "at least 6 B of DRAM"):
        assert part in str(caught.value)
    assert machine.lanes == before


def test_the_floor_is_the_set_used_together() -> None:
    machine = Ledger(frames=4).machine
    lane = machine.admit("main", [TWO, TWO])
    assert (lane.floor_frames, lane.budget_frames) == (4, 4)
    with pytest.raises(ProtocolError, match="spec 9"):
        machine.admit("main", [9])


def test_a_lane_is_admitted_again_with_another_floor(ledger: Ledger) -> None:
    """As when an optimizer's state appears after the first step: leases and epoch go on."""
    grant = ledger.lease(ledger.make(TWO))
    lane = ledger.machine.admit("main", [THREE])
    assert (lane.floor_frames, lane.budget_frames, lane.epoch) == (3, 4, ledger.epoch)
    ledger.machine.check_invariants()
    ledger.done(grant)
    with pytest.raises(ResourceExhausted):
        ledger.machine.admit("main", [THREE, TWO])
    assert ledger.machine.lanes["main"].floor_frames == 3
    assert ledger.lease(TWO, CREATE)


def test_budgets_never_exceed_the_arena(ledger: Ledger) -> None:
    assert ledger.machine.admit("worker", []).budget_frames == 0
    with pytest.raises(ResourceExhausted, match="'worker'"):
        ledger.machine.admit("worker", [ONE])
    ledger.machine.check_invariants()
