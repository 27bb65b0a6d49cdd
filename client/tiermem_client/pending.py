"""Updates that a `step()` has asked for and nobody has needed yet.

A pending update stands on every bundle that it reads or writes; whoever acquires one of them applies it first
(`Residency.bring_up_to_date`), so that nobody ever sees bytes from before the step. What else it depends on is kept
here: the step's record, and which gradients were zeros when it was asked for.
"""

from __future__ import annotations

import copy
import sys
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tiermem_client.folding import Operation, changed
from tiermem_client.grad_handles import GradHandle
from tiermem_client.grad_slots import GradSlot, GradStore
from tiermem_client.grads import GradBook
from tiermem_client.memory import Bundle
from tiermem_client.pieces import GroupUpdate, Piece
from tiermem_client.shadow import StepRecord


@dataclass(frozen=True, slots=True)
class Asked:
    """One parameter of a step: the index of its param group, and its gradient as it was then; `changes` are still to be
    made of its bytes.
    """

    index: int
    slot: GradSlot
    zero: bool
    generation: int
    changes: tuple[Operation, ...] = ()

    @classmethod
    def now(cls, index: int, slot: GradSlot) -> Asked:
        return cls(index, slot, slot.zero, slot.generation, tuple(slot.changes))

    def grad_of(self, piece: Piece) -> torch.Tensor:
        """The piece of the gradient that an update is to read: in its place, whose bytes are leased, unless it was zero
        or there are changes to be made; then a copy.
        """
        if self.zero:
            return piece.grad_view(GradBook.zeros(self.slot))
        return changed(piece.grad_view(self.slot.real), self.changes)

    @property
    def still_there(self) -> bool:
        """Whether the script can still see this gradient."""
        return self.slot.generation == self.generation


@dataclass(slots=True, eq=False)
class PendingUpdate:
    """One group's part of a step. `bundles`: all that it stands on. `done`: the pieces that have been updated, where an
    error came between. `thread`: who applies it now (0: nobody).
    """

    update: GroupUpdate
    record: StepRecord
    asked: dict[nn.Parameter, Asked] = field(repr=False)  # the text of a tensor reads bytes, which may not be here
    bundles: tuple[Bundle, ...]
    done: set[Piece] = field(default_factory=set)
    thread: int = 0
    finished: bool = False

    @property
    def pieces(self) -> list[Piece]:
        return [piece for piece in self.update.pieces if piece.managed.parameter in self.asked]

    @property
    def stores(self) -> list[GradStore]:
        return _stores(self.asked)

    @classmethod
    def of(cls, update: GroupUpdate, record: StepRecord, asked: dict[nn.Parameter, Asked]) -> PendingUpdate:
        grads = [bundle for store in _stores(asked) for bundle in store.bundles]
        return cls(update, record, asked, (*update.group.bundles, *grads, *update.store.bundles))


def _stores(asked: dict[nn.Parameter, Asked]) -> list[GradStore]:
    return list(dict.fromkeys(one.slot.store for one in asked.values()))


@dataclass(slots=True)
class StepInProgress:
    """One `step()`, until it returns. `handles` are the gradients that it was begun with, `early` what was updated
    inside backward.

    An error of the daemon interrupts a step between two transactions. Called again with the same gradients, `step()`
    goes on with what is not done: nothing is updated twice.
    """

    pending: list[PendingUpdate]
    handles: dict[nn.Parameter, weakref.ref[GradHandle]]
    early: dict[nn.Parameter, GroupUpdate]

    def goes_on_with(self, handles: dict[nn.Parameter, GradHandle]) -> bool:
        return len(handles) == len(self.handles) and all(
            p in self.handles and self.handles[p]() is h for p, h in handles.items()
        )


class SettlingState(defaultdict[nn.Parameter, dict[str, Any]]):
    """`optimizer.state`: reading it applies what is pending for what is read."""

    def __init__(self, values: dict[nn.Parameter, dict[str, Any]], settle: Callable[[nn.Parameter | None], None]):
        super().__init__(dict, values)
        self._settle = settle

    def __getitem__(self, parameter: nn.Parameter) -> dict[str, Any]:
        self._settle(parameter)
        return super().__getitem__(parameter)

    def get(self, parameter: nn.Parameter, default: Any = None) -> Any:
        self._settle(parameter)
        return super().get(parameter, default)

    def pop(self, parameter: nn.Parameter, *default: Any) -> Any:
        self._settle(parameter)
        return super().pop(parameter, *default)

    def popitem(self) -> Any:
        self._settle(None)
        return super().popitem()

    def setdefault(self, parameter: nn.Parameter, default: Any = None) -> Any:
        self._settle(parameter)
        return super().setdefault(parameter, default)

    def __iter__(self) -> Iterator[nn.Parameter]:
        self._settle(None)
        return super().__iter__()

    def items(self) -> Any:
        self._settle(None)
        return super().items()

    def values(self) -> Any:
        self._settle(None)
        return super().values()

    def copy(self) -> Any:
        self._settle(None)
        return defaultdict(dict, dict.copy(self))

    def __eq__(self, other: object) -> bool:
        self._settle(None)
        return super().__eq__(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __reduce__(self) -> Any:
        self._settle(None)
        return defaultdict, (dict,), None, None, iter(dict.items(self))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.copy(), memo)


def is_watched(state: SettlingState, piece: Piece) -> bool:
    """Whether a script holds a parameter's entry of `optimizer.state`, or a tensor of the process in it: it would see
    old values there until the update is applied. A tensor in the store is guarded, and may be held.
    """
    parameter = piece.managed.parameter
    if parameter not in state:  # nothing is kept for it
        return False
    if _references(state, parameter) > _ONE_HOLDER:
        return True
    loose = [key for key, value in piece.state.items() if isinstance(value, torch.Tensor) and key not in piece.stored]
    return any(_references(piece.state, key) > _ONE_HOLDER + 1 for key in loose)  # the entry has it too


def _references(holder: dict[Any, Any], key: Any) -> int:
    return sys.getrefcount(dict.get(holder, key))


_ONE_HOLDER = _references({0: object()}, 0)
