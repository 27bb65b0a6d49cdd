"""The ledger's foresight: which bundles a lane uses next, and when. Pure but for the clock that it is given."""

from __future__ import annotations

import enum
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass

from tiermem.bundle import BundleSpec, Mode
from tiermem.forecast import MAX_ACCESSES, Forecast
from tiermem.grants.foresight import Use
from tiermem.placement.base import Placement
from tiermem.placement.belady import Belady
from tiermem.placement.lru import LeastRecentlyUsed
from tiermem.plan import Access, BundleUse, PlannedAccess
from tiermem.stats import PredictionOutcome

HORIZON = 512
"""Accesses that are looked through for uses, and at least half of them at any time. What is used later than that counts
as unpredicted, so as furthest.
"""
_WEIGHT = 0.3  # of the newest duration


class Policy(enum.StrEnum):
    """Names of placement policies in the configuration."""

    BELADY = "belady"
    LRU = "lru"


@dataclass(frozen=True, slots=True)
class LookaheadOptions:
    """`share`: the part of the arena that predicted uses may be granted of, ahead of their use; 0 switches grants ahead
    off.
    """

    policy: Policy = Policy.BELADY
    share: float = 0.5


class _Rollout:
    """The accesses that were predicted at one moment, and how far they have come true. Finding them out costs more than
    following them, so it is done anew only where they did not come true, and after half of them.
    """

    def __init__(self, planned: Iterable[PlannedAccess], duration_s: Callable[[Access], float], now_s: float) -> None:
        self._steps: list[Access] = []
        self._uses: list[Use] = []
        self._first: list[int] = [0]  # of each step's uses, and the end of the last one's
        self._places: dict[int, list[int]] = {}
        self._next = 0
        for place, step in enumerate(planned):
            self._steps.append(step.access)
            for use in step.uses:
                self._uses.append(Use(use.bundle, use.mode, now_s, place))
                self._places.setdefault(use.bundle, []).append(place)
            self._first.append(len(self._uses))
            now_s += duration_s(step.access)

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def place(self) -> int:
        """Of the access under way."""
        return self._next - 1

    def follows(self, access: Access) -> bool:
        """Whether the access is the next one, and enough is known of those after it; then it is passed."""
        if self._next >= len(self._steps) // 2 or self._steps[self._next] != access:
            return False
        self._next += 1
        return True

    def expected(self, specs: Collection[int]) -> bool:
        """Whether the access under way was expected to use just these forms."""
        uses = self._uses[self._first[self._next - 1] : self._first[self._next]]
        return len(uses) == len(specs) and all(use.spec in specs for use in uses)

    def uses(self) -> list[Use]:
        return self._uses[self._first[self._next] :]

    def distance(self, spec: int) -> int | None:
        """In how many accesses the form is used (1: in the next)."""
        places = self._places.get(spec, ())
        index = bisect_left(places, self._next)
        return places[index] - self._next + 1 if index < len(places) else None


@dataclass(slots=True)
class _Now:
    """The access under way: since when, and the forms that it has not used yet, as far as they are known."""

    access: Access
    since_s: float
    left: dict[int, Mode]
    rollout: _Rollout | None


class Lookahead:
    """Joins `Forecast` with times. Bundles are named by their forms. Called under the job's lock."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._forecast = Forecast()
        self._now: dict[str, _Now] = {}
        self._durations_s: dict[tuple[str, Access], float] = {}
        self._accesses = 0
        self._generation = 0  # of predictions; see `moment`
        self._ignorant = False  # nothing was foreseen last

    def accessed(self, lane: str, access: Access) -> bool:
        now_s, before = self._now_s(), self._now.get(lane)
        rollout = None
        if before is not None:
            self._measure(lane, before.access, now_s - before.since_s)
            rollout = before.rollout if before.rollout is not None and before.rollout.follows(access) else None
        self._forecast.began(lane, access)
        left = {use.bundle: use.mode for use in self._forecast.learned(lane, access)}
        self._accesses += 1
        # What an access was to use and has not has another next use now than it had.
        same = rollout is not None and before is not None and not before.left and rollout.expected(left)
        self._generation += rollout is not None and not same
        self._now[lane] = _Now(access, now_s, left, rollout)
        return not same

    def moment(self) -> tuple[int, int]:
        """(generation, accesses so far): while the generation is the same, a form that is not used keeps its next use,
        in accesses since the beginning.
        """
        if len(self._now) > 1:
            self._generation += 1  # lanes come nearer at different rates
        for lane, now in self._now.items():
            self._rollout(lane, now)
        return self._generation, self._accesses

    def _measure(self, lane: str, access: Access, seconds: float) -> None:
        known = self._durations_s.pop((lane, access), seconds)
        self._durations_s[lane, access] = known + _WEIGHT * (seconds - known)
        if len(self._durations_s) > MAX_ACCESSES:
            del self._durations_s[next(iter(self._durations_s))]

    def used(self, lane: str, spec: BundleSpec, mode: Mode) -> None:
        self._forecast.leased(lane, BundleUse(spec.spec_id, mode, spec.nbytes))
        if lane in self._now:
            self._now[lane].left.pop(spec.spec_id, None)

    def upcoming(self, lane: str) -> Iterator[Use]:
        now = self._now.get(lane)
        if now is None:
            return
        rollout = self._rollout(lane, now)
        for spec, mode in now.left.items():
            yield Use(spec, mode, now.since_s, rollout.place)
        yield from rollout.uses()

    def next_use(self, spec: int) -> int | None:
        """In how many accesses the form is used (0: in one under way); None where that is not predicted."""
        nearest = None
        for lane, now in self._now.items():
            if spec in now.left:
                return 0
            distance = self._rollout(lane, now).distance(spec)
            if distance is not None and (nearest is None or distance < nearest):
                nearest = distance
        return nearest

    def _rollout(self, lane: str, now: _Now) -> _Rollout:
        if now.rollout is None:

            def duration_s(access: Access) -> float:
                return self._durations_s.get((lane, access), 0.0)

            planned = self._forecast.upcoming(lane, HORIZON)
            now.rollout = _Rollout(planned, duration_s, now.since_s + duration_s(now.access))
            if now.rollout or now.left or not self._ignorant:  # what is still nothing is the same
                self._generation += 1
            self._ignorant = not (now.rollout or now.left)
        return now.rollout

    def outcomes(self) -> dict[PredictionOutcome, int]:
        """Accesses by whether they had been predicted."""
        lanes = self._forecast.lanes.values()
        wrong = sum(lane.mispredicted for lane in lanes)
        predicted = sum(lane.predicted for lane in lanes)
        return {
            PredictionOutcome.RIGHT: predicted - wrong,
            PredictionOutcome.WRONG: wrong,
            PredictionOutcome.UNKNOWN: sum(lane.accesses for lane in lanes) - predicted,
        }


def placement_for(
    options: LookaheadOptions,
    next_use: Callable[[int], int | None],
    moment: Callable[[], tuple[int, int]] | None = None,
) -> Placement:
    """The policy; `next_use` is by bundle. `moment`: as `Belady` wants it."""
    return Belady(next_use, moment) if options.policy == Policy.BELADY else LeastRecentlyUsed()
