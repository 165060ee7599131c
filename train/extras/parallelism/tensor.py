"""Tensor parallelism: each layer's weights, and the work on them, divided among ranks that see the same examples.

A model of transformers says by its plan which of its linear layers are cut by columns, and which of the following ones
by rows, so that a block of layers needs one sum over the ranks for its output and one for its gradient (Megatron-LM,
arXiv 1909.08053). Every rank holds the rest whole: embeddings, output head and norms.
"""

import re
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.parallel.style import ParallelStyle

from train.model import ModelWithLoss
from train.records import Run, UsageError
from train.step import Engine

GRADIENT_SUM = "replicated_with_grad_allreduce"
STYLES: dict[str, Callable[[], ParallelStyle]] = {  # names of transformers' plans, as styles of torch
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "colwise_gather_output": partial(ColwiseParallel, output_layouts=Replicate()),
    "rowwise_split_input": partial(RowwiseParallel, input_layouts=Replicate()),
}
_REMEDY = "Use a model of the Llama, Qwen, Mistral or GPT-NeoX kind, or accelerate_configs/fsdp2.yaml."
_UNEVEN = "which {} ranks cannot share evenly. Set parallelism_config_tp_size in the launch file to a divisor of it."


class TensorParallel(Engine):
    """The step of ranks that share the weights: all compute the same loss, and each the gradient of its part."""

    @staticmethod
    def prepare(run: Run, with_loss: ModelWithLoss) -> None:
        """Leaves this rank its part of the weights, on its device, and has the model work with it.

        To be called before the optimizer is built. The model is the same on all ranks; whole weights become those of
        the first. Raises UsageError if the model has no plan, or cannot be divided among so many ranks.
        """
        model, mesh = with_loss.model, cast("Any", run.accelerator.torch_device_mesh)["tp"]
        group = mesh.get_group()
        for name, style in plan_of(model, mesh.size()).items():
            module = model.get_submodule(name)
            if style == GRADIENT_SUM:  # every rank has the whole weight, but sees its own heads alone
                for parameter in filter(lambda p: p.requires_grad, module.parameters()):
                    parameter.register_hook(partial(_summed, group=group))
            else:
                parallelize_module(module, mesh, STYLES[style]())
        for parameter in model.parameters():
            if not isinstance(parameter, DTensor):  # whole; accelerate moves the buffers
                parameter.data = parameter.data.to(run.accelerator.device)
                dist.broadcast(parameter.data, group=group, group_src=0)
        with_loss.tp_size = mesh.size()  # type: ignore - accelerate asks for it

    @property
    def loss_factor(self) -> float:
        """Undoes averages over micro-batches and data parallelism; ranks with the same examples average nothing."""
        return super().loss_factor / self.mp_size


def plan_of(model: Any, ranks: int) -> dict[str, str]:
    """The style of each module of ``model`` that is divided, by the module's name; raises UsageError as above."""
    name = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    written: dict[str, str] = getattr(model, "tp_plan", None) or {}
    plan, modules = {}, dict(model.named_modules())
    ends = [model.get_input_embeddings(), model.get_output_embeddings()] if written else []
    for key in [*modules, *dict(model.named_parameters())]:
        style, module = written.get(re.sub(r"\.\d+(?=\.|$)", ".*", key)), modules.get(key)
        if style is None or (module is not None and module in ends):
            continue
        plan[key] = style
        if style in STYLES and isinstance(module, nn.Linear):
            width = module.in_features if style.startswith("rowwise") else module.out_features
            if width % ranks and style in ("colwise", "rowwise"):
                raise UsageError(f"tensor parallelism: {key} of {name} is {width} wide, {_UNEVEN.format(ranks)}")
        elif style != GRADIENT_SUM or module is None:
            raise UsageError(f"tensor parallelism: {name} plans {style!r} for {key}: not supported. {_REMEDY}")
    if not plan:
        raise UsageError(f"tensor parallelism: {name} has no plan of how to divide its layers. {_REMEDY}")
    if any(style == "colwise" and "att" in key for key, style in plan.items()):
        config = model.config.get_text_config()
        for field in ("num_attention_heads", "num_key_value_heads"):
            if isinstance(heads := getattr(config, field, None), int) and heads % ranks:
                raise UsageError(f"tensor parallelism: {name} has {heads} {field}, {_UNEVEN.format(ranks)}")
    return plan


def _summed(gradient: Tensor, group: dist.ProcessGroup) -> Tensor:
    gradient = gradient.clone()
    dist.all_reduce(gradient, group=group)
    return gradient
