"""The order of what saves memory: the least recomputation that fits, and the changes offered after a failure."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from train.config import Config, from_values, parse, to_values
from train.figures import gib
from train.memory.ladder import LADDER, REMEDIES, Recompute, cheaper, choose, ladder_on, recomputations
from train.memory.predict import Job, Target
from train.records import UserError

MIB = 2**20
CHECKPOINTING = "gradient_checkpointing"
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

    changes, line = choose(CHECKPOINTING, recomputations(device_type, offload), needs, room_mib * MIB)
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
    assert ("; none would take 0.23 GiB" in line) is (expected[0] != "none")


def choice_flags() -> tuple[str, ...]:
    return ("gradient_checkpointing", "gradient_checkpointing_every_n_layers", "gradient_checkpointing_offload")


def test_the_line_names_the_choice() -> None:
    assert chosen(180)[1].startswith("gradient_checkpointing: selective every 3 layers, predicted")
    assert chosen(23)[1].startswith("gradient_checkpointing: full with offload, predicted")


def test_each_way_needs_less_than_the_one_before() -> None:
    sizes = [needs_of(vars(way)) for way in LADDER if not way.tiled_mlp]
    assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) == len(sizes)
    assert LADDER[-1] == replace(LADDER[-2], tiled_mlp=True)


def test_a_cpu_has_the_ladder_without_offload() -> None:
    assert ladder_on("cuda") == LADDER
    ways = ladder_on("cpu")
    assert [way for way in ways if way in LADDER] == [way for way in LADDER if not way.gradient_checkpointing_offload]
    assert ways[-1] == Recompute("full", tiled_mlp=True) and len(set(ways)) == len(ways)


def test_a_cpu_has_no_other_memory_and_offload_that_was_asked_for_stays() -> None:
    with pytest.raises(UserError, match=r"auto: full is predicted to need 24.0 MiB, and 23.0 MiB may be taken"):
        chosen(23, "cpu")
    assert chosen(48, offload=True)[0] == ("selective", 1, True)
    assert chosen(240, offload=True)[0] == ("none", 1, False)  # nothing that could rest
    assert chosen(20, "cpu", offload=True)[0] == ("full", 1, True)  # so that the same recipe resumes on a card


def test_a_model_that_cannot_recompute_keeps_all_or_says_why() -> None:
    def refuses(changes: dict[str, Any]) -> int:
        if changes["gradient_checkpointing"] != "none":
            raise UserError("gradient_checkpointing does not work with this model")
        return 100

    ways = recomputations("cpu", False)
    assert choose(CHECKPOINTING, ways, refuses, 100)[0]["gradient_checkpointing"] == "none"
    with pytest.raises(UserError, match="auto: none is predicted to need"):
        choose(CHECKPOINTING, ways, refuses, 99)

    def dies(changes: dict[str, Any]) -> int:
        raise UserError("cannot be predicted")

    with pytest.raises(UserError, match="cannot be predicted"):
        choose(CHECKPOINTING, ways, dies, 99)


def test_what_the_host_has_no_room_for_does_not_hide_what_fits_without_it() -> None:
    tried: list[str] = []

    def needs(changes: dict[str, Any]) -> int:
        tried.append(str(changes))
        if changes["gradient_checkpointing_offload"]:
            raise UserError("what is offloaded would take 80 GiB in host memory, of which 8 GiB is free.")
        return {"none": 1000, "selective": 900}.get(changes["gradient_checkpointing"], 100) * 2**30

    ways = recomputations("cuda", False)
    assert choose(CHECKPOINTING, ways, needs, 100 * 2**30)[0]["gradient_checkpointing"] == "full"
    assert len(tried) == len(set(tried))  # each is predicted once
    with pytest.raises(UserError, match=r"full is predicted to need 100\.0 GiB, and 99\.00 GiB .* 80 GiB in host"):
        choose(CHECKPOINTING, ways, needs, 99 * 2**30)


def step(device_type: str = "cuda", **changes: Any) -> Job:
    values = {**to_values(Config()), "loss": "full", "model_config": {"model_type": "llama"}, **changes}
    return Job(values, Target(device_type), 9000, 4, 1024, False, eval_batch_size=4)


def test_what_saves_memory_is_offered_in_the_order_of_the_remedies() -> None:
    found = cheaper(step())
    offered = [flags for flags, _, _ in found]
    assert offered == [
        "--loss chunked",
        "--micro_batch_size 2",
        "--gradient_checkpointing full",
        "--optimizer_offload True",
        "--optimizer adamw_8bit",
        "--optimizer adafactor",
        "--max_length 512",
    ]
    names = [remedy.name for remedy in REMEDIES]
    positions = [names.index(flags.removeprefix("--").split()[0]) for flags in offered]
    assert positions == sorted(positions)
    for flags, note, job in found:
        name, value = flags.removeprefix("--").split()
        assert note and job.values[name] == to_values(parse(["--model", "x", f"--{name}", value]))[name]
    half = found[1][2]
    assert (half.micro_batch_size, half.accumulates, half.eval_batch_size) == (2, True, 2)
    assert found[-1][2].length == 512


@pytest.mark.parametrize(("size", "smaller"), [(2, 1), (4, 2), (5, 1), (6, 3), (9, 3), (12, 6)])
def test_a_smaller_micro_batch_divides_the_global_batch(size: int, smaller: int) -> None:
    job = replace(step(), micro_batch_size=size)
    [offered] = [flags for flags, _, _ in cheaper(job) if flags.startswith("--micro_batch_size")]
    assert offered == f"--micro_batch_size {smaller}"


def test_micro_batches_made_by_tokens_get_fewer_tokens() -> None:
    """Such a run refuses micro_batch_size."""
    flags = [flags for flags, _, _ in cheaper(step(max_tokens_per_micro_batch=8192))]
    assert "--max_tokens_per_micro_batch 2048" in flags  # 2 × 1,024
    assert not [flag for flag in flags if flag.startswith("--micro_batch_size")]
    one = cheaper(replace(step(max_tokens_per_micro_batch=1024), micro_batch_size=2, length=500))
    assert not [flags for flags, _, _ in one if flags.startswith("--max_tokens")]  # 500 would not hold an example
    recipe = ["--model", "x", "--max_length", "1024", "--global_batch_size", "8"]
    assert parse([*recipe, *flags[1].split()]).get("max_tokens_per_micro_batch") == 2048


def test_an_evaluation_that_a_remedy_leaves_alone_is_not_its_saving() -> None:
    """Only --eval_batch_size changes one of more examples than the micro-batch."""
    found = {
        flags: job.eval_batch_size for flags, _, job in cheaper(replace(step(eval_batch_size=64), eval_batch_size=64))
    }
    assert found.pop("--eval_batch_size 1") == 1
    assert set(found.values()) == {64} and "--micro_batch_size 2" in found
    assert "--eval_batch_size 1" not in [flags for flags, _, _ in cheaper(step())]


def test_a_remedy_changes_nothing_else() -> None:
    """The model takes 8,192 tokens, of which no text has more than 1,024; 3 examples are evaluated at once."""
    job = replace(step(eval_batch_size=64, max_length=8192), eval_batch_size=3)
    changed = {flags: other for flags, _, other in cheaper(job)}
    lengths = {flags: (other.values["max_length"], other.length) for flags, other in changed.items()}
    assert lengths.pop("--max_length 512") == (512, 512)
    assert set(lengths.values()) == {(8192, 1024)} and len(lengths) == 6
    assert {other.eval_batch_size for other in changed.values()} == {3}


def test_what_is_in_use_or_cannot_work_is_not_offered() -> None:
    def offered(job: Job) -> set[str]:
        return {flags.split()[0].removeprefix("--") for flags, _, _ in cheaper(job)}

    everything = {"loss", "micro_batch_size", "gradient_checkpointing", "optimizer_offload", "optimizer", "max_length"}
    assert offered(step()) == everything
    assert offered(step("cpu")) == everything - {"optimizer_offload"}
    assert offered(step(loss="chunked", gradient_checkpointing="full")) == everything - {
        "loss",
        "gradient_checkpointing",
    }
    assert "micro_batch_size" not in offered(step(optimizer_in_backward=True))
    assert "loss" not in offered(replace(step(), num_labels=3))
    assert not offered(step(optimizer="sgd")) & {"optimizer", "optimizer_offload"}
    assert not offered(replace(step(), world_size=8, sharding="fsdp2")) & {"optimizer", "optimizer_offload"}
    kahan = {flags: job for flags, _, job in cheaper(step(bf16_update="kahan", dtype="bfloat16"))}
    assert kahan["--optimizer adafactor"].values["bf16_update"] == "nearest"
    assert "--optimizer adamw_8bit" not in kahan


def test_advice_does_without_the_options_of_extras_that_are_gone() -> None:
    whole = step()
    without = ("loss", "bf16_update", "optimizer_in_backward", "gradient_checkpointing")
    bare = replace(whole, values={name: value for name, value in whole.values.items() if name not in without})
    assert not {"loss", "gradient_checkpointing"} & {
        flags.split()[0].removeprefix("--") for flags, _, _ in cheaper(bare)
    }
    assert cheaper(bare)
