"""What torch.compile covers, as far as a script must know: a region that is cut at units, and CUDA graphs.

A unit's hooks are Python that has to run, so a compiled region that reaches over units is cut into a graph per piece.
inductor fuses kernels within a graph only, and rounds accordingly: the result is bit for bit that of a plain run cut at
the same places, and that of the uncut run up to the last bits. Uncut there would be one kernel for the end of a unit
and the beginning of the next, which needs the weights of both.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn
from torch._compile import _disable_dynamo

from tiermem.errors import Unsupported

_F = TypeVar("_F", bound=Callable[..., Any])
_CUT_IS_EXACT = frozenset({"eager", "aot_eager"})  # one kernel per operation, wherever a graph ends
_DEPTH = 8

try:
    from torch._C._dynamo import eval_frame as _frames

    _skip_only_this = _frames._FrameExecStrategy(_frames._FrameAction.SKIP, _frames._FrameAction.DEFAULT)
    _callback = _frames.get_eval_frame_callback
    _set_strategy = _frames.set_code_exec_strategy
    SEES_REGIONS = True
except (ImportError, AttributeError):
    SEES_REGIONS = False
"""Whether torch has the private calls by which a compiled region can be told; where it has not, attach notes it."""


def not_traced(function: _F) -> _F:
    """Dynamo neither traces nor inlines `function`, and what compiles around it stays visible inside (unlike in
    `torch._dynamo.disable`, which is what it is where `SEES_REGIONS` is false); what it calls must be disabled. Does
    not import torch._dynamo.
    """
    if not SEES_REGIONS:
        return _disable_dynamo(function)  # type: ignore[return-value]
    _set_strategy(function.__code__, _skip_only_this)
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return function


@not_traced
def region() -> object | None:
    """The compiled region that this thread is in, as dynamo's callback for it: one object per torch.compile. None
    outside, and where torch cannot say. Costs one call.
    """
    callback: object = _callback() if SEES_REGIONS else None
    return callback if callable(callback) else None


def backend_of(region: object) -> str:
    """The backend's name; "unknown" where it cannot be told."""
    found: Any = region
    for _ in range(_DEPTH):
        name = getattr(found, "_compiler_name", None) or getattr(found, "compiler_name", None)
        if isinstance(name, str):
            return name
        found = getattr(found, "_torchdynamo_orig_backend", None)
    return "unknown"


@dataclass(slots=True)
class Cuts:
    """Notices that one compiled region has entered two units: told once, unless its backend computes the same when cut.

    Used by the thread that runs the model.
    """

    tell: Callable[[str], None] = lambda text: None
    _region: object | None = None
    _unit: object = None
    _told: bool = False

    @_disable_dynamo
    def entered(self, current: object, unit: object, name: str) -> None:
        """A unit, or the root around all of them, begins in this region."""
        if self._told:
            return
        if current is self._region and unit is not self._unit:
            self._told = True
            if (backend := backend_of(current)) not in _CUT_IS_EXACT:
                self.tell(_cut_text(f"a region compiled with {backend} runs {name!r} among others"))
        self._region, self._unit = current, unit


def compiled_across_units(model: nn.Module, unit_modules: Collection[nn.Module]) -> list[str]:
    """What will be told of a model, beforehand: modules around units that are compiled with inductor. A function around
    the model is not visible here.
    """
    found = []
    for name, module in model.named_modules():
        if _inductor_options(module) is not None and any(m in unit_modules for m in _inside(module)):
            found.append(_cut_text(f"{_shown(name)} is compiled as a whole"))
    return found[:1]


def cuda_graph_refusals(model: nn.Module) -> list[str]:
    """Modules that are compiled with CUDA graphs and are on a CUDA device. On the CPU the option changes nothing."""
    return [
        f"{_shown(name)} is compiled with CUDA graphs (mode "
        "'reduce-overhead' or 'max-autotune'), whose replays run no hook, so nothing would bring weights in; compile "
        "with mode=None or 'max-autotune-no-cudagraphs'"
        for name, module in model.named_modules()
        if (_inductor_options(module) or {}).get("triton.cudagraphs")
        and any(p.device.type == "cuda" for p in module.parameters())
    ]


def stream_is_capturing() -> bool:
    """Whether a CUDA graph is being captured on this thread's stream. Asks CUDA only where the script has used it."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def refuse_capture(what: str) -> None:
    """Raise Unsupported: `what` is entered while a graph is captured."""
    raise Unsupported(
        f"a CUDA graph is being captured while {what} runs; a replay runs no hook, so nothing would bring its bytes "
        "in; capture what is around it only, and compile with mode=None or 'max-autotune-no-cudagraphs'"
    )


def _inside(module: nn.Module) -> Iterable[nn.Module]:
    return (m for m in module.modules() if m is not module)


def _inductor_options(module: nn.Module) -> dict[str, Any] | None:
    """None where the module itself is not compiled, or not with inductor. `_compiled_call_impl` is `module.compile()`;
    an OptimizedModule has the attribute itself.
    """
    for compiled in (module.__dict__, vars(getattr(module, "_compiled_call_impl", None) or object)):
        if (ask := compiled.get("get_compiler_config")) is not None:
            options: dict[str, Any] | None = ask()
            return options
    return None


def _shown(name: str) -> str:
    return name.replace("_orig_mod", "").strip(".") or "the model"


def _cut_text(what: str) -> str:
    return (
        f"torch.compile: {what}; its graphs are cut at tiermem's units, so kernels are fused otherwise than without "
        "it, and results may differ in the last bits; compile block by block (block.compile()) to have them equal"
    )
