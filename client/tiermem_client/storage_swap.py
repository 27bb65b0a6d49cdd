"""Move a tensor's storage to other memory under the tensors that use it. The one module that touches torch's private
`UntypedStorage._swap_data_ptr_`.

A swap changes the address inside the StorageImpl that Parameters, views, tied weights and tensors saved by autograd
share, so all of them follow; no version counter moves and the old memory is freed. Where the private function is
missing or does not do this (`self_test`), the `.data` of a given list of tensors is switched instead: views and saved
tensors then keep the old bytes, which is right only while no graph is alive and no view is kept; a warning in the log.

Threading: the caller holds the client lock; nobody else may use the tensors meanwhile. CPU storages only.
"""

from __future__ import annotations

import ctypes
import enum
import functools
import logging
from collections.abc import Sequence

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
    copy: bool = True,
) -> None:
    """Copy the whole storage to `address` and let it live there; its old memory is freed.

    `address` is a multiple of 64, mapped and writable now, and outlives the storage's stay; `nbytes` is the storage's
    size. With `copy=False` no byte is read or written: whoever maps the address later has put the same bytes there. A
    storage of 0 bytes has no address and is left alone. `tensors` are all tensors on the storage that must follow where
    the mechanism is DATA; `mechanism=None` is what `self_test` found. Raises InvalidArgument, Unsupported; nothing has
    changed then.
    """
    storage = _storage_of(target)
    if storage.nbytes() != nbytes:
        raise InvalidArgument(f"the storage has {storage.nbytes()} bytes, not {nbytes}; give its whole size")
    if address % TENSOR_ALIGN_BYTES:
        raise InvalidArgument(f"address {address:#x} is not a multiple of {TENSOR_ALIGN_BYTES}")
    if nbytes:
        _switch(storage, alias(address, nbytes, torch.uint8, (nbytes,)).untyped_storage(), tensors, mechanism, copy)


def evacuate(
    target: torch.Tensor | torch.UntypedStorage,
    *,
    tensors: Sequence[torch.Tensor] = (),
    mechanism: Mechanism | None = None,
) -> None:
    """The reverse of `rehome`: copy the whole storage into fresh memory of torch's allocator. The bytes where it was,
    which must be readable now, belong to their owner again. Same arguments and errors.
    """
    storage = _storage_of(target)
    if storage.nbytes():
        _switch(storage, torch.empty(storage.nbytes(), dtype=torch.uint8).untyped_storage(), tensors, mechanism)


def alias(
    address: int,
    nbytes: int,
    dtype: torch.dtype,
    shape: Sequence[int],
    stride: Sequence[int] | None = None,
    storage_offset: int = 0,
) -> torch.Tensor:
    """A tensor over the `nbytes` at `address`, which it does not own. `stride` (None: contiguous) and `storage_offset`
    are in elements, as `Tensor.set_` takes them. Every dtype; 0-dim and empty too. Raises InvalidArgument for a tensor
    that does not fit in `nbytes`.
    """
    strides = _contiguous(shape) if stride is None else tuple(stride)
    count = 0 if 0 in shape else 1 + sum((size - 1) * step for size, step in zip(shape, strides, strict=True))
    if storage_offset < 0 or (count and (storage_offset + count) * dtype.itemsize > nbytes):
        raise InvalidArgument(
            f"{dtype} of shape {tuple(shape)}, stride {strides}, offset {storage_offset} does not fit in {nbytes} bytes"
        )
    if nbytes == 0:
        return torch.empty(tuple(shape), dtype=dtype).as_strided(tuple(shape), strides)
    memory = (ctypes.c_ubyte * nbytes).from_address(address)
    storage = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    # set_ would enlarge a storage (and fails on this one) for an empty tensor that starts beyond the end.
    offset = storage_offset if count else 0
    return torch.empty(0, dtype=dtype).set_(storage, offset, tuple(shape), strides)


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
    copy: bool = True,
) -> None:
    """Copy the bytes into `fresh`, of the same size, unless they will be there anyway, and let the storage (or
    `tensors`) use that memory.
    """
    chosen = mechanism or self_test()
    if chosen is Mechanism.DATA:
        _check_followers(storage, tensors)
    if copy:  # unlike copy_, with non-temporal stores
        ctypes.memmove(fresh.data_ptr(), storage.data_ptr(), storage.nbytes())
    if chosen is Mechanism.SWAP:
        storage._swap_data_ptr_(fresh)  # type: ignore[attr-defined]  # `fresh` takes the old memory along when it dies
        return
    for tensor in tensors:
        place = torch.empty(0, dtype=tensor.dtype)
        tensor.data = place.set_(fresh, tensor.storage_offset(), tensor.size(), tensor.stride())


def _check_followers(storage: torch.UntypedStorage, tensors: Sequence[torch.Tensor]) -> None:
    if not tensors:
        raise Unsupported("without a storage swap (see the log) the tensors that are to move must be named; none was")
    for tensor in tensors:
        if storage_key(tensor) != storage._cdata:
            raise InvalidArgument(f"a tensor of shape {tuple(tensor.shape)} is not on the storage that moves")


def _storage_of(target: torch.Tensor | torch.UntypedStorage) -> torch.UntypedStorage:
    if isinstance(target, torch.Tensor):
        if storage_key(target) is None:
            raise Unsupported(f"a {type(target).__name__} of layout {target.layout} has no storage that could be moved")
        target = target.untyped_storage()
    if target.device.type != "cpu":
        raise Unsupported(f"a storage on {target.device} does not move to a CPU address; give one on the CPU")
    try:
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
