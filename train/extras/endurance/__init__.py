"""Runs that survive: out-of-memory errors, lost ranks, diverging losses, and slow disks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from train.config import Config, option
from train.extras import Extra
from train.figures import show_error
from train.launch import Launch, target_device
from train.records import DivergenceError, Progress, Run, UsageError

if TYPE_CHECKING:
    from train.extras.endurance.checkpoints import Saving
    from train.extras.endurance.lost_rank import RankWatch
    from train.extras.endurance.recovery import Recovering
    from train.state import TrainingState
    from train.step import Engine

ROLL_CALL = timedelta(minutes=1)  # ample time to find out which rank is lost
SECONDS_FOR_A_LAST_CHECKPOINT = 20.0


@dataclass(frozen=True)
class Options:
    """How a run survives."""

    on_oom: Literal["auto", "split", "adapt", "stop"] = option(
        "auto",
        "Out of memory in a step: split the micro-batch and make the step again; adapt: where a single example does "
        "not fit, also switch on checkpointing and a chunked loss; stop: end. auto: split with one process; stop with "
        "several, because recovering keeps DDP from averaging gradients during backward, and with "
        "optimizer_in_backward.",
    )
    save_in_background: bool = option(True, "Copy the state to host memory, and train while the copy is written.")
    loss_spike_factor: float | None = option(
        None, "Stop if the loss between two log lines is above this many times the usual.", gt=1
    )
    max_rollbacks: int = option(
        0, "Instead of stopping a diverging run, go back to the last checkpoint and skip the data since.", ge=0
    )


class Room(Extra):
    """Recovery from OOM, background saving, rollback and the watch over ranks, for one run."""

    Options = Options

    def __init__(self) -> None:
        self._watch: RankWatch | None = None
        self._saving: Saving | None = None
        self._recovering: Recovering | None = None

    @classmethod
    def check(cls, config: Config, launch: Launch) -> None:
        """Raises UsageError where there would be nothing to go back to."""
        options = config.of(Options)
        if options.max_rollbacks and config.output.save_every_steps is None:
            raise UsageError(f"max_rollbacks: {options.max_rollbacks} needs save_every_steps: nothing to go back to.")

    @contextmanager
    def open(self, config: Config, launch: Launch) -> Iterator[None]:
        """Watches over the ranks; at the end a checkpoint that is being written gets a moment to be completed."""
        from train.extras.endurance.checkpoints import Saving
        from train.extras.endurance.lost_rank import RankWatch, follow_launcher
        from train.outputs import how_to_resume

        follow_launcher()
        seconds, remedy = config.optimization.distributed_timeout_seconds, partial(how_to_resume, config)
        with RankWatch(launch, seconds, remedy, show_error) as self._watch:
            self._saving = Saving(config.of(Options).save_in_background, self._watch.gather)
            try:
                yield
            finally:
                self._saving.wait(SECONDS_FOR_A_LAST_CHECKPOINT)

    def accelerator_options(self, config: Config, launch: Launch) -> dict[str, Any]:
        from accelerate.utils import InitProcessGroupKwargs

        timeout = timedelta(seconds=config.optimization.distributed_timeout_seconds)
        if target_device().type == "cuda":
            timeout += ROLL_CALL  # NCCL's watchdog ends the process without a word: the watch speaks before it
        return {"kwargs_handlers": [InitProcessGroupKwargs(timeout=timeout)]}

    def preparing(self) -> AbstractContextManager[None]:
        assert self._watch is not None
        return self._watch.preparing()

    def wrap_step(self, run: Run, engine: Engine) -> Engine:
        if run.is_planned:  # a prediction is of a step that does not run out of memory
            return engine
        from train.extras.endurance.recovery import Recovering, can_recover
        from train.step import Engine

        on_oom, accelerator = run.config.of(Options).on_oom, run.accelerator
        may = on_oom != "stop" and not (on_oom == "auto" and accelerator.num_processes > 1)
        if not may or type(engine) is not Engine or not can_recover(accelerator):
            return engine

        measures: list[Any] = [partial(run.extras.lines, "memory_measures", run)] if on_oom == "adapt" else []
        self._recovering = Recovering(engine, run.outputs.say, *measures)
        return self._recovering

    def logged(self, run: Run, progress: Progress, loss: float, since_step: int) -> None:
        """Raises DivergenceError where the loss is far above the usual."""
        usual, factor = progress.usual_loss, run.config.of(Options).loss_spike_factor
        if factor is not None and (not math.isfinite(loss) or (usual is not None and loss > factor * usual)):
            known = "unknown" if usual is None else f"{usual:.4g}"
            raise DivergenceError(
                f"step {progress.step}: the loss since step {since_step} is {loss:.4g}, usual is {known}. Lower the "
                "learning rate, warm up longer, look at the data, or raise --loss_spike_factor.",
                progress,
                since_step,
            )

    def save(self, run: Run, state: TrainingState, progress: Progress, wait: bool) -> bool:
        assert self._saving is not None
        self._saving.save(run, state, progress, wait)
        return True

    def steps_to_keep(self, run: Run, progress: Progress) -> list[int]:
        """The last step after which, as far as is known, everything was in order: what a rollback would go back to."""
        options, sound = run.config.of(Options), progress.step - progress.consecutive_nonfinite_steps
        if options.loss_spike_factor is not None:
            sound = min(sound, progress.interval.since_step)
        return [sound] if options.max_rollbacks else []

    def diverged(self, run: Run, state: TrainingState, error: DivergenceError) -> Progress | None:
        """Goes back, unless that was done as often as allowed."""
        from train.extras.endurance.checkpoints import go_back

        if error.progress.rollbacks >= run.config.of(Options).max_rollbacks:
            return None
        if self._saving is not None:
            self._saving.finish(run)
        return go_back(run, state, error)

    def confirms_stop(self) -> bool:
        """False where a launcher ends the other ranks because one has failed."""
        return self._watch is None or self._watch.confirms_stop()

    def failed(self, run: Run | None, error: Exception) -> str | None:
        """Empty where the error came of a rank that is no longer there, of which one rank has then told."""
        return "" if self._watch is not None and self._watch.concludes(error) else None

    def summary(self, run: Run) -> dict[str, Any]:
        saving, recovering = self._saving, self._recovering
        return {
            "checkpoints_in_background": saving.checkpoints_in_background if saving else 0,
            "longest_save_stall_seconds": max(saving.stalls_seconds, default=None) if saving else None,
            **({"oom_recoveries": recovering.recoveries} if recovering else {}),
        }
