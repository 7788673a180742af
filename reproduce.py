"""Makes all runs of an experiment file, then their figures and report.

    python reproduce.py configs/experiments/smoke.yaml               # two minutes, made-up data
    python reproduce.py configs/experiments/paper.yaml --dry-run     # what would be run, how long
    python reproduce.py configs/experiments/paper.yaml
    python reproduce.py configs/experiments/cpu.yaml --max-hours 2 data.root=/path/to/data
    python reproduce.py configs/experiments/paper.yaml --only 'resnet50-*/edp-sgd/*'
    python reproduce.py configs/experiments/scaling.yaml --nnodes=4 --nproc-per-node=8 …

Each run is one `torchrun … trainer.py`. Given again, the same command skips what has finished or
diverged and goes on with what was interrupted. Ctrl-C makes the present run save its state and
stop; a file `stop` in the output folder, or --max-hours, lets it finish and starts no further one.
"""

from __future__ import annotations

import argparse
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from configs import files
from configs.errors import UserError
from experiments.calibration import Calibrations
from experiments.grid import Experiment, read_experiment
from experiments.launcher import ENDING, ROOT, TORCHRUN_OPTIONS, Launcher
from experiments.sitting import Sitting, plan, select
from reader import EPOCHS, has_diverged, is_finished
from terminal import say

INTERRUPTED = 130
# What simulator.py says of the authors' experiments, for the report.
PREDICTIONS = ROOT / "results" / "authors" / "authors.json"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"command line: {' '.join(message.split())}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 all is done or left to a later sitting, 1 some run failed, 2 bad input."""
    for number in ENDING:
        if signal.getsignal(number) != signal.SIG_IGN:  # as nohup wants it
            signal.signal(number, _interrupt)
    try:
        return _main(_parse(arguments))
    except (UserError, OSError) as error:
        print(f"reproduce.py: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("reproduce.py: interrupted: the same command goes on from here", file=sys.stderr)
        return INTERRUPTED


def _main(options: argparse.Namespace) -> int:
    extra = _assignments(options.assignments)
    experiment = read_experiment(
        options.experiment, options.output, extra, options.nproc_per_node, options.nnodes
    )
    launcher = _launcher(options)
    runs = select(experiment, options.only)
    calibrations = Calibrations(experiment.output)
    sitting = Sitting(experiment, runs, launcher, calibrations, options.max_hours)
    if options.dry_run:
        say(plan(sitting))
        return 0
    try:
        sitting.work()
    finally:  # also where Ctrl-C ends it
        _tell(sitting.failed)
    failed = write_report(experiment)
    _tell(failed)
    return 1 if sitting.failed or failed else 0


def _tell(failed: Sequence[str]) -> None:
    for line in failed:
        print(f"failed: {line}", file=sys.stderr)


def write_report(experiment: Experiment) -> list[str]:
    """Figures, tables and the page from all records in the output folder; a line per failure."""
    folders = dict.fromkeys(run.folder.parent.parent for run in experiment.runs)
    recorded = [_from_root(folder) for folder in folders if any(folder.rglob(EPOCHS))]
    if not recorded:
        return []
    failed = []
    for module, target, more in _reports(experiment):
        command = [sys.executable, "-m", module, *recorded, "--out", str(target.absolute()), *more]
        done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
        if done.returncode != 0 or not target.exists():
            reason = done.stderr.strip().splitlines()[-1:] or ["it wrote nothing"]
            failed.append(f"{target}: {reason[0]}")
        else:
            say(f"written: {target}")
            for note in done.stderr.splitlines():
                say(note)
    return failed


def _from_root(path: Path) -> str:
    """As it is shown in the page: below this repository, where it lies there."""
    path = path.absolute()
    return str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)


def _reports(experiment: Experiment) -> list[tuple[str, Path, list[str]]]:
    """Modules with what they write and further arguments; runs on several numbers of workers are
    compared by those."""
    output = experiment.output
    if len({run.workers for run in experiment.runs}) > 1:
        return [("plots.scaling", output / "scaling", [])]
    predicted = ["--predictions", str(PREDICTIONS)] if PREDICTIONS.exists() else []
    named = [
        f"--missing={run.title}{' (diverged)' * has_diverged(run.folder)}"
        for run in experiment.runs
        if not is_finished(run.folder)
    ]
    return [
        ("plots", output / "figures", []),
        ("plots.report", output / "report.html", [*predicted, *named]),
    ]


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = _Parser(
        prog="reproduce.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("experiment", type=Path, metavar="FILE", help="see experiments/grid.py")
    parser.add_argument("assignments", nargs="*", metavar="key=value", help="set in all runs")
    parser.add_argument("--output", type=Path, metavar="DIR", help="default: runs/<its name>")
    parser.add_argument("--dry-run", action="store_true", help="list the runs and their times")
    parser.add_argument(
        "--only", action="append", metavar="PATTERN",
        help="make runs alone whose <config>/<algorithm>/seed-<n> fits, as shell patterns do",
    )  # fmt: skip
    parser.add_argument(
        "--max-hours", type=_hours, metavar="H", help="start no further run after H hours"
    )
    parser.add_argument(
        "--launch-prefix", default="", metavar="COMMAND",
        help="put before torchrun, e.g. 'srun --ntasks-per-node=1'",
    )  # fmt: skip
    torchrun = parser.add_argument_group("handed on to torchrun")
    for option in TORCHRUN_OPTIONS:
        torchrun.add_argument(option, option.replace("-", "_").replace("__", "--", 1), metavar="X")
    return parser.parse_intermixed_args(arguments)


def _launcher(options: argparse.Namespace) -> Launcher:
    """All but the number of workers, which the experiment's runs know."""
    given = {option: getattr(options, option[2:].replace("-", "_")) for option in TORCHRUN_OPTIONS}
    del given["--nproc-per-node"]
    handed = tuple(f"{option}={value}" for option, value in given.items() if value is not None)
    try:
        prefix = tuple(shlex.split(options.launch_prefix))
    except ValueError as error:
        raise UserError(f"command line: --launch-prefix: {error}") from error
    return Launcher(prefix, handed)


def _assignments(arguments: Sequence[str]) -> dict[str, Any]:
    found = {}
    for argument in arguments:
        key, equals, text = argument.partition("=")
        if not equals:
            raise UserError(f"command line: {argument} is not of the form key=value")
        if key in found:
            raise UserError(f"command line: {key} is given twice: give it once")
        found[key] = files.parse(text, f"command line: {key}")
    return found


def _hours(text: str) -> float:
    hours = float(text)
    if not hours >= 0:
        raise ValueError
    return hours


def _interrupt(number: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
