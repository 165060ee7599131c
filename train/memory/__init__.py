"""Memory before, during and after a run: predict, plan, rehearse, explain. ``python -m train.memory`` plans."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from train.config import option
from train.extras import Extra

if TYPE_CHECKING:
    from train.batching import Batches
    from train.config import Config
    from train.data import PreparedData
    from train.launch import Launch
    from train.loop import Parts
    from train.records import Run, StopRequest


@dataclass(frozen=True)
class Options:
    """Memory: predict and rehearse."""

    memory_budget_gib: float | None = option(None, "What auto may fill of each device; default: what is free.", gt=0)
    predict_memory: bool = option(True, "Predict the peak in another process, and show it next to the measured one.")
    rehearse: bool = option(True, "Before step 1 make the longest step, without a trace.")


class Room(Extra):
    Options = Options
    needs = ("meter",)

    def __init__(self) -> None:
        self._session: Any = None

    @contextmanager
    def open(self, config: Config, launch: Launch, stop: StopRequest) -> Iterator[None]:
        try:
            yield
        finally:
            if self._session is not None:
                self._session.close()

    def change_config(self, run: Run, data: PreparedData) -> Config:
        from train.memory.session import MemorySession

        self._session = MemorySession(run, data)
        return self._session.settle()

    def prepared(self, run: Run, data: PreparedData, batches: Batches) -> None:
        self._session.ask(batches)

    def ready(self, run: Run, parts: Parts) -> None:
        if not run.outputs.is_complete(parts.goal.total_steps):
            self._session.rehearse(parts)

    def failed(self, run: Run | None, error: Exception) -> str | None:
        from train.extras.host_memory import is_out_of_memory

        if self._session is None or not (hasattr(error, "fault") or is_out_of_memory(error)):
            return None
        return self._session.explain(error)

    def summary(self, run: Run) -> dict[str, Any]:
        return self._session.summary()
