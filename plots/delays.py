"""Delay levels in words: what `stragglers` in a config says, as a reader would say it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any


def delay_level(
    stragglers: Sequence[Mapping[str, Any]], calibrated: Sequence[Sequence[Mapping[str, Any]]]
) -> str:
    """For example "0.1 s on worker 1", or "no delay".

    `stragglers` are the config's rules. `calibrated` holds, for each run of the experiment, the
    provenance's [{rule, rank, seconds}]: a relative delay's seconds follow in brackets.
    """
    texts = []
    for number, rule in enumerate(stragglers):
        seconds = [
            entry["seconds"] for run in calibrated for entry in run if entry["rule"] == number
        ]
        texts.append(f"{_size(rule)} on {_ranks(rule['ranks'])}{_in_seconds(seconds)}{_when(rule)}")
    return "; ".join(texts) or "no delay"


def delay_size(stragglers: Sequence[Mapping[str, Any]]) -> float:
    """A number that grows with the delay, to sort levels of one kind."""
    return sum(len(rule["ranks"]) * _amount(rule) for rule in stragglers)


def is_steady(stragglers: Sequence[Mapping[str, Any]]) -> bool:
    """Whether all delays are neither random nor limited to some epochs."""
    return all(
        rule["kind"] in ("constant", "slowdown")
        and not rule.get("first_epoch")
        and rule.get("last_epoch") is None
        for rule in stragglers
    )


def delay_seconds(
    stragglers: Sequence[Mapping[str, Any]], calibrated: Sequence[Sequence[Mapping[str, Any]]]
) -> float | None:
    """The longest mean delay per step of any rule; None where no rule's is known in seconds."""
    means = [
        _amount(rule)
        for rule in stragglers
        if rule["kind"] != "slowdown"
        and not (rule["kind"] == "constant" and rule.get("seconds") is None)
    ]
    measured = [entry["seconds"] for run in calibrated for entry in run]
    return max([*means, *measured], default=None)


def largest_ratio(calibrated: Sequence[Sequence[Mapping[str, Any]]]) -> float:
    """How many times longer a rule's delay of one rank is in one run than in another; 1 is equal.

    Relative delays are measured anew for each run, so they may differ; `calibrated` as above.
    """
    seconds: dict[tuple[int, int], list[float]] = defaultdict(list)
    for run in calibrated:
        for entry in run:
            seconds[entry["rule"], entry["rank"]].append(entry["seconds"])
    return max((max(v) / min(v) for v in seconds.values() if min(v) > 0), default=1.0)


def _amount(rule: Mapping[str, Any]) -> float:
    """Mean seconds, fraction or factor of one rule (a gamma's mean is shape × scale)."""
    if rule["kind"] == "slowdown":
        return rule["factor"]
    if rule["kind"] == "constant":
        return rule["fraction"] if rule.get("seconds") is None else rule["seconds"]
    return rule["scale"] * (1.0 if rule.get("shape") is None else rule["shape"])


def _size(rule: Mapping[str, Any]) -> str:
    amount = f"{_amount(rule):g}"
    if rule["kind"] == "slowdown":
        return f"slowdown × {amount}"
    if rule["kind"] == "constant":
        return f"{amount} × busy time" if rule.get("seconds") is None else f"{amount} s"
    shape = f" (shape {rule['shape']:g})" if rule["kind"] == "gamma" else ""
    return f"{rule['kind']} delay{shape}, mean {amount} s,"


def _in_seconds(seconds: Sequence[float]) -> str:
    if not seconds:
        return ""
    low, high = f"{min(seconds):.2g}", f"{max(seconds):.2g}"
    return f" ({low} s)" if low == high else f" ({low}–{high} s)"


def _when(rule: Mapping[str, Any]) -> str:
    first, last = rule.get("first_epoch") or 0, rule.get("last_epoch")
    if last is None:
        return f" from epoch {first}" if first else ""
    return f" in epochs {first}–{last}"


def _ranks(ranks: Sequence[int]) -> str:
    """ "worker 1", "workers 1, 3", "workers 4–7, 9": three and more in a row are joined."""
    rows: list[list[int]] = []
    for rank in sorted(ranks):
        if rows and rank == rows[-1][-1] + 1:
            rows[-1].append(rank)
        else:
            rows.append([rank])
    parts = []
    for row in rows:
        parts += [f"{row[0]}–{row[-1]}"] if len(row) > 2 else [str(rank) for rank in row]
    return ("worker " if len(ranks) == 1 else "workers ") + ", ".join(parts)
