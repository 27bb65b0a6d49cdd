"""A hypothesis machine that drives a real JobStore, with its threads, against a dictionary of what was committed.

It plays the client: a GrantTable, and the arena's bytes through the store's own descriptor, as a trainer maps them. Use:
subclass it if the tiers are to be others, and run `StoreMachine.TestCase`. Needs hypothesis.
"""

from __future__ import annotations

import mmap
import random
import tempfile
import threading
from pathlib import Path

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tiermem.allocator import byte_ranges
from tiermem.bundle import BundleSpec, Kind, Mode
from tiermem.clock import MonotonicClock
from tiermem.errors import TierFull, TierIOError, TiermemError, WorkingSetTooLarge
from tiermem.grants.messages import Grant
from tiermem.grants.table import GrantTable, Lease, Waiter
from tiermem.job_store import JobStore
from tiermem.layout import ArenaLayout, arena_layout
from tiermem.mover import Mover
from tiermem.testing.fakes import FaultyTier, MemoryTier
from tiermem.testing.faults import Fault, FaultScript
from tiermem.tiers.base import Tier
from tiermem.tiers.dram import DramTier
from tiermem.tiers.flash import FlashTier
from tiermem.tiers.flash_directory import FlashDirectory
from tiermem.units import KIB, MIB

LANE = "main"
WAIT_S = 20.0


class OneShotFaults(FaultScript):
    """A script to which faults are added as the test goes on: each meets the next call of its operation."""

    def __init__(self) -> None:
        super().__init__(())
        self._guard = threading.Lock()  # owner: this script
        self._armed: dict[str, int] = {}  # guarded by _guard: errno by operation

    def arm(self, operation: str, number: int) -> None:
        with self._guard:
            self._armed[operation] = number

    def next(self, target: str, operation: str) -> int | None:
        with self._guard:
            return self._armed.pop(operation, None)
