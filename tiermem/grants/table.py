"""The client's end of the grant protocol: a pure machine. Every method, the append to `outbox` included, is one
critical section of the client's lock (otherwise a demand of another thread overtakes a commit, counterexample C4).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tiermem.bundle import Mode
from tiermem.errors import ProtocolError, TiermemError, error_for
from tiermem.grants.messages import (
    Accessed,
    ClientBody,
    Commit,
    DaemonBody,
    Demand,
    Discard,
    Done,
    Grant,
    Refuse,
    Supersede,
    Surrender,
    Used,
    Void,
)
from tiermem.plan import Access

FEW_GRANTS = 8
"""With no more than these left the daemon hears of every use: new grants are to come before these are used up."""


@dataclass(slots=True)
class Lease:
    """A grant being used. `mode` is what the holder may still do: a committed writer reads on."""

    grant: Grant
    mode: Mode


@dataclass(slots=True)
class Waiter:
    """An open demand. Ends with `lease` or `error` set."""

    demand: Demand
    lease: Lease | None = None
    error: TiermemError | None = None

    @property
    def open(self) -> bool:
        return self.lease is None and self.error is None


@dataclass(slots=True)
class GrantCounts:
    """Pushed grants by what became of them."""

    received: int = 0
    used: int = 0
    late: int = 0  # of an epoch that was over, or of a bundle that was gone
    voided: int = 0


class GrantTable:
    """Epochs, leases, unused grants and open demands of one session's lanes.

    A grant that was pushed is kept until it is used, its lane demands something else, or its bundle ends.
    """

    def __init__(self, lanes: Iterable[str]) -> None:
        self._epoch: dict[str, int] = dict.fromkeys(lanes, 0)
        self._leases: dict[int, Lease] = {}
        self._unused: dict[str, dict[int, list[Grant]]] = {lane: {} for lane in self._epoch}  # by `_key`
        self._live: dict[int, int] = {}  # newest version of bundles that hold bytes, or are being created here
        self._waiting: dict[tuple[str, int], Waiter] = {}
        self.counts = GrantCounts()
        self._quiet_uses = self._quiet_frames = 0  # grants taken, and frames of leases that ended, since `told`
        self._asked = False  # something waits for an answer, since `told`
        self.outbox: deque[ClientBody] = deque()

    @property
    def leases(self) -> int:
        return len(self._leases)

    @property
    def unused(self) -> frozenset[int]:
        """Serials of pushed grants that are here and may become leases."""
        return frozenset(g.serial for lane in self._unused.values() for grants in lane.values() for g in grants)

    def presses(self, lane: str, frames: int) -> bool:
        """Whether the daemon should hear at once what has been decided since it was `told`: that somebody waits, that
        half of the lane's grants have been used, or some where few are left, or that leases of `frames` have ended.
        """
        uses, left = self._quiet_uses, len(self._unused[lane])
        return self._asked or self._quiet_frames >= frames or (uses > 0 and (uses >= left or left <= FEW_GRANTS))

    def told(self) -> None:
        """Everything in the outbox is on its way."""
        self._quiet_uses, self._quiet_frames, self._asked = 0, 0, False

    def adopted(self, bundle: int) -> None:
        """A bundle that came to be without a grant."""
        self._live[bundle] = 1

    def accessed(self, lane: str, access: Access) -> None:
        """What the lane does next."""
        self.outbox.append(Accessed(lane, access))

    def take(self, lane: str, targets: Sequence[int], mode: Mode) -> list[Lease | None]:
        """For each target, as in Demand, a lease by a grant that is here already; None where there is none: then demand
        it. One message says so for all that there are.
        """
        unused = self._unused[lane]
        leases: list[Lease | None] = []
        serials: list[int] = []
        for target in targets:
            key = _key(target, mode is Mode.CREATE)
            grants = unused.get(key, ())
            grant = next((g for g in grants if g.mode.covers(mode)), None)
            if grant is None:
                leases.append(None)
                continue
            if len(grants) == 1:
                del unused[key]
            else:
                unused[key] = [g for g in grants if g is not grant]
            serials.append(grant.serial)
            leases.append(self._lease(grant, mode))
        if serials:
            self.counts.used += len(serials)
            self._quiet_uses += len(serials)
            self.outbox.append(Used(tuple(serials)))
        return leases

    def demand(self, lane: str, target: int, mode: Mode) -> Waiter:
        """Ask for a lease: the lane's epoch moves on, and everything it does not hold is void. Each thread has one open
        demand at most.
        """
        self._void(lane)
        waiter = Waiter(Demand(lane, self._epoch[lane], self._held(lane), target, mode))
        self._waiting[lane, self._epoch[lane]] = waiter
        self._asked = True
        self.outbox.append(waiter.demand)
        return waiter

    def _void(self, lane: str) -> None:
        self._epoch[lane] += 1
        self.counts.voided += sum(map(len, self._unused[lane].values()))
        self._unused[lane].clear()

    def _held(self, lane: str) -> frozenset[int]:
        return frozenset(s for s, lease in self._leases.items() if lease.grant.lane == lane)

    def receive(self, message: DaemonBody) -> Waiter | None:
        """Take an answer: it becomes a lease on delivery, in any epoch (C1, C10). Returns whose wait has ended.

        A pushed grant is kept unless it is of an older epoch or its bundle is gone; a surrender is answered here,
        without a thread of the user's.
        """
        if isinstance(message, Surrender):
            if message.lane not in self._epoch:
                raise ProtocolError(f"{message} of an unknown lane")
            self._void(message.lane)
            self._asked = True
            self.outbox.append(Void(message.lane, self._epoch[message.lane], self._held(message.lane)))
            return None
        if isinstance(message, Grant) and not message.answers:
            self._keep(message)
            return None
        waiter = self._waiting.get((message.lane, message.answers))
        if waiter is None:
            raise ProtocolError(f"{message} answers no open demand of lane {message.lane!r}")
        demand = waiter.demand
        if isinstance(message, Grant):
            if not message.mode.covers(demand.mode):
                raise ProtocolError(f"{message} does not cover the mode of {demand}")
            if (message.spec if demand.mode == Mode.CREATE else message.bundle) != demand.target:
                raise ProtocolError(f"{message} is for another bundle than {demand}")
        del self._waiting[message.lane, message.answers]
        if isinstance(message, Refuse):
            waiter.error = error_for(message.code, message.message)
            return waiter
        waiter.lease = self._lease(message, demand.mode)
        return waiter

    def _keep(self, grant: Grant) -> None:
        if grant.lane not in self._epoch:
            raise ProtocolError(f"{grant} of an unknown lane")
        if grant.epoch > self._epoch[grant.lane]:
            raise ProtocolError(f"{grant} is of an epoch that lane {grant.lane!r} has not begun")
        self.counts.received += 1
        fresh = grant.mode == Mode.CREATE
        if grant.epoch < self._epoch[grant.lane] or (not fresh and grant.bundle not in self._live):
            self.counts.late += 1
        else:
            self._put(grant)

    def _put(self, grant: Grant) -> None:
        create = grant.mode is Mode.CREATE
        self._unused[grant.lane].setdefault(_key(grant.spec if create else grant.bundle, create), []).append(grant)

    def _lease(self, grant: Grant, mode: Mode) -> Lease:
        # A commit may have overtaken it: the frames hold the newest bytes, the grant an older number.
        version = max(grant.version, self._live.get(grant.bundle, 0))
        if version != grant.version:
            grant = grant._replace(version=version)
        lease = self._leases[grant.serial] = Lease(grant, mode)
        self._live[grant.bundle] = version
        return lease

    def commit(self, updated: Iterable[tuple[int, int]], consumed: Iterable[int] = ()) -> None:
        """One transaction: (serial, version) of leases whose bytes are complete, and serials whose bundles are used up.

        Writers become readers and stay leased until `done`; consumed leases end.
        """
        triples, pairs = [], []
        written = [(serial, version, self._leases[serial]) for serial, version in updated]
        for _, _, lease in written:
            if not lease.mode.writes:
                raise ProtocolError(f"commit of {lease.grant}, which is only read")
        for serial, version, lease in written:
            lease.mode = Mode.READ
            lease.grant = lease.grant._replace(version=version)
            self._live[lease.grant.bundle] = version
            triples.append((serial, lease.grant.bundle, version))
        for serial in consumed:
            lease = self._leases.pop(serial)
            pairs.append((serial, lease.grant.bundle))
        self._forget({bundle for _, bundle in pairs})
        self.outbox.append(Commit(tuple(triples), tuple(pairs)))

    def done(self, *serials: int) -> None:
        """End leases, each once, after its commit. One message for all of them."""
        for lease in [self._leases.pop(serial) for serial in serials]:
            self._quiet_frames += sum(count for _, count in lease.grant.runs)
            if lease.mode is Mode.CREATE:  # nothing was committed: the store forgets it
                self._forget({lease.grant.bundle})
        self.outbox.append(Done(serials))

    def discard(self, bundles: Iterable[int]) -> None:
        """Give up bundles for good. The caller holds no lease of them."""
        gone = tuple(bundles)
        self._check_idle(gone, "discard")
        self._forget(set(gone))
        self.outbox.append(Discard(gone))

    def supersede(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Of each pair (old, new) the old bundle ends, and the new one takes its place. The caller holds no lease of
        either.
        """
        changed = tuple(pairs)
        self._check_idle([bundle for pair in changed for bundle in pair], "supersede")
        self._forget({old for old, _ in changed})
        self.outbox.append(Supersede(changed))

    def _check_idle(self, bundles: Iterable[int], what: str) -> None:
        leased = {lease.grant.bundle for lease in self._leases.values()}.intersection(bundles)
        if leased:
            raise ProtocolError(f"{what} of leased bundles {sorted(leased)}")

    def _forget(self, bundles: set[int]) -> None:
        """Bundles have ended, and every unused grant of them (in flight ones are dropped when they come)."""
        for bundle in bundles:
            self._live.pop(bundle, None)
            for unused in self._unused.values():
                self.counts.voided += len(unused.pop(_key(bundle, create=False), ()))

    def fail(self, error: TiermemError) -> list[Waiter]:
        """The session is over: every open demand ends with `error`."""
        ended = list(self._waiting.values())
        for waiter in ended:
            waiter.error = error
        self._waiting.clear()
        for grants in self._unused.values():
            grants.clear()
        return ended


def _key(target: int, create: bool) -> int:
    """One number for a bundle, or for a form that is to be made."""
    return -1 - target if create else target
