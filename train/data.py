"""From the configuration to batches: documents, tokenizer, examples, and their order."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import datasets

from train.batching import Loading, MapBatches, StreamBatches, batch_arithmetic, evaluation_batches
from train.config import Config
from train.records import BatchArithmetic, Batches, Corpus, Examples, MicroBatch, Run, UserError
from train.state import examples_digest
from train.tasks import Task, load_task, tokenize

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

END, PAD, MASK, UNKNOWN = "<|end|>", "<|pad|>", "<|mask|>", "<|unknown|>"
TOKENIZER_TRAINING_BYTES = 16 * 2**20
"""A vocabulary of some thousand pieces settles long before a tokenizer has seen more text than this."""


@dataclass(frozen=True)
class PreparedData:
    """Everything about the data that training and evaluation need."""

    task: Task
    corpus: Corpus
    tokenizer: PreTrainedTokenizerBase
    examples: Examples
    loading: Loading
    training_digest: str = ""
    """Of the training examples: another digest stands for other data."""
    validation_digest: str = ""

    def training_batches(self, run: Run, arithmetic: BatchArithmetic) -> Batches:
        """This rank's part of every step."""
        train, rank, seed = self.examples.train, run.launch.dp_rank, run.config.optimization.seed
        if isinstance(train, datasets.IterableDataset):
            buffer_size = run.config.data.shuffle_buffer_size
            return StreamBatches(train, self.loading, arithmetic, rank, seed, buffer_size)
        return MapBatches(train, self.loading, arithmetic, rank, seed)

    def evaluation_batches(self, run: Run, examples: datasets.Dataset) -> Iterator[MicroBatch]:
        """This rank's part of a held-out split."""
        optim, asked, copies = run.config.optimization, run.config.output.eval_batch_size, run.launch.evaluation_copies
        size = asked or optim.micro_batch_size
        assert size != "auto"  # a number was chosen before anything is evaluated
        max_tokens = optim.max_tokens_per_micro_batch if asked is None else None
        arithmetic = BatchArithmetic(size, 1, run.launch.world_size // copies, max_tokens)
        return evaluation_batches(examples, self.loading, arithmetic, run.launch.rank // copies)


def arithmetic_of(config: Config, dp_size: int, size_for_auto: int = 1) -> BatchArithmetic:
    """The batch sizes of ``config`` completed; ``micro_batch_size: auto`` counts as ``size_for_auto``."""
    optim = config.optimization
    size = size_for_auto if optim.micro_batch_size == "auto" else optim.micro_batch_size
    max_tokens = optim.max_tokens_per_micro_batch
    return batch_arithmetic(size, optim.gradient_accumulation_steps, optim.global_batch_size, dp_size, max_tokens)


def prepare_data(run: Run) -> PreparedData:
    """Loads, tokenises and describes the data; cached, so that further ranks and runs only read it.

    Raises:
        UserError: the data, its labels or the tokenizer cannot be used.
    """
    config = run.config
    task = load_task(config.data.task)(config)
    corpus = load_corpus(run, task.labelled)
    run.outputs.note(f"data: {corpus.name}: {_sizes(corpus, 'documents')}", *corpus.notes)

    spec = config.data.tokenizer or config.architecture.model
    assert spec is not None
    is_trained = spec == "words" or spec.startswith("train:")
    trained_on = getattr(corpus.train, "_fingerprint", "stream")
    saved = run.outputs.folder / f"tokenizer-{spec.replace(':', '-')}-{trained_on[:8]}" if is_trained else None
    texts = (dict(row)["text"] for row in corpus.train) if is_trained else ()
    tokenizer = load_tokenizer(spec, texts, saved, config.architecture.trust_remote_code)
    if saved is not None and run.accelerator.is_local_main_process:
        tokenizer.save_pretrained(saved)
    task.check_tokenizer(tokenizer)

    examples = tokenize(corpus, task, tokenizer)
    task.check_metrics(examples.label_names)
    run.outputs.note(f"tokenizer: {spec}, {len(tokenizer):,} entries; {_sizes(examples, 'examples')}")
    collate = partial(task.collate, pad_id=pad_token_id(tokenizer))
    pins = run.accelerator.device.type == "cuda"
    loading = Loading(collate, config.data.dataloader_num_workers, pin_memory=pins)
    data = run.extras.pipe("change_data", run, PreparedData(task, corpus, tokenizer, examples, loading))
    run.outputs.note(*data.examples.notes)
    digests = examples_digest(data.examples.train), examples_digest(data.examples.validation)
    return replace(data, training_digest=digests[0], validation_digest=digests[1])


def load_corpus(run: Run, labelled: bool) -> Corpus:
    """The documents that ``--dataset`` names: by a function, or as an extra reads them."""
    name = run.config.data.dataset
    if ":" in name and not Path(name).exists():
        return corpus_of(load_function(name, "dataset")(run.config), run.config)
    if (corpus := run.extras.first("documents", run.config, labelled)) is None:
        raise UserError(f"dataset: {name!r} cannot be read without train/extras/readers/. Give module:function.")
    return corpus


def load_function(spec: str, flag: str) -> Callable[..., Any]:
    """The function that ``module:function`` or ``file.py:function`` names.

    Raises:
        UserError: there is no such file, module or function.
    """
    source, _, name = spec.rpartition(":")
    sys.path.insert(0, str(Path.cwd()))
    try:
        if source.endswith(".py"):
            found = importlib.util.spec_from_file_location(Path(source).stem, source)
            assert found is not None and found.loader is not None
            module = importlib.util.module_from_spec(found)
            sys.modules.setdefault(found.name, module)  # where dataclasses look for the names in their annotations
            found.loader.exec_module(module)
        else:
            module = importlib.import_module(source)
        return getattr(module, name)
    except (ImportError, AttributeError, FileNotFoundError) as error:
        raise UserError(
            f"{flag} {spec!r}: {error}. Give module:function, importable from the current folder, or file.py:function."
        ) from None
    finally:
        sys.path.pop(0)


def corpus_of(found: Any, config: Config) -> Corpus:
    """The corpus that a dataset function returned: a 🤗 Dataset or stream, or a mapping of splits to these.

    Without a ``validation`` split, ``validation_fraction`` of the training documents is held out; every run and rank
    holds out the same.

    Raises:
        UserError: it is something else, too little to hold some out, or a split lacks the column ``text`` or ``label``.
    """
    name, needed = config.data.dataset, ("text", "label") if load_task(config.data.task).labelled else ("text",)
    splits = dict(found) if isinstance(found, dict) else {"train": found}
    kinds = (datasets.Dataset, datasets.IterableDataset)
    if "train" not in splits or not all(isinstance(split, kinds) for split in splits.values()):
        raise UserError(
            f"dataset {name!r} returned {type(found).__name__}: return a 🤗 Dataset or IterableDataset, or a dict "
            "of these with the keys train, validation, test."
        )
    for split, documents in splits.items():
        missing = [column for column in needed if column not in (documents.column_names or needed)]
        if missing:
            known = documents.column_names
            raise UserError(f"dataset {name!r}: the {split} split has no column {missing[0]!r}, only {known}.")
    if isinstance(splits["train"], datasets.IterableDataset) and config.optimization.max_steps is None:
        raise UserError(f"dataset {name!r}: the length of a stream is not known: give max_steps.")
    if "validation" not in splits:
        if not isinstance(splits["train"], datasets.Dataset):
            raise UserError(f"dataset {name!r}: a stream needs a validation split: return one under 'validation'.")
        if (count := len(splits["train"])) < 2:
            raise UserError(f"dataset {name!r}: {count} document(s) cannot be split in two: return a validation split.")
        held_out = min(max(round(count * config.data.validation_fraction), 1), count - 1)
        parts = splits["train"].train_test_split(held_out, seed=0)
        splits = {**splits, "train": parts["train"], "validation": parts["test"]}
    return Corpus(name, splits["train"], splits["validation"], splits.get("test"))


def load_tokenizer(
    spec: str, texts: Iterable[str], saved: Path | None = None, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """The tokenizer that ``spec`` names.

    Args:
        spec: ``bytes``, ``words``, ``train:N``, a folder or a name on the Hub.
        texts: the training documents, read only by ``words`` and ``train:N``.
        saved: a folder to take a tokenizer trained earlier in this run from, if it is there.

    Raises:
        UserError: it cannot be found or read.
    """
    if saved is not None and (saved / "tokenizer.json").exists():
        spec = str(saved)
    if spec in ("bytes", "words") or spec.startswith("train:"):
        return _own_tokenizer(spec, texts)
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(spec, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, ImportError, TypeError) as error:
        raise UserError(
            f"tokenizer {spec!r} cannot be loaded: {' '.join(str(error).split())[:300]} Give a folder with a "
            "tokenizer, a Hub name (and a connection), 'bytes', 'words' or 'train:8192'."
        ) from None


def _own_tokenizer(spec: str, texts: Iterable[str]) -> PreTrainedTokenizerBase:
    """``bytes``: one token per UTF-8 byte, which is byte-level BPE without a single merge (259 entries);
    ``train:N``: byte-level BPE trained on the beginning of ``texts``; ``words``: one token per word between spaces, for
    artificial languages such as ListOps."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    special, alphabet = [END, PAD, MASK], pre_tokenizers.ByteLevel.alphabet()
    names: dict[str, Any] = {"bos_token": END, "eos_token": END, "pad_token": PAD, "mask_token": MASK}
    if spec == "words":
        tokenizer = Tokenizer(models.WordLevel(unk_token=UNKNOWN))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        trainer = trainers.WordLevelTrainer(special_tokens=[*special, UNKNOWN], show_progress=False)
        names["unk_token"] = UNKNOWN
    else:
        pieces = {piece: i for i, piece in enumerate([*special, *sorted(alphabet)])} if spec == "bytes" else None
        tokenizer = Tokenizer(models.BPE() if pieces is None else models.BPE(vocab=pieces, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        size = int(spec.removeprefix("train:")) if pieces is None else 0
        trainer = trainers.BpeTrainer(
            vocab_size=size, special_tokens=special, initial_alphabet=alphabet, show_progress=False
        )
    if spec == "bytes":
        tokenizer.add_special_tokens(special)
    else:
        tokenizer.train_from_iterator(_beginning(texts, TOKENIZER_TRAINING_BYTES), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **names)


def _beginning(texts: Iterable[str], num_bytes: int) -> Iterator[str]:
    for text in texts:
        yield text
        num_bytes -= len(text.encode())
        if num_bytes < 0:
            return


def pad_token_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """The padding token, or the end token where there is none."""
    found = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    return found if isinstance(found, int) else 0


def _sizes(splits: Corpus | Examples, what: str) -> str:
    named = {"training": splits.train, "validation": splits.validation, "test": splits.test}
    counts = [
        f"{len(split):,} for {name}" if isinstance(split, datasets.Dataset) else f"a stream for {name}"
        for name, split in named.items()
        if split is not None
    ]
    return f"{what} {', '.join(counts)}"
