"""`python -m benchmarks [NAME] [--json FILE] [--keep]`: run one benchmark, or all of them with their defaults.

A benchmark is a module of this package with TITLE, `add_arguments` and `run`, and an entry in BENCHMARKS. It imports
torch and the like only inside `run`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from rich.console import Console

from benchmarks import ablation, example, grant_path, mover, oversubscribed, placement, resident, scale, vertical
from benchmarks.report import Report, write_json
from benchmarks.results import keep


class Benchmark(Protocol):
    """What a benchmark's module offers."""

    TITLE: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Its own options, all with defaults that end within 20 minutes on 2 cores."""

    def run(self, args: argparse.Namespace) -> Report:
        """Measure. Raises SystemExit with a text where there is nothing to report."""


BENCHMARKS: dict[str, Benchmark] = {
    "example": example,
    "resident": resident,
    "oversubscribed": oversubscribed,
    "vertical": vertical,
    "ablation": ablation,
    "placement": placement,
    "grant_path": grant_path,
    "mover": mover,
    "scale": scale,
}


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 0 when everything asked for was measured."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Without a NAME, all of them.")
    parser.add_argument("--list", action="store_true", help="say which there are")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report there (without a NAME, a list)")
    keeping = "keep it in RESULTS.md and results/ beside this program, with a picture"
    parser.add_argument("--keep", action="store_true", help=keeping)
    names = parser.add_subparsers(dest="name", metavar="NAME")
    parsers = {}
    for name, benchmark in BENCHMARKS.items():
        parsers[name] = names.add_parser(name, help=benchmark.TITLE, description=benchmark.TITLE)
        benchmark.add_arguments(parsers[name])
        parsers[name].add_argument("--json", type=Path, metavar="FILE", default=argparse.SUPPRESS)
        parsers[name].add_argument("--keep", action="store_true", default=argparse.SUPPRESS, help=keeping)
    args = parser.parse_args(argv)
    if args.list:
        for name, benchmark in BENCHMARKS.items():
            print(f"{name:12}{benchmark.TITLE}")
        return 0
    console = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 160)
    reports = []
    for name in BENCHMARKS if args.name is None else (args.name,):
        options = args if args.name else parsers[name].parse_args([])
        report = BENCHMARKS[name].run(options)
        report.print(console)
        reports.append(report.as_json())
        if args.keep:
            keep(reports[-1], Path(__file__).parent)
    if args.json:
        write_json(args.json, reports if args.name is None else reports[0])
    return 0


if __name__ == "__main__":
    sys.exit(main())
