"""reproduce.py: what is run, skipped, resumed and said, with a stand-in for the launcher."""

from __future__ import annotations

import itertools
import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from fake_runs import fake_record
from processes import still_running
from training import records, short_config

import reproduce
from configs.command_line import parse
from configs.errors import UserError
from configs.schema import from_mapping, resolve
from experiments import launcher
from experiments.calibration import FILE
from experiments.grid import read_experiment
from experiments.launcher import ENDING, TORCHRUN_OPTIONS, Launcher
from reader import count_epochs, is_finished
from reproduce import write_report  # by this name, as tests replace the module's

ROOT = Path(__file__).resolve().parent.parent
FAKE = f"{sys.executable} {ROOT / 'tests' / 'fake_launcher.py'}"
DELAYS = {
    "f0.5": [{"ranks": [1], "kind": "constant", "fraction": 0.5}],
    "s0.1": [{"ranks": [1], "kind": "constant", "seconds": 0.1}],
}
ALL = [
    f"base-{delay}/{algorithm}/seed-{seed}"
    for seed in (1, 2)
    for delay in DELAYS
    for algorithm in ("sync-sgd", "edp-sgd")
]


class Set:
    """An experiment file in a folder, and calls of reproduce.py with it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.output, self.notes = folder, folder / "out", folder / "notes"
        base = {**short_config(), "name": "base", "data": {"name": "synthetic"}}
        (folder / "base.yaml").write_text(yaml.safe_dump({**base, "epochs": 3}))
        self.write({})

    def write(self, changes: dict[str, Any]) -> None:
        grid = {
            "configs": [str(self.folder / "base.yaml")],
            "algorithms": ["sync-sgd", "edp-sgd"],
            "seeds": [1, 2],
            "delays": DELAYS,
            **changes,
        }
        document = {"name": "set", "workers": 2, "grids": [grid]}
        (self.folder / "set.yaml").write_text(yaml.safe_dump(document, sort_keys=False))

    def call(self, *arguments: str) -> int:
        line = [str(self.folder / "set.yaml"), "--output", str(self.output), *arguments]
        return reproduce.main([*line, "--launch-prefix", FAKE])

    def commands(self) -> list[list[str]]:
        """The launched command lines, without the calibrations'."""
        lines = self.notes.read_text().splitlines() if self.notes.exists() else []
        found = [json.loads(line) for line in lines]
        return [command for command in found if "calibration" not in " ".join(command)]

    def started(self) -> list[str]:
        """The runs in the order in which they were launched."""
        titles = []
        for command in self.commands():
            option = dict(itertools.pairwise(command))
            name = Path(option["--config"]).stem
            titles.append(f"{name}/{option['--algorithm']}/seed-{option['--seed']}")
        return titles

    def run(self, title: str) -> Path:
        return self.output / title

    def config(self, title: str) -> dict[str, Any]:
        return yaml.safe_load((self.run(title) / "config.yaml").read_text())


@pytest.fixture(autouse=True)
def handlers():
    """reproduce.main changes what signals do; the tests' own process goes on as before."""
    before = {number: signal.getsignal(number) for number in ENDING}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def experiment(tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE_NOTES", str(tmp_path / "notes"))
    monkeypatch.setattr(reproduce, "write_report", lambda experiment: [])
    return Set(tmp_path)


# --- what is run ----------------------------------------------------------------------------------


def test_a_run_that_diverges_has_ended_and_is_told(experiment, monkeypatch, capsys):
    monkeypatch.setenv("FAKE_DIVERGE", ALL[1])
    assert experiment.call() == 0
    assert f"{ALL[1]}: diverged after" in capsys.readouterr().out
    assert experiment.call() == 0 and experiment.started() == ALL
    told = capsys.readouterr().out
    assert f"8 of 8 runs are finished, of them diverged: {ALL[1]}\n" in told
    assert experiment.call("--dry-run") == 0
    assert "0 of 8 runs left" in (told := capsys.readouterr().out)
    assert [line.split()[1:] for line in told.splitlines() if line.startswith(ALL[1])] == [
        ["1", "diverged"]
    ]
    # By hand it can be tried again; the folder then holds another end.
    (experiment.run(ALL[1]) / "diverged").unlink()
    monkeypatch.delenv("FAKE_DIVERGE")
    assert experiment.call() == 0 and experiment.started() == [*ALL, ALL[1]]


def test_all_runs_are_made_in_order_and_never_again(experiment, capsys):
    assert experiment.call() == 0
    assert experiment.started() == ALL
    for title in ALL:
        assert len(records(experiment.run(title))) == 3
    assert "[8/8] base-s0.1/edp-sgd/seed-2: done in" in capsys.readouterr().out
    assert experiment.call() == 0
    assert experiment.started() == ALL
    assert "8 of 8 runs are finished" in capsys.readouterr().out


def test_records_alone_are_a_finished_run_wherever_they_lie(experiment):
    """The folder that is shipped or comes from an earlier sitting holds no weights."""
    assert experiment.call() == 0
    assert not list(experiment.output.rglob("*.pt"))
    experiment.output = shutil.move(experiment.output, experiment.folder / "shipped")
    experiment.output = Path(experiment.output)
    assert experiment.call("data.root=/elsewhere") == 0
    assert len(experiment.started()) == len(ALL)


def test_only_the_unfinished_are_continued(experiment):
    assert experiment.call() == 0
    interrupted, missing = ALL[1], ALL[6]
    lines = (experiment.run(interrupted) / "epochs.jsonl").read_text().splitlines(keepends=True)
    (experiment.run(interrupted) / "epochs.jsonl").write_text("".join(lines[:2]))
    (experiment.run(interrupted) / "checkpoint.pt").write_bytes(b"")
    shutil.rmtree(experiment.run(missing))
    assert experiment.call() == 0
    assert experiment.started() == [*ALL, interrupted, missing]
    # A plain call of trainer.py, which itself goes on from the checkpoint.
    assert not {"--overwrite", "--resume"} & set(experiment.commands()[-2])


def test_a_failure_is_told_at_the_end_and_holds_up_no_other(experiment, monkeypatch, capsys):
    monkeypatch.setenv("FAKE_FAIL", "s0.1/sync-sgd")
    assert experiment.call() == 1
    assert experiment.started() == ALL
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 2
    for line, seed in zip(told, (1, 2)):
        assert line.startswith(f"failed: base-s0.1/sync-sgd/seed-{seed}: exit code 3, see ")
        assert "it broke" in Path(line.rpartition("see ")[2]).read_text()
    monkeypatch.delenv("FAKE_FAIL")
    assert experiment.call() == 0
    assert experiment.started()[len(ALL) :] == [ALL[2], ALL[6]]


def test_only(experiment, capsys):
    assert experiment.call("--only", "*/edp-sgd/*", "--only", "*-f0.5/*/seed-2") == 0
    wanted = [title for title in ALL if "edp" in title or title == "base-f0.5/sync-sgd/seed-2"]
    assert experiment.started() == wanted
    assert experiment.call("--only", "nothing*") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--only nothing*" in line and ALL[0] in line


def test_no_further_run_after_max_hours_or_a_stop_file(experiment, capsys):
    assert experiment.call("--max-hours", "0") == 0
    assert experiment.started() == []
    (experiment.output / "stop").touch()
    assert experiment.call() == 0
    assert experiment.started() == [] and not (experiment.output / "stop").exists()
    assert capsys.readouterr().out.count("8 left") == 2
    assert experiment.call("--max-hours", "9") == 0
    assert experiment.started() == ALL


def test_options_of_torchrun_and_keys_are_handed_on(experiment):
    options = {
        option: {"--nproc-per-node": "1", "--nnodes": "2"}.get(option, f"x{place}")
        for place, option in enumerate(TORCHRUN_OPTIONS)
    }
    words = [word for pair in options.items() for word in pair]
    assert experiment.call(*words, "--only", ALL[0], "epochs=2") == 0
    (command,) = experiment.commands()
    assert command[:3] == [sys.executable, "-m", "torch.distributed.run"]
    assert {f"{option}={value}" for option, value in options.items()} <= set(command)
    assert "--standalone" not in command  # these options say how workers meet
    assert experiment.config(ALL[0])["epochs"] == 2
    assert experiment.call("--only", ALL[1], "epochs=2") == 0
    assert experiment.commands()[1][3:5] == ["--standalone", "--nproc-per-node=2"]


def test_an_old_marker_is_no_wish_to_stop(experiment, monkeypatch):
    """The run was asked to stop once; its next start fails before it has looked."""
    monkeypatch.setenv("FAKE_FAIL", ALL[0])
    experiment.run(ALL[0]).mkdir(parents=True)
    (experiment.run(ALL[0]) / "preempted").write_text("{}")
    assert experiment.call() == 1
    assert experiment.started() == ALL


def test_a_run_that_lost_a_worker_keeps_no_other_from_being_made(experiment, capsys):
    assert experiment.call() == 0
    path = experiment.run(ALL[0]) / "epochs.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[-1] = fake_record(lines[-1]["epoch"], 1)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    shutil.rmtree(experiment.run(ALL[1]))
    assert experiment.call("--dry-run") == 0
    assert experiment.call() == 0
    assert experiment.started() == [*ALL, ALL[1]]
    assert f"note: {ALL[0]} does not help to predict" in capsys.readouterr().out


def test_two_sittings_do_not_work_at_one_set(experiment, capsys):
    experiment.output.mkdir()
    code = (
        "import fcntl, sys; file = open(sys.argv[1], 'a'); fcntl.lockf(file, fcntl.LOCK_EX); "
        "print('held', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(experiment.output / ".lock")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as other:
        assert other.stdout.readline() == b"held\n"
        assert experiment.call() == 2
        assert "another reproduce.py" in capsys.readouterr().err and experiment.started() == []
        other.stdin.close()
    assert experiment.call() == 0


def test_a_launcher_that_is_not_there(experiment, capsys):
    line = [str(experiment.folder / "set.yaml"), "--output", str(experiment.output)]
    assert reproduce.main([*line, "--launch-prefix", "/no/such/srun -n 2"]) == 1
    assert "/no/such/srun" in capsys.readouterr().err
    assert reproduce.main([*line, "--launch-prefix", "'srun"]) == 2
    assert "--launch-prefix" in capsys.readouterr().err


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["epochs=4"], ["base-f0.5/sync-sgd/seed-1", "another epochs", "--output"]),
        (["--nproc-per-node", "3"], ["2 workers, not 3"]),
        (["epochs"], ["key=value"]),
        (["epochs=x"], ["epochs must be a whole number"]),
        (["epochs=3", "epochs=3"], ["epochs is given twice"]),
        (["--nproc", "2"], ["--nproc"]),
        (["--max-hours", "x"], ["--max-hours"]),
    ],
)
def test_what_is_wrong_is_said_in_one_line_before_anything_runs(
    experiment, capsys, arguments, words
):
    assert experiment.call("--only", ALL[0]) == 0
    capsys.readouterr()
    assert experiment.call(*arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("reproduce.py: error: ")
    for word in words:
        assert word in line
    assert experiment.started() == [ALL[0]]


def test_a_bad_config_at_the_end_of_the_grid_is_found_at_the_start(experiment, capsys):
    experiment.write({"vary": {"optimizer.lr": [0.1, 0.2, -1]}})
    assert experiment.call() == 2
    assert "optimizer.lr must be a number > 0" in capsys.readouterr().err
    assert experiment.started() == [] and not experiment.output.exists()


@pytest.mark.parametrize("text", ["{", "{}", '[{"workload": {}, "busy_seconds": [1.0]}]'])
def test_a_damaged_calibration_is_refused(experiment, capsys, text):
    experiment.output.mkdir()
    (experiment.output / FILE).write_text(text)
    assert experiment.call() == 2
    assert FILE in capsys.readouterr().err


# --- calibration ----------------------------------------------------------------------------------


def test_all_runs_share_the_seconds_of_one_calibration(experiment, capsys):
    """Also those of a later sitting, on a machine that would now measure something else."""
    assert experiment.call("--only", "*/seed-1") == 0
    (entry,) = json.loads((experiment.output / FILE).read_text())
    assert {"machine", "measured", "versions", "workload"} <= set(entry)
    assert experiment.call() == 0
    assert json.loads((experiment.output / FILE).read_text()) == [entry]
    assert "another machine" not in capsys.readouterr().out
    for title in ALL:
        (rule,) = experiment.config(title)["stragglers"]
        given = json.loads((experiment.run(title) / "provenance.json").read_text())
        if "f0.5" in title:
            assert (rule["fraction"], rule["busy_seconds"]) == (0.5, [entry["busy_seconds"][1]])
            (delay,) = given["calibrated_delays"]
            assert delay["seconds"] == 0.5 * entry["busy_seconds"][1]
        else:
            assert rule == DELAYS["s0.1"][0] | {"first_epoch": 0}
    shutil.rmtree(experiment.run(ALL[1]))
    (experiment.output / FILE).write_text(json.dumps([{**entry, "machine": {"cores": 1}}]))
    assert experiment.call() == 0
    assert "is of another machine; delays stay" in capsys.readouterr().out
    (rule,) = experiment.config(ALL[1])["stragglers"]
    assert rule["busy_seconds"] == [entry["busy_seconds"][1]]
    # Without it, runs of other seconds would be put beside these.
    (experiment.output / FILE).unlink()
    shutil.rmtree(experiment.run(ALL[0]))
    assert experiment.call() == 2
    assert f"{FILE} is missing" in capsys.readouterr().err


def test_runs_without_fractions_need_no_calibration(experiment):
    experiment.write({"delays": {"s0.1": DELAYS["s0.1"]}})
    assert experiment.call() == 0
    assert not (experiment.output / FILE).exists()


def test_what_cannot_be_calibrated_is_not_started_but_all_else_is(experiment, monkeypatch, capsys):
    monkeypatch.setenv("FAKE_FAIL", "calibration")
    assert experiment.call() == 1
    assert experiment.started() == [title for title in ALL if "s0.1" in title]
    errors = capsys.readouterr().err
    assert "calibration failed with exit code 3" in errors
    assert errors.count("not started without its calibration") == 4


def test_runs_that_vary_in_their_speed_get_the_seconds_of_their_config_file(experiment):
    changes = {"delays": {"f0.5": DELAYS["f0.5"]}, "seeds": [1], "algorithms": ["sync-sgd"]}
    experiment.write({**changes, "vary": {"precision": [None, "bf16"]}})
    assert experiment.call() == 0
    (entry,) = json.loads((experiment.output / FILE).read_text())
    runs = [yaml.safe_load(file.read_text()) for file in experiment.output.rglob("config.yaml")]
    assert {run["precision"] for run in runs} == {"fp64", "bf16"}
    for run in runs:
        assert run["stragglers"][0]["busy_seconds"] == [entry["busy_seconds"][1]]


# --- predicted times ------------------------------------------------------------------------------


def test_a_dry_run_lists_runs_with_their_times_and_their_source(experiment, capsys):
    assert experiment.call("--dry-run") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:-1]] == ALL
    assert all("unknown    nothing measured yet" in line for line in lines[1:-1])
    assert lines[-1] == "8 of 8 runs left: unknown"
    assert not experiment.output.exists() and experiment.started() == []

    assert experiment.call("--only", "*-f0.5/sync-sgd/seed-1") == 0
    capsys.readouterr()
    assert experiment.call("--dry-run") == 0
    told = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()[1:-1]}
    assert "finished" in told[ALL[0]]
    assert told["base-f0.5/sync-sgd/seed-2"].endswith("finished runs alike")
    assert told["base-f0.5/edp-sgd/seed-1"].endswith("finished run of this workload")
    assert len(experiment.started()) == 1


# --- figures and report ---------------------------------------------------------------------------


def test_figures_and_report_are_of_all_runs_of_the_set(tmp_path, monkeypatch, capsys):
    experiment = Set(tmp_path)
    runs = read_experiment(tmp_path / "set.yaml", experiment.output)
    assert reproduce.write_report(runs) == []  # nothing recorded yet, and no empty report
    for title in ALL[:3]:
        experiment.run(title).mkdir(parents=True)
        (experiment.run(title) / "epochs.jsonl").touch()
    (experiment.output / "report.html").touch()
    commands = []

    def call(command: list[str], **options: Any) -> subprocess.CompletedProcess:
        commands.append(command)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", call)
    (failed,) = reproduce.write_report(runs)
    assert failed == f"{experiment.output / 'figures'}: it wrote nothing"
    assert capsys.readouterr().out == f"written: {experiment.output / 'report.html'}\n"
    path = ROOT / "results" / "authors" / "authors.json"
    predictions = ["--predictions", str(path)] if path.exists() else []
    folders = [str(experiment.output / f"base-{delay}") for delay in DELAYS]
    assert [command[2:] for command in commands] == [
        ["plots", *folders, "--out", str(experiment.output / "figures")],
        ["plots.report", *folders, "--out", str(experiment.output / "report.html"), *predictions,
         *(f"--missing={title}" for title in ALL)],
    ]


# --- horovodrun -----------------------------------------------------------------------------------


@pytest.fixture
def environment(tmp_path, monkeypatch) -> Path:
    """A Python that has a horovodrun beside it."""
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "horovodrun").touch()
    return tmp_path / "bin"


def config_line(folder: Path, **changes: Any) -> list[str]:
    config = folder / "config.yaml"
    config.write_text(yaml.safe_dump(short_config(**changes)))
    return ["--config", str(config), "--output", "out"]


def test_runs_over_horovod_are_started_by_horovodrun(tmp_path, environment):
    arguments = config_line(tmp_path)
    launched = Launcher(("nice",), ("--nproc-per-node=3",))
    torchrun = ["nice", str(environment / "python"), "-m", "torch.distributed.run"]
    assert launched.command(arguments)[:4] == torchrun
    horovodrun = ["nice", str(environment / "horovodrun"), "-np", "3", str(environment / "python")]
    # One node need not be said, and may be.
    same = Launcher(("nice",), ("--nproc-per-node=3", "--nnodes=1"))
    for over in (["exchange=horovod"], ["--exchange", "horovod"]):
        line = [*arguments, *over]
        assert launched.command(line) == [*horovodrun, str(ROOT / "trainer.py"), *line]
        assert same.command(line) == launched.command(line)


@pytest.mark.parametrize("option", ["--nnodes=2", "--nproc-per-node=gpu"])
def test_what_horovodrun_is_not_told_is_refused(tmp_path, environment, option):
    with pytest.raises(UserError, match=option.partition("=")[0]):
        Launcher((), (option,)).command(config_line(tmp_path, exchange="horovod"))


def test_what_cannot_be_started_does_not_keep_the_others_from_it(experiment, monkeypatch, capsys):
    def missing(self: Launcher) -> list[str]:
        raise UserError("there is no horovodrun")

    monkeypatch.setattr(Launcher, "_horovodrun", missing)
    delays = {"s0.1": DELAYS["s0.1"]}
    experiment.write({"vary": {"exchange": ["horovod", "ddp"]}, "delays": delays, "seeds": [1]})
    assert experiment.call() == 1
    assert len(experiment.started()) == 2
    failed = [line for line in capsys.readouterr().err.splitlines() if line.startswith("failed: ")]
    assert len(failed) == 2 and all("there is no horovodrun" in line for line in failed)


def test_without_horovodrun_one_line_says_how_to_get_it(tmp_path, environment):
    (environment / "horovodrun").unlink()
    with pytest.raises(UserError, match="scripts/install_horovod.sh"):
        Launcher((), ()).command(config_line(tmp_path, exchange="horovod"))


# --- ending ---------------------------------------------------------------------------------------

# A launcher that does not end when it is told to, whose worker has a session of its own.
STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)  # MARK"],
                 start_new_session=True)
time.sleep(100)
"""


def test_a_launcher_that_does_not_end_is_killed_with_its_workers(tmp_path, monkeypatch):
    mark = f"mark-{tmp_path}"
    script = tmp_path / "launcher.py"
    script.write_text(STUBBORN.replace("MARK", mark))
    monkeypatch.setattr(launcher, "GRACE_SECONDS", 0.5)
    monkeypatch.setattr(launcher, "_WATCH_SECONDS", 0.05)
    monkeypatch.setattr(Launcher, "command", lambda self, arguments: [sys.executable, str(script)])

    def watch() -> None:
        if still_running(mark):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Launcher((), ()).run([], tmp_path / "log", watch)
    assert still_running(mark) == [] and still_running(str(script)) == []


# --- for real -------------------------------------------------------------------------------------


def printed(output: Path) -> str:
    """What the runs have said, for a test that has failed."""
    return "\n".join(f"{log}:\n{log.read_text()}" for log in sorted(output.glob("logs/*.log")))


def hear_ctrl_c() -> None:
    """The tests themselves may run where it is ignored, as a shell's background job."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.timeout(400)
def test_ctrl_c_ends_all_processes_and_the_same_command_finishes_the_set(tmp_path, monkeypatch):
    base = short_config(epochs=15, data__train_samples=320, precision="fp32")
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(base))
    grid = {
        "configs": [str(tmp_path / "base.yaml")], "algorithms": ["dp-sgd"],
        "delays": {"half": [{"ranks": [1], "kind": "constant", "fraction": 0.5}]},
    }  # fmt: skip
    document = {"name": "set", "workers": 2, "grids": [grid]}
    (tmp_path / "set.yaml").write_text(yaml.safe_dump(document))
    output = tmp_path / "out"
    command = [sys.executable, str(ROOT / "reproduce.py"), str(tmp_path / "set.yaml")]
    command += ["--output", str(output)]
    process = subprocess.Popen(
        command, cwd=tmp_path, stderr=subprocess.PIPE, text=True, preexec_fn=hear_ctrl_c
    )
    epochs = output / "short-half" / "dp-sgd" / "seed-42" / "epochs.jsonl"
    try:
        deadline = time.monotonic() + 120
        while count_epochs(epochs.parent) == 0 and time.monotonic() < deadline:
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert errors == "reproduce.py: interrupted: the same command goes on from here\n"
    assert still_running(str(output)) == []
    begun = len(records(epochs.parent))
    assert 1 <= begun < 15

    monkeypatch.setattr(reproduce, "write_report", lambda experiment: [])
    code = reproduce.main([str(tmp_path / "set.yaml"), "--output", str(output)])
    assert code == 0, printed(output)
    run = epochs.parent
    assert [record["epoch"] for record in records(run)] == list(range(15))
    assert is_finished(run)
    facts = json.loads((run / "provenance.json").read_text())
    (entry,) = json.loads((output / FILE).read_text())
    assert entry["world_size"] == 2 and entry["steps"] >= 50
    for start in (facts, *facts["continued"]):
        (delay,) = start["calibrated_delays"]
        assert delay["seconds"] == 0.5 * entry["busy_seconds"][1] > 0
    # The config file that is kept makes the same run again.
    file = output / "configs" / "short-half.yaml"
    again = parse(["--config", str(file), "--algorithm", "dp-sgd", "--output", str(output)])
    stored = yaml.safe_load((run / "config.yaml").read_text())
    assert again.config == resolve(from_mapping(stored))


# --- several numbers of workers -------------------------------------------------------------------


def test_grids_of_several_numbers_of_workers_are_launched_and_compared_by_them(experiment, capsys):
    experiment.write(
        {"workers": [1, 2], "delays": {"equal": []}, "algorithms": ["sync-sgd"], "seeds": [1],
         "set": {"batch_size": None, "batch_per_worker": 16}}
    )  # fmt: skip
    assert experiment.call() == 0
    numbers = {
        Path(dict(itertools.pairwise(command))["--config"]).stem: number
        for command in experiment.commands()
        for number in command
        if number.startswith("--nproc-per-node=")
    }
    assert numbers == {
        "base-equal-1w": "--nproc-per-node=1", "base-equal-2w": "--nproc-per-node=2"
    }  # fmt: skip
    runs = read_experiment(experiment.folder / "set.yaml", experiment.output)
    assert write_report(runs) == []
    told = (experiment.output / "scaling" / "scaling.md").read_text()
    assert "| equal | ddp | sync-sgd | 2 | 32 |" in told
    # Done is done, also where the global batch is known only with the workers.
    capsys.readouterr()
    assert experiment.call() == 0
    assert "2 of 2 runs are finished" in capsys.readouterr().out


def test_a_sitting_on_a_given_cluster_makes_the_runs_of_its_size(experiment):
    experiment.write(
        {"workers": [1, 2], "delays": {"equal": []}, "algorithms": ["sync-sgd"], "seeds": [1]}
    )
    assert experiment.call("--nproc-per-node=2") == 0
    assert experiment.started() == ["base-equal-2w/sync-sgd/seed-1"]
    assert experiment.call("--nproc-per-node=3") == 2
