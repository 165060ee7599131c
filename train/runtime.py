"""The Accelerator, from the configuration and the launcher; precision, threads, signals, memory counters."""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from train.config import Config
from train.errors import UsageError, UserError
from train.extras.activations.compilation import check_compiler
from train.extras.meter.throughput import peak_flops_per_second
from train.launch import Launch, segments_grow
from train.optim import step_function
from train.records import Meter, MicroBatch

if TYPE_CHECKING:
    from accelerate import Accelerator


ROLL_CALL = timedelta(minutes=1)
"""Ample time to find out which rank is lost."""


@dataclass(frozen=True)
class Runtime:
    """The Accelerator and what there is to say about the device."""

    accelerator: Accelerator
    precision: str
    lines: tuple[str, ...]
    peak_flops_per_second: float | None
    """Of all devices together; None where the device's rate is not known."""


def start_runtime(config: Config, launch: Launch, accumulation_steps: int) -> Runtime:
    """The Accelerator of this process, from the configuration and the launcher.

    Raises:
        UsageError: launcher and configuration contradict each other.
        UserError: the launcher started several processes that do not know each other.
    """
    from accelerate.utils import InitProcessGroupKwargs

    device = target_device()
    if config.architecture.compile:
        check_compiler(device)
    timeout = timedelta(seconds=config.optimization.distributed_timeout_seconds)
    if device.type == "cuda":
        timeout += (
            ROLL_CALL  # NCCL's watchdog ends the process without a word: train.extras.endurance.lost_rank speaks first
        )
    precision, substitution = resolve_precision(config.optimization.mixed_precision or launch.precision, device)
    arithmetic = set_fp32_products(config.optimization.tf32, device) if precision == "no" else precision
    threads, options = None, {}
    if device.type == "cpu":
        threads = set_cpu_threads(config.optimization.cpu_threads)
        keep_freed_memory()
        meet_over_gloo(launch, timeout)
    if launch.engine == "deepspeed":
        from train.extras.parallelism.deepspeed_engine import deepspeed_plugin, sequence_parallelism

        options["deepspeed_plugin"] = deepspeed_plugin(config, launch, accumulation_steps)
        if launch.sequence_size > 1:
            options["parallelism_config"] = sequence_parallelism(launch)
    accelerator = make_accelerator(
        launch,
        precision,
        accumulation_steps,
        device.type == "cpu",
        kwargs_handlers=[InitProcessGroupKwargs(timeout=timeout)],
        **options,
        log_with=list(config.output.report_to) or None,
        project_dir=config.output.output_dir,
    )
    if launch.world_size != accelerator.num_processes:
        raise UserError(
            f"the launcher started {launch.world_size} processes, but this one knows of {accelerator.num_processes}: "
            "they would train the same thing side by side. See accelerate_configs/ for launch files that work."
        )
    where = f"{accelerator.num_processes} × {_device_name(accelerator.device)}"
    where += f", {threads} threads each" if threads else ""
    where += f", {launch}" if str(launch) else ""
    shown = "fp32" if precision == "no" else precision
    if arithmetic == "tf32":
        shown += " (products in TF32)"
    if device.type == "cuda" and segments_grow():
        where += ", expandable segments"
    lines = [f"device: {where}, precision {shown}"]
    if substitution:
        lines.append(substitution)
    if config.optimization.optimizer_offload and device.type == "cpu":
        lines.append("optimizer_offload: on a CPU the optimizer's state is in host memory already: nothing is changed")
    rate = peak_flops_per_second(_device_name(accelerator.device), arithmetic)
    return Runtime(accelerator, shown, tuple(lines), rate and rate * accelerator.num_processes)


def make_accelerator(
    launch: Launch, precision: str, accumulation_steps: int, on_cpu: bool, **options: Any
) -> Accelerator:
    """The Accelerator for ``launch``; what shards is set up so that sums stay exact and memory small."""
    from accelerate import Accelerator
    from accelerate.utils import GradientAccumulationPlugin

    shards = launch.engine == "fsdp2"
    if shards:
        options["fsdp_plugin"] = _fsdp_plugin(precision, on_cpu)
    # With sharded weights a gradient kept for a whole window on every rank would undo what sharding saved.
    accumulation = GradientAccumulationPlugin(num_steps=accumulation_steps, sync_each_batch=shards)
    if launch.engine == "deepspeed":
        on_cpu = False  # else accelerate would leave DeepSpeed out; meet_over_gloo has chosen the CPU
    return Accelerator(cpu=on_cpu, mixed_precision=precision, gradient_accumulation_plugin=accumulation, **options)


def _fsdp_plugin(precision: str, on_cpu: bool) -> Any:
    """FSDP2 from the launcher's settings, but gradients are summed in fp32 and the loss stays what it is.

    accelerate's own choice is the half precision for both, which loses digits of every gradient and of the loss. On a
    CPU nothing is offloaded: it is there already.
    """
    from accelerate import FullyShardedDataParallelPlugin
    from torch.distributed.fsdp import MixedPrecisionPolicy

    half = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(precision)
    policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32) if half else MixedPrecisionPolicy()
    return FullyShardedDataParallelPlugin(mixed_precision_policy=policy, cpu_offload=False if on_cpu else None)


def shard_by_layer(accelerator: Accelerator, network: nn.Module) -> None:
    """Has FSDP2 gather one layer of ``network`` at a time, where the launch file names no classes of its own."""
    plugin = accelerator.state.fsdp_plugin if accelerator.is_fsdp2 else None
    if plugin is not None and not plugin.transformer_cls_names_to_wrap:
        plugin.transformer_cls_names_to_wrap = layer_classes(network)


def layer_classes(network: nn.Module) -> list[str]:
    """Names of the classes of the layers of a transformers model that are sharded one by one."""
    found = {type(module).__name__ for module in network.modules()}
    return sorted(found & set(getattr(network, "_no_split_modules", None) or ()))


def meet_over_gloo(launch: Launch, timeout: timedelta = timedelta(minutes=30)) -> None:
    """Has the processes of a machine without an accelerator find each other, and share weights as the launcher says.

    accelerate by itself leaves them strangers, or quietly trains with DDP instead. So that what runs on a cluster can
    be tried on a laptop, the process group is made here, and accelerate is told of it as of one that shards.
    """
    if launch.world_size == 1 and launch.engine != "deepspeed":
        return
    from accelerate import PartialState
    from accelerate.utils import DistributedType

    PartialState(cpu=True, timeout=timeout)
    PartialState._shared_state["device"] = torch.device("cpu")  # not cpu:0, which tensors do not call themselves
    os.environ.pop("ACCELERATE_USE_CPU", None)  # with it accelerate would put its own choice in place of ours
    if launch.engine == "fsdp2" or launch.tensor_size > 1:
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type.upper()


def resolve_precision(asked: str, device: torch.device) -> tuple[str, str | None]:
    """The mixed precision to use, and a line for a person where it is not the one asked for.

    accelerate itself would run fp32 on a CPU and go on calling it fp16.

    Raises:
        UsageError: the device cannot do bf16.
    """
    if asked == "bf16" and device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise UsageError(f"mixed_precision: {torch.cuda.get_device_name()} has no bf16. Use fp16.")
    if asked == "fp16" and device.type in ("cpu", "mps"):
        if device.type == "cpu" and cpu_is_fast_at_bf16():
            return "bf16", "fp16 does not pay on a CPU: bf16 autocast instead, which this processor is fast at"
        return "no", f"fp16 does not pay on this {device.type.upper()}, nor does bf16: fp32 instead"
    return asked, None


def set_fp32_products(tf32: bool, device: torch.device) -> str:
    """In which type matrices of fp32 are multiplied from now on: ``tf32`` where asked for and there, else ``no``."""
    if device.type != "cuda":
        return "no"
    tf32 = tf32 and torch.cuda.get_device_capability() >= (8, 0)
    # Sets the older and the newer switch alike. With backends.cuda.matmul.fp32_precision alone the older one raises
    # when it is read, as torch.compile does.
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    return "tf32" if tf32 else "no"


def cpu_is_fast_at_bf16() -> bool:
    """Whether the processor multiplies bf16 in hardware; elsewhere autocast to bf16 is slower than fp32."""
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def target_device() -> torch.device:
    """The device that accelerate will choose, known before it exists."""
    if os.environ.get("ACCELERATE_USE_CPU", "false").lower() in ("true", "1"):
        return torch.device("cpu")
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def set_cpu_threads(asked: int | None) -> int:
    """Threads of this process on a CPU; returns how many.

    ``accelerate launch`` sets OMP_NUM_THREADS=1 where nobody chose, which leaves all cores but one idle.
    """
    local_processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    chosen = os.environ.get("OMP_NUM_THREADS", "1")
    if asked is not None:
        torch.set_num_threads(asked)
    elif chosen == "1":
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        torch.set_num_threads(max(1, cores // local_processes))
    return torch.get_num_threads()


def keep_freed_memory() -> None:
    """Has glibc keep what a step frees for the next step, instead of giving it back and faulting it in again.

    That takes some percent off a CPU step; other C libraries are left alone.
    """
    trim_threshold, mmap_threshold = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of malloc.h
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(trim_threshold, 2**31 - 1)
        libc.mallopt(mmap_threshold, 2**25)  # the largest that glibc takes


class StopAtOnce(BaseException):  # none of the libraries that it goes through shall take it for an error of theirs
    """Someone asked this process to stop where there is nothing to save."""


class StopRequest:
    """Whether someone asked this process to stop: SIGTERM, SIGINT or SIGUSR1. A second SIGINT ends it at once."""

    def __init__(self) -> None:
        self.received: str | None = None
        self._at_once = False
        self._process = os.getpid()

    def __bool__(self) -> bool:
        return self.received is not None

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # a worker: the run tells it what to do
            if self._at_once and number == signal.SIGTERM:
                os._exit(0)
            return
        if self.received is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = signal.Signals(number).name
        if self._at_once:
            raise StopAtOnce

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """A request raises :class:`StopAtOnce` while the context is open: for long work that leaves nothing behind."""
        self._at_once = True
        try:
            if self.received is not None:
                raise StopAtOnce
            yield
        except Exception:
            if self.received is None:
                raise
            raise StopAtOnce from None  # a library that was cut short may put an error of its own in its place
        finally:
            self._at_once = False

    @contextmanager
    def listening(self) -> Iterator[StopRequest]:
        """Listens while the context is open."""
        numbers = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1]
        before = {number: signal.signal(number, self._on_signal) for number in numbers}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


class WithoutMemoryBranch:
    """Stands in for :class:`train.memory.session.MemorySession` in a fork that deleted ``train/memory/``."""

    def __init__(self, config: Config) -> None:
        if config.optimization.micro_batch_size == "auto":
            raise UserError("micro_batch_size: auto needs train/memory/, which is not there: give a number.")
        if config.architecture.gradient_checkpointing == "auto":
            raise UserError(
                "gradient_checkpointing: auto needs train/memory/, which is not there: give none, selective or full."
            )
        self.step = step_function(config.optimization)
        self.meter: Meter

    def describe(self, *args: Any) -> None: ...

    def settle(self, *args: Any) -> Config:
        raise NotImplementedError

    def ask(self, *args: Any) -> None: ...

    def equip(self, accelerator: Accelerator, *args: Any) -> None:
        self.meter = DeviceMeter(accelerator.device)

    def rehearse(self, *args: Any) -> None: ...

    def summary(self) -> dict[str, Any]:
        return self.meter.summary()

    def explain(self, error: Exception, folder: Path) -> str | None:
        return None

    def close(self) -> None: ...


class DeviceMeter:
    """A :class:`train.records.Meter` of the peak alone: CUDA's own counter, or the process's largest resident set."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def step(self, window: Sequence[MicroBatch]) -> AbstractContextManager[None]:
        return nullcontext()

    def evaluation(self, batch: MicroBatch) -> AbstractContextManager[None]:
        return nullcontext()

    def mark(self, phase: str) -> None:
        """Phases are not told apart."""

    def interval(self) -> dict[str, Any]:
        return {"peak_allocated_bytes": self._peak_bytes()}

    def summary(self) -> dict[str, Any]:
        return self.interval()

    def _peak_bytes(self) -> int:
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
