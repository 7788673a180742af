"""What is printed where nobody reads it, or where its letters cannot be shown."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from training import read, short_config

import plots.__main__
from plots.output import Output
from terminal import say

ROOT = Path(__file__).resolve().parent.parent


def unread(*command: str, **environment: str) -> tuple[int, str]:
    """Exit code and errors of `python COMMAND`, whose output nobody reads."""
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(
            [sys.executable, *command], cwd=ROOT, env={**os.environ, **environment}, text=True,
            stdout=writing, stderr=subprocess.PIPE, timeout=120, check=False,
        )  # fmt: skip
    finally:
        os.close(writing)
    return done.returncode, done.stderr


def test_work_goes_on_when_nobody_reads_its_results(tmp_path):
    code = (
        "import sys; from terminal import say\n"
        "for _ in range(100): say('x' * 1000)\n"
        "open(sys.argv[1], 'w').write('done')"
    )
    assert unread("-c", code, str(tmp_path / "file")) == (0, "")
    assert (tmp_path / "file").read_text() == "done"


def test_help_that_nobody_reads():
    code = "import sys; from configs.command_line import parse; parse(sys.argv[1:])"
    assert unread("-c", code, "--help") == (0, "")


def test_a_closed_output_is_no_fault():
    line = f"exec {sys.executable} -c 'from terminal import say; say(str(1))' >&-"
    done = subprocess.run(
        ["bash", "-c", line], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_run_goes_on_when_nobody_reads_its_console(tmp_path):
    config = tmp_path / "short.yaml"
    config.write_text(yaml.safe_dump(short_config(epochs=2)))
    code, errors = unread(
        "trainer.py",
        "--config",
        str(config),
        "--output",
        str(tmp_path / "runs"),
        OMP_NUM_THREADS="1",
    )
    assert code == 0 and "Traceback" not in errors, errors
    assert read(tmp_path).column("epoch") == [0, 1]


@pytest.mark.parametrize(
    "encoding, shown",
    [("ascii", "1.3? ? 0.1"), ("latin-1", "1.3\xd7 \xb1 0.1"), ("utf-8", "1.3\xd7 \xb1 0.1")],
)
def test_letters_that_cannot_be_shown_are_replaced(monkeypatch, encoding, shown):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding=encoding))
    say("1.3\xd7 \xb1 0.1")
    assert raw.getvalue().decode(encoding) == f"{shown}\n"


def test_plots_on_an_ascii_terminal(tmp_path, monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    monkeypatch.setattr(
        plots.__main__, "write_output", lambda runs, out: Output((), "speed-up 1.30\xd7", ())
    )
    assert plots.__main__.main([str(tmp_path), "--out", str(tmp_path)]) == 0
    assert b"speed-up 1.30?" in raw.getvalue()
