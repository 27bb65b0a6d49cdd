"""Which unit the script computes with, as spans of the trace."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from tiermem.plan import Phase
from tiermem.trace import UNITS, Span, TraceRing


class Costs(NamedTuple):
    """What the trainer has spent since attach: seconds of waiting for the daemon, page moves and their seconds."""

    waited_s: float
    moves: int
    moving_s: float


_NOTHING = Costs(0.0, 0, 0.0)
_WORDS = ["", *(phase.name.lower() for phase in sorted(Phase))]  # by number: an enum's name and hash take a microsecond


@dataclass(slots=True)
class UnitSpans:
    """One unit at a time: a unit's span ends where the next one's begins, where its forward is left, and where backward
    or the step ends. A forward inside another unit's forward interrupts it. Guarded by the client lock.

    Backward has no end of a unit: its span lasts until the engine comes to the next one.
    """

    ring: TraceRing
    costs: Callable[[], Costs]
    now_s: Callable[[], float] = time.monotonic
    _unit: str = ""
    _phase: Phase | None = None
    _started_s: float = 0.0
    _costs: Costs = _NOTHING
    _outer: list[str] = field(default_factory=list)

    def began(self, unit: str, phase: Phase) -> None:
        if phase is self._phase and unit == self._unit and phase is not Phase.FORWARD:
            return  # another node of the same unit
        if phase is Phase.FORWARD and self._phase is Phase.FORWARD:
            self._outer.append(self._unit)
        self._switch(unit, phase)

    def left(self, unit: str) -> None:
        """The unit's forward, or its recomputation, has ended."""
        if self._phase not in (Phase.FORWARD, Phase.RECOMPUTE) or unit != self._unit:
            return
        outer = self._outer.pop() if self._outer and self._phase is Phase.FORWARD else None
        self._switch(outer or "", None if outer is None else Phase.FORWARD)

    def rest(self) -> None:
        """What the script does now belongs to no unit."""
        self._outer.clear()
        self._switch("", None)

    def _switch(self, unit: str, phase: Phase | None) -> None:
        now_s, costs = self.now_s(), self.costs()
        if self._phase is not None:
            name = f"{_WORDS[self._phase]} {self._unit or '(root)'}"
            spent = "" if costs == self._costs else _text(costs, self._costs)
            self.ring.add(Span(UNITS, name, self._started_s, now_s, 0, 0, 0, None, spent))
        self._unit, self._phase, self._started_s, self._costs = unit, phase, now_s, costs


def _text(after: Costs, before: Costs) -> str:
    return (
        f"waited {(after.waited_s - before.waited_s) * 1e3:.2f} ms, {after.moves - before.moves} page moves in "
        f"{(after.moving_s - before.moving_s) * 1e3:.2f} ms"
    )
