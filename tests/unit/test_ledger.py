"""The rules of the daemon's end of the grant protocol, one by one. Frames of one byte: sizes are frames."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable

import pytest

from tiermem.allocator import FrameAllocator
from tiermem.bundle import BundleSpec, Kind, Mode
from tiermem.errors import Code, DataLoss, ProtocolError, ResourceExhausted, TierFull, TierIOError
from tiermem.grants.effects import Effect, FreeFlash, Load, Send, WriteBack
from tiermem.grants.ledger import GrantLedger
from tiermem.grants.messages import ClientBody, Commit, DaemonBody, Demand, Discard, Done, Grant, Refuse
from tiermem.placement.lru import LeastRecentlyUsed
from tiermem.residency import State
from tiermem.stats import EvictReason, StallCause

READ, UPDATE, CREATE, CONSUME = Mode.READ, Mode.UPDATE, Mode.CREATE, Mode.CONSUME
ONE, TWO, THREE = 1, 2, 3  # forms, named by their frames


class Ledger:
    """A ledger, its client, and a mover that ends transfers when told to."""

    def __init__(self, frames: int = 4, quota: int = 100, spare: int = 3) -> None:
        ids = itertools.count(100)
        self.frames = FrameAllocator(frames)
        self.machine = GrantLedger(self.frames, 1, int, quota, spare, LeastRecentlyUsed(), lambda: next(ids))
        self.machine.declare([BundleSpec(n, Kind.PARAM, f"layers.{n}", n) for n in (ONE, TWO, THREE)])
        self.machine.admit("main", [])
        self.epoch = 0
        self.sent: list[DaemonBody] = []
        self.sends: list[Send] = []
        self.loads: list[int] = []
        self.writes: list[int] = []
        self.freed: list[int] = []

    def act(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send(message):
                    self.sends.append(effect)
                    self.sent.append(message)
                case Load(bundle):
                    self.loads.append(bundle)
                case WriteBack(bundle):
                    self.writes.append(bundle)
                case FreeFlash(bundle):
                    self.freed.append(bundle)
        self.machine.check_invariants()

    def receive(self, message: ClientBody) -> None:
        self.act(self.machine.receive(message))

    def demand(self, target: int, mode: Mode = READ, held: Iterable[int] = ()) -> int:
        """Returns the epoch, which the answer will name."""
        self.epoch += 1
        self.receive(Demand("main", self.epoch, frozenset(held), target, mode))
        return self.epoch

    def answer(self, epoch: int) -> DaemonBody | None:
        found = [message for message in self.sent if message.answers == epoch]
        assert len(found) < 2
        return found[0] if found else None

    def granted(self, epoch: int) -> Grant:
        answer = self.answer(epoch)
        assert isinstance(answer, Grant), answer
        return answer

    def refused(self, epoch: int) -> Refuse:
        answer = self.answer(epoch)
        assert isinstance(answer, Refuse), answer
        return answer

    def lease(self, target: int, mode: Mode = READ) -> Grant:
        """Of what is granted at once."""
        return self.granted(self.demand(target, mode))

    def commit(self, grant: Grant, version: int | None = None) -> None:
        self.receive(Commit(((grant.serial, grant.bundle, version or grant.version + 1),)))

    def done(self, grant: Grant) -> None:
        self.receive(Done(grant.serial))

    def make(self, form: int) -> int:
        """A dirty bundle in DRAM that nobody uses."""
        return self.use(form, CREATE)

    def use(self, target: int, mode: Mode) -> int:
        """Demand, wait for whatever it takes, commit, and release. Returns the bundle."""
        epoch = self.demand(target, mode)
        self.end_transfers()
        grant = self.granted(epoch)
        self.commit(grant)
        self.done(grant)
        return grant.bundle

    def end_transfers(self) -> None:
        while self.writes or self.loads:
            if self.writes:
                self.written(self.writes[0])
            else:
                self.loaded(self.loads[0])

    def make_in_flash(self, form: int) -> int:
        """A bundle that is only in flash: everything else is evicted as well."""
        bundle = self.make(form)
        # All of the arena is demanded, which evicts everything, and given back unwritten.
        epochs = [self.demand(ONE, CREATE) for _ in range(self.frames.frames)]
        self.end_transfers()
        for epoch in epochs:
            self.done(self.granted(epoch))
        assert self.state(bundle) == State.FLASH
        return bundle

    def loaded(self, bundle: int) -> None:
        self.loads.remove(bundle)
        self.act(self.machine.loaded(bundle))

    def written(self, bundle: int) -> None:
        self.writes.remove(bundle)
        self.act(self.machine.written(bundle))

    def state(self, bundle: int) -> State:
        return self.machine.bundles[bundle].state

    def refuses(self, message: ClientBody, match: str) -> None:
        """The message is refused and nothing is changed by it."""
        before = self.everything()
        with pytest.raises(ProtocolError, match=match):
            self.machine.receive(message)
        assert self.everything() == before
        self.machine.check_invariants()

    def everything(self) -> object:
        m = self.machine
        return copy.deepcopy(
            (m.bundles, m.lanes, m.pins, m.specs, m.evictions, m.refusals, m.hits, m.misses, m.creates, m.commits)
        )


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


def writing_back() -> tuple[Ledger, int, int]:
    """A ledger in the middle of a write-back, which a demand for a new bundle waits for: (ledger, bundle, epoch)."""
    ledger = Ledger(frames=4)
    bundle = ledger.make(THREE)
    epoch = ledger.demand(TWO, CREATE)
    assert (ledger.state(bundle), ledger.writes) == (State.WRITING, [bundle])
    return ledger, bundle, epoch


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
    assert [message.answers for message in ledger.sent[-2:]] == [older, younger]
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
    ledger.refuses(Done(grant.serial), "is not held")
    ledger.refuses(Done(2**63), f"{2**63} is not held")


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
