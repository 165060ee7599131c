"""Direct preference optimization (DPO, arXiv 2305.18290): of two answers to a prompt, one is preferred.

Use it with ``task: recipes/dpo.py:Task``, ``dataset: recipes/dpo.py:documents`` and ``dataset_options: {path: …}``.
The tokenizer needs a chat template. With ``adapter: lora`` or ``qlora`` the reference is the model without its adapter;
without one it is a second copy of the model. Logits of long answers are never all there.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import datasets
import torch
import torch.nn.functional as F
from chat import Task as Chat  # recipes/chat.py
from chat import beginning, common, load, message_of, templated
from torch import Tensor

from train.config import Config
from train.extras.losses.chunked import chunked_sum
from train.extras.losses.in_head import LossHead, answered, head_of, obstacle_to_chunks
from train.model import logits_of
from train.records import IGNORE, MicroBatch, UsageError, UserError
from train.tasks import Scores, Tokenizer, cross_entropy_scores, load_task, pad

# beta: how much it costs to move away from the reference; its default is that of TRL. The other options are chat.py's.
KINDS = {"path": str, "split": str, "validation_split": (str, type(None)), "beta": (float, int)}
ANSWERS = ("chosen", "rejected")


def options_of(config: Config) -> dict[str, Any]:
    """``dataset_options``; raises UsageError where they are unknown."""
    given = {"split": "train", "validation_split": None, "beta": 0.1, **(config.data.dataset_options or {})}
    if not all(isinstance(given.get(name), KINDS.get(name, ())) for name in {*given, "path"}) or given["beta"] <= 0:
        raise UsageError(f"dataset_options: recipes/dpo.py takes {', '.join(KINDS)}; path is needed, and beta > 0.")
    return given


def documents(config: Config) -> dict[str, datasets.Dataset]:
    """Pairs as JSON, in the column ``text``.

    A row has ``chosen`` and ``rejected``: two answers to its ``prompt``, each a text or messages; or two conversations
    with the same beginning. Raises UserError for other rows; UsageError for unknown options, or a task of single texts.
    """
    if "chosen" not in load_task(config.data.task).example_columns:
        raise UsageError("task: recipes/dpo.py:documents gives pairs of answers: give --task recipes/dpo.py:Task.")
    options = options_of(config)
    wanted = {"train": options["split"], "validation": options["validation_split"]}
    return {name: load(options["path"], split, pair_of) for name, split in wanted.items() if split}


def pair_of(row: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The ``messages`` that both answers follow, and the messages ``chosen`` and ``rejected``."""
    if not {*ANSWERS} <= row.keys():
        raise UserError(f"{where}: chosen and rejected are needed; the columns are {', '.join(row)}.")
    prompt, *answers = (_messages(row.get(name), name, where) for name in ("prompt", *ANSWERS))
    if all(answer[:1] and answer[0]["role"] != "assistant" for answer in answers):  # whole conversations
        shared = next((n for n, (one, other) in enumerate(zip(*answers, strict=False)) if one != other), 0)
        prompt, answers = answers[0][:shared], [answer[shared:] for answer in answers]
    is_pair = all(answers) and answers[0] != answers[1] and all(a[0]["role"] == "assistant" for a in answers)
    return {"messages": prompt if is_pair else [], **dict(zip(ANSWERS, answers, strict=True))}


def _messages(found: Any, name: str, where: str) -> list[dict[str, Any]]:
    if isinstance(found or "", str):
        found = [{"role": "user" if name == "prompt" else "assistant", "content": found}] if found else []
    if not isinstance(found, list) or not all(isinstance(message, Mapping) for message in found):
        raise UserError(f"{where}: its {name} is neither a text nor a list of messages.")
    return [message_of(message, where) for message in found]


class Task(Chat):
    """An example is a pair; ``max_length`` bounds each answer with its prompt. The loss is a mean over pairs."""

    title = "chat"
    headline_metric = "accuracy"
    example_columns = (*ANSWERS, "chosen_is_target", "rejected_is_target", "length", "document_length")

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        if config.get("packing"):
            raise UsageError("packing: the two answers of a pair have a row each. Leave it out.")

    def cut(self, text: str, ids: list[int], label: int | None, tokenizer: Tokenizer) -> Iterator[dict[str, Any]]:
        """The pair, where both answers have a target left."""
        if ids:  # of a plan, without data: answers throughout
            found = list(super().cut(text, ids, label, tokenizer)) * 2
        else:
            pair = self.conversation_in(text)
            if not {*ANSWERS} <= pair.keys():
                raise UserError("dpo: a text without chosen and rejected: give --dataset recipes/dpo.py:documents.")
            found = [part for name in ANSWERS for part in self._answer(pair["messages"], pair[name], tokenizer)]
        if len(found) == 2:
            of_answers = {a + k: part[n] for a, part in zip(ANSWERS, found, strict=True) for k, n in COLUMNS.items()}
            yield of_answers | {name: max(part[name] for part in found) for name in ("length", "document_length")}

    def _answer(self, prompt: list[Any], answer: list[Any], tokenizer: Tokenizer) -> Iterator[dict[str, Any]]:
        """The prompt and one answer, all of whose tokens are targets."""
        history, before = (templated(tokenizer, prompt, asks) for asks in (False, True))
        after = templated(tokenizer, [*prompt, *answer], False)
        start = common(before, after)
        if start < common(before, history.rstrip()):
            what = "dpo: the tokenizer's template writes a prompt in another way once it is answered"
            raise UserError(f"{what}: change the template. {beginning(prompt)}")
        return self._example(after, [(start, len(after))], tokenizer)

    def collate(self, examples: Sequence[Mapping[str, Any]], seed: Sequence[int], pad_id: int) -> MicroBatch:
        """Inputs (B, S) of both answers, and the tokens that each has to predict; a label (B,) for each pair."""
        answers = [{n: example[a + k] for k, n in COLUMNS.items()} for a in ANSWERS for example in examples]
        rows, targets = zip(*(self.inputs_and_labels(answer, seed) for answer in answers), strict=True)
        made = {"ids": pad(rows, pad_id), "targets": pad(targets, IGNORE)}
        halves = {kind: both.chunk(2) for kind, both in made.items()}
        inputs = {f"{name}_{kind}": half[n] for kind, half in halves.items() for n, name in enumerate(ANSWERS)}
        inputs["input_ids"] = inputs.pop("chosen_ids")  # by which the shape of a batch is known
        ids, labels = tuple(int(example["id"]) for example in examples), torch.ones(len(examples), dtype=torch.long)
        return MicroBatch(inputs, labels, len(ids), ids, sum(map(len, rows[: len(ids)])))  # of the chosen ones

    def change_loss(self, model: Any) -> None:
        """−log σ(β · (gain of chosen − gain of rejected)), where a gain is log p of an answer − the reference's."""
        network: Any = model.model
        beta, is_chunked = options_of(self.config)["beta"], obstacle_to_chunks(network) is None
        if is_chunked:
            head_of(network).__class__ = LossHead
        adapters = [module for module in network.modules() if hasattr(module, "base_layer")]  # peft's
        if not adapters:
            model.reference = reference = copy.deepcopy(network).requires_grad_(False).eval()
            reference.train = lambda mode=True: reference  # no dropout in it, also where the model trains

        def loss_of(module: Any, inputs: dict[str, Tensor], labels: Tensor, scored: bool, num_targets: Any) -> Any:
            ids = torch.cat([inputs["input_ids"], inputs["rejected_ids"]])
            targets = torch.cat([inputs["chosen_targets"], inputs["rejected_targets"]])
            with torch.no_grad(), without(adapters):
                before = log_p(getattr(module, "reference", module.model), ids, targets, is_chunked)
            gains = log_p(module.model, ids, targets, is_chunked) - before
            chosen, rejected = (beta * gains).chunk(2)
            losses = -F.logsigmoid(chosen - rejected)
            return Scores(losses, (chosen > rejected).long(), (chosen, rejected)) if scored else losses.sum()

        model.loss_in_head = loss_of

    def metrics(self, table: Any, examples: Any, label_names: Sequence[str]) -> dict[str, Any]:
        """The share of pairs whose chosen answer gained more, and the gains times β, which are called rewards."""
        metrics = super().metrics(table, examples, label_names)
        chosen, rejected = table[:, 6:8].mean(0)
        kept = {name: metrics[name] for name in ("loss", "accuracy")}
        return {**kept, "margin": chosen - rejected, "reward_chosen": chosen, "reward_rejected": rejected}


COLUMNS = {"": "tokens", "_is_target": "is_target"}  # of a pair, by the name that chat.py's examples have


@contextmanager
def without(adapters: Sequence[Any]) -> Iterator[None]:
    """Inside, the model is as it was before ``adapters`` were added."""
    for layer in adapters:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in adapters:
            layer.enable_adapters(True)


def log_p(network: Any, ids: Tensor, targets: Tensor, is_chunked: bool) -> Tensor:
    """(N,) the log probability of each row's ``targets`` (N, S) after ``ids`` (N, S)."""
    if not is_chunked:
        return -cross_entropy_scores(logits_of(network(input_ids=ids)), targets).loss_sums

    def answer(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return -torch.stack([chunked_sum(row, weight, bias, own) for row, own in zip(hidden, targets, strict=True)])

    return logits_of(answered(network, {"input_ids": ids}, answer))
