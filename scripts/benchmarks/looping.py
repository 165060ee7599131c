"""The template's loop for benchmarks, with data in memory and without evaluation and checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from scripts.benchmarks import building

if TYPE_CHECKING:
    from torch import Tensor, nn

    from train.config import Config
    from train.data import PreparedData
    from train.records import Evaluation, Parts, Run


def no_evaluation(run: Run, parts: Parts, split: str, step: int, may_stop: bool = False) -> Evaluation:
    """Stands in for :func:`train.evaluation.evaluate`: a loss of zero."""
    from train.records import Evaluation

    return Evaluation(split, step, {"loss": 0.0})


def fit_network(network: nn.Module, config: Config, tokens: Tensor, tick: Callable[[int], None]) -> None:
    """The template's loop over ``tokens`` as ``main.py`` wires it; evaluation and saving do nothing.

    All extras of a run that is made with defaults take part in its steps. Only the planner's rehearsal, which comes
    before the first step, is left out.

    Args:
        tokens: (examples, length + 1), taken in the order of the first epoch.
        tick: called at the end of each step with its number, from 1.
    """
    from train.launch import Launch
    from train.loop import fit
    from train.model import ModelWithLoss
    from train.optim import build_optimizer, parameter_counts
    from train.records import Parts, Progress, arithmetic_of
    from train.state import TrainingState
    from train.step import Engine

    accelerator = building.start_accelerator(config, Launch(), arithmetic_of(config, 1).accumulation_steps)
    run = building.silent_run(config, accelerator, without=("memory",))
    run.outputs = _watched_outputs(config, accelerator, tick)
    run.outputs.from_main(run.outputs.prepare)
    with run.extras.inside("open", config, run.launch, run.stop):
        data = _data(run, tokens)
        batches = data.training_batches(run)
        with_loss = ModelWithLoss(network, data.task)
        run.extras.each("change_loss", run, with_loss)
        sizes = parameter_counts(network)
        optimizer: Any = build_optimizer(run, network)
        model: Any = with_loss
        model, optimizer = accelerator.prepare(model, optimizer)
        state = TrainingState(network, optimizer.optimizer, {}, accelerator.scaler)
        engine = run.extras.pipe("wrap_step", run, Engine(accelerator, config, partial(run.extras.each, "mark")))
        total_steps = config.optimization.max_steps or batches.steps_per_epoch
        parts = Parts(data, batches, model, sizes, optimizer, engine, state, total_steps)
        run.extras.each("ready", run, parts)
        run.outputs.begin(run, parts, Progress())
        run.extras.each("before_training", run, parts)
        with patch("train.loop.evaluate", no_evaluation):
            fit(run, parts, Progress())
        run.outputs.bar.close()


def run_main(words: Sequence[str], tick: Callable[[], object]) -> int:
    """The exit status of a whole run of ``main.py`` in this process; ``tick`` is called before and after each step."""
    from train.main import main
    from train.outputs import Outputs

    def watched(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            tick()
            return original(*args)

        return call

    with patch.multiple(Outputs, begin=watched(Outputs.begin), tick=watched(Outputs.tick)):
        return main(list(words))


def _watched_outputs(config: Config, accelerator: Any, tick: Callable[[int], None]) -> Any:
    """The outputs of a run that tell ``tick`` of each step and save no checkpoint."""
    from train.outputs import Outputs

    class Watched(Outputs):
        def tick(self, step: int) -> None:
            tick(step)
            super().tick(step)

        def save(self, run: Run, state: Any, progress: Any, wait: bool) -> None: ...

    return Watched(config, accelerator)


def _data(run: Run, tokens: Tensor) -> PreparedData:
    """``tokens`` in an Arrow table, as examples of the task."""
    import datasets

    from train.batching import Loading
    from train.data import PreparedData, pad_token_id
    from train.extras.readers.own_tokenizers import build_tokenizer
    from train.records import Corpus
    from train.tasks import load_task

    tokenizer, task = build_tokenizer("bytes", ()), load_task(run.config.data.task)(run.config)
    lengths = [tokens.shape[1] - 1] * len(tokens)
    rows = datasets.Dataset.from_dict({"tokens": tokens.int().numpy(), "length": lengths})
    pins = run.accelerator.device.type == "cuda"
    loading = Loading(partial(task.collate, pad_id=pad_token_id(tokenizer)), pin_memory=pins)
    splits = {"train": rows, "validation": rows}
    return PreparedData(task, Corpus("tokens", splits), tokenizer, splits, loading)
