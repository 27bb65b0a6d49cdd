"""Accesses that were recorded, and the least that they move between DRAM and flash: Belady's order over what really
came, gradients and write-backs included.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tiermem.bundle import Mode
from tiermem.plan import Access, BundleUse, Phase, PlannedAccess
from tiermem.planner.cache import CacheCount, OfflinePolicy, simulate_each


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes between DRAM and flash."""

    read_bytes: float = 0.0
    written_bytes: float = 0.0


@dataclass(slots=True)
class AccessRecord:
    """What a job used, in order: filled by the methods, one thread at a time. A bundle is named by a number of its
    form; what it holds is another *content* each time it is made anew.
    """

    _plan: list[PlannedAccess] = field(default_factory=list)
    _labels: list[str] = field(default_factory=list)
    _content: dict[int, int] = field(default_factory=dict)
    _last: dict[int, int] = field(default_factory=dict)  # the access that used a content last
    _marks: list[int] = field(default_factory=list)
    _made: int = 0

    def used(self, label: str, phase: Phase, uses: Iterable[BundleUse]) -> None:
        """These are in DRAM together, those held already included. `label`: the part of the step it counts for."""
        now = []
        for use in uses:
            fresh = use.mode == Mode.CREATE or use.bundle not in self._content
            if fresh:
                self._made += 1
                self._content[use.bundle] = self._made
            content = self._content[use.bundle]
            self._last[content] = len(self._plan)
            now.append(replace(use, bundle=content))
        self._plan.append(PlannedAccess(Access(label, phase), tuple(now)))
        self._labels.append(label)

    def freed(self, bundle: int) -> None:
        """Its content is not needed any more: from its last use on it takes no room."""
        content = self._content.pop(bundle, None)
        if content is not None and content in self._last:
            at = self._last.pop(content)
            planned = self._plan[at]
            uses = tuple(
                replace(use, mode=Mode.CONSUME) if use.bundle == content and use.mode != Mode.CREATE else use
                for use in planned.uses
            )
            self._plan[at] = PlannedAccess(planned.access, uses)

    def renamed(self, old: int, new: int) -> None:
        """The old bundle has the new one's content from now on, the new one none."""
        self.freed(old)
        if (content := self._content.pop(new, None)) is not None:
            self._content[old] = content

    def step_ended(self) -> None:
        self._marks.append(len(self._plan))

    @property
    def steps(self) -> int:
        return len(self._marks)

    def least_traffic(self, capacity_bytes: int, first: int, steps: int) -> Mapping[str, Traffic]:
        """By label, what a step moves at least within `capacity_bytes` of DRAM: the mean of `steps` steps from step
        number `first` (from 1; what comes before warms the cache up, what follows says which uses come next). Raises
        ValueError where so many were not recorded.
        """
        if not 1 <= first < first + steps <= self.steps:
            raise ValueError(f"steps {first} to {first + steps} of the {self.steps} that were recorded")
        plan = tuple(self._plan)
        counts = simulate_each(plan, capacity_bytes, OfflinePolicy(plan))
        start, end = self._marks[first - 1], self._marks[first + steps - 1]
        traffic: dict[str, Traffic] = {}
        for at in range(start, end):
            moved = counts[at].minus(counts[at - 1] if at else CacheCount())
            seen = traffic.get(self._labels[at], Traffic())
            traffic[self._labels[at]] = Traffic(
                seen.read_bytes + moved.read_bytes / steps, seen.written_bytes + moved.written_bytes / steps
            )
        return traffic

    def updated_bytes(self, first: int, steps: int) -> Mapping[str, float]:
        """By label, the bytes that updates write in a step: where the work of the update is done."""
        written: dict[str, float] = {}
        for at in range(self._marks[first - 1], self._marks[first + steps - 1]):
            planned = self._plan[at]
            if planned.access.phase == Phase.UPDATE:
                nbytes = sum(use.nbytes for use in planned.uses if use.mode in (Mode.UPDATE, Mode.CREATE))
                written[self._labels[at]] = written.get(self._labels[at], 0.0) + nbytes / steps
        return written


def compute_by_phase(
    forward_s: float, backward_s: float, update_s: float, updated: Mapping[str, float]
) -> Sequence[tuple[str, float]]:
    """Seconds of computing of each part of a step, the update's where its bytes were written (`updated`)."""
    total = sum(updated.values())
    share = {label: nbytes / total for label, nbytes in updated.items()} if total else {"update": 1.0}
    own = {"forward": forward_s, "backward": backward_s, "update": 0.0}
    return [(label, seconds + update_s * share.get(label, 0.0)) for label, seconds in own.items()]
