"""A copy of a model without its weights, on which extras try what it allows; compiled models; models' positions."""

import copy
import inspect
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes
from transformers.utils import import_utils

from train.records import one_line

LIMIT = "max_position_embeddings"  # transformers' name for the number of positions; -1: none


def obstacle_on_trial(model: nn.Module, trial: Callable[[Any], str | None]) -> str | None:
    """What ``trial`` says of a copy of ``model`` without weights, or why it failed.

    So it costs little, leaves the model and all generators alone, and answers the same everywhere, fake weights or not.
    """
    # Meta tensors take a third of the time, but with fake tensors constants that a model makes are known. transformers
    # asks neither for values: it knows fake tensors, and is told that meta tensors are such.
    meta = patch.object(import_utils, "is_fake_tensor", lambda tensor: tensor.is_meta)
    for mode, device in (meta, "meta"), (FakeTensorMode(allow_non_fake_inputs=True), "cpu"):
        uncompiled = torch.compiler.set_stance("force_eager")
        try:  # What a prediction counts, and the device that it builds on, do not matter here.
            with _disable_current_modes(), torch.device(device), mode, uncompiled, warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about tensors without values
                return trial(without_weights(model, device).eval())
        except Exception as error:  # models fail in their own ways
            problem = f"trying it failed ({type(error).__name__}: {one_line(error, 200)})"
    return problem


def uncompiled(model: nn.Module) -> AbstractContextManager[Any]:
    """Inside it compiled layers of ``model`` run as if they were not: for samples, whose shapes all differ, and where
    operators are watched, because torch would never compile a function that it first met meanwhile."""
    compiled = any(getattr(module, "_compiled_call_impl", None) is not None for module in model.modules())
    return torch.compiler.set_stance("force_eager") if compiled else nullcontext()


def inputs_on_trial(model: Any, ids: Tensor) -> dict[str, Tensor]:
    """``ids`` for the model; for an encoder-decoder's decoder, too, which may not make its own from them."""
    takes_both = "decoder_input_ids" in inspect.signature(model.forward).parameters
    both = takes_both or getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    return {"input_ids": ids, "decoder_input_ids": ids} if both else {"input_ids": ids}


def without_weights(model: nn.Module, device: str = "cpu", real: torch.dtype | None = None) -> Any:
    """A copy of meta tensors, or fake ones in a FakeTensorMode, shaped and tied alike; ``real``: the type of floats."""
    twins: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        dtype = real if real is not None and tensor.is_floating_point() else tensor.dtype
        twin = torch.empty(tensor.shape, dtype=dtype, device=device)
        twins[id(tensor)] = nn.Parameter(twin, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else twin
        if (scales := getattr(tensor, "quant_state", None)) is not None:  # of weights in 4 bits
            own = [] if real else [*vars(scales).values(), *vars(scales.state2 or scales).values()]
            twins |= {id(t): torch.empty(t.shape, dtype=t.dtype, device=device) for t in own if isinstance(t, Tensor)}
            twins[id(tensor)].quant_state = copy.deepcopy(scales, twins)
    twin: Any = copy.deepcopy(model, twins)
    for part in twin.modules():
        if hasattr(part, "set_attn_implementation"):  # of transformers: what every device has, and looks at no value
            part.set_attn_implementation("eager")
            part.set_experts_implementation("batched_mm")
    return twin


def skipped_positions(model: nn.Module) -> int:
    """How many rows of its table of positions a model never uses: RoBERTa's family counts from the padding's on."""
    tables = [m for name, m in model.named_modules() if name.endswith("position_embeddings")]
    return max((m.padding_idx + 1 for m in tables if getattr(m, "padding_idx", None) is not None), default=0)  # type: ignore
