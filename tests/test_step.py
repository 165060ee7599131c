"""The gradient of an optimizer step, clipping, and gradients that are not finite."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn

from train.config import Config, Optimization
from train.model import ModelWithLoss
from train.records import IGNORE, MicroBatch, StepOutcome, UserError
from train.step import Engine, optimizer_step, seed_step
from train.tasks import Task

VOCABULARY = 11


class TinyModel(nn.Module):
    """Logits (B, S, V) that depend on the position's token and on the whole row before it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 6)
        self.head = nn.Linear(6, VOCABULARY)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embedding(input_ids).cumsum(1)))


def rows(lengths: list[int]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(VOCABULARY, (length + 1,), generator=generator) for length in lengths]


def batch(examples: list[Tensor]) -> MicroBatch:
    pad = nn.utils.rnn.pad_sequence
    labels = pad([e[1:] for e in examples], batch_first=True, padding_value=IGNORE)
    return MicroBatch(
        inputs={"input_ids": pad([e[:-1] for e in examples], batch_first=True)},
        labels=labels,
        num_targets=int((labels != IGNORE).sum()),
        example_ids=tuple(range(len(examples))),
        num_tokens=sum(len(e) - 1 for e in examples),
    )


def stepped(
    windows: list[list[MicroBatch]], dtype: torch.dtype = torch.float64, task: Any = Task, **settings: Any
) -> tuple[dict[str, Tensor], list[StepOutcome]]:
    """Weights after one SGD step (learning rate 1) for each window, from the same start."""
    torch.manual_seed(0)
    settings = {"max_grad_norm": None, **settings}
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    network = TinyModel().to(dtype)
    model, optimizer = accelerator.prepare(ModelWithLoss(network, task), torch.optim.SGD(network.parameters(), lr=1.0))
    assert isinstance(optimizer, AcceleratedOptimizer)
    engine = Engine(accelerator, Config(optimization=Optimization(**settings)))
    outcomes = [optimizer_step(engine, model, optimizer, window) for window in windows]
    return {k: v.detach().clone() for k, v in network.state_dict().items()}, outcomes


def largest_difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return max((one[k] - other[k]).abs().max().item() for k in one)


def test_update_is_the_same_for_every_split_of_the_global_batch() -> None:
    examples = rows([9, 2, 5, 7])
    whole, _ = stepped([[batch(examples)]])
    start, _ = stepped([])
    assert largest_difference(whole, start) > 1e-3
    for split in ([1, 1, 1, 1], [2, 2], [3, 1], [1, 2, 1]):
        parts, rest = [], list(examples)
        for size in split:
            parts.append(batch(rest[:size]))
            rest = rest[size:]
        assert largest_difference(whole, stepped([parts])[0]) < 1e-10


def test_short_last_window_gets_its_whole_gradient_and_the_next_window_too() -> None:
    first, last = rows([4, 6, 3, 8]), rows([5, 2])
    wide, _ = stepped([[batch(first)], [batch(last)], [batch(first)]])
    narrow, _ = stepped([[batch([e]) for e in first], [batch([e]) for e in last], [batch([e]) for e in first]])
    assert largest_difference(wide, narrow) < 1e-10


def test_batch_without_targets_changes_nothing_and_padding_neither() -> None:
    from train.batching import without_targets

    examples = rows([9, 2])
    alone, _ = stepped([[batch(examples)]])
    with_padding, _ = stepped([[batch(examples), without_targets(batch(rows([3])))]])
    assert largest_difference(alone, with_padding) < 1e-10


def test_a_batch_without_targets_counts_for_nothing_whatever_the_loss_reads() -> None:
    """A task's own loss may compare with every label, or with none."""
    from train.batching import without_targets

    def squares(logits: Tensor, labels: Tensor) -> Tensor:
        return (logits.sum(-1) - labels).square().sum()

    examples, empty = rows([9, 2]), without_targets(batch(rows([3])))
    for loss_sum in (squares, lambda logits, labels: logits.square().sum()):
        task: Any = SimpleNamespace(loss_sum=loss_sum, scores=None)
        (alone, [one]), (with_padding, [two]) = (
            stepped([window], task=task) for window in ([batch(examples)], [batch(examples), empty])
        )
        assert largest_difference(alone, with_padding) < 1e-10
        assert one.loss_sum.item() == two.loss_sum.item() > 0


def test_gradient_is_the_mean_over_targets() -> None:
    examples = rows([4, 7])
    after, [outcome] = stepped([[batch([e]) for e in examples]])
    torch.manual_seed(0)
    network = TinyModel().double()
    losses = [nn.functional.cross_entropy(network(e[None, :-1])[0], e[1:], reduction="sum") for e in examples]
    (torch.stack(losses).sum() / 11).backward()
    expected = {k: (p - p.grad).detach() for k, p in network.named_parameters() if p.grad is not None}
    assert largest_difference(after, expected) < 1e-10
    assert outcome.num_targets == 11
    assert outcome.loss_sum.item() == pytest.approx(sum(x.item() for x in losses), rel=1e-6)


def partly_labelled(lengths: list[int], labelled: int) -> MicroBatch:
    """A padded batch in which only the first ``labelled`` positions of each row are targets."""
    made = batch(rows(lengths))
    labels = made.labels.clone()
    labels[:, labelled:] = IGNORE
    return replace(made, labels=labels, num_targets=int((labels != IGNORE).sum()))


def test_the_gradient_is_divided_by_targets_and_what_is_counted_keeps_its_name() -> None:
    """Targets, tokens and positions are three numbers: of labels that count, of text, and with padding."""
    window = [partly_labelled([7, 4], 3), partly_labelled([9], 2)]
    after, [outcome] = stepped([window])
    assert (outcome.num_targets, outcome.num_tokens, outcome.num_positions) == (3 + 3 + 2, 7 + 4 + 9, 14 + 9)
    torch.manual_seed(0)
    network = TinyModel().double()
    losses = [
        nn.functional.cross_entropy(network(b.inputs["input_ids"]).flatten(0, 1), b.labels.flatten(), reduction="sum")
        for b in window
    ]
    (torch.stack(losses).sum() / 8).backward()
    expected = {k: (p - p.grad).detach() for k, p in network.named_parameters() if p.grad is not None}
    assert largest_difference(after, expected) < 1e-10
    assert outcome.loss_sum.item() == pytest.approx(sum(x.item() for x in losses), rel=1e-6)


def test_a_batch_of_tokens_without_labels_is_an_error() -> None:
    with pytest.raises(UserError, match="all labels are masked"):
        stepped([[partly_labelled([7, 4], 0)]])


def engine_of(**settings: Any) -> Engine:
    return Engine(Accelerator(cpu=True), Config(optimization=Optimization(**settings)))


def test_what_averages_over_micro_batches_and_ranks_is_undone() -> None:
    engine = engine_of()
    engine.accelerator = SimpleNamespace(  # type: ignore
        gradient_accumulation_steps=4,
        num_processes=6,
        device="cpu",
        reduce=lambda counts, reduction: {"sum": 6 * counts}[reduction],
    )
    assert engine.loss_factor == 24
    engine.mp_size = 3  # three ranks each have the same examples
    assert engine.total([5, 7, 8, 1]) == [10, 14, 16, 2]
    # A stop that one of the ranks with equal examples was asked for counts: 1/6 of a request on the average is one.
    assert engine.total([5, 7, 8, 1 / 6]) == [10, 14, 16, 1]


class Scripted(Engine):
    """An engine whose norm is given."""

    norm = 1.0

    def clip(self, model: nn.Module) -> float:
        super().clip(model)
        return self.norm


@pytest.mark.parametrize(("norm", "clipped"), [(0.5, False), (math.nextafter(0.5, 1), True)])
def test_a_norm_at_the_bound_is_not_clipped(norm: float, clipped: bool) -> None:
    torch.manual_seed(0)
    accelerator, network = Accelerator(cpu=True), TinyModel()
    model, optimizer = accelerator.prepare(ModelWithLoss(network), torch.optim.SGD(network.parameters(), lr=0.1))
    engine = Scripted(accelerator, Config(optimization=Optimization(max_grad_norm=0.5)))
    engine.norm = norm
    assert optimizer_step(engine, model, optimizer, [batch(rows([3]))]).clipped is clipped


def test_ranks_that_share_tensors_count_their_share_of_the_loss() -> None:
    torch.manual_seed(0)
    accelerator, network = Accelerator(cpu=True), TinyModel()
    model, optimizer = accelerator.prepare(ModelWithLoss(network), torch.optim.SGD(network.parameters(), lr=0.0))
    engine = Engine(accelerator, Config())
    whole = optimizer_step(engine, model, optimizer, [batch(rows([3])), batch(rows([5]))]).loss_sum
    engine.loss_share = 0.25
    share = optimizer_step(engine, model, optimizer, [batch(rows([3])), batch(rows([5]))]).loss_sum
    assert share.item() == pytest.approx(whole.item() / 4, rel=1e-6)


def test_a_step_that_a_loss_scaler_skips_is_a_skipped_one_although_the_norm_is_finite() -> None:
    steps: list[bool] = []
    optimizer: Any = SimpleNamespace(step=lambda: steps.append(True), step_was_skipped=True)
    assert engine_of().update(optimizer, 1.5) == (1.5, True)
    optimizer.step_was_skipped = False
    assert engine_of().update(optimizer, 1.5) == (1.5, False)
    norm, skipped = engine_of().update(optimizer, math.inf)
    assert (norm, skipped, len(steps)) == (math.inf, True, 2)


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_loss_that_is_not_finite_changes_no_weight_although_its_gradient_is(value: float) -> None:
    """Such as a penalty that overflows and has no gradient of its own."""
    torch.manual_seed(0)
    accelerator, network = Accelerator(cpu=True), TinyModel()
    wrapped = ModelWithLoss(network)

    def penalised(module: Any, arguments: Any, loss: Any) -> Any:
        return loss + value

    wrapped.register_forward_hook(penalised)
    model, optimizer = accelerator.prepare(wrapped, torch.optim.SGD(network.parameters(), lr=0.1))
    before = {k: v.clone() for k, v in network.state_dict().items()}
    outcome = optimizer_step(Engine(accelerator, Config()), model, optimizer, [batch(rows([3]))])
    assert outcome.skipped and not math.isfinite(outcome.grad_norm)
    assert largest_difference(before, network.state_dict()) == 0


@pytest.mark.parametrize("order", ["1", "2", "inf"])
def test_clipping_by_norm(order: str) -> None:
    window = [batch(rows([9, 4]))]
    start, _ = stepped([])
    free, [outcome] = stepped([window], grad_norm_type=order)
    gradient = torch.cat([(start[k] - free[k]).flatten() for k in free])
    norm = torch.linalg.vector_norm(gradient, float(order)).item()
    assert outcome.grad_norm == pytest.approx(norm, rel=1e-9)
    assert not outcome.clipped
    clipped, [outcome] = stepped([window], grad_norm_type=order, max_grad_norm=norm / 4)
    assert outcome.clipped
    assert outcome.grad_norm == pytest.approx(norm, rel=1e-9)
    expected = {k: start[k] - (start[k] - free[k]) / 4 for k in free}
    assert largest_difference(clipped, expected) < 1e-5  # torch adds 1e-6 to the norm
    for bound, is_above in ((0.99, True), (1.01, False)):  # what the share of clipped steps counts
        _, [outcome] = stepped([window], grad_norm_type=order, max_grad_norm=norm * bound)
        assert outcome.clipped is is_above


def test_clipping_by_value() -> None:
    window = [batch(rows([9, 4]))]
    start, _ = stepped([])
    free, _ = stepped([window])
    clipped, _ = stepped([window], max_grad_value=0.01)
    expected = {k: start[k] - (start[k] - free[k]).clamp(-0.01, 0.01) for k in free}
    assert largest_difference(expected, free) > 1e-3
    assert largest_difference(clipped, expected) < 1e-12


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_gradient_that_is_not_finite_leaves_weights_and_optimizer_alone(value: float) -> None:
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    network = TinyModel()
    model, optimizer = accelerator.prepare(ModelWithLoss(network), torch.optim.AdamW(network.parameters(), lr=0.1))
    engine, window = Engine(accelerator, Config()), [batch(rows([5])), batch(rows([3]))]
    optimizer_step(engine, model, optimizer, window)
    weights = {k: v.clone() for k, v in network.state_dict().items()}
    moments = [v.clone() for state in optimizer.optimizer.state.values() for v in state.values()]
    hook = network.head.weight.register_hook(lambda grad: torch.full_like(grad, value))
    outcome = optimizer_step(engine, model, optimizer, window)
    assert outcome.skipped
    assert not math.isfinite(outcome.grad_norm) and not outcome.clipped
    assert largest_difference(weights, network.state_dict()) == 0
    kept = [v for state in optimizer.optimizer.state.values() for v in state.values()]
    assert all(torch.equal(one, other) for one, other in zip(moments, kept, strict=True))
    hook.remove()
    assert not optimizer_step(engine, model, optimizer, window).skipped
    assert largest_difference(weights, network.state_dict()) > 0


def test_global_batch_without_any_target_is_an_error_not_a_loss_of_zero() -> None:
    from train.batching import without_targets

    with pytest.raises(UserError, match="no target"):
        stepped([[without_targets(batch(rows([5])))]])


def test_seed_of_a_step_depends_on_seed_step_and_rank_only() -> None:
    def draw(*key: int) -> float:
        torch.rand(3)
        seed_step(*key)
        return torch.rand(()).item()

    assert draw(1, 2, 3) == draw(1, 2, 3)
    assert len({draw(1, 2, 3), draw(0, 2, 3), draw(1, 1, 3), draw(1, 2, 0)}) == 4


def test_the_seed_of_a_step_is_that_of_every_generator() -> None:
    def draw(*key: int) -> tuple[float, float, float]:
        seed_step(*key)
        return random.random(), np.random.rand(), torch.rand(()).item()  # noqa: NPY002 - that of a fork's code

    first, other = draw(1, 2, 3), draw(1, 3, 3)
    assert draw(1, 2, 3) == first
    assert all(one != two for one, two in zip(first, other, strict=True))


def test_request_to_stop_comes_out_with_the_step() -> None:
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    network = TinyModel()
    model, optimizer = accelerator.prepare(ModelWithLoss(network), torch.optim.SGD(network.parameters(), lr=0.1))
    engine, window = Engine(accelerator, Config()), [batch(rows([3]))]
    assert optimizer_step(engine, model, optimizer, window, stop_requested=True).stop_requested
    assert not optimizer_step(engine, model, optimizer, window).stop_requested
