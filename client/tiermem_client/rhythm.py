"""When a group's gradients are complete inside backward, whether a step will confirm what is done then, and whether
that is faster: learned from the steps before. Pure.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

P = TypeVar("P", bound=Hashable)
G = TypeVar("G", bound=Hashable)

PROBES = 2
"""Steps in a row in which what was tried first must be confirmed before everything is tried."""
FIRST_PAUSE, LONGEST_PAUSE = 4, 256  # steps

TRIAL = 4
"""Steps in a row that are measured either way; the first of them still has work of the other way in it and does not
count.
"""
PAYS_BELOW = 0.97
"""Of the other way's time: what is a smaller gain than noise is not worth twice the flash room."""
FIRST_HOLD, LONGEST_HOLD = 32, 1024  # steps


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

    @property
    def whole(self) -> bool:
        """Whether all are tried."""
        return not self.stopped and not self.paused_for and self.confirmed_steps >= PROBES

    def allows(self, tried: int) -> bool:
        """Whether one more may be tried in a step in which `tried` have been."""
        return self.whole or (tried == 0 and not self.stopped and not self.paused_for)

    def stepped(self, outcomes: Iterable[bool]) -> None:
        """What became of those that were tried since the step before."""
        results = list(outcomes)
        if not results:  # paused, or not wanted: what was learned stays
            self.paused_for = max(0, self.paused_for - 1)
        elif all(results):
            self.confirmed_steps += 1
            if self.confirmed_steps > PROBES:
                self.pause = 0
        else:
            self.confirmed_steps = 0
            self.pause = self.paused_for = min(max(2 * self.pause, FIRST_PAUSE), LONGEST_PAUSE)


@dataclass(slots=True)
class Trial:
    """Whether updates inside backward make steps shorter: `TRIAL` steps with them, as many without, and then for a
    while what was faster; measured again after twice as long each time, as long as the answer stays the same.

    `with_s`, `without_s`: median seconds of a step as last measured, None before; `pays` is the last answer.
    """

    with_s: float | None = None
    without_s: float | None = None
    pays: bool | None = None
    _trying: bool = True
    _seconds: list[float] = field(default_factory=list)
    _held_for: int = 0
    _hold: int = 0

    @property
    def wants(self) -> bool:
        """Whether the steps now are to be with."""
        return self._trying if not self._held_for else self.pays is True

    def stepped(self, seconds: float) -> bool:
        """A step, all of it as `wants` said, took so long. Returns whether this has answered the question (anew)."""
        if self._held_for:
            self._held_for -= 1
            return False
        self._seconds.append(seconds)
        if len(self._seconds) < TRIAL:
            return False
        measured, self._seconds = statistics.median(self._seconds[1:]), []
        if self._trying:
            self.with_s, self._trying = measured, False
            return False
        assert self.with_s is not None
        self.without_s, self._trying = measured, True
        before, self.pays = self.pays, self.with_s < PAYS_BELOW * measured
        self._hold = min(2 * self._hold, LONGEST_HOLD) if self.pays is before else FIRST_HOLD
        self._held_for = self._hold
        return True

    def interrupted(self) -> None:
        """A step was not as `wants` said: what is being measured begins anew."""
        self._seconds.clear()
