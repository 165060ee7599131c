"""Optimizers that need less memory: state on the host, in 8 bits, updates in backward, bf16 rounding, Adafactor."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from typing import Any, Literal

from train import extras
from train.config import Config, option
from train.launch import Launch
from train.records import Run, UsageError


@dataclass(frozen=True)
class Options:
    """Optimizers that need less memory."""

    optimizer_offload: bool = option(False, "Keep, and update, adamw's state and bf16 weights' originals on the host.")
    optimizer_in_backward: bool = option(False, "Update in backward; one process, one micro-batch, no max_grad_norm.")
    bf16_update: Literal["nearest", "stochastic", "kahan"] = option("nearest", "How adamw rounds bf16 weights.")
    sgd_momentum: float = option(0.9, "Momentum of sgd.", ge=0)


class Extra(extras.Extra):
    def check(self, config: Config, launch: Launch) -> None:
        own, optim, dtype = config.of(Options), config.optimization, config.architecture.dtype
        if optim.optimizer == "adamw_8bit" and importlib.util.find_spec("bitsandbytes") is None:
            raise UsageError("optimizer: adamw_8bit needs bitsandbytes: pip install -e '.[bitsandbytes]' adds it.")
        on_cpu = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("true", "1")  # which never computes in fp16
        is_fp16 = (optim.mixed_precision or launch.precision) == "fp16" and not on_cpu
        rounding, rounds = f"bf16_update: {own.bf16_update}", own.bf16_update != "nearest"
        not_adamw = (f"optimizer: {optim.optimizer}", optim.optimizer != "adamw", "use adamw, or leave it out")
        if own.optimizer_offload:
            half = "use bfloat16, or float32 with mixed_precision: fp16"
            extras.refuse("optimizer_offload", not_adamw, ("dtype: float16", dtype == "float16", half))
        if rounds:
            originals = "the host updates fp32 originals already: use nearest"
            not_bf16 = (f"dtype: {dtype}", dtype != "bfloat16", "use bfloat16, or nearest")
            extras.refuse(rounding, not_adamw, not_bf16, ("optimizer_offload", own.optimizer_offload, originals))
        if launch.engine != "ddp" or launch.tp_size > 1:
            early = "the loss scaler would read its scale before it is on the host. Use mixed_precision: bf16 or no"
            whole = "it needs whole weights on every process. Use ddp.yaml, or adamw alone, whose state "
            whole += "fsdp2_offload.yaml and deepspeed_zero3_offload.yaml keep in host memory"
            extras.refuse(
                f"the engine {launch} in the launch file",
                (f"optimizer: {optim.optimizer}", optim.optimizer in ("adamw_8bit", "adafactor"), whole),
                ("optimizer_offload", own.optimizer_offload, whole),
                ("optimizer_in_backward", own.optimizer_in_backward, whole),
                (rounding, rounds, whole),
                ("fsdp_offload_params: true and mixed_precision: fp16", launch.offloads and is_fp16, early),
            )
        if own.optimizer_in_backward:
            norm, steps = optim.max_grad_norm, optim.gradient_accumulation_steps or 1
            is_split = steps > 1 or config.get("max_tokens_per_micro_batch") is not None
            is_split |= optim.global_batch_size not in (None, optim.micro_batch_size)
            one = "gradients cannot be accumulated. Give micro_batch_size and gradient_accumulation_steps: 1"
            late = "the norm of all gradients is known only after the updates"
            null = f"{late}. Give max_grad_norm: null (as a flag: None); max_grad_value may be set"
            summed = "gradients of several ranks are summed only after backward. Use one process, or leave it out"
            extras.refuse(
                "optimizer_in_backward",
                (f"{launch.world_size} processes", launch.world_size > 1, summed),
                ("several micro-batches in a step", is_split, one),
                (f"max_grad_norm: {norm}", norm is not None, null),
                ("mixed_precision: fp16", is_fp16, "its loss scale needs all gradients: use bf16"),
            )

    def build_optimizer(self, config: Config, groups: list[dict[str, Any]], device: extras.torch.device) -> Any:
        from torch.optim import SGD, Adafactor

        from train.extras.optimizers import few_bits, offload
        from train.optim import adam_settings

        own, optim, settings = config.of(Options), config.optimization, adam_settings(config.optimization)
        if optim.optimizer == "adafactor":
            # As in fp32; torch's default for bf16, 2^-7, would leave most weights as they are.
            smallest = 2**-23 if config.architecture.dtype == "bfloat16" else None
            return Adafactor(groups, lr=optim.learning_rate, eps=(smallest, 1e-3))
        if optim.optimizer == "sgd":
            # foreach, a card's default, would hold all gradients a second time where weights decay.
            return SGD(groups, lr=optim.learning_rate, momentum=own.sgd_momentum, foreach=False)
        if optim.optimizer == "adamw_8bit":
            return few_bits.eight_bit_adamw(groups, **settings)
        if own.bf16_update != "nearest":
            return few_bits.Bf16AdamW(groups, own.bf16_update, optim.seed, **settings)
        if own.optimizer_offload and (device.type != "cpu" or config.architecture.dtype == "bfloat16"):  # originals
            return offload.OffloadedAdamW(groups, **settings)
        return None

    def wrap_step(self, run: Run, engine: extras.Engine) -> extras.Engine:
        if not run.config.of(Options).optimizer_in_backward:
            return engine
        from train.extras.optimizers.in_backward import InBackward

        return InBackward(run.accelerator, run.config, engine.mark)
