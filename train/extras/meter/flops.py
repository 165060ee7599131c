"""How well a run uses its devices: floating-point operations (FLOPs) of its texts, and model FLOPs utilization (MFU).

As in appendix B of PaLM (arXiv 2204.02311) a multiply-add is two operations and recomputed activations do not count, so
that a run does not look better for doing more work. For the same reason, and unlike in PaLM, only pairs of positions
that see each other count: half of the square if attention is causal, within a window or a packed document.
"""

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from train.extras.weightless import inputs_on_trial, obstacle_on_trial
from train.model import logits_of
from train.records import MicroBatch

STRIDE = 64  # a model is counted at 1, 2 and 3 × as many tokens; linear attention works in chunks of them
FARTHEST = 32 * STRIDE  # what these three give is held to a count at so many tokens, or at the longest text
MAX_OPERATORS = 40_000  # of one forward and backward: some 4 seconds; 24 layers take 7,000


def attended(length: float, window: float | None = None, is_causal: bool = False) -> float:
    """How many positions one of ``length`` attends to, on average: all or those in its window, not later ones."""
    seen = min(window or length, length)
    return seen - seen**2 / (2 * length) if is_causal else seen


class ModelFlops(NamedTuple):
    """FLOPs of forward and backward: a polynomial of second degree in the length of a text."""

    constant: float  # of a text, such as those of a classifier's head
    linear: float  # of a token
    quadratic: float  # of two positions, one of which attends to the other
    layers: dict[tuple[int | None, int | None], float]  # shares of layers with attention by window and chunk
    is_causal: bool

    def of(self, length: float) -> float:
        """FLOPs of one text of ``length`` tokens that see each other."""
        seen = 0.0
        for (window, chunk), share in self.layers.items():
            seen += share * attended(min(length, chunk or length), window, self.is_causal)
        return self.constant + length * (self.linear + self.quadratic * seen)


def text_lengths(batch: MicroBatch) -> list[float]:
    """Tokens of each text: of documents in packed rows, by the mask, or the mean of rows, which are similarly long.

    Empty where a decoder reads texts of its own, which a model's FLOPs do not know.
    """
    if "decoder_input_ids" in batch.inputs:
        return []
    if (documents := batch.inputs.get("documents")) is not None:
        return [length for row in documents.lengths for length in row]
    if (mask := batch.inputs.get("attention_mask")) is not None:
        return mask.sum(1).tolist()
    return [batch.num_tokens / batch.shape[0]] * batch.shape[0]


def count_flops(model: nn.Module, longest: int, is_causal: bool = False) -> ModelFlops | None:
    """Counts a model, not yet compiled, wrapped or sharded, on a copy without weights: a second or two for 24 layers.

    Matrix products count: those of the forward, and of the gradients that ``requires_grad`` of the weights asks for. Of
    a mixture of experts, those a token is sent to count. The decoder of an encoder-decoder reads as many tokens as its
    encoder; tokens are those of the encoder, and pairs count as in the encoder. None for a model that cannot be run
    without data, that loops over positions, or whose cost is not such a polynomial. It counts as causal, too, if its
    layers with attention all say so. Texts have up to ``longest`` tokens.
    """
    unit, far = max(1, min(STRIDE, longest // 3)), min(longest, FARTHEST)  # no longer than positions go
    if (counts := _count_flops(model, [unit, 2 * unit, 3 * unit, far])) is None:
        return None
    one, two, three, farther = counts
    quadratic = (three - 2 * two + one) / (2 * unit**2)
    linear = (two - one) / unit - 3 * unit * quadratic
    constant = one - unit * linear - unit**2 * quadratic
    if abs(constant + linear * far + quadratic * far**2 - farther) > 0.01 * farther:
        return None
    said = {module.is_causal for module in model.modules() if isinstance(getattr(module, "is_causal", None), bool)}
    is_causal, config = is_causal or said == {True}, getattr(model, "config", None)
    config = getattr(config, "get_text_config", lambda: config)()
    # A window of transformers reaches so far to the left and, where attention is not causal, as far to the right.
    window = (getattr(config, "sliding_window", None) or 0) * (1 if is_causal else 2)
    known = {"full_attention": (None, None), "chunked_attention": (None, getattr(config, "attention_chunk_size", None))}
    known |= {"sliding_attention": (window, None), "hybrid": (None, None), "hybrid_sliding": (window, None)}
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"]
    found = [known[kind] for kind in kinds if kind in known] or [(None, None)]
    layers = {layer: found.count(layer) / len(found) for layer in found}
    return ModelFlops(constant, linear, quadratic, layers, is_causal)  # type: ignore


class _FlopCounter(TorchDispatchMode):
    """Adds up torch's formulas without operators that backward repeats, which ``FlopCounterMode`` cannot tell apart."""

    flops = _num_operators = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace == "prim":  # where a tensor lies: fake tensors ask, and an error here would end the process
            return result
        self._num_operators += 1
        if self._num_operators > MAX_OPERATORS:
            raise OverflowError
        formula = flop_registry.get(func.overloadpacket)
        in_backward = torch._C._current_graph_task_id() != -1
        is_repeated = in_backward and torch.is_grad_enabled()  # backward records nothing itself
        if formula is not None and not is_repeated:
            self.flops += formula(*args, **(kwargs or {}), out_val=result)
        return result


def _count_flops(model: nn.Module, lengths: Sequence[int]) -> list[int] | None:
    """FLOPs of forward and backward of one sequence of each length, attention between all pairs; None as above."""
    counts = list[int]()

    def trial(twin: Any, is_body: bool = False) -> None:
        with suppress(OverflowError):  # too many operators: nothing is counted, and nothing else tried
            counts[:] = _count(twin, lengths, is_body)

    if obstacle_on_trial(model, trial) and getattr(model, "get_output_embeddings", lambda: None)() is None:  # type: ignore
        obstacle_on_trial(model, partial(trial, is_body=True))  # a classifier may look for the end of each text
    return counts or None


def _count(twin: Any, lengths: Sequence[int], is_body: bool) -> list[int]:
    for module in twin.modules():
        packed = getattr(getattr(module, "weight", None), "quant_state", None)
        if packed is not None:  # a layer in 4 bits counts as a linear one
            module.__class__, module.weight = nn.Linear, nn.Parameter(torch.empty(packed.shape), False)
        if hasattr(module, "compute_whole"):  # in tiles an operator of backward could not be told from one repeated
            module.forward = module.compute_whole
    part, counts = twin.float().base_model if is_body else twin.float(), []
    for length in lengths:
        named = inputs_on_trial(twin, torch.zeros((1, length), dtype=torch.long))
        with _FlopCounter() as counter, torch.enable_grad():
            answer = part(**named).last_hidden_state if is_body else logits_of(part(**named))
            if answer.requires_grad:
                torch.autograd.backward(answer.sum())  # into gradients of the copy, which nobody reads
        counts.append(counter.flops)
    return counts
