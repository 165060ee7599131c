"""What each optimizer and each of its options keeps, how long its step takes, and how well bf16 weights learn.

    python scripts/benchmarks/optimizers.py --write

On a card the model is larger, and offload moves memory. Options whose package is missing are left out and named. Losses
are those of a byte-level language model on Python's own source code, with the same batches for each.
"""

from __future__ import annotations

import gc
import importlib.util
import math
import statistics
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.benchmarks import building, harness

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator
    from torch import Tensor

    from train.records import MicroBatch

IN_BACKWARD = {"optimizer_in_backward": True, "max_grad_norm": None}
KEPT: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("adamw", "float32", {}),
    ("adamw, offload", "float32", {"optimizer_offload": True}),
    ("adamw, in backward", "float32", IN_BACKWARD),
    ("adamw, offload, in backward", "float32", {"optimizer_offload": True, **IN_BACKWARD}),
    ("adamw_8bit", "float32", {"optimizer": "adamw_8bit"}),
    ("adamw_8bit, in backward", "float32", {"optimizer": "adamw_8bit", **IN_BACKWARD}),
    ("adafactor", "float32", {"optimizer": "adafactor"}),
    ("sgd", "float32", {"optimizer": "sgd"}),
    ("adamw, nearest", "bfloat16", {}),
    ("adamw, stochastic", "bfloat16", {"bf16_update": "stochastic"}),
    ("adamw, kahan", "bfloat16", {"bf16_update": "kahan"}),
    ("adamw, offload", "bfloat16", {"optimizer_offload": True}),
    ("adamw, kahan, in backward", "bfloat16", {"bf16_update": "kahan", **IN_BACKWARD}),
    ("adamw_8bit", "bfloat16", {"optimizer": "adamw_8bit"}),
    ("adamw_8bit, in backward", "bfloat16", {"optimizer": "adamw_8bit", **IN_BACKWARD}),
)
"""Name, type of the weights, flags."""
LEARNS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("fp32 weights", "float32", {}),
    ("bf16 weights, fp32 originals on the host (offload)", "bfloat16", {"optimizer_offload": True}),
    ("bf16 weights, nearest", "bfloat16", {}),
    ("bf16 weights, stochastic", "bfloat16", {"bf16_update": "stochastic"}),
    ("bf16 weights, kahan", "bfloat16", {"bf16_update": "kahan"}),
    ("fp32 weights, adamw_8bit", "float32", {"optimizer": "adamw_8bit"}),
)
WARM_UP, TIMED = 2, 7
"""Steps."""
SCHEDULE = {"lr_scheduler": "cosine", "warmup_ratio": 0.05, "weight_decay": 0.1, "adam_beta2": 0.95}


@dataclass(frozen=True)
class Options(harness.Options):
    """Compares optimizers."""

    steps: int = 200
    """Of each training."""
    learning_rates: tuple[float, ...] = (1e-4,)
    threads: int | None = None
    """Of torch on a CPU."""
    remark: str = ""
    """A sentence about the circumstances, for the page."""


def measured(options: Options) -> dict[str, Any]:
    """Both tables, and what is left out."""
    import torch
    from accelerate import Accelerator

    if options.threads:
        torch.set_num_threads(options.threads)
    accelerator, tokens = Accelerator(), source_code()
    kept, learnt, left_out = [], [], []
    for name, dtype, settings in KEPT:
        reason = missing(settings, accelerator.device, offloads=False)
        if reason is not None:
            left_out.append(f"{name}: {reason}")
            continue
        kept.append(measure_kept(accelerator, name, dtype, settings, tokens))
        print(KEPT_TABLE.row(kept_cells(kept[-1])), flush=True)
        accelerator.free_memory()  # it keeps what it has prepared
        gc.collect()
    for rate in options.learning_rates:
        for name, dtype, settings in LEARNS:
            if missing(settings, accelerator.device, offloads=True) is None:
                scheduled = {**SCHEDULE, "learning_rate": rate, **settings}
                loss = final_loss(accelerator, dtype, scheduled, tokens, options.steps)
                learnt.append({"variant": name, "learning_rate": rate, "steps": options.steps, "loss": loss})
                print(LEARNT_TABLE.row(learnt_cells(learnt[-1])), flush=True)
    about = {"threads": options.threads, "remark": options.remark}
    return {**about, "kept": kept, "learnt": learnt, "left_out": left_out}


def llama(width: int, layers: int, dtype: str) -> Any:
    """A byte-level Llama with random weights, the same each time."""
    import torch
    from torch import nn
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=max(1, width // 64),
        use_cache=False,
    )
    return nn.Module.to(LlamaForCausalLM(config), getattr(torch, dtype))


def state_bytes(optimizer: Any, device_type: str) -> int:
    """Bytes of an optimizer's state on one kind of device."""
    from torch import Tensor

    tensors = [v for state in optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]
    tensors += getattr(optimizer, "_weights", {}).values()  # fp32 copies of an offload
    return sum(tensor.nbytes for tensor in tensors if tensor.device.type == device_type)


def batch_of(tokens: Tensor, starts: Sequence[int], length: int) -> MicroBatch:
    """Pieces of ``tokens``, each from one of ``starts`` on."""
    import torch

    return building.next_token_batch(torch.stack([tokens[start : start + length + 1] for start in starts]).long())


def source_code(num_bytes: int = 4_000_000) -> Tensor:
    """(bytes,) uint8 of the standard library's modules, in the order of their names."""
    import torch

    paths = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in paths)[:num_bytes]), dtype=torch.uint8)


def measure_kept(
    accelerator: Accelerator, name: str, dtype: str, settings: dict[str, Any], tokens: Tensor
) -> dict[str, Any]:
    """Bytes and seconds of an optimizer's steps."""
    device: Any = accelerator.device
    with device:
        network = llama(*((1024, 24) if device.type == "cuda" else (256, 4)), dtype)
    training = building.train_network(network, settings, accelerator, offloads=False)
    training.micro_batches = [batch_of(tokens, [0], 16)]
    seconds = [harness.timed(training.step) for _ in range(WARM_UP + TIMED)]
    optimizer = training.optimizer.optimizer
    held = {"optimizer state": [v for state in optimizer.state.values() for v in state.values()]}
    _, peak = harness.peak_bytes(training.step, {**held, "parameters": network.parameters()}, device)
    count = training.num_parameters
    return {
        "optimizer": name,
        "weights": dtype,
        "num_parameters": count,
        "state_bytes_per_parameter": state_bytes(optimizer, device.type) / count,
        "host_bytes_per_parameter": state_bytes(optimizer, "cpu") / count if device.type == "cuda" else 0.0,
        "peak_bytes_per_parameter": peak / count,
        "seconds_per_step": statistics.median(seconds[WARM_UP:]),
    }


def final_loss(accelerator: Accelerator, dtype: str, settings: dict[str, Any], tokens: Tensor, steps: int) -> float:
    """Nats per byte that a small model reaches; mean of the last tenth of the steps."""
    import torch

    training = building.train_network(llama(64, 2, dtype), settings, accelerator, offloads=True)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for step in range(steps):
        building.set_scheduled_rate(training, step, steps)
        starts = torch.randint(len(tokens) - 300, (4,), generator=generator)
        batch = batch_of(tokens, starts.tolist(), 64)
        losses.append(training.step([batch]).loss_sum.item() / batch.num_targets)
    return statistics.fmean(losses[-max(1, steps // 10) :])


def missing(settings: dict[str, Any], device: torch.device, offloads: bool) -> str | None:
    """Why ``settings`` cannot be measured here; None: they can."""
    if settings.get("optimizer") == "adamw_8bit" and importlib.util.find_spec("bitsandbytes") is None:
        return "bitsandbytes is not installed"
    if settings.get("optimizer_offload") and device.type == "cpu" and not offloads:
        return "on a CPU it changes nothing"
    return None


KEPT_TABLE = harness.Table(("optimizer", "weights", "state", "state in host memory", "peak", "ms per step"), "llrrrr")
LEARNT_TABLE = harness.Table(("", "learning rate", "nats per byte", "bits per byte"), "lrrr")


def kept_cells(row: dict[str, Any]) -> list[str]:
    """A row of the first table."""
    sizes = (row[f"{kind}_bytes_per_parameter"] for kind in ("state", "host", "peak"))
    milliseconds = 1e3 * row["seconds_per_step"]
    return [row["optimizer"], row["weights"], *(f"{size:.2f}" for size in sizes), f"{milliseconds:,.1f}"]


def learnt_cells(row: dict[str, Any]) -> list[str]:
    """A row of the second table."""
    return [row["variant"], f"{row['learning_rate']:g}", f"{row['loss']:.4f}", f"{row['loss'] / math.log(2):.3f}"]


def page(found: dict[str, Any]) -> str:
    """Both tables in Markdown."""
    kept, learnt, left_out = found["kept"], found["learnt"], found["left_out"]
    gpus = ", ".join(gpu["name"] for gpu in found["hardware"]["gpus"]) or "No GPU"
    used = f", {found['threads']} used" if found["threads"] else ""
    machine = harness.machine_line(found, f"{gpus}; {harness.cpu_of(found)}{used}")
    lines = [
        "# Optimizers: what they keep, how long they take, what they reach",
        "",
        " ".join(filter(None, (f"{machine}.", found["remark"], "Written by `scripts/benchmarks/optimizers.py`."))),
        "",
        f"## Bytes per parameter and time of a step, {kept[0]['num_parameters'] / 1e6:.1f} M parameters",
        "",
        "One example of 16 tokens, medians of seven whole steps. Peak: weights, gradients, state, and temporary "
        "tensors of the step.",
        "",
        *KEPT_TABLE.lines(map(kept_cells, kept)),
        "",
        *([f"Left out: {'; '.join(left_out)}.", ""] if left_out else []),
        f"## Loss of a small language model after {learnt[0]['steps']} steps",
        "",
        "Bytes of Python's source code, 4 × 64 of them a step, 2 layers of 64; the same weights to begin with and the "
        "same batches. Mean of the last tenth of the steps.",
        "",
        *LEARNT_TABLE.lines(map(learnt_cells, learnt)),
    ]
    return "\n".join([*lines, ""])


def main() -> int:
    harness.report(Options, __doc__, measured, page, name="optimizers")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
