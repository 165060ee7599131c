"""What the stages hand to each other: small records, all but Run frozen, and the errors a person can cause."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import datasets
    import numpy as np
    import torch
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer
    from torch import nn

    from train import extras
    from train.batching import Batches
    from train.config import Config
    from train.data import PreparedData
    from train.launch import Launch
    from train.outputs import Outputs
    from train.state import TrainingState
    from train.step import Engine

STARTED = time.perf_counter()  # of this process: main imports this module before any library
SPLITS = "train", "validation", "test"  # of a corpus, in this order; the last may be missing
IGNORE = -100  # a label that is not a target: padding, or a position that is only context

EXIT_DONE, EXIT_ERROR, EXIT_USAGE = 0, 1, 2
EXIT_STOPPED = 85  # by a signal; the same command resumes from the checkpoint that was written
EXIT_INTERRUPTED = 130  # at once, by a second interrupt; the number that shells report for it


class UserError(Exception):
    """Something the person who started the run can fix: shown as one message, without a traceback."""

    exit_status = EXIT_ERROR
    weights_intact = False  # of a step that failed: whether weights and optimizer are, on every rank, as before it


class UsageError(UserError):
    """A wrong flag, key, value or combination, found before anything is loaded."""

    exit_status = EXIT_USAGE


class StopAtOnce(BaseException):  # not an Exception: libraries that it passes through must not handle it
    """Someone asked this process to stop in the middle of something that is not kept."""


def one_line(error: object, limit: int = 500) -> str:
    """What ``error`` says, for the middle of a message."""
    said = repr(error) if isinstance(error, KeyError) else str(error)  # which is only the key
    return " ".join(said.split())[:limit]


@dataclass
class Run:
    """What nearly every stage needs; built once and handed on."""

    config: Config
    launch: Launch
    accelerator: Accelerator
    extras: extras.Extras
    outputs: Outputs
    stop: list[str]  # signals that asked this process to stop, by name; endurance listens to them
    is_planned: bool = False  # nothing is trained: the step is only predicted, perhaps for another machine


@dataclass(frozen=True)
class Parts:
    """What the stages before have built for the loop."""

    data: PreparedData
    batches: Batches
    model: nn.Module  # prepared train.model.ModelWithLoss
    sizes: tuple[int, int]  # (trained, all) parameters, before sharding
    optimizer: AcceleratedOptimizer
    engine: Engine
    state: TrainingState  # what checkpoints hold
    total_steps: int


@dataclass(frozen=True)
class Corpus:
    """Documents by split, before tokenisation: columns ``text``, ``source`` and, for classification, ``label``."""

    name: str
    splits: dict[str, datasets.Dataset]  # by SPLITS
    notes: tuple[str, ...] = ()  # what a person should know: records skipped, and where
    classes: tuple[str, ...] = ()  # in the order of a dataset that numbers them itself


@dataclass(frozen=True)
class MicroBatch:
    """The examples of one forward/backward on one device."""

    inputs: dict[str, Any]  # of the forward, with input_ids (B, S, ...): tensors, or objects with to and pin_memory
    labels: torch.Tensor  # aligned with the logits, (B, S) or (B,); IGNORE is not a target
    num_targets: int  # labels that are not IGNORE: the gradient is divided by their sum, so count again what you cut
    example_ids: tuple[int, ...]  # position of each in its split; () for a dummy batch, which keeps ranks in step
    num_tokens: int  # input positions that hold a token of an example; the others are padding

    @property
    def shape(self) -> tuple[int, int]:
        """(B, S)."""
        return tuple(self.inputs["input_ids"].shape[:2])

    def to(self, device: torch.device) -> MicroBatch:
        """This batch on ``device``; asynchronous from pinned memory."""
        return self._each(lambda value: value.to(device, non_blocking=True))

    def pin_memory(self) -> MicroBatch:
        """This batch in page-locked memory, or as it is if no more can be locked; called by torch's DataLoader."""
        with suppress(RuntimeError):
            return self._each(lambda value: value.pin_memory())
        return self

    def _each(self, change: Callable[[Any], Any]) -> MicroBatch:
        return replace(self, inputs={k: change(v) for k, v in self.inputs.items()}, labels=change(self.labels))


@dataclass(frozen=True)
class BatchArithmetic:
    """micro-batch × accumulation × data-parallel ranks = global batch."""

    micro_batch_size: int
    accumulation_steps: int
    dp_size: int  # ranks, or groups of them, that see different examples

    @property
    def global_batch_size(self) -> int:
        return self.micro_batch_size * self.accumulation_steps * self.dp_size


def arithmetic_of(config: Config, dp_size: int) -> BatchArithmetic:
    """The batch sizes of ``config`` completed, ``auto`` as 1; raises UsageError if they contradict each other."""
    optim = config.optimization
    size = 1 if optim.micro_batch_size == "auto" else optim.micro_batch_size
    accumulation, total = optim.gradient_accumulation_steps, optim.global_batch_size
    if total is None:
        return BatchArithmetic(size, accumulation or 1, dp_size)
    steps, rest = divmod(total, size * dp_size)
    if rest:
        near = f"{total - rest} or {total - rest + size * dp_size}" if steps else f"{size * dp_size}"
        other = "number of processes" if total % dp_size else "micro_batch_size"
        what = f"global_batch_size: {total} is not a multiple of micro_batch_size {size} × {dp_size} process(es)"
        raise UsageError(f"{what}: {near} would be, or another {other}.")
    if accumulation not in (None, steps):
        product = f"global_batch_size {total} = micro_batch_size {size} × {steps} × {dp_size} process(es)"
        raise UsageError(f"gradient_accumulation_steps: {accumulation} contradicts {product}. Give one of the two.")
    return BatchArithmetic(size, steps, dp_size)


@dataclass(frozen=True)
class StepOutcome:
    """What one optimizer step did, equal on all ranks except for ``loss_sum``."""

    loss_sum: torch.Tensor  # () of this rank's targets; on the device, because reading it would wait for the device
    num_targets: int
    num_tokens: int
    num_positions: int  # padding included; like the two counts above, of the whole global batch
    grad_norm: float  # before clipping; inf or nan in a step that was skipped
    clipped: bool  # by its norm
    skipped: bool
    stop_requested: bool  # of some rank


@dataclass(frozen=True)
class Progress:
    """Where a run stands; with (seed, config) it determines everything that follows."""

    step: int = 0
    epoch: int = 0
    step_in_epoch: int = 0
    tokens_seen: int = 0
    positions_seen: int = 0  # tokens and padding
    nonfinite_steps: int = 0
    consecutive_nonfinite_steps: int = 0
    best_metric: float | None = None
    best_step: int | None = None
    best_of: str | None = None  # by which metric, on which data
    evaluated_step: int = 0  # of the last evaluation; 0 at the start, so step 0 is never evaluated
    evaluations_without_improvement: int = 0
    training_seconds: float = 0.0
    usual_loss: float | None = None  # a moving mean over the logging intervals
    rollbacks: int = 0


@dataclass(frozen=True)
class Evaluation:
    """Metrics of one pass over one split."""

    split: str
    step: int
    metrics: dict[str, Any]
    seconds: float = 0.0


def column(examples: datasets.Dataset, name: str) -> np.ndarray:
    """(examples,) a column of numbers; the array may be read-only."""
    import numpy as np  # here: --help does not wait for it

    return np.asarray(examples.with_format("arrow")[name][:])  # numpy's format takes many times as long


def num_cores(group: Path = Path("/sys/fs/cgroup")) -> int:
    """Cores that this process may use: on a shared machine, or by a container's quota, fewer than there are."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with suppress(OSError, ValueError):  # "max 100000": there is none
        quota, period = map(int, (group / "cpu.max").read_text().split())
        cores = min(cores, -(-quota // period))
    return cores


def exchange(value: Any) -> list[Any]:
    """``value`` of every rank in the order of ranks; called by all ranks together."""
    from accelerate.utils import gather_object  # here: --help does not wait for it

    return gather_object([value])
