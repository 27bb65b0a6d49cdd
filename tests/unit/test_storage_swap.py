"""What follows a storage when it moves, on real torch tensors and real memory."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tiermem.errors import InvalidArgument, Unsupported
from tiermem.units import KIB, MIB
from tiermem_client.memory_report import process_memory
from tiermem_client.storage_swap import Mechanism, alias, evacuate, rehome, self_test, storage_key

NBYTES = 64 * KIB


class Room:
    """Page-aligned memory outside torch, as the arena is."""

    def __init__(self, nbytes: int = NBYTES) -> None:
        self._map = mmap.mmap(-1, nbytes)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def bytes(self, nbytes: int, offset: int = 0) -> bytes:
        return bytes(self._map[offset : offset + nbytes])


@pytest.fixture
def room() -> Room:
    return Room()


def raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist())


@pytest.mark.parametrize("mechanism", Mechanism)
def test_a_storage_moves_without_touching_a_byte(mechanism: Mechanism) -> None:
    """Neither the old memory is read nor the new one written: both are PROT_NONE meanwhile in real use."""
    address = ctypes.CDLL(None, use_errno=True).mmap  # PROT_NONE, private, anonymous
    address.restype, address.argtypes = ctypes.c_void_p, [ctypes.c_void_p, *[ctypes.c_size_t] * 5]
    hole = address(None, NBYTES, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, 2**64 - 1, 0)
    weight = torch.nn.Parameter(torch.arange(8.0))
    rehome(weight, hole, 32, tensors=[weight], mechanism=mechanism, copy=False)
    assert weight.data_ptr() == hole
    assert weight.shape == (8,)


def test_this_torch_can_swap() -> None:
    assert self_test() is Mechanism.SWAP


def test_parameter_views_and_ties_follow_and_no_version_moves(room: Room) -> None:
    layer = torch.nn.Linear(8, 8)
    tied = torch.nn.Linear(8, 8)
    tied.weight = layer.weight
    weight, transposed, row = layer.weight, layer.weight.detach().t(), layer.weight.detach()[3]
    before, version, key = raw(weight), weight._version, storage_key(weight)
    rehome(weight, room.address, 256)
    assert weight.data_ptr() == transposed.data_ptr() == tied.weight.data_ptr() == room.address
    assert row.data_ptr() == room.address + 3 * 32
    assert raw(weight) == before == room.bytes(256)
    assert layer.weight is weight
    assert (weight._version, storage_key(weight)) == (version, key)
    with torch.no_grad():
        weight.fill_(2.0)
    assert room.bytes(4) == bytes(torch.tensor([2.0]).view(torch.uint8).tolist())
    assert row.tolist() == [2.0] * 8


def test_tensors_saved_by_autograd_follow(room: Room) -> None:
    torch.manual_seed(0)
    plain = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
    moved = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
    moved.load_state_dict(plain.state_dict())
    inputs = torch.randn(3, 16)

    def gradients(model: torch.nn.Sequential, between: Callable[[], None]) -> list[torch.Tensor]:
        loss = model(inputs).square().sum()
        between()
        return list(torch.autograd.grad(loss, list(model.parameters())))

    def move() -> None:
        for number, parameter in enumerate(moved.parameters()):
            old = torch.frombuffer(
                (ctypes.c_ubyte * parameter.untyped_storage().nbytes()).from_address(parameter.data_ptr()),
                dtype=torch.uint8,
            )
            old_bytes = old.clone()
            rehome(parameter, room.address + number * 4096, parameter.untyped_storage().nbytes())
            assert raw(parameter) == raw(old_bytes)

    for mine, expected in zip(gradients(moved, move), gradients(plain, lambda: None), strict=True):
        assert torch.equal(mine, expected)


def test_evacuate_is_the_reverse_and_leaves_the_room_alone(room: Room) -> None:
    weight = torch.nn.Parameter(torch.arange(16.0))
    view = weight.detach()[8:]
    rehome(weight, room.address, 64)
    weight.data.add_(1)
    inside = room.bytes(64)
    evacuate(weight)
    assert weight.data_ptr() != room.address
    assert weight.tolist() == [float(n) for n in range(1, 17)]
    view.zero_()
    assert weight.tolist()[8:] == [0.0] * 8
    assert room.bytes(64) == inside
    assert weight.untyped_storage().resizable()


def test_the_old_memory_is_freed() -> None:
    room = Room(32 * MIB)  # shared memory, as the arena is: not anonymous
    weight = torch.ones(8 * MIB)
    before_bytes = process_memory().anonymous_bytes
    rehome(weight, room.address, 32 * MIB)
    assert before_bytes - process_memory().anonymous_bytes > 24 * MIB


def test_a_whole_storage_moves_with_a_tensor_that_is_a_part_of_it(room: Room) -> None:
    storage_owner = torch.arange(100, dtype=torch.int64)
    part = storage_owner[10:20]
    rehome(part, room.address, 800)
    assert storage_owner.data_ptr() == room.address
    assert part.data_ptr() == room.address + 80
    assert storage_owner.tolist() == list(range(100))


def test_several_parameters_on_one_storage_move_once(room: Room) -> None:
    flat = torch.arange(12.0)
    first, second = torch.nn.Parameter(flat[:6].view(2, 3)), torch.nn.Parameter(flat[6:].view(3, 2))
    assert storage_key(first) == storage_key(second)
    rehome(first.untyped_storage(), room.address, 48)
    assert second.data_ptr() == room.address + 24
    assert second.tolist() == [[6.0, 7.0], [8.0, 9.0], [10.0, 11.0]]


def test_a_storage_that_torch_cannot_resize_moves(room: Room, tmp_path: Path) -> None:
    save_file({"w": torch.arange(32, dtype=torch.float32)}, tmp_path / "w.safetensors")
    weight = load_file(tmp_path / "w.safetensors")["w"]
    storage = weight.untyped_storage()
    nbytes = storage.nbytes()
    assert not storage.resizable()
    rehome(weight, room.address, nbytes)
    assert room.address <= weight.data_ptr() < room.address + nbytes
    assert weight.tolist() == [float(n) for n in range(32)]


def test_an_empty_storage_is_left_alone(room: Room) -> None:
    empty = torch.nn.Parameter(torch.empty(0, 3))
    rehome(empty, room.address, 0)
    evacuate(empty)
    assert empty.shape == (0, 3)


def test_a_lazy_clone_is_moved_apart_from_its_origin(room: Room) -> None:
    origin = torch.arange(4.0)
    copy = torch._lazy_clone(origin)
    rehome(copy, room.address, 16)
    copy.add_(1)
    assert origin.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert copy.tolist() == [1.0, 2.0, 3.0, 4.0]


def test_wrong_places_are_refused_and_nothing_moves(room: Room) -> None:
    weight = torch.ones(16)
    address = weight.data_ptr()
    with pytest.raises(InvalidArgument, match="64 bytes, not 32"):
        rehome(weight, room.address, 32)
    with pytest.raises(InvalidArgument, match="not a multiple of 64"):
        rehome(weight, room.address + 8, 64)
    assert weight.data_ptr() == address


class Wrapper(torch.Tensor):
    """A tensor whose class has no memory of its own."""

    @staticmethod
    def __new__(cls) -> Wrapper:
        return torch.Tensor._make_wrapper_subclass(cls, (3,))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.empty(3, device="meta"),
        Wrapper,
        lambda: torch.eye(3).to_mkldnn(),
    ],
    ids=["sparse", "meta", "wrapper", "mkldnn"],
)
def test_what_has_no_cpu_memory_is_refused(room: Room, make: Callable[[], torch.Tensor]) -> None:
    with pytest.raises(Unsupported):
        rehome(make(), room.address, 12)
    with pytest.raises(Unsupported):
        evacuate(make())


def test_storage_key_is_shared_by_views_and_none_without_storage() -> None:
    whole = torch.zeros(4, 4)
    assert storage_key(whole) == storage_key(whole.t()) == storage_key(torch.nn.Parameter(whole)) is not None
    assert storage_key(whole) != storage_key(whole.clone())
    assert storage_key(torch.eye(3).to_sparse()) is None
    assert storage_key(torch.nn.parameter.UninitializedParameter()) is None
    inside: list[int | None] = []

    def loss(value: torch.Tensor) -> torch.Tensor:
        inside.append(storage_key(value))
        return value.sum()

    torch.func.grad(loss)(torch.ones(3))
    torch.vmap(loss)(torch.ones(2, 3))
    assert inside == [None, None]


DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.bool,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.uint16,
    torch.int32,
    torch.int64,
    torch.complex64,
    torch.complex128,
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_alias_shows_the_bytes_as_any_dtype(room: Room, dtype: torch.dtype) -> None:
    source = torch.tensor([[0, 1, 0], [1, 0, 1]], dtype=torch.float32).to(dtype)
    size = dtype.itemsize
    whole = alias(room.address, 6 * size, dtype, (2, 3))
    whole.copy_(source)
    assert room.bytes(6 * size) == raw(source)
    column = alias(room.address, 6 * size, dtype, (2,), (3,), 1)
    assert raw(column) == raw(source[:, 1])
    scalar = alias(room.address, 6 * size, dtype, (), (), 5)
    assert scalar.shape == ()
    assert raw(scalar) == raw(source[1, 2])
    assert whole.untyped_storage().nbytes() == 6 * size


@pytest.mark.parametrize(("shape", "nbytes"), [((0,), 0), ((2, 0, 3), 0), ((0, 4), 64)])
def test_alias_of_an_empty_tensor(room: Room, shape: tuple[int, ...], nbytes: int) -> None:
    strides = torch.empty(shape).stride()
    empty = alias(room.address, nbytes, torch.bfloat16, shape, strides, 7)
    assert (empty.shape, empty.stride(), empty.dtype) == (shape, strides, torch.bfloat16)


@pytest.mark.parametrize(
    ("shape", "stride", "offset"), [((17,), None, 0), ((4, 4), (5, 1), 0), ((16,), (1,), 1), ((1,), (1,), -1)]
)
def test_alias_beyond_its_bytes_is_refused(
    room: Room, shape: tuple[int, ...], stride: tuple[int, ...] | None, offset: int
) -> None:
    with pytest.raises(InvalidArgument, match="does not fit in 64 bytes"):
        alias(room.address, 64, torch.float32, shape, stride, offset)


def test_without_the_swap_the_named_tensors_move(room: Room) -> None:
    flat = torch.arange(12.0)
    first, second = torch.nn.Parameter(flat[:6].view(2, 3)), torch.nn.Parameter(flat[6:].view(3, 2).t())
    version = first._version
    rehome(first, room.address, 48, tensors=[first, second], mechanism=Mechanism.DATA)
    assert first.data_ptr() == room.address
    assert second.data_ptr() == room.address + 24
    assert storage_key(first) == storage_key(second)
    assert second.tolist() == [[6.0, 8.0, 10.0], [7.0, 9.0, 11.0]]
    assert first._version == version
    assert isinstance(first, torch.nn.Parameter)
    with torch.no_grad():
        first.zero_()
    evacuate(first, tensors=[first, second], mechanism=Mechanism.DATA)
    assert first.data_ptr() != room.address
    assert second.tolist() == [[6.0, 8.0, 10.0], [7.0, 9.0, 11.0]]
    assert first.tolist() == [[0.0] * 3] * 2


def test_without_the_swap_the_tensors_must_be_named_and_be_its_own(room: Room) -> None:
    weight = torch.ones(16)
    with pytest.raises(Unsupported, match="must be named"):
        rehome(weight, room.address, 64, mechanism=Mechanism.DATA)
    with pytest.raises(InvalidArgument, match="not on the storage"):
        rehome(weight, room.address, 64, tensors=[weight, torch.ones(2)], mechanism=Mechanism.DATA)
    assert weight.data_ptr() != room.address


def test_a_torch_without_the_private_function_is_told_apart(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing(storage: torch.UntypedStorage) -> None:
        raise AttributeError("no _swap_data_ptr_")

    monkeypatch.setattr(torch.UntypedStorage, "_swap_data_ptr_", property(missing), raising=False)
    self_test.cache_clear()
    try:
        assert self_test() is Mechanism.DATA
        assert "no _swap_data_ptr_" in caplog.text
        assert "parameters move by .data" in caplog.text
    finally:
        self_test.cache_clear()


def test_a_torch_whose_swap_moves_nothing_is_told_apart(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def idle(storage: torch.UntypedStorage, other: torch.UntypedStorage) -> None:
        """Does not swap."""

    monkeypatch.setattr(torch.UntypedStorage, "_swap_data_ptr_", idle, raising=False)
    self_test.cache_clear()
    try:
        assert self_test() is Mechanism.DATA
        assert "does not move views" in caplog.text
    finally:
        self_test.cache_clear()
