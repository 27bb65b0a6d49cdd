"""torch.compile, per block and whole, before attach and after it: bit for bit the same script without tiermem, and not
compiled more often.

inductor fuses across whatever it gets as one graph, and rounds accordingly. Compiled per block it gets the same graphs
as without tiermem. A model compiled whole is cut at its units, so kernels are not fused across two of them, and with
inductor that case is compared with a tolerance, and bit for bit with a plain run that is cut at the same places.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
from torch import nn
from torch._dynamo.utils import counters
from transformers import LlamaConfig, LlamaForCausalLM

import tiermem
from tests.integration.daemon_process import within
from tests.integration.scripts import VOCAB, BlockModel, NoLists, batches, default_loss, differences
from tests.integration.served import Attach, Attached, NotAttached, Served, not_attached, served_in, weights
from tiermem.notices import NoticeKind
from tiermem_client.units import discover_units

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # torch.compile's own use of torch.jit
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    torch.compile(lambda x: x + 1, backend="aot_eager")(torch.ones(1))  # what torch keeps for the whole process
    with served_in(tmp_path_factory.mktemp("daemon")) as running:
        yield running


@pytest.fixture(autouse=True)
def _compiled_anew() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def llama() -> nn.Module:
    shape: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 400, "num_hidden_layers": 2}
    config = LlamaConfig(vocab_size=VOCAB, num_attention_heads=4, num_key_value_heads=2, **shape)
    return LlamaForCausalLM(config).train()  # type: ignore[no-any-return]


def blocks_in_place(model: Any, **options: Any) -> Any:
    for block in model.blocks if hasattr(model, "blocks") else model.model.layers:
        block.compile(**options)
    return model


def blocks_replaced(model: Any, **options: Any) -> Any:
    for index, block in enumerate(model.blocks):
        model.blocks[index] = torch.compile(block, **options)
    return model


def whole(model: Any, **options: Any) -> Any:
    return torch.compile(model, **options)


def whole_in_place(model: Any, **options: Any) -> Any:
    model.compile(**options)
    return model


HOWS: dict[str, Callable[..., Any]] = {
    "blocks in place": blocks_in_place,
    "blocks replaced": blocks_replaced,
    "whole": whole,
    "whole in place": whole_in_place,
}


def script(
    attach: Attach,
    how: Callable[..., Any],
    first: str = "attach",
    model: Callable[[], nn.Module] = BlockModel,
    autocast: bool = False,
    graphs: list[int] | None = None,
    **options: Any,
) -> Any:
    """Three steps, an evaluation, and another step, through the compiled model. Appends the number of graphs."""
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    inner: Any = model()
    optimizer, data = torch.optim.AdamW(inner.parameters(), lr=3e-3), batches(1)
    compiled = how(inner, **options) if first == "compile" else None
    job = attach(inner if compiled is None else compiled, optimizer)
    compiled = how(inner, **options) if compiled is None else compiled
    seen: list[Any] = []
    for step in range(4):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext():
            loss = default_loss(compiled, next(data))
        loss.backward()
        seen += [loss.detach().clone(), {n: p.grad.clone() for n, p in inner.named_parameters()}]
        optimizer.step()
        if step == 2:
            compiled.eval()
            with torch.no_grad():
                seen.append(default_loss(compiled, next(data)).clone())
            compiled.train()
    if graphs is not None:
        graphs.append(counters["stats"]["unique_graphs"])
    job.detach()
    return seen, weights(inner), copy.deepcopy(optimizer.state_dict()), torch.get_rng_state()


@pytest.mark.parametrize(("how", "first"), [
    ("blocks in place", "attach"), ("blocks in place", "compile"), ("blocks replaced", "compile"),
    ("whole", "attach"), ("whole", "compile"), ("whole in place", "attach"),
])  # fmt: skip
def test_compiled(how: str, first: str, served: Served) -> None:
    served.same(lambda attach: script(attach, HOWS[how], first, backend="aot_eager"))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "dropout": functools.partial(BlockModel, dropout=0.1),
    "tied, a parameter around the blocks": functools.partial(BlockModel, tied=True, around=True),
    "checkpointed": functools.partial(BlockModel, checkpointing="nonreentrant", dropout=0.1),
    "no ModuleList": NoLists,
}


@pytest.mark.parametrize(("name", "how"), [*((n, "whole") for n in MODELS), ("checkpointed", "blocks in place")])
def test_models(name: str, how: str, served: Served) -> None:
    served.same(lambda attach: script(attach, HOWS[how], model=MODELS[name], backend="aot_eager"))


def test_llama(served: Served) -> None:
    served.same(lambda attach: script(attach, whole, model=llama, backend="aot_eager"))


def test_autocast(served: Served) -> None:
    served.same(lambda attach: script(attach, whole, autocast=True, backend="aot_eager"))


def test_eager_backend(served: Served) -> None:
    served.same(lambda attach: script(attach, whole, backend="eager"))


@pytest.mark.parametrize("how", ["blocks in place", "blocks replaced"])
def test_equal_blocks_are_compiled_once(how: str, served: Served) -> None:
    """As without tiermem: one graph for all blocks in training, and one in evaluation; so many blocks would otherwise
    reach torch's limit of recompilations, and the rest run uncompiled.
    """
    graphs: list[int] = []
    model = functools.partial(BlockModel, blocks=10)
    served.same(lambda attach: script(attach, HOWS[how], model=model, graphs=graphs, backend="eager"))
    assert graphs == [2, 2]


def test_blocks_without_graph_breaks(served: Served) -> None:
    served.same(lambda attach: script(attach, blocks_in_place, backend="aot_eager", fullgraph=True))
    assert sum(counters["graph_break"].values()) == 0


@pytest.mark.parametrize("first", ["attach", "compile"])
def test_whole_model_as_one_graph_is_refused(first: str, served: Served) -> None:
    """`fullgraph=True` does not allow the cuts at units: torch says so, loudly."""
    with served.with_options(spills=False) as other:
        with pytest.raises(torch._dynamo.exc.Unsupported, match=r"SavedTensorHooks\.push|_Enter"):
            script(other.attach, whole, first, backend="eager", fullgraph=True)


def test_loss_with_a_penalty_on_the_weights(served: Served) -> None:
    """A compiled function around the model that reads every parameter itself."""

    def penalised(attach: Attach) -> Any:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = BlockModel()
        optimizer, data = torch.optim.AdamW(model.parameters(), lr=3e-3), batches(1)
        job = attach(model, optimizer)

        @torch.compile(backend="aot_eager")
        def loss_of(batch: torch.Tensor) -> torch.Tensor:
            penalty = sum((p * p).sum() for p in model.parameters())
            return default_loss(model, batch) + 1e-3 * penalty

        seen = []
        for _ in range(3):
            optimizer.zero_grad()
            loss = loss_of(next(data))
            loss.backward()
            seen.append(loss.detach().clone())
            optimizer.step()
        job.detach()
        return seen, weights(model)

    served.same(penalised)


@pytest.mark.parametrize("what", ["step", "a function of everything"])
def test_compiled_optimizer_step_is_refused(what: str, served: Served) -> None:
    model = BlockModel()
    optimizer, data = torch.optim.AdamW(model.parameters(), lr=3e-3), batches(1)
    with served.with_options(spills=False) as other:
        other.attach(model, optimizer)

        def everything() -> None:
            default_loss(model, next(data)).backward()
            optimizer.step()

        default_loss(model, next(data)).backward()
        compiled = torch.compile(optimizer.step if what == "step" else everything, backend="eager")
        with pytest.raises(tiermem.errors.Unsupported, match=r"call step\(\) outside"):
            compiled()


def test_compiled_autograd_is_refused(served: Served) -> None:
    model = BlockModel(blocks=1)
    with served.with_options(spills=False) as other:
        other.attach(model)
        loss = default_loss(model, next(batches(1)))
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
            with pytest.raises(tiermem.errors.Unsupported, match=r"compiled_autograd off"):
                loss.backward()


@pytest.fixture
def compile_in_this_thread() -> Iterator[None]:
    """inductor keeps its compile threads for the process; a cold cache would start them here, as a leak."""
    with inductor_config.patch(compile_threads=1):
        yield


ACROSS = "a region compiled with"


def passing(graph: torch.fx.GraphModule, inputs: Any) -> Any:
    """A backend that nobody knows."""
    return graph.forward


def around(model: nn.Module, **options: Any) -> Any:
    def run(tokens: torch.Tensor) -> Any:
        return model(tokens)

    return torch.compile(run, **options)


@pytest.mark.parametrize(
    ("how", "options", "told"),
    [
        ("whole", {"backend": passing}, 1), ("whole in place", {"backend": passing}, 1),
        ("a function", {"backend": passing}, 1), ("blocks in place", {"backend": passing}, 0),
        ("blocks replaced", {"backend": passing}, 0), ("whole", {"backend": "eager"}, 0),
        ("whole", {"backend": "aot_eager"}, 0),
    ],
)  # fmt: skip
def test_what_is_cut_at_units_is_told_once(
    how: str, options: dict[str, Any], told: int, served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    model = BlockModel(blocks=2)
    with served.with_options(spills=False) as other, caplog.at_level("WARNING", "tiermem"):
        job: Any = other.attach(model)
        run: Any = around(model, **options) if how == "a function" else HOWS[how](model, **options)
        data, before = batches(1), served.daemon.stats().notices[NoticeKind.COMPILED_ACROSS_UNITS]
        for _ in range(2):
            default_loss(run, next(data)).backward()
        assert [ACROSS in text for text in job.stats().inexact] == [True] * told
        assert job.stats().fallbacks == ()

        def counted() -> str:
            count = served.daemon.stats().notices[NoticeKind.COMPILED_ACROSS_UNITS] - before
            return "" if count == told else f"{count} notices"

        within(2, counted)
    assert sum(ACROSS in record.getMessage() for record in caplog.records) == told


def cut_at_units(model: Any, optimizer: Any = None) -> Attached:
    """Not attached, with a hook at the border of every unit that dynamo does not trace."""

    @torch._dynamo.disable  # type: ignore[untyped-decorator]
    def nothing() -> None:
        pass

    for unit in discover_units(model):
        for module in unit.modules:
            module.register_forward_pre_hook(lambda module, args: nothing())
            module.register_forward_hook(lambda module, args, output: nothing())
    return NotAttached()


needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")


@needs_compiler
@pytest.mark.timeout(300)
@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_inductor_per_block(mode: str | None, served: Served, compile_in_this_thread: None) -> None:
    """Also in the mode that records CUDA graphs on a GPU: on the CPU there are none."""
    served.same(lambda attach: script(attach, blocks_in_place, mode=mode))


@needs_compiler
@pytest.mark.timeout(600)
def test_inductor_whole_up_to_fusion(served: Served, compile_in_this_thread: None) -> None:
    plain = script(not_attached, whole)
    managed = script(served.attach, whole)
    assert differences(script(cut_at_units, whole), managed) == [], "cut at the same places it is equal bit for bit"
    for ours, theirs in zip(managed[0], plain[0], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
