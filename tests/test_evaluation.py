"""Metrics, and an evaluation that counts every example once."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState
from made_tokenizers import tokenizer_of
from support import run_for
from torch import Tensor, nn

from train.batching import Loading
from train.config import Config
from train.data import PreparedData
from train.evaluation import evaluate, score
from train.extras import Extra, Extras
from train.launch import Launch
from train.model import ModelWithLoss, build_model
from train.records import IGNORE, Corpus, MicroBatch, Run, StopAtOnce
from train.step import Engine
from train.tasks import Scores, load_task, pad_token_id, tokenize
from train.tasks.sequence_classification import class_metrics

BYTES = tokenizer_of("bytes")
TEXTS = ["one", "a longer document with more than one window", "Ünïcödé 🤗", "x", "five documents in all"]
GPT2 = {"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2}


@pytest.fixture(autouse=True)
def _fresh_accelerator() -> Iterator[None]:
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def prepared_data(config: Config, texts: list[str], labels: list[Any] | None = None) -> PreparedData:
    task = load_task(config.data.task)(config)
    columns = {"text": texts, "source": texts} | ({"label": labels} if labels else {})
    split = datasets.Dataset.from_dict(columns)
    corpus = Corpus("texts", {"train": split, "validation": split})
    examples = tokenize(corpus, task, BYTES)
    loading = Loading(partial(task.collate, pad_id=pad_token_id(BYTES)))
    return PreparedData(task, corpus, BYTES, examples, loading, task.label_names(corpus))


def configured(task: str, batch_size: int = 2) -> Config:
    return Config().changed(task=task, max_length=16, model_config=GPT2, micro_batch_size=batch_size)


def network(config: Config, prepared: PreparedData) -> nn.Module:
    torch.manual_seed(0)
    return build_model(run_for(config), type(prepared.task), BYTES, prepared.label_names).model


def run_and_parts(
    config: Config,
    prepared: PreparedData,
    model: nn.Module,
    process: Any = None,
    launch: Launch = Launch(),  # noqa: B008
) -> tuple[Run, Any]:
    run, wrapped = run_for(config, process, launch), ModelWithLoss(model, task=type(prepared.task))
    return run, SimpleNamespace(data=prepared, model=wrapped, engine=Engine(run.accelerator, config))


def evaluated(config: Config, prepared: PreparedData, model: nn.Module) -> dict[str, Any]:
    return evaluate(*run_and_parts(config, prepared, model), "validation", 3).metrics


# Metrics by hand


def metrics_of(rows: list[list[float]], **columns: Sequence[float]) -> dict[str, Any]:
    """Of examples with (loss sum, targets, correct)."""
    table = np.array([[i, *row, 0, 0] for i, row in enumerate(rows)], dtype=np.float64)
    return load_task("causal_lm")(Config()).metrics(table, datasets.Dataset.from_dict(columns), ())


def test_token_metrics_by_hand() -> None:
    rows = [[2.0, 4.0, 1.0], [4.0, 4.0, 2.0], [6.0, 2.0, 0.0]]
    # all positions of the first two are targets, of the last one half: three of its six bytes count
    assert metrics_of(rows, num_bytes=[5.0, 7.0, 6.0], length=[4, 4, 4]) == {
        "loss": pytest.approx(1.2),
        "perplexity": pytest.approx(math.exp(1.2)),
        "accuracy": pytest.approx(0.3),
        "bits_per_byte": pytest.approx(12.0 / math.log(2) / 15.0),
    }


def test_token_metrics_without_bytes_have_no_bits_per_byte() -> None:
    for columns in ({"num_bytes": [0.0], "length": [1]}, {"length": [1]}):
        assert set(metrics_of([[1.0, 1.0, 1.0]], **columns)) == {"loss", "perplexity", "accuracy"}


def test_perplexity_of_a_hopeless_model_is_finite() -> None:
    assert metrics_of([[1e6, 1.0, 0.0]], length=[1])["perplexity"] == math.exp(700)
    assert metrics_of([[699.0, 1.0, 0.0]], length=[1])["perplexity"] == math.exp(699)


def test_bits_per_byte_are_of_the_examples_that_were_scored() -> None:
    """A rank's rows, or a task that leaves examples out, need not be the first of the split."""
    table = np.array([[2, 3.0, 2, 1, 0, 0], [0, 1.0, 4, 2, 0, 0]])
    columns = datasets.Dataset.from_dict({"num_bytes": [8.0, 100.0, 0.5], "length": [4, 7, 2]})
    found = load_task("causal_lm")(Config()).metrics(table, columns, ())
    assert found["bits_per_byte"] == pytest.approx(4 / math.log(2) / 8.5, rel=1e-12)


@pytest.mark.parametrize(
    ("predictions", "references", "accuracy", "macro_f1", "confusion"),
    [
        # class 0: 2·2/(3+3); class 1: 2·1/(1+2); class 2 is there once and never predicted: 0
        ([0, 0, 1, 1, 0], [0, 0, 0, 1, 2], 0.6, (2 / 3 + 2 / 3 + 0.0) / 3, [[2, 1, 0], [0, 1, 0], [1, 0, 0]]),
        # class 2 is neither there nor predicted: the mean is over the others
        ([0, 1, 1], [0, 1, 0], 2 / 3, (2 / 3 + 2 / 3) / 2, [[1, 1, 0], [0, 1, 0], [0, 0, 0]]),
        ([2, 0], [2, 0], 1.0, 1.0, [[1, 0, 0], [0, 0, 0], [0, 0, 1]]),
        ([1], [0], 0.0, 0.0, [[0, 1, 0], [0, 0, 0], [0, 0, 0]]),
    ],
)
def test_class_metrics_by_hand(
    predictions: list[int], references: list[int], accuracy: float, macro_f1: float, confusion: list[list[int]]
) -> None:
    assert class_metrics(np.array(predictions), np.array(references), 3) == {
        "accuracy": pytest.approx(accuracy),
        "macro_f1": pytest.approx(macro_f1),
        "confusion_matrix": confusion,
    }


def test_a_split_without_any_target_has_no_loss() -> None:
    task, rows = load_task("causal_lm")(Config()), datasets.Dataset.from_dict({"length": [3]})
    found = task.metrics(np.array([[0.0, 0, 0, 0, 0, 0]]), rows, ())
    assert math.isnan(found["loss"]) and math.isnan(found["accuracy"])


def test_a_class_that_the_data_does_not_have_is_a_wrong_one() -> None:
    """A model of one's own may have outputs to spare."""
    found = class_metrics(np.array([0, 4, 1]), np.array([0, 0, 1]), 2)
    assert (found["accuracy"], found["macro_f1"]) == (pytest.approx(2 / 3), pytest.approx((2 / 3 + 1 + 0) / 3))
    assert [row[:2] for row in found["confusion_matrix"][:2]] == [[1, 0], [0, 1]]


@pytest.mark.parametrize(("classes", "has_matrix"), [(100, True), (101, False)])
def test_up_to_a_hundred_classes_have_a_matrix(classes: int, has_matrix: bool) -> None:
    found = class_metrics(np.array([99]), np.array([99]), classes)
    assert ("confusion_matrix" in found) == has_matrix


# One pass over a split


@pytest.mark.parametrize("batch_size", [1, 2, 3, 100])
def test_loss_is_that_of_all_targets_whatever_the_batch_size(batch_size: int) -> None:
    config = configured("causal_lm", batch_size)
    prepared = prepared_data(config, TEXTS)
    model = network(config, prepared)
    loss_sum, targets, correct = direct(prepared, model)
    metrics = evaluated(config, prepared, model)
    assert metrics["examples"] == len(prepared.examples["validation"]) > len(TEXTS)
    assert metrics["loss"] == pytest.approx(loss_sum / targets, rel=1e-6)
    assert metrics["perplexity"] == pytest.approx(math.exp(loss_sum / targets), rel=1e-6)
    assert metrics["accuracy"] == pytest.approx(correct / targets, rel=1e-9)
    num_bytes = sum(len(text.encode()) for text in TEXTS)
    assert metrics["bits_per_byte"] == pytest.approx(loss_sum / math.log(2) / num_bytes, rel=1e-6)


def direct(prepared: PreparedData, model: nn.Module) -> tuple[float, int, int]:
    """Loss sum, targets and hits of each example alone, from the definition."""
    model.eval()
    loss_sum, targets, correct = 0.0, 0, 0
    for row in prepared.examples["validation"].to_list():
        tokens = torch.tensor([row["tokens"]])
        log_p = model(input_ids=tokens[:, :-1]).logits.log_softmax(-1)[0]
        loss_sum -= sum(log_p[i, t].item() for i, t in enumerate(tokens[0, 1:]))
        targets += tokens.shape[1] - 1
        correct += int((log_p.argmax(-1) == tokens[0, 1:]).sum())
    return loss_sum, targets, correct


@pytest.mark.parametrize(("task", "world"), [("causal_lm", 3), ("sequence_classification", 2), ("causal_lm", 11)])
def test_metrics_are_the_same_over_any_number_of_processes(
    task: str, world: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configured(task)
    prepared = prepared_data(config, TEXTS, ["b", "a", "c", "b", "a"] if task == "sequence_classification" else None)
    model = network(config, prepared)
    expected = evaluated(config, prepared, model)
    gathered: list[Any] = []
    monkeypatch.setattr("accelerate.utils.gather_object", lambda rows: gathered.extend(rows) or list(gathered))
    metrics: dict[str, Any] = {}
    for rank in range(world):  # one after the other: the last one has gathered all rows
        process = SimpleNamespace(num_processes=world, device=torch.device("cpu"), is_main_process=rank == 0)
        launch = Launch(world_size=world, rank=rank)
        metrics = evaluate(*run_and_parts(config, prepared, model, process, launch), "validation", 1).metrics
    assert metrics.keys() == expected.keys()
    for name, value in expected.items():
        assert metrics[name] == (pytest.approx(value, rel=1e-5) if isinstance(value, float) else value), name


def test_evaluation_leaves_dropout_out_and_the_model_in_training() -> None:
    config = configured("causal_lm")
    prepared = prepared_data(config, TEXTS)
    model = network(config, prepared).train()
    first, second = (evaluate(*run_and_parts(config, prepared, model), "validation", step) for step in (1, 2))
    assert first.metrics == second.metrics
    assert (first.split, first.step, second.step) == ("validation", 1, 2)
    assert 0 < first.seconds < 60
    assert model.training and all(p.grad is None and p.requires_grad for p in model.parameters())


class Caching(nn.Module):
    """Keeps a tensor from its first call on."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(259, 259)
        self.kept: Tensor | None = None

    def forward(self, input_ids: Tensor) -> Tensor:
        if self.kept is None:
            self.kept = torch.full((259,), 0.5)
        return self.table(input_ids) * self.kept


def test_what_a_model_keeps_from_an_evaluation_can_be_trained_with() -> None:
    config = configured("causal_lm")
    model = Caching()
    assert evaluated(config, prepared_data(config, TEXTS), model)["examples"] > 0
    ModelWithLoss(model)({"input_ids": torch.tensor([[1, 2]])}, torch.tensor([[2, IGNORE]])).backward()
    assert model.table.weight.grad is not None


@pytest.mark.parametrize("batch_size", [2, 5])
def test_classes_are_scored_by_example(batch_size: int) -> None:
    config = configured("sequence_classification", batch_size)
    prepared = prepared_data(config, TEXTS, ["b", "a", "c", "b", "a"])
    model = network(config, prepared).eval()
    references, predictions, losses = [], [], []
    for row in prepared.examples["validation"].to_list():
        logits = model(input_ids=torch.tensor([row["tokens"]])).logits[0]
        references.append(row["label"])
        predictions.append(int(logits.argmax()))
        losses.append(-logits.log_softmax(-1)[row["label"]].item())
    metrics = evaluated(config, prepared, model)
    confusion = [[0] * 3 for _ in range(3)]
    for reference, prediction in zip(references, predictions, strict=True):
        confusion[reference][prediction] += 1
    assert references == [1, 0, 2, 1, 0]
    assert metrics["confusion_matrix"] == confusion
    assert metrics["accuracy"] == pytest.approx(sum(confusion[i][i] for i in range(3)) / 5)
    assert metrics["loss"] == pytest.approx(sum(losses) / 5, rel=1e-5)
    assert metrics["examples"] == 5
    assert "perplexity" not in metrics and "bits_per_byte" not in metrics


def test_only_an_evaluation_that_may_stop_heeds_a_request_to_stop() -> None:
    config = configured("causal_lm")
    prepared = prepared_data(config, TEXTS)
    run, parts = run_and_parts(config, prepared, network(config, prepared))
    assert evaluate(run, parts, "validation", 1, may_stop=True).metrics["examples"] > 0  # nobody asked
    run.stop.append("SIGTERM")
    assert evaluate(run, parts, "validation", 1).metrics["examples"] == len(prepared.examples["validation"])
    assert evaluate(run, parts, "train", 1).split == "train"
    with pytest.raises(StopAtOnce):
        evaluate(run, parts, "validation", 1, may_stop=True)
    assert parts.model.training


class Listener(Extra):
    """Hears what is computed, and whether the model is in evaluation then."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, list[tuple[int, ...]]]] = []
        self.depth = 0

    @contextmanager
    def computing(self, phase: str, micro_batches: Sequence[MicroBatch], step: int = 0) -> Iterator[None]:
        self.heard.append((phase, [batch.example_ids for batch in micro_batches]))
        self.depth += 1
        yield
        self.depth -= 1

    def metrics(self, run: Run, data: PreparedData, split: str, table: np.ndarray) -> dict[str, Any]:
        return {f"{split} losses": table[:, 1].sum()}


def test_extras_hear_of_each_batch_of_an_evaluation_while_it_is_computed() -> None:
    config = configured("causal_lm", 2)
    prepared, listener, at_work = prepared_data(config, TEXTS), Listener(), list[int]()
    run, parts = run_and_parts(config, prepared, network(config, prepared))
    run.extras = Extras({"listener": listener})
    parts.model.register_forward_hook(lambda *_: at_work.append(listener.depth))
    found = evaluate(run, parts, "validation", 1).metrics
    expected = [("evaluation", [batch.example_ids]) for batch in prepared.evaluation_batches(run, split_of(prepared))]
    assert listener.heard == expected and len(expected) > 2
    assert sorted(i for _, [ids] in expected for i in ids) == list(range(len(split_of(prepared))))
    assert at_work == [1] * len(expected)
    assert found["validation losses"] == pytest.approx(direct(prepared, parts.model.model)[0], rel=1e-6)


def split_of(prepared: PreparedData) -> datasets.Dataset:
    return prepared.examples["validation"]


def test_an_evaluation_tells_how_long_it_took(monkeypatch: pytest.MonkeyPatch) -> None:
    config = configured("causal_lm")
    prepared, now = prepared_data(config, TEXTS), iter((100.0, 107.5))
    monkeypatch.setattr("train.evaluation.time", SimpleNamespace(perf_counter=lambda: next(now)))
    assert evaluate(*run_and_parts(config, prepared, network(config, prepared)), "validation", 1).seconds == 7.5


def test_a_long_evaluation_shows_how_far_it_is(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    config = configured("causal_lm")
    prepared = prepared_data(config, TEXTS)
    run, parts = run_and_parts(config, prepared, network(config, prepared))
    run.outputs.is_main, number = True, len(list(prepared.evaluation_batches(run, split_of(prepared))))
    evaluate(run, parts, "validation", 1)
    assert "evaluating" not in capsys.readouterr().err  # a short one
    monkeypatch.setattr("tqdm.std.time", count(0, 10).__next__)  # seconds, ten later at each look
    evaluate(run, parts, "validation", 1)
    assert f"{number}/{number}" in capsys.readouterr().err


def test_ranks_that_divide_sequences_add_up_what_they_have_of_each_example(monkeypatch: pytest.MonkeyPatch) -> None:
    config = configured("causal_lm")
    prepared = prepared_data(config, TEXTS)
    model, launch = network(config, prepared), Launch(world_size=2, cp_size=2)
    count, (loss_sum, targets, correct) = len(split_of(prepared)), direct(prepared, model)
    others = [(float(example), 1.5, 3.0, 2.0, 0.0, 0.0) for example in range(count)]
    monkeypatch.setattr("accelerate.utils.gather_object", lambda rows: [*rows, others])
    found = evaluate(*run_and_parts(config, prepared, model, launch=launch), "validation", 1).metrics
    assert found["examples"] == count
    assert found["loss"] == pytest.approx((loss_sum + 1.5 * count) / (targets + 3 * count), rel=1e-6)
    assert found["accuracy"] == pytest.approx((correct + 2 * count) / (targets + 3 * count), rel=1e-9)


def test_of_ranks_that_share_tensors_the_first_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    config = configured("causal_lm")
    prepared = prepared_data(config, TEXTS)
    model, given = network(config, prepared), list[int]()
    expected = evaluated(config, prepared, model)
    table: list[Any] = []

    def gather(rows: list[Any]) -> list[Any]:
        given.append(len(rows[0]))
        table.extend(rows)
        return table

    monkeypatch.setattr("accelerate.utils.gather_object", gather)
    for rank in (0, 1):  # one after the other: the second one has the rows of both
        launch = Launch(world_size=2, rank=rank, tp_size=2)
        assert evaluate(*run_and_parts(config, prepared, model, launch=launch), "validation", 1).metrics == expected
    assert given == [expected["examples"], 0]


def test_losses_of_an_fp64_model_keep_their_precision() -> None:
    config = configured("causal_lm")
    prepared = prepared_data(config, TEXTS)
    model = network(config, prepared).double()
    loss_sum, targets, _ = direct(prepared, model)
    assert evaluated(config, prepared, model)["loss"] == pytest.approx(loss_sum / targets, rel=1e-13)


def test_equal_examples_count_once_each() -> None:
    config = configured("causal_lm")
    prepared = prepared_data(config, ["one", "one", "two"])
    loss_sum, targets, _ = direct(prepared, model := network(config, prepared))
    metrics = evaluated(config, prepared, model)
    assert metrics["examples"] == 3 and metrics["loss"] == pytest.approx(loss_sum / targets, rel=1e-6)


def test_counts_are_exact_where_a_task_gives_losses_in_half_precision() -> None:
    length = 1001  # which bf16 rounds to 1000
    labels = torch.full((1, length), 4097)
    scores = Scores(torch.ones(1, dtype=torch.bfloat16), labels.clone())
    batch = MicroBatch({"input_ids": labels}, labels, length, (7,), length)
    extras = SimpleNamespace(inside=lambda *_: nullcontext())
    run: Any = SimpleNamespace(extras=extras, accelerator=SimpleNamespace(device=torch.device("cpu")))
    engine = SimpleNamespace(share=nullcontext)
    parts: Any = SimpleNamespace(engine=engine, model=lambda inputs, labels, scored: scores)
    assert score(run, parts, batch) == [(7, 1.0, length, length, 4097, 4097)]


def test_an_extra_that_adds_metrics_finds_the_model_without_dropout() -> None:
    """Such as one that generates."""
    config, seen = configured("causal_lm"), list[bool]()
    prepared = prepared_data(config, TEXTS)
    run, parts = run_and_parts(config, prepared, network(config, prepared).train())

    class Generating(Extra):
        def metrics(self, run: Run, data: PreparedData, split: str, table: np.ndarray) -> dict[str, Any]:
            seen.append(parts.model.training)
            return {"rouge": 0.5}

    run.extras = Extras({"generating": Generating()})
    assert evaluate(run, parts, "validation", 1).metrics["rouge"] == 0.5
    assert seen == [False] and parts.model.training
