"""What new lengths cost in attention: the benchmark on a CPU, and the table of the page."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.benchmarks import attention_shapes
from train.memory import card_kernels as kernels

ROOT = Path(__file__).resolve().parents[2]
FIGURES = ROOT / "docs" / "results" / "attention_shapes-nvidia-h200.json"


@pytest.mark.slow
def test_every_kernel_has_a_row_also_where_it_is_missing(tmp_path: Path) -> None:
    sizes = ("--batch", "1", "--heads", "2", "--shortest", "16", "--longest", "32", "--lengths", "3")
    words = ["scripts/benchmarks/attention_shapes.py", *sizes, "--write", "--output_dir", str(tmp_path)]
    subprocess.run([sys.executable, *words], cwd=ROOT, check=True, capture_output=True, timeout=300)
    rows = {
        (row["kernel"], row["with_mask"]): row for row in json.loads(next(tmp_path.glob("*.json")).read_text())["rows"]
    }
    assert list(rows) == list(attention_shapes.KERNELS)
    assert rows["flash", False]["known_seconds"]["median"] > 0 and "error" in rows["cudnn", False]
    assert next(tmp_path.glob("*.md")).read_text().count("\n| ") == 2 + len(rows)


def test_the_page_of_long_sequences_has_its_figures() -> None:
    found = json.loads(FIGURES.read_text(encoding="utf-8"))
    assert FIGURES.with_suffix(".md").read_text(encoding="utf-8") == attention_shapes.page(found)
    rows = {(row["kernel"], row["with_mask"]): row for row in found["rows"]}
    names = {"cuDNN": ("cudnn", False), "flash": ("flash", False), "cuDNN, with a mask": ("cudnn", True),
             "memory-efficient, with a mask": ("efficient", True)}  # fmt: skip
    page = (ROOT / "docs" / "extras" / "long_sequences.md").read_text(encoding="utf-8")
    for name, kind in names.items():
        row = rows[kind]
        known, extra = (1e3 * row[key]["median"] for key in ("known_seconds", "extra_seconds"))
        kept = row["host_bytes_per_length"] / 2**20
        assert f"| {name} | {known:.2f} | {abs(extra):.1f} | {abs(kept):.1f} |" in page
    plan, flash = rows["cudnn", False], rows["flash", False]
    saved = 24 * (flash["known_seconds"]["median"] - plan["known_seconds"]["median"])
    assert f"once a length has come {plan['extra_seconds']['median'] / saved:.0f} times" in " ".join(page.split())
    slower = rows["efficient", False]["known_seconds"]["median"] / flash["known_seconds"]["median"]
    memory = (ROOT / "docs" / "memory.md").read_text(encoding="utf-8")
    assert f"took [{slower:.1f} times](results/attention_shapes" in memory
    estimated = kernels.REACHED_ATTENTION_FLOPS / kernels.REACHED_EFFICIENT_FLOPS
    assert estimated == pytest.approx(slower, rel=0.03)
    assert f"{1000 * plan['host_bytes_per_length'] / 2**30:.0f} GiB of host memory for a thousand" in page
    assert (
        round(rows["efficient", True]["known_seconds"]["median"] / rows["cudnn", True]["known_seconds"]["median"]) == 2
    )
