"""The page of results: from reports that are kept, with a picture each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.report import Machine, Report
from benchmarks.results import PICTURES, bars_of, keep

MACHINE = Machine("a CPU", 2, 1 << 33, "6.1", "3.11.0", "2.11.0", 0.0)


def report(name: str, rows: list[dict[str, object]], target: float | None = 0.9) -> dict[str, Any]:
    return Report(
        name, f"what {name} is", 0.5, 1.0, target, MACHINE, f"python -m benchmarks {name}", rows, ("a note",)
    ).as_json()


def test_the_page_has_every_kept_report_with_figure_bound_target_and_picture(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [
        {"way": "barrier", "policy": "LRU", "plain": 0.25, "read bytes": 3 << 20},
        {"way": "deferred", "policy": "LRU", "plain": None, "read bytes": None},
    ]
    keep(report("ablation", rows, target=None), tmp_path)
    keep(report("other", []), tmp_path)
    page = (tmp_path / "RESULTS.md").read_text()
    assert "| [ablation](#ablation) | 0.5 | 1 | none | what ablation is |" in page
    assert "| [other](#other) | 0.5 | 1 | 0.9 | what other is |" in page
    assert "| barrier | LRU | 0.25 | 3 MiB |" in page.replace("3.0 MiB", "3 MiB")
    assert "- a note" in page
    for name in ("ablation", "other"):
        assert f"![{name}](results/{name}.png)" in page
        assert (tmp_path / "results" / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_measuring_again_replaces_the_old_report(tmp_path: Path) -> None:
    keep(report("other", []), tmp_path)
    keep({**report("other", []), "figure": 0.75}, tmp_path)
    page = (tmp_path / "RESULTS.md").read_text()
    assert page.count("## other") == 1 and "| 0.75 |" in page


def test_rows_without_a_value_are_not_in_the_picture() -> None:
    rows: list[dict[str, object]] = [
        {"way": "barrier", "policy": "LRU", "plain": 0.25},
        {"way": "deferred", "policy": "LRU", "plain": None},
    ]
    assert bars_of(report("ablation", rows)) == (["barrier LRU"], {"plain": [0.25]}, PICTURES["ablation"].axis)


@pytest.mark.parametrize("target", [None, 0.9])
def test_a_report_without_rows_shows_figure_bound_and_target(target: float | None) -> None:
    names, groups, _ = bars_of(report("ablation", [], target))
    assert names == ["figure", "bound", "target"][: 2 + (target is not None)]
    assert groups["ablation"][:2] == [0.5, 1.0]
