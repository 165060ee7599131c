"""What a fork changes: data, model, task or step, each by one file, in a copy of the repository that runs by itself."""

from __future__ import annotations

import ast
import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from faults.processes import script
from safetensors.torch import load_file
from support import ROOT
from tokenizers import Tokenizer, decoders, models
from tokenizers.pre_tokenizers import ByteLevel, WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoModelForQuestionAnswering,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    BartConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    T5Config,
)

from train.config import Config
from train.figures import read_metrics
from train.records import EXIT_DONE, EXIT_ERROR, EXIT_USAGE, IGNORE
from train.tasks import load_tokenizer

TINY = '{"model_type": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 2}'
BASE = ("--tokenizer", "bytes", "--max_length", 32, "--max_steps", 3, "--log_every_steps", 1, "--cpu_threads", 1)
QUICK = ("--rehearse", False, "--predict_memory", False)
LISTOPS = (
    "--dataset",
    "recipes/listops.py:documents",
    "--dataset_options",
    json.dumps({"train": 12, "validation": 3, "test": 2, "min_length": 5, "max_length": 30, "max_depth": 3}),
)
RUN = """
import runpy, sys, train
from pathlib import Path
from train.extras.report import charts
assert Path(train.__file__).resolve().is_relative_to(Path.cwd().resolve()), train.__file__
charts.svg = lambda *arguments, **options: "<svg></svg>"  # real ones take longer than such a run
sys.argv[0] = "train/main.py"
runpy.run_path(sys.argv[0], run_name="__main__")
"""


class Fork:
    """A copy of the repository, and runs of it that see no other."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.output = folder, folder / "runs" / "mine"
        for name in ("train", "recipes"):
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        self.write("run.py", RUN)

    def write(self, name: str, code: str) -> None:
        (self.folder / name).write_text(code)

    def run(self, *flags: Any) -> subprocess.CompletedProcess[str]:
        """``python train/main.py`` with these flags, from the copy's folder."""
        words = ("run.py", *BASE, "--output_dir", self.output, *flags)
        return script(words, 1, {**os.environ, "PYTHONPATH": str(self.folder)}, self.folder, alone=True)

    def trains(self, *flags: Any) -> tuple[str, dict[str, Any]]:
        """What a run that has to succeed says, and its summary."""
        done = self.run(*flags)
        assert done.returncode == EXIT_DONE, done.stderr
        rows = read_metrics(self.output / "metrics.jsonl")
        assert [row["step"] for row in rows if row["kind"] == "train"] == [1, 2, 3]
        return done.stdout, json.loads((self.output / "summary.json").read_text())


@pytest.fixture
def fork(tmp_path: Path) -> Fork:
    return Fork(tmp_path / "fork")


def shown_in(page: str, file: str) -> str:
    """The one block of Python on a page that begins with a comment that names ``file``, a pattern."""
    [shown] = re.findall(rf"```python\n(# {file}.*?)```", (ROOT / page).read_text(), re.DOTALL)
    return shown


# Data


def test_a_tokenizer_shown_in_the_docs_reads_dna(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(shown_in("docs/data.md", r"my_tokenizer\.py"), {})
    tokenizer = load_tokenizer(str(tmp_path / "dna"))
    assert tokenizer("ACGT\nN-a", add_special_tokens=False)["input_ids"] == [3, 4, 5, 6, 2, 2, 3]
    assert (tokenizer.eos_token_id, tokenizer.mask_token_id, tokenizer.decode([5, 3])) == (0, 1, "g a")


DATA = """
import datasets

def documents(config):
    count = (config.data.dataset_options or {"count": 9})["count"]
    texts = [f"document {number} of my own data" for number in range(count)]
    splits = {"train": texts, "validation": texts[:2]}
    return {name: datasets.Dataset.from_dict({"text": texts}) for name, texts in splits.items()}
"""


@pytest.mark.parametrize(
    ("spec", "count"), [pytest.param("my_data:documents", 9, marks=pytest.mark.slow), ("my_data.py:documents", 5)]
)
def test_data_comes_from_a_function(fork: Fork, spec: str, count: int) -> None:
    fork.write("my_data.py", DATA)
    options = () if count == 9 else ("--dataset_options", json.dumps({"count": count}))
    out, summary = fork.trains("--dataset", spec, *options, "--model_config", TINY, *QUICK)
    assert f"data: {spec}: documents {count} for training, 2 for validation" in out
    assert summary["dataset"] == spec


# Model


MODEL = """
import random

import numpy as np
import torch
from torch import nn

class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.layer = nn.Embedding(259, 8), nn.GRU(8, 8, batch_first=True)
        self.head = nn.Linear(8, 259)
        self.register_buffer("drawn", torch.tensor([np.random.rand(), random.random()], dtype=torch.float64))

    def forward(self, input_ids):
        return self.head(self.layer(self.embedding(input_ids))[0])

def build():
    return Recurrent()
"""


def test_model_comes_from_a_function(fork: Fork) -> None:
    fork.write("my_model.py", MODEL)
    out, summary = fork.trains(*LISTOPS, "--model", "my_model:build", *QUICK)
    assert "model: Recurrent, 0.00 M parameters" in out
    assert summary["model"] == "my_model:build" and summary["num_parameters"] == 259 * 8 * 2 + 259 + 2 * 24 * 9
    weights = load_file(fork.output / "final" / "model.safetensors")
    # whatever generator draws the first weights, --seed determines them
    assert weights.pop("drawn").tolist() == [np.random.RandomState(42).rand(), random.Random(42).random()]
    assert set(weights) == {"embedding.weight", "head.weight", "head.bias"} | {
        f"layer.{kind}_{side}_l0" for kind in ("weight", "bias") for side in ("ih", "hh")
    }


@pytest.mark.parametrize(
    ("page", "name"),
    [
        ("README.md", "my_model"),
        *(pytest.param("docs/forking.md", name, marks=pytest.mark.slow) for name in ("my_model", "my_classifier")),
    ],
)
def test_models_shown_in_the_docs_train(fork: Fork, page: str, name: str) -> None:
    fork.write(f"{name}.py", shown_in(page, rf"{name}\.py"))
    rows = '[{"text": "ab" * n, "label": "odd" if n % 2 else "even"} for n in range(1, 20)]'  # unequal lengths: padded
    fork.write(
        "my_data.py", f"import datasets\n\ndef documents(config):\n    return datasets.Dataset.from_list({rows})"
    )
    flags = ["--dataset", "my_data:documents", "--model", f"{name}:build", "--micro_batch_size", 4]
    # a copy's planner starts from scratch: once is enough
    flags += ["--task", "sequence_classification"] if name == "my_classifier" else ["--predict_memory", False]
    _, summary = fork.trains(*flags)
    assert summary["model"] == f"{name}:build"
    assert summary["label_names"] == (["even", "odd"] if name == "my_classifier" else [])


# Task


TASK = '''
"""The share of spaces in a document, as a number."""

import numpy as np
import torch

from train import tasks
from train.tasks import Scores


class Task(tasks.Task):
    title = "space counting"
    auto_class = "AutoModelForSequenceClassification"
    default_metric = "loss"
    headline_metric = "mean_absolute_error"
    example_columns = ("tokens", "length", "share")

    @staticmethod
    def loss_sum(logits, labels):
        return (logits[:, 0].float() - labels).square().sum()

    @staticmethod
    def scores(logits, labels):
        return Scores((logits[:, 0].float() - labels).square(), logits[:, 0].float())

    def label_names(self, corpus):
        return ("share",)

    def metrics(self, table, examples, label_names):
        gaps = np.abs(table[:, 4] - table[:, 5])
        return {
            "loss": float(table[:, 1].sum() / table[:, 2].sum()),
            "mean_absolute_error": float(gaps.mean()),
            "mean_square_gap": float(np.square(gaps).mean()),
        }

    def cut(self, text, ids, label, tokenizer):
        tokens = self.framed(ids[: self.room(tokenizer)], tokenizer)
        yield {"tokens": tokens, "length": len(tokens), "share": text.count(" ") / len(text)}

    def inputs_and_labels(self, example, seed):
        return torch.tensor(example["tokens"]), torch.tensor(example["share"], dtype=torch.float32)
'''


QUESTION, ANSWER = "What is six times seven?\n\n", "Forty-two.\n"
LENGTH = len(QUESTION + ANSWER)
DOCUMENTS = f'return datasets.Dataset.from_dict({{"text": [{QUESTION + ANSWER!r}] * 9}})\n'


def test_task_is_one_new_file(fork: Fork) -> None:
    fork.write("train/tasks/share_of_spaces.py", TASK)
    flags = ("--task", "share_of_spaces", *LISTOPS)
    out, summary = fork.trains(*flags, "--model_config", TINY, "--micro_batch_size", 2, "--eval_every_steps", 2)
    assert summary["task"] == "share_of_spaces" and summary["metric_name"] == "mean_absolute_error"
    figures = summary["result"]["validation"]
    assert figures["loss"] == pytest.approx(figures["mean_square_gap"], rel=1e-5)
    assert 0 < figures["mean_absolute_error"] == summary["metric_value"]
    assert set(figures) == {"loss", "mean_absolute_error", "mean_square_gap", "examples", "data"}
    assert "mean absolute error" in out
    rows = read_metrics(fork.output / "metrics.jsonl")
    # A model that starts near zero is off by a share between 0 and 1: no cross-entropy of anything.
    assert all(0 < row["loss"] < 2 for row in rows if row["kind"] == "train")
    assert summary["best_step"] in (2, 3) and summary["best_metric"] == min(
        row["loss"] for row in rows if row["kind"] == "evaluation" and row["split"] == "validation"
    )


@pytest.mark.parametrize(
    ("page", "name"), [("README.md", "last_half"), pytest.param("docs/forking.md", "answers", marks=pytest.mark.slow)]
)
def test_tasks_shown_in_the_docs_train(fork: Fork, page: str, name: str) -> None:
    fork.write(f"train/tasks/{name}.py", shown_in(page, rf"train/tasks/{name}\.py"))
    fork.write("my_data.py", f"import datasets\n\ndef documents(config):\n    {DOCUMENTS}")
    flags = ("--task", name, "--dataset", "my_data:documents", "--model_config", TINY, "--max_length", 50)
    _, summary = fork.trains(*flags, *QUICK)
    metrics = summary["result"]["validation"]
    assert metrics["loss"] == pytest.approx(math.log(259), abs=0.2)
    assert metrics["perplexity"] == pytest.approx(math.exp(metrics["loss"]))
    if name == "last_half":  # bytes count as far as targets stand for them: a token each, and one for the end
        assert metrics["bits_per_byte"] == pytest.approx(metrics["loss"] / math.log(2) * (LENGTH + 1) / LENGTH)


POSITIONS = """
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions, self.head = nn.Embedding(300, 8), nn.Embedding(16, 8), nn.Linear(8, 300)

    def forward(self, input_ids):
        return self.head(self.tokens(input_ids) + self.positions(torch.arange(input_ids.shape[1])))


def build():
    return Model()
"""


@pytest.mark.slow
def test_a_table_that_is_too_small_is_told_at_the_end_of_the_traceback(fork: Fork) -> None:
    fork.write("my_data.py", DATA)
    fork.write("my_model.py", POSITIONS)
    done = fork.run("--dataset", "my_data:documents", "--model", "my_model:build")
    assert done.returncode == EXIT_ERROR and "IndexError: index out of range" in done.stderr
    assert "A table of the model may be too small: are there max_length 32 positions" in done.stdout + done.stderr


@pytest.mark.slow
def test_regression_as_shown_in_the_docs_learns_a_number(fork: Fork) -> None:
    fork.write("train/tasks/regression.py", shown_in("docs/forking.md", r"train/tasks/regression\.py"))
    lines = [f"film {number} was {('bad,0.25', 'good,3.25')[number % 2]}" for number in range(200)]
    fork.write("stars.csv", "\n".join(["text,label", *lines]))
    model = json.dumps({"model_type": "bert", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2})
    flags = ("--task", "regression", "--dataset", "stars.csv", "--model_config", model, "--micro_batch_size", 8)
    done = fork.run(*flags, "--max_steps", 60, "--learning_rate", 0.01, "--eval_every_steps", 20, "--rehearse", "False")
    assert done.returncode == EXIT_DONE, done.stderr
    rows = [row for row in read_metrics(fork.output / "metrics.jsonl") if row["kind"] == "evaluation"]
    summary = json.loads((fork.output / "summary.json").read_text())
    assert summary["metric_name"] == "mse" and summary["metric_value"] == rows[-1]["mse"]
    assert rows[-1]["mse"] < 0.5  # the labels' variance is 2.25
    assert summary["best_metric"] == min(row["mse"] for row in rows)


@pytest.mark.slow
def test_pairs_as_shown_in_the_docs_know_which_text_a_word_is_in(fork: Fork) -> None:
    """The class is how the second text begins; the first one, of any length, begins so or otherwise."""
    marks, words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"], ["yes", "no", *(f"w{n}" for n in range(8))]
    raw = Tokenizer(models.WordLevel({word: n for n, word in enumerate(marks + words)}, unk_token="[UNK]"))
    raw.pre_tokenizer = WhitespaceSplit()
    frame = {"single": "[CLS] $A [SEP]", "pair": "[CLS] $A [SEP] $B:1 [SEP]:1"}
    raw.post_processor = TemplateProcessing(**frame, special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    names: Any = {f"{mark[1:-1].lower()}_token": mark for mark in marks}
    names["model_input_names"] = ["input_ids", "token_type_ids", "attention_mask"]
    PreTrainedTokenizerFast(tokenizer_object=raw, **names).save_pretrained(fork.folder / "own")
    draw, rows = random.Random(0), []
    for number in range(240):
        first, second = ([draw.choice(words[2:]) for _ in range(draw.randint(1, 9))] for _ in range(2))
        texts = [" ".join([draw.choice(words[:2]), *first]), " ".join([words[number % 2], *second])]
        rows.append({"sentence1": texts[0], "sentence2": texts[1], "label": words[number % 2]})
    for name, some in ("train", rows[:200]), ("validation", rows[200:]):
        fork.write(f"{name}.jsonl", "".join(json.dumps(row) + "\n" for row in some))
    fork.write("train/tasks/pairs.py", shown_in("docs/forking.md", r"train/tasks/pairs\.py"))
    code, loaded = shown_in("docs/forking.md", r"my_pairs\.py"), '"nyu-mll/glue", "mrpc"'
    assert code.count(loaded) == 1
    files = {name: f"{name}.jsonl" for name in ("train", "validation")}
    fork.write("my_pairs.py", code.replace(loaded, f'"json", data_files={files}'))
    flags = ("--task", "pairs", "--dataset", "my_pairs.py:documents")
    flags += ("--model_config", json.dumps({**BERT, "initializer_range": 0.1}))
    flags += ("--tokenizer", "./own", "--max_length", 16, "--micro_batch_size", 8, "--learning_rate", 0.003)
    done = fork.run(*flags, "--max_steps", 60)
    assert done.returncode == EXIT_DONE, done.stderr
    summary = json.loads((fork.output / "summary.json").read_text())
    assert summary["predicted_peak_bytes"] == pytest.approx(summary["peak_allocated_bytes"], rel=0.02)
    model: Any = AutoModelForSequenceClassification.from_pretrained(fork.output / "final")
    tokenizer: Any = AutoTokenizer.from_pretrained(fork.output / "final")
    right = loss_sum = 0
    for row in rows[200:]:
        pair = tokenizer(row["sentence1"], row["sentence2"], truncation=True, return_tensors="pt")
        assert pair["input_ids"].shape[1] <= 16 and pair["token_type_ids"].any()
        found = model(**pair, labels=torch.tensor([model.config.label2id[row["label"]]]))
        right += model.config.id2label[int(found.logits.argmax())] == row["label"]
        loss_sum += found.loss.item()
    assert model.config.label2id == {"no": 0, "yes": 1} and summary["metric_value"] == right / 40 > 0.9
    assert summary["result"]["validation"]["loss"] == pytest.approx(loss_sum / 40, rel=1e-3)


@pytest.mark.slow
def test_each_source_has_a_loss_as_shown_in_the_docs(fork: Fork) -> None:
    fork.write("train/tasks/sources.py", shown_in("docs/forking.md", r"train/tasks/sources\.py"))
    rows = [{"text": f"page {n} " * 9, "label": "web"} for n in range(60)]
    rows += [{"text": "x" * (40 + n), "label": "code"} for n in range(20)]
    fork.write("mixed.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    flags = ("--task", "sources", "--dataset", "mixed.jsonl", "--model_config", TINY, "--validation_fraction", 0.2)
    best = ("--eval_every_steps", 10, "--metric_for_best", "loss_web", "--load_best_model_at_end")
    done = fork.run(*flags, *best, "--max_steps", 20, "--save_every_steps", 10, "--rehearse", "False")
    assert done.returncode == EXIT_DONE, done.stderr
    found = json.loads((fork.output / "summary.json").read_text())
    whole, web, code = (found["result"]["validation"][name] for name in ("loss", "loss_web", "loss_code"))
    assert min(web, code) < whole < max(web, code) and web != code
    assert (found["metric_name"], found["metric_value"]) == ("loss_web", web)


BERT = {"model_type": "bert", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
        "num_attention_heads": 2, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}  # fmt: skip


def test_tags_shown_in_the_docs_skip_words_without_tokens_and_divide_long_documents() -> None:
    names: dict[str, Any] = {}
    exec(shown_in("docs/forking.md", r"train/tasks/tags\.py"), names)

    class Pieces(SimpleNamespace):
        __hash__: Any = object.__hash__  # as tokenizers have it

        def __call__(self, word: str, **options: Any) -> dict[str, list[int]]:
            return {"input_ids": [7] * len(word.strip().strip("\u200e"))}

    task = names["Task"](Config().changed(max_length=5))
    document = json.dumps({"words": ["\u200e", "Ada", "is"], "tags": ["O", "NAME", "O"]})
    found = list(task.cut(document, [], None, Pieces(cls_token_id=1, sep_token_id=2)))
    assert [example["tokens"] for example in found] == [[1, 7, 7, 7, 2], [1, 7, 7, 2]]
    assert [example["tags"] for example in found] == [[IGNORE, 1, IGNORE, IGNORE, IGNORE], [IGNORE, 0, IGNORE, IGNORE]]


@pytest.mark.slow
def test_tags_as_shown_in_the_docs_are_learned_and_their_f1_is_that_of_final(fork: Fork) -> None:
    fork.write("train/tasks/tags.py", shown_in("docs/forking.md", r"train/tasks/tags\.py"))
    draw, kinds = random.Random(0), {"Ada": "NAME", "Rome": "PLACE", "a": "O", "sees": "O"}
    rows = [[draw.choice(list(kinds)) for _ in range(draw.randint(1, 9))] for _ in range(60)]
    texts = [json.dumps({"words": words, "tags": [kinds[word] for word in words]}) for words in rows]
    fork.write("train.jsonl", "".join(json.dumps({"text": text}) + "\n" for text in texts[:48]))
    fork.write("held.jsonl", "".join(json.dumps({"text": text}) + "\n" for text in texts[48:]))
    flags = ("--task", "tags", "--dataset", "train.jsonl", "--validation_dataset", "held.jsonl", "--max_length", 24)
    flags += ("--model_config", json.dumps(BERT), "--micro_batch_size", 8, "--learning_rate", 0.01)
    done = fork.run(*flags, "--max_steps", 120, "--eval_every_steps", 40)
    assert done.returncode == EXIT_DONE, done.stderr
    summary = json.loads((fork.output / "summary.json").read_text())
    assert summary["metric_name"] == "f1" and summary["predicted_peak_bytes"] > 0
    model, right, found, real = AutoModelForTokenClassification.from_pretrained(fork.output / "final"), 0, 0, 0
    tokenizer: Any = AutoTokenizer.from_pretrained(fork.output / "final")
    for text in texts[48:]:
        row = json.loads(text)
        ids = tokenizer("".join(f" {word}" for word in row["words"]), add_special_tokens=False)["input_ids"]
        (start, end), room = tokenizer("")["input_ids"], 22
        windows = [[start, *ids[first : first + room], end] for first in range(0, len(ids), room)]
        guessed = torch.cat([model(torch.tensor([ids])).logits.argmax(-1)[0, 1:-1] for ids in windows])
        places = np.cumsum([0, *(len(word) + 1 for word in row["words"])])[:-1]  # a token is a byte
        for place, tag in zip(places, row["tags"], strict=True):
            tag = ("O", "NAME", "PLACE").index(tag)
            right, found, real = right + (guessed[place] == tag > 0), found + (guessed[place] > 0), real + (tag > 0)
    assert summary["metric_value"] == pytest.approx(float(2 * right / (found + real)))
    assert 0.5 < summary["metric_value"] <= 1


SPANS = """
import torch
from train import tasks


def positions(output, labels):
    both = torch.stack([output["start_logits"], output["end_logits"]], dim=1)  # (B, 2, S)
    return tasks.cross_entropy(both, labels).view(labels.shape), both.argmax(-1)


class Task(tasks.Task):
    auto_class = "AutoModelForQuestionAnswering"
    example_columns = ("tokens", "length", "places")

    def cut(self, text, ids, label, tokenizer):
        tokens = self.framed(ids[: self.room(tokenizer)], tokenizer)
        yield {"tokens": tokens, "length": len(tokens), "places": [2, len(tokens) - 2]}

    def inputs_and_labels(self, example, seed):
        return torch.tensor(example["tokens"]).long(), torch.tensor(example["places"]).long()

    @staticmethod
    def loss_sum(output, labels):
        return positions(output, labels)[0].sum()

    @staticmethod
    def scores(output, labels):
        losses, predictions = positions(output, labels)
        return tasks.Scores(losses.sum(1), predictions)
"""


@pytest.mark.slow
def test_a_task_takes_the_whole_output_of_a_model_without_logits(fork: Fork) -> None:
    fork.write("spans.py", SPANS)
    fork.write("texts.csv", "\n".join(["text", *(f"number {n} is here" for n in range(40))]))
    fork.write("held.csv", "\n".join(["text", *(f"number {n} was there" for n in range(7))]))
    flags = ("--task", "spans.py:Task", "--dataset", "texts.csv", "--model_config", json.dumps(BERT))
    flags += ("--validation_dataset", "held.csv")
    _, summary = fork.trains(*flags, "--micro_batch_size", 2, "--eval_batch_size", 2)
    assert summary["predicted_peak_bytes"] == pytest.approx(summary["peak_allocated_bytes"], rel=0.02)
    model, losses = AutoModelForQuestionAnswering.from_pretrained(fork.output / "final"), []
    tokenizer: Any = AutoTokenizer.from_pretrained(fork.output / "final")
    for n in range(7):
        ids = tokenizer(f"number {n} was there", return_tensors="pt")["input_ids"]
        places = torch.tensor([2]), torch.tensor([ids.shape[1] - 2])
        losses.append(model(ids, start_positions=places[0], end_positions=places[1]).loss.item())
    assert summary["result"]["validation"]["loss"] == pytest.approx(np.mean(losses), rel=1e-4)


@pytest.mark.slow
def test_a_model_without_logits_gets_a_message_where_the_task_wants_them(fork: Fork) -> None:
    fork.write("spans.py", SPANS.partition("    @staticmethod")[0])
    fork.write("texts.csv", "\n".join(["text", *(f"number {n} is here" for n in range(40))]))
    flags = ("--task", "spans.py:Task", "--dataset", "texts.csv", "--model_config", json.dumps(BERT))
    done = fork.run(*flags)
    assert done.returncode == EXIT_ERROR and "Traceback" not in done.stderr
    assert (
        "no logits: a task's own loss_sum and scores can take the model's QuestionAnsweringModelOutput" in done.stderr
    )


MASKS = """
import torch
from train.tasks import sequence_classification


class Task(sequence_classification.Task):
    def collate(self, examples, seed, pad_id):
        batch = super().collate(examples, seed, pad_id)
        mask = torch.zeros_like(batch.inputs["input_ids"])
        mask[:, 0] = 1
        return type(batch)(**{**vars(batch), "inputs": {**batch.inputs, "global_attention_mask": mask}})
"""


@pytest.mark.slow
def test_a_mask_that_a_task_makes_is_predicted_by_how_much_it_chooses(fork: Fork) -> None:
    """Longformer keeps scores of each token that all others see, and there is one a row."""
    fork.write("masks.py", MASKS)
    fork.write("films.csv", "\n".join(["text,label", *(f"film {n} was {'good' * (n % 9)},{n % 2}" for n in range(60))]))
    model = json.dumps({**BERT, "model_type": "longformer", "attention_window": 8, "max_position_embeddings": 80})
    flags = ("--task", "masks.py:Task", "--dataset", "films.csv", "--model_config", model, "--micro_batch_size", 4)
    _, summary = fork.trains(*flags, "--rehearse", True, "--predict_memory", True, "--max_length", 64)
    assert summary["predicted_peak_bytes"] == pytest.approx(summary["peak_allocated_bytes"], rel=0.005)


PADDED = """
import torch
from torch import nn
from train.tasks import Scores, cross_entropy_scores, sequence_classification


class Task(sequence_classification.Task):
    @staticmethod
    def scores(logits, labels):
        plain = cross_entropy_scores(logits, labels)
        return Scores(plain.loss_sums, plain.predictions[:, None])


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(300, 8, padding_idx=0), nn.Linear(8, 2)

    def forward(self, input_ids, attention_mask=None):
        return self.head(self.embed(input_ids).sum(1))
"""


@pytest.mark.slow
def test_padding_is_tried_with_the_token_that_pads_and_predictions_have_the_shape_of_labels(fork: Fork) -> None:
    """The tokenizer ``bytes`` pads with 1, and the model leaves 0 out."""
    fork.write("padded.py", PADDED)
    fork.write("films.csv", "\n".join(["text,label", *(f"film {n},{n % 2}" for n in range(40))]))
    flags = ("--dataset", "films.csv", "--model", "padded.py:Model", "--micro_batch_size", 4)
    done = fork.run("--task", "sequence_classification", *flags)
    assert done.returncode == EXIT_USAGE and "padding changes its results" in done.stderr
    done = fork.run("--task", "padded.py:Task", *flags, "--check_model", False)
    assert done.returncode == EXIT_ERROR and "Traceback" not in done.stderr
    assert "predictions (2, 1) need the labels' shape, (2,)." in done.stderr


SERIES = """
import json, random, datasets, torch
from torch import nn
from train.tasks import causal_lm, sequence_classification


def documents(config):
    draw = random.Random(0)
    rows = [[[draw.random(), 1.0] for _ in range(draw.randint(3, 20))] for _ in range(60)]
    labels = [int(sum(value for value, _ in row) > len(row) / 2) for row in rows]
    return datasets.Dataset.from_dict({"text": list(map(json.dumps, rows)), "label": labels})


class Task(sequence_classification.Task):
    example_columns = ("values", "length", "label")

    def token_ids(self, texts, tokenizer):
        return ([] for _ in texts)

    def cut(self, text, ids, label, tokenizer):
        values = json.loads(text)[: (self.data.dataset_options or {}).get("most", 20)]
        yield {"values": values, "length": len(values), "label": label}

    def inputs_and_labels(self, example, seed):
        return torch.tensor(example["values"]), torch.tensor(int(example["label"]))

    def longest_example(self):
        return {"values": [[0.0, 0.0]] * 20, "length": 20, "label": 0}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(2, 8), nn.Linear(8, 2)

    def forward(self, input_ids, attention_mask=None):
        assert input_ids.dtype == torch.float32 and input_ids.shape[2:] == (2,)
        mask = torch.ones(input_ids.shape[:2], dtype=torch.long) if attention_mask is None else attention_mask
        assert mask.shape == input_ids.shape[:2] and mask.dtype == torch.long
        assert not input_ids[mask == 0].any()
        hidden = self.embed(input_ids).tanh() * mask[..., None]
        return self.head(hidden.sum(1) / mask.sum(1, keepdim=True))
"""


@pytest.mark.slow
def test_rows_may_be_vectors_and_an_option_of_the_task_makes_other_examples(fork: Fork) -> None:
    fork.write("series.py", SERIES)
    flags = ("--task", "series.py:Task", "--dataset", "series.py:documents", "--model", "series.py:Model")
    flags += ("--micro_batch_size", 4, "--resume", "never", "--check_model", False)  # which would try tokens
    _, summary = fork.trains(*flags)
    assert summary["predicted_peak_bytes"] == pytest.approx(summary["peak_allocated_bytes"], rel=0.05)
    assert 0 < summary["padding_share"] < 0.9
    _, shorter = fork.trains(*flags, "--dataset_options", '{"most": 2}')
    assert (shorter["tokens"], shorter["padding_share"]) == (3 * 4 * 2, 0)


TAGS = """
import torch
from torch.nn import functional as F

from train.tasks import Scores, sequence_classification


class Task(sequence_classification.Task):
    title, default_metric = "tagging", "loss"

    def label_names(self, corpus):
        return ("good", "long", "loud")

    def classes_of(self, labels, label_names):
        return [str(label) for label in labels]

    def inputs_and_labels(self, example, seed):
        labels = [float(name in example["label"]) for name in ("good", "long", "loud")]
        return torch.tensor(example["tokens"], dtype=torch.long), torch.tensor(labels)

    @staticmethod
    def loss_sum(logits, labels):
        return F.binary_cross_entropy_with_logits(logits.float(), labels, reduction="sum")

    @staticmethod
    def scores(logits, labels):
        losses = F.binary_cross_entropy_with_logits(logits.float(), labels, reduction="none")
        return Scores(losses, logits)

    def metrics(self, table, examples, label_names):
        return {"loss": float(table[:, 1].sum() / table[:, 2].sum())}
"""


@pytest.mark.slow
def test_auto_knows_labels_of_several_classes_at_once(fork: Fork) -> None:
    fork.write("train/tasks/tags.py", TAGS)
    lines = [f"film {number},{('good long', 'loud')[number % 2]}" for number in range(40)]
    fork.write("films.csv", "\n".join(["text,label", *lines]))
    model = json.dumps({"model_type": "bert", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2})
    flags = ("--task", "tags", "--dataset", "films.csv", "--model_config", model)
    said, summary = fork.trains(*flags, "--micro_batch_size", "auto", "--global_batch_size", 8)
    assert re.search(r"^micro_batch_size: 8 × 9 tokens, predicted to take", said, re.MULTILINE), said
    assert summary["predicted_peak_bytes"] == pytest.approx(summary["peak_allocated_bytes"], rel=0.02)


CHATML = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
THINKING = CHATML.replace("<|assistant|>{% endif %}", "<|assistant|>so:{% endif %}")  # which no answer begins with
FORGETFUL = CHATML.replace("{{ m.content }}", "{{ m.content if loop.last else m.content.split('!')[-1] }}")
CHATS = [
    [("user", "two?"), ("assistant", "hm!2"), ("user", "three?"), ("assistant", "hm!3")],
    [("system", "be short"), ("user", "four?"), ("assistant", "hm!4")],
    [("user", "no answer")],
    [("assistant", "welcome"), ("user", "no answer")],
]


def of_recipe(name: str, path: str, **options: Any) -> tuple[str, ...]:
    """Flags for the task and the documents of a file in recipes/."""
    given = json.dumps({"path": path, **options})
    places = "--task", f"recipes/{name}.py:Task", "--dataset", f"recipes/{name}.py:documents"
    return (*places, "--dataset_options", given)


def chat_tokenizer(folder: Path, template: str) -> None:
    """One token for each byte, and marks for who speaks."""
    bytes_ = Tokenizer(models.BPE({letter: n for n, letter in enumerate(sorted(ByteLevel.alphabet()))}, []))
    bytes_.pre_tokenizer, bytes_.decoder = ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    marks: Any = ["<|system|>", "<|user|>", "<|assistant|>"]
    made = PreTrainedTokenizerFast(tokenizer_object=bytes_, eos_token="<|end|>", additional_special_tokens=marks)
    made.chat_template = template
    made.save_pretrained(folder)


@pytest.mark.parametrize(
    ("template", "learned"),
    [
        (CHATML, {"<|user|>two?<|end|><|assistant|>[hm!2<|end|>]<|user|>three?<|end|><|assistant|>[hm!3<|end|>]"}),
        pytest.param(
            FORGETFUL,
            {
                "<|user|>two?<|end|><|assistant|>[hm!2<|end|>]",
                "<|user|>two?<|end|><|assistant|>2<|end|><|user|>three?<|end|><|assistant|>[hm!3<|end|>]",
            },
            marks=pytest.mark.slow,
        ),
        pytest.param(
            THINKING,
            {"<|user|>two?<|end|><|assistant|>[hm!2<|end|>]<|user|>three?<|end|><|assistant|>[hm!3<|end|>]"},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_conversations_learn_what_the_assistant_says(fork: Fork, template: str, learned: set[str]) -> None:
    chats = [[{"role": role, "content": content} for role, content in chat] for chat in CHATS] * 4
    fork.write("chats.jsonl", "".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    chat_tokenizer(fork.folder / "chat", template)
    fork.write("examples.py", EXAMPLES)
    done = script(("examples.py",), 1, {**os.environ, "PYTHONPATH": str(fork.folder)}, fork.folder, alone=True)
    learned = learned | {"<|system|>be short<|end|><|user|>four?<|end|><|assistant|>[hm!4<|end|>]"}
    assert done.returncode == 0, done.stderr
    assert {line for line in done.stdout.splitlines() if line.startswith("<|")} == learned
    flags = (*of_recipe("chat", "chats.jsonl"), "--model_config", TINY, "--max_length", 80)
    flags += ("--validation_fraction", 0.5)  # some conversations have no answer
    _, summary = fork.trains(*flags, "--tokenizer", "chat", "--packing", *QUICK)
    assert summary["result"]["validation"]["loss"] == pytest.approx(math.log(260), abs=0.2)
    flags = ("--task", f"{fork.folder}/recipes/chat.py:Task", *flags[2:])  # another spelling of the same
    assert fork.run(*flags, "--tokenizer", "chat", "--packing", *QUICK, "--max_steps", 4).returncode == EXIT_DONE
    folders = fork.folder / "chat", fork.output / "final"
    made, final = map(PreTrainedTokenizerFast.from_pretrained, folders)
    assert final.chat_template == template and final("hi")["input_ids"] == made("hi")["input_ids"]


EXAMPLES = """
from train.config import Config, load_function
from train.tasks import load_task, load_tokenizer

config = Config().changed(task="recipes/chat.py:Task", dataset_options={"path": "chats.jsonl"})
task, tokenizer = load_task("recipes/chat.py:Task")(config), load_tokenizer("chat")
for row in load_function("recipes/chat.py:documents", "dataset")(config)["train"]:
    for example in task.cut(row["text"], [], None, tokenizer):
        inputs, labels = task.inputs_and_labels(example, ())
        text, before = tokenizer.decode(inputs[:1]), False
        for token, label in zip([*inputs[1:], labels[-1]], labels, strict=True):
            assert label in (-100, token)
            text += "[" * (label >= 0 and not before) + "]" * (label < 0 and before) + tokenizer.decode(token)
            before = bool(label >= 0)
        print(text + "]" * before)
"""


OWN_LOSS = """
import json
import sys

import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(sys.argv[1]).eval(), AutoTokenizer.from_pretrained(sys.argv[1])
losses = []
for line in open("summaries.jsonl"):
    row = json.loads(line)
    with torch.no_grad():
        inputs = tokenizer(row["article"], return_tensors="pt")
        losses.append(model(**inputs, labels=tokenizer(row["summary"], return_tensors="pt")["input_ids"]).loss)
print("own loss", torch.stack(losses).mean().item())
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", [T5Config, BartConfig])
def test_summaries_learn_what_the_model_s_own_loss_measures(fork: Fork, kind: Any) -> None:
    rows = [{"article": "abcdefgh"[n % 8] * (5 + n % 9), "summary": "abcdefgh"[n % 8] * 4} for n in range(40)]
    fork.write("summaries.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    chat_tokenizer(fork.folder / "made", "")
    sizes: dict[str, Any] = {"num_layers": 1, "num_heads": 2, "d_kv": 16, "d_ff": 32}
    if kind is BartConfig:
        of_each = {"layers": 1, "attention_heads": 2, "ffn_dim": 32}
        sizes = {f"{part}_{name}": size for part in ("encoder", "decoder") for name, size in of_each.items()}
        sizes |= {"bos_token_id": 256, "forced_eos_token_id": None}
    ids: dict[str, Any] = {
        "eos_token_id": 256,
        "pad_token_id": 257,
        "decoder_start_token_id": 257 if kind is T5Config else 256,
    }
    model = AutoModelForSeq2SeqLM.from_config(kind(vocab_size=5000, d_model=32, **sizes, **ids))
    model.save_pretrained(fork.folder / "made")

    flags = of_recipe("summaries", "summaries.jsonl", document="article", validation_split="train")
    said, summary = fork.trains(*flags, "--model", "made", "--tokenizer", "made", "--micro_batch_size", 4)
    assert f"loss: {'chunked' if kind is T5Config else 'full'} (auto)" in said
    assert summary["predicted_peak_bytes"] == pytest.approx(summary["peak_allocated_bytes"], rel=0.02), said
    fork.write("own_loss.py", OWN_LOSS)
    environment = {**os.environ, "PYTHONPATH": str(fork.folder)}
    done = script(("own_loss.py", str(fork.output / "final")), 1, environment, fork.folder, alone=True)
    own = float(re.findall(r"own loss (.*)", done.stdout)[0])
    assert summary["result"]["validation"]["loss"] == pytest.approx(own, rel=1e-4)


def with_extra(fork: Fork, name: str, changed: tuple[str, str] = ("", ""), after: str = "") -> None:
    """Adds the extra that the docs show to a fork, as they say: a folder, and its name in NAMES, the first or later."""
    extra = fork.folder / "train" / "extras" / name
    extra.mkdir()
    code = shown_in("docs/forking.md", rf"train/extras/{name}/__init__\.py").replace(*changed)
    (extra / "__init__.py").write_text(code)
    order = fork.folder / "train" / "extras" / "__init__.py"
    before, place = ('NAMES = "', f'NAMES = "{name} ') if not after else (f" {after} ", f" {after} {name} ")
    order.write_text(order.read_text().replace(before, place, 1))


def test_the_extra_shown_in_the_docs_adds_its_figure(fork: Fork) -> None:
    with_extra(fork, "head_norm")
    _, summary = fork.trains(*LISTOPS, "--model_config", TINY, *QUICK)
    assert summary["extras"][0] == "head_norm"
    *_, last = [row for row in read_metrics(fork.output / "metrics.jsonl") if row["kind"] == "train"]
    weights = load_file(fork.output / "final" / "model.safetensors")
    assert last["head_norm"] == pytest.approx(weights["transformer.wte.weight"].norm().item(), rel=1e-5)


@pytest.mark.slow
def test_an_extra_that_ends_a_run_before_its_first_step_evaluates_the_model(fork: Fork) -> None:
    flags = (*LISTOPS, *QUICK)
    _, trained = fork.trains(*flags, "--model_config", TINY, "--learning_rate", 0.01)
    shutil.move(fork.output / "final", fork.folder / "trained")
    (fork.folder / "train" / "extras" / "only_evaluate").mkdir()
    code = "class Extra(extras.Extra):\n    def ends_early(self, run, progress):\n        return True\n"
    fork.write("train/extras/only_evaluate/__init__.py", "from train import extras\n\n\n" + code)
    order = fork.folder / "train" / "extras" / "__init__.py"
    order.write_text(order.read_text().replace('NAMES = "', 'NAMES = "only_evaluate ', 1))
    done = fork.run(*flags, "--model", "trained", "--resume", "never")
    assert done.returncode == EXIT_DONE, done.stderr
    [row] = [row for row in read_metrics(fork.output / "metrics.jsonl") if row.get("split") == "validation"]
    expected = trained["result"]["validation"]["loss"]
    assert (row["step"], row["loss"]) == (0, pytest.approx(expected, rel=1e-6))


@pytest.mark.slow
def test_the_second_set_shown_in_the_docs_is_evaluated_with_the_first(fork: Fork) -> None:
    with_extra(fork, "second_set")
    texts = {"train": ["abcdefgh " * 4] * 9, "first": ["abc abc"] * 3, "second": ["hgf edcba"] * 2}
    for name, rows in texts.items():
        fork.write(f"{name}.jsonl", "".join(json.dumps({"text": text}) + "\n" for text in rows))
    common = ("--dataset", "train.jsonl", "--eval_every_steps", 1, *QUICK)
    flags = (*common, "--model_config", TINY, "--validation_dataset", "first.jsonl", "--metric_for_best", "second_loss")
    _, summary = fork.trains(*flags)
    rows = [row for row in read_metrics(fork.output / "metrics.jsonl") if row["kind"] == "evaluation"]
    assert summary["best_metric"] == min(row["second_loss"] for row in rows) == rows[-1]["second_loss"]
    assert "nothing to do" in fork.run(*flags).stdout
    shutil.move(fork.output / "final", fork.folder / "trained")
    alone = ("--model", "trained", "--validation_dataset", "second.jsonl", "--learning_rate", 1e-12)
    _, again = fork.trains(*common, *alone, "--resume", "never")
    assert again["result"]["validation"]["loss"] == pytest.approx(summary["best_metric"], rel=1e-5)


@pytest.mark.slow
def test_the_average_shown_in_the_docs_is_evaluated_saved_and_restored(fork: Fork) -> None:
    with_extra(fork, "average", ("0.999", "0.5"))
    refused = fork.run(*LISTOPS, "--model_config", TINY, "--load_best_model_at_end", True, "--eval_every_steps", 1)
    assert refused.returncode == EXIT_USAGE
    assert "the average cannot be combined with load_best_model_at_end: leave it out" in refused.stderr
    flags = *LISTOPS, *QUICK, "--save_every_steps", 1, "--save_total_limit", 9, "--lr_scheduler", "constant"
    assert fork.run(*flags, "--model_config", TINY, "--learning_rate", 0.01, "--max_steps", 2).returncode == EXIT_DONE
    _, summary = fork.trains(*flags, "--model_config", TINY, "--learning_rate", 0.01)  # resumes
    folders = [fork.output / "checkpoints" / f"step-{step:08d}" for step in (1, 2, 3)]
    first, second, third = (
        load_file(folder / "model-00000.safetensors")["transformer.wte.weight"] for folder in folders
    )
    average = load_file(fork.output / "final" / "model.safetensors")["transformer.wte.weight"]
    torch.testing.assert_close(average, first.lerp(second, 0.5).lerp(third, 0.5))
    assert (average - third).abs().max() > 1e-3
    expected = summary["result"]["validation"]["loss"]
    final = fork.output / "final"
    shutil.move(final, fork.folder / "averaged")
    _, again = fork.trains(*flags, "--model", "averaged", "--learning_rate", 1e-12, "--resume", "never")
    assert again["result"]["validation"]["loss"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_a_second_model_shown_in_the_docs_stays_as_it_began_is_predicted_and_not_saved(fork: Fork) -> None:
    code, begins = shown_in("docs/forking.md", r"train/tasks/near_start\.py"), "with torch.no_grad():"
    fork.write(
        "train/tasks/near_start.py", code.replace(begins, f"assert not module.start.training\n            {begins}")
    )
    sizes = '"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128'
    flags = *LISTOPS, "--model_config", f'{{"model_type": "llama", {sizes}}}', "--learning_rate", 0.01
    _, summary = fork.trains("--task", "near_start", *flags)
    unseen = (259 + 5) * 64 * 4  # of the second model's weights on a CPU: embedding and norms, which give no view
    expected = pytest.approx(summary["peak_allocated_bytes"] + unseen, rel=0.001)
    assert summary["predicted_peak_bytes"] == expected
    near = [row["loss"] for row in read_metrics(fork.output / "metrics.jsonl") if row["kind"] == "train"]
    assert not any("start" in name for name in load_file(fork.output / "final" / "model.safetensors"))
    shutil.rmtree(fork.output)
    fork.trains(*flags)
    plain = [row["loss"] for row in read_metrics(fork.output / "metrics.jsonl") if row["kind"] == "train"]
    assert near[0] == pytest.approx(plain[0], rel=1e-6) and near[2] > plain[2] + 0.004, (near, plain)


TEACHER = """
from transformers import AutoModelForCausalLM

from train.tasks import causal_lm, cross_entropy_scores, cross_entropy_sum


class Task(causal_lm.Task):
    def change_loss(self, model):
        model.teacher = AutoModelForCausalLM.from_pretrained("teacher").requires_grad_(False).eval()

        def loss_of(module, inputs, labels, scored, num_targets):
            logits = module.model(**inputs).logits
            if scored:
                return cross_entropy_scores(logits, labels)
            taught = module.teacher(**inputs).logits.detach().softmax(-1)
            return cross_entropy_sum(logits, labels) - (taught * logits.log_softmax(-1)).sum()

        model.loss_in_head = loss_of
"""


@pytest.mark.slow
def test_a_teacher_that_is_read_from_a_folder_is_predicted(fork: Fork) -> None:
    """On the CPU, and planned for a card, on which it would otherwise be in another place than the model."""
    sizes: dict[str, Any] = {"hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 2}
    config = LlamaConfig(**sizes, intermediate_size=512, vocab_size=259)
    LlamaForCausalLM(config).save_pretrained(fork.folder / "teacher")
    fork.write("train/tasks/taught.py", TEACHER)
    made = json.dumps({"model_type": "llama", **sizes, "hidden_size": 32, "intermediate_size": 64})
    flags = *LISTOPS, "--task", "taught", "--model_config", made
    _, summary = fork.trains(*flags)
    # A CPU's meter misses tensors of a second model that give no view, of one made from a configuration as many.
    predicted, measured = summary["predicted_peak_bytes"], summary["peak_allocated_bytes"]
    weights = sum(p.numel() for p in LlamaForCausalLM(config).parameters()) * 4
    assert weights < measured < predicted < measured + 0.15 * weights, (measured, predicted, weights)
    plan = (sys.executable, "-m", "train.memory", "predict", "--device", "l4", "--json", *BASE, *flags)
    done = subprocess.run([*map(str, plan)], cwd=fork.folder, capture_output=True, text=True, check=False)
    assert done.returncode == EXIT_DONE, done.stderr
    assert json.loads(done.stdout)["prediction"]["peak_bytes"] > weights


@pytest.mark.slow
def test_the_optimizer_shown_in_the_docs_trains_is_planned_and_resumes(fork: Fork) -> None:
    with_extra(fork, "nadam")
    config = fork.folder / "train" / "config.py"
    config.write_text(config.read_text().replace('"adafactor", "sgd"]', '"adafactor", "sgd", "nadam"]'))
    flags = *LISTOPS, "--model_config", TINY, "--optimizer", "nadam", "--max_grad_norm", "None", "--adam_beta2", 0.9
    flags = *flags, "--lr_scheduler", "constant", "--save_every_steps", 1, "--save_total_limit", 9, "--weight_decay", 0
    out, _ = fork.trains(*flags, "--micro_batch_size", "auto", "--global_batch_size", 4)
    assert "does nothing" not in out
    folders = [fork.output / "checkpoints" / f"step-{step:08d}" for step in (1, 2, 3)]
    before, *_, third = (load_file(folder / "model-00000.safetensors") for folder in folders)
    state = load_file(folders[0] / "optimizer-00000.safetensors")
    assert any(name.endswith("mu_product") for name in state), [*state]  # NAdam's, which AdamW does not have
    done = fork.run(*flags, "--micro_batch_size", 4, "--global_batch_size", 4, "--resume", folders[0])
    assert done.returncode == EXIT_DONE, done.stderr
    for name, weight in load_file(folders[2] / "model-00000.safetensors").items():
        torch.testing.assert_close(weight, third[name], rtol=0, atol=0)
        assert not torch.equal(weight, before[name])
    shutil.copytree(ROOT / "accelerate_configs", fork.folder / "accelerate_configs")
    fork.write("plan.py", 'import runpy\nrunpy.run_module("train.memory", run_name="__main__")\n')
    words = ("plan.py", "plan", *BASE[:4], *flags, "--global_batch_size", 4, "--device", "l4")
    planned = script(words, 1, {**os.environ, "PYTHONPATH": str(fork.folder)}, fork.folder, alone=True)
    assert planned.returncode == EXIT_DONE, planned.stderr
    assert "Fits: gpt2" in planned.stdout


@pytest.mark.slow
def test_the_order_shown_in_the_docs_begins_with_short_examples(fork: Fork) -> None:
    with_extra(fork, "short_first", after="long_sequences")
    sizes = "--micro_batch_size", 1, "--global_batch_size", 4
    fork.trains(*LISTOPS, "--model_config", TINY, *QUICK, "--max_length", 64, *sizes)
    rows = [row for row in read_metrics(fork.output / "metrics.jsonl") if row["kind"] == "train"]
    lengths = [row["sequence_length"] for row in rows]
    assert lengths == sorted(lengths) and len(set(lengths)) == 3, lengths


def test_task_that_is_not_there_is_told_with_those_that_are(fork: Fork) -> None:
    fork.write("train/tasks/share_of_spaces.py", TASK)
    done = fork.run("--task", "share_of_space", "--model_config", TINY)
    assert done.returncode != EXIT_DONE
    assert "causal_lm, masked_lm, sequence_classification, share_of_spaces" in done.stderr


# Step


def change_step(fork: Fork, line: str) -> None:
    """Puts ``line`` at the beginning of the function that README teaches."""
    path = fork.folder / "train" / "step.py"
    code = path.read_text()
    [step] = [n for n in ast.parse(code).body if isinstance(n, ast.FunctionDef) and n.name == "optimizer_step"]
    lines = code.splitlines()
    lines.insert(step.body[1].lineno - 1, f"    {line}")  # after the docstring
    path.write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize(("rehearse", "steps"), [(False, 3), (True, 4)])
def test_runs_and_the_rehearsal_follow_a_changed_step(fork: Fork, rehearse: bool, steps: int) -> None:
    fork.write("my_data.py", DATA)
    change_step(fork, 'print("MY STEP", len(micro_batches))')
    flags = ("--dataset", "my_data:documents", "--model_config", TINY, "--gradient_accumulation_steps", 2)
    out, _ = fork.trains(*flags, "--rehearse", rehearse, "--predict_memory", False)
    assert out.count("MY STEP 2\n") == steps


@pytest.mark.parametrize("rehearse", [False, True])
def test_a_broken_step_is_noticed_and_shown_where_it_broke(fork: Fork, rehearse: bool) -> None:
    fork.write("my_data.py", DATA)
    change_step(fork, 'raise ZeroDivisionError("my step is broken")')
    flags = ("--dataset", "my_data:documents", "--model_config", TINY)
    done = fork.run(*flags, "--rehearse", rehearse, "--predict_memory", False)
    assert done.returncode == EXIT_ERROR
    assert "ZeroDivisionError: my step is broken" in done.stderr
    assert str(fork.folder / "train" / "step.py") in done.stderr
    assert ("rehearse" in done.stderr) == rehearse
    assert not (fork.output / "final").exists()
