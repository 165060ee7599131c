"""A CUDA card that is not there, but computes: the real program runs on it on a machine without one.

Its tensors say ``cuda:0``; their numbers are in host memory and computed by the CPU's kernels. It is as strict as a
card: tensors of two devices do not mix, page-locked memory and the card's own can be full, and whatever a stream may do
late is done as late as waits permit. So a missing wait shows as wrong numbers, or as a ``RaceError``.

What it does not show: time, what CUDA's own kernels allocate beside their results, and their rounding. It stands on
``train.memory.make_believe``, changes the whole process, and is installed once: ``install`` is a fault of a run in a
process of its own (``faults.processes``).
"""

from __future__ import annotations

import json
import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from emulated.card import Seen, Settings, card
from emulated.streams import Event, Stream, streams, synchronize, within
from emulated.tensors import CardTensor, OperatorsOfTheCard, off_card, pin


class Driver:
    """``torch.cuda.cudart()``."""

    @staticmethod
    def cudaHostRegister(address: int, num_bytes: int, flags: int) -> int:
        return 0 if card.lock(address, num_bytes) else 2  # cudaErrorMemoryAllocation

    @staticmethod
    def cudaHostUnregister(address: int) -> int:
        card.unlock(address)
        return 0


stand_ins = ExitStack()  # as long as the process


def memory_stats(device: Any = None) -> dict[str, Any]:
    counts = {"current": card.live_bytes, "peak": card.live_peak, "allocated": 0, "freed": 0}
    sizes = {"allocated_bytes": {"all": counts}, "reserved_bytes": {"all": counts}}
    return {**sizes, "num_alloc_retries": 0, "num_ooms": card.num_ooms}


def reset_peak(device: Any = None) -> None:
    card.live_peak = card.live_bytes


def record_history(enabled: str | None = "all", *args: Any, **options: Any) -> None:
    card.is_recording = enabled is not None


def dump_snapshot(path: str) -> None:
    assert card.is_recording
    Path(path).write_bytes(pickle.dumps({"live_bytes": card.live_bytes, "phase": card.phase}))


def install(settings: Settings) -> None:
    """From now on this process has the card."""
    from train import extras
    from train.memory import make_believe
    from train.memory.card_kernels import card_attention
    from train.memory.predict import Target

    make_believe.install("cuda", settings.capability)
    card.settings = settings
    _install_cuda(settings)
    accelerator: Any = torch.accelerator
    accelerator.current_accelerator = lambda check_available=False: torch.device("cuda")
    accelerator.is_available = lambda: True
    accelerator.current_device_index = lambda: 0
    accelerator.set_device_index = lambda device: None
    accelerator.synchronize = synchronize
    tensor: Any = torch.Tensor
    tensor.pin_memory = lambda self, *args: self if card.is_locked(self) else pin(self.clone())
    tensor.is_pinned = lambda self, *args: self.device.type == "cpu" and card.is_locked(self)
    for name in ("torch.optim.optimizer", "torch.utils._foreach_utils"):
        sys.modules[name]._foreach_supported_types.append(CardTensor)
    torch.__future__.set_swap_module_params_on_conversion(True)
    torch._C._set_only_lift_cpu_tensors(True)
    _read_by_safetensors()
    joined: Any = extras.Extras
    each, inside = joined.each, joined.inside

    def see_phase(extras_of_run: Any, method: str, *arguments: Any) -> list[Any]:
        if method == "mark":
            card.begin(*arguments)
        return each(extras_of_run, method, *arguments)

    joined.each = see_phase

    @contextmanager
    def step_of(extras_of_run: Any, method: str, *arguments: Any) -> Iterator[None]:
        with inside(extras_of_run, method, *arguments):
            yield
        if method == "computing" and "forward" in arguments:
            card.begin("between steps")

    joined.inside = step_of
    card.kernels = stand_ins.enter_context(card_attention(Target("cuda", settings.capability)))
    stand_ins.enter_context(OperatorsOfTheCard())


def _install_cuda(settings: Settings) -> None:
    name = "NVIDIA H100 80GB HBM3" if settings.capability >= (8, 0) else "Tesla T4"
    major, minor = settings.capability
    about = SimpleNamespace(name=name, major=major, minor=minor, total_memory=settings.memory_bytes)
    about.multi_processor_count = 132
    cuda: Any = torch.cuda
    cuda._initialized, cuda._lazy_init = True, lambda: None
    cuda.device = cuda.device_of = lambda device=None: nullcontext()
    cuda.get_device_name = lambda device=None: name
    cuda.get_device_properties = lambda device=None: about
    cuda.mem_get_info = lambda device=None: (settings.memory_bytes - card.live_bytes, settings.memory_bytes)
    cuda.memory_stats_as_nested_dict = memory_stats
    cuda.memory_stats = lambda device=None: {}
    cuda.memory_allocated = lambda device=None: card.live_bytes
    cuda.max_memory_allocated = cuda.max_memory_reserved = lambda device=None: card.live_peak
    cuda.reset_peak_memory_stats = reset_peak
    cuda.memory._record_memory_history, cuda.memory._dump_snapshot = record_history, dump_snapshot
    torch._C._cuda_attach_out_of_memory_observer = card.observers.append  # type: ignore
    cuda._is_in_bad_fork = lambda: False  # builds for CUDA do not seed a process that was forked
    cuda.manual_seed = cuda.manual_seed_all = lambda seed: card.random.manual_seed(seed)
    cuda.get_rng_state = lambda device=None: card.random.get_state()
    cuda.set_rng_state = lambda state, device=None: card.random.set_state(state)
    cuda.cudart = lambda: Driver
    cuda.Stream, cuda.Event, cuda.stream, cuda.synchronize = Stream, Event, within, synchronize
    cuda.current_stream = lambda device=None: streams.current
    cuda.default_stream = lambda device=None: streams.compute
    torch.backends.cudnn.version = lambda: 91501


def _read_by_safetensors() -> None:
    """It looks at where tensors lie before it copies them to the host."""
    from safetensors import torch as safetensors

    for name in ("storage_ptr", "storage_size", "_end_ptr"):
        of_host = getattr(safetensors, name)
        setattr(safetensors, name, lambda tensor, of_host=of_host: of_host(off_card(tensor)))


def run_main(
    arguments: list[str], settings: Settings, report: Path, before: Callable[[], None] | None, rank: int = 0
) -> int:
    """``train.main.main`` on the card; the status is that of a bug if the program did not wait where it has to."""
    from train.main import main

    install(settings)
    if before is not None:
        before()
    try:
        status = main(arguments)
        return 71 if card.seen.races else status
    finally:
        report.write_text(json.dumps({**vars(card.seen), "attention": sorted(card.kernels)}))


def run_several(
    runs: dict[str, tuple[list[str], Settings]], report: Path, before: Callable[[], None], rank: int = 0
) -> int:
    """``train.main.main`` by the arguments of each, one after the other on the card; ``report`` says how each ended."""
    from train.main import main

    install(Settings())
    before()
    ended = {}
    for name, (arguments, settings) in runs.items():
        card.settings, card.seen, card.num_ooms = settings, Seen(), 0
        card.times.clear()
        print(f"== {name}", flush=True)
        ended[name] = {"status": main(arguments), **vars(card.seen)}
        print(flush=True)
    report.write_text(json.dumps(ended))
    return 0
