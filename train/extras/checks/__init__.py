"""Mistakes found early, each told in one message with what is wrong, where, and what to do.

Without this extra the same mistakes end in tracebacks of libraries, late, or train something other than was meant.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from train import extras
from train.config import Config, option, to_values
from train.extras.checks import settings
from train.figures import read_metrics
from train.launch import Launch
from train.records import Corpus, Parts, Progress, Run, UserError, arithmetic_of, exchange


@dataclass(frozen=True)
class Options:
    """Which checks are made."""

    check_model: bool = option(True, "Try a small copy of the model; refuse one that cannot learn the task.")
    allow_changes_on_resume: bool = option(False, "Resume with other data, model or seed.")


class Extra(extras.Extra):
    _data = ""  # a digest of the training examples
    _pad_id = 0

    def check(self, config: Config, launch: Launch) -> None:
        settings.check_launch_file()
        settings.check_settings(config, launch)

    def started(self, run: Run) -> None:
        start = Path(run.config.output.resume)
        if str(start) not in ("auto", "never") and (not start.is_dir() or (start / "checkpoints").is_dir()):
            raise UserError(f"resume: {start} is not a checkpoint: give auto, or …/checkpoints/step-NNNNNNNN of a run.")
        if (known := run.accelerator.num_processes) != run.launch.world_size:
            what = f"the launcher started {run.launch.world_size} processes, but this one knows of {known}"
            raise UserError(f"{what}: they would all train the same. See accelerate_configs/ for files that work.")

    def change_corpus(self, task: extras.Task, corpus: Corpus) -> Corpus:
        from train.extras.checks.documents import with_known_labels

        return with_known_labels(corpus, task) if task.labelled else corpus

    def check_model_config(self, run: Run, model_config: Any, task: type[extras.Task], tokenizer: Any) -> None:
        import transformers

        from train.extras.checks import fit
        from train.tasks import num_ids, pad_token_id

        if isinstance(tokenizer, transformers.PreTrainedTokenizerBase):  # a plan has a stand-in
            fit.check_tokenizer(task(run.config), tokenizer)
        self._pad_id = pad_token_id(tokenizer)
        if model_config is not None:
            known, own = getattr(transformers, task.auto_class)._model_mapping, getattr(model_config, "auto_map", None)
            if type(model_config) not in known and task.auto_class not in (own or {}):
                what = f"transformers cannot build {model_config.model_type} for {task.name}"
                raise UserError(f"model: {what}: give another model or task.")
            fit.check_sizes(model_config.get_text_config(), num_ids(tokenizer), run.config.data.max_length)

    def check_model(self, run: Run, network: extras.Module, task: type[extras.Task], sizes: tuple[int, int]) -> None:
        from train.extras.checks import fit

        fit.check_network(run, network, sizes)
        if not run.is_planned and run.config.of(Options).check_model:
            # Real numbers next to a plan's fake ones have damaged the heap (torch 2.13).
            fit.try_small_copy(run, network, task, (*sizes, self._pad_id))

    def prepared(self, run: Run, data: extras.PreparedData, batches: extras.Batches) -> None:
        from train.extras.cache import examples_digest
        from train.extras.checks.documents import describe

        digests = {split: examples_digest(examples) for split, examples in data.examples.items()}
        self._data = digests["train"]
        if any(others != digests for others in exchange(digests)):
            raise UserError(f"{data.corpus.name} gives each process different data: seed shuffles, and sort sets.")
        run.outputs.note(*describe(data, run.config))

    def failed(self, run: Run | None, error: Exception) -> str | None:
        """Says where an index out of range may come from, which a card reports only as an assertion."""
        if "abruptly died during map" in str(error):  # as 🤗 Datasets says it
            why = "a process that tokenises was killed, most likely because the host's memory was full"
            return f"{why}. Try --preprocessing_num_workers 1, or shorter documents (--sample_by line)."
        if "optimizer got an empty parameter list" in str(error):
            return "model: none of its parameters is trained. Leave some with requires_grad=True."
        if run is not None and re.search("index out of range in self|device-side assert", str(error)):
            length, for_each = run.config.data.max_length, "for each token of the tokenizer, for each label"
            hint = f"A table of the model may be too small: are there max_length {length} positions, a row {for_each}?"
            getattr(error, "add_note", run.outputs.say)(hint)  # a traceback ends with notes, from Python 3.11 on
        return None

    def ready(self, run: Run, parts: Parts) -> None:
        from train.extras.checks import fit
        from train.extras.checks.documents import describe_training

        run.outputs.note(*describe_training(run, parts))
        if run.accelerator.is_fsdp2 and run.config.optimization.grad_norm_type == "inf":
            fit.check_shards(parts.state.model)

    def resumed(self, run: Run, progress: Progress, parts: Parts) -> Progress:
        """Says where another length or schedule makes the learning rate jump."""
        from train.optim import learning_rate_at

        logged = read_metrics(run.outputs.metrics) if run.outputs.is_main else ()
        for row in [row for row in logged if row["kind"] == "train" and row["step"] == progress.step]:
            rate = learning_rate_at(progress.step - 1, parts.total_steps, run.config.optimization)
            if abs(rate - (before := row["learning_rate"])) > 0.01 * before:
                jump = f"step {progress.step} had {before:.2e}, with the present settings it has {rate:.2e}"
                run.outputs.note(f"learning rate: {jump}")
        return progress

    def identity(self, run: Run, data: extras.PreparedData) -> dict[str, Any]:
        """What a run may not change on the way, by the names that a person knows; extras add theirs."""
        from train.extras.cache import code_digest, tokenizer_digest

        values, own = to_values(run.config), run.config.architecture
        source = own.name.rpartition(":")[0] if own.is_function else f"{own.model}/config.json"
        steps = "train.step", "train.loop", "train.optim", "train.batching"
        same = ("mlm_probability", "model", "model_config", "dtype", "optimizer", "seed")
        return {
            "task": data.task.name,
            **{name: values[name] for name in same},
            "tokenizer": tokenizer_digest(data.tokenizer),
            "training data": self._data,
            "classes": data.label_names,
            "global_batch_size": arithmetic_of(run.config, run.launch.dp_size).global_batch_size,
            "mixed_precision": run.accelerator.mixed_precision,
            "code": code_digest(type(data.task).__module__, source, *steps),
        }

    def check_identity(self, run: Run, checkpoint: Path, own: Mapping[str, Any], stored: Mapping[str, Any]) -> None:
        present = json.loads(json.dumps(dict(own)))
        is_same = present.get("training data") == stored.get("training data")  # then classes have new names at most
        if present.get("classes") and (is_same or "classes" not in stored):
            stored = {**stored, "classes": present["classes"] if is_same else "not stored by that version"}
        # An option of an extra that is not here any more counts as switched off.
        differ = [k for k in {**present, **stored} if (present.get(k) or None) != (stored.get(k) or None)]
        changed = [name for name in differ if name != "code"]
        if len(changed) < len(differ) and "code" in stored:  # perhaps only a comment: a person has to know
            what = "the code of the task, model or step, or the model's config.json,"
            run.outputs.note(f"WARNING: {what} has changed since {checkpoint} was written")
        # Steps with another optimizer, batch or order of classes would not continue those made, whatever is allowed.
        is_fixed = not {"optimizer", "global_batch_size", "adapter", "classes"}.isdisjoint(changed)
        lines = "; ".join(f"{name}: was {stored.get(name)!r}, is {present.get(name)!r}" for name in changed)
        if changed and (is_fixed or not run.config.of(Options).allow_changes_on_resume):
            allowed = "" if is_fixed else ", or --allow_changes_on_resume to continue with the new ones"
            remedy = f"another --output_dir for a new run, --resume never to start from scratch here{allowed}"
            other = f"{checkpoint} belongs to a run with other settings ({lines})"
            raise UserError(f"{other}. Continue with the old ones, or give {remedy}.")
        run.outputs.note(f"WARNING: {checkpoint} had other settings ({lines})" if changed else None)
