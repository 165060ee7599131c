"""What a run can change to need less memory, in one order: the cheapest first.

:data:`LADDER` orders the ways to recompute activations, for planning and for ``gradient_checkpointing: auto``.
:data:`REMEDIES` orders single flags, for what is said after running out of memory.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from train.figures import gib
from train.records import UserError

if TYPE_CHECKING:
    from train.memory.predict import Job

FLAGS = {
    "every_n_layers": "gradient_checkpointing_every_n_layers",
    "offloads_inputs": "gradient_checkpointing_offload",
}
"""Flags of the fields of :class:`Recompute` and :class:`train.memory.question.Setting` that are named otherwise."""


@dataclass(frozen=True)
class Recompute:
    """How layers keep or recompute their activations."""

    gradient_checkpointing: str
    every_n_layers: int = 1
    offloads_inputs: bool = False
    """Inputs of checkpointed layers wait in host memory."""
    tiled_mlp: bool = False

    def __str__(self) -> str:
        every = f" every {self.every_n_layers} layers" if self.every_n_layers > 1 else ""
        return f"{self.gradient_checkpointing}{every}{' with offload' if self.offloads_inputs else ''}"


LADDER = (
    Recompute("none"),
    *(Recompute("selective", every) for every in (8, 4, 3, 2, 1)),
    Recompute("full"),
    Recompute("full", offloads_inputs=True),
    Recompute("full", offloads_inputs=True, tiled_mlp=True),
)
"""Each needs less memory, and more time, than the one before it.

Every n layers is selective: recomputing attention saves little memory and, at long sequences, costs much time."""


def ladder_on(device_type: str) -> tuple[Recompute, ...]:
    """:data:`LADDER` on a device. A CPU has no other memory to offload to."""
    if device_type != "cpu":
        return LADDER
    return tuple(dict.fromkeys(replace(way, offloads_inputs=False) for way in LADDER))


def flags_of(settings: Any) -> dict[str, Any]:
    """The fields of a dataclass of settings by the flags that set them."""
    return {FLAGS.get(name, name): value for name, value in asdict(settings).items()}


def largest_fitting(
    candidates: Sequence[int],
    needs: Callable[[int], int | None],
    room_bytes: int,
    first: int,
    enough: Callable[[], bool] = lambda: False,
) -> int | None:
    """The largest of ``candidates`` (ascending) that needs at most ``room_bytes``; None: not even the smallest does.

    Guesses along the line through the last two points, because memory is nearly affine, and halves where that does not
    help. Never tries more than eight times what is known to fit, because large steps take long to predict.

    Args:
        needs: bytes, growing; None: unknown, taken as too many.
        first: where to begin, one of ``candidates``.
        enough: asked after each try that fits: whether to stop there.
    """
    low, high = -1, len(candidates)
    points: list[tuple[int, int]] = []
    index = candidates.index(first)
    tries = 0
    while high - low > 1:
        size = candidates[index]
        needed = needs(size)
        if needed is not None:
            points.append((size, needed))
        if needed is not None and needed <= room_bytes:
            low = index
            if enough():
                break
        else:
            high = index
        tries += 1
        index = _next_guess(candidates, low, high, points[-2:], room_bytes, halve=tries % 3 == 0)
    return candidates[low] if low >= 0 else None


def _next_guess(
    candidates: Sequence[int], low: int, high: int, points: Sequence[tuple[int, int]], room_bytes: int, halve: bool
) -> int:
    guess = (low + high) // 2
    if len(points) == 2 and points[0][0] != points[1][0] and not halve:
        (x0, y0), (x1, y1) = sorted(points)
        if y1 > y0:
            guess = bisect_right(candidates, x0 + (room_bytes - y0) * (x1 - x0) / (y1 - y0)) - 1
            guess += guess == low  # it fits already: is it the last?
    if low >= 0:
        guess = min(guess, bisect_right(candidates, 8 * candidates[low]) - 1)
    return max(low + 1, min(guess, high - 1))


def choose(
    needs: Callable[[dict[str, Any]], int], room_bytes: int, device_type: str, offload: bool
) -> tuple[dict[str, Any], str]:
    """``gradient_checkpointing: auto``: the least recomputation whose step is predicted to fit.

    Args:
        needs: bytes that a step with these flags is predicted to need.
        room_bytes: what may be taken.
        offload: whether the inputs of checkpointed layers go to host memory in any case.

    Returns:
        the settings to take, by flag, and a line for a person.

    Raises:
        UserError: nothing fits, or no setting can be predicted.
    """
    ways = [way for way in ladder_on(device_type) if not way.tiled_mlp]
    if offload:
        ways = list(dict.fromkeys(replace(w, offloads_inputs=w.gradient_checkpointing != "none") for w in ways))
    smallest_first = ways[::-1]
    needed: dict[int, int] = {}
    problems: list[UserError] = []

    def flags(rung: int) -> dict[str, Any]:
        return {name: value for name, value in flags_of(smallest_first[rung]).items() if name != "tiled_mlp"}

    def needs_of(rung: int) -> int | None:
        try:
            needed[rung] = needs(flags(rung))
        except UserError as error:
            problems.append(error)
        return needed.get(rung)

    last = len(ways) - 1
    best = largest_fitting(range(len(ways)), needs_of, room_bytes, first=last)
    if best is None:
        if not needed:
            raise problems[0]
        rung = min(needed)
        raise UserError(
            f"gradient_checkpointing: auto: {smallest_first[rung]} is predicted to need {gib(needed[rung])}, and "
            f"{gib(room_bytes)} may be taken. python -m train.memory plan finds settings that fit."
        )
    without = f"; without it {gib(needed[last])}" if last in needed and best != last else ""
    room = f"{gib(needed[best])} of {gib(room_bytes)} that may be taken"
    return flags(best), f"gradient_checkpointing: {smallest_first[best]}, predicted to take {room}{without}"


@dataclass(frozen=True)
class Remedy:
    """A flag that makes a run need less memory."""

    name: str
    value: str | None
    """What to set it to; None: half of what it is."""
    note: str
    """What it does, and whether the result stays the same."""

    @property
    def hint(self) -> tuple[str, str]:
        """What to type, and what it does, where nothing is known of the run."""
        return (f"--{self.name}", f"halve; {self.note}") if self.value is None else (self.typed(), self.note)

    def typed(self, value: Any = None) -> str:
        return f"--{self.name} {self.value if value is None else value}"


def _uses_adamw(job: Job) -> bool:
    return job.values["optimizer"] == "adamw" and job.sharding in ("none", "ddp")


def _uses_plain_adamw(job: Job) -> bool:
    return _uses_adamw(job) and job.values["bf16_update"] == "nearest" and not job.values["optimizer_offload"]


CHUNKED = Remedy("loss", "chunked", "never all logits at once; same result")
MICRO_BATCH = Remedy("micro_batch_size", None, "same result with the same --global_batch_size")
CHECKPOINTING = Remedy("gradient_checkpointing", "full", "recomputes activations; same result, about a third more time")
EVALUATION = Remedy("eval_batch_size", "1", "if it happened in an evaluation; same result")
OPTIMIZER_OFFLOAD = Remedy("optimizer_offload", "True", "optimizer state to host memory; same result, slower")
EIGHT_BIT = Remedy("optimizer", "adamw_8bit", "moments of one byte; differs by rounding")
ADAFACTOR = Remedy(
    "optimizer", "adafactor", "hardly any optimizer state; changes the result: tune the learning rate again"
)
MAX_LENGTH = Remedy("max_length", None, "changes the result: examples are cut shorter")
REMEDIES = (
    CHUNKED,
    MICRO_BATCH,
    CHECKPOINTING,
    EVALUATION,
    Remedy("mixed_precision", "bf16", "about halves activations; differs by rounding"),
    OPTIMIZER_OFFLOAD,
    EIGHT_BIT,
    ADAFACTOR,
    Remedy("dtype", "bfloat16", "halves weights, gradients and state; changes the result"),
    MAX_LENGTH,
)
_HELPS: dict[Remedy, Callable[[Job], bool]] = {
    CHUNKED: lambda job: not job.num_labels and job.values["loss"] == "full",
    MICRO_BATCH: lambda job: job.micro_batch_size > 1 and not job.values["optimizer_in_backward"],
    CHECKPOINTING: lambda job: job.values["gradient_checkpointing"] != "full",
    OPTIMIZER_OFFLOAD: lambda job: _uses_plain_adamw(job) and job.target.device_type != "cpu",
    EIGHT_BIT: _uses_plain_adamw,
    ADAFACTOR: _uses_adamw,
    MAX_LENGTH: lambda job: job.length > 1,
}
"""Those whose saving is predicted for a step, and whether they change anything for it."""


def cheaper(job: Job) -> list[tuple[str, str, Job]]:
    """What makes the step of ``job`` need less memory, cheapest first: (what to type, what it does, the job)."""
    found = []
    for remedy in REMEDIES:
        if remedy in _HELPS and _HELPS[remedy](job):
            value = remedy.value
            if value is None:
                value = (job.micro_batch_size if remedy is MICRO_BATCH else job.length) // 2
            found.append((remedy.typed(value), remedy.note, _changed(job, remedy.name, value)))
    return found


def _changed(job: Job, name: str, value: Any) -> Job:
    size = value if name == "micro_batch_size" else job.micro_batch_size
    length = value if name == "max_length" else job.length
    values = {**job.values, name: value == "True" or value, "micro_batch_size": size, "max_length": length}
    if name == "optimizer":  # these belong to AdamW
        values |= {"optimizer_offload": False, "bf16_update": "nearest"}
    return replace(
        job,
        values=values,
        micro_batch_size=size,
        length=length,
        accumulates=job.accumulates or size < job.micro_batch_size,
        eval_batch_size=job.eval_batch_size and min(job.eval_batch_size, size),
    )
