"""What the tracker counts of single storages, by value."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from train.extras.meter.tracker import (
    ACTIVATIONS,
    GRADIENTS,
    KINDS,
    LOGITS,
    OPTIMIZER_STATE,
    PARAMETERS,
    WORKSPACE,
    StorageTracker,
    num_classes_of,
    tag_gradients,
    tag_held,
)


def number_of(tensor: torch.Tensor) -> int:
    """That of its storage."""
    return tensor.untyped_storage()._tracked_as  # type: ignore


def test_kinds_have_the_names_and_the_order_that_summaries_show() -> None:
    assert KINDS == ("parameters", "gradients", "optimizer state", "activations", "logits and loss", "workspace")
    assert StorageTracker("cpu").bytes_by_kind == dict.fromkeys(KINDS, 0)


def test_storages_count_once_and_until_they_go() -> None:
    with StorageTracker("cpu") as tracker:
        one = torch.ones(100)
        view = one.view(10, 10)
        assert tracker.live_bytes == 400
        two = torch.ones(50)
        assert (tracker.live_bytes, tracker.peak.num_bytes) == (600, 600)
        del one
        assert tracker.live_bytes == 600  # the view holds it
        del view, two
        assert (tracker.live_bytes, tracker.peak.num_bytes, tracker.live) == (0, 600, {})
        odd = torch.ones(3, dtype=torch.uint8)
        assert tracker.live_bytes == odd.nbytes == 3


def test_sizes_on_cuda_are_rounded_up() -> None:
    with FakeTensorMode(), StorageTracker("cuda") as tracker:
        one, two = torch.empty(100, device="cuda"), torch.empty(129, device="cuda")
        torch.empty(100)  # on the host
        assert [tracker.live[number_of(tensor)].num_bytes for tensor in (one, two)] == [512, 1024]
        one.add_(1)  # nothing new
        assert tracker.live_bytes == 1536
        one.untyped_storage().resize_(600)
        assert tracker.live_bytes == 2048


def test_only_tensors_of_the_device_can_be_tagged_or_ignored() -> None:
    batch = torch.ones(20)
    with StorageTracker("cpu") as tracker:
        there = torch.ones(10)
        tracker.tag(GRADIENTS, [None, "documents", there, torch.ones(10, device="meta")])
        assert {kind: size for kind, size in tracker.bytes_by_kind.items() if size} == {GRADIENTS: 40}
        tracker.ignore(["documents", batch])
        assert tracker.live_bytes == 40 and batch.view(4, 5).shape == (4, 5)
        assert tracker.live_bytes == 40


def test_what_stays_between_steps_is_told_apart() -> None:
    """Also the scales of weights in 4 bits, which are packed too, and of a shard the part that is here."""
    network: Any = nn.Linear(10, 10)
    network.bias.requires_grad_(False)
    network.register_buffer("table", torch.ones(3))
    packed = SimpleNamespace(absmax=torch.ones(5), code=torch.ones(7), offset=torch.ones(1), state2=None)
    scales = SimpleNamespace(absmax=torch.ones(20), code=torch.ones(16), offset=torch.ones(1), state2=packed)
    network.weight.quant_state = scales
    optimizer = torch.optim.SGD(network.parameters())
    optimizer.state[network.weight] = {"step": 3, "momentum_buffer": torch.ones(10, 10)}
    shard, part = torch.ones(100), torch.ones(25)
    shard.to_local = lambda: part  # type: ignore
    tracker = StorageTracker("cpu")
    tag_held(tracker, network, optimizer)
    held = {PARAMETERS: 4 * (100 + 10 + 3 + 20 + 16 + 1 + 5 + 7 + 1), OPTIMIZER_STATE: 400}
    assert {kind: size for kind, size in tracker.bytes_by_kind.items() if size} == held
    handles = tag_gradients(tracker, network.parameters())
    network(torch.ones(1, 10)).sum().backward()
    assert tracker.bytes_by_kind[GRADIENTS] == 400
    for handle in handles:
        handle.remove()
    tracker.tag(WORKSPACE, [shard])
    assert tracker.bytes_by_kind[WORKSPACE] == part.nbytes
    assert tracker.see(shard) is None  # an update in place returns the whole, of which only the part is here


def test_memory_that_no_tensor_shows_is_held_from_then_on() -> None:
    tracker = StorageTracker("cpu")
    tracker.hold(1000, OPTIMIZER_STATE)
    tracker.hold(24, WORKSPACE)
    assert (tracker.live_bytes, len(tracker.live)) == (1024, 2)
    assert (tracker.bytes_by_kind[OPTIMIZER_STATE], tracker.bytes_by_kind[WORKSPACE]) == (1000, 24)
    tracker.observe("")
    assert tracker.peak.num_bytes == 1024


def test_a_storage_that_is_resized_is_followed_until_the_tracker_is_left() -> None:
    """As FSDP2 does with gathered parameters."""
    resize = torch.UntypedStorage.resize_
    with StorageTracker("cpu") as tracker:
        tensor = torch.ones(100)
        assert tensor.untyped_storage().resize_(0) is not None  # as torch's own gives the storage
        assert tracker.live_bytes == 0
        tensor.untyped_storage().resize_(4000)
        assert (tracker.live_bytes, tracker.peak.num_bytes, tracker.peak.operator) == (4000, 4000, "resize_")
        torch.UntypedStorage(10).resize_(20)  # of no tensor that was seen
        assert tracker.live_bytes == 4000
    assert torch.UntypedStorage.resize_ is resize


def test_kinds_follow_phase_gradients_and_width() -> None:
    def kind(phase: str, width: int = 3, records: bool = True) -> str:
        tracker.mark(phase)
        with torch.set_grad_enabled(records):
            tensor = torch.ones(2, width)
        return tracker.live[number_of(tensor)].kind

    with StorageTracker("cpu", num_classes=7) as tracker:
        assert [kind(phase) for phase in ("build", "forward", "evaluation")] == [PARAMETERS, ACTIVATIONS, ACTIVATIONS]
        assert kind("backward") == ACTIVATIONS  # recomputed: what backward itself makes records nothing
        assert kind("backward", records=False) == kind("optimizer") == kind("clip") == WORKSPACE
        assert [kind(phase, width=7) for phase in ("forward", "backward", "evaluation")] == [LOGITS] * 3
        assert [kind(phase, width=7) for phase in ("build", "optimizer")] == [PARAMETERS, WORKSPACE]
        tracker.mark("forward")
        bias, first, last = torch.ones(7), torch.ones(2, 7, 5), torch.ones(2, 5, 7)
        found = [tracker.live[number_of(tensor)].kind for tensor in (bias, first, last)]
        assert found == [ACTIVATIONS, ACTIVATIONS, LOGITS]


def test_what_is_made_before_any_phase_is_parameters() -> None:
    with StorageTracker("cpu") as tracker:
        weight = torch.ones(7)
        assert tracker.bytes_by_kind[PARAMETERS] == weight.nbytes


def test_what_an_operator_held_in_passing_is_workspace() -> None:
    with StorageTracker("cpu") as tracker:
        tracker.mark("forward")
        kept = torch.ones(100)
        tracker.observe("attention", temporary_bytes=1000)
        tracker.observe("later", temporary_bytes=1000)  # no more than that
        assert (tracker.peak.num_bytes, tracker.peak.operator) == (1400, "attention")
        assert {kind: size for kind, size in tracker.peak.bytes_by_kind.items() if size} == {
            ACTIVATIONS: kept.nbytes,
            WORKSPACE: 1000,
        }
        assert tracker.peak_bytes_by_phase == {"forward": 1400}
        tracker.mark("optimizer")
        scratch = torch.ones(50)
        tracker.observe("update", temporary_bytes=2000)
        assert (tracker.peak.phase, tracker.peak.bytes_by_kind[WORKSPACE]) == ("optimizer", scratch.nbytes + 2000)
        del scratch
        tracker.reset_peak()
        assert (tracker.peak.num_bytes, tracker.peak_bytes_by_phase) == (400, {})


def test_classes_are_those_of_labels_else_of_the_model_else_of_the_tokenizer() -> None:
    network: Any = nn.Linear(2, 2)
    assert (num_classes_of(network, 3, 100), num_classes_of(network, 0, 100)) == (3, 100)
    network.config = SimpleNamespace(vocab_size=7)  # of one's own
    assert num_classes_of(network, 0, 100) == 100
    network.config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(vocab_size=128))
    network._from_config = None  # of transformers
    assert (num_classes_of(network, 3, 100), num_classes_of(network, 0, 100)) == (3, 128)


def test_gradients_that_meet_are_added_as_autograd_adds_them_when_nobody_looks_on() -> None:
    """In the first of the two, which it does not do for followed operators; the peak is that of torch's allocator."""
    from scripts.benchmarks.harness import traced_allocations

    def fan_in() -> None:
        leaf = torch.ones(2**16, requires_grad=True)
        hidden = leaf * 2
        ((hidden * 2).sum() + (hidden * 3).sum() + (hidden * 4).sum()).backward()

    fan_in()  # threads and caches are there
    with traced_allocations() as truth:
        fan_in()
    with StorageTracker("cpu") as tracker:
        fan_in()
    assert abs(tracker.peak.num_bytes - truth.peak_bytes) < 64  # scalars


def test_sparse_gradients_that_meet_are_left_alone() -> None:
    """They have no storage to look at."""
    table = nn.Embedding(8, 4, sparse=True)
    with StorageTracker("cpu"):
        (table(torch.tensor([1, 2])).sum() + table(torch.tensor([2, 3])).sum()).backward()
    assert table.weight.grad is not None and table.weight.grad.is_sparse
