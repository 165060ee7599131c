"""Tokenizers for tests: none can be fetched, so the readers make them."""

from __future__ import annotations

from collections.abc import Iterable

from transformers import PreTrainedTokenizerBase

from train.extras.readers.own_tokenizers import build_tokenizer


def tokenizer_of(spec: str, texts: Iterable[str] = ()) -> PreTrainedTokenizerBase:
    """``bytes``, ``words`` or ``train:N``, the latter two made from ``texts``."""
    return build_tokenizer(spec, texts)
