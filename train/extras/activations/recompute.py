"""Activation checkpointing: layers that recompute their activations in backward; compiled layers, which have to agree.

A checkpointed layer keeps its input, (B, S, H); the inputs of all layers are L·B·S·H elements, at long sequences the
largest part of the remaining activations. With offload they are kept in pinned host memory. Copies run on a stream of
their own: an input is copied out while its layer computes, and comes back while the next layer is recomputed.
"""

import inspect
import weakref
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers.modeling_layers import GradientCheckpointingLayer

from train.extras.host_memory import StreamTransfers
from train.extras.weightless import inputs_on_trial, obstacle_on_trial
from train.records import UserError, one_line

MIN_OFFLOADED_BYTES = 2**20  # smaller tensors stay on the device: a copy has a fixed cost, and there is little to gain
# One of a long sequence that is larger comes back when it is needed: its layer computes many times longer.
MAX_AHEAD_BYTES, LONG_TOKENS = 2**29, 65536
# Of page-locked memory, which is kept in pieces of one size: any tensor takes some of them, whatever its length.
PIECE_BYTES = 8 * 2**20


def enable_checkpointing(model: nn.Module, mode: str, every_n_layers: int = 1, offload: bool = False) -> None:
    """Recompute activations of layers 0, n, 2n ... in backward (arXiv 1604.06174); raises UserError where it cannot.

    ``mode`` is ``none``, ``full`` or ``selective``, which keeps the outputs of attention without dropout, the most
    expensive to recompute (arXiv 2205.05198). With ``offload`` layers' inputs are kept in host memory, unless on a CPU.
    """
    if mode == "none":
        return
    kwargs: dict[str, Any] = {"use_reentrant": False}
    if mode == "selective":
        kwargs["context_fn"] = partial(create_selective_checkpoint_contexts, _keep_attention)
    layers = layers_of(model)
    try:
        if hasattr(model, "activation_checkpointing_enable"):  # transformers ≥ 5.23
            model.activation_checkpointing_enable(activation_checkpointing_kwargs=kwargs)  # type: ignore
        elif hasattr(model, "gradient_checkpointing_enable"):
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)  # type: ignore
        elif not layers:
            raise ValueError("it is not of transformers, and has no nn.ModuleList of layers.")
    except ValueError as error:
        raise UserError(f"gradient_checkpointing: {mode} does not work with this model: {error} Use none.") from None
    if not hasattr(model, "gradient_checkpointing_enable") and not _calls(model):
        why = "it calls parts of the layers in its nn.ModuleLists, not the layers. Give these a forward, or use none"
        raise UserError(f"gradient_checkpointing: {mode} would do nothing for this model: {why}.")
    for number, layer in enumerate(layers):
        layer.gradient_checkpointing = number % every_n_layers == 0
        if not hasattr(model, "gradient_checkpointing_enable"):
            layer._gradient_checkpointing_func = partial(checkpoint, **kwargs)
    offloaded = cache(OffloadedInputs)  # one for all layers, which share the function
    for module in model.modules() if offload else ():  # where transformers' own switch puts it
        if (recompute := vars(module).get("_gradient_checkpointing_func")) is not None:
            vars(module)["_gradient_checkpointing_func"] = offloaded(recompute)
            # Needed by reentrant checkpoints alone. With a frozen embedding autograd would keep its output, a leaf.
            getattr(model, "disable_input_require_grads", list)()  # type: ignore


def _calls(model: nn.Module) -> bool:
    """Whether ``model`` calls any of its layers, as far as a forward of token ids tells."""
    called = list[bool]()

    def trial(twin: nn.Module) -> str | None:
        for layer in layers_of(twin.train()):
            layer.gradient_checkpointing = True
            layer._gradient_checkpointing_func = lambda function, *args: called.append(True) or function(*args)
        twin(**inputs_on_trial(twin, torch.zeros(1, 128, dtype=torch.long)))

    return obstacle_on_trial(model, trial) is not None or bool(called)


class Recomputed(nn.Module):
    """Mixed into the layers of a module of your own: they recompute where they are told to, as transformers' do."""

    gradient_checkpointing = False


def layers_of(model: nn.Module) -> list[Any]:
    """The layers of ``model`` that can recompute: those of transformers or, in a module of your own, of its lists."""
    for layer in () if hasattr(model, "gradient_checkpointing_enable") else _in_lists(model):
        if not isinstance(layer, GradientCheckpointingLayer | Recomputed | torch.jit.ScriptModule):
            try:
                layer.__class__ = _marked(type(layer))
            except Exception as why:  # a class may do anything where another one derives from it
                raise UserError(f"{type(layer).__name__} cannot be recomputed or compiled: {one_line(why)}.") from None
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer | Recomputed)]


def _in_lists(module: nn.Module, is_list: bool = False) -> Iterator[nn.Module]:
    """Modules in the outermost lists, but not single products or norms: to recompute those saves nothing."""
    for child in module.children():
        if getattr(type(child), "forward", None) is nn.Module.forward:
            yield from _in_lists(child, is_list or isinstance(child, nn.ModuleList))
        elif not is_list:
            yield from _in_lists(child)
        elif next(child.children(), None) is not None:
            yield child


@cache
def _marked(kind: Any) -> type:
    signature = inspect.signature(kind.forward)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not (self.gradient_checkpointing and self.training and torch.is_grad_enabled()):
            return kind.forward(self, *args, **kwargs)
        # By position: torch restores the random numbers of cards that it sees there, and offload takes the first.
        given = signature.bind(self, *args, **kwargs)
        return self._gradient_checkpointing_func(partial(kind.forward, self, **given.kwargs), *given.args[1:])

    return type(kind.__name__, (Recomputed, kind), {"__module__": kind.__module__, "forward": forward})


def compile_layers(model: nn.Module, backend: str | Callable[..., Any] = "inductor") -> int:
    """Compiles the repeated layers of ``model`` in place, when each is first called; returns how many there are.

    Everything around them stays as it is. So attention keeps its causal path (a model compiled whole builds a mask of
    length × length), weights keep their names, and equal layers share one compilation; the second length makes lengths
    symbolic. To be called after activation checkpointing was set up. Raises UserError where no such layers are known.
    """
    compiled = cache(partial(torch.compile, backend=backend))

    @torch.compiler.disable(reason="what breaks a graph inside a checkpoint would leave the whole layer uncompiled")
    def within(checkpoint: Any, function: Any, *inputs: Any, **options: Any) -> Any:
        return checkpoint(partial(compiled(function.func), *function.args, **function.keywords), *inputs, **options)

    names = set(getattr(model, "_no_split_modules", None) or ())  # type: ignore
    known = layers_of(model)
    layers = [m for m in model.modules() if m in known or type(m).__name__ in names]
    if not layers:
        raise UserError("compile: this model is not of transformers, and has no nn.ModuleList of layers. Leave it out.")
    # From transformers 5.23 on a layer recomputes within its forward, before that around its call.
    is_within = "__call__" not in vars(GradientCheckpointingLayer)
    for layer in layers:
        layer.compile(backend=backend)
        if (is_within or isinstance(layer, Recomputed)) and getattr(layer, "gradient_checkpointing", False):
            vars(layer)["_gradient_checkpointing_func"] = partial(within, layer._gradient_checkpointing_func)
    return len(layers)


def _keep_attention(context: Any, operator: Any, *args: Any, **kwargs: Any) -> Any:
    if not any(part in operator.name() for part in ("scaled_dot_product", "flash_att", "varlen_attn")):
        return CheckpointPolicy.PREFER_RECOMPUTE
    # Attention that draws a dropout mask has to draw it again: else later dropouts of its layer get other masks.
    given = dict(zip((argument.name for argument in operator._schema.arguments), args, strict=False)) | kwargs
    drops = any("dropout" in name and value for name, value in given.items())
    return CheckpointPolicy.PREFER_RECOMPUTE if drops else CheckpointPolicy.MUST_SAVE


class OffloadedInputs:
    """torch's ``checkpoint(function, *inputs)`` with inputs kept in host memory from a layer's forward to its backward.

    Only the first, the hidden states. What several layers share (masks, position embeddings, encoder states) stays.

    The device holds at a time: in forward only the input of the current layer; in backward that of the current layer
    and, unless it is large, of the next one to be recomputed. A tensor on the device is released only after the
    computing stream was told to wait for the copy that reads it, and the target of a copy is allocated on the computing
    stream. So memory is never reused too early, without ``record_stream``, whose effect depends on timing.
    """

    def __init__(self, checkpoint: Callable[..., Any]) -> None:
        self._checkpoint = checkpoint
        self.transfers: dict[torch.device, StreamTransfers] = {}  # of devices that have memory of their own
        self._free: list[Tensor] = []
        self._last: Callable[[], _Resting | None] = lambda: None  # a weak reference; here as if its object were gone

    def __deepcopy__(self, memo: Any) -> "OffloadedInputs":
        return self  # a copy of the model shares streams and pinned memory

    def __call__(self, function: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
        if not (torch.is_grad_enabled() and inputs and isinstance(inputs[0], Tensor) and self._moves(inputs[0])):
            return self._checkpoint(function, *inputs, **options)
        first = inputs[0].untyped_storage()._cdata, inputs[0].shape  # no tensor, which hooks would keep alive

        def pack(tensor: Tensor) -> "Tensor | _Resting":
            if (tensor.untyped_storage()._cdata, tensor.shape) != first:
                return tensor
            if (before := self._last()) is not None:
                before.leave()
            resting = _Resting(tensor, self)
            self._last = weakref.ref(resting)
            return resting

        # Sees what the checkpoint itself saves, its inputs: within the layer hooks of the checkpoint come first.
        with saved_tensors_hooks(pack, lambda saved: saved if isinstance(saved, Tensor) else saved.take()):
            return self._checkpoint(function, *inputs, **options)

    def _moves(self, tensor: Tensor) -> bool:
        if isinstance(tensor, nn.Parameter) or not tensor.is_floating_point() or tensor.nbytes < MIN_OFFLOADED_BYTES:
            return False
        if tensor.device not in self.transfers and tensor.device.type not in ("cpu", "mps", "meta"):  # mps: the host's
            self.transfers[tensor.device] = StreamTransfers(tensor.device)
        return tensor.device in self.transfers and not hasattr(tensor, "to_local")  # no DTensor


def piece_bytes_for(num_bytes: int) -> int:
    """Bytes of a piece of pinned memory, some of which a tensor of ``num_bytes`` takes."""
    return PIECE_BYTES


class _Resting:
    """A tensor that autograd saved, on its way to the host, on the host, or on its way back.

    It is deleted when autograd releases it, after backward or an exception; then its pinned memory can be reused.
    """

    def __init__(self, tensor: Tensor, inputs: OffloadedInputs) -> None:
        self._on_device: Tensor | None = None
        self._transfers: Any = inputs.transfers[tensor.device]
        self._free, self._before = inputs._free, inputs._last
        self._shape, self._dtype, self._device = tensor.shape, tensor.dtype, tensor.device
        self._pieces: list[Tensor] = []
        whole = tensor.detach().contiguous()  # before the copy is queued, so that it waits for this
        piece_bytes = piece_bytes_for(whole.nbytes)
        while piece_bytes * len(self._pieces) < whole.nbytes:
            self._pieces.append(self._free.pop() if self._free else self._transfers.host_buffer(piece_bytes))
        self._event = self._transfers.copy([(piece, part) for part, piece in self._parts(whole)])
        self._on_device = whole

    def __del__(self) -> None:
        self.leave()
        self._free += self._pieces  # what is copied into them next is queued after what is still copied out of them

    def leave(self) -> None:
        """Releases the tensor on the device."""
        if self._on_device is not None:
            self._transfers.wait(self._event)
            self._on_device = None

    def fetch(self) -> Tensor:
        """The tensor on the device; starts copying it back if it is not there."""
        if self._on_device is None:
            whole = torch.empty(self._shape, dtype=self._dtype, device=self._device)
            self._event = self._transfers.copy(self._parts(whole))
            self._on_device = whole
        return self._on_device

    def take(self) -> Tensor:
        """The tensor, for what is queued from now on; starts copying back the one of the layer before, if not large."""
        whole = self.fetch()
        self.leave()
        is_late = whole.nbytes > MAX_AHEAD_BYTES and whole.shape[-2] >= LONG_TOKENS
        if (before := self._before()) is not None and not is_late:
            before.fetch()
        return whole

    def _parts(self, whole: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Parts of the flat tensor with their places in pinned memory, of the same type and size."""
        places = [piece.view(self._dtype) for piece in self._pieces]
        parts = whole.view(-1).split(len(places[0])) if places else ()
        return [(part, place[: len(part)]) for part, place in zip(parts, places, strict=True)]
