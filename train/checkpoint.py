"""Checkpoints that are complete or absent: written aside, digested, synced, renamed, and verified before use.

A checkpoint is a folder ``checkpoints/step-NNNNNNNN`` of safetensors and JSON. It holds weights, optimizer, loss
scaler and progress; the order of the data and all randomness are functions of the progress and the configuration, so
it needs no generator's state. Every rank writes the blocks of tensors that it alone holds, ``index.json`` says which
block is where, and a run that resumes reads the blocks that it needs.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from train.records import Progress, UserError, exchange
from train.state import Part, RunState

if TYPE_CHECKING:
    from accelerate import Accelerator

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
    present = json.loads(json.dumps(dict(state.identity)))
    # An option of an extra that is not here any more counts as switched off.
    changed = [name for name in {**present, **identity} if (present.get(name) or None) != (identity.get(name) or None)]
    if changed and not allow_changes:
        lines = "; ".join(f"{name}: was {identity.get(name)!r}, is {present.get(name)!r}" for name in changed)
        raise UserError(
            f"{checkpoint} belongs to a run with other settings ({lines}). Give another --output_dir for a new run, "
            "--resume never to start from scratch here, or --allow_changes_on_resume to continue with the new ones."
        )
    if "optimizer" in changed:  # allowed or not
        raise UserError(
            f"{checkpoint} has the state of optimizer {identity.get('optimizer')}, which {present.get('optimizer')} "
            "cannot use. Continue with the old one, or begin a new run from the weights in final/ (--model)."
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
    """For files that are as the manifest says, but not those of a checkpoint of this template."""
    return UserError(
        f"{checkpoint} is intact but cannot be read ({type(error).__name__}: {' '.join(str(error).split())[:200]}): "
        "something else wrote it, or another version. Remove it, or start from scratch with --resume never."
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
    """The newest checkpoint at or before ``until_step`` that passes verification, and why newer ones did not.

    Raises:
        UserError: there are checkpoints, but none is intact; starting from scratch silently would be worse.
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
            f"no checkpoint in {folder} is intact ({'; '.join(problems)}). Restore one from a copy, or start from "
            "scratch with --resume never."
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


def rotate(folder: Path, newest: int, best_step: int | None, sound_steps: Sequence[int], keep_bests: bool) -> None:
    """Removes old checkpoints; to be called once the newest is in place.

    Args:
        newest: this many of the newest stay, and the one of ``best_step``.
        sound_steps: for each the newest checkpoint at or before it stays: a run may have to go back to it.
        keep_bests: the best of each that stays also stays: a run that resumes from there will want it.
    """
    checkpoints = list(_checkpoints(folder))
    kept = checkpoints[-newest:]
    for step in sound_steps:
        kept += [checkpoint for checkpoint in checkpoints if _step_of(checkpoint) <= step][-1:]
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
    yield from sorted(p for p in folder.glob("step-*") if p.is_dir() and re.fullmatch("[0-9]+", p.name[5:]))


def remove(path: Path) -> None:
    """Removes a checkpoint; of a link only the link, because what it leads to is not the run's own."""
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


def digest(path: Path) -> str:
    """SHA-256 of a file."""
    found = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(2**22):
            found.update(block)
    return found.hexdigest()


Written: TypeAlias = tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]]]
"""Bytes and digest by file; and by section and tensor its shape and where the block lies."""


def write(folder: Path, state: RunState, progress: Progress, accelerator: Accelerator) -> None:
    """Writes the checkpoint ``folder/step-NNNNNNNN``; it appears only when it is complete. Called by all ranks.

    Raises:
        UserError: on every rank, if one of them could not write its part; earlier checkpoints are untouched then.
    """
    final, rank = folder / f"step-{progress.step:08d}", accelerator.process_index
    partial = folder / f"{PARTIAL}{final.name}"
    try:
        together(accelerator, lambda: make_empty(partial), rank == 0)
        written = together(accelerator, lambda: write_parts(partial, state.parts(rank), rank))
        values = values_of(state, progress)
        together(accelerator, lambda: complete(partial, final, values, written), rank == 0)
    except OSError as error:
        if rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise refusal(final, error) from None


def together(accelerator: Accelerator, action: Callable[[], Any], acts: bool = True) -> list[Any]:
    """What each rank's ``action`` gave; an OSError of one is raised on all, so that none waits for another."""
    try:
        outcome = action() if acts else None
    except OSError as error:
        outcome = error
    except Exception as error:  # of safetensors, for one
        outcome = OSError(f"{type(error).__name__}: {error}")
    outcomes = exchange(outcome, accelerator.num_processes)
    for failed in outcomes:
        if isinstance(failed, OSError):
            raise failed
    return outcomes


def values_of(state: RunState, progress: Progress) -> dict[str, Any]:
    """What ``state.json`` holds."""
    return {"progress": asdict(progress), "identity": dict(state.identity), **state.values()}


def refusal(final: Path, error: OSError) -> UserError:
    """That the checkpoint ``final`` could not be written."""
    return UserError(
        f"the checkpoint {final.name} could not be written to {final.parent}: {error.strerror or error}. Earlier "
        "checkpoints are untouched; free space or give another --output_dir."
    )


def make_empty(partial: Path) -> None:
    """Makes the folder of a checkpoint that is being written."""
    if partial.exists() or partial.is_symlink():
        remove(partial)
    partial.mkdir(parents=True)


def write_parts(partial: Path, parts: Mapping[str, Mapping[str, Part]], rank: int) -> Written:
    """Writes one rank's blocks; a file a section, none for a section without blocks."""
    files, index = {}, {}
    for section, named in parts.items():
        if not named:
            continue
        path = partial / f"{section}-{rank:05d}.safetensors"
        save_file({name: part.tensor for name, part in named.items()}, path)
        _sync(path)
        files[path.name] = {"bytes": path.stat().st_size, "sha256": digest(path)}
        index[section] = {
            name: {"shape": part.shape, "block": [path.name, part.offsets, tuple(part.tensor.shape)]}
            for name, part in named.items()
        }
    return files, index


def complete(partial: Path, final: Path, values: Mapping[str, Any], written: Sequence[Written]) -> None:
    """Index, the rest of the state, manifest and final name: done by one rank when all have written their parts."""
    files: dict[str, dict[str, Any]] = {}
    index: dict[str, dict[str, Any]] = {"model": {}, "optimizer": {}}
    for rank_files, rank_index in written:
        files.update(rank_files)
        for section, named in rank_index.items():
            for name, entry in named.items():
                whole = index[section].setdefault(name, {"shape": entry["shape"], "blocks": []})
                whole["blocks"].append(entry["block"])
    missing = [name for name, file in files.items() if not _has_size(partial / name, file["bytes"])]
    if missing:
        raise OSError(f"{missing[0]} of another host is not there: all hosts must share the folder")
    for name, content in ((INDEX, index), ("state.json", values)):
        path = partial / name
        path.write_text(json.dumps(content, indent=1), encoding="utf-8")
        _sync(path)
        files[name] = {"bytes": path.stat().st_size, "sha256": digest(path)}
    manifest = partial / MANIFEST
    manifest.write_text(json.dumps({"step": values["progress"]["step"], "files": files}, indent=1), encoding="utf-8")
    _sync(manifest)
    _sync(partial)
    if final.exists():  # the same step again: after a run that stopped right here
        remove(final)
    partial.rename(final)
    _sync(final.parent)


def _has_size(path: Path, num_bytes: int) -> bool:
    return path.exists() and path.stat().st_size == num_bytes


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
