"""Accuracy on the sequences of training scripts: the share of accesses that were the predicted ones."""

from __future__ import annotations

from collections import Counter

import pytest

from tiermem.plan import Access, Phase
from tiermem.predict import Predictor
from tiermem.replay import Outcome, Replay
from tiermem.testing.access_sequences import SCRIPTS, Script, Update

STEPS, WARM_UP = 60, 12

NEXT_ACCESS = {
    "plain": 1.0,
    "barrier update": 1.0,
    "deferred update": 1.0,
    "update in backward": 1.0,
    "checkpointed blocks": 1.0,
    "checkpointed segments": 1.0,
    "accumulation": 1.0,
    "accumulation, barrier": 1.0,
    "accumulation, deferred": 1.0,
    "accumulation, in backward": 1.0,
    "varying micro-steps": 1.0,
    "varying micro-steps, deferred": 0.99,
    "last partial batch": 0.999,
    "evaluation": 0.9985,
    "generation": 0.997,
    "accumulation, evaluation, generation": 0.999,
    "everything, barrier": 0.999,
    "everything, deferred": 0.999,
    "random evaluations, aborted forwards": 0.984,
    "frozen bottom": 1.0,
    "layer drop": 0.86,
    "experts": 0.76,
    "nearly all experts": 0.94,
    "experts, checkpointed, evaluation": 0.77,
}
"""Least shares. What a sequence draws at random (which experts, whether an evaluation comes) cannot be known."""


def outcomes(script: Script, predictor: Predictor | Replay[Access]) -> Counter[tuple[Phase, Outcome]]:
    counted: Counter[tuple[Phase, Outcome]] = Counter()
    for number, step in enumerate(script.steps(STEPS)):
        for access in step:
            outcome = predictor.observe(access)
            if number >= WARM_UP:
                counted[access.phase, outcome] += 1
    predictor.check_invariants()
    return counted


def share(counted: Counter[tuple[Phase, Outcome]], *phases: Phase) -> float:
    chosen = {key: n for key, n in counted.items() if not phases or key[0] in phases}
    return sum(n for (_, outcome), n in chosen.items() if outcome == Outcome.RIGHT) / sum(chosen.values())


def test_every_script_has_an_accuracy_to_reach() -> None:
    assert NEXT_ACCESS.keys() == SCRIPTS.keys()


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_next_access_is_predicted(name: str) -> None:
    counted = outcomes(SCRIPTS[name], Predictor())
    assert share(counted) >= NEXT_ACCESS[name], counted


@pytest.mark.parametrize("name", SCRIPTS)
def test_backward_is_known_from_the_forward_that_ran(name: str) -> None:
    assert share(outcomes(SCRIPTS[name], Predictor()), Phase.BACKWARD) >= 0.999


@pytest.mark.parametrize("name", ["experts", "nearly all experts", "experts, checkpointed, evaluation", "layer drop"])
def test_the_mirror_is_worth_its_code_where_forwards_differ(name: str) -> None:
    replay, mirrored = outcomes(SCRIPTS[name], Replay()), outcomes(SCRIPTS[name], Predictor())
    assert share(mirrored) > share(replay) + 0.04


def test_recomputation_of_random_experts_is_expected_before_their_backward() -> None:
    counted = outcomes(SCRIPTS["experts, checkpointed, evaluation"], Predictor())
    assert share(counted, Phase.RECOMPUTE) >= 0.98


@pytest.mark.parametrize("seed", range(3))
def test_accuracy_does_not_hang_on_one_seed(seed: int) -> None:
    for name, least in (("random evaluations, aborted forwards", 0.975), ("layer drop", 0.84), ("experts", 0.74)):
        script = SCRIPTS[name]
        other = Script(
            dropped=script.dropped,
            random_evaluations=script.random_evaluations,
            aborted=script.aborted,
            experts=script.experts,
            seed=seed,
        )
        assert share(outcomes(other, Predictor())) >= least, name


def test_long_steps_fit_into_the_history() -> None:
    script = Script(blocks=78, microbatches=16, checkpoint_segment=1, update=Update.BARRIER)
    predictor = Predictor()
    steps = list(script.steps(4))
    assert len(steps[0]) > 80 * 3 * 15
    for step in steps[:2]:
        for access in step:
            predictor.observe(access)
    before = predictor.mispredicted, predictor.predicted
    for step in steps[2:]:
        for access in step:
            assert predictor.observe(access) == Outcome.RIGHT
    assert predictor.mispredicted == before[0]
    assert predictor.predicted == before[1] + 2 * len(steps[0])


def forward(*units: str) -> list[Access]:
    return [Access(unit, Phase.FORWARD) for unit in units]


def backward(*units: str) -> list[Access]:
    return [Access(unit, Phase.BACKWARD) for unit in units]


def recompute(*units: str) -> list[Access]:
    return [Access(unit, Phase.RECOMPUTE) for unit in units]


def seen(accesses: list[Access]) -> Predictor:
    predictor = Predictor()
    for access in accesses:
        predictor.observe(access)
    return predictor


def test_nothing_is_predicted_before_anything_has_repeated() -> None:
    predictor = seen(forward("a", "b", "c"))
    assert predictor.expected is None
    assert predictor.upcoming(3) == []
    assert predictor.next_use(Access("a", Phase.FORWARD)) is None
    assert (predictor.accesses, predictor.predicted, predictor.mispredicted) == (3, 0, 0)


def test_the_first_backward_is_predicted_once_it_has_begun() -> None:
    predictor = seen([*forward("a", "b", "c"), *backward("c")])
    assert list(predictor.upcoming(5)) == backward("b", "a")
    assert predictor.next_use(Access("a", Phase.BACKWARD)) == 2
    assert predictor.next_use(Access("a", Phase.FORWARD)) is None


def test_in_a_forward_the_backward_is_the_mirror_of_what_ran_and_will_run() -> None:
    step = [*forward("a", "b", "c"), *backward("c", "b", "a")]
    predictor = seen([*step, *forward("a", "x", "b")])
    assert list(predictor.upcoming(6)) == [*forward("c"), *backward("c", "b", "x", "a"), *forward("a")]
    assert predictor.next_use(Access("x", Phase.BACKWARD)) == 4


def test_an_evaluation_is_not_mirrored() -> None:
    evaluation = [Access(unit, Phase.FORWARD, False) for unit in ("a", "b")]
    step = [*forward("a", "b"), *backward("b", "a")]
    predictor = seen([*step, *step, *evaluation, *step, *step, evaluation[0]])
    assert predictor.expected == evaluation[1]
    predictor.observe(evaluation[1])
    assert list(predictor.upcoming(4)) == step


def test_segments_of_several_blocks_are_recomputed_together() -> None:
    segment = [*recompute("c", "d"), *backward("d", "c"), *recompute("a", "b"), *backward("b", "a")]
    predictor = seen([*forward("a", "b", "c", "d"), *segment, *forward("a", "x", "b", "c", "d"), *recompute("c")])
    expected = [*recompute("d"), *backward("d", "c"), *recompute("a", "x", "b"), *backward("b", "x", "a")]
    assert list(predictor.upcoming(len(expected))) == expected


def test_two_forwards_before_one_backward_are_mirrored_together() -> None:
    predictor = seen([*forward("a", "b"), *forward("a", "b"), *backward("b")])
    assert list(predictor.upcoming(9)) == backward("a", "b", "a")


def test_replay_takes_any_values() -> None:
    replay: Replay[tuple[int, str]] = Replay()
    for access in [(1, "read"), (2, "read"), (3, "update")] * 2:
        replay.observe(access)
    assert replay.expected == (1, "read")
    assert list(replay.upcoming(4)) == [(1, "read"), (2, "read"), (3, "update"), (1, "read")]
    assert replay.next_use((3, "update")) == 3
    assert replay.next_use((4, "read")) is None


def test_the_longer_match_wins_over_the_later_one() -> None:
    replay: Replay[str] = Replay()
    for access in "xab1" + "yab2" + "xab":
        replay.observe(access)
    assert replay.expected == "1"


def test_of_equal_matches_the_latest_wins() -> None:
    replay: Replay[str] = Replay()
    for access in "a1b" + "a2c" + "d" + "a":
        replay.observe(access)
    assert replay.expected == "2"


def test_a_history_needs_room() -> None:
    with pytest.raises(ValueError, match="history of 0"):
        Replay(0)
