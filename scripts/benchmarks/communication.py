"""What two and four CPU processes exchange in an optimizer step and hold, next to the formulas of docs/scaling.md.

    python scripts/benchmarks/communication.py --write

The step is the template's own; ``exchanges.py`` measures it in each process. Bytes on the wire are counted only on
Linux, if this user may make a network namespace.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.benchmarks import harness
from scripts.benchmarks.exchanges import MODEL, NETWORK_COUNTERS, Case, Measured
from scripts.benchmarks.scaling import Division, Shape, collectives, state_of


@dataclass(frozen=True)
class Options(harness.Options):
    """Counts what processes exchange and hold."""

    only: str = ""
    """Only cases whose title contains this."""


def measured(options: Options) -> dict[str, Any]:
    """A row for each case.

    Raises:
        SystemExit: no case has such a title.
    """
    shape, rows = None, []
    for num_processes in (2, 4):
        chosen = [case for case in cases(num_processes) if options.only in case.title]
        if chosen:
            shape, found = launch(chosen, num_processes)
            rows += [row_of(case, num_processes, shape, one) for case, one in zip(chosen, found, strict=True)]
    if shape is None:
        raise SystemExit(f"--only {options.only}: no case has such a title.")
    return {"model": MODEL, "shape": asdict(shape), "rows": rows}


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
    tensor = Division("ddp", tensor=num_processes)
    others += [Case(tensor), Case(tensor, 2, "full"), Case(tensor, precision="bf16")]
    return [*every, Case(replace(ddp, recovers=True), 4), *others]


# ---- around the processes --------------------------------------------------------------------------------------------


def launch(chosen: list[Case], num_processes: int, timeout_seconds: float = 300) -> tuple[Shape, list[Measured]]:
    """Measures ``chosen`` in ``num_processes`` processes, in a network of their own if this user may make one.

    Raises:
        subprocess.CalledProcessError: a process failed; its errors are on stderr.
    """
    apart = own_network()
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "cases.json", Path(folder) / "found.json"
        source.write_text(json.dumps([asdict(case) for case in chosen]))
        run = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(num_processes)]
        run += ["--master_addr", "127.0.0.1", "--master_port", "29517"] if apart else ["--standalone"]
        words = [
            *apart,
            *run,
            str(Path(__file__).with_name("exchanges.py")),
            str(source),
            str(target),
            "wire" if apart else "-",
        ]
        foreign = ("ACCELERATE_", "FSDP_", "PARALLELISM_", "RANK", "LOCAL_", "WORLD_SIZE", "MASTER_")
        environment = {k: v for k, v in os.environ.items() if not k.startswith(foreign)}
        environment |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1"}
        subprocess.run(words, check=True, timeout=timeout_seconds, env=environment, cwd=harness.ROOT)
        found = json.loads(target.read_text())
    return Shape(**found["shape"]), [Measured(**values) for values in found["measured"]]


def own_network() -> list[str]:
    """Words before a command that give it a network with loopback only; none if this user may not make one."""
    words = ["unshare", "--user", "--map-root-user", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
    try:
        tried = subprocess.run([*words, "true"], capture_output=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return words if tried.returncode == 0 and NETWORK_COUNTERS.exists() else []


def row_of(case: Case, num_processes: int, shape: Shape, measured: Measured) -> dict[str, Any]:
    """Measurements, and the figures of the formulas."""
    found = collectives(shape, case.division, case.work)
    predicted: dict[str, int] = defaultdict(int)
    for collective in found:
        predicted[collective.operation] += collective.payload_bytes
    # gloo implements reduce-scatter as an all-reduce of which each rank keeps its part
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


TABLE = harness.Table(
    (
        "case",
        "processes",
        "all-gather",
        "reduce-scatter",
        "all-reduce",
        "formulas",
        "sent, counted",
        "formula for gloo",
        "a ring that can reduce-scatter",
        "state",
        "formula",
    ),
    "l" + "r" * 10,
)
"""MiB of one process."""


def cells(row: dict[str, Any]) -> list[Any]:
    """A row of the table."""

    def mib(num_bytes: float) -> str:
        return f"{num_bytes / harness.MIB:,.2f}" if num_bytes >= harness.MIB / 100 else ""

    payload = row["payload_bytes"]
    operations = (mib(payload.get(name, 0)) for name in ("all_gather", "reduce_scatter", "all_reduce"))
    return [
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


def page(found: dict[str, Any]) -> str:
    """The table in Markdown, with what its columns mean."""
    shape = Shape(**found["shape"])
    lines = [
        "# What processes exchange in an optimizer step",
        "",
        f"{harness.machine_line(found)}. Written by `scripts/benchmarks/communication.py`.",
        "",
        f"A Llama of {shape.num_parameters:,} parameters, {shape.num_layers} layers, AdamW; CPU processes over gloo on "
        f"loopback; micro-batches of 1 × {Case(Division()).length} tokens; fp32 where nothing else is said. MiB of one "
        "process and one step; percentages: by how much the formulas of `scripts/benchmarks/scaling.py` say more.",
        "",
        *TABLE.lines(map(cells, found["rows"])),
        "",
        "- all-gather, reduce-scatter, all-reduce: sizes of the tensors that these were given: after gathering, before "
        "reducing.",
        "- sent, counted: bytes over the loopback device of an own network namespace, per process, headers included, "
        "without what passes there when nothing is trained.",
        "- formula for gloo: its rings send (n − 1) ÷ n of what is gathered, and twice that of what is reduced: it "
        "implements reduce-scatter as an all-reduce. A ring that can reduce-scatter, such as NCCL's, sends half of "
        "that.",
        "- state: parameters, gradients, optimizer state and DDP's buckets, counted storage by storage before the "
        "update.",
    ]
    return "\n".join([*lines, ""])


def main() -> int:
    harness.report(Options, __doc__, measured, page, name="communication")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
