"""What `attach` accepts besides a model and a torch optimizer. Nothing here imports another library: objects of one are
recognised only where the script has imported it.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

from tiermem.errors import InvalidArgument
from tiermem_client.integrations import transformers


def resolve(target: Any, optimizer: Any) -> tuple[nn.Module, torch.optim.Optimizer | None]:
    """The model and the optimizer that do the work: those of a transformers `Trainer` (its optimizer is made now if it
    has none yet), and what accelerate has wrapped.

    Raises InvalidArgument for anything else, Unsupported for a Trainer whose training would not use them.
    """
    if transformers.is_trainer(target):
        if optimizer is not None:
            raise InvalidArgument(
                "attach(trainer) takes the Trainer's own optimizer; "
                "give yours to the Trainer, as optimizers=(optimizer, None)"
            )
        target, optimizer = transformers.parts(target)
    optimizer = _unwrapped(optimizer)
    if not isinstance(target, nn.Module):
        raise InvalidArgument(
            f"attach expects a torch.nn.Module or a transformers.Trainer, not {type(target).__name__}"
        )
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise InvalidArgument(f"attach expects a torch.optim.Optimizer, not {type(optimizer).__name__}")
    return target, optimizer


def _unwrapped(optimizer: Any) -> Any:
    """The torch optimizer inside accelerate's, which has no hooks and no `step` of its own."""
    library = sys.modules.get("accelerate.optimizer")
    while library is not None and isinstance(optimizer, library.AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    return optimizer
