"""When a job uses which bundle next: what its lanes will access, and what each access has leased. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from tiermem.plan import Access, BundleUse, PlannedAccess
from tiermem.predict import Predictor
from tiermem.replay import Outcome

MAX_ACCESSES = 1 << 16
"""Kinds of access whose bundles are remembered; beyond it the ones not seen for longest are forgotten."""

_LaneAccess = tuple[str, Access]


class Forecast:
    """Numbers of bundles are those of their *forms* (spec ids) where bundles are made anew each step, as gradients are.

    Per lane: `began` an access, then `leased` for everything that is used during it, also what was leased already. The
    uses of an access are those of its last complete occurrence. No thread, no clock: called under the job's lock.
    """

    def __init__(self, new_predictor: Callable[[], Predictor] = Predictor) -> None:
        self._new_predictor = new_predictor
        self._lanes: dict[str, Predictor] = {}
        self._now: dict[str, tuple[Access, dict[int, BundleUse]]] = {}
        self._uses: dict[_LaneAccess, dict[int, BundleUse]] = {}
        self._users: dict[int, set[_LaneAccess]] = {}

    @property
    def lanes(self) -> Mapping[str, Predictor]:
        """For statistics: `accesses`, `predicted`, `mispredicted`."""
        return self._lanes

    def began(self, lane: str, access: Access) -> Outcome:
        """The lane's next access has begun; the one before is complete."""
        predictor = self._lanes.get(lane)
        if predictor is None:
            predictor = self._lanes[lane] = self._new_predictor()
        self._complete(lane)
        self._now[lane] = access, {}
        return predictor.observe(access)

    def leased(self, lane: str, use: BundleUse) -> None:
        """The access under way uses a bundle. Before the lane's first access there is none, and nothing is learned."""
        if lane in self._now:
            self._now[lane][1].setdefault(use.bundle, use)

    def ended(self, lane: str) -> None:
        """The lane is gone; what it used is forgotten."""
        self._lanes.pop(lane, None)
        self._now.pop(lane, None)
        for user in [user for user in self._uses if user[0] == lane]:
            self._forget(user)

    def next_use(self, bundle: int) -> int | None:
        """In how many accesses of the nearest lane a bundle is used (1: next); None where that is not predicted."""
        distances = [self._lanes[lane].next_use(access) for lane, access in self._users.get(bundle, ())]
        return min((distance for distance in distances if distance is not None), default=None)

    def learned(self, lane: str, access: Access) -> Iterable[BundleUse]:
        """What the access has used the last time that it was complete."""
        return self._uses.get((lane, access), {}).values()

    def upcoming(self, lane: str, count: int) -> Iterator[PlannedAccess]:
        """The lane's next accesses with the bundles that each will use, as far as both are known."""
        predictor = self._lanes.get(lane)
        for access in predictor.upcoming(count) if predictor else ():
            yield PlannedAccess(access, tuple(self._uses.get((lane, access), {}).values()))

    def _complete(self, lane: str) -> None:
        if lane not in self._now:
            return
        access, uses = self._now[lane]
        user = lane, access
        old = self._uses.pop(user, {})
        self._uses[user] = uses  # at the end: the oldest come first
        self._unlink(user, old.keys() - uses.keys())
        for bundle in uses:
            self._users.setdefault(bundle, set()).add(user)
        if len(self._uses) > MAX_ACCESSES:
            self._forget(next(iter(self._uses)))

    def _forget(self, user: _LaneAccess) -> None:
        self._unlink(user, self._uses.pop(user))

    def _unlink(self, user: _LaneAccess, bundles: Iterable[int]) -> None:
        for bundle in bundles:
            users = self._users[bundle]
            users.discard(user)
            if not users:
                del self._users[bundle]

    def check_invariants(self) -> None:
        """The two directions of "uses" agree."""
        links = {(user, bundle) for user, uses in self._uses.items() for bundle in uses}
        assert links == {(user, bundle) for bundle, users in self._users.items() for user in users}
        assert all(self._users.values()), "a bundle without users is remembered"
        assert len(self._uses) <= MAX_ACCESSES
        for predictor in self._lanes.values():
            predictor.check_invariants()
