"""What one lane will use next: suffix replay of its history, with the backward mirrored from the forward that ran.

The design's section 2 has the idea. Replay is exact where training repeats itself; the mirror is exact where forwards
differ (random experts, dropped layers). Where they disagree, the one that was right at recent disagreements is
believed. A wrong prediction costs transfers, never a result.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

from tiermem.mirror import Mirror, MirrorIndex
from tiermem.plan import Access, Phase
from tiermem.replay import HISTORY, Outcome, Replay

_IN_BACKWARD = (Phase.BACKWARD, Phase.RECOMPUTE)
MAX_TRUST = 4
"""Disagreements in a row after which the other of replay and mirror is believed, at most, plus one."""


@dataclass(frozen=True, slots=True)
class _Seam:
    """A backward that has not begun: it replaces what the history has in [start, stop)."""

    start: int
    stop: int
    backward: MirrorIndex


class Predictor:
    """Pure: no clock, no thread; the owner of the lane calls it under its lock. An `observe` takes constant time but
    for jumps (`Replay`) and for one mirror per backward; memory is bounded by `capacity` (`Replay`).
    """

    def __init__(self, capacity: int = HISTORY) -> None:
        self._replay: Replay[Access] = Replay(capacity)
        self._mirror = Mirror()
        self._trust = 0  # in the mirror; below 0 it is not asked
        self._seam_key: tuple[int, int] | None = None
        self._seam: _Seam | None = None
        self._tail_jumps = -1
        self._tail: int | None = None
        self._flips = 0  # of who is believed
        self._known_uses: dict[Access, int | None] = {}  # by number of the access, while the generation lasts
        self._known_generation = -1
        self.accesses = self.predicted = self.mispredicted = 0

    @property
    def expected(self) -> Access | None:
        """The next access; None where nothing is predicted."""
        return self._choose(self._mirror.expected, self._replay.expected)

    @property
    def generation(self) -> int:
        """While it stays the same, an access makes `upcoming` one shorter at the front and changes nothing else."""
        return self._replay.jumps + self._mirror.rebuilt + self._flips

    def _choose(self, mirrored: Access | None, replayed: Access | None) -> Access | None:
        if self._trust < 0:
            return replayed
        if mirrored is not None:
            return mirrored
        if replayed is None or replayed.phase not in _IN_BACKWARD:
            return replayed
        if self._mirror.finished:
            tail = self._after_backward()
            return replayed if tail is None else self._replay.at(tail)
        seam = self._forward_seam()
        return replayed if seam is None else seam.backward.accesses[0]

    def observe(self, access: Access) -> Outcome:
        """The next access happened; whether it was `expected`."""
        mirrored, replayed = self._mirror.expected, self._replay.expected
        expected = self._choose(mirrored, replayed)
        if mirrored is not None and replayed is not None and mirrored != replayed:
            self._judge(access == mirrored, access == replayed)
        self._replay.observe(access)
        self._mirror.observe(access)
        self.accesses += 1
        if expected is None:
            return Outcome.UNKNOWN
        self.predicted += 1
        if expected == access:
            return Outcome.RIGHT
        self.mispredicted += 1
        return Outcome.WRONG

    def upcoming(self, count: int) -> Sequence[Access]:
        """The next `count` accesses, or as many as are predicted; after what is remembered it begins again."""
        return list(itertools.islice(self._rollout(), count))

    def next_use(self, access: Access) -> int | None:
        """How many accesses from now it comes (1: next), as in `upcoming`; None where it is not predicted.

        Answers are kept while the generation lasts, so that asking for every unit at every eviction is cheap.
        """
        if self._known_generation != self.generation or len(self._known_uses) > HISTORY:
            self._known_generation = self.generation
            self._known_uses.clear()
        number = self._known_uses.get(access, 0)
        if number is None:
            return None
        if number <= self.accesses:
            distance = self._distance(access)
            self._known_uses[access] = None if distance is None else self.accesses + distance
            return distance
        return number - self.accesses

    def _judge(self, mirror_is_right: bool, replay_is_right: bool) -> None:
        believed = self._trust >= 0
        if mirror_is_right:
            self._trust = min(MAX_TRUST, self._trust + 1)
        elif replay_is_right:
            self._trust = max(-MAX_TRUST, self._trust - 1)
        self._flips += believed != (self._trust >= 0)

    def _distance(self, access: Access) -> int | None:
        pointer = self._replay.pointer
        if self._follows_mirror():
            distance = self._mirror.next_use(access)
            if distance is not None or pointer is None:
                return distance
            tail = self._after_backward()
            return self._resumed(access, pointer, self._replay.end if tail is None else tail, len(self._mirror.left()))
        if pointer is None:
            return None
        seam = self._forward_seam()
        if seam is None:
            return self._replay.next_use(access)
        position = self._replay.first(access, pointer + 1)
        if position is not None and position < seam.start:
            return position - pointer
        before = seam.start - pointer - 1
        place = seam.backward.first(access, 0)
        if place is not None:
            return before + place + 1
        return self._resumed(access, pointer, seam.stop, before + len(seam.backward.accesses))

    def _rollout(self) -> Iterator[Access]:
        replay, pointer = self._replay, self._replay.pointer
        if self._follows_mirror():
            yield from self._mirror.left()
            if pointer is None:
                return
            tail = self._after_backward()
            resume = replay.end if tail is None else tail
        elif pointer is None:
            return
        elif (seam := self._forward_seam()) is not None:
            yield from map(replay.at, range(pointer + 1, seam.start))
            yield from seam.backward.accesses
            resume = seam.stop
        else:
            resume = pointer + 1
        yield from map(replay.at, range(resume, replay.end))
        while True:
            yield from map(replay.at, range(pointer + 1, replay.end))

    def _resumed(self, access: Access, pointer: int, resume: int, before: int) -> int | None:
        """The distance of an access that comes after `before` others and the history from `resume` on."""
        position = self._replay.first(access, resume)
        if position is not None:
            return before + position - resume + 1
        position = self._replay.first(access, pointer + 1)
        return None if position is None else before + self._replay.end - resume + position - pointer

    def _follows_mirror(self) -> bool:
        if self._trust < 0:
            return False
        if self._mirror.expected is not None:
            return True
        replayed = self._replay.expected
        return self._mirror.finished and replayed is not None and replayed.phase in _IN_BACKWARD

    def _after_backward(self) -> int | None:
        """The first position after the pointer that is in no backward."""
        pointer = self._replay.pointer
        assert pointer is not None
        if self._tail_jumps != self._replay.jumps or (self._tail is not None and self._tail <= pointer):
            self._tail_jumps, self._tail = self._replay.jumps, self._first_outside_backward(pointer + 1)
        return self._tail

    def _first_outside_backward(self, start: int) -> int | None:
        replay = self._replay
        return next((p for p in range(start, replay.end) if replay.at(p).phase not in _IN_BACKWARD), None)

    def _forward_seam(self) -> _Seam | None:
        """The backward to come after the forward under way, if one came after the forward that is replayed."""
        if self._trust < 0 or not self._mirror.in_forward:
            return None
        key = (self._replay.jumps, self._mirror.rebuilt)
        if key != self._seam_key:
            self._seam_key, self._seam = key, self._find_seam()
        return self._seam

    def _find_seam(self) -> _Seam | None:
        replay, pointer = self._replay, self._replay.pointer
        if pointer is None:
            return None
        rest: list[Hashable] = []
        for position in range(pointer + 1, replay.end):
            access = replay.at(position)
            if access.phase in _IN_BACKWARD:
                stop = self._first_outside_backward(position)
                return _Seam(position, replay.end if stop is None else stop, self._mirror.after(rest))
            if access.phase == Phase.FORWARD:
                if not access.training:
                    return None
                rest.append(access.unit)
        return None

    def check_invariants(self) -> None:
        self._replay.check_invariants()
        assert self.mispredicted <= self.predicted <= self.accesses
