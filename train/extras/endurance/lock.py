"""One run in a folder at a time."""

import errno
import os
import platform
import time
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any

from train.figures import writable
from train.records import UserError, exchange

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

NAME = ".lock"
WITHOUT = "output_dir: this file system has no locks. Take care that no other run writes to the same folder."


def lock(folder: Path) -> AbstractContextManager[Any]:
    """Locks ``folder`` until the context is left or the process ends; says so where the file system cannot lock.

    It is a POSIX lock, which NFS has too (not run there). Raises UserError where it is taken or cannot be written.
    """
    if fcntl is None:
        print(WITHOUT)
        return nullcontext()
    with writable(folder / NAME):
        file = (folder / NAME).open("a+", encoding="utf-8")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            print(WITHOUT)
        else:
            file.close()
            time.sleep(0.5)  # the other one may have started at the same moment, and not have written its name yet
            what = f"{folder} is in use by {_named_in(folder) or 'another process'}"
            raise UserError(f"{what}. Wait for it, end it, or give another --output_dir.") from None
    with writable(folder / NAME):
        file.truncate(0)
        file.write(_holder())
        file.flush()
        os.fsync(file.fileno())  # other hosts look, see refuse_separate
    return file


def refuse_separate(folder: Path, is_first: bool) -> None:
    """Raises UserError on all ranks where some host does not see the first one's ``folder``, as checkpoints need."""
    holder, tries = exchange(_holder())[0], 0
    with suppress(OSError):  # or NFS would not look for a minute whether what was not there before is there now
        folder.mkdir(parents=True, exist_ok=True)
    while not (is_seen := is_first or _named_in(folder) == holder) and tries < 20:
        time.sleep(0.5)
        tries += 1
    if blind := [host for seen, host in exchange((is_seen, platform.node())) if not seen]:
        what = f"output_dir: {folder} on {blind[0]} is not the folder of {holder}"
        raise UserError(f"{what}. Give one that all hosts share, see docs/multi_node.md.")


def _holder() -> str:
    return f"process {os.getpid()} on {platform.node()}"


def _named_in(folder: Path) -> str:
    with suppress(OSError, ValueError):
        return (folder / NAME).read_text(encoding="utf-8")
    return ""
