"""What a run leaves behind: its metrics line by line, its summary, the report page, the trackers.

Only the main process writes; sizes are bytes here and GiB (2^30) where a person reads them.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import platform
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from train import __version__
from train.config import Config, to_values
from train.extras.report.page import page
from train.records import UserError
from train.wording import count, gib, percent, shown

if TYPE_CHECKING:
    from accelerate import Accelerator

PROJECT = "long-sequence-template"
"""The name under which trackers group runs."""


class MetricsLog:
    """Appends a line of JSON per logged step and per evaluation to ``metrics.jsonl``.

    Args:
        path: the file; made, with its folder, by the first line.
        enabled: False on every process but the main one: nothing is written.
    """

    def __init__(self, path: Path, enabled: bool = True) -> None:
        self._path = path
        self._enabled = enabled
        self._file: IO[str] | None = None

    def write(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """Appends ``{"kind", "step", "time", **values}`` and hands it to the operating system at once.

        Numbers that are not finite become null, since JSON has no word for them.

        Raises:
            UserError: the disk is full or the folder cannot be written.
        """
        if not self._enabled:
            return
        now = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
        line = _json({"kind": kind, "step": step, "time": now, **values})
        try:
            if self._file is None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._file = self._path.open("a", encoding="utf-8")
            self._file.write(line + "\n")
            self._file.flush()
        except OSError as error:
            raise _cannot_write(self._path, error) from None

    def keep(self, belongs: Callable[[Mapping[str, Any]], bool]) -> None:
        """Drops the rows that do not belong, which a resumed run writes again, and a last line cut short."""
        if not self._enabled or not self._path.exists():
            return
        self.close()
        kept = [row for row in read_metrics(self._path) if belongs(row)]
        _write_whole(self._path, "".join(_json(row) + "\n" for row in kept))

    def close(self) -> None:
        """Closes the file; the next ``write`` opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a ``metrics.jsonl``, oldest first; none where there is no file.

    A last line that a killed process left unfinished is left out.

    Raises:
        UserError: another line is not a row.
    """
    if not path.exists():
        return []
    with path.open(encoding="utf-8", errors="replace") as file:
        lines = list(file)
    rows = [_row(line) for line in lines]
    for index, row in enumerate(rows[:-1]):
        if row is None:
            raise UserError(f"{path}, line {index + 1} is not a row of metrics. Mend or delete the line, or the file.")
    return [row for row in rows if row is not None]


def _row(line: str) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) and "kind" in row else None


def start_trackers(accelerator: Accelerator, config: Config) -> None:
    """Opens a run with each tool of ``report_to`` and hands it the configuration, without what may be a secret.

    Raises:
        UserError: a tool is not installed, or cannot start (wandb without a login, for one).
    """
    wanted = config.output.report_to
    if not wanted:
        return
    found = {str(name) for name in accelerator.log_with}
    for name in wanted:
        if name not in found:
            raise UserError(f"report_to: {name} is not installed. pip install '.[{name}]' adds it.")
    run_name = config.output.run_name or Path(config.output.output_dir).resolve().name
    options = {"trackio": {"name": run_name}, "wandb": {"name": run_name, "dir": config.output.output_dir}}
    try:
        accelerator.init_trackers(PROJECT, config=tracked_config(config), init_kwargs=options)
    except ImportError as error:
        raise UserError(f"report_to: {error}. pip install '.[{','.join(wanted)}]' adds what is missing.") from error
    except Exception as error:  # each tool raises errors of its own kinds
        hint = " WANDB_MODE=offline keeps the run on this machine." if "wandb" in wanted else ""
        raise UserError(f"report_to: {', '.join(wanted)} did not start: {error}.{hint}") from error


def log_to_trackers(accelerator: Accelerator, values: Mapping[str, Any], step: int) -> None:
    """Hands the numbers and texts among ``values`` to the trackers; tables, lists and missing values stay out."""
    if accelerator.trackers:
        accelerator.log({name: value for name, value in values.items() if isinstance(value, int | float | str)}, step)


def tracked_config(config: Config) -> dict[str, int | float | str]:
    """The configuration as flat numbers and texts; mappings get dotted names, lists become text.

    Texts whose name speaks of a token, key, secret or password are left out: a tracker may be public.
    """
    return dict(_flat(to_values(config)))


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, int | float | str]]:
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _flat(value, f"{name}.")
        elif isinstance(value, int | float):
            yield name, value
        elif value is not None and not _is_secret(name):
            yield name, ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _is_secret(name: str) -> bool:
    plain = name.lower().replace("tokenizer", "")
    return any(word in plain for word in ("token", "key", "secret", "password"))


def write_summary(output_dir: Path, summary: Mapping[str, Any]) -> Path:
    """Writes ``summary.json``, whole or not at all, and returns its path.

    Raises:
        UserError: the disk is full or the folder cannot be written.
    """
    path = output_dir / "summary.json"
    _write_whole(path, _json(summary, indent=2) + "\n")
    return path


def write_report(
    output_dir: Path,
    title: str,
    config_yaml: str,
    summary: Mapping[str, Any],
    metrics: list[dict[str, Any]],
    sample: str | None = None,
) -> Path:
    """Writes ``report.html``, one page that needs nothing else, and returns its path.

    Args:
        output_dir: the run's folder.
        title: heading of the page.
        config_yaml: the resolved configuration.
        summary: as in ``summary.json``; :func:`train.extras.report.page.page` lists the keys it shows, all optional.
        metrics: the rows of ``metrics.jsonl``.
        sample: text that the trained model wrote.

    Raises:
        UserError: the disk is full or the folder cannot be written.
    """
    path = output_dir / "report.html"
    _write_whole(path, page(title, config_yaml, summary, metrics, sample))
    return path


def hardware() -> dict[str, Any]:
    """The machine, without its name or its users: platform, python, cpu, cpu_cores, memory_bytes, gpus, gpu_count."""
    import torch

    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return {
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "cpu": _cpu_model(),
        "cpu_cores": os.cpu_count(),
        "memory_bytes": _total_memory_bytes(),
        "gpus": [{"name": gpu.name, "memory_bytes": gpu.total_memory} for gpu in gpus],
        "gpu_count": len(gpus),
    }


def versions() -> dict[str, str]:
    """Versions of Python, of this template and of the libraries that decide what a run does."""
    found = {"python": platform.python_version(), "template": __version__}
    for name in ("torch", "transformers", "accelerate", "datasets", "evaluate"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def progress_text(values: Mapping[str, Any]) -> str:
    """A row of training metrics in a few words, to stand behind a progress bar."""
    parts = [
        shown(values, "loss", lambda value: f"loss {value:.4g}"),
        shown(values, "learning_rate", lambda value: f"lr {value:.2e}"),
        shown(values, "grad_norm", lambda value: f"grad {value:.3g}"),
        shown(values, "tokens_per_second", lambda value: f"{count(value)} tok/s"),
        shown(values, "mfu", lambda value: f"MFU {percent(value)}"),
        shown(values, "peak_allocated_bytes", gib),
        _reserved(values),
    ]
    return ", ".join(part for part in parts if part)


def _reserved(values: Mapping[str, Any]) -> str | None:
    """What the allocator holds, where that is well above what it gave out: memory is fragmented."""
    reserved, allocated = values.get("peak_reserved_bytes"), values.get("peak_allocated_bytes")
    return f"{gib(reserved)} reserved" if reserved and allocated and reserved > 1.2 * allocated else None


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine()


def _total_memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def _json(value: Any, indent: int | None = None) -> str:
    return json.dumps(_plain(value), allow_nan=False, indent=indent)


def _plain(value: Any) -> Any:
    """``value`` in JSON's types: tensors and arrays as lists or numbers, numbers that are not finite as null."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(part) for key, part in value.items()}
    return [_plain(part) for part in value] if isinstance(value, list | tuple) else value


def _write_whole(path: Path, text: str) -> None:
    """Replaces ``path`` in one move: readers see the old text or the new one, never half of it."""
    aside = path.with_name(f".{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with aside.open("w", encoding="utf-8", errors="backslashreplace", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except OSError as error:
        raise _cannot_write(path, error) from None


def _cannot_write(path: Path, error: OSError) -> UserError:
    return UserError(f"{path}: cannot be written: {error.strerror or error}. Free space or choose another output_dir.")
