"""One rank of many, alone: a process group that exchanges nothing, and CUDA streams that do nothing.

With them torch's and accelerate's own FSDP2 code runs on fake tensors, whatever the world size. For the process of a
prediction only: changes made here stay.
"""

import contextlib
import os
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from train.memory.fakes import FakeTracker

_environment = contextlib.ExitStack()  # undoes the changes of the environment


def join(world_size: int, device_type: str, precision: str, offloads: bool) -> None:
    """Makes this process rank 0 of ``world_size`` under FSDP2, as the launcher and accelerate would.

    If it ``offloads``, its shards stay in host memory between their uses.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp._fully_shard import _fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    settings = {"ACCELERATE_USE_FSDP": "true", "ACCELERATE_MIXED_PRECISION": precision, "FSDP_VERSION": "2"}
    settings |= {"FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP", "FSDP_RESHARD_AFTER_FORWARD": "true"}
    settings |= {"FSDP_CPU_RAM_EFFICIENT_LOADING": "false", "FSDP_OFFLOAD_PARAMS": str(offloads).lower()}
    settings |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
    _environment.enter_context(patch.dict(os.environ, settings))
    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    mesh = init_device_mesh(device_type, (world_size,))  # here: it reads numbers out of tensors, so they must be real
    _fully_shard._init_default_mesh = lambda: mesh


def leave() -> None:
    """Undoes :func:`join` for the next prediction."""
    if dist.is_initialized():
        dist.destroy_process_group()
    _environment.close()


@contextlib.contextmanager
def shapes_uncounted(tracker: FakeTracker) -> Iterator[None]:
    """Inside it, the whole tensors that DTensor makes only to learn a result's shape are not counted."""
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    find_shape = patch.object(tracker, "paused", True)(ShardingPropagator._propagate_tensor_meta_non_cached)
    with patch.object(ShardingPropagator, "_propagate_tensor_meta_non_cached", find_shape):
        yield


class _Stream(contextlib.AbstractContextManager[Any]):
    """A stream or an event on which nothing is ever queued."""

    device, device_index, device_type, stream_id = torch.device("cuda", 0), 0, 1, 0

    def __init__(self, *args: Any, **options: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **options: {"record_event": self, "query": True}.get(name)

    def __exit__(self, *exception: Any) -> None: ...


def still_streams() -> None:
    """CUDA streams that do nothing, in this process, from now on."""
    cuda: Any = torch.cuda
    any_torch: Any = torch
    cuda.Stream = cuda.Event = any_torch.Event = _Stream
    cuda.current_stream = cuda.default_stream = torch.accelerator.current_stream = lambda *args: _Stream()
    cuda.stream = lambda stream: contextlib.nullcontext()
    cuda.set_stream = cuda._lazy_init = any_torch.Tensor.record_stream = lambda *args: None
    any_torch.Tensor.pin_memory = lambda tensor, *args: tensor  # host memory, which is not counted
