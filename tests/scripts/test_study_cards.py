"""What fits on which card: what is made of given predictions, and a small study for real."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from support import takes_minutes

from scripts.benchmarks.study import main
from scripts.benchmarks.study.cards_page import (
    Cell,
    Maps,
    Speed,
    findings,
    kernels_of,
    largest,
    markdown,
    page,
    smallest_card,
    write,
)
from train.memory.__main__ import main as plan
from train.memory.devices import find_device

GIB = 2**30


def cells(kernels: str = "a100-80", gib_per_example: float = 4.0) -> list[Cell]:
    """A model of 2 GiB; an example of 1,024 tokens takes ``gib_per_example``, one of 4,096 four times that."""
    found = []
    for rung, saved in (("nothing", 1.0), ("chunked loss", 0.5)):
        for length, factor in ((1024, 1), (4096, 4)):
            for size in (1, 4, 16):
                reserved = int((2 + size * factor * gib_per_example * saved) * GIB)
                found.append(Cell("m", rung, kernels, length, size, reserved))
    return found


FOUND: dict[str, Any] = {
    "command": "cards --output_dir x",
    "hardware": {"cpu": "a processor", "cpu_cores": 2, "gpus": []},
    "versions": {"torch": "2"},
    "date": "2026-01-01",
    "cards": {"rtx-4090": {}, "a100-80": {}},
    "techniques": {"m: nothing": {"loss": "full"}},
    "lengths": [1024, 4096],
    "cells": [asdict(cell) for cell in cells()],
    "speeds": [asdict(Speed("m", "rtx-4090", 1024, "nothing", 5, 1234.0))],
}


@pytest.mark.parametrize(
    ("card", "rung", "length", "expected"),
    [
        ("rtx-4090", "nothing", 1024, 4),  # 5 may fit, but was not predicted
        ("rtx-4090", "chunked loss", 1024, 4),
        ("rtx-4090", "nothing", 4096, 1),
        ("a100-80", "nothing", 4096, 4),
        ("h200", "chunked loss", 1024, 16),  # none larger was predicted
        ("8GiB", "nothing", 4096, 0),
    ],
)
def test_largest_micro_batch_is_one_that_was_predicted_to_fit(card: str, rung: str, length: int, expected: int) -> None:
    assert largest(cells(), "m", rung, length, find_device(card), "a100-80") == expected


def test_smallest_card_is_the_one_with_least_memory_and_the_kernels() -> None:
    cards = {name: find_device(name) for name in ("h200", "t4", "rtx-4090")}
    by_place = {(cell.length, cell.micro_batch_size): cell for cell in cells() if cell.rung == "nothing"}
    assert smallest_card(by_place[1024, 1], cards) == "rtx-4090"  # a T4 has other kernels
    assert smallest_card(by_place[4096, 4], cards) == "h200"
    assert smallest_card(by_place[4096, 16], cards) is None
    assert smallest_card(Cell("m", "nothing", "t4", 1024, 1, 6 * GIB), cards) == "t4"
    assert smallest_card(Cell("m", "nothing", "t4", 1024, 1, None, "refused"), cards) is None
    assert [kernels_of(name) for name in cards] == ["a100-80", "t4", "a100-80"]


def test_pages_show_the_figures(tmp_path: Path) -> None:
    assert findings(FOUND) == [
        "m on RTX-4090: 4,096 tokens without techniques; 4,096 tokens with chunked loss.",
        "m on A100-80: 4,096 tokens without techniques; 4,096 tokens with chunked loss.",
    ]
    maps = Maps(FOUND)
    assert maps.at("m", "nothing", 1024, 4) == ("rtx-4090", "18.0")
    assert maps.at("m", "nothing", 4096, 4) == ("a100-80", "66.0")
    assert maps.at("m", "nothing", 4096, 16) == (None, "258")
    assert maps.at("m", "nothing", 4096, 64) == (None, "–")
    assert maps.most("m", "nothing", 1024, "rtx-4090") == "4"
    text = markdown(FOUND, maps, findings(FOUND))
    assert "| m | nothing | 4 | 1 |" in text and "with the first that fits, estimated | 1.23k | – |" in text
    assert "## Largest micro-batch of 1, 4, 16, 64, 256, 1024, 4096 that fits on RTX-4090 (24 GiB), by length" in text
    html = page(FOUND, maps, findings(FOUND))
    assert "66.0</td>" in html and "RTX-4090 (24 GiB)" in html and "<script" not in html
    write(tmp_path, FOUND)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cards.json", "cards.md", "cards.png", "index.html"]


def test_what_was_not_tried_or_is_refused_is_said() -> None:
    more = [Cell("m", "nothing", "a100-80", 512, 4096, GIB), Cell("m", "tiles", "a100-80", 512, 1, None, "no tiles")]
    found = {**FOUND, "lengths": [512], "cells": [asdict(cell) for cell in more]}
    maps = Maps(found)
    assert (maps.most("m", "nothing", 512, "a100-80"), maps.most("m", "tiles", 512, "a100-80")) == (
        "≥ 4,096",
        "refused",
    )
    assert not any("tiles" in text for text in findings(found))  # refused, which is not that it does not fit
    said = "m, tiles, kernels of a100-80: no tiles"
    assert f"- {said}" in markdown(found, maps, []) and f"<li>{said}</li>" in page(found, maps, [])


def test_the_committed_page_says_what_its_figures_say() -> None:
    folder = Path(__file__).parents[2] / "docs" / "results" / "cards-predicted"
    found = json.loads((folder / "cards.json").read_text())
    assert (folder / "cards.md").read_text() == markdown(found, Maps(found), findings(found))
    assert {cell["model"] for cell in found["cells"]} == {"Qwen2.5-0.5B", "Llama-3.2-1B", "Llama-3.1-8B"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--cards", "rtx-9999"], "rtx-9999"),
        (["--cards", "cpu"], "--cards: cpu has no memory of its own"),
        (["--models", "70b"], "--models: 70b is none of 0.5b, 1b, 8b"),
    ],
)
def test_what_cannot_be_asked_is_said(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["cards", "--output_dir", str(tmp_path), *words]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.slow
@takes_minutes
def test_a_recipe_is_predicted_and_continued(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "")
    monkeypatch.delenv("PYTORCH_ALLOC_CONF")
    words = ["cards", "--config", "recipes/quickstart.yaml", "--lengths", "65536", "--cards", "rtx-4090,t4"]
    words += ["--output_dir", str(tmp_path)]
    assert main(words) == 0
    predicted = capsys.readouterr().err.count("reserved_bytes")
    lines = (tmp_path / "cells.jsonl").read_text().splitlines()
    (tmp_path / "cells.jsonl").write_text("\n".join(lines[:-1]) + "\n" + lines[-1][:20])
    assert main(words) == 0
    assert capsys.readouterr().err.count("reserved_bytes") == 1 < predicted  # what was cut off is predicted again
    found = json.loads((tmp_path / "cards.json").read_text())
    least = {(c["kernels"], c["rung"]): c["reserved_bytes"] for c in found["cells"] if c["micro_batch_size"] == 1}
    assert least["t4", "nothing"] > least["t4", "chunked loss"] > least["t4", "activation checkpointing"]
    assert {speed["card"] for speed in found["speeds"]} == {"rtx-4090", "t4"}
    assert all(speed["tokens_per_second"] > 0 for speed in found["speeds"])

    flags = ["--max_length", "65536", "--gradient_checkpointing", "none", "--loss", "full", "--mixed_precision", "bf16"]
    asked = ["predict", "--config", "recipes/quickstart.yaml", *flags, "--device", "a100-80", "--json"]
    assert plan(asked) == 0  # which reckons, as a run, with segments that grow
    told = json.loads(capsys.readouterr().out)["prediction"]["least_reserved_bytes"]
    assert least["a100-80", "nothing"] == told
