"""Checkpoints written in the background, complete or absent like any other, of weights that are finite and, under data
parallelism, equal on all ranks; and going back to one after divergence."""

import itertools
import json
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, wait
from dataclasses import asdict, replace
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor, nn

from train import checkpoint
from train.extras.endurance import DivergenceError
from train.extras.endurance.lost_rank import in_background
from train.extras.host_memory import free_host_bytes, page_locked
from train.figures import read_metrics
from train.records import Parts, Progress, Run, UserError, exchange
from train.state import Block, TrainingState

COMPARED_EVERY_STEPS = 100  # replicas: often enough to lose little, seldom enough to cost nothing
SHARE_FOR_A_COPY = 0.5  # of the host memory that is free
Blocks: TypeAlias = Mapping[str, Mapping[str, Block]]  # by section and name
NO_ROOM = "checkpoints: the host's memory has no room for a copy of the state, so training waits until each is written"


class Saving:
    """Writes a run's checkpoints; all methods but :meth:`wait` are called by all ranks together.

    With ``in_background`` each rank copies what it holds, and a thread of its own writes the copy; without it training
    waits for the disk. A thread of rank 0 completes it once ``gather`` has a text of each rank, under a name used once.
    """

    def __init__(self, in_background: bool, gather: Callable[[str, str], list[str]] | None = None) -> None:
        self._in_background, self._gather = in_background, gather or (lambda _, text: [text])
        # Of the checkpoint that is being written: what this rank has written of it, as JSON; and when it is complete.
        self._on_its_way: tuple[Future[str], Future[None]] | None = None
        self._written: Progress | None = None
        self._buffer = torch.empty(0)  # for copies from a card: page-locked, and used again
        self.replicas: nn.Module | None = None  # a model that every rank holds as a whole
        self._last_failed, self._compared_step = False, 0
        self.checkpoints_in_background = 0
        self.longest_stall_seconds: float | None = None  # for which training stood still for a checkpoint on the way

    def save(self, run: Run, state: TrainingState, progress: Progress, wait: bool) -> None:
        """Writes a checkpoint, in the background if nobody has to ``wait`` and the host's memory has room for a copy.

        A failure in the background is noted at the next line of the log. Two in a row, one that nobody would try
        again, or a tensor of a type that cannot be stored raise UserError.
        """
        started = time.perf_counter()
        self.refuse_drift(progress.step, is_saved=True)
        self.finish(run)
        if progress == self._written:  # a request to stop came when it was on its way already
            return
        # After a failure nothing is left to the background: the store that its ranks meet by may be gone.
        in_background = self._in_background and not (wait or self._last_failed)
        blocks = refuse_nonfinite(run, state, progress)
        if not in_background or not self._begin(run, state, progress, blocks):
            checkpoint.write(run.outputs.checkpoints, state, progress, run.accelerator.process_index)
            self._last_failed = False
            run.outputs.rotate(run, progress)
        if not wait:
            self.longest_stall_seconds = max(self.longest_stall_seconds or 0.0, time.perf_counter() - started)

    def look(self, run: Run, step: int) -> None:
        """Finishes what is written by now: a failure is noted while there is time to make room."""
        self.refuse_drift(step, is_saved=False)
        if self._on_its_way is not None and all(exchange(self._on_its_way[1].done())):
            self.finish(run)

    def refuse_drift(self, step: int, is_saved: bool) -> None:
        """Raises UserError, on all ranks together, if a replica differs; looks before each save, and now and then."""
        if self.replicas is None or not (is_saved or step - self._compared_step >= COMPARED_EVERY_STEPS):
            return
        self._compared_step, digests = step, exchange(digest(self.replicas.parameters()))
        usual, count = Counter(digests).most_common(1)[0]
        if others := [rank for rank, own in enumerate(digests) if own != usual or 2 * count <= len(digests)]:
            than = "those of other ranks" if len(others) < len(digests) else "each other"
            raise UserError(
                f"step {step}: the weights of rank {', '.join(map(str, others))} differ from {than}, and must not: a "
                "device or its memory may be faulty, your code may treat ranks differently, or a step left parameters "
                "without a gradient (--find_unused_parameters). Nothing is saved; older checkpoints had equal weights."
            )

    def finish(self, run: Run) -> None:
        """Waits for the checkpoint that is being written, and removes old ones once it is in place."""
        if self._on_its_way is None:
            return
        (own_part, whole), self._on_its_way = self._on_its_way, None  # an error in them would keep the copy
        try:
            # A rank that is lost breaks this, as it does every collective; the whole is not waited for.
            checkpoint.together(lambda: bool(own_part.result()))
            checkpoint.together(whole.result)
        except (OSError, UserError) as error:
            if run.accelerator.process_index == 0:
                shutil.rmtree(self._partial, ignore_errors=True)
            if isinstance(error, UserError):  # the next one would fail, too
                raise
            self._forgive(run, error)
        else:
            self._last_failed, self._written = False, self._progress
            run.outputs.rotate(run, self._progress)

    def wait(self, seconds: float) -> None:
        """Gives a checkpoint that is on its way time to be completed, without asking other ranks."""
        if self._on_its_way is not None:
            wait([self._on_its_way[1]], seconds)

    def _begin(self, run: Run, state: TrainingState, progress: Progress, blocks: Blocks) -> bool:
        """Whether every rank has room for a copy of its ``blocks``; then it is on its way, or that has failed."""
        rank = run.accelerator.process_index
        tensors = [block.tensor for named in blocks.values() for block in named.values()]
        size_bytes, held = sum(map(_place_bytes, tensors)), len(self._buffer)
        if not all(exchange(size_bytes <= held or size_bytes < SHARE_FOR_A_COPY * (free_host_bytes() + held))):
            run.outputs.note(NO_ROOM)
            return False
        is_on_card = any(tensor.is_cuda for tensor in tensors)
        if is_on_card and held < size_bytes:
            self._buffer = torch.empty(0)  # the smaller one goes first
            self._buffer = page_locked(size_bytes)
        buffer = self._buffer if is_on_card else torch.empty(size_bytes, dtype=torch.uint8, device="cpu")
        copies = copied(blocks, buffer)
        self.checkpoints_in_background += 1
        self._progress, self._final = progress, run.outputs.checkpoints / f"step-{progress.step:08d}"
        self._partial = self._final.with_name(f"{checkpoint.PARTIAL}{self._final.name}")
        try:
            checkpoint.together(lambda: checkpoint.make_empty(self._partial), rank == 0)
        except OSError as error:
            self._forgive(run, error)
            return True
        values = {"progress": asdict(progress), **state.values()}
        own_part = in_background(lambda: json.dumps(checkpoint.write_blocks(self._partial, copies, rank)))
        self._on_its_way = own_part, in_background(lambda: self._complete(own_part, values, rank))
        return True

    def _complete(self, own_part: Future[str], values: Mapping[str, object], rank: int) -> None:
        """Completes the checkpoint on rank 0, if all ranks have written their parts."""
        written = "" if own_part.exception() else own_part.result()
        everyones = self._gather(f"checkpoint {self.checkpoints_in_background}", written)
        if rank == 0 and all(everyones):
            checkpoint.complete(self._partial, self._final, values, list(map(json.loads, everyones)))

    def _forgive(self, run: Run, error: OSError) -> None:
        self._last_failed, refusal = True, checkpoint.refusal(self._final, error)
        run.outputs.note(f"{refusal} Training continues, and the next checkpoint is tried.")


def refuse_nonfinite(run: Run, state: TrainingState, progress: Progress) -> Blocks:
    """What this rank has to write; DivergenceError, on all ranks together, if some of what was trained is not finite.

    Handed on because DeepSpeed copies all of its state to the host for it.
    """
    trained = {name for name, parameter in state.model.named_parameters() if parameter.requires_grad}
    blocks = state.blocks(run.accelerator.process_index)
    held = {n: p.tensor for s in blocks for n, p in blocks[s].items() if s == "optimizer" or n in trained}

    def is_finite(tensor: Tensor) -> bool:
        # Looking at each element takes forty times as long as the sum, which else only an overflow makes infinite.
        # Tensors of bytes are integers, or of a type that cannot be added.
        return tensor.itemsize == 1 or bool(tensor.sum().isfinite()) or bool(tensor.isfinite().all())

    if names := list(itertools.chain(*exchange([name for name, tensor in held.items() if not is_finite(tensor)]))):
        what = f"step {progress.step}: {names[0]} is not finite any more, so nothing is saved."
        remedy = "Resume from an earlier checkpoint, with a lower learning rate or a longer warm-up."
        raise DivergenceError(f"{what} {remedy}", progress, progress.step - progress.consecutive_nonfinite_steps - 1)
    return blocks


def digest(tensors: Iterable[Tensor]) -> int:
    """A number made of all bits: a sum of integers is exact, in whatever order a device adds."""
    sums = []
    for flat in (tensor.detach().contiguous().view(-1) for tensor in tensors):
        fits = flat.nbytes % 8 == 0 and flat.storage_offset() * flat.element_size() % 8 == 0
        sums.append(flat.view(torch.int64 if fits else torch.uint8).sum())  # large ones fit, which is much faster
    return int(torch.stack(sums).sum())


def copied(blocks: Blocks, buffer: Tensor) -> dict[str, dict[str, Block]]:
    """``blocks`` with tensors in ``buffer``, (bytes,) of host memory, so that training may continue."""
    copies, place = {section: {} for section in blocks}, 0
    for section, name, block in ((s, n, p) for s, named in blocks.items() for n, p in named.items()):
        tensor = block.tensor
        host = buffer[place : place + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        place += _place_bytes(tensor)
        copies[section][name] = replace(block, tensor=host.copy_(tensor, non_blocking=tensor.is_cuda))
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return copies


def _place_bytes(tensor: Tensor) -> int:
    """What ``tensor`` takes in the buffer of a copy, where every type may begin."""
    return -(-tensor.nbytes // 64) * 64


def go_back(run: Run, parts: Parts, error: DivergenceError) -> Progress:
    """Restores an intact checkpoint from before training diverged, and removes later ones; by all ranks.

    As in PaLM's training (Chowdhery et al. 2022, section 5.1) weights, optimizer and schedule go back; the order of the
    data continues behind the last step. It takes the newest checkpoint that a later step has proved, else an unproved
    one; but never the one of the last rollback. Raises DivergenceError where there is no intact checkpoint from before.
    """
    outputs, lost, sound = run.outputs, error.progress, error.sound_step

    def choose() -> tuple[Path, list[int]] | None:
        there, rows = checkpoint.by_step(outputs.checkpoints), read_metrics(outputs.metrics)
        last = [row["step"] for row in rows if row["kind"] == "rollback"][-1:]
        for step in sorted({s for s in there if s <= sound} - {*last}, key=lambda step: (step == sound, -step)):
            if (problem := checkpoint.verify(there[step])) is None:
                for later in [number for number in reversed(there) if number > step]:
                    checkpoint.remove(there[later])
                skipped = [row["examples"] for row in rows if row["kind"] == "skipped" and row["step"] > step]
                return there[step], sorted({*itertools.chain(*skipped)})
            outputs.note(f"damaged checkpoint skipped: {there[step].name}: {problem}")
        return None

    if (found := outputs.from_main(choose)) is None:
        raise DivergenceError(f"{error} There is no intact checkpoint from before it.", lost, sound)
    kept = {name: getattr(lost, name) for name in ("epoch", "step_in_epoch", "nonfinite_steps")}
    before = replace(checkpoint.restore(found[0], parts.state), **kept, rollbacks=lost.rollbacks + 1)
    restored = run.extras.pipe("resumed", run, before, parts)
    outputs.sync_log()  # else a row that the disk has refused would follow those of the steps that are made again
    outputs.keep_log(restored)
    values = {"from_step": lost.step, "rollbacks": restored.rollbacks, "examples": found[1], "reason": str(error)}
    outputs.record(run, "rollback", restored.step, values)
    outputs.note(f"{error} Went back to the checkpoint of step {restored.step}; the data after it is skipped.")
    outputs.save(run, parts.state, restored, wait=True)  # a run that is killed now must not go back to this data
    return restored
