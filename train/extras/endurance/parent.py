"""A training process ends when its launcher has died: an orphan would train on, unseen, and hold its GPUs."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

LAUNCHERS = ("TORCHELASTIC_RUN_ID", "ACCELERATE_MIXED_PRECISION")
"""Variables that torchrun and ``accelerate launch`` always set for the processes that they start."""


def follow_launcher(environment: Mapping[str, str] = os.environ) -> None:
    """Has the kernel send this process SIGTERM, the request to save and stop, when its launcher dies, even by SIGKILL.

    Only on Linux, and only for a process that a launcher started: one that was started from a shell, perhaps with
    nohup, is meant to outlive it.
    """
    if sys.platform != "linux" or not any(name in environment for name in LAUNCHERS):
        return
    parent = os.getppid()
    set_parent_death_signal = 1  # PR_SET_PDEATHSIG, see prctl(2)
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM)
    # The kernel says nothing of a launcher that died before that call: this process has been handed to init then.
    if os.getppid() != parent or (parent == 1 and not _first_process_is_python()):
        os.kill(os.getpid(), signal.SIGTERM)


def _first_process_is_python() -> bool:
    """Whether process 1 may itself be the launcher, as in a container that runs nothing else."""
    try:
        return b"python" in Path("/proc/1/cmdline").read_bytes().split(b"\0")[0]
    except OSError:
        return True
