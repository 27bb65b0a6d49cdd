"""A hostile world around the two ends of the grant protocol: what may happen, and what happens then.

GrantTable and GrantLedger are joined by two queues of arbitrary delay; a mover ends transfers in any order, or fails
them; what the daemon foresees may be wrong in any way, and another thing at every step; threads of two lanes do
anything legal; lanes shrink; the client may die at any point. Everything is a value of this process: no
thread, clock, file or torch. `tiermem.testing.grants_explorer` visits every state of a small world.
"""

from __future__ import annotations

import itertools
import pickle
from collections import deque
from collections.abc import Callable, Iterator

from tiermem.bundle import Mode
from tiermem.errors import TierIOError
from tiermem.grants.effects import Effect, Expedite, FreeFlash, Load, Send, WriteBack
from tiermem.grants.ledger import GrantLedger
from tiermem.grants.messages import DaemonBody, Demand, Grant, Refuse, Void
from tiermem.grants.table import GrantTable, Lease
from tiermem.residency import State
from tiermem.stats import Link
from tiermem.testing.grants_world_state import MAIN, Action, Config, Exit, Hold, Moving, WorldState


class World(WorldState):
    """One state that goes on. `actions` says what may happen, `apply` does it; not thread-safe, picklable."""

    def __init__(
        self,
        config: Config,
        table: Callable[[list[str]], GrantTable] = GrantTable,
        ledger: Callable[..., GrantLedger] = GrantLedger,
    ) -> None:
        super().__init__(config, table, ledger)
        self._fill()

    def _fill(self) -> None:
        """Create what exists at the start, as any client would; some of it ends up in flash."""
        thread = self.config.threads[0][0]
        for form in self.config.kept:
            self.apply(("acquire", thread, form, Mode.CREATE))
            self.drain(lambda actions: actions[0])
            [serial] = self.holds
            for action in (("write", serial), ("commit", thread), ("release", serial)):
                self.apply(action)
        self.drain(lambda actions: actions[0])
        self.commits, self.creates = self.config.commits, self.config.creates

    def clone(self) -> bytes:
        """For `pickle.loads`."""
        return pickle.dumps(self, 5)

    # -- what may happen

    def actions(self) -> Iterator[Action]:
        """Everything that may happen next, whether it must or not."""
        orders = (False, True) if self.config.either_order else (False,)
        ways = [(order, i) for i in range(len(self.config.predictions)) for order in orders]
        if self.up:
            yield from (("daemon_reads", *way) for way in ways)
        if self.down:
            yield ("client_reads",)
        for bundle in self.moving:
            yield from (("transfer_ends", bundle, *way) for way in ways)
            if self.faults:
                yield from (("transfer_fails", bundle, *way) for way in ways)
        if not self.alive:
            return
        if self.shrinks:
            lane = self.ledger.lanes[MAIN]
            for target in range(lane.floor_frames, lane.budget_frames):
                yield from (("shrink", target, *way) for way in ways)
        for serial, hold in self.holds.items():
            if hold.use == "idle" and self._compatible(serial, hold):
                yield ("write" if hold.lease.mode.writes else "read", serial)
            if hold.use != "writing":
                yield ("release", serial)
        for thread, most in self.config.threads:
            yield from self._thread_actions(thread, most)
        if self.discards:
            yield from (("discard", b) for b in self._at_rest())
        if self.supersedes:
            pairs = itertools.permutations(self._at_rest(), 2)
            yield from (("supersede", old, new) for old, new in pairs if self.frames[old] == self.frames[new])
        if self.deaths:
            yield from (("die", arrived) for arrived in range(len(self.up) + 1))

    def _thread_actions(self, thread: str, most: int) -> Iterator[Action]:
        mine = [hold for hold in self.holds.values() if hold.thread == thread]
        if self.commits and any(_owes_commit(hold) for hold in mine):
            yield ("commit", thread)
        if len(mine) > 1 and all(hold.use != "writing" for hold in mine):
            yield ("release all", thread)
        if thread in self.waiters:
            return
        held = {hold.lease.grant.bundle for hold in mine}
        used = sum(self.frames[b] for b in held)
        if self.creates:
            for form, frames in enumerate(self.config.forms, 1):
                if used + frames <= most:
                    yield ("acquire", thread, form, Mode.CREATE)
        yield from self._sets(thread, most - used, held)
        for bundle, version in self.newest.items():
            modes = [hold.lease.mode for hold in mine if hold.lease.grant.bundle == bundle]
            if not version or used + (bundle not in held) * self.frames[bundle] > most:
                continue
            for mode in self.config.modes:
                if modes and not (mode == Mode.UPDATE and modes == [Mode.READ]):
                    continue  # an upgrade, or nothing twice
                if (mode == Mode.CONSUME and self._busy(bundle)) or self._busy(bundle, Mode.CONSUME):
                    continue
                yield ("acquire", thread, bundle, mode)

    def _sets(self, thread: str, room: int, held: set[int]) -> Iterator[Action]:
        """Two bundles that have been granted ahead, taken at one go."""
        granted = sorted({grant.bundle for grant in self.unused.values() if grant.mode != Mode.CREATE} - held)
        for one, other in itertools.combinations(granted, 2):
            if self.frames[one] + self.frames[other] <= room and not any(
                self._busy(b, Mode.CONSUME) for b in (one, other)
            ):
                yield ("take", thread, one, other)

    def must(self, action: Action) -> bool:
        """Whether it happens by itself, without a thread of the client."""
        return action[0] in ("daemon_reads", "client_reads", "transfer_ends", "transfer_fails")

    def foresees(self, action: Action, prediction: int) -> bool:
        """Whether it may happen while that is foreseen. What is foreseen changes only when the client does something:
        by itself all goes on with one prediction.
        """
        return action[0] == "client_reads" or action[-1] == prediction

    def _compatible(self, serial: int, hold: Hold) -> bool:
        others = [
            other.use
            for s, other in self.holds.items()
            if s != serial and other.lease.grant.bundle == hold.lease.grant.bundle and other.use != "idle"
        ]
        return not others or (not hold.lease.mode.writes and "writing" not in others)

    def _at_rest(self) -> list[int]:
        """Bundles that hold bytes and that no thread has to do with."""
        return [b for b in self.newest if self.newest[b] and not self._busy(b)]

    def _busy(self, bundle: int, mode: Mode | None = None) -> bool:
        """Leased or asked for, in `mode` or in any."""
        modes = [h.lease.mode for h in self.holds.values() if h.lease.grant.bundle == bundle]
        demands = (w.demand for w in self.waiters.values())
        modes += [d.mode for d in demands if d.mode != Mode.CREATE and d.target == bundle]
        return bool(modes) if mode is None else mode in modes

    # -- what happens

    def apply(self, action: Action) -> None:
        """Do it and check. Raises AssertionError, or what a machine raises that its peer drove into a corner."""
        match action:
            case ("daemon_reads" | "transfer_ends" | "transfer_fails" | "shrink" as step, *what, bool(order), int(i)):
                self.placement.reverse, self.oracle.prediction = order, self.config.predictions[i]
                self._daemon_step(step, *what)
                self.oracle.prediction = ()
            case ("client_reads",):
                self._client_reads(self.down.popleft())
            case ("acquire", str(thread), int(target), Mode() as mode):
                self.creates -= mode == Mode.CREATE
                self._acquire(thread, target, mode)
            case ("take", str(thread), int(one), int(other)):
                self._take(thread, [one, other])
            case ("read" | "write" as use, int(serial)):
                hold = self.holds[serial]
                hold.use = "reading" if use == "read" else "writing"
                if use == "write":
                    self.fill_frames(hold.lease.grant.runs, None)
            case ("release", int(serial)):
                self._release([serial])
            case ("release all", str(thread)):
                self._release([serial for serial, hold in self.holds.items() if hold.thread == thread])
            case ("commit", str(thread)):
                self._commit({s: h for s, h in self.holds.items() if h.thread == thread and _owes_commit(h)})
            case ("discard", int(bundle)):
                self.discards -= 1
                self.table.discard([bundle])
                self._end(bundle)
            case ("supersede", int(old), int(new)):
                self.supersedes -= 1
                self.table.supersede([(old, new)])
                self._end(old)
            case ("die", int(arrived)):
                self.deaths -= 1
                self.alive = False
                self.up = deque([*list(self.up)[:arrived], Exit()])
                self.down.clear()
                self.holds.clear()
                self.unused.clear()
                self.waiters.clear()
            case _:
                raise ValueError(f"no such action: {action}")
        self._send()
        for record in self.ledger.bundles.values():
            record.history.clear()  # for people; makes states larger and no different
        self.check()

    def _send(self) -> None:
        for message in self.table.outbox:
            if isinstance(message, Demand | Void):
                # What is not held, the daemon may take back: every delivered answer must be there, whoever's.
                held = {s for s, hold in self.holds.items() if hold.lease.grant.lane == message.lane}
                assert message.held == held, f"held: {message}, but the lane's leases are {held}"
                self.epochs[message.lane] = message.epoch
                self.unused = {s: grant for s, grant in self.unused.items() if grant.lane != message.lane}
            self.up.append(message)
        self.table.outbox.clear()

    def _end(self, bundle: int) -> None:
        del self.newest[bundle]
        self.unused = {serial: grant for serial, grant in self.unused.items() if grant.bundle != bundle}

    def _acquire(self, thread: str, target: int, mode: Mode) -> None:
        """As the client does it: by a grant that is there, else on demand."""
        lane = self.config.lane(thread)
        sufficient = {serial for serial, grant in self.unused.items() if _suffices(grant, lane, target, mode)}
        [lease] = self.table.take(lane, [target], mode)
        if lease is None:
            assert not sufficient, f"unused: grants {sufficient} were there for {mode.name} of {target}"
            self.waiters[thread] = self.table.demand(lane, target, mode)
            return
        assert lease.grant.serial in sufficient, f"unused: {lease.grant} is void, and was used"
        del self.unused[lease.grant.serial]
        self._begin(thread, lease)

    def _take(self, thread: str, bundles: list[int]) -> None:
        """For reading, which any grant of a bundle allows: there is one for each of the lane, or for some of them."""
        lane = self.config.lane(thread)
        for bundle, lease in zip(bundles, self.table.take(lane, bundles, Mode.READ), strict=True):
            sufficient = {s for s, grant in self.unused.items() if _suffices(grant, lane, bundle, Mode.READ)}
            if lease is None:
                assert not sufficient, f"unused: grants {sufficient} were there for bundle {bundle}"
                continue
            assert lease.grant.serial in sufficient, f"unused: {lease.grant} is void, and was used"
            del self.unused[lease.grant.serial]
            self._begin(thread, lease)

    def _begin(self, thread: str, lease: Lease) -> None:
        self.lease(thread, lease)
        hold = self.holds[lease.grant.serial]
        if not lease.mode.writes and self._compatible(lease.grant.serial, hold):
            hold.use = "reading"

    def _client_reads(self, message: DaemonBody) -> None:
        if isinstance(message, Grant) and not message.answers and not self.stale(message):
            self.unused[message.serial] = message
        ended = self.table.receive(message)
        for thread in [t for t, waiter in self.waiters.items() if waiter is ended]:
            lease = self.waiters.pop(thread).lease
            if lease is not None:
                self._begin(thread, lease)

    def _commit(self, owed: dict[int, Hold]) -> None:
        updated, consumed = [], []
        for serial, hold in owed.items():
            bundle = hold.lease.grant.bundle
            if hold.use == "writing":
                self.newest[bundle] += 1
                self.fill_frames(hold.lease.grant.runs, (bundle, self.newest[bundle]))
                updated.append((serial, self.newest[bundle]))
                hold.use, hold.may_write = "reading", False
                self.commits -= 1
            else:
                consumed.append(serial)
                del self.holds[serial]
                self._end(bundle)
        self.table.commit(updated, consumed)

    def _release(self, serials: list[int]) -> None:
        bundles = [self.holds.pop(serial).lease.grant.bundle for serial in serials]
        self.table.done(*serials)
        for bundle in bundles:
            if self.newest.get(bundle) == 0:
                self._end(bundle)  # created and never written

    def _daemon_step(self, step: str, *what: object) -> None:
        match step, *what:
            case ("daemon_reads",):
                message = self.up.popleft()
                self._act(self.ledger.exit() if isinstance(message, Exit) else self.ledger.receive(message))
            case ("transfer_ends", int(bundle)):
                self._transfer_ends(bundle)
            case ("transfer_fails", int(bundle)):
                self._transfer_fails(bundle)
            case ("shrink", int(target)):
                self.shrinks -= 1
                self._act(self.ledger.shrink(MAIN, target))

    def _act(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send(message):
                    if isinstance(message, Grant) and not message.answers and message.mode == Mode.CREATE:
                        self._check_order(message.bundle)
                    if self.alive:
                        self.down.append(message)
                        if isinstance(message, Refuse):
                            self._check_refusal(message)
                case Load(bundle) | WriteBack(bundle):
                    assert bundle not in self.moving, f"I5: two transfers of bundle {bundle} at once"
                    record = self.ledger.bundles[bundle]
                    if isinstance(effect, Load):
                        self.fill_frames(record.runs, None)
                        moving = Moving(Link.FLASH_TO_DRAM, record.runs, (self.flash.get(bundle),))
                    else:
                        moving = Moving(Link.DRAM_TO_FLASH, record.runs, self.content(record.runs))
                    self.moving[bundle] = moving
                    if isinstance(effect, Load):
                        self._check_order(bundle)
                case Expedite(bundle):
                    assert bundle in self.moving, f"a transfer of bundle {bundle} is to be hastened, there is none"
                case FreeFlash(bundle):
                    assert bundle not in self.moving, f"I5: flash of bundle {bundle} is freed under a transfer"
                    self.flash.pop(bundle, None)

    def _transfer_ends(self, bundle: int) -> None:
        moving = self.moving.pop(bundle)
        doomed = self.ledger.bundles[bundle].state == State.DOOMED
        if moving.link == Link.FLASH_TO_DRAM:
            if not doomed:
                self.fill_frames(moving.runs, moving.source[0])
            self._act(self.ledger.loaded(bundle))
            return
        if not doomed:
            now = set(self.content(moving.runs)) | set(moving.source)
            self.flash[bundle] = now.pop() if len(now) == 1 else None  # torn where somebody wrote meanwhile
        self._act(self.ledger.written(bundle))

    def _transfer_fails(self, bundle: int) -> None:
        self.faults -= self.faults > 0
        moving = self.moving.pop(bundle)
        error = TierIOError(5, "scripted")
        self.failing = True
        failed = self.ledger.load_failed if moving.link == Link.FLASH_TO_DRAM else self.ledger.write_failed
        self._act(failed(bundle, error))
        self.failing = False

    def drain(self, choose: Callable[[list[Action]], Action], prediction: int = 0) -> int:
        """I7: queues and mover alone come to rest, with no demand left open. Returns the number of steps."""
        for steps in range(10_000):
            actions = [a for a in self.actions() if self.must(a) and self.foresees(a, prediction)]
            if not actions:
                self.check_rest()
                return steps
            self.apply(choose(actions))
        raise AssertionError("I7: queues and mover do not come to rest")


def _owes_commit(hold: Hold) -> bool:
    return hold.use == "writing" or (hold.use == "reading" and hold.lease.mode == Mode.CONSUME)


def _suffices(grant: Grant, lane: str, target: int, mode: Mode) -> bool:
    if mode == Mode.CREATE or grant.mode == Mode.CREATE:
        fits = mode == grant.mode and grant.spec == target
    else:
        fits = grant.mode.covers(mode) and grant.bundle == target
    return fits and grant.lane == lane
