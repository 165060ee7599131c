"""Out-of-memory messages: every wording is read, the cause follows from the figures, the text says what to type."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from train.config import parse
from train.extras.host_memory import is_out_of_memory
from train.extras.oom import OutOfMemory, parse_oom
from train.memory import explain as explaining
from train.memory.explain import Situation, explain, post_mortem
from train.records import UsageError

MIB, GIB = 2**20, 2**30

SIMPLY_FULL = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 10.76 GiB "
    "of which 5.56 MiB is free. Of the allocated memory 9.71 GiB is allocated by PyTorch, and 112.64 MiB is reserved "
    "by PyTorch but unallocated."
)
UNDER_WSL = (  # where 2^64 bytes stand for a size that Windows does not tell
    "CUDA out of memory. Tried to allocate 3.74 GiB. GPU 0 has a total capacity of 4.00 GiB of which 0 bytes is free. "
    "Including non-PyTorch memory, this process has 17179869184.00 GiB memory in use. Process 74390 has "
    "17179869184.00 GiB memory in use. Of the allocated memory 16.20 GiB is allocated by PyTorch, and 844.14 MiB is "
    "reserved by PyTorch but unallocated."
)
IN_A_CONTAINER = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 GiB "
    "of which 1.56 GiB is free. Process 12345 has 77.5 GiB memory in use. Of the allocated memory 70 GiB is allocated "
    "by PyTorch, with 12 MiB allocated in private pools (e.g., CUDA Graphs), and 5 GiB is reserved by PyTorch but "
    "unallocated. If reserved but unallocated memory is large try setting PYTORCH_ALLOC_CONF=expandable_segments:True "
    "to avoid fragmentation.  See documentation for Memory Management  "
    "(https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)"
)
WITH_A_NEIGHBOUR = (
    "CUDA out of memory. Tried to allocate 18.56 GiB. GPU 0 has a total capacity of 47.37 GiB of which 17.60 GiB is "
    "free. Process 3606394 has 2.27 GiB memory in use. Including non-PyTorch memory, this process has 27.45 GiB memory "
    "in use. Of the allocated memory 25.54 GiB is allocated by PyTorch, and 1.52 GiB is reserved by PyTorch but "
    "unallocated."
)
BESIDE_TWO_OTHERS = (
    "CUDA out of memory. Tried to allocate 1.00 GiB. GPU 3 has a total capacity of 23.69 GiB of which 0 bytes is free. "
    "Process 101 has 9.00 GiB memory in use. Process 102 has 10.50 GiB memory in use. Including non-PyTorch memory, "
    "this process has 4.19 GiB memory in use. Of the allocated memory 3.50 GiB is allocated by PyTorch, and 200.00 MiB "
    "is reserved by PyTorch but unallocated."
)
HUGE = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 55.57 GiB. GPU 0 has a total capacity of 12.00 "
    "GiB of which 9.02 GiB is free. Of the allocated memory 984.52 MiB is allocated by PyTorch, and 463.48 MiB is "
    "reserved by PyTorch but unallocated."
)
UNDER_A_LIMIT = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 MiB. GPU 0 has a total capacity of 255.98 GiB "
    "of which 244.65 GiB is free. 1.05 GiB allowed; Of the allocated memory 1017.01 MiB is allocated by PyTorch, with "
    "17.00 MiB allocated in private pools (e.g., CUDA Graphs), and 54.99 MiB is reserved by PyTorch but unallocated."
)
XPU = (
    "torch.OutOfMemoryError: XPU out of memory. Tried to allocate 4.66 GiB. GPU 0 has a total capacity of 5.65 GiB of "
    "which 5.65 GiB is free. Of the allocated memory 195.50 KiB is allocated by PyTorch, and 1.81 MiB is reserved by "
    "PyTorch but unallocated. Please use `empty_cache` to release all unoccupied cached memory."
)
MPS = (
    "RuntimeError: MPS backend out of memory (MPS allocated: 8.51 GiB, other allocations: 172.98 MiB, max allowed: "
    "9.07 GiB). Tried to allocate 512.00 MiB on private pool. Use PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0 to disable "
    "upper limit for memory allocations (may cause system failure)."
)
CPU_LINUX = (
    "RuntimeError: [enforce fail at alloc_cpu.cpp:75] err == 0. DefaultCPUAllocator: can't allocate memory: you tried "
    "to allocate 8589934592 bytes. Error code 12 (Cannot allocate memory)"
)
CPU_WINDOWS = (
    r"RuntimeError: [enforce fail at ..\c10\core\impl\alloc_cpu.cpp:72] data. DefaultCPUAllocator: not enough memory: "
    "you tried to allocate 26214400 bytes."
)

WORDINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "no word of any process": (
        SIMPLY_FULL,
        {
            "on_host": False,
            "device_index": 0,
            "requested_bytes": 20 * MIB,
            "total_bytes": 10.76 * GIB,
            "allocated_bytes": 9.71 * GIB,
            "free_bytes": 5.56 * MIB,
            "reserved_bytes": 9.82 * GIB,
            "reserved_unallocated_bytes": 0.11 * GIB,
            "process_bytes": 0,
            "other_processes_bytes": 0,
        },
    ),
    "this process under another id": (
        IN_A_CONTAINER,
        {
            "requested_bytes": 2 * GIB,
            "total_bytes": 79.15 * GIB,
            "free_bytes": 1.56 * GIB,
            "process_bytes": 77.5 * GIB,
            "allocated_bytes": 70 * GIB,
            "reserved_unallocated_bytes": 5 * GIB,
            "reserved_bytes": 75 * GIB,
            "other_processes": (),
            "other_processes_bytes": 0.09 * GIB,
        },
    ),
    "this process and another": (
        WITH_A_NEIGHBOUR,
        {
            "process_bytes": 27.45 * GIB,
            "other_processes": ((3606394, round(2.27 * GIB)),),
            "other_processes_bytes": 2.27 * GIB,
            "reserved_bytes": 27.06 * GIB,
        },
    ),
    "several others": (
        BESIDE_TWO_OTHERS,
        {
            "device_index": 3,
            "free_bytes": 0,
            "process_bytes": 4.19 * GIB,
            "other_processes": ((101, 9 * GIB), (102, round(10.5 * GIB))),
            "other_processes_bytes": 19.5 * GIB,
        },
    ),
    "a real neighbour and no word of this process": (
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 24.00 GiB of which 0.50 GiB is "
        "free. Process 7 has 16.00 GiB memory in use. Of the allocated memory 6.00 GiB is allocated by PyTorch, and "
        "0.50 GiB is reserved by PyTorch but unallocated.",
        {"process_bytes": 0, "other_processes": ((7, 16 * GIB),), "other_processes_bytes": 16 * GIB},
    ),
    "more than there is": (
        HUGE,
        {"requested_bytes": 55.57 * GIB, "total_bytes": 12 * GIB, "allocated_bytes": 984.52 * MIB},
    ),
    "under a limit": (
        UNDER_A_LIMIT,
        {"on_host": False, "free_bytes": 244.65 * GIB, "limit_bytes": 1.05 * GIB},
    ),
    "another allocator": (
        XPU,
        {"on_host": False, "requested_bytes": round(4.66 * GIB), "total_bytes": 5.65 * GIB},
    ),
    "another allocator, several sizes": (MPS, {"on_host": False, "requested_bytes": 512 * MIB}),
    "CPU on Linux": (CPU_LINUX, {"on_host": True, "requested_bytes": 8 * GIB, "total_bytes": 0}),
    "CPU on Windows": (CPU_WINDOWS, {"on_host": True, "requested_bytes": 25 * MIB}),
    "NumPy": (
        "numpy._core._exceptions._ArrayMemoryError: Unable to allocate 14.9 GiB for an array with shape (2000000000,) "
        "and data type float64",
        {"on_host": True, "requested_bytes": 14.9 * GIB},
    ),
    "Linux kernel": (
        "Out of memory: Killed process 4242 (python) total-vm:70000000kB, anon-rss:62000000kB",
        {"on_host": True, "requested_bytes": 0},
    ),
    "driver": (
        "RuntimeError: CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other "
        "API call, so the stacktrace below might be incorrect.",
        {"on_host": False, "requested_bytes": 0, "total_bytes": 0},
    ),
    "cuBLAS": (
        "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        {"requested_bytes": 0},
    ),
    "cuBLAS that cannot begin": (
        "RuntimeError: CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
        {"on_host": False, "requested_bytes": 0},
    ),
    "cuDNN": (
        "RuntimeError: cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
        {"on_host": False, "requested_bytes": 0},
    ),
    "NCCL": (
        "include/alloc.h:178 NCCL WARN Cuda failure 'out of memory'\n"
        "include/alloc.h:185 NCCL WARN Failed to CUDA calloc 6291456 bytes",
        {"requested_bytes": 6 * MIB},
    ),
    "bitsandbytes": (
        "Error out of memory at line 351 in file /mmfs1/bitsandbytes/csrc/pythonInterface.c",
        {"on_host": False, "requested_bytes": 0},
    ),
    "MPS, one buffer": ("RuntimeError: Invalid buffer size: 24.00 GiB", {"requested_bytes": 24 * GIB}),
    "cudaMallocAsync": (
        "Allocation on device 0 would exceed allowed memory. (out of memory)\nCurrently allocated : 10.62 GiB\n"
        "Requested : 128.00 MiB\nDevice limit : 12.00 GiB\nFree (according to CUDA): 0 bytes",
        {"on_host": False, "requested_bytes": 128 * MIB},
    ),
    "Windows": (
        "OSError: [WinError 1455] The paging file is too small for this operation to complete.",
        {"on_host": True},
    ),
    "Slurm": ("srun: error: node7: task 0: Out Of Memory", {"on_host": True}),
    "Kubernetes": ("State: Terminated\nReason: OOMKilled\nExit Code: 137", {"on_host": True}),
    "cut short": ("torch.OutOfMemoryError: CUDA out of memory.", {"on_host": False, "requested_bytes": 0}),
    "Triton": ("RuntimeError: Triton Error [CUDA]: out of memory", {"on_host": False}),
    "overflow": ("CUDA out of memory. Tried to allocate more than 1EB memory.", {"requested_bytes": 2**60}),
}


def assert_figures(found: OutOfMemory | None, expected: dict[str, Any]) -> None:
    assert found is not None
    for name, value in expected.items():
        figure = getattr(found, name)
        if isinstance(value, int | float):
            assert math.isclose(figure, value, rel_tol=1e-6, abs_tol=0.001 * GIB if value > GIB // 20 else 1), name
        else:
            assert figure == value, name


@pytest.mark.parametrize("wording", WORDINGS)
def test_every_wording_is_read(wording: str) -> None:
    message, expected = WORDINGS[wording]
    assert_figures(parse_oom(message), expected)


@pytest.mark.parametrize("wording", WORDINGS)
def test_every_wording_is_read_in_a_broken_coloured_log_too(wording: str) -> None:
    message, expected = WORDINGS[wording]
    words = message.split()
    lines = [" ".join(words[i : i + 7]) for i in range(0, len(words), 7)]
    logged = [f"\x1b[31m[rank0]: {line}\x1b[0m" for line in lines]
    text = "Traceback (most recent call last):\n" + "\n".join(logged) + "\n[rank0]: Exit 1 after 3.5 GiB of logs\n"
    assert_figures(parse_oom(text), expected)


@pytest.mark.parametrize("message", [SIMPLY_FULL, IN_A_CONTAINER, UNDER_A_LIMIT, MPS, CPU_LINUX])
def test_a_terminal_that_breaks_words_and_numbers_loses_nothing(message: str) -> None:
    broken = "\n".join(message[i : i + 23] for i in range(0, len(message), 23))
    assert parse_oom(broken) == parse_oom(message)


def test_a_message_with_figures_is_preferred_to_one_without() -> None:
    assert parse_oom(f"CUDA out of memory. Skipped.\n{SIMPLY_FULL}") == parse_oom(SIMPLY_FULL)


def test_messages_of_several_ranks_are_not_mixed() -> None:
    first = parse_oom(f"{SIMPLY_FULL}\n{BESIDE_TWO_OTHERS}")
    assert first == parse_oom(SIMPLY_FULL)


@pytest.mark.parametrize(
    "message",
    [
        "",
        "RuntimeError: mat1 and mat2 shapes cannot be multiplied (4x8 and 16x2)",
        "grpc: RESOURCE_EXHAUSTED: Received message larger than max (9000000 vs. 4194304)",
        "google.api_core.exceptions.ResourceExhausted: 429 RESOURCE_EXHAUSTED: quota exceeded",
        "RuntimeError: unable to open shared memory object </torch_1_2> in read-write mode: Too many open files (24)",
        "OSError: [Errno 28] No space left on device: '/home/me/runs/model.safetensors'",
        "the job was killed by its owner",
        "Process finished with exit code 1, loss 3.137",
        "RuntimeError: CUDA error: device-side assert triggered",
        "RuntimeError: cuDNN error: CUDNN_STATUS_NOT_INITIALIZED",
        "ValueError: max_length is large: lower it to avoid running out of memory",
        "RuntimeError: lower max_length to prevent CUDA out of memory errors",
        "Unable to shutdown process 4711 via Signals.SIGTERM, forcefully exiting via Signals.SIGKILL",
        "Model loading took 45.11 GiB memory and 354.95 seconds; 1.2 GiB free",
    ],
)
def test_other_messages_are_refused(message: str) -> None:
    assert parse_oom(message) is None
    assert not is_out_of_memory(RuntimeError(message))
    with pytest.raises(UsageError, match="not an out-of-memory message"):
        explain(message)


def why(text: str) -> str:
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("Why: "))
    more = itertools.takewhile(lambda line: line.startswith(" "), lines[start + 1 :])
    return " ".join(line.strip() for line in (lines[start], *more))


def first_remedy(text: str) -> str:
    lines = text.splitlines()
    return lines[next(i for i, line in enumerate(lines) if line.startswith("What to do")) + 1].strip()


def occupied(requested: str, free: float, allocated: float, unallocated: float) -> str:
    """A message of a card of 24 GiB with no other process on it; sizes in GiB."""
    return (
        f"CUDA out of memory. Tried to allocate {requested}. GPU 0 has a total capacity of 24.00 GiB of which {free} "
        f"GiB is free. Including non-PyTorch memory, this process has {24 - free} GiB memory in use. Of the allocated "
        f"memory {allocated} GiB is allocated by PyTorch, and {unallocated} GiB is reserved by PyTorch but unallocated."
    )


@pytest.mark.parametrize(
    ("message", "reason", "remedy"),
    [
        (BESIDE_TWO_OTHERS, "another program is on the same card. It holds 82.3% of it", "nvidia-smi"),
        (SIMPLY_FULL.replace("9.71 GiB", "79.11 MiB"), "another program", "nvidia-smi"),
        (IN_A_CONTAINER, "5.00 GiB that no tensor uses", "PYTORCH_ALLOC_CONF=expandable_segments:True"),
        (occupied("2.00 GiB", 0.5, 18.0, 5.0), "fragmentation", "PYTORCH_ALLOC_CONF=expandable_segments:True"),
        (occupied("5.50 GiB", 0.8, 18.0, 5.0), "With the 0.80 GiB free it would be enough", "PYTORCH_ALLOC_CONF"),
        (occupied("2.00 GiB", 0.5, 22.0, 1.0), "simply full", "--loss chunked"),
        (occupied("100.00 MiB", 0.05, 23.0, 0.2), "simply full", "--loss chunked"),
        (occupied("8.00 GiB", 7.0, 16.0, 0.5), "one huge tensor: 8.00 GiB, 33.3%", "--loss chunked"),
        (SIMPLY_FULL, "simply full", "--loss chunked"),
        (HUGE, "one huge tensor: 55.57 GiB", "--loss chunked"),
        (UNDER_A_LIMIT, "the driver refused", "nvidia-smi"),
        (occupied("1.00 GiB", 1.5, 20.0, 0.1), "the driver refused", "nvidia-smi"),
        (MPS, "simply full", "--loss chunked"),
        (UNDER_WSL, "PyTorch holds 17.02 GiB, more than the card has", "--loss chunked"),
        ("NCCL WARN Error: failed to extend /dev/shm/nccl-a to 5967876 bytes", "processes", "--dataloader_num_workers"),
        (CPU_LINUX, "main memory (RAM) was full, not the GPU's", "--dataloader_num_workers 0"),
        (WORDINGS["cuBLAS"][0], "outside of PyTorch's allocator", "nvidia-smi"),
        (WORDINGS["driver"][0], "no figures", "nvidia-smi"),
        (WORDINGS["cut short"][0], "no figures to tell by", "nvidia-smi"),
    ],
)
def test_the_cause_follows_from_the_figures(message: str, reason: str, remedy: str) -> None:
    text = explain(message)
    assert reason in why(text)
    assert first_remedy(text).startswith(remedy)


@pytest.mark.parametrize("message", [*(m for m, _ in WORDINGS.values()), "Killed", "Bus error"])
def test_texts_are_narrow(message: str) -> None:
    text = explain(message)
    assert max(map(len, text.splitlines())) <= 100
    assert "None" not in text


def test_every_flag_exists() -> None:
    messages = [*(message for message, _ in WORDINGS.values()), "Killed", "Bus error"]
    texts = "\n".join(map(explain, messages))
    typed = {line.strip().split("  ")[0] for line in texts.splitlines() if line.startswith("  --")}
    assert len(typed) > 10
    words = [word for flags in typed for word in (flags if " " in flags else f"{flags} 2").split()]
    flags = dict(zip(words[::2], (value.replace("N", "3") for value in words[1::2]), strict=True))
    for name, value in flags.items():  # raises on a flag or a value that does not exist
        parse(["--dataset", "stdlib", "--model", "x", name, value])


def test_each_figure_has_its_meaning() -> None:
    lines = [" ".join(line.split()) for line in explain(BESIDE_TWO_OTHERS).splitlines()]
    assert lines[0] == "Memory of GPU 3 was full: 1.00 GiB more did not fit."
    assert "23.69 GiB the whole card" in lines
    assert "0.0 MiB free" in lines
    assert "4.19 GiB this process: PyTorch's reserve, the driver's context, libraries" in lines
    assert "3.50 GiB in tensors: weights, gradients, optimizer state, activations" in lines
    assert "0.20 GiB reserved by PyTorch but in no tensor: cache, and gaps between tensors" in lines
    assert "19.50 GiB other processes: 101 (9.00 GiB), 102 (10.50 GiB)" in lines


def test_what_changes_the_result_is_said() -> None:
    lines = {line.strip().split()[0]: line for line in explain(SIMPLY_FULL).splitlines() if line.startswith("  --")}
    assert "changes the result" in lines["--max_length"]
    assert "changes the result" in lines["--optimizer"]
    assert "same result with the same --global_batch_size" in lines["--micro_batch_size"]
    assert next(iter(lines)) == "--loss"
    assert list(lines)[-1] == "--max_length"


KINDS = {
    "parameters": 1 * GIB,
    "gradients": 1 * GIB,
    "optimizer state": 2 * GIB,
    "activations": 5 * GIB,
    "logits and loss": 10 * GIB,
    "workspace": 1 * GIB,
}
CHANGES = [
    ("--loss chunked", 9 * GIB, "same result"),
    ("--micro_batch_size 2 --global_batch_size 32", 8 * GIB, "same result"),
    ("--gradient_checkpointing selective", 1 * GIB, "same result, slower"),
    ("--max_length 8192", 8 * GIB, "changes the result"),
]
SITUATION = Situation("backward", (4, 16384), KINDS, 20 * GIB, CHANGES)


def test_post_mortem_says_where_what_and_what_to_type() -> None:
    card = (
        "CUDA out of memory. Tried to allocate 9.77 GiB. GPU 0 has a total capacity of 16.00 GiB of which 5.00 GiB is "
        "free. Including non-PyTorch memory, this process has 11.00 GiB memory in use. Of the allocated memory 9.00 "
        "GiB is allocated by PyTorch, and 1.00 GiB is reserved by PyTorch but unallocated."
    )
    lines = [" ".join(line.split()) for line in post_mortem(card, SITUATION).splitlines()]
    assert lines[0] == "Out of memory in backward, micro-batch of 4 × 16,384 (examples × tokens)."
    assert lines[2] == "10.00 GiB 50.0% logits and loss"
    assert lines[3] == "5.00 GiB 25.0% activations"
    # PyTorch can have the 10 GiB that it holds and the 5 GiB that are free.
    assert "peak 20.00 GiB, room 15.00 GiB" in lines[-4]
    assert lines[-3:] == [
        "−9.00 GiB --loss chunked fits; same result",
        "−8.00 GiB --micro_batch_size 2 --global_batch_size 32 fits; same result",
        "−1.00 GiB --gradient_checkpointing selective not enough alone; same result, slower",
    ]


@pytest.mark.parametrize(
    ("message", "available_bytes"),
    [
        (SIMPLY_FULL, 9.82 * GIB + 5.56 * MIB),
        (CPU_LINUX, 0),
    ],
)
def test_room_is_what_pytorch_could_have_as_things_were(message: str, available_bytes: float) -> None:
    found = parse_oom(message)
    assert found is not None
    assert found.available_bytes == pytest.approx(available_bytes, abs=2)


def test_a_figure_of_nothing_is_not_shown_as_a_culprit() -> None:
    assert "other processes" not in explain(SIMPLY_FULL)
    assert "other processes" in explain(BESIDE_TWO_OTHERS)


@pytest.mark.parametrize("wording", WORDINGS)
def test_post_mortem_is_compact(wording: str) -> None:
    lines = post_mortem(WORDINGS[wording][0], SITUATION).splitlines()
    assert len(lines) <= 26
    assert max(map(len, lines)) <= 100


def test_post_mortem_puts_first_what_needs_no_other_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # as a run does by itself
    assert "\nFirst: " not in post_mortem(IN_A_CONTAINER, SITUATION)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:False")
    assert "\nFirst: PYTORCH_ALLOC_CONF=expandable_segments:True" in post_mortem(IN_A_CONTAINER, SITUATION)
    assert "\nFirst: nvidia-smi" in post_mortem(BESIDE_TWO_OTHERS, SITUATION)
    assert "\nFirst: " not in post_mortem(SIMPLY_FULL, SITUATION)


def test_a_model_that_fills_the_card_by_itself_is_not_told_to_change_its_loss() -> None:
    """Neither by the message of a run, nor by a traceback from where weights are moved or moments are made."""
    card = (
        "CUDA out of memory. Tried to allocate 64.00 MiB. GPU 0 has a total capacity of 8.00 GiB of which 30.00 MiB is "
        "free. Including non-PyTorch memory, this process has 7.90 GiB memory in use. Of the allocated memory 7.40 "
        "GiB is allocated by PyTorch, and 10.00 MiB is reserved by PyTorch but unallocated."
    )
    kinds = {"parameters": 6 * GIB, "gradients": 6 * GIB, "optimizer state": 12 * GIB, "activations": 5 * GIB}
    changes = [*CHANGES, ("--optimizer_offload True", 12 * GIB, "same result, slower")]
    text = post_mortem(card, Situation("loading", None, kinds, 29 * GIB, changes))
    assert "fill the card before any example is there" in " ".join(text.split())
    assert "First: --dtype bfloat16" in text and "--optimizer_offload True" in text
    assert "--loss" not in text and "--micro_batch_size" not in text
    measured = post_mortem(card, Situation("backward", (1, 8), {"parameters": GIB}, None, CHANGES))
    assert "First: " not in measured and "What fills it as measured, 1.00 GiB in all" in measured
    for function in ("convert", "_init_group"):
        trace = f'  File "torch/nn/modules/module.py", line 1369, in {function}\n    return t.to(\n{card}'
        typed = explain(trace).partition("What to do")[2]
        assert typed.index("--dtype bfloat16") < typed.index("--adapter qlora")
        assert "--loss" not in typed
    assert "--loss chunked" in explain(f"  in forward\n{card}")


def test_post_mortem_does_with_what_is_known() -> None:
    bare = Situation("loading", None, {}, None)
    assert post_mortem("", bare) == "Out of memory in loading."
    assert post_mortem("", replace(bare, phase="")) == "Out of memory outside a step."
    assert post_mortem("", replace(bare, phase=None)) == "Out of memory."  # nothing was measured
    text = post_mortem("", replace(bare, changes=CHANGES[:1]))
    assert text.splitlines()[-1].split() == ["−9.00", "GiB", "--loss", "chunked", "same", "result"]
    assert "fits" not in text


def test_errors_that_mean_full_memory() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."))
    assert is_out_of_memory(torch.cuda.OutOfMemoryError(""))
    assert is_out_of_memory(MemoryError())
    of_libraries = (message for wording, (message, _) in WORDINGS.items() if wording.startswith(("cu", "driver")))
    for message in (CPU_LINUX, CPU_WINDOWS, MPS, SIMPLY_FULL, *of_libraries):
        assert is_out_of_memory(RuntimeError(message))
    assert not is_out_of_memory(ValueError(SIMPLY_FULL))
    assert not is_out_of_memory(KeyboardInterrupt())


def test_torchs_own_error_on_a_cpu_is_recognised() -> None:
    with pytest.raises(RuntimeError) as raised:
        torch.empty(2**50, dtype=torch.float64)
    assert is_out_of_memory(raised.value)
    found = parse_oom(str(raised.value))
    assert found is not None
    assert (found.on_host, found.requested_bytes) == (True, 2**53)


def remedies(text: str) -> list[str]:
    return [line.strip().split("  ")[0] for line in text.partition("What to do")[2].splitlines()[1:] if line[2] != " "]


@pytest.mark.parametrize(
    "message",
    [
        "RuntimeError: DataLoader worker (pid 1234) is killed by signal: Killed.",
        "RuntimeError: DataLoader worker (pid(s) 12, 34) is killed by signal: Killed. ",
        "worker process exited with exit code 137",
        "[launch.py:322:sigkill_handler] ['/usr/bin/python', 'train.py'] exits with return code = -9",
        "Command failed with return code 137",
        "Command terminated with exit status 137",
        "subprocess.CalledProcessError: Command '[python]' returned non-zero exit status 137.",
        "subprocess.CalledProcessError: Command '['python']' died with <Signals.SIGKILL: 9>.",
        "  exitcode  : -9 (pid: 4711)",
        "Signal 9 (SIGKILL) received by PID 4711",
        "137",
        "$ echo $?\n137\n",
        "Killed",
        "step 12 of 300, loss 3.2\nKilled\n",
        "./run.sh: line 3: 4711 Killed                  accelerate launch train/main.py",
        "[1]+  Killed                  python train/main.py",
        "zsh: killed     python train/main.py",
        "step 3/10  loss 2.31\nKilled\n",
        "train.sh: line 3:  4242 Killed                  python train/main.py --config recipe.yaml",
        "[1]    4242 killed     python train/main.py",
    ],
)
def test_a_process_that_was_killed_is_probably_a_lack_of_main_memory(message: str) -> None:
    text = explain(message)
    assert text.startswith("The system killed a process (signal 9, which shells report as exit status 137).")
    assert "nearly always because main memory (RAM) ran out, not the GPU's" in why(text)
    assert "dmesg then says 'Killed process'" in why(text)
    typed = remedies(text)
    assert typed[0] == "--dataloader_num_workers 0" and "--loss chunked" in typed


@pytest.mark.parametrize(
    "message",
    [
        "RuntimeError: DataLoader worker (pid(s) 12, 34) is killed by signal: Bus error. It is possible that "
        "dataloader's workers are out of shared memory. Please try to raise your shared memory limit.",
        "ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient shared memory (shm).",
        "Bus error (core dumped)",
        "RuntimeError: unable to write to file </torch_4711_1234_0>: No space left on device (28)",
        "RuntimeError: unable to open shared memory object </torch_4711_1> in read-write mode: No space left on device "
        "(28)",
        "OSError: [Errno 28] No space left on device: '/dev/shm/wave'",
        "NCCL WARN Call to posix_fallocate failed : No space left on device\nNCCL WARN Error while creating shared "
        "memory segment /dev/shm/nccl-x1y2z3 (size 9637888)",
    ],
)
def test_a_full_dev_shm_is_not_taken_for_main_memory(message: str) -> None:
    text = explain(message)
    assert text.startswith("/dev/shm was full: neither the GPU nor, as a rule, main memory.")
    assert "A container has 64 MiB of it" in why(text)
    assert remedies(text) == ["--dataloader_num_workers 0", "docker run --shm-size 8g"]


def test_a_card_that_ran_out_is_explained_although_the_launcher_then_killed_the_other_processes() -> None:
    for message in (SIMPLY_FULL, WORDINGS["driver"][0]):
        assert explain(f"{message}\n  exitcode  : -9 (pid: 4711)\nKilled") == explain(message)
    assert explain(f"MemoryError\n{SIMPLY_FULL}\nBus error") == explain(SIMPLY_FULL)


def test_shards_that_fsdp2_keeps_on_the_host_are_named_where_main_memory_is_full() -> None:
    text = " ".join(explain(CPU_LINUX).split())
    assert "with fsdp2_offload.yaml weights, gradients and optimizer state, which fsdp2.yaml keeps on the GPUs" in text


@pytest.mark.parametrize("text", ["killed", "Killed by the user", "the runs that were killed"])
def test_talk_of_killing_is_not_a_message_about_memory(text: str) -> None:
    assert parse_oom(text) is None


def test_another_card_is_not_the_one_that_is_full() -> None:
    others = (
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total capacity of 23.69 GiB of which 1.00 GiB is "
        "free. Process 77 has 20.00 GiB memory in use. Including non-PyTorch memory, this process has 2.00 GiB memory "
        "in use. Of the allocated memory 1.50 GiB is allocated by PyTorch, and 100.00 MiB is reserved by PyTorch but "
        "unallocated."
    )
    assert "CUDA_VISIBLE_DEVICES=1" not in explain(others) and "another card than this one" in explain(others)


def test_flags_of_extras_that_a_fork_has_left_out_are_not_recommended(monkeypatch: pytest.MonkeyPatch) -> None:
    left = {name: entry for name, entry in explaining.fields().items() if name not in ("optimizer_offload", "loss")}
    message = "CUDA out of memory. Tried to allocate 2.00 GiB."
    assert "--optimizer_offload" in explain(message) and "--loss chunked" in explain(message)
    monkeypatch.setattr(explaining, "fields", lambda: left)
    assert "--optimizer_offload" not in explain(message) and "--loss" not in explain(message)
    assert "--micro_batch_size" in explain(message)


def test_a_limit_of_the_process_is_what_was_full() -> None:
    """The card has room: no other process is to blame, and nothing that nvidia-smi would show."""
    said = explain(UNDER_A_LIMIT.replace("Tried to allocate 2.00 MiB", "Tried to allocate 2.00 GiB"))
    assert "1.05 GiB  what PyTorch may take of it: a limit is set (set_per_process_memory_fraction)" in said
    assert "Why: simply full." in said and "nvidia-smi" not in said
