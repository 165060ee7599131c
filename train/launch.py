"""What the launch file decided (processes, sharding, precision), what accelerate has to know of it, how a run exits."""

from __future__ import annotations

import atexit
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn


@dataclass(frozen=True)
class Launch:
    """The processes of a run and how they share its work; sizes are named as in accelerate's ParallelismConfig."""

    world_size: int = 1
    rank: int = 0
    engine: str = "ddp"  # ddp (also for a single process), fsdp2 or deepspeed
    precision: str = "no"  # the launcher's mixed precision; "no" also where nobody chose
    tp_size: int = 1  # ranks that share the weights of each layer and see the same examples
    cp_size: int = 1  # ranks that share each sequence; for attention each gathers all keys and values
    sp_size: int = 1  # ranks that share each sequence outside attention and the heads inside it (Ulysses)
    offloads: bool = False  # whether FSDP2's shards are in host memory between their uses

    @property
    def mp_size(self) -> int:
        """Ranks that get the same examples and share a model or a sequence; neighbours."""
        return self.tp_size * self.cp_size * self.sp_size

    @property
    def dp_size(self) -> int:
        """Ranks, or groups of them, that see different examples."""
        return self.world_size // self.mp_size

    def __str__(self) -> str:
        parts = [self.engine] if self.world_size > 1 or self.engine != "ddp" else []
        sizes = (("tensor", self.tp_size), ("context", self.cp_size), ("sequence", self.sp_size))
        return ", ".join(parts + [f"{name} parallel {size}" for name, size in sizes if size > 1])


def read_launch(environment: Mapping[str, str] = os.environ) -> Launch:
    """The launch that ``accelerate launch``, torchrun or nobody made."""
    chosen = {name for name, value in environment.items() if value.lower() == "true"}
    engine = "fsdp2" if "ACCELERATE_USE_FSDP" in chosen else "ddp"
    engine = "deepspeed" if "ACCELERATE_USE_DEEPSPEED" in chosen else engine
    names = ("tp", "cp", "sp") if "ACCELERATE_USE_PARALLELISM_CONFIG" in chosen else ()
    return Launch(
        world_size=int(environment.get("WORLD_SIZE") or 1),
        rank=int(environment.get("RANK") or 0),
        engine=engine,
        precision=environment.get("ACCELERATE_MIXED_PRECISION", "no").lower(),
        offloads=engine == "fsdp2" and "FSDP_OFFLOAD_PARAMS" in chosen,
        **{f"{name}_size": int(environment.get(f"PARALLELISM_CONFIG_{name.upper()}_SIZE", "1")) for name in names},
    )


def target_device() -> torch.device:
    """The device that accelerate will choose, known before it exists."""
    import torch

    if os.environ.get("ACCELERATE_USE_CPU", "false").lower() in ("true", "1"):
        return torch.device("cpu")
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def accelerator_options(launch: Launch, device: torch.device, seconds: int = 1800) -> dict[str, Any]:
    """Arguments of ``Accelerator`` that follow from launch and device; ranks wait ``seconds`` for each other."""
    from accelerate.utils import FullyShardedDataParallelPlugin, InitProcessGroupKwargs
    from torch.distributed import distributed_c10d

    # NCCL's watchdog kills without a word: waiting longer lets a rank that knows who is lost say so first.
    timeout = timedelta(seconds=seconds + 60 if device.type == "cuda" else seconds)
    options: dict[str, Any] = {"kwargs_handlers": [InitProcessGroupKwargs(timeout=timeout)]}
    # Groups that a device mesh or DeepSpeed makes have no timeout of their own: NCCL would end them after 10 minutes.
    distributed_c10d.default_pg_nccl_timeout = timeout
    # cpu=True would switch DeepSpeed off; the extra hardware has chosen the CPU
    options["cpu"] = device.type == "cpu" and launch.engine != "deepspeed"
    if launch.engine == "fsdp2":
        import torch
        from torch.distributed.fsdp import MixedPrecisionPolicy

        # Gradients are summed in fp32, and the loss keeps its type: accelerate's own choice is the half precision for
        # both, which loses digits of every gradient. On a CPU there is nowhere to offload to.
        half = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(launch.precision)
        options["fsdp_plugin"] = FullyShardedDataParallelPlugin(
            mixed_precision_policy=MixedPrecisionPolicy(half, torch.float32 if half else None),
            cpu_offload=False if device.type == "cpu" else None,  # type: ignore
        )
        os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"  # or transformers would leave new weights without memory
    return options


def shard_by_layer(accelerator: Any, network: nn.Module) -> None:
    """Has FSDP2 gather one layer of ``network`` at a time, where the launch file names no classes of its own."""
    if not accelerator.is_fsdp2:
        return
    # Gradients kept whole on every rank between micro-batches would undo what sharding saved.
    accelerator.gradient_state.plugin_kwargs["sync_each_batch"] = True
    plugin = accelerator.state.fsdp_plugin
    uses = Counter(id(p) for _, p in network.named_parameters(remove_duplicate=False))  # an embedding and the head
    # accelerate's loading would untie a model that is not of transformers, and takes persistent buffers for parameters.
    if not hasattr(network, "_from_config") or len(network.state_dict()) > uses.total():
        plugin.cpu_ram_efficient_loading = False
    if not plugin.transformer_cls_names_to_wrap:
        found = {type(m).__name__ for m in network.modules() if all(uses[id(p)] == 1 for p in m.parameters())}
        plugin.transformer_cls_names_to_wrap = sorted(found & set(getattr(network, "_no_split_modules", None) or ()))  # type: ignore


def exit_with(main: Callable[[], int]) -> None:
    """Runs ``main`` as a script's own process and ends with the status that it returns."""
    for number, name in (1, "stdout"), (2, "stderr"):  # on Windows a file may lack a character of a model's text
        if getattr(sys, name) is None:  # it is closed
            os.dup2(os.open(os.devnull, os.O_WRONLY), number)
            setattr(sys, name, os.fdopen(number, "w", closefd=False))
        getattr(sys, name).reconfigure(errors="backslashreplace")
    status = main()
    for name in {"SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1"}.intersection(dir(signal)):  # the status is final now
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        # gloo's threads now and then abort the process while the interpreter winds down. Trackers end at exit.
        atexit._run_exitfuncs()
        sys.stdout.flush()
        os._exit(status)
    sys.exit(status)
