"""DESIGN section 4: allocate(n) succeeds exactly when n <= free + frames neither leased nor busy; slack < one frame per
extent.
"""

from __future__ import annotations

import enum

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from tiermem.allocator import FrameAllocator, Run, choose_victims
from tiermem.layout import arena_layout
from tiermem.units import MIB

LAYOUT = arena_layout(MIB)
FRAMES = 48  # few, so that the arena is full most of the time


class Use(enum.Enum):
    IDLE = "idle"
    LEASED = "leased"
    BUSY = "busy"


class Arena(RuleBasedStateMachine):
    """An arena of extents in the three uses that decide what may be evicted, in LRU order of their insertion."""

    keys = Bundle("keys")

    def __init__(self) -> None:
        super().__init__()
        self.allocator = FrameAllocator(FRAMES)
        self.extents: dict[int, tuple[int, tuple[Run, ...]]] = {}
        self.use: dict[int, Use] = {}
        self.serial = 0

    def frames_of(self, key: int) -> int:
        return sum(count for _, count in self.extents[key][1])

    @rule(target=keys, nbytes=st.integers(0, 20 * LAYOUT.frame_bytes), use=st.sampled_from(Use))
    def allocate(self, nbytes: int, use: Use) -> int:
        need = LAYOUT.frames_for(nbytes)
        idle = [(key, self.frames_of(key)) for key in self.extents if self.use[key] is Use.IDLE]
        free = self.allocator.free_frames
        immovable = sum(self.frames_of(key) for key in self.extents if self.use[key] is not Use.IDLE)
        assert free + sum(frames for _, frames in idle) == FRAMES - immovable
        victims = choose_victims(need, free, idle)
        assert (victims is not None) == (need <= FRAMES - immovable)
        self.serial += 1
        if victims is None:
            return self.serial
        for key in victims:
            surplus = free + sum(self.frames_of(other) for other in victims) - need
            assert self.frames_of(key) > surplus, "this victim was needless"
        for key in victims:
            self.release(key)
        self.extents[self.serial] = nbytes, self.allocator.take(need)
        self.use[self.serial] = use
        return self.serial

    @rule(key=keys, use=st.sampled_from(Use))
    def change_use(self, key: int, use: Use) -> None:
        if key in self.extents:
            self.use[key] = use

    @rule(key=consumes(keys))
    def free_it(self, key: int) -> None:
        if key in self.extents:
            self.release(key)

    def release(self, key: int) -> None:
        _, runs = self.extents.pop(key)
        del self.use[key]
        self.allocator.give(runs)

    @invariant()
    def frames_are_partitioned(self) -> None:
        self.allocator.check_invariants(run for _, runs in self.extents.values() for run in runs)

    @invariant()
    def slack_is_below_one_frame_per_extent(self) -> None:
        for key, (nbytes, _) in self.extents.items():
            slack = self.frames_of(key) * LAYOUT.frame_bytes - nbytes
            assert 0 <= slack < LAYOUT.frame_bytes or nbytes == 0


TestArena = Arena.TestCase
TestArena.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
