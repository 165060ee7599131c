"""Numbers next to fake tensors, so that what a model asks of its batch is answered: what is padding, where a text ends.

An operator on numbers that are known is computed on the CPU as well, and its result is kept with the storage of the
fake one, where views find it. Activations, and whatever depends on them, stay unknown.
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
MOST_ELEMENTS = 2**22  # of a tensor whose numbers are kept: more than a batch has, fewer than a long mask S × S


def follow(func: Any, args: Any, kwargs: Any, call: Callable[[Any, Any, Any], Any]) -> Any:
    """What ``call`` gives for an operator on fake tensors, with its numbers where they are known.

    Operators whose result only data decides, such as ``nonzero``, give what they would give for these numbers.
    """
    if func is aten.index.Tensor:  # by a mask: by the places where it is true
        args = (args[0], [place for index in args[1] for place in _places(index, call)])
    given = _tensors_in((args, kwargs))
    if not _DECIDED_BY_DATA.isdisjoint(func.tags) and (numbers := _computed(func, args, kwargs)) is not None:
        return tree_map(lambda value: _faked(value, given[0].device) if isinstance(value, Tensor) else value, numbers)
    result = call(func, args, kwargs)
    made = _tensors_in(result)
    # what is made of nothing may become a weight
    most = MOST_ELEMENTS if given or not any(tensor.is_floating_point() for tensor in made) else 1
    numbers = _computed(func, args, kwargs) if made and all(tensor.numel() <= most for tensor in made) else None
    if numbers is not None:
        for tensor, value in zip(made, _tensors_in(numbers), strict=True):
            _keep(tensor, value)
    elif func._schema.is_mutable:
        written = [args[place] for place, a in enumerate(func._schema.arguments[: len(args)]) if a.is_write]
        for tensor in _tensors_in([written, kwargs.get("out")]):
            vars(storage_of(tensor)).pop("_numbers", None)
    return result


def _places(index: Any, call: Callable[[Any, Any, Any], Any]) -> Any:
    if index is None or index.dtype != torch.bool or _numbers_of(index) is None:
        return [index]
    return follow(aten.nonzero.default, (index,), {}, call).unbind(1)


def _tensors_in(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _computed(func: Any, args: Any, kwargs: Any) -> Any:
    """What an operator gives for the numbers of its arguments; None where some are unknown."""
    numbers = {id(tensor): _numbers_of(tensor) for tensor in _tensors_in((args, kwargs))}
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
    kept = getattr(storage, "_numbers", None)
    if kept is None or kept.nbytes() != storage.nbytes():
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
