"""What ends a run early: signals, numbers that are not finite, faults, a full disk."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import resource
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from image_tree import write_tree
from processes import run_trainer, values
from test_resume import LENET, READ_AHEAD, RESNET, check_equal
from training import launch, records, run_path, train

from reader import find_runs, has_diverged, read_run

SOON = 40.0  # seconds; what hangs would do so for the 60 of the config's timeout


def at_call(method: str, call: int, rank: str, act: Any) -> None:
    """Lets worker `rank` do `act` before its `call`-th call of a Trainer's method."""
    import trainer

    calls, whole = [0], getattr(trainer.Trainer, method)

    def acting(*arguments: Any, **named: Any) -> Any:
        calls[0] += 1
        if calls[0] == call and os.environ["RANK"] == rank:
            act()
        return whole(*arguments, **named)

    setattr(trainer.Trainer, method, acting)


# --- preemption -------------------------------------------------------------------------------


def signalled(name: str, method: str, call: int, note: str, *argv: str) -> None:
    """The command line, where worker 1 and what serves it get a signal; all look at each step.

    note: a file that is written when the signal is sent.
    """
    import interruption

    interruption.PERIOD = 0.0

    def send() -> None:
        Path(note).touch()
        # Sent by somebody else, as a scheduler does.
        pids = [os.getpid(), *(child.pid for child in multiprocessing.active_children())]
        subprocess.run(["kill", f"-{name[3:]}", *map(str, pids)], check=True)

    at_call(method, call, "1", send)
    run_trainer(*argv)


@pytest.mark.parametrize(
    "name, method, call, size, options",
    [
        # The first step of an epoch, behind the two that rehearse: all stop after its second.
        ("SIGTERM", "_step", 2 + 1, 2, {**LENET, **READ_AHEAD}),
        ("SIGUSR1", "_step", 2 + 3 + 1, 3, {**RESNET, "partition__shares": [1, 2, 3]}),
        ("SIGTERM", "_forward", 2 + 4 + 2, 2, {**LENET, "evaluation_batch_size": 3}),
        ("SIGUSR1", "_evaluate", 2, 2, {**LENET, **READ_AHEAD, "evaluation_batch_size": 4}),
    ],
)  # fmt: skip
def test_all_stop_at_one_step_with_a_checkpoint_and_go_on_from_there(
    tmp_path, name, method, call, size, options
):
    note = tmp_path / "sent"
    before = (name, method, call, str(note))
    outcomes = launch(tmp_path, size, target=signalled, before=before, limit=SOON, **options)
    assert time.time() - note.stat().st_mtime < 20
    assert [outcome.code for outcome in outcomes] == [0] * size, outcomes
    path = run_path(tmp_path)
    marker = json.loads((path / "preempted").read_text())
    assert marker["signal"] == name and f"asked to stop ({name})" in outcomes[0].output
    state = torch.load(path / "checkpoint.pt", weights_only=True)
    place = {"epoch": state["next_epoch"], "step": state["balancer"]["next_step"]}
    assert marker == {"signal": name, **place}
    assert bool(state["trained"]) == (method != "_step")
    assert place["step"] == (2 if method == "_step" else 0)
    assert place["epoch"] < 3 and not (path / "final.pt").exists()
    continued = train(tmp_path, size, **options)
    check_equal(continued, train(tmp_path / "undisturbed", size, **options))
    assert not (path / "preempted").exists()


def asked_while_preparing(name: str, note: str, *argv: str) -> None:
    """The command line, where worker 1 gets a signal as worker 0 has begun to decode."""
    import data.folder

    measure = data.folder.histogram

    def slow(images: Any) -> Any:
        Path(note).touch()
        time.sleep(1)  # of some work that is not broken off
        return measure(images)

    data.folder.histogram = slow
    if os.environ["RANK"] == "1":
        code = f"while [ ! -e {note} ]; do sleep 0.1; done; kill -{name[3:]} {os.getpid()}"
        subprocess.Popen(["sh", "-c", code])
    run_trainer(*argv)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_all_stop_while_data_are_made_ready_and_leave_nothing_half_made(tmp_path, name):
    root = write_tree(tmp_path / "tree", train=3000, test=4, size=(8, 8))
    cache, note = tmp_path / "cache", tmp_path / "note"
    options = {**LENET, "epochs": 1, "data": {
        "name": "image_folder", "root": str(root), "cache": str(cache), "image_size": 32,
        "subset": 64}}  # fmt: skip
    before = (name, str(note))
    outcomes = launch(tmp_path, 2, target=asked_while_preparing, before=before, **options)
    assert [outcome.code for outcome in outcomes] == [0, 0], outcomes
    assert f"asked to stop ({name}) while the data were made ready" in outcomes[0].output
    assert time.time() - note.stat().st_mtime < 20
    assert list(cache.iterdir()) == []
    path = run_path(tmp_path)
    assert json.loads((path / "preempted").read_text()) == {"signal": name}
    assert train(tmp_path, 2, **options).column("epoch") == [0]
    files = {file: file.read_bytes() for file in path.iterdir()}
    assert path / "preempted" not in files
    # A finished run that was to be overwritten stays one.
    shutil.rmtree(cache)
    note.unlink()
    again = launch(
        tmp_path, 2, "--overwrite", target=asked_while_preparing, before=before, **options
    )
    assert [outcome.code for outcome in again] == [0, 0], again
    assert {file: file.read_bytes() for file in path.iterdir()} == files


def test_a_run_that_is_asked_too_late_ends_as_ever(tmp_path):
    """There is nobody left to agree with after the last step of the last epoch."""
    options = {**LENET, "evaluation_batch_size": 500, "epochs": 1}
    before = ("SIGTERM", "_evaluate", 1, str(tmp_path / "sent"))
    outcomes = launch(tmp_path, 2, target=signalled, before=before, **options)
    assert [outcome.code for outcome in outcomes] == [0, 0]
    path = run_path(tmp_path)
    assert (path / "final.pt").exists() != (path / "preempted").exists()


def after_the_end(stopped: str, *argv: str) -> list[int]:
    """The command line, whose worker is asked to stop when it is done; what it leaves running."""
    if stopped:
        import interruption

        interruption.PERIOD = 0.0  # or all steps are done before they look
        at_call("_step", 5, "1", lambda: os.kill(os.getpid(), signal.SIGTERM))
    run_trainer(*argv)
    for number in (signal.SIGTERM, signal.SIGUSR1):
        os.kill(os.getpid(), number)
    return [child.pid for child in multiprocessing.active_children()]


@pytest.mark.parametrize("stopped", ["", "stopped"])
def test_nothing_that_reads_ahead_is_left_and_no_signal_makes_a_failure_of_an_end(
    tmp_path, stopped
):
    options = {**LENET, **READ_AHEAD, "data__loader_workers": 2}
    outcomes = launch(tmp_path, 2, target=after_the_end, before=(stopped,), limit=SOON, **options)
    assert values(outcomes) == [[], []]
    path = run_path(tmp_path)
    assert (path / "preempted").exists() == bool(stopped) != (path / "final.pt").exists()


def deserted(how: str, *argv: str) -> None:
    """The command line, where worker 0 is asked to stop as worker 1 dies or hangs."""
    import interruption

    interruption.PATIENCE = 2.0
    act = {"dies": lambda: os._exit(9), "hangs": lambda: os.kill(os.getpid(), signal.SIGSTOP)}[how]
    at_call("_step", 5, "1", act)
    at_call("_step", 5, "0", lambda: os.kill(os.getpid(), signal.SIGTERM))
    run_trainer(*argv)


@pytest.mark.parametrize("how", ["dies", "hangs"])
def test_a_worker_whose_peers_are_gone_ends_at_once(tmp_path, how):
    begin = time.monotonic()
    left, gone = launch(tmp_path, 2, target=deserted, before=(how,), limit=20.0, **LENET)
    assert left.code == 1 and gone.code in (9, None)
    if how == "hangs":
        assert "ends without a checkpoint" in left.output
    else:
        assert time.monotonic() - begin < SOON
        assert "PeerLostError: rank 0: an exchange with the other workers failed" in left.output
    assert not (run_path(tmp_path) / "preempted").exists()


# --- numbers that are not finite --------------------------------------------------------------


def broken(what: str, rank: str, call: int, *argv: str) -> None:
    """The command line, where a worker's loss, or its gradient alone, is not finite in one step."""
    import trainer

    calls, forward = [0], trainer.Trainer._forward

    def breaking(self: Any, model: Any, images: Any, labels: Any) -> Any:
        outputs, loss = forward(self, model, images, labels)
        calls[0] += self.module.training
        if self.module.training and calls[0] == call and os.environ["RANK"] == rank:
            # The square root of 0 is 0, and its slope is not finite.
            nothing = (0.0 * next(self.module.parameters()).sum()).sqrt()
            loss = loss * math.inf if what == "loss" else loss + nothing
        return outputs, loss

    trainer.Trainer._forward = breaking
    run_trainer(*argv)


@pytest.mark.parametrize("exchange", ["ddp", "flat"])
@pytest.mark.parametrize("what, rank", [("loss", "2"), ("gradient", "1"), ("gradient", "0")])
def test_what_is_not_finite_is_named_by_all_and_never_stored(tmp_path, what, rank, exchange):
    """In epoch 1, step 2."""
    options = {**LENET, "exchange": exchange, "checkpoint__every": 1}
    outcomes = launch(
        tmp_path, 3, target=broken, before=(what, rank, 2 + 4 + 3), limit=SOON, **options
    )
    told = set()
    for worker, outcome in enumerate(outcomes):
        assert outcome.code == 2, outcome.output
        line = outcome.output.splitlines()[-1]
        told.add(line.removeprefix(f"trainer.py: error: rank {worker}: "))
    (message,) = told
    assert "epoch 1, step 2 (both from 0)" in message and f"the {what} of rank {rank}" in message
    path = run_path(tmp_path)
    for file in path.glob("checkpoint*.pt"):
        state = torch.load(file, weights_only=True)
        tensors = [*state["model"].values()]
        tensors += [s["momentum_buffer"] for s in state["optimizer"]["state"].values()]
        assert all(torch.isfinite(tensor).all() for tensor in tensors)
    # Each step is saved, so that the last one is the step before.
    state = torch.load(path / "checkpoint.pt", weights_only=True)
    assert (state["next_epoch"], state["balancer"]["next_step"]) == (1, 2)
    assert [epoch["epoch"] for epoch in records(path)] == [0]
    assert json.loads((path / "diverged").read_text()) == {"epoch": 1, "message": message}
    check_equal(train(tmp_path, 3, **options), train(tmp_path / "undisturbed", 3, **options))


def unlucky_evaluation(*argv: str) -> None:
    import trainer

    forward = trainer.Trainer._forward

    def breaking(self: Any, model: Any, images: Any, labels: Any) -> Any:
        outputs, loss = forward(self, model, images, labels)
        return outputs, loss if self.module.training else loss * math.nan

    trainer.Trainer._forward = breaking
    run_trainer(*argv)


@pytest.mark.parametrize("exchange", ["ddp", "flat"])
def test_the_last_step_s_worker_is_named_before_the_model_that_all_have_in_common(
    tmp_path, exchange
):
    options = {**LENET, "exchange": exchange}
    before = ("loss", "1", 2 + 4 + 4)
    for outcome in launch(tmp_path, 2, target=broken, before=before, limit=SOON, **options):
        assert outcome.code == 2, outcome.output
        assert "not finite in epoch 1, step 3 (both from 0): the loss of rank 1." in outcome.output


def test_a_test_loss_that_is_not_finite_reaches_no_record(tmp_path):
    for outcome in launch(tmp_path, 2, target=unlucky_evaluation, limit=SOON, **LENET):
        assert outcome.code == 2 and "the loss over the test set" in outcome.output
    path = run_path(tmp_path)
    assert records(path) == [] and has_diverged(path)
    assert read_run(path).epochs == [] and find_runs([tmp_path]) == [path]
    train(tmp_path, 2, **LENET)
    assert not has_diverged(path)


# --- faults while rank 0 writes ---------------------------------------------------------------


def fail_writing(method: str, *argv: str) -> None:
    import recorder

    def failing(*arguments: Any) -> Any:
        raise ZeroDivisionError("made for the test")

    setattr(recorder.RunFolder, method, failing)
    run_trainer(*argv)


@pytest.mark.parametrize("method", ["append_epoch", "save_checkpoint", "finish"])
def test_a_fault_of_rank_0_while_it_alone_writes_ends_all(tmp_path, method):
    begin = time.monotonic()
    outcomes = launch(tmp_path, 3, target=fail_writing, before=(method,), limit=SOON, **LENET)
    assert time.monotonic() - begin < SOON
    assert all(outcome.code not in (None, 0) for outcome in outcomes), outcomes
    assert "ZeroDivisionError: made for the test" in outcomes[0].output
    assert "Traceback" in outcomes[0].output


def small_disk(room: int, *argv: str) -> None:
    """The command line, where no file may grow beyond `room` bytes from the second epoch on."""
    limits = (room, resource.getrlimit(resource.RLIMIT_FSIZE)[1])
    at_call("_evaluate", 2, "0", lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limits))
    run_trainer(*argv)


@pytest.mark.parametrize("room, name", [(2000, "epochs.jsonl"), (100_000, "checkpoint.pt")])
def test_a_full_disk_ends_all_with_one_line_and_nothing_is_lost(tmp_path, room, name):
    options = {**LENET, "epochs": 3}
    outcomes = launch(tmp_path, 2, target=small_disk, before=(room,), limit=SOON, **options)
    path = run_path(tmp_path)
    for rank, outcome in enumerate(outcomes):
        assert outcome.code == 2, outcome.output
        line = outcome.output.splitlines()[-1]
        assert line.startswith(f"trainer.py: error: rank {rank}: {path / name} cannot be written")
        assert "Traceback" not in outcome.output
    assert not [file for file in path.iterdir() if file.name.endswith(".tmp")]
    state = torch.load(path / "checkpoint.pt", weights_only=True)
    assert state["next_epoch"] == 1 and records(path)[0]["epoch"] == 0
    check_equal(train(tmp_path, 2, **options), train(tmp_path / "undisturbed", 2, **options))


# --- one folder, two jobs ---------------------------------------------------------------------


def test_a_second_job_in_the_same_folder_is_refused_until_the_first_has_ended(tmp_path):
    from processes import run_workers, values

    assert values(run_workers(tmp_path / "1", 1, hold_folder, str(tmp_path))) == [
        "is being written by another process: wait for it, or stop it"
    ]


def hold_folder(folder: str) -> str:
    """What a second process is told while this one has the folder open."""
    from test_recorder import opened

    from configs.errors import UserError

    path = Path(folder) / "run"
    held = opened(path)
    context = multiprocessing.get_context("fork")
    reader, writer = context.Pipe(duplex=False)

    def second() -> None:
        try:
            opened(path)
        except UserError as error:
            writer.send(str(error).removeprefix(f"{path} "))
        else:
            writer.send("opened")

    process = context.Process(target=second)
    process.start()
    answer = reader.recv()
    process.join()
    held.finish({})
    return answer
