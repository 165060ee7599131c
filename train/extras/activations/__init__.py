"""What layers keep for backward: activation checkpointing, offload to the host, tiled MLPs; and torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Literal

from train import extras
from train.config import Config, option
from train.launch import Launch
from train.records import Run, UsageError, UserError

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
            ("compile: true", own.compile and (is_deepspeed or launch.mp_size > 1), untried),
        )

    def change_model(self, run: Run, network: extras.Module, task: type[extras.Task]) -> None:
        from train.extras.activations import recompute, tiling

        own = run.config.of(Options)
        every, offload = own.gradient_checkpointing_every_n_layers, own.gradient_checkpointing_offload
        if offload and (kind := run.accelerator.device.type) in ("cpu", "mps"):
            run.outputs.note(f"gradient_checkpointing_offload: does nothing on {kind.upper()}, which uses host memory")
        if own.tiled_mlp:
            run.outputs.note(tiling.tile_mlps(network))
        recompute.enable_checkpointing(network, str(own.gradient_checkpointing), every, offload)
        if own.compile and not run.is_planned:
            recompute.compile_layers(network)

    def memory_measure(self, run: Run, model: extras.ModelWithLoss) -> tuple[str, Callable[[], bool]] | None:
        own = run.config.of(Options)
        if own.gradient_checkpointing == "full" and own.gradient_checkpointing_every_n_layers == 1:
            return None

        def checkpoint() -> bool:
            from train.extras.activations import recompute

            with suppress(UserError):  # it does not work with this model
                recompute.enable_checkpointing(model.model, "full", offload=own.gradient_checkpointing_offload)
                if own.compile:
                    recompute.compile_layers(model.model)
                return True
            return False

        return "activation checkpointing is switched on", checkpoint
