"""The whole configuration of a run: typed sections, defaults < YAML recipe < command line.

Flags and recipe keys are the same flat names, whatever section they live in. Nothing here imports torch, so
``--help`` answers at once and a wrong key stops the run before anything is loaded.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import importlib.util
import json
import math
import re
import sys
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

import yaml

from train.errors import UsageError

QUICKSTART = Path(__file__).resolve().parent.parent / "recipes" / "quickstart.yaml"


LARGEST = 2**63 - 1
"""Whole number: what torch and Arrow hold."""


def _json_object(words: list[str]) -> dict[str, Any] | None:
    if words[0] in ("None", "null"):
        return None
    try:
        value = json.loads(words[0])
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ValueError(f'{words[0]} is not a JSON object such as {{"model_type": "llama", "hidden_size": 256}}')
    return value


JsonObject: TypeAlias = dict[str, Any] | None
ADAPTER_PACKAGES = {"lora": ("peft",), "qlora": ("peft", "bitsandbytes")}
LORA_FIELDS = ("lora_rank", "lora_alpha", "lora_dropout", "lora_target_modules")


@dataclass(frozen=True)
class Data:
    """What is learned, and from which text."""

    task: str = "causal_lm"
    """causal_lm, masked_lm or sequence_classification (one file each in train/tasks/)."""
    dataset: str = "stdlib"
    """stdlib, stdlib_packages, listops, a file (.jsonl .json .csv .tsv .parquet .txt), a folder of such files or of
    text documents, a folder written by datasets' save_to_disk, or a dataset's name on the Hub."""
    dataset_config: str | None = None
    """Configuration name of a Hub dataset."""
    dataset_split: str = "train"
    """Training split of a Hub dataset or of a folder written by save_to_disk."""
    dataset_options: JsonObject = None
    """Options of a generated dataset, as JSON (listops: min_length, max_length, train, validation, test ...)."""
    validation_dataset: str | None = None
    """A file or folder of its own to validate on."""
    validation_split: str | None = None
    """Validation split of a Hub dataset; 'validation' is taken if it exists."""
    validation_fraction: float = 0.05
    """Share of the documents held out where there is no validation data of its own."""
    max_train_samples: int | None = None
    """Use only this many documents of the training split, evenly spaced ones; of a stream the first."""
    max_eval_samples: int | None = None
    """Use only this many documents of the validation split, evenly spaced ones; of a stream the first."""
    text_column: str = "text"
    label_column: str = "label"
    sample_by: Literal["document", "paragraph", "line"] = "document"
    """What is one document in a plain text file."""
    on_bad_record: Literal["error", "skip"] = "error"
    """Unreadable line, missing column, label outside the set: refuse, or skip, count and report with file and line."""
    on_empty_document: Literal["skip", "error"] = "skip"
    streaming: bool = False
    """Read and tokenise on the way instead of caching on disk; needs max_steps."""
    shuffle_buffer_size: int = 1000
    """Documents shuffled together when streaming."""
    tokenizer: str | None = None
    """Hub name, folder, 'bytes', 'words', or 'train:8192' (a BPE trained on the training split); default: the
    model's own."""
    max_length: int = 1024
    """Tokens of one example."""
    packing: bool = False
    """Fill rows of max_length tokens with several examples each instead of padding (causal_lm, masked_lm). None sees
    another, and positions begin anew in each; a row counts as one example."""
    truncation: Literal["keep_head", "keep_tail", "keep_both"] = "keep_head"
    """What classification keeps of a document longer than max_length."""
    mlm_probability: float = 0.15
    """Share of the tokens that masked_lm hides."""
    preprocessing_num_workers: int | None = None
    """Processes that tokenise; default: one per core, fewer for small data."""
    dataloader_num_workers: int = 0


@dataclass(frozen=True)
class Architecture:
    """What is trained."""

    model: str | None = None
    """Hub name, folder, or 'module:function' that returns an nn.Module."""
    model_config: JsonObject = None
    """An architecture to train from scratch, as JSON: model_type (llama, gpt2, modernbert, bert, qwen3 ...) and its
    fields as in transformers' configuration class."""
    attn_implementation: str | None = None
    """sdpa, flash_attention_2, eager ...; default: what transformers chooses."""
    rope_scaling: Literal["none", "linear", "yarn"] = "none"
    """Scale rotary positions, for sequences longer than the model was trained on."""
    rope_scaling_factor: float | None = None
    """How many times longer; default: max_length divided by the model's positions."""
    sliding_window: int | None = None
    """Attention sees only so many tokens back (modernbert: to each side), in models that have such layers."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type of the weights; mixed_precision sets the type of the arithmetic."""
    gradient_checkpointing: Literal["none", "full", "selective", "auto"] = "none"
    """Recompute activations in backward: none, every layer, or selective (all but the attention outputs); auto: the
    least of it that is predicted to fit in what is free of the device."""
    gradient_checkpointing_every_n_layers: int = 1
    """Checkpoint only every n-th layer."""
    gradient_checkpointing_offload: bool = False
    """Keep the inputs of checkpointed layers in pinned host memory; copies overlap with the computation."""
    tiled_mlp: bool = False
    """Compute MLPs and norms some tokens at a time: their wide activations are never all there."""
    mlp_tile_tokens: int | None = None
    """Tokens of such a tile; default: about as many as the hidden size, at least 512."""
    compile: bool = False
    """Compile each layer by torch.compile: faster on a GPU after some minutes of compiling, attention stays causal."""
    adapter: Literal["none", "lora", "qlora"] = "none"
    """lora: freeze the model and train small matrices beside its layers; qlora: with its frozen layers in 4 bits."""
    lora_rank: int = 16
    """Rank of the trained matrices."""
    lora_alpha: float = 32.0
    """What they add is scaled by lora_alpha / lora_rank."""
    lora_dropout: float = 0.0
    """Dropout of their inputs."""
    lora_target_modules: tuple[str, ...] = ("all-linear",)
    """Layers that get them, by the ends of their names (q_proj v_proj ...); all-linear: all but the output head."""
    trust_remote_code: bool = False


@dataclass(frozen=True)
class Optimization:
    """How it is trained."""

    micro_batch_size: int | Literal["auto"] = 1
    """Examples of one forward/backward on one device; auto: as many as are predicted to fit."""
    gradient_accumulation_steps: int | None = None
    """Micro-batches per optimizer step and device; give this or global_batch_size."""
    global_batch_size: int | None = None
    """Examples per optimizer step over all devices; give this or gradient_accumulation_steps."""
    max_tokens_per_micro_batch: int | None = None
    """Form micro-batches of as many examples as have so many tokens, padding included, instead of micro_batch_size;
    needs global_batch_size."""
    max_steps: int | None = None
    """Optimizer steps; default: num_epochs."""
    num_epochs: int | None = None
    """Passes over the training data; default 1 where max_steps is not given."""
    optimizer: Literal["adamw", "adamw_8bit", "adafactor", "sgd"] = "adamw"
    """adamw_8bit: moments of one byte each (bitsandbytes); with whole weights on every process only."""
    optimizer_offload: bool = False
    """Keep adamw's state, and fp32 originals of bf16 weights, in host memory and update there; without sharding."""
    optimizer_in_backward: bool = False
    """Update each weight as soon as its gradient is there, and free that: gradients never exist all at once. For one
    process and one micro-batch per step, with max_grad_norm: None."""
    bf16_update: Literal["nearest", "stochastic", "kahan"] = "nearest"
    """How adamw updates weights of dtype bfloat16: rounded to the nearest, by which small updates are lost; rounded up
    or down at random; or to the nearest, with the error kept in 2 more bytes per weight (Kahan)."""
    learning_rate: float = 5e-5
    learning_rate_scaling: Literal["none", "linear", "sqrt"] = "none"
    """Scale learning_rate by global batch / learning_rate_reference_batch_size, or by its square root."""
    learning_rate_reference_batch_size: int | None = None
    lr_scheduler: Literal["constant", "linear", "cosine", "warmup_stable_decay"] = "linear"
    warmup_steps: int | None = None
    warmup_ratio: float = 0.0
    """Warm-up as a share of all steps; give this or warmup_steps."""
    decay_ratio: float = 0.2
    """Share of all steps that decay at the end of warmup_stable_decay."""
    min_learning_rate_ratio: float = 0.0
    """Where linear, cosine and warmup_stable_decay end, as a share of learning_rate."""
    weight_decay: float = 0.0
    """Not applied to biases and norms."""
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    sgd_momentum: float = 0.9
    max_grad_norm: float | None = 1.0
    """Clip the gradient to this norm; None: do not clip by norm."""
    grad_norm_type: Literal["1", "2", "inf"] = "2"
    max_grad_value: float | None = None
    """Clip each gradient element to +- this value instead (max_grad_norm: None)."""
    max_consecutive_nonfinite_steps: int = 25
    """Stop after this many steps in a row whose gradient was not finite."""
    loss_spike_factor: float | None = None
    """Stop where the loss between two log lines is above so many times the usual; null: at no loss."""
    max_rollbacks: int = 0
    """Instead of stopping for either reason, go back to the last checkpoint from before and past the data seen since,
    at most so many times in a run."""
    mixed_precision: Literal["no", "fp16", "bf16"] | None = None
    """Default: what the launcher says. fp16 where the device cannot do it becomes bf16 or no, and says so."""
    tf32: bool = True
    """Multiply fp32 matrices in TF32 on CUDA from Ampere on: 10 bits of mantissa instead of 23, much faster."""
    sequence_length_warmup_steps: int = 0
    """For so many first steps cut each step's tokens into shorter pieces, shortest first; 0: do not."""
    sequence_length_warmup_start: int = 64
    """Tokens of the first pieces; they double until max_length, each length for equally many of these steps."""
    loss: Literal["auto", "full", "chunked", "torch", "cce", "liger"] = "auto"
    """full: hold all logits; the others never do: chunked (runs everywhere), torch (its linear_cross_entropy, torch ≥
    2.13), cce (Cut Cross-Entropy) and liger (Liger Kernel) on CUDA, both extras. auto: for a vocabulary of 4,096 or
    more, where the model allows it, the best of cce, liger and chunked that is there; else full."""
    label_smoothing: float = 0.0
    """Share of each target spread evenly over all classes (arXiv 1512.00567); an evaluation reports plain
    cross-entropy."""
    z_loss: float = 0.0
    """Coefficient of log² Z for each target, which keeps logits from drifting (PaLM took 1e-4); as label_smoothing."""
    seed: int = 42
    cpu_threads: int | None = None
    """Threads of one process on a CPU; default: the cores divided among the processes of this machine."""
    distributed_timeout_seconds: int = 1800
    """How long processes wait for one that does not answer, before the run ends and names it. Also the longest time
    that others wait while the first process of a machine tokenises."""


@dataclass(frozen=True)
class Output:
    """What is evaluated, saved and reported."""

    output_dir: str = "runs/default"
    resume: str = "auto"
    """auto: go on from the newest good checkpoint in output_dir; never: start afresh; or a checkpoint's folder."""
    allow_changes_on_resume: bool = False
    """Go on from a checkpoint although data, model, batch or seed are not those it was made with."""
    save_every_steps: int | None = None
    """A checkpoint also every n steps; one is always written at the end."""
    save_in_background: bool = True
    """Copy the state to host memory and write it while training goes on; False: wait for the disk and copy nothing."""
    save_total_limit: int = 2
    """Checkpoints kept, the best one apart."""
    eval_every_steps: int | None = None
    """Evaluate also every n steps; it is always done at the end."""
    eval_batch_size: int | None = None
    """Default: micro_batch_size."""
    metric_for_best: str | None = None
    """Default: the task's own (loss, accuracy)."""
    greater_is_better: bool | None = None
    """Whether metric_for_best should grow; default: yes, but for loss, perplexity and bits_per_byte."""
    metrics: tuple[str, ...] = ()
    """Further metrics for classification, by name on the Hub or folder, computed by evaluate."""
    load_best_model_at_end: bool = False
    """final/ holds the best evaluated weights instead of the last ones."""
    early_stopping_patience: int | None = None
    """Stop after this many evaluations without a better one."""
    log_every_steps: int = 10
    report_to: tuple[Literal["tensorboard", "trackio", "wandb"], ...] = ()
    run_name: str | None = None
    push_to_hub: bool = False
    hub_model_id: str | None = None


@dataclass(frozen=True)
class Memory:
    """What is done about memory: predict, rehearse, measure, recover."""

    memory_budget_gib: float | None = None
    """What gradient_checkpointing: auto and micro_batch_size: auto may fill of each device; default: what is free."""
    predict_memory: bool = True
    """Predict the peak, in a process beside the run, and show it beside the measured one."""
    rehearse: bool = True
    """Before step 1 make the step with the longest examples, and evaluate the longest ones; it leaves no trace."""
    measure_memory: bool = True
    """Measure peaks by phase and kind; False: only the highest."""
    on_oom: Literal["auto", "split", "adapt", "stop"] = "auto"
    """Out of memory in a step: split the micro-batch and make the step again; adapt: where a single example does not
    fit, also switch on checkpointing and a chunked loss; stop: end. auto: split with one process, stop with several,
    for what keeps DDP able to recover also keeps it from summing gradients while it computes others; and stop with
    optimizer_in_backward."""
    memory_snapshot: bool = False
    """Record allocations on CUDA and write them to output_dir when memory runs out, for torch's memory viewer."""


@dataclass(frozen=True)
class Config:
    """All sections of a run."""

    data: Data = field(default_factory=Data)
    architecture: Architecture = field(default_factory=Architecture)
    optimization: Optimization = field(default_factory=Optimization)
    output: Output = field(default_factory=Output)
    memory: Memory = field(default_factory=Memory)


@dataclass(frozen=True)
class CommandLine:
    """Train on long sequences. Every flag is also a key of a recipe; recipes/ holds examples.

    With neither --config nor any of --task --dataset --model --model_config --tokenizer, recipes/quickstart.yaml runs.
    """

    config: str | None = None
    """A YAML recipe; flags go over its values, its values over the defaults."""
    sections: Config = field(default_factory=Config)


_SECTIONS = typing.get_type_hints(Config)
_FIELD_TYPES: dict[str, Any] = {
    name: hint for section in _SECTIONS.values() for name, hint in typing.get_type_hints(section).items()
}


def parse(arguments: list[str]) -> Config:
    """The configuration that ``arguments`` (without the program's name) ask for.

    Raises:
        UsageError: unknown key, wrong type or a combination that cannot work.
        SystemExit: status 2 for a wrong flag, 0 for ``--help``.
    """
    recipe, named = _named_on(arguments)
    if recipe is None and not named & {"task", "dataset", "model", "model_config", "tokenizer", "help"}:
        recipe = str(QUICKSTART)
    values = read_recipe(Path(_at_home(recipe))) if recipe else {}
    for flag, replaced in _REPLACES.items():
        if flag in named:
            for key in set(replaced) - named:
                values.pop(key, None)
    import tyro  # here, so that what only reads configurations needs no parser of command lines

    registry = tyro.constructors.ConstructorRegistry()
    registry.primitive_rule(
        lambda info: (
            tyro.constructors.PrimitiveConstructorSpec(
                nargs=1,
                metavar="JSON",
                instance_from_str=_json_object,
                is_instance=lambda value: value is None or isinstance(value, dict),
                str_from_instance=lambda value: [json.dumps(value)],
            )
            if info.type == JsonObject
            else None
        )
    )
    line = tyro.cli(
        CommandLine,
        args=arguments,
        default=CommandLine(config=recipe, sections=from_values(values)),
        config=(tyro.conf.OmitArgPrefixes, tyro.conf.FlagConversionOff),
        prog="train/main.py",
        registry=registry,
    )
    values = to_values(line.sections)
    paths = {name: _at_home(values[name]) for name in _PATHS if values[name]}
    config = from_values({**values, **paths})  # checks types again: what tyro takes for a number, a recipe may not
    check(config)
    optim = config.optimization
    # Not in a recipe: a few steps of one, and the config.yaml that they leave, are not meant to warm up.
    if "warmup_steps" in named and optim.max_steps is not None and (optim.warmup_steps or 0) > optim.max_steps:
        raise UsageError(
            f"warmup_steps: {optim.warmup_steps} is more than max_steps: {optim.max_steps}: the run would end before "
            "learning_rate is reached. Give fewer, or warmup_ratio."
        )
    return config


_PATHS = ("output_dir", "model", "tokenizer", "resume", "validation_dataset")
"""Fields that may be paths, with ~ as the home folder; ``dataset`` is asked whether it is one where it is read."""


def _at_home(name: str) -> str:
    """``name`` with ~ as the home folder, where it begins so and there is one: nobody else does it for a recipe."""
    if name.startswith("~"):
        with contextlib.suppress(RuntimeError):
            return str(Path(name).expanduser())
    return name


_REPLACES = {
    # Naming one of these on the command line puts the recipe's other choice aside: a model brings its architecture
    # and tokenizer, and of two ways to say the same thing the later one counts.
    "model": ("model_config", "tokenizer"),
    "model_config": ("model",),
    "gradient_accumulation_steps": ("global_batch_size",),
    "micro_batch_size": ("max_tokens_per_micro_batch",),
    "max_tokens_per_micro_batch": ("micro_batch_size", "gradient_accumulation_steps"),
    "global_batch_size": ("gradient_accumulation_steps",),
    "max_steps": ("num_epochs",),
    "num_epochs": ("max_steps",),
    "warmup_steps": ("warmup_ratio",),
    "warmup_ratio": ("warmup_steps",),
    "max_grad_value": ("max_grad_norm",),
}


def _named_on(arguments: list[str]) -> tuple[str | None, set[str]]:
    """The recipe and the names of all flags given, before the defaults that tyro needs are known."""
    recipe, named = None, set()
    for position, argument in enumerate(arguments):
        if argument in ("-h", "--help"):
            named.add("help")
        elif argument.startswith("--"):
            name, _, value = argument[2:].partition("=")
            name = name.replace("-", "_")
            named.add(name)
            if name == "config":
                recipe = value or (arguments[position + 1] if position + 1 < len(arguments) else None)
    return recipe, named


class _StrictLoader(yaml.SafeLoader):
    """Plain data only, and no key twice."""

    def __init__(self, stream: Any) -> None:
        super().__init__(stream)
        self._flat: set[yaml.MappingNode] = set()

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Puts what ``<<`` names under the mapping's own values, once these are seen to be different keys."""
        if node in self._flat:
            return
        self._flat.add(node)
        merges = "tag:yaml.org,2002:merge"
        keys = ["<<" if key.tag == merges else self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if not isinstance(key, str):
                raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} is not a name", node.start_mark)
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"the key {key} stands twice", node.start_mark)
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
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise UsageError(f"--config {path}: expected 'key: value' lines, found a {type(values).__name__}.")
    return values


def from_values(values: dict[str, Any]) -> Config:
    """A configuration from flat values over the defaults; each value must already have its field's type.

    Raises:
        UsageError: naming the key, the value and what would do.
    """
    for name, value in values.items():
        if name not in _FIELD_TYPES:
            close = difflib.get_close_matches(name, _FIELD_TYPES, n=1)
            hint = f" Did you mean {close[0]}?" if close else " train/main.py --help lists all keys."
            raise UsageError(f"unknown key {name!r}.{hint}")
        problem = _type_problem(value, _FIELD_TYPES[name])
        if problem:
            raise UsageError(f"{name}: {value!r} is not valid: expected {problem}.")
    sections = {}
    for section, cls in _SECTIONS.items():
        own = {f.name: values[f.name] for f in dataclasses.fields(cls) if f.name in values}
        sections[section] = cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in own.items()})
    return Config(**sections)


def _type_problem(value: Any, hint: Any) -> str | None:
    """What ``hint`` would have accepted, or None when ``value`` fits it."""
    origin, options = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        problems = [_type_problem(value, option) for option in options]
        return None if None in problems else " or ".join(p for p in problems if p)
    if origin is Literal:
        hint_about_yaml = " (in quotes: YAML reads no, off, yes and on as booleans)" if isinstance(value, bool) else ""
        return (
            None
            if any(value is o or (value == o and type(value) is type(o)) for o in options)
            else ("one of " + ", ".join(map(str, options)) + hint_about_yaml)
        )
    if origin is tuple:
        if not isinstance(value, list | tuple):
            return "a list"
        return next((f"a list of {p}" for p in (_type_problem(v, options[0]) for v in value) if p), None)
    if hint is type(None):
        return None if value is None else "null"
    if hint is float:
        if isinstance(value, str):
            with contextlib.suppress(ValueError):
                float(value)
                return f"a number; YAML reads {value} as text, write {float(value)!r} with a dot, unquoted"
        if isinstance(value, bool) or not isinstance(value, int | float):
            return "a number"
        return None if abs(value) <= sys.float_info.max else "a number"
    if hint is int:
        return None if isinstance(value, int) and not isinstance(value, bool) else "a whole number"
    if hint is bool:
        return None if isinstance(value, bool) else "true or false"
    if hint is str:
        return None if isinstance(value, str) else "text"
    return None if isinstance(value, dict) else "a mapping"


def check(config: Config) -> None:
    """Stops on values and combinations that cannot work.

    Raises:
        UsageError: naming the field, its value and what would do.
    """
    data, model, optim, output = config.data, config.architecture, config.optimization, config.output
    at_least = {
        "max_length": 2,
        "micro_batch_size": 1,
        "gradient_accumulation_steps": 1,
        "global_batch_size": 1,
        "max_tokens_per_micro_batch": 1,
        "max_steps": 1,
        "num_epochs": 1,
        "warmup_steps": 0,
        "learning_rate_reference_batch_size": 1,
        "gradient_checkpointing_every_n_layers": 1,
        "mlp_tile_tokens": 1,
        "lora_rank": 1,
        "max_consecutive_nonfinite_steps": 1,
        "max_rollbacks": 0,
        "sequence_length_warmup_steps": 0,
        "sequence_length_warmup_start": 2,
        "sliding_window": 1,
        "seed": 0,
        "cpu_threads": 1,
        "distributed_timeout_seconds": 1,
        "save_every_steps": 1,
        "save_total_limit": 1,
        "eval_every_steps": 1,
        "eval_batch_size": 1,
        "early_stopping_patience": 1,
        "log_every_steps": 1,
        "max_train_samples": 1,
        "max_eval_samples": 1,
        "shuffle_buffer_size": 1,
        "preprocessing_num_workers": 1,
        "dataloader_num_workers": 0,
        "weight_decay": 0,
        "adam_epsilon": 0,
        "z_loss": 0,
        "sgd_momentum": 0,
    }
    flat = to_values(config)
    for name, smallest in at_least.items():
        if flat[name] is not None and flat[name] != "auto" and flat[name] < smallest:
            raise UsageError(f"{name}: {flat[name]} is too small: at least {smallest}.")
    for name, value in flat.items():
        if isinstance(value, int) and value > LARGEST:
            raise UsageError(f"{name}: {value} is too large: at most {LARGEST}.")
    for name in ("learning_rate", "max_grad_norm", "max_grad_value", "memory_budget_gib", "lora_alpha"):
        if flat[name] is not None and not 0 < flat[name] < math.inf:
            off = "" if name in ("learning_rate", "lora_alpha") else "; null (None on the command line) turns it off"
            raise UsageError(f"{name}: {flat[name]} must be positive and finite{off}.")
    for name in ("warmup_ratio", "decay_ratio", "min_learning_rate_ratio"):
        if not 0 <= flat[name] <= 1:
            raise UsageError(f"{name}: {flat[name]} is a share: between 0 and 1.")
    for name in ("adam_beta1", "adam_beta2", "label_smoothing", "lora_dropout"):
        if not 0 <= flat[name] < 1:
            raise UsageError(f"{name}: {flat[name]} must be at least 0 and below 1.")
    for name in ("validation_fraction", "mlm_probability"):
        if not 0 < flat[name] < 1:
            raise UsageError(f"{name}: {flat[name]} is a share: above 0 and below 1.")
    if optim.max_grad_norm is not None and optim.max_grad_value is not None:
        raise UsageError(
            "max_grad_norm and max_grad_value clip the same gradient: give one and set the other to null "
            "(None on the command line)."
        )
    if optim.max_steps is not None and optim.num_epochs is not None:
        raise UsageError("max_steps and num_epochs both say when to stop: give one of them.")
    if optim.warmup_steps is not None and optim.warmup_ratio > 0:
        raise UsageError("warmup_steps and warmup_ratio both say how long to warm up: give one of them.")
    check_optimizer(config)
    if optim.learning_rate_scaling != "none" and optim.learning_rate_reference_batch_size is None:
        raise UsageError(
            f"learning_rate_scaling: {optim.learning_rate_scaling} needs learning_rate_reference_batch_size, "
            "the global batch that learning_rate was chosen for."
        )
    if optim.loss_spike_factor is not None and not 1 < optim.loss_spike_factor < math.inf:
        raise UsageError(f"loss_spike_factor: {optim.loss_spike_factor} is times the usual loss: more than 1, as 2.")
    if optim.max_rollbacks and output.save_every_steps is None:
        raise UsageError(f"max_rollbacks: {optim.max_rollbacks} needs save_every_steps: nothing to go back to.")
    if optim.loss in ("torch", "cce") and (optim.label_smoothing or optim.z_loss):
        raise UsageError(
            f"loss: {optim.loss} has no label_smoothing ({optim.label_smoothing}) and no z_loss ({optim.z_loss}): give "
            "--loss auto or chunked, or set both to 0."
        )
    if data.streaming and optim.max_steps is None:
        raise UsageError("streaming: the length of a stream is not known: give max_steps.")
    if model.rope_scaling_factor is not None:
        if model.rope_scaling == "none":
            raise UsageError("rope_scaling_factor needs rope_scaling: linear or yarn.")
        if model.rope_scaling_factor <= 1:
            raise UsageError(f"rope_scaling_factor: {model.rope_scaling_factor} must be more than 1.")
    if model.model is not None and ":" in model.model and (model.rope_scaling != "none" or model.sliding_window):
        raise UsageError("rope_scaling and sliding_window change a model's configuration; module:function brings none.")
    if data.packing and data.task == "sequence_classification":
        raise UsageError("packing: sequence_classification has one label a row: use causal_lm or masked_lm.")
    if data.packing and model.attn_implementation == "eager":
        raise UsageError("packing: attn_implementation: eager would let documents see each other: leave it out.")
    if (max_tokens := optim.max_tokens_per_micro_batch) is not None:
        if optim.micro_batch_size != 1:
            raise UsageError(
                f"max_tokens_per_micro_batch: {max_tokens} and micro_batch_size: {optim.micro_batch_size} both make "
                "micro-batches: give one of them."
            )
        if optim.global_batch_size is None or optim.gradient_accumulation_steps is not None:
            raise UsageError(
                f"max_tokens_per_micro_batch: {max_tokens} makes as many micro-batches as it takes: give "
                "global_batch_size, the examples of a step, and no gradient_accumulation_steps."
            )
        if max_tokens < data.max_length:
            raise UsageError(
                f"max_tokens_per_micro_batch: {max_tokens} does not hold one example of max_length {data.max_length}: "
                f"give {data.max_length} or more, or a smaller max_length."
            )
    if optim.sequence_length_warmup_steps > 0:
        if data.task == "sequence_classification":
            raise UsageError(
                f"sequence_length_warmup_steps: {optim.sequence_length_warmup_steps} would cut examples apart, and "
                "sequence_classification has one label for each: set it to 0."
            )
        if optim.sequence_length_warmup_start >= data.max_length:
            raise UsageError(
                f"sequence_length_warmup_start: {optim.sequence_length_warmup_start} is not below max_length "
                f"{data.max_length}: give less, or sequence_length_warmup_steps: 0."
            )
    if data.tokenizer is not None and data.tokenizer.startswith("train:"):
        size = data.tokenizer.removeprefix("train:")
        if not size.isdigit() or int(size) < 300:
            raise UsageError(f"tokenizer: {data.tokenizer!r}: write train:N with a vocabulary of at least 300.")
        if data.streaming:
            raise UsageError(f"tokenizer: {data.tokenizer} cannot be trained on a stream: give a folder or a Hub name.")
    if model.model is None and model.model_config is None:
        raise UsageError(
            "no model: give --model (Hub name, folder or module:function), a recipe with a model_config, or "
            "--config recipes/quickstart.yaml for its small one."
        )
    if model.model is not None and model.model_config is not None:
        raise UsageError("model and model_config both name a model: give one of them.")
    if model.model_config is not None and not isinstance(model.model_config.get("model_type"), str):
        raise UsageError("model_config: model_type is missing: llama, gpt2, modernbert, bert, qwen3 ...")
    if model.gradient_checkpointing == "none" and model.gradient_checkpointing_every_n_layers > 1:
        raise UsageError("gradient_checkpointing_every_n_layers needs gradient_checkpointing: full or selective.")
    if model.gradient_checkpointing == "none" and model.gradient_checkpointing_offload:
        raise UsageError("gradient_checkpointing_offload needs gradient_checkpointing: full, selective or auto.")
    if model.gradient_checkpointing == "auto" and model.gradient_checkpointing_every_n_layers > 1:
        raise UsageError("gradient_checkpointing: auto chooses gradient_checkpointing_every_n_layers: leave it out.")
    if model.mlp_tile_tokens is not None and not model.tiled_mlp:
        raise UsageError("mlp_tile_tokens needs tiled_mlp: true.")
    _check_adapter(model)
    if data.tokenizer is None and (model.model is None or ":" in model.model):
        raise UsageError("tokenizer: this model brings none: give a Hub name, a folder, 'bytes' or 'train:8192'.")
    _check_names(output)
    if output.push_to_hub and output.hub_model_id is None:
        raise UsageError("push_to_hub needs hub_model_id (user/name).")
    if output.early_stopping_patience is not None and output.eval_every_steps is None:
        raise UsageError("early_stopping_patience needs eval_every_steps.")


def _check_names(output: Output) -> None:
    """Names that become paths lead nowhere but into the run's folder."""
    name, hub = output.run_name, output.hub_model_id
    if name is not None and (name.strip(". ") == "" or any(c in name for c in "/\\\0")):
        raise UsageError(f"run_name: {name!r} is a name and no path: leave out slashes, and give more than dots.")
    if hub is not None and not re.fullmatch(r"(\w[\w.-]*/)?\w[\w.-]*", hub):
        raise UsageError(f"hub_model_id: {hub!r}: write user/name.")
    if ".." in Path(output.output_dir).parts or "\0" in output.output_dir:
        raise UsageError(f"output_dir: {output.output_dir!r} climbs out of where it begins: give it without '..'.")


def _check_adapter(model: Architecture) -> None:
    given = [name for name in LORA_FIELDS if getattr(model, name) != getattr(Architecture(), name)]
    if model.adapter == "none" and given:
        raise UsageError(f"{given[0]}: {getattr(model, given[0])} needs adapter: lora or qlora.")
    if not model.lora_target_modules:
        raise UsageError("lora_target_modules: names no layer: give all-linear or names such as q_proj v_proj.")
    if len(model.lora_target_modules) > 1 and "all-linear" in model.lora_target_modules:
        raise UsageError("lora_target_modules: all-linear already means every layer: give it alone, or leave it out.")
    missing = [name for name in ADAPTER_PACKAGES.get(model.adapter, ()) if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(
            f"adapter: {model.adapter} needs {' and '.join(missing)}, not installed: "
            f"pip install -e '.[{model.adapter}]' (or pip install {' '.join(missing)})."
        )


def check_optimizer(config: Config) -> None:
    """Stops where the options of the optimizer do not go with each other or with the batch.

    Raises:
        UsageError: naming the fields, their values and what would do.
    """
    optim, dtype = config.optimization, config.architecture.dtype
    if optim.optimizer_offload and optim.optimizer != "adamw":
        raise UsageError(f"optimizer_offload works with optimizer: adamw, not with {optim.optimizer}: leave one out.")
    if optim.optimizer_offload and dtype == "float16":
        raise UsageError("optimizer_offload with dtype: float16: use bfloat16, or float32 with mixed_precision: fp16.")
    if optim.bf16_update != "nearest":
        asked = f"bf16_update: {optim.bf16_update}"
        if dtype != "bfloat16":
            raise UsageError(f"{asked} is for weights of dtype: bfloat16, these are {dtype}: use nearest.")
        if optim.optimizer != "adamw":
            raise UsageError(f"{asked} works with optimizer: adamw, not with {optim.optimizer}: leave one out.")
        if optim.optimizer_offload:
            raise UsageError(f"{asked} with optimizer_offload: the host updates fp32 originals already: use nearest.")
    if not optim.optimizer_in_backward:
        return
    size, together = optim.micro_batch_size, optim.global_batch_size
    if (optim.gradient_accumulation_steps or 1) > 1:
        asked = f"gradient_accumulation_steps: {optim.gradient_accumulation_steps}"
        raise UsageError(f"optimizer_in_backward with {asked}: there is no gradient to accumulate: give 1.")
    if optim.max_tokens_per_micro_batch is not None:
        raise UsageError(
            "optimizer_in_backward with max_tokens_per_micro_batch: a step may have several micro-batches, and "
            "there is no gradient to accumulate. Give micro_batch_size and gradient_accumulation_steps: 1 instead."
        )
    if together is not None and size != together:
        raise UsageError(
            f"optimizer_in_backward with micro_batch_size: {size} and global_batch_size: {together}: there is no "
            "gradient to accumulate. Give the same size, or gradient_accumulation_steps: 1 instead of the global one."
        )
    if optim.max_grad_norm is not None:
        raise UsageError(
            f"optimizer_in_backward with max_grad_norm: {optim.max_grad_norm}: the norm of all gradients is known only "
            "after the updates. Give max_grad_norm: null (None on the command line); max_grad_value may be set."
        )
    if optim.mixed_precision == "fp16":
        raise UsageError("optimizer_in_backward with mixed_precision: fp16: its loss scale needs all gradients: bf16.")
    if config.memory.on_oom in ("split", "adapt"):
        raise UsageError(
            f"optimizer_in_backward with on_oom: {config.memory.on_oom}: a step whose weights are partly updated "
            "cannot be made again. Give on_oom: stop, or leave it at auto."
        )


def to_values(config: Config) -> dict[str, Any]:
    """All fields as flat ``key: value`` pairs."""
    return {
        f.name: getattr(getattr(config, section), f.name)
        for section, cls in _SECTIONS.items()
        for f in dataclasses.fields(cls)
    }


def dump(config: Config) -> str:
    """YAML that :func:`parse` reads back to the same configuration."""
    blocks = []
    for section, cls in _SECTIONS.items():
        own = {f.name: getattr(getattr(config, section), f.name) for f in dataclasses.fields(cls)}
        own = {k: list(v) if isinstance(v, tuple) else v for k, v in own.items()}
        blocks.append(f"# {section}\n" + yaml.safe_dump(own, sort_keys=False, allow_unicode=True))
    return "\n".join(blocks)
