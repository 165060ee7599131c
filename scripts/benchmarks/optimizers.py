"""What each optimizer and each of its options keeps, how long its step takes, and how well bf16 weights learn.

python scripts/benchmarks/optimizers.py --output docs/results/optimizers-cpu

The same on a card (a larger model; the offload is real there). Options whose package is missing are left out, and
named. Losses are those of a byte-level language model on Python's own source code, the same batches for each.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import math
import statistics
import sys
import sysconfig
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import transformers  # noqa: E402
from accelerate import Accelerator  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from train.config import Optimization  # noqa: E402
from train.extras.meter.tracker import StorageTracker  # noqa: E402
from train.loss import ModelWithLoss  # noqa: E402
from train.optim import build_optimizer, learning_rate_at, set_learning_rate, step_function  # noqa: E402
from train.records import MicroBatch  # noqa: E402

IN_BACKWARD = {"optimizer_in_backward": True, "max_grad_norm": None}
KEPT: dict[str, tuple[str, dict[str, Any]]] = {
    "adamw": ("float32", {}),
    "adamw, offload": ("float32", {"optimizer_offload": True}),
    "adamw, in backward": ("float32", IN_BACKWARD),
    "adamw, offload, in backward": ("float32", {"optimizer_offload": True, **IN_BACKWARD}),
    "adamw_8bit": ("float32", {"optimizer": "adamw_8bit"}),
    "adamw_8bit, in backward": ("float32", {"optimizer": "adamw_8bit", **IN_BACKWARD}),
    "adafactor": ("float32", {"optimizer": "adafactor"}),
    "sgd": ("float32", {"optimizer": "sgd"}),
    "adamw, nearest": ("bfloat16", {}),
    "adamw, stochastic": ("bfloat16", {"bf16_update": "stochastic"}),
    "adamw, kahan": ("bfloat16", {"bf16_update": "kahan"}),
    "adamw, offload ": ("bfloat16", {"optimizer_offload": True}),
    "adamw, kahan, in backward": ("bfloat16", {"bf16_update": "kahan", **IN_BACKWARD}),
    "adamw_8bit ": ("bfloat16", {"optimizer": "adamw_8bit"}),
    "adamw_8bit, in backward ": ("bfloat16", {"optimizer": "adamw_8bit", **IN_BACKWARD}),
}
LEARNS: dict[str, tuple[str, dict[str, Any]]] = {
    "fp32 weights": ("float32", {}),
    "bf16 weights, fp32 originals on the host (offload)": ("bfloat16", {"optimizer_offload": True}),
    "bf16 weights, nearest": ("bfloat16", {}),
    "bf16 weights, stochastic": ("bfloat16", {"bf16_update": "stochastic"}),
    "bf16 weights, kahan": ("bfloat16", {"bf16_update": "kahan"}),
    "fp32 weights, adamw_8bit": ("float32", {"optimizer": "adamw_8bit"}),
}
CUDA = torch.device("cuda")


class Training:
    """A byte-level Llama of ``width`` and its optimizer.

    Args:
        offloads: build what offloads also on a CPU, where host and device are the same.
    """

    def __init__(
        self, accelerator: Accelerator, dtype: str, config: Optimization, width: int, layers: int, offloads: bool
    ) -> None:
        torch.manual_seed(0)
        self.accelerator, self.config = accelerator, config
        network: nn.Module = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                vocab_size=256,
                hidden_size=width,
                intermediate_size=3 * width,
                num_hidden_layers=layers,
                num_attention_heads=max(1, width // 64),
                use_cache=False,
            )
        )
        self.network = nn.Module.to(network, getattr(torch, dtype))
        optimizer = build_optimizer(self.network, config, CUDA if offloads else accelerator.device)
        self.model, self.optimizer = accelerator.prepare(ModelWithLoss(self.network), optimizer)
        self.num_parameters = sum(p.numel() for p in self.network.parameters())

    def step(self, batch: MicroBatch) -> float:
        """One step; its summed loss, with the device at rest."""
        step = step_function(self.config)
        return step(self.accelerator, self.model, self.optimizer, [batch], self.config).loss_sum.item()

    def state_bytes(self, device_type: str) -> int:
        states = self.optimizer.optimizer.state.values()
        tensors = [v for state in states for v in state.values() if isinstance(v, Tensor)]
        tensors += getattr(self.optimizer.optimizer, "_weights", {}).values()  # fp32 copies of an offload
        return sum(tensor.nbytes for tensor in tensors if tensor.device.type == device_type)


def batch_of(tokens: Tensor, starts: Tensor, length: int) -> MicroBatch:
    ids = torch.stack([tokens[start : start + length + 1] for start in starts.tolist()]).long()
    return MicroBatch({"input_ids": ids[:, :-1]}, ids[:, 1:].contiguous(), ids[:, 1:].numel(), (), ids[:, 1:].numel())


def source_code(num_bytes: int = 4_000_000) -> Tensor:
    """(bytes,) uint8 of the standard library's modules, in the order of their names."""
    paths = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in paths)[:num_bytes]), dtype=torch.uint8)


def measure_kept(accelerator: Accelerator, name: str, tokens: Tensor, width: int, layers: int) -> dict[str, Any]:
    """Bytes and seconds of the steps of ``KEPT[name]``."""
    dtype, settings = KEPT[name]
    device = accelerator.device
    training = Training(accelerator, dtype, Optimization(**settings), width, layers, offloads=False)
    batch = batch_of(tokens, torch.tensor([0]), 16)
    seconds = []
    for number in range(9):
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        training.step(batch)
        if device.type == "cuda":
            torch.cuda.synchronize()
        if number >= 2:
            seconds.append(time.perf_counter() - started)
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated()
    else:
        with StorageTracker("cpu") as tracker:
            state = [v for s in training.optimizer.optimizer.state.values() for v in s.values()]
            tracker.tag("optimizer state", state)
            tracker.tag("parameters", training.network.parameters())
            tracker.reset_peak()
            training.step(batch)
        peak = tracker.peak.num_bytes
    count = training.num_parameters
    return {
        "optimizer": name.strip(),
        "weights": dtype,
        "num_parameters": count,
        "state_bytes_per_parameter": training.state_bytes(device.type) / count,
        "host_bytes_per_parameter": training.state_bytes("cpu") / count if device.type == "cuda" else 0.0,
        "peak_bytes_per_parameter": peak / count,
        "seconds_per_step": statistics.median(seconds),
    }


def measure_learning(
    accelerator: Accelerator, name: str, tokens: Tensor, steps: int, learning_rate: float, width: int, layers: int
) -> dict[str, Any]:
    """Nats per byte that ``LEARNS[name]`` reaches after ``steps`` with a cosine schedule; mean of the last tenth."""
    dtype, settings = LEARNS[name]
    config = Optimization(
        learning_rate=learning_rate, lr_scheduler="cosine", warmup_ratio=0.05, weight_decay=0.1, adam_beta2=0.95
    )
    training = Training(accelerator, dtype, replace(config, **settings), width, layers, offloads=True)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for step in range(steps):
        set_learning_rate(training.optimizer, learning_rate_at(step, steps, learning_rate, config))
        starts = torch.randint(len(tokens) - 300, (4,), generator=generator)
        batch = batch_of(tokens, starts, 64)
        losses.append(training.step(batch) / batch.num_targets)
    last = losses[-max(1, steps // 10) :]
    return {"variant": name, "learning_rate": learning_rate, "steps": steps, "loss": statistics.fmean(last)}


def available(settings: dict[str, Any], device: torch.device, offloads: bool) -> str | None:
    """Why ``settings`` cannot be measured here; None: they can."""
    if settings.get("optimizer") == "adamw_8bit" and importlib.util.find_spec("bitsandbytes") is None:
        return "bitsandbytes is not installed"
    if settings.get("optimizer_offload") and device.type == "cpu" and not offloads:
        return "on a CPU it changes nothing"
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="write OUTPUT.json and OUTPUT.md")
    parser.add_argument("--steps", type=int, default=200, help="of each training")
    parser.add_argument("--learning_rates", type=float, nargs="+", default=[1e-4])
    parser.add_argument("--threads", type=int, help="of PyTorch on a CPU")
    parser.add_argument("--remark", default="", help="a sentence on the circumstances, for the page")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    accelerator, tokens = Accelerator(), source_code()
    device = accelerator.device
    shape = (1024, 24) if device.type == "cuda" else (256, 4)
    kept, learnt, left_out = [], [], []
    for name, (_, settings) in KEPT.items():
        reason = available(settings, device, offloads=False)
        if reason is not None:
            left_out.append(f"{name.strip()}: {reason}")
            continue
        kept.append(measure_kept(accelerator, name, tokens, *shape))
        print(kept_line(kept[-1]), flush=True)
        gc.collect()
    for learning_rate in options.learning_rates:
        for name, (_, settings) in LEARNS.items():
            if available(settings, device, offloads=True) is None:
                small = (accelerator, name, tokens, options.steps, learning_rate, 64, 2)
                learnt.append(measure_learning(*small))
                print(learnt_line(learnt[-1]), flush=True)
    if options.output:
        write(options.output, kept, learnt, left_out, options.threads, options.remark)
    return 0


def kept_line(row: dict[str, Any]) -> str:
    """A row of the first table."""
    sizes = (row[f"{kind}_bytes_per_parameter"] for kind in ("state", "host", "peak"))
    milliseconds = 1e3 * row["seconds_per_step"]
    cells = [row["optimizer"], row["weights"], *(f"{size:.2f}" for size in sizes), f"{milliseconds:,.1f}"]
    return f"| {' | '.join(cells)} |"


def learnt_line(row: dict[str, Any]) -> str:
    """A row of the second table."""
    bits = row["loss"] / math.log(2)
    return f"| {row['variant']} | {row['learning_rate']:g} | {row['loss']:.4f} | {bits:.3f} |"


def write(
    path: Path,
    kept: list[dict[str, Any]],
    learnt: list[dict[str, Any]],
    left_out: list[str],
    threads: int | None,
    remark: str,
) -> None:
    """JSON and tables."""
    from train.outputs_log import hardware, versions

    machine: dict[str, Any] = {"hardware": hardware(), "versions": versions(), "threads": threads, "remark": remark}
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {**machine, "kept": kept, "learnt": learnt, "left_out": left_out}
    path.with_suffix(".json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    used = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    found, gpus = machine["hardware"], [gpu["name"] for gpu in machine["hardware"]["gpus"]]
    where = f"{found['cpu']}, {found['cpu_cores']} cores{f', {threads} used' if threads else ''}"
    lines = [
        "# Optimizers: what they keep, how long they take, what they reach",
        "",
        f"{', '.join(gpus) or 'No GPU'}; {where}; {used}. {remark} Written by `scripts/benchmarks/optimizers.py`.",
        "",
        f"## Bytes per parameter and time of a step, {kept[0]['num_parameters'] / 1e6:.1f} M parameters",
        "",
        "One example of 16 tokens, medians of seven whole steps. Peak: weights, gradients, state, and what the step "
        "takes beside them.",
        "",
        "| optimizer | weights | state | state in host memory | peak | ms per step |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
        *map(kept_line, kept),
        "",
        *([f"Left out: {'; '.join(left_out)}.", ""] if left_out else []),
        f"## Loss of a small language model after {learnt[0]['steps']} steps",
        "",
        "Bytes of Python's source code, 4 × 64 of them a step, 2 layers of 64; the same weights to begin with and the "
        "same batches. Mean of the last tenth of the steps.",
        "",
        "| | learning rate | nats per byte | bits per byte |",
        "| --- | ---: | ---: | ---: |",
        *map(learnt_line, learnt),
    ]
    path.with_suffix(".md").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    raise SystemExit(main())
