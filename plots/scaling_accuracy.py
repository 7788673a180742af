"""Figures of what large global batches and many workers do to the time to train, and its result."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from plots import style
from plots.estimates import Spread
from plots.scaling_axes import (
    BY_WORKER,
    cross,
    handle,
    hollow,
    line_cue,
    log_axis,
    log_values,
    points,
    sharing,
)
from plots.scaling_records import Family, Point
from plots.scaling_seeds import scaled, spread
from plots.scaling_settings import RULES, Setting, in_words, names_apart

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
    """Points under ddp that are made to be trained to the end, if a run finished or diverged."""
    return [point for point in _made_to_train(family) if point.seeds]


def notes(family: Family) -> list[str]:
    """The runs that are neither finished nor diverged."""
    return [
        f"{run.path}: left out of accuracies, it has {len(run.epochs)} of {point.setting.epochs} "
        "epochs"
        for point in _made_to_train(family)
        for run in point.unfinished
    ]


def _made_to_train(family: Family) -> list[Point]:
    return [
        point
        for point in family.points
        if point.setting.exchange == "ddp" and point.setting.epochs >= LEAST_EPOCHS
    ]


def by_rule(trained: Sequence[Point]) -> dict[str, dict[str, Line]]:
    """By rule, algorithm and global batch: of the points that differ by these alone, the most."""
    alike = _commonest(
        trained, lambda key: (key.workers, key.epochs, key.kinds, key.slowed, key.rest)
    )
    found: dict[str, dict[str, Line]] = {}
    for rule in RULES:
        own = [point for point in alike if point.setting.rule == rule]
        for point in _commonest(own, lambda key: key.ramp):
            line = found.setdefault(rule, {}).setdefault(point.setting.algorithm, {})
            line[point.setting.batch] = point
    return found


def by_workers(trained: Sequence[Point]) -> dict[str, Line]:
    """By what they share, in words, and workers: trainings on several numbers of equal workers."""
    found: dict[tuple[Any, ...], Line] = {}
    for point in trained:
        key = point.setting
        if not key.plain:
            continue
        shared = key.batch_per_worker, key.epochs, key.rule, key.ramp, key.rest
        found.setdefault(shared, {})[key.workers] = point
    lines = {shared: line for shared, line in sorted(found.items()) if len(line) > 1}
    texts = names_apart(
        [f"{size:g} samples per worker" for size, *_ in lines],
        [
            {"rule": _RULE_TEXTS[rule], "epochs": f"{epochs} epochs",
             **in_words(json.loads(ramp)), **in_words(json.loads(rest))}
            for _, epochs, rule, ramp, rest in lines
        ],
    )  # fmt: skip
    return {text: dict(sorted(line.items())) for text, line in zip(texts, lines.values())}


def _commonest(found: Sequence[Point], kind: Callable[[Setting], Any]) -> list[Point]:
    """The points of the kind that most of them are of, in order of their batch."""
    counts = Counter(kind(point.setting) for point in found)
    if not counts:
        return []
    most = max(sorted(counts), key=counts.__getitem__)
    chosen = [point for point in found if kind(point.setting) == most]
    return sorted(chosen, key=lambda point: point.setting.batch)


def time_to_accuracy(family: Family, accuracy: float | None) -> Figure | None:
    """Seconds of training until `accuracy` (0..1) on the test set, by workers and global batch."""
    trained = trained_points(family)
    panels = [panel for panel in _panels(trained, with_workers=True) if panel[2]]
    if accuracy is None or not panels:
        return None
    figure = style.figure(1.4 + 3.8 * len(panels), 4.4)
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    times = [s for point in trained for s in point.seconds_to(accuracy).values()]
    factor, unit = style.time_unit(max(times, default=1.0))
    handles = {}
    for axis, (text, label, lines) in zip(axes, panels):
        for place, (name, (line, cue)) in enumerate(lines.items()):
            _times_line(axis, line, accuracy, factor, cue, place)
            handles[name] = handle(cue.color, name, cue.marker)
        log_axis(axis.xaxis, sorted({x for line, _ in lines.values() for x in line}), label)
        axis.set_title(text, loc="left")
    axes[0].set_ylabel(f"training time ({unit})")
    log_values(axes[0].yaxis, "{x:g}")
    style.title(
        figure, f"{family.title}: training time to {100 * accuracy:g} % of the test set",
        "mean ± 1 sd over the seeds that reach it; hollow: not all do; × at the upper edge: none",
        sharing(family.cores, max(point.setting.workers for point in trained)),
    )  # fmt: skip
    style.legend(figure, list(handles.values()))
    return figure


def accuracy_by_batch(family: Family) -> Figure | None:
    """Final test accuracy against the global batch, by rule; and for mixed workers by algorithm."""
    panels = [
        (text, label, {name: pair for name, pair in lines.items() if len(pair[0]) > 1})
        for text, label, lines in _panels(trained_points(family), with_workers=False)
    ]
    panels = [panel for panel in panels if panel[2]]
    if not panels:
        return None
    figure = style.figure(1.4 + 4.1 * len(panels), 4.4)
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    handles = {}
    for axis, (text, label, lines) in zip(axes, panels):
        for place, (name, (line, cue)) in enumerate(lines.items()):
            _accuracies(axis, line, cue, 2 ** (0.08 * (place - (len(lines) - 1) / 2)), place)
            handles[name] = handle(cue.color, name, cue.marker)
        log_axis(axis.xaxis, sorted({x for line, _ in lines.values() for x in line}), label)
        axis.set_title(text, loc="left")
    axes[0].set_ylabel("final test top-1 (%)")
    style.title(
        figure, f"{family.title}: accuracy and global batch",
        "mean ± 1 sd over the seeds that finish; hollow: some diverge; × at the lower edge: all do",
        _PUBLISHED,
    )  # fmt: skip
    style.legend(figure, list(handles.values()))
    return figure


def _panels(
    trained: Sequence[Point], with_workers: bool
) -> list[tuple[str, str, dict[str, tuple[Line, style.Cue]]]]:
    """Title, x axis, and by legend text the line and its look, of each panel."""
    batch, equal = "global batch (samples)", "equal workers, sync-sgd"
    cues = style.variant_cues(point.setting.algorithm for point in trained)
    rules = {
        _RULE_TEXTS[rule]: (line, _RULE_CUES[rule])
        for rule, lines in by_rule([point for point in trained if point.setting.plain]).items()
        for line in lines.values()
    }
    panels = [(equal, batch, rules)]
    unequal = by_rule([point for point in trained if point.setting.cluster == "mixed"])
    for rule, lines in unequal.items():
        first = next(point for line in lines.values() for point in line.values())
        text = f"{first.setting.mix}, {_RULE_TEXTS[rule]}"
        panels.append((text, batch, {name: (line, cues[name]) for name, line in lines.items()}))
    if not with_workers:
        return panels
    found = by_workers(trained)
    scaled_out = {
        text: (line, line_cue(BY_WORKER, place, len(found), len(_RULE_CUES)))
        for place, (text, line) in enumerate(found.items())
    }
    return [(equal, "workers", scaled_out), *panels]


def _times_line(
    axis: Axes, line: Line, accuracy: float, factor: float, cue: style.Cue, place: int
) -> None:
    """factor: from seconds to the axis' unit; place: of the line in its panel, from 0."""
    reached: dict[float, Spread] = {}
    for x, point in line.items():
        times = point.seconds_to(accuracy)
        if not times:
            cross(axis, x, 0.97 - 0.05 * place, cue)
            continue
        reached[x] = scaled(spread(times), factor)
        if len(times) < len(point.seeds):
            hollow(axis, x, reached[x].mean, cue)
    points(axis, reached, cue)


def _accuracies(axis: Axes, line: Line, cue: style.Cue, shift: float, place: int) -> None:
    """shift: factor on x, so that lines that coincide do not hide each other; place: from 0."""
    reached: dict[float, Spread] = {}
    for batch, point in line.items():
        x = shift * batch
        if not point.top1:
            cross(axis, x, 0.03 + 0.05 * place, cue)
            continue
        reached[x] = scaled(spread(point.top1), 100)
        if point.diverged:
            hollow(axis, x, reached[x].mean, cue)
    points(axis, reached, cue, cue.linestyle)
