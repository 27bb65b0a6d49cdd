"""The state of a grant protocol's world, the truth about its bytes, and the judge of both machines.

The invariants' names, I1 to I7, are those of the protocol's specification (ARCHITECTURE.md); I7 is `World.drain`'s and
the explorer's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from tiermem.allocator import FrameAllocator, Run
from tiermem.bundle import BundleSpec, Kind, Mode
from tiermem.errors import Code
from tiermem.grants.foresight import Use
from tiermem.grants.ledger import GrantLedger
from tiermem.grants.messages import (
    ClientBody,
    Commit,
    DaemonBody,
    Demand,
    Discard,
    Done,
    Grant,
    Refuse,
    Supersede,
    Void,
)
from tiermem.grants.table import GrantTable, Lease, Waiter
from tiermem.plan import Access
from tiermem.residency import RESIDENT, State
from tiermem.stats import Link

MAIN, WORKER = "main", "worker"

Content = tuple[int, int] | None
"""What a frame holds: (bundle, version), or None for bytes that are no version of anything."""

Action = tuple[str | int | bool | Mode, ...]
"""What may happen next: a name and its arguments."""


Prediction = tuple[tuple[str, int, Mode], ...]
"""Uses that are foreseen, nearest first: (lane, form, mode); the lane "" is every lane."""


@dataclass(frozen=True, slots=True)
class Config:
    """`forms` are sizes in frames (form i has number i + 1), `kept` the forms of the bundles that exist at the start,
    `threads` (name, most frames it uses together), `modes` those in which they use what exists. The numbers bound how
    often something may happen; faults below 0 are without end.

    `workers` are the threads of the second lane, which has `worker_frames` of the arena. At every step the daemon
    foresees one of `predictions`, whichever the world likes, and may grant `ahead_frames` ahead of use. A shrink asks
    the main lane for any target down to its floor, which is what its threads use together. `heirs`: pairs of a form and
    the form whose place its bundles may take, the latter declared before.
    """

    arena_frames: int
    flash_quota_frames: int
    forms: tuple[int, ...]
    kept: tuple[int, ...]
    threads: tuple[tuple[str, int], ...]
    modes: tuple[Mode, ...] = (Mode.READ, Mode.UPDATE)
    commits: int = 2
    creates: int = 0
    discards: int = 0
    faults: int = 0
    deaths: int = 0
    either_order: bool = False
    workers: tuple[str, ...] = ()
    worker_frames: int = 0
    predictions: tuple[Prediction, ...] = ((),)
    ahead_frames: int = 0
    shrinks: int = 0
    supersedes: int = 0
    heirs: tuple[tuple[int, int], ...] = ()

    def lane(self, thread: str) -> str:
        return WORKER if thread in self.workers else MAIN

    @property
    def budgets(self) -> dict[str, int]:
        main = {MAIN: self.arena_frames - self.worker_frames}
        return main | {WORKER: self.worker_frames} if self.workers else main

    def floor(self, lane: str) -> int:
        return sum(most for thread, most in self.threads if self.lane(thread) == lane)

    @property
    def within_floor(self) -> bool:
        return all(self.floor(lane) <= budget for lane, budget in self.budgets.items())


@dataclass(slots=True)
class Hold:
    """A lease of a thread. Its use: "idle" (a local wait for a co-user), "reading", "writing"."""

    thread: str
    lease: Lease
    use: str = "idle"
    may_write: bool = False  # for the daemon: granted for writing, and not committed


@dataclass(slots=True)
class Moving:
    """A transfer in flight, and the bytes at its source when it began."""

    link: Link
    runs: tuple[Run, ...]
    source: tuple[Content, ...]


@dataclass(frozen=True, slots=True)
class Exit:
    """In the daemon's queue: the client's process is gone, and everything that it sent has been read."""


@dataclass(slots=True)
class _Ids:
    last: int = 0

    def __call__(self) -> int:
        self.last += 1
        return self.last


@dataclass(slots=True)
class _EitherOrder:
    """A placement that the world steers: any policy is some sequence of choices."""

    reverse: bool = False

    def used(self, bundle_id: int) -> None:
        pass

    def forget(self, bundle_id: int) -> None:
        pass

    def eviction_order(self, candidates: Iterable[int]) -> list[int]:
        return sorted(candidates, reverse=self.reverse)


@dataclass(slots=True)
class _Oracle:
    """A foresight that the world steers."""

    prediction: Prediction = ()

    def accessed(self, lane: str, access: Access) -> bool:
        return True

    def used(self, lane: str, spec: BundleSpec, mode: Mode) -> None:
        pass

    def upcoming(self, lane: str) -> Iterable[Use]:
        return [Use(form, mode) for where, form, mode in self.prediction if where in ("", lane)]


class WorldState:
    """Two machines, two queues, the client's threads, and what is true."""

    def __init__(
        self,
        config: Config,
        table: Callable[[list[str]], GrantTable],
        ledger: Callable[..., GrantLedger],
    ) -> None:
        self.config = config
        self.placement = _EitherOrder()
        self.oracle = _Oracle()
        self.ledger = ledger(
            FrameAllocator(config.arena_frames),
            1,
            int,  # a form's bytes are its frames
            config.flash_quota_frames,
            max(config.forms),
            self.placement,
            _Ids(),
            foresight=self.oracle,
            ahead_frames=config.ahead_frames,
        )
        self.table = table(list(config.budgets))
        self.up: deque[ClientBody | Exit] = deque()
        self.down: deque[DaemonBody] = deque()
        self.waiters: dict[str, Waiter] = {}
        self.holds: dict[int, Hold] = {}
        self.unused: dict[int, Grant] = {}  # pushed, and not void
        self.epochs = dict.fromkeys(config.budgets, 0)
        self.alive = True
        self.failing = False
        self.commits, self.creates, self.discards = config.commits, config.creates, config.discards
        self.faults, self.deaths, self.shrinks = config.faults, config.deaths, config.shrinks
        self.supersedes = config.supersedes
        # The truth: newest committed version of every live bundle, bytes in frames and flash, transfers in flight.
        self.newest: dict[int, int] = {}
        self.frames: dict[int, int] = {}
        self.memory: list[Content] = [None] * config.arena_frames
        self.flash: dict[int, Content] = {}
        self.moving: dict[int, Moving] = {}
        heirs = dict(config.heirs)
        for i, n in enumerate(config.forms, 1):
            self.ledger.declare([BundleSpec(i, Kind.PARAM, f"u{i}", n, (), heirs.get(i, 0))])
        self._admit()

    def _admit(self) -> None:
        for i, (lane, budget) in enumerate(self.config.budgets.items(), len(self.config.forms) + 1):
            floor = min(self.config.floor(lane), budget)
            self.ledger.declare([BundleSpec(i, Kind.PARAM, f"floor of {lane}", floor)])
            self.ledger.admit(lane, [i])
            self.ledger.shrink(lane, budget)

    def check(self) -> None:
        """Raise AssertionError, its text beginning with the invariant's name, unless all invariants hold."""
        for serial, lease, use in self._usable():
            self._check_grant(serial, lease, use)
        self._check_pins()
        if self.alive:
            kept, usable = self.table.unused, set(self.unused)
            assert kept == usable, f"unused: the client would use grants {set(kept)}, but {usable} are not void"
        for bundle, version in self.newest.items():
            if self.alive and version:
                self._check_kept(bundle, version)
        # I5: each frame is free or has one owner, pins fit the budget; transfers move bytes of their own bundle only.
        self.ledger.check_invariants()
        for bundle, moving in self.moving.items():
            record = self.ledger.bundles.get(bundle)
            assert record is not None and record.runs == moving.runs, f"I5: {moving} of bundle {bundle} lost its frames"
        taken = sum(self.frames.get(b, 0) for b in self.flash)
        taken += sum(self.frames.get(b, 0) for b, m in self.moving.items() if m.link == Link.DRAM_TO_FLASH)
        quota = self.config.flash_quota_frames
        assert taken <= quota, f"I5: {taken} flash frames are taken or being written, of a quota of {quota}"
        if not self.alive and not self.up and not self.moving:
            assert not self.ledger.bundles and not self.flash, "I5: a dead client's bundles were kept"

    def _usable(self) -> Iterator[tuple[int, Lease, str]]:
        """Every grant that the client may use now or when it has read its queue."""
        for serial, hold in self.holds.items():
            yield serial, hold.lease, hold.use
        for serial, grant in self.unused.items():
            yield serial, Lease(grant, grant.mode), "unused"
        for message in self.down:
            if isinstance(message, Grant) and not self.stale(message):
                yield message.serial, Lease(message, message.mode), "on its way"

    def stale(self, grant: Grant) -> bool:
        """Whether the client must not use it: it was pushed, and its epoch or its bundle has ended."""
        gone = grant.mode != Mode.CREATE and grant.bundle not in self.newest
        return not grant.answers and (grant.epoch < self.epochs[grant.lane] or gone)

    def lease(self, thread: str, lease: Lease) -> None:
        grant = lease.grant
        self.holds[grant.serial] = Hold(thread, lease, may_write=grant.mode.writes)
        newest = self.newest.setdefault(grant.bundle, 0)
        assert grant.version == newest, f"version: {grant} becomes a lease, the newest version is {newest}"
        self.frames.setdefault(grant.bundle, sum(n for _, n in grant.runs))

    def _check_grant(self, serial: int, lease: Lease, use: str) -> None:
        grant = lease.grant
        pin, record = self.ledger.pins.granted.get(serial), self.ledger.bundles.get(grant.bundle)
        # I1: what the client may use, the daemon holds in place.
        assert pin is not None and pin.bundle == grant.bundle, f"I1: {grant} ({use}) is free for the daemon"
        assert record is not None and record.runs == grant.runs, f"I1: {grant} ({use}) lies elsewhere: {record}"
        assert record.state in (*RESIDENT, State.BLANK), f"I1: {grant} ({use}) but the bundle is {record.state}"
        # I2: nobody may write while a copy to flash is made.
        assert not (lease.mode.writes and record.state == State.WRITING), f"I2: {grant} ({use}) during its write-back"
        # I3: a reading lease sees the newest committed version.
        if use == "reading" or (use != "writing" and lease.mode != Mode.CREATE and not self.writing(grant.bundle)):
            seen, newest = set(self.content(grant.runs)), (grant.bundle, self.newest[grant.bundle])
            assert seen == {newest} or not newest[1], f"I3: {grant} ({use}) sees {seen}, newest is {newest}"

    def _check_pins(self) -> None:
        """I1 and I2, the other side: the daemon believes in a grant, and in its right to write, only where the client
        has them, or where the daemon will hear that they have ended.
        """
        if not self.alive:
            return
        known = {grant.serial: grant.mode.writes for grant in self.unused.values()}
        known |= {message.serial: message.mode.writes for message in self.down if isinstance(message, Grant)}
        known |= {serial: hold.may_write for serial, hold in self.holds.items()}
        ended, void, gone = set(), set(), set()
        for message in self.up:
            match message:
                case Commit(updated, consumed):
                    ended |= {row[0] for row in (*updated, *consumed)}
                    gone |= {bundle for _, bundle in consumed}
                case Done(serials):
                    ended |= set(serials)
                case Discard(bundles):
                    gone |= set(bundles)
                case Supersede(pairs):
                    gone |= {old for old, _ in pairs}
                case Demand(lane) | Void(lane):
                    void.add(lane)
        for serial, pin in self.ledger.pins.granted.items():
            if serial in ended or (pin.pushed and (pin.lane in void or pin.bundle in gone)):
                continue
            assert serial in known, f"I1: grant {serial} of bundle {pin.bundle} is held for nobody"
            assert known[serial] or not pin.mode.writes, f"I2: the write right of grant {serial} outlives its commit"

    def check_rest(self) -> None:
        """I7: queues and mover have come to rest: no demand is open, and no unused grant holds up a shrink."""
        assert not self.waiters, f"I7: stuck with open demands: {list(self.waiters.values())}"
        for lane in self.ledger.lanes.values():
            held = {h.lease.grant.bundle for h in self.holds.values() if h.lease.grant.lane == lane.name}
            leased = sum(self.frames[b] for b in held)
            assert lane.target_frames is None or leased > lane.target_frames, f"I7: stuck with a shrink: {lane}"

    def _check_kept(self, bundle: int, version: int) -> None:
        """I4: the newest committed version is in DRAM or flash, or somebody is writing over it under a grant."""
        record = self.ledger.bundles.get(bundle)
        in_dram = record is not None and record.runs and set(self.content(record.runs)) == {(bundle, version)}
        in_flash = self.flash.get(bundle) == (bundle, version)
        assert in_dram or in_flash or self.writing(bundle), (
            f"I4: version {version} of bundle {bundle} is lost: {record}"
        )

    def _check_order(self, bundle: int) -> None:
        """I6, the other side: while a demand lacks frames nothing takes any that nobody has asked for."""
        bundles = [waiting.bundle for waiting in self.ledger.pins.open]
        lacking = [b for b in bundles if self.ledger.bundles[b].state in (State.FLASH, State.ABSENT)]
        assert bundle in bundles or not lacking, f"I6: frames go to bundle {bundle}, while {lacking} are demanded"

    def _check_refusal(self, refuse: Refuse) -> None:
        """I6: within the floor only a failed transfer, or a new bundle that flash cannot take, is refused."""
        if self.failing and refuse.code == Code.IO_ERROR:
            return
        if refuse.code == Code.TIER_FULL:
            asked = (refuse.lane, refuse.answers)
            [demand] = [w.demand for w in self.waiters.values() if (w.demand.lane, w.demand.epoch) == asked]
            frames = self.config.forms[demand.target - 1] if demand.mode == Mode.CREATE else 0
            live = sum(r.frames for r in self.ledger.bundles.values())
            short = live + frames + max(self.config.forms) > self.config.flash_quota_frames
            assert demand.mode == Mode.CREATE and short, f"I6: {refuse} though flash has room"
            return
        allowed = refuse.code == Code.WORKING_SET_TOO_LARGE and not self.config.within_floor
        assert allowed, f"I6: {refuse} within the floor"

    def content(self, runs: Iterable[Run]) -> tuple[Content, ...]:
        return tuple(self.memory[i] for first, n in runs for i in range(first, first + n))

    def fill_frames(self, runs: Iterable[Run], content: Content) -> None:
        for first, n in runs:
            self.memory[first : first + n] = [content] * n

    def writing(self, bundle: int) -> bool:
        return any(h.lease.grant.bundle == bundle and h.use == "writing" for h in self.holds.values())
