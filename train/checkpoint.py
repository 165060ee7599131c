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
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from train.errors import UserError
from train.records import Progress
from train.training_state import Part, RunState

MANIFEST = "manifest.json"
INDEX = "index.json"
PARTIAL = ".partial-"
WORD = "rank-"
"""Files in a partial checkpoint in which a rank tells what it wrote."""
POLL_SECONDS, WORD_SECONDS = 0.05, 60.0
"""How often one looks for them, and how long after all were written: a network's file system may show them late."""

UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, SafetensorError)
"""What reading files raises that hold something else than they should."""

Exchange: TypeAlias = Callable[[Any], list[Any]]
"""Gives every rank what each rank handed in, in the order of ranks."""


def alone(value: Any) -> list[Any]:
    """The :data:`Exchange` of a single process."""
    return [value]


class Writing:
    """The checkpoint ``folder/step-NNNNNNNN`` on its way to the disk; it appears only when it is complete.

    Made by all ranks together. Each takes a copy of what it holds, and a thread of its own writes that, so the copy
    is all that the run waits for. The ranks' threads find each other in the folder: one waits until all have left
    word there of what they wrote. The ranks themselves talk only in here and in :meth:`finish`.

    Args:
        copies: False where nothing changes the state before :meth:`finish`: then nothing is copied.

    Raises:
        UserError: on every rank, if the folder cannot be made.
    """

    def __init__(
        self,
        folder: Path,
        state: RunState,
        progress: Progress,
        rank: int = 0,
        exchange: Exchange = alone,
        copies: bool = True,
    ) -> None:
        self.final = folder / f"step-{progress.step:08d}"
        self.step = progress.step
        self._partial = folder / f"{PARTIAL}{self.final.name}"
        self._rank, self._exchange = rank, exchange
        try:
            self._ranks = len(_together(exchange, rank == 0, lambda: _make_afresh(self._partial)))
        except OSError as error:
            raise self._refusal(error) from None
        self._parts = copied(state.parts(rank)) if copies else state.parts(rank)
        self._values = {"progress": asdict(progress), "identity": dict(state.identity), **state.values()}
        self._error: BaseException | None = None
        self._own_part_is_done, self._all_are_done = threading.Event(), threading.Event()
        self._abandoned = threading.Event()
        # A daemon: a process that has to end does not wait for a disk.
        self._thread = threading.Thread(target=self._write, name="checkpoint", daemon=True)
        self._thread.start()

    def finish(self) -> Path:
        """Waits until the checkpoint is there. Called by all ranks together.

        Raises:
            UserError: on every rank, if one of them could not write its part; earlier checkpoints are untouched then.
        """
        try:
            self._own_part_is_done.wait()
            try:
                self._agree()
            except BaseException:
                self._abandoned.set()
                raise
            finally:
                self._all_are_done.set()
                self._thread.join()
            self._agree()
        except OSError as error:
            if self._rank == 0:
                shutil.rmtree(self._partial, ignore_errors=True)
            raise self._refusal(error) from None
        return self.final

    def _agree(self) -> None:
        def look() -> None:
            if self._error is not None:
                raise self._error

        _together(self._exchange, True, look)

    def wait(self, seconds: float) -> None:
        """Gives this rank's thread time to end, without asking other ranks."""
        self._thread.join(seconds)

    def _write(self) -> None:
        try:
            try:
                written = _write_parts(self._partial, self._parts, self._rank)
                self._parts = {}
                _leave_word(self._partial, self._rank, written)
            finally:
                self._own_part_is_done.set()
            if self._rank == 0:
                words = _words_of(self._partial, self._ranks, self._all_are_done, self._abandoned)
                if words is not None:
                    _complete(self._partial, self.final, self._values, words)
        except OSError as error:
            self._error = error
        except Exception as error:  # of safetensors, for one; the run has to hear of it in any case
            self._error = OSError(f"{type(error).__name__}: {error}")

    def _refusal(self, error: OSError) -> UserError:
        return UserError(
            f"the checkpoint of step {self.step} could not be written to {self.final.parent}: "
            f"{error.strerror or error}. Earlier checkpoints are untouched; free space or give another --output_dir."
        )


def save(folder: Path, state: RunState, progress: Progress, rank: int = 0, exchange: Exchange = alone) -> Path:
    """Writes a checkpoint and waits for it, see :class:`Writing`."""
    return Writing(folder, state, progress, rank, exchange, copies=False).finish()


def copied(parts: Mapping[str, Mapping[str, Part]]) -> dict[str, dict[str, Part]]:
    """``parts`` with tensors in host memory that nobody else has, so that training may go on."""
    copies = {
        section: {name: replace(part, tensor=_host_copy(part.tensor)) for name, part in named.items()}
        for section, named in parts.items()
    }
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return copies


def _host_copy(tensor: Tensor) -> Tensor:
    if tensor.device.type == "cpu":
        return tensor.clone()
    host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.device.type == "cuda")
    return host.copy_(tensor, non_blocking=True)


def _together(exchange: Exchange, acts: bool, action: Callable[[], Any]) -> list[Any]:
    """What each rank's ``action`` gave; an OSError of one is raised on all, so that none waits for another."""
    outcome: Any = None
    try:
        outcome = action() if acts else None
    except OSError as error:
        outcome = error
    outcomes = exchange(outcome)
    for failed in outcomes:
        if isinstance(failed, OSError):
            raise failed
    return outcomes


def _make_afresh(partial: Path) -> None:
    if partial.exists() or partial.is_symlink():
        _remove(partial)
    partial.mkdir(parents=True)


Written: TypeAlias = tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]]]
"""Bytes and digest by file; and by section and tensor its shape and where the block lies."""


def _write_parts(partial: Path, parts: Mapping[str, Mapping[str, Part]], rank: int) -> Written:
    """Writes one rank's blocks; a file a section, none for a section without blocks."""
    files, index = {}, {}
    for section, named in parts.items():
        if not named:
            continue
        path = partial / f"{section}-{rank:05d}.safetensors"
        save_file({name: part.tensor for name, part in named.items()}, path)
        _sync(path)
        files[path.name] = {"bytes": path.stat().st_size, "sha256": _digest(path)}
        index[section] = {
            name: {"shape": part.shape, "block": [path.name, part.offsets, tuple(part.tensor.shape)]}
            for name, part in named.items()
        }
    return files, index


def _leave_word(partial: Path, rank: int, written: Written) -> None:
    """Tells whoever reads the folder what this rank wrote; there at once or not at all."""
    aside = partial / f"{WORD}{rank:05d}.tmp"
    aside.write_text(json.dumps(written), encoding="utf-8")
    aside.rename(aside.with_suffix(".json"))


def _words_of(
    partial: Path, ranks: int, all_are_done: threading.Event, abandoned: threading.Event
) -> list[Written] | None:
    """What every rank wrote, once all have said so; None when one never will.

    Raises:
        OSError: all have said so, but not where this one reads.
    """
    paths = [partial / f"{WORD}{rank:05d}.json" for rank in range(ranks)]
    patience = WORD_SECONDS
    while missing := [path for path in paths if not path.exists()]:
        if abandoned.wait(POLL_SECONDS):
            return None
        if all_are_done.is_set():
            patience -= POLL_SECONDS
        if patience <= 0:
            raise OSError(f"{missing[0].name} of another host is not there: all hosts must share the folder")
    words: list[Written] = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    for path in paths:
        path.unlink()
    return words


def _complete(partial: Path, final: Path, values: Mapping[str, Any], written: Sequence[Written]) -> None:
    """What one rank does for all: the index, the rest of the state, the manifest, and the name."""
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
        files[name] = {"bytes": path.stat().st_size, "sha256": _digest(path)}
    manifest = partial / MANIFEST
    manifest.write_text(json.dumps({"step": values["progress"]["step"], "files": files}, indent=1), encoding="utf-8")
    _sync(manifest)
    _sync(partial)
    if final.exists():  # the same step again: after a run that stopped right here
        _remove(final)
    partial.rename(final)
    _sync(final.parent)


def restore(checkpoint: Path, state: RunState, allow_changes: bool = False) -> Progress:
    """Loads this rank's part of a verified checkpoint into ``state``, whatever number of ranks wrote it.

    Raises:
        UserError: the run it belongs to had other data, model, batch or seed, and that is not allowed.
    """
    try:
        stored = json.loads((checkpoint / "state.json").read_text(encoding="utf-8"))
        identity, progress = dict(stored["identity"]), Progress(**stored["progress"])
        blocks = StoredBlocks(checkpoint)
    except UNREADABLE as error:
        raise _unreadable(checkpoint, error) from None
    changed = [k for k, v in state.identity.items() if _plain(v) != identity.get(k)]
    if changed and not allow_changes:
        lines = "; ".join(f"{k}: was {identity.get(k)!r}, is {_plain(state.identity[k])!r}" for k in changed)
        raise UserError(
            f"{checkpoint} belongs to a run with other settings ({lines}). Give another --output_dir for a new run, "
            "--resume never to start afresh here, or --allow_changes_on_resume True to go on with the new ones."
        )
    if "optimizer" in changed:  # allowed or not
        raise UserError(
            f"{checkpoint} has the state of optimizer {identity.get('optimizer')}, which {state.identity['optimizer']} "
            "cannot use. Go on with the old one, or begin a new run from the weights in final/ (--model)."
        )
    try:
        state.restore(blocks, stored)
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
    """The :class:`train.training_state.Blocks` of a checkpoint's files."""

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
            if _digest(path) != expected["sha256"]:
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


def rotate(folder: Path, keep: int, best_step: int | None) -> None:
    """Removes all but the newest ``keep`` checkpoints and the best; to be called once the newest is in place."""
    for checkpoint in list(_checkpoints(folder))[:-keep]:
        if checkpoint.name != f"step-{best_step or 0:08d}":
            _remove(checkpoint)
    for leftover in folder.glob(f"{PARTIAL}*"):
        _remove(leftover)


def newest_step(folder: Path) -> int | None:
    """The step of the newest checkpoint, which is not verified here; None where there is none."""
    return max(map(_step_of, _checkpoints(folder)), default=None)


def remove_after(folder: Path, last: Path) -> None:
    """Removes the checkpoints of later steps than ``last``."""
    for checkpoint in reversed(list(_checkpoints(folder))):
        if _step_of(checkpoint) > _step_of(last):
            _remove(checkpoint)


def load_weights(state: RunState, checkpoint: Path) -> None:
    """Only the weights of a checkpoint, for the best one at the end."""
    state.restore_model(StoredBlocks(checkpoint))


def _checkpoints(folder: Path) -> Iterator[Path]:
    """Complete-looking checkpoints in the order of their steps."""
    yield from sorted(p for p in folder.glob("step-*") if p.is_dir() and _is_step(p.name[5:]))


def _is_step(digits: str) -> bool:
    return digits.isascii() and digits.isdigit()


def _remove(path: Path) -> None:
    """Removes a checkpoint; of a link only the link, for what it leads to is not the run's own."""
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path)


def _step_of(checkpoint: Path) -> int:
    return int(checkpoint.name[5:])


def _plain(value: Any) -> Any:
    """``value`` as JSON gives it back."""
    return json.loads(json.dumps(value))


def _has_size(path: Path, num_bytes: int) -> bool:
    return path.exists() and path.stat().st_size == num_bytes


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(2**22):
            digest.update(block)
    return digest.hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
