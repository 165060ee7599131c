"""What a plan tells a person: the memory part by part, the fastest setting that fits, and the command to run it."""

import math
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import yaml

from train.config import Config, to_values
from train.figures import count, duration, gib
from train.memory.plan import Outcome, Plan
from train.memory.predict import OFFLOAD, ROOT
from train.memory.question import MARGIN, STAND_IN, UNPADDED, Question, Setting, position_limit


def plan_text(question: Question, plan: Plan, command: str | None, longest: bool = False) -> str:
    """A plan for the terminal, the verdict first; ``longest`` says that ``max_length`` was found, not given."""
    shown = plan.asked or plan.best or plan.smallest
    lines = [] if plan.problem is None else [f"Cannot run as it stands: {plan.problem}"]
    if longest:
        length, limit = question.config.data.max_length, position_limit(question.config) or math.inf
        may_grow = length + 1024 <= limit and OFFLOAD in question.stages[-1][1] and shown.setting.sharding != OFFLOAD
        more = " The model takes no more." if length + 1024 > limit else ""
        more = f" --sharding {OFFLOAD} may fit more: weights and optimizer in host memory." if may_grow else more
        lines.append(f"Longest that fits on {question.device.name}: {length:,} tokens.{more}")
    if plan.asked is not None or not longest:
        lines.append(_verdict(question, shown))
    lines += ["", *_parts(question, shown), "", *_proposal(question, plan, command)]
    return "\n".join([*lines, *_notes(question, plan.best or shown)])


def outcome_text(question: Question, outcome: Outcome) -> str:
    return "\n".join([_verdict(question, outcome), "", *_parts(question, outcome), *_notes(question, outcome)])


def _verdict(question: Question, outcome: Outcome) -> str:
    ranks = f"each of {question.world_size} × " if question.world_size > 1 else ""
    what = f"{question.config.architecture.name}, {count(outcome.prediction.num_parameters)} parameters, "
    what += f"{outcome.setting.micro_batch_size} × {outcome.job.length:,} tokens on {ranks}{question.device.name}"
    needed, room = outcome.needed_bytes, question.room_bytes
    if outcome.fits:
        return f"Fits: {what}: {gib(needed)} of {gib(room)}."
    return f"Does not fit: {what}: {gib(needed)}, {gib(needed - room)} more than fits."


def _parts(question: Question, outcome: Outcome) -> list[str]:
    prediction, device = outcome.prediction, question.device
    on_card = [
        ("has to reserve", prediction.least_reserved_bytes, "the least that the caching allocator needs"),
        ("CUDA context", device.context_bytes, "driver and kernels"),
        ("NCCL", question.nccl_bytes, f"buffers of one group of {question.world_size}"),
        ("needed", outcome.needed_bytes, "that plus the CUDA context" + (" and NCCL" if question.nccl_bytes else "")),
    ]
    rows = [
        *((f"  {kind}", size, "") for kind, size in prediction.bytes_by_kind.items()),
        ("peak", prediction.peak_bytes, f"in {prediction.phase} ({prediction.operator})"),
        *([] if question.on_cpu else on_card),
        ("room", question.room_bytes, f"{gib(question.total_bytes)} less {100 * MARGIN:.0f} %"),
        ("host memory", outcome.host_bytes, "for what is offloaded, per process"),
    ]
    lines = [f"{outcome.setting}:", *(f"{name:<18}{gib(n):>12}  {note}".rstrip() for name, n, note in rows if n)]
    if device.memory_bytes_per_second:
        seconds = prediction.seconds + outcome.link_seconds
        taken = duration(seconds) if seconds >= 0.1 else f"{1e3 * seconds:.0f} ms"
        rate = count(question.world_size / outcome.seconds_per_token)
        lines.append(f"{'time, estimated':<18}{taken:>12}  forward and backward of a micro-batch: {rate} tokens/s")
    return lines


def _proposal(question: Question, plan: Plan, command: str | None) -> list[str]:
    best, smallest = plan.best, plan.smallest
    if best is None:
        kind, size = max(smallest.prediction.bytes_by_kind.items(), key=lambda entry: entry[1])
        return [
            f"Nothing fits. The least is {gib(smallest.needed_bytes)}, {gib(size)} of it {kind}:",
            f"  {smallest.setting}",
            "  --max_length auto finds how long sequences may be.",
            f"  A device of {math.ceil(smallest.needed_bytes / (1 - MARGIN) / 2**30)}GiB would hold it.",
        ]
    if plan.asked == best:
        return ["Nothing that fits is estimated to be faster. To run it:", f"  {command}"]
    gain = ""
    if plan.asked is not None and best.seconds_per_token and not question.on_cpu:  # whose rates only rank
        gain = f", {plan.asked.seconds_per_token / best.seconds_per_token:.2f} × the speed of the above (estimated)"
    return [
        f"Fastest that fits, global batch {question.global_batch_size} kept: {gib(best.needed_bytes)}{gain}",
        f"  {best.setting}",
        *([f"  host memory for what is offloaded: {gib(best.host_bytes)} per process"] if best.host_bytes else []),
        f"  {command}",
    ]


def _notes(question: Question, outcome: Outcome) -> list[str]:
    notes = list(outcome.prediction.notes)
    if outcome.job.padded:
        notes.append("examples are assumed to differ in length, so that they need an attention mask")
    if not question.pads:
        notes.append(UNPADDED)
    if question.device.kind == "cpu":
        notes.append("room is what is free of this machine's memory; Python and its libraries take about 0.5 GiB of it")
    elif not question.device.memory_bytes_per_second and not question.on_cpu:
        notes.append(f"the speed of {question.device.name} is unknown: settings are ranked by the speed of {STAND_IN}")
    if question.world_size > 1:
        notes.append("estimates leave out the communication between devices")
    return ["", *(f"Note: {note}." for note in notes)] if notes else []


def plan_values(question: Question, plan: Plan, command: str | None) -> dict[str, Any]:
    outcomes = {"asked": plan.asked, "best": plan.best, "smallest": plan.smallest}
    return {
        "device": asdict(question.device),
        "world_size": question.world_size,
        "global_batch_size": question.global_batch_size,
        "max_length": question.config.data.max_length,
        **{name: outcome and outcome_values(question, outcome) for name, outcome in outcomes.items()},
        "problem": plan.problem,
        "command": command,
    }


def outcome_values(question: Question, outcome: Outcome) -> dict[str, Any]:
    values = asdict(outcome)
    if not question.device.memory_bytes_per_second:
        values["prediction"]["seconds"] = None
    del values["job"]
    shares = {"context_bytes": question.device.context_bytes, "nccl_bytes": question.nccl_bytes}
    return {**values, **shares, "room_bytes": question.room_bytes, "max_length": outcome.job.values["max_length"]}


def command(question: Question, setting: Setting, words: Sequence[str], asked: Config) -> str:
    """The command that trains with ``setting``: the ``words`` that a person gave, and flags for what has changed.

    ``asked`` is the configuration by these words; the one of ``question`` has lengths and sizes that were left open.
    """
    wanted, given = {**to_values(question.config), **question.changes(setting)}, to_values(asked)
    changes = {name: value for name, value in wanted.items() if value != given[name]}
    if question.config.optimization.mixed_precision is None:
        changes.pop("mixed_precision", None)  # then the launcher alone chooses it
    kept = without_flags(words, set(changes))
    flags = [word for name, value in changes.items() if value is not None for word in (f"--{name}", str(value))]
    on_cpu, precision = question.device.kind == "cpu", setting.mixed_precision or "no"
    launch = launcher_words(on_cpu, question.world_size, setting.sharding, precision)
    return shlex.join(["accelerate", "launch", *launch, "train/main.py", *kept, *flags])


def without_flags(words: Sequence[str], names: set[str]) -> list[str]:
    """``words`` without the flags called ``names`` and their values."""
    kept, drops = list[str](), False
    for word in words:
        if word.startswith("--"):
            drops = word[2:].partition("=")[0].replace("-", "_") in names
        if not drops:
            kept.append(word)
    return kept


def launcher_words(on_cpu: bool, world_size: int, sharding: str, precision: str) -> list[str]:
    """Arguments of ``accelerate launch``: a file of ``accelerate_configs/``, and flags for values that it lacks."""
    alone = world_size == 1 and sharding != OFFLOAD
    file = f"accelerate_configs/{('cpu' if on_cpu else 'single_gpu') if alone else sharding}.yaml"
    values = yaml.safe_load((ROOT / file).read_text(encoding="utf-8"))
    wanted = {"num_processes": world_size, "mixed_precision": precision}
    flags = [word for k, v in wanted.items() if values.get(k, "no") != v for word in (f"--{k}", str(v))]
    return ["--config_file", file, *flags]
