"""Counts the bytes of every tensor storage of one device as operators allocate and free them.

One tracker serves real tensors on a CPU, where it is the meter, and fake tensors of any device, where it is the
prediction. Storages are counted, not tensors: views share one, and what is freed is seen when the storage goes.
"""

import itertools
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

PARAMETERS, GRADIENTS, OPTIMIZER_STATE = "parameters", "gradients", "optimizer state"
ACTIVATIONS, LOGITS, WORKSPACE = "activations", "logits and loss", "workspace"
HELD: tuple[str, ...] = (PARAMETERS, GRADIENTS, OPTIMIZER_STATE)
KINDS = (*HELD, ACTIVATIONS, LOGITS, WORKSPACE)

CUDA_GRANULE_BYTES = 512  # CUDA's caching allocator rounds every size up to a multiple of it; no block is smaller
_KEYS = itertools.count()  # of storages, each used once in a process: a storage keeps its number
_KIND_OF_PHASE = {"build": PARAMETERS, "forward": ACTIVATIONS, "evaluation": ACTIVATIONS}


@dataclass(frozen=True)
class Peak:
    """The largest number of live bytes, and what they were."""

    num_bytes: int = 0
    phase: str = ""
    bytes_by_kind: dict[str, int] = field(default_factory=dict)
    operator: str = ""


@dataclass
class Block:
    kind: str
    phase: str
    shape: tuple[int, ...] = ()
    dtype: torch.dtype | None = None
    num_bytes: int = 0
    reference: Any = None  # a weak one; it notices when the storage goes


class StorageTracker(TorchDispatchMode):
    """While it is entered, follows every storage that operators touch on one type of device.

    By ``num_classes``, C of logits (..., C), these are told from other activations. Sizes on CUDA are its blocks'.
    """

    def __init__(self, device_type: str, num_classes: int | None = None) -> None:
        super().__init__()
        self.device_type, self.num_classes = device_type, num_classes
        self.granule_bytes = CUDA_GRANULE_BYTES if device_type == "cuda" else 1
        self.phase = "build"
        self.live: dict[int, Block] = {}
        self.live_bytes = 0
        self.bytes_by_kind: dict[str, int] = dict.fromkeys(KINDS, 0)
        self.peak = Peak()
        self.peak_bytes_by_phase: dict[str, int] = {}
        self._ignored: set[int | None] = set()

    def __enter__(self) -> Any:
        resize = torch.UntypedStorage.resize_

        def resize_and_count(storage: Any, size: int) -> Any:
            result = resize(storage, size)
            key = getattr(storage, "_tracked_as", None)
            if key in self.live:
                self._resize(key, self._size(storage))
                self.observe("resize_")
            return result

        # FSDP2 frees gathered parameters by it: no operator, so nothing else tells
        self._resizing = patch.object(torch.UntypedStorage, "resize_", resize_and_count)
        self._resizing.start()
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:  # type: ignore
        super().__exit__(*exception)
        self._resizing.stop()

    def mark(self, phase: str) -> None:
        """What is allocated from here on belongs to ``phase``."""
        self.phase = phase

    def reset_peak(self) -> None:
        """Forgets the peaks; what is live now is where the next ones start."""
        self.peak = Peak(self.live_bytes, self.phase, dict(self.bytes_by_kind), "")
        self.peak_bytes_by_phase = {}

    def tag(self, kind: str, tensors: Iterable[Any]) -> None:
        """Says what ``tensors`` are; those not seen before are counted from now on. Skips what is not a tensor."""
        for tensor in tensors:
            local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            if isinstance(local, Tensor) and (block := self.see(local)) is not None:
                self.bytes_by_kind[block.kind] -= block.num_bytes
                self.bytes_by_kind[kind] += block.num_bytes
                block.kind = kind

    def ignore(self, tensors: Iterable[Any]) -> None:
        """Leaves the storages of ``tensors`` out, also where views of them turn up. Skips what is not a tensor."""
        for tensor in tensors:
            if isinstance(tensor, Tensor):
                key = storage_of(tensor)._tracked_as = next(_KEYS)
                self._ignored.add(key)

    def hold(self, num_bytes: int, kind: str) -> None:
        """Counts memory that no tensor shows, from now on."""
        key = next(_KEYS)
        self.live[key] = Block(kind, self.phase)
        self._resize(key, num_bytes)

    def see(self, tensor: Tensor) -> Block | None:
        """Counts the storage of ``tensor``, or what has become of its size; None if it does not count."""
        storage = storage_of(tensor) if tensor.device.type == self.device_type else None
        key: Any = getattr(storage, "_tracked_as", None)
        if storage is None or key in self._ignored:
            return None
        if key not in self.live:
            key = storage._tracked_as = next(_KEYS)
            block = self.live[key] = Block(self._kind_of(tensor), self.phase, tuple(tensor.shape), tensor.dtype)
            block.reference = weakref.ref(storage, lambda _: self._free(key))
        self._resize(key, self._size(storage))
        return self.live[key]

    def _size(self, storage: Any) -> int:
        return -(-storage.nbytes() // self.granule_bytes) * self.granule_bytes

    def _kind_of(self, tensor: Tensor) -> str:
        of_head = self.phase == "forward" and tensor.ndim == 2 and len(tensor) == self.num_classes  # gradient or cast
        if (of_head or (tensor.ndim > 1 and tensor.shape[-1] == self.num_classes)) and self.phase != "build":
            return LOGITS if self.phase in ("forward", "backward", "evaluation") else WORKSPACE
        # in backward only what is recomputed records gradients
        recomputed = self.phase == "backward" and torch.is_grad_enabled()
        return ACTIVATIONS if recomputed else _KIND_OF_PHASE.get(self.phase, WORKSPACE)

    def _resize(self, key: int, size: int) -> None:
        """The storage with this number has grown or shrunk to ``size`` bytes."""
        block = self.live[key]
        self.live_bytes += size - block.num_bytes
        self.bytes_by_kind[block.kind] += size - block.num_bytes
        block.num_bytes = size

    def _free(self, key: int) -> None:
        self._resize(key, 0)
        del self.live[key]

    def observe(self, operator: Any, temporary_bytes: int = 0) -> None:
        """Compares what is live now, and what ``operator`` held on top of it, with the peaks."""
        now = self.live_bytes + temporary_bytes
        if now > self.peak_bytes_by_phase.get(self.phase, 0):
            self.peak_bytes_by_phase[self.phase] = now
        if now > self.peak.num_bytes:
            by_kind = dict(self.bytes_by_kind)
            by_kind[WORKSPACE] += temporary_bytes
            self.peak = Peak(now, self.phase, by_kind, str(operator))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        in_place, result = adds_in_place(func, args, kwargs), func(*args, **(kwargs or {}))
        for tensor in tensors_in(result):
            self.see(tensor)
        if not in_place:  # the first of the two gradients is gone with the next operator
            self.observe(func)
        return result


def adds_in_place(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether autograd would add two gradients of one tensor in the first of them, as nothing else uses it.

    Followed, or for a tensor subclass, it always makes a new one: with tied embeddings one table too much.
    """
    if func is not torch.ops.aten.add.Tensor or kwargs:
        return False
    (first, second), in_backward = args, torch._C._current_graph_task_id() != -1 and not torch.is_grad_enabled()
    if not (in_backward and isinstance(first, Tensor) and isinstance(second, Tensor)):
        return False
    is_alike, storage = first.shape == second.shape and first.dtype == second.dtype, storage_of(first)
    # its storage is used by the tensor, and by the object just made
    return is_alike and storage is not None and torch._C._storage_Use_Count(storage._cdata) == 2


def tensors_in(tree: Any) -> list[Tensor]:
    """Those in nested tuples, lists and dictionaries."""
    return [tree] if isinstance(tree, Tensor) else [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def num_classes_of(network: nn.Module, num_labels: int, vocabulary: int) -> int:
    """C of logits (..., C): a model's own ``vocabulary`` may have more entries than the tokenizer's."""
    config: Any = network.config.get_text_config() if hasattr(network, "_from_config") else None  # type: ignore
    return num_labels or getattr(config, "vocab_size", None) or vocabulary


def tag_held(tracker: StorageTracker, network: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Tells ``tracker`` what stays between steps: parameters and buffers, optimizer state, gradients if there are."""
    states: list[Any] = [getattr(p, "quant_state", None) for p in network.parameters()]
    states += [state.state2 for state in states if state is not None]  # of the scales, which are quantised too
    scales = [value for state in states if state is not None for value in (state.absmax, state.code, state.offset)]
    tracker.tag(PARAMETERS, [*network.parameters(), *network.buffers(), *scales])
    tracker.tag(GRADIENTS, [p.grad for p in network.parameters()])
    tracker.tag(OPTIMIZER_STATE, [value for state in optimizer.state.values() for value in state.values()])


def tag_gradients(tracker: StorageTracker, parameters: Iterable[Tensor]) -> list[Any]:
    """Tags each gradient as soon as it is there; returns handles whose ``remove()`` ends that."""
    trained = (parameter for parameter in parameters if parameter.requires_grad)
    return [p.register_post_accumulate_grad_hook(lambda p: tracker.tag(GRADIENTS, [p.grad])) for p in trained]


def storage_of(tensor: Tensor) -> Any:
    """The storage that views share; None of a tensor without one: sparse, or a wrapper around others, as DTensor is."""
    try:
        return None if hasattr(tensor, "to_local") else tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None
