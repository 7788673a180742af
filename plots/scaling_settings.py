"""What tells the runs of a scaling study apart: everything but their seed."""

from __future__ import annotations

import dataclasses
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from configs.schema import ALGORITHMS, PartitionConfig, from_mapping, resolve, to_mapping
from plots.delays import delay_level
from plots.grouping import POLICY_KEYS
from plots.records import provenance, workers
from reader import Run

RULES = ("none", "linear", "linear, warm-up")

_PARTS = {Fraction(1): "all", Fraction(1, 2): "half"}


@dataclass(frozen=True, order=True)
class Setting:
    """What the runs of one point have in common.

    speed: JSON of what a step's time depends on beside the other fields; algorithm: in brackets
    what is not as the algorithm alone has it; delays: in words, "" without any but slowdowns of the
    whole run; kinds: of each worker's device; slowed: how many times slower such slowdowns make
    each worker; rule: one of RULES; ramp: JSON of the rule's numbers; batch: global; rest: JSON of
    what else tells runs apart, which does not matter for their speed.
    """

    model: str
    data: str
    precision: str
    speed: str
    exchange: str
    algorithm: str
    delays: str
    kinds: tuple[str, ...]
    slowed: tuple[float, ...]
    rule: str
    ramp: str
    batch: int
    epochs: int
    rest: str

    @property
    def workers(self) -> int:
        return len(self.slowed)

    @property
    def batch_per_worker(self) -> float:
        return self.batch / self.workers

    @property
    def cluster(self) -> str:
        """`equal` workers, `mixed` ones (slowdowns, several kinds of device), `other` delays."""
        if self.delays:
            return "other"
        return "equal" if len(set(self.kinds)) == 1 and set(self.slowed) == {1.0} else "mixed"

    @property
    def plain(self) -> bool:
        """Whether equal workers run sync-sgd, with nothing that is not as that has it."""
        return (self.cluster, self.algorithm) == ("equal", "sync-sgd")

    @property
    def mix(self) -> str:
        """The cluster in words that hold for any size, for example "half slowed 2 times"."""
        if self.cluster != "mixed":
            return self.delays or "equal"
        parts = []
        for (kind, factor), number in sorted(Counter(zip(self.kinds, self.slowed)).items()):
            words = [kind] if len(set(self.kinds)) > 1 else []
            words += [f"slowed {factor:g} times"] if factor > 1 else []
            if words:
                part = Fraction(number, self.workers)
                parts.append(" ".join([_PARTS.get(part, str(part)), *words]))
        return ", ".join(parts)

    @property
    def factors(self) -> tuple[float, ...] | None:
        """How many times slower each worker is than one alone; None where that is unknown."""
        return None if self.delays or len(set(self.kinds)) > 1 else self.slowed

    @property
    def power(self) -> float | None:
        """How many workers alone they could replace; None where that is unknown."""
        return None if self.factors is None else sum(1 / factor for factor in self.factors)


def setting_of(run: Run) -> Setting:
    """The setting of a run. Raises UserError where its provenance lacks what is asked for."""
    config = to_mapping(resolve(from_mapping(run.config)))
    slowed, others = _slowed(config["stragglers"], workers(run))
    schedule = config["schedule"]
    scaled = schedule.pop("scale_lr") == "linear"
    ramp = {key: schedule.pop(key) for key in ("warmup_epochs", "reference_batch_size")}
    rest = {key: config[key] for key in ("optimizer", "label_smoothing")}
    rest |= {"schedule": schedule, "stragglers": others}
    rest["data"] = {k: v for k, v in config["data"].items() if k not in ("root", "cache")}
    # On several GPUs of one kind workers are alike: their indices do not count.
    kinds = tuple(
        re.sub(r"^(\w+):\d+", r"\1", str(name)) for name in provenance(run, "devices", list)
    )
    return Setting(
        model=config["model"]["name"],
        data=config["data"]["name"],
        precision=config["precision"],
        speed=json.dumps(_speed(config, kinds), sort_keys=True),
        exchange=config["exchange"],
        algorithm=_method(config),
        delays=delay_level(config["stragglers"], []) if others else "",
        kinds=kinds,
        slowed=slowed,
        rule=RULES[0] if not scaled else RULES[2] if ramp["warmup_epochs"] else RULES[1],
        ramp=json.dumps(ramp if scaled else {}, sort_keys=True),
        batch=config["batch_size"],
        epochs=config["epochs"],
        rest=json.dumps(rest, sort_keys=True),
    )


def _slowed(
    rules: Sequence[Mapping[str, Any]], count: int
) -> tuple[tuple[float, ...], list[Mapping[str, Any]]]:
    """Factors of `count` workers by slowdowns of the whole run, and all other rules."""
    slowed, others = [1.0] * count, []
    for rule in rules:
        whole = not rule["first_epoch"] and rule.get("last_epoch") is None
        if rule["kind"] != "slowdown" or not whole:
            others.append(rule)
            continue
        for rank in set(rule["ranks"]):
            slowed[rank] += rule["factor"] - 1.0  # they add as in stragglers.py
    return tuple(slowed), others


def _speed(config: Mapping[str, Any], kinds: Sequence[str]) -> dict[str, Any]:
    """See experiments/calibration.py, which knows no other machine than its own."""
    speed = {key: config[key] for key in ("memory_format", "threads", "accumulate")}
    for key in ("image_size", "crop", "placement", "loader_workers"):
        speed[key] = config["data"][key]
    speed["devices"] = " and ".join(sorted(set(kinds)))
    # What null stands for. A Horovod run's record names one that its gradients do not go through.
    speed["backend"] = config["backend"] or ("gloo" if set(kinds) == {"cpu"} else "nccl")
    return speed


def _method(config: Mapping[str, Any]) -> str:
    """The algorithm, for example "sync-sgd (static, shares 0.75:0.25)"."""
    algorithm, partition = config["algorithm"], config["partition"]
    usual = dataclasses.asdict(PartitionConfig())
    policy, weight = ALGORITHMS[algorithm]
    parts = [partition["policy"]] if partition["policy"] != policy else []
    for key in POLICY_KEYS.get(partition["policy"], ()):
        if partition[key] != usual[key]:
            parts.append(f"{key} {_text(partition[key])}")
    if config["gradient_weight"] != weight:
        parts.append(f"{config['gradient_weight']} weight")
    return algorithm + (f" ({', '.join(parts)})" if parts else "")


def in_words(entries: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """The entries of a mapping in words, by their keys, which nested ones' keys follow dotted."""
    found: dict[str, str] = {}
    for key, value in entries.items():
        if isinstance(value, dict):
            found |= in_words(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = f"{prefix}{key} {_text(value)}"
            if key == "threads":
                found[key] = "1 thread" if value == 1 else f"{_text(value)} threads"
    return found


def names_apart(bases: Sequence[str], details: Sequence[Mapping[str, str]]) -> list[str]:
    """Each base, and where several are the same, those of their details that differ."""
    names = []
    for base, own in zip(bases, details):
        alike = [other for name, other in zip(bases, details) if name == base]
        parts = [
            text for key, text in own.items() if any(other.get(key) != text for other in alike)
        ]
        names.append(", ".join([base, *parts]))
    return names


def _text(value: Any) -> str:
    if value is None:
        return "default"
    if isinstance(value, list):
        return ":".join(map(_text, value))
    return f"{value:g}" if isinstance(value, float) else str(value)
