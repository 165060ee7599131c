"""DeepSpeed behind the optimizer step: ZeRO stages 2 and 3 (arXiv 1910.02054) shard weights and optimizer state.

Its backward also sums gradients over the ranks, and one call finds their norm, clips, updates and shares new weights.
"""

from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from train.batching import arithmetic_of
from train.config import Config
from train.extras.parallelism.deepspeed_settings import MAX_REDUCE_BUCKET_ELEMENTS, engine_settings
from train.launch import Launch
from train.loss import ModelWithLoss
from train.records import Run, UserError
from train.step import Engine

if TYPE_CHECKING:
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.utils import DeepSpeedPlugin


class DeepSpeed(Engine):
    """Gradients, clipping and update by the DeepSpeed engine that accelerate has prepared."""

    @property
    def engine(self) -> Any:
        """DeepSpeed's own."""
        wrapped: Any = self.accelerator.deepspeed_engine_wrapped
        return wrapped.engine

    @property
    def loss_scale(self) -> float:
        """DeepSpeed 0.19 divides the sum of gradients by the ranks; by the accumulation only if asked to."""
        return self.accelerator.num_processes

    def backward(self, loss: Tensor, scale: float | Tensor) -> None:
        """Adds the gradient of ``loss`` × ``scale``; the last one of a step finishes the sum over ranks.

        Not ``accelerator.backward``, which also updates the weights, before an empty global batch is noticed.
        """
        self.engine.set_gradient_accumulation_boundary(self.accelerator.sync_gradients)
        self.engine.backward(loss * scale, scale_wrt_gas=False)

    def clip(self, model: nn.Module) -> float:
        """Nothing yet: the norm is found, and clipped, by :meth:`update`."""
        return 0.0

    def update(self, optimizer: AcceleratedOptimizer, norm: float) -> tuple[float, bool]:
        """Clips and steps unless the norm is not finite; returns the norm, and whether the step was skipped.

        Raises:
            UserError: fp16 overflows at every loss scale.
        """
        try:
            self.engine.step()
        except Exception as error:
            if "loss scale already at minimum" not in str(error):
                raise
            raise UserError(
                "the gradients overflow fp16 even at the lowest loss scale. Try --mixed_precision bf16 or no, a lower "
                "learning rate or a longer warm-up."
            ) from None
        return float(self.engine.get_global_grad_norm()), bool(optimizer.step_was_skipped)


def deepspeed_plugin(config: Config, launch: Launch) -> DeepSpeedPlugin:
    """What the Accelerator needs to set up DeepSpeed; on a machine without a GPU the process group has to exist.

    Raises:
        UserError: DeepSpeed is not installed.
        UsageError: launcher and configuration contradict each other.
    """
    settings = engine_settings(config, launch, arithmetic_of(config, launch.dp_size).accumulation_steps, os.environ)
    if importlib.util.find_spec("deepspeed") is None:
        raise UserError("the launch file asks for DeepSpeed, which is not installed: pip install -e '.[deepspeed]'")
    from accelerate.utils import DeepSpeedPlugin

    if torch.distributed.is_initialized():  # by torch: DeepSpeed has to be told
        import deepspeed  # pyright: ignore[reportMissingImports]

        deepspeed.init_distributed(torch.distributed.get_backend(), auto_mpi_discovery=False, verbose=False)
    # Compared above. With these accelerate would refuse a file and fields together, and read "auto" as a number.
    for name in ("ACCELERATE_CONFIG_DS_FIELDS", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"):
        os.environ.pop(name, None)
    sizes = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}  # until complete_settings
    return DeepSpeedPlugin(hf_ds_config={**settings, **sizes}, zero3_init_flag=False)


def complete_settings(run: Run, model: ModelWithLoss) -> None:
    """Tells DeepSpeed the batch and bucket sizes, which are known once the model is there; accelerate's agree.

    Raises:
        UserError: ZeRO stage 3 with frozen weights.
    """
    plugin, arithmetic = run.accelerator.state.deepspeed_plugin, arithmetic_of(run.config, run.launch.dp_size)
    assert plugin is not None
    plugin.deepspeed_config.update(
        train_micro_batch_size_per_gpu=arithmetic.micro_batch_size,
        gradient_accumulation_steps=arithmetic.accumulation_steps,
    )
    run.accelerator.gradient_accumulation_steps = arithmetic.accumulation_steps
    # DeepSpeed allocates the whole buffer, and by default for 500 million gradients, however small the model is.
    bucket = min(MAX_REDUCE_BUCKET_ELEMENTS, sum(p.numel() for p in model.parameters()))
    plugin.deepspeed_config["zero_optimization"].setdefault("reduce_bucket_size", bucket)
    if plugin.zero_stage == 3 and not all(p.requires_grad for p in model.parameters()):
        raise UserError("zero_stage: 3 with frozen weights: checkpoints would miss them. Use zero_stage: 2.")
