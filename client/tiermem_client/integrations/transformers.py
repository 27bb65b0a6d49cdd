"""`tiermem.attach(trainer)`: the model and the optimizer of a transformers `Trainer`, before it trains."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

from tiermem.errors import Unsupported


def is_trainer(target: object) -> bool:
    """Whether it is a `transformers.Trainer`; False without import where the script has not imported that."""
    library = sys.modules.get("transformers.trainer")
    return library is not None and isinstance(target, library.Trainer)


def parts(trainer: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The Trainer's model, and its optimizer, made now by its own `create_optimizer` if it has none.

    The Trainer keeps an optimizer that exists when `train` is called, so the one that is returned is the one that
    trains. Raises Unsupported where that is not so.
    """
    name = type(trainer).__name__
    if trainer.model_init is not None:
        raise Unsupported(
            f"{name} has a model_init, so train() makes another model than the one that exists now; "
            "give it a model instead"
        )
    for what in ("deepspeed", "fsdp", "fsdp_xla"):
        if getattr(trainer, f"is_{what}_enabled", False):
            raise Unsupported(
                f"{name} runs with {what}, which moves parameters and optimizer state itself; "
                "train without it, tiermem takes its place"
            )
    if trainer.optimizer is None:
        trainer.create_optimizer()
    optimizer = trainer.optimizer
    if type(optimizer).__name__ == "LayerWiseDummyOptimizer":
        raise Unsupported(
            f"{name} runs with optim={trainer.args.optim!r}, which updates inside backward; "
            "choose one that updates in step()"
        )
    return trainer.model, optimizer
