from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tiermem.plan import Access, Phase
from tiermem.predict import MAX_TRUST, Predictor
from tiermem.replay import Outcome, Replay
from tiermem.testing.access_sequences import Experts, Script, Update

ACCESSES = st.builds(Access, st.integers(0, 5), st.sampled_from(Phase), st.booleans())
WORDS = st.lists(ACCESSES, max_size=60)
SCRIPTS = st.builds(
    Script,
    blocks=st.integers(1, 4),
    microbatches=st.integers(1, 2),
    update=st.sampled_from(Update),
    checkpoint_segment=st.integers(0, 3),
    frozen=st.integers(0, 3),
    evaluate_every=st.integers(0, 3),
    evaluation_batches=st.integers(1, 2),
    dropped=st.sampled_from([0.0, 0.2]),
    aborted=st.sampled_from([0.0, 0.3]),
    experts=st.sampled_from([None, Experts(3, 1, 2)]),
    seed=st.integers(0, 99),
)
SEQUENCES = st.one_of(WORDS, SCRIPTS.map(lambda script: script.accesses(4)))
ALL = [Access(unit, phase, training) for unit in range(6) for phase in Phase for training in (True, False)]


@given(SEQUENCES, st.integers(1, 40))
@settings(deadline=None)
def test_any_sequence_is_taken_in_bounded_memory(sequence: list[Access], capacity: int) -> None:
    predictor, replay = Predictor(capacity), Replay[Access](capacity)
    for access in sequence:
        expected = predictor.expected
        assert list(predictor.upcoming(1)) == ([] if expected is None else [expected])
        outcome = predictor.observe(access)
        assert (outcome == Outcome.RIGHT) == (expected == access)
        replay.observe(access)
        assert len(replay) <= 2 * capacity
        predictor.upcoming(5)
    predictor.check_invariants()
    replay.check_invariants()
    assert predictor.accesses == len(sequence)


@given(SEQUENCES)
@settings(deadline=None)
def test_what_is_predicted_depends_on_the_sequence_alone(sequence: list[Access]) -> None:
    asked, other = Predictor(), Predictor()
    for access in sequence:
        asked.upcoming(5)
        asked.next_use(access)
        asked.observe(access)
        other.observe(access)
    assert list(asked.upcoming(50)) == list(other.upcoming(50))


@given(SEQUENCES)
@settings(deadline=None)
def test_next_use_is_the_place_in_what_is_upcoming(sequence: list[Access]) -> None:
    predictor = Predictor()
    for number, access in enumerate(sequence):
        predictor.observe(access)
        if number % 7 > 1:  # twice in a row: answers are kept while the prediction holds
            continue
        places: dict[Access, int] = {}
        for place, upcoming in enumerate(predictor.upcoming(3 * len(sequence)), 1):
            places.setdefault(upcoming, place)
        for wanted in {*ALL, *sequence[:20]}:
            assert predictor.next_use(wanted) == places.get(wanted), (number, wanted)


@given(SEQUENCES)
@settings(deadline=None)
def test_while_the_generation_lasts_the_prediction_only_gets_shorter(sequence: list[Access]) -> None:
    predictor = Predictor()
    for access in sequence:
        before, generation = list(predictor.upcoming(60)), predictor.generation
        predictor.observe(access)
        if predictor.generation == generation:
            assert before[1:] == list(predictor.upcoming(60))[: max(0, len(before) - 1)]


@given(st.lists(ACCESSES, min_size=1, max_size=100), st.integers(1, 2))
@settings(deadline=None)
def test_a_cycle_with_a_landmark_is_replayed_perfectly_after_two_periods(period: list[Access], cycles: int) -> None:
    """The landmark, an access that occurs once in a period, tells where in the period the present is."""
    period = [*period, Access("landmark", Phase.UPDATE)]
    replay, predictor = Replay[Access](), Predictor()
    for access in period * 2:
        replay.observe(access)
        predictor.observe(access)
    wrong = 0
    for access in period * cycles:
        assert replay.observe(access) == Outcome.RIGHT
        wrong += predictor.observe(access) != Outcome.RIGHT
    assert wrong <= 2 * MAX_TRUST + 1, "after that many disagreements the mirror is not asked any more"


@given(st.lists(ACCESSES, min_size=1, max_size=30))
@settings(deadline=None)
def test_any_short_cycle_is_replayed_perfectly_after_three_periods(period: list[Access]) -> None:
    replay = Replay[Access]()
    outcomes = [replay.observe(access) for access in period * 6]
    assert all(outcome == Outcome.RIGHT for outcome in outcomes[3 * len(period) :])


@given(
    st.integers(1, 8),
    st.integers(1, 4),
    st.sampled_from([Update.BARRIER, Update.DEFERRED]),
    st.integers(0, 3),
    st.integers(0, 4),
)
@settings(deadline=None)
def test_regular_training_is_predicted_perfectly_after_a_few_steps(
    blocks: int, microbatches: int, update: Update, segment: int, frozen: int
) -> None:
    script = Script(
        blocks=blocks, microbatches=microbatches, update=update, checkpoint_segment=segment, frozen=min(frozen, blocks)
    )
    predictor = Predictor()
    for number, step in enumerate(script.steps(8)):
        for access in step:
            outcome = predictor.observe(access)
            assert number < 5 or outcome == Outcome.RIGHT, (number, access)
