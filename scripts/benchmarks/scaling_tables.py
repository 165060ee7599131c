"""Writes the tables of docs/scaling.md: formulas and predicted memory for devices that this machine does not have.

    python scripts/benchmarks/scaling_tables.py                        # prints the tables' page
    python scripts/benchmarks/scaling_tables.py --write                # writes the tables
    python scripts/benchmarks/scaling_tables.py --predict --write      # predicts missing memory first: some minutes

The script replaces the lines between ``<!-- table: NAME -->`` and ``<!-- end -->``.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.benchmarks import building, harness
from scripts.benchmarks.cluster import Cluster, StepTime, step_time
from scripts.benchmarks.scaling import Division, Shape, Work, sent_bytes, shape_of, state_of
from train.memory.devices import find_device, nccl_buffer_bytes
from train.memory.predict import Predictor
from train.memory.question import MARGIN, job_of, target_of

PAGE = harness.ROOT / "docs" / "scaling.md"
MEASURED = harness.RESULTS / "communication-cpu.json"
MEMORY = harness.RESULTS / "scaling-memory.json"
DETAILS = harness.RESULTS / "scaling-predicted.md"
DEVICE = "h100"
MODELS: dict[str, dict[str, Any]] = {
    "1B": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
           "num_key_value_heads": 8, "tie_word_embeddings": True},
    "8B": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
           "num_key_value_heads": 8},
    "70B": {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
            "num_key_value_heads": 8},
}  # fmt: skip
VOCABULARY = 128256
TOKENS = (4096, 131072)
SIZES = (8, 64, 1024)
PREDICTED_SIZES = (8, 64)
"""A prediction for 1,024 takes minutes and differs only in the training state."""
TRIED_TOKENS = [2**n for n in range(8, 21)]
LITTLE = 0.02
"""Share of its computation that a step may wait."""


@dataclass(frozen=True)
class Options(harness.Options):
    """Makes the tables of docs/scaling.md again."""

    predict: bool = False
    """First predict, and write, the memory that these versions have not predicted yet."""
    only: str = ""
    """With --predict: only what contains one of these, with commas between them, such as '1B,70B 4096 fsdp2 64'."""


def architecture(model: str) -> dict[str, Any]:
    return {"model_type": "llama", "vocab_size": VOCABULARY, "max_position_embeddings": TOKENS[-1], **MODELS[model]}


def shape(model: str) -> Shape:
    """The shape of a Llama with the published sizes, built without weights."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    with torch.device("meta"):
        return shape_of(AutoModelForCausalLM.from_config(LlamaConfig(**architecture(model))))


# ---- memory, predicted by the planner --------------------------------------------------------------------------------


def known_memory(versions: dict[str, str] | None = None) -> dict[str, int]:
    """By case, what is known, if ``versions`` are those of the file."""
    found = json.loads(MEMORY.read_text()) if MEMORY.exists() else {}
    return found["least_reserved_bytes"] if versions in (None, found.get("versions")) else {}


def predict_memory(only: str) -> None:
    """Writes what each device has to reserve, for DDP and FSDP2; keeps what the same versions have predicted."""
    building.use_expandable_segments()  # as in a run
    versions = harness.about()["versions"]
    known = known_memory(versions)
    with Predictor() as predictor:
        for model, tokens, sharding, size in predicted_cases():
            name = f"{model} {tokens} {sharding} {size}"
            if name in known or not any(part in name for part in only.split(",")):
                continue
            config = building.config_of(
                {
                    "model_config": architecture(model),
                    "tokenizer": "bytes",
                    "max_length": tokens,
                    "micro_batch_size": 1,
                    "gradient_accumulation_steps": 1,
                    "mixed_precision": "bf16",
                    "gradient_checkpointing": "full",
                    "loss": "chunked",
                }
            )
            target = target_of(find_device(DEVICE))
            job = job_of(config, target, VOCABULARY, world_size=size)
            job = replace(job, sharding=sharding, eval_batch_size=None)
            known[name] = predictor.predict(job).least_reserved_bytes
            print(f"{name}: {known[name] / harness.GIB:.1f} GiB", flush=True)
            harness.write_figures(MEMORY, {"device": DEVICE, "versions": versions, "least_reserved_bytes": known})


def predicted_cases() -> Iterator[tuple[str, int, str, int]]:
    """(model, tokens, sharding, devices)."""
    for model in MODELS:
        for tokens in TOKENS:
            yield model, tokens, "ddp", 8
            yield from ((model, tokens, "fsdp2", size) for size in PREDICTED_SIZES)


# ---- tables ----------------------------------------------------------------------------------------------------------


def ways(num_devices: int) -> dict[str, Division]:
    """The launch files compared on ``num_devices``, by name."""
    shared, groups = 8, num_devices // 8  # a sequence, or a layer, belongs to the devices of one node
    return {
        "`ddp`, `--on_oom split`": Division("ddp", replicas=num_devices, recovers=True),
        "`ddp` (the default)": Division("ddp", replicas=num_devices),
        "`fsdp2`": Division("fsdp2", shards=num_devices),
        "`fsdp2`, sharded within nodes": Division("fsdp2", replicas=groups, shards=shared),
        "`fsdp2_offload`": Division("fsdp2", shards=num_devices, offloads=True),
        "`deepspeed_zero2`": Division("zero2", shards=num_devices),
        "`fsdp2_context_parallel`": Division("fsdp2", shards=groups, context=shared),
        "`ulysses_sequence_parallel`": Division("zero3", shards=groups, sequence=shared),
        "`tensor_parallel`": Division("ddp", replicas=groups, tensor=shared),
    }


def took(shape: Shape, division: Division, tokens: int) -> tuple[Work, StepTime]:
    """A step of one micro-batch of one sequence, ``tokens`` to each device."""
    work = Work(tokens * division.tensor, checkpointing="full")
    length = tokens * division.context * division.sequence
    return work, step_time(shape, division, work, length, Cluster())


def has_room(shape: Shape, division: Division, work: Work) -> bool:
    """Whether training state and the inputs of the layers fit on a device; other activations are not counted."""
    inputs = shape.num_layers * work.tokens * shape.hidden_size * work.product_bytes
    return state_of(shape, division, work).total + inputs < room_bytes()


def room_bytes() -> float:
    """Bytes that the planner would use of a device."""
    device = find_device(DEVICE)
    return device.total_bytes - device.context_bytes - MARGIN * device.total_bytes


def head_of(shapes: dict[str, Shape], first: str) -> list[str]:
    columns = [f"{model}: {size:,}" if size == SIZES[0] else f"{size:,}" for model in shapes for size in SIZES]
    return [f"| {first} | " + " | ".join(columns) + " |", "| --- " + "| ---: " * len(columns) + "|"]


def slowdown_table(shapes: dict[str, Shape], tokens: int) -> list[str]:
    """How much longer a step takes than its computation alone, as a factor."""
    rows = head_of(shapes, "file; model: GPUs")
    for name in ways(SIZES[0]):
        cells = [name]
        for shape in shapes.values():
            for size in SIZES:
                work, time_ = took(shape, ways(size)[name], tokens)
                cells.append(f"{time_.slowdown:.2f}" if has_room(shape, ways(size)[name], work) else "–")
        rows.append("| " + " | ".join(cells) + " |")
    return rows


def hiding_table(shapes: dict[str, Shape]) -> list[str]:
    """The number of tokens from which a step waits for less than :data:`LITTLE`."""
    rows = head_of(shapes, "file; model: GPUs")
    for name in ways(SIZES[0]):
        cells = [name]
        for shape in shapes.values():
            for size in SIZES:
                division = ways(size)[name]
                enough = [n for n in TRIED_TOKENS if took(shape, division, n)[1].slowdown < 1 + LITTLE]
                room = [n for n in TRIED_TOKENS if has_room(shape, division, took(shape, division, n)[0])]
                if not room or (enough and enough[0] > room[-1]):
                    cells.append("–")  # where waiting ends, the step does not fit
                else:
                    cells.append(f"{enough[0]:,}" if enough else f"> {room[-1]:,}")
        rows.append("| " + " | ".join(cells) + " |")
    return rows


def details(shapes: dict[str, Shape]) -> list[str]:
    """Bytes and seconds behind the other tables."""
    lines = [
        "# Predicted exchange of a step: bytes and seconds",
        "",
        "Predicted, not measured; assumptions and models: ",
    ]
    lines[-1] += "[scaling.md](../scaling.md). Written by `scripts/benchmarks/scaling_tables.py`."
    for tokens in TOKENS:
        head = ["| model | file | computes, s |", "| --- | --- | ---: |"]
        for size in SIZES:
            head[0] += f" {size:,} GPUs: GiB sent | exchange, s | waits, s |"
            head[1] += " ---: | ---: | ---: |"
        lines += ["", f"## {tokens:,} tokens per GPU", "", *head]
        for model, shape in shapes.items():
            for name in ways(SIZES[0]):
                cells = [model, name, figure(took(shape, ways(SIZES[0])[name], tokens)[1].compute)]
                for size in SIZES:
                    work, time_ = took(shape, ways(size)[name], tokens)
                    sent = sent_bytes(shape, ways(size)[name], work) / harness.GIB
                    cells += [figure(sent), figure(time_.exchange), figure(time_.waiting)]
                lines.append("| " + " | ".join(cells) + " |")
    return lines


def memory_table(shapes: dict[str, Shape]) -> list[str]:
    """GiB that a step needs on each device: allocator, context and NCCL; **bold** where it fits."""
    known = known_memory()
    head = ["| model | tokens per GPU | ddp |" + "".join(f" fsdp2, {size:,} GPUs |" for size in SIZES)]
    head.append("| --- | ---: | ---: |" + " ---: |" * len(SIZES))
    rows = []
    for model, shape in shapes.items():
        for tokens in TOKENS:
            work, cells = Work(tokens), [model, f"{tokens:,}"]
            for sharding, size in (("ddp", 8), *(("fsdp2", size) for size in SIZES)):
                predicted = min(size, PREDICTED_SIZES[-1])
                peak = known.get(f"{model} {tokens} {sharding} {predicted}")
                if peak is None:  # not predicted, because state and inputs of the layers are too large already
                    division = Division("ddp", replicas=size) if sharding == "ddp" else Division("fsdp2", shards=size)
                    inputs = shape.num_layers * tokens * shape.hidden_size * work.product_bytes
                    peak, sign = state_of(shape, division, work).total + inputs, "> "
                else:
                    states = [state_of(shape, Division("fsdp2", shards=n), work).total for n in (predicted, size)]
                    peak, sign = peak - states[0] + states[1], ""
                needed = peak + nccl_buffer_bytes(size)
                text = f"{sign}{needed / harness.GIB:,.1f}"
                cells.append(f"**{text}**" if not sign and needed <= room_bytes() else text)
            rows.append("| " + " | ".join(cells) + " |")
    return [*head, *rows]


def check_table() -> list[str]:
    """Formulas next to measurements of processes that ran."""
    from scripts.benchmarks.communication import TABLE, cells

    found = json.loads(MEASURED.read_text())
    return [*TABLE.lines(map(cells, found["rows"])), "", f"Measured on {harness.machine_line(found)}."]


def model_table(shapes: dict[str, Shape]) -> list[str]:
    """What the models of the other tables are."""
    head = ["| model | P | in layers | L | H | heads, of keys | head | computes 4,096 tokens in | 131,072 in |"]
    head.append("| --- " + "| ---: " * 8 + "|")
    return head + [
        f"| {name} | {s.num_parameters / 1e9:.2f} · 10⁹ | {s.layer_parameters / s.num_parameters:.0%} | {s.num_layers} "
        f"| {s.hidden_size:,} | {s.num_heads}, {s.num_key_value_heads} | {s.head_size} | "
        + " | ".join(f"{figure(took(s, Division(), tokens)[1].compute)} s" for tokens in TOKENS)
        + " |"
        for name, s in shapes.items()
    ]


def figure(value: float) -> str:
    """Two or three digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2g}"


def rendered(page: str, shapes: dict[str, Shape]) -> str:
    """``page`` with new tables."""
    tables: dict[str, Callable[[], list[str]]] = {
        "check": check_table,
        "models": lambda: model_table(shapes),
        "hiding": lambda: hiding_table(shapes),
        "slowdown 4096": lambda: slowdown_table(shapes, 4096),
        "slowdown 131072": lambda: slowdown_table(shapes, 131072),
        "memory": lambda: memory_table(shapes),
    }

    def fill(match: re.Match[str]) -> str:
        return "\n".join([f"<!-- table: {match[1]} -->", "", *tables[match[1]](), "", "<!-- end -->"])

    return re.sub(r"<!-- table: (.+?) -->.*?<!-- end -->", fill, page, flags=re.DOTALL)


def main() -> int:
    options = harness.read_options(Options, __doc__)
    if options.predict:
        predict_memory(options.only)
    shapes = {model: shape(model) for model in MODELS}
    text = rendered(PAGE.read_text(encoding="utf-8"), shapes)
    print(text)
    if options.write:
        PAGE.write_text(text, encoding="utf-8")
        DETAILS.write_text("\n".join(details(shapes)) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
