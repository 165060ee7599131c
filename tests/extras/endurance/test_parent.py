"""A training process does not outlive its launcher."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support import ROOT
from test_multi_node import children, is_alive, until

from train.checkpoint import verify
from train.figures import read_metrics

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent died")
FOLLOWS = (
    "from train.extras.endurance.lost_rank import follow_launcher; import time; follow_launcher(); "
    "print('on', flush=True); "
)
LAUNCHED = {"TORCHELASTIC_RUN_ID": "none"}


def python(code: str, **environment: str) -> subprocess.Popen[str]:
    plain = {k: v for k, v in os.environ.items() if k not in ("TORCHELASTIC_RUN_ID", "ACCELERATE_MIXED_PRECISION")}
    return subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, env={**plain, **environment}, stdout=subprocess.PIPE, text=True
    )


def parent_of(code: str, **environment: str) -> tuple[subprocess.Popen[str], int]:
    """A process that starts a second one, which runs ``code``, and the id of the second one once that says so."""
    child = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {code!r}]).wait()"
    process = python(child, **environment)
    assert process.stdout is not None and process.stdout.readline() == "on\n"
    return process, children(process.pid)[0]


@pytest.mark.parametrize("launched", [True, False])
def test_process_of_a_launcher_gets_sigterm_when_that_is_killed_and_others_live_on(launched: bool) -> None:
    parent, child = parent_of(FOLLOWS + "time.sleep(60)", **(LAUNCHED if launched else {}))
    parent.kill()
    parent.wait()
    if launched:
        until(lambda: not is_alive(child), 10)
    else:
        time.sleep(0.5)
        assert is_alive(child)
        os.kill(child, signal.SIGKILL)


def test_stopped_process_wakes_and_ends_when_its_launcher_is_killed() -> None:
    """One that is stopped gets no signal but SIGKILL and SIGCONT."""
    # Naps, not one sleep: the kernel may hand the signal to a thread of torch's, and Python then acts between calls.
    parent, child = parent_of(FOLLOWS + "[time.sleep(0.1) for _ in range(600)]", **LAUNCHED)
    os.kill(child, signal.SIGSTOP)
    until(lambda: state_of(child) == "T", 10)
    parent.kill()
    parent.wait()
    until(lambda: not is_alive(child), 10)


def test_process_that_is_continued_while_its_launcher_lives_goes_on() -> None:
    parent, child = parent_of(FOLLOWS + "time.sleep(60)", **LAUNCHED)
    for number in (signal.SIGSTOP, signal.SIGCONT):
        os.kill(child, number)
    time.sleep(0.5)
    assert is_alive(child)
    parent.kill()
    until(lambda: not is_alive(child), 10)


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_launcher_that_was_gone_before_is_noticed() -> None:
    """The parent dies while the process looks: nothing would tell it later."""
    code = (
        "import os; import train.extras.endurance.lost_rank as p; answers = [4711, 1]; "
        "p.os.getppid = lambda: answers.pop(0); p.follow_launcher(); print('lives')"
    )
    process = python(code, **LAUNCHED)
    out, _ = process.communicate(timeout=30)
    assert (process.returncode, out) == (-signal.SIGTERM, "")


@pytest.mark.parametrize(("first", "lives"), [("/usr/bin/python3\0launch", True), ("/sbin/init\0", False)])
def test_child_of_process_1_is_an_orphan_unless_that_may_be_the_launcher(first: str, lives: bool) -> None:
    code = (
        "import pathlib; import train.extras.endurance.lost_rank as p; p.os.getppid = lambda: 1; "
        f"pathlib.Path.read_bytes = lambda path: {first.encode()!r}; p.follow_launcher(); print('lives')"
    )
    process = python(code, **LAUNCHED)
    process.communicate(timeout=30)
    assert process.returncode == (0 if lives else -signal.SIGTERM)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_run_writes_a_checkpoint_and_ends_when_accelerate_launch_dies(
    recipe: Path, tmp_path: Path, number: signal.Signals
) -> None:
    output, log = tmp_path / "run", tmp_path / "log"
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", "accelerate_configs/cpu.yaml"]
    command += ["train/main.py", "--config", str(recipe), "--output_dir", str(output), "--num_epochs", "10000"]
    with log.open("w") as file:
        launcher = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=file)
    until(lambda: (output / "metrics.jsonl").exists() and read_metrics(output / "metrics.jsonl"))
    [child] = children(launcher.pid)
    launcher.send_signal(number)
    launcher.wait(30)
    until(lambda: not is_alive(child), 30)
    [checkpoint] = (output / "checkpoints").iterdir()
    assert verify(checkpoint) is None
    assert "stopped by SIGTERM" in log.read_text()


@pytest.mark.slow
def test_stopped_rank_its_workers_and_the_others_end_with_a_checkpoint_when_the_launcher_is_killed(
    recipe: Path, tmp_path: Path
) -> None:
    output, log = tmp_path / "run", tmp_path / "log"
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", "accelerate_configs/ddp.yaml"]
    command += ["--num_processes", "2", "train/main.py", "--config", str(recipe), "--output_dir", str(output)]
    command += ["--num_epochs", "10000", "--dataloader_num_workers", "1"]
    with log.open("w") as file:
        launcher = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=file)
    until(lambda: (output / "metrics.jsonl").exists() and read_metrics(output / "metrics.jsonl"))
    ranks = children(launcher.pid)
    workers = [worker for rank in ranks for worker in children(rank)]
    os.kill(ranks[1], signal.SIGSTOP)
    time.sleep(2)
    launcher.kill()
    until(lambda: not any(map(is_alive, [*ranks, *workers])), 45)
    [checkpoint] = (output / "checkpoints").iterdir()
    assert verify(checkpoint) is None
    assert "stopped by SIGTERM" in log.read_text()
