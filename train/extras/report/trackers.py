"""TensorBoard, trackio and wandb, through accelerate: what ``report_to`` names sees the settings and the metrics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from train.config import Config, to_values
from train.extras.report import Options
from train.records import UserError

if TYPE_CHECKING:
    from accelerate import Accelerator

PROJECT = "long-sequence-template"  # under which trackers group runs


def start_trackers(accelerator: Accelerator, config: Config) -> None:
    """Opens a run with each tool of ``report_to`` and hands it the configuration, without what may be a secret.

    Raises UserError for a tool that cannot start (wandb without a login, for example).
    """
    wanted = config.of(Options).report_to
    run_name = config.of(Options).run_name or Path(config.output.output_dir).resolve().name
    options = {"trackio": {"name": run_name}, "wandb": {"name": run_name, "dir": config.output.output_dir}}
    try:
        accelerator.init_trackers(PROJECT, config=tracked_config(config), init_kwargs=options)
    except ImportError as error:
        raise UserError(f"report_to: {error}. pip install '.[{','.join(wanted)}]' adds what is missing.") from error
    except Exception as error:  # each tool raises its own kinds of error
        hint = " WANDB_MODE=offline keeps the run on this machine." if "wandb" in wanted else ""
        raise UserError(f"report_to: {', '.join(wanted)} did not start: {error}.{hint}") from error


def tracked_config(config: Config) -> dict[str, int | float | str]:
    """The configuration as flat numbers and texts; mappings get dotted names, lists become text.

    Texts whose name contains token, key, secret or password are left out, because a tracker may be public.
    """
    return dict(_flat(to_values(config)))


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, int | float | str]]:
    for key, value in values.items():
        name = f"{prefix}{key}"
        plain = name.lower().replace("tokenizer", "")
        if isinstance(value, Mapping):
            yield from _flat(value, f"{name}.")
        elif isinstance(value, int | float):
            yield name, value
        elif value is not None and not any(word in plain for word in ("token", "key", "secret", "password")):
            yield name, ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
