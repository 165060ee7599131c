"""What the device is called, and what it multiplies fp32 matrices in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}  # of types, as a person reads them


def device_name(device: torch.device) -> str:
    """The card's name, or CPU."""
    import torch  # here: --help does not wait for it

    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type.upper()


def precision_in_use(accelerator: Any, dtype: str) -> str:
    """fp16 or bf16, by autocast or the ``dtype`` of weights; else tf32 or no, as fp32 matrices are multiplied."""
    import torch

    if accelerator.mixed_precision != "no" or dtype != "float32":
        return accelerator.mixed_precision if accelerator.mixed_precision != "no" else SHORT[dtype]
    return "tf32" if accelerator.device.type == "cuda" and torch.get_float32_matmul_precision() == "high" else "no"


def flash_lacks_backward(capability: tuple[int, int], head_size: int, dropout: float) -> bool:
    """Whether flash attention only computes forward: not all cards have room for wide heads (torch's sdp_utils.cpp)."""
    is_narrow = (8, 6) <= capability <= (8, 9) or capability >= (12, 0)
    return is_narrow and head_size > 192 and (head_size <= 224 or dropout > 0)


def product_dtype(tensor: torch.Tensor) -> torch.dtype:
    """The type in which ``tensor`` would be multiplied here, under autocast or without."""
    import torch

    kind = tensor.device.type
    cast = torch.is_autocast_enabled(kind) and tensor.dtype != torch.float64
    return torch.get_autocast_dtype(kind) if cast else tensor.dtype
