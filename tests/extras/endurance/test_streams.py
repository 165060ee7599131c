"""A run outlives whoever reads its output."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support import ROOT

from train import checkpoint
from train.records import EXIT_STOPPED

pty = pytest.importorskip("pty")  # which Windows lacks


@pytest.mark.slow
def test_a_reader_of_both_streams_that_ends_does_not_end_the_run(recipe: Path, tmp_path: Path) -> None:
    words = [
        sys.executable,
        str(ROOT / "train/main.py"),
        "--config",
        str(recipe),
        "--output_dir",
        str(tmp_path / "run"),
    ]
    run = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert run.stdout is not None and b"device: " in run.stdout.readline()
    run.stdout.close()
    assert run.wait(timeout=120) == 0 and (tmp_path / "run/summary.json").exists()


@pytest.mark.slow
def test_a_terminal_that_is_closed_stops_the_run_with_a_checkpoint(recipe: Path, tmp_path: Path) -> None:
    words = ["--config", str(recipe), "--output_dir", str(tmp_path / "run"), "--num_epochs", "9999"]
    process, terminal = pty.fork()
    if process == 0:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests themselves may run under nohup
        os.execv(sys.executable, [sys.executable, str(ROOT / "train/main.py"), *words])
    shown = b""
    while not re.search(rb" [1-9]\d*/\d+ \[[^]]*step", shown):  # the bar of the steps, after one or more
        shown += os.read(terminal, 65536)
    os.close(terminal)  # and so the system sends SIGHUP, and refuses further lines
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == EXIT_STOPPED
    assert checkpoint.newest_good(tmp_path / "run/checkpoints")[0] is not None


@pytest.mark.slow
def test_what_is_said_to_a_closed_stream_goes_into_no_file(recipe: Path, tmp_path: Path) -> None:
    words = f"'{sys.executable}' '{ROOT}/train/main.py' --config '{recipe}' --output_dir '{tmp_path}/run' --max_steps 2"
    done = subprocess.run(["sh", "-c", f"{words} --num_epochs None >&-"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"process \d+ on \S+\n?", (tmp_path / "run/.lock").read_text())
