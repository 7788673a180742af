"""Looks that all figures share: colours, second cues, units, and saving.

An algorithm has one colour everywhere (Okabe & Ito's colour-blind safe palette) and, as a second
cue, one line style and one marker. A worker is told apart inside an algorithm's colour by its tint
and by line style or hatch.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap, to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from configs.errors import UserError

Color = tuple[float, float, float]
LineStyle = str | tuple[int, tuple[float, ...]]

PNG_DPI = 150
POINTS_PER_INCH = 72.0
# Mean width of the font's letters, in units of the font size.
_EM_PER_LETTER = 0.58
DARK = "#222222"

RC: dict[str, Any] = {
    "font.size": 9.0,
    "axes.titlesize": 9.0,
    "axes.labelsize": 9.0,
    "figure.titlesize": 10.0,
    "legend.fontsize": 8.5,
    "legend.frameon": False,
    "legend.handlelength": 2.7,
    "legend.columnspacing": 1.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.5,
    "lines.markersize": 4.0,
    "hatch.linewidth": 0.6,
    "svg.fonttype": "path",
    # Without a fixed salt the ids inside an SVG, and so its bytes, differ from call to call.
    "svg.hashsalt": "plots",
    # Names come from other people's records: a $ in them is a letter, not the start of a formula.
    "text.parse_math": False,
}


@dataclass(frozen=True)
class Cue:
    """How one line or bar looks: its colour, and second cues for whoever cannot tell colours."""

    color: Color
    linestyle: LineStyle
    marker: str = ""
    hatch: str = ""


_ALGORITHM_CUES = {
    "sync-sgd": Cue(to_rgb("#0072B2"), "-.", "o"),
    "dp-sgd": Cue(to_rgb("#E69F00"), "--", "s"),
    "edp-sgd": Cue(to_rgb("#009E73"), "-", "^"),
}
_VARIANT_COLORS = ("#CC79A7", "#D55E00", "#56B4E9", "#000000", "#8C8C00")
_VARIANT_MARKERS = ("D", "v", "P", "X", "<", ">", "*")
_LINESTYLES: tuple[LineStyle, ...] = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (8, 2)))
_HATCHES = ("", "////", "....", "\\\\\\\\", "xxxx", "----", "oooo", "||||")

# Not among the algorithms' colours, so that a phase is never taken for an algorithm.
PHASES = {
    "data": Cue(to_rgb("#DDCC77"), "-"),
    "forward": Cue(to_rgb("#88CCEE"), "-"),
    "backward": Cue(to_rgb("#332288"), "-"),
    "delay": Cue(to_rgb("#AA4466"), "-", hatch="////"),
    "step": Cue(to_rgb("#666666"), "-"),
    "wait": Cue(to_rgb("#FFFFFF"), "-", hatch="...."),
}


def figure(width: float, height: float) -> Figure:
    """An empty figure (sizes in inches) that needs no display and is known to no global state."""
    made = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(made)
    made.get_layout_engine().set(w_pad=0.06, h_pad=0.06, hspace=0.04, wspace=0.07)
    return made


def variant_cues(labels: Iterable[str]) -> dict[str, Cue]:
    """One cue per variant label: fixed for the three algorithms, the palette's rest for others."""
    cues = dict(_ALGORITHM_CUES)
    others = sorted(set(labels) - set(cues))
    for i, label in enumerate(others):
        cues[label] = Cue(
            to_rgb(_VARIANT_COLORS[i % len(_VARIANT_COLORS)]),
            _LINESTYLES[(i + 3) % len(_LINESTYLES)],
            _VARIANT_MARKERS[i % len(_VARIANT_MARKERS)],
        )
    return cues


def worker_cue(base: Color | str, index: int, count: int) -> Cue:
    """Worker `index` of `count`: the base colour's tint from light to dark, line style, hatch."""
    return Cue(
        shade(base, index / (count - 1) if count > 1 else 1.0),
        _LINESTYLES[index % len(_LINESTYLES)],
        hatch=_HATCHES[index % len(_HATCHES)],
    )


def shade(base: Color | str, darkness: float) -> Color:
    """`base` mixed with white (darkness 0) up to mixed with black (darkness 1)."""
    red, green, blue = (
        (1 - darkness) * (0.5 + 0.5 * channel) + darkness * 0.6 * channel
        for channel in to_rgb(base)
    )
    return red, green, blue


def ramp(base: Color) -> LinearSegmentedColormap:
    """A sequential colour map from white through `base` to its darkest tint."""
    return LinearSegmentedColormap.from_list("ramp", ["#FFFFFF", base, shade(base, 1.0)])


def time_unit(largest: float) -> tuple[float, str]:
    """(factor, unit) in which times up to `largest` seconds read well; value = seconds × factor."""
    if largest < 0.5:
        return 1e3, "ms"
    if largest < 600:
        return 1.0, "s"
    if largest < 3 * 3600:
        return 1 / 60, "min"
    return 1 / 3600, "h"


def epoch_axis(axis: Axes, first: int, last: int, label: str) -> None:
    """An x axis with whole numbers, also where there is one epoch alone."""
    margin = 0.03 * (last - first) or 0.5
    axis.set_xlim(first - margin, last + margin)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=7, min_n_ticks=1))
    axis.set_xlabel(label)


def letters(points: float, size: float) -> int:
    """How many letters of font size `size` fit into a width of `points`."""
    return max(1, int(points / (_EM_PER_LETTER * size)))


def markers_at(points: int, line: int, wanted: int = 8) -> tuple[int, int]:
    """(first, spacing) of about `wanted` markers among `points`, shifted from line to line.

    The shift keeps markers of lines that coincide from hiding each other.
    """
    spacing = max(1, points // wanted)
    return line % spacing, spacing


def title(made: Figure, *lines: str) -> None:
    """Lines above all panels but for empty ones, broken where they are wider than the figure."""
    width = letters(POINTS_PER_INCH * made.get_figwidth(), RC["figure.titlesize"])
    made.suptitle("\n".join(textwrap.fill(line, width) for line in lines if line))


def legend(made: Figure, handles: Sequence[Artist]) -> None:
    """A legend below all panels, read row by row, in as few rows as the figure's width allows."""
    rows = 1
    while rows < len(handles) and _legend_width(_by_column(handles, rows)) > made.get_figwidth():
        rows += 1
    columns = _by_column(handles, rows)
    ordered = [handle for column in columns for handle in column]
    made.legend(handles=ordered, loc="outside lower center", ncols=len(columns))


def _by_column(handles: Sequence[Artist], rows: int) -> list[Sequence[Artist]]:
    """Columns, as Matplotlib fills them, of a legend that is read row by row.

    Where the rows are not full, Matplotlib's first columns hold one entry more.
    """
    columns = -(-len(handles) // rows)
    return [handles[column::columns] for column in range(columns)]


def _legend_width(columns: Sequence[Sequence[Artist]]) -> float:
    """Inches that a legend takes, by its letters."""
    longest = [max(len(handle.get_label()) for handle in column) for column in columns]
    around = RC["legend.handlelength"] + RC["legend.columnspacing"] + 0.8
    ems = sum(_EM_PER_LETTER * letters + around for letters in longest)
    return RC["legend.fontsize"] * ems / POINTS_PER_INCH


def svg_bytes(made: Figure) -> bytes:
    """`made` as an SVG file's content, byte for byte the same at each call."""
    content = io.BytesIO()
    with matplotlib.rc_context(RC):
        made.savefig(content, format="svg", metadata={"Date": None})
    return content.getvalue()


def save(made: Figure, stem: Path) -> list[Path]:
    """Write `made` as stem.svg and stem.png, byte for byte the same at each call; both paths."""
    svg, png = stem.with_name(stem.name + ".svg"), stem.with_name(stem.name + ".png")
    try:
        with matplotlib.rc_context(RC):
            svg.write_bytes(svg_bytes(made))
            # One layout for both files: it takes as long as drawing does.
            made.set_layout_engine("none")
            made.savefig(png, format="png", dpi=PNG_DPI)
    except OSError as error:
        raise UserError(f"{stem}: cannot write the figure ({error.strerror})") from error
    return [svg, png]
