"""Whether a checkpoint belongs to this run: the same data, model, batch and seed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from train.batching import arithmetic_of
from train.config import to_values
from train.data import PreparedData
from train.extras.digests import tokenizer_digest
from train.records import Run, UserError


def identity(run: Run, data: PreparedData, training_digest: str) -> dict[str, Any]:
    """The settings of the core that must be equal for a run to resume; extras add theirs."""
    values = to_values(run.config)
    same = ("task", "mlm_probability", "model", "model_config", "dtype", "optimizer", "seed")
    return {
        **{name: values[name] for name in same},
        "tokenizer": tokenizer_digest(data.tokenizer),
        "training data": training_digest,
        "global_batch_size": arithmetic_of(run.config, run.launch.dp_size).global_batch_size,
        "mixed_precision": run.accelerator.mixed_precision,
    }


def compare(checkpoint: Path, own: Mapping[str, Any], stored: Mapping[str, Any], allow_changes: bool) -> None:
    """Raises UserError where the run of ``checkpoint`` and this one differ, and that is not allowed."""
    present = json.loads(json.dumps(dict(own)))
    # An option of an extra that is not here any more counts as switched off.
    changed = [k for k in {**present, **stored} if (present.get(k) or None) != (stored.get(k) or None)]
    if changed and not allow_changes:
        lines = "; ".join(f"{name}: was {stored.get(name)!r}, is {present.get(name)!r}" for name in changed)
        raise UserError(
            f"{checkpoint} belongs to a run with other settings ({lines}). Give another --output_dir for a new "
            "run, --resume never to start from scratch here, or --allow_changes_on_resume to continue with the "
            "new ones."
        )
    for name in {"optimizer", "global_batch_size"}.intersection(changed):  # allowed or not
        raise UserError(
            f"{checkpoint} was written with {name} {stored.get(name)}; the steps that are left cannot be made "
            f"with {present.get(name)}. Continue with the old one, or begin a new run from final/ (--model)."
        )
