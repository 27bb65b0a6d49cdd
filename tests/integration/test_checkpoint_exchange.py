"""Checkpoints are plain torch's in both directions: trained some steps, saved, loaded by a new process and continued,
with or without tiermem on either side, a training ends bit for bit as if nobody had interrupted it.
"""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from tests.integration import matrix
from tests.integration.daemon_process import Daemon, environment, serve
from tests.integration.scripts import Seen, Training, begin, differences, managed

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
# Who saves, who continues, and from which of the files; "late": attached before loading, which then is through hooks.
DIRECTIONS = (
    ("plain", "ours", "torch"),
    ("plain", "ours late", "safetensors"),
    ("ours", "plain", "torch"),
    ("ours", "plain", "safetensors"),
    ("ours", "ours", "safetensors"),
    ("ours", "ours late", "torch"),
)


def save(training: Training, directory: Path) -> None:
    """As a careful script does: all that the next steps depend on. The model twice, in both formats."""
    directory.mkdir()
    torch.save(training.model.state_dict(), directory / "model.pt")
    safetensors.torch.save_model(training.model, str(directory / "model.safetensors"))
    rest = {
        "optimizer": training.optimizer.state_dict(),
        "schedule": training.schedule and training.schedule.state_dict(),
        "scaler": training.scaler and training.scaler.state_dict(),
        "done": training.done,
        "rng": torch.get_rng_state(),
    }
    torch.save(rest, directory / "rest.pt")


def load(training: Training, directory: Path, file: str) -> None:
    if file == "torch":
        training.model.load_state_dict(torch.load(directory / "model.pt"))
    else:
        safetensors.torch.load_model(training.model, directory / "model.safetensors")
    rest = torch.load(directory / "rest.pt")
    training.optimizer.load_state_dict(rest["optimizer"])
    if training.schedule is not None:
        training.schedule.load_state_dict(rest["schedule"])
    if training.scaler is not None:
        training.scaler.load_state_dict(rest["scaler"])
    training.done = rest["done"]
    for _ in range(training.done * training.script.microbatches):
        next(training.data)
    torch.set_rng_state(rest["rng"])


def as_table(seen: Seen) -> dict[str, Any]:
    """What is compared, in a form that torch.load trusts."""
    return {f.name: getattr(seen, f.name) for f in dataclasses.fields(seen) if f.name != "stats"}


def continue_training(case: str, saver: str, reader: str, file: str, directory: Path, endpoint: str) -> dict[str, Any]:
    """What the new process does, for one direction."""
    training = begin(matrix.script(CASES[case]))
    torch.manual_seed(99)  # the saved state is to decide, not that both processes began alike
    if reader != "ours late":
        load(training, directory / saver, file)
    if reader == "plain":
        training.steps(AFTER)
    else:
        with managed(training, endpoint=endpoint):
            if reader == "ours late":
                load(training, directory / saver, file)
            training.steps(AFTER)
        assert training.seen.stats is not None
        assert training.seen.stats.links["flash_to_dram"].bytes > 0, "everything fitted: the case shows nothing"
    return as_table(training.finish())


def continue_everything(case: str, directory: str, endpoint: str) -> None:
    """The new process."""
    torch.set_num_threads(1)
    seen = {" ".join(d): continue_training(case, *d, Path(directory), endpoint) for d in DIRECTIONS}
    torch.save(seen, Path(directory) / "continued.pt")


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with serve(tmp_path_factory.mktemp("exchange"), dram="16MiB") as served:
        yield served


@pytest.mark.parametrize("case", CASES)
def test_continued_in_a_new_process_as_if_never_interrupted(case: str, daemon: Daemon, tmp_path: Path) -> None:
    plain = begin(matrix.script(CASES[case]))
    plain.steps(BEFORE)
    save(plain, tmp_path / "plain")
    plain.seen = Seen()
    plain.steps(AFTER)
    expected = as_table(plain.finish())

    ours = begin(matrix.script(CASES[case]))
    with managed(ours, endpoint=daemon.endpoint):
        ours.steps(BEFORE)
        save(ours, tmp_path / "ours")
        ours.seen = Seen()
        ours.steps(AFTER)
    assert differences(expected, as_table(ours.finish())) == [], "saving has disturbed the training"

    code = (
        "import sys; from tests.integration import test_checkpoint_exchange as t; t.continue_everything(*sys.argv[1:])"
    )
    command = [sys.executable, "-W", "error", "-c", code, case, str(tmp_path), daemon.endpoint]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr[-3000:]
    continued = torch.load(tmp_path / "continued.pt")
    assert {
        name: differences(expected, seen)[:3] for name, seen in continued.items() if differences(expected, seen)
    } == {}


@pytest.mark.parametrize("case", CASES)
def test_files_are_equal_whoever_wrote_them(case: str, daemon: Daemon, tmp_path: Path) -> None:
    for who in ("plain", "ours"):
        training = begin(matrix.script(CASES[case]))
        if who == "plain":
            training.steps(BEFORE)
            save(training, tmp_path / who)
        else:
            with managed(training, endpoint=daemon.endpoint):
                training.steps(BEFORE)
                save(training, tmp_path / who)
    plain, ours = tmp_path / "plain", tmp_path / "ours"
    for name in ("model.pt", "rest.pt"):
        assert differences(torch.load(plain / name), torch.load(ours / name)) == []
    assert (plain / "model.safetensors").read_bytes() == (ours / "model.safetensors").read_bytes()


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
