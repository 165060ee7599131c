"""Memory before, during and after a run: predict, plan, rehearse, explain. ``python -m train.memory`` plans."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from train import extras
from train.config import Config, option
from train.launch import Launch
from train.memory.predict import Predictor
from train.records import Parts, Run, UsageError

ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # the second is its older name
_MAPS_MEMORY = 102  # CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED of the CUDA driver


@dataclass(frozen=True)
class Options:
    """Memory: predict and rehearse."""

    memory_budget_gib: float | None = option(None, "What auto may fill of each device; default: what is free.", gt=0)
    predict_memory: bool = option(True, "Predict the peak in another process, and show it next to the measured one.")
    rehearse: bool = option(True, "Before step 1 make the longest step, without a trace.")


class Extra(extras.Extra):
    needs = ("hardware", "meter")

    def __init__(self) -> None:
        self._predictor = Predictor()
        self._session: Any = None

    def check(self, config: Config, launch: Launch) -> None:
        if not is_known(launch) and "auto" in map(config.get, ("micro_batch_size", "gradient_checkpointing")):
            raise UsageError(f"auto is not known for {launch}: give micro_batch_size and gradient_checkpointing.")

    @contextmanager
    def open(self, config: Config, launch: Launch, stop: list[str]) -> Iterator[None]:
        use_expandable_segments()
        with self._predictor:
            if launch.rank == 0 and is_known(launch) and config.of(Options).predict_memory:
                self._predictor.start()  # its imports take seconds, in which this process loads its own and the data
            yield

    def change_config(self, run: Run, config: Config, data: extras.PreparedData) -> Config:
        from train.memory.session import MemorySession

        self._session = MemorySession(run, data, self._predictor)
        return self._session.settle(config)

    def prepared(self, run: Run, data: extras.PreparedData, batches: extras.Batches) -> None:
        self._session.ask()

    def ready(self, run: Run, parts: Parts) -> None:
        if not run.outputs.is_complete(parts.total_steps):
            self._session.rehearse(parts)

    def failed(self, run: Run | None, error: Exception) -> str | None:
        from train.extras.host_memory import is_out_of_memory

        is_memory = hasattr(error, "fault") or is_out_of_memory(error)
        return self._session.explain(error) if self._session is not None and is_memory else None

    def finished(self, run: Run, parts: Parts, summary: dict[str, Any]) -> None:
        summary |= self._session.figures


def is_known(launch: Launch) -> bool:
    """Whether a step's memory can be predicted: not with DeepSpeed or HSDP, nor where layers or sequences are split."""
    replicates = os.environ.get("PARALLELISM_CONFIG_DP_REPLICATE_SIZE", "1") != "1"
    return launch.mp_size == 1 and launch.engine != "deepspeed" and not replicates


def use_expandable_segments(environment: MutableMapping[str, str] = os.environ, is_here: bool = True) -> None:
    """Has PyTorch's CUDA allocator use expandable segments, which waste less; call it before anything is on a card."""
    if not any(name in environment for name in ALLOCATOR) and (not is_here or _can_map_memory()):
        environment[ALLOCATOR[0]] = "expandable_segments:True"


def uses_expandable_segments(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether the CUDA allocator was told to use expandable segments."""
    return any("expandable_segments:true" in environment.get(name, "").lower() for name in ALLOCATOR)


def _can_map_memory() -> bool:
    """Whether segments can grow: not on vGPUs without the driver's calls, and under WSL these fail now and then."""
    if sys.platform != "linux" or "microsoft" in platform.release().lower():
        return False
    device, answer = ctypes.c_int(), ctypes.c_int(1)
    with suppress(OSError):  # no driver, and so no card
        driver = ctypes.CDLL("libcuda.so.1")
        if driver.cuInit(0) == driver.cuDeviceGet(ctypes.byref(device), 0) == 0:
            driver.cuDeviceGetAttribute(ctypes.byref(answer), _MAPS_MEMORY, device)
    return bool(answer.value)
