"""What the ledger wants done. The store does it after releasing its lock, in this order."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tiermem.grants.messages import DaemonBody
from tiermem.stats import StallCause


@dataclass(frozen=True, slots=True)
class Send:
    """Put the message into the session's ordered queue. `waited_for`: why the demand could not be answered at once, if
    it could not.
    """

    message: DaemonBody
    waited_for: StallCause | None = None


@dataclass(frozen=True, slots=True)
class Load:
    """Fill the bundle's frames from its flash copy, then report `loaded` or `load_failed`. `due_s`: when it is needed,
    on the clock of the forecast; -inf where somebody waits.
    """

    bundle: int
    due_s: float = -math.inf


@dataclass(frozen=True, slots=True)
class WriteBack:
    """Copy the bundle's frames to another flash extent, then report `written` or `write_failed`. `due_s`: as
    in Load, of what is to have the room.
    """

    bundle: int
    due_s: float = -math.inf


@dataclass(frozen=True, slots=True)
class Expedite:
    """Somebody waits for the transfer of this bundle that is under way."""

    bundle: int


@dataclass(frozen=True, slots=True)
class FreeFlash:
    """The bundle is gone; its flash copy, if there is one, may be recycled."""

    bundle: int


Effect = Send | Load | WriteBack | Expedite | FreeFlash
