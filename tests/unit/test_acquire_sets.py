"""Bundles that are acquired together: what was granted ahead of them is used by one message, and only then the rest is
demanded; they end by one message too. An error leaves nothing leased.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tiermem.bundle import BundleSpec, Kind, Mode
from tiermem.errors import ResourceExhausted, TierFull
from tiermem.grants.messages import ClientBody, Commit, Demand, Done, Grant, Used
from tiermem.grants.table import GrantTable, Lease
from tiermem.trace import TraceRing
from tiermem_client.address_space import Range
from tiermem_client.memory import Bundle
from tiermem_client.residency import Residency

READ, UPDATE, CREATE = Mode.READ, Mode.UPDATE, Mode.CREATE


class FakeSession:
    """A session whose daemon grants every demand at once, but those of bundles in `refused`."""

    def __init__(self) -> None:
        self.lock = threading.Condition(threading.RLock())
        self.table = GrantTable(["main"])
        self.refused: set[int] = set()
        self.alive, self.stall_s, self.trace = True, 0.0, TraceRing()
        self.opened = SimpleNamespace(frame_bytes=1)
        self.address_space = SimpleNamespace(moved=(0, 0.0))
        self._serial = 100

    def check_usable(self) -> None:
        pass

    def push(self, bundle: int, mode: Mode) -> None:
        self.table.receive(self.grant(bundle, mode, 0))

    def grant(self, target: int, mode: Mode, answers: int) -> Grant:
        self._serial += 1
        spec = target if mode is CREATE else target - 50
        return Grant(self._serial, "main", 0, spec, spec + 50, mode, int(mode is not CREATE), ((spec, 1),), answers)

    def take(self, targets: Sequence[int], mode: Mode) -> list[Lease | None]:
        return self.table.take("main", targets, mode)

    def demand(self, target: int, mode: Mode, what: object) -> Lease:
        waiter = self.table.demand("main", target, mode)
        if target in self.refused:
            self.table.fail(TierFull("scripted"))
            raise TierFull("scripted")
        self.table.receive(self.grant(target, mode, waiter.demand.epoch))
        assert waiter.lease is not None
        return waiter.lease

    def commit(self, updated: Sequence[tuple[int, int]]) -> None:
        self.table.commit(updated)

    def done(self, serials: Iterable[int]) -> None:
        self.table.done(*serials)

    def said(self) -> list[ClientBody]:
        said = list(self.table.outbox)
        self.table.outbox.clear()
        return said


class FakeMemory:
    keeps_copies = False

    def __init__(self) -> None:
        self.here: set[int] = set()
        self.unmappable: set[int] = set()

    def is_here(self, bundle: Bundle) -> bool:
        return False

    def leased(self, bundle: Bundle) -> None:
        if bundle.spec.spec_id in self.unmappable:
            raise ResourceExhausted("scripted")
        self.here.add(bundle.spec.spec_id)

    def ended(self, bundle: Bundle) -> None:
        self.here.remove(bundle.spec.spec_id)

    def entered(self, bundle: Bundle, mode: Mode) -> None:
        pass

    def left(self, bundle: Bundle) -> None:
        pass

    def store(self, bundles: Sequence[Bundle]) -> None:
        pass

    def forget(self, bundle: Bundle) -> None:
        pass


class Trainer:
    """Four bundles, of the forms 1 to 4; those that exist are called 51 to 54."""

    def __init__(self, exist: bool = True) -> None:
        self.session, self.memory = FakeSession(), FakeMemory()
        self.residency = Residency(cast(Any, self.session), cast(Any, self.memory))
        self.residency.budget_frames = -1  # less than is declared: leases end
        self.bundles = [
            Bundle(BundleSpec(n, Kind.PARAM, "unit", 1), Range(n, 4096 * n, 4096), bundle_id=50 + n if exist else None)
            for n in range(1, 5)
        ]
        for n in range(1, 5):
            if exist:
                self.session.table.adopted(50 + n)
                self.bundles[n - 1].version = 1


@pytest.fixture
def trainer() -> Trainer:
    return Trainer()


def test_what_is_granted_is_used_before_the_rest_is_demanded(trainer: Trainer) -> None:
    """The demand for the second would void the grants of the third and the fourth."""
    for bundle in (51, 53, 54):
        trainer.session.push(bundle, READ)
    trainer.residency.acquire(trainer.bundles, READ)
    used, demand = trainer.session.said()
    assert used == Used((101, 102, 103))
    assert isinstance(demand, Demand)
    assert (demand.target, demand.held) == (52, frozenset({101, 102, 103}))
    assert trainer.session.table.counts.voided == 0
    stats = trainer.residency.stats
    assert (stats.local, stats.ahead, stats.demands) == (0, 3, 1)
    assert trainer.memory.here == {1, 2, 3, 4}
    assert [bundle.holders for bundle in trainer.bundles] == [1, 1, 1, 1]


def test_leases_end_together_and_what_was_written_is_committed_before(trainer: Trainer) -> None:
    for bundle in (51, 52, 53):
        trainer.session.push(bundle, UPDATE)
    trainer.residency.acquire(trainer.bundles[:3], UPDATE)
    trainer.session.said()
    for written in trainer.bundles[:2]:
        written.written = True
    trainer.residency.release(trainer.bundles[:3])
    assert trainer.session.said() == [Commit(((101, 51, 2), (102, 52, 2))), Done((101, 102, 103))]
    assert trainer.memory.here == set()


def test_new_bundles_are_made_by_grants_for_their_forms() -> None:
    trainer = Trainer(exist=False)
    for form in (1, 2):
        trainer.session.push(form, CREATE)
    trainer.residency.acquire(trainer.bundles[:2], CREATE)
    assert trainer.session.said() == [Used((101, 102))]
    assert [bundle.bundle_id for bundle in trainer.bundles] == [51, 52, None, None]


def test_an_error_leaves_nothing_leased(trainer: Trainer) -> None:
    for bundle in (51, 54):
        trainer.session.push(bundle, READ)
    trainer.session.refused.add(53)
    with pytest.raises(TierFull):
        trainer.residency.acquire(trainer.bundles, READ)
    ended = [serial for message in trainer.session.said() if isinstance(message, Done) for serial in message.serials]
    assert sorted(ended) == [101, 102, 103], "two grants, and the answer for the second bundle"
    assert trainer.session.table.leases == 0
    assert trainer.memory.here == set()
    assert all(bundle.lease is None and bundle.holders == 0 for bundle in trainer.bundles)


@pytest.mark.parametrize("exist", [True, False])
def test_leases_end_whose_frames_cannot_be_mapped_and_those_behind_them(exist: bool) -> None:
    trainer, mode = Trainer(exist), READ if exist else CREATE
    for n in (1, 2, 3):
        trainer.session.push(50 + n if exist else n, mode)
    trainer.memory.unmappable.add(2)
    with pytest.raises(ResourceExhausted):
        trainer.residency.acquire(trainer.bundles[:3], mode)
    assert trainer.session.table.leases == 0
    assert trainer.memory.here == set()
    assert [bundle.bundle_id for bundle in trainer.bundles[:3]] == ([51, 52, 53] if exist else [None] * 3)


def test_a_bundle_that_is_held_already_costs_no_message(trainer: Trainer) -> None:
    trainer.session.push(51, READ)
    trainer.residency.acquire(trainer.bundles[:1], READ)
    trainer.session.said()
    trainer.residency.acquire(trainer.bundles[:1], READ)
    trainer.residency.release(trainer.bundles[:1])
    assert trainer.session.said() == []
    assert (trainer.residency.stats.local, trainer.bundles[0].holders) == (1, 1)
