"""What every benchmark reports: one figure beside its bound, the rows behind it, the machine, and the command that
gives it again.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

from tiermem.units import format_size

Row = Mapping[str, object]
"""Column to value, the same columns in every row. The unit is in the column's name; None is shown as a dash."""


@dataclass(frozen=True, slots=True)
class Machine:
    """Where a figure was measured. `load` is the one-minute load average when the benchmark began: what else was
    running.
    """

    cpu: str
    cores: int
    memory_bytes: int
    kernel: str
    python: str
    torch: str
    load: float

    @classmethod
    def here(cls) -> Machine:
        """This machine, now."""
        return cls(
            cpu=_cpu_model(),
            cores=len(os.sched_getaffinity(0)),
            memory_bytes=psutil.virtual_memory().total,
            kernel=platform.release(),
            python=platform.python_version(),
            torch=importlib.metadata.version("torch"),
            load=os.getloadavg()[0],
        )

    def __str__(self) -> str:
        return (
            f"{self.cpu}, {self.cores} cores, {format_size(self.memory_bytes)}, Linux {self.kernel}, "
            f"Python {self.python}, torch {self.torch}, load {self.load:.2f} at the start"
        )


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


@dataclass(frozen=True, slots=True)
class Report:
    """`figure` is what `what` says, `bound` the least that the hardware allows, `target` what was promised (None:
    nothing), all three in one unit. `notes` are sentences a reader needs to judge them.
    """

    benchmark: str
    what: str
    figure: float
    bound: float
    target: float | None
    machine: Machine
    command: str
    rows: Sequence[Row]
    notes: Sequence[str] = ()

    def as_json(self) -> dict[str, object]:
        return asdict(self)

    def print(self, console: Console) -> None:
        """The table, then one line each."""
        columns = list(self.rows[0]) if self.rows else []
        table = Table(title=self.benchmark, title_justify="left", box=None, pad_edge=False, header_style="bold")
        for column in columns:
            table.add_column(column, justify="right")
        for row in self.rows:
            table.add_row(*(cell(column, row[column]) for column in columns))
        console.print(table)
        target = "none stated" if self.target is None else f"{self.target:.3g}"
        console.print(f"figure   {self.figure:.3g}  ({self.what})")
        console.print(f"bound    {self.bound:.3g}")
        console.print(f"target   {target}")
        for note in self.notes:
            console.print(f"note     {note}")
        console.print(f"machine  {self.machine}")
        console.print(f"command  {self.command}")


def cell(column: str, value: object) -> str:
    """A value as text, by the unit in its column's name."""
    if value is None:
        return "-"
    if isinstance(value, int | float) and "bytes" in column:
        return format_size(round(value))
    if isinstance(value, float):
        return f"{value:.0%}" if column.endswith("share") else f"{value:.3g}"
    return str(value)


def write_json(file: Path, document: object) -> None:
    """The document, indented, with a newline at its end."""
    file.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
