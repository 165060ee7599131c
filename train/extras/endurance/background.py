"""Writes checkpoints in the background: a copy of the state, a thread per rank; complete or absent like any other."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from train import checkpoint
from train.checkpoint import Written
from train.extras.host_memory import free_host_bytes
from train.records import Progress, Run, UserError, exchange
from train.state import Part, TrainingState

WORD = "rank-"
"""Files in a partial checkpoint in which a rank says what it wrote."""
POLL_SECONDS, WORD_SECONDS = 0.05, 60.0
"""How often one looks for them, and how long after all were written: a network's file system may show them late."""
SHARE_FOR_A_COPY = 0.5
"""Of the host memory that is free, at most this much goes to the copy of a state."""
NO_ROOM = "checkpoints: the host's memory has no room for a copy of the state, so training waits until each is written"


class Saving:
    """Writes a run's checkpoints; all methods but :meth:`wait` are called by all ranks together.

    Args:
        in_background: False: wait for the disk, and copy nothing.
    """

    def __init__(self, in_background: bool) -> None:
        self._in_background, self._writing, self._last_failed = in_background, None, False
        self.checkpoints_in_background = 0
        self.stalls_seconds: list[float] = []
        """How long training stood still for each checkpoint on the way."""

    _writing: Writing | None

    def save(self, run: Run, state: TrainingState, progress: Progress, wait: bool) -> None:
        """Writes a checkpoint, in the background if nobody has to ``wait`` and the host's memory has room for a copy.

        One that fails in the background is noted when the next one is due; two in a row end the run.

        Raises:
            UserError: it cannot be written and nobody would try again, or the one before it could not be written.
        """
        started = time.perf_counter()
        self.finish(run)
        if wait or not self._in_background or not self._begin(run, state, progress):
            checkpoint.write(run.outputs.checkpoints, state, progress, run.accelerator)
            self._last_failed = False
            run.outputs.rotate(run, progress)
        if not wait:
            self.stalls_seconds.append(time.perf_counter() - started)

    def finish(self, run: Run) -> None:
        """Waits for the checkpoint that is being written, and removes old ones once it is in place."""
        writing, self._writing = self._writing, None
        if writing is None:
            return
        try:
            writing.finish()
        except UserError as error:
            self._forgive(run, error)
            return
        self._last_failed = False
        run.outputs.rotate(run, writing.progress)

    def wait(self, seconds: float) -> None:
        """Gives this rank's thread time to end, without asking other ranks."""
        if self._writing is not None:
            self._writing.wait(seconds)

    def _begin(self, run: Run, state: TrainingState, progress: Progress) -> bool:
        """Whether every rank has room for a copy of its part; then it is on its way, or that has failed."""
        parts = state.parts(run.accelerator.process_index)
        size_bytes = sum(part.tensor.nbytes for named in parts.values() for part in named.values())
        if not all(exchange(size_bytes < SHARE_FOR_A_COPY * free_host_bytes(), run.accelerator.num_processes)):
            if NO_ROOM not in run.outputs.notes:
                run.outputs.note(NO_ROOM)
            return False
        self.checkpoints_in_background += 1
        try:
            self._writing = Writing(run, state, progress, parts)
        except UserError as error:
            self._forgive(run, error)
        return True

    def _forgive(self, run: Run, error: UserError) -> None:
        if self._last_failed:
            raise error
        self._last_failed = True
        run.outputs.note(f"{error} Training continues, and the next checkpoint is tried.")


class Writing:
    """A checkpoint on its way to the disk; it appears only when it is complete.

    Made by all ranks together. Each copies what it holds, and a thread of its own writes the copy. The ranks' threads
    find each other in the folder: rank 0's waits until all have left word there of what they wrote. The ranks
    themselves exchange something only in here and in :meth:`finish`.

    Raises:
        UserError: on every rank, if the folder cannot be made.
    """

    def __init__(
        self, run: Run, state: TrainingState, progress: Progress, parts: Mapping[str, Mapping[str, Part]]
    ) -> None:
        self.progress, self._accelerator = progress, run.accelerator
        self._rank, self._num_ranks = run.accelerator.process_index, run.accelerator.num_processes
        self._final = run.outputs.checkpoints / f"step-{progress.step:08d}"
        self._partial = self._final.with_name(f"{checkpoint.PARTIAL}{self._final.name}")
        try:
            checkpoint.together(self._accelerator, lambda: checkpoint.make_empty(self._partial), self._rank == 0)
        except OSError as error:
            raise checkpoint.refusal(self._final, error) from None
        self._parts, self._values = copied(parts), checkpoint.values_of(state, progress)
        self._error: Exception | None = None
        self._own_part_is_done, self._all_are_done = threading.Event(), threading.Event()
        self._abandoned = threading.Event()
        # A daemon: a process that has to end does not wait for a disk.
        self._thread = threading.Thread(target=self._write, name="checkpoint", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Waits until the checkpoint is there. Called by all ranks together.

        Raises:
            UserError: on every rank, if one of them could not write its part; earlier checkpoints are untouched then.
        """
        try:
            self._own_part_is_done.wait()
            try:
                checkpoint.together(self._accelerator, self._raise_its_error)
            except BaseException:
                self._abandoned.set()
                raise
            finally:
                self._all_are_done.set()
                self._thread.join()
            checkpoint.together(self._accelerator, self._raise_its_error)
        except OSError as error:
            if self._rank == 0:
                shutil.rmtree(self._partial, ignore_errors=True)
            raise checkpoint.refusal(self._final, error) from None

    def wait(self, seconds: float) -> None:
        """Gives this rank's thread time to end, without asking other ranks."""
        self._thread.join(seconds)

    def _raise_its_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _write(self) -> None:
        try:
            try:
                written = checkpoint.write_parts(self._partial, self._parts, self._rank)
                self._parts = {}
                _leave_word(self._partial, self._rank, written)
            finally:
                self._own_part_is_done.set()
            if self._rank == 0 and (words := self._words()) is not None:
                checkpoint.complete(self._partial, self._final, self._values, words)
        except Exception as error:  # the run has to hear of it in any case
            self._error = error

    def _words(self) -> list[Written] | None:
        """What every rank wrote, once all have said so; None if one never will.

        Raises:
            OSError: all have said so, but not where this rank reads.
        """
        paths = [self._partial / f"{WORD}{rank:05d}.json" for rank in range(self._num_ranks)]
        patience = WORD_SECONDS
        while missing := [path for path in paths if not path.exists()]:
            if self._abandoned.wait(POLL_SECONDS):
                return None
            if self._all_are_done.is_set():
                patience -= POLL_SECONDS
            if patience <= 0:
                raise OSError(f"{missing[0].name} of another host is not there: all hosts must share the folder")
        words: list[Written] = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
        for path in paths:
            path.unlink()
        return words


def _leave_word(partial: Path, rank: int, written: Written) -> None:
    """Tells whoever reads the folder what this rank wrote; there at once or not at all."""
    aside = partial / f"{WORD}{rank:05d}.tmp"
    aside.write_text(json.dumps(written), encoding="utf-8")
    aside.rename(aside.with_suffix(".json"))


def copied(parts: Mapping[str, Mapping[str, Part]]) -> dict[str, dict[str, Part]]:
    """``parts`` with tensors in host memory that nobody else has, so that training may continue."""
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
