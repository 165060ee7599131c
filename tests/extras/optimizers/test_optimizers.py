"""Optimizers that take less memory: the same update as AdamW where that is promised, and what a run makes of them."""

from __future__ import annotations

import copy
import math
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from accelerate import Accelerator
from safetensors.torch import load_file
from support import checkpoint_digests, run_for
from test_losses import with_loss
from test_main import _own_signals, stopping_after, train
from torch import Tensor, nn

from train import checkpoint, extras, optim
from train.config import Config, fields, from_values
from train.extras.activations.recompute import enable_checkpointing
from train.extras.optimizers import Extra, offload
from train.extras.optimizers.few_bits import ADDED, Bf16AdamW, random_halves, round_at_random_
from train.extras.optimizers.in_backward import InBackward
from train.extras.optimizers.offload import MASTER, Link, OffloadedAdamW
from train.launch import Launch, read_launch
from train.model import ModelWithLoss
from train.records import EXIT_DONE, EXIT_STOPPED, EXIT_USAGE, MicroBatch, Progress, StepOutcome, UsageError
from train.state import TrainingState
from train.step import Engine

__all__ = ["_own_signals"]
DEVICE = torch.device("cuda")
"""Where steps are said to be made, so that there is something to offload from; all tensors are on the CPU."""
VOCABULARY = 300
"""So that the embedding has more than the 4,096 elements from which on moments take 8 bits."""


def llama(tied: bool = True, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            attention_bias=True,
            tie_word_embeddings=tied,
        )
    )
    return nn.Module.to(model, dtype)


def batches(count: int) -> list[MicroBatch]:
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(VOCABULARY, (2, 9), generator=generator) for _ in range(count)]
    return [MicroBatch({"input_ids": i}, i, i.numel(), (0, 1), i.numel()) for i in ids]


def settings(**values: Any) -> Config:
    return from_values({"model": "x", **values})


def build_optimizer(network: nn.Module, config: Config, device: torch.device | None = None) -> torch.optim.Optimizer:
    """The optimizer of a run, which is said to be on ``device`` if one is given."""
    run = run_for(config)
    if device is not None:
        there: Any = SimpleNamespace(device=device)
        run = replace(run, accelerator=there)
    return optim.build_optimizer(run, network)


class Training:
    """A model and its optimizer, as a run puts them together."""

    def __init__(self, config: Config, network: nn.Module, loss: str = "full", cpu: bool = True) -> None:
        self.network = network
        self.accelerator = Accelerator(cpu=cpu)
        optimizer = build_optimizer(network, config, DEVICE)
        self.model, self.optimizer = self.accelerator.prepare(with_loss(network, loss), optimizer)
        self.engine = Extra().wrap_step(run_for(config, self.accelerator), Engine(self.accelerator, config))

    def step(self, batch: MicroBatch) -> StepOutcome:
        return self.engine.step(self.model, self.optimizer, [batch])

    def checkpointed(self) -> TrainingState:
        return TrainingState(self.network, self.optimizer.optimizer, {})

    def save(self, folder: Path, step: int) -> Path:
        """The folder of a checkpoint."""
        checkpoint.write(folder, self.checkpointed(), Progress(step=step), 0)
        return folder / f"step-{step:08d}"

    @property
    def weights(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.network.named_parameters()}

    @property
    def state(self) -> dict[str, Any]:
        names = {id(p): name for name, p in self.network.named_parameters()}
        state = self.optimizer.optimizer.state
        return {f"{names[id(p)]}.{k}": copy.deepcopy(v) for p, entries in state.items() for k, v in entries.items()}


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, Tensor):
            assert found[name].dtype == value.dtype, name
            assert torch.equal(found[name], value), name
        else:
            assert found[name] == value, name


# ---- resume ----------------------------------------------------------------------------------------------------------


CASES: dict[str, tuple[dict[str, Any], torch.dtype]] = {
    "adamw in bf16": ({}, torch.bfloat16),
    "8 bits": ({"optimizer": "adamw_8bit"}, torch.float32),
    "8 bits in bf16": ({"optimizer": "adamw_8bit"}, torch.bfloat16),
    "offloaded": ({"optimizer_offload": True}, torch.float32),
    "offloaded in bf16": ({"optimizer_offload": True}, torch.bfloat16),
    "stochastic": ({"bf16_update": "stochastic"}, torch.bfloat16),
    "kahan": ({"bf16_update": "kahan"}, torch.bfloat16),
    "in backward": ({"optimizer_in_backward": True, "max_grad_norm": None}, torch.float32),
}


@pytest.mark.parametrize("name", CASES)
def test_a_checkpoint_resumes_bit_for_bit(name: str, tmp_path: Path) -> None:
    values, dtype = CASES[name]
    if values.get("optimizer") == "adamw_8bit":
        pytest.importorskip("bitsandbytes")
    config = settings(learning_rate=0.01, weight_decay=0.1, **values)

    whole, first, second = (Training(config, llama(dtype=dtype)) for _ in range(3))
    for batch in batches(4):
        whole.step(batch)
    for batch in batches(4)[:2]:
        first.step(batch)
    saved = first.save(tmp_path, 2)
    second.step(batches(1)[0])  # as a rehearsal does; nothing of it may stay
    for parameter in second.network.parameters():
        nn.init.zeros_(parameter)
    checkpoint.restore(saved, second.checkpointed())
    assert_same(second.state, first.state)
    for batch in batches(4)[2:]:
        second.step(batch)
    assert_same(second.weights, whole.weights)
    assert_same(second.state, whole.state)


# ---- in host memory --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clipping", [{"max_grad_norm": 0.1}, {"max_grad_norm": None, "max_grad_value": 1e-3}])
def test_offloaded_makes_the_update_of_fused_adamw(clipping: dict[str, Any]) -> None:
    config = settings(learning_rate=0.01, weight_decay=0.1, **clipping)
    plain, offloaded = (Training(config.changed(optimizer_offload=o), llama()) for o in (False, True))
    assert isinstance(offloaded.optimizer.optimizer, OffloadedAdamW)
    for batch in batches(3):
        assert plain.step(batch).grad_norm == offloaded.step(batch).grad_norm
    assert_same(offloaded.weights, plain.weights)
    assert_same(offloaded.state, plain.state)


def test_offloaded_weights_of_half_precision_have_an_fp32_original() -> None:
    weight = nn.Parameter(torch.tensor([[1.0, 2.0], [-3.0, 4.0]], dtype=torch.bfloat16))
    original = nn.Parameter(weight.detach().float())
    config = settings(learning_rate=1e-4, optimizer_offload=True)
    offloaded = build_optimizer(nn.ParameterList([weight]), config, DEVICE)
    expected = build_optimizer(nn.ParameterList([original]), config)
    for step in range(40):
        weight.grad = torch.full_like(weight, 0.3 + step)
        original.grad = weight.grad.float()
        offloaded.step()
        expected.step()
    assert torch.equal(offloaded.state[weight][MASTER], original)
    assert torch.equal(weight, original.bfloat16())
    assert not torch.equal(weight, torch.tensor([[1.0, 2.0], [-3.0, 4.0]]))  # each step alone would have been lost


def test_a_checkpoint_resumes_with_or_without_offload(tmp_path: Path) -> None:
    config = settings(learning_rate=0.01)
    expected = Training(config, llama())
    for batch in batches(4):
        expected.step(batch)
    for before, after in ((True, False), (False, True)):
        first, second = (Training(config.changed(optimizer_offload=o), llama()) for o in (before, after))
        for batch in batches(4)[:2]:
            first.step(batch)
        checkpoint.restore(first.save(tmp_path / str(before), 2), second.checkpointed())
        for batch in batches(4)[2:]:
            second.step(batch)
        assert_same(second.weights, expected.weights)
        assert_same(second.state, expected.state)


def test_originals_that_another_optimizer_left_behind_are_made_again() -> None:
    """A run that was resumed without offload, and then with it: what plain AdamW learned stays."""
    weight, config = nn.Parameter(torch.ones(2, 2, dtype=torch.bfloat16)), settings(learning_rate=0.1)
    with_offload = config.changed(optimizer_offload=True)
    optimizers = [build_optimizer(nn.ParameterList([weight]), c, DEVICE) for c in (with_offload, config, with_offload)]
    state: dict[str, Any] = {}
    for optimizer in optimizers:
        if state:
            optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
        before = weight.detach().clone()
        for _ in range(5):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
        assert torch.allclose(before - weight.detach(), torch.tensor(0.5, dtype=torch.bfloat16), atol=0.02)
        state = copy.deepcopy(optimizer.state_dict()["state"])


def test_on_a_cpu_offload_keeps_originals_of_bf16_weights() -> None:
    network, config = nn.Linear(2, 2).bfloat16(), settings(optimizer_offload=True, dtype="bfloat16")
    assert isinstance(build_optimizer(network, config), OffloadedAdamW)
    assert not isinstance(build_optimizer(network, config.changed(dtype="float32")), OffloadedAdamW)


def test_offload_leaves_a_weight_without_a_gradient_as_it_is() -> None:
    """As a step whose examples do not reach it leaves it: no weight decay, no state."""
    found = []
    for offloads in (False, True):
        network = nn.ParameterList([nn.Parameter(torch.full((3, 2), 2.0)) for _ in range(3)])
        optimizer = build_optimizer(network, settings(weight_decay=0.5, optimizer_offload=offloads), DEVICE)
        for number in (0, 2):
            network[number].grad = torch.ones(3, 2)
        optimizer.step()
        found.append([p.detach().clone() for p in network])
        assert network[1] not in optimizer.state
    assert torch.equal(found[1][1], torch.full((3, 2), 2.0)) and not torch.equal(found[1][0], found[1][1])
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


class SlowLink(Link):
    """Hands over buffers that are used again, as the link to a card does."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"), 0)
        self.buffers = [torch.empty(10_000), torch.empty(10_000)]
        self.shapes: dict[int, torch.Size] = {}
        self.in_flight = self.most_in_flight = 0

    def fetch(self, slot: int, gradient: Tensor) -> None:
        self.buffers[slot].fill_(torch.nan)
        self.buffers[slot][: gradient.numel()].copy_(gradient.flatten())
        self.shapes[slot] = gradient.shape
        self.in_flight += 1
        self.most_in_flight = max(self.in_flight, self.most_in_flight)

    def arrived(self, slot: int) -> Tensor:
        self.in_flight -= 1
        return self.buffers[slot][: self.shapes[slot].numel()].view(self.shapes[slot])


def test_the_next_gradient_is_under_way_while_one_is_used() -> None:
    config = settings(learning_rate=0.01)
    plain, offloaded = (Training(config.changed(optimizer_offload=o), llama()) for o in (False, True))
    link = offloaded.optimizer.optimizer._link = SlowLink()
    for batch in batches(2):
        plain.step(batch)
        offloaded.step(batch)
    assert (link.in_flight, link.most_in_flight) == (0, 2)
    assert_same(offloaded.weights, plain.weights)


class AtOnce:
    """Stands for copies to and from a card, which here are over when they are begun; notes the host's buffers."""

    def __init__(self) -> None:
        self.buffer_bytes: list[int] = []
        self.places: set[int] = set()  # where gradients arrived

    def host_buffer(self, num_bytes: int) -> Tensor:
        self.buffer_bytes.append(num_bytes)
        return torch.empty(num_bytes, dtype=torch.uint8)

    def copy(self, pairs: list[tuple[Tensor, Tensor]]) -> Any:
        for target, source in pairs:
            target.copy_(source)
            self.places.add(target.data_ptr())
        return SimpleNamespace(synchronize=lambda: None)

    def wait(self, event: Any) -> None: ...


@pytest.mark.parametrize("in_backward", [False, True])
def test_two_page_locked_buffers_of_the_largest_weight_serve_every_step(
    in_backward: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's allocator of page-locked memory would round each gradient up to a power of two, and keep them all."""
    config, transfers = settings(learning_rate=0.01, max_grad_norm=None), AtOnce()
    monkeypatch.setattr(offload, "StreamTransfers", lambda device: transfers)
    monkeypatch.setattr(offload, "Link", lambda device, num_bytes: Link(DEVICE, num_bytes))
    offloaded = config.changed(optimizer_offload=True, optimizer_in_backward=in_backward)
    plain, found = (Training(each, llama()) for each in (config, offloaded))
    largest = max(p.nbytes for p in found.network.parameters())
    for batch in batches(3):
        plain.step(batch)
        found.step(batch)
    assert transfers.buffer_bytes == [largest, largest]
    weights = {p.data_ptr() for p in found.network.parameters()}
    assert len(transfers.places - weights) == (1 if in_backward else 2)  # one weight a step: the first slot
    assert_same(found.weights, plain.weights)


def test_a_weight_that_is_laid_out_otherwise_gets_its_own_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through a card's buffers, which are laid out row by row."""
    monkeypatch.setattr(offload, "StreamTransfers", lambda device: AtOnce())
    found, start, gradient = [], torch.randn(3, 4).t(), torch.randn(4, 3)
    for offloads in (False, True):
        weight = nn.Parameter(start.clone(memory_format=torch.preserve_format))
        assert weight.stride() == (1, 4)
        config = settings(learning_rate=0.1, optimizer_offload=offloads)
        optimizer = build_optimizer(nn.ParameterList([weight]), config, DEVICE)
        if offloads:
            optimizer._link = Link(torch.device("cuda"), weight.nbytes)  # type: ignore
        for _ in range(3):
            weight.grad = torch.empty_like(weight).copy_(gradient)
            optimizer.step()
        found.append(weight.detach())
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


def test_adafactor_moves_weights_in_bf16_as_far_as_in_fp32() -> None:
    moved, start, gradient = [], torch.randn(256, 256) / 16, torch.randn(256, 256)
    for dtype in ("float32", "bfloat16"):
        network = nn.Linear(256, 256, bias=False, dtype=getattr(torch, dtype))
        network.weight.data.copy_(start)
        before = network.weight.detach().float().clone()
        optimizer = build_optimizer(network, settings(optimizer="adafactor", learning_rate=0.01, dtype=dtype), DEVICE)
        for _ in range(20):
            network.weight.grad = (gradient / gradient.norm() / 4).to(network.weight.dtype)
            optimizer.step()
        moved.append((network.weight.detach().float() - before).square().mean().sqrt().item())
    assert moved[1] == pytest.approx(moved[0], rel=0.1)


# ---- in backward -----------------------------------------------------------------------------------------------------


IN_BACKWARD: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped by value": {"max_grad_value": 1e-3},
    "adafactor": {"optimizer": "adafactor"},
    "sgd": {"optimizer": "sgd"},
    "8 bits": {"optimizer": "adamw_8bit"},
    "offloaded": {"optimizer_offload": True},
    "checkpointed": {"checkpointing": "full"},
    "in chunks": {"loss": "chunked"},
    "checkpointed, in chunks": {"checkpointing": "selective", "loss": "chunked"},
    "1-norm": {"grad_norm_type": "1"},
    "largest": {"grad_norm_type": "inf"},
}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", IN_BACKWARD)
def test_in_backward_makes_the_same_update(name: str, tied: bool) -> None:
    values = dict(IN_BACKWARD[name])
    if values.get("optimizer") == "adamw_8bit":
        pytest.importorskip("bitsandbytes")
    checkpointing, loss = values.pop("checkpointing", "none"), values.pop("loss", "full")
    config = settings(learning_rate=0.01, weight_decay=0.1, max_grad_norm=None, **values)
    trainings = []
    for in_backward in (False, True):
        network = llama(tied)
        enable_checkpointing(network, checkpointing)
        trainings.append(Training(config.changed(optimizer_in_backward=in_backward), network, loss))
    for batch in batches(3):
        plain, found = (training.step(batch) for training in trainings)
        assert found.grad_norm == pytest.approx(plain.grad_norm, rel=1e-6)
        assert torch.equal(found.loss_sum, plain.loss_sum)
        assert not found.skipped
    assert_same(trainings[1].weights, trainings[0].weights)
    assert_same(trainings[1].state, trainings[0].state)


def test_in_backward_no_gradient_outlives_its_update() -> None:
    training = Training(settings(max_grad_norm=None, optimizer_in_backward=True), llama())
    alive: list[int] = []
    parameters = list(training.network.parameters())
    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(
            lambda _: alive.append(sum(p.grad is not None for p in parameters))
        )
    training.step(batches(1)[0])
    assert set(alive) == {1}
    assert all(p.grad is None for p in parameters)
    assert len(training.optimizer.param_groups[0]["params"]) > 1  # as they were


@pytest.mark.parametrize("optimizer", ["adamw", "adafactor"])
def test_in_backward_a_gradient_that_is_not_finite_stops_all_later_updates(optimizer: Any) -> None:
    config = settings(optimizer=optimizer, learning_rate=0.01, max_grad_norm=None, optimizer_in_backward=True)
    training = Training(config, llama(tied=False))
    training.step(batches(1)[0])
    before, state = training.weights, training.state
    weight = training.network.get_parameter("model.layers.1.mlp.up_proj.weight")
    handle = weight.register_hook(lambda gradient: gradient * torch.inf)
    outcome = training.step(batches(1)[0])
    handle.remove()
    assert outcome.skipped and not outcome.clipped
    assert not math.isfinite(outcome.grad_norm)
    after, names = training.weights, list(before)
    changed = {name for name in names if not torch.equal(before[name], after[name])}
    assert all(torch.isfinite(value).all() for value in after.values())
    assert "lm_head.weight" in changed  # its gradient came first
    assert not any(name.startswith(("model.layers.0", "model.embed", "model.layers.1.mlp.up")) for name in changed)
    for name, value in training.state.items():
        kept = name.rpartition(".")[0] not in changed
        assert torch.equal(value, state[name]) is kept, name
    assert not training.step(batches(1)[0]).skipped


def test_in_backward_a_loss_that_is_not_finite_stops_every_update(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(settings(max_grad_norm=None, optimizer_in_backward=True), llama())
    training.step(batches(1)[0])
    before, state = training.weights, training.state
    plain: Any = ModelWithLoss.forward
    monkeypatch.setattr(ModelWithLoss, "forward", lambda *a, **k: plain(*a, **k) + torch.inf)  # gradients stay finite
    outcome = training.step(batches(1)[0])
    assert outcome.skipped
    assert math.isnan(outcome.grad_norm)
    assert_same(training.weights, before)
    assert_same(training.state, state)


# ---- bf16 ------------------------------------------------------------------------------------------------------------


def test_rounding_at_random_is_right_on_average_and_exact_where_nothing_is_lost() -> None:
    value = torch.linspace(-3, 3, 4001)
    total = sum(round_at_random_(value.clone(), (0, step)).double() for step in range(400))
    apart = torch.tensor([2.0**-8]) * 4  # between neighbours in bf16 at 3 lies 2^-6
    assert (total / 400 - value).abs().max() < 5 * apart / 2 / 20  # five standard errors
    held = value.bfloat16().float()
    assert torch.equal(round_at_random_(held.clone(), (0, 1)), held)
    rounded = round_at_random_(value.clone(), (0, 1))
    assert torch.equal(rounded.bfloat16().float(), rounded)


def test_random_numbers_are_even_and_unrelated() -> None:
    cpu = torch.device("cpu")
    one, other = (random_halves(2**16, (0, 1, key), cpu).float() for key in (2, 3))
    assert torch.equal(one, random_halves(2**16, (0, 1, 2), cpu).float())
    for numbers in (one, other):
        counts = torch.bincount((numbers / 4096).long(), minlength=16)
        assert (counts - 4096).abs().max() < 5 * 64
    pairs = torch.corrcoef(torch.stack([one, other, one.roll(1)]))
    assert (pairs - torch.eye(3)).abs().max() < 5 / 256


def small_updates(update: str, steps: int = 400, seed: int = 42) -> Tensor:
    """(1000,) ones in bf16 after updates of a thousandth of their spacing's half, all in one direction."""
    weight = nn.Parameter(torch.ones(1000, dtype=torch.bfloat16))
    config = settings(learning_rate=2.0**-13, bf16_update=update, seed=seed)
    optimizer = build_optimizer(nn.ParameterList([weight]), config)
    for _ in range(steps):
        weight.grad = torch.full_like(weight, 0.5)
        optimizer.step()
    return weight.detach().float()


def test_random_numbers_are_those_of_the_run_and_the_step_whatever_the_rank() -> None:
    """Ranks seed their generators apart, and their weights have to stay the same."""
    found = []
    for rank in (0, 1):
        torch.manual_seed(rank)
        found.append(small_updates("stochastic", 20))
    assert torch.equal(*found)
    assert not torch.equal(small_updates("stochastic", 20, seed=1), found[0])


def test_small_updates_are_lost_by_rounding_to_the_nearest_alone() -> None:
    expected = 1 - 400 * 2.0**-13
    assert torch.equal(small_updates("nearest"), torch.ones(1000))
    assert small_updates("stochastic").mean() == pytest.approx(expected, abs=2e-3)
    assert torch.allclose(small_updates("kahan"), torch.tensor(expected), atol=2.0**-8)


@pytest.mark.parametrize("update", ["stochastic", "kahan"])
def test_updates_do_not_depend_on_how_a_parameter_is_cut(update: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kahan's sum is the same in any pieces; random numbers are those of each piece, so only their mean is."""
    from train.extras.optimizers import few_bits

    found = []
    for size in (2**18, 128):
        monkeypatch.setattr(few_bits, "CHUNK_ELEMENTS_ON_CPU", size)
        found.append(small_updates(update, 50))
    if update == "kahan":
        assert torch.equal(*found)
    else:
        assert found[0].mean().item() == pytest.approx(found[1].mean().item(), abs=2e-3)


def test_kahan_follows_fp32() -> None:
    torch.manual_seed(0)
    start = torch.randn(50, 40).bfloat16()
    weight, original = nn.Parameter(start.clone()), nn.Parameter(start.float())
    config = settings(learning_rate=1e-4, weight_decay=0.1)
    kahan = build_optimizer(nn.ParameterList([weight]), config.changed(bf16_update="kahan"))
    expected = build_optimizer(nn.ParameterList([original]), config)
    assert isinstance(kahan, Bf16AdamW)
    for _ in range(30):
        weight.grad = torch.randn(50, 40).bfloat16()
        original.grad = weight.grad.float()
        kahan.step()
        expected.step()
    whole = weight.float() - kahan.state[weight][ADDED].float()
    moved = (original - start.float()).abs().mean()
    assert (whole - original).abs().mean() < 0.05 * moved
    assert kahan.state[weight][ADDED].dtype == torch.bfloat16


def test_parameters_of_fp32_in_a_bf16_model_are_updated_as_by_adamw() -> None:
    one, other = (nn.Parameter(torch.linspace(-1, 1, 7)) for _ in range(2))
    config = settings(learning_rate=0.01, weight_decay=0.1)
    optimizers = [
        build_optimizer(nn.ParameterList([p]), config.changed(bf16_update=u))
        for p, u in ((one, "nearest"), (other, "kahan"))
    ]
    for _ in range(3):
        for parameter, optimizer in zip((one, other), optimizers, strict=True):
            parameter.grad = torch.linspace(0.1, 1, 7)
            optimizer.step()
    assert torch.allclose(one, other, rtol=1e-6)


# ---- 8 bits ----------------------------------------------------------------------------------------------------------


def test_eight_bits_keep_a_byte_per_moment_and_small_parameters_whole() -> None:
    pytest.importorskip("bitsandbytes")
    training = Training(settings(optimizer="adamw_8bit"), llama())
    training.step(batches(1)[0])
    types = {name: value.dtype for name, value in training.state.items() if name.endswith("state1")}
    assert types.pop("model.embed_tokens.weight.state1") == torch.uint8
    assert set(types.values()) == {torch.float32}
    large, small = (training.network.get_parameter(f"model.{n}.weight") for n in ("embed_tokens", "norm"))
    state = training.optimizer.optimizer.state
    assert sorted(state[large]) == ["absmax1", "absmax2", "state1", "state2", "step"]
    assert sorted(state[small]) == ["state1", "state2", "step"]


def test_eight_bits_follow_adamw() -> None:
    pytest.importorskip("bitsandbytes")
    trainings = [Training(settings(optimizer=o, learning_rate=0.01), llama()) for o in ("adamw", "adamw_8bit")]
    losses = [0.0, 1.0]
    for batch in batches(1) * 8:
        losses = [training.step(batch).loss_sum.item() for training in trainings]
    assert losses[1] == pytest.approx(losses[0], rel=0.02)


# ---- on a card -------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_card_offload_makes_the_update_of_the_host(dtype: torch.dtype, in_backward: bool) -> None:
    """The same gradients, many times, through streams and page-locked memory and without."""
    torch.manual_seed(0)
    start = [torch.randn(size, dtype=dtype) for size in [(700, 900), (3,), (1, 5), (2000, 1000), (64, 64)]]
    here, there = ([nn.Parameter(w.clone().to(d)) for w in start] for d in ("cpu", "cuda"))
    config = settings(learning_rate=0.01, weight_decay=0.1, optimizer_offload=True)
    optimizers = [build_optimizer(nn.ParameterList(weights), config, DEVICE) for weights in (here, there)]
    for step in range(20):
        for number, (host, device) in enumerate(zip(here, there, strict=True)):
            generator = torch.Generator().manual_seed(100 * step + number)
            host.grad = torch.randn(host.shape, dtype=dtype, generator=generator)
            device.grad = host.grad.to("cuda")
            if in_backward:  # one parameter a step
                for optimizer, parameter in zip(optimizers, (host, device), strict=True):
                    optimizer.step()
                    parameter.grad = None
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for host, device in zip(here, there, strict=True):
        assert torch.equal(host, device.cpu())
        assert all(value.device.type == "cpu" for value in optimizers[1].state[device].values())


@pytest.mark.gpu
@pytest.mark.parametrize("values", [{}, {"optimizer": "adamw_8bit"}, {"bf16_update": "kahan"}], ids=str)
def test_on_a_card_updates_in_backward_are_those_after_it(values: dict[str, Any]) -> None:
    if "optimizer" in values:
        pytest.importorskip("bitsandbytes")
    config = settings(learning_rate=0.01, max_grad_norm=None, **values)
    trainings = []
    for in_backward in (False, True):
        network = llama(dtype=torch.bfloat16 if "bf16_update" in values else torch.float32)
        trainings.append(Training(config.changed(optimizer_in_backward=in_backward), network, cpu=False))
    for batch in batches(3):
        plain, found = (training.step(batch) for training in trainings)
        assert found.grad_norm == pytest.approx(plain.grad_norm, rel=1e-2)
    for name, weight in trainings[0].weights.items():
        assert torch.allclose(trainings[1].weights[name], weight, rtol=1e-2, atol=1e-3), name


# ---- whole runs ------------------------------------------------------------------------------------------------------


RUNS: dict[str, tuple[Any, ...]] = {
    "8 bits": ("--optimizer", "adamw_8bit"),
    "offloaded, bf16": ("--optimizer_offload", True, "--dtype", "bfloat16"),
    "in backward": ("--optimizer_in_backward", True, "--max_grad_norm", None, "--global_batch_size", 2),
    "stochastic": ("--bf16_update", "stochastic", "--dtype", "bfloat16"),
    "kahan": ("--bf16_update", "kahan", "--dtype", "bfloat16"),
}


@pytest.mark.parametrize(
    "name", [n if n in ("offloaded, bf16", "in backward") else pytest.param(n, marks=pytest.mark.slow) for n in RUNS]
)
def test_a_run_stopped_and_resumed_equals_one_that_was_not(
    name: str, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "8 bits":
        pytest.importorskip("bitsandbytes")
        recipe.write_text(recipe.read_text().replace("n_embd: 16", "n_embd: 32"))  # else all is too small for 8 bits
    if name.startswith("offloaded"):
        plain = Extra.build_optimizer
        monkeypatch.setattr(
            Extra, "build_optimizer", lambda extra, config, groups, _: plain(extra, config, groups, DEVICE)
        )
    flags = (*RUNS[name], "--max_steps", 4, "--rehearse", False)
    assert train(recipe, tmp_path / "whole", *flags) == EXIT_DONE
    assert train(recipe, tmp_path / "pieces", *flags, *stopping_after(2)) == EXIT_STOPPED
    assert train(recipe, tmp_path / "pieces", *flags) == EXIT_DONE
    found = [checkpoint_digests(tmp_path / run, 4) for run in ("whole", "pieces")]
    assert found[0] == found[1]
    assert len(found[0]) >= 2
    [path] = (tmp_path / "whole" / "checkpoints" / "step-00000004").glob("optimizer-*.safetensors")
    names = {entry.rpartition(".")[2] for entry in load_file(path)}
    kept = {"8 bits": "absmax1", "offloaded, bf16": MASTER, "kahan": ADDED}.get(name, "exp_avg")
    assert kept in names


def test_on_a_cpu_offload_changes_nothing(recipe: Path, tmp_path: Path) -> None:
    assert train(recipe, tmp_path / "one", "--max_steps", 2) == EXIT_DONE
    assert train(recipe, tmp_path / "two", "--max_steps", 2, "--optimizer_offload", True) == EXIT_DONE
    assert checkpoint_digests(tmp_path / "one", 2) == checkpoint_digests(tmp_path / "two", 2)


IN_BACKWARD_FLAGS = ("--optimizer_in_backward", True, "--max_grad_norm", None)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ("--optimizer_offload", True, "--optimizer", "sgd"),
            "optimizer_offload cannot be combined with optimizer: sgd: use adamw",
        ),
        (("--optimizer_offload", True, "--dtype", "float16", "--adapter", "lora"), "dtype: float16: use bfloat16"),
        (
            ("--bf16_update", "kahan"),
            "kahan cannot be combined with dtype: float32: use bfloat16, or nearest",
        ),
        (("--bf16_update", "kahan", "--dtype", "bfloat16", "--optimizer", "sgd"), "kahan .* optimizer: sgd: use adamw"),
        (
            ("--bf16_update", "stochastic", "--dtype", "bfloat16", "--optimizer_offload", True),
            "stochastic cannot be combined with optimizer_offload: the host updates fp32 originals already",
        ),
        (
            ("--optimizer_in_backward", True, "--global_batch_size", 2),
            "optimizer_in_backward cannot be combined with max_grad_norm: 1.0: .* max_grad_norm: null",
        ),
        (
            (*IN_BACKWARD_FLAGS, "--max_tokens_per_micro_batch", 64),
            "optimizer_in_backward cannot be combined with several micro-batches in a step: .* micro_batch_size",
        ),
        (
            (*IN_BACKWARD_FLAGS, "--gradient_accumulation_steps", 4),
            "optimizer_in_backward cannot be combined with several .*: gradients .* gradient_accumulation_steps: 1",
        ),
        (IN_BACKWARD_FLAGS, "several micro-batches in a step: gradients cannot be accumulated"),
        ((*IN_BACKWARD_FLAGS, "--global_batch_size", 2, "--mixed_precision", "fp16"), "fp16: .* bf16"),
    ],
)
def test_options_that_contradict_each_other_stop_the_run(
    flags: tuple[Any, ...], message: str, recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(recipe, tmp_path / "run", *flags) == EXIT_USAGE
    assert re.search(message, capsys.readouterr().err)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("launch", "values", "message"),
    [
        (Launch(2, engine="fsdp2"), {"optimizer": "adamw_8bit"}, "engine fsdp2 .* adamw_8bit: .* fsdp2_offload.yaml"),
        (Launch(2, engine="fsdp2"), {"optimizer": "adafactor"}, "engine fsdp2 .* adafactor: .* whole weights"),
        (Launch(2, engine="deepspeed"), {"optimizer": "adafactor"}, "engine deepspeed .* adafactor: .* whole weights"),
        (Launch(2, tp_size=2), {"optimizer": "adafactor"}, "tensor parallel 2 .* adafactor: .* whole weights"),
        (Launch(2, engine="fsdp2"), {"optimizer_offload": True}, "optimizer_offload: .* fsdp2_offload.yaml"),
        (
            Launch(2, engine="deepspeed"),
            {"optimizer_offload": True},
            "engine deepspeed .* deepspeed_zero3_offload",
        ),
        (Launch(2, tp_size=2), {"bf16_update": "kahan"}, "tensor parallel 2 .* bf16_update: kahan: .* ddp.yaml"),
        (
            Launch(2),
            {"optimizer_in_backward": True},
            "optimizer_in_backward cannot be combined with 2 processes: .* Use one process",
        ),
        (
            Launch(2),  # what one micro-batch would do is not asked where several processes are refused anyway
            {"optimizer_in_backward": True, "micro_batch_size": 3, "global_batch_size": 6},
            "optimizer_in_backward cannot be combined with 2 processes: .* Use one process",
        ),
        (
            Launch(precision="fp16"),
            {"optimizer_in_backward": True},
            "optimizer_in_backward cannot be combined with mixed_precision: fp16: .* use bf16",
        ),
    ],
)
def test_optimizers_that_need_whole_weights_say_so(launch: Launch, values: dict[str, Any], message: str) -> None:
    dtype = "bfloat16" if "bf16_update" in values else "float32"
    config = settings(dtype=dtype, max_grad_norm=None, **values)
    with pytest.raises(UsageError, match=message):
        extras.check(config, launch)
    if "optimizer_in_backward" not in values and "optimizer" not in values:
        extras.check(config, Launch(2))


def test_the_file_of_a_cpu_computes_in_no_fp16(monkeypatch: pytest.MonkeyPatch) -> None:
    """cpu.yaml says fp16, which a CPU takes for bf16 or fp32."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    extras.check(settings(max_grad_norm=None, optimizer_in_backward=True), Launch(precision="fp16"))


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install -e '.\[bitsandbytes\]'"):
        extras.check(settings(optimizer="adamw_8bit"), Launch())


def test_updates_in_backward_take_the_place_of_the_plain_engine_where_they_are_asked_for() -> None:
    for in_backward in (False, True):
        config = settings(max_grad_norm=None, optimizer_in_backward=in_backward)
        run = run_for(config)
        mark = [].append
        engine = Engine(run.accelerator, config, mark)
        wrapped = Extra().wrap_step(run, engine)
        assert isinstance(wrapped, InBackward) is in_backward
        assert wrapped is engine or in_backward
        assert wrapped.mark is mark


def test_out_of_memory_is_split_by_itself_only_where_a_step_can_be_made_again() -> None:
    if "on_oom" not in fields():
        pytest.skip("train/extras/endurance/ is not here")
    for in_backward in (False, True):
        config = settings(max_grad_norm=None, optimizer_in_backward=in_backward)
        run = run_for(config)
        engine = run.extras.pipe("wrap_step", run, Engine(run.accelerator, config))
        assert isinstance(engine, InBackward) is in_backward
        assert type(engine) is not Engine  # recovery's, or the one in backward, which cannot be made again


def test_sgd_takes_its_momentum() -> None:
    config = from_values({"optimizer": "sgd", "sgd_momentum": 0.6, "learning_rate": 0.2})
    optimizer = optim.build_optimizer(run_for(config), nn.Linear(2, 2))
    assert isinstance(optimizer, torch.optim.SGD)
    assert {(group["momentum"], group["lr"]) for group in optimizer.param_groups} == {(0.6, 0.2)}
    assert optimizer.defaults["foreach"] is False  # which copies all gradients where weights decay


@pytest.mark.parametrize("asked", ["fp16", None])
def test_fp16_is_refused_where_shards_are_on_the_host(asked: str | None) -> None:
    """torch's scaler copies its scale to the host without waiting, and reads it there at once."""
    sharded = {"WORLD_SIZE": "2", "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
    config = Config().changed(model="x", mixed_precision=asked)
    precision = {} if asked else {"ACCELERATE_MIXED_PRECISION": "fp16"}
    extras.check(config, read_launch({**sharded, **precision}))
    with pytest.raises(UsageError, match=r"fsdp_offload_params: true .* Use mixed_precision: bf16 or no"):
        extras.check(config, read_launch({**sharded, **precision, "FSDP_OFFLOAD_PARAMS": "true"}))
