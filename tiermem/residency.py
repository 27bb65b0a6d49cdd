"""Where a bundle's bytes are: one transition table over residency, dirtiness and loss. Pure; the ledger applies it
under the store's lock.

    ABSENT -create-> BLANK -commit-> DIRTY -write-> WRITING -written-> CLEAN
    ABSENT -adopt-> FLASH
    CLEAN -drop-> FLASH -load-> LOADING -loaded-> CLEAN

The state says which memory a bundle costs: BLANK, LOADING, CLEAN, DIRTY, WRITING and DOOMED own DRAM frames, the others
own none. At every moment the newest committed version is in DRAM (CLEAN, DIRTY, WRITING) or in flash (FLASH, LOADING,
CLEAN); beside DIRTY and WRITING flash may still hold an older one. The flash copy of an adopted bundle is a file of the
client's, until the first write-back.
"""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass, field

from tiermem.allocator import Run
from tiermem.bundle import BundleSpec


class State(enum.Enum):
    """Residency of one bundle."""

    __hash__ = object.__hash__  # members are unique; that of Enum hashes the name, in Python

    ABSENT = "absent"  # id minted, no bytes anywhere
    BLANK = "blank"  # frames granted for creation, nothing committed
    FLASH = "flash"  # newest bytes in flash only
    LOADING = "loading"  # frames taken, being filled from flash
    CLEAN = "clean"  # newest bytes in DRAM and in flash
    DIRTY = "dirty"  # newest bytes in DRAM only
    WRITING = "writing"  # as DIRTY, a copy to another flash extent is under way
    DOOMED = "doomed"  # discarded while a transfer was in flight; frames are freed when it ends
    GONE = "gone"  # consumed or discarded; the id is never used again


class Event(enum.Enum):
    """What happens to a bundle."""

    __hash__ = object.__hash__

    CREATE = "create"
    ADOPT = "adopt"  # its bytes are in a file that the client has passed in
    COMMIT = "commit"
    LOAD = "load"
    LOADED = "loaded"
    LOAD_FAILED = "load failed"
    WRITE = "write"
    WRITTEN = "written"
    WRITE_FAILED = "write failed"
    DROP = "drop"
    ABANDON = "abandon"  # a blank extent whose last writable grant ended uncommitted
    DISCARD = "discard"
    DRAINED = "drained"  # the transfer of a doomed bundle ended


_S, _E = State, Event
TRANSITIONS: dict[tuple[State, Event], State] = {
    (_S.ABSENT, _E.CREATE): _S.BLANK,
    (_S.ABSENT, _E.ADOPT): _S.FLASH,
    (_S.ABSENT, _E.DISCARD): _S.GONE,
    (_S.BLANK, _E.COMMIT): _S.DIRTY,
    (_S.BLANK, _E.ABANDON): _S.ABSENT,
    (_S.BLANK, _E.DISCARD): _S.GONE,
    (_S.FLASH, _E.LOAD): _S.LOADING,
    (_S.FLASH, _E.DISCARD): _S.GONE,
    (_S.LOADING, _E.LOADED): _S.CLEAN,
    (_S.LOADING, _E.LOAD_FAILED): _S.FLASH,
    (_S.LOADING, _E.DISCARD): _S.DOOMED,
    (_S.CLEAN, _E.COMMIT): _S.DIRTY,
    (_S.CLEAN, _E.DROP): _S.FLASH,
    (_S.CLEAN, _E.DISCARD): _S.GONE,
    (_S.DIRTY, _E.COMMIT): _S.DIRTY,
    (_S.DIRTY, _E.WRITE): _S.WRITING,
    (_S.DIRTY, _E.DISCARD): _S.GONE,
    (_S.WRITING, _E.WRITTEN): _S.CLEAN,
    (_S.WRITING, _E.WRITE_FAILED): _S.DIRTY,
    (_S.WRITING, _E.DISCARD): _S.DOOMED,
    (_S.DOOMED, _E.DRAINED): _S.GONE,
}

_WORDS = {(old, event): f"{old.value} -{event.value}-> {new.value}" for (old, event), new in TRANSITIONS.items()}

RESIDENT = frozenset({_S.CLEAN, _S.DIRTY, _S.WRITING})  # bytes that a read grant may show
IDLE = frozenset({_S.CLEAN, _S.DIRTY})  # may be evicted where nobody uses them
IN_TRANSFER = frozenset({_S.LOADING, _S.WRITING, _S.DOOMED})  # frames that may not move
FRAMED = frozenset({_S.BLANK, _S.LOADING, _S.CLEAN, _S.DIRTY, _S.WRITING, _S.DOOMED})  # states that own DRAM frames


class IllegalTransition(AssertionError):
    """An event that the table does not know for the state: a bug in tiermem. Carries the bundle's history."""


@dataclass(slots=True)
class BundleRecord:
    """What the ledger knows of one bundle. `version` is the newest committed one (0: none), `flash_version` that of the
    flash copy.

    `external`: that copy is a file of the client's, which takes no room in the flash tier. `charged`: the bundle counts
    against the flash quota; an adopted one does from the first grant to write it on.
    """

    bundle_id: int
    spec: BundleSpec
    frames: int
    state: State = State.ABSENT
    runs: tuple[Run, ...] = ()
    version: int = 0
    flash_version: int = 0
    external: bool = False
    charged: bool = True
    history: deque[str] = field(default_factory=lambda: deque(maxlen=16))

    def apply(self, event: Event) -> None:
        """Follow the table, or raise IllegalTransition with the history."""
        step = self.state, event
        new = TRANSITIONS.get(step)
        if new is None:
            raise IllegalTransition(
                f"bundle {self.bundle_id} ({self.spec}): {event.value!r} while {self.state.value}; "
                f"history: {', '.join(self.history) or 'none'}"
            )
        self.history.append(_WORDS[step])
        self.state = new

    def check_invariants(self) -> None:
        """Sizes and versions fit the state."""
        assert not self.external or self.flash_version > 0, f"bundle {self.bundle_id}: in a file, but of no version"
        assert self.charged or (self.external and self.flash_version == self.version), (
            f"bundle {self.bundle_id}: takes flash room that nobody has charged"
        )
        owned = sum(n for _, n in self.runs)
        assert owned == (self.frames if self.state in FRAMED else 0), (
            f"bundle {self.bundle_id}: {self.state} owns {owned} frames"
        )
        if self.state in (State.FLASH, State.LOADING, State.CLEAN):
            assert self.flash_version == self.version > 0, (
                f"bundle {self.bundle_id}: {self.state} without its newest flash copy"
            )
        if self.state in (State.DIRTY, State.WRITING):
            assert self.version > 0 and self.flash_version <= self.version, (
                f"bundle {self.bundle_id}: {self.state} versions"
            )
