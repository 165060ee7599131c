"""Further metrics, and the best evaluated step: its checkpoint stays, for ``final/`` too; training may end early."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from train import extras
from train.config import option
from train.figures import read_metrics
from train.records import Evaluation, Parts, Progress, Run, UserError, one_line

SMALLER_IS_BETTER = ("loss", "perplexity", "bits_per_byte", "error", "mae", "mse")  # in the name of a metric
with_eval = functools.partial(option, needs="eval_every_steps")


@dataclass(frozen=True)
class Options:
    """Metrics; which evaluated step is the best, and what follows from it."""

    metrics: tuple[str, ...] = option((), "Further metrics of 🤗 evaluate for classification: code by name or folder.")
    metric_for_best: str | None = option(None, "Default: the task's own (loss, accuracy).")
    greater_is_better: bool | None = option(None, "Default: the task's, or not for losses, errors and perplexity.")
    load_best_model_at_end: bool = with_eval(False, "final/ holds the best evaluated weights instead of the last.")
    early_stopping_patience: int | None = with_eval(None, "Stop after so many evaluations without a better one.", ge=1)


class Extra(extras.Extra):
    _metric, _grows, _data, _best_of = "loss", False, "", ""  # the last: what is compared
    _further: Sequence[Any] = ()
    _bests = tuple[int, ...]()  # the best steps that this process has seen, one after the other
    _digests, _earlier = dict[str, str](), dict[str, Any]()  # of held-out splits; the summary of an earlier process
    _ended: int | None = None  # of which step final/ is, where a finished run is only evaluated again

    def change_data(self, run: Run, data: extras.PreparedData) -> extras.PreparedData:
        """Loads the further metrics, on the first rank of each host first; raises UserError for one of no use."""
        names = run.config.of(Options).metrics
        if names and not (data.task.labelled and len(data.label_names) > 1):
            raise UserError(f"metrics: {', '.join(names)} would compare classes, and this task has none: leave it out.")
        self._further = [load_metric(name, len(data.label_names)) for name in names]
        return data

    def prepared(self, run: Run, data: extras.PreparedData, batches: extras.Batches) -> None:
        """Raises UserError for a metric that the task does not have, before training."""
        import numpy as np

        from train.extras.cache import examples_digest

        options, examples = run.config.of(Options), data.examples
        self._metric = options.metric_for_best or data.task.default_metric
        by_name = not any(part in self._metric for part in SMALLER_IS_BETTER)
        if self._metric == data.task.default_metric and data.task.greater_is_better is not None:
            by_name = data.task.greater_is_better
        self._grows = by_name if options.greater_is_better is None else options.greater_is_better
        if options.load_best_model_at_end or options.early_stopping_patience:
            best = f"{'highest' if self._grows else 'lowest'} {self._metric}"
            run.outputs.note(f"best: the {best} of the validation split")
        self._digests = {split: examples_digest(examples[split]) for split in {"test", "validation"} & examples.keys()}
        self._data = run.outputs.validation_data = self._digests["validation"]
        if run.outputs.is_main:  # alone, because it has to read all of final/ to trust its summary
            self._earlier = run.outputs.earlier_summary
            known = self._earlier.get("result", {})
            others = (known.get(split, {"data": ""}).get("data", own) != own for split, own in self._digests.items())
            if known and any(others):
                run.outputs.earlier_summary = {}  # a run that is done is evaluated again, on these
        self._best_of = f"{self._metric}{', reversed,' if self._grows != by_name else ''} on data {self._data}"
        if self._metric != "loss":  # which every task has
            one, found = np.array([[0.0, 1, 1, 1, 0, 0]]), {self._metric: 0.0}
            with suppress(Exception):  # a fork's own may want more rows, counts, or the model
                own = data.task.metrics(one, examples["validation"], data.label_names)
                found = own | run.extras.merged("metrics", run, data, "validation", one)
            self.evaluated(run, Progress(), Evaluation("validation", 0, found))

    def metrics(self, run: Run, data: extras.PreparedData, split: str, table: extras.np.ndarray) -> dict[str, Any]:
        """Those asked for by name; ``data``: which examples the others are of."""
        found: dict[str, Any] = {"data": self._digests[split]} if split in self._digests else {}
        for metric in self._further:
            predictions, references = table[:, 4:6].T.astype(int)
            found |= metric.compute(predictions=predictions, references=references) or {}
        return found

    def evaluated(self, run: Run, progress: Progress, evaluation: Evaluation) -> Progress:
        """``progress`` with the evaluation remembered if it is the best; UserError where it lacks the metric."""
        if isinstance(found := evaluation.metrics.get(self._metric), list | dict | str | None):
            known = ", ".join(k for k, v in evaluation.metrics.items() if isinstance(v, float))
            whose = "metric_for_best" if run.config.of(Options).metric_for_best else "default_metric of the task"
            raise UserError(f"{whose}: {self._metric!r} is not among this task's metrics: {known}.")
        if self._ended is not None:
            return progress
        value, best = float(found), progress.best_metric
        is_better = best is None or (value > best if self._grows else value < best)
        in_vain = progress.evaluations_without_improvement + 1
        progress = replace(progress, best_of=self._best_of, evaluations_without_improvement=in_vain)
        if math.isnan(value) or not is_better:
            return progress
        self._bests += (progress.step,)
        return replace(progress, best_metric=value, best_step=progress.step, evaluations_without_improvement=0)

    def resumed(self, run: Run, progress: Progress, parts: Parts) -> Progress:
        """``progress`` with the evaluation after its step, if the log has one that the checkpoint does not.

        The best step is dropped if it can no longer be compared with others, or no longer be loaded.
        """
        from train.checkpoint import verify

        outputs, best, loads_best = run.outputs, progress.best_step, run.config.of(Options).load_best_model_at_end
        self._bests = (best or 0,)
        past = f"the checkpoint, of step {progress.step:,}, is past the {parts.total_steps:,} steps that were asked for"
        outputs.note(past if progress.step > parts.total_steps else None)
        is_gone = loads_best and best is not None and not outputs.from_main(lambda: best in outputs.steps())
        earlier, is_again = outputs.from_main(lambda: (self._earlier, not outputs.earlier_summary))
        is_other = progress.best_of not in (None, self._best_of)
        is_over = progress.step >= parts.total_steps or self.ends_early(run, progress)
        if is_over and (is_other or is_again or is_gone) and earlier.get("steps") == progress.step:
            self._ended = chosen = earlier.get("final_step", progress.step)
            outputs.note(f"the run has ended: final/ keeps its model, of step {chosen}; to train again, --resume never")
            folder = outputs.checkpoints / f"step-{chosen:08d}"
            if is_again and chosen != progress.step and (why := outputs.from_main(lambda: verify(folder))) is not None:
                remedy = f"Evaluate it by a run of its own with --model {outputs.final}, or use from_pretrained"
                raise UserError(f"final/ is evaluated from {folder}, which cannot be used: {why}. {remedy}.")
        elif best is not None and (is_gone or is_other):
            reason = f"it was chosen by {progress.best_of}; metric or validation data have changed: {self._best_of}"
            reason = f"its checkpoint is not in {outputs.checkpoints}" if is_gone else reason
            outputs.note(f"the best step so far, {best}, cannot be used ({reason}): the search for it starts again")
            progress = replace(progress, best_metric=None, best_step=None, evaluations_without_improvement=0)

        def logged() -> list[dict[str, Any]]:
            rows = (row for row in read_metrics(outputs.metrics) if row["step"] == step)
            return [row for row in rows if row.get("data") == self._data and self._metric in row][:1]

        if progress.evaluated_step == (step := progress.step) or not (found := outputs.from_main(logged)):
            return progress
        metrics = {name: math.nan if value is None else value for name, value in found[0].items()}
        return self.evaluated(run, replace(progress, evaluated_step=step), Evaluation("validation", step, metrics))

    def ends_early(self, run: Run, progress: Progress) -> bool:
        patience = run.config.of(Options).early_stopping_patience
        return patience is not None and progress.evaluations_without_improvement >= patience

    def keep(self, run: Run, kept: set[int], progress: Progress) -> set[int]:
        """The best step, too, and what was the best at each that stays; if it was not written, the best there is."""
        is_there = (best := progress.best_step) is None or best in run.outputs.steps()
        earlier = {max((best for best in self._bests if best < step), default=0) for step in kept}
        return kept | earlier - {0} | {best or 0, *(() if is_there else self._best_first(run)[:1])}

    def _best_first(self, run: Run) -> list[int]:
        """Evaluated steps whose checkpoints are there, as the log has them."""
        name, there, rows = self._metric, run.outputs.steps(), read_metrics(run.outputs.metrics)
        known = {r["step"]: r[name] for r in rows if r.get("data") == self._data and r.get(name) is not None}
        return sorted((step for step in known if step in there), key=lambda step: known[step], reverse=self._grows)

    def finishing(self, run: Run, state: extras.TrainingState, progress: Progress) -> None:
        if self.ends_early(run, progress):
            number = progress.evaluations_without_improvement
            run.outputs.note(f"stopped early: the last {number} evaluations did not improve {self._metric}")
        if (chosen := self.final_step(run, progress)) is not None:
            run.outputs.note(f"final/ has the best weights, of step {chosen}")
        elif progress.best_step is None and run.config.of(Options).load_best_model_at_end and self._ended is None:
            run.outputs.note(f"{self._metric} was never a number: final/ has the last weights")

    def final_step(self, run: Run, progress: Progress) -> int | None:
        """The best whose checkpoint is intact; a note on those that are not. UserError where one cannot be read now."""
        from train.checkpoint import verify

        outputs, best = run.outputs, progress.best_step
        if self._ended is not None:  # its model stays
            return self._ended if self._ended != progress.step else None
        if best is None or not run.config.of(Options).load_best_model_at_end:
            return None

        def choose() -> int | None:
            for step in dict.fromkeys([best, *self._best_first(run)]):
                if (why := verify(outputs.checkpoints / f"step-{step:08d}")) is None:
                    return step
                outputs.note(f"the best checkpoint, of step {step}, cannot be used ({why})")
            return outputs.note("no evaluated checkpoint is intact: final/ has the last weights")

        return best if outputs.is_complete(progress.step, best) else outputs.from_main(choose)  # final/ has it already

    def finished(self, run: Run, parts: Parts, summary: dict[str, Any]) -> None:
        known = self._earlier if self._ended is not None else {}  # only evaluated again: peaks are those of training
        summary |= {name: value for name, value in known.items() if name.startswith(("peak_", "predicted_"))}


def load_metric(name: str, num_classes: int) -> Any:
    """A metric by its name on the Hub or its folder, tried once, before the first step rather than after it.

    Raises UserError for one that cannot be loaded, or not be computed from predicted classes.
    """
    try:
        import evaluate  # here: it takes two seconds

        metric, classes = evaluate.load(name, keep_in_memory=True), list(range(num_classes))
        metric.compute(predictions=classes, references=classes)
        return metric
    except Exception as error:  # metric scripts fail in their own ways
        offline = "Metrics on the Hub need a connection; accuracy, macro F1 and the confusion matrix need none."
        raise UserError(f"metrics: {name!r} cannot be used: {one_line(error)} {offline}") from None
