"""What a process may still take of the host's memory."""

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from support import Driver

from train.extras.host_memory import free_host_bytes, is_out_of_memory, page_locked

GIB = 2**30


@pytest.fixture(autouse=True)
def _available(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=8 * GIB))


def machine(root: Path, group: str, files: dict[str, str]) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(group)
    for name, content in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root


def group_files(folder: str, limit: int | str, used: int, cached: int) -> dict[str, str]:
    return {
        f"{folder}memory.max": f"{limit}\n",
        f"{folder}memory.current": f"{used}\n",
        f"{folder}memory.stat": f"anon 5\ninactive_file {cached}\n",
    }


def test_machine_without_groups_gives_each_process_its_share(tmp_path: Path) -> None:
    root = machine(tmp_path, "", {})
    assert free_host_bytes(root, {}) == 8 * GIB
    assert free_host_bytes(root, {"LOCAL_WORLD_SIZE": "4"}) == 2 * GIB
    assert free_host_bytes(tmp_path / "as on a Mac", {}) == 8 * GIB


@pytest.mark.parametrize(("limit", "free_gib"), [(6 * GIB, 3), ("max", 8)])
def test_group_of_version_2_bounds_it_and_cached_files_are_free(
    tmp_path: Path, limit: int | str, free_gib: int
) -> None:
    files = group_files("job/step/", limit, 5 * GIB, 2 * GIB)
    assert free_host_bytes(machine(tmp_path, "0::/job/step\n", files), {}) == free_gib * GIB


def test_tightest_group_above_counts(tmp_path: Path) -> None:
    files = group_files("job/step/", "max", GIB, 0) | group_files("job/", 2 * GIB, GIB, 0)
    assert free_host_bytes(machine(tmp_path, "0::/job/step\n", files), {}) == GIB


def test_this_machine_has_some(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert free_host_bytes() > 2**20


def test_page_locked_memory_is_of_the_size_asked_for_and_unlocked_when_it_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    driver = Driver()
    buffer = page_locked(5_000_001)
    assert (driver.locked, driver.places) == ([5_000_001], {buffer.data_ptr()})
    assert (buffer.dtype, buffer.shape) == (torch.uint8, (5_000_001,))
    del buffer
    assert driver.places == set()


def test_another_accelerator_locks_memory_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, empty = [], torch.empty
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch, "empty", lambda *a, pin_memory, **how: asked.append(pin_memory) or empty(*a, **how))
    assert (page_locked(100).shape, asked) == ((100,), [True])


def test_ordinary_memory_serves_where_the_driver_locks_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next kernel would report the driver's error as its own, so one is started that nobody misses."""
    started: list[str] = []

    def fail(*shape: int, device: str) -> None:
        started.append(device)
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: Driver(refuses=True))
    monkeypatch.setattr(torch, "zeros", fail)
    assert page_locked(100).shape == (100,)
    assert started == ["cuda"]


def test_a_full_host_is_not_taken_for_a_full_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    driver = Driver()
    with pytest.raises(MemoryError) as raised:
        page_locked(9 * GIB)
    assert driver.locked == [] and is_out_of_memory(raised.value)
    assert str(raised.value).startswith(
        "host memory: cannot allocate memory of 9.00 GiB for copies to and from the card"
    )
