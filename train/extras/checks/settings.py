"""Settings that cannot work together, found before anything is loaded."""

import math
import os
import re
from collections.abc import Mapping
from pathlib import Path

from train.config import Config, fields, to_values
from train.launch import Launch, read_launch
from train.records import UsageError


def check_launch_file(environment: Mapping[str, str] = os.environ) -> None:
    """Raises UsageError for what a launch file asks for and the template cannot do."""
    chosen = {name for name, value in environment.items() if value.lower() == "true"}
    if "ACCELERATE_USE_MEGATRON_LM" in chosen:
        raise UsageError("distributed_type: MEGATRON_LM in the launch file: use one of accelerate_configs/.")
    if "ACCELERATE_USE_FSDP" in chosen and environment.get("FSDP_VERSION", "1") != "2":
        raise UsageError("fsdp_version: 1 in the launch file. Set fsdp_version: 2, as accelerate_configs/ do.")
    if "FSDP_ACTIVATION_CHECKPOINTING" in chosen:
        why = "recomputes with other dropout. Set it to false, and use --gradient_checkpointing"
        raise UsageError(f"fsdp_activation_checkpointing: true in the launch file {why}.")
    names = ("dp_replicate", "dp_shard", "tp", "cp", "sp") if "ACCELERATE_USE_PARALLELISM_CONFIG" in chosen else ()
    sizes = {name: int(environment.get(f"PARALLELISM_CONFIG_{name.upper()}_SIZE", "1")) for name in names}
    launch, given = read_launch(environment), [f"{name}_size {size}" for name, size in sizes.items() if size != 1]
    is_free = launch.engine == "deepspeed" or not given  # the other ranks see other examples
    product = launch.mp_size if is_free else math.prod(sizes.values())
    is_wrong = launch.world_size % (product or 1) if is_free else product != launch.world_size
    shards, copies, known = sizes.get("dp_shard", 1), sizes.get("dp_replicate", 1), ("allgather", "alltoall")
    strategy = environment.get("PARALLELISM_CONFIG_CP_COMM_STRATEGY", "allgather")
    for is_so, why in (
        (min(sizes.values(), default=1) < 1, ": the least is 1"),
        (launch.cp_size > 1 and strategy not in known, f" with cp_comm_strategy {strategy}: give {' or '.join(known)}"),
        (launch.sp_size > 1 and launch.cp_size > 1, " both divide sequences. Give one of them"),
        (launch.engine == "deepspeed" and shards > 1, " contradict DeepSpeed, which shards. Leave dp_shard_size out"),
        (launch.engine == "fsdp2" and copies > 1 and shards == 1, " leave FSDP2 no shards. Set dp_shard_size, too"),
        (is_wrong, f" make {product} processes, num_processes is {launch.world_size}: change one of these"),
    ):
        if is_so:
            raise UsageError(f"parallelism_config in the launch file: {', '.join(given)}{why}.")


def check_settings(config: Config, launch: Launch) -> None:
    """Raises UsageError for values, and combinations of them, that cannot work."""
    for name, value in (values := to_values(config)).items():
        entry = fields()[name][1]
        needed = entry.metadata.get("needs")
        if needed and value != entry.default and values.get(needed) in (None, False, "none"):
            raise UsageError(f"{name} needs {needed}. Give that, too, or leave {name} out.")
        if isinstance(value, str) and not value.strip():  # a variable that was not set
            raise UsageError(f"{name}: it is empty. Leave it out, or give a value.")
        if isinstance(value, str) and entry.metadata.get("is_path"):
            try:
                Path(value).exists()
            except OSError as error:  # a name that is too long, a folder of another user
                raise UsageError(f"{name}: {value}: {error.strerror}. Give another.") from None
        if isinstance(value, int) and value >= 2**63:  # torch and Arrow hold no more
            raise UsageError(f"{name}: {value} is too large: at most {2**63 - 1}.")

    model, optim, folder = config.architecture, config.optimization, config.output.output_dir
    asked = optim.mixed_precision
    if launch.precision not in ("no", "fp16", "bf16"):
        raise UsageError(f"mixed_precision: {launch.precision!r} in the launch file: use fp16, bf16 or no.")
    # The launcher also says "no" when nobody chose, and on a CPU fp16 for whatever that is quick at.
    is_open = launch.precision == "fp16" and os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("true", "1")
    if asked is not None and launch.precision not in ("no", asked) and not is_open:
        both = f"the training configuration says {asked}, the launch configuration {launch.precision}"
        raise UsageError(f"mixed_precision: {both}. Leave it out, or give accelerate launch --mixed_precision {asked}.")
    for name, value in ("dtype", model.dtype), ("attn_implementation", model.attn_implementation):
        if model.is_function and value not in ("float32", None):
            raise UsageError(f"{name}: {value} would not reach a function's model: leave it out, and do that there.")
    if model.dtype == "float16" and config.get("adapter", "none") == "none":  # AdamW's second moment would underflow
        raise UsageError("dtype: float16 is for weights that are not trained: give --mixed_precision fp16 instead.")

    if optim.max_grad_norm is not None and optim.max_grad_value is not None:
        raise UsageError("max_grad_norm and max_grad_value clip the same gradient: set one to null (a flag to None).")
    if optim.micro_batch_size == "auto" and optim.global_batch_size is None:
        raise UsageError("micro_batch_size: auto divides a global batch of known size: give --global_batch_size, too.")
    if optim.max_steps is not None and optim.num_epochs is not None:
        raise UsageError("max_steps and num_epochs both say when to stop: give one of them.")
    if optim.warmup_steps is not None and optim.warmup_ratio > 0:
        raise UsageError("warmup_steps and warmup_ratio both say how long to warm up: give one of them.")

    if model.model is None and model.model_config is None:
        raise UsageError("no model: give --model, model_config, or --config recipes/quickstart.yaml for its small one.")
    if model.model is not None and model.model_config is not None:
        raise UsageError("model and model_config both name a model: give one of them.")
    run = re.sub("/checkpoints(/step-[0-9]+)?$", "", Path(model.model or "").as_posix())
    if model.model is not None and Path(run, "metrics.jsonl").is_file():
        raise UsageError(f"model: {model.model} belongs to a run: give {run}/final (how to make one: docs/launch.md).")
    if model.model_config is not None and not isinstance(model.model_config.get("model_type"), str):
        raise UsageError("model_config: model_type is missing: llama, gpt2, modernbert, bert, qwen3 ...")
    if config.data.tokenizer is None and (model.model is None or model.is_function):
        raise UsageError("tokenizer: the model has none (a recipe's is for its model): give bytes, train:8192, a name.")
    if re.search("[\0\ud800-\udfff]", folder):  # half a surrogate: not UTF-8
        raise UsageError(f"output_dir: {folder!r}: write the path in UTF-8.")
