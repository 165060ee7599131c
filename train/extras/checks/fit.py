"""Whether model, tokenizer, length and task fit each other; told before documents are tokenised, where possible."""

import math
from typing import Any

from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers import PreTrainedTokenizerBase as Tokenizer

from train.extras.small_copy import TRIED_PARAMETERS, obstacle_to_batches, obstacle_to_task
from train.extras.weightless import LIMIT, skipped_positions
from train.records import Run, UsageError, UserError
from train.tasks import Task


def check_tokenizer(task: Task, tokenizer: Tokenizer) -> None:
    """Raises UserError if the tokenizer lacks a token that the task needs, or special tokens leave no room for text."""
    marks, length = len(task.framed([], tokenizer)), task.data.max_length
    if not task.is_causal and length <= marks:  # a causal window is cut out of a document with its special tokens
        why = f"{task.name} adds {marks} tokens for start and end"
        raise UserError(f"max_length: {length} leaves no room for text: {why}. Give {marks + 1} or more.")
    if tokenizer.pad_token_id is None and tokenizer.eos_token_id is None:
        raise UserError(f"{task.name}: the tokenizer has neither a padding nor an end token; choose another one.")
    for name in task.needed_tokens:
        if getattr(tokenizer, f"{name}_token_id", None) is None:
            raise UserError(f"{task.name}: the tokenizer has no {name} token; take one that does (bytes, train:8192).")


def check_sizes(config: PretrainedConfig, num_tokens: int, max_length: int, skipped: int = 0) -> None:
    """Raises UserError for a vocabulary or a table of positions that is too small; ``skipped`` are never used."""
    if (vocab_size := getattr(config, "vocab_size", None)) is not None and vocab_size < num_tokens:
        give = "give the tokenizer that belongs to it (leave --tokenizer out), or a larger vocab_size in model_config"
        raise UserError(f"the model has {vocab_size} embeddings, the tokenizer {num_tokens} tokens: {give}.")
    if max_length > (limit := (getattr(config, LIMIT, None) or 0) - skipped) > 0:
        give = f"give --max_length {limit} or less, --rope_scaling yarn (without a factor) where positions are rotary, "
        give += "not scaled in another way, or a config with more max_position_embeddings"
        raise UserError(f"max_length: {max_length} is more than the model's {limit} positions: {give}.")


def try_small_copy(run: Run, network: nn.Module, task: type[Task], known: tuple[int, int, int]) -> None:
    """Raises UsageError for a network of which a small copy shows, by numbers, that it cannot learn the task.

    ``known``: how many tokens and labels there are, and which token pads.
    """
    if not hasattr(network, "_from_config") and sum(p.numel() for p in network.parameters()) > TRIED_PARAMETERS:
        run.outputs.note("model: too large to try whether padding or later tokens change its results")
    obstacle = obstacle_to_batches(network, task, run.config, known[:2])
    if obstacle := obstacle or obstacle_to_task(network, task, run.config, known[0], known[2]):
        raise UsageError(f"model {run.config.architecture.name!r}: {obstacle}. --check_model False skips this trial.")


def check_network(run: Run, network: Any, sizes: tuple[int, int]) -> None:
    """Raises UserError for a network that cannot take the tokens or tell the classes; ``sizes``: of both."""
    own, (num_tokens, num_labels) = run.config.architecture, sizes
    if not isinstance(network, nn.Module):
        raise UserError(f"model {own.name!r} returned a {type(network).__name__}; it must return an nn.Module.")
    for name, value in network.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor):
            raise UserError(f"model {own.name!r}: no checkpoint can hold its {name}: make it a tensor.")
    config = getattr(network, "config", None)
    known = getattr(config, "num_labels", num_labels)
    if own.is_function and num_labels and known != num_labels:
        found = f"--num_labels says {num_labels}" if run.is_planned else f"the data has {num_labels} of them"
        raise UserError(f"model {own.name!r} returned a model of {known} classes; {found}.")
    if isinstance(config, PretrainedConfig):
        check_sizes(config.get_text_config(), num_tokens, run.config.data.max_length, skipped_positions(network))


def check_shards(model: nn.Module) -> None:
    """Raises UserError where a rank holds no row of a parameter: torch has no largest element of nothing."""
    for name, parameter in model.named_parameters():
        mesh, rows = getattr(parameter, "device_mesh", None), math.prod(parameter.shape[:1])
        ranks = 1 if mesh is None else mesh.size(mesh.ndim - 1)  # replicas come first
        if parameter.requires_grad and -(-rows // ranks) * (ranks - 1) >= rows > 0:
            why = f"grad_norm_type: inf cannot be computed: {name} has only {rows} rows, so some ranks hold none"
            raise UserError(f"{why}. Use --grad_norm_type 2, or fewer processes.")
