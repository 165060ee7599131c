"""Settings that cannot work together, and launch files that ask for what the template cannot do."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

import pytest

from train import extras
from train.config import Config, fields, parse
from train.extras.checks.settings import check_launch_file
from train.launch import Launch
from train.main import start
from train.records import UsageError, UserError

PARALLEL = {"ACCELERATE_USE_PARALLELISM_CONFIG": "true"}


def sizes(world_size: int, **given: int) -> dict[str, str]:
    named = {f"PARALLELISM_CONFIG_{name.upper()}_SIZE": str(size) for name, size in given.items()}
    return {**PARALLEL, "WORLD_SIZE": str(world_size), **named}


def test_sizes_that_do_not_make_the_world_are_refused() -> None:
    with pytest.raises(UsageError, match=r"dp_shard_size 2, tp_size 2 make 4 processes, num_processes is 8"):
        check_launch_file(sizes(8, dp_shard=2, tp=2))
    with pytest.raises(UsageError, match=r"cp_size 3"):
        check_launch_file(sizes(8, cp=3))
    deepspeed = {"ACCELERATE_USE_DEEPSPEED": "true"}
    for given, engine in (
        ({"cp": 0}, {}),
        ({"tp": -1, "cp": -2}, {}),
        ({"dp_shard": -2}, deepspeed),
        ({"sp": 0}, deepspeed),
    ):
        said = ", ".join(f"{name}_size {size}" for name, size in given.items())
        with pytest.raises(UsageError, match=f"launch file: {said}: the least is 1"):
            check_launch_file({**sizes(2, **given), **engine})
    strategy = {"PARALLELISM_CONFIG_CP_COMM_STRATEGY": "alltoal"}
    with pytest.raises(UsageError, match="launch file: cp_size 2 with cp_comm_strategy alltoal: give allgather or"):
        check_launch_file({**sizes(2, cp=2), **strategy})
    check_launch_file({**sizes(2, tp=2), **strategy})  # which does not read it
    with pytest.raises(UsageError, match=r"cp_size 2, sp_size 2 both divide sequences. Give one of them"):
        check_launch_file(sizes(4, cp=2, sp=2))
    with pytest.raises(UsageError, match=r"dp_shard_size 2, sp_size 2 contradict DeepSpeed.* Leave dp_shard_size out"):
        check_launch_file({**sizes(4, dp_shard=2, sp=2), **deepspeed})
    fsdp2 = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
    for given in ({"dp_replicate": 4}, {"dp_replicate": 2, "cp": 2}):
        with pytest.raises(UsageError, match=r"leave FSDP2 no shards. Set dp_shard_size, too"):
            check_launch_file({**sizes(4, **given), **fsdp2})
    check_launch_file({**sizes(4, dp_replicate=2, dp_shard=2), **fsdp2})
    check_launch_file({**sizes(4, dp_replicate=4), **PARALLEL})
    with pytest.raises(UsageError, match=r"sp_size 3"):
        check_launch_file({**sizes(8, sp=3), **deepspeed})
    check_launch_file({**sizes(8, sp=4), **deepspeed})
    check_launch_file(sizes(8, dp_shard=2, cp=2, tp=2))
    check_launch_file({})


def test_unknown_engines_are_refused() -> None:
    with pytest.raises(UsageError, match="fsdp_version: 1 in the launch file"):
        check_launch_file({"ACCELERATE_USE_FSDP": "true"})
    check_launch_file({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"})
    with pytest.raises(UsageError, match="MEGATRON_LM"):
        check_launch_file({"ACCELERATE_USE_MEGATRON_LM": "true"})


def test_checkpointing_of_the_launcher_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config().changed(model="x")
    extras.check(config, Launch(engine="fsdp2"))
    monkeypatch.setenv("FSDP_ACTIVATION_CHECKPOINTING", "true")
    with pytest.raises(UsageError, match=r"fsdp_activation_checkpointing: true .* use --gradient_checkpointing"):
        extras.check(config, Launch(engine="fsdp2"))


def test_a_precision_that_nobody_has_tried_is_refused() -> None:
    with pytest.raises(UsageError, match="mixed_precision: 'fp8' in the launch file"):
        extras.check(Config().changed(model="x"), Launch(precision="fp8"))


@pytest.mark.parametrize(
    ("asked", "launched", "agree"), [("bf16", "fp16", False), ("bf16", "no", True), (None, "fp16", True)]
)
def test_precision_of_launcher_and_recipe(asked: str, launched: str, agree: bool) -> None:
    config = Config().changed(model="x", mixed_precision=asked)
    if agree:
        extras.check(config, Launch(precision=launched))
    else:
        with pytest.raises(UsageError, match="training configuration says bf16, the launch configuration fp16"):
            extras.check(config, Launch(precision=launched))


def test_a_precision_of_the_run_counts_on_a_cpu_whose_launch_file_leaves_it_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    for asked in ("no", "bf16", "fp16"):
        extras.check(Config().changed(model="x", mixed_precision=asked), Launch(precision="fp16"))
    with pytest.raises(UsageError, match="training configuration says fp16, the launch configuration bf16"):
        extras.check(Config().changed(model="x", mixed_precision="fp16"), Launch(precision="bf16"))


def test_processes_that_do_not_know_each_other_move_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "summary.json").write_text("{}")
    monkeypatch.setattr("train.extras.hardware.set_up_device", lambda *_: None)
    config = Config().changed(model="x", output_dir=str(tmp_path), resume="never")
    (hooks := extras.join()).by_name["endurance"]._saving = Mock()  # type: ignore - of open(), which is left out here
    with pytest.raises(UserError, match="started 2 processes, but this one knows of 1"):
        start(config, Launch(world_size=2), hooks, [])
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]


def test_the_folder_of_a_run_or_a_checkpoint_is_no_model(tmp_path: Path) -> None:
    run = tmp_path / "checkpoints" / "run"  # a folder of a person's may be called that, too
    for folder in (run / "final", step := run / "checkpoints" / "step-00000110"):
        folder.mkdir(parents=True)
    (run / "metrics.jsonl").write_text("")
    for given in (f"{run}", f"{run}/", f"{step}", f"{step}/", f"{step.parent}"):
        with pytest.raises(UsageError, match=f"model: {given} belongs to a run: give {run}/final .how to make one"):
            parse(["--model", given])
    for given in (f"{run}/final", f"{tmp_path}/checkpoints", f"{tmp_path}/checkpoints/step-00000001"):
        assert parse(["--model", given]).architecture.model == given


WITHOUT_EFFECT = {
    ("gradient_checkpointing_every_n_layers", "2"): ("gradient_checkpointing", "full"),
    ("gradient_checkpointing_offload", "True"): ("gradient_checkpointing", "selective"),
    ("rope_scaling_factor", "2"): ("rope_scaling", "yarn"),
    ("gradient_health_every_steps", "5"): ("gradient_health", "True"),
    ("max_rollbacks", "1"): ("save_every_steps", "5"),
    ("load_best_model_at_end", "True"): ("eval_every_steps", "5"),
    ("early_stopping_patience", "1"): ("eval_every_steps", "5"),
    ("lora_rank", "4"): ("adapter", "lora"),
    ("hub_private_repo", "True"): ("push_to_hub", "True"),
    ("push_to_hub", "True"): ("hub_model_id", "a/b"),
}
"""Options, each with what it needs and a value of that."""


@pytest.mark.parametrize("name", WITHOUT_EFFECT)
def test_an_option_that_would_do_nothing_is_refused(name: tuple[str, str]) -> None:
    needs, value = WITHOUT_EFFECT[name]
    base = ["--tokenizer", "bytes", "--model_config", '{"model_type": "gpt2"}', "--hub_model_id", "a/b"]
    if needs in ("hub_model_id", "save_every_steps"):
        base += [f"--{needs}", "None"]
    own, other = f"--{name[0]}={name[1]}", f"--{needs}={value}"
    with pytest.raises(UsageError, match=f"^{name[0]} needs {needs}. Give that, too, or leave {name[0]} out.$"):
        parse([*base, own])
    assert parse([*base, own, other]).get(name[0])
    assert parse([*base, f"--{name[0]}={fields()[name[0]][1].default}"])  # as in the config.yaml of a run


def test_all_that_need_another_option_are_tried_above() -> None:
    known = {name for name, (_, entry) in fields().items() if "needs" in entry.metadata}
    of_lora = {"lora_alpha", "lora_dropout", "lora_target_modules", "merge_adapter"}
    assert known == {name for name, _ in WITHOUT_EFFECT} | of_lora


def test_a_hint_names_no_flag_that_was_deleted() -> None:
    said = "unknown flag --use_lora. Did you mean --adapter lora?"
    assert extras.unknown("flag", ["--use_lora"], ["adapter", "seed"], "--").startswith(said)
    assert "lora" not in extras.unknown("flag", ["--use_lora"], ["seed"], "--").removeprefix("unknown flag --use_lora")
