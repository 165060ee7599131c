"""How much of the host's memory a process may still take, also inside a container or a scheduler's job."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil  # comes with accelerate

GROUPS = {  # of version 2 and 1, by controller
    "": ("sys/fs/cgroup", "memory.max", "memory.current"),
    "memory": ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
}


def free_host_bytes(root: Path = Path("/"), environment: Mapping[str, str] = os.environ) -> int:
    """This process's share of what is available: of the machine below ``root``, or of its control group if less."""
    processes = int(environment.get("LOCAL_WORLD_SIZE", "1"))
    return min([psutil.virtual_memory().available, *_left_in_groups(root)]) // processes


def _left_in_groups(root: Path) -> Iterator[int]:
    """What each control group around this process leaves, of version 1 or 2; files it has read count as free."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers not in GROUPS:
            continue
        place, limit, usage = GROUPS[controllers]
        top = root / place
        group = top / path.lstrip("/")
        for folder in (group, *group.parents):
            if not folder.is_relative_to(top):
                break
            try:
                most = (folder / limit).read_text(encoding="ascii").strip()
                used = int((folder / usage).read_text(encoding="ascii"))
                stat = (folder / "memory.stat").read_text(encoding="ascii").splitlines()
            except (OSError, ValueError):
                continue
            if most != "max":
                cached = {name: int(value) for name, value in (entry.split() for entry in stat)}
                yield max(0, int(most) - used + cached.get("total_inactive_file", cached.get("inactive_file", 0)))
