"""What a model does with later tokens, neighbours in a row and padding is found on a small copy, by numbers."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig

import train.extras.small_copy
from train.config import Config
from train.extras.long_sequences.attention import obstacle_to_documents
from train.extras.small_copy import obstacle_to_batches, obstacle_to_task, small_copy, tried_on_small_copies
from train.tasks import Task, causal_lm, masked_lm, sequence_classification

TASKS: dict[str, type[Task]] = {
    "causal": causal_lm.Task,
    "masked": masked_lm.Task,
    "classes": sequence_classification.Task,
}


def published(model_type: str, task: type[Task], **fields: Any) -> nn.Module:
    """The architecture of its default size, without weights, as ``build_model`` asks for it."""
    config = AutoConfig.for_model(model_type, **fields)
    if task.is_causal and getattr(config, "is_decoder", None) is False:
        config.is_decoder = True
    config.use_cache = False
    with torch.device("meta"):
        return getattr(transformers, task.auto_class).from_config(config)


def checked(model: nn.Module, task: type[Task], **fields: Any) -> str | None:
    """What the task finds wrong with the model."""
    config = Config().changed(**{"model": "some:model", "tokenizer": "bytes", "micro_batch_size": 2, **fields})
    return obstacle_to_task(model, task, config, 300, 0)


@pytest.mark.parametrize(
    ("model_type", "is_causal"),
    [(name, True) for name in ("llama", "bigbird_pegasus", "falcon_h1", "deepseek_v3", "bart")]
    + [(name, False) for name in ("cpmant", "xlnet", "prophetnet", "reformer")],
)
def test_later_tokens(model_type: str, is_causal: bool) -> None:
    found = checked(published(model_type, causal_lm.Task), causal_lm.Task)
    assert found is None if is_causal else found is not None and "its tokens see those that follow" in found


class Functional(nn.Module):
    """Has neither an Embedding nor token ids of two dimensions inside."""

    def __init__(self, is_causal: bool) -> None:
        super().__init__()
        self.weight, self.is_causal = nn.Parameter(torch.randn(300, 8)), is_causal
        self.head = nn.Parameter(torch.zeros(300, 8))  # as some initialise it: nothing would be seen

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = nn.functional.embedding(input_ids.flatten(), self.weight).view(*input_ids.shape, 8)
        hidden = hidden + (hidden.cumsum(1) if self.is_causal else hidden.mean(1, keepdim=True))
        return hidden @ self.head.T


@pytest.mark.parametrize("is_causal", [True, False])
def test_later_tokens_of_a_module_of_ones_own(is_causal: bool) -> None:
    assert (checked(Functional(is_causal), causal_lm.Task) is None) is is_causal


def test_results_that_are_not_finite_tell_nothing_of_later_tokens() -> None:
    class Infinite(Functional):
        def forward(self, input_ids: Tensor) -> Tensor:
            return super().forward(input_ids) * torch.nan

    assert checked(Infinite(True), causal_lm.Task) is None


class Mean(nn.Module):
    """A classifier, or with ``each`` a model of every token, that may lack something of its contract."""

    def __init__(self, rows: int = 300, outputs: int = 2, each: bool = False) -> None:
        super().__init__()
        self.embed, self.head, self.each = nn.Embedding(rows, 8), nn.Linear(8, outputs), each

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        hidden = self.embed(input_ids)
        return self.head(hidden if self.each else hidden.mean(1))


class Maskless(Mean):
    def forward(self, input_ids: Tensor) -> Tensor:  # type: ignore
        return super().forward(input_ids)


class InATuple(Mean):
    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Any:
        return (super().forward(input_ids, attention_mask),)


class Masked(Mean):
    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:  # type: ignore
        return super().forward(input_ids, attention_mask)


@pytest.mark.parametrize(
    ("model", "task", "said"),
    [
        (Mean(), "classes", None),
        # Rows of equal length have no mask: this one would end a run in the middle.
        (Masked(), "classes", r"for input_ids \(2, 8\), .*missing 1 required positional argument: 'attention_mask'"),
        (Mean(outputs=3), "classes", None),
        (Mean(outputs=300, each=True), "masked", None),
        (Maskless(outputs=300, each=True), "causal", None),
        (
            Maskless(),
            "classes",
            r"attention_mask \(2, 8\), .*unexpected keyword argument 'attention_mask'",
        ),
        (Mean(rows=256), "classes", r"for input_ids \(2, 8\), ids below 300 by name, it gives IndexError: index out"),
        (
            Mean(outputs=1),
            "classes",
            r"\(2, 8\), .*logits of the shape \(2, 1\), .*_classification needs \(2, 2\)",
        ),
        (InATuple(), "classes", r"it gives a tuple for logits, and sequence_classification needs \(2, 2\)"),
        (Mean(each=True), "classes", r"logits of the shape \(2, 8, 2\), and sequence_classification needs \(2, 2\)"),
        (Mean(outputs=256, each=True), "causal", r"of the shape \(2, 8, 256\), and causal_lm needs \(2, 8, 300\)"),
    ],
)
def test_a_module_of_ones_own_that_cannot_take_a_batch(model: nn.Module, task: str, said: str | None) -> None:
    found = obstacle_to_batches(model, TASKS[task], Config().changed(micro_batch_size=2), (300, 2))
    assert found is None if said is None else re.search(said, str(found))


class Tags(causal_lm.Task):
    """Three kinds of tokens."""

    is_causal = False

    def label_names(self, corpus: Any) -> tuple[str, ...]:
        return ("a", "b", "c")


class Pairs(causal_lm.Task):
    """With another input next to input_ids."""

    def collate(self, examples: Any, seed: Any, pad_id: int) -> Any:
        raise NotImplementedError


class Precise(nn.Module):
    """A layer in fp64 and one of complex numbers, with what converts between them and fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(300, 8), nn.Linear(8, 300)
        self.precise, self.turn = nn.Linear(8, 8).double(), nn.Parameter(torch.randn(8, dtype=torch.complex64))

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.precise(self.embedding(input_ids).double())
        return self.head((hidden.to(torch.complex64) * self.turn).cumsum(1).real)


def test_modules_of_several_types_are_tried_as_they_are() -> None:
    model = Precise()
    assert obstacle_to_batches(model, TASKS["causal"], Config(), (300, 0)) is None
    assert checked(model, TASKS["causal"]) is None
    with small_copy(model) as small:
        assert [p.dtype for p in small.parameters()] == [p.dtype for p in model.parameters()]
    with small_copy(model.bfloat16()) as small:
        assert {p.dtype for p in small.parameters()} == {torch.float32, torch.complex64}


def test_as_many_rows_of_logits_whatever_the_tokens_are_refused() -> None:
    shape = {"d_model": 32, "d_latents": 32, "num_latents": 8, "num_self_attends_per_block": 1, "vocab_size": 300}
    model = transformers.PerceiverForMaskedLM(transformers.PerceiverConfig(**shape, max_position_embeddings=64))
    found = checked(model, TASKS["masked"])
    assert found == "its logits for (1, 12) tokens are (1, 64, 300). Give another model"


def test_classes_of_each_token_and_inputs_of_a_tasks_own_are_no_obstacle() -> None:
    config = Config().changed(micro_batch_size=2)
    assert obstacle_to_batches(Mean(outputs=3, each=True), Tags, config, (300, 3)) is None
    assert "needs (2, 8, 3)" in str(obstacle_to_batches(Mean(outputs=2, each=True), Tags, config, (300, 3)))
    assert obstacle_to_batches(nn.Linear(2, 2), Pairs, config, (300, 0)) is None


def test_a_classifier_that_never_sees_padding_needs_no_mask() -> None:
    assert obstacle_to_batches(Maskless(), TASKS["classes"], Config(), (300, 2)) is None


@pytest.mark.parametrize("task", ["causal", "masked"])
@pytest.mark.parametrize(
    ("model_type", "is_apart"),
    [(name, True) for name in ("llama", "mixtral", "olmo3", "deepseek_v3", "albert", "modernbert")]
    + [(name, False) for name in ("mamba", "bloom", "bart", "roberta")]
    # layers of three of them with a state pass it on as those of mamba do
    + [pytest.param(name, False, marks=pytest.mark.slow) for name in ("falcon_h1", "jamba", "qwen3_next", "gpt_oss")]
    + [pytest.param(name, False, marks=pytest.mark.slow) for name in ("doge", "llama4_text", "layoutlm")],
)
def test_documents_that_share_a_row(model_type: str, is_apart: bool, task: str) -> None:
    mapping = getattr(transformers, f"MODEL_FOR_{'CAUSAL' if task == 'causal' else 'MASKED'}_LM_MAPPING")
    if type(AutoConfig.for_model(model_type)) not in mapping:
        pytest.skip("there is no such model for this task")
    obstacle = obstacle_to_documents(published(model_type, TASKS[task]))
    assert obstacle is None if is_apart else obstacle is not None and "other results" in obstacle


@pytest.mark.parametrize(
    ("model_type", "task", "changes"),
    [("fnet", "masked", True)]
    + [(name, "masked", False) for name in ("bert", "mobilebert", "roberta", "modernbert", "deberta-v2")]
    + [pytest.param("longformer", "masked", False, marks=pytest.mark.slow)]
    + [pytest.param(n, "masked", True, marks=pytest.mark.slow) for n in ("yoso", "convbert", "funnel", "nystromformer")]
    + [(name, "classes", False) for name in ("bert", "llama", "gpt2", "mistral", "bart", "distilbert")]
    + [pytest.param("canine", "classes", True, marks=pytest.mark.slow), ("fnet", "classes", True)],
)
def test_padding(model_type: str, task: str, changes: bool) -> None:
    model = published(model_type, TASKS[task], pad_token_id=1)
    found = checked(model, TASKS[task])
    if not changes:
        assert found is None
        return
    assert found == "padding changes its results. Give --micro_batch_size 1 --eval_batch_size 1, or another model"
    assert checked(model, TASKS[task], micro_batch_size=1, eval_batch_size=1) is None
    # A budget of tokens puts several examples into a micro-batch, whatever micro_batch_size says.
    budget = {"micro_batch_size": 1, "global_batch_size": 8, "max_tokens_per_micro_batch": 64}
    assert checked(model, TASKS[task], **budget) == found


@pytest.mark.parametrize(
    ("model_type", "kinds"),
    [("qwen3_next", {"linear_attention", "full_attention"}), ("gemma3_text", {"sliding_attention", "full_attention"})],
)
def test_a_small_copy_has_every_kind_of_layer(model_type: str, kinds: set[str]) -> None:
    with small_copy(published(model_type, causal_lm.Task)) as small:
        config: Any = small.config
        assert sum(p.numel() for p in small.parameters()) <= 40_000_000
        assert set(config.layer_types) == kinds
        assert getattr(config, "sliding_window", 3) <= 3  # else a window would hide nothing from so few tokens
        assert {p.dtype for p in small.parameters()} == {torch.float32}
        assert not small.training


class Blurred(Mean):
    """Each token takes from all others, padding too; it has no loss of its own."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return self.head(self.embed(input_ids) + self.embed(input_ids).mean(1, keepdim=True))


def test_padding_is_tried_although_a_module_of_ones_own_has_no_loss() -> None:
    assert "padding changes its results" in str(checked(Blurred(outputs=300), masked_lm.Task))
    assert checked(Mean(outputs=300, each=True), masked_lm.Task) is None


class Compared(Mean):
    """Similarities (B, B) of rows, as in contrastive learning, where a row alone is compared with itself only."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        rows = super().forward(input_ids, attention_mask)
        return rows @ rows.T


class Squeezed(Mean):
    """A regression whose logits have no dimension at all for a single row."""

    def __init__(self) -> None:
        super().__init__(outputs=1)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return super().forward(input_ids).squeeze()


def test_rows_that_are_compared_with_each_other_are_not_taken_for_padding_that_changes_them() -> None:
    assert checked(Compared(outputs=300), sequence_classification.Task) is None
    assert "padding changes its results" in str(checked(Squeezed(), sequence_classification.Task))


class Ended(Blurred):
    """A classifier that, as Bart's and T5's, takes no row without its end mark."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(eos_token_id=2)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        assert (input_ids == 2).any(1).all()
        return super().forward(input_ids).mean(1)


def test_padding_is_tried_with_rows_that_end_as_a_model_needs() -> None:
    assert "padding changes its results" in str(checked(Ended(), sequence_classification.Task))


def test_no_copy_is_made_of_what_stays_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train.extras.small_copy, "TRIED_PARAMETERS", 1000)
    with pytest.raises(ValueError, match="too many parameters"), small_copy(published("llama", causal_lm.Task)):
        pass


def test_every_rank_tries_the_same_copy() -> None:
    weights = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        with small_copy(Mean()) as small:
            weights.append(small.get_parameter("head.weight").clone())
        assert torch.initial_seed() == seed
    assert torch.equal(*weights)


@pytest.mark.parametrize(("in_fp64", "expected"), [(None, None), ("another", "another"), (RuntimeError(), "a leak")])
def test_what_fp32_finds_has_to_be_there_in_fp64_where_the_model_works_in_it(
    in_fp64: str | Exception | None, expected: str | None
) -> None:
    """Rounding that a model magnifies is not a leak, on whatever machine."""
    seen: list[torch.dtype] = []

    def trial(small: nn.Module) -> str | None:
        seen.append(next(small.parameters()).dtype)
        if seen == [torch.float32]:
            return "a leak"
        if isinstance(in_fp64, Exception):
            raise in_fp64
        return in_fp64

    assert tried_on_small_copies(published("llama", causal_lm.Task), trial) == expected
    assert seen == [torch.float32, torch.float64]
    assert tried_on_small_copies(published("llama", causal_lm.Task), lambda small: None) is None


@pytest.mark.parametrize(("model_type", "is_its_own"), [("bert", True), ("modernbert", True), ("bart", False)])
def test_masked_lm_is_refused_for_a_model_with_another_loss(model_type: str, is_its_own: bool) -> None:
    found = checked(published(model_type, masked_lm.Task), masked_lm.Task)
    expected = "its own loss is not that of masked_lm. Give another model"
    assert found == (None if is_its_own else expected)
