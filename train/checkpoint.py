"""Checkpoints that are complete or absent: written aside, digested, synced, renamed, and verified before use.

A checkpoint is a folder ``checkpoints/step-NNNNNNNN`` of safetensors and JSON. It holds weights, optimizer, loss
scaler and progress; the order of the data and all randomness are functions of the progress and the configuration, so
no generator's state is in it. Every rank writes the blocks of tensors that it alone holds, ``index.json`` tells which
block is where, and whoever resumes reads the blocks that it needs.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from train.errors import UserError
from train.records import Progress
from train.state import RunState

MANIFEST = "manifest.json"
INDEX = "index.json"
PARTIAL = ".partial-"
UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, SafetensorError)
"""What reading files raises that hold something else than they should."""


def restore(checkpoint: Path, state: RunState, allow_changes: bool = False) -> Progress:
    """Loads this rank's part of a verified checkpoint into ``state``, whatever number of ranks wrote it.

    Raises:
        UserError: the run it belongs to had other data, model, batch or seed, and that is not allowed.
    """
    try:
        stored = json.loads((checkpoint / "state.json").read_text(encoding="utf-8"))
        identity, progress = dict(stored["identity"]), Progress.of(stored["progress"])
        blocks = StoredBlocks(checkpoint)
    except UNREADABLE as error:
        raise _unreadable(checkpoint, error) from None
    present = _plain(dict(state.identity))
    changed = [name for name in {**present, **identity} if present.get(name) != identity.get(name)]
    if changed and not allow_changes:
        lines = "; ".join(f"{name}: was {identity.get(name)!r}, is {present.get(name)!r}" for name in changed)
        raise UserError(
            f"{checkpoint} belongs to a run with other settings ({lines}). Give another --output_dir for a new run, "
            "--resume never to start afresh here, or --allow_changes_on_resume True to go on with the new ones."
        )
    if "optimizer" in changed:  # allowed or not
        raise UserError(
            f"{checkpoint} has the state of optimizer {identity.get('optimizer')}, which {present.get('optimizer')} "
            "cannot use. Go on with the old one, or begin a new run from the weights in final/ (--model)."
        )
    try:
        state.restore(blocks, stored)
        if "global_batch_size" in changed:  # as many steps of another size would be other examples
            examples = progress.step_in_epoch * identity["global_batch_size"]
            progress = replace(progress, step_in_epoch=examples // present["global_batch_size"])
    except torch.OutOfMemoryError:
        raise
    except UNREADABLE as error:
        raise _unreadable(checkpoint, error) from None
    return progress


def _unreadable(checkpoint: Path, error: Exception) -> UserError:
    """Of files that are as the manifest says: whoever wrote it did not write a checkpoint of this template."""
    return UserError(
        f"{checkpoint} is intact but cannot be read ({type(error).__name__}: {' '.join(str(error).split())[:200]}): "
        "it was not written by this template, or by another version. Remove it, or start afresh with --resume never."
    )


class StoredBlocks:
    """The :class:`train.state.Blocks` of a checkpoint's files."""

    def __init__(self, checkpoint: Path) -> None:
        self._folder = checkpoint
        self._index = json.loads((checkpoint / INDEX).read_text(encoding="utf-8"))
        self._files: dict[str, Any] = {}

    def names(self, section: str) -> Iterator[str]:
        """The tensors of ``section``."""
        return iter(self._index[section])

    def whole_shape(self, section: str, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        return tuple(self._index[section][name]["shape"])

    def block(self, section: str, name: str, offsets: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        """A block of it, put together from the stored blocks that it overlaps.

        A stretch of the tensor flattened may be asked for as well, and stretches may be what is stored.
        """
        entry = self._index[section].get(name)
        if entry is None or len(shape) not in (1, len(entry["shape"])):
            raise UserError(f"{self._folder} has no {name} of {len(shape)} dimensions: it is of another model.")
        whole, flat = tuple(entry["shape"]), any(len(block[1]) != len(entry["shape"]) for block in entry["blocks"])
        if flat != (len(shape) != len(whole)):
            if flat:
                tensor = self.block(section, name, (0,), (math.prod(whole),)).view(whole)
            else:
                tensor = self.block(section, name, (0,) * len(whole), whole).flatten()
            return tensor[tuple(slice(begin, begin + size) for begin, size in zip(offsets, shape, strict=True))]
        result: Tensor | None = None
        for file, stored_offsets, stored_shape in entry["blocks"]:
            if list(offsets) == stored_offsets and list(shape) == stored_shape:
                return self._file(file).get_tensor(name)
            here, there = [], []
            for begin, size, stored_begin, stored_size in zip(
                offsets, shape, stored_offsets, stored_shape, strict=True
            ):
                first, last = max(begin, stored_begin), min(begin + size, stored_begin + stored_size)
                here.append(slice(first - begin, max(first, last) - begin))
                there.append(slice(first - stored_begin, max(first, last) - stored_begin))
            if all(part.stop > part.start for part in here):
                found = self._file(file).get_slice(name)[tuple(there)]
                result = torch.empty(shape, dtype=found.dtype) if result is None else result
                result[tuple(here)] = found
        assert result is not None
        return result

    def _file(self, name: str) -> Any:
        if name not in self._files:
            self._files[name] = safe_open(str(self._folder / name), framework="pt")
        return self._files[name]


def newest_good(folder: Path, until_step: int | None = None) -> tuple[Path | None, list[str]]:
    """The newest checkpoint that passes verification, not after ``until_step``, and why newer ones did not.

    Raises:
        UserError: there are checkpoints, but none is good; starting afresh silently would be worse.
    """
    problems = []
    for checkpoint in reversed(list(_checkpoints(folder))):
        if until_step is not None and _step_of(checkpoint) > until_step:
            continue
        problem = verify(checkpoint)
        if problem is None:
            return checkpoint, problems
        problems.append(f"{checkpoint.name}: {problem}")
    if problems:
        raise UserError(
            f"no checkpoint in {folder} is intact ({'; '.join(problems)}). Restore one from a copy, or start afresh "
            "with --resume never."
        )
    return None, []


def verify(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint: a file missing, truncated, altered or foreign; None when it is intact."""
    try:
        if checkpoint.is_symlink() or (checkpoint / MANIFEST).is_symlink():
            return "it is a link to somewhere else"
        manifest = json.loads((checkpoint / MANIFEST).read_text())
        files: dict[str, dict[str, Any]] = manifest["files"]
        for name, expected in files.items():
            path = checkpoint / name
            if path.is_symlink() or path.name != name:
                return f"{name} is not a plain file of it"
            if path.stat().st_size != expected["bytes"]:
                return f"{name} has {path.stat().st_size} bytes instead of {expected['bytes']}"
            if digest(path) != expected["sha256"]:
                return f"{name} was altered"
        foreign = {p.name for p in checkpoint.iterdir()} - files.keys() - {MANIFEST}
        if foreign:
            return f"{min(foreign)} does not belong to it"
        if f"step-{manifest['step']:08d}" != checkpoint.name:
            return f"it is the checkpoint of step {manifest['step']}"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{MANIFEST} cannot be read ({type(error).__name__})"
    return None


def rotate(
    folder: Path, keep: int, best_step: int | None, sound_step: int | None = None, keep_bests: bool = False
) -> None:
    """Removes all but the newest ``keep`` checkpoints and the best; to be called once the newest is in place.

    Args:
        sound_step: keeps the newest one not after this step too, for a run that may have to go back.
        keep_bests: keeps the best of each that is kept: a run that resumes from there will want it.
    """
    checkpoints = list(_checkpoints(folder))
    kept = checkpoints[-keep:]
    if sound_step is not None:
        kept += [checkpoint for checkpoint in checkpoints if _step_of(checkpoint) <= sound_step][-1:]
    bests = {best_step, *(_best_step_of(checkpoint) for checkpoint in kept if keep_bests)}
    for checkpoint in checkpoints:
        if checkpoint not in kept and _step_of(checkpoint) not in bests:
            remove(checkpoint)
    for leftover in folder.glob(f"{PARTIAL}*"):
        remove(leftover)


def newest_step(folder: Path) -> int | None:
    """The step of the newest checkpoint, which is not verified here; None where there is none."""
    return max(map(_step_of, _checkpoints(folder)), default=None)


def later_than(folder: Path, step: int) -> list[Path]:
    """The checkpoints of later steps."""
    return [checkpoint for checkpoint in _checkpoints(folder) if _step_of(checkpoint) > step]


def remove_after(folder: Path, last: Path) -> None:
    """Removes the checkpoints of later steps than ``last``."""
    for checkpoint in reversed(later_than(folder, _step_of(last))):
        remove(checkpoint)


def load_weights(state: RunState, checkpoint: Path) -> None:
    """Only the weights of a checkpoint, for the best one at the end."""
    state.restore_model(StoredBlocks(checkpoint))


def _checkpoints(folder: Path) -> Iterator[Path]:
    """Complete-looking checkpoints in the order of their steps."""
    yield from sorted(p for p in folder.glob("step-*") if p.is_dir() and _is_step(p.name[5:]))


def _is_step(digits: str) -> bool:
    return digits.isascii() and digits.isdigit()


def remove(path: Path) -> None:
    """Removes a checkpoint; of a link only the link, for what it leads to is not the run's own."""
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path)


def _step_of(checkpoint: Path) -> int:
    return int(checkpoint.name[5:])


def _best_step_of(checkpoint: Path) -> int | None:
    try:
        return json.loads((checkpoint / "state.json").read_text(encoding="utf-8"))["progress"]["best_step"]
    except UNREADABLE:
        return None  # it is damaged, and nobody will resume from it


def _plain(value: Any) -> Any:
    """``value`` as JSON gives it back."""
    return json.loads(json.dumps(value))


def digest(path: Path) -> str:
    """SHA-256 of a file."""
    found = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(2**22):
            found.update(block)
    return found.hexdigest()
