"""Whether a model that is to predict the next token can see it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from train.errors import UserError
from train.extras.losses.answering_head import logits_of

TRIED_TOKENS = 8
TRIED_PARAMETERS = 200_000_000
"""Larger models are tried only where they say of themselves that they are no decoder: it would take seconds."""


def check_causal(model: nn.Module, name: str, vocabulary: int, max_length: int, weights: bool = True) -> None:
    """Whether no token of ``model`` depends on later ones, as far as that can be told.

    Args:
        name: of the model, for the message.
        vocabulary: how many token ids there are.
        weights: whether they are there: without them only what the model says of itself is looked at.

    Raises:
        UserError: some token does.
    """
    said = {module.is_causal for module in model.modules() if isinstance(getattr(module, "is_causal", None), bool)}
    no_decoder = getattr(getattr(model, "config", None), "is_decoder", None) is False and True not in said
    sees = no_decoder and bool(said)
    # Some decoders leave is_decoder false, so where layers do not say anything either only trying it tells.
    if not sees and weights and (no_decoder or sum(p.numel() for p in model.parameters()) <= TRIED_PARAMETERS):
        sees = _sees_later_tokens(model, (vocabulary - 1 - torch.arange(min(TRIED_TOKENS, max_length))).clamp(min=0))
    if sees:
        flag = " (is_decoder: false in its configuration)" if no_decoder else ""
        raise UserError(
            f"model {name!r}: its tokens see those that follow{flag}, and causal_lm would learn to copy what it is to "
            "predict: take --task masked_lm, or a model that is a decoder, such as llama or gpt2"
            f"{', or set is_decoder: true' if no_decoder else ''}."
        )


def _sees_later_tokens(model: nn.Module, tokens: Tensor) -> bool:
    """Whether outputs at earlier tokens have a gradient with regard to the embedding of the last one.

    In a causal model it is exactly zero, whatever the type of the weights, where comparing outputs would have to know
    how they are rounded. False too where it cannot be tried: what the model cannot do a run finds out by itself.
    Leaves model and generators as they are.
    """
    parameter = next(model.parameters(), None)
    if len(tokens) < 2 or parameter is None or any(p.is_meta for p in model.parameters()):
        return False
    ids, embedded = tokens.unsqueeze(0).to(parameter.device), []

    def embed(module: nn.Module, args: Any, output: Any) -> Any:
        if not (args and isinstance(args[0], Tensor) and torch.equal(args[0], ids)):
            return None  # of positions or types
        embedded.append(output.detach().requires_grad_())
        return embedded[-1].clone()  # which may be changed in place

    hooks = [module.register_forward_hook(embed) for module in model.modules() if isinstance(module, nn.Embedding)]
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    try:
        with _evaluating(model), torch.random.fork_rng([parameter.device] if parameter.is_cuda else []):
            with torch.enable_grad():
                logits = logits_of(torch.func.functional_call(model, buffers, (), {"input_ids": ids}))
                earlier = logits[:, :-1].float().sum()
            gradients = torch.autograd.grad(earlier, embedded, allow_unused=True)
    except Exception:  # models fail in their own ways
        return False
    finally:
        for hook in hooks:
            hook.remove()
    last = [gradient[:, -1] for gradient in gradients if gradient is not None]
    return any(bool((gradient.isfinite() & (gradient != 0)).any()) for gradient in last)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
