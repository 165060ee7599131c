"""The optional parts of the template, and the four seams by which they reach a run.

An extra is a folder here, or ``train/memory/``. Its ``__init__.py`` has a class ``Extra`` and, if it has flags, a
frozen dataclass ``Options``, made of train.config.option; without the folder its flags and checks do not exist. Extras
change the batches, change the model, wrap the step, and hear of events: the core calls the methods below in the order
of :data:`ORDER`. Only this file lists them all.
"""

# pyrefly: ignore-errors[bad-return]
from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import yaml

from train.launch import Launch
from train.records import UsageError

if TYPE_CHECKING:  # an extra names the types of its hooks by this module: extras.Task
    import numpy as np
    import torch
    from accelerate import Accelerator
    from datasets import Dataset
    from torch.nn import Module

    from train.batching import Batches
    from train.config import Config
    from train.data import PreparedData
    from train.model import ModelWithLoss
    from train.outputs import Outputs
    from train.records import Corpus, Evaluation, MicroBatch, Parts, Progress, Run, StepOutcome, UserError
    from train.state import TrainingState
    from train.step import Engine
    from train.tasks import Task

NAMES = "checks hardware readers new_models long_sequences adapters activations losses parallelism optimizers "
NAMES += "meter gradients memory endurance selection report"
ORDER = {name: "train.memory" if name == "memory" else f"train.extras.{name}" for name in NAMES.split()}
"""Where each is, in the order in which they change a run."""


class Extra:
    """What an extra may do. Only methods that a subclass overrides are called, so those here are empty."""

    needs: ClassVar[tuple[str, ...]] = ()  # extras without which this one counts as missing

    def check(self, config: Config, launch: Launch) -> None:
        """Raises UsageError where its options contradict each other, the core's, or the launch; before any run."""

    def identity(self, run: Run, data: PreparedData) -> dict[str, Any]:
        """What a checkpoint is compared by when a run resumes from it."""

    def check_identity(self, run: Run, checkpoint: Path, own: Mapping[str, Any], stored: Mapping[str, Any]) -> None:
        """Compares the run that a ``checkpoint`` belongs to with this one, which may raise UserError."""

    def open(self, config: Config, launch: Launch, stop: list[str]) -> AbstractContextManager[None]:
        """Surrounds the whole run, from before the processes meet; may ask it to ``stop``, by the name of a signal."""

    def change_launch(self, config: Config, launch: Launch) -> Launch:
        """``launch`` with another precision; the last moment to set up device and processes before accelerate does."""

    def accelerator_options(self, config: Config, launch: Launch) -> dict[str, Any]:
        """Further arguments of ``Accelerator``."""

    def outputs(self, config: Config, accelerator: Accelerator) -> Outputs | None:
        """What writes the run's files, where it is not the plain :class:`train.outputs.Outputs`."""

    # Seam 1: the batches

    def documents(self, config: Config, labelled: bool) -> Corpus | None:
        """The documents that ``--dataset`` names, or None if this extra does not know it."""

    def change_corpus(self, task: Task, corpus: Corpus) -> Corpus:
        """Other documents."""

    def tokenizer(self, run: Run, spec: str, corpus: Corpus) -> Any:
        """The tokenizer that ``--tokenizer`` names, or None if this extra does not know it."""

    def change_caching(self, run: Run, make: Callable[..., Any], documents: Dataset, *by: Any) -> Callable[[], Dataset]:
        """``make``, which tokenises ``documents``, with a cache; ``by``: the task, tokenizer and classes."""

    def change_data(self, run: Run, data: PreparedData) -> PreparedData:
        """Other examples, another ``collate``, another order."""

    # Seam 2: the model

    def change_config(self, run: Run, config: Config, data: PreparedData) -> Config:
        """The configuration with a value chosen for every ``auto``."""

    def new_model_config(self, run: Run, task: type[Task], tokenizer: Any) -> Any:
        """transformers' configuration of a model that is trained from scratch."""

    def change_model_config(self, run: Run, model_config: Any) -> dict[str, Any]:
        """Changes transformers' configuration in place; returns further arguments of ``from_pretrained``."""

    def check_model_config(self, run: Run, model_config: Any, task: type[Task], tokenizer: Any) -> None:
        """Checks the final configuration (None for a function's model); raises UserError if it cannot fit."""

    def check_model(self, run: Run, network: Module, task: type[Task], sizes: tuple[int, int]) -> None:
        """The new network is built; raises UserError where it cannot learn the task. ``sizes``: tokens, labels."""

    def change_model(self, run: Run, network: Module, task: type[Task]) -> None:
        """Changes the new network in place."""

    def change_loss(self, run: Run, model: ModelWithLoss) -> None:
        """Changes how the loss is computed, or how weights are split, in place."""

    def memory_measure(self, run: Run, model: ModelWithLoss) -> tuple[str, Callable[[], bool]] | None:
        """A way to save memory that can be switched on during a run: (description, function that does so)."""

    def state(self, model: Module, optimizer: Any, identity: Mapping[str, Any], scaler: Any) -> TrainingState | None:
        """What checkpoints hold, where it is not the plain :class:`train.state.TrainingState`."""

    # Seam 3: the step

    def build_optimizer(self, config: Config, groups: list[dict[str, Any]], device: torch.device) -> Any:
        """Another optimizer for these parameter groups, or None."""

    def wrap_step(self, run: Run, engine: Engine) -> Engine:
        """Another engine in place of, or around, ``engine``."""

    # Seam 4: events

    def started(self, run: Run) -> None:
        """The processes have met; the data comes next."""

    def preparing(self) -> AbstractContextManager[None]:
        """Surrounds the preparation of the data."""

    def prepared(self, run: Run, data: PreparedData, batches: Batches) -> None:
        """The data is there; the model is about to be built."""

    def ready(self, run: Run, parts: Parts) -> None:
        """Model, optimizer and batches are there; no step was made, no checkpoint restored."""

    def before_training(self, run: Run, parts: Parts) -> None:
        """The first step of this process comes next."""

    def computing(self, phase: str, micro_batches: Sequence[MicroBatch], step: int = 0) -> AbstractContextManager[None]:
        """Surrounds optimizer step ``step`` (from 1; 0: a rehearsal), which begins with forward, or an evaluation."""

    def mark(self, phase: str) -> None:
        """A phase of the step begins: forward, backward, clip or optimizer."""

    def measured(self, run: Run, values: dict[str, Any]) -> None:
        """A line of training figures is about to be written; may add some."""

    def logged(self, run: Run, progress: Progress, loss: float, since_step: int) -> Progress:
        """The mean loss since the step of the last line is known; may raise UserError, see diverged."""

    def stepped(self, run: Run, progress: Progress, outcome: StepOutcome, micro_batches: Sequence[MicroBatch]) -> None:
        """A step was made, or skipped because its gradient was not finite; may raise UserError, see diverged."""

    def recorded(self, run: Run, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """A line of the log was written."""

    def keep(self, run: Run, kept: set[int], progress: Progress) -> set[int]:
        """The steps whose checkpoints stay; all others are removed."""

    def resumed(self, run: Run, progress: Progress, parts: Parts) -> Progress:
        """A checkpoint was restored, with this progress."""

    def metrics(self, run: Run, data: PreparedData, split: str, table: np.ndarray) -> dict[str, Any]:
        """Further metrics of a split, from the ``table`` that a task's ``metrics`` gets."""

    def evaluated(self, run: Run, progress: Progress, evaluation: Evaluation) -> Progress:
        """The validation split was evaluated after the step that ``progress`` stands at."""

    def ends_early(self, run: Run, progress: Progress) -> bool:
        """Whether no further step is wanted."""

    def final_step(self, run: Run, progress: Progress) -> int | None:
        """The step whose weights ``final/`` gets; None: the last."""

    def diverged(self, run: Run, parts: Parts, error: UserError) -> Progress | None:
        """Where to continue if ``error`` says that training has diverged; None: the run ends."""

    def finishing(self, run: Run, state: TrainingState, progress: Progress) -> None:
        """Training is done, and ``state`` as the last step left it; ``final/`` comes next."""

    def stopped(self, run: Run, step: int | None) -> None:
        """A signal has stopped the run: after ``step``, whose checkpoint is written, or None: before training."""

    def failed(self, run: Run | None, error: Exception) -> str | None:
        """What to tell a person about ``error``; empty if that was done; None: this extra does not know."""

    def finished(self, run: Run, parts: Parts, summary: dict[str, Any]) -> None:
        """``final/`` is written, and ``summary.json`` comes next: may add figures to ``summary``."""


class Extras:
    """The extras of one run, in order; a method of :class:`Extra` called here is called on each."""

    def __init__(self, extras: Mapping[str, Extra]) -> None:
        self.by_name = dict(extras)
        self._methods = functools.cache(self._overridden)  # some are called several times a step

    def _overridden(self, method: str) -> list[Callable[..., Any]]:
        """``method`` of those extras that do something in it."""
        own = [e for e in self.by_name.values() if getattr(type(e), method) is not getattr(Extra, method)]
        return [getattr(extra, method) for extra in own]

    def each(self, method: str, *args: Any) -> list[Any]:
        """What ``method`` of each extra returns."""
        return [call(*args) for call in self._methods(method)]

    def merged(self, method: str, *args: Any) -> dict[str, Any]:
        """All entries of the methods that return dicts."""
        return {key: value for found in self.each(method, *args) for key, value in found.items()}

    def first(self, method: str, *args: Any) -> Any:
        """The first result that is not None; extras after it are not called."""
        return next((found for call in self._methods(method) if (found := call(*args)) is not None), None)

    def pipe(self, method: str, first: Any, value: Any, *args: Any) -> Any:
        """``value`` after each extra in turn has changed it; ``first`` (mostly the run) is passed before it."""
        for call in self._methods(method):
            value = call(first, value, *args)
            assert value is not None, f"{method} of {call.__module__} returned None: it has to return what it was given"
        return value

    def inside(self, method: str, *args: Any) -> ExitStack:
        """The contexts of all extras, entered, for a ``with`` statement to leave."""
        with ExitStack() as stack:
            for call in self._methods(method):
                stack.enter_context(call(*args))
            return stack.pop_all()


def is_here(module: str) -> bool:
    """Whether this copy has such a module; not an installed other copy, or a folder with ``__pycache__`` alone."""
    return (spec := find_spec(module)) is not None and Path(spec.origin or "").is_relative_to(Path(__file__).parents[1])


@functools.cache
def classes() -> dict[str, type[Extra]]:
    """The class of each extra whose folder is there, and those that it needs, by name."""
    found: dict[str, type[Extra]] = {}
    for name, module in ORDER.items():
        if is_here(module):
            extra = import_module(module).Extra
            if all(needed in found for needed in extra.needs):
                found[name] = extra
    return found


def missing() -> list[str]:
    """Extras that were deleted from this copy of the template, or need one that was."""
    return [name for name in ORDER if name not in classes()]


def unknown(kind: str, names: Sequence[str], known: Iterable[str], prefix: str = "") -> str:
    """That flags or keys of a recipe are not ``known``, and what may be meant, with a ``prefix``, by each."""
    familiar = yaml.safe_load(Path(__file__).with_name("familiar_flags.yaml").read_text(encoding="utf-8"))
    told = []
    for name in dict.fromkeys(names):
        more = "A recipe is given as --config FILE." if name.endswith(".yaml") else "train/main.py --help lists all."
        ours = familiar.get(bare := name.removeprefix("--"), "")
        close = [ours] if ours.partition(" ")[0] in known else difflib.get_close_matches(bare, known, 1, 0.62)
        text = ours if ours[-1:] == "." else f"Did you mean {prefix}{close[0]}?" if close else more
        told.append(f"unknown {kind} {name}. {text}")
    if gone := missing():
        told.append(f"This copy of the template is without the extras {', '.join(gone)} and their options.")
    return " ".join(told)


def options() -> dict[str, type]:
    """The options of each extra that has some, by the extra's name; their fields become flags and recipe keys."""
    modules = {name: import_module(ORDER[name]) for name in classes()}
    return {name: module.Options for name, module in modules.items() if hasattr(module, "Options")}


def check(config: Config, launch: Launch) -> None:
    """Has each extra check the configuration under ``launch``, which raises UsageError."""
    if "memory" in missing() and config.optimization.micro_batch_size == "auto":
        raise UsageError("micro_batch_size: auto needs train/memory/ and the extras hardware and meter: give a number.")
    if "new_models" in missing() and config.architecture.model_config is not None:
        raise UsageError("model_config needs train/extras/new_models/: give --model module:function, or a folder.")
    builds = any(cls.build_optimizer is not Extra.build_optimizer for cls in classes().values())
    if config.optimization.optimizer != "adamw" and not builds:
        raise UsageError(f"optimizer: {config.optimization.optimizer} needs train/extras/optimizers/: use adamw.")
    if "parallelism" in missing() and (launch.mp_size > 1 or launch.engine == "deepspeed"):
        raise UsageError(f"{launch} in the launch file needs train/extras/parallelism/: use ddp.yaml or fsdp2.yaml.")
    for cls in classes().values():
        cls().check(config, launch)


def refuse(subject: str, *cases: tuple[str, bool, str]) -> None:
    """Raises UsageError for the first case (what ``subject`` cannot be combined with, whether it is so, remedy)."""
    for what, is_so, remedy in cases:
        if is_so:
            raise UsageError(f"{subject} cannot be combined with {what}: {remedy}.")


def join() -> Extras:
    """The extras that are there, for one run."""
    return Extras({name: cls() for name, cls in classes().items()})
