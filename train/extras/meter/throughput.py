"""How well a run uses its devices: floating-point operations (FLOPs) per token, and model FLOPs utilization (MFU).

As in appendix B of PaLM (arXiv 2204.02311) a multiply-add is two operations and recomputed activations do not count, so
that a run does not look better for doing more work. Loads torch only where a model is counted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from train.extras.meter.cards import peak_flops_per_second as peak_flops_per_second  # for those that look for it here

if TYPE_CHECKING:
    from torch import nn

STRIDE = 64
"""A model is counted at one, two and three times so many tokens; linear attention works in chunks of so many."""


def mfu(
    tokens_per_second: float, flops_per_token: float | None, peak: float | None, num_devices: int = 1
) -> float | None:
    """Model FLOPs utilization, a share between 0 and 1; None where the model's cost or the device's peak is unknown.

    Args:
        tokens_per_second: of all devices together.
        flops_per_token: see :func:`model_flops_per_token`.
        peak: FLOP/s of one device, see :func:`train.extras.meter.cards.peak_flops_per_second`.
        num_devices: devices that share the work.
    """
    if flops_per_token is None or peak is None:
        return None
    return tokens_per_second * flops_per_token / (peak * num_devices)


def model_flops_per_token(model: nn.Module, sequence_length: int) -> float | None:
    """Floating-point operations of forward and backward per token, counted operator by operator on the meta device.

    What counts are the matrix products: of the forward, and of the gradients that ``requires_grad`` of the weights
    asks for. A frozen weight has no gradient of its own, and below the first trained one there is no backward at all.
    Each position attends to all others of its sequence, also where a causal mask hides half of them (as in PaLM), or to
    its window. Of a mixture of experts, those a token is sent to count. The decoder of an encoder-decoder reads as many
    tokens as its encoder; tokens are those of the encoder.

    FLOPs of a sequence are a polynomial of second degree in its length. It is read off three short lengths, which takes
    a second for 24 layers, and the quadratic part is then reduced where layers have windows.

    Args:
        model: before it is compiled, wrapped or sharded; on any device. Not changed.
        sequence_length: tokens that see each other, those of a document or of a packed row; 0 leaves attention out.

    Returns:
        None for a model that cannot be run without data, or that loops over positions.
    """
    from train.extras.meter.flops import count_flops

    unit = STRIDE if sequence_length == 0 else max(1, min(STRIDE, sequence_length // 3))  # no longer than positions go
    counts = count_flops(model, [unit, 2 * unit, 3 * unit])
    if counts is None:
        return None
    one, two, three = counts
    quadratic = (three - 2 * two + one) / (2 * unit**2)
    linear = (two - one) / unit - 3 * unit * quadratic
    constant = one - unit * linear - unit**2 * quadratic  # such as the head of a classifier
    attended = _attended_length(getattr(model, "config", None), sequence_length)
    return linear + quadratic * attended + constant / max(sequence_length, 1)


def flops_per_token(
    num_parameters: int, num_embedding_parameters: int, num_layers: int, hidden_size: int, sequence_length: int
) -> float:
    """PaLM's formula 6·N + 12·L·H·Q·T for a decoder that is only described, all of its weights trained.

    N: parameters less those of tables that are only looked up; L: ``num_layers`` with attention; H·Q: ``hidden_size``,
    heads times the size of a head; T: ``sequence_length``, tokens that see each other.
    """
    return 6.0 * (num_parameters - num_embedding_parameters) + 12.0 * num_layers * hidden_size * sequence_length


def _attended_length(config: Any, sequence_length: int) -> float:
    """How many positions a token attends to, the mean of the layers with attention."""
    # ModernBERT's sliding_window is half of its window, local_attention the whole.
    window = getattr(config, "local_attention", None) or getattr(config, "sliding_window", None) or sequence_length
    chunk = getattr(config, "attention_chunk_size", None) or sequence_length
    lengths = {"full_attention": sequence_length, "sliding_attention": min(window, sequence_length)}
    lengths["chunked_attention"] = min(chunk, sequence_length)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"]
    found = [lengths[kind] for kind in kinds if kind in lengths] or [sequence_length]
    return sum(found) / len(found)
