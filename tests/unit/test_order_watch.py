"""State of which the order of microbatches shows, and sums of which it does."""

from __future__ import annotations

import random

import numpy
import pytest
import torch
from torch import nn

from tiermem_client.order_watch import KEPT_BYTES, OrderWatch, adds_up_several


def test_nothing_has_changed_after_a_forward_that_only_reads() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
    watch = OrderWatch.begun(model)
    model(torch.randn(3, 4))
    assert watch.changes() == ""


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(4), nn.InstanceNorm1d(4, track_running_stats=True)], ids=str)
def test_statistics_are_found_and_put_back(norm: nn.Module) -> None:
    model = nn.Sequential(nn.Linear(8, 8), norm)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    watch = OrderWatch.begun(model)
    model(torch.randn(3, 4, 8))
    assert "1.running_mean" in watch.changes()
    watch.put_back()
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())


def test_a_large_buffer_is_not_copied_and_the_text_says_that_it_is_lost() -> None:
    model = nn.Module()
    model.register_buffer("table", torch.zeros(KEPT_BYTES // 4 + 1))
    watch = OrderWatch.begun(model)
    model.get_buffer("table").add_(1)
    assert "'table', whose old values are lost," in watch.changes()
    watch.put_back()
    assert model.get_buffer("table")[0] == 1


@pytest.mark.parametrize(
    "draw",
    [random.random, lambda: random.gauss(0, 1), numpy.random.rand],
    ids=["uniform", "gauss, which keeps a second number", "numpy"],
)
def test_random_numbers_are_found_and_drawn_again(draw: object) -> None:
    watch = OrderWatch.begun(nn.Module())
    first = draw()  # type: ignore[operator]
    assert "Python or numpy" in watch.changes()
    watch.put_back()
    assert draw() == first  # type: ignore[operator]


def test_a_leaf_that_is_used_twice_adds_several_up() -> None:
    a, b = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    assert not adds_up_several([(a * b).sum()])
    assert adds_up_several([(a * b + a).sum()])
    assert adds_up_several([(a * a).sum()])
    shared = a.exp()
    assert not adds_up_several([(shared + shared * b).sum()]), "one leaf, one contribution: the sum is before it"
    assert not adds_up_several([torch.zeros(())])
