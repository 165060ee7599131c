"""Tokenizers, and examples that are tokenised once and then come from the cache."""

from __future__ import annotations

import importlib
import json
import linecache
import multiprocessing
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import datasets
import datasets.config
import multiprocess
import numpy as np
import pytest
from made_tokenizers import tokenizer_of
from transformers import AutoConfig, PreTrainedTokenizerBase

from train import extras
from train.config import Config
from train.data import load_tokenizer
from train.extras.cache import tokenizer_digest
from train.extras.readers import own_tokenizers
from train.records import Corpus, UserError
from train.tasks import causal_lm, load_task, tokenize

CHECKED: Any = partial(extras.join().pipe, "change_caching", cast("Any", None))
UNICODE = [
    "",
    "plain text",
    "  two  leading, double and trailing spaces  ",
    "tabs\tand\r\nlines\n\n",
    "Ünïcödé ß straße e\u0301 \u200b\ufeff",
    "🤗 👩‍👩‍👧‍👦 🇺🇳 𝔘𝔫𝔦 漢字 العربية",
    "\x00\x01\x7f",
    " .,!?'s n't 's ' .",
    "".join(map(chr, [*range(0x20, 0x250), 0xFFFD, 0xFFFF, 0x10000, 0x10FFFF])),
]


def altered(content: bytes) -> bytes:
    """With 200 bytes in the middle that are others."""
    middle = len(content) // 2
    return (
        content[: middle - 100]
        + bytes(255 - byte for byte in content[middle - 100 : middle + 100])
        + content[middle + 100 :]
    )


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "altered": altered,
    "truncated": lambda content: content[: len(content) // 3],
    "emptied": lambda content: b"",
    "longer": lambda content: content + content[:100],
}


def ids_of(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])  # type: ignore


@pytest.mark.parametrize("text", UNICODE)
def test_bytes_is_one_token_a_byte_and_gives_any_text_back(text: str) -> None:
    tokenizer = tokenizer_of("bytes")
    ids = ids_of(tokenizer, text)
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text


def test_bytes_has_256_bytes_and_three_marks() -> None:
    tokenizer = tokenizer_of("bytes")
    assert len(tokenizer) == 259
    every_byte_of_utf8 = "".join(map(chr, [*range(0x80), *range(0x80, 0x110000, 61)])).encode(errors="ignore").decode()
    ids = ids_of(tokenizer, every_byte_of_utf8)
    assert min(ids) == 3 and max(ids) <= 258
    assert [tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id, tokenizer.mask_token_id] == [
        0,
        0,
        1,
        2,
    ]


def test_trained_tokenizer_keeps_to_its_size_and_gives_any_text_back() -> None:
    texts = ["the cat sat on the mat and the rat sat on the cat"] * 3
    tokenizer = tokenizer_of("train:300", texts)
    assert 259 < len(tokenizer) <= 300
    assert len(ids_of(tokenizer, texts[0])) < len(texts[0]) / 2
    for text in UNICODE:
        assert tokenizer.decode(ids_of(tokenizer, text)) == text


def test_a_text_without_spaces_is_learned_in_pieces() -> None:
    """As DNA is: the time a trainer takes grows with the square of a word's length."""
    tokenizer = tokenizer_of("train:300", ["A" * 5000, "ACGT" * 3000])
    assert 1000 < max(map(len, tokenizer.get_vocab())) < 2010  # the longest piece, which would be 5000 long
    assert tokenizer.decode(ids_of(tokenizer, "ACGT" * 3000)) == "ACGT" * 3000
    words = tokenizer_of("words", [f"a {'b' * 2500} c"])
    assert words.convert_ids_to_tokens(ids_of(words, f"a {'b' * 2500} c")) == ["a", "b" * 2500, "c"]


def test_training_reads_only_the_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("train.extras.readers.own_tokenizers.TOKENIZER_TRAINING_BYTES", 100)
    read: list[int] = []

    def texts() -> Any:
        for number in range(1000):
            read.append(number)
            yield "thirty bytes of text, each time"

    tokenizer_of("train:300", texts())
    assert len(read) == 4
    learned = tokenizer_of("train:300", ["the " * 2**18 + "zq" * 5000]).get_vocab()  # of one text, too
    assert "the" in learned and not any("zq" in piece for piece in learned)


def test_words_splits_at_spaces_and_knows_unknown_words() -> None:
    tokenizer = tokenizer_of("words", ["[MAX 4 [MIN 2 3 ] 9 ]", "[MAX 4  4 ]"])
    ids = ids_of(tokenizer, "[MAX 4 ] [MIN 7")
    assert tokenizer.convert_ids_to_tokens(ids) == ["[MAX", "4", "]", "[MIN", "<|unknown|>"]
    assert len(tokenizer) == 4 + len({"[MAX", "4", "[MIN", "2", "3", "]", "9"})


@pytest.mark.parametrize("spec", ["words", "train:300"])
def test_a_task_sees_tokens_that_were_added_to_a_trained_tokenizer(spec: str) -> None:
    tokenizer: Any = tokenizer_of(spec, ["a rose is a rose"])
    tokenizer.add_tokens(["<X>"])
    [ids] = load_task("causal_lm")(Config()).token_ids(["a rose<X> is"], tokenizer)
    assert tokenizer.convert_tokens_to_ids("<X>") in ids and tokenizer.decode(ids).count("<X>") == 1


def roses(*texts: str) -> Corpus:
    documents = datasets.Dataset.from_dict({"text": ["a rose is a rose", "is a rose", *texts]})
    return Corpus("roses", {"train": documents, "validation": documents})


@pytest.mark.parametrize("spec", ["bytes", "words", "train:300"])
def test_saved_tokenizer_is_taken_instead_of_training_a_new_one(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first = own_tokenizers.tokenizer_for(spec, roses())
    if spec != "bytes":
        monkeypatch.delattr(own_tokenizers, "trainers")  # without which none is trained
    again = own_tokenizers.tokenizer_for(spec, roses())
    for text in ["a rose is a rose", *UNICODE]:
        assert ids_of(again, text) == ids_of(first, text)
    assert len(again) == len(first) and tokenizer_digest(again) == tokenizer_digest(first)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id", "mask_token_id", "unk_token_id"):
        assert getattr(again, name) == getattr(first, name), name


@pytest.mark.parametrize("damage", ["altered", "truncated", "emptied"])
@pytest.mark.parametrize("spec", ["words", "train:300"])
def test_a_kept_tokenizer_that_is_damaged_is_trained_again(
    damage: str, spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    known = tokenizer_digest(own_tokenizers.tokenizer_for(spec, roses()))
    [kept] = tmp_path.glob("*.arrow")
    kept.write_bytes(DAMAGE[damage](kept.read_bytes()))
    said = f"cached data was damaged and is made again: {kept.with_suffix('')}"
    for messages in ([said], []):
        caplog.clear()
        assert tokenizer_digest(own_tokenizers.tokenizer_for(spec, roses())) == known
        assert caplog.messages == messages


def test_a_tokenizer_is_kept_by_its_documents_and_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    found = []
    for spec, texts in [("train:300", ()), ("train:300", ()), ("train:300", ["a tulip"]), ("train:301", ())]:
        own_tokenizers.tokenizer_for(spec, roses(*texts))
        found.append(len([*tmp_path.glob("*.arrow")]))
    assert found == [1, 1, 2, 3]


def test_a_trained_tokenizer_needs_no_cache_that_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "file")
    made = own_tokenizers.tokenizer_for("train:300", roses())
    assert len(ids_of(made, "a rose")) < len("a rose")


def test_bytes_are_looked_up_as_the_tokenizer_itself_gives_them() -> None:
    tokenizer, task = tokenizer_of("bytes"), causal_lm.Task(configured())
    marks = ["<|end|>", "a<|mask|>b<|pad|><|end|", "<|<|end|>|>"]
    texts = [*UNICODE, *marks, "".join(map(chr, range(0x800))) * 3]
    assert list(task.token_ids(texts, tokenizer)) == [ids_of(tokenizer, text) for text in texts]


def test_many_unknown_tokens_are_warned_of() -> None:
    def notes(train: str, validation: str, spec: str = "words") -> list[str]:
        first, second = (datasets.Dataset.from_dict({"text": [text] * 3}) for text in (train, validation))
        tokenizer = tokenizer_of(spec, ["a rose is a rose is a rose is a rose"])
        corpus = Corpus("roses", {"train": first, "validation": second})
        examples = tokenize(corpus, causal_lm.Task(configured()), tokenizer)
        return list(own_tokenizers.warnings_of_unknown(examples, tokenizer))

    assert notes("a rose is", "is a") == []
    [note] = notes("a rose is", "a tulip is")
    assert note.startswith("WARNING: validation: on average 20.0% of an example's tokens are unknown.")
    assert notes("漢字", "漢字", "train:300") == []


def test_texts_that_are_one_unknown_token_are_warned_of_next_to_long_ones() -> None:
    """Of all tokens they are few."""
    tokenizer = tokenizer_of("words", ["a rose is a rose is a rose is a rose"])
    documents = datasets.Dataset.from_dict({"text": ["漢字漢字漢字漢字", "a rose is " * 40] * 3})
    examples = tokenize(Corpus("roses", {"train": documents}), causal_lm.Task(configured(max_length=400)), tokenizer)
    rows: Any = examples["train"].with_format("numpy")
    share = np.mean(np.concatenate(rows["tokens"][:]) == tokenizer.unk_token_id)
    assert share < 0.01
    [note] = own_tokenizers.warnings_of_unknown(examples, tokenizer)
    assert "on average 16.7% of an example" in note  # of one example a third, of the other nothing


def test_tokenizer_folder_is_loaded_by_its_path(tmp_path: Path) -> None:
    first = tokenizer_of("train:300", ["a rose is a rose"])
    first.save_pretrained(tmp_path)
    assert ids_of(load_tokenizer(str(tmp_path)), "a rose 🤗") == ids_of(first, "a rose 🤗")


@pytest.mark.parametrize("name", ["no/such-tokenizer-anywhere", "/no/such/folder"])
def test_tokenizer_that_is_nowhere_is_refused_in_one_line(name: str) -> None:
    with pytest.raises(UserError, match=f"tokenizer '{name}'(: no such folder| cannot be loaded)") as caught:
        load_tokenizer(name)
    assert "\n" not in str(caught.value) and "train:8192" in str(caught.value)


def test_a_path_in_a_folder_that_is_there_is_not_asked_from_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("out").mkdir()
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda *_, **__: pytest.fail("asked"))
    with pytest.raises(UserError, match="tokenizer 'out/final': no such folder"):
        load_tokenizer("out/final")


def test_folder_without_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be loaded"):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize("model_type", ["gpt2", "bert", "t5", "xlnet", "qwen2", "mbart"])
def test_model_folder_without_the_files_of_its_tokenizer_is_refused(model_type: str, tmp_path: Path) -> None:
    """transformers makes one without a vocabulary of it: every word would be unknown, or nothing at all."""
    AutoConfig.for_model(model_type).save_pretrained(tmp_path)
    said = f"tokenizer '{tmp_path}' has no vocabulary: its files are missing. Give --tokenizer: bytes, words or "
    with pytest.raises(UserError, match=re.escape(said)):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize("model_type", ["canine", "perceiver"])
def test_tokenizer_that_needs_no_files_is_taken(model_type: str, tmp_path: Path) -> None:
    AutoConfig.for_model(model_type).save_pretrained(tmp_path)
    assert len(ids_of(load_tokenizer(str(tmp_path)), "a rose")) == len("a rose")


def test_digest_is_that_of_the_ids_a_tokenizer_gives() -> None:
    one, same, other = (tokenizer_of(spec, ["a rose is"]) for spec in ("bytes", "bytes", "train:300"))
    before = tokenizer_digest(one)
    ids_of(one, "used")
    one("used, padded and cut", truncation=True, max_length=4, padding="max_length")
    assert tokenizer_digest(one) == before == tokenizer_digest(same) != tokenizer_digest(other)
    one.chat_template = "{{ messages }}"  # by which a task may make ids
    assert tokenizer_digest(one) != before


def test_digest_of_a_slow_tokenizer_knows_its_merges(tmp_path: Path) -> None:
    from transformers import CTRLTokenizer

    words, digests = ["<unk>", "a@@", "b@@", "c", "a", "b", "ab@@", "bc", "abc"], set[str]()
    (tmp_path / "vocab.json").write_text(json.dumps({word: number for number, word in enumerate(words)}))
    for merges in ("a b\nab c</w>", "b c</w>\na bc</w>", "b c</w>\na bc</w>"):
        (tmp_path / "merges.txt").write_text(f"#version\n{merges}\n")
        digests.add(tokenizer_digest(CTRLTokenizer(tmp_path / "vocab.json", tmp_path / "merges.txt")))
    assert len(digests) == 2


# Tokenising and its cache


class Counting(causal_lm.Task):
    """Counts how many documents it encodes."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.encoded = 0

    def encode(
        self, documents: Mapping[str, Sequence[Any]], tokenizer: PreTrainedTokenizerBase, label_names: Sequence[str]
    ) -> dict[str, list[Any]]:
        self.encoded += len(documents["text"])
        return super().encode(documents, tokenizer, label_names)


class Batches(causal_lm.Task):
    """Notes how many documents each call encodes."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.batches: list[int] = []

    def encode(
        self, documents: Mapping[str, Sequence[Any]], tokenizer: PreTrainedTokenizerBase, label_names: Sequence[str]
    ) -> dict[str, list[Any]]:
        self.batches.append(len(documents["text"]))
        return super().encode(documents, tokenizer, label_names)


class Reversing(Counting):
    """The task as a fork changed it."""

    def encode(
        self, documents: Mapping[str, Sequence[Any]], tokenizer: PreTrainedTokenizerBase, label_names: Sequence[str]
    ) -> dict[str, list[Any]]:
        return super().encode({"text": [text[::-1] for text in documents["text"]]}, tokenizer, label_names)


def configured(**data: Any) -> Config:
    return Config().changed(**{"max_length": 16, **data})


def stored_corpus(folder: Path) -> Corpus:
    """Ten documents for training and two to validate on, on disk."""
    for name, count in (("train", 10), ("validation", 2)):
        if not (folder / name).exists():
            texts = [f"{name} document {i} " * i for i in range(1, count + 1)]
            datasets.Dataset.from_dict({"text": texts, "source": texts}).save_to_disk(folder / name)
    train, validation = (datasets.load_from_disk(folder / name) for name in ("train", "validation"))
    assert isinstance(train, datasets.Dataset) and isinstance(validation, datasets.Dataset)
    return Corpus("stored", {"train": train, "validation": validation})


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def cached(folder: Path) -> list[Path]:
    """The files with the training split's examples, which take more bytes than those to validate on."""
    files = sorted((folder / "cache").glob("examples-*.arrow"))
    name = max(files, key=lambda file: file.stat().st_size).stem.partition("_")[0]
    return [file for file in files if file.stem.startswith(name)]


def tokenized(folder: Path, spec: str = "bytes", cls: type[Counting] = Counting, **data: Any) -> tuple[Any, int]:
    """Rows of the training split, and how many documents were encoded for it and for validation."""
    task = cls(configured(**data))
    examples = tokenize(stored_corpus(folder), task, tokenizer_of(spec, ["train document validation"]), CHECKED)
    assert isinstance(examples["train"], datasets.Dataset)
    return examples["train"].to_list(), task.encoded


def test_second_time_comes_from_the_cache(tmp_path: Path) -> None:
    rows, encoded = tokenized(tmp_path)
    assert encoded == 12 and len(rows) > 10
    again, encoded = tokenized(tmp_path)
    assert encoded == 0 and again == rows


HELPED = """
from test_tokenization import Counting

def shortened(text):
    return text[:{length}]

class Task(Counting):
    def encode(self, documents, tokenizer, label_names):
        return super().encode({{"text": list(map(shortened, documents["text"]))}}, tokenizer, label_names)
"""


def test_a_function_next_to_a_task_is_part_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("sys.dont_write_bytecode", True)
    encoded = []
    for length in (5, 5, 7):
        (tmp_path / "own_helped_task.py").write_text(HELPED.format(length=length))
        monkeypatch.delitem(sys.modules, "own_helped_task", raising=False)
        linecache.clearcache()
        encoded.append(tokenized(tmp_path, cls=importlib.import_module("own_helped_task").Task)[1])
    assert encoded == [12, 0, 12]


@pytest.mark.parametrize("where", ["own_helper.py", "parts/own_helper.py"])
def test_what_a_task_imports_from_its_folder_is_part_of_it(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend((tmp_path / where).parent)
    monkeypatch.setattr("sys.dont_write_bytecode", True)
    (tmp_path / "parts").mkdir()
    own = (
        HELPED.replace("text[:{length}]", "text[:LENGTH]")
        .format()
        .replace("import Counting", "import Counting\nfrom own_helper import LENGTH")
    )
    (tmp_path / "own_task.py").write_text(own)
    encoded = []
    for length in (5, 5, 7):
        (tmp_path / where).write_text(f"LENGTH = {length}")
        for name in ("own_helper", "own_task"):
            monkeypatch.delitem(sys.modules, name, raising=False)
        load_task.cache_clear()
        encoded.append(tokenized(tmp_path, cls=cast("Any", load_task(f"{tmp_path}/own_task.py:Task")))[1])
    assert encoded == [12, 0, 12]


def test_without_the_readers_nothing_is_left_next_to_the_data(tmp_path: Path) -> None:
    corpus = stored_corpus(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    found = [tokenize(corpus, Counting(configured()), tokenizer_of("bytes"))["train"][:] for _ in range(2)]
    assert found[0] == found[1] and len(found[0]["tokens"]) > 10
    assert sorted(tmp_path.rglob("*")) == before


def test_cache_is_found_after_the_tokenizer_was_used(tmp_path: Path) -> None:
    tokenizer = tokenizer_of("bytes")
    fingerprints = []
    for expected in (12, 0, 0):
        task = Counting(configured())
        examples = tokenize(stored_corpus(tmp_path), task, tokenizer, CHECKED)
        assert isinstance(examples["train"], datasets.Dataset)
        fingerprints.append(examples["train"]._fingerprint)
        assert task.encoded == expected
        tokenizer("used, padded and cut", truncation=True, max_length=4, padding="max_length")
    assert len(set(fingerprints)) == 1


@pytest.mark.parametrize(
    "change", [{"max_length": 17}, {"spec": "train:300"}, {"cls": Reversing}], ids=["max_length", "tokenizer", "task"]
)
def test_what_changes_the_examples_is_tokenised_again(change: dict[str, Any], tmp_path: Path) -> None:
    rows, _ = tokenized(tmp_path)
    other, encoded = tokenized(tmp_path, **change)
    assert encoded == 12 and other != rows
    assert tokenized(tmp_path) == (rows, 0)


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_cache_is_made_again_and_said(damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows, _ = tokenized(tmp_path)
    [cache] = cached(tmp_path)
    cache.write_bytes(DAMAGE[damage](cache.read_bytes()))
    assert tokenized(tmp_path) == (rows, 10)
    assert [record.message for record in caplog.records] == [
        f"cached data was damaged and is made again: {cache.with_suffix('')}"
    ]
    assert tokenized(tmp_path) == (rows, 0)


def test_a_stored_dataset_is_only_read(tmp_path: Path) -> None:
    stored_corpus(tmp_path)
    before = {path: path.stat().st_mtime_ns for name in ("train", "validation") for path in (tmp_path / name).iterdir()}
    tokenized(tmp_path)
    assert before == {p: p.stat().st_mtime_ns for name in ("train", "validation") for p in (tmp_path / name).iterdir()}


def test_a_cache_without_digests_is_made_again(tmp_path: Path) -> None:
    """Of a run that was killed before it had written them, and whose files may not all be on the disk."""
    rows, _ = tokenized(tmp_path)
    [cache] = cached(tmp_path)
    cache.with_suffix(".digests").unlink()
    assert tokenized(tmp_path) == (rows, 10)


def test_one_of_several_files_that_is_damaged_or_missing(tmp_path: Path) -> None:
    rows, _ = tokenized(tmp_path, preprocessing_num_workers=2)
    for change in (lambda file: file.write_bytes(altered(file.read_bytes())), Path.unlink):
        files = cached(tmp_path)
        assert len(files) == 2
        change(files[1])
        assert tokenized(tmp_path, preprocessing_num_workers=2)[0] == rows


def test_number_of_processes_changes_neither_examples_nor_what_identifies_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for name, workers in (("one", 1), ("two", 2)):
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / f"cache of {name}")
        task = causal_lm.Task(configured(preprocessing_num_workers=workers))
        examples = tokenize(stored_corpus(tmp_path / name), task, tokenizer_of("bytes"), CHECKED)
        assert isinstance(examples["train"], datasets.Dataset)
        found.append((examples["train"].to_list(), examples["train"]._fingerprint, len(examples["train"].cache_files)))
    assert found[0][:2] == found[1][:2]
    assert (found[0][2], found[1][2]) == (1, 2)  # there were two processes


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_a_task_of_a_file_is_tokenised_by_processes_that_begin_as_copies(
    start: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Datasets has a library of its own for them, whose default is not that of this Python everywhere.
    monkeypatch.setattr(multiprocess, "get_start_method", lambda: start)
    monkeypatch.setattr(multiprocessing, "get_start_method", lambda: "forkserver")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    task = causal_lm.Task(configured(task="my_task.py:Task", preprocessing_num_workers=2))
    train = tokenize(stored_corpus(tmp_path), task, tokenizer_of("bytes"), CHECKED)["train"]
    assert len(train.cache_files) == (2 if start == "fork" else 1)


def test_long_documents_are_taken_few_at_a_time_and_by_more_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 5}, raising=False)  # of a machine's eight cores
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    texts = ["word " * 60_000] * 7 + ["short"] * 2
    validation = datasets.Dataset.from_dict({"text": ["v"], "source": ["v"]})
    found = []
    for name, bytes_per_worker in (("one", 2**24), ("two", 2**20)):
        monkeypatch.setattr("train.tasks.BYTES_PER_WORKER", bytes_per_worker)
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / f"cache of {name}")
        datasets.Dataset.from_dict({"text": texts, "source": texts}).save_to_disk(tmp_path / name)
        train = datasets.load_from_disk(tmp_path / name)
        assert isinstance(train, datasets.Dataset)
        task = Batches(configured(max_length=1000))
        examples = tokenize(
            Corpus("long", {"train": train, "validation": validation}), task, tokenizer_of("bytes"), CHECKED
        )
        assert isinstance(examples["train"], datasets.Dataset)
        found.append((task.batches, len(examples["train"].cache_files), examples["train"]["length"][:]))
    assert found[0][0] == [4, 4, 1, 1]  # of 300 kB each, and then validation
    assert [files for _, files, _ in found] == [1, 2]
    assert found[0][2] == found[1][2] == ([1000] * 300 + [1]) * 7 + [6, 6]


def test_all_splits_are_tokenised_and_keep_only_the_tasks_columns(tmp_path: Path) -> None:
    corpus = stored_corpus(tmp_path)
    corpus = replace(corpus, splits={**corpus.splits, "test": corpus.splits["validation"]})
    examples = tokenize(corpus, causal_lm.Task(configured()), tokenizer_of("bytes"))
    assert list(examples) == ["train", "validation", "test"]
    for split in examples.values():
        assert set(split.column_names) == {"tokens", "length", "num_bytes"}
    assert examples["test"].to_list() == examples["validation"].to_list() != examples["train"].to_list()
