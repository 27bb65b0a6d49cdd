"""The oracle for activations: kept, recomputed, offloaded or mixed, every loss, gradient, parameter and state is that
of the plain script.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
import json
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tiermem
from tests.integration.daemon_process import REPOSITORY, environment
from tests.integration.scripts import BlockModel, NoLists, Script, batches, compare, default_loss, run
from tests.integration.test_oracle import adamw, around, clip, gpt2, llama, sgd
from tiermem.errors import DaemonUnavailable, InvalidArgument, Unsupported
from tiermem_client.activations import _Saved

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # torch.compile's own use of torch.jit
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]


def long(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Activations are above the size from which they are offloaded."""
    return default_loss(model, batch.repeat(32, 1))


SCRIPTS: dict[str, Script] = {
    "blocks": Script(BlockModel, adamw()),
    "blocks with dropout, tied": Script(lambda: BlockModel(tied=True, dropout=0.2), adamw(fused=True), clip=clip),
    "a parameter used around its blocks": Script(lambda: BlockModel(around=True), adamw()),
    "llama": Script(llama(True), adamw()),
    "gpt2 with dropout": Script(gpt2, adamw()),
    "checkpointed, not reentrant": Script(llama(False, False), adamw()),
    "checkpointed, reentrant, dropout": Script(around("reentrant"), adamw()),
    "bf16 autocast": Script(BlockModel, adamw(), autocast=True),
    "accumulation": Script(BlockModel, sgd(momentum=0.9), microbatches=3),
    "no ModuleList": Script(NoLists, adamw()),
}
MIXED = {"*.0": "keep", "*.1": "recompute", "*.2": "offload", "*": "offload"}
CHOICES: dict[str, Any] = {"keep": "keep", "recompute": "recompute", "offload": "offload", "mixed": MIXED}


def managed(script: Script, activations: Any, dram: str = "3MiB") -> Script:
    return dataclasses.replace(script, dram=dram, loss=long, attach_options={"activations": activations})


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("name", SCRIPTS)
def test_bit_for_bit(name: str, choice: str, tmp_path: Path) -> None:
    if choice == "mixed" and name == "no ModuleList":
        pytest.skip("it has no units with numbers")
    script = managed(SCRIPTS[name], CHOICES[choice])
    plain = run(script, attached=False)
    ours = run(script, attached=True, flash=str(tmp_path / "flash"))
    assert compare(plain, ours) == []
    assert ours.stats is not None
    stats = ours.stats.activations
    if choice in ("offload", "mixed"):
        assert stats.restored_bytes > 0
        assert stats.kept_bytes == 0
        assert stats.stored_bytes == 0, "the graph is gone, and its bytes are not"
    if choice in ("recompute", "mixed") and name in ("blocks", "llama", "gpt2 with dropout"):
        assert stats.recomputed > 0


WITH = {
    "updates inside backward": {"optimizer_in_backward": True},
    "updates inside step": {"deferred": False},
    "all by itself": {},
}


@pytest.mark.parametrize("dram", ["2MiB", "64MiB"])
@pytest.mark.parametrize("activations", ["recompute", "offload"])
@pytest.mark.parametrize("options", WITH)
def test_with_every_way_to_update(options: str, activations: str, dram: str, tmp_path: Path) -> None:
    script = managed(Script(lambda: BlockModel(around=True, dropout=0.1), adamw(), steps=8), activations, dram)
    script = dataclasses.replace(
        script, keeps_grads=False, attach_options={"activations": activations, **WITH[options]}
    )
    plain = run(script, attached=False)
    ours = run(script, attached=True, flash=str(tmp_path / "flash"))
    assert compare(plain, ours) == []
    assert ours.stats is not None
    assert ours.stats.activations.kept_bytes == 0


# -- one graph, looked at closely


class Graph:
    """A model with and without tiermem, and the same inputs."""

    def __init__(
        self,
        flash: Path,
        activations: Any = "offload",
        model: Callable[[], nn.Module] = BlockModel,
        prepare: Callable[[Any], None] = lambda model: None,
        **options: Any,
    ) -> None:
        torch.manual_seed(0)
        self.plain: Any = model()
        self.ours: Any = copy.deepcopy(self.plain)
        prepare(self.plain)
        prepare(self.ours)
        optimizer = torch.optim.SGD(self.ours.parameters())
        options = {"dram": "3MiB", "flash": flash, "endpoint": "embedded", "activations": activations, **options}
        self.job = tiermem.attach(self.ours, optimizer, **options)
        self.batch = next(batches(1))

    def same_gradients(self) -> bool:
        pairs = zip(self.plain.parameters(), self.ours.parameters(), strict=True)
        return all(torch.equal(a.grad, b.grad.clone()) for a, b in pairs)


@pytest.fixture
def flash(tmp_path: Path) -> Path:
    return tmp_path / "flash"


def test_a_retained_graph_has_its_bytes_for_every_backward(flash: Path) -> None:
    graph = Graph(flash)
    for model in (graph.plain, graph.ours):
        loss = long(model, graph.batch)
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        loss.backward()
    assert graph.same_gradients()
    del loss
    graph.job.flush()
    stats = graph.job.stats()
    assert stats.activations.stored_bytes == 0
    assert stats.bytes_by_kind.get("activation", 0) == 0
    graph.job.detach()


def test_a_graph_that_is_dropped_leaves_nothing(flash: Path) -> None:
    graph = Graph(flash)
    loss = long(graph.ours, graph.batch)
    graph.job.flush()
    stats = graph.job.stats()
    assert 1 << 20 < stats.activations.stored_bytes <= stats.bytes_by_kind["activation"]
    del loss
    graph.job.flush()
    stats = graph.job.stats()
    assert stats.activations.stored_bytes == 0
    assert stats.activations.restored_bytes == 0
    graph.job.detach()


@pytest.mark.parametrize("activations", ["offload", "recompute"])
def test_a_gradient_of_a_gradient(activations: str, flash: Path) -> None:
    graph = Graph(flash, activations)
    for model in (graph.plain, graph.ours):
        hidden = torch.randn(320, 48, generator=torch.Generator().manual_seed(3), requires_grad=True)
        out = model.blocks[1](hidden).square().sum()
        (gradient,) = torch.autograd.grad(out, hidden, create_graph=True)
        gradient.square().sum().backward()
        model.seen = hidden.grad
    assert torch.equal(graph.plain.seen, graph.ours.seen)
    graph.job.detach()


@pytest.mark.parametrize("activations", ["recompute", "offload"])
def test_a_forward_and_a_backward_that_raise_leave_nothing(activations: str, flash: Path) -> None:
    graph = Graph(flash, activations)

    def fail(*args: Any) -> None:
        raise OSError("no more")

    in_forward = graph.ours.blocks[3].down.register_forward_hook(fail)
    with pytest.raises(OSError, match="no more"):
        long(graph.ours, graph.batch)
    in_forward.remove()
    loss = long(graph.ours, graph.batch)
    in_backward = graph.ours.blocks[1].norm.weight.register_hook(fail)
    with pytest.raises(OSError, match="no more"):
        loss.backward()
    in_backward.remove()
    del loss
    graph.ours.zero_grad()
    for model in (graph.plain, graph.ours):
        long(model, graph.batch).backward()
    assert graph.same_gradients()
    graph.job.flush()
    stats = graph.job.stats()
    assert (stats.activations.stored_bytes, stats.leases) == (0, 0)
    graph.job.detach()


def test_a_graph_that_outlives_its_job_says_so(flash: Path) -> None:
    graph = Graph(flash)
    loss = long(graph.ours, graph.batch)
    graph.job.detach()
    with pytest.raises(DaemonUnavailable, match="was closed"):
        loss.backward()


class InPlace(nn.Module):
    """Changes what it has saved, where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64))
        self.inner = nn.Linear(64, 64)
        self.spoil = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x * self.weight
        out = torch.exp(h)
        squares = out * out
        if self.spoil:
            out.add_(1)
        relu = torch.relu_(squares * 2)
        return self.inner(relu).sum()  # type: ignore[no-any-return]


def test_a_saved_tensor_that_is_changed_in_place_is_refused_as_by_torch(flash: Path) -> None:
    graph = Graph(flash, model=InPlace)
    inputs = torch.randn(512, 64)
    for model in (graph.plain, graph.ours):
        model(inputs).backward()
    assert graph.same_gradients()
    for model in (graph.plain, graph.ours):
        model.spoil = True
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            model(inputs).backward()
    graph.job.detach()


class Rewritten(nn.Module):
    """Two tensors of one storage and version number, with counters and bytes of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        first = x * self.weight
        other = x.data
        other.mul_(2)
        return (first + other.data * self.weight).sum()


def test_bytes_that_were_changed_past_the_version_are_those_of_all_who_saved_them(flash: Path) -> None:
    graph = Graph(flash, model=Rewritten)
    inputs = torch.randn(512, 64)
    for model in (graph.plain, graph.ours):
        model(inputs).backward()
    assert graph.same_gradients()
    graph.job.flush()
    assert graph.job.stats().activations.stored_bytes == 0
    graph.job.detach()


def test_every_byte_goes_and_comes_once(flash: Path) -> None:
    graph = Graph(flash, {"blocks.1": "offload"})
    tokens, width = graph.batch.repeat(32, 1).numel(), 48
    long(graph.ours, graph.batch).backward()
    graph.job.flush()
    stats = graph.job.stats().activations
    # Saved: its input, which the residual saves too, the norm's output, and both sides of the activation function.
    assert stats.offloaded_bytes == stats.restored_bytes == stats.dropped_bytes == tokens * width * 4 * (1 + 1 + 4 + 4)
    graph.job.detach()


def test_what_several_nodes_have_saved_comes_once(flash: Path) -> None:
    """Query, key and value are projections of one tensor, and so are gate and up."""
    graph = Graph(flash, {"model.layers.*": "offload"}, model=llama(True))
    for model in (graph.plain, graph.ours):
        long(model, graph.batch).backward()
    assert graph.same_gradients()
    stats = graph.job.stats().activations
    assert 0 < stats.restored_bytes <= stats.offloaded_bytes
    graph.job.detach()


def test_copies_for_backward_do_not_stay(flash: Path) -> None:
    graph = Graph(flash)
    loss = long(graph.ours, graph.batch)
    loss.backward(retain_graph=True)
    found = [o for o in gc.get_objects() if type(o) is _Saved]
    assert len(found) > 20
    assert not any(saved.copy is not None for saved in found)
    del found, loss
    graph.job.detach()


def test_a_cache_of_keys_stays_as_the_forward_has_left_it(flash: Path) -> None:
    graph = Graph(flash, "recompute", model=llama(True))
    out = graph.ours(graph.batch)
    before = [layer.keys.shape for layer in out.cache.layers]
    out.logits.sum().backward()
    assert [layer.keys.shape for layer in out.cache.layers] == before
    graph.job.detach()


def test_a_small_part_of_a_large_storage_is_saved_alone(flash: Path) -> None:
    graph = Graph(flash, model=InPlace)
    for model in (graph.plain, graph.ours):
        rows = torch.randn(1 << 16, 64, generator=torch.Generator().manual_seed(2))  # 16 MiB
        loss = model(rows[100:612])
        del rows
        loss.backward()
    assert graph.same_gradients()
    assert graph.job.stats().activations.offloaded_bytes < 1 << 20
    graph.job.detach()


def test_lengths_that_come_again_need_no_new_forms(flash: Path) -> None:
    graph = Graph(flash)
    forms = []
    for lengths in (range(64, 128, 9), range(64, 128, 9)):
        for length in lengths:
            for model in (graph.plain, graph.ours):
                default_loss(model, graph.batch.repeat(length, 1)).backward()
        forms.append(graph.job.residency._specs)
    assert graph.same_gradients()
    assert forms[0] == forms[1]
    assert graph.job.stats().activations.stored_bytes == 0
    graph.job.detach()


def test_without_room_tensors_stay_in_memory_and_it_is_said(flash: Path) -> None:
    graph = Graph(f"{flash}:8MiB", dram="3MiB")  # type: ignore[arg-type]
    for _ in range(3):
        for model in (graph.plain, graph.ours):
            default_loss(model, graph.batch.repeat(96, 1)).backward()
        assert graph.same_gradients()
    stats = graph.job.stats()
    assert stats.activations.kept_bytes > 0
    assert stats.activations.restored_bytes > 0
    assert [text for text in stats.fallbacks if text.startswith("activations:") and "kept in memory" in text]
    graph.job.detach()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_a_recomputed_model_is_plain(copied: Any, flash: Path) -> None:
    graph = Graph(flash, "recompute")
    block = graph.ours.blocks[0]
    twin = copied(block)
    assert twin.forward.__func__ is type(block).forward
    assert twin.forward.__self__ is twin
    graph.job.detach()
    assert "forward" not in block.__dict__


@pytest.fixture(scope="module")
def compiler() -> Iterator[None]:
    torch.compile(lambda x: x + 1, backend="aot_eager")(torch.ones(1))  # what torch keeps for the whole process
    yield
    torch._dynamo.reset()


def compile_blocks(model: Any) -> None:
    for block in model.blocks:
        block.compile(backend="aot_eager")


def test_compiled_blocks_are_offloaded(compiler: None, flash: Path) -> None:
    graph = Graph(flash, prepare=compile_blocks)
    for _ in range(2):
        for model in (graph.plain, graph.ours):
            long(model, graph.batch).backward()
    assert graph.same_gradients()
    stats = graph.job.stats().activations
    assert stats.restored_bytes > 0
    graph.job.detach()


def test_compiled_blocks_are_not_recomputed(flash: Path) -> None:
    with pytest.raises(Unsupported, match=r"'blocks\.0' is compiled, and what runs again"):
        Graph(flash, "recompute", prepare=compile_blocks)


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(64)
        self.head = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(x)).sum()  # type: ignore[no-any-return]


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Counts() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(block(x) for block in self.blocks)  # type: ignore[no-any-return]


def test_a_forward_that_changes_buffers_is_not_recomputed(flash: Path) -> None:
    graph = Graph(flash, "recompute", model=Counting)
    with pytest.raises(Unsupported, match=r"'blocks\.0' changes its buffer 'norm\.num_batches_tracked'"):
        graph.ours(torch.randn(512, 64))
    graph.job.detach()


def test_what_the_model_checkpoints_itself_is_not_recomputed_twice(flash: Path) -> None:
    graph = Graph(flash, "recompute", model=around("nonreentrant"))
    torch.manual_seed(5)
    long(graph.plain, graph.batch).backward()
    torch.manual_seed(5)
    long(graph.ours, graph.batch).backward()
    assert graph.same_gradients()
    stats = graph.job.stats()
    assert stats.activations.recomputed == 0
    told = [text for text in stats.fallbacks if "is recomputed by the model's own checkpointing" in text]
    assert len(told) == 1
    graph.job.detach()


REFUSED = [
    ("swap", "activations of '\\*' is 'swap'; give 'keep' | 'recompute' | 'offload'"),
    ({"blocks.9": "keep"}, r"'blocks\.9', which matches no unit; the units are 'blocks\.0'"),
    ({"blocks.0": "drop"}, r"activations of 'blocks\.0' is 'drop'"),
    ({3: "keep"}, "names the unit 3; give unit names"),
    (7, "activations=7 is neither a policy"),
    ({"embed": "recompute"}, "'embed' are to be recomputed, but it has nothing inside"),
]


@pytest.mark.parametrize(("activations", "message"), REFUSED)
def test_refusals(activations: Any, message: str, flash: Path) -> None:
    with pytest.raises(InvalidArgument, match=message.replace("|", r"\|")):
        Graph(flash, activations)


def test_offloading_from_a_device_is_refused(flash: Path) -> None:
    with pytest.raises(Unsupported, match="offloaded from host memory only"):
        Graph(flash, "offload", device="emulated:2MiB")


# -- memory

TRAINER = """
import hashlib, json, resource, sys
import torch
import tiermem
from tests.integration.scripts import BlockModel, default_loss
mode, flash, room = sys.argv[1], sys.argv[2], int(sys.argv[3])
torch.set_num_threads(1)
torch.manual_seed(0)
model = BlockModel(width=64, blocks=12, dropout=0.1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
job = None
if mode != "plain":
    job = tiermem.attach(model, optimizer, dram="24MiB", flash=flash, endpoint="embedded", activations=mode)
[used] = [int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("VmData")]
if room:
    resource.setrlimit(resource.RLIMIT_DATA, (used + room, used + room))
batch = (torch.arange(16384).view(16, 1024) * 7) % 64
losses = []
for step in range(2):
    optimizer.zero_grad()
    loss = default_loss(model, batch)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
digest = hashlib.sha256()
for parameter in model.parameters():
    digest.update(parameter.detach().clone().view(-1).view(torch.uint8).numpy())
print(json.dumps([losses, digest.hexdigest()]))
if job is not None:
    job.detach()
"""
ROOM_BYTES = 220 << 20


def train(mode: str, flash: Path, room_bytes: int) -> Any:
    command = [sys.executable, "-c", TRAINER, mode, str(flash), str(room_bytes)]
    where: dict[str, Any] = {"cwd": REPOSITORY, "env": environment()}
    return subprocess.run(command, **where, capture_output=True, text=True, check=False, timeout=300)


def test_a_sequence_that_does_not_fit_into_memory_trains(flash: Path) -> None:
    """Half a gigabyte is saved for backward, and there is room for less than half of it."""
    plain = train("plain", flash, 0)
    assert plain.returncode == 0, plain.stderr[-2000:]
    for mode in ("plain", "keep"):
        died = train(mode, flash, ROOM_BYTES)
        assert died.returncode != 0
        assert "can't allocate memory" in died.stderr
    for mode in ("offload", "recompute"):
        ours = train(mode, flash, ROOM_BYTES)
        assert ours.returncode == 0, ours.stderr[-2000:]
        assert json.loads(ours.stdout) == json.loads(plain.stdout)
