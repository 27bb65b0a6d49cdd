"""Who may use which bundle: lanes, the grants that are out, the demands that wait. Pure look-ups for the ledger."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from tiermem.bundle import Mode
from tiermem.errors import ProtocolError
from tiermem.grants.messages import Commit, Demand
from tiermem.stats import StallCause


@dataclass(slots=True)
class Pin:
    """From the sending of a grant until done, void, consume or exit: the bundle's frames do not move.

    `pushed`: it answers no demand, and the client has not said that it uses it. Only such a pin can be void.
    """

    lane: str
    bundle: int
    mode: Mode
    pushed: bool = False


@dataclass(slots=True)
class Lane:
    """One access stream. `budget_frames` are its own; `epoch` is the client's newest. `target_frames`: what the budget
    is to become as soon as the lane's pins allow it.

    `unused`: grants that the client had not used when it was last granted some ahead; `used`: what it has used since.
    """

    name: str
    budget_frames: int
    floor_frames: int
    epoch: int = 0
    target_frames: int | None = None
    unused: int = 0
    used: int = 0

    @property
    def room_frames(self) -> int:
        """How much may be pinned by grants that nobody waits for."""
        return self.budget_frames if self.target_frames is None else min(self.budget_frames, self.target_frames)


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

    def may_be_written(self, bundle: int) -> bool:
        """Whether somebody has, or waits for, the right to write it."""
        return any(p.bundle == bundle and p.mode.writes for p in self.granted.values()) or any(
            d.bundle == bundle and d.demand.mode.writes for d in self.open
        )

    def grant(self, serial: int, bundle: int | None = None) -> Pin:
        """Raises ProtocolError for a serial that is not out, or is another bundle's."""
        pin = self.granted.get(serial)
        if pin is None or (bundle is not None and pin.bundle != bundle):
            raise ProtocolError(
                f"grant {serial}{'' if bundle is None else f' of bundle {bundle}'} is not held by this session"
            )
        return pin

    def unused(self, lane: str) -> dict[int, Mode]:
        """The strongest mode in which each bundle is granted to the lane ahead of use."""
        found: dict[int, Mode] = {}
        for pin in self.granted.values():
            if pin.pushed and pin.lane == lane and not found.get(pin.bundle, Mode.READ).writes:
                found[pin.bundle] = pin.mode
        return found

    def void(self, lane: str, held: Collection[int]) -> list[int]:
        """Serials of the lane's pushed grants that are void now, as the client holds only `held`."""
        for serial in held:
            self.granted[serial].pushed = False
        return [serial for serial, pin in self.granted.items() if pin.pushed and pin.lane == lane]

    def check_held(self, lane: str, held: Iterable[int]) -> None:
        """Raises ProtocolError unless `held` names grants of the lane."""
        for serial in held:
            pin = self.grant(serial)
            if pin.lane != lane:
                raise ProtocolError(f"lane {lane!r} claims to hold grant {serial} of lane {pin.lane!r}")

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
            if self._leased(bundle, but=serial):
                raise ProtocolError(f"consumed bundle {bundle} is leased elsewhere")

    def check_done(self, serials: Iterable[int]) -> None:
        """Raises ProtocolError unless the serials are those of grants, each once."""
        for serial in _check_distinct(serials, "done names", "a grant"):
            self.grant(serial)

    def check_unused(self, bundles: Iterable[int], what: str) -> None:
        """Raises ProtocolError unless nobody uses the bundles, each named once."""
        for bundle in _check_distinct(bundles, f"{what} names"):
            if self._leased(bundle):
                raise ProtocolError(f"{what} of bundle {bundle}, which is leased or asked for")

    def pushed_on(self, bundle: int) -> list[int]:
        """Serials of grants of the bundle that nobody uses."""
        return [serial for serial, pin in self.granted.items() if pin.bundle == bundle and pin.pushed]

    def _leased(self, bundle: int, but: int | None = None) -> bool:
        return any(p.bundle == bundle and s != but and not p.pushed for s, p in self.granted.items()) or any(
            d.bundle == bundle for d in self.open
        )


def _check_distinct(numbers: Iterable[int], what: str, kind: str = "a bundle") -> list[int]:
    items = list(numbers)
    if len(set(items)) < len(items):
        raise ProtocolError(f"{what} {kind} twice: {items[:20]}")
    return items
