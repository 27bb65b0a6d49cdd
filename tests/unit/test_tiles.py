"""How large a tile of a tensor that is too large for a bundle is."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tiermem.layout import arena_layout
from tiermem.units import GIB, MIB
from tiermem_client.storage_swap import storage_key
from tiermem_client.units import ManagedParameter, ManagedStorage, Weight, tile_bytes, weight_of

ADAM = {torch.float32: Weight(2.0, 1.0), torch.bfloat16: Weight(4.0, 2.0)}  # two moments of float32


def managed(parameter: nn.Parameter) -> ManagedStorage:
    assert storage_key(parameter)
    raw = parameter.untyped_storage()
    storage = ManagedStorage(raw, raw.nbytes(), "weight")
    storage.parameters.append(ManagedParameter(parameter, "weight", storage, 0, tuple(parameter.shape), (1,)))
    return storage


@pytest.mark.parametrize("dtype", ADAM)
def test_two_moments_weigh_twice_as_much_together_as_each(dtype: torch.dtype) -> None:
    parameter = nn.Parameter(torch.empty(10, dtype=dtype))
    assert weight_of(managed(parameter), {parameter: [4, 4]}) == ADAM[dtype]


def test_nothing_weighs_less_than_the_parameter_nor_a_gradient_less_than_float32() -> None:
    for dtype, largest in ((torch.float64, 1.0), (torch.float32, 1.0), (torch.float16, 2.0)):
        assert weight_of(managed(nn.Parameter(torch.empty(10, dtype=dtype))), {}) == Weight(1.0, largest)


@pytest.mark.parametrize("dtype", ADAM)
@pytest.mark.parametrize("arena_bytes", [MIB, 64 * MIB, GIB, 4 * GIB, 64 * GIB, 1024 * GIB])
def test_no_bundle_of_a_tile_is_above_the_cap_and_its_update_is_small_beside_the_arena(
    arena_bytes: int, dtype: torch.dtype
) -> None:
    weight, cap_bytes = ADAM[dtype], arena_layout(arena_bytes).bundle_cap_bytes
    tile = tile_bytes(cap_bytes, arena_bytes // 16, weight)
    assert cap_bytes / weight.state <= tile <= cap_bytes / weight.largest
    if tile > cap_bytes / weight.state:
        assert tile * (2 + weight.state) <= arena_bytes / 16


def test_tiles_are_as_large_as_bundles_where_the_arena_is_ample() -> None:
    assert tile_bytes(GIB, 16 * GIB, ADAM[torch.bfloat16]) == 512 * MIB
    assert tile_bytes(64 * MIB, 64 * MIB, ADAM[torch.float32]) == 32 * MIB, "one that could be half as many is not"
