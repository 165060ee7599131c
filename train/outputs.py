"""What a run leaves in its folder and shows on the way."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors.torch import save_file
from tqdm import tqdm

from train import checkpoint
from train.config import Config, dump
from train.errors import UserError
from train.extras.adapters.lora import AdapterState
from train.extras.endurance.rollback import sound_step
from train.extras.report.page import write_report
from train.extras.report.trackers import log_to_trackers, start_trackers
from train.extras.report.words import scalars
from train.outputs_log import (
    MetricsLog,
    count,
    duration,
    gib,
    number,
    progress_text,
    without_secrets,
    write_summary,
)
from train.records import Evaluation, Progress
from train.saving import Writing
from train.state import RunState

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PreTrainedTokenizerBase

    from train.tasks.base import Task


SECONDS_FOR_A_LAST_CHECKPOINT = 20.0
NO_ROOM = "checkpoints: the host's memory has no room for a copy of the state, so training waits until each is written"


def how_to_go_on(config: Config) -> str:
    """What to do when the run was cut off."""
    step = checkpoint.newest_step(Path(config.output.output_dir) / "checkpoints")
    if step is None:
        return "There is no checkpoint yet: the same command starts afresh. --save_every_steps writes them."
    return f"Restart with {same_command(config)}: it goes on from the checkpoint of step {step}."


def same_command(config: Config) -> str:
    """The command that goes on with this run: that which began it, unless that one says where to begin."""
    return "the same command" if config.output.resume == "auto" else "the same command and --resume auto"


def _is_known(row: Mapping[str, Any], progress: Progress) -> bool:
    """Whether a row of the log was written before ``progress`` was saved: others are written again."""
    if row["kind"] == "evaluation" and row["step"] == progress.step and row.get("split") == "validation":
        return progress.evaluated_step == progress.step
    return row["step"] <= progress.step


class Outputs:
    """The output folder, the metrics log, the trackers and the progress bar; silent on all ranks but the first."""

    def __init__(self, config: Config, accelerator: Accelerator) -> None:
        self._config, self._accelerator = config, accelerator
        self.folder = Path(config.output.output_dir)
        self.checkpoints = self.folder / "checkpoints"
        self.final = self.folder / "final"
        self.notes: list[str] = []
        self._is_main = accelerator.is_main_process
        self._bar: tqdm[Any] | None = None
        self._log = MetricsLog(self.folder / "metrics.jsonl", enabled=self._is_main)
        self._first_step: float | None = None
        self._evaluations: dict[int, Evaluation] = {}
        self._writing: Writing | None = None
        self._resumed_from: Path | None = None
        self._best_step: int | None = None
        self._sound_step: int | None = None
        self._last_save_failed = False
        self.save_stalls_seconds: list[float] = []
        """How long training stood still for each checkpoint on the way."""
        self.saves_beside_training = 0

    def use(self, config: Config) -> None:
        """``config`` is what the run's choices came to."""
        self._config = config

    def say(self, line: str) -> None:
        """A line for the person who watches."""
        if self._is_main:
            tqdm.write(line, file=sys.stdout)
            sys.stdout.flush()

    def note(self, *lines: str) -> None:
        """Lines that also belong into the summary."""
        for line in map(without_secrets, lines):
            self.say(line)
            self.notes.append(line)

    def prepare(self) -> None:
        """Makes the folder; with ``resume: never`` an earlier run's files move to ``previous-N`` first.

        Raises:
            UserError: the folder cannot be written.
        """
        if self._is_main:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                if self._config.output.resume == "never":
                    self._put_aside()
            except OSError as error:
                reason = error.strerror or error
                raise UserError(
                    f"output_dir: {self.folder} cannot be written: {reason}. Give another --output_dir."
                ) from None
        self._accelerator.wait_for_everyone()

    def _put_aside(self) -> None:
        earlier = [p for p in self.folder.iterdir() if not p.name.startswith("previous-")]
        if earlier:
            self.say(f"resume: never: the earlier run's files are in {self._move_aside(earlier)}")

    def _move_aside(self, paths: Sequence[Path]) -> Path:
        """Moves files of this folder to ``previous-N``, as they lie."""
        number = 1 + max((int(p.name[9:]) for p in self.folder.glob("previous-*") if p.name[9:].isdigit()), default=0)
        aside = self.folder / f"previous-{number}"
        for path in paths:
            to = aside / path.relative_to(self.folder)
            to.parent.mkdir(parents=True, exist_ok=True)
            path.rename(to)
        return aside

    def _leave_other_line(self, step: int) -> None:
        """Moves aside what is not of the line of steps that goes on here.

        That is later checkpoints, be they damaged or those of a run that a person has gone back from, and what was made
        of them. Left in place they would push out the new ones and be resumed from instead.
        """
        paths, made = checkpoint.later_than(self.checkpoints, step), ["final", "summary.json", "report.html"]
        if self._resumed_from is not None and self._resumed_from.parent != self.checkpoints.resolve():
            paths = checkpoint.later_than(self.checkpoints, -1)
            made.append("metrics.jsonl")
        if not paths and self._summary().get("steps", 0) <= step:
            return
        aside = self._move_aside([*paths, *(self.folder / name for name in made if (self.folder / name).exists())])
        self.say(f"what was here of other steps than those up to {step} is in {aside}")

    def resume(self, state: RunState, best_of: str) -> Progress:
        """Restores the checkpoint that ``--resume`` means, if there is one, and says so.

        Args:
            best_of: by what the best step is chosen; a best by something else is forgotten.

        Raises:
            UserError: the checkpoint is damaged or belongs to another run.
        """
        from accelerate.utils import broadcast_object_list

        choice: list[Any] = [None]
        if self._is_main:
            choice[0] = self._checkpoint_to_resume()
        found = broadcast_object_list(choice)[0]
        if isinstance(found, UserError):
            raise found
        progress = Progress()
        if found is not None:
            progress = checkpoint.restore(found, state, self._config.output.allow_changes_on_resume)
            self.say(f"resumed from {found} at step {progress.step}")
            self._resumed_from = found.resolve()
        return self._with_its_best(progress, best_of)

    def _with_its_best(self, progress: Progress, best_of: str | None) -> Progress:
        """``progress`` without its best step where that is of no use any more."""
        if progress.best_step is None:
            return progress
        reason = None
        if progress.best_of != best_of:
            reason = f"the best step so far was chosen by {progress.best_of}, from now on it is by {best_of}"
        elif self._config.output.load_best_model_at_end:
            best = self.checkpoints / f"step-{progress.best_step:08d}"
            if not self._exchange(best.is_dir())[0]:
                reason = f"the checkpoint of the best step so far, {progress.best_step}, is not in {self.checkpoints}"
        if reason is None:
            return progress
        self.note(f"{reason}: it is looked for anew")
        return replace(progress, best_metric=None, best_step=None, best_of=None, evaluations_without_improvement=0)

    def _checkpoint_to_resume(self) -> Path | UserError | None:
        resume = self._config.output.resume
        try:
            if resume == "never":
                return None
            if resume == "auto":
                found, problems = checkpoint.newest_good(self.checkpoints)
                for problem in problems:
                    self.note(f"damaged checkpoint passed over: {problem}")
                return found
            named = Path(resume).resolve()  # a link that a person names is what that person wants
            problem = checkpoint.verify(named)
            if problem is not None:
                raise UserError(f"resume: {resume} is not an intact checkpoint: {problem}.")
            return named
        except UserError as error:
            return error

    def save(self, state: RunState, progress: Progress, wait: bool) -> None:
        """A checkpoint, and then the removal of those that are no longer needed.

        Args:
            wait: until it is on the disk; otherwise it is written while the run goes on, and the next call sees to
                it. One that cannot be written then is told aloud, and only the next one after it ends the run.

        Raises:
            UserError: it cannot be written, nor could the one before it.
        """
        started, beside = time.perf_counter(), self._config.output.save_in_background and not wait
        self._finish_saving(forgives=True)
        exchange, rank = self._exchange, self._accelerator.process_index
        try:
            self._writing = Writing(self.checkpoints, state, progress, rank, exchange, copies=beside)
        except UserError as error:
            self._save_failed(error, forgives=beside)
        self._best_step = progress.best_step
        if self._config.optimization.max_rollbacks:
            self._sound_step = sound_step(progress, self._config.optimization.loss_spike_factor)
        if beside and self._writing is not None and self._writing.needs_waiting:
            beside = False
            if NO_ROOM not in self.notes:
                self.note(NO_ROOM)
        self.saves_beside_training += beside
        if not beside:
            self._finish_saving(forgives=False)
        if not wait:
            self.save_stalls_seconds.append(time.perf_counter() - started)

    def _finish_saving(self, forgives: bool) -> None:
        if self._writing is None:
            return
        writing, self._writing = self._writing, None
        try:
            writing.finish()
        except UserError as error:
            self._save_failed(error, forgives)
            return
        self._last_save_failed = False
        if self._is_main:
            try:
                output = self._config.output
                keeps_best = output.load_best_model_at_end
                checkpoint.rotate(
                    self.checkpoints, output.save_total_limit, self._best_step, self._sound_step, keeps_best
                )
            except OSError as error:  # the other ranks go on, and the next rotation tries again
                self.note(f"an old checkpoint in {self.checkpoints} could not be removed: {error.strerror or error}")

    def _save_failed(self, error: UserError, forgives: bool) -> None:
        """Tells of a failure; raises it where it is the second in a row, or the run cannot go on from it."""
        again, self._last_save_failed = self._last_save_failed, True
        if again or not forgives:
            raise error
        self.note(f"{error} Training goes on, and the next checkpoint is tried.")

    def go_back(self, state: RunState, until_step: int) -> Progress | None:
        """Restores the newest good checkpoint not after ``until_step``, and removes later ones; None: there is none.

        Called by all ranks together.

        Raises:
            UserError: there are such checkpoints, but none is intact.
        """
        self._finish_saving(forgives=True)
        choice: Path | UserError | None = None
        if self._is_main:
            try:
                choice, problems = checkpoint.newest_good(self.checkpoints, until_step)
                self.note(*(f"damaged checkpoint passed over: {problem}" for problem in problems))
                if choice is not None:
                    checkpoint.remove_after(self.checkpoints, choice)
            except UserError as error:
                choice = error
            except OSError as error:
                choice = UserError(f"a checkpoint in {self.checkpoints} could not be removed: {error.strerror}.")
        found = self._exchange(choice)[0]
        if isinstance(found, UserError):
            raise found
        if found is None:
            return None
        progress = checkpoint.restore(found, state, self._config.output.allow_changes_on_resume)
        self._log.keep(lambda row: _is_known(row, progress))
        return self._with_its_best(progress, progress.best_of)

    def let_writing_end(self) -> None:
        """Gives a checkpoint that is being written a moment to get there; for a run that ends in another way."""
        if self._writing is not None:
            self._writing.wait(SECONDS_FOR_A_LAST_CHECKPOINT)

    def _exchange(self, value: Any) -> list[Any]:
        from accelerate.utils import gather_object

        return gather_object([value]) if self._accelerator.num_processes > 1 else [value]

    def begin(self, total_steps: int, progress: Progress) -> None:
        """Training is about to start: what is of this run stays, the configuration, trackers, the one progress line."""
        if self._is_main:
            self._leave_other_line(progress.step)
            (self.folder / "config.yaml").write_text(dump(self._config), encoding="utf-8")
            (self.folder / "stopped.json").unlink(missing_ok=True)
        self._log.keep(
            lambda row: (
                _is_known(row, progress)
                and row.get("rollbacks", 0) <= progress.rollbacks
                and row.get("split") != "test"  # it is evaluated at the end, perhaps once more
            )
        )
        start_trackers(self._accelerator, self._config)
        self._bar = tqdm(
            total=total_steps,
            initial=progress.step,
            disable=not self._is_main,
            unit="step",
            dynamic_ncols=True,
            smoothing=0.1,
        )

    def tick(self, step: int) -> None:
        """One more step is done."""
        if self._first_step is None:
            self._first_step = time.perf_counter()
        if self._bar is not None:
            self._bar.update(step - self._bar.n)

    def seconds_to_first_step(self, started: float) -> float | None:
        """From ``started`` to the end of the first step."""
        return None if self._first_step is None else self._first_step - started

    def record(self, kind: str, step: int, values: dict[str, Any]) -> None:
        """A line of ``metrics.jsonl``, the trackers' scalars and the progress line."""
        self._log.write(kind, step, values)
        prefix = values.get("split", kind)
        scalars = {f"{prefix}/{k}": v for k, v in values.items() if isinstance(v, int | float)}
        log_to_trackers(self._accelerator, scalars, step)
        if kind == "rollback":
            self.note(f"{values['reason']} Went back to the checkpoint of step {step}, and past the data since.")
        if kind == "train" and self._bar is not None:
            self._bar.set_postfix_str(progress_text(values))

    def record_evaluation(self, evaluation: Evaluation) -> Evaluation:
        """The same for an evaluation, which is also said aloud."""
        values = {"split": evaluation.split, **evaluation.metrics, "seconds": evaluation.seconds}
        self.record("evaluation", evaluation.step, values)
        figures = [f"{k.replace('_', ' ')} {number(v)}" for k, v in evaluation.metrics.items() if isinstance(v, float)]
        self.say(f"step {evaluation.step}: {evaluation.split}: {', '.join(figures)}")
        if evaluation.split == "validation":
            self._evaluations[evaluation.step] = evaluation
        return evaluation

    def evaluation_at(self, step: int) -> Evaluation | None:
        """The validation made after ``step``, unless an earlier process made it."""
        return self._evaluations.get(step)

    def stopped(self, received: str | None, step: int) -> None:
        """A signal stopped the run after ``step``: says so, and leaves ``stopped.json`` as a sign for schedulers.

        Launchers do not hand on the exit status that would tell them.
        """
        self._leave_sign(received, step)
        self.say(
            f"stopped by {received or 'a signal to another process'} after step {step}; a checkpoint is written and "
            f"{same_command(self._config)} goes on from it."
        )
        self.close()

    def stopped_before_training(self, received: str | None) -> None:
        """The same while the data was prepared: there is nothing new to save."""
        step = checkpoint.newest_step(self.checkpoints) or 0
        self._leave_sign(received, step)
        self.say(
            f"stopped by {received} while the data was prepared; {same_command(self._config)} goes on from step {step}."
        )

    def _leave_sign(self, received: str | None, step: int) -> None:
        if self._is_main:
            sign = {"step": step, "signal": received}
            (self.folder / "stopped.json").write_text(json.dumps(sign), encoding="utf-8")

    def stop_bar(self) -> None:
        """Ends the progress line."""
        if self._bar is not None:
            self._bar.close()

    def close(self) -> None:
        """Ends the trackers."""
        if self._config.output.report_to:
            self._accelerator.end_training()

    def write_final(self, state: RunState, tokenizer: PreTrainedTokenizerBase, card: str) -> None:
        """``final/``: weights, configuration, tokenizer and model card, as ``from_pretrained`` wants them.

        Called by all ranks together.
        """
        weights, model = state.whole_tensors(keep=self._is_main), state.model
        adapter = state.adapter_tensors(keep=self._is_main) if isinstance(state, AdapterState) else {}
        if not self._is_main:
            return
        self.final.mkdir(exist_ok=True)
        if isinstance(state, AdapterState):
            model = state.plain_model()
            state.write_adapter(self.final / "adapter", adapter)
        if hasattr(model, "save_pretrained"):
            from transformers.utils import logging

            logging.disable_progress_bar()
            model.config.use_cache = True  # pyright: ignore - off in training only
            dtype = next(iter(weights.values())).dtype
            model.save_pretrained(self.final, state_dict=weights)  # pyright: ignore
            # An engine may compute with halves of these weights; who loads them should not halve them again.
            model.config.dtype = dtype  # pyright: ignore
            model.config.save_pretrained(self.final)  # pyright: ignore
        else:
            save_file(weights, self.final / "model.safetensors")
        tokenizer.save_pretrained(self.final)
        (self.final / "README.md").write_text(card, encoding="utf-8")
        if self._config.output.push_to_hub:
            self._push()

    def _push(self) -> None:
        from huggingface_hub import HfApi

        api, name = HfApi(), self._config.output.hub_model_id
        assert name is not None
        try:
            api.create_repo(name, exist_ok=True)
            api.upload_folder(repo_id=name, folder_path=self.final)
        except Exception as error:  # the library raises errors of several HTTP clients
            raise UserError(
                f"push_to_hub: {name}: {type(error).__name__}. The model is in {self.final}; log in with 'hf auth "
                "login' and upload that folder."
            ) from None

    def write_report(self, task: type[Task], summary: dict[str, Any], sample: str | None) -> None:
        """``summary.json`` and ``report.html``."""
        if not self._is_main:
            return
        write_summary(self.folder, summary)
        write_report(self._config, task, summary, sample)

    def load_best(self, state: RunState, step: int) -> bool:
        """Puts the weights of the checkpoint of ``step`` into ``state``; False, and a note, where it is not intact."""
        folder = self.checkpoints / f"step-{step:08d}"
        problem = self._exchange(checkpoint.verify(folder) if self._is_main else None)[0]
        if problem is not None:
            self.note(f"the checkpoint of the best step, {step}, cannot be used ({problem}): final/ is of the last one")
            return False
        checkpoint.load_weights(state, folder)
        return True

    def say_result(self, summary: dict[str, Any], sample: str | None) -> None:
        """The last lines a person sees."""
        if sample:
            self.say(f"\nthe model goes on from ⟪:\n{sample}\n")
        for split, metrics in summary["result"].items():
            self.say(
                f"{split}: " + ", ".join(f"{k.replace('_', ' ')} {number(v)}" for k, v in scalars(metrics).items())
            )
        if summary["references"]:
            known = ", ".join(f"{name} {value:.3f}" for name, value in summary["references"].items())
            self.say(f"for comparison, bits per byte of the same text: {known}")
        self.say(
            f"{summary['steps']:,} steps, {count(summary['tokens'])} tokens in "
            f"{duration(summary['training_seconds'])}: {count(summary['tokens_per_second'])} tokens/s, peak memory "
            f"{gib(summary['peak_allocated_bytes'])}, first step after {summary['seconds_to_first_step'] or 0:.1f} s"
        )
        self.say(
            f"model: {self.final}   report: {self.folder / 'report.html'}   metrics: {self.folder / 'metrics.jsonl'}"
        )

    def is_complete(self, step: int, final_step: int | None = None) -> bool:
        """Whether a run of ``step`` steps has already written everything here that is asked of it.

        Args:
            final_step: of whose weights ``final/`` should be; any for None.
        """
        summary, pushed_to = self._summary(), self._config.output.push_to_hub and self._config.output.hub_model_id
        return (
            summary.get("steps") == step
            and final_step in (None, summary.get("final_step"))
            and (not pushed_to or summary.get("pushed_to") == pushed_to)
            and self.final.is_dir()
        )

    def _summary(self) -> dict[str, Any]:
        """What ``summary.json`` says; nothing where there is none."""
        try:
            summary = json.loads((self.folder / "summary.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return summary if isinstance(summary, dict) and isinstance(summary.get("steps"), int) else {}
