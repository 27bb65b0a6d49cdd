"""What depends on the order in which microbatches run, besides autograd's own: state that forwards change, and sums of
which the order shows in the last bits.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

KEPT_BYTES = 1 << 20
"""Buffers of at most this size are put back: running statistics and counters. Larger ones are tables."""


@dataclass(frozen=True, slots=True)
class _Buffer:
    owner: nn.Module
    key: str
    name: str
    tensor: torch.Tensor
    version: int
    copy: torch.Tensor | None  # None: too large to be kept

    @property
    def changed(self) -> bool:
        """Small ones are compared by their bytes: normalisation on the CPU moves no version counter."""
        if self.owner._buffers.get(self.key) is not self.tensor or self.tensor._version != self.version:
            return True
        return self.copy is not None and not torch.equal(_bytes(self.tensor), _bytes(self.copy))

    def put_back(self) -> None:
        if self.copy is not None:
            self.owner._buffers[self.key] = self.tensor
            with torch.no_grad():
                self.tensor.copy_(self.copy)


@dataclass(frozen=True, slots=True)
class OrderWatch:
    """The buffers of a model, and the random state of Python and numpy, at one moment."""

    buffers: tuple[_Buffer, ...]
    generators: tuple[Any, ...]

    @classmethod
    def begun(cls, model: nn.Module) -> OrderWatch:
        """Copies small buffers."""
        buffers = []
        for prefix, owner in model.named_modules():
            for key, tensor in owner._buffers.items():
                if tensor is not None:
                    kept = tensor.numel() * tensor.element_size() <= KEPT_BYTES
                    copy = tensor.detach().clone() if kept else None
                    name = f"{prefix}.{key}" if prefix else key
                    buffers.append(_Buffer(owner, key, name, tensor, tensor._version, copy))
        return cls(tuple(buffers), _generators())

    def changes(self) -> str:
        """What has changed since, as text; empty where nothing has."""
        for buffer in self.buffers:
            if buffer.changed:
                left = "" if buffer.copy is not None else ", whose old values are lost,"
                return f"the buffer {buffer.name!r}{left} is changed by the forward"
        return "" if _generators() == self.generators else "random numbers of Python or numpy are drawn"

    def put_back(self) -> None:
        """Give buffers their old values, and Python and numpy their old random state."""
        for buffer in self.buffers:
            if buffer.changed:
                buffer.put_back()
        python, numpy_state = self.generators
        random.setstate(python)
        if numpy_state is not None:
            name, keys, *rest = numpy_state
            numpy = sys.modules["numpy"]
            numpy.random.set_state((name, numpy.frombuffer(keys, dtype=numpy.uint32), *rest))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


def _generators() -> tuple[Any, ...]:
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return random.getstate(), None
    name, keys, *rest = numpy.random.get_state()
    return random.getstate(), (name, keys.tobytes(), *rest)


def adds_up_several(roots: Iterable[torch.Tensor]) -> bool:
    """Whether a backward from there adds several contributions up in one leaf. What a reentrant checkpoint hides is not
    seen.
    """
    contributions: Counter[Any] = Counter()
    seen = {root.grad_fn for root in roots if root.grad_fn is not None}
    left = list(seen)
    while left:
        node = left.pop()
        for following, _ in node.next_functions:
            if following is None:
                continue
            if hasattr(following, "variable"):
                contributions[following] += 1
            elif following not in seen:
                seen.add(following)
                left.append(following)
    return any(number > 1 for number in contributions.values())
