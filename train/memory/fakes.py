"""A training step on fake tensors that allocates what the same step on real tensors would.

Fake tensors (``torch._subclasses.fake_tensor``) have shapes, types, devices and storages, but no data. Some code
treats them differently from real ones; each such place is corrected here, and only inside :func:`fake_tensors`.

A model may still ask for values in its batch (what is padding, where a text ends): an operator on known numbers is
also computed on the CPU, and the result is kept with the fake tensor's storage, where views find it.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib import import_module
from typing import Any, cast
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._guards import active_fake_mode
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map, tree_map_only
from transformers import PreTrainedModel

from train.config import Config, call_function
from train.extras import host_memory
from train.extras.meter.tracker import StorageTracker, adds_in_place, storage_of, tensors_in
from train.memory.card_kernels import Costs, module_of, patched, rounded_up, temporary_bytes

recompute, tiling = module_of("activations", "recompute"), module_of("activations", "tiling")
chunked, offload = module_of("losses", "chunked"), module_of("optimizers", "offload")
aten = torch.ops.aten
_DECIDED_BY_DATA = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
_no_card = partial(patch.object, torch.cuda, "is_available", lambda: False)
MOST_ELEMENTS = 2**22  # of a tensor whose numbers are kept: more than a batch has, fewer than a long mask S × S


class FakeMode(FakeTensorMode):
    """Finds out once what an operator makes of tensors of some form; torch's own cache takes four times as long."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self._known: dict[Any, tuple[Any, bool]] = {}  # form of a result (None: the first argument); in its storage?

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, is_plain = kwargs or {}, isinstance(func, OpOverload) and torch.Tag.inplace_view not in func.tags
        if not is_plain or "out" in kwargs or torch.is_inference_mode_enabled():
            return super().dispatch(func, types, args, kwargs)
        key = func, torch.get_default_dtype(), *map(_form, (*args, *kwargs.items()))
        if key not in self._known:
            result, first = super().dispatch(func, types, args, kwargs), args[0] if args else None
            if isinstance(result, FakeTensor) and isinstance(form := _form(result), tuple):
                of_first = isinstance(first, Tensor) and storage_of(first) is storage_of(result)
                is_new = not (func.is_view or func._schema.is_mutable) and storage_of(result).nbytes() == result.nbytes
                if of_first or is_new:  # and not a part of something larger
                    self._known[key] = None if result is first else form, of_first
            return result
        form, of_first = self._known[key]
        if form is None:
            return args[0]
        shape, strides, offset, dtype, device = form
        with torch._C._DisableTorchDispatch():
            meta = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
            if of_first:
                meta.set_(args[0].untyped_storage(), offset, shape, strides)
        return FakeTensor(self, meta, device)


def _form(value: Any) -> Any:
    """What the form of a result depends on; if it may depend on more than forms, an object that equals no other."""
    if isinstance(value, list | tuple):
        return tuple(map(_form, value))
    if not isinstance(value, Tensor):
        return type(value), value
    is_plain = isinstance(value, FakeTensor) and value.constant is None and value.layout is torch.strided
    if not is_plain or value.is_conj() or value.is_neg() or value.is_inference():
        return object()
    return value.shape, value.stride(), value.storage_offset(), value.dtype, value.device


class FakeTracker(StorageTracker):
    """Tracks storages (each change in ``trace``) and ``costs``, answers what only data could, adds kernels' buffers."""

    def __init__(self, device_type: str, costs: Costs) -> None:
        super().__init__(device_type)
        self.fake_mode, self.costs = active_fake_mode(), costs
        self.trace: list[tuple[int, int]] = []  # (storage, ± bytes)
        self.repeats, self.paused = 1, False  # how often a real step does what is done now; whether nothing is counted
        self.offloaded_bytes = 0  # host memory for inputs of layers

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:  # most of what is asked, by C++
            return args[0].device
        kwargs = kwargs or {}
        if any(t.__name__ == "DTensor" for t in types):
            return NotImplemented  # comes back as operators on the local parts
        if func is torch.ops._c10d_functional.wait_tensor.default:
            return args[0]
        if active_fake_mode() is not self.fake_mode:
            return func(*args, **kwargs)
        if func is aten._local_scalar_dense.default:
            return _scalar(func, args[0])
        result = aten.add_.Tensor(*args) if adds_in_place(func, args, kwargs) else follow(func, args, kwargs)
        if func.overloadpacket is aten.any:
            result._is_rare = True
        if self.paused:
            return result
        for tensor in tensors_in(result):
            self.see(tensor)
        sizes = [rounded_up(size, self.granule_bytes) for size in temporary_bytes(func, args, result)]
        # below zero: no storage has such a key
        self.trace += [(-number, sign * size) for sign in (1, -1) for number, size in enumerate(sizes, 1)]
        self.observe(func, sum(sizes))
        if self.phase in ("forward", "backward"):
            self.costs.count(func, args, kwargs, result, self.repeats)
        return result

    def _resize(self, key: int, size: int) -> None:
        if size != (before := self.live[key].num_bytes):
            self.trace += [(key, n) for n in (-before, size) if n]
        super()._resize(key, size)


def _scalar(func: Any, tensor: Tensor) -> Any:
    """The number in a tensor of one element; where it is unknown, that of ordinary data."""
    try:
        return follow(func, (tensor,), {})
    except RuntimeError:
        if tensor.dtype is torch.bool:
            return not getattr(tensor, "_is_rare", False)  # all(): yes; any(): no
        return 1.0 if tensor.is_floating_point() else 1


def _grouped_product(first: Tensor, second: Tensor, ends: Tensor | None = None, **_: Any) -> Tensor:
    """The products of experts, whose rows end at ``ends`` (E,): of (N, H) and (E, H, K), or of (K, N) and (N, H)."""
    groups = [] if first.ndim != second.ndim else [len(first if ends is None or first.ndim == 3 else ends)]
    return first.new_empty(*groups, first.shape[-2], second.shape[-1])


@contextmanager
def few_pieces(tracker: FakeTracker) -> Iterator[None]:
    """Inside it, what is done piece by piece takes no longer to predict for a longer sequence.

    A loss in chunks and a tiled MLP compute the first two pieces, and the last if it is shorter: all others are like
    the second, which counts for them in the costs. An input goes to host memory in one piece with the bytes of all.
    """

    def some(cut: Any, *sizes: int) -> Iterator[slice]:
        pieces = list(cut(*sizes))
        chosen = pieces if len(pieces) <= 3 else pieces[:2] + pieces[-1:] * (sizes[0] % pieces[0].stop > 0)
        try:
            for number, rows in enumerate(chosen):
                tracker.repeats = 1 + (len(pieces) - len(chosen) if number == 1 else 0)
                yield rows
        finally:
            tracker.repeats = 1

    def on_host(num_bytes: int) -> Tensor:
        tracker.offloaded_bytes += num_bytes
        return torch.empty(num_bytes, dtype=torch.uint8, device="cpu")

    with (
        patched(chunked, "rows_by_chunk", partial(some, getattr(chunked, "rows_by_chunk", None))),
        patched(tiling, "tiles", partial(some, getattr(tiling, "tiles", None))),
        patch.object(host_memory, "page_locked", on_host),
        patched(recompute, "piece_bytes_for", lambda n: rounded_up(n, recompute.PIECE_BYTES)),
    ):
        yield


@contextmanager
def fake_tensors() -> Iterator[None]:
    """Inside it, new tensors are fake, and libraries treat them as real ones."""
    import torch.optim.optimizer as optimizer
    from transformers.utils import import_utils

    mode, is_fake = FakeMode(), import_utils.is_fake_tensor
    with (
        # or an optimizer of your own would not use its foreach form, which takes more memory
        patch.object(optimizer, "_foreach_supported_types", [*optimizer._foreach_supported_types, FakeTensor]),
        # accelerate tells tensors apart by address when it shards; a fake tensor's own would be zero
        patch.object(FakeTensor, "data_ptr", lambda tensor: tensor.untyped_storage()._cdata),
        # or transformers would behave as under tracing, and build masks that a run does not build
        patch.object(import_utils, "is_fake_tensor", lambda t: active_fake_mode() is not mode and is_fake(t)),
        # tensors without data cannot be copied in the background
        patched(offload, "StreamTransfers", lambda device: None),
        mode,
    ):
        yield


@contextmanager
def fake_weights(device: torch.device) -> Iterator[None]:
    """Inside it, a function's network has fake weights, and one that from_pretrained has read in its own threads."""
    read = vars(PreTrainedModel)["from_pretrained"].__func__

    def fake(network: Any) -> Any:
        made = dict[int, Tensor]()
        for module in network.modules() if isinstance(network, nn.Module) and active_fake_mode() else ():
            for held in (cast("dict[str, Any]", module._parameters), module._buffers):
                for name, tensor in held.items():
                    if tensor is not None:
                        held[name] = made[id(tensor)] = made.get(id(tensor), _as_fake(tensor, device))
        return network

    def on_cpu(*args: Any, **options: Any) -> Any:
        with torch.device("cpu"):  # these threads know of no stand-in for a card
            return fake(read(*args, **options))

    def faked(*args: Any) -> Any:
        try:
            network = call_function(*args)
        except Exception:  # it may move what it made, look at values or read a file, which takes real weights
            with _disable_current_modes(), torch.device("cpu"), _no_card():
                network = call_function(*args)
        return fake(network)

    reads = patch.object(PreTrainedModel, "from_pretrained", classmethod(on_cpu))
    with patch("train.model.call_function", faked), reads:
        yield


def _as_fake(t: Tensor, device: torch.device) -> Tensor:
    if isinstance(t, FakeTensor) and t.device.type == device.type:
        return t
    fake = t.to(device, copy=True)  # which may be asked for what it holds
    if t.is_floating_point():
        fake = torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device=device)
    return nn.Parameter(fake, t.requires_grad) if isinstance(t, nn.Parameter) else fake


@contextmanager
def fake_adapters(config: Config) -> Iterator[None]:
    """Inside it, adapters, layers in 4 bits and optimizers in 8 can be built of fake tensors."""

    def in_4_bits(data: Tensor, requires_grad: bool = False, **attributes: Any) -> nn.Parameter:
        parameter = nn.Parameter(data, requires_grad)  # bitsandbytes' own class cannot hold a fake tensor
        vars(parameter).update(attributes)
        return parameter

    adapter, optimizer = config.get("adapter", "none"), config.optimization.optimizer
    needed = ["peft.tuners.lora"] * (adapter != "none") + ["bitsandbytes.optim"] * (optimizer == "adamw_8bit")
    # bitsandbytes would make fake tables, look for a real card, and load a compiler for what nothing here calls
    with _disable_current_modes(), torch.device("cpu"), _no_card(), patch.object(torch, "compile", lambda f, **_: f):
        for name in needed:
            import_module(name)
    with ExitStack() as stack:
        if adapter != "none":  # they are made where the model is, and a fake parameter cannot be moved
            stack.enter_context(patch.object(nn.Module, "to", lambda module, *args, **kwargs: module))
        if adapter == "qlora":
            bitsandbytes = import_module("bitsandbytes")
            for module in (bitsandbytes.nn, bitsandbytes.nn.modules):
                stack.enter_context(patch.object(module, "Params4bit", in_4_bits))
        yield


def follow(func: Any, args: Any, kwargs: Any) -> Any:
    """What an operator on fake tensors gives, with its numbers where they are known.

    Operators whose result only data decides, such as ``nonzero``, give what they would give for these numbers.
    """
    if func is aten._grouped_mm.default:  # torch's own shape function refuses fp32 and fp16
        return _grouped_product(*args, **kwargs)
    if func is aten.index.Tensor:  # by a mask: by the places where it is true
        args = (args[0], [place for index in args[1] for place in _places(index)])
    given = tensors_in((args, kwargs))
    if not _DECIDED_BY_DATA.isdisjoint(func.tags) and (numbers := _computed(func, args, kwargs)) is not None:
        return tree_map_only(Tensor, partial(_faked, device=given[0].device), numbers)
    result = func(*args, **kwargs)
    made = tensors_in(result)
    # what is made of nothing may become a weight
    most = MOST_ELEMENTS if given or not any(tensor.is_floating_point() for tensor in made) else 1
    numbers = _computed(func, args, kwargs) if made and all(tensor.numel() <= most for tensor in made) else None
    if numbers is not None:
        for tensor, value in zip(made, tensors_in(numbers), strict=True):
            _keep(tensor, value)
    elif func._schema.is_mutable:
        written = [args[place] for place, a in enumerate(func._schema.arguments[: len(args)]) if a.is_write]
        for tensor in tensors_in([written, kwargs.get("out")]):
            vars(storage_of(tensor)).pop("_numbers", None)
    return result


def _places(index: Any) -> Any:
    if index is None or index.dtype != torch.bool or _numbers_of(index) is None:
        return [index]
    return follow(aten.nonzero.default, (index,), {}).unbind(1)


def _computed(func: Any, args: Any, kwargs: Any) -> Any:
    """What an operator gives for the numbers of its arguments; None where some are unknown."""
    numbers = {id(tensor): _numbers_of(tensor) for tensor in tensors_in((args, kwargs))}
    if func.namespace != "aten" or any(found is None for found in numbers.values()):
        return None

    def on_cpu(value: Any) -> Any:
        return torch.device("cpu") if isinstance(value, torch.device) else numbers.get(id(value), value)

    try:
        with unset_fake_temporarily():
            return func(*tree_map(on_cpu, args), **tree_map(on_cpu, kwargs))
    except (RuntimeError, IndexError):  # a CPU has no such operator
        return None


def _numbers_of(tensor: Tensor) -> Tensor | None:
    if not isinstance(tensor, FakeTensor):
        return None if tensor.is_meta else tensor
    storage = storage_of(tensor)
    if (kept := getattr(storage, "_numbers", None)) is None or kept.nbytes() != storage.nbytes():
        return None
    with unset_fake_temporarily():
        numbers = torch.empty(0, dtype=tensor.dtype, device="cpu")
        return numbers.set_(kept, tensor.storage_offset(), tensor.size(), tensor.stride())


def _faked(numbers: Tensor, device: torch.device) -> Tensor:
    fake = torch.empty_strided(numbers.size(), numbers.stride(), dtype=numbers.dtype, device=device)
    _keep(fake, numbers)
    return fake


def _keep(tensor: Tensor, numbers: Tensor) -> None:
    is_alike = (numbers.stride(), numbers.storage_offset()) == (tensor.stride(), tensor.storage_offset())
    if is_alike and not hasattr(storage := storage_of(tensor), "_numbers"):
        storage._numbers = numbers.untyped_storage()
