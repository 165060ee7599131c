"""DeepSpeed behind the optimizer step: ZeRO stages 2 and 3 (arXiv 1910.02054) shard weights and optimizer state.

Its backward also sums gradients over the ranks, and one call finds their norm, clips, updates and shares new weights.

DeepSpeed wants to know things that the training configuration also says: accumulation, clipping, batch size,
precision, optimizer. They come from the training configuration, and a launch file or a DeepSpeed JSON that says
otherwise stops the run. Settings of DeepSpeed alone (stage, offload, buckets, overlap) come from those files.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DeepSpeedPlugin
from torch import Tensor, nn

from train.batching import arithmetic_of
from train.config import Config
from train.extras import refuse
from train.launch import Launch
from train.model import ModelWithLoss
from train.records import Run, UsageError, UserError
from train.step import Engine

LAUNCH_FILE = "the launch file"
# Unchanged from a DeepSpeed JSON: how it divides, in which types it sums, what it prints
_TAKEN = {"zero_optimization", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer"}
_TAKEN |= {"communication_data_type", "data_types"}
_TAKEN |= {"steps_per_print", "wall_clock_breakdown", "memory_breakdown", "comms_logger", "flops_profiler"}
# Kinds of ZeRO that round gradients, or hold them where checkpoints of this template do not look for them
_UNTRIED = ("zero_quantized", "zero_hpz", "mics_", "zenflow", "super_offload")
MAX_REDUCE_BUCKET_ELEMENTS = 50_000_000  # summed over the ranks at once: 100 or 200 MB, which keeps a network busy


class DeepSpeed(Engine):
    """Gradients, clipping and update by the DeepSpeed engine that accelerate has prepared."""

    @staticmethod
    def prepare(run: Run, model: ModelWithLoss) -> None:
        """Tells DeepSpeed the batch and bucket sizes, which are known once the model is there; accelerate's agree."""
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

    @property
    def engine(self) -> Any:
        return self.accelerator.deepspeed_engine_wrapped.engine  # pyright: ignore[reportOptionalMemberAccess]

    @property
    def loss_factor(self) -> float:
        """DeepSpeed 0.19 divides the sum of gradients by the ranks; by the accumulation only if asked to."""
        return self.accelerator.num_processes

    def backward(self, loss: Tensor, scale: float | Tensor) -> None:
        # Not accelerator.backward, which also updates the weights, before an empty global batch is noticed.
        self.engine.set_gradient_accumulation_boundary(self.accelerator.sync_gradients)
        self.engine.backward(loss * scale, scale_wrt_gas=False)

    def clip(self, model: nn.Module) -> float:
        """Nothing: the norm is found, and clipped, by :meth:`update`."""
        return 0.0

    def update(self, optimizer: AcceleratedOptimizer, norm: float) -> tuple[float, bool]:
        """Clips and steps unless the norm is not finite; raises UserError where fp16 overflows at every loss scale."""
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
    """What the Accelerator needs to set up DeepSpeed; raises UserError if it is missing or asked for in two ways."""
    settings = engine_settings(config, launch)
    if importlib.util.find_spec("deepspeed") is None:
        raise UserError("the launch file asks for DeepSpeed, which is not installed: pip install -e '.[deepspeed]'")
    if torch.distributed.is_initialized():  # by torch: DeepSpeed has to be told
        import deepspeed  # pyright: ignore[reportMissingImports]

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would compile C++ for minutes first
        deepspeed.init_distributed(torch.distributed.get_backend(), auto_mpi_discovery=False, verbose=False)
    # Compared above. With these accelerate would refuse a file and fields together, and read "auto" as a number.
    for name in ("ACCELERATE_CONFIG_DS_FIELDS", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"):
        os.environ.pop(name, None)
    sizes = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}  # until DeepSpeed.prepare
    return DeepSpeedPlugin(hf_ds_config={**settings, **sizes}, zero3_init_flag=False)


def engine_settings(config: Config, launch: Launch) -> dict[str, Any]:
    """The configuration of ``deepspeed.initialize``, except for the batch size, which may not be known yet.

    Of ``micro_batch_size: auto`` no accumulation is known, and no number elsewhere agrees with it. The environment is
    where ``accelerate launch`` leaves the contents of its file. Raises UsageError where two places contradict each
    other, or something was asked for that does not work with DeepSpeed.
    """
    path, optim = os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE"), config.optimization
    try:
        settings = dict(json.loads(Path(path).read_text(encoding="utf-8"))) if path else {}
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(f"deepspeed_config_file: {path} cannot be read: {error}") from None
    where = path or LAUNCH_FILE
    half, clipping = optim.mixed_precision or launch.precision, optim.max_grad_norm or 0.0
    sizes, auto = arithmetic_of(config, launch.dp_size), "auto" if optim.micro_batch_size == "auto" else None
    ours = {  # by DeepSpeed's name: ours, and the value
        "gradient_accumulation_steps": ("gradient_accumulation_steps", auto or sizes.accumulation_steps),
        "gradient_clipping": ("max_grad_norm", clipping),
        "train_micro_batch_size_per_gpu": ("micro_batch_size", auto or sizes.micro_batch_size),
        "train_batch_size": ("global_batch_size", auto or sizes.global_batch_size),
    }
    if unknown := sorted(settings.keys() - _TAKEN - ours.keys() - {"bf16", "fp16"}):
        raise UsageError(
            f"{unknown[0]} in {where}: this template sets that itself or has not tried it. Leave it out: optimizer and "
            f"schedule belong in the training configuration; a DeepSpeed file may set {', '.join(sorted(_TAKEN))}."
        )
    for name, (key, value) in ours.items():
        _compare(name, os.environ.get(f"ACCELERATE_{name.upper()}"), LAUNCH_FILE, key, value)
        _compare(name, settings.get(name), where, key, value)
    for name in ("bf16", "fp16"):
        enabled = (settings.get(name) or {}).get("enabled")
        if enabled not in (None, "auto") and bool(enabled) != (half == name):
            raise _disagreement(f"{name}.enabled", str(enabled).lower(), where, "mixed_precision", half)
    zero = _zero(settings.get("zero_optimization") or {}, where)
    _refuse(config, zero["stage"])
    if launch.sp_size > 1:
        _refuse_sequences(config, zero, where)
    exact = {} if half == "no" else {"communication_data_type": "fp32", "data_types": {"grad_accum_dtype": "fp32"}}
    return {
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,  # torch's fused AdamW runs on CPUs as well, and needs no compiler
        **exact,
        **{name: value for name, value in settings.items() if name in _TAKEN},
        "zero_optimization": zero,
        "gradient_clipping": clipping,
    }


def _compare(name: str, given: Any, where: str, ours: str, value: Any) -> None:
    """Stops where the training configuration says one thing, and the launch file or DeepSpeed JSON another."""
    try:
        same = given in (None, "auto") or float(given) == float(value)
    except (TypeError, ValueError):  # "auto" of ours is not a number: nothing agrees with it
        same = False
    if not same:
        raise _disagreement(name, given, where, ours, value)


def _disagreement(name: str, given: Any, where: str, ours: str, value: Any) -> UsageError:
    return UsageError(
        f"{name}: {given} in {where}, {ours}: {value} in the training configuration. Make them agree, or leave "
        f"{name} out of {where}."
    )


def _zero(from_file: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The section ``zero_optimization``: a DeepSpeed file's, completed by the launch file's fields."""
    zero = {name: value for name, value in from_file.items() if value != "auto"}
    stage = os.environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE")
    if stage is not None and zero.setdefault("stage", int(stage)) != int(stage):
        raise UsageError(f"zero_stage: {stage} in {LAUNCH_FILE}, zero_optimization.stage: {zero['stage']} in {where}.")
    if zero.setdefault("stage", 2) not in (2, 3):
        raise UsageError(f"zero_stage: {zero['stage']} in {where}: use 2 or 3, or ddp.yaml for no sharding.")
    for part in ("offload_optimizer", "offload_param"):
        device = os.environ.get(f"ACCELERATE_DEEPSPEED_{part.upper()}_DEVICE")
        zero[part] = {"device": device or "none", **(zero.get(part) or {})}
        found = zero[part]["device"]
        if device not in (None, found):
            raise UsageError(f"{part}_device: {device} in {LAUNCH_FILE}, {found} in {where}.")
        if found not in ("none", "cpu"):
            raise UsageError(f"{part}_device: {found} in {where}: checkpoints work with none and cpu alone.")
    if zero["offload_param"]["device"] == "cpu" and zero["stage"] == 2:
        raise UsageError(f"offload_param_device: cpu in {where}: only stage 3 shards parameters; set zero_stage: 3.")
    if os.environ.get("ACCELERATE_DEEPSPEED_ZERO3_INIT", "false").lower() == "true":
        raise UsageError(
            f"zero3_init_flag: true in {LAUNCH_FILE} would draw other initial weights than one process does. Set it to "
            "false: each process then builds the model in host memory and keeps its part."
        )
    if untried := [name for name in zero if name.startswith(_UNTRIED) and zero[name] not in (False, None, 1)]:
        raise UsageError(f"zero_optimization.{untried[0]} in {where}: not tried with this template. Leave it out.")
    return zero


def _refuse(config: Config, stage: int) -> None:
    """Stops for what DeepSpeed would do otherwise than the training configuration says."""
    optim, dtype = config.optimization, config.architecture.dtype
    norm_type = optim.grad_norm_type if optim.max_grad_norm is not None else "2"
    clipping = "it clips by the 2-norm alone (max_grad_norm)"
    flat = "it factors matrices, and DeepSpeed hands it flat pieces of them. Use adamw or sgd, or fsdp2.yaml"
    keeps = "it keeps fp32 weights, and computes in half precision if --mixed_precision bf16 says so. Leave dtype out"
    refuse(
        f"DeepSpeed's ZeRO stage {stage}",
        ("optimizer: adafactor", optim.optimizer == "adafactor", flat),
        (f"max_grad_value: {optim.max_grad_value}", optim.max_grad_value is not None, clipping),
        (f"grad_norm_type: {norm_type}", norm_type != "2", clipping),
        (f"dtype: {dtype}", dtype != "float32", keeps),
    )


def _refuse_sequences(config: Config, zero: Mapping[str, Any], where: str) -> None:
    """Stops where Ulysses would use another attention, or scale gradients in another way, than expected."""
    name, ours = "parallelism_config_sp_attn_implementation", config.architecture.attn_implementation
    given = os.environ.get(name.upper())
    if given not in (None, "None") and ours not in (None, given):
        raise _disagreement(name, given, LAUNCH_FILE, "attn_implementation", ours)
    if zero["stage"] == 3 and zero.get("reduce_scatter") is False:
        raise UsageError(
            f"zero_optimization.reduce_scatter: false in {where}: with sequence parallelism, stage 3 then scales "
            "gradients in a way that this template does not undo. Leave it out."
        )
