"""`p.grad` as a handle: a tensor without bytes, every operation on which streams the real ones."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.utils._pytree as pytree

from tiermem.errors import TiermemError, Unsupported
from tiermem_client.folding import Operation, Unscaling, change_of, norm_of
from tiermem_client.grad_slots import GradSlot
from tiermem_client.residency import Residency


class Book(Protocol):
    """What a handle asks for its bytes."""

    residency: Residency

    def readable(self, slot: GradSlot) -> torch.Tensor: ...

    def writable(self, slot: GradSlot) -> torch.Tensor: ...

    def zero(self, slot: GradSlot) -> None: ...

    def drop(self, slot: GradSlot) -> None: ...

    def check(self, slot: GradSlot) -> None: ...

    def answered(self, slot: GradSlot, key: Hashable, operation: Operation | None) -> Any: ...

    def change_later(self, slot: GradSlot, change: Operation) -> bool: ...

    def unscale_later(self, slot: GradSlot, unscaling: Unscaling) -> bool: ...


class GradHandle(torch.Tensor):
    """What `p.grad` is while the gradient lives in the store: shape, dtype and device of the real one, no bytes.

    Every operation leases the bytes, runs on the real tensor and is done with it, but for those that need none of them
    (`folding`). Lists (`_foreach`) go one element at a time, so memory stays bounded. A handle that dies frees its
    gradient.
    """

    _book: Book
    slot: GradSlot

    @staticmethod
    def __new__(cls, book: Book, slot: GradSlot) -> GradHandle:

        device = slot.managed.parameter.device
        return torch.Tensor._make_wrapper_subclass(
            cls, slot.managed.shape, strides=slot.stride, dtype=slot.dtype, device=device
        )

    def __init__(self, book: Book, slot: GradSlot) -> None:
        self._book, self.slot = book, slot
        slot.owners += 1
        weakref.finalize(self, book.residency.later, _Drop(book, slot)).atexit = False

    def __repr__(self) -> str:  # type: ignore[override]
        with torch._C.DisableTorchFunctionSubclass():
            return f"GradHandle({self.read().clone()!r})"

    def read(self) -> torch.Tensor:
        """The real gradient, for reading until another group's gradient is touched."""
        self._book.check(self.slot)
        return self._book.readable(self.slot)

    def __reduce_ex__(self, protocol: int) -> Any:  # type: ignore[override]
        return self.read().clone().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self.read().clone()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        if name == "aten::detach":
            return GradHandle(args[0]._book, args[0].slot)
        if name in ("aten::zero_", "aten::_foreach_zero_"):
            for handle in pytree.tree_leaves(args[0]):
                if isinstance(handle, GradHandle):
                    handle._book.zero(handle.slot)
                else:
                    handle.zero_()
            return args[0] if name == "aten::zero_" else None
        if name.startswith(("aten::_foreach", "aten::_amp_foreach")):
            return _one_by_one(func, args, kwargs)
        return _run(func, args, kwargs)


@dataclass(slots=True, frozen=True)
class _Drop:
    book: Book
    slot: GradSlot

    def __call__(self) -> None:
        self.book.drop(self.slot)


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    """One operation on real tensors, under the client lock; what the schema says is written is committed with its
    group.
    """
    book = next(h._book for h in pytree.tree_leaves((args, kwargs)) if isinstance(h, GradHandle))
    with book.residency.session.lock:
        done, out = _without_bytes(func, args, kwargs)
        return out if done else _run_locked(func, args, kwargs)


def _without_bytes(func: Any, args: Any, kwargs: Any) -> tuple[bool, Any]:
    """Do what needs none of the gradient's bytes now; whether it was such an operation, and its result."""
    if (norm := norm_of(func, args, kwargs, GradHandle)) is not None:
        handle = _first(args)
        handle._book.check(handle.slot)
        out = handle._book.answered(handle.slot, *norm)
        return out is not None, out
    done = False
    if (change := change_of(func, args, kwargs, GradHandle)) is not None:
        handle = _first(args)
        handle._book.check(handle.slot)
        done = handle._book.change_later(handle.slot, change)
    elif (unscaling := Unscaling.of(func, args, kwargs, GradHandle)) is not None:
        handle = _first(args)
        handle._book.check(handle.slot)
        done = handle._book.unscale_later(handle.slot, unscaling)
    return done, args[0] if done and func._schema.returns else None


def _first(args: Any) -> GradHandle:
    handle = args[0][0] if isinstance(args[0], list | tuple) else args[0]
    assert isinstance(handle, GradHandle)
    return handle


def _run_locked(func: Any, args: Any, kwargs: Any) -> Any:
    schema = func._schema.arguments
    written = {
        id(h)
        for i, a in enumerate(args)
        if schema[i].alias_info is not None and schema[i].alias_info.is_write
        for h in pytree.tree_leaves(a)
        if isinstance(h, GradHandle)
    }
    written |= {
        id(h)
        for a in schema
        if a.name in kwargs and a.alias_info is not None and a.alias_info.is_write
        for h in pytree.tree_leaves(kwargs[a.name])
        if isinstance(h, GradHandle)
    }
    handles = {id(h): h for h in pytree.tree_leaves((args, kwargs)) if isinstance(h, GradHandle)}
    for handle in handles.values():
        handle._book.check(handle.slot)
    stores = {h.slot.store for h in handles.values() if not h.slot.zero or id(h) in written}
    if len({h.slot.store for h in handles.values() if id(h) in written}) > 1:
        raise Unsupported(f"{func} writes gradients of several parameter groups at once; write them one after another")
    real: dict[int, torch.Tensor] = {}
    for key, handle in sorted(handles.items(), key=lambda item: item[0] in written):
        if key in written:
            real[key] = handle._book.writable(handle.slot)
        else:  # only one group is leased at a time: an operand of another one is copied out first
            tensor = handle._book.readable(handle.slot)
            real[key] = tensor.clone() if len(stores) > 1 else tensor

    def swap(leaf: Any) -> Any:
        return real.get(id(leaf), leaf)

    out = func(*pytree.tree_map(swap, list(args)), **pytree.tree_map(swap, dict(kwargs)))
    back = {id(tensor): handles[key] for key, tensor in real.items()}
    return pytree.tree_map(
        lambda o: back.get(id(o), o) if isinstance(o, torch.Tensor) else o, _unaliased(out, real.values())
    )


def _unaliased(out: Any, real: Iterable[torch.Tensor]) -> Any:
    """Views of a gradient would point at bytes that leave: hand out copies of them."""
    storages = {t.untyped_storage()._cdata: id(t) for t in real}
    same = {id(t) for t in real}

    def own(tensor: Any) -> Any:
        if isinstance(tensor, torch.Tensor) and id(tensor) not in same and tensor.untyped_storage()._cdata in storages:
            return tensor.clone()
        return tensor

    return pytree.tree_map(own, out)


def _one_by_one(func: Any, args: Any, kwargs: Any) -> Any:
    """A list operation element by element: bitwise the same, and one gradient is leased at a time."""
    lists = [i for i, a in enumerate(args) if isinstance(a, list | tuple) and a and isinstance(a[0], torch.Tensor)]
    if not lists:
        raise TiermemError(f"{func} on gradients in an unknown form")
    length = len(args[lists[0]])
    outs = []
    for j in range(length):
        row = [
            [a[j]] if i in lists or (isinstance(a, list | tuple) and len(a) == length) else a
            for i, a in enumerate(args)
        ]
        outs.append(_run(func, row, kwargs))
    return None if outs[0] is None else [o[0] for o in outs]
