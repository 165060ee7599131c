"""Next-token prediction over long documents."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from train import tasks
from train.records import UserError
from train.tasks import differ, logits_on_trial, small_copy, tokens_on_trial

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from train.config import Config


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
    def check_model(cls, model: nn.Module, config: Config, vocabulary: int) -> None:
        """Raises UserError when tokens of ``model`` see those that follow, as far as a small copy of it tells."""
        sees = False
        with suppress(Exception), small_copy(model) as small:  # what cannot be tried a run finds out by itself
            tokens = tokens_on_trial(small, config.data.max_length, vocabulary)
            earlier = logits_on_trial(small, tokens)[:, :-1]
            tokens[:, -1] = 1
            sees = differ(logits_on_trial(small, tokens)[:, :-1], earlier)
        if sees:
            no_decoder = getattr(getattr(model, "config", None), "is_decoder", None) is False
            flag = " (is_decoder: false in its configuration)" if no_decoder else ""
            raise UserError(
                f"model {config.architecture.name!r}: its tokens see those that follow{flag}, so {cls.name} would "
                "learn to copy what it is to predict: use --task masked_lm, or a model that is a decoder, such as "
                f"llama or gpt2{', or set is_decoder: true' if no_decoder else ''}."
            )
