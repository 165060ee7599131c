"""Formulas of what devices exchange and hold, against processes that train, and against cases done by hand."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from support import takes_minutes

from scripts.benchmarks import communication, exchanges, scaling_tables
from scripts.benchmarks.cluster import Cluster, seconds_of, step_time
from scripts.benchmarks.scaling import (
    Collective,
    Division,
    Shape,
    Work,
    collectives,
    host_link_bytes,
    sent_bytes,
    state_of,
)

LAYERS, HIDDEN = 10, 100
SHAPE = Shape(
    num_parameters=1_000_000,
    layer_parameters=800_000,
    multiplied_parameters=900_000,
    num_layers=LAYERS,
    hidden_size=HIDDEN,
    num_heads=10,
    num_key_value_heads=2,
    head_size=10,
)
WORK = Work(tokens=1000, precision="bf16")


def payloads(division: Division, work: Work = WORK) -> dict[str, int]:
    found: dict[str, int] = {}
    for collective in collectives(SHAPE, division, work):
        found[collective.operation] = found.get(collective.operation, 0) + collective.payload_bytes
    return found


@pytest.mark.slow
@pytest.mark.distributed
def test_two_processes_exchange_and_hold_what_the_formulas_say() -> None:
    ddp, fsdp2 = Division("ddp", replicas=2), Division("fsdp2", shards=2)
    chosen = [
        exchanges.Case(ddp, 2),
        exchanges.Case(replace(ddp, recovers=True), 2),
        exchanges.Case(fsdp2, 2, "full"),
        exchanges.Case(replace(fsdp2, reshard_after_forward=False), precision="bf16"),
    ]
    shape, found = communication.launch(chosen, 2)
    for case, measured in zip(chosen, found, strict=True):
        expected: dict[str, int] = {}
        for collective in collectives(shape, case.division, case.work):
            expected[collective.operation] = expected.get(collective.operation, 0) + collective.payload_bytes
        for operation, num_bytes in expected.items():
            assert measured.payload_bytes[operation] == pytest.approx(num_bytes, rel=0.01), (case.title, operation)
        others = sum(n for operation, n in measured.payload_bytes.items() if operation not in expected)
        assert others < 1000, case.title  # counts, norms, buffers; a term missing from a formula would show here
        state = state_of(shape, case.division, case.work)
        held = measured.state_bytes
        assert held["parameters"] == pytest.approx(state.parameters, rel=0.01), case.title
        assert held["gradients"] == pytest.approx(state.gradients, rel=0.01), case.title
        assert held["optimizer state"] == pytest.approx(state.optimizer_state, rel=0.01), case.title
        assert held.get("workspace", 0) == pytest.approx(state.buckets, rel=0.01), case.title
        if measured.wire_bytes is not None:  # gloo's reduce-scatter is an all-reduce
            row = communication.row_of(case, 2, shape, measured)
            assert abs(row["sent_error_percent"]) < 1, case.title


@pytest.mark.slow
@takes_minutes
def test_tables_of_the_page_are_those_of_the_script() -> None:
    page = scaling_tables.PAGE.read_text(encoding="utf-8")
    shapes = {model: scaling_tables.shape(model) for model in scaling_tables.MODELS}
    assert {model: round(shape.num_parameters / 1e9, 1) for model, shape in shapes.items()} == {
        "1B": 1.2,
        "8B": 8.0,
        "70B": 70.6,
    }
    assert scaling_tables.rendered(page, shapes) == page  # else run scripts/benchmarks/scaling_tables.py --write
    memory = next(line for line in page.splitlines() if line.startswith("| 8B | 131,072 |") and "**" in line)
    first, *_, last = (cell.strip("* ") for cell in memory.split(" | ")[3:])
    said = " ".join(page.split())
    assert f"take {first} GiB on each of 8, which is too much, and still {last.rstrip('* |')} on each of 1,024" in said
    for row in scaling_tables.hiding_table(shapes)[2:]:  # no length that leaves no room
        name, *cells = (cell.strip() for cell in row.strip("| ").split(" | "))
        for cell, (shape, size) in zip(cells, itertools.product(shapes.values(), scaling_tables.SIZES), strict=True):
            if cell != "–":
                division = scaling_tables.ways(size)[name]
                work, _ = scaling_tables.took(shape, division, int(cell.strip("> ").replace(",", "")))
                assert scaling_tables.has_room(shape, division, work), (name, size, cell)
    assert page.count("<!-- table: ") == 6


def test_flops_per_token_of_gpt3_shape() -> None:
    # 175e9 parameters, 96 layers, hidden 12,288, 2,048 tokens: 6N = 1.05e12, attention 12·96·12288·2048 = 2.8991e10
    gpt3 = replace(SHAPE, multiplied_parameters=175_000_000_000, num_layers=96, num_heads=96, head_size=128)
    assert gpt3.flops_per_token(2048) == 1.05e12 + 28_991_029_248


def test_ddp_sends_each_gradient_twice_and_accumulation_sends_nothing() -> None:
    division = Division("ddp", replicas=4)
    assert payloads(division) == {"all_reduce": 4_000_000}
    assert sent_bytes(SHAPE, division, WORK) == 2 * 3 / 4 * 4_000_000
    assert payloads(division, replace(WORK, accumulation_steps=8)) == payloads(division)


def test_fsdp2_gathers_layers_twice_and_the_rest_once_in_each_micro_batch() -> None:
    division, window = Division("fsdp2", shards=4), replace(WORK, accumulation_steps=3)
    assert payloads(division, window) == {"all_gather": 3 * (2 * 1_800_000), "reduce_scatter": 3 * 4_000_000}
    kept = replace(division, reshard_after_forward=False)
    assert payloads(kept) == {"all_gather": 2_000_000, "reduce_scatter": 4_000_000}
    assert payloads(division, replace(WORK, precision="no"))["all_gather"] == 2 * payloads(division)["all_gather"]


def test_hybrid_sharding_adds_an_all_reduce_of_each_part() -> None:
    division = Division("fsdp2", replicas=8, shards=4)
    assert payloads(division) == payloads(replace(division, replicas=1)) | {"all_reduce": 1_000_000}
    assert state_of(SHAPE, division, WORK) == state_of(SHAPE, replace(division, replicas=1), WORK)


def test_zero_is_the_account_of_its_paper() -> None:
    """2 + 2 + 12 bytes per parameter; an exchange of 2 Ψ numbers in stage 2, and of 3 Ψ in stage 3."""
    two, three = Division("zero2", shards=64), Division("zero3", shards=64)
    numbers = 1_000_000
    assert sum(payloads(two).values()) == 2 * numbers * 2
    assert sum(payloads(three).values()) == 3 * numbers * 2
    assert state_of(SHAPE, two, WORK).total == pytest.approx(2 * numbers + 14 * numbers / 64)
    assert state_of(SHAPE, three, WORK).total == pytest.approx(16 * numbers / 64)


def test_sharing_a_sequence_exchanges_activations() -> None:
    context = [c for c in collectives(SHAPE, Division("fsdp2", context=4), WORK) if c.group == "context"]
    mine = 2 * 1000 * 2 * 10  # keys and values of 1,000 tokens
    assert {(c.operation, c.phase): c.payload_bytes for c in context} == {
        ("all_gather", "forward"): LAYERS * 4 * mine * 2,
        ("all_gather", "backward"): LAYERS * 4 * mine * 2,
        ("send", "backward"): LAYERS * 4 * mine * 4,
    }
    ulysses = [c for c in collectives(SHAPE, Division("zero3", sequence=2), WORK) if c.group == "sequence"]
    assert [c.payload_bytes for c in ulysses] == 2 * [LAYERS * 1000 * (2 * 10 + 2 * 2) * 10 * 2]
    again = collectives(SHAPE, Division("zero3", sequence=2), replace(WORK, checkpointing="full"))
    assert sum(c.payload_bytes for c in again if c.group == "sequence") == 1.5 * sum(c.payload_bytes for c in ulysses)


def test_tensor_parallelism_sums_activations_and_divides_the_state() -> None:
    division, size = Division("ddp", tensor=2), 1000 * HIDDEN
    found = {c.phase: c.payload_bytes for c in collectives(SHAPE, division, WORK)}
    assert found == {"forward": 2 * LAYERS * 2 * size, "backward": 5 * LAYERS * 4 * size}
    again = payloads(division, replace(WORK, checkpointing="full"))["all_reduce"]
    assert again - sum(found.values()) == LAYERS * 2 * size
    assert state_of(SHAPE, division, WORK).parameters == 4 * (800_000 // 2 + 200_000)


def test_offload_leaves_nothing_on_the_device_and_moves_each_part() -> None:
    division = Division("fsdp2", shards=4, offloads=True)
    state = state_of(SHAPE, division, WORK)
    assert (state.total, state.host) == (0, 16 * 1_000_000 // 4)
    assert host_link_bytes(SHAPE, division, WORK) == (1_800_000 * 4 // 4, 1_000_000 * 4 // 4)
    assert host_link_bytes(SHAPE, replace(division, offloads=False), WORK) == (0, 0)


def reduction(group: str, size: int, num_bytes: int = 8_000_000_000) -> Collective:
    return Collective("gradients", "all_reduce", group, size, 1, num_bytes, "backward", True)


def test_a_ring_is_as_fast_as_its_slowest_link() -> None:
    cluster = Cluster(link_seconds=0, network_seconds=0)
    inside = seconds_of(reduction("replicas", 8), Division(replicas=8), cluster)
    assert inside == pytest.approx(2 * 7 / 8 * 8e9 / 450e9)
    # eight rings leave a node through eight adapters
    across = seconds_of(reduction("replicas", 16), Division(replicas=16), cluster)
    assert across == pytest.approx(2 * 15 / 16 * 8e9 / 400e9)
    # one device of each node: a single adapter for each ring
    hybrid = Division("fsdp2", replicas=2, shards=8)
    assert seconds_of(reduction("replicas", 2), hybrid, cluster) == pytest.approx(8e9 / 50e9)


def test_what_overlaps_is_waited_for_only_where_computing_is_shorter() -> None:
    cluster, work = Cluster(), replace(WORK, tokens=10**6)
    alone = step_time(SHAPE, Division("fsdp2"), work, 4096, cluster)
    assert (alone.exchange, alone.waiting, alone.slowdown) == (0, 0, 1)
    hidden = step_time(SHAPE, Division("fsdp2", shards=8), work, 4096, cluster)
    assert hidden.exchange > 0 and hidden.waiting == 0
    short = step_time(SHAPE, Division("fsdp2", shards=8), replace(WORK, tokens=1), 4096, cluster)
    assert short.waiting == pytest.approx(short.exchange, rel=0.01) and short.slowdown > 10
    ddp = Division("ddp", replicas=8)
    assert step_time(SHAPE, ddp, work, 4096, cluster).waiting == 0
    recovering = step_time(SHAPE, replace(ddp, recovers=True), work, 4096, cluster)
    assert recovering.waiting == recovering.exchange > 0
    waited = step_time(SHAPE, Division("ddp", tensor=8), work, 4096, cluster)
    head = 6 * 100_000 * 10**6 * 7 / 8 / (cluster.mfu * cluster.flops_per_second)  # computed by each of them
    assert waited.waiting == pytest.approx(waited.exchange + head)
