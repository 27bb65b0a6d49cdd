"""Checkpoints are plain torch's in both directions: trained some steps, saved, loaded by a new process and continued,
with or without tiermem on either side, a training ends bit for bit as if nobody had interrupted it.

Two trainings in every direction, and cases with every value of the matrix on every route; `tests/stress` has all cases
of the matrix in all directions.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.integration import matrix
from tests.integration.daemon_process import Daemon, serve
from tests.integration.exchange import (
    DIRECTIONS,
    Continuation,
    Direction,
    as_table,
    continue_anew,
    different_files,
    disagreements,
    expected_of_new_processes,
    load,
    save,
    train_ours,
    train_plain,
)
from tests.integration.scripts import begin, differences

BEFORE, AFTER = 3, 2  # steps; with a GradScaler the second is skipped, so its scale and counters matter

CASES = {
    "Llama": matrix.case(
        optimizer="AdamW fused", model="Llama tied", checkpointing="non-reentrant", settings="scheduler"
    ),
    "GPT-2": matrix.case(
        optimizer="Adafactor", model="GPT-2 dropout", precision="bf16", microbatches="3 microbatches",
        settings="scheduler",
    ),
    "experts": matrix.case(
        optimizer="group counters", model="random experts", precision="fp16 GradScaler", checkpointing="reentrant",
        settings="several groups",
    ),
    "GRU": matrix.case(
        optimizer="RMSprop", model="GRU and convolution", precision="bf16 autocast", settings="tensor lr"
    ),
}  # fmt: skip
MATRIX = matrix.covering_cases(matrix.DIMENSIONS, matrix.EXCLUSIONS)


Route = tuple[str, str]
"""Who saves and who continues."""


def shares() -> dict[Route, list[tuple[matrix.Case, Direction]]]:
    """Cases of the matrix, none twice, with every value of every dimension on every route, whose directions take turns;
    greedily few.
    """
    values = {(dimension, value) for dimension, choices in matrix.DIMENSIONS.items() for value in choices}
    left = list(MATRIX)
    given: dict[Route, list[tuple[matrix.Case, Direction]]] = {}
    for route in dict.fromkeys((direction.saver, direction.reader) for direction in DIRECTIONS):
        turns = itertools.cycle(d for d in DIRECTIONS if (d.saver, d.reader) == route)
        given[route], missing = [], set(values)
        while missing:
            best = max(left, key=lambda case: len(case.items() & missing))
            left.remove(best)
            given[route].append((best, next(turns)))
            missing -= best.items()
    return given


SHARES = shares()


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with serve(tmp_path_factory.mktemp("exchange"), dram="16MiB") as served:
        yield served


@pytest.mark.parametrize("case", ["Llama", "experts"])
def test_continued_in_a_new_process_as_if_never_interrupted(case: str, daemon: Daemon, tmp_path: Path) -> None:
    expected = train_plain(CASES[case], BEFORE, AFTER, tmp_path)
    ours = train_ours(CASES[case], BEFORE, AFTER, tmp_path, daemon.endpoint)
    assert differences(expected, ours) == [], "saving has disturbed the training"
    assert different_files(tmp_path) == [], "the files are not equal whoever wrote them"
    plan = [Continuation(CASES[case], direction, str(tmp_path), AFTER) for direction in DIRECTIONS]
    assert continue_anew(plan, tmp_path, daemon.endpoint, timeout_s=100) == {}
    assert disagreements(plan, [expected] * len(plan)) == {}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("route", SHARES, ids=" to ".join)
def test_every_value_of_the_matrix_in_a_new_process(route: Route, daemon: Daemon, tmp_path: Path) -> None:
    """One new process continues all cases of a route; one step, after one (and a skipped one with a GradScaler)."""
    plan, expected = [], []
    for case, direction in SHARES[route]:
        before, directory = matrix.script(case).steps - 1, tmp_path / matrix.name(case)
        plain = train_plain(case, before, 1, directory)
        expected.append(expected_of_new_processes(case, plain, directory, 1))
        if direction.saver == "ours":
            train_ours(case, before, 0, directory, daemon.endpoint)
        plan.append(Continuation(case, direction, str(directory), 1))
    assert continue_anew(plan, tmp_path, daemon.endpoint, timeout_s=200) == {}
    assert disagreements(plan, expected) == {}


def test_every_value_of_the_matrix_has_every_route_and_every_direction_its_share() -> None:
    for share in SHARES.values():
        for dimension, values in matrix.DIMENSIONS.items():
            assert {case[dimension] for case, _ in share} == set(values)
    taken = [direction for share in SHARES.values() for _, direction in share]
    assert all(taken.count(direction) >= 6 for direction in DIRECTIONS)


@pytest.mark.timeout(300)
def test_what_goes_wrong_is_named_and_the_rest_goes_on(tmp_path: Path) -> None:
    """One file cannot be read, in another the least bit of a weight is not what was saved."""
    direction = Direction("plain", "plain", "torch")
    plan, expected = [], []
    for name in ("GRU", "Llama", "experts"):
        expected.append(train_plain(CASES[name], 1, 1, tmp_path / name))
        plan.append(Continuation(CASES[name], direction, str(tmp_path / name), 1))
    (tmp_path / "GRU" / "plain" / "rest.pt").write_bytes(b"nothing")
    saved = torch.load(tmp_path / "Llama" / "plain" / "model.pt")
    first = saved["model.norm.weight"]
    first.view(torch.int32)[0] ^= 1
    torch.save(saved, tmp_path / "Llama" / "plain" / "model.pt")
    failed = continue_anew(plan, tmp_path, "", timeout_s=100)
    assert list(failed) == [str(plan[0])]
    assert "UnpicklingError" in failed[str(plan[0])]
    assert list(disagreements(plan, expected)) == [str(plan[1])]
    assert plan[2].outcome.exists()


def test_the_saved_state_decides(tmp_path: Path) -> None:
    """Each part of a checkpoint changes what follows; otherwise the tests above would not notice that it is ignored."""
    script = dataclasses.replace(matrix.script(CASES["GPT-2"]), microbatches=1)
    first = begin(script)
    first.steps(BEFORE)
    save(first, tmp_path / "saved")
    outcomes = []
    for part in ("", "optimizer", "schedule", "rng"):
        training = begin(script)
        blank = {"optimizer": training.optimizer.state_dict(), "rng": torch.get_rng_state()}
        blank["schedule"] = training.schedule.state_dict() if training.schedule is not None else {}
        rest = torch.load(tmp_path / "saved" / "rest.pt")
        directory = tmp_path / f"without-{part}"
        directory.mkdir()
        (directory / "model.pt").symlink_to(tmp_path / "saved" / "model.pt")
        torch.save({**rest, **({part: blank[part]} if part else {})}, directory / "rest.pt")
        load(training, directory, "torch")
        training.steps(AFTER)
        outcomes.append(as_table(training.finish())["parameters"])
    assert all(differences(outcomes[0], other) for other in outcomes[1:])
