"""The programs of docs/mistakes.md print the figures that stand below them."""

from __future__ import annotations

import contextlib
import io
import re
from typing import Any

import pytest
from support import ROOT

from train.extras.meter.tracker import StorageTracker

PAGE = (ROOT / "docs" / "mistakes.md").read_text(encoding="utf-8")
PRELUDE = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[0]
SECTIONS = [part for part in PAGE.split("\n## ")[1:] if "```" in part]


def printed(program: str) -> str:
    """What a program prints, with ``peak_mib``: the most that its tensors held, those of the first block left out."""
    names: dict[str, Any] = {}
    exec(compile(PRELUDE, "docs/mistakes.md", "exec"), names)
    said = io.StringIO()
    with StorageTracker("cpu") as tracker, contextlib.redirect_stdout(said):
        tracker.mark("forward")
        tracker.ignore([*names["parameters"], *names["batches"]])
        names["peak_mib"] = lambda: tracker.peak.num_bytes / 2**20
        exec(compile(program, "docs/mistakes.md", "exec"), names)
    return said.getvalue().strip()


@pytest.mark.parametrize("section", SECTIONS, ids=lambda text: text.splitlines()[0])
def test_each_mistake_has_the_figures_on_the_page(section: str) -> None:
    programs = re.findall(r"```python\n# (\w+)\n(.*?)```", section, re.DOTALL)
    figures = [f"{name}: `{printed(program)}`" for name, program in programs]
    assert len(set(figures)) == 2 and section.strip().splitlines()[-1] == " · ".join(figures)
