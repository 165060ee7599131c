"""Tokenizers that need no download: bytes, words, and BPE trained on the training documents."""

import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from datasets import Dataset, Features, Value
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from train.records import Corpus, UserError

END, PAD, MASK, UNKNOWN = "<|end|>", "<|pad|>", "<|mask|>", "<|unknown|>"
MARKS = (END, PAD, MASK)
_MARKS = re.compile(f"({'|'.join(map(re.escape, MARKS))})")
# Byte-level pieces are characters in the order of Unicode: printable bytes come first, the others follow.
_PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
_IDS = len(MARKS) + np.argsort([*_PRINTABLE, *(byte for byte in range(256) if byte not in _PRINTABLE)])
MOST_UNKNOWN = 0.05
TOKENIZER_TRAINING_BYTES = 16 * 2**20  # a vocabulary of some thousand pieces settles long before this


def tokenizer_for(spec: str, corpus: Corpus) -> PreTrainedTokenizerBase:
    """The tokenizer ``bytes``, ``words`` or ``train:N``; one that is trained is kept with the data it was made of."""
    if spec == "bytes":
        return build_tokenizer(spec, ())
    documents: Any = corpus.splits["train"]
    code = map(inspect.getsource, (build_tokenizer, _beginning))
    made_of = documents._fingerprint, spec, TOKENIZER_TRAINING_BYTES, *code
    key, column = {"documents": documents, "spec": spec}, Features({"json": Value("string")})
    from train.extras.cache import generated  # here: benchmarks make tokenizers where datasets is missing

    try:
        rows: Any = generated(_trained, column, made_of, **key)
    except UserError:  # a cache that cannot be written costs only time
        rows = _trained(**key)
    return _with_names(Tokenizer.from_str(next(iter(rows))["json"]), spec)


def _trained(documents: Any, spec: str) -> Iterator[dict[str, str]]:
    made: Any = build_tokenizer(spec, (row["text"] for row in documents))
    yield {"json": made.backend_tokenizer.to_str()}


def build_tokenizer(spec: str, texts: Iterable[str]) -> PreTrainedTokenizerBase:
    """``bytes``: one token per UTF-8 byte, which is byte-level BPE without a single merge (259 entries);
    ``train:N``: byte-level BPE trained on the beginning of ``texts``; ``words``: one token per word between spaces, for
    artificial languages such as ListOps."""
    special, alphabet = list(MARKS), pre_tokenizers.ByteLevel.alphabet()
    if spec == "words":
        tokenizer = Tokenizer(models.WordLevel(unk_token=UNKNOWN))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        trainer = trainers.WordLevelTrainer(special_tokens=[*special, UNKNOWN], show_progress=False)
    else:
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        size = int(spec.partition(":")[2] or len(special) + len(alphabet))  # which leaves bytes no room for a merge
        options = {"special_tokens": special, "initial_alphabet": alphabet, "show_progress": False}
        trainer = trainers.BpeTrainer(vocab_size=size, **options)
    longest_word = 2**20 if spec == "words" else 2000  # DNA is one word, and time grows with the square of its length
    tokenizer.train_from_iterator(_beginning(texts, TOKENIZER_TRAINING_BYTES, longest_word), trainer)
    return _with_names(tokenizer, spec)


def _with_names(tokenizer: Tokenizer, spec: str) -> PreTrainedTokenizerBase:
    """``tokenizer`` as one of transformers, which knows the special tokens by their roles."""
    names: dict[str, Any] = {"bos_token": END, "eos_token": END, "pad_token": PAD, "mask_token": MASK}
    names |= {"unk_token": UNKNOWN} if spec == "words" else {}
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **names)
    if spec == "bytes":
        made.ids_of = ids_of_bytes
    return made


def ids_of_bytes(text: str) -> list[int]:
    """The ids that ``bytes`` gives, by a table, which is some hundred times as fast as looking for merges."""
    ids: list[int] = []
    for part in _MARKS.split(text):
        ids += [MARKS.index(part)] if part in MARKS else _IDS[np.frombuffer(part.encode(), np.uint8)].tolist()  # type: ignore
    return ids


def warnings_of_unknown(examples: Mapping[str, Dataset], tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    """A line for each split whose examples have many unknown tokens on average, by a thousand of each."""
    unknown = tokenizer.unk_token_id
    if unknown in (None, tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id):
        return  # GPT-2's unknown is its end
    for name, split in examples.items():
        if "tokens" in split.column_names:
            some: Any = split.select(range(0, len(split), len(split) // 1000 + 1)).with_format("numpy")
            # Of each example: where a whole text is one unknown token, its tokens are few.
            if (share := np.mean([np.mean(t == unknown) for t in some["tokens"][:] if len(t)] or [0])) > MOST_UNKNOWN:
                remedy = "Take another tokenizer, such as bytes or train:8192"
                yield f"WARNING: {name}: on average {share:.1%} of an example's tokens are unknown. {remedy}"


def _beginning(texts: Iterable[str], num_bytes: int, longest: int) -> Iterator[str]:
    pieces = (text[start : start + 2**20] for text in texts for start in range(0, len(text), 2**20))
    for piece in pieces:  # of one text, too: a trainer takes a hundred times its size
        is_long = max(map(len, piece.split()), default=0) > longest
        yield re.sub(rf"\S{{{longest}}}", r"\g<0> ", piece) if is_long else piece
        num_bytes -= len(piece.encode())
        if num_bytes < 0:
            return
