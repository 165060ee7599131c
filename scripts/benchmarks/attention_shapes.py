"""What the first batch of a new length costs in each attention kernel.

    python scripts/benchmarks/attention_shapes.py --write     # on a card; elsewhere without cuDNN, of no interest

Batches that are padded to their longest example have a new length nearly every time. Forward and backward are timed at
each of some lengths twice: the first time with whatever the kernel makes for a new shape. cuDNN makes a plan for each
shape and torch keeps it, so the host's memory is read before and after.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.benchmarks import building, harness

if TYPE_CHECKING:
    import torch

KERNELS = (("cudnn", False), ("flash", False), ("efficient", False), ("cudnn", True), ("efficient", True))
"""With and without a mask; flash takes none."""
WARM_UP = 3


@dataclass(frozen=True)
class Options(harness.Options):
    """Times attention at new and at known lengths."""

    batch: int = 4
    heads: int = 16
    head_size: int = 64
    shortest: int = 1024
    longest: int = 8192
    lengths: int = 40
    """Different ones, drawn at random."""
    seed: int = 0


def forward_backward(options: Options, device: torch.device, length: int, with_mask: bool) -> None:
    """Attention of (B, H, S, D), causal, or with a mask (B, 1, S, S) of right padding."""
    import torch
    import torch.nn.functional as F

    query, key, value = (
        torch.randn(options.batch, options.heads, length, options.head_size, dtype=torch.bfloat16, device=device)
        for _ in range(3)
    )
    for tensor in (query, key, value):
        tensor.requires_grad_()
    mask: torch.Tensor | None = None
    if with_mask:
        mask = torch.ones(options.batch, 1, length, length, dtype=torch.bool, device=device)
        mask[..., length // 2 :] = False
    F.scaled_dot_product_attention(query, key, value, mask, is_causal=not with_mask).sum().backward()


def resident_bytes() -> int:
    """Host memory of this process."""
    import psutil  # comes with accelerate

    return psutil.Process().memory_info().rss


def measured_kernel(options: Options, name: str, with_mask: bool) -> dict[str, Any]:
    """Seconds at new and at known lengths, and what the host holds afterwards."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    random, device = Random(options.seed), building.training_device()
    lengths = random.sample(range(options.shortest, options.longest), options.lengths + WARM_UP)
    with sdpa_kernel(getattr(SDPBackend, f"{name.upper()}_ATTENTION")):
        for length in lengths[:WARM_UP]:
            forward_backward(options, device, length, with_mask)
        before, new, known = resident_bytes(), [], []
        for length in lengths[WARM_UP:]:
            new.append(harness.timed(lambda n=length: forward_backward(options, device, n, with_mask)))
            known.append(harness.timed(lambda n=length: forward_backward(options, device, n, with_mask)))
    return {
        "kernel": name,
        "with_mask": with_mask,
        "new_seconds": harness.spread(new),
        "known_seconds": harness.spread(known),
        "extra_seconds": harness.spread([first - second for first, second in zip(new, known, strict=True)]),
        "host_bytes_per_length": (resident_bytes() - before) / options.lengths,
    }


def measured(options: Options) -> dict[str, Any]:
    """A row for each kernel."""
    rows = []
    for name, with_mask in KERNELS:
        try:
            rows.append(measured_kernel(options, name, with_mask))
        except RuntimeError as error:  # torch: no such kernel for these tensors
            rows.append({"kernel": name, "with_mask": with_mask, "error": " ".join(str(error).split())[:100]})
        print(TABLE.row(cells(rows[-1])), flush=True)
    asked = {name: vars(options)[name] for name in ("batch", "heads", "head_size", "shortest", "longest", "lengths")}
    return {"workload": asked, "rows": rows}


TABLE = harness.Table(
    ("kernel", "mask", "a known length, ms", "more at a new one, ms (middle half)", "host memory kept, KiB a length"),
    "llrrr",
)


def cells(row: dict[str, Any]) -> list[str]:
    """A row of the table."""
    first = [row["kernel"], "yes" if row["with_mask"] else "no"]
    if "error" in row:
        return [*first, row["error"], "", ""]
    extra = {name: round(1e3 * seconds, 1) + 0.0 for name, seconds in row["extra_seconds"].items()}  # no -0.0
    return [
        *first,
        f"{1e3 * row['known_seconds']['median']:.2f}",
        f"{extra['median']:.1f} ({extra['quartile_1']:.1f} to {extra['quartile_3']:.1f})",
        f"{row['host_bytes_per_length'] / 1024:,.0f}",
    ]


def page(found: dict[str, Any]) -> str:
    """The table in Markdown."""
    load = found["workload"]
    lines = [
        "# Attention at new lengths",
        "",
        *TABLE.lines(map(cells, found["rows"])),
        "",
        f"- Forward and backward of one layer: {load['batch']} examples, {load['heads']} heads of {load['head_size']}, "
        f"bf16; {load['lengths']} lengths from {load['shortest']:,} to {load['longest']:,} tokens, each twice.",
        f"- {harness.machine_line(found)}.",
        "",
    ]
    return "\n".join(lines)


def main() -> int:
    """Measures."""
    harness.report(Options, __doc__, measured, page, name="attention_shapes")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
