"""When gradients are complete, whether a step will confirm what was done then, and whether that is faster."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiermem_client.rhythm import (
    FIRST_HOLD,
    FIRST_PAUSE,
    LONGEST_HOLD,
    LONGEST_PAUSE,
    PAYS_BELOW,
    PROBES,
    TRIAL,
    Rhythm,
    Trial,
    Trust,
)

GROUPS = {"w": "block", "b": "block", "head": "head"}


def completed(rhythm: Rhythm[str, str], parameters: str) -> list[str]:
    return [group for p in parameters.split() if (group := rhythm.accumulated(p)) is not None]


# -- rhythm


def test_a_group_is_complete_with_the_last_of_as_many_accumulations_as_in_the_step_before() -> None:
    rhythm = Rhythm(GROUPS)
    assert completed(rhythm, "head b w head b w") == []
    rhythm.stepped()
    assert completed(rhythm, "head b w b head") == ["head"]
    assert completed(rhythm, "w other") == ["block"]


def test_more_than_before_is_not_complete_and_fewer_is_not_either() -> None:
    rhythm = Rhythm(GROUPS)
    completed(rhythm, "w b")
    rhythm.stepped()
    assert completed(rhythm, "w w b") == []
    rhythm.stepped()
    assert completed(rhythm, "w b") == []
    rhythm.stepped()
    assert completed(rhythm, "b w") == ["block"]


# -- trust


def outcome(trust: Trust, right: bool) -> int:
    """One step in which all that may be tried is; how many were, of ten."""
    tried = 0
    while tried < 10 and trust.allows(tried):
        tried += 1
    trust.stepped([right] * tried)
    return tried


def test_one_is_tried_until_it_was_confirmed_often_enough_then_all() -> None:
    trust = Trust()
    assert [outcome(trust, True) for _ in range(PROBES + 2)] == [1] * PROBES + [10, 10]


def test_pauses_become_longer_with_each_that_had_to_be_undone() -> None:
    trust = Trust()
    tried = [outcome(trust, False) for _ in range(3000)]
    ones = [at for at, number in enumerate(tried) if number]
    pauses = [later - earlier - 1 for earlier, later in pairwise(ones)]
    assert set(tried) == {0, 1}
    assert pauses[:3] == [FIRST_PAUSE, 2 * FIRST_PAUSE, 4 * FIRST_PAUSE]
    assert max(pauses) == pauses[-1] == LONGEST_PAUSE


def test_steps_in_which_nothing_was_tried_take_no_trust_away() -> None:
    trust = Trust()
    for _ in range(PROBES):
        outcome(trust, True)
    trust.stepped([])
    assert outcome(trust, True) == 10


# -- trial


def trial_of(with_s: float, without_s: float, steps: int, trial: Trial | None = None) -> tuple[Trial, list[bool]]:
    trial, wanted = trial or Trial(), []
    for _ in range(steps):
        wanted.append(trial.wants)
        trial.stepped(with_s if trial.wants else without_s)
    return trial, wanted


@pytest.mark.parametrize("pays", [True, False])
def test_what_is_faster_is_kept_and_measured_again(pays: bool) -> None:
    trial, wanted = trial_of(1.0, 2.0 if pays else 1.0, 2 * TRIAL + FIRST_HOLD + 2 * TRIAL)
    assert trial.pays is pays
    both = [True] * TRIAL + [False] * TRIAL
    assert wanted == [*both, *[pays] * FIRST_HOLD, *both]


def test_a_gain_within_noise_does_not_pay() -> None:
    assert trial_of(PAYS_BELOW * 0.99, 1.0, 2 * TRIAL)[0].pays is True
    assert trial_of(PAYS_BELOW, 1.0, 2 * TRIAL)[0].pays is False


def test_the_first_step_of_either_and_one_that_was_interrupted_for_long_do_not_decide() -> None:
    trial = Trial()
    for seconds in (50.0, 1.0, 70.0, 1.0, 0.1, 2.0, 2.0, 90.0):
        trial.stepped(seconds)
    assert (trial.with_s, trial.without_s) == (1.0, 2.0)


def test_a_changed_answer_is_held_for_a_short_time_again() -> None:
    trial, _ = trial_of(1.0, 2.0, 2 * TRIAL + FIRST_HOLD + 2 * TRIAL + 2 * FIRST_HOLD)
    assert trial.pays is True
    _, wanted = trial_of(2.0, 1.0, 2 * TRIAL + FIRST_HOLD + 1, trial)
    assert wanted == [True] * TRIAL + [False] * (TRIAL + FIRST_HOLD) + [True]


def test_what_is_being_measured_begins_anew_after_a_step_of_the_other_kind() -> None:
    trial = Trial()
    trial_of(1.0, 2.0, TRIAL - 1, trial)
    trial.interrupted()
    assert trial_of(1.0, 2.0, TRIAL + 1, trial)[1] == [True] * TRIAL + [False]


@given(st.floats(0.01, 100), st.floats(0.01, 100))
def test_little_time_is_spent_on_measuring(with_s: float, without_s: float) -> None:
    steps = 20 * LONGEST_HOLD
    trial, wanted = trial_of(with_s, without_s, steps)
    assert trial.pays is (with_s < PAYS_BELOW * without_s)
    assert sum(want is not trial.pays for want in wanted) < steps / 100
