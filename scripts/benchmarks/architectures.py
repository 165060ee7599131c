"""Which of transformers' architectures train here as they would by themselves: each task, each technique, by numbers.

    python scripts/benchmarks/architectures.py --write

Every model type of transformers' mappings for a task, in a small copy with large random weights, in fp32. Compared are
the summed loss, and for chunks and checkpointing the gradients: with the model's own loss, with the rows of a padded
batch one by one, and with documents that are not packed.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import re
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.benchmarks import building, harness

if TYPE_CHECKING:
    import torch
    from torch import nn

    from train.model import ModelWithLoss
    from train.records import MicroBatch

TASKS = {
    "causal_lm": "MODEL_FOR_CAUSAL_LM_MAPPING",
    "masked_lm": "MODEL_FOR_MASKED_LM_MAPPING",
    "sequence_classification": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING",
}
COLUMNS = ("own loss", "padding", "packing", "chunked loss", "checkpointing")
VOCABULARY, LENGTH, CLASSES = 64, 12, ("a", "b", "c")
TOLERANCE = 2e-4
"""Of the largest gradient, and of the loss: fp32 through eight layers."""


@dataclass(frozen=True)
class Options(harness.Options):
    """Compares each architecture with itself."""

    tasks: tuple[str, ...] = tuple(TASKS)
    model_types: tuple[str, ...] = ()
    """Only these; default: all."""


class Tokenizer:
    """What building a model and a batch asks of one."""

    bos_token_id, eos_token_id, pad_token_id, mask_token_id = 1, 2, 0, 3
    cls_token_id = sep_token_id = None

    def __len__(self) -> int:
        return VOCABULARY


def measured(options: Options) -> dict[str, Any]:
    """A row for each task and model type."""
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    warnings.filterwarnings("ignore")
    rows = []
    for task in options.tasks:
        for model_type in options.model_types or names_of(task):
            started = time.perf_counter()
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                row = {"task": task, "model_type": model_type, **row_of(task, model_type)}
            print(f"{TABLE.row(cells(row))} {time.perf_counter() - started:.1f} s", flush=True)
            rows.append(row)
    return {"rows": rows}


def names_of(task: str) -> list[str]:
    """The model types that transformers has for a task."""
    from transformers.models.auto import modeling_auto

    return sorted(getattr(modeling_auto, f"{TASKS[task]}_NAMES"))


def row_of(task: str, model_type: str) -> dict[str, str]:
    """What each column says: equal, or why not."""
    from train.records import UserError

    try:
        config = small_config(task, model_type)
    except Exception as error:  # its default configuration cannot be built by transformers either
        return {"built": f"not by its defaults: {type(error).__name__}"}
    build = functools.partial(built, task, config)
    try:
        model = build()
    except UserError as error:
        return {"built": f"refused: {reason(error)}"}
    except Exception as error:
        return {"built": f"FAILED: {type(error).__name__}: {reason(error)}"}
    again = functools.partial(build, check_model=False)  # the model has been tried
    columns: dict[str, Callable[[], str]] = {
        "own loss": lambda: own_loss(task, model),
        "padding": lambda: padding(task, model),
        "packing": lambda: packing(task, model, again),
        "chunked loss": lambda: changed(task, model, lambda: again(loss="chunked")),
        "checkpointing": lambda: changed(task, model, lambda: again(gradient_checkpointing="full")),
    }
    found = {"built": "yes"}
    for name, compare in columns.items():
        try:
            found[name] = compare()
        except UserError as error:
            found[name] = f"refused: {reason(error)}"
        except Exception as error:
            found[name] = f"FAILED: {type(error).__name__}: {reason(error)}"
    return found


def reason(error: Exception) -> str:
    """The first words of a message, without what the command line adds."""
    text = re.sub(r"^(model|packing:|loss:) ('\S*'(:| ) ?)?", "", " ".join(str(error).split()))
    return text[:160].replace("|", "/")


def small_config(task: str, model_type: str) -> Any:
    """The configuration of a small copy of the architecture's default size."""
    import torch
    import transformers

    from train import tasks
    from train.extras import small_copy

    config = transformers.AutoConfig.for_model(model_type)
    config.use_cache, config.pad_token_id, config.eos_token_id = False, 0, 2
    if task == "causal_lm" and getattr(config, "is_decoder", None) is False:
        config.is_decoder = True
    with torch.device("meta"):
        model = getattr(transformers, tasks.load_task(task).auto_class).from_config(config)
    scales = small_copy.SCALES
    for number in range(len(scales)):  # some make a model, but are not a configuration that can be stored
        with patch.object(small_copy, "SCALES", scales[number:]), small_copy.small_copy(model) as small:
            found: Any = small.config
        try:
            return type(found).from_dict(found.to_dict())
        except Exception:  # configurations are validated by many libraries
            continue
    raise ValueError("no small configuration is valid")


def built(task: str, config: Any, **fields: Any) -> ModelWithLoss:
    """The model as a run builds it, with its loss and the extras of ``fields``; the same weights each time."""
    import torch
    from accelerate import Accelerator

    from train.config import from_values
    from train.model import build_model
    from train.tasks import load_task

    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        values = {"model": folder, "max_length": LENGTH, "micro_batch_size": 2, "task": task, "tokenizer": "bytes"}
        run = building.silent_run(from_values({**values, "loss": "full", **fields}), Accelerator(cpu=True))
        torch.manual_seed(0)
        names = CLASSES if task == "sequence_classification" else ()
        tokenizer: Any = Tokenizer()
        model = build_model(run, load_task(task), tokenizer, names, has_weights=False)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5
        with torch.no_grad():
            parameter.copy_(noise if parameter.ndim > 1 else parameter + 0.1 * noise)
    for module in model.modules():
        if getattr(module, "padding_idx", None) is not None and hasattr(module, "weight"):
            module.weight.data[module.padding_idx] = 0  # type: ignore
    return model.eval()  # dropout would tell nothing


def example(number: int, length: int) -> torch.Tensor:
    """(length,) tokens that end as documents do."""
    import torch

    return torch.cat([(torch.arange(length - 1) * 7 + 11 * number) % 58 + 5, torch.tensor([2])])


def batch_of(task: str, lengths: list[int], first: int = 0) -> MicroBatch:
    """Examples of these lengths, collated by the task."""
    import torch

    from train.config import from_values
    from train.tasks import load_task

    own = load_task(task)(from_values({"model": "some:model", "tokenizer": "bytes", "max_length": LENGTH}))
    rows = []
    for number, length in enumerate(lengths, start=first):
        tokens = example(number, length + (task == "causal_lm")).numpy()
        special = torch.zeros(len(tokens), dtype=torch.bool).numpy()
        row = {"id": number, "tokens": tokens, "length": length, "label": number % 3}
        rows.append({**row, "special": special, "vocab_size": VOCABULARY, "mask_id": 3})
    return own.collate(rows, (0, 0), pad_id=0)


def loss_of(model: nn.Module, batch: MicroBatch) -> float:
    """The summed loss."""
    from train.step import seed_step

    seed_step(0, 0, 0)  # some draw numbers in evaluation, too
    return model(batch.inputs, batch.labels, num_targets=batch.num_targets).item()


def equal(one: float, other: float) -> bool:
    return abs(one - other) <= TOLERANCE * max(1.0, abs(other))


def own_loss(task: str, model: ModelWithLoss) -> str:
    """Against the loss that the model computes from labels; a few do not shift them."""
    import torch

    batch = batch_of(task, [LENGTH, LENGTH])
    ours, whole = loss_of(model, batch) / batch.num_targets, batch.labels
    candidates = [whole]
    if task == "causal_lm":  # the last label has no input any more
        labels = whole.clone()
        labels[:, -1] = -100
        ours = loss_of(model, batch_with(batch, labels)) / (batch.num_targets - 2)
        candidates = [torch.cat([batch.inputs["input_ids"][:, :1], labels[:, :-1]], 1), labels]
    found = []
    for labels in candidates:
        torch.manual_seed(0)
        try:
            found.append(model.model(**batch.inputs, labels=labels).loss.item())
        except ValueError:
            return "–"  # of text alone it has none
        if equal(ours, found[-1]):
            return "equal"
    return f"DIFFERS: {ours:.5f} instead of {found[0]:.5f}"


def batch_with(batch: MicroBatch, labels: torch.Tensor) -> MicroBatch:
    from dataclasses import replace

    return replace(batch, labels=labels, num_targets=int((labels != -100).sum()))


def padding(task: str, model: ModelWithLoss) -> str:
    """A padded batch against its rows one by one."""

    def differs(model: ModelWithLoss) -> str | None:
        together = loss_of(model, batch_of(task, [LENGTH, 7]))
        alone = loss_of(model, batch_of(task, [LENGTH])) + loss_of(model, batch_of(task, [7], first=1))
        return None if equal(together, alone) else f"DIFFERS: {together:.5f} instead of {alone:.5f}"

    if (found := differs(model)) is not None and hasattr(model.model, "set_experts_implementation"):
        wide: Any = copy.deepcopy(model).double()  # in fp32 rounding may choose another expert
        wide.model.set_experts_implementation("batched_mm")
        found = differs(wide)
    return found or "equal"


def packing(task: str, model: ModelWithLoss, build: Callable[..., ModelWithLoss]) -> str:
    """Two packed documents against both one by one."""
    from functools import partial

    from datasets import Dataset

    from train.config import from_values
    from train.extras.long_sequences.packing import collate_packed, joined
    from train.tasks import load_task

    if task == "sequence_classification":
        return "–"
    changed = build(packing=True)
    own = load_task(task)(from_values({"model": "some:model", "tokenizer": "bytes", "max_length": LENGTH}))
    members = []
    for number, length in enumerate((5, 7)):
        tokens = example(number, length + (task == "causal_lm")).tolist()
        row = {"tokens": tokens, "length": length, "special": [False] * len(tokens)}
        members.append({**row, "vocab_size": VOCABULARY, "mask_id": 3})
    row = joined(Dataset.from_list(members), [[0, 1]]).to_pylist()[0]
    packed = partial(collate_packed, pad_id=0, collate=own.collate)([{**row, "id": 0}], (0, 0))
    together = loss_of(changed, packed)
    alone = loss_of(model, batch_of(task, [5])) + loss_of(model, batch_of(task, [7], first=1))
    return "equal" if equal(together, alone) else f"DIFFERS: {together:.5f} instead of {alone:.5f}"


def changed(task: str, model: ModelWithLoss, build: Callable[[], ModelWithLoss]) -> str:
    """Loss and gradients with a technique against those without."""
    other, batch = build(), batch_of(task, [LENGTH, LENGTH])
    loss_of(other, batch)  # BigBird puts other attention, with dropout, in its layers when it sees a short text
    other.train()
    for module in (*other.modules(), *model.modules()):
        if type(module).__name__.endswith("Dropout"):
            vars(module)["p"] = 0.0
    if equal(loss_of(model.train(), batch), loss_of(other, batch)):
        expected, found = gradients(model, batch), gradients(other, batch)
        model.eval()
        # Of the largest of all: some, such as those of a key's bias, are zero and computed as what rounding leaves.
        largest = max(gradient.abs().max().item() for gradient in expected.values())
        worst = max((found[name] - expected[name]).abs().max().item() for name in expected) / largest
        return "equal" if worst <= TOLERANCE else f"DIFFERS: gradients by {worst:.1e}"
    model.eval()
    return "DIFFERS: another loss"


def gradients(model: nn.Module, batch: MicroBatch) -> dict[str, torch.Tensor]:
    """By the parameter's name."""
    from train.step import seed_step

    model.zero_grad()
    seed_step(0, 0, 0)
    model(batch.inputs, batch.labels, num_targets=batch.num_targets).backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name.replace("_checkpoint_wrapped_module.", ""): grad for name, grad in found.items()}


def iterate(found: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Task, model type and cell of each column."""
    for row in found["rows"]:
        for column in ("built", *COLUMNS):
            yield row["task"], row["model_type"], row.get(column, "–")


TABLE = harness.Table(["model type", "built", *COLUMNS], "lllllll")


def cells(row: dict[str, Any]) -> list[str]:
    """A row of the table."""
    return [row["model_type"], row["built"], *(row.get(column, "–") for column in COLUMNS)]


def page(found: dict[str, Any]) -> str:
    """The page of these figures."""
    lines = [
        "# Architectures",
        "",
        "Every model type that transformers has for a task, compared with itself in a small copy: *equal*, or "
        "*refused* with the reason that a run would print. `not by its defaults` are model types whose default "
        "configuration transformers itself cannot build; they may work with a published one.",
        "",
        "Made by `scripts/benchmarks/architectures.py`.",
        "",
        harness.machine_line(found),
    ]
    for task in TASKS:
        rows = [row for row in found["rows"] if row["task"] == task]
        if not rows:
            continue
        counts = Counter(row["built"].split(":")[0] for row in rows)
        summary = ", ".join(f"{count} {what}" for what, count in counts.most_common())
        lines += ["", f"## {task}", "", f"{len(rows)} model types: {summary}.", "", *TABLE.lines(map(cells, rows))]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Compares, prints, and writes if asked to."""
    harness.report(Options, __doc__, measured, page, name="architectures", by_device=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
