"""A step that runs out of memory and is made again is the step that never did."""

from __future__ import annotations

import gc
import json
import random
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from safetensors.torch import load_file
from support import ROOT
from test_step import VOCABULARY, batch, largest_difference, rows
from torch import Tensor, nn

from train import extras
from train.batching import without_targets
from train.config import Config, Optimization, from_values
from train.extras.endurance.recovery import (
    Measure,
    OutOfMemoryError,
    Recovering,
    halves,
    split,
)
from train.extras.host_memory import is_out_of_memory
from train.model import ModelWithLoss
from train.optim import build_optimizer
from train.records import IGNORE, MicroBatch, Run, StepOutcome
from train.step import Engine, seed_step

LENGTHS = [9, 2, 5, 7, 3, 3, 8, 1, 6, 4, 2]
WINDOWS = [[0, 1, 2, 3, 4, 5, 6, 7], [8, 9, 10, 0, 3, 1], [2, 5]]
ERRORS = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried "
                 "to allocate 4294967296 bytes. Error code 12 (Cannot allocate memory)"),
    MemoryError(),
]  # fmt: skip


@pytest.fixture(autouse=True)
def _quick_collection() -> Iterator[None]:
    """Every recovery collects garbage: what the imports left need not be looked through each time."""
    gc.freeze()
    yield
    gc.unfreeze()


class _Interrupted(torch.autograd.Function):
    """The identity, with a function that is called in its backward."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, interrupt: Callable[[], None]) -> Tensor:  # type: ignore
        ctx.interrupt = interrupt
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore
        ctx.interrupt()
        return grad, None


class LimitedModel(nn.Module):
    """Logits (B, S, V) of a model that runs out of memory beyond ``bound`` positions B × S.

    Args:
        where: forward or backward.
        call: only from this call on.
    """

    rows_seen: Tensor

    def __init__(
        self, bound: int, where: str = "forward", call: int = 1, error: Exception = ERRORS[0], dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.bound, self.where, self.call, self.error = bound, where, call, error
        self.embedding = nn.Embedding(VOCABULARY, 6)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(6, VOCABULARY)
        self.register_buffer("rows_seen", torch.zeros((), dtype=torch.int64))
        self.shapes: list[tuple[int, ...]] = []
        self.on_forward: Callable[[Tensor], None] = lambda hidden: None

    def forward(self, input_ids: Tensor) -> Tensor:
        self.shapes.append(tuple(input_ids.shape))
        self.rows_seen += len(input_ids)
        too_large = input_ids.numel() > self.bound and len(self.shapes) >= self.call
        hidden = torch.tanh(self.embedding(input_ids).cumsum(1)) ** 2
        self.on_forward(hidden)
        if too_large and self.where == "forward":
            self._fail()
        hidden = _Interrupted.apply(self.dropout(hidden), self._fail if too_large else lambda: None)
        return self.head(hidden)

    def _fail(self) -> None:
        error = type(self.error)(*self.error.args)  # that this frame keeps it closes a circle with its traceback
        raise error


def batches_of(ids: list[int], size: int) -> list[MicroBatch]:
    examples = rows(LENGTHS)
    return [batch([examples[i] for i in ids[first : first + size]]) for first in range(0, len(ids), size)]


class Guard:
    """Puts a recovering engine in place of the plain one, and keeps what it says."""

    engine: Recovering

    def __init__(self, *measures: Measure) -> None:
        self.said: list[str] = []
        self._measures = measures

    def __call__(self, engine: Engine) -> Recovering:
        self.engine = Recovering(engine, self.said.append, lambda model: self._measures)
        return self.engine


def plain(engine: Engine) -> Engine:
    """Leaves the engine as it is."""
    return engine


def trained(
    network: LimitedModel,
    guard: Callable[[Engine], Engine] = plain,
    size: int = 4,
    windows: Sequence[list[int]] = WINDOWS,
    fused: bool = False,
) -> tuple[dict[str, Tensor], list[StepOutcome]]:
    """Weights and outcomes after a step for each window, in fp64 with AdamW."""
    accelerator = Accelerator(cpu=True)
    engine = guard(Engine(accelerator, Config(optimization=Optimization(max_grad_norm=0.5))))
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.1, weight_decay=0.1, fused=fused)
    model, optimizer = accelerator.prepare(ModelWithLoss(network), optimizer)
    outcomes = [engine.step(model, optimizer, batches_of(ids, size)) for ids in windows]
    return {k: v.detach().clone() for k, v in network.state_dict().items()}, outcomes


def limited(bound: int = 10**6, **options: Any) -> LimitedModel:
    torch.manual_seed(0)
    return LimitedModel(bound, **options).double()


def random_states() -> tuple[Any, ...]:
    numpy_state: Any = np.random.get_state()  # noqa: NPY002
    return random.getstate(), numpy_state[1].tolist(), torch.get_rng_state().tolist()


def test_examples_of_several_rows_are_not_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chosen answers and then rejected ones, with a label for each two: a half would have rows of one kind."""

    def pairs(ids: list[int], size: int, made: Any = batches_of) -> list[MicroBatch]:
        return [replace(whole, labels=whole.labels[: len(whole.labels) // 2]) for whole in made(ids, size)]

    monkeypatch.setitem(globals(), "batches_of", pairs)
    guard, network = Guard(), limited(20)
    with pytest.raises(OutOfMemoryError, match="out of memory in forward, micro-batch of 4 × 9"):
        trained(network, guard)
    assert network.shapes == [(4, 9)] and guard.said == []


@pytest.mark.parametrize("error", ERRORS, ids=["device", "host", "python"])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_update_after_a_fault_is_the_update_without_one(where: str, error: Exception) -> None:
    weights, outcomes = trained(limited())
    guard = Guard()
    network = limited(20, where=where, error=error)
    seed_step(0, 1, 0)
    before = random_states()
    recovered, again = trained(network, guard)
    assert random_states() == before
    assert largest_difference(weights, recovered) < 1e-10
    assert weights["rows_seen"].item() == recovered["rows_seen"].item() == 16
    for one, other in zip(outcomes, again, strict=True):
        assert other.loss_sum.item() == pytest.approx(one.loss_sum.item(), rel=1e-6)
        assert (other.num_targets, other.num_tokens) == (one.num_targets, one.num_tokens)
        assert other.num_positions == one.num_positions
        assert other.grad_norm == pytest.approx(one.grad_norm, rel=1e-12)
    assert guard.engine.recoveries == len(guard.said) == 2  # 4 × 9, then 4 × 8; the smaller ones are foreseen
    assert f"out of memory in {where}, micro-batch of 4 × 9" in guard.said[0]


def test_fault_is_paid_once_and_larger_micro_batches_are_split_beforehand() -> None:
    network, guard = limited(20), Guard()
    trained(network, guard, windows=[[0, 1, 2, 3], [0, 1, 3, 6], [0, 1, 3, 6], [1, 4, 5, 7]])
    assert network.shapes[:3] == [(4, 9), (2, 9), (2, 9)]
    assert network.shapes[3:7] == [(2, 9), (2, 9)] * 2
    assert network.shapes[7:] == [(4, 3)]  # smaller than what failed
    assert guard.engine.recoveries == len(guard.said) == 1


def test_micro_batch_is_split_until_it_fits_and_an_odd_one_too() -> None:
    window = [[0, 1, 2, 3, 4]]
    weights, _ = trained(limited(), size=5, windows=window)
    network = limited(9, where="backward")
    recovered, _ = trained(network, Guard(), size=5, windows=window)
    assert network.shapes == [(5, 9), (3, 9), (2, 9), *[(1, 9)] * 5]
    assert largest_difference(weights, recovered) < 1e-10


def test_only_micro_batches_as_large_as_the_one_that_failed_are_split() -> None:
    ids = [1, 4, 5, 7, 0, 2, 3, 6]  # the second micro-batch has the long rows
    weights, _ = trained(limited(), windows=[ids])
    network = limited(20, where="backward")
    recovered, _ = trained(network, Guard(), windows=[ids])
    assert network.shapes == [(4, 3), (4, 9), (4, 3), (2, 9), (2, 9)]
    assert largest_difference(weights, recovered) < 1e-10


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_nothing_of_the_failed_attempt_is_left_when_the_step_is_made_again(where: str) -> None:
    network = limited(20, where=where, dropout=0.5)
    alive: list[weakref.ref[Tensor]] = []
    found: list[Any] = []

    def look(hidden: Tensor) -> None:
        if len(network.shapes) in (1, 3):  # the first forward of an attempt; the second micro-batch fails
            gradients = [p.grad for p in network.parameters() if p.grad is not None]
            left = [r for r in alive if r() is not None]
            found.append((gradients, left, network.rows_seen.item(), random_states()))
        random.random()
        np.random.random()  # noqa: NPY002
        alive.append(weakref.ref(hidden))

    network.on_forward = look
    seed_step(0, 1, 0)
    gc.disable()
    try:
        trained(network, Guard(), windows=[[1, 4, 5, 7, 0, 2, 3, 6]])
    finally:
        gc.enable()
    assert len(found) == 2
    assert found[1][:2] == ([], [])
    assert found[0][2:] == found[1][2:]


def test_what_is_made_again_is_the_one_step_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recovery has no second order of the step's parts: who breaks the step breaks this, too."""

    def broken(*arguments: Any) -> None:
        raise ZeroDivisionError("the step")

    monkeypatch.setattr("train.step.optimizer_step", broken)
    with pytest.raises(ZeroDivisionError, match="the step"):
        trained(limited(), Guard())


def test_totals_are_asked_for_once_however_often_the_step_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that makes its step again would otherwise be alone in that collective."""
    asked, total = [], Engine.total

    def counted(self: Engine, counts: Sequence[float]) -> Any:
        asked.append(counts)
        return total(self, counts)

    monkeypatch.setattr(Engine, "total", counted)
    guard = Guard()
    trained(limited(20), guard, windows=[[0, 1, 2, 3]])
    assert (len(asked), guard.engine.recoveries) == (1, 1)
    assert guard.engine.total([1.0]) == [1.0]  # of another than the step


def test_marks_name_each_phase_of_every_attempt() -> None:
    marks: list[str] = []

    def guard(engine: Engine) -> Engine:
        engine.mark = marks.append
        return Guard()(engine)

    trained(limited(20, where="backward"), guard, windows=[[0, 1, 2, 3]])
    one = ["forward", "backward"]
    assert marks == [*one, *one * 2, "clip", "optimizer"]


@pytest.mark.parametrize(
    ("error", "is_it"),
    [
        *((error, True) for error in ERRORS),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("MPS backend out of memory (MPS allocated: 8.88 GB, other allocations: 1 GB)"), True),
        (RuntimeError("Invalid buffer size: 24.00 GB"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("std::bad_alloc"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (RuntimeError("If you run out of memory, use smaller batches"), False),
        (ValueError("CUDA out of memory."), False),
    ],
)
def test_out_of_memory_is_told_from_other_errors(error: Exception, is_it: bool) -> None:
    assert is_out_of_memory(error) is is_it


def test_other_errors_are_not_touched() -> None:
    guard = Guard()
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        trained(limited(20, error=RuntimeError("mat1 and mat2 shapes cannot be multiplied")), guard)
    assert guard.engine.recoveries == 0


def test_measures_are_taken_in_order_where_a_single_example_does_not_fit() -> None:
    weights, _ = trained(limited())
    network, taken = limited(5), []

    def measure(name: str, bound: int | None) -> tuple[str, Callable[[], bool]]:
        def take() -> bool:
            taken.append(name)
            network.bound = bound or network.bound
            return bound is not None

        return name, take

    guard = Guard(measure("one", None), measure("two", 8), measure("three", 40), measure("4", 1))
    recovered, _ = trained(network, guard)
    assert taken == ["one", "two", "three"]
    assert largest_difference(weights, recovered) < 1e-10
    assert not any("one" in line for line in guard.said)
    assert [line for line in guard.said if "1 × 9" in line] == [
        f"out of memory in forward, micro-batch of 1 × 9: {name}, and the step is repeated" for name in ("two", "three")
    ]
    # What failed before is tried whole again after a measure.
    assert network.shapes[-5:] == [(4, 9), (4, 8), (4, 9), (2, 7), (2, 5)]


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_end_of_the_road_leaves_everything_as_before_the_step(where: str) -> None:
    accelerator, network = Accelerator(cpu=True), limited(dropout=0.5)
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.1, fused=True)
    model, optimizer = accelerator.prepare(ModelWithLoss(network), optimizer)
    engine = Guard()(Engine(accelerator, Config()))
    engine.step(model, optimizer, batches_of([1, 4], 2))
    weights = {k: v.clone() for k, v in network.state_dict().items()}
    moments = [v.clone() for state in optimizer.state.values() for v in state.values()]
    seed_step(0, 1, 0)
    states = random_states()
    network.bound, network.where = 6, where
    with pytest.raises(OutOfMemoryError) as caught:
        engine.step(model, optimizer, batches_of([1, 4, 7, 0, 2], 2))
    assert caught.value.weights_intact
    fault = caught.value.fault
    assert (fault.phase, fault.shape, fault.error) == (where, (1, 9), str(ERRORS[0]))
    for text in (where, "1 × 9", "It cannot be split", "Tried to allocate 2.00 GiB"):
        assert text in str(caught.value)
    assert largest_difference(weights, network.state_dict()) == 0
    kept = [v for state in optimizer.state.values() for v in state.values()]
    assert all(torch.equal(one, other) for one, other in zip(moments, kept, strict=True))
    assert all(p.grad is None for p in network.parameters())
    assert random_states() == states


def failing_at(monkeypatch: pytest.MonkeyPatch, name: str, calls: set[int]) -> list[int]:
    """Has ``torch.<name>`` run out of memory at the given calls, counted from 1."""
    plain, made = getattr(torch, name), []

    def limited_function(*args: Any, **kwargs: Any) -> Any:
        made.append(len(made) + 1)
        if len(made) in calls:
            raise ERRORS[0]
        return plain(*args, **kwargs)

    monkeypatch.setattr(torch, name, limited_function)
    return made


def one_update(
    network: LimitedModel, said: list[str], **settings: Any
) -> tuple[AcceleratedOptimizer, Callable[[], StepOutcome]]:
    """An optimizer as the template builds it, and a function that makes one step."""
    config, accelerator = from_values({"learning_rate": 0.1, **settings}), Accelerator(cpu=True)
    run = cast("Run", SimpleNamespace(config=config, accelerator=accelerator, extras=extras.join()))
    model, optimizer = accelerator.prepare(ModelWithLoss(network), build_optimizer(run, network))
    engine = Recovering(Engine(accelerator, config), said.append)
    return optimizer, lambda: engine.step(model, optimizer, batches_of([0, 1, 2, 3], 2))


def test_update_that_runs_out_of_memory_ends_the_run_and_says_to_resume(monkeypatch: pytest.MonkeyPatch) -> None:
    network, said = limited(), []
    _, step = one_update(network, said)
    failing_at(monkeypatch, "zeros_like", {5})  # two matrices have two moments each; then comes the bias
    with pytest.raises(OutOfMemoryError, match="Resume from the last checkpoint") as caught:
        step()
    assert (caught.value.fault.phase, caught.value.weights_intact, said) == ("optimizer", False, [])


def test_clipping_that_runs_out_of_memory_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    network, said = limited(), []
    before = {k: v.detach().clone() for k, v in network.named_parameters()}
    _, step = one_update(network, said, max_grad_norm=0.01)
    failing_at(monkeypatch, "stack", {1})  # of the norms
    with pytest.raises(OutOfMemoryError, match="out of memory in clip") as caught:
        step()
    assert (caught.value.fault.phase, said) == ("clip", [])
    assert all(torch.equal(before[k], v) for k, v in network.named_parameters())


def test_halves_hold_the_same_examples_and_counts() -> None:
    whole = batch(rows([4, 6, 2, 5, 3]))
    inputs = {**whole.inputs, "attention_mask": torch.ones(5, 6), "cache_position": torch.arange(6)}
    whole = MicroBatch(inputs, whole.labels, whole.num_targets, (7, 1, 4, 9, 2), whole.num_tokens)
    assert [half.num_targets for half in halves(without_targets(whole))] == [0, 0]
    first, second = halves(whole)
    assert (first.example_ids, second.example_ids) == ((7, 1, 4), (9, 2))
    assert (first.num_targets, second.num_targets) == (12, 8)
    assert first.num_tokens + second.num_tokens == whole.num_tokens
    for name in ("input_ids", "attention_mask"):
        assert torch.equal(torch.cat([first.inputs[name], second.inputs[name]]), whole.inputs[name])
    assert torch.equal(second.inputs["cache_position"], whole.inputs["cache_position"])
    classified = MicroBatch(whole.inputs, torch.tensor([1, IGNORE, 0, 2, 2]), 4, whole.example_ids, 20)
    assert [(half.labels.tolist(), half.num_targets) for half in halves(classified)] == [
        ([1, IGNORE, 0], 2),
        ([2, 2], 2),
    ]


class Rows:
    """An input that is not a tensor, such as where the documents of packed rows begin."""

    def __init__(self, values: list[int]) -> None:
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, rows: slice) -> Rows:
        return Rows(self.values[rows])


def test_halves_slice_whatever_has_a_row_for_each_example() -> None:
    whole = batch(rows([4, 6, 2]))
    shared, single = Rows([1, 2, 3, 4]), torch.tensor(7)
    whole = replace(whole, inputs={**whole.inputs, "documents": Rows([1, 2, 3]), "table": shared, "scale": single})
    first, second = halves(whole)
    assert (first.inputs["documents"].values, second.inputs["documents"].values) == ([1, 2], [3])
    assert all(half.inputs["table"] is shared and half.inputs["scale"] is single for half in (first, second))


def test_split_stops_at_single_examples() -> None:
    window = batches_of([0, 1, 2, 7], 3)
    assert split(window, None) == window
    assert [b.inputs["input_ids"].shape[0] for b in split(window, 27)] == [2, 1, 1]
    assert [b.inputs["input_ids"].shape[0] for b in split(window, 1)] == [1, 1, 1, 1]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """What ``distributed_recovery.py`` left behind: weights by case, and what each rank saw."""
    from test_distributed import ENVIRONMENT, forked  # the processes started here import this file too, not that

    output = tmp_path_factory.mktemp("two_ranks")
    done = forked(ROOT / "tests/extras/endurance/distributed_recovery.py", output, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr[-3000:]
    return output, json.loads((output / "found.json").read_text())


@pytest.mark.distributed
def test_two_ranks_with_faults_make_the_update_of_one_without(two_ranks: tuple[Path, dict[str, Any]]) -> None:
    output, found = two_ranks
    weights, outcomes = trained(limited(), size=8)
    cases = {
        "no fault": [0, 0],
        "forward on rank 1": [0, 1],
        "backward on rank 1": [0, 1],
        "backward on both": [2, 1],
        "second micro-batch on rank 1": [0, 2],
        "bucket views": [2, 0],
    }
    for name, recoveries in cases.items():
        two = load_file(output / f"{name}.safetensors")
        norms = two.pop("norms")
        assert max((weights[k] - two[k]).abs().max().item() for k in weights if k != "rows_seen") < 1e-10, name
        assert norms.tolist() == pytest.approx([o.grad_norm for o in outcomes], rel=1e-10)
        assert found[name]["recoveries"] == recoveries, name
        assert [len(lines) for lines in found[name]["said"]] == recoveries
    assert "rank 1" in found["forward on rank 1"]["said"][1][0]


@pytest.mark.distributed
def test_ranks_take_measures_together_and_end_together(two_ranks: tuple[Path, dict[str, Any]]) -> None:
    _, found = two_ranks
    for rank in found["measure"]["ranks"]:
        assert (rank["taken"], rank["error"], rank["unchanged"]) == (["cannot", "checkpoint"], None, False)
    one, other = found["no measure"]["ranks"]
    assert one == other
    assert one["taken"] == ["cannot"]
    assert one["unchanged"]
    assert not one["gradients"]
    assert one["error"]["intact"]
    assert one["error"]["shape"][0] == 1
    assert "rank 1. It cannot be split" in one["error"]["text"]
    one, other = found["optimizer"]["ranks"]
    assert one is None  # rank 0 has made its update
    assert "no memory for the optimizer" in other[0] and other[1] is False


@pytest.mark.distributed
def test_parameter_used_on_one_rank_gets_its_gradient_on_both(two_ranks: tuple[Path, dict[str, Any]]) -> None:
    _, found = two_ranks
    (seen, moved), other = found["partly used"]["ranks"]
    assert [seen, moved] == other
    assert seen == [True, True, True, True, False, False]
    assert np.abs(np.array(moved) - np.array(found["partly used"]["expected"])).max() < 1e-10


@pytest.mark.distributed
def test_autocast_stays_on(two_ranks: tuple[Path, dict[str, Any]]) -> None:
    _, found = two_ranks
    assert found["precision"] == {"dtypes": ["torch.bfloat16"]}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that can run out of memory")
def test_real_fault_on_a_gpu_gives_the_same_update() -> None:
    def updated(guard: Callable[[Engine], Engine]) -> tuple[dict[str, Tensor], int]:
        torch.manual_seed(0)
        accelerator = Accelerator()
        network = nn.Sequential(nn.Embedding(512, 512), *[nn.Linear(512, 512) for _ in range(8)]).double()
        model, optimizer = accelerator.prepare(ModelWithKeyword(network), torch.optim.SGD(network.parameters(), lr=1.0))
        ids = torch.randint(512, (8, 4096), generator=torch.Generator().manual_seed(1))
        window = [MicroBatch({"input_ids": ids}, ids, ids.numel(), tuple(range(8)), ids.numel())]
        torch.cuda.reset_peak_memory_stats()
        engine = guard(Engine(accelerator, Config(optimization=Optimization(max_grad_norm=None))))
        engine.step(model, optimizer, window)
        weights = {k: v.detach().clone() for k, v in network.state_dict().items()}
        return weights, torch.cuda.max_memory_allocated()

    weights, peak = updated(plain)
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    guard = Guard()
    try:
        torch.cuda.set_per_process_memory_fraction(0.7 * peak / total)
        recovered, _ = updated(guard)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert guard.said
    assert largest_difference(weights, recovered) < 1e-10


class ModelWithKeyword(ModelWithLoss):
    """For a model that takes its ids by position."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(_ByPosition(model))


class _ByPosition(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.model(input_ids)


@pytest.mark.parametrize("fail_at", [2, 5])
def test_inputs_that_rest_elsewhere_come_back_after_a_fault(fail_at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy runs out of memory in the first forward or backward: the update is the same, no memory stays taken."""
    monkeypatch.setattr(pytest.importorskip("train.extras.activations.recompute"), "MIN_OFFLOADED_BYTES", 1)
    from test_model import LLAMA, built
    from test_recompute import LazyCopies, offloaded  # type: ignore

    def update(guard: Callable[[Engine], Engine], transfers: LazyCopies | None) -> tuple[dict[str, Tensor], Any]:
        network = built({**LLAMA, "num_hidden_layers": 3}, tiled_mlp=True).double()
        offload = offloaded(network, transfers) if transfers is not None else None
        return trained(network, guard)[0], offload  # type: ignore

    expected, _ = update(plain, None)
    transfers, guard = LazyCopies(), Guard()
    transfers.fail_at = fail_at
    recovered, offload = update(guard, transfers)
    assert largest_difference(expected, recovered) < 1e-10
    assert len(guard.said) == 1 and ("forward" if fail_at == 2 else "backward") in guard.said[0]
    assert len(offload._free) == len(transfers.buffers) > 0


def test_gradients_that_ranks_average_keep_the_layout_of_their_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """A collective wants them contiguous; a fused optimizer goes through both memories side by side."""
    parameters = [torch.nn.Parameter(torch.arange(6.0).view(2, 3).t()), torch.nn.Parameter(torch.ones(2))]
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter).copy_(2 * parameter.detach())

    def reduced(tensor: Tensor, async_op: bool) -> Any:
        assert tensor.is_contiguous()
        tensor.mul_(2)  # as a second rank with equal gradients makes it
        return None

    monkeypatch.setattr("torch.distributed.all_reduce", reduced)
    guard: Any = object.__new__(Recovering)
    guard._shared, guard._group, guard._any = parameters, object(), lambda flags: flags
    guard.accelerator = SimpleNamespace(num_processes=2)
    guard._average()
    for parameter in parameters:
        assert parameter.grad is not None and parameter.grad.stride() == parameter.stride()
        assert torch.equal(parameter.grad, 2 * parameter.detach())
