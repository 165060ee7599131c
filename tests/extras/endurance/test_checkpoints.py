"""Checkpoints written in the background: what they hold, when they wait, and what happens when a disk refuses."""

from __future__ import annotations

import gc
import json
import math
import threading
import time
import traceback
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch
from support import Driver
from torch import Tensor, nn

from train import checkpoint
from train.extras import Extras
from train.extras.endurance import DivergenceError, checkpoints
from train.extras.endurance.checkpoints import NO_ROOM, Saving
from train.records import Progress, Run, UserError
from train.state import TrainingState


class Notes:
    """Outputs that remember what they were told; as real ones, each line once."""

    def __init__(self, folder: Path) -> None:
        self.checkpoints = folder
        self.notes: list[str] = []
        self.rotated: list[int] = []

    def note(self, *lines: str) -> None:
        self.notes += [line for line in lines if line not in self.notes]

    def rotate(self, run: Run, progress: Progress) -> None:
        self.rotated.append(progress.step)


@pytest.fixture
def outputs(tmp_path: Path) -> Notes:
    return Notes(tmp_path)


@pytest.fixture
def run(outputs: Notes) -> Run:
    return cast("Run", SimpleNamespace(outputs=outputs, accelerator=SimpleNamespace(process_index=0, num_processes=1)))


@pytest.fixture
def state() -> TrainingState:
    network = nn.Linear(2, 2)
    return TrainingState(network, torch.optim.SGD(network.parameters(), lr=1.0), {"seed": 1})


def names(outputs: Notes) -> list[str]:
    return sorted(path.name for path in outputs.checkpoints.iterdir())


def full(*arguments: Any) -> Any:
    raise OSError(28, "No space left on device")


def test_copy_is_of_the_step_that_was_saved_although_training_continues(
    run: Run, outputs: Notes, state: TrainingState, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_write, write = threading.Event(), checkpoint.write_blocks

    def slow(*arguments: Any) -> Any:
        may_write.wait(20)
        return write(*arguments)

    monkeypatch.setattr(checkpoint, "write_blocks", slow)
    saving, before = Saving(in_background=True), {k: v.clone() for k, v in state.model.state_dict().items()}
    saving.save(run, state, Progress(step=1), wait=False)
    assert names(outputs) == [".partial-step-00000001"]
    with torch.no_grad():
        state.model.get_parameter("weight").zero_()
    may_write.set()
    saving.finish(run)
    assert (names(outputs), outputs.rotated) == (["step-00000001"], [1])
    assert checkpoint.verify(outputs.checkpoints / "step-00000001") is None
    assert checkpoint.restore(outputs.checkpoints / "step-00000001", state).step == 1
    assert all(torch.equal(before[k], v) for k, v in state.model.state_dict().items())
    assert saving.checkpoints_in_background == 1 and (saving.longest_stall_seconds or 0) > 0


class OnCard(Tensor):
    """A tensor that says it is on a card."""

    is_cuda = True


def test_copies_of_a_card_share_one_page_locked_buffer_of_their_size(
    run: Run, outputs: Notes, state: TrainingState, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensor by tensor, torch's allocator would round each up to a power of two, and keep all that."""
    parts, driver = TrainingState.blocks, Driver()

    def on_card(state: TrainingState, rank: int) -> Any:
        found = parts(state, rank)
        return {
            section: {name: replace(part, tensor=part.tensor.as_subclass(OnCard)) for name, part in named.items()}
            for section, named in found.items()
        }

    monkeypatch.setattr(TrainingState, "blocks", on_card)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    saving = Saving(in_background=True)
    for step in (1, 2, 3):
        saving.save(run, state, Progress(step=step), wait=False)
        free = 10 if step == 2 else 2**40  # what the buffer holds is there already
        monkeypatch.setattr(checkpoints, "free_host_bytes", lambda free=free: free)
    saving.finish(run)
    assert (saving.checkpoints_in_background, outputs.notes) == (3, [])
    assert driver.locked == [128]  # a weight of 16 bytes and a bias of 8, where every type may begin
    assert all(checkpoint.verify(outputs.checkpoints / f"step-0000000{step}") is None for step in (1, 2, 3))
    assert checkpoint.restore(outputs.checkpoints / "step-00000003", state).step == 3


def test_last_checkpoint_is_there_when_saving_returns(run: Run, outputs: Notes, state: TrainingState) -> None:
    saving = Saving(in_background=True)
    saving.save(run, state, Progress(step=1), wait=False)
    saving.save(run, state, Progress(step=2), wait=True)
    assert names(outputs) == ["step-00000001", "step-00000002"]
    assert outputs.rotated == [1, 2]
    assert saving.checkpoints_in_background == 1 and (saving.longest_stall_seconds or 0) > 0


PLACES = [
    ("model", "weight", 0),
    ("model", "bias", 1),
    ("optimizer", "weight.exp_avg", 3),
    ("optimizer", "bias.exp_avg_sq", 0),
]


@pytest.mark.parametrize("in_background", [True, False])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(("section", "name", "place"), PLACES)
def test_weight_or_moment_that_is_not_finite_is_named_and_nothing_is_written(
    run: Run,
    outputs: Notes,
    monkeypatch: pytest.MonkeyPatch,
    section: str,
    name: str,
    place: int,
    value: float,
    in_background: bool,
) -> None:
    state = trained_state()
    state.blocks(0)[section][name].tensor.view(-1)[place] = value
    with pytest.raises(DivergenceError, match=f"^step 7: {name} is not finite any more") as caught:
        Saving(in_background).save(run, state, Progress(step=7, consecutive_nonfinite_steps=2), wait=False)
    assert (caught.value.sound_step, names(outputs)) == (4, [])


@pytest.mark.parametrize("in_background", [True, False])
def test_what_is_finite_is_saved_however_large_and_what_is_not_trained_whatever_it_is(
    run: Run, outputs: Notes, in_background: bool
) -> None:
    state = trained_state()
    state.model.register_buffer("mask", torch.full((2,), -math.inf))
    with torch.no_grad():
        state.model.get_parameter("weight").fill_(3e38)  # the sum overflows
        state.model.get_parameter("bias").requires_grad_(False).fill_(math.nan)
    saving, expected = Saving(in_background), {k: v.clone() for k, v in state.model.state_dict().items()}
    saving.save(run, state, Progress(step=1), wait=False)
    saving.finish(run)
    stored = checkpoint.StoredBlocks(outputs.checkpoints / "step-00000001")
    for name, tensor in expected.items():
        found = stored.block("model", name, (0,) * tensor.ndim, tuple(tensor.shape))
        assert torch.equal(found.view(torch.int32), tensor.view(torch.int32))


def trained_state() -> TrainingState:
    """With moments."""
    network = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(network.parameters())
    network(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return TrainingState(network, optimizer, {})


def test_without_room_for_a_copy_training_waits_and_says_so_once(
    run: Run, outputs: Notes, state: TrainingState, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "free_host_bytes", lambda: 10)
    saving = Saving(in_background=True)
    for step in (1, 2):
        saving.save(run, state, Progress(step=step), wait=False)
        assert outputs.rotated[-1] == step
    assert (outputs.notes, saving.checkpoints_in_background) == ([NO_ROOM], 0)


def test_one_failure_is_forgiven_and_two_in_a_row_are_not(
    run: Run, outputs: Notes, state: TrainingState, monkeypatch: pytest.MonkeyPatch
) -> None:
    saving = Saving(in_background=True)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "complete", full)
        saving.save(run, state, Progress(step=1), wait=False)
        saving.finish(run)
    assert names(outputs) == [] and len(outputs.notes) == 1
    assert "No space left" in outputs.notes[0] and "the next checkpoint is tried" in outputs.notes[0]
    saving.save(run, state, Progress(step=2), wait=False)
    saving.finish(run)
    monkeypatch.setattr(checkpoint, "make_empty", full)
    saving.save(run, state, Progress(step=3), wait=False)
    with pytest.raises(UserError, match="step-00000004 could not be written"):
        saving.save(run, state, Progress(step=4), wait=False)
    assert names(outputs) == ["step-00000002"]


def test_a_bug_in_a_state_of_ones_own_shows_where_it_is_from_the_background_too(run: Run, state: TrainingState) -> None:
    class Own(TrainingState):
        def values(self) -> dict[str, Any]:
            return {**super().values(), "own": {1, 2}}  # a set, which is no JSON

    saving = Saving(in_background=True)
    saving.save(run, Own(state.model, state.optimizer, {}), Progress(step=1), wait=False)
    with pytest.raises(TypeError, match="set is not JSON") as caught:
        saving.finish(run)
    assert "complete" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]


def test_a_tensor_that_cannot_be_stored_ends_the_run_and_leaves_nothing(
    run: Run, outputs: Notes, state: TrainingState
) -> None:
    state.model.register_buffer("phases", torch.zeros(2, dtype=torch.complex128))
    saving = Saving(in_background=True)
    saving.save(run, state, Progress(step=1), wait=False)
    with pytest.raises(UserError, match=r"^phases is torch\.complex128"):
        saving.finish(run)
    assert names(outputs) == [] == outputs.notes


@pytest.mark.parametrize("is_full", [False, True])
def test_the_copy_of_the_state_is_freed_whether_or_not_it_could_be_written(
    run: Run, outputs: Notes, state: TrainingState, monkeypatch: pytest.MonkeyPatch, is_full: bool
) -> None:
    """A disk that is full fails twice, in writing and in closing; the first error has the frames of the second."""
    copies, copied, opened = list[Any](), checkpoints.copied, Path.open

    def watched(*arguments: Any) -> Any:
        copies.append(weakref.ref((made := copied(*arguments))["model"]["weight"].tensor))
        return made

    def on_full_disk(path: Path, *arguments: Any, **options: Any) -> Any:
        return opened(Path("/dev/full") if path.suffix == ".safetensors" else path, *arguments, **options)

    monkeypatch.setattr(checkpoints, "copied", watched)
    if is_full:
        monkeypatch.setattr(Path, "open", on_full_disk)
    saving = Saving(in_background=True)
    saving.save(run, state, Progress(step=1), wait=False)
    saving.finish(run)
    assert len(outputs.notes) == is_full
    deadline = time.monotonic() + 10
    while [copy() for copy in copies] != [None] and time.monotonic() < deadline:  # a thread may be about to end
        time.sleep(0.01)
        gc.collect()
    assert [copy() for copy in copies] == [None]


@pytest.mark.parametrize("failing", [False, True])
def test_a_checkpoint_on_its_way_when_a_run_is_asked_to_stop_is_written_again_only_if_it_failed(
    run: Run, outputs: Notes, state: TrainingState, monkeypatch: pytest.MonkeyPatch, failing: bool
) -> None:
    saving, writes, write = Saving(in_background=True), [], checkpoint.write
    monkeypatch.setattr(checkpoint, "write", lambda *arguments: (writes.append(1), write(*arguments)))
    with monkeypatch.context() as patch:
        if failing:
            patch.setattr(checkpoint, "complete", full)
        saving.save(run, state, Progress(step=1), wait=False)
        saving.wait(10)
    saving.save(run, state, Progress(step=1), wait=True)
    assert (names(outputs), outputs.rotated, len(writes)) == (["step-00000001"], [1], failing)


def test_checkpoint_that_nobody_tries_again_ends_the_run_at_once(
    run: Run, state: TrainingState, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "complete", full)
    with pytest.raises(UserError, match="No space left"):
        Saving(in_background=True).save(run, state, Progress(step=1), wait=True)


def test_a_rollback_takes_an_unproved_checkpoint_where_all_before_it_are_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = {step: tmp_path / f"step-{step:08d}" for step in (2, 4)}
    for folder in folders.values():
        folder.mkdir()
    skipped = [(3, [9]), (5, [1, 4]), (6, [0, 4])]
    lines = [json.dumps({"kind": "skipped", "step": step, "examples": examples}) for step, examples in skipped]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    monkeypatch.setattr(checkpoint, "verify", lambda path: "altered" if path == folders[2] else None)
    monkeypatch.setattr(checkpoint, "restore", lambda found, *_: Progress(int(found.name[5:]), training_seconds=4.0))
    outputs: Any = Mock(checkpoints=tmp_path, metrics=tmp_path / "metrics.jsonl", from_main=lambda choose: choose())
    lost = Progress(step=6, epoch=1, step_in_epoch=2, training_seconds=6.0)
    error = DivergenceError("step 6: the loss is 9", lost, sound_step=4)
    found = checkpoints.go_back(Mock(outputs=outputs, extras=Extras({})), Mock(), error)
    assert (found.step, found.epoch, found.step_in_epoch, found.rollbacks) == (4, 1, 2, 1)
    assert found.training_seconds == 4.0  # of the steps that count: with them go their tokens
    [(_, kind, step, values)] = [call.args for call in outputs.record.call_args_list]
    assert (kind, step, values["examples"]) == ("rollback", 4, [0, 1, 4])  # of the rows that are gone
    outputs.note.assert_any_call("damaged checkpoint skipped: step-00000002: altered")
    monkeypatch.setattr(checkpoint, "verify", lambda path: "altered")
    with pytest.raises(DivergenceError, match="no intact checkpoint from before it"):
        checkpoints.go_back(Mock(outputs=outputs, extras=Extras({})), Mock(), error)
