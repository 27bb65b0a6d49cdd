"""Backward runs the units of the forward that really ran, last first: autograd is a stack. Pure."""

from __future__ import annotations

import enum
from bisect import bisect_left
from collections import deque
from collections.abc import Hashable, Iterable, Sequence

from tiermem.plan import Access, Phase

MAX_UNITS = 1 << 13
"""Of forwards that wait for their backward; a longer one is mirrored in its last part only."""


class _Segment(enum.Enum):
    """Where a unit stands in what checkpointing runs again as a whole before its backward."""

    OUTSIDE = "outside"
    FIRST = "first"
    INSIDE = "inside"


class Mirror:
    """The backward that follows from a forward: a list of accesses, and which of them is next.

    Recomputation is learned: a run of RECOMPUTE accesses is a segment, and next time it is expected before the
    backward of its units. A unit that has not been seen in backward yet is taken to be like its neighbour.
    """

    def __init__(self) -> None:
        self._forward: deque[Hashable] = deque(maxlen=MAX_UNITS)  # trained units without their backward yet
        self._segments: dict[Hashable, _Segment] = {}
        self._recomputed: set[Hashable] = set()  # in this backward, their own backward is still to come
        self._last: Access | None = None
        self._in_backward = False
        self._lost = False
        self._evaluating = False  # the latest access was a forward without training
        self._index = MirrorIndex(())
        self._next = 0
        self.rebuilt = 0  # changes whenever what is left is not merely one access shorter

    @property
    def in_backward(self) -> bool:
        """A backward has begun, and no training forward since."""
        return self._in_backward

    @property
    def in_forward(self) -> bool:
        """A training forward is under way, or an update within it: no backward has begun since, no evaluation."""
        return not self._in_backward and not self._evaluating and bool(self._forward)

    @property
    def expected(self) -> Access | None:
        """The next access of the backward under way; None outside, at its end, and where it took another turn."""
        if not self._in_backward or self._lost or self._next == len(self._index.accesses):
            return None
        return self._index.accesses[self._next]

    @property
    def finished(self) -> bool:
        """The backward under way has run as expected to its end."""
        return self._in_backward and not self._lost and self._next == len(self._index.accesses)

    def left(self) -> Sequence[Access]:
        return self._index.accesses[self._next :]

    def next_use(self, access: Access) -> int | None:
        """In how many accesses of the backward under way it comes (1: next)."""
        index = self._index.first(access, self._next)
        return None if index is None else index - self._next + 1

    def after(self, rest: Iterable[Hashable]) -> MirrorIndex:
        """The backward that would follow if the forward under way went on with the units `rest`."""
        return MirrorIndex(self._mirror([*self._forward, *rest]))

    def observe(self, access: Access) -> None:
        """The next access happened."""
        evaluating = access.phase == Phase.FORWARD and not access.training
        if evaluating != self._evaluating:
            self._evaluating = evaluating
            self.rebuilt += 1
        match access.phase:
            case Phase.FORWARD:
                if access.training:
                    if self._in_backward:
                        self._forward.clear()
                        self._recomputed.clear()
                        self._in_backward = False
                    if not self._forward:
                        self.rebuilt += 1
                    self._forward.append(access.unit)
                else:
                    self._lose()
            case Phase.UPDATE:
                self._lose()
            case _:
                if not self._in_backward:
                    self._in_backward, self._lost = True, False
                    self._build()
                learned = self._learn(access)
                self._follow(access, learned)
        self._last = access

    def _learn(self, access: Access) -> bool:
        """Whether something about segments is news."""
        unit = access.unit
        segment = _Segment.OUTSIDE
        if access.phase == Phase.RECOMPUTE:
            inside = self._last is not None and self._last.phase == Phase.RECOMPUTE
            segment = _Segment.INSIDE if inside else _Segment.FIRST
            if len(self._recomputed) < MAX_UNITS:
                self._recomputed.add(unit)
        elif unit in self._recomputed:
            self._recomputed.discard(unit)
            return False
        if self._segments.get(unit) == segment:
            return False
        self._segments[unit] = segment
        if len(self._segments) > MAX_UNITS:
            del self._segments[next(iter(self._segments))]
        return True

    def _follow(self, access: Access, learned: bool) -> None:
        if not self._advance(access):
            if learned:
                self._build()
            if not learned or not self._advance(access):
                self._lose()
        if access.phase == Phase.BACKWARD:
            if self._forward and self._forward[-1] == access.unit:
                self._forward.pop()
            elif access.unit in self._forward:
                while self._forward.pop() != access.unit:
                    pass

    def _advance(self, access: Access) -> bool:
        index = self._index.first(access, self._next)
        if index is None:
            return False
        if index != self._next or self._lost:
            self.rebuilt += 1
        self._next, self._lost = index + 1, False
        return True

    def _lose(self) -> None:
        if self._in_backward and not self._lost:
            self._lost = True
            self.rebuilt += 1

    def _build(self) -> None:
        self._index, self._next = MirrorIndex(self._mirror(list(self._forward))), 0
        self.rebuilt += 1

    def _mirror(self, units: Sequence[Hashable]) -> list[Access]:
        accesses: list[Access] = []
        stop, neighbour = len(units), _Segment.OUTSIDE
        while stop:
            start = stop - 1
            segment = self._segments.get(units[start], neighbour)
            if segment == _Segment.INSIDE:
                start = self._start_of_segment(units, start)
            if segment != _Segment.OUTSIDE:
                accesses += [Access(unit, Phase.RECOMPUTE) for unit in units[start:stop]]
            accesses += [Access(unit, Phase.BACKWARD) for unit in reversed(units[start:stop])]
            neighbour = _Segment.FIRST if segment != _Segment.OUTSIDE and stop - start == 1 else _Segment.OUTSIDE
            stop = start
        return accesses

    def _start_of_segment(self, units: Sequence[Hashable], index: int) -> int:
        """Units never seen in backward between the first one and this belong to it too."""
        start = index
        while start:
            start -= 1
            match self._segments.get(units[start]):
                case _Segment.FIRST:
                    return start
                case _Segment.OUTSIDE:
                    return index
        return index


class MirrorIndex:
    """Accesses in order, with the places of each."""

    def __init__(self, accesses: Sequence[Access]) -> None:
        self.accesses = accesses
        self._places: dict[Access, list[int]] = {}
        for place, access in enumerate(accesses):
            self._places.setdefault(access, []).append(place)

    def first(self, access: Access, start: int) -> int | None:
        """The first place of the access that is not before `start`."""
        places = self._places.get(access, [])
        index = bisect_left(places, start)
        return places[index] if index < len(places) else None
