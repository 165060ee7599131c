"""Losses by the kernels of libraries: the same loss and gradients, each refused where it would be wrong."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import run_for
from test_losses import (
    OBJECTIVES,
    batch,
    by_definition,
    choice,
    error,
    full_sum,
    gradients,
    head_example,
    network,
    step,
    with_loss,
)
from torch import Tensor, nn

from train.config import from_values, parse
from train.extras import check
from train.extras.losses import Extra, fused
from train.extras.losses.chunked import PLAIN, Objective
from train.extras.losses.fused import Place, best_kernel, cce_sum, liger_sum, obstacle_to
from train.extras.losses.in_head import MIN_CHUNKED_CLASSES, LossInHead, choose_loss, describe_loss, place_of
from train.launch import Launch
from train.model import ModelWithLoss
from train.records import IGNORE, UsageError, UserError

CPU = Place("cpu", torch.float32)
H100 = Place("cuda", torch.bfloat16, (9, 0))
TURING = Place("cuda", torch.float16, (7, 5))


class CutCrossEntropy:
    """Stands for the package on a machine without its device: the same signature, all logits."""

    def __init__(self, early: bool = False) -> None:
        self.calls: list[dict[str, Any]] = []

        def latest(
            e: Tensor, c: Tensor, targets: Tensor, bias: Tensor | None = None, ignore_index: int = -100,
            reduction: str = "mean", filter_eps: Any = "auto", accum_c_fp32: bool = False, impl: str = "cce",
        ) -> Tensor:  # fmt: skip
            self.calls.append({"dtypes": (e.dtype, c.dtype), "impl": impl, "bias": bias is not None})
            return F.cross_entropy(F.linear(e, c, bias), targets, ignore_index=ignore_index, reduction=reduction)

        def first(
            e: Tensor, c: Tensor, targets: Tensor, ignore_index: int = -100, reduction: str = "mean",
            filter_eps: Any = "high", impl: str = "cce",
        ) -> Tensor:  # fmt: skip
            raise AssertionError("it sums in half precision")

        self.linear_cross_entropy = first if early else latest


class Liger:
    """Stands for Liger Kernel, gradients included: none is prepared where the input needs none."""

    def __init__(self) -> None:
        self.options: dict[str, Any] = {}

        class Loss(nn.Module):
            def __init__(inner, **options: Any) -> None:  # noqa: N805
                super().__init__()
                self.options = options

            def forward(inner, weight: Tensor, hidden: Tensor, labels: Tensor, bias: Tensor | None) -> Tensor:  # noqa: N805
                if not hidden.requires_grad:
                    weight, bias = weight.detach(), None if bias is None else bias.detach()
                objective = Objective(self.options["label_smoothing"], self.options["lse_square_scale"])
                return by_definition(hidden, weight, bias, labels, objective)

        self.LigerFusedLinearCrossEntropyLoss = Loss


def pretend(monkeypatch: pytest.MonkeyPatch, package: str, content: Any) -> None:
    """``package`` is there, and so is Triton."""
    names = {"cut_cross_entropy": "cut_cross_entropy", "liger_kernel": "liger_kernel.transformers"}
    for name in (package, names[package], "triton"):
        module = ModuleType(name)
        module.__dict__.update(vars(content))
        monkeypatch.setitem(sys.modules, name, module)
    here = fused.find_spec
    monkeypatch.setattr(fused, "find_spec", lambda name: name if name in (package, "triton") else here(name))


@pytest.mark.parametrize("with_bias", [False, True])
def test_cce_is_asked_for_exact_sums_and_its_loss_summed_in_fp32(
    with_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = CutCrossEntropy()
    pretend(monkeypatch, "cut_cross_entropy", package)
    tensors, labels = head_example(with_bias, dtype=torch.float32)
    expected = gradients(full_sum, [None if t is None else t.double() for t in tensors], labels)
    found = gradients(cce_sum, tensors, labels, torch.bfloat16)
    assert max(error(found, expected)) < 0.02
    halves = (torch.bfloat16, torch.bfloat16)
    assert package.calls == [{"dtypes": halves, "impl": "cce_kahan_full_c", "bias": with_bias}]


@pytest.mark.parametrize(("sum_of", "package"), [(cce_sum, "cut_cross_entropy"), (liger_sum, "liger_kernel")])
def test_a_micro_batch_without_targets_reaches_a_kernel_with_its_rows(
    sum_of: Any, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Liger divides by their number: some ranks get such a batch in the last step of an epoch, to stay in step."""
    pretend(monkeypatch, package, CutCrossEntropy() if sum_of is cce_sum else Liger())
    given, rows = list[int](), fused.rows_to_compute
    monkeypatch.setattr(fused, "rows_to_compute", lambda *args: given.append(len((kept := rows(*args))[0])) or kept)
    (hidden, weight, bias), labels = head_example(False, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        sum_of(hidden, weight, bias, torch.full_like(labels, IGNORE), num_targets=0)
    assert given == [labels.numel()]


@pytest.mark.parametrize("objective", [PLAIN, *OBJECTIVES], ids=str)
def test_liger_is_asked_for_the_objective_and_fp32_sums(objective: Objective, monkeypatch: pytest.MonkeyPatch) -> None:
    package = Liger()
    pretend(monkeypatch, "liger_kernel", package)
    tensors, labels = head_example()

    def loss(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor) -> Tensor:
        return liger_sum(hidden, weight, bias, labels, objective=objective)

    def exact(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor) -> Tensor:
        return by_definition(hidden, weight, bias, labels, objective)

    assert max(error(gradients(loss, tensors, labels), gradients(exact, tensors, labels))) < 1e-13
    assert package.options["accum_dtype"] == torch.float32 and package.options["reduction"] == "sum"
    hidden, weight, bias = tensors
    assert hidden is not None and weight is not None
    learned = weight.clone().requires_grad_()
    loss(hidden, learned, bias, labels).backward()  # nothing before the output embedding learns
    assert learned.grad is not None
    torch.testing.assert_close(learned.grad, gradients(exact, tensors, labels)[2])


@pytest.mark.parametrize(
    ("kernel", "place", "objective", "message"),
    [
        ("liger", Place("cuda", torch.bfloat16, (9, 0), is_replicated=True), PLAIN, "tensor parallelism"),
        ("cce", CPU, PLAIN, "only on CUDA devices"),
        ("cce", TURING, PLAIN, "Ampere"),
        ("cce", Place("cuda", torch.float32, (8, 0)), PLAIN, "--mixed_precision bf16"),
        ("cce", H100, Objective(0.0, 1e-4), "z-loss here"),
        ("cce", H100, PLAIN, r"not installed, or too old: pip install '.\[cce\]'"),
        ("liger", CPU, PLAIN, "only on CUDA devices"),
        ("liger", TURING, PLAIN, "before loss scaling"),
        ("liger", H100, PLAIN, r"not installed, or too old: pip install '.\[liger\]'"),
    ],
)
def test_what_a_kernel_cannot_do_is_said_with_what_would_do(
    kernel: str, place: Place, objective: Objective, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=f"^loss: {kernel} .*{message}.*(chunked|auto)"):
        choose_loss(kernel, ModelWithLoss(network("llama")), place, objective)


def test_auto_takes_the_best_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "find_spec", lambda name: None)
    assert best_kernel(H100) == best_kernel(CPU) == "chunked"
    pretend(monkeypatch, "liger_kernel", Liger())
    assert best_kernel(H100) == "liger" and best_kernel(CPU) == best_kernel(TURING) == "chunked"
    pretend(monkeypatch, "cut_cross_entropy", CutCrossEntropy())
    assert best_kernel(H100) == "cce"
    assert best_kernel(H100, Objective(0.1)) == "liger"
    assert best_kernel(Place("cuda", torch.float32, (9, 0))) == "liger"
    assert best_kernel(Place("cuda", torch.bfloat16, (9, 0), is_replicated=True)) == "chunked"
    large = network("llama", vocab_size=MIN_CHUNKED_CLASSES)
    assert choice("auto", large, H100) == choice("cce", large, H100) == "cce"
    pretend(monkeypatch, "cut_cross_entropy", CutCrossEntropy(early=True))
    assert choice("auto", large, H100) == "liger"
    assert "too old" in (obstacle_to("cce", H100) or "")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ("--loss", "cce", "--label_smoothing", "0.1"),
            "loss: cce does not support label_smoothing .* --loss auto or chunked",
        ),
        (("--loss", "cce", "--z_loss", "1e-4"), "loss: cce does not support .* z_loss"),
        (("--label_smoothing", "1.0"), "label_smoothing: 1.0 is not valid: it must be at least 0 and below 1"),
        (("--z_loss", "-1e-4"), "z_loss: -0.0001 is not valid: it must be at least 0"),
    ],
)
def test_flags_that_cannot_work(flags: tuple[str, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse(list(flags))


def test_liger_under_fp16_is_refused_whoever_asks_for_fp16() -> None:
    for launched, asked in (("fp16", None), ("no", "fp16")):
        config = from_values({"model": "x", "loss": "liger", "mixed_precision": asked})
        with pytest.raises(UsageError, match="loss: liger gives wrong gradients with mixed_precision: fp16"):
            check(config, Launch(precision=launched))
    check(from_values({"model": "x", "loss": "liger"}), Launch(precision="bf16"))


def test_a_model_learns_the_same_by_a_package_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "liger_kernel", Liger())
    model = network("llama")
    expected_loss, expected = step(ModelWithLoss(model))
    by_liger = with_loss(model, choice("liger", model, H100))
    loss, found = step(by_liger)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-12, atol=0)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-11, atol=1e-13, msg=name)
    scores = by_liger(*batch(), scored=True)
    torch.testing.assert_close(scores.loss_sums.sum(), expected_loss)
    changed = ModelWithLoss(model)
    Extra().change_loss(run := run_for(from_values({"loss": "chunked"})), changed)
    assert run.outputs.notes == ["loss: chunked, never all logits, in chunks"]
    assert isinstance(changed.loss_in_head, LossInHead) and changed.loss_in_head.kind == "chunked"
    assert describe_loss("chunked", PLAIN, "auto", H100).endswith("in chunks; faster here: pip install '.[liger]'")
    assert describe_loss("chunked", PLAIN, "auto", TURING).endswith("in chunks")
    assert describe_loss("chunked", PLAIN, "chunked", H100).endswith("in chunks")
    smoothed = describe_loss("chunked", Objective(0.1, 1e-4), "auto", CPU)
    assert smoothed.endswith("(auto), never all logits, in chunks, label_smoothing 0.1, z_loss 0.0001")


@pytest.mark.parametrize("asked", [{"label_smoothing": 0.1}, {"z_loss": 1e-4}])
def test_terms_that_the_loss_of_another_extra_would_ignore_are_refused(asked: dict[str, float]) -> None:
    model = ModelWithLoss(network("llama"))
    model.loss_in_head = lambda *arguments: None
    with pytest.raises(UserError, match="label_smoothing and z_loss are for cross-entropy; this run has another loss"):
        Extra().change_loss(run_for(from_values(asked)), model)
    Extra().change_loss(run := run_for(from_values({})), model)
    assert run.outputs.notes == ["loss: the task's or an extra's"]


def test_the_place_is_that_of_the_products() -> None:
    model, device = network("llama", torch.bfloat16), torch.device("cpu")
    assert place_of(model, device, "no") == Place("cpu", torch.bfloat16)
    assert place_of(model, device, "fp16", True) == Place("cpu", torch.float16, is_replicated=True)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["chunked", "cce", "liger"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_kernels_on_a_card_are_as_good_as_all_logits(kernel: str, dtype: torch.dtype) -> None:
    place = Place("cuda", dtype, torch.cuda.get_device_capability())
    if obstacle := obstacle_to(kernel, place):
        pytest.skip(obstacle)
    torch.manual_seed(0)
    hidden, weight = torch.randn(2048, 256, device="cuda"), torch.randn(8000, 256, device="cuda") / 16
    labels = torch.randint(8000, (2048,), device="cuda")
    labels[:500] = IGNORE

    def found(loss: Any, dtype: torch.dtype, half: torch.dtype | None, scale: float = 2.0**10) -> list[Tensor]:
        leaves = [t.to(dtype).clone().requires_grad_() for t in (hidden, weight)]
        with torch.autocast("cuda", half or torch.bfloat16, enabled=half is not None):
            value = loss(*leaves, None, labels)
        (value * scale / 1548).backward()
        return [
            value.detach().double(),
            *(leaf.grad.double() * 1548 / scale for leaf in leaves if leaf.grad is not None),
        ]

    from train.extras.losses.chunked import chunked_sum

    sums = {"chunked": chunked_sum, "cce": cce_sum, "liger": liger_sum}
    exact = found(full_sum, torch.float64, None)
    usual, own = (
        error(found(full_sum, torch.float32, dtype), exact),
        error(found(sums[kernel], torch.float32, dtype), exact),
    )
    # cce leaves out blocks of the hidden states' gradient below a 32nd of the type's precision
    assert all(one < 2 * other + 2e-3 for one, other in zip(own, usual, strict=True)), (own, usual)


def test_a_prediction_can_put_its_own_in_place_of_a_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """As train/memory/card_kernels.py does: packages do not run on fake tensors."""
    for name, sum_of in (("cut_cross_entropy", cce_sum), ("liger_cross_entropy", liger_sum)):
        monkeypatch.setattr(fused, name, lambda hidden, *rest, **how: hidden.sum() * 7)
        found = sum_of(torch.ones(3, 2), torch.ones(5, 2), None, labels=torch.zeros(3, dtype=torch.long))
        assert found == 42
