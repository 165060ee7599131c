"""One optimizer step among several CPU processes: what it exchanges and holds, measured in each process.

``communication.py`` starts the processes. What a step exchanges is counted twice: as the sizes of the tensors that
collectives are given, and as bytes that pass the loopback device of the processes' own network namespace.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.benchmarks import building
from scripts.benchmarks.scaling import Division, Shape, Work, shape_of
from train.config import to_values
from train.memory.predict import Job, Target

MODEL = {"model_type": "llama", "hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4,
         "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 8000}  # fmt: skip
STEPS, WARM_UP = 3, 2
NETWORK_COUNTERS = Path("/proc/net/dev")
FSDP2 = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
         "FSDP_RESHARD_AFTER_FORWARD": "true", "FSDP_CPU_RAM_EFFICIENT_LOADING": "false"}  # fmt: skip
"""What ``accelerate launch`` sets for accelerate_configs/fsdp2.yaml."""

OPERATIONS: dict[str, tuple[str, int | None]] = {
    "allreduce_": ("all_reduce", 0),
    "_allgather_base_": ("all_gather", 0),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "alltoall_base_": ("all_to_all", 1),
    "broadcast_": ("broadcast", 0),
    "all_reduce": ("all_reduce", 0),
    "all_gather_into_tensor": ("all_gather", None),
    "reduce_scatter_tensor": ("reduce_scatter", 0),
    "all_to_all_single": ("all_to_all", 0),
    "wait_tensor": ("", None),
    "_wrap_tensor_autograd": ("", None),
    "barrier": ("", None),
}
"""torch's operators for collectives: what each does, and which argument holds the payload (None: the result)."""


@dataclass(frozen=True)
class Case:
    """A step to measure."""

    division: Division
    accumulation_steps: int = 1
    checkpointing: str = "none"
    precision: str = "no"
    batch_size: int = 1
    length: int = 128

    @property
    def title(self) -> str:
        division = self.division
        words = [] if division.tensor > 1 else [division.engine]
        if division.replicas > 1 and division.engine == "ddp":
            words.append("--on_oom split" if division.recovers else "--on_oom stop")
        if division.replicas > 1 and division.engine != "ddp":
            words.append(f"{division.replicas} × {division.shards}")
        if division.tensor > 1:
            words.append("tensor parallel")
        if not division.reshard_after_forward:
            words.append("not resharded")
        if self.accumulation_steps > 1:
            words.append(f"{self.accumulation_steps} accumulated")
        if self.checkpointing != "none":
            words.append("checkpointing")
        if self.precision != "no":
            words.append(self.precision)
        return ", ".join(words)

    @property
    def work(self) -> Work:
        tokens = self.batch_size * self.length
        return Work(tokens, self.accumulation_steps, self.precision, self.checkpointing)

    @property
    def environment(self) -> dict[str, str]:
        """The environment that a launcher would set."""
        division = self.division
        found = {"ACCELERATE_MIXED_PRECISION": self.precision}
        if division.engine == "fsdp2":
            found |= FSDP2 | {"FSDP_RESHARD_AFTER_FORWARD": str(division.reshard_after_forward).lower()}
        if division.tensor > 1 or (division.engine != "ddp" and division.replicas > 1):
            sizes = {"DP_REPLICATE": division.replicas, "DP_SHARD": division.shards, "TP": division.tensor}
            found |= {"ACCELERATE_USE_PARALLELISM_CONFIG": "true"}
            found |= {f"PARALLELISM_CONFIG_{name}_SIZE": "1" for name in ("CP", "SP")}
            found |= {f"PARALLELISM_CONFIG_{name}_SIZE": str(size) for name, size in sizes.items()}
        return found

    @property
    def job(self) -> Job:
        values = {
            "model_config": MODEL,
            "tokenizer": "bytes",
            "max_length": self.length,
            "micro_batch_size": self.batch_size,
            "gradient_accumulation_steps": self.accumulation_steps,
            "gradient_checkpointing": self.checkpointing,
            "mixed_precision": self.precision,
        }
        config, vocabulary = building.config_of(values), MODEL["vocab_size"]
        return Job(to_values(config), Target("cpu"), vocabulary, self.batch_size, self.length)


@dataclass
class Measured:
    """Of one step on rank 0; ``wire_bytes`` of all ranks."""

    payload_bytes: dict[str, int] = field(default_factory=dict)
    """By operation: see :class:`scripts.benchmarks.scaling.Collective`."""
    calls: dict[str, int] = field(default_factory=dict)
    wire_bytes: float | None = None
    state_bytes: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0


def measure_all(chosen: list[Case], counts_wire: bool) -> tuple[Shape, list[Measured]]:
    """The step of each case; all processes of a launch call it."""
    shape, found = None, []
    launcher = dict(os.environ)
    for case in chosen:
        os.environ.clear()
        os.environ.update(launcher | case.environment)
        building.reset_accelerate()
        training = building.build_training(
            case.job,
            building.random_micro_batches(case.job, case.accumulation_steps),
            launched=True,
            recovers=case.division.recovers,
        )
        shape = shape or shape_of(whole_network())
        found.append(measure(training, counts_wire))
    assert shape is not None
    return shape, found


def measure(training: building.Training, counts_wire: bool) -> Measured:
    """Steps of one case."""
    for _ in range(WARM_UP):
        training.step()
    measured, counter = Measured(), collective_counter()
    with counter:
        training.step()
    measured.payload_bytes, measured.calls = dict(counter.payload_bytes), dict(counter.calls)
    measured.state_bytes = held_bytes(training)
    if counts_wire:
        measured.wire_bytes, measured.seconds = wire_bytes(training)
    return measured


def wire_bytes(training: building.Training) -> tuple[float, float]:
    """(bytes over the loopback device, seconds) of a step; idle traffic is taken off."""
    import torch.distributed as dist

    dist.barrier()
    time.sleep(0.2)  # the other ranks may still send
    before, began = loopback_bytes(), time.perf_counter()
    for _ in range(STEPS):
        training.step()
    dist.barrier()
    seconds = (time.perf_counter() - began) / STEPS
    time.sleep(0.2)
    after, ended = loopback_bytes(), time.perf_counter()
    time.sleep(0.5)
    idle = (loopback_bytes() - after) / (time.perf_counter() - ended)
    dist.barrier()
    return (after - before - idle * (ended - began)) / STEPS, seconds


def whole_network() -> Any:
    """The model of all cases without weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    values: dict[str, Any] = dict(MODEL)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(values.pop("model_type"), **values))


def collective_counter() -> Any:
    """A mode that counts the calls and payloads of all collectives."""
    import torch
    from torch.distributed.tensor import DTensor
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counter(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.payload_bytes: dict[str, int] = defaultdict(int)
            self.calls: dict[str, int] = defaultdict(int)

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if any(issubclass(kind, DTensor) for kind in types):
                return NotImplemented  # its parts come back as plain tensors
            result = func(*args, **(kwargs or {}))
            if func.namespace in ("c10d", "_c10d_functional"):
                self.count(func._opname, args, result)
            return result

        def count(self, name: str, args: Any, result: Any) -> None:
            operation, number = OPERATIONS[name]
            if operation:
                self.calls[operation] += 1
                self.payload_bytes[operation] += num_bytes(result if number is None else args[number])

    def num_bytes(value: Any) -> int:
        if isinstance(value, torch.Tensor):
            return value.numel() * value.element_size()
        return sum(map(num_bytes, value)) if isinstance(value, tuple | list) else 0

    return Counter()


def held_bytes(training: building.Training) -> dict[str, int]:
    """Bytes of this rank by kind, when all gradients exist; counted storage by storage during a step."""
    from torch.nn.parallel import DistributedDataParallel

    from train.extras.meter.tracker import GRADIENTS, OPTIMIZER_STATE, PARAMETERS, WORKSPACE, StorageTracker, tag_held

    network, optimizer = training.network, training.optimizer.optimizer
    found: dict[str, int] = {}
    kinds = [PARAMETERS, GRADIENTS, OPTIMIZER_STATE]
    if isinstance(training.model, DistributedDataParallel):
        kinds.append(WORKSPACE)  # between backward and update it holds only DDP's buckets
    with StorageTracker("cpu") as tracker:
        tag_held(tracker, network, optimizer)

        def mark(phase: str) -> None:
            tracker.mark(phase)
            if phase == "clip":
                tag_held(tracker, network, optimizer)
                found.update({kind: tracker.bytes_by_kind[kind] for kind in kinds})

        training.step(mark=mark)
    return found


def loopback_bytes() -> int:
    """Bytes sent over the loopback device since it is up."""
    line = next(line for line in NETWORK_COUNTERS.read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.split(":")[1].split()[8])


def main() -> None:
    """In each process of a launch: measures the cases of a file; rank 0 writes what it found to another."""
    source, target, counts_wire = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] == "wire"
    chosen = [case_from(values) for values in json.loads(source.read_text())]
    shape, found = measure_all(chosen, counts_wire)
    if os.environ["RANK"] == "0":
        target.write_text(json.dumps({"shape": asdict(shape), "measured": [asdict(m) for m in found]}))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # gloo's threads sometimes abort the process while the interpreter shuts down


def case_from(values: dict[str, Any]) -> Case:
    """A case read from JSON."""
    return Case(**values | {"division": Division(**values["division"])})


if __name__ == "__main__":
    main()
