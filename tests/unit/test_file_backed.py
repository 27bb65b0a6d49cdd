"""Which memory is found in which file, and what is said of it; real mappings, and a session that takes files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest
import torch
from safetensors.torch import load_file, save_file

from tiermem.bundle import BundleSpec, Kind, TensorSpec
from tiermem.digest import digest
from tiermem.errors import ResourceExhausted
from tiermem_client.file_backed import FileSources, Mapping, file_mappings
from tiermem_client.session import Session

NBYTES = 40_000
MAPS = """\
55d0c0a00000-55d0c0a02000 r--p 00001000 fe:00 42     /usr/bin/python3.11
7f0000000000-7f0000001000 rw-p 00000000 00:00 0
7f0000001000-7f0000002000 rw-p 00003000 fe:00 7      /a b/with space\\012and newline.safetensors
7f0000002000-7f0000003000 rw-s 00000000 00:01 9      /gone (deleted)
7f0000003000-7f0000004000 rw-s 00000000 00:01 9      /memfd:arena (deleted)
7ffd00000000-7ffd00021000 rw-p 00000000 00:00 0      [stack]
"""


class TakesFiles:
    """What FileSources needs of a session."""

    def __init__(self) -> None:
        self.files: dict[int, int] = {}
        self.most = 10

    def send_file(self, number: int, fd: int) -> None:
        if len(self.files) == self.most:
            raise ResourceExhausted("no more files")
        self.files[number] = os.fstat(fd).st_size


@pytest.fixture
def session() -> TakesFiles:
    return TakesFiles()


@pytest.fixture
def weights(tmp_path: Path) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    save_file({"a": torch.randn(NBYTES // 4), "b": torch.randn(5)}, tmp_path / "w.safetensors")
    return load_file(tmp_path / "w.safetensors")


@pytest.fixture
def sources(session: TakesFiles, weights: dict[str, torch.Tensor]) -> Iterator[FileSources]:
    made = FileSources(cast("Session", session))
    yield made
    made.close()


def spec(*sizes: int) -> BundleSpec:
    """Tensors at multiples of 64 bytes."""
    tensors, at = [], 0
    for n in sizes:
        tensors.append(TensorSpec("w", "float32", (n // 4,), at, n))
        at += -(-n // 64) * 64
    return BundleSpec(3, Kind.PARAM, "u", at, tuple(tensors))


def test_mappings_are_those_of_files_that_have_their_name() -> None:
    assert file_mappings(MAPS) == [
        Mapping(0x55D0C0A00000, 0x55D0C0A02000, 0x1000, "/usr/bin/python3.11"),
        Mapping(0x7F0000001000, 0x7F0000002000, 0x3000, "/a b/with space\nand newline.safetensors"),
    ]


def test_tensors_are_found_where_they_are(
    tmp_path: Path, session: TakesFiles, sources: FileSources, weights: dict[str, torch.Tensor]
) -> None:
    data = (tmp_path / "w.safetensors").read_bytes()
    for tensor in weights.values():
        raw = tensor.untyped_storage()
        source = sources.find(raw.data_ptr(), raw.nbytes())
        assert source is not None
        assert source.file == 0
        assert data[source.offset : source.offset + raw.nbytes()] == tensor.numpy().tobytes()
    assert session.files == {0: len(data)}, "one file, passed in once"


def test_other_memory_is_in_no_file(
    sources: FileSources, session: TakesFiles, weights: dict[str, torch.Tensor]
) -> None:
    plain = torch.zeros(1000)
    assert sources.find(plain.data_ptr(), 4000) is None
    assert sources.find(8, 4) is None
    assert sources.find(weights["a"].data_ptr(), 0) is None
    assert sources.find(weights["a"].data_ptr(), 1 << 30) is None, "beyond the end of the mapping"
    assert session.files == {}


def test_equal_bytes_are_adopted_chunk_by_chunk(sources: FileSources, weights: dict[str, torch.Tensor]) -> None:
    a, b = (weights[name].untyped_storage() for name in "ab")
    found = [sources.find(raw.data_ptr(), raw.nbytes()) for raw in (b, a)]
    offsets = [source.offset for source in found if source is not None]
    form = spec(20, NBYTES)
    adoption = sources.adoption(form, [b.data_ptr(), a.data_ptr()], offsets, 0, 16_384)
    assert adoption is not None
    assert (adoption.spec_id, adoption.file, adoption.offsets) == (3, 0, tuple(offsets))
    bytes_a, bytes_b = (memoryview(weights[name].numpy().tobytes()) for name in "ab")
    assert adoption.digests == (
        digest([bytes_b, bytes_a[: 16_384 - 64]]),
        digest([bytes_a[16_384 - 64 : 2 * 16_384 - 64]]),
        digest([bytes_a[2 * 16_384 - 64 :]]),
    )


@pytest.mark.parametrize("change", ["first byte", "last byte", "file", "cut"])
def test_bytes_that_differ_are_not_adopted(
    tmp_path: Path, sources: FileSources, weights: dict[str, torch.Tensor], change: str
) -> None:
    raw = weights["a"].untyped_storage()
    source = sources.find(raw.data_ptr(), NBYTES)
    assert source is not None
    path = tmp_path / "w.safetensors"
    match change:
        case "first byte":
            raw[0] = raw[0] ^ 1
        case "last byte":
            raw[NBYTES - 1] = raw[NBYTES - 1] ^ 1
        case "file":
            weights["a"].add_(0)  # the pages are the tensor's own now
            with path.open("r+b") as file:
                file.seek(source.offset + NBYTES // 2)
                file.write(b"changed")
        case _:
            weights["a"].add_(0)
            os.truncate(path, source.offset + NBYTES - 1)
    assert sources.adoption(spec(NBYTES), [raw.data_ptr()], [source.offset], 0, 16_384) is None


def test_a_refused_file_is_named_with_the_reason(
    tmp_path: Path, session: TakesFiles, sources: FileSources, weights: dict[str, torch.Tensor]
) -> None:
    session.most = 0
    for _ in range(2):
        assert sources.find(weights["a"].data_ptr(), NBYTES) is None
    assert len(sources.refusals) == 1
    assert "w.safetensors" in sources.refusals[0]
    assert "no more files" in sources.refusals[0]


def test_a_file_that_cannot_be_opened_is_named(
    tmp_path: Path, session: TakesFiles, sources: FileSources, weights: dict[str, torch.Tensor]
) -> None:
    (tmp_path / "w.safetensors").unlink()  # after the mappings were read
    assert sources.find(weights["a"].data_ptr(), NBYTES) is None
    assert "No such file" in sources.refusals[0]


def test_a_pipe_by_that_name_is_not_waited_for(
    tmp_path: Path, session: TakesFiles, sources: FileSources, weights: dict[str, torch.Tensor]
) -> None:
    (tmp_path / "w.safetensors").unlink()
    os.mkfifo(tmp_path / "w.safetensors")
    assert sources.find(weights["a"].data_ptr(), NBYTES) is None
    assert "not a regular file" in sources.refusals[0]
    assert session.files == {}
