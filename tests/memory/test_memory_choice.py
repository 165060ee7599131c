"""gradient_checkpointing: auto: the least recomputation that fits, with few predictions, and what is said of it."""

from __future__ import annotations

from typing import Any

import pytest

from train.config import from_values
from train.records import UserError
from train.memory.choice import SMALLEST_FIRST, choose
from train.outputs_log import gib

MIB = 2**20
SAVED_MIB = {"none": 0, "selective": 8, "full": 9}
"""What each checkpointed layer needs less."""


def needs_of(changes: dict[str, Any]) -> int:
    """A model of 24 layers of 10 MiB each."""
    every = changes["gradient_checkpointing_every_n_layers"]
    checkpointed = 0 if changes["gradient_checkpointing"] == "none" else -(-24 // every)
    saved = SAVED_MIB[changes["gradient_checkpointing"]] + changes["gradient_checkpointing_offload"]
    return (240 - saved * checkpointed) * MIB


def chosen(room_mib: int, device_type: str = "cuda", offload: bool = False) -> tuple[tuple[Any, ...], str, int]:
    tried: list[dict[str, Any]] = []

    def needs(changes: dict[str, Any]) -> int:
        tried.append(changes)
        return needs_of(changes)

    changes, line = choose(needs, room_mib * MIB, device_type, offload)
    from_values({"tokenizer": "bytes", "model_config": {"model_type": "llama"}, **changes})
    return tuple(changes.values()), line, len(tried)


@pytest.mark.parametrize(
    ("room", "expected"),
    [
        (240, ("none", 1, False)),
        (239, ("selective", 8, False)),
        (192, ("selective", 4, False)),
        (180, ("selective", 3, False)),
        (150, ("selective", 2, False)),
        (48, ("selective", 1, False)),
        (47, ("full", 1, False)),
        (24, ("full", 1, False)),
        (23, ("full", 1, True)),
    ],
)
def test_the_least_that_fits_is_chosen(room: int, expected: tuple[Any, ...]) -> None:
    found, line, tried = chosen(room)
    assert found == expected
    assert tried <= 5
    needed = needs_of(dict(zip(choice_flags(), expected, strict=True)))
    assert f"predicted to take {gib(needed)} of {gib(room * MIB)} that may be taken" in line
    assert ("; without it 0.23 GiB" in line) is (expected[0] != "none")


def choice_flags() -> tuple[str, ...]:
    return ("gradient_checkpointing", "gradient_checkpointing_every_n_layers", "gradient_checkpointing_offload")


def test_the_line_names_the_choice() -> None:
    assert chosen(180)[1].startswith("gradient_checkpointing: selective every 3 layers, predicted")
    assert chosen(23)[1].startswith("gradient_checkpointing: full with offload, predicted")


def test_each_way_needs_more_than_the_one_before() -> None:
    sizes = [
        needs_of(dict(zip(choice_flags(), (w.gradient_checkpointing, w.every_n_layers, w.offload), strict=True)))
        for w in SMALLEST_FIRST
    ]
    assert sizes == sorted(sizes) and len(set(sizes)) == len(sizes)


def test_a_cpu_has_no_other_memory_and_offload_that_was_asked_for_stays() -> None:
    with pytest.raises(UserError, match=r"auto: full is predicted to need 24.0 MiB, and 23.0 MiB may be taken"):
        chosen(23, "cpu")
    assert chosen(48, offload=True)[0] == ("selective", 1, True)
    assert chosen(240, offload=True)[0] == ("none", 1, False)  # nothing that could rest
    assert chosen(20, "cpu", offload=True)[0] == ("full", 1, True)  # the same recipe goes on on a card


def test_a_model_that_cannot_recompute_keeps_all_or_says_why() -> None:
    def refuses(changes: dict[str, Any]) -> int:
        if changes["gradient_checkpointing"] != "none":
            raise UserError("gradient_checkpointing does not work with this model")
        return 100

    assert choose(refuses, 100, "cpu", False)[0]["gradient_checkpointing"] == "none"
    with pytest.raises(UserError, match="auto: none is predicted to need"):
        choose(refuses, 99, "cpu", False)

    def dies(changes: dict[str, Any]) -> int:
        raise UserError("cannot be predicted")

    with pytest.raises(UserError, match="cannot be predicted"):
        choose(dies, 99, "cpu", False)
