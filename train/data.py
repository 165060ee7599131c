"""From the configuration to batches: documents, tokenizer, examples, and their order."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import datasets
import numpy as np
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from train.batching import Batches, Loading, Rounds, load
from train.config import Config, call_function
from train.records import SPLITS, BatchArithmetic, Corpus, MicroBatch, Run, UserError, arithmetic_of, column
from train.tasks import Task, load_task, load_tokenizer, model_config_of, pad_token_id, tokenize


@dataclass(frozen=True)
class PreparedData:
    """Everything about the data that training and evaluation need."""

    task: Task
    corpus: Corpus
    tokenizer: PreTrainedTokenizerBase
    examples: dict[str, datasets.Dataset]  # by split; batching groups them by their column ``length``
    loading: Loading
    label_names: tuple[str, ...] = ()

    def training_batches(self, run: Run) -> Batches:
        """This rank's part of every step."""
        arithmetic, seed = arithmetic_of(run.config, run.launch.dp_size), run.config.optimization.seed
        part = run.launch.rank // run.launch.mp_size  # ranks that share a sequence or a model are neighbours
        return Batches(self.examples["train"], self.loading, arithmetic, part, seed)

    def evaluation_batches(self, run: Run, examples: datasets.Dataset) -> Iterator[MicroBatch]:
        """This rank's part of a held-out split: every example once over all ranks, as many batches on each."""
        asked = run.config.output.eval_batch_size
        sharing = run.launch.tp_size * run.launch.cp_size  # ranks; with Ulysses each evaluates whole sequences
        size = int(asked or run.config.optimization.micro_batch_size)  # a number was chosen in place of auto
        arithmetic = BatchArithmetic(size, 1, run.launch.world_size // sharing)
        loading = self.loading if asked is None else replace(self.loading, rounds=Rounds())
        rounds = loading.rounds.form(range(len(examples)), column(examples, "length").tolist(), arithmetic)
        mine = [parts[run.launch.rank // sharing] or [~parts[0][0]] for parts in rounds]
        bar: Any = {"delay": 5, "position": 0, "leave": False, "dynamic_ncols": True}
        return load(examples, loading, tqdm(mine, "evaluating", disable=not run.outputs.is_main, **bar), (0, 0))


def prepare_data(run: Run) -> PreparedData:
    """Loads and tokenises the data, or raises UserError."""
    config, own = run.config, run.config.architecture
    task = load_task(config.data.task)(config)
    corpus = run.extras.first("documents", config, task.labelled)  # as one reads --dataset, else from its function
    corpus = corpus or corpus_of(call_function(config.data.dataset, "dataset", config), config)
    corpus = run.extras.pipe("change_corpus", task, corpus)
    run.outputs.note(f"data: {corpus.name}: {_sizes(corpus.splits, 'documents')}", *corpus.notes)

    spec = str(config.data.tokenizer or own.model)
    tokenizer = run.extras.first("tokenizer", run, spec, corpus) or load_tokenizer(spec, own.trust_remote_code)
    found, _ = model_config_of(run, type(task), tokenizer)  # reports what does not fit before hours of tokenising
    if task.labelled and getattr(found, "is_encoder_decoder", False):
        # Bart's and T5's classifiers want as many ends in each example: a text's own stay text, in final/ too.
        tokenizer.init_kwargs["split_special_tokens"] = tokenizer.split_special_tokens = True

    label_names = task.label_names(corpus)
    examples = tokenize(corpus, task, tokenizer, partial(run.extras.pipe, "change_caching", run))
    run.outputs.note(f"tokenizer: {spec}, {len(tokenizer):,} entries; {_sizes(examples, 'examples')}")
    collate = partial(task.collate, pad_id=pad_token_id(tokenizer))
    loading = Loading(collate, config.data.dataloader_num_workers, run.accelerator.device.type == "cuda")
    return run.extras.pipe("change_data", run, PreparedData(task, corpus, tokenizer, examples, loading, label_names))


def corpus_of(found: Any, config: Config) -> Corpus:
    """The corpus of a 🤗 Dataset or of a mapping of splits to Datasets; without a validation split part is held out."""
    splits = dict(found) if isinstance(found, dict) else {"train": found}
    if "train" not in splits or not splits.keys() <= {*SPLITS}:
        raise UserError(f"{config.data.dataset} has {', '.join(map(str, splits))}: give train, validation, test.")
    splits = {split: documents.with_format(None) for split, documents in splits.items()}
    if "validation" not in splits:
        train, order = splits["train"], np.random.default_rng(0).permutation(len(splits["train"]))
        size = min(max(round(len(order) * config.data.validation_fraction), 1), len(order) - 1)
        splits |= {"train": train.select(order[size:]), "validation": train.select(order[:size])}
    return Corpus(config.data.dataset, {name: splits[name] for name in SPLITS if name in splits})


def _sizes(splits: dict[str, datasets.Dataset], what: str) -> str:
    return f"{what} " + ", ".join(f"{len(s):,} for {'training' if n == 'train' else n}" for n, s in splits.items())
