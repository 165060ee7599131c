"""From the configuration to batches: corpus, tokenizer, examples, and what identifies them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import datasets

from train.batching import Collate, MapBatches, StreamBatches, evaluation_batches
from train.config import Config
from train.extras.long_sequences.packing import collate_packed, pack
from train.extras.readers.corpus import load_corpus
from train.identity import examples_digest
from train.model import pad_token_id
from train.records import BatchArithmetic, Batches, Corpus, Examples, MicroBatch
from train.tasks.base import Task
from train.tokenization import load_tokenizer, tokenize

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PreTrainedTokenizerBase

    from train.launch import Launch


@dataclass(frozen=True)
class PreparedData:
    """Everything about the data that training and evaluation need."""

    corpus: Corpus
    tokenizer: PreTrainedTokenizerBase
    examples: Examples
    collate: Collate
    training_digest: str
    """Of the training examples: another one stands for other data."""
    validation_digest: str
    lines: tuple[str, ...]
    """What to tell a person about the data."""

    def training_batches(
        self, config: Config, arithmetic: BatchArithmetic, accelerator: Accelerator, launch: Launch
    ) -> Batches:
        """This rank's part of every step."""
        data, seed, rank = config.data, config.optimization.seed, launch.data_rank
        if isinstance(self.examples.train, datasets.IterableDataset):
            return StreamBatches(self.examples.train, self.collate, arithmetic, rank, seed, data.shuffle_buffer_size)
        return MapBatches(
            self.examples.train,
            self.collate,
            arithmetic,
            rank,
            seed,
            data.dataloader_num_workers,
            pin_memory=accelerator.device.type == "cuda",
        )

    def evaluation_batches(
        self, examples: datasets.Dataset, config: Config, accelerator: Accelerator, launch: Launch
    ) -> Iterator[MicroBatch]:
        """This rank's part of a held-out split."""
        batch_size = config.output.eval_batch_size or config.optimization.micro_batch_size
        by_tokens = config.output.eval_batch_size is None
        assert batch_size != "auto"  # a number was chosen before anything is evaluated
        return evaluation_batches(
            examples,
            self.collate,
            batch_size,
            launch.world_size // launch.evaluation_copies,
            launch.rank // launch.evaluation_copies,
            config.data.dataloader_num_workers,
            pin_memory=accelerator.device.type == "cuda",
            max_tokens=config.optimization.max_tokens_per_micro_batch if by_tokens else None,
        )


def prepare_data(config: Config, task: Task, folder: Path, saves: bool) -> PreparedData:
    """Loads, tokenises and describes the data; cached, so that further ranks and runs only read it.

    Args:
        folder: the run's folder, where a tokenizer that is trained on the data is kept.
        saves: whether this process writes it.

    Raises:
        UserError: the data, its labels or the tokenizer cannot be used.
    """
    data = config.data
    corpus = load_corpus(data, labelled=task.labelled)
    spec = data.tokenizer or config.architecture.model
    assert spec is not None
    own = spec == "words" or spec.startswith("train:")
    trained_on = getattr(corpus.train, "_fingerprint", "stream")
    saved = folder / f"tokenizer-{spec.replace(':', '-')}-{trained_on[:8]}" if own else None
    texts = (dict(row)["text"] for row in corpus.train) if own else ()
    tokenizer = load_tokenizer(spec, texts, saved, config.architecture.trust_remote_code)
    if saved is not None and saves:
        tokenizer.save_pretrained(saved)
    task.check_tokenizer(tokenizer)
    examples = tokenize(corpus, task, tokenizer, data)
    collate: Collate = partial(task.collate, pad_id=pad_token_id(tokenizer))
    described = _describe(corpus, examples, spec, tokenizer)
    if data.packing:
        examples = pack(examples, data.max_length)
        collate = partial(collate_packed, pad_id=pad_token_id(tokenizer), collate=task.collate)
    return PreparedData(
        corpus=corpus,
        tokenizer=tokenizer,
        examples=examples,
        collate=collate,
        training_digest=examples_digest(examples.train),
        validation_digest=examples_digest(examples.validation),
        lines=(*described, *examples.notes),
    )


def _describe(corpus: Corpus, examples: Examples, spec: str, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    lines = [f"data: {corpus.name}: {_sizes(corpus.train, corpus.validation, corpus.test, 'documents')}", *corpus.notes]
    lines.append(
        f"tokenizer: {spec}, {len(tokenizer):,} entries; "
        f"{_sizes(examples.train, examples.validation, examples.test, 'examples')}"
    )
    return lines


def _sizes(train: Any, validation: Any, test: Any, what: str) -> str:
    splits = {"training": train, "validation": validation, "test": test}
    counts = [
        f"{len(split):,} for {name}" if isinstance(split, datasets.Dataset) else f"a stream for {name}"
        for name, split in splits.items()
        if split is not None
    ]
    return f"{what} {', '.join(counts)}"
