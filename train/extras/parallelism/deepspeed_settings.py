"""DeepSpeed's own configuration, made from the launcher's and the training configuration, which must agree.

DeepSpeed wants to know things that the training configuration also says: accumulation, clipping, batch size,
precision, optimizer. They come from the training configuration, and a launch file or a DeepSpeed JSON that says
otherwise stops the run. Settings of DeepSpeed alone (stage, offload, buckets, overlap) come from those files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from train.config import Config
from train.launch import Launch, refuse
from train.records import UsageError

LAUNCH_FILE = "the launch file"
_TAKEN = {  # unchanged from a DeepSpeed JSON
    "zero_optimization",
    "communication_data_type",
    "data_types",
    "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer",
    "steps_per_print",
    "wall_clock_breakdown",
    "memory_breakdown",
    "comms_logger",
    "flops_profiler",
}
_UNTRIED = ("zero_quantized", "zero_hpz", "mics_", "zenflow", "super_offload")
"""Kinds of ZeRO that round gradients, or hold them where checkpoints of this template do not look for them."""

_CLIPPING = "it clips by the 2-norm alone (max_grad_norm)"
MAX_REDUCE_BUCKET_ELEMENTS = 50_000_000
"""Gradients that are summed over the ranks at once: 100 or 200 MB, which keeps a network busy."""


def engine_settings(
    config: Config, launch: Launch, accumulation_steps: int, environment: Mapping[str, str]
) -> dict[str, Any]:
    """The configuration of ``deepspeed.initialize``, except for the batch size, which may not be known yet.

    Args:
        accumulation_steps: with ``micro_batch_size: auto`` it is not known, and no number elsewhere agrees with it.
        environment: where ``accelerate launch`` leaves the contents of its file.

    Raises:
        UsageError: two places contradict each other, or something was asked for that does not work with DeepSpeed.
    """
    path, optim = environment.get("ACCELERATE_DEEPSPEED_CONFIG_FILE"), config.optimization
    settings, where = (_read(Path(path)), path) if path else ({}, LAUNCH_FILE)
    half, micro = optim.mixed_precision or launch.precision, optim.micro_batch_size
    ours = {  # by DeepSpeed's name: ours, and the value
        "gradient_accumulation_steps": (
            "gradient_accumulation_steps",
            "auto" if micro == "auto" else accumulation_steps,
        ),
        "gradient_clipping": ("max_grad_norm", optim.max_grad_norm or 0.0),
        "train_micro_batch_size_per_gpu": ("micro_batch_size", micro),
        "train_batch_size": (
            "global_batch_size",
            "auto" if micro == "auto" else micro * accumulation_steps * launch.dp_size,
        ),
    }
    if unknown := sorted(settings.keys() - _TAKEN - ours.keys() - {"bf16", "fp16"}):
        raise UsageError(
            f"{unknown[0]} in {where}: this template sets that itself or has not tried it. Leave it out: optimizer and "
            f"schedule belong in the training configuration; a DeepSpeed file may set {', '.join(sorted(_TAKEN))}."
        )
    _compare(ours, {name: environment.get(f"ACCELERATE_{name.upper()}") for name in list(ours)[:2]}, LAUNCH_FILE)
    _compare(ours, settings, where)
    for name in ("bf16", "fp16"):
        enabled = (settings.get(name) or {}).get("enabled")
        if enabled not in (None, "auto") and bool(enabled) != (half == name):
            raise _disagreement(f"{name}.enabled", str(enabled).lower(), where, "mixed_precision", half)
    zero = _zero(environment, settings.get("zero_optimization") or {}, where)
    _refuse(config, zero["stage"])
    _refuse_sequences(config, launch, environment, zero, where)
    exact = {} if half == "no" else {"communication_data_type": "fp32", "data_types": {"grad_accum_dtype": "fp32"}}
    return {
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,  # torch's fused AdamW runs on CPUs as well, and needs no compiler
        **exact,
        **{name: value for name, value in settings.items() if name in _TAKEN},
        "zero_optimization": zero,
        "gradient_clipping": optim.max_grad_norm or 0.0,
    }


def _read(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(f"deepspeed_config_file: {path} cannot be read: {error}") from None


def _compare(ours: Mapping[str, tuple[str, Any]], given: Mapping[str, Any], where: str) -> None:
    """Stops where the training configuration says one thing, and the launch file or DeepSpeed JSON another."""
    for name, (key, value) in ours.items():
        theirs = given.get(name)
        if theirs in (None, "auto"):
            continue
        try:
            same = float(theirs) == float(value)  # "auto" of ours is not a number: nothing agrees with it
        except (TypeError, ValueError):
            same = False
        if not same:
            raise _disagreement(name, theirs, where, key, value)


def _disagreement(name: str, given: Any, where: str, ours: str, value: Any) -> UsageError:
    return UsageError(
        f"{name}: {given} in {where}, {ours}: {value} in the training configuration. Make them agree, or leave "
        f"{name} out of {where}."
    )


def _zero(environment: Mapping[str, str], from_file: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The section ``zero_optimization``: a DeepSpeed file's, completed by the launch file's fields."""
    zero = {name: value for name, value in from_file.items() if value != "auto"}
    stage = environment.get("ACCELERATE_DEEPSPEED_ZERO_STAGE")
    if stage is not None and zero.setdefault("stage", int(stage)) != int(stage):
        raise UsageError(f"zero_stage: {stage} in {LAUNCH_FILE}, zero_optimization.stage: {zero['stage']} in {where}.")
    if zero.setdefault("stage", 2) not in (2, 3):
        raise UsageError(
            f"zero_stage: {zero['stage']} in {where}: use 2 or 3, or accelerate_configs/ddp.yaml for no sharding."
        )
    for part in ("offload_optimizer", "offload_param"):
        device = environment.get(f"ACCELERATE_DEEPSPEED_{part.upper()}_DEVICE")
        section = dict(zero.get(part) or {})
        if device is not None and section.setdefault("device", device) != device:
            raise UsageError(f"{part}_device: {device} in {LAUNCH_FILE}, {section['device']} in {where}.")
        zero[part] = {"device": "none", **section}
        if zero[part]["device"] not in ("none", "cpu"):
            raise UsageError(
                f"{part}_device: {zero[part]['device']} in {where}: checkpoints work with none and cpu alone."
            )
    if zero["offload_param"]["device"] != "none" and zero["stage"] != 3:
        raise UsageError(f"offload_param_device: cpu in {where}: only stage 3 shards parameters; set zero_stage: 3.")
    if environment.get("ACCELERATE_DEEPSPEED_ZERO3_INIT", "false").lower() == "true":
        raise UsageError(
            "zero3_init_flag: true in the launch file would draw other initial weights than one process does. Set it "
            "to false: each process then builds the model in host memory and keeps its part."
        )
    if untried := [name for name in zero if name.startswith(_UNTRIED) and zero[name] not in (False, None, 1)]:
        raise UsageError(f"zero_optimization.{untried[0]} in {where}: not tried with this template. Leave it out.")
    return zero


def _refuse(config: Config, stage: int) -> None:
    """Stops for what DeepSpeed would do otherwise than the training configuration says."""
    optim, dtype = config.optimization, config.architecture.dtype
    norm_type = optim.grad_norm_type if optim.max_grad_norm is not None else "2"
    refuse(
        f"DeepSpeed's ZeRO stage {stage}",
        (
            "optimizer: adafactor",
            optim.optimizer == "adafactor",
            "it factors matrices, and DeepSpeed hands it flat pieces of them. Use adamw or sgd, or "
            "accelerate_configs/fsdp2.yaml",
        ),
        (f"max_grad_value: {optim.max_grad_value}", optim.max_grad_value is not None, _CLIPPING),
        (f"grad_norm_type: {norm_type}", norm_type != "2", _CLIPPING),
        (
            f"dtype: {dtype}",
            dtype != "float32",
            "it keeps fp32 weights, and computes in half precision if --mixed_precision bf16 says so. Leave dtype out",
        ),
    )


def _refuse_sequences(
    config: Config, launch: Launch, environment: Mapping[str, str], zero: Mapping[str, Any], where: str
) -> None:
    """Stops where Ulysses would use another attention, or scale gradients in another way, than expected."""
    if launch.sp_size == 1:
        return
    given, ours = environment.get("PARALLELISM_CONFIG_SP_ATTN_IMPLEMENTATION"), config.architecture.attn_implementation
    if given not in (None, "None") and ours is not None and given != ours:
        raise _disagreement(
            "parallelism_config_sp_attn_implementation", given, LAUNCH_FILE, "attn_implementation", ours
        )
    if zero["stage"] == 3 and zero.get("reduce_scatter") is False:
        raise UsageError(
            f"zero_optimization.reduce_scatter: false in {where}: with sequence parallelism, stage 3 then scales "
            "gradients in a way that this template does not undo. Leave it out."
        )
