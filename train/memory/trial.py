"""One training step on fake tensors, with all its allocations counted; and what it needs: model and optimizer of a job.

These are built as a run builds them: on fake tensors to predict, on real ones to measure.
"""

from contextlib import ExitStack, suppress
from dataclasses import replace
from unittest.mock import patch

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import AcceleratorState, GradientState
from torch import nn
from transformers.initialization import no_init_weights

from train import extras
from train.config import Config, from_values
from train.extras.hardware import init_gloo, resolve_precision
from train.extras.meter.tracker import GRADIENTS, WORKSPACE, num_classes_of, tag_gradients, tag_held, tensors_in
from train.launch import Launch, accelerator_options, shard_by_layer
from train.memory import make_believe, uses_expandable_segments
from train.memory.allocator import least_reserved_bytes, replay
from train.memory.card_kernels import Costs, card_attention, library_losses, library_workspace_bytes
from train.memory.fakes import FakeTracker, fake_adapters, fake_tensors, fake_weights, few_pieces
from train.memory.predict import GUESS, HALF, OFFLOAD, SHARDED_WEIGHTS, Job, Prediction, Target, random_batch
from train.memory.question import Question, job_of, position_limit, replace_length
from train.memory.session import make_optimizer_state
from train.model import build_model, build_network
from train.optim import build_optimizer, parameter_counts
from train.outputs import Outputs
from train.records import Run, UsageError
from train.step import Engine
from train.tasks import load_task


def predict(job: Job) -> Prediction:
    """The memory of ``job``'s step; to be called in a process that does nothing else.

    Raises UserError if the model cannot be built, or this torch cannot be made to plan for CUDA.
    """
    config, notes = _known(job)
    if job.target.device_type != "cpu":
        make_believe.install(job.target.device_type, job.target.capability)
    rates = job.target.flops_per_second.items()
    own = {getattr(torch, HALF.get(p, "float32")): rate for p, rate in rates if p != "tf32" or config.get("tf32")}
    costs = Costs(own, job.target.bytes_per_second)
    with ExitStack() as stack:
        if job.sharding in SHARDED_WEIGHTS:
            stack.enter_context(make_believe.ranks(job.world_size, job.target.device_type, job.sharding == OFFLOAD))
        run = run_of(job, config)
        stack.enter_context(fake_tensors())
        tracker = stack.enter_context(FakeTracker(job.target.device_type, costs))
        if job.sharding in SHARDED_WEIGHTS:
            stack.enter_context(make_believe.shapes_uncounted(tracker))
        stack.enter_context(few_pieces(tracker))
        stack.enter_context(library_losses(job.target.capability, costs))
        kernels_used = stack.enter_context(card_attention(job.target, job.values["attn_implementation"]))
        with patch.object(tracker, "paused", True):  # on the device only the step's own copies count
            batch = random_batch(job, job.micro_batch_size)
            shown = replace(job, length=job.eval_length or job.length, padded=job.eval_padded)
            evaluated = random_batch(shown, job.eval_batch_size or 1)
        tracker.ignore([*batch.inputs.values(), batch.labels, *evaluated.inputs.values(), evaluated.labels])
        model, optimizer, network = _built(job, run, tracker)
        num_trained, num_parameters = parameter_counts(network)
        tracker.mark("idle")
        tracker.reset_peak()
        engine = run.extras.pipe("wrap_step", run, Engine(run.accelerator, run.config, tracker.mark))
        engine.step(model, optimizer, [batch])
        flops, seconds = costs.flops, costs.seconds  # without the evaluation, after which FSDP2 keeps weights gathered
        on_host = _host_bytes_by_kind(tracker, network, optimizer.optimizer)
        if job.eval_batch_size:
            model.eval()
            tracker.mark("evaluation")
            with torch.no_grad():
                evaluated = evaluated.to(run.accelerator.device)
                model(evaluated.inputs, evaluated.labels, scored=True)

        peak, (reserved, least_reserved) = tracker.peak, _reserved_bytes(tracker)
        return Prediction(
            peak_bytes=peak.num_bytes,
            phase=peak.phase,
            operator=peak.operator,
            bytes_by_kind=peak.bytes_by_kind,
            peak_bytes_by_phase={k: v for k, v in tracker.peak_bytes_by_phase.items() if k != "idle"},
            reserved_bytes=reserved,
            least_reserved_bytes=least_reserved,
            num_parameters=num_parameters,
            num_trained_parameters=num_trained,
            attention_kernels=tuple(sorted(kernels_used)),
            flops=flops,
            seconds=seconds,
            notes=tuple(notes),
            host_bytes_by_kind=on_host,
        )


def _reserved_bytes(tracker: FakeTracker) -> tuple[int, int]:
    """What the caching allocator comes to hold, and with how much it would do on a full card."""
    peak = tracker.peak.num_bytes
    if tracker.device_type != "cuda":
        return peak, peak
    reserved = replay(tracker.trace, grows := uses_expandable_segments()).reserved_bytes
    return reserved, least_reserved_bytes(tracker.trace, peak - 1, reserved) if grows else reserved


def _host_bytes_by_kind(tracker: FakeTracker, network: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """What a step on a card keeps in host memory; an optimizer's counters are left out."""
    if tracker.device_type == "cpu":
        return {}
    weights = list(network.parameters())
    # Some optimizers keep more by parameter than their state: originals of the weights.
    kept = tensors_in([[*held.values()] for held in vars(optimizer).values() if isinstance(held, dict)])
    held = {"parameters": weights, "gradients": [p for p in weights if p.requires_grad], "optimizer state": kept}
    found = {"activations": tracker.offloaded_bytes}
    for kind, tensors in held.items():
        local = [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors]
        found[kind] = sum(t.nbytes for t in local if t.ndim and t.device.type == "cpu")
    return found


def _known(job: Job) -> tuple[Config, list[str]]:
    """The configuration to predict, and where it is not quite the one that was asked for."""
    config, notes = from_values(job.values), list[str]()
    if (attention := config.architecture.attn_implementation) not in (None, "sdpa", "eager"):
        config = config.changed(attn_implementation="sdpa")
        notes.append(f"attention {attention} is predicted as sdpa, whose flash kernel keeps the same tensors")
    notes += [GUESS] if job.is_guess else []
    if config.get("packing") and not job.documents:
        notes.append("packing: one document a row is assumed, which takes longest")
    if config.get("compile"):
        notes.append("compile: the uncompiled step is predicted; compiled layers may keep other tensors")
    return config, notes


def _built(job: Job, run: Run, tracker: FakeTracker) -> tuple[nn.Module, AcceleratedOptimizer, nn.Module]:
    """What :func:`build` gives, as a step in the middle of a run finds it."""
    model, optimizer, network = build(job, run)
    tracker.num_classes = num_classes_of(network, job.num_labels, job.vocab_size)
    tag_held(tracker, network, optimizer.optimizer)
    tag_gradients(tracker, network.parameters())
    # What DDP's reducer and cuBLAS hold goes through no fake tensor.
    trained = [p for p in network.parameters() if p.requires_grad]
    if job.sharding == "ddp":
        tracker.hold(sum(p.numel() * p.element_size() for p in trained), GRADIENTS)
    if job.target.device_type == "cuda":
        tracker.hold(library_workspace_bytes(job.target.capability), WORKSPACE)
    # The trace begins here: a run builds on the CPU and moves only what remains of each tensor to the device.
    tracker.trace = [(key, block.num_bytes) for key, block in tracker.live.items() if block.num_bytes]
    # The first update makes the optimizer's state, so the peak is the same only from the second step on.
    tracker.mark("optimizer")
    make_optimizer_state(run, network, optimizer)
    if job.accumulates:  # the gradients of earlier micro-batches
        for parameter in trained:
            parameter.grad = torch.empty_like(parameter)
    tag_held(tracker, network, optimizer.optimizer)
    return model, optimizer, network


def run_of(job: Job, config: Config) -> Run:
    """A run of ``config`` as rank 0 of the job's ranks sees it, before anything is built; nothing is written."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    device, shards = torch.device(job.target.device_type), job.sharding in SHARDED_WEIGHTS
    precision, _ = resolve_precision(config.optimization.mixed_precision or "no", device)
    launch = Launch(job.world_size, engine="fsdp2", precision=precision) if shards else Launch(precision=precision)
    if device.type == "cpu":
        init_gloo(launch)
    accelerator = Accelerator(mixed_precision=precision, **accelerator_options(launch, device))
    outputs, longest = Outputs(config, accelerator, is_silent=True), max(job.length, config.data.max_length)
    return Run(config.changed(max_length=longest), launch, accelerator, extras.join(), outputs, [], is_planned=True)


def try_model(question: Question) -> Question:
    """``question``, with single examples if padding changes the results of a small copy of the model.

    Raises UsageError where a run would refuse the model: a prediction has no values that could show it.
    """
    if question.config.architecture.is_function:
        return question  # whose weights would all have to be made
    length = question.config.data.max_length
    config = replace_length(question, min(length, position_limit(question.config) or length)).config
    job = job_of(config, Target("cpu"), question.vocab_size, question.num_labels, question.world_size)
    run, task = replace(run_of(job, config), is_planned=False), load_task(job.values["task"])
    with torch.device("meta"):
        network = build_network(run, task, *job.tokenizer_and_labels, has_weights=False)
    run.extras.each("check_model", run, network, task, sizes := (job.vocab_size, job.num_labels))
    run.config = config.changed(micro_batch_size=2)
    with suppress(UsageError):
        if not task.is_causal:  # whose tokens see none that follow
            run.extras.each("check_model", run, network, task, sizes)
        return question
    return replace(question, pads=False)


def build(job: Job, run: Run, initialised: bool = False) -> tuple[nn.Module, AcceleratedOptimizer, nn.Module]:
    """Prepared model, prepared optimizer, and the network inside the model.

    If ``initialised``, with real weights; not for fake ones, as some initialisations repeat until the data is right.
    """
    with ExitStack() as stack:
        if not initialised:
            stack.enter_context(run.accelerator.device)
            stack.enter_context(no_init_weights())
            stack.enter_context(fake_weights(run.accelerator.device))
            stack.enter_context(fake_adapters(run.config))
        with_loss = build_model(run, load_task(job.values["task"]), *job.tokenizer_and_labels, has_weights=False)
        with_loss.tie_weights()  # type: ignore - left out with the initialisation
    shard_by_layer(run.accelerator, with_loss.model)
    parts = with_loss, build_optimizer(run, with_loss.model)
    model, optimizer = run.accelerator.prepare(*parts, device_placement=[initialised] * 2)
    return model, optimizer, with_loss.model
