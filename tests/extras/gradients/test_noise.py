"""The gradient noise scale: against a known covariance, and against gradients of every micro-batch of real steps."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from test_distributed import ENVIRONMENT, forked
from test_step import TinyModel, batch, rows
from torch import Tensor

from train.batching import without_targets
from train.config import Config, Optimization, parse
from train.extras.gradients import Extra
from train.extras.gradients.noise import MEMORY, NoiseScale, estimated
from train.figures import read_metrics
from train.launch import Launch
from train.main import main
from train.model import ModelWithLoss
from train.records import EXIT_DONE, MicroBatch, UsageError
from train.step import Engine, optimizer_step

LENGTHS = [9, 2, 5, 7, 3, 3, 8, 1]


def examples_of(lengths: list[int]) -> list[Tensor]:
    """Random tokens, most of them the same, so that the mean gradient is not small."""
    return [torch.where(row > 3, torch.full_like(row, 7), row) for row in rows(lengths)]


def stepped(
    steps: Sequence[Sequence[MicroBatch]],
    loss_scales: Sequence[float | tuple[float, ...]] = (),
    reading: bool = False,
    made: Sequence[Sequence[MicroBatch]] | None = None,
) -> tuple[NoiseScale, TinyModel]:
    """After one SGD step of rate 0 for each list of micro-batches, on fp64 weights that are always the same.

    ``loss_scales``: of each step, or of each of its micro-batches.
    """
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    network = TinyModel().double()
    model, optimizer = accelerator.prepare(ModelWithLoss(network), torch.optim.SGD(network.parameters(), lr=0.0))
    assert isinstance(optimizer, AcceleratedOptimizer)
    noise = NoiseScale(model, 1)
    engine = Scaled(accelerator, Config(optimization=Optimization(max_grad_norm=0.1)), noise.mark)
    for number, micro_batches in enumerate(steps):
        by = loss_scales[number] if number < len(loss_scales) else 1.0
        engine.by = iter(by) if isinstance(by, tuple) else itertools.repeat(by)
        noise.begin(micro_batches)
        optimizer_step(engine, model, optimizer, micro_batches if made is None else made[number])
        if reading and number + 1 < len(steps):
            noise.examples()
    return noise, network


class Scaled(Engine):
    """Gradients are ``by`` times as large until they are clipped, as with fp16's loss scaler."""

    by: Iterator[float]

    def backward(self, loss: Tensor, scale: float | Tensor) -> None:
        super().backward(loss, scale * next(self.by))


def gradient(network: TinyModel, micro_batch: MicroBatch) -> Tensor:
    """The sum of the gradients of all targets, as one vector."""
    network.zero_grad()
    ModelWithLoss(network)(micro_batch.inputs, micro_batch.labels, num_targets=micro_batch.num_targets).backward()
    return torch.cat([p.grad.flatten() for p in network.parameters() if p.grad is not None])


def directly(network: TinyModel, part: MicroBatch, whole: Sequence[MicroBatch]) -> tuple[float, float]:
    """|G|² and tr(Σ) by the paper's equations A.1 and A.2, in units of the step's own |g|²."""
    n, total = part.num_targets, sum(batch.num_targets for batch in whole)
    small = (gradient(network, part) / n).square().sum().item()
    big = (sum((gradient(network, b) for b in whole), torch.zeros(())) / total).square().sum().item()
    return (total * big - n * small) / (total - n) / big, (small - big) / (1 / n - 1 / total) / big


def test_known_mean_and_covariance_are_found() -> None:
    """20,000 steps of 8 examples in 5 dimensions: the standard error of tr(Σ) is 0.5 %, of |G|² 0.6 %."""
    generator = torch.Generator().manual_seed(3)
    mean, factor = torch.randn(5, generator=generator), torch.randn(5, 5, generator=generator)
    examples = mean + torch.randn(20_000, 8, 5, generator=generator) @ factor.T
    small, big = (examples[:, :n].mean(1).square().sum(1).double().mean().item() for n in (2, 8))
    squared, trace = (big * value for value in estimated(small / big, 2, 8))
    assert squared == pytest.approx(mean.square().sum().item(), rel=0.03)
    assert trace == pytest.approx((factor @ factor.T).trace().item(), rel=0.02)


def moving(network: TinyModel, steps: Sequence[Sequence[MicroBatch]]) -> float:
    """The noise scale after ``steps``, in examples: of the moving means, each by itself."""
    means = [0.0, 0.0, 0.0, 0.0]
    for made in steps:
        counts = sum(b.num_targets for b in made), sum(len(b.example_ids) for b in made)
        new = (*directly(network, made[0], made), *counts)
        means = [MEMORY * mean + (1 - MEMORY) * value for mean, value in zip(means, new, strict=True)]
    squared, trace, targets, examples = means
    assert squared > 0 and trace > 0
    return trace / squared * examples / targets


def orders(sizes: Sequence[int]) -> list[list[MicroBatch]]:
    """Steps of the same four ragged examples in all orders, in micro-batches of ``sizes``."""
    ends = list(itertools.accumulate(sizes, initial=0))
    found = itertools.permutations(examples_of(LENGTHS[:4]))
    return [[batch(list(order[a:b])) for a, b in itertools.pairwise(ends)] for order in found]


@pytest.mark.parametrize("sizes", [[1, 1, 1, 1], [2, 2], [3, 1], [1, 3]])
def test_ragged_micro_batches_give_what_their_gradients_do(sizes: list[int]) -> None:
    noise, network = stepped(orders(sizes))
    assert noise.examples() == pytest.approx(moving(network, orders(sizes)), rel=1e-9)


def test_neither_reading_it_nor_a_loss_scale_changes_it() -> None:
    steps = orders([2, 2])
    noise, network = stepped(steps, [2.0**16, 2.0**15] * 12, reading=True)
    assert noise.examples() == pytest.approx(moving(network, steps), rel=1e-9)
    assert noise.examples() is None  # nothing new is known


def test_steps_without_finite_gradients_of_two_sizes_are_left_out() -> None:
    steps, empty = orders([2, 2]), without_targets(batch(rows([3])))
    out = [steps[0][:1], steps[0], [steps[0][0], empty], [empty, steps[0][0]]]
    noise, network = stepped([*out, *steps], [1.0, math.inf])
    assert noise.examples() == pytest.approx(moving(network, steps), rel=1e-9)
    assert stepped(out, [1.0, math.inf])[0].examples() is None
    assert stepped(steps[:1], [(1.0, 1e300)])[0].examples() is None  # a norm overflows after the first micro-batch


def test_steps_in_other_micro_batches_than_planned_are_left_out() -> None:
    """As recovery makes them where memory runs out: there it is not known how many targets came first."""
    planned, split = orders([2, 2]), orders([1, 1, 1, 1])
    noise, network = stepped(planned, made=[*split[:3], *planned[3:]])
    assert noise.examples() == pytest.approx(moving(network, planned[3:]), rel=1e-9)
    assert stepped(planned, made=split)[0].examples() is None


# ---- real runs -------------------------------------------------------------------------------------------------------


def test_a_run_logs_what_its_micro_batches_give(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients are taken apart after each backward: each micro-batch's is what it added."""
    found: list[list[tuple[Tensor, int, int]]] = []
    now: list[Any] = []  # model and micro-batches of the step that is being made
    step, backward = Engine.step, Engine.backward

    def watched_step(self: Engine, model: Any, optimizer: Any, micro_batches: Any, stop: bool = False) -> Any:
        now[:] = model, list(micro_batches)
        found.append([])
        return step(self, model, optimizer, micro_batches, stop)

    def watched_backward(self: Engine, loss: Tensor, scale: Any) -> None:
        backward(self, loss, scale)
        whole = torch.cat([p.grad.flatten() for p in now[0].parameters() if p.grad is not None]).double()
        own = now[1][len(found[-1])]
        found[-1].append((whole, own.num_targets, len(own.example_ids)))

    monkeypatch.setattr(Engine, "step", watched_step)
    monkeypatch.setattr(Engine, "backward", watched_backward)
    run = ["--config", str(recipe), "--output_dir", str(tmp_path / "run"), "--rehearse", "False"]
    assert main([*run, "--gradient_noise_scale", "--log_every_steps", "2"]) == EXIT_DONE
    logged = [
        r["gradient_noise_scale_examples"]
        for r in read_metrics(tmp_path / "run" / "metrics.jsonl")
        if r["kind"] == "train"
    ]
    expected, means = [], [0.0, 0.0, 0.0, 0.0]
    for made in found:
        total, num_examples = (sum(counts) for counts in list(zip(*made, strict=True))[1:])
        (first, n, _), (whole, _, _) = made[0], made[-1]
        if len(made) > 1:
            ratio = (first.norm() * total / n / whole.norm()).item() ** 2
            new = ((total - n * ratio) / (total - n), (ratio - 1) / (1 / n - 1 / total), total, num_examples)
            means = [MEMORY * mean + (1 - MEMORY) * value for mean, value in zip(means, new, strict=True)]
        squared, trace, targets, examples = means
        expected.append(max(trace, 0) / squared * examples / targets if squared > 0 else None)
    assert len(found) == 6 and logged == pytest.approx(expected[1::2], rel=1e-4)


@pytest.mark.distributed
@pytest.mark.parametrize("parts", [[[[0], [1]], [[2], [3]]], [[[0], [1, 2]], [[3], [4, 5]]]])
def test_two_ranks_average_what_each_finds(parts: list[list[list[int]]]) -> None:
    lengths = LENGTHS[: sum(len(ids) for rank in parts for ids in rank)]
    script = Path(__file__).with_name("distributed_noise.py")
    done = forked(script, json.dumps(parts), json.dumps(lengths), env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr[-3000:]
    examples, (_, network) = examples_of(lengths), stepped([])
    whole = [batch([e]) for e in examples]
    found = [directly(network, batch([examples[i] for i in rank[0]]), whole) for rank in parts]
    squared, trace = (sum(values) / len(parts) for values in zip(*found, strict=True))
    expected = max(trace, 0.0) / squared * len(lengths) / sum(lengths)
    assert expected > 0 and json.loads(done.stdout.rpartition("noise scale: ")[2]) == pytest.approx(expected, rel=1e-9)


# ---- what cannot be done ---------------------------------------------------------------------------------------------


ONE, TWO = "--gradient_accumulation_steps=1", "--gradient_accumulation_steps=2"


def test_batch_sizes_are_those_of_the_launch() -> None:
    flags = ["--gradient_noise_scale", "--global_batch_size=8", "--micro_batch_size=2", TWO]
    assert parse(flags, Launch(world_size=2)).optimization.global_batch_size == 8
    with pytest.raises(UsageError, match="contradicts global_batch_size 8"):
        parse(flags, Launch())


@pytest.mark.parametrize(
    ("flags", "launch", "message"),
    [
        ([ONE], Launch(), "one micro-batch per step: it compares the first"),
        (["--global_batch_size=2", "--micro_batch_size=2"], Launch(), "one micro-batch per step"),
        (["--global_batch_size=4", "--micro_batch_size=2"], Launch(world_size=2), "one micro-batch per step"),
        (["--global_batch_size=8", "--micro_batch_size=auto"], Launch(), "micro_batch_size: auto: that may choose one"),
        ([ONE, "--optimizer_in_backward", "--max_grad_norm=None"], Launch(), "optimizer_in_backward: no whole"),
        ([TWO], Launch(world_size=2, engine="fsdp2"), "fsdp2 in the launch file: it needs whole"),
        ([TWO], Launch(world_size=2, sp_size=2), "ddp, sequence parallel 2 in the launch file"),
    ],
)
def test_what_has_no_gradients_of_two_sizes_is_refused(flags: list[str], launch: Launch, message: str) -> None:
    config = parse(flags)
    config = config.changed(gradient_noise_scale=True)
    with pytest.raises(UsageError, match=f"gradient_noise_scale cannot be combined with {message}"):
        Extra().check(config, launch)
