"""Precision, threads and TF32 of the device at hand."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from accelerate import Accelerator
from support import ROOT

from train.config import Config
from train.extras.device import precision_in_use
from train.extras.hardware import set_up_device, settle_precision
from train.launch import Launch
from train.records import UsageError, num_cores


@pytest.mark.parametrize(
    ("has_bf16", "launched", "changes", "chosen", "said"),
    [
        (True, "no", {}, "bf16", "precision: bf16, because none was asked for (--mixed_precision no"),
        (False, "no", {}, "fp16", "precision: fp16, because none was asked for"),
        (True, "no", {"mixed_precision": "no"}, "no", None),
        (True, "no", {"mixed_precision": "fp16"}, "fp16", None),
        (True, "fp16", {}, "fp16", None),
        (True, "no", {"dtype": "bfloat16"}, "no", None),
        (
            False,
            "no",
            {"optimizer_in_backward": True, "max_grad_norm": None, "gradient_accumulation_steps": 1},
            "no",
            "precision: fp32 (this card would take fp16, but optimizer_in_backward cannot be combined with",
        ),
    ],
)
def test_a_card_computes_in_half_precision_unless_asked_otherwise(
    has_bf16: bool,
    launched: str,
    changes: dict[str, Any],
    chosen: str,
    said: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """bf16 where the card has it, fp16 elsewhere (T4, V100); ``accelerate launch`` says "no" where nobody chose."""
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda including_emulation=True: has_bf16)
    config = Config().changed(model="x", **changes)
    launch, line = settle_precision(Launch(precision=launched), config, torch.device("cuda", 0))
    assert launch.precision == chosen
    assert line is None if said is None else line is not None and line.startswith(said)


@pytest.mark.parametrize(
    ("file", "engine", "chosen"),
    [
        ("single_gpu", "ddp", "fp16"),
        ("ddp", "ddp", "fp16"),
        ("ddp_multi_node", "ddp", "fp16"),
        ("fsdp2", "fsdp2", "fp16"),
        ("fsdp2_multi_node", "fsdp2", "fp16"),
        ("fsdp2_offload", "fsdp2", "no"),  # the loss scaler would read its scale before it is on the host
    ],
)
def test_launch_files_start_on_cards_without_bf16(
    file: str, engine: Any, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two T4s, as Kaggle lends them; on newer cards the same file means bf16."""
    values = yaml.safe_load((ROOT / "accelerate_configs" / f"{file}.yaml").read_text())
    offloads = values.get("fsdp_config", {}).get("fsdp_offload_params", False)
    asked = Launch(2, engine=engine, precision=values.get("mixed_precision", "no"), offloads=offloads)
    for has_bf16, expected in ((False, chosen), (True, "bf16")):
        monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda including_emulation=True, has=has_bf16: has)
        launch, line = settle_precision(asked, Config().changed(model="x"), torch.device("cuda", 0))
        assert launch.precision == expected and line is not None


def test_bf16_weights_are_refused_by_cards_without_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would emulate it, and attention would store S × S."""
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda including_emulation=True: False)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "Tesla T4")
    with pytest.raises(UsageError, match=r"^dtype: Tesla T4 has no bf16. Use float32 with mixed_precision: fp16"):
        settle_precision(Launch(), Config().changed(model="x", dtype="bfloat16"), torch.device("cuda", 0))


def test_a_cpu_computes_in_fp32_unless_asked_otherwise() -> None:
    assert settle_precision(Launch(), Config(), torch.device("cpu")) == (Launch(), None)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("local_world_size", "asked", "chosen", "threads"),
    [
        ("1", None, "1", 8),
        ("2", None, "1", 4),
        ("16", None, "1", 1),
        ("2", 3, "1", 3),
        ("2", 3, "5", 3),
        ("2", None, "5", None),
        ("1", None, "16", 8),
        ("2", None, "16", 4),
        ("2", 3, "16", 3),
    ],
)
def test_a_process_takes_its_share_of_the_cores(
    local_world_size: str,
    asked: int | None,
    chosen: str,
    threads: int | None,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The share counts only where nobody chose: ``cpu_threads``, or OMP_NUM_THREADS above accelerate's 1.

    It also counts where that is more than a container may use: accelerate counts the cores of the whole machine.
    Next to a card, too, because optimizers whose state is in host memory update there.
    """
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (8, 0))
    monkeypatch.setattr("torch.set_float32_matmul_precision", lambda precision: None)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", local_world_size)
    monkeypatch.setenv("OMP_NUM_THREADS", chosen)
    monkeypatch.setattr("torch.get_num_threads", lambda: int(chosen))
    monkeypatch.setattr("train.extras.hardware.num_cores", lambda: 8)
    set_to: list[int] = []
    monkeypatch.setattr("torch.set_num_threads", set_to.append)
    set_up_device(torch.device(device), Launch(), Config().changed(cpu_threads=asked))
    assert set_to == ([threads] if threads is not None else [])


@pytest.mark.parametrize(
    ("limit", "cores"),
    [("max 100000\n", 8), ("150000 100000\n", 2), ("50000 100000\n", 1), ("900000 100000", 8), ("", 8)],
)
def test_a_container_has_the_cores_of_its_quota(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, cores: int
) -> None:
    """``docker run --cpus``, or a limit of Kubernetes, leaves all cores visible; so do systems without such a file."""
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(8)), raising=False)
    assert num_cores(tmp_path) == 8
    (tmp_path / "cpu.max").write_text(limit)
    assert num_cores(tmp_path) == cores


@pytest.mark.gpu
def test_tf32_is_switched_on_and_off_on_a_card() -> None:
    device, accelerator = torch.device("cuda"), Accelerator()
    set_up_device(device, Launch(), Config().changed(tf32=False))
    assert precision_in_use(accelerator, "float32") == "no"
    assert torch.get_float32_matmul_precision() == "highest"
    expected = "tf32" if torch.cuda.get_device_capability() >= (8, 0) else "no"
    set_up_device(device, Launch(), Config().changed(tf32=True))
    assert precision_in_use(accelerator, "float32") == expected
    assert (torch.get_float32_matmul_precision() == "high") == (expected == "tf32")


@pytest.mark.parametrize(
    ("mixed_precision", "dtype", "expected"),
    [("no", "float32", "tf32"), ("no", "bfloat16", "bf16"), ("no", "float16", "fp16"), ("fp16", "bfloat16", "fp16")],
)
def test_weights_in_halves_are_multiplied_as_such(
    mixed_precision: str, dtype: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With ``--dtype bfloat16`` mixed precision stays off, and MFU is of the card's rate in bf16."""
    monkeypatch.setattr("torch.get_float32_matmul_precision", lambda: "high")
    on_card = SimpleNamespace(device=torch.device("cuda"), mixed_precision=mixed_precision)
    assert precision_in_use(on_card, dtype) == expected


def test_tf32_changes_nothing_on_a_cpu() -> None:
    before = torch.get_float32_matmul_precision()
    set_up_device(torch.device("cpu"), Launch(), Config().changed(tf32=True, cpu_threads=torch.get_num_threads()))
    assert precision_in_use(Accelerator(cpu=True), "float32") == "no"
    assert torch.get_float32_matmul_precision() == before
