"""Suffix replay: what came after the same accesses last time comes again. Pure, over any hashable values."""

from __future__ import annotations

import enum
from bisect import bisect_left
from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

A = TypeVar("A", bound=Hashable)

HISTORY = 1 << 16
"""Accesses remembered: sixteen steps of 80 units, three phases and sixteen micro-steps."""
CANDIDATES = 64
SUFFIX = 64


class Outcome(enum.Enum):
    """Whether an access was the one that had been predicted; UNKNOWN where nothing had."""

    RIGHT = "right"
    WRONG = "wrong"
    UNKNOWN = "unknown"


class _Seen(Generic[A]):
    """An access and where it stands in the history, in order. One object per value: compared by identity."""

    __slots__ = ("access", "positions")

    def __init__(self, access: A) -> None:
        self.access = access
        self.positions: list[int] = []


class Replay(Generic[A]):
    """A history of accesses and a pointer into it, at the position that the present one repeats.

    While accesses follow the history the pointer advances. Otherwise it jumps to that one of the last `CANDIDATES`
    positions of the access before which the longest piece of the history, at most `SUFFIX`, is the same as before the
    present; of equals to the latest. Positions count accesses since the beginning. No thread, no clock; between
    `capacity` and 2 * `capacity` accesses are kept. `jumps` counts changes of the pointer other than by one.
    """

    def __init__(self, capacity: int = HISTORY) -> None:
        if capacity < 1:
            raise ValueError(f"a history of {capacity} accesses; give 1 or more")
        self._capacity = capacity
        self._history: list[_Seen[A]] = []
        self._base = 0  # position of _history[0]
        self._seen: dict[A, _Seen[A]] = {}
        self._pointer: int | None = None
        self.jumps = 0

    def __len__(self) -> int:
        """Accesses remembered."""
        return len(self._history)

    @property
    def end(self) -> int:
        """The position that the next access will have."""
        return self._base + len(self._history)

    @property
    def pointer(self) -> int | None:
        """The earlier position that the latest access repeats; None where it never was before."""
        return self._pointer

    @property
    def expected(self) -> A | None:
        if self._pointer is None:
            return None
        return self._history[self._pointer + 1 - self._base].access

    def at(self, position: int) -> A:
        """The access at a position that is remembered (from the pointer to the end)."""
        return self._history[position - self._base].access

    def first(self, access: A, start: int) -> int | None:
        """The first position of the access that is not before `start`."""
        seen = self._seen.get(access)
        if seen is None:
            return None
        index = bisect_left(seen.positions, start)
        return seen.positions[index] if index < len(seen.positions) else None

    def observe(self, access: A) -> Outcome:
        """The next access happened."""
        seen = self._seen.get(access)
        if seen is None:
            seen = self._seen[access] = _Seen(access)
        position = self.end
        self._history.append(seen)
        outcome = Outcome.UNKNOWN
        if self._pointer is not None and self._history[self._pointer + 1 - self._base] is seen:
            outcome = Outcome.RIGHT
            self._pointer += 1
        else:
            if self._pointer is not None:
                outcome = Outcome.WRONG
            self._pointer = self._best_match(seen, position)
            self.jumps += 1
        seen.positions.append(position)
        if len(self._history) > 2 * self._capacity:
            self._trim()
        return outcome

    def upcoming(self, count: int) -> Sequence[A]:
        """The next `count` accesses: what came after the pointer, again and again; none without a pointer."""
        if self._pointer is None:
            return ()
        start, period = self._pointer + 1, self.end - self._pointer - 1
        return [self.at(start + n % period) for n in range(count)]

    def next_use(self, access: A) -> int | None:
        """How many accesses from now it comes (1: next); None where it does not, or nothing is known."""
        if self._pointer is None:
            return None
        position = self.first(access, self._pointer + 1)
        return None if position is None else position - self._pointer

    def _best_match(self, seen: _Seen[A], position: int) -> int | None:
        history, base = self._history, self._base
        now = position - base
        best, best_length = None, -1
        for candidate in reversed(seen.positions[-CANDIDATES:]):
            then = candidate - base
            most = min(SUFFIX, then)
            length = 0
            while length < most and history[then - length - 1] is history[now - length - 1]:
                length += 1
            if length > best_length:
                best, best_length = candidate, length
                if length == SUFFIX:
                    break
        return best

    def _trim(self) -> None:
        """Forget all but the newest. Amortised: it touches every position once per `capacity` accesses."""
        cut = len(self._history) - self._capacity
        del self._history[:cut]
        self._base += cut
        for seen in list(self._seen.values()):
            del seen.positions[: bisect_left(seen.positions, self._base)]
            if not seen.positions:
                del self._seen[seen.access]
        if self._pointer is not None and self._pointer < self._base:
            self._pointer = None
            self.jumps += 1

    def check_invariants(self) -> None:
        """The index holds exactly the history; the pointer is at an earlier position of the latest access."""
        assert len(self._history) <= 2 * self._capacity, "the history outgrew its bound"
        assert sum(len(seen.positions) for seen in self._seen.values()) == len(self._history)
        for seen in self._seen.values():
            assert all(self._history[p - self._base] is seen for p in seen.positions), f"{seen.access} is misplaced"
        if self._pointer is not None:
            assert self._base <= self._pointer < self.end - 1, f"pointer {self._pointer} of {self.end} accesses"
            assert self.at(self._pointer) == self.at(self.end - 1), "the pointer is at another access"
