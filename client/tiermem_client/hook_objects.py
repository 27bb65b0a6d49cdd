"""Hooks live in the user's objects, so they are copied and pickled with them. A copy of a hook belongs to no job."""

from __future__ import annotations

from typing import Any


def nothing(*args: Any, **kwargs: Any) -> None:
    """What a copied or unpickled model has in the place of our hooks."""


def _make_nothing() -> Any:
    return nothing


class LeavesNoCopy:
    """Deep copies and pickles of this object are `nothing`."""

    __slots__ = ()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _make_nothing, ()
