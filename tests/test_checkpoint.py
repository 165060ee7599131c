"""Checkpoints: exact, complete or absent, verified, rotated."""

from __future__ import annotations

import hashlib
import io
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import safetensors.torch
import torch
from safetensors.torch import load_file
from torch import nn

from train import checkpoint
from train.checkpoint import by_step
from train.records import Progress, UserError
from train.state import Block, StoredBlocks, TrainingState

IDENTITY = {"dataset": "stdlib", "seed": 1}


def training_state(optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW, seed: int = 0) -> TrainingState:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 4), nn.Linear(4, 7, bias=False))
    model[2].weight = model[0].weight  # tied, as in most language models
    built = optimizer([{"params": list(model.parameters()), "weight_decay": 0.1}], lr=0.01)
    return TrainingState(model, built, IDENTITY)


def save(folder: Path, state: TrainingState, progress: Progress) -> Path:
    """Writes a checkpoint as a run of one process does, and returns its folder."""
    checkpoint.write(folder, state, progress, rank=0)
    return folder / f"step-{progress.step:08d}"


def trained(state: TrainingState, steps: int) -> TrainingState:
    for step in range(steps):
        torch.manual_seed(step)
        state.model(torch.randint(7, (5,))).square().mean().backward()
        state.optimizer.step()
        state.optimizer.zero_grad()
    return state


def assert_equal_states(one: TrainingState, other: TrainingState) -> None:
    for name, tensor in one.model.state_dict().items():
        assert torch.equal(tensor, other.model.state_dict()[name]), name
    left, right = one.optimizer.state_dict(), other.optimizer.state_dict()
    assert left["param_groups"] == right["param_groups"]
    assert left["state"].keys() == right["state"].keys()
    for key, values in left["state"].items():
        for name, value in values.items():
            same = right["state"][key][name]
            assert torch.equal(value, same) if isinstance(value, torch.Tensor) else value == same, name


@pytest.mark.parametrize(
    "optimizer",
    [
        torch.optim.AdamW,
        lambda *a, **k: torch.optim.AdamW(*a, **k, fused=True),
        torch.optim.Adafactor,
        lambda *a, **k: torch.optim.SGD(*a, **k, momentum=0.9),
    ],
)
def test_restored_state_continues_exactly_like_the_saved_one(optimizer: Any, tmp_path: Path) -> None:
    saved = trained(training_state(optimizer), 3)
    progress = Progress(step=3, epoch=1, tokens_seen=15, best_metric=0.5, training_seconds=1.25)
    folder = save(tmp_path, saved, progress)
    fresh = training_state(optimizer, seed=1)
    assert checkpoint.restore(folder, fresh) == progress
    assert_equal_states(saved, fresh)
    assert fresh.model[0].weight is fresh.model[2].weight  # type: ignore
    assert_equal_states(trained(saved, 2), trained(fresh, 2))


class Counting(torch.optim.SGD):
    """Its rate falls with a count that it keeps in its groups, as Prodigy and Schedule-Free do."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.defaults["k"] = 0
        for group in self.param_groups:
            group["k"] = 0

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["k"] += 1
            for parameter in group["params"]:
                parameter.data.sub_(parameter.grad / group["k"])


def test_what_an_optimizer_counts_in_its_groups_is_restored_and_its_settings_are_not(tmp_path: Path) -> None:
    saved = trained(training_state(Counting), 3)
    folder = save(tmp_path, saved, Progress(step=3))
    fresh = training_state(Counting, seed=1)
    for group in fresh.optimizer.param_groups:
        group |= {"weight_decay": 0.5, "lr": 0.25}
    checkpoint.restore(folder, fresh)
    [group] = fresh.optimizer.param_groups
    assert (group["k"], group["weight_decay"], group["lr"]) == (3, 0.5, 0.25)
    for one, other in zip(trained(saved, 2).model.parameters(), trained(fresh, 2).model.parameters(), strict=True):
        assert torch.equal(one, other)


class WithMore(TrainingState):
    """Of a fork: an average of the weights in a section of its own."""

    def blocks(self, rank: int) -> dict[str, dict[str, Block]]:
        average = {"weight": Block(torch.ones(2), (2,), (0,))}
        return {**super().blocks(rank), "average": average}


def test_a_section_that_a_fork_adds_is_stored(tmp_path: Path) -> None:
    plain = training_state()
    folder = save(tmp_path, WithMore(plain.model, plain.optimizer, IDENTITY), Progress(step=3))
    assert torch.equal(StoredBlocks(folder).block("average", "weight", (0,), (2,)), torch.ones(2))


def test_progress_that_a_fork_added_after_the_checkpoint_was_written_has_its_default(tmp_path: Path) -> None:
    folder = save(tmp_path, training_state(), Progress(step=3, rollbacks=2))
    stored = json.loads((folder / "state.json").read_text())
    del stored["progress"]["rollbacks"]
    (folder / "state.json").write_text(json.dumps(stored))
    assert checkpoint.restore(folder, training_state()) == Progress(step=3)


def test_settings_of_the_optimizer_are_those_of_the_run_that_resumes(tmp_path: Path) -> None:
    saved = trained(training_state(), 3)
    folder = save(tmp_path, saved, Progress(step=3))
    fresh = training_state(lambda groups, lr: torch.optim.AdamW(groups, lr, betas=(0.5, 0.6)), seed=1)
    fresh.optimizer.param_groups[0]["weight_decay"] = 5.0
    checkpoint.restore(folder, fresh)
    [group] = fresh.optimizer.param_groups
    assert (group["weight_decay"], group["betas"]) == (5.0, (0.5, 0.6))
    for mine, theirs in zip(fresh.optimizer.state.values(), saved.optimizer.state.values(), strict=True):
        assert mine["step"] == 3 and torch.equal(mine["exp_avg"], theirs["exp_avg"])


def test_values_of_a_state_are_asked_of_every_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A digest of weights that are divided among ranks is made by all of them."""
    asked: list[bool] = []
    monkeypatch.setattr(TrainingState, "values", lambda self: asked.append(True) or {})
    (tmp_path / f"{checkpoint.PARTIAL}step-00000001").mkdir()
    checkpoint.write(tmp_path, training_state(), Progress(step=1), rank=1)
    assert asked == [True]


def test_scaler_is_restored(tmp_path: Path) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    state = training_state()
    folder = save(tmp_path, TrainingState(state.model, state.optimizer, IDENTITY, scaler), Progress(step=1))
    other = torch.amp.GradScaler("cpu", init_scale=2.0)
    checkpoint.restore(folder, TrainingState(state.model, state.optimizer, IDENTITY, other))
    other.scale(torch.ones(()))
    assert other.get_scale() == 8.0


def test_holds_nothing_that_unpickles(tmp_path: Path) -> None:
    folder = save(tmp_path, trained(training_state(), 1), Progress(step=1))
    assert {p.suffix for p in folder.iterdir()} == {".safetensors", ".json"}


@pytest.fixture
def two(tmp_path: Path) -> Path:
    """A folder with the checkpoints of steps 1 and 2."""
    state = training_state()
    for step in (1, 2):
        save(tmp_path, trained(state, 1), Progress(step=step))
    return tmp_path


FILES = ["model-00000.safetensors", "optimizer-00000.safetensors", "index.json", "state.json", "manifest.json"]


def flip_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-2] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    "damage",
    [
        flip_a_byte,
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
        lambda path: path.unlink(),
    ],
    ids=["flipped", "emptied", "halved", "removed"],
)
def test_damaged_checkpoint_is_passed_over(two: Path, name: str, damage: Callable[[Path], Any]) -> None:
    newest = two / "step-00000002"
    assert checkpoint.newest_good(two) == (newest, [])
    damage(newest / name)
    found, problems = checkpoint.newest_good(two)
    if name == "manifest.json" and checkpoint.verify(newest) is None:
        pytest.skip("the flipped byte is white space of the manifest")
    assert found == two / "step-00000001"
    assert len(problems) == 1
    assert "step-00000002" in problems[0]


def test_file_of_another_checkpoint_is_found_out(two: Path) -> None:
    (two / "step-00000002" / "model-00000.safetensors").write_bytes(
        (two / "step-00000001" / "model-00000.safetensors").read_bytes()
    )
    assert checkpoint.verify(two / "step-00000002") == "model-00000.safetensors was altered"


def test_renamed_folder_is_refused(two: Path) -> None:
    (two / "step-00000001").rename(two / "step-00000009")
    assert checkpoint.verify(two / "step-00000009") == "it is the checkpoint of step 1"


def of_other_content(name: str, content: Any) -> Callable[[Path], Any]:
    """Writes another file into a checkpoint, whose manifest then has its digest."""

    def change(folder: Path) -> None:
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
        if name != "manifest.json":
            manifest = json.loads((folder / "manifest.json").read_text())
            size_bytes = (folder / name).stat().st_size
            manifest["files"][name] = {"bytes": size_bytes, "digest": checkpoint.digest(folder / name)}
            (folder / "manifest.json").write_text(json.dumps(manifest))

    return change


def pipe(name: str) -> Callable[[Path], Any]:
    return lambda folder: ((folder / name).unlink(), os.mkfifo(folder / name))


class Flipping(io.FileIO):
    """A file in which one bit is not what was written."""

    def __init__(self, path: Path, at: int) -> None:
        super().__init__(path, "wb")
        self._left = at

    def write(self, piece: Any) -> int:
        found = bytearray(piece)
        if 0 <= self._left < len(found):
            found[self._left] ^= 4
        self._left -= len(found)
        return super().write(found)


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (of_other_content("manifest.json", "[" * 100_000), "cannot be read (RecursionError)"),
        (of_other_content("manifest.json", {"step": 2, "files": {}}), "cannot be read (KeyError)"),
        (pipe("manifest.json"), "its manifest.json is empty"),
        (pipe("model-00000.safetensors"), "model-00000.safetensors has 0 bytes instead of"),
    ],
)
def test_strange_files_are_named_and_passed_over(two: Path, damage: Callable[[Path], Any], problem: str) -> None:
    damage(two / "step-00000002")
    found, [said] = checkpoint.newest_good(two)
    assert found == two / "step-00000001" and problem in said


@pytest.mark.parametrize("name", [".DS_Store", ".nfs0000000012345"])
def test_files_that_systems_leave_everywhere_do_no_harm(two: Path, name: str) -> None:
    (two / "step-00000002" / name).write_bytes(b"\0\1")
    assert checkpoint.verify(two / "step-00000002") is None


@pytest.mark.parametrize("flips", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_a_byte_that_flips_on_its_way_to_the_disk_is_found(
    tmp_path: Path, flips: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The digests are of what was in memory; the run falls back to the checkpoint before."""
    state, opened, draws = training_state(), Path.open, random.Random(flips)
    first = save(tmp_path, trained(state, 1), Progress(step=1))
    sizes = {path.name: path.stat().st_size for path in save(tmp_path, state, Progress(step=2)).iterdir()}
    for _ in range(flips):
        victim = draws.choices(list(sizes), weights=list(sizes.values()))[0]
        place = draws.randrange(sizes[victim])

        def flipping(path: Path, mode: str = "r", name: str = victim, at: int = place, **named: Any) -> Any:
            return Flipping(path, at) if (path.name, mode) == (name, "wb") else opened(path, mode, **named)

        monkeypatch.setattr(Path, "open", flipping)
        newest = save(tmp_path, state, Progress(step=2))
        monkeypatch.undo()
        if checkpoint.verify(newest) is None:  # white space of the manifest: it says what it said
            text = (newest / "manifest.json").read_bytes()
            assert victim == "manifest.json" and chr(text[place]) not in "0123456789abcdef", (place, text)
            continue
        assert checkpoint.newest_good(tmp_path)[0] == first


def test_a_checkpoint_with_the_digests_of_earlier_versions_is_verified(two: Path) -> None:
    newest = two / "step-00000002"
    manifest = json.loads((newest / "manifest.json").read_text())
    for name, entry in manifest["files"].items():
        del entry["digest"]
        entry["sha256"] = hashlib.sha256((newest / name).read_bytes()).hexdigest()
    (newest / "manifest.json").write_text(json.dumps(manifest))
    assert checkpoint.verify(newest) is None
    weights = newest / "model-00000.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"?")
    assert checkpoint.verify(newest) == "model-00000.safetensors was altered"
    del manifest["files"]["state.json"]["sha256"]  # no digest at all
    (newest / "manifest.json").write_text(json.dumps(manifest))
    assert checkpoint.verify(newest)


def test_nothing_good_left_is_an_error_and_nothing_at_all_is_not(two: Path, tmp_path: Path) -> None:
    for folder in ("step-00000001", "step-00000002"):
        (two / folder / "state.json").unlink()
    with pytest.raises(UserError, match=r"no checkpoint.*is intact.*state\.json is missing.*--resume never"):
        checkpoint.newest_good(two)
    assert checkpoint.newest_good(tmp_path / "empty") == (None, [])


def test_partial_folder_is_not_a_checkpoint(two: Path) -> None:
    (two / "step-00000002").rename(two / ".partial-step-00000002")
    assert checkpoint.newest_good(two)[0] == two / "step-00000001"


def test_one_that_was_about_to_be_replaced_is_not_lost(two: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run is killed between the two moves that put another of the same step in its place."""
    aside, rename = two / ".partial-step-00000002", Path.rename
    aside.mkdir()

    def killed(path: Path, target: Path) -> Path:
        if path == aside:
            raise KeyboardInterrupt
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", killed)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.put_in_place(aside, two / "step-00000002")
    assert list(checkpoint.by_step(two)) == [1]
    assert checkpoint.newest_good(two) == (two / "step-00000002", [])


@pytest.mark.parametrize("failing", ["_safetensors", "sync", "complete"])
def test_failed_save_leaves_the_earlier_one_and_no_rest(
    two: Path, failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, failing, full)
    with pytest.raises(UserError, match=r"step-00000003 could not be written.*No space left"):
        save(two, training_state(), Progress(step=3))
    assert sorted(p.name for p in two.iterdir()) == ["step-00000001", "step-00000002"]
    assert checkpoint.newest_good(two)[0] == two / "step-00000002"


@pytest.mark.parametrize("error", [KeyError("own"), AttributeError("own")])
def test_bug_in_a_state_of_ones_own_is_not_told_as_a_disk_that_failed(two: Path, error: Exception) -> None:
    class Own(TrainingState):
        def blocks(self, rank: int) -> dict[str, dict[str, Block]]:
            raise error

    plain = training_state()
    with pytest.raises(type(error), match="own"):  # a traceback shows where
        save(two, Own(plain.model, plain.optimizer, {}), Progress(step=3))
    assert sorted(p.name for p in two.iterdir()) == ["step-00000001", "step-00000002"]


def test_rotation_removes_all_others_and_what_was_not_completed(tmp_path: Path) -> None:
    for step in range(1, 6):
        save(tmp_path, training_state(), Progress(step=step))
    (tmp_path / ".partial-step-00000009").mkdir()
    checkpoint.rotate(tmp_path, {1, 4, 5, 7})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000001", "step-00000004", "step-00000005"]


class Uploadable(nn.Linear):
    """As huggingface_hub's mixin makes one: its save_pretrained is another than transformers'."""

    def save_pretrained(self, *arguments: Any) -> None:
        raise NotImplementedError


def test_final_of_a_module_with_a_way_of_its_own_to_save(tmp_path: Path) -> None:
    TrainingState(Uploadable(2, 2), None, {}).save_pretrained(tmp_path, keep=True)
    assert load_file(tmp_path / "model.safetensors").keys() == {"weight", "bias"}


def test_a_model_that_has_grown_is_named(two: Path) -> None:
    state = training_state()
    cast("nn.Sequential", state.model).append(nn.Linear(2, 2))
    with pytest.raises(UserError, match=r"has no 3\.weight of 2 dimensions: it belongs to another model"):
        checkpoint.restore(two / "step-00000002", state)


def test_a_parameter_of_another_layout_continues_exactly(tmp_path: Path) -> None:
    """The fused kernel goes through the memory of a weight and of its moments together."""

    def transposed() -> TrainingState:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 6, bias=False))
        model[1].weight = nn.Parameter(torch.randn(4, 6).t())
        return TrainingState(model, torch.optim.AdamW(model.parameters(), lr=0.1, fused=True), IDENTITY)

    whole = trained(trained(transposed(), 3), 3)
    resumed = transposed()
    checkpoint.restore(save(tmp_path, trained(transposed(), 3), Progress(step=3)), resumed)
    assert_equal_states(trained(resumed, 3), whole)


def test_a_disk_that_fails_while_a_checkpoint_is_read_is_no_reason_to_remove_it(
    two: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*arguments: Any) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(checkpoint.StoredBlocks, "block", failing)
    with pytest.raises(UserError, match=r"step-00000002 cannot be read: Input/output error\. Keep it, and try again"):
        checkpoint.restore(two / "step-00000002", training_state())


@pytest.mark.parametrize(("number", "words"), [(5, "Input/output error"), (13, "Permission denied")])
def test_a_checkpoint_that_cannot_be_read_just_now_is_not_passed_over(
    two: Path, number: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An older one would be resumed, and this one removed."""

    def failing(*arguments: Any) -> None:
        raise OSError(number, words)

    monkeypatch.setattr(checkpoint, "digest", failing)
    with pytest.raises(UserError, match=rf"step-00000002 cannot be read: {words}\. Keep it, and try again; .* move it"):
        checkpoint.newest_good(two)


def test_what_cannot_be_stored_is_not_blamed_on_the_disk(tmp_path: Path) -> None:
    state = training_state()
    state.model.register_buffer("phases", torch.zeros(2, dtype=torch.complex128))
    with pytest.raises(UserError, match=r"^phases is torch\.complex128, which .* persistent=False"):
        save(tmp_path, state, Progress(step=1))
    assert list(tmp_path.iterdir()) == []


class Views(torch.nn.Module):
    """Weights that safetensors' own writer refuses: transposed, two views of one tensor, one that is expanded."""

    def __init__(self) -> None:
        super().__init__()
        both = torch.arange(12.0).view(2, 6)
        self.transposed = torch.nn.Parameter(torch.arange(6.0).view(2, 3).t())
        self.first, self.second = torch.nn.Parameter(both[0]), torch.nn.Parameter(both[1])
        self.register_buffer("expanded", torch.ones(1, 3).expand(2, 3))


def test_final_holds_weights_of_any_layout(tmp_path: Path) -> None:
    model = Views()
    TrainingState(model, None, {}).save_pretrained(tmp_path, keep=True)
    found = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert found.keys() == model.state_dict().keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in model.state_dict().items())


def test_the_same_step_again_takes_the_place_of_the_old_in_one_move(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is killed while the old one is removed has the new one."""
    folder = save(tmp_path, training_state(), Progress(step=1))

    def killed(path: Path, ignore_errors: bool) -> None:
        if path.exists():
            raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint.shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, training_state(), Progress(step=1, epoch=7))
    assert checkpoint.newest_good(tmp_path)[0] == folder
    assert checkpoint.restore(folder, training_state()).epoch == 7
    monkeypatch.undo()
    checkpoint.rotate(tmp_path, {1})
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_a_link_in_the_place_of_a_folder_gives_way_and_what_it_leads_to_stays(tmp_path: Path) -> None:
    (elsewhere := tmp_path / "elsewhere").mkdir()
    (elsewhere / "mine").write_text("kept")
    (tmp_path / "final").symlink_to(elsewhere)
    for content in ("one", "two"):
        (partial := tmp_path / "partial").mkdir()
        (partial / "file").write_text(content)
        checkpoint.put_in_place(partial, tmp_path / "final")
        assert (tmp_path / "final" / "file").read_text() == content
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere", "final"]
    assert (elsewhere / "mine").read_text() == "kept"


def test_manifest_lists_every_file_with_its_digest(two: Path) -> None:
    manifest = json.loads((two / "step-00000001" / "manifest.json").read_text())
    assert sorted(manifest["files"]) == sorted(set(FILES) - {"manifest.json"})
    assert all(len(entry["digest"]) == 32 for entry in manifest["files"].values())


class Cut:
    """A state of one (4, 3) tensor that is handed out as it is, and flattened."""

    identity, whole = IDENTITY, torch.arange(12.0).view(4, 3)

    def blocks(self, rank: int) -> dict[str, dict[str, Block]]:
        flat = Block(self.whole.flatten().clone(), (4, 3), (0,))
        return {"model": {"block": Block(self.whole, (4, 3), (0, 0)), "stretch": flat}, "optimizer": {}}

    def values(self) -> dict[str, Any]:
        return {}


@pytest.mark.parametrize("stored", ["block", "stretch"])
def test_blocks_and_stretches_are_read_from_each_other(stored: str, tmp_path: Path) -> None:
    """Engines that cut rows, and those that cut the flattened tensor, resume from each other."""
    state: Any = Cut()
    blocks = StoredBlocks(save(tmp_path, state, Progress(step=1)))
    assert torch.equal(blocks.block("model", stored, (0, 0), (4, 3)), state.whole)
    assert torch.equal(blocks.block("model", stored, (1, 1), (2, 2)), state.whole[1:3, 1:3])
    assert torch.equal(blocks.block("model", stored, (5,), (4,)), state.whole.flatten()[5:9])
    assert blocks.index["model"][stored]["shape"] == [4, 3]


def test_steps_of_nine_digits_come_after_those_of_eight(tmp_path: Path) -> None:
    for step in (100_000_000, 99_999_999, 5):
        (tmp_path / f"step-{step:08d}").mkdir()
    assert list(by_step(tmp_path)) == [5, 99_999_999, 100_000_000]


@pytest.mark.parametrize("keep", [True, False])
def test_no_rank_leaves_before_the_others_have_copied_what_is_whole(
    keep: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On cards those who keep nothing only queue their part of each gather, and might end before it is done."""
    met: list[Any] = []
    monkeypatch.setattr("train.state.exchange", lambda value: met.append(value) or [value])
    whole = TrainingState(torch.nn.Linear(2, 2), None, {}).whole_tensors(keep)
    assert sorted(whole) == ["bias", "weight"] * keep and len(met) == 1
