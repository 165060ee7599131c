"""Loads, into the process that all others are forked from, what a run loads."""

import logging
import os
import pkgutil
import sys
from contextlib import suppress
from importlib import import_module

os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # as train/main.py sets it before torch is imported

import accelerate  # noqa: F401
import datasets  # noqa: F401
import evaluate  # noqa: F401
import matplotlib.backends.backend_svg
import matplotlib.figure  # noqa: F401
import pytest  # noqa: F401
import torch  # noqa: F401
import transformers.models.gpt2.modeling_gpt2
import transformers.models.llama.modeling_llama  # noqa: F401
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

import train

for module in pkgutil.walk_packages(train.__path__, "train."):
    # The last two take functions by name that tests replace.
    if not module.name.endswith(("__main__", "memory.session", "memory.trial")):
        with suppress(ImportError):  # of a library that is not installed
            import_module(module.name)
get_checkpoint_conversion_mapping("gpt2")  # compiles a thousand expressions, which transformers then keeps

logging.captureWarnings(True)
with suppress(ImportError):  # accelerate loads it at the end of each run where it is installed
    from deepspeed.accelerator import get_accelerator  # type: ignore

    get_accelerator()  # says on standard output that there is no card
with suppress(ImportError):
    from train.extras.report import charts, sample

    # As conftest.py does in its process:
    charts.svg = lambda *arguments, **options: "<svg></svg>"
    sample.sample = lambda *arguments: None  # type: ignore

with suppress(ImportError):
    from train.memory.predict import Predictor

    Predictor.start = import_module("faults.predictors").start  # where a fork has none, it is not here

sys.stdout.flush()  # else each fork prints what libraries have said
