"""Tensors on the card: each operator is computed by the CPU's kernel, where and when a card would compute it."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from emulated import attention
from emulated.card import Block, card
from emulated.streams import CUDA, Copy, streams
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_map_only

aten = torch.ops.aten
GRANULE_BYTES = 512
RANDOM = torch.Tag.nondeterministic_seeded
PRODUCTS = (aten.mm.default, aten.addmm.default, aten.bmm.default)
HOST_INDICES = (aten.index.Tensor, aten.index_put_.default, aten.index_put.default, aten._index_put_impl_.default)
"""Take indices on the host, too, for a tensor on the card."""


class CardTensor(torch.Tensor):
    """A tensor on the card; ``_host`` has its numbers."""

    _host: Tensor
    _block: Block
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore

    @staticmethod
    def __new__(cls, host: Tensor, block: Block) -> CardTensor:
        made = torch.Tensor._make_wrapper_subclass(
            cls, host.size(), host.stride(), host.storage_offset(), dtype=host.dtype, device=CUDA, layout=host.layout
        )
        made._host, made._block = host, block
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore
        return dispatch(func, args, kwargs or {})

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"CardTensor({self._host})"

    def tolist(self) -> Any:
        streams.compute.synchronize()
        return self._host.tolist()

    def data_ptr(self) -> int:
        return self._host.data_ptr()


def on_card(host: Tensor) -> CardTensor:
    """``host``, just computed, as a tensor on the card."""
    host = host.detach()
    storage = host.untyped_storage()
    known = card.blocks.get(storage._cdata)
    block = known() if known is not None else None
    if block is None:
        block = Block(-(-storage.nbytes() // GRANULE_BYTES) * GRANULE_BYTES)
        card.blocks[storage._cdata] = weakref.ref(block)
    return CardTensor(host, block)


def off_card(tensor: Any) -> Tensor:
    """The numbers of a tensor on the card; any other as it is."""
    return tensor._host if isinstance(tensor, CardTensor) else tensor


# Copies


def copy_late(target: Tensor, source: Tensor, is_async: bool) -> None:
    """Copies between the host and the card, or on the card, as late as may be."""
    stream = streams.current
    ends = [(tensor, isinstance(tensor, CardTensor)) for tensor in (target, source)]
    host = [tensor for tensor, is_there in ends if not is_there]
    into, out_of = off_card(target), off_card(source)
    computing = stream is streams.compute
    if computing and isinstance(source, CardTensor) and host:
        out_of = out_of.clone()  # in order with what is computed later
    blocks = [tensor._block if isinstance(tensor, CardTensor) else None for tensor in (target, source)]
    if not computing:
        card.seen.on_other_streams += 1
        written, read = blocks
        if read is not None and read.written > stream.knows:
            card.race("a copy on another stream reads memory before it has waited for the stream that computes it")
        if written is not None and max(written.written, written.used) > stream.knows:
            card.race("a copy on another stream writes memory before it has waited for the stream that uses it")
    references = [weakref.ref(block) if block else None for block in blocks]

    def run() -> None:
        if not computing and any(reference and reference() is None for reference in references):
            card.race("the memory of a copy on another stream was freed before it was waited for")
        into.copy_(out_of)

    copy = Copy(run, stream, references[1], references[0])
    stream.add(copy)
    if host and is_async and all(map(card.is_locked, host)):
        card.seen.late_copies += 1
    elif host:  # the driver waits until pageable memory is copied
        stream.synchronize()
    elif computing:
        copy.finish()
    if not copy.is_done:
        for block in filter(None, blocks):
            block.copies.append(copy)


def wait_as_computing(block: Block, writes: bool) -> None:
    """The computing stream uses ``block``: its own copies come first, those of other streams had to be waited for."""
    for copy in block.copies:
        into = copy.write is not None and copy.write() is block
        if copy.stream is streams.compute:
            if into:  # what it copies out of ``block`` it has kept
                copy.finish()
        elif not copy.is_done and (writes or into):
            card.race("memory is used that a copy on another stream has not been waited for")
    block.copies = [copy for copy in block.copies if not copy.is_done]


# Operators


def tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from tensors_in(part)


def written_by(func: Any, args: Any, kwargs: Any) -> Iterator[Tensor]:
    if func._schema.is_mutable:
        for number, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                yield from tensors_in(args[number] if number < len(args) else kwargs.get(argument.name))


def dispatch(func: Any, args: Any, kwargs: Any) -> Any:
    """One operator, where its tensors are."""
    found = [*tensors_in(args), *tensors_in(list(kwargs.values()))]
    theirs = [tensor for tensor in found if isinstance(tensor, CardTensor)]
    device = torch.device(kwargs["device"]) if kwargs.get("device") is not None else None
    to_card = device.type == "cuda" if device is not None else bool(theirs)
    if not theirs and not to_card:
        result = func(*args, **{k: v for k, v in kwargs.items() if k != "pin_memory"})
        if kwargs.get("pin_memory"):
            pin(result)
        return result
    if card.error:
        error, card.error = card.error, ""
        raise RuntimeError(error)
    card.seen.operators += 1
    if func is aten._local_scalar_dense.default:
        streams.current.synchronize()
        return func(off_card(args[0]))
    if func is aten.copy_.default:
        return copied(args[0], args[1], args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
    if func is aten._to_copy.default and to_card != bool(theirs):
        return moved(args[0], to_card, kwargs)
    refuse_two_devices(func, args, found)
    return computed(func, args, {k: v for k, v in kwargs.items() if k != "pin_memory"}, to_card)


def refuse_two_devices(func: Any, args: Any, found: list[Tensor]) -> None:
    """As kernels do: only numbers, and in some places indices, may be on the host."""
    elsewhere = [tensor for tensor in found if not isinstance(tensor, CardTensor)]
    if not elsewhere or len(elsewhere) == len(found):
        return
    if func in HOST_INDICES and isinstance(args[0], CardTensor):
        values = args[2] if len(args) > 2 else None
        elsewhere = [values] if isinstance(values, Tensor) and not isinstance(values, CardTensor) else []
    is_fused = "_fused_" in func._schema.name
    if any(tensor.ndim > 0 or is_fused for tensor in elsewhere):
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! ({func})"
        )


def copied(target: Tensor, source: Tensor, is_async: bool) -> Tensor:
    if isinstance(target, CardTensor) and streams.current is streams.compute:
        computes(source, writes=False)
        computes(target, writes=True)
    elif streams.current is streams.compute:
        computes(source, writes=False)
    copy_late(target, source, is_async)
    return target


def moved(source: Tensor, to_card: bool, kwargs: Any) -> Tensor:
    """``source`` on the other device; to the host without waiting means into page-locked memory."""
    is_async = kwargs.get("non_blocking", False)
    like = {"dtype": kwargs.get("dtype") or source.dtype, "memory_format": kwargs.get("memory_format")}
    host = torch.empty_like(off_card(source), **like)
    if to_card:
        return copied(on_card(host), source, is_async)
    if is_async:
        pin(host)
    return copied(host, source, is_async)


def computes(tensor: Tensor, writes: bool) -> None:
    """The current stream computes with a tensor."""
    if isinstance(tensor, CardTensor):
        block = tensor._block
        wait_as_computing(block, writes)
        block.used = card.clock
        if writes:
            block.written = card.clock


def computed(func: Any, args: Any, kwargs: Any, to_card: bool) -> Any:
    """What a kernel gives."""
    if func._schema.is_mutable or not is_view(func):
        if streams.current is not streams.compute:
            raise NotImplementedError(f"{func} on another stream: only copies are emulated there")
        card.clock += 1
        written = {id(tensor) for tensor in written_by(func, args, kwargs)}
        for tensor in (*tensors_in(args), *tensors_in(list(kwargs.values()))):
            computes(tensor, id(tensor) in written)
    if func in PRODUCTS:
        card.seen.dtypes[str(args[-1].dtype).removeprefix("torch.")] += 1
    kernel: Any = attention.OF_CPU.get(func, func)
    on_host = {**kwargs, **({"device": "cpu"} if "device" in kwargs else {})}
    host_args, host_kwargs = tree_map_only(CardTensor, off_card, (args, on_host))
    with drawing() if RANDOM in func.tags else nullcontext():
        result = kernel(*host_args, **host_kwargs)
    if not to_card:
        return result
    result = tree_map_only(Tensor, on_card, result)
    has_card_tensors = any(isinstance(tensor, CardTensor) for tensor in tensors_in(args))
    return return_and_correct_aliasing(func, args, kwargs, result) if has_card_tensors else result


def is_view(func: Any) -> bool:
    return any(argument.alias_info is not None for argument in func._schema.arguments)


@contextmanager
def drawing() -> Iterator[None]:
    """Random numbers come from the card's generator."""
    host = torch.get_rng_state()
    torch.set_rng_state(card.random.get_state())
    try:
        yield
    finally:
        card.random.set_state(torch.get_rng_state())
        torch.set_rng_state(host)


def pin(host: Tensor) -> Tensor:
    """Page-locks a tensor's memory as long as it is there."""
    storage = host.untyped_storage()
    if storage.nbytes() and not card.lock(storage.data_ptr(), storage.nbytes()):
        error, card.error = card.error, ""
        raise RuntimeError(error)
    weakref.finalize(storage, card.unlock, storage.data_ptr()).atexit = False
    return host


class OperatorsOfTheCard(TorchDispatchMode):
    """Sees what is made on the card out of nothing; operators on its tensors come by themselves."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatch(func, args, kwargs or {})
