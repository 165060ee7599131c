"""MLPs in tiles: the same loss and gradients, less memory, gradients that arrive once, no forward too many."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from test_model import CAUSAL, GPT2, LLAMA, MASKED, SHAPE
from test_model import built as built_for
from test_recompute import LazyCopies, offloaded
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from train.extras.activations import tiling
from train.extras.activations.tiling import MAX_TILE_TOKENS, MIN_TILE_TOKENS, Tiled, parts_to_tile, tile_mlps
from train.model import ModelWithLoss
from train.records import UserError

built = partial(built_for, max_length=128)
MODELS = {
    "llama": (LLAMA, CAUSAL),
    "gpt2": ({**GPT2, "n_positions": 128, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}, CAUSAL),
    "modernbert": ({"model_type": "modernbert", **SHAPE}, MASKED),
    "qwen3, tied": (
        {"model_type": "qwen3", **SHAPE, "num_key_value_heads": 1, "head_dim": 8, "tie_word_embeddings": True},
        CAUSAL,
    ),
    # whose layers add to what an MLP gave in place
    "falcon": ({"model_type": "falcon", "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}, CAUSAL),
    "gemma2": ({"model_type": "gemma2", **SHAPE, "num_key_value_heads": 1, "head_dim": 8}, CAUSAL),
}


def step(model: nn.Module, times: int = 1, length: int = 100) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of ``times`` micro-batches of two examples."""
    model.train()
    torch.manual_seed(1)
    loss = 0.0
    for number in range(times):
        ids = torch.arange(3 + number, 3 + number + 2 * length).view(2, length)
        part = ModelWithLoss(model)({"input_ids": ids}, ids)
        part.backward()
        loss += part.item()
    return loss, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def assert_same(
    found: dict[str, Tensor], expected: dict[str, Tensor], rtol: float = 1e-10, norms_in_fp32: bool = False
) -> None:
    assert found.keys() == expected.keys() and len(found) > 2
    for name, gradient in found.items():
        # Gemma's norms sum the gradient of their weights in fp32, whatever the type: tiles in another order
        own = max(rtol, 1e-5) if norms_in_fp32 and "norm" in name else rtol
        torch.testing.assert_close(gradient, expected[name], rtol=own, atol=own * 1e-2, msg=name)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("tile", [pytest.param(1, marks=pytest.mark.slow), 33, 200, 1000])
def test_tiles_change_neither_loss_nor_gradients(name: str, tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """fp64; weights' gradients are summed in another order. No tile has fewer tokens than the model's width."""
    monkeypatch.setattr(tiling, "MIN_TILE_TOKENS", tile)
    expected = step(built(*MODELS[name]).double(), times=2)
    model = built(*MODELS[name], tiled_mlp=True).double()
    mlps, norms = parts_to_tile(model)
    assert len(mlps) == 2 and len(norms) >= 2
    assert all(isinstance(module, Tiled) for module in (*mlps, *norms))
    loss, found = step(model, times=2)
    assert loss == pytest.approx(expected[0], rel=1e-12)
    assert_same(found, expected[1], norms_in_fp32=name == "gemma2")


@pytest.mark.parametrize("mode", ["full", "selective"])
@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_all_together_change_neither_loss_nor_gradients(name: str, every: int, mode: str) -> None:
    config, task = MODELS[name]
    config = {**config, "num_hidden_layers": 3}
    expected = step(built(config, task).double(), times=2)
    model, transfers = built(config, task, tiled_mlp=True).double(), LazyCopies()
    offloaded(model, transfers, mode, every)
    loss, found = step(model, times=2)
    assert transfers.log.count("out") == 2 * (3 if every == 1 else 2)
    assert loss == pytest.approx(expected[0], rel=1e-12)
    assert_same(found, expected[1], norms_in_fp32=name == "gemma2")


def test_in_fp32_and_bf16_gradients_are_as_near_the_truth_as_without_tiles() -> None:
    """fp32 to 1e-5 of each tensor's norm. bf16 weights: sums over tiles are fp32, so errors do not grow with them."""
    truth = step(built(LLAMA).double())[1]

    def errors(dtype: Any, autocast: Any = False, **settings: Any) -> dict[str, float]:
        model: Any = built(LLAMA, **settings)
        model = model.to(dtype)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            ids = torch.arange(3, 203).view(2, 100)
            loss = ModelWithLoss(model.train())({"input_ids": ids}, ids)
        loss.backward()
        return {
            n: ((p.grad.double() - truth[n]).norm() / truth[n].norm()).item()
            for n, p in model.named_parameters()
            if p.grad is not None
        }

    tiled: dict[str, Any] = {"tiled_mlp": True}
    assert max(errors(torch.float32, **tiled).values()) < 1e-5
    for kind in ({"dtype": torch.bfloat16}, {"dtype": torch.float32, "autocast": True}):
        whole, in_tiles = errors(**kind), errors(**kind, **tiled)
        assert whole.keys() == in_tiles.keys()
        assert all(in_tiles[name] < 1.3 * whole[name] for name in whole)


def test_dropout_drops_in_backward_what_it_dropped_in_forward() -> None:
    """Against the same tiles under plain autograd, which draws the same numbers."""
    config = {"model_type": "modernbert", **SHAPE, "mlp_dropout": 0.5}
    mlp = parts_to_tile(built(config, MASKED))[0][0].double().train()
    hidden = torch.randn(2, 30, 16, dtype=torch.float64, requires_grad=True)
    torch.manual_seed(3)
    expected = torch.cat([mlp(part) for part in hidden.view(60, 16).split(30)]).view(2, 30, 16)
    after = torch.get_rng_state()
    weights = torch.randn_like(expected)
    expected_gradients = torch.autograd.grad(expected, [hidden, *mlp.parameters()], weights)
    model = built(config, MASKED)
    tile_mlps(model)
    tiled = parts_to_tile(model)[0][0].double().train()
    tiled.load_state_dict(mlp.state_dict())
    torch.manual_seed(3)
    found = tiled(hidden)
    assert torch.equal(torch.get_rng_state(), after)
    torch.testing.assert_close(found, expected)
    torch.manual_seed(4)
    before = torch.get_rng_state()
    gradients = torch.autograd.grad(found, [hidden, *tiled.parameters()], weights)
    assert torch.equal(torch.get_rng_state(), before)  # backward leaves the random state alone
    for one, other in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)
    assert not torch.equal(tiled(hidden), tiled(hidden))


def test_frozen_weights_and_added_ones_get_what_is_theirs() -> None:
    """As adapters make it: some weights frozen, further ones within the MLP; and hidden states without a gradient."""

    class Adapted(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base, self.down, self.up = base, nn.Linear(16, 2, bias=False), nn.Linear(2, 24, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) + self.up(self.down(x))

    def adapted(**settings: Any) -> nn.Module:
        model: Any = built(LLAMA, **settings)
        model.requires_grad_(False)
        for layer in model.base_model.layers:
            layer.mlp.gate_proj = Adapted(layer.mlp.gate_proj)
        return model.double()

    expected = step(adapted())
    loss, found = step(adapted(tiled_mlp=True))
    assert len(found) == 4 and loss == pytest.approx(expected[0], rel=1e-12)
    assert_same(found, expected[1])


def test_gradients_arrive_once_and_whole() -> None:
    """As the hooks of DDP and FSDP2 need them."""
    model = built(LLAMA, tiled_mlp=True).double()
    arrived: dict[str, int] = {}

    def count(name: str) -> Any:
        def hook(parameter: Tensor) -> None:
            arrived[name] = arrived.get(name, 0) + 1

        return hook

    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(count(name))
    step(model)
    assert len(arrived) > 10 and set(arrived.values()) == {1}


class Products(TorchDispatchMode):
    """Multiplications of matrices, counted in multiplications of numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            one, other = args[-2:]
            self.count += one.shape[0] * one.shape[1] * other.shape[1]
        return func(*args, **(kwargs or {}))


def test_a_checkpointed_layer_computes_its_tiled_mlp_no_more_often() -> None:
    """But for its last product, of which torch's recomputation of a layer knows that nobody needs it."""

    def products(**settings: Any) -> int:
        model = built(LLAMA, **settings)
        with Products() as found:
            step(model)
        return found.count

    tiled: dict[str, Any] = {"tiled_mlp": True}
    product = 2 * 16 * 24 * 200  # layers, sizes, tokens; an MLP has three
    assert products(**tiled) - products() == 3 * product
    for mode in ("full", "selective"):
        checkpointed = products(gradient_checkpointing=mode)
        assert products(**tiled, gradient_checkpointing=mode) - checkpointed == product


def test_evaluation_is_the_same_and_keeps_nothing() -> None:
    ids = torch.arange(3, 203).view(2, 100)
    expected = built(LLAMA).eval()(input_ids=ids).logits
    with torch.no_grad():
        found = built(LLAMA, tiled_mlp=True).eval()(input_ids=ids).logits
    torch.testing.assert_close(found, expected)


def test_weights_keep_their_names_and_a_model_may_be_tiled_twice() -> None:
    model = built(LLAMA, tiled_mlp=True)
    assert model.state_dict().keys() == built(LLAMA).state_dict().keys()
    classes = {type(m) for m in parts_to_tile(model)[0]}
    tile_mlps(model)
    assert {type(m) for m in parts_to_tile(model)[0]} == classes


def test_a_tile_is_about_as_long_as_hidden_states_are_wide_but_not_tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiling, "MIN_TILE_TOKENS", MIN_TILE_TOKENS)
    sizes: list[int] = []

    def tokens_of_tiles(hidden_size: int, tokens: int) -> list[int]:
        sizes.clear()
        shape = {**LLAMA, "hidden_size": hidden_size, "num_attention_heads": 2, "num_hidden_layers": 1}
        mlp: Any = parts_to_tile(built(shape, tiled_mlp=True))[0][0]
        mlp.act_fn.register_forward_hook(lambda m, args, out: sizes.append(args[0].shape[-2]))
        with torch.no_grad():
            mlp(torch.zeros(1, tokens, hidden_size))
        return list(sizes)

    assert tokens_of_tiles(16, 2048) == [MIN_TILE_TOKENS] * 4
    assert tokens_of_tiles(16, 32768) == [2048] * 16
    assert tokens_of_tiles(16, 131072) == [MAX_TILE_TOKENS] * 32
    assert tokens_of_tiles(768, 2000) == [667, 667, 666]
    assert tokens_of_tiles(768, 700) == [700]


def test_mixtures_of_experts_are_left_whole_and_a_model_of_nothing_else_is_refused() -> None:
    moe = {"model_type": "qwen2_moe", **SHAPE, "num_key_value_heads": 2, "moe_intermediate_size": 8, "num_experts": 2,
           "num_experts_per_tok": 1, "shared_expert_intermediate_size": 8}  # fmt: skip
    with pytest.raises(UserError, match=r"tiled_mlp: nothing to tile.*Qwen2MoeSparseMoeBlock.*Use False"):
        built(moe, tiled_mlp=True)
    model = built({**moe, "mlp_only_layers": [0]}, tiled_mlp=True)
    assert tile_mlps(model) == "tiled_mlp: 1 MLPs and 3 norms compute in tiles; 1 other blocks are left whole"
    gpt_oss = {**moe, "model_type": "gpt_oss", "num_local_experts": 2, "head_dim": 8}
    for field in ("moe_intermediate_size", "num_experts", "shared_expert_intermediate_size"):
        del gpt_oss[field]
    with pytest.raises(UserError, match=r"tiled_mlp: nothing to tile.*GptOssMLP"):  # by name, but it gives a router's
        built(gpt_oss, tiled_mlp=True)  # scores, too
    with pytest.raises(UserError, match=r"none of its layers has a known mlp"):
        built({"model_type": "bert", **SHAPE}, MASKED, tiled_mlp=True)


class Block(nn.Module):
    """A residual layer of one's own. Only ``mlp`` and ``norm`` treat tokens alone and leave their width as it is."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(8), mlp
        self.narrow, self.mixed, self.out = nn.Sequential(nn.Linear(8, 4)), Mixed(), nn.Linear(4, 8)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.mixed(self.norm(hidden)) + self.out(self.narrow(hidden))
        return hidden + self.mlp(hidden)


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 8)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.project(hidden).cumsum(1)


class Routed(nn.Module):
    """Two experts; for the loss it remembers what its router gave."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.up, self.scores = nn.Linear(8, 2), nn.Linear(8, 16), list[Tensor]()

    def forward(self, hidden: Tensor) -> Tensor:
        self.scores[:] = [self.router(hidden).softmax(-1)]
        return (self.up(hidden).unflatten(-1, (2, 8)) * self.scores[0].unsqueeze(-1)).sum(-2)


class Normed(nn.Module):
    """A batch norm: the same for each token in evaluation, but not in training."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 8)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down(self.norm(self.up(hidden).transpose(1, 2)).transpose(1, 2))


class Centred(nn.Module):
    """Takes from each token the mean of all, in training alone; its buffers, unlike a batch norm's, may be any."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, hidden: Tensor) -> Tensor:
        out = self.down(self.up(hidden).relu())
        return out - out.mean(1, keepdim=True) if self.training else out


class Placed(nn.Module):
    """Adds a table of positions, and perhaps the token before: neither is seen in its printed form."""

    def __init__(self, shifts: bool, places: bool) -> None:
        super().__init__()
        self.up, self.down, self.shifts = nn.Linear(8, 16), nn.Linear(16, 8), shifts
        self.register_buffer("table", torch.arange(128.0)[:, None] if places else torch.zeros(128, 1))
        self.places = places

    def forward(self, hidden: Tensor) -> Tensor:
        out = self.down(self.up(hidden).relu())
        if self.places:
            out = out + self.table[: hidden.shape[1]]  # type: ignore
        return out + hidden.roll(1, 1) if self.shifts else out


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(8, 64), nn.Linear(32, 8), nn.Dropout(0.2)

    def forward(self, hidden: Tensor, scale: Tensor | None = None) -> Tensor:
        first, second = self.up(hidden if scale is None else hidden * scale).chunk(2, -1)
        return self.down(self.drop(first * second.sigmoid()))


class Own(nn.Module):
    def __init__(self, *mlps: nn.Module) -> None:
        super().__init__()
        self.embed, self.head, self.norm = nn.Embedding(300, 8), nn.Linear(8, 300), nn.LayerNorm(8)
        self.layers = nn.ModuleList(map(Block, mlps))

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.embed(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(self.norm(hidden))


def test_what_treats_tokens_alone_in_a_module_of_ones_own_is_found_by_trying_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tiling, "MIN_TILE_TOKENS", 33)
    torch.manual_seed(0)
    model = Own(nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)), Routed(), Gated(), Normed()).double()
    model.layers[2].mlp.drop.p = 0.0  # type: ignore
    expected = step(copy.deepcopy(model))
    state, drawn = {n: p.detach().clone() for n, p in model.named_parameters()}, torch.get_rng_state()
    assert tile_mlps(model) == "tiled_mlp: 2 MLPs and 5 norms compute in tiles"
    assert torch.equal(torch.get_rng_state(), drawn)
    assert all(torch.equal(p, state[n]) for n, p in model.named_parameters())
    assert [n for n, m in model.named_modules() if isinstance(m, Tiled) and len(list(m.children()))] == [
        "layers.0.mlp",
        "layers.2.mlp",
    ]
    loss, found = step(model)
    assert loss == pytest.approx(expected[0], rel=1e-12)
    assert_same(found, expected[1])
    with_scale = torch.full((1, 100, 1), 0.5, dtype=torch.float64)  # may differ by token, so nothing is cut
    hidden, mlp = torch.randn(1, 100, 8, dtype=torch.float64), Gated().double().eval()
    tiled = copy.deepcopy(mlp)
    tiled.__class__ = tiling._tiled(Gated)  # type: ignore
    torch.testing.assert_close(tiled(hidden, with_scale), mlp(hidden, with_scale), rtol=0, atol=0)


class Averaging(nn.Module):
    """Follows the size of its inputs in training, which changes no result; in tiles it would do so once per tile."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.register_buffer("usual", torch.zeros(()))

    def forward(self, hidden: Tensor) -> Tensor:
        if self.training:
            self.usual.lerp_(hidden.detach().abs().mean().to(self.usual), 0.1)  # type: ignore
        return self.down(self.up(hidden).relu())


def test_a_module_that_changes_a_buffer_in_training_stays_whole() -> None:
    model = Own(Gated(), Averaging())
    assert tile_mlps(model) == "tiled_mlp: 1 MLPs and 3 norms compute in tiles"
    assert isinstance(model.layers[0].mlp, Tiled) and type(model.layers[1].mlp) is Averaging


def test_tiles_of_ones_own_module_draw_the_same_dropout_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of a function that drops are those of finite differences with the same seed."""
    monkeypatch.setattr(tiling, "MIN_TILE_TOKENS", 8)
    torch.manual_seed(0)
    model = Own(Gated()).double().train()
    tile_mlps(model)
    ids = torch.arange(3, 43).view(1, 40)

    def loss() -> Tensor:
        torch.manual_seed(1)
        return ModelWithLoss(model)({"input_ids": ids}, ids)

    loss().backward()
    weight: Tensor = model.layers[0].mlp.up.weight  # type: ignore
    direction = torch.randn_like(weight)
    assert weight.grad is not None
    slope = (weight.grad * direction).sum().item()
    with torch.no_grad():
        ends = []
        for sign in (1, -1):
            weight += sign * 1e-5 * direction
            ends.append(loss().item())
            weight -= sign * 1e-5 * direction
    assert slope == pytest.approx((ends[0] - ends[1]) / 2e-5, rel=1e-6)


def test_a_weight_that_its_mlp_does_not_use_gets_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gradient of zeros would let it decay."""
    monkeypatch.setattr(tiling, "MIN_TILE_TOKENS", 8)
    mlp = Gated()
    mlp.spare = nn.Linear(8, 8)
    mlp.__class__ = tiling._tiled(Gated)  # type: ignore
    mlp(torch.randn(1, 40, 8)).sum().backward()
    assert {name for name, p in mlp.named_parameters() if p.grad is None} == {"spare.weight", "spare.bias"}


def test_a_module_of_ones_own_without_such_parts_says_what_it_needs() -> None:
    model = Own(Mixed())
    for layer in model.layers:
        layer.norm = nn.Identity()
    model.norm = nn.Identity()  # type: ignore
    with pytest.raises(UserError, match=r"tiled_mlp: nothing to tile .* none of its layers has a known mlp"):
        tile_mlps(model)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_modules_that_print_alike_are_tried_each(order: tuple[int, ...]) -> None:
    kinds = (Placed(False, False), Placed(True, False), Placed(False, True))
    model = Own(*(kinds[number] for number in order))
    tile_mlps(model)
    tiled = [isinstance(layer.mlp, Tiled) for layer in model.layers]
    assert [tiled[order.index(number)] for number in range(3)] == [True, False, False]


def test_parts_are_tried_as_in_training() -> None:
    assert [type(part) for part in parts_to_tile(Own(Centred(), Gated()).eval())[0]] == [Gated]


def test_of_equal_modules_one_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trial takes milliseconds, and a deep model has hundreds of parts."""
    tried: list[type] = []
    plain = tiling.without_weights
    monkeypatch.setattr(tiling, "without_weights", lambda part, **how: tried.append(type(part)) or plain(part, **how))
    mlps, norms = parts_to_tile(Own(*(Gated() for _ in range(4))))
    assert (len(mlps), len(norms), tried.count(Gated), tried.count(nn.LayerNorm)) == (4, 5, 1, 1)


def test_a_tiled_module_may_be_called_by_keyword(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiling, "MIN_TILE_TOKENS", 8)
    hidden, mlp = torch.randn(1, 100, 8), Gated().eval()
    tiled = copy.deepcopy(mlp)
    tiled.__class__ = tiling._tiled(Gated)  # type: ignore
    for found in (tiled(hidden=hidden), tiled(hidden, None), tiled(hidden, scale=None)):
        assert found.grad_fn is not None and "Tiles" in type(found.grad_fn).__name__
        torch.testing.assert_close(found, mlp(hidden))
