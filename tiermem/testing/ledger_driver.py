"""A ledger with its client and its mover, for tests of single rules. Frames of one byte: sizes are frames."""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Iterable

from tiermem.allocator import FrameAllocator
from tiermem.bundle import BundleSpec, Kind, Mode
from tiermem.errors import ProtocolError, TiermemError
from tiermem.grants.effects import Effect, Expedite, FreeFlash, Load, Send, WriteBack
from tiermem.grants.foresight import Use
from tiermem.grants.ledger import GrantLedger
from tiermem.grants.messages import (
    ClientBody,
    Commit,
    DaemonBody,
    Demand,
    Done,
    Grant,
    Refuse,
    Surrender,
    Used,
    Void,
)
from tiermem.placement.lru import LeastRecentlyUsed
from tiermem.plan import Access
from tiermem.residency import State

READ, UPDATE, CREATE, CONSUME = Mode.READ, Mode.UPDATE, Mode.CREATE, Mode.CONSUME
ONE, TWO, THREE = 1, 2, 3  # forms, named by their frames


class Foreseen:
    """A foresight that the test writes: uses by lane. Remembers what it was told."""

    def __init__(self) -> None:
        self.uses: dict[str, list[Use]] = {}
        self.told: list[tuple[object, ...]] = []

    def accessed(self, lane: str, access: Access) -> bool:
        self.told.append((lane, access))
        return True

    def used(self, lane: str, spec: BundleSpec, mode: Mode) -> None:
        self.told.append((lane, spec.spec_id, mode))

    def upcoming(self, lane: str) -> Iterable[Use]:
        return self.uses.get(lane, [])


class Ledger:
    """A ledger, its client, and a mover that ends transfers when told to."""

    def __init__(self, frames: int = 4, quota: int = 100, spare: int = 3, ahead: int = 0) -> None:
        ids = itertools.count(100)
        self.frames = FrameAllocator(frames)
        self.foresight = Foreseen()
        self.machine = GrantLedger(
            self.frames,
            1,
            int,
            quota,
            spare,
            LeastRecentlyUsed(),
            lambda: next(ids),
            foresight=self.foresight,
            ahead_frames=ahead,
        )
        self.machine.declare([BundleSpec(n, Kind.PARAM, f"layers.{n}", n) for n in (ONE, TWO, THREE)])
        self.machine.admit("main", [])
        self.epochs = {"main": 0}
        self.sent: list[DaemonBody] = []
        self.sends: list[Send] = []
        self.loads: list[int] = []
        self.writes: list[int] = []
        self.freed: list[int] = []
        self.hastened: list[int] = []

    def act(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send(message):
                    self.sends.append(effect)
                    self.sent.append(message)
                case Load(bundle):
                    self.loads.append(bundle)
                case WriteBack(bundle):
                    self.writes.append(bundle)
                case Expedite(bundle):
                    assert bundle in self.loads or bundle in self.writes, "a transfer that is not under way"
                    self.hastened.append(bundle)
                case FreeFlash(bundle):
                    self.freed.append(bundle)
        self.machine.check_invariants()

    def receive(self, message: ClientBody) -> None:
        self.act(self.machine.receive(message))

    @property
    def epoch(self) -> int:
        return self.epochs["main"]

    def demand(self, target: int, mode: Mode = READ, held: Iterable[int] = (), lane: str = "main") -> int:
        """Returns the epoch, which the answer will name."""
        epoch = self.epochs[lane] = self.epochs.get(lane, 0) + 1
        self.receive(Demand(lane, epoch, frozenset(held), target, mode))
        return epoch

    def void(self, held: Iterable[int] = (), lane: str = "main") -> None:
        self.epochs[lane] = self.epochs.get(lane, 0) + 1
        self.receive(Void(lane, self.epochs[lane], frozenset(held)))

    def foresee(self, *uses: tuple[int, Mode] | Use, lane: str = "main") -> list[Grant]:
        """From now on the lane's next uses are these. Returns what is pushed at once."""
        self.foresight.uses[lane] = [use if isinstance(use, Use) else Use(*use) for use in uses]
        before = len(self.sent)
        self.receive(Used(()))
        return [m for m in self.sent[before:] if isinstance(m, Grant) and not m.answers]

    @property
    def pushed(self) -> list[Grant]:
        """Every grant that was sent ahead of its use, oldest first."""
        return [m for m in self.sent if isinstance(m, Grant) and not m.answers]

    @property
    def surrenders(self) -> list[str]:
        return [m.lane for m in self.sent if isinstance(m, Surrender)]

    def answer(self, epoch: int, lane: str = "main") -> Grant | Refuse | None:
        answers = [m for m in self.sent if isinstance(m, Grant | Refuse)]
        found = [m for m in answers if (m.lane, m.answers) == (lane, epoch)]
        assert len(found) < 2
        return found[0] if found else None

    def granted(self, epoch: int, lane: str = "main") -> Grant:
        answer = self.answer(epoch, lane)
        assert isinstance(answer, Grant), answer
        return answer

    def refused(self, epoch: int) -> Refuse:
        answer = self.answer(epoch)
        assert isinstance(answer, Refuse), answer
        return answer

    def lease(self, target: int, mode: Mode = READ) -> Grant:
        """Of what is granted at once."""
        return self.granted(self.demand(target, mode))

    def commit(self, grant: Grant, version: int | None = None) -> None:
        self.receive(Commit(((grant.serial, grant.bundle, version or grant.version + 1),)))

    def done(self, *grants: Grant) -> None:
        self.receive(Done(tuple(grant.serial for grant in grants)))

    def make(self, form: int) -> int:
        """A dirty bundle in DRAM that nobody uses."""
        return self.use(form, CREATE)

    def use(self, target: int, mode: Mode) -> int:
        """Demand, wait for whatever it takes, commit, and release. Returns the bundle."""
        epoch = self.demand(target, mode)
        self.end_transfers()
        grant = self.granted(epoch)
        self.commit(grant)
        self.done(grant)
        return grant.bundle

    def end_transfers(self) -> None:
        while self.writes or self.loads:
            if self.writes:
                self.written(self.writes[0])
            else:
                self.loaded(self.loads[0])

    def make_in_flash(self, form: int) -> int:
        """A bundle that is only in flash: everything else is evicted as well."""
        bundle = self.make(form)
        # All of the arena is demanded, which evicts everything, and given back unwritten.
        epochs = [self.demand(ONE, CREATE) for _ in range(self.frames.frames)]
        self.end_transfers()
        for epoch in epochs:
            self.done(self.granted(epoch))
        self.hastened.clear()
        assert self.state(bundle) == State.FLASH
        return bundle

    def load_failed(self, bundle: int, error: TiermemError) -> None:
        self.loads.remove(bundle)
        self.act(self.machine.load_failed(bundle, error))

    def write_failed(self, bundle: int, error: TiermemError) -> None:
        self.writes.remove(bundle)
        self.act(self.machine.write_failed(bundle, error))

    def loaded(self, bundle: int) -> None:
        self.loads.remove(bundle)
        self.act(self.machine.loaded(bundle))

    def written(self, bundle: int) -> None:
        self.writes.remove(bundle)
        self.act(self.machine.written(bundle))

    def state(self, bundle: int) -> State:
        return self.machine.bundles[bundle].state

    def refuses(self, message: ClientBody, match: str) -> None:
        """The message is refused and nothing is changed by it."""
        before = self.everything()
        said = "nothing"
        try:
            self.machine.receive(message)
        except ProtocolError as error:
            said = str(error)
        assert re.search(match, said), f"{message} was refused with {said}, not with {match!r}"
        assert self.everything() == before
        self.machine.check_invariants()

    def everything(self) -> object:
        m = self.machine
        return copy.deepcopy(
            (m.bundles, m.lanes, m.pins, m.specs, m.evictions, m.refusals, m.hits, m.misses, m.creates, m.commits)
        )


def writing_back() -> tuple[Ledger, int, int]:
    """A ledger in the middle of a write-back, which a demand for a new bundle waits for: (ledger, bundle, epoch)."""
    ledger = Ledger(frames=4)
    bundle = ledger.make(THREE)
    epoch = ledger.demand(TWO, CREATE)
    assert (ledger.state(bundle), ledger.writes) == (State.WRITING, [bundle])
    return ledger, bundle, epoch
