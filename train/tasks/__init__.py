"""What is learned. A task is a file here with a class ``Task(train.tasks.Task)``; add one by adding a file."""

import copy
import importlib
import math
import re
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import multiprocess  # with which 🤗 Datasets starts processes
import numpy as np
import torch
import torch.nn.functional as F
from datasets import Dataset
from tokenizers.processors import TemplateProcessing
from torch import Tensor, nn
from transformers import AutoConfig, AutoTokenizer, PretrainedConfig
from transformers import PreTrainedTokenizerBase as Tokenizer

from train.config import Architecture, Config, load_function
from train.records import IGNORE, Corpus, MicroBatch, Run, UsageError, UserError, column, num_cores, one_line

# Text that a tokenizer gets in one call, or one document: until the call ends it holds some 500 bytes a token.
BYTES_AT_ONCE = 2**20
DOCUMENTS_AT_ONCE = 100  # whose examples are in memory together; fewer where they are more than BYTES_AT_ONCE of text
DOCUMENTS_PER_WORKER, BYTES_PER_WORKER = 2000, 2**24


class Scores(NamedTuple):
    """What an evaluation needs of one batch."""

    loss_sums: Tensor  # (B,) summed cross-entropy of each example
    predictions: Tensor  # (B, S) or (B,) the most probable class of each position
    counts: Sequence[Tensor] = ()  # (B,) each: what else a task's metrics need, as further columns of their table


def cross_entropy(logits: Tensor, labels: Tensor, reduction: str = "none", **options: Any) -> Tensor:
    """−log p(label) of each position, flattened, in fp32 (fp64 for fp64 logits); 0 where the label is IGNORE."""
    if not isinstance(logits, Tensor):
        raise UserError(f"no logits: a task's own loss_sum and scores can take the model's {type(logits).__name__}.")
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32)).reshape(-1, logits.shape[-1])
    return F.cross_entropy(wide, labels.reshape(-1), ignore_index=IGNORE, reduction=reduction, **options)


def cross_entropy_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """() the sum over targets, not their mean: a step divides once, by the targets of its whole global batch."""
    return cross_entropy(logits, labels, reduction="sum")


def cross_entropy_scores(logits: Tensor, labels: Tensor) -> Scores:
    """Each example's summed cross-entropy and predictions."""
    return Scores(cross_entropy(logits, labels).reshape(len(labels), -1).sum(1), logits.argmax(-1))


@cache
def load_task(name: str) -> "type[Task]":
    """The class of a task, by the name of its file here or as module:class; raises UsageError where there is none."""
    names = sorted(path.stem for path in Path(__file__).parent.glob("[!_]*.py"))
    if ":" not in name and name not in names:
        raise UsageError(f"task: {name!r} is not one of {', '.join(names)}, nor a file's, as recipes/chat.py:Task.")
    found: Any = load_function(name, "task") if ":" in name else importlib.import_module(f"train.tasks.{name}").Task
    if not (isinstance(found, type) and issubclass(found, Task)):
        raise UsageError(f"task: {name} is not a subclass of train.tasks.Task.")
    if "length" not in found.example_columns:
        raise UsageError(f"task: {name}: example_columns has to name the columns that cut gives, length among them.")
    return found


class Task:
    """How documents are cut into examples, how examples form a batch, what their loss is and how they are judged.

    A task writes :meth:`cut` and :meth:`inputs_and_labels`. The other defaults are those of a choice among classes at
    some positions: the cross-entropy of ``logits (..., C)`` with ``labels (...)``, summed over all but ``IGNORE``.
    """

    name: ClassVar[str]  # by default that of its file; outside this folder the module is task_of_NAME_DIGEST
    auto_class: ClassVar[str] = "AutoModel"  # of transformers: builds the model for this task; this one lacks a head
    default_metric: ClassVar[str] = "loss"  # says which checkpoint is best
    greater_is_better: ClassVar[bool | None] = None  # of the default metric; None: guessed by its name
    headline_metric: ClassVar[str] = "loss"  # what a person reads first
    title: ClassVar[str] = ""  # what such a model is called in a sentence: a … model
    is_causal: ClassVar[bool] = False  # tokens must not see later ones; padding at the end then needs no mask
    labelled: ClassVar[bool] = False  # documents need a label
    target_share: ClassVar[str | None] = None  # the option with the share of positions that are targets; None: all
    needed_tokens: ClassVar[tuple[str, ...]] = ()  # of the tokenizer, in addition to one for padding or the end
    # Options that examples depend on; those cached under other values are not reused.
    encode_settings: ClassVar[tuple[str, ...]] = ("max_length", "dataset_options")
    # Columns of an example; ``length``, the positions a model sees, is one of them.
    example_columns: ClassVar[tuple[str, ...]] = ()
    _own_ids = staticmethod(lru_cache(1)(lambda tokenizer: tokenizer("a")["input_ids"]))  # with what it adds itself

    def __init_subclass__(cls) -> None:
        cls.name = vars(cls).get("name", re.sub(r"^task_of_(.*)_\w{8}$", r"\1", cls.__module__.rpartition(".")[2]))

    def __init__(self, config: Config) -> None:
        self.config, self.data = config, config.data

    def cut(self, text: str, ids: list[int], label: int | None, tokenizer: Tokenizer) -> Iterator[dict[str, Any]]:
        """The examples of one document with token ``ids`` and, if ``labelled``, the number of its class."""
        raise NotImplementedError

    def inputs_and_labels(self, example: Mapping[str, Any], seed: Sequence[int]) -> tuple[Tensor, Tensor]:
        """``input_ids`` (S,) of an example and its labels, (S,) or (); randomness only from ``seed`` and its ``id``."""
        raise NotImplementedError

    loss_sum = staticmethod(cross_entropy_sum)  # of logits and labels: () the training loss, summed over targets
    scores = staticmethod(cross_entropy_scores)  # of logits and labels: what an evaluation keeps of a batch

    def change_loss(self, model: nn.Module) -> None:
        """May set ``loss_in_head`` of the new ``model``, a :class:`train.model.ModelWithLoss`: a loss of its inputs."""

    def metrics(self, table: np.ndarray, examples: Dataset, label_names: Sequence[str]) -> dict[str, Any]:
        """Metrics by ``table`` (examples, 6 + K): example, loss sum, targets, correct, prediction, label, counts."""
        loss_sum, targets, correct = map(math.fsum, table[:, 1:4].T)
        loss, accuracy = (loss_sum / targets, correct / targets) if targets else (math.nan, math.nan)
        metrics = {"loss": loss, "perplexity": math.exp(min(loss, 700.0)), "accuracy": accuracy}
        if "num_bytes" in examples.column_names:
            # Of an example's text, the share that its targets stand for: a task may leave positions out.
            num_bytes, lengths = (column(examples, name)[table[:, 0].astype(int)] for name in ("num_bytes", "length"))
            if (covered := math.fsum(num_bytes * table[:, 2] / lengths)) > 0:
                metrics["bits_per_byte"] = loss_sum / math.log(2) / covered
        return metrics

    def label_names(self, corpus: Corpus) -> tuple[str, ...]:
        """Names of the classes in the order of their numbers; empty where the vocabulary is the classes."""
        return ()

    def classes_of(self, labels: Sequence[Any], label_names: Sequence[str]) -> Sequence[Any]:
        """The number of the class of each label; None for one that the training split does not have."""
        numbers = {name: number for number, name in enumerate(label_names)}
        return [numbers.get(str(label)) for label in labels]

    def encode(
        self, documents: Mapping[str, Sequence[Any]], tokenizer: Tokenizer, label_names: Sequence[str]
    ) -> dict[str, list[Any]]:
        """A batch of documents (columns ``text``, ``label``) as examples, a row each (``example_columns``)."""
        texts = documents["text"]
        classes = self.classes_of(documents["label"], label_names) if self.labelled else [None] * len(texts)
        tokenised = zip(texts, classes, self.token_ids(texts, tokenizer), strict=True)
        rows = [row for text, label, ids in tokenised for row in self.cut(text, ids, label, tokenizer)]
        if absent := set(self.example_columns).difference(*rows[:1]) if rows else ():
            named = f"example_columns names {', '.join(sorted(absent))}, which its cut does not give"
            raise UserError(f"task {self.name}: {named}: {', '.join(rows[0])}.")
        return {name: [row[name] for row in rows] for name in self.example_columns}

    def collate(self, examples: Sequence[Mapping[str, Any]], seed: Sequence[int], pad_id: int) -> MicroBatch:
        """Examples, each with its ``id``, as one padded batch: ``input_ids`` (B, S), labels (B, S) or (B,)."""
        rows, labels = zip(*(self.inputs_and_labels(example, seed) for example in examples), strict=True)
        inputs = {"input_ids": pad(rows, 0 if rows[0].is_floating_point() else pad_id)}
        # A mask would cost the fast attention kernels, and no token of a causal model sees the padding after it.
        if not self.is_causal and len(set(map(len, rows))) > 1:
            inputs["attention_mask"] = pad([torch.ones(len(row), dtype=torch.long) for row in rows], 0)
        targets = pad(labels, IGNORE) if labels[0].ndim else torch.stack(labels)
        ids, num_tokens = tuple(int(example["id"]) for example in examples), sum(map(len, rows))
        return MicroBatch(inputs, targets, int((targets != IGNORE).sum()), ids, num_tokens)

    def token_ids(self, texts: Sequence[str], tokenizer: Tokenizer) -> Iterator[list[int]]:
        """Token ids of each text, without any special token; texts are tokenised as their ids are asked for."""
        if (ids_of := getattr(tokenizer, "ids_of", None)) and not tokenizer.split_special_tokens:  # quick, by an extra
            yield from map(ids_of, texts)
            return
        is_much = sum(len(text.encode()) for text in texts) > BYTES_AT_ONCE
        calls = [[text] for text in texts] if is_much else [list(texts)]
        for some in calls:
            found = tokenizer(some, add_special_tokens=False, return_attention_mask=False, verbose=False)
            yield from found["input_ids"]

    def special_tokens(self, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
        """The tokenizer's special tokens for the start and the end of a sequence, its own first, one each or none."""
        instead = ("eos", "pad") if self.is_causal else ()  # without a start nothing would predict the first token
        kinds = ("cls", "bos", *instead), ("sep", "eos")
        ids = ([getattr(tokenizer, f"{name}_token_id", None) for name in names] for names in kinds)
        start, end = ([i for i in some if isinstance(i, int)] for some in ids)
        if getattr(tokenizer, "cls_token_id", None) is not None and (own := self._own_ids(tokenizer)):
            adds_end_alone = own[0] not in start and own[-1] in end
            start = [] if adds_end_alone and not self.is_causal else sorted(start, key=lambda i: i != own[0])
            end.sort(key=lambda i: i != own[-1])
        return start[:1], end[:1]

    def framed(self, ids: list[int], tokenizer: Tokenizer) -> list[int]:
        """``ids`` between these special tokens, where a text has not written its own."""
        start, end = self.special_tokens(tokenizer)
        return [*(start if ids[:1] != start else ()), *ids, *(end if ids[-1:] != end else ())]

    def stand_alone(self, tokenizer: Tokenizer) -> Tokenizer:
        """A copy of ``tokenizer``, for ``final/``, that itself adds special tokens; no end where a model continues."""
        made, (start, end) = copy.deepcopy(tokenizer), self.special_tokens(tokenizer)
        if not self.is_causal:
            is_left = "truncation" in self.encode_settings and self.data.truncation == "keep_tail"
            made.model_max_length, made.pad_token = self.data.max_length, made.pad_token or made.eos_token
            made.padding_side = made.init_kwargs["padding_side"] = "right"
            made.truncation_side = made.init_kwargs["truncation_side"] = "left" if is_left else "right"
        if (backend := getattr(made, "backend_tokenizer", None)) is not None:
            end, plain = [] if self.is_causal else end, backend.encode("a", add_special_tokens=False).ids
            if backend.encode("a").ids != [*start, *plain, *end]:  # else its own does, and may know pairs, too
                frame = [*(f"token-{i}" for i in start), "$A", *(f"token-{i}" for i in end)]
                names = {i: [str(tokenizer.convert_ids_to_tokens(i))] for i in start + end}  # which may hold a colon
                tokens: Any = [{"id": f"token-{i}", "ids": [i], "tokens": name} for i, name in names.items()]
                backend.post_processor = TemplateProcessing(frame, special_tokens=tokens)
        return made

    def room(self, tokenizer: Tokenizer) -> int:
        """Tokens of text in one example, in addition to those that :meth:`framed` adds."""
        return self.data.max_length - len(self.framed([], tokenizer))


def pad(rows: Sequence[Tensor], value: int) -> Tensor:
    """Rows of different lengths as one (B, S) tensor, filled up at the end."""
    return nn.utils.rnn.pad_sequence(list(rows), batch_first=True, padding_value=value)


def num_ids(tokenizer: Tokenizer) -> int:
    """How many embeddings a model needs: ids of some tokenizers have gaps."""
    return max(len(tokenizer), 1 + max(getattr(tokenizer, "get_vocab", dict)().values(), default=0))


def pad_token_id(tokenizer: Tokenizer) -> int:
    """The padding token, or the end token where there is none."""
    found = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    return found if isinstance(found, int) else 0


def tokenize(
    corpus: Corpus, task: Task, tokenizer: Tokenizer, change_caching: Callable[..., Any] = lambda make, *args: make
) -> dict[str, Dataset]:
    """All splits of ``corpus`` as examples, in memory unless ``change_caching`` (a seam of extras) stores them."""
    label_names, splits = task.label_names(corpus), dict[str, Dataset]()
    for name, documents in corpus.splits.items():
        num_bytes = documents.data.column("text").nbytes * len(documents) // max(1, documents.data.num_rows)
        # A process that does not begin as a copy of this one (on Windows) could not import a task that is a file.
        may_share = ":" not in task.data.task or multiprocess.get_start_method() == "fork"  # type: ignore
        # Many short documents and few long ones are both worth another process.
        useful = 1 + max(len(documents) // DOCUMENTS_PER_WORKER, num_bytes // BYTES_PER_WORKER)
        workers = task.data.preprocessing_num_workers or min(num_cores(), useful)
        make = partial(
            documents.map,
            partial(task.encode, tokenizer=tokenizer, label_names=label_names),
            batched=True,
            batch_size=min(max(BYTES_AT_ONCE * len(documents) // max(1, num_bytes), 1), DOCUMENTS_AT_ONCE),
            remove_columns=documents.column_names,
            num_proc=workers if workers > 1 and may_share else None,
            new_fingerprint=uuid.uuid4().hex,  # a hash of a tokenizer changes with its first use
            keep_in_memory=True,
            desc=f"Tokenising {name}",
        )
        splits[name] = change_caching(make, documents, task, tokenizer, label_names)()
        if not len(splits[name]):
            raise UserError(f"{corpus.name}: the {name} split gives no example: see the notes, or raise max_length.")
    return splits


def stored_config(config: Architecture) -> PretrainedConfig:
    """transformers' configuration of the model that ``config`` names; raises UserError if it cannot be loaded."""
    other = "module:function, or a model_config for a new one"
    return from_pretrained(AutoConfig, "model", str(config.model), config.trust_remote_code, other)


def model_config_of(run: Run, task: type[Task], tokenizer: Tokenizer) -> tuple[PretrainedConfig | None, dict[str, Any]]:
    """transformers' configuration (None: a function's model), and further arguments of ``from_pretrained``."""
    own, config = run.config.architecture, None
    if not own.is_function:
        config = stored_config(own) if own.model else run.extras.first("new_model_config", run, task, tokenizer)
        if getattr(config, "is_encoder_decoder", False) and getattr(config, "decoder_start_token_id", None) is None:
            config.decoder_start_token_id = pad_token_id(tokenizer)  # as T5 was trained
    changes = run.extras.merged("change_model_config", run, config)
    run.extras.each("check_model_config", run, config, task, tokenizer)
    return config, changes


def load_tokenizer(spec: str, trust_remote_code: bool = False) -> Tokenizer:
    """The tokenizer in a folder or on the Hub; raises UserError if it cannot be found or read, or is empty."""
    other = "bytes, words or train:8192 (train/extras/readers/)"
    found = from_pretrained(AutoTokenizer, "tokenizer", spec, trust_remote_code, other)
    if len(found) < 256 and len({*found.get_vocab()} - {*found.get_added_vocab(), *found.all_special_tokens}) < 2:
        raise UserError(f"tokenizer {spec!r} has no vocabulary: its files are missing. Give --tokenizer: {other}.")
    return found


def from_pretrained(loader: Any, what: str, name: str, trust_remote_code: bool, other: str) -> Any:
    """What a class of transformers loads by ``name``; raises UserError, which says what to give, if it cannot."""
    give = f"Give a folder with a {what}, a Hub name (and a connection), {other}."
    is_path = name.startswith((".", "/", "~")) or (len(Path(name).parts) > 1 and Path(name).parent.is_dir())
    if is_path and not Path(name).exists():
        raise UserError(f"{what} {name!r}: no such folder. {give} A Hub name cannot begin with a local folder.")
    try:
        return loader.from_pretrained(name, trust_remote_code=trust_remote_code)
    except Exception as error:  # files of others are read by many libraries
        raise UserError(f"{what} {name!r} cannot be loaded: {one_line(error)} {give}") from None
