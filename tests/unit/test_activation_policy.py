"""Which unit does what, and how large the places of saved bytes are."""

from __future__ import annotations

import pytest

from tiermem.layout import TENSOR_ALIGN_BYTES
from tiermem_client.activation_policy import Policy, policies_for
from tiermem_client.activation_slots import slot_bytes
from tiermem_client.activations import wanted_span

UNITS = ["embed", *(f"layers.{n}" for n in range(12)), "head"]


def test_the_first_pattern_that_matches_counts() -> None:
    policies = policies_for({"layers.1": "keep", "layers.1?": "recompute", "layers.*": "offload"}, UNITS)
    assert {name: str(policy) for name, policy in policies.items()} == {
        "": "keep",
        "embed": "keep",
        **{f"layers.{n}": "keep" if n == 1 else "recompute" if n >= 10 else "offload" for n in range(12)},
        "head": "keep",
    }


@pytest.mark.parametrize("policy", Policy)
def test_one_policy_is_for_all_and_for_what_is_outside(policy: Policy) -> None:
    assert set(policies_for(str(policy), UNITS).items()) == {(name, policy) for name in ["", *UNITS]}


def test_without_a_word_all_is_kept() -> None:
    assert set(policies_for(None, UNITS).values()) == {Policy.KEEP}


@pytest.mark.parametrize("frame_bytes", [4096, 65536, 524288])
def test_slots_have_room_in_few_sizes(frame_bytes: int) -> None:
    sizes = [slot_bytes(n, frame_bytes) for n in range(1 << 20, 1 << 21, 997)]
    for n, size in zip(range(1 << 20, 1 << 21, 997), sizes, strict=True):
        assert size % frame_bytes == 0
        assert n <= size < n + max(n // 16, frame_bytes) + frame_bytes
    assert len(set(sizes)) <= 17


@pytest.mark.parametrize(
    ("start", "stop", "storage", "wanted"),
    [
        (0, 100, 100, (0, 100)),
        (10, 90, 100, (0, 100)),
        (1000, 1400, 10_000, (1000 - 1000 % TENSOR_ALIGN_BYTES, 1400)),
        (0, 4999, 10_000, (0, 4999)),
    ],
)
def test_a_small_part_of_a_storage_is_stored_alone(
    start: int, stop: int, storage: int, wanted: tuple[int, int]
) -> None:
    assert wanted_span(start, stop, storage) == wanted
