"""The benchmark of the mover: who it compares with, what it asks of fio, and that it notices bytes that are wrong.
Nothing is timed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks.__main__ import BENCHMARKS
from benchmarks.fio import Fio, Stream, find_fio
from benchmarks.mover import MIXES, Job, Mix, streams
from tiermem.units import MIB

NewFio = Callable[..., str]
READS, WRITES, BOTH = MIXES


def fio_job(read_bytes: int = 0, read_ms: int = 0, written_bytes: int = 0, written_ms: int = 0, error: int = 0) -> str:
    """One job of fio's report."""
    read = {"io_bytes": read_bytes, "runtime": read_ms}
    return json.dumps({"error": error, "read": read, "write": {"io_bytes": written_bytes, "runtime": written_ms}})


@pytest.fixture
def new_fio(tmp_path: Path) -> NewFio:
    """A program in fio's place: it keeps its arguments, refuses engines, and says what it is told to."""

    def new(*jobs: str, refuses: tuple[str, ...] = ()) -> str:
        program = tmp_path / "fio"
        refusals = "".join(
            f'case "$*" in *ioengine={engine}*) echo "{engine} is not permitted" >&2; exit 1;; esac\n'
            for engine in refuses
        )
        report = f'a remark before it\n{{"jobs": [{", ".join(jobs or [fio_job()])}]}}'
        program.write_text(f"#!/bin/sh\necho \"$@\" > {tmp_path / 'arguments'}\n{refusals}cat <<'END'\n{report}\nEND\n")
        program.chmod(0o755)
        return str(program)

    return new


def test_it_is_one_of_the_benchmarks() -> None:
    assert BENCHMARKS["mover"].TITLE


# -- fio


def test_a_missing_fio_is_said_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"no-fio is not installed.*apt-get install fio"):
        find_fio(tmp_path, "no-fio")


def test_io_uring_is_taken_where_it_works(new_fio: NewFio, tmp_path: Path) -> None:
    fio = find_fio(tmp_path, new_fio())
    assert (fio.name, fio.refused) == ("fio, io_uring", ())


def test_another_engine_is_named_with_the_reason(new_fio: NewFio, tmp_path: Path) -> None:
    fio = find_fio(tmp_path, new_fio(refuses=("io_uring", "libaio")))
    assert fio.name == "fio, psync"
    assert fio.refused == ("io_uring: io_uring is not permitted", "libaio: libaio is not permitted")


def test_an_error_in_the_report_is_a_refusal_too(new_fio: NewFio, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="none of its engines: io_uring: Operation not permitted; libaio: Oper"):
        find_fio(tmp_path, new_fio(fio_job(error=1)))


def test_the_rate_is_that_of_all_streams_until_the_last_has_ended(new_fio: NewFio, tmp_path: Path) -> None:
    program = new_fio(fio_job(read_bytes=3000, read_ms=500), fio_job(written_bytes=1000, written_ms=2000))
    fio = Fio(program, tmp_path / "file", "io_uring")
    assert fio.rate(100, [Stream(False, 0, 3000, 2), Stream(True, 3000, 1000, 2)]) == 2000.0
    words = (tmp_path / "arguments").read_text().split()
    assert {"--direct=1", "--ioengine=io_uring", "--bs=100", f"--filename={tmp_path / 'file'}"} <= set(words)
    assert words[words.index("--name=write") :][1:] == [
        "--rw=write", "--offset=3000", "--size=1000", "--numjobs=1", "--offset_increment=1000", "--iodepth=2",
    ]  # fmt: skip


def test_an_engine_with_one_block_in_flight_gets_a_process_for_each(new_fio: NewFio, tmp_path: Path) -> None:
    Fio(new_fio(fio_job(read_bytes=400, read_ms=1)), tmp_path, "psync").rate(100, [Stream(False, 0, 400, 4)])
    words = (tmp_path / "arguments").read_text().split()
    assert {"--numjobs=4", "--size=100", "--offset_increment=100", "--iodepth=1"} <= set(words)


def test_a_fio_that_moved_something_else_is_no_measure(new_fio: NewFio, tmp_path: Path) -> None:
    fio = Fio(new_fio(fio_job(read_bytes=300, read_ms=1)), tmp_path, "io_uring")
    with pytest.raises(SystemExit, match="moved 300 bytes instead of 400"):
        fio.rate(100, [Stream(False, 0, 400, 4)])


def test_a_fio_that_fails_is_no_measure(new_fio: NewFio, tmp_path: Path) -> None:
    fio = Fio(new_fio(fio_job(error=28)), tmp_path, "io_uring")
    with pytest.raises(SystemExit, match="engine io_uring: No space left"):
        fio.rate(100, [Stream(False, 0, 400, 4)])


# -- the same work for both


def test_fio_has_as_many_blocks_in_flight_as_the_mover() -> None:
    assert streams(READS, 1000, 10, workers=4) == [Stream(False, 0, 1000, 4)]
    assert streams(WRITES, 1000, 10, workers=4) == [Stream(True, 0, 1000, 2)]
    assert streams(BOTH, 1000, 10, workers=4) == [Stream(False, 0, 500, 2), Stream(True, 500, 500, 2)]
    assert streams(WRITES, 1000, 10, workers=1) == [Stream(True, 0, 1000, 1)]


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    made = Job(tmp_path / "flash", 8 * MIB, MIB, 4)
    yield made
    made.close()


@pytest.mark.parametrize("mix", MIXES, ids=lambda mix: mix.name)
def test_the_mover_moves_a_mix_with_and_without_digests(job: Job, mix: Mix) -> None:
    assert (job.nbytes, job.chunk_bytes) == (8 * MIB, MIB // 4)
    for _ in range(3):
        assert job.rate(mix) > 0
        assert job.rate(mix, hashed=False) > 0
    job.check()


def test_bytes_that_are_wrong_are_no_result(job: Job, tmp_path: Path) -> None:
    job.check()
    [segment] = (tmp_path / "flash").glob("segment-*")
    with segment.open("r+b") as file:
        file.write(bytes(segment.stat().st_size))
        file.flush()
    with pytest.raises(SystemExit, match="not what was written"):
        job.check()


def test_without_digests_nothing_is_compared(job: Job, tmp_path: Path) -> None:
    """Otherwise that row would not show what they cost."""
    [segment] = (tmp_path / "flash").glob("segment-*")
    with segment.open("r+b") as file:
        file.write(bytes(segment.stat().st_size))
        file.flush()
    job.rate(READS, hashed=False)


def test_a_bundle_that_is_too_large_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="--bundle"):
        Job(tmp_path / "flash", 8 * MIB, 4 * MIB, 4)
