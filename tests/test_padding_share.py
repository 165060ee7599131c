"""The share of padding that a run logs, counted here by hand: of positions, whether or not they are targets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from test_main import train

from train.figures import read_metrics
from train.records import EXIT_DONE, IGNORE
from train.tasks import causal_lm

# As bytes between a start and an end: causal rows of 10, 6, 4 and 2 inputs, other rows of one more.
DATA = """
import datasets


def documents(config):
    def split(*lengths):
        return datasets.Dataset.from_list([{"text": "x" * n, "label": f"{n % 3}"} for n in lengths])

    return {"train": split(3, 9, 1, 5), "validation": split(2, 4)}
"""
BERT = """
{"model_type": "bert", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
"""
CAUSAL = [
    (("--micro_batch_size", 2), 1 - 22 / (2 * 10 + 2 * 4)),
    (("--micro_batch_size", 4), 1 - 22 / (4 * 10)),
    (("--micro_batch_size", 1), 0),
    (("--max_tokens_per_micro_batch", 30, "--micro_batch_size", 1), 1 - 22 / (3 * 10 + 2)),
    (("--packing", "--global_batch_size", 2, "--micro_batch_size", 2), 1 - 22 / (2 * 16)),  # 10 + 6 and 4 + 2
]
OTHERS = [
    (("--task", "masked_lm", "--micro_batch_size", 2, "--model_config", BERT), 1 - 26 / (2 * 11 + 2 * 5)),
    (("--task", "sequence_classification", "--micro_batch_size", 4, "--model_config", BERT), 1 - 26 / (4 * 11)),
]


@pytest.mark.parametrize(
    ("flags", "expected", "masked"),
    [
        *((*case, False) for case in CAUSAL),
        *(pytest.param(*case, True, marks=pytest.mark.slow) for case in CAUSAL[:-1]),
        *((*case, False) for case in OTHERS),
    ],
)
def test_padding_share_is_of_positions_without_a_token(
    flags: tuple[Any, ...],
    expected: float,
    masked: bool,
    recipe: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = causal_lm.Task.inputs_and_labels

    def last_half(self: Any, example: Any, seed: Any) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, labels = plain(self, example, seed)
        labels[: len(labels) // 2] = IGNORE
        return tokens, labels

    if masked:
        monkeypatch.setattr(causal_lm.Task, "inputs_and_labels", last_half)
    (tmp_path / "own.py").write_text(DATA)
    data = ("--dataset", f"{tmp_path}/own.py:documents", "--max_length", 16, "--global_batch_size", 4)
    assert train(recipe, tmp_path / "run", *data, "--num_epochs", 2, "--log_every_steps", 1, *flags) == EXIT_DONE
    rows = [row for row in read_metrics(tmp_path / "run" / "metrics.jsonl") if row["kind"] == "train"]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert [row["padding_share"] for row in rows] == pytest.approx([expected, expected], abs=1e-12)
    assert summary["padding_share"] == pytest.approx(expected, abs=1e-12)
