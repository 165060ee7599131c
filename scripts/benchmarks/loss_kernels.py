"""Time and memory of the losses over a large vocabulary, forward and backward, each that runs on this machine.

    python scripts/benchmarks/loss_kernels.py --write

Random hidden states and labels and one output embedding; no model around it. The losses take turns in each round; shown
are medians, and medians of the ratios within a round. Extra bytes are the peak of a loss without its inputs: on CUDA as
the allocator counts them, on a CPU as the storage tracker does.
"""

from __future__ import annotations

import statistics
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.benchmarks import building, harness

if TYPE_CHECKING:
    import torch
    from torch import Tensor

LOSSES = ("full", "chunked", building.RECOMPUTED, "cce", "liger")


@dataclass(frozen=True)
class Options(harness.Options):
    """Compares losses over a large vocabulary."""

    hidden: tuple[int, ...] | None = None
    """Widths; default: 256 512, on CUDA 1024 4096."""
    vocabulary: int = 32768
    tokens: int = 8192
    precision: tuple[Literal["no", "bf16", "fp16"], ...] | None = None
    """Default: those that are fast here."""
    losses: tuple[str, ...] = LOSSES
    rounds: int = 5
    cpu_threads: int | None = None


def measured(options: Options) -> dict[str, Any]:
    """A row for each width, precision and loss."""
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    threads = building.use_cpu_threads(options.cpu_threads)
    rows: list[dict[str, Any]] = []
    for width in options.hidden or ((1024, 4096) if device.type == "cuda" else (256, 512)):
        for precision in options.precision or building.fast_precisions(device):
            rows += compared(device, precision, width, options)
    shape = {name: getattr(options, name) for name in ("vocabulary", "tokens", "rounds")}
    return {**shape, "cpu_threads": threads, "rows": rows}


def compared(device: torch.device, precision: str, width: int, options: Options) -> list[dict[str, Any]]:
    """A row for each loss that runs here."""
    import torch

    half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    names = [name for name in options.losses if building.obstacle(name, device, half or torch.float32) is None]
    torch.manual_seed(0)
    hidden = torch.randn(options.tokens, width, device=device)
    weight = torch.randn(options.vocabulary, width, device=device) / width**0.5
    labels = torch.randint(options.vocabulary, (options.tokens,), device=device)
    losses = building.losses()
    work = {name: Work(losses[name], hidden, weight, labels, half) for name in names}
    extra = {name: each.extra_bytes() for name, each in work.items()}  # compiles what is compiled, too
    exact = losses["full"](hidden, weight, None, labels).item() if "full" in names else None
    times = harness.paired_rounds({name: partial(harness.timed, work[name].once) for name in names}, options.rounds)
    rows = []
    for name in names:
        seconds = [found[name] for found in times]
        row = {
            "hidden": width,
            "precision": precision,
            "loss": name,
            "milliseconds": 1e3 * statistics.median(seconds),
            "ratio": statistics.median(harness.ratios(times, name, names[0])),
            "extra_bytes": extra[name],
            "loss_error": None if exact is None else work[name].value / exact - 1,
            "seconds": seconds,
        }
        rows.append(row)
        print(TABLE.row(cells(row)), flush=True)
    return rows


class Work:
    """Forward and backward of one loss on given tensors."""

    def __init__(
        self, loss: building.Loss, hidden: Tensor, weight: Tensor, labels: Tensor, half: torch.dtype | None
    ) -> None:
        self._loss, self._labels, self._half = loss, labels, half
        self._leaves = [tensor.detach().requires_grad_() for tensor in (hidden, weight)]
        self.value = 0.0

    def once(self) -> None:
        """One forward and backward; ``value`` is the loss, and the device is at rest."""
        import torch

        hidden, weight = self._leaves
        hidden.grad = weight.grad = None
        with torch.autocast(hidden.device.type, self._half or torch.bfloat16, enabled=self._half is not None):
            loss = self._loss(hidden, weight, None, self._labels)
        (loss / len(hidden)).backward()
        self.value = loss.item()

    def extra_bytes(self) -> int:
        """Peak without the inputs; gradients are included."""
        self.once()
        for leaf in self._leaves:
            leaf.grad = None
        held = {"parameters": [*self._leaves, self._labels]}
        before, peak = harness.peak_bytes(self.once, held, self._labels.device)
        return peak - before


TABLE = harness.Table(
    [
        "hidden",
        "precision",
        "loss",
        "forward and backward, ms",
        "against the first",
        "extra MiB",
        "loss against fp32's",
    ],
    "rllrrrr",
)


def cells(row: dict[str, Any]) -> list[Any]:
    """A row of the table."""
    return [
        row["hidden"],
        row["precision"],
        row["loss"],
        f"{row['milliseconds']:,.1f}",
        f"{row['ratio']:.2f}",
        f"{row['extra_bytes'] / harness.MIB:,.1f}",
        "" if row["loss_error"] is None else f"{row['loss_error']:+.1e}",
    ]


def page(found: dict[str, Any]) -> str:
    """The table in Markdown."""
    place = f"{found['hardware']['cpu']}, {found['cpu_threads']} threads"
    machine = harness.machine_line(found, None if found["hardware"]["gpus"] else place)
    head = [
        "# Losses over a large vocabulary",
        "",
        f"{found['tokens']:,} tokens, {found['vocabulary']:,} classes, forward and backward, {found['rounds']} rounds "
        f"in turns. {machine}. Written by `scripts/benchmarks/loss_kernels.py`.",
        "",
    ]
    return "\n".join([*head, *TABLE.lines(map(cells, found["rows"])), ""])


def main() -> int:
    harness.report(Options, __doc__, measured, page, name="loss_kernels")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
