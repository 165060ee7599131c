"""Predicting hidden tokens from both sides."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from train import tasks
from train.records import IGNORE


class Task(tasks.Task):
    """BERT's objective (arXiv 1810.04805): of the chosen tokens 80 % are hidden, 10 % replaced, 10 % left alone."""

    title = "masked language"
    auto_class = "AutoModelForMaskedLM"
    target_share = "mlm_probability"
    needed_tokens = ("mask",)
    example_columns = ("tokens", "special", "length", "vocab_size", "mask_id")

    def cut(self, text: str, ids: list[int], label: int | None, tokenizer: tasks.Tokenizer) -> Iterator[dict[str, Any]]:
        """Windows of at most ``max_length`` tokens, between the tokenizer's start and end tokens."""
        room, known = self.room(tokenizer), {"vocab_size": len(tokenizer), "mask_id": tokenizer.mask_token_id}
        for first in range(0, len(ids), room):
            tokens = np.array(self.framed(ids[first : first + room], tokenizer), dtype=np.int32)
            special = np.isin(tokens, tokenizer.all_special_ids)
            if not special.all():  # a window of unknown tokens has none to hide
                yield {"tokens": tokens, "special": special, "length": len(tokens), **known}

    def inputs_and_labels(self, example: Mapping[str, Any], seed: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Tokens, some hidden, and labels with these; a new choice each epoch, the same on any number of devices."""
        random = np.random.default_rng([*seed, int(example["id"])])
        tokens = np.asarray(example["tokens"], dtype=np.int64)
        special = np.asarray(example["special"], bool)
        draws = np.where(special, 1.0, random.random(len(tokens)))
        chosen = ~special & (draws <= max(self.data.mlm_probability, draws.min()))  # at least one, even in a short text
        how = random.random(len(tokens))
        replacements = random.integers(int(example["vocab_size"]), size=len(tokens))
        shown = np.select([chosen & (how < 0.8), chosen & (how < 0.9)], [int(example["mask_id"]), replacements], tokens)
        return torch.from_numpy(shown), torch.from_numpy(np.where(chosen, tokens, IGNORE))
