"""Checkpoints that are complete or absent: written aside, digested, synced, renamed, and verified before use.

A checkpoint is a folder ``checkpoints/step-NNNNNNNN`` of safetensors and JSON. It holds weights, optimizer, loss
scaler and progress; the order of the data and all randomness are functions of the progress and the configuration, so
no generator's state is in it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, load_model, save_file, save_model
from torch import Tensor, nn

from train.errors import UserError
from train.records import Progress

MANIFEST = "manifest.json"
PARTIAL = ".partial-"


@dataclass(frozen=True)
class TrainingState:
    """The live objects that a checkpoint saves and restores in place."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler | None
    identity: Mapping[str, Any]
    """What must be equal for a run to go on: data, model, batch, seed."""


def save(folder: Path, state: TrainingState, progress: Progress) -> Path:
    """Writes ``folder/step-NNNNNNNN``; it appears only when every byte of it is on the disk."""
    folder.mkdir(parents=True, exist_ok=True)
    final = folder / f"step-{progress.step:08d}"
    partial = folder / f"{PARTIAL}{final.name}"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        save_model(state.model, str(partial / "model.safetensors"))
        tensors, structure = _flattened(state.optimizer.state_dict())
        save_file(tensors, partial / "optimizer.safetensors")
        _write_json(partial / "optimizer.json", structure)
        scaler = state.scaler.state_dict() if state.scaler is not None else None
        _write_json(
            partial / "state.json", {"progress": asdict(progress), "scaler": scaler, "identity": dict(state.identity)}
        )
        files = {p.name: {"bytes": p.stat().st_size, "sha256": _digest(p)} for p in sorted(partial.iterdir())}
        _write_json(partial / MANIFEST, {"step": progress.step, "files": files})
        for path in [*partial.iterdir(), partial]:
            _sync(path)
        if final.exists():  # the same step again: after a run that stopped right here
            shutil.rmtree(final)
        partial.rename(final)
        _sync(folder)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise UserError(
            f"the checkpoint of step {progress.step} could not be written to {folder}: {error.strerror or error}. "
            "Earlier checkpoints are untouched; free space or give another --output_dir."
        ) from None
    return final


def restore(checkpoint: Path, state: TrainingState, allow_changes: bool = False) -> Progress:
    """Loads a verified checkpoint into ``state``.

    Raises:
        UserError: the run it belongs to had other data, model, batch or seed, and that is not allowed.
    """
    stored = json.loads((checkpoint / "state.json").read_text())
    changed = [k for k, v in state.identity.items() if _plain(v) != stored["identity"].get(k)]
    if changed and not allow_changes:
        lines = "; ".join(f"{k}: was {stored['identity'].get(k)!r}, is {_plain(state.identity[k])!r}" for k in changed)
        raise UserError(
            f"{checkpoint} belongs to a run with other settings ({lines}). Give another --output_dir for a new run, "
            "--resume never to start afresh here, or --allow_changes_on_resume True to go on with the new ones."
        )
    load_model(state.model, str(checkpoint / "model.safetensors"), device="cpu")
    tensors = load_file(checkpoint / "optimizer.safetensors")
    structure = json.loads((checkpoint / "optimizer.json").read_text())
    state.optimizer.load_state_dict(_unflattened(tensors, structure))
    if state.scaler is not None and stored["scaler"]:
        state.scaler.load_state_dict(stored["scaler"])
    return Progress(**stored["progress"])


def newest_good(folder: Path) -> tuple[Path | None, list[str]]:
    """The newest checkpoint that passes verification, and why newer ones did not.

    Raises:
        UserError: there are checkpoints, but none is good; starting afresh silently would be worse.
    """
    problems = []
    for checkpoint in reversed(list(_checkpoints(folder))):
        problem = verify(checkpoint)
        if problem is None:
            return checkpoint, problems
        problems.append(f"{checkpoint.name}: {problem}")
    if problems:
        raise UserError(
            f"no checkpoint in {folder} is intact ({'; '.join(problems)}). Restore one from a copy, or start afresh "
            "with --resume never."
        )
    return None, []


def verify(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint: a file missing, truncated, altered or foreign; None when it is intact."""
    try:
        manifest = json.loads((checkpoint / MANIFEST).read_text())
        files: dict[str, dict[str, Any]] = manifest["files"]
        for name, expected in files.items():
            path = checkpoint / name
            if path.is_symlink() or path.name != name:
                return f"{name} is not a plain file of it"
            if path.stat().st_size != expected["bytes"]:
                return f"{name} has {path.stat().st_size} bytes instead of {expected['bytes']}"
            if _digest(path) != expected["sha256"]:
                return f"{name} was altered"
        foreign = {p.name for p in checkpoint.iterdir()} - files.keys() - {MANIFEST}
        if foreign:
            return f"{min(foreign)} does not belong to it"
        if f"step-{manifest['step']:08d}" != checkpoint.name:
            return f"it is the checkpoint of step {manifest['step']}"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{MANIFEST} cannot be read ({type(error).__name__})"
    return None


def rotate(folder: Path, keep: int, best_step: int | None) -> None:
    """Removes all but the newest ``keep`` checkpoints and the best; to be called once the newest is in place."""
    for checkpoint in list(_checkpoints(folder))[:-keep]:
        if checkpoint.name != f"step-{best_step or 0:08d}":
            shutil.rmtree(checkpoint)
    for leftover in folder.glob(f"{PARTIAL}*"):
        shutil.rmtree(leftover)


def load_weights(model: nn.Module, checkpoint: Path) -> None:
    """Only the weights of a checkpoint, for the best one at the end."""
    load_model(model, str(checkpoint / "model.safetensors"), device="cpu")


def _checkpoints(folder: Path) -> Iterator[Path]:
    """Complete-looking checkpoints in the order of their steps."""
    yield from sorted(p for p in folder.glob("step-*") if p.is_dir() and p.name[5:].isdigit())


def _flattened(optimizer_state: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """An optimizer's state dict as named tensors for safetensors and the rest for JSON."""
    tensors, rest = {}, {}
    for parameter, values in optimizer_state["state"].items():
        for name, value in values.items():
            if isinstance(value, Tensor):
                tensors[f"{parameter}.{name}"] = value.detach().contiguous()
            else:
                rest[f"{parameter}.{name}"] = value
    return tensors, {"state": rest, "param_groups": optimizer_state["param_groups"]}


def _unflattened(tensors: Mapping[str, Tensor], structure: dict[str, Any]) -> dict[str, Any]:
    state: dict[int, dict[str, Any]] = {}
    for key, value in [*tensors.items(), *structure["state"].items()]:
        parameter, _, name = key.partition(".")
        state.setdefault(int(parameter), {})[name] = value
    groups = [  # JSON knows no tuples, such as betas
        {k: tuple(v) if isinstance(v, list) and k != "params" else v for k, v in group.items()}
        for group in structure["param_groups"]
    ]
    return {"state": state, "param_groups": groups}


def _plain(value: Any) -> Any:
    """``value`` as JSON gives it back."""
    return json.loads(json.dumps(value))


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1), encoding="utf-8")


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(2**22):
            digest.update(block)
    return digest.hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
