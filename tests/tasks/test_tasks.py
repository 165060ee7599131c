"""Tasks: which tokens are input, which are targets, and how a batch is formed."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
import transformers
from made_tokenizers import tokenizer_of
from support import run_for
from tokenizers.processors import TemplateProcessing
from torch import nn

from train.config import Config
from train.model import build_model
from train.records import IGNORE, Corpus, UsageError, UserError, column
from train.tasks import Task, causal_lm, load_task, masked_lm, sequence_classification, tokenize

BYTES = tokenizer_of("bytes")
END, PAD, MASK = 0, 1, 2
TEXT = "Ein längerer Satz, mit Emoji 🤗🤗 und ohne Ende. " * 3


def made(name: str, **options: Any) -> Task:
    """A task under these options."""
    return load_task(name)(Config().changed(task=name, **options))


def ids_of(text: str) -> list[int]:
    return list(BYTES(text, add_special_tokens=False)["input_ids"])  # type: ignore


def encoded(task: Task, *texts: str, **columns: list[Any]) -> list[dict[str, Any]]:
    """The examples of ``texts``, numbered as batching numbers them."""
    found = task.encode({"text": texts, **columns}, BYTES, ())
    assert tuple(found) == task.example_columns
    rows = [dict(zip(found, values, strict=True)) for values in zip(*found.values(), strict=True)]
    return [{**row, "id": i} for i, row in enumerate(rows)]


def corpus_of(
    train: Sequence[tuple[str, Any]], validation: Sequence[tuple[str, Any]], source: str = "data.jsonl"
) -> Corpus:
    def split(rows: Sequence[tuple[str, Any]], name: str) -> datasets.Dataset:
        sources = [f"{name}-{source}:{i}" for i in range(1, len(rows) + 1)]
        return datasets.Dataset.from_dict(
            {"text": [r[0] for r in rows], "label": [r[1] for r in rows], "source": sources}
        )

    return Corpus("reviews", {"train": split(train, "train"), "validation": split(validation, "validation")})


class Recording:
    """A tokenizer that notes how long the texts of each call are."""

    ids_of = None  # of BYTES, which needs no call

    def __init__(self) -> None:
        self.calls: list[list[int]] = []

    def __call__(self, texts: list[str], **settings: Any) -> Any:
        self.calls.append([len(text.encode()) for text in texts])
        return BYTES(texts, **settings)

    def __getattr__(self, name: str) -> Any:
        return getattr(BYTES, name)

    def __len__(self) -> int:
        return len(BYTES)


@pytest.mark.parametrize("name", ["causal_lm", "masked_lm", "sequence_classification"])
def test_a_tokenizer_gets_a_bounded_piece_of_text_at_a_time(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("train.tasks.BYTES_AT_ONCE", 100)
    task, recording = made(name, max_length=16), Recording()
    texts = ["ü" * 30, "b" * 60, "c" * 40, "d" * 500, "e", "f" * 99, ""]
    found = task.encode({"text": texts, "label": ["x"] * 7}, recording, ("x", "y"))  # type: ignore
    assert recording.calls == [[60], [60], [40], [500], [1], [99], [0]]
    task.encode({"text": texts[4:], "label": ["x"] * 3}, recording, ("x", "y"))  # type: ignore
    assert recording.calls[7:] == [[1, 99, 0]]
    alone = [task.encode({"text": [text], "label": ["x"]}, BYTES, ("x", "y")) for text in texts]
    for name in task.example_columns:
        values = [value for one in alone for value in one[name]]
        assert [np.asarray(v).tolist() for v in found[name]] == [np.asarray(v).tolist() for v in values]


class Renamed(causal_lm.Task):
    """Gives a column under another name than ``example_columns`` has."""

    def cut(self, *document: Any) -> Any:  # type: ignore
        for row in super().cut(*document):
            yield {"tokens": row["tokens"], "length": row["length"], "size": row["num_bytes"]}


def test_a_column_that_cut_does_not_give_is_named() -> None:
    task = Renamed(Config())
    assert task.encode({"text": []}, BYTES, ()) == {name: [] for name in task.example_columns}
    with pytest.raises(UserError, match="num_bytes, which its cut does not give: tokens, length, size"):
        task.encode({"text": ["abc"]}, BYTES, ())


# causal_lm


@pytest.mark.parametrize("text", ["", "a", "abcd", "abcde", "abcdefg", "abcdefgh", TEXT])
@pytest.mark.parametrize("max_length", [2, 4, 64])
def test_causal_lm_makes_every_token_a_target_exactly_once(text: str, max_length: int) -> None:
    windows = [row["tokens"].tolist() for row in encoded(made("causal_lm", max_length=max_length), text)]
    assert [token for window in windows for token in window[1:]] == [*ids_of(text), END]
    assert windows[0][0] == END
    assert all(2 <= len(window) <= max_length + 1 for window in windows)


def test_causal_lm_neighbouring_windows_share_one_token() -> None:
    windows = [row["tokens"] for row in encoded(made("causal_lm", max_length=8), TEXT)]
    assert len(windows) > 10
    assert all(left[-1] == right[0] for left, right in itertools.pairwise(windows))


def test_causal_lm_does_not_join_documents() -> None:
    rows = encoded(made("causal_lm", max_length=8), "ab", "cd")
    assert [row["tokens"].tolist() for row in rows] == [[END, *ids_of("ab"), END], [END, *ids_of("cd"), END]]


@pytest.mark.parametrize("text", ["", "x", TEXT])
@pytest.mark.parametrize("spec", ["bytes", "train:300"])
def test_causal_lm_bytes_of_all_windows_sum_to_the_text(text: str, spec: str) -> None:
    task, tokenizer = made("causal_lm", max_length=8), tokenizer_of(spec, [TEXT] * 3)
    examples = task.encode({"text": [text]}, tokenizer, ())
    assert sum(examples["num_bytes"]) == pytest.approx(len(text.encode()))


def test_causal_lm_labels_are_the_next_token_and_padding_is_no_target() -> None:
    task = made("causal_lm", max_length=8)
    batch = task.collate(encoded(task, "abc", "z"), (0, 0), PAD)
    a, b, c, z = ids_of("abcz")
    assert batch.inputs["input_ids"].tolist() == [[END, a, b, c], [END, z, PAD, PAD]]
    assert batch.labels.tolist() == [[a, b, c, END], [z, END, IGNORE, IGNORE]]
    assert set(batch.inputs) == {"input_ids"}
    assert (batch.num_targets, batch.num_tokens, batch.example_ids) == (6, 6, (0, 1))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("model_type", ["llama", "gpt2", "qwen3"])
def test_causal_lm_padding_without_mask_changes_neither_loss_nor_gradients(model_type: str, attention: str) -> None:
    task = made("causal_lm", max_length=16)
    shape = {"n_embd": 16, "n_layer": 2, "n_head": 2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    if model_type != "gpt2":
        shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
        shape |= {"num_key_value_heads": 1, "head_dim": 8}
    config = task.config.changed(model_config={"model_type": model_type, **shape}, attn_implementation=attention)
    torch.manual_seed(0)
    model = build_model(run_for(config), type(task), BYTES).double()
    rows = encoded(task, "hello world", "hi", "a longer te")

    together, together_gradients = loss_and_gradients(model, task, rows)
    alone = [loss_and_gradients(model, task, [row]) for row in rows]
    # transformers' eager attention takes its softmax in fp32, whose rounding depends on the length of a row
    loose = attention == "eager"
    assert together == pytest.approx(sum(loss for loss, _ in alone), rel=1e-7 if loose else 1e-12)
    for name, gradient in together_gradients.items():
        apart = sum(gradients[name] for _, gradients in alone)
        torch.testing.assert_close(gradient, apart, rtol=1e-5 if loose else 1e-9, atol=1e-6 if loose else 1e-12)


def loss_and_gradients(model: nn.Module, task: Task, rows: list[dict[str, Any]]) -> tuple[float, dict[str, Any]]:
    batch = task.collate(rows, (0, 0), PAD)
    model.zero_grad()
    loss = model(batch.inputs, batch.labels)
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    assert gradients
    return loss.item(), gradients


# masked_lm


def mixed_text(length: int) -> str:
    return "".join(np.random.default_rng(0).choice(list("abcdefghijklmnopqrstuvwxyz "), length))


def test_masked_lm_frames_windows_that_cover_the_text_once() -> None:
    rows = encoded(made("masked_lm", max_length=10), TEXT)
    tokens = [row["tokens"].tolist() for row in rows]
    assert all(len(t) <= 10 and t[0] == END and t[-1] == END for t in tokens)
    assert [token for t in tokens for token in t[1:-1]] == ids_of(TEXT)
    assert all(row["special"].tolist() == [True] + [False] * (row["length"] - 2) + [True] for row in rows)


def test_masked_lm_hides_80_replaces_10_and_keeps_10_percent_of_15() -> None:
    task = made("masked_lm", max_length=100_002)
    rows = encoded(task, mixed_text(100_000))
    batch = task.collate(rows, (0, 0), PAD)
    original, shown = torch.as_tensor(rows[0]["tokens"]).long(), batch.inputs["input_ids"][0]
    chosen = batch.labels[0] != IGNORE
    assert chosen.float().mean().item() == pytest.approx(0.15, abs=0.005)
    assert batch.num_targets == int(chosen.sum())
    assert torch.equal(batch.labels[0][chosen], original[chosen])
    assert torch.equal(shown[~chosen], original[~chosen])
    hidden, kept = (shown == MASK)[chosen].float().mean().item(), (shown == original)[chosen].float().mean().item()
    assert hidden == pytest.approx(0.8, abs=0.012)
    assert kept == pytest.approx(0.1, abs=0.01)
    replaced = shown[chosen & (shown != MASK) & (shown != original)]
    assert len(set(replaced.tolist())) > 200  # from the whole vocabulary


def test_masked_lm_chooses_the_share_it_is_told() -> None:
    task = made("masked_lm", max_length=20_002, mlm_probability=0.4)
    batch = task.collate(encoded(task, mixed_text(20_000)), (0, 0), PAD)
    assert batch.num_targets / 20_000 == pytest.approx(0.4, abs=0.015)


def test_masked_lm_never_chooses_special_tokens_or_padding() -> None:
    task = made("masked_lm", max_length=64, mlm_probability=0.9)
    rows = encoded(task, "short", "in<|end|>the<|mask|>middle", mixed_text(60), "<|end|><|end|>")
    for epoch in range(20):
        batch = task.collate(rows, (0, epoch), PAD)
        for row, labels, shown in zip(rows, batch.labels, batch.inputs["input_ids"], strict=True):
            special = torch.ones(len(labels), dtype=torch.bool)
            special[: row["length"]] = torch.as_tensor(row["special"])
            assert (labels[special] == IGNORE).all()
            assert shown[: row["length"]][torch.as_tensor(row["special"])].tolist() == [
                t for t, s in zip(row["tokens"], row["special"], strict=True) if s
            ]
            assert (shown[row["length"] :] == PAD).all()


def test_masked_lm_has_a_target_in_every_example() -> None:
    task = made("masked_lm", max_length=8, mlm_probability=0.01)
    rows = encoded(task, *["abc"] * 50)
    batch = task.collate(rows, (0, 0), PAD)
    assert (batch.labels != IGNORE).sum(1).min() == 1


def test_masked_lm_leaves_out_windows_in_which_nothing_can_be_hidden() -> None:
    task, words = made("masked_lm", max_length=8), tokenizer_of("words", ["a b c"])
    ids = list(words("z " * 6 + "a", add_special_tokens=False)["input_ids"])  # type: ignore
    rows = list(task.cut("", ids, None, words))
    assert len(ids) == 7 and [row["length"] for row in rows] == [3]
    assert task.collate([{**rows[0], "id": 0}], (0, 0), PAD).num_targets == 1


def test_masked_lm_choice_depends_on_seed_epoch_and_example_alone() -> None:
    task = made("masked_lm", max_length=64)
    rows = encoded(task, mixed_text(60), mixed_text(30), mixed_text(50))
    together = task.collate(rows, (7, 1), PAD)
    for i in (2, 0, 1):
        alone = task.collate([rows[i]], (7, 1), PAD)
        length = rows[i]["length"]
        assert torch.equal(together.inputs["input_ids"][i, :length], alone.inputs["input_ids"][0])
        assert torch.equal(together.labels[i, :length], alone.labels[0])
    for other in ((7, 2), (8, 1)):
        assert not torch.equal(together.labels, task.collate(rows, other, PAD).labels)
    renumbered = [{**row, "id": row["id"] + 1} for row in rows]
    assert not torch.equal(together.labels, task.collate(renumbered, (7, 1), PAD).labels)


@pytest.mark.parametrize("task", [made("masked_lm", max_length=8), made("sequence_classification", max_length=8)])
def test_attention_mask_is_given_only_where_there_is_padding(task: Task) -> None:
    found = task.encode({"text": ["abc", "def", "g"], "label": ["x", "x", "y"]}, BYTES, ("x", "y"))
    rows = [{name: found[name][i] for name in found} | {"id": i} for i in range(3)]
    assert "attention_mask" not in task.collate(rows[:2], (0, 0), PAD).inputs
    padded = task.collate(rows, (0, 0), PAD)
    assert padded.inputs["attention_mask"].tolist() == [[1] * 5, [1] * 5, [1, 1, 1, 0, 0]]
    assert padded.inputs["input_ids"][2, 3:].tolist() == [PAD, PAD]
    assert padded.num_tokens == 13


# sequence_classification


@pytest.mark.parametrize(
    ("truncation", "max_length", "kept"),
    [
        ("keep_head", 6, "abcd"),
        ("keep_tail", 6, "efgh"),
        ("keep_both", 6, "abgh"),
        ("keep_both", 7, "abcgh"),
        ("keep_tail", 3, "h"),
        ("keep_both", 3, "a"),
        ("keep_head", 10, "abcdefgh"),
        ("keep_tail", 10, "abcdefgh"),
        ("keep_both", 10, "abcdefgh"),
    ],
)
def test_classification_keeps_the_part_it_is_told(truncation: Any, max_length: int, kept: str) -> None:
    task = made("sequence_classification", max_length=max_length, truncation=truncation)
    found = task.encode({"text": ["abcdefgh"], "label": ["x"]}, BYTES, ("w", "x"))
    assert found["tokens"][0].tolist() == [END, *ids_of(kept), END]
    assert (found["length"], found["document_length"], found["label"]) == ([len(kept) + 2], [10], [1])


@pytest.mark.parametrize(("task", "side"), [("sequence_classification", "left"), ("masked_lm", "right")])
def test_final_cuts_at_the_side_that_the_task_does(task: str, side: str) -> None:
    alone = made(task, max_length=8, truncation="keep_tail").stand_alone(tokenizer_of("words", ["a b"]))
    assert alone.truncation_side == side and alone.model_max_length == 8


def test_final_pads_where_training_does() -> None:
    tokenizer: Any = tokenizer_of("words", ["a b"])
    tokenizer.padding_side = "left"
    assert made("sequence_classification").stand_alone(tokenizer).padding_side == "right"
    assert made("causal_lm").stand_alone(tokenizer).padding_side == "left"  # for generation


# What a tokenizer adds itself: start and end of examples for a classifier, and for a model that continues texts.
OWN_FRAMES = {
    "$A </s>": ([], ["</s>"], ["[CLS]"], ["</s>"]),
    "<s> $A </s>": (["<s>"], ["</s>"], ["<s>"], ["</s>"]),
    "<s> $A": (["<s>"], ["[SEP]"], ["<s>"], ["[SEP]"]),
    "[CLS] $A [SEP]": (["[CLS]"], ["[SEP]"], ["[CLS]"], ["[SEP]"]),
    "$A": (["[CLS]"], ["[SEP]"], ["[CLS]"], ["[SEP]"]),
}


@pytest.mark.parametrize("frame", OWN_FRAMES)
def test_of_several_special_tokens_those_are_taken_that_the_tokenizer_adds(frame: str) -> None:
    names = {"bos_token": "<s>", "eos_token": "</s>", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    tokenizer: Any = tokenizer_of("words", ["a b"])
    tokenizer.add_special_tokens(names)
    ids = [(name, tokenizer.convert_tokens_to_ids(name)) for name in names.values()]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(frame, special_tokens=ids)
    found = (part for name in ("sequence_classification", "causal_lm") for part in made(name).special_tokens(tokenizer))
    assert tuple(map(tokenizer.convert_ids_to_tokens, found)) == OWN_FRAMES[frame]


def test_final_pads_with_the_end_where_a_classifiers_tokenizer_has_no_padding() -> None:
    tokenizer: Any = tokenizer_of("words", ["a b"])
    tokenizer.pad_token = None
    assert made("sequence_classification").stand_alone(tokenizer).pad_token == tokenizer.eos_token
    assert made("causal_lm").stand_alone(tokenizer).pad_token is None


def test_a_tokenizer_that_frames_as_the_task_does_keeps_its_way_with_pairs() -> None:
    base: Any = tokenizer_of("words", ["a b"])
    end = str(base.eos_token)
    marks = [(end, base.convert_tokens_to_ids(end))]
    base.backend_tokenizer.post_processor = TemplateProcessing(
        f"{end} $A {end}", f"{end} $A {end} $B {end}", special_tokens=marks
    )
    base.cls_token = base.sep_token = end
    for kind in ("masked_lm", "sequence_classification"):
        assert made(kind).stand_alone(base)("a", "b")["input_ids"] == base("a", "b")["input_ids"]
    assert len(base("a", "b")["input_ids"]) == 5
    assert made("causal_lm").stand_alone(base)("a")["input_ids"] == base("a")["input_ids"][:-1]  # not its end


def classified(corpus: Corpus, **data: Any) -> tuple[dict[str, datasets.Dataset], tuple[str, ...]]:
    """Its examples, and the names of its classes."""
    task = made("sequence_classification", **{"max_length": 16, **data})
    return tokenize(corpus, task, BYTES), task.label_names(corpus)


@pytest.mark.parametrize(
    ("labels", "names"),
    [
        (["spam", "ham", "spam"], ("ham", "spam")),
        ([10, 2, 1], ("1", "2", "10")),
        ([0, 1, 0], ("0", "1")),
        (["10", "2", "-1.5"], ("-1.5", "2", "10")),
    ],
)
def test_classification_numbers_text_and_integer_labels(labels: list[Any], names: tuple[str, ...]) -> None:
    corpus = corpus_of(list(zip("abc", labels, strict=True)), [("a", labels[0])])
    examples, label_names = classified(corpus)
    assert label_names == names
    assert [names[number] for number in examples["train"]["label"]] == [str(label) for label in labels]
    assert names[examples["validation"]["label"][0]] == str(labels[0])


def test_classification_collates_one_label_a_document() -> None:
    task = made("sequence_classification", max_length=8)
    found = task.encode({"text": ["abc", "d"], "label": ["y", "x"]}, BYTES, ("x", "y"))
    batch = task.collate([{name: found[name][i] for name in found} | {"id": 5 + i} for i in range(2)], (0, 0), PAD)
    assert batch.labels.tolist() == [1, 0]
    assert (batch.num_targets, batch.example_ids, batch.num_tokens) == (2, (5, 6), 8)


@pytest.mark.parametrize("model_type", ["bert", "llama"])
def test_class_names_land_in_the_model(model_type: str) -> None:
    _, label_names = classified(corpus_of([("a", "spam"), ("b", "ham"), ("c", "eggs")], [("a", "spam")]))
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    task = made("sequence_classification", max_length=16, model_config={"model_type": model_type, **shape})
    model = build_model(run_for(task.config), type(task), BYTES, label_names).model
    assert isinstance(model, transformers.PreTrainedModel)
    assert model.config.id2label == {0: "eggs", 1: "ham", 2: "spam"}
    assert model.config.label2id == {"eggs": 0, "ham": 1, "spam": 2}
    assert model(input_ids=torch.tensor([[END, 5, END]])).logits.shape == (1, 3)


@pytest.mark.parametrize("before", ["multi_label_classification", "regression", None])
def test_a_model_that_was_trained_for_something_else_is_a_classifier_now(tmp_path: Path, before: Any) -> None:
    """Its configuration says how ``pipeline`` shows scores and which loss transformers computes."""
    shape: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    config = transformers.BertConfig(**shape, num_attention_heads=2, vocab_size=259, problem_type=before)
    transformers.BertForSequenceClassification(config).save_pretrained(tmp_path)
    task = made("sequence_classification", max_length=16, model=str(tmp_path))
    after: Any = build_model(run_for(task.config), type(task), BYTES, ("ham", "spam")).model.config
    assert after.problem_type == (before and "single_label_classification")

    class OfManyLabels(type(task)):
        loss_sum = staticmethod(lambda logits, labels: logits.sum())

    own: Any = build_model(run_for(task.config), OfManyLabels, BYTES, ("ham", "spam")).model.config
    assert own.problem_type == before


@pytest.mark.parametrize(("labels", "names"), [(("ham", "spam"), ("spam", "ham")), (("ham", "eggs"), ("eggs", "ham"))])
def test_a_classifier_keeps_the_numbers_of_its_classes(tmp_path: Path, labels: Any, names: Any) -> None:
    shape: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    config = transformers.BertConfig(**shape, num_attention_heads=2, vocab_size=259, id2label={0: "spam", 1: "ham"})
    trained = transformers.BertForSequenceClassification(config)
    trained.save_pretrained(tmp_path)
    corpus = corpus_of([("a", labels[0]), ("b", labels[1])], [("c", labels[1])])
    examples, label_names = classified(corpus, model=str(tmp_path))
    assert label_names == names  # of its own classes in its own order; of others by the alphabet
    assert list(column(examples["train"], "label")) == [names.index(label) for label in labels]
    task = made("sequence_classification", max_length=16, model=str(tmp_path))
    model = build_model(run_for(task.config), type(task), BYTES, label_names).model
    assert isinstance(model, transformers.PreTrainedModel) and model.config.id2label == dict(enumerate(names))
    assert torch.equal(model.get_parameter("classifier.weight"), trained.get_parameter("classifier.weight"))


def test_a_task_is_called_as_its_file_unless_it_has_a_name() -> None:
    class Plain(causal_lm.Task):
        """In this file."""

    class Named(causal_lm.Task):
        name = "chat"

    assert (Plain.name, Named.name) == (__name__.rpartition(".")[2], "chat")


def test_tasks_are_the_files_of_their_folder() -> None:
    modules = {"causal_lm": causal_lm, "masked_lm": masked_lm, "sequence_classification": sequence_classification}
    for name, module in modules.items():
        task = made(name)
        assert type(task) is module.Task and task.name == name and task.data is task.config.data
    for name in ("translation", "__init__", "../config"):
        with pytest.raises(UsageError, match="is not one of causal_lm, masked_lm, sequence_classification"):
            load_task(name)


def test_a_task_may_be_a_file_outside_the_template(tmp_path: Path) -> None:
    """It is called as its file, and its class is the same each time."""
    code = "from train.tasks import causal_lm\nclass Task(causal_lm.Task):\n    pass\nnumber = 1\ndef one(): pass\n"
    (tmp_path / "riddles.py").write_text(code)
    spec = f"{tmp_path}/riddles.py"
    task = load_task(f"{spec}:Task")
    assert issubclass(task, causal_lm.Task) and task.name == "riddles" and task is load_task(f"{spec}:Task")
    with pytest.raises(UsageError, match=r"task: .*riddles\.py:one is not a subclass of train\.tasks\.Task"):
        load_task(f"{spec}:one")
    with pytest.raises(UserError, match=r"task '.*:number': no such file, module or function"):
        load_task(f"{spec}:number")


def test_a_dataset_that_numbers_its_classes_keeps_their_order() -> None:
    """So that a metric of class 1 is of its class 1, and its labels are what the model gives."""
    corpus = corpus_of([("a", "not_equivalent")], [("b", "equivalent")])
    task = made("sequence_classification")
    assert task.label_names(corpus) == ("not_equivalent",)
    named = replace(corpus, classes=("not_equivalent", "equivalent"))
    assert task.label_names(named) == ("not_equivalent", "equivalent")
    assert task.label_names(replace(corpus, classes=("others",))) == ("not_equivalent",)


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        (["neutral", "Entailment"], ("CONTRADICTION", "neutral", "Entailment")),
        (["Entailment", "neutral", "unsure"], ("CONTRADICTION", "neutral", "Entailment")),  # the last does not occur
        (["neutral", "NEUTRAL"], ("NEUTRAL", "neutral")),  # they differ only so: two classes
        (["neutral", "other"], ("neutral", "other")),
    ],
)
def test_a_trained_head_keeps_its_order_whatever_the_case_of_the_data(
    labels: list[str], expected: tuple[str, ...], tmp_path: Path
) -> None:
    names = {0: "CONTRADICTION", 1: "NEUTRAL", 2: "ENTAILMENT"}
    transformers.BertConfig(id2label=names).save_pretrained(tmp_path)
    task = made("sequence_classification", model=str(tmp_path))
    corpus = corpus_of([(label, label) for label in labels if label != "unsure"], [])
    found = task.label_names(replace(corpus, classes=tuple(labels) if "unsure" in labels else ()))
    assert found == expected
    assert task.classes_of(["neutral"], found) == [expected.index("neutral")]


def test_marks_that_a_text_brings_are_not_written_twice() -> None:
    task, end = made("causal_lm"), int(BYTES.eos_token_id)  # type: ignore
    (start,), (last,) = task.special_tokens(BYTES)
    assert (start, last) == (end, end)
    assert task.framed([5, 6], BYTES) == [end, 5, 6, end] == task.framed([end, 5, 6, end], BYTES)
    assert task.framed([5, end, 6], BYTES) == [end, 5, end, 6, end] and task.framed([], BYTES) == [end, end]


def test_a_task_without_the_columns_of_its_examples_is_refused(tmp_path: Path) -> None:
    code = "from train import tasks\n\nclass Bare(tasks.Task):\n    pass\n\n"
    (tmp_path / "bare.py").write_text(f"{code}class Named(tasks.Task):\n    example_columns = ('tokens', 'length')\n")
    with pytest.raises(UsageError, match=r"task: .*bare.py:Bare: example_columns has to name .* length among them"):
        load_task(f"{tmp_path}/bare.py:Bare")
    assert load_task(f"{tmp_path}/bare.py:Named").auto_class == "AutoModel"
