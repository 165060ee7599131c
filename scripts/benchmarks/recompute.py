"""What recomputation, offload and tiles save of memory and cost in time: paired rounds of forward and backward.

python scripts/benchmarks/recompute.py --output docs/results/recompute-cpu
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from train.config import Architecture  # noqa: E402
from train.extras.activations.tiling import mlps, tile_mlps  # noqa: E402
from train.extras.meter.tracker import PARAMETERS, StorageTracker  # noqa: E402
from train.loss import ModelWithLoss  # noqa: E402
from train.model import build_model  # noqa: E402
from train.outputs_log import hardware, versions  # noqa: E402
from train.tokenization import load_tokenizer  # noqa: E402

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
MIB = 2**20


def main() -> int:
    options = _options()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if options.threads:
        torch.set_num_threads(options.threads)
    rungs = {name: settings for name, settings in RUNGS.items() if device.type != "cpu" or "offload" not in name}
    steps = {name: _step(options, settings, device) for name, settings in rungs.items()}
    print(f"{len(steps)} rungs on {device}", flush=True)
    found = {
        "model": measured(steps, device, options.rounds),
        "mlp": measured(_mlp_steps(options, device), device, options.rounds),
        "shape": {k: v for k, v in vars(options).items() if k != "output"},
        "device": device.type,
        "hardware": hardware(),
        "versions": versions(),
    }
    text = page(found)
    print(text)
    if options.output:
        options.output.with_suffix(".json").write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
        options.output.with_suffix(".md").write_text(text, encoding="utf-8")
    return 0


def _options() -> argparse.Namespace:
    on_card = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, on_cpu, on_cuda in (
        ("hidden_size", 256, 1024),
        ("intermediate_size", 1024, 4096),
        ("num_hidden_layers", 4, 16),
        ("length", 2048, 32768),
        ("mlp_tokens", 8192, 65536),
        ("rounds", 5, 10),
        ("threads", 0, 0),
    ):
        parser.add_argument(f"--{name}", type=int, default=on_cuda if on_card else on_cpu)
    parser.add_argument("--note", default="", help="a sentence about the circumstances, for the page")
    parser.add_argument("--output", type=Path, help="write OUTPUT.json and OUTPUT.md")
    return parser.parse_args()


def _step(options: argparse.Namespace, settings: dict[str, Any], device: torch.device) -> tuple[nn.Module, Any]:
    """A model and its forward and backward; bf16 autocast on a card."""
    torch.manual_seed(0)
    shape = {
        "model_type": "llama",
        "hidden_size": options.hidden_size,
        "intermediate_size": options.intermediate_size,
        "num_hidden_layers": options.num_hidden_layers,
        "num_attention_heads": options.hidden_size // 64,
        "num_key_value_heads": options.hidden_size // 64,
        "vocab_size": 512,  # small, so that logits are not what is seen
    }
    config = Architecture(model_config=shape, **settings)
    network = build_model(config, "AutoModelForCausalLM", load_tokenizer("bytes", ()), options.length)
    model = ModelWithLoss(network, loss="chunked").to(device).train()
    ids = torch.randint(3, 512, (1, options.length), generator=torch.Generator().manual_seed(0)).to(device)

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else nullcontext():
            loss = model({"input_ids": ids}, ids)
        loss.backward()

    return model, step


def _mlp_steps(options: argparse.Namespace, device: torch.device) -> dict[str, tuple[nn.Module, Any]]:
    """One MLP alone, whole and in tiles."""
    from transformers import LlamaConfig, LlamaForCausalLM

    steps = {}
    for name in ("whole", "tiled"):
        torch.manual_seed(0)
        shape = {"hidden_size": options.hidden_size, "intermediate_size": options.intermediate_size}
        model = LlamaForCausalLM(LlamaConfig(**shape, num_hidden_layers=1, num_attention_heads=4, vocab_size=8))
        if name == "tiled":
            tile_mlps(model)
        mlp = mlps_of(model).to(device, torch.bfloat16 if device.type == "cuda" else torch.float32)
        hidden = torch.randn(
            1, options.mlp_tokens, options.hidden_size, device=device, dtype=next(mlp.parameters()).dtype
        )
        hidden.requires_grad_()
        steps[name] = (mlp, _mlp_step(mlp, hidden))
    return steps


def mlps_of(model: nn.Module) -> nn.Module:
    """The model's one MLP."""
    (mlp,) = mlps(model)
    return mlp


def _mlp_step(mlp: nn.Module, hidden: Tensor) -> Callable[[], None]:
    def step() -> None:
        hidden.grad = None
        mlp(hidden).backward(hidden.detach())

    return step


def measured(steps: dict[str, tuple[nn.Module, Any]], device: torch.device, rounds: int) -> list[dict[str, Any]]:
    """Of each step the peak beside weights and their gradients, and the time of each round, steps taking turns."""
    peaks = {}
    for name, (model, step) in steps.items():
        step()  # gradients, and what is made once
        peaks[name] = _peak_bytes(model, step, device)
        print(f"  {name}: {peaks[name] / MIB:.1f} MiB", flush=True)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, (_, step) in steps.items():
            _wait_for(device)
            started = time.perf_counter()
            step()
            _wait_for(device)
            seconds[name].append(time.perf_counter() - started)
    first = next(iter(steps))
    return [
        {
            "name": name,
            "peak_bytes": peaks[name],
            "seconds": statistics.median(seconds[name]),
            "against_first": statistics.median(
                [own / other for own, other in zip(seconds[name], seconds[first], strict=True)]
            ),
        }
        for name in steps
    ]


def _peak_bytes(model: nn.Module, step: Callable[[], None], device: torch.device) -> int:
    gc.collect()
    if device.type == "cuda":
        _wait_for(device)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        _wait_for(device)
        return torch.cuda.max_memory_allocated() - before
    with StorageTracker("cpu") as tracker:
        tracker.tag(PARAMETERS, [*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters())])
        before = tracker.live_bytes
        tracker.reset_peak()
        step()
        return tracker.peak.num_bytes - before


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def page(found: dict[str, Any]) -> str:
    """The figures as a page."""
    shape, machine, installed = found["shape"], found["hardware"], found["versions"]
    where = ", ".join(gpu["name"] for gpu in machine["gpus"]) or f"{machine['cpu']}, {machine['cpu_cores']} cores"
    precision = "bf16 autocast" if found["device"] == "cuda" else "fp32"
    lines = [
        "# What recomputation, offload and tiles save and cost",
        "",
        f"A Llama of {shape['num_hidden_layers']} layers, {shape['hidden_size']} wide, MLP "
        f"{shape['intermediate_size']}, 1 × {shape['length']:,} tokens, {precision}. Memory is the peak of forward "
        "and backward beside weights and gradients; time is their median over "
        f"{shape['rounds']} rounds in which all take turns.",
        "",
        *_table(found["model"]),
        "",
        f"One MLP alone, {shape['mlp_tokens']:,} tokens:",
        "",
        *_table(found["mlp"]),
        "",
        f"- {where}; python {machine['python']}, torch {installed['torch']}, transformers {installed['transformers']}.",
        *([f"- {shape['note']}"] if shape["note"] else []),
        "",
    ]
    return "\n".join(lines)


def _table(rows: list[dict[str, Any]]) -> list[str]:
    base = rows[0]["peak_bytes"]
    return [
        f"| | memory, MiB | of {rows[0]['name']} | time, ms | against {rows[0]['name']} |",
        "| --- | ---: | ---: | ---: | ---: |",
        *(
            f"| {row['name']} | {row['peak_bytes'] / MIB:,.1f} | {row['peak_bytes'] / base:.2f} "
            f"| {1e3 * row['seconds']:,.1f} | {row['against_first']:.2f} |"
            for row in rows
        ),
    ]


if __name__ == "__main__":
    sys.exit(main())
