"""Next-token prediction over long documents."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from train import tasks
from train.loss import logits_of
from train.records import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TRIED_TOKENS = 8
TRIED_PARAMETERS = 200_000_000  # larger models are tried only if they say that they are not decoders: it takes seconds


class Task(tasks.Task):
    """Each document is cut into windows; every token but the document's first mark is predicted exactly once."""

    name = "causal_lm"
    title = "causal language"
    pipeline_tag = "text-generation"
    is_causal = True
    auto_class = "AutoModelForCausalLM"
    headline_metric = "bits_per_byte"
    example_columns = ("tokens", "length", "num_bytes")

    def cut(
        self, text: str, ids: list[int], label: int | None, tokenizer: PreTrainedTokenizerBase
    ) -> Iterator[dict[str, Any]]:
        """Windows of at most ``max_length`` + 1 tokens; neighbours share one, the last input and first target.

        A window's ``num_bytes`` is its share, by tokens, of the document's UTF-8 bytes.
        """
        tokens = np.array(self.framed(ids, tokenizer), dtype=np.int32)
        bytes_per_target = len(text.encode()) / max(1, len(tokens) - 1)
        for first in range(0, len(tokens) - 1, self.data.max_length):
            window = tokens[first : first + self.data.max_length + 1]
            length = len(window) - 1
            yield {"tokens": window, "length": length, "num_bytes": bytes_per_target * length}

    def inputs_and_labels(self, example: Mapping[str, Any], seed: Sequence[int]) -> tuple[Tensor, Tensor]:
        """A window, and the next token of each of its positions."""
        tokens = torch.tensor(example["tokens"], dtype=torch.long)
        return tokens[:-1], tokens[1:].clone()  # a subclass may mask some without changing the inputs

    @classmethod
    def check_model(cls, model: nn.Module, name: str, vocabulary: int, max_length: int, has_weights: bool) -> None:
        """Raises UserError when some token of ``model`` depends on later ones, as far as that can be found out."""
        said = {module.is_causal for module in model.modules() if isinstance(getattr(module, "is_causal", None), bool)}
        no_decoder = getattr(getattr(model, "config", None), "is_decoder", None) is False and True not in said
        sees = no_decoder and bool(said)
        # Some decoders leave is_decoder false, so where layers do not say anything either only a trial tells.
        is_small = sum(p.numel() for p in model.parameters()) <= TRIED_PARAMETERS
        if not sees and has_weights and (no_decoder or is_small):
            tokens = vocabulary - 1 - torch.arange(min(TRIED_TOKENS, max_length))
            sees = _sees_later_tokens(model, tokens.clamp(min=0))
        if sees:
            flag = " (is_decoder: false in its configuration)" if no_decoder else ""
            raise UserError(
                f"model {name!r}: its tokens see those that follow{flag}, so {cls.name} would learn to copy what it is "
                "to predict: use --task masked_lm, or a model that is a decoder, such as llama or gpt2"
                f"{', or set is_decoder: true' if no_decoder else ''}."
            )


def _sees_later_tokens(model: nn.Module, tokens: Tensor) -> bool:
    """Whether outputs at earlier tokens have a gradient with regard to the embedding of the last one.

    In a causal model it is exactly zero, whatever the type of the weights, where comparing outputs would have to know
    how they are rounded. False too where it cannot be tried: what the model cannot do a run finds out by itself.
    """
    parameter = next(model.parameters(), None)
    if len(tokens) < 2 or parameter is None or parameter.is_meta:
        return False
    ids, embedded = tokens.unsqueeze(0).to(parameter.device), []

    def embed(module: nn.Module, args: Any, output: Any) -> Any:
        if not (args and isinstance(args[0], Tensor) and torch.equal(args[0], ids)):
            return None  # of positions or types
        embedded.append(output.detach().requires_grad_())
        return embedded[-1].clone()  # which may be changed in place

    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}  # which a forward may change
    try:
        with ExitStack() as undone, torch.random.fork_rng([parameter.device] if parameter.is_cuda else []):
            for module in model.modules():
                undone.callback(setattr, module, "training", module.training)
                if isinstance(module, nn.Embedding):
                    undone.callback(module.register_forward_hook(embed).remove)
            with torch.enable_grad():
                logits = logits_of(torch.func.functional_call(model.eval(), buffers, (), {"input_ids": ids}))
                gradients = torch.autograd.grad(logits[:, :-1].float().sum(), embedded, allow_unused=True)
    except Exception:  # models fail in their own ways
        return False
    last = [gradient[:, -1] for gradient in gradients if gradient is not None]
    return any(bool((gradient.isfinite() & (gradient != 0)).any()) for gradient in last)
