"""Models of the matrix: at least 300,000 parameters each, or 600,000 where half or more is frozen, so that in any
precision and with any optimizer the state is larger than the smallest arena; each with checkpointing of either kind.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import peft
import torch
import transformers
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.integration.scripts import VOCAB, Block, BlockModel, default_loss

WIDTH = 64
Checkpointing = str  # "", "reentrant" or "nonreentrant"
Loss = Callable[[nn.Module, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Model:
    """`dram`: an arena in which the largest state's floor fits, and smaller than the smallest state."""

    make: Callable[[Checkpointing], nn.Module]
    loss: Loss = default_loss
    dram: str = "2MiB"


def _library(model: Any, checkpointing: Checkpointing) -> nn.Module:
    """A model of the transformers library, as its users switch checkpointing on."""
    model.train()
    if checkpointing:
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": checkpointing == "reentrant"})
    return model  # type: ignore[no-any-return]


def _through(module: Callable[..., Any], x: torch.Tensor, checkpointing: Checkpointing) -> torch.Tensor:
    if not checkpointing:
        return module(x)  # type: ignore[no-any-return]
    return checkpoint(module, x, use_reentrant=checkpointing == "reentrant")  # type: ignore[no-any-return]


def llama(checkpointing: Checkpointing, tied: bool = False, width: int = WIDTH) -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )
    return _library(transformers.LlamaForCausalLM(config), checkpointing)


def gpt2(checkpointing: Checkpointing) -> nn.Module:
    """With its default dropout of 0.1 everywhere."""
    config = transformers.GPT2Config(vocab_size=VOCAB, n_positions=16, n_embd=WIDTH, n_layer=6, n_head=4,
                                     bos_token_id=0, eos_token_id=0)  # fmt: skip
    return _library(transformers.GPT2LMHeadModel(config), checkpointing)


def vit(checkpointing: Checkpointing) -> nn.Module:
    config: Any = transformers.ViTConfig(
        hidden_size=WIDTH,
        num_hidden_layers=6,
        num_attention_heads=4,
        intermediate_size=4 * WIDTH,
        image_size=16,
        patch_size=8,
        hidden_dropout_prob=0.1,
    )
    config.num_labels = 4
    return _library(transformers.ViTForImageClassification(config), checkpointing)


def vit_loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """The batch's numbers as noise of images and as labels."""
    generator = torch.Generator().manual_seed(int(batch[0, 0]))
    images = torch.randn(3, 3, 16, 16, generator=generator).to(next(model.parameters()).dtype)
    return nn.functional.cross_entropy(model(pixel_values=images).logits.float(), batch[:, 0] % 4)


def encoder(checkpointing: Checkpointing) -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        num_hidden_layers=6,
        num_attention_heads=4,
        intermediate_size=4 * WIDTH,
        max_position_embeddings=16,
    )
    return _library(transformers.BertForMaskedLM(config), checkpointing)


def masked_loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Every third token is masked, with padding at one end."""
    labels = torch.where(torch.arange(batch.size(1)) % 3 == 0, batch, -100)
    inputs = torch.where(labels == -100, batch, 1)
    mask = torch.ones_like(batch)
    mask[0, -2:] = 0
    logits = model(input_ids=inputs, attention_mask=mask).logits
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


class RandomExperts(nn.Module):
    """Of every layer's four experts one is drawn, so that some have no gradient in a step."""

    def __init__(self, checkpointing: Checkpointing) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 56)
        self.layers = nn.ModuleList(nn.ModuleList(Block(56) for _ in range(4)) for _ in range(3))
        self.head = nn.Linear(56, VOCAB)
        self.checkpointing = checkpointing

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.embed(tokens)
        for layer in self.layers:
            assert isinstance(layer, nn.ModuleList)
            h = _through(layer[int(torch.randint(0, 4, ()))], h, self.checkpointing)
        return self.head(h)  # type: ignore[no-any-return]


class Recurrent(nn.Module):
    """Convolutions with batch norm's buffers, and GRUs, whose weights are used by one fused operation each."""

    def __init__(self, checkpointing: Checkpointing) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 32)
        self.narrow = nn.Conv1d(32, 64, 3, padding=1)
        self.norm = nn.BatchNorm1d(64)
        self.wide = nn.Conv1d(64, 96, 3, padding=1)
        for i in range(5):
            self.add_module(f"gru{i}", nn.GRU(96, 96, batch_first=True))
        self.head = nn.Linear(96, VOCAB)
        self.checkpointing = checkpointing

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.embed(tokens).transpose(1, 2)
        h = self.wide(torch.relu(self.norm(self.narrow(h)))).transpose(1, 2)  # not checkpointed: it would count twice
        for i in range(5):
            gru = getattr(self, f"gru{i}")
            h = h + _through(lambda x, gru=gru: gru(x)[0], h, self.checkpointing)
        return self.head(h)  # type: ignore[no-any-return]


class NoModuleList(nn.Module):
    """Blocks as attributes, used in another order than they are defined in; attention of torch's own."""

    def __init__(self, checkpointing: Checkpointing) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.last = nn.Sequential(*(Block(WIDTH) for _ in range(5)))
        self.attention = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.1, batch_first=True)
        self.first = nn.Sequential(*(Block(WIDTH) for _ in range(3)))
        self.head = nn.Linear(WIDTH, VOCAB)
        self.checkpointing = checkpointing

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.embed(tokens)
        for stage in (self.first, self.attention, self.last):
            h = _through(stage, h, self.checkpointing)
        return self.head(h)  # type: ignore[no-any-return]


def blocks(checkpointing: Checkpointing, width: int = WIDTH, **options: Any) -> BlockModel:
    return BlockModel(width, 10, checkpointing=checkpointing, **options)


def frozen_lower_half(checkpointing: Checkpointing) -> nn.Module:
    """Nothing below the middle has a gradient or an activation to keep."""
    model = blocks(checkpointing, width=88)
    model.embed.requires_grad_(False)
    model.blocks[:5].requires_grad_(False)
    return model


def frozen_upper_half(checkpointing: Checkpointing) -> nn.Module:
    """Gradients pass through the frozen blocks."""
    model = blocks(checkpointing, width=88)
    model.blocks[5:].requires_grad_(False)
    return model


def lora(checkpointing: Checkpointing) -> nn.Module:
    """Adapters with dropout; all else is frozen, so that checkpointing needs its users' usual line."""
    base: Any = llama(checkpointing, width=96)
    if checkpointing:
        base.enable_input_require_grads()
    config = peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj", "down_proj"], lora_dropout=0.1)
    with warnings.catch_warnings(action="ignore", category=FutureWarning):  # peft reads a renamed attribute
        return peft.get_peft_model(base, config)


_forward: Any = torch.amp.custom_fwd(device_type="cpu")
_backward: Any = torch.amp.custom_bwd(device_type="cpu")


class _SavesWeight(torch.autograd.Function):
    """x W^T; the weight is saved as torch recommends."""

    @staticmethod
    @_forward  # type: ignore[untyped-decorator]
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    @_backward  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return grads[0] @ weight, grads[0].flatten(0, 1).t() @ x.flatten(0, 1)


class _KeepsWeight(_SavesWeight):
    """The same; the weight escapes torch's saved-tensor hooks as an attribute."""

    @staticmethod
    @_forward  # type: ignore[untyped-decorator]
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.x, ctx.weight = x, weight
        return x @ weight.t()

    @staticmethod
    @_backward  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0] @ ctx.weight, grads[0].flatten(0, 1).t() @ ctx.x.flatten(0, 1)


class _CustomBlock(Block):
    def __init__(self, width: int, function: type[torch.autograd.Function]) -> None:
        super().__init__(width)
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.function.apply(x, self.up.weight)
        return super().forward(x) + self.function.apply(inner, self.down.weight)  # type: ignore[no-any-return]


def custom_function(checkpointing: Checkpointing) -> nn.Module:
    model = blocks(checkpointing)
    model.blocks = nn.ModuleList(_CustomBlock(WIDTH, f) for f in (_SavesWeight, _KeepsWeight) * 5)
    return model


MODELS = {
    "Llama tied": Model(functools.partial(llama, tied=True)),
    "Llama untied": Model(llama),
    "GPT-2 dropout": Model(gpt2),
    "ViT": Model(vit, vit_loss),
    "encoder": Model(encoder, masked_loss),
    "random experts": Model(RandomExperts, dram="1536KiB"),  # with Adafactor just over 2 MiB
    "GRU and convolution": Model(Recurrent),
    "no ModuleList": Model(NoModuleList),
    "LoRA": Model(lora, dram="1MiB"),  # little of it has gradients and state
    "frozen lower half": Model(frozen_lower_half),
    "frozen upper half": Model(frozen_upper_half),
    "parameter around blocks": Model(functools.partial(blocks, around=True)),
    "custom Function": Model(custom_function),
}
