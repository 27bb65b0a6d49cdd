from __future__ import annotations

import itertools

import pytest

from tiermem.bundle import BundleSpec, Kind
from tiermem.residency import FRAMED, IN_TRANSFER, RESIDENT, TRANSITIONS, BundleRecord, Event, IllegalTransition, State

SPEC = BundleSpec(1, Kind.PARAM, "layers.0", 3)
UNKNOWN = [pair for pair in itertools.product(State, Event) if pair not in TRANSITIONS]


def record(state: State = State.ABSENT, version: int = 0, flash_version: int = 0, frames: int = 3) -> BundleRecord:
    return BundleRecord(7, SPEC, frames, state, ((0, frames),) if state in FRAMED else (), version, flash_version)


@pytest.mark.parametrize(("before", "event"), TRANSITIONS, ids=lambda value: value.value)
def test_an_event_that_the_table_knows_is_followed(before: State, event: Event) -> None:
    bundle = record(before)
    bundle.apply(event)
    assert bundle.state == TRANSITIONS[before, event]
    assert list(bundle.history) == [f"{before.value} -{event.value}-> {bundle.state.value}"]


@pytest.mark.parametrize(("before", "event"), UNKNOWN, ids=lambda value: value.value)
def test_any_other_event_is_refused_with_the_history(before: State, event: Event) -> None:
    bundle = record(before)
    bundle.history.append("what was before")
    with pytest.raises(IllegalTransition, match="what was before") as caught:
        bundle.apply(event)
    assert bundle.state == before
    for part in ("bundle 7", "layers.0", repr(event.value), before.value):
        assert part in str(caught.value)


def test_history_keeps_the_last_events_only() -> None:
    bundle = record(State.DIRTY, 1)
    for _ in range(100):
        bundle.apply(Event.COMMIT)
    assert len(bundle.history) == 16


def test_every_state_can_be_reached_and_left() -> None:
    reached = {State.ABSENT}
    for _ in State:
        reached |= {after for (before, _), after in TRANSITIONS.items() if before in reached}
    assert reached == set(State)
    assert {before for before, _ in TRANSITIONS} == set(State) - {State.GONE}


def test_every_bundle_can_end() -> None:
    ending = {State.GONE}
    for _ in State:
        ending |= {before for (before, _), after in TRANSITIONS.items() if after in ending}
    assert ending == set(State)


def test_every_event_happens_somewhere() -> None:
    assert {event for _, event in TRANSITIONS} == set(Event)


def test_groups_of_states_agree() -> None:
    assert RESIDENT < FRAMED
    assert IN_TRANSFER < FRAMED
    both = RESIDENT & IN_TRANSFER
    assert both == {State.WRITING}
    # Frames are taken by events that take them, and kept until an event that gives them back.
    taking = {event for (before, event), after in TRANSITIONS.items() if before not in FRAMED and after in FRAMED}
    giving = {event for (before, event), after in TRANSITIONS.items() if before in FRAMED and after not in FRAMED}
    assert taking == {Event.CREATE, Event.LOAD}
    assert giving == {Event.ABANDON, Event.LOAD_FAILED, Event.DROP, Event.DISCARD, Event.DRAINED}


def test_frames_in_transfer_are_never_given_back_by_a_client() -> None:
    """A transfer's end, and nothing else, frees or re-uses the frames that it moves."""
    ends = {Event.LOADED, Event.LOAD_FAILED, Event.WRITTEN, Event.WRITE_FAILED, Event.DRAINED, Event.DISCARD}
    for (before, event), after in TRANSITIONS.items():
        if before in IN_TRANSFER:
            assert event in ends
            assert event != Event.DISCARD or after == State.DOOMED


@pytest.mark.parametrize("state", [State.FLASH, State.LOADING, State.CLEAN])
def test_newest_bytes_are_in_flash(state: State) -> None:
    record(state, 2, 2).check_invariants()
    for version, flash_version in ((0, 0), (2, 1), (2, 0)):
        with pytest.raises(AssertionError, match="newest flash copy"):
            record(state, version, flash_version).check_invariants()


@pytest.mark.parametrize("state", [State.DIRTY, State.WRITING])
def test_newest_bytes_are_in_dram(state: State) -> None:
    for flash_version in (0, 1):
        record(state, 2, flash_version).check_invariants()
    for version, flash_version in ((0, 0), (2, 3)):
        with pytest.raises(AssertionError, match="versions"):
            record(state, version, flash_version).check_invariants()


@pytest.mark.parametrize("state", State)
def test_a_state_says_whether_it_costs_frames(state: State) -> None:
    bundle = record(state, 1, 1)
    bundle.check_invariants()
    bundle.runs = () if bundle.runs else ((0, 3),)
    with pytest.raises(AssertionError, match="owns"):
        bundle.check_invariants()
