"""The numbers behind a scaling study's figures, as JSON-able records and as Markdown tables."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from plots import scaling_accuracy as accuracies
from plots import scaling_exchanges
from plots.estimates import UNKNOWN, Ratio, Spread, percent_text, ratio, ratio_text
from plots.scaling_predictions import Costs, Network, predicted
from plots.scaling_records import Family, Point
from plots.scaling_seeds import Seeds, spread
from plots.scaling_settings import in_words, names_apart


def record(
    family: Family, costs: Costs | None, network: Network | None, goal: float | None
) -> dict[str, Any]:
    """All numbers behind a family's figures: seconds, samples/s, fractions; ratios' 95 % intervals.

    goal: the accuracy, 0..1, that times are taken to.
    """
    return {
        "title": family.title,
        "costs": None if costs is None else vars(costs),
        "network": None if network is None else vars(network),
        "throughput": _throughputs(family),
        "balance": _balances(family),
        "exchanges": scaling_exchanges.rows(family),
        "predictions": [] if costs is None else _checks(family, costs, network),
        "accuracy_goal": goal,
        "trained": [_point(point, goal) for point in accuracies.trained_points(family)],
    }


def _throughputs(family: Family) -> list[dict[str, Any]]:
    """Settled samples/s, and what they are against one worker alone.

    The speed-up is over one worker with the same global batch. The efficiency is against as many
    workers alone with the same batch per worker, each slowed as it is: their speeds add up.
    """
    rows = []
    keys = [point.setting for point in family.points]
    for mix, exchange, algorithm in dict.fromkeys((k.mix, k.exchange, k.algorithm) for k in keys):
        powers = {key.workers: key.power for key in keys if key.mix == mix}
        speeds = family.speeds(mix=mix, exchange=exchange, algorithm=algorithm)
        for (workers, batch), seeds in speeds.items():
            together = family.plain.get((1, batch // workers)) if batch % workers == 0 else None
            if together is not None:
                scale = powers[workers]
                together = None if scale is None else {k: scale * s for k, s in together.items()}
            speed = spread(seeds)
            rows.append(
                {
                    "cluster": mix, "exchange": exchange, "algorithm": algorithm,
                    "workers": workers, "batch": batch, "samples_per_second": speed.mean,
                    "sd": speed.sd, "seeds": len(seeds),
                    "speed_up_same_global_batch": _over(seeds, family.plain.get((1, batch))),
                    "efficiency_same_batch_per_worker": _over(seeds, together),
                }
            )  # fmt: skip
    return rows


def _balances(family: Family) -> list[dict[str, Any]]:
    """Samples/s on unequal workers over those of sync-sgd on the same."""
    rows = []
    keys = [p.setting for p in family.points if p.setting.cluster == "mixed"]
    keys = [key for key in keys if key.exchange == "ddp"]
    for mix, algorithm in dict.fromkeys((key.mix, key.algorithm) for key in keys):
        plain = family.speeds(mix=mix, exchange="ddp", algorithm="sync-sgd")
        speeds = family.speeds(mix=mix, exchange="ddp", algorithm=algorithm)
        rows += [
            {"cluster": mix, "algorithm": algorithm, "workers": workers, "batch": batch,
             "over_sync_sgd": _over(seeds, plain[workers, batch])}
            for (workers, batch), seeds in speeds.items()
            if algorithm != "sync-sgd" and (workers, batch) in plain
        ]  # fmt: skip
    return rows


def _over(seeds: Seeds, base: Seeds | None) -> dict[str, Any] | None:
    """The ratio of two speeds as plots/estimates.py has it: of pairs of the same seed if it can."""
    if base is None:
        return None
    found = ratio(seeds, base)
    return {"value": found.value, "interval": found.interval, "n": found.n, "paired": found.paired}


def _checks(family: Family, costs: Costs, network: Network | None) -> list[dict[str, Any]]:
    """What the simulator predicts for numbers of workers that were measured, and its error.

    exchange_measured_here: the exchange was taken from these very runs, so that only one worker's
    costs are put to the test.
    """
    rows = []
    for (workers, batch), seeds in family.plain.items():
        if workers == 1:
            continue
        speed = spread(seeds).mean
        own = predicted(costs, batch, [1.0] * workers, network=network)
        row = {
            "workers": workers, "batch": batch,
            "exchange_measured_here": network is None and workers == costs.exchanged,
            "measured": speed, "predicted": own, "error": _error(own, speed),
        }  # fmt: skip
        if costs.cores is not None and workers > costs.cores:
            shared = predicted(costs, batch, [1.0] * workers, network=network, share_cores=True)
            row |= {"predicted_on_shared_cores": shared,
                    "error_on_shared_cores": _error(shared, speed)}  # fmt: skip
        rows.append(row)
    return rows


def _error(ends: tuple[float, float], measured: float) -> float:
    """Predicted over measured less 1, of the middle of the band."""
    return sum(ends) / 2 / measured - 1


def _point(point: Point, goal: float | None) -> dict[str, Any]:
    key, top1 = point.setting, spread(point.top1) if point.top1 else None
    times = {} if goal is None else point.seconds_to(goal)
    return {
        "cluster": key.mix, "algorithm": key.algorithm, "workers": key.workers, "batch": key.batch,
        "rule": key.rule, "epochs": key.epochs, "ramp": json.loads(key.ramp),
        "rest": json.loads(key.rest), "seeds": point.seeds,
        "diverged_in_epoch": [point.diverged.get(seed) for seed in point.seeds],
        "top1": None if top1 is None else top1.mean, "top1_sd": None if top1 is None else top1.sd,
        "seconds_to_goal": [times.get(seed) for seed in point.seeds],
        "busy_share": None if point.busy_share is None else point.busy_share.tolist(),
    }  # fmt: skip


# --- tables -----------------------------------------------------------------------------------


def markdown(found: dict[str, Any]) -> list[str]:
    """The paragraphs and tables of a family's record."""
    parts = [f"## {found['title']}", *_speeds(found["throughput"])]
    if found["balance"]:
        parts += [
            "Throughput over that of `sync-sgd` on the same unequal workers.",
            _table(
                ["cluster", "algorithm", "workers", "global batch", "over `sync-sgd`"],
                [[r["cluster"], r["algorithm"], f"{r['workers']}", f"{r['batch']:,}",
                  _ratio(r["over_sync_sgd"])] for r in found["balance"]],
            ),
        ]  # fmt: skip
    if found["exchanges"]:
        parts += [
            "Ways of exchange, of runs that differ by nothing else.",
            _table(
                ["workers", "global batch", "exchange", "samples/s", "over", "its samples/s",
                 "ratio"],
                [[f"{r['workers']}", f"{r['batch']:,}", r["exchange"],
                  f"{r['samples_per_second']:,.0f}", r["over"],
                  f"{r['samples_per_second_of_that']:,.0f}", _ratio(r, "ratio")]
                 for r in found["exchanges"]],
            ),
        ]  # fmt: skip
    if found["predictions"]:
        parts += _predictions(found)
    if found["trained"]:
        parts += _trained(found)
    return parts


def _speeds(rows: Sequence[dict[str, Any]]) -> list[str]:
    return [
        "Settled throughput, mean ± sd over seeds; ratios are of pairs with the same seed where "
        "there are any, with their 95 % interval. Speed-up: over one worker with the same global "
        "batch (strong scaling). Efficiency: against one worker with the same batch per worker, "
        "times the workers (weak scaling), of which one that is slowed down f times counts as 1/f, "
        "so that perfect balance reads 100 %.",
        _table(
            ["cluster", "exchange", "algorithm", "workers", "global batch", "seeds", "samples/s",
             "speed-up, same global batch", "efficiency, same batch per worker"],
            [
                [r["cluster"], r["exchange"], r["algorithm"], f"{r['workers']}", f"{r['batch']:,}",
                 f"{r['seeds']}",
                 f"{r['samples_per_second']:,.0f}" + (f" ± {r['sd']:,.0f}" if r["sd"] else ""),
                 _ratio(r["speed_up_same_global_batch"]),
                 _percent(r["efficiency_same_batch_per_worker"])]
                for r in rows
            ],
        ),
    ]  # fmt: skip


def _predictions(found: dict[str, Any]) -> list[str]:
    text = "Predicted by the simulator from one worker's costs and "
    exchanged = found["costs"]["exchanged"]
    if found["network"] is None:
        text += (
            f"the all-reduce of {exchanged} workers, beside the measurement. That all-reduce was "
            f"measured in the rows of {exchanged} workers, which are thus partly a fit and no test"
        )
    else:
        text += "the given network, beside the measurement"
    if any("predicted_on_shared_cores" in row for row in found["predictions"]):
        text += "; in brackets as if the workers shared this machine's cores"
    rows = [
        [f"{r['workers']}", f"{r['batch']:,}",
         "measured here" if r["exchange_measured_here"] else "modelled", f"{r['measured']:,.0f}",
         _band(r), _off(r)]
        for r in found["predictions"]
    ]  # fmt: skip
    head = ["workers", "global batch", "exchange", "measured samples/s", "predicted", "off"]
    return [f"{text}.", _table(head, rows)]


def _trained(found: dict[str, Any]) -> list[str]:
    goal, rows = found["accuracy_goal"], found["trained"]
    text = "Whole runs; top-1 on the test set of the seeds that finished"
    if goal is not None:
        text += f", and each seed's seconds of training to {100 * goal:g} %"
    # Delays are told by the cluster's column.
    details = [{**row["ramp"], **row["rest"], "stragglers": []} for row in rows]
    rates = names_apart([row["rule"] for row in rows], list(map(in_words, details)))
    head = ["cluster", "algorithm", "workers", "global batch", "learning rate", "epochs", "seeds",
            "top-1 %", "seconds"]  # fmt: skip
    return [f"{text}.", _table(head, [_trained_row(row, rate) for row, rate in zip(rows, rates)])]


def _trained_row(row: dict[str, Any], rate: str) -> list[str]:
    top1 = UNKNOWN if row["top1"] is None else percent_text(Spread(row["top1"], row["top1_sd"]))
    return [
        row["cluster"], row["algorithm"], f"{row['workers']}", f"{row['batch']:,}", rate,
        f"{row['epochs']}", _seeds(row), top1,
        ", ".join(UNKNOWN if s is None else f"{s:.1f}" for s in row["seconds_to_goal"]),
    ]  # fmt: skip


def _seeds(row: dict[str, Any]) -> str:
    """For example "2 seeds, 1 diverged in epoch 0"."""
    number = len(row["seeds"])
    text = "1 seed" if number == 1 else f"{number} seeds"
    ends = [epoch for epoch in row["diverged_in_epoch"] if epoch is not None]
    if not ends:
        return text
    epochs = [f"{epoch}" for epoch in sorted(set(ends))]
    return f"{text}, {len(ends)} diverged in epoch{'s' * (len(epochs) > 1)} {', '.join(epochs)}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _ratio(found: dict[str, Any] | None, key: str = "value") -> str:
    if found is None:
        return UNKNOWN
    return ratio_text(Ratio(found[key], found["interval"], found["n"], found["paired"]))


def _percent(found: dict[str, Any] | None) -> str:
    if found is None:
        return UNKNOWN
    text = f"{100 * found['value']:.0f} %"
    if found["interval"] is None:
        return text
    low, high = found["interval"]
    return f"{text} [{100 * low:.0f}, {100 * high:.0f}]"


def _band(row: dict[str, Any]) -> str:
    text, shared = _ends(row["predicted"]), row.get("predicted_on_shared_cores")
    return text if shared is None else f"{text} ({_ends(shared)})"


def _ends(ends: Sequence[float]) -> str:
    low, high = (f"{end:,.0f}" for end in ends)
    return low if low == high else f"{low} – {high}"


def _off(row: dict[str, Any]) -> str:
    text, shared = f"{100 * row['error']:+.0f} %", row.get("error_on_shared_cores")
    return text if shared is None else f"{text} ({100 * shared:+.0f} %)"
