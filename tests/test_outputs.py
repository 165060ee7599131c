"""What a run leaves in its folder is whole, is this run's alone, and is made again where it is not."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file
from support import ROOT, run_for, write_recipe

from train import checkpoint
from train.config import Config
from train.extras.endurance.lock import WITHOUT, lock
from train.extras.endurance.outputs import DurableOutputs
from train.extras.report import PROJECT
from train.figures import read_metrics
from train.main import main
from train.outputs import Outputs
from train.records import EXIT_DONE, EXIT_ERROR, EXIT_USAGE, Progress, UserError

FLAGS = ("--max_steps", "4", "--eval_every_steps", "2", "--predict_memory", "False", "--rehearse", "False")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run."""
    folder = tmp_path_factory.mktemp("whole")
    assert train(folder) == EXIT_DONE
    return folder


def train(folder: Path, *flags: str) -> int:
    return main(["--config", str(write_recipe(folder)), "--output_dir", str(folder / "run"), *FLAGS, *flags])


def again(whole: Path, tmp_path: Path) -> Path:
    """A copy of the finished run, which may be damaged."""
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    return tmp_path / "run"


def zero(path: Path) -> None:
    save_file({name: torch.zeros_like(tensor) for name, tensor in load_file(path).items()}, path)


DAMAGES: dict[str, Any] = {
    "a weight is zero": lambda final: zero(final / "model.safetensors"),
    "a file is empty": lambda final: (final / "tokenizer.json").write_text(""),
    "a file is gone": lambda final: (final / "config.json").unlink(),
    "it is gone": shutil.rmtree,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_final_is_written_again(
    whole: Path, tmp_path: Path, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = again(whole, tmp_path)
    DAMAGES[damage](run / "final")
    assert train(tmp_path) == EXIT_DONE
    said = capsys.readouterr().out
    assert "final/ is written again" in said and "no new steps" in said
    before, after = (json.loads((folder / "run" / "summary.json").read_text()) for folder in (whole, tmp_path))
    assert before["final_files"] == after["final_files"]
    assert train(tmp_path) == EXIT_DONE
    assert "nothing to do" in capsys.readouterr().out


def test_a_final_with_the_digests_of_earlier_versions_is_whole(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = again(whole, tmp_path)
    summary = json.loads((run / "summary.json").read_text())
    for name in summary["final_files"]:
        summary["final_files"][name] = hashlib.sha256((run / "final" / name).read_bytes()).hexdigest()
    (run / "summary.json").write_text(json.dumps(summary))
    assert train(tmp_path) == EXIT_DONE
    assert "nothing to do" in capsys.readouterr().out
    DAMAGES[next(iter(DAMAGES))](run / "final")
    assert train(tmp_path) == EXIT_DONE
    assert "final/ is written again" in capsys.readouterr().out


def test_a_damaged_adapter_is_written_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It lies in a folder of its own in final/."""
    pytest.importorskip("peft")
    assert train(tmp_path, "--adapter", "lora") == EXIT_DONE
    weights = tmp_path / "run" / "final" / "adapter" / "adapter_model.safetensors"
    kept = checkpoint.digest(weights)
    zero(weights)
    assert train(tmp_path, "--adapter", "lora") == EXIT_DONE
    assert "final/ is written again" in capsys.readouterr().out
    assert checkpoint.digest(weights) == kept


def test_final_is_there_whole_or_not_at_all(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokenizer is what is written last."""
    run = again(whole, tmp_path)
    kept = checkpoint.digest(run / "final" / "model.safetensors")
    monkeypatch.setattr("transformers.PreTrainedTokenizerBase.save_pretrained", cannot)
    with pytest.raises(RuntimeError, match="cannot"):
        train(tmp_path, "--max_steps", "5", "--learning_rate", "0.01")
    assert not (run / "final").exists() or checkpoint.digest(run / "final" / "model.safetensors") == kept
    monkeypatch.undo()
    assert train(tmp_path, "--max_steps", "5", "--learning_rate", "0.01") == EXIT_DONE
    assert sorted(path.name for path in run.iterdir() if path.name.startswith(checkpoint.PARTIAL)) == []
    modes = {path.name: path.stat().st_mode for path in (run / "final").iterdir()}
    assert set(modes.values()) == {(run / "config.yaml").stat().st_mode}, modes


def cannot(*args: Any, **kwargs: Any) -> None:
    raise RuntimeError("cannot")


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("train.loop.evaluate", None),
        ("train.extras.report.page.page", "the work after the last step has failed"),
        ("train.outputs.Outputs.write_final", "the work after the last step has failed"),
    ],
)
def test_what_fails_after_the_last_step_costs_nothing_but_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], what: str, said: str | None
) -> None:
    """Its checkpoint is on the disk by then; the same command makes no step."""
    once = ("--max_steps", "1", "--eval_every_steps", "100")
    monkeypatch.setattr(what, cannot)
    with pytest.raises(RuntimeError, match="cannot"):
        train(tmp_path, *once)
    if said:
        assert f"error: {said}" in (shown := capsys.readouterr().err) and "the same command makes what" in shown
    assert list(checkpoint.by_step(tmp_path / "run" / "checkpoints")) == [1]
    monkeypatch.undo()
    monkeypatch.setattr("train.step.Engine.step", cannot)
    assert train(tmp_path, *once) == EXIT_DONE
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [(row["kind"], row["step"]) for row in rows] == [("train", 1), ("evaluation", 1)]


def test_an_evaluation_is_remembered_that_came_after_its_checkpoint(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = again(whole, tmp_path)
    (run / "summary.json").unlink()
    before = read_metrics(run / "metrics.jsonl")
    assert train(tmp_path) == EXIT_DONE
    assert read_metrics(run / "metrics.jsonl") == before
    assert json.loads((run / "summary.json").read_text())["best_step"] is not None


def test_one_without_the_metric_that_counts_now_is_made_again(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from train.tasks.causal_lm import Task

    plain, run = Task.metrics, again(whole, tmp_path)
    (run / "summary.json").unlink()
    monkeypatch.setattr(Task, "default_metric", "added")
    monkeypatch.setattr(Task, "metrics", lambda self, *args: {**plain(self, *args), "added": 3.0})
    assert train(tmp_path) == EXIT_DONE
    assert read_metrics(run / "metrics.jsonl")[-1]["added"] == 3.0


def test_an_evaluation_on_other_data_is_not(whole: Path, tmp_path: Path) -> None:
    run = again(whole, tmp_path)
    log = run / "metrics.jsonl"
    rows = [{**row, "loss": 0.0, "data": "other"} if "data" in row else row for row in read_metrics(log)]
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (run / "summary.json").unlink()
    assert train(tmp_path) == EXIT_DONE
    assert json.loads((run / "summary.json").read_text())["best_metric"] > 0


def test_a_row_of_which_the_disk_took_half_is_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outputs = DurableOutputs(Config().changed(output_dir=str(tmp_path)), Accelerator(cpu=True))
    plain, run = Outputs.write_rows, run_for(outputs.config)

    def half(self: Outputs, *rows: str) -> None:
        self.metrics.write_text("".join(rows * 2)[:-20])  # one and a half
        raise UserError("full.")

    monkeypatch.setattr(Outputs, "write_rows", half)
    outputs.record(run, "train", 1, {"loss": 1.0})
    monkeypatch.setattr(Outputs, "write_rows", plain)
    outputs.sync_log()
    outputs.record(run, "train", 2, {"loss": 1.0})
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2]


def test_rows_that_the_disk_takes_at_the_last_try_are_written_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outputs = DurableOutputs(Config().changed(output_dir=str(tmp_path)), Accelerator(cpu=True))
    plain, run, refused = Outputs.write_rows, run_for(outputs.config), iter([True, False, False])

    def full_at_first(self: Outputs, *rows: str) -> None:
        if next(refused):
            raise UserError("full.")
        plain(self, *rows)

    monkeypatch.setattr(Outputs, "write_rows", full_at_first)
    outputs.record(run, "train", 1, {"loss": 1.0})
    counts = {
        "steps": 1,
        "nonfinite_steps": 0,
        "rollbacks": 0,
        "tokens": 5,
        "training_seconds": 1.0,
        "tokens_per_second": 5.0,
    }
    outputs.finish({**counts, "result": {}, "seconds_to_first_step": None})
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [1]


def test_without_endurance_a_new_run_is_not_taken_for_the_finished_one_in_its_folder(tmp_path: Path) -> None:
    outputs = Outputs(Config().changed(output_dir=str(tmp_path)), Accelerator(cpu=True))
    for step in (3, 6):
        (outputs.checkpoints / f"step-{step:08d}").mkdir(parents=True)
    (tmp_path / "summary.json").write_text('{"steps": 6, "final_step": 6}')
    assert Outputs(outputs.config, Accelerator(cpu=True)).is_complete(6)
    assert not Outputs(outputs.config.changed(resume="never"), Accelerator(cpu=True)).is_complete(6)
    outputs.discard_later(Progress(step=3))
    assert list(outputs.steps()) == [3]
    assert not Outputs(outputs.config, Accelerator(cpu=True)).is_complete(6)


def test_a_task_without_its_headline_metric_is_judged_by_its_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from train.tasks.causal_lm import Task

    plain = Task.metrics

    def fewer(self: Any, *args: Any) -> dict[str, Any]:
        return {name: value for name, value in plain(self, *args).items() if name != "bits_per_byte"}

    monkeypatch.setattr(Task, "metrics", fewer)
    assert train(tmp_path, "--max_steps", "1") == EXIT_DONE
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["metric_name"] == "loss" and summary["metric_value"] == summary["result"]["validation"]["loss"]


def test_only_what_a_run_has_made_moves_aside(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "thesis").mkdir(parents=True)
    for name in ("notes.txt", "data.jsonl", "thesis/chapter.tex"):
        (run / name).write_text("mine")
    flags = ("--max_steps", "1", "--report_to", "tensorboard")
    assert train(tmp_path, *flags) == train(tmp_path, *flags, "--resume", "never") == EXIT_DONE
    kept = {path.name for path in run.iterdir()} - {path.name for path in (run / "previous-1").iterdir()}
    assert kept >= {"notes.txt", "data.jsonl", "thesis"} and (run / "thesis" / "chapter.tex").read_text() == "mine"
    assert {"checkpoints", "final", "config.yaml", "metrics.jsonl", "summary.json", PROJECT} <= {
        path.name for path in (run / "previous-1").iterdir()
    }


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[Path]:
    """A folder of another file system."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        if Path(folder).stat().st_dev == tmp_path.stat().st_dev:
            pytest.skip("one file system alone")
        yield Path(folder)


@pytest.mark.parametrize("resume", ["auto", pytest.param("never", marks=pytest.mark.slow)])
def test_checkpoints_that_are_kept_on_another_file_system_move_aside_there(
    tmp_path: Path, elsewhere: Path, resume: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The folder is a link, as to a disk for scratch, or a volume of a container."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "checkpoints").symlink_to(elsewhere)
    flags = ("--save_every_steps", "1", "--save_total_limit", "9", "--resume", resume)
    assert train(tmp_path, *flags) == EXIT_DONE
    log = (run / "metrics.jsonl").read_text()
    (elsewhere / "step-00000004" / "state.json").write_text("damaged")
    (run / "summary.json").unlink()
    capsys.readouterr()
    assert train(tmp_path, *flags) == EXIT_DONE
    moved = {f"previous-1-step-{step:08d}" for step in ([4] if resume == "auto" else [1, 2, 3, 4])}
    assert {path.name for path in elsewhere.iterdir()} == moved | {f"step-{step:08d}" for step in (1, 2, 3, 4)}
    assert (run / "checkpoints").is_symlink() and (run / "metrics.jsonl").read_text().count("\n") == log.count("\n")
    name = "step-00000004"
    said = f"{run / 'checkpoints' / name} is on another file system: there it is now previous-1-{name}"
    assert said in capsys.readouterr().out
    assert (elsewhere / f"previous-1-{name}" / "state.json").read_text() == "damaged"
    shutil.rmtree(run / "previous-1")
    assert train(tmp_path, *flags[:-1], "never") == EXIT_DONE  # no second one of the same number
    assert (elsewhere / f"previous-2-{name}").is_dir() and (elsewhere / f"previous-1-{name}").is_dir()


def test_a_folder_of_checkpoints_that_cannot_be_made_is_noticed_before_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "checkpoints").symlink_to(tmp_path / "purged")
    assert train(tmp_path) == EXIT_ERROR
    why = f"it links to {tmp_path / 'purged'}, which is not a folder. Give another --output_dir."
    assert f"error: {run / 'checkpoints'}: cannot be written: {why}" in capsys.readouterr().err
    assert not (run / "metrics.jsonl").exists()


@pytest.mark.parametrize("name", ["final/notes.txt", "config.yaml", "report.html"])
def test_files_of_a_person_with_the_names_of_a_run_move_aside(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also the recipe itself: ``--config exp/config.yaml --output_dir exp``."""
    mine = tmp_path / "run" / name
    mine.parent.mkdir(parents=True)
    mine.write_text("# mine\nmax_steps: 50000\n")
    assert train(tmp_path, "--max_steps", "1") == EXIT_DONE
    assert (tmp_path / "run" / "previous-1" / name).read_text() == "# mine\nmax_steps: 50000\n"
    assert f"files were moved to {tmp_path / 'run' / 'previous-1'}" in capsys.readouterr().out
    assert train(tmp_path, "--max_steps", "2") == EXIT_DONE
    assert not (tmp_path / "run" / "previous-2").exists()


def test_what_a_killed_run_has_left_before_its_first_checkpoint_does_not_move_aside(tmp_path: Path) -> None:
    assert train(tmp_path, "--max_steps", "1", "--log_every_steps", "1") == EXIT_DONE
    for name in ("checkpoints", "final"):
        shutil.rmtree(tmp_path / "run" / name)
    for name in ("summary.json", "report.html"):
        (tmp_path / "run" / name).unlink()
    assert train(tmp_path, "--max_steps", "1") == EXIT_DONE
    assert not (tmp_path / "run" / "previous-1").exists()


@pytest.mark.parametrize("name", ["model-q4.gguf", "config.json", "NOTES.md"])
def test_a_final_model_to_which_a_person_has_added_something_is_kept(tmp_path: Path, name: str) -> None:
    final = tmp_path / "run" / "final"
    assert train(tmp_path, "--max_steps", "1") == EXIT_DONE
    (final / name).write_text('{"mine": true}')
    assert train(tmp_path, "--max_steps", "2") == EXIT_DONE
    assert (tmp_path / "run" / "previous-1" / "final" / name).read_text() == '{"mine": true}'
    assert "model_type" in (final / "config.json").read_text()
    assert train(tmp_path, "--max_steps", "3") == EXIT_DONE
    assert not (tmp_path / "run" / "previous-2").exists()


def test_an_edited_card_leaves_a_run_done_and_files_of_a_person_move_for_a_run_from_elsewhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, mine = tmp_path / "run", tmp_path / "mine"
    assert train(tmp_path, "--max_steps", "1") == EXIT_DONE
    (run / "final" / "README.md").write_text("edited")
    assert train(tmp_path, "--max_steps", "1") == EXIT_DONE
    assert "nothing to do" in capsys.readouterr().out and (run / "final" / "README.md").read_text() == "edited"
    (mine / "final").mkdir(parents=True)
    (mine / "final" / "notes.txt").write_text("mine")
    start = str(run / "checkpoints" / "step-00000001")
    assert train(tmp_path, "--resume", start, "--max_steps", "2", "--output_dir", str(mine)) == EXIT_DONE
    assert (mine / "previous-1" / "final" / "notes.txt").read_text() == "mine"


def test_a_run_from_scratch_moves_nothing_before_it_can_start(tmp_path: Path) -> None:
    assert train(tmp_path, "--max_steps", "1") == EXIT_DONE
    there = sorted(path.name for path in (tmp_path / "run").iterdir())
    assert train(tmp_path, "--resume", "never", "--dataset", "nowhere.jsonl") != EXIT_DONE
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == there
    for resume, counts in (("auto", True), ("never", False)):  # for the rehearsal, too
        here = Config().changed(output_dir=str(tmp_path / "run"), resume=resume)
        assert DurableOutputs(here, Accelerator(cpu=True)).is_complete(1) is counts
    assert train(tmp_path, "--resume", "never", "--max_steps", "1") == EXIT_DONE
    assert (tmp_path / "run" / "previous-1" / "final").is_dir()


def test_a_metric_that_is_no_number_is_never_the_best(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from train.tasks.causal_lm import Task

    metrics, values = Task.metrics, iter([float("nan"), 3.0, float("nan"), 4.0])

    def poor(self: Any, *args: Any) -> dict[str, Any]:
        return {**metrics(self, *args), "loss": next(values)}

    monkeypatch.setattr(Task, "metrics", poor)
    best = ("--load_best_model_at_end", "True", "--save_every_steps", "1", "--eval_every_steps", "1")
    assert train(tmp_path, *best) == EXIT_DONE
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["best_step"], summary["best_metric"], summary["final_step"]) == (2, 3.0, 2)


def test_a_run_whose_best_checkpoint_is_damaged_is_made_only_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from train.tasks.causal_lm import Task

    metrics, values = Task.metrics, iter([3.0, 4.0, 4.0])
    monkeypatch.setattr(Task, "metrics", lambda self, *args: {**metrics(self, *args), "loss": next(values)})
    best = ("--max_steps", "2", "--eval_every_steps", "1", "--save_every_steps", "1")
    assert train(tmp_path, *best) == EXIT_DONE
    (tmp_path / "run" / "checkpoints" / "step-00000001" / "state.json").write_text("{}")
    best += ("--load_best_model_at_end",)
    assert train(tmp_path, *best) == EXIT_DONE
    said = capsys.readouterr().out
    assert "the best checkpoint, of step 1, cannot be used" in said and "nothing to do" in said
    shutil.rmtree(tmp_path / "run" / "final")
    for made in (True, False):
        assert train(tmp_path, *best) == EXIT_DONE
        assert ("nothing to do" in capsys.readouterr().out) is not made


def test_final_with_the_best_weights_outlives_damage_to_their_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from train.tasks.causal_lm import Task

    metrics, values = Task.metrics, iter([3.0, 4.0])
    monkeypatch.setattr(Task, "metrics", lambda self, *args: {**metrics(self, *args), "loss": next(values)})
    best = ("--max_steps", "2", "--eval_every_steps", "1", "--save_every_steps", "1", "--load_best_model_at_end")
    assert train(tmp_path, *best) == EXIT_DONE
    (tmp_path / "run" / "checkpoints" / "step-00000001" / "state.json").write_text("{}")
    capsys.readouterr()
    assert train(tmp_path, *best) == EXIT_DONE
    said = capsys.readouterr().out
    assert "nothing to do" in said and "cannot be used" not in said
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["final_step"] == 1


HOLDER = """
    import platform, sys, time
    from pathlib import Path
    from train.extras.endurance.lock import lock
    node = platform.node

    def slow_node():
        print("held", flush=True)
        time.sleep(float(sys.argv[2]))
        return node()

    platform.node = slow_node
    held = lock(Path(sys.argv[1]))
    sys.stdin.read()
"""


def hold(path: Path, seconds: float = 0.0) -> subprocess.Popen[str]:
    """Another process that has locked ``path``, and takes so long to write its name into it."""
    words = [sys.executable, "-c", textwrap.dedent(HOLDER), str(path), str(seconds)]
    process = subprocess.Popen(words, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


def test_two_runs_do_not_write_to_one_folder(whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = again(whole, tmp_path)
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file() and path.name != ".lock"}
    holder = hold(run)
    for resume in ("auto", "never"):
        assert train(tmp_path, "--resume", resume) == EXIT_ERROR
        assert f"run is in use by process {holder.pid} on {os.uname().nodename}" in capsys.readouterr().err
    assert {p: p.stat().st_mtime_ns for p in run.rglob("*") if p.is_file() and p.name != ".lock"} == before
    holder.kill()  # a crash leaves no lock
    holder.wait()
    assert train(tmp_path) == EXIT_DONE
    with lock(run):  # a run that has ended holds it no longer
        pass


def test_a_file_system_without_locks_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def unsupported(*args: Any) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr("fcntl.lockf", unsupported)
    assert train(tmp_path, "--max_steps", "1") == EXIT_DONE
    assert WITHOUT in capsys.readouterr().out


def test_a_file_system_that_syncs_files_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As FUSE and CIFS."""
    fsync, folders = os.fsync, []

    def invalid(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            folders.append(descriptor)
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", invalid)
    assert train(tmp_path) == EXIT_DONE and len(folders) > 3
    assert list(checkpoint.by_step(tmp_path / "run" / "checkpoints")) == [2, 4]


def test_exit_hooks_run_with_several_ranks_too() -> None:
    """A tracker may have left something to do until then."""
    text = (
        "import atexit, runpy; atexit.register(print, 'hook ran'); runpy.run_path('train/main.py', run_name='__main__')"
    )
    words = [sys.executable, "-c", text, "--no_such_flag"]
    done = subprocess.run(words, cwd=ROOT, env={**os.environ, "WORLD_SIZE": "2"}, capture_output=True, text=True)
    assert (done.returncode, done.stdout.count("hook ran")) == (EXIT_USAGE, 1), done.stderr


@pytest.mark.parametrize(
    ("resume", "into"), [("never", {"previous-1"}), ("STEP 2", {"previous-1", "previous-1/checkpoints"})]
)
def test_what_is_moved_aside_is_on_the_disk(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resume: str, into: set[str]
) -> None:
    """A file system that keeps what was taken from one folder and loses what was put into another would lose it."""
    run, fsync, synced = again(whole, tmp_path), os.fsync, set()

    def keep(descriptor: int) -> None:
        synced.add(Path(f"/proc/self/fd/{descriptor}").readlink())
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", keep)
    from_step = str(run / "checkpoints" / "step-00000002")
    assert train(tmp_path, "--resume", resume.replace("STEP 2", from_step)) == EXIT_DONE
    assert list((run / "previous-1").rglob("step-00000004")) != []
    assert {run / name for name in into} <= synced


@pytest.mark.parametrize("seconds", [0.0, 0.2])
def test_a_locked_folder_names_who_has_it(tmp_path: Path, seconds: float) -> None:
    """Not the run before, which was killed, even if both were started at the same moment."""
    (tmp_path / ".lock").write_text("process 1 on elsewhere")
    holder = hold(tmp_path, seconds)
    with pytest.raises(UserError, match=f"is in use by process {holder.pid} on "):
        lock(tmp_path)
    holder.kill()
    holder.wait()


def test_a_note_is_said_and_kept_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outputs = Outputs(Config().changed(output_dir=str(tmp_path)), Accelerator(cpu=True))
    outputs.note("one", None, "two", "one")
    outputs.note("two", "three")
    assert outputs.notes == ["one", "two", "three"] == capsys.readouterr().out.split()
