"""When training has left the rails: back to the last checkpoint from before, and past the data that led there.

As the authors of PaLM did by hand (Chowdhery et al. 2022, section 5.1). Weights, optimizer and schedule go back; the
order of the data goes on behind the last window that was seen.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from train.records import Progress, UserError

SHARE_OF_THE_NEWEST = 0.1
"""Of the newest loss in the usual one, a mean whose weights fall off exponentially."""


class DivergenceError(UserError):
    """Training has left the rails; a run may go back once it is told how far.

    Attributes:
        progress: where the run stands.
        sound_step: the last step after which all was in order.
    """

    def __init__(self, message: str, progress: Progress, sound_step: int) -> None:
        super().__init__(message)
        self.progress, self.sound_step = progress, sound_step


def usual_loss(before: float | None, loss: float) -> float:
    """The usual loss after one more interval."""
    return loss if before is None else (1 - SHARE_OF_THE_NEWEST) * before + SHARE_OF_THE_NEWEST * loss


def is_spike(usual: float | None, loss: float, factor: float | None) -> bool:
    """Whether an interval's ``loss`` is too large to go on from."""
    return factor is not None and (not math.isfinite(loss) or (usual is not None and loss > factor * usual))


def sound_step(progress: Progress, loss_spike_factor: float | None) -> int:
    """The last step after which all was in order as far as is known: a run may be told to go back to it."""
    sound = progress.step - progress.consecutive_nonfinite_steps
    return sound if loss_spike_factor is None else min(sound, progress.interval.since_step)


def go_back(
    error: DivergenceError,
    max_rollbacks: int,
    restore: Callable[[int], Progress | None],
    report: Callable[[str, int, dict[str, Any]], None],
) -> Progress:
    """Restores the run as it was at the last sound checkpoint, and returns from where it goes on.

    Args:
        restore: takes back the newest checkpoint not after a step; None where there is none.
        report: (kind, step, values) of a line of the log.

    Raises:
        DivergenceError: ``error`` itself, where nothing more may be tried.
    """
    lost = error.progress
    if lost.rollbacks >= max_rollbacks:
        raise error
    restored = restore(error.sound_step)
    if restored is None:
        raise DivergenceError(f"{error} There is no checkpoint from before it.", lost, error.sound_step)
    report("rollback", restored.step, {"from_step": lost.step, "rollbacks": lost.rollbacks + 1, "reason": str(error)})
    return replace(
        restored,
        epoch=lost.epoch,
        step_in_epoch=lost.step_in_epoch,
        nonfinite_steps=lost.nonfinite_steps,
        rollbacks=lost.rollbacks + 1,
        training_seconds=lost.training_seconds,
    )
