"""The matrix: every pair of {optimizer, model, precision, microbatches, checkpointing, settings} in some script, run
with and without tiermem in an arena smaller than its state; all that the script can see must be equal, bit for bit.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.integration import matrix
from tests.integration.daemon_process import Daemon, serve, within
from tests.integration.matrix import (
    DIMENSIONS,
    EXCLUSIONS,
    Case,
    Exclusion,
    all_pairs,
    covering_cases,
    name,
    pairs_of,
    script,
)
from tests.integration.scripts import BlockModel, Script, compare, run
from tiermem.units import parse_size

CASES = covering_cases(DIMENSIONS, EXCLUSIONS)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """One for all cases: every case is a job of its own."""
    with serve(tmp_path_factory.mktemp("matrix"), dram="16MiB") as served:
        yield served


@pytest.mark.parametrize("case", CASES, ids=name)
def test_bit_for_bit(case: Case, daemon: Daemon) -> None:
    plain = run(script(case), attached=False)
    managed = run(script(case), attached=True, endpoint=daemon.endpoint)
    assert compare(plain, managed) == []
    assert managed.stats is not None
    assert managed.stats.links["flash_to_dram"].bytes > 0, "everything fitted: the case shows nothing"
    assert managed.stats.fallbacks == ()


class OneSegment(BlockModel):
    """All blocks in one checkpoint: it is recomputed as a whole, and together the blocks are larger than the arena."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__(width=64, blocks=12)
        self.reentrant = reentrant

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        segment = nn.Sequential(*self.blocks)
        return self.head(checkpoint(segment, self.embed(tokens), use_reentrant=self.reentrant))  # type: ignore[no-any-return]


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_over_many_units_needs_one_at_a_time(reentrant: bool, daemon: Daemon) -> None:
    oracle = Script(lambda: OneSegment(reentrant), lambda m: torch.optim.SGD(m.parameters(), lr=0.1), steps=2)
    assert 4 * sum(p.numel() for p in OneSegment(reentrant).blocks.parameters()) > 1.5 * parse_size(oracle.dram)
    plain = run(oracle, attached=False)
    assert compare(plain, run(oracle, attached=True, endpoint=daemon.endpoint)) == []


def test_the_daemon_keeps_nothing_of_the_jobs(daemon: Daemon) -> None:
    files = daemon.settled_files()
    for case in CASES[:2]:
        run(script(case), attached=True, endpoint=daemon.endpoint)
    within(2.0, daemon.left_of_jobs)
    within(
        2.0, lambda: "" if len(daemon.settled_files()) == len(files) else f"{daemon.settled_files()}, before {files}"
    )


def test_every_pair_occurs() -> None:
    occurring = set().union(*map(pairs_of, CASES))
    for one, other in itertools.combinations(DIMENSIONS, 2):
        for values in itertools.product(DIMENSIONS[one], DIMENSIONS[other]):
            pair = dict(zip((one, other), values, strict=True))
            excluded = any(exclusion.values == pair for exclusion in EXCLUSIONS)
            assert (frozenset(pair.items()) in occurring) != excluded, pair


@pytest.mark.parametrize("exclusion", EXCLUSIONS, ids=lambda exclusion: name(exclusion.values))
def test_what_is_excluded_does_not_run_in_plain_torch_either(exclusion: Exclusion) -> None:
    assert exclusion.reason
    with pytest.raises((ValueError, UserWarning), match=r"lr as a Tensor is not|None of the inputs have requires_grad"):
        run(script(matrix.case(**exclusion.values)), attached=False)


def test_no_fewer_cases_than_the_two_largest_dimensions_need_and_hardly_more() -> None:
    one, other = sorted(map(len, DIMENSIONS.values()))[-2:]
    assert one * other <= len(CASES) <= 1.1 * one * other


SMALL = {"a": ("a1", "a2", "a3"), "b": ("b1", "b2"), "c": ("c1", "c2", "c3"), "d": ("d1", "d2")}


@st.composite
def exclusions(draw: st.DrawFn) -> list[Exclusion]:
    found = []
    for _ in range(draw(st.integers(0, 4))):
        chosen = draw(st.lists(st.sampled_from(sorted(SMALL)), min_size=2, max_size=3, unique=True))
        found.append(Exclusion({d: draw(st.sampled_from(SMALL[d])) for d in chosen}, "drawn"))
    return found


@given(exclusions())
def test_generator_covers_what_is_possible_and_nothing_excluded(excluded: list[Exclusion]) -> None:
    everything = [dict(zip(SMALL, row, strict=True)) for row in itertools.product(*SMALL.values())]
    allowed = [case for case in everything if not any(e.holds(case) for e in excluded)]
    possible = set().union(*map(pairs_of, allowed))
    if not possible.issuperset(all_pairs(SMALL, excluded)):
        with pytest.raises(ValueError, match="exclude the pair itself"):
            covering_cases(SMALL, excluded)
        return
    cases = covering_cases(SMALL, excluded)
    assert set().union(*map(pairs_of, cases)) == possible
    assert all(case in allowed for case in cases)
    assert len(cases) <= len(possible)
    assert covering_cases(SMALL, excluded) == cases


def test_generator_without_exclusions_is_near_the_least_possible() -> None:
    assert 9 <= len(covering_cases(SMALL, [])) <= 11
