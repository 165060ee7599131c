"""``python -m train.memory``: what it understands, refuses and answers."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support import ROOT, Run, printed_and_imported

from train.memory.__main__ import main, read_request
from train.memory.predict import Predictor
from train.records import UsageError

TINY = json.dumps(
    {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
     "num_attention_heads": 2, "vocab_size": 300}
)  # fmt: skip
MODEL = ["--model_config", TINY, "--tokenizer", "bytes", "--max_length", "256", "--global_batch_size", "4"]
MESSAGE = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 22.03 GiB of which 1.10 GiB is free."
)


@pytest.mark.parametrize("words", [["--help"], ["plan", "--help"], ["predict", "--help"], ["explain", "--help"]])
def test_help_answers_without_torch(words: list[str]) -> None:
    printed, imported = printed_and_imported("-m", "train.memory", *words)
    assert "train.memory" in printed
    assert "train.memory" in imported and not imported & {"torch", "numpy", "transformers", "matplotlib"}


def test_flags_of_both_sides_are_told_apart() -> None:
    request = read_request(
        "plan",
        [
            "--device=l4",
            *MODEL,
            "--world-size",
            "2",
            "--micro-batch-size",
            "2",
            "--sharding",
            "fsdp2",
            "--json",
        ],
    )
    question = request.question
    assert question.device.name == "l4" and question.world_size == 2 and question.sharding == "fsdp2"
    assert question.config.optimization.micro_batch_size == 2 and question.vocab_size == 300
    assert request.words == (*MODEL, "--micro_batch_size", "2")
    assert request.json and not request.grid
    grid = ["--grid", "--lengths", "1024,2048", "--micro_batch_sizes=1,2", "--picture", "grid.png"]
    request = read_request("plan", ["--device", "l4", *grid, *MODEL])
    assert request.lengths == (1024, 2048) and request.micro_batch_sizes == (1, 2)
    assert request.picture == Path("grid.png") and not request.json
    assert read_request("predict", ["--json", "--device", "l4", *MODEL]).json


def test_auto_opens_a_question() -> None:
    request = read_request("plan", ["--device", "l4", *MODEL, "--max_length", "auto", "--micro_batch_size=auto"])
    assert request.open == {"max_length", "micro_batch_size"}
    assert "--max_length" not in request.words
    assert request.question.config.optimization.micro_batch_size == 1
    assert not read_request("plan", ["--device", "l4", *MODEL]).open


def test_classes_and_padding() -> None:
    words = ["--device", "l4", *MODEL, "--task", "sequence_classification"]
    assert read_request("predict", words).question.num_labels == 2
    assert read_request("predict", [*words, "--num_labels", "7"]).question.num_labels == 7
    plain = [word.replace("sequence_classification", "causal_lm") for word in words]
    assert read_request("predict", plain).question.num_labels == 0
    with pytest.raises(UsageError, match="num_labels: causal_lm has no classes"):
        read_request("predict", [*plain, "--num_labels", "7"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["fly"], "not one of plan, predict, explain"),
        (["plan", "--device", "zx80"], "unknown device 'zx80'"),
        (["plan", "--device", "l4", "--world_size", "0"], "not a whole number above zero"),
        (["plan", "--device"], "expected one argument"),
        (["plan", "--device", "l4", "--task", "causal_lm"], "no model"),
        (["plan", "--device", "l4", "--task", "poetry", *MODEL], "'poetry' is not one of"),
        (["plan", "--device", "l4", "--config", "nowhere.yaml"], "No such file"),
        (["plan", "--device", "l4", "--lengths", "1024", *MODEL], "need --grid"),
        (["plan", "--device", "l4", "--grid", "--lengths", "1k", *MODEL], "'1k' is not a whole number"),
        (["plan", "--device", "l4", "--grid", *MODEL, "--max_length", "auto"], "--lengths"),
        (["plan", "--device", "l4", "--grid", *MODEL, "--gradient_checkpointing", "auto"], "--grid shows one setting"),
        (["plan", "--device", "l4", "--sharding", "ddp", *MODEL], "--world_size"),
        (["plan", "--device", "l4", "--world_size", "8", "--sharding", "zero3", *MODEL], "invalid choice: 'zero3'"),
        (["plan", "--device", "l4", *MODEL[:-2], "--micro_batch_size", "auto"], "--global_batch_size"),
        (["predict", "--device", "l4", *MODEL, "--max_length", "auto"], "'plan'"),
        (["predict", "--device", "l4", *MODEL, "--micro_batch_size", "3"], "not a multiple"),
        (["explain", "all is well"], "not an out-of-memory message"),
    ],
)
def test_bad_usage_is_said_in_one_line(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.splitlines()[-1].startswith("error: ") and "Traceback" not in error


@pytest.mark.parametrize("field", ["vocab_size", "max_position_embeddings"])
def test_a_size_that_is_no_number_is_told_by_the_model(field: str, capsys: pytest.CaptureFixture[str]) -> None:
    model = ["--model_config", json.dumps({**json.loads(TINY), field: "4k"})]
    assert main(["predict", "--device", "cpu", *MODEL[2:], *model]) == 1
    error = capsys.readouterr().err
    assert f"'{field}' expected int, got str" in error and "Traceback" not in error


BART = {"model_type": "bart", "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16,
        "encoder_attention_heads": 2, "decoder_attention_heads": 2, "decoder_ffn_dim": 16}  # fmt: skip
T5 = {"model_type": "t5", "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2}
ENCODER = {"model_type": "bert", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
           "num_attention_heads": 2, "is_decoder": False}  # fmt: skip
CONVBERT = {"model_type": "convbert", "hidden_size": 32, "embedding_size": 32, "intermediate_size": 64,
            "num_hidden_layers": 1, "num_attention_heads": 4}  # fmt: skip


@pytest.mark.parametrize(
    ("model", "flags", "said"),
    [
        (BART, ["--packing"], "packing: bart cannot keep documents apart that share a row"),
        (ENCODER, [], "model 'bert': its tokens see those that follow"),
    ],
    ids=["packing", "task"],
)
def test_a_model_that_training_refuses_is_not_planned(
    model: dict[str, Any], flags: list[str], said: str, recipe: Path, run_main: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--config", str(recipe), "--model_config", json.dumps(model), *flags]
    trained = run_main(*flags, "--output_dir", recipe.parent / "out")
    told = trained.stderr.splitlines()[-1]
    assert trained.returncode == 2 and told.startswith(f"error: {said}")
    auto = ["--max_length", "auto"]
    for words in (["predict"], ["plan"], ["plan", *auto], ["plan", "--grid", "--lengths", "64"]):
        assert main([*words[:1], "--device", "l4", *flags, *words[1:]]) == 2
        out, error = capsys.readouterr()
        assert error.splitlines()[-1] == told and "predicting" not in error and not out


@pytest.mark.slow
def test_a_model_that_must_not_be_padded_is_planned_with_single_examples(
    recipe: Path, run_main: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--config", str(recipe), "--task", "masked_lm", "--model_config", json.dumps(CONVBERT)]
    more = ["--micro_batch_size", "2", "--output_dir", str(recipe.parent / "out")]
    assert "padding changes its results. Give --micro_batch_size 1" in run_main(*flags, *more).stderr
    assert main(["plan", "--device", "l4", *flags, "--micro_batch_size", "auto"]) == 0
    planned = capsys.readouterr().out
    assert "\n  micro-batch 1, " in planned and " --micro_batch_size 1\n" in planned
    assert "Note: padding changes this model's results" in planned
    grid = ["plan", "--device", "l4", *flags, "--micro_batch_size", "auto", "--grid", "--lengths", "64"]
    assert main(grid) == 0
    table = capsys.readouterr().out
    assert table.splitlines()[4].split() == ["tokens", "1"] and len(table.splitlines()[5].split()) == 2
    assert table.endswith("Note: padding changes this model's results, so each micro-batch is one example.\n")
    assert main([*grid, "--micro_batch_sizes", "1,2"]) == 2
    assert "error: --micro_batch_sizes: padding changes this model's results" in capsys.readouterr().err


def test_a_model_that_is_not_checked_is_predicted(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model_config", json.dumps(ENCODER), "--tokenizer", "bytes", "--max_length", "32", "--device", "l4"]
    assert main(["predict", *words, "--check_model", "False"]) == 0
    assert capsys.readouterr().out.startswith("Fits: bert")


@pytest.mark.slow
@pytest.mark.parametrize("model", [BART, T5], ids=["bart", "t5"])
def test_classifiers_that_look_for_the_end_of_a_text_are_planned(
    model: dict[str, Any], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**model, "vocab_size": 300, "eos_token_id": 7}))
    stored = ["--model", str(tmp_path), "--tokenizer", "bytes", "--task", "sequence_classification"]
    for command in ("predict", "plan"):
        assert main([command, *stored, "--device", "l4", "--max_length", "64", "--global_batch_size", "2"]) == 0
        assert "Fits: " in capsys.readouterr().out


def test_a_flag_that_neither_side_knows_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--device", "l4", *MODEL, "--nosuch", "3"]) == 2
    assert "nosuch" in capsys.readouterr().err


def test_explain(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", MESSAGE]) == 0
    text = capsys.readouterr().out
    assert "2.00 GiB" in text and "22.03 GiB" in text
    for words in ([], ["-"]):
        done = subprocess.run(
            [sys.executable, "-m", "train.memory", "explain", *words], input=MESSAGE, capture_output=True, text=True,
            cwd=ROOT,
        )  # fmt: skip
        assert done.returncode == 0 and done.stdout == text


def test_explain_reads_bytes_of_any_kind_and_writes_for_any_terminal() -> None:
    words = [sys.executable, "-m", "train.memory", "explain"]
    env, message = {**os.environ, "PYTHONIOENCODING": "ascii:strict"}, MESSAGE.replace("2.00 GiB", "20.00 GiB")
    done = subprocess.run(words, input=b"\xff\xfe\n" + message.encode(), capture_output=True, cwd=ROOT, env=env)
    assert done.returncode == 0, done.stderr
    assert b"20.00 GiB more did not fit" in done.stdout and b"\\xd7" in done.stdout


@pytest.mark.slow
def test_what_is_printed_below_python_while_a_model_is_built_is_no_answer(
    tmp_path: Path,
    planner_from_scratch: Any,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """By a planner's process that is not forked, which this is the quick test of, too."""
    monkeypatch.setattr(Predictor, "start", planner_from_scratch)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "noisy.py").write_text(
        "import os\nfrom torch import nn\n\n"
        "class NextByte(nn.Sequential):\n"
        "    def forward(self, input_ids):\n        return super().forward(input_ids)\n\n"
        "def build():\n    os.system('echo building')\n"
        "    return NextByte(nn.Embedding(300, 16), nn.Linear(16, 300))\n"
    )
    flags = ["--device", "cpu", "--model", "noisy:build", "--tokenizer", "bytes", "--max_length", "64"]
    status = main(["predict", *flags])
    said, errors = capfd.readouterr()
    assert status == 0 and said.startswith("Fits: noisy:build"), errors


def test_plan_for_a_card(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--device", "l4", *MODEL[:-1], "1", "--gradient_checkpointing", "full", "--mixed_precision", "bf16"]
    assert main(["plan", *words]) == 0
    text = capsys.readouterr().out
    lines = text.splitlines()
    assert lines[0].startswith("Fits: llama, ") and "1 × 256 tokens on l4" in lines[0]
    assert len(lines) <= 40
    for part in ("parameters", "gradients", "optimizer state", "peak", "has to reserve", "CUDA context", "room"):
        assert part in text
    assert "time, estimated" in text
    assert (
        "accelerate launch --config_file accelerate_configs/single_gpu.yaml --mixed_precision bf16 train/main.py"
        in text
    )
    assert main(["plan", *words, "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    asked, best = values["asked"], values["best"]
    assert asked["fits"] and asked["setting"]["gradient_checkpointing"] == "full"
    assert asked["needed_bytes"] == asked["prediction"]["least_reserved_bytes"] + asked["context_bytes"]
    assert best["setting"]["gradient_checkpointing"] == "none" and best["setting"]["mixed_precision"] == "bf16"
    assert best["setting"]["micro_batch_size"] == 1
    # 2 layers of 64 wide and 300 tokens twice: Adam keeps two numbers for each
    parameters = asked["prediction"]["bytes_by_kind"]["parameters"]
    assert asked["prediction"]["bytes_by_kind"]["optimizer state"] == pytest.approx(2 * parameters, rel=0.02)


@pytest.mark.slow
def test_the_longest_that_is_planned_of_a_stored_roberta_is_what_it_takes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Whose builder refuses 513 of its 514 positions, for a classifier by the padding token of the tokenizer."""
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    stored = {"model_type": "roberta", **sizes, "vocab_size": 300, "max_position_embeddings": 514}
    (tmp_path / "config.json").write_text(json.dumps(stored))
    words = ["--model", str(tmp_path), "--tokenizer", "bytes", "--device", "l4", "--max_length", "auto"]
    assert main(["plan", "--task", "sequence_classification", *words]) == 0
    assert "Longest that fits on l4: 512 tokens." in capsys.readouterr().out


def test_a_reader_that_has_read_enough_is_no_error() -> None:
    words = [sys.executable, "-m", "train.memory", "explain", MESSAGE]
    process = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert "BrokenPipeError" not in process.stderr.read() and process.wait() == 0


def test_predict_on_the_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["predict", "--device", "cpu", *MODEL]
    assert main([*words, "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["fits"] and values["context_bytes"] == 0 and values["prediction"]["seconds"] is None
    assert values["needed_bytes"] == values["prediction"]["peak_bytes"]
    assert main(words) == 0
    text = capsys.readouterr().out
    assert text.startswith("Fits: llama") and "estimated" not in text and "this machine's memory" in text
    assert main(["predict", "--device", "mps 16GiB", *MODEL]) == 0
    assert "this machine's memory" not in capsys.readouterr().out


@pytest.mark.parametrize("picture", ["grid.pdf", "missing/grid.png", ".", "png"])
def test_a_picture_that_cannot_be_drawn_is_refused_before_anything_is_predicted(picture: str) -> None:
    with pytest.raises(UsageError, match=re.escape(f"--picture {picture}: give a file that ends in .png")):
        read_request("plan", ["--device", "l4", *MODEL, "--grid", "--picture", picture])


def test_a_device_that_is_empty_is_not_this_machine() -> None:
    with pytest.raises(UsageError, match="device"):
        read_request("predict", ["--device", "", *MODEL])


PAIRS = """
import json, torch
from train.tasks import causal_lm, pad


class Task(causal_lm.Task):
    example_columns = ("tokens", "length", "other")

    def cut(self, text, ids, label, tokenizer):
        tokens = json.loads(text)
        yield {"tokens": tokens, "length": len(tokens) - 1, "other": tokens}

    def collate(self, examples, seed, pad_id):
        batch = super().collate(examples, seed, pad_id)
        batch.inputs["other_ids"] = pad([torch.tensor(e["other"][:-1]) for e in examples], pad_id)
        return batch
"""


def test_a_plan_says_where_it_has_to_guess_what_a_task_makes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "pairs.py").write_text(PAIRS)
    words = ["predict", "--device", "cpu", *MODEL, "--task", f"{tmp_path / 'pairs.py'}:Task"]
    guess = "Note: plain tokens and labels are assumed: a task with others needs a longest_example()."
    assert main(words) == 0
    assert guess in capsys.readouterr().out
    longest = "{'tokens': [3] * 257, 'length': 256, 'other': [3] * 257}"
    (tmp_path / "known.py").write_text(f"{PAIRS}\n    def longest_example(self):\n        return {longest}\n")
    assert main([*words, "--task", f"{tmp_path / 'known.py'}:Task"]) == 0
    assert guess not in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("is_safe", ["", "1"])
def test_a_prediction_imports_nothing_from_the_folder_it_is_made_in(tmp_path: Path, is_safe: str) -> None:
    for name in ("token.py", "torch.py"):
        (tmp_path / name).write_text("raise SystemExit('shadow')")
    words = [ROOT / "train" / "memory" / "__main__.py", "predict", "--config", ROOT / "recipes" / "quickstart.yaml"]
    words += ["--device", "l4", "--vocab_size", "4096", "--json"]
    environment = {**os.environ, "PYTHONSAFEPATH": is_safe, "PYTHONPATH": ""}
    done = subprocess.run([sys.executable, *words], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert json.loads(done.stdout)["prediction"]["peak_bytes"] > 2**20, done.stderr
