"""The simulator against exact results, the real balancer, the authors' logs and bad input."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import balancer
import simulator
from balancer import Balancer, StepTimes
from partitioner import optimum
from plots import benchmark_figures
from simulation import model, reality, scale
from simulation.authors import predict_aws, predict_runs, read_rows
from simulation.clusters import read_cluster
from simulation.exchange import BUCKET_BYTES, Exchange, ring, ring_seconds
from simulation.model import Cluster, Phase, Strategy, simulate

ROOT = Path(__file__).resolve().parent.parent
CLUSTERS = sorted((ROOT / "configs" / "clusters").glob("*.yaml"))
FREE = Exchange(0.0)


def phase(first_step: int, a: list[float], d: list[float], jitter: float = 0.0) -> Phase:
    return Phase(first_step, np.array(a), np.array(d), np.full(len(a), jitter))


def cluster(*phases: Phase, batch: int, steps: int, exchange: Exchange = FREE) -> Cluster:
    workers = len(phases[0].a)
    bounds = np.ones(workers), np.full(workers, float(batch))
    return Cluster(batch, steps, phases, exchange, *bounds)


def sizes_by_step(run: model.Run) -> np.ndarray:
    """The batch sizes of every step, [S, n]."""
    starts = [step for step, _ in run.changes] + [len(run.step_seconds)]
    rows = [sizes for _, sizes in run.changes]
    return np.repeat(rows, np.diff(starts), axis=0)


costs = st.integers(2, 6).flatmap(
    lambda n: st.tuples(
        st.lists(st.floats(5e-4, 5e-3), min_size=n, max_size=n),
        st.lists(st.floats(0.0, 0.05), min_size=n, max_size=n),
    )
)


# --- steps ------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(costs, st.sampled_from(["equal", "proportional", "affine"]), st.sampled_from(["epoch", 7]))
def test_a_run_obeys_its_costs_and_keeps_the_batch(costs, policy, every):
    a, d = costs
    batch, steps = 64 * len(a), 20
    one = cluster(phase(0, a, d), batch=batch, steps=steps, exchange=Exchange(0.01))
    run = simulate(one, Strategy(policy, every, lookahead=2), epochs=4)
    sizes = sizes_by_step(run)
    assert (sizes.sum(1) == batch).all() and sizes.min() >= 1
    busy = np.array(a) * sizes + d
    assert run.step_seconds == pytest.approx(busy.max(1) + 0.01)
    assert run.busy_seconds[1] == pytest.approx(busy[steps : 2 * steps].mean(0))
    best = optimum(np.array(a), np.array(d), batch, one.minimum, one.maximum).seconds
    assert run.imbalance == pytest.approx(busy.max(1) / best)
    assert run.imbalance.min() >= 1 - 1e-12 and (run.efficiency < 1).all()
    assert run.seconds == pytest.approx(run.step_seconds.sum())


@settings(max_examples=25, deadline=None)
@given(costs)
def test_affine_reaches_the_optimum_without_jitter(costs):
    a, d = costs
    one = cluster(phase(0, a, d), batch=64 * len(a), steps=10)
    run = simulate(one, Strategy("affine"), epochs=5)
    # The partitioner leaves alone what would gain less than 1 %, by a fit that is not exact.
    assert run.imbalance[-1] <= 1.03


def test_equal_workers_wait_for_the_greatest_of_their_jitters():
    """Against the expected greatest of two normal variables: sigma / sqrt(pi)."""
    one = cluster(phase(0, [1e-3] * 2, [0.0] * 2, jitter=0.05), batch=200, steps=20_000)
    mean = simulate(one, Strategy("equal"), epochs=1).step_seconds.mean()
    assert mean / 0.1 == pytest.approx(1 + 0.05 / math.sqrt(math.pi) + 0.05**2 / 2, abs=2e-3)
    runs = [simulate(one, Strategy("equal"), 1, seed).step_seconds for seed in (0, 0, 1)]
    assert (runs[0] == runs[1]).all() and (runs[0] != runs[2]).any()


def test_more_workers_wait_longer_for_jitter_alone():
    means = []
    for workers in (2, 16, 256):
        ones = [1e-3] * workers
        many = cluster(phase(0, ones, [0.0] * workers, 0.05), batch=100 * workers, steps=100)
        means.append(simulate(many, Strategy("equal"), epochs=1).step_seconds.mean())
    assert 0.1 < means[0] < means[1] < means[2]


def test_a_change_of_speed_takes_hold_at_its_step():
    slow_then_fast = phase(0, [1e-3, 2e-3], [0.0, 0.0]), phase(25, [1e-3, 1e-3], [0.0, 0.0])
    one = cluster(*slow_then_fast, batch=300, steps=20)
    run = simulate(one, Strategy("equal"), epochs=2)
    assert run.step_seconds == pytest.approx([0.3] * 25 + [0.15] * 15)
    assert run.optimum_seconds == pytest.approx([0.2] * 25 + [0.15] * 15)


def test_thousands_of_workers_that_change_in_time():
    draw = np.random.default_rng(0)
    a, d = draw.uniform(1e-3, 3e-3, 4096), draw.uniform(0, 0.02, 4096)
    later = a * np.where(np.arange(4096) < 40, 2.0, 1.0)
    jitter = np.full(4096, 0.02)
    phases = Phase(0, a, d, jitter), Phase(200, later, d, jitter)
    run = simulate(cluster(*phases, batch=128 * 4096, steps=40), Strategy("affine"), epochs=10)
    imbalance = run.by_epoch(run.imbalance).max(1)
    assert imbalance[4] < 1.03 and imbalance[5] > 1.5 and imbalance[9] < 1.03


# --- plans: the simulator's against the balancer's --------------------------------------------


class ModelledClock:
    """A balancer's clock whose busy times are those of a cost model."""

    exchanged = True

    def __init__(self, plan: Any, costs: Any, jitter: np.ndarray) -> None:
        self.plan, self.costs, self.jitter = plan, costs, jitter
        self.first = self.step = 0

    def begin(self) -> None:
        self.first = self.step = self.step

    def mark(self, name: str) -> None:
        self.step += name == "step"

    def take(self) -> StepTimes:
        steps = np.arange(self.first, self.step)
        self.first = self.step
        return StepTimes(*[np.zeros(len(steps))] * 6, self.times(steps)[:, 0])

    def times(self, steps: np.ndarray) -> np.ndarray:
        """Busy times [S, n] of these steps of the run."""
        plan = self.plan()
        inside = steps - plan.epoch * len(plan.starts)
        rows = [self.costs(step) for step in steps]
        a, d = (np.array([row[i] for row in rows]) for i in (0, 1))
        return (a * plan.batch_sizes[inside] + d) * self.jitter[steps]


def balanced(one: Cluster, strategy: Strategy, epochs: int, jitter: np.ndarray) -> np.ndarray:
    """Batch sizes [S, n] by balancer.Balancer on rank 0, the other ranks' numbers made up."""

    def costs(step: int) -> tuple[np.ndarray, np.ndarray]:
        phase = [phase for phase in one.phases if phase.first_step <= step][-1]
        return phase.a, phase.d

    def gather(mine: np.ndarray) -> np.ndarray:
        end = clock.step
        begin = end - (end - 1) % length - 1
        inside = subject.plan.clean_steps(begin % one.epoch_steps, (end - 1) % one.epoch_steps + 1)
        busy = clock.times(inside + subject.plan.epoch * one.epoch_steps)
        told = [balancer.typical(balancer.since_change(times)) for times in busy.T]
        assert told[0] == pytest.approx(mine[:2])
        return np.array([[*pair, *mine[2:]] for pair in told])

    length = one.epoch_steps if strategy.every == "epoch" else strategy.every
    peers = SimpleNamespace(rank=0, size=one.workers, gather=gather)
    size = one.batch_size * one.epoch_steps
    subject = Balancer(
        size, one.batch_size, strategy.policy, every=strategy.every, peers=peers,
        device=torch.device("cpu"),
    )  # fmt: skip
    clock = subject.clock = ModelledClock(lambda: subject.plan, costs, jitter)
    plans = []
    for epoch in range(epochs):
        for _ in subject.steps(subject.sampler, epoch, strategy.lookahead):
            pass
        plans.append(subject.plan.batch_sizes)
    return np.concatenate(plans)


@pytest.mark.parametrize("policy", ["proportional", "affine"])
@pytest.mark.parametrize(("every", "lookahead"), [("epoch", 0), ("epoch", 4), (10, 4), (20, 1)])
def test_plans_are_those_of_the_balancer(policy, every, lookahead, monkeypatch):
    """Two workers, the slow one changing amid an epoch; jitter that both are given alike."""
    phases = (
        phase(0, [1e-3, 2e-3], [0.003, 0.02], 0.02),
        phase(130, [2e-3, 1e-3], [0.006, 0.003], 0.02),
    )
    one = cluster(*phases, batch=256, steps=40)
    strategy, epochs = Strategy(policy, every, lookahead), 6
    normal = np.random.default_rng(7).standard_normal((epochs * 40, 2))
    drawn = iter(normal)
    draw = SimpleNamespace(
        standard_normal=lambda shape: np.array([next(drawn) for _ in range(shape[0])])
    )
    monkeypatch.setattr(model.np.random, "default_rng", lambda seed: draw)
    run = simulate(one, strategy, epochs)
    monkeypatch.undo()
    expected = balanced(one, strategy, epochs, np.exp(0.02 * normal))
    assert sizes_by_step(run).tolist() == expected.tolist()
    assert len(run.changes) >= 4


@given(st.integers(1, 90), st.integers(1, 3), st.integers(0, 9))
def test_typical_times_of_columns_are_those_of_each(steps, workers, seed):
    times = np.random.default_rng(seed).lognormal(0, 0.3, (steps, workers))
    expected = [balancer.typical(column) for column in times.T]
    assert np.array(balancer.typical(times)).T == pytest.approx(np.array(expected))


# --- exchange ---------------------------------------------------------------------------------


def ring_by_messages(workers: int, size: float, bandwidth: float, latency: float) -> float:
    """A ring played message by message: a worker sends on what it has just received."""
    ready = [0.0] * workers
    for _ in range(2 * (workers - 1)):
        arrived = [moment + latency + size / workers / bandwidth for moment in ready]
        ready = [max(ready[i], arrived[i - 1]) for i in range(workers)]
    return max(ready)


@given(
    st.integers(1, 12), st.floats(1e3, 1e9), st.floats(1e6, 1e11), st.floats(0, 1e-3)
)  # fmt: skip
def test_a_ring_takes_as_long_as_its_messages(workers, size, bandwidth, latency):
    expected = ring_by_messages(workers, size, bandwidth, latency)
    assert ring_seconds(workers, size, bandwidth, latency) == pytest.approx(expected)


@given(
    st.integers(1, 30), st.floats(0, 0.1), st.floats(0.001, 1.0), st.floats(0, 1)
)  # fmt: skip
def test_what_is_not_hidden_is_the_queue_of_buckets(buckets, seconds, compute, share):
    """Against a queue: bucket j is ready at j/k of the backward pass, one ring at a time."""
    backward, end = share * compute, 0.0
    for number in range(1, buckets + 1):
        end = max(end, number / buckets * backward) + seconds
    exposed = Exchange(seconds, buckets, share).exposed(np.array([compute]))
    assert exposed == pytest.approx([end - backward], abs=1e-12)


def test_buckets_are_those_of_ddp_and_one_without_overlap():
    whole = ring(8, 3.5 * BUCKET_BYTES, 1e9, 1e-5, overlapped=False)
    parts = ring(8, 3.5 * BUCKET_BYTES, 1e9, 1e-5, overlapped=True)
    assert (whole.buckets, parts.buckets) == (1, 4)
    longest = whole.exposed(np.array([0.0, 10.0]))
    assert longest == pytest.approx(ring_seconds(8, 3.5 * BUCKET_BYTES, 1e9, 1e-5))
    hidden = parts.exposed(np.array([0.0, 10.0]))
    assert hidden[0] > longest[0] and hidden[1] == parts.bucket_seconds
    assert ring(1, 1e9, 1e9, 1e-5, True).exposed(np.array([1.0])) == [0.0]


# --- clusters from files ----------------------------------------------------------------------

SMALL = """
batch_size: 100
epoch_steps: 10
epochs: 3
workers:
  - {name: fast, count: 3, a: 0.001}
  - {name: slow, a: 0.001, d: 1.0, max_batch: 50}
communication: {seconds: 0.01}
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "cluster.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("path", CLUSTERS, ids=lambda path: path.stem)
def test_shipped_clusters_are_valid(path):
    file, one = read_cluster(path)
    assert one.workers == sum(group.count for group in file.workers)
    assert one.phases[0].first_step == 0 and file.epochs >= 2


def test_a_cluster_is_told_with_its_optimum_and_who_is_left_out(tmp_path, capsys):
    out = tmp_path / "out" / "record.json"
    path = write(tmp_path, SMALL)
    assert simulator.main(["cluster", str(path), "--out", str(out), "--check"]) == 0
    document = json.loads(out.read_text())
    (told,), runs = document["results"]["phases"], document["results"]["runs"]
    assert told["optimum_seconds"] == pytest.approx(1.001)
    assert told["better_without"] == {"count": 1, "ranks": [3], "seconds": pytest.approx(0.034)}
    assert [run["policy"] for run in runs] == ["equal", "proportional", "affine"]
    assert runs[0]["seconds"] == pytest.approx(30 * (1.025 + 0.01)) and runs[0]["speed_up"] == 1
    assert document["benchmark"] == "cluster" and "git_commit" in document
    assert "without the workers 3" in capsys.readouterr().out


def test_changes_keep_what_they_do_not_name(tmp_path):
    changes = (
        "changes: [{workers: slow, epoch: 1, step: 5, d: 0.0}, {workers: fast, epoch: 2, a: 3}]"
    )
    _, one = read_cluster(write(tmp_path, SMALL + changes))
    assert [phase.first_step for phase in one.phases] == [0, 15, 20]
    assert [phase.a.tolist() for phase in one.phases][1:] == [[1e-3] * 4, [3.0] * 3 + [1e-3]]
    assert [phase.d[3] for phase in one.phases] == [1.0, 0.0, 0.0]
    assert one.maximum.tolist() == [100, 100, 100, 50]


def test_a_missed_target_is_named_and_ends_with_1(tmp_path, capsys):
    path = write(tmp_path, SMALL + "least_efficiency: 0.999")
    assert simulator.main(["cluster", str(path)]) == 0
    assert simulator.main(["cluster", str(path), "--check"]) == 1
    assert "missed: efficiency" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (SMALL + "epoch: 3", "unknown key epoch"),
        (SMALL.replace("a: 0.001}", "a: 0}"), "workers.0.a"),
        (SMALL.replace("slow", "fast"), "same name"),
        (SMALL.replace("{seconds: 0.01}", "{latency: 1}"), "communication needs"),
        (SMALL.replace("{seconds: 0.01}", "{seconds: 1, latency: 1}"), "communication needs"),
        (SMALL.replace("100", "3"), "batch_size 3 does not fit"),
        (SMALL + "min_batch: 51", "max_batch 50 is less"),
        (SMALL + "every: 11", "every: 11 steps"),
        (SMALL + "changes: [{workers: old, epoch: 1}]", "there is no group old"),
        (SMALL + "changes: [{workers: slow, epoch: 3}]", "after the end"),
        (SMALL.replace("count: 3, ", "count: 3, max_batch: 1, "), "take 4 to 53 samples"),
        ("[]", "mapping"),
    ],
)
def test_bad_cluster_files_are_refused_in_one_line(tmp_path, text, words, capsys):
    path = write(tmp_path, text)
    assert simulator.main(["cluster", str(path)]) == 2
    error = capsys.readouterr().err
    assert words in error and str(path) in error and error.count("\n") == 1


# --- the authors ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def predicted() -> list[dict[str, Any]]:
    return predict_runs()


def test_resnet50_runs_are_within_the_target(predicted, capsys):
    errors = {run["model"]: [] for run in predicted}
    for run in predicted:
        errors[run["model"]].append(run["error"])
    assert len(predicted) == 8 and np.abs(errors["resnet50"]).max() < 0.05
    assert simulator.main(["authors", "--check"]) == 0
    assert "vgg16" in capsys.readouterr().out


def test_predictions_settle_where_the_closed_form_does(predicted):
    """Two equal workers, one with a delay D: both take (2 t + D) / 2, t being undelayed."""
    rows = read_rows("authors_runs.csv")
    undelayed = {
        (row["model"], row["delay_seconds"]): row["process_seconds_rank0_last50"]
        for row in rows
        if row["algorithm"] == "sync-sgd"
    }
    undelayed["resnet50", 0.1] = undelayed["resnet50", 0.2]
    for run in predicted:
        level = undelayed[run["model"], run["delay_seconds"]] + run["delay_seconds"] / 2
        assert run["predicted_busy_seconds"] == pytest.approx([level] * 2, rel=0.01)
        assert run["optimum_seconds"] == pytest.approx(level, rel=0.01)


def test_the_parts_of_an_epoch_add_up_to_the_run(predicted):
    for run in predicted:
        for which in ("predicted", "measured"):
            parts = run[f"{which}_epoch_parts"]
            assert 150 * parts["total"] == pytest.approx(run[f"{which}_run_seconds"])
            total = parts["total"]
            assert sum(parts.values()) - total == pytest.approx(total)
            assert min(parts.values()) > 0


def test_predictions_rest_on_nothing_of_the_predicted_rows(predicted, monkeypatch):
    def changed(name: str) -> list[dict[str, Any]]:
        return [
            row | {key: 2 * row[key] for key in row if "seconds_" in key}
            if row["algorithm"] != "sync-sgd" else row
            for row in read_rows(name)
        ]  # fmt: skip

    monkeypatch.setattr("simulation.authors.read_rows", changed)
    others = predict_runs()
    for run, other in zip(predicted, others):
        assert other["predicted_run_seconds"] == run["predicted_run_seconds"]
        assert other["measured_run_seconds"] == 2 * run["measured_run_seconds"]


def test_the_aws_pair_is_balanced_whatever_part_of_its_time_is_fixed():
    pairs = predict_aws()
    assert [pair["model"] for pair in pairs] == ["resnet50"] * 2 + ["vgg16"] * 2
    for pair in pairs:
        assert max(pair["predicted_busy_seconds"]) < 1.03 * pair["optimum_seconds"]
        assert pair["predicted_speed_up"] > 1 and sum(pair["predicted_batch_sizes"]) == 256
    # Harmonic mean of the two busy times, whatever the elasticity, if both have the same.
    best = [pair["optimum_seconds"] for pair in pairs[:2]]
    assert best == pytest.approx([2 / (1 / 1.0002 + 1 / 0.1926)] * 2, rel=0.02)


# --- scale ------------------------------------------------------------------------------------


def test_scale_measures_draws_and_judges(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(scale, "WORKERS", (2, 8))
    monkeypatch.setattr(scale, "MOST_CLUSTERS", 2)
    monkeypatch.setattr(benchmark_figures, "SHOWN_WORKERS", 8)
    out = tmp_path / "scale.json"
    assert simulator.main(["scale", "--out", str(out), "--check"]) == 0
    results = json.loads(out.read_text())["results"]
    for size in results["sizes"]:
        equal, proportional, affine = size["runs"]
        assert equal["efficiency"][-1] <= affine["efficiency"][-1] < size["perfect_efficiency"]
        assert proportional["efficiency"][0] == pytest.approx(equal["efficiency"][0], rel=0.05)
    assert all(row["source"] for row in results["speeds"])
    assert benchmark_figures.main([str(out), "--out", str(tmp_path)]) == 0
    assert (tmp_path / "scale.png").stat().st_size > 10_000
    affine = results["sizes"][0]["runs"][-1]
    affine["imbalance_after_two"], affine["last_epoch_speed_up"] = 1.04, 0.9
    assert len(scale.scale_misses(results)) == 2


def test_drawn_workers_have_the_measured_throughput():
    rates = {row["images_per_second"] for row in scale.speeds()}
    drawn = scale.drawn_cluster(64, 0).phases[0]
    found = 128 / (128 * drawn.a + drawn.d)
    assert {round(rate) for rate in found} == {round(rate) for rate in rates}


# --- reality ----------------------------------------------------------------------------------

KNOWN = {"known": True, "a": [1e-3, 2e-3], "d": [0.0, 0.01]}
UNKNOWN = {"known": False, "a": [2e-3, 1e-3], "d": [0.0, 0.0]}


def balance_record(folder: Path, fits: list[Any], **equal: Any) -> Path:
    """One scenario: a run with equal shares that takes 40 steps of 0.211 s, and an affine one."""
    run = {"policy": "equal", "every": "epoch", "label": "equal", "steps": 40,
           "wall_seconds": 8.44, "communication_seconds": 0.001, "fits": [UNKNOWN] * 2}  # fmt: skip
    other = {**run, "policy": "affine", "label": "affine, every epoch", "fits": fits}
    scenario = {"name": "S", "workers": 2, "batch_size": 200, "phases": [{"first_step": 0}],
                "runs": [run | equal, other]}  # fmt: skip
    results = {"epoch_steps": 20, "lookahead": 4, "jitter": 0.0, "scenarios": [scenario]}
    path = folder / "balance.json"
    path.write_text(json.dumps({"benchmark": "balance", "results": results}))
    return path


def test_a_run_that_saw_one_size_is_predicted_with_another_run_s_fit(tmp_path):
    rows = reality.compare(reality.read_balance(balance_record(tmp_path, [UNKNOWN, KNOWN])))
    assert rows[0]["fit_of"] == "affine, every epoch" and rows[1]["fit_of"] == "its own"
    assert rows[0]["predicted_seconds"] == pytest.approx(8.44) and abs(rows[0]["error"]) < 1e-9
    assert rows[1]["predicted_seconds"] < 8.44


def test_without_any_known_fit_there_is_no_prediction(tmp_path):
    rows = reality.compare(reality.read_balance(balance_record(tmp_path, [UNKNOWN] * 2)))
    assert rows[0]["predicted_seconds"] is None
    assert "no prediction" in reality.reality_misses(rows)[0]


def test_a_phase_is_judged_by_its_last_whole_epoch():
    fits = [{"known": True, "epoch": epoch} for epoch in range(6)]
    run = {"policy": "affine", "steps": 60, "fits": fits}
    starts = [{"first_step": step} for step in (0, 25, 50, 53)]
    scenario = {"phases": starts, "runs": [run]}
    found = [reality._fit_after(scenario, run, number, 10) for number in range(4)]
    assert [fit and fit["epoch"] for fit in found] == [1, 4, None, None]


def test_reality_is_checked_from_the_command_line(tmp_path, capsys):
    record = str(balance_record(tmp_path, [KNOWN] * 2, wall_seconds=10.0))
    assert simulator.main(["benchmark", record]) == 0
    assert simulator.main(["benchmark", record, "--check"]) == 1
    assert "missed: S; equal: predicted time is off by -15.6%" in capsys.readouterr().out


def test_other_records_are_refused(tmp_path, capsys):
    path = tmp_path / "x.json"
    for text in ("no json", "[]", '{"benchmark": "plan"}'):
        path.write_text(text)
        assert simulator.main(["benchmark", str(path)]) == 2
        assert str(path) in capsys.readouterr().err
    old = json.loads(balance_record(tmp_path, []).read_text())
    del old["results"]["scenarios"][0]["runs"][0]["fits"]
    path.write_text(json.dumps(old))
    assert simulator.main(["benchmark", str(path)]) == 2
    assert "lack fits" in capsys.readouterr().err
