"""Model and optimizer of a job, built as a run builds them: on fake tensors to predict, on real ones to measure."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from train.config import Architecture, Config
from train.memory.predict import Job

if TYPE_CHECKING:
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer
    from torch import nn

    from train.loss import ModelWithLoss


class _Tokenizer:
    """The part of a tokenizer that the builder uses."""

    def __init__(self, job: Job) -> None:
        self._size = job.vocab_size
        self.bos_token_id, self.eos_token_id, self.pad_token_id = job.special_tokens

    def __len__(self) -> int:
        return self._size


def accelerator_of(job: Job, config: Config) -> Accelerator:
    """The accelerator of rank 0 of the job's ranks; those of predictions before it are forgotten."""
    import torch
    from accelerate.state import AcceleratorState, GradientState

    from train.launch import Launch
    from train.memory import ranks
    from train.runtime import make_accelerator, meet_over_gloo, resolve_precision

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    device_type = job.target.device_type
    ranks.leave()  # those of the prediction before
    precision, _ = resolve_precision(config.optimization.mixed_precision or "no", torch.device(device_type))
    shards = ranks.shards_weights(job.sharding)
    ranks.join(job.world_size, shards, device_type, precision, offloads=job.sharding == "fsdp2_offload")
    launch = Launch(world_size=job.world_size if shards else 1, engine="fsdp2" if shards else "ddp")
    if device_type == "cpu":
        meet_over_gloo(launch)
    return make_accelerator(launch, precision, accumulation_steps=1, on_cpu=device_type == "cpu")


def build(
    job: Job,
    architecture: Architecture,
    config: Config,
    accelerator: Accelerator,
    initialised: bool = False,
    divide: Callable[[ModelWithLoss], None] | None = None,
) -> tuple[nn.Module, AcceleratedOptimizer, nn.Module]:
    """Prepared model, prepared optimizer, and the network inside the model.

    Args:
        initialised: with real weights; fake ones are not initialised, because some initialisations repeat until
            the data meets a condition.
        divide: called before the optimizer is built, such as to leave a rank its part of the weights.
    """
    from torch.utils._python_dispatch import _disable_current_modes
    from transformers.initialization import no_init_weights

    from train.cross_entropy import Objective
    from train.loss import ModelWithLoss, choose_loss, place_of
    from train.memory.eight_bit import EightBitState
    from train.memory.fakes import fake_adapters
    from train.model import build_model
    from train.optim import build_optimizer, parameter_groups
    from train.runtime import shard_by_layer

    labels = [str(number) for number in range(job.num_labels)]
    tokenizer: Any = _Tokenizer(job)
    with ExitStack() as stack:
        if not initialised:
            stack.enter_context(accelerator.device)
            stack.enter_context(no_init_weights())
            stack.enter_context(fake_adapters(architecture.adapter))
        options: dict[str, Any] = {"packing": config.data.packing, "precision": accelerator.mixed_precision}
        network = build_model(architecture, job.auto_class, tokenizer, job.length, labels, weights=False, **options)
        if hasattr(network, "tie_weights"):
            network.tie_weights()  # pyright: ignore - left out with the initialisation
    with _disable_current_modes():  # what it tries does not belong to the step
        optim = config.optimization
        objective = Objective(optim.label_smoothing, optim.z_loss)
        place = place_of(network, accelerator.device, accelerator.mixed_precision)
        # to plan for a package that is asked for by name, it need not be installed
        loss = choose_loss(optim.loss, network, place, objective, installed=None if initialised else True)
    with_loss = ModelWithLoss(network, loss, objective)
    if divide is not None:
        divide(with_loss)
    shard_by_layer(accelerator, network)
    if config.optimization.optimizer == "adamw_8bit" and not initialised:
        optimizer = EightBitState(parameter_groups(network, config.optimization), {})
    else:
        optimizer = build_optimizer(network, config.optimization, accelerator.device)
    model, optimizer = accelerator.prepare(
        with_loss,
        optimizer,
        device_placement=[initialised, initialised],
    )
    return model, optimizer, network
