"""How long the exchanges of :mod:`scripts.benchmarks.scaling` take on a cluster, and how much of that a step waits for.

An estimate with round figures, for choosing between ways to divide the work. It was not compared with a real cluster.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from scripts.benchmarks.scaling import Collective, Division, Shape, Work, collectives, host_link_bytes

ADAMW_BYTES = 28
"""Read and written per parameter by an update: weight, gradient and two averages; all but the gradient again."""


@dataclass(frozen=True)
class Cluster:
    """Nodes of 8 H100 SXM; rates are of one device and one direction."""

    devices_per_node: int = 8
    link_bytes_per_second: float = 450e9
    """NVLink, fourth generation."""
    network_bytes_per_second: float = 50e9
    """A 400 Gb/s adapter for each device."""
    host_bytes_per_second: float = 50e9
    """What transfers reach of the 64 GB/s of PCI Express 5.0 × 16."""
    host_memory_bytes_per_second: float = 25e9
    """One process's share of the host's memory bandwidth, for updates of offloaded weights."""
    link_seconds: float = 3.4e-6
    """From one device to the next. This and network_seconds are NCCL's own estimates for rings
    (its src/graph/tuning.cc)."""
    network_seconds: float = 14e-6
    flops_per_second: float = 989.4e12
    """bf16, dense."""
    mfu: float = 0.4
    """Share of that which the arithmetic of the model alone reaches, recomputation not counted."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of an optimizer step on one device."""

    compute: float
    exchange: float
    """All exchanges one after the other, including those with the host's memory."""
    waiting: float
    """The part that computation does not hide, and updates by the host."""

    @property
    def slowdown(self) -> float:
        """Against a step that only computes."""
        return 1 + self.waiting / self.compute


def step_time(shape: Shape, division: Division, work: Work, sequence_length: int, cluster: Cluster) -> StepTime:
    """Seconds of an optimizer step.

    The computation of forward or of backward hides the exchanges of that phase which overlap; DDP's gradients overlap
    with the backward of the last micro-batch alone.

    Args:
        sequence_length: tokens of a whole sequence, on all devices that share it.
    """
    tokens = work.tokens * work.accumulation_steps / division.tensor
    rate = cluster.mfu * cluster.flops_per_second
    compute = tokens * shape.flops_per_token(sequence_length) / rate
    forward = compute / (4 if work.checkpointing == "full" else 3)
    room = {"forward": forward, "backward": compute - forward, "update": 0.0}
    if division.engine == "ddp":
        room["backward"] /= work.accumulation_steps
    exchanges = collectives(shape, division, work)
    waiting = sum(seconds_of(c, division, cluster) for c in exchanges if not c.overlaps)
    head = 6.0 * (shape.multiplied_parameters - shape.layer_parameters)  # computed by each of the devices that share
    waiting += tokens * (division.tensor - 1) * head / rate
    for phase, seconds in room.items():
        waiting += max(0.0, _sum(exchanges, phase, division, cluster) - seconds)
    to_device, to_host = host_link_bytes(shape, division, work)
    copying = (to_device + to_host) / cluster.host_bytes_per_second
    exchange = sum(seconds_of(c, division, cluster) for c in exchanges) + copying
    waiting += max(0.0, copying - compute)
    if division.offloads:
        traffic = ADAMW_BYTES * shape.num_parameters / division.state_shards
        waiting += traffic / cluster.host_memory_bytes_per_second
    return StepTime(compute, exchange, waiting)


def _sum(exchanges: Iterable[Collective], phase: str, division: Division, cluster: Cluster) -> float:
    return sum(seconds_of(c, division, cluster) for c in exchanges if c.overlaps and c.phase == phase)


def seconds_of(collective: Collective, division: Division, cluster: Cluster) -> float:
    """Seconds of all calls of a collective: bytes over the slowest link on the way, and the latency of each hop."""
    size, per_node = collective.group_size, members_per_node(collective.group, division, cluster)
    nodes = math.ceil(size / per_node)
    sent = collective.sent_bytes
    in_node = sent / cluster.link_bytes_per_second if per_node > 1 else 0.0
    if nodes == 1:
        out_of_node = 0.0
    elif collective.operation == "all_to_all":
        out_of_node = sent * (size - per_node) / (size - 1) / cluster.network_bytes_per_second
    elif collective.operation == "send":
        out_of_node = sent / cluster.network_bytes_per_second
    else:  # as many rings as members in a node, each leaving it through another adapter
        out_of_node = sent / (per_node * cluster.network_bytes_per_second)
    return max(in_node, out_of_node) + collective.calls * _latency(collective.operation, size, nodes, cluster)


def members_per_node(group: str, division: Division, cluster: Cluster) -> int:
    """Devices of one node that belong to the same group.

    As accelerate places them, neighbours share tensors, then sequences, then shards, then replicas.
    """
    shared = division.context * division.sequence
    inner, size = {
        "tensor": (1, division.tensor),
        "context": (division.tensor, division.context),
        "sequence": (division.tensor, division.sequence),
        "state_shards": (division.tensor, division.shards * shared),
        "replicas": (division.tensor * shared * division.shards, division.replicas),
    }[group]
    return max(1, min(size, cluster.devices_per_node // inner))


def _latency(operation: str, size: int, nodes: int, cluster: Cluster) -> float:
    crossings = nodes if nodes > 1 else 0
    if operation in ("send", "all_to_all"):
        return cluster.network_seconds if crossings else cluster.link_seconds
    ring = crossings * cluster.network_seconds + max(0, size - 1 - crossings) * cluster.link_seconds
    if operation != "all_reduce":
        return ring
    tree = (size // nodes - 1) * cluster.link_seconds + math.log2(nodes) * cluster.network_seconds
    return 2 * min(ring, tree)
