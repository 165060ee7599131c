"""What an out-of-memory message says, why the memory was full, and what to type.

The wordings are those of torch's allocators: c10/cuda/CUDACachingAllocator.cpp (its HIP twin included),
c10/cuda/CUDAMallocAsyncAllocator.cpp, c10/xpu/XPUCachingAllocator.cpp, aten/src/ATen/mps/MPSAllocator.mm and
c10/core/impl/alloc_cpu.cpp, from torch 0.4 to 2.13.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from train.outputs_log import gib, percent
from train.records import UsageError

_WIDTH = 100


@dataclass(frozen=True)
class OutOfMemory:
    """The figures of one message in bytes; None where its wording lacks them and they do not follow."""

    backend: str
    """CUDA, HIP, XPU, NPU, MPS, GPU (some device, the message does not say which) or host."""
    device_index: int | None = None
    library: str | None = None
    """Who asked, where it was not PyTorch's allocator: driver, cuBLAS, cuDNN, NCCL ..."""
    requested_bytes: int | None = None
    total_bytes: int | None = None
    free_bytes: int | None = None
    process_bytes: int | None = None
    """This process: what PyTorch reserved, the driver's context and libraries."""
    allocated_bytes: int | None = None
    """In tensors."""
    reserved_unallocated_bytes: int | None = None
    """Held by PyTorch, in no tensor."""
    reserved_bytes: int | None = None
    """The two above together."""
    private_pools_bytes: int | None = None
    """The share of ``allocated_bytes`` that CUDA graphs keep."""
    other_processes_bytes: int | None = None
    other_processes: tuple[tuple[int, int], ...] = ()
    """(process id, bytes) of each process that the message names."""
    allowed_bytes: int | None = None
    """A limit below the whole device: torch's memory fraction, or the high watermark of MPS."""

    @property
    def available_bytes(self) -> int | None:
        """What PyTorch could have of the device as it was: its own reserve and the free rest."""
        if self.reserved_bytes is None:
            return None
        bounds = []
        if self.free_bytes is not None:
            bounds.append(self.free_bytes + self.reserved_bytes)
        if self.allowed_bytes is not None:
            beside = (self.process_bytes or 0) - self.reserved_bytes if self.backend == "MPS" else 0
            bounds.append(self.allowed_bytes - beside)
        return min(bounds, default=None)

    @property
    def outside_bytes(self) -> int | None:
        """Neither free nor reserved by this PyTorch: the driver's context, libraries and other processes."""
        if self.total_bytes is None or self.free_bytes is None or self.reserved_bytes is None:
            return None
        return max(0, self.total_bytes - self.free_bytes - self.reserved_bytes)


@dataclass(frozen=True)
class Situation:
    """Where a run stood when its memory was full."""

    phase: str
    """Loading, forward, backward, clip, optimizer or evaluation."""
    micro_batch_shape: tuple[int, int] | None
    """(B, S) of the micro-batch: examples, tokens."""
    step: int | None
    bytes_by_kind: dict[str, int]
    """At the predicted peak: parameters, gradients, optimizer state, activations, logits and loss, workspace."""
    predicted_peak_bytes: int | None
    vocab_size: int | None = None


@dataclass(frozen=True)
class Change:
    """Something to type, and what it is predicted to save."""

    flags: str
    saved_bytes: int
    note: str


def is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` says that memory was full: the device's or the machine's."""
    import torch

    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and parse_oom(str(error)) is not None


# ---- reading ---------------------------------------------------------------------------------------------------------

_ANSI = re.compile(r"\x1b\[[\d;?]*[ -/]*[@-~]|\[\d+(?:;\d+)*m")
_LOG_PREFIX = re.compile(
    r"""^(?: \s+ | [#>|"'`-]+ | \[[^\]]*\]:? | \d+:\s | \([^()]*\b(?:pid|rank)=\d+[^()]*\)
      | (?:\d{4}-)?\d\d-\d\d[T\s] | \d\d:\d\d:\d\d[.,\d]*Z? | (?:DEBUG|INFO|WARNING|ERROR|CRITICAL)\b:? )+""",
    re.VERBOSE,
)
_SIZE = r"(\d+(?:\.\d+)?)(bytes?|[KMGTPE]i?B)"
_EXPONENTS = {letter: 10 * power for power, letter in enumerate("bKMGTPE")}


def parse_oom(message: str) -> OutOfMemory | None:
    """The figures of an out-of-memory message, also from within a traceback or a log; None where there is none.

    Of several messages the first one counts. Sizes are as exact as the message: two decimals of their unit.
    """
    text = _squeezed(message)
    for read in (_read_caching_allocator, _read_async_allocator, _read_mps, _read_host, _read_library):
        found = read(text)
        if found is not None:
            return _derived(found)
    return None


def _squeezed(message: str) -> str:
    """``message`` without colours, log prefixes, quotes and any white space.

    Terminals, loggers and web pages break these long lines anywhere, also within a word or a number.
    """
    lines = _ANSI.sub("", message.replace("\\n", "\n")).splitlines()
    return re.sub(r"[\s\"'`\\]+", "", "\n".join(_LOG_PREFIX.sub("", line) for line in lines))


def _bytes(number: str, unit: str) -> int:
    # Allocators mean powers of two by GB and MB too: MPS wrote them so before torch 2.5.
    return round(float(number) * 2 ** _EXPONENTS["b" if unit.startswith("b") else unit[0].upper()])


def _size(text: str, *patterns: str) -> int | None:
    """The size at ``SIZE`` in the first of ``patterns`` that ``text`` holds."""
    for pattern in patterns:
        found = re.search(pattern.replace("SIZE", _SIZE), text, re.IGNORECASE)
        if found:
            return _bytes(*found.groups())
    return None


def _integer(text: str, pattern: str) -> int | None:
    found = re.search(pattern, text, re.IGNORECASE)
    return int(found[1]) if found else None


def _read_caching_allocator(text: str) -> OutOfMemory | None:
    start = r"(CUDA|HIP|XPU|NPU|MUSA|MLU)outofmemory"
    messages = [*re.finditer(rf"{start}\.Triedtoallocate", text)] or [*re.finditer(rf"{start}(?:\.|$)", text)]
    if not messages:
        return None
    text = text[messages[0].start() : messages[1].start() if len(messages) > 1 else None]
    allocated = _size(text, "SIZEalreadyallocated", "SIZEisallocatedbyPyTorch")
    total = _size(text, "SIZEtotalcapaci?ty", "totalcapaci?tyofSIZE")
    reserved = _size(text, "SIZEreservedintotal")
    unallocated = _size(text, "SIZEisreservedbyPyTorchbutunallocated")
    cached = _size(text, "SIZEcached")
    if cached is not None:  # before torch 1.4: what no tensor uses; in some builds all that is reserved
        if total is not None and allocated is not None and allocated + cached > total:
            reserved = cached
        else:
            unallocated = cached
    return OutOfMemory(
        backend=messages[0][1],
        device_index=_integer(text, r"[(.][GNX]PU(\d+)(?:;|has)"),
        requested_bytes=_size(text, "Triedtoallocate(?:morethan)?SIZE"),
        total_bytes=total,
        free_bytes=_size(text, "ofwhichSIZEisfree", ";SIZEfree"),
        process_bytes=_size(text, "thisprocesshasSIZEmemoryinuse"),
        allocated_bytes=allocated,
        reserved_unallocated_bytes=unallocated,
        reserved_bytes=reserved,
        private_pools_bytes=_size(text, "SIZEallocatedinprivatepools"),
        other_processes=tuple(
            (int(process), _bytes(number, unit))
            for process, number, unit in re.findall(rf"Process(\d+)has{_SIZE}memoryinuse", text)
        ),
        allowed_bytes=_size(text, "SIZEallowed"),
    )


def _read_async_allocator(text: str) -> OutOfMemory | None:
    device = _integer(text, r"Allocationondevice(\d+)wouldexceedallowedmemory")
    if device is None:
        return None
    total, limit = _size(text, "Devicelimit:SIZE"), _size(text, r"memoryfraction\):SIZE")
    return OutOfMemory(
        backend="CUDA",
        device_index=device,
        requested_bytes=_size(text, "Requested:SIZE"),
        total_bytes=total,
        free_bytes=_size(text, r"accordingtoCUDA\):SIZE"),
        allocated_bytes=_size(text, "Currentlyallocated:SIZE"),
        allowed_bytes=limit if limit and total and limit < total else None,  # 2^64 stands for no limit
    )


def _read_mps(text: str) -> OutOfMemory | None:
    if "MPSbackendoutofmemory" in text:
        reserved, other = _size(text, "MPSallocated:SIZE"), _size(text, "otherallocations:SIZE")
        return OutOfMemory(
            backend="MPS",
            requested_bytes=_size(text, "Triedtoallocate(?:morethan)?SIZE"),
            process_bytes=None if reserved is None or other is None else reserved + other,
            reserved_bytes=reserved,
            allowed_bytes=_size(text, "maxallowed:SIZE"),
        )
    requested = _size(text, "Invalidbuffersize:SIZE")
    return None if requested is None else OutOfMemory(backend="MPS", requested_bytes=requested)


def _read_host(text: str) -> OutOfMemory | None:
    requested = _size(text, "youtriedtoallocateSIZE", "UnabletoallocateSIZEforanarray")
    signs = r"(?<!of)MemoryError|std::bad_alloc|Cannotallocatememory|oom[-_]kill|Outofmemory:Killedprocess"
    if requested is None and not re.search(signs, text, re.IGNORECASE):
        return None
    return OutOfMemory(backend="host", requested_bytes=requested)


def _read_library(text: str) -> OutOfMemory | None:
    # Not the bare words: advice about memory is no message about it.
    signs = r"(?:[:\]]|error|failure\d*)outofmemory|outofmemoryerror|out_of_(?:device_)?memory"
    signs += "|STATUS_ALLOC_FAILED|FailedtoCUDAcalloc"
    if not re.search(signs, text, re.IGNORECASE):
        return None
    libraries = {"hipBLAS": "hipblas", "cuBLAS": "cublas", "cuDNN": "cudnn", "NCCL": "nccl"}
    backend = re.search("CUDA|HIP|XPU|NPU", text, re.IGNORECASE)
    return OutOfMemory(
        backend=backend[0].upper() if backend else "GPU",
        library=next((name for name, word in libraries.items() if word in text.lower()), "the driver"),
        requested_bytes=_size(text, "FailedtoCUDAcallocSIZE"),
    )


def _derived(oom: OutOfMemory) -> OutOfMemory:
    """``oom`` with the figures that follow from the others."""
    allocated, unallocated, reserved = oom.allocated_bytes, oom.reserved_unallocated_bytes, oom.reserved_bytes
    if allocated is not None and unallocated is not None:
        reserved = allocated + unallocated
    elif allocated is not None and reserved is not None:
        unallocated = max(0, reserved - allocated)
    oom = replace(oom, reserved_bytes=reserved, reserved_unallocated_bytes=unallocated)
    oom = _own_process_found(oom)
    if oom.other_processes:
        return replace(oom, other_processes_bytes=sum(size for _, size in oom.other_processes))
    if oom.total_bytes is None or oom.free_bytes is None or oom.process_bytes is None:
        return oom
    return replace(oom, other_processes_bytes=max(0, oom.total_bytes - oom.free_bytes - oom.process_bytes))


def _own_process_found(oom: OutOfMemory) -> OutOfMemory:
    """Takes this process out of the list of the others.

    In a container the driver knows it by another process id than it knows itself, so that the message lists it as a
    stranger. It must be among them if what no listed process holds is too little for what PyTorch has reserved.
    """
    if oom.process_bytes is not None or not oom.other_processes or oom.outside_bytes is None:
        return oom
    reserved = oom.reserved_bytes or 0
    large_enough = [entry for entry in oom.other_processes if entry[1] >= 0.99 * reserved]
    unlisted = oom.outside_bytes + reserved - sum(size for _, size in oom.other_processes)
    if not large_enough or unlisted >= 0.9 * reserved:
        return oom
    own = min(large_enough, key=lambda entry: entry[1])
    others = tuple(entry for entry in oom.other_processes if entry is not own)
    return replace(oom, process_bytes=own[1], other_processes=others)


# ---- judging ---------------------------------------------------------------------------------------------------------

Cause: TypeAlias = Literal[
    "unknown", "bug", "host", "library", "limit", "refused", "others", "fragmentation", "graphs", "huge", "full"
]

_IMPOSSIBLE_BYTES = 2**50
"""A million GiB: no size that anybody meant."""
_CONTEXT_BYTES = 2**30
"""What the driver's context and libraries of one process take at most, roughly; 0.3 to 0.7 GiB is common."""


def _cause(oom: OutOfMemory) -> Cause:
    requested, free, reserved = oom.requested_bytes or 0, oom.free_bytes, oom.reserved_bytes
    unallocated = oom.reserved_unallocated_bytes or 0
    device = oom.total_bytes or oom.allowed_bytes
    if requested >= _IMPOSSIBLE_BYTES:
        return "bug"
    if oom.backend == "host":
        return "host"
    if oom.library is not None:
        return "library"
    if not requested and device is None:
        return "unknown"
    if oom.allowed_bytes is not None and oom.backend != "MPS" and _limited(oom):
        return "limit"
    if free is not None and 0 < requested <= free:
        return "refused"
    if device and _others_bytes(oom) >= 0.1 * device and (free or 0) + _others_bytes(oom) >= requested:
        return "others"
    huge = device is not None and requested >= 0.25 * device
    scattered = unallocated + (0 if huge else free or 0)
    if reserved and unallocated >= 0.05 * reserved and scattered >= requested > 0:
        return "fragmentation"
    if (oom.private_pools_bytes or 0) >= max(requested, 0.25 * (reserved or 0)) > 0:
        return "graphs"
    if huge or (oom.backend == "MPS" and device is None and requested):
        return "huge"
    return "full"


def _limited(oom: OutOfMemory) -> bool:
    """Whether the limit refused what the device would have given."""
    room = (oom.allowed_bytes or 0) - (oom.reserved_bytes or oom.allocated_bytes or 0)
    requested = oom.requested_bytes or 0
    return room < requested or (oom.free_bytes or 0) >= requested


def _others_bytes(oom: OutOfMemory) -> int:
    """What other processes hold, at least."""
    if oom.other_processes_bytes is not None:
        return oom.other_processes_bytes
    return max(0, (oom.outside_bytes or 0) - _CONTEXT_BYTES)


def _why(oom: OutOfMemory, cause: Cause) -> str:
    requested, device = oom.requested_bytes or 0, oom.total_bytes or oom.allowed_bytes or 0
    match cause:
        case "unknown":
            return "this message has no figures to tell by. If more of it was printed, give all of it."
        case "bug":
            return (
                "no machine has that much. A size overflowed or a length was never set: this is an error in the code "
                "that asked, not a lack of memory. The traceback's last line of your own code names it."
            )
        case "host":
            return (
                "the machine's main memory (RAM) was full, not the GPU's. In a training on a GPU it holds the data, "
                "its workers and the weights while they load; in a training on a CPU it holds everything."
            )
        case "library":
            return (
                f"{oom.library} asked for memory beside PyTorch's own and got none, so there are no figures. Either "
                "this process fills the card, or another one does."
            )
        case "limit":
            return (
                f"this process may use only {gib(oom.allowed_bytes or 0)} of the card: a limit set with "
                "torch.cuda.set_per_process_memory_fraction."
            )
        case "refused":
            return (
                "there was room by these figures, yet the driver refused. They are read after the failure: another "
                "process may have left in between. Or the driver caps a single request or this process."
            )
        case "others":
            named = ", ".join(str(process) for process, _ in oom.other_processes)
            who = f"process {named}" if len(oom.other_processes) == 1 else f"processes {named}" if named else ""
            share = percent(_others_bytes(oom) / device)
            return f"another program is on the same card{f': {who}' if who else ''}. It holds {share} of it."
        case "fragmentation":
            unallocated = oom.reserved_unallocated_bytes or 0
            enough = (
                "" if unallocated >= requested else f" With the {gib(oom.free_bytes or 0)} free it would be enough."
            )
            return (
                f"fragmentation. PyTorch holds {gib(unallocated)} that no tensor uses, but in pieces: no gap is as "
                f"long as the {gib(requested)} asked for.{enough}"
            )
        case "graphs":
            return (
                f"CUDA graphs (torch.compile's reduce-overhead or max-autotune mode) keep "
                f"{gib(oom.private_pools_bytes or 0)} that nothing else can use."
            )
        case "huge":
            share = f", {percent(requested / device)} of it all" if device else ""
            return (
                f"one huge tensor: {gib(requested)}{share}. Usually the logits (examples × tokens × vocabulary) or an "
                "attention mask or scores (tokens × tokens)."
            )
        case "full":
            held = f" with {gib(oom.allocated_bytes)} of tensors" if oom.allocated_bytes else ""
            return f"simply full{held}. No single thing went wrong: the run needs more than there is."


_EVALUATION = ("--eval_batch_size 1", "if it happened in an evaluation; same result")
_MICRO_BATCH = ("--micro_batch_size", "halve; same result with the same --global_batch_size")
_CHUNKED = ("--loss chunked", "never all logits at once; same result")
_CHECKPOINTING = ("--gradient_checkpointing selective", "or full: recomputes activations; same result, slower")
_LENGTH = ("--max_length", "halve; changes the result: examples are cut shorter")
_SAVERS = (
    _CHUNKED,
    _MICRO_BATCH,
    _CHECKPOINTING,
    _EVALUATION,
    ("--mixed_precision bf16", "about halves activations; differs by rounding"),
    ("--optimizer_offload True", "optimizer state to host memory; same result, slower"),
    ("--optimizer adafactor", "hardly any optimizer state; changes the result"),
    ("--dtype bfloat16", "halves weights, gradients and state; changes the result"),
    _LENGTH,
)
_SEGMENTS = (
    "PYTORCH_ALLOC_CONF=expandable_segments:True",
    "before the command; lets gaps join; same result",
)
_LISTERS = {"HIP": "rocm-smi", "XPU": "xpu-smi ps", "NPU": "npu-smi info"}


def _remedies(oom: OutOfMemory, cause: Cause) -> Iterator[tuple[str, str]]:
    """(what to type, what it does), cheapest first."""
    if cause in ("others", "library", "refused"):
        yield _LISTERS.get(oom.backend, "nvidia-smi"), "lists who holds how much; end what you do not need"
    elif cause in ("huge", "full") and 0 < (oom.requested_bytes or 0) <= (oom.free_bytes or 0) + (
        oom.other_processes_bytes or 0
    ):
        for process, size in oom.other_processes:
            yield f"end process {process}", f"it holds {gib(size)} of the same card"
    match cause:
        case "bug":
            yield "python -m pdb -c continue ...", "look at the shapes where it fails"
        case "host":
            yield "--dataloader_num_workers 0", "each worker holds memory of its own; same result"
            yield "--preprocessing_num_workers 1", "tokenises in one process; same result"
            yield "--streaming True --max_steps N", "data stays on disk; shuffles less widely"
            yield from (_CHUNKED, _MICRO_BATCH, _CHECKPOINTING)
        case "library":
            yield "CUDA_LAUNCH_BLOCKING=1", "shows whether an earlier fault, a bad index, is the real one"
            yield from (_MICRO_BATCH, _CHECKPOINTING)
        case "limit":
            yield "raise or remove the limit", "same result; the card has more"
            yield from _SAVERS
        case "refused":
            yield "run it again", "if it fails at the same place, it is no neighbour"
            yield from (_CHUNKED, _MICRO_BATCH, _CHECKPOINTING)
        case "others":
            yield "CUDA_VISIBLE_DEVICES=1", "another card, if there is one"
            yield from (_CHUNKED, _MICRO_BATCH, _CHECKPOINTING)
        case "fragmentation":
            yield _SEGMENTS
            yield from _SAVERS
        case "graphs":
            yield "compile without graphs", 'mode="default"; same result, small kernels start slower'
            yield from _SAVERS
        case "huge":
            yield _CHUNKED
            yield "--attn_implementation sdpa", "not eager: no scores of tokens × tokens; same result"
            yield "--micro_batch_size 1", "one example needs no padding mask; same --global_batch_size, same result"
            yield from (_EVALUATION, _LENGTH)
        case "full" | "unknown":
            yield from _SAVERS
    if oom.backend == "MPS":
        yield "PYTORCH_MPS_HIGH_WATERMARK_RATIO", "raises the limit; last resort: the machine may freeze"


def _recognised(requested: int, shape: tuple[int, int], vocab_size: int | None) -> str | None:
    """What in a run on a micro-batch of ``shape`` (B, S) has the size ``requested``, if something has."""
    examples, tokens = shape
    # Two decimals in the message, and the allocator asks the driver for multiples of 2 MiB.
    tolerance = 2**21 + (0.005 * 2**30 if requested >= 2**30 else 0)
    if requested < 4 * tolerance:
        return None
    positions = f"{examples:,} × {tokens:,}"
    for width, name in ((4, "fp32"), (2, "16-bit")):
        if vocab_size and abs(requested - examples * tokens * vocab_size * width) <= tolerance:
            return f"It has the size of all logits in {name}: {positions} × {vocab_size:,} × {width} bytes."
    for heads in (1, 8, 12, 16, 20, 24, 28, 32, 40, 48, 64):
        for width in (4, 2) if heads > 1 else (4, 2, 1):
            if abs(requested - examples * heads * tokens * tokens * width) <= tolerance:
                what = "an attention mask" if heads == 1 else f"the attention scores of {heads} heads"
                times = f" × {heads}" if heads > 1 else ""
                return f"It has the size of {what}: {positions} × {tokens:,}{times} × {width} bytes."
    return None


# ---- telling ---------------------------------------------------------------------------------------------------------


def explain(message: str, micro_batch_shape: tuple[int, int] | None = None, vocab_size: int | None = None) -> str:
    """A text for the terminal: each figure of ``message`` and its meaning, why memory was full, what to do.

    Args:
        message: an out-of-memory message, alone or within a traceback or log.
        micro_batch_shape: (B, S), if known: what has just the requested size gets its name.

    Raises:
        UsageError: ``message`` is not about memory.
    """
    oom = parse_oom(message)
    if oom is None:
        start = textwrap.shorten(" ".join(message.split()), 60) or "(empty)"
        raise UsageError(
            f"explain: {start!r} is no out-of-memory message. Give the whole message in quotes, from 'out of memory' "
            "or 'allocate memory' on."
        )
    cause = _cause(oom)
    lines = [_headline(oom), *_figures(oom), *_wrapped("Why: ", _reason(oom, cause, micro_batch_shape, vocab_size))]
    lines.append("What to do, cheapest first (flags are those of train/main.py):")
    remedies = list(_remedies(oom, cause))
    column = min(44, max(len(typed) for typed, _ in remedies))
    lines += [line for typed, note in remedies for line in _wrapped(f"  {typed:<{column}}  ", note)]
    return "\n".join(lines)


def post_mortem(message: str, situation: Situation, changes: Sequence[Change]) -> str:
    """What filled the memory of this run: where, with what, and the first three of ``changes``, cheapest first.

    ``message`` may be empty (a MemoryError says nothing): its figures are then left out.
    """
    oom = parse_oom(message)
    lines = [_place(situation), *_kinds(situation.bytes_by_kind)]
    if oom is not None:
        cause = _cause(oom)
        reason = _reason(oom, cause, situation.micro_batch_shape, situation.vocab_size)
        side_bytes = (oom.total_bytes or 0) // 100
        lines += [_headline(oom), *_figures(oom, side_bytes), *_wrapped("Why: ", reason)]
        if cause in ("others", "fragmentation", "graphs", "limit", "library", "refused"):
            typed, note = next(_remedies(oom, cause))
            lines += _wrapped("First: ", f"{typed}  ({note})")
    available = oom.available_bytes if oom else None
    lines += _changes(changes[:3], situation.predicted_peak_bytes, available)
    return "\n".join(lines)


def _headline(oom: OutOfMemory) -> str:
    device = "Apple GPU" if oom.backend == "MPS" else "GPU" if oom.device_index is None else f"GPU {oom.device_index}"
    kind = f" ({oom.backend})" if oom.backend in ("CUDA", "HIP", "XPU", "NPU") else ""
    where = "Main memory (RAM)" if oom.backend == "host" else f"Memory of {device}{kind}"
    if oom.requested_bytes is None:
        return f"{where} was full."
    asked = "an impossible size" if oom.requested_bytes >= _IMPOSSIBLE_BYTES else f"{gib(oom.requested_bytes)} more"
    return f"{where} was full: {asked} did not fit."


def _figures(oom: OutOfMemory, least_bytes: int = 0) -> list[str]:
    """One line for each figure that the message gives; of the side ones only those of ``least_bytes`` and more."""
    others = ", ".join(f"{process} ({gib(size)})" for process, size in oom.other_processes[:3])
    mps = oom.backend == "MPS"
    outside = oom.outside_bytes if oom.process_bytes is None and oom.other_processes_bytes is None else None
    rows = [
        (oom.total_bytes, "the whole card"),
        (oom.allowed_bytes, "allowed: the most that may be used" + ("" if mps else " by this process")),
        (oom.free_bytes, "free"),
        (oom.process_bytes, "this process: PyTorch's reserve, the driver's context, libraries"),
        (oom.allocated_bytes, "in tensors: weights, gradients, optimizer state, activations"),
        (_at_least(oom.private_pools_bytes, least_bytes), "of these kept by CUDA graphs (private pools)"),
        (oom.reserved_unallocated_bytes, "reserved by PyTorch but in no tensor: cache, and gaps between tensors"),
        (oom.reserved_bytes if oom.allocated_bytes is None else None, "reserved by PyTorch: tensors and its cache"),
        (
            _at_least(oom.other_processes_bytes, least_bytes),
            f"other processes: {others}" if others else "other processes, or kept back by the driver",
        ),
        (_at_least(outside, max(1, least_bytes)), "all else: the driver's context (0.3 to 0.7 GiB), other processes"),
    ]
    return [f"{gib(size):>12}  {meaning}" for size, meaning in rows if size is not None]


def _at_least(size_bytes: int | None, least_bytes: int) -> int | None:
    return size_bytes if size_bytes is not None and size_bytes >= least_bytes else None


def _reason(oom: OutOfMemory, cause: Cause, shape: tuple[int, int] | None, vocab_size: int | None) -> str:
    named = _recognised(oom.requested_bytes, shape, vocab_size) if shape and oom.requested_bytes else None
    return _why(oom, cause) + (f" {named}" if named else "")


def _place(situation: Situation) -> str:
    step = "" if situation.step is None else f" of step {situation.step:,}"
    shape = situation.micro_batch_shape
    batch = "" if shape is None else f", micro-batch of {shape[0]:,} × {shape[1]:,} (examples × tokens)"
    return f"Out of memory in {situation.phase}{step}{batch}."


_MEANINGS = {
    "parameters": "the weights",
    "gradients": "one value per weight that is trained",
    "optimizer state": "what the optimizer remembers of each weight",
    "activations": "kept by forward for backward; examples × tokens",
    "logits and loss": "examples × tokens × vocabulary",
    "workspace": "held by an operation while it runs",
}


def _kinds(bytes_by_kind: dict[str, int]) -> list[str]:
    rows = sorted(((size, kind) for kind, size in bytes_by_kind.items() if size > 0), reverse=True)
    whole = sum(size for size, _ in rows)
    lines = [f"What fills it by prediction, {gib(whole)} in all:"] if rows else []
    for position, (size, kind) in enumerate(rows):
        mark = "← most" if position == 0 else ""
        row = f"{gib(size):>12}  {percent(size / whole):>6}  {kind:<15}  {mark:<6}  {_MEANINGS.get(kind, '')}"
        lines.append(row.rstrip())
    return lines


def _changes(changes: Sequence[Change], peak_bytes: int | None, available_bytes: int | None) -> list[str]:
    """Each change with its saving and, where both are known, the new peak against what there is."""
    if not changes:
        return []
    room = peak_bytes is not None and available_bytes is not None
    title = "What to change, cheapest first, and what it saves by prediction"
    if peak_bytes is not None:
        title += f" (peak {gib(peak_bytes)}{'' if available_bytes is None else f', room {gib(available_bytes)}'})"
    lines = [title + ":"]
    for change in changes:
        left = (peak_bytes or 0) - change.saved_bytes
        verdict = "" if not room else "fits; " if left <= (available_bytes or 0) else "not enough alone; "
        lines += _wrapped(f"{'−' + gib(change.saved_bytes):>12}  {change.flags}  ", f"{verdict}{change.note}")
    return lines


def _wrapped(head: str, text: str) -> list[str]:
    """``text`` after ``head`` in lines of at most 100 characters; what follows the first is indented below it."""
    indent = " " * (len(head) if len(head) <= _WIDTH // 2 else 14)
    return textwrap.wrap(
        head + text,
        _WIDTH,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
        drop_whitespace=True,
    )
