"""Small training scripts for the oracle: run with and without tiermem, everything they can see must be equal."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import tiermem

VOCAB = 64


class Block(nn.Module):
    def __init__(self, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.drop = nn.Dropout(dropout)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.drop(torch.nn.functional.gelu(self.up(self.norm(x)))))  # type: ignore[no-any-return]


class BlockModel(nn.Module):
    """Embedding, blocks, head; `tied` shares the embedding, `around` uses a root parameter around every block."""

    def __init__(self, width: int = 48, blocks: int = 5, tied: bool = False, around: bool = False, dropout: float = 0.0,
                 checkpointing: str = "") -> None:  # fmt: skip
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(blocks))
        self.gamma = nn.Parameter(torch.linspace(0.5, 1.5, width)) if around else None
        self.head = nn.Linear(width, VOCAB, bias=not tied)
        if tied:
            self.head.weight = self.embed.weight
        self.checkpointing = checkpointing

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.embed(tokens)
        for block in self.blocks:
            if self.checkpointing and self.training:
                h = checkpoint(block, h, use_reentrant=self.checkpointing == "reentrant")
            else:
                h = block(h)
            if self.gamma is not None:
                h = h * self.gamma
        return self.head(h)  # type: ignore[no-any-return]


class NoLists(nn.Module):
    """Convolution and GRU, no ModuleList anywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 16)
        self.conv = nn.Conv1d(16, 64, 3, padding=1)
        self.wide = nn.Conv1d(64, 128, 3, padding=1)
        self.gru = nn.GRU(128, 96, batch_first=True)
        self.head = nn.Linear(96, VOCAB)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.wide(torch.relu(self.conv(self.embed(tokens).transpose(1, 2)))).transpose(1, 2)
        return self.head(self.gru(h)[0])  # type: ignore[no-any-return]


@dataclass
class Script:
    """One training script, which computes on `device`; attach may find the model elsewhere (`made_on`). `between` runs
    after every step with what a script has at hand; its result is compared.

    `autocast` is under `autocast_dtype`; `scaler` makes the second step's loss infinite; `backward` replaces
    `loss.backward()`; `keeps_grads`: copies of all gradients are compared.
    """

    model: Callable[[], nn.Module]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    steps: int = 4
    microbatches: int = 1
    clip: Callable[[nn.Module], Any] | None = None
    set_to_none: bool = True
    scheduler: Callable[[torch.optim.Optimizer], Any] | None = None
    between: Callable[[int, nn.Module, torch.optim.Optimizer, Any], Any] | None = None
    loss: Callable[[nn.Module, torch.Tensor], torch.Tensor] | None = None
    backward: Callable[[torch.Tensor], None] = torch.Tensor.backward
    autocast: bool = False
    autocast_dtype: torch.dtype = torch.bfloat16
    scaler: bool = False
    keeps_grads: bool = True
    dtype: torch.dtype = torch.float32
    warm_steps: int = 0
    dram: str = "1MiB"
    device: str = "cpu"
    made_on: str = ""
    attach_options: dict[str, Any] = field(default_factory=dict)


@dataclass
class Seen:
    """All that a script saw, and what it left behind."""

    losses: list[torch.Tensor] = field(default_factory=list)
    grads: list[dict[str, torch.Tensor]] = field(default_factory=list)
    extra: list[Any] = field(default_factory=list)
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    state: dict[Any, Any] = field(default_factory=dict)
    rng: torch.Tensor | None = None
    stats: tiermem.TrainerStats | None = None


def default_loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    out = model(batch)
    logits = getattr(out, "logits", out)
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), batch[:, 1:].flatten())


def batches(seed: int) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield torch.randint(0, VOCAB, (3, 10), generator=generator)


def stats_of_equal_runs(script: Script, endpoint: str) -> tiermem.TrainerStats:
    """Equal with and without tiermem; what the job has counted."""
    seen = run(script, attached=True, endpoint=endpoint)
    assert compare(run(script, attached=False), seen) == []
    assert seen.stats is not None
    return seen.stats


def run(script: Script, attached: bool, flash: str = "", endpoint: str = "embedded") -> Seen:
    """The same script, with or without the one line. `flash`: a directory for an embedded daemon, else unused."""
    training = begin(script if attached else dataclasses.replace(script, made_on=""))
    training.steps(script.warm_steps)
    if attached:
        options = {"flash": flash} if endpoint == "embedded" else {}
        with managed(training, endpoint=endpoint, **options):
            training.steps(script.steps)
    else:
        training.steps(script.steps)
    return training.finish()


def begin(script: Script) -> Training:
    """Model, optimizer and data as the script makes them; always the same ones."""
    torch.manual_seed(0)
    model = script.model().to(script.dtype).to(script.made_on or script.device)
    return Training(script, model, script.optimizer(model), Seen(), batches(1))


@contextlib.contextmanager
def managed(training: Training, **options: Any) -> Iterator[tiermem.Job]:
    """The training is attached; at the end its statistics are kept and it is detached."""
    script = training.script
    job = tiermem.attach(training.model, training.optimizer, dram=script.dram, **{**options, **script.attach_options})
    try:
        yield job
        job.flush()
        training.seen.stats = job.stats()
        assert training.seen.stats.leases == 0, "leases are held between steps"
    except BaseException:
        job.close()
        raise
    job.detach()


@dataclass
class Training:
    """A script that runs."""

    script: Script
    model: nn.Module
    optimizer: torch.optim.Optimizer
    seen: Seen
    data: Iterator[torch.Tensor]
    done: int = 0

    def __post_init__(self) -> None:
        self.schedule = self.script.scheduler(self.optimizer) if self.script.scheduler else None
        # The second loss is infinite, so that one step is skipped and the scale halved.
        self.kind = torch.device(self.script.device).type
        scaler = torch.amp.GradScaler(self.kind, init_scale=2.0**10, growth_interval=2)
        self.scaler = scaler if self.script.scaler else None

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()
            self.done += 1

    def step(self) -> None:
        script, scaler = self.script, self.scaler
        self.optimizer.zero_grad(set_to_none=script.set_to_none)
        for _ in range(script.microbatches):
            with torch.autocast(self.kind, script.autocast_dtype) if script.autocast else contextlib.nullcontext():
                loss = (script.loss or default_loss)(self.model, self.batch()) / script.microbatches
            if scaler is not None and self.done == 1:
                loss = loss * float("inf")
            script.backward(scaler.scale(loss) if scaler is not None else loss)
            self.seen.losses.append(loss.detach().clone())
        if scaler is not None and script.clip is not None:
            scaler.unscale_(self.optimizer)
        if script.clip is not None:
            self.seen.extra.append(copy.deepcopy(script.clip(self.model)))
        if script.keeps_grads:
            self.seen.grads.append(gradients(self.model))
        if scaler is not None:
            scaler.step(self.optimizer)
            scaler.update()
        else:
            self.optimizer.step()
        if self.schedule is not None:
            self.schedule.step()
        if script.between is not None:
            self.seen.extra.append(script.between(self.done, self.model, self.optimizer, self.data))

    def batch(self) -> torch.Tensor:
        return next(self.data).to(self.script.device)

    def finish(self) -> Seen:
        """All that there is to compare. After `managed`: of ordinary tensors."""
        seen = self.seen
        seen.parameters = {n: p.detach().clone() for n, p in self.model.named_parameters()}
        seen.buffers = {n: b.clone() for n, b in self.model.named_buffers()}
        seen.state = copy.deepcopy(self.optimizer.state_dict())
        seen.rng = torch.get_rng_state()
        return seen


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of the gradients as a script sees them now."""
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def differences(a: Any, b: Any, path: str = "") -> list[str]:
    """Where two nested values differ; tensors by torch.equal (and dtype), NaN equal to NaN."""
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        if (
            not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor))
            or a.dtype != b.dtype
            or a.shape != b.shape
        ):
            return [f"{path}: {type(a).__name__} against {type(b).__name__}"]
        a, b = a.detach().cpu(), b.detach().cpu()
        same = torch.equal(a, b) or (
            a.is_floating_point() and torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())
        )
        return [] if same else [f"{path}: largest difference {(a.double() - b.double()).abs().max().item():.3g}"]
    if isinstance(a, dict) and isinstance(b, dict):
        if list(a) != list(b):
            return [f"{path}: keys {list(a)} against {list(b)}"]
        return [d for k in a for d in differences(a[k], b[k], f"{path}.{k}")]
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        if len(a) != len(b):
            return [f"{path}: {len(a)} items against {len(b)}"]
        return [d for i, (x, y) in enumerate(zip(a, b, strict=True)) for d in differences(x, y, f"{path}[{i}]")]
    return [] if a == b else [f"{path}: {a!r} against {b!r}"]


def compare(plain: Seen, managed: Seen) -> list[str]:
    """Everything but the statistics."""
    names = ("losses", "grads", "extra", "parameters", "buffers", "state", "rng")
    return [d for name in names for d in differences(getattr(plain, name), getattr(managed, name), name)]
