"""Models from scratch: transformers' configuration from the few fields that a recipe gives."""

import inspect
import re
import traceback
from collections.abc import Iterable
from contextlib import suppress
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Any

from train import extras
from train.records import Run, UserError, one_line

MISFIT = "size of tensor|shapes cannot be multiplied|invalid for input of size|index k out of range"  # as torch says


class Extra(extras.Extra):
    def new_model_config(self, run: Run, task: Any, tokenizer: Any) -> Any:
        """The ``model_config`` of a recipe completed for tokenizer, length and task; UserError where it is wrong."""
        fields = dict(run.config.architecture.model_config or {})
        model_type = fields.pop("model_type")
        try:
            return completed(model_type, fields, task, tokenizer, run.config.data.max_length)
        except UserError:
            raise
        except Exception as error:  # configuration classes validate with exceptions of many libraries
            raise UserError(f"model_config: {model_type}: {one_line(error)}") from None

    def failed(self, run: Run | None, error: Exception) -> str | None:
        """Says where the sizes of a model do not fit each other, which its own code finds in the first forward."""
        own = run.config.architecture if run is not None else None
        every = traceback.extract_tb(error.__traceback__)
        frames = [f for f in every if not {"torch", "meter"} & {*Path(f.filename).parts}]  # which the model calls
        is_theirs = frames and "transformers" in (path := Path(frames[-1].filename)).parts
        if own is None or own.model_config is None or not (is_theirs and re.search(MISFIT, str(error))):
            return None
        hint = "Do its sizes fit each other, such as num_attention_heads and num_key_value_heads?"
        return f"model_config: {own.name} fails in {path.name}:{frames[-1].lineno}: {one_line(error)}. {hint}"


def completed(model_type: str, fields: dict[str, Any], task: Any, tokenizer: Any, max_length: int) -> Any:
    """transformers' configuration with ``fields``, and those that follow from the other arguments."""
    import torch
    from transformers import CONFIG_MAPPING, AutoConfig, AutoModel, initialization

    from train.extras.weightless import LIMIT, skipped_positions
    from train.tasks import num_ids

    if model_type not in CONFIG_MAPPING:
        close = meant(model_type, CONFIG_MAPPING)
        raise UserError(f"model_config: transformers has no model_type {model_type}.{close}")
    known = AutoConfig.for_model(model_type)
    if unknown := sorted(fields.keys() - (read := read_fields(known, task))):
        raise UserError(f"model_config: {model_type} has no field {', '.join(unknown)}.{meant(unknown[0], read)}")
    # A missing padding token stays missing: with the end token in its place, that one's embedding would stay zero.
    ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    for name in ("cls_token_id", "sep_token_id", "forced_eos_token_id"):
        if hasattr(known, name):  # ModernBERT's own default lies outside a small vocabulary, Bart's is another token
            instead = "bos_token_id" if name == "cls_token_id" else "eos_token_id"
            ids[name] = getattr(tokenizer, instead if getattr(tokenizer, name, None) is None else name)
    if is_free := getattr(known, LIMIT, -1) != -1 and not {LIMIT, known.attribute_map.get(LIMIT)} & set(fields):
        fields[LIMIT] = max_length
    if task.is_causal and getattr(known, "is_decoder", None) is False:
        fields.setdefault("is_decoder", True)  # else models such as bert attend to both sides
    config = AutoConfig.for_model(model_type, **{"vocab_size": num_ids(tokenizer), **ids, **fields})
    if is_free:  # some count positions from the padding's on: with max_length rows the last texts would not fit
        # By its class: from_config would have DeepSpeed shard it, a collective. A run reports what cannot be built.
        with suppress(Exception), torch.device("meta"), initialization.no_init_weights():
            kind: Any = AutoModel._model_mapping[type(config)]
            config.max_position_embeddings += skipped_positions(kind(config))
    return config


def meant(name: str, known: Iterable[str]) -> str:
    """The name that is most like one that is not ``known``, as a question."""
    return "".join(f" Did you mean {close}?" for close in get_close_matches(name, known, n=1))


def read_fields(known: Any, task: Any) -> set[str]:
    """Names of fields that a configuration declares, or that the model's code reads without declaring them."""
    import transformers

    # Qwen3-MoE's model takes head_dim if it is there.
    model_class = getattr(transformers, task.auto_class)._model_mapping.get(type(known), None)
    read = inspect.getsource(import_module(model_class.__module__)) if model_class else ""
    declared = inspect.getsource(import_module(type(known).__module__))
    read += "".join(re.findall(r'kwargs\.(?:pop|get)\("\w+"', declared))
    return {*dir(known), *known.attribute_map, *re.findall(r'(?<=")\w+(?=")|(?<=config\.)\w+', read)}
