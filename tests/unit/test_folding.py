"""What takes no bytes of a gradient: which operations those are, and that doing them later gives the same bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tiermem_client.folding import (
    FINITE,
    FORGOTTEN_AFTER,
    Operation,
    Questions,
    Unscaling,
    change_of,
    changed,
    changes_nothing,
    norm_of,
    not_finite,
)


class Handle(torch.Tensor):
    """Stands for a gradient without bytes; keeps what was done to it."""

    seen: list[tuple[Any, Any, Any]]

    @staticmethod
    def __new__(cls, like: torch.Tensor) -> Handle:
        handle = torch.Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype)
        handle.seen = []
        return handle

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        first = args[0][0] if isinstance(args[0], list) else args[0]
        first.seen.append((func, args, kwargs or {}))
        return args[0] if func._schema.returns else None


def dispatched(act: Callable[[torch.Tensor], Any], like: torch.Tensor) -> tuple[Any, Any, Any]:
    handle = Handle(like)
    act(handle)
    [seen] = handle.seen
    return seen


def change(act: Callable[[torch.Tensor], Any], like: torch.Tensor) -> Operation | None:
    return change_of(*dispatched(act, like), Handle)


SCALARS = st.floats(-10, 10, width=32)
CHANGES: list[Callable[[float], Callable[[torch.Tensor], Any]]] = [
    lambda x: lambda g: g.mul_(x),
    lambda x: lambda g: g.mul_(torch.tensor(x)),
    lambda x: lambda g: g.div_(x or 1.0),
    lambda x: lambda g: g.clamp_(-abs(x), abs(x)),
    lambda x: lambda g: g.clamp_(max=x),
    lambda x: lambda g: torch._foreach_mul_([g], x),
    lambda x: lambda g: torch._foreach_mul_([g], torch.tensor(x, dtype=torch.float64)),
    lambda x: lambda g: torch._foreach_mul_([g], [x]),
    lambda x: lambda g: torch._foreach_clamp_max_([g], x),
]


@given(
    st.lists(st.tuples(st.sampled_from(CHANGES), SCALARS), max_size=5),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.integers(0, 1 << 30),
)
def test_changes_made_later_give_the_same_bits(
    acts: list[tuple[Callable[[float], Callable[[torch.Tensor], Any]], float]], dtype: torch.dtype, seed: int
) -> None:
    gradient = torch.randn(13, 7, generator=torch.Generator().manual_seed(seed)).to(dtype)
    at_once, waiting = gradient.clone(), []
    for make, x in acts:
        make(x)(at_once)
        one = change(make(x), gradient)
        assert one is not None
        waiting.append(one)
    before = gradient.clone()
    assert torch.equal(changed(gradient, waiting), at_once)
    assert torch.equal(gradient, before)


def test_operands_are_the_values_of_that_time() -> None:
    by = torch.tensor(3.0)
    one = change(lambda g: g.mul_(by), torch.ones(4))
    by.fill_(5.0)
    assert one is not None
    assert changed(torch.ones(4), [one]).tolist() == [3.0] * 4


@pytest.mark.parametrize(
    "act",
    [
        lambda g: g.add_(1.0),
        lambda g: g.mul(2.0),
        lambda g: g.mul_(torch.ones(4)),
        lambda g: g.mul_(torch.ones(1)),
        lambda g: g.mul_(g),
        lambda g: g.copy_(torch.zeros(4)),
        lambda g: g.norm(),
        lambda g: torch._foreach_mul_([g], [torch.ones(4)]),
    ],
)
def test_everything_else_is_not_a_change_that_can_wait(act: Callable[[torch.Tensor], Any]) -> None:
    assert change(act, torch.ones(4)) is None


@pytest.mark.parametrize("act", [lambda g: g.mul_(1.0), lambda g: g.mul_(torch.tensor(1.0)), lambda g: g.div_(1)])
def test_multiplying_by_one_changes_nothing(act: Callable[[torch.Tensor], Any]) -> None:
    one = change(act, torch.ones(4))
    assert one is not None and changes_nothing(one)


@pytest.mark.parametrize("act", [lambda g: g.mul_(1.5), lambda g: g.clamp_(1.0), lambda g: g.mul_(torch.tensor(0.0))])
def test_everything_else_changes_something(act: Callable[[torch.Tensor], Any]) -> None:
    one = change(act, torch.ones(4))
    assert one is not None and not changes_nothing(one)


def test_norms_are_told_apart_by_all_their_arguments() -> None:
    acts: list[Callable[[torch.Tensor], Any]] = [
        lambda g: torch.linalg.vector_norm(g),
        lambda g: torch.linalg.vector_norm(g, 1),
        lambda g: torch.linalg.vector_norm(g, torch.inf),
        lambda g: torch.linalg.vector_norm(g, dtype=torch.float64),
        lambda g: torch.linalg.vector_norm(g, dim=0),
        lambda g: torch._foreach_norm([g], 1),
    ]
    gradient = torch.randn(9, 5)
    keys = set()
    for act in acts:
        norm = norm_of(*dispatched(act, gradient), Handle)
        assert norm is not None
        key, operation = norm
        out, plain = operation.run(gradient), act(gradient)
        (one,), (other,) = ([each] if isinstance(each, torch.Tensor) else each for each in (out, plain))
        assert torch.equal(one, other)
        assert key == norm_of(*dispatched(act, gradient), Handle)[0]  # type: ignore[index]
        keys.add(key)
    assert len(keys) == len(acts)
    assert norm_of(*dispatched(lambda g: g.mul_(2.0), gradient), Handle) is None


@pytest.mark.parametrize("bad", [None, torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("scale", [1.0, 2.0**-16, 0.3])
def test_unscaling_later_finds_and_computes_the_same(bad: float | None, scale: float) -> None:
    gradient = torch.randn(33)
    if bad is not None:
        gradient[7] = bad
    at_once, found, inverse = gradient.clone(), torch.zeros(()), torch.tensor(scale)
    torch._amp_foreach_non_finite_check_and_unscale_([at_once], found, inverse)
    mine = torch.zeros(())
    seen = dispatched(lambda g: torch._amp_foreach_non_finite_check_and_unscale_([g], mine, inverse), gradient)
    unscaling = Unscaling.of(*seen, Handle)
    assert unscaling is not None and unscaling.found_inf is mine
    before = gradient.clone()
    assert torch.equal(not_finite(gradient), found)
    assert torch.equal(gradient, before) or bad is torch.nan
    assert torch.equal(changed(gradient, [unscaling.change]).nan_to_num(7.0), at_once.nan_to_num(7.0))
    assert mine.item() == 0.0, "the script's tensor is not written by the change"
    assert changes_nothing(unscaling.change) is (scale == 1.0)


def test_what_was_asked_is_answered_until_it_was_not_asked_for_some_steps() -> None:
    questions, gradient = Questions(), torch.randn(100)
    norm = norm_of(*dispatched(lambda g: torch.linalg.vector_norm(g), gradient), Handle)
    assert norm is not None
    half = change(lambda g: g.mul_(0.5), gradient)
    assert half is not None
    assert questions.answers(gradient) == {}
    questions.asked(*norm, [half])
    questions.asked(FINITE, None, [])
    answers = questions.answers(gradient)
    assert torch.equal(answers[norm[0]].value, torch.linalg.vector_norm(gradient * 0.5))
    assert answers[FINITE].value.item() == 0.0
    same, other = change(lambda g: g.mul_(0.5), gradient), change(lambda g: g.mul_(0.25), gradient)
    assert same is not None and other is not None
    assert answers[norm[0]].holds([same])
    assert not answers[norm[0]].holds([other])
    assert not answers[norm[0]].holds([])
    for _ in range(FORGOTTEN_AFTER):
        questions.stepped()
        questions.asked(FINITE, None, [])
    questions.stepped()
    assert set(questions.answers(gradient)) == {FINITE}


def test_an_answer_holds_for_the_number_of_threads_it_was_computed_with() -> None:
    questions, gradient, threads = Questions(), torch.randn(100), torch.get_num_threads()
    questions.asked(FINITE, None, [])
    answer = questions.answers(gradient)[FINITE]
    try:
        torch.set_num_threads(threads + 1)
        assert not answer.holds([])
    finally:
        torch.set_num_threads(threads)
    assert answer.holds([])
