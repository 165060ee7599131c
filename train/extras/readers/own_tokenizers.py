"""Tokenizers that need no download: bytes, words, and BPE trained on the training documents."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from train.records import Corpus, Run

END, PAD, MASK, UNKNOWN = "<|end|>", "<|pad|>", "<|mask|>", "<|unknown|>"
TOKENIZER_TRAINING_BYTES = 16 * 2**20  # a vocabulary of some thousand pieces settles long before this


def tokenizer_for(run: Run, spec: str, corpus: Corpus) -> PreTrainedTokenizerBase:
    """The tokenizer ``bytes``, ``words`` or ``train:N``; one that is trained is kept in the run's folder."""
    if spec == "bytes":
        return build_tokenizer(spec, ())
    trained_on = getattr(corpus.train, "_fingerprint", "stream")
    saved: Path = run.outputs.folder / f"tokenizer-{spec.replace(':', '-')}-{trained_on[:8]}"
    if (saved / "tokenizer.json").exists():
        return AutoTokenizer.from_pretrained(saved)
    tokenizer = build_tokenizer(spec, (dict(row)["text"] for row in corpus.train))
    if run.accelerator.is_local_main_process:
        tokenizer.save_pretrained(saved)
    return tokenizer


def build_tokenizer(spec: str, texts: Iterable[str]) -> PreTrainedTokenizerBase:
    """``bytes``: one token per UTF-8 byte, which is byte-level BPE without a single merge (259 entries);
    ``train:N``: byte-level BPE trained on the beginning of ``texts``; ``words``: one token per word between spaces, for
    artificial languages such as ListOps."""
    special, alphabet = [END, PAD, MASK], pre_tokenizers.ByteLevel.alphabet()
    names: dict[str, Any] = {"bos_token": END, "eos_token": END, "pad_token": PAD, "mask_token": MASK}
    if spec == "words":
        tokenizer = Tokenizer(models.WordLevel(unk_token=UNKNOWN))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        trainer = trainers.WordLevelTrainer(special_tokens=[*special, UNKNOWN], show_progress=False)
        names["unk_token"] = UNKNOWN
    else:
        pieces = {piece: i for i, piece in enumerate([*special, *sorted(alphabet)])}
        tokenizer = Tokenizer(models.BPE(vocab=pieces, merges=[]) if spec == "bytes" else models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        options = {"special_tokens": special, "initial_alphabet": alphabet, "show_progress": False}
        trainer = trainers.BpeTrainer(vocab_size=int(spec.partition(":")[2] or len(pieces)), **options)
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
