"""The most of the device at hand: which precision it computes in, threads and memory of the host, ranks on CPUs.

Without this extra accelerate's own choices apply: no mixed precision where nobody asked for one, fp32 called fp16 on a
CPU, one thread next to several processes, and no run of several processes without a GPU.
"""

from __future__ import annotations

import ctypes
import os
import platform
from dataclasses import dataclass, replace
from datetime import timedelta

from train import extras
from train.config import Config, option
from train.extras.device import device_name, precision_in_use
from train.figures import several
from train.launch import Launch, target_device
from train.records import Run, UsageError, num_cores

NO_BF16_WEIGHTS = "has no bf16. Use float32 with mixed_precision: fp16; float16 for weights that are not trained"


@dataclass(frozen=True)
class Options:
    """What the device is used for."""

    tf32: bool = option(True, "Multiply fp32 matrices in TF32 on CUDA since Ampere: 10 bits of mantissa, much faster.")
    cpu_threads: int | None = option(None, "Threads of a process on the host; default: its share of the cores.", ge=1)


class Extra(extras.Extra):
    _precision_line: str | None = None

    def change_launch(self, config: Config, launch: Launch) -> Launch:
        """``launch`` with the precision that will be used; the device is set up, and CPU processes are connected."""
        device = target_device()
        launch, self._precision_line = settle_precision(launch, config, device)
        set_up_device(device, launch, config)
        return launch

    def started(self, run: Run) -> None:
        import torch

        accelerator = run.accelerator
        device, arithmetic = accelerator.device, precision_in_use(accelerator, run.config.architecture.dtype)
        parts = [f"{accelerator.num_processes} × {device_name(device)}"]
        parts += [f"{several(torch.get_num_threads(), 'thread')} each"] if device.type == "cpu" else []
        parts += [str(run.launch), os.environ.get("PYTORCH_ALLOC_CONF", "") if device.type == "cuda" else ""]
        shown = {"no": "fp32", "tf32": "fp32 (products in TF32)"}.get(arithmetic, arithmetic)
        run.outputs.note(f"device: {', '.join(filter(None, parts))}, precision {shown}", self._precision_line)


def settle_precision(launch: Launch, config: Config, device: extras.torch.device) -> tuple[Launch, str | None]:
    """``launch`` with the mixed precision to use, and a line for a person if it is not one that was asked for.

    ``accelerate launch`` says "no" where nobody chose, so its "no" is not a choice. DeepSpeed has settings of its own.
    """
    asked = config.optimization.mixed_precision
    if config.architecture.dtype == "bfloat16" and device.type == "cuda" and not has_bf16(device):
        raise UsageError(f"dtype: {device_name(device)} {NO_BF16_WEIGHTS}.")
    is_open = asked is None and launch.precision == "no" and config.architecture.dtype == "float32"
    if is_open and device.type == "cuda" and launch.engine != "deepspeed":
        precision, line = automatic_precision(launch, config, has_bf16(device))
    else:
        precision, line = resolve_precision(asked or launch.precision, device)
    return replace(launch, precision=precision), line


def automatic_precision(launch: Launch, config: Config, has_bf16: bool) -> tuple[str, str]:
    """What a card computes fp32 weights in where nobody asked: bf16; without it fp16, if the rest works with that."""
    half = "bf16" if has_bf16 else "fp16"
    try:
        extras.check(config, replace(launch, precision=half))
    except UsageError as error:
        return "no", f"precision: fp32 (this card would take {half}, but {error})"
    return half, f"precision: {half}, because none was asked for (--mixed_precision no after train/main.py: fp32)"


def resolve_precision(asked: str, device: extras.torch.device) -> tuple[str, str | None]:
    """The mixed precision to use, and a line for a person if it is not the one asked for.

    accelerate itself would run fp32 on a CPU and still call it fp16. Raises UsageError if the device cannot do bf16.
    """
    if asked == "bf16" and device.type in ("cuda", "mps") and not has_bf16(device):
        raise UsageError(f"mixed_precision: {device_name(device)} has no bf16. Use fp16.")
    if asked != "fp16" or device.type != "cpu":
        return asked, None
    if cpu_has_fast_bf16():
        return "bf16", "precision: bf16 (this CPU has no fast fp16, but fast bf16)"
    return "no", "precision: fp32 (this CPU has no fast fp16 or bf16)"


def has_bf16(device: extras.torch.device) -> bool:
    """Whether a card multiplies bf16 in hardware; Metal does from macOS 14 on."""
    import torch

    if device.type == "mps":
        return torch.backends.mps.is_macos_or_newer(14, 0)
    return torch.cuda.is_bf16_supported(including_emulation=False)


def cpu_has_fast_bf16() -> bool:
    """Whether the processor multiplies bf16 in hardware; elsewhere autocast to bf16 is slower than fp32."""
    from torch import cpu

    return bool(cpu._is_avx512_bf16_supported() or cpu._is_amx_tile_supported())


def set_up_device(device: extras.torch.device, launch: Launch, config: Config) -> None:
    """TF32 on cards that have it; threads of the host; memory and process group of a process on a CPU."""
    import torch

    own = config.of(Options)
    if device.type == "cuda":
        tf32 = own.tf32 and torch.cuda.get_device_capability() >= (8, 0)
        # With backends.cuda.matmul.fp32_precision alone, the older switch would raise when torch.compile reads it.
        torch.set_float32_matmul_precision("high" if tf32 else "highest")
    # Next to a card, too, for optimizers in host memory. accelerate launch sets 1, or all cores of a container's host.
    if own.cpu_threads or os.environ.get("OMP_NUM_THREADS", "1") == "1" or torch.get_num_threads() > num_cores():
        torch.set_num_threads(own.cpu_threads or max(1, num_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
    if device.type != "cpu":
        return
    if platform.libc_ver()[0] == "glibc":  # keep what a step frees for the next one: some percent of a step's time
        libc, trim_threshold, mmap_threshold = ctypes.CDLL(None), -1, -3  # of malloc.h
        libc.mallopt(trim_threshold, 2**31 - 1)
        libc.mallopt(mmap_threshold, 2**25)  # the largest that glibc takes
    init_gloo(launch, timedelta(seconds=config.optimization.distributed_timeout_seconds))


def init_gloo(launch: Launch, timeout: timedelta = timedelta(minutes=30)) -> None:
    """Makes the process group of processes without an accelerator, and has accelerate shard as the launcher says.

    accelerate by itself does not connect them, or quietly trains with DDP; what runs on a cluster runs on a laptop too.
    """
    if launch.world_size == 1 and launch.engine != "deepspeed":
        return
    import torch
    from accelerate import PartialState
    from accelerate.utils import DistributedType

    PartialState(cpu=True, timeout=timeout)
    PartialState._shared_state["device"] = torch.device("cpu")  # not cpu:0, which tensors do not call themselves
    os.environ.pop("ACCELERATE_USE_CPU", None)  # with it accelerate would put its own choice in place of ours
    if launch.engine == "fsdp2" or launch.tp_size > 1:
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
