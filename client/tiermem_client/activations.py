"""Activations in the store: what autograd saves in a unit whose policy is to offload.

Bytes are copied into bundles once when a tensor is saved, and out of them once when backward wants it; in between the
script's memory has neither. A copy, not a lease, since nobody can say when the last view of a saved tensor is gone: so
backward holds no more than one bundle of this kind at a time, and its floor hardly grows.

[Note: what is saved once] Saved tensors that share storage share a `_Saved`. As their bytes would be one in memory, so
they are here: where the storage's bytes may have changed since (another version, or another counter, as of `x.data`),
they are stored again in the place of the old ones, and each tensor's own version says whether autograd would refuse it.
Not seen is what changes the bytes past the version after the last time that they were saved, if the storage is gone
before backward. What stands outside the graph (a version counter, a storage's weak reference) costs no bytes. A storage
that still lives in backward, because the script holds it or a restored copy is in use, is taken as it is.

[Note: when bytes go] Autograd drops what a node has saved when the node has run, unless the graph is retained: then the
bytes are there for the next backward. Either way the last handle's end discards them, unread and unwritten where they
still are. A restored copy is kept for the other nodes of its unit, until backward turns to another unit; one that was
saved outside units for its node alone.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tiermem.errors import ResourceExhausted, TierFull, WorkingSetTooLarge
from tiermem.layout import TENSOR_ALIGN_BYTES
from tiermem.plan import Phase
from tiermem.units import format_size
from tiermem_client.activation_policy import Policy
from tiermem_client.activation_slots import ActivationSlots, Slot
from tiermem_client.saved_versions import VersionCounter, check_version
from tiermem_client.storage_swap import storage_key

MIN_BYTES = 64 << 10
"""Smaller storages stay where they are."""


@dataclass(slots=True)
class ActivationStats:
    """Bytes since attach: `offloaded` into the store, `restored` out of it for backward, `dropped` from the store
    because the graph is gone, and `kept` in the script's memory for want of room. `recomputed`: forwards run again in
    backward.
    """

    offloaded_bytes: int = 0
    restored_bytes: int = 0
    dropped_bytes: int = 0
    kept_bytes: int = 0
    recomputed: int = 0

    @property
    def stored_bytes(self) -> int:
        """In the store now."""
        return self.offloaded_bytes - self.dropped_bytes


@dataclass(slots=True, eq=False)
class _Stored:
    """Where bytes are; outlives the `_Saved`, for its finalizer."""

    slot: Slot
    nbytes: int


@dataclass(slots=True, eq=False, weakref_slot=True)
class _Saved:
    """A span of a storage's bytes, [start, start + nbytes), as it was at `version` of `counter`."""

    origin: StorageWeakRef
    origin_bytes: int
    counter: VersionCounter
    version: int
    start: int
    nbytes: int
    stored: _Stored
    copy: torch.UntypedStorage | None = None  # while more of its unit's nodes may want it
    copied: StorageWeakRef | None = None

    def covers(self, tensor: torch.Tensor, start: int, stop: int) -> bool:
        whole = self.start <= start and stop <= self.start + self.nbytes
        return whole and self.start % tensor.element_size() == 0

    def is_fresh(self, tensor: torch.Tensor) -> bool:
        """Whether the bytes of the tensor's storage are still those that are stored."""
        return tensor._version == self.version and self.counter.is_of(tensor)


@dataclass(slots=True, frozen=True)
class _View:
    """One saved tensor: enough to make it again, and the version it had."""

    saved: _Saved
    unit: str
    counter: VersionCounter
    version: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


@dataclass(slots=True, eq=False)
class Activations:
    """Called by the hooks for saved tensors. `units` are the policies; `on_kept` is told once why tensors stay.

    `unit` is per thread; the rest is guarded by the client lock, but for finalizers, which leave work behind.
    """

    slots: ActivationSlots
    policies: Mapping[str, Policy]
    own: Callable[[], set[int]]  # storages that live on anyway: the model's buffers
    on_kept: Callable[[str], None] = lambda text: None
    on_pressure: Callable[[], None] = lambda: None  # gives back what backward holds for convenience
    stats: ActivationStats = field(default_factory=ActivationStats)
    _local: threading.local = field(default_factory=threading.local)
    _living: weakref.WeakValueDictionary[int, _Saved] = field(default_factory=weakref.WeakValueDictionary)
    _copied: list[weakref.ref[_Saved]] = field(default_factory=list)
    _copied_for: str | None = None
    _buffers: set[int] | None = None
    _full_at_bytes: float = math.inf  # so many in the store were too many in this step
    _told: bool = False

    # -- which unit saves

    def enter(self, unit: str) -> None:
        """What this thread saves from now on is of this unit."""
        self._stack.append(unit)

    def leave(self) -> None:
        self._stack.pop()

    @property
    def _stack(self) -> list[str]:
        stack: list[str] = self._local.__dict__.setdefault("units", [])
        return stack

    # -- saving

    def pack(self, tensor: torch.Tensor) -> _View | None:
        """The bytes go to the store; None where the tensor is to stay as it is."""
        stack = self._stack
        unit = stack[-1] if stack else ""
        if self.policies.get(unit) is not Policy.OFFLOAD or not _can_move(tensor):
            return None
        key = storage_key(tensor)
        if key is None or torch._C._current_graph_task_id() != -1 or key in self._owned():
            return None
        saved = self._saved(unit, key, tensor)
        if saved is None:
            return None
        version, counter = tensor._version, saved.counter
        offset = int(tensor.storage_offset())
        return _View(saved, unit, counter, version, tensor.dtype, tensor.size(), tensor.stride(), offset)

    def _owned(self) -> set[int]:
        if self._buffers is None:  # once for each forward
            self._buffers = self.own()
        return self._buffers

    def _saved(self, unit: str, key: int, tensor: torch.Tensor) -> _Saved | None:
        storage = tensor.untyped_storage()
        start, stop = _span(tensor)
        saved = self._living.get(key)
        if saved is not None and saved.covers(tensor, start, stop):
            if saved.is_fresh(tensor):
                return saved
            start, stop = saved.start, saved.start + saved.nbytes
        else:
            saved = None
            start, stop = wanted_span(start, stop, storage.nbytes())
        nbytes = stop - start
        if nbytes < MIN_BYTES:
            return None
        if self.stats.stored_bytes + nbytes >= self._full_at_bytes:  # the daemon would refuse again
            self.stats.kept_bytes += nbytes
            return None
        try:
            slot = self.slots.store(unit, storage.data_ptr() + start, nbytes)
        except (WorkingSetTooLarge, TierFull, ResourceExhausted) as error:
            self._keep(unit, nbytes, error)
            return None
        self.stats.offloaded_bytes += nbytes
        counter, version = VersionCounter(tensor), tensor._version
        if saved is not None:
            self._end(_Stored(saved.stored.slot, nbytes))
            saved.stored.slot, saved.counter, saved.version = slot, counter, version
            return saved
        stored = _Stored(slot, nbytes)
        saved = _Saved(StorageWeakRef(storage), storage.nbytes(), counter, version, start, nbytes, stored)
        weakref.finalize(saved, self._end, stored).atexit = False
        self._living[key] = saved
        return saved

    def _keep(self, unit: str, nbytes: int, error: Exception) -> None:
        self.stats.kept_bytes += nbytes
        if isinstance(error, TierFull):
            self._full_at_bytes = self.stats.stored_bytes + nbytes
        if not self._told:
            self._told = True
            self.on_kept(f"activations: {format_size(nbytes)} saved in {unit or '(root)'!r} kept in memory ({error})")

    def _end(self, stored: _Stored) -> None:
        """Nobody wants the bytes any more. A finalizer too, which may run anywhere."""

        def free() -> None:
            self.stats.dropped_bytes += stored.nbytes
            self.slots.free(stored.slot)

        self.slots.residency.later(free)

    # -- backward

    def unpack(self, view: _View) -> torch.Tensor:
        """The saved tensor. Raises RuntimeError, as autograd does, if it was changed in place, and as
        `Residency.acquire`.
        """
        check_version(view.counter.now, view.version, view.size, view.dtype)
        saved = view.saved
        with self.slots.residency.session.lock:
            if view.unit:
                self._turn_to(view.unit)
            storage, start = self._storage(saved, keep=bool(view.unit))
        offset = view.offset - start // view.dtype.itemsize
        return torch.empty(0, dtype=view.dtype).set_(storage, offset, view.size, view.stride)

    def _storage(self, saved: _Saved, keep: bool) -> tuple[torch.UntypedStorage, int]:
        """A storage with the saved bytes, and where in the original its first byte was."""
        if (origin := _alive(saved.origin)) is not None and origin.nbytes() == saved.origin_bytes:
            return origin, 0
        if saved.copy is not None:
            return saved.copy, saved.start
        if saved.copied is not None and (copied := _alive(saved.copied)) is not None:
            return copied, saved.start
        fresh = torch.empty(saved.nbytes, dtype=torch.uint8).untyped_storage()
        try:
            self.slots.load(saved.stored.slot, fresh.data_ptr(), saved.nbytes)
        except WorkingSetTooLarge:
            self.on_pressure()
            self.slots.load(saved.stored.slot, fresh.data_ptr(), saved.nbytes)
        self.stats.restored_bytes += saved.nbytes
        saved.copied = StorageWeakRef(fresh)
        if keep:
            saved.copy = fresh
            self._copied.append(weakref.ref(saved))
        return fresh, saved.start

    def _turn_to(self, unit: str) -> None:
        self.slots.residency.accessed(unit, Phase.BACKWARD)
        if unit != self._copied_for:
            self.rest()
            self._copied_for = unit

    def backward_ended(self) -> None:
        """Room, and the model's buffers, may be others in the next forward. Under the client lock."""
        self._full_at_bytes, self._buffers = math.inf, None
        self.rest()

    def rest(self) -> None:
        """Let go of the copies that were kept for other nodes of a unit. Under the client lock."""
        copied, self._copied, self._copied_for = self._copied, [], None
        saved = None
        for reference in copied:
            if (saved := reference()) is not None:
                saved.copy = None
        del saved
        self.slots.residency.run_unreferenced()


def wanted_span(start: int, stop: int, storage_bytes: int) -> tuple[int, int]:
    """The bytes to store for a tensor in [start, stop): the whole storage, of which others will save other parts,
    unless the tensor has less than half of it. The beginning is aligned as the storage is.
    """
    if 2 * (stop - start) >= storage_bytes:
        return 0, storage_bytes
    return start - start % TENSOR_ALIGN_BYTES, stop


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """The bytes of its storage in which its elements are, [start, stop)."""
    size = tensor.element_size()
    last = sum((n - 1) * step for n, step in zip(tensor.size(), tensor.stride(), strict=True))
    start = int(tensor.storage_offset()) * size
    return start, start + (last + 1) * size


def _can_move(tensor: torch.Tensor) -> bool:
    """Whether it is nothing but its bytes, in host memory."""
    return (
        type(tensor) is torch.Tensor
        and tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and tensor.numel() > 0
        and not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized)
        and not tensor.is_inference()
    )


def _alive(reference: StorageWeakRef) -> torch.UntypedStorage | None:
    made: Any = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
    return made  # type: ignore[no-any-return]
