"""What layers keep for backward: activation checkpointing, offload to the host, tiled MLPs; and torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Literal

from train import extras
from train.config import Config, option
from train.launch import Launch
from train.records import Run, UsageError, UserError

if TYPE_CHECKING:
    from torch import nn

    from train.model import ModelWithLoss
    from train.tasks import Task

of_layers = partial(option, needs="gradient_checkpointing")


@dataclass(frozen=True)
class Options:
    """What layers keep for backward, and compilation."""

    gradient_checkpointing: Literal["none", "full", "selective", "auto"] | bool = option(
        "none", "Recompute layers in backward; selective: not attention; auto: as fits.", everyday=True, alone="full"
    )
    gradient_checkpointing_every_n_layers: int = of_layers(1, "Checkpoint only every n-th layer.", ge=1)
    gradient_checkpointing_offload: bool = of_layers(False, "Keep inputs of checkpointed layers in pinned host memory.")
    tiled_mlp: bool = option(False, "Compute MLPs and norms some tokens at a time.")
    compile: bool = option(False, "Compile each layer by torch.compile: faster on a GPU after minutes of compiling.")

    def __post_init__(self) -> None:
        if isinstance(kind := self.gradient_checkpointing, bool):  # as recipes for transformers have it
            object.__setattr__(self, "gradient_checkpointing", "full" if kind else "none")


class Extra(extras.Extra):
    def check(self, config: Config, launch: Launch) -> None:
        own = config.of(Options)
        is_auto, every = own.gradient_checkpointing == "auto", own.gradient_checkpointing_every_n_layers
        case = f"gradient_checkpointing_every_n_layers: {every}", is_auto and every > 1, "it chooses that itself"
        extras.refuse("gradient_checkpointing: auto", case)
        if is_auto and "memory" in extras.missing():
            raise UsageError("gradient_checkpointing: auto needs train/memory/: give none, selective or full.")
        is_deepspeed = launch.engine == "deepspeed"
        whole = "it gives whole gradients, and the ranks hold only parts of them. Use FSDP2 or DDP, or no tiled_mlp"
        untried = "this was never tried. Use ddp.yaml or fsdp2.yaml of accelerate_configs/, or leave compile out"
        extras.refuse(
            f"{launch} in the launch file",
            ("tiled_mlp: true", own.tiled_mlp and (is_deepspeed or launch.tp_size > 1), whole),
            ("compile: true", own.compile and (is_deepspeed or launch.copies > 1), untried),
        )

    def change_model(self, run: Run, network: nn.Module, task: type[Task]) -> None:
        from train.extras.activations import recompute, tiling

        own = run.config.of(Options)
        every, offload = own.gradient_checkpointing_every_n_layers, own.gradient_checkpointing_offload
        if offload and (kind := run.accelerator.device.type) in ("cpu", "mps"):
            run.outputs.note(f"gradient_checkpointing_offload: does nothing on {kind.upper()}, which uses host memory")
        if own.tiled_mlp:
            run.outputs.note(tiling.tile_mlps(network))
        recompute.enable_checkpointing(network, str(own.gradient_checkpointing), every, offload)
        if own.compile and not run.is_planned:
            compile_layers(network)

    def memory_measure(self, run: Run, model: ModelWithLoss) -> tuple[str, Callable[[], bool]] | None:
        own = run.config.of(Options)
        if own.gradient_checkpointing == "full" and own.gradient_checkpointing_every_n_layers == 1:
            return None

        def checkpoint() -> bool:
            from train.extras.activations.recompute import enable_checkpointing

            with suppress(UserError):  # it does not work with this model
                enable_checkpointing(model.model, "full", offload=own.gradient_checkpointing_offload)
                if own.compile:
                    compile_layers(model.model)
                return True
            return False

        return "activation checkpointing is switched on", checkpoint


def compile_layers(model: nn.Module, backend: str | Callable[..., Any] = "inductor") -> int:
    """Compiles the repeated layers of ``model`` in place, when each is first called; returns how many there are.

    Everything around them stays as it is. So attention keeps its causal path (a model compiled whole builds a mask of
    length × length), weights keep their names, and equal layers share one compilation; the second length makes lengths
    symbolic. To be called after activation checkpointing was set up. Raises UserError where no such layers are known.
    """
    import torch
    from transformers.modeling_layers import GradientCheckpointingLayer

    from train.extras.activations.recompute import Recomputed, layers_of

    compiled = cache(partial(torch.compile, backend=backend))

    @torch.compiler.disable(reason="what breaks a graph inside a checkpoint would leave the whole layer uncompiled")
    def within(checkpoint: Any, function: Any, *inputs: Any, **options: Any) -> Any:
        return checkpoint(partial(compiled(function.func), *function.args, **function.keywords), *inputs, **options)

    names = set(getattr(model, "_no_split_modules", None) or ())
    known = layers_of(model)
    layers = [m for m in model.modules() if m in known or type(m).__name__ in names]
    if not layers:
        raise UserError("compile: this model is not of transformers, and has no nn.ModuleList of layers. Leave it out.")
    # From transformers 5.23 on a layer recomputes within its forward, before that around its call.
    is_within = "__call__" not in vars(GradientCheckpointingLayer)
    for layer in layers:
        layer.compile(backend=backend)
        if (is_within or isinstance(layer, Recomputed)) and getattr(layer, "gradient_checkpointing", False):
            vars(layer)["_gradient_checkpointing_func"] = partial(within, layer._gradient_checkpointing_func)
    return len(layers)
