"""Fakes and fault injection for tests of tiermem and of code built on it.

The executable contract of tiers, which needs pytest, is imported by its own name: `tiermem.testing.tier_contract`.
"""

from tiermem.testing.fakes import FakeClock, FaultyTier, MemoryTier, NullTier, SlowTier, page_aligned
from tiermem.testing.faults import Fault, FaultScript, FaultyCalls, parse_fault_script

__all__ = [
    "FakeClock",
    "Fault",
    "FaultScript",
    "FaultyCalls",
    "FaultyTier",
    "MemoryTier",
    "NullTier",
    "SlowTier",
    "page_aligned",
    "parse_fault_script",
]
