"""What the parts hand to each other: small frozen records, no behaviour beyond moving to a device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np

if TYPE_CHECKING:
    import datasets
    import torch

IGNORE = -100
"""A label that is no target: padding, or a position that is only context."""


@dataclass(frozen=True)
class Corpus:
    """Documents by split, before any tokeniser has seen them.

    Each split has the columns ``text`` and, for classification, ``label`` (text, or the number of a class).
    """

    name: str
    train: datasets.Dataset | datasets.IterableDataset
    validation: datasets.Dataset
    test: datasets.Dataset | None = None
    notes: tuple[str, ...] = ()
    """What a person should know: records skipped, and where."""


@dataclass(frozen=True)
class Examples:
    """Tokenised examples by split, ready for a task's ``collate``.

    Map-style splits have a column ``length`` (tokens), by which batching groups examples.
    """

    train: datasets.Dataset | datasets.IterableDataset
    validation: datasets.Dataset
    test: datasets.Dataset | None = None
    label_names: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Documents:
    """Where the documents in the rows of a packed batch (B, S) begin and end; padding at a row's end counts as one.

    The lengths are numbers, so that nobody has to wait for the device to know them.
    """

    lengths: tuple[tuple[int, ...], ...]
    """Tokens of each document, row by row; a row's add up to S."""
    boundaries: torch.Tensor
    """(documents + 1,) int32: where each begins in all rows laid end to end, and B · S."""

    @classmethod
    def of(cls, lengths: Sequence[Sequence[int]]) -> Documents:
        """Documents of these lengths, row by row."""
        import torch  # here: what only needs the other records need not wait for it

        flat = [0, *(length for row in lengths for length in row)]
        return cls(tuple(map(tuple, lengths)), torch.tensor(flat).cumsum(0).to(torch.int32))

    @property
    def longest(self) -> int:
        """Tokens of the longest document."""
        return max(max(row) for row in self.lengths)

    def position_ids(self) -> torch.Tensor:
        """(B, S) each token's place in its document, from 0."""
        import torch

        return torch.stack([torch.cat([torch.arange(length) for length in row]) for row in self.lengths])

    def to(self, device: torch.device) -> Documents:
        """The same, with the boundaries on ``device``."""
        return replace(self, boundaries=self.boundaries.to(device, non_blocking=True))

    def pin_memory(self) -> Documents:
        """The same, with the boundaries in page-locked memory."""
        return replace(self, boundaries=self.boundaries.pin_memory())


@dataclass(frozen=True)
class MicroBatch:
    """The examples of one forward/backward on one device.

    Attributes:
        inputs: keyword arguments of the model's forward, ``input_ids: (B, S)`` among them.
        labels: targets aligned with the logits, ``(B, S)`` or ``(B,)``; :data:`IGNORE` is no target.
        num_targets: how many labels are targets.
        example_ids: position of each example in its split, ``()`` for a batch that only keeps ranks in step.
        num_tokens: input positions that hold a token of an example; the others are padding.
        documents: of a packed batch, where each row's documents are; None: a row is one example.
    """

    inputs: dict[str, Any]
    labels: torch.Tensor
    num_targets: int
    example_ids: tuple[int, ...]
    num_tokens: int
    documents: Documents | None = None

    def to(self, device: torch.device) -> MicroBatch:
        """The same batch on ``device``, ready for the model; asynchronous from pinned memory."""
        inputs = {name: tensor.to(device, non_blocking=True) for name, tensor in self.inputs.items()}
        if self.documents is not None:  # one more argument of the model, see train.extras.long_sequences.attention
            inputs["documents"] = self.documents.to(device)
        return replace(self, inputs=inputs, labels=self.labels.to(device, non_blocking=True))

    def pin_memory(self) -> MicroBatch:
        """The same batch in page-locked memory; called by torch's DataLoader."""
        inputs = {name: tensor.pin_memory() for name, tensor in self.inputs.items()}
        documents = None if self.documents is None else self.documents.pin_memory()
        return replace(self, inputs=inputs, labels=self.labels.pin_memory(), documents=documents)


@dataclass(frozen=True)
class BatchArithmetic:
    """micro-batch × accumulation × world size = global batch."""

    micro_batch_size: int
    accumulation_steps: int
    world_size: int
    max_tokens: int | None = None
    """Micro-batches are formed by padded tokens instead, at most so many each: then the numbers above only say how
    many examples a step has."""

    @property
    def global_batch_size(self) -> int:
        return self.micro_batch_size * self.accumulation_steps * self.world_size

    def __str__(self) -> str:
        examples = f"{self.micro_batch_size} example{'s' if self.micro_batch_size > 1 else ''}"
        processes = f"{self.world_size} process{'es' if self.world_size > 1 else ''}"
        if self.max_tokens is not None:
            return (
                f"micro-batches of up to {self.max_tokens:,} tokens, padding included, on {processes}; "
                f"{self.global_batch_size} examples per step"
            )
        return (
            f"{examples} per micro-batch × {self.accumulation_steps} accumulated × {processes} = "
            f"{self.global_batch_size} per step"
        )


@dataclass(frozen=True)
class StepOutcome:
    """What one optimizer step did, equal on all ranks but for ``loss_sum``.

    ``loss_sum`` stays on the device: reading it would wait for the device.
    """

    loss_sum: torch.Tensor
    """() of this rank's targets."""
    num_targets: int
    num_tokens: int
    num_positions: int
    """Input positions, padding included; like the two counts above, of the whole global batch."""
    grad_norm: float
    """Norm before clipping; inf or nan in a step that was skipped."""
    clipped: bool
    skipped: bool
    stop_requested: bool
    """Some rank was asked to stop."""


@dataclass(frozen=True)
class IntervalSums:
    """What was summed up since the last line of the log, over all ranks."""

    since_step: int = 0
    steps: int = 0
    loss_sum: float = 0.0
    targets: int = 0
    tokens: int = 0
    positions: int = 0
    """Tokens and padding."""
    clipped: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Progress:
    """Where a run stands; with (seed, config) it determines everything that follows."""

    step: int = 0
    epoch: int = 0
    step_in_epoch: int = 0
    tokens_seen: int = 0
    positions_seen: int = 0
    """Tokens and padding."""
    nonfinite_steps: int = 0
    consecutive_nonfinite_steps: int = 0
    best_metric: float | None = None
    best_step: int | None = None
    best_of: str | None = None
    """By which metric, on which data."""
    evaluated_step: int = 0
    evaluations_without_improvement: int = 0
    training_seconds: float = 0.0
    usual_loss: float | None = None
    """A moving mean over the intervals of logging."""
    rollbacks: int = 0
    interval: IntervalSums = IntervalSums()

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Progress:
        """From what ``dataclasses.asdict`` made of one."""
        return cls(**{**values, "interval": IntervalSums(**values["interval"])})


@dataclass(frozen=True)
class Evaluation:
    """Metrics of one pass over one split."""

    split: str
    step: int
    metrics: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0


def column(examples: datasets.Dataset, name: str) -> np.ndarray:
    """(examples,) a column of numbers."""
    return np.asarray(examples.with_format("numpy")[name][:])


Mark: TypeAlias = Callable[[str], None]
"""Told the name of a phase of a step as it begins: forward, backward, clip, optimizer."""


def unmarked(phase: str) -> None:
    """Nobody asked for the phases."""


class Meter(Protocol):
    """Memory of a device; ``main`` injects one."""

    def step(self, window: Sequence[MicroBatch]) -> AbstractContextManager[None]:
        """Surrounds an optimizer step."""
        ...

    def evaluation(self, batch: MicroBatch) -> AbstractContextManager[None]:
        """Surrounds the forward of a batch that is evaluated."""
        ...

    def mark(self, phase: str) -> None:
        """A phase of the step begins."""
        ...

    def interval(self) -> dict[str, Any]:
        """Figures since the last call, for a line of the log; ``peak_allocated_bytes`` is among them."""
        ...

    def summary(self) -> dict[str, Any]:
        """Figures of the whole run, for its summary; ``peak_allocated_bytes`` is among them."""
        ...


class Batches(Protocol):
    """The order of the data: what each optimizer step of an epoch sees on this rank."""

    steps_per_epoch: int | None
    """None: known only when the stream ends."""

    def longest(self) -> MicroBatch:
        """A micro-batch of the longest examples, with padding where examples differ in length: what takes most."""
        ...

    def windows(self, epoch: int, first_step: int) -> Iterator[list[MicroBatch]]:
        """The micro-batches of each step of ``epoch`` from ``first_step`` on."""
        ...
