"""Next-token prediction over long documents."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from train import tasks


class Task(tasks.Task):
    """Each document is cut into windows; every token but the document's first is predicted exactly once."""

    title = "causal language"
    is_causal = True
    auto_class = "AutoModelForCausalLM"
    headline_metric = "bits_per_byte"
    example_columns = ("tokens", "length", "num_bytes")

    def cut(self, text: str, ids: list[int], label: int | None, tokenizer: tasks.Tokenizer) -> Iterator[dict[str, Any]]:
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
