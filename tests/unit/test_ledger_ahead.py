"""The daemon's end of the grant protocol: grants ahead of use, what ends them, and budgets that shrink."""

from __future__ import annotations

import pytest

from tiermem.bundle import BundleSpec, Kind
from tiermem.errors import Code, DataLoss, ProtocolError, ResourceExhausted, TierIOError
from tiermem.grants.foresight import Use
from tiermem.grants.messages import Accessed, Commit, Discard, Used, Void
from tiermem.grants.serving import ROOMS_AT_ONCE
from tiermem.plan import Access, Phase
from tiermem.residency import State
from tiermem.stats import EvictReason
from tiermem.testing.ledger_driver import CONSUME, CREATE, ONE, READ, THREE, TWO, UPDATE, Ledger


@pytest.fixture
def ledger() -> Ledger:
    return Ledger(frames=6, ahead=6)


# -- what is granted ahead


def test_what_is_resident_is_granted_before_it_is_asked_for(ledger: Ledger) -> None:
    bundle = ledger.make(TWO)
    [grant] = ledger.foresee((TWO, READ))
    assert (grant.bundle, grant.mode, grant.answers, grant.epoch, grant.spec) == (bundle, READ, 0, ledger.epoch, TWO)
    assert ledger.foresee((TWO, READ)) == [], "it was granted twice"
    [wider] = ledger.foresee((TWO, UPDATE))
    assert (wider.mode, wider.runs) == (UPDATE, grant.runs)


def test_what_is_in_flash_is_loaded_ahead_and_granted_when_it_is_there(ledger: Ledger) -> None:
    bundle = ledger.make_in_flash(TWO)
    assert ledger.foresee(Use(TWO, UPDATE, 5.0)) == []
    assert (ledger.state(bundle), ledger.loads) == (State.LOADING, [bundle])
    ledger.loaded(bundle)
    assert [(grant.bundle, grant.mode) for grant in ledger.pushed] == [(bundle, UPDATE)]
    assert ledger.machine.pushes == 1


def test_what_will_be_created_is_blank_ahead(ledger: Ledger) -> None:
    [grant] = ledger.foresee((TWO, CREATE), (ONE, READ))
    assert (grant.mode, grant.version, ledger.state(grant.bundle)) == (CREATE, 0, State.BLANK)
    ledger.receive(Used((grant.serial,)))
    ledger.commit(grant)
    assert ledger.state(grant.bundle) == State.DIRTY
    assert ledger.machine.pushes_used == 1


def test_nothing_is_granted_further_ahead_than_allowed() -> None:
    ledger = Ledger(frames=6, ahead=3)
    for form in (ONE, TWO, THREE):
        ledger.make(form)
    assert [grant.spec for grant in ledger.foresee((ONE, READ), (TWO, READ), (THREE, READ))] == [ONE, TWO]


def test_only_what_is_needed_later_leaves_for_what_is_needed_sooner() -> None:
    """In both orders the first bundle is the least recently used one, and would leave if nothing were foreseen."""
    for uses, leaves in (((THREE, TWO), ONE), ((TWO, THREE), THREE)):
        ledger = Ledger(frames=5, ahead=5)
        flash = ledger.make_in_flash(TWO)
        bundles = {form: ledger.make(form) for form in (THREE, ONE)}
        ledger.foresee(*((form, READ) for form in uses))
        assert (ledger.writes, ledger.loads) == ([bundles[leaves]], [])
        before = ledger.machine.evictions[EvictReason.LOOKAHEAD]
        ledger.written(bundles[leaves])
        assert ledger.state(bundles[leaves]) == State.FLASH
        assert ledger.machine.evictions[EvictReason.LOOKAHEAD] == before + 1
        assert ledger.loads == [flash]


def test_a_use_that_lacks_frames_keeps_its_share_of_the_budget_from_later_ones() -> None:
    """Otherwise grants of later uses would fill the budget while the next one is loaded."""
    ledger = Ledger(frames=4, ahead=6)
    soon = ledger.make_in_flash(THREE)
    later = ledger.make(TWO)
    ledger.machine.admit("main", [THREE])
    ledger.foresee((THREE, READ), (TWO, READ))
    assert ledger.pushed == []
    ledger.written(later)
    ledger.loaded(soon)
    assert [grant.bundle for grant in ledger.pushed] == [soon]


def test_room_is_made_for_a_few_uses_at_a_time() -> None:
    """However many are foreseen: what leaves for uses that are far could have stayed for nearer ones."""
    forms = range(10, 22)
    ledger = Ledger(frames=6, ahead=20)
    ledger.machine.declare([BundleSpec(n, Kind.PARAM, f"layers.{n}", 1) for n in forms])
    flash = [ledger.make(n) for n in forms[:6]]
    dirty = [ledger.make(n) for n in forms[6:]]
    ledger.end_transfers()
    assert {ledger.state(bundle) for bundle in dirty} == {State.DIRTY}
    ledger.foresee(*((n, READ) for n in forms[:6]))
    assert len(ledger.writes) == ROOMS_AT_ONCE
    ledger.end_transfers()
    assert [grant.bundle for grant in ledger.pushed] == flash


def test_predictions_of_what_does_not_exist_are_passed_over(ledger: Ledger) -> None:
    bundle = ledger.make(ONE)
    pushed = ledger.foresee((THREE, READ), (99, CREATE), (98, READ), (ONE, READ))
    assert [grant.bundle for grant in pushed] == [bundle]


def test_flash_that_is_full_stops_creations_ahead_and_nothing_leaves_for_them() -> None:
    ledger = Ledger(frames=4, quota=9, spare=3, ahead=4)
    kept = ledger.make_in_flash(TWO)
    epoch = ledger.demand(kept)
    ledger.loaded(kept)
    ledger.done(ledger.granted(epoch))
    other = ledger.make(TWO)
    assert ledger.foresee((THREE, CREATE)) == []
    assert (ledger.state(kept), ledger.state(other)) == (State.CLEAN, State.DIRTY)
    assert ledger.writes == []


def test_an_adopted_bundle_is_not_loaded_for_writing_where_flash_has_no_room() -> None:
    """What is loaded and cannot be granted could leave for another lane's, and come again, without end."""
    ledger = Ledger(frames=4, quota=3, spare=3, ahead=4)
    ledger.machine.adopt(TWO)
    assert ledger.foresee((TWO, UPDATE)) == []
    assert ledger.loads == []
    ledger.foresee((TWO, READ))
    assert len(ledger.loads) == 1


# -- what ends unused grants


def test_a_demand_ends_the_unused_grants_of_its_lane(ledger: Ledger) -> None:
    """The budget is the demand's: it is not refused for what was pushed."""
    bundle, blank = ledger.make(THREE), ledger.foresee((THREE, UPDATE), (TWO, CREATE))[1]
    ledger.foresight.uses.clear()
    assert len(ledger.machine.pins.granted) == 2
    ledger.make(ONE)
    assert ledger.machine.pins.granted == {}
    assert blank.bundle not in ledger.machine.bundles, "a blank bundle without a grant was kept"
    epoch = ledger.demand(THREE, CREATE)
    ledger.end_transfers()
    assert ledger.granted(epoch)
    assert ledger.state(bundle) in (State.DIRTY, State.FLASH)


def test_leases_by_pushed_grants_are_held(ledger: Ledger) -> None:
    ledger.make(TWO)
    [grant] = ledger.foresee((TWO, UPDATE))
    ledger.foresight.uses.clear()
    ledger.demand(ONE, CREATE, held=[grant.serial])
    ledger.void()
    assert grant.serial in ledger.machine.pins.granted, "it is used: only done ends it"
    ledger.commit(grant)
    ledger.done(grant)


def test_an_answer_is_not_void(ledger: Ledger) -> None:
    """C1: it may be on its way."""
    grant = ledger.lease(ONE, CREATE)
    ledger.void()
    assert grant.serial in ledger.machine.pins.granted


def test_unused_grants_end_with_their_bundle(ledger: Ledger) -> None:
    one, two = ledger.make(ONE), ledger.make(TWO)
    consuming = ledger.lease(two, CONSUME)
    assert len(ledger.foresee((ONE, UPDATE), (TWO, UPDATE))) == 2
    ledger.foresight.uses.clear()
    ledger.receive(Commit((), ((consuming.serial, two),)))
    ledger.receive(Discard((one,)))
    assert ledger.machine.pins.granted == {}
    assert ledger.frames.free_frames == 6


def test_what_is_used_tells_the_foresight(ledger: Ledger) -> None:
    access = Access("layers.1", Phase.FORWARD)
    ledger.make(TWO)
    [grant] = ledger.foresee((TWO, UPDATE))
    ledger.foresight.told.clear()
    ledger.receive(Accessed("main", access))
    ledger.receive(Used((grant.serial,)))
    ledger.demand(ONE, CREATE, held=[grant.serial])
    assert ledger.foresight.told == [("main", access), ("main", TWO, UPDATE), ("main", ONE, CREATE)]


def test_absurd_messages_about_pushed_grants_change_nothing(ledger: Ledger) -> None:
    ledger.make(ONE)
    [grant] = ledger.foresee((ONE, UPDATE))
    ledger.refuses(Used((grant.serial, 2**63)), f"grant {2**63}")
    ledger.refuses(Void("main", ledger.epoch, frozenset()), "is not newer")
    ledger.refuses(Void("main", 99, frozenset({2**63})), f"grant {2**63}")
    ledger.refuses(Void("worker", 1, frozenset()), "never admitted")
    ledger.refuses(Accessed("worker", Access("x", Phase.FORWARD)), "never admitted")
    assert ledger.machine.pins.granted[grant.serial].pushed


# -- demands come first


def test_a_demand_that_waits_for_room_stops_what_runs_ahead() -> None:
    """C11: and what runs ahead already leaves for it when it has ended."""
    ledger = Ledger(frames=4, ahead=4)
    ahead = ledger.make_in_flash(THREE)
    ledger.foresee((THREE, READ), (ONE, CREATE))
    epoch = ledger.demand(TWO, CREATE)
    assert ledger.loads == [ahead]
    assert ledger.hastened == [ahead], "somebody waits for the frames"
    ledger.loaded(ahead)
    assert ledger.granted(epoch)
    assert ledger.state(ahead) == State.FLASH


def test_a_write_back_that_was_begun_ahead_is_hastened_for_who_waits_for_room() -> None:
    ledger = Ledger(frames=4, ahead=4)
    ledger.make_in_flash(THREE)
    later = ledger.make(TWO)
    ledger.foresee(Use(THREE, READ, 9.0))
    assert (ledger.writes, ledger.hastened) == ([later], [])
    epoch = ledger.demand(THREE, CREATE)
    assert ledger.hastened == [later]
    ledger.written(later)
    assert ledger.granted(epoch)


def test_a_younger_demand_without_a_transfer_has_nothing_to_hasten(ledger: Ledger) -> None:
    """Two demands for room: the younger one's bundle is in flash still, nothing of it is under way."""
    flash = ledger.make_in_flash(TWO)
    dirty = [ledger.make(THREE), ledger.make(THREE)]
    older, younger = ledger.demand(THREE, CREATE), ledger.demand(flash)
    assert (ledger.loads, ledger.writes, ledger.hastened) == ([], dirty[:1], [])
    ledger.end_transfers()
    assert ledger.granted(older)
    assert ledger.granted(younger)


def test_a_demand_hastens_the_load_that_it_joins(ledger: Ledger) -> None:
    bundle = ledger.make_in_flash(TWO)
    ledger.foresee(Use(TWO, READ, 9.0))
    epoch = ledger.demand(bundle)
    assert (ledger.loads, ledger.hastened) == ([bundle], [bundle])
    ledger.loaded(bundle)
    assert ledger.granted(epoch)


def test_a_push_that_was_void_leaves_no_flash_charge_behind() -> None:
    """A grant to write an adopted bundle reserves flash room; unused it must not cost a later demand its room."""
    ledger = Ledger(frames=6, quota=5, spare=3, ahead=6)
    adopted = ledger.machine.adopt(TWO)
    ledger.foresee((TWO, UPDATE))
    ledger.loaded(adopted)
    assert [grant.mode for grant in ledger.pushed] == [UPDATE]
    assert ledger.machine.bundles[adopted].charged
    ledger.foresight.uses.clear()
    assert ledger.granted(ledger.demand(ONE, CREATE))
    assert not ledger.machine.bundles[adopted].charged


def test_a_refused_demand_leaves_no_flash_charge_behind() -> None:
    ledger = Ledger(frames=6, quota=5, spare=3)
    adopted = ledger.machine.adopt(TWO)
    epoch = ledger.demand(adopted, UPDATE)
    ledger.load_failed(adopted, DataLoss("gone"))
    assert ledger.refused(epoch).code == Code.DATA_LOSS
    assert ledger.make(TWO)


# -- failures


def test_a_load_that_failed_is_not_tried_again_ahead(ledger: Ledger) -> None:
    """Until somebody demands something: a disk that is broken would be asked without end."""
    bundle = ledger.make_in_flash(TWO)
    ledger.foresee((TWO, READ))
    ledger.load_failed(bundle, TierIOError(5, "EIO"))
    assert (ledger.state(bundle), ledger.loads) == (State.FLASH, [])
    assert ledger.foresee((TWO, READ), (ONE, CREATE)) == []
    assert ledger.loads == []
    ledger.demand(ONE, CREATE)
    assert ledger.loads == [bundle]


def test_a_write_back_that_failed_is_not_tried_again_ahead() -> None:
    ledger = Ledger(frames=4, ahead=4)
    ledger.make_in_flash(THREE)
    dirty = ledger.make(TWO)
    ledger.foresee((THREE, READ))
    ledger.write_failed(dirty, TierIOError(5, "EIO"))
    assert (ledger.state(dirty), ledger.writes, ledger.loads) == (State.DIRTY, [], [])


# -- shrinking


def two_lanes(frames: int = 6, worker: int = 2) -> Ledger:
    ledger = Ledger(frames, ahead=frames)
    ledger.act(ledger.machine.shrink("main", frames - worker))
    assert ledger.machine.admit("worker", []).budget_frames == worker
    return ledger


def test_a_budget_shrinks_at_once_where_nothing_is_in_the_way(ledger: Ledger) -> None:
    ledger.act(ledger.machine.shrink("main", 2))
    lane = ledger.machine.lanes["main"]
    assert (lane.budget_frames, lane.target_frames, ledger.surrenders) == (2, None, [])
    assert ledger.machine.admit("worker", []).budget_frames == 4


def test_unused_grants_are_asked_back_and_not_taken(ledger: Ledger) -> None:
    """C7: the client may have used one before it hears of the surrender."""
    for form in (TWO, THREE):
        ledger.make(form)
    used, unused = ledger.foresee((TWO, READ), (THREE, READ))
    ledger.foresight.uses.clear()
    ledger.act(ledger.machine.shrink("main", 2))
    lane = ledger.machine.lanes["main"]
    assert ledger.surrenders == ["main"]
    assert {used.serial, unused.serial} <= set(ledger.machine.pins.granted)
    assert (lane.budget_frames, lane.target_frames) == (6, 2)
    ledger.void(held=[used.serial])
    assert set(ledger.machine.pins.granted) == {used.serial}
    assert (lane.budget_frames, lane.target_frames) == (2, None)


def test_nothing_is_granted_ahead_beyond_the_target(ledger: Ledger) -> None:
    ledger.make(TWO)
    held = ledger.lease(THREE, CREATE)
    ledger.act(ledger.machine.shrink("main", 2))
    assert ledger.foresee((TWO, READ)) == []
    ledger.commit(held)
    ledger.done(held)
    assert [grant.spec for grant in ledger.pushed] == [TWO]
    assert ledger.machine.lanes["main"].budget_frames == 2


def test_a_demand_that_needs_more_ends_the_shrink(ledger: Ledger) -> None:
    bundle = ledger.make(THREE)
    held = ledger.lease(bundle)
    ledger.act(ledger.machine.shrink("main", 2))
    assert ledger.granted(ledger.demand(ONE, CREATE, held=[held.serial]))
    lane = ledger.machine.lanes["main"]
    assert (lane.budget_frames, lane.target_frames) == (6, None)


def test_a_lane_does_not_shrink_below_its_floor_nor_grow() -> None:
    ledger = two_lanes()
    machine = ledger.machine
    machine.admit("main", [THREE])
    with pytest.raises(ResourceExhausted, match="'main' cannot shrink to 2 B: it uses 3 B at once"):
        machine.shrink("main", 2)
    ledger.act(machine.shrink("main", 5))
    assert machine.lanes["main"].budget_frames == 4, "the other lane's frames were given away"


def test_a_new_floor_ends_a_shrink_below_it(ledger: Ledger) -> None:
    held = ledger.lease(THREE, CREATE)
    ledger.act(ledger.machine.shrink("main", 1))
    ledger.machine.admit("main", [TWO])
    ledger.commit(held)
    ledger.done(held)
    lane = ledger.machine.lanes["main"]
    assert (lane.budget_frames, lane.target_frames) == (6, None)


def test_lanes_have_grants_and_epochs_of_their_own() -> None:
    ledger = two_lanes()
    ledger.make(ONE)
    [mine] = ledger.foresee((ONE, READ))
    [other] = ledger.foresee((ONE, READ), lane="worker")
    assert (mine.lane, other.lane, other.epoch) == ("main", "worker", 0)
    ledger.foresight.uses.clear()
    ledger.void(lane="worker")
    assert set(ledger.machine.pins.granted) == {mine.serial}
    with pytest.raises(ProtocolError, match="of lane 'main'"):
        ledger.machine.receive(Void("worker", 9, frozenset({mine.serial})))
