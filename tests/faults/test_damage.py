"""Checkpoints that something happened to: never trusted, passed over aloud, and never a silent start at step 0."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from faults.processes import run
from support import checkpoint_digests, write_recipe

from train import checkpoint
from train.records import EXIT_DONE, EXIT_ERROR, UserError

FLIPS = int(os.environ.get("FLIPPED_BYTES", "300"))
"""Of each file."""


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks with checkpoints of steps 5 and 6."""
    folder = tmp_path_factory.mktemp("run")
    its = ("--config", write_recipe(folder), "--output_dir", folder / "run", "--save_every_steps", 1)
    assert {end.status for end in run(its, folder / "logs", 2)} == {EXIT_DONE}
    return folder / "run"


@pytest.fixture
def two(pristine: Path, tmp_path: Path) -> Path:
    return shutil.copytree(pristine / "checkpoints", tmp_path / "checkpoints")


def empty(path: Path) -> None:
    path.write_bytes(b"")


def half(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def longer(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def swapped(path: Path) -> None:
    shutil.copy(path.parent.parent / "step-00000005" / path.name, path)


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGES: tuple[Callable[[Path], None], ...] = (empty, half, longer, swapped, folder, Path.unlink)


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda function: function.__name__)
def test_any_damage_to_any_file_falls_back_to_the_one_before(two: Path, damage: Callable[[Path], None]) -> None:
    newest = two / "step-00000006"
    files = sorted(path.name for path in newest.iterdir())
    assert len(files) == 5
    for name in files:
        original = (newest / name).read_bytes()
        damage(newest / name)
        if damage is swapped and (newest / name).read_bytes() == original:
            assert name == checkpoint.INDEX  # the same in both
            continue
        found, [problem] = checkpoint.newest_good(two)
        assert found == two / "step-00000005", name
        assert problem.startswith("step-00000006: ")
        shutil.rmtree(newest / name) if (newest / name).is_dir() else (newest / name).unlink(missing_ok=True)
        (newest / name).write_bytes(original)
        assert checkpoint.newest_good(two) == (newest, [])


def test_any_flipped_byte_is_found(two: Path) -> None:
    """In the manifest, one that changes nothing it says (a space) may pass."""
    newest, draws, passed = two / "step-00000006", random.Random(1), 0
    for path in sorted(newest.iterdir()):
        original = path.read_bytes()
        for place in draws.sample(range(len(original)), min(FLIPS, len(original))):
            altered = bytearray(original)
            altered[place] ^= 1 << draws.randrange(8)
            path.write_bytes(bytes(altered))
            if checkpoint.verify(newest) is None:
                assert path.name == checkpoint.MANIFEST and original[place : place + 1].isspace(), (path.name, place)
                passed += 1
        path.write_bytes(original)
    assert passed < FLIPS


def test_all_damaged_is_an_error_and_never_a_start_at_step_0(pristine: Path, tmp_path: Path) -> None:
    output = shutil.copytree(pristine, tmp_path / "run")
    weights = sorted(path.read_bytes() for path in (output / "checkpoints").glob("*/model-*"))
    for path in (output / "checkpoints").glob("*/model-*"):
        half(path)
    its = ("--config", pristine.parent / "recipe.yaml", "--output_dir", output, "--save_every_steps", 1)
    ended = run(its, tmp_path / "logs", 2)
    assert {end.status for end in ended} == {EXIT_ERROR}
    assert "no checkpoint in" in ended[0].said and "--resume never" in ended[0].said
    assert "Traceback" not in "".join(end.said for end in ended)
    assert len(weights) == len(list((output / "checkpoints").glob("*/model-*")))
    with pytest.raises(UserError, match=r"step-00000006.*step-00000005"):
        checkpoint.newest_good(output / "checkpoints")


def test_run_goes_on_from_the_one_before_and_ends_the_same(pristine: Path, tmp_path: Path) -> None:
    output = shutil.copytree(pristine, tmp_path / "run")
    expected = checkpoint_digests(output, 6)
    swapped(output / "checkpoints" / "step-00000006" / "optimizer-00000.safetensors")
    its = ("--config", pristine.parent / "recipe.yaml", "--output_dir", output, "--save_every_steps", 1)
    ended = run(its, tmp_path / "logs", 2)
    assert {end.status for end in ended} == {EXIT_DONE}, ended[0].said
    assert "damaged checkpoint skipped: step-00000006" in ended[0].said
    assert "at step 5" in ended[0].said
    assert checkpoint_digests(output, 6) == expected
