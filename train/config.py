"""The configuration of a run: typed sections, defaults < YAML recipe < command line.

Flags and recipe keys are the same flat names, whatever section they live in; each extra brings a section of its own.
Nothing here imports torch, so ``--help`` answers at once and a wrong key stops the run before anything is loaded.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import difflib
import math
import operator
import re
import sys
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar

import yaml

from train import extras
from train.records import UsageError

QUICKSTART = Path(__file__).resolve().parent.parent / "recipes" / "quickstart.yaml"
LARGEST = 2**63 - 1
"""Whole number: what torch and Arrow hold."""
T = TypeVar("T")


def option(default: Any, help: str, **rules: Any) -> Any:
    """A field with its help text and its rules.

    Args:
        rules: bounds ``ge``, ``gt``, ``le``, ``lt``; ``replaces``: keys of a recipe that this flag puts aside;
            ``is_path``: ~ is the home folder; ``everyday``: among the first in ``--help``.
    """
    return field(default=default, metadata={"help": help, **rules})


@dataclass(frozen=True)
class Data:
    """What is learned, and from which text."""

    task: str = option("causal_lm", "What is learned: a file in train/tasks/.", everyday=True)
    dataset: str = option("stdlib", "Where documents come from; module:function returns 🤗 datasets.", everyday=True)
    dataset_options: dict[str, Any] | None = option(None, "Options for a module:function, as JSON.")
    validation_fraction: float = option(0.05, "Share held out where there is no validation data.", gt=0, lt=1)
    tokenizer: str | None = option(
        None, "Hub name, folder, bytes, words, train:8192; default: the model's.", is_path=True
    )
    max_length: int = option(1024, "Tokens of one example.", ge=2, everyday=True)
    truncation: Literal["keep_head", "keep_tail", "keep_both"] = option(
        "keep_head", "Classification: what stays of a long document."
    )
    mlm_probability: float = option(0.15, "Share of the tokens that masked_lm hides.", gt=0, lt=1)
    preprocessing_num_workers: int | None = option(None, "Processes that tokenise; default: up to one per core.", ge=1)
    dataloader_num_workers: int = option(0, "Processes that load batches.", ge=0)


@dataclass(frozen=True)
class Architecture:
    """What is trained."""

    model: str | None = option(
        None,
        "Hub name, folder, or module:function.",
        is_path=True,
        replaces=("model_config", "tokenizer"),
        everyday=True,
    )
    model_config: dict[str, Any] | None = option(
        None,
        "From scratch, as JSON: model_type (llama, bert, ...) and fields of its configuration.",
        replaces=("model",),
    )
    attn_implementation: str | None = option(None, "sdpa, flash_attention_2, eager ...; default: transformers' choice.")
    dtype: Literal["float32", "bfloat16", "float16"] = option("float32", "Type of the weights; see mixed_precision.")
    trust_remote_code: bool = option(False, "Run Python code that a model on the Hub brings.")


@dataclass(frozen=True)
class Optimization:
    """How it is trained."""

    micro_batch_size: int | Literal["auto"] = option(
        1,
        "Examples per forward and device; auto: what fits.",
        ge=1,
        replaces=("max_tokens_per_micro_batch",),
        everyday=True,
    )
    gradient_accumulation_steps: int | None = option(
        None, "Micro-batches per step; or give global_batch_size.", ge=1, replaces=("global_batch_size",), everyday=True
    )
    global_batch_size: int | None = option(
        None, "Examples per step, all devices together.", ge=1, replaces=("gradient_accumulation_steps",), everyday=True
    )
    max_steps: int | None = option(
        None, "Optimizer steps; or num_epochs.", ge=1, replaces=("num_epochs",), everyday=True
    )
    num_epochs: int | None = option(
        None, "Passes over the data; default: 1.", ge=1, replaces=("max_steps",), everyday=True
    )
    optimizer: Literal["adamw", "adamw_8bit", "adafactor", "sgd"] = option("adamw", "adamw_8bit needs bitsandbytes.")
    learning_rate: float = option(5e-5, "At its peak.", gt=0, everyday=True)
    learning_rate_scaling: Literal["none", "linear", "sqrt"] = option("none", "By global batch / reference batch.")
    learning_rate_reference_batch_size: int | None = option(None, "Global batch learning_rate was chosen for.", ge=1)
    lr_scheduler: Literal["constant", "linear", "cosine", "warmup_stable_decay"] = option(
        "linear", "After the warm-up."
    )
    warmup_steps: int | None = option(None, "Steps of warm-up.", ge=0, replaces=("warmup_ratio",))
    warmup_ratio: float = option(0.0, "Or its share of all steps.", ge=0, le=1, replaces=("warmup_steps",))
    decay_ratio: float = option(0.2, "Share of all steps that decay in warmup_stable_decay.", ge=0, le=1)
    min_learning_rate_ratio: float = option(0.0, "Where decay ends, as a share of learning_rate.", ge=0, le=1)
    weight_decay: float = option(0.0, "Not applied to biases and norms.", ge=0)
    adam_beta1: float = option(0.9, "Decay of Adam's first moment.", ge=0, lt=1)
    adam_beta2: float = option(0.999, "Decay of Adam's second moment.", ge=0, lt=1)
    adam_epsilon: float = option(1e-8, "Added to Adam's denominator.", ge=0)
    sgd_momentum: float = option(0.9, "Momentum of sgd.", ge=0)
    max_grad_norm: float | None = option(1.0, "Clip the gradient to this norm; None: do not.", gt=0)
    grad_norm_type: Literal["1", "2", "inf"] = option("2", "Which norm is clipped.")
    max_grad_value: float | None = option(
        None, "Clip each element to +- this instead.", gt=0, replaces=("max_grad_norm",)
    )
    max_consecutive_nonfinite_steps: int = option(25, "Stop after this many steps without a finite gradient.", ge=1)
    mixed_precision: Literal["no", "fp16", "bf16"] | None = option(None, "Default: the launcher's.", everyday=True)
    tf32: bool = option(True, "Multiply fp32 matrices in TF32 on CUDA since Ampere: 10 bits of mantissa, much faster.")
    label_smoothing: float = option(0.0, "Share of each target spread over all classes (arXiv 1512.00567).", ge=0, lt=1)
    z_loss: float = option(
        0.0, "Coefficient of log² Z per target, which keeps logits from drifting (PaLM: 1e-4).", ge=0
    )
    seed: int = option(42, "Of weights, order and dropout.", ge=0)
    cpu_threads: int | None = option(None, "Threads of a process on a CPU; default: its share of the cores.", ge=1)
    distributed_timeout_seconds: int = option(1800, "How long to wait for a rank that does not answer.", ge=1)


@dataclass(frozen=True)
class Output:
    """What is evaluated and saved."""

    output_dir: str = option("runs/default", "The run's folder.", is_path=True, everyday=True)
    resume: str = option("auto", "auto, never (from scratch), or a checkpoint's folder.", is_path=True, everyday=True)
    allow_changes_on_resume: bool = option(False, "Resume with other data, model, batch or seed.")
    save_every_steps: int | None = option(None, "Checkpoint also every n steps.", ge=1, everyday=True)
    save_total_limit: int = option(2, "Checkpoints to keep, the best one apart.", ge=1)
    eval_every_steps: int | None = option(None, "Evaluate also every n steps.", ge=1, everyday=True)
    eval_batch_size: int | None = option(None, "Default: micro_batch_size.", ge=1)
    metric_for_best: str | None = option(None, "Default: the task's own (loss, accuracy).")
    greater_is_better: bool | None = option(None, "Default: yes, except for loss, perplexity and bits_per_byte.")
    metrics: tuple[str, ...] = option((), "Further metrics of 🤗 evaluate for classification, by name or folder.")
    load_best_model_at_end: bool = option(False, "final/ holds the best evaluated weights instead of the last.")
    early_stopping_patience: int | None = option(None, "Stop after this many evaluations without a better one.", ge=1)
    log_every_steps: int = option(10, "A line of metrics.jsonl every n steps.", ge=1)


CORE: dict[str, type] = {"data": Data, "architecture": Architecture, "optimization": Optimization, "output": Output}


@dataclass(frozen=True)
class Config:
    """All sections of a run."""

    data: Data = field(default_factory=Data)
    architecture: Architecture = field(default_factory=Architecture)
    optimization: Optimization = field(default_factory=Optimization)
    output: Output = field(default_factory=Output)
    extras: dict[str, Any] = field(default_factory=lambda: {name: cls() for name, cls in extras.options().items()})
    """The section of each extra that has one, by the extra's name."""

    def of(self, options: type[T]) -> T:
        """The section of an extra, by its class."""
        return next(section for section in self.extras.values() if isinstance(section, options))

    def get(self, name: str, default: Any = None) -> Any:
        """The value of any field by its flat name; ``default`` where the extra that has it is not here."""
        return to_values(self).get(name, default)

    def changed(self, **values: Any) -> Config:
        """This configuration with other values of the fields named."""
        return from_values({**to_values(self), **values})


def sections() -> dict[str, type]:
    """The sections by name, those of the extras after the core's."""
    return {**CORE, **extras.options()}


def fields() -> dict[str, tuple[Any, dataclasses.Field[Any]]]:
    """Of all fields by name, the type and the field."""
    hints = {cls: typing.get_type_hints(cls) for cls in sections().values()}
    return {f.name: (hints[cls][f.name], f) for cls in hints for f in dataclasses.fields(cls)}


def parse(arguments: list[str]) -> Config:
    """The configuration that ``arguments`` (without the program's name) ask for.

    Raises:
        UsageError: unknown flag or key, wrong type, or a combination that cannot work.
        SystemExit: status 0 for ``--help``.
    """
    known = fields()
    flags = _flags(arguments, known)
    recipe = flags.pop("config", None)
    if recipe is None and not flags.keys() & {"task", "dataset", "model", "model_config", "tokenizer"}:
        recipe = str(QUICKSTART)
    values = read_recipe(Path(_at_home(recipe))) if recipe else {}
    for name in flags:  # of two ways to say one thing, that of the command line counts
        for key in set(known[name][1].metadata.get("replaces", ())) - flags.keys():
            values.pop(key, None)
    values |= {name: _from_text(text, known[name][0]) for name, text in flags.items()}
    for name, value in values.items():
        if name in known and known[name][1].metadata.get("is_path") and isinstance(value, str):
            values[name] = _at_home(value)
    config = from_values(values)
    check(config)
    optim = config.optimization
    # Only on the command line: a few steps of a recipe, and the config.yaml they leave, are not meant to warm up.
    if "warmup_steps" in flags and optim.max_steps is not None and (optim.warmup_steps or 0) > optim.max_steps:
        raise UsageError(
            f"warmup_steps: {optim.warmup_steps} is more than max_steps: {optim.max_steps}: the run would end before "
            "learning_rate is reached. Give fewer, or warmup_ratio."
        )
    return config


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}. train/main.py --help lists all flags.")


def _flags(arguments: list[str], known: dict[str, tuple[Any, dataclasses.Field[Any]]]) -> dict[str, Any]:
    """The flags given, by name, as text or a list of texts; ``config`` is one of them."""
    about = (
        "Train on long sequences. Every flag is also a key of a recipe; recipes/ holds examples. With none of --config "
        "--task --dataset --model --model_config --tokenizer, recipes/quickstart.yaml runs."
    )
    usage = "train/main.py [--config recipe.yaml] [--flag value ...]"
    parser = _Parser(usage=usage, description=about, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    everyday = parser.add_argument_group("everyday")
    everyday.add_argument("--config", metavar="FILE", help="A YAML recipe; flags override it.")
    for section, cls in sections().items():
        group = parser.add_argument_group(section, cls.__doc__)
        for entry in dataclasses.fields(cls):
            hint = known[entry.name][0]
            nargs = {bool: "?", tuple[str, ...]: "*"}.get(hint, "*" if typing.get_origin(hint) is tuple else None)
            text = f"{entry.metadata['help']} [{_kind(str(entry.type))}; default: {entry.default}]".replace("%", "%%")
            options: dict[str, Any] = {"nargs": nargs, "const": "True" if nargs == "?" else None, "help": text}
            place = everyday if entry.metadata.get("everyday") else group
            place.add_argument(f"--{entry.name}", metavar="…" if nargs != "?" else "True|False", **options)
    given: list[str] = []
    for argument in arguments:  # hyphens or underscores, --packing, --packing False, --no-packing
        if given and re.fullmatch(r"-[\d.]+e[-+]?\d+", argument, re.IGNORECASE):  # argparse takes -1e-4 for a flag
            given[-1] += "=" + argument
            continue
        name, equals, value = argument.partition("=")
        if argument.startswith("--"):
            name = "--" + name[2:].replace("-", "_")
            if name[5:] in known and name.startswith("--no_"):
                name, equals, value = f"--{name[5:]}", "=", "False"
            if name[2:] not in (*known, "config", "help"):
                raise _unknown(name[2:], known, "--")
        given.append(name + equals + value)
    return vars(parser.parse_args(given))


def _kind(annotation: str) -> str:
    """``Literal["a", "b"] | None`` as a|b, and other types as a person calls them."""
    words = re.sub(
        r"Literal\[(.*?)\]", lambda found: found[1].replace('"', "").replace("'", "").replace(", ", "|"), annotation
    )
    words = re.sub(r"tuple\[(.*), \.\.\.\]", r"\1 ...", words).replace(" | None", "").replace("dict[str, Any]", "JSON")
    return words.replace(" | ", "|").replace("str", "text")


def _from_text(text: Any, hint: Any) -> Any:
    """What ``text`` of the command line stands for in a field of type ``hint``; the text itself where nothing fits."""
    if isinstance(text, list):
        return tuple(text)
    candidates: list[Any] = [None] if text in ("None", "null") else []
    candidates.append(text)
    for read in (yaml.safe_load, float):
        with contextlib.suppress(ValueError, yaml.YAMLError):
            candidates.append(read(text))
    return next((value for value in candidates if _type_problem(value, hint) is None), text)


def _unknown(name: str, known: typing.Iterable[str], dashes: str = "") -> UsageError:
    close = difflib.get_close_matches(name, known, n=1)
    hint = f" Did you mean {dashes}{close[0]}?" if close else " train/main.py --help lists all."
    if missing := extras.missing():
        hint += f" This copy of the template is without the extras {', '.join(missing)} and their options."
    return UsageError(f"unknown {'flag' if dashes else 'key'} {dashes}{name}.{hint}")


def _at_home(name: str) -> str:
    """``name`` with a leading ~ as the home folder, if there is one."""
    if name.startswith("~"):
        with contextlib.suppress(RuntimeError):
            return str(Path(name).expanduser())
    return name


class _StrictLoader(yaml.SafeLoader):
    """Plain data only, and no key twice."""

    def __init__(self, stream: Any) -> None:
        super().__init__(stream)
        self._flat: set[yaml.MappingNode] = set()

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Merges ``<<`` under the mapping's own values, after a check that its keys are names and all different."""
        if node in self._flat:
            return
        self._flat.add(node)
        merges = "tag:yaml.org,2002:merge"
        keys = ["<<" if key.tag == merges else self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if not isinstance(key, str) or keys.count(key) > 1:
                problem = f"the key {key} stands twice" if isinstance(key, str) else f"the key {key!r} is not a name"
                raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        super().flatten_mapping(node)
        node.value = list({key.value: (key, value) for key, value in node.value}.values())  # else each merge adds up


def read_recipe(path: Path) -> dict[str, Any]:
    """The flat ``key: value`` pairs of a YAML recipe, not yet checked.

    Raises:
        UsageError: the file cannot be read or is not a mapping.
    """
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), Loader=_StrictLoader)
    except OSError as error:
        raise UsageError(f"--config {path}: {error.strerror or error}. Give the path of a YAML recipe.") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"--config {path}: not UTF-8 text ({error.reason} at byte {error.start}).") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UsageError(f"--config {path}: not valid YAML: {' '.join(str(error).split())}") from None
    if values is not None and not isinstance(values, dict):
        raise UsageError(f"--config {path}: expected 'key: value' lines, found a {type(values).__name__}.")
    return values or {}


def from_values(values: dict[str, Any]) -> Config:
    """A configuration from flat values over the defaults; each value must already have its field's type.

    Raises:
        UsageError: naming the key, the value and what would do.
    """
    known = fields()
    for name, value in values.items():
        if name not in known:
            raise _unknown(name, known)
        if problem := _type_problem(value, known[name][0]):
            raise UsageError(f"{name}: {value!r} is not valid: expected {problem}.")
    own = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
    found = {
        section: cls(**{f.name: own[f.name] for f in dataclasses.fields(cls) if f.name in own})
        for section, cls in sections().items()
    }
    return Config(**{name: found.pop(name) for name in CORE}, extras=found)


def _type_problem(value: Any, hint: Any) -> str | None:
    """What ``hint`` would have accepted, or None when ``value`` fits it."""
    origin, options = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        problems = [_type_problem(value, option) for option in options]
        return None if None in problems else " or ".join(p for p in problems if p)
    if origin is Literal:
        about_yaml = " (in quotes: YAML reads no, off, yes and on as booleans)" if isinstance(value, bool) else ""
        fits = any(value == option and type(value) is type(option) for option in options)
        return None if fits else "one of " + ", ".join(map(str, options)) + about_yaml
    if origin is tuple:
        if not isinstance(value, list | tuple):
            return "a list"
        return next((f"a list of {p}" for p in (_type_problem(v, options[0]) for v in value) if p), None)
    if hint is float and isinstance(value, str):
        with contextlib.suppress(ValueError):
            return f"a number; YAML reads {value} as text, write {float(value)!r} with a dot, unquoted"
    accepted, words = {
        type(None): (type(None), "null"),
        float: (int | float, "a number"),
        int: (int, "a whole number"),
        bool: (bool, "true or false"),
        str: (str, "text"),
    }.get(hint, (dict, "a mapping"))
    fits = isinstance(value, accepted) and (hint is bool or not isinstance(value, bool))
    if fits and hint is float and isinstance(value, int) and abs(value) > sys.float_info.max:
        return words
    return None if fits else words


def check(config: Config) -> None:
    """Stops on values and combinations that cannot work.

    Raises:
        UsageError: naming the field, its value and what would do.
    """
    for name, value in to_values(config).items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            _check_bounds(name, value, *fields()[name])
    _check_optimization(config)
    _check_model(config)
    _check_output(config.output)
    extras.check(config)


BOUNDS: dict[str, tuple[Any, str]] = {
    "ge": (operator.ge, "at least"),
    "gt": (operator.gt, "above"),
    "le": (operator.le, "at most"),
    "lt": (operator.lt, "below"),
}


def _check_bounds(name: str, value: float, hint: Any, entry: dataclasses.Field[Any]) -> None:
    if isinstance(value, int) and value > LARGEST:
        raise UsageError(f"{name}: {value} is too large: at most {LARGEST}.")
    rules = {rule: entry.metadata[rule] for rule in BOUNDS if rule in entry.metadata}
    if not math.isfinite(value) or not all(BOUNDS[rule][0](value, bound) for rule, bound in rules.items()):
        expected = " and ".join(f"{BOUNDS[rule][1]} {bound}" for rule, bound in rules.items()) or "finite"
        off = "; null (None on the command line) turns it off" if _type_problem(None, hint) is None else ""
        raise UsageError(f"{name}: {value} is not valid: it must be {expected}{off}.")


def _check_optimization(config: Config) -> None:
    """The part of :func:`check` about batch sizes, steps and the optimizer."""
    optim = config.optimization
    if optim.micro_batch_size == "auto" and "memory" in extras.missing():
        raise UsageError(
            "micro_batch_size: auto needs train/memory/, which is not here or lacks train/extras/meter/: give a number."
        )
    if optim.max_grad_norm is not None and optim.max_grad_value is not None:
        raise UsageError(
            "max_grad_norm and max_grad_value clip the same gradient: give one and set the other to null "
            "(None on the command line)."
        )
    if optim.max_steps is not None and optim.num_epochs is not None:
        raise UsageError("max_steps and num_epochs both say when to stop: give one of them.")
    if optim.warmup_steps is not None and optim.warmup_ratio > 0:
        raise UsageError("warmup_steps and warmup_ratio both say how long to warm up: give one of them.")
    if optim.learning_rate_scaling != "none" and optim.learning_rate_reference_batch_size is None:
        raise UsageError(
            f"learning_rate_scaling: {optim.learning_rate_scaling} needs learning_rate_reference_batch_size, "
            "the global batch that learning_rate was chosen for."
        )


def _check_model(config: Config) -> None:
    data, model = config.data, config.architecture
    if data.tokenizer is not None and data.tokenizer.startswith("train:"):
        size = data.tokenizer.removeprefix("train:")
        if not size.isdigit() or int(size) < 300:
            raise UsageError(f"tokenizer: {data.tokenizer!r}: write train:N with a vocabulary of at least 300.")
    if model.model is None and model.model_config is None:
        raise UsageError(
            "no model: give --model (Hub name, folder or module:function), a recipe with a model_config, or "
            "--config recipes/quickstart.yaml for its small one."
        )
    if model.model is not None and model.model_config is not None:
        raise UsageError("model and model_config both name a model: give one of them.")
    if model.model_config is not None and not isinstance(model.model_config.get("model_type"), str):
        raise UsageError("model_config: model_type is missing: llama, gpt2, modernbert, bert, qwen3 ...")
    if data.tokenizer is None and (model.model is None or ":" in model.model):
        raise UsageError("tokenizer: this model brings none: give a Hub name, a folder, 'bytes' or 'train:8192'.")


def _check_output(output: Output) -> None:
    if ".." in Path(output.output_dir).parts or "\0" in output.output_dir:
        raise UsageError(f"output_dir: {output.output_dir!r} leads outside its folder: write the path without '..'.")
    if output.early_stopping_patience is not None and output.eval_every_steps is None:
        raise UsageError("early_stopping_patience needs eval_every_steps.")


def to_values(config: Config) -> dict[str, Any]:
    """All fields as flat ``key: value`` pairs."""
    found = [getattr(config, name) for name in CORE] + list(config.extras.values())
    return {f.name: getattr(section, f.name) for section in found for f in dataclasses.fields(section)}


def dump(config: Config) -> str:
    """YAML that :func:`parse` reads back to this configuration."""
    values = {k: list(v) if isinstance(v, tuple) else v for k, v in to_values(config).items()}
    blocks = [
        f"# {section}\n" + yaml.safe_dump(
            {f.name: values[f.name] for f in dataclasses.fields(cls)}, sort_keys=False, allow_unicode=True)
        for section, cls in sections().items()
    ]  # fmt: skip
    return "\n".join(blocks)
