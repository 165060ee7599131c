"""Activation checkpointing: layers that recompute their activations in backward, with inputs on the device or host.

A checkpointed layer keeps its input, (B, S, H); the inputs of all layers are L·B·S·H elements, at long sequences the
largest part of the remaining activations. With offload they are kept in pinned host memory.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers.modeling_layers import GradientCheckpointingLayer

from train.extras import host_memory
from train.records import UserError

MIN_OFFLOADED_BYTES = 2**20  # smaller tensors stay on the device: a copy has a fixed cost, and there is little to gain
# Of page-locked memory, which is kept in pieces of one size: any tensor takes some of them, whatever its length.
PIECE_BYTES = 8 * 2**20
HOST_DEVICES = ("cpu", "mps")  # whose memory is the host's: there is nowhere to move to


def enable_checkpointing(model: nn.Module, mode: str, every_n_layers: int = 1, offload: bool = False) -> None:
    """Recompute activations of layers 0, n, 2n ... in backward (arXiv 1604.06174); raises UserError where it cannot.

    ``mode`` is ``none``, ``full`` or ``selective``, which keeps the attention outputs, the most expensive to recompute
    (arXiv 2205.05198). With ``offload`` inputs of checkpointed layers are kept in host memory, unless on a CPU.
    """
    if mode == "none":
        return
    kwargs: dict[str, Any] = {"use_reentrant": False}
    if mode == "selective":
        kwargs["context_fn"] = partial(create_selective_checkpoint_contexts, _keep_attention)
    enable: Any = getattr(model, "activation_checkpointing_enable", None)  # transformers ≥ 5.23
    enable = enable or getattr(model, "gradient_checkpointing_enable", None)
    try:
        if enable is None:
            raise ValueError("it is not a transformers model")
        enable(kwargs)
    except ValueError as error:
        raise UserError(f"gradient_checkpointing: {mode} does not work with this model: {error}. Use none.") from None
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    for number, layer in enumerate(layers):
        layer.gradient_checkpointing = number % every_n_layers == 0
    if offload:  # where transformers' own switch put torch's checkpoint
        places = [vars(m) for m in model.modules() if vars(m).get("_gradient_checkpointing_func") is not None]
        offloaded = OffloadedInputs(places[0]["_gradient_checkpointing_func"])
        for place in places:
            place["_gradient_checkpointing_func"] = offloaded


def _keep_attention(context: Any, operator: Any, *args: Any, **kwargs: Any) -> Any:
    attention = any(part in operator.name() for part in ("scaled_dot_product", "flash_att", "varlen_attn"))
    return CheckpointPolicy.MUST_SAVE if attention else CheckpointPolicy.PREFER_RECOMPUTE


class OffloadedInputs:
    """torch's ``checkpoint(function, *inputs)`` with inputs kept in host memory from a layer's forward to its backward.

    Only positional tensors that need a gradient: the hidden states. Masks, position embeddings and parameters belong
    to all layers and stay. Copies are queued like computation, so no memory is reused before they are done.
    """

    def __init__(self, checkpoint: Callable[..., Any]) -> None:
        self._checkpoint = checkpoint
        self.free: list[Tensor] = []  # pieces of pinned memory that can be reused

    def __deepcopy__(self, memo: Any) -> OffloadedInputs:
        return self  # a copy of the model shares pinned memory

    def __call__(self, function: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
        moved = {x.untyped_storage()._cdata for x in inputs if isinstance(x, Tensor) and is_moved(x)}
        if not moved or not torch.is_grad_enabled():
            return self._checkpoint(function, *inputs, **options)

        def pack(tensor: Tensor) -> Tensor | _OnHost:
            return _OnHost(tensor, self.free) if tensor.untyped_storage()._cdata in moved else tensor

        def unpack(saved: Tensor | _OnHost) -> Tensor:
            return saved if isinstance(saved, Tensor) else saved.on_device()

        # Sees what the checkpoint itself saves, its inputs: within the layer hooks of the checkpoint come first.
        with saved_tensors_hooks(pack, unpack):
            return self._checkpoint(function, *inputs, **options)


def is_moved(tensor: Tensor) -> bool:
    """Whether offload moves this input of a layer."""
    is_hidden = tensor.requires_grad and not isinstance(tensor, nn.Parameter) and not hasattr(tensor, "to_local")
    return is_hidden and tensor.device.type not in HOST_DEVICES and tensor.nbytes >= MIN_OFFLOADED_BYTES


def piece_bytes_for(num_bytes: int) -> int:
    """Bytes of a piece of pinned memory, some of which a tensor of ``num_bytes`` takes."""
    return PIECE_BYTES


class _OnHost:
    """A tensor that autograd saved, in pieces of pinned memory.

    It is deleted when autograd releases it, after backward or an exception; then its pinned memory can be reused.
    """

    @torch.no_grad()
    def __init__(self, tensor: Tensor, free: list[Tensor]) -> None:
        self._free, self._pieces = free, []
        self._shape, self._dtype, self._device = tensor.shape, tensor.dtype, tensor.device
        self._piece_bytes = piece_bytes_for(tensor.nbytes)
        for part in self._parts(tensor.detach().contiguous()):
            self._pieces.append(free.pop() if free else host_memory.page_locked(self._piece_bytes))
            self._pieces[-1][: len(part)].copy_(part, non_blocking=True)

    def __del__(self) -> None:
        self._free += self._pieces  # what is copied into them next is queued after what is still copied out of them

    @torch.no_grad()
    def on_device(self) -> Tensor:
        """The tensor, for what is queued from now on."""
        whole = torch.empty(self._shape, dtype=self._dtype, device=self._device)
        for part, piece in zip(self._parts(whole), self._pieces, strict=True):
            part.copy_(piece[: len(part)], non_blocking=True)
        return whole

    def _parts(self, whole: Tensor) -> tuple[Tensor, ...]:
        """Its bytes, as many at a time as a piece holds."""
        return whole.view(-1).view(torch.uint8).split(self._piece_bytes)
