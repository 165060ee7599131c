"""DeepSpeed from its launch files, on two CPU processes: the run of one process, and what can resume from it."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support import EVERY_CASE, checkpoint_digests
from test_distributed import forked, killed_at_step_4
from test_fsdp2 import final_weights, largest_difference, launched, metrics, run
from test_main import STEPS, trained_losses

from train.config import Config
from train.extras.parallelism.deepspeed_engine import deepspeed_plugin
from train.launch import Launch
from train.records import EXIT_DONE, EXIT_USAGE

pytest.importorskip("deepspeed", exc_type=ImportError)
pytestmark = pytest.mark.distributed
ROUNDING = 1e-6
"""fp32 sums of a few hundred terms in another order, over four steps of plain SGD with weights up to 1."""
MAGNIFIED = 2e-4
"""The same through Adam, which divides by gradients that are nearly 0."""
STEPS_SCRIPT = "tests/extras/parallelism/deepspeed_step.py"
LLAMA = (
    '{"model_type": "llama", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, '
    '"num_attention_heads": 4, "num_key_value_heads": 2}'
)


def assert_same_run(one: Path, two: Path) -> None:
    """Losses, gradient norms, learning rates, metrics and weights of two runs."""
    left_lines, right_lines = metrics(one), metrics(two)
    assert [(r["kind"], r["step"]) for r in left_lines] == [(r["kind"], r["step"]) for r in right_lines]
    for left, right in zip(left_lines, right_lines, strict=True):
        for name in ("loss", "learning_rate", "grad_norm", "clipped_share", "accuracy", "bits_per_byte"):
            assert left.get(name, 0.0) == pytest.approx(right.get(name, 0.0), rel=1e-4), name
        for name in ("tokens_seen", "examples"):
            assert left.get(name) == right.get(name)
    assert largest_difference(final_weights(one), final_weights(two)) < MAGNIFIED


@pytest.fixture
def without_dropout(recipe: Path) -> Path:
    recipe.write_text(recipe.read_text().replace("_pdrop: 0.1", "_pdrop: 0.0"))
    return recipe


@pytest.fixture(scope="module")
def plain_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What ``deepspeed_step.py`` leaves without DeepSpeed, on one process."""
    path = tmp_path_factory.mktemp("steps") / "plain"
    done = forked(STEPS_SCRIPT, path, "plain", processes=1, env=dict(os.environ))
    assert done.returncode == 0, done.stderr[-3000:]
    return path


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["zero2", "zero3"])
def test_two_ranks_make_the_updates_of_one_process(plain_steps: Path, tmp_path: Path, engine: str) -> None:
    """Ragged examples, a short last window with a rank without examples, clipping, and a gradient that is not finite:
    the step is skipped on both ranks and leaves no trace in weights and momentum."""
    done = forked(STEPS_SCRIPT, tmp_path / engine, engine, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-3000:]
    one, two = (load_file(f"{path}.safetensors") for path in (plain_steps, tmp_path / engine))
    assert largest_difference(one, two) < ROUNDING
    plain = json.loads(Path(f"{plain_steps}-0.json").read_text())
    ranks = [json.loads((tmp_path / f"{engine}-{rank}.json").read_text()) for rank in (0, 1)]
    for step, (left, *right) in enumerate(zip(plain, *ranks, strict=True)):
        for outcome in right:
            for name in ("num_targets", "num_tokens", "clipped", "skipped"):
                assert outcome[name] == left[name], (step, name)
            assert outcome["stop_requested"] == (step == 1)  # asked of one rank, known to both
            assert left["skipped"] or outcome["grad_norm"] == pytest.approx(left["grad_norm"], rel=ROUNDING)
        losses = sum(outcome["loss_sum"] for outcome in right)
        assert left["skipped"] == math.isnan(losses)
        assert left["skipped"] or losses == pytest.approx(left["loss_sum"], rel=ROUNDING)
    assert [outcome["skipped"] for outcome in plain] == [False, False, True, False]
    assert all(outcome["clipped"] for outcome in plain if not outcome["skipped"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "more"),
    [("deepspeed_zero3_offload", ("--loss", "chunked")), *[("deepspeed_zero2", ())] * EVERY_CASE],
    ids=lambda v: v,
)
def test_run_equals_that_of_one_process_and_resumes_anywhere(
    without_dropout: Path, tmp_path: Path, file: str, more: tuple[str, ...]
) -> None:
    """Then one process of DeepSpeed, and one and two without it, resume from two ranks' checkpoint, and the reverse."""
    recipe, one, two = without_dropout, tmp_path / "one", tmp_path / "two"
    flags = ("--eval_every_steps", 2, "--eval_batch_size", 3, "--save_every_steps", 2, "--save_total_limit", 9, *more)
    run("cpu", recipe, one, *flags, processes=1)
    said = run(file, recipe, two, *flags)
    assert "device: 2 × CPU, 1 thread each, deepspeed, precision fp32" in said
    assert said.count("data: ") == 1  # one rank speaks
    assert_same_run(one, two)
    summaries = [json.loads((output / "summary.json").read_text()) for output in (one, two)]
    assert summaries[0]["num_parameters"] == summaries[1]["num_parameters"] > 1000

    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(two / "final")
    assert largest_difference(dict(model.state_dict()), {**model.state_dict(), **final_weights(two)}) == 0
    assert {p.dtype for p in model.parameters()} == {torch.float32}

    name = Path("checkpoints") / "step-00000002"
    index = json.loads((two / name / "index.json").read_text())["optimizer"]
    files = {block[0] for entry in index.values() for block in entry["blocks"]}
    assert files == {"optimizer-00000.safetensors", "optimizer-00001.safetensors"}  # each rank wrote its own
    others = ((file, 1, two), ("cpu", 1, two), ("ddp", 2, two), (file, 2, one))
    for file_of_next, processes, stored in others if more else others[2:]:  # from either stage; one of them everywhere
        output = tmp_path / f"{file_of_next}-{processes}"
        said = run(file_of_next, recipe, output, *flags, "--resume", stored / name, processes=processes)
        assert "resumed from" in said
        losses = trained_losses(output)
        assert min(losses) == 3
        assert losses == pytest.approx({k: v for k, v in trained_losses(one).items() if k >= 3}, rel=1e-4)
        assert largest_difference(final_weights(output), final_weights(one)) < MAGNIFIED


@pytest.mark.slow
@pytest.mark.parametrize("file", ["deepspeed_zero3_offload", *["deepspeed_zero2"] * EVERY_CASE])
def test_killed_and_resumed_is_exact(recipe: Path, tmp_path: Path, file: str) -> None:
    """With dropout and recomputed activations; and the best weights are put back at the end."""
    flags = ("--save_every_steps", 1, "--save_total_limit", 9, "--gradient_checkpointing", "full")
    run(file, recipe, tmp_path / "whole", *flags, "--eval_every_steps", 2, "--load_best_model_at_end", True)
    pieces = tmp_path / "pieces"
    words = ("--config", recipe, "--output_dir", pieces, *flags, "--eval_every_steps", 2)
    killed = launched(file, *words, script=killed_at_step_4(tmp_path))
    assert killed.returncode != EXIT_DONE
    assert "-9" in killed.stderr
    assert not (pieces / "final").exists()
    assert "resumed from" in run(file, recipe, pieces, *flags, "--eval_every_steps", 2)
    assert checkpoint_digests(tmp_path / "whole", STEPS) == checkpoint_digests(pieces, STEPS)
    assert largest_difference(final_weights(tmp_path / "whole"), final_weights(pieces)) == 0  # the last were the best


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, *[3] * EVERY_CASE])
def test_two_ranks_that_share_sequences_make_the_run_of_one(without_dropout: Path, tmp_path: Path, stage: int) -> None:
    """Lengths that two does not divide, and a last window with fewer examples than a micro-batch has."""
    flags = ("--model_config", LLAMA, "--micro_batch_size", 4, "--eval_every_steps", 2, "--eval_batch_size", 3)
    run("cpu", without_dropout, tmp_path / "one", *flags, processes=1)
    options = ("--parallelism_config_sp_size", 2, "--zero_stage", stage)
    said = run("ulysses_sequence_parallel", without_dropout, tmp_path / "two", *flags, options=options)
    assert "deepspeed, sequence parallel 2" in said
    assert_same_run(tmp_path / "one", tmp_path / "two")


@pytest.mark.slow
def test_a_number_of_heads_that_ranks_cannot_share_is_explained(without_dropout: Path, tmp_path: Path) -> None:
    flags = ("--model_config", LLAMA.replace('_heads": 4', '_heads": 1').replace('_heads": 2', '_heads": 1'))
    words = ("--config", without_dropout, "--output_dir", tmp_path / "run", *flags)
    done = launched("ulysses_sequence_parallel", *words, options=("--parallelism_config_sp_size", 2))
    assert done.returncode != EXIT_DONE
    assert "error: parallelism_config_sp_size in the launch file: llama cannot divide its sequences" in done.stderr
    assert 'main.py", line' not in done.stderr


@pytest.mark.slow
def test_half_precision_leaves_whole_weights(without_dropout: Path, tmp_path: Path) -> None:
    """The engine computes with bf16 weights; fp32 ones are updated, saved and loaded."""
    from transformers import AutoModelForCausalLM

    flags = ("--max_steps", 2)
    run("cpu", without_dropout, tmp_path / "one", *flags, processes=1)
    said = run("deepspeed_zero2", without_dropout, tmp_path / "two", *flags, options=("--mixed_precision", "bf16"))
    assert "precision bf16" in said
    losses = [trained_losses(tmp_path / name)[2] for name in ("one", "two")]
    assert losses[1] == pytest.approx(losses[0], rel=0.01)  # bf16 has 8 bits
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "two" / "final")
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert any((p != p.bfloat16()).any() for p in model.parameters())


def test_accumulation_is_left_to_the_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    """accelerate would read a number from the launch file's "auto"."""
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "auto")
    deepspeed_plugin(Config(), Launch(world_size=2, engine="deepspeed"))
    assert "ACCELERATE_GRADIENT_ACCUMULATION_STEPS" not in os.environ


@pytest.mark.slow
def test_launch_file_that_disagrees_is_named(recipe: Path, tmp_path: Path) -> None:
    options = ("--gradient_clipping", 0.3)
    done = launched("deepspeed_zero2", "--config", recipe, "--output_dir", tmp_path / "run", options=options)
    assert done.returncode != EXIT_DONE
    assert f"exitcode  : {EXIT_USAGE}" in done.stderr
    assert "gradient_clipping: 0.3 in the launch file, max_grad_norm: 1.0 in the training configuration" in done.stderr
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
