"""Why the memory was full, by an out-of-memory message, and what to type."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace

from train.figures import gib
from train.memory import ladder
from train.memory.oom import OutOfMemory, parse_oom
from train.records import UsageError

_WIDTH = 100


@dataclass(frozen=True)
class Situation:
    """Where a run stood when its memory was full."""

    phase: str  # forward, backward, clip, optimizer or evaluation; empty outside a step
    micro_batch_shape: tuple[int, int] | None  # (B, S) of the micro-batch: examples, tokens
    bytes_by_kind: dict[str, int]  # at the predicted peak
    predicted_peak_bytes: int | None
    vocab_size: int | None = None
    changes: Sequence[tuple[str, int, str]] = ()  # (what to type, bytes that it saves, what it does), cheapest first


_IMPOSSIBLE_BYTES = 2**50  # a million GiB: no size that anybody meant
_CONTEXT_BYTES = 2**30  # upper bound of the driver's context and libraries of one process; 0.3 to 0.7 GiB is common
# In a traceback: a model on its way to the card, or the first state of its optimizer.
_LOADING = re.compile(r"\bin (convert|_apply|from_pretrained|_load_state_dict\w*|_init_group)\b")

_LIST = ("nvidia-smi", "lists who holds how much; end the processes you do not need")
_ALL = tuple(remedy.hint for remedy in ladder.REMEDIES)
_FEW = (ladder.CHUNKED.hint, ladder.MICRO_BATCH.hint, ladder.CHECKPOINTING.hint)
_WHAT_TO_DO: dict[str, tuple[tuple[str, str], ...]] = {
    "bug": (("python -m pdb -c continue ...", "look at the shapes where it fails"),),
    "host": (
        ("--dataloader_num_workers 0", "each worker holds memory of its own; same result"),
        ("--preprocessing_num_workers 1", "tokenises in one process; same result"),
        ("--gradient_checkpointing_offload False", "next to a GPU, and --optimizer_offload False: kept on the GPU"),
        *_FEW,
    ),
    "library": (
        _LIST,
        ("CUDA_LAUNCH_BLOCKING=1", "shows whether an earlier fault, a bad index, is the real one"),
        *_FEW[1:],
    ),
    "limit": (("raise or remove the limit", "same result; the card has more"), *_ALL),
    "refused": (_LIST, ("run it again", "if it fails at the same place, no other process is to blame"), *_FEW),
    "others": (_LIST, ("CUDA_VISIBLE_DEVICES=N", "another card than this one, if there is one"), *_FEW),
    "fragmentation": (
        ("PYTORCH_ALLOC_CONF=expandable_segments:True", "before the command; lets gaps join; same result"),
        *_ALL,
    ),
    "weights": (
        ("--dtype bfloat16", "halves weights, gradients and state; changes the result"),
        ("--adapter qlora", "weights in 4 bits, and small trained matrices; changes the result"),
        ("accelerate_configs/fsdp2_offload.yaml", "all three in host memory, on one GPU too; slower"),
        ladder.OPTIMIZER_OFFLOAD.hint,
        ladder.EIGHT_BIT.hint,
    ),
    "graphs": (("compile without graphs", 'mode="default"; same result, small kernels start slower'), *_ALL),
    "huge": (
        ladder.CHUNKED.hint,
        ("--attn_implementation sdpa", "not eager: no scores of tokens × tokens; same result"),
        ("--micro_batch_size 1", "one example needs no padding mask; same --global_batch_size, same result"),
        ladder.EVALUATION.hint,
        ladder.MAX_LENGTH.hint,
    ),
}  # (what to type, what it does), cheapest first; :data:`_ALL` for any other cause


def _diagnosis(oom: OutOfMemory, weights_fill: bool) -> tuple[str, str]:
    """The cause, as in :data:`_WHAT_TO_DO`, and a text about it; ``weights_fill`` the card before any example."""
    requested, free, total = oom.requested_bytes or 0, oom.free_bytes or 0, oom.total_bytes or 0
    reserved, unallocated = oom.reserved_bytes or 0, oom.reserved_unallocated_bytes or 0
    if requested >= _IMPOSSIBLE_BYTES:
        return "bug", (
            "no machine has that much. A size overflowed or a length was never set: this is an error in the code that "
            "asked, not a lack of memory. The traceback's last line of your own code names it."
        )
    if oom.backend == "host":
        return "host", (
            "the machine's main memory (RAM) was full, not the GPU's. In a training on a GPU it holds the data, its "
            "workers and the weights while they load; in a training on a CPU it holds everything."
        )
    if oom.library is not None:
        return "library", (
            f"{oom.library} asked for memory outside of PyTorch's allocator and got none, so there are no figures. "
            "Either this process fills the card, or another one does."
        )
    if not requested and not total:
        return "unknown", "this message has no figures to tell by. If more of it was printed, give all of it."
    if oom.allowed_bytes is not None:  # did the limit refuse what the device would have given?
        left = oom.allowed_bytes - (reserved or oom.allocated_bytes or 0)
        if left < requested or free >= requested:
            limit = "a limit set with torch.cuda.set_per_process_memory_fraction"
            return "limit", f"this process may use only {gib(oom.allowed_bytes)} of the card: {limit}."
    if 0 < requested <= free:
        return "refused", (
            "there was room by these figures, yet the driver refused. They are read after the failure: another "
            "process may have left in between. Or the driver caps a single request or this process."
        )
    # What is neither free nor this process's belongs to others, except for what the driver takes.
    others = oom.other_processes_bytes
    others = max(0, (oom.outside_bytes or 0) - _CONTEXT_BYTES) if others is None else others
    if total and others >= 0.1 * total and free + others >= requested:
        named = ", ".join(str(process) for process, _ in oom.other_processes)
        who = f": process{'es' if len(oom.other_processes) > 1 else ''} {named}" if named else ""
        return "others", f"another program is on the same card{who}. It holds {others / total:.1%} of it."
    huge = 0 < 0.25 * total <= requested
    scattered = unallocated + (0 if huge else free)
    if unallocated >= 0.05 * reserved > 0 and scattered >= requested > 0:
        return "fragmentation", (
            f"fragmentation. PyTorch holds {gib(unallocated)} that no tensor uses, but in pieces: no gap is as long as "
            f"the {gib(requested)} asked for."
            + ("" if unallocated >= requested else f" With the {gib(free)} free it would be enough.")
        )
    pools = oom.private_pools_bytes or 0
    if pools >= max(requested, 0.25 * reserved) > 0:
        mode = "torch.compile's reduce-overhead or max-autotune mode"
        return "graphs", f"CUDA graphs ({mode}) keep {gib(pools)} that nothing else can use."
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


def _account(
    oom: OutOfMemory, weights_fill: bool, recognised: str = "", least_bytes: int = 0
) -> tuple[str, list[str], list[tuple[str, str]]]:
    """The cause of ``oom``, lines that say what it means, and (what to type, what it does), cheapest first."""
    cause, why = _diagnosis(oom, weights_fill)
    remedies, within_reach = [], (oom.free_bytes or 0) + (oom.other_processes_bytes or 0)
    if cause in ("huge", "full") and 0 < (oom.requested_bytes or 0) <= within_reach:
        remedies = [(f"end process {n}", f"it holds {gib(size)} of the same card") for n, size in oom.other_processes]
    lines = [_headline(oom), *_figures(oom, least_bytes), *_wrapped("Why: ", why + recognised)]
    return cause, lines, [*remedies, *_WHAT_TO_DO.get(cause, _ALL)]


def _recognised(requested: int, situation: Situation) -> str:
    """What has the size ``requested`` in the step at work, or nothing."""
    examples, tokens = situation.micro_batch_shape or (0, 0)
    # Two decimals in the message, and the allocator asks the driver for multiples of 2 MiB.
    tolerance = 2**21 + (0.005 * 2**30 if requested >= 2**30 else 0)
    for name, last in (("all logits", situation.vocab_size or 0), ("an attention mask", tokens)):
        for width, type_name in ((4, "fp32"), (2, "16-bit")):
            size = examples * tokens * last * width
            if size >= 4 * tolerance and abs(requested - size) <= tolerance:
                return (
                    f" It has the size of {name} in {type_name}: {examples:,} × {tokens:,} × {last:,} × {width} bytes."
                )
    return ""


def explain(message: str) -> str:
    """A text for the terminal: each figure of ``message`` and its meaning, why memory was full, what to do.

    The message may stand alone or within a traceback or log. Raises UsageError if it is not about memory.
    """
    oom = parse_oom(message)
    if oom is None:
        start = textwrap.shorten(" ".join(message.split()), 60) or "(empty)"
        raise UsageError(
            f"explain: {start!r} is not an out-of-memory message. Give the whole message in quotes, from 'out of "
            "memory' or 'allocate memory' on."
        )
    _, lines, remedies = _account(oom, weights_fill=_LOADING.search(message) is not None)
    lines.append("What to do, cheapest first (flags are those of train/main.py):")
    column = min(44, max(len(typed) for typed, _ in remedies))
    lines += [line for typed, note in remedies for line in _wrapped(f"  {typed:<{column}}  ", note)]
    return "\n".join(lines)


def post_mortem(message: str, situation: Situation) -> str:
    """What filled the memory of this run: where, with what, and the first three changes that would have helped.

    ``message`` may be empty (a MemoryError says nothing): its figures are then left out.
    """
    oom, shape = parse_oom(message), situation.micro_batch_shape
    batch = "" if shape is None else f", micro-batch of {shape[0]:,} × {shape[1]:,} (examples × tokens)"
    where = f"in {situation.phase}" if situation.phase else "outside a step"
    lines = [f"Out of memory {where}{batch}.", *_kinds(situation.bytes_by_kind)]
    if oom is not None:
        held = sum(situation.bytes_by_kind.get(kind, 0) for kind in ("parameters", "gradients", "optimizer state"))
        weights_fill = oom.available_bytes is not None and held >= oom.available_bytes
        recognised = _recognised(oom.requested_bytes or 0, situation)
        cause, account, remedies = _account(oom, weights_fill, recognised, (oom.total_bytes or 0) // 100)
        lines += account
        if cause == "weights":
            of_weights = ("--optimizer", "--dtype")
            situation = replace(situation, changes=[c for c in situation.changes if c[0].startswith(of_weights)])
        if cause in ("weights", "others", "fragmentation", "graphs", "limit", "library", "refused"):
            lines += _wrapped("First: ", "{}  ({})".format(*remedies[0]))
    return "\n".join([*lines, *_changes(situation, oom.available_bytes if oom else None)])


def _headline(oom: OutOfMemory) -> str:
    device = "" if oom.device_index is None else f" {oom.device_index}"
    kind = " (CUDA)" if oom.backend == "CUDA" else ""
    where = "Main memory (RAM)" if oom.backend == "host" else f"Memory of GPU{device}{kind}"
    if oom.requested_bytes is None:
        return f"{where} was full."
    asked = "an impossible size" if oom.requested_bytes >= _IMPOSSIBLE_BYTES else f"{gib(oom.requested_bytes)} more"
    return f"{where} was full: {asked} did not fit."


def _figures(oom: OutOfMemory, least_bytes: int) -> list[str]:
    """One line for each figure that the message gives; of the side ones only those of ``least_bytes`` and more."""
    others = ", ".join(f"{process} ({gib(size)})" for process, size in oom.other_processes[:3])
    others = others or "not named; or kept back by the driver"
    outside = oom.outside_bytes if oom.process_bytes is None and oom.other_processes_bytes is None else None
    rows = [
        (oom.total_bytes, 0, "the whole card"),
        (oom.allowed_bytes, 0, "allowed: the most that may be used by this process"),
        (oom.free_bytes, 0, "free"),
        (oom.process_bytes, 0, "this process: PyTorch's reserve, the driver's context, libraries"),
        (oom.allocated_bytes, 0, "in tensors: weights, gradients, optimizer state, activations"),
        (oom.private_pools_bytes, least_bytes, "of these kept by CUDA graphs (private pools)"),
        (oom.reserved_unallocated_bytes, 0, "reserved by PyTorch but in no tensor: cache, and gaps between tensors"),
        (oom.other_processes_bytes, least_bytes, f"other processes: {others}"),
        (outside, max(1, least_bytes), "all else: the driver's context (0.3 to 0.7 GiB), other processes"),
    ]
    return [f"{gib(size):>12}  {meaning}" for size, least, meaning in rows if size is not None and size >= least]


_MEANINGS = {
    "parameters": "the weights",
    "gradients": "one value per weight that is trained",
    "optimizer state": "what the optimizer remembers of each weight",
    "activations": "kept by forward for backward; examples × tokens",
    "logits and loss": "examples × tokens × vocabulary",
    "workspace": "held by an operation while it runs",
}


def _kinds(bytes_by_kind: dict[str, int]) -> list[str]:
    rows = sorted(((size, kind) for kind, size in bytes_by_kind.items() if size > 0), reverse=True)
    whole = sum(size for size, _ in rows)
    lines = [f"What fills it by prediction, {gib(whole)} in all:"] if rows else []
    for size, kind in rows:
        mark = "← most" if len(lines) == 1 else ""
        row = f"{gib(size):>12}  {size / whole:>6.1%}  {kind:<15}  {mark:<6}  {_MEANINGS.get(kind, '')}"
        lines.append(row.rstrip())
    return lines


def _changes(situation: Situation, available_bytes: int | None) -> list[str]:
    """Each change with its saving and, where both are known, the new peak against what there is."""
    peak_bytes = situation.predicted_peak_bytes
    room = "" if available_bytes is None else f", room {gib(available_bytes)}"
    peak = "" if peak_bytes is None else f" (peak {gib(peak_bytes)}{room})"
    lines = [f"What to change, cheapest first, and what it saves by prediction{peak}:"] if situation.changes else []
    for typed, saved_bytes, note in situation.changes[:3]:
        verdict = ""
        if peak_bytes is not None and available_bytes is not None:
            verdict = "fits; " if peak_bytes - saved_bytes <= available_bytes else "not enough alone; "
        lines += _wrapped(f"{'−' + gib(saved_bytes):>12}  {typed}  ", f"{verdict}{note}")
    return lines


def _wrapped(head: str, text: str) -> list[str]:
    """``text`` after ``head`` in lines of at most 100 characters; further lines are indented below the first."""
    indent = " " * (len(head) if len(head) <= _WIDTH // 2 else 14)
    return textwrap.wrap(head + text, _WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
