"""Time and memory of the losses over a large vocabulary, forward and backward, each that runs on this machine.

    python scripts/benchmarks/loss_kernels.py --output docs/results/loss_kernels-cpu

Random hidden states and labels and one output embedding; no model around it. The losses take turns, so that what else
the machine does falls on all alike; shown are medians, and medians of the ratios within a round. Extra bytes are what a
loss takes at its peak beside its inputs: on CUDA as the allocator counts, on a CPU as the storage tracker does.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT)]

from train.cross_entropy import PLAIN, cross_entropy_sum  # noqa: E402
from train.extras.losses.chunked import _ChunkedCrossEntropy, _How, chunked_sum, product_dtype  # noqa: E402
from train.extras.losses.fused import Place, cce_sum, liger_sum, obstacle_to, torch_sum  # noqa: E402
from train.extras.meter.tracker import StorageTracker  # noqa: E402
from train.outputs_log import hardware, versions  # noqa: E402
from train.runtime import cpu_is_fast_at_bf16, set_cpu_threads  # noqa: E402

Loss = Callable[[Tensor, Tensor, None, Tensor], Tensor]
RECOMPUTED = "chunked, recomputed"
HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


def full(hidden: Tensor, weight: Tensor, bias: None, labels: Tensor) -> Tensor:
    """The loss of all logits."""
    return cross_entropy_sum(F.linear(hidden, weight, bias), labels)


def recomputed(hidden: Tensor, weight: Tensor, bias: None, labels: Tensor) -> Tensor:
    """``chunked`` as it is under fp16, which cannot prepare gradients in forward."""
    how = _How(product_dtype(hidden), PLAIN, None)
    return _ChunkedCrossEntropy.apply(hidden, weight, bias, labels, how, False)  # pyright: ignore


LOSSES: dict[str, Loss] = {
    "full": full,
    "chunked": chunked_sum,
    RECOMPUTED: recomputed,
    "torch": torch_sum,
    "cce": cce_sum,
    "liger": liger_sum,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="write OUTPUT.json and OUTPUT.md")
    parser.add_argument("--hidden", type=int, nargs="+", help="widths; default: 256 512, on CUDA 1024 4096")
    parser.add_argument("--vocabulary", type=int, default=32768)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--precision", nargs="+", choices=("no", "bf16", "fp16"), help="default: those that are fast")
    parser.add_argument("--losses", nargs="+", choices=LOSSES, default=list(LOSSES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cpu_threads", type=int)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    threads = set_cpu_threads(options.cpu_threads)
    precisions = options.precision or ["no", *(["bf16"] if device.type == "cuda" or cpu_is_fast_at_bf16() else [])]
    rows: list[dict[str, Any]] = []
    print(HEAD)
    for width in options.hidden or ([1024, 4096] if device.type == "cuda" else [256, 512]):
        for precision in precisions:
            rows += measured(device, precision, width, options)
    if options.output:
        write(options.output, rows, device, threads, options)
    return 0


def measured(device: torch.device, precision: str, width: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each loss that runs here."""
    dtype = HALF.get(precision, torch.float32)
    capability = torch.cuda.get_device_capability() if device.type == "cuda" else (0, 0)
    place = Place(device.type, dtype, capability)
    names = [n for n in options.losses if n in ("full", RECOMPUTED) or obstacle_to(n, place, has_bias=False) is None]
    torch.manual_seed(0)
    hidden = torch.randn(options.tokens, width, device=device)
    weight = torch.randn(options.vocabulary, width, device=device) / width**0.5
    labels = torch.randint(options.vocabulary, (options.tokens,), device=device)
    work = {name: Work(LOSSES[name], hidden, weight, labels, HALF.get(precision)) for name in names}
    extra = {name: each.extra_bytes() for name, each in work.items()}  # also what is compiled, is compiled here
    exact = full(hidden, weight, None, labels).item() if "full" in names else None
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(options.rounds):
        for name in names if number % 2 else reversed(names):
            seconds[name].append(work[name].seconds())
    rows = []
    for name in names:
        ratios = [own / other for own, other in zip(seconds[name], seconds[names[0]], strict=True)]
        row = {
            "hidden": width,
            "precision": precision,
            "loss": name,
            "milliseconds": 1e3 * statistics.median(seconds[name]),
            "ratio": statistics.median(ratios),
            "extra_bytes": extra[name],
            "loss_error": None if exact is None else work[name].value / exact - 1,
            "seconds": seconds[name],
        }
        rows.append(row)
        print(line(row), flush=True)
    return rows


class Work:
    """Forward and backward of one loss on given tensors."""

    def __init__(self, loss: Loss, hidden: Tensor, weight: Tensor, labels: Tensor, half: torch.dtype | None) -> None:
        self._loss, self._labels, self._half = loss, labels, half
        self._leaves = [t.detach().requires_grad_() for t in (hidden, weight)]
        self.value = 0.0

    def once(self) -> None:
        hidden, weight = self._leaves
        hidden.grad = weight.grad = None
        with torch.autocast(hidden.device.type, self._half or torch.bfloat16, enabled=self._half is not None):
            loss = self._loss(hidden, weight, None, self._labels)
        (loss / len(hidden)).backward()
        self.value = loss.item()  # waits for the device

    def seconds(self) -> float:
        """One forward and backward."""
        started = time.perf_counter()
        self.once()
        return time.perf_counter() - started

    def extra_bytes(self) -> int:
        """What it takes at its peak beside its inputs, its gradients included."""
        self.once()
        for leaf in self._leaves:
            leaf.grad = None
        if self._leaves[0].device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            self.once()
            return torch.cuda.max_memory_allocated() - before
        with StorageTracker("cpu") as tracker:
            tracker.tag("parameters", [*self._leaves, self._labels])
            before = tracker.live_bytes
            self.once()
        return tracker.peak.num_bytes - before


HEAD = (
    "| hidden | precision | loss | forward and backward, ms | against the first | extra MiB | loss against fp32's |\n"
    "| ---: | --- | --- | ---: | ---: | ---: | ---: |"
)


def line(row: dict[str, Any]) -> str:
    """A row of the table."""
    error = "" if row["loss_error"] is None else f"{row['loss_error']:+.1e}"
    return (
        f"| {row['hidden']} | {row['precision']} | {row['loss']} | {row['milliseconds']:,.1f} | {row['ratio']:.2f} | "
        f"{row['extra_bytes'] / 2**20:,.1f} | {error} |"
    )


def write(
    path: Path, rows: list[dict[str, Any]], device: torch.device, threads: int, options: argparse.Namespace
) -> None:
    """JSON and a table."""
    machine = {"hardware": hardware(), "versions": versions()}
    shape = {name: getattr(options, name) for name in ("vocabulary", "tokens", "rounds")} | {"cpu_threads": threads}
    path.parent.mkdir(parents=True, exist_ok=True)
    values = {**machine, **shape, "rows": rows}
    path.with_suffix(".json").write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    name = torch.cuda.get_device_name() if device.type == "cuda" else f"{machine['hardware']['cpu']}, {threads} threads"
    used = ", ".join(f"{k} {v}" for k, v in machine["versions"].items())
    head = [
        "# Losses over a large vocabulary",
        "",
        f"{options.tokens:,} tokens, {options.vocabulary:,} classes, forward and backward, {options.rounds} rounds in "
        f"turns. {name}; {used}; {datetime.date.today()}. Written by `scripts/benchmarks/loss_kernels.py`.",
        "",
        HEAD,
    ]
    path.with_suffix(".md").write_text("\n".join([*head, *map(line, rows)]) + "\n", encoding="utf-8")


if __name__ == "__main__":
    raise SystemExit(main())
