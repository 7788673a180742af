"""What a set of runs says meanwhile: a bar with the time left on a terminal, and lines per run."""

from __future__ import annotations

import sys

from tqdm import tqdm

from terminal import say

_BAR = "{l_bar}{bar}| {n_fmt}/{total_fmt} epochs [{elapsed} so far{postfix}]"


def duration(seconds: float | None) -> str:
    """Seconds in words, e.g. "42 s", "1.7 min", "12 min", "3.4 h"; "unknown" for None."""
    if seconds is None:
        return "unknown"
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    if seconds < 99.5 * 60:
        return f"{seconds / 60:.{1 if seconds < 597 else 0}f} min"
    return f"{seconds / 3600:.1f} h"


class Progress:
    """epochs: of all runs that are to be made, those they have already included."""

    def __init__(self, epochs: int) -> None:
        self._bar: tqdm | None = None
        if sys.stderr.isatty():
            self._bar = tqdm(total=epochs, bar_format=_BAR, leave=False, dynamic_ncols=True)

    def say(self, text: str) -> None:
        say(text)

    def show(self, done: int, title: str, left: float | None) -> None:
        """Moves the bar to `done` epochs; left: seconds until all runs are done."""
        if self._bar is not None:
            self._bar.set_description(title, refresh=False)
            self._bar.set_postfix_str(f"left: {duration(left)}", refresh=False)
            self._bar.n = done
            self._bar.refresh()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
