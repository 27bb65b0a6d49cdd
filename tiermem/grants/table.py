"""The client's end of the grant protocol: a pure machine. Every method, the append to `outbox` included, is one
critical section of the client's lock (otherwise a demand of another thread overtakes a commit, counterexample C4).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace

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
    Surrender,
    Used,
    Void,
)
from tiermem.plan import Access


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
        self._unused: dict[str, dict[int, Grant]] = {lane: {} for lane in self._epoch}  # by serial
        self._live: dict[int, int] = {}  # newest version of bundles that hold bytes, or are being created here
        self._waiting: dict[tuple[str, int], Waiter] = {}
        self.counts = GrantCounts()
        self.outbox: deque[ClientBody] = deque()

    @property
    def leases(self) -> int:
        return len(self._leases)

    @property
    def unused(self) -> frozenset[int]:
        """Serials of pushed grants that are here and may become leases."""
        return frozenset(serial for grants in self._unused.values() for serial in grants)

    def adopted(self, bundle: int) -> None:
        """A bundle that came to be without a grant."""
        self._live[bundle] = 1

    def accessed(self, lane: str, access: Access) -> None:
        """What the lane does next."""
        self.outbox.append(Accessed(lane, access))

    def take(self, lane: str, target: int, mode: Mode) -> Lease | None:
        """A lease by a grant that is here already, or None: then demand it. `target` as in Demand."""
        unused, create = self._unused[lane], mode == Mode.CREATE
        for serial, grant in unused.items():
            made = grant.mode == Mode.CREATE
            if (grant.spec if made else grant.bundle) == target and made == create and grant.mode.covers(mode):
                del unused[serial]
                self.counts.used += 1
                self.outbox.append(Used((serial,)))
                return self._lease(grant, mode)
        return None

    def demand(self, lane: str, target: int, mode: Mode) -> Waiter:
        """Ask for a lease: the lane's epoch moves on, and everything it does not hold is void. Each thread has one open
        demand at most.
        """
        self._void(lane)
        waiter = Waiter(Demand(lane, self._epoch[lane], self._held(lane), target, mode))
        self._waiting[lane, self._epoch[lane]] = waiter
        self.outbox.append(waiter.demand)
        return waiter

    def _void(self, lane: str) -> None:
        self._epoch[lane] += 1
        self.counts.voided += len(self._unused[lane])
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
            self._unused[grant.lane][grant.serial] = grant

    def _lease(self, grant: Grant, mode: Mode) -> Lease:
        # A commit may have overtaken it: the frames hold the newest bytes, the grant an older number.
        version = max(grant.version, self._live.get(grant.bundle, 0))
        if version != grant.version:
            grant = replace(grant, version=version)
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
            lease.grant = replace(lease.grant, version=version)
            self._live[lease.grant.bundle] = version
            triples.append((serial, lease.grant.bundle, version))
        for serial in consumed:
            lease = self._leases.pop(serial)
            pairs.append((serial, lease.grant.bundle))
        self._forget({bundle for _, bundle in pairs})
        self.outbox.append(Commit(tuple(triples), tuple(pairs)))

    def done(self, serial: int) -> None:
        """End a lease, once, after its commit."""
        lease = self._leases.pop(serial)
        if lease.mode == Mode.CREATE:  # nothing was committed: the store forgets it
            self._forget({lease.grant.bundle})
        self.outbox.append(Done(serial))

    def discard(self, bundles: Iterable[int]) -> None:
        """Give up bundles for good. The caller holds no lease of them."""
        gone = tuple(bundles)
        leased = {lease.grant.bundle for lease in self._leases.values()}.intersection(gone)
        if leased:
            raise ProtocolError(f"discard of leased bundles {sorted(leased)}")
        self._forget(set(gone))
        self.outbox.append(Discard(gone))

    def _forget(self, bundles: set[int]) -> None:
        """Bundles have ended, and every unused grant of them (in flight ones are dropped when they come)."""
        for bundle in bundles:
            self._live.pop(bundle, None)
        for grants in self._unused.values():
            for serial in [s for s, grant in grants.items() if grant.bundle in bundles]:
                del grants[serial]
                self.counts.voided += 1

    def fail(self, error: TiermemError) -> list[Waiter]:
        """The session is over: every open demand ends with `error`."""
        ended = list(self._waiting.values())
        for waiter in ended:
            waiter.error = error
        self._waiting.clear()
        for grants in self._unused.values():
            grants.clear()
        return ended
