"""A card and other ranks that are not there: this process believes in them, so that a step for them can be predicted.

Torch's C++ core asks two tables about CUDA before it lets a fake tensor of that device pass autograd and autocast: the
registry of device guards, and the accelerator hooks. :func:`install` puts entries there, by the names of exported C++
functions, that report a card on which nothing ever runs. :func:`ranks` makes a process group that exchanges nothing, so
that torch's and accelerate's own FSDP2 code runs on fake tensors for any number of ranks. The process stays so.
"""

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from train.memory.predict import CannotStandInError
from train.records import one_line

_NUMBERS = {"CUDA": 1, "MPS": 13}  # of c10::DeviceType
_NUM_GUARD_METHODS, _NUM_HOOK_METHODS = 64, 70  # more than the classes have virtual functions
_DEVICE_COUNT = 15  # position in c10::impl::DeviceGuardImplInterface; before it are questions for a device or a stream
_TABLE_HEADER = 2  # words before the first entry of a C++ table of virtual functions: offset to top, type information
_IS_BUILT, _HAS_PRIMARY_CONTEXT = 4, 6  # in the table of at::AcceleratorHooksInterface, its header included

_kept: list[Any] = []  # memory that C++ points to from now on


def install(device_type: str, capability: tuple[int, int]) -> None:
    """Makes this process believe in one idle device: of CUDA, with the given compute capability, or MPS.

    Raises CannotStandInError if this build of torch is not laid out as expected.
    """
    if device_type == "cuda" and not torch.cuda.is_initialized():
        _still_streams()
    if not _kept and torch.get_device_module(device_type).is_available():
        return
    try:
        if not _kept:
            _install_tables(device_type.upper())
        if device_type == "cuda":
            _install_answers(capability)
        else:
            mps: Any = torch.backends.mps
            mps.is_available = mps.is_built = mps.is_macos_or_newer = lambda *version: True
        _check(device_type)
    except Exception as error:  # a symbol that is not there, an operator that refuses, a table of another shape
        where, why = f"torch {torch.__version__} on {sys.platform}", f"{type(error).__name__}: {one_line(error, 200)}"
        what = f"{where} cannot be made to plan for a device of type {device_type} that is not there ({why})"
        raise CannotStandInError(f"{what}. Plan on a machine with one, or for the CPU with --device cpu.") from None


def _library(name: str) -> ctypes.CDLL:
    suffix = {"linux": "so", "darwin": "dylib"}[sys.platform]
    return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / f"lib{name}.{suffix}"))


def _install_tables(kind: str) -> None:
    answer = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p)
    functions = [answer(lambda this: 0), answer(lambda this: 1), answer(lambda this: _NUMBERS[kind])]
    zero, one, device = (ctypes.cast(function, ctypes.c_void_p).value for function in functions)
    _kept.extend(functions)
    if not getattr(torch.backends, kind.lower()).is_built():
        # FakeTensorMode exchanges a guard that counts no device for one that does nothing; a CPU build has none at
        # all, so this one comes first. Of MPS it stays, and says which device it is for and that there is one.
        answers = [zero] * _NUM_GUARD_METHODS
        if kind == "MPS":
            answers[:_DEVICE_COUNT], answers[_DEVICE_COUNT] = [device] * _DEVICE_COUNT, one
        table = (ctypes.c_void_p * _NUM_GUARD_METHODS)(*answers)
        guard = (ctypes.c_void_p * 4)(ctypes.addressof(table))
        # Each of these is several operators where the device has no kernel for it. Fake tensors never call the kernel.
        kernels = torch.library.Library("aten", "IMPL")
        for name in ("silu_backward", "mish_backward", "_fused_rms_norm"):
            kernels.impl(name, lambda *_: None, kind)
        _kept.extend([table, guard, kernels])
        register = _library("c10")._ZN3c104impl19registerDeviceGuardENS_10DeviceTypeEPKNS0_24DeviceGuardImplInterfaceE
        register(ctypes.c_int8(_NUMBERS[kind]), ctypes.c_void_p(ctypes.addressof(guard)))
    if kind == "CUDA":
        torch._C._ensureCUDADeviceGuardSet()
    for name in _NUMBERS:  # torch stops where two kinds are built: a build for CUDA, say, and MPS
        hooks_of = getattr(_library("torch_cpu"), f"_ZN2at6detail{len(f'get{name}Hooks')}get{name}HooksEv")
        hooks_of.restype = ctypes.c_void_p
        hooks = ctypes.c_void_p.from_address(hooks_of())
        kind_of_table = ctypes.c_void_p * (_TABLE_HEADER + _NUM_HOOK_METHODS)
        header_bytes = _TABLE_HEADER * ctypes.sizeof(ctypes.c_void_p)
        table = kind_of_table(*kind_of_table.from_address((hooks.value or 0) - header_bytes))
        table[_IS_BUILT], table[_HAS_PRIMARY_CONTEXT] = one if name == kind else zero, zero
        _kept.append(table)
        hooks.value = ctypes.addressof(table) + header_bytes


def _install_answers(capability: tuple[int, int]) -> None:
    """Answers the questions by which Python code decides to use CUDA."""
    answers = {"is_available": True, "device_count": 1, "current_device": 0, "is_current_stream_capturing": False}
    answers |= {"get_device_capability": capability, "is_bf16_supported": capability >= (8, 0)}
    answers |= dict.fromkeys(("set_device", "synchronize", "empty_cache", "manual_seed_all"))
    for name, answer in {**answers, "get_device_name": "this card"}.items():
        setattr(torch.cuda, name, lambda *_, answer=answer, **__: answer)
    # otherwise a real tensor is made before the first fake one of a device, which fails in a build for CUDA
    fake_tensor.init_gpu_context = lambda device: None  # type: ignore
    # otherwise fake tensors from Python numbers are made on the card first
    FakeTensorMode.avoid_device_init = property(lambda self: True)  # type: ignore


def _check(device: str) -> None:
    """One forward, backward and scaled update, of which every type and device must be right."""
    with FakeTensorMode():
        weight = torch.nn.Parameter(torch.empty(8, 4, device=device))
        scaler, optimizer = torch.amp.GradScaler(device), torch.optim.AdamW([weight], fused=True)
        with torch.autocast(device, torch.float16):
            out = torch.empty(2, 4, device=device) @ weight.T
        scaler.scale(out.float().sum()).backward()
        scaler.unscale_(optimizer)
        optimizer.step()
        gradient, found = weight.grad, (out.dtype, out.device.type, scaler.is_enabled())
    if gradient is None or gradient.dtype != torch.float32 or found != (torch.float16, device, True):
        raise RuntimeError(f"a trial step gave {found} and a gradient {gradient}")


@contextlib.contextmanager
def ranks(world_size: int, device_type: str, offloads: bool) -> Iterator[None]:
    """Inside it, this is rank 0 of ``world_size`` under FSDP2; if it ``offloads``, its shards stay in host memory."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp._fully_shard import _fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    settings = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_OFFLOAD_PARAMS": str(offloads).lower()}
    settings["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"
    defaults = {"FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP", "FSDP_RESHARD_AFTER_FORWARD": "true"}
    settings |= {name: os.environ.get(name, value) for name, value in defaults.items()}  # of the launch file, in a run
    settings |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
    with contextlib.ExitStack() as stack:
        stack.enter_context(patch.dict(os.environ, settings))
        dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
        stack.callback(dist.destroy_process_group)
        mesh = init_device_mesh(device_type, (world_size,))  # here: it reads numbers of tensors, so they must be real
        stack.enter_context(patch.object(_fully_shard, "_init_default_mesh", lambda: mesh))
        yield


@contextlib.contextmanager
def shapes_uncounted(tracker: Any) -> Iterator[None]:
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


def _still_streams() -> None:
    """CUDA streams that do nothing, in this process, from now on."""
    cuda: Any = torch.cuda
    any_torch: Any = torch
    cuda.Stream = cuda.Event = any_torch.Event = _Stream
    cuda.current_stream = cuda.default_stream = torch.accelerator.current_stream = lambda *args: _Stream()  # type: ignore
    cuda.stream = lambda stream: contextlib.nullcontext()
    cuda.set_stream = cuda._lazy_init = any_torch.Tensor.record_stream = lambda *args: None
    any_torch.Tensor.pin_memory = lambda tensor, *args: tensor  # host memory, which is not counted
