"""Figures and summary from fake runs; numbers are checked against computations of their own."""

from __future__ import annotations

import csv
import json
import os
import statistics
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from conftest import ROOT
from fake_runs import fake_record, write_run
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.image import imread

import reader
from configs.errors import UserError
from plots import figures, style, summary, worker_figures
from plots.__main__ import main
from plots.delays import delay_level
from plots.grouping import Experiment, group, workloads
from plots.output import Output, write_output
from plots.records import read_runs, warm_steps

ALGORITHMS = ("sync-sgd", "dp-sgd", "edp-sgd")
HIGH = [{"ranks": [1], "kind": "constant", "seconds": 0.1}]
DRAWN = (
    figures.loss_accuracy_epochs,
    figures.loss_accuracy_time,
    worker_figures.busy_histograms,
    worker_figures.step_densities,
    worker_figures.phases,
    worker_figures.shares_busy_epochs,
)
NAMES = (
    "loss-accuracy-epochs",
    "loss-accuracy-time",
    "busy-time-histograms",
    "step-time-densities",
    "phases",
    "shares-busy-epochs",
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two delay levels of one experiment, three algorithms, and a variant with static shares."""
    root = tmp_path_factory.mktemp("runs")
    for algorithm in ALGORITHMS:
        for seed in (42, 43, 44):
            write_run(root, algorithm=algorithm, seed=seed)
        write_run(root, name="lenet-high", algorithm=algorithm, stragglers=HIGH)
    write_run(
        root, "lenet-low+partition.policy=static",
        partition__policy="static", partition__shares=[0.7, 0.3],
    )  # fmt: skip
    return root


@pytest.fixture(scope="module")
def report(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Output, Path]:
    out = tmp_path_factory.mktemp("report")
    return write_output([runs], out), out


def experiments_of(root: Path) -> list[Experiment]:
    return group([reader.read_run(path) for path in reader.find_runs([root])])[0]


def records(path: Path) -> list[dict]:
    return [json.loads(line) for line in (path / "epochs.jsonl").read_text().splitlines()]


def csv_rows(out: Path) -> dict[tuple[str, str], dict[str, str]]:
    with open(out / "summary.csv", newline="", encoding="utf-8") as file:
        return {(row["experiment"], row["algorithm"]): row for row in csv.DictReader(file)}


# --- the report -------------------------------------------------------------------------------


def test_every_figure_is_written_as_svg_and_png(report: tuple[Output, Path]) -> None:
    written, out = report
    stems = {f"{level}_{name}" for level in ("lenet-low", "lenet-high") for name in NAMES}
    stems.add("lenet-synthetic_time-per-epoch")
    expected = {f"{stem}.{kind}" for stem in stems for kind in ("svg", "png")}
    expected |= {"summary.md", "summary.csv"}
    assert {path.name for path in out.iterdir()} == expected
    assert {path.name for path in written.files} == expected
    for stem in stems:
        assert ElementTree.parse(out / f"{stem}.svg").getroot().tag.endswith("svg")
        pixels = imread(out / f"{stem}.png")
        assert min(pixels.shape[:2]) > 400 and pixels.std() > 0.02


def test_command_line_without_display_gives_the_same_bytes(
    runs: Path, report: tuple[Output, Path], tmp_path: Path
) -> None:
    environment = {k: v for k, v in os.environ.items() if k not in ("DISPLAY", "WAYLAND_DISPLAY")}
    environment.update(MPLBACKEND="TkAgg", PYTHONHASHSEED="1", PYTHONIOENCODING="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "plots", str(runs / "lenet-high"), "--out", str(tmp_path)],
        cwd=ROOT, env=environment, capture_output=True, text=True, encoding="utf-8", timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "lenet on synthetic" in done.stdout and "0.1 s on worker 1:" in done.stdout
    again = [path for path in report[0].files if path.name.startswith("lenet-high_")]
    assert len(again) == 2 * len(NAMES)
    for path in again:
        assert (tmp_path / path.name).read_bytes() == path.read_bytes(), path.name


def test_figures_leave_no_global_state(report: tuple[Output, Path]) -> None:
    pyplot = sys.modules.get("matplotlib.pyplot")
    assert pyplot is None or not pyplot.get_fignums()
    assert matplotlib.rcParams["svg.hashsalt"] is None


# --- the summary ------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_summary_numbers(runs: Path, report: tuple[Output, Path], algorithm: str) -> None:
    seeds = [records(runs / "lenet-low" / algorithm / f"seed-{n}") for n in (42, 43, 44)]
    baseline = [records(runs / "lenet-low" / "sync-sgd" / f"seed-{n}") for n in (42, 43, 44)]
    row = csv_rows(report[1])["lenet-low", algorithm]

    def per_epoch(run: list[dict]) -> float:
        return sum(epoch["epoch_seconds"] for epoch in run) / len(run)

    def balanced(run: list[dict]) -> float:
        return statistics.median(epoch["epoch_seconds"] for epoch in run[6:])

    def check(name: str, values: list[float]) -> None:
        assert float(row[f"{name}_mean"]) == pytest.approx(statistics.mean(values))
        assert float(row[f"{name}_sd"]) == pytest.approx(statistics.stdev(values))

    check("epoch_seconds", [per_epoch(run) for run in seeds])
    check("balanced_seconds", [balanced(run) for run in seeds])
    check("final_top1", [run[-1]["test_top1"] for run in seeds])
    check("best_top1", [max(epoch["test_top1"] for epoch in run) for run in seeds])
    check("run_seconds", [run[-1]["total_seconds"] for run in seeds])
    for name, seconds in (("speed_up", per_epoch), ("balanced_speed_up", balanced)):
        ratios = [seconds(over) / seconds(under) for over, under in zip(baseline, seeds)]
        assert float(row[name]) == pytest.approx(statistics.geometric_mean(ratios))
        assert float(row[f"{name}_low"]) <= float(row[name]) <= float(row[f"{name}_high"])
    if algorithm == "sync-sgd":
        assert row["imbalance"] == ""
    else:
        last = statistics.mean(run[-1]["imbalance"] for run in seeds)
        assert float(row["imbalance"]) == pytest.approx(last)
    assert (row["workers"], row["seeds"], row["epochs"]) == ("2", "3", "12")


def test_levels_share_a_table_and_variants_are_told_apart(report: tuple[Output, Path]) -> None:
    written, out = report
    markdown = (out / "summary.md").read_text(encoding="utf-8")
    assert markdown.count("\n## ") == 1 and "\n## lenet on synthetic\n" in markdown
    for row in csv_rows(out).values():
        assert f"| {row['delay']} | {row['algorithm']} | 2 |" in markdown
    assert ("lenet-low", "edp-sgd (static)") in csv_rows(out)
    low, high = written.text.index("0.05 s on worker 1:"), written.text.index("0.1 s on worker 1:")
    assert low < high


def test_spread_is_shown_for_several_seeds_alone(report: tuple[Output, Path]) -> None:
    lines = report[0].text.splitlines()
    several = [line for line in lines if line.startswith(ALGORITHMS) and " 3 " in line[:45]]
    single = [line for line in lines if line.startswith(ALGORITHMS) and line not in several]
    assert len(several) == 3 and all("±" in line for line in several)
    assert len(single) == 4 and not any("±" in line for line in single)


def test_plain_text_is_aligned(report: tuple[Output, Path]) -> None:
    table = report[0].text.split("\n\n")[0].splitlines()[1:]
    assert len({len(line) for line in table if not line.endswith(":")}) == 1


def test_unfinished_seeds_are_left_out_where_others_have_finished(tmp_path: Path) -> None:
    write_run(tmp_path, algorithm="sync-sgd", seed=1)
    write_run(tmp_path, algorithm="sync-sgd", seed=2, recorded=5)
    write_run(tmp_path, algorithm="edp-sgd", seed=1, recorded=4)
    write_run(tmp_path, algorithm="edp-sgd", seed=2, recorded=3)
    (workload,) = workloads(experiments_of(tmp_path))
    sync, edp = table = summary.rows(workload)
    assert (sync.seeds, sync.left_out, sync.epochs, sync.finished) == (1, 1, 12, True)
    assert (edp.seeds, edp.left_out, edp.epochs, edp.finished) == (2, 0, 3, False)
    third = [
        records(tmp_path / "lenet-low" / "edp-sgd" / f"seed-{seed}")[2]["test_top1"]
        for seed in (1, 2)
    ]
    assert edp.final_top1.mean == pytest.approx(statistics.mean(third))
    text = summary.to_text(table)
    assert "1 + 1*" in text and "edp-sgd*" in text and "3/12*" in text
    assert any(line.startswith("* unfinished") for line in summary.notes(table))


# --- grouping ---------------------------------------------------------------------------------


def test_worker_counts_make_experiments_of_their_own(tmp_path: Path) -> None:
    write_run(tmp_path / "two", epochs=3)
    write_run(tmp_path / "four", epochs=3, workers=4)
    experiments = experiments_of(tmp_path)
    assert [e.slug for e in experiments] == ["lenet-low-2-workers", "lenet-low-4-workers"]
    (workload,) = workloads(experiments)
    assert workload.delay_labels() == [
        "2 workers, 0.05 s on worker 1",
        "4 workers, 0.05 s on worker 1",
    ]


def test_the_same_seed_twice_counts_once(tmp_path: Path) -> None:
    kept = write_run(tmp_path, seed=1, epochs=3)
    double = write_run(tmp_path / "copy", seed=1, epochs=3)
    runs = [reader.read_run(path) for path in reader.find_runs([tmp_path])]
    ((variant,),), notes = [e.variants for e in group(runs)[0]], group(runs)[1]
    assert [run.path for run in variant.runs] == [kept]
    assert len(notes) == 1 and str(double) in notes[0]


def test_a_run_whose_number_of_workers_changed_is_left_out(tmp_path: Path) -> None:
    path = write_run(tmp_path, "changed", epochs=3)
    lines = [json.loads(line) for line in (path / "epochs.jsonl").read_text().splitlines()]
    lines[-1] = fake_record(2, 1)
    (path / "epochs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(UserError, match="number of workers changed: 2, then 1"):
        read_runs([tmp_path])
    kept = write_run(tmp_path, "steady", epochs=3)
    runs, notes = read_runs([tmp_path])
    assert [run.path for run in runs] == [kept] and len(notes) == 1 and str(path) in notes[0]
    assert list(notes) == [note for note in write_output([tmp_path], tmp_path / "out").notes[:1]]


def test_a_run_that_diverged_is_named_and_not_drawn(tmp_path: Path) -> None:
    lost = write_run(tmp_path, "steady", epochs=3, recorded=2)
    (lost / "diverged").write_text('{"epoch": 2, "message": "not finite"}')
    with pytest.raises(UserError, match="diverged in epoch 2"):
        write_output([tmp_path], tmp_path / "out")
    kept = write_run(tmp_path, "steady", epochs=3, seed=43)
    at_once = write_run(tmp_path, "steady", epochs=3, seed=44)
    (at_once / "diverged").write_text('{"epoch": 0, "message": "not finite"}')
    for name in ("epochs.jsonl", "steps.npz"):
        (at_once / name).write_bytes(b"")
    runs, notes = read_runs([tmp_path])
    assert [run.path for run in runs] == [kept]
    assert notes == [f"{lost}: left out, it diverged in epoch 2 (from 0)",
                     f"{at_once}: left out, it diverged in epoch 0 (from 0)"]  # fmt: skip
    assert len(read_runs([tmp_path], diverged=True)[0]) == 3
    output = write_output([tmp_path], tmp_path / "out")
    assert set(notes) <= set(output.notes) and "unfinished" not in output.text


@pytest.mark.parametrize(("other", "noted"), [(0.0204, False), (0.03, True)])
def test_unlike_calibrated_delays_are_noted(tmp_path: Path, other: float, noted: bool) -> None:
    rules = [{"ranks": [1], "kind": "constant", "fraction": 0.45}]
    for algorithm, seconds in (("sync-sgd", 0.02), ("edp-sgd", other)):
        calibrated = [{"rule": 0, "rank": 1, "seconds": seconds}]
        write_run(tmp_path, algorithm=algorithm, epochs=2, stragglers=rules, calibrated=calibrated)
    runs = [reader.read_run(path) for path in reader.find_runs([tmp_path])]
    assert any("by up to 50%" in note for note in group(runs)[1]) == noted


def test_variant_labels_say_what_differs(tmp_path: Path) -> None:
    def add(folder: str, **changes: object) -> None:
        write_run(tmp_path, folder, epochs=2, steps=5, **changes)

    add("lenet-low")
    add("lenet-low+a", gradient_weight="share-over-n")
    add("lenet-low+b", partition__min_batch=8)
    add("lenet-low+c", partition__policy="static", partition__shares=[0.7, 0.3])
    add("lenet-low+d", partition__policy="static", partition__shares=[0.6, 0.4])
    (experiment,) = experiments_of(tmp_path)
    assert experiment.slug == "lenet-low"
    assert {variant.label for variant in experiment.variants} == {
        "edp-sgd (min batch 2)",
        "edp-sgd (min batch 8)",
        "edp-sgd (share-over-n weight)",
        "edp-sgd (static, shares 0.7:0.3)",
        "edp-sgd (static, shares 0.6:0.4)",
    }


@pytest.mark.parametrize(
    ("rules", "calibrated", "text"),
    [
        ([], [], "no delay"),
        ([{"ranks": [1], "kind": "constant", "seconds": 0.1}], [], "0.1 s on worker 1"),
        (
            [{"ranks": [1], "kind": "constant", "fraction": 0.45}],
            [[{"rule": 0, "rank": 1, "seconds": 0.01234}]],
            "0.45 × busy time on worker 1 (0.012 s)",
        ),
        (
            [{"ranks": [0, 2, 3, 4], "kind": "constant", "fraction": 0.5}],
            [[{"rule": 0, "rank": 0, "seconds": 0.1}, {"rule": 0, "rank": 2, "seconds": 0.2}]],
            "0.5 × busy time on workers 0, 2–4 (0.1–0.2 s)",
        ),
        (
            [{"ranks": [1, 2], "kind": "gamma", "shape": 2.0, "scale": 0.05}],
            [],
            "gamma delay (shape 2), mean 0.1 s, on workers 1, 2",
        ),
        (
            [
                {"ranks": [0], "kind": "exponential", "scale": 0.1, "first_epoch": 5},
                {"ranks": [1], "kind": "slowdown", "factor": 2.0, "last_epoch": 9},
            ],
            [],
            "exponential delay, mean 0.1 s, on worker 0 from epoch 5; "
            "slowdown × 2 on worker 1 in epochs 0–9",
        ),
    ],
)
def test_delay_levels_in_words(rules: list, calibrated: list, text: str) -> None:
    assert delay_level(rules, calibrated) == text


def test_algorithms_keep_their_colours() -> None:
    cues = style.variant_cues(["edp-sgd (static)", "sync-sgd"])
    colours = {"sync-sgd": "#0072b2", "dp-sgd": "#e69f00", "edp-sgd": "#009e73"}
    assert {k: matplotlib.colors.to_hex(cues[k].color) for k in colours} == colours
    looks = [(cue.color, cue.linestyle, cue.marker) for cue in cues.values()]
    for part in zip(*looks):
        assert len(set(part)) == len(looks)


# --- the figures ------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [2, 7, 12])
def test_nothing_is_cut_off_or_overlaps(tmp_path: Path, workers: int) -> None:
    many = [
        {"ranks": list(range(0, workers, 2)), "kind": "constant", "seconds": 0.0125},
        {"ranks": [0], "kind": "exponential", "scale": 0.01, "first_epoch": 1, "last_epoch": 12},
    ]
    for algorithm in ("dp-sgd", "edp-sgd"):
        write_run(
            tmp_path, algorithm=algorithm, workers=workers, stragglers=many, epochs=3, steps=20,
            batch_size=40 * workers,
        )  # fmt: skip
    write_run(
        tmp_path, "x", workers=workers, stragglers=many, epochs=3, steps=20, recorded=1,
        batch_size=40 * workers, gradient_weight="share-over-n",
    )  # fmt: skip
    (experiment,) = experiments_of(tmp_path)
    cues = style.variant_cues(variant.label for variant in experiment.variants)
    (workload,) = workloads([experiment])
    with matplotlib.rc_context(style.RC):
        made = [draw(experiment, cues) for draw in DRAWN]
        made.append(figures.time_per_epoch(workload, cues))
        for figure in made:
            figure.canvas.draw()
            width, height = figure.get_size_inches()
            box = figure.get_tightbbox()
            assert box.x0 > 0 and box.y0 > 0 and box.x1 < width and box.y1 < height
            boxes = [axis.get_tightbbox() for axis in figure.axes]
            boxes += [legend.get_window_extent() for legend in figure.legends]
            for i, one in enumerate(boxes):
                assert not any(one.overlaps(other) for other in boxes[:i])


def test_one_run_of_one_epoch_without_warm_steps(tmp_path: Path) -> None:
    write_run(tmp_path / "runs", epochs=1, steps=3, workers=1, stragglers=[])
    report = write_output([tmp_path / "runs"], tmp_path / "out")
    assert len(report.notes) == 2 and all("warm-up" in note for note in report.notes)
    assert len(report.files) == 2 * (len(NAMES) - 2 + 1) + 2
    assert "–" in report.text and "±" not in report.text


def test_curves_are_means_and_standard_deviations_over_seeds(runs: Path) -> None:
    experiment = next(e for e in experiments_of(runs) if e.slug == "lenet-low")
    cues = style.variant_cues(variant.label for variant in experiment.variants)
    axis = figures.loss_accuracy_epochs(experiment, cues).axes[4]
    assert axis.get_ylabel() == "test top-1 (%)"
    line = next(line for line in axis.lines if line.get_label().startswith("dp-sgd"))
    seeds = [records(runs / "lenet-low" / "dp-sgd" / f"seed-{n}") for n in (42, 43, 44)]
    values = [[100 * run[epoch]["test_top1"] for run in seeds] for epoch in range(12)]
    np.testing.assert_allclose(line.get_xdata(), range(1, 13))
    np.testing.assert_allclose(line.get_ydata(), [statistics.mean(v) for v in values])
    band = axis.collections[1].get_paths()[0].vertices
    top = statistics.mean(values[0]) + statistics.stdev(values[0])
    assert np.isclose(band[:, 1], top).any()


def test_warm_up_steps_of_each_epoch_are_left_out(tmp_path: Path) -> None:
    run = reader.read_run(write_run(tmp_path, epochs=3, steps=7))
    kept = [
        busy
        for step, busy in zip(run.steps["step"], run.steps["busy"], strict=True)
        if step not in (0, 1, 2)
    ]
    assert len(kept) == 3 * 4
    np.testing.assert_array_equal(warm_steps([run, run], "busy"), np.array([*kept, *kept], float))


def test_density_is_the_mean_of_gaussians() -> None:
    values = np.random.default_rng(0).gamma(9.0, 0.01, 400)
    grid = np.linspace(-0.1, 0.4, 2001)
    found = worker_figures.density(values, grid)
    q25, q75 = np.percentile(values, [25, 75])
    width = 0.9 * min(values.std(), (q75 - q25) / 1.34) * 400**-0.2
    kernels = [statistics.NormalDist(value, width) for value in values]
    expected = [sum(kernel.pdf(x) for kernel in kernels) / 400 for x in grid[::100]]
    np.testing.assert_allclose(found[::100], expected, atol=2e-3 * max(expected))
    assert found.sum() * (grid[1] - grid[0]) == pytest.approx(1.0, abs=1e-3)


def test_density_of_equal_values_is_finite() -> None:
    found = worker_figures.density(np.full(50, 0.2), np.linspace(0.1, 0.3, 101))
    assert np.isfinite(found).all() and found.argmax() == 50


steps = st.lists(st.floats(0.1, 5.0), min_size=4, max_size=4)


@settings(max_examples=50, deadline=None)
@given(st.lists(steps, min_size=1, max_size=4), st.floats(-2, 2), st.floats(-2, 2))
def test_time_curves_of_lines_are_that_line(
    gaps: list[list[float]], slope: float, offset: float
) -> None:
    """Seeds whose values follow one line over time have that line as mean and no deviation."""
    times = [np.cumsum(gap) for gap in gaps]
    x, mean, sd = figures.over_time(times, [slope * time + offset for time in times])
    np.testing.assert_allclose(mean, slope * x + offset, atol=1e-9)
    if len(x) > 1:
        assert x[0] == max(time[0] for time in times) and x[-1] == min(time[-1] for time in times)
        np.testing.assert_allclose(sd, 0.0 if len(gaps) > 1 else np.nan, atol=1e-9)
    if len(times) == 1:
        np.testing.assert_array_equal(x, times[0])


# --- errors -----------------------------------------------------------------------------------


def failing(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main([str(argument) for argument in arguments]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: ")
    return lines[0]


def test_a_folder_without_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert str(tmp_path) in failing(capsys, tmp_path, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_record_without_a_value(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_run(tmp_path, epochs=3)
    lines = records(path)
    del lines[1]["train_top5"]
    (path / "epochs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    line = failing(capsys, tmp_path, "--out", tmp_path / "out")
    assert f"{path / 'epochs.jsonl'} line 2" in line and "train_top5" in line


def test_a_config_without_a_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_run(tmp_path, epochs=1)
    (path / "config.yaml").write_text("name: lenet-low\n")
    assert str(path / "config.yaml") in failing(capsys, tmp_path, "--out", tmp_path / "out")


def test_steps_of_another_shape(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_run(tmp_path, epochs=1)
    with np.load(path / "steps.npz", allow_pickle=False) as arrays:
        np.savez(path / "steps.npz", **{**arrays, "busy": arrays["busy"][:, :1]})
    assert str(path / "steps.npz") in failing(capsys, tmp_path, "--out", tmp_path / "out")


def test_an_output_that_is_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "runs", epochs=1)
    (tmp_path / "out").write_text("")
    assert str(tmp_path / "out") in failing(capsys, tmp_path / "runs", "--out", tmp_path / "out")


def test_a_figure_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "figure.svg").mkdir()
    with pytest.raises(UserError, match="figure"):
        style.save(style.figure(1, 1), tmp_path / "figure")


def test_help_shows_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--help"])
    assert stopped.value.code == 0
    assert "python -m plots runs/lenet-low" in capsys.readouterr().out
