"""Context parallelism: each sequence is divided among ranks, and keys and values go round (arXiv 2310.01889).

Rank r of n holds the r-th and the r-th from last of 2n equal pieces: early positions attend to few, late ones to many,
so every rank has the same work. The loss of a rank is that of its positions; sums over ranks give the whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard

from train.records import IGNORE, MicroBatch, UserError
from train.step import Engine


class ContextParallel(Engine):
    """The step of ranks that each hold a part of every sequence, in training and evaluation."""

    @contextmanager
    def share(self, micro_batch: MicroBatch) -> Iterator[MicroBatch]:
        """This rank's part of ``micro_batch``, with attention that reaches over the parts of all ranks."""
        assert self.accelerator.torch_device_mesh is not None
        mesh, device = self.accelerator.torch_device_mesh["cp"], self.accelerator.device
        part = part_of(micro_batch, mesh.get_local_rank(), mesh.size())
        length = part.labels.shape[1] * mesh.size()
        if device.type == "cpu":
            attention = attention_over_all(mesh, length)
        else:
            whole = torch.empty(1, length, dtype=torch.bool, device=device)  # read for its length alone
            attention = self.accelerator.maybe_context_parallel([whole], [1], {whole})
        with attention:
            yield part


def positions_of(length: int, rank: int, ranks: int) -> Tensor:
    """(length ÷ ranks,) the positions that a rank holds; ``length`` is a multiple of 2 · ``ranks``."""
    pieces = torch.arange(length).view(2 * ranks, -1)
    return torch.cat([pieces[rank], pieces[2 * ranks - 1 - rank]])


def part_of(batch: MicroBatch, rank: int, ranks: int) -> MicroBatch:
    """A rank's positions of every example, after padding at the end to a multiple of 2 · ``ranks``.

    The model is told the positions, and makes no attention mask: under causal attention no token sees the padding.
    """
    ids = batch.inputs["input_ids"]
    missing = -ids.shape[1] % (2 * ranks)
    positions = positions_of(ids.shape[1] + missing, rank, ranks)
    labels = F.pad(batch.labels, (0, missing), value=IGNORE)[:, positions]
    inputs = {
        "input_ids": F.pad(ids, (0, missing))[:, positions],
        "position_ids": positions.unsqueeze(0),
        # With it the model makes no mask of its own; accelerate's hooks remove it before it is used. If they did not,
        # the loss would be NaN.
        "attention_mask": torch.full((1, 1, 1, 1), torch.nan),
    }
    return replace(batch, inputs=inputs, labels=labels, num_targets=int((labels != IGNORE).sum()))


@contextmanager
def attention_over_all(mesh: DeviceMesh, length: int) -> Iterator[None]:
    """Causal attention over the sequences' parts on all ranks, which torch has for GPUs alone.

    It holds a mask of (length ÷ ranks, length).
    """
    held = [positions_of(length, rank, mesh.size()) for rank in range(mesh.size())]
    visible = held[mesh.get_local_rank()].unsqueeze(1) >= torch.cat(held)
    plain = F.scaled_dot_product_attention

    def attend(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        assert options.pop("attn_mask", None) is None
        assert options.pop("is_causal", False)
        return plain(query, _gathered(key, mesh), _gathered(value, mesh), attn_mask=visible, **options)

    F.scaled_dot_product_attention = attend
    try:
        yield
    finally:
        F.scaled_dot_product_attention = plain


def _gathered(part: Tensor, mesh: DeviceMesh) -> Tensor:
    """(B, heads, S, D) of all ranks' parts; gradients are summed over the ranks."""
    whole = DTensor.from_local(part, mesh, [Shard(2)], run_check=False)
    return whole.full_tensor(grad_placements=[Partial()])


def check_model(model: nn.Module) -> None:
    """Stops unless the sequences of ``model`` can be divided.

    Raises:
        UserError: with the reason.
    """
    config: Any = getattr(model, "config", None)
    name = getattr(config, "model_type", type(model).__name__)
    obstacle = None
    if config is None:
        obstacle = "it is not a transformers model"
    else:
        config = config.get_text_config()
        kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
        layers = [module for key, module in model.named_modules() if key.endswith("self_attn")]
        if kinds or (getattr(config, "sliding_window", None) and not getattr(config, "layer_types", None)):
            obstacle = f"its attention does not see all earlier positions ({', '.join(kinds) or 'sliding_window'})"
        elif len(layers) != config.num_hidden_layers or not all(getattr(layer, "is_causal", False) for layer in layers):
            obstacle = "not every layer has a causal self_attn"
        elif config._attn_implementation != "sdpa":
            obstacle = f"its attn_implementation is {config._attn_implementation}, not sdpa"
        elif getattr(config, "attention_dropout", 0.0):
            obstacle = f"its attention_dropout is {config.attention_dropout}, not 0"
    if obstacle:
        raise UserError(
            f"parallelism_config_cp_size in the launch file: {name} cannot divide its sequences among ranks: "
            f"{obstacle}. Use a model of the Llama or Qwen kind with full attention, or accelerate_configs/fsdp2.yaml."
        )
