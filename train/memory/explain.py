"""Why the memory was full, by an out-of-memory message, and what to type."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

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

_TEXTS = yaml.safe_load(Path(__file__).with_name("what_to_do.yaml").read_text(encoding="utf-8"))
_HINTS = {remedy.name: [remedy.hint] for remedy in reversed(ladder.REMEDIES)}  # of two with a name the first
_HINTS["all"] = [remedy.hint for remedy in ladder.REMEDIES]
_HINTS["few"] = [remedy.hint for remedy in (ladder.CHUNKED, ladder.MICRO_BATCH, ladder.CHECKPOINTING)]
_WHAT_TO_DO: dict[str, list[tuple[str, str]]] = {  # by cause: what to type, what it does
    cause: [hint for entry in entries for hint in (entry.items() if isinstance(entry, dict) else _HINTS[entry])]
    for cause, entries in _TEXTS["remedies"].items()
}
# What is told by words alone, squeezed: cause, what happened, why.
_BY_WORDS = {told["pattern"]: (cause, told["what"], told["why"]) for cause, told in _TEXTS["by_words"].items()}


def _diagnosis(oom: OutOfMemory, weights_fill: bool) -> tuple[str, str]:
    """The cause, as in :data:`_WHAT_TO_DO`, and a text about it; ``weights_fill`` the card before any example."""
    requested, free, total = oom.requested_bytes, oom.free_bytes, oom.total_bytes
    reserved, unallocated = oom.reserved_bytes, oom.reserved_unallocated_bytes
    if oom.on_host:
        return "host", (
            "the machine's main memory (RAM) was full, not the GPU's. In a training on a GPU it holds the data, its "
            "workers, the weights while they load, and what is offloaded: with fsdp2_offload.yaml weights, gradients "
            "and optimizer state, which fsdp2.yaml keeps on the GPUs. In a training on a CPU it holds everything."
        )
    if not requested and not total:
        return "unknown", (
            "this message has no figures to tell by. The driver and libraries (cuBLAS, cuDNN, NCCL) give none: they "
            "ask outside of PyTorch's allocator, and this process or another one fills the card."
        )
    if 0 < requested <= free:
        return "refused", (
            "there was room by these figures, yet the driver refused. They are read after the failure: another "
            "process may have left in between. Or a limit is set on a single request or on this process."
        )
    others = oom.other_processes_bytes
    if total and others >= 0.1 * total and free + others >= requested:
        named = ", ".join(str(process) for process, _ in oom.other_processes)
        who = f": process{'es' if len(oom.other_processes) > 1 else ''} {named}" if named else ""
        return "others", f"another program is on the same card{who}. It holds {others / total:.1%} of it."
    if reserved > total > 0:
        more = "more than the card has: the Windows driver, also under WSL, lends main memory, which is slow"
        return "full", f"simply full. PyTorch holds {gib(reserved)}, {more}."
    huge = 0 < 0.25 * total <= requested
    scattered = unallocated + (0 if huge else free)
    if unallocated >= 0.05 * reserved > 0 and scattered >= requested > 0:
        return "fragmentation", (
            f"fragmentation. PyTorch holds {gib(unallocated)} that no tensor uses, but in pieces: no gap is as long as "
            f"the {gib(requested)} asked for."
            + ("" if unallocated >= requested else f" With the {gib(free)} free it would be enough.")
        )
    if weights_fill:
        kept = "with what training keeps for each of them"
        return "weights", f"the model's weights, {kept}, fill the card before any example is there."
    if huge:
        return "huge", (
            f"one huge tensor: {gib(requested)}, {requested / total:.1%} of the card. Usually the logits (examples × "
            "tokens × vocabulary) or an attention mask or scores (tokens × tokens)."
        )
    held = f" with {gib(oom.allocated_bytes)} of tensors" if oom.allocated_bytes else ""
    return "full", f"simply full{held}. No single thing went wrong: the run needs more than there is."


def _account(oom: OutOfMemory, weights_fill: bool) -> tuple[str, list[str]]:
    """The cause of ``oom``, and lines that say what it means."""
    cause, why = _diagnosis(oom, weights_fill)
    device = "The device's memory" if oom.device_index is None else f"Memory of GPU {oom.device_index}"
    where = "Main memory (RAM)" if oom.on_host else device
    more = f": {gib(oom.requested_bytes)} more did not fit" if oom.requested_bytes else ""
    return cause, [f"{where} was full{more}.", *_figures(oom), *_wrapped("Why: ", why)]


def explain(message: str) -> str:
    """A text for the terminal: each figure of ``message`` and its meaning, why memory was full, what to do.

    The message may stand alone or within a traceback or log. Raises UsageError if it is not about memory.
    """
    oom, text = parse_oom(message), squeezed(message)
    told = next((told for pattern, told in _BY_WORDS.items() if re.search(pattern, text)), None)
    # A process is often killed because another one ran out; a message with torch's figures is the one to explain.
    if told is not None and (oom is None or (told[0] != "host" and not oom.total_bytes)):
        cause, lines = told[0], [told[1], *_wrapped("Why: ", told[2])]
    elif oom is not None:
        cause, lines = _account(oom, weights_fill=_LOADING.search(message) is not None)
    else:
        raise UsageError("explain: this is not an out-of-memory message. Give the whole message in quotes.")
    lines.append("What to do, cheapest first (flags are those of train/main.py):")
    remedies = _WHAT_TO_DO[cause]
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
        weights_fill = held >= oom.available_bytes > 0
        cause, account = _account(oom, weights_fill)
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
