"""When a group's gradients are complete inside backward, and whether it is worth acting on: learned from the steps
before. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

P = TypeVar("P", bound=Hashable)
G = TypeVar("G", bound=Hashable)

PROBES = 2
"""Steps in a row in which what was tried first must be confirmed before everything is tried."""
FIRST_PAUSE, LONGEST_PAUSE = 4, 256  # steps


class Rhythm(Generic[P, G]):
    """Counts how often each parameter's gradient is accumulated between two steps. `group_of` names the group that a
    parameter is updated with. One thread at a time.
    """

    def __init__(self, group_of: Mapping[P, G]) -> None:
        self._group_of = group_of
        self._expected: Counter[P] = Counter()
        self._seen: Counter[P] = Counter()
        self._left: Counter[G] = Counter()
        self._odd: set[G] = set()

    def accumulated(self, parameter: P) -> G | None:
        """A gradient was made, or added to. The group whose gradients are all complete by that, if this step is like
        the one before; each at most once between two steps.
        """
        group = self._group_of.get(parameter)
        if group is None:
            return None
        self._seen[parameter] += 1
        if self._seen[parameter] > self._expected[parameter]:
            self._odd.add(group)
            return None
        self._left[group] -= 1
        return group if self._left[group] == 0 and group not in self._odd else None

    def stepped(self) -> None:
        """The optimizer's step has come: what was seen is expected from now on."""
        self._expected, self._seen = self._seen, Counter()
        self._odd.clear()
        self._left.clear()
        for parameter, count in self._expected.items():
            self._left[self._group_of[parameter]] += count


@dataclass(slots=True)
class Trust:
    """How many groups may be updated before `step()` asks for it: one, until that was confirmed in `PROBES` steps; then
    all; none for a while after one that had to be undone, longer each time.
    """

    confirmed_steps: int = 0
    pause: int = 0
    paused_for: int = 0
    stopped: bool = False

    def allows(self, tried: int) -> bool:
        """Whether one more may be tried in a step in which `tried` have been."""
        if self.stopped or self.paused_for:
            return False
        return tried == 0 or self.confirmed_steps >= PROBES

    def stepped(self, outcomes: Iterable[bool]) -> None:
        """What became of those that were tried since the step before."""
        results = list(outcomes)
        if not results:
            self.paused_for = max(0, self.paused_for - 1)
        elif all(results):
            self.confirmed_steps += 1
            if self.confirmed_steps > PROBES:
                self.pause = 0
        else:
            self.confirmed_steps = 0
            self.pause = self.paused_for = min(max(2 * self.pause, FIRST_PAUSE), LONGEST_PAUSE)
