"""The template's loop for benchmarks, with data in memory and without evaluation and checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch import Tensor, nn

    from train.config import Config


def fit_network(network: nn.Module, config: Config, tokens: Tensor, tick: Callable[[int], None]) -> None:
    """The template's loop over ``tokens`` as ``main.py`` wires it; evaluation and saving do nothing.

    Args:
        tokens: (examples, length + 1), taken in the order of the first epoch.
        tick: called at the end of each step with its number, from 1.
    """
    from train.runtime import DeviceMeter, StopRequest, start_runtime

    from train.extras.meter.throughput import model_flops_per_token
    from train.launch import Launch
    from train.loop import Goal, Parts, fit
    from train.loss import ModelWithLoss, choose_loss, place_of
    from train.optim import build_optimizer, peak_learning_rate
    from train.outputs import Outputs
    from train.records import Evaluation, Progress
    from train.step import optimizer_step

    accumulation = config.optimization.gradient_accumulation_steps or 1
    runtime = start_runtime(config, Launch(), accumulation)
    accelerator, outputs = runtime.accelerator, Outputs(config, runtime.accelerator)
    batches, global_batch_size = _batches(config, accelerator, tokens)
    place = place_of(network, accelerator.device, accelerator.mixed_precision)
    model = ModelWithLoss(network, choose_loss(config.optimization.loss, network, place))
    model, optimizer = accelerator.prepare(model, build_optimizer(network, config.optimization))

    def tick_all(step: int) -> None:
        tick(step)
        outputs.tick(step)

    with StopRequest().listening() as stop:
        parts = Parts(
            launch=Launch(),
            accelerator=accelerator,
            model=model,
            optimizer=optimizer,
            batches=batches,
            meter=DeviceMeter(accelerator.device),
            stop=stop,
            step=optimizer_step,
            evaluate=lambda step: Evaluation("validation", step, {"loss": 0.0}),
            save=lambda progress, wait: None,
            restore=lambda step: None,
            report=outputs.record,
            tick=tick_all,
        )
        goal = Goal(
            total_steps=config.optimization.max_steps or 0,
            peak_learning_rate=peak_learning_rate(config.optimization, global_batch_size),
            metric="loss",
            greater_is_better=False,
            flops_per_token=model_flops_per_token(network, tokens.shape[1] - 1),
            peak_flops_per_second=runtime.peak_flops_per_second,
        )
        fit(parts, config, goal, Progress())
    outputs.close()


def _batches(config: Config, accelerator: Accelerator, tokens: Tensor) -> tuple[Any, int]:
    """The template's batches of ``tokens`` from an Arrow table, and the global batch size."""
    import datasets

    from train.batching import MapBatches, batch_arithmetic
    from train.tasks import build_task

    optimization = config.optimization
    size = optimization.micro_batch_size
    assert isinstance(size, int)
    arithmetic = batch_arithmetic(size, optimization.gradient_accumulation_steps, None, 1)
    columns = {"tokens": tokens.int().numpy(), "length": [tokens.shape[1] - 1] * len(tokens)}
    batches = MapBatches(
        datasets.Dataset.from_dict(columns),
        partial(build_task(config.data).collate, pad_id=0),
        arithmetic,
        accelerator.process_index,
        optimization.seed,
        pin_memory=accelerator.device.type == "cuda",
    )
    return batches, arithmetic.global_batch_size
