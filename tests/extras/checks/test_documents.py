"""Labels that cannot be learned, and what is said about the data before training."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import datasets
import pytest
import torch
from made_tokenizers import tokenizer_of

from train.batching import Loading
from train.config import Config, Optimization
from train.extras.checks import Extra
from train.extras.checks.documents import describe, describe_batch, describe_training, with_known_labels
from train.launch import Launch
from train.records import BatchArithmetic, Corpus, UserError
from train.tasks import load_task, tokenize

BYTES = tokenizer_of("bytes")
ALONE = Launch()
Rows = list[tuple[str, Any]]
SPLITS = ("train", "validation")


def classified(train: Rows, validation: Rows, **options: Any) -> tuple[Corpus, dict[str, datasets.Dataset], Config]:
    """The corpus that is left, and its examples."""

    def split(rows: Rows, name: str) -> datasets.Dataset:
        sources = [f"{name}-data.jsonl:{i}" for i in range(1, len(rows) + 1)]
        columns = {"text": [r[0] for r in rows], "label": [r[1] for r in rows], "source": sources}
        return datasets.Dataset.from_dict(columns)

    config = Config().changed(task="sequence_classification", **{"max_length": 16, **options})
    task = load_task("sequence_classification")(config)
    given = {"train": split(train, "train"), "validation": split(validation, "validation")}
    corpus = Extra().change_corpus(task, Corpus("reviews", given))
    return corpus, tokenize(corpus, task, BYTES), config


def said(train: Rows, validation: Rows, **options: Any) -> list[str]:
    """Lines about the tokenised documents."""
    corpus, examples, config = classified(train, validation, **options)
    task = load_task("sequence_classification")(config)
    data: Any = SimpleNamespace(task=task, corpus=corpus, examples=examples, label_names=task.label_names(corpus))
    return describe(data, config)


def test_how_many_tokens_are_lost_is_said() -> None:
    rows: Rows = [("abcdefgh", "x"), ("abcd", "y"), ("abcdefgh", "y"), ("ab", "x")]
    lines = said(rows, [("a", "x")], max_length=6)
    assert "2 classes: x, y" in lines  # 10 + 6 + 10 + 4 tokens with their marks, of which 4 + 4 are cut
    assert (
        "truncation (keep_head): 2 of 4 documents were cut, to 6 tokens or fewer; 26.7 % of all tokens are lost"
        in lines
    )
    assert said(rows, [("a", "x")], max_length=10) == ["2 classes: x, y"]


def test_tokens_that_packed_examples_lost_are_told() -> None:
    """Of a task that truncates in its own way; 12 + 4 of 30 tokens are lost."""
    rows = datasets.Dataset.from_dict({"length": [10, 6], "document_length": [[3, 14], [10, 3]]})
    config = Config().changed(max_length=6, packing=True)
    data: Any = SimpleNamespace(
        task=load_task("causal_lm")(config),
        corpus=Corpus("own", {}),
        examples=dict.fromkeys(SPLITS, rows),
        label_names=(),
    )
    assert describe(data, config) == ["2 of 4 documents were cut, to 6 tokens or fewer; 40.0 % of all tokens are lost"]


def test_documents_without_an_example_are_counted() -> None:
    rows = {"text": ["a", "b", "c"], "length": [9, 0, 0]}
    splits = {name: datasets.Dataset.from_dict(rows) for name in SPLITS}
    examples = {"train": splits["train"].select([0]), "validation": splits["validation"]}
    data: Any = SimpleNamespace(
        task=load_task("causal_lm")(Config()), corpus=Corpus("own", splits), examples=examples, label_names=()
    )
    assert describe(data, Config()) == ["at least 2 of 3 train documents gave no example, perhaps by length"]
    packed = {"member_ids": [[0], [1, 2]], "document_length": [[3], [4, 5]], "length": [3, 9]}
    data.examples = {"train": datasets.Dataset.from_dict({**packed, "member_ids": [[0], [2]]})}
    data.examples["validation"] = datasets.Dataset.from_dict({**packed, "length": [3, 1009]})
    assert describe(data, Config().changed(packing=True)) == [
        "at least 1 of 3 train documents gave no example, perhaps by length",
        "training has only 12 tokens, validation 1,012",
    ]


@pytest.mark.parametrize(
    ("task", "unread"),
    [
        ("causal_lm", ["mlm_probability", "truncation"]),
        ("masked_lm", ["truncation"]),
        ("sequence_classification", ["mlm_probability"]),
    ],
)
def test_options_that_a_task_does_not_read_are_told(task: str, unread: list[str]) -> None:
    splits = dict.fromkeys(SPLITS, datasets.Dataset.from_dict({"text": ["a"], "length": [1]}))
    config = Config().changed(task=task)
    parts = {"task": load_task(task)(config), "corpus": Corpus("own", splits), "examples": splits, "label_names": ()}
    data: Any = SimpleNamespace(**parts)
    assert describe(data, config) == []
    changed = config.changed(truncation="keep_tail", mlm_probability=0.3)
    assert describe(data, changed) == [f"{name}: does nothing with --task {task}" for name in unread]
    assert describe(data, config.changed(decay_ratio=0.5, sgd_momentum=0.5)) == [
        "decay_ratio: does nothing with --lr_scheduler linear",
        "sgd_momentum: does nothing with --optimizer adamw",
    ]
    assert describe(data, config.changed(decay_ratio=0.5, lr_scheduler="warmup_stable_decay")) == []
    of_a_fork: Any = "wsd_sqrt"  # of which nothing is known
    optimization = Optimization(lr_scheduler=of_a_fork, decay_ratio=0.5)
    assert describe(data, replace(config, optimization=optimization)) == []
    constant = config.changed(lr_scheduler="constant", min_learning_rate_ratio=0.1)
    assert describe(data, constant) == ["min_learning_rate_ratio: does nothing with --lr_scheduler constant"]
    assert describe(data, constant.changed(lr_scheduler="cosine")) == []
    for optimizer, momentum in (("sgd", []), ("adafactor", ["sgd_momentum"])):
        told = config.changed(optimizer=optimizer, adam_beta1=0.8, adam_beta2=0.9, adam_epsilon=1e-6, sgd_momentum=0.5)
        names = ["adam_beta1", "adam_beta2", "adam_epsilon", *momentum]
        assert describe(data, told) == [f"{name}: does nothing with --optimizer {optimizer}" for name in names]
    assert describe(data, config.changed(optimizer="adamw_8bit", adam_beta2=0.9)) == []
    own: Any = replace(told, optimization=replace(told.optimization, optimizer="lion"))  # type: ignore - nothing is known of it
    assert describe(data, own) == []
    assert describe(data, config.changed(hub_model_id="me/mine")) == [
        "hub_model_id: does nothing with --push_to_hub False"
    ]


@pytest.mark.parametrize(("train", "label"), [([0, 1], "1.5"), ([0, 1], "2.0"), (["1", "True"], "1.0"), ([0, 7], "07")])
def test_a_label_that_only_looks_like_another_is_unknown(train: list[Any], label: str) -> None:
    with pytest.raises(UserError, match=f"label '{label}' does not occur in the training split"):
        classified([("a", known) for known in train], [("b", label)])


def test_an_unknown_label_in_validation_is_refused_with_its_place_and_a_way_out() -> None:
    with pytest.raises(UserError, match=r"validation-data\.jsonl:2: label 'z' .*--on_bad_record skip"):
        classified([("a", "x"), ("b", "y")], [("a", "x"), ("b", "z")])


def test_an_unknown_label_of_a_function_is_named_without_a_source() -> None:
    def made_of(*labels: str) -> datasets.Dataset:
        return datasets.Dataset.from_dict({"text": ["t"] * len(labels), "label": list(labels)})

    task = load_task("sequence_classification")(Config().changed(task="sequence_classification"))
    with pytest.raises(UserError, match=r"document 1: label 'z' does not occur in the training split"):
        with_known_labels(Corpus("mine", {"train": made_of("x", "y"), "validation": made_of("x", "z")}), task)


def test_an_unknown_label_in_validation_is_skipped_and_told_when_asked_to() -> None:
    validation: Rows = [("a", "x"), ("bc", "z"), ("d", "y")]
    corpus, examples, _ = classified([("a", "x"), ("b", "y")], validation, on_bad_record="skip")
    assert examples["validation"]["label"][:] == [0, 1]
    assert [note for note in corpus.notes if "skipped 1 record" in note and "validation-data.jsonl:2" in note]


def test_classes_that_look_alike_are_told() -> None:
    accent, composed = "cafe\u0301", "caf\u00e9"
    labels = ["good", "Good ", accent, composed, "bad", "bad-ish", "1", "01"]
    corpus, _, _ = classified([("a", label) for label in labels], [("b", "bad")])
    told = r"classes that may be meant as one: 'Good ', 'cafe\u0301', 'caf\xe9', 'good'"
    assert [note for note in corpus.notes if "meant as one" in note] == [told]


def test_a_test_split_whose_labels_are_all_one_mark_is_left_out() -> None:
    corpus, _, config = classified([("a", "x"), ("b", "y")], [("a", "x")])
    marked = corpus.splits["validation"].map(lambda row: {"label": "?"})
    task = load_task("sequence_classification")(config)
    found = with_known_labels(replace(corpus, splits={**corpus.splits, "test": marked}), task)
    assert set(found.splits) == {"train", "validation"}
    assert found.notes == ("left out the test split: none of its labels occurs in the training split",)


def test_a_validation_split_of_unknown_labels_only_is_refused() -> None:
    with pytest.raises(UserError, match="the validation split gives no example: see the notes, or raise max_length"):
        classified([("a", "x"), ("b", "y")], [("b", "z")], on_bad_record="skip")


def test_a_single_class_is_refused() -> None:
    with pytest.raises(UserError, match=r"only the label 'x' in column 'stars'.*--label_column"):
        classified([("a", "x"), ("b", "x")], [("a", "x")], label_column="stars")


@pytest.mark.parametrize("train", [[0.25, 1.5, 2.566], ["0", "0", "0.5", "1.25", "1e-05"], ["0,25", "0,5", "2,566"]])
def test_measurements_are_not_classes(train: list[Any]) -> None:
    said = r"most labels in column 'label', such as '0[.,]\d+', are fractional numbers that occur once: sequence_"
    with pytest.raises(UserError, match=said):
        classified([("a", label) for label in train], [("b", train[0])])


@pytest.mark.parametrize("train", [["4.5", "4.5", "5", "3.5"], [0.5, 0.5, 1.5, 1.5], ["3.11.4", "3.12.0"]])
def test_classes_may_have_a_point_in_their_names(train: list[Any]) -> None:
    corpus, examples, _ = classified([("a", label) for label in train], [("b", train[0])])
    assert len(corpus.splits["train"]) == len(examples["train"]) == len(train)


def test_a_task_of_ones_own_may_take_measurements() -> None:
    class Regression(load_task("sequence_classification")):
        def label_names(self, corpus: Corpus) -> tuple[str, ...]:
            return ("score",)

        def classes_of(self, labels: Any, label_names: Any) -> list[Any]:
            return [float(label) for label in labels]

    scores = datasets.Dataset.from_dict({"text": ["a", "b", "c"], "label": ["0.25", "1.5", "2"]})
    corpus = Corpus("scores", {"train": scores, "validation": scores})
    assert with_known_labels(corpus, Regression(Config())).splits["train"]["label"][:] == ["0.25", "1.5", "2"]


def test_the_arithmetic_of_a_batch_is_said() -> None:
    said = describe_batch(BatchArithmetic(2, 4, 1))
    assert said == "2 examples per micro-batch × 4 accumulated × 1 process = 8 per step"
    assert describe_batch(BatchArithmetic(1, 3, 2)).endswith(
        "1 example per micro-batch × 3 accumulated × 2 processes = 6 per step"
    )


def training_lines(
    sizes: tuple[int, int],
    total: int,
    device: str = "cpu",
    launch: Launch = ALONE,
    *,
    trained: bool = True,
    **options: Any,
) -> list[str]:
    config = Config().changed(max_length=2048, learning_rate=0.1, **options)
    batches = SimpleNamespace(
        loading=Loading(cast("Any", None)), arithmetic=BatchArithmetic(2, 4, 3), steps_per_epoch=8
    )
    model: Any = torch.nn.Linear(1, 1, dtype=getattr(torch, config.architecture.dtype))
    model.config = SimpleNamespace(model_type="llama")
    state = SimpleNamespace(model=model.requires_grad_(trained))
    parts: Any = SimpleNamespace(sizes=sizes, total_steps=total, batches=batches, state=state)
    accelerator = SimpleNamespace(device=torch.device(device))
    return describe_training(cast("Any", SimpleNamespace(config=config, accelerator=accelerator, launch=launch)), parts)


def test_options_that_do_nothing_with_this_device_or_launch_are_told() -> None:
    asked: dict[str, Any] = {"memory_snapshot": True, "optimizer_offload": True, "find_unused_parameters": True}
    assert training_lines((1, 1), 8)[2:] == []
    assert training_lines((1, 1), 8, **asked)[2:] == [
        "memory_snapshot: does nothing on CPU with one process",
        "find_unused_parameters: does nothing on CPU with one process",
        "optimizer_offload: does nothing on CPU with one process",
    ]
    halves = training_lines((1, 1), 8, "cpu", Launch(2), **asked, dtype="bfloat16")  # which have originals in fp32
    assert halves[2:] == ["memory_snapshot: does nothing on CPU with ddp"]
    sharded = training_lines((1, 1), 8, "cuda", Launch(2, engine="fsdp2"), **asked)
    assert sharded[2:] == ["find_unused_parameters: does nothing on CUDA with fsdp2"]


def test_what_is_said_of_model_and_batch() -> None:
    assert training_lines((3_000_000, 3_000_000), 20) == [
        "model: llama, 3.00 M parameters, sequences of up to 2,048 tokens",
        "batch: 2 examples per micro-batch × 4 accumulated × 3 processes = 24 per step; 20 steps (2.50 epochs)",
    ]
    [model, batch] = training_lines((30_000, 3_000_000), 1)
    assert model == "model: llama, 3.00 M parameters (0.03 M trained, 1.00%), sequences of up to 2,048 tokens"
    assert batch.endswith("= 24 per step; 1 step (0.12 epochs)")


def test_bf16_weights_that_lose_small_updates_are_told() -> None:
    [*_, line] = training_lines((1, 1), 8, dtype="bfloat16")
    lost = "dtype: bf16 weights lose small updates; "
    assert line == lost + "--dtype float32, or --bf16_update stochastic with adamw, keeps them"
    assert len(training_lines((1, 1), 8, dtype="bfloat16", bf16_update="kahan")) == 2
    assert len(training_lines((1, 1), 8, dtype="bfloat16", optimizer_offload=True)) == 2
    assert len(training_lines((1, 1), 8, dtype="bfloat16", trained=False)) == 2  # adapters' weights are fp32
    originals = Launch(2, engine="deepspeed")  # which it keeps in fp32
    assert len(training_lines((1, 1), 8, "cuda", originals, dtype="bfloat16")) == 2


def test_a_warm_up_that_does_not_end_is_told_with_the_highest_rate() -> None:
    assert len(training_lines((1, 1), 20, warmup_steps=20)) == 2
    [*_, line] = training_lines((1, 1), 20, warmup_steps=40)
    assert line == "learning rate: at most 5.00e-02 of 1.00e-01, because warm-up takes 40 steps"
