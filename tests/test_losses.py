"""The loss: the sum over targets, in fp32 or better, whatever the model returns."""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from support import needs_transformers_5_23, run_for
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity, profile
from transformers.modeling_outputs import CausalLMOutput

from train.config import Config
from train.extras.activations.recompute import enable_checkpointing
from train.extras.losses import Extra, chunked
from train.extras.losses.chunked import PLAIN, Objective, chunked_scores, chunked_sum
from train.extras.losses.fused import Place
from train.extras.losses.in_head import MIN_CHUNKED_CLASSES, choose_loss, obstacle_to_chunks, use_loss_in_head
from train.model import ModelWithLoss, logits_of
from train.records import IGNORE, UserError
from train.tasks import Scores, Task, cross_entropy, cross_entropy_sum


def example(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Logits (3, 4, 7) and labels (3, 4), four of them ignored."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 4, 7, generator=generator, dtype=torch.float64).mul(3).to(dtype)
    labels = torch.randint(7, (3, 4), generator=generator)
    labels[0, 2:] = IGNORE
    labels[2, 0] = labels[2, 3] = IGNORE
    return logits, labels


def by_hand(logits: Tensor, labels: Tensor) -> Tensor:
    """(B, S) −log p(label) from the definition, in fp64."""
    logits = logits.double()
    log_p = logits - logits.exp().sum(-1, keepdim=True).log()
    picked = -log_p.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return torch.where(labels == IGNORE, 0.0, picked)


def test_sum_is_minus_log_softmax_of_the_labels() -> None:
    logits, labels = example()
    assert cross_entropy_sum(logits, labels).item() == pytest.approx(by_hand(logits, labels).sum().item(), rel=1e-12)
    torch.testing.assert_close(cross_entropy(logits, labels).view(3, 4), by_hand(logits, labels))


def test_sequence_labels_and_document_labels_are_scored_alike() -> None:
    logits, labels = torch.randn(5, 3, dtype=torch.float64), torch.tensor([0, 2, 1, IGNORE, 2])
    assert cross_entropy_sum(logits, labels).item() == pytest.approx(by_hand(logits, labels).sum().item())


def test_ignored_positions_give_no_loss_and_no_gradient() -> None:
    logits, labels = example()
    logits.requires_grad_()
    cross_entropy_sum(logits, labels).backward()
    assert logits.grad is not None
    assert (logits.grad[labels == IGNORE] == 0).all()
    assert (logits.grad[labels != IGNORE].abs().sum(-1) > 0).all()


def test_a_batch_without_targets_has_loss_zero_and_finite_gradients() -> None:
    logits, labels = example()
    logits.requires_grad_()
    loss = cross_entropy_sum(logits, torch.full_like(labels, IGNORE))
    loss.backward()
    assert loss.item() == 0.0
    assert logits.grad is not None and (logits.grad == 0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_logits_are_summed_in_fp32(dtype: torch.dtype) -> None:
    logits, labels = torch.zeros(1, 5000, 2, dtype=dtype), torch.zeros(1, 5000, dtype=torch.long)
    for loss in (cross_entropy_sum(logits, labels), cross_entropy(logits, labels).sum()):
        assert loss.dtype == torch.float32
        assert loss.item() == pytest.approx(5000 * 0.6931471805599453, rel=1e-6)


def test_double_precision_logits_stay_double() -> None:
    logits, labels = example()
    assert cross_entropy_sum(logits, labels).dtype == torch.float64
    assert cross_entropy(logits, labels).dtype == torch.float64


@dataclass
class Answer:
    logits: Tensor


class Network(nn.Module):
    """Logits (B, S, 7) from a table, packed as ``wrap`` says."""

    def __init__(self, wrap: Any = lambda logits: logits) -> None:
        super().__init__()
        self.table, self.wrap = nn.Embedding(7, 7), wrap

    def forward(self, input_ids: Tensor) -> Any:
        return self.wrap(self.table(input_ids))


WRAPS = {
    "tensor": lambda logits: logits,
    "dict": lambda logits: {"logits": logits},
    "transformers": lambda logits: CausalLMOutput(logits=logits),
    "dataclass": Answer,
    "namespace": lambda logits: SimpleNamespace(logits=logits),
}


@pytest.mark.parametrize("wrap", WRAPS)
def test_a_model_may_return_a_tensor_a_mapping_or_an_object(wrap: str) -> None:
    logits, labels = example()
    assert logits_of(WRAPS[wrap](logits)) is logits
    model = Network(WRAPS[wrap])
    inputs = {"input_ids": labels.clamp(min=0)}
    expected = by_hand(model.table(inputs["input_ids"]), labels).sum().item()
    assert ModelWithLoss(model)(inputs, labels).item() == pytest.approx(expected, rel=1e-5)


def test_scores_sum_to_the_loss_and_predict_the_best_class() -> None:
    torch.manual_seed(0)
    _, labels = example()
    network = Network().double()
    model, inputs = ModelWithLoss(network), {"input_ids": labels.clamp(min=0)}
    scores = model(inputs, labels, scored=True)
    assert isinstance(scores, Scores)
    logits = network(inputs["input_ids"])
    torch.testing.assert_close(scores.loss_sums, by_hand(logits, labels).sum(1))
    assert scores.loss_sums.sum().item() == pytest.approx(model(inputs, labels).item(), rel=1e-12)
    assert scores.predictions.tolist() == [[row.index(max(row)) for row in rows] for rows in logits.tolist()]


def test_scores_of_document_labels_are_one_an_example() -> None:
    class Classifier(nn.Module):
        def forward(self, input_ids: Tensor) -> Tensor:
            return input_ids.double()

    logits, labels = torch.tensor([[1, 5, 2], [4, 0, 0]]), torch.tensor([2, 0])
    scores = ModelWithLoss(Classifier())({"input_ids": logits}, labels, scored=True)
    torch.testing.assert_close(scores.loss_sums, by_hand(logits, labels))
    assert scores.predictions.tolist() == [1, 0]


# In chunks

CPU = Place("cpu", torch.float32)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of four tokens, so that small tensors are several chunks and a rest."""
    monkeypatch.setattr(chunked, "CHUNK_LOGITS_BYTES", 0)
    monkeypatch.setattr(chunked, "MIN_CHUNK_TOKENS", 4)


Loss = Callable[[Tensor, Tensor, Tensor | None, Tensor], Tensor]
HIDDEN, CLASSES = 5, 23


def full_sum(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor) -> Tensor:
    return cross_entropy_sum(F.linear(hidden, weight, bias), labels)


def head_example(with_bias: bool = True, dtype: torch.dtype = torch.float64) -> tuple[list[Tensor | None], Tensor]:
    """[hidden (2, 7, H), weight (V, H), bias (V,)] and labels (2, 7), five of them ignored."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 7, HIDDEN), (CLASSES, HIDDEN), (CLASSES,)]
    tensors = [torch.randn(s, generator=generator, dtype=torch.float64).mul(2).to(dtype) for s in shapes]
    labels = torch.randint(CLASSES, (2, 7), generator=generator)
    labels[0, 3:] = labels[1, 0] = IGNORE
    return [*tensors[:2], tensors[2] if with_bias else None], labels


def gradients(
    loss: Loss, tensors: list[Tensor | None], labels: Tensor, autocast: torch.dtype | None = None, scale: float = 1.0
) -> list[Tensor]:
    """The loss () and the gradients of ``scale`` × loss, in fp64 and divided by ``scale``."""
    leaves = [None if t is None else t.detach().clone().requires_grad_() for t in tensors]
    with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
        value = loss(leaves[0], leaves[1], leaves[2], labels)  # type: ignore
    (value * scale).backward()
    found = [value.detach().double()]
    for leaf in leaves:
        if leaf is not None:
            assert leaf.grad is not None and leaf.grad.dtype == leaf.dtype
            found.append(leaf.grad.double() / scale)
    return found


def error(found: list[Tensor], exact: list[Tensor]) -> list[float]:
    """Relative error of each tensor as a whole."""
    return [((f - e).norm() / e.norm()).item() for f, e in zip(found, exact, strict=True)]


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 1e-6)])
def test_chunks_give_the_loss_and_gradients_of_all_logits(
    dtype: torch.dtype, tolerance: float, with_bias: bool
) -> None:
    tensors, labels = head_example(with_bias, dtype)
    found, expected = gradients(chunked_sum, tensors, labels), gradients(full_sum, tensors, labels)
    assert len(found) == (4 if with_bias else 3)
    assert max(error(found, expected)) < tolerance
    assert (found[1][labels == IGNORE] == 0).all() and (found[1][labels != IGNORE] != 0).any(-1).all()


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("num_targets", [None, 7])
def test_gradients_in_chunks_are_those_of_finite_differences(num_targets: int | None) -> None:
    tensors, labels = head_example()
    loss = partial(chunked_sum, num_targets=num_targets)
    found, step = gradients(loss, tensors, labels)[1:], 1e-5
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        directions = [torch.randn(t.shape, generator=generator, dtype=t.dtype) for t in found]
        ends = []
        for sign in (-step, step):
            moved: Any = [t + sign * d for t, d in zip(tensors, directions, strict=True) if t is not None]
            ends.append(loss(hidden=moved[0], weight=moved[1], bias=moved[2], labels=labels))
        slope = sum((g * d).sum() for g, d in zip(found, directions, strict=True))
        torch.testing.assert_close((ends[1] - ends[0]) / (2 * step), slope, rtol=1e-7, atol=0)


@pytest.mark.usefixtures("small_chunks")
def test_gradients_are_the_same_whatever_they_are_multiplied_by_and_given_once() -> None:
    tensors, labels = head_example(dtype=torch.float32)
    exact = gradients(full_sum, [None if t is None else t.double() for t in tensors], labels)
    for scale in (1.0, 1 / 8191, 3e4):
        assert max(error(gradients(chunked_sum, tensors, labels, scale=scale), exact)) < 1e-6
    half: list[Tensor | None] = [None if t is None else t.to(torch.bfloat16) for t in tensors]
    halfway = 1.5 + 2**-8  # between two numbers of bf16: rounded to one of them it would bias all gradients by 0.26 %
    once, scaled = (gradients(chunked_sum, half, labels, scale=scale)[1:] for scale in (1.0, halfway))
    for one, other in zip(once, scaled, strict=True):
        assert (one * other).sum() / one.square().sum() == pytest.approx(1, abs=1e-3)
    hidden, weight, bias = tensors
    assert hidden is not None and weight is not None
    loss = chunked_sum(hidden.requires_grad_(), weight, bias, labels)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("kind", ["autocast", "weights"])
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_half_precision_in_chunks_is_no_worse_than_all_logits_at_once(half: torch.dtype, kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(64, 32, generator=generator), torch.randn(300, 32, generator=generator) / 4
    labels = torch.randint(300, (64,), generator=generator)
    dtype, autocast = (torch.float32, half) if kind == "autocast" else (half, None)
    tensors: list[Tensor | None] = [hidden.to(half).to(dtype), weight.to(half).to(dtype), None]
    exact = gradients(full_sum, [None if t is None else t.double() for t in tensors], labels)
    found = error(gradients(chunked_sum, tensors, labels, autocast), exact)
    usual = error(gradients(full_sum, tensors, labels, autocast), exact)
    # half-precision weights: rounding the sum of the chunks' rounded products comes on top, at most √2
    worse = 1.05 if kind == "autocast" else 2**0.5
    assert all(one <= worse * other for one, other in zip(found, usual, strict=True)), (found, usual)
    assert usual[2] > 1e-5  # rounding was there to be seen


@pytest.mark.usefixtures("small_chunks")
def test_loss_scaling_saves_small_gradients_from_half_precision() -> None:
    tensors, labels = head_example(False, torch.float32)
    exact = gradients(full_sum, tensors, labels)
    tiny = 1e-7  # one over the targets of a global batch
    scaled = error(gradients(chunked_sum, tensors, labels, torch.float16, scale=tiny * 2**16), exact)
    unscaled = error(gradients(chunked_sum, tensors, labels, torch.float16, scale=tiny), exact)
    large = error(gradients(chunked_sum, tensors, labels, torch.float16, scale=2.0**13), exact)
    assert max(scaled) < 5e-3 and max(large) < 5e-3
    assert max(unscaled) > 0.1


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("num_targets", [None, 0])
def test_chunks_without_targets_have_loss_zero_and_gradients_zero(num_targets: int | None) -> None:
    tensors, labels = head_example()
    loss = partial(chunked_sum, num_targets=num_targets)
    found = gradients(loss, tensors, torch.full_like(labels, IGNORE))
    assert len(found) == 4
    assert all((f == 0).all() for f in found)


@pytest.mark.usefixtures("small_chunks")
def test_rows_that_are_not_targets_are_not_computed_where_their_number_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[int] = []

    def linear(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        seen.append(len(hidden))
        return hidden @ weight.T if bias is None else hidden @ weight.T + bias

    tensors, labels = head_example()
    labels[1, 2:] = IGNORE  # four of fourteen are left
    labels[1, 1] = 3
    expected = gradients(full_sum, tensors, labels)
    monkeypatch.setattr(F, "linear", linear)
    assert max(error(gradients(partial(chunked_sum, num_targets=4), tensors, labels), expected)) < 1e-14
    assert seen == [4]
    seen.clear()
    gradients(chunked_sum, tensors, labels)
    assert seen == [4, 4, 4, 2]  # once: what backward needs is prepared


@pytest.mark.usefixtures("small_chunks")
def test_hidden_states_may_be_a_view_and_weights_frozen() -> None:
    (hidden, weight, bias), labels = head_example()
    assert hidden is not None and weight is not None
    strided = hidden.transpose(0, 1).contiguous().transpose(0, 1).detach().requires_grad_()
    assert not strided.is_contiguous()
    chunked_sum(strided, weight, bias, labels).backward()
    assert strided.grad is not None and weight.grad is None
    torch.testing.assert_close(strided.grad, gradients(full_sum, [hidden, weight, bias], labels)[1])
    learned = weight.clone().requires_grad_()
    chunked_sum(hidden, learned, bias, labels).backward()
    assert hidden.grad is None and learned.grad is not None
    torch.testing.assert_close(learned.grad, gradients(full_sum, [hidden, weight, bias], labels)[2])


@pytest.mark.usefixtures("small_chunks")
def test_scores_in_chunks_are_those_of_all_logits() -> None:
    (hidden, weight, bias), labels = head_example()
    assert hidden is not None and weight is not None
    scores, logits = chunked_scores(hidden, weight, bias, labels), F.linear(hidden, weight, bias)
    torch.testing.assert_close(scores.loss_sums, by_hand(logits, labels).sum(1))
    assert torch.equal(scores.predictions, logits.argmax(-1))


OBJECTIVES = [Objective(0.1), Objective(0.0, 0.01), Objective(0.3, 1e-2)]


def capped(logits: Tensor, objective: Objective) -> Tensor:
    return objective.softcap * (logits / objective.softcap).tanh() if objective.softcap else logits


def by_definition(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, objective: Objective) -> Tensor:
    """() the objective written out, of all logits."""
    logits = capped(F.linear(hidden, weight, bias)[labels != IGNORE], objective)
    log_z = logits.exp().sum(-1).log()
    log_p = logits - log_z.unsqueeze(-1)
    target = F.one_hot(labels[labels != IGNORE], logits.shape[-1]).double() * (1 - objective.label_smoothing)
    target = target + objective.label_smoothing / logits.shape[-1]
    return -(target * log_p).sum() + objective.z_loss * (log_z**2).sum()


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("objective", [Objective(softcap=0.5), Objective(0.1, 1e-2, softcap=2.0)], ids=str)
def test_capped_logits_are_as_defined(objective: Objective) -> None:
    tensors, labels = head_example()
    expected = gradients(partial(by_definition, objective=objective), tensors, labels)
    assert error(expected, gradients(full_sum, tensors, labels))[0] > 1e-3
    assert max(error(gradients(partial(chunked_sum, objective=objective), tensors, labels), expected)) < 1e-13
    # recomputed in backward, as under loss scaling
    exact = gradients(partial(by_definition, objective=objective), tensors, labels, scale=2.0**10)
    single = [None if t is None else t.float() for t in tensors]
    found = gradients(partial(chunked_sum, objective=objective), single, labels, torch.float16, 2.0**10)
    assert max(error(found, exact)) < 3e-3


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("objective", OBJECTIVES, ids=str)
def test_smoothing_and_z_loss_are_as_defined(objective: Objective) -> None:
    tensors, labels = head_example()
    expected = gradients(partial(by_definition, objective=objective), tensors, labels)
    assert error(expected, gradients(full_sum, tensors, labels))[0] > 1e-3
    full = lambda h, w, b, labels: objective.loss_sum(F.linear(h, w, b), labels)  # noqa: E731
    for loss in (full, partial(chunked_sum, objective=objective)):
        assert max(error(gradients(loss, tensors, labels), expected)) < 1e-13
    # recomputed in backward, as under loss scaling
    exact = gradients(partial(by_definition, objective=objective), tensors, labels, scale=2.0**10)
    scaled = partial(chunked_sum, objective=objective)
    found = gradients(scaled, [None if t is None else t.float() for t in tensors], labels, torch.float16, 2.0**10)
    assert max(error(found, exact)) < 5e-3


def with_loss(model: nn.Module, loss: str = "full", objective: Objective = PLAIN) -> ModelWithLoss:
    """``model`` with the loss of this name."""
    made = ModelWithLoss(model)
    made.loss_sum = objective.loss_sum
    if loss != "full":
        use_loss_in_head(made, loss, objective)
    return made


def choice(asked: str, model: nn.Module, place: Place = CPU) -> str:
    return choose_loss(asked, ModelWithLoss(model), place)[0]


def test_scores_are_plain_cross_entropy_whatever_is_minimised() -> None:
    for loss in ("full", "chunked"):
        model = with_loss(network("llama").eval(), loss)
        smoothed = with_loss(network("llama").eval(), loss, Objective(0.1, 0.01))
        plain, found = (m(*batch(), scored=True) for m in (model, smoothed))
        assert isinstance(found, Scores) and isinstance(plain, Scores)
        assert torch.equal(found.loss_sums, plain.loss_sums)
        assert smoothed(*batch()) > 1.01 * model(*batch())


def peak_bytes(work: Callable[[], Any]) -> int:
    """The most that ``work`` held at once, from the events of the allocator."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        work()
    assert trace.profiler is not None and trace.profiler.kineto_results is not None
    found: Any = trace.profiler.kineto_results.events()
    events = [(e.start_ns(), e.nbytes()) for e in found if e.name() == "[memory]"]
    held = peak = 0
    for _, change in sorted(events, key=lambda event: event[0]):
        held += change
        peak = max(peak, held)
    return peak


def test_chunks_hold_a_few_chunks_of_logits_and_not_all(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, width, classes = 1024, 16, 4000
    monkeypatch.setattr(chunked, "MIN_CHUNK_TOKENS", 64)
    monkeypatch.setattr(chunked, "CHUNK_LOGITS_BYTES", 0)
    hidden, weight = torch.randn(tokens, width, requires_grad=True), torch.randn(classes, width, requires_grad=True)
    labels = torch.randint(classes, (tokens,))
    few, all_logits = 4 * 64 * classes, 4 * tokens * classes
    gradient = 4 * (tokens + classes) * width
    in_chunks = peak_bytes(lambda: chunked_sum(hidden, weight, None, labels).backward())
    full = peak_bytes(lambda: full_sum(hidden, weight, None, labels).backward())
    assert full > 2 * all_logits
    assert in_chunks < 2 * few + gradient + 100_000  # logits and their softmax
    assert in_chunks < full / 7
    scored = peak_bytes(lambda: chunked_scores(hidden, weight, None, labels.view(2, -1)))
    assert scored < 2 * few + 100_000
    with torch.autocast("cpu", torch.bfloat16):
        loss = chunked_sum(hidden, weight, None, labels)
    assert peak_bytes(loss.backward) < 3 * few + 2 * gradient + 100_000


@pytest.mark.parametrize("softcap", [0.0, 30.0])
def test_a_chunk_is_freed_as_soon_as_it_is_not_needed(softcap: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked, "MIN_CHUNK_TOKENS", 4)
    monkeypatch.setattr(chunked, "CHUNK_LOGITS_BYTES", 0)
    for _, logits in chunked.logits_by_chunk(torch.randn(12, 3), torch.randn(5, 3), None, softcap):
        held = weakref.ref(logits)
        del logits
        assert held() is None


# Whole models in chunks

SHAPE = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 67,
    "max_position_embeddings": 32, "bos_token_id": 1, "eos_token_id": 0, "pad_token_id": 0,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 2},
    "llama-tied": {"num_key_value_heads": 2, "tie_word_embeddings": True},
    "gpt2": {"attn_pdrop": 0.0},
    "qwen3": {"num_key_value_heads": 1, "head_dim": 8},
    "bert": {"attention_probs_dropout_prob": 0.0},
    "modernbert": {"mlp_dropout": 0.1},
    "modernbert-frozen": {"decoder_bias": False},
}


def network(name: str, dtype: torch.dtype = torch.float64, **fields: Any) -> Any:
    torch.manual_seed(0)
    model_type = name.partition("-")[0]
    config = transformers.AutoConfig.for_model(model_type, **{**SHAPE, **MODELS.get(name, {}), **fields})
    masked = model_type in ("bert", "modernbert")
    factory = transformers.AutoModelForMaskedLM if masked else transformers.AutoModelForCausalLM
    model = factory.from_config(config, dtype=dtype).train()
    model.config.use_cache = False
    if name.endswith("frozen"):
        model.get_output_embeddings().weight.requires_grad_(False)
    return model


def batch() -> tuple[dict[str, Tensor], Tensor]:
    ids = torch.arange(3, 3 + 2 * 13).view(2, 13)
    labels = ids.roll(-1, 1)
    labels[0, 4:] = IGNORE
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, labels


def step(model: ModelWithLoss, **kwargs: Any) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    torch.manual_seed(1)  # for dropout
    loss = model(*batch(), **kwargs)
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize("name", MODELS)
def test_models_learn_the_same_from_chunks(name: str, checkpointing: str) -> None:
    model = network(name)
    enable_checkpointing(model, checkpointing)
    assert choice("chunked", model) == "chunked"
    expected_loss, expected = step(ModelWithLoss(model))
    assert len(expected) > 10
    names = ModelWithLoss(model).state_dict().keys()
    chunked = with_loss(model, "chunked")
    assert chunked.state_dict().keys() == names
    for options in ({}, {"num_targets": 17}, {"num_targets": 4 + 13}):
        loss, found = step(chunked, **options)
        assert abs(loss - expected_loss) < 1e-12 * expected_loss
        assert found.keys() == expected.keys()
        for parameter, gradient in found.items():
            torch.testing.assert_close(gradient, expected[parameter], rtol=1e-11, atol=1e-13, msg=parameter)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("name", ["llama", "bert", "opt", "mamba"])  # the last two handle their logits once more
def test_models_are_scored_the_same_in_chunks(name: str) -> None:
    model = network(name, torch.float32 if name == "mamba" else torch.float64).eval()
    expected, found = (with_loss(model, loss)(*batch(), scored=True) for loss in ("full", "chunked"))
    assert isinstance(found, Scores)
    rtol = 1e-6 if name == "mamba" else 1e-12
    torch.testing.assert_close(found.loss_sums, expected.loss_sums, rtol=rtol, atol=0)
    assert torch.equal(found.predictions, expected.predictions)


@pytest.mark.usefixtures("small_chunks")
def test_autocast_in_chunks_is_as_good_as_with_all_logits() -> None:
    exact = step(ModelWithLoss(network("llama")))
    with torch.autocast("cpu", torch.bfloat16):
        usual = step(ModelWithLoss(network("llama", torch.float32)))
        found = step(with_loss(network("llama", torch.float32), "chunked"))
    assert found[0].dtype == torch.float32

    def distance(gradients: dict[str, Tensor]) -> float:
        return sum((g - exact[1][name]).norm().item() ** 2 for name, g in gradients.items()) ** 0.5

    assert distance(found[1]) < 1.1 * distance(usual[1])
    assert found[0].item() == pytest.approx(exact[0].item(), rel=1e-2)


def test_model_gives_its_logits_to_everybody_else() -> None:
    model = network("llama")
    inputs, labels = batch()
    expected = model(**inputs).logits
    chunked = with_loss(model, "chunked")
    assert torch.equal(model(**inputs).logits, expected)
    with pytest.raises(TypeError):
        chunked({**inputs, "unknown_argument_of_no_model": 1, "input_ids": 3}, labels)
    assert torch.equal(model(**inputs).logits, expected)
    meanwhile: list[Tensor] = []

    def elsewhere(*_: Any) -> None:
        hook.remove()
        thread = threading.Thread(target=lambda: meanwhile.append(model(**inputs).logits))
        thread.start()
        thread.join()

    hook = model.model.register_forward_hook(elsewhere)
    assert chunked(inputs, labels).shape == ()
    assert len(meanwhile) == 1 and torch.equal(meanwhile[0], expected)


def test_model_in_chunks_can_be_copied() -> None:
    chunked = with_loss(network("llama"), "chunked")
    other = copy.deepcopy(chunked)
    assert torch.equal(step(other)[0], step(chunked)[0])


CHANGED = {
    "gemma2": {"final_logit_softcapping": 0.05},
    "cohere": {"logit_scale": 0.3},
    "granite": {"logits_scaling": 4.0},
}


@pytest.mark.parametrize("terms", [PLAIN, Objective(0.1, 1e-2)])
@pytest.mark.parametrize("name", CHANGED)
def test_models_that_scale_or_cap_their_logits_get_their_loss_in_chunks(
    name: str, terms: Objective, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunked, "MIN_CHUNK_TOKENS", 5)
    monkeypatch.setattr(chunked, "CHUNK_LOGITS_BYTES", 0)
    small: dict[str, Any] = {"num_key_value_heads": 2, "head_dim": 8, **CHANGED[name]}
    model = network(name, vocab_size=MIN_CHUNKED_CLASSES, **small)
    whole, parts = with_loss(model, "full", terms), ModelWithLoss(copy.deepcopy(model))
    parts.loss_sum = terms.loss_sum
    kind, objective, obstacle = choose_loss("auto", parts, CPU, terms)
    assert (kind, obstacle) == ("chunked", None)
    assert objective != terms
    expected, scores = step(whole), whole(*batch(), scored=True)
    use_loss_in_head(parts, kind, objective)
    torch.testing.assert_close(step(parts), expected, rtol=1e-10, atol=1e-13)
    torch.testing.assert_close(parts(*batch(), scored=True), scores, rtol=1e-10, atol=1e-13)


class Twisted(transformers.LlamaForCausalLM):
    """Changes its logits in another way, in training alone, or makes something else of them, too."""

    way = ""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output: Any = super().forward(*args, **kwargs)
        logits = output.logits
        if self.way == "shifts":
            output.logits = logits + 1
        if self.way == "trains" and self.training:
            output.logits = logits * 2
        if self.way == "twice":
            output["more"] = self.lm_head(torch.ones(1, 8, 16, dtype=logits.dtype, device=self.lm_head.weight.device))
        if self.way == "loss":
            output.logits, output["aux_loss"] = logits * 2, logits.square().mean()
        return output


@pytest.mark.parametrize("way", ["shifts", "trains", "twice", "loss"])
def test_models_that_change_their_logits_otherwise_keep_them(way: str) -> None:
    model = Twisted(network("llama", vocab_size=MIN_CHUNKED_CLASSES).config)
    assert choice("auto", model) == "chunked"
    model.way = way
    assert choice("auto", model) == choice("full", model) == "full"
    with pytest.raises(UserError, match="loss: chunked does not work with this model: it does more with its logits"):
        choice("chunked", model)


def test_auto_takes_chunks_for_large_vocabularies_alone() -> None:
    large = network("llama", vocab_size=MIN_CHUNKED_CLASSES)
    assert choice("auto", large) == "chunked" and choice("full", large) == "full"
    assert choice("auto", network("llama", vocab_size=MIN_CHUNKED_CLASSES - 1)) == "full"


def test_classifiers_and_models_of_ones_own_keep_their_logits() -> None:
    config = transformers.AutoConfig.for_model("llama", **{**SHAPE, "num_key_value_heads": 2})
    classifier = transformers.AutoModelForSequenceClassification.from_config(config)
    for model in (classifier, Network()):
        assert choice("auto", model) == "full"
        with pytest.raises(UserError, match="output_embeddings"):
            choice("chunked", model)


class OwnLoss(Task):
    """A task that does not minimise cross-entropy."""

    @staticmethod
    def loss_sum(logits: Tensor, labels: Tensor) -> Tensor:
        return 2 * cross_entropy_sum(logits, labels)


class OwnScores(Task):
    """A task that is evaluated in its own way."""

    @staticmethod
    def scores(logits: Tensor, labels: Tensor) -> Scores:
        return Scores(logits.new_zeros(len(labels)), logits.argmin(-1))


def test_a_task_with_a_loss_of_its_own_keeps_all_logits() -> None:
    model = network("llama", vocab_size=MIN_CHUNKED_CLASSES)
    assert choice("auto", model) == "chunked"
    own = ModelWithLoss(model, task=OwnLoss)
    assert choose_loss("auto", own, CPU)[::2] == ("full", "its task has its own loss")
    with pytest.raises(UserError, match="loss: chunked does not work with this model: its task has"):
        choose_loss("chunked", own, CPU)
    measure = Extra().memory_measure(run_for(Config()), own)
    assert measure is not None
    assert not measure[1]()
    smoothing = Config().changed(label_smoothing=0.1, model="own:model", tokenizer="bytes")
    with pytest.raises(UserError, match="label_smoothing and z_loss are for cross-entropy"):
        Extra().change_loss(run_for(smoothing), own)
    torch.testing.assert_close(own(*batch()), 2 * ModelWithLoss(model)(*batch()))


def test_scores_of_its_own_leave_a_task_the_loss_in_chunks() -> None:
    """An evaluation alone computes all logits."""
    model = network("llama", vocab_size=MIN_CHUNKED_CLASSES)
    expected, logits = ModelWithLoss(model)(*batch()), model(**batch()[0]).logits
    own = ModelWithLoss(model, task=OwnScores)
    run = run_for(Config().changed(tokenizer="bytes"))
    Extra().change_loss(run, own)
    assert own.loss_in_head is not None
    torch.testing.assert_close(own(*batch()), expected)
    scores = own(*batch(), scored=True)
    assert isinstance(scores, Scores)
    assert torch.equal(scores.predictions, logits.argmin(-1))


def test_what_keeps_a_model_from_a_loss_in_chunks_is_told() -> None:
    few, many = network("llama"), network("llama", vocab_size=MIN_CHUNKED_CLASSES)
    shifting, needs = Twisted(many.config), "all logits at once, which the model needs: "
    shifting.way = "shifts"
    for model, how in (
        (ModelWithLoss(few, task=OwnLoss), "all logits at once"),
        (ModelWithLoss(many, task=OwnLoss), f"{needs}its task has its own loss"),
        (ModelWithLoss(shifting), f"{needs}it does more with its logits than to scale or cap them"),
    ):
        run = run_for(Config().changed(tokenizer="bytes"))
        Extra().change_loss(run, model)
        assert run.outputs.notes == [f"loss: full (auto), {how}"]


def test_a_cast_of_logits_to_the_type_that_they_have_is_no_use_of_them() -> None:
    """mamba writes lm_head(x).float()."""
    config = transformers.MambaConfig(vocab_size=97, hidden_size=16, num_hidden_layers=1, state_size=4)
    assert obstacle_to_chunks(transformers.MambaForCausalLM(config))[0] is None


def test_logits_that_are_changed_in_place_are_used() -> None:
    class Scaled(transformers.LlamaForCausalLM):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            output: Any = super().forward(*args, **kwargs)
            output.logits *= 0.25
            return output

    assert "does more with its logits" in str(obstacle_to_chunks(Scaled(network("llama").config))[0])


def test_looking_for_obstacles_leaves_model_and_generators_alone() -> None:
    model = network("llama")
    model.model.eval()
    before, state = torch.get_rng_state(), {k: v.clone() for k, v in model.state_dict().items()}
    modes, head = [m.training for m in model.modules()], type(model.lm_head)
    assert obstacle_to_chunks(model)[0] is None
    assert torch.equal(torch.get_rng_state(), before)
    assert [m.training for m in model.modules()] == modes and type(model.lm_head) is head
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert model.config.pad_token_id == 0 and model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "gemma2"])
def test_models_without_real_weights_are_judged_alike(name: str) -> None:
    fields: dict[str, Any] = {"head_dim": 8, "num_key_value_heads": 2} if name == "gemma2" else {}
    expected = (None, Objective(softcap=30.0) if name == "gemma2" else PLAIN)
    with torch.device("meta"):
        assert obstacle_to_chunks(network(name, **fields)) == expected
    with FakeTensorMode():
        model = network(name, torch.float32, **fields)
        assert obstacle_to_chunks(model) == expected
    assert obstacle_to_chunks(model) == expected


# Mixtures of experts

EXPERTS: dict[str, Any] = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 2}
EXPERTS |= {"num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 4, "num_experts_per_tok": 2}


@pytest.mark.parametrize("asked", ["full", "chunked"])
@pytest.mark.parametrize("model_type", ["mixtral", "gpt_oss", pytest.param("jetmoe", marks=needs_transformers_5_23)])
def test_load_balancing_is_the_models_own(model_type: str, asked: str) -> None:
    torch.manual_seed(0)
    fields = {**EXPERTS, "output_router_logits": True}
    fields |= {"aux_loss_coef": 0.5} if model_type == "jetmoe" else {"router_aux_loss_coef": 0.5}
    config = transformers.AutoConfig.for_model(model_type, **fields)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    own = copy.deepcopy(model)
    ids = torch.randint(3, 97, (2, 16), generator=torch.Generator().manual_seed(1))
    expected = own(input_ids=ids, labels=ids, use_cache=False)
    expected.loss.backward()

    labels = F.pad(ids[:, 1:], (0, 1), value=IGNORE)
    with_loss = ModelWithLoss(model)
    if asked == "chunked":
        use_loss_in_head(with_loss, "chunked")
    loss = with_loss({"input_ids": ids, "use_cache": False}, labels) / 30
    loss.backward()
    assert loss.item() == pytest.approx(expected.loss.item(), rel=1e-6)
    plain = cross_entropy_sum(expected.logits, labels).item() / 30
    assert loss.item() > plain + 0.5
    for (name, mine), theirs in zip(model.named_parameters(), own.parameters(), strict=True):
        if theirs.grad is not None:
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-7, msg=name)


def test_evaluation_leaves_load_balancing_out() -> None:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model("mixtral", **EXPERTS, output_router_logits=True)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    ids = torch.arange(3, 19).unsqueeze(0)
    logits = model(input_ids=ids).logits
    scores = ModelWithLoss(model)({"input_ids": ids}, ids, scored=True)
    assert scores.loss_sums.item() == pytest.approx(cross_entropy_sum(logits, ids).item(), rel=1e-6)
