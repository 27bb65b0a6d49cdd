"""The matrix of training scripts: its dimensions, what is left out and why, and a set of cases in which every pair of
values of two dimensions occurs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tests.integration.matrix_models import MODELS
from tests.integration.scripts import Script, gradients

Case = Mapping[str, str]  # a value for every dimension
Groups = list[dict[str, Any]]


# -- optimizers


class SignMomentum(torch.optim.Optimizer):
    """A stranger's: Lion, with a setting of the instance and state made in the first step."""

    def __init__(self, params: Any, lr: Any) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99), "weight_decay": 0.01})
        self.sharpness = 1.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                first, second = group["betas"]
                sign = torch.sign(state["momentum"] * first + parameter.grad * (1 - first)) * self.sharpness
                parameter.mul_(1 - group["lr"] * group["weight_decay"]).sub_(sign * group["lr"])
                state["momentum"].lerp_(parameter.grad, 1 - second)


class CountsInGroups(torch.optim.Optimizer):
    """Adam that counts its steps in its groups, one as a number and one as a tensor changed in place."""

    def __init__(self, params: Any, lr: Any) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.95)})
        for group in self.param_groups:
            group["decay"] = torch.ones(())

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
            group["decay"].mul_(group["betas"][1])
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["mean"], state["square"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
                first, second = group["betas"]
                mean = state["mean"].lerp_(parameter.grad, 1 - first) / (1 - first ** group["steps"])
                square = state["square"].lerp_(parameter.grad.square(), 1 - second) / (1 - group["decay"])
                parameter.sub_(group["lr"] * mean / (square.sqrt() + 1e-8))


@dataclass(frozen=True)
class OptimizerKind:
    """`takes`: the parameters that it can have; the script leaves out the others."""

    make: Callable[[Groups, Any], torch.optim.Optimizer]
    lr: float = 3e-3
    takes: Callable[[nn.Parameter], bool] = lambda parameter: True


def _kind(cls: Callable[..., torch.optim.Optimizer], lr: float = 3e-3, **options: Any) -> OptimizerKind:
    return OptimizerKind(lambda groups, rate: cls(groups, lr=rate, **options), lr)


def _matrices(parameter: nn.Parameter) -> bool:
    return parameter.ndim == 2


OPTIMIZERS = {
    "AdamW fused": _kind(torch.optim.AdamW, fused=True),
    "AdamW foreach": _kind(torch.optim.AdamW, foreach=True),
    "AdamW": _kind(torch.optim.AdamW),
    "Adam amsgrad": _kind(torch.optim.Adam, amsgrad=True),
    "SGD nesterov": _kind(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True),
    "Adafactor": _kind(torch.optim.Adafactor),
    "NAdam": _kind(torch.optim.NAdam),
    "RAdam": _kind(torch.optim.RAdam),
    "Muon": OptimizerKind(lambda groups, rate: torch.optim.Muon(groups, lr=rate), takes=_matrices),
    "RMSprop": _kind(torch.optim.RMSprop, lr=1e-3, momentum=0.9, centered=True),
    "Adagrad": _kind(torch.optim.Adagrad, lr=1e-2),
    "user-defined": _kind(SignMomentum, lr=1e-3),
    "group counters": _kind(CountsInGroups),
}

# -- the other dimensions: fields of the script


PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"dtype": torch.bfloat16},
    "bf16 autocast": {"autocast": True},
    "fp16 GradScaler": {"autocast": True, "autocast_dtype": torch.float16, "scaler": True},
}
HALF_PRECISION_DRAM = "1MiB"  # the state has half the bytes, and must not fit either
MICROBATCHES = {"1 microbatch": 1, "3 microbatches": 3}
CHECKPOINTING = {"keeps activations": "", "reentrant": "reentrant", "non-reentrant": "nonreentrant"}
SETTINGS: dict[str, dict[str, Any]] = {
    "one group": {},
    "several groups": {},
    "tensor lr": {"scheduler": lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)},
    "scheduler": {"scheduler": lambda optimizer: _one_cycle(optimizer)},
    "clip norm": {"clip": lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)},
    "clip value": {"clip": lambda model: torch.nn.utils.clip_grad_value_(model.parameters(), 1e-3)},
}


def _one_cycle(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """Moves the learning rate, and the momentum of optimizers that have one."""
    cycled = bool({"momentum", "betas"} & set(optimizer.defaults))
    rate = optimizer.defaults["lr"]
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2 * rate, total_steps=12, cycle_momentum=cycled)


DIMENSIONS: dict[str, tuple[str, ...]] = {
    "optimizer": tuple(OPTIMIZERS),
    "model": tuple(MODELS),
    "precision": tuple(PRECISIONS),
    "microbatches": tuple(MICROBATCHES),
    "checkpointing": tuple(CHECKPOINTING),
    "settings": tuple(SETTINGS),
}


@dataclass(frozen=True)
class Exclusion:
    """Cases with all these values are left out."""

    values: Case
    reason: str

    def holds(self, case: Case) -> bool:
        return all(case.get(dimension) == value for dimension, value in self.values.items())


EXCLUSIONS = (
    Exclusion(
        {"optimizer": "AdamW foreach", "settings": "tensor lr"},
        "torch refuses it: 'lr as a Tensor is not supported for capturable=False and foreach=True'",
    ),
    Exclusion(
        {"model": "frozen lower half", "checkpointing": "reentrant"},
        "torch's reentrant checkpoint cuts the graph where no input requires a gradient: it warns, nothing is trained",
    ),
)


def script(case: Case) -> Script:
    """The training script of a case: two steps, as the second begins with what the first has left; a third where one
    is skipped.
    """
    scaled = "scaler" in PRECISIONS[case["precision"]]
    model, kind, settings = MODELS[case["model"]], OPTIMIZERS[case["optimizer"]], case["settings"]
    checkpointing = CHECKPOINTING[case["checkpointing"]]

    def optimizer(module: nn.Module) -> torch.optim.Optimizer:
        mine = [p for p in module.parameters() if p.requires_grad and kind.takes(p)]
        rate = torch.tensor(kind.lr) if settings == "tensor lr" else kind.lr
        if settings != "several groups":
            return kind.make([{"params": mine}], rate)
        middle = len(mine) // 2
        return kind.make([{"params": mine[middle:]}, {"params": mine[:middle], "lr": 0.5 * kind.lr}], rate)

    return Script(
        lambda: model.make(checkpointing),
        optimizer,
        steps=3 if scaled else 2,
        microbatches=MICROBATCHES[case["microbatches"]],
        loss=model.loss,
        between=(lambda step, module, opt, data: gradients(module)) if scaled else None,  # fused updates unscale them
        dram=HALF_PRECISION_DRAM if case["precision"] == "bf16" else model.dram,
        **PRECISIONS[case["precision"]],
        **SETTINGS[settings],
    )


def case(**values: str) -> dict[str, str]:
    """A case with the first value of every dimension that is not given."""
    unknown = {d: v for d, v in values.items() if v not in DIMENSIONS.get(d, ())}
    if unknown:
        raise ValueError(f"no such values in the matrix: {unknown}")
    return {dimension: values.get(dimension, choices[0]) for dimension, choices in DIMENSIONS.items()}


def name(case: Case) -> str:
    return ", ".join(case.values())


# -- a covering array

Pair = frozenset[tuple[str, str]]


def pairs_of(case: Case) -> set[Pair]:
    """The pairs of (dimension, value) that occur in a case, or a part of one."""
    return {frozenset(pair) for pair in itertools.combinations(case.items(), 2)}


def all_pairs(dimensions: Mapping[str, Sequence[str]], exclusions: Iterable[Exclusion]) -> list[Pair]:
    """Every pair of values of two dimensions that no exclusion names, larger dimensions first."""
    ordered = sorted(dimensions, key=lambda d: -len(dimensions[d]))
    found = []
    for one, other in itertools.combinations(ordered, 2):
        for values in itertools.product(dimensions[one], dimensions[other]):
            pair = dict(zip((one, other), values, strict=True))
            if not any(e.holds(pair) for e in exclusions):
                found.append(frozenset(pair.items()))
    return found


def covering_cases(dimensions: Mapping[str, Sequence[str]], exclusions: Sequence[Exclusion]) -> list[dict[str, str]]:
    """Cases that no exclusion names, in which every pair that none names occurs; deterministic, greedily few.

    Raises ValueError for a pair that all its cases exclude: such an exclusion is to be named.
    """
    missing = dict.fromkeys(all_pairs(dimensions, exclusions))
    used: dict[tuple[str, str], int] = {}
    cases: list[dict[str, str]] = []

    def complete(part: dict[str, str]) -> dict[str, str] | None:
        """The part with values for the other dimensions, each covering the most of what is missing."""
        open_ = [d for d in dimensions if d not in part]
        if not open_:
            return part

        def gain(dimension: str, value: str) -> int:
            return sum(frozenset({(dimension, value), item}) in missing for item in part.items())

        choices = [(d, v) for d in open_ for v in dimensions[d]]
        best = max(choices, key=lambda c: (gain(*c), -used.get(c, 0)))[0]
        for value in sorted(dimensions[best], key=lambda v: (-gain(best, v), used.get((best, v), 0))):
            longer = {**part, best: value}
            if not any(e.holds(longer) for e in exclusions):
                done = complete(longer)
                if done is not None:
                    return done
        return None

    while missing:
        pair = next(iter(missing))
        case = complete(dict(sorted(pair)))
        if case is None:
            raise ValueError(f"every case with {dict(pair)} is excluded; exclude the pair itself")
        cases.append({d: case[d] for d in dimensions})
        for item in case.items():
            used[item] = used.get(item, 0) + 1
        for covered in pairs_of(case):
            missing.pop(covered, None)
    return cases
