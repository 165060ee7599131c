"""Runs that survive: out-of-memory errors, lost ranks, diverging losses, and slow disks."""

from __future__ import annotations

import errno
import gc
import json
import math
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from train import extras
from train.config import Config, option
from train.extras.endurance.lock import lock, refuse_separate
from train.extras.endurance.signals import Signals, deliver, outlive_readers
from train.figures import FULL, show_error, write_whole
from train.launch import Launch
from train.records import MicroBatch, Parts, Progress, Run, StepOutcome, StopAtOnce, UserError, exchange

if TYPE_CHECKING:
    from train.extras.endurance.checkpoints import Saving
    from train.extras.endurance.lost_rank import RankWatch
    from train.extras.endurance.recovery import Recovering

SECONDS_FOR_A_LAST_CHECKPOINT = 20.0
SHARE_OF_THE_NEWEST = 0.1  # of the newest loss in the usual one, an exponential moving mean
REFUSED = (errno.EACCES, errno.EPERM, errno.EIO)  # to be written, or only to be read
STOPPED = "stopped.json"


@dataclass(frozen=True)
class Options:
    """How a run survives."""

    on_oom: Literal["auto", "split", "adapt", "stop"] = option(
        "auto",
        "Out of memory in a step: split the micro-batch and make the step again; adapt: where a single example does "
        "not fit, also switch on checkpointing and a chunked loss; stop: end. auto: split with one process, stop with "
        "several (recovering averages gradients only after backward), with optimizer_in_backward, FSDP2, DeepSpeed.",
    )
    save_in_background: bool = option(True, "Copy the state to host memory, and train while the copy is written.")
    max_consecutive_nonfinite_steps: int = option(25, "Steps in a row without a finite gradient: divergence.", ge=1)
    loss_spike_factor: float | None = option(None, "A logged loss this many times the usual: divergence.", gt=1)
    max_rollbacks: int = option(0, "How often divergence goes back, skipping data.", ge=0, needs="save_every_steps")


class DivergenceError(UserError):
    """The loss is far above the usual one, too many steps had no finite gradient, or weights are not finite."""

    def __init__(self, message: str, progress: Progress, sound_step: int) -> None:
        """``progress``: where the run stands; ``sound_step``: the last step at which everything was in order."""
        super().__init__(message)
        self.progress, self.sound_step = progress, sound_step


class Extra(extras.Extra):
    _config: Config  # these three from open() on
    _signals: Signals
    _saving: Saving
    _watch: RankWatch | None = None
    _recovering: Recovering | None = None
    _has_begun = _is_trained = False  # training; the last step is made, and its checkpoint written

    @contextmanager
    def open(self, config: Config, launch: Launch, stop: list[str]) -> Iterator[None]:
        """Watches over signals and ranks; a checkpoint that is being written gets a moment to be completed."""
        self._config = config
        outlive_readers()
        refuse_strangers(os.environ, launch.world_size)
        with ExitStack() as stack:
            stack.callback(gc.unfreeze)
            stack.callback(gc.enable)
            gc.disable()  # until libraries are imported: looking through what they make takes a sixth of that time
            from train.extras.endurance.checkpoints import Saving
            from train.extras.endurance.lost_rank import RankWatch, follow_launcher, take_forks_along

            self._signals = Signals(stop)
            stack.enter_context(self._signals.listening())
            follow_launcher()
            take_forks_along()
            if launch.world_size > 1:
                seconds, remedy = config.optimization.distributed_timeout_seconds, self._how_to_resume
                self._watch = stack.enter_context(RankWatch(launch, seconds, remedy, show_error))
            if launch.rank == 0:
                stack.enter_context(lock(Path(config.output.output_dir)))
            self._saving = Saving(config.of(Options).save_in_background, self._watch.gather if self._watch else None)
            stack.callback(self._saving.wait, SECONDS_FOR_A_LAST_CHECKPOINT)
            yield
            if self._watch and self._is_trained:
                self._watch.wait_for_first()

    def outputs(self, config: Config, accelerator: extras.Accelerator) -> extras.Outputs:
        from train.extras.endurance.outputs import DurableOutputs

        outputs = DurableOutputs(config, accelerator)
        outputs.saving = self._saving
        return outputs

    def started(self, run: Run) -> None:
        if run.launch.world_size > 1 and hasattr(signal, "SIGHUP"):  # Windows has no such lock
            refuse_separate(run.outputs.folder, run.launch.rank == 0)
        if os.getppid() == 1 and run.launch.world_size == 1 and "ACCELERATE_MIXED_PRECISION" in os.environ:
            what = "accelerate launch is the first process of its container, which SIGTERM does not reach"
            run.outputs.note(f"signals: {what}; to stop with a checkpoint, start python train/main.py instead")

    @contextmanager
    def preparing(self) -> Iterator[None]:
        gc.freeze()
        gc.enable()
        try:
            # No signal cuts short how ranks leave together: one of them may be training by then.
            with self._watch.preparing() if self._watch else nullcontext(), self._signals.at_once():
                yield
        except (StopAtOnce, RuntimeError):  # a rank may see another one stop first
            if not self._signals.stop:
                raise
            if self._watch is None or self._watch.confirms_stop():
                raise StopAtOnce from None
            raise UserError("") from None  # a launcher ends the other ranks because one has failed, which is told

    def change_data(self, run: Run, data: extras.PreparedData) -> extras.PreparedData:
        if not data.loading.num_workers or not hasattr(signal, "sigwaitinfo"):  # macOS does not tell who sends one
            return data
        return replace(data, loading=replace(data.loading, deliver=partial(deliver, said_by(run, run.outputs.note))))

    def wrap_step(self, run: Run, engine: extras.Engine) -> extras.Engine:
        if run.is_planned:  # a prediction is of a step that does not run out of memory
            return engine
        from accelerate.utils import DynamoBackend

        from train.extras.endurance.recovery import Recovering
        from train.step import Engine

        on_oom, is_alone, launch, why = run.config.of(Options).on_oom, run.launch.world_size == 1, run.launch, None
        if launch.engine != "ddp" or launch.mp_size > 1:
            # Sharded models communicate within forward and backward, where a rank that fails leaves the others waiting.
            why = f"{launch} cannot repeat a step"
        elif type(engine) is not Engine or vars(engine).keys() - {"accelerator", "config", "mark"}:  # changed in place
            why = "another engine makes the step"
        elif not is_alone and run.accelerator.state.dynamo_plugin.backend != DynamoBackend.NO:  # type: ignore
            why = "DDP is compiled"
        is_asked = on_oom in ("split", "adapt")
        if why is not None or not (is_asked or (on_oom == "auto" and is_alone)):
            run.outputs.note(f"on_oom: {on_oom} does nothing here: {why}" if is_asked else None)
            return engine
        find_measures = partial(run.extras.each, "memory_measure", run) if on_oom == "adapt" else lambda model: ()
        self._recovering = Recovering(engine, said_by(run, run.outputs.say), find_measures)
        return self._recovering

    def ready(self, run: Run, parts: Parts) -> None:
        if run.launch.world_size > 1 and run.launch.engine == "ddp" and run.launch.tp_size == 1:
            self._saving.replicas = parts.state.model
        if run.outputs.is_main:
            (run.outputs.folder / STOPPED).unlink(missing_ok=True)
        gc.collect()
        gc.freeze()  # existing objects stay: looking through them again and again slows short steps

    def logged(self, run: Run, progress: Progress, loss: float, since_step: int) -> Progress:
        """Looks after a checkpoint on its way. DivergenceError if the loss is far above the usual, which it updates."""
        self._saving.look(run, progress.step)
        usual, factor = progress.usual_loss, run.config.of(Options).loss_spike_factor
        if factor is not None and (not math.isfinite(loss) or (usual is not None and loss > factor * usual)):
            usual_text = "unknown" if usual is None else f"{usual:.4g}"
            what = f"step {progress.step}: the loss since step {since_step} is {loss:.4g}, usual is {usual_text}."
            remedy = "Lower the learning rate, warm up longer, look at the data, or raise --loss_spike_factor."
            raise DivergenceError(f"{what} {remedy}", progress, since_step)
        newest = loss if usual is None else (1 - SHARE_OF_THE_NEWEST) * usual + SHARE_OF_THE_NEWEST * loss
        return replace(progress, usual_loss=newest if math.isfinite(newest) else usual)

    def stepped(self, run: Run, progress: Progress, outcome: StepOutcome, micro_batches: Sequence[MicroBatch]) -> None:
        """Logs the examples of a skipped step; DivergenceError where no later one can be expected to be finite."""
        if not outcome.skipped:
            return
        loss_scale = run.accelerator.scaler and run.accelerator.scaler.get_scale()
        examples = {i for ids in exchange([i for batch in micro_batches for i in batch.example_ids]) for i in ids}
        values = {"grad_norm": outcome.grad_norm, "loss_scale": loss_scale, "examples": sorted(examples)}
        run.outputs.record(run, "skipped", progress.step, values)
        if (in_a_row := progress.consecutive_nonfinite_steps) >= run.config.of(Options).max_consecutive_nonfinite_steps:
            why = f"step {progress.step}: no finite gradient in {in_a_row} steps in a row; none changed a weight. "
            why += "" if loss_scale is None else "fp16 overflows: try --mixed_precision bf16. "
            remedy = "Look at the examples in metrics.jsonl, or lower the learning rate."
            raise DivergenceError(why + remedy, progress, progress.step - in_a_row)

    def keep(self, run: Run, kept: set[int], progress: Progress) -> set[int]:
        """Also what two rollbacks would go back to: checkpoints that, as far as is known, a later step has proved."""
        options, sound = run.config.of(Options), progress.step - progress.consecutive_nonfinite_steps
        proved = [step for step in run.outputs.steps() if step < sound]
        return kept | set(proved[-2:]) if options.max_rollbacks else kept

    def diverged(self, run: Run, parts: Parts, error: UserError) -> Progress | None:
        from train.extras.endurance.checkpoints import go_back

        if not isinstance(error, DivergenceError) or error.progress.rollbacks >= run.config.of(Options).max_rollbacks:
            return None
        self._saving.finish(run)
        return go_back(run, parts, error)

    def finishing(self, run: Run, state: extras.TrainingState, progress: Progress) -> None:
        from train.extras.endurance.checkpoints import refuse_nonfinite

        # In fp16 the first scales overflow; and steps that a rollback has undone are counted, too.
        if 0 < progress.step == progress.nonfinite_steps and not progress.rollbacks and run.accelerator.scaler is None:
            remedy = "Look at the examples in metrics.jsonl, or lower the learning rate"
            raise UserError(f"none of {progress.step} steps had a finite gradient: no weight has changed. {remedy}.")
        self._is_trained = True
        refuse_nonfinite(run, state, progress)

    def before_training(self, run: Run, parts: Parts) -> None:
        self._has_begun = True

    def stopped(self, run: Run, step: int | None) -> None:
        """Says so, and leaves ``stopped.json``, a sign for schedulers: launchers do not pass on the exit status."""
        outputs, names = run.outputs, [*run.stop, None]
        saved = "; a checkpoint is written" if step in outputs.steps() else ""
        where = f"after step {step}{saved}" if step is not None else "while the data was prepared"
        step = step if step is not None else self._newest_step()
        if outputs.is_main:
            with suppress(UserError):  # on a full disk the checkpoint counts
                write_whole(outputs.folder / STOPPED, json.dumps({"step": step, "signal": names[0]}))
        again = f"run {self._same_command()} again to resume from step {step}"
        outputs.say(f"stopped by {names[0] or 'a signal to another process'} {where}: {again}.")

    def failed(self, run: Run | None, error: Exception) -> str | None:
        """Explains a disk that cannot be written; empty if a rank is lost, which one rank has then reported."""
        if self._watch is not None and self._watch.concludes(error):
            return ""
        if found := re.search(r"\(os error (\d+)\)$", str(error)):  # libraries in Rust raise no OSError
            error = OSError(int(found[1]), os.strerror(int(found[1])))
        if isinstance(error, OSError):
            folder, name = Path(self._config.output.output_dir), error.filename  # a sync names none
            is_own = folder.resolve() in Path(name).resolve().parents if isinstance(name, str) else self._is_trained
            if error.errno in FULL or (is_own and error.errno in REFUSED):  # other files are only read
                shutil.rmtree(folder / ".partial-final", ignore_errors=True)
                elsewhere = " Set HF_HOME or TMPDIR to a disk with room." if name and not is_own else ""
                return f"{name or folder} cannot be written: {error.strerror}.{elsewhere} {self._how_to_resume()}"
        if self._is_trained:
            show_error(f"the work after the last step has failed. {self._how_to_resume()}")
        return None

    def _same_command(self) -> str:
        """The command that resumes this run: the one that started it, unless that one says where to start."""
        needs_flag = self._has_begun and self._newest_step() > 0 and self._config.output.resume != "auto"
        return "the same command with --resume auto" if needs_flag else "the same command"

    def _newest_step(self) -> int:
        """The newest checkpoint's step, or 0. Checkpoints from before a run from scratch are another run's."""
        from train.checkpoint import by_step

        is_new = self._config.output.resume == "never" and not self._has_begun
        return 0 if is_new else max(by_step(Path(self._config.output.output_dir) / "checkpoints"), default=0)

    def _how_to_resume(self) -> str:
        if self._is_trained:
            return f"Training is done and its checkpoint is written: {self._same_command()} makes what is missing."
        if step := self._newest_step():
            return f"Run {self._same_command()} again to resume from step {step}."
        return "There is no checkpoint yet: the same command starts from scratch. A smaller --save_every_steps helps."

    def finished(self, run: Run, parts: Parts, summary: dict[str, Any]) -> None:
        summary["checkpoints_in_background"] = self._saving.checkpoints_in_background
        summary["longest_save_stall_seconds"] = self._saving.longest_stall_seconds
        if self._recovering:
            summary["oom_recoveries"] = sum(exchange(self._recovering.recoveries))


def said_by(run: Run, by_first: Callable[[str], object]) -> Callable[[str], object]:
    """The function that shows a line: ``by_first`` on rank 0, a plain print on others, whose outputs are silent."""
    return partial(print, f"rank {rank}:", file=sys.stderr, flush=True) if (rank := run.launch.rank) else by_first


def refuse_strangers(environment: Mapping[str, str], world_size: int) -> None:
    """Stops a process that was meant to be one of several, and is alone or does not know where to meet them."""
    names = ["SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE"]
    found = {"WORLD_SIZE": world_size} | {n: int(environment.get(n) or 1) for n in names if "RANK" not in environment}
    ranks, started = [environment.get("RANK") or "0", environment.get("LOCAL_RANK") or "-1"], max(found.values())
    is_one_of_several = started > 1 or ranks != ["0", "-1"]  # a single process may have rank 0; notebooks have -1
    if is_one_of_several and not all(environment.get(name) for name in ("RANK", "MASTER_ADDR", "MASTER_PORT")):
        what = f"{started} process(es) were started that do not know each other: no RANK, MASTER_ADDR or MASTER_PORT"
        remedy = "Start one launcher per host, accelerate launch or torchrun (scripts/slurm.sbatch shows how)"
        alone = max(found, key=found.__getitem__) if started > 1 else "RANK and LOCAL_RANK"
        raise UserError(f"{what}. {remedy}; for one process unset {alone}.")
    # accelerate launch gives an address to meet at, but no rank, where it has to start several and starts one.
    if started == 1 and "RANK" not in environment and {"ACCELERATE_MIXED_PRECISION", "MASTER_PORT"} <= {*environment}:
        what = "the launcher was asked for several processes and started one. On CPUs use accelerate_configs/ddp.yaml"
        raise UserError(f"{what} without --cpu; for one process give --num_processes 1 and unset MASTER_PORT.")
