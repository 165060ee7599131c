"""What the meter measures is what the allocator saw; what leaks is named, and nothing else is."""

from __future__ import annotations

import gc
import math
import re
import resource
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from support import run_for
from torch import Tensor, nn
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import LlamaConfig, LlamaForCausalLM

from train.config import Config
from train.extras.meter.cpu import CpuMeter
from train.extras.meter.cuda import CudaMeter, list_tensors
from train.extras.meter.memory import GROWING_STEPS, LEAK_BYTES, Measured, describe, peak_bytes
from train.extras.meter.tracker import (
    ACTIVATIONS,
    GRADIENTS,
    KINDS,
    LOGITS,
    OPTIMIZER_STATE,
    PARAMETERS,
    WORKSPACE,
    StorageTracker,
)
from train.model import ModelWithLoss
from train.optim import build_optimizer
from train.records import MicroBatch
from train.step import Engine, Mark, optimizer_step

VOCABULARY, WIDTH = 512, 64
CPU = torch.device("cpu")


def batch(size: int, length: int, num_tokens: int | None = None) -> MicroBatch:
    """A micro-batch (size, length) without padding, unless told how many tokens there are."""
    ids = torch.randint(0, VOCABULARY, (size, length))
    return MicroBatch({"input_ids": ids}, ids, size * length, tuple(range(size)), num_tokens or size * length)


class Training:
    """A small Llama that is trained under a meter."""

    def __init__(self, device: torch.device = CPU) -> None:
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            use_cache=False,
        )
        self.network = LlamaForCausalLM(config)
        self.accelerator = Accelerator(cpu=device.type == "cpu")
        self.model, self.optimizer = self.accelerator.prepare(
            ModelWithLoss(self.network), build_optimizer(run_for(Config(), self.accelerator), self.network)
        )
        self.said: list[str] = []
        self.device = device
        self.start_meter()

    def start_meter(self) -> None:
        kind = CudaMeter if self.device.type == "cuda" else CpuMeter
        self.meter = kind(self.device, self.network, self.optimizer, VOCABULARY, self.said.append)

    def step(self, *window: MicroBatch, mark: Mark | None = None) -> dict[str, Any]:
        """One optimizer step; the figures of it alone."""
        with self.meter.measure("forward", window):
            engine = Engine(self.accelerator, Config(), mark or self.meter.mark)
            optimizer_step(engine, self.model, self.optimizer, window)
        return self.meter.interval()

    @torch.no_grad()
    def evaluate(self, batch: MicroBatch) -> dict[str, Any]:
        self.model.eval()
        with self.meter.measure("evaluation", [batch]):
            self.model(batch.inputs, batch.labels, scored=True)
        self.model.train()
        return self.meter.interval()


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Threads that wait for each other cost more than these small steps."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def training() -> Training:
    return Training()


@pytest.fixture
def followed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The phase with which each step that is followed begins."""
    begun: list[str] = []
    reset_peak = StorageTracker.reset_peak

    def spy(tracker: StorageTracker) -> None:
        reset_peak(tracker)
        begun.append(tracker.phase)

    monkeypatch.setattr(StorageTracker, "reset_peak", spy)
    return begun


def allocator_peaks(profiler: Any) -> dict[str, int]:
    """Peak bytes of each marked phase, and of all, from the events of torch's own allocator."""
    events = sorted(profiler.profiler.kineto_results.events(), key=lambda e: e.start_ns())
    live, phase = 0, ""
    peaks = {"": 0}
    for event in events:
        if event.name().startswith("mark:"):
            phase = event.name().removeprefix("mark:")
            peaks[phase] = max(peaks.get(phase, 0), live)
        elif event.name() == "[memory]":
            live += event.nbytes()
            peaks[phase] = max(peaks[phase], live)
    return peaks


@pytest.mark.parametrize("window_size", [1, 3])
def test_phases_and_kinds_are_what_the_allocator_saw(window_size: int):
    window = [batch(2, 96) for _ in range(window_size)]
    gc.collect()  # what an earlier test left would be freed under the profiler
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        training = Training()

        def mark(phase: str) -> None:
            with record_function(f"mark:{phase}"):
                training.meter.mark(phase)

        for _ in range(3):
            training.step(*window, mark=mark)
            mark("between")
    truth, summary = allocator_peaks(profiler), training.meter.summary()
    assert summary["peak_allocated_bytes"] == pytest.approx(max(truth.values()), rel=5e-4)
    for phase in ("forward", "backward", "clip", "optimizer"):
        assert summary["peak_bytes_by_phase"][phase] == pytest.approx(truth[phase], rel=5e-4), phase
    kinds = summary["bytes_by_kind"]
    parameter_bytes = sum(p.nbytes for p in training.network.parameters())
    buffer_bytes = sum(b.nbytes for b in training.network.buffers())
    assert set(kinds) == set(KINDS) and sum(kinds.values()) == summary["peak_allocated_bytes"]
    assert kinds[PARAMETERS] == parameter_bytes + buffer_bytes
    assert kinds[OPTIMIZER_STATE] == pytest.approx(2 * parameter_bytes, rel=0.01)
    assert kinds[LOGITS] >= 2 * 96 * VOCABULARY * 4
    if window_size > 1:
        assert kinds[GRADIENTS] == parameter_bytes
    assert training.meter.bytes_by_kind == kinds


def test_the_first_step_of_each_larger_shape_is_followed(training: Training, followed: list[str]):
    def is_followed(*window: MicroBatch) -> bool:
        before = len(followed)
        training.step(*window)
        return len(followed) > before

    assert is_followed(batch(2, 16))
    assert is_followed(batch(2, 16))  # now there is optimizer state
    assert not is_followed(batch(2, 16))
    assert not is_followed(batch(4, 8))
    assert is_followed(batch(1, 32))  # as many positions, but more pairs of them
    assert is_followed(batch(3, 16))
    assert is_followed(batch(2, 16), batch(2, 16))  # gradients are there in the second forward
    assert not is_followed(batch(2, 16), batch(1, 8), batch(1, 16))
    assert is_followed(batch(3, 16, num_tokens=40))  # padding may need a mask
    assert not is_followed(batch(2, 16, num_tokens=30))
    assert is_followed(batch(2, 16), batch(1, 32))  # the largest micro-batch counts
    assert is_followed(batch(1, 8), batch(6, 8))
    assert is_followed(batch(2, 16), batch(2, 16, num_tokens=30))  # and any padding


def test_every_so_many_steps_one_is_followed(training: Training, followed: list[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("train.extras.meter.cpu.TRACK_EVERY_STEPS", 6)
    monkeypatch.setattr("train.extras.meter.cpu.TRACKED_SHARE", math.inf)
    training.start_meter()
    for _ in range(2 + 6):
        training.step(batch(1, 4))
    assert len(followed) == 3
    for length in (2, 3, 8, 16, 32, 64):  # an evaluation that is followed puts no step off
        training.evaluate(batch(1, length))
        training.step(batch(1, 4))
    assert followed.count("forward") == 4


class Clock:
    """A small model under a meter, and the time that its steps take by it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds = 0.0
        monkeypatch.setattr("train.extras.meter.cpu.time", SimpleNamespace(perf_counter=lambda: self.seconds))
        network = nn.Linear(2, 2)
        self.meter = CpuMeter(CPU, network, torch.optim.SGD(network.parameters()), None, print)

    def measure(self, phase: str, size: int, seconds: float, numbers: int = 1) -> dict[str, Any]:
        with self.meter.measure(phase, [batch(size, 4)]):
            torch.zeros(numbers)
            self.seconds += seconds
        return self.meter.interval()


def test_following_steps_takes_a_two_hundredth_of_the_time_at_most(
    followed: list[str], monkeypatch: pytest.MonkeyPatch
):
    clock, seen = Clock(monkeypatch), []
    for step in range(220):
        if step in (10, 50, 130, 150):
            clock.measure("evaluation", 1, 7.0)
        before = followed.count("forward")
        if step in (0, 100, 150):
            clock.measure("forward", 2, {100: 2.2}.get(step, 3.0))
        else:
            clock.measure("forward", 1, 1.0)
        if followed.count("forward") > before:
            seen.append(step)
    # by position half as much again: 100 steps later; then a tenth as much, and never more often than one in 50
    assert seen == [0, 100, 150]


def test_a_step_that_is_not_followed_has_the_most_that_was_seen_at_its_shapes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("train.extras.meter.cpu.TRACK_EVERY_STEPS", 2)
    clock = Clock(monkeypatch)
    peaks = [clock.measure("forward", 1, 1.0, numbers)["peak_allocated_bytes"] for numbers in (10, 10, 100, 10, 50, 10)]
    held = 6 * 4  # weights and biases
    assert peaks == [held + 4 * numbers for numbers in (10, 10, 100, 100, 50, 100)]


def test_a_step_that_is_not_followed_has_the_figures_of_one_that_was(training: Training, followed: list[str]):
    training.step(batch(1, 8))
    small = training.step(batch(1, 8))
    large = training.step(batch(4, 32))
    assert large["peak_allocated_bytes"] > small["peak_allocated_bytes"]
    assert training.step(batch(1, 8)) == small
    assert training.step(batch(2, 32)) == large  # at most
    assert len(followed) == 3
    assert training.meter.summary()["peak_allocated_bytes"] == large["peak_allocated_bytes"]


def test_evaluation_is_measured_once_for_each_larger_shape(training: Training, followed: list[str]):
    first = training.evaluate(batch(2, 64))
    kinds = training.meter.bytes_by_kind
    assert kinds[PARAMETERS] == sum(t.nbytes for t in (*training.network.parameters(), *training.network.buffers()))
    assert first == training.evaluate(batch(2, 64))
    assert followed == ["evaluation"]
    held = sum(t.nbytes for t in (*training.network.parameters(), *training.network.buffers()))
    assert first["peak_allocated_bytes"] > held + 2 * 64 * VOCABULARY * 4
    assert first["peak_bytes_by_phase"] == {"evaluation": first["peak_allocated_bytes"]}
    assert (training.meter.phase, training.meter.last_shape) == ("", None)  # what fails next, does so outside of it
    assert training.evaluate(batch(2, 128))["peak_allocated_bytes"] > first["peak_allocated_bytes"]


def test_figures_are_plain_and_complete(training: Training):
    figures = training.step(batch(2, 16))
    assert set(figures) == {"peak_allocated_bytes", "peak_bytes_by_phase", "bytes_by_kind"}
    summary = training.meter.summary()
    assert set(summary) == {*figures, "peak_resident_bytes"}
    assert summary["peak_resident_bytes"] > 100 * 2**20  # torch alone
    highest = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="utf-8"))
    assert highest and summary["peak_resident_bytes"] == pytest.approx(1024 * int(highest[1]), rel=5e-3)
    assert all(type(size) is int for size in (*summary["bytes_by_kind"].values(), summary["peak_allocated_bytes"]))


def test_figures_of_several_steps_are_the_largest_and_counts_are_added():
    one = Measured(5, 9, {"forward": 5, "clip": 1}, {"workspace": 5}, 1, 2)
    other = Measured(5, 8, {"forward": 4, "optimizer": 7}, {"gradients": 5}, 3, 4)
    phases = {"forward": 5, "clip": 1, "optimizer": 7}
    assert one.merged(other) == Measured(5, 9, phases, {"gradients": 5}, 4, 6)  # at the last of equal peaks
    assert Measured(6).merged(one) == Measured(6, 9, {"forward": 5, "clip": 1}, {}, 1, 2)
    assert one.merged(Measured(0, 10)) == Measured(5, 10, {"forward": 5, "clip": 1}, {"workspace": 5}, 1, 2)
    assert Measured().figures() == {"peak_allocated_bytes": 0}
    assert Measured(5, 9, {"clip": 1}, {}, 0, 2).figures() == {
        "peak_allocated_bytes": 5,
        "peak_reserved_bytes": 9,
        "peak_bytes_by_phase": {"clip": 1},
        "num_ooms": 2,
    }


def test_tensors_are_described_by_shape_and_type():
    assert describe(torch.Size([4, 80]), torch.bfloat16) == "(4, 80) bfloat16"


def test_the_highest_peak_is_in_bytes_wherever_it_comes_from(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("torch.cuda.max_memory_allocated", lambda device: {torch.device("cuda", 1): 3}[device])
    assert peak_bytes(torch.device("cuda", 1)) == 3
    monkeypatch.setattr("resource.getrusage", lambda who: {resource.RUSAGE_SELF: SimpleNamespace(ru_maxrss=7)}[who])
    for platform, expected in (("linux", 7 * 1024), ("darwin", 7)):
        monkeypatch.setattr("sys.platform", platform)
        assert peak_bytes(CPU) == expected
    monkeypatch.setitem(sys.modules, "resource", None)  # as on Windows
    for memory, expected in ((SimpleNamespace(rss=5, peak_wset=11), 11), (SimpleNamespace(rss=5), 5)):
        monkeypatch.setattr("psutil.Process", lambda memory=memory: SimpleNamespace(memory_info=lambda: memory))
        assert peak_bytes(CPU) == expected


def test_nothing_runs_before_the_first_step_and_the_largest_micro_batch_is_that_of_most_positions(training: Training):
    meter = training.meter
    meter.mark("clip")
    assert (meter.phase, meter.last_shape, meter.bytes_by_kind) == ("", None, {})
    with pytest.raises(MemoryError), meter.measure("forward", [batch(4, 16), batch(1, 80), batch(2, 4)]):
        raise MemoryError
    assert (meter.phase, meter.last_shape) == ("forward", (1, 80))


def test_a_step_that_raises_leaves_nothing_behind(training: Training):
    training.step(batch(1, 8))

    def fail(*args: Any) -> None:
        raise MemoryError

    hook = training.network.lm_head.register_forward_hook(fail)
    with pytest.raises(MemoryError):
        training.step(batch(2, 32), batch(1, 4))
    hook.remove()
    assert torch.utils._python_dispatch._len_torch_dispatch_stack() == 0  # type: ignore
    assert not any(p._post_accumulate_grad_hooks for p in training.network.parameters())  # type: ignore
    meter = training.meter
    assert (meter.phase, meter.last_shape) == ("forward", (2, 32))
    assert meter.bytes_by_kind[ACTIVATIONS] > 0
    meter.mark("backward")  # of no step
    assert meter.phase == "forward"
    # the same shapes are followed when they come again
    again = training.step(batch(2, 32), batch(1, 4))
    assert {"forward", "backward", "clip", "optimizer"} == set(again["peak_bytes_by_phase"])


# ---- leaks -----------------------------------------------------------------------------------------------------------


def keep_graph(kept: list[Tensor]) -> Callable[..., None]:
    """A second loss that nobody calls backward on."""
    return lambda module, args: kept.append((args[0] ** 2).sum())


def keep_tensor(kept: list[Tensor]) -> Callable[..., None]:
    return lambda module, args: kept.append(args[0].detach().clone())


@pytest.mark.parametrize("keep", [keep_graph, keep_tensor])
def test_a_leak_is_named_once(training: Training, keep: Callable[[list[Tensor]], Any]):
    kept: list[Tensor] = []
    training.network.lm_head.register_forward_pre_hook(keep(kept))
    for step in range(2 * GROWING_STEPS + 4):
        training.step(batch(4, 80))
        assert bool(training.said) == (step >= GROWING_STEPS)
    (line,) = training.said
    assert f"(4, 80, {WIDTH}) float32 made in forward" in line
    assert "0.1 MiB more after each step, seen over 4 steps" in line
    assert training.meter.summary()["memory_leak"] == line


def test_a_leak_names_the_largest_kinds_and_nothing_that_only_stays(training: Training):
    kept: list[Tensor] = []

    def keep(module: nn.Module, args: Any) -> None:
        if not kept:
            kept.append(torch.zeros(300, 300))
        kept.extend(torch.zeros(100 + number, 100) for number in range(5))

    training.network.lm_head.register_forward_pre_hook(keep)
    for _ in range(GROWING_STEPS + 2):
        training.step(batch(4, 80))
    (line,) = training.said
    named = [f"{GROWING_STEPS} × ({rows}, 100) float32 made in forward" for rows in (104, 103, 102)]
    assert f"What grows: {'; '.join(named)}. Look" in line


def test_a_leak_that_begins_later_and_at_several_shapes_is_found_by_a_followed_step(
    training: Training, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("train.extras.meter.cpu.TRACK_EVERY_STEPS", 6)
    monkeypatch.setattr("train.extras.meter.cpu.TRACKED_SHARE", math.inf)
    training.start_meter()
    kept: list[Tensor] = []
    for step in range(4):
        training.step(batch(4, 80 + step % 2))
    training.network.lm_head.register_forward_pre_hook(keep_tensor(kept))
    for step in range(5 + GROWING_STEPS):
        training.step(batch(4, 80 + step % 2))
    assert len(training.said) == 1
    for length in (80, 81):
        assert f"2 × (4, {length}, {WIDTH}) float32 made in forward" in training.said[0]


def test_a_clean_run_raises_no_alarm(training: Training, followed: list[str]):
    window = [batch(4, 96)]
    last: list[Tensor] = []
    cache: dict[int, Tensor] = {}

    def habits(module: nn.Module, args: Any) -> None:
        last[:] = [args[0].detach().clone()]  # kept until the next one
        length = args[0].shape[1]
        cache.setdefault(length, torch.zeros(256, 256))  # kept for ever
        training.network.constant.view(-1)  # type: ignore - seen by each step, born in none

    training.network.lm_head.register_forward_pre_hook(habits)
    training.network.constant = torch.zeros(256, 256)  # no buffer, but there before
    for length in (32, 48, 64, 80, 96, 96, 96, 96):
        training.step(batch(4, length))
    for _ in range(6):
        training.step(*window)  # the caller keeps its batches
    assert training.said == [] and "memory_leak" not in training.meter.summary()
    assert len(followed) < 14


def test_state_of_the_optimizer_that_grows_is_no_leak_and_is_not_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("train.extras.meter.cpu.TRACK_EVERY_STEPS", 1)
    network, said, kept = nn.Linear(2, 2), list[str](), list[Tensor]()
    optimizer = torch.optim.SGD(network.parameters())
    meter = CpuMeter(CPU, network, optimizer, None, said.append)

    def step(rows: int = 0) -> None:
        with meter.measure("forward", [batch(1, 4)]):
            optimizer.state[network.weight][len(optimizer.state[network.weight])] = torch.zeros(50_000)
            kept.append(torch.zeros(rows, 50_000))

    for _ in range(GROWING_STEPS + 4):
        step()
    assert said == []
    for _ in range(GROWING_STEPS):
        step(2)
    (line,) = said
    assert (
        "0.4 MiB more after each step, seen over 4 steps. What grows: 4 × (2, 50000) float32 made in forward." in line
    )


def test_an_evaluation_is_not_judged(training: Training, monkeypatch: pytest.MonkeyPatch):
    judged: list[Any] = []
    monkeypatch.setattr(training.meter.leaks, "see", judged.append)
    training.evaluate(batch(2, 16))
    training.step(batch(1, 8))
    assert judged == [((1, 8),)]


def test_circles_of_objects_are_no_leak(training: Training):
    class Circle:
        def __init__(self, tensor: Tensor) -> None:
            self.tensor, self.itself = tensor, self

    def keep(module: nn.Module, args: Any) -> None:
        Circle(args[0].detach().clone())

    training.network.lm_head.register_forward_pre_hook(keep)
    gc.collect()
    gc.disable()
    try:
        for _ in range(GROWING_STEPS + 2):
            training.step(batch(4, 80))
    finally:
        gc.enable()
    assert training.said == []


# ---- CUDA ------------------------------------------------------------------------------------------------------------


class Allocator:
    """Stands for CUDA's caching allocator: counts what a test says was allocated."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.current = self.peak = 0
        self.num_alloc_retries = self.num_ooms = 0
        self.resets = 0
        monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", self.stats)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", self.reset)

    def stats(self, device: Any) -> dict[str, Any]:
        return {
            "allocated_bytes": {"all": {"current": self.current, "peak": self.peak}},
            "reserved_bytes": {"all": {"current": self.peak, "peak": 2 * self.peak}},
            "num_alloc_retries": self.num_alloc_retries,
            "num_ooms": self.num_ooms,
        }

    def reset(self, device: Any) -> None:
        self.peak = self.current
        self.resets += 1

    def take(self, size_bytes: int, and_gave_back_bytes: int = 0) -> None:
        """Allocates, and frees a part again."""
        self.current += size_bytes
        self.peak = max(self.peak, self.current)
        self.current -= and_gave_back_bytes


class Head(nn.Module):
    """Weights on a device that need not be there."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1024, 1024, device="cuda"))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden


class Headed(nn.Module):
    """A model with an output embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.head = Head()
        self.frozen = nn.Parameter(torch.empty(0, device="cuda"), requires_grad=False)  # it never has a gradient

    def get_output_embeddings(self) -> nn.Module:
        return self.head


WEIGHTS, STATE = 4 * 2**20, 8 * 2**20
MIB = 2**20


class CudaTraining:
    """Steps whose memory is written down: weights of 4 MiB, 20 MiB of activations, 10 MiB of logits."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.allocator = Allocator(monkeypatch)
        self.network = Headed()
        self.optimizer = torch.optim.SGD(self.network.parameters())
        self.allocator.take(WEIGHTS + 50 * MIB, 50 * MIB)  # loading
        self.said: list[str] = []
        self.start_meter()
        self.batch = MicroBatch({"input_ids": torch.empty(2, 8)}, torch.empty(2, 8), 16, (0, 1), 16)

    def start_meter(self) -> None:
        self.meter = CudaMeter(torch.device("cuda"), self.network, self.optimizer, None, self.said.append)

    def step(self, micro_batches: int = 1, leak_bytes: int = 0, work: Callable[[], None] = lambda: None) -> None:
        meter, take, weight = self.meter, self.allocator.take, self.network.head.weight
        with meter.measure("forward", [self.batch] * micro_batches):
            for _ in range(micro_batches):
                meter.mark("forward")
                take(23 * MIB, 3 * MIB)
                self.network.head(torch.empty(1))
                take(15 * MIB, 5 * MIB)
                meter.mark("backward")
                work()
                take(10 * MIB)
                if weight.grad is None:
                    take(WEIGHTS)
                    weight.grad = torch.empty_like(weight)
                take(0, 40 * MIB)
            meter.mark("clip")
            take(MIB, MIB)
            meter.mark("optimizer")
            if not self.optimizer.state:
                take(STATE)
                moments = {"exp_avg": torch.empty_like(weight), "exp_avg_sq": torch.empty_like(weight)}
                self.optimizer.state[weight] = {"step": torch.zeros(1, device="cpu"), **moments}
            weight.grad = None
            take(leak_bytes, WEIGHTS)


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # The storages of fake tensors lie on "meta", as do those of what other tests have compiled.
    objects, earlier = gc.get_objects, {id(t): t for t in gc.get_objects() if issubclass(type(t), Tensor)}
    monkeypatch.setattr(gc, "get_objects", lambda: [found for found in objects() if id(found) not in earlier])
    monkeypatch.setattr("train.extras.meter.cuda.list_tensors", lambda _: list_tensors(torch.device("meta")))
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield


def test_cuda_phases_and_kinds(fake_cuda: None, monkeypatch: pytest.MonkeyPatch):
    cuda = CudaTraining(monkeypatch)
    cuda.step()
    first = cuda.meter.interval()
    assert first["peak_bytes_by_phase"]["elsewhere"] == WEIGHTS + 50 * MIB
    assert first["peak_allocated_bytes"] == WEIGHTS + 50 * MIB
    assert first["bytes_by_kind"][PARAMETERS] == WEIGHTS and first["bytes_by_kind"][WORKSPACE] == 50 * MIB
    cuda.step(micro_batches=2)
    second = cuda.meter.interval()
    held = WEIGHTS + STATE
    assert second["peak_bytes_by_phase"] == {
        "elsewhere": held,
        "forward": held + WEIGHTS + 35 * MIB,
        "backward": held + WEIGHTS + 40 * MIB,
        "clip": held + WEIGHTS + MIB,
        "optimizer": held + WEIGHTS,
    }
    assert second["bytes_by_kind"] == {
        PARAMETERS: WEIGHTS,
        GRADIENTS: WEIGHTS,
        OPTIMIZER_STATE: STATE,
        ACTIVATIONS: 20 * MIB,
        LOGITS: 10 * MIB,
        WORKSPACE: 10 * MIB,
    }
    assert second["peak_reserved_bytes"] == 2 * second["peak_allocated_bytes"]
    assert "num_alloc_retries" not in second
    cuda.allocator.num_alloc_retries, cuda.allocator.num_ooms = 3, 2
    cuda.step()
    third = cuda.meter.interval()
    assert (third["num_alloc_retries"], third["num_ooms"]) == (3, 2)
    cuda.step()
    assert "num_alloc_retries" not in cuda.meter.interval()
    summary = cuda.meter.summary()
    assert summary["peak_allocated_bytes"] == max(first["peak_allocated_bytes"], second["peak_allocated_bytes"])
    assert (summary["num_alloc_retries"], summary["num_ooms"]) == (3, 2) and "peak_resident_bytes" not in summary


def test_cuda_peak_between_steps_is_the_runs(fake_cuda: None, monkeypatch: pytest.MonkeyPatch):
    cuda = CudaTraining(monkeypatch)
    cuda.step()
    cuda.allocator.take(500 * MIB, 500 * MIB)
    assert cuda.meter.summary()["peak_allocated_bytes"] == WEIGHTS + STATE + 500 * MIB
    assert cuda.meter.interval()["peak_bytes_by_phase"]["elsewhere"] == WEIGHTS + STATE + 500 * MIB


def test_cuda_evaluation_tells_logits_from_activations(fake_cuda: None, monkeypatch: pytest.MonkeyPatch):
    cuda = CudaTraining(monkeypatch)
    cuda.meter.interval()
    with cuda.meter.measure("evaluation", [cuda.batch]):
        cuda.allocator.take(9 * MIB, 7 * MIB)
        cuda.network.head(torch.empty(1))
        cuda.allocator.take(30 * MIB, 32 * MIB)
    figures = cuda.meter.interval()
    assert figures["peak_bytes_by_phase"]["evaluation"] == figures["peak_allocated_bytes"] == WEIGHTS + 32 * MIB
    assert figures["bytes_by_kind"][ACTIVATIONS] == 2 * MIB and figures["bytes_by_kind"][LOGITS] == 30 * MIB


def test_cuda_memory_that_was_there_before_is_workspace(fake_cuda: None, monkeypatch: pytest.MonkeyPatch):
    """What is freed meanwhile makes no activations fewer than none."""
    cuda, head = CudaTraining(monkeypatch), torch.empty(1)
    cuda.meter.interval()
    cuda.allocator.take(40 * MIB)
    with cuda.meter.measure("evaluation", [cuda.batch]):
        cuda.allocator.take(9 * MIB)
        cuda.network.head(head)
        cuda.allocator.take(5 * MIB, 14 * MIB)
    kinds = cuda.meter.interval()["bytes_by_kind"]
    assert (kinds[ACTIVATIONS], kinds[LOGITS], kinds[WORKSPACE]) == (9 * MIB, 5 * MIB, 40 * MIB)
    for has_head, activations in ((True, 9 * MIB), (False, 0)):
        with cuda.meter.measure("forward", [cuda.batch]):
            cuda.allocator.take(9 * MIB)
            if has_head:
                cuda.network.head(head)
            cuda.allocator.take(0, 10 * MIB)
            cuda.meter.mark("backward")
            cuda.allocator.take(60 * MIB, 60 * MIB)
        kinds = cuda.meter.interval()["bytes_by_kind"]
        assert (kinds[ACTIVATIONS], kinds[LOGITS], kinds[PARAMETERS]) == (activations, 0, WEIGHTS)
        assert sum(kinds.values()) == cuda.allocator.current + 60 * MIB


def test_cuda_peak_in_the_update_holds_no_activations(fake_cuda: None, monkeypatch: pytest.MonkeyPatch):
    cuda = CudaTraining(monkeypatch)
    cuda.step()
    cuda.meter.interval()
    with cuda.meter.measure("forward", [cuda.batch]):
        cuda.allocator.take(20 * MIB)
        cuda.network.head(torch.empty(1))
        cuda.allocator.take(10 * MIB)
        cuda.meter.mark("backward")
        cuda.allocator.take(0, 30 * MIB)
        cuda.meter.mark("optimizer")
        cuda.allocator.take(90 * MIB, 90 * MIB)
    kinds = cuda.meter.interval()["bytes_by_kind"]
    assert {kind: size for kind, size in kinds.items() if size} == {
        PARAMETERS: WEIGHTS,
        OPTIMIZER_STATE: STATE,
        WORKSPACE: 90 * MIB,
    }


def test_cuda_reads_once_where_the_head_of_a_forward_begins(fake_cuda: None, monkeypatch: pytest.MonkeyPatch):
    cuda, hidden = CudaTraining(monkeypatch), torch.empty(1)
    cuda.step()

    def readings(of: Callable[[], Any]) -> int:
        before = cuda.allocator.resets
        of()
        return cuda.allocator.resets - before

    def heads(phase: str) -> int:
        with cuda.meter.measure("forward", [cuda.batch]):
            cuda.meter.mark(phase)
            return readings(lambda: [cuda.network.head(hidden) for _ in range(3)])  # as a loss in chunks does

    assert (heads("forward"), heads("backward")) == (1, 0)  # recomputed
    assert readings(lambda: cuda.network.head(hidden)) == 0  # of no step
    with monkeypatch.context() as compiling:
        compiling.setattr(torch.compiler, "is_compiling", lambda: True)
        assert heads("forward") == 0


def test_cuda_model_without_an_output_embedding_has_activations_alone(fake_cuda: None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Headed, "get_output_embeddings", lambda network: None)
    cuda = CudaTraining(monkeypatch)
    cuda.step()
    cuda.meter.interval()
    cuda.step()
    kinds = cuda.meter.interval()["bytes_by_kind"]
    assert (kinds[ACTIVATIONS], kinds[LOGITS]) == (30 * MIB, 0)


def test_cuda_state_that_is_there_from_the_start_is_counted(fake_cuda: None, monkeypatch: pytest.MonkeyPatch):
    """As in a run that resumes."""
    cuda = CudaTraining(monkeypatch)
    cuda.step()
    cuda.start_meter()
    for gradients in (0, WEIGHTS):  # known from the first clipping on
        cuda.meter.interval()
        cuda.step(micro_batches=2)
        kinds = cuda.meter.interval()["bytes_by_kind"]
        assert (kinds[PARAMETERS], kinds[OPTIMIZER_STATE], kinds[GRADIENTS]) == (WEIGHTS, STATE, gradients)


def test_cuda_counts_what_is_held_again_every_so_many_steps(fake_cuda: None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("train.extras.meter.cuda.COUNT_EVERY_STEPS", 3)
    cuda, found = CudaTraining(monkeypatch), []
    cuda.step()
    cuda.optimizer.state[cuda.network.head.weight].pop("exp_avg_sq")
    for _ in range(4):
        for _ in range(2):  # evaluations are no steps
            with cuda.meter.measure("evaluation", [cuda.batch]):
                pass
        cuda.meter.interval()
        cuda.step()
        found.append(cuda.meter.interval()["bytes_by_kind"][OPTIMIZER_STATE])
    assert found == [STATE, STATE, STATE, STATE // 2]  # counted at the end of the third, seen from the next on


def test_cuda_judges_steps_that_were_completed(fake_cuda: None, monkeypatch: pytest.MonkeyPatch):
    cuda, judged = CudaTraining(monkeypatch), []
    monkeypatch.setattr(cuda.meter.leaks, "see", judged.append)
    with cuda.meter.measure("evaluation", [cuda.batch]):
        pass
    with pytest.raises(MemoryError), cuda.meter.measure("forward", [cuda.batch]):
        raise MemoryError
    assert judged == []
    cuda.step(micro_batches=2)
    assert judged == [((2, 8), (2, 8))]


def test_cuda_step_that_raises_is_closed(fake_cuda: None, monkeypatch: pytest.MonkeyPatch):
    cuda = CudaTraining(monkeypatch)
    cuda.step()

    def fail() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    with pytest.raises(torch.OutOfMemoryError):
        cuda.step(work=fail)
    assert (cuda.meter.phase, cuda.meter.last_shape) == ("backward", (2, 8))
    assert cuda.meter.bytes_by_kind[ACTIVATIONS] == 20 * MIB and cuda.meter.bytes_by_kind[LOGITS] == 15 * MIB
    resets = cuda.allocator.resets
    cuda.meter.mark("clip")
    assert cuda.allocator.resets == resets and cuda.meter.phase == "backward"
    kinds = cuda.meter.bytes_by_kind
    cuda.allocator.take(500 * MIB, 500 * MIB)
    cuda.meter.interval()
    assert cuda.meter.bytes_by_kind == kinds  # what comes after it is not its own


@pytest.mark.parametrize("leak_bytes", [LEAK_BYTES, LEAK_BYTES // 8])
def test_cuda_growth_is_told_once(fake_cuda: None, monkeypatch: pytest.MonkeyPatch, leak_bytes: int):
    cuda, kept, shape = CudaTraining(monkeypatch), [], (leak_bytes // 4 // 256, 256)
    for _ in range(20):
        cuda.step(leak_bytes=leak_bytes, work=lambda: kept.append(torch.empty(shape, device="cuda")))
    (line,) = cuda.said
    assert f"{leak_bytes / 2**20:.1f} MiB more after each step" in line
    assert f"× {shape} float32" in line and "held by autograd graphs" not in line
    assert cuda.meter.summary()["memory_leak"] == line


def test_cuda_growth_that_no_tensor_shows_is_a_graphs(fake_cuda: None, monkeypatch: pytest.MonkeyPatch):
    cuda = CudaTraining(monkeypatch)
    for _ in range(10):
        cuda.step(leak_bytes=2 * MIB)
    assert len(cuda.said) == 1 and "4.0 MiB held by autograd graphs" in cuda.said[0]


def test_cuda_without_growth_at_equal_shapes_is_clean(fake_cuda: None, monkeypatch: pytest.MonkeyPatch):
    cuda = CudaTraining(monkeypatch)
    for step in range(24):  # a buffer that grows with the first steps, garbage that is collected now and then
        cuda.step(leak_bytes=8 * MIB if step < 4 or step % 4 else -24 * MIB if step > 4 else 0)
    assert cuda.said == []


def test_live_tensors_are_listed_by_shape_and_views_once():
    gc.collect()  # what earlier tests left in cycles must not go between the two lists
    before = list_tensors(CPU)
    weight = torch.zeros(3, 17, dtype=torch.float32, requires_grad=True)
    kept = [torch.zeros(3, 17, dtype=torch.float32) for _ in range(4)]
    views = [tensor.view(17, 3) for tensor in kept]
    product = weight * 2
    without_storage = torch.eye(3).to_sparse()
    after = list_tensors(CPU)
    found, size = after - before, 3 * 17 * 4
    assert found["(3, 17) float32", size] + found["(17, 3) float32", size] == 6
    assert len(views) == 4 and product.requires_grad and without_storage.is_sparse


def test_fake_tensors_that_compiled_functions_leave_are_not_live():
    sizes = StatelessSymbolicContext([DimDynamic.DYNAMIC, DimDynamic.STATIC])
    mode, source = FakeTensorMode(shape_env=ShapeEnv()), ConstantSource("left")
    left = mode.from_tensor(torch.zeros(8, 1234), symbolic_context=sizes, source=source)
    assert left.device == CPU and not isinstance(left.shape[0], int)
    assert not [shape for shape, _ in list_tensors(CPU) if "1234" in shape]


@pytest.mark.gpu
def test_cuda_figures_are_the_allocators():
    training = Training(torch.device("cuda"))
    window: Sequence[MicroBatch] = [batch(8, 512), batch(8, 512)]
    for _ in range(3):
        training.step(*window)
    del training.meter
    torch.cuda.reset_peak_memory_stats()
    optimizer_step(Engine(training.accelerator, Config()), training.model, training.optimizer, window)
    truth = torch.cuda.max_memory_allocated()
    training.start_meter()
    training.step(*window)  # gradients are known from the first clipping on
    figures = training.step(*window)
    assert figures["peak_allocated_bytes"] == pytest.approx(truth, rel=1e-3)
    kinds = figures["bytes_by_kind"]
    parameter_bytes = sum(p.nbytes for p in training.network.parameters())
    assert kinds[PARAMETERS] == pytest.approx(parameter_bytes, rel=0.05) and kinds[GRADIENTS] >= parameter_bytes
    assert kinds[LOGITS] >= 8 * 512 * VOCABULARY * 4
    kept: list[Tensor] = []
    training.network.lm_head.register_forward_pre_hook(keep_graph(kept))
    for _ in range(12):
        training.step(*window)
    assert len(training.said) == 1 and "memory leak" in training.said[0]
