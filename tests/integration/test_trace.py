"""A step as a trace: units, waits, grants and transfers of trainer and daemon, on one clock."""

from __future__ import annotations

import itertools
import json
import logging
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import tiermem
from tests.integration.daemon_process import within
from tests.integration.tiny_training import DRAM, make, train
from tiermem.errors import DaemonUnavailable, InvalidArgument
from tiermem.stats import Link, StallCause
from tiermem.trace import Span
from tiermem_daemon.cli import main

BLOCKS = [f"blocks.{n}" for n in range(5)]
FORWARD = [f"forward {unit}" for unit in ("embed", *BLOCKS, "head")]
BACKWARD = [f"backward {unit}" for unit in ("head", *reversed(BLOCKS), "embed")]


class Trace:
    """A file, by process and row."""

    def __init__(self, path: Path) -> None:
        document: dict[str, Any] = json.loads(path.read_text())
        self.events, self.notes = document["traceEvents"], document["otherData"]["notes"]
        self.pids = {e["args"]["name"]: e["pid"] for e in self.events if e["name"] == "process_name"}
        names = {(e["pid"], e["tid"]): e["args"]["name"] for e in self.events if e["name"] == "thread_name"}
        self.rows: dict[str, list[dict[str, Any]]] = {name: [] for name in names.values()}
        for event in self.events:
            if event["ph"] in ("X", "i"):
                self.rows[names[event["pid"], event["tid"]]].append(event)

    def of(self, *starts: str) -> list[dict[str, Any]]:
        """What is on rows whose names begin so, in time."""
        events = [e for name, row in self.rows.items() if name.startswith(starts) for e in row]
        return sorted(events, key=lambda e: float(e["ts"]))

    def end(self, event: dict[str, Any]) -> float:
        return float(event["ts"] + event.get("dur", 0.0))


@contextmanager
def training(directory: Path, dram: str = DRAM, **options: Any) -> Iterator[tuple[tiermem.Job, Any]]:
    """A job with a daemon of its own, and what makes so many steps."""
    model, optimizer, data = make()
    with tiermem.attach(model, optimizer, dram=dram, flash=directory / "flash", endpoint="embedded", **options) as job:
        yield job, lambda steps: train(model, optimizer, data, steps)


def daemon_spans(job: tiermem.Job) -> tuple[Span, ...]:
    """Everything since attach."""
    [process] = job.residency.session.daemon_trace(0.0, 10.0)
    return process.spans


def test_a_deferred_update_is_traced_before_its_units_forward(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    with training(tmp_path) as (job, steps):
        steps(2)
        job.trace(file)
        steps(1)
    names = [e["name"] for e in Trace(file).of("units")]
    first_update = {unit: next(i for i, n in enumerate(names) if n.startswith(f"update {unit}/")) for unit in BLOCKS}
    assert all(first_update[unit] < names.index(f"forward {unit}") for unit in BLOCKS), names
    assert names.index(f"forward {BLOCKS[0]}") < first_update[BLOCKS[1]], (
        "all updates were done before the first forward"
    )


def test_two_steps_are_traced_in_trainer_and_daemon(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    with training(tmp_path, deferred=False) as (job, steps):
        steps(1)
        job.trace(file, steps=2)
        steps(1)
        assert not file.exists()
        steps(1)
        assert file.exists()
        steps(1)
        trace = Trace(file)
        assert trace.pids == {"trainer": os.getpid(), "tiermemd": job.residency.session.connection.info.pid}
    assert trace.notes == ""
    assert [e["name"] for e in trace.of("steps")] == ["optimizer.step()"] * 2

    units = trace.of("units")
    passes = [e["name"] for e in units if not e["name"].startswith("update ")]
    assert passes == [*FORWARD, *BACKWARD] * 2
    updated = Counter(e["name"].removeprefix("update ").split("/")[0] for e in units if e["name"].startswith("update "))
    assert updated.keys() == {"embed", *BLOCKS, "head"}
    assert all(count % 2 == 0 for count in updated.values())
    for row in trace.rows.values():
        for one, following in itertools.pairwise(row):
            assert trace.end(one) <= following["ts"] + 0.01

    first, last = trace.of("steps")
    transfers = trace.of(*Link)
    assert {e["name"].split()[0] for e in transfers} == {"read", "write"}
    assert all(e["args"]["bytes"] > 0 for e in transfers)
    inside = [e for e in transfers if trace.end(first) <= e["ts"] and trace.end(e) <= trace.end(last)]
    assert inside, "the second step moves bytes"


def test_both_processes_are_on_one_clock(tmp_path: Path) -> None:
    """What the daemon does for a demand lies within the trainer's wait for it, and an arrow joins the two."""
    file = tmp_path / "trace.json"
    with training(tmp_path) as (job, steps):
        job.trace(file, steps=3)
        steps(3)
    trace = Trace(file)
    waits = {e["args"]["epoch"]: e for e in trace.of("waits")}
    demands = {e["args"]["epoch"]: e for e in trace.of("demand ")}
    assert waits and waits.keys() == demands.keys()
    for epoch, wait in waits.items():
        assert wait["name"] == demands[epoch]["name"]
        assert wait["args"]["bundle"] == demands[epoch]["args"]["bundle"]
        assert wait["ts"] <= demands[epoch]["ts"]
        assert trace.end(demands[epoch]) <= trace.end(wait)
    arrows = Counter(e["id"] for e in trace.events if e["ph"] in ("s", "f"))
    assert set(arrows.values()) == {2}
    assert arrows.keys() <= waits.keys()


def test_bytes_and_waits_are_those_that_are_counted(tmp_path: Path) -> None:
    """Over the whole job: what runs ahead is in one of the two a moment before it is in the other."""
    with training(tmp_path) as (job, steps):
        steps(3)

        def difference() -> str:
            stats, spans = job.stats(), daemon_spans(job)
            moved = {link: sum(s.nbytes for s in spans if s.track.startswith(link)) for link in Link}
            counted = {link: stats.links[link].bytes for link in Link}
            return "" if moved == counted else f"{moved} in the trace, {counted} are counted"

        within(5, difference)
        assert job.stats().links[Link.FLASH_TO_DRAM].bytes > 0
        waits = [s for s in job.residency.session.trace.since(0.0).spans if s.track == "waits"]
        stats = job.stats()
        assert sum(s.end_s - s.start_s for s in waits) == pytest.approx(stats.stall_s)
        demands = [s for s in daemon_spans(job) if s.track.startswith("demand ")]
        assert len(demands) == len(waits) == stats.residency.demands
        stalls = json.loads(job.residency.session.status())["jobs"][0]["stall_seconds"]
        for cause in StallCause:
            waited_s = sum(s.end_s - s.start_s for s in demands if s.track == f"demand {cause}")
            assert waited_s == pytest.approx(stalls[cause])
        assert sum(stalls.values()) > 0
        assert sum(s.track == "push" for s in daemon_spans(job)) == stats.pushes["sent"]


def test_units_are_traced_where_everything_fits(tmp_path: Path) -> None:
    """Then nothing is said to the daemon, and nothing is waited for."""
    file = tmp_path / "trace.json"
    with training(tmp_path, dram="16MiB") as (job, steps):
        steps(1)
        job.trace(file)
        steps(1)
    trace = Trace(file)
    assert [e["name"] for e in trace.of("units") if "update" not in e["name"]] == [*FORWARD, *BACKWARD]
    assert trace.rows.keys() == {"steps", "units"}


def test_a_job_that_ends_before_writes_what_there_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "trace.json"
    with caplog.at_level(logging.INFO, "tiermem.trace"), training(tmp_path) as (job, steps):
        job.trace(file, steps=9)
        steps(1)
        assert not file.exists()
    trace = Trace(file)
    assert len(trace.of("steps")) == 1
    assert trace.pids.keys() == {"trainer", "tiermemd"}
    assert f"trace {file} is written" in caplog.text


def test_without_an_optimizer_it_is_until_the_end(tmp_path: Path) -> None:
    model, _, _ = make()
    file = tmp_path / "trace.json"
    with tiermem.attach(model, dram=DRAM, flash=tmp_path / "flash", endpoint="embedded") as job:
        job.trace(file)
        with torch.no_grad():
            model(torch.zeros(1, 4, dtype=torch.long))
    assert [e["name"] for e in Trace(file).of("units")] == FORWARD


def test_a_daemon_that_died_leaves_the_trainers_part(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    with training(tmp_path) as (job, steps):
        job.trace(file, steps=2)
        steps(1)
        assert job.daemon is not None
        job.daemon.stop()
        within(5, lambda: "it is alive" if job.residency.session.alive else "")
        job.close()
    trace = Trace(file)
    assert [e["name"] for e in trace.of("units")][: len(FORWARD)] == FORWARD
    assert trace.notes.startswith("tiermemd: ")


def test_a_trace_that_cannot_be_written_is_refused_at_once(tmp_path: Path) -> None:
    with training(tmp_path) as (job, _):
        for path in (tmp_path, tmp_path / "none" / "trace.json"):
            with pytest.raises(InvalidArgument, match=str(path)):
                job.trace(path)
        with pytest.raises(InvalidArgument, match="steps=0"):
            job.trace(tmp_path / "trace.json", steps=0)
    with pytest.raises(DaemonUnavailable):
        job.trace(tmp_path / "trace.json")
    assert os.listdir(tmp_path) == ["flash"]


def test_one_that_cannot_be_written_later_is_logged_and_the_training_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "sub").mkdir()
    with training(tmp_path) as (job, steps):
        job.trace(tmp_path / "sub" / "trace.json")
        (tmp_path / "sub").rmdir()
        steps(2)
        assert job.updater is not None and job.updater.steps == 2
    assert "was not written" in caplog.text


def test_the_command_writes_the_last_step(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    with training(tmp_path, job="tune") as (job, steps):
        assert job.daemon is not None

        def command(*arguments: object) -> tuple[int, str]:
            words = ["trace", "--socket", str(job.daemon and job.daemon.socket), *map(str, arguments)]
            result = CliRunner().invoke(main, words, catch_exceptions=False)
            return result.exit_code, result.output

        steps(3)
        code, said = command("--out", file)
        assert code == 0
        assert said.startswith(f"{file}: job tune, its last step, ")
        trace = Trace(file)
        assert trace.pids["trainer"] == os.getpid()
        assert [e["name"] for e in trace.of("units") if "update" not in e["name"]] == [*FORWARD, *BACKWARD]
        (step,) = trace.of("steps")
        assert all(e["ts"] <= trace.end(step) for e in trace.of(""))

        code, said = command("--out", file, "--job", "tune", "--seconds", "600")
        assert code == 0
        assert "the last 600 s" in said
        assert len(Trace(file).of("steps")) == 4, "attach is the first"

        file.unlink()
        assert command("--out", file, "--job", "other")[0] == 9
        assert command("--out", tmp_path)[0] == 2
        assert command("--out", tmp_path / "none" / "t.json")[0] == 2
        for seconds in ("0", "-1", "nan", "1e9"):
            assert command("--out", file, "--seconds", seconds)[0] == 2
        assert not file.exists()
    missing = CliRunner().invoke(main, ["trace", "--socket", str(tmp_path / "none.sock"), "--out", str(file)])
    assert missing.exit_code == 3
