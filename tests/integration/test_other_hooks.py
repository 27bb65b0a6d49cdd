"""Code of others around an attached model: parametrizations, hooks that read weights, copies of everything, buffers,
DistributedDataParallel in one process.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.nn.utils import parametrizations, parametrize

import tiermem
from tests.integration.scripts import BlockModel, batches
from tests.integration.served import Attach, Served, served_in, train, weights


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served_in(tmp_path_factory.mktemp("daemon")) as running:
        yield running


def trained(
    attach: Attach,
    model: Callable[[], nn.Module] = BlockModel,
    before: Callable[[Any], Any] = lambda model: None,
    after: Callable[[Any], Any] = lambda model: None,
    each: Callable[[Any, torch.optim.Optimizer], Any] = lambda model, optimizer: None,
) -> Any:
    """Three steps of a model that is changed before or after attach."""
    torch.manual_seed(0)
    module: Any = model()
    before(module)
    optimizer, data = torch.optim.AdamW(module.parameters(), lr=3e-3), batches(1)
    job = attach(module, optimizer)
    after(module)
    seen: list[Any] = []
    for _ in range(3):
        seen += [train(module, optimizer, data, 1), each(module, optimizer)]
    job.detach()
    return seen, weights(module), copy.deepcopy(optimizer.state_dict())


class Scaled(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * 1.5


def spectral_norm(model: Any) -> None:
    for block in model.blocks:
        parametrizations.spectral_norm(block.up)


def weight_norm(model: Any) -> None:
    for block in model.blocks:
        parametrizations.weight_norm(block.down)


def own_parametrization(model: Any) -> None:
    parametrize.register_parametrization(model.blocks[2].up, "weight", Scaled())


def old_weight_norm(model: Any) -> None:
    for block in model.blocks:
        torch.nn.utils.weight_norm(block.down)


def old_spectral_norm(model: Any) -> None:
    for block in model.blocks:
        torch.nn.utils.spectral_norm(block.up)


CHANGES = [spectral_norm, weight_norm, own_parametrization, old_weight_norm, old_spectral_norm]


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning")
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("change", CHANGES)
def test_parametrized(change: Callable[[Any], None], when: str, served: Served) -> None:
    served.same(lambda attach: trained(attach, **{when: change}))  # type: ignore[arg-type]


def remove_all(model: Any) -> None:
    for block in model.blocks:
        parametrize.remove_parametrizations(block.up, "weight")


def test_parametrization_removed_while_attached(served: Served) -> None:
    """It puts the computed weight into the parameter with `set_`, which torch does not dispatch."""
    served.same(lambda attach: trained(attach, before=spectral_norm, after=remove_all))


def test_parameter_pointed_at_other_memory_is_refused(served: Served) -> None:
    model = BlockModel()
    with served.with_options(spills=False) as other:
        other.attach(model)
        weight: Any = model.head.weight
        with pytest.raises(tiermem.errors.Unsupported, match=r"copy_\(\) into it"):
            weight.set_(torch.zeros(weight.shape).untyped_storage(), 0, weight.shape)
        with pytest.raises(tiermem.errors.Unsupported, match=r"assigned data of shape \(3,\)"):
            with torch.no_grad():
                weight.set_(torch.zeros(3))


def hooked(seen: list[Any]) -> Callable[[Any], None]:
    """Every kind of hook, reading weights of its own module and of modules inside it."""

    def hook(model: Any) -> None:
        for block in model.blocks:
            block.register_forward_pre_hook(lambda m, args: seen.append(m.down.weight.norm().item()))
            block.register_forward_hook(lambda m, args, out: seen.append(m.up.weight.norm().item()))
            block.up.register_forward_hook(lambda m, args, out: seen.append(m.weight.sum().item()))
            block.register_full_backward_hook(
                lambda m, gi, go: seen.append((go[0].norm().item(), m.down.weight.norm().item()))
            )
            block.down.register_full_backward_pre_hook(lambda m, go: seen.append(m.weight.abs().max().item()))
            block.up.weight.register_hook(lambda grad: seen.append(grad.norm().item()))
            block.up.weight.register_post_accumulate_grad_hook(
                lambda p: seen.append((p.grad.norm().item(), p.norm().item()))
            )

    return hook


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("checkpointing", ["", "nonreentrant"])
def test_hooks_that_read_weights(checkpointing: str, when: str, served: Served) -> None:
    def script(attach: Attach) -> Any:
        seen: list[Any] = []
        options: dict[str, Any] = {when: hooked(seen)}
        return trained(attach, lambda: BlockModel(checkpointing=checkpointing), **options), seen

    served.same(script)


class Buffered(BlockModel):
    """Counters, running statistics, batch normalisation: buffers that forwards change."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(48))
        self.normalise = nn.BatchNorm1d(48)
        self.count: torch.Tensor
        self.mean: torch.Tensor

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.count += 1
        h = self.normalise(self.embed(tokens).transpose(1, 2)).transpose(1, 2)
        for block in self.blocks:
            h = block(h)
        self.mean.mul_(0.9).add_(h.detach().mean((0, 1)))
        return self.head(h)  # type: ignore[no-any-return]


def averaged_by_hand(model: Any, optimizer: torch.optim.Optimizer) -> Any:
    """What a data-parallel wrapper does: gradients as one flat bucket and back, parameters written, buffers read."""
    grads = [p.grad for p in model.parameters()]
    flat = torch._utils._flatten_dense_tensors(grads)
    flat /= 2
    for grad, part in zip(grads, torch._utils._unflatten_dense_tensors(flat, grads), strict=True):
        grad.copy_(part)
    for parameter in model.parameters():
        parameter.data.copy_(parameter.data.clone())
    return flat.clone(), [buffer.clone() for buffer in model.buffers()]


def test_buffers_and_buckets(served: Served) -> None:
    served.same(lambda attach: trained(attach, Buffered, each=averaged_by_hand))


def deep_copies(model: Any, optimizer: torch.optim.Optimizer) -> Any:
    """A copy of both trains on its own."""
    twin, its_optimizer = copy.deepcopy((model, optimizer))
    assert all(type(p) is nn.Parameter for p in twin.parameters())
    return train(twin, its_optimizer, batches(9), 2), weights(twin), its_optimizer.state_dict()


def pickles(model: Any, optimizer: torch.optim.Optimizer) -> Any:
    twin, its_optimizer = pickle.loads(pickle.dumps((model, optimizer)))
    return train(twin, its_optimizer, batches(9), 2), weights(twin), its_optimizer.state_dict()


def saved_whole(model: Any, optimizer: torch.optim.Optimizer) -> Any:
    file = io.BytesIO()
    torch.save((model, optimizer), file)
    file.seek(0)
    twin, its_optimizer = torch.load(file, weights_only=False)
    return train(twin, its_optimizer, batches(9), 2), weights(twin), its_optimizer.state_dict()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("made", [deep_copies, pickles, saved_whole])
def test_copies_train_on_their_own(made: Callable[..., Any], tied: bool, served: Served) -> None:
    served.same(lambda attach: trained(attach, lambda: BlockModel(tied=tied), each=made))


class Plain(nn.Module):
    """A wrapper that only passes on, as data-parallel wrappers do."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.module(tokens)  # type: ignore[no-any-return]


def test_wrapped_after_attach(served: Served) -> None:
    """Saved and loaded under the wrapper's names."""

    def script(attach: Attach) -> Any:
        torch.manual_seed(0)
        model = BlockModel()
        wrapper = Plain(model)
        optimizer, data = torch.optim.AdamW(wrapper.parameters(), lr=3e-3), batches(1)
        job = attach(model, optimizer)
        seen: list[Any] = [train(wrapper, optimizer, data)]
        saved = {name: tensor.clone() for name, tensor in wrapper.state_dict().items()}
        wrapper.load_state_dict({name: tensor * 0.5 for name, tensor in saved.items()})
        seen += [saved, train(wrapper, optimizer, data, 1)]
        job.detach()
        return seen, weights(model)

    served.same(script)


@pytest.fixture
def _process_group() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("_process_group")
@pytest.mark.parametrize("order", ["wrapped, then attached", "wrapped, then the inside attached", "attached, unsynced"])
def test_distributed_data_parallel(order: str, served: Served) -> None:
    def script(attach: Attach) -> Any:
        torch.manual_seed(0)
        model = BlockModel()
        optimizer, data = torch.optim.AdamW(model.parameters(), lr=3e-3), batches(1)
        if order.startswith("attached"):
            job = attach(model, optimizer)
            wrapped = nn.parallel.DistributedDataParallel(model, init_sync=False)
        else:
            wrapped = nn.parallel.DistributedDataParallel(model)
            job = attach(model if "inside" in order else wrapped, optimizer)
        seen = train(wrapped, optimizer, data)
        job.detach()
        return seen, weights(model), copy.deepcopy(optimizer.state_dict())

    served.same(script)


@pytest.mark.usefixtures("_process_group")
def test_distributed_data_parallel_that_sends_managed_parameters_is_refused(served: Served) -> None:
    model = BlockModel()
    with served.with_options(spills=False) as other:
        other.attach(model)
        with pytest.raises(tiermem.errors.Unsupported, match="make it before attach"):
            nn.parallel.DistributedDataParallel(model)


def test_the_text_of_what_is_inside_reads_nothing(served: Served) -> None:
    """Debuggers and error reports print local variables, at any moment."""
    model = BlockModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with served.with_options(spills=False) as other:
        job = tiermem.attach(model, optimizer, dram="1MiB", endpoint=served.daemon.endpoint, job="text")
        other.jobs.append(job)
        train(model, optimizer, batches(1), 1)
        job.flush()
        demands = job.stats().residency.demands
        assert repr(job).startswith("Job(name='text'")
        assert len(repr(list(job.storages.values()))) > 0
        assert job.updater is not None
        assert len(repr([update.pieces for update in job.updater.updates])) > 0
        assert job.stats().residency.demands == demands


@pytest.mark.parametrize("dram", ["1MiB", "8MiB"], ids=["spilled", "resident"])
def test_touching_what_a_closed_job_has_taken_along_is_a_typed_error(dram: str, served: Served) -> None:
    model = BlockModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with served.with_options(dram=dram, spills=False) as other:
        other.attach(model, optimizer)
        train(model, optimizer, batches(1), 1)
    touches: list[Callable[[], Any]] = [
        lambda: model.head.weight.sum(), lambda: model(torch.zeros(1, 4, dtype=torch.long)), model.state_dict,
        optimizer.state_dict, lambda: repr(model.head.weight), lambda: model.head.weight.grad.norm(),  # type: ignore[union-attr]
        optimizer.step,
    ]  # fmt: skip
    for touch in touches:
        with pytest.raises(tiermem.errors.DaemonUnavailable, match="was closed"):
            touch()
