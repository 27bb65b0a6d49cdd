"""A model that was made in host memory, trained on another device: as after `model.to(device)`, but its parameters take
no memory there until they are in the store.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn

from tiermem_client.storage_swap import alias, leave_host, return_to_host, storage_key
from tiermem_client.units import ManagedStorage


@dataclass(slots=True, eq=False)
class Relocation:
    """What was moved, and the way back. `storages` by key are those of the model; the table is kept true."""

    device: torch.device
    storages: dict[int, ManagedStorage]
    _went: set[nn.Parameter] = field(default_factory=set, repr=False)
    _moved: list[ManagedStorage] = field(default_factory=list)
    _buffers: list[tuple[nn.Module, str, torch.Tensor]] = field(default_factory=list)

    def go(self, model: nn.Module) -> None:
        """Move all parameters and buffers that are in host memory, unless that is the device. The parameters' bytes
        stay where they were (`ManagedStorage.host`).
        """
        for storage in list(self.storages.values()):
            if self._is_there(storage.storage.device):
                continue
            elsewhere = leave_host(storage.storage, storage.tensors, self.device)
            storage.host, storage.storage = storage.storage, elsewhere
            self._moved.append(storage)
            self._went.update(storage.tensors)
        if self._moved:
            table = {storage_key(s.parameters[0].parameter) or 0: s for s in self.storages.values()}
            self.storages.clear()
            self.storages.update(table)
            self._move_buffers(model)

    def _is_there(self, device: torch.device) -> bool:
        return device.type == self.device.type

    def _move_buffers(self, model: nn.Module) -> None:
        there: dict[torch.Tensor, torch.Tensor] = {}  # one that several modules share stays one
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is None or self._is_there(buffer.device):
                    continue
                self._buffers.append((module, name, buffer))
                if buffer not in there:
                    there[buffer] = buffer.to(self.device, copy=True)
                module._buffers[name] = there[buffer]

    def fetch(self, storage: ManagedStorage) -> bool:
        """Bring a storage that moved back to host memory; its bytes are readable now. False for one that did not."""
        if storage not in self._moved:
            return False
        self._moved.remove(storage)
        host = torch.empty(storage.nbytes, dtype=torch.uint8)
        if storage.nbytes:
            host.copy_(alias(storage.address, storage.nbytes, torch.uint8, (storage.nbytes,), device=self.device))
        return_to_host(host.untyped_storage(), storage.tensors)
        return True

    def back(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Bring back what never got into the store, the buffers, and the optimizer's state."""
        for storage in self._moved:
            if storage.host is not None:
                return_to_host(storage.host, storage.tensors)
                storage.host = None
        for module, name, original in self._buffers:
            current = module._buffers.get(name)
            if current is not None and current.shape == original.shape:
                module._buffers[name] = original.copy_(current)
        if optimizer is not None:
            for parameter in self._went.intersection(optimizer.state):
                state = optimizer.state[parameter]
                state.update({k: v.to("cpu") for k, v in state.items() if isinstance(v, torch.Tensor)})
        self._went.clear()
        self._moved.clear()
        self._buffers.clear()
