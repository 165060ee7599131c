"""Which attention kernel the planner expects and which one torch takes, by dtype, heads, size, mask and dropout.

    python scripts/benchmarks/attention_kernels.py --write             # on a card: both, and where they differ
    python scripts/benchmarks/attention_kernels.py --device t4         # anywhere: what the planner expects of a card

torch is asked by ``torch._fused_sdp_choice``, which chooses without running anything. Status 1: they differ somewhere.
"""

from __future__ import annotations

import itertools
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.benchmarks import building, harness
from train.records import EXIT_DONE, EXIT_ERROR, UserError

if TYPE_CHECKING:
    import torch

    from train.memory.predict import Target

DTYPES = ("float32", "bfloat16", "float16")
HEADS = ((8, 8), (8, 2), (8, 1))
"""Heads of queries, and of keys and values."""
HEAD_SIZES = (32, 64, 66, 72, 96, 128, 192, 200, 224, 256, 320)
DROPOUTS = (0.0, 0.1, 0.125)
"""cuDNN takes multiples of a sixteenth."""
LENGTH = 128


@dataclass(frozen=True)
class Options(harness.Options):
    """Compares the planner's choice of attention kernel with torch's."""

    device: str | None = None
    """A card to expect for, such as t4; default: this machine's, where torch is asked, too."""


@dataclass(frozen=True)
class Case:
    """One call of ``scaled_dot_product_attention``."""

    dtype: str
    heads: int
    key_heads: int
    head_size: int
    has_mask: bool
    dropout: float

    def tensors(self, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Queries, keys (and values) and the mask to add; causal without one."""
        import torch

        dtype = getattr(torch, self.dtype)
        query, key = (
            torch.empty(1, heads, LENGTH, self.head_size, dtype=dtype, device=device, requires_grad=True)
            for heads in (self.heads, self.key_heads)
        )
        mask = torch.zeros(1, 1, LENGTH, LENGTH, dtype=dtype, device=device) if self.has_mask else None
        return query, key, mask


def cases() -> list[Case]:
    """The whole table."""
    every = itertools.product(DTYPES, HEADS, HEAD_SIZES, (False, True), DROPOUTS)
    return [Case(dtype, *heads, size, has_mask, dropout) for dtype, heads, size, has_mask, dropout in every]


def expected(case: Case, target: Target) -> str:
    """The planner's choice."""
    from train.memory.card_kernels import attention_kernel

    query, key, mask = case.tensors("meta")
    return attention_kernel(target, (query, key, key), mask, case.dropout, is_causal=not case.has_mask)


def chosen(case: Case) -> str:
    """torch's choice on this machine's card."""
    import torch
    from torch.nn.attention import SDPBackend

    query, key, mask = case.tensors("cuda")
    options = {"dropout_p": case.dropout, "is_causal": not case.has_mask, "enable_gqa": case.key_heads != case.heads}
    choice = SDPBackend(torch._fused_sdp_choice(query, key, key, mask, **options))
    return choice.name.lower().removesuffix("_attention")


def row_of(case: Case, target: Target, asks_torch: bool) -> dict[str, Any]:
    """One line of the table."""
    row = {**vars(case), "expected": expected(case, target)}
    return {**row, "chosen": chosen(case)} if asks_torch else row


def differing(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Where torch chose something else."""
    return [row for row in rows if "chosen" in row and row["chosen"] != row["expected"]]


TABLE = harness.Table(("dtype", "heads", "head sizes", "mask", "dropout", "expected", "torch"), "lllllll")


def cells(rows: list[dict[str, Any]]) -> list[str]:
    """A line for rows that differ in their head size alone."""
    first, sizes = rows[0], ", ".join(str(row["head_size"]) for row in rows)
    heads = f"{first['heads']} on {first['key_heads']}"
    mask, dropout = ("yes" if first["has_mask"] else "no"), f"{first['dropout']:g}"
    return [first["dtype"], heads, sizes, mask, dropout, first["expected"], first.get("chosen", "not asked")]


def grouped(rows: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Rows that differ in their head size alone, together."""
    found: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(tuple(value for name, value in row.items() if name != "head_size"), []).append(row)
    return list(found.values())


def page(found: dict[str, Any]) -> str:
    """The table in Markdown, differences first."""
    rows, differences = found["rows"], differing(found["rows"])
    if found["is_asked"]:
        summary = f"torch chose what the planner expects in {len(rows) - len(differences)} of {len(rows)} cases."
    else:
        summary = f"What the planner expects of {found['device']} in {len(rows)} cases; torch was not asked."
    lines = [
        f"# Attention kernels: {found['device']}",
        "",
        f"{harness.machine_line(found)}. Written by `scripts/benchmarks/attention_kernels.py`.",
        "",
        f"{summary} Queries of {LENGTH} tokens that need gradients; causal where there is no mask.",
        "",
    ]
    for title, part in (("Where they differ", differences), ("All", rows)):
        if part:
            lines += [f"## {title}", "", *TABLE.lines(map(cells, grouped(part))), ""]
    return "\n".join(lines)


def main() -> int:
    """Asks, and prints the table."""
    options = harness.read_options(Options, __doc__)
    if harness.page_again(options, page) is not None:
        return EXIT_DONE
    import torch

    from train.memory.devices import find_device, this_device
    from train.memory.question import target_of

    asks_torch = options.device is None and torch.cuda.is_available()
    try:
        device = this_device() if asks_torch else find_device(options.device or "h200")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_status
    target = building.this_target() if asks_torch else target_of(device)
    rows = [row_of(case, target, asks_torch) for case in cases()]
    found = {**harness.about(), "device": device.name, "is_asked": asks_torch, "rows": rows}
    harness.finish(options, found, page, f"attention_kernels-{harness.slug(device.name)}")
    return EXIT_ERROR if differing(rows) else EXIT_DONE


if __name__ == "__main__":
    raise SystemExit(main())
