"""Why the memory was full, by an out-of-memory message, and what to type."""

import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace

from train.config import fields
from train.extras.oom import OutOfMemory, parse_oom, squeezed
from train.figures import gib
from train.memory import ladder, uses_expandable_segments
from train.records import UsageError

_WIDTH = 100


@dataclass(frozen=True)
class Situation:
    """Where a run stood when its memory was full."""

    phase: str | None  # forward, backward, clip, optimizer or evaluation; empty outside a step, None: not known
    micro_batch_shape: tuple[int, int] | None  # (B, S) of the micro-batch: examples, tokens
    bytes_by_kind: dict[str, int]  # at the predicted peak
    predicted_peak_bytes: int | None
    changes: Sequence[tuple[str, int, str]] = ()  # (what to type, bytes that it saves, what it does), cheapest first


# In a traceback: a model on its way to the card, or the first state of its optimizer.
_LOADING = re.compile(r"\bin (convert|_apply|from_pretrained|_load_state_dict\w*|_init_group)\b")

_HINTS = {remedy.name: [remedy.hint] for remedy in reversed(ladder.REMEDIES)}  # of two with a name the first
_HINTS["all"] = [remedy.hint for remedy in ladder.REMEDIES]
_HINTS["few"] = [remedy.hint for remedy in ladder.REMEDIES[:3]]  # loss, micro-batch, checkpointing
_WHAT_TO_DO: dict[str, list[tuple[str, str]]] = {  # by cause: what to type, what it does
    cause: [hint for entry in entries for hint in (entry.items() if isinstance(entry, dict) else _HINTS[entry])]
    for cause, entries in ladder.TEXTS["remedies"].items()
}


def _account(oom: OutOfMemory, weights_fill: bool) -> tuple[str, list[str]]:
    """The cause, as in :data:`_WHAT_TO_DO`, and lines about it; ``weights_fill`` the card before any example."""
    requested, free, total = oom.requested_bytes, max(0, oom.available_bytes - oom.reserved_bytes), oom.total_bytes
    reserved, unallocated, others = oom.reserved_bytes, oom.reserved_unallocated_bytes, oom.other_processes_bytes
    is_huge = 0 < 0.25 * total <= requested
    scattered = unallocated + (0 if is_huge else free)
    causes = {  # the first that is so
        "host": oom.on_host,
        "unknown": not requested and not total,
        "refused": 0 < requested <= free,
        "others": others >= 0.1 * total > 0 and free + others >= requested,
        "lent": reserved > total > 0,
        "fragmentation": unallocated >= 0.05 * reserved > 0 and scattered >= requested > 0,
        "weights": weights_fill,
        "huge": is_huge,
        "full": True,
    }
    cause = next(name for name, is_so in causes.items() if is_so)
    sizes = {"requested": requested, "free": free, "reserved": reserved, "unallocated": unallocated}
    figures = {name: gib(size) for name, size in sizes.items()}
    figures |= {"share": f"{requested / (total or 1):.1%}", "held_by_others": f"{others / (total or 1):.1%}"}
    figures["both"] = f" With the {gib(free)} free it would be enough." if unallocated < requested else ""
    device = "The device's memory" if oom.device_index is None else f"Memory of GPU {oom.device_index}"
    where = "Main memory (RAM)" if oom.on_host else device
    more = f": {gib(requested)} more did not fit" if requested else ""
    why = _wrapped("Why: ", ladder.TEXTS["why"][cause].format(**figures))
    return {"lent": "full"}.get(cause, cause), [f"{where} was full{more}.", *_figures(oom), *why]


def explain(message: str) -> str:
    """A text for the terminal: each figure of ``message`` and its meaning, why memory was full, what to do.

    The message may stand alone or within a traceback or log. Raises UsageError if it is not about memory.
    """
    oom, text = parse_oom(message), squeezed(message)
    by_words = ladder.TEXTS["by_words"]
    cause = next((cause for cause, told in by_words.items() if re.search(told["pattern"], text)), "")
    # A process is often killed because another one ran out; a message with torch's figures is the one to explain.
    if cause and (oom is None or (cause != "host" and not oom.total_bytes)):
        lines = [by_words[cause]["what"], *_wrapped("Why: ", by_words[cause]["why"])]
    elif oom is not None:
        cause, lines = _account(oom, weights_fill=_LOADING.search(message) is not None)
    else:
        raise UsageError("explain: this is not an out-of-memory message. Give the whole message in quotes.")
    lines.append("What to do, cheapest first (flags are those of train/main.py):")
    remedies = [told for told in _WHAT_TO_DO[cause] if told[0][:2] != "--" or told[0].split()[0][2:] in fields()]
    column = max(len(typed) for typed, _ in remedies)
    lines += [line for typed, note in remedies for line in _wrapped(f"  {typed:<{column}}  ", note)]
    return "\n".join(lines)


def post_mortem(message: str, situation: Situation) -> str:
    """What filled the memory of this run: where, with what, and the first three changes that would have helped.

    ``message`` may be empty (a MemoryError says nothing): its figures are then left out.
    """
    oom, shape = parse_oom(message), situation.micro_batch_shape
    batch = "" if shape is None else f", micro-batch of {shape[0]:,} × {shape[1]:,} (examples × tokens)"
    where = "" if situation.phase is None else f" in {situation.phase}" if situation.phase else " outside a step"
    lines = [f"Out of memory{where}{batch}.", *_kinds(situation)]
    if oom is not None:
        held = sum(situation.bytes_by_kind.get(kind, 0) for kind in ("parameters", "gradients", "optimizer state"))
        cause, account = _account(oom, weights_fill=held >= oom.available_bytes > 0)
        lines += account
        if cause == "weights":
            situation = replace(situation, changes=[c for c in situation.changes if c[0].startswith("--optimizer")])
        is_done = cause == "fragmentation" and uses_expandable_segments()
        if cause in ("weights", "others", "fragmentation", "refused") and not is_done:
            lines += _wrapped("First: ", "{}  ({})".format(*_WHAT_TO_DO[cause][0]))
    return "\n".join([*lines, *_changes(situation, oom.available_bytes if oom else 0)])


def _figures(oom: OutOfMemory) -> list[str]:
    """One line for each figure that the message gives; what others hold if it is 1 % of the card or more."""
    others = ", ".join(f"{process} ({gib(size)})" for process, size in oom.other_processes[:3])
    others_bytes = oom.other_processes_bytes if oom.other_processes_bytes >= oom.total_bytes // 100 else 0
    rows = [
        (oom.limit_bytes, "what PyTorch may take of it: a limit is set (set_per_process_memory_fraction)"),
        (oom.process_bytes, "this process: PyTorch's reserve, the driver's context, libraries"),
        (oom.allocated_bytes, "in tensors: weights, gradients, optimizer state, activations"),
        (oom.reserved_unallocated_bytes, "reserved by PyTorch but in no tensor: cache, and gaps between tensors"),
        (others_bytes, f"other processes: {others or 'not named'}"),
    ]
    rows = [row for row in rows if row[0]]
    if oom.total_bytes:
        rows = [(oom.total_bytes, "the whole card"), (oom.free_bytes, "free"), *rows]
    return [f"{gib(size):>12}  {meaning}" for size, meaning in rows]


def _kinds(situation: Situation) -> list[str]:
    rows = sorted(((size, kind) for kind, size in situation.bytes_by_kind.items() if size > 0), reverse=True)
    whole, is_measured = sum(size for size, _ in rows), situation.predicted_peak_bytes is None
    lines = [f"What fills it {'as measured' if is_measured else 'by prediction'}, {gib(whole)} in all:"] if rows else []
    return lines + [f"{gib(size):>12}  {size / whole:>6.1%}  {kind}" for size, kind in rows]


def _changes(situation: Situation, available_bytes: int) -> list[str]:
    """Each change with its saving and, where both are known, the new peak against what there is."""
    peak_bytes = situation.predicted_peak_bytes
    room = f", room {gib(available_bytes)}" if available_bytes else ""
    peak = "" if peak_bytes is None else f" (peak {gib(peak_bytes)}{room})"
    lines = [f"What to change, cheapest first, and what it saves by prediction{peak}:"] if situation.changes else []
    for typed, saved_bytes, note in situation.changes[:3]:
        verdict = ""
        if peak_bytes is not None and available_bytes:
            verdict = "fits; " if peak_bytes - saved_bytes <= available_bytes else "not enough alone; "
        lines += _wrapped(f"{'−' + gib(saved_bytes):>12}  {typed}  ", f"{verdict}{note}")
    return lines


def _wrapped(head: str, text: str) -> list[str]:
    """``text`` after ``head`` in lines of at most 100 characters; further lines are indented below the first."""
    indent = " " * (len(head) if len(head) <= _WIDTH // 2 else 14)
    return textwrap.wrap(head + text, _WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
