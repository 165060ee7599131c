"""Writes checkpoints beside training: a copy of the state, a thread a rank, complete or absent."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors.torch import save_file
from torch import Tensor

from train.checkpoint import INDEX, MANIFEST, PARTIAL, digest, remove
from train.extras.endurance.host_memory import free_host_bytes
from train.records import Progress, UserError
from train.state import Part, RunState

WORD = "rank-"
"""Files in a partial checkpoint in which a rank tells what it wrote."""
POLL_SECONDS, WORD_SECONDS = 0.05, 60.0
"""How often one looks for them, and how long after all were written: a network's file system may show them late."""

SHARE_FOR_A_COPY = 0.5
"""Of the host memory that is free, at most so much goes to the copy of a state."""

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

    Attributes:
        needs_waiting: nothing was copied, also for want of host memory on some rank: :meth:`finish` has to come next.

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
        parts = state.parts(rank)
        self.needs_waiting = not (copies and all(exchange(_size_bytes(parts) < SHARE_FOR_A_COPY * free_host_bytes())))
        self._parts = parts if self.needs_waiting else copied(parts)
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


def _size_bytes(parts: Mapping[str, Mapping[str, Part]]) -> int:
    return sum(part.tensor.nbytes for named in parts.values() for part in named.values())


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
        remove(partial)
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
        files[path.name] = {"bytes": path.stat().st_size, "sha256": digest(path)}
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
