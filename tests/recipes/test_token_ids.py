"""Documents that were tokenised elsewhere are trained on as they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, DatasetDict
from safetensors.torch import load_file
from support import ROOT, write_recipe
from transformers import AutoModelForCausalLM, AutoTokenizer

from train.config import Config, call_function
from train.data import corpus_of
from train.extras.readers.own_tokenizers import build_tokenizer
from train.main import main
from train.records import EXIT_DONE, UsageError, UserError
from train.tasks import load_task, tokenize

RECIPE = str(Path(ROOT, "recipes", "token_ids.py"))
BLOCKS = [[(7 * row + column) % 250 for column in range(16)] for row in range(20)]  # as long as the longest example
BYTES: Any = build_tokenizer("bytes", [])


@pytest.fixture(params=["jsonl", "parquet", "folder", "splits", "tensors"])
def stored(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The blocks in a file, or as 🤗 Datasets saves them."""
    path = tmp_path / f"ids.{request.param}"
    found: Any = Dataset.from_dict({"input_ids": BLOCKS, "source": ["pdf"] * 20})
    if request.param == "jsonl":
        path.write_text("".join(json.dumps({"input_ids": ids}) + "\n" for ids in BLOCKS))
    elif request.param == "parquet":
        found.to_parquet(path)
    elif request.param == "tensors":
        found.with_format("torch").save_to_disk(path)
    else:
        (found if request.param == "folder" else DatasetDict({"train": found, "test": found})).save_to_disk(path)
    return path


def loaded(path: Path, **options: Any) -> dict[str, Dataset]:
    return call_function(f"{RECIPE}:documents", "dataset", config_of(path, **options))


def config_of(path: Path, max_length: int = 16, **options: Any) -> Config:
    own = {"path": str(path), **options}
    return Config().changed(dataset_options=own, max_length=max_length, task=f"{RECIPE}:Task", validation_fraction=0.05)


def examples_of(path: Path, max_length: int) -> list[list[int]]:
    config, train = config_of(path, max_length), loaded(path)["train"]
    found = tokenize(corpus_of({"train": train, "validation": train}, config), task_of(config), BYTES)
    return [list(tokens) for tokens in found["train"]["tokens"]]


def task_of(config: Config) -> Any:
    return load_task(config.data.task)(config)


def test_ids_become_examples_as_they_are(stored: Path) -> None:
    """A block as long as the longest example is one example: no token is added that would begin another."""
    assert examples_of(stored, 16) == BLOCKS
    assert examples_of(stored, 7) == [part for ids in BLOCKS for part in (ids[:8], ids[7:15], ids[14:])]


def test_a_run_trains_and_leaves_the_tokenizer_alone(tmp_path: Path) -> None:
    (tmp_path / "ids.jsonl").write_text("".join(json.dumps({"ids": ids}) + "\n" for ids in BLOCKS))
    words = ["--config", str(write_recipe(tmp_path)), "--task", f"{RECIPE}:Task", "--dataset", f"{RECIPE}:documents"]
    words += ["--dataset_options", json.dumps({"path": str(tmp_path / "ids.jsonl"), "column": "ids"})]
    words += ["--max_length", "16", "--packing", "--max_steps", "3", "--output_dir", str(tmp_path / "run")]
    assert main(words) == EXIT_DONE
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["metric_name"] == "perplexity" and summary["padding_share"] == 0
    final = tmp_path / "run" / "final"
    assert AutoTokenizer.from_pretrained(final)("ab")["input_ids"] == BYTES("ab")["input_ids"]  # type: ignore
    assert AutoModelForCausalLM.from_pretrained(final) and load_file(final / "model.safetensors")


def test_ids_that_the_tokenizer_does_not_know_are_told(tmp_path: Path) -> None:
    task = task_of(config_of(tmp_path))
    for wrong in (999, -1, "a"):
        said = rf"token id {wrong!r} in a document that begins \[5, {wrong!r}\]: the tokenizer has 259 entries"
        with pytest.raises(UserError, match=said):
            list(task.token_ids([json.dumps([1, 2, 3]), json.dumps([5, wrong])], BYTES))


def test_documents_and_task_belong_together(tmp_path: Path) -> None:
    """One without the other would train on JSON, or cannot read a text."""
    (tmp_path / "ids.JSONL").write_text('{"input_ids": [1]}\n')
    config = config_of(tmp_path / "ids.JSONL")
    for task in ("causal_lm", "masked_lm"):
        with pytest.raises(UsageError, match=f"task: {task} would train on the JSON that .*: give --task .*:Task"):
            call_function(f"{RECIPE}:documents", "dataset", config.changed(task=task))
    own = "from train.tasks.causal_lm import Task as Base\n\n\nclass Task(Base):\n    def cut(self, *given): ...\n"
    (tmp_path / "own.py").write_text(own)
    found = call_function(f"{RECIPE}:documents", "dataset", config.changed(task=f"{tmp_path / 'own.py'}:Task"))
    assert found["train"]["text"][:] == ["[1]"]
    for text in ("a text", '{"a": "JSON"}', "3"):
        with pytest.raises(
            UserError, match=r"a row holds .*, not a list of ids\. Name .* recipes/token_ids.py:documents"
        ):
            list(task_of(config).token_ids([text], BYTES))


def test_wrong_options_and_data_end_in_one_message(tmp_path: Path) -> None:
    (tmp_path / "ids.jsonl").write_text('{"tokens": [1]}\n')
    with pytest.raises(UserError, match=r"no column 'input_ids'; the columns are tokens\. Name it"):
        loaded(tmp_path / "ids.jsonl")
    with pytest.raises(UserError, match=r"token_ids\.py: .*gone\.parquet: "):
        loaded(tmp_path / "gone.parquet")
    with pytest.raises(UsageError, match="takes path, which is needed, and column"):
        loaded(tmp_path / "ids.jsonl", split="train")
    with pytest.raises(UsageError, match="takes path, which is needed, and column"):
        loaded(tmp_path / "ids.jsonl", column=["tokens"])
