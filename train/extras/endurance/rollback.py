"""After training has diverged: back to the last checkpoint from before, and past the data that led there.

As the authors of PaLM did by hand (Chowdhery et al. 2022, section 5.1). Weights, optimizer and schedule go back; the
order of the data continues behind the last step that was made.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

from train import checkpoint
from train.records import DivergenceError, Progress, Run, UserError
from train.state import TrainingState


def is_spike(usual: float | None, loss: float, factor: float | None) -> bool:
    """Whether an interval's ``loss`` is too large to continue from."""
    return factor is not None and (not math.isfinite(loss) or (usual is not None and loss > factor * usual))


def sound_step(progress: Progress, loss_spike_factor: float | None) -> int:
    """The last step after which everything was in order as far as is known: a run may have to go back to it."""
    sound = progress.step - progress.consecutive_nonfinite_steps
    return sound if loss_spike_factor is None else min(sound, progress.interval.since_step)


def go_back(run: Run, state: TrainingState, error: DivergenceError) -> Progress:
    """Restores the newest intact checkpoint from before, removes later ones, and returns where to continue.

    Called by all ranks together.

    Raises:
        DivergenceError: there is no checkpoint from before.
        UserError: there are some, but none is intact; or a later one cannot be removed.
    """
    outputs, lost = run.outputs, error.progress

    def choose() -> Path | None:
        found, problems = checkpoint.newest_good(outputs.checkpoints, error.sound_step)
        outputs.note(*(f"damaged checkpoint skipped: {problem}" for problem in problems))
        try:
            if found is not None:
                for later in reversed([p for p in checkpoint.by_step(outputs.checkpoints).values() if p > found]):
                    checkpoint.remove(later)
        except OSError as problem:
            raise UserError(f"a checkpoint in {outputs.checkpoints} cannot be removed: {problem.strerror}.") from None
        return found

    found = outputs.from_main(choose)
    if found is None:
        raise DivergenceError(f"{error} There is no checkpoint from before it.", lost, error.sound_step)
    restored = checkpoint.restore(found, state, run.config.output.allow_changes_on_resume)
    outputs.keep_log(restored)
    restored = outputs.with_its_best(restored, restored.best_of)
    values = {"from_step": lost.step, "rollbacks": lost.rollbacks + 1, "reason": str(error)}
    outputs.record(run, "rollback", restored.step, values)
    outputs.note(f"{error} Went back to the checkpoint of step {restored.step}, and past the data since.")
    return replace(
        restored,
        epoch=lost.epoch,
        step_in_epoch=lost.step_in_epoch,
        nonfinite_steps=lost.nonfinite_steps,
        rollbacks=lost.rollbacks + 1,
        training_seconds=lost.training_seconds,
    )
