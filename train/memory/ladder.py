"""What a run can change to need less memory, the cheapest first: ways to recompute activations, and single flags."""

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from train.figures import gib
from train.memory.predict import Job
from train.records import UserError


@dataclass(frozen=True)
class Recompute:
    """How layers keep or recompute their activations: by the flags that say so."""

    gradient_checkpointing: str = "none"
    gradient_checkpointing_every_n_layers: int = 1
    gradient_checkpointing_offload: bool = False  # inputs of checkpointed layers wait in host memory
    tiled_mlp: bool = False

    def __str__(self) -> str:
        number = self.gradient_checkpointing_every_n_layers
        every = f" every {number} layers" if number > 1 else ""
        return f"{self.gradient_checkpointing}{every}{' with offload' if self.gradient_checkpointing_offload else ''}"


LADDER = (
    Recompute("none"),
    *(Recompute("selective", every) for every in (8, 4, 3, 2, 1)),
    Recompute("full"),
    Recompute("full", gradient_checkpointing_offload=True),
    Recompute("full", gradient_checkpointing_offload=True, tiled_mlp=True),
)
"""Each needs less memory, and more time, than the one before it. Every n layers is selective: recomputing attention
saves little memory and, at long sequences, costs much time."""


def ladder_on(device_type: str) -> tuple[Recompute, ...]:
    """:data:`LADDER` on a device. A CPU, and MPS, have no other memory to offload to."""
    if device_type == "cuda":
        return LADDER
    return tuple(dict.fromkeys(replace(way, gradient_checkpointing_offload=False) for way in LADDER))


def divisors(number: int) -> list[int]:
    """Micro-batch sizes that divide ``number`` examples, ascending; none for 0."""
    return [size for size in range(1, number + 1) if number % size == 0]


def largest_fitting(
    candidates: Sequence[int], needs: Callable[[int], int | None], room_bytes: int, first: int
) -> int | None:
    """The largest of ``candidates`` (ascending) that needs at most ``room_bytes``; None: not even the smallest does.

    Guesses along the line through the last two points, because memory is nearly affine, and halves where that does not
    help. Never tries more than eight times what fits, because large steps take long to predict. None is too much.
    """
    low, high, index, tries = -1, len(candidates), candidates.index(first), 0
    points: list[tuple[int, int]] = []
    while high - low > 1:
        size = candidates[index]
        needed = needs(size)
        points += [(size, needed)] if needed is not None else []
        if needed is not None and needed <= room_bytes:
            low = index
        else:
            high = index
        tries += 1
        guess = (low + high) // 2
        if len(points) > 1 and tries % 3:
            (x0, y0), (x1, y1) = sorted(points[-2:])
            if y1 > y0:
                guess = bisect_right(candidates, x0 + (room_bytes - y0) * (x1 - x0) / (y1 - y0)) - 1
                guess += guess == low  # it fits already: is it the last?
        if low >= 0:
            guess = min(guess, bisect_right(candidates, 8 * candidates[low]) - 1)
        index = max(low + 1, min(guess, high - 1))
    return candidates[low] if low >= 0 else None


def recomputations(device_type: str, offload: bool) -> list[tuple[str, dict[str, Any]]]:
    """The ways of ``gradient_checkpointing: auto``; with ``offload`` inputs go to host memory in any case."""
    ways = [way for way in ladder_on(device_type)[::-1] if not way.tiled_mlp]
    if offload:
        ways = [replace(way, gradient_checkpointing_offload=way.gradient_checkpointing != "none") for way in ways]
    ways = dict.fromkeys(ways)  # each once
    return [(str(way), {name: value for name, value in vars(way).items() if name != "tiled_mlp"}) for way in ways]


def choose(
    name: str, ways: Sequence[tuple[str, dict[str, Any]]], needs: Callable[[dict[str, Any]], int], room_bytes: int
) -> tuple[dict[str, Any], str]:
    """The flags that the flag ``name: auto`` means, and a line for a person: the last of ``ways`` that fits.

    ``ways`` have names and flags; each needs more bytes than the one before. Raises UserError if nothing fits.
    """
    needed: dict[int, int] = {}
    problems: list[str] = []

    def needs_of(rung: int) -> float:
        try:
            needed[rung] = needs(ways[rung][1])
        except UserError as error:
            problems.append(str(error))
        return needed.get(rung, math.inf)

    last = len(ways) - 1
    best = last if needs_of(last) <= room_bytes else bisect_right(range(last), room_bytes, key=needs_of) - 1
    if best < 0:
        reasons = problems[:1]
        if needed:
            least = min(needed)
            what = f"{ways[least][0]} is predicted to need {gib(needed[least])}, and {gib(room_bytes)} may be taken"
            reasons.insert(0, f"{name}: auto: {what}. python -m train.memory plan finds settings that fit.")
        raise UserError(" ".join(reasons))
    more = f"; {ways[last][0]} would take {gib(needed[last])}" if last in needed and best != last else ""
    room = f"{gib(needed[best])} of {gib(room_bytes)} that may be taken"
    return ways[best][1], f"{name}: {ways[best][0]}, predicted to take {room}{more}"


@dataclass(frozen=True)
class Remedy:
    """A flag that makes a run need less memory."""

    name: str
    value: Any  # what to set it to; None: half of what it is
    note: str  # what it does, and whether the result stays the same

    @property
    def hint(self) -> tuple[str, str]:
        """What to type, and what it does, where nothing is known of the run."""
        if self.value is None:
            return f"--{self.name}", f"halve; {self.note}"
        return f"--{self.name} {self.value}", self.note


TEXTS = yaml.safe_load(Path(__file__).with_name("what_to_do.yaml").read_text(encoding="utf-8"))
REMEDIES = tuple(Remedy(*row) for row in TEXTS["flags"])


def cheaper(job: Job) -> list[tuple[str, str, Job]]:
    """What makes the step of ``job`` need less memory, cheapest first: (what to type, what it does, the job)."""
    is_adamw = job.values["optimizer"] == "adamw" and job.sharding in ("none", "ddp")
    is_plain = is_adamw and job.values.get("bf16_update") == "nearest" and not job.values["optimizer_offload"]
    tokens, in_backward = (job.values.get(name) for name in ("max_tokens_per_micro_batch", "optimizer_in_backward"))
    smaller = divisors(job.micro_batch_size)[-2:][0]
    least = job.values["max_length"] / job.length if tokens else 1  # of the examples, which a budget has to hold
    helps = {  # by name and value, only those whose saving can be predicted
        ("loss", "chunked"): not job.num_labels and job.values.get("loss") == "full",
        ("micro_batch_size", None): job.micro_batch_size > 1 and not in_backward and least <= smaller,
        ("gradient_checkpointing", "full"): job.values.get("gradient_checkpointing", "full") != "full",
        ("eval_batch_size", 1): (job.eval_batch_size or 0) > job.micro_batch_size,
        ("optimizer_offload", True): is_plain and job.target.device_type == "cuda",
        ("optimizer", "adamw_8bit"): is_plain,
        ("optimizer", "adafactor"): is_adamw,
        ("max_length", None): job.length > 1,
    }
    found = []
    for remedy in (remedy for remedy in REMEDIES if helps.get((remedy.name, remedy.value))):
        value = {"micro_batch_size": smaller, "max_length": job.length // 2}.get(remedy.name, remedy.value)
        values = {**job.values, "micro_batch_size": job.micro_batch_size, remedy.name: value}
        if remedy.name == "optimizer" and "bf16_update" in values:  # these belong to AdamW
            values |= {"optimizer_offload": False, "bf16_update": "nearest"}
        size, length = values["micro_batch_size"], value if remedy.name == "max_length" else job.length
        accumulates = job.accumulates or size < job.micro_batch_size
        evaluated = job.eval_batch_size and min(job.eval_batch_size, values["eval_batch_size"] or size)
        sizes = {"micro_batch_size": size, "length": length, "eval_batch_size": evaluated}
        changed = replace(job, values=values, accumulates=accumulates, **sizes)
        by_tokens = remedy.name == "micro_batch_size" and tokens
        typed = f"--max_tokens_per_micro_batch {size * length}" if by_tokens else f"--{remedy.name} {value}"
        found.append((typed, remedy.note, changed))
    return found
