"""`state_dict` and `load_state_dict` of model and optimizer: what leaves is a private copy, what arrives is copied in;
one module's bundles are leased at a time.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from tiermem.bundle import Mode
from tiermem.errors import Unsupported
from tiermem_client.hook_objects import LeavesNoCopy
from tiermem_client.memory import Bundle
from tiermem_client.private_copies import PrivateCopies
from tiermem_client.residency import Residency
from tiermem_client.storage_swap import alias, storage_key
from tiermem_client.units import ManagedStorage
from tiermem_client.updates import Updater


class _SavedHook(LeavesNoCopy):
    """torch marks the hook object, which a bound method does not allow."""

    def __init__(self, checkpoints: ModelCheckpoints) -> None:
        self._checkpoints = checkpoints

    def __call__(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
        self._checkpoints.saved(module, state_dict, prefix)


class _LoadHook(LeavesNoCopy):
    def __init__(self, checkpoints: ModelCheckpoints) -> None:
        self._checkpoints = checkpoints

    def __call__(self, module: nn.Module, state_dict: Any, prefix: str, metadata: dict[str, Any], *rest: Any) -> None:
        self._checkpoints.load(module, metadata)


class _LoadedHook(LeavesNoCopy):
    def __init__(self, checkpoints: ModelCheckpoints) -> None:
        self._checkpoints = checkpoints

    def __call__(self, module: nn.Module, incompatible_keys: Any) -> None:
        self._checkpoints.release()


class ModelCheckpoints:
    """Hooks on every module with parameters of its own."""

    def __init__(self, residency: Residency, storages: Mapping[int, ManagedStorage], copies: PrivateCopies) -> None:
        self._residency, self._storages, self._copies = residency, storages, copies
        self._loading: list[Bundle] = []
        self._made_for: Callable[[], object] = lambda: None  # the state_dict that is being filled, weakly
        self._made: dict[int, torch.Tensor] = {}

    def install(self, model: nn.Module) -> Callable[[], None]:
        """Returns the undo."""
        handles: list[Any] = [model.register_load_state_dict_post_hook(_LoadedHook(self))]
        for module in model.modules():
            if any(True for _ in module.parameters(recurse=False)):
                handles.append(module.register_state_dict_post_hook(_SavedHook(self)))
                handles.append(module.register_load_state_dict_pre_hook(_LoadHook(self)))

        def undo() -> None:
            for handle in handles:
                handle.remove()

        return undo

    def saved(self, module: nn.Module, state_dict: dict[str, Any], prefix: str) -> None:
        """Put copies in the place of a module's own managed parameters."""
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            entry = state_dict.get(prefix + name)
            storage = self._storages.get(storage_key(parameter) or 0)
            if (
                storage is None
                or not isinstance(entry, torch.Tensor)
                or entry is parameter
                or storage_key(entry) != storage_key(parameter)
            ):
                continue
            # Tied parameters share one copy within one state_dict call, as they share one storage in the model.
            if self._made_for() is not state_dict:
                self._made_for, self._made = _weakly(state_dict), {}
            key = storage_key(parameter) or 0
            if key not in self._made:
                self._made[key] = self._copy_storage(storage)
            twin = torch.empty(0, dtype=entry.dtype)
            state_dict[prefix + name] = twin.set_(
                self._made[key].untyped_storage(), entry.storage_offset(), entry.shape, entry.stride()
            )

    def _copy_storage(self, storage: ManagedStorage) -> torch.Tensor:
        assert storage.group is not None
        bundles = storage.group.bundles
        self._residency.acquire(bundles, Mode.READ)
        try:
            size, device = storage.nbytes, storage.storage.device
            return self._copies.copy(alias(storage.address, size, torch.uint8, (size,), device=device))
        finally:
            self._residency.release(bundles)

    def load(self, module: nn.Module, local_metadata: dict[str, Any]) -> None:
        """The module's own parameters are about to be copied into."""
        if local_metadata.get("assign_to_params_buffers"):
            raise Unsupported(
                "load_state_dict(assign=True) replaces managed parameters by other objects; load with assign=False"
            )
        self.release()
        groups = dict.fromkeys(
            s.group
            for p in module.parameters(recurse=False)
            if (s := self._storages.get(storage_key(p) or 0)) and s.group
        )
        bundles = [b for group in groups for b in group.bundles]
        self._residency.acquire(bundles, Mode.UPDATE)
        for bundle in bundles:
            bundle.written = True
        self._loading = bundles

    def release(self) -> None:
        """The last module has been loaded."""
        bundles, self._loading = self._loading, []
        self._residency.release(bundles)


def _weakly(state_dict: Any) -> Callable[[], object]:
    """A reference that does not keep it alive; a plain dict (no weak references) is never taken for the same one."""
    try:
        return weakref.ref(state_dict)
    except TypeError:
        return lambda: None


class OptimizerCheckpoints:
    """Hooks on the optimizer's state_dict and load_state_dict."""

    def __init__(self, residency: Residency, updater: Updater, copies: PrivateCopies) -> None:
        self._residency, self._updater, self._copies = residency, updater, copies

    def install(self, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
        """Returns the undo."""
        handles = [
            optimizer.register_state_dict_post_hook(self._saved),
            optimizer.register_load_state_dict_pre_hook(lambda optimizer, state_dict: self._updater.settle()),
            optimizer.register_load_state_dict_post_hook(self._loaded),
        ]

        def undo() -> None:
            for handle in handles:
                handle.remove()

        return undo

    def _saved(self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        packed = {}
        for index, values in state_dict["state"].items():
            parameter = parameters[index] if isinstance(index, int) else index
            packed[index] = self.private_state(parameter, values)
        state_dict["state"] = packed

    def private_state(self, parameter: nn.Parameter, values: Mapping[str, Any]) -> dict[str, Any]:
        """The values with every stored tensor replaced by a copy."""
        bundles = self._updater.shown.bundles_of(parameter)
        addresses = self._updater.shown.addresses_of(parameter)
        self._residency.acquire(bundles, Mode.READ)
        try:
            return {
                k: self._copies.copy(v) if isinstance(v, torch.Tensor) and v.data_ptr() in addresses else v
                for k, v in values.items()
            }
        finally:
            self._residency.release(bundles)

    def _loaded(self, optimizer: torch.optim.Optimizer) -> None:
        self._updater.shown.adopt()
        self._updater.watch_state()
