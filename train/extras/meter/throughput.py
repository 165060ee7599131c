"""How well a run uses its devices: floating-point operations per token, and model FLOPs utilization (MFU).

The count follows appendix B of PaLM (arXiv 2204.02311): a multiply-add is two operations, backward costs twice the
forward, and recomputed activations do not count, so that a run does not look better for doing more work.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn

# Dense FLOP/s from NVIDIA's data sheets and architecture white papers: {words of the name: (fp16, bf16, fp32)}.
# Data sheets that print only the rate with sparsity are halved; GeForce and RTX cards: fp16 with fp32 accumulation;
# fp32 is the rate without tensor cores (TF32 off). None: not supported in hardware, or no figure to rely on.
# The first row whose words all occur in the device's name counts.
_PEAKS: dict[str, tuple[float | None, float | None, float | None]] = {
    "gb200": (2500e12, 2500e12, None),
    "b200": (2250e12, 2250e12, None),
    "gh200": (989.4e12, 989.4e12, 66.9e12),
    "h200 nvl": (835.5e12, 835.5e12, 60e12),
    "h200": (989.4e12, 989.4e12, 66.9e12),
    "h100 nvl": (835.5e12, 835.5e12, 60e12),
    "h100 pcie": (756.5e12, 756.5e12, 51.2e12),
    "h100 hbm2e": (756.5e12, 756.5e12, 51.2e12),
    "h100": (989.4e12, 989.4e12, 66.9e12),
    "a100": (312e12, 312e12, 19.5e12),
    "a10g": (70e12, 70e12, 31.5e12),
    "a10": (125e12, 125e12, 31.2e12),
    "l40s": (362e12, 362e12, 91.6e12),
    "l40": (181e12, 181e12, 90.5e12),
    "l4": (121e12, 121e12, 30.3e12),
    "t4": (65e12, None, 8.1e12),
    "v100s": (130e12, None, 16.4e12),
    "v100 pcie": (112e12, None, 14e12),
    "v100": (125e12, None, 15.7e12),
    "rtx 6000 ada": (364.2e12, 364.2e12, 91.1e12),
    "a6000": (154.8e12, 154.8e12, 38.7e12),
    "rtx 5090": (209.5e12, 209.5e12, 104.8e12),
    "rtx 4090": (165.2e12, 165.2e12, 82.6e12),
    "rtx 3090 ti": (80e12, 80e12, 40e12),
    "rtx 3090": (71e12, 71e12, 35.6e12),
}
_COLUMNS = {"fp16": 0, "float16": 0, "bf16": 1, "bfloat16": 1, "no": 2, "fp32": 2, "float32": 2}
_OTHER_CHIP = {"laptop", "max", "mig", "d", "super"}
"""Words that mark a smaller chip, or a slice of one, sold under the name of a card above."""


def peak_flops_per_second(device_name: str, precision: str) -> float | None:
    """The published dense matrix rate of one device, in FLOP/s.

    Args:
        device_name: as ``torch.cuda.get_device_name`` gives it, such as "NVIDIA A100-SXM4-80GB".
        precision: of the arithmetic: fp16, bf16, tf32, or no (fp32 with TF32 off).

    Returns:
        None for a device that is not in the table, for part of one (MIG), and for a type it cannot multiply.
    """
    words = set(re.findall(r"[a-z0-9]+", device_name.lower()))
    if precision == "tf32":  # half of bf16's in every data sheet of a card above that has both
        half = peak_flops_per_second(device_name, "bf16")
        return half and half / 2
    if words & _OTHER_CHIP or precision not in _COLUMNS:
        return None
    for name, rates in _PEAKS.items():
        if words.issuperset(name.split()):
            return rates[_COLUMNS[precision]]
    return None


def flops_per_token(
    num_parameters: int,
    num_embedding_parameters: int,
    num_layers: int,
    hidden_size: int,
    sequence_length: int,
    num_frozen_parameters: int = 0,
) -> float:
    """Floating-point operations of forward and backward per token: 6·N + 12·L·H·Q·T.

    A frozen weight has no gradient of its own and counts 4 instead of 6. Every position attends to T others, also
    where a causal mask hides half of them, as in PaLM.

    Args:
        num_parameters: all parameters, a tied table counted once.
        num_embedding_parameters: those that are only looked up and never multiplied, taken off N. A table tied to
            the output head is multiplied there: leave it out here.
        num_layers: L, layers with attention.
        hidden_size: H·Q, heads times the size of a head.
        sequence_length: T, tokens that see each other: the length of a document, or of a window.
        num_frozen_parameters: those of N, embedding parameters taken off, that are not trained.
    """
    matrices = 6.0 * (num_parameters - num_embedding_parameters) - 2.0 * num_frozen_parameters
    return matrices + 12.0 * num_layers * hidden_size * sequence_length


def model_flops_per_token(model: nn.Module, sequence_length: int) -> float | None:
    """:func:`flops_per_token` of a model.

    Call it before the model is wrapped or sharded. The shape is read from a transformers-like ``model.config``;
    layers with a sliding window count their window, layers without attention count none. A model without a config
    counts 6·N.

    Returns:
        None where one N does not describe a token's way: mixtures of experts, encoder-decoders.
    """
    config = getattr(model, "config", None)
    experts = [getattr(config, name, None) or 0 for name in ("num_experts", "num_local_experts", "n_routed_experts")]
    if max(experts) > 1 or getattr(config, "is_encoder_decoder", False):
        return None
    looked_up = _looked_up(model)
    multiplied = [p for p in model.parameters() if id(p) not in looked_up]
    frozen = sum(num_weights(p) for p in multiplied if not p.requires_grad)
    matrices = flops_per_token(sum(num_weights(p) for p in multiplied), 0, 0, 0, 0, frozen)
    return matrices + sum(
        flops_per_token(0, 0, 1, _attention_width(config), length)
        for length in _attended_lengths(config, sequence_length)
    )


def mfu(
    tokens_per_second: float, flops_per_token: float | None, peak: float | None, num_devices: int = 1
) -> float | None:
    """Model FLOPs utilization, a share between 0 and 1; None where the model's cost or the device's peak is unknown.

    Args:
        tokens_per_second: of all devices together.
        flops_per_token: see :func:`model_flops_per_token`.
        peak: FLOP/s of one device, see :func:`peak_flops_per_second`.
        num_devices: devices that share the work.
    """
    if flops_per_token is None or peak is None:
        return None
    return tokens_per_second * flops_per_token / (peak * num_devices)


def num_weights(parameter: Tensor) -> int:
    """Weights in ``parameter``: more than its elements where two share a byte (bitsandbytes' 4 bits)."""
    state = getattr(parameter, "quant_state", None)
    return parameter.numel() if state is None else state.shape.numel()


def _looked_up(model: nn.Module) -> set[int]:
    """The embedding tables, by id, that no other layer multiplies with."""
    from torch import nn

    tables: set[int] = set()
    multiplied: set[int] = set()
    for module in model.modules():
        of_kind = tables if isinstance(module, nn.Embedding) else multiplied
        of_kind |= {id(parameter) for parameter in module.parameters(recurse=False)}
    return tables - multiplied


def _attention_width(config: Any) -> int:
    """H·Q: heads times the size of a head, which is not the hidden size in every model."""
    heads, head_size = getattr(config, "num_attention_heads", None), getattr(config, "head_dim", None)
    return heads * head_size if heads and head_size else config.hidden_size


def _attended_lengths(config: Any, sequence_length: int) -> list[int]:
    """How many positions a token of each attention layer attends to."""
    layers = getattr(config, "num_hidden_layers", None)
    if not layers or not getattr(config, "hidden_size", None):
        return []
    # ModernBERT's sliding_window is half of its window, local_attention the whole.
    window = getattr(config, "local_attention", None) or getattr(config, "sliding_window", None) or sequence_length
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * layers
    lengths = {"full_attention": sequence_length, "sliding_attention": min(window, sequence_length)}
    return [lengths[kind] for kind in kinds if kind in lengths]
