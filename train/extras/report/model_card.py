"""The model card: what ``final/`` says of itself, in Markdown under the front matter that the Hub reads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from train.config import Config
from train.records import Evaluation
from train.wording import count, duration, gib, number, scalars, shown, words

_PIPELINES = {
    "causal_lm": ("text-generation", "AutoModelForCausalLM"),
    "masked_lm": ("fill-mask", "AutoModelForMaskedLM"),
    "sequence_classification": ("text-classification", "AutoModelForSequenceClassification"),
}


def model_card(config: Config, summary: Mapping[str, Any], evaluations: Iterable[Evaluation]) -> str:
    """The ``README.md`` of ``final/``: Markdown under the front matter that the Hub reads.

    Local paths appear by their last part only, since the card may be published.

    Args:
        config: the resolved configuration.
        summary: as in ``summary.json``.
        evaluations: the last of each split is shown.
    """
    name = config.output.run_name or config.data.task
    last = {evaluation.split: evaluation for evaluation in evaluations}
    sections = [
        _front_matter(config),
        f"# {name}\n\n{_what_it_is(config, summary)}",
        "## Results\n\n" + (_results(list(last.values())) or "No evaluation was run."),
        f"## Load it\n\n{_how_to_load(config)}",
        "## Training\n\n" + _markdown_table(["Setting", "Value"], list(_settings(config, summary).items())),
        "## Machine\n\n" + _markdown_table(["Part", "Value"], list(_machine(summary).items())),
        "## Before you use it\n\nThe figures above describe this data and nothing else. "
        "Licence, intended use and known weaknesses are for its author to add.",
    ]
    return "\n\n".join(sections) + "\n"


def _front_matter(config: Config) -> str:
    pipeline, _ = _PIPELINES.get(config.data.task, (None, ""))
    values = {
        "library_name": "transformers",
        "pipeline_tag": pipeline,
        "base_model": _hub_name(config.architecture.model),
        "datasets": [_hub_name(config.data.dataset)] if "/" in (_hub_name(config.data.dataset) or "") else None,
        "tags": ["accelerate", "long-context", config.data.task.replace("_", "-")],
    }
    known = {key: value for key, value in values.items() if value is not None}
    return f"---\n{yaml.safe_dump(known, sort_keys=False, allow_unicode=True)}---"


def _what_it_is(config: Config, summary: Mapping[str, Any]) -> str:
    source = config.architecture.model
    start = f"fine-tuned from `{_public(source)}`" if source else "trained from scratch"
    if config.architecture.adapter != "none":
        names = {"lora": "LoRA", "qlora": "QLoRA (its frozen layers in 4 bits)"}
        start += f" by {names[config.architecture.adapter]} of rank {config.architecture.lora_rank}"
    parts = [
        f"A {words(config.data.task)} model {start} on `{_public(config.data.dataset)}`",
        shown(summary, "steps", lambda value: f"{value:,} steps"),
        shown(summary, "tokens", lambda value: f"{value:,} tokens"),
        f"examples of up to {config.data.max_length:,} tokens",
    ]
    return ", ".join(part for part in parts if part) + "."


def _how_to_load(config: Config) -> str:
    _, loader = _PIPELINES.get(config.data.task, (None, "AutoModel"))
    source = config.architecture.model
    if source is not None and ":" in source and not _is_local(source):
        return (
            f"The weights are in `model.safetensors`; build the model with `{source}` and fill it with "
            "`safetensors.torch.load_model`. The tokenizer loads with `AutoTokenizer.from_pretrained`."
        )
    text = (
        f"```python\nfrom transformers import {loader}, AutoTokenizer\n\n"
        f'model = {loader}.from_pretrained("path/to/this/folder")\n'
        'tokenizer = AutoTokenizer.from_pretrained("path/to/this/folder")\n```'
    )
    if config.architecture.adapter != "none":
        text += (
            "\n\nThe adapter is merged into these weights. By itself it is in `adapter/`, for "
            f"`PeftModel.from_pretrained(base, ...)`; its base is {_base(config)}."
        )
    return text


def _base(config: Config) -> str:
    source = config.architecture.model
    if source is None:
        return f"the random initialisation of this architecture by seed {config.optimization.seed}"
    how = ", loaded in 4 bits (NF4, double quantization)" if config.architecture.adapter == "qlora" else ""
    return f"`{_public(source)}`{how}"


def _results(evaluations: list[Evaluation]) -> str:
    rows = [{"split": e.split, "step": e.step, **scalars(e.metrics)} for e in evaluations]
    columns = list(dict.fromkeys(name for row in rows for name in row))
    cells = [[number(row[name]) if name in row else "" for name in columns] for row in rows]
    return _markdown_table([words(name) for name in columns], cells) if rows else ""


def _settings(config: Config, summary: Mapping[str, Any]) -> dict[str, str]:
    optim = config.optimization
    values: dict[str, Any] = {
        "optimizer": optim.optimizer,
        "learning_rate": optim.learning_rate,
        "lr_scheduler": optim.lr_scheduler,
        "weight_decay": optim.weight_decay,
        "max_grad_norm": optim.max_grad_norm,
        "global batch (examples)": summary.get("global_batch_size") or optim.global_batch_size,
        "max_length": config.data.max_length,
        "mixed_precision": summary.get("mixed_precision") or optim.mixed_precision,
        "gradient_checkpointing": config.architecture.gradient_checkpointing,
        "seed": optim.seed,
    }
    return {name: str(value) for name, value in values.items() if value is not None}


def _machine(summary: Mapping[str, Any]) -> dict[str, str]:
    machine = summary.get("hardware") or {}
    gpus = [f"{gpu['name']} ({gib(gpu['memory_bytes'])})" for gpu in machine.get("gpus") or []]
    values = {
        "GPU": ", ".join(gpus) or None,
        "CPU": machine.get("cpu"),
        "Training time": shown(summary, "training_seconds", duration),
        "Tokens per second": shown(summary, "tokens_per_second", count),
        "Peak memory allocated": shown(summary, "peak_allocated_bytes", gib),
        **(summary.get("versions") or {}),
    }
    return {name: str(value) for name, value in values.items() if value}


def _markdown_table(header: list[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(_cell(text) for text in line)} |" for line in lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _is_local(name: str) -> bool:
    return Path(name).is_absolute() or name.startswith((".", "~")) or "\\" in name or Path(name).exists()


def _hub_name(name: str | None) -> str | None:
    return None if name is None or ":" in name or name.count("/") > 1 or _is_local(name) else name


def _public(name: str) -> str:
    return name.replace("\\", "/").rstrip("/").rsplit("/", 1)[-1] if _is_local(name) else name
