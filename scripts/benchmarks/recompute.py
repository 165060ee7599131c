"""What recomputation, offload and tiles save of memory and cost in time: paired rounds of forward and backward.

python scripts/benchmarks/recompute.py --write
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.benchmarks import building, harness

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    Steps = dict[str, tuple[nn.Module, Callable[[], None]]]
    """A module and its forward and backward, by name."""

FULL, TILED = {"gradient_checkpointing": "full"}, {"tiled_mlp": True}
SELECTIVE, OFFLOAD = {"gradient_checkpointing": "selective"}, {"gradient_checkpointing_offload": True}
SECOND = {"gradient_checkpointing_every_n_layers": 2}
RUNGS: dict[str, dict[str, Any]] = {
    "none": {},
    "tiled MLP": TILED,
    "selective every 2": SELECTIVE | SECOND,
    "selective": SELECTIVE,
    "full every 2": FULL | SECOND,
    "full": FULL,
    "full, tiled MLP": FULL | TILED,
    "full, offload": FULL | OFFLOAD,
    "full, offload, tiled MLP": FULL | OFFLOAD | TILED,
}
ON_CPU = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4, "length": 2048, "mlp_tokens": 8192,
          "rounds": 5}  # fmt: skip
ON_CARD = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 16, "length": 32768,
           "mlp_tokens": 65536, "rounds": 3}  # fmt: skip


@dataclass(frozen=True)
class Options(harness.Options):
    """Compares activation checkpointing, offload and tiled MLPs. The defaults of the shape depend on the device."""

    hidden_size: int | None = None
    """A multiple of 64."""
    intermediate_size: int | None = None
    num_hidden_layers: int | None = None
    length: int | None = None
    mlp_tokens: int | None = None
    rounds: int | None = None
    threads: int = 0
    """Of torch on a CPU; 0: as torch chooses."""
    note: str = ""
    """A sentence about the circumstances, for the page."""


def measured(options: Options) -> dict[str, Any]:
    """Memory and time of each rung, and of one MLP alone."""
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if options.threads:
        torch.set_num_threads(options.threads)
    given = {name: asdict(options)[name] for name in Options.__annotations__}
    defaults = ON_CARD if device.type == "cuda" else ON_CPU
    shape: dict[str, Any] = {name: defaults[name] if value is None else value for name, value in given.items()}
    rungs = {name: settings for name, settings in RUNGS.items() if device.type != "cpu" or "offload" not in name}
    steps = {name: model_step(shape, settings, device) for name, settings in rungs.items()}
    print(f"{len(steps)} rungs on {device}", flush=True)
    return {
        "model": compared(steps, device, shape["rounds"]),
        "mlp": compared(mlp_steps(shape, device), device, shape["rounds"]),
        "shape": shape,
        "device": device.type,
    }


def model_step(
    shape: dict[str, Any], settings: dict[str, Any], device: torch.device
) -> tuple[nn.Module, Callable[[], None]]:
    """A model and its forward and backward; bf16 autocast on a card."""
    import torch

    torch.manual_seed(0)
    model_config = {
        "model_type": "llama",
        **{name: shape[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers")},
        "num_attention_heads": shape["hidden_size"] // 64,
        "num_key_value_heads": shape["hidden_size"] // 64,
        "vocab_size": 512,  # small, so that logits do not hide the rest
    }
    network = building.causal_lm(building.config_of({"model_config": model_config, **settings}), shape["length"])
    model = building.with_loss(network, "chunked").to(device).train()
    ids = torch.randint(3, 512, (1, shape["length"]), generator=torch.Generator().manual_seed(0)).to(device)

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else nullcontext():
            loss = model({"input_ids": ids}, ids)
        loss.backward()

    return model, step


def mlp_steps(shape: dict[str, Any], device: torch.device) -> Steps:
    """One MLP alone, whole and in tiles."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from train.extras.activations.tiling import parts_to_tile, tile_mlps

    steps: Steps = {}
    for name in ("whole", "tiled"):
        torch.manual_seed(0)
        sizes = {name: shape[name] for name in ("hidden_size", "intermediate_size")}
        model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=1, num_attention_heads=4, vocab_size=8))
        if name == "tiled":
            tile_mlps(model)
        [mlp] = parts_to_tile(model)[0]
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        mlp = mlp.to(device, dtype)
        hidden = torch.randn(1, shape["mlp_tokens"], shape["hidden_size"], device=device, dtype=dtype)
        steps[name] = (mlp, partial(forward_and_backward, mlp, hidden.requires_grad_()))
    return steps


def forward_and_backward(module: nn.Module, hidden: Tensor) -> None:
    """Of one module, with its input as the gradient."""
    hidden.grad = None
    module(hidden).backward(hidden.detach())


def compared(steps: Steps, device: torch.device, rounds: int) -> list[dict[str, Any]]:
    """Of each step the peak in addition to weights and their gradients, and its time, paired with the first's."""
    peaks = {}
    for name, (model, step) in steps.items():
        step()  # makes gradients, and what is made once
        held = [*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters() if p.grad is not None)]
        before, peak = harness.peak_bytes(step, {"parameters": held}, device)
        peaks[name] = peak - before
        print(f"  {name}: {peaks[name] / harness.MIB:.1f} MiB", flush=True)
    times = harness.paired_rounds({name: partial(harness.timed, step) for name, (_, step) in steps.items()}, rounds)
    first = next(iter(steps))
    return [
        {
            "name": name,
            "peak_bytes": peaks[name],
            "seconds": statistics.median(found[name] for found in times),
            "against_first": statistics.median(harness.ratios(times, name, first)),
        }
        for name in steps
    ]


def page(found: dict[str, Any]) -> str:
    """Both tables in Markdown."""
    shape = found["shape"]
    precision = "bf16 autocast" if found["device"] == "cuda" else "fp32"
    lines = [
        "# What recomputation, offload and tiles save and cost",
        "",
        f"A Llama of {shape['num_hidden_layers']} layers, {shape['hidden_size']} wide, MLP "
        f"{shape['intermediate_size']}, 1 × {shape['length']:,} tokens, {precision}. Memory is the peak of forward "
        "and backward, without weights and gradients; time is their median over "
        f"{shape['rounds']} rounds in which all take turns.",
        "",
        *table(found["model"]),
        "",
        f"One MLP alone, {shape['mlp_tokens']:,} tokens:",
        "",
        *table(found["mlp"]),
        "",
        f"- {harness.machine_line(found, names=('python', 'torch', 'transformers'))}.",
        *([f"- {shape['note']}"] if shape["note"] else []),
        "",
    ]
    return "\n".join(lines)


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Memory and time against the first row's."""
    first = rows[0]
    titles = ("", "memory, MiB", f"of {first['name']}", "time, ms", f"against {first['name']}")
    return harness.Table(titles, "lrrrr").lines(
        (
            row["name"],
            f"{row['peak_bytes'] / harness.MIB:,.1f}",
            f"{row['peak_bytes'] / first['peak_bytes']:.2f}",
            f"{1e3 * row['seconds']:,.1f}",
            f"{row['against_first']:.2f}",
        )
        for row in rows
    )


def main() -> int:
    harness.report(Options, __doc__, measured, page, name="recompute")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
