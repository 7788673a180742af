"""Injected delays: drawn as configured, slept by their own worker, and balanced away."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from training import Trained, train, work_per_sample

from configs.errors import UserError
from configs.schema import StragglerRule
from stragglers import Stragglers, calibrate, check_calibrated, must_measure


class NotedSleep:
    """A clock that sleeps in no time; its worker has been busy for 2 seconds, and what it slept."""

    def __init__(self) -> None:
        self.slept: list[float] = []

    def busy_so_far(self) -> float:
        return 2.0 + sum(self.slept)

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)


def delays(
    rules: list[StragglerRule], steps: list[tuple[int, int]], rank: int = 0, seed: int = 42,
    calibrated: dict[int, float] | None = None,
) -> list[list[float]]:  # fmt: skip
    """What a worker sleeps at each (epoch, step)."""
    stragglers, told = Stragglers(rules, rank, seed, calibrated), []
    for epoch, step in steps:
        clock = NotedSleep()
        stragglers.apply(clock, epoch, step)
        told.append(clock.slept)
    return told


STEPS = [(epoch, step) for epoch in range(20) for step in range(200)]
GAMMA = StragglerRule(ranks=(0, 1), kind="gamma", shape=4.0, scale=0.05)
EXPONENTIAL = StragglerRule(ranks=(0,), kind="exponential", scale=0.3)


@pytest.mark.parametrize(
    "rule, mean, deviation", [(GAMMA, 4 * 0.05, 0.05 * 4**0.5), (EXPONENTIAL, 0.3, 0.3)]
)
def test_random_delays_have_the_moments_of_their_distribution(rule, mean, deviation):
    drawn = np.array(delays([rule], STEPS))[:, 0]
    # Of 4000 draws; five standard errors.
    assert abs(drawn.mean() - mean) < 5 * deviation / 4000**0.5
    assert drawn.std() == pytest.approx(deviation, rel=0.15)
    assert len(set(drawn)) == len(drawn)


def test_a_gamma_of_shape_one_is_exponential_in_its_tail():
    rule = StragglerRule(ranks=(0,), kind="gamma", shape=1.0, scale=0.3)
    drawn = np.array(delays([rule], STEPS))[:, 0]
    assert np.mean(drawn > 0.3) == pytest.approx(np.exp(-1), abs=0.04)


def test_draws_depend_on_seed_rule_rank_epoch_and_step_and_on_nothing_else():
    alone = delays([GAMMA], STEPS[:400])
    for generator in (random.seed, np.random.seed, torch.manual_seed):
        generator(1)
    assert delays([GAMMA], STEPS[200:400]) == alone[200:]
    assert delays([GAMMA], STEPS[399::-1]) == alone[::-1]
    assert delays([GAMMA, EXPONENTIAL], STEPS[:9]) != alone[:9]
    # A rule of another rank keeps the second rule's number and draws nothing here.
    absent = StragglerRule(ranks=(5,), kind="constant", seconds=1.0)
    second = delays([absent, EXPONENTIAL], STEPS[:9])
    added = [[gamma[0] + other[0]] for gamma, other in zip(alone, second)]
    assert delays([GAMMA, EXPONENTIAL], STEPS[:9]) == added
    others = [
        delays([GAMMA], STEPS[:400], rank=1),
        delays([GAMMA], STEPS[:400], seed=43),
        delays([absent, GAMMA], STEPS[:400]),
    ]
    drawn = [alone, *others]
    assert len({tuple(slept) for one in drawn for slept in one}) == 4 * 400


def test_drawing_disturbs_no_other_generator():
    states = [random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()]
    delays([GAMMA, EXPONENTIAL], STEPS[:10])
    assert states == [
        random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    ]  # fmt: skip


def test_each_kind_says_how_long():
    rules = [
        StragglerRule(ranks=(0,), kind="constant", seconds=0.5),
        StragglerRule(ranks=(0,), kind="constant", fraction=0.9),
        StragglerRule(ranks=(1,), kind="constant", seconds=7.0),
    ]
    assert delays(rules, [(0, 0)], calibrated={1: 0.25}) == [[0.75]]
    slowdown = StragglerRule(ranks=(0,), kind="slowdown", factor=3.0)
    # Busy for 2 s; three times as long is 4 s more.
    assert delays([slowdown], [(0, 0)]) == [[4.0]]
    # Another rule's delay is no work, in whichever order they stand.
    assert delays([rules[0], slowdown], [(0, 0)]) == [[4.5]]
    assert delays([slowdown, rules[0]], [(0, 0)]) == [[4.5]]
    still = StragglerRule(ranks=(0,), kind="slowdown", factor=1.0)
    assert delays([still], [(0, 0)]) == [[]]


def test_a_window_includes_its_first_and_last_epoch():
    window = {"first_epoch": 2, "last_epoch": 3}
    rule = StragglerRule(ranks=(0,), kind="constant", seconds=1.0, **window)
    to_the_end = StragglerRule(ranks=(0,), kind="constant", seconds=2.0, first_epoch=4)
    told = delays([rule, to_the_end], [(epoch, 0) for epoch in range(6)])
    assert told == [[], [], [1.0], [1.0], [2.0], [2.0]]


def test_calibration_multiplies_each_worker_s_own_time():
    rules = [
        StragglerRule(ranks=(0,), kind="constant", seconds=1.0),
        StragglerRule(ranks=(1, 0), kind="constant", fraction=0.5),
    ]
    assert calibrate(rules, np.array([2.0, 4.0]), 600.0) == [
        {"rule": 1, "rank": 1, "seconds": 2.0}, {"rule": 1, "rank": 0, "seconds": 1.0}
    ]  # fmt: skip


def test_a_given_busy_time_replaces_the_measured_one():
    given = StragglerRule(
        ranks=(1, 0), kind="constant", fraction=0.5, busy_seconds=(3.0, 5.0), first_epoch=2
    )
    measured = StragglerRule(ranks=(1,), kind="constant", fraction=0.5)
    assert calibrate([given, measured], np.array([2.0, 4.0]), 600.0) == [
        {"rule": 0, "rank": 1, "seconds": 1.5}, {"rule": 0, "rank": 0, "seconds": 2.5},
        {"rule": 1, "rank": 1, "seconds": 2.0},
    ]  # fmt: skip
    assert [must_measure(r) for r in ([], [given], [measured], [given, measured])] == [
        False, False, True, True
    ]  # fmt: skip


def test_a_checkpoint_s_delays_are_those_of_its_rules():
    rules = [StragglerRule(ranks=(0, 1), kind="constant", fraction=0.5),
             StragglerRule(ranks=(0,), kind="constant", seconds=1.0)]  # fmt: skip
    whole = calibrate(rules, np.array([2.0, 4.0]), 600.0)
    check_calibrated(rules, whole[::-1], 2.1)
    with pytest.raises(UserError, match="longer than the timeout of 2 s"):
        check_calibrated(rules, whole, 2.0)
    for wrong in ([], whole[:1], [*whole, whole[0]], [whole[0], {**whole[1], "rank": 2}]):
        with pytest.raises(UserError, match="calibrated delays"):
            check_calibrated(rules, wrong, 600.0)


# --- in a run -------------------------------------------------------------------------------------

# In turn: worker 0 sleeps, worker 1 does at random, worker 1 takes longer, nobody is delayed.
RULES = [
    {"ranks": [0], "kind": "constant", "seconds": 0.4, "last_epoch": 0},
    {"ranks": [1], "kind": "gamma", "shape": 25.0, "scale": 0.016, "first_epoch": 1,
     "last_epoch": 1},
    {"ranks": [1], "kind": "slowdown", "factor": 12.0, "first_epoch": 2, "last_epoch": 2},
]  # fmt: skip
OPTIONS: dict[str, Any] = {
    "algorithm": "sync-sgd", "epochs": 4, "batch_size": 16, "data__train_samples": 96,
    "data__test_samples": 4, "precision": "fp32",
}  # fmt: skip


@pytest.fixture(scope="module")
def delayed(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Of 2 ms of work per sample, so of 16 ms per step and worker, and of RULES.

    The delays are many times that: a machine that is busy with others may double the work.
    """
    folder = tmp_path_factory.mktemp("delayed")
    return train(folder, 2, target=work_per_sample, before=(0.002,), stragglers=RULES, **OPTIONS)


def test_a_delay_lengthens_the_busy_time_of_its_worker_alone(delayed):
    slow = [0, 1, 1]
    for epoch, rank in zip(delayed.epochs, slow):
        delay, busy, wait = epoch["phases"]["delay"], epoch["busy"]["median"], epoch["wait"]["mean"]
        assert delay[1 - rank] == 0
        # Of means: most of an exponential delay's draws are shorter than its mean.
        assert epoch["busy"]["mean"][rank] > delay[rank] > 0
        assert busy[rank] > 1.5 * busy[1 - rank]
        # The others wait for it, about as long as it is delayed.
        assert wait[1 - rank] > 0.5 * (busy[rank] - busy[1 - rank])
    assert delayed.epochs[0]["phases"]["delay"][0] >= 0.4
    # 0.4 s on average, the half of it hardly ever: 2.5 standard deviations of a single draw.
    assert delayed.epochs[1]["phases"]["delay"][1] > 0.2
    assert delayed.epochs[3]["phases"]["delay"] == [0, 0]


def test_a_slowdown_is_a_multiple_of_the_step_s_own_work(delayed):
    steps = delayed.steps
    third = steps["epoch"] == 2
    phases = delayed.epochs[2]["phases"]
    own = sum(phases[name][1] for name in ("data", "forward", "backward", "step"))
    assert 7 * own < phases["delay"][1] < 16 * own
    assert np.median(steps["busy"][third, 1]) > 2 * np.median(steps["busy"][third, 0])


def test_random_delays_are_slept_as_drawn(delayed):
    drawn = np.array(
        delays([StragglerRule(**{**rule, "ranks": tuple(rule["ranks"])}) for rule in RULES],
               [(1, step) for step in range(6)], rank=1)
    )[:, 0]  # fmt: skip
    busy = delayed.steps["busy"][delayed.steps["epoch"] == 1, 1]
    assert (busy >= drawn).all()
    assert delayed.epochs[1]["phases"]["delay"][1] == pytest.approx(drawn[3:].mean(), abs=0.1)
    assert delayed.epochs[1]["phases"]["delay"][1] >= drawn[3:].mean()


def test_delays_change_nothing_that_is_learned(tmp_path, delayed):
    undelayed = train(tmp_path, 2, **OPTIONS)
    assert all(torch.equal(delayed.weights[k], t) for k, t in undelayed.weights.items())
    for key in ("train_loss", "train_top1", "test_loss", "test_top5"):
        assert delayed.column(key) == undelayed.column(key)


def test_a_fraction_is_one_of_the_undelayed_busy_time(tmp_path):
    rule = {"ranks": [0, 1], "kind": "constant", "fraction": 2.0}
    options = {**OPTIONS, "epochs": 1, "stragglers": [rule]}
    run = train(tmp_path, 2, target=work_per_sample, before=(0.003,), **options)
    told = run.provenance["calibrated_delays"]
    assert [(delay["rule"], delay["rank"]) for delay in told] == [(0, 0), (0, 1)]
    phases = run.epochs[0]["phases"]
    for delay in told:
        rank, seconds = delay["rank"], delay["seconds"]
        # 8 samples of 3 ms at an equal split, and what the model itself takes.
        assert 2 * 0.024 <= seconds < 2 * 0.5
        assert seconds <= phases["delay"][rank] < seconds + 0.2
        own = sum(phases[name][rank] for name in ("data", "forward", "backward", "step"))
        assert 0.4 < seconds / (2 * own) < 2.5


@pytest.mark.parametrize(
    "algorithm, exchange, slow", [("dp-sgd", "flat", 0), ("edp-sgd", "ddp", 1)]
)
def test_a_slow_worker_gets_less_to_do_until_both_are_equally_busy(
    tmp_path, algorithm, exchange, slow
):
    """Busy for 12 ms a sample, three times that on the slow one: 6 and 18 of 24 are best."""
    run = train(
        tmp_path, 2, target=work_per_sample, before=(0.012,), algorithm=algorithm,
        exchange=exchange, epochs=4, batch_size=24, data__train_samples=5 * 24,
        data__test_samples=4, precision="fp32",
        stragglers=[{"ranks": [slow], "kind": "slowdown", "factor": 3.0}],
    )  # fmt: skip
    sizes = [epoch["batch_sizes"][slow] for epoch in run.epochs]
    assert sizes[0] == 12 and all(4 <= size <= 9 for size in sizes[1:])
    busy = np.array([epoch["busy"]["median"] for epoch in run.epochs])
    assert busy[0, slow] > 2 * busy[0, 1 - slow]
    assert min(busy[1:, slow] / busy[1:, 1 - slow]) < 1.4
    assert busy[1:].max(1).min() < 0.75 * busy[0].max()
    imbalance = run.column("imbalance")
    assert imbalance[0] is None and any(known is not None for known in imbalance)
