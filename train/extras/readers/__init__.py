"""Documents from files, folders, the Hub and Python's own library, with errors that name file and line."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any, Literal

from train import extras
from train.config import Config, Data, option
from train.launch import Launch
from train.records import Corpus, Parts, Run, UsageError

Others = Literal["cp874", "cp932", "cp949", "cp1253", "cp1254", "cp1255", "cp1256", "cp1258", "euc_jp", "koi8_r"]
Encoding = Literal["utf-8", "latin-1", "cp1250", "cp1251", "cp1252", "gb18030", "big5", "shift_jis", "euc_kr", Others]


@dataclass(frozen=True)
class Options:
    """Documents from files, folders and the Hub."""

    dataset_config: str | None = option(None, "Configuration name of a Hub dataset.")
    dataset_split: str = option("train", "Training split of a Hub dataset or of a folder written by save_to_disk.")
    validation_dataset: str | None = option(None, "A separate file or folder to validate on.", is_path=True)
    validation_split: str | None = option(None, "Split of a Hub dataset; default: validation, valid, val or dev.")
    max_train_samples: int | None = option(None, "Use this many training documents, evenly spaced.", ge=1)
    max_eval_samples: int | None = option(None, "Use this many validation documents.", ge=1)
    text_column: str = option("text", "Column of the text.")
    label_column: str = option("label", "Column of the label, for tasks that have one.")
    encoding: Encoding = option("utf-8", "Of text, JSON and CSV files; from Windows often cp1252.")
    quoting: Literal["standard", "none"] = option("standard", "none: quotes in CSV and TSV are only characters.")
    sample_by: Literal["document", "line"] = option("document", "What one document of a text file is.")
    on_bad_record: Literal["error", "skip"] = option("error", "Unreadable line, missing column, unknown label.")
    on_empty_document: Literal["skip", "error"] = option("skip", "Documents without text.")


@dataclass(frozen=True)
class Source(Options, Data):
    """What the readers are asked for, by the options above and those of the core, and what they note meanwhile."""

    labelled: bool = False
    notes: list[str] = field(default_factory=list)
    classes: list[str] = field(default_factory=list)
    files: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))  # that were read, by split


def _is_function(config: Config) -> bool:  # neither https://… nor C:\… names one
    return ":" in (name := config.data.dataset) and name.split(":")[-1].isidentifier() and not Path(name).exists()


def is_saved(folder: Path) -> bool:
    """Whether ``save_to_disk`` of 🤗 Datasets wrote this folder."""
    return any((folder / f"dataset_{kind}.json").is_file() for kind in ("dict", "info"))


class Extra(extras.Extra):
    def check(self, config: Config, launch: Launch) -> None:
        name, own = config.data.dataset, config.of(Options)
        unread = [f.name for f in fields(own) if getattr(own, f.name) != f.default and not f.name.startswith("on_")]
        if unread and _is_function(config):
            why = f"{name} gives its documents as they are to be used"
            raise UsageError(f"{unread[0]}: {why}: leave it out, and do that in the function.")
        places = {"dataset_config": name, "dataset_split": name, "validation_split": own.validation_dataset or name}
        for key, place in places.items():
            has_splits = key != "dataset_config" and is_saved(Path(place))
            if key in unread and not has_splits and (place == "stdlib" or Path(place).exists()):
                raise UsageError(f"{key}: {place} does not have {key.rpartition('_')[2]}s: leave it out.")
        if own.dataset_split == own.validation_split and own.validation_dataset is None:
            raise UsageError(f"validation_split: {own.validation_split} is the split to train on. Give another.")
        kind, _, size = (config.data.tokenizer or "").partition(":")
        if kind == "train" and (not size.isdecimal() or not 300 <= int(size) <= 2**24):
            raise UsageError(f"tokenizer: 'train:{size}': write train:N with a vocabulary of 300 to {2**24:,}.")
        output = Path(config.output.output_dir).resolve()
        for folder in filter(Path.is_dir, map(Path, (name, own.validation_dataset or name))):
            if folder.resolve() in (output, *output.parents):
                raise UsageError(f"output_dir: it lies in the dataset {folder}: its files would be read as documents.")

    def documents(self, config: Config, labelled: bool) -> Corpus | None:
        from train.extras.readers.corpus import load_corpus

        data = Source(**vars(config.of(Options)), **vars(config.data), labelled=labelled)
        return load_corpus(data, config if _is_function(config) else None)

    def tokenizer(self, run: Run, spec: str, corpus: Corpus) -> Any:
        if spec not in ("bytes", "words") and not spec.startswith("train:"):
            return None
        from train.extras.readers.own_tokenizers import tokenizer_for

        return tokenizer_for(spec, corpus)

    def change_caching(
        self, run: Run, make: Callable[..., Any], documents: extras.Dataset, *by: Any
    ) -> Callable[[], extras.Dataset]:
        from train.extras.cache import examples_cache, intact

        fingerprint, cache = examples_cache(documents, *by)
        make = partial(make, new_fingerprint=fingerprint, keep_in_memory=False)
        if not documents.cache_files:  # what is in memory stays there
            return make
        return partial(intact, cache, partial(make, cache_file_name=f"{cache}.arrow"))

    def change_data(self, run: Run, data: extras.PreparedData) -> extras.PreparedData:
        from train.extras.readers.own_tokenizers import warnings_of_unknown

        run.outputs.note(*warnings_of_unknown(data.examples, data.tokenizer))
        return data

    def ready(self, run: Run, parts: Parts) -> None:
        """Has generation end, as Trainer does, with the tokenizer's end token in ``final/``: a chat template's, say."""
        end = parts.data.task.stand_alone(parts.data.tokenizer).eos_token_id
        if (own := getattr(parts.state.model, "generation_config", None)) is not None and isinstance(end, int):
            known = own.eos_token_id if isinstance(own.eos_token_id, list) else [own.eos_token_id]  # type: ignore
            own.eos_token_id = own.eos_token_id if end in known else [end, *(i for i in known if i is not None)]  # type: ignore
