"""What operators cost."""

from __future__ import annotations

import importlib.util
import itertools
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.utils.flop_counter import flop_registry

from train.memory import card_kernels as kernels
from train.memory.card_kernels import Costs, attention_kernel
from train.memory.devices import this_device
from train.memory.predict import Target
from train.memory.question import target_of

BATCH, HEADS, QUERIES, KEYS, SIZE, VALUE_SIZE = 2, 8, 6, 10, 16, 24
KERNELS = ("flash", "efficient", "cudnn")


def attention(kernel: str, key_heads: int) -> tuple[Costs, float]:
    """What forward and backward of a kernel cost as counted here, and the operations that torch counts, if it does."""
    q, k, v, out = (
        torch.empty(BATCH, heads, length, size)
        for heads, length, size in (
            (HEADS, QUERIES, SIZE),
            (key_heads, KEYS, SIZE),
            (key_heads, KEYS, VALUE_SIZE),
            (HEADS, QUERIES, VALUE_SIZE),
        )
    )
    costs, theirs = Costs({torch.float32: 1e12}, 1e12), 0.0
    for suffix, tensors, result in (("", (q, k, v), out), ("_backward", (out, q, k, v), (q, k, v))):
        func = getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}_attention{suffix}")
        costs.count(func.default, tensors, {}, result)
        if key_heads == HEADS:
            theirs += flop_registry[func](*tensors, out_val=result)
    return costs, theirs


@pytest.mark.parametrize("kernel", KERNELS)
def test_attention_counts_as_torch_counts_it(kernel: str) -> None:
    costs, theirs = attention(kernel, HEADS)
    assert costs.flops == theirs > 0


@pytest.mark.parametrize("kernel", KERNELS)
def test_heads_that_share_keys_compute_as_much(kernel: str) -> None:
    """Which torch 2.11 cannot count."""
    assert attention(kernel, HEADS // 4)[0].flops == attention(kernel, HEADS)[0].flops


@pytest.mark.parametrize(("has_bf16", "times"), [(True, 0.5 / 0.033 / 2), (False, 1)])
def test_attention_in_fp32_multiplies_three_times_in_tf32_where_the_card_has_it(has_bf16: bool, times: float) -> None:
    """CUTLASS's kernel, with and without TF32 for other products; a T4 has neither TF32 nor bf16."""
    q = torch.empty(1, 1, 512, 4096)
    seconds = list[float]()
    for own in (True, False):
        rates = {torch.float32: 1e9, torch.float16: 2e9} | ({torch.bfloat16: 2e9} if has_bf16 and own else {})
        costs = Costs(rates, 1e18)
        costs.count(torch.ops.aten._scaled_dot_product_efficient_attention.default, (q, q, q), {}, q)
        seconds.append(costs.seconds)
    assert seconds[0] / seconds[1] == pytest.approx(times)


def test_memory_efficient_attention_takes_2_5_times_as_long_as_flash_in_half_precision() -> None:
    q, seconds = torch.empty(1, 1, 512, 4096, dtype=torch.float16), dict[str, float]()
    for kernel in KERNELS:
        costs = Costs({torch.float16: 1e9}, 1e18)
        costs.count(getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}_attention").default, (q, q, q), {}, q)
        seconds[kernel] = costs.seconds
    assert seconds["efficient"] / seconds["flash"] == pytest.approx(2.5)


V100, T4, A100, ORIN, RTX_4090, H100 = (7, 0), (7, 5), (8, 0), (8, 7), (8, 9), (9, 0)
B200, B300, RTX_5090, SPARK, UNKNOWN = (10, 0), (10, 3), (12, 0), (12, 1), (13, 0)
FP16, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
OLDEST, TORCH_2_12, TORCH_2_13, NEWEST = (2, 11), (2, 12), (2, 13), (2, 14)
CUDNN_OF = {OLDEST: 91900, TORCH_2_12: 92000, TORCH_2_13: 92000, NEWEST: 92400}  # of the wheels for CUDA 13
ANY = tuple(CUDNN_OF)
PREFERRING = (H100, B200, B300)


def attended_by(
    dtype: torch.dtype,
    capability: tuple[int, int],
    size: int | tuple[int, int] = 64,
    *,
    key_heads: int = 8,
    mask: Tensor | None = None,
    dropout: float = 0.0,
    lengths: tuple[int, int] = (128, 128),
    needs_grad: bool = True,
    prefers_cudnn: bool | None = None,
    is_causal: bool = False,
) -> str:
    """The kernel for 8 heads of queries of ``size``, or of that of queries and values, of ``lengths``."""
    size, value_size = size if isinstance(size, tuple) else (size, size)
    shapes = ((8, lengths[0], size), (key_heads, lengths[1], size), (key_heads, lengths[1], value_size))
    tensors = [torch.empty(1, *shape, dtype=dtype, device="meta", requires_grad=needs_grad) for shape in shapes]
    prefers = capability in PREFERRING if prefers_cudnn is None else prefers_cudnn
    return attention_kernel(Target("cuda", capability, prefers), tensors, mask, dropout, is_causal)


def a_mask(*shape: int, dtype: torch.dtype = FP16) -> Tensor:
    return torch.empty(shape or (1, 1, 128, 128), dtype=dtype, device="meta")


@pytest.fixture
def in_release(monkeypatch: pytest.MonkeyPatch) -> Callable[[tuple[int, int]], None]:
    def switch(release: tuple[int, int]) -> None:
        monkeypatch.setattr(kernels, "RELEASE", release)
        monkeypatch.setattr(kernels, "CUDNN", CUDNN_OF[release])
        monkeypatch.setattr(kernels, "CUDNN_FIRST", True)

    return switch


Switch = Callable[[tuple[int, int]], None]
SAME_IN_EVERY_RELEASE: list[tuple[str, list[dict[str, Any]]]] = [
    # flash: half precision since Ampere, up to heads of 256, of any size below
    ("flash", [{"dtype": d, "capability": c} for d in (FP16, BF16) for c in (A100, ORIN, RTX_4090, RTX_5090, SPARK)]),
    ("flash", [{"dtype": BF16, "capability": A100, "size": s} for s in (20, 66, 128, 192, 200, 224, 232, 256)]),
    ("flash", [{"dtype": BF16, "capability": A100, "key_heads": k} for k in (1, 2, 8)]),
    ("flash", [{"dtype": BF16, "capability": A100, "dropout": p} for p in (0.1, 0.25)]),
    ("flash", [{"dtype": BF16, "capability": A100, "size": 256, "dropout": 0.1}]),
    # no room for the backward of wide heads in the shared memory of these cards
    ("flash", [{"dtype": BF16, "capability": c, "size": s} for c in (RTX_4090, RTX_5090) for s in (192, 232, 256)]),
    ("efficient", [{"dtype": BF16, "capability": c, "size": s} for c in (ORIN, RTX_4090, SPARK) for s in (200, 224)]),
    ("efficient", [{"dtype": BF16, "capability": RTX_4090, "size": s, "dropout": 0.1} for s in (200, 232, 256)]),
    ("flash", [{"dtype": BF16, "capability": RTX_4090, "size": s, "needs_grad": False} for s in (200, 224)]),
    # what flash has not: wider heads, values of another size, a mask, causal rows and columns of different lengths
    ("efficient", [{"dtype": BF16, "capability": A100, "size": s} for s in (264, 320, (192, 128), (64, 96))]),
    ("efficient", [{"dtype": BF16, "capability": A100, "mask": a_mask(dtype=BF16), "dropout": p} for p in (0.0, 0.1)]),
    ("efficient", [{"dtype": BF16, "capability": A100, "lengths": (64, 128), "is_causal": True}]),
    ("flash", [{"dtype": BF16, "capability": A100, "lengths": (64, 128)}]),
    # memory-efficient: any card, but bf16 from Ampere on; heads by what a load of its matrix products takes
    ("efficient", [{"dtype": d, "capability": c} for d in (FP16, FP32) for c in (V100, T4)]),
    ("efficient", [{"dtype": FP32, "capability": c} for c in (A100, RTX_4090, H100, B200, RTX_5090)]),
    ("efficient", [{"dtype": FP16, "capability": T4, "size": s} for s in (72, 256, 512)]),
    ("efficient", [{"dtype": FP32, "capability": A100, "size": s} for s in (20, 68, 320)]),
    ("efficient", [{"dtype": FP32, "capability": T4, "size": s} for s in (20, 66, 67)]),
    ("efficient", [{"dtype": FP32, "capability": T4, "mask": a_mask(dtype=FP32), "dropout": 0.1}]),
    ("math", [{"dtype": FP16, "capability": T4, "size": s} for s in (20, 66, 68, (64, 68))]),
    ("math", [{"dtype": FP32, "capability": A100, "size": s} for s in (66, 67, (64, 66))]),
    ("math", [{"dtype": BF16, "capability": A100, "size": s, "mask": a_mask(dtype=BF16)} for s in (20, 66)]),
    ("math", [{"dtype": BF16, "capability": c} for c in (V100, T4)]),
    # no kernel at all
    ("math", [{"dtype": FP64, "capability": c} for c in (T4, A100, H100)]),
    ("math", [{"dtype": d, "capability": UNKNOWN} for d in (BF16, FP32)]),
    ("math", [{"dtype": BF16, "capability": A100, "mask": a_mask(1, 1, 128, 1, dtype=BF16).expand(1, 1, 128, 128)}]),
    # cuDNN: half precision, where it is preferred
    ("cudnn", [{"dtype": d, "capability": c} for d in (FP16, BF16) for c in PREFERRING]),
    ("cudnn", [{"dtype": BF16, "capability": H100, "key_heads": k, "size": 128} for k in (1, 2)]),
    ("cudnn", [{"dtype": BF16, "capability": c, "mask": a_mask(dtype=BF16)} for c in PREFERRING]),
    ("cudnn", [{"dtype": BF16, "capability": H100, "lengths": (64, 128), "is_causal": True}]),
    ("cudnn", [{"dtype": BF16, "capability": H100, "dropout": p} for p in (0.0625, 0.125, 0.5)]),
    ("cudnn", [{"dtype": BF16, "capability": c, "size": (192, 128)} for c in PREFERRING]),
    ("flash", [{"dtype": BF16, "capability": c, "prefers_cudnn": False} for c in PREFERRING]),
    ("flash", [{"dtype": BF16, "capability": H100, "size": s} for s in (20, 66, 132)]),
    ("flash", [{"dtype": BF16, "capability": c, "size": s} for c in (B200, B300) for s in (136, 200, 248)]),
    ("flash", [{"dtype": BF16, "capability": H100, "lengths": (1, 1)}]),
    ("flash", [{"dtype": BF16, "capability": H100, "lengths": (1, 128), "dropout": 0.5}]),
    ("cudnn", [{"dtype": BF16, "capability": H100, "lengths": (1, 128)}]),
    ("efficient", [{"dtype": BF16, "capability": H100, "mask": a_mask(dtype=BF16).requires_grad_()}]),  # T5's positions
    ("efficient", [{"dtype": BF16, "capability": H100, "mask": a_mask(1, 128, 128, dtype=BF16)}]),
    ("efficient", [{"dtype": BF16, "capability": H100, "size": s} for s in (264, (64, 264))]),
]


@pytest.mark.parametrize("release", ANY)
def test_the_kernel_of_a_card(release: tuple[int, int], in_release: Switch) -> None:
    """By torch's ``sdp_utils.cpp`` and ``sdp_utils_cpp.h``."""
    in_release(release)
    cases = [(kernel, case) for kernel, group in SAME_IN_EVERY_RELEASE for case in group]
    assert [(attended_by(**case), case) for _, case in cases] == cases


@pytest.mark.parametrize(
    ("kernels_by_release", "case"),
    [
        # sixteenths alone, from 2.12 on: cuDNN would round the others
        ("cudnn flash flash flash", {"dtype": BF16, "capability": H100, "dropout": 0.1}),
        ("cudnn efficient efficient efficient", {"dtype": BF16, "capability": B200, "dropout": 0.1, "mask": a_mask()}),
        # wide heads: on Hopper up to 2.13; from 2.14 on of 256, with cuDNN 9.23
        ("cudnn cudnn cudnn flash", {"dtype": BF16, "capability": H100, "size": 136}),
        ("cudnn cudnn cudnn flash", {"dtype": BF16, "capability": H100, "size": 192}),
        ("cudnn cudnn cudnn cudnn", {"dtype": BF16, "capability": H100, "size": 256}),
        ("cudnn cudnn cudnn cudnn", {"dtype": BF16, "capability": H100, "size": 192, "needs_grad": False}),
        ("cudnn cudnn cudnn efficient", {"dtype": BF16, "capability": H100, "size": 192, "mask": a_mask()}),
        ("flash flash flash cudnn", {"dtype": BF16, "capability": B200, "size": 256}),
        ("flash flash flash cudnn", {"dtype": BF16, "capability": B300, "size": 200, "needs_grad": False}),
        ("cudnn cudnn cudnn efficient", {"dtype": BF16, "capability": H100, "size": (128, 256)}),
        # the memory-efficient kernel shares heads from 2.14 on
        ("math math math efficient", {"dtype": FP16, "capability": T4, "key_heads": 2}),
        ("math math math efficient", {"dtype": FP32, "capability": H100, "key_heads": 1}),
        ("math math math efficient", {"dtype": BF16, "capability": A100, "key_heads": 2, "mask": a_mask()}),
        ("math math math efficient", {"dtype": BF16, "capability": RTX_4090, "key_heads": 2, "size": 224}),
        ("math math math math", {"dtype": BF16, "capability": A100, "key_heads": 2, "size": 66, "mask": a_mask()}),
    ],
)
def test_the_kernel_of_a_card_by_release(kernels_by_release: str, case: dict[str, Any], in_release: Switch) -> None:
    found = []
    for release in ANY:
        in_release(release)
        found.append(attended_by(**case))
    assert found == kernels_by_release.split()


def test_heads_that_cannot_share_keys_are_refused_as_without_a_card() -> None:
    """Each query head takes the keys of one key head: 4 of them cannot share 3, nor 2 share 4."""
    assert [attended_by(BF16, A100, key_heads=heads) for heads in (3, 5, 16)] == ["math"] * 3


def test_what_needs_no_gradient_now_needs_no_backward(in_release: Switch) -> None:
    in_release(TORCH_2_13)
    with torch.no_grad():
        assert attended_by(BF16, RTX_4090, 224) == "flash"


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 3), (12, 0)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_heads_are_repeated_in_a_run_where_the_plan_finds_no_kernel_that_shares_them(
    capability: tuple[int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    from train.extras.long_sequences.attention import _kernels_share_heads

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(kernels, "RELEASE", (2, 13))
    for size, dropout in itertools.product((64, 192, 200, 224, 256, 288), (0.0, 0.1)):
        tensors: Any = [torch.empty(1, h, 8, size, dtype=dtype, device="meta", requires_grad=True) for h in (8, 2, 2)]
        planned = attention_kernel(Target("cuda", capability=capability), tensors, dropout=dropout, is_causal=True)
        query: Any = SimpleNamespace(device=torch.device("cuda"), dtype=dtype, shape=tensors[0].shape)
        assert _kernels_share_heads(query, dropout) is (planned == "flash"), (size, dropout, planned)


def test_heads_of_256_need_a_new_cudnn(in_release: Switch, monkeypatch: pytest.MonkeyPatch) -> None:
    in_release(NEWEST)
    monkeypatch.setattr(kernels, "CUDNN", 92200)
    sizes = (128, (192, 128), 192, 256)
    assert [attended_by(BF16, H100, size) for size in sizes] == ["cudnn", "cudnn", "flash", "flash"]


@pytest.mark.parametrize(
    ("version", "variable", "is_first"),
    [(91500, "", False), (91501, "", True), (91501, "0", True), (92000, "1", False)],
)
def test_cudnn_comes_first_if_it_is_new_enough_and_not_switched_off(
    version: int, variable: str, is_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``TORCH_CUDNN_SDPA_DEPRIORITIZED`` is torch's own; both are read when the module is loaded."""
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: version)
    monkeypatch.setenv("TORCH_CUDNN_SDPA_DEPRIORITIZED", variable)
    spec = importlib.util.spec_from_file_location("kernels_once_more", kernels.__file__)
    assert spec is not None and spec.loader is not None
    anew = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, anew)
    spec.loader.exec_module(anew)
    for name in ("CUDNN", "CUDNN_FIRST"):
        monkeypatch.setattr(kernels, name, getattr(anew, name))
    assert attended_by(BF16, H100) == ("cudnn" if is_first else "flash")


@pytest.mark.gpu
def test_the_kernel_is_the_one_that_torch_chooses_on_this_card() -> None:
    card = target_of(this_device())
    wrong = []
    cases = itertools.product(
        (FP16, BF16, FP32),
        (20, 32, 64, 66, 128, 136, 192, 200, 224, 256, 320),
        (8, 2, 1),
        (0.0, 0.1, 0.125),
        (True, False),
    )
    for dtype, size, key_heads, dropout, needs_grad in cases:
        for mask_dtype in (None, dtype, torch.bool):
            query, key = (
                torch.empty(1, heads, 128, size, dtype=dtype, device="cuda", requires_grad=needs_grad)
                for heads in (8, key_heads)
            )
            mask = None if mask_dtype is None else torch.ones(1, 1, 128, 128, dtype=mask_dtype, device="cuda")
            choice = torch._fused_sdp_choice(query, key, key, mask, dropout, mask is None, enable_gqa=key_heads != 8)
            chosen = SDPBackend(choice).name.lower().removesuffix("_attention")
            planned = attention_kernel(card, (query, key, key), mask, dropout, mask is None)
            if planned != chosen:
                wrong.append((dtype, size, key_heads, dropout, needs_grad, mask_dtype, planned, chosen))
    assert not wrong


@pytest.mark.parametrize("name", ["flash", "cudnn"])
def test_buffers_of_some_heads_at_a_time_are_those_of_their_calls(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows of 1,024 tokens, 8 heads of 64 that share 2 of the keys, in two calls, as the run makes them."""
    monkeypatch.setattr(kernels.by_heads, "BUFFER_BYTES", 2**22)
    query, key = (torch.empty(2, heads, 1024, 64, dtype=BF16, device="meta") for heads in (8, 2))
    func: Any = SimpleNamespace(_schema=SimpleNamespace(name=f"aten::_scaled_dot_product_{name}_attention_backward"))
    elements = 2 * 4 * 1024 * 64  # of the queries of a call
    accumulator, of_keys = [elements // 64 * 4, elements * 4], [elements * 2] * 2  # softmax_d, dq; dk and dv by query
    of_call, sums = [elements * 2] * (3 if name == "flash" else 1) + [elements // 4 * 2] * 2, [elements // 64 * 4]
    found = kernels.temporary_bytes(func, (None, query, key, *[None] * 7, 0.0, True, None, 0.0), None)
    assert found == accumulator + of_keys + of_call + sums
    monkeypatch.setattr(kernels.by_heads, "BUFFER_BYTES", 2**23)
    whole = kernels.temporary_bytes(func, (None, query, key, *[None] * 7, 0.0, True, None, 0.0), None)
    assert whole == [2 * size for size in accumulator + of_keys]


def test_buffers_of_a_backward_by_cudnn_are_those_that_a_card_has_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured, of all heads at once, where they are most of the peak; predicted then without dk and dv of each."""
    monkeypatch.setattr(kernels.by_heads, "BUFFER_BYTES", 2**62)
    length, missing_bytes = 131_072, 4_333_885_952 - 3_862_026_240  # measured and predicted then
    query, key = (torch.empty(1, heads, length, 64, dtype=BF16, device="meta") for heads in (14, 2))
    func: Any = SimpleNamespace(_schema=SimpleNamespace(name="aten::_scaled_dot_product_cudnn_attention_backward"))
    known = kernels.temporary_bytes(func, (None, query, key, *[None] * 10, 0.0), None)
    assert known == [14 * length * 4, 14 * length * 64 * 4, *[14 * length * 64 * 2] * 2]
    assert 0 <= missing_bytes - sum(known[2:]) < 0.001 * 4_333_885_952


@pytest.mark.parametrize(
    ("capability", "mib"), [((7, 5), 8.125), ((8, 9), 8.125), ((9, 0), 32.0), ((10, 0), 8.125), ((12, 0), 8.125)]
)
def test_workspaces_of_cublas_are_large_on_hopper_alone(capability: tuple[int, int], mib: float) -> None:
    """torch asks for compute capability 9.0, not for 9.0 or newer."""
    assert kernels.library_workspace_bytes(capability) == 2 * mib * 2**20
