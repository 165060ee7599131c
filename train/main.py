"""A whole run, top to bottom: parse, accelerator, data, model, optimizer, fit, finish; --help lists the flags."""

import os
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

if not __package__:  # run as a script: the folder of this file must not shadow other packages
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from train import extras, records
from train import launch as launching
from train.config import Config, parse
from train.figures import show_error


def main(arguments: list[str] | None = None) -> int:
    """Trains as the command line says and returns the exit status (see ``train.records``)."""
    # Read when torch is imported: no page of stack frames for each connection that breaks, and threads that sleep while
    # they wait for each other: spinning, they would slow every step down wherever another process computes, too.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        # Parse: flags over recipe over defaults. What is wrong ends here, before anything is loaded.
        launch = launching.read_launch()
        config = parse(sys.argv[1:] if arguments is None else arguments, launch)
        hooks, stop = extras.join(), list[str]()  # names of signals that ask this process to stop
        with hooks.inside("open", config, launch, stop):
            return run_to_its_end(config, launch, hooks, stop)
    except records.UserError as error:
        is_first = os.environ.get("LOCAL_RANK", "0") == "0"
        if str(error) and not is_first:  # local rank 0 reports an error of all ranks; then the launcher ends the others
            time.sleep(3)
        if str(error) and (is_first or error.exit_status != records.EXIT_USAGE):
            show_error(str(error))
        return error.exit_status
    except KeyboardInterrupt:
        show_error("interrupted: ended at once. --resume auto, the default, resumes from the newest checkpoint.")
        return records.EXIT_INTERRUPTED


def run_to_its_end(config: Config, launch: launching.Launch, hooks: extras.Extras, stop: list[str]) -> int:
    """Makes the Accelerator, trains, explains what ended the run early, and returns the exit status."""
    run = None
    try:
        run = start(config, launch, hooks, stop)
        return train(run)
    except records.StopAtOnce:
        assert run is not None  # its data was being prepared, so there is nothing to save
        hooks.each("stopped", run, None)
        return records.EXIT_STOPPED
    except Exception as error:
        if run is not None:
            run.outputs.bar.close()
        # An extra may know what happened: a lost rank, a full disk, no memory left. A bug shows its traceback.
        if (explanation := hooks.first("failed", run, error)) is not None:
            raise records.UserError(explanation) from None
        raise


def start(config: Config, launch: launching.Launch, hooks: extras.Extras, stop: list[str]) -> records.Run:
    """Makes the Accelerator, which knows devices, precision and accumulation, and the Run that is handed on."""
    from accelerate import Accelerator, state

    from train.outputs import Outputs

    state.AcceleratorState._reset_state(reset_partial_state=True)  # an earlier run of this process may have differed
    launch = replace(launch, precision=config.optimization.mixed_precision or launch.precision)
    launch = hooks.pipe("change_launch", config, launch)
    # Accelerator: what the launcher decided goes in as options.
    timeout_seconds = config.optimization.distributed_timeout_seconds
    options = launching.accelerator_options(launch, launching.target_device(), timeout_seconds)
    accelerator = Accelerator(
        gradient_accumulation_steps=records.arithmetic_of(config, launch.dp_size).accumulation_steps,
        mixed_precision=launch.precision,  # "fp16", "bf16" or "no"
        **{**options, **hooks.merged("accelerator_options", config, launch)},
    )
    outputs = hooks.first("outputs", config, accelerator) or Outputs(config, accelerator)
    run = records.Run(config, launch, accelerator, hooks, outputs, stop)
    hooks.each("started", run)
    run.outputs.from_main(run.outputs.prepare)
    run.outputs.note(f"extras: {', '.join(hooks.by_name) or 'none'}")
    return run


def train(run: records.Run) -> int:
    """Data, model, optimizer, fit, finish; returns the exit status."""
    # Imported here: these take seconds, and a wrong flag or --help should not wait for them.
    from train.data import prepare_data
    from train.loop import fit, is_done
    from train.model import build_model
    from train.optim import build_optimizer, parameter_counts
    from train.state import TrainingState
    from train.step import Engine, seed_generators

    accelerator, outputs, hooks = run.accelerator, run.outputs, run.extras

    # Data: documents -> examples -> micro-batches; what step k sees is a function of (seed, k).
    with hooks.inside("preparing"):
        data = prepare_data(run)
    run.config = hooks.pipe("change_config", run, run.config, data)
    optim, batches = run.config.optimization, data.training_batches(run)
    hooks.each("prepared", run, data, batches)

    # Model: built, changed by the extras, wrapped with its loss.
    seed_generators(optim.seed)
    with_loss = build_model(run, type(data.task), data.tokenizer, data.label_names)
    launching.shard_by_layer(accelerator, with_loss.model)
    sizes = parameter_counts(with_loss.model)

    # Optimizer: made for the model as it is, then both are prepared; accelerate moves, wraps and shards them.
    model, optimizer = cast("Any", accelerator.prepare(with_loss, build_optimizer(run, with_loss.model)))
    unwrapped: Any = accelerator.unwrap_model(model)
    stateful = unwrapped.model, optimizer.optimizer, hooks.merged("identity", run, data), accelerator.scaler
    state = hooks.first("state", *stateful) or TrainingState(*stateful)
    engine = hooks.pipe("wrap_step", run, Engine(accelerator, run.config, partial(hooks.each, "mark")))

    # Fit: from the newest intact checkpoint to the last step, a signal or early stopping.
    total_steps = optim.max_steps or (optim.num_epochs or 1) * batches.steps_per_epoch
    parts = records.Parts(data, batches, model, sizes, optimizer, engine, state, total_steps)
    hooks.each("ready", run, parts)
    progress = outputs.resume(run, parts)
    if is_done(run, parts, progress) and outputs.is_written(run, progress):
        return records.EXIT_DONE
    outputs.begin(run, parts, progress)
    hooks.each("before_training", run, parts)
    progress = fit(run, parts, progress)
    outputs.bar.close()

    # Finish: final/ for from_pretrained, the summary, and what extras make of them.
    return finish(run, parts, progress) if is_done(run, parts, progress) else records.EXIT_STOPPED


def finish(run: records.Run, parts: records.Parts, progress: records.Progress) -> int:
    """Runs the evaluations that are still missing, writes ``final/`` and the summary, and returns the exit status."""
    from train.evaluation import evaluate
    from train.state import StoredBlocks

    outputs, data, step = run.outputs, parts.data, progress.step
    run.extras.each("finishing", run, parts.state, progress)
    if (chosen := run.extras.first("final_step", run, progress)) is not None:
        parts.state.restore_model(StoredBlocks(outputs.checkpoints / f"step-{chosen:08d}"))
        step = chosen
    known = outputs.validations.get(step)
    evaluations = [known or outputs.record_evaluation(run, evaluate(run, parts, "validation", step))]
    if "test" in data.examples:
        evaluations.append(outputs.record_evaluation(run, evaluate(run, parts, "test", step)))
    summary = outputs.summary(run, parts, progress, evaluations)
    outputs.write_final(parts.state, data.task.stand_alone(data.tokenizer))
    run.extras.each("finished", run, parts, summary)
    outputs.finish(summary)
    return records.EXIT_DONE


if __name__ == "__main__":
    launching.exit_with(main)
