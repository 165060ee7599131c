"""What each way to use several devices exchanges in an optimizer step, and what training state each device keeps.

Formulas for devices that this machine does not have. ``communication.py`` compares them with processes that run. They
cover DDP (arXiv 2006.15704), ZeRO (1910.02054), FSDP (2304.11277), tensor parallelism (Megatron-LM, 1909.08053),
ring attention (2310.01889) and Ulysses (2309.14509). Where an implementation differs from its paper, the formula
follows the implementation, and a comment says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from train.extras.meter.flops import count_flops

BUCKET_BYTES = 25 * 2**20
"""Of gradients, that DDP sends in one call."""
FP32_BYTES = 4
CUT_BY_COLUMNS = 5
"""Matrices of a Llama's layer whose output is split by columns: queries, keys, values, and two of the MLP."""
MOMENTS = 2
"""Numbers that AdamW keeps per parameter."""


@dataclass(frozen=True)
class Shape:
    """The sizes of a decoder that decide how much its devices exchange."""

    num_parameters: int
    """Tied embeddings are counted once."""
    layer_parameters: int
    """Of all layers together, which are sharded one by one; the rest is embedding, head and last norm."""
    multiplied_parameters: int
    """All except embeddings that are only looked up."""
    num_layers: int
    hidden_size: int
    num_heads: int
    num_key_value_heads: int
    head_size: int

    def flops_per_token(self, sequence_length: int) -> float:
        """Of forward and backward, by PaLM's formula 6·N + 12·L·H·Q·T, all weights trained.

        N: ``multiplied_parameters``; L: layers; H·Q: heads times the size of a head; T: ``sequence_length``, tokens
        that see each other.
        """
        width = self.num_heads * self.head_size
        return 6.0 * self.multiplied_parameters + 12.0 * self.num_layers * width * sequence_length


def shape_of(network: nn.Module) -> Shape:
    """The shape of a transformers decoder on any device, before it is sharded."""
    config: Any = network.config
    counted = count_flops(network, 192)
    classes = set(getattr(network, "_no_split_modules", None) or ())  # type: ignore
    layers = [module for module in network.modules() if type(module).__name__ in classes]
    return Shape(
        num_parameters=sum(p.numel() for p in network.parameters()),
        layer_parameters=sum(p.numel() for layer in layers for p in layer.parameters()),
        multiplied_parameters=round(counted.linear / 6) if counted else 0,
        num_layers=len(layers),
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        num_key_value_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        head_size=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
    )


@dataclass(frozen=True)
class Division:
    """How devices divide the work; there are as many as the product of the sizes."""

    engine: str = "ddp"
    """ddp, fsdp2, zero2 or zero3."""
    replicas: int = 1
    """Groups of devices that each hold all weights between them."""
    shards: int = 1
    """Devices of such a group that see different examples."""
    tensor: int = 1
    """Devices that share each matrix of the layers."""
    context: int = 1
    """Devices that share a sequence, also in attention: keys and values are exchanged."""
    sequence: int = 1
    """Devices that share a sequence outside attention and the heads inside it."""
    reshard_after_forward: bool = True
    offloads: bool = False
    """Whether parameters, gradients and optimizer state stay in the host's memory."""
    recovers: bool = False
    """Whether DDP's gradients are exchanged after the last backward, by the step that survives running out of memory
    (:mod:`train.extras.endurance.recovery`)."""

    @property
    def num_devices(self) -> int:
        return self.replicas * self.state_shards * self.tensor

    @property
    def state_shards(self) -> int:
        """Devices over which sharded tensors are spread; those that share a sequence take part."""
        return self.shards * self.context * self.sequence


@dataclass(frozen=True)
class Work:
    """What one device does in an optimizer step."""

    tokens: int
    """Of a micro-batch, that pass through this device's layers: its part of a shared sequence; with tensor parallelism
    all tokens of its group."""
    accumulation_steps: int = 1
    precision: str = "bf16"
    """no, fp16 or bf16. Weights, gradients and optimizer state are kept in fp32, except with ZeRO."""
    checkpointing: str = "none"
    """none, or full: each layer is computed again in backward."""

    @property
    def product_bytes(self) -> int:
        """Of one number in a matrix product: an activation or a gathered weight."""
        return FP32_BYTES if self.precision == "no" else 2


@dataclass(frozen=True)
class Collective:
    """The calls of one kind that each device makes in an optimizer step."""

    what: str
    operation: str
    """all_reduce, all_gather, reduce_scatter, all_to_all or send."""
    group: str
    """Which devices take part: a size of :class:`Division`, or state_shards."""
    group_size: int
    calls: int
    payload_bytes: int
    """Of all calls: the result of an all-gather; for any other operation what one device puts in."""
    phase: str
    """forward, backward or update."""
    overlaps: bool
    """Whether the device computes at the same time."""

    @property
    def sent_bytes(self) -> int:
        """What one device sends; gathers and reductions run as rings."""
        others = (self.group_size - 1) / self.group_size
        factor = {"all_reduce": 2 * others, "send": 1.0}.get(self.operation, others)
        return round(factor * self.payload_bytes)


def collectives(shape: Shape, division: Division, work: Work) -> list[Collective]:
    """What one device exchanges in an optimizer step, without a few bytes for counts and norms."""
    found = [*_of_weights(shape, division, work), *_of_activations(shape, division, work)]
    return [collective for collective in found if collective.group_size > 1 and collective.calls]


def sent_bytes(shape: Shape, division: Division, work: Work) -> int:
    """What one device sends in an optimizer step."""
    return sum(collective.sent_bytes for collective in collectives(shape, division, work))


def _parameters(shape: Shape, division: Division) -> tuple[int, int]:
    """(all, in layers) parameters of a device's group; tensor parallelism divides layers, all except the norms."""
    layers = shape.layer_parameters // division.tensor
    return shape.num_parameters - shape.layer_parameters + layers, layers


def _of_weights(shape: Shape, division: Division, work: Work) -> Iterator[Collective]:
    everything, layers = _parameters(shape, division)
    windows, units, each = work.accumulation_steps, shape.num_layers + 1, work.product_bytes
    replicas, shards = ("replicas", division.replicas), ("state_shards", division.state_shards)
    if division.engine == "ddp":
        size = everything * FP32_BYTES
        calls = -(-size // BUCKET_BYTES)
        yield Collective("gradients", "all_reduce", *replicas, calls, size, "backward", not division.recovers)
        return
    calls = windows * units
    if division.engine == "zero2":
        size = windows * everything * each
        yield Collective("gradients", "reduce_scatter", *shards, calls, size, "backward", True)
        yield Collective("weights", "all_gather", *shards, 1, everything * each, "update", False)
        return
    size = windows * everything * each
    yield Collective("weights", "all_gather", *shards, calls, size, "forward", True)
    if division.engine == "zero3":
        yield Collective("weights", "all_gather", *shards, calls, size, "backward", True)
        yield Collective("gradients", "reduce_scatter", *shards, calls, size, "backward", True)
        return
    if division.reshard_after_forward:  # weights outside the layers stay gathered from forward to backward
        size = windows * layers * each
        yield Collective("weights", "all_gather", *shards, calls - windows, size, "backward", True)
    size = windows * everything * FP32_BYTES  # this template's policy: gradients are summed in fp32
    yield Collective("gradients", "reduce_scatter", *shards, calls, size, "backward", True)
    part = size // division.state_shards
    yield Collective("gradients", "all_reduce", *replicas, calls, part, "backward", True)


def _of_activations(shape: Shape, division: Division, work: Work) -> Iterator[Collective]:
    """Exchanges that the next operation waits for."""
    calls, each = work.accumulation_steps * shape.num_layers, work.product_bytes
    passes = (("forward", 1), ("backward", 2 if work.checkpointing == "full" else 1))

    # As this template divides a Llama: forward sums the outputs of attention and of the MLP; backward sums the
    # gradients of the inputs of each matrix cut by columns, one by one and in fp32. Recomputing a layer ends before its
    # last sum.
    group, size = ("tensor", division.tensor), work.tokens * shape.hidden_size
    again = calls if work.checkpointing == "full" else 0
    yield Collective("activations", "all_reduce", *group, 2 * calls, 2 * calls * each * size, "forward", False)
    number = CUT_BY_COLUMNS * calls
    yield Collective("their gradients", "all_reduce", *group, number, number * FP32_BYTES * size, "backward", False)
    yield Collective("activations", "all_reduce", *group, again, again * each * size, "backward", False)

    # As torch does it with accelerate's cp_comm_strategy allgather: keys and values are gathered in forward and again
    # in backward; their gradients travel around the ring in fp32, one hop for each device.
    group, mine = ("context", division.context), 2 * work.tokens * shape.num_key_value_heads * shape.head_size
    for phase, times in passes:
        size = times * calls * mine * each * division.context
        yield Collective("keys and values", "all_gather", *group, times * calls, size, phase, False)
    hops = calls * division.context
    yield Collective("their gradients", "send", *group, hops, hops * mine * FP32_BYTES, "backward", False)

    # Queries, keys and values change from a part of the tokens with all heads to all tokens with a part of the heads,
    # and the output back. With fewer key heads than devices, each is sent to several.
    group = ("sequence", division.sequence)
    heads = 2 * shape.num_heads + 2 * max(shape.num_key_value_heads, division.sequence)
    for phase, times in passes:
        size = times * calls * work.tokens * heads * shape.head_size * each
        yield Collective("heads", "all_to_all", *group, 4 * times * calls, size, phase, False)


@dataclass(frozen=True)
class State:
    """Bytes that one device keeps from step to step, with AdamW."""

    parameters: int
    gradients: int
    """From the first backward to the update."""
    optimizer_state: int
    buckets: int = 0
    """DDP's copies of the gradients."""
    host: int = 0
    """In the host's memory, for each device."""

    @property
    def total(self) -> int:
        """On the device."""
        return self.parameters + self.gradients + self.optimizer_state + self.buckets


def state_of(shape: Shape, division: Division, work: Work) -> State:
    """What one device keeps; :mod:`train.memory.predict` also counts the weights gathered for one layer at a time."""
    everything, _ = _parameters(shape, division)
    part = everything // division.state_shards
    if division.engine == "ddp":
        size = everything * FP32_BYTES
        return State(size, size, MOMENTS * size, buckets=size if division.replicas > 1 else 0)
    if division.engine == "fsdp2":
        size = part * FP32_BYTES
        if division.offloads:
            return State(0, 0, 0, host=(2 + MOMENTS) * size)
        return State(size, size, MOMENTS * size)
    each = work.product_bytes
    copies = MOMENTS + (work.precision != "no")  # fp32 weights in addition to those in half precision
    weights = (everything if division.engine == "zero2" else part) * each
    state = copies * part * FP32_BYTES
    if division.offloads:  # DeepSpeed's offload_optimizer and, in stage 3, offload_param
        kept = weights if division.engine == "zero2" else 0
        return State(kept, 0, 0, host=state + part * each + weights - kept)
    return State(weights, part * each, state)


def host_link_bytes(shape: Shape, division: Division, work: Work) -> tuple[int, int]:
    """(to the device, from the device) between it and its host in an optimizer step of FSDP2 with offload.

    The device's part of the weights is copied to it before each all-gather, in fp32; its part of the gradients is
    copied back.
    """
    if not division.offloads:
        return 0, 0
    gathered = [c for c in _of_weights(shape, division, work) if c.operation == "all_gather"]
    weights = sum(c.payload_bytes for c in gathered) // work.product_bytes * FP32_BYTES // division.state_shards
    gradients = work.accumulation_steps * shape.num_parameters * FP32_BYTES // division.state_shards
    return weights, gradients
