"""``scripts/slurm.sbatch`` with stand-ins for Slurm's commands: stop, requeue, resume; no requeue of a failure."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import ROOT, sampled
from test_multi_node import free_port, last_step, newest_checkpoint, until

from train.checkpoint import verify
from train.figures import read_metrics

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Slurm runs on Linux")
SCRIPT = ROOT / "scripts" / "slurm.sbatch"
SCONTROL = """#!/usr/bin/env bash
case "$1 $2" in
    "show hostnames") echo 127.0.0.1 ;;
    "show job") echo "JobId=$3 JobState=$(cat "$STAND_IN/state") Reason=None" ;;
    "show config") cat "$STAND_IN/config" 2>/dev/null ;;
    requeue*) echo "$2" >>"$STAND_IN/requeued" ;;
esac
"""
SRUN = """#!{python}
import os, pathlib, signal, subprocess, sys
words = sys.argv[1:]
command = words[words.index("bash"):]
tasks = [
    subprocess.Popen(command, env=dict(os.environ, SLURM_NODEID=str(node)), start_new_session=True)
    for node in range(int(os.environ["SLURM_JOB_NUM_NODES"]))
]
def descendants(pid):
    for child in pathlib.Path(f"/proc/{{pid}}/task/{{pid}}/children").read_text().split():
        yield int(child)
        yield from descendants(child)
def hand_on(number, frame):  # to every process of the step, as a cluster does
    for pid in list(descendants(os.getpid())):
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            pass
signal.signal(signal.SIGUSR1, hand_on)
signal.signal(signal.SIGTERM, hand_on)  # when a job is preempted or cancelled, by Slurm itself
pathlib.Path(os.environ["STAND_IN"], "srun.pid").write_text(str(os.getpid()))
sys.exit(max(task.wait() for task in tasks))
"""
STUB = """#!/usr/bin/env bash
{body}
"""


@pytest.fixture
def slurm(tmp_path: Path) -> Callable[..., subprocess.Popen[str]]:
    """Starts the script as a job of two nodes; ``srun`` is the body of a stand-in that trains nothing, or None."""
    folder = tmp_path / "stand-in"
    folder.mkdir()
    (folder / "state").write_text("RUNNING")

    def submit(*arguments: Any, srun: str | None = None, **variables: str) -> subprocess.Popen[str]:
        programs = {"scontrol": SCONTROL, "srun": SRUN.format(python=sys.executable)}
        if srun is not None:
            programs["srun"] = STUB.format(body=srun)
        for name, text in programs.items():
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)
        environment = {
            **os.environ,
            "PATH": f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "STAND_IN": str(folder),
            "OUTPUT_DIR": str(tmp_path / "run"),
            "SLURM_SUBMIT_DIR": str(ROOT),
            "SLURM_JOB_ID": str(free_port() - 20000),  # the script adds 20,000 again
            "SLURM_JOB_NODELIST": "node[1-2]",
            "SLURM_JOB_NUM_NODES": "2",
            "PROCESSES_PER_NODE": "1",
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            **variables,
        }
        with (folder / "log").open("a") as log:
            return subprocess.Popen(
                ["bash", str(SCRIPT), *map(str, arguments)], env=environment, stdout=log, stderr=log, text=True
            )

    return submit


def requeued(tmp_path: Path) -> int:
    path = tmp_path / "stand-in" / "requeued"
    return len(path.read_text().splitlines()) if path.exists() else 0


def test_asks_the_scheduler_for_what_it_needs() -> None:
    text = SCRIPT.read_text()
    options = re.findall(r"^#SBATCH (.*)$", text, re.MULTILINE)
    assert {"--requeue", "--signal=B:USR1@180", "--open-mode=append", "--ntasks-per-node=1"} <= set(options)
    assert text.index("#SBATCH --output") < text.index("\nset ")  # sbatch reads no option after the first command
    assert subprocess.run(["bash", "-n", str(SCRIPT)], check=False).returncode == 0


STOPS = """
trap 'echo "{}" >"$OUTPUT_DIR/stopped.json"; exit 1' USR1
mkdir -p "$OUTPUT_DIR"; touch "$STAND_IN/started"
while true; do sleep 0.1; done
"""


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
@pytest.mark.parametrize(("state", "status", "times"), [("RUNNING", 0, 1), ("CANCELLED", 1, 0)])
def test_stopped_run_is_requeued_once_unless_the_job_was_cancelled(
    slurm: Callable[..., subprocess.Popen[str]], tmp_path: Path, number: int, state: str, status: int, times: int
) -> None:
    (tmp_path / "stand-in" / "state").write_text(state)
    job = slurm(srun=STOPS)
    until((tmp_path / "stand-in" / "started").exists)
    job.send_signal(number)
    assert job.wait(20) == status
    assert requeued(tmp_path) == times


@pytest.mark.parametrize(("srun", "status"), [("exit 1", 1), ("exit 0", 0), ("kill -KILL $$", 137)])
def test_failure_and_success_are_not_requeued_whatever_an_earlier_run_left(
    slurm: Callable[..., subprocess.Popen[str]], tmp_path: Path, srun: str, status: int
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "stopped.json").write_text("{}")
    assert slurm(srun=srun).wait(20) == status
    assert requeued(tmp_path) == 0


@pytest.mark.parametrize(("variables", "seconds"), [({}, 30.0), ({"TQDM_MININTERVAL": "5"}, 5.0)])
def test_the_progress_bar_does_not_fill_the_log(
    slurm: Callable[..., subprocess.Popen[str]], tmp_path: Path, variables: dict[str, str], seconds: float
) -> None:
    shows = f"{sys.executable} -c 'from train.outputs import tqdm; print(\"interval\", tqdm([]).mininterval)'"
    assert slurm(srun=shows, **variables).wait(60) == 0
    assert f"interval {seconds}\n" in (tmp_path / "stand-in" / "log").read_text()


@pytest.mark.parametrize(
    ("config", "seconds"), [("SlurmctldTimeout = 120 sec\nSlurmdTimeout           = 200 sec", 260), ("", 360)]
)
def test_waits_until_slurm_has_noticed_a_lost_node(
    slurm: Callable[..., subprocess.Popen[str]], tmp_path: Path, config: str, seconds: int
) -> None:
    (tmp_path / "stand-in" / "config").write_text(config)
    says = 'echo "$* cores $SRUN_CPUS_PER_TASK" >"$STAND_IN/words"'
    assert slurm(srun=says, SLURM_CPUS_PER_TASK="32").wait(20) == 0
    words = (tmp_path / "stand-in" / "words").read_text()
    assert f" --wait={seconds} " in words and words.endswith("cores 32\n")


@pytest.mark.parametrize(("earlier", "status", "times"), [(4, 0, 1), (7, 1, 0)])
def test_job_that_made_no_step_since_its_last_stop_is_not_requeued_again(
    slurm: Callable[..., subprocess.Popen[str]], tmp_path: Path, earlier: int, status: int, times: int
) -> None:
    """Preparing data that takes longer than the job's time would go in circles."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "stopped.json").write_text(json.dumps({"step": earlier, "signal": "SIGUSR1"}))
    (tmp_path / "stand-in" / "sign").write_text(json.dumps({"step": 7, "signal": "SIGUSR1"}))
    job = slurm(srun=STOPS.replace('echo "{}" >', 'cat "$STAND_IN/sign" >'))
    until((tmp_path / "stand-in" / "started").exists)
    job.send_signal(signal.SIGUSR1)
    assert job.wait(20) == status
    assert requeued(tmp_path) == times
    log = (tmp_path / "stand-in" / "log").read_text()
    assert ("no step since it was last stopped" in log) == (times == 0)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("name", sampled(["SIGUSR1", "SIGTERM"], 2))
def test_job_is_stopped_requeued_resumes_and_finishes(
    slurm: Callable[..., subprocess.Popen[str]], recipe: Path, tmp_path: Path, name: str
) -> None:
    flags, steps, output = ("--config", recipe), 80, tmp_path / "run"
    log = tmp_path / "stand-in" / "log"
    job = slurm(*flags, "--max_steps", steps)
    until(lambda: last_step(output) >= 3, 100)
    job.send_signal(signal.Signals[name])
    if name == "SIGTERM":
        os.kill(int((tmp_path / "stand-in" / "srun.pid").read_text()), signal.SIGTERM)
    assert job.wait(60) == 0, log.read_text()
    assert "SignalException" not in log.read_text()  # of a launcher, which kills its processes after half a minute
    assert requeued(tmp_path) == 1
    checkpoint = newest_checkpoint(output)
    assert verify(checkpoint) is None
    step = int(checkpoint.name[5:])
    assert 3 <= step < steps
    assert re.search(f"stopped by SIG(USR1|TERM) after step {step}", log.read_text())

    job = slurm(*flags, "--max_steps", steps)
    assert job.wait(120) == 0, log.read_text()
    assert requeued(tmp_path) == 1
    assert f"at step {step}" in log.read_text()
    trained = [row["step"] for row in read_metrics(output / "metrics.jsonl") if row["kind"] == "train"]
    assert trained == list(range(1, steps + 1))
    assert not (output / "stopped.json").exists()

    failed = slurm(*flags, "--max_steps", steps, "--seed", 7)  # not the run that the folder holds
    assert failed.wait(60) == 1
    assert requeued(tmp_path) == 1


def test_a_requeued_job_resumes_its_own_checkpoints_although_its_command_starts_from_scratch(
    slurm: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    """However it was stopped; not those of an earlier run, nor in a job that is submitted anew."""
    (tmp_path / "run" / "checkpoints" / "step-00000007").mkdir(parents=True)  # of an earlier run
    writes = 'echo "$*" >"$STAND_IN/words"; mkdir -p "$OUTPUT_DIR/checkpoints/step-$1"; exit 1'

    def words(job: str, step: str) -> list[str]:
        time.sleep(0.01)  # file systems do not count finer
        submitted = slurm("--resume", "never", srun=writes.replace("$1", step), SLURM_JOB_ID=job)
        assert submitted.wait(20) == 1
        said = (tmp_path / "stand-in" / "words").read_text().split()
        return said[said.index("--output_dir") + 2 :]

    first, again = words("7", "00000007"), words("7", "00000009")
    assert (first, again, words("7", "00000010")) == ([], [], ["--resume", "auto"])
    assert words("8", "00000010") == []
