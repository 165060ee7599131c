"""Next-token prediction over long documents."""

from __future__ import annotations

import lzma
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, cast

import numpy as np
import torch
from torch import nn

from train.records import IGNORE, MicroBatch
from train.tasks.base import Task, pad

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class CausalLM(Task):
    """Each document is cut into windows; every token but the document's first mark is predicted exactly once."""

    name: ClassVar[str] = "causal_lm"
    title: ClassVar[str] = "causal language"
    pipeline_tag: ClassVar[str] = "text-generation"
    auto_class: ClassVar[str] = "AutoModelForCausalLM"
    default_metric: ClassVar[str] = "loss"
    headline_metric: ClassVar[str] = "bits_per_byte"
    example_columns: ClassVar[tuple[str, ...]] = ("tokens", "length", "num_bytes")

    def encode(
        self, documents: Mapping[str, Sequence[Any]], tokenizer: PreTrainedTokenizerBase, label_names: Sequence[str]
    ) -> dict[str, list[Any]]:
        """Windows of at most ``max_length`` + 1 tokens; neighbours share one, the last input and first target.

        A window's ``num_bytes`` is its share, by tokens, of the document's UTF-8 bytes.
        """
        start = next(
            i for i in (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) if i is not None
        )
        end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        examples: dict[str, list[Any]] = {column: [] for column in self.example_columns}
        for text, ids in zip(documents["text"], self.token_ids(documents["text"], tokenizer), strict=True):
            tokens = np.array([start, *ids, *end], dtype=np.int32)
            bytes_per_target = len(text.encode()) / max(1, len(tokens) - 1)
            for first in range(0, len(tokens) - 1, self.data.max_length):
                window = tokens[first : first + self.data.max_length + 1]
                examples["tokens"].append(window)
                examples["length"].append(len(window) - 1)
                examples["num_bytes"].append(bytes_per_target * (len(window) - 1))
        return examples

    def collate(self, examples: Sequence[Mapping[str, Any]], seed: Sequence[int], pad_id: int) -> MicroBatch:
        """``input_ids`` and ``labels``, both (B, S), the label being the next token.

        There is no attention mask: the padding stands at the end, where causal attention keeps every token from
        seeing it, and a mask would cost the fast attention kernels.
        """
        tokens = [torch.tensor(example["tokens"], dtype=torch.long) for example in examples]
        lengths = [len(t) - 1 for t in tokens]
        return MicroBatch(
            inputs={"input_ids": pad([t[:-1] for t in tokens], pad_id)},
            labels=pad([t[1:] for t in tokens], IGNORE),
            num_targets=sum(lengths),
            example_ids=tuple(int(example["id"]) for example in examples),
            num_tokens=sum(lengths),
        )

    def references(self, texts: Sequence[str]) -> dict[str, float]:
        """Bits per byte that no model is needed for: the entropy of single bytes, and xz at its best preset."""
        data = "".join(texts).encode()
        counts = Counter(data).values()
        entropy = -sum(n / len(data) * math.log2(n / len(data)) for n in counts)
        return {"order-0 entropy": entropy, "xz -9": 8 * len(lzma.compress(data, preset=9)) / len(data)}

    def sample(self, model: nn.Module, tokenizer: PreTrainedTokenizerBase, text: str, seed: int) -> str | None:
        """What the model writes after the beginning of ``text``, the seam marked.

        None where it cannot generate, or ``text`` has no token to go on from.
        """
        from transformers import GenerationMixin, PreTrainedModel

        if not (isinstance(model, PreTrainedModel) and isinstance(model, GenerationMixin)):
            return None
        ids = next(self.token_ids([text], tokenizer))[: min(64, self.data.max_length // 2)]
        if not ids:
            return None
        model.eval()
        prompt = torch.tensor([ids], device=model.device)
        torch.manual_seed(seed)
        written = cast("Any", model).generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=min(160, self.data.max_length - len(ids)),
            do_sample=True,
            temperature=0.8,
            top_k=50,
            pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
        )
        return f"{tokenizer.decode(ids)}⟪{tokenizer.decode(written[0, len(ids) :], skip_special_tokens=True)}⟫"
