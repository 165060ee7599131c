"""The files of figures that a run writes, and how figures read: bytes and seconds inside, GiB and minutes shown."""

import errno
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from train.records import UserError

_SECRETS = (  # user and password of a URL, its secret parameters, tokens of the Hub
    r"(?<=:/)(/?)[^/\s@'\"]+(?=@)",
    r"(?i)([?&;#](?:[\w-]*(?:token|key|secret|pass\w*|pwd|auth|jwt|bearer|signature)|sig)=)[^&<\s'\"]+",
    r"\b(hf_)\w{20,}",
)
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)  # only writing fails so
_CONTROLS = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")  # except tabs and newlines


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a ``metrics.jsonl``, oldest first, without lines that a crash damaged; none without a file."""
    rows: list[dict[str, Any]] = []
    for line in path.read_bytes().splitlines() if path.exists() else []:
        with suppress(ValueError, LookupError, TypeError, RecursionError, OverflowError):
            row = json.loads(line)
            rows.append({**row, "kind": row["kind"], "step": int(row["step"])})
    return rows


def write_whole(path: Path, text: str) -> None:
    """Replaces ``path`` in one move: readers see the old text or the new, never half; raises UserError on failure."""
    aside = path.with_name(f".{path.name}.partial")  # the same name each time: what a killed run left is replaced
    with writable(path):
        try:
            with aside.open("w", encoding="utf-8", errors="backslashreplace", newline="\n") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            aside.replace(path)
            sync(path.parent)
        finally:
            aside.unlink(missing_ok=True)


@contextmanager
def writable(path: Path) -> Iterator[None]:
    """Makes the folder of ``path``, and a clear message of what goes wrong."""
    try:
        make_folder(path.parent)
        yield
    except OSError as error:
        where = error.filename if isinstance(error, FileExistsError) else path  # a file in place of a folder
        is_lost = where is not path and Path(where).is_symlink()  # to a disk that is not mounted
        why = f"it links to {Path(where).readlink()}, which is not a folder" if is_lost else error.strerror or error
        remedy = f"{'Free space or give' if error.errno in FULL else 'Give'} another --output_dir"
        raise UserError(f"{where}: cannot be written: {why}. {remedy}.") from None


def make_folder(path: Path) -> None:
    """Makes a folder and those above it, so that a crash of the machine does not undo it."""
    missing = [folder for folder in (path, *path.parents) if not folder.is_dir()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        sync(folder.parent)


def sync(path: Path) -> None:
    """Has the system put a file, or the names in a folder, on the disk."""
    if (is_windows := not hasattr(os, "O_DIRECTORY")) and path.is_dir():  # which it cannot open
        return
    descriptor = os.open(path, os.O_RDWR if is_windows else os.O_RDONLY)  # Windows syncs what it may write
    try:
        os.fsync(descriptor)
    except OSError as error:  # FUSE and CIFS sync only files
        if not path.is_dir() or error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def to_json(value: Mapping[str, Any], indent: int | None = None) -> str:
    """JSON of numbers, texts, tensors and arrays; numbers that are not finite become null."""
    text = json.dumps(value, default=lambda tensor: tensor.tolist())
    return json.dumps(json.loads(text, parse_constant=lambda name: None), indent=indent)


def show_error(message: str) -> None:
    rank = os.environ.get("RANK", "0")
    print(f"error{'' if rank == '0' else f' (rank {rank})'}: {without_secrets(message)}", file=sys.stderr, flush=True)


def without_secrets(text: str) -> str:
    """``text`` that may be shown and kept: without passwords in URLs, tokens, and control characters of a terminal."""
    for pattern in _SECRETS:
        text = re.sub(pattern, r"\1…", text)
    return _CONTROLS.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def several(count: int, what: str) -> str:
    """``1 row`` or ``2,000 rows``."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def gib(size_bytes: float) -> str:
    """A size in GiB (2^30 bytes), in MiB below a tenth of one."""
    if size_bytes < 0.1 * 2**30:
        return f"{size_bytes / 2**20:.1f} MiB"
    return f"{size_bytes / 2**30:.{1 if size_bytes >= 100 * 2**30 else 2}f} GiB"


def count(value: float) -> str:
    """A count in three digits: 874, 2.35k, 24.1k, 1.84M, 7.62B."""
    from tqdm import tqdm  # here: --help does not wait for it

    return f"{value:.3g}" if value < 999.5 else tqdm.format_sizeof(value).replace("G", "B")


def duration(seconds: float) -> str:
    """Seconds as the two largest of days, hours, minutes and seconds."""
    if seconds < 59.5:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    whole = round(seconds)
    parts = [(whole // 86400, "d"), (whole // 3600 % 24, "h"), (whole // 60 % 60, "min"), (whole % 60, "s")]
    return " ".join([f"{amount} {unit}" for amount, unit in parts if amount][:2])


def number(value: Any) -> str:
    """A measured number in four digits, a whole one with thousands separators; texts as they are, None as a dash."""
    if isinstance(value, float):
        return f"{value:,.0f}" if 9999.5 <= abs(value) < 1e15 else f"{value:#.4g}".rstrip(".")
    return "–" if value is None else f"{value:,}" if type(value) is int else str(value)
