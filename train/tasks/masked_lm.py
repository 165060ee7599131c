"""Predicting hidden tokens from both sides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from train.errors import UserError
from train.records import IGNORE, MicroBatch
from train.tasks.base import Task, attention_inputs, pad

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class MaskedLM(Task):
    """BERT's objective (arXiv 1810.04805): of the chosen tokens 80 % are hidden, 10 % replaced, 10 % left alone."""

    name: ClassVar[str] = "masked_lm"
    title: ClassVar[str] = "masked language"
    pipeline_tag: ClassVar[str] = "fill-mask"
    auto_class: ClassVar[str] = "AutoModelForMaskedLM"
    default_metric: ClassVar[str] = "loss"
    headline_metric: ClassVar[str] = "loss"
    example_columns: ClassVar[tuple[str, ...]] = ("tokens", "special", "length", "vocab_size", "mask_id")

    def check_tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> None:
        super().check_tokenizer(tokenizer)
        if tokenizer.mask_token_id is None:
            raise UserError("masked_lm: the tokenizer has no mask token; choose one that has ('bytes', 'train:8192').")

    def encode(
        self, documents: Mapping[str, Sequence[Any]], tokenizer: PreTrainedTokenizerBase, label_names: Sequence[str]
    ) -> dict[str, list[Any]]:
        """Windows of at most ``max_length`` tokens, framed by the tokenizer's start and end marks."""
        examples: dict[str, list[Any]] = {column: [] for column in self.example_columns}
        room = self.room(tokenizer)
        for ids in self.token_ids(documents["text"], tokenizer):
            for first in range(0, len(ids), room):
                tokens = self.framed(ids[first : first + room], tokenizer)
                examples["tokens"].append(np.array(tokens, dtype=np.int32))
                examples["special"].append(np.isin(tokens, tokenizer.all_special_ids))
                examples["length"].append(len(tokens))
                examples["vocab_size"].append(len(tokenizer))
                examples["mask_id"].append(tokenizer.mask_token_id)
        return examples

    def collate(self, examples: Sequence[Mapping[str, Any]], seed: Sequence[int], pad_id: int) -> MicroBatch:
        """``input_ids`` with hidden tokens and ``labels``, both (B, S); a new choice each epoch, the same on any
        number of devices."""
        inputs, labels = [], []
        for example in examples:
            random = np.random.default_rng([*seed, int(example["id"])])
            tokens = np.asarray(example["tokens"], dtype=np.int64)
            special = np.asarray(example["special"], bool)
            draws = np.where(special, 1.0, random.random(len(tokens)))
            chosen = ~special & (draws <= max(self.data.mlm_probability, draws.min()))  # one at least, if short
            how = random.random(len(tokens))
            shown = np.where(chosen & (how < 0.8), int(example["mask_id"]), tokens)
            replacement = random.integers(int(example["vocab_size"]), size=len(tokens))
            shown = np.where(chosen & (how >= 0.8) & (how < 0.9), replacement, shown)
            inputs.append(torch.from_numpy(shown))
            labels.append(torch.from_numpy(np.where(chosen, tokens, IGNORE)))
        return MicroBatch(
            inputs=attention_inputs(inputs, pad_id),
            labels=pad(labels, IGNORE),
            num_targets=sum(int((row != IGNORE).sum()) for row in labels),
            example_ids=tuple(int(example["id"]) for example in examples),
            num_tokens=sum(map(len, inputs)),
        )
