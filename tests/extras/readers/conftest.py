"""Fixtures of the corpora's tests."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets.config
import pytest


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path_factory.mktemp("cache")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
    monkeypatch.setattr(datasets.config, "HF_CACHE_HOME", cache)
    monkeypatch.setattr(datasets.config, "HF_MODULES_CACHE", cache / "modules")


@pytest.fixture
def jsonl(tmp_path: Path) -> Callable[..., str]:
    """Writes records (dicts, or lines as they are) to a file and gives its path."""

    def write(*records: dict[str, Any] | str, name: str = "data.jsonl") -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        return str(path)

    return write
