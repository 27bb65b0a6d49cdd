"""PEFT: LoRA made before and after attach, merged, saved and loaded; and models whose shape changes after attach."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import tqdm  # type: ignore[import-untyped]
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import tiermem
from tests.integration.scripts import VOCAB, batches, default_loss
from tests.integration.served import Attach, Served, served_in, train, weights

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    transformers.logging.disable_progress_bar()
    tqdm.tqdm.get_lock()  # a semaphore for the whole process, made at first use
    with served_in(tmp_path_factory.mktemp("daemon")) as running:
        yield running
    transformers.logging.enable_progress_bar()


def llama(tied: bool = True) -> Any:
    torch.manual_seed(0)
    shape: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 320, "num_hidden_layers": 4}
    config = LlamaConfig(
        vocab_size=VOCAB, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=tied, **shape
    )
    return LlamaForCausalLM(config).train()


def lora() -> LoraConfig:
    return LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], lora_dropout=0.1)


def adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, **options)


def files(directory: Path) -> dict[str, bytes]:
    """What was saved, byte for byte; and nothing is left for the next to be found."""
    found = {path.name: path.read_bytes() for path in sorted(directory.iterdir())}
    for name in found:
        (directory / name).unlink()
    return found


def evaluated(model: Any, data: Iterator[torch.Tensor]) -> torch.Tensor:
    was = model.training
    with torch.no_grad():
        loss = default_loss(model.eval(), next(data)).clone()
    model.train(was)
    return loss


@pytest.mark.parametrize("tied", [True, False])
def test_lora_before_attach(tied: bool, served: Served, tmp_path: Path) -> None:
    """Train, save and load the adapter, run without it and with another one, merge for good, save the full model."""

    def script(attach: Attach) -> Any:
        model: Any = get_peft_model(llama(tied), lora())
        optimizer, data = adamw(model), batches(1)
        job = attach(model, optimizer)
        seen: list[Any] = [train(model, optimizer, data)]
        seen.append({k: v.clone() for k, v in peft.get_peft_model_state_dict(model).items()})
        with model.disable_adapter():
            seen.append(evaluated(model, data))
        model.save_pretrained(tmp_path)
        again = PeftModel.from_pretrained(llama(tied), tmp_path)
        seen.append(evaluated(again, data))
        model.load_adapter(tmp_path, "second")
        model.set_adapter("second")
        seen.append(evaluated(model, data))
        model.set_adapter("default")
        model.delete_adapter("second")
        seen += [files(tmp_path), train(model, optimizer, data, 1), weights(model)]
        seen.append(copy.deepcopy(optimizer.state_dict()))
        merged = model.merge_and_unload()
        seen.append(evaluated(merged, data))
        merged.save_pretrained(tmp_path)
        seen.append(evaluated(LlamaForCausalLM.from_pretrained(tmp_path), data))
        seen.append(files(tmp_path))
        job.detach()
        return seen, weights(merged)

    served.same(script)


def test_merged_and_unmerged_between_steps(served: Served) -> None:
    def script(attach: Attach) -> Any:
        model: Any = get_peft_model(llama(), lora())
        optimizer, data = adamw(model), batches(1)
        job = attach(model, optimizer)
        seen: list[Any] = [train(model, optimizer, data)]
        model.merge_adapter()
        seen.append(evaluated(model, data))
        model.unmerge_adapter()
        seen.append(train(model, optimizer, data))
        job.detach()
        return seen, weights(model), copy.deepcopy(optimizer.state_dict())

    served.same(script)


def test_lora_after_attach_with_an_optimizer_of_its_own(served: Served, tmp_path: Path) -> None:
    """Adapters come into an attached model; later they are merged, and the first optimizer goes on."""

    def script(attach: Attach) -> Any:
        base = llama()
        first, data = torch.optim.AdamW(base.parameters(), lr=1e-3), batches(1)
        job = attach(base, first)
        seen: list[Any] = [train(base, first, data, 2)]
        model: Any = get_peft_model(base, lora())
        second = adamw(model, fused=True)
        seen.append(train(model, second, data))
        model.save_pretrained(tmp_path)
        seen += [files(tmp_path), weights(model), copy.deepcopy(second.state_dict())]
        merged = model.merge_and_unload()
        seen.append(evaluated(merged, data))
        merged.save_pretrained(tmp_path)
        seen += [files(tmp_path), train(merged.train().requires_grad_(True), first, data, 2)]
        job.detach()
        return seen, weights(merged), copy.deepcopy(first.state_dict())

    served.same(script)


def test_lora_added_to_the_attached_optimizer(served: Served) -> None:
    """`add_param_group` with parameters that did not exist at attach; the managed ones are frozen."""

    def script(attach: Attach) -> Any:
        base = llama().requires_grad_(False)
        optimizer, data = torch.optim.AdamW(base.parameters(), lr=1e-3), batches(1)
        job = attach(base, optimizer)
        model: Any = get_peft_model(base, lora())
        optimizer.add_param_group({"params": [p for p in model.parameters() if p.requires_grad], "lr": 1e-2})
        seen = train(model, optimizer, data)
        job.detach()
        return seen, weights(model), copy.deepcopy(optimizer.state_dict())

    served.same(script)


@pytest.mark.parametrize("tied", [True, False])
def test_full_model_saved_while_attached(tied: bool, served: Served, tmp_path: Path) -> None:
    """In one file and in shards: the same bytes, and they load."""

    def script(attach: Attach) -> Any:
        model = llama(tied)
        optimizer, data = adamw(model), batches(1)
        job = attach(model, optimizer)
        seen: list[Any] = [train(model, optimizer, data, 2)]
        for shard in ("100KB", "1GB"):
            model.save_pretrained(tmp_path, max_shard_size=shard)
            seen.append(weights(LlamaForCausalLM.from_pretrained(tmp_path)))
            seen.append(files(tmp_path))
        job.detach()
        return seen

    served.same(script)


@pytest.mark.parametrize("tied", [True, False])
def test_resized_embeddings_before_attach(tied: bool, served: Served) -> None:
    def script(attach: Attach) -> Any:
        model = llama(tied)
        model.resize_token_embeddings(VOCAB + 16, mean_resizing=False)
        optimizer, data = adamw(model), batches(1)
        job = attach(model, optimizer)
        seen = train(model, optimizer, data)
        job.detach()
        return seen, weights(model)

    served.same(script)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("size", [VOCAB + 16, VOCAB - 8])
def test_resized_embeddings_after_attach_are_refused(tied: bool, size: int, served: Served) -> None:
    """Loudly, and training goes on with the model as it was."""
    plain = llama(tied)
    expected = train(plain, adamw(plain), batches(1), 2)
    model = llama(tied)
    optimizer, data = adamw(model), batches(1)
    with served.with_options(spills=False) as other:
        job = other.attach(model, optimizer)
        seen = train(model, optimizer, data, 1)
        with pytest.raises(tiermem.errors.Unsupported, match=r"resize the model before attach"):
            model.resize_token_embeddings(size, mean_resizing=False)
        assert model.get_input_embeddings().weight.shape[0] == VOCAB
        seen += train(model, optimizer, data, 1)
        job.detach()
    assert [loss.item() for loss in seen] == [loss.item() for loss in expected]
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
