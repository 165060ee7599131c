"""What a trained language model writes, and what its bits per byte compare with."""

from __future__ import annotations

import lzma
import math
from collections import Counter
from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import nn
from transformers import GenerationMixin, PreTrainedModel

from train.records import Run
from train.tasks import Task, pad_token_id

REFERENCE_BYTES = 8 * 2**20  # xz takes a second for each of these MiB


def references(texts: Iterable[str]) -> dict[str, float]:
    """Bits per byte without any model: the entropy of single bytes, and xz at its best preset, of a first part."""
    data = bytearray()
    for text in texts:
        data += text.encode()
        if len(data) >= REFERENCE_BYTES:
            break
    del data[REFERENCE_BYTES:]
    counts = Counter(data).values()
    entropy = -sum(n / len(data) * math.log2(n / len(data)) for n in counts)
    return {"order-0 entropy": entropy, "xz -9": 8 * len(lzma.compress(data, preset=9)) / len(data)}


def sample(run: Run, task: Task, model: nn.Module, tokenizer: Any, text: str) -> str | None:
    """How the model continues the beginning of ``text``, the seam marked; None if it cannot or has no token."""
    if not (task.is_causal and isinstance(model, PreTrainedModel) and isinstance(model, GenerationMixin)):
        return None
    max_length = run.config.data.max_length
    ids = next(task.token_ids([text], tokenizer))[: min(64, max_length // 2)]
    if not ids:
        return None
    model.eval()
    prompt = torch.tensor([[*task.marks(tokenizer)[0], *ids]], device=model.device)
    torch.manual_seed(run.config.optimization.seed)
    drawing = {"do_sample": True, "temperature": 0.8, "top_k": 50, "pad_token_id": pad_token_id(tokenizer)}
    room, seen = min(160, max_length - prompt.shape[1]), torch.ones_like(prompt)
    written = cast("Any", model).generate(prompt, attention_mask=seen, max_new_tokens=room, **drawing)
    return f"{tokenizer.decode(ids)}⟪{tokenizer.decode(written[0, prompt.shape[1] :], skip_special_tokens=True)}⟫"
