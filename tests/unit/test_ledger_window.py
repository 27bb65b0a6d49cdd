"""A large window of predicted uses is looked through when a part of it is new; what is near is looked at every time."""

from __future__ import annotations

import pytest

from tiermem.bundle import BundleSpec, Kind
from tiermem.grants.foresight import Use
from tiermem.grants.messages import Grant, Used
from tiermem.grants.serving import GRANTS_AHEAD, NEAR_PARTS, WINDOW_PARTS
from tiermem.residency import State
from tiermem.testing.ledger_driver import CREATE, ONE, READ, Ledger

PART = 4  # of the window, in frames and in uses: each has a bundle of one frame
WINDOW = PART * WINDOW_PARTS
FRAMES = 3 * WINDOW
FORMS = range(100, 100 + 2 * WINDOW)


class Lane:
    """Uses one form after the other, each in an access of its own."""

    def __init__(self) -> None:
        self.ledger = Ledger(FRAMES, quota=10**6, ahead=WINDOW)
        self.ledger.machine.declare([BundleSpec(n, Kind.PARAM, f"layers.{n}", 1) for n in FORMS])
        self.bundles = [self.ledger.make(form) for form in FORMS]
        epochs = [self.ledger.demand(ONE, CREATE) for _ in range(FRAMES)]  # everything leaves for these
        self.ledger.end_transfers()
        for epoch in epochs:
            self.ledger.done(self.ledger.granted(epoch))
        self.first = 0
        self.foresee()

    def foresee(self) -> None:
        uses = [Use(form, READ, place=place) for place, form in enumerate(FORMS)]
        self.ledger.foresight.uses["main"] = uses[self.first :]

    def use(self) -> None:
        """The next one, granted ahead, and done."""
        [grant] = [g for g in self.granted() if g.bundle == self.bundles[self.first]]
        self.first += 1
        self.foresee()
        self.ledger.receive(Used((grant.serial,)))
        self.ledger.done(grant)

    def granted(self) -> list[Grant]:
        return [g for g in self.ledger.pushed if g.serial in self.ledger.machine.pins.granted]

    def in_dram(self) -> int:
        return sum(self.ledger.state(bundle) != State.FLASH for bundle in self.bundles)


@pytest.fixture
def lane() -> Lane:
    lane = Lane()
    lane.ledger.demand(ONE, CREATE)  # a demand looks through all of it
    return lane


def test_all_of_the_window_is_loaded_and_the_nearest_are_granted(lane: Lane) -> None:
    assert lane.ledger.loads == lane.bundles[: len(lane.ledger.loads)]
    assert len(lane.ledger.loads) == WINDOW
    lane.ledger.end_transfers()
    assert [grant.bundle for grant in lane.granted()] == lane.bundles[:GRANTS_AHEAD]


def test_what_comes_into_the_window_is_loaded_a_part_at_a_time_and_granted_one_by_one(lane: Lane) -> None:
    lane.ledger.end_transfers()
    for used in range(1, PART):
        lane.use()
        assert lane.ledger.loads == [], f"after {used} uses"
        assert [grant.bundle for grant in lane.granted()] == lane.bundles[used : used + GRANTS_AHEAD]
    lane.use()
    assert lane.ledger.loads == lane.bundles[WINDOW : WINDOW + PART]
    lane.ledger.end_transfers()
    assert lane.in_dram() == WINDOW + PART, "what was used stays: there is room"


def test_a_demand_has_it_looked_through_at_once(lane: Lane) -> None:
    lane.ledger.end_transfers()
    lane.use()
    assert lane.ledger.loads == []
    lane.ledger.demand(ONE, CREATE)
    assert lane.ledger.loads == [lane.bundles[WINDOW]]


def test_a_load_is_granted_when_it_has_ended_as_far_as_grants_go(lane: Lane) -> None:
    for number in range(GRANTS_AHEAD + 2):
        lane.ledger.loaded(lane.ledger.loads[0])
        granted = min(number + 1, GRANTS_AHEAD)
        assert [grant.bundle for grant in lane.granted()] == lane.bundles[:granted]


def test_the_whole_of_the_next_access_is_granted_where_it_has_many_bundles(lane: Lane) -> None:
    lane.ledger.end_transfers()
    many = 2 * GRANTS_AHEAD
    uses = [Use(form, READ, place=n // many) for n, form in enumerate(FORMS)]
    lane.ledger.foresight.uses["main"] = uses
    lane.ledger.receive(Used(()))
    assert [grant.bundle for grant in lane.granted()] == lane.bundles[:many]


def test_many_grants_are_topped_up_when_half_of_them_have_been_used() -> None:
    window = 128
    near = window // NEAR_PARTS
    ledger, forms = Ledger(2 * window, quota=10**6, ahead=window), range(100, 100 + window)
    ledger.machine.declare([BundleSpec(n, Kind.PARAM, f"layers.{n}", 1) for n in forms])
    bundles = [ledger.make(form) for form in forms]
    uses = [Use(form, READ, place=place) for place, form in enumerate(forms)]
    ledger.foresight.uses["main"] = uses
    ledger.demand(ONE, CREATE)
    assert [grant.bundle for grant in ledger.pushed] == bundles[:near]
    for used in range(1, near // 2):
        ledger.foresight.uses["main"] = uses[used:]
        ledger.receive(Used((ledger.pushed[used - 1].serial,)))
    assert len(ledger.pushed) == near
    ledger.foresight.uses["main"] = uses[near // 2 :]
    ledger.receive(Used((ledger.pushed[near // 2 - 1].serial,)))
    assert [grant.bundle for grant in ledger.pushed] == bundles[: near + near // 2]


def test_many_loads_are_granted_when_half_of_them_have_ended_where_many_grants_are_unused() -> None:
    window = 128
    near, resident = window // NEAR_PARTS, 2 * GRANTS_AHEAD
    ledger, forms = Ledger(2 * window, quota=10**6, ahead=window), range(100, 100 + window)
    ledger.machine.declare([BundleSpec(n, Kind.PARAM, f"layers.{n}", 1) for n in forms])
    for form in forms[resident:near]:
        ledger.make(form)
    epochs = [ledger.demand(ONE, CREATE) for _ in range(2 * window)]  # everything leaves for these
    ledger.end_transfers()
    for epoch in epochs:
        ledger.done(ledger.granted(epoch))
    for form in forms[:resident]:
        ledger.make(form)
    ledger.foresight.uses["main"] = [Use(form, READ, place=place) for place, form in enumerate(forms[:near])]
    ledger.demand(ONE, CREATE)
    assert len(ledger.pushed) == resident
    loads = list(ledger.loads)
    for ended in loads[: len(loads) // 2 - 1]:
        ledger.loaded(ended)
    assert len(ledger.pushed) == resident
    ledger.loaded(loads[len(loads) // 2 - 1])
    assert len(ledger.pushed) == resident + len(loads) // 2
