"""Loads, into the process that all others are forked from, what a run loads."""

import logging
import os

os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # as train/main.py sets it before torch is imported

import accelerate  # noqa: F401
import datasets  # noqa: F401
import evaluate  # noqa: F401
import pytest  # noqa: F401
import torch  # noqa: F401
import transformers.models.gpt2.modeling_gpt2
import transformers.models.llama.modeling_llama  # noqa: F401

import train.batching.packing
import train.data
import train.evaluation
import train.layers.attention
import train.layers.compilation
import train.loop
import train.losses
import train.main
import train.modeling
import train.outputs
import train.parallel.deepspeed_engine
import train.parallel.lost_rank
import train.runtime
import train.training_state  # noqa: F401

logging.captureWarnings(True)
