"""Tensor parallelism: each layer's weights, and the work on them, divided among ranks that see the same examples.

A model of transformers says by its plan which of its linear layers are cut by columns, and which of the following ones
by rows, so that a block of layers needs one sum over the ranks in forward and one in backward (Megatron-LM, arXiv
1909.08053). Embeddings are cut by the vocabulary. Every rank holds the rest, such as norms, whole.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.parallel.style import ParallelStyle

from train.model import ModelWithLoss
from train.records import Run, UserError
from train.step import Engine

EMBEDDING = "embedding_rowwise"
GRADIENT_SUM = "replicated_with_grad_allreduce"
STYLES: dict[str, Callable[[], ParallelStyle]] = {  # names of transformers' plans, as styles of torch
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "colwise_gather_output": partial(ColwiseParallel, output_layouts=Replicate()),
    "rowwise_split_input": partial(RowwiseParallel, input_layouts=Replicate()),
    EMBEDDING: partial(RowwiseParallel, input_layouts=Replicate()),
}
_REMEDY = "Use a model of the Llama, Qwen, Mistral or GPT-NeoX kind, or accelerate_configs/fsdp2.yaml."
_UNEVEN = "which {} ranks cannot share evenly. Set parallelism_config_tp_size in the launch file to a divisor of it."


class TensorParallel(Engine):
    """The step of ranks that share the weights: all compute the same loss, and each the gradient of its part."""

    @staticmethod
    def prepare(run: Run, with_loss: ModelWithLoss) -> None:
        """Leaves this rank its part of the weights, on its device, and has the model work with it.

        To be called before the optimizer is built. The model is the same on all ranks; whole weights become those of
        the first. Where its loss is in chunks the classes are divided, too. Raises UserError if the model has no plan,
        or cannot be divided among so many ranks.
        """
        assert run.accelerator.torch_device_mesh is not None
        model, mesh = with_loss.model, run.accelerator.torch_device_mesh["tp"]
        ranks = mesh.size()
        plan, tied = plan_of(model, ranks), _tied(model)
        embeddings, head = (getattr(model, f"get_{side}_embeddings")() for side in ("input", "output"))
        for name, style in plan.items():
            module = model.get_submodule(name)
            if style == GRADIENT_SUM:  # every rank has the whole weight, but sees its own heads alone
                for parameter in filter(lambda p: p.requires_grad, module.parameters()):
                    parameter.register_hook(partial(_summed, group=mesh.get_group()))
            elif module is head and with_loss.loss_in_head is not None:
                # Only the loss in chunks asks the other ranks for their part of the classes.
                assert getattr(with_loss.loss_in_head, "kind", None) == "chunked"
                head.part = VocabularyPart(len(head.weight), mesh)
                for kind, parameter in list(module.named_parameters()):
                    divided = distribute_tensor(parameter, mesh, [Shard(0)])
                    setattr(module, kind, nn.Parameter(divided, requires_grad=parameter.requires_grad))
            else:
                parallelize_module(module, mesh, STYLES[style]())
        if isinstance(embeddings.weight, DTensor):
            embeddings.padding_idx = None  # a part would take it for a row of its own; padding has no gradient anyway
        for owners in tied:
            first = model.get_submodule(owners[0])
            for other in owners[1:]:
                model.get_submodule(other).weight = first.weight
        _copy_the_rest(model, mesh, run.accelerator.device)
        with_loss.tp_size = ranks  # pyright: ignore[reportArgumentType] - accelerate asks for it

    @property
    def loss_factor(self) -> float:
        """Undoes averages over micro-batches and data parallelism; ranks with the same examples average nothing."""
        return super().loss_factor / self.copies


def plan_of(model: nn.Module, ranks: int) -> dict[str, str]:
    """The style of each module of ``model`` that is divided, by the module's name; raises UserError as above."""
    name = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    written: dict[str, str] = getattr(model, "tp_plan", None) or {}
    plan, modules = {}, dict(model.named_modules())
    for key in [*modules, *dict(model.named_parameters())]:
        if (style := written.get(re.sub(r"\.\d+(?=\.|$)", ".*", key))) is None:
            continue
        if style not in {*STYLES, GRADIENT_SUM} or key not in modules:
            raise UserError(f"tensor parallelism: {name} wants {style!r} for {key}, which is not done here. {_REMEDY}")
        plan[key] = style
    if not plan:
        raise UserError(f"tensor parallelism: {name} has no plan of how to divide its layers. {_REMEDY}")
    _plan_embeddings(model, plan)
    for key, style in plan.items():
        _check_module(name, key, model.get_submodule(key), style, ranks)
    if any(style == "colwise" and "att" in key for key, style in plan.items()):
        config = model.config.get_text_config()  # pyright: ignore - only models of transformers have plans
        for field in ("num_attention_heads", "num_key_value_heads"):
            heads = getattr(config, field, None)
            if isinstance(heads, int) and heads % ranks:
                raise UserError(f"tensor parallelism: {name} has {heads} {field}, {_UNEVEN.format(ranks)}")
    return plan


def _plan_embeddings(model: nn.Module, plan: dict[str, str]) -> None:
    """Adds the input embeddings to ``plan``, or takes the output embeddings out with which they share a weight."""
    names = {module: name for name, module in model.named_modules()}
    embeddings = model.get_input_embeddings()  # pyright: ignore - only models of transformers have plans
    name = names[embeddings]
    if type(embeddings) is nn.Embedding:  # others do more than look up
        plan[name] = EMBEDDING
    else:
        plan.pop(name, None)
    for owners in _tied(model):
        if not all(owner in plan for owner in owners):
            for owner in owners:
                plan.pop(owner, None)


def _tied(model: nn.Module) -> list[list[str]]:
    """Names of the modules that have one ``weight`` together."""
    owners: dict[nn.Parameter, list[str]] = {}
    for name, module in model.named_modules():
        if isinstance(weight := getattr(module, "weight", None), nn.Parameter):
            owners.setdefault(weight, []).append(name)
    return [names for names in owners.values() if len(names) > 1]


def _check_module(model: str, name: str, module: nn.Module, style: str, ranks: int) -> None:
    if style in (GRADIENT_SUM, EMBEDDING):
        return
    if not isinstance(module, nn.Linear):
        found = f"{model} has a {type(module).__name__} for {name}"
        raise UserError(f"tensor parallelism: {found}; only plain linear layers are divided. {_REMEDY}")
    width = module.in_features if style.startswith("rowwise") else module.out_features
    if width % ranks and style in ("colwise", "rowwise"):
        raise UserError(f"tensor parallelism: {name} of {model} is {width} wide, {_UNEVEN.format(ranks)}")


def _summed(gradient: Tensor, group: dist.ProcessGroup) -> Tensor:
    gradient = gradient.clone()
    dist.all_reduce(gradient, group=group)
    return gradient


@torch.no_grad()
def _copy_the_rest(model: nn.Module, mesh: DeviceMesh, device: torch.device) -> None:
    """Moves whole weights to the device, and gives every rank those of the first; accelerate moves the buffers."""
    first = dist.get_global_rank(mesh.get_group(), 0)
    for parameter in model.parameters():
        if not isinstance(parameter, DTensor):
            parameter.data = parameter.data.to(device)
            dist.broadcast(parameter.data, first, mesh.get_group())


class VocabularyPart:
    """The classes whose logits this rank computes: one of as many parts as there are ranks in ``mesh``.

    No rank sees the logits of another. What has to be known of all classes is one number or two for each position: the
    largest logit, the sum of exponentials and the logit of the label (Megatron-LM, section 3).
    """

    def __init__(self, num_classes: int, mesh: DeviceMesh) -> None:
        self._mesh, self.num_classes = mesh, num_classes
        size = -(-num_classes // mesh.size())  # as DTensor cuts: the last part may be smaller
        self._first = min(mesh.get_local_rank() * size, num_classes)
        self._end = min(self._first + size, num_classes)

    def own(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """(N,) of ``labels``: the number within this part, 0 where it is not in it; and whether it is in it."""
        held = (labels >= self._first) & (labels < self._end)
        return (labels - self._first).masked_fill(~held, 0), held

    def reduce(self, tensor: Tensor, op: Any = dist.ReduceOp.SUM) -> Tensor:
        """``tensor``, now that of all parts: their sum, or as ``op`` says."""
        dist.all_reduce(tensor, op=op, group=self._mesh.get_group())
        return tensor

    def log_softmax(self, logits: Tensor) -> Tensor:
        """(N, C) log p of this part's classes, in fp32 or fp64."""
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        logits = logits - self.reduce(logits.amax(1), dist.ReduceOp.MAX).unsqueeze(1)
        return logits.sub_(self.reduce(logits.exp().sum(1)).log().unsqueeze(1))

    def argmax(self, logits: Tensor) -> Tensor:
        """(N,) the most probable class of all; of equal ones the first."""
        best, index = logits.to(torch.promote_types(logits.dtype, torch.float32)).max(1)
        is_best = best == self.reduce(best.clone(), dist.ReduceOp.MAX)
        return self.reduce(torch.where(is_best, index + self._first, self.num_classes), dist.ReduceOp.MIN)

    def all_logits(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """(..., V) of all classes, on every rank, from ``hidden`` (..., H) and the whole, sharded ``weight``."""
        whole = DTensor.from_local(hidden, self._mesh, [Replicate()], run_check=False)
        logits: Any = F.linear(whole, weight, bias)
        return logits.full_tensor()
