"""What several test files import."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ACCELERATE_LAUNCH = (sys.executable, "-m", "accelerate.commands.launch")
"""``accelerate launch``, whether or not it is on the PATH."""
Run = Callable[..., "subprocess.CompletedProcess[str]"]
