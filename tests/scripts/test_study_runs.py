"""Studies whose cells are real runs: what they compare, what they say, and real ones."""

from __future__ import annotations

import importlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from argparse import Namespace
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from faults.processes import script
from support import ROOT, takes_minutes, write_recipe

from scripts.benchmarks import study
from scripts.benchmarks.study import ablation, batch_size, learning_rate, trials
from scripts.benchmarks.study.trials import DIVERGED, DONE, FAILED, OUT_OF_MEMORY, Interval, Outcome
from train.config import parse
from train.optim import num_warmup_steps
from train.records import EXIT_STOPPED, UsageError, arithmetic_of

RESULTS = ROOT / "docs" / "results"


def outcome(variant: str, seed: int, value: float, **more: Any) -> Outcome:
    metrics = {"bits_per_byte": value, "loss": 2 * value, "accuracy": value}
    own = {"metric_name": "bits_per_byte", "peak_bytes": 2**30, "tokens_per_second": 100.0, "seconds": 1.0}
    return Outcome(variant, seed, DONE, **{"metrics": metrics, **own, **more})  # type: ignore


def results(*outcomes: Outcome, target_loss: float | None = None) -> dict[str, Any]:
    return {"flags": {"target_loss": target_loss}, "outcomes": [asdict(o) for o in outcomes]}


# ---- what is compared ------------------------------------------------------------------------------------------------


def test_intervals_are_those_of_a_table_of_student() -> None:
    found = trials.interval([1.0, 2.0, 3.0])
    assert found.mean == 2.0 and found.high - 2 == pytest.approx(4.303 / math.sqrt(3), rel=1e-4)
    assert not trials.interval([1.0]).is_shown and not trials.interval([-1.0, 1.0]).is_shown
    assert trials.interval([1.0, 1.1, 1.05]).is_shown
    for freedom, quantile in ((1, 12.706), (15, 2.131), (16, 2.1199), (20, 2.0860), (31, 2.0395), (120, 1.9799)):
        assert trials.t95(freedom) == pytest.approx(quantile, abs=0.001)


@pytest.mark.parametrize(
    ("design", "variants"),
    [
        ("each", ["baseline", "a", "b", "c", "a + b + c"]),
        ("left_out", ["baseline", "a + b + c", "b + c", "a + c", "a + b"]),
        ("all", ["baseline", "a", "b", "c", "a + b", "a + c", "b + c", "a + b + c"]),
    ],
)
def test_designs(design: str, variants: list[str]) -> None:
    assert list(ablation.variants_of(["a", "b", "c"], design)) == variants


def test_one_toggle_is_one_variant() -> None:
    assert list(ablation.variants_of(["a"], "each")) == ["baseline", "a"]


@pytest.mark.parametrize("text", ["loss", "loss:", "loss:loss", ":loss=full", "loss:loss=full,", "a:b=1,c"])
def test_a_toggle_written_otherwise_is_named(text: str) -> None:
    with pytest.raises(UsageError, match="write NAME:FLAG=VALUE"):
        ablation.toggle_of(text)


def test_a_toggle_sets_several_flags() -> None:
    assert ablation.toggle_of("big:micro_batch_size=4, --loss=full") == ("big", ["--micro_batch_size=4", "--loss=full"])


def test_curves_count_tokens_and_seconds_of_training() -> None:
    rows = [
        {"kind": "train", "step": 2, "loss": 3.0, "seconds_per_step": 0.5, "tokens_seen": 20},
        {"kind": "evaluation", "step": 2, "split": "validation", "loss": 2.9},
        {"kind": "evaluation", "step": 2, "split": "test", "loss": 1.0},
        {"kind": "train", "step": 5, "loss": None, "seconds_per_step": 1.0, "tokens_seen": 50},
        {"kind": "evaluation", "step": 5, "split": "validation", "loss": 2.0},
    ]
    losses, evaluations = trials.curves(rows)
    assert losses == [[2, 3.0]] and evaluations == [[2, 20, 1.0, 2.9], [5, 50, 4.0, 2.0]]
    made = outcome("a", 1, 1.0, evaluations=evaluations)
    assert trials.reached(made, 2.5) == (50, 4.0)
    assert trials.reached(made, 1.5) is None


def test_evaluations_between_and_before_lines_of_the_log_have_their_own_tokens_and_seconds() -> None:
    """Their lines may also come before that of the training of the same step."""

    def trained(step: int, seconds: float) -> dict[str, Any]:
        return {"kind": "train", "step": step, "loss": 3.0, "seconds_per_step": seconds, "tokens_seen": 10 * step}

    def evaluated(step: int) -> dict[str, Any]:
        return {"kind": "evaluation", "step": step, "split": "validation", "loss": 2.0}

    rows = [evaluated(1), trained(3, 1.0), evaluated(4), evaluated(6), trained(6, 2.0)]
    assert trials.curves(rows)[1] == [[1, 10, 1.0, 2.0], [4, 40, 5.0, 2.0], [6, 60, 9.0, 2.0]]


@pytest.mark.parametrize(
    ("errors", "kind"),
    [
        ("error: step 7: wte.weight is not finite any more, so nothing is saved. Resume", DIVERGED),
        ("error: step 7: the loss since step 5 is 90, usual is 3.", DIVERGED),
        ("RuntimeWarning: overflow encountered in exp\nerror: runs/a: no space left on device", FAILED),
        ("Traceback\nValueError: the definite article is infinite", FAILED),
        ("out of memory in forward: the step is repeated\nerror: step 9: no finite gradient in 25 steps", DIVERGED),
        ("Traceback\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB.", OUT_OF_MEMORY),
        ("error: CUDA out of memory. Tried to allocate 20.00 GiB", OUT_OF_MEMORY),
        ("error: step 30: no finite gradient in 25 steps in a row", DIVERGED),
        ("Traceback\nKeyError: 'x'", FAILED),
    ],
)
def test_what_ended_a_run(errors: str, kind: str) -> None:
    assert trials.kind_of(errors) == kind
    assert trials.reason_of(errors, 1) in errors


# ---- what is said ----------------------------------------------------------------------------------------------------


def test_a_difference_is_said_only_where_the_seeds_support_it() -> None:
    base = [outcome("baseline", seed, value) for seed, value in enumerate([1.0, 2.0, 3.0])]
    better = [outcome("a", seed, value, peak_bytes=2**29) for seed, value in enumerate([0.9, 1.91, 2.89])]
    unclear = [outcome("b", seed, value) for seed, value in enumerate([0.5, 2.6, 3.0])]
    equal = [outcome("c", seed, value) for seed, value in enumerate([1.0, 2.0, 3.0])]
    first, second, third, last = ablation.sentences(results(*base, *better, *unclear, *equal))
    speed = "1.00 × the tokens per second (1.00 to 1.00 by seed) of the baseline; "
    assert first.startswith(f"a: 0.50 × the memory and {speed}")
    assert "bits per byte: better by 0.1 (95 % interval -0.125 to -0.0752)" in first
    assert "no difference shown" in second and "equal with every seed" in third and "over 3 seeds" in last
    titles, *rows = ablation.rows(results(*base, *better, *unclear))
    assert titles[2] == "bits per byte" and [row[3] for row in rows] == ["", "-0.1", "none shown"]


def test_a_variant_that_did_not_always_train_to_the_end_is_said_to_be_so() -> None:
    base = [outcome("baseline", seed, value) for seed, value in enumerate([1.0, 2.0, 3.0])]
    some = [outcome("a", seed, value) for seed, value in enumerate([0.5, 1.5])]
    gone = Outcome("a", 2, DIVERGED, "no finite gradient")
    first, _ = ablation.sentences(results(*base, *some, gone))
    assert first.endswith("Only 2 of 3 seeds trained to the end with both.")
    nothing, _ = ablation.sentences(results(Outcome("baseline", 1, DIVERGED, "no finite gradient"), *some))
    assert nothing == "The baseline did not train to the end with any seed, so no variant is compared with it."


def test_greater_is_better_where_it_is() -> None:
    assert ablation.difference_text(Interval(0.1, 0.05, 0.15, 3), "accuracy").startswith("better by 0.1")
    assert ablation.difference_text(Interval(0.1, 0.05, 0.15, 3), "loss").startswith("worse by 0.1")
    assert "one seed cannot tell" in ablation.difference_text(trials.interval([0.1]), "loss")
    errors = [outcome(name, seed, 0, metric_name="wer", greater_is_better=False, metrics={"wer": value + seed / 100})
              for name, value in (("baseline", 0.6), ("a", 0.3)) for seed in (1, 2)]  # fmt: skip
    assert "wer: better by 0.3 " in ablation.sentences(results(*errors))[0]  # as its task says, not its name


def test_a_metric_that_a_variant_lacks_is_left_out_of_its_row(tmp_path: Path) -> None:
    """It was not a number, or the variant has another task."""
    base, lacks = [outcome("baseline", 1, 1.0)], outcome("a", 1, 2.0, metric_name="loss", metrics={"loss": 4.0})
    found = results(*base, lacks)
    assert "bits per byte: not known of both with any seed." in ablation.sentences(found)[0]
    assert [row[2:5] for row in ablation.rows(found)[1:]] == [["1", "", "2"], ["", "", "4"]]
    about = {"title": "t", "command": "c", "hardware": {"cpu": "x", "cpu_cores": 1, "gpus": []}, "versions": {}}
    ablation.pages(tmp_path, {**found, **about, "date": "2026-01-01"})
    assert "| a | 1 |  |  | 4 | 1.00 GiB |" in (tmp_path / "t.md").read_text(encoding="utf-8")


def test_what_was_not_measured_stands_in_its_row() -> None:
    there = outcome("baseline", 1, 1.0, evaluations=[[5, 50, 4.0, 2.0], [9, 90, 7.0, 1.8]])
    gone = Outcome("a", 1, OUT_OF_MEMORY, "20 GiB more")
    titles, first, second = ablation.rows(results(there, gone, target_loss=2.0))
    assert titles[7] == "until loss 2.0" and first[7] == "4.0 s" and second[8] == "out of memory: 20 GiB more"
    (_, first) = ablation.rows(results(there, target_loss=1.0))
    assert first[7] == "(1 of 1 not reached)"
    (_, first) = ablation.rows(results(outcome("baseline", 1, 1.0, evaluations=[[9, 90, 7.0, 1.8]]), target_loss=2.0))
    assert first[7] == "evaluated at the end alone"


def test_rates_and_what_they_suggest() -> None:
    assert learning_rate.rates_of(1e-4, 1e-2, 2) == pytest.approx([1e-4, 3.16e-4, 1e-3, 3.16e-3, 1e-2], rel=1e-2)
    with pytest.raises(UsageError, match="not a range"):
        learning_rate.rates_of(1e-2, 1e-4, 2)
    made = [outcome(rate, seed, value + seed) for rate, value in (("0.001", 2.0), ("0.01", 1.0)) for seed in (1, 2, 3)]
    found = results(*made, Outcome("0.1", 1, DIVERGED, "no finite gradient"))
    assert learning_rate.suggestion(found)[0] == "Start from 0.01: its loss at the end is the lowest, 6."
    assert "0.1 did not train to the end." in learning_rate.suggestion(found)
    assert learning_rate.rows(found)[3] == ["0.1", "", "diverged: no finite gradient"]
    assert "highest rate tried" in learning_rate.suggestion(results(*made))[1]
    assert "give a lower --lowest" in learning_rate.suggestion(results(Outcome("0.1", 1, DIVERGED, "no")))[0]
    assert "lowest" not in learning_rate.suggestion(results(Outcome("0.1", 1, FAILED, "no space left")))[0]


def test_batches_of_any_size_see_the_same_examples(tmp_path: Path) -> None:
    words = ["--config", str(write_recipe(tmp_path)), "--max_steps", "12", "--warmup_steps", "3"]
    own = Namespace(sizes=[2, 8, 16], scalings=["none", "sqrt"], micro_batch_sizes=[4], seeds=[1, 2], noise_from=None)
    made = batch_size.trials_of(own, words)
    first = {trial.variant: trial.flags for trial in made if trial.seed == 1}
    names = ["2, unscaled", "2, √", "8", "16, unscaled", "16, √", "16, unscaled, micro-batch 4"]
    assert list(first) == names and len(made) == 12
    for name, flags in first.items():
        config = parse([*words, *flags])
        size = int(name.partition(",")[0])
        assert (config.optimization.max_steps, arithmetic_of(config, 1).global_batch_size) == (96 // size, size)
        assert num_warmup_steps(96 // size, config.optimization) == 24 // size
    usual = parse(words).optimization.learning_rate
    assert parse([*words, *first["2, √"]]).optimization.learning_rate == pytest.approx(usual / 2)
    assert parse([*words, *first["16, unscaled"]]).optimization.learning_rate == usual
    with pytest.raises(UsageError, match="7 does not divide the 96 examples"):
        batch_size.trials_of(Namespace(**{**vars(own), "sizes": [7]}), words)


def test_batches_are_compared_at_equal_tokens() -> None:
    small = [outcome("2, unscaled", s, 1.0 + s, evaluations=[[6, 50, 1.0, 3.0], [12, 100, 2.0, 2.0]]) for s in (1, 2)]
    large = [outcome("8", s, 2.0 + s, evaluations=[[3, 100, 0.5, 2.5]]) for s in (1, 2)]
    _, first, second = batch_size.rows(results(*small, *large, target_loss=2.4))
    assert first[1] == "12" and first[5:8] == ["12", "100", "2.0 s"] and second[5:8] == ["not reached"] * 3
    cut = Outcome("8", 3, DIVERGED, "no finite gradient")
    best = [outcome("2, unscaled", 3, 4.0), *small]
    said = batch_size.sentences(results(*best, *(outcome("8", s, 0.1) for s in (1, 2)), cut))
    assert "lowest with a batch of 2, unscaled" in said[0]
    assert said[1] == "Not compared, because some runs did not end: 8."
    said = batch_size.sentences(results(*small, *large))
    assert said[0] == "After the same tokens the loss is lowest with a batch of 2, unscaled: 5." and len(said) == 2


def test_the_command_lists_its_studies(capsys: pytest.CaptureFixture[str]) -> None:
    assert study.main([]) == 0
    shown = capsys.readouterr().out
    assert all(f"\n{name} " in shown for name in study.MODULES)
    assert study.main(["ablations"]) == 2
    names = "sweep, ablation, batch_size, cards, context, gradient_health, learning_rate"
    assert capsys.readouterr().err == f"error: 'ablations' is not a study: give {names}.\n"


# ---- real ones -------------------------------------------------------------------------------------------------------


def command(folder: Path, *more: Any) -> list[str]:
    own = ["--config", write_recipe(folder), "--output_dir", folder / "out", "--max_steps", 3, "--rehearse", False]
    return [sys.executable, str(ROOT / "scripts" / "study.py"), *map(str, [*more, *own])]


@pytest.mark.slow
def test_a_plan_names_runs_memory_and_flags_that_exclude_each_other(tmp_path: Path) -> None:
    toggles = ("--toggle", "ckpt:gradient_checkpointing=full", "--toggle", "wrong:lora_rank=4")
    done = script(command(tmp_path, "ablation", *toggles, "--seeds", 4, "--plan")[1:], 1, dict(os.environ))
    assert done.returncode == 0, done.stderr
    baseline, ckpt, wrong, both, every = done.stdout.splitlines()
    assert re.fullmatch(r"baseline: 1 run, 1 to make; predicted peak [\d.]+ MiB, 1\d s a run", baseline), baseline
    assert ckpt.startswith("ckpt: 1 run,") and re.fullmatch(r"about [23]\d s in all \(estimated\)", every), every
    assert wrong == "wrong: 1 run, 1 to make; lora_rank needs adapter. Give that, too, or leave lora_rank out."
    assert both.startswith("ckpt + wrong: ") and not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("toggle", "output", "said"),
    [
        ("typo:lora_rnk=4", "made", "error: --toggle typo: unknown flag --lora_rnk. Did you mean --lora_rank?"),
        ("value:loss=chunky", "made", "error: --toggle value: loss: 'chunky' is not valid: expected one of "),
        ("ckpt:gradient_checkpointing=full", "recipe.yaml", "recipe.yaml: cannot be written: File exists"),
    ],
)
def test_what_cannot_run_at_all_is_said_before_anything_runs(
    toggle: str, output: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = write_recipe(tmp_path)
    words = ["ablation", "--config", str(recipe), "--toggle", toggle, "--output_dir", str(tmp_path / output)]
    assert study.main(words) == (1 if output == "recipe.yaml" else 2)
    shown = capsys.readouterr()
    assert said in shown.err and not list(tmp_path.glob("*/baseline*"))


@pytest.mark.slow
@takes_minutes
def test_an_ablation_is_killed_and_continued(tmp_path: Path) -> None:
    toggles = ("--toggle", "ckpt:gradient_checkpointing=full", "--toggle", "wrong:lora_rank=4")
    words = command(tmp_path, "ablation", *toggles, "--seeds", 1, 2, "--target_loss", 0.001)
    process = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.DEVNULL, start_new_session=True)
    kept, deadline = tmp_path / "out", time.monotonic() + 120
    while not list(kept.glob("*/*/outcome.json")) and time.monotonic() < deadline:
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    before = {path: path.stat().st_mtime_ns for path in kept.glob("*/*/outcome.json")}
    assert before
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert before.items() <= {path: path.stat().st_mtime_ns for path in kept.glob("*/*/outcome.json")}.items()
    found = json.loads((kept / "ablation.json").read_text())
    assert [o["status"] for o in found["outcomes"]] == [DONE, DONE, "refused", "refused"] * 2
    table = (kept / "ablation.md").read_text()
    assert "| ckpt | 2 |" in table and "(2 of 2 not reached)" in table and "equal with every seed" in table
    assert "lora_rank needs adapter" in (kept / "index.html").read_text()


@pytest.mark.parametrize("given", ["--config {}", "--config={}"])
def test_what_a_run_depends_on_names_it(given: str, tmp_path: Path) -> None:
    recipe, source = write_recipe(tmp_path), tmp_path / "my_model.py"
    source.write_text("def build(): ...")
    words = [*given.format(recipe).split(), f"--model={source}:build"]

    def key(variant: str = "a") -> str:
        return trials.Trials(tmp_path, words)._key(trials.Trial(variant, 1, ()))

    first = key()
    assert key() == first != key("b")
    source.write_text("def build(): return None")
    assert (second := key()) != first
    recipe.write_text(recipe.read_text().replace("n_layer: 2", "n_layer: 1"))
    assert key() != second


def test_a_run_depends_on_the_task_and_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--config", str(write_recipe(tmp_path))]
    monkeypatch.setattr(trials.harness, "ROOT", tmp_path)
    (tmp_path / "train" / "tasks").mkdir(parents=True)
    keys = set()
    for name in ("step.py", "tasks/causal_lm.py", "tasks/other.py"):
        (tmp_path / "train" / name).write_text("changed")
        keys.add(trials.Trials(tmp_path, words)._key(trials.Trial("a", 1, ())))
    assert len(keys) == 2  # another task is not part of it


def test_a_run_that_a_signal_stopped_stops_the_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials.subprocess, "Popen", lambda *args, **options: Namespace(wait=lambda: EXIT_STOPPED))
    with pytest.raises(KeyboardInterrupt):
        trials.Trials(tmp_path, ["--config", str(write_recipe(tmp_path))]).run([trials.Trial("a", 1, ())])
    assert not list(tmp_path.rglob("outcome.json"))


def test_a_trial_is_not_uploaded_and_a_metric_that_is_not_a_number_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def finish(words: list[str], **options: Any) -> Any:
        config = parse(words[2:])
        assert not config.get("push_to_hub") and not config.get("hub_private_repo")
        folder = Path(config.output.output_dir)
        folder.mkdir()
        (folder / "metrics.jsonl").touch()
        own = {"peak_allocated_bytes": 1, "tokens_per_second": 1.0, "training_seconds": 1.0}
        found = {**own, "metric_name": "mcc", "result": {"validation": {"loss": 2.0, "mcc": None}}}
        (folder / "summary.json").write_text(json.dumps(found))
        return Namespace(wait=lambda: 0)

    monkeypatch.setattr(trials.subprocess, "Popen", finish)
    flags = ["--push_to_hub", "--hub_model_id", "me/mine", "--hub_private_repo"]
    runs = trials.Trials(tmp_path, ["--config", str(write_recipe(tmp_path)), *flags])
    [made] = runs.run([trials.Trial("a", 1, ())])
    assert (made.metric_name, made.metrics) == ("loss", {"loss": 2.0})


def test_a_loss_that_is_to_be_reached_is_looked_for_during_the_run(tmp_path: Path) -> None:
    words = ["--config", str(write_recipe(tmp_path)), "--max_steps", "40"]
    own = Namespace(toggle=["c:loss=chunked"], design="each", seeds=[1], target_loss=2.0)
    assert [trial.flags for trial in ablation.trials_of(own, words)] == [
        ("--eval_every_steps=4",),
        ("--eval_every_steps=4", "--loss=chunked"),
    ]
    for more in (["--eval_every_steps", "20"], ["--eval_every_steps=2"]):  # asked for
        assert ablation.trials_of(own, [*words, *more])[0].flags == ()
    assert ablation.trials_of(Namespace(**{**vars(own), "target_loss": None}), words)[0].flags == ()


@pytest.mark.slow
@takes_minutes
def test_a_study_that_is_asked_to_stop_stops_its_run(tmp_path: Path) -> None:
    words = command(tmp_path, "learning_rate", "--seeds", 1, "--max_steps", 100_000)
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        while process.poll() is None and not list(tmp_path.glob("out/*/seed-1/run/metrics.jsonl")):
            time.sleep(0.1)
        process.terminate()
        _, said = process.communicate(timeout=120)
    assert "run the same command again to continue" in said
    assert list(tmp_path.glob("out/*/seed-1/run/checkpoints/step-*"))  # which a run writes as it ends


@pytest.mark.slow
def test_a_run_of_other_flags_is_not_taken_for_the_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """main.py would say that there is nothing to do: a learning rate is not part of what a run is."""

    class Process:
        def __init__(self, words: list[str], **options: Any) -> None:
            output = Path(words[words.index("--output_dir") + 1])
            found.append(output.exists())
            output.mkdir(exist_ok=True)

        def wait(self) -> int:
            return 1

    found: list[bool] = []
    monkeypatch.setattr(trials.subprocess, "Popen", Process)
    for rate in ("1e-4", "1e-4", "1e-3"):
        made = trials.Trials(tmp_path, ["--learning_rate", rate])
        made.run([trials.Trial("baseline", 1, ())])
    assert found == [False, True, False]  # the second resumes the first, which failed


@pytest.mark.slow
@takes_minutes
def test_a_range_of_rates(tmp_path: Path) -> None:
    own = ("--lowest", 1e-2, "--highest", 1e-1, "--per_decade", 1, "--seeds", 1)
    done = subprocess.run(command(tmp_path, "learning_rate", *own), capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "Start from 0." in done.stdout and done.stdout.count("| 0.") == 2


# ---- committed results -----------------------------------------------------------------------------------------------


def committed(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}-cpu" / f"{name}.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", ["ablation", "batch_size", "context", "gradient_health", "learning_rate"])
def test_a_committed_page_is_made_of_its_figures(name: str, tmp_path: Path) -> None:
    importlib.import_module(f"scripts.benchmarks.study.{name}").pages(tmp_path, committed(name))
    page = (RESULTS / f"{name}-cpu" / f"{name}.md").read_text(encoding="utf-8")
    assert (tmp_path / f"{name}.md").read_text(encoding="utf-8") == page
    assert "2 cores" in page and "template 0.2.0" in page


@pytest.mark.parametrize(
    ("name", "in_docs", "in_page"),
    [
        (
            "ablation",
            "a chunked loss brings 0.81 × the memory",
            "loss: 0.81 × the memory and 1.18 × the tokens per second (0.97 to 1.88 by seed)",
        ),
        (
            "ablation",
            "checkpointing 0.74 ×, and neither changes bits per byte",
            "checkpointing: 0.74 × the memory and 0.85 × ",
        ),
        ("ablation", "neither changes bits per byte", "equal with every seed"),
        ("learning_rate", "0.003 for 30 steps of the quickstart", "Start from 0.003: "),
        ("context", "uses nothing from beyond 512 tokens", "Beyond the last 512 tokens: these rows show no use"),
        ("context", "has not learned to copy", "the model has not learned to copy"),
        (
            "gradient_health",
            "`max_grad_norm` of 1 clips 74 % of the steps after the first tenth",
            "max_grad_norm: 1 clips 74% of the steps",
        ),
        ("gradient_health", "fp16 without a loss scale would make 0.09 %", "In fp16 without a loss scale 0.0888 %"),
    ],
)
def test_the_docs_say_what_the_pages_say(name: str, in_docs: str, in_page: str) -> None:
    docs = " ".join((ROOT / "docs" / "studies.md").read_text(encoding="utf-8").split())
    assert in_docs in docs and in_page in (RESULTS / f"{name}-cpu" / f"{name}.md").read_text(encoding="utf-8")


def test_the_errors_of_predicted_steps_in_the_docs_are_those_of_the_committed_study() -> None:
    """At the study's target and, from the evaluations that it keeps, at others."""
    found = committed("batch_size")
    text = " ".join((ROOT / "docs" / "studies.md").read_text(encoding="utf-8").split())
    said = re.search(r"off by (\d+) to (\d+) %.* at ([\d.]+) it is off by (\d+) % at most, at ([\d.]+)", text)
    assert said is not None and (last := re.search(r"by (\d+) %", text[said.end() :])) is not None
    least, most, second, most_at_second, third = said.groups()

    def errors_at(target: float) -> list[int]:
        law = batch_size.predicted({**found, "flags": {**found["flags"], "target_loss": target}})
        assert law is not None
        return sorted(round(100 * abs(p.error)) for p in law[1] if p.size != law[0].size and p.error is not None)

    errors = errors_at(found["flags"]["target_loss"])
    assert len(errors) == 4 and (errors[0], errors[-1]) == (int(least), int(most))
    assert errors_at(float(second))[-1] == int(most_at_second) and errors_at(float(third))[-1] == int(last[1])


def test_a_seed_that_is_given_twice_counts_once() -> None:
    assert trials.parser_of("ablation", None).parse_args(["--seeds", "3", "1", "3", "--output_dir", "x"]).seeds == [
        3,
        1,
    ]
