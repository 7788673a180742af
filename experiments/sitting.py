"""One sitting at an experiment: what is missing is run, one after the other."""

from __future__ import annotations

import fnmatch
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

import storage
from configs.errors import UserError
from configs.files import read_mapping
from configs.schema import differences, from_mapping, resolve
from experiments.calibration import (
    FILE,
    STEPS,
    Calibrations,
    CalibrationStopped,
    measure,
    workload,
)
from experiments.grid import Experiment, PlannedRun
from experiments.launcher import Launcher
from experiments.prediction import Prediction, Predictor
from experiments.progress import Progress, duration
from reader import (
    CONFIG,
    LOCK,
    PREEMPTED,
    count_epochs,
    has_diverged,
    is_finished,
    recorded_workers,
)
from recorder import MAY_DIFFER
from stragglers import must_measure

STOP = "stop"  # a file of this name in the output folder ends the sitting after the present run


def select(experiment: Experiment, patterns: Sequence[str] | None) -> list[PlannedRun]:
    """The runs whose title fits one of the shell patterns; all without patterns.

    Where the number of workers is given, those of other numbers are left for another sitting.
    """
    possible = [run for run in experiment.runs if experiment.workers in (None, run.workers)]
    if not possible:
        numbers = ", ".join(map(str, sorted({run.workers for run in experiment.runs})))
        raise UserError(f"no run is of {experiment.workers} workers: there are those of {numbers}")
    runs = [
        run
        for run in possible
        if not patterns or any(fnmatch.fnmatchcase(run.title, pattern) for pattern in patterns)
    ]
    if not runs:
        raise UserError(
            f"--only {' '.join(patterns or ())} fits none of the {len(possible)} runs, "
            f"e.g. {possible[0].title}"
        )
    return runs


class Sitting:
    """Makes the runs of an experiment that have not ended; `failed` gets a line for each failure.

    A run that diverges has ended: made again, it would diverge again.

    Raises UserError where a run's folder holds another run than the one that is asked for.
    """

    def __init__(
        self,
        experiment: Experiment,
        runs: Sequence[PlannedRun],
        launcher: Launcher,
        calibrations: Calibrations,
        max_hours: float | None = None,
    ) -> None:
        self.experiment, self._launcher, self._calibrations = experiment, launcher, calibrations
        self._predictor = Predictor(calibrations)
        self._end = None if max_hours is None else time.monotonic() + 3600 * max_hours
        self.runs = [self._with_times(run) for run in runs]
        self.failed: list[str] = []
        self._notes: list[str] = []
        for run in map(self._with_times, experiment.runs):
            _check_folder(run)
            if is_finished(run.folder) and (note := self._learn(run)):
                self._notes.append(note)

    def left(self) -> list[PlannedRun]:
        """The runs that have not ended, in order."""
        return [run for run in self.runs if not _has_ended(run)]

    def prediction(self, run: PlannedRun) -> Prediction:
        return self._predictor.predict(run)

    def seconds_left(self, runs: Iterable[PlannedRun]) -> float | None:
        """Predicted seconds of what is missing of these runs; None where one is unknown."""
        return _added(_missing(self.prediction(run), run) for run in runs)

    def work(self) -> None:
        """Makes all runs that are left, or as many as time allows.

        Raises UserError where another process is at the same set.
        """
        output = self.experiment.output
        output.mkdir(parents=True, exist_ok=True)
        held = f"{output} is being worked at by another reproduce.py: wait for it, or stop it"
        with storage.lock(output / LOCK, held):
            # Another sitting may have ended since this one was made.
            self._calibrations.read()
            left = [self._with_times(run) for run in self.left()]
            progress = Progress(sum(run.config.epochs for run in left))
            try:
                progress.say(self._ended(len(left)))
                if self._calibrations.elsewhere():
                    progress.say(
                        f"note: {self._calibrations.path} is of another machine; delays stay"
                    )
                for note in self._notes:
                    progress.say(f"note: {note}")
                self._make_all(left, progress)
            finally:
                progress.close()
                # Wherever this ends: one that came too late is not for the next sitting.
                (output / STOP).unlink(missing_ok=True)

    def _ended(self, left: int) -> str:
        ended, all_runs = len(self.runs) - left, len(self.runs)
        diverged = [run.title for run in self.runs if has_diverged(run.folder)]
        line = f"{ended} of {all_runs} runs are finished"
        return f"{line}, of them diverged: {', '.join(diverged)}" if diverged else line

    def _make_all(self, left: Sequence[PlannedRun], progress: Progress) -> None:
        if not self._must_stop():
            try:
                self._calibrate(left, progress)
            except CalibrationStopped:
                progress.say(f"stopped: a calibration was asked to; {len(left)} left")
                return
            left = [self._with_times(run) for run in left]
        for number, run in enumerate(left):
            if why := self._must_stop():
                progress.say(f"stopped ({why}): {len(left) - number} left")
                return
            if must_measure(run.config.stragglers):
                self.failed.append(f"{run.title}: not started without its calibration")
                continue
            self._make(left, number, progress)
            if (run.folder / PREEMPTED).exists():
                progress.say(f"stopped: {run.title} was asked to; {len(left) - number} left")
                return

    def _calibrate(self, runs: Sequence[PlannedRun], progress: Progress) -> None:
        """Measures each workload that needs it, once; where that fails, a line in `failed`."""
        seen: list[tuple[dict[str, Any], int | None]] = []
        for run in runs:
            own = workload(run.base_config), run.workers
            if not must_measure(run.config.stragglers) or own in seen:
                continue
            seen.append(own)
            log = self._log(f"calibration-{run.base}")
            progress.say(f"calibration of {run.base}: {STEPS} steps without delays")
            try:
                entry = measure(run, self._launcher_of(run), self.experiment.output, log)
            except (UserError, OSError) as error:
                self.failed.append(f"{run.base}: {error}")
                continue
            self._calibrations.add(entry)
            times = ", ".join(f"{1000 * seconds:.2f}" for seconds in entry["busy_seconds"])
            progress.say(f"calibration of {run.base}: {times} ms a step")

    def _make(self, left: Sequence[PlannedRun], number: int, progress: Progress) -> None:
        run, place = left[number], f"[{number + 1}/{len(left)}]"
        told, after = self.prediction(run), self.seconds_left(left[number + 1 :])
        own = duration(_missing(told, run))
        for_all = duration(_added([_missing(told, run), after]))
        progress.say(f"{place} {run.title}: {own} predicted, {for_all} for all that are left")
        others = sum(count_epochs(other.folder) for other in left if other is not run)

        def watch() -> None:
            until = _added([_missing(told, run), after])
            progress.show(others + count_epochs(run.folder), run.title, until)

        continued = run.folder.exists()
        # What an earlier start was asked says nothing of this one, however early it ends.
        (run.folder / PREEMPTED).unlink(missing_ok=True)
        log, begin = self._log(run.title.replace("/", "_")), time.monotonic()
        try:
            code = self._launcher_of(run).run(run.arguments(self._write_config(run)), log, watch)
        except (UserError, OSError) as error:  # no command to start it with, or no disk for its log
            self.failed.append(f"{run.title}: cannot be started: {error}")
            progress.say(f"{place} {run.title}: not started")
            return
        seconds = time.monotonic() - begin
        spent = duration(seconds)
        if code == 0 and is_finished(run.folder):
            note = self._learn(run, None if continued else seconds)
            progress.say(f"{place} {run.title}: done in {spent}")
            if note:
                progress.say(f"note: {note}")
            return
        if (run.folder / PREEMPTED).exists():
            return
        if has_diverged(run.folder):
            progress.say(f"{place} {run.title}: diverged after {spent}, see {log}")
            return
        self.failed.append(f"{run.title}: exit code {code}, see {log}")
        progress.say(f"{place} {run.title}: failed after {spent}")

    def _learn(self, run: PlannedRun, wall_seconds: float | None = None) -> str | None:
        """A note where a finished run tells nothing of others, which is no error."""
        try:
            self._predictor.learn(run, wall_seconds)
        except UserError as error:
            return f"{run.title} does not help to predict other runs: {error}"
        return None

    def _launcher_of(self, run: PlannedRun) -> Launcher:
        per_node = self.experiment.per_node
        return self._launcher.on(run.workers if per_node is None else per_node)

    def _must_stop(self) -> str | None:
        stop = self.experiment.output / STOP
        if stop.exists():
            return f"{stop} was there"
        if self._end is not None and time.monotonic() >= self._end:
            return "--max-hours"
        return None

    def _with_times(self, run: PlannedRun) -> PlannedRun:
        """The run with its delays' measured times, as far as there are any."""
        mapping = self._calibrations.applied(run.mapping, run.base_config, run.workers)
        rules = from_mapping(mapping).stragglers
        launch = replace(run.launch, config=replace(run.launch.config, stragglers=rules))
        return replace(run, mapping=mapping, launch=launch)

    def _write_config(self, run: PlannedRun) -> Path:
        """The file that the run is started with: its base config with measured times."""
        path = self.experiment.output / "configs" / f"{run.base}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        text = yaml.safe_dump(dict(run.mapping), sort_keys=False)
        path.write_text(f"# Made by reproduce.py for experiment {self.experiment.name}.\n{text}")
        return path

    def _log(self, name: str) -> Path:
        return self.experiment.output / "logs" / f"{name}.log"


def plan(sitting: Sitting) -> str:
    """A table of all runs: what is left of each, how long it will take, and how that is known."""
    left = {run.folder for run in sitting.left()}
    rows = [("run", "epochs", "predicted", "from")]
    for run in sitting.runs:
        done, epochs = count_epochs(run.folder), run.config.epochs
        if run.folder not in left:
            ended = "diverged" if has_diverged(run.folder) else "finished"
            rows.append((run.title, f"{done}", ended, ""))
            continue
        told = sitting.prediction(run)
        seconds = duration(_missing(told, run))
        rows.append((run.title, f"{done}/{epochs}", seconds, told.source))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = ["  ".join([*map(str.ljust, row, widths), row[3]]).rstrip() for row in rows]
    seconds = sitting.seconds_left(sitting.left())
    lines.append(f"{len(left)} of {len(sitting.runs)} runs left: {duration(seconds)}")
    return "\n".join(lines)


def _has_ended(run: PlannedRun) -> bool:
    return is_finished(run.folder) or has_diverged(run.folder)


def _missing(told: Prediction, run: PlannedRun) -> float | None:
    """Seconds of the epochs that a run has not recorded yet."""
    done = count_epochs(run.folder) / run.config.epochs
    return None if told.seconds is None else told.seconds * (1 - done)


def _added(seconds: Iterable[float | None]) -> float | None:
    """The sum, or None where one is unknown."""
    known = list(seconds)
    return None if None in known else sum(known)


def _check_folder(run: PlannedRun) -> None:
    """Raises UserError where the run's folder holds records of another run."""
    file = run.folder / CONFIG
    if not file.exists():
        return
    workers = recorded_workers(run.folder)
    if None not in (workers, run.workers) and workers != run.workers:
        raise UserError(
            f"{run.folder} holds a run of {workers} workers, not {run.workers}: start "
            f"{workers}, choose another --output, or remove that folder"
        )
    earlier = resolve(from_mapping(read_mapping(file), str(file)))
    changed = [key for key in differences(earlier, run.config) if key not in MAY_DIFFER]
    if changed:
        hint = f" ({FILE} is missing or another's)" if "busy_seconds" in changed[0] else ""
        raise UserError(
            f"{run.folder} holds a run with another {', '.join(changed)}{hint}: set it back, "
            "choose another --output, or remove that folder"
        )
