"""A whole run, top to bottom: parse, accelerator, data, model, optimizer, fit, finish.

``accelerate launch train/main.py --help`` lists the flags.
"""

from __future__ import annotations

import errno
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if not __package__:  # run as a script: the folder of this file must not shadow other packages
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from train import extras
from train.config import Config, parse
from train.launch import Launch, StopAtOnce, StopRequest, check_launch, read_launch, use_expandable_segments
from train.records import EXIT_DONE, EXIT_ERROR, EXIT_INTERRUPTED, EXIT_STOPPED, EXIT_USAGE, Progress, Run, UserError

if TYPE_CHECKING:
    from torch import nn

    from train.data import PreparedData
    from train.loop import Goal, Parts

STARTED = time.perf_counter()
OF_A_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.EFBIG)
"""What the system says of a disk that takes nothing more."""


def main(arguments: list[str] | None = None) -> int:
    """Trains as the command line says and returns the exit status (see ``train.records``)."""
    # Read when torch is imported; its C++ side else prints a page of stack frames for every connection that breaks.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    use_expandable_segments()
    try:
        # Parse: flags over recipe over defaults. What is wrong ends here, before anything is loaded.
        config, launch = parse(sys.argv[1:] if arguments is None else arguments), read_launch()
        check_launch(launch, config)
        extras.check(config, launch)
        joined = extras.join()
        with StopRequest().listening() as stop, joined.inside("open", config, launch):
            return run_to_its_end(config, launch, joined, stop)
    except UserError as error:
        # Every rank would print the same usage error, so only the first of a host does.
        if str(error) and (error.exit_status != EXIT_USAGE or os.environ.get("LOCAL_RANK", "0") == "0"):
            show_error(str(error))
        return error.exit_status
    except KeyboardInterrupt:
        show_error("interrupted: ended at once. The same command resumes from the newest checkpoint.")
        return EXIT_INTERRUPTED


def train(run: Run) -> int:
    """Data, model, optimizer, fit, finish; returns the exit status."""
    # Imported here: these take seconds, and a wrong flag or --help should not wait for them.
    import torch

    from train.data import arithmetic_of, prepare_data
    from train.evaluation import Evaluator
    from train.launch import shard_by_layer
    from train.loop import Parts, fit, is_done
    from train.model import build_model
    from train.optim import build_optimizer
    from train.state import TrainingState
    from train.step import Engine

    accelerator, outputs, joined = run.accelerator, run.outputs, run.extras

    # Data: documents -> examples -> micro-batches; what step k sees is a function of (seed, k).
    with run.stop.at_once(), joined.inside("preparing"):
        data = prepare_data(run)
    for settle in joined.overriding("change_config"):
        run.config = outputs.config = settle(run, data)
    arithmetic = arithmetic_of(run.config, run.launch.dp_size)
    batches = data.training_batches(run, arithmetic)
    joined.each("prepared", run, data, batches)

    # Model: built, changed by the extras, wrapped with its loss.
    torch.manual_seed(run.config.optimization.seed)
    with_loss = build_model(run, type(data.task), data.tokenizer, data.examples.label_names)
    shard_by_layer(accelerator, with_loss.model)

    # Optimizer: made for the model as it is, then both are prepared; accelerate moves, wraps and shards them.
    sizes = describe_model(run, with_loss.model)
    optimizer: Any = build_optimizer(run, with_loss.model)
    model, optimizer = accelerator.prepare(with_loss, optimizer)
    network, identity = accelerator.unwrap_model(model).model, identity_of(run, data, arithmetic.global_batch_size)
    held = network, optimizer.optimizer, identity, accelerator.scaler
    state = joined.first("state", *held) or TrainingState(*held)
    engine = joined.pipe("wrap_step", run, Engine(accelerator, run.config, joined.mark))
    goal = goal_of(run, data, batches.steps_per_epoch, arithmetic.global_batch_size)
    describe_training(run, goal, batches.steps_per_epoch, str(arithmetic))

    # Fit: from the newest intact checkpoint to the last step, a signal or early stopping.
    evaluator = Evaluator(run, model, engine, data)
    parts = Parts(data, batches, arithmetic, model, optimizer, engine, state, evaluator, goal)
    joined.each("ready", run, parts)
    progress = outputs.resume(state, goal.best_of)
    if is_done(run, goal, progress) and is_written(run, progress, goal):
        return EXIT_DONE
    outputs.begin(goal.total_steps, progress)
    joined.each("starting", run, parts)
    progress = fit(run, parts, progress)
    outputs.bar.close()
    if not is_done(run, goal, progress):
        outputs.stopped(run.stop.received, progress.step)
        return EXIT_STOPPED

    # Finish: final/ for from_pretrained, the summary, and what extras make of them.
    finish(run, parts, progress, sizes)
    return EXIT_DONE


def run_to_its_end(config: Config, launch: Launch, joined: extras.Extras, stop: StopRequest) -> int:
    """Makes the Accelerator and the run, trains, and explains what ended it early; the exit status."""
    run = None
    try:
        run = start(config, launch, joined, stop)
        return train(run)
    except StopAtOnce:
        if not all(joined.each("confirms_stop")):
            return EXIT_ERROR
        assert run is not None
        run.outputs.stopped(stop.received, None)
        return EXIT_STOPPED
    except Exception as error:
        if run is not None:
            run.outputs.bar.close()
        # An extra may know what happened: a lost rank, memory that ran out. Else a bug shows its traceback.
        if (explanation := joined.first("failed", run, error)) is not None:
            raise UserError(explanation) from None
        if isinstance(error, OSError) and error.errno in OF_A_DISK:
            from train.outputs import how_to_resume

            where = error.filename or config.output.output_dir
            raise UserError(f"{where} cannot be written: {error.strerror}. {how_to_resume(config)}") from None
        raise
    finally:
        if run is not None:
            run.accelerator.end_training()


def start(config: Config, launch: Launch, joined: extras.Extras, stop: StopRequest) -> Run:
    """Where to train: devices, precision and accumulation are accelerate's."""
    from accelerate import Accelerator

    from train.data import arithmetic_of
    from train.launch import (
        accelerator_options,
        describe_device,
        resolve_precision,
        set_fp32_products,
        set_up_cpu,
        target_device,
    )
    from train.outputs import Outputs

    device = target_device()
    precision, substitution = resolve_precision(config.optimization.mixed_precision or launch.precision, device)
    set_fp32_products(config.optimization.tf32, device)
    threads = set_up_cpu(launch, config) if device.type == "cpu" else ""
    accelerator = Accelerator(
        gradient_accumulation_steps=arithmetic_of(config, launch.dp_size).accumulation_steps,
        mixed_precision=precision,  # "fp16", "bf16" or "no"
        **accelerator_options(launch, precision, device),
        **joined.merged("accelerator_options", config, launch),
    )
    if launch.world_size != accelerator.num_processes:
        raise UserError(
            f"the launcher started {launch.world_size} processes, but this one knows of {accelerator.num_processes}: "
            "they would all train the same thing. See accelerate_configs/ for launch files that work."
        )
    run = Run(config, launch, accelerator, joined, Outputs(config, accelerator), stop)
    run.outputs.prepare()
    run.outputs.note(describe_device(accelerator, launch, threads), *filter(None, [substitution]))
    run.outputs.note(f"extras: {', '.join(joined.by_name) or 'none'}")
    return run


def goal_of(run: Run, data: PreparedData, steps_per_epoch: int | None, global_batch_size: int) -> Goal:
    """How many steps the run makes, at what learning rate, and what counts as best."""
    from train.evaluation import SMALLER_IS_BETTER
    from train.loop import Goal
    from train.optim import peak_learning_rate

    optim, output = run.config.optimization, run.config.output
    metric = output.metric_for_best or data.task.default_metric
    grows = metric not in SMALLER_IS_BETTER if output.greater_is_better is None else output.greater_is_better
    total_steps = optim.max_steps or (optim.num_epochs or 1) * (steps_per_epoch or 1)
    peak = peak_learning_rate(optim, global_batch_size)
    return Goal(total_steps, peak, metric, grows, best_of=f"{metric} on data {data.validation_digest}")


def identity_of(run: Run, data: PreparedData, global_batch_size: int) -> dict[str, Any]:
    """What a checkpoint and a run that resumes from it must have in common."""
    from train.state import run_identity
    from train.tasks import tokenizer_digest

    return run_identity(run, tokenizer_digest(data.tokenizer), data.training_digest, global_batch_size)


def describe_model(run: Run, network: nn.Module) -> tuple[int, int]:
    """Prints the model's size; returns its (trained, all) parameters, which shards would not show."""
    from train.model import parameter_counts

    num_trained, num_parameters = parameter_counts(network)
    name = getattr(getattr(network, "config", None), "model_type", type(network).__name__)
    size = f"{num_parameters / 1e6:.2f} M parameters"
    if num_trained < num_parameters:
        size += f" ({num_trained / 1e6:.2f} M trained, {num_trained / num_parameters:.2%})"
    run.outputs.note(f"model: {name}, {size}, sequences of up to {run.config.data.max_length:,} tokens")
    return num_trained, num_parameters


def describe_training(run: Run, goal: Goal, steps_per_epoch: int | None, arithmetic: str) -> None:
    """Prints the batch arithmetic, and a learning rate that the run will not reach."""
    from train.optim import learning_rate_at, num_warmup_steps

    total, optim = goal.total_steps, run.config.optimization
    epochs = f"{total / steps_per_epoch:.2f} epochs" if steps_per_epoch else "of a stream"
    run.outputs.note(f"batch: {arithmetic}; {total:,} steps ({epochs})")
    if (warmup := num_warmup_steps(total, optim)) > total:
        highest = learning_rate_at(total - 1, total, goal.peak_learning_rate, optim)
        peak = goal.peak_learning_rate
        run.outputs.note(f"learning rate: at most {highest:.2e} of {peak:.2e}, because warm-up takes {warmup:,} steps")


def is_written(run: Run, progress: Progress, goal: Goal) -> bool:
    """Whether a finished run of this length is in the folder already; says so."""
    outputs, longer = run.outputs, "--max_steps" if progress.step >= goal.total_steps else "--early_stopping_patience"
    final_step = progress.best_step if run.config.output.load_best_model_at_end else progress.step
    if not outputs.is_complete(progress.step, final_step):
        return False
    outputs.say(
        f"nothing to do: {outputs.folder} already holds this run, {progress.step} steps long. For a new run give "
        f"--resume never or another --output_dir; for a longer one a higher {longer}."
    )
    return True


def finish(run: Run, parts: Parts, progress: Progress, sizes: tuple[int, int]) -> None:
    """Evaluates what is left to evaluate, and writes ``final/`` and the summary.

    Args:
        sizes: (trained, all) parameters.
    """
    from train.launch import peak_bytes
    from train.outputs_log import hardware, versions

    outputs, data, config, step = run.outputs, parts.data, run.config, progress.step
    if (
        config.output.load_best_model_at_end
        and progress.best_step
        and outputs.load_best(parts.state, progress.best_step)
    ):
        step = progress.best_step
    evaluations = [outputs.evaluation_at(step) or parts.evaluator.validation(step)]
    if data.examples.test is not None:
        evaluations.append(outputs.record_evaluation(run, parts.evaluator.split("test", data.examples.test, step)))
    metric, arithmetic = config.output.metric_for_best or data.task.headline_metric, parts.arithmetic
    by_tokens, epoch = arithmetic.max_tokens is not None, parts.batches.steps_per_epoch
    summary: dict[str, Any] = {
        "status": "done",
        "task": data.task.name,
        "dataset": data.corpus.name,
        "model": config.architecture.model or (config.architecture.model_config or {})["model_type"],
        "num_parameters": sizes[1],
        "num_trained_parameters": sizes[0],
        "steps": progress.step,
        "epochs": progress.step / epoch if epoch else progress.epoch,
        "tokens": progress.tokens_seen,
        "padding_share": 1 - progress.tokens_seen / max(1, progress.positions_seen),
        "metric_name": metric,
        "metric_value": evaluations[0].metrics[metric],
        "result": {e.split: e.metrics for e in evaluations},
        "references": data.task.references(list(data.corpus.validation["text"])) if outputs.is_main else {},
        "final_step": step,
        "best_step": progress.best_step,
        "best_metric": progress.best_metric,
        "max_length": config.data.max_length,
        "global_batch_size": arithmetic.global_batch_size,
        "micro_batch_size": None if by_tokens else arithmetic.micro_batch_size,
        "gradient_accumulation_steps": None if by_tokens else arithmetic.accumulation_steps,
        "max_tokens_per_micro_batch": arithmetic.max_tokens,
        "world_size": run.launch.world_size,
        "launch": str(run.launch),
        "mixed_precision": {"no": "fp32"}.get(run.accelerator.mixed_precision, run.accelerator.mixed_precision),
        "max_grad_norm": config.optimization.max_grad_norm,
        "training_seconds": progress.training_seconds,
        "tokens_per_second": progress.tokens_seen / max(progress.training_seconds, 1e-9),
        "seconds_to_first_step": outputs.first_step_at and outputs.first_step_at - STARTED,
        "peak_allocated_bytes": peak_bytes(run.accelerator.device),
        "nonfinite_steps": progress.nonfinite_steps,
        "rollbacks": progress.rollbacks,
        "label_names": list(data.examples.label_names),
        "notes": outputs.notes,
        "extras": list(run.extras.by_name),
        "hardware": hardware(),
        "versions": versions(),
        **run.extras.merged("summary", run),
    }
    outputs.write_final(parts.state, data.tokenizer)
    run.extras.each("finished", run, parts, summary)
    outputs.write_summary(summary)
    outputs.say_result(summary)


def show_error(message: str) -> None:
    """Shows what ended the run, on the error output."""
    from train.outputs_log import without_secrets

    rank = int(os.environ.get("RANK", "0"))
    print(f"error{f' (rank {rank})' if rank else ''}: {without_secrets(message)}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        # gloo's threads now and then abort the process while the interpreter winds down
        os._exit(status)
    sys.exit(status)
