"""A model of 70 billion parameters that is nowhere: its shapes, cut into bundles by the client's own code, and a step
that leases and commits them as the hooks of a real one do, computing nothing. For `benchmarks.scale`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import nn

from tiermem.bundle import Mode
from tiermem.plan import Phase
from tiermem_client.grad_slots import GradStore
from tiermem_client.grads import GradBook
from tiermem_client.memory import Bundle
from tiermem_client.optimizer_state import StateStore
from tiermem_client.pieces import of_tile
from tiermem_client.residency import Residency
from tiermem_client.session import MAIN
from tiermem_client.shadow import StateForm
from tiermem_client.storage_swap import storage_key
from tiermem_client.units import Group, ManagedParameter, ManagedStorage, Unit, build_groups, weight_of

BLOCKS, HIDDEN, KEYS, INNER, VOCABULARY = 80, 8192, 1024, 28672, 32000
BLOCK_SHAPES = (
    ("self_attn.q_proj", (HIDDEN, HIDDEN)),
    ("self_attn.k_proj", (KEYS, HIDDEN)),
    ("self_attn.v_proj", (KEYS, HIDDEN)),
    ("self_attn.o_proj", (HIDDEN, HIDDEN)),
    ("mlp.gate_proj", (INNER, HIDDEN)),
    ("mlp.up_proj", (INNER, HIDDEN)),
    ("mlp.down_proj", (HIDDEN, INNER)),
    ("input_layernorm", (HIDDEN,)),
    ("post_attention_layernorm", (HIDDEN,)),
)
MOMENTS = (StateForm("exp_avg", torch.float32), StateForm("exp_avg_sq", torch.float32))


@dataclass(frozen=True, slots=True)
class Update:
    """One transaction of the optimizer's step."""

    access: str
    parameters: list[Bundle]
    grads: list[Bundle]
    state: list[Bundle]

    @property
    def bundles(self) -> list[Bundle]:
        return [*self.parameters, *self.grads, *self.state]


class Model:
    """All bundles of a job, declared and admitted. `compute` stands for the time between two uses: it is called as
    often as `pauses` says in a step.
    """

    def __init__(self, residency: Residency, compute: Callable[[], None]) -> None:
        self._residency, self._compute = residency, compute
        self._book = GradBook(residency)
        self._units = [self._unit("model.embed_tokens", (("weight", (VOCABULARY, HIDDEN)),))]
        self._units += [self._unit(f"model.layers.{n}", BLOCK_SHAPES) for n in range(BLOCKS)]
        self._units.append(self._unit("model.norm", (("weight", (HIDDEN,)),)))
        self._units.append(self._unit("lm_head", (("weight", (VOCABULARY, HIDDEN)),)))
        self.tensors = sum(len(unit.parameters) for unit in self._units)
        self.parameters = sum(p.numel() for unit in self._units for p in unit.parameters)
        self._updates = [update for unit in self._units for group in unit.groups for update in self._plan(group)]
        backward = [self._backward_of(unit) for unit in self._units]
        self.leases = (
            sum(len(unit.bundles) for unit in self._units)
            + sum(len(unit.bundles) + sum(len(store.bundles) for store in stores) for unit, stores in backward)
            + sum(len(update.bundles) for update in self._updates)
        )
        self.pauses = len(self._units) + sum(1 + len(stores) for _, stores in backward) + len(self._updates)
        together = [[*unit.bundles, *store.bundles] for unit, stores in backward for store in stores]
        together += [update.bundles for update in self._updates]
        floor = max(together, key=lambda bundles: sum(bundle.spec.nbytes for bundle in bundles))
        session = residency.session
        residency.budget_frames = session.admit(MAIN, [bundle.spec.spec_id for bundle in floor])

    def _unit(self, name: str, shapes: Iterable[tuple[str, tuple[int, ...]]]) -> Unit:
        unit, storages = Unit(name, [], []), {}
        for tensor, shape in shapes:
            parameter = nn.Parameter(torch.empty(shape, dtype=torch.bfloat16, device="meta"))
            raw, nbytes = parameter.untyped_storage(), parameter.numel() * parameter.element_size()
            storage = ManagedStorage(raw, nbytes, f"{name}.{tensor}")
            storage.parameters.append(
                ManagedParameter(parameter, storage.name, storage, 0, tuple(shape), tuple(parameter.stride()))
            )
            storages[storage_key(parameter) or 0] = storage
            unit.parameters.append(parameter)
        sizes = {parameter: [form.dtype.itemsize for form in MOMENTS] for parameter in unit.parameters}
        build_groups(unit, storages, self._residency, lambda s: weight_of(s, sizes))
        unit.bundles = [bundle for group in unit.groups for bundle in group.bundles]
        for group in unit.groups:
            self._book.prepare(group)
        return unit

    def _plan(self, group: Group) -> list[Update]:
        store = StateStore(group)
        store.build({m.parameter: MOMENTS for m in group.parameters}, self._residency)
        [grads] = self._book.stores[group]
        updates = []
        for tile in range(len(group.bundles)) if group.tiled else (-1,):
            parameters = of_tile(group.bundles, tile)
            state = [bundle for bundles in store.sets for bundle in of_tile(bundles, tile)]
            name = f"{group.unit}/{parameters[0].spec.spec_id}"
            updates.append(Update(name, parameters, of_tile(grads.bundles, tile), state))
        return updates

    def _backward_of(self, unit: Unit) -> tuple[Unit, list[GradStore]]:
        return unit, [store for group in reversed(unit.groups) for store in self._book.stores[group]]

    # -- what the hooks do

    def adopt(self) -> None:
        """Bring the parameters into the store, as attach does."""
        for unit in self._units:
            for group in unit.groups:
                self._residency.acquire(group.bundles, Mode.CREATE)
                _write(group.bundles)
                self._residency.release(group.bundles)

    def step(self) -> None:
        """Forward, backward, update, `zero_grad`."""
        for unit in self._units:
            self._forward(unit)
        self._backward()
        for update in self._updates:
            self._update(update)
        for unit in self._units:
            for group in unit.groups:
                for store in self._book.stores[group]:
                    self._residency.discard(store.bundles)

    def _forward(self, unit: Unit) -> None:
        residency = self._residency
        residency.accessed(unit.name, Phase.FORWARD)
        residency.acquire(unit.bundles, Mode.READ)
        self._compute()
        residency.left(unit.name)
        residency.release(unit.bundles)

    def _backward(self) -> None:
        """A unit is held until the next one is; its gradients, group by group, until the next group's."""
        residency = self._residency
        held: list[Bundle] = []
        kept: list[Bundle] = []
        for unit, stores in map(self._backward_of, reversed(self._units)):
            for _ in unit.parameters:  # each is unpacked
                residency.accessed(unit.name, Phase.BACKWARD)
            residency.release(held)
            residency.acquire(unit.bundles, Mode.READ)
            held = unit.bundles
            self._compute()
            for store in stores:
                residency.release(kept)
                residency.accessed(unit.name, Phase.BACKWARD)
                residency.acquire(store.bundles, Mode.CREATE)
                _write(store.bundles)
                kept = store.bundles
                self._compute()
        residency.release(held)
        residency.release(kept)

    def _update(self, update: Update) -> None:
        residency = self._residency
        residency.accessed(update.access, Phase.UPDATE)
        for bundles in (update.parameters, update.grads, [b for b in update.state if b.stored]):
            residency.acquire(bundles, Mode.UPDATE)
        residency.acquire([b for b in update.state if not b.stored], Mode.CREATE)
        self._compute()
        _write(update.parameters)
        _write(update.state)
        residency.conclude(update.bundles)
        residency.release(update.bundles)


def _write(bundles: Iterable[Bundle]) -> None:
    for bundle in bundles:
        bundle.written = True
