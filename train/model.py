"""From the configuration to a model with its loss: from a folder, the Hub, an architecture, or a function of yours."""

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers import PreTrainedTokenizerBase as Tokenizer

from train.config import call_function
from train.records import IGNORE, Run, UserError, one_line
from train.tasks import Scores, Task, model_config_of, num_ids, pad_token_id


class ModelWithLoss(nn.Module):
    """The module that accelerate prepares: ``model`` with its task's loss of the logits."""

    def __init__(self, model: nn.Module, task: Task | type[Task] = Task) -> None:
        super().__init__()
        self.model = model
        self.loss_sum, self.scores = task.loss_sum, task.scores
        self.tie_weights = getattr(model, "tie_weights", list)  # accelerate calls it after loading weights
        # Set by a task or an extra: called in place of forward, with this module and forward's arguments.
        self.loss_in_head: Callable[..., Any] | None = None

    def forward(
        self, inputs: dict[str, Any], labels: Tensor, scored: bool = False, num_targets: int | None = None
    ) -> Tensor | Scores:
        """The summed loss (); ``scored``: each example's plain cross-entropy, and predictions.

        ``inputs`` are keyword arguments of the model; ``labels`` (B, S) or (B,) are aligned with its logits.
        ``num_targets``, if known, goes to ``loss_in_head``, which would otherwise wait for the device to count them.
        """
        if self.loss_in_head is not None:
            return self.loss_in_head(self, inputs, labels, scored, num_targets)
        logits = logits_of(output := self.model(**inputs))
        if scored:
            return self.scores(logits, labels)
        return with_aux_loss(self.loss_sum(logits, labels), output, labels, self.model)


def logits_of(output: Any) -> Any:
    """The logits of a model's output, a mapping or an object; the output itself, such as a tensor, if it has none."""
    return output.get("logits", output) if isinstance(output, dict) else getattr(output, "logits", output)


def with_aux_loss(loss_sum: Tensor, output: Any, labels: Tensor, model: Any) -> Tensor:
    """``loss_sum`` and, for each target, the load balancing loss of a mixture of experts (arXiv 2101.03961, eq. 4).

    As in transformers, a model computes it where its configuration has ``output_router_logits: true``. A model
    without a weight for it, such as one of your own, applies the weight itself.
    """
    balance = output.get("aux_loss") if isinstance(output, dict) else getattr(output, "aux_loss", None)
    if balance is None:
        return loss_sum
    config = model.config.get_text_config() if isinstance(getattr(model, "config", None), PretrainedConfig) else None
    names = ("router_aux_loss_coef", "aux_loss_coef")
    weights = (w for owner in (model, config) for name in names if (w := getattr(owner, name, None)) is not None)
    return loss_sum + next(weights, 1.0) * balance * (labels != IGNORE).sum()


def build_model(
    run: Run, task: type[Task], tokenizer: Tokenizer, label_names: Sequence[str] = (), has_weights: bool = True
) -> ModelWithLoss:
    """The model to train with its loss, changed by the extras, on the default device.

    Without ``has_weights`` a pretrained model's configuration is enough. UserError if none is found, or none that fits.
    """
    network = build_network(run, task, tokenizer, label_names, has_weights)
    # In evaluation, nn.TransformerEncoder's fast path reads weights past the adapters that surround them.
    torch.backends.mha.set_fastpath_enabled(False)
    run.extras.each("check_model", run, network, task, (num_ids(tokenizer), len(label_names)))
    set_use_cache(network, False)
    # In evaluation mode as from_pretrained returns it, a network would train without dropout.
    network.train()
    # Inside it, in a fixed order: document masks, adapters, tiles, checkpointing, compilation.
    run.extras.each("change_model", run, network, task)
    # Around it: the loss, so that logits never leave the forward.
    own = task(run.config)  # not the data's task: that was made before auto was settled
    own.change_loss(model := ModelWithLoss(network, own))
    run.extras.each("change_loss", run, model)
    return model


def build_network(
    run: Run, task: type[Task], tokenizer: Tokenizer, label_names: Sequence[str], has_weights: bool = True
) -> nn.Module:
    """A function's network, or one of transformers from a configuration that extras may change; not checked yet."""
    os.environ.setdefault("USE_HUB_KERNELS", "NO")  # they would take memory that no plan knows, and a download
    own = run.config.architecture
    model_config, arguments = model_config_of(run, task, tokenizer)
    network: Any = call_function(own.name, "model", run.config) if own.is_function else None
    if isinstance(found := getattr(network, "config", None), PretrainedConfig):
        model_config = found
    # A function's model has its number of classes already; where it is another one, checks refuse the model.
    fits = not own.is_function or getattr(model_config, "num_labels", 0) == len(label_names)
    if label_names and model_config is not None and fits:
        model_config.id2label = dict(enumerate(label_names))
        model_config.label2id = {name: number for number, name in enumerate(label_names)}
        if task.loss_sum is Task.loss_sum and getattr(model_config, "problem_type", None):
            model_config.problem_type = "single_label_classification"  # not what the model was trained for before
        if model_config.is_encoder_decoder and (end := task(run.config).special_tokens(tokenizer)[1]):
            model_config.eos_token_id = end[0]  # by which Bart's and T5's classifiers find the end of a text
    factory = getattr(transformers, task.auto_class)
    options: dict[str, Any] = {"dtype": getattr(torch, own.dtype), "trust_remote_code": own.trust_remote_code}
    options |= {"attn_implementation": own.attn_implementation} if own.attn_implementation else {}
    try:
        if not own.is_function and (own.model is None or not has_weights):
            network = factory.from_config(model_config, **options)
        elif not own.is_function:
            options["ignore_mismatched_sizes"] = bool(label_names)  # a head for other classes starts from scratch
            network = factory.from_pretrained(own.model, config=model_config, **options, **arguments)
    except Exception as why:  # transformers, and what it reads weights with, raise exceptions of all kinds
        raise UserError(f"model {own.name!r} cannot be built: {one_line(why)}") from None
    if label_names and model_config is not None and fits:
        # Classifiers find the last token of a row by it. Not sooner: some count positions by what they are built with.
        for part in (network.config, network.config.get_text_config()):
            part.pad_token_id = pad_token_id(tokenizer)
    return network


def set_use_cache(network: nn.Module, is_kept: bool) -> None:
    """Sets ``use_cache`` in every part: generation needs the cache of keys and values, an evaluation wastes memory."""
    for module in network.modules():  # the text model of a larger one has a configuration of its own
        if isinstance(config := getattr(module, "config", None), PretrainedConfig) and hasattr(config, "use_cache"):
            config.use_cache = is_kept  # type: ignore
