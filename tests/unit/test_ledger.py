"""The daemon's end of the grant protocol: what a demand is answered, and what leaves for it."""

from __future__ import annotations

import pytest

from tiermem.errors import Code, ProtocolError
from tiermem.grants.messages import Discard
from tiermem.residency import State
from tiermem.stats import EvictReason, StallCause
from tiermem.testing.ledger_driver import CREATE, ONE, READ, THREE, TWO, UPDATE, Ledger, writing_back


@pytest.fixture
def ledger() -> Ledger:
    return Ledger()


# -- demands


def test_a_created_bundle_is_blank_until_its_commit(ledger: Ledger) -> None:
    grant = ledger.lease(TWO, CREATE)
    assert (grant.mode, grant.version, sum(n for _, n in grant.runs)) == (CREATE, 0, 2)
    assert ledger.state(grant.bundle) == State.BLANK
    ledger.commit(grant)
    assert ledger.state(grant.bundle) == State.DIRTY
    assert (ledger.machine.creates, ledger.machine.hits, ledger.machine.misses) == (1, 0, 0)


def test_bundles_never_share_a_number(ledger: Ledger) -> None:
    first = ledger.make(ONE)
    ledger.receive(Discard((first,)))
    assert ledger.make(ONE) not in (first, 0)


def test_what_is_in_dram_is_granted_at_once(ledger: Ledger) -> None:
    bundle = ledger.make(TWO)
    grant = ledger.lease(bundle, UPDATE)
    assert (grant.bundle, grant.mode, grant.version) == (bundle, UPDATE, 1)
    assert (ledger.machine.hits, ledger.machine.misses) == (1, 0)
    assert ledger.sends[-1].waited_for is None


def test_what_is_in_flash_is_loaded_first(ledger: Ledger) -> None:
    bundle = ledger.make_in_flash(TWO)
    epoch = ledger.demand(bundle)
    assert ledger.answer(epoch) is None
    assert (ledger.state(bundle), ledger.loads) == (State.LOADING, [bundle])
    ledger.loaded(bundle)
    assert ledger.granted(epoch).version == 1
    assert ledger.state(bundle) == State.CLEAN
    assert ledger.sends[-1].waited_for == StallCause.LOAD
    assert (ledger.machine.hits, ledger.machine.misses) == (0, 1)


def test_a_second_demand_joins_the_load(ledger: Ledger) -> None:
    bundle = ledger.make_in_flash(TWO)
    epochs = [ledger.demand(bundle), ledger.demand(bundle, UPDATE)]
    assert ledger.loads == [bundle]
    ledger.loaded(bundle)
    assert [ledger.granted(epoch).mode for epoch in epochs] == [READ, UPDATE]


def test_a_reader_upgrades_in_place(ledger: Ledger) -> None:
    ledger = Ledger(frames=3)
    bundle = ledger.make(THREE)
    reading = ledger.lease(bundle)
    writing = ledger.granted(ledger.demand(bundle, UPDATE, held=[reading.serial]))  # not counted twice
    assert (writing.runs, writing.mode) == (reading.runs, UPDATE)
    ledger.done(reading)
    ledger.commit(writing)
    ledger.done(writing)
    assert ledger.machine.bundles[bundle].version == 2


def test_an_update_waits_for_the_write_back_and_a_reader_does_not() -> None:
    ledger = Ledger(frames=5)
    bundle = ledger.make(THREE)
    other = ledger.demand(THREE, CREATE)
    assert ledger.state(bundle) == State.WRITING
    # Together they would not fit: neither is granted beyond the budget.
    assert ledger.refused(ledger.demand(bundle)).code == Code.WORKING_SET_TOO_LARGE
    ledger.written(bundle)
    ledger.done(ledger.granted(other))

    ledger = Ledger(frames=4)
    bundle, idle = ledger.make(ONE), ledger.make(ONE)
    room = ledger.demand(THREE, CREATE)
    assert ledger.writes == [bundle]
    reader = ledger.demand(bundle)
    assert ledger.granted(reader).mode == READ
    writer = ledger.demand(bundle, UPDATE)
    assert ledger.answer(writer) is None
    assert ledger.answer(room) is None
    ledger.written(bundle)
    assert ledger.granted(writer).mode == UPDATE
    assert ledger.machine.bundles[bundle].flash_version == 1
    ledger.written(idle)
    assert ledger.granted(room).runs


def test_demands_are_served_oldest_first(ledger: Ledger) -> None:
    ledger = Ledger(frames=6)
    bundles = [ledger.make(THREE), ledger.make(THREE)]
    first, second = ledger.demand(THREE, CREATE), ledger.demand(ONE, CREATE)
    assert ledger.writes == bundles[:1]
    ledger.written(bundles[0])
    assert ledger.granted(first)
    assert ledger.answer(second) is None
    ledger.written(bundles[1])
    assert ledger.granted(second)


def test_a_younger_demand_does_not_take_the_frames_that_an_older_waits_for() -> None:
    ledger, bundle, older = writing_back()  # one frame is free, two are needed
    younger = ledger.demand(ONE, CREATE)
    assert ledger.answer(younger) is None
    ledger.written(bundle)
    assert ledger.sent[-2:] == [ledger.granted(older), ledger.granted(younger)]
    assert [send.waited_for for send in ledger.sends[-2:]] == [StallCause.ROOM, StallCause.ROOM]


def test_a_younger_demand_for_what_is_in_dram_does_not_wait() -> None:
    ledger = Ledger(frames=4)
    first, second = ledger.make(TWO), ledger.make(ONE)
    ledger.demand(THREE, CREATE)
    assert ledger.writes == [first]
    assert ledger.granted(ledger.demand(second)).bundle == second


def test_clean_bundles_are_dropped_without_a_transfer(ledger: Ledger) -> None:
    bundle = ledger.make_in_flash(THREE)
    epoch = ledger.demand(bundle)
    ledger.loaded(bundle)
    ledger.done(ledger.granted(epoch))
    before = ledger.machine.evictions[EvictReason.DEMAND]
    assert ledger.lease(TWO, CREATE)
    assert ledger.state(bundle) == State.FLASH
    assert ledger.machine.evictions[EvictReason.DEMAND] == before + 1
    assert not ledger.writes


def test_the_least_recently_used_bundle_leaves(ledger: Ledger) -> None:
    first, second = ledger.make(TWO), ledger.make(TWO)
    ledger.done(ledger.lease(first))
    ledger.demand(ONE, CREATE)
    assert ledger.writes == [second]


def test_room_on_its_way_is_not_made_twice() -> None:
    ledger, bundle, _ = writing_back()
    ledger.demand(ONE, CREATE)
    assert ledger.writes == [bundle]


def test_leased_bundles_stay(ledger: Ledger) -> None:
    leased, idle = ledger.make(TWO), ledger.make(TWO)
    grant = ledger.lease(leased)
    epoch = ledger.demand(TWO, CREATE)
    assert ledger.writes == [idle]
    ledger.written(idle)
    assert ledger.granted(epoch).runs != grant.runs
    assert ledger.state(leased) == State.DIRTY


# -- refusals


def test_beyond_the_budget_the_holders_are_named(ledger: Ledger) -> None:
    held = ledger.lease(THREE, CREATE)
    refusal = ledger.refused(ledger.demand(TWO, CREATE, held=[held.serial]))
    assert refusal.code == Code.WORKING_SET_TOO_LARGE
    for part in ("layers.2", "layers.3", "5 B of 4 B", "more DRAM"):
        assert part in refusal.message
    assert ledger.machine.refusals == {Code.WORKING_SET_TOO_LARGE: 1}
    ledger.commit(held)
    ledger.done(held)
    assert ledger.demand(TWO, CREATE)  # the lane is none the worse for it


def test_an_open_demand_counts_against_the_budget(ledger: Ledger) -> None:
    bundle = ledger.make_in_flash(THREE)
    ledger.demand(bundle)
    assert ledger.refused(ledger.demand(TWO, CREATE)).code == Code.WORKING_SET_TOO_LARGE


def test_a_bundle_that_does_not_exist_is_not_found(ledger: Ledger) -> None:
    blank = ledger.lease(ONE, CREATE)
    for target in (0, 1, 99, blank.bundle, 2**63):
        assert ledger.refused(ledger.demand(target)).code == Code.NOT_FOUND


def test_flash_keeps_room_for_what_is_live_and_a_spare() -> None:
    ledger = Ledger(frames=4, quota=9, spare=3)
    for _ in range(3):
        ledger.make(TWO)
    refusal = ledger.refused(ledger.demand(ONE, CREATE))
    assert refusal.code == Code.TIER_FULL
    for part in ("layers.1", "6 B", "9 B", "3 B", "raise the flash size"):
        assert part in refusal.message
    assert len(ledger.machine.bundles) == 3
    ledger.receive(Discard((min(ledger.machine.bundles),)))
    assert ledger.make(ONE)


# -- what is in a file of the client's


def test_an_adopted_bundle_is_loaded_and_dropped_without_flash_room() -> None:
    ledger = Ledger(quota=0, spare=0)
    bundle = ledger.machine.adopt(TWO)
    assert (ledger.state(bundle), ledger.frames.free_frames) == (State.FLASH, 4)
    epoch = ledger.demand(bundle)
    assert ledger.loads == [bundle]
    ledger.end_transfers()
    grant = ledger.granted(epoch)
    assert (grant.version, grant.mode) == (1, READ)
    ledger.done(grant)
    other = ledger.machine.adopt(THREE)
    epoch = ledger.demand(other)
    assert ledger.state(bundle) == State.FLASH, "it was not dropped for the other"
    ledger.end_transfers()
    assert ledger.granted(epoch).bundle == other
    assert ledger.writes == []


def test_flash_room_is_charged_when_an_adopted_bundle_may_be_written() -> None:
    ledger = Ledger(quota=6, spare=3)
    adopted = ledger.machine.adopt(TWO)
    full = ledger.make(TWO)
    refusal = ledger.refused(ledger.demand(adopted, UPDATE))
    assert refusal.code == Code.TIER_FULL
    epoch = ledger.demand(adopted)  # reading takes none
    ledger.end_transfers()
    ledger.done(ledger.granted(epoch))
    ledger.receive(Discard((full,)))
    assert ledger.use(adopted, UPDATE) == adopted
    assert ledger.refused(ledger.demand(TWO, CREATE)).code == Code.TIER_FULL, "it was not charged"
    assert ledger.use(adopted, UPDATE) == adopted  # charged once
    ledger.receive(Discard((adopted,)))
    assert ledger.make(TWO)


def test_an_adopted_bundle_that_was_written_is_one_like_any_other(ledger: Ledger) -> None:
    bundle = ledger.machine.adopt(TWO)
    ledger.use(bundle, UPDATE)
    record = ledger.machine.bundles[bundle]
    assert (record.state, record.external, record.version) == (State.DIRTY, True, 2)
    ledger.demand(THREE, CREATE)
    assert ledger.writes == [bundle]
    ledger.end_transfers()
    assert (record.state, record.external, record.flash_version) == (State.FLASH, False, 2)


def test_a_form_is_adopted_once(ledger: Ledger) -> None:
    ledger.machine.adopt(ONE)
    before = ledger.everything()
    for form, match in ((ONE, "adopted twice"), (99, "never declared")):
        with pytest.raises(ProtocolError, match=match):
            ledger.machine.adopt(form)
    assert ledger.everything() == before


def test_a_session_ends_with_its_adopted_bundles(ledger: Ledger) -> None:
    one, two = ledger.machine.adopt(ONE), ledger.machine.adopt(TWO)
    ledger.demand(one)
    ledger.act(ledger.machine.exit())
    assert not ledger.machine.drained
    assert ledger.freed == [two]
    ledger.loaded(one)
    assert ledger.machine.drained
    assert ledger.machine.bundles == {}
    assert ledger.frames.free_frames == 4


# -- write-backs


def test_write_backs_wait_for_each_other_where_flash_has_one_spare() -> None:
    """Each makes a second copy: two at once would not fit, and a demand within the budget is not refused for that."""
    ledger = Ledger(frames=4, quota=11, spare=3)
    bundles = [ledger.make(TWO) for _ in range(4)]
    for bundle in bundles[:2]:
        ledger.use(bundle, UPDATE)  # sends the other two to flash, and leaves these dirty beside older copies
    epochs = [ledger.demand(bundle) for bundle in bundles[2:]]
    assert ledger.writes == bundles[:1]
    ledger.written(bundles[0])
    assert ledger.writes == [bundles[1]]
    ledger.written(bundles[1])
    for bundle, epoch in zip(bundles[2:], epochs, strict=True):
        ledger.loaded(bundle)
        assert ledger.granted(epoch)
