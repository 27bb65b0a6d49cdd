"""What a script does to gradients that takes none of their bytes: norms that were taken when a gradient was made, and
element-wise changes that wait until somebody reads it.

Both give the very bits that doing it at once would. An element-wise change is the same operation later; a norm is the
same kernel on the same bytes with the same number of threads, taken earlier, because the script asked for it in the
steps before.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils._pytree as pytree

from tiermem_client.shadow import as_called_from_python, own_modes

MOST_CHANGES = 8
"""Of one gradient that wait; more are made at once."""
FORGOTTEN_AFTER = 4
"""Steps in which a script has not asked for a norm, after which it is not taken any more."""

_ELEMENTWISE = {
    f"aten::{name}"
    for name in (
        "mul_",
        "div_",
        "clamp_",
        "clamp_min_",
        "clamp_max_",
        "_foreach_mul_",
        "_foreach_div_",
        "_foreach_clamp_min_",
        "_foreach_clamp_max_",
    )
}
_NORMS = {"aten::linalg_vector_norm", "aten::norm", "aten::_foreach_norm"}
_UNSCALE = "aten::_amp_foreach_non_finite_check_and_unscale_"
_BY_ONE = {"aten::mul_", "aten::div_", "aten::_foreach_mul_", "aten::_foreach_div_", _UNSCALE}


class _Gradient:
    """Stands for the gradient in an operation's arguments."""


_GRADIENT = _Gradient()


@dataclass(frozen=True, slots=True, eq=False)
class Operation:
    """One on a single gradient; its other operands are numbers and tensors of one element, which are its own."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def run(self, gradient: torch.Tensor) -> Any:
        """On real bytes."""

        def real(leaf: Any) -> Any:
            return gradient if leaf is _GRADIENT else leaf

        return self.func(*pytree.tree_map(real, self.args), **pytree.tree_map(real, self.kwargs))

    def same_as(self, other: Operation) -> bool:
        """Whether it computes the same from the same gradient."""
        if self is other:
            return True
        mine, my_form = pytree.tree_flatten((self.args, self.kwargs))
        others, other_form = pytree.tree_flatten((other.args, other.kwargs))
        return (
            self.func is other.func
            and my_form == other_form
            and all(_same(a, b) for a, b in zip(mine, others, strict=True))
        )


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        alike = one.dtype == other.dtype and one.device == other.device and one.shape == other.shape
        return alike and torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)


def same_changes(some: Sequence[Operation], others: Sequence[Operation]) -> bool:
    return len(some) == len(others) and all(a.same_as(b) for a, b in zip(some, others, strict=True))


def changed(gradient: torch.Tensor, changes: Iterable[Operation]) -> torch.Tensor:
    """A copy of real bytes with the changes made; the bytes themselves where there are none."""
    changes = list(changes)
    if not changes:
        return gradient
    copy = gradient.clone()
    for change in changes:
        change.run(copy)
    return copy


def _operation(func: Any, args: Any, kwargs: Any, gradient: type[torch.Tensor]) -> Operation | None:
    """None where it is not one on a single gradient, its first operand."""
    leaves = pytree.tree_leaves((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    first = args[0][0] if isinstance(args[0], list | tuple) and len(args[0]) == 1 else args[0]
    if type(first) is not gradient or any(isinstance(t, gradient) or t.numel() != 1 for t in tensors[1:]):
        return None

    def own(leaf: Any) -> Any:
        if leaf is first:
            return _GRADIENT
        return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf

    return Operation(func, pytree.tree_map(own, tuple(args)), pytree.tree_map(own, dict(kwargs)))


def change_of(func: Any, args: Any, kwargs: Any, gradient: type[torch.Tensor]) -> Operation | None:
    """The element-wise change in place that an operation makes of one gradient; None for any other operation."""
    if func._schema.name not in _ELEMENTWISE or any(
        isinstance(t, torch.Tensor) and t.dim() for t in pytree.tree_leaves((args[1:], kwargs))
    ):
        return None
    return _operation(func, args, kwargs, gradient)


def changes_nothing(change: Operation) -> bool:
    """Whether it multiplies by exactly 1, or divides by it: every bit stays. Asks no other device."""
    others = [leaf for leaf in pytree.tree_leaves((change.args, change.kwargs)) if leaf is not _GRADIENT]
    if change.func._schema.name not in _BY_ONE or len(others) != (2 if change.func._schema.name == _UNSCALE else 1):
        return False
    by = others[-1]
    if isinstance(by, torch.Tensor):
        return by.device.type == "cpu" and not by.is_complex() and bool(by == 1)
    return isinstance(by, int | float) and by == 1


def norm_of(func: Any, args: Any, kwargs: Any, gradient: type[torch.Tensor]) -> tuple[Hashable, Operation] | None:
    """A norm over a whole gradient, and what tells it from others; None for any other operation."""
    if func._schema.name not in _NORMS:
        return None
    operation = _operation(func, args, kwargs, gradient)
    if operation is None:
        return None
    leaves, form = pytree.tree_flatten((operation.args, operation.kwargs))
    if any(isinstance(leaf, torch.Tensor) for leaf in leaves):
        return None
    return (func, tuple(leaves), str(form)), operation


@dataclass(frozen=True, slots=True)
class Unscaling:
    """What GradScaler does to a gradient: `change` multiplies it; `found_inf` (the script's, one element) is to be 1 if
    there was anything but finite numbers before.
    """

    change: Operation
    found_inf: torch.Tensor

    @classmethod
    def of(cls, func: Any, args: Any, kwargs: Any, gradient: type[torch.Tensor]) -> Unscaling | None:
        """None for any other operation."""
        if func._schema.name != _UNSCALE or kwargs or len(args) != 3:
            return None
        change = _operation(func, args, kwargs, gradient)
        return None if change is None else cls(change, args[1])


FINITE: Hashable = "finite"


def not_finite(gradient: torch.Tensor) -> torch.Tensor:
    """1.0 if there is an infinity or a NaN among the real bytes, as GradScaler's kernel finds it; else 0.0. Multiplies
    by 1: the bytes stay.
    """
    found, one = (torch.full((), value, device=gradient.device) for value in (0.0, 1.0))
    torch._amp_foreach_non_finite_check_and_unscale_([gradient], found, one)
    return found


@dataclass(slots=True, eq=False)
class Answer:
    """A norm (or FINITE) of a gradient after `changes`, with so many `threads`: the order of a sum depends on them."""

    changes: tuple[Operation, ...]
    value: Any
    threads: int

    def holds(self, changes: Sequence[Operation]) -> bool:
        """Whether it is what would be computed now, after these changes."""
        return self.threads == torch.get_num_threads() and same_changes(self.changes, changes)

    def copy(self) -> Any:
        return pytree.tree_map(lambda t: t.clone() if isinstance(t, torch.Tensor) else t, self.value)


@dataclass(slots=True, eq=False)
class _Wanted:
    operation: Operation | None  # None: FINITE
    changes: tuple[Operation, ...]
    unasked_steps: int = 0


@dataclass(slots=True, eq=False)
class Questions:
    """What the script asked of gradients lately, so that it is answered when they are made. Of one job; the caller
    holds the client lock.
    """

    wanted: dict[Hashable, _Wanted] = field(default_factory=dict)

    def asked(self, key: Hashable, operation: Operation | None, changes: Sequence[Operation]) -> None:
        """A script asks, of a gradient with these changes."""
        seen = self.wanted.get(key)
        if seen is None or seen.unasked_steps or not same_changes(seen.changes, changes):
            self.wanted[key] = _Wanted(operation, tuple(changes))

    def stepped(self) -> None:
        """The optimizer's step has come."""
        for key, wanted in list(self.wanted.items()):
            wanted.unasked_steps += 1
            if wanted.unasked_steps > FORGOTTEN_AFTER:
                del self.wanted[key]

    def answers(self, gradient: torch.Tensor) -> dict[Hashable, Answer]:
        """All that is wanted, of real bytes as they are now."""
        if not self.wanted:
            return {}
        with own_modes(), as_called_from_python():
            threads = torch.get_num_threads()
            return {
                key: Answer(wanted.changes, _answer(wanted, gradient), threads) for key, wanted in self.wanted.items()
            }


def _answer(wanted: _Wanted, gradient: torch.Tensor) -> Any:
    now = changed(gradient, wanted.changes)
    return not_finite(now) if wanted.operation is None else wanted.operation.run(now)
