"""The numbers of masks, lengths, labels and positions next to fake tensors, so that questions about them are answered.

A model asks its batch: is anything padding, where does each text end, how many marks does a row have? An operator on
numbers that are known is computed on the CPU as well, and its result is kept with the storage of the fake one, where
views find it. Activations, and whatever depends on them, stay unknown.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._pytree import tree_leaves, tree_map

from train.extras.meter.tracker import storage_of

aten = torch.ops.aten
_DECIDED_BY_DATA = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
MOST_ELEMENTS, MOST_OF_NEW_FLOATS = 2**22, 2**10
"""Of a tensor whose numbers are kept: more than any batch has, fewer than a mask of long sequences × themselves. Of one
that is made of nothing, and may become a weight, fewer."""


def numbers_of(tensor: Tensor) -> Tensor | None:
    """The numbers of ``tensor`` on the CPU; None where they are unknown."""
    if not isinstance(tensor, FakeTensor):
        return None if tensor.is_meta else tensor
    storage = storage_of(tensor)
    kept = getattr(storage, "_numbers", None)
    if kept is None or kept.nbytes() != storage.nbytes():
        return None
    with unset_fake_temporarily():
        numbers = torch.empty(0, dtype=tensor.dtype, device="cpu")
        return numbers.set_(kept, tensor.storage_offset(), tensor.size(), tensor.stride())


def follow(func: Any, args: Any, kwargs: Any, call: Callable[[Any, Any, Any], Any]) -> Any:
    """What ``call`` gives for an operator on fake tensors, with its numbers where they are known.

    Operators whose result only data decides, such as ``nonzero``, give what they would give for these numbers.
    """
    if func is aten.index.Tensor:  # by a mask: as many rows as it is true for
        args = (args[0], [place for index in args[1] for place in _places(index, call)])
    if not _DECIDED_BY_DATA.isdisjoint(func.tags):
        numbers, device = _computed(func, args, kwargs), next(filter(_is_tensor, tree_leaves((args, kwargs)))).device
        if numbers is not None:
            return tree_map(lambda value: _faked(value, device) if _is_tensor(value) else value, numbers)
    result, arguments = call(func, args, kwargs), func._schema.arguments
    given = list(filter(_is_tensor, tree_leaves(result)))
    if func._schema.is_mutable:
        if _computed(func, args, kwargs) is None:
            named = {argument.name: value for argument, value in zip(arguments, args, strict=False)} | kwargs
            for tensor in filter(_is_tensor, tree_leaves([named.get(a.name) for a in arguments if a.is_write])):
                vars(storage_of(tensor)).pop("_numbers", None)
    elif given and all(_may_keep(tensor, not any(map(_is_tensor, tree_leaves(args)))) for tensor in given):
        for tensor, numbers in zip(given, tree_leaves(_computed(func, args, kwargs)), strict=False):
            _keep(tensor, numbers)
    return result


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _may_keep(tensor: Tensor, is_new: bool) -> bool:
    most = MOST_OF_NEW_FLOATS if is_new and tensor.is_floating_point() else MOST_ELEMENTS
    return isinstance(tensor, FakeTensor) and tensor.numel() <= most


def _places(index: Any, call: Callable[[Any, Any, Any], Any]) -> Any:
    """A mask that is known as the numbers of what it is true for, one index a dimension."""
    if index is None or index.dtype != torch.bool or numbers_of(index) is None:
        return [index]
    return follow(aten.nonzero.default, (index,), {}, call).unbind(1)


def _computed(func: Any, args: Any, kwargs: Any) -> Any:
    """What an operator gives for the numbers of its arguments; None where some are unknown."""
    with unset_fake_temporarily():
        numbers = {id(tensor): numbers_of(tensor) for tensor in filter(_is_tensor, tree_leaves((args, kwargs)))}
        if any(found is None for found in numbers.values()):
            return None

        def on_cpu(value: Any) -> Any:
            return torch.device("cpu") if isinstance(value, torch.device) else numbers.get(id(value), value)

        try:
            return func(*tree_map(on_cpu, args), **tree_map(on_cpu, kwargs))
        except (RuntimeError, IndexError):  # a CPU has no such operator
            return None


def _faked(numbers: Tensor, device: torch.device) -> Tensor:
    fake = torch.empty_strided(numbers.size(), numbers.stride(), dtype=numbers.dtype, device=device)
    _keep(fake, numbers)
    return fake


def _keep(tensor: Tensor, numbers: Any) -> None:
    storage, is_alike = storage_of(tensor), _is_tensor(numbers) and numbers.stride() == tensor.stride()
    if is_alike and not hasattr(storage, "_numbers") and numbers.storage_offset() == tensor.storage_offset():
        storage._numbers = numbers.untyped_storage()
