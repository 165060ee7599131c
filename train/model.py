"""From the configuration to a model with its loss: from a folder, the Hub, an architecture, or a function of yours."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, PretrainedConfig
from transformers import PreTrainedTokenizerBase as Tokenizer

from train.config import Architecture
from train.data import call_function
from train.records import IGNORE, Run, UserError, one_line
from train.tasks import Scores, Task, pad_token_id, stored_config

LIMIT = "max_position_embeddings"  # transformers' name for it; -1: none


class ModelWithLoss(nn.Module):
    """``model`` and the loss of its logits (its task's) as the module that is prepared."""

    def __init__(self, model: nn.Module, task: type[Task] = Task) -> None:
        super().__init__()
        self.model = model
        self.loss_sum, self.scores = task.loss_sum, task.scores
        # Set by an extra: in place of forward, called with this module and forward's arguments, without all logits.
        self.loss_in_head: Callable[..., Any] | None = None

    def tie_weights(self) -> None:
        """Ties weights that the model shares between layers, after these were put in one by one."""
        if hasattr(self.model, "tie_weights"):
            self.model.tie_weights()  # pyright: ignore[reportCallIssue]

    def forward(
        self, inputs: dict[str, Any], labels: Tensor, scored: bool = False, num_targets: int | None = None
    ) -> Tensor | Scores:
        """The summed loss (); ``scored``: each example's plain cross-entropy, and predictions.

        ``inputs`` are keyword arguments of the model; ``labels`` (B, S) or (B,) are aligned with its logits. A caller
        who knows how many labels are targets says so: counting them here would wait for the device.
        """
        if self.loss_in_head is not None:
            return self.loss_in_head(self, inputs, labels, scored, num_targets)
        logits = logits_of(output := self.model(**inputs))
        if scored:
            return self.scores(logits, labels)
        return balanced(self.loss_sum(logits, labels), output, labels, self.model)


def logits_of(output: Any) -> Any:
    """The logits of a model's output: a tensor, a mapping or an object that has them."""
    if isinstance(output, Tensor | Scores):
        return output
    return output["logits"] if isinstance(output, dict) else output.logits


def balanced(loss_sum: Tensor, output: Any, labels: Tensor, model: Any) -> Tensor:
    """``loss_sum`` and, for each target, the load balancing loss of a mixture of experts (arXiv 2101.03961, eq. 4).

    As in transformers, a model computes it where its configuration has ``output_router_logits: true``.
    """
    balance, weight = output.get("aux_loss") if isinstance(output, dict) else getattr(output, "aux_loss", None), 1.0
    if balance is None:
        return loss_sum
    if isinstance(getattr(model, "config", None), PretrainedConfig):  # any other model weights it by itself
        config = model.config.get_text_config()
        weight = getattr(config, "router_aux_loss_coef", None) or getattr(config, "aux_loss_coef", 0.0)
    return loss_sum + weight * balance * (labels != IGNORE).sum()


def build_model(
    run: Run, task: type[Task], tokenizer: Tokenizer, label_names: Sequence[str] = (), has_weights: bool = True
) -> ModelWithLoss:
    """The model to train with its loss, changed by the extras, on the default device.

    Without ``has_weights`` a pretrained model's configuration is enough. Raises UserError if the model cannot be found
    or built, or does not fit tokenizer, length or task.
    """
    own, max_length = run.config.architecture, run.config.data.max_length
    # The network: a function's, or one of transformers from a configuration that extras may change.
    model_config, arguments = fitting_config(run, task, tokenizer)
    network = _from_function(run, own.name, len(label_names)) if model_config is None else None
    if isinstance(found := getattr(network, "config", None), PretrainedConfig):
        model_config = found
    if label_names and model_config is not None:
        model_config.id2label = dict(enumerate(label_names))
        model_config.label2id = {name: number for number, name in enumerate(label_names)}
        for part in (model_config, model_config.get_text_config()):
            part.pad_token_id = pad_token_id(tokenizer)  # by it the last token of each row is found
    if network is None:
        network = _from_transformers(own, task, model_config, arguments, has_weights)
    _check_fit(model_config, tokenizer, max_length, skipped_positions(network))
    # In evaluation, nn.TransformerEncoder's fast path reads weights past the adapters that surround them.
    torch.backends.mha.set_fastpath_enabled(False)
    run.extras.each("check_model", run, network, task, (len(tokenizer), len(label_names)))
    # In evaluation mode as from_pretrained returns it, a network would train without dropout.
    network.train()
    # Inside it, in a fixed order: document masks, adapters, tiles, checkpointing, compilation.
    run.extras.each("change_model", run, network, task)
    # Around it: the loss, so that logits never leave the forward.
    model = ModelWithLoss(network, task)
    run.extras.each("change_loss", run, model)
    return model


def _from_function(run: Run, name: str, num_labels: int) -> Any:
    network = call_function(name, "model", run.config)
    if not isinstance(network, nn.Module):
        raise UserError(f"model {name!r} returned a {type(network).__name__}; it must return an nn.Module.")
    known = getattr(getattr(network, "config", None), "num_labels", num_labels)
    if num_labels and known != num_labels:
        raise UserError(f"model {name!r} returned a model of {known} classes; the data has {num_labels} of them.")
    return network


def _from_transformers(
    own: Architecture, task: type[Task], model_config: Any, arguments: dict[str, Any], has_weights: bool
) -> nn.Module:
    stored, factory = own.model is not None, getattr(transformers, task.auto_class)
    options: dict[str, Any] = {"dtype": getattr(torch, own.dtype), "trust_remote_code": own.trust_remote_code}
    options |= {"attn_implementation": own.attn_implementation} if own.attn_implementation else {}
    try:
        if stored and has_weights:
            model = factory.from_pretrained(own.model, config=model_config, **options, **arguments)
        else:
            model = factory.from_config(model_config, **options)
            if (skipped := skipped_positions(model)) and not stored and LIMIT not in (own.model_config or {}):
                model_config.max_position_embeddings += skipped
                model = factory.from_config(model_config, **options)
    except Exception as why:  # transformers, and what it reads weights with, raise exceptions of all kinds
        raise UserError(f"model {own.name!r} cannot be built: {one_line(why)}") from None
    model.config.use_cache = False
    return model


def _new_config(own: Architecture, task: type[Task], tokenizer: Tokenizer, max_length: int) -> PretrainedConfig:
    fields = dict(own.model_config or {})
    model_type = fields.pop("model_type")
    # A missing padding token stays missing: with the end token in its place, that one's embedding would stay zero.
    ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    try:
        known = AutoConfig.for_model(model_type)
        # Some read what they do not declare: Qwen3-MoE's model takes head_dim if it is there.
        model_class = getattr(transformers, task.auto_class)._model_mapping.get(type(known), None)
        read = inspect.getsource(import_module(model_class.__module__)) if model_class else ""
        declared = inspect.getsource(import_module(type(known).__module__))
        read += "".join(re.findall(r'kwargs\.(?:pop|get)\("\w+"', declared))
        if unknown := [n for n in fields if n not in {*dir(known), *known.attribute_map} and f'"{n}"' not in read]:
            raise UserError(f"model_config: {model_type} has no field {', '.join(unknown)}.")
        for name, instead in ("cls_token_id", "bos_token_id"), ("sep_token_id", "eos_token_id"):
            if hasattr(known, name):  # ModernBERT's own default lies outside a small vocabulary
                ids[name] = getattr(tokenizer, instead if getattr(tokenizer, name, None) is None else name)
        if getattr(known, LIMIT, -1) != -1 and not {LIMIT, known.attribute_map.get(LIMIT)} & set(fields):
            fields[LIMIT] = max_length
        if known.is_encoder_decoder and getattr(known, "decoder_start_token_id", None) is None:
            fields.setdefault("decoder_start_token_id", pad_token_id(tokenizer))  # as T5 was trained
        if task.is_causal and getattr(known, "is_decoder", None) is False:
            fields.setdefault("is_decoder", True)  # else models such as bert attend to both sides
        return AutoConfig.for_model(model_type, **{"vocab_size": len(tokenizer), **ids, **fields})
    except UserError:
        raise
    except Exception as error:  # configuration classes validate with exceptions of many libraries
        raise UserError(f"model_config: {model_type}: {one_line(error)}") from None


def fitting_config(run: Run, task: type[Task], tokenizer: Tokenizer) -> tuple[PretrainedConfig | None, dict[str, Any]]:
    """transformers' configuration (None: a function's model) and further arguments; UserError if it cannot fit."""
    own, max_length = run.config.architecture, run.config.data.max_length
    config = _new_config(own, task, tokenizer, max_length) if own.model is None else None
    if own.model is not None and not own.is_function:
        config = stored_config(own)
    known, brought = getattr(transformers, task.auto_class)._model_mapping, getattr(config, "auto_map", None) or {}
    if config is not None and type(config) not in known and task.auto_class not in brought:
        raise UserError(f"model: transformers has no {config.model_type} for {task.name}: give another model or task.")
    changes = run.extras.merged("change_model_config", run, config)
    _check_fit(config, tokenizer, max_length)
    return config, changes


def skipped_positions(model: nn.Module) -> int:
    """How many rows of its table of positions a model never uses: RoBERTa's family counts from the padding's on."""
    tables = [m for name, m in model.named_modules() if name.endswith("position_embeddings")]
    return max((m.padding_idx + 1 for m in tables if getattr(m, "padding_idx", None) is not None), default=0)  # pyright: ignore


def _check_fit(config: PretrainedConfig | None, tokenizer: Tokenizer, max_length: int, skipped: int = 0) -> None:
    vocab_size = getattr(config, "vocab_size", None)
    if vocab_size is not None and vocab_size < len(tokenizer):
        raise UserError(
            f"the model has {vocab_size} embeddings, the tokenizer {len(tokenizer)} tokens: give the tokenizer that "
            "belongs to the model (leave --tokenizer out), or a larger vocab_size in model_config."
        )
    limit = (getattr(config, LIMIT, None) or 0) - skipped
    if max_length > limit > 0:
        raise UserError(
            f"max_length: {max_length} is more than the model's {limit} positions: give --max_length {limit} or less, "
            "--rope_scaling yarn where positions are rotary, or a model_config with more max_position_embeddings."
        )
