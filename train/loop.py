"""When to step, evaluate, save and report."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from train.config import Config
from train.errors import StepError, UserError
from train.extras.endurance.rollback import DivergenceError, go_back, is_spike, usual_loss
from train.extras.long_sequences.length_warmup import cut, sequence_length_at
from train.launch import Launch
from train.optim import learning_rate_at, set_learning_rate
from train.records import Batches, Evaluation, IntervalSums, Meter, MicroBatch, Progress, StepOutcome
from train.step import seed_step

if TYPE_CHECKING:
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer

    from train.runtime import StopRequest

MIN_LOSS_SCALE = 2.0**-10
"""Gradients that overflow at this scale would overflow at any."""


@dataclass(frozen=True)
class Parts:
    """What ``fit`` is handed; each does one thing and knows nothing of the others."""

    accelerator: Accelerator
    launch: Launch
    model: nn.Module
    optimizer: AcceleratedOptimizer
    batches: Batches
    meter: Meter
    stop: StopRequest
    step: Callable[..., StepOutcome]
    """:func:`train.step.optimizer_step`, or a function that guards it."""
    evaluate: Callable[[int], Evaluation]
    """Evaluates after the given step, and records it."""
    save: Callable[[Progress, bool], None]
    """Writes a checkpoint, and waits until it is on the disk if the second argument says so."""
    restore: Callable[[int], Progress | None]
    """Takes back the newest good checkpoint not after a step and forgets later ones; None where there is none."""
    report: Callable[[str, int, dict[str, Any]], None]
    """(kind, step, values) of a line of ``metrics.jsonl``."""
    tick: Callable[[int], None]
    """Called after every step with its number."""


@dataclass(frozen=True)
class Goal:
    """What the run works towards."""

    total_steps: int
    peak_learning_rate: float
    metric: str
    greater_is_better: bool
    best_of: str = ""
    """The metric and a digest of the validation data: a best of another kind is none."""
    flops_per_token: float | None = None
    peak_flops_per_second: float | None = None
    """Of all devices together."""


def fit(parts: Parts, config: Config, goal: Goal, progress: Progress) -> Progress:
    """Trains from ``progress`` until the last step, a signal or early stopping, and saves where it ends.

    Raises:
        StepError: a step cannot be made; where that left the weights alone, the steps before it are saved.
        DivergenceError: too many steps in a row without a finite gradient or a loss far above the usual, too often.
        UserError: no target in a whole global batch.
    """
    while True:
        try:
            return go_on(parts, config, goal, progress)
        except DivergenceError as error:
            progress = go_back(error, config.optimization.max_rollbacks, parts.restore, parts.report)


def go_on(parts: Parts, config: Config, goal: Goal, progress: Progress) -> Progress:
    """The same, up to where training leaves the rails."""
    optim, interval, saved = config.optimization, Interval(parts, goal, progress.interval), progress.step
    progress = evaluate_if_due(parts, config, goal, progress)
    while not is_done(config, goal, progress):
        epoch = progress.epoch
        for window in parts.batches.windows(epoch, progress.step_in_epoch):
            length = sequence_length_at(progress.step, config)
            window = [cut(batch, length, config.data.task == "causal_lm") for batch in window]
            seed_step(optim.seed, progress.step, parts.launch.random_rank)
            learning_rate = learning_rate_at(progress.step, goal.total_steps, goal.peak_learning_rate, optim)
            set_learning_rate(parts.optimizer, learning_rate)
            stop, mark = bool(parts.stop), parts.meter.mark
            try:
                with parts.meter.step(window):
                    outcome = parts.step(parts.accelerator, parts.model, parts.optimizer, window, optim, stop, mark)
            except StepError as error:
                if error.weights_intact and progress.step > saved:
                    parts.save(replace(progress, interval=interval.sums()), True)
                raise
            progress = advance(progress, outcome)
            interval.add(outcome)
            parts.tick(progress.step)
            if outcome.skipped:
                report_skipped(parts, config, progress, outcome, window)

            is_last = progress.step >= goal.total_steps
            if is_last or is_due(config.output.log_every_steps, progress):
                progress = interval.close(progress, learning_rate, length, optim.loss_spike_factor)
            if is_last or not outcome.stop_requested:  # who is asked to stop evaluates when the run goes on
                progress = evaluate_if_due(parts, config, goal, progress)
            done = is_done(config, goal, progress)
            if done and interval.is_open:
                progress = interval.close(progress, learning_rate, length, optim.loss_spike_factor)
            ends = done or outcome.stop_requested
            if ends or is_due(config.output.save_every_steps, progress) or progress.best_step == progress.step:
                progress = replace(progress, interval=interval.sums())
                parts.save(progress, ends)
                saved = progress.step
            interval.restart()
            if ends:
                return progress
        progress = next_epoch(progress, epoch)
    return progress


def is_due(every: int | None, progress: Progress) -> bool:
    """Whether something done every n steps is due after the step that ``progress`` stands at."""
    return every is not None and progress.step > 0 and progress.step % every == 0


def is_done(config: Config, goal: Goal, progress: Progress) -> bool:
    """Whether the last step is made, or patience is out."""
    patience = config.output.early_stopping_patience
    tired = patience is not None and progress.evaluations_without_improvement >= patience
    return tired or progress.step >= goal.total_steps


def advance(progress: Progress, outcome: StepOutcome) -> Progress:
    """``progress`` after one more step."""
    return replace(
        progress,
        step=progress.step + 1,
        step_in_epoch=progress.step_in_epoch + 1,
        tokens_seen=progress.tokens_seen + outcome.num_tokens,
        positions_seen=progress.positions_seen + outcome.num_positions,
        nonfinite_steps=progress.nonfinite_steps + outcome.skipped,
        consecutive_nonfinite_steps=progress.consecutive_nonfinite_steps + 1 if outcome.skipped else 0,
    )


def next_epoch(progress: Progress, epoch: int) -> Progress:
    """``progress`` at the start of the epoch after ``epoch``."""
    if progress.step_in_epoch == 0:
        raise UserError("the training data gave no batch in a whole epoch: it is empty.")
    return replace(progress, epoch=epoch + 1, step_in_epoch=0)


def evaluate_if_due(parts: Parts, config: Config, goal: Goal, progress: Progress) -> Progress:
    """Evaluates at the end and every ``eval_every_steps``, once a step, and remembers the best."""
    due = is_due(config.output.eval_every_steps, progress) or progress.step >= goal.total_steps
    if not due or progress.evaluated_step == progress.step:
        return progress
    evaluation = parts.evaluate(progress.step)
    if goal.metric not in evaluation.metrics:
        known = ", ".join(k for k, v in evaluation.metrics.items() if isinstance(v, float))
        raise UserError(f"metric_for_best: {goal.metric!r} is not among this task's metrics: {known}.")
    value, best = float(evaluation.metrics[goal.metric]), progress.best_metric
    better = best is None or (value > best if goal.greater_is_better else value < best)
    return replace(
        progress,
        evaluated_step=progress.step,
        best_metric=value if better else best,
        best_step=progress.step if better else progress.best_step,
        best_of=goal.best_of,
        evaluations_without_improvement=0 if better else progress.evaluations_without_improvement + 1,
    )


def report_skipped(
    parts: Parts, config: Config, progress: Progress, outcome: StepOutcome, window: Sequence[MicroBatch]
) -> None:
    """Logs a step without a finite gradient and its examples, and ends the run when there are too many in a row."""
    examples = [i for batch in window for i in batch.example_ids]
    if parts.accelerator.num_processes > 1:
        from accelerate.utils import gather_object

        examples = gather_object(examples)
    scaler = parts.accelerator.scaler
    scale = scaler.get_scale() if scaler is not None else None
    parts.report(
        "skipped",
        progress.step,
        {"grad_norm": outcome.grad_norm, "loss_scale": scale, "examples": sorted(set(examples))},
    )
    last_finite = progress.step - progress.consecutive_nonfinite_steps
    if scale is not None and scale <= MIN_LOSS_SCALE:
        raise DivergenceError(
            f"step {progress.step}: the gradients overflow fp16 even at a loss scale of {scale}. Try "
            "--mixed_precision bf16 or no, a lower learning rate or a longer warm-up.",
            progress,
            last_finite,
        )
    if progress.consecutive_nonfinite_steps >= config.optimization.max_consecutive_nonfinite_steps:
        raise DivergenceError(
            f"step {progress.step}: no finite gradient in {progress.consecutive_nonfinite_steps} steps in a row; the "
            "weights were left alone. Look at the examples named in metrics.jsonl, lower the learning rate, or raise "
            "--max_consecutive_nonfinite_steps.",
            progress,
            last_finite,
        )


class Interval:
    """Sums over the steps between two log lines; the loss stays on the device until it is asked for."""

    def __init__(self, parts: Parts, goal: Goal, sums: IntervalSums) -> None:
        self._parts, self._goal, self._sums = parts, goal, sums
        self._loss_sum = torch.zeros((), device=parts.accelerator.device)
        self._grad_norm = 0.0
        self.restart()

    @property
    def is_open(self) -> bool:
        """Whether there are steps that no line of the log has told of."""
        return self._sums.steps > 0

    def restart(self) -> None:
        """The clock goes on from here: evaluating and saving are not training."""
        self._started = time.perf_counter()

    def add(self, outcome: StepOutcome) -> None:
        """One more step; its clock stops here, where the step has just waited for the device."""
        sums, counts = self._sums, not outcome.skipped  # a loss that is not finite would hide the others
        self._sums = replace(
            sums,
            steps=sums.steps + 1,
            targets=sums.targets + outcome.num_targets * counts,
            tokens=sums.tokens + outcome.num_tokens,
            positions=sums.positions + outcome.num_positions,
            clipped=sums.clipped + outcome.clipped,
            seconds=sums.seconds + time.perf_counter() - self._started,
        )
        if counts:
            self._loss_sum += outcome.loss_sum
        self._grad_norm = outcome.grad_norm

    def sums(self) -> IntervalSums:
        """So far, for a checkpoint: who resumes goes on with them. Called by all ranks together."""
        loss_sum = cast("torch.Tensor", self._parts.accelerator.reduce(self._loss_sum, reduction="sum")).item()
        self._loss_sum = torch.zeros_like(self._loss_sum)
        self._sums = replace(self._sums, loss_sum=self._sums.loss_sum + loss_sum)
        return self._sums

    def close(
        self, progress: Progress, learning_rate: float, sequence_length: int, spike_factor: float | None
    ) -> Progress:
        """Reports the interval and begins the next.

        Raises:
            DivergenceError: its loss is above ``spike_factor`` times the usual.
        """
        accelerator, goal, sums = self._parts.accelerator, self._goal, self.sums()
        tokens_per_second = sums.tokens / sums.seconds
        mfu = None
        if goal.flops_per_token and goal.peak_flops_per_second:
            mfu = tokens_per_second * goal.flops_per_token / goal.peak_flops_per_second
        values = {
            "epoch": progress.epoch,
            "loss": (loss := sums.loss_sum / sums.targets if sums.targets else None),
            "learning_rate": learning_rate,
            "sequence_length": sequence_length,
            "grad_norm": self._grad_norm,
            "clipped_share": sums.clipped / sums.steps,
            "nonfinite_steps": progress.nonfinite_steps,
            "tokens_per_second": tokens_per_second,
            "seconds_per_step": sums.seconds / sums.steps,
            "mfu": mfu,
            **self._parts.meter.interval(),
            "padding_share": 1 - sums.tokens / sums.positions,
            "loss_scale": accelerator.scaler.get_scale() if accelerator.scaler is not None else None,
            "tokens_seen": progress.tokens_seen,
        }
        self._parts.report("train", progress.step, values)
        self._sums = IntervalSums(since_step=progress.step)
        seconds = progress.training_seconds + sums.seconds
        progress = replace(progress, training_seconds=seconds, interval=self._sums)
        if loss is None:
            return progress
        if is_spike(progress.usual_loss, loss, spike_factor):
            raise DivergenceError(
                f"step {progress.step}: the loss since step {sums.since_step} is {loss:.4g}, usual is "
                f"{progress.usual_loss or math.nan:.4g}. Lower the learning rate, warm up longer, look at the data, or "
                "raise --loss_spike_factor.",
                progress,
                sums.since_step,
            )
        return replace(progress, usual_loss=usual_loss(progress.usual_loss, loss))
