"""Every case of the matrix is saved with and without tiermem, and new processes continue it in every direction."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration import matrix
from tests.integration.daemon_process import Daemon, serve
from tests.integration.exchange import (
    DIRECTIONS,
    Continuation,
    continue_anew,
    different_files,
    disagreements,
    expected_of_new_processes,
    train_ours,
    train_plain,
)
from tests.integration.scripts import differences

CASES = matrix.covering_cases(matrix.DIMENSIONS, matrix.EXCLUSIONS)
AFTER = 1  # step in the new process; before it as many as the case has, with a GradScaler one that is skipped


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with serve(tmp_path_factory.mktemp("exchange"), dram="16MiB") as served:
        yield served


@pytest.mark.stress
@pytest.mark.parametrize("optimizer", matrix.OPTIMIZERS)
def test_every_case_continues_in_every_direction(optimizer: str, daemon: Daemon, tmp_path: Path) -> None:
    """One new process for all cases of an optimizer."""
    disturbed, files, plan, expected = {}, {}, [], []
    for case in (case for case in CASES if case["optimizer"] == optimizer):
        name, before, directory = matrix.name(case), matrix.script(case).steps, tmp_path / matrix.name(case)
        plain = train_plain(case, before, AFTER, directory)
        disturbed[name] = differences(plain, train_ours(case, before, AFTER, directory, daemon.endpoint))[:3]
        files[name] = different_files(directory)[:3]
        plan += [Continuation(case, direction, str(directory), AFTER) for direction in DIRECTIONS]
        expected += [expected_of_new_processes(case, plain, directory, AFTER)] * len(DIRECTIONS)
    assert len(plan) >= len(matrix.DIMENSIONS["model"]) * len(DIRECTIONS)
    assert continue_anew(plan, tmp_path, daemon.endpoint, timeout_s=3000) == {}
    assert disagreements(plan, expected) == {}
    assert {name: lines for name, lines in disturbed.items() if lines} == {}, "saving has disturbed these"
    assert {name: lines for name, lines in files.items() if lines} == {}, "these files are not equal whoever wrote them"
