"""Figures and the comparison summary from run folders.

    python -m plots runs/lenet-low runs/lenet-high --out figures

writes one set of figures (SVG and PNG) per experiment, summary.md and summary.csv, and prints the
summary. Needs the records alone: no display, no data set, no checkpoint.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from configs.errors import UserError
from plots.report import write_report


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0, or 1 after a one-line error on stderr."""
    parser = argparse.ArgumentParser(
        prog="python -m plots",
        description="Figures and the comparison summary from run folders.",
        epilog="example: python -m plots runs/lenet-low runs/lenet-high --out figures",
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUNS", help="folders that hold runs")
    parser.add_argument(
        "--out", required=True, type=Path, metavar="DIR", help="folder for figures and summary"
    )
    options = parser.parse_args(arguments)
    try:
        report = write_report(options.runs, options.out)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(report.text)
    for note in report.notes:
        print(f"note: {note}", file=sys.stderr)
    print(f"\n{len(report.files)} files in {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
