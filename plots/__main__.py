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
from plots.output import write_output
from terminal import say


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
        output = write_output(options.runs, options.out)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    say(output.text)
    for note in output.notes:
        print(f"note: {note}", file=sys.stderr)
    say(f"\n{len(output.files)} files in {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
