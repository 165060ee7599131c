"""What a trained language model writes."""

from typing import Any, cast

import torch
from torch import nn
from transformers import GenerationMixin, PreTrainedModel

from train.extras.weightless import uncompiled
from train.figures import without_secrets
from train.records import Parts, Run
from train.tasks import Task, pad_token_id


def sample_of(run: Run, parts: Parts) -> str | None:
    """What the trained model writes; a failing sample must not lose it."""
    data, model = parts.data, parts.state.model
    try:
        with run.accelerator.autocast(), uncompiled(model):
            written = sample(run, data.task, model, data.tokenizer, data.corpus.splits["validation"][0]["text"])
            return written and without_secrets(written)[:5000]  # a token of words may be a whole text
    except Exception as error:  # of whatever model a person brings
        run.outputs.note(f"no sample of what the model writes: {type(error).__name__}: {error}")


def sample(run: Run, task: Task, model: nn.Module, tokenizer: Any, text: str) -> str | None:
    """How the model continues the beginning of ``text``, the seam marked; None if it cannot or has no token."""
    if not (task.is_causal and isinstance(model, PreTrainedModel) and isinstance(model, GenerationMixin)):
        return None
    max_length = run.config.data.max_length
    if not (ids := next(task.token_ids([text], tokenizer))[: min(64, max_length // 2)]):
        return None
    model.eval()
    framed = task.framed([*ids, -1], tokenizer)  # what follows -1 would end the text
    prompt = torch.tensor([framed[: framed.index(-1)]], device=model.device)
    torch.manual_seed(run.config.optimization.seed)
    drawing = {"do_sample": True, "temperature": 0.8, "top_k": 50, "pad_token_id": pad_token_id(tokenizer)}
    room, seen = min(160, max_length - prompt.shape[1]), torch.ones_like(prompt)
    written = cast("Any", model).generate(prompt, attention_mask=seen, max_new_tokens=room, **drawing)
    return f"{tokenizer.decode(ids)}⟪{tokenizer.decode(written[0, prompt.shape[1] :], skip_special_tokens=True)}⟫"
