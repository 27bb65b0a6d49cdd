"""Version counters of tensors that autograd has saved: by them it knows whether one was changed in place since."""

from __future__ import annotations

from typing import Any

import torch

_autograd: Any = torch._C._autograd


class VersionCounter:
    """The version counter of a tensor, without its bytes."""

    __slots__ = ("_twin",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self._twin = tensor.detach()  # shares the counter, and keeps it when its data is replaced
        self._twin.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)

    @property
    def now(self) -> int:
        return self._twin._version

    def is_of(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor counts with this very counter, and not with another one that is as high."""
        version = tensor._version
        if version != self.now:
            return False
        _autograd._unsafe_set_version_counter((tensor,), (version + 1,))
        try:
            return self.now == version + 1
        finally:
            _autograd._unsafe_set_version_counter((tensor,), (version,))


def check_version(now: int, then: int, size: torch.Size, dtype: torch.dtype) -> None:
    """Raises RuntimeError, as autograd does, if the tensor was changed in place."""
    if now != then:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"[{dtype} {list(size)}] is at "
            f"version {now}; expected version {then} instead."
        )
