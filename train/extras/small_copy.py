"""What a model makes of later tokens, padding and labels, found on a small copy of it, by numbers."""

import copy
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from train.config import Config
from train.model import logits_of, set_use_cache
from train.records import one_line
from train.tasks import Task, cross_entropy, pad

# Of small copies: what widths are divided by, and how many layers stay; the first that works is taken.
SCALES = tuple((factor, layers) for layers in (8, 2, 999) for factor in (32, 16, 8, 4, 2, 1))
MIN_WIDTH = 32  # fewer, and normalised, would say little
TRIED_PARAMETERS = 40_000_000
LIMITS = {"token_id$": 3, "vocab": 64, "window|chunk": 3, "num.*experts|experts?$": 16}  # by names in a configuration
WIDTHS = "^(?!.*(position|kernel|conv|num_)).*(size|dim|embd|d_(model|ff|head)|ffn|inner|rank|hidden|channels)"


def obstacle_to_batches(model: nn.Module, task: type[Task], config: Config, sizes: tuple[int, int]) -> str | None:
    """Why a module of one's own cannot take a batch of ``task``, or None; ``sizes``: of vocabulary and classes."""
    ids = torch.full((2, min(8, config.data.max_length)), sizes[0] - 1)
    classes = sizes[task.label_names is not Task.label_names]  # a task with tags, too, names its classes
    inputs, needed = {"input_ids": ids}, (2, classes) if task.labelled else (*ids.shape, classes)
    is_plain = (task.loss_sum, task.collate) == (Task.loss_sum, Task.collate) and not hasattr(task, "longest_example")
    if hasattr(model, "_from_config") or not is_plain:
        return None  # of transformers, or of a task that may need another shape
    with suppress(Exception), small_copy(model) as small:  # what cannot be copied a run finds out by itself
        try:
            logits = logits_of(small(**inputs))
            if not (task.is_causal or _is_alone(config)):  # a mask comes with rows of different lengths alone
                inputs["attention_mask"] = torch.ones_like(ids)
                logits = logits_of(small(**inputs))
            shape = logits.shape if isinstance(logits, Tensor) else torch.Size()
            found = f"logits of the shape {tuple(shape)}" if shape else f"a {type(logits).__name__} for logits"
            fits = shape[:-1] == needed[:-1] and shape[-1] >= classes
            problem = None if fits else f"{found}, and {task.name} needs {needed}"
        except Exception as error:  # models fail in their own ways
            problem = f"{type(error).__name__}: {one_line(error, 200)}"
        given = f"for {' and '.join(inputs)} {tuple(ids.shape)}, ids below {sizes[0]}"
        return problem and f"{given} by name, it gives {problem}, not logits or a dict with them (docs/forking.md)"
    return None


def obstacle_to_task(model: nn.Module, task: type[Task], config: Config, vocabulary: int, pad_id: int) -> str | None:
    """Why ``model`` cannot learn ``task``, as far as a small copy tells: a reason and what to do, or None."""

    def trial(small: Any) -> str | None:
        tokens = tokens_on_trial(small, config.data.max_length, vocabulary)
        if task.is_causal:
            earlier = logits_on_trial(small, tokens)[:, :-1]
            tokens[:, -1] = 1
            if not (earlier.isfinite().all() and differ(logits_on_trial(small, tokens)[:, :-1], earlier)):
                return None
            is_encoder = getattr(getattr(small, "config", None), "is_decoder", None) is False
            why = f"its tokens see those that follow{' (is_decoder: false in its configuration)' if is_encoder else ''}"
            instead = ", or a model with is_decoder: true" if is_encoder else ""
            remedy = f"use --task masked_lm, or a decoder, such as llama or gpt2{instead}"
            return f"{why}, so {task.name} would learn to copy what it is to predict: {remedy}"
        row = tokens[0]
        if not task.labelled and (task.loss_sum, task.collate) == (Task.loss_sum, Task.collate):
            logits = logits_on_trial(small, tokens)
            if logits.shape[:2] != tokens.shape:
                return f"its logits for {tuple(tokens.shape)} tokens are {tuple(logits.shape)}. Give another model"
            with suppress(Exception):  # not every model has a loss of its own
                own = small(input_ids=tokens, labels=row.flip(0)[None]).loss
                if differ(own, cross_entropy(logits, row.flip(0), reduction="mean")):
                    return f"its own loss is not that of {task.name}. Give another model"
        short, own_id = row[len(row) // 2 :], getattr(getattr(small, "config", None), "pad_token_id", None)
        inputs = pad([row, short], pad_id if own_id is None else own_id)
        mask = pad([torch.ones_like(row), torch.ones_like(short)], 0)
        second, alone = logits_on_trial(small, inputs, attention_mask=mask)[1:], logits_on_trial(small, short[None])
        second = second[:, : len(short)] if second.ndim > 2 else second  # of rows that see each other: another shape
        if not _is_alone(config) and second.shape[1:] == alone.shape[1:] and differ(second, alone):
            return "padding changes its results. Give --micro_batch_size 1 --eval_batch_size 1, or another model"
        return None

    with suppress(Exception):  # what cannot be tried a run finds out by itself
        return tried_on_small_copies(model, trial)
    return None


def _is_alone(config: Config) -> bool:
    """Whether each micro-batch is one example, so that nothing is padded."""
    sizes = (config.optimization.micro_batch_size, config.output.eval_batch_size or 1)
    return sizes == (1, 1) and config.get("max_tokens_per_micro_batch") is None


def tried_on_small_copies(model: nn.Module, trial: Callable[[Any], str | None]) -> str | None:
    """What ``trial`` finds wrong with a small copy in fp32 and, since a model may magnify rounding, in fp64, too."""
    with small_copy(model) as small:
        problem = trial(small)
    if problem is not None:
        with suppress(Exception), small_copy(model, torch.float64) as small:  # not every model can compute in it
            problem = trial(small)
    return problem


@contextmanager
def on_trial() -> Iterator[None]:
    """Real values on the CPU, not those of a prediction, and the same random numbers each time; without gradients."""
    with _disable_current_modes(), torch.device("cpu"), torch.random.fork_rng([]), torch.no_grad():
        torch.default_generator.manual_seed(0)  # not those of devices, which are not restored
        yield


@contextmanager
def small_copy(model: nn.Module, dtype: torch.dtype = torch.float32) -> Iterator[nn.Module]:
    """An architecture to try: few narrow layers, short windows, on the CPU, in evaluation mode.

    Its weights are random and large, so that what one token takes from another is far above rounding. A model that is
    not one of transformers is copied as it is, with such weights; ValueError where it has too many parameters for that.
    """
    with on_trial():
        for factor, layers in SCALES if hasattr(model, "_from_config") else ():
            with suppress(Exception):  # configurations and models fail in their own ways
                small = boosted(_shrunk(model, factor, layers)).to(dtype)
                if logits_on_trial(small, tokens_on_trial(small)).isfinite().all():
                    break
        else:
            _check_size(model)
            small = copy.deepcopy(model).cpu()  # in which complex and fp64 tensors, if any, stay what they are
            small._apply(lambda t: t.to(dtype) if t.is_floating_point() and t.itemsize < dtype.itemsize else t)
            boosted(small)
        set_use_cache(small, False)  # as in a run
        yield small


def tokens_on_trial(small: Any, max_length: int = 12, vocabulary: int = 64) -> Tensor:
    """(1, at most 12) token ids that are not special, but for an end at the end, where some look for their result."""
    tokens, config = torch.arange(5, 5 + min(12, max_length)) % vocabulary, getattr(small, "config", None)
    end_id = getattr(config, "eos_token_id", None)
    tokens[-1] = end_id if isinstance(end_id, int) else tokens[-1]
    return tokens.unsqueeze(0)


def logits_on_trial(small: nn.Module, input_ids: Tensor, **inputs: Any) -> Tensor:
    """Its logits, the same each time, even if it draws numbers."""
    torch.default_generator.manual_seed(0)
    return logits_of(small(input_ids=input_ids, **inputs))


def differ(one: Tensor, other: Tensor) -> bool:
    """Whether logits differ by more than the rounding of fp32; those that are not finite do."""
    return not bool((one - other).abs().max() <= 1e-4 * other.abs().max())


def _check_size(model: nn.Module) -> None:
    if sum(p.numel() for p in model.parameters()) > TRIED_PARAMETERS:
        raise ValueError("it has too many parameters to be tried")


def _shrunk(model: Any, factor: int, layers: int) -> nn.Module:
    """With widths divided by ``factor`` and the first ``layers``, more where those lack a kind of layer."""
    config = copy.deepcopy(model.config)
    config._attn_implementation_internal = None  # its own choice for a CPU
    count = config.get_text_config().num_hidden_layers
    for part in (config, *(getattr(config, name) for name in config.sub_configs)):
        values = dict(vars(part))
        lists = {name: value for name, value in values.items() if isinstance(value, list) and len(value) == count}
        few = [value for value in lists.values() if len(set(map(str, value))) < count / 2]  # not the layers' numbers
        kinds = [str(kind) for kind in zip(*few, strict=True)]
        keep = max([layers, *(1 + kinds.index(kind) for kind in kinds)])
        for name, value in lists.items():
            setattr(part, name, value[:keep])
        for name, value in values.items():
            if type(value) is int:
                is_width = value >= MIN_WIDTH and re.search(WIDTHS, name) and ("inter" in name or value % factor == 0)
                limits = [limit for pattern, limit in LIMITS.items() if re.search(pattern, name)]
                limits += [keep] if value == count and re.search("layer|block", name) else []
                setattr(part, name, min(value, *limits or [value // factor if is_width else value]))
        rope = getattr(part, "rope_parameters", None) or {}  # longrope: a factor for each pair of dimensions of a head
        rope |= {name: value[-(len(value) // factor) :] for name, value in rope.items() if isinstance(value, list)}
    if factor > 1 and config.get_text_config().hidden_size < MIN_WIDTH:
        raise ValueError("too narrow")
    with torch.device("meta"):
        _check_size(type(model)._from_config(copy.deepcopy(config)))
    return type(model)._from_config(config, dtype=torch.float32)


def boosted(model: nn.Module) -> nn.Module:
    """``model`` with random weights that keep the size of what passes them, and those of padding zero."""
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point():
            noise, around = torch.randn(parameter.shape), 0 if name.endswith("bias") else 1
            parameter.copy_(noise * parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else around + 0.1 * noise)
    for module in model.modules():
        if isinstance(module, nn.Embedding) and module.padding_idx is not None:
            module.weight[module.padding_idx] = 0
    return model.eval()
