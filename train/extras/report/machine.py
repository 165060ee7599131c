"""The machine and the libraries of a run, and names and values in words: what page, charts and model card share."""

import importlib.metadata
import os
import platform
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil  # comes with accelerate

from train import __version__
from train.figures import count, gib


def hardware(device_type: str = "cuda") -> dict[str, Any]:
    """The machine, without its name, its users, or cards that a run on another type of device left alone."""
    from torch import cuda

    gpus = [cuda.get_device_properties(n) for n in range(cuda.device_count())] if device_type == "cuda" else []
    cpus = Path("/proc/cpuinfo")
    model = re.search(r"model name\s*: (.+)", cpus.read_text(encoding="utf-8")) if cpus.exists() else None
    return {
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": model[1].strip() if model else platform.processor() or platform.machine(),
        "cpu_cores": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "gpus": [{"name": gpu.name, "memory_bytes": gpu.total_memory} for gpu in gpus],
    }


def versions() -> dict[str, str]:
    """Versions of Python, of this template and of the libraries that decide what a run does."""
    names = "torch", "transformers", "accelerate", "datasets", "evaluate"
    found = {name: d.version for name in names for d in [*importlib.metadata.distributions(name=name)][:1]}
    return {"python": platform.python_version(), "template": __version__, **found}


def progress_text(values: Mapping[str, Any]) -> str:
    """A row of training metrics in a few words, for the progress bar."""
    texts: dict[str, Callable[[Any], str]] = {
        "loss": "loss {:.4g}".format,
        "learning_rate": "lr {:.2e}".format,
        "grad_norm": "grad {:.3g}".format,
        "tokens_per_second": lambda value: f"{count(value)} tok/s",
        "mfu": "MFU {:.1%}".format,
        "peak_allocated_bytes": gib,
    }
    return ", ".join(filter(None, (shown(values, name, text) for name, text in texts.items())))


def machine_facts(summary: Mapping[str, Any]) -> dict[str, Any]:
    """The known facts about the machine and the versions of a summary, by the name a person reads."""
    machine = summary.get("hardware") or {}
    facts = {
        "GPU": ", ".join(f"{gpu['name']} ({gib(gpu['memory_bytes'])})" for gpu in machine.get("gpus") or []),
        "CPU": machine.get("cpu"),
        "CPU cores": machine.get("cpu_cores"),
        "Memory": shown(machine, "memory_bytes", gib),
        "Platform": machine.get("platform"),
        **(summary.get("versions") or {}),
    }
    return {name: value for name, value in facts.items() if value}


def scalars(values: Mapping[str, Any]) -> dict[str, Any]:
    """The entries that fit into a cell of a table: numbers, texts and missing values."""
    return {name: value for name, value in values.items() if value is None or isinstance(value, int | float | str)}


def shown(values: Mapping[str, Any], name: str, text: Callable[[Any], str]) -> str | None:
    """``text`` of the value called ``name``; None if there is no such value."""
    return None if values.get(name) is None else text(values[name])
