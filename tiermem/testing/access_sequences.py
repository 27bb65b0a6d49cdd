"""Access sequences of training scripts: steps, micro-steps, evaluation, generation, checkpointing, experts, mishaps.

Deterministic: a script and its seed give one sequence. For tests and benchmarks of prediction and placement.
"""

from __future__ import annotations

import enum
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from tiermem.plan import Access, Phase


class Update(enum.Enum):
    """When the optimizer's work on a unit is done."""

    OUTSIDE = "outside"  # of the sequence: another lane's
    BARRIER = "barrier"  # all units, after the last micro-step
    DEFERRED = "deferred"  # each unit before its next training forward
    IN_BACKWARD = "in backward"  # each unit after its backward in the last micro-step


@dataclass(frozen=True, slots=True)
class Experts:
    """Of every block: `least` to `most` of `count` are used in a forward; popularity is 1 / rank if `skewed`."""

    count: int = 8
    least: int = 2
    most: int = 2
    skewed: bool = True


@dataclass(frozen=True, slots=True)
class Script:
    """A training script. Units are "embed", `blocks` blocks and "head"; experts are (block, expert).

    Probabilities are per step (`aborted`: a forward dies half way; `random_evaluations`: 1 to 6 forwards without
    training) or per block (`dropped`). `checkpoint_segment` is how many blocks recompute as one, 0 for none: 1 is every
    block checkpointed on its own (the reentrant and the non-reentrant kind access the same), more is
    `checkpoint_sequential`. `least_microbatches` < `microbatches` makes their number random (sequences of
    varying length packed by tokens); every `last_partial_every`-th step has one only. `frozen` units of the bottom have
    no backward.
    """

    blocks: int = 24
    microbatches: int = 1
    least_microbatches: int | None = None
    last_partial_every: int = 0
    update: Update = Update.OUTSIDE
    checkpoint_segment: int = 0
    frozen: int = 0
    evaluate_every: int = 0
    evaluation_batches: int = 5
    generate_every: int = 0
    dropped: float = 0.0
    random_evaluations: float = 0.0
    aborted: float = 0.0
    experts: Experts | None = None
    seed: int = 7

    def accesses(self, steps: int) -> list[Access]:
        return [access for step in self.steps(steps) for access in step]

    def steps(self, count: int) -> Iterator[list[Access]]:
        """One list a step; evaluation and generation belong to the step before."""
        run = _Run(self)
        return (run.step(number) for number in range(count))


class _Run:
    def __init__(self, script: Script) -> None:
        self._script = script
        self._random = random.Random(script.seed)
        count = script.experts.count if script.experts else 0
        self._popular = [self._random.sample(range(count), count) for _ in range(script.blocks)]
        self._pending: dict[object, None] = {}  # units with an update deferred

    def step(self, number: int) -> list[Access]:
        script = self._script
        accesses: list[Access] = []
        touched: dict[object, None] = {}
        microbatches = self._microbatches(number)
        for micro_step in range(microbatches):
            ran = self._forward()
            accesses += self._with_deferred_updates(ran)
            touched |= dict.fromkeys(unit for unit, trained in self._trained(ran) if trained)
            backward = self._backward(ran)
            if script.update == Update.IN_BACKWARD and micro_step == microbatches - 1:
                backward = [b for a in backward for b in self._and_update(a)]
            accesses += backward
        if script.update == Update.BARRIER:
            accesses += [Access(unit, Phase.UPDATE) for unit in sorted(touched, key=str)]
        elif script.update == Update.DEFERRED:
            self._pending |= touched
        return accesses + self._interludes(number)

    def _microbatches(self, number: int) -> int:
        script = self._script
        if script.last_partial_every and (number + 1) % script.last_partial_every == 0:
            return 1
        if script.least_microbatches is not None:
            return self._random.randint(script.least_microbatches, script.microbatches)
        return script.microbatches

    def _forward(self) -> list[object]:
        units: list[object] = ["embed"]
        for block in range(self._script.blocks):
            if self._random.random() >= self._script.dropped:
                units += [block, *((block, expert) for expert in self._experts(block))]
        return [*units, "head"]

    def _experts(self, block: int) -> list[int]:
        experts = self._script.experts
        if experts is None:
            return []
        number = self._random.randint(experts.least, experts.most)
        if not experts.skewed:
            return sorted(self._random.sample(range(experts.count), number))
        chosen: set[int] = set()
        weights = [1 / (rank + 1) for rank in range(experts.count)]
        while len(chosen) < number:
            chosen.add(self._random.choices(self._popular[block], weights)[0])
        return sorted(chosen)

    def _with_deferred_updates(self, units: list[object]) -> list[Access]:
        accesses = []
        for unit in units:
            if unit in self._pending:
                del self._pending[unit]
                accesses.append(Access(unit, Phase.UPDATE))
            accesses.append(Access(unit, Phase.FORWARD))
        return accesses

    def _trained(self, units: list[object]) -> list[tuple[object, bool]]:
        return [(unit, place >= self._script.frozen) for place, unit in enumerate(units)]

    def _backward(self, units: list[object]) -> list[Access]:
        blocks: list[list[object]] = []
        for unit, trained in self._trained(units):
            if not trained:
                continue
            if isinstance(unit, tuple) and blocks:
                blocks[-1].append(unit)
            else:
                blocks.append([unit])
        accesses = []
        for segment in reversed(list(self._segments(blocks))):
            inside = [unit for block in segment for unit in block]
            if self._script.checkpoint_segment and isinstance(inside[0], int):
                accesses += [Access(unit, Phase.RECOMPUTE) for unit in inside]
            accesses += [Access(unit, Phase.BACKWARD) for unit in reversed(inside)]
        return accesses

    def _segments(self, blocks: list[list[object]]) -> Iterator[list[list[object]]]:
        size = max(1, self._script.checkpoint_segment)
        inner = [block for block in blocks if isinstance(block[0], int)]
        yield from ([block] for block in blocks if block[0] == "embed")
        yield from (inner[start : start + size] for start in range(0, len(inner), size))
        yield from ([block] for block in blocks if block[0] == "head")

    def _and_update(self, access: Access) -> list[Access]:
        if access.phase == Phase.BACKWARD:
            return [access, Access(access.unit, Phase.UPDATE)]
        return [access]

    def _interludes(self, number: int) -> list[Access]:
        script = self._script
        forwards: list[list[object]] = []
        if script.evaluate_every and (number + 1) % script.evaluate_every == 0:
            forwards += [self._forward() for _ in range(script.evaluation_batches)]
        if script.generate_every and (number + 1) % script.generate_every == script.generate_every // 2:
            forwards += [self._forward() for _ in range(self._random.randint(5, 20))]
        if self._random.random() < script.random_evaluations:
            forwards += [self._forward() for _ in range(self._random.randint(1, 6))]
        accesses = [Access(unit, Phase.FORWARD, False) for units in forwards for unit in units]
        if self._random.random() < script.aborted:
            ran = self._forward()
            accesses += self._with_deferred_updates(ran[: self._random.randint(1, len(ran) - 1)])
        return accesses


SCRIPTS: Mapping[str, Script] = MappingProxyType(
    {
        "plain": Script(),
        "barrier update": Script(update=Update.BARRIER),
        "deferred update": Script(update=Update.DEFERRED),
        "update in backward": Script(update=Update.IN_BACKWARD),
        "checkpointed blocks": Script(checkpoint_segment=1),
        "checkpointed segments": Script(checkpoint_segment=4),
        "accumulation": Script(microbatches=4),
        "accumulation, barrier": Script(microbatches=4, update=Update.BARRIER),
        "accumulation, deferred": Script(microbatches=4, update=Update.DEFERRED),
        "accumulation, in backward": Script(microbatches=4, update=Update.IN_BACKWARD),
        "varying micro-steps": Script(microbatches=4, least_microbatches=1),
        "varying micro-steps, deferred": Script(microbatches=4, least_microbatches=1, update=Update.DEFERRED),
        "last partial batch": Script(microbatches=4, last_partial_every=10, update=Update.BARRIER),
        "evaluation": Script(evaluate_every=10),
        "generation": Script(generate_every=10),
        "accumulation, evaluation, generation": Script(microbatches=4, evaluate_every=10, generate_every=10),
        "everything, barrier": Script(microbatches=4, evaluate_every=10, generate_every=10, update=Update.BARRIER),
        "everything, deferred": Script(microbatches=4, evaluate_every=10, generate_every=10, update=Update.DEFERRED),
        "random evaluations, aborted forwards": Script(random_evaluations=0.2, aborted=0.1),
        "frozen bottom": Script(frozen=5, update=Update.BARRIER),
        "layer drop": Script(dropped=0.15),
        "experts": Script(experts=Experts()),
        "nearly all experts": Script(experts=Experts(least=7, most=8, skewed=False)),
        "experts, checkpointed, evaluation": Script(experts=Experts(), checkpoint_segment=1, evaluate_every=10),
    }
)
"""By name, what prediction is measured on."""
