"""What others say about the paper's experiments: its authors' records, and predictions.

Every reader raises UserError that names the file and its fault.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.errors import UserError
from configs.files import read_json
from plots.estimates import Ratio, Spread, ratio_of_means
from plots.grouping import BASELINE

_FOLDER = Path(__file__).resolve().parent.parent / "data" / "reference"
AUTHORS, PAIRS = _FOLDER / "authors_runs.csv", _FOLDER / "authors_aws.csv"

_REMEDY = "write it with simulator.py authors --out"


@dataclass(frozen=True)
class PaperKey:
    """One of the paper's experiments: a model and the seconds that worker 1 sleeps in each step."""

    model: str
    delay_seconds: float


@dataclass(frozen=True)
class Times:
    """Times of one algorithm in one experiment, in seconds; None is unknown.

    busy_seconds: per step and worker, once shares have settled; optimum: T*; speed-ups are over
    sync-sgd in the same source, of training alone and of the run time with evaluation.
    """

    runs: int | None = None
    epochs: int | None = None
    epochs_planned: int | None = None
    epoch_seconds: Spread | None = None
    train_seconds: Spread | None = None
    total_seconds: Spread | None = None
    busy_seconds: tuple[float, ...] | None = None
    optimum: float | None = None
    train_speed_up: Ratio | None = None
    total_speed_up: Ratio | None = None


@dataclass(frozen=True)
class AuthorsRow:
    """One row of authors_runs.csv."""

    times: Times
    final_train_loss: float


@dataclass(frozen=True)
class Shared:
    """How unequal workers share a batch: batch sizes, busy seconds, and a whole step's seconds.

    Where it is predicted: grows, the part of a busy time that grows with the batch; optimum: T* in
    seconds; speed_up: over equal shares.
    """

    batch_sizes: tuple[int, ...]
    busy_seconds: tuple[float, ...]
    step_seconds: float
    grows: float | None = None
    optimum: float | None = None
    speed_up: float | None = None


@dataclass(frozen=True)
class Pair:
    """A model on two unequal instances, which the authors ran with equal shares alone."""

    model: str
    instances: tuple[str, ...]
    equal: Shared
    predicted: tuple[Shared, ...]


# By experiment, then algorithm.
Authors = dict[PaperKey, dict[str, AuthorsRow]]
Predictions = dict[PaperKey, dict[str, Times]]


def read_authors(path: Path = AUTHORS) -> Authors:
    """The authors' rows, in the file's order."""
    with _authors_file(path):
        found: dict[PaperKey, dict[str, Mapping[str, str]]] = {}
        for row in _csv_rows(path):
            key = PaperKey(row["model"], float(row["delay_seconds"]))
            found.setdefault(key, {})[row["algorithm"]] = row
        return {
            key: {name: _authors_row(row, rows[BASELINE]) for name, row in rows.items()}
            for key, rows in found.items()
        }


def read_pairs(predictions: Path | None, path: Path = PAIRS) -> list[Pair]:
    """The authors' unequal instances, with what `simulator.py authors --out` predicted for them."""
    with _authors_file(path):
        measured: dict[str, list[Mapping[str, str]]] = {}
        for row in _csv_rows(path):
            measured.setdefault(row["model"], []).append(row)
        equal = {model: _equal(rows) for model, rows in measured.items()}
    predicted = {model: [] for model in equal}
    if predictions is not None:
        with _predictions_file(predictions):
            for row in read_json(predictions)["results"]["aws"]:
                predicted[row["model"]].append(_predicted_pair(row))
    return [
        Pair(model, tuple(row["instance"] for row in rows), equal[model], tuple(predicted[model]))
        for model, rows in measured.items()
    ]


def _csv_rows(path: Path) -> list[dict[str, str]]:
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _equal(rows: list[Mapping[str, str]]) -> Shared:
    """Both instances make the same steps, so the longer batch time is the step's."""
    return Shared(
        tuple(int(row["batch_per_worker"]) for row in rows),
        tuple(float(row["process"]) for row in rows),
        max(float(row["batch"]) for row in rows),
    )


def _predicted_pair(row: Mapping[str, Any]) -> Shared:
    return Shared(
        tuple(map(int, row["predicted_batch_sizes"])),
        tuple(map(float, row["predicted_busy_seconds"])),
        float(row["predicted_step_seconds"]),
        float(row["elasticity"]),
        float(row["optimum_seconds"]),
        float(row["predicted_speed_up"]),
    )


def _authors_row(row: Mapping[str, str], sync: Mapping[str, str]) -> AuthorsRow:
    """The training times follow from the seconds per batch, which leave the test out."""
    epochs, runs = int(row["epochs"]), int(row["runs"])
    compared = row is not sync
    per_epoch, sync_epoch = (_epoch_seconds(one) for one in (row, sync))
    total, sync_total = (
        Spread(float(one["run_seconds_mean"]), float(one["run_seconds_std"])) for one in (row, sync)
    )
    times = Times(
        runs=runs,
        epochs=epochs,
        epoch_seconds=Spread(per_epoch, None),
        train_seconds=Spread(per_epoch * epochs, None),
        total_seconds=total,
        busy_seconds=tuple(float(row[f"process_seconds_rank{rank}_last50"]) for rank in (0, 1)),
        train_speed_up=Ratio(sync_epoch / per_epoch, None, 0, False) if compared else None,
        total_speed_up=ratio_of_means(sync_total, total, runs) if compared else None,
    )
    return AuthorsRow(times, float(row["final_train_loss"]))


def _epoch_seconds(row: Mapping[str, str]) -> float:
    """Of training: both workers make the same steps, so the longer batch time is the step's."""
    step = max(float(row[f"batch_seconds_rank{rank}"]) for rank in (0, 1))
    return int(row["iterations_per_epoch"]) * step


def read_predictions(path: Path, authors: Authors) -> Predictions:
    """The predictions in the record that `simulator.py authors --out` wrote."""
    with _predictions_file(path):
        predictions: Predictions = {}
        for row in read_json(path)["results"]["runs"]:
            key, algorithm = PaperKey(row["model"], float(row["delay_seconds"])), row["algorithm"]
            predictions.setdefault(key, {})[algorithm] = _prediction(row, authors[key])
        return predictions


@contextmanager
def _authors_file(path: Path) -> Iterator[None]:
    """Faults of one of the authors' files become UserErrors."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path}: cannot read the authors' numbers ({error.strerror})") from error
    except KeyError as error:
        raise UserError(f"{path} has no {error}: put the file back") from error
    except (TypeError, ValueError) as error:
        raise UserError(f"{path} is damaged ({error}): put the file back") from error


@contextmanager
def _predictions_file(path: Path) -> Iterator[None]:
    """Faults of a simulator's record become UserErrors."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{error}: {_REMEDY}") from error
    except KeyError as error:
        raise UserError(f"{path} lacks {error}: {_REMEDY}") from error
    except (AttributeError, TypeError, ValueError, ZeroDivisionError) as error:
        raise UserError(f"{path} holds no predictions ({error}): {_REMEDY}") from error


def _prediction(row: Mapping[str, Any], authors: Mapping[str, AuthorsRow]) -> Times:
    """One predicted row; its speed-ups are over sync-sgd as predicted for the same machine state.

    What an epoch has beside training is the same in both.
    """
    epochs, parts = authors[BASELINE].times.epochs, row["predicted_epoch_parts"]
    total, speed_up = float(row["predicted_run_seconds"]), float(row["predicted_speed_up"])
    beside = float(parts["evaluation"]) + float(parts["epoch_rest"])
    per_epoch, sync_epoch = (seconds / epochs - beside for seconds in (total, speed_up * total))
    return Times(
        epochs=epochs,
        epoch_seconds=Spread(per_epoch, None),
        train_seconds=Spread(per_epoch * epochs, None),
        total_seconds=Spread(total, None),
        busy_seconds=tuple(map(float, row["predicted_busy_seconds"])),
        optimum=float(row["optimum_seconds"]),
        train_speed_up=Ratio(sync_epoch / per_epoch, None, 0, False),
        total_speed_up=Ratio(speed_up, None, 0, False),
    )
