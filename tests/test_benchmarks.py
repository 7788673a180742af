"""The benchmarks' own arithmetic, reports and figure, and one short run of real workers."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import balance, decoding, plan
from benchmarks.balance_scenarios import (
    AFFINE,
    AFFINE_FREQUENT,
    BUSY,
    EPOCH_STEPS,
    EQUAL,
    PROPORTIONAL,
    QUICK_EPOCH_STEPS,
    Scenario,
    changing,
    delayed,
    mostly_fixed,
    scenarios,
    slowed,
)
from benchmarks.common import arguments, finish, launch, table
from plots import benchmark_figures


def options(out: Path | None = None, check: bool = False) -> argparse.Namespace:
    return argparse.Namespace(out=out, check=check, quick=True)


# --- reports ----------------------------------------------------------------------------------


def test_results_are_written_with_what_they_were_measured_on(tmp_path, capsys):
    out = tmp_path / "x.json"
    assert finish("name", {"a": 1.5}, ["b is 3, not 2"], options(out)) == 0
    document = json.loads(out.read_text())
    assert (document["benchmark"], document["results"]) == ("name", {"a": 1.5})
    assert document["misses"] == ["b is 3, not 2"] and document["quick"]
    assert document["machine"]["cores"] >= 1 and document["versions"]["torch"]
    assert finish("name", {}, [], options(check=True)) == 0
    assert capsys.readouterr().out == ""
    assert finish("name", {}, ["b is 3, not 2", "c"], options(check=True)) == 1
    assert capsys.readouterr().out == "missed: b is 3, not 2\nmissed: c\n"


def test_a_folder_that_cannot_be_made_is_told_before_measuring(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    out = str(tmp_path / "file" / "x.json")
    monkeypatch.setattr(sys, "argv", ["x.py", "--out", out])
    with pytest.raises(SystemExit):
        arguments("Something.")
    assert out in capsys.readouterr().err


def test_a_table_aligns_its_columns(capsys):
    table([{"what": "long name", "s": None}, {"what": "b", "s": 0.123456}])
    assert capsys.readouterr().out.splitlines() == [
        "what            s", "long name       -", "b          0.1235",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("code", "words"), [("sys.exit(int(RANK))", "rank 1 of 2 ended with 1"), (None, "took over")]
)
def test_workers_that_fail_or_hang_are_ended_and_named(tmp_path, code, words):
    script = tmp_path / "worker.py"
    body = "time.sleep(60)" if code is None else code
    script.write_text(f"import os, sys, time\nRANK = os.environ['RANK']\n{body}\n")
    with pytest.raises(RuntimeError, match=words):
        launch(2, str(script), limit=1.0 if code is None else 20.0)


# --- planning ---------------------------------------------------------------------------------


def test_planning_is_measured_and_judged():
    row = plan.measure(20, repeats=3)
    assert min(row["optimum_ms"], row["rebalance_ms"], row["bytes_per_worker"]) > 0
    small = {"workers": 1_000, "optimum_ms": 1.0, "bytes_per_worker": 250.0}
    large = {"workers": 10_000, "optimum_ms": 9.0, "bytes_per_worker": 260.0}
    assert plan.missed([small, large]) == []
    misses = plan.missed([small, {**large, "optimum_ms": 11.0, "bytes_per_worker": 2500.0}])
    assert len(misses) == 2 and "11.0 ms" in misses[0] and "memory" in misses[1]


# --- balancing: scenarios and analysis --------------------------------------------------------


def test_costs_are_those_that_the_scenarios_name():
    equal = np.full(2, 128)
    assert delayed(0.9).times(equal) == pytest.approx([BUSY, BUSY * 1.9])
    assert slowed(5.2).times(equal) == pytest.approx([BUSY, BUSY * 5.2])
    before, after = changing(7)
    assert before.times(equal) == pytest.approx(after.times(equal)[::-1])
    fixed = mostly_fixed(0.85, 4)
    assert fixed.d[-1] == pytest.approx(0.85 * fixed.optimum().continuous_seconds)
    # Against brute force: the two groups' sizes decide.
    times = [
        fixed.times(np.array([first, second, 512 - last - first - second, last])).max()
        for last in range(1, 100)
        for first, second in itertools.product([(512 - last) // 3, (512 - last) // 3 + 1], repeat=2)
    ]
    assert fixed.optimum().seconds == pytest.approx(min(times))


@pytest.mark.parametrize("quick", [True, False])
def test_every_run_lasts_until_its_second_rebalance_and_beyond(quick):
    epoch_steps = QUICK_EPOCH_STEPS if quick else EPOCH_STEPS
    for scenario in scenarios(epoch_steps, quick):
        for strategy in set(scenario.strategies) - {EQUAL}:
            starts = [phase.first_step for phase in scenario.phases]
            ends = [*starts[1:], scenario.epochs(strategy) * epoch_steps]
            for start, end in zip(starts, ends):
                assert balance.second_plan(start, strategy.every, epoch_steps) + 10 <= end


def test_the_second_plan_counts_what_was_drawn_ahead():
    assert balance.second_plan(0, 20, 80) == 40 + balance.LOOKAHEAD
    assert balance.second_plan(50, 20, 80) == 80
    assert balance.second_plan(240, 20, 80) == 280 + balance.LOOKAHEAD
    assert balance.second_plan(0, "epoch", 80) == 160
    assert balance.second_plan(250, "epoch", 80) == 400


@pytest.mark.parametrize(
    ("imbalance", "steps"),
    [([1.0, 1.05], 0), ([2.0, 1.0, 1.06, 1.01], 3), ([1.0, 1.2], None), ([1.2, 1.1], None)],
)
def test_balanced_is_who_stays_within_the_limit(imbalance, steps):
    assert balance.settled(np.array(imbalance)) == steps


def records(sizes: np.ndarray, walls: np.ndarray, busy: np.ndarray) -> list[dict[str, Any]]:
    """What the workers of a run would write: the exchange takes 1 ms, on worker 0 0.4 ms."""
    moments = np.concatenate([[5.0], 5.0 + np.cumsum(walls)])
    ready = moments[:-1, None] + busy
    exchanged = ready.max(1, keepdims=True) + [0.0004, 0.001]
    return [
        {
            "batch_sizes": sizes.tolist(),
            "busy": busy[:, rank].tolist(),
            "moments": moments.tolist(),
            "ready": ready[:, rank].tolist(),
            "exchanged": exchanged[:, rank].tolist(),
            "fits": [{"known": True, "a": [1.0, 1.0], "d": [0.0, 0.0]}],
        }
        for rank in range(2)
    ]


def test_a_run_is_judged_by_true_costs_and_its_own_exchange():
    scenario = Scenario("x", (slowed(3.0),))
    best = scenario.phases[0].optimum()
    sizes = np.array([[128, 128]] * 44 + [best.batch_sizes] * 36)
    true = scenario.phases[0].times(sizes)
    run = balance.analyse(
        scenario, AFFINE_FREQUENT, 80, records(sizes, 1.1 * true.max(1), true + 0.0005)
    )
    assert run["phases"][0]["steps_until_within"] == 44
    assert run["phases"][0]["imbalance_after_two"] == pytest.approx(1.0)
    assert run["phases"][0]["measured_after_two"] == pytest.approx(1 + 0.0005 / best.seconds)
    assert run["communication_seconds"] == pytest.approx(0.001)
    assert run["busy_above_true_seconds"] == pytest.approx([0.0005, 0.0005])
    expected = 1.1 * best.seconds / (best.seconds + 0.001)
    assert run["wall_over_ideal_balanced"] == pytest.approx(expected)
    assert run["imbalance"][0] == pytest.approx(3 * BUSY / best.seconds)


def test_misses_are_named_where_there_are_targets():
    phases = [{"steps_until_within": 70, "imbalance_after_two": 1.04}]
    run = {**vars(AFFINE_FREQUENT), "label": "L", "phases": phases, "wall_over_ideal_balanced": 1.0}
    scenario = {"name": "S", "aligned": True}
    assert len(balance.missed(scenario, run)) == 2
    assert len(balance.missed(scenario, {**run, "every": "epoch"})) == 1
    assert balance.missed({**scenario, "aligned": False}, {**run, "every": "epoch"}) == []
    assert len(balance.missed(scenario, {**run, "wall_over_ideal_balanced": None})) == 3
    assert balance.missed(scenario, {**run, "policy": "proportional"}) == []


# --- balancing: real workers and the figure ---------------------------------------------------


@pytest.fixture(scope="module")
def short_results() -> list[dict[str, Any]]:
    """Two strategies of one scenario on two real workers, a few steps each."""
    scenario = Scenario("delayed", (delayed(0.9),), (PROPORTIONAL, AFFINE))
    return balance.measure([scenario], epoch_steps=12)


def test_real_workers_take_as_long_as_modelled_and_are_balanced(short_results):
    (scenario,) = short_results
    for run in scenario["runs"]:
        sizes = np.array(run["batch_sizes"])
        assert len(sizes) == 36 and (sizes.sum(1) == 256).all()
        assert sizes[0].tolist() == [128, 128] and sizes[-1][0] > sizes[-1][1] + 20
        # On a busy machine workers wake up late, never early.
        assert all(-0.001 < above < 0.05 for above in run["busy_above_true_seconds"])
        assert run["communication_seconds"] > 0 and run["wall_over_ideal"] > 0.95
        assert run["fits"][-1]["known"] and run["phases"][0]["measured_after_two"] > 0.95
    json.dumps(short_results, allow_nan=False)
    assert [row["policy"] for row in balance.rows(short_results)] == [
        "proportional, every epoch", "affine, every epoch",
    ]  # fmt: skip


def test_the_figure_has_a_panel_per_scenario_and_a_curve_per_policy(short_results, tmp_path):
    (scenario,) = short_results
    changed = {**scenario, "name": "other", "phases": scenario["phases"] * 2}
    results = {"within": 1.05, "scenarios": [scenario, changed, scenario]}
    path = tmp_path / "balance.json"
    finish("balance", results, [], options(path))
    figure = benchmark_figures.balance(results)
    assert [axis.get_title() for axis in figure.axes] == ["delayed", "other", "delayed"]
    drawn = [line.get_ydata().tolist() for line in figure.axes[0].lines[1:]]
    assert drawn == [run["imbalance"] for run in scenario["runs"]]
    assert benchmark_figures.main([str(path), "--out", str(tmp_path / "figures")]) == 0
    drawn_files = {file.name for file in (tmp_path / "figures").iterdir()}
    assert drawn_files == {"balance.svg", "balance.png"}


def test_a_file_without_such_results_is_refused(tmp_path, capsys):
    path = tmp_path / "x.json"
    for text in ("no json", "[]", '{"benchmark": "plan"}'):
        path.write_text(text)
        assert benchmark_figures.main([str(path), "--out", str(tmp_path)]) == 1
        assert str(path) in capsys.readouterr().err


# --- reading image files ----------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_the_decoder_is_compared_with_a_plain_loader_over_the_same_files(tmp_path):
    root = decoding._made_up(tmp_path / "tree", 16)
    row = decoding._compared(root, str(tmp_path), images=16, rounds=2, processes=0)
    assert len(row["ratios"]) == 2 and row["own / plain"] == pytest.approx(np.mean(row["ratios"]))
    assert min(row["own (images/s)"], row["plain (images/s)"]) > 0
    slow, fast = ({"processes": 1, "own / plain": ratio} for ratio in (0.5, 1.5))
    (miss,) = decoding._misses([slow, fast])
    assert "0.50 times as fast" in miss
