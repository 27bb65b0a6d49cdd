"""`job.accumulate`: all microbatches pass a unit before the next one runs; losses, gradients and weights bit for bit
those of the ordinary loop.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import tiermem
from tests.integration.daemon_process import Daemon, serve
from tests.integration.scripts import VOCAB, BlockModel, default_loss
from tiermem.errors import InvalidArgument, Unsupported
from tiermem.units import MIB

Act = Callable[[nn.Module, torch.Tensor], torch.Tensor]


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with serve(tmp_path_factory.mktemp("vertical"), dram="64MiB") as served:
        yield served


@dataclass
class Seen:
    losses: list[float] = field(default_factory=list)
    grads: list[dict[str, torch.Tensor]] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    rng: torch.Tensor | None = None
    inexact: tuple[str, ...] = ()
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    leases: list[int] = field(default_factory=list)
    moved: list[int] = field(default_factory=list)


@dataclass
class Loop:
    """A loop with gradient accumulation. `body` is called with (model, batch, scaler) and returns what it is to return;
    `verbatim` bodies call backward themselves.
    """

    model: Callable[[], nn.Module] = lambda: BlockModel(width=64, blocks=12)
    microbatches: int = 4
    steps: int = 3
    seeds: bool = False
    scaler: bool = False
    autocast: bool = False
    lengths: tuple[int, ...] = (10,)
    loss: Act = default_loss
    verbatim: bool = False
    keeps_grads: bool = True
    backward: Callable[[torch.Tensor], None] = torch.Tensor.backward
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = lambda m: torch.optim.AdamW(m.parameters(), lr=3e-3)

    def run(self, daemon: Daemon | None = None, vertical: bool = True, **options: Any) -> Seen:
        torch.manual_seed(5)
        model = self.model().train()
        optimizer = self.optimizer(model)
        seen, generator = Seen(), torch.Generator().manual_seed(7)
        scaler = torch.amp.GradScaler("cpu", enabled=self.scaler)
        with contextlib.ExitStack() as stack:
            job = None
            if daemon is not None:
                job = tiermem.attach(model, optimizer, dram=3 * MIB, endpoint=daemon.endpoint, **options)
                stack.callback(job.detach)

            def body(batch: torch.Tensor) -> Any:
                with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
                    loss = self.loss(model, batch) / self.microbatches
                if self.verbatim:
                    self.backward(scaler.scale(loss))
                    return loss.item()
                return loss

            for step in range(self.steps):
                before = None if job is None else _counts(job)
                batches = [
                    torch.randint(0, VOCAB, (3, self.lengths[i % len(self.lengths)]), generator=generator)
                    for i in range(self.microbatches)
                ]
                seeds = [100 * step + i for i in range(self.microbatches)] if self.seeds else None
                if job is not None and vertical:
                    results = job.accumulate(body, batches, seeds)
                else:
                    results = []
                    for i, batch in enumerate(batches):
                        if seeds is not None:
                            torch.manual_seed(seeds[i])
                        results.append(body(batch))
                        if not self.verbatim:
                            results[-1].backward()
                seen.losses += [r.item() if isinstance(r, torch.Tensor) else r for r in results]
                scaler.unscale_(optimizer) if self.scaler else None
                if self.keeps_grads:
                    seen.grads.append(_grads(model))
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                if job is not None and before is not None:
                    leases, moved = (b - a for a, b in zip(before, _counts(job), strict=True))
                    seen.leases.append(leases)
                    seen.moved.append(moved)
            if job is not None:
                seen.inexact = job.stats().inexact
        seen.buffers = {n: b.clone() for n, b in model.named_buffers()}
        seen.weights = {n: p.detach().clone() for n, p in model.named_parameters()}
        seen.rng = torch.get_rng_state()
        return seen


def _grads(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def _counts(job: tiermem.Job) -> tuple[int, int]:
    stats = job.stats()
    residency = stats.residency
    asked = residency.ahead + residency.demands  # leases that were not held already
    return asked, sum(link.bytes for link in stats.links.values())


def check_equal(mine: Seen, plain: Seen) -> None:
    assert mine.inexact == ()
    assert mine.losses == plain.losses
    mine_all, plain_all = ([*seen.grads, seen.weights, seen.buffers] for seen in (mine, plain))
    for one, other in zip(mine_all, plain_all, strict=True):
        assert one.keys() == other.keys()
        for name in one:
            assert torch.equal(one[name], other[name]), name
    assert mine.rng is not None and plain.rng is not None
    assert torch.equal(mine.rng, plain.rng)


def refused(daemon: Daemon, loop: Loop, match: str) -> None:
    with pytest.raises(Unsupported, match=match):
        loop.run(daemon)


@pytest.fixture
def attached(daemon: Daemon) -> Iterator[tuple[BlockModel, torch.optim.Optimizer, tiermem.Job]]:
    torch.manual_seed(5)
    model = BlockModel(width=64, blocks=8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with tiermem.attach(model, optimizer, dram=3 * MIB, endpoint=daemon.endpoint) as job:
        yield model, optimizer, job


Attached = tuple[BlockModel, torch.optim.Optimizer, tiermem.Job]


def _batches(number: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(0, VOCAB, (3, 10), generator=generator) for _ in range(number)]


@pytest.mark.parametrize("microbatches", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("verbatim", [False, True], ids=["returns the loss", "verbatim"])
def test_equal_to_the_ordinary_loop(microbatches: int, verbatim: bool, daemon: Daemon) -> None:
    loop = Loop(microbatches=microbatches, verbatim=verbatim)
    check_equal(loop.run(daemon), loop.run())


@pytest.mark.parametrize("checkpointing", ["reentrant", "non-reentrant"])
@pytest.mark.parametrize("autocast", [False, True])
def test_checkpoints_and_autocast(checkpointing: str, autocast: bool, daemon: Daemon) -> None:
    """For each thread torch keeps grad mode, autocast and its casts, and hooks of saved tensors: here each microbatch
    has its own.
    """
    loop = Loop(
        model=lambda: BlockModel(width=64, blocks=8, checkpointing=checkpointing),
        autocast=autocast,
        verbatim=True,
    )
    check_equal(loop.run(daemon), loop.run())


def test_autocast_without_checkpoints(daemon: Daemon) -> None:
    check_equal(Loop(autocast=True).run(daemon), Loop(autocast=True).run())


@pytest.mark.parametrize("checkpointing", ["", "reentrant", "non-reentrant"])
def test_dropout_is_that_of_a_seed_for_each_microbatch(checkpointing: str, daemon: Daemon) -> None:
    loop = Loop(model=lambda: BlockModel(width=64, blocks=8, dropout=0.3, checkpointing=checkpointing), seeds=True)
    check_equal(loop.run(daemon), loop.run())


def test_grad_scaler(daemon: Daemon) -> None:
    loop = Loop(scaler=True, autocast=True, verbatim=True)
    check_equal(loop.run(daemon), loop.run())


def test_accelerate(daemon: Daemon) -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    loop = Loop(verbatim=True, backward=accelerator.backward)
    check_equal(loop.run(daemon), loop.run())


def test_microbatches_of_different_lengths(daemon: Daemon) -> None:
    loop = Loop(lengths=(4, 16, 9), microbatches=5, verbatim=True)
    check_equal(loop.run(daemon), loop.run())


def test_a_pass_without_gradients_inside_the_body(daemon: Daemon) -> None:
    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            teacher = model(batch).softmax(-1)
        out: torch.Tensor = model(batch)
        return default_loss(model, batch) + nn.functional.mse_loss(out.softmax(-1), teacher)

    loop = Loop(loss=loss, microbatches=3, verbatim=True)
    mine, plain = loop.run(daemon), loop.run()
    assert len(mine.inexact) == 1
    assert mine.losses == plain.losses
    for name, weight in mine.weights.items():  # a unit that is used twice by a loss: the order of summing differs
        torch.testing.assert_close(weight, plain.weights[name], rtol=1e-3, atol=1e-4)


class Dropping(BlockModel):
    """Every batch skips another block."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.embed(tokens)
        for i, block in enumerate(self.blocks):
            if i != int(tokens[0, 0]) % len(self.blocks):
                h = block(h)
        return self.head(h)  # type: ignore[no-any-return]


def test_layers_that_not_every_microbatch_uses(daemon: Daemon) -> None:
    loop = Loop(model=lambda: Dropping(width=64, blocks=12), verbatim=True)
    check_equal(loop.run(daemon), loop.run())


@pytest.mark.parametrize("shared", ["embed.weight", "gamma"])
def test_a_weight_of_several_units_differs_in_the_order_of_summing_only(shared: str, daemon: Daemon) -> None:
    tied = shared == "embed.weight"
    loop = Loop(model=lambda: BlockModel(width=64, blocks=12, tied=tied, around=not tied), steps=1)
    mine, plain = loop.run(daemon), loop.run()
    assert len(mine.inexact) == 1 and "tied weight" in mine.inexact[0]
    assert mine.losses == plain.losses
    for name, grad in mine.grads[0].items():
        if name == shared:
            torch.testing.assert_close(grad, plain.grads[0][name], rtol=1e-5, atol=1e-7)
        else:
            assert torch.equal(grad, plain.grads[0][name]), name


def test_a_second_backward_of_a_body_is_said_to_be_inexact(daemon: Daemon) -> None:
    def backward(loss: torch.Tensor) -> None:
        (0.5 * loss).backward(retain_graph=True)
        (0.5 * loss).backward()

    assert len(Loop(verbatim=True, backward=backward).run(daemon).inexact) == 1
    assert Loop(verbatim=True, backward=backward, microbatches=1).run(daemon).inexact == ()


def _numpy_state() -> bytes:
    state: Any = numpy.random.get_state()
    return bytes(state[1].tobytes())


class Counting(BlockModel):
    """Every forward changes something that later ones depend on: the order of microbatches shows."""

    mean: torch.Tensor

    def __init__(self, what: str) -> None:
        super().__init__(width=64, blocks=8)
        self.what = what
        self.register_buffer("mean", torch.zeros(64))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.embed(tokens)
        for block in self.blocks:
            h = block(h)
            if self.what == "in place":
                self.mean.lerp_(h.detach().mean((0, 1)), 0.5)
            elif self.what == "anew":
                self.mean = 0.5 * self.mean + h.detach().mean((0, 1))
            elif self.what == "python":
                h = h * (1 + random.random())
            elif self.what == "numpy":
                h = h * float(1 + numpy.random.rand())
        return self.head(h + self.mean)  # type: ignore[no-any-return]


@pytest.mark.parametrize("what", ["in place", "anew", "python", "numpy"])
def test_what_forwards_change_in_the_order_of_microbatches_is_refused_and_put_back(what: str, daemon: Daemon) -> None:
    random.seed(3)
    numpy.random.seed(3)
    models: list[Counting] = []

    def make() -> nn.Module:
        models.append(Counting(what))
        return models[-1]

    before = random.getstate(), _numpy_state()
    refused(daemon, Loop(model=make), "another order")
    refused(daemon, Loop(model=make, seeds=True), "another order")
    assert (random.getstate(), _numpy_state()) == before
    for model in models:
        assert torch.equal(model.mean, torch.zeros(64))
        assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("what", ["in place", "anew", "python", "numpy"])
def test_one_microbatch_alone_may_change_anything(what: str, daemon: Daemon) -> None:
    def seen(job: Daemon | None) -> Seen:
        random.seed(3)
        numpy.random.seed(3)
        return Loop(model=lambda: Counting(what), microbatches=1, verbatim=True).run(job)

    check_equal(seen(daemon), seen(None))


def test_one_microbatch_alone_needs_no_seed(daemon: Daemon) -> None:
    loop = Loop(model=lambda: BlockModel(width=64, blocks=8, dropout=0.3), microbatches=1, verbatim=True)
    check_equal(loop.run(daemon), loop.run())


def test_a_forward_that_changes_parameters_is_refused(attached: Attached) -> None:
    model, _, job = attached

    def shift(module: nn.Module, args: Any) -> None:
        with torch.no_grad():
            module.get_parameter("down.weight").mul_(1.5)

    model.blocks[2].register_forward_pre_hook(shift)
    with pytest.raises(Unsupported, match=r"parameter of 'blocks\.2'"):
        job.accumulate(lambda batch: default_loss(model, batch), _batches(3))


@pytest.mark.parametrize("options", [{"deferred": False}, {"optimizer_in_backward": False}, {}], ids=str)
def test_ways_of_updating(options: dict[str, Any], daemon: Daemon) -> None:
    loop = Loop(verbatim=True, steps=6)
    check_equal(loop.run(daemon, **options), loop.run())


def test_updates_inside_backward_that_were_opted_in_for(daemon: Daemon) -> None:
    loop = Loop(verbatim=True, steps=6, keeps_grads=False)
    check_equal(loop.run(daemon, optimizer_in_backward=True), loop.run())


@pytest.mark.parametrize(
    "activations", ["offload", "recompute", {"blocks.[0-5]": "recompute", "*": "offload"}], ids=str
)
@pytest.mark.parametrize("around", [False, True])
def test_activations_that_are_not_kept(activations: Any, around: bool, daemon: Daemon) -> None:
    """Those of all microbatches are there at once."""
    loop = Loop(model=lambda: BlockModel(width=64, blocks=12, around=around), lengths=(100,), steps=3, microbatches=3)
    mine, plain = loop.run(daemon, activations=activations), loop.run()
    if not around:
        check_equal(mine, plain)
    assert mine.losses[:3] == plain.losses[:3]
    for name, weight in mine.weights.items():
        torch.testing.assert_close(weight, plain.weights[name], rtol=1e-3, atol=1e-4)


# -- what is fetched


def test_a_unit_is_leased_as_often_whatever_the_number_of_microbatches(daemon: Daemon) -> None:
    leases, moved = {}, {}
    for microbatches in (2, 4, 8):
        loop = Loop(microbatches=microbatches, steps=7, keeps_grads=False)
        seen = loop.run(daemon, optimizer_in_backward=False)
        leases[microbatches], moved[microbatches] = seen.leases[-1], sum(seen.moved[-3:])
    assert leases[2] == leases[4] == leases[8]
    assert max(moved.values()) <= 1.1 * min(moved.values())
    ordinary = loop.run(daemon, vertical=False, optimizer_in_backward=False)
    assert ordinary.leases[-1] > 3 * leases[8], (ordinary.leases, leases)
    assert sum(ordinary.moved[-3:]) > 1.7 * moved[8], "what updates move is the same in both"


# -- refusals and errors


def test_random_numbers_need_seeds(daemon: Daemon) -> None:
    refused(daemon, Loop(model=lambda: BlockModel(width=64, blocks=8, dropout=0.3)), "seeds=")


def test_an_error_before_backward_leaves_buffers_as_they_were(daemon: Daemon) -> None:
    class Failing(Counting):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            self.mean.add_(1)
            raise ArithmeticError("at once")

    models: list[Failing] = []

    def make() -> nn.Module:
        models.append(Failing("nothing"))
        return models[-1]

    with pytest.raises(ArithmeticError):
        Loop(model=make).run(daemon)
    assert torch.equal(models[0].mean, torch.zeros(64))


@pytest.mark.parametrize("error", [ArithmeticError("in one"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("at", [0, 3, 7])
def test_what_one_microbatch_raises_comes_out_and_nothing_is_left(
    error: BaseException, at: int, attached: Attached
) -> None:
    model, _, job = attached
    calls, rng = 0, torch.get_rng_state()

    def fails(module: nn.Module, args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise error

    handle = model.blocks[at].register_forward_pre_hook(fails)
    with pytest.raises(type(error)):
        job.accumulate(lambda batch: default_loss(model, batch), _batches(4))
    handle.remove()
    assert torch.is_grad_enabled()
    assert torch.equal(torch.get_rng_state(), rng)
    assert all(p.grad is None for p in model.parameters())
    losses = job.accumulate(lambda batch: default_loss(model, batch), _batches(4))
    torch.manual_seed(5)
    plain = BlockModel(width=64, blocks=8)
    expected = []
    for batch in _batches(4):
        expected.append(default_loss(plain, batch))
        expected[-1].backward()
    assert [one.item() for one in losses] == [one.item() for one in expected]
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None
        assert torch.equal(p.grad.clone(), q.grad)


def test_a_body_that_catches_what_ends_it_is_ended_all_the_same(attached: Attached) -> None:
    model, _, job = attached
    calls = 0

    def fails(module: nn.Module, args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise ArithmeticError("the third")

    def stubborn(batch: torch.Tensor) -> torch.Tensor:
        try:
            return default_loss(model, batch)
        except ArithmeticError:
            raise
        except Exception as ending:
            with contextlib.suppress(Exception):
                return default_loss(model, batch)
            raise ValueError("something else") from ending

    handle = model.blocks[3].register_forward_pre_hook(fails)
    with pytest.raises(ArithmeticError, match="the third") as raised:
        job.accumulate(stubborn, _batches(4))
    handle.remove()
    assert any("something else" in note for note in raised.value.__notes__)
    assert len(job.accumulate(lambda batch: default_loss(model, batch), _batches(4))) == 4


def test_gradients_that_are_left_are_refused(attached: Attached) -> None:
    model, optimizer, job = attached
    job.accumulate(lambda batch: default_loss(model, batch), _batches(2))
    with pytest.raises(Unsupported, match="zero_grad"):
        job.accumulate(lambda batch: default_loss(model, batch), _batches(2))
    optimizer.zero_grad(set_to_none=False)
    job.accumulate(lambda batch: default_loss(model, batch), _batches(2))


def test_what_makes_no_sense_is_refused(attached: Attached) -> None:
    model, _, job = attached
    body = lambda batch: default_loss(model, batch)  # noqa: E731
    assert job.accumulate(body, []) == []
    with pytest.raises(InvalidArgument, match="3 seeds for 2"):
        job.accumulate(body, _batches(2), seeds=[1, 2, 3])
    with pytest.raises(Unsupported, match="inside accumulate"):
        job.accumulate(lambda batch: job.accumulate(body, [batch]), _batches(2))
    with pytest.raises(Unsupported, match="create_graph"):
        job.accumulate(lambda batch: default_loss(model, batch).backward(create_graph=True), _batches(2))
    job.detach()
    with pytest.raises(Unsupported, match="ended"):
        job.accumulate(body, _batches(2))


def test_what_follows_backward_sees_the_whole_gradient_in_the_loops_order(attached: Attached) -> None:
    model, _, job = attached
    order: list[Any] = []

    def body(batch: int) -> int:
        loss = default_loss(model, _batches(3)[batch])
        loss.backward()
        grad = model.head.weight.grad
        assert grad is not None
        order.append((batch, grad.norm().item()))
        return batch

    assert job.accumulate(body, [0, 1, 2]) == [0, 1, 2]
    assert [batch for batch, _ in order] == [0, 1, 2]
    assert len({norm for _, norm in order}) == 1
