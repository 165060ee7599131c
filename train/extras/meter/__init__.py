"""What was used: peak memory by phase and kind, leaks, model FLOPs utilization."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from train import extras
from train.config import option
from train.records import MicroBatch, Parts, Run, exchange

SNAPSHOT_EVENTS = 100_000  # the last ones; each takes some kilobytes of host memory, and all would grow for ever


@dataclass(frozen=True)
class Options:
    """Memory and utilization, measured."""

    measure_memory: bool = option(True, "Measure peaks by phase and kind; False: only the highest.")
    memory_snapshot: bool = option(False, "On CUDA, write torch's record of allocations whenever memory runs out.")


class Extra(extras.Extra):
    meter: Any = None  # :class:`train.extras.meter.memory.MemoryMeter`, once the model is there
    snapshot: Path | None = None  # torch's record of allocations, if asked for
    _flops: Any = None  # :class:`train.extras.meter.flops.ModelFlops`, where the device's rate is known
    _work = (0.0, 0.0)  # FLOPs and tokens of this rank since the last line of the log

    def change_model(self, run: Run, network: Any, task: Any) -> None:
        if not run.is_planned:
            from train.extras.device import device_name, precision_in_use
            from train.extras.meter.cards import peak_flops_per_second
            from train.extras.meter.flops import count_flops

            precision = precision_in_use(run.accelerator, run.config.architecture.dtype)
            own = peak_flops_per_second(device_name(run.accelerator.device), precision)
            if all(peaks := exchange(own)):  # counted only where it is of use, and then on every rank
                self._peak_flops_per_second = sum(peaks)  # of all devices together
                self._flops = count_flops(network, run.config.data.max_length, task.is_causal)

    def ready(self, run: Run, parts: Parts) -> None:
        device, own = run.accelerator.device, run.config.of(Options)
        meter_of = {"cpu": "cpu:CpuMeter", "cuda": "cuda:CudaMeter", "mps": "cpu:MpsMeter"}
        if own.measure_memory and device.type in meter_of:
            from train.extras.meter.tracker import num_classes_of

            names, model = parts.data.label_names, parts.state.model
            classes = num_classes_of(model, len(names), len(parts.data.tokenizer))
            kind = resolve_name(f"train.extras.meter.{meter_of[device.type]}")
            self.meter = kind(device, model, parts.optimizer.optimizer, classes, run.outputs.say)
        if own.memory_snapshot and device.type == "cuda":
            self._record_history(run)

    def _record_history(self, run: Run) -> None:
        """Has torch write its record whenever memory runs out, while all is still there; a step may recover later."""
        from torch import _C, cuda

        path = self.snapshot = run.outputs.folder / f"memory_snapshot-{run.accelerator.process_index}.pickle"

        def write(*sizes: int) -> None:
            with suppress(OSError):  # a full disk must not hide that memory is full
                cuda.memory._dump_snapshot(str(path))

        cuda.memory._record_memory_history(stacks="python", max_entries=SNAPSHOT_EVENTS)
        _C._cuda_attach_out_of_memory_observer(write)  # type: ignore

    def computing(self, phase: str, micro_batches: Sequence[MicroBatch], step: int = 0) -> AbstractContextManager[None]:
        if self._flops is not None and phase == "forward":
            from train.extras.meter.flops import text_lengths

            lengths = [length for batch in micro_batches for length in text_lengths(batch) if length]
            self._work = self._work[0] + sum(map(self._flops.of, lengths)), self._work[1] + sum(lengths)
        return self.meter.measure(phase, micro_batches) if self.meter is not None else nullcontext()

    def mark(self, phase: str) -> None:
        if self.meter is not None:
            self.meter.mark(phase)

    def measured(self, run: Run, values: dict[str, Any]) -> None:
        values["mfu"] = None
        if self._flops is not None:  # of all ranks: the first has the longest texts
            flops, tokens = map(sum, zip(*exchange(self._work), strict=True))
            self._work = 0.0, 0.0
            if tokens:
                values["mfu"] = values["tokens_per_second"] * flops / tokens / self._peak_flops_per_second
        values.update(self.meter.interval() if self.meter is not None else _highest(run))

    def finished(self, run: Run, parts: Parts, summary: dict[str, Any]) -> None:
        summary |= self.meter.summary() if self.meter is not None else _highest(run)


def _highest(run: Run) -> dict[str, Any]:
    from train.extras.meter.memory import peak_bytes

    return {"peak_allocated_bytes": peak_bytes(run.accelerator.device)}
