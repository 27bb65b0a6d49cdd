"""Guarded access: outside its unit's own forward a managed tensor has a guard class, whose every operation leases the
bytes first. So what a script does with parameters or optimizer state elsewhere (EMA, norms, `p.mul_()`, `p.data`, a
parent that uses a child's weight) sees right values, and what it writes becomes the newest version.

Inside the unit's forward the plain class is back (`__class__` is assigned, 0.04 us), so guards cost nothing there.
Metadata passes through. What leaves Python's sight (numpy, dlpack, storages) keeps its bundles leased until it dies;
`data_ptr` is only an address, and constant. Behind all this, addresses that are not leased are PROT_NONE.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from tiermem.bundle import Mode
from tiermem.errors import Unsupported
from tiermem_client.memory import Bundle
from tiermem_client.residency import Residency
from tiermem_client.storage_swap import storage_key

_Plain = torch._C.DisableTorchFunctionSubclass
_T = torch.Tensor

_PROPERTIES = """
shape dtype device requires_grad grad is_leaf layout grad_fn _version is_cuda is_cpu is_sparse is_meta is_quantized
is_nested names ndim _backward_hooks output_nr is_mps is_xpu itemsize nbytes _base _grad_fn is_xla is_ipu is_mkldnn
is_sparse_csr _post_accumulate_grad_hooks retains_grad name grad_dtype volatile is_mtia is_maia is_vulkan
"""
_METHODS = """
size dim numel nelement stride is_floating_point is_complex is_contiguous requires_grad_ register_hook
register_post_accumulate_grad_hook element_size storage_offset is_inference is_signed retain_grad _is_view get_device
is_shared has_names __len__ is_set_to ndimension _is_zerotensor is_conj is_neg data_ptr __hash__
"""


def _metadata() -> frozenset[Any]:
    """Functions that read or set what is beside the bytes."""
    found: list[Any] = []
    for name in _PROPERTIES.split():
        descriptor = getattr(_T, name, None)
        found += [getattr(descriptor, f, None) for f in ("__get__", "__set__", "__delete__")]
    found += [getattr(_T, name, None) for name in _METHODS.split()]
    found += [torch.is_floating_point, torch.is_complex, torch.numel, torch.is_conj, torch.is_neg, torch.is_inference]
    found.append(getattr(torch, "_has_compatible_shallow_copy_type", None))
    return frozenset(f for f in found if f is not None)


METADATA = _metadata()
_DATA_GET, _DATA_SET = _T.data.__get__, _T.data.__set__  # type: ignore[attr-defined]
_ALIASES = frozenset({_T.detach, torch.detach, _DATA_GET})
_ESCAPES = frozenset({_T.numpy, _T.untyped_storage, _T.storage, _T._typed_storage, _T.__dlpack__, _T.__array__})


class Managed(Protocol):
    """A place in the store, as a guard needs it."""

    @property
    def bundles(self) -> Sequence[Bundle]: ...


@dataclass(frozen=True, slots=True)
class _Place:
    """What stands behind a guarded storage."""

    book: GuardBook
    bundles: tuple[Bundle, ...]
    storage: StorageWeakRef  # a key is an address: while this is held, no other storage can get it


_places: dict[int, _Place] = {}  # by storage key


class GuardBook:
    """The guarded tensors of one job."""

    def __init__(self, residency: Residency, saved: Any) -> None:
        self.residency, self.saved = residency, saved
        self._keys: set[int] = set()
        self._open: dict[_T, int] = {}  # managed tensors whose unit runs, with how many units run that use them
        self._guarded: weakref.WeakSet[_T] = weakref.WeakSet()
        for key in [key for key, place in _places.items() if place.storage.expired()]:  # of jobs that were closed
            del _places[key]

    def cover(self, tensor: _T, bundles: Iterable[Bundle]) -> None:
        """Guard a tensor from now on; everything that shares its storage is recognised too."""
        key = storage_key(tensor)
        if key is None:
            return
        self._keys.add(key)
        with _Plain():
            _places[key] = _Place(self, tuple(bundles), StorageWeakRef(tensor.untyped_storage()))
        self._guarded.add(tensor)
        shut(tensor)

    def open(self, tensors: Iterable[_T]) -> None:
        """Their unit runs: plain classes."""
        for tensor in tensors:
            count = self._open.get(tensor, 0)
            self._open[tensor] = count + 1
            if count == 0:
                plain(tensor)

    def shut(self, tensors: Iterable[_T]) -> None:
        """Their unit has run: guard classes."""
        for tensor in tensors:
            count = self._open[tensor] - 1
            if count:
                self._open[tensor] = count
            else:
                del self._open[tensor]
                shut(tensor)

    def uncover_all(self) -> None:
        """Plain classes for good: the job ends."""
        for tensor in list(self._guarded):
            plain(tensor)
        for key in self._keys:
            _places.pop(key, None)
        self._keys.clear()


class Guard:
    """Mixed into a subclass of the tensor's own class."""

    __slots__ = ()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in METADATA:
            with _Plain():
                return func(*args, **kwargs)
        return _touch(func, args, kwargs)


@functools.cache
def guard_class(cls: type[_T]) -> type[_T]:
    """The guard of a tensor class; `_plain_class` is the way back."""

    def through(name: str) -> Any:
        function = getattr(cls, name)
        return lambda self, *args, **kwargs: _touch(function, (self, *args), kwargs)

    members = {"__slots__": (), "_plain_class": cls, "__repr__": through("__repr__"),
               "__deepcopy__": through("__deepcopy__"), "__reduce_ex__": _reduce, "set_": _set_storage}  # fmt: skip
    return type("Guarded" + cls.__name__, (Guard, cls), members)


def is_guarded(tensor: object) -> bool:
    return isinstance(tensor, Guard)


def plain(tensor: _T) -> None:
    """Give the tensor its own class back."""
    cls = type(tensor)
    if issubclass(cls, Guard):
        tensor.__class__ = cls._plain_class  # type: ignore[attr-defined]


def shut(tensor: _T) -> None:
    """Give the tensor its guard class; one of a class that cannot be replaced stays as it is."""
    cls = type(tensor)
    if not issubclass(cls, Guard) and cls in (_T, nn.Parameter):
        tensor.__class__ = guard_class(cls)


def _reduce(self: Any, protocol: Any) -> Any:
    """Pickle a copy: the bytes are written after pickling, when a lease would be gone."""
    with torch.no_grad():
        twin = self.detach().clone()
    plain(twin)
    if isinstance(self, nn.Parameter):
        twin = nn.Parameter(twin, self.requires_grad)
    return twin.__reduce_ex__(protocol)


def _touch(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation on guarded tensors with their bytes leased."""
    name = getattr(func, "__name__", "")
    if func in _ALIASES:
        return _alias(func, args, kwargs)
    if func is _DATA_SET or func == _DATA_SET:
        return _set_data(*args)
    if name.startswith("_foreach"):
        rows = _rows(args)
        if rows is not None:
            outs = [func(*row, **kwargs) for row in rows]
            return None if outs[0] is None else [o[0] if isinstance(o, list | tuple) else o for o in outs]
    leaves = args[:1] if name == "__deepcopy__" else pytree.tree_leaves((args, kwargs))
    touched = list({id(leaf): leaf for leaf in leaves if isinstance(leaf, Guard)}.values())
    places = {id(place): place for t in touched if (place := _places.get(storage_key(t) or 0)) is not None}  # type: ignore[arg-type]
    if not places:
        return _run(func, args, kwargs, touched)
    place = next(iter(places.values()))
    residency, saved = place.book.residency, place.book.saved
    bundles = list(dict.fromkeys(b for p in places.values() for b in p.bundles))
    escapes = func in _ESCAPES
    writes = (
        escapes
        or (name.endswith("_") and not name.endswith("__"))
        or name in ("__set__", "__setitem__")
        or "out" in kwargs
    )
    residency.acquire(bundles, Mode.UPDATE if writes else Mode.READ)
    kept = False
    try:
        versions = [t._version for t in touched if not t.is_inference()]  # type: ignore[attr-defined]
        pushed = saved.push()
        try:
            out = _run(func, args, kwargs, touched)
        finally:
            if pushed:
                saved.pop()
        if versions != [t._version for t in touched if not t.is_inference()]:  # type: ignore[attr-defined]
            _take_changes(residency, bundles, writes)
        if escapes:
            kept = _keep_while_alive(residency, bundles, out)
    finally:
        if not kept:
            residency.release(bundles)
    return _guard_aliases(out)


def _run(func: Any, args: Any, kwargs: Any, touched: list[Any]) -> Any:
    """Call with plain classes. With no place behind them (a job that ended), guards are only a leftover."""
    classes = [type(t) for t in touched]
    for tensor in touched:
        plain(tensor)
    try:
        return func(*args, **kwargs)
    finally:
        for tensor, cls in zip(touched, classes, strict=True):
            if storage_key(tensor) in _places:
                tensor.__class__ = cls


def _take_changes(residency: Residency, bundles: list[Bundle], leased: bool) -> None:
    """An operation changed bytes: make them the newest version. One whose name did not say so wrote under a reading
    lease; the upgrade waits for a write-back that may have seen half of it, and supersedes that.
    """
    if not leased:
        residency.acquire(bundles, Mode.UPDATE)
    for bundle in bundles:
        bundle.written = True
    if not leased:
        residency.release(bundles)


def _keep_while_alive(residency: Residency, bundles: list[Bundle], out: Any) -> bool:
    """Keep the lease until `out` dies; its holder may write through it at any time, so that ends as a commit."""

    def let_go() -> None:
        _take_changes(residency, [bundle for bundle in bundles if not bundle.writable], False)  # committed meanwhile
        for bundle in bundles:
            bundle.written = True
        residency.release(bundles)

    try:
        weakref.finalize(out, residency.later, let_go).atexit = False
    except TypeError:
        return False
    return True


def _alias(func: Any, args: Any, kwargs: Any) -> Any:
    """detach and .data: another tensor over the same bytes, nothing is read."""
    caller = sys._getframe(3)
    if caller.f_code.co_name == "_sync_module_states":
        raise Unsupported(
            "DistributedDataParallel sends parameters to the other processes from C++ when it is made, where they "
            "cannot be leased; make it before attach, or with init_sync=False where all processes start alike"
        )
    with _Plain():
        out = func(*args, **kwargs)
    if caller.f_code is nn.Parameter.__new__.__code__:  # it insists on the class it has put in
        out.__class__ = type(args[0])
        return out
    return _guard_aliases(out)


def _set_data(tensor: Any, value: Any) -> None:
    """`p.data = x` copies into the place; another form would be another tensor."""
    with _Plain():
        same = value.shape == tensor.shape and value.dtype == tensor.dtype and value.device == tensor.device
    if not same:
        raise Unsupported(
            f"a managed tensor of shape {tuple(tensor.shape)}, {tensor.dtype} on {tensor.device} is assigned data of "
            f"shape {tuple(value.shape)}, {value.dtype} on {value.device}; "
            "convert or resize the model before attach, or detach() first"
        )
    version = tensor._version
    with torch.no_grad():
        tensor.detach().copy_(value)
    torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))  # as in torch, no version moves


def _set_storage(tensor: Any, source: Any = None, *place: Any, **named: Any) -> Any:
    """`p.set_(x)`, which torch does not dispatch (parametrizations are removed like that): as `p.data = x`, but a new
    version.
    """
    if not isinstance(tensor, nn.Parameter) or not isinstance(source, _T) or place or named:
        raise Unsupported(
            f"set_() would point a managed tensor of shape {tuple(tensor.shape)} at other memory; "
            "copy_() into it, or detach() first"
        )
    _set_data(tensor, source)
    torch._C._autograd._unsafe_set_version_counter((tensor,), (tensor._version + 1,))
    return tensor


def _rows(args: Any) -> list[list[Any]] | None:
    """A list operation as one call per element; None where it has no lists of one length."""
    lists = [i for i, a in enumerate(args) if isinstance(a, list | tuple) and a and isinstance(a[0], _T)]
    lengths = {len(args[i]) for i in lists}
    if len(lengths) != 1 or lengths == {1}:
        return None
    (length,) = lengths
    return [
        [[a[j]] if i in lists or (isinstance(a, list | tuple) and len(a) == length) else a for i, a in enumerate(args)]
        for j in range(length)
    ]


def _guard_aliases(out: Any) -> Any:
    """Results that share managed storage are guarded as well."""
    for leaf in pytree.tree_leaves(out):
        if type(leaf) in (_T, nn.Parameter) and storage_key(leaf) in _places:
            shut(leaf)
    return out
