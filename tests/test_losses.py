"""The loss: the sum over targets, in fp32 or better, whatever the model returns."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutput

from train.losses import ModelWithLoss, Scores, cross_entropy, cross_entropy_sum, logits_of
from train.records import IGNORE


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
