"""A training process does not outlive its launcher."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from packaging.version import Version
from support import ACCELERATE_LAUNCH, ROOT
from test_multi_node import children, is_alive, until

from train.checkpoint import verify
from train.figures import read_metrics
from train.records import EXIT_STOPPED

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent died")
FOLLOWS = (
    "from train.extras.endurance.lost_rank import follow_launcher; import time; follow_launcher(); "
    "print('on', flush=True); "
)
NAMESPACE = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
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


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_run_writes_a_checkpoint_and_ends_when_accelerate_launch_dies(
    recipe: Path, tmp_path: Path, number: signal.Signals
) -> None:
    """After a long step, too: accelerate 1.16 kills what has not ended 5 s later."""
    output, log = tmp_path / "run", tmp_path / "log"
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", "accelerate_configs/cpu.yaml"]
    command += ["train/main.py", "--config", str(recipe), "--output_dir", str(output), "--num_epochs", "10000"]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # where tests run in the background it is ignored
    with log.open("w") as file:
        launcher = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=file)
    signal.signal(signal.SIGINT, before)
    until(lambda: (output / "metrics.jsonl").exists() and read_metrics(output / "metrics.jsonl"))
    [child] = children(launcher.pid)
    os.kill(child, signal.SIGSTOP)  # a step that takes seven seconds
    launcher.send_signal(number)
    time.sleep(7)
    os.kill(child, signal.SIGCONT)
    launcher.wait(30)
    until(lambda: not is_alive(child), 30)
    [checkpoint] = (output / "checkpoints").iterdir()
    assert verify(checkpoint) is None
    assert "stopped by SIGTERM" in log.read_text()


def can_be_first() -> bool:
    """Whether a command can be the first process of a namespace, as that of a container is."""
    return subprocess.run([*NAMESPACE, "true"], capture_output=True).returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("has_launcher", [False, True])
def test_first_process_of_a_container_gets_sigterm_without_a_launcher(
    recipe: Path, tmp_path: Path, has_launcher: bool
) -> None:
    if not can_be_first():
        pytest.skip("needs the right to make namespaces")
    output, log = tmp_path / "run", tmp_path / "log"
    launch = ["-m", "accelerate.commands.launch", "--config_file", "accelerate_configs/cpu.yaml"] * has_launcher
    command = [*NAMESPACE, sys.executable, *launch, "train/main.py", "--config", str(recipe)]
    with log.open("w") as file:
        outside = subprocess.Popen(
            [*command, "--output_dir", str(output), "--num_epochs", "10000"], cwd=ROOT, stdout=file, stderr=file
        )
    until(lambda: (output / "metrics.jsonl").exists() and read_metrics(output / "metrics.jsonl"))
    [first] = children(outside.pid)
    os.kill(first, signal.SIGTERM)
    if has_launcher:
        time.sleep(5)
        assert is_alive(first)
        outside.kill()  # and all that is in the namespace
        outside.wait()
        assert list((output / "checkpoints").iterdir()) == []
    else:
        assert outside.wait(60) == EXIT_STOPPED
        [checkpoint] = (output / "checkpoints").iterdir()
        assert verify(checkpoint) is None
    note = "signals: accelerate launch is the first process of its container, which SIGTERM does not reach"
    assert (note in log.read_text()) is has_launcher


@pytest.mark.slow
@pytest.mark.skipif(Version(torch.__version__) < Version("2.13"), reason="does not read the variable")
@pytest.mark.parametrize("seconds", [1, 60])
def test_launcher_of_several_processes_waits_for_them_as_long_as_it_is_told(tmp_path: Path, seconds: int) -> None:
    """With ``TORCH_ELASTIC_SHUTDOWN_TIMEOUT``, as docs/reliability.md says; by default that is half a minute."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, signal, sys, time\n"
        "from pathlib import Path\n"
        "asked = []\n"
        "signal.signal(signal.SIGTERM, lambda *_: asked.append(1))\n"
        "own = Path(sys.argv[1]) / os.environ['RANK']\n"
        "own.mkdir()\n"
        "while not asked:\n"
        "    time.sleep(0.1)\n"
        "time.sleep(4)\n"
        "(own / 'saved').touch()\n"
    )
    command = [*ACCELERATE_LAUNCH, "--config_file", "accelerate_configs/ddp.yaml", "--num_processes", "2"]
    launcher = subprocess.Popen(
        [str(part) for part in (*command, script, tmp_path)],
        cwd=ROOT,
        env={**os.environ, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(seconds)},
    )
    until(lambda: (tmp_path / "0").exists() and (tmp_path / "1").exists())
    launcher.send_signal(signal.SIGTERM)
    launcher.wait(60)
    assert [(tmp_path / rank / "saved").exists() for rank in "01"] == [seconds == 60] * 2


def test_processes_that_a_run_forks_are_killed_with_it() -> None:
    """Such as those of 🤗 Datasets, which would wait for work for ever."""
    parent = python(
        "import multiprocess, os, threading, time\n"
        "from train.extras.endurance.lost_rank import take_forks_along\n"
        "seconds = 0\n"
        "os.register_at_fork(after_in_child=lambda: time.sleep(seconds))\n"
        "take_forks_along()\n"
        "pool = multiprocess.get_context('fork').Pool(2)\n"
        "def fork():\n"
        "    global child\n"
        "    child = multiprocess.get_context('fork').Process(target=time.sleep, args=(1,))\n"
        "    child.start()\n"
        "thread = threading.Thread(target=fork)\n"
        "thread.start()\n"
        "thread.join()\n"
        "child.join()\n"
        "assert child.exitcode == 0  # it outlives the thread that forked it\n"
        "seconds = 2  # longer than its parent lives\n"
        "multiprocess.get_context('fork').Process(target=time.sleep, args=(60,)).start()  # hears of nothing else\n"
        "print('on', flush=True)\n"
        "time.sleep(60)\n"
    )
    assert parent.stdout is not None and parent.stdout.readline() == "on\n"
    forked = children(parent.pid)
    assert len(forked) == 3
    parent.kill()
    parent.wait()
    until(lambda: not any(map(is_alive, forked)), 10)
