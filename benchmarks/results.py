"""What was measured last, for people: `RESULTS.md` with a table and a picture for each benchmark, from the JSON reports
that are kept beside it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.report import cell, write_json

KEPT = "results"  # folder of reports and pictures, beside RESULTS.md


@dataclass(frozen=True, slots=True)
class Bars:
    """What a picture shows of each row: its name from the columns `label`, a bar for each column of `bars`."""

    label: tuple[str, ...]
    bars: tuple[str, ...]
    axis: str


PICTURES = {
    "oversubscribed": Bars(
        ("shape", "budget", "way"), ("plain", "phase", "resource"), "over the step (1: at the bound)"
    ),
    "vertical": Bars(("microbatches", "order"), ("plain", "resource"), "over the step"),
    "ablation": Bars(("way", "policy"), ("plain",), "plain step / step"),
    "placement": Bars(("budget", "variant"), ("step_s", "stall_s"), "seconds"),
    "example": Bars(("variant",), ("over plain", "over bound"), "step / other"),
    "mover": Bars(("what",), ("over fio",), "over fio"),
}


def keep(report: Mapping[str, Any], folder: Path) -> None:
    """Keep a report (`Report.as_json`) and its picture in `folder`/results, and write `folder`/RESULTS.md anew from all
    that are kept.
    """
    kept = folder / KEPT
    kept.mkdir(parents=True, exist_ok=True)
    write_json(kept / f"{report['benchmark']}.json", report)
    draw(report, kept / f"{report['benchmark']}.png")
    reports = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(kept.glob("*.json"))]
    (folder / "RESULTS.md").write_text(page(reports), encoding="utf-8")


def page(reports: Sequence[Mapping[str, Any]]) -> str:
    """The text of RESULTS.md."""
    lines = [
        "# What was measured last",
        "",
        "Written by `make bench` (or `python -m benchmarks NAME --keep`). What is what: [README.md](README.md).",
        "",
        "| benchmark | figure | bound | target | what |",
        "|---|---|---|---|---|",
    ]
    for report in reports:
        target = "none" if report["target"] is None else f"{report['target']:.3g}"
        row = [f"[{report['benchmark']}](#{report['benchmark']})", f"{report['figure']:.3g}", f"{report['bound']:.3g}"]
        lines.append(f"| {' | '.join([*row, target, report['what']])} |")
    for report in reports:
        name = report["benchmark"]
        machine = report["machine"]
        lines += ["", f"## {name}", "", f"`{report['command']}`", "", f"![{name}]({KEPT}/{name}.png)", ""]
        lines += _table(report["rows"])
        lines += ["", *(f"- {note}" for note in report["notes"])]
        lines.append(
            f"- {machine['cpu']}, {machine['cores']} cores, Linux {machine['kernel']}, Python {machine['python']}, "
            f"torch {machine['torch']}, load {machine['load']:.2f} at the start"
        )
    return "\n".join(lines) + "\n"


def _table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    if not rows:
        return []
    columns = list(rows[0])
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    return lines + [f"| {' | '.join(cell(column, row[column]) for column in columns)} |" for row in rows]


def draw(report: Mapping[str, Any], file: Path) -> None:
    """A PNG: bars of the rows where PICTURES has an entry, else figure, bound and target."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names, groups, axis = bars_of(report)
    height = max(2.2, 0.9 + 0.22 * len(names) * (len(groups) + 0.6))
    figure, axes = pyplot.subplots(figsize=(8, height), layout="constrained")
    thickness = 0.8 / len(groups)
    for number, (group, values) in enumerate(groups.items()):
        places = [row + (number - (len(groups) - 1) / 2) * thickness for row in range(len(names))]
        bars = axes.barh(places, values, thickness * 0.92, label=group)
        axes.bar_label(bars, fmt="%.3g", padding=2, fontsize=7)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel(axis, fontsize=8)
    axes.margins(x=0.1)
    axes.spines[["top", "right"]].set_visible(False)
    if len(groups) > 1:
        axes.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    axes.set_title(f"{report['benchmark']}: {report['what']}: {report['figure']:.3g}", fontsize=9, loc="left")
    figure.savefig(file, dpi=110)
    pyplot.close(figure)


def bars_of(report: Mapping[str, Any]) -> tuple[list[str], dict[str, list[float]], str]:
    """Names of the rows, values by bar, and what the axis is. Rows without a value are left out."""
    picture = PICTURES.get(report["benchmark"])
    if picture is not None:
        rows = [row for row in report["rows"] if all(isinstance(row.get(bar), int | float) for bar in picture.bars)]
        if rows:
            names = [" ".join(str(row[column]) for column in picture.label) for row in rows]
            return names, {bar: [float(row[bar]) for row in rows] for bar in picture.bars}, picture.axis
    known = {name: report[name] for name in ("figure", "bound", "target") if report[name] is not None}
    return list(known), {report["benchmark"]: [float(value) for value in known.values()]}, report["what"]
