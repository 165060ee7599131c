"""FSDP2 from its launch file, on two CPU processes: the run of one process, its checkpoints, what it leaves behind."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.commands.launch import launch_command, launch_command_parser
from faults.processes import script as run_script
from safetensors.torch import load_file
from support import ACCELERATE_LAUNCH, ROOT, checkpoint_digests
from test_distributed import FSDP2, killed_at_step_4
from test_main import STEPS, trained_losses

from train.extras.parallelism import Extra
from train.figures import read_metrics
from train.launch import Launch
from train.model import ModelWithLoss
from train.records import EXIT_DONE, EXIT_USAGE, UserError

pytestmark = pytest.mark.distributed
MAIN = ROOT / "train" / "main.py"
PLAIN = ("cpu", "single_gpu")
EXACT = 1e-5
"""Sums of fp32 in another order."""


def launched(
    file: str, *flags: Any, processes: int = 2, script: Path = MAIN, options: tuple[Any, ...] = ()
) -> subprocess.CompletedProcess[str]:
    """``accelerate launch`` of ``accelerate_configs/file`` in fp32, or as ``options`` say, as a user would type it."""
    return subprocess.run(
        [*ACCELERATE_LAUNCH, *words_of_launch(file, processes, options), str(script), *map(str, flags)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )


def words_of_launch(file: str, processes: int, options: tuple[Any, ...]) -> list[str]:
    path, port = ROOT / "accelerate_configs" / f"{file}.yaml", ("--main_process_port", 0)
    words = ("--config_file", path, "--num_processes", processes, "--mixed_precision", "no", *port, *options)
    return [str(word) for word in words]


def run(file: str, recipe: Path, output: Path, *flags: Any, processes: int = 2, options: tuple[Any, ...] = ()) -> str:
    """What a run says that is launched so; mostly in processes that have the libraries loaded."""
    words, is_alone = ("--config", recipe, "--output_dir", output, *flags), processes == 1 and file not in PLAIN
    if is_alone:  # one process that torchrun has to tell that it is the only one
        done = launched(file, *words, processes=1, options=options)
    else:
        done = run_script((MAIN, *words), processes, variables_of_launch(file, processes, options))
    assert done.returncode == EXIT_DONE, done.stderr[-3000:]
    return done.stdout


def variables_of_launch(file: str, processes: int, options: tuple[Any, ...]) -> dict[str, str]:
    """The environment in which accelerate's launcher would start the processes."""
    variables: dict[str, str] = {}

    def starts(command: Any, env: dict[str, str] | None = None, **_: Any) -> Any:
        variables.update(env or os.environ)
        return SimpleNamespace(wait=lambda: None, returncode=0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setattr("torch.distributed.run.run", starts)  # several processes
        patch.setattr("accelerate.commands.launch.subprocess.Popen", starts)  # one
        launch_command(launch_command_parser().parse_args([*words_of_launch(file, processes, options), str(MAIN)]))
    return variables


def final_weights(output: Path) -> dict[str, torch.Tensor]:
    return load_file(output / "final" / "model.safetensors")


def largest_difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max((one[name] - other[name]).abs().max().item() for name in one)


def metrics(output: Path) -> list[dict[str, Any]]:
    return read_metrics(output / "metrics.jsonl")


def test_run_equals_that_of_one_process_and_resumes_anywhere(recipe: Path, tmp_path: Path) -> None:
    """Losses, metrics and weights; then one process resumes from a checkpoint in parts."""
    recipe.write_text(recipe.read_text().replace("_pdrop: 0.1", "_pdrop: 0.0"))
    flags = ("--eval_every_steps", 2, "--eval_batch_size", 3, "--save_every_steps", 2, "--save_total_limit", 9)
    run("cpu", recipe, tmp_path / "one", *flags, processes=1)
    words = (MAIN, "--config", recipe, "--output_dir", tmp_path / "two", *flags, "--loss", "chunked")  # one: all logits
    done = run_script(words, 2, {**os.environ, **FSDP2, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"})
    assert done.returncode == EXIT_DONE, done.stderr[-3000:]
    said = done.stdout
    assert "device: 2 × CPU, 1 thread each, fsdp2, precision fp32" in said
    assert said.count("data: ") == 1  # one rank speaks
    assert largest_difference(final_weights(tmp_path / "one"), final_weights(tmp_path / "two")) < 2e-4  # Adam magnifies
    one, two = metrics(tmp_path / "one"), metrics(tmp_path / "two")
    assert [(r["kind"], r["step"]) for r in one] == [(r["kind"], r["step"]) for r in two]
    for left, right in zip(one, two, strict=True):
        for name in ("loss", "learning_rate", "grad_norm", "accuracy", "bits_per_byte"):
            assert (name in left) == (name in right)
            assert left.get(name, 0.0) == pytest.approx(right.get(name, 0.0), rel=1e-4), name
        assert left.get("tokens_seen") == right.get("tokens_seen")
        assert left.get("examples") == right.get("examples") in (None, 5)

    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "two" / "final")
    assert largest_difference(dict(model.state_dict()), {**model.state_dict(), **final_weights(tmp_path / "two")}) == 0

    stored = tmp_path / "two" / "checkpoints" / "step-00000002"
    names = {path.name for path in stored.iterdir()}
    assert names >= {f"{what}-0000{rank}.safetensors" for what in ("model", "optimizer") for rank in (0, 1)}
    index = json.loads((stored / "index.json").read_text())["model"]["transformer.wte.weight"]
    assert sorted(block[2][0] for block in index["blocks"]) == sorted(
        [index["shape"][0] // 2, -(-index["shape"][0] // 2)]
    )
    resumes("cpu", 1, stored, recipe, tmp_path, *flags)


@pytest.mark.slow
def test_gradients_are_clipped_by_value_in_their_parts(recipe: Path, tmp_path: Path) -> None:
    recipe.write_text(recipe.read_text().replace("_pdrop: 0.1", "_pdrop: 0.0") + "optimizer: sgd\n")
    flags = ("--max_steps", 3, "--max_grad_norm", None, "--max_grad_value", 0.001)
    for file, processes in (("cpu", 1), ("fsdp2", 2)):
        run(file, recipe, tmp_path / file, *flags, processes=processes)
    assert largest_difference(final_weights(tmp_path / "cpu"), final_weights(tmp_path / "fsdp2")) < EXACT


TIED = """
import torch
from torch import nn

class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(300, 16), nn.Linear(16, 300, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, input_ids):
        return self.head(torch.tanh(self.embed(input_ids).cumsum(1)))

def build():
    return Tied()
"""


@pytest.mark.slow
def test_a_tied_module_of_ones_own_with_a_buffer_and_the_largest_element_as_its_norm(
    recipe: Path, tmp_path: Path
) -> None:
    """accelerate loads weights one by one, which would untie them; a rank alone knows its own shards' largest."""
    (tmp_path / "tied.py").write_text(TIED)
    flags = ["--model", f"{tmp_path / 'tied.py'}:build", "--model_config", None, "--tokenizer", "bytes"]
    flags += ["--grad_norm_type", "inf", "--max_steps", 3, "--num_epochs", None, "--optimizer", "sgd"]
    for file, processes in (("cpu", 1), ("fsdp2", 2)):
        run(file, recipe, tmp_path / file, *flags, processes=processes)
    logs = (metrics(tmp_path / name) for name in ("cpu", "fsdp2"))
    one, two = ([row for row in log if row["kind"] == "train"] for log in logs)
    for name in ("loss", "grad_norm"):
        assert [row.get(name) for row in one] == pytest.approx([row.get(name) for row in two], rel=1e-4), name
    assert largest_difference(final_weights(tmp_path / "cpu"), final_weights(tmp_path / "fsdp2")) < EXACT


BATCH_NORM = """
import torch
from torch import nn

class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(300, 16), nn.BatchNorm1d(16), nn.Linear(16, 300)

    def forward(self, input_ids):
        hidden = self.embed(input_ids).cumsum(1).transpose(1, 2)
        return self.head(torch.tanh(self.norm(hidden).transpose(1, 2)))

def build():
    return Normed()
"""


@pytest.mark.slow
@pytest.mark.parametrize("file", ["fsdp2", "deepspeed_zero2"])
def test_running_means_are_those_of_the_first_rank_as_under_ddp(file: str, recipe: Path, tmp_path: Path) -> None:
    """Each rank would evaluate with its own, and a checkpoint has those of one: a resumed run would differ."""
    if file.startswith("deepspeed"):
        pytest.importorskip("deepspeed")
    (tmp_path / "normed.py").write_text(BATCH_NORM)
    flags = ["--model", f"{tmp_path / 'normed.py'}:build", "--model_config", None, "--tokenizer", "bytes"]
    flags += ["--max_steps", 4, "--num_epochs", None, "--eval_every_steps", 2, "--save_every_steps", 2]
    flags += ["--check_model", False, "--save_total_limit", 9]
    for name, more in (
        ("ddp", []),
        (file, []),
        ("resumed", ["--resume", tmp_path / file / "checkpoints/step-00000002"]),
    ):
        run("ddp" if name == "ddp" else file, recipe, tmp_path / name, *flags, *more)
    found = {}
    for name in ("ddp", file, "resumed"):
        found[name] = {row["step"]: row["loss"] for row in metrics(tmp_path / name) if row["kind"] == "evaluation"}
    assert found[file] == pytest.approx(found["ddp"], rel=1e-5) and found["resumed"][4] == found[file][4]


def test_a_parameter_that_is_a_number_is_named() -> None:
    network = torch.nn.Module()
    network.temperature = torch.nn.Parameter(torch.ones(()))
    run: Any = SimpleNamespace(launch=Launch(2, engine="fsdp2"))
    with pytest.raises(UserError, match=r"FSDP2 cannot divide temperature, .* make its shape \(1,\)\."):
        Extra().change_loss(run, ModelWithLoss(network))


EXPERTS = """
import torch
from torch import nn

class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(300, 16), nn.Linear(16, 300)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

    def forward(self, input_ids):
        expert = self.experts[input_ids.shape[1] % 2]
        return self.head(torch.tanh(expert(self.embed(input_ids)).cumsum(1)))

def build():
    return Experts()
"""


@pytest.mark.slow
@pytest.mark.parametrize("file", ["fsdp2", "deepspeed_zero2"])
def test_ranks_that_use_different_modules_end_the_run_before_anything_is_saved(
    file: str, recipe: Path, tmp_path: Path
) -> None:
    (tmp_path / "experts.py").write_text(EXPERTS)
    flags = ["--model", f"{tmp_path / 'experts.py'}:build", "--model_config", None, "--tokenizer", "bytes"]
    flags += ["--config", recipe, "--output_dir", tmp_path / "out", "--log_every_steps", 10, "--save_every_steps", 3]
    # One micro-batch a step, so that each rank exchanges as much as the other: nothing else would notice.
    done = launched(file, *flags, "--micro_batch_size", 1, "--global_batch_size", 2)
    assert done.returncode == 1, done.stderr[-3000:]  # the launcher's own
    assert done.stderr.count("ranks used different modules in a micro-batch") == 1, done.stderr[-3000:]
    assert not [*(tmp_path / "out" / "checkpoints").glob("step-*")]


@pytest.mark.slow
def test_an_embedding_that_the_head_shares_stays_with_it(recipe: Path, tmp_path: Path) -> None:
    """BERT names its embeddings among what is not to be split, and so FSDP2 would manage the weight twice."""
    shape = {"model_type": "bert", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    shape |= {"num_attention_heads": 2, "attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}
    flags = ["--task", "masked_lm", "--model_config", json.dumps(shape), "--max_steps", 3, "--num_epochs", None]
    for file, processes in (("cpu", 1), ("fsdp2", 2)):
        run(file, recipe, tmp_path / file, *flags, processes=processes)
    losses = [list(trained_losses(tmp_path / file).values()) for file in ("cpu", "fsdp2")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def resumes(file: str, processes: int, stored: Path, recipe: Path, folder: Path, *flags: Any) -> None:
    """Resumes from ``stored``, of step 2, and compares with the run in ``folder / "one"``."""
    output = folder / f"resumed-{file}"
    assert "resumed from" in run(file, recipe, output, *flags, "--resume", stored, processes=processes)
    losses, expected = trained_losses(output), trained_losses(folder / "one")
    assert min(losses) == 3
    assert list(losses.values()) == pytest.approx([expected[step] for step in losses], rel=1e-4)
    assert largest_difference(final_weights(output), final_weights(folder / "one")) < 2e-4


@pytest.mark.slow
def test_what_one_process_wrote_is_taken_in_parts(recipe: Path, tmp_path: Path) -> None:
    recipe.write_text(recipe.read_text().replace("_pdrop: 0.1", "_pdrop: 0.0"))
    flags = ("--save_every_steps", 2, "--save_total_limit", 9)
    run("cpu", recipe, tmp_path / "one", *flags, processes=1)
    for file in ("fsdp2", "ddp"):
        resumes(file, 2, tmp_path / "one" / "checkpoints" / "step-00000002", recipe, tmp_path, *flags)


@pytest.mark.slow
def test_killed_and_resumed_is_exact(recipe: Path, tmp_path: Path) -> None:
    """With dropout; and the peak of memory is the predicted one."""
    flags = ("--save_every_steps", 1, "--save_total_limit", 9)
    run("fsdp2", recipe, tmp_path / "whole", *flags, "--predict_memory", "True")
    summary = json.loads((tmp_path / "whole" / "summary.json").read_text())
    assert summary["peak_allocated_bytes"] == pytest.approx(summary["predicted_peak_bytes"], rel=5e-3)
    assert (summary["world_size"], summary["launch"]) == (2, "fsdp2")
    pieces = tmp_path / "pieces"
    words = ("--config", recipe, "--output_dir", pieces, *flags)
    killed = launched("fsdp2", *words, script=killed_at_step_4(tmp_path))
    assert killed.returncode != EXIT_DONE
    assert "-9" in killed.stderr
    assert not (pieces / "final").exists()
    assert "resumed from" in run("fsdp2", recipe, pieces, *flags)
    assert checkpoint_digests(tmp_path / "whole", STEPS) == checkpoint_digests(pieces, STEPS)


@pytest.mark.slow
def test_offload_has_nothing_to_do_on_cpus(recipe: Path, tmp_path: Path) -> None:
    """Its launch file can be tried there all the same, with the same result."""
    for file in ("fsdp2", "fsdp2_offload"):
        run(file, recipe, tmp_path / file, "--max_steps", 2)
    assert largest_difference(final_weights(tmp_path / "fsdp2"), final_weights(tmp_path / "fsdp2_offload")) == 0


@pytest.mark.slow
def test_checkpointed_activations_drop_the_same_again(recipe: Path, tmp_path: Path) -> None:
    """Gradients with dropout are those without checkpointing, which accelerate's own kind under FSDP2 gets wrong."""
    for mode in ("none", "full", "selective"):
        run("fsdp2", recipe, tmp_path / mode, "--gradient_checkpointing", mode, "--max_steps", 2)
    for mode in ("full", "selective"):
        assert largest_difference(final_weights(tmp_path / "none"), final_weights(tmp_path / mode)) < EXACT
        norms = [[r["grad_norm"] for r in metrics(tmp_path / m) if r["kind"] == "train"] for m in ("none", mode)]
        assert norms[0] == pytest.approx(norms[1], rel=EXACT)


def test_checkpointing_by_the_launcher_is_refused(recipe: Path, tmp_path: Path, run_main: Any) -> None:
    wrong = {**FSDP2, "FSDP_ACTIVATION_CHECKPOINTING": "true"}
    done = run_main("--config", recipe, "--output_dir", tmp_path / "run", env=wrong)
    assert done.returncode == EXIT_USAGE
    assert "fsdp_activation_checkpointing: true in the launch file" in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("adapter", ["lora", "qlora"])
def test_adapters_make_the_update_of_one_process(adapter: str, llama_recipe: Path, tmp_path: Path) -> None:
    """LoRA under DDP and FSDP2, QLoRA under DDP; frozen weights are in no checkpoint."""
    pytest.importorskip("peft" if adapter == "lora" else "bitsandbytes")
    flags = ("--adapter", adapter, "--lora_rank", 4, "--max_steps", 3)
    run("cpu", llama_recipe, tmp_path / "one", *flags, processes=1)
    for file in ("ddp", "fsdp2") if adapter == "lora" else ("ddp",):
        run(file, llama_recipe, tmp_path / file, *flags)
        assert largest_difference(final_weights(tmp_path / "one"), final_weights(tmp_path / file)) < 2e-4
        checkpoint = tmp_path / file / "checkpoints" / "step-00000003"
        index = json.loads((checkpoint / "index.json").read_text())["model"]
        assert index and all("lora_" in name for name in index)
