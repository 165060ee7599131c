"""The command line of a study: its own flags, and the training flags of its recipe."""

from __future__ import annotations

import argparse
import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scripts.benchmarks import building
from train.config import argument
from train.memory.__main__ import Parser, numbers, positive
from train.memory.predict import Job, Target
from train.records import UsageError, UserError

if TYPE_CHECKING:
    from train.config import Config

DESCRIPTION = """\
How sequence length and micro-batch size trade against memory and speed, with and without each technique.

    python scripts/study.py --config recipes/quickstart.yaml --lengths 512,1024,2048,4096 --micro_batch_sizes 1,2,4
    python scripts/study.py --config recipe.yaml --techniques baseline,checkpointing+chunked_loss --budget_gib 24

Every optimizer step of a study has the same number of tokens: smaller micro-batches accumulate more, so that all cells
do the same work. A cell is the real step of the real model on random tokens, in a process of its own: running out of
memory costs one cell. Its memory is predicted first; on a CPU a cell that would need more than --limit_gib is not run.
Results are kept as they come, and the same command continues where an earlier one stopped.
"""
PARTS: dict[str, dict[str, Any]] = {
    "baseline": {},
    "checkpointing": {"gradient_checkpointing": "full"},
    "selective": {"gradient_checkpointing": "selective"},
    "chunked_loss": {"loss": "chunked"},
    "bf16": {"mixed_precision": "bf16"},
}
"""The flags that a technique changes; several are joined by +. The baseline has no checkpointing, all logits at once
and the recipe's precision."""
DEFAULT_TECHNIQUES = "baseline,checkpointing,chunked_loss,checkpointing+chunked_loss"
LIMIT_SHARE = 0.6
"""Of the available memory: the default of --limit_gib on a CPU. The rest is for Python, its libraries and others."""


@dataclass(frozen=True)
class Request:
    """A parsed command line."""

    config: Config
    vocab_size: int
    num_labels: int
    lengths: tuple[int, ...]
    micro_batch_sizes: tuple[int, ...]
    techniques: dict[str, dict[str, Any]]
    """Changed flags by name."""
    tokens_per_update: int
    budget_bytes: int
    limit_bytes: int | None
    """None on a card, where running out of memory harms nobody else."""
    steps: int
    seconds_per_cell: float
    stop_after_seconds: float
    output: Path
    again: bool
    target: Target


def read_request(arguments: Sequence[str]) -> Request:
    """Separates the study's flags from training flags and checks both.

    Raises:
        UsageError: a flag has a value that cannot work.
        UserError: the size of the vocabulary is not known.
    """
    own, words = _own_flags().parse_known_args(list(map(argument, arguments)))
    techniques = {name: changes_of(name) for name in own.techniques}
    lengths, sizes = own.lengths, own.micro_batch_sizes
    if min(lengths) < 2:
        raise UsageError("--lengths: a sequence has at least 2 tokens.")
    config = building.parsed_config(words)
    tokens = own.tokens_per_update or max(lengths) * max(sizes)
    if tokens < min(lengths) * min(sizes):
        raise UsageError(
            f"--tokens_per_update {tokens}: the smallest micro-batch has {min(lengths) * min(sizes):,} tokens already."
        )

    from train.extras.host_memory import free_host_bytes
    from train.memory.question import position_limit, vocabulary_size

    classifies = building.is_classifier(config)
    if classifies and not any(word.startswith("--techniques") for word in arguments):  # few classes: nothing to save
        techniques = {name: changes for name, changes in techniques.items() if "loss" not in changes}
    limit = position_limit(config)
    if limit is not None and max(lengths) > limit:
        raise UsageError(
            f"--lengths: {max(lengths):,} is more than the model's {limit:,} positions. Leave it out, or give a "
            "model_config with more max_position_embeddings."
        )
    vocab_size = own.vocab_size or vocabulary_size(config)
    target = _target()
    limit_bytes = own.limit_gib and int(own.limit_gib * 2**30)
    if limit_bytes is None and target.device_type == "cpu":
        limit_bytes = int(LIMIT_SHARE * free_host_bytes())
    return Request(
        config=config,
        vocab_size=vocab_size,
        num_labels=own.num_labels if classifies else 0,
        lengths=lengths,
        micro_batch_sizes=sizes,
        techniques=techniques,
        tokens_per_update=tokens,
        budget_bytes=int(own.budget_gib * 2**30),
        limit_bytes=limit_bytes,
        steps=own.steps,
        seconds_per_cell=own.seconds_per_cell,
        stop_after_seconds=60 * own.stop_after_minutes,
        output=own.output,
        again=own.again,
        target=target,
    )


def pages_of(arguments: Sequence[str]) -> Path | None:
    """The results file of --pages_of, if it is given.

    Raises:
        UsageError: there is no such file.
    """
    path = _own_flags().parse_known_args(list(map(argument, arguments)))[0].pages_of
    if path is not None and not path.is_file():
        raise UsageError(f"--pages_of {path}: there is no such file. Give the sweep.json of an earlier study.")
    return path


def _own_flags() -> Parser:
    parser = Parser(
        prog="scripts/study.py sweep",
        usage="scripts/study.py sweep --config RECIPE [flags below] [training flags]",
        description=DESCRIPTION,
        epilog="Every flag of the training command line may be given too (train/main.py --help). The data is not read.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )

    def add(name: str, **options: Any) -> None:
        parser.add_argument(f"--{name}", **options)

    add("lengths", metavar="N,N...", type=numbers, default="512,1024,2048,4096", help="tokens (default: %(default)s)")
    add("micro_batch_sizes", metavar="N,N...", type=numbers, default="1,2,4,8", help="(default: %(default)s)")
    add(
        "techniques",
        metavar="NAME,NAME...",
        type=_names,
        default=DEFAULT_TECHNIQUES,
        help=f"of {', '.join(PARTS)}, and several joined by + (default: %(default)s; without chunked_loss for a task "
        "with classes of its own)",
    )
    add(
        "tokens_per_update",
        metavar="N",
        type=positive,
        help="tokens of one optimizer step; a micro-batch that does not divide them is left out (default: those of "
        "the largest micro-batch)",
    )
    add("budget_gib", metavar="GIB", type=_amount, default=8.0, help="memory for which to show what fits (default: 8)")
    add(
        "limit_gib",
        metavar="GIB",
        type=_amount,
        help=f"run no cell that is predicted to need more (default: {100 * LIMIT_SHARE:.0f} %% of the available "
        "memory on a CPU, none on a GPU)",
    )
    add("steps", metavar="N", type=positive, default=3, help="timed steps of a cell (default: 3)")
    add(
        "seconds_per_cell",
        metavar="S",
        type=_amount,
        default=30.0,
        help="take fewer steps beyond it (default: 30)",
    )
    add("stop_after_minutes", metavar="M", type=_amount, default=math.inf, help="start no cell after this time")
    add("vocab_size", metavar="N", type=positive, help="tokens of the vocabulary, if only the data tells")
    add("num_labels", metavar="N", type=positive, default=2, help="classes of a classifier (default: 2)")
    shown = "where the table goes (default: %(default)s)"
    parser.add_argument("--output", "--output_dir", metavar="DIR", type=Path, default=Path("runs/sweep"), help=shown)
    add("pages_of", metavar="FILE", type=Path, help="measure nothing: write the pages of this sweep.json again")
    add("again", action="store_true", help="measure again what DIR holds already")
    return parser


def _names(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(part.strip() for part in text.split(",")))


def _amount(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < (value := float(text)) < math.inf:
            return value
    raise argparse.ArgumentTypeError(f"{text!r} is not a number above zero")


def changes_of(technique: str) -> dict[str, Any]:
    """The settings that a technique changes, by flag.

    Raises:
        UsageError: there is no such technique, or its parts exclude each other.
    """
    parts = technique.split("+")
    for part in parts:
        if part not in PARTS:
            raise UsageError(f"--techniques: {part!r} is none of {', '.join(PARTS)}. Join several with +.")
    flags = [flag for part in parts for flag in PARTS[part]]
    if len(flags) != len(set(flags)):
        raise UsageError(f"--techniques: the parts of {technique} exclude each other. Keep one of them.")
    changes: dict[str, Any] = {"gradient_checkpointing": "none", "loss": "full"}
    for part in parts:
        changes |= PARTS[part]
    if changes["gradient_checkpointing"] == "none":
        changes["gradient_checkpointing_every_n_layers"] = 1
    return changes


def _target() -> Target:
    """The device that a run would take here.

    Raises:
        UserError: its memory cannot be measured.
    """
    device = building.training_device()
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"memory on {device.type} cannot be measured here: set ACCELERATE_USE_CPU=true for the CPU.")
    return building.this_target() if device.type == "cuda" else Target("cpu")


def shapes(
    lengths: Sequence[int], micro_batch_sizes: Sequence[int], tokens_per_update: int
) -> Iterator[tuple[int, int, int, str | None]]:
    """(length, micro-batch size, accumulation, why it is left out or None) of the whole grid."""
    for length in lengths:
        for size in micro_batch_sizes:
            accumulation, rest = divmod(tokens_per_update, size * length)
            problem = None
            if not accumulation:
                problem = f"more than the {tokens_per_update:,} tokens of an update"
            elif rest:
                problem = f"its tokens do not divide the {tokens_per_update:,} tokens of an update"
            yield length, size, accumulation, problem


def job_for(request: Request, technique: str, length: int, size: int, accumulation: int) -> Job:
    """The step of one cell.

    Raises:
        UsageError: the technique and the recipe exclude each other.
    """
    from train.memory.question import job_of

    changes = {
        "max_length": length,
        "micro_batch_size": size,
        "gradient_accumulation_steps": accumulation,
        "global_batch_size": None,
    }
    config = building.changed_config(request.config, {**request.techniques[technique], **changes})
    job = job_of(config, request.target, request.vocab_size, request.num_labels)
    return replace(job, eval_batch_size=None)
