"""Sequences that are divided among ranks, by context parallelism or Ulysses. Each rank gets a part of every sequence.

Context parallelism: each rank gathers all keys and values (cf. arXiv 2310.01889). Rank r of n holds the r-th and the
r-th from last of 2n equal pieces: early positions attend to few, late ones to many, so every rank has the same work.
The loss of a rank is that of its positions; sums over ranks give the whole.

Ulysses (arXiv 2309.14509): outside attention each rank holds a stretch of the tokens, inside it all tokens of a part of
the heads; DeepSpeed exchanges the one for the other around the attention of a transformers model.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, cast
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard

from train.extras.parallelism.deepspeed_engine import DeepSpeed
from train.model import ModelWithLoss
from train.records import IGNORE, MicroBatch, Run, UsageError, UserError
from train.step import Engine


def at_positions(batch: MicroBatch, positions: Tensor, length: int, num_rows: int) -> MicroBatch:
    """``batch`` (B, S), padded at the end to (num_rows, length), at ``positions`` (P,): it becomes (num_rows, P).

    The model is told the positions, and gets no attention mask: under causal attention no token sees the padding.
    Raises UserError for a batch with inputs that cannot be divided, such as a mask.
    """
    if set(batch.inputs) != {"input_ids"} or batch.labels.ndim != 2:
        remedy = "use a task that gives only input_ids, or a launch file without sp_size and cp_size"
        given = ", ".join(sorted(batch.inputs))
        raise UserError(f"ranks divide sequences of input_ids alone, this task gives {given}: {remedy}.")
    rows, given = batch.labels.shape
    padding = (0, length - given, 0, num_rows - rows)
    labels = F.pad(batch.labels, padding, value=IGNORE)[:, positions]
    ids = F.pad(batch.inputs["input_ids"], padding)[:, positions]
    inputs = {"input_ids": ids, "position_ids": positions.unsqueeze(0)}
    return replace(batch, inputs=inputs, labels=labels, num_targets=int((labels != IGNORE).sum()))


def check_model(model: nn.Module, field: str, obstacle_of: Callable[[nn.Module, Any], str | None]) -> None:
    """Raises UsageError, with the reason, unless the sequences of ``model`` can be divided."""
    config: Any = getattr(model, "config", None)
    name, text = getattr(config, "model_type", type(model).__name__), config and config.get_text_config()
    obstacle = obstacle_of(model, text) if config is not None else "it is not a transformers model"
    if getattr(text, "output_router_logits", False):
        obstacle = "its experts are balanced over whole sequences (output_router_logits: true)"
    if obstacle is not None:
        remedy = "Use a model of the Llama or Qwen kind with full attention, or accelerate_configs/fsdp2.yaml"
        why = f"{name} cannot divide its sequences among ranks: {obstacle}. {remedy}"
        raise UsageError(f"parallelism_config_{field} in the launch file: {why}.")


class ContextParallel(Engine):
    """The step of ranks that each hold a part of every sequence, in training and evaluation."""

    @staticmethod
    def prepare(run: Run, model: ModelWithLoss) -> None:
        """Raises UsageError unless the model's sequences can be divided."""
        check_model(model.model, "cp_size", obstacle_to_context)

    @contextmanager
    def share(self, micro_batch: MicroBatch) -> Iterator[MicroBatch]:
        """This rank's part, with attention that reaches over the parts of all ranks."""
        mesh, device = cast("Any", self.accelerator.torch_device_mesh)["cp"], self.accelerator.device
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
    """A rank's positions of every example, after padding at the end to a multiple of 2 · ``ranks``."""
    rows, length = batch.labels.shape
    length += -length % (2 * ranks)
    part = at_positions(batch, positions_of(length, rank, ranks), length, rows)
    # With it the model makes no mask of its own. Accelerate's hooks remove it: if they did not, the loss would be NaN.
    part.inputs["attention_mask"] = torch.full((1, 1, 1, 1), torch.nan)
    return part


def attention_over_all(mesh: DeviceMesh, length: int) -> AbstractContextManager[Any]:
    """Causal attention over the parts on all ranks, which torch has for GPUs alone; its mask is (S ÷ ranks, S)."""
    held = [positions_of(length, rank, mesh.size()) for rank in range(mesh.size())]
    visible = held[mesh.get_local_rank()].unsqueeze(1) >= torch.cat(held)
    plain = F.scaled_dot_product_attention

    def gathered(part: Tensor) -> Tensor:
        """(B, heads, S, D) of all ranks' parts; gradients are summed over the ranks."""
        return DTensor.from_local(part, mesh, [Shard(2)], run_check=False).full_tensor(grad_placements=[Partial()])

    def attend(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        mask, is_causal = options.pop("attn_mask", None), options.pop("is_causal", False)
        assert mask is None and is_causal
        return plain(query, gathered(key), gathered(value), attn_mask=visible, **options)

    return patch.object(F, "scaled_dot_product_attention", attend)


def obstacle_to_context(model: nn.Module, config: Any) -> str | None:
    kinds, slides = getattr(config, "layer_types", None), getattr(config, "sliding_window", None)
    other = set(kinds) - {"full_attention"} if kinds else {"sliding_window"} if slides else set()
    causal = [getattr(m, "is_causal", False) for name, m in model.named_modules() if name.endswith("self_attn")]
    attention, dropout = config._attn_implementation, getattr(config, "attention_dropout", 0.0)
    layers = getattr(config, "num_hidden_layers", None)
    cases = (
        (other, f"its attention does not see all earlier positions ({', '.join(other)})"),
        (len(causal) != layers or not all(causal), "not every layer has a causal self_attn"),
        (attention != "sdpa", f"its attn_implementation is {attention}, not sdpa"),
        (dropout, f"its attention_dropout is {dropout}, not 0"),
    )
    return next((obstacle for is_so, obstacle in cases if is_so), None)


def obstacle_to_ulysses(config: Any, ranks: int, max_length: int) -> str | None:
    other = {*(getattr(config, "layer_types", None) or ())} - {"full_attention", "sliding_attention"}
    window = config._attn_implementation == "sdpa" and getattr(config, "sliding_window", None)
    heads, of_keys = config.num_attention_heads, getattr(config, "num_key_value_heads", None)
    if other or (window and window < max_length):
        return f"it has {', '.join(other) or f'a sliding_window of {window} tokens in sdpa'}"
    if of_keys is None or heads % ranks or (of_keys % ranks and ranks % of_keys):
        return f"{ranks} does not divide its {heads} heads, {of_keys or '?'} of keys; another size may"
    return None


class Ulysses(DeepSpeed):
    """DeepSpeed on ranks that share sequences in training; in evaluation each of them takes whole ones."""

    @staticmethod
    def prepare(run: Run, model: Any) -> None:
        """Has DeepSpeed exchange heads around the attention that the model, one of transformers, was built with."""
        parallelism: Any = run.accelerator.parallelism_config
        ranks, max_length = run.launch.sp_size, run.config.data.max_length
        check_model(model.model, "sp_size", lambda _, config: obstacle_to_ulysses(config, ranks, max_length))
        DeepSpeed.prepare(run, model)
        model.config = model.model.config  # where accelerate looks for it
        text = model.config.get_text_config()
        if getattr(text, "head_dim", 0) is None:  # which DeepSpeed takes for the size
            text.head_dim = text.hidden_size // text.num_attention_heads
        parallelism.sp_handler.sp_attn_implementation = model.config._attn_implementation

    @property
    def loss_factor(self) -> float:
        """Stage 3 divides the sum of gradients by all ranks; stage 2 counts ranks that share a sequence as one."""
        return self.accelerator.num_processes // (1 if self.engine.zero_optimization_stage() == 3 else self.mp_size)

    def share(self, micro_batch: MicroBatch) -> AbstractContextManager[MicroBatch]:
        """This rank's stretch of every sequence; the whole batch in evaluation, where nothing is exchanged."""
        if not self.engine.module.training:
            text, modules = self.engine.module.model.config.get_text_config(), self.engine.module.modules()
            for layer in (m for m in modules if hasattr(m, "num_key_value_groups")):  # DeepSpeed left a rank's there
                layer.num_key_value_groups = text.num_attention_heads // text.num_key_value_heads
            return nullcontext(micro_batch)
        rank, num_rows = self.accelerator.process_index % self.mp_size, self.engine.train_micro_batch_size_per_gpu()
        return nullcontext(part_of_sequences(micro_batch, rank, self.mp_size, num_rows))


def part_of_sequences(batch: MicroBatch, rank: int, size: int, num_rows: int) -> MicroBatch:
    """What rank ``rank`` of ``size`` that share ``batch`` computes: (B, S) becomes (num_rows, ⌈S / size⌉).

    DeepSpeed's exchange has a fixed number of rows; missing ones are padding.
    """
    share = -(-batch.labels.shape[1] // size)
    part = at_positions(batch, torch.arange(rank * share, (rank + 1) * share), share * size, num_rows)
    part.inputs["position_ids"] = part.inputs["position_ids"].repeat(num_rows, 1)
    return part
