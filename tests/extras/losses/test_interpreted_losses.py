"""The kernels of libraries, run by Triton's interpreter where there is no card: losses and gradients are right."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from support import ROOT

KERNELS = ROOT / ".venv-kernels"
"""Where ``kernels.sh`` installs."""
WHERE = {
    "liger_kernel": "; tests/extras/losses/kernels.sh installs both",
    "cut_cross_entropy": "; the package index has only 25.1, which is too old: pip install -e '.[cce]'",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "package", "cases", "margin"),
    [("liger", "liger_kernel", 40, 1e-6), ("cce", "cut_cross_entropy", 2, 1e-5)],  # cce rounds each loss to fp16
)
def test_interpreted_kernel_is_as_good_as_all_logits(kernel: str, package: str, cases: int, margin: float) -> None:
    """Smoothing, z-loss, caps, a bias, ignored labels and loss scaling, in each type in which the kernel is offered."""
    absent = [name for name in ("triton", package) if find_spec(name) is None]
    if missing := [name for name in absent if not (KERNELS / name).is_dir()]:
        pytest.skip(f"{' and '.join(missing)} not installed{WHERE[package]}")
    words = [sys.executable, str(Path(__file__).with_name("interpreted.py")), kernel]
    paths = os.pathsep.join([str(ROOT), os.environ["PYTHONPATH"], *([str(KERNELS)] if absent else [])])
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": paths}
    done = subprocess.run(words, capture_output=True, text=True, timeout=500, env=environment)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == cases
    for row in found:
        assert all(own < 2.5 * usual + margin for own, usual in zip(row["own"], row["usual"], strict=True)), row
