"""Tensors that autograd saves for backward. One that aliases managed storage is packed as its place in the store;
`unpack` leases it again and holds it until the node that uses it is done. Hooks predict, unpack guarantees.

[Note: when is a node done?] Backward runs one node at a time per graph task. An unpack by another node of the same task
means that the earlier node has finished; the engine's final callback means that the last one has. A nested task
(reentrant checkpointing) does not end the node that started it, so holds are kept per task. Holds of the same unit are
kept over its nodes: a block is leased once. A recomputation runs inside one node, over many units where a checkpoint
spans them: it holds the unit whose forward runs, and the last one until another is needed, as backward begins with it.

[Note: hooks below ours] torch applies only the top pair of hooks. Inside a checkpointed block that is the checkpoint's,
so a unit pushes ours on top, and ours hands everything that is not managed to the pair below, in the same order in
forward and recomputation.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._compile import _disable_dynamo

from tiermem.bundle import Mode
from tiermem.errors import TiermemError, Unsupported
from tiermem.plan import Phase
from tiermem_client.activations import Activations
from tiermem_client.memory import Bundle
from tiermem_client.residency import Residency
from tiermem_client.saved_versions import check_version
from tiermem_client.storage_swap import storage_key
from tiermem_client.units import ManagedStorage

_autograd: Any = torch._C._autograd


@dataclass(slots=True, frozen=True)
class PackedAlias:
    """A saved view of managed storage: enough to rebuild it, and the version it had."""

    storage: ManagedStorage
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    version: int
    counter: Callable[[], int]


@dataclass(slots=True, frozen=True)
class PackedOther:
    """Something else, held as it is (detached, since an output that holds itself would be a cycle); `version` as
    autograd would check.
    """

    tensor: torch.Tensor
    version: int


@dataclass(slots=True, frozen=True)
class PackedBelow:
    """What the pair of hooks below ours made of it, or the store of activations."""

    unpack: Callable[[Any], torch.Tensor]
    value: Any


@dataclass(slots=True)
class _Hold:
    """`node` is None where no node needs it any more; it stays only in case that the same owner is next."""

    task: int
    node: Any
    owner: object
    bundles: list[Bundle]


@dataclass(slots=True, eq=False)
class SavedTensorHooks:
    """The pair of hooks, and what backward holds, under the client lock. `storages` are the managed ones by key."""

    residency: Residency
    storages: Mapping[int, ManagedStorage]
    on_backward_end: Callable[[], None]
    activations: Activations | None = None
    _holds: list[_Hold] = field(default_factory=list)
    _tasks: set[int] = field(default_factory=set)
    _local: threading.local = field(default_factory=threading.local)
    _pack_in_backward: Any = None

    # -- pushing and popping

    @property
    def pushed(self) -> list[Any]:
        """Ours that are on this thread's stack, the lowest first; whoever exchanges that stack exchanges this too."""
        pushed: list[Any] = self._local.__dict__.setdefault("pushed", [])
        return pushed

    @pushed.setter
    def pushed(self, pushed: list[Any]) -> None:
        self._local.pushed = pushed

    @_disable_dynamo
    def push(self) -> bool:
        """Put ours on this thread's top unless they are there. True if they were pushed, and `pop` is owed."""
        pushed = self.pushed
        top = _autograd._top_saved_tensors_default_hooks(False)
        if pushed and top is not None and top[0] is pushed[-1][0]:
            return False
        pack, unpack = self._pair(top)
        _autograd._push_saved_tensors_default_hooks(pack, unpack)
        pushed.append((pack, top))
        return True

    @property
    def below(self) -> tuple[Any, Any] | None:
        """The pair below this thread's top one of ours."""
        pushed: list[Any] = self._local.__dict__.get("pushed") or [(None, None)]
        below: tuple[Any, Any] | None = pushed[-1][1]
        return below

    @_disable_dynamo
    def pop(self) -> None:
        self._local.pushed.pop()
        _autograd._pop_saved_tensors_default_hooks()

    def _pair(
        self, below: tuple[Any, Any] | None
    ) -> tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]:
        def pack(tensor: torch.Tensor) -> Any:
            storage = self.storages.get(storage_key(tensor) or 0)
            if storage is not None:
                return _pack_alias(storage, tensor)
            if below is not None:
                return PackedBelow(below[1], below[0](tensor))
            if self.activations is not None and (view := self.activations.pack(tensor)) is not None:
                return PackedBelow(self.activations.unpack, view)
            return PackedOther(tensor.detach() if tensor.grad_fn is not None else tensor, tensor._version)

        return pack, self.unpack

    # -- backward

    def unpack(self, packed: Any) -> torch.Tensor:
        """The saved tensor, readable until its node is done. Raises RuntimeError, as autograd does, if it was changed
        in place.
        """
        match packed:
            case PackedAlias():
                check_version(packed.counter(), packed.version, packed.size, packed.dtype)
                group = packed.storage.group
                assert group is not None
                self.hold(group.owner, group.bundles, group.unit)
                if torch.is_grad_enabled():
                    self._push_for_this_node()
                storage = packed.storage.storage
                empty = torch.empty(0, dtype=packed.dtype, device=storage.device)
                return empty.set_(storage, packed.offset, packed.size, packed.stride)
            case PackedBelow():
                return packed.unpack(packed.value)
            case PackedOther():
                check_version(packed.tensor._version, packed.version, packed.tensor.size(), packed.tensor.dtype)
                return packed.tensor
            case _:
                raise TiermemError(f"a saved tensor of unknown form {type(packed).__name__}")

    def _push_for_this_node(self) -> None:
        """The graph of this backward is recorded too (double backward): what the node saves of managed storage is
        packed as well. The engine restores the thread's hooks after every node, so there is no pop.
        """
        top = _autograd._top_saved_tensors_default_hooks(False)
        if top is None or top[0] is not self._pack_in_backward:
            self._pack_in_backward, unpack = self._pair(top)
            _autograd._push_saved_tensors_default_hooks(self._pack_in_backward, unpack)

    def hold(self, owner: object, bundles: list[Bundle], backward_of: str | None = None) -> bool:
        """Lease for the node that runs now, and let go of what earlier nodes of other owners held. True if this node
        did not hold for the owner before. `backward_of`: the unit whose backward this is.
        """
        with self.residency.session.lock:
            task, node = torch._C._current_graph_task_id(), torch._C._current_autograd_node()
            if task == -1:
                raise TiermemError("a saved tensor was unpacked outside backward; read it through the module's forward")
            if task not in self._tasks:
                _refuse_compiled_autograd()
                self._tasks.add(task)
                torch.autograd.Variable._execution_engine.queue_callback(lambda: self.end_task(task))
            if backward_of is not None:
                self.residency.accessed(backward_of, Phase.BACKWARD)
            mine = next((h for h in self._holds if h.task == task and h.owner is owner), None)
            if mine is not None and len(self._holds) == 1 and all(bundle in mine.bundles for bundle in bundles):
                first, mine.node = mine.node is not node, node  # the usual case: the same unit goes on
                return first
            done = [h for h in self._holds if h.node is None or (h.task == task and h.node is not node)]
            self._release([h for h in done if h.owner is not owner])
            first = mine is None or mine.node is not node
            if mine is None:
                mine = _Hold(task, node, owner, [])
                self._holds.append(mine)
            mine.node = node
            more = [bundle for bundle in bundles if bundle not in mine.bundles]
            self.residency.acquire(more, Mode.READ)
            mine.bundles += more
            return first

    def loosen(self, owner: object) -> None:
        """The recomputation that `hold` was for has ended: let go when another owner is held."""
        with self.residency.session.lock:
            task = torch._C._current_graph_task_id()
            for hold in self._holds:
                if hold.task == task and hold.owner is owner:
                    hold.node = None

    @staticmethod
    def in_backward() -> bool:
        """Whether the engine runs in this thread now."""
        return torch._C._current_graph_task_id() != -1

    def end_task(self, task: int) -> None:
        """The engine has run the task's last node."""
        with self.residency.session.lock:
            self._tasks.discard(task)
            self._release([h for h in self._holds if h.task == task])
            if not self._tasks:
                if self.activations is not None:
                    self.activations.backward_ended()
                self.on_backward_end()
                self.residency.rests()

    def abandon(self) -> None:
        """Between steps: what a backward that raised still holds is let go."""
        with self.residency.session.lock:
            if torch._C._current_graph_task_id() == -1:
                self._tasks.clear()
                self._release(list(self._holds))

    def _release(self, holds: list[_Hold]) -> None:
        for hold in holds:
            self._holds.remove(hold)
            self.residency.release(hold.bundles)


def _pack_alias(storage: ManagedStorage, tensor: torch.Tensor) -> PackedAlias:
    # detach() shares the version counter and costs no bytes: its storage is the managed one, whose address space stays
    # reserved.
    twin = tensor.detach()
    return PackedAlias(
        storage,
        tensor.dtype,
        tensor.size(),
        tensor.stride(),
        int(tensor.storage_offset()),
        tensor._version,
        lambda: twin._version,
    )


def _refuse_compiled_autograd() -> None:
    library = sys.modules.get("torch._dynamo.compiled_autograd")
    if library is not None and library.in_compiled_autograd_region:
        raise Unsupported(
            "compiled autograd runs backward as one graph, all of whose saved tensors are unpacked at once; "
            "leave torch._dynamo.config.compiled_autograd off"
        )
