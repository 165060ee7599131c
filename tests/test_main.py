"""Runs of ``train/main.py`` as a user starts them: outputs, resume, wrong input."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from faults.processes import started
from made_tokenizers import tokenizer_of
from safetensors.torch import load_file
from support import ROOT, Run, checkpoint_digests, sampled

from train.checkpoint import verify
from train.config import fields, parse
from train.figures import read_metrics
from train.main import main
from train.records import EXIT_DONE, EXIT_ERROR, EXIT_STOPPED, EXIT_USAGE, IGNORE, UsageError, UserError
from train.tasks import load_task

STEPS = 6
"""Two epochs of 20 examples in global batches of 8: windows of 8, 8 and 4."""


def train(recipe: Path, output: Path, *flags: Any) -> int:
    return main(["--config", str(recipe), "--output_dir", str(output), *map(str, flags)])


def trained_losses(output: Path) -> dict[int, float]:
    return {row["step"]: row["loss"] for row in read_metrics(output / "metrics.jsonl") if row["kind"] == "train"}


def test_a_run_that_is_made_longer_says_that_the_learning_rate_jumps(recipe: Path, tmp_path: Path) -> None:
    flags = ("--lr_scheduler", "linear", "--warmup_steps", 0, "--learning_rate", 1e-3)
    notes = []
    for steps in (2, 4):
        assert train(recipe, tmp_path, "--max_steps", steps, *flags) == EXIT_DONE
        said = json.loads((tmp_path / "summary.json").read_text())["notes"]
        notes.append([line for line in said if line.startswith("learning rate")])
    jump = "learning rate: step 2 had 5.00e-04, with the present settings it has 7.50e-04"
    assert notes == [[], [jump]]


@pytest.mark.parametrize(
    ("shape", "why"),
    [
        ("{model_type: llama, num_attention_heads: 4, num_key_value_heads: 3", "size of tensor a (4) must match"),
        ("{model_type: qwen2, num_attention_heads: 4", "size of tensor a (4) must match"),  # its default: 32 of keys
        (
            "{model_type: mixtral, num_attention_heads: 4, num_key_value_heads: 2, num_local_experts: 2, "
            "num_experts_per_tok: 4",
            "selected index k out of range",
        ),
    ],
)
def test_sizes_of_a_model_that_do_not_fit_each_other_end_in_one_message(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], shape: str, why: str
) -> None:
    shape += ", hidden_size: 32, intermediate_size: 64, num_hidden_layers: 1}"
    assert train(recipe, tmp_path, "--model_config", json.dumps(yaml.safe_load(shape))) == EXIT_ERROR
    said = capsys.readouterr().err
    assert re.search(r"error: model_config: (llama|qwen2|mixtral) fails in \w+\.py:\d+: ", said)
    assert why in said and "num_key_value_heads?" in said and "Traceback" not in said


@pytest.mark.charts
def test_leaves_everything_that_it_promises(recipe: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    output = tmp_path / "run"
    assert train(recipe, output, "--eval_every_steps", 2, "--gradient_checkpointing", "full") == EXIT_DONE
    summary = json.loads((output / "summary.json").read_text())
    assert summary["steps"] == STEPS
    assert summary["tokens_per_second"] > 0
    assert 2**18 < summary["peak_allocated_bytes"] < summary["peak_resident_bytes"]
    assert summary["seconds_to_first_step"] > 0
    rows = read_metrics(output / "metrics.jsonl")
    assert [row["step"] for row in rows if row["kind"] == "train"] == [1, 2, 3, 4, 5, 6]
    assert [row["step"] for row in rows if row["kind"] == "evaluation"] == [2, 4, 6]
    assert summary["result"]["validation"]["loss"] == [r for r in rows if r["kind"] == "evaluation"][-1]["loss"]
    assert verify(output / "checkpoints" / "step-00000006") is None
    report = (output / "report.html").read_text()
    assert report.count("<path") > 20 and report.count("⟪") == 1  # of the charts, and the seam of the sample
    model = AutoModelForCausalLM.from_pretrained(output / "final")
    tokenizer: Any = AutoTokenizer.from_pretrained(output / "final")
    assert model.config.vocab_size == len(tokenizer)
    first, *rest = tokenizer("héllo")["input_ids"]
    assert first == tokenizer.bos_token_id and tokenizer.decode(rest) == "héllo"  # the prompt of a document's beginning
    assert (output / "final" / "README.md").read_text().startswith("---")
    modes = {path.name: path.stat().st_mode for path in (output / "final").iterdir()}
    assert set(modes.values()) == {modes["config.json"]}, modes


def test_saved_config_runs_the_same_again(recipe: Path, tmp_path: Path) -> None:
    assert train(recipe, tmp_path / "one", "--learning_rate", "0.02") == EXIT_DONE
    assert main(["--config", str(tmp_path / "one" / "config.yaml"), "--output_dir", str(tmp_path / "two")]) == EXIT_DONE
    assert checkpoint_digests(tmp_path / "one", STEPS) == checkpoint_digests(tmp_path / "two", STEPS)


def test_a_run_may_be_in_a_folder_next_to_the_current_one(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert train(recipe, Path("..", "runs", "one"), "--max_steps", 2) == EXIT_DONE
    assert train(recipe, Path("..", "runs", "one"), "--max_steps", 3) == EXIT_DONE
    run = tmp_path / "runs" / "one"
    assert {"checkpoints", "final", "report.html", "summary.json"} <= {path.name for path in run.iterdir()}
    assert not list((tmp_path / "here").iterdir())


def test_runs_of_one_process_may_differ_in_precision_and_accumulation(recipe: Path, tmp_path: Path) -> None:
    """As in a notebook, or in a search for settings; accelerate alone refuses another precision."""
    settings = {"first": ("no", 8), "other": ("bf16", 4), "again": ("no", 8)}
    for name, (precision, size) in settings.items():
        flags = ("--mixed_precision", precision, "--global_batch_size", size)
        assert train(recipe, tmp_path / name, *flags) == EXIT_DONE
    found = {name: json.loads((tmp_path / name / "summary.json").read_text()) for name in settings}
    assert [(s["mixed_precision"], s["global_batch_size"]) for s in found.values()] == [
        ("fp32", 8),
        ("bf16", 4),
        ("fp32", 8),
    ]
    digests = {name: checkpoint_digests(tmp_path / name, found[name]["steps"]) for name in settings}
    assert digests["first"] == digests["again"] != digests["other"]


@pytest.mark.parametrize("task", ["masked_lm", pytest.param("sequence_classification", marks=pytest.mark.slow)])
def test_other_tasks_train_and_resume_exactly(recipe: Path, tmp_path: Path, task: str) -> None:
    documents = tmp_path / "labelled.jsonl"
    rows = [{"text": f"{n % 3} is the label of " + "abc " * (n % 5), "label": n % 3} for n in range(25)]
    documents.write_text("".join(json.dumps(row) + "\n" for row in rows))
    bert = (
        "  {model_type: bert, hidden_size: 16, num_hidden_layers: 2, num_attention_heads: 2, intermediate_size: 32, "
        "max_position_embeddings: 64}"
    )
    lines = recipe.read_text().splitlines()
    recipe.write_text("\n".join(bert if "model_type" in line else line for line in lines))
    flags = ("--task", task, "--dataset", documents)
    assert train(recipe, tmp_path / "whole", *flags) == EXIT_DONE
    first = ("--num_epochs", "None", "--max_steps", 4)
    assert train(recipe, tmp_path / "pieces", *flags, *first, "--lr_scheduler", "constant") == EXIT_DONE
    assert train(recipe, tmp_path / "steady", *flags, "--lr_scheduler", "constant") == EXIT_DONE
    assert train(recipe, tmp_path / "pieces", *flags, "--lr_scheduler", "constant") == EXIT_DONE
    assert checkpoint_digests(tmp_path / "pieces", STEPS) == checkpoint_digests(tmp_path / "steady", STEPS)
    assert all(loss < 10 for loss in trained_losses(tmp_path / "whole").values())


def own_losses(task: str, output: Path, texts: list[str], labels: list[str]) -> list[float]:
    """Losses of the targets of ``texts`` by ``final/`` alone; the task only says which tokens masked_lm hides."""
    import torch
    import transformers

    kind = load_task(task)
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(output / "final")
    model: Any = getattr(transformers, kind.auto_class).from_pretrained(output / "final").eval()
    losses: list[float] = []
    for number, (text, label) in enumerate(zip(texts, labels, strict=True)):
        ids = tokenizer(text, truncation=task == "sequence_classification")["input_ids"]
        if task == "causal_lm":
            inputs, targets = torch.tensor(ids), torch.tensor([*ids[1:], tokenizer.eos_token_id])
        elif task == "masked_lm":
            special = [token in tokenizer.all_special_ids for token in ids]
            known = {"id": number, "vocab_size": len(tokenizer), "mask_id": tokenizer.mask_token_id}
            example = {"tokens": ids, "special": special, **known}
            inputs, targets = kind(parse(["--config", str(output / "config.yaml")])).inputs_and_labels(example, (0, 0))
        else:
            inputs, targets = torch.tensor(ids), torch.tensor([model.config.label2id[label]])
        with torch.no_grad():
            logits = model(inputs[None]).logits.reshape(len(targets), -1)
        found = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
        losses += found[targets != IGNORE].tolist()
    return losses


@pytest.mark.parametrize(
    ("task", "flags"),
    [
        ("causal_lm", ()),
        ("masked_lm", ()),
        ("sequence_classification", ()),
        ("sequence_classification", ("--truncation", "keep_tail")),
    ],
)
@pytest.mark.parametrize("tokenizer", ["bytes", "gpt2"])
def test_final_used_by_itself_gives_the_figure_that_is_reported(
    recipe: Path, tmp_path: Path, task: str, flags: tuple[str, ...], tokenizer: str
) -> None:
    if tokenizer == "gpt2":  # of a class of its own, that adds no marks and has none for padding
        from transformers import GPT2Tokenizer

        marks: dict[str, Any] = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|end|>")
        marks |= {"mask_token": "<|mask|>"} if task == "masked_lm" else {}
        GPT2Tokenizer(vocab=tokenizer_of("bytes").get_vocab(), merges=[], **marks).save_pretrained(tmp_path / "gpt2")
        tokenizer = str(tmp_path / "gpt2")
    texts = [f"{n % 3} is the label of " + "abc " * (n % 5) for n in range(15)]
    if task == "sequence_classification":
        texts = [f"{text} and {'more ' * (n % 3 * 12)}{n % 3}" for n, text in enumerate(texts)]  # some are cut
    labels = [f"kind {n % 3}" for n in range(15)]
    for name, part in (("train", slice(0, 10)), ("held_out", slice(10, 15))):
        rows = [{"text": text, "label": label} for text, label in zip(texts[part], labels[part], strict=True)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = ("--dataset", tmp_path / "train.jsonl", "--validation_dataset", tmp_path / "held_out.jsonl")
    options = ("--task", task, "--tokenizer", tokenizer, *flags, "--num_epochs", 3, "--mixed_precision", "no")
    if task == "masked_lm":
        bert = {"model_type": "bert", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        options += ("--model_config", json.dumps({**bert, "intermediate_size": 32}))
    assert train(recipe, tmp_path / "run", *data, *options) == EXIT_DONE
    reported = json.loads((tmp_path / "run" / "summary.json").read_text())["result"]["validation"]["loss"]
    losses = own_losses(task, tmp_path / "run", texts[10:], labels[10:])
    assert sum(losses) / len(losses) == pytest.approx(reported, rel=1e-5)


def test_learns(recipe: Path, tmp_path: Path) -> None:
    assert train(recipe, tmp_path / "run", "--num_epochs", 12) == EXIT_DONE
    losses = trained_losses(tmp_path / "run")
    assert losses[36] < 0.7 * losses[1]


def test_stopped_after_every_step_and_resumed_equals_uninterrupted(recipe: Path, tmp_path: Path) -> None:
    """One process after another, each stopped by a signal after one step: weights, optimizer, data order, dropout."""
    whole, pieces = tmp_path / "whole", tmp_path / "pieces"
    flags = ("--eval_every_steps", 2, "--dataloader_num_workers", 2)
    assert train(recipe, whole, *flags) == EXIT_DONE
    for stop in range(1, STEPS):
        assert train(recipe, pieces, *flags, "--max_steps", STEPS, *stopping_after(stop)) == EXIT_STOPPED
    assert train(recipe, pieces, *flags) == EXIT_DONE
    assert checkpoint_digests(whole, STEPS) == checkpoint_digests(pieces, STEPS)
    assert trained_losses(whole) == trained_losses(pieces)
    evaluations = [
        {r["step"]: r["loss"] for r in read_metrics(run / "metrics.jsonl") if r["kind"] == "evaluation"}
        for run in (whole, pieces)
    ]
    assert evaluations[0] == evaluations[1]
    assert sorted(evaluations[0]) == [2, 4, 6]


@pytest.fixture(autouse=True)
def _own_signals() -> Any:
    """Signals that a test raises in this process find their handlers as they were."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def stopping_after(step: int) -> tuple[str, ...]:
    """Makes the run send itself SIGTERM during the given step."""
    import train.loop

    plain = train.loop.seed_step

    def seed_and_signal(seed: int, number: int, rank: int) -> None:
        if number == step - 1:
            train.loop.seed_step = plain
            signal.raise_signal(signal.SIGTERM)
        plain(seed, number, rank)

    train.loop.seed_step = seed_and_signal  # type: ignore
    return ()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_signal_ends_with_a_checkpoint_and_its_status(recipe: Path, tmp_path: Path, number: int) -> None:
    output = tmp_path / "run"
    words = ("--config", recipe, "--output_dir", output, "--num_epochs", "10000")
    metrics = output / "metrics.jsonl"
    with started(words, tmp_path / "logs") as job:
        job.wait_until(lambda: metrics.exists() and metrics.stat().st_size)
        job.signal(number)
        [ended] = job.end()
    assert ended.status == EXIT_STOPPED, ended.said
    name = signal.Signals(number).name
    assert ended.said.count(f"{name}: the run stops at the next safe point, with a checkpoint") == 1
    assert ("to end it at once, interrupt again or kill -9 " in ended.said) == (number == signal.SIGINT)
    assert f"stopped by {name}" in ended.said
    [checkpoint] = (output / "checkpoints").iterdir()
    assert verify(checkpoint) is None


def test_the_first_process_of_a_host_has_time_to_tell_a_usage_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A launcher ends the others as soon as one has ended."""

    def refuse(*_: Any) -> None:
        raise UserError("a rank's own mistake")

    waited: list[float] = []
    monkeypatch.setattr("train.main.time.sleep", waited.append)
    for rank, says in (("0", True), ("1", False)):
        monkeypatch.setenv("LOCAL_RANK", rank)
        assert main(["--learning_rat", "1"]) == EXIT_USAGE
        assert ("learning_rat" in capsys.readouterr().err) is says
    assert waited == [3]
    monkeypatch.setattr("train.main.parse", refuse)
    for rank in ("0", "1"):  # another error may be this rank's alone, so it is told in the end
        monkeypatch.setenv("LOCAL_RANK", rank)
        assert main([]) == EXIT_ERROR
        assert "rank's own mistake" in capsys.readouterr().err
    assert waited == [3, 3]


def test_finished_run_is_not_done_again_but_can_be_made_longer_or_started_again(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "run"
    assert train(recipe, output) == EXIT_DONE
    before = (output / "summary.json").read_bytes()
    assert train(recipe, output) == EXIT_DONE
    assert "nothing to do" in capsys.readouterr().out
    assert (output / "summary.json").read_bytes() == before
    assert train(recipe, output, "--max_steps", STEPS + 2) == EXIT_DONE
    assert sorted(trained_losses(output)) == list(range(1, STEPS + 3))
    assert train(recipe, output, "--resume", "never", "--max_steps", 2) == EXIT_DONE
    assert sorted(trained_losses(output)) == [1, 2]
    assert sorted(trained_losses(output / "previous-1")) == list(range(1, STEPS + 3))


def test_finished_run_is_evaluated_on_other_validation_data(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output, lasts = tmp_path / "run", list[dict[str, Any]]()
    for number, name in enumerate(("one", "two", "two")):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"text": f"{name} " * 9}) + "\n")
        assert train(recipe, output, "--validation_dataset", tmp_path / f"{name}.jsonl") == EXIT_DONE
        lasts.append(json.loads((output / "summary.json").read_text()))
        said = capsys.readouterr().out
        assert ("nothing to do" in said) == (number == 2)
        assert sorted(trained_losses(output)) == list(range(1, lasts[0]["steps"] + 1))
    one, two, again = (last["result"]["validation"] for last in lasts)
    assert two == again and one["data"] != two["data"] and one["loss"] != two["loss"]


def test_damaged_newest_checkpoint_is_skipped_and_named(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, damaged = tmp_path / "whole", tmp_path / "damaged"
    assert train(recipe, whole) == EXIT_DONE
    assert train(recipe, damaged, "--save_every_steps", 2) == EXIT_DONE
    weights = damaged / "checkpoints" / "step-00000006" / "model-00000.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(bytes(data))
    capsys.readouterr()
    assert train(recipe, damaged, "--save_every_steps", 2) == EXIT_DONE
    out = capsys.readouterr().out
    assert "damaged checkpoint skipped: step-00000006: model-00000.safetensors was altered" in out
    assert "at step 4" in out
    assert checkpoint_digests(whole, STEPS) == checkpoint_digests(damaged, STEPS)


def test_resuming_with_other_settings_names_them(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(recipe, tmp_path / "run", "--max_steps", 2) == EXIT_DONE
    assert train(recipe, tmp_path / "run", "--seed", 7) == EXIT_ERROR
    assert "seed: was 42, is 7" in capsys.readouterr().err
    assert parse(["--config", str(tmp_path / "run" / "config.yaml")]).optimization.seed == 42
    assert train(recipe, tmp_path / "run", "--seed", 7, "--allow_changes_on_resume", "True") == EXIT_DONE


def test_a_warmup_of_a_recipe_that_is_longer_than_the_run_is_told(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe.write_text(recipe.read_text() + "warmup_steps: 60\n")
    assert train(recipe, tmp_path / "run", "--learning_rate", 0.01) == EXIT_DONE
    assert "learning rate: at most 1.00e-03 of 1.00e-02, because warm-up takes 60 steps" in capsys.readouterr().out


def test_early_stopping_ends_and_stays_ended(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # Nothing improves at a learning rate of nothing: the first evaluation is the best, then patience runs out.
    flags = ("--learning_rate", "1e-30", "--eval_every_steps", 1, "--early_stopping_patience", 2)
    assert train(recipe, tmp_path / "run", *flags) == EXIT_DONE
    assert max(trained_losses(tmp_path / "run")) == 3
    assert "stopped early: the last 2 evaluations did not improve loss" in capsys.readouterr().out
    assert train(recipe, tmp_path / "run", *flags) == EXIT_DONE
    assert "nothing to do" in capsys.readouterr().out


def test_best_checkpoint_is_kept_and_loaded_at_the_end(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # The loss falls from step to step; called the better the greater, it is best after the first.
    flags = ("--eval_every_steps", 1, "--greater_is_better", "True", "--save_total_limit", 1)
    assert train(recipe, tmp_path / "run", *flags, "--load_best_model_at_end") == EXIT_DONE
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    best = summary["best_step"]
    assert best == summary["final_step"] == 1
    assert "final/ has the best weights, of step 1" in capsys.readouterr().out
    assert sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir()) == ["step-00000001", "step-00000006"]
    stored = load_file(tmp_path / "run" / "checkpoints" / f"step-{best:08d}" / "model-00000.safetensors")
    final = load_file(tmp_path / "run" / "final" / "model.safetensors")
    assert all((final[name] == tensor).all() for name, tensor in stored.items() if name in final)
    evaluated = {r["step"]: r for r in read_metrics(tmp_path / "run" / "metrics.jsonl") if r["kind"] == "evaluation"}
    assert summary["result"]["validation"]["loss"] == evaluated[best]["loss"]


@pytest.mark.parametrize(
    ("flags", "status", "message"),
    [
        (["stray"], EXIT_USAGE, "unknown argument stray. train/main.py --help lists all."),
        (["max_steps", "3"], EXIT_USAGE, "unknown argument max_steps. Did you mean --max_steps?"),
        (["recipes/quickstart.yaml"], EXIT_USAGE, "A recipe is given as --config FILE."),
        (["x" * 5000], EXIT_USAGE, "unknown argument x"),
        (["--learning_rat", "1"], EXIT_USAGE, "unknown flag --learning_rat. Did you mean --learning_rate?"),
        (["--micro_batch_size", "two"], EXIT_USAGE, "micro"),
        (["--task", "translation"], EXIT_USAGE, "causal_lm, masked_lm, sequence_classification"),
        (["--micro_batch_size", "3"], EXIT_USAGE, "not a multiple"),
        (["--max_grad_value", "1", "--max_grad_norm", "1"], EXIT_USAGE, "max_grad_norm and max_grad_value"),
        (["--config", "nowhere.yaml"], EXIT_USAGE, "nowhere.yaml"),
        (["--dataset", "nowhere.jsonl"], EXIT_ERROR, "nowhere.jsonl"),
        (["--text_column", "body"], EXIT_ERROR, "--text_column"),
        (["--model", "nowhere/at-all", "--tokenizer", "bytes"], EXIT_ERROR, "nowhere/at-all"),
        (["--tokenizer", "nowhere/at-all"], EXIT_ERROR, "nowhere/at-all"),
        (
            ["--model_config", '{"model_type": "gpt2", "vocab_size": 10, "n_embd": 8, "n_head": 1}'],
            EXIT_ERROR,
            "tokens",
        ),
        (["--model_config", '{"model_type": "gpt2", "n_positions": 16}'], EXIT_ERROR, "16 positions"),
        (["--resume", "nowhere"], EXIT_ERROR, "resume: nowhere is not a checkpoint: give auto, or"),
        (["--metric_for_best", "bleu"], EXIT_ERROR, "bleu"),
    ],
)
def test_wrong_input_gets_one_message_and_its_status(
    recipe: Path,
    tmp_path: Path,
    flags: list[str],
    status: int,
    message: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    try:
        got = train(recipe, tmp_path / "run", *flags)
    except SystemExit as ended:
        got = ended.code
    error = capfd.readouterr().err
    assert got == status
    assert message in error
    assert "Traceback" not in error


def test_a_length_beyond_the_models_positions_is_told_before_anything_is_tokenised(
    recipe: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = ("--model_config", '{"model_type": "gpt2", "n_positions": 16}', "--max_length", 61)
    assert train(recipe, tmp_path / "run", *model) == EXIT_ERROR
    said = capfd.readouterr().err
    assert "max_length: 61 is more than the model's 16 positions" in said and "Tokenising" not in said


def test_a_model_that_cannot_learn_the_task_is_told_before_anything_is_tokenised(
    recipe: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert train(recipe, tmp_path / "run", "--task", "masked_lm") == EXIT_ERROR
    said = capfd.readouterr().err
    assert "model: transformers cannot build gpt2 for masked_lm: give another model or task." in said
    assert "Tokenising" not in said


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("learning_rat: 0.1", "unknown key learning_rat. Did you mean learning_rate?"),
        ("learning_rate: 1e-4", "learning_rate: '1e-4' is not valid"),
        ("max_steps: 2.5", "max_steps: 2.5 is not valid: expected a whole number or null"),
        ("max_steps: true", "max_steps: True is not valid"),
        ("mixed_precision: no", "in quotes"),
        ("packing: 'yes'", "expected true or false"),
        ("seed: 1\nseed: 2", "the key seed appears twice"),
        ("- a\n- b", "expected 'key: value' lines"),
        ("a: [", "not valid YAML"),
        ("x: !!python/object/apply:os.system ['true']", "not valid YAML"),
        ("warmup_steps: 5\nwarmup_ratio: 0.1", "warmup_steps and warmup_ratio"),
        ("max_steps: 5\nnum_epochs: 1", "max_steps and num_epochs"),
        ("max_tokens_per_micro_batch: 2048", "give global_batch_size"),
        ("max_tokens_per_micro_batch: 512\nglobal_batch_size: 4", "does not hold one example of max_length 1024"),
        ("max_tokens_per_micro_batch: 2048\nglobal_batch_size: 4\nmicro_batch_size: 2", "neither micro_batch_size"),
        (
            "max_grad_norm: -1.0",
            "max_grad_norm: -1.0 is not valid: it must be above 0; null (None on the command line) turns it off",
        ),
        ("early_stopping_patience: 2", "needs eval_every_steps"),
        ("grad_norm_type: 2", "expected one of 1, 2, inf (in quotes, else YAML reads a number"),
        (f"dataset: {'a' * 300}", "dataset: aaaa"),  # longer than a file's name can be
        (f"model_config:\nmodel: /{'b' * 300}", "model: /bbbb"),
        (f"resume: {'c' * 300}", "resume: cccc"),
        ("dataset: stdlib\nvalidation_split: test", "validation_split: stdlib does not have splits: leave it out"),
        ("model_config: {hidden_size: 8}", "model_type is missing"),
        ("learning_rate: .nan", "learning_rate: nan is not valid"),
        ("learning_rate: .inf", "learning_rate: inf is not valid: it must be above 0 and finite."),
    ],
)
def test_wrong_recipe_stops_before_anything_is_loaded(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "wrong.yaml"
    base = (
        "" if "model_config" in text or text.startswith("-") else "model_config: {model_type: gpt2}\ntokenizer: bytes\n"
    )
    path.write_text(base + text)
    assert main(["--config", str(path)]) == EXIT_USAGE
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ((), False),
        (("--load_best_model_at_end",), True),
        (("--load-best-model-at-end",), True),
        (("--load_best_model_at_end", "False"), False),
        (("--load_best_model_at_end=true",), True),
        (("--load_best_model_at_end", "--no-load_best_model_at_end"), False),
        (("--no-load-best-model-at-end",), False),
    ],
)
def test_a_switch_needs_no_value_and_can_be_turned_off(recipe: Path, flags: tuple[str, ...], expected: bool) -> None:
    config = parse(["--config", str(recipe), "--eval_every_steps", "1", *flags, "--seed", "3"])
    assert config.get("load_best_model_at_end") is expected
    assert config.optimization.seed == 3


def test_a_value_may_begin_with_a_minus(recipe: Path) -> None:
    config = parse(["--config", str(recipe), "--output_dir", "-1runs", "--no-rehearse"])
    assert config.output.output_dir == "-1runs" and config.get("rehearse") is False
    with pytest.raises(UsageError, match=r"unknown flag --no_rehearse\. Did you mean --rehearse\?"):
        parse(["--config", str(recipe), "--no-rehearse=False"])


def test_both_spellings_and_both_ways_to_give_a_value(recipe: Path) -> None:
    config = parse(["--config", str(recipe), "--learning-rate", "0.5", "--max_grad_norm=2", "--num-epochs=3"])
    assert config.optimization.learning_rate == 0.5
    assert config.optimization.max_grad_norm == 2
    assert config.optimization.num_epochs == 3


def test_command_line_goes_over_recipe_over_defaults(recipe: Path) -> None:
    config = parse(["--config", str(recipe), "--gradient_accumulation_steps", "2", "--model", "some/model"])
    assert config.data.max_length == 64
    assert config.optimization.seed == 42
    assert config.optimization.gradient_accumulation_steps == 2
    assert config.optimization.global_batch_size is None
    assert (config.architecture.model, config.architecture.model_config) == ("some/model", None)
    assert config.data.tokenizer is None


def test_without_arguments_the_quickstart_runs() -> None:
    recipe = yaml.safe_load((ROOT / "recipes" / "quickstart.yaml").read_text())
    config = parse([])
    assert config.output.output_dir == recipe["output_dir"]
    assert config.architecture.model_config == recipe["model_config"]
    assert parse(["--max_steps", "3"]).optimization.max_steps == 3


def test_dataset_without_model_says_what_to_give(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--dataset", "mine.jsonl"]) == EXIT_USAGE
    assert "--config recipes/quickstart.yaml" in capsys.readouterr().err


def test_help_is_complete(run_main: Run) -> None:
    done = run_main("--help")
    assert done.returncode == 0
    for flag in ("--config", *(f"--{name}" for name in fields())):
        assert f"{flag} " in done.stdout


def test_fp16_on_a_cpu_is_replaced_and_told(recipe: Path, tmp_path: Path, run_main: Run) -> None:
    from train.extras.hardware import cpu_has_fast_bf16

    done = run_main("--config", recipe, "--output_dir", tmp_path, "--mixed_precision", "fp16", "--max_steps", 1)
    assert done.returncode == EXIT_DONE, done.stderr
    used = "bf16" if cpu_has_fast_bf16() else "fp32"
    assert f"precision {used}\nprecision: {used} (this CPU has no fast fp16" in done.stdout
    assert json.loads((tmp_path / "summary.json").read_text())["mixed_precision"] == used


def test_launcher_and_recipe_that_disagree_are_both_named(recipe: Path, tmp_path: Path, run_main: Run) -> None:
    done = run_main(
        "--config",
        recipe,
        "--output_dir",
        tmp_path,
        "--mixed_precision",
        "fp16",
        env={"ACCELERATE_MIXED_PRECISION": "bf16"},
    )
    assert done.returncode == EXIT_USAGE
    assert "the training configuration says fp16, the launch configuration bf16" in done.stderr


def test_accelerate_launch_runs_the_script(
    recipe: Path, tmp_path: Path, run_main: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.setenv("OMP_DISPLAY_ENV", "TRUE")
    launch = str(Path(sys.executable).with_name("accelerate"))
    prefix = (launch, "launch", "--config_file", str(ROOT / "accelerate_configs" / "cpu.yaml"))
    done = run_main("--config", recipe, "--output_dir", tmp_path / "run", "--max_steps", 1, prefix=prefix)
    assert done.returncode == EXIT_DONE, done.stderr
    assert (tmp_path / "run" / "final" / "model.safetensors").exists()
    if sys.platform == "linux":  # torch's threads do not take a core from other processes while they wait
        assert "OMP_WAIT_POLICY = 'PASSIVE'" in done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="a shell of POSIX, and Linux's /dev/full")
@pytest.mark.slow
@pytest.mark.parametrize("output", sampled(["| head -n 1 >/dev/null", ">&-", ">/dev/full", ">&- 2>&-"], 2))
def test_a_run_outlives_whoever_reads_what_it_says(recipe: Path, tmp_path: Path, output: str) -> None:
    quick = "--rehearse False --predict_memory False"
    command = f"{sys.executable} train/main.py --config {recipe} --output_dir {tmp_path / 'run'} {quick} {output}"
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {command}"], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (EXIT_DONE, ""), done.stderr
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "done"
    assert "Traceback" not in done.stderr and "BrokenPipe" not in done.stderr
