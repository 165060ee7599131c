"""The planner's process, forked from one that has the libraries loaded instead of started from scratch."""

from __future__ import annotations

import os
import sys
import tempfile
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from faults.processes import context

FOREIGN = ("ACCELERATE_", "RANK", "LOCAL_", "WORLD_SIZE", "MASTER_")  # of the run that asks


class Forked:
    """What the planner uses of ``subprocess.Popen``."""

    def __init__(self) -> None:
        theirs, jobs = os.pipe()
        answers, ours = os.pipe()
        self.errors = tempfile.NamedTemporaryFile("w+")  # noqa: SIM115 - closed with the process
        environment = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
        ends = Connection(theirs, writable=False), Connection(ours, readable=False)
        self._process = context().Process(target=_serve, args=(*ends, self.errors.name, environment))
        self._process.start()
        for end in ends:  # else nobody would notice that the process has ended
            end.close()
        self.stdin, self.stdout = os.fdopen(jobs, "wb"), os.fdopen(answers, "rb")

    def kill(self) -> None:
        self._process.kill()

    def wait(self) -> int | None:
        self._process.join()
        return self._process.exitcode

    def communicate(self) -> None:
        self.wait()
        for end in self.stdin, self.stdout:
            with suppress(BrokenPipeError):
                end.close()


def start(predictor: Any) -> Any:
    """In place of ``Predictor.start``."""
    if predictor._process is None:
        predictor._process = Forked()
        predictor._errors = predictor._process.errors
    return predictor._process


def _serve(jobs: Connection, answers: Connection, errors: str, environment: dict[str, str]) -> None:
    import torch

    from train.memory.server import main

    os.dup2(jobs.fileno(), 0)
    os.dup2(answers.fileno(), 1)
    os.dup2(os.open(errors, os.O_WRONLY | os.O_APPEND), 2)
    sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w")
    sys.__stdout__ = sys.stdout  # which keeps it open
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    main()
