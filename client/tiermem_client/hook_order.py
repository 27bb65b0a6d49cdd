"""Dictionaries of optimizer hooks that keep ours at one end of the order, however late the user's were registered."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any


class Placed(OrderedDict[int, Any]):
    """`ours` is the id of our hook. A class of its own, since the handles that torch returns refer to it weakly."""

    ours: int = -1


class OursLast(Placed):
    def values(self) -> Any:
        return [hook for key, hook in self.items() if key != self.ours] + [
            hook for key, hook in self.items() if key == self.ours
        ]


class OursFirst(Placed):
    def values(self) -> Any:
        return [hook for key, hook in self.items() if key == self.ours] + [
            hook for key, hook in self.items() if key != self.ours
        ]
