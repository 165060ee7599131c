"""What the gradient tells while a step has it: its health, layer by layer, and its noise scale."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from train import extras
from train.config import Config, option
from train.launch import Launch
from train.records import MicroBatch, Parts, Run, arithmetic_of


@dataclass(frozen=True)
class Options:
    """What the gradient tells."""

    gradient_health: bool = option(False, "Measure gradients and activations by layer, and name problems.")
    gradient_health_every_steps: int = option(50, "Every n steps, and at 1, 2, 4, ...", ge=1, needs="gradient_health")
    gradient_noise_scale: bool = option(False, "Log up to which size larger batches pay off; needs accumulation.")


class Extra(extras.Extra):
    _health: Any = None  # :class:`train.extras.gradients.health.Health`, where asked for
    _noise: Any = None  # :class:`train.extras.gradients.noise.NoiseScale`, likewise

    def check(self, config: Config, launch: Launch) -> None:
        own, in_backward = config.of(Options), bool(config.get("optimizer_in_backward"))
        no_whole = ("optimizer_in_backward", in_backward, "no whole gradient exists then. Leave one of them out")
        if own.gradient_health:
            hidden = launch.engine == "deepspeed" or launch.tp_size > 1
            needed = "use ddp.yaml or fsdp2.yaml: it needs their gradients"
            extras.refuse("gradient_health", (f"{launch} in the launch file", hidden, needed), no_whole)
        if own.gradient_noise_scale:
            is_auto = config.optimization.micro_batch_size == "auto"
            is_whole = launch.engine == "ddp" and launch.mp_size == 1
            accumulated = arithmetic_of(config, launch.world_size).accumulation_steps
            is_one = accumulated == 1 and not config.get("max_tokens_per_micro_batch")
            two = "it compares the first micro-batch with the whole step. Give gradient_accumulation_steps: 2 or more"
            extras.refuse(
                "gradient_noise_scale",
                (f"{launch} in the launch file", not is_whole, "it needs whole gradients. Use ddp.yaml or one process"),
                no_whole,
                ("micro_batch_size: auto", is_auto, "that may choose one micro-batch per step. Give a number"),
                ("one micro-batch per step", is_one, two),
            )

    def before_training(self, run: Run, parts: Parts) -> None:  # after the rehearsal, which does not count
        if (own := run.config.of(Options)).gradient_health:
            from train.extras.gradients.health import Health

            self._health = Health(run, parts.state.model, own.gradient_health_every_steps)
        if own.gradient_noise_scale:
            from train.extras.gradients.noise import NoiseScale

            self._noise = NoiseScale(parts.model, parts.batches.arithmetic.dp_size)

    def computing(self, phase: str, micro_batches: Sequence[MicroBatch], step: int = 0) -> AbstractContextManager[None]:
        if step and self._noise is not None:
            self._noise.begin(micro_batches)
        return self._health.measuring(step) if self._health and self._health.is_due(step) else nullcontext()

    def mark(self, phase: str) -> None:
        if phase == "clip" and self._health is not None:  # the gradient is whole, and still has its loss scale
            self._health.see_gradient()
        if self._noise is not None:
            self._noise.mark(phase)

    def measured(self, run: Run, values: dict[str, Any]) -> None:
        if self._noise is not None:
            values["gradient_noise_scale_examples"] = self._noise.examples()
