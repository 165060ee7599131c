"""Optimizers that need less memory: state on the host, in 8 bits, updates in backward, careful bf16 rounding."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from train.config import option
from train.extras import Extra
from train.launch import refuse
from train.records import UsageError

if TYPE_CHECKING:
    import torch

    from train.config import Config
    from train.launch import Launch
    from train.records import Run
    from train.step import Engine


@dataclass(frozen=True)
class Options:
    """Optimizers that need less memory."""

    optimizer_offload: bool = option(
        False, "Keep adamw's state, and fp32 originals of bf16 weights, in host memory and update there."
    )
    optimizer_in_backward: bool = option(
        False, "Update each weight as soon as its gradient is there; one process, one micro-batch, no max_grad_norm."
    )
    bf16_update: Literal["nearest", "stochastic", "kahan"] = option(
        "nearest", "How adamw rounds bf16 weights; kahan keeps the error in 2 more bytes per weight."
    )


class Room(Extra):
    Options = Options

    @classmethod
    def check(cls, config: Config, launch: Launch) -> None:
        own, optim, dtype = config.of(Options), config.optimization, config.architecture.dtype
        if own.optimizer_offload and dtype == "float16":
            raise UsageError(
                "optimizer_offload with dtype: float16: use bfloat16, or float32 with mixed_precision: fp16."
            )
        asked = f"bf16_update: {own.bf16_update}"
        for option_, is_set in (("optimizer_offload", own.optimizer_offload), (asked, own.bf16_update != "nearest")):
            if is_set and optim.optimizer != "adamw":
                raise UsageError(f"{option_} works with optimizer: adamw, not with {optim.optimizer}: leave one out.")
        if own.bf16_update != "nearest" and dtype != "bfloat16":
            raise UsageError(f"{asked} is for weights of dtype: bfloat16, these are {dtype}: use nearest.")
        if own.bf16_update != "nearest" and own.optimizer_offload:
            raise UsageError(f"{asked} with optimizer_offload: the host updates fp32 originals already: use nearest.")
        if optim.optimizer == "adamw_8bit" and importlib.util.find_spec("bitsandbytes") is None:
            raise UsageError(
                "optimizer: adamw_8bit needs bitsandbytes, which is not installed: pip install -e '.[bitsandbytes]'"
            )
        cls.check_launch(config, launch)
        if own.optimizer_in_backward:
            _check_in_backward(config, launch)

    @classmethod
    def check_launch(cls, config: Config, launch: Launch) -> None:
        """Raises UsageError where the optimizer needs more of the weights than a process holds."""
        own, optim = config.of(Options), config.optimization
        remedies = {
            "fsdp2": "fsdp2_offload.yaml keeps the state of sharded weights in host memory",
            "deepspeed": "deepspeed_zero3_offload.yaml keeps the state of sharded weights in host memory",
            "ddp": "Use ddp.yaml or one process",
        }
        how = f"the engine {launch.engine}" if launch.engine != "ddp" else f"tensor parallel {launch.tp_size}"
        remedy = f"it needs whole weights on every process. {remedies[launch.engine]}; or use optimizer: adamw alone"
        if not launch.has_whole_weights:
            refuse(
                f"{how} in the launch file",
                ("optimizer: adamw_8bit", optim.optimizer == "adamw_8bit", remedy),
                ("optimizer_offload: true", own.optimizer_offload, remedy),
                ("optimizer_in_backward: true", own.optimizer_in_backward, remedy),
                (f"bf16_update: {own.bf16_update}", own.bf16_update != "nearest", remedy),
            )

    def build_optimizer(self, config: Config, groups: list[dict[str, Any]], device: torch.device) -> Any:
        from train.optim import adam_settings

        own, settings = config.of(Options), adam_settings(config.optimization)
        if config.optimization.optimizer == "adamw_8bit":
            from train.extras.optimizers.eight_bit import eight_bit_adamw

            return eight_bit_adamw(groups, **settings)
        if own.bf16_update != "nearest":
            from train.extras.optimizers.bf16 import Bf16AdamW

            return Bf16AdamW(groups, own.bf16_update, config.optimization.seed, **settings)
        if own.optimizer_offload and device.type != "cpu":
            from train.extras.optimizers.offload import OffloadedAdamW

            return OffloadedAdamW(groups, **settings)
        return None

    def wrap_step(self, run: Run, engine: Engine) -> Engine:
        own = run.config.of(Options)
        if own.optimizer_offload and run.accelerator.device.type == "cpu":
            run.outputs.note("optimizer_offload: on a CPU the optimizer's state is in host memory already")
        if not own.optimizer_in_backward:
            return engine
        from train.extras.optimizers.in_backward import InBackward

        return InBackward(run.accelerator, run.config, engine.mark)


def _check_in_backward(config: Config, launch: Launch) -> None:
    optim, size = config.optimization, config.optimization.micro_batch_size
    one_pass = "gradients cannot be accumulated"
    refuse(
        "optimizer_in_backward",
        (
            f"gradient_accumulation_steps: {optim.gradient_accumulation_steps}",
            (optim.gradient_accumulation_steps or 1) > 1,
            f"{one_pass}: give 1",
        ),
        (
            "max_tokens_per_micro_batch",
            config.get("max_tokens_per_micro_batch") is not None,
            f"a step may have several micro-batches, and {one_pass}. Give micro_batch_size and "
            "gradient_accumulation_steps: 1 instead",
        ),
        (
            f"micro_batch_size: {size} with global_batch_size: {optim.global_batch_size}",
            optim.global_batch_size not in (None, size),
            f"{one_pass}. Give the same size, or gradient_accumulation_steps: 1 instead of the global one",
        ),
        (
            f"max_grad_norm: {optim.max_grad_norm}",
            optim.max_grad_norm is not None,
            "the norm of all gradients is known only after the updates. Give max_grad_norm: null (None on the command "
            "line); max_grad_value may be set",
        ),
        (
            "mixed_precision: fp16",
            (optim.mixed_precision or launch.precision) == "fp16",
            "its loss scale needs all gradients: use bf16",
        ),
        (
            f"on_oom: {config.get('on_oom')}",
            config.get("on_oom") in ("split", "adapt"),
            "a step whose weights are partly updated cannot be repeated. Give on_oom: stop, or leave it at auto",
        ),
        (
            f"{launch.world_size} processes",
            launch.world_size > 1,
            "gradients of several ranks are summed only after backward. Use one process, or leave it out",
        ),
    )
