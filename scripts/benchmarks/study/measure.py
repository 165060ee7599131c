"""One cell of a study, measured in a process of its own."""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.benchmarks import building, harness
from scripts.benchmarks.study.cells import FAILED, MEASURED, OUT_OF_MEMORY
from train.memory.predict import Job
from train.records import UserError

LIBRARIES = ["torch.profiler", "accelerate", "transformers.modeling_utils", "train.step", "train.model"]
SCALE_STEPS = 20
"""Most steps in which fp16 may find its scale."""


@dataclass(frozen=True)
class Task:
    """One cell to measure."""

    technique: str
    job: Job
    accumulation_steps: int
    steps: int
    seconds: float
    fence_bytes: int | None
    """On a CPU: the most that the process may take after its libraries are loaded."""


class Processes(harness.Processes):
    """Measures each cell in a new process."""

    def __init__(self, on_cpu: bool) -> None:
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler prints when it starts and stops
        super().__init__(on_cpu, LIBRARIES)

    def measure(self, task: Task, timeout_seconds: float) -> dict[str, Any]:
        """Fields of the task's :class:`Cell`, whatever happens to the process."""
        try:
            return self.call(measure_or_explain, task, timeout_seconds=timeout_seconds)
        except TimeoutError as error:
            return {"status": FAILED, "reason": str(error)}
        except harness.EndedError as error:
            # Behind a fence some libraries cannot even start a thread, and end the process without an exception.
            status = OUT_OF_MEMORY if task.fence_bytes is not None else FAILED
            return {"status": status, "reason": f"its process ended with status {error}"}


def measure_or_explain(task: Task) -> dict[str, Any]:
    """:func:`measure`, or the status and reason of its failure."""
    from train.extras.host_memory import is_out_of_memory
    from train.extras.oom import parse_oom

    try:
        return measure(task)
    except Exception as error:  # of any library: it costs only this cell
        text = " ".join(str(error).split())[:300]
        if is_out_of_memory(error) or parse_oom(text) is not None:  # the builder may have wrapped the error
            return {"status": OUT_OF_MEMORY, "reason": text}
        return {"status": FAILED, "reason": text if isinstance(error, UserError) else f"{type(error).__name__}: {text}"}


def measure(task: Task) -> dict[str, Any]:
    """Makes the step of ``task`` in this process: fields of a :class:`Cell`."""
    import torch

    job = task.job
    if task.fence_bytes is not None:
        fence(task.fence_bytes)
    training = building.build_training(job, building.random_micro_batches(job, task.accumulation_steps))
    first = training.micro_batches[:1]
    began = time.perf_counter()
    training.step(first)
    for _ in range(SCALE_STEPS):  # before its first update the optimizer has no state
        if not training.was_skipped:
            break
        training.step(first)
    on_cuda = job.target.device_type == "cuda"
    if on_cuda:
        torch.cuda.reset_peak_memory_stats()
    seconds = [harness.timed(training.step)]
    while len(seconds) < task.steps and time.perf_counter() - began + seconds[-1] < task.seconds:
        seconds.append(harness.timed(training.step))
    median = statistics.median(seconds)
    held = training.peak_bytes()
    memory = {"peak_bytes": held, "held_bytes": torch.cuda.max_memory_reserved()} if on_cuda else {}
    return {
        "status": MEASURED,
        **(memory or {"peak_bytes": traced_peak_bytes(training), "held_bytes": held}),
        "seconds_per_step": median,
        "steps": len(seconds),
        **training.speed(median, job.micro_batch_size * job.length * task.accumulation_steps, job.length),
        "num_parameters": training.num_parameters,
        "precision": training.precision,
    }


def fence(more_bytes: int) -> None:
    """Limits this process to ``more_bytes`` more: then its allocator fails, and no other process is killed."""
    with contextlib.suppress(ImportError, OSError, ValueError):  # other systems than Linux rely on the prediction
        import resource

        status = Path("/proc/self/status").read_text(encoding="utf-8")
        now = next(int(row.split()[1]) * 1024 for row in status.splitlines() if row.startswith("VmData"))
        resource.setrlimit(resource.RLIMIT_DATA, (now + more_bytes, now + more_bytes))


def traced_peak_bytes(training: building.Training) -> int:
    """Most bytes that tensors hold during a step on the CPU.

    Two micro-batches are enough: from the second one on, gradients exist from the start.
    """
    network, state = training.network, training.optimizer.optimizer.state
    tensors = [*network.parameters(), *network.buffers(), *(v for values in state.values() for v in values.values())]
    with harness.traced_allocations(held_bytes=storage_bytes(tensors)) as traced:
        training.step(training.micro_batches[:2])
    return traced.peak_bytes


def storage_bytes(values: Iterable[Any]) -> int:
    """Bytes of the storages of all tensors among ``values``, each counted once."""
    storages = {value.untyped_storage().data_ptr(): value for value in values if hasattr(value, "untyped_storage")}
    return sum(value.untyped_storage().nbytes() for value in storages.values())
