"""The machine and the libraries of a run."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import math
import os
import platform
import re
from pathlib import Path
from typing import Any

from train import __version__


def hardware() -> dict[str, Any]:
    """The machine, without its name or its users; memory in bytes."""
    import torch

    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    cpus, sizes = Path("/proc/cpuinfo"), ("SC_PAGE_SIZE", "SC_PHYS_PAGES")
    model = re.search(r"model name\s*: (.+)", cpus.read_text(encoding="utf-8")) if cpus.exists() else None
    return {
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "cpu": model[1].strip() if model else platform.processor() or platform.machine(),
        "cpu_cores": os.cpu_count(),
        "memory_bytes": math.prod(map(os.sysconf, sizes)) if hasattr(os, "sysconf") else None,
        "gpus": [{"name": gpu.name, "memory_bytes": gpu.total_memory} for gpu in gpus],
        "gpu_count": len(gpus),
    }


def versions() -> dict[str, str]:
    """Versions of Python, of this template and of the libraries that decide what a run does."""
    names = ("torch", "transformers", "accelerate", "datasets", "evaluate")
    found = {name: importlib.metadata.version(name) for name in names if importlib.util.find_spec(name)}
    return {"python": platform.python_version(), "template": __version__, **found}
