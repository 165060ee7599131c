"""Direct preference optimization (DPO, arXiv 2305.18290): of two answers to a prompt, one is preferred.

Use it with ``task: recipes/dpo.py:Task``, ``dataset: recipes/dpo.py:documents`` and ``dataset_options: {path: …}``.
The tokenizer needs a chat template. With ``adapter: lora`` or ``qlora`` the reference is the model without its adapter;
without one it is a second copy of the model.
"""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import takewhile
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from train.config import Config
from train.extras.losses.chunked import PLAIN, chunked_sum
from train.extras.losses.in_head import LossHead, answered, head_of, obstacle_to_chunks
from train.model import logits_of
from train.records import IGNORE, MicroBatch, UsageError, UserError
from train.tasks import Scores, Tokenizer, cross_entropy_scores, load_task, pad

# Loaded as a task's file, because 🤗 Datasets caches by the name of a module, and that of a task has a digest in it.
chat: Any = sys.modules[load_task(f"{Path(__file__).with_name('chat.py')}:Task").__module__]
OPTIONAL = (str, type(None))
# beta: what it costs to move away from the reference; its default is that of TRL. The others are those of chat, too.
KINDS = {"path": str, "config": OPTIONAL, "split": str, "validation_split": OPTIONAL, "beta": (float, int)}
BETA = 0.1
OTHERS = ("system", "system_prompt", "tools", "chat_template_kwargs")  # columns that may come with an answer
TURNS = {"Human": "user", "Assistant": "assistant"}
ASKED = ("instruction", "question", "input")  # columns that some data sets have instead of prompt
TURN = re.compile(r"\n\n(Human|Assistant):")  # in the texts of Anthropic's hh-rlhf


def documents(config: Config) -> dict[str, datasets.Dataset]:
    """Pairs as JSON, in the column ``text``.

    A row has ``chosen`` and ``rejected``: two answers to its ``prompt``, each a text or messages; or two conversations
    with the same beginning, after which all is the answer. ``instruction``, ``question`` or ``input`` may stand for the
    prompt, and a text that begins with a blank line and ``Human:`` is a conversation. ``tools`` and a text ``system``
    may come along. Raises UserError for other rows; UsageError for unknown options, or a task of single texts.
    """
    if "rejected" not in load_task(config.data.task).example_columns:
        raise UsageError("task: recipes/dpo.py:documents gives pairs of answers: give --task recipes/dpo.py:Task.")
    options: dict[str, Any] = {"split": "train", "validation_split": None, "config": None, "beta": BETA}
    options |= config.data.dataset_options or {}
    are_known = all(isinstance(options.get(name), KINDS.get(name, ())) for name in {*options, "path"})
    if not are_known or options["beta"] <= 0:
        raise UsageError(f"dataset_options: recipes/dpo.py takes {', '.join(KINDS)}; path is needed, and beta > 0.")
    return chat.load(options["path"], pair_of, *(options[name] for name in ("split", "validation_split", "config")))


def pair_of(row: Mapping[str, Any], where: str) -> dict[str, Any]:
    """One row's conversation up to the answers, as of chat.py, and the messages ``chosen`` and ``rejected``.

    Without a preference the conversation is empty.
    """
    columns = f"the columns are {', '.join(row)}"
    if not {"chosen", "rejected"} <= row.keys():
        raise UserError(f"{where}: chosen and rejected are needed; {columns}.")
    asked = [row[name] for name in ASKED if isinstance(row.get(name), str)]
    given = {"prompt": "\n\n".join(filter(None, asked)), **row} if asked else row
    prompt, chosen, rejected = (_messages(given.get(name), name, where) for name in ("prompt", "chosen", "rejected"))
    if chosen and rejected and "assistant" not in (chosen[0]["role"], rejected[0]["role"]):  # whole conversations
        prompt = [one for one, _ in takewhile(lambda pair: pair[0] == pair[1], zip(chosen, rejected, strict=False))]
        chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
    elif "prompt" not in given:
        raise UserError(f"{where}: two answers without a prompt; {columns}. Name the question's column prompt.")
    is_pair = prompt and chosen != rejected and _answers(chosen) and _answers(rejected)
    others = {name: value for name, value in row.items() if name in OTHERS}
    found = chat.conversation_of({**others, "messages": prompt}, where) if is_pair else {"messages": []}
    return {**found, "chosen": chosen, "rejected": rejected}


def _messages(found: Any, name: str, where: str) -> list[dict[str, Any]]:
    if isinstance(found, str) and TURN.match(found):
        said = TURN.split(found)[1:]  # a role and its text in turn; a prompt ends with a role that has yet to answer
        turns = zip(said[::2], said[1::2], strict=True)
        found = [{"role": TURNS[role], "content": text.strip()} for role, text in turns if text.strip()]
    elif found is None or isinstance(found, str):
        found = [{"role": "user" if name == "prompt" else "assistant", "content": found}] if found else []
    if not isinstance(found, list) or not all(isinstance(message, Mapping) for message in found):
        raise UserError(f"{where}: its {name} is neither a text nor a list of messages.")
    return [chat.message_of(message, where) for message in found]


def _answers(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether they begin with an assistant who says or calls something."""
    first: Mapping[str, Any] = messages[0] if messages else {"role": ""}
    return first["role"] == "assistant" and bool(first["content"].strip() or first.keys() - chat.PLAIN)


class HostNumber(int):
    """A number in a batch that stays on the host, where shapes are decided; a rehearsal leaves it out."""

    def to(self, *_: Any, **__: Any) -> HostNumber:
        return self

    pin_memory = to


class Task(chat.Task):
    """An example is a pair; ``max_length`` bounds each answer with its prompt. The loss is a mean over pairs."""

    headline_metric = "accuracy"
    example_columns = (*chat.Task.example_columns, "rejected", "rejected_is_target")  # the others: of the chosen one

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        if config.get("packing"):
            raise UsageError("packing: the two answers of a pair have a row each. Leave it out.")

    def cut(self, text: str, ids: list[int], label: int | None, tokenizer: Tokenizer) -> Iterator[dict[str, Any]]:
        """The pair; none where a target of both answers, or a difference, is left after ``max_length``."""
        if ids:  # of a plan, without data: answers throughout
            chosen = rejected = next(super().cut(text, ids, label, tokenizer))
        else:
            pair = self.conversation_in(text)
            if "rejected" not in pair:
                raise UserError("dpo: a text without chosen and rejected: give --dataset recipes/dpo.py:documents.")
            chosen, rejected = (self._example_of(pair, pair[name], tokenizer) for name in ("chosen", "rejected"))
            if not chosen or not rejected or np.array_equal(chosen["tokens"], rejected["tokens"]):
                return
        lengths = {name: max(chosen[name], rejected[name]) for name in ("length", "document_length")}
        yield {**chosen, **lengths, "rejected": rejected["tokens"], "rejected_is_target": rejected["is_target"]}

    def _example_of(self, pair: Mapping[str, Any], answer: list[Any], tokenizer: Tokenizer) -> dict[str, Any] | None:
        """The prompt and an answer, all of whose tokens are targets."""
        others = {"tools": pair.get("tools") or None, **(pair.get("chat_template_kwargs") or {})}
        history, before = (chat.templated(tokenizer, pair["messages"], asks, **others) for asks in (False, True))
        after = chat.templated(tokenizer, [*pair["messages"], *answer], False, **others)
        start = chat.common(before, after)
        if start < chat.common(before, history.rstrip()):
            what = "dpo: the tokenizer's template writes a prompt in another way once it is answered"
            raise UserError(f"{what}: change the template. {chat.beginning(pair['messages'])}")
        return next(self._example(after, [(start, len(after))], tokenizer), None)

    def collate(self, examples: Sequence[Mapping[str, Any]], seed: Sequence[int], pad_id: int) -> MicroBatch:
        """Tokens (B, S) of both answers, and those that each has to predict; a label (B,) for each pair.

        Before the position ``start`` no row has a target: the head leaves the prompt out.
        """
        others = [{"tokens": e["rejected"], "is_target": e["rejected_is_target"]} for e in examples]
        rows, targets = zip(*(self.inputs_and_labels(answer, seed) for answer in (*examples, *others)), strict=True)
        (chosen, rejected), padded = pad(rows, pad_id).chunk(2), pad(targets, IGNORE)
        inputs: dict[str, Any] = {"input_ids": chosen, "rejected_ids": rejected}
        inputs["targets"], inputs["rejected_targets"] = padded.chunk(2)
        inputs["start"] = HostNumber((padded != IGNORE).any(0).int().argmax())
        size, ids = len(examples), tuple(int(example["id"]) for example in examples)
        return MicroBatch(inputs, torch.ones(size, dtype=torch.long), size, ids, sum(map(len, rows[:size])))

    def change_loss(self, model: Any) -> None:
        """−log σ(β · (gain of chosen − gain of rejected)), where a gain is log p of an answer − the reference's."""
        network, beta = model.model, (self.data.dataset_options or {}).get("beta", BETA)
        if is_chunked := obstacle_to_chunks(network) == (None, PLAIN):
            head_of(network).__class__ = LossHead
        is_added = self.config.get("adapter", "none") != "none"  # else a function's adapters belong to the reference
        adapters = [module for module in network.modules() if is_added and hasattr(module, "base_layer")]  # peft's
        if not adapters:
            model.reference = reference = copy.deepcopy(network).requires_grad_(False).eval()
            reference.train = lambda mode=True: reference  # no dropout in it, also where the model trains

        def loss_of(module: Any, inputs: dict[str, Any], labels: Tensor, scored: bool, num_targets: Any) -> Any:
            ids = torch.cat([inputs["input_ids"], inputs["rejected_ids"]])
            start = inputs.get("start", 0)
            targets = torch.cat([inputs["targets"], inputs["rejected_targets"]])[:, start:]
            with torch.no_grad(), as_reference(network, adapters) if adapters else nullcontext():
                before = log_p(getattr(module, "reference", module.model), ids, targets, is_chunked)
            gains = log_p(module.model, ids, targets, is_chunked) - before
            chosen, rejected = (beta * gains).chunk(2)
            losses = -F.logsigmoid(chosen - rejected)
            return Scores(losses, (chosen > rejected).long(), (chosen, rejected)) if scored else losses.sum()

        model.loss_in_head = loss_of

    def metrics(self, table: Any, examples: Any, label_names: Sequence[str]) -> dict[str, Any]:
        """The share of pairs whose chosen answer gained more, and the gains times β, which are called rewards."""
        metrics = super().metrics(table, examples, label_names)
        chosen, rejected = table[:, 6:8].mean(0)  # the counts of the scores
        kept = {name: metrics[name] for name in ("loss", "accuracy")}
        return {**kept, "margin": chosen - rejected, "reward_chosen": chosen, "reward_rejected": rejected}


@contextmanager
def as_reference(network: Any, adapters: Sequence[Any]) -> Iterator[None]:
    """Inside, ``network`` is as it was before ``adapters`` were added, without dropout."""
    was_training = network.training
    try:
        network.eval()
        for layer in adapters:
            layer._disable_adapters = True  # enable_adapters(False) would also freeze them, which checkpoints go by
        yield
    finally:
        network.train(was_training)
        for layer in adapters:
            layer._disable_adapters = False


def log_p(network: Any, ids: Tensor, targets: Tensor, is_chunked: bool) -> Tensor:
    """(N,) the log probability of each row's ``targets`` (N, T), which are those of the last T of ``ids`` (N, S)."""
    start = ids.shape[1] - targets.shape[1]
    if not is_chunked:
        return -cross_entropy_scores(logits_of(network(input_ids=ids))[:, start:], targets).loss_sums

    def answer(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        arguments = [(row, weight, bias, own) for row, own in zip(hidden[:, start:], targets, strict=True)]
        if weight.requires_grad:  # without a checkpoint each row would keep a gradient of the whole weight
            options: dict[str, Any] = {"use_reentrant": True, "preserve_rng_state": False}
            return -torch.stack([checkpoint(chunked_sum, *each, **options) for each in arguments])
        return -torch.stack([chunked_sum(*each) for each in arguments])

    return logits_of(answered(network, {"input_ids": ids}, answer))
