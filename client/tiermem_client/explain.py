"""What attach would do, before it does: units, bytes by kind, the least DRAM, and what would be refused and why."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from tiermem.errors import InvalidArgument, Unsupported
from tiermem.layout import MIN_ARENA_BYTES
from tiermem.units import format_size
from tiermem_client.compiled import compiled_across_units, cuda_graph_refusals
from tiermem_client.shadow import OptimizerForm, OptimizerProbe
from tiermem_client.units import Unit, collect_storages, discover_units


@dataclass(frozen=True, slots=True)
class UnitExplanation:
    """One unit. Bytes are those of its own parameters, of the gradients that they can have, and of optimizer state."""

    name: str
    modules: tuple[str, ...]
    parameters: int
    param_bytes: int
    grad_bytes: int
    optim_bytes: int


@dataclass(frozen=True, slots=True)
class Explanation:
    """`least_dram_bytes` is the floor without slack: the largest set of bytes used together. `refusals` are what attach
    would raise; `notes` are what works in another way than one may expect.
    """

    units: tuple[UnitExplanation, ...]
    least_dram_bytes: int
    refusals: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def total_bytes(self) -> int:
        return sum(u.param_bytes + u.grad_bytes + u.optim_bytes for u in self.units)

    def __str__(self) -> str:
        width = max([len(u.name or "(root)") for u in self.units] + [4])
        lines = [f"{'unit':{width}}  {'parameters':>12}  {'weights':>10}  {'gradients':>10}  {'optimizer':>10}"]
        for u in self.units:
            sizes = "  ".join(f"{format_size(n):>10}" for n in (u.param_bytes, u.grad_bytes, u.optim_bytes))
            lines.append(f"{u.name or '(root)':{width}}  {u.parameters:12,}  {sizes}")
        together, least = format_size(self.total_bytes), format_size(self.least_dram_bytes)
        lines.append(f"together {together}; used at once at most {least}: "
                     "give at least that, and its slack, as dram")  # fmt: skip
        lines += [f"refused: {text}" for text in self.refusals]
        lines += [f"note: {text}" for text in self.notes]
        return "\n".join(lines)


def explain(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Explanation:
    """Look at a model and its optimizer without changing either, and without a daemon. Raises InvalidArgument for what
    is neither.
    """
    if not isinstance(model, nn.Module):
        raise InvalidArgument(f"explain expects a torch.nn.Module, not {type(model).__name__}")
    units = discover_units(model)
    refusals, notes = cuda_graph_refusals(model), compiled_across_units(model, {m for u in units for m in u.modules})
    if not units:
        refusals.append(f"{type(model).__name__} has no parameters")
    try:
        collect_storages(model, units)
    except Unsupported as error:
        refusals.append(str(error))
    forms, problems = _probe(optimizer)
    refusals += problems
    notes += _notes(model, optimizer, forms)
    explained = tuple(_explain_unit(unit, model, forms) for unit in units)
    least = max((u.param_bytes + u.grad_bytes for u in explained), default=0)
    return Explanation(explained, max(least, MIN_ARENA_BYTES), tuple(dict.fromkeys(refusals)), tuple(notes))


def _probe(optimizer: torch.optim.Optimizer | None) -> tuple[dict[nn.Parameter, OptimizerForm], list[str]]:
    forms: dict[nn.Parameter, OptimizerForm] = {}
    problems: list[str] = []
    if optimizer is not None:
        probe = OptimizerProbe(optimizer, torch.device("cpu"))
        for index, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                if problems or parameter.numel() == 0:
                    continue
                try:
                    forms[parameter] = probe.form(index, parameter)
                except Unsupported as error:
                    problems.append(str(error))
    return forms, problems


def _notes(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, forms: dict[nn.Parameter, OptimizerForm]
) -> list[str]:
    notes = []
    for name, module in model.named_modules():
        if getattr(module, "sparse", False) and isinstance(module, nn.Embedding | nn.EmbeddingBag):
            notes.append(
                f"{name} makes sparse gradients (sparse=True), which are refused in backward: use sparse=False"
            )
    odd = sorted({type(p).__name__ for p in model.parameters() if type(p) not in (nn.Parameter,)})
    if odd:
        notes.append(f"parameters of class {', '.join(odd)} have no guard: use them inside their module's forward only")
    if optimizer is not None and forms and not all(form.elementwise for form in forms.values()):
        notes.append(f"{type(optimizer).__name__} updates whole tensors: a large one is leased as a whole in step()")
    return notes


def _explain_unit(unit: Unit, model: nn.Module, forms: dict[nn.Parameter, OptimizerForm]) -> UnitExplanation:
    names = {module: name for name, module in model.named_modules()}

    def nbytes(parameters: Iterable[nn.Parameter]) -> int:
        return sum(p.numel() * p.element_size() for p in parameters)

    state = sum(p.numel() * forms[p].state_bytes_per_element() for p in unit.parameters if p in forms)
    return UnitExplanation(
        unit.name,
        tuple(names.get(module, "") for module in unit.modules),
        sum(p.numel() for p in unit.parameters),
        nbytes(unit.parameters),
        nbytes(p for p in unit.parameters if p.requires_grad),
        state,
    )
