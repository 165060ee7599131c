"""What the tracker counts of single storages, by value."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from train.extras.meter.tracker import ACTIVATIONS, LOGITS, PARAMETERS, WORKSPACE, StorageTracker, num_classes_of


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
        assert (tracker.live_bytes, tracker.peak.num_bytes) == (0, 600)


def test_a_storage_that_is_resized_is_followed_until_the_tracker_is_left() -> None:
    """As FSDP2 does with gathered parameters."""
    resize = torch.UntypedStorage.resize_
    with StorageTracker("cpu") as tracker:
        tensor = torch.ones(100)
        tensor.untyped_storage().resize_(0)
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
        return tracker.live[tensor.untyped_storage()._tracked_as].kind  # pyright: ignore[reportAttributeAccessIssue]

    with StorageTracker("cpu", num_classes=7) as tracker:
        assert [kind(phase) for phase in ("build", "forward", "evaluation")] == [PARAMETERS, ACTIVATIONS, ACTIVATIONS]
        assert kind("backward") == ACTIVATIONS  # recomputed: what backward itself makes records nothing
        assert kind("backward", records=False) == kind("optimizer") == kind("clip") == WORKSPACE
        assert [kind(phase, width=7) for phase in ("forward", "backward", "evaluation")] == [LOGITS] * 3
        assert [kind(phase, width=7) for phase in ("build", "optimizer")] == [PARAMETERS, WORKSPACE]
        tracker.mark("forward")
        row = torch.ones(7)  # of one dimension: a bias, not logits
        assert tracker.live[row.untyped_storage()._tracked_as].kind == ACTIVATIONS  # pyright: ignore


def test_a_trace_that_is_begun_again_has_what_is_live() -> None:
    with StorageTracker("cpu") as tracker:
        tracker.trace = []
        one, two = torch.ones(4), torch.ones(8)
        assert [size for _, size in tracker.trace] == [16, 32]
        del one
        assert [size for _, size in tracker.trace] == [16, 32, -16]
        tracker.restart_trace()
        assert tracker.trace == [(two.untyped_storage()._tracked_as, 32)]  # pyright: ignore[reportAttributeAccessIssue]


def test_what_an_operator_held_in_passing_is_workspace() -> None:
    with StorageTracker("cpu") as tracker:
        tracker.mark("forward")
        kept = torch.ones(100)
        tracker.observe("attention", temporary_bytes=1000)
        assert (tracker.peak.num_bytes, tracker.peak.operator) == (1400, "attention")
        assert {kind: size for kind, size in tracker.peak.bytes_by_kind.items() if size} == {
            ACTIVATIONS: kept.nbytes,
            WORKSPACE: 1000,
        }
        assert tracker.peak_bytes_by_phase == {"forward": 1400}
        tracker.reset_peak()
        assert (tracker.peak.num_bytes, tracker.peak_bytes_by_phase) == (400, {})


def test_classes_are_those_of_labels_else_of_the_model_else_of_the_tokenizer() -> None:
    network: Any = nn.Linear(2, 2)
    assert (num_classes_of(network, 3, 100), num_classes_of(network, 0, 100)) == (3, 100)
    network.config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(vocab_size=128))
    assert (num_classes_of(network, 3, 100), num_classes_of(network, 0, 100)) == (3, 128)
