"""Printing results, whatever becomes of the standard output."""

from __future__ import annotations

import os
import sys

from tqdm import tqdm


def say(text: str) -> None:
    """Prints a line, above the progress bar where there is one.

    Letters that the output's encoding lacks are replaced. Once nobody reads it any more (`| head`,
    a lost connection), nothing is printed and the work goes on.
    """
    if sys.stdout is None:  # closed from the start
        return
    encoding = sys.stdout.encoding or "utf-8"
    try:
        tqdm.write(text.encode(encoding, "replace").decode(encoding), file=sys.stdout)
        sys.stdout.flush()
    except BrokenPipeError:
        # What is left in the buffer would be tried again, in vain, when the process ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
