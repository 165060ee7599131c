"""Tokenisers, and documents turned into examples, cached on disk by fingerprint."""

from __future__ import annotations

import hashlib
import inspect
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from train.config import Data
from train.errors import UserError
from train.records import Corpus, Examples
from train.tasks.base import BYTES_AT_ONCE, Task

if TYPE_CHECKING:
    import datasets
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

END, PAD, MASK, UNKNOWN = "<|end|>", "<|pad|>", "<|mask|>", "<|unknown|>"
TRAINING_BYTES = 16 * 2**20
"""A vocabulary of some thousand pieces settles long before a tokenizer has seen more text than this."""

DOCUMENTS_AT_ONCE = 100
"""Documents whose examples are in memory together, or fewer where these would be more than BYTES_AT_ONCE of text."""
DOCUMENTS_PER_WORKER, BYTES_PER_WORKER = 2000, 2**24


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
    if spec == "bytes":
        return _byte_tokenizer()
    if spec == "words":
        return _word_tokenizer(texts)
    if spec.startswith("train:"):
        return _trained_tokenizer(int(spec.removeprefix("train:")), texts)
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(spec, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, ImportError, TypeError) as error:
        raise UserError(
            f"tokenizer {spec!r} cannot be loaded: {' '.join(str(error).split())[:300]} Give a folder with a "
            "tokenizer, a Hub name (and a connection), 'bytes', 'words' or 'train:8192'."
        ) from None


def _fast(tokenizer: Tokenizer, **special_tokens: str) -> PreTrainedTokenizerBase:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END,
        eos_token=END,
        pad_token=PAD,
        mask_token=MASK,
        clean_up_tokenization_spaces=False,
        **special_tokens,
    )


def _byte_tokenizer() -> PreTrainedTokenizerBase:
    """One token a UTF-8 byte: byte-level BPE without a single merge (259 entries), as fast as any fast tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    pieces = [END, PAD, MASK, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END, PAD, MASK])
    return _fast(tokenizer)


def _trained_tokenizer(vocab_size: int, texts: Iterable[str]) -> PreTrainedTokenizerBase:
    """Byte-level BPE trained on the beginning of ``texts``."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END, PAD, MASK],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_beginning(texts, TRAINING_BYTES), trainer)
    return _fast(tokenizer)


def _word_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerBase:
    """One token a word between spaces, for artificial languages such as ListOps."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.WordLevel(unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    trainer = trainers.WordLevelTrainer(special_tokens=[END, PAD, MASK, UNKNOWN], show_progress=False)
    tokenizer.train_from_iterator(_beginning(texts, TRAINING_BYTES), trainer)
    return _fast(tokenizer, unk_token=UNKNOWN)


def _beginning(texts: Iterable[str], num_bytes: int) -> Iterator[str]:
    for text in texts:
        yield text
        num_bytes -= len(text.encode())
        if num_bytes < 0:
            return


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """Equal for tokenizers that give equal ids: fast ones by their JSON, others by class and vocabulary."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        # Truncation and padding are those of its last call.
        text = json.dumps({**json.loads(backend.to_str()), "truncation": None, "padding": None})
    else:
        text = f"{type(tokenizer)}{sorted(tokenizer.get_vocab().items())}"
    return hashlib.sha256(f"{text}{sorted(tokenizer.special_tokens_map.items())}".encode()).hexdigest()[:16]


def tokenize(corpus: Corpus, task: Task, tokenizer: PreTrainedTokenizerBase, data: Data) -> Examples:
    """All splits of ``corpus`` as examples of ``task``.

    Raises:
        UserError: a split has no example, or a label that the training split lacks.
    """
    import datasets

    label_names = task.label_names(corpus)
    encode = _Encode(task, tokenizer, label_names, data, corpus.train)
    notes: list[str] = []
    splits: dict[str, Any] = {"train": corpus.train, "validation": corpus.validation, "test": corpus.test}
    for name, documents in splits.items():
        if documents is None:
            continue
        if isinstance(documents, datasets.IterableDataset):
            splits[name] = encode.stream(documents)
            continue
        documents, split_notes = task.accepted(documents, label_names)
        notes += split_notes
        splits[name] = encode.split(documents, name)
        if len(splits[name]) == 0:
            raise UserError(f"{corpus.name}: the {name} split has no example after tokenisation.")
    examples = Examples(
        train=splits["train"], validation=splits["validation"], test=splits["test"], label_names=label_names
    )
    if isinstance(examples.train, datasets.Dataset):
        notes += task.describe(examples)
    return Examples(examples.train, examples.validation, examples.test, label_names, tuple(notes))


class _Encode:
    """The task's ``encode`` over whole splits."""

    def __init__(
        self,
        task: Task,
        tokenizer: PreTrainedTokenizerBase,
        label_names: Sequence[str],
        data: Data,
        train: datasets.Dataset | datasets.IterableDataset,
    ) -> None:
        self.task, self.tokenizer, self.label_names, self.data = task, tokenizer, label_names, data
        settings = {name: getattr(data, name) for name in task.encode_settings}
        source = [inspect.getsource(cls) for cls in type(task).__mro__ if issubclass(cls, Task)]  # a fork changes it
        self.recipe = f"{source} {sorted(settings.items())} {list(label_names)} {tokenizer_digest(tokenizer)}"

    def __call__(self, documents: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
        return self.task.encode(documents, self.tokenizer, self.label_names)

    def split(self, documents: datasets.Dataset, name: str) -> datasets.Dataset:
        # Our own fingerprint: pickling a tokenizer gives another one after its first use, and the cache would miss.
        fingerprint = hashlib.sha256(f"{documents._fingerprint} {self.recipe}".encode()).hexdigest()[:32]
        num_bytes = documents.data.column("text").nbytes * len(documents) // max(1, documents.data.num_rows)
        # Many short documents and few long ones are both worth another process.
        useful = 1 + max(len(documents) // DOCUMENTS_PER_WORKER, num_bytes // BYTES_PER_WORKER)
        workers = self.data.preprocessing_num_workers or min(os.cpu_count() or 1, useful)
        return documents.map(
            self,
            batched=True,
            batch_size=min(max(BYTES_AT_ONCE * len(documents) // max(1, num_bytes), 1), DOCUMENTS_AT_ONCE),
            remove_columns=documents.column_names,
            num_proc=workers if workers > 1 else None,
            new_fingerprint=fingerprint,
            desc=f"Tokenising {name}",
        )

    def stream(self, documents: datasets.IterableDataset) -> datasets.IterableDataset:
        return documents.map(self, batched=True, batch_size=16, remove_columns=documents.column_names)
