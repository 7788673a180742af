"""What a run's data are known by: so that it does not go on, or on another node, with others."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from typing import Any

from data.images import Data

# Mean and deviation, in units of 0..1: libraries decode JPEG files to the last bit differently.
_TOLERANCE = 1e-4
_KINDS: dict[str, type] = {
    "train_samples": int, "test_samples": int, "classes": list, "labels": str, "files": str,
    "mean": list, "std": list,
}  # fmt: skip


def identity(data: Data) -> dict[str, Any]:
    """Numbers, names and hashes by name; alike for copies of a data set on other machines."""
    labels = hashlib.blake2b(digest_size=8)
    for images in (data.train, data.test):
        labels.update(images.labels.tobytes())
    return {
        "train_samples": len(data.train),
        "test_samples": len(data.test),
        "classes": list(data.classes),
        "labels": labels.hexdigest(),
        "files": data.files,
        "mean": list(data.mean),
        "std": list(data.std),
    }


def is_one(value: Mapping[str, Any]) -> bool:
    """Whether a mapping has the form of what `identity` gives."""
    if not all(isinstance(value.get(name), kind) for name, kind in _KINDS.items()):
        return False
    levels = [*value["mean"], *value["std"]]
    return len(levels) == 6 and all(isinstance(level, (int, float)) for level in levels)


def changes(earlier: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """How two of them differ, in words; empty if they do not."""
    words = []
    for name in _KINDS:
        before, after = earlier[name], now[name]
        if name in ("mean", "std"):
            same = all(math.isclose(a, b, abs_tol=_TOLERANCE) for a, b in zip(before, after))
        else:
            same = before == after
        if not same:
            numbers = f" {before:,}, now {after:,}" if isinstance(after, int) else ""
            words.append(f"{name}{numbers}")
    return "; ".join(words)
