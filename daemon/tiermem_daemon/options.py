"""What `tiermem serve` is told besides its configuration: how it was started, and by whom."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """`owner_pid`: end when this process ends. `ready_fd`: write one line there, and close it, when serving.

    `embedded`: started by a trainer for itself. `fault_script`: what fails when, for tests. `remove_at_exit`:
    directories made for this daemon alone, which nobody else removes where its owner was killed.
    """

    owner_pid: int | None = None
    ready_fd: int | None = None
    embedded: bool = False
    fault_script: str | None = None
    remove_at_exit: tuple[Path, ...] = ()
