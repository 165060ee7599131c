"""ZeRO's part of each rank (arXiv 1910.02054), as DeepSpeed keeps it, for predictions.

DeepSpeed's engine does not run on tensors without data. So forward and backward are those of the model as the engine
holds it, in half precision where mixed precision is asked for, its weights sharded in stage 3 as FSDP2 shards them; and
what the engine keeps beside, which its documentation gives per parameter, is added. Not compared with a real run.
"""

from __future__ import annotations

from typing import Any

STAGE = {"zero2": 2, "zero3": 3}
_HALF = {"fp16": "float16", "bf16": "bfloat16"}
MOMENTS = {"adamw": 2, "sgd": 1, "adafactor": 0}
"""Numbers per parameter that the optimizer keeps; Adafactor's rows and columns are few."""
REDUCE_BUCKET_ELEMENTS = 500_000_000
"""DeepSpeed's default ``reduce_bucket_size``: a buffer of that many gradients is held through backward."""


def engine_values(values: dict[str, Any]) -> dict[str, Any]:
    """The configuration of the model that the engine holds; the engine's own update is not run."""
    dtype = _HALF.get(values["mixed_precision"] or "no", values["dtype"])
    return {**values, "dtype": dtype, "mixed_precision": "no", "optimizer": "sgd", "sgd_momentum": 0.0}


def state_bytes(values: dict[str, Any], num_parameters: int, world_size: int) -> int:
    """This rank's optimizer state: fp32 moments, and fp32 weights where the model's own are in half precision."""
    master = 1 if engine_values(values)["dtype"] != "float32" else 0
    return 4 * (master + MOMENTS[values["optimizer"]]) * -(-num_parameters // world_size)
