"""What two and four CPU processes exchange in an optimizer step, and hold, beside the formulas of docs/scaling.md.

    python scripts/benchmarks/communication.py --output docs/results/communication-cpu

The step is the template's own. What it exchanges is counted twice: as the sizes of the tensors that collectives are
given, and as bytes that pass the loopback device of a network namespace in which nothing else runs (Linux, and the
right to make one: without it the first count alone).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

from train.config import Config, to_values  # noqa: E402
from train.memory.building import build  # noqa: E402
from train.memory.predict import Job, Target, random_batch  # noqa: E402
from train.memory.scaling import Division, Shape, Work, collectives, shape_of, state_of  # noqa: E402

MODEL = {"model_type": "llama", "hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4,
         "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 8000}  # fmt: skip
TENSOR_PARALLEL = ROOT / "train" / "tensor_parallel.py"
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
"""Operators of torch's collectives: what they do, and which argument holds the payload (None: the result)."""


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
        """What the launcher would set."""
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
            **to_values(Config()),
            "model_config": MODEL,
            "tokenizer": "bytes",
            "max_length": self.length,
            "micro_batch_size": self.batch_size,
            "gradient_accumulation_steps": self.accumulation_steps,
            "gradient_checkpointing": self.checkpointing,
            "mixed_precision": self.precision,
        }
        auto_class, vocabulary = "AutoModelForCausalLM", MODEL["vocab_size"]
        return Job(values, Target("cpu"), auto_class, vocabulary, self.batch_size, self.length)


def cases(num_processes: int) -> list[Case]:
    """Every way that runs on CPU processes."""
    ddp, fsdp2 = Division("ddp", replicas=num_processes), Division("fsdp2", shards=num_processes)
    if num_processes > 2:
        return [Case(ddp), Case(fsdp2), Case(Division("fsdp2", replicas=2, shards=num_processes // 2))]
    every = [
        Case(division, accumulation_steps, checkpointing)
        for division in (ddp, fsdp2)
        for accumulation_steps in (1, 4)
        for checkpointing in ("none", "full")
    ]
    kept = Division("fsdp2", shards=num_processes, reshard_after_forward=False)
    others = [Case(kept), Case(kept, 4), Case(ddp, precision="bf16"), Case(fsdp2, precision="bf16")]
    if TENSOR_PARALLEL.exists():
        tensor = Division("ddp", tensor=num_processes)
        others += [Case(tensor), Case(tensor, 2, "full"), Case(tensor, precision="bf16")]
    return [*every, Case(replace(ddp, recovers=True), 4), *others]


@dataclass
class Measured:
    """Of one step on rank 0; ``wire_bytes`` of all ranks."""

    payload_bytes: dict[str, int] = field(default_factory=dict)
    """By operation: see :class:`train.memory.scaling.Collective`."""
    calls: dict[str, int] = field(default_factory=dict)
    wire_bytes: float | None = None
    state_bytes: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0


# ---- in each process -------------------------------------------------------------------------------------------------


def measure_all(chosen: list[Case], counts_wire: bool) -> tuple[Shape, list[Measured]]:
    """Each case's step; called by all processes of a launch."""
    import torch
    from accelerate.state import AcceleratorState, GradientState

    found: list[Measured] = []
    shape = None
    launcher = dict(os.environ)
    for case in chosen:
        os.environ.clear()
        os.environ.update(launcher | case.environment)
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        torch.manual_seed(0)
        this_shape, measured = measure(case, counts_wire)
        shape = shape or this_shape
        found.append(measured)
    assert shape is not None
    return shape, found


def measure(case: Case, counts_wire: bool) -> tuple[Shape, Measured]:
    """One case's step, some times over."""
    import torch.distributed as dist

    from train.config import from_values
    from train.extras.endurance.recovery import RecoveringStep
    from train.launch import read_launch
    from train.runtime import start_runtime
    from train.step import optimizer_step

    job, launch = case.job, read_launch()
    config = from_values(job.values)
    accelerator = start_runtime(config, launch, case.accumulation_steps).accelerator
    shape = shape_of(network_of(job, config))
    divide = None
    if case.division.tensor > 1:
        from train.main import divide_work  # pyright: ignore[reportAttributeAccessIssue]

        divide = partial(divide_work, launch, accelerator)
    model, optimizer, _ = build(job, config.architecture, config, accelerator, initialised=True, divide=divide)
    window = [random_batch(job, case.batch_size) for _ in range(case.accumulation_steps)]
    step = RecoveringStep(print) if case.division.recovers else optimizer_step

    def take() -> None:
        step(accelerator, model, optimizer, window, config.optimization)

    for _ in range(WARM_UP):
        take()
    measured = Measured()
    counter = collective_counter()
    with counter:
        take()
    measured.payload_bytes, measured.calls = dict(counter.payload_bytes), dict(counter.calls)
    measured.state_bytes = held_bytes(accelerator, model, optimizer, window, config.optimization)
    if counts_wire:
        dist.barrier()
        time.sleep(0.2)  # what the other ranks still send
        before, began = loopback_bytes(), time.perf_counter()
        for _ in range(STEPS):
            take()
        dist.barrier()
        measured.seconds = (time.perf_counter() - began) / STEPS
        time.sleep(0.2)
        after, ended = loopback_bytes(), time.perf_counter()
        time.sleep(0.5)
        idle = (loopback_bytes() - after) / (time.perf_counter() - ended)
        measured.wire_bytes = (after - before - idle * (ended - began)) / STEPS
        dist.barrier()
    return shape, measured


def network_of(job: Job, config: Config) -> Any:
    """The model of ``job`` without weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    values = dict(job.values["model_config"])
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(values.pop("model_type"), **values))


def collective_counter() -> Any:
    """A mode that counts what collectives are given, whoever calls them."""
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
                return NotImplemented  # comes back as what it is made of
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


def held_bytes(accelerator: Any, model: Any, optimizer: Any, window: Any, config: Any) -> dict[str, int]:
    """Bytes of this rank, by kind, when all gradients are there; counted storage by storage through a step."""
    from torch.nn.parallel import DistributedDataParallel

    from train.extras.meter.memory import tag_held
    from train.extras.meter.tracker import GRADIENTS, OPTIMIZER_STATE, PARAMETERS, WORKSPACE, StorageTracker
    from train.step import optimizer_step

    network, found = accelerator.unwrap_model(model).model, {}
    kinds = [PARAMETERS, GRADIENTS, OPTIMIZER_STATE]
    if isinstance(model, DistributedDataParallel):
        kinds.append(WORKSPACE)  # between backward and update nothing but its buckets
    with StorageTracker("cpu", 1) as tracker:
        tag_held(tracker, network, optimizer.optimizer)

        def mark(phase: str) -> None:
            tracker.mark(phase)
            if phase == "clip":
                tag_held(tracker, network, optimizer.optimizer)
                found.update({kind: tracker.bytes_by_kind[kind] for kind in kinds})

        optimizer_step(accelerator, model, optimizer, window, config, mark=mark)
    return found


def loopback_bytes() -> int:
    """Sent over the loopback device since it is up."""
    line = next(line for line in NETWORK_COUNTERS.read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.split(":")[1].split()[8])


def work_in_process(arguments: list[str]) -> None:
    """What each process of a launch does; rank 0 writes what it found."""
    source, target, counts_wire = Path(arguments[0]), Path(arguments[1]), arguments[2] == "wire"
    chosen = [case_from(values) for values in json.loads(source.read_text())]
    shape, found = measure_all(chosen, counts_wire)
    if os.environ["RANK"] == "0":
        target.write_text(json.dumps({"shape": asdict(shape), "measured": [asdict(m) for m in found]}))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # gloo's threads now and then abort the process while the interpreter winds down


def case_from(values: dict[str, Any]) -> Case:
    return Case(**{**values, "division": Division(**values["division"])})


# ---- around the processes --------------------------------------------------------------------------------------------


def launch(chosen: list[Case], num_processes: int, timeout_seconds: float = 300) -> tuple[Shape, list[Measured]]:
    """Measures ``chosen`` in ``num_processes`` processes, apart from this machine's network where that is allowed.

    Raises:
        subprocess.CalledProcessError: a process failed; its errors are on stderr.
    """
    apart = own_network()
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "cases.json", Path(folder) / "found.json"
        source.write_text(json.dumps([asdict(case) for case in chosen]))
        run = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(num_processes)]
        run += ["--master_addr", "127.0.0.1", "--master_port", "29517"] if apart else ["--standalone"]
        words = [*apart, *run, __file__, "--in_process", str(source), str(target), "wire" if apart else "-"]
        foreign = ("ACCELERATE_", "FSDP_", "PARALLELISM_", "RANK", "LOCAL_", "WORLD_SIZE", "MASTER_")
        environment = {k: v for k, v in os.environ.items() if not k.startswith(foreign)}
        environment |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1"}
        subprocess.run(words, check=True, timeout=timeout_seconds, env=environment, cwd=ROOT)
        found = json.loads(target.read_text())
    return Shape(**found["shape"]), [Measured(**values) for values in found["measured"]]


def own_network() -> list[str]:
    """Words before a command that give it a network of its own with nothing but loopback; none where not allowed."""
    words = ["unshare", "--user", "--map-root-user", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
    try:
        tried = subprocess.run([*words, "true"], capture_output=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return words if tried.returncode == 0 and NETWORK_COUNTERS.exists() else []


def row_of(case: Case, num_processes: int, shape: Shape, measured: Measured) -> dict[str, Any]:
    """Measured beside what the formulas say."""
    found = collectives(shape, case.division, case.work)
    predicted: dict[str, int] = defaultdict(int)
    for collective in found:
        predicted[collective.operation] += collective.payload_bytes
    # gloo makes a reduce-scatter of an all-reduce, and drops what it does not need
    gloo = sum(c.sent_bytes * (2 if c.operation == "reduce_scatter" else 1) for c in found)
    payload, state = sum(measured.payload_bytes.values()), sum(measured.state_bytes.values())
    row: dict[str, Any] = {
        "case": case.title,
        "processes": num_processes,
        **asdict(measured),
        "predicted_payload_bytes": dict(predicted),
        "payload_error_percent": 100 * (sum(predicted.values()) / payload - 1),
        "predicted_sent_bytes": sum(c.sent_bytes for c in found),
        "predicted_gloo_bytes": gloo,
        "predicted_state_bytes": state_of(shape, case.division, case.work).total,
    }
    row["state_error_percent"] = 100 * (row["predicted_state_bytes"] / state - 1)
    if measured.wire_bytes is not None:
        row["sent_bytes"] = measured.wire_bytes / num_processes
        row["sent_error_percent"] = 100 * (gloo / row["sent_bytes"] - 1)
    return row


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Lines of Markdown, MiB of one process."""
    head = [
        "| case | processes | all-gather | reduce-scatter | all-reduce | formulas | sent, counted | formula for gloo | "
        "a ring that can reduce-scatter | state | formula |",
        "| --- " + "| ---: " * 10 + "|",
    ]
    return [*head, *map(line, rows)]


def line(row: dict[str, Any]) -> str:
    """A row of :func:`table`."""

    def mib(num_bytes: float) -> str:
        return f"{num_bytes / 2**20:,.2f}" if num_bytes >= 2**20 / 100 else ""

    payload = row["payload_bytes"]
    operations = (mib(payload.get(name, 0)) for name in ("all_gather", "reduce_scatter", "all_reduce"))
    cells = [
        row["case"],
        row["processes"],
        *operations,
        f"{row['payload_error_percent']:+.3f} %",
        mib(row.get("sent_bytes", 0)),
        f"{row['sent_error_percent']:+.2f} %" if "sent_error_percent" in row else "",
        mib(row["predicted_sent_bytes"]),
        mib(sum(row["state_bytes"].values())),
        f"{row['state_error_percent']:+.3f} %",
    ]
    return "| " + " | ".join(map(str, cells)) + " |"


def machine_of(found: dict[str, Any]) -> str:
    """The machine and versions of a results file."""
    hardware = found["hardware"]
    used = ", ".join(f"{k} {v}" for k, v in found["versions"].items())
    return f"{hardware['cpu']}, {hardware['cpu_cores']} cores; {used}"


def write(path: Path, shape: Shape, rows: list[dict[str, Any]]) -> None:
    """JSON and a table."""
    from train.outputs_log import hardware, versions

    found = {"hardware": hardware(), "versions": versions(), "model": MODEL, "shape": asdict(shape), "rows": rows}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    text = [
        "# What processes exchange in an optimizer step",
        "",
        f"{machine_of(found)}. Written by `scripts/benchmarks/communication.py`.",
        "",
        f"A Llama of {shape.num_parameters:,} parameters, {shape.num_layers} layers, AdamW; CPU processes over gloo on "
        f"loopback; micro-batches of 1 × {Case(Division()).length} tokens; fp32 where nothing else is said. MiB of one "
        "process and one step; percentages: by how much the formulas of `train/memory/scaling.py` say more.",
        "",
        *table(rows),
        "",
        "- all-gather, reduce-scatter, all-reduce: sizes of the tensors that these were given: after gathering, before "
        "reducing.",
        "- sent, counted: bytes over the loopback device of an own network namespace, per process, headers included, "
        "what passes there when nothing is trained taken off.",
        "- formula for gloo: its rings send (n − 1) ÷ n of what is gathered, and twice that of what is reduced: it "
        "makes a reduce-scatter of an all-reduce. A ring that can reduce-scatter, such as NCCL's, sends half of that.",
        "- state: parameters, gradients, optimizer state and DDP's buckets, counted storage by storage before the "
        "update.",
    ]
    path.with_suffix(".md").write_text("\n".join(text) + "\n", encoding="utf-8")


def main() -> int:
    if sys.argv[1:2] == ["--in_process"]:
        work_in_process(sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="write OUTPUT.json and OUTPUT.md")
    parser.add_argument("--only", default="", help="only cases whose title contains this")
    options = parser.parse_args()
    shape, rows = None, []
    for num_processes in (2, 4):
        chosen = [case for case in cases(num_processes) if options.only in case.title]
        if chosen:
            shape, found = launch(chosen, num_processes)
            rows += [row_of(case, num_processes, shape, m) for case, m in zip(chosen, found, strict=True)]
    print("\n".join(table(rows)))
    if options.output and shape is not None:
        write(options.output, shape, rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
