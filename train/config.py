"""The configuration of a run: typed sections, defaults < YAML recipe < command line.

Flags and recipe keys are the same flat names, whatever section they live in; each extra brings a section of its own.
Nothing here imports torch, so ``--help`` answers at once and a wrong key stops the run before anything is loaded.
"""

import argparse
import contextlib
import dataclasses
import functools
import importlib.util
import inspect
import json
import math
import operator
import os
import re
import sys
import types
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

from train import extras
from train.launch import Launch
from train.records import UsageError, UserError, one_line

QUICKSTART = Path(__file__).resolve().parent.parent / "recipes" / "quickstart.yaml"
T = TypeVar("T")


def option(default: Any, help: str, **rules: Any) -> Any:
    """A field with its help text and rules: bounds ``ge``, ``gt``, ``le``, ``lt``; ``needs``: the option without which
    this one is refused; ``replaces``: recipe keys that this flag overrides; ``is_path``: expands ~; ``everyday``:
    listed first; ``alone``: the value of the flag by itself."""
    return field(default=default, metadata={"help": help, **rules})


everyday = functools.partial(option, everyday=True)


@dataclass(frozen=True)
class Data:
    """What is learned, and from which text."""

    task: str = everyday("causal_lm", "What is learned: a file in train/tasks/, or module:class.")
    dataset: str = everyday("stdlib", "Where documents come from, or module:function.", is_path=True)
    dataset_options: dict[str, Any] | None = option(None, "Options for a module:function, as JSON.")
    validation_fraction: float = option(0.05, "Share of documents held out if there is no validation data.", gt=0, lt=1)
    tokenizer: str | None = option(None, "Hub name, folder, bytes, words, train:8192; or the model's.", is_path=True)
    max_length: int = everyday(1024, "The longest example, in tokens.", ge=2)
    truncation: Literal["keep_head", "keep_tail", "keep_both"] = option("keep_head", "What is kept of a long document.")
    mlm_probability: float = option(0.15, "Share of the tokens that masked_lm hides.", gt=0, lt=1)
    preprocessing_num_workers: int | None = option(None, "Processes that tokenise; default: up to one per core.", ge=1)
    dataloader_num_workers: int = option(0, "Processes that load batches.", ge=0)


@dataclass(frozen=True)
class Architecture:
    """What is trained."""

    model: str | None = everyday(
        None, "Hub name, folder, or module:function.", is_path=True, replaces=("model_config", "tokenizer")
    )
    model_config: dict[str, Any] | None = option(
        None, "From scratch, as JSON: model_type (llama, bert, ...) and fields of its config.", replaces=("model",)
    )
    attn_implementation: str | None = option(None, "sdpa, flash_attention_2, eager ...; default: transformers' choice.")
    dtype: Literal["float32", "bfloat16", "float16"] = option("float32", "Type of the weights; see mixed_precision.")
    trust_remote_code: bool = option(False, "Run Python code that a model on the Hub brings.")

    @property
    def name(self) -> str:
        """What messages call the model."""
        return self.model or str((self.model_config or {}).get("model_type"))

    @property
    def is_function(self) -> bool:
        r"""Whether ``model`` is module:function. A folder, too, may have a colon in its name: ``C:\models\qwen``."""
        return self.model is not None and ":" in self.model and not Path(self.model).exists()


@dataclass(frozen=True)
class Optimization:
    """How it is trained."""

    micro_batch_size: int | Literal["auto"] = everyday(
        1, "Examples per forward and device; auto: as many as fit.", ge=1, replaces=("max_tokens_per_micro_batch",)
    )
    gradient_accumulation_steps: int | None = everyday(
        None, "Micro-batches per step; or give global_batch_size.", ge=1, replaces=("global_batch_size",)
    )
    global_batch_size: int | None = everyday(
        None, "Examples per step, all devices together.", ge=1, replaces=("gradient_accumulation_steps",)
    )
    max_steps: int | None = everyday(None, "Optimizer steps; or num_epochs.", ge=1, replaces=("num_epochs",))
    num_epochs: int | None = everyday(None, "Passes over the data; default: 1.", ge=1, replaces=("max_steps",))
    optimizer: Literal["adamw", "adamw_8bit", "adafactor", "sgd"] = option("adamw", "adamw_8bit needs bitsandbytes.")
    learning_rate: float = everyday(5e-5, "Peak of the schedule.", gt=0)
    lr_scheduler: Literal["constant", "linear", "cosine", "warmup_stable_decay"] = option("linear", "After warm-up.")
    warmup_steps: int | None = option(None, "Steps of warm-up.", ge=0, replaces=("warmup_ratio",))
    warmup_ratio: float = option(0.0, "Or warm-up as a share of all steps.", ge=0, le=1, replaces=("warmup_steps",))
    decay_ratio: float = option(0.2, "Share of all steps in which warmup_stable_decay decays.", ge=0, le=1)
    min_learning_rate_ratio: float = option(0.0, "Where decay ends, as a share of learning_rate.", ge=0, le=1)
    weight_decay: float = option(0.0, "Not applied to biases and norms.", ge=0)
    adam_beta1: float = option(0.9, "Decay of Adam's first moment.", ge=0, lt=1)
    adam_beta2: float = option(0.999, "Decay of Adam's second moment.", ge=0, lt=1)
    adam_epsilon: float = option(1e-8, "Added to Adam's denominator.", ge=1e-37)
    max_grad_norm: float | None = option(1.0, "Clip the gradient to this norm; None: do not.", gt=0)
    grad_norm_type: Literal["1", "2", "inf"] = option("2", "Which norm is clipped.")
    max_grad_value: float | None = option(None, "Or clip values to ± this.", gt=0, le=1e38, replaces=("max_grad_norm",))
    mixed_precision: Literal["no", "fp16", "bf16"] | None = everyday(
        None, "Default: the launch file's; without one, on a GPU bf16, or fp16 where it lacks bf16."
    )
    seed: int = option(42, "Seed of weights, order and dropout.", ge=0)
    distributed_timeout_seconds: int = option(1800, "How long to wait for a rank that does not answer.", ge=1, le=10**8)


@dataclass(frozen=True)
class Output:
    """What is evaluated and saved."""

    output_dir: str = everyday("runs/default", "The run's folder.", is_path=True)
    resume: str = everyday("auto", "auto, never (from scratch), or a checkpoint's folder.", is_path=True)
    save_every_steps: int | None = everyday(500, "Checkpoint every n steps, and at the end; None: only then.", ge=1)
    save_total_limit: int = option(2, "Checkpoints to keep, not counting the best.", ge=1)
    eval_every_steps: int | None = everyday(None, "Evaluate every n steps, and at the end.", ge=1)
    eval_batch_size: int | None = option(None, "Examples per batch of an evaluation; default: micro_batch_size.", ge=1)
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

    @property
    def sections(self) -> dict[str, Any]:
        """By name, those of the extras after the core's."""
        return {**{name: getattr(self, name) for name in CORE}, **self.extras}

    def of(self, options: type[T]) -> T:
        """The section of an extra, by its class."""
        return next(section for section in self.extras.values() if isinstance(section, options))

    def get(self, name: str, default: Any = None) -> Any:
        """The value of any field by its flat name; ``default`` where the extra that has it is not here."""
        return to_values(self).get(name, default)

    def changed(self, **values: Any) -> "Config":
        """This configuration with other values of the fields named."""
        return from_values({**to_values(self), **values})


@functools.cache
def fields() -> dict[str, tuple[Any, dataclasses.Field[Any]]]:
    """Of all fields by name, the type and the field."""
    hints = {cls: get_type_hints(cls) for cls in map(type, Config().sections.values())}
    return {f.name: (hints[cls][f.name], f) for cls in hints for f in dataclasses.fields(cls)}


def parse(arguments: list[str], launch: Launch | None = None) -> Config:
    """The configuration that ``arguments`` (without the program's name) ask for; raises SystemExit for ``--help``.

    Raises UsageError for an unknown flag or key, a wrong type, or a combination that cannot work under ``launch``.
    """
    known, flags = fields(), _flags(arguments)
    recipe = flags.pop("config", None)
    if recipe is None and not flags.keys() & {"task", "dataset", "model", "model_config", "tokenizer"}:
        recipe = str(QUICKSTART)
    values = read_recipe(Path(os.path.expanduser(recipe))) if recipe is not None else {}  # noqa: PTH111
    for name in (n for n, text in flags.items() if text not in ("None", "null")):  # puts aside what it replaces
        for key in (known.keys() & known[name][1].metadata.get("replaces", ())) - flags.keys():
            values[key] = None if _type_problem(None, known[key][0]) is None else known[key][1].default
    values |= {name: _from_text(text, known[name][0]) for name, text in flags.items()}
    config = from_values(values)
    check(config, launch)
    return config


def _flags(arguments: list[str]) -> dict[str, Any]:
    """The flags given, by name, as text or a list of texts; ``config`` is one of them."""
    parser = argparse.ArgumentParser(
        usage="train/main.py [--config recipe.yaml] [--flag value ...]",
        description="Train on long sequences. Every flag is also a key of a recipe; recipes/ holds examples. With none "
        "of --config --task --dataset --model --model_config --tokenizer, recipes/quickstart.yaml runs.",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        exit_on_error=False,
    )
    known, first = fields(), parser.add_argument_group("everyday")
    first.add_argument("--config", metavar="FILE", help="A YAML recipe; flags override it.")
    for section, part in Config().sections.items():
        group = parser.add_argument_group(section, part.__doc__)
        for entry in dataclasses.fields(part):
            hint, name, alone = known[entry.name][0], entry.name, alone_value(entry.name)
            place = first if entry.metadata.get("everyday") else group
            nargs = "?" if alone else "*" if get_origin(hint) is tuple else None
            needs = f"; needs {entry.metadata['needs']}" if "needs" in entry.metadata else ""
            text = f"{entry.metadata['help']} [{_type_problem(..., hint)}; default: {entry.default}{needs}]"
            place.add_argument(f"--{name}", metavar="…", nargs=nargs, const=alone, help=text.replace("%", "%%"))
    try:
        found, unknown = parser.parse_known_args([argument(word) for word in arguments])
    except argparse.ArgumentError as error:
        raise UsageError(f"{error}. train/main.py --help lists all flags.") from None
    if unknown:
        flags = [word.partition("=")[0] for word in unknown if word.startswith("--")]
        raise UsageError(extras.unknown("flag" if flags else "argument", flags or unknown[:1], known, "--"))
    return vars(found)


def alone_value(name: str) -> str | None:
    """What the bare flag --name stands for; None where a value has to follow, or there is no such flag."""
    if name not in fields():
        return None
    hint, entry = fields()[name]
    return entry.metadata.get("alone", "True" if hint is bool else None)


def argument(word: str) -> str:
    """A flag with underscores for dashes, and --no-load-best as --load_best=False; other words stay as they are."""
    if not word.startswith("--"):
        return re.sub(r"^-(?=[\d.])", " -", word)  # argparse takes -1e-4 for a flag, unless there is a space before
    name, equals, value = word[2:].partition("=")
    name = name.replace("-", "_")
    is_off = not equals and name.startswith("no_") and alone_value(name[3:]) is not None
    return f"--{name[3:]}=False" if is_off else f"--{name}{equals}{value}"


def _from_text(text: Any, hint: Any) -> Any:
    """What ``text`` of the command line stands for in a field of type ``hint``; the text itself where nothing fits."""
    if isinstance(text, list):
        return text[0] if len(text) == 1 else tuple(text)
    text = re.sub("^ (?=-)", "", text)  # which argument put there
    if text in ("None", "null"):
        return None
    candidates: list[Any] = [text]
    for read in (json.loads, int, yaml.safe_load, float) if text.strip() else ():  # int: YAML takes 010 for 8
        with contextlib.suppress(ValueError, RecursionError, yaml.YAMLError):
            candidates.append(read(text))
    return next((value for value in candidates if _type_problem(value, hint) is None), text)


class _StrictLoader(yaml.SafeLoader):
    """Plain data only; keys are names, and none appears twice."""

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Merges ``<<`` under the mapping's own values, after a check of its keys."""
        keys = [key.value for key, _ in node.value]
        for (key, _), name in zip(node.value, keys, strict=True):
            if keys.count(name) > 1 or key.tag not in ("tag:yaml.org,2002:str", "tag:yaml.org,2002:merge"):
                problem = "appears twice" if keys.count(name) > 1 else "is not a name"
                raise yaml.constructor.ConstructorError(None, None, f"the key {name} {problem}", node.start_mark)
        super().flatten_mapping(node)
        node.value = list({key.value: (key, value) for key, value in node.value}.values())  # else each merge adds up


def read_recipe(path: Path) -> dict[str, Any]:
    """The flat ``key: value`` pairs of a YAML recipe, unchecked; raises UsageError if it is not a mapping."""
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), Loader=_StrictLoader)
    except OSError as error:
        raise UsageError(f"--config {path}: {error.strerror or error}. Give the path of a YAML recipe.") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # a UnicodeDecodeError is a ValueError
        raise UsageError(f"--config {path}: not valid YAML: {one_line(error)}") from None
    if values is not None and not isinstance(values, dict):
        raise UsageError(f"--config {path}: expected 'key: value' lines, found a {type(values).__name__}.")
    return values or {}


def from_values(values: dict[str, Any]) -> Config:
    """A configuration from flat values, of their fields' types, over the defaults; UsageError says what would do."""
    known, own = fields(), {}
    if unknown := [name for name in values if name not in known]:
        raise UsageError(extras.unknown("key", unknown, known))
    for name, value in values.items():
        if get_origin(known[name][0]) is tuple and isinstance(value, str):  # "a, b" or "none", as Trainer takes them
            value = [] if value in ("none", "None", "null") else [part.strip() for part in value.split(",")]
        if problem := _type_problem(value, known[name][0]):
            raise UsageError(f"{name}: {value!r} is not valid: expected {problem}.")
        own[name] = tuple(value) if isinstance(value, list) else value
        if known[name][1].metadata.get("is_path") and isinstance(value, str):
            own[name] = os.path.expanduser(value)  # noqa: PTH111 - unlike Path's, leaves a home that is not there
    found = {n: replace(part, **{k: own[k] for k in vars(part).keys() & own}) for n, part in Config().sections.items()}
    return Config(**{name: found.pop(name) for name in CORE}, extras=found)


WORDS = {type(None): "null", float: "a number", int: "a whole number", bool: "true or false", str: "text"}


def _type_problem(value: Any, hint: Any) -> str | None:
    """What ``hint`` would have accepted, or None when ``value`` fits it."""
    origin, options = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        problems = [_type_problem(value, option) for option in options]
        return None if None in problems else " or ".join(map(str, problems))
    if origin is Literal:
        about_yaml = " (in quotes, else YAML reads a number or a boolean)" if isinstance(value, int) else ""
        return None if isinstance(value, str) and value in options else f"one of {', '.join(options)}{about_yaml}"
    if origin is tuple:
        fits = isinstance(value, list | tuple) and not any(_type_problem(v, options[0]) for v in value)
        return None if fits else f"a list of {_type_problem(..., options[0])}"
    if hint is float and isinstance(value, str):
        with contextlib.suppress(ValueError):
            return f"a number; YAML reads {value} as text, write {float(value)!r} with a dot, unquoted"
    accepted = int | float if hint is float else dict if origin is dict else hint
    fits = isinstance(value, accepted) and (hint is bool or not isinstance(value, bool))
    return None if fits else WORDS.get(hint, "a mapping")


def load_function(spec: str, flag: str) -> Callable[..., Any]:
    """The function that ``module:function`` or ``file.py:function`` names; raises UserError where there is none."""
    source, _, name = spec.rpartition(":")
    is_file, module_name = source.endswith(".py") and Path(source).exists(), source.lstrip(".") or spec
    folder = str(Path(source).resolve().parent if is_file else Path.cwd())
    if folder not in sys.path:
        sys.path.append(folder)  # for what is imported only when the function runs
    sys.path.insert(0, folder)
    try:
        if is_file:
            # No package has this name, as the file may be datasets.py. 🤗 Datasets caches by it, so it holds a digest.
            own = f"{flag}_of_{Path(source).stem}_{zlib.crc32(Path(source).read_bytes()):08x}"
            found: Any = importlib.util.spec_from_file_location(own, source)
            module = sys.modules[found.name] = importlib.util.module_from_spec(found)  # dataclasses look it up there
            found.loader.exec_module(module)
        else:
            module = importlib.import_module(module_name)
        function = getattr(module, name, None)
    except ModuleNotFoundError as error:
        if is_file or not f"{module_name}.".startswith(f"{error.name}."):  # it is there and imports what is not
            raise
        function = None
    finally:
        sys.path.remove(folder)  # our entry only: the module may have put others before it
    if not callable(function):
        give = "Give module:function, importable from the current folder, or file.py:function."
        raise UserError(f"{flag} {spec!r}: no such file, module or function. {give}")
    return function


def call_function(spec: str, flag: str, config: Config) -> Any:
    """Calls the function that ``spec`` names, with the configuration if it needs an argument; returns its result."""
    function = load_function(spec, flag)
    first = list(inspect.signature(function).parameters.values())[:1]  # or none
    if any(p.name == "config" and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) for p in first):
        return function(config=config)
    by_position = [p for p in first if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return function(*(config for p in by_position if p.default is p.empty))


BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}  # functions of operator, in words


def check(config: Config, launch: Launch | None = None) -> None:
    """Raises UsageError for a value out of bounds, and where an extra finds that a combination cannot work."""
    for name, value in to_values(config).items():
        if not isinstance(value, int | float):
            continue
        hint, entry = fields()[name]
        bounds = {rule: entry.metadata[rule] for rule in BOUNDS if rule in entry.metadata}
        is_finite = isinstance(value, int) or math.isfinite(value)  # an int may be beyond all floats
        if not is_finite or not all(getattr(operator, rule)(value, bounds[rule]) for rule in bounds):
            words = [f"{BOUNDS[rule]} {bound}" for rule, bound in bounds.items()] + ([] if is_finite else ["finite"])
            off = "; null (None on the command line) turns it off" if _type_problem(None, hint) is None else ""
            raise UsageError(f"{name}: {value} is not valid: it must be {' and '.join(words)}{off}.")
    extras.check(config, launch or Launch())


def to_values(config: Config) -> dict[str, Any]:
    """All fields as flat ``key: value`` pairs."""
    return {name: value for section in config.sections.values() for name, value in vars(section).items()}


def dump(config: Config) -> str:
    """YAML that :func:`parse` reads back to this configuration."""
    style: Any = {"sort_keys": False, "allow_unicode": True}
    return "\n".join(f"# {name}\n{yaml.safe_dump(vars(part), **style)}" for name, part in config.sections.items())
