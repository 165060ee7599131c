"""One training step on fake tensors, stage by stage, with all its allocations counted."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import replace

import torch
from torch import Tensor

from train.config import Config, from_values
from train.extras.meter.tracker import GRADIENTS, OPTIMIZER_STATE, PARAMETERS, WORKSPACE, held_by, tag_gradients
from train.launch import uses_expandable_segments
from train.memory import fake_cuda, ranks, zero
from train.memory.allocator import replay
from train.memory.building import build, run_of
from train.memory.fakes import FakeTracker, fake_tensors, few_pieces
from train.memory.kernels import Attention, Costs, library_losses, library_workspace_bytes
from train.memory.predict import CUDA_GRANULE_BYTES, Job, Prediction, Target, random_batch
from train.memory.rehearsal import make_optimizer_state
from train.model import parameter_counts
from train.step import Engine


class Trial:
    """The stages of a step, to be called in the order in which they stand here.

    Args:
        stack: closed after the last stage; until then tensors are fake and allocations are counted.
    """

    def __init__(self, job: Job, stack: ExitStack) -> None:
        self.asked, self.on_cuda = job.values, job.target.device_type == "cuda"
        if job.sharding in zero.STAGE:
            job = replace(job, values=zero.engine_values(job.values))
        self.job, self.stack = job, stack
        config, self.notes = _with_known_attention(from_values(job.values))
        if self.on_cuda:
            fake_cuda.install(job.target.capability)
        if config.get("packing") and not job.documents:
            self.notes.append("packing: one document a row is assumed, which takes longest")
        if self.on_cuda and config.get("gradient_checkpointing_offload") and not torch.cuda.is_initialized():
            ranks.still_streams()
        if config.get("compile"):
            self.notes.append("compile: the uncompiled step is predicted; compiled layers may keep other tensors")
        self.run = run_of(job, config)
        self.accelerator = self.run.accelerator
        self.costs = _costs_on(job.target)
        stack.enter_context(fake_tensors())
        # Made before anything is counted: on the device only the step's own copies count.
        self.window = [random_batch(job, job.micro_batch_size)]
        self.evaluated = random_batch(job, job.eval_batch_size) if job.eval_batch_size else None
        self.tracker = stack.enter_context(
            FakeTracker(
                job.target.device_type,
                granule_bytes=CUDA_GRANULE_BYTES if self.on_cuda else 1,
                num_classes=job.num_labels or job.vocab_size,
                keep_trace=self.on_cuda,
                padded=job.padded,
                costs=self.costs,
            )
        )
        for batch in (*self.window, *([self.evaluated] if self.evaluated is not None else [])):
            self.tracker.ignore([*batch.inputs.values(), batch.labels])
        self._enter_stand_ins()

    def _enter_stand_ins(self) -> None:
        target, enter = self.job.target, self.stack.enter_context
        if ranks.shards_weights(self.job.sharding):
            enter(ranks.shapes_uncounted(self.tracker))
        enter(few_pieces(self.tracker))
        enter(library_losses(target.capability, self.costs))
        self.attention = enter(Attention(target.capability, target.prefers_cudnn))

    def build(self) -> None:
        """Builds model and optimizer, and tells the tracker which tensors are parameters and gradients."""
        self.model, self.optimizer, self.network = build(self.job, self.run)
        self.parameters = list(self.network.parameters())
        self.tracker.tag(PARAMETERS, held_by(self.network))
        for handle in tag_gradients(self.tracker, self.parameters):
            self.stack.callback(handle.remove)
        self.num_trained, self.num_parameters = parameter_counts(self.network)

    def add_shards(self) -> None:
        """Adds what ZeRO's engine, DDP's reducer and cuBLAS hold, none of which fake tensors go through."""
        job, size = self.job, self.num_parameters
        if job.sharding in zero.STAGE:
            self.tracker.hold(zero.state_bytes(self.asked, size, job.world_size), OPTIMIZER_STATE)
            self.tracker.hold(zero.bucket_bytes(size), WORKSPACE)
            kept = 0
            if job.sharding == "zero3" and job.accumulates:  # FSDP2, which shards here, keeps them in the weights' type
                kept = -(-size // job.world_size) * self.parameters[0].element_size()
            self.tracker.hold(zero.gradient_bytes(size, job.world_size) - kept, GRADIENTS)
            if job.sharding == "zero2":  # a gradient goes into its bucket as soon as it is there
                for parameter in self.parameters:
                    if parameter.requires_grad:
                        parameter.register_post_accumulate_grad_hook(_drop_gradient)
        if job.sharding == "ddp":
            buckets = sum(p.numel() * p.element_size() for p in self.parameters if p.requires_grad)
            self.tracker.hold(buckets, GRADIENTS)
        if self.on_cuda:
            self.tracker.hold(library_workspace_bytes(job.target.capability), WORKSPACE)

    def make_state(self) -> None:
        """Makes the optimizer's state, and the gradients of earlier micro-batches where there are any.

        The first update makes that state, so the peak is the same only from the second step on. Updates in backward
        are made parameter by parameter, as a run makes them.
        """
        self.tracker.restart_trace()  # a run builds on the CPU and moves only what remains of each tensor to the device
        self.tracker.mark("optimizer")
        in_backward = bool(self.run.config.get("optimizer_in_backward"))
        make_optimizer_state(self.parameters, self.optimizer, one_by_one=in_backward)
        states = self.optimizer.optimizer.state.values()
        self.tracker.tag(OPTIMIZER_STATE, [value for state in states for value in state.values()])
        if self.job.accumulates and self.job.sharding != "zero2":
            for parameter in self.parameters:
                parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
            self.tracker.tag(GRADIENTS, [parameter.grad for parameter in self.parameters])

    def step(self) -> None:
        """Makes the step that is counted."""
        self.tracker.mark("idle")
        self.tracker.reset_peak()
        engine = Engine(self.accelerator, self.run.config, self.tracker.mark)
        engine = self.run.extras.pipe("wrap_step", self.run, engine)
        engine.step(self.model, self.optimizer, self.window)
        self.flops, self.seconds = (self.costs.flops, self.costs.seconds) if self.costs else (None, None)

    def evaluate(self) -> None:
        """Evaluates the largest batch, where there is one."""
        self.tracker.mark("idle")
        if self.evaluated is not None:
            self.model.eval()
            with torch.no_grad():
                self.tracker.mark("evaluation")
                evaluated = self.evaluated.to(self.accelerator.device)
                self.model(evaluated.inputs, evaluated.labels, scored=True)

    def prediction(self, started: float) -> Prediction:
        """What was counted.

        Args:
            started: ``time.perf_counter()`` when the prediction began.
        """
        peak, trace = self.tracker.peak, self.tracker.trace
        reserved = peak.num_bytes
        if trace is not None:
            reserved = replay(trace, expandable_segments=uses_expandable_segments()).reserved_bytes
        return Prediction(
            peak_bytes=peak.num_bytes,
            phase=peak.phase,
            operator=peak.operator,
            bytes_by_kind=peak.bytes_by_kind,
            peak_bytes_by_phase={k: v for k, v in self.tracker.peak_bytes_by_phase.items() if k != "idle"},
            reserved_bytes=reserved,
            num_parameters=self.num_parameters,
            num_trained_parameters=self.num_trained,
            attention_kernels=tuple(sorted(self.attention.kernels_used)),
            flops=self.flops,
            seconds=self.seconds,
            prediction_seconds=time.perf_counter() - started,
            notes=tuple(self.notes),
            offloaded_bytes=self.tracker.pinned_bytes,
        )


def _costs_on(target: Target) -> Costs | None:
    """A counter of operations on ``target``; None where its rates are unknown."""
    precisions = {torch.float32: "no", torch.float16: "fp16", torch.bfloat16: "bf16"}
    rates = {t: target.flops_per_second[p] for t, p in precisions.items() if target.flops_per_second.get(p)}
    return Costs(rates, target.bytes_per_second) if rates and target.bytes_per_second else None


def _with_known_attention(config: Config) -> tuple[Config, list[str]]:
    """Attention of separate packages is predicted as SDPA's flash kernel, which keeps the same tensors."""
    asked = config.architecture.attn_implementation
    if asked in (None, "sdpa", "eager"):
        return config, []
    note = f"attention {asked} is predicted as sdpa, whose flash kernel keeps the same tensors"
    return config.changed(attn_implementation="sdpa"), [note]


def _drop_gradient(parameter: Tensor) -> None:
    parameter.grad = None
