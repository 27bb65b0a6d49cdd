"""Move a tensor's storage to other memory under the tensors that use it. The one module that touches torch's private
`UntypedStorage._swap_data_ptr_` and `_construct_storage_from_data_pointer`.

A swap changes the address inside the StorageImpl that Parameters, views, tied weights and tensors saved by autograd
share, so all of them follow; no version counter moves and the old memory is freed. Where the private function is
missing or does not do this (`self_test`), the `.data` of a given list of tensors is switched instead: views and saved
tensors then keep the old bytes, which is right only while no graph is alive and no view is kept; a warning in the log.

Threading: the caller holds the client lock; nobody else may use the tensors meanwhile. A storage moves within its
device; `leave_host` and `return_to_host` take it to another one and back.
"""

from __future__ import annotations

import ctypes
import enum
import functools
import logging
from collections.abc import Sequence
from typing import Any

import torch

from tiermem.errors import InvalidArgument, Unsupported
from tiermem.layout import TENSOR_ALIGN_BYTES

_log = logging.getLogger(__name__)


class Mechanism(enum.StrEnum):
    """What `rehome` and `evacuate` do: swap the storage's pointer, or switch the `.data` of the tensors named."""

    SWAP = "swap_data_ptr"
    DATA = "data"


def rehome(
    target: torch.Tensor | torch.UntypedStorage,
    address: int,
    nbytes: int,
    *,
    tensors: Sequence[torch.Tensor] = (),
    mechanism: Mechanism | None = None,
    source: torch.UntypedStorage | None = None,
    copy: bool = True,
) -> None:
    """Copy the whole storage to `address`, on the same device, and let it live there; its old memory is freed.

    `address` is a multiple of 64, mapped and writable now, and outlives the storage's stay; `nbytes` is the storage's
    size. `source`: where its bytes are now, if not in the storage. With `copy=False` no byte is read or written:
    whoever maps the address later has put the same bytes there. A storage of 0 bytes has no address and is left alone.
    `tensors` are all tensors on the storage that must follow where the mechanism is DATA; `mechanism=None` is what
    `self_test` found. Raises InvalidArgument, Unsupported; nothing has changed then.
    """
    storage = _storage_of(target, has_bytes=copy and source is None)
    if storage.nbytes() != nbytes:
        raise InvalidArgument(f"the storage has {storage.nbytes()} bytes, not {nbytes}; give its whole size")
    if address % TENSOR_ALIGN_BYTES:
        raise InvalidArgument(f"address {address:#x} is not a multiple of {TENSOR_ALIGN_BYTES}")
    if nbytes:
        there = alias(address, nbytes, torch.uint8, (nbytes,), device=storage.device)
        bytes_now = storage if source is None else source
        _switch(storage, there.untyped_storage(), tensors, mechanism, bytes_now if copy else None)


def evacuate(
    target: torch.Tensor | torch.UntypedStorage,
    *,
    tensors: Sequence[torch.Tensor] = (),
    mechanism: Mechanism | None = None,
) -> None:
    """The reverse of `rehome`: copy the whole storage into fresh memory of torch's allocator. The bytes where it was,
    which must be readable now, belong to their owner again. Same arguments and errors.
    """
    storage = _storage_of(target, has_bytes=True)
    if storage.nbytes():
        fresh = torch.empty(storage.nbytes(), dtype=torch.uint8, device=storage.device)
        _switch(storage, fresh.untyped_storage(), tensors, mechanism, storage)


def alias(
    address: int,
    nbytes: int,
    dtype: torch.dtype,
    shape: Sequence[int],
    stride: Sequence[int] | None = None,
    storage_offset: int = 0,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """A tensor over the `nbytes` at `address` on `device`, which it does not own. `stride` (None: contiguous) and
    `storage_offset` are in elements, as `Tensor.set_` takes them. Every dtype; 0-dim and empty too. Raises
    InvalidArgument for a tensor that does not fit in `nbytes`.
    """
    strides = _contiguous(shape) if stride is None else tuple(stride)
    count = 0 if 0 in shape else 1 + sum((size - 1) * step for size, step in zip(shape, strides, strict=True))
    if storage_offset < 0 or (count and (storage_offset + count) * dtype.itemsize > nbytes):
        raise InvalidArgument(
            f"{dtype} of shape {tuple(shape)}, stride {strides}, offset {storage_offset} does not fit in {nbytes} bytes"
        )
    if nbytes == 0:
        return torch.empty(tuple(shape), dtype=dtype, device=device).as_strided(tuple(shape), strides)
    storage = _storage_at(address, nbytes, torch.device(device))
    # set_ would enlarge a storage (and fails on this one) for an empty tensor that starts beyond the end.
    offset = storage_offset if count else 0
    return torch.empty(0, dtype=dtype, device=device).set_(storage, offset, tuple(shape), strides)


def _storage_at(address: int, nbytes: int, device: torch.device) -> torch.UntypedStorage:
    """A storage that does not own its memory; at address 0 there is none."""
    if device.type == "cpu" and address:
        memory = (ctypes.c_ubyte * nbytes).from_address(address)
        return torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    made: Any = torch._C._construct_storage_from_data_pointer(address, device, nbytes)
    return made  # type: ignore[no-any-return]


def leave_host(
    storage: torch.UntypedStorage, tensors: Sequence[torch.Tensor], device: torch.device
) -> torch.UntypedStorage:
    """Switch `tensors`, all that are on the storage and must follow, to one on `device` that has no memory yet, for
    `rehome`. Views and what autograd has saved stay where they are. The bytes stay in the storage given.
    """
    _check_followers(storage, tensors)
    elsewhere = _storage_at(0, storage.nbytes(), device)
    _follow(tensors, elsewhere)
    return elsewhere


def return_to_host(host: torch.UntypedStorage, tensors: Sequence[torch.Tensor]) -> None:
    """Switch `tensors` to a storage in host memory; their gradients come too."""
    for tensor in tensors:
        grad, tensor.grad = tensor.grad, None
        _follow([tensor], host)
        tensor.grad = None if grad is None else grad.to(host.device)


def _follow(tensors: Sequence[torch.Tensor], storage: torch.UntypedStorage) -> None:
    for tensor in tensors:
        place = torch.empty(0, dtype=tensor.dtype, device=storage.device)
        tensor.data = place.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())


def storage_key(tensor: torch.Tensor) -> int | None:
    """What tensors on one storage share, while it lives. None for a tensor without storage: sparse, opaque, functorch's
    wrappers, an uninitialised lazy parameter.
    """
    if type(tensor) is torch.Tensor:  # what autograd saves, mostly
        try:
            return int(tensor.untyped_storage()._cdata)
        except NotImplementedError:
            return None
    if torch.nn.parameter.is_lazy(tensor):
        return None
    try:
        with torch._C.DisableTorchFunctionSubclass():
            return int(tensor.untyped_storage()._cdata)
    except NotImplementedError:
        return None


@functools.cache
def self_test() -> Mechanism:
    """Try the swap on a tiny parameter with a transposed view saved by autograd. Once a process; logged if it fails."""
    trouble = _trouble_with_swap()
    if trouble is None:
        return Mechanism.SWAP
    _log.warning("torch %s: %s; parameters move by .data, their views do not", torch.__version__, trouble)
    return Mechanism.DATA


def _trouble_with_swap() -> str | None:
    with torch.enable_grad(), torch.inference_mode(mode=False):
        weight = torch.arange(6, dtype=torch.float32).reshape(2, 3).requires_grad_()
        row = weight.detach()[1]
        inputs = torch.ones(1, 3, requires_grad=True)
        loss = torch.nn.functional.linear(inputs, weight).sum()  # saves weight.t(), a view with the same storage
        room = (ctypes.c_ubyte * (24 + TENSOR_ALIGN_BYTES))()
        address = -(-ctypes.addressof(room) // TENSOR_ALIGN_BYTES) * TENSOR_ALIGN_BYTES
        version = weight._version
        try:
            rehome(weight, address, 24, mechanism=Mechanism.SWAP)
        except (AttributeError, RuntimeError, TypeError) as error:
            return f"UntypedStorage._swap_data_ptr_ is missing or failed ({error})"
        (ctypes.c_float * 6).from_address(address)[:] = [10.0, 11.0, 12.0, 13.0, 14.0, 15.0]
        (gradient,) = torch.autograd.grad(loss, inputs)
        followed = weight.data_ptr() == address and row.tolist() == [13.0, 14.0, 15.0]
        if not followed or gradient.tolist() != [[23.0, 25.0, 27.0]] or weight._version != version:
            return "UntypedStorage._swap_data_ptr_ does not move views and saved tensors"
    return None


def _switch(
    storage: torch.UntypedStorage,
    fresh: torch.UntypedStorage,
    tensors: Sequence[torch.Tensor],
    mechanism: Mechanism | None,
    source: torch.UntypedStorage | None,
) -> None:
    """Copy the bytes of `source` (None: they will be there anyway) into `fresh`, of the same size, and let the storage
    (or `tensors`) use that memory.
    """
    chosen = mechanism or self_test()
    if chosen is Mechanism.DATA:
        _check_followers(storage, tensors)
    if (
        source is not None and source.device.type == fresh.device.type == "cpu"
    ):  # unlike copy_, with non-temporal stores
        ctypes.memmove(fresh.data_ptr(), source.data_ptr(), storage.nbytes())
    elif source is not None:
        fresh.copy_(source)
    if chosen is Mechanism.SWAP:
        storage._swap_data_ptr_(fresh)  # type: ignore[attr-defined]  # `fresh` takes the old memory along when it dies
        return
    _follow(tensors, fresh)


def _check_followers(storage: torch.UntypedStorage, tensors: Sequence[torch.Tensor]) -> None:
    if not tensors:
        raise Unsupported("without a storage swap (see the log) the tensors that are to move must be named; none was")
    for tensor in tensors:
        if storage_key(tensor) != storage._cdata:
            raise InvalidArgument(f"a tensor of shape {tuple(tensor.shape)} is not on the storage that moves")


def _storage_of(target: torch.Tensor | torch.UntypedStorage, has_bytes: bool) -> torch.UntypedStorage:
    if isinstance(target, torch.Tensor):
        if storage_key(target) is None:
            raise Unsupported(f"a {type(target).__name__} of layout {target.layout} has no storage that could be moved")
        target = target.untyped_storage()
    if target.device.type not in ("cpu", "cuda"):
        raise Unsupported(f"a storage on {target.device} has no address; give one on the CPU or on a CUDA device")
    try:
        if has_bytes:
            target.data_ptr()
    except RuntimeError as error:
        raise Unsupported(f"a storage without memory, as a wrapper subclass has, cannot be moved: {error}") from error
    return target


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(1, size)
    return tuple(reversed(strides))
