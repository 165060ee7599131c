"""docs/techniques.md names flags that there are, and figures that docs/memory.md explains."""

from __future__ import annotations

import re

from support import ROOT

from train.config import fields

PAGE = (ROOT / "docs" / "techniques.md").read_text(encoding="utf-8")
OTHERS = {  # of the planner, the studies and the launcher
    "config", "device", "sharding", "world_size", "run", "sizes", "toggle", "num_processes",
}  # fmt: skip


def test_flags_on_the_page_exist() -> None:
    named = set(re.findall(r"--(\w+)", PAGE))
    assert len(named) > 25 and named - set(fields()) - OTHERS == set()


def test_files_on_the_page_exist() -> None:
    for path in {*re.findall(r"accelerate_configs/\w+\.yaml|scripts/\w+\.py", PAGE)}:
        assert (ROOT / path).is_file(), path


def test_figures_on_the_page_are_those_of_the_memory_page() -> None:
    """Which a test compares with what the planner says, or with the results they are taken from."""
    explained = (ROOT / "docs" / "memory.md").read_text(encoding="utf-8")
    rows = [line for line in PAGE.splitlines() if re.search(r"\[[SP]\] \|$", line)]
    assert len(rows) == 3
    for row in rows:
        for figure in re.findall(r"\d+\.\d\d", row.rsplit("|", 2)[1]):
            assert figure in explained, figure
