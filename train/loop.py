"""When to step, evaluate, save and report."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch

from train.evaluation import evaluate
from train.optim import learning_rate_at, set_learning_rate
from train.records import MicroBatch, Parts, Progress, Run, StepOutcome, StopAtOnce, UserError
from train.step import seed_step

Steps: TypeAlias = Iterator[tuple[int, int, Sequence[MicroBatch]]]  # epoch, number of the step in it, micro-batches


def fit(run: Run, parts: Parts, progress: Progress) -> Progress:
    """Trains from ``progress`` until the last step, a signal or early stopping, and saves where it ends.

    Raises UserError if a step fails (those before are saved if weights are intact), or an extra finds a reason.
    """
    while True:
        try:
            return train_steps(run, parts, progress)
        except UserError as error:
            # Where training has diverged, an extra may go back to a checkpoint from before, and past this data.
            if (restored := run.extras.first("diverged", run, parts, error)) is None:
                raise
            progress = restored


def train_steps(run: Run, parts: Parts, progress: Progress) -> Progress:
    """Trains until it finishes, is stopped, or diverges."""
    optim, output = run.config.optimization, run.config.output
    saved, last_step = progress, dict[str, Any]()
    unlogged = list[tuple[StepOutcome, float]]()  # steps that no line of the log covers yet, with their seconds

    def save(wait: bool, only_new: bool = False) -> None:
        # What is saved is logged first, so a run that resumes there writes the lines of one that was never stopped.
        nonlocal progress, unlogged, saved
        if progress != saved or not only_new:
            progress, unlogged = log(run, progress, unlogged, last_step) if unlogged else progress, []
            run.outputs.save(run, parts.state, progress, wait)
            saved = progress

    # First the evaluation that was due when the run was stopped. A request to stop cuts an evaluation short.
    progress, stops = evaluate_if_due(run, parts, progress)
    steps, done = endless_steps(run, parts, progress, save), is_done(run, parts, progress)
    started = time.perf_counter()
    while not (stops or done):
        epoch, step_in_epoch, micro_batches = next(steps)
        # Randomness and learning rate are functions of the step alone, so a checkpoint needs neither. Ranks that
        # share tensors compute the same activations, and have to drop the same of them.
        seed_step(optim.seed, progress.step, run.launch.rank // run.launch.tp_size)
        rate = learning_rate_at(progress.step, parts.total_steps, optim)
        set_learning_rate(parts.optimizer, rate, optim)
        try:
            with run.extras.inside("computing", "forward", micro_batches, progress.step + 1):
                outcome = parts.engine.step(parts.model, parts.optimizer, micro_batches, bool(run.stop))
        except UserError as error:
            if error.weights_intact:  # nothing of the steps before is lost
                save(wait=True, only_new=True)
            raise
        unlogged.append((outcome, seconds := time.perf_counter() - started))
        progress = advance(replace(progress, epoch=epoch, step_in_epoch=step_in_epoch), outcome, seconds)
        run.outputs.tick(progress.step)
        run.extras.each("stepped", run, progress, outcome, micro_batches)

        # Save, then evaluate: whatever happens in an evaluation, the steps before it are on the disk. Afterwards
        # the run is saved only if the evaluation ended it, or found a new best that is not on the disk yet.
        length = max(batch.shape[1] for batch in micro_batches)
        last_step = {"learning_rate": rate, "sequence_length": length, "grad_norm": outcome.grad_norm}
        is_last, stops = progress.step >= parts.total_steps, outcome.stop_requested
        if (ends := is_last or stops) or is_due(output.save_every_steps, progress):
            save(wait=ends)
        elif is_due(output.log_every_steps, progress):
            progress, unlogged = log(run, progress, unlogged, last_step), []
        if is_last or not stops:  # a run that is asked to stop evaluates after it resumes
            progress, stops = evaluate_if_due(run, parts, progress)
        done = is_done(run, parts, progress)
        if (not ends and (done or stops)) or progress.best_step == progress.step > saved.step:
            save(wait=done or stops)
        started = time.perf_counter()  # evaluating and saving do not count as training
    if stops:  # before ``steps`` closes: ending the processes that load batches may take longer than a launcher waits
        run.extras.each("stopped", run, progress.step)
    return progress


def endless_steps(run: Run, parts: Parts, progress: Progress, save: Callable[..., None]) -> Steps:
    """Every step after ``progress``, epoch after epoch: the epoch, the step's number in it, and its micro-batches.

    If a batch cannot be made, the steps before are saved, where one process can do it: saving needs all.
    """
    epoch, first = progress.epoch, progress.step_in_epoch
    try:
        while True:
            for number, micro_batches in enumerate(parts.batches.steps(epoch, first), first):
                yield epoch, number, micro_batches
            epoch, first = epoch + 1, 0
    except Exception:
        if run.launch.world_size == 1:
            save(wait=True, only_new=True)
        raise


def is_due(every: int | None, progress: Progress) -> bool:
    """Whether something done every n steps is due after the step that ``progress`` stands at."""
    return every is not None and progress.step % every == 0


def is_done(run: Run, parts: Parts, progress: Progress) -> bool:
    """Whether the last step is made, or an extra wants no further one."""
    return progress.step >= parts.total_steps or any(run.extras.each("ends_early", run, progress))


def advance(progress: Progress, outcome: StepOutcome, seconds: float) -> Progress:
    """``progress`` after one more step, which took ``seconds``."""
    return replace(
        progress,
        step=progress.step + 1,
        step_in_epoch=progress.step_in_epoch + 1,
        tokens_seen=progress.tokens_seen + outcome.num_tokens,
        positions_seen=progress.positions_seen + outcome.num_positions,
        nonfinite_steps=progress.nonfinite_steps + outcome.skipped,
        consecutive_nonfinite_steps=progress.consecutive_nonfinite_steps + 1 if outcome.skipped else 0,
        training_seconds=progress.training_seconds + seconds,
    )


def evaluate_if_due(run: Run, parts: Parts, progress: Progress) -> tuple[Progress, bool]:
    """Evaluates if due and not done yet; also returns whether a request to stop has cut it short."""
    is_known, is_last = progress.evaluated_step == progress.step, progress.step >= parts.total_steps
    if is_known or not (is_last or is_due(run.config.output.eval_every_steps, progress)):
        return progress, False
    try:
        evaluation = evaluate(run, parts, "validation", progress.step, may_stop=not is_last)
    except StopAtOnce:
        return progress, True
    progress = replace(progress, evaluated_step=progress.step)
    return run.extras.pipe("evaluated", run, progress, run.outputs.record_evaluation(run, evaluation)), False


def log(run: Run, progress: Progress, unlogged: Sequence[tuple[StepOutcome, float]], last: dict[str, Any]) -> Progress:
    """Records the figures of ``unlogged`` steps, each with its seconds; UserError if an extra says so."""
    outcomes, seconds = [outcome for outcome, _ in unlogged], sum(seconds for _, seconds in unlogged)
    # The loss of a step that was skipped, which may not be finite, would hide the others.
    used = [outcome for outcome in outcomes if not outcome.skipped]
    loss_sum = sum((outcome.loss_sum for outcome in used), torch.zeros((), device=run.accelerator.device))
    of_all_ranks: Any = run.accelerator.reduce(loss_sum, reduction="sum")  # reading it waits for the device
    loss = of_all_ranks.item() / sum(outcome.num_targets for outcome in used) if used else None
    tokens = sum(outcome.num_tokens for outcome in outcomes)
    values: dict[str, Any] = {
        "epoch": progress.epoch,
        "loss": loss,
        **last,
        "clipped_share": sum(outcome.clipped for outcome in outcomes) / len(outcomes),
        "nonfinite_steps": progress.nonfinite_steps,
        "tokens_per_second": tokens / seconds,
        "seconds_per_step": seconds / len(outcomes),
        "padding_share": 1 - tokens / sum(outcome.num_positions for outcome in outcomes),
        "loss_scale": run.accelerator.scaler and run.accelerator.scaler.get_scale(),
        "tokens_seen": progress.tokens_seen,
    }
    run.extras.each("measured", run, values)
    run.outputs.record(run, "train", progress.step, values)
    return progress if loss is None else run.extras.pipe("logged", run, progress, loss, progress.step - len(unlogged))
