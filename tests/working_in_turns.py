"""What a test has done in processes of their own; a module of its own, so that these import nothing else."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path


def work_in_turns(take_turn: Callable[[], None], path: Path, name: str, turns: int) -> str:
    """Writes down when each turn begins and ends; without ``turns`` the process ends with status 3."""
    for turn in range(turns):
        with path.open("a") as file:
            file.write(f"{name}{turn} begins\n")
        time.sleep(0.05)
        with path.open("a") as file:
            file.write(f"{name}{turn} ends\n")
        take_turn()
    if turns == 0:
        sys.exit(3)
    return name * 2
