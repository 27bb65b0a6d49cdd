"""transformers' `Trainer`, as `attach(trainer)` and as `attach(model, optimizer)`: what it logs, the weights, and every
file of its checkpoints are equal to those of the plain Trainer, bit for bit.
"""

from __future__ import annotations

import functools
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

import tiermem
from tests.integration.daemon_process import Daemon, environment, serve
from tests.integration.scripts import differences

VOCAB = 64
STEPS = 4
_NAMES = ("activation_checkpointing", "gradient_checkpointing")  # the older one warns where the newer one is known
CHECKPOINTING = next(name for name in _NAMES if hasattr(TrainingArguments, name))
LOGGED = ("loss", "grad_norm", "learning_rate", "eval_loss", "epoch")


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with serve(tmp_path_factory.mktemp("daemon"), dram="32MiB") as running:
        yield running


@pytest.fixture(autouse=True, scope="module")
def _quiet() -> Iterator[None]:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    yield
    transformers.logging.enable_progress_bar()


class Numbers(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Random tokens, the same for every index always."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, VOCAB, (12,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


class Average(TrainerCallback):
    """An exponential average of the weights, kept by a callback after every step."""

    def __init__(self) -> None:
        self.average: AveragedModel | None = None

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **rest: Any) -> None:
        if self.average is None:
            self.average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        self.average.update_parameters(model)


def llama(tied: bool = True, dropout: float = 0.0) -> LlamaForCausalLM:
    shape: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4}
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
        attention_dropout=dropout,
        **shape,
    )
    return LlamaForCausalLM(config)


@dataclass(frozen=True)
class Case:
    """Options of TrainingArguments, and of the model."""

    options: dict[str, Any] = field(default_factory=dict)
    model: Callable[[], nn.Module] = llama
    average: bool = False


def trained(
    case: Case, directory: Path, own_optimizer: bool, endpoint: str | None, resume: Path | None = None
) -> dict[str, Any]:
    """A training, plain without an endpoint; all that can be seen of it."""
    model = case.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3) if own_optimizer else None
    options: dict[str, Any] = {
        "max_steps": STEPS, "per_device_train_batch_size": 2, "logging_steps": 1, "save_steps": 2, "use_cpu": True,
        "learning_rate": 3e-3, "report_to": [], "disable_tqdm": True, "save_total_limit": None, **case.options,
    }  # fmt: skip
    average = Average()
    trainer = Trainer(
        model,
        TrainingArguments(str(directory), **options),
        train_dataset=Numbers(),
        eval_dataset=Numbers(),
        optimizers=(optimizer, None),
        callbacks=[average] if case.average else [],
    )
    trainer.remove_callback(transformers.PrinterCallback)
    job = None
    if endpoint is not None:
        name = f"trainer-{directory.name}"
        if own_optimizer:
            assert optimizer is not None
            job = tiermem.attach(model, optimizer, dram="1MiB", endpoint=endpoint, job=name)
        else:
            job = tiermem.attach(trainer, dram="1MiB", endpoint=endpoint, job=name)
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    trainer.evaluate()
    if job is not None:
        assert job.stats().links["flash_to_dram"].bytes > 0, "everything fitted: the case shows nothing"
        job.detach()
    return {
        "log": [{k: row[k] for k in LOGGED if k in row} for row in trainer.state.log_history],
        "weights": {n: p.detach().clone() for n, p in model.named_parameters()},
        "average": {n: p.detach() for n, p in average.average.named_parameters()} if average.average else {},
        "rng": torch.get_rng_state(),
        "checkpoints": {p.name: contents(p) for p in sorted(directory.glob("checkpoint-*"))},
    }


def contents(checkpoint: Path) -> dict[str, Any]:
    """A checkpoint's files as what they hold; the weights' file also byte for byte."""
    weights = checkpoint / "model.safetensors"
    loaded = {n: torch.load(checkpoint / n, weights_only=False) for n in ("optimizer.pt", "scheduler.pt")}
    names = sorted(p.name for p in checkpoint.iterdir())
    return {"names": names, "bytes": weights.read_bytes(), "model": safetensors.torch.load_file(weights), **loaded}


CASES: dict[str, Case] = {
    "plain": Case(),
    "untied, without clipping": Case({"max_grad_norm": 0.0}, functools.partial(llama, tied=False)),
    "accumulation, cosine, warmup": Case(
        {"gradient_accumulation_steps": 3, "lr_scheduler_type": "cosine", "warmup_steps": 2}
    ),
    "tight clipping, weight decay": Case({"max_grad_norm": 0.05, "weight_decay": 0.1}),
    "checkpointing": Case({CHECKPOINTING: True}, functools.partial(llama, dropout=0.1)),
    "checkpointing, reentrant": Case({CHECKPOINTING: True, f"{CHECKPOINTING}_kwargs": {"use_reentrant": True}}),
    "bf16": Case({"bf16": True}),
    "bf16, accumulation, checkpointing": Case({"bf16": True, "gradient_accumulation_steps": 2, CHECKPOINTING: True}),
    "evaluation between, best model loaded": Case(
        {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True}
    ),
    "averaged by a callback": Case(average=True),
}
MAKERS = {
    "fused": Case({"optim": "adamw_torch_fused"}),
    "Adafactor": Case({"optim": "adafactor"}),
    "SGD with momentum": Case({"optim": "sgd", "optim_args": "momentum=0.9"}),
}  # the Trainer's own choice of optimizer
WITH_BOTH = ("plain", "accumulation, cosine, warmup", "evaluation between, best model loaded")


@functools.cache
def plain(name: str, own_optimizer: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        return trained((CASES | MAKERS)[name], Path(directory), own_optimizer, None)


@pytest.mark.parametrize("name", CASES | MAKERS)
def test_attached_by_trainer(name: str, daemon: Daemon, tmp_path: Path) -> None:
    managed = trained((CASES | MAKERS)[name], tmp_path, False, daemon.endpoint)
    assert differences(plain(name, False), managed) == []
    assert len(managed["checkpoints"]) == 2


@pytest.mark.parametrize("name", WITH_BOTH)
def test_attached_by_model_and_optimizer(name: str, daemon: Daemon, tmp_path: Path) -> None:
    managed = trained(CASES[name], tmp_path, True, daemon.endpoint)
    assert differences(plain(name, True), managed) == []


RESUMED = Case({"gradient_accumulation_steps": 2, "lr_scheduler_type": "cosine"}, functools.partial(llama, dropout=0.1))


@pytest.mark.parametrize(("before", "after"), [("tiermem", "tiermem"), ("plain", "tiermem"), ("tiermem", "plain")])
def test_resumed_from_a_checkpoint(before: str, after: str, daemon: Daemon, tmp_path: Path) -> None:
    """A new Trainer, attached again, goes on as if there had been no interruption; also from and to plain ones."""
    endpoints = {"tiermem": daemon.endpoint, "plain": None}
    whole = trained(RESUMED, tmp_path / "whole", False, None)
    first = trained(RESUMED, tmp_path / "first", False, endpoints[before])
    assert differences(whole, first) == []
    resumed = trained(RESUMED, tmp_path / "then", False, endpoints[after], tmp_path / "first" / "checkpoint-2")
    del whole["checkpoints"]["checkpoint-2"]
    assert differences(whole, resumed) == []


def test_optimizer_is_the_trainers_own(daemon: Daemon, tmp_path: Path) -> None:
    """The Trainer makes it by its own rules, and trains with that object."""
    trainer = Trainer(
        llama(), TrainingArguments(str(tmp_path), use_cpu=True, weight_decay=0.25, report_to=[], optim="sgd")
    )
    with tiermem.attach(trainer, dram="1MiB", endpoint=daemon.endpoint, job="own-optimizer"):
        optimizer = trainer.optimizer
        assert type(optimizer) is torch.optim.SGD
        assert [g["weight_decay"] for g in optimizer.param_groups] == [0.25, 0.0]
        assert trainer.create_optimizer() is optimizer


def test_trainer_subclass_with_its_own_optimizer(daemon: Daemon, tmp_path: Path) -> None:
    class Mine(Trainer):
        def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
            if self.optimizer is None:
                assert self.model is not None
                self.optimizer = torch.optim.RAdam(self.model.parameters(), lr=1e-3)
            return self.optimizer

    trainer = Mine(llama(), TrainingArguments(str(tmp_path), use_cpu=True, report_to=[]))
    with tiermem.attach(trainer, dram="1MiB", endpoint=daemon.endpoint, job="subclass"):
        assert type(trainer.optimizer) is torch.optim.RAdam


def test_model_init_is_refused(tmp_path: Path) -> None:
    trainer = Trainer(args=TrainingArguments(str(tmp_path), use_cpu=True, report_to=[]), model_init=lambda: llama())
    with pytest.raises(tiermem.errors.Unsupported, match=r"model_init.*give it a model"):
        tiermem.attach(trainer, dram="1MiB")


def test_an_optimizer_beside_a_trainer_is_refused(tmp_path: Path) -> None:
    model = llama()
    trainer: Any = Trainer(model, TrainingArguments(str(tmp_path), use_cpu=True, report_to=[]))
    with pytest.raises(tiermem.errors.InvalidArgument, match=r"optimizers=\(optimizer, None\)"):
        tiermem.attach(trainer, torch.optim.SGD(model.parameters(), lr=0.1), dram="1MiB")


def test_something_else_is_refused() -> None:
    thing: Any = "a model"
    with pytest.raises(tiermem.errors.InvalidArgument, match=r"Module or a transformers\.Trainer, not str"):
        tiermem.attach(thing)


def test_tiermem_does_not_import_transformers() -> None:
    script = "import sys, tiermem; tiermem.attach; assert not {'transformers', 'accelerate', 'peft'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True, env=environment())
