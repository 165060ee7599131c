"""What the extra checks and offers; the rest is tested with whole runs in tests/faults/."""

from __future__ import annotations

import errno
import gc
import math
import signal
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
from accelerate import Accelerator
from accelerate.utils import DynamoBackend

from train import checkpoint
from train.config import Config, check
from train.extras import Extras
from train.extras.endurance import DivergenceError, Extra, refuse_strangers, said_by
from train.extras.endurance.recovery import Recovering
from train.launch import Launch
from train.records import Progress, Run, StopAtOnce, UsageError, UserError
from train.step import Engine

MODEL = {"model_config": {"model_type": "gpt2"}, "tokenizer": "bytes"}


def run_with(**values: Any) -> Run:
    config, outputs = Config().changed(**MODEL, **values), SimpleNamespace(say=print, note=print, is_main=False)
    parts = {"config": config, "accelerator": Accelerator(cpu=True), "extras": Extras({}), "outputs": outputs}
    return cast("Run", SimpleNamespace(**parts, launch=Launch(), is_planned=False))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_rollbacks": 1, "save_every_steps": None}, "max_rollbacks needs save_every_steps"),
        ({"max_rollbacks": -1}, "max_rollbacks: -1 is not valid"),
        ({"loss_spike_factor": 1.0}, "loss_spike_factor: 1.0 is not valid: it must be above 1"),
        ({"loss_spike_factor": math.inf}, "loss_spike_factor: inf is not valid"),
    ],
)
def test_options_that_cannot_work_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        check(Config().changed(**MODEL, **values))
    assert message in str(caught.value)


@pytest.mark.parametrize("on_oom", ["auto", "split", "adapt", "stop"])
def test_plain_engine_is_guarded_unless_the_run_shall_stop(on_oom: str) -> None:
    run, extra = run_with(on_oom=on_oom), Extra()
    engine = Engine(run.accelerator, run.config)
    wrapped = extra.wrap_step(run, engine)
    assert isinstance(wrapped, Recovering) is (on_oom != "stop")
    extra._saving = Mock(longest_stall_seconds=None)
    extra.finished(run, cast("Any", None), summary := {})
    assert ("oom_recoveries" in summary) is (on_oom != "stop")

    class Other(Engine):
        """One whose backward cannot be made again."""

    other = Other(run.accelerator, run.config)
    assert extra.wrap_step(run, other) is other


def test_a_full_disk_is_said_with_its_place_and_what_to_do(tmp_path: Path) -> None:
    extra, config = Extra(), Config().changed(**MODEL, output_dir=str(tmp_path))
    with extra.open(config, Launch(), []):
        found = extra.failed(None, OSError(errno.ENOSPC, "No space left on device"))
        named = extra.failed(None, OSError(errno.EROFS, "Read-only file system", "/data/metrics.jsonl"))
    start = "There is no checkpoint yet: the same command starts from scratch. A smaller --save_every_steps helps."
    assert found == f"{tmp_path} cannot be written: No space left on device. {start}"
    elsewhere = "Set HF_HOME or TMPDIR to a disk with room."
    assert named == f"/data/metrics.jsonl cannot be written: Read-only file system. {elsewhere} {start}"


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM, errno.EIO])
def test_a_file_of_somebody_else_that_cannot_be_read_is_not_called_unwritable(number: int, tmp_path: Path) -> None:
    """The traceback names the line that opened it."""
    extra, config = Extra(), Config().changed(**MODEL, output_dir=str(tmp_path / "run"))
    with extra.open(config, Launch(), []):
        assert extra.failed(None, OSError(number, "no", str(tmp_path / "private.jsonl"))) is None
        assert extra.failed(None, OSError(number, "no")) is None
        assert extra.failed(None, OSError(number, "no", 3)) is None  # of a descriptor
        own = str(tmp_path / "run/checkpoints/step-00000001")
        assert str(extra.failed(None, OSError(number, "no", own))).startswith(f"{own} cannot be written: no.")
        extra._is_trained = True  # now final/ is written and synced
        assert "cannot be written: no." in str(extra.failed(None, OSError(number, "no")))


@pytest.mark.parametrize("launch", [Launch(2), Launch(engine="fsdp2"), Launch(2, engine="fsdp2")])
def test_several_processes_and_shards_are_not_guarded_unless_asked_for(launch: Launch) -> None:
    run = run_with()
    run.launch = launch
    engine = Engine(run.accelerator, run.config)
    assert Extra().wrap_step(run, engine) is engine


def test_compiled_data_parallelism_is_left_alone_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_with(on_oom="split")
    run.launch, engine = Launch(2), Engine(run.accelerator, run.config)
    monkeypatch.setattr(run.accelerator.state.dynamo_plugin, "backend", DynamoBackend.INDUCTOR)
    run.outputs.note = Mock()
    assert Extra().wrap_step(run, engine) is engine
    run.outputs.note.assert_called_once_with("on_oom: split does nothing here: DDP is compiled")


@pytest.mark.parametrize("on_oom", ["auto", "split"])
def test_an_engine_of_another_extra_is_left_alone_and_told_where_recovery_was_asked_for(on_oom: str) -> None:
    run, engine = run_with(on_oom=on_oom), type("Own", (Engine,), {})
    own, changed = engine(run.accelerator, run.config), Engine(run.accelerator, run.config)
    changed.step = Mock()  # type: ignore
    said = "on_oom: split does nothing here: another engine makes the step" if on_oom == "split" else None
    for kept in (own, changed):
        run.outputs.note = Mock()
        assert Extra().wrap_step(run, kept) is kept
        run.outputs.note.assert_called_once_with(said)


@pytest.mark.parametrize("launch", [Launch(1, engine="fsdp2"), Launch(2, engine="fsdp2"), Launch(2, tp_size=2)])
@pytest.mark.parametrize("on_oom", ["split", "adapt"])
def test_a_launch_that_cannot_repeat_a_step_says_so_where_it_is_asked_to(launch: Launch, on_oom: str) -> None:
    """It trains: the same recipe works with every launch file."""
    run = run_with(on_oom=on_oom)
    check(run.config, launch)
    run.launch, engine, run.outputs.note = launch, Engine(run.accelerator, run.config), Mock()
    assert Extra().wrap_step(run, engine) is engine
    run.outputs.note.assert_called_once_with(f"on_oom: {on_oom} does nothing here: {launch} cannot repeat a step")


def test_other_ranks_than_the_first_say_it_themselves(capsys: pytest.CaptureFixture[str]) -> None:
    run = run_with()
    run.launch = Launch(2, 1)
    said_by(run, print)("out of memory in forward")
    assert capsys.readouterr() == ("", "rank 1: out of memory in forward\n")


def test_an_overflow_of_fp16_is_told_as_such_with_the_scale_that_runs_start_with() -> None:
    run, extra, scale = run_with(), Extra(), 2.0**16
    run.outputs.record = Mock()
    for step in range(1, 26):
        scale /= 2
        run.accelerator.scaler = cast("Any", SimpleNamespace(get_scale=partial(float, scale)))
        progress = Progress(step=step, consecutive_nonfinite_steps=step)
        with nullcontext() if step < 25 else pytest.raises(DivergenceError, match=r"25 steps in a row.*precision bf16"):
            extra.stepped(run, progress, Mock(grad_norm=math.inf, skipped=True), [])


def test_measures_come_from_the_other_extras_where_asked_for() -> None:
    measure = ("a measure", lambda: True)
    for on_oom, expected in (("split", []), ("adapt", [measure])):
        run = run_with(on_oom=on_oom)
        run.extras.each = lambda method, *given: [measure] if method == "memory_measure" else []  # type: ignore
        engine = Extra().wrap_step(run, Engine(run.accelerator, run.config))
        assert isinstance(engine, Recovering)
        assert list(engine._find_measures(None)) == expected


def test_loss_far_above_the_usual_is_a_divergence() -> None:
    run, extra, progress = run_with(loss_spike_factor=2.0), Extra(), Progress(step=8, usual_loss=3.0)
    extra._saving = Mock()
    extra.logged(run, progress, 5.9, 4)
    extra.logged(run_with(), progress, 100.0, 4)
    extra.logged(run, replace(progress, usual_loss=None), 100.0, 4)
    for loss in (6.1, math.inf, math.nan):
        with pytest.raises(DivergenceError, match=r"step 8: the loss since step 4 is .*--loss_spike_factor") as caught:
            extra.logged(run, progress, loss, 4)
        assert (caught.value.sound_step, caught.value.progress) == (4, progress)


def test_checkpoints_that_stay_are_the_last_that_a_sound_one_followed(tmp_path: Path) -> None:
    progress, extra = Progress(step=9, consecutive_nonfinite_steps=2), Extra()
    kept = {"max_rollbacks": 1, "save_every_steps": 1}
    for step in range(1, 10):
        (tmp_path / f"step-{step:08d}").mkdir()

    def steps_kept(**values: Any) -> set[int]:
        run = run_with(**values)
        run.outputs.steps = lambda: checkpoint.by_step(tmp_path)
        return extra.keep(run, {8, 9}, progress)

    assert steps_kept() == {8, 9}
    assert steps_kept(**kept) == {5, 6, 8, 9}


def test_run_ends_where_no_rollback_is_left() -> None:
    error = DivergenceError("bad", Progress(step=9, rollbacks=1), 5)
    assert Extra().diverged(run_with(max_rollbacks=1, save_every_steps=1), cast("Any", None), error) is None


def test_garbage_collection_waits_for_the_imports_and_leaves_out_what_is_there_before_training(tmp_path: Path) -> None:
    extra, run = Extra(), run_with(output_dir=str(tmp_path))
    with extra.open(run.config, run.launch, []):
        assert not gc.isenabled()
        with extra.preparing():
            assert gc.isenabled()
            assert gc.get_freeze_count() > 10_000
        new, before = [[number] for number in range(10_000)], gc.get_freeze_count()
        extra.ready(run, cast("Any", None))
        assert gc.get_freeze_count() - before > len(new)
    assert gc.get_freeze_count() == 0


def test_garbage_is_collected_again_after_a_run_that_failed_early(tmp_path: Path) -> None:
    run = run_with(output_dir=str(tmp_path))
    with pytest.raises(UserError), Extra().open(run.config, Launch(), []):
        raise UserError("early")
    assert gc.isenabled()


def test_process_that_is_alone_prepares_stops_and_fails_by_itself() -> None:
    extra, before = Extra(), [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    with extra.open(Config(), Launch(), []):
        pass
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before
    with extra.open(Config(), Launch(), []):
        with extra.preparing():
            pass
        with pytest.raises(StopAtOnce), extra.preparing():
            signal.raise_signal(signal.SIGTERM)
        assert extra.failed(None, RuntimeError("Connection closed by peer")) is None
    after = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    assert after == [signal.SIG_IGN, before[1]]  # once is enough


# Processes that do not know each other

MEET = {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


@pytest.mark.parametrize("name", ["SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE"])
def test_a_process_meant_to_be_one_of_several_stops(name: str) -> None:
    environment, number = {name: "4"}, 4
    message = rf"{number} process\(es\) were started that do not know each other.*unset {name}"
    with pytest.raises(UserError, match=message):
        refuse_strangers(environment, 1)
    given = {**MEET, "WORLD_SIZE": "2", "RANK": "0"}
    refuse_strangers({**environment, **given}, 2)
    refuse_strangers({**environment, **given}, 1)
    refuse_strangers({}, 1)
    for missing in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        with pytest.raises(UserError, match=r"2 process\(es\) were started .*for one process unset WORLD_SIZE"):
            refuse_strangers({name: value for name, value in given.items() if name != missing}, 2)
    for left in {"RANK": "1"}, {"LOCAL_RANK": "1"}, {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}:
        with pytest.raises(UserError, match=r"no RANK, MASTER_ADDR or MASTER_PORT.*unset RANK and LOCAL_RANK"):
            refuse_strangers(left, 1)
    for harmless in {"LOCAL_RANK": "-1"}, {"LOCAL_RANK": ""}, {"RANK": "0"}:  # the first as notebooks have it
        refuse_strangers(harmless, 1)
    with pytest.raises(UserError, match="asked for several processes and started one"):
        refuse_strangers({"ACCELERATE_MIXED_PRECISION": "no", "MASTER_PORT": "29500"}, 1)


@pytest.mark.parametrize(("parent", "launched", "is_told"), [(1, True, True), (1, False, False), (2, True, False)])
def test_a_launcher_that_sigterm_does_not_reach_is_told(
    parent: int, launched: bool, is_told: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("os.getppid", lambda: parent)
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    if launched:
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    Extra().started(run_with())
    assert ("SIGTERM does not reach" in capsys.readouterr().out) is is_told
