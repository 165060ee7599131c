"""Mistakes found early, each told in one message with what is wrong, where, and what to do.

Without this extra the same mistakes end in tracebacks of libraries, late, or make another run than was meant.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from train import extras
from train.config import Config, option
from train.extras.checks import settings
from train.launch import Launch
from train.records import Corpus, Run, UserError, exchange

if TYPE_CHECKING:
    from torch import nn

    from train.batching import Batches
    from train.data import PreparedData
    from train.loop import Parts
    from train.tasks import Task


@dataclass(frozen=True)
class Options:
    """What would be refused."""

    allow_changes_on_resume: bool = option(False, "Resume with other data, model or seed.")


class Extra(extras.Extra):
    Options = Options
    _data = ""  # a digest of the training examples

    @classmethod
    def check(cls, config: Config, launch: Launch) -> None:
        settings.check_launch_file()
        settings.check_values(config)
        settings.check_precision(config, launch)
        settings.check_steps(config)
        settings.check_model(config)

    def started(self, run: Run) -> None:
        if (known := run.accelerator.num_processes) != run.launch.world_size:
            raise UserError(
                f"the launcher started {run.launch.world_size} processes, but this one knows of {known}: they would "
                "all train the same thing. See accelerate_configs/ for launch files that work."
            )

    def change_corpus(self, task: Task, corpus: Corpus) -> Corpus:
        from train.extras.checks.documents import with_known_labels

        return with_known_labels(corpus, task) if task.labelled else corpus

    def change_data(self, run: Run, data: PreparedData) -> PreparedData:
        for name in ("train", "validation", "test"):
            if (split := getattr(data.examples, name)) is not None and not len(split):
                raise UserError(f"{data.corpus.name}: the {name} split has no example after tokenisation.")
        return data

    def check_model_config(self, run: Run, model_config: Any, task: type[Task], tokenizer: Any) -> None:
        from train.extras.checks import fit

        if not run.is_planned:  # where the tokenizer is a stand-in
            fit.check_tokenizer(task(run.config), tokenizer)
        if model_config is not None:
            fit.check_model_type(model_config, task)
            fit.check_sizes(model_config, tokenizer, run.config.data.max_length)

    def check_model(self, run: Run, network: nn.Module, task: type[Task], sizes: tuple[int, int]) -> None:
        from train.extras.checks import fit

        fit.check_network(run, network, sizes)

    def prepared(self, run: Run, data: PreparedData, batches: Batches) -> None:
        from train.extras.checks.documents import describe
        from train.extras.digests import examples_digest

        self._data = examples_digest(data.examples.train)
        if len(set(exchange((self._data, examples_digest(data.examples.validation))))) > 1:
            raise UserError(f"{data.corpus.name} gives each process other data: seed shuffles, and sort sets.")
        run.outputs.note(*describe(data, run.config))

    def ready(self, run: Run, parts: Parts) -> None:
        from train.extras.checks.documents import describe_training

        run.outputs.note(*describe_training(run, parts))

    def identity(self, run: Run, data: PreparedData) -> dict[str, Any]:
        """What a run may not change on the way, by the names that a person knows."""
        from train.extras.checks.resuming import identity

        return identity(run, data, self._data)

    def check_identity(self, run: Run, checkpoint: Path, own: Mapping[str, Any], stored: Mapping[str, Any]) -> None:
        from train.extras.checks.resuming import compare

        compare(checkpoint, own, stored, run.config.of(Options).allow_changes_on_resume)
