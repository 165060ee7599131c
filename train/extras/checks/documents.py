"""Labels that cannot be learned, and what a person should know about data and model before training."""

import re
import unicodedata
from collections import Counter
from dataclasses import replace

import numpy as np
import torch

from train.config import Config, fields
from train.data import PreparedData
from train.figures import several
from train.optim import learning_rate_at, num_warmup_steps
from train.records import BatchArithmetic, Corpus, Parts, Run, UserError, column
from train.tasks import Task

FRACTION = re.compile(r"[+-]?(\d*[.,]\d*[1-9]\d*([eE][+-]?\d+)?|\d+\.?\d*[eE]-\d+)")  # a measurement, not a class


def with_known_labels(corpus: Corpus, task: Task) -> Corpus:
    """``corpus`` without documents of a class that the task does not know, if these may be left out.

    Raises UserError for them otherwise, and for a training split of fewer than two labels or of measurements.
    """
    labels = Counter(map(str, corpus.splits["train"]["label"][:]))
    what = f"column {task.config.get('label_column', 'label')!r}"
    if len(labels) < 2:
        only = f"the training split has only the label {', '.join(map(repr, labels))} in {what}"
        raise UserError(f"{corpus.name}: {only}; classification needs two or more. Is it the right --label_column?")
    names, splits, notes = task.label_names(corpus), dict(corpus.splits), list(corpus.notes)
    forms = {name: unicodedata.normalize("NFKC", name).strip().casefold() for name in sorted(labels)}
    alike = Counter(forms.values())
    if twins := [ascii(name) for name, form in forms.items() if alike[form] > 1]:
        notes.append(f"classes that may be meant as one: {', '.join(twins[:20])}")
    single = [name for name in names if labels[name] == 1 and FRACTION.fullmatch(name)]
    if 2 * len(single) > len(labels):  # half stars, say, are classes
        most = f"most labels in {what}, such as {single[0]!r}, are fractional numbers that occur once"
        raise UserError(f"{corpus.name}: {most}: {task.name} needs classes. Group them, or see docs/forking.md.")
    for split, documents in corpus.splits.items():
        is_known = [number is not None for number in task.classes_of(documents["label"][:], names)]
        if split == "test" and not any(is_known):  # as in a competition, with one mark for all
            notes.append("left out the test split: none of its labels occurs in the training split")
            del splits["test"]
        elif not all(is_known):
            first = documents[number := is_known.index(False)]
            place = first.get("source", f"document {number}")
            where = f"{place}: label {first['label']!r} does not occur in the training split"
            if task.config.get("on_bad_record", "error") == "error":
                more = "" if task.config.get("max_train_samples") is None else "raise --max_train_samples, "
                remedy = f"Correct it, {more}or leave such records out with --on_bad_record skip"
                raise UserError(f"{where} (it has {', '.join(names[:20])}). {remedy}. Is it the right --label_column?")
            notes.append(f"skipped {several(is_known.count(False), 'record')} with an unknown label, the first {where}")
            splits[split] = documents.select(np.flatnonzero(is_known))
    return replace(corpus, splits=splits, notes=tuple(notes))


def describe(data: PreparedData, config: Config) -> list[str]:
    """Lines about the classes, how much of the text was cut, and what has no effect."""
    names, train, task = data.label_names, data.examples["train"], data.task
    lines = [f"{len(names)} classes: {', '.join(names[:20])}"] if names else []
    if "document_length" in train.column_names:
        before, most = column(train, "document_length"), config.data.max_length
        if config.get("packing"):  # its rows have lists of them
            before = np.hstack(list(before))
        after = np.minimum(before, most) if config.get("packing") else column(train, "length")
        if cut := int((before > after).sum()):
            how = f"truncation ({config.data.truncation}): " if "truncation" in task.encode_settings else ""
            longer = f"{cut} of {len(before)} documents were cut, to {most} tokens or fewer"
            lines.append(f"{how}{longer}; {100 * (1 - after.sum() / before.sum()):.1f} % of all tokens are lost")
    for name, documents in data.corpus.splits.items():
        found = data.examples[name]
        made = sum(map(len, column(found, "member_ids"))) if config.get("packing") else len(found)
        if (gone := len(documents) - made) > 0:
            lines.append(f"at least {gone:,} of {len(documents):,} {name} documents gave no example, perhaps by length")
    held_out, trained = (int(column(data.examples[name], "length").sum()) for name in ("validation", "train"))
    lines += [f"training has only {trained:,} tokens, validation {held_out:,}"] if held_out > trained else []
    read, known = {*task.encode_settings, task.target_share}, fields()
    optimizer, schedule = config.optimization.optimizer, config.optimization.lr_scheduler
    unread = dict.fromkeys({"mlm_probability", "truncation"} - read, "task")
    of_sgd, of_adam = ("sgd_momentum",), ("adam_beta1", "adam_beta2", "adam_epsilon")
    unread_by = {"adamw": of_sgd, "adamw_8bit": of_sgd, "sgd": of_adam, "adafactor": of_sgd + of_adam}
    unread |= dict.fromkeys(unread_by.get(optimizer, ()), "optimizer")  # of a fork's own nothing is known
    unread |= {"decay_ratio": "lr_scheduler"} if schedule in ("constant", "linear", "cosine") else {}
    unread |= {"min_learning_rate_ratio": "lr_scheduler"} if schedule == "constant" else {}
    unread |= {} if config.get("push_to_hub") else {"hub_model_id": "push_to_hub"}
    changed = [name for name in sorted(unread.keys() & known) if config.get(name) != known[name][1].default]
    return [*lines, *(f"{name}: does nothing with --{(by := unread[name])} {config.get(by)}" for name in changed)]


def describe_training(run: Run, parts: Parts) -> list[str]:
    """Lines about the model, how a global batch comes about, a warm-up that does not end, and idle options."""
    (trained, every), optim, total = parts.sizes, run.config.optimization, parts.total_steps
    name = getattr(getattr(parts.state.model, "config", None), "model_type", type(parts.state.model).__name__)
    size = f"{every / 1e6:.2f} M parameters"
    size += f" ({trained / 1e6:.2f} M trained, {trained / every:.2%})" if trained < every else ""
    lines = [f"model: {name}, {size}, sequences of up to {run.config.data.max_length:,} tokens"]
    # Rounds of an extra may form micro-batches otherwise.
    batch = getattr(parts.batches.loading.rounds, "describe", describe_batch)(parts.batches.arithmetic)
    lines.append(f"batch: {batch}; {several(total, 'step')} ({total / parts.batches.steps_per_epoch:.2f} epochs)")
    if (warmup := num_warmup_steps(total, optim)) > total:
        highest, peak = learning_rate_at(total - 1, total, optim), optim.learning_rate
        lines.append(f"learning rate: at most {highest:.2e} of {peak:.2e}, because warm-up takes {warmup:,} steps")
    device, how = run.accelerator.device.type, str(run.launch) or "one process"
    idle = {"memory_snapshot": device != "cuda", "find_unused_parameters": how != "ddp"}
    idle["optimizer_offload"] = (device, run.config.architecture.dtype) == ("cpu", "float32")
    asked = [name for name, is_idle in idle.items() if is_idle and run.config.get(name)]
    keeps = run.config.get("optimizer_offload") or run.config.get("bf16_update", "nearest") != "nearest"
    keeps |= run.launch.engine == "deepspeed"  # which updates fp32 originals
    if not keeps and any(p.dtype == torch.bfloat16 and p.requires_grad for p in parts.state.model.parameters()):
        remedy = "--dtype float32, or --bf16_update stochastic with adamw, keeps them"
        lines.append(f"dtype: bf16 weights lose small updates; {remedy}")
    return lines + [f"{name}: does nothing on {device.upper()} with {how}" for name in asked]


def describe_batch(arithmetic: BatchArithmetic) -> str:
    """micro-batch × accumulation × ranks = global batch, in words."""
    size, ranks = arithmetic.micro_batch_size, arithmetic.dp_size
    examples, processes = several(size, "example"), f"{ranks} process{'es' if ranks > 1 else ''}"
    made = f"{examples} per micro-batch × {arithmetic.accumulation_steps} accumulated × {processes}"
    return f"{made} = {arithmetic.global_batch_size} per step"
