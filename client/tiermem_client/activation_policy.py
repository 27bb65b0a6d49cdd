"""What is to become of the tensors that a unit's forward saves for backward: the argument `activations`. Pure."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from tiermem.errors import InvalidArgument


class Policy(enum.StrEnum):
    """KEEP: they stay in the script's memory. RECOMPUTE: the forward runs again in backward. OFFLOAD: their bytes are
    in the store until backward wants them.
    """

    KEEP = "keep"
    RECOMPUTE = "recompute"
    OFFLOAD = "offload"


def policies_for(activations: Any, units: Sequence[str]) -> dict[str, Policy]:
    """The policy of every unit, and under "" of what is saved outside units.

    `activations`: one policy for all, or a mapping from unit names or patterns as of the shell; the first that matches
    a unit holds for it, and what none matches is kept. Raises InvalidArgument for another value, and for a pattern that
    matches nothing.
    """
    if activations is None:
        activations = Policy.KEEP
    if isinstance(activations, str):
        activations = {"*": activations}
    if not isinstance(activations, Mapping):
        raise InvalidArgument(
            f"activations={activations!r} is neither a policy ({_CHOICES}) nor a mapping from unit names to policies"
        )
    patterns = {_text(pattern): _policy(pattern, value) for pattern, value in activations.items()}
    names = dict.fromkeys(["", *units])
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            shown = ", ".join(repr(name) for name in units[:8]) + (", ..." if len(units) > 8 else "")
            raise InvalidArgument(f"activations names {pattern!r}, which matches no unit; the units are {shown}")
    return {
        name: next((policy for pattern, policy in patterns.items() if fnmatchcase(name, pattern)), Policy.KEEP)
        for name in names
    }


_CHOICES = " | ".join(repr(str(policy)) for policy in Policy)


def _text(pattern: Any) -> str:
    if not isinstance(pattern, str):
        raise InvalidArgument(f"activations names the unit {pattern!r}; give unit names or patterns, as text")
    return pattern


def _policy(pattern: str, value: Any) -> Policy:
    try:
        return Policy(value)
    except ValueError:
        raise InvalidArgument(f"activations of {pattern!r} is {value!r}; give {_CHOICES}") from None
