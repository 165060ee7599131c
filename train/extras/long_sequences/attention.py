"""Attention within documents: several share a row, none sees another, and no mask of S × S is made.

transformers makes such a mask for ``sdpa`` as soon as positions start again within a row, or a window slides. The
implementation here, registered in its place, gets the lengths instead: on a card flash attention takes them all
in one call, elsewhere each document is attended to by itself. Without lengths it is ``sdpa``.
"""

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from train.extras.device import flash_lacks_backward, product_dtype
from train.extras.small_copy import differ, logits_on_trial, tokens_on_trial, tried_on_small_copies
from train.records import UsageError, one_line

Tensors = Sequence[Tensor]  # query (B, H, S, D), key and value (B, H', S, D)
MIN_QUERIES = 256  # computed together where a window slides: with fewer, launching would take longer than computing


@dataclass(frozen=True)
class Documents:
    """Where documents begin and end in the rows of a packed batch: an input of the model next to ``input_ids`` (B, S).

    Padding at a row's end counts as a document. The lengths are numbers, so that nobody waits for the device.
    """

    lengths: tuple[tuple[int, ...], ...]  # tokens of each document, row by row; a row's add up to S
    boundaries: Tensor  # (documents + 1,) int32: where each begins in all rows laid end to end, and B · S

    @classmethod
    def of(cls, lengths: Sequence[Sequence[int]]) -> "Documents":
        flat = [0, *(length for row in lengths for length in row)]
        return cls(tuple(map(tuple, lengths)), torch.tensor(flat).cumsum(0).to(torch.int32))

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, rows: slice) -> "Documents":
        return Documents.of(self.lengths[rows])

    @property
    def longest(self) -> int:
        return max(max(row) for row in self.lengths)

    def position_ids(self) -> Tensor:
        """(B, S) each token's place in its document, from 0."""
        return torch.stack([torch.cat([torch.arange(length) for length in row]) for row in self.lengths])

    def to(self, device: torch.device, non_blocking: bool = True) -> "Documents":
        return replace(self, boundaries=self.boundaries.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> "Documents":
        return replace(self, boundaries=self.boundaries.pin_memory())


def set_document_boundaries(model: Any) -> None:
    """From now on ``model`` takes ``documents`` next to its other arguments, and its attention stays within them.

    Where none are given, and neither a mask nor a cache, each row is one document: so a sliding window needs no mask.
    """
    if isinstance(model, PreTrainedModel):  # beneath the head, which may pool by the mask
        model.base_model.register_forward_pre_hook(_with_documents, with_kwargs=True)
    else:
        for child in model.children():
            set_document_boundaries(child)


def _with_documents(model: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The arguments for transformers' forward: documents in its terms; by default each row is one document."""
    documents, implementation = kwargs.pop("documents", None), model.config._attn_implementation
    if documents is None:
        ids = args[0] if args else kwargs.get("input_ids")
        told = any(kwargs.get(name) is not None for name in ("attention_mask", "past_key_values", "cache"))
        if told or len(args) > 1 or ids is None or implementation != "sdpa":
            return args, kwargs
        documents = Documents.of([[ids.shape[1]]] * len(ids)).to(ids.device)
    cuts, longest = documents.boundaries, documents.longest
    if implementation == "sdpa":
        # A mask of four dimensions is taken as it is: the model then neither makes one nor looks at positions.
        return args, {**kwargs, "attention_mask": cuts.new_empty((1, 1, 1, 1)), "documents": documents}
    # Without lengths, for eager and flex_attention, transformers finds the documents by their positions.
    lengths = {"cu_seq_lens_q": cuts, "cu_seq_lens_k": cuts, "max_length_q": longest, "max_length_k": longest}
    return args, kwargs | lengths if "flash" in implementation else kwargs


def attend(module: nn.Module, *given: Any, documents: Documents | None = None, **options: Any) -> tuple[Tensor, None]:
    """An attention function of transformers: query (B, H, S, D), key, value (B, H', S, D) and mask to (B, S, H, D).

    Where there are documents no mask is looked at. Of the ``options``, ``sliding_window`` says how many tokens one sees
    to its left, itself included, and where it is not causal to its right. Raises ValueError for what this cannot do.
    """
    if documents is None:
        return attend_rows(module, *given, **options)
    for name in ("softcap", "s_aux", "position_bias"):  # which a trial might take for rounding
        if options.get(name) is not None:
            raise ValueError(f"its attention uses {name}")
    causal, window = options.get("is_causal"), options.get("sliding_window")
    causal = bool(getattr(module, "is_causal", True) if causal is None else causal)
    how = {"dropout": options.get("dropout", 0.0), "scaling": options.get("scaling"), "is_causal": causal}
    return _attend_within(module, given[:3], documents, window, how), None


def attend_within_documents(
    query: Tensor, key: Tensor, value: Tensor, documents: Documents | None, is_causal: bool = False, dropout: float = 0
) -> Tensor:
    """torch's ``scaled_dot_product_attention`` for a module of your own: (B, H, S, D) of key, value (B, H', S, D).

    No token sees those of other documents in its row. Without ``documents`` each row is one.
    """
    module = cast("nn.Module", SimpleNamespace(num_key_value_groups=query.shape[1] // key.shape[1]))
    how = {"documents": documents, "is_causal": is_causal, "dropout": dropout, "scaling": None}
    return attend(module, query, key, value, None, **how)[0].transpose(1, 2)


def attend_rows(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """transformers' ``sdpa``; repeats heads of key and value where torch would hold all scores to share them."""
    shared, within = query.shape[1] // key.shape[1], module
    if shared > 1 and not _kernels_share_heads(query, options.get("dropout", 0.0)):
        key, value = (tensor.repeat_interleave(shared, dim=1) for tensor in (key, value))
        within = cast("nn.Module", SimpleNamespace(is_causal=getattr(module, "is_causal", True)))  # shares none
    return sdpa_attention_forward(within, query, key, value, attention_mask, **options)


# From now on ``sdpa`` of transformers takes documents, and shares heads only where that saves.
AttentionInterface.register("sdpa", attend)


def _kernels_share_heads(query: Tensor, dropout: float = 0.0) -> bool:
    """Whether torch's attention without a mask shares heads in a kernel that does not hold all scores.

    On a card flash attention and cuDNN do, the memory-efficient kernel does not (torch 2.13, ``sdp_utils.cpp``).
    """
    if query.device.type != "cuda":
        return True
    capability, size = torch.cuda.get_device_capability(query.device), query.shape[-1]
    is_half = product_dtype(query) in (torch.float16, torch.bfloat16)
    return is_half and capability >= (8, 0) and size <= 256 and not flash_lacks_backward(capability, size, dropout)


@torch.compiler.disable(reason="each batch has other lengths: each would be compiled again")
def _attend_within(module: nn.Module, tensors: Tensors, documents: Documents, window: int | None, how: Any) -> Tensor:
    """(B, S, H, D) attention within documents; ``how``: what :func:`attend_rows` is told."""
    window = None if window is None or window >= documents.longest else window
    if how["dropout"] == 0.0 and _suits_flash(tensors[0], tensors[2]):
        return _attend_at_once(tensors, documents, window, how)

    def within(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if window is None or window >= query.shape[2]:
            return attend_rows(module, query, key, value, None, **how)[0]
        windows = _windows(query.shape[2], window, how["is_causal"], query.device)
        parts = ((query[:, :, q], key[:, :, k], value[:, :, k], mask) for q, k, mask in windows)
        return torch.cat([attend_rows(module, *part, **how)[0] for part in parts], dim=1)

    return _one_by_one(within, tensors, documents.lengths)


def _one_by_one(within: Callable[..., Tensor], tensors: Tensors, rows: Sequence[tuple[int, ...]]) -> Tensor:
    """(B, S, H, D) ``within`` of each document; rows that are cut alike go together."""
    if len(set(rows)) > 1:
        each = zip(*(tensor.split(1) for tensor in tensors), strict=True)
        return torch.cat([_one_by_one(within, row, [lengths]) for row, lengths in zip(each, rows, strict=True)])
    attended = [within(*part) for part in zip(*(tensor.split(rows[0], dim=2) for tensor in tensors), strict=True)]
    return attended[0] if len(attended) == 1 else torch.cat(attended, dim=1)


def _windows(length: int, window: int, causal: bool, device: torch.device) -> Iterator[tuple[slice, slice, Tensor]]:
    """Queries of a window or more, the keys that any of them sees, and which sees which (1, 1, queries, keys)."""
    step = max(window, MIN_QUERIES)
    for first in range(0, length, step):
        end = min(length, first + step)
        left, right = max(0, first - window + 1), end if causal else min(length, end + window - 1)
        ahead = torch.arange(left, right, device=device) - torch.arange(first, end, device=device).unsqueeze(1)
        visible = (ahead > -window) & (ahead < (1 if causal else window))
        yield slice(first, end), slice(left, right), visible[None, None]


def _suits_flash(query: Tensor, value: Tensor) -> bool:
    head_size, on_card = query.shape[-1], query.device.type == "cuda"
    return on_card and _kernels_share_heads(query) and head_size % 8 == 0 and value.shape[-1] == head_size


def _attend_at_once(tensors: Tensors, documents: Documents, window: int | None, how: dict[str, Any]) -> Tensor:
    """(B, S, H, D) by one kernel, the rows laid end to end."""
    cuts, longest, dtype = documents.boundaries, documents.longest, product_dtype(tensors[0])
    query, key, value = (tensor.to(dtype).transpose(1, 2).flatten(0, 1) for tensor in tensors)
    reach = -1 if window is None else window - 1
    options = {"scale": how["scaling"], "window_size": (reach, 0 if how["is_causal"] else reach)}
    attended = flash_over_lengths()(query, key, value, cuts, cuts, longest, longest, **options)
    return attended.unflatten(0, (len(documents), -1))


@functools.cache
def flash_over_lengths() -> Callable[..., Any]:
    """torch's ``varlen_attn``, imported when it is needed: that takes a third of a second."""
    from torch.nn.attention.varlen import varlen_attn

    shares = "enable_gqa" in inspect.signature(varlen_attn).parameters  # in torch 2.11 without being asked
    return functools.partial(varlen_attn, enable_gqa=True) if shares else varlen_attn


def has_short_windows(model: Any, max_length: int) -> bool:
    """Whether ``model`` has windows shorter than ``max_length``, for which ``sdpa`` would make a mask of S × S."""
    if not isinstance(model, PreTrainedModel) or model.config._attn_implementation != "sdpa":
        return False
    with suppress(Exception):  # of configurations whose layers each have their own
        return (getattr(model.config.get_text_config(), "sliding_window", None) or max_length) < max_length
    return False


def check_documents(model: nn.Module, vocabulary: int = 64, max_length: int = 0) -> None:
    """Raises UsageError, naming the obstacle, if :func:`set_document_boundaries` would not keep documents apart."""
    if obstacle := obstacle_to_documents(model, vocabulary=vocabulary, max_length=max_length):
        name = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
        remedy = "Leave packing out, or take another model (llama, bert ..., your own: docs/extras/long_sequences.md)"
        raise UsageError(f"packing: {name} cannot keep documents apart that share a row: {obstacle}. {remedy}.")


def obstacle_to_documents(model: Any, shared: bool = True, vocabulary: int = 64, max_length: int = 0) -> str | None:
    """Why documents that share a row, or whole rows, would be seen wrongly, or None; a small copy is given them alone,
    by its own attention, and together."""
    is_eager = getattr(getattr(model, "config", None), "_attn_implementation", None) == "eager"
    if isinstance(model, PreTrainedModel):
        vocabulary = min(vocabulary, getattr(model.config.get_text_config(), "vocab_size", vocabulary))

    def trial(small: Any) -> str | None:
        tokens = torch.cat([row := tokens_on_trial(small, vocabulary=min(64, vocabulary)), row.flip(1)])
        documents = Documents.of([[5, 3, 4], [8, 4]] if shared else [[12], [12]])
        rope = getattr(getattr(small, "config", None), "rope_parameters", None) or {}
        if rope.get(trained := "original_max_position_embeddings", max_length) < max_length:
            rope[trained] = 6  # above which longrope has other factors, for all documents of a batch
        inputs = {"position_ids": documents.position_ids(), "documents": documents} if shared else {}
        rows = [row.unsqueeze(0).split(cut, dim=1) for row, cut in zip(tokens, documents.lengths, strict=True)]
        alone = torch.cat([torch.cat([logits_on_trial(small, part) for part in row], dim=1) for row in rows])
        set_document_boundaries(small)
        if hasattr(small, "set_attn_implementation"):
            small.set_attn_implementation("eager" if is_eager else "sdpa")
        changes = differ(logits_on_trial(small, tokens, **inputs), alone)
        how = " by eager attention" if is_eager else ""
        return f"a small copy gives other results for them than alone{how}" if changes else None

    try:
        return tried_on_small_copies(model, trial)
    except Exception as error:  # models fail in their own ways
        return f"trying it failed ({type(error).__name__}: {one_line(error, 200)})"
