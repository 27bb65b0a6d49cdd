"""What a job acquires and frees, recorded from inside its process, for the bound of what it moves."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tiermem.bundle import Mode
from tiermem.plan import BundleUse, Phase
from tiermem.planner.recorded import AccessRecord
from tiermem_client.memory import Bundle
from tiermem_client.residency import Residency

FORWARD, BACKWARD, UPDATE = "forward", "backward", "update"


@dataclass(slots=True)
class Recording:
    """Of the one job of this process. `installed` puts itself around the methods of Residency."""

    record: AccessRecord = field(default_factory=AccessRecord)
    label: str = FORWARD
    phase: Phase = Phase.FORWARD
    inside_step: bool = False
    held: dict[Bundle, int] = field(default_factory=dict)

    @classmethod
    def installed(cls) -> Recording:
        """From now on what this process's jobs do is recorded."""
        recording = cls()
        for name in ("acquire", "release", "discard", "supersede", "accessed"):
            _around(Residency, name, getattr(recording, name))
        return recording

    def step_began(self) -> None:
        """`optimizer.step()` is called."""
        self.inside_step, self.label = True, UPDATE

    def step_ended(self) -> None:
        """What follows belongs to the next forward."""
        self.inside_step, self.label = False, FORWARD
        self.record.step_ended()

    def accessed(self, residency: Residency, unit: str, phase: Phase, training: bool = True) -> None:
        self.phase = phase
        if not self.inside_step and phase is not Phase.UPDATE:
            self.label = FORWARD if phase is Phase.FORWARD else BACKWARD

    def acquire(self, residency: Residency, bundles: Sequence[Bundle], mode: Mode) -> None:
        wanted = dict.fromkeys(bundles)
        uses = [_use(residency, b, Mode.READ) for b in self.held if b not in wanted]
        uses += [_use(residency, b, _mode(b, mode)) for b in wanted]
        self.record.used(self.label, self.phase, uses)
        for bundle in bundles:
            self.held[bundle] = self.held.get(bundle, 0) + 1

    def release(self, residency: Residency, bundles: Iterable[Bundle]) -> None:
        for bundle in bundles:
            self.held[bundle] -= 1
            if not self.held[bundle]:
                del self.held[bundle]

    def discard(self, residency: Residency, bundles: Iterable[Bundle]) -> None:
        for bundle in bundles:
            self.record.freed(bundle.spec.spec_id)

    def supersede(self, residency: Residency, pairs: Sequence[tuple[Bundle, Bundle]]) -> None:
        for old, new in pairs:
            self.record.renamed(old.spec.spec_id, new.spec.spec_id)


def _mode(bundle: Bundle, mode: Mode) -> Mode:
    return Mode.UPDATE if mode is Mode.CREATE and bundle.stored else mode


def _use(residency: Residency, bundle: Bundle, mode: Mode) -> BundleUse:
    return BundleUse(bundle.spec.spec_id, mode, residency.room_for(bundle))


def _around(owner: type, name: str, before: Callable[..., None]) -> None:
    """Call `before` with the method's own arguments, then the method; iterables are made lists first."""
    method = getattr(owner, name)

    @functools.wraps(method)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        listed = tuple(list(a) if not isinstance(a, (str, int, list, tuple)) else a for a in args)
        before(self, *listed, **kwargs)
        return method(self, *listed, **kwargs)

    setattr(owner, name, wrapper)
