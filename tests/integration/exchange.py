"""A training is saved, and new processes load it and go on, with or without tiermem on either side.

`python -m tests.integration.exchange PLAN` is the new process: it continues what the plan lists and has no outcome yet.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from tests.integration import matrix
from tests.integration.daemon_process import environment
from tests.integration.scripts import Seen, Training, begin, differences, managed


@dataclass(frozen=True)
class Direction:
    """Who saves, who continues, and from which of the files; `late`: attached before loading, which then is through
    hooks.
    """

    saver: str  # "plain" or "ours"
    reader: str
    file: str  # "torch" or "safetensors"
    late: bool = False

    def __str__(self) -> str:
        return f"{self.saver} to {self.reader}{' late' if self.late else ''}, {self.file}"


DIRECTIONS = (
    Direction("plain", "ours", "torch"),
    Direction("plain", "ours", "safetensors", late=True),
    Direction("ours", "plain", "torch"),
    Direction("ours", "plain", "safetensors"),
    Direction("ours", "ours", "safetensors"),
    Direction("ours", "ours", "torch", late=True),
)

NOT_EXACT_IN_TORCH = matrix.Exclusion(
    {"optimizer": "NAdam", "precision": "bf16"},
    "torch's Optimizer.load_state_dict rounds the product of momenta, an fp32 scalar, to the parameters' dtype",
)


@dataclass(frozen=True)
class Continuation:
    """What a new process does once: `directory` holds the saved training, and takes the outcome."""

    case: matrix.Case
    direction: Direction
    directory: str
    steps: int

    @property
    def outcome(self) -> Path:
        return Path(self.directory) / f"{self.direction}.pt"

    def __str__(self) -> str:
        return f"{self.direction}: {matrix.name(self.case)}"


def save(training: Training, directory: Path) -> None:
    """As a careful script does: all that the next steps depend on. The model twice, in both formats."""
    directory.mkdir(parents=True)
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


def train_plain(case: matrix.Case, before: int, after: int, directory: Path) -> dict[str, Any]:
    """Save below `directory` after some steps and go on; what is seen after saving."""
    with _named(case):
        training = begin(matrix.script(case))
        _save_between(training, before, after, directory / "plain")
        return as_table(training.finish())


def train_ours(case: matrix.Case, before: int, after: int, directory: Path, endpoint: str) -> dict[str, Any]:
    """The same, attached to the daemon at `endpoint`."""
    with _named(case):
        training = begin(matrix.script(case))
        with managed(training, endpoint=endpoint):
            _save_between(training, before, after, directory / "ours")
        return as_table(training.finish())


def _save_between(training: Training, before: int, after: int, directory: Path) -> None:
    training.steps(before)
    save(training, directory)
    training.model.zero_grad()  # none is saved, and no optimizer clears those of parameters that it does not have
    training.seen = Seen()
    training.steps(after)


@contextlib.contextmanager
def _named(case: matrix.Case) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        error.add_note(f"the case: {matrix.name(case)}")
        raise


def expected_of_new_processes(case: matrix.Case, uninterrupted: dict[str, Any], directory: Path, steps: int) -> Any:
    """What a training of `train_plain` is to see after loading: what the uninterrupted one has seen. Where torch itself
    does not get there, what plain torch sees.
    """
    if not NOT_EXACT_IN_TORCH.holds(case):
        return uninterrupted
    with _named(case):
        plain = _continue(Continuation(case, Direction("plain", "plain", "torch"), str(directory), steps), "")
        assert differences(uninterrupted, plain), f"torch has become exact: {NOT_EXACT_IN_TORCH}"
    return plain


def different_files(directory: Path) -> list[str]:
    """In what the files of `train_plain` and `train_ours` differ."""
    plain, ours = directory / "plain", directory / "ours"
    found = []
    for name in ("model.pt", "rest.pt"):
        found += differences(torch.load(plain / name), torch.load(ours / name), name)
    if _parts_of_safetensors(plain / "model.safetensors") != _parts_of_safetensors(ours / "model.safetensors"):
        found.append("model.safetensors")
    return found


def _parts_of_safetensors(path: Path) -> tuple[Any, bytes]:
    """The header as a table and the bytes after it. The library writes what it says of tied tensors (`encoder` has two)
    in another order every time.
    """
    data = path.read_bytes()
    (header_bytes,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + header_bytes]), data[8 + header_bytes :]


def continue_anew(plan: Sequence[Continuation], directory: Path, endpoint: str, timeout_s: float) -> dict[str, str]:
    """Do all of the plan in one new process, which leaves the outcomes; in a further one where one has ended early.

    Returns by name what ended its process, with the end of standard error.
    """
    path = directory / "plan.json"
    failed: dict[str, str] = {}
    while open_ := [c for c in plan if not c.outcome.exists() and str(c) not in failed]:
        path.write_text(json.dumps({"endpoint": endpoint, "open": [dataclasses.asdict(c) for c in open_]}))
        command = [sys.executable, "-W", "error", "-m", "tests.integration.exchange", str(path)]
        done = subprocess.run(
            command, env=environment(), capture_output=True, text=True, check=False, timeout=timeout_s
        )
        left = [c for c in open_ if not c.outcome.exists()]
        if left:
            failed[str(left[0])] = f"exit code {done.returncode}: {done.stderr[-3000:]}"
        elif done.returncode:
            failed["after the last"] = f"exit code {done.returncode}: {done.stderr[-3000:]}"
    return failed


def disagreements(plan: Sequence[Continuation], expected: Sequence[dict[str, Any]]) -> dict[str, list[str]]:
    """By name, the first differences of every outcome that is not what its uninterrupted training has seen."""
    found = {}
    for continuation, one in zip(plan, expected, strict=True):
        if continuation.outcome.exists():
            found[str(continuation)] = differences(one, torch.load(continuation.outcome))[:3]
    return {name: lines for name, lines in found.items() if lines}


def _continue(continuation: Continuation, endpoint: str) -> dict[str, Any]:
    direction = continuation.direction
    saved = Path(continuation.directory) / direction.saver
    training = begin(matrix.script(continuation.case))
    torch.manual_seed(99)  # the saved state is to decide, not that both processes began alike
    if not direction.late:
        load(training, saved, direction.file)
    if direction.reader == "plain":
        training.steps(continuation.steps)
    else:
        with managed(training, endpoint=endpoint):
            if direction.late:
                load(training, saved, direction.file)
            training.steps(continuation.steps)
        assert training.seen.stats is not None
        assert training.seen.stats.links["flash_to_dram"].bytes > 0, "everything fitted: the case shows nothing"
    return as_table(training.finish())


def main(path: str) -> None:
    """The new process. An outcome appears at once and whole, so that its absence names what went wrong."""
    torch.set_num_threads(1)
    plan = json.loads(Path(path).read_text())
    for entry in plan["open"]:
        continuation = Continuation(**{**entry, "direction": Direction(**entry["direction"])})
        unfinished = continuation.outcome.with_suffix(".part")
        torch.save(_continue(continuation, plan["endpoint"]), unfinished)
        unfinished.rename(continuation.outcome)


if __name__ == "__main__":
    main(sys.argv[1])
