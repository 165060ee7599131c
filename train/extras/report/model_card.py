"""The model card: what ``final/`` says of itself, in Markdown under the front matter that the Hub reads."""

from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from train.config import Config, to_values
from train.extras.report import Options
from train.extras.report.machine import machine_facts, scalars, shown
from train.figures import count, duration, gib, number, without_secrets
from train.tasks import Task

TEMPLATE = Path(__file__).with_suffix(".md").read_text(encoding="utf-8")
_SETTINGS = ("optimizer", "learning_rate", "global_batch_size", "max_length", "mixed_precision", "steps", "tokens")
_PIPELINES = {"CausalLM": "text-generation", "MaskedLM": "fill-mask", "SequenceClassification": "text-classification"}
_PIPELINES |= {"TokenClassification": "token-classification"}


def model_card(config: Config, task: type[Task], summary: Mapping[str, Any]) -> str:
    """``final/README.md``. Of local paths it shows the last part only; any key of ``summary`` may be missing."""
    from huggingface_hub import ModelCardData

    dataset, final = _hub_name(config.data.dataset), Path(config.output.output_dir) / "final"
    is_own = config.architecture.is_function and not (final / "config.json").exists()
    is_peft = any(final.rglob("adapter_config.json")) and not any(final.glob("model*.safetensors"))  # not merged
    front = ModelCardData(
        library_name="peft" if is_peft else None if is_own else "transformers",
        pipeline_tag=None if is_own else _PIPELINES.get(task.auto_class.removeprefix("AutoModelFor")),
        base_model=_hub_name(config.architecture.model),
        datasets=[dataset] if dataset and "/" in dataset else None,
        tags=["accelerate", "long-context", task.name.replace("_", "-")],
    )
    source, adapter = config.architecture.model, config.get("adapter", "none")
    given = "that `{}` builds, trained" if config.architecture.is_function else "fine-tuned from `{}`"
    origin = given.format(_public(source)) if source else "trained from scratch"
    kind = {"lora": "LoRA", "qlora": "QLoRA"}.get(adapter, adapter)
    origin += f" by {kind} of rank {config.get('lora_rank')}" if adapter != "none" else ""
    settings = {**to_values(config), **summary}
    facts = {
        **{name: str(settings[name]) for name in _SETTINGS if settings.get(name) is not None},
        "classes": ", ".join(summary.get("label_names") or ()) or None,
        "training time": shown(summary, "training_seconds", duration),
        "tokens per second": shown(summary, "tokens_per_second", count),
        "peak memory allocated": shown(summary, "peak_allocated_bytes", gib),
        **{n: v for n, v in machine_facts(summary).items() if n != "Platform"},  # a kernel says nothing of the model
    }
    results = summary.get("result") or {}
    rows = [{"split": split, "step": summary.get("final_step"), **scalars(found)} for split, found in results.items()]
    names = list(dict.fromkeys(name for row in rows for name in row if name != "data"))
    cells = [[number(row[name]) if name in row else "" for name in names] for row in rows]
    parts = {
        "front": front.to_yaml(),
        "title": _plain(config.of(Options).run_name or task.name),
        "what": f"{task.title or task.name.replace('_', ' ')} model {origin} on `{_public(config.data.dataset)}`",
        "results": _table([n.replace("_", " ") for n in names], cells) if rows else "No evaluation was run.",
        "loading": _how_to_load(config, task, is_own, is_peft),
        "training": _table(["What", "Value"], [[n, str(value)] for n, value in facts.items() if value is not None]),
    }
    return without_secrets(TEMPLATE.format(**parts))


def _how_to_load(config: Config, task: type[Task], is_own: bool, is_peft: bool) -> str:
    source, adapter, loader = config.architecture.model, config.get("adapter", "none"), task.auto_class
    if source is not None and is_peft and adapter == "none":
        how = '`PeftModel.from_pretrained(base, "path/to/this/folder")` puts them on its base.'
        return f"These are the adapters of the model that `{_public(source)}` builds. {how}"
    if source is not None and is_own and not is_peft:
        how = f"build the model with `{_public(source)}` and fill it with `safetensors.torch.load_model`"
        return f"The weights are in `model.safetensors`; {how}. `AutoTokenizer.from_pretrained` loads the tokenizer."
    trust = ", trust_remote_code=True" if config.architecture.trust_remote_code else ""
    text = (
        f"```python\nfrom transformers import {loader}, AutoTokenizer\n\n"
        f'model = {loader}.from_pretrained("path/to/this/folder"{trust})\n'
        f'tokenizer = AutoTokenizer.from_pretrained("path/to/this/folder"{trust})\n```'
    )
    if adapter == "none":
        return text
    base = f"`{_public(source)}`" if source else f"this model as seed {config.optimization.seed} initialises it"
    more = f', loaded with `config=AutoConfig.from_pretrained("path/to/this/folder"{trust})`'
    more *= bool(source and not config.architecture.is_function)
    how = f"in `adapter/`, for `PeftModel.from_pretrained(base, ...)`; its base is {base}{more}."
    if is_peft:
        return f"The adapter is {how} It is not merged: the whole model is not in this folder."
    return f"{text}\n\nThe adapter is merged into these weights. By itself it is {how}"


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [[_plain(cell).replace("|", "\\|") for cell in row] for row in (head, ["---"] * len(head), *rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _plain(text: str) -> str:
    """In one line, and without any HTML, which Markdown lets pass."""
    return escape(" ".join(text.split()), quote=False)


def _is_local(name: str) -> bool:
    return name.startswith((".", "~", "/")) or "\\" in name or ".py:" in name or Path(name).exists()


def _hub_name(name: str | None) -> str | None:
    return None if name is None or ":" in name or name.count("/") > 1 or _is_local(name) else name


def _public(name: str) -> str:
    name = " ".join(name.replace("`", "'").split())  # it stands between backticks, where HTML is only text
    return name.replace("\\", "/").rstrip("/").rsplit("/", 1)[-1] if _is_local(name) else name
