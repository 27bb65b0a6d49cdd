"""Vertical execution: all microbatches of a step pass a unit before the next unit runs, so that a unit's bytes are
fetched once for all of them, forward and backward.

Each microbatch is a greenlet that runs the script's own loop body. It parks when it is about to enter a unit, and when
it calls backward. Who is at the lowest position goes on, the last microbatch first; when all are at their backward, one
backward runs for all. Autograd orders nodes by when they were made, so it passes unit by unit too, and sums the
microbatches' contributions to a gradient in the order in which gradient accumulation adds them. Not OS threads: these
numbers are counted in each thread.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import greenlet
import torch
from torch import nn

from tiermem.bundle import Mode
from tiermem.errors import InvalidArgument, Unsupported
from tiermem.plan import Phase
from tiermem_client.grad_handles import GradHandle
from tiermem_client.order_watch import OrderWatch, adds_up_several
from tiermem_client.residency import Residency
from tiermem_client.saved_tensors import SavedTensorHooks
from tiermem_client.thread_state import ThreadState, rng_state, same_rng, set_rng_state
from tiermem_client.units import ManagedStorage, Unit

_START = (0, -1)
_ORDER = (
    "{}, and microbatches would do that in another order than one after the other; run these without accumulate, or "
    "freeze it (eval() of such modules)"
)
_DRAWN = (
    "the forward draws random numbers (dropout), whose order among microbatches would be another one; give accumulate "
    "seeds=[...], one for each microbatch: the result is that of a loop that calls torch.manual_seed(seed) before each"
)

Body = Callable[[Any], Any]


class Hooks(Protocol):
    """The hooks of the units, as this needs them."""

    residency: Residency
    saved: SavedTensorHooks
    park: Callable[[Unit], None] | None
    grouped: Unit | None


class _Abandoned(Exception):
    """Ends a microbatch whose sibling has failed."""


@dataclass(slots=True)
class _BackwardCall:
    tensors: list[torch.Tensor]
    gradients: list[torch.Tensor | None]
    retain_graph: bool


@dataclass(slots=True, eq=False)
class _Microbatch:
    """One run of the body. `position`: (how often it came back to an earlier unit, the unit's place in the order of
    first use); `unit`: which it is about to enter; `call`: the backward it waits for.
    """

    run: greenlet.greenlet
    state: ThreadState
    pushed: list[Any]
    rng: tuple[torch.Tensor, ...]
    position: tuple[int, int] = _START
    unit: Unit | None = None
    call: _BackwardCall | None = None
    called: bool = False
    result: Any = None
    visited: list[Unit] = field(default_factory=list)

    def moved_to(self, unit: Unit, place: int) -> None:
        times, last = self.position
        self.visited.append(unit)
        self.unit, self.position = unit, (times + (place <= last), place)


@dataclass(slots=True, eq=False)
class Vertical:
    """Of one job. Nothing else may run the model meanwhile. `on_inexact` is told once why results may differ from the
    ordinary loop's in their last bits.
    """

    model: nn.Module
    hooks: Hooks
    storages: Iterable[ManagedStorage]
    on_inexact: Callable[[str], None] = lambda text: None
    _known: set[tuple[Unit, ...]] = field(default_factory=set)  # orders of units whose sums have been looked at
    _told: bool = False
    _places: dict[Unit, int] = field(default_factory=dict)
    _current: _Microbatch | None = None

    def accumulate(self, body: Body, batches: Sequence[Any], seeds: Sequence[int] | None = None) -> list[Any]:
        """As `Job.accumulate`."""
        if self._current is not None or self.hooks.park is not None:
            raise Unsupported("accumulate inside accumulate; give the inner loop's microbatches to the outer one")
        if seeds is not None and len(seeds) != len(batches):
            raise InvalidArgument(f"{len(seeds)} seeds for {len(batches)} microbatches; give one for each")
        if not batches:
            return []
        if (name := self._left()) is not None:
            raise Unsupported(
                f"accumulate adds up a step's microbatches together, but the gradient of {name!r} is not zero; call "
                "zero_grad() before, and give all microbatches of a step to one call"
            )
        outer, outer_rng = ThreadState.taken(), rng_state()
        outer.put()
        micro = [self._microbatch(body, batch, outer, outer_rng) for batch in batches]
        if seeds is not None:
            for each, seed in zip(micro, seeds, strict=True):
                torch.manual_seed(seed)
                each.rng = rng_state()
            set_rng_state(outer_rng)
        alone = len(micro) == 1  # then the order is the ordinary one
        watch = None if alone else OrderWatch.begun(self.model)
        own_rng = alone or seeds is not None
        try:
            with self._catching_backward():
                self._run(micro, watch, None if own_rng else outer_rng)
        except BaseException:
            set_rng_state(outer_rng)
            raise
        if own_rng:
            set_rng_state(micro[-1].rng)
        return [each.result for each in micro]

    def _left(self) -> str | None:
        """The name of a parameter whose gradient is not zero."""
        for managed in (managed for storage in self.storages for managed in storage.parameters):
            with torch._C.DisableTorchFunctionSubclass():
                grad = managed.parameter.grad
            if grad is not None and (type(grad) is not GradHandle or not grad.slot.zero):
                return managed.name
        return None

    def _microbatch(self, body: Body, batch: Any, state: ThreadState, rng: tuple[torch.Tensor, ...]) -> _Microbatch:
        run = greenlet.greenlet(lambda: body(batch))
        run.gr_context = contextvars.copy_context()
        return _Microbatch(run, state, list(self.hooks.saved.pushed), rng)

    # -- parking, called inside a microbatch

    def _park(self, unit: Unit) -> None:
        me = self._current
        if me is not None and greenlet.getcurrent() is me.run:
            me.moved_to(unit, self._places.setdefault(unit, len(self._places)))
            me.run.parent.switch()
            me.unit = None

    @contextlib.contextmanager
    def _catching_backward(self) -> Iterator[None]:
        """`torch.autograd.backward` (which `Tensor.backward` calls) parks a microbatch until all are there."""
        original = torch.autograd.backward

        def backward(
            tensors: Any,
            grad_tensors: Any = None,
            retain_graph: bool | None = None,
            create_graph: bool = False,
            grad_variables: Any = None,
            inputs: Any = None,
        ) -> None:
            me = self._current
            if me is None or greenlet.getcurrent() is not me.run:
                original(tensors, grad_tensors, retain_graph, create_graph, grad_variables, inputs)
                return
            if create_graph or inputs is not None or grad_variables is not None:
                raise Unsupported(
                    "backward with create_graph, inputs or grad_variables inside accumulate; run these microbatches "
                    "one after the other"
                )
            roots = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
            gradients = (
                [grad_tensors] if grad_tensors is None or isinstance(grad_tensors, torch.Tensor) else grad_tensors
            )
            me.call = _BackwardCall(roots, [*gradients, *[None] * (len(roots) - len(gradients))], bool(retain_graph))
            me.run.parent.switch()

        torch.autograd.backward = backward
        self.hooks.park = self._park
        try:
            yield
        finally:
            torch.autograd.backward = original
            self.hooks.park = None

    # -- scheduling

    def _run(
        self, micro: list[_Microbatch], watch: OrderWatch | None, undrawn: tuple[torch.Tensor, ...] | None
    ) -> None:
        """`watch`: what else forwards must not change. `undrawn`: the random state that they must not; None where each
        has its own.
        """
        try:
            while live := [m for m in micro if not m.run.dead]:
                ready = [m for m in live if m.call is None]
                if ready:
                    position = min(m.position for m in ready)
                    group = [m for m in reversed(ready) if m.position == position]
                    self._pass(group, undrawn)
                    if watch is not None and (changes := watch.changes()):
                        raise Unsupported(_ORDER.format(changes))
                else:
                    self._backward(micro)
                    watch = None  # what follows backward runs in the ordinary order
                    for each in live:
                        each.call = None
                        self._resume(each, swap_rng=undrawn is None)
                        if undrawn is not None:
                            undrawn = rng_state()
                            for other in live:
                                other.rng = undrawn
            self._backward(micro)
        except BaseException as error:
            for each in micro:
                while each.run and not each.run.dead:  # a body may catch it, and enter a unit again
                    try:
                        self._resume(each, swap_rng=False, error=_Abandoned("another microbatch has failed"))
                    except _Abandoned:
                        pass
                    except Exception as other:  # noqa: BLE001 - told with the error that is raised
                        error.add_note(f"another microbatch, ended because of this, raised {other!r}")
            if watch is not None:
                watch.put_back()
            raise

    def _pass(self, group: list[_Microbatch], undrawn: tuple[torch.Tensor, ...] | None) -> None:
        """Let microbatches pass the unit that they wait for."""
        unit = group[0].unit
        with self._leased(unit):
            before = () if unit is None else tuple(p._version for p in unit.parameters)
            for each in group:
                self._resume(each, swap_rng=True)
                if undrawn is not None and not same_rng(each.rng, undrawn):
                    raise Unsupported(_DRAWN)
            if unit is not None and len(group) > 1 and before != tuple(p._version for p in unit.parameters):
                raise Unsupported(_ORDER.format(f"a parameter of {unit.name!r}, whose old values are lost, is changed"))

    def _resume(self, micro: _Microbatch, swap_rng: bool, error: Exception | None = None) -> None:
        """Let it go on until it parks or ends, with its own thread state."""
        saved = self.hooks.saved
        outer, outer_pushed, outer_rng = ThreadState.taken(), saved.pushed, rng_state() if swap_rng else None
        micro.state.put()
        saved.pushed = micro.pushed
        if swap_rng:
            set_rng_state(micro.rng)
        self._current = micro
        try:
            result = micro.run.switch() if error is None else micro.run.throw(error)
            if micro.run.dead:
                micro.result = result
        finally:
            self._current = None
            if outer_rng is not None:
                micro.rng = rng_state()
                set_rng_state(outer_rng)
            micro.state, micro.pushed = ThreadState.taken(), saved.pushed
            saved.pushed = outer_pushed
            outer.put()

    @contextlib.contextmanager
    def _leased(self, unit: Unit | None) -> Iterator[None]:
        """The unit's bundles, for all microbatches that are about to enter it: one access."""
        if unit is None:
            yield
            return
        residency = self.hooks.residency
        residency.bring_up_to_date(unit.bundles)
        residency.accessed(unit.name, Phase.FORWARD, unit.modules[0].training)
        residency.acquire(unit.bundles, Mode.READ)
        self.hooks.grouped = unit
        try:
            yield
        finally:
            self.hooks.grouped = None
            residency.release(unit.bundles)

    def _backward(self, micro: list[_Microbatch]) -> None:
        """One for all that wait for theirs, and for losses that bodies have returned without calling it."""
        roots: list[torch.Tensor] = []
        gradients: list[torch.Tensor | None] = []
        retain = False
        again = any(each.called and each.call is not None for each in micro)
        for each in micro:
            call = each.call
            if call is None and each.run.dead and not each.called and _is_loss(each.result):
                call = _BackwardCall([each.result], [None], False)
            if call is not None:
                each.called = True
                roots += call.tensors
                gradients += call.gradients
                retain = retain or call.retain_graph
        if roots and len(micro) > 1:
            self._look_at_sums(micro, roots, again)
        if roots:
            torch.autograd.backward(roots, gradients, retain_graph=retain or None)

    def _look_at_sums(self, micro: list[_Microbatch], roots: list[torch.Tensor], again: bool) -> None:
        """Tell whether microbatches' contributions to a gradient are added up in another order than the loop's."""
        order = tuple(micro[0].visited)
        if self._told or (order in self._known and not again):
            return
        self._known.add(order)
        if again or len(set(order)) < len(order) or adds_up_several(roots[:1]):
            self._told = True
            self.on_inexact(
                "accumulate: a parameter is used more than once in a microbatch (a tied weight), or backward is called "
                "more than once, so gradients are added up in another order than one microbatch after the other; "
                "results may differ in their last bits"
            )


def _is_loss(result: Any) -> bool:
    return isinstance(result, torch.Tensor) and result.requires_grad and result.numel() == 1
