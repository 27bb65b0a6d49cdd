"""tiermem: GPU memory, pinned DRAM and NVMe flash as one pool for fine-tuning, with the result bit for bit that of the
plain script.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tiermem import errors

if TYPE_CHECKING:
    from tiermem_client.attach import attach
    from tiermem_client.empty_init import empty_init
    from tiermem_client.explain import Explanation, explain
    from tiermem_client.job import Job, TrainerStats

__version__ = "0.1.0"
__all__ = ["Explanation", "Job", "TrainerStats", "__version__", "attach", "empty_init", "errors", "explain"]

_LAZY = {
    "attach": "tiermem_client.attach",
    "empty_init": "tiermem_client.empty_init",
    "explain": "tiermem_client.explain",
    "Explanation": "tiermem_client.explain",
    "Job": "tiermem_client.job",
    "TrainerStats": "tiermem_client.job",
}


def __getattr__(name: str) -> Any:
    """The client, and with it torch, is imported when first used: the daemon and the command line do without."""
    if name not in _LAZY:
        raise AttributeError(f"module 'tiermem' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_LAZY[name]), name)
