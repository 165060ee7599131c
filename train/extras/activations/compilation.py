"""``torch.compile``, layer by layer.

Each of the repeated layers is compiled in place; everything around them stays as it is. So attention keeps its causal
path (a model compiled whole builds a mask of length × length), the names of weights stay, the loss in chunks and
generation run as before, and equal layers share one compilation. The second length makes lengths symbolic in the graph,
so that further lengths are not compiled again.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from train.records import UsageError, UserError


def check_compiler(device: torch.device) -> None:
    """Raises UsageError where this machine cannot compile for ``device``: a compiler or Triton is missing."""
    if device.type == "cuda" and importlib.util.find_spec("triton") is None:
        raise UsageError("compile: needs Triton on CUDA, which is not installed: pip install triton, or leave it out.")
    compiler = os.environ.get("CXX") or {"darwin": "clang++", "win32": "cl"}.get(sys.platform, "g++")
    if not shutil.which(compiler):
        raise UsageError(
            f"compile: needs a C++ compiler, and there is no {compiler} here: install one (apt-get "
            "install g++), name it in CXX, or leave compile out."
        )


def compile_layers(model: nn.Module, backend: str | Callable[..., Any] = "inductor") -> int:
    """Compiles the repeated layers of ``model`` in place, when each is first called; returns how many there are.

    To be called before the model is wrapped or sharded, after activation checkpointing was set up. Raises UserError
    where no repeated layers are known of this model.
    """
    names = set(getattr(model, "_no_split_modules", None) or ())
    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer) or type(m).__name__ in names]
    if not layers:
        raise UserError("compile: this model has no repeated layers of transformers. Leave it out.")
    for layer in layers:
        layer.compile(backend=backend)
    return len(layers)


class Compilation(logging.Handler):
    """Counts what ``torch.compile`` does inside :meth:`listening`; ``figures`` are for ``summary.json``.

    ``tell`` is shown torch's warning that it gave a function up once, with its cause.
    """

    def __init__(self, tell: Callable[[str], None] = print) -> None:
        super().__init__(logging.WARNING)
        self.tell = tell
        self.figures: dict[str, Any] = {"compilations": 0, "recompilations": 0, "compile_seconds": 0.0}
        self.figures["recompile_limit_reached"] = None  # or why the last compilation could not be used again

    @contextmanager
    def listening(self) -> Iterator[Compilation]:
        """Counts while the context is open."""
        from torch._dynamo.callback import callback_handler

        logger = logging.getLogger("torch._dynamo.convert_frame")
        callback_handler.register_start_callback(self._started)
        callback_handler.register_end_callback(self._ended)
        logger.addHandler(self)
        try:
            yield self
        finally:
            logger.removeHandler(self)
            callback_handler.remove_end_callback(self._ended)
            callback_handler.remove_start_callback(self._started)

    def _started(self, call: Any) -> None:
        self._clock = time.perf_counter()
        if call.callback_trigger.name == "DYNAMO":
            self.figures["compilations"] += 1
            frame = re.search(r"(\d+)/(\d+)", str(call.compile_id))  # a function's number, and which time it is
            self.figures["recompilations"] += frame is not None and int(frame[2]) > 0

    def _ended(self, call: Any) -> None:
        self.figures["compile_seconds"] += time.perf_counter() - self._clock

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if "recompile_limit" in message and self.figures["recompile_limit_reached"] is None:
            reason = re.search(r"last reason: (.*)", message)
            cause = self.figures["recompile_limit_reached"] = " ".join((reason[1] if reason else message).split())[:300]
            self.tell(
                "compile: torch stopped compiling a layer and runs it uncompiled, which is correct but slow; "
                f"the last cause: {cause}"
            )

    def line(self) -> str:
        """How often torch compiled, in a sentence."""
        again = f"{self.figures['recompilations']} of them for other shapes or modes"
        return f"compile: {self.figures['compilations']} compilations, {again}, {self.figures['compile_seconds']:.1f} s"
