"""Loads, into the process that all others are forked from, what a run loads."""

import logging
import os
import sys
from contextlib import suppress

os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # as train/main.py sets it before torch is imported

import accelerate  # noqa: F401
import datasets  # noqa: F401
import evaluate  # noqa: F401
import pytest  # noqa: F401
import torch  # noqa: F401
import transformers.models.gpt2.modeling_gpt2
import transformers.models.llama.modeling_llama  # noqa: F401

import train.data
import train.evaluation
import train.extras.activations.recompute
import train.extras.activations.tiling
import train.extras.endurance.lost_rank
import train.extras.long_sequences.attention
import train.extras.long_sequences.packing
import train.extras.parallelism.deepspeed_engine
import train.loop
import train.main
import train.model
import train.outputs
import train.state  # noqa: F401

logging.captureWarnings(True)
with suppress(ImportError):  # accelerate loads it at the end of each run where it is installed
    from deepspeed.accelerator import get_accelerator

    get_accelerator()  # says on standard output that there is no card
with suppress(ImportError):
    from train.extras.report import charts

    charts.svg = lambda *arguments, **options: "<svg></svg>"  # as conftest.py does in its process

with suppress(ImportError):
    from faults import predictors

    from train.memory.predict import Predictor

    Predictor.start = predictors.start  # pyright: ignore

sys.stdout.flush()  # else each fork prints what libraries have said
