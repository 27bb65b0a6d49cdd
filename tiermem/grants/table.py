"""The client's end of the grant protocol: a pure machine. Every method, the append to `outbox` included, is one
critical section of the client's lock (otherwise a demand of another thread overtakes a commit, counterexample C4).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace

from tiermem.bundle import Mode
from tiermem.errors import ProtocolError, TiermemError, error_for
from tiermem.grants.messages import ClientBody, Commit, DaemonBody, Demand, Discard, Done, Grant, Refuse


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


class GrantTable:
    """Epochs, leases and open demands of one session's lanes."""

    def __init__(self, lanes: Iterable[str]) -> None:
        self._epoch: dict[str, int] = dict.fromkeys(lanes, 0)
        self._leases: dict[int, Lease] = {}
        self._waiting: dict[tuple[str, int], Waiter] = {}
        self.outbox: deque[ClientBody] = deque()

    @property
    def leases(self) -> int:
        return len(self._leases)

    def demand(self, lane: str, target: int, mode: Mode) -> Waiter:
        """Ask for a lease: the lane's epoch moves on, and everything it does not hold is void. Each thread has one open
        demand at most.
        """
        self._epoch[lane] += 1
        held = frozenset(s for s, lease in self._leases.items() if lease.grant.lane == lane)
        waiter = Waiter(Demand(lane, self._epoch[lane], held, target, mode))
        self._waiting[lane, self._epoch[lane]] = waiter
        self.outbox.append(waiter.demand)
        return waiter

    def receive(self, message: DaemonBody) -> Waiter | None:
        """Take an answer: it becomes a lease on delivery, in any epoch (C1, C10). Returns whose wait has ended."""
        waiter = self._waiting.get((message.lane, message.answers))
        if waiter is None:
            raise ProtocolError(f"{message} answers no open demand of lane {message.lane!r}")
        demand = waiter.demand
        if isinstance(message, Grant):
            if not message.mode.covers(demand.mode):
                raise ProtocolError(f"{message} does not cover the mode of {demand}")
            if demand.mode != Mode.CREATE and message.bundle != demand.target:
                raise ProtocolError(f"{message} is for another bundle than {demand}")
        del self._waiting[message.lane, message.answers]
        if isinstance(message, Refuse):
            waiter.error = error_for(message.code, message.message)
            return waiter
        waiter.lease = self._leases[message.serial] = Lease(message, waiter.demand.mode)
        return waiter

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
            triples.append((serial, lease.grant.bundle, version))
        for serial in consumed:
            lease = self._leases.pop(serial)
            pairs.append((serial, lease.grant.bundle))
        self.outbox.append(Commit(tuple(triples), tuple(pairs)))

    def done(self, serial: int) -> None:
        """End a lease, once, after its commit."""
        del self._leases[serial]
        self.outbox.append(Done(serial))

    def discard(self, bundles: Iterable[int]) -> None:
        """Give up bundles for good. The caller holds no lease of them."""
        gone = tuple(bundles)
        leased = {lease.grant.bundle for lease in self._leases.values()}.intersection(gone)
        if leased:
            raise ProtocolError(f"discard of leased bundles {sorted(leased)}")
        self.outbox.append(Discard(gone))

    def fail(self, error: TiermemError) -> list[Waiter]:
        """The session is over: every open demand ends with `error`."""
        ended = list(self._waiting.values())
        for waiter in ended:
            waiter.error = error
        self._waiting.clear()
        return ended
