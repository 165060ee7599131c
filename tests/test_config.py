"""What command lines and recipes say, and what is refused of it."""

from __future__ import annotations

import os
import re
import typing
from pathlib import Path

import pytest
import yaml
from support import ROOT

from train import extras
from train.config import Config, dump, fields, from_values, parse, read_recipe, to_values
from train.main import main
from train.records import EXIT_USAGE, UsageError

FORK = " This copy of the template is without the extras"
"""What a fork adds to the message about unknown flags."""
BASE = "model_config: {model_type: gpt2}\ntokenizer: bytes\n"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A recipe that can be parsed."""
    path = tmp_path / "base.yaml"
    path.write_text(BASE)
    return path


@pytest.mark.parametrize("text", ["None", "null"])
def test_nothing_is_no_text(base: Path, text: str) -> None:
    """Neither is the name of a folder; where nothing may be given, it is."""
    with pytest.raises(UsageError, match="output_dir: None is not valid: expected text"):
        parse(["--config", str(base), "--output_dir", text])
    assert parse(["--config", str(base), "--max_grad_norm", text]).optimization.max_grad_norm is None


# Numbers


FLOATS = [name for name, (hint, _) in fields().items() if float in (hint, *typing.get_args(hint))]


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_nan_and_infinity_are_refused(base: Path, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(FLOATS) > 12 and {"learning_rate", "max_grad_value", "weight_decay"} <= set(FLOATS)
    for name in FLOATS:
        with pytest.raises(UsageError, match=f"^{name}: {value} "):
            parse(["--config", str(base), f"--{name}={value}"])
    assert main(["--config", str(base), f"--weight_decay={value}"]) == EXIT_USAGE
    assert f"weight_decay: {value}" in capsys.readouterr().err


def test_whole_numbers_that_no_generator_takes_are_refused(base: Path) -> None:
    for number in ("99999999999999999999", str(2**63)):
        with pytest.raises(UsageError, match=f"seed: {number} is too large: at most {2**63 - 1}"):
            parse(["--config", str(base), "--seed", number])
    assert parse(["--config", str(base), "--seed", str(2**63 - 1)]).optimization.seed == 2**63 - 1


def test_a_whole_number_beyond_all_floats_gets_a_message(base: Path) -> None:
    base.write_text(f"{BASE}weight_decay: 1{'0' * 400}")
    with pytest.raises(UsageError, match=r"weight_decay: 10+ is too large: at most 9223372036854775807"):
        parse(["--config", str(base)])


@pytest.mark.parametrize(
    ("name", "value", "bound"),
    [
        ("distributed_timeout_seconds", 2**62, "at least 1 and at most 100000000"),
        ("max_grad_value", 1e300, "above 0 and at most 1e+38"),
        ("adam_epsilon", 1e-300, "at least 1e-37"),
    ],
)
def test_numbers_beyond_what_computes_with_them_are_refused(name: str, value: float, bound: str) -> None:
    with pytest.raises(UsageError, match=re.escape(f"{name}: {value} is not valid: it must be {bound}")):
        parse([f"--{name}", str(value)])


# Paths


PATHS = ("output_dir", "model", "tokenizer", "resume", "validation_dataset")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_a_micro_batch_size_of_auto_asks_which_global_batch_it_divides(base: Path) -> None:
    auto = ["--config", str(base), "--micro_batch_size", "auto"]
    with pytest.raises(UsageError, match=r"micro_batch_size: auto.*--global_batch_size"):
        parse(auto)
    assert parse([*auto, "--global_batch_size", "6"]).optimization.global_batch_size == 6
    base.write_text(f"{BASE}micro_batch_size: 2\nglobal_batch_size: 8\n")
    assert parse(auto).optimization.global_batch_size == 8


@pytest.mark.parametrize(
    ("other", "ours"),
    [
        ("--batch_size=4", "--micro_batch_size"),
        ("--per_device_train_batch_size=4", "--micro_batch_size"),
        ("--max_len=64", "--max_length"),
        ("--fp16", "--mixed_precision fp16"),
        ("--bf16", "--mixed_precision bf16"),
        ("--lr=1e-3", "--learning_rate"),
        ("--epochs=1", "--num_epochs"),
        ("--model_name_or_path=gpt2", "--model"),
        ("--max_train_steps=9", "--max_steps"),
        ("--sequence_length=64", "--max_length"),
        ("--validation_file=a.txt", "--validation_dataset"),
        ("--evaluation_strategy=steps", "--eval_every_steps"),
        ("--auto_find_batch_size", "--micro_batch_size auto"),
        ("--overwrite_output_dir", "--resume never"),
        ("--use_lora", "--adapter lora"),
        ("--logging_steps=5", "--log_every_steps"),
    ],
)
def test_flags_of_other_programs_lead_to_ours(base: Path, other: str, ours: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse(["--config", str(base), other])
    assert f"Did you mean {ours}?" in str(refused.value)


@pytest.mark.parametrize("written", ["[q_proj, v_proj]", "q_proj, v_proj", "'q_proj,v_proj'"])
def test_a_list_in_a_recipe_needs_no_brackets(base: Path, written: str) -> None:
    base.write_text(f"{BASE}adapter: lora\nlora_target_modules: {written}")
    assert parse(["--config", str(base)]).get("lora_target_modules") == ("q_proj", "v_proj")


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        (["a,b"], ("a", "b")),
        (["a", "b"], ("a", "b")),
        (["a"], ("a",)),
        (["none"], ()),
        (["None"], ()),  # as elsewhere
        ([], ()),
        (["a,b", "c"], ("a,b", "c")),
    ],
)
def test_a_list_on_the_command_line_is_written_with_spaces_or_commas(flags: list[str], names: tuple[str, ...]) -> None:
    assert parse(["--metrics", *flags]).get("metrics") == names


def test_what_is_like_no_flag_leads_to_none(base: Path) -> None:
    with pytest.raises(UsageError, match=r"unknown flag --disable_tqdm\. .*--help lists all"):
        parse(["--config", str(base), "--disable_tqdm"])


def test_all_unknown_flags_are_told_at_once(base: Path) -> None:
    with pytest.raises(UsageError) as refused:
        parse(["--config", str(base), "--bf16", "--fsdp", "full_shard auto_wrap", "--save_steps", "10", "--seed", "7"])
    assert str(refused.value).partition(FORK)[0] == (
        "unknown flag --bf16. Did you mean --mixed_precision bf16? unknown flag --fsdp. It belongs to the launch. Give "
        "accelerate launch --config_file accelerate_configs/fsdp2.yaml. unknown flag --save_steps. Did you mean "
        "--save_every_steps?"
    )


def test_the_type_of_weights_is_not_taken_over_without_a_word(base: Path) -> None:
    """Plain AdamW loses small updates of bf16 weights; the weights of other programs are cast to what is trained."""
    with pytest.raises(UsageError, match=r"--torch_dtype\. Leave it out, or give --dtype bfloat16 with --bf16_update"):
        parse(["--config", str(base), "--torch_dtype=bfloat16"])


def test_every_familiar_flag_leads_to_one_that_is_there_or_says_what_to_do() -> None:
    familiar = yaml.safe_load((ROOT / "train/extras/familiar_flags.yaml").read_text(encoding="utf-8"))
    assert [name for name in familiar if name in fields()] == []
    wrong = {n: ours for n, ours in familiar.items() if ours.partition(" ")[0] not in fields() and ours[-1] != "."}
    if extras.missing():
        pytest.skip("in a fork some lead to what it lacks")
    assert wrong == {}
    files = [word for ours in familiar.values() for word in re.findall(r"[\w/]+\.(?:yaml|py)", ours)]
    assert [file for file in files if not (ROOT / file).exists()] == []


def test_gradient_checkpointing_alone_recomputes_every_layer(base: Path) -> None:
    recipe = ["--config", str(base)]
    assert parse([*recipe, "--gradient_checkpointing", "--seed", "7"]).get("gradient_checkpointing") == "full"
    assert parse([*recipe, "--gradient_checkpointing", "selective"]).get("gradient_checkpointing") == "selective"


@pytest.mark.parametrize(("text", "kind"), [("True", "full"), ("true", "full"), ("False", "none"), ("off", "none")])
def test_gradient_checkpointing_is_also_true_or_false_as_in_transformers(tmp_path: Path, text: str, kind: str) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"{BASE}gradient_checkpointing: {text}\n")
    for words in (["--config", str(recipe)], ["--config", str(recipe), "--gradient_checkpointing", text]):
        config = parse(words)
        assert config.get("gradient_checkpointing") == kind
        assert from_values(to_values(config)) == config and f"gradient_checkpointing: {kind}\n" in dump(config)
    assert parse(["--config", str(recipe), "--no-gradient_checkpointing"]).get("gradient_checkpointing") == "none"


@pytest.mark.parametrize("flag", ["--no_output_dir", "--no-model", "--no_max_steps"])
def test_only_what_needs_no_value_can_be_switched_off(flag: str) -> None:
    """No run may find a folder or a model called False."""
    with pytest.raises(UsageError, match=f"unknown flag {flag.replace('-', '_').replace('__', '--', 1)}"):
        parse([flag])


@pytest.mark.parametrize("flag", ["--config", "--max_length"])
def test_a_flag_without_its_value_is_a_usage_error(flag: str) -> None:
    with pytest.raises(UsageError, match=rf"argument {flag}: expected one argument\. train/main\.py --help lists all"):
        parse([flag])


def test_the_home_folder_is_expanded_in_a_recipe_and_on_the_command_line(home: Path) -> None:
    lines = [f"{name}: ~/of/{name}" for name in PATHS]
    (home / "mine.yaml").write_text("\n".join(lines))
    values = to_values(parse(["--config", "~/mine.yaml"]))
    assert [values[name] for name in PATHS] == [str(home / "of" / name) for name in PATHS]
    flags = [f"--{name}=~/other/{name}" for name in PATHS]
    values = to_values(parse(["--config=~/mine.yaml", *flags]))
    assert [values[name] for name in PATHS] == [str(home / "other" / name) for name in PATHS]


def test_a_recipe_in_a_home_that_is_not_there_is_not_found() -> None:
    with pytest.raises(UsageError, match=r"--config ~nobody-here/recipe\.yaml: No such file"):
        parse(["--config", "~nobody-here/recipe.yaml"])


def test_what_is_not_a_path_stays_and_so_does_a_home_that_is_not_there(home: Path) -> None:
    flags = ["--output_dir=a/~/b", "--model=user/name", "--tokenizer=bytes", "--resume=auto"]
    values = to_values(parse([*flags, "--validation_dataset=~no-such-person/x.csv"]))
    assert [values[name] for name in PATHS] == ["a/~/b", "user/name", "bytes", "auto", "~no-such-person/x.csv"]
    assert parse(["--model=user/name", "--tokenizer=~"]).data.tokenizer == str(home)


# YAML


def test_merge_keys_put_values_under_those_of_a_mapping(base: Path) -> None:
    base.write_text(
        "tokenizer: bytes\n"
        "model_config: &small {model_type: gpt2, n_embd: 16, n_head: 2}\n"
        "dataset_options: &wide {<<: *small, n_embd: 32}\n"
        "<<: {seed: 7, tokenizer: words}\n"
    )
    config = parse(["--config", str(base)])
    assert config.architecture.model_config == {"model_type": "gpt2", "n_embd": 16, "n_head": 2}
    assert config.data.dataset_options == {"model_type": "gpt2", "n_embd": 32, "n_head": 2}
    assert (config.data.tokenizer, config.optimization.seed) == ("bytes", 7)


def test_a_mapping_that_merges_may_be_merged_itself_and_the_first_of_a_list_counts(base: Path) -> None:
    base.write_text(
        "model_config: &inner\n  <<: &type {model_type: gpt2, n_head: 1}\n  n_head: 2\n"
        "dataset_options: {<<: [{n_head: 3}, *inner, *type]}\n<<: *inner\n"
    )
    assert read_recipe(base) == {
        "model_config": {"model_type": "gpt2", "n_head": 2},
        "dataset_options": {"model_type": "gpt2", "n_head": 3},
        "model_type": "gpt2",
        "n_head": 2,
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seed: 1\nseed: 2", "the key seed appears twice"),
        ("<<: {seed: 1, seed: 2}", "the key seed appears twice"),
        ("model_config: &a {model_type: gpt2, n_head: 1, n_head: 1}\n<<: *a", "the key n_head appears twice"),
        ("<<: {seed: 1}\n<<: {seed: 2}", "the key << appears twice"),
        ("<<: 5", "expected a mapping or list of mappings"),
        ("model_config: {1: 2}", "the key 1 is not a name"),
    ],
)
def test_keys_that_stand_twice_stay_refused(base: Path, text: str, message: str) -> None:
    base.write_text(text)
    with pytest.raises(UsageError, match=f"not valid YAML: .*{message}"):
        read_recipe(base)


def test_merging_again_and_again_stays_small(base: Path) -> None:
    levels = ["k0: &k0 {seed: 1}", *(f"k{i}: &k{i} {{<<: [{', '.join([f'*k{i - 1}'] * 9)}]}}" for i in range(1, 20))]
    base.write_text("\n".join(levels))
    assert read_recipe(base)["k19"] == {"seed": 1}


# Sections


def test_sections_are_reached_by_their_class_and_fields_by_their_name() -> None:
    from train.extras.long_sequences import Options

    config = Config().changed(packing=True, seed=7)
    assert config.of(Options).packing is True and config.get("packing") is True
    assert config.optimization.seed == config.get("seed") == 7
    assert config.get("no_such_option") is None and config.get("no_such_option", 5) == 5
    assert Config().get("packing") is False
    with pytest.raises(UsageError, match=r"unknown key no_such_option"):
        config.changed(no_such_option=1)


def test_all_unknown_keys_of_a_recipe_are_told_at_once(tmp_path: Path) -> None:
    (tmp_path / "old.yaml").write_text("streaming: false\nlearning_rat: 0.1\n")
    with pytest.raises(UsageError) as error:
        parse(["--config", str(tmp_path / "old.yaml")])
    gone = "unknown key streaming. It is gone, because datasets are read from the disk anyway. Leave it out."
    assert str(error.value).partition(FORK)[0] == f"{gone} unknown key learning_rat. Did you mean learning_rate?"


def test_json_on_the_command_line_is_read_as_json(tmp_path: Path) -> None:
    words = ["--model_config", '{"model_type": "llama", "rms_norm_eps": 1e-6}', "--tokenizer", "bytes"]
    config = parse([*words, "--dataset_options", '{"threshold": 1E-3, "on": "yes"}'])
    assert config.architecture.model_config == {"model_type": "llama", "rms_norm_eps": 1e-6}
    assert config.data.dataset_options == {"threshold": 1e-3, "on": "yes"}


@pytest.mark.parametrize("folder", ["", "  "])
def test_an_empty_output_folder_is_refused(folder: str) -> None:
    with pytest.raises(UsageError, match="output_dir: it is empty"):
        parse(["--output_dir", folder])


def test_an_output_folder_whose_name_is_not_utf_8_is_refused() -> None:
    """Its final/ could not be written, hours later: safetensors and tokenizers take names in UTF-8 alone."""
    with pytest.raises(UsageError, match=r"output_dir: 'caf\\udce9': write the path in UTF-8"):
        parse(["--output_dir", os.fsdecode(b"caf\xe9")])
    assert parse(["--output_dir", "café ✓"]).output.output_dir == "café ✓"


@pytest.mark.parametrize("name", ["dataset", "tokenizer", "resume", "model", "attn_implementation"])
def test_a_text_that_is_empty_is_a_variable_that_was_not_set(name: str) -> None:
    with pytest.raises(UsageError, match=f"{name}: it is empty"):
        parse([f"--{name}", ""])


@pytest.mark.parametrize("name", ["max_steps", "global_batch_size", "max_grad_norm", "dataset_options", "compile"])
@pytest.mark.parametrize("text", ["", " "])
def test_a_number_that_is_empty_is_refused_too(name: str, text: str) -> None:
    with pytest.raises(UsageError, match=f"{name}: '{text}' is not valid"):
        parse([f"--{name}={text}"])


def test_clipping_by_value_takes_the_place_of_clipping_by_norm(tmp_path: Path) -> None:
    for norm in (1.0, None):
        (tmp_path / "recipe.yaml").write_text(dump(Config().changed(tokenizer="bytes", model="x", max_grad_norm=norm)))
        found = parse(["--config", str(tmp_path / "recipe.yaml"), "--max_grad_value", "0.5"]).optimization
        assert (found.max_grad_norm, found.max_grad_value) == (None, 0.5)
    assert parse(["--max_grad_value", "0.5"]).optimization.max_grad_norm is None
    assert parse(["--max_grad_value", "None"]).optimization.max_grad_norm == 1.0


def test_numbers_are_decimal() -> None:
    assert parse(["--seed", "0123", "--max_steps", "010"]).optimization.seed == 123
    assert parse(["--max_steps", "010"]).optimization.max_steps == 10


def test_a_type_of_weights_that_cannot_be_trained_or_would_not_arrive_is_refused() -> None:
    with pytest.raises(UsageError, match="dtype: float16 is for weights that are not trained: give --mixed_precision"):
        parse(["--dtype", "float16"])
    assert parse(["--dtype", "float16", "--adapter", "lora"]).architecture.dtype == "float16"
    with pytest.raises(UsageError, match="dtype: bfloat16 would not reach a function's model"):
        parse(["--dtype", "bfloat16", "--model", "my_model:build", "--tokenizer", "bytes"])
    with pytest.raises(UsageError, match="attn_implementation: eager would not reach a function's model"):
        parse(["--attn_implementation", "eager", "--model", "my_model:build", "--tokenizer", "bytes"])
