"""ZeRO's part of each rank (arXiv 1910.02054), as DeepSpeed keeps it, for predictions.

DeepSpeed's engine needs data. So forward and backward are those of the model as the engine holds it, in half precision
where mixed precision is asked for, its weights sharded in stage 3 as FSDP2 shards them; and the engine's own buffers
are added: the bytes per parameter of DeepSpeed 0.19 on two CPU processes. Peaks were not compared with a real run.
"""

from __future__ import annotations

from typing import Any

STAGE = {"zero2": 2, "zero3": 3}
HALF = {"fp16": "float16", "bf16": "bfloat16"}
MOMENTS = {"adamw": 2, "adamw_8bit": 2, "sgd": 1, "adafactor": 0}  # per parameter; Adafactor's are few


def engine_values(values: dict[str, Any]) -> dict[str, Any]:
    """The configuration of the model that the engine holds; the engine's own update is not run."""
    dtype = HALF.get(values["mixed_precision"] or "no", values["dtype"])
    return {**values, "dtype": dtype, "mixed_precision": "no", "optimizer": "sgd", "sgd_momentum": 0.0}


def held_bytes(values: dict[str, Any], num_trained: int, world_size: int) -> dict[str, int]:
    """This rank's part of what the engine holds, by kind, all in fp32.

    Copies of trained weights, also of those in fp32, with the optimizer's moments; gradients; and the buffer of those
    that are summed over the ranks at once, held all the time, to be safe.
    """
    # here: --help does not wait for torch, and the second may be deleted
    from train.extras.meter.tracker import GRADIENTS, OPTIMIZER_STATE, WORKSPACE
    from train.extras.parallelism.deepspeed_engine import MAX_REDUCE_BUCKET_ELEMENTS

    share = 4 * -(-num_trained // world_size)
    bucket = 4 * min(MAX_REDUCE_BUCKET_ELEMENTS, num_trained)
    return {OPTIMIZER_STATE: (1 + MOMENTS[values["optimizer"]]) * share, GRADIENTS: share, WORKSPACE: bucket}
