"""Figures of what large global batches and many workers do to the time to train, and its result."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from plots import style
from plots.estimates import Spread
from plots.scaling_axes import BY_WORKER, MARKERS, handle, log_axis, log_values, points
from plots.scaling_records import RULES, Family, Point, seconds_to

# Runs of fewer epochs are made for their times alone.
LEAST_EPOCHS = 10
_RULE_CUES = dict(
    zip(
        RULES,
        (
            style.Cue(style.to_rgb("#CC79A7"), ":", "o"),
            style.Cue(style.to_rgb("#D55E00"), "--", "s"),
            style.Cue(style.to_rgb("#56B4E9"), "-", "D"),
        ),
    )
)
_RULE_TEXTS = dict(zip(RULES, ("rate unscaled", "rate linear", "rate linear, warm-up")))
_PUBLISHED = (
    "published: ResNet-50 on ImageNet, top-1 error 23.60 % at 256, 23.74 % at 8,192 "
    "(Goyal et al. 2017)"
)

# Points by number of workers or by global batch, and how they are drawn.
Line = dict[int, Point]


def trained_points(family: Family) -> list[Point]:
    """Points of runs that are made to be trained to the end, under ddp."""
    return [
        point
        for point in family.points
        if point.setting.exchange == "ddp" and point.setting.epochs >= LEAST_EPOCHS
    ]


def by_rule(trained: Sequence[Point], cluster: str, algorithm: str) -> dict[str, Line]:
    """By rule and global batch: of the points that differ by these alone, those of the most."""
    groups = Counter(
        (p.setting.workers, p.setting.epochs, p.setting.rest)
        for p in trained
        if (p.setting.cluster, p.setting.algorithm) == (cluster, algorithm)
    )
    if not groups:
        return {}
    most = max(sorted(groups), key=groups.__getitem__)
    found: dict[str, Line] = {}
    for rule in RULES:
        for point in trained:
            key = point.setting
            own = key.workers, key.epochs, key.rest
            if (key.cluster, key.algorithm, key.rule, own) == (cluster, algorithm, rule, most):
                found.setdefault(rule, {})[key.batch] = point
    return {rule: dict(sorted(line.items())) for rule, line in found.items()}


def by_workers(trained: Sequence[Point]) -> dict[float, Line]:
    """By batch per worker and workers: equal workers' trainings on several numbers of workers."""
    found: dict[tuple[float, int, str, str], Line] = {}
    for point in trained:
        key = point.setting
        if (key.cluster, key.algorithm) == ("equal", "sync-sgd"):
            line = found.setdefault((key.batch_per_worker, key.epochs, key.rule, key.rest), {})
            line[key.workers] = point
    return {
        size: dict(sorted(line.items()))
        for (size, *_), line in sorted(found.items())
        if len(line) > 1
    }


def time_to_accuracy(family: Family, accuracy: float | None) -> Figure | None:
    """Seconds of training until `accuracy` (0..1) on the test set, by workers and global batch."""
    trained = trained_points(family)
    panels = [panel for panel in _panels(trained, with_workers=True) if panel[2]]
    if accuracy is None or not panels:
        return None
    figure = style.figure(1.4 + 3.8 * len(panels), 4.4)
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    times = [s for point in trained for s in _times(point, accuracy) if s is not None]
    factor, unit = style.time_unit(max(times, default=1.0))
    handles = {}
    for axis, (title, label, lines) in zip(axes, panels):
        for place, (text, (line, cue)) in enumerate(lines.items()):
            _times_line(axis, line, accuracy, factor, cue, place)
            handles[text] = handle(cue.color, text, cue.marker)
        log_axis(axis.xaxis, sorted({x for line, _ in lines.values() for x in line}), label)
        axis.set_title(title, loc="left")
    axes[0].set_ylabel(f"training time ({unit})")
    log_values(axes[0].yaxis, "{x:g}")
    style.title(
        figure, f"{family.title}: training time to {100 * accuracy:g} % of the test set",
        "mean ± 1 sd over the seeds that reach it; × at the upper edge: none does",
    )  # fmt: skip
    style.legend(figure, list(handles.values()))
    return figure


def accuracy_by_batch(family: Family) -> Figure | None:
    """Final test accuracy against the global batch, by rule; and for mixed workers by algorithm."""
    panels = [
        (title, label, {text: pair for text, pair in lines.items() if len(pair[0]) > 1})
        for title, label, lines in _panels(trained_points(family), with_workers=False)
    ]
    panels = [panel for panel in panels if panel[2]]
    if not panels:
        return None
    figure = style.figure(1.4 + 4.1 * len(panels), 4.4)
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    handles = {}
    for axis, (title, label, lines) in zip(axes, panels):
        for place, (text, (line, cue)) in enumerate(lines.items()):
            _accuracies(axis, line, cue, 2 ** (0.08 * (place - (len(lines) - 1) / 2)))
            handles[text] = handle(cue.color, text, cue.marker)
        log_axis(axis.xaxis, sorted({x for line, _ in lines.values() for x in line}), label)
        axis.set_title(title, loc="left")
    axes[0].set_ylabel("final test top-1 (%)")
    style.title(
        figure, f"{family.title}: accuracy and global batch",
        "mean ± 1 sd over seeds; hollow: a seed did not finish", _PUBLISHED,
    )  # fmt: skip
    style.legend(figure, list(handles.values()))
    return figure


def _panels(
    trained: Sequence[Point], with_workers: bool
) -> list[tuple[str, str, dict[str, tuple[Line, style.Cue]]]]:
    """Title, x axis, and by legend text the line and its look, of each panel."""
    batch = "global batch (samples)"
    rules = by_rule(trained, "equal", "sync-sgd")
    cues, unequal = style.variant_cues(()), {}
    for name in cues:
        for rule, line in by_rule(trained, "mixed", name).items():
            unequal[rule] = unequal.get(rule, {}) | {name: (line, cues[name])}
    panels = [
        ("equal workers, sync-sgd", batch,
         {_RULE_TEXTS[rule]: (line, _RULE_CUES[rule]) for rule, line in rules.items()}),
        *((f"mixed workers, {_RULE_TEXTS[rule]}", batch, lines) for rule, lines in unequal.items()),
    ]  # fmt: skip
    if not with_workers:
        return panels
    found = by_workers(trained)
    lines = {}
    for place, (size, line) in enumerate(found.items()):
        tint = style.worker_cue(BY_WORKER, place, len(found))
        cue = style.Cue(tint.color, tint.linestyle, MARKERS[3 + place % 5])
        lines[f"{size:g} samples per worker"] = line, cue
    return [("equal workers, sync-sgd", "workers", lines), *panels]


def _times(point: Point, accuracy: float) -> list[float | None]:
    return [seconds_to(run, accuracy) for run in point.runs]


def _times_line(
    axis: Axes, line: Line, accuracy: float, factor: float, cue: style.Cue, place: int
) -> None:
    reached: dict[int, Spread] = {}
    for x, point in line.items():
        times = [factor * s for s in _times(point, accuracy) if s is not None]
        if times:
            reached[x] = Spread.of(times)
        else:
            axis.plot(x, 0.97 - 0.05 * place, "x", color=cue.color, markersize=7,
                      transform=axis.get_xaxis_transform())  # fmt: skip
    points(axis, reached, cue, cue.marker)


def _accuracies(axis: Axes, line: Line, cue: style.Cue, shift: float) -> None:
    """shift: factor on x, so that lines that coincide do not hide each other."""
    tops = [point.top1 for point in line.values()]
    x, means = [shift * batch for batch in line], [100 * top.mean for top in tops]
    axis.errorbar(
        x, means, [100 * (top.sd or 0.0) for top in tops], color=cue.color, marker=cue.marker,
        linestyle=cue.linestyle, capsize=3, elinewidth=1,
    )  # fmt: skip
    for place, point in enumerate(line.values()):
        if point.diverged:
            axis.plot(x[place], means[place], cue.marker, color=cue.color, zorder=4,
                      markerfacecolor="white")  # fmt: skip
