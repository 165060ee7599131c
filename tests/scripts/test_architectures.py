"""Each architecture of transformers against itself and against the committed table."""

from __future__ import annotations

import json

import pytest
import transformers
from support import EVERY_CASE

from scripts.benchmarks import architectures, harness

PARTS, EVERY = (8, 8) if EVERY_CASE else (1, 64)  # some of them otherwise


@pytest.mark.parametrize(
    ("task", "model_types"),
    [
        ("causal_lm", ("doge",)),
        pytest.param("causal_lm", ("mixtral", "bart"), marks=pytest.mark.slow),
        pytest.param("masked_lm", ("modernbert", "albert", "fnet", "convbert", "roberta"), marks=pytest.mark.slow),
        pytest.param("sequence_classification", ("bert", "gpt2", "canine", "xlm"), marks=pytest.mark.slow),
        # In parts that each take some minutes
        *(
            pytest.param(t, slice(n, None, EVERY), marks=pytest.mark.slow)
            for t in architectures.TASKS
            for n in range(PARTS)
        ),
    ],
)
def test_architectures_are_equal_to_themselves_or_refused_as_the_table_says(
    task: str, model_types: tuple[str, ...] | slice
) -> None:
    committed = json.loads((harness.RESULTS / "architectures.json").read_text(encoding="utf-8"))
    known = {row["model_type"]: row for row in committed["rows"] if row["task"] == task}
    for model_type in architectures.names_of(task)[model_types] if isinstance(model_types, slice) else model_types:
        row = {"task": task, "model_type": model_type, **architectures.row_of(task, model_type)}
        wrong = {column: cell for column, cell in row.items() if cell.startswith(("FAILED", "DIFFERS"))}
        assert not wrong, (model_type, wrong)
        if committed["versions"]["transformers"] == transformers.__version__:
            kinds = [{c: cell.split(":")[0] for c, cell in found.items()} for found in (row, known[model_type])]
            assert kinds[0] == kinds[1], model_type


@pytest.mark.parametrize("task", architectures.TASKS)
def test_the_committed_table_has_every_model_type_and_no_fourth_kind(task: str) -> None:
    committed = json.loads((harness.RESULTS / "architectures.json").read_text(encoding="utf-8"))
    rows = [row for row in committed["rows"] if row["task"] == task]
    kinds = {row["built"].split(":")[0] for row in rows}
    assert kinds == {"yes", "refused", "not by its defaults"}
    cells = {row[column].split(":")[0] for row in rows if row["built"] == "yes" for column in architectures.COLUMNS}
    assert {"equal", "refused"} <= cells <= {"equal", "refused", "–"}
    if committed["versions"]["transformers"] == transformers.__version__:
        assert [row["model_type"] for row in rows] == architectures.names_of(task)
