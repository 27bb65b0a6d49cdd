"""The matrix's diagonal with `backward` called in another thread, and with the interpreter switching threads at random
times: what a script sees is the same, bit for bit.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from tests.conftest import Belongings
from tests.integration.daemon_process import Daemon, serve, within
from tests.integration.matrix import DIMENSIONS, EXCLUSIONS, OPTIMIZERS, covering_cases, name, script
from tests.integration.matrix_models import MODELS
from tests.integration.scripts import compare, run

# One case for every optimizer and every model: the cases on a diagonal of the two.
_PAIRS = list(zip(OPTIMIZERS, [*list(MODELS)[3:], *list(MODELS)[:3]], strict=True))
CASES = [c for c in covering_cases(DIMENSIONS, EXCLUSIONS) if (c["optimizer"], c["model"]) in _PAIRS]


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with serve(tmp_path_factory.mktemp("threads"), dram="16MiB") as served:
        yield served


@pytest.fixture(autouse=True)
def _switch_interval_as_before() -> Iterator[None]:
    before_s = sys.getswitchinterval()
    yield
    sys.setswitchinterval(before_s)


def in_another_thread(seed: int, used: set[str]) -> Callable[[torch.Tensor], None]:
    """A backward that runs in a new thread; `used` gets the threads' names."""
    draw = random.Random(seed)

    def work(loss: torch.Tensor) -> None:
        used.add(threading.current_thread().name)
        loss.backward()

    def backward(loss: torch.Tensor) -> None:
        sys.setswitchinterval(10 ** draw.uniform(-6, -3))
        with ThreadPoolExecutor(1, "backward") as pool:
            pool.submit(work, loss).result()

    return backward


@pytest.mark.parametrize("case", CASES, ids=name)
def test_bit_for_bit(case: dict[str, str], daemon: Daemon) -> None:
    used: set[str] = set()
    plain = run(script(case), attached=False)
    threaded = replace(script(case), backward=in_another_thread(CASES.index(case), used))
    managed = run(threaded, attached=True, endpoint=daemon.endpoint)
    assert compare(plain, managed) == []
    assert used == {"backward_0"}
    assert managed.stats is not None
    assert managed.stats.links["flash_to_dram"].bytes > 0, "everything fitted: the case shows nothing"


def test_diagonal_has_every_value() -> None:
    for dimension, values in DIMENSIONS.items():
        assert {case[dimension] for case in CASES} == set(values)


def test_nothing_is_left_behind(daemon: Daemon) -> None:
    """No file, thread, process or mapping here, nothing in the daemon; while it runs there is something to find."""
    running: list[str] = []

    def look(*_: object) -> None:
        running.extend(Belongings.now().left_since(before))

    files = daemon.settled_files()
    for seed, case in enumerate(CASES[:4]):
        before = Belongings.now()
        running.clear()
        run(
            replace(script(case), backward=in_another_thread(seed, set()), between=look),
            attached=True,
            endpoint=daemon.endpoint,
        )
        assert any("shared memory" in line for line in running), "the check sees nothing of a running job"
        within(3.0, lambda: "; ".join(Belongings.now().left_since(before)))  # noqa: B023 - called at once
    within(3.0, daemon.left_of_jobs)
    within(3.0, lambda: "" if len(daemon.settled_files()) <= len(files) else f"{daemon.settled_files()}: was {files}")
