"""One builder for the model: from a folder, the Hub, an architecture in the recipe, or a function of one's own."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from torch import nn

from train.causality import check_causal
from train.config import Architecture
from train.errors import UserError
from train.extras.activations.recompute import enable_checkpointing
from train.extras.activations.tiling import tile_mlps
from train.extras.adapters import lora as adapters
from train.extras.long_sequences import attention
from train.extras.long_sequences.rope import extend

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase


CAUSAL_LM = "AutoModelForCausalLM"
UNREADABLE = (
    OSError,
    ValueError,
    ImportError,
    RuntimeError,
    AttributeError,
    TypeError,
    KeyError,
    SafetensorError,
    UnpicklingError,
)
"""What transformers raises at a model that it cannot make; the last: weights that would run code."""


def build_model(
    config: Architecture,
    auto_class: str,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    label_names: Sequence[str] = (),
    weights: bool = True,
    packing: bool = False,
    precision: str = "no",
) -> nn.Module:
    """The model to train, with adapters and activation checkpointing set up, on the default device.

    Args:
        auto_class: class of transformers for the task, by name.
        max_length: positions that the data will use.
        label_names: classes of a classifier; empty where the vocabulary is the classes.
        weights: load a pretrained model's weights; without them its configuration is enough.
        packing: rows hold several documents, and the model is told where each begins
            (:mod:`train.extras.long_sequences.attention`).
        precision: of autocast, in which layers kept in 4 bits multiply; ``no``: in the type of the weights.

    Raises:
        UserError: the model cannot be found or built, or does not fit tokenizer or length.
    """
    compute_dtype = getattr(torch, {"bf16": "bfloat16", "fp16": "float16"}.get(precision, config.dtype))
    if config.model is not None and ":" in config.model and not Path(config.model).exists():
        model = _from_function(config.model)
    else:
        model = _from_transformers(config, auto_class, tokenizer, max_length, label_names, weights, compute_dtype)
    if auto_class == CAUSAL_LM:
        name = config.model or str((config.model_config or {}).get("model_type"))
        check_causal(model, name, len(tokenizer), max_length, weights)
    if packing:
        attention.check_documents(model)
    if packing or attention.can_slide_without_mask(model, max_length):
        attention.tell_documents(model)
    if config.adapter != "none":
        adapters.add_adapter(model, config, auto_class, compute_dtype)
    if config.tiled_mlp:
        tile_mlps(model, config.mlp_tile_tokens)
    enable_checkpointing(
        model,
        config.gradient_checkpointing,
        config.gradient_checkpointing_every_n_layers,
        config.gradient_checkpointing_offload,
    )
    return model


def _from_function(spec: str) -> nn.Module:
    module_name, _, function_name = spec.partition(":")
    sys.path.insert(0, str(Path.cwd()))
    try:
        model = getattr(importlib.import_module(module_name), function_name)()
    except (ImportError, AttributeError) as error:
        raise UserError(
            f"model {spec!r}: {error}. Give module:function, importable from the current folder, without arguments."
        ) from None
    finally:
        sys.path.pop(0)
    if not isinstance(model, nn.Module):
        raise UserError(f"model {spec!r} returned a {type(model).__name__}; it must return an nn.Module.")
    return model


def _from_transformers(
    config: Architecture,
    auto_class: str,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    label_names: Sequence[str],
    weights: bool,
    compute_dtype: torch.dtype,
) -> nn.Module:
    import transformers

    factory = getattr(transformers, auto_class)
    from_scratch = config.model is None
    model_config = _new_config(config, auto_class, tokenizer, max_length) if from_scratch else _stored_config(config)
    extend(model_config, config, max_length)
    if label_names:
        model_config.id2label = dict(enumerate(label_names))
        model_config.label2id = {name: number for number, name in enumerate(label_names)}
        model_config.pad_token_id = pad_token_id(tokenizer)  # by it the last token of each row is found
    _check_fit(model_config, tokenizer, max_length)
    options: dict[str, Any] = {"dtype": getattr(torch, config.dtype)}
    if config.attn_implementation:
        options["attn_implementation"] = config.attn_implementation
    try:
        if config.model is None:
            model = factory.from_config(model_config, **options)
        elif not weights:
            model = factory.from_config(model_config, trust_remote_code=config.trust_remote_code, **options)
        else:
            if config.adapter == "qlora" and not hasattr(model_config, "quantization_config"):
                with torch.device("meta"):
                    shape = factory.from_config(model_config, trust_remote_code=config.trust_remote_code)
                options["quantization_config"] = adapters.quantization(shape, auto_class, compute_dtype)
            model = factory.from_pretrained(
                config.model, config=model_config, trust_remote_code=config.trust_remote_code, **options
            )
    except UNREADABLE as error:
        raise UserError(
            f"model {config.model or model_config.model_type!r} cannot be built: {' '.join(str(error).split())[:500]}"
        ) from None
    model.config.use_cache = False
    return model


def _new_config(
    config: Architecture, auto_class: str, tokenizer: PreTrainedTokenizerBase, max_length: int
) -> PretrainedConfig:
    from transformers import AutoConfig

    fields = dict(config.model_config or {})
    model_type = fields.pop("model_type")
    vocabulary = {"vocab_size": len(tokenizer)} if "vocab_size" not in fields else {}
    special = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,  # not the end token for want of one: its embedding would stay zero
    }
    try:
        known = AutoConfig.for_model(model_type)
        unknown = [name for name in fields if not hasattr(known, name)]
        if unknown:
            raise UserError(f"model_config: {model_type} has no field {', '.join(unknown)}.")
        limit = "max_position_embeddings"
        if limit not in fields and hasattr(known, limit) and known.attribute_map.get(limit, limit) not in fields:
            fields[limit] = max_length
        if known.is_encoder_decoder and getattr(known, "decoder_start_token_id", None) is None:
            fields.setdefault("decoder_start_token_id", pad_token_id(tokenizer))  # as T5 was trained
        if auto_class == CAUSAL_LM and getattr(known, "is_decoder", None) is False:
            fields.setdefault("is_decoder", True)  # else bert and its like attend to both sides
        return AutoConfig.for_model(model_type, **{**special, **vocabulary, **fields})
    except UserError:
        raise
    except Exception as error:  # configuration classes validate with exceptions of many libraries
        raise UserError(f"model_config: {model_type}: {' '.join(str(error).split())[:500]}") from None


def _stored_config(config: Architecture) -> PretrainedConfig:
    from transformers import AutoConfig

    assert config.model is not None
    try:
        return AutoConfig.from_pretrained(config.model, trust_remote_code=config.trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(
            f"model {config.model!r} cannot be loaded: {' '.join(str(error).split())[:300]} Give a folder with a "
            "model, a Hub name (and a connection), module:function, or a model_config to train from scratch."
        ) from None


def pad_token_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """The padding token, or the end token where there is none."""
    found = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    return found if isinstance(found, int) else 0


def _check_fit(config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase, max_length: int) -> None:
    vocab_size = getattr(config, "vocab_size", None)
    if vocab_size is not None and vocab_size < len(tokenizer):
        raise UserError(
            f"the model has {vocab_size} embeddings, the tokenizer {len(tokenizer)} tokens: give the tokenizer that "
            "belongs to the model (leave --tokenizer out), or a larger vocab_size in model_config."
        )
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and max_length > limit > 0:
        raise UserError(
            f"max_length: {max_length} is more than the model's {limit} positions: give --max_length {limit} or less, "
            "--rope_scaling yarn where positions are rotary, or a model_config with more max_position_embeddings."
        )
