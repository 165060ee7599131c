"""Checkpoints that are complete or absent: written aside, digested, synced, renamed, and verified before use.

A checkpoint is a folder ``checkpoints/step-NNNNNNNN`` of safetensors and JSON. It holds weights, optimizer, loss
scaler and progress; the order of the data and all randomness are functions of the progress and the configuration, so
it needs no generator's state. Every rank writes the blocks that it alone holds; ``index.json`` says where each is.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TypeAlias

import safetensors.torch
import torch
import xxhash
from safetensors import SafetensorError
from torch import Tensor

from train.figures import make_folder, sync
from train.records import Progress, UserError, exchange, one_line
from train.state import INDEX, Block, StoredBlocks, TrainingState

MANIFEST, STATE = "manifest.json", "state.json"
PARTIAL = ".partial-"
DTYPES = {dtype: name for name, dtype in safetensors.torch._TYPES.items()}
# What reading files raises that hold something other than they should.
UNREADABLE = (OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError, SafetensorError)
Written: TypeAlias = tuple[dict[str, dict[str, Any]], list[tuple[str, str, Sequence[int], list[Any]]]]
"""Bytes and digest by file; and of each tensor section, name, shape and where the block lies."""


def restore(checkpoint: Path, state: TrainingState, check: Callable[[Any], Any] = lambda identity: None) -> Progress:
    """Loads this rank's part of a verified checkpoint; ``check`` gets its identity first. UserError if unusable."""
    try:
        stored = json.loads((checkpoint / STATE).read_text(encoding="utf-8"))
        check(stored["identity"])
        state.restore(StoredBlocks(checkpoint), stored)
        known = stored["progress"].keys() & {field.name for field in fields(Progress)}  # a fork may have added some
        return Progress(**{name: stored["progress"][name] for name in known})
    except torch.OutOfMemoryError:
        raise
    except OSError as error:  # it was intact a moment ago
        raise unreadable(checkpoint, error) from None
    except UNREADABLE as error:  # the files are as the manifest says, but not those of a checkpoint of this template
        reason = f"{type(error).__name__}: {one_line(error, 200)}"
        what = f"{checkpoint} is intact but cannot be read ({reason}): another model, version or program wrote it"
        remedy = "Give the old model, another --output_dir, or start from scratch with --resume never"
        raise UserError(f"{what}. {remedy}.") from None


def by_step(folder: Path) -> dict[int, Path]:
    """The checkpoints by step, oldest first; they look complete, but are not verified here."""
    found = [p for p in folder.glob("step-*") if p.is_dir() and re.fullmatch("[0-9]{8,}", p.name[5:])]
    return dict(sorted((int(p.name[5:]), p) for p in found))


def newest_good(folder: Path) -> tuple[Path | None, list[str]]:
    """The newest checkpoint that is intact, and why newer ones are not; UserError if there are some and none is."""
    problems = []
    for old in folder.glob(f"{PARTIAL}old-*"):  # a run was killed while it replaced this one by one of the same step
        if not (whole := folder / old.name.removeprefix(f"{PARTIAL}old-")).exists():
            old.rename(whole)
    for checkpoint in reversed(by_step(folder).values()):
        if (problem := verify(checkpoint)) is None:
            return checkpoint, problems
        problems.append(f"{checkpoint.name}: {problem}")
    if problems:
        remedy = "Restore one from a copy, or start from scratch with --resume never"
        raise UserError(f"no checkpoint in {folder} is intact ({'; '.join(problems)}). {remedy}.")
    return None, []


def verify(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint: a file missing, truncated or altered; UserError where the disk itself fails."""
    try:
        if checkpoint.is_symlink() or not (checkpoint / MANIFEST).stat().st_size:  # as of a pipe, where reading waits
            return f"it is a link, or its {MANIFEST} is empty"
        manifest = json.loads((checkpoint / MANIFEST).read_text())
        for name, expected in {INDEX: {}, STATE: {}, **manifest["files"]}.items():
            path = checkpoint / name
            if path.stat().st_size != expected["bytes"]:
                return f"{name} has {path.stat().st_size} bytes instead of {expected['bytes']}"
            known = expected.get("digest") or expected["sha256"]
            if digest(path, known) != known:
                return f"{name} was altered"
        if f"step-{manifest['step']:08d}" != checkpoint.name:
            return f"it is the checkpoint of step {manifest['step']}"
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        return f"{Path(error.filename).name} is missing"
    except OSError as error:
        raise unreadable(checkpoint, error) from None
    except UNREADABLE as error:
        return f"{MANIFEST} cannot be read ({type(error).__name__})"
    return None


def unreadable(checkpoint: Path, error: OSError) -> UserError:
    """The error for a disk or network that fails: the checkpoint may be intact, so nothing skips or removes it."""
    again = "Keep it, and try again; if that does not help, move it elsewhere to resume from the previous one"
    return UserError(f"{checkpoint} cannot be read: {error.strerror or error}. {again}.")


def rotate(folder: Path, kept: Collection[int]) -> None:
    """Removes the checkpoints of other steps, the oldest first, and what a killed run left of one."""
    for step, checkpoint in by_step(folder).items():
        if step not in kept:
            remove(checkpoint)
    for leftover in folder.glob(f"{PARTIAL}*"):
        remove(leftover)


def remove(path: Path) -> None:
    """Removes a checkpoint; of a link only the link, because what it leads to is not the run's own."""
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path)


def digest(path: Path, like: str = "") -> str:
    """The XXH3 digest of a file; its SHA-256 if ``like`` is one: earlier versions kept that."""
    found = hashlib.sha256() if len(like) == 64 else xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(2**22):
            found.update(block)
    return found.hexdigest()


def write(folder: Path, state: TrainingState, progress: Progress, rank: int) -> None:
    """Writes ``folder/step-NNNNNNNN``, which appears when complete; by all ranks. UserError on all if one fails."""
    final = folder / f"step-{progress.step:08d}"
    partial = folder / f"{PARTIAL}{final.name}"
    try:
        together(lambda: make_empty(partial), rank == 0)
        written = together(lambda: write_blocks(partial, state.blocks(rank), rank))
        values = {"progress": asdict(progress), **state.values()}  # of all ranks: some of them may need each other
        together(lambda: complete(partial, final, values, written), rank == 0)
    except OSError as error:
        raise refusal(final, error) from None
    finally:
        if rank == 0:
            shutil.rmtree(partial, ignore_errors=True)  # there only if something failed


def together(action: Callable[[], Any], acts: bool = True) -> list[Any]:
    """The results of ``action`` on all ranks; an error that is not a bug is raised on all ranks, so that none waits."""
    try:
        outcome = action() if acts else None
    except (OSError, UserError) as error:
        outcome = error
    except (RuntimeError, MemoryError) as error:  # of torch; all others are bugs, and end this rank with a traceback
        outcome = OSError(f"{type(error).__name__}: {error}")
    for failed in (outcomes := exchange(outcome)):
        if isinstance(failed, OSError | UserError):
            raise failed
    return outcomes


def refusal(final: Path, error: OSError) -> UserError:
    """That the checkpoint ``final`` could not be written."""
    what = f"the checkpoint {final.name} could not be written to {final.parent}: {error.strerror or error}"
    remedy = "; free space or give another --output_dir" if error.errno else ""
    return UserError(f"{what}. Earlier checkpoints are untouched{remedy}.")


def make_empty(partial: Path) -> None:
    """Makes the folder of a checkpoint that is being written."""
    if partial.exists() or partial.is_symlink():
        remove(partial)
    make_folder(partial)


def write_blocks(partial: Path, blocks: Mapping[str, Mapping[str, Block]], rank: int) -> Written:
    """Writes one rank's blocks: one file per section, none for a section without blocks."""
    files, rows = {}, []
    for section, named in blocks.items():
        if named:
            path = partial / f"{section}-{rank:05d}.safetensors"
            files[path.name] = _sealed(path, _safetensors({name: block.tensor for name, block in named.items()}))
            rows += [(section, n, p.shape, [path.name, p.offsets, tuple(p.tensor.shape)]) for n, p in named.items()]
    return files, rows


def complete(partial: Path, final: Path, values: Mapping[str, Any], written: Sequence[Written]) -> None:
    """Index, the rest of the state, manifest and final name: done by one rank when all have written their blocks."""
    files = {name: entry for rank_files, _ in written for name, entry in rank_files.items()}
    index: dict[str, dict[str, Any]] = {"model": {}, "optimizer": {}}  # a fork may add sections
    for _, rows in written:
        for section, name, shape, place in rows:
            index.setdefault(section, {}).setdefault(name, {"shape": shape, "blocks": []})["blocks"].append(place)
    for name, file in files.items():
        if not (partial / name).exists() or (partial / name).stat().st_size != file["bytes"]:
            raise OSError(f"{name} of another host is not there: all hosts must share the folder")
    for name, content in ((INDEX, index), (STATE, values)):
        files[name] = _sealed(partial / name, [json.dumps(content, indent=1).encode()])
    _sealed(partial / MANIFEST, [json.dumps({"step": values["progress"]["step"], "files": files}, indent=1).encode()])
    put_in_place(partial, final)


def put_in_place(partial: Path, final: Path) -> None:
    """Renames a folder, whose files are synced, to its final name; then removes the folder that had this name."""
    sync(partial)
    old = final.with_name(f"{PARTIAL}old-{final.name}")
    shutil.rmtree(old, ignore_errors=True)  # of a run that was killed right here
    if final.is_symlink():  # where it leads to is not the run's own
        remove(final)
    elif final.exists():
        final.rename(old)
    partial.rename(final)
    sync(final.parent)
    shutil.rmtree(old, ignore_errors=True)


def _sealed(path: Path, pieces: Iterable[Any]) -> dict[str, Any]:
    """Writes and syncs a file; returns its size, and the digest of what was in memory."""
    found, size_bytes = xxhash.xxh3_128(), 0
    with path.open("wb") as file:
        for piece in pieces:
            found.update(piece)
            size_bytes += file.write(piece)
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": size_bytes, "digest": found.hexdigest()}


def _safetensors(tensors: Mapping[str, Tensor]) -> Iterator[Any]:
    """The pieces of a file of ``tensors`` as safetensors lays it out, one tensor at a time in host memory."""
    header, end = {}, 0
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES:
            raise UserError(f"{name} is {tensor.dtype}, which checkpoints cannot hold: use persistent=False.")
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": tuple(tensor.shape)}
        header[name]["data_offsets"] = [end, end := end + tensor.nbytes]
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for tensor in tensors.values():
        yield tensor.cpu().reshape(-1).view(torch.uint8).numpy().data
