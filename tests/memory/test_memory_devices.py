"""Devices by name, by size and as found."""

from __future__ import annotations

from types import SimpleNamespace

import psutil
import pytest
import torch

from train.extras.meter.cards import peak_flops_per_second
from train.memory.devices import Device, find_device, nccl_buffer_bytes, this_device
from train.memory.question import target_of
from train.records import UsageError

GIB, MIB = 2**30, 2**20

CARDS = [
    *("gb200", "b200", "gh200", "h200-nvl", "h200", "h100-nvl", "h100-pcie", "h100", "a100-80", "a100-40", "a10g"),
    *("a10", "l40s", "l40", "l4", "t4", "v100-32", "v100-16", "rtx-6000-ada", "a6000", "rtx-5090", "rtx-4090"),
    *("rtx-3090-ti", "rtx-3090", "rtx-4080", "rtx-4070-ti", "rtx-4070", "rtx-4060-ti-16", "rtx-4060-ti-8"),
    *("rtx-3060-ti", "rtx-3060", "rtx-2080-ti", "p100", "mi300x", "mi250", "mi250x"),
]
AMD = ("mi300x", "mi250", "mi250x")


@pytest.mark.parametrize("name", CARDS)
def test_every_card_is_found_in_any_spelling(name: str) -> None:
    device = find_device(name)
    assert device.name == name
    spaced = name.replace("-", " ")
    for spelling in (name.upper(), spaced, spaced.replace("rtx ", "RTX"), f" {name} ", f"NVIDIA {spaced}"):
        assert find_device(spelling) == device


@pytest.mark.parametrize(
    ("product", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H100 NVL", "h100-nvl"),
        ("h100-80", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100-80"),
        ("A100 40GB", "a100-40"),
        ("Tesla V100-SXM2-16GB", "v100-16"),
        ("Tesla T4", "t4"),
        ("NVIDIA RTX A6000", "a6000"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx-6000-ada"),
        ("NVIDIA GeForce RTX 3090 Ti", "rtx-3090-ti"),
        ("4090", "rtx-4090"),
        ("NVIDIA GeForce RTX 4060 Ti 16GB", "rtx-4060-ti-16"),
        ("GeForce RTX 2080 Ti", "rtx-2080-ti"),
        ("Tesla P100", "p100"),
        ("AMD Instinct MI300X", "mi300x"),
    ],
)
def test_product_names_are_understood(product: str, name: str) -> None:
    assert find_device(product).name == name


@pytest.mark.parametrize(
    ("text", "total_bytes", "name"),
    [
        ("24GiB", 24 * GIB, "24GiB"),
        ("24 gib", 24 * GIB, "24GiB"),
        ("24Gi", 24 * GIB, "24GiB"),
        ("24G", 24 * 10**9, "24GB"),
        ("16GB", 16 * 10**9, "16GB"),
        ("47.5GiB", 47 * GIB + GIB // 2, "47.5GiB"),
    ],
)
def test_a_bare_size_is_a_card_of_unknown_speed(text: str, total_bytes: int, name: str) -> None:
    device = find_device(text)
    assert (device.name, device.total_bytes) == (name, total_bytes)
    assert 0 < device.context_bytes < GIB
    assert (device.compute_capability, device.memory_bytes_per_second) == (None, None)
    assert peak_flops_per_second(device.name, "bf16") is None


@pytest.mark.parametrize("text", ["0GiB", "0.5GB"])
def test_a_size_below_the_context_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="context"):
        find_device(text)


@pytest.mark.parametrize(
    ("start", "name"), [("mi300", "mi300x"), ("MI3", "mi300x"), ("rtx 5", "rtx-5090"), ("gh", "gh200")]
)
def test_the_start_of_one_name_is_enough(start: str, name: str) -> None:
    assert find_device(start) == find_device(name)


@pytest.mark.parametrize(
    ("text", "candidates"),
    [
        ("a100", "a100-80 or a100-40"),
        ("V100", "v100-32 or v100-16"),
        ("rtx 4060 ti", "rtx-4060-ti-16 or rtx-4060-ti-8"),
        ("h2", "h200-nvl or h200"),
    ],
)
def test_a_start_of_several_names_lists_them(text: str, candidates: str) -> None:
    with pytest.raises(UsageError, match=f"^device {text!r} may be {candidates}. Say which.$"):
        find_device(text)


@pytest.mark.parametrize("text", ["rtx-4091", "h2000", "m2-max", "rtx"])
def test_an_unknown_name_names_all(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        find_device(text)
    message = str(caught.value)
    assert (
        f"unknown device {text!r}. Say how much memory it has, such as 24GiB (Apple's chips: 'mps 16GiB'), or "
        in message
    )
    for name in (*CARDS, "cpu"):
        assert name in message


@pytest.mark.parametrize(
    "text",
    [
        *("", "frobnicator", "24", "24 MiB", "h100 mig 1g.10gb", "rtx 4090 laptop gpu", "-3GiB"),
        *("rtx 2080", "4060", "h20", "rtx 3060 8gb", "l4 48gb", "a100 24GiB"),  # other products, of other sizes
    ],
)
def test_what_is_no_device_is_not_taken_for_one(text: str) -> None:
    with pytest.raises(UsageError, match="unknown device"):
        find_device(text)


def test_memory_is_below_what_the_card_is_sold_with() -> None:
    sold_gib = {
        "h100": 80,
        "a100-80": 80,
        "a100-40": 40,
        "a6000": 48,
        "l4": 24,
        "rtx-4090": 24,
        "t4": 16,
        "v100-32": 32,
        "rtx-3060": 12,
        "rtx-4060-ti-8": 8,
        "rtx-4060-ti-16": 16,
        "rtx-4070": 12,
        "rtx-4080": 16,
        "rtx-2080-ti": 11,
        "p100": 16,
        "mi250": 64,
        "mi300x": 192,
    }
    for name, size in sold_gib.items():
        assert 0.9 * size * GIB < find_device(name).total_bytes < size * GIB, name
    assert 139 * GIB < find_device("h200").total_bytes < 140 * GIB


def test_devices_are_ordered_as_they_should_be() -> None:
    def usable(*names: str) -> list[int]:
        return [find_device(name).total_bytes - find_device(name).context_bytes for name in names]

    def bandwidth(*names: str) -> list[float]:
        return [find_device(name).memory_bytes_per_second or 0 for name in names]

    by_memory = usable("t4", "v100-16", "l4", "v100-32", "a100-40", "a6000", "a100-80", "h100-nvl", "h200", "b200")
    assert by_memory == sorted(by_memory)
    by_bandwidth = bandwidth("l4", "a10", "v100-16", "a100-40", "a100-80", "h100", "h100-nvl", "h200", "b200")
    assert by_bandwidth == sorted(by_bandwidth)
    assert by_bandwidth[0] == 300e9


@pytest.mark.parametrize("name", CARDS)
def test_every_card_is_known_in_full(name: str) -> None:
    device = find_device(name)
    assert 200 * MIB <= device.context_bytes <= 1024 * MIB
    assert (device.compute_capability is None) == (name in AMD)  # which number their chips in another way
    capability = device.compute_capability or (8, 0)
    assert capability[0] >= 6
    rate = peak_flops_per_second(device.name, "fp16")
    assert rate is not None
    assert (peak_flops_per_second(device.name, "bf16") is None) == (capability < (8, 0))
    assert device.memory_bytes_per_second is not None
    assert 10 < rate / device.memory_bytes_per_second < 500  # operations per byte


def test_apples_chips_need_the_memory_that_they_may_take() -> None:
    with pytest.raises(UsageError, match=r"part of the machine's memory.*'mps 16GiB'"):
        find_device("mps")


@pytest.mark.parametrize("text", ["mps 16GiB", "MPS:16 gib", "mps-16GiB"])
def test_apples_gpu_of_a_size_is_planned_without_a_context(text: str) -> None:
    assert find_device(text) == Device("mps 16GiB", 16 * GIB)
    assert target_of(find_device(text)).device_type == find_device(text).kind == "mps"


def test_this_device_is_apples_gpu_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in; not run on a Mac."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 12 * GIB)
    assert this_device() == find_device("mps") == Device("mps", 12 * GIB)


def test_an_amd_card_is_planned_with_its_own_memory_and_no_number_of_nvidias(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch reports 9.4 for it, which is not Hopper's."""
    properties = SimpleNamespace(name="AMD Instinct MI300X", major=9, minor=4, total_memory=196592 * MIB)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    found = this_device()
    assert (found.total_bytes, found.compute_capability) == (196592 * MIB, None)
    assert found.memory_bytes_per_second == find_device("mi300x").memory_bytes_per_second == 5.3e12
    assert target_of(found).capability == (8, 0) and not target_of(found).prefers_cudnn
    assert target_of(found).flops_per_second["bf16"] == 1307.4e12


def test_cpu_is_what_is_free_of_this_machine_or_of_its_control_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=8 * GIB, total=16 * GIB))
    for limits, free in (([], 8), ([3 * GIB, 12 * GIB], 3)):
        monkeypatch.setattr("train.extras.host_memory._left_in_groups", lambda root, limits=limits: limits)
        assert find_device("CPU") == Device("cpu", free * GIB)


def test_this_device_is_the_cpu_where_there_is_no_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert this_device().name == "cpu"


@pytest.mark.parametrize(
    ("product", "like"),
    [
        ("NVIDIA A100-SXM4-40GB", "a100-40"),
        ("NVIDIA A100 80GB PCIe", "a100-80"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA GeForce RTX 3090 Ti", "rtx-3090-ti"),
        ("NVIDIA RTX A6000", "a6000"),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("Something New", None),
    ],
)
def test_this_device_asks_the_card_and_looks_its_bandwidth_up(
    product: str, like: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    properties = SimpleNamespace(name=product, major=8, minor=0, total_memory=12345 * MIB)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    assert this_device() == Device(
        name=product,
        total_bytes=12345 * MIB,
        context_bytes=find_device("a100-40").context_bytes,
        compute_capability=(8, 0),
        memory_bytes_per_second=find_device(like).memory_bytes_per_second if like else None,
    )


def test_nccl_takes_nothing_alone_and_more_in_larger_groups() -> None:
    alone, two, three, many = (nccl_buffer_bytes(size) for size in (1, 2, 3, 1024))
    assert alone == 0
    assert 500 * MIB < two < three == many < GIB
