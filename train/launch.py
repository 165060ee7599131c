"""What the launcher decided, read from its environment before anything is loaded, and whether the recipe agrees.

World size, sharding and precision live in ``accelerate_configs/``; everything else lives in recipes and flags.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from train.config import Config
from train.errors import UsageError, UserError

ENGINES = ("ddp", "fsdp2", "deepspeed")
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Settings of the CUDA allocator; the second is its older name."""


@dataclass(frozen=True)
class Launch:
    """The processes of a run and how they share its work."""

    world_size: int = 1
    rank: int = 0
    local_world_size: int = 1
    engine: str = "ddp"
    """ddp (also for a process that is alone), fsdp2 or deepspeed."""
    precision: str = "no"
    """The launcher's mixed precision; ``no`` also where nobody chose."""
    replicate_size: int = 1
    """Groups of ranks that each hold all weights between them (hybrid sharding)."""
    tensor_size: int = 1
    """Ranks that share the weights of each layer and see the same examples."""
    context_size: int = 1
    """Ranks that share each sequence, keys and values going round (ring attention)."""
    sequence_size: int = 1
    """Ranks that share each sequence outside attention and the heads inside it (Ulysses)."""

    @property
    def copies(self) -> int:
        """Ranks that are handed the same examples."""
        return self.tensor_size * self.context_size * self.sequence_size

    @property
    def weights_are_whole(self) -> bool:
        """Whether every rank holds all weights, and can use the model by itself."""
        return self.engine == "ddp" and self.tensor_size == 1

    @property
    def data_size(self) -> int:
        """Ranks, or groups of them, that see different examples."""
        return self.world_size // self.copies

    @property
    def random_rank(self) -> int:
        """What dropout is drawn by: ranks that compute the same activations have to drop the same of them."""
        return self.rank // self.tensor_size

    @property
    def evaluation_copies(self) -> int:
        """Ranks that are handed the same examples to evaluate: with Ulysses each evaluates whole sequences."""
        return self.tensor_size * self.context_size

    @property
    def data_rank(self) -> int:
        """Which of the ``data_size`` parts of a global batch is this rank's: ranks that share one are neighbours."""
        return self.rank // self.copies

    def __str__(self) -> str:
        parts = [self.engine] if self.world_size > 1 or self.engine != "ddp" else []
        sizes = (("tensor", self.tensor_size), ("context", self.context_size), ("sequence", self.sequence_size))
        return ", ".join(parts + [f"{name} parallel {size}" for name, size in sizes if size > 1])


def read_launch(environment: Mapping[str, str] = os.environ) -> Launch:
    """The launch that ``accelerate launch``, torchrun or nobody made.

    Raises:
        UserError: several processes were started, or meant to be, that do not know each other.
        UsageError: the launch file asks for something that this template does not do.
    """

    def says(name: str, default: str = "false") -> str:
        return environment.get(name, default).lower()

    world_size = int(environment.get("WORLD_SIZE", "1"))
    _refuse_strangers(environment, world_size)
    if says("ACCELERATE_USE_MEGATRON_LM") == "true":
        raise UsageError("distributed_type: MEGATRON_LM in the launch file: use one of accelerate_configs/.")
    engine = "ddp"
    if says("ACCELERATE_USE_DEEPSPEED") == "true":
        engine = "deepspeed"
    elif says("ACCELERATE_USE_FSDP") == "true":
        engine = "fsdp2"
        if says("FSDP_VERSION", "1") != "2":
            raise UsageError("fsdp_version: 1 in the launch file. Set fsdp_version: 2, as accelerate_configs/ do.")
    sizes = {
        name: int(environment.get(f"PARALLELISM_CONFIG_{name.upper()}_SIZE", "1"))
        if says("ACCELERATE_USE_PARALLELISM_CONFIG") == "true"
        else 1
        for name in ("dp_replicate", "dp_shard", "tp", "cp", "sp")
    }
    launch = Launch(
        world_size=world_size,
        rank=int(environment.get("RANK", "0")),
        local_world_size=int(environment.get("LOCAL_WORLD_SIZE", "1")),
        engine=engine,
        precision=says("ACCELERATE_MIXED_PRECISION", "no"),
        replicate_size=sizes["dp_replicate"],
        tensor_size=sizes["tp"],
        context_size=sizes["cp"],
        sequence_size=sizes["sp"],
    )
    product = launch.copies * (1 if engine == "deepspeed" else sizes["dp_replicate"] * sizes["dp_shard"])
    if world_size % launch.copies or (max(sizes.values()) > 1 and engine != "deepspeed" and product != world_size):
        given = ", ".join(f"{name}_size {size}" for name, size in sizes.items() if size > 1)
        raise UsageError(
            f"parallelism_config in the launch file: {given} make {product} processes, num_processes is {world_size}. "
            "Their product must be num_processes: change one of them."
        )
    return launch


def _refuse_strangers(environment: Mapping[str, str], world_size: int) -> None:
    """Stops a process that was meant to be one of several, and is alone or does not know where to meet them."""
    if world_size > 1:
        missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if not environment.get(name)]
        if missing:
            raise UserError(
                f"WORLD_SIZE: {world_size} says that this is one of several processes, and {', '.join(missing)} not "
                "where they meet. Start them with accelerate launch or torchrun, which set these, or unset WORLD_SIZE."
            )
        return
    if "RANK" in environment:
        return
    started = max(int(environment.get(name, "1")) for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"))
    if started > 1:
        raise UserError(
            f"{started} processes were started that do not know each other: they would train the same thing side by "
            "side. Start one launcher per host instead (scripts/slurm.sbatch shows how)."
        )
    # accelerate launch gives the address to meet at, and no rank, where it has to start several and starts one
    if "ACCELERATE_MIXED_PRECISION" in environment and "MASTER_PORT" in environment:
        raise UserError(
            "the launcher was asked for several processes and started one. On CPUs take accelerate_configs/ddp.yaml "
            "(it trains on CPUs where there is no GPU) and leave --cpu out; for one process give --num_processes 1, "
            "and unset MASTER_PORT if it was set by hand."
        )


def let_segments_grow(environment: MutableMapping[str, str] = os.environ) -> None:
    """Has PyTorch's CUDA allocator grow its segments, so that gaps between tensors of different steps can join.

    To be called before torch is imported; a setting that is there already stays. Only Linux has such segments.
    """
    if sys.platform == "linux" and not any(name in environment for name in ALLOCATOR_VARIABLES):
        environment[ALLOCATOR_VARIABLES[0]] = "expandable_segments:True"


def segments_grow(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether the CUDA allocator was told so."""
    return any("expandable_segments:true" in environment.get(name, "").lower() for name in ALLOCATOR_VARIABLES)


def check_launch(launch: Launch, config: Config) -> None:
    """Stops where launcher and training configuration contradict each other.

    Raises:
        UsageError: with both names and values.
    """
    asked = config.optimization.mixed_precision
    if asked is not None and launch.precision not in ("no", asked):  # the launcher also says "no" when nobody chose
        raise UsageError(
            f"mixed_precision: the training configuration says {asked}, the launch configuration {launch.precision}. "
            "Make them agree, or leave mixed_precision out of one."
        )
    precision = asked or launch.precision
    if config.optimization.loss == "liger" and precision == "fp16":
        raise UsageError(
            "loss: liger is wrong with mixed_precision: fp16: it rounds gradients before loss scaling can save small "
            "ones. Give --loss auto or chunked, or use bf16."
        )
    check_optimizer(launch, config)
    if config.optimization.optimizer == "adamw_8bit" and importlib.util.find_spec("bitsandbytes") is None:
        raise UsageError(
            "optimizer: adamw_8bit needs bitsandbytes, which is not installed: pip install -e '.[bitsandbytes]'"
        )
    _check_parallelism(launch, config)
    _check_rows(launch, config)
    if config.architecture.tiled_mlp and (launch.engine == "deepspeed" or launch.tensor_size > 1):
        raise UsageError(
            f"tiled_mlp: true does not go with {launch}: its gradients are made whole in one place, where DeepSpeed "
            "and tensor parallelism have weights in parts. Use FSDP2 or DDP, or leave tiled_mlp out."
        )
    _check_adapter(launch, config.architecture.adapter)
    if config.architecture.compile and (launch.engine == "deepspeed" or launch.copies > 1):
        raise UsageError(
            f"compile: true does not go with {launch} in the launch file: nobody has tried. Use ddp.yaml or fsdp2.yaml "
            "of accelerate_configs/, or leave compile out."
        )
    if os.environ.get("FSDP_ACTIVATION_CHECKPOINTING", "false").lower() == "true":
        raise UsageError(
            "fsdp_activation_checkpointing: true in the launch file, gradient_checkpointing: "
            f"{config.architecture.gradient_checkpointing} in the training configuration. Give fsdp_activation_"
            "checkpointing: false and choose by --gradient_checkpointing: the launcher's own kind does not repeat "
            "dropout, so its gradients would be wrong."
        )


def check_optimizer(launch: Launch, config: Config) -> None:
    """Stops where the optimizer needs more of the weights or gradients than a process holds.

    Raises:
        UsageError: with both names and values.
    """
    optim = config.optimization
    options = {
        "optimizer: adamw_8bit": optim.optimizer == "adamw_8bit",
        "optimizer: adafactor": optim.optimizer == "adafactor" and launch.engine == "fsdp2",
        "optimizer_offload: true": optim.optimizer_offload,
        "optimizer_in_backward: true": optim.optimizer_in_backward,
        f"bf16_update: {optim.bf16_update}": optim.bf16_update != "nearest",
    }
    remedies = {
        "fsdp2": "fsdp2_offload.yaml keeps the state of sharded weights in host memory",
        "deepspeed": "deepspeed_zero3_offload.yaml keeps the state of sharded weights in host memory",
        "ddp": "use ddp.yaml or one process",
    }
    for option, is_set in options.items():
        if is_set and not launch.weights_are_whole:
            how = f"the engine {launch.engine}" if launch.engine != "ddp" else f"tensor parallel {launch.tensor_size}"
            raise UsageError(
                f"{option} needs whole weights on every process, and does not go with {how} in the launch file: "
                f"{remedies[launch.engine]}; or take optimizer: adamw alone."
            )
    if not optim.optimizer_in_backward:
        return
    if launch.world_size > 1:
        raise UsageError(
            f"optimizer_in_backward: true does not go with {launch.world_size} processes: their gradients are summed "
            "only after backward. Use one process, or leave it out."
        )
    if launch.precision == "fp16" and optim.mixed_precision is None:
        raise UsageError(
            "optimizer_in_backward: true does not go with mixed_precision: fp16 in the launch file: its loss scale "
            "needs all gradients. Use bf16."
        )


def _check_parallelism(launch: Launch, config: Config) -> None:
    """Stops where tensor or context parallelism cannot do what the training configuration asks for."""
    optim, attention = config.optimization, config.architecture.attn_implementation
    precision = optim.mixed_precision or launch.precision
    alone = launch.engine == "ddp" and launch.world_size == launch.tensor_size
    auto = ("micro_batch_size: auto", optim.micro_batch_size == "auto", "give a number: a part is not predicted")
    if launch.tensor_size > 1:
        _refuse(
            f"parallelism_config_tp_size: {launch.tensor_size}",
            (
                "sharding or data parallelism beside it",
                not alone,
                f"set num_processes: {launch.tensor_size} and leave fsdp_config and other sizes out, as "
                "accelerate_configs/tensor_parallel.yaml does",
            ),
            ("mixed_precision: fp16", precision == "fp16", "use bf16: each rank would scale its loss by itself"),
            ("optimizer: adafactor", optim.optimizer == "adafactor", "use adamw or sgd: it needs whole weights"),
            ("max_grad_value", optim.max_grad_value is not None, "use max_grad_norm"),
            (f"loss: {optim.loss}", optim.loss in ("torch", "cce", "liger"), "use auto or chunked: it divides classes"),
            auto,
        )
    if launch.context_size > 1:
        _refuse(
            f"parallelism_config_cp_size: {launch.context_size}",
            (
                f"the engine {launch.engine}",
                launch.engine != "fsdp2",
                "use FSDP with fsdp_version: 2, as accelerate_configs/fsdp2_context_parallel.yaml does",
            ),
            (f"task: {config.data.task}", config.data.task != "causal_lm", "use causal_lm, or fsdp2.yaml"),
            (f"attn_implementation: {attention}", attention not in (None, "sdpa"), "use sdpa, or leave it out"),
            auto,
        )
    if launch.sequence_size > 1:
        _refuse(
            f"parallelism_config_sp_size: {launch.sequence_size}",
            (
                f"the engine {launch.engine}",
                launch.engine != "deepspeed",
                "use DeepSpeed, as accelerate_configs/ulysses_sequence_parallel.yaml does",
            ),
            (f"task: {config.data.task}", config.data.task != "causal_lm", "use causal_lm, or deepspeed_zero2.yaml"),
            (
                f"max_tokens_per_micro_batch: {optim.max_tokens_per_micro_batch}",
                optim.max_tokens_per_micro_batch is not None,
                "give micro_batch_size: what is exchanged has a fixed number of rows",
            ),
            auto,
        )


def _check_rows(launch: Launch, config: Config) -> None:
    """Stops where rows of several documents, or of another length than max_length, would be divided among ranks."""
    optim = config.optimization
    divided = (
        ("cp", launch.context_size, "fsdp2"),
        ("sp", launch.sequence_size, "deepspeed_zero2"),
        ("tp", launch.tensor_size, "ddp"),
    )
    for name, size, other in divided:
        warmup = f"sequence_length_warmup_steps: {optim.sequence_length_warmup_steps}"
        instead = f"or take accelerate_configs/{other}.yaml"
        cuts = optim.sequence_length_warmup_steps > 0 and name != "tp"
        _refuse(
            f"parallelism_config_{name}_size: {size}",
            ("packing", size > 1 and config.data.packing, f"leave packing out, {instead}"),
            (warmup, size > 1 and cuts, f"set it to 0, {instead}"),
        )


def _check_adapter(launch: Launch, adapter: str) -> None:
    """Stops where frozen weights cannot be shared out as launched: it does not work, or nobody has tried."""
    engines = {"lora": ("ddp", "fsdp2"), "qlora": ("ddp",)}.get(adapter, ENGINES)
    if launch.engine not in engines or (adapter != "none" and launch.copies > 1):
        files = " or ".join(f"accelerate_configs/{engine}.yaml" for engine in engines)
        raise UsageError(
            f"adapter: {adapter} does not go with {launch} in the launch file: use {files}, or adapter: none."
        )


def _refuse(size: str, *cases: tuple[str, bool, str]) -> None:
    """Raises UsageError for the first case (what, whether it is so, remedy) that is so."""
    for what, is_so, remedy in cases:
        if is_so:
            raise UsageError(f"{what} does not go with {size} in the launch file: {remedy}.")
