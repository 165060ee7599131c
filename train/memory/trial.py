"""One training step on fake tensors, with all its allocations counted."""

from __future__ import annotations

import time
from contextlib import ExitStack

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn

from train.config import Config, from_values
from train.extras.meter.tracker import GRADIENTS, WORKSPACE, num_classes_of, tag_gradients, tag_held
from train.memory import fake_cuda, ranks, uses_expandable_segments
from train.memory.allocator import replay
from train.memory.building import build, run_of
from train.memory.fakes import FakeTracker, fake_tensors, few_pieces
from train.memory.kernels import Costs, card_attention, library_losses, library_workspace_bytes
from train.memory.predict import STAGE, Job, Prediction, Target, random_batch
from train.memory.session import make_optimizer_state
from train.model import parameter_counts
from train.records import Run
from train.step import Engine


def predict(job: Job) -> Prediction:
    """The memory of ``job``'s step; to be called in a process that does nothing else.

    Raises UserError if the model cannot be built, or this torch cannot be made to plan for CUDA.
    """
    started = time.perf_counter()
    config, notes = _known(job)
    if job.target.device_type != "cpu":
        fake_cuda.install(job.target.device_type, job.target.capability)
        if config.get("gradient_checkpointing_offload") and not torch.cuda.is_initialized():
            ranks.still_streams()
    run, costs = run_of(job, config), _costs_on(job.target)
    with ExitStack() as stack:
        stack.enter_context(fake_tensors())
        tracker, kernels_used = _enter_stand_ins(stack, job, costs)
        # On the device only the step's own copies count.
        tracker.paused = True
        batch, evaluated = random_batch(job, job.micro_batch_size), random_batch(job, job.eval_batch_size or 1)
        tracker.paused = False
        tracker.ignore([*batch.inputs.values(), batch.labels, *evaluated.inputs.values(), evaluated.labels])
        model, optimizer, network = _built(job, run, tracker)
        num_trained, num_parameters = parameter_counts(network)
        tracker.mark("idle")
        tracker.reset_peak()
        engine = run.extras.pipe("wrap_step", run, Engine(run.accelerator, run.config, tracker.mark))
        engine.step(model, optimizer, [batch])
        flops, seconds = (costs.flops, costs.seconds) if costs else (None, None)
        tracker.mark("idle")
        if job.eval_batch_size:
            model.eval()
            tracker.mark("evaluation")
            with torch.no_grad():
                evaluated = evaluated.to(run.accelerator.device)
                model(evaluated.inputs, evaluated.labels, scored=True)

        peak, reserved = tracker.peak, tracker.peak.num_bytes
        if tracker.trace is not None:
            reserved = replay(tracker.trace, expandable_segments=uses_expandable_segments()).reserved_bytes
        return Prediction(
            peak_bytes=peak.num_bytes,
            phase=peak.phase,
            operator=peak.operator,
            bytes_by_kind=peak.bytes_by_kind,
            peak_bytes_by_phase={k: v for k, v in tracker.peak_bytes_by_phase.items() if k != "idle"},
            reserved_bytes=reserved,
            num_parameters=num_parameters,
            num_trained_parameters=num_trained,
            attention_kernels=tuple(sorted(kernels_used)),
            flops=flops,
            seconds=seconds,
            prediction_seconds=time.perf_counter() - started,
            notes=tuple(notes),
            offloaded_bytes=tracker.offloaded_bytes,
        )


def _known(job: Job) -> tuple[Config, list[str]]:
    """The configuration to predict, and where it is not quite the one that was asked for."""
    config, notes = from_values(ranks.engine_values(job.values) if job.sharding in STAGE else job.values), []
    attention = config.architecture.attn_implementation
    if attention not in (None, "sdpa", "eager"):
        config = config.changed(attn_implementation="sdpa")
        notes.append(f"attention {attention} is predicted as sdpa, whose flash kernel keeps the same tensors")
    if config.get("packing") and not job.documents:
        notes.append("packing: one document a row is assumed, which takes longest")
    if config.get("compile"):
        notes.append("compile: the uncompiled step is predicted; compiled layers may keep other tensors")
    return config, notes


def _costs_on(target: Target) -> Costs | None:
    """A counter of operations on ``target``; None where its rates are unknown."""
    precisions = {torch.float32: "no", torch.float16: "fp16", torch.bfloat16: "bf16"}
    rates = {t: target.flops_per_second[p] for t, p in precisions.items() if target.flops_per_second.get(p)}
    return Costs(rates, target.bytes_per_second) if rates and target.bytes_per_second else None


def _enter_stand_ins(stack: ExitStack, job: Job, costs: Costs | None) -> tuple[FakeTracker, set[str]]:
    """The counter of allocations, and the names of the card's kernels that run in place of torch's attention."""
    tracker = FakeTracker(job.target.device_type, costs)
    stack.enter_context(tracker)
    if job.sharding in ranks.SHARDED_WEIGHTS:
        stack.enter_context(ranks.shapes_uncounted(tracker))
    stack.enter_context(few_pieces(tracker))
    stack.enter_context(library_losses(job.target.capability, costs))
    return tracker, stack.enter_context(card_attention(job.target.capability, job.target.prefers_cudnn))


def _built(job: Job, run: Run, tracker: FakeTracker) -> tuple[nn.Module, AcceleratedOptimizer, nn.Module]:
    """What :func:`train.memory.building.build` gives, as a step in the middle of a run finds it."""
    model, optimizer, network = build(job, run)
    tracker.num_classes = num_classes_of(network, job.num_labels, job.vocab_size)
    tag_held(tracker, network, optimizer.optimizer)
    tag_gradients(tracker, network.parameters())
    _hold_buffers(tracker, job, network)
    tracker.restart_trace()  # a run builds on the CPU and moves only what remains of each tensor to the device
    # The first update makes the optimizer's state, so the peak is the same only from the second step on.
    tracker.mark("optimizer")
    make_optimizer_state(run, network, optimizer)
    if job.accumulates and job.sharding != "zero2":  # the gradients of earlier micro-batches
        for parameter in network.parameters():
            parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
    tag_held(tracker, network, optimizer.optimizer)
    return model, optimizer, network


def _hold_buffers(tracker: FakeTracker, job: Job, network: nn.Module) -> None:
    """Counts what ZeRO's engine, DDP's reducer and cuBLAS hold, none of which fake tensors go through."""
    trained, num_trained = [p for p in network.parameters() if p.requires_grad], parameter_counts(network)[0]
    if job.sharding in STAGE:
        held = ranks.engine_bytes(job.values, num_trained, job.world_size)
        if job.sharding == "zero3" and job.accumulates:  # FSDP2, which shards here, keeps them in the weights' type
            held[GRADIENTS] -= -(-num_trained // job.world_size) * next(network.parameters()).element_size()
        for kind, num_bytes in held.items():
            tracker.hold(num_bytes, kind)
        if job.sharding == "zero2":  # a gradient goes into its bucket as soon as it is there
            for parameter in trained:
                parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    if job.sharding == "ddp":
        tracker.hold(sum(p.numel() * p.element_size() for p in trained), GRADIENTS)
    if job.target.device_type == "cuda":
        tracker.hold(library_workspace_bytes(job.target.capability), WORKSPACE)
