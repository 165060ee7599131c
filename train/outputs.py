"""What a run leaves in its folder and shows on the way."""

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from train import checkpoint, figures
from train.config import Config, dump
from train.records import STARTED, Evaluation, Parts, Progress, Run, UserError
from train.state import TrainingState


class Outputs:
    """The output folder, the metrics log and the progress bar; silent on all ranks but the first."""

    def __init__(self, config: Config, accelerator: Accelerator, is_silent: bool = False) -> None:
        self.config, self._is_first = config, accelerator.is_main_process
        folder = self.folder = Path(config.output.output_dir)
        self.checkpoints, self.final, self.metrics = folder / "checkpoints", folder / "final", folder / "metrics.jsonl"
        self.notes: list[str] = []
        self.is_main = self._is_first and not is_silent
        self.bar: tqdm[Any] = tqdm(disable=True)
        self.seconds_to_first_step: float | None = None
        self.validations: dict[int, Evaluation] = {}  # those that this process made, by step
        self.logged = set[tuple[Any, ...]]()  # (split, step, data) of those of which the log had a row before
        self.validation_data: str | None = None  # the digest of its examples, where an extra knows it

    def say(self, line: str) -> None:
        """A line for the person who watches."""
        if self.is_main:
            tqdm.write(line, file=sys.stdout)
            sys.stdout.flush()

    def note(self, *lines: str | None) -> None:
        """Lines that also belong in the summary; each is said once."""
        for line in (line for line in map(figures.without_secrets, filter(None, lines)) if line not in self.notes):
            self.say(line)
            self.notes.append(line)

    def prepare(self) -> None:
        """Makes the folders, so that one that cannot be made is noticed early; by one rank."""
        with figures.writable(self.checkpoints):
            figures.make_folder(self.checkpoints)

    def resume(self, run: Run, parts: Parts) -> Progress:
        """Restores the checkpoint that ``--resume`` means, if there is one; UserError if it is damaged or foreign."""
        if (found := self.from_main(self._checkpoint_to_resume)) is None:
            return Progress()
        check = partial(run.extras.each, "check_identity", run, found, parts.state.identity)
        progress = checkpoint.restore(found, parts.state, check)
        self.say(f"resumed from {found} at step {progress.step}")
        return run.extras.pipe("resumed", run, progress, parts)

    def _checkpoint_to_resume(self) -> Path | None:
        resume = self.config.output.resume
        if resume == "auto":
            found, problems = checkpoint.newest_good(self.checkpoints)
            self.note(*(f"damaged checkpoint skipped: {problem}" for problem in problems))
            return found
        if resume == "never":
            return None
        named = Path(resume).resolve()  # what a link leads to is meant
        if (problem := checkpoint.verify(named)) is not None:
            raise UserError(f"resume: {resume} is not an intact checkpoint: {problem}.")
        if named.parent != self.checkpoints.resolve() and (self.steps() or self.earlier_summary):
            raise UserError(f"resume: {resume} is not of the run in {self.folder}: give a new --output_dir, or auto.")
        return named

    def from_main(self, choose: Callable[[], Any]) -> Any:
        """Calls ``choose`` on the main process; every rank returns its result, or raises its UserError."""
        return checkpoint.together(choose, self._is_first)[0]

    def steps(self) -> dict[int, Path]:
        """The checkpoints in this folder by step, oldest first."""
        return checkpoint.by_step(self.checkpoints)

    def save(self, run: Run, state: TrainingState, progress: Progress, wait: bool) -> None:
        """Writes a checkpoint and removes old ones. A subclass may do both in the background, unless ``wait``."""
        self.sync_log()
        checkpoint.write(self.checkpoints, state, progress, run.accelerator.process_index)
        self.rotate(run, progress)

    def rotate(self, run: Run, progress: Progress) -> None:
        """Removes old checkpoints, once that of ``progress`` is in place."""
        if self.is_main:
            try:
                newest = set(list(self.steps())[-self.config.output.save_total_limit :])
                checkpoint.rotate(self.checkpoints, run.extras.pipe("keep", run, newest, progress))
            except OSError as error:  # the other ranks continue, and the next rotation tries again
                self.note(f"an old checkpoint in {self.checkpoints} could not be removed: {error.strerror or error}")

    def begin(self, run: Run, parts: Parts, progress: Progress) -> None:
        """Training is about to start: keeps what belongs to this run, writes the configuration, opens the bar."""
        if self.is_main:
            self.discard_later(progress)
            figures.write_whole(self.folder / "config.yaml", dump(run.config))
            size: Any = {"total": parts.total_steps, "initial": progress.step, "dynamic_ncols": True}
            self.bar = tqdm(**size, unit="step", smoothing=0.1)
        self.keep_log(progress)

    def discard_later(self, progress: Progress) -> None:
        """Removes checkpoints from after ``progress``, which must not be resumed, and the summary of another run."""
        checkpoint.rotate(self.checkpoints, [step for step in self.steps() if step <= progress.step])
        (self.folder / "summary.json").unlink(missing_ok=True)

    def keep_log(self, progress: Progress) -> None:
        """Drops the rows of the log from after ``progress``, which are written again."""
        if not self.is_main or not self.metrics.exists():
            return
        rows, last = figures.read_metrics(self.metrics), progress.step
        if damaged := sum(map(bool, self.metrics.read_bytes().splitlines())) - len(rows):
            self.note(f"{self.metrics}: a crash has damaged {figures.several(damaged, 'line')}, left out from now on")
        # Tests are run again, and this step's validation too unless the checkpoint knows of it. Which examples a
        # rollback has skipped stays known, although a later one went further back.
        until, place = {"test": -1, "rollback": 10**18}, ("split", "step", "data")
        again = None if progress.evaluated_step == last else ("validation", last, self.validation_data)
        rows = [row for row in rows if row.get("rollbacks", 0) <= progress.rollbacks]
        rows = [row for row in rows if row["step"] <= until.get(row.get("split", row["kind"]), last)]
        kept = [row for row in rows if tuple(map(row.get, place)) != again]
        self.logged = {tuple(map(row.get, place)) for row in kept}
        figures.write_whole(self.metrics, "".join(figures.to_json(row) + "\n" for row in kept))

    def tick(self, step: int) -> None:
        self.seconds_to_first_step = self.seconds_to_first_step or time.perf_counter() - STARTED
        self.bar.update(step - self.bar.n)

    def record(self, run: Run, kind: str, step: int, values: dict[str, Any]) -> None:
        """Writes a line of ``metrics.jsonl`` and tells the extras; the training loss is shown in the progress bar."""
        if self.is_main:
            now = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
            self.write_rows(figures.to_json({"kind": kind, "step": step, "time": now, **values}) + "\n")
        if kind == "train":
            self.bar.set_postfix(loss=values["loss"], refresh=False)
        run.extras.each("recorded", run, kind, step, values)

    def write_rows(self, *rows: str) -> None:
        with figures.writable(self.metrics), self.metrics.open("a", encoding="utf-8") as file:
            file.write("".join(rows))

    def sync_log(self) -> None:
        """Puts the log on the disk before a checkpoint: a run that resumes there does not write its rows again."""
        if self.is_main:
            with suppress(OSError):
                figures.sync(self.metrics)
                figures.sync(self.folder)

    def record_evaluation(self, run: Run, evaluation: Evaluation) -> Evaluation:
        values = {"split": evaluation.split, **evaluation.metrics, "seconds": evaluation.seconds}
        if (evaluation.split, evaluation.step, values.get("data")) not in self.logged:
            self.record(run, "evaluation", evaluation.step, values)
        self.say(f"step {evaluation.step}: {evaluation.split}: {_line_of(evaluation.metrics)}")
        if evaluation.split == "validation":
            self.validations[evaluation.step] = evaluation
        return evaluation

    def write_final(self, state: TrainingState, tokenizer: PreTrainedTokenizerBase) -> None:
        """Makes ``final/`` for ``from_pretrained``; it appears whole, in place of an earlier one. By all ranks."""
        partial = self.folder / f"{checkpoint.PARTIAL}final"
        if self.is_main:
            checkpoint.make_empty(partial)
        state.save_pretrained(partial, keep=self.is_main)
        if self.is_main:
            tokenizer.save_pretrained(partial)
            for path in partial.rglob("*"):
                if path.is_file():  # safetensors writes files that only their owner can read
                    path.chmod(partial.stat().st_mode & 0o666)
                figures.sync(path)
            checkpoint.put_in_place(partial, self.final)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Writes ``summary.json`` and says the last lines a person sees."""
        self.sync_log()
        if self.is_main:
            figures.write_whole(self.folder / "summary.json", figures.to_json(summary, indent=2) + "\n")
        for split, metrics in summary["result"].items():
            self.say(f"{split}: {_line_of(metrics)}")
        what = "skipped or undone" if summary["rollbacks"] else "skipped"
        skipped = f" ({n} {what}: no finite gradient)" if (n := summary["nonfinite_steps"]) else ""
        self.say(
            f"{figures.several(summary['steps'], 'step')}{skipped}, {figures.count(summary['tokens'])} tokens in "
            f"{figures.duration(summary['training_seconds'])}: {figures.count(summary['tokens_per_second'])} tokens/s, "
            + (f"peak memory {figures.gib(peak)}, " if (peak := summary.get("peak_allocated_bytes")) else "")
            + (f"first step after {first:.1f} s" if (first := summary["seconds_to_first_step"]) else "no new steps")
        )
        self.say(f"model: {self.final}   metrics: {self.metrics}")

    def summary(self, run: Run, parts: Parts, progress: Progress, evaluations: Sequence[Evaluation]) -> dict[str, Any]:
        """What ``summary.json`` holds; extras add to it."""
        found = evaluations[0].metrics
        metric = run.config.get("metric_for_best") or parts.data.task.headline_metric
        metric = metric if metric in found else "loss"
        return {
            "status": "done",
            "steps": progress.step,
            "epochs": progress.epoch + progress.step_in_epoch / parts.batches.steps_per_epoch,
            "tokens": progress.tokens_seen,
            "padding_share": 1 - progress.tokens_seen / max(1, progress.positions_seen),
            "metric_name": metric,
            "metric_value": found.get(metric),
            "result": {e.split: e.metrics for e in evaluations},
            "final_step": evaluations[0].step,
            "training_seconds": progress.training_seconds,
            "tokens_per_second": progress.tokens_seen / max(progress.training_seconds, 1e-9),
            "seconds_to_first_step": self.seconds_to_first_step,
            **{name: getattr(progress, name) for name in ("best_step", "best_metric", "nonfinite_steps", "rollbacks")},
            "notes": self.notes,
            "extras": list(run.extras.by_name),
        }

    def is_written(self, run: Run, progress: Progress) -> bool:
        """Whether a finished run of this length is in the folder already; says so."""
        if written := self.is_complete(progress.step, run.extras.first("final_step", run, progress) or progress.step):
            others = "For a new run give --resume never or another --output_dir; for a longer one, a higher --max_steps"
            self.say(f"nothing to do: {self.folder} already holds this run, up to step {progress.step}. {others}.")
        return written

    def is_complete(self, step: int, final_step: int | None = None) -> bool:
        """Whether a run of ``step`` steps, with ``final/`` of ``final_step`` (None: any), has written everything."""
        summary = self.from_main(lambda: self.earlier_summary)
        pushed_to = self.config.get("push_to_hub") and self.config.get("hub_model_id")
        is_of_it = summary.get("steps") == step and final_step in (None, summary.get("final_step"))
        return is_of_it and (not pushed_to or summary.get("pushed_to") == pushed_to)

    @cached_property
    def earlier_summary(self) -> dict[str, Any]:
        """The ``summary.json`` of an earlier process; empty if missing, damaged, or unwanted (``--resume never``)."""
        try:
            summary = json.loads((self.folder / "summary.json").read_text(encoding="utf-8"))
            return dict(summary) if self.config.output.resume != "never" else {}
        except checkpoint.UNREADABLE:
            return {}


def _line_of(metrics: Mapping[str, Any]) -> str:
    shown = {name.replace("_", " "): value for name, value in metrics.items() if isinstance(value, int | float)}
    return ", ".join(f"{name} {figures.number(value)}" for name, value in shown.items())
