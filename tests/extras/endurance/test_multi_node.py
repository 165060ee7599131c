"""Two hosts on loopback, each a launcher with one process: the same run, and what happens when one is lost."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file
from support import EVERY_CASE, ROOT, checkpoint_digests, sampled

from train.checkpoint import verify
from train.figures import read_metrics
from train.records import EXIT_DONE, EXIT_ERROR

pytestmark = [pytest.mark.distributed, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]
CABLE = "cable"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


class Host:
    """A launcher with its processes, as one host of a run has them."""

    def __init__(self, log: Path, command: list[Any], namespace: str | None = None) -> None:
        self.log = log
        within = ["ip", "netns", "exec", namespace] if namespace else []
        environment = {**ENVIRONMENT, **({"GLOO_SOCKET_IFNAME": CABLE} if namespace else {})}
        with log.open("w") as file:
            self.launcher = subprocess.Popen(
                [*within, sys.executable, "-m", *map(str, command)],
                cwd=ROOT,
                env=environment,
                stdout=file,
                stderr=file,
            )

    @property
    def text(self) -> str:
        return self.log.read_text()

    def workers(self) -> list[int]:
        """Process ids of the training processes."""
        return [pid for pid in children(self.launcher.pid) if is_alive(pid)]

    def signal(self, number: int) -> None:
        """Sends a signal to everything of this host at once."""
        pids = [self.launcher.pid, *self.workers()]
        for pid in pids:  # none may act on the end of another
            os.kill(pid, signal.SIGSTOP)
        for pid in pids:
            os.kill(pid, number)

    def wait(self, seconds: float = 60) -> int:
        return self.launcher.wait(seconds)


def children(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in found.read_text().split()] if found.exists() else []


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that only waits to be reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def until(condition: Callable[[], Any], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.1)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Callable[..., list[Host]]]:
    """Starts two hosts, by ``accelerate launch`` with a multi-node file or by torchrun with a c10d rendezvous."""
    started: list[Host] = []

    def start(
        *arguments: Any, launcher: str = "ddp_multi_node", address: str = "127.0.0.1", namespaces: Any = (None, None)
    ) -> list[Host]:
        port, pair = free_port(), []
        for rank in (1, 0):  # the one that waits for the other first
            if launcher != "torchrun":
                file = f"accelerate_configs/{launcher}.yaml"
                command = ["accelerate.commands.launch", "--config_file", file, "--num_machines", 2]
                command += ["--num_processes", 2, "--machine_rank", rank, "--mixed_precision", "no"]
                command += ["--main_process_ip", address, "--main_process_port", port]
            else:
                command = ["torch.distributed.run", "--nnodes", 2, "--nproc_per_node", 1, "--rdzv_backend", "c10d"]
                command += ["--rdzv_endpoint", f"127.0.0.1:{port}"]
            log = tmp_path / f"host-{len(started)}.log"
            pair.insert(0, Host(log, [*command, "train/main.py", *arguments], namespaces[rank]))
            started.append(pair[0])
        return pair

    yield start
    for host in started:
        for pid in [host.launcher.pid, *host.workers()]:
            if is_alive(pid):
                os.kill(pid, signal.SIGKILL)
        host.wait()


def rank_zero_first(pair: list[Host]) -> list[Host]:
    """With c10d the hosts are numbered as they come; rank 0 is the one that speaks."""
    return sorted(pair, key=lambda host: "device: " not in host.text)


def last_step(output: Path) -> int:
    metrics = output / "metrics.jsonl"
    return max((row["step"] for row in read_metrics(metrics)), default=0) if metrics.exists() else 0


def newest_checkpoint(output: Path) -> Path:
    return max((output / "checkpoints").glob("step-*"))


@pytest.mark.parametrize("name", ["ddp_multi_node", "fsdp2_multi_node"])
def test_file_says_eight_processes_for_each_host_and_how_to_start_it(name: str) -> None:
    text = (ROOT / "accelerate_configs" / f"{name}.yaml").read_text()
    values = yaml.safe_load(text)
    assert values["num_processes"] == 8 * values["num_machines"] == 16
    assert f"--config_file accelerate_configs/{name}.yaml --main_process_ip host0 --machine_rank 0" in text
    one_host = yaml.safe_load((ROOT / "accelerate_configs" / f"{name.removesuffix('_multi_node')}.yaml").read_text())
    several = {"num_machines", "num_processes", "main_process_ip", "main_process_port", "same_network"}
    assert {k: v for k, v in values.items() if k not in several} == {
        k: v for k, v in one_host.items() if k not in several
    }


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["fsdp2_multi_node", *["ddp_multi_node"] * EVERY_CASE])
def test_two_hosts_make_the_run_of_one_process(
    hosts: Callable[..., list[Host]], recipe: Path, tmp_path: Path, launcher: str
) -> None:
    recipe.write_text(recipe.read_text().replace("_pdrop: 0.1", "_pdrop: 0.0"))  # each rank draws its own dropout
    flags = ("--config", recipe, "--eval_every_steps", 2, "--eval_batch_size", 3)
    pair = hosts(*flags, "--output_dir", tmp_path / "two", launcher=launcher)
    assert [host.wait() for host in pair] == [EXIT_DONE, EXIT_DONE], pair[0].text + pair[1].text
    engine = launcher.removesuffix("_multi_node")
    assert re.search(f"device: 2 × CPU.*{engine}", pair[0].text)  # accelerate numbers the hosts by machine_rank
    assert "2 accumulated × 2 processes = 8 per step" in pair[0].text
    assert "device: " not in pair[1].text
    one = [sys.executable, "train/main.py", *map(str, flags), "--output_dir", str(tmp_path / "one")]
    subprocess.run(one, cwd=ROOT, env=ENVIRONMENT, check=True, capture_output=True, timeout=120)
    weights = [load_file(tmp_path / name / "final" / "model.safetensors") for name in ("one", "two")]
    assert max((weights[0][k] - weights[1][k]).abs().max().item() for k in weights[0]) < 2e-4  # Adam magnifies rounding
    rows = [read_metrics(tmp_path / name / "metrics.jsonl") for name in ("one", "two")]
    for left, right in zip(*rows, strict=True):
        assert (left["kind"], left["step"]) == (right["kind"], right["step"])
        assert left["loss"] == pytest.approx(right["loss"], rel=1e-4)
        assert left.get("learning_rate") == right.get("learning_rate")
        assert left.get("tokens_seen") == right.get("tokens_seen")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "lost"),
    [("torchrun", 0), *([("fsdp2_multi_node", 1), ("torchrun", 1), ("ddp_multi_node", 0)] * EVERY_CASE)],
)
def test_lost_host_is_named_and_both_started_again_resume_exactly(
    hosts: Callable[..., list[Host]], recipe: Path, tmp_path: Path, launcher: str, lost: int
) -> None:
    flags = ("--config", recipe, "--lr_scheduler", "constant", "--save_every_steps", 1, "--output_dir")
    pieces, whole = tmp_path / "pieces", tmp_path / "whole"
    pair = hosts(*flags, pieces, "--num_epochs", 10000, launcher=launcher)
    until(lambda: last_step(pieces) >= 4)
    pair = rank_zero_first(pair)
    survivor, [worker] = pair[1 - lost], pair[1 - lost].workers()
    pair[lost].signal(signal.SIGKILL)
    began = time.monotonic()
    assert survivor.wait() == EXIT_ERROR
    assert time.monotonic() - began < 30
    assert not is_alive(worker)
    [message] = [line for line in survivor.text.splitlines() if line.startswith("error")]
    step = int(newest_checkpoint(pieces).name[5:])
    assert f"rank {lost} " in message and "is lost" in message
    assert message.endswith(f"Run the same command again to resume from step {step}.")
    assert str(ROOT / "train") not in survivor.text  # the only traceback is the launcher's own

    pair = hosts(*flags, pieces, "--max_steps", step + 3, launcher=launcher)
    assert [host.wait() for host in pair] == [EXIT_DONE, EXIT_DONE], pair[0].text + pair[1].text
    assert f"at step {step}" in rank_zero_first(pair)[0].text
    pair = hosts(*flags, whole, "--max_steps", step + 3, launcher=launcher)
    assert [host.wait() for host in pair] == [EXIT_DONE, EXIT_DONE], pair[0].text + pair[1].text
    assert checkpoint_digests(whole, step + 3) == checkpoint_digests(pieces, step + 3)


@pytest.mark.slow
def test_host_that_stops_answering_ends_the_other_in_time(
    hosts: Callable[..., list[Host]], recipe: Path, tmp_path: Path
) -> None:
    output, timeout_seconds = tmp_path / "run", 6
    flags = ("--config", recipe, "--output_dir", output, "--num_epochs", 10000, "--save_every_steps", 1)
    first, second = hosts(*flags, "--distributed_timeout_seconds", timeout_seconds)
    until(lambda: last_step(output) >= 2)
    second.signal(signal.SIGSTOP)
    began = time.monotonic()
    assert first.wait() == EXIT_ERROR
    assert timeout_seconds - 2 < time.monotonic() - began < 40
    [message] = [line for line in first.text.splitlines() if line.startswith("error")]
    assert message.startswith("error: rank 1 (host ") and "is lost" in message
    assert verify(newest_checkpoint(output)) is None


def ip(*words: object) -> None:
    """Of iproute2; raises where this process may not change networks."""
    subprocess.run(["ip", *map(str, words)], check=True, capture_output=True)


@pytest.fixture
def network() -> Iterator[list[str]]:
    """Two namespaces, each with the network of a host of its own, 10.77.0.1 and 10.77.0.2, and a cable between."""
    names = [f"host-{os.getpid()}-{rank}" for rank in range(2)]
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", CABLE, "netns", names[0], "type", "veth", "peer", "name", CABLE, "netns", names[1])
        for rank, name in enumerate(names):
            ip("-n", name, "address", "add", f"10.77.0.{rank + 1}/24", "dev", CABLE)
            for device in (CABLE, "lo"):
                ip("-n", name, "link", "set", device, "up")
        yield names
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs iproute2 and the right to make networks")
    finally:
        with contextlib.suppress(OSError):
            for name in names:
                subprocess.run(["ip", "netns", "delete", name], capture_output=True)


@pytest.mark.slow
@pytest.mark.parametrize("mended", sampled([False, True], 2), ids=lambda mended: "mended" if mended else "for good")
def test_cable_between_two_hosts_is_cut(
    hosts: Callable[..., list[Host]], network: list[str], recipe: Path, tmp_path: Path, mended: bool
) -> None:
    """Nothing tells either host: no connection is closed, what is sent is lost."""
    output, timeout_seconds = tmp_path / "run", 30 if mended else 8
    flags = ("--config", recipe, "--output_dir", output, "--num_epochs", 10000, "--save_every_steps", 1)
    pair = hosts(
        *flags, "--distributed_timeout_seconds", timeout_seconds, address="10.77.0.1", namespaces=tuple(network)
    )
    until(lambda: last_step(output) >= 2)
    ip("-n", network[1], "link", "set", CABLE, "down")
    time.sleep(1)
    step = last_step(output)
    if mended:
        time.sleep(5)
        assert last_step(output) == step
        ip("-n", network[1], "link", "set", CABLE, "up")
        until(lambda: last_step(output) >= step + 10)
        return
    began = time.monotonic()
    assert [host.wait(90) for host in pair] == [EXIT_ERROR, EXIT_ERROR]
    assert time.monotonic() - began < 60
    lost = [[line for line in host.text.splitlines() if line.startswith("error")] for host in pair]
    assert [len(lines) for lines in lost] == [1, 1]
    assert lost[0][0].startswith("error: rank 1 (host ") and "is lost" in lost[0][0]
    assert lost[1][0].startswith("error (rank 1): rank 0 is lost: the launcher of its host, 10.77.0.1")
    assert verify(newest_checkpoint(output)) is None


@pytest.mark.slow
@pytest.mark.parametrize("shared", sampled([False, True], 2))
def test_hosts_that_do_not_share_the_output_folder_are_told_before_anything_is_trained(
    recipe: Path, tmp_path: Path, shared: bool
) -> None:
    port, ranks = free_port(), []
    for rank in range(2):
        host = tmp_path / f"host{0 if shared else rank}"
        host.mkdir(exist_ok=True)
        meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "RANK": str(rank)}
        environment = {**os.environ, **meet, "LOCAL_RANK": "0", "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
        words = [sys.executable, str(ROOT / "train" / "main.py"), "--config", str(recipe), "--output_dir", "runs/one"]
        with (tmp_path / f"log{rank}").open("w") as log:
            options: Any = {"cwd": host, "env": environment, "stdout": log, "stderr": log}
            ranks.append(subprocess.Popen(words, **options))
    statuses = [rank.wait(120) for rank in ranks]
    said = "".join((tmp_path / f"log{rank}").read_text() for rank in range(2))
    assert statuses == ([EXIT_DONE] * 2 if shared else [EXIT_ERROR] * 2), said
    assert ("is not the folder of process " in said) is not shared
    assert "Traceback" not in said


SLOW_ON_RANK_0 = """
import os, pathlib, time
import datasets


def documents(config):
    rank = os.environ["RANK"]
    pathlib.Path(config.output.output_dir, f"reads-{rank}").touch()
    time.sleep(100 if rank == "0" else 0)
    return datasets.Dataset.from_list([{"text": "some text " * 50}] * 8)
"""


@pytest.mark.slow
def test_host_that_waits_for_the_data_of_another_ends_when_both_are_stopped(
    hosts: Callable[..., list[Host]], recipe: Path, tmp_path: Path
) -> None:
    """The store is gone with the launcher of rank 0, which ends at once."""
    (tmp_path / "slow_data.py").write_text(SLOW_ON_RANK_0)
    output = tmp_path / "run"
    pair = rank_zero_first(
        hosts("--config", recipe, "--dataset", f"{tmp_path}/slow_data.py:documents", "--output_dir", output)
    )
    until(lambda: all((output / f"reads-{rank}").exists() for rank in range(2)), 100)
    time.sleep(5)  # by then rank 1 waits for rank 0
    for host in pair:
        for pid in host.workers():
            os.kill(pid, signal.SIGTERM)
    assert [host.wait(40) for host in pair] == [1, 1]  # launchers make 1 of every status but 0
    assert "while the data was prepared" in pair[0].text
    assert "lost" not in "".join(host.text for host in pair)


LATE_AT_A_RESTART = """
import os, time
if os.environ.get("RANK") == "0" and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
    time.sleep(4)
"""


@pytest.mark.slow
def test_a_launcher_that_may_start_its_processes_again_needs_one_start_for_each_loss(
    recipe: Path, tmp_path: Path
) -> None:
    """torch keeps the store: a rank that is there before rank 0 would find the address that rank 0 had before."""
    (tmp_path / "sitecustomize.py").write_text(LATE_AT_A_RESTART)
    output, log, lost = tmp_path / "run", tmp_path / "log", []
    words = ["--config_file", "accelerate_configs/ddp.yaml", "--num_processes", 2, "--main_process_port", 0]
    words += ["--max_restarts", 2, "train/main.py", "--config", recipe, "--output_dir", output]
    command = [sys.executable, "-m", "accelerate.commands.launch", *words, "--max_steps", 60, "--save_every_steps", 5]
    environment = {**ENVIRONMENT, "PYTHONPATH": str(tmp_path)}
    with log.open("w") as file:
        launcher = subprocess.Popen(list(map(str, command)), cwd=ROOT, env=environment, stdout=file, stderr=file)
    for step in (5, 25):
        until(lambda step=step: last_step(output) > step + 5, 100)
        lost += children(launcher.pid)[-1:]
        os.kill(lost[-1], signal.SIGKILL)
    assert launcher.wait(150) == EXIT_DONE, log.read_text()
    assert re.findall(r"is lost: killed", log.read_text()) == ["is lost: killed"] * 2
    assert re.findall(r"resumed from .* at step (\d+)", log.read_text()) != []
    assert "Traceback" not in log.read_text()
    trained = [row["step"] for row in read_metrics(output / "metrics.jsonl") if row["kind"] == "train"]
    assert trained == sorted(set(trained)) and trained[-1] == 60
