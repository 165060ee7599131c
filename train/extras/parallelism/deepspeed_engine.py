"""The optimizer step of a run whose weights DeepSpeed shards: ZeRO stages 2 and 3 (arXiv 1910.02054), and Ulysses.

:mod:`train.step` is the same step without it. Here backward also sums gradients over the ranks, and one call finds
their norm, clips, updates and shares the new weights.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from train.config import Config, Optimization
from train.extras.parallelism.deepspeed_settings import MAX_REDUCE_BUCKET_ELEMENTS, engine_settings
from train.extras.parallelism.ulysses import part_of_sequences
from train.launch import Launch
from train.loss import ModelWithLoss
from train.records import BatchArithmetic, Mark, MicroBatch, StepOutcome, UserError, unmarked
from train.step import count_targets, outcome_of, parallel_sizes, read_counts

if TYPE_CHECKING:
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.utils import DeepSpeedPlugin, ParallelismConfig


def deepspeed_plugin(config: Config, launch: Launch, accumulation_steps: int) -> DeepSpeedPlugin:
    """What the Accelerator needs to set up DeepSpeed; the process group must be there on a machine without a GPU.

    Raises:
        UserError: DeepSpeed is not installed.
        UsageError: launcher and configuration contradict each other.
    """
    settings = engine_settings(config, launch, accumulation_steps, os.environ)
    if importlib.util.find_spec("deepspeed") is None:
        raise UserError("the launch file asks for DeepSpeed, which is not installed: pip install -e '.[deepspeed]'")
    from accelerate.utils import DeepSpeedPlugin

    if torch.distributed.is_initialized():  # made by torch: DeepSpeed has to be told of it
        import deepspeed  # pyright: ignore[reportMissingImports]

        deepspeed.init_distributed(torch.distributed.get_backend(), auto_mpi_discovery=False, verbose=False)
    os.environ.pop("ACCELERATE_CONFIG_DS_FIELDS", None)  # else accelerate refuses a file and fields, compared above
    sizes = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}  # until they are known
    return DeepSpeedPlugin(hf_ds_config={**settings, **sizes}, zero3_init_flag=False)


def sequence_parallelism(launch: Launch) -> ParallelismConfig:
    """What the Accelerator needs to set up Ulysses."""
    from accelerate.utils import DeepSpeedSequenceParallelConfig, ParallelismConfig

    return ParallelismConfig(
        sp_size=launch.sequence_size,
        sp_backend="deepspeed",
        sp_handler=DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=True),
        dp_replicate_size=launch.data_size,
    )


def build_whole(accelerator: Accelerator) -> None:
    """Has transformers build the next model whole on every rank, so that it is the one that a single process builds.

    It would shard it while building, and then draw other initial weights.
    """
    cast("Any", accelerator.state.deepspeed_plugin).dschf = None


def prepare(
    accelerator: Accelerator, arithmetic: BatchArithmetic, model: ModelWithLoss, optimizer: torch.optim.Optimizer
) -> tuple[Any, AcceleratedOptimizer]:
    """The engine around ``model``, and its optimizer; both hold this rank's part."""
    plugin = accelerator.state.deepspeed_plugin
    assert plugin is not None
    plugin.deepspeed_config.update(
        train_micro_batch_size_per_gpu=arithmetic.micro_batch_size,
        gradient_accumulation_steps=arithmetic.accumulation_steps,
    )
    # DeepSpeed allocates the buffer whole, and by default for 500 million gradients, however small the model is.
    bucket = min(MAX_REDUCE_BUCKET_ELEMENTS, sum(p.numel() for p in model.parameters()))
    plugin.deepspeed_config["zero_optimization"].setdefault("reduce_bucket_size", bucket)
    accelerator.gradient_accumulation_steps = arithmetic.accumulation_steps
    if plugin.zero_stage == 3 and not all(p.requires_grad for p in model.parameters()):
        raise UserError("zero_stage: 3 with frozen weights: checkpoints would miss them. Use zero_stage: 2.")
    size = parallel_sizes(accelerator)[2]
    if size == 1:
        return accelerator.prepare(model, optimizer)
    network, handler = cast("Any", model.model), cast("Any", accelerator.parallelism_config).sp_handler
    try:
        model.config = network.config  # pyright: ignore[reportAttributeAccessIssue] - where accelerate looks for it
        handler.sp_attn_implementation = network.config._attn_implementation
        return accelerator.prepare(model, optimizer)
    except (AttributeError, ValueError, AssertionError) as error:
        raise UserError(
            f"sequence parallelism of {size} does not work with this model: {' '.join(str(error).split())[:300]}. It "
            "needs a causal model of transformers, with attn_implementation sdpa or flash_attention_2 and a number of "
            "heads that it divides."
        ) from None


def optimizer_step(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: AcceleratedOptimizer,
    window: Sequence[MicroBatch],
    config: Optimization,
    stop_requested: bool = False,
    mark: Mark = unmarked,
) -> StepOutcome:
    """What :func:`train.step.optimizer_step` does, by a DeepSpeed engine.

    Raises:
        UserError: the global batch has no target at all, or fp16 overflows at every loss scale.
    """
    engine = cast("Any", model)
    totals = count_targets(accelerator, window, stop_requested)
    loss_sum = _accumulate_gradients(accelerator, engine, window, totals[0], mark)
    counts = read_counts(totals)
    mark("optimizer")
    try:
        engine.step()
    except Exception as error:
        if "loss scale already at minimum" not in str(error):
            raise
        raise UserError(
            "the gradients overflow fp16 even at the lowest loss scale. Try --mixed_precision bf16 or no, a lower "
            "learning rate or a longer warm-up."
        ) from None
    norm, skipped = float(engine.get_global_grad_norm()), bool(optimizer.step_was_skipped)
    return outcome_of(config, loss_sum, counts, norm, skipped)


def _accumulate_gradients(
    accelerator: Accelerator, engine: Any, window: Sequence[MicroBatch], num_targets: float | Tensor, mark: Mark
) -> Tensor:
    """Forward and backward of each micro-batch; returns this rank's summed loss ()."""
    scale = gradient_divisor(accelerator, engine.zero_optimization_stage()) / num_targets
    size, num_rows = parallel_sizes(accelerator)[2], engine.train_micro_batch_size_per_gpu()
    if not engine.module.training:
        engine.train()
    loss_sum = torch.zeros((), device=accelerator.device, dtype=torch.float32)
    for number, micro_batch in enumerate(window, start=1):
        mark("forward")
        if size > 1:
            micro_batch = part_of_sequences(micro_batch, accelerator.process_index % size, size, num_rows)
        micro_batch = micro_batch.to(accelerator.device)
        loss = engine(micro_batch.inputs, micro_batch.labels, num_targets=micro_batch.num_targets)
        mark("backward")
        engine.set_gradient_accumulation_boundary(number == len(window))
        engine.backward(loss * scale, scale_wrt_gas=False)
        loss_sum += loss.detach()
        del loss
    return loss_sum


def gradient_divisor(accelerator: Accelerator, stage: int) -> int:
    """What DeepSpeed 0.19 divides the sum of all ranks' gradients by, and the loss is multiplied by to undo it.

    Stage 3 divides by all ranks; stage 2 counts ranks that share a sequence as one.
    """
    return accelerator.num_processes // (1 if stage == 3 else parallel_sizes(accelerator)[2])
