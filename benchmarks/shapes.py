"""Models of the shapes that offloading is compared on: Llama with random weights, untied embeddings, fixed batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

POOL = 4  # different batches


@dataclass(frozen=True, slots=True)
class Shape:
    """`state_bytes`: parameters, gradients and AdamW's two moments in float32."""

    name: str
    hidden: int
    layers: int
    intermediate: int
    heads: int
    vocabulary: int = 32000

    @property
    def parameters(self) -> int:
        block = 4 * self.hidden**2 + 3 * self.hidden * self.intermediate + 2 * self.hidden
        return 2 * self.vocabulary * self.hidden + self.layers * block + self.hidden

    @property
    def state_bytes(self) -> int:
        return 16 * self.parameters


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("5M", 256, 4, 688, 4, 4096),  # for trying a benchmark out
        Shape("134M", 768, 12, 2048, 12),
        Shape("374M", 1024, 24, 2816, 16),
    )
}


def build(shape: Shape, seed: int = 0) -> Any:
    """The model in float32, in training mode."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        intermediate_size=shape.intermediate,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        vocab_size=shape.vocabulary,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        use_cache=False,
    )
    torch.manual_seed(seed)
    return LlamaForCausalLM(config).train()


def batches(shape: Shape, sequence: int, batch: int = 1) -> Iterator[torch.Tensor]:
    """Token ids of shape (batch, sequence), `POOL` of them in turn without end."""
    import torch

    generator = torch.Generator().manual_seed(1234)
    pool = [torch.randint(0, shape.vocabulary, (batch, sequence), generator=generator) for _ in range(POOL)]
    while True:
        yield from pool
