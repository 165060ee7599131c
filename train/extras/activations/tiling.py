"""MLPs and norms that compute their tokens in tiles, so that only the activations of one tile exist at a time.

An MLP treats each token by itself. Its activations are about I / H times as wide as the hidden states, and in a model
that recomputes its layers those of one layer outgrow everything else at long sequences (arXiv 2506.13996, ALST). A norm
keeps copies of the hidden states in fp32, and makes more of them in backward: after the MLP they are the largest.
"""

import copy
from collections.abc import Iterator
from contextlib import suppress
from functools import cache, partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import get_device_states, set_device_states
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from train.extras.activations.recompute import layers_of
from train.extras.small_copy import boosted, differ, on_trial
from train.extras.weightless import obstacle_on_trial, without_weights
from train.records import UserError

# With fewer a device waits for weights: a tile reads them, and adds to their gradients, whatever its size.
MIN_TILE_TOKENS = 512
# Where a model is narrow, a card computes a tile sooner than Python starts the next: with 1,024 tokens, 1,024 wide, an
# H200 computed in a fifth of the time. So tiles grow with the sequence; up to here the peak of a step hardly does.
MAX_TILE_TOKENS = 4096


def tile_mlps(model: nn.Module) -> str:
    """Makes MLPs and the norms next to them compute in tiles; a line about it. Names of weights and hooks stay.

    MLPs are the modules ``layer.mlp`` of transformers' layers whose class is called an MLP and takes hidden states
    alone, or what treats each token alone in a module of your own. Mixtures stay whole. UserError where there are none.
    """
    found, around = parts_to_tile(model)
    blocks = [type(layer.mlp).__name__ for layer in _layers_with_mlp(model)]
    if not found:
        reason = f"its blocks are {', '.join(sorted(set(blocks)))}" if blocks else "none of its layers has a known mlp"
        raise UserError(f"tiled_mlp: nothing to tile in this model: {reason}. Use False.")
    for part in [*found, *around]:
        part.__class__ = _tiled(type(part))
    left = f"; {len(blocks) - len(found)} other blocks are left whole" if len(blocks) > len(found) else ""
    return f"tiled_mlp: {len(found)} MLPs and {len(around)} norms compute in tiles{left}"


def parts_to_tile(model: nn.Module) -> tuple[list[nn.Module], list[nn.Module]]:
    """What :func:`tile_mlps` tiles: MLPs; and the norms of hidden states next to them and after the last layer."""
    if not isinstance(model, PreTrainedModel):
        return _own_parts(model)
    layers = [layer for layer in _layers_with_mlp(model) if _gives_hidden_states_alone(layer.mlp, model)]
    stacks = [m for m in model.modules() if isinstance(own := getattr(m, "layers", None), nn.ModuleList) and len(own)]
    around = [stack for stack in stacks if stack.layers[0] in layers]  # type: ignore
    beside = [child for module in (*layers, *around) for child in module.children()]
    norms = [child for child in beside if type(child).__name__.endswith(("RMSNorm", "LayerNorm"))]
    return [layer.mlp for layer in layers], norms


def _layers_with_mlp(model: nn.Module) -> list[Any]:
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    return [layer for layer in layers if isinstance(getattr(layer, "mlp", None), nn.Module)]


def _gives_hidden_states_alone(mlp: nn.Module, model: Any) -> bool:
    def obstacle(twin: nn.Module) -> str | None:
        dtype = next((p.dtype for p in twin.parameters() if p.is_floating_point()), torch.float32)
        hidden = torch.empty(1, 1, model.config.get_text_config().hidden_size, dtype=dtype)
        return None if isinstance(twin(hidden), Tensor) else "a router's scores come with them"

    return (isinstance(mlp, Tiled) or type(mlp).__name__.endswith("MLP")) and not obstacle_on_trial(mlp, obstacle)


def _own_parts(model: nn.Module) -> tuple[list[nn.Module], list[nn.Module]]:
    """In a module of your own: what of the layers in its lists, and of norms next to such lists, can be tiled."""
    around = [m for m in model.modules() if any(isinstance(child, nn.ModuleList) for child in m.children())]
    parts = dict.fromkeys(part for module in (*layers_of(model), *around) for part in module.children())
    kinds = {part: _kind(part) for part in parts if not isinstance(part, nn.Linear | nn.Embedding)}
    alone = {kind for kind, part in {kind: part for part, kind in kinds.items()}.items() if _treats_tokens_alone(part)}
    found = [part for part, kind in kinds.items() if kind in alone]
    return [part for part in found if [*part.children()]], [part for part in found if not [*part.children()]]


def _kind(part: nn.Module) -> str:
    """Equal for modules that differ in the values of weights and buffers alone, of which one is tried."""
    own = [(type(m), {n: v for n, v in vars(m).items() if n[0] != "_"}) for m in part.modules()]
    return repr((own, [p.shape for p in part.parameters()]))


def _treats_tokens_alone(part: nn.Module) -> bool:
    """Whether it makes (B, S, H) of (B, S, H), each token alone, as far as a copy with other numbers tells."""
    for width in {p.shape[-1] for p in part.parameters() if p.ndim}:
        with suppress(Exception), on_trial():  # modules fail in their own ways
            twin, hidden = boosted(without_weights(part, real=torch.float32)), torch.randn(2, 7, width)
            for module in twin.modules():  # as in training, where a batch norm mixes tokens, but without chance
                module.train(not isinstance(module, nn.Dropout))
            for buffer in twin.buffers():
                buffer.copy_(torch.randn(buffer.shape))
            kept = [buffer.clone() for buffer in twin.buffers()]
            whole, tokens = torch.enable_grad()(twin.forward)(hidden), hidden.view(1, -1, width)
            is_still = all(map(torch.equal, kept, twin.buffers()))  # else each tile would change them again
            copy.deepcopy(twin)  # fails where it remembers a tensor for the loss, such as a router's scores
            pieces = torch.cat([twin(tokens[:, :5]), twin(tokens[:, 5:])], dim=1)
            return is_still and whole.shape == hidden.shape and not differ(pieces, whole.view(tokens.shape))
    return False


class Tiled(nn.Module):
    """An MLP or a norm whose forward and backward compute some tokens at a time.

    Backward computes each tile's forward once more, as if the MLP were checkpointed. In a layer that is checkpointed it
    costs only its last product more: what the MLP is given is saved before it computes, and torch's recomputation of
    the layer stops at the last tensor that was saved (after the MLP, if a norm or dropout follows).

    Gradients of weights are summed over the tiles, in fp32 or better, and handed to autograd once: hooks see them all.
    """

    def compute_whole(self, *args: Any, **named: Any) -> Tensor:
        """(..., H) → (..., H), computed by the original class."""
        return super().forward(*args, **named)

    @torch.compiler.disable  # backward computes forward again, which torch.compile cannot follow
    def forward(self, *args: Any, **named: Any) -> Tensor:  # type: ignore
        hidden, *others = [value for value in (*args, *named.values()) if value is not None]
        tokens = hidden.shape[:-1].numel()
        size = max(MIN_TILE_TOKENS, hidden.shape[-1], min(tokens // 16, MAX_TILE_TOKENS))  # at least H, as ALST does
        if tokens <= size or others:  # with which it may not treat tokens alone
            return self.compute_whole(*args, **named)
        if not torch.is_grad_enabled():
            return _in_tiles(self, hidden, size)
        kept = cast("Tensor", _Keep.apply(hidden))  # if it needs a gradient: before the tiles compute, not after
        return cast("Tensor", _Tiles.apply(self, size, kept.grad_fn, kept, *self.trained()))

    def trained(self) -> list[nn.Parameter]:
        """Parameters that need a gradient; sharded ones as they are gathered now."""
        return [p for p in self.parameters() if p.requires_grad]


@cache
def _tiled(original: type[nn.Module]) -> type[Tiled]:
    """``original`` with :class:`Tiled` before it."""
    return original if issubclass(original, Tiled) else type(f"Tiled{original.__name__}", (Tiled, original), {})


class _Keep(torch.autograd.Function):
    """Hands its input on, and saves it for whoever knows this node."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        ctx.save_for_backward(hidden)
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        return grad_outputs[0]


class _Tiles(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tiled, size: int, keeper: Any, hidden: Tensor, *weights: Tensor) -> Tensor:
        ctx.part, ctx.size, ctx.keeper = part, size, keeper
        if keeper is None:
            ctx.save_for_backward(hidden)
        kind = hidden.device.type
        now = {"enabled": torch.is_autocast_enabled(kind), "dtype": torch.get_autocast_dtype(kind)}
        ctx.autocast = partial(torch.autocast, kind, **now)  # for backward, which runs outside it
        # A fake device draws nothing; of Metal torch's own checkpoints restore nothing either.
        has_own = kind not in ("cpu", "meta", "mps") and torch.get_device_module(kind).is_initialized()
        ctx.random_states = torch.get_rng_state(), *(get_device_states(hidden) if has_own else ([], []))
        return _in_tiles(part, hidden, size)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore
        (hidden,) = ctx.saved_tensors if ctx.keeper is None else ctx.keeper.saved_tensors
        tokens, gradients = hidden.reshape(-1, hidden.shape[-1]), gradient.reshape(-1, gradient.shape[-1])
        to_hidden, weights = torch.empty_like(tokens), ctx.part.trained()
        sums = [torch.zeros_like(w, dtype=torch.promote_types(w.dtype, torch.float32)) for w in weights]
        (of_host, devices, states), kind, used = ctx.random_states, hidden.device.type, set[int]()
        with torch.random.fork_rng(devices, device_type=kind):  # inside it, what is drawn is what forward drew
            torch.set_rng_state(of_host)
            set_device_states(devices, states, device_type=kind)
            for rows in tiles(len(tokens), ctx.size):
                with torch.enable_grad(), ctx.autocast():
                    tile = tokens[rows].detach().requires_grad_()
                    out = ctx.part.compute_whole(tile.unsqueeze(0)).squeeze(0)
                to_hidden[rows], *found = torch.autograd.grad(out, [tile, *weights], gradients[rows], allow_unused=True)
                del out
                for number, part in enumerate(found):
                    if part is not None:
                        used.add(number)
                        sums[number].add_(part)
                found = part = None
        to_weights = [sums[n].to(w.dtype) if n in used else None for n, w in enumerate(weights)]
        return None, None, None, to_hidden.view(hidden.shape), *to_weights


def _in_tiles(part: Tiled, hidden: Tensor, size: int) -> Tensor:
    """(..., H) what ``part`` makes of ``hidden``."""
    tokens = hidden.reshape(-1, hidden.shape[-1])
    out: Tensor | None = None
    for rows in tiles(len(tokens), size):
        tile = part.compute_whole(tokens[rows].unsqueeze(0)).squeeze(0)
        if out is None:
            out = tile.new_empty((*hidden.shape[:-1], tile.shape[-1]))  # no view: falcon's layers add to it in place
        out.view(-1, tile.shape[-1])[rows] = tile
    assert out is not None
    return out


def tiles(tokens: int, size: int) -> Iterator[slice]:
    """Rows of each tile: at most ``size``, as equal as can be."""
    even = -(-tokens // -(-tokens // size))
    return (slice(start, min(start + even, tokens)) for start in range(0, tokens, even))
