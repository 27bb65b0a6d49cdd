"""Both machines, the prediction and the placement together: a step that is predicted asks for nothing, as long as the
disk keeps up. Transfers end here as soon as they are begun; what is left to wait for would be round trips.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from tiermem.allocator import FrameAllocator
from tiermem.bundle import BundleSpec, Kind, Mode
from tiermem.grants.effects import Effect, Load, Send, WriteBack
from tiermem.grants.ledger import GrantLedger
from tiermem.grants.table import GrantTable, Lease
from tiermem.lookahead import Lookahead
from tiermem.placement.belady import Belady
from tiermem.plan import Access, Phase
from tiermem.stats import PredictionOutcome
from tiermem.testing.fakes import FakeClock

LANE = "main"
UNITS = 12
PARAM, GRAD, OPTIM = 2, 2, 4  # frames of a unit's bundles
STATE = UNITS * (PARAM + GRAD + OPTIM)


class Trainer:
    """A client that trains `UNITS` blocks with a barrier update, and a daemon whose mover takes no time."""

    def __init__(self, arena: int, share: float = 0.5) -> None:
        ids = itertools.count(1)
        self.lookahead = Lookahead(FakeClock().now_s)
        self.ledger = GrantLedger(
            FrameAllocator(arena),
            1,
            int,
            10 * STATE,
            OPTIM,
            Belady(self._next_use),
            lambda: next(ids),
            foresight=self.lookahead,
            ahead_frames=int(share * arena),
        )
        sizes = ((Kind.PARAM, PARAM), (Kind.GRAD, GRAD), (Kind.OPTIM, OPTIM))
        self.specs = {(unit, kind): 3 * unit + i for unit in range(UNITS) for i, (kind, _) in enumerate(sizes, 1)}
        self.ledger.declare([BundleSpec(self.specs[u, k], k, f"u{u}", n) for u in range(UNITS) for k, n in sizes])
        self.ledger.admit(LANE, [1, 2, 3])
        self.table = GrantTable([LANE])
        self.bundles: dict[int, int] = {}  # live ones by form
        self.versions: dict[int, int] = {}
        self.demands = self.loads = 0
        for unit in range(UNITS):
            with self.using(unit, Kind.PARAM, Mode.CREATE), self.using(unit, Kind.OPTIM, Mode.CREATE):
                pass

    def _next_use(self, bundle: int) -> int | None:
        return self.lookahead.next_use(self.ledger.bundles[bundle].spec.spec_id)

    def talk(self) -> None:
        """Messages and transfers, to the end."""
        while self.table.outbox:
            self.act(self.ledger.receive(self.table.outbox.popleft()))

    def act(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send(message):
                    self.table.receive(message)
                case Load(bundle):
                    self.loads += 1
                    self.act(self.ledger.loaded(bundle))
                case WriteBack(bundle):
                    self.act(self.ledger.written(bundle))
        self.ledger.check_invariants()

    def lease(self, form: int, mode: Mode) -> Lease:
        create = mode == Mode.CREATE
        target = form if create else self.bundles[form]
        [lease] = self.table.take(LANE, [target], mode)
        if lease is None:
            self.demands += 1
            waiter = self.table.demand(LANE, target, mode)
            self.talk()
            assert waiter.lease is not None, waiter.error
            lease = waiter.lease
        self.talk()
        self.bundles[form] = lease.grant.bundle
        return lease

    @contextmanager
    def using(self, unit: int, kind: Kind, mode: Mode) -> Iterator[None]:
        form = self.specs[unit, kind]
        lease = self.lease(form, mode)
        yield
        if mode.writes:
            self.versions[form] = self.versions.get(form, 0) + 1
            self.table.commit([(lease.grant.serial, self.versions[form])])
        self.table.done(lease.grant.serial)
        self.talk()

    def access(self, unit: int, phase: Phase, training: bool = True) -> None:
        self.table.accessed(LANE, Access(f"u{unit}", phase, training))
        self.talk()

    # -- what a loop does

    def forward(self, training: bool = True) -> None:
        for unit in range(UNITS):
            self.access(unit, Phase.FORWARD, training)
            with self.using(unit, Kind.PARAM, Mode.READ):
                pass

    def backward(self) -> None:
        for unit in reversed(range(UNITS)):
            self.access(unit, Phase.BACKWARD)
            stored = self.specs[unit, Kind.GRAD] in self.bundles
            with self.using(unit, Kind.PARAM, Mode.READ):
                with self.using(unit, Kind.GRAD, Mode.UPDATE if stored else Mode.CREATE):
                    pass

    def update(self) -> None:
        for unit in range(UNITS):
            self.access(unit, Phase.UPDATE)
            with self.using(unit, Kind.PARAM, Mode.UPDATE), self.using(unit, Kind.GRAD, Mode.UPDATE):
                with self.using(unit, Kind.OPTIM, Mode.UPDATE):
                    pass
        for unit in range(UNITS):
            form = self.specs[unit, Kind.GRAD]
            self.table.discard([self.bundles.pop(form)])
            del self.versions[form]
            self.talk()


def plain(trainer: Trainer, step: int) -> None:
    trainer.forward()
    trainer.backward()
    trainer.update()


def accumulating(trainer: Trainer, step: int) -> None:
    for _ in range(3):
        trainer.forward()
        trainer.backward()
    trainer.update()


def evaluating(trainer: Trainer, step: int) -> None:
    plain(trainer, step)
    for _ in range(2):
        trainer.forward(training=False)


@pytest.mark.parametrize("share", [0.25, 0.5])
@pytest.mark.parametrize("loop", [plain, accumulating, evaluating], ids=lambda loop: loop.__name__)
@pytest.mark.parametrize("arena", [STATE // 4, STATE // 2])
def test_a_predicted_step_asks_for_nothing(arena: int, loop: Callable[[Trainer, int], None], share: float) -> None:
    trainer = Trainer(arena, share)
    for step in range(5):
        loop(trainer, step)
    before, wrong, loads = trainer.demands, trainer.lookahead.outcomes()[PredictionOutcome.WRONG], trainer.loads
    for step in range(5, 8):
        loop(trainer, step)
    assert trainer.lookahead.outcomes()[PredictionOutcome.WRONG] == wrong
    assert trainer.loads > loads, "everything stayed: the case shows nothing"
    assert trainer.demands == before


def test_the_first_step_is_served_on_demand() -> None:
    trainer = Trainer(STATE // 4)
    before = trainer.demands
    trainer.forward()
    assert trainer.demands == before + UNITS
    assert trainer.table.counts.received == 0


def test_without_lookahead_every_use_is_a_demand() -> None:
    trainer = Trainer(STATE // 4, share=0.0)
    for step in range(4):
        plain(trainer, step)
    before = trainer.demands
    plain(trainer, 4)
    assert trainer.demands == before + UNITS * 6
