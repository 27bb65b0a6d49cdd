"""What people who offload training run into: one test for each row of the collected public reports that concerns the
hook, named by its row, from the right value. Rows of which another test is the whole story:

row 4    two daemons on one directory   test_faults_daemon: test_a_second_daemon_on_a_directory_is_refused
row 9    no room on the disk            test_faults_disk: test_a_disk_that_really_is_full, ..._has_room_again
row 11   bytes lost or changed on disk  test_faults_disk: test_bytes_changed_on_the_disk_are_data_loss, ..._zeroed_...
row 23   a checkpoint costs a copy      test_memory: test_checkpoints_make_no_anonymous_copy
row 51   hooks and torch.compile        test_compile
row 59   fork with a live channel       test_dataloader: test_forked_children, test_loader_workers
row 61   a killed client                test_faults_trainer: test_kill_9_in_the_middle_of_a_step_frees_everything
row 63   the daemon ends under a client test_faults_daemon: test_kill_9_...
"""

from __future__ import annotations

import contextlib
import copy
import io
import itertools
import json
import math
import pickle
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

import tiermem
from tests.integration.daemon_process import REPOSITORY, environment, within
from tests.integration.scripts import VOCAB, BlockModel, batches, default_loss, differences
from tests.integration.served import Attach, Served, served_in, train, weights


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served_in(tmp_path_factory.mktemp("daemon")) as running:
        yield running


@pytest.fixture
def attach(served: Served) -> Iterator[Callable[..., tiermem.Job]]:
    """Attach as a job with a name of its own; closed after the test."""
    with served.with_options(spills=False) as other:
        yield other.attach  # type: ignore[misc]


def made(**options: Any) -> tuple[BlockModel, torch.optim.Optimizer, Iterator[torch.Tensor]]:
    torch.manual_seed(0)
    model = BlockModel(**options)
    return model, torch.optim.AdamW(model.parameters(), lr=3e-3), batches(1)


class Scale(nn.Module):
    """One weight w of n elements, and sum(w * x): the gradient is x."""

    def __init__(self, n: int = 1000) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(n))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).sum()


def test_row_3_two_models_of_one_shape_do_not_share_a_place(attach: Callable[..., tiermem.Job]) -> None:
    """They once shared a file by its name: the same names and shapes, other values."""
    models = [BlockModel() for _ in range(2)]
    before = [weights(model) for model in models]
    jobs = [attach(model, torch.optim.SGD(model.parameters(), lr=0.1)) for model in models]
    for job in reversed(jobs):
        job.detach()
    assert [differences(a, weights(m)) for a, m in zip(before, models, strict=True)] == [[], []]
    assert not torch.equal(models[0].head.weight, models[1].head.weight)


def test_row_5_running_again_leaves_as_many_files_as_running_once(served: Served, attach: Any) -> None:
    left = []
    for _ in range(3):
        model, optimizer, data = made()
        job = attach(model, optimizer)
        train(model, optimizer, data, 1)
        assert len(served.daemon.segments()) > 0
        job.detach()
        within(2.0, served.daemon.left_of_jobs)
        left.append(len(served.daemon.segments()))
    assert left == [0, 0, 0]


DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.int64, torch.uint8, torch.bool,
    torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip
SHAPES: list[tuple[int, ...]] = [(), (0,), (0, 3), (1,), (7, 5), (3, 1, 2)]


class EveryForm(BlockModel):
    """Beside its blocks, a parameter of every dtype and shape; those that can have gradients take part."""

    def __init__(self) -> None:
        super().__init__()
        for dtype, shape in itertools.product(DTYPES, SHAPES):
            differentiable = dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64)
            value = torch.randn(shape).to(dtype) if differentiable else torch.rand(shape).mul(5).to(dtype)
            name = f"{dtype}_{'x'.join(map(str, shape))}".replace(".", "_")
            self.register_parameter(name, nn.Parameter(value, requires_grad=differentiable))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        own = [p for p in self._parameters.values() if p is not None and p.requires_grad]
        return super().forward(tokens) * (1 + 1e-3 * torch.stack([p.abs().sum().float() for p in own]).sum())


def test_row_18_every_dtype_and_shape(served: Served) -> None:
    def script(attach: Attach) -> Any:
        torch.manual_seed(0)
        model = EveryForm()
        optimizer, data = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9), batches(1)
        job = attach(model, optimizer)
        seen: list[Any] = [train(model, optimizer, data)]
        assert all(loss.isfinite() for loss in seen[0])
        seen.append({k: v.view(torch.uint8) if v.dtype.itemsize == 1 else v for k, v in model.state_dict().items()})
        model.load_state_dict(copy.deepcopy(model.state_dict()))
        job.detach()
        own = {k: v.view(torch.uint8) if v.dtype.itemsize == 1 else v for k, v in weights(model).items()}
        return seen, own, copy.deepcopy(optimizer.state_dict())

    served.same(script)


def test_row_19_what_is_said_to_be_on_disk_was_written_and_read(served: Served, attach: Any) -> None:
    """A "disk" mode once ran in memory only. The counters, and the kernel's own of the daemon."""
    model, optimizer, data = made()
    read, written = served.daemon.disk_bytes()
    job = attach(model, optimizer)
    train(model, optimizer, data, 2)
    links = job.stats().links
    state_bytes = 3 * sum(4 * p.numel() for p in model.parameters())
    arena_bytes = job.stats().tiers["dram"].capacity_bytes
    assert state_bytes > arena_bytes
    assert links["dram_to_flash"].bytes >= state_bytes - arena_bytes
    assert links["flash_to_dram"].bytes >= state_bytes - arena_bytes
    now_read, now_written = served.daemon.disk_bytes()
    assert now_read - read >= 0.9 * links["flash_to_dram"].bytes
    assert now_written - written >= 0.9 * links["dram_to_flash"].bytes


TWO_TRAINERS = """
    import json, os, re, sys
    import safetensors.torch, torch
    import tiermem
    from tests.integration.scripts import BlockModel, batches
    from tests.integration.served import train, weights

    path, name, endpoint = sys.argv[1:]
    torch.manual_seed(0)
    opened = []
    sys.addaudithook(lambda event, args: opened.append(args[0]) if event == "open" and args[0] == path else None)

    def private_dirty_bytes():
        whole = open("/proc/self/smaps").read()
        of_file = [part for part in re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", whole) if path in part.split("\\n")[0]]
        return sum(1024 * int(re.search(r"Anonymous: +(\\d+)", part)[1]) for part in of_file)

    model = BlockModel(128, 8)
    model.load_state_dict(safetensors.torch.load_file(path), assign=True)
    for key, parameter in model.named_parameters():
        parameter.requires_grad_(key.startswith("head."))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    frozen = sum(p.nbytes for p in model.parameters() if not p.requires_grad)
    of_base = private_dirty_bytes()
    loads = len(opened)
    job = None if endpoint == "plain" else tiermem.attach(model, optimizer, dram="1MiB", endpoint=endpoint, job=name)
    attached = opened[loads:]
    print("ready", flush=True)
    sys.stdin.readline()
    losses = [loss.item() for loss in train(model, optimizer, batches(int(name[-1])))]
    seen = {"losses": losses, "frozen": frozen, "anonymous": of_base, "opened": len(attached)}
    if job is not None:
        stats = job.stats()
        seen |= {"adopted": stats.adopted_file_bytes, "fallbacks": stats.fallbacks}
        seen |= {"mapped": path in open("/proc/self/maps").read()}
        seen |= {"links": {key: link.bytes for key, link in stats.links.items()}, "kinds": stats.bytes_by_kind}
        job.detach()
    seen["sums"] = [float(t.double().sum()) for t in weights(model).values()]
    print("result " + json.dumps(seen), flush=True)
"""


@pytest.mark.timeout(300)
def test_row_24_two_trainers_of_one_frozen_base(served: Served, tmp_path: Path) -> None:
    """Each of them once loaded a copy of its own, on disk and in memory. Here the base is written by neither, anonymous
    in neither, read by the daemon from the one file; each job has its own DRAM
    for what it uses at the moment (at most its arena).
    """
    torch.manual_seed(0)
    path = tmp_path / "base.safetensors"
    safetensors.torch.save_file(BlockModel(128, 8).state_dict(), path)
    before = path.read_bytes()

    def run(*endpoints: str) -> list[dict[str, Any]]:
        """All at once: each waits with its job attached until the others are."""
        with contextlib.ExitStack() as stack:
            processes = []
            for number, endpoint in enumerate(endpoints, 1):
                arguments = [sys.executable, "-c", textwrap.dedent(TWO_TRAINERS), str(path), f"rank-{number}", endpoint]
                processes.append(
                    stack.enter_context(
                        subprocess.Popen(
                            arguments, cwd=REPOSITORY, env=environment(),
                            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                        )
                    )
                )  # fmt: skip
                stack.callback(processes[-1].kill)
            for process in processes:
                assert process.stdout is not None
                assert process.stdout.readline() == "ready\n"
            if "plain" not in endpoints:
                open_by_daemon = [name for name in served.daemon.files() if "base.safetensors" in name]
                assert len(open_by_daemon) == len(endpoints), "one descriptor of the one file for each job"
            answers = [process.communicate("go\n", timeout=100)[0] for process in processes]
            return [json.loads(answer.removeprefix("result ")) for answer in answers]

    written = served.daemon.stats().directories[0].written_bytes
    managed, plain = run(*[served.daemon.endpoint] * 2), run("plain", "plain")
    for ours, theirs in zip(managed, plain, strict=True):
        assert (ours["losses"], ours["sums"]) == (theirs["losses"], theirs["sums"])
        assert ours["adopted"] == ours["frozen"] > 3 << 20
        assert ours["fallbacks"] == []
        assert ours["anonymous"] == 0
        assert not ours["mapped"], "its own mapping of the base is kept beside the arena"
        assert ours["opened"] == 1, "opened for the daemon, and compared and hashed in the same pass"
        assert ours["links"]["flash_to_dram"] > ours["adopted"]
    trained = [sum(ours["kinds"].values()) - ours["kinds"]["param"] for ours in managed]
    frame = 8192
    together = served.daemon.stats().directories[0].written_bytes - written
    assert together <= sum(5 * (2 * size + 8 * frame) for size in trained), "more than the trained part was written"
    assert together < sum(ours["adopted"] for ours in managed) / 2
    assert path.read_bytes() == before


def test_row_26_every_weight_is_updated(attach: Callable[..., tiermem.Job]) -> None:
    """Offloaded models once "trained" without ever changing."""
    model, optimizer, data = made()
    before = weights(model)
    job = attach(model, optimizer)
    train(model, optimizer, data, 1)
    assert [name for name, p in model.named_parameters() if torch.equal(p, before[name])] == []
    assert [name for name, tensor in model.state_dict().items() if torch.equal(tensor, before[name])] == []
    assert [name for name, p in model.named_parameters() if p.grad is None] == []
    job.detach()
    assert [name for name, p in model.named_parameters() if torch.equal(p, before[name])] == []


@pytest.mark.parametrize("order", ["optimizer, attach", "attach, optimizer", "attach without it, optimizer before"])
def test_row_27_optimizer_made_before_or_after(order: str, served: Served) -> None:
    """It keeps its references: the Parameter objects are the same ones for ever."""

    def script(attach: Attach) -> Any:
        torch.manual_seed(0)
        model = BlockModel(width=64, blocks=6)
        objects = list(model.parameters())
        if order.startswith("attach,"):
            job = attach(model)
            optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        else:
            optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
            job = attach(model) if "without" in order else attach(model, optimizer)
        seen = train(model, optimizer, batches(1))
        assert all(a is b for a, b in zip(objects, model.parameters(), strict=True))
        assert all(a is b for a, b in zip(objects, optimizer.param_groups[0]["params"], strict=True))
        job.detach()
        return seen, weights(model), copy.deepcopy(optimizer.state_dict())

    served.same(script)


def test_row_29_tied_weights_stay_one_tensor(attach: Callable[..., tiermem.Job]) -> None:
    tied, optimizer, data = made(tied=True)
    job = attach(tied, optimizer)
    stored = job.stats().bytes_by_kind["param"]
    pointer = tied.embed.weight.data_ptr()
    train(tied, optimizer, data, 2)
    assert tied.head.weight is tied.embed.weight
    assert tied.head.weight.data_ptr() == tied.embed.weight.data_ptr() == pointer
    saved = tied.state_dict()
    assert saved["head.weight"].data_ptr() == saved["embed.weight"].data_ptr() != 0
    assert len({p.data_ptr() for p in tied.parameters()}) == len(list(tied.parameters()))
    job.detach()
    assert tied.head.weight is tied.embed.weight
    assert torch.equal(saved["head.weight"], tied.embed.weight)
    untied, optimizer, _ = made()
    job = attach(untied, optimizer)
    assert job.stats().bytes_by_kind["param"] >= stored + 4 * untied.head.weight.numel()


def metadata(model: nn.Module) -> dict[str, Any]:
    return {n: (p.requires_grad, p.stride(), p.shape, p.dtype, p.is_leaf) for n, p in model.named_parameters()}


def test_row_30_metadata_and_the_identity_of_gradients(attach: Callable[..., tiermem.Job]) -> None:
    model, optimizer, data = made()
    model.blocks[0].requires_grad_(False)
    odd = nn.Parameter(torch.randn(48, 64).t(), requires_grad=False)  # column-major
    image = nn.Parameter(torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last))
    model.register_parameter("odd", odd)
    model.register_parameter("image", image)
    before = metadata(model)
    job = attach(model, optimizer)
    train(model, optimizer, data, 2)
    assert metadata(model) == before
    grad = model.head.weight.grad
    assert grad is not None
    assert model.head.weight.grad is grad
    norm = grad.norm().item()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    assert model.head.weight.grad is grad
    assert 0 < grad.norm().item() < norm
    optimizer.zero_grad(set_to_none=False)
    assert model.head.weight.grad is grad
    assert grad.norm().item() == 0
    assert all(p.grad is None for p in model.blocks[0].parameters())
    job.detach()
    assert metadata(model) == before


def test_row_31_gradients_accumulate(attach: Callable[..., tiermem.Job]) -> None:
    """1 + 2 + 3 is 6; an offload that overwrites has 3, and one that forgets has 2."""
    parts = [Scale(40_000), Scale(40_000), Scale(40_000)]
    model = nn.ModuleList(parts)
    attach(model, torch.optim.AdamW(model.parameters()))
    for factor in (1.0, 2.0, 3.0):
        torch.stack([part(torch.full((40_000,), factor)) for part in parts]).sum().backward()
    assert [part.weight.grad.unique().tolist() for part in parts if part.weight.grad is not None] == [[6.0]] * 3


def test_row_32_clipping_with_gradients_that_are_on_disk_or_absent(attach: Callable[..., tiermem.Job]) -> None:
    """The norm over all of them is sqrt(sum of squares), a part that has no gradient is passed over."""
    sizes = [60_000, 60_000, 60_000, 60_000]
    parts = [*(Scale(n) for n in sizes), Scale(5)]
    model = nn.ModuleList(parts)
    job = attach(model, torch.optim.SGD(model.parameters(), lr=1.0))
    torch.stack([part(torch.full((n,), 0.5)) for part, n in zip(parts, sizes, strict=False)]).sum().backward()
    grads_bytes = 4 * sum(sizes)
    job.flush()
    assert job.stats().bytes_by_kind["grad"] >= grads_bytes
    assert job.stats().tiers["dram"].capacity_bytes < grads_bytes + 4 * sum(sizes)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert norm.item() == pytest.approx(math.sqrt(0.25 * sum(sizes)), rel=1e-5)
    after = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    assert after.item() == pytest.approx(1.0, rel=1e-4)
    assert [p.grad is None for p in model.parameters()] == [False, False, False, False, True]
    torch.nn.utils.clip_grad_value_(model.parameters(), 1e-4)
    assert all(p.grad is None or p.grad.abs().max().item() <= 1e-4 for p in model.parameters())


def test_row_32_grad_scaler_finds_what_is_not_finite(attach: Callable[..., tiermem.Job]) -> None:
    """An infinite gradient in a single element of one of them: the step is skipped, and the scale halved."""
    parts = [Scale(60_000), Scale(60_000), Scale(60_000)]
    model = nn.ModuleList(parts)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    attach(model, optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    inputs = [torch.ones(60_000) for _ in parts]
    inputs[1][7] = float("inf")
    for skipped in (True, False):
        optimizer.zero_grad()
        scaler.scale(torch.stack([part(x) for part, x in zip(parts, inputs, strict=True)]).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        values = [part.weight.unique().tolist() for part in parts]
        assert values == [[1.0 if skipped else 0.0]] * 3
        assert scaler.get_scale() == 2.0
        inputs[1][7] = 1.0


def test_row_33_schedulers_get_the_users_optimizer(served: Served) -> None:
    def script(attach: Attach) -> Any:
        model, optimizer, data = made()
        job = attach(model, optimizer)
        assert type(optimizer) is torch.optim.AdamW
        warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2)
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
        schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, cosine], [2])
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        seen: list[Any] = []
        for _ in range(4):
            loss = train(model, optimizer, data, 1)[0]
            schedule.step()
            plateau.step(loss)
            seen.append((loss, optimizer.param_groups[0]["lr"]))
        job.detach()
        return seen, weights(model)

    served.same(script)


def test_row_33_frozen_parameters_in_the_optimizer(served: Served) -> None:
    def script(attach: Attach) -> Any:
        model, optimizer, data = made()
        model.blocks[1].requires_grad_(False)
        model.embed.requires_grad_(False)
        job = attach(model, optimizer)
        seen = train(model, optimizer, data, 2)
        model.blocks[1].requires_grad_(True)
        model.blocks[2].requires_grad_(False)
        seen += train(model, optimizer, data, 2)
        job.detach()
        return seen, weights(model), copy.deepcopy(optimizer.state_dict())

    served.same(script)


class Signs(torch.optim.Optimizer):
    """Somebody's own: a moving average, its sign, and a step count in the group."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr, "count": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["count"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    average = self.state[p].setdefault("average", torch.zeros_like(p))
                    average.mul_(0.9).add_(p.grad, alpha=0.1)
                    p.sub_(average.sign(), alpha=group["lr"] / group["count"])


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    **{
        cls.__name__: cls
        for cls in (
            torch.optim.Adadelta, torch.optim.Adafactor, torch.optim.Adagrad, torch.optim.Adam, torch.optim.Adamax,
            torch.optim.AdamW, torch.optim.ASGD, torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop,
            torch.optim.Rprop, torch.optim.SGD,
        )
    },
    "Muon": lambda ps: torch.optim.Muon([p for p in ps if p.ndim == 2], lr=1e-3),
    "Adam, amsgrad": lambda ps: torch.optim.Adam(ps, amsgrad=True),
    "SGD, fused": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, fused=True),
    "user-defined": Signs,
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_row_34_any_optimizer(name: str, served: Served) -> None:
    def script(attach: Attach) -> Any:
        torch.manual_seed(0)
        model = BlockModel(blocks=4, width=96)
        optimizer, data = OPTIMIZERS[name](list(model.parameters())), batches(1)
        job = attach(model, optimizer)
        seen = train(model, optimizer, data)
        job.detach()
        return seen, weights(model), copy.deepcopy(optimizer.state_dict())

    served.same(script)


def test_row_34_what_needs_a_closure_is_refused_at_attach(attach: Callable[..., tiermem.Job]) -> None:
    model = BlockModel(blocks=1)
    with pytest.raises(tiermem.errors.Unsupported, match="closure"):
        attach(model, torch.optim.LBFGS(model.parameters()))
    assert all(type(p) is nn.Parameter for p in model.parameters())


def test_row_34_step_with_a_closure_is_refused(attach: Callable[..., tiermem.Job]) -> None:
    model, optimizer, data = made(blocks=1)
    attach(model, optimizer)
    batch = next(data)

    def closure() -> float:
        loss = default_loss(model, batch)
        loss.backward()
        return float(loss)

    with pytest.raises(tiermem.errors.Unsupported, match=r"step\(closure\)"):
        optimizer.step(closure)


def test_row_35_frozen_weights_have_no_state_and_are_written_once(attach: Callable[..., tiermem.Job]) -> None:
    torch.manual_seed(0)
    model = BlockModel(width=96, blocks=5)
    model.requires_grad_(False)
    model.head.requires_grad_(True)
    trainable = sum(4 * p.numel() for p in model.parameters() if p.requires_grad)
    frozen = sum(4 * p.numel() for p in model.parameters() if not p.requires_grad)
    optimizer, data = torch.optim.AdamW(model.parameters(), lr=1e-3), batches(1)
    job = attach(model, optimizer)
    train(model, optimizer, data, 2)
    job.flush()
    first = job.stats()
    deadline_s = time.monotonic() + 5  # the daemon may not have read yet that an old state was replaced
    while first.bytes_by_kind["optim"] >= 2 * trainable + 4096 and time.monotonic() < deadline_s:
        first = job.stats()
    assert first.bytes_by_kind["optim"] < 2 * trainable + 4096
    assert first.bytes_by_kind["grad"] < trainable + 4096
    train(model, optimizer, data, 4)
    job.flush()
    last = job.stats()
    assert last.links["flash_to_dram"].bytes > first.links["flash_to_dram"].bytes + frozen // 2, "nothing was evicted"
    written = last.links["dram_to_flash"].bytes - first.links["dram_to_flash"].bytes
    assert written <= 4 * 4 * trainable < frozen, "frozen weights were written again"


def test_row_38_resumed_as_if_never_interrupted(attach: Callable[..., tiermem.Job]) -> None:
    """Learning rate, betas, the step count, and every loss after it; all through files, into new objects."""

    def begin() -> Any:
        model, _, data = made()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.8, 0.95))
        return model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7), data

    def go(model: Any, optimizer: Any, schedule: Any, data: Any, steps: int) -> list[Any]:
        seen = []
        for _ in range(steps):
            seen.append((train(model, optimizer, data, 1)[0].item(), schedule.get_last_lr()))
            schedule.step()
        return seen

    model, optimizer, schedule, data = begin()
    whole = go(model, optimizer, schedule, data, 6)
    expected = weights(model), copy.deepcopy(optimizer.state_dict())

    model, optimizer, schedule, data = begin()
    job = attach(model, optimizer)
    seen = go(model, optimizer, schedule, data, 3)
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict(), schedule.state_dict()], file)
    job.detach()

    model, optimizer, schedule, data = begin()
    for _ in range(3):
        next(data)
    job = attach(model, optimizer)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    schedule.load_state_dict(saved[2])
    assert optimizer.param_groups[0]["betas"] == (0.8, 0.95)
    assert {state["step"].item() for state in optimizer.state.values()} == {3.0}
    seen += go(model, optimizer, schedule, data, 3)
    job.detach()
    assert seen == whole
    assert differences(expected, (weights(model), copy.deepcopy(optimizer.state_dict()))) == []


def test_row_41_state_on_disk_is_saved_and_loaded(attach: Callable[..., tiermem.Job], tmp_path: Path) -> None:
    plain, plain_optimizer, data = made()
    train(plain, plain_optimizer, data)
    model, optimizer, data = made()
    job = attach(model, optimizer)
    train(model, optimizer, data)
    state_bytes = 2 * sum(4 * p.numel() for p in model.parameters())
    assert job.stats().tiers["dram"].used_bytes < state_bytes + sum(4 * p.numel() for p in model.parameters())
    safetensors.torch.save_file(model.state_dict(), tmp_path / "model.safetensors")
    flat = {
        f"{index}.{key}": value
        for index, values in optimizer.state_dict()["state"].items()
        for key, value in values.items()
    }
    safetensors.torch.save_file(flat, tmp_path / "optimizer.safetensors")
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    read = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert differences(dict(plain.state_dict()), {name: read[name] for name in plain.state_dict()}) == []
    assert differences(plain_optimizer.state_dict(), torch.load(tmp_path / "optimizer.pt")) == []
    loaded = safetensors.torch.load_file(tmp_path / "optimizer.safetensors")
    assert all(
        torch.equal(value, loaded[f"{index}.{key}"])
        for index, values in plain_optimizer.state_dict()["state"].items()
        for key, value in values.items()
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model.load_state_dict(safetensors.torch.load_file(tmp_path / "model.safetensors"))
    optimizer.load_state_dict(torch.load(tmp_path / "optimizer.pt"))
    job.detach()
    assert differences(weights(plain), weights(model)) == []
    assert differences(plain_optimizer.state_dict(), optimizer.state_dict()) == []


WAYS: dict[str, Callable[[Any], dict[str, torch.Tensor]]] = {
    "state_dict": lambda model: dict(model.state_dict()),
    "state_dict, kept attached to the graph": lambda model: dict(model.state_dict(keep_vars=True)),
    "deepcopy": lambda model: dict(copy.deepcopy(model).state_dict()),
    "pickle": lambda model: dict(pickle.loads(pickle.dumps(model)).state_dict()),
    "torch.save": lambda model: dict(_through_file(model).state_dict()),
    "named_parameters": lambda model: {n: p.detach().clone() for n, p in model.named_parameters()},
    "numpy": lambda model: {n: torch.from_numpy(p.detach().numpy().copy()) for n, p in model.named_parameters()},
}


def _through_file(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("way", WAYS)
def test_row_42_what_is_saved_is_the_weights(way: str, attach: Callable[..., tiermem.Job]) -> None:
    """Placeholders of shape (0,) were once saved, silently."""
    model, optimizer, _ = made()
    before = weights(model)
    attach(model, optimizer)
    saved = WAYS[way](model)
    assert list(saved) == list(before)
    assert [n for n, t in saved.items() if t.shape != before[n].shape or not torch.equal(t, before[n])] == []


def test_row_45_the_first_loss_is_that_of_the_weights(attach: Callable[..., tiermem.Job]) -> None:
    """Initialised after loading, a fine-tune once began from random weights: about log(vocabulary)."""
    model, optimizer, data = made()
    train(model, optimizer, itertools.repeat(next(data)), 20)
    batch = next(batches(1))
    with torch.no_grad():
        expected = default_loss(model, batch).item()
    attach(model, optimizer)
    first = default_loss(model, batch).item()
    assert first == expected < 0.7 * math.log(VOCAB)


class Boom(Exception):
    pass


class Fails(BlockModel):
    fails = False

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.embed(tokens)
        for index, block in enumerate(self.blocks):
            h = block(h)
            if self.fails and index == 2:
                raise Boom
        return self.head(h)  # type: ignore[no-any-return]


def test_row_47_nothing_stays_held_after_a_forward_or_backward_that_ended_early(served: Served) -> None:
    """A loss that is dropped, exceptions in forward and in backward: no lease is left, no hook is left on the stack,
    and the training that follows is right.
    """

    def script(attach: Attach) -> Any:
        torch.manual_seed(0)
        model = Fails(checkpointing="")
        optimizer, data = torch.optim.AdamW(model.parameters(), lr=3e-3), batches(1)
        job: Any = attach(model, optimizer)
        seen: list[Any] = [train(model, optimizer, data, 1)]
        default_loss(model, next(data))  # dropped with its graph
        Fails.fails = True
        with pytest.raises(Boom):
            model(next(data))
        Fails.fails = False
        out = model(next(data))
        out.register_hook(_raise)
        with pytest.raises(Boom):
            out.sum().backward()
        handle = model.blocks[1].register_full_backward_hook(_raise)
        with pytest.raises(Boom):
            default_loss(model, next(data)).backward()
        handle.remove()
        del out
        assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
        if isinstance(job, tiermem.Job):
            job.flush()
            with torch.no_grad():
                default_loss(model, batches(5).__next__())  # a later forward lets go of what backward held
            job.flush()
            assert job.stats().leases == 0
        seen.append(train(model, optimizer, data, 2))
        job.detach()
        return seen, weights(model), copy.deepcopy(optimizer.state_dict())

    served.same(script, spills=False)


def _raise(*args: Any) -> None:
    raise Boom


def test_row_52_activations_saved_elsewhere_by_the_script(served: Served) -> None:
    """`save_on_cpu` and hooks of the script's own, around the whole forward and around one block."""

    class Mine(BlockModel):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            h = self.embed(tokens)
            for index, block in enumerate(self.blocks):
                with torch.autograd.graph.saved_tensors_hooks(_to_bytes, _from_bytes) if index == 1 else _nothing():
                    h = block(h)
            return self.head(h)  # type: ignore[no-any-return]

    def script(attach: Attach) -> Any:
        torch.manual_seed(0)
        model = Mine(dropout=0.1)
        optimizer, data = torch.optim.AdamW(model.parameters(), lr=3e-3), batches(1)
        job = attach(model, optimizer)
        seen = []
        for _ in range(3):
            optimizer.zero_grad()
            with torch.autograd.graph.save_on_cpu():
                loss = default_loss(model, next(data))
            loss.backward()
            optimizer.step()
            seen.append(loss.detach().clone())
        job.detach()
        return seen, weights(model), copy.deepcopy(optimizer.state_dict())

    served.same(script)


def _nothing() -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


def _to_bytes(tensor: torch.Tensor) -> bytes:
    file = io.BytesIO()
    torch.save(tensor.detach(), file)
    return file.getvalue()


def _from_bytes(data: bytes) -> torch.Tensor:
    return torch.load(io.BytesIO(data))  # type: ignore[no-any-return]


class Experts(nn.Module):
    """Every batch goes to two of eight experts, drawn at random."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 48)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(48, 192), nn.GELU(), nn.Linear(192, 48)) for _ in range(8))
        self.head = nn.Linear(48, VOCAB)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.embed(tokens)
        for index in torch.randperm(8)[:2].tolist():
            h = h + self.experts[index](h)
        return self.head(h)  # type: ignore[no-any-return]


@pytest.mark.parametrize("checkpointed", [False, True])
def test_row_55_random_experts(checkpointed: bool, served: Served) -> None:
    def script(attach: Attach) -> Any:
        torch.manual_seed(0)
        model = Experts()
        optimizer, data = torch.optim.AdamW(model.parameters(), lr=3e-3), batches(1)
        job = attach(model, optimizer)
        seen = []
        for _ in range(8):
            optimizer.zero_grad()
            batch = next(data)
            if checkpointed:
                logits = torch.utils.checkpoint.checkpoint(model, batch, use_reentrant=False)
                loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())
            else:
                loss = default_loss(model, batch)
            loss.backward()
            optimizer.step()
            seen.append((loss.detach().clone(), [p.grad is None for p in model.parameters()]))
        job.detach()
        return seen, weights(model), copy.deepcopy(optimizer.state_dict())

    served.same(script)


def test_row_55_wrong_predictions_are_counted(served: Served) -> None:
    torch.manual_seed(0)
    model = Experts()
    optimizer, data = torch.optim.AdamW(model.parameters(), lr=3e-3), batches(1)
    with tiermem.attach(model, optimizer, dram=served.dram, endpoint=served.daemon.endpoint, job="experts") as job:
        for _ in range(8):
            default_loss(model, next(data)).backward()
            optimizer.step()
            optimizer.zero_grad()
        counted = job.stats().predictions
    assert counted["wrong"] > 0 and counted["right"] > 0, counted


def test_row_60_a_model_of_very_many_tensors(served: Served) -> None:
    """Its table of tensors is larger than a message of gRPC may be: it travels in several."""
    names = [f"{'x' * 200}_{i}" for i in range(24_000)]
    assert sum(map(len, names)) > 4 * 2**20
    model = nn.ParameterDict({name: nn.Parameter(torch.full((2,), float(i))) for i, name in enumerate(names)})
    before = weights(model)
    with served.with_options(dram="8MiB", spills=False) as other:
        other.attach(model).detach()
    assert differences(before, weights(model)) == []
