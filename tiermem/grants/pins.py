"""Who may use which bundle: lanes, the grants that are out, the demands that wait. Pure look-ups for the ledger."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from tiermem.bundle import Mode
from tiermem.errors import ProtocolError
from tiermem.grants.messages import Commit, Demand
from tiermem.stats import StallCause


@dataclass(slots=True)
class Pin:
    """From the sending of a grant until done, consume or exit: the bundle's frames do not move."""

    lane: str
    bundle: int
    mode: Mode


@dataclass(slots=True)
class Lane:
    """One access stream. `budget` frames are its own; `epoch` is the client's newest."""

    name: str
    budget_frames: int
    floor_frames: int
    epoch: int = 0


@dataclass(slots=True)
class OpenDemand:
    """A demand that waits for a transfer. It counts as a pin of its lane."""

    demand: Demand
    bundle: int
    waited_for: StallCause | None = None


@dataclass(slots=True)
class Pins:
    """`granted` by serial; `open` oldest first, over all lanes. The ledger changes both."""

    granted: dict[int, Pin] = field(default_factory=dict)
    open: list[OpenDemand] = field(default_factory=list)

    def of_lane(self, lane: str) -> set[int]:
        """Bundles that count against the lane's budget, each once."""
        return {p.bundle for p in self.granted.values() if p.lane == lane} | {
            d.bundle for d in self.open if d.demand.lane == lane
        }

    def leased(self) -> set[int]:
        """Bundles under a grant."""
        return {p.bundle for p in self.granted.values()}

    def stay(self) -> set[int]:
        """Bundles that may not be evicted: leased or asked for."""
        return self.leased() | {d.bundle for d in self.open}

    def grant(self, serial: int, bundle: int | None = None) -> Pin:
        """Raises ProtocolError for a serial that is not out, or is another bundle's."""
        pin = self.granted.get(serial)
        if pin is None or (bundle is not None and pin.bundle != bundle):
            raise ProtocolError(
                f"grant {serial}{'' if bundle is None else f' of bundle {bundle}'} is not held by this session"
            )
        return pin

    def check_held(self, demand: Demand) -> None:
        """Raises ProtocolError unless `held` names grants of the demand's lane."""
        for serial in demand.held:
            pin = self.grant(serial)
            if pin.lane != demand.lane:
                raise ProtocolError(f"lane {demand.lane!r} claims to hold grant {serial} of lane {pin.lane!r}")

    def check_commit(self, commit: Commit) -> None:
        """Raises ProtocolError unless updated bundles are under writable grants, consumed ones under no other grant."""
        _check_distinct((bundle for _, bundle, _ in commit.updated), "commit updates")
        _check_distinct((bundle for _, bundle in commit.consumed), "commit consumes")
        for serial, bundle, _ in commit.updated:
            mode = self.grant(serial, bundle).mode
            if not mode.writes:
                raise ProtocolError(f"commit of bundle {bundle} under grant {serial}, which is for {mode.name}")
        for serial, bundle in commit.consumed:
            self.grant(serial, bundle)
            if self._in_use(bundle, but=serial):
                raise ProtocolError(f"consumed bundle {bundle} is leased elsewhere")

    def check_discard(self, bundles: Iterable[int]) -> None:
        """Raises ProtocolError unless nobody uses the bundles."""
        for bundle in _check_distinct(bundles, "discard names"):
            if self._in_use(bundle):
                raise ProtocolError(f"discard of bundle {bundle}, which is leased or asked for")

    def _in_use(self, bundle: int, but: int | None = None) -> bool:
        return any(p.bundle == bundle and s != but for s, p in self.granted.items()) or any(
            d.bundle == bundle for d in self.open
        )


def _check_distinct(bundles: Iterable[int], what: str) -> list[int]:
    items = list(bundles)
    if len(set(items)) < len(items):
        raise ProtocolError(f"{what} a bundle twice: {items[:20]}")
    return items
