"""Inputs of checkpointed layers that rest elsewhere: same gradients, originals let go, copies ahead."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from test_model import CAUSAL, GPT2, LLAMA, batch, built
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint as checkpoint_of_torch
from transformers import PretrainedConfig, PreTrainedModel

from train.config import check, from_values
from train.extras.activations import recompute
from train.extras.activations.recompute import OffloadedInputs, enable_checkpointing
from train.extras.host_memory import StreamTransfers
from train.model import ModelWithLoss
from train.records import UsageError

DEEP = {**LLAMA, "num_hidden_layers": 4}
DROPPING = {**GPT2, "n_positions": 128, "resid_pdrop": 0.2, "embd_pdrop": 0.2, "attn_pdrop": 0.0}


class LazyCopies:
    """Stands in for streams: copies into memory of its own, each as late as the order of a stream allows.

    A copy that nobody waits for is not made. So whoever uses what is copied too early finds rubbish, and a source that
    is let go, or a target that is, before it may be is noticed.
    """

    def __init__(self) -> None:
        self.begun: list[list[tuple[Callable[[], Tensor | None], Callable[[], Tensor | None]]]] = []
        self.made = 0
        self.buffers: list[Tensor] = []
        self.log: list[str] = []
        self.fail_at: int | None = None

    def host_buffer(self, num_bytes: int) -> Tensor:
        self.buffers.append(torch.full((num_bytes,), 255, dtype=torch.uint8))
        return self.buffers[-1]

    def copy(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> int:
        self.log.append("out" if self._is_host(pairs[0][0]) else "in")
        if self.log.count("out") + self.log.count("in") == self.fail_at:
            raise torch.OutOfMemoryError("CUDA out of memory")
        for target, source in pairs:
            assert self._is_host(target) != self._is_host(source)
        # what is on the device is only kept by the one who asks
        self.begun.append([(_held(target), _held(source)) for target, source in pairs])
        return len(self.begun)

    def wait(self, event: int) -> None:
        self.log.append(f"wait {event}")
        while self.made < event:
            for target, source in self.begun[self.made]:
                to, of = target(), source()
                assert to is not None and of is not None, "let go before its copy was made"
                to.copy_(of)
            self.made += 1

    def _is_host(self, tensor: Tensor) -> bool:
        return any(tensor.untyped_storage()._cdata == b.untyped_storage()._cdata for b in self.buffers)


def _held(tensor: Tensor) -> Callable[[], Tensor | None]:
    """The tensor for as long as somebody else keeps its storage."""
    storage = StorageWeakRef(tensor.untyped_storage())
    shape = (tensor.dtype, tensor.storage_offset(), tensor.numel())

    def tensor_again() -> Tensor | None:
        found = torch.UntypedStorage._new_with_weak_ptr(storage.cdata)
        if found is None:
            return None
        dtype, offset, size = shape
        return torch.empty(0, dtype=dtype).set_(found, offset, (size,))  # type: ignore

    return tensor_again


def offloaded(model: nn.Module, transfers: LazyCopies, mode: str = "full", every: int = 1) -> OffloadedInputs:
    """Switches offload on."""
    enable_checkpointing(model, mode, every, offload=True)
    found = {m._gradient_checkpointing_func for m in model.modules() if hasattr(m, "_gradient_checkpointing_func")}
    (offload,) = found
    assert isinstance(offload, OffloadedInputs)
    offload.transfers = {torch.device("cpu"): transfers}  # type: ignore
    return offload


def step(model: nn.Module, times: int = 1, length: int = 100) -> tuple[float, dict[str, Tensor]]:
    model.train()
    model.zero_grad()
    torch.manual_seed(1)
    loss = 0.0
    for _ in range(times):
        inputs, labels = batch(length)
        part = ModelWithLoss(model)(inputs, labels)
        part.backward()
        loss += part.item()
    return loss, {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys() and len(found) > 10
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-12, atol=1e-14, msg=name)


@pytest.mark.parametrize(("mode", "every"), [("full", 1), ("selective", 1), ("full", 2), ("full", 3)])
@pytest.mark.parametrize(
    "config",
    [DEEP, {**GPT2, "n_positions": 128, "resid_pdrop": 0.2, "embd_pdrop": 0.2, "attn_pdrop": 0.0}],
    ids=["llama", "gpt2"],
)
def test_offload_changes_neither_loss_nor_gradients(config: dict[str, Any], mode: str, every: int) -> None:
    expected = step(built(config).double(), times=2)
    model, transfers = built(config).double(), LazyCopies()
    offload = offloaded(model, transfers, mode, every)
    for _ in range(2):  # the second step uses the memory of the first
        loss, found = step(model, times=2)
        assert loss == expected[0]
        assert_same(found, expected[1])
    layers = -(-built(config).config.num_hidden_layers // every)
    per_input = -(-2 * 100 * 16 * 8 // recompute.PIECE_BYTES)
    assert len(transfers.buffers) == len(offload._free) == layers * per_input  # of one micro-batch, made once
    assert transfers.log.count("out") == layers * 4
    assert transfers.log.count("in") == (layers - 1) * 4  # the last one is still there


def test_inputs_of_earlier_layers_are_let_go_in_forward_and_brought_back_one_ahead() -> None:
    model, transfers = built(DEEP).double(), LazyCopies()
    offloaded(model, transfers)
    seen: list[StorageWeakRef] = []
    alive: list[tuple[str, list[int]]] = []

    def look(when: str) -> None:
        transfers.log.append(when)
        alive.append((when, [number for number, ref in enumerate(seen) if not ref.expired()]))

    layers: Any = model.base_model.layers
    for layer in layers:
        layer.register_forward_pre_hook(lambda m, args: seen.append(StorageWeakRef(args[0].untyped_storage())))
        layer.mlp.register_forward_pre_hook(lambda m, args: look("mlp"))
    model.train()
    inputs, labels = batch(100)
    loss = ModelWithLoss(model)(inputs, labels)
    look("loss")
    assert [numbers for _, numbers in alive] == [
        [0],
        [0, 1],
        [0, 2],
        [0, 3],
        [3],
    ]  # the first: the model's own variable
    transfers.log.clear()
    loss.backward()
    # each layer waits for its own input, then that of the layer before it begins to come, then the layer computes
    one_ahead = [word for event in (4, 5, 6) for word in (f"wait {event}", "in", "mlp")]
    assert transfers.log == [*one_ahead, "wait 7", "mlp"]
    look("after")
    assert alive[-1] == ("after", [])


@pytest.mark.parametrize(("large", "long", "late"), [(0, 0, True), (0, 1, False), (1, 0, False)])
def test_a_large_input_of_a_long_sequence_comes_back_only_when_it_is_needed(
    large: int, long: int, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recompute, "MAX_AHEAD_BYTES", 2 * 100 * 16 * 8 - 1 + large)
    monkeypatch.setattr(recompute, "LONG_TOKENS", 100 + long)
    expected = step(built(DEEP).double())[1]
    model, transfers = built(DEEP).double(), LazyCopies()
    offloaded(model, transfers)
    layers: Any = model.base_model.layers
    for layer in layers:
        layer.mlp.register_forward_pre_hook(lambda m, args: transfers.log.append("mlp"))
    assert_same(step(model)[1], expected)
    ahead = [*(word for event in (4, 5, 6) for word in (f"wait {event}", "in", "mlp")), "wait 7", "mlp"]
    when_needed = ["wait 4", "mlp", *(word for event in (5, 6, 7) for word in ("in", f"wait {event}", "mlp"))]
    assert transfers.log[-11:] == (when_needed if late else ahead)


def test_the_output_of_a_frozen_embedding_is_let_go_too() -> None:
    model, transfers = built(DEEP).double(), LazyCopies()
    model.get_input_embeddings().weight.requires_grad_(False)
    offloaded(model, transfers)
    seen: list[StorageWeakRef] = []
    layers: Any = model.base_model.layers
    layers[0].register_forward_pre_hook(lambda m, args: seen.append(StorageWeakRef(args[0].untyped_storage())))
    model.train()
    inputs, labels = batch(100)
    loss = ModelWithLoss(model)(inputs, labels)
    assert transfers.log.count("out") == 4 and seen[0].expired()
    loss.backward()
    expected = step(built(DEEP).double())[1]
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert_same(found, {name: expected[name] for name in found})


class OfItsOwn(PreTrainedModel):
    """A model of the format that transformers still takes, which calls torch's reentrant checkpoint by itself."""

    config_class, supports_gradient_checkpointing = PretrainedConfig, True

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config)
        self.table, self.head = nn.Embedding(10, 8), nn.Linear(8, 10)
        self.layers, self.recomputes = nn.ModuleList(nn.Linear(8, 8) for _ in range(3)), False
        self.post_init()

    def _set_gradient_checkpointing(self, module: nn.Module, value: bool = False) -> None:  # type: ignore
        self.recomputes = value

    def get_input_embeddings(self) -> nn.Module:
        return self.table

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.table(input_ids)
        for layer in self.layers:
            hidden = checkpoint_of_torch(layer, hidden, use_reentrant=True) if self.recomputes else layer(hidden)
        return self.head(hidden)


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.filterwarnings("ignore")
def test_a_model_with_checkpoints_of_its_own_trains_behind_a_frozen_embedding(offload: bool) -> None:
    found = []
    for mode in ("none", "full"):
        torch.manual_seed(0)
        model = OfItsOwn(PretrainedConfig()).train()
        model.table.requires_grad_(False)
        enable_checkpointing(model, mode, offload=offload)
        model(torch.arange(10)[None]).sum().backward()
        found.append({n: p.grad for n, p in model.named_parameters() if p.requires_grad})
    assert found[0].keys() == found[1].keys() and len(found[0]) == 8
    torch.testing.assert_close(found[1], found[0])


def test_a_layer_is_recomputed_with_what_it_was_given_whatever_became_of_it() -> None:
    """Backward twice through one graph."""
    model, transfers = built(DEEP).double(), LazyCopies()
    offloaded(model, transfers)
    model.train()
    inputs, labels = batch(100)
    loss = ModelWithLoss(model)(inputs, labels)
    loss.backward(retain_graph=True)
    once = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    loss.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, 2 * once[name], rtol=1e-12, atol=1e-14)


def test_small_tensors_and_evaluation_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    model, transfers = built(DEEP), LazyCopies()
    offloaded(model, transfers)
    inputs, labels = batch(100)
    with torch.no_grad():
        ModelWithLoss(model.train())(inputs, labels)
    ModelWithLoss(model.eval())(inputs, labels).backward()
    monkeypatch.setattr(recompute, "MIN_OFFLOADED_BYTES", 10**6)
    step(model)
    assert transfers.log == []


def test_what_several_layers_share_is_not_copied() -> None:
    transfers = LazyCopies()
    shared, mask = torch.randn(3, 50).mul(2).requires_grad_(), torch.ones(3, 50)
    weights = nn.Parameter(torch.randn(3, 50))

    def checkpoint(function: Any, *inputs: Any) -> Any:
        return checkpoint_of_torch(function, *inputs, use_reentrant=False)

    offload = OffloadedInputs(checkpoint)
    offload.transfers = {torch.device("cpu"): transfers}  # type: ignore
    out, encoded = shared * 1, shared * 3
    for _ in range(3):
        out = offload(lambda x, e, m, w: (x * e * m * w).sin(), out, encoded, mask, weights)
    out.sum().backward()
    assert transfers.log.count("out") == 3
    found, shared.grad, grad_of_weights, weights.grad = shared.grad, None, weights.grad, None
    out, encoded = shared * 1, shared * 3
    for _ in range(3):
        out = (out * encoded * mask * weights).sin()
    out.sum().backward()
    torch.testing.assert_close(found, shared.grad)
    torch.testing.assert_close(grad_of_weights, weights.grad)


@pytest.mark.parametrize("fail_at", [2, 5, 7])
def test_memory_is_free_again_after_an_exception(fail_at: int) -> None:
    """In forward or backward; and the next step is right."""
    expected = step(built(DEEP).double())[1]
    model, transfers = built(DEEP).double(), LazyCopies()
    offload = offloaded(model, transfers)
    step(model)
    transfers.log.clear()
    transfers.fail_at = fail_at
    with pytest.raises(torch.OutOfMemoryError):
        step(model)
    gc.collect()  # as recovery does: frames of an exception may form circles
    assert len(offload._free) == len(transfers.buffers)
    transfers.fail_at = None
    buffers = len(transfers.buffers)
    assert_same(step(model)[1], expected)
    assert len(transfers.buffers) == buffers


def test_shorter_and_longer_batches_share_the_memory() -> None:
    model, transfers = built(DEEP).double(), LazyCopies()
    offload = offloaded(model, transfers)
    step(model, length=100)
    most = len(transfers.buffers)
    for length in (7, 64, 99, 100):
        expected = step(built(DEEP).double(), length=length)[1]
        assert_same(step(model, length=length)[1], expected)
    assert len(transfers.buffers) == len(offload._free) == most


def test_on_a_cpu_there_is_nothing_to_do() -> None:
    model = built(DEEP, CAUSAL, gradient_checkpointing="full", gradient_checkpointing_offload=True).double()
    assert_same(step(model)[1], step(built(DEEP).double())[1])
    (offload,) = {m._gradient_checkpointing_func for m in model.modules() if hasattr(m, "_gradient_checkpointing_func")}
    assert isinstance(offload, OffloadedInputs) and offload._free == []


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.times = nn.Linear(8, 8), 0

    def forward(self, hidden: Tensor) -> Tensor:
        self.times += 1
        return self.linear(hidden).relu()


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.layers = nn.Embedding(300, 8), nn.ModuleList(Counted() for _ in range(4))

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.table(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


def test_layers_of_ones_own_recompute_where_they_are_told_and_in_training_alone() -> None:
    model = Stack()
    enable_checkpointing(model, "full", every_n_layers=2)
    checkpoints: list[int] = []
    layer: Any
    for number, layer in enumerate(model.layers):
        plain = layer._gradient_checkpointing_func
        layer._gradient_checkpointing_func = lambda *given, n=number, to=plain: checkpoints.append(n) or to(*given)  # type: ignore
        layer.times = 0  # type: ignore
    model.train()(torch.arange(6)[None]).sum().backward()
    assert [layer.times for layer in model.layers] == [2, 1, 2, 1] and checkpoints == [0, 2]
    model.eval()(torch.arange(6)[None])
    with torch.no_grad():
        model.train()(torch.arange(6)[None])
    assert checkpoints == [0, 2]


@pytest.mark.gpu
def test_offload_on_a_card_gives_the_same_gradients_and_takes_less() -> None:
    device = torch.device("cuda")

    def on_card(**settings: Any) -> tuple[int, dict[str, Tensor]]:
        wide = {**DEEP, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 8}
        gc.collect()
        before = torch.cuda.memory_allocated()  # what other tests left
        network: Any = built(wide, max_length=2048, **settings)
        model, held = network.to(device).train(), 0
        inputs = {"input_ids": torch.randint(3, 250, (2, 2048), generator=torch.Generator().manual_seed(0)).to(device)}
        for _ in range(3):
            model.zero_grad()
            torch.cuda.reset_peak_memory_stats()
            hidden = model.base_model(**inputs).last_hidden_state
            held = torch.cuda.memory_allocated() - before
            hidden.square().sum().backward()
        return held, {n: p.grad.cpu() for n, p in model.named_parameters() if p.grad is not None}

    on_card(gradient_checkpointing="full")  # libraries take their workspaces
    full, expected = on_card(gradient_checkpointing="full")
    rested, found = on_card(gradient_checkpointing="full", gradient_checkpointing_offload=True)
    assert full - rested == pytest.approx(7 * 2 * 2048 * 256 * 4, rel=0.1)
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-5, msg=name)
    assert isinstance(StreamTransfers(device).host_buffer(8), Tensor)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"gradient_checkpointing_offload": True}, "gradient_checkpointing_offload needs gradient_checkpointing"),
        (
            {"gradient_checkpointing": "auto", "gradient_checkpointing_every_n_layers": 2},
            "gradient_checkpointing_every_n_layers: 2: it chooses that itself",
        ),
        ({"memory_budget_gib": 0.0}, "memory_budget_gib: 0.0 is not valid: it must be above 0"),
    ],
)
def test_settings_that_cannot_work_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check(from_values({"model_config": {"model_type": "llama"}, "tokenizer": "bytes", **values}))


class CountProducts(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore
        self.number += any(part in function.__name__ for part in ("bmm", "scaled_dot_product"))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(("attention", "of_the_second"), [("sdpa", 0), ("eager", 4)])
def test_selective_computes_attention_again_only_where_it_is_several_operations(
    attention: str, of_the_second: int
) -> None:
    products = {}
    for mode in ("none", "selective"):
        model = built(LLAMA, max_length=128).train()
        model.set_attn_implementation(attention)
        enable_checkpointing(model, mode)
        with CountProducts() as count:
            step(model)
        products[mode] = count.number
    assert products["selective"] - products["none"] == of_the_second  # two layers: queries · keys, weights · values


@torch.library.custom_op("tests::_scaled_dot_product_flash_attention", mutates_args=())
def drawing_attention(values: Tensor, dropout_p: float) -> tuple[Tensor, Tensor]:
    """As a card's kernel, which draws the mask within; a CPU's attention with dropout is many operators."""
    mask = (torch.rand_like(values) >= dropout_p) / (1 - dropout_p) if dropout_p else torch.ones_like(values)
    return values * mask, mask


drawing_attention.register_autograd(  # type: ignore
    lambda ctx, grad, _: (grad * ctx.saved_tensors[0], None),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output[1]),
)


@pytest.mark.parametrize("attention_dropout", [0.2, 0.0])
def test_dropout_in_attention_and_after_it_is_the_same_in_the_second_computation(
    attention_dropout: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    attend = nn.functional.scaled_dot_product_attention

    def attention(*heads: Any, dropout_p: float = 0.0, **rest: Any) -> Tensor:
        return drawing_attention(attend(*heads, **rest), dropout_p)[0]

    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", attention)
    config = {**GPT2, "attn_pdrop": attention_dropout, "resid_pdrop": 0.2, "embd_pdrop": 0.0}
    found = {}
    for mode in ("none", "full", "selective"):
        model = built(config, max_length=128).train()
        enable_checkpointing(model, mode)
        found[mode] = step(model)[1]
    assert found["none"] and all(gradient.any() for gradient in found["none"].values())
    for mode in ("full", "selective"):
        for name, gradient in found["none"].items():
            torch.testing.assert_close(found[mode][name], gradient, rtol=0, atol=0, msg=f"{mode} {name}")


@pytest.mark.gpu
@pytest.mark.parametrize("attention_dropout", [0.2, 0.0])  # where it is 0, no kernel may draw random numbers
def test_on_a_card_dropout_is_the_same_in_the_second_computation(attention_dropout: float) -> None:
    config = {**GPT2, "n_embd": 128, "attn_pdrop": attention_dropout, "resid_pdrop": 0.2, "embd_pdrop": 0.0}
    found = {}
    for mode in ("none", "full", "selective"):
        model: Any = built(config, max_length=512)
        model = model.to("cuda", torch.bfloat16).train()
        enable_checkpointing(model, mode)
        torch.manual_seed(1)
        ids = (torch.arange(1024, device="cuda") % 250).view(2, 512)
        ModelWithLoss(model)({"input_ids": ids}, ids.clone()).backward()
        found[mode] = torch.cat([p.grad.float().flatten() for p in model.parameters() if p.grad is not None])
    for mode in ("full", "selective"):  # other masks differ by some 20 %
        assert (found[mode] - found["none"]).norm() < 0.03 * found["none"].norm(), mode
