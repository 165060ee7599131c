"""Every signal, to a process, its group or its launcher, with and without workers, at every moment of a run."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from faults.stopping import Stop, covering_stops, every_stop, stops_and_resumes, whole_run

QUICK = [Stop(signal.SIGTERM, "group", 2, "loading"), Stop(signal.SIGTERM, "launcher", 2, "training")]
STOPS = every_stop() if os.environ.get("STOP_MATRIX") == "all" else covering_stops()
"""STOP_MATRIX=all stops at all places, 216, instead of some in which each two values meet."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return whole_run(tmp_path_factory.mktemp("whole"))


@pytest.mark.parametrize("stop", QUICK, ids=str)
def test_run_that_is_asked_to_stop_leaves_a_checkpoint(tmp_path: Path, whole: Path, stop: Stop) -> None:
    stops_and_resumes(tmp_path, whole, stop)


@pytest.mark.slow
@pytest.mark.parametrize("stop", STOPS, ids=str)
def test_every_stop_leaves_a_checkpoint(tmp_path: Path, whole: Path, stop: Stop) -> None:
    stops_and_resumes(tmp_path, whole, stop)
