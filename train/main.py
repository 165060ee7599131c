"""The composition root: parse → build → fit → close. ``accelerate launch train/main.py --help`` lists the flags."""

from __future__ import annotations

import errno
import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

if not __package__:  # run as a script: the folder of this file must not shadow other packages
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from train.config import Config, Optimization, parse
from train.errors import EXIT_DONE, EXIT_ERROR, EXIT_INTERRUPTED, EXIT_STOPPED, EXIT_USAGE, UserError
from train.extras.endurance.parent import follow_launcher
from train.launch import Launch, check_launch, let_segments_grow, read_launch
from train.outputs_log import without_secrets
from train.tasks import check_task

if TYPE_CHECKING:
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer
    from torch import nn

    from train.data import PreparedData
    from train.evaluation import Evaluator
    from train.extras.activations.compilation import Compilation
    from train.extras.endurance.lost_rank import RankWatch
    from train.loop import Goal
    from train.loss import ModelWithLoss
    from train.memory.session import MemorySession
    from train.outputs import Outputs
    from train.records import BatchArithmetic, Batches, Progress
    from train.runtime import Runtime, StopRequest
    from train.state import RunState
    from train.tasks.base import Task

STARTED = time.perf_counter()
OF_A_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.EFBIG)
"""What the system says of a disk that takes nothing more."""


def main(arguments: list[str] | None = None) -> int:
    """Trains as the command line says and returns the exit status (see ``train.errors``)."""
    follow_launcher()
    # Read when torch is imported; its C++ side else prints a page of stack frames for every connection that breaks.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    let_segments_grow()
    try:
        config = parse(sys.argv[1:] if arguments is None else arguments)
        check_task(config.data.task)
        launch = read_launch()
        check_launch(launch, config)
        return train(config, launch)
    except UserError as error:
        local_rank = os.environ.get("LOCAL_RANK", "0")
        if (
            local_rank == "0" or error.exit_status != EXIT_USAGE
        ):  # a usage error is the same on all of a host: said once
            tell_error(str(error), int(os.environ.get("RANK", "0")))
        return error.exit_status
    except KeyboardInterrupt:
        tell_error("interrupted: ended at once. The same command goes on from the newest checkpoint.", 0)
        return EXIT_INTERRUPTED


def tell_error(message: str, rank: int) -> None:
    """Shows what ended the run, on the error output."""
    print(f"error{f' (rank {rank})' if rank else ''}: {without_secrets(message)}", file=sys.stderr, flush=True)


def train(config: Config, launch: Launch) -> int:
    """Opens what a run needs from its start to its end, and explains what ended it early; the exit status."""
    # Imported here: these take seconds, and a wrong flag or --help should not wait for them.
    from train.extras.activations.compilation import Compilation
    from train.extras.endurance.lost_rank import RankWatch
    from train.outputs import Outputs, how_to_go_on
    from train.runtime import StopAtOnce, StopRequest, start_runtime

    patience, tell = config.optimization.distributed_timeout_seconds, partial(tell_error, rank=launch.rank)
    with (
        StopRequest().listening() as stop,
        RankWatch(launch, patience, partial(how_to_go_on, config), tell) as watch,
    ):
        try:
            runtime = start_runtime(config, launch, arithmetic_of(config, launch.data_size, 1).accumulation_steps)
            outputs = Outputs(config, runtime.accelerator)
            outputs.prepare()
        except Exception as error:
            if watch.concludes(error):
                return EXIT_ERROR
            raise
        outputs.note(*runtime.lines)
        memory = open_memory(config, outputs)
        try:
            with Compilation(config.architecture.compile, outputs.note).listening() as compilation:
                try:
                    return run(config, launch, runtime, outputs, memory, stop, watch, compilation)
                except StopAtOnce:
                    if not watch.confirms_stop():
                        return EXIT_ERROR
                    outputs.stopped_before_training(stop.received)
                    return EXIT_STOPPED
                except Exception as error:
                    outputs.stop_bar()
                    if watch.concludes(error):
                        return EXIT_ERROR
                    if isinstance(error, OSError) and error.errno in OF_A_DISK:
                        where = error.filename or outputs.folder
                        reason = f"{where} cannot be written: {error.strerror}."
                        raise UserError(f"{reason} {how_to_go_on(config)}") from None
                    if (explanation := memory.explain(error, outputs.folder)) is None:
                        raise
                    raise UserError(explanation) from None
        finally:
            outputs.let_writing_end()
            memory.close()


def run(
    config: Config,
    launch: Launch,
    runtime: Runtime,
    outputs: Outputs,
    memory: MemorySession,
    stop: StopRequest,
    watch: RankWatch,
    compilation: Compilation,
) -> int:
    """Builds all parts, trains, and writes what the run leaves behind; returns the exit status."""
    import torch

    from train.data import prepare_data
    from train.evaluation import SMALLER_IS_BETTER, Evaluator
    from train.extras.activations.compilation import compile_layers
    from train.extras.adapters.lora import parameter_counts
    from train.extras.meter.throughput import model_flops_per_token
    from train.extras.parallelism import deepspeed_engine
    from train.identity import run_identity
    from train.loop import Goal, Parts, fit, is_done
    from train.loss import describe_loss
    from train.model import build_model
    from train.optim import peak_learning_rate
    from train.tasks import build_task
    from train.tokenization import tokenizer_digest

    accelerator, data = runtime.accelerator, config.data
    task = build_task(data)
    with stop.at_once(), watch.preparing():
        prepared = prepare_data(config, task, outputs.folder, accelerator.is_local_main_process)
    tokenizer, examples = prepared.tokenizer, prepared.examples
    outputs.note(*prepared.lines)

    memory.describe(accelerator, launch, task.auto_class, tokenizer, len(examples.label_names))
    if "auto" in (config.optimization.micro_batch_size, config.architecture.gradient_checkpointing):
        pair = prepared.training_batches(config, arithmetic_of(config, 1, 2), accelerator, launch).longest()
        config = memory.settle(accelerator, "attention_mask" in pair.inputs)
        outputs.use(config)
    optim, output, arithmetic = config.optimization, config.output, arithmetic_of(config, launch.data_size)
    batches = prepared.training_batches(config, arithmetic, accelerator, launch)
    longest, accumulates = batches.longest(), arithmetic.accumulation_steps > 1
    memory.ask(longest, accumulates)

    if launch.engine == "deepspeed":
        deepspeed_engine.build_whole(accelerator)
    torch.manual_seed(optim.seed)
    network = build_model(
        config.architecture,
        task.auto_class,
        tokenizer,
        data.max_length,
        examples.label_names,
        packing=data.packing,
        precision=accelerator.mixed_precision,
    )
    outputs.note(*describe_network(network, config, accelerator.device.type))
    num_trained, num_parameters = parameter_counts(network)  # whole: what shards may leave none of it to see
    flops_per_token = model_flops_per_token(network, data.max_length)
    identity = run_identity(
        config,
        tokenizer_digest(tokenizer),
        prepared.training_digest,
        arithmetic.global_batch_size,
        accelerator.mixed_precision,
    )
    if config.architecture.compile:
        compile_layers(network)
    model, optimizer, state = share_out(launch, accelerator, network, optim, arithmetic, identity)
    memory.equip(accelerator, model, optimizer)
    evaluator = Evaluator(config, accelerator, launch, model, prepared, memory.meter)
    metric = output.metric_for_best or task.default_metric
    grows = metric not in SMALLER_IS_BETTER if output.greater_is_better is None else output.greater_is_better
    goal = Goal(
        total_steps=optim.max_steps or (optim.num_epochs or 1) * (batches.steps_per_epoch or 1),
        peak_learning_rate=peak_learning_rate(optim, arithmetic.global_batch_size),
        metric=metric,
        greater_is_better=grows,
        best_of=f"{metric} on data {prepared.validation_digest}",
        flops_per_token=flops_per_token,
        peak_flops_per_second=runtime.peak_flops_per_second,
    )
    sizes = num_trained, num_parameters
    outputs.note(*describe_training(state.model, sizes, arithmetic, batches, goal, config))
    outputs.note(describe_loss(cast("ModelWithLoss", accelerator.unwrap_model(model)), optim.loss))
    if not outputs.is_complete(goal.total_steps):
        evaluated = next(prepared.evaluation_batches(examples.validation, config, accelerator, launch), None)
        memory.rehearse(accelerator, model, optimizer, longest, accumulates, evaluated, optim)
    progress = outputs.resume(state, goal.best_of)
    final_step = progress.best_step if output.load_best_model_at_end else progress.step
    if is_done(config, goal, progress) and outputs.is_complete(progress.step, final_step):
        longer = "--max_steps" if progress.step >= goal.total_steps else "a higher --early_stopping_patience"
        outputs.say(
            f"nothing to do: {outputs.folder} already holds this run, {progress.step} steps long. For a new run "
            f"give --resume never or another --output_dir; for a longer one {longer}."
        )
        return EXIT_DONE

    outputs.begin(goal.total_steps, progress)
    parts = Parts(
        accelerator=accelerator,
        launch=launch,
        model=model,
        optimizer=optimizer,
        batches=batches,
        meter=memory.meter,
        stop=stop,
        step=deepspeed_engine.optimizer_step if launch.engine == "deepspeed" else memory.step,
        evaluate=lambda step: outputs.record_evaluation(evaluator.validation(step)),
        save=lambda now, wait: outputs.save(state, now, wait),
        restore=lambda step: outputs.go_back(state, step),
        report=outputs.record,
        tick=outputs.tick,
    )
    progress = fit(parts, config, goal, progress)
    outputs.stop_bar()
    if not is_done(config, goal, progress):
        outputs.stopped(stop.received, progress.step)
        return EXIT_STOPPED
    finish(
        config,
        task,
        prepared,
        evaluator,
        memory,
        compilation,
        outputs,
        launch,
        runtime,
        state,
        num_trained,
        num_parameters,
        arithmetic,
        batches.steps_per_epoch,
        progress,
    )
    return EXIT_DONE


def share_out(
    launch: Launch,
    accelerator: Accelerator,
    network: nn.Module,
    optim: Optimization,
    arithmetic: BatchArithmetic,
    identity: dict[str, Any],
) -> tuple[nn.Module, AcceleratedOptimizer, RunState]:
    """The model with its loss, its optimizer and what a checkpoint holds of them, shared among ranks as launched."""
    from train.cross_entropy import Objective
    from train.extras.adapters.lora import AdapterState, has_adapter
    from train.extras.parallelism import deepspeed_engine
    from train.extras.parallelism.deepspeed_state import DeepSpeedState
    from train.loss import ModelWithLoss, choose_loss, place_of
    from train.optim import build_optimizer
    from train.runtime import shard_by_layer
    from train.state import TrainingState

    objective = Objective(optim.label_smoothing, optim.z_loss)
    place = place_of(network, accelerator.device, accelerator.mixed_precision, launch.tensor_size > 1)
    with_loss = ModelWithLoss(network, choose_loss(optim.loss, network, place, objective), objective)
    divide_work(launch, accelerator, with_loss)
    shard_by_layer(accelerator, network)
    optimizer: Any = build_optimizer(network, optim, accelerator.device)
    if launch.engine == "deepspeed":
        model, optimizer = deepspeed_engine.prepare(accelerator, arithmetic, with_loss, optimizer)
        network = cast("ModelWithLoss", accelerator.unwrap_model(model)).model
        return model, optimizer, DeepSpeedState(network, optimizer.optimizer, identity)
    model, optimizer = accelerator.prepare(with_loss, optimizer)
    network = cast("ModelWithLoss", accelerator.unwrap_model(model)).model
    kind = AdapterState if has_adapter(network) else TrainingState
    return model, optimizer, kind(network, optimizer.optimizer, accelerator.scaler, identity)


def divide_work(launch: Launch, accelerator: Accelerator, with_loss: ModelWithLoss) -> None:
    """Divides the model's tensors among ranks as the launch file says, and sees whether its sequences can be."""
    if launch.context_size > 1:
        from train.extras.parallelism.context import check_model

        check_model(with_loss.model)
    if launch.tensor_size > 1:
        from train.extras.parallelism.tensor import split_weights

        assert accelerator.torch_device_mesh is not None
        split_weights(with_loss, accelerator.torch_device_mesh["tp"])


def finish(
    config: Config,
    task: Task,
    prepared: PreparedData,
    evaluator: Evaluator,
    memory: MemorySession,
    compilation: Compilation,
    outputs: Outputs,
    launch: Launch,
    runtime: Runtime,
    state: RunState,
    num_trained: int,
    num_parameters: int,
    arithmetic: BatchArithmetic,
    steps_per_epoch: int | None,
    progress: Progress,
) -> None:
    """Evaluates what is left to evaluate, and writes ``final/``, the summary and the report."""
    from train.extras.activations.compilation import uncompiled
    from train.extras.report.model_card import model_card
    from train.outputs_log import hardware, versions

    step = progress.step
    if config.output.load_best_model_at_end and progress.best_step and outputs.load_best(state, progress.best_step):
        step = progress.best_step
    metric = config.output.metric_for_best or task.headline_metric
    evaluations = [outputs.evaluation_at(step) or evaluator.validation(step)]
    examples, texts = prepared.examples, list(prepared.corpus.validation["text"])
    if examples.test is not None:
        evaluations.append(evaluator.split("test", examples.test, step))
        outputs.record_evaluation(evaluations[-1])
    sample, references = None, {}
    if runtime.accelerator.is_main_process:
        references = task.references(texts)
    if runtime.accelerator.is_main_process and launch.weights_are_whole:
        try:
            with runtime.accelerator.autocast(), uncompiled(state.model):
                sample = task.sample(state.model, prepared.tokenizer, texts[0], config.optimization.seed)
        except Exception as error:  # of whatever model a person brings; a trained one is not lost for an ornament
            outputs.note(f"no sample of what the model writes: {type(error).__name__}: {error}")
    summary = {
        "status": "done",
        "task": task.name,
        "dataset": prepared.corpus.name,
        "model": config.architecture.model or (config.architecture.model_config or {})["model_type"],
        "num_parameters": num_parameters,
        "num_trained_parameters": num_trained,
        "steps": progress.step,
        "epochs": progress.step / steps_per_epoch if steps_per_epoch else progress.epoch,
        "tokens": progress.tokens_seen,
        "padding_share": 1 - progress.tokens_seen / max(1, progress.positions_seen),
        "metric_name": metric,
        "metric_value": evaluations[0].metrics[metric],
        "result": {e.split: e.metrics for e in evaluations},
        "references": references,
        "final_step": step,
        "pushed_to": config.output.hub_model_id if config.output.push_to_hub else None,
        "best_step": progress.best_step,
        "best_metric": progress.best_metric,
        "max_length": config.data.max_length,
        "global_batch_size": arithmetic.global_batch_size,
        "micro_batch_size": None if arithmetic.max_tokens else arithmetic.micro_batch_size,
        "gradient_accumulation_steps": None if arithmetic.max_tokens else arithmetic.accumulation_steps,
        "max_tokens_per_micro_batch": arithmetic.max_tokens,
        "world_size": launch.world_size,
        "launch": str(launch),
        "mixed_precision": runtime.precision,
        "max_grad_norm": config.optimization.max_grad_norm,
        "training_seconds": progress.training_seconds,
        "tokens_per_second": progress.tokens_seen / max(progress.training_seconds, 1e-9),
        "seconds_to_first_step": outputs.seconds_to_first_step(STARTED),
        "checkpoints_beside_training": outputs.saves_beside_training,
        "longest_save_stall_seconds": max(outputs.save_stalls_seconds, default=None),
        **memory.summary(),
        **compilation.summary(),
        "nonfinite_steps": progress.nonfinite_steps,
        "rollbacks": progress.rollbacks,
        "label_names": list(examples.label_names),
        "notes": outputs.notes,
        "hardware": hardware(),
        "versions": versions(),
    }
    outputs.write_final(state, prepared.tokenizer, model_card(config, type(task), summary, evaluations))
    outputs.write_report(type(task), summary, sample)
    if line := compilation.line():
        outputs.say(line)
    outputs.say_result(summary, sample)


def open_memory(config: Config, outputs: Outputs) -> MemorySession:
    """What predicts, measures and guards memory; in a fork without ``train/memory/``, what does none of it."""
    from train.runtime import WithoutMemoryBranch

    try:
        from train.memory.session import MemorySession
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("train.memory"):
            raise
        return cast("MemorySession", WithoutMemoryBranch(config))
    return MemorySession(config, outputs.say)


def arithmetic_of(config: Config, data_size: int, size_for_auto: int = 0) -> BatchArithmetic:
    """The batch sizes of ``config`` completed; ``micro_batch_size: auto`` counts as ``size_for_auto``."""
    from train.batching import batch_arithmetic

    optim = config.optimization
    size = size_for_auto if optim.micro_batch_size == "auto" else optim.micro_batch_size
    max_tokens = optim.max_tokens_per_micro_batch
    return batch_arithmetic(size, optim.gradient_accumulation_steps, optim.global_batch_size, data_size, max_tokens)


def describe_network(network: nn.Module, config: Config, device_type: str) -> list[str]:
    """How ``network`` saves memory, where that needs a word."""
    from train.extras.activations import recompute, tiling

    return [*recompute.describe(config.architecture, device_type), *tiling.describe(network, config.architecture)]


def describe_training(
    network: Any, sizes: tuple[int, int], arithmetic: BatchArithmetic, batches: Batches, goal: Goal, config: Config
) -> list[str]:
    """The arithmetic of the run in two lines, and a third for what it does not reach.

    Args:
        sizes: parameters, (trained, all).
    """
    from train.optim import learning_rate_at, num_warmup_steps

    num_trained, num_parameters = sizes
    name = getattr(getattr(network, "config", None), "model_type", type(network).__name__)
    epochs = f"{goal.total_steps / batches.steps_per_epoch:.2f} epochs" if batches.steps_per_epoch else "of a stream"
    size = f"{num_parameters / 1e6:.2f} M parameters"
    if num_trained < num_parameters:
        size += f" ({num_trained / 1e6:.2f} M trained, {num_trained / num_parameters:.2%})"
    lines = [
        f"model: {name}, {size}, sequences of up to {config.data.max_length:,} tokens",
        f"batch: {arithmetic}; {goal.total_steps:,} steps ({epochs})",
    ]
    total, peak = goal.total_steps, goal.peak_learning_rate
    if (warmup := num_warmup_steps(total, config.optimization)) > total:
        highest = learning_rate_at(total - 1, total, peak, config.optimization)
        lines.append(f"learning rate: at most {highest:.2e} of {peak:.2e}, for its warm-up takes {warmup:,} steps")
    return lines


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        # gloo's threads now and then abort the process while the interpreter winds down
        os._exit(status)
    sys.exit(status)
