"""Two CPU processes over gloo: the same updates, the same evaluation, the same resume as one process."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from faults.processes import script
from safetensors.torch import load_file
from support import ROOT, checkpoint_digests
from test_main import STEPS
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from train.figures import read_metrics
from train.records import EXIT_DONE, EXIT_ERROR

pytestmark = pytest.mark.distributed
ENVIRONMENT = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}


def torchrun(
    *arguments: Any, processes: int = 2, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    command: list[Any] = [sys.executable]
    if processes > 1:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", processes]
    return subprocess.run(
        [str(part) for part in (*command, *arguments)],
        cwd=ROOT,
        env=env or ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=120,
    )


def forked(*arguments: Any, processes: int = 2, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """What torchrun would end with, from processes that have the libraries loaded."""
    return script(arguments, processes, env or ENVIRONMENT)


def run(recipe: Path, output: Path, processes: int, *flags: Any) -> subprocess.CompletedProcess[str]:
    done = forked("train/main.py", "--config", recipe, "--output_dir", output, *flags, processes=processes)
    assert done.returncode == EXIT_DONE, done.stderr[-3000:]
    return done


@pytest.fixture
def without_dropout(recipe: Path) -> Path:
    """Each rank draws its own dropout, so runs on different world sizes are compared without it."""
    recipe.write_text(recipe.read_text().replace("_pdrop: 0.1", "_pdrop: 0.0"))
    return recipe


def steps_in_fp64(output: Path, micro_batch_size: int, processes: int, engine: dict[str, str]) -> dict[str, Tensor]:
    """Weights and norms after the steps of ``distributed_step.py``."""
    done = forked(
        "tests/distributed_step.py", output, micro_batch_size, processes=processes, env={**ENVIRONMENT, **engine}
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return load_file(output)


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    return steps_in_fp64(tmp_path_factory.mktemp("one") / "steps", 4, 1, {})


FSDP2 = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
}


@pytest.mark.parametrize(("micro_batch_size", "engine"), [(1, {}), (2, {}), (1, FSDP2), (2, FSDP2)])
def test_two_ranks_make_the_update_of_one(
    one_process: dict[str, Tensor], tmp_path: Path, micro_batch_size: int, engine: dict[str, str]
) -> None:
    """Token-normalised, clipped by the global norm; ragged rows, a last window with fewer examples than ranks."""
    two = steps_in_fp64(tmp_path / "two", micro_batch_size, 2, engine)
    one = one_process
    assert max((one[name] - two[name]).abs().max().item() for name in one) < 1e-10


def test_run_of_two_ranks_equals_that_of_one(without_dropout: Path, tmp_path: Path) -> None:
    flags = ("--eval_every_steps", 2, "--eval_batch_size", 3, "--save_every_steps", 2)
    run(without_dropout, tmp_path / "one", 1, *flags)
    done = run(without_dropout, tmp_path / "two", 2, *flags, "--loss", "chunked")  # one process: all logits
    assert "2 examples per micro-batch × 2 accumulated × 2 processes = 8 per step" in done.stdout
    assert done.stdout.count("data: ") == 1  # one rank speaks
    weights = [load_file(tmp_path / name / "final" / "model.safetensors") for name in ("one", "two")]
    assert max((weights[0][k] - weights[1][k]).abs().max().item() for k in weights[0]) < 2e-4  # Adam magnifies rounding
    one, two = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("one", "two"))
    assert [(r["kind"], r["step"]) for r in one] == [(r["kind"], r["step"]) for r in two]
    for left, right in zip(one, two, strict=True):
        assert left["loss"] == pytest.approx(right["loss"], rel=1e-4)
        assert left.get("learning_rate") == right.get("learning_rate")
        assert left.get("tokens_seen") == right.get("tokens_seen")
        assert left.get("examples") == right.get("examples") in (None, 5)


@pytest.mark.slow
def test_parameters_that_no_step_uses_do_not_keep_ranks_waiting_if_asked(recipe: Path, tmp_path: Path) -> None:
    """Big Bird's pooler: a masked language model has it, and never asks it; DDP would wait for its gradient."""
    shape = "{model_type: big_bird, hidden_size: 16, intermediate_size: 16, num_hidden_layers: 1, "
    shape += "num_attention_heads: 2, attention_probs_dropout_prob: 0.0, hidden_dropout_prob: 0.0}"
    recipe.write_text(re.sub(r"\{model_type.*\}", shape, recipe.read_text()))
    flags = ("--task", "masked_lm", "--max_steps", 3, "--num_epochs", "None")
    run(recipe, tmp_path / "one", 1, *flags)
    run(recipe, tmp_path / "two", 2, *flags, "--find_unused_parameters", True)
    weights = [load_file(tmp_path / name / "final" / "model.safetensors") for name in ("one", "two")]
    assert max((weights[0][k] - weights[1][k]).abs().max().item() for k in weights[0]) < 2e-4  # Adam magnifies rounding


@pytest.mark.parametrize("split", ["train", pytest.param("test", marks=pytest.mark.slow)])
def test_a_function_that_gives_each_rank_other_data_is_told(split: str, recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "from_a_set.py").write_text(
        "import os, datasets\n\ndef documents(config):\n"
        "    texts = [f'document {number}' for number in range(50)]\n"
        "    splits = {name: datasets.Dataset.from_dict({'text': texts}) for name in ('train', 'validation', 'test')}\n"
        "    order = range(50)[:: -1 if os.environ['RANK'] == '1' else 1]\n"
        f"    return {{**splits, '{split}': splits['{split}'].select(order)}}\n"
    )
    words = ("train/main.py", "--config", recipe, "--output_dir", tmp_path / "run")
    done = forked(*words, "--dataset", f"{tmp_path}/from_a_set.py:documents", env=ENVIRONMENT)
    assert done.returncode == EXIT_ERROR
    assert "gives each process different data: seed shuffles, and sort sets" in done.stderr


SOMETIMES = """
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head, self.second = nn.Embedding(300, 8), nn.Linear(8, 300), nn.Linear(8, 8)
        self.calls = 0

    def forward(self, input_ids, attention_mask=None):
        self.calls += self.training
        hidden = self.embedding(input_ids)
        return {"logits": self.head(hidden if self.calls == 3 else hidden + self.second(hidden))}

def build():
    return Model()
"""


@pytest.mark.parametrize(
    ("save_every_steps", "asked", "said", "newest"),
    [
        pytest.param(
            1, False, "a step left parameters without a gradient (--find_unused_parameters)", 2, marks=pytest.mark.slow
        ),
        pytest.param(
            2, False, "a step left parameters without a gradient, which DDP waits for", 2, marks=pytest.mark.slow
        ),
        (1, True, "", 4),
    ],
    ids=["seen before a save", "seen by DDP", "waited for"],
)
def test_parameters_that_some_steps_do_not_use_are_said_or_waited_for(
    recipe: Path, tmp_path: Path, save_every_steps: int, asked: bool, said: str, newest: int
) -> None:
    model = tmp_path / "sometimes.py"
    model.write_text(SOMETIMES)
    flags = ["--model", f"{model}:build", "--model_config", "None", "--tokenizer", "bytes", "--rehearse", "False"]
    flags += ["--max_steps", 4, "--num_epochs", "None", "--gradient_accumulation_steps", 1]
    flags += ["--save_every_steps", save_every_steps, "--find_unused_parameters", asked]
    words = ("train/main.py", "--config", recipe, "--output_dir", tmp_path / "run", *flags)
    done = forked(*words, env=ENVIRONMENT)
    assert done.returncode == (EXIT_DONE if asked else EXIT_ERROR), done.stderr[-3000:]
    assert said in done.stderr and "Traceback" not in done.stderr
    kept = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert kept[-1] == f"step-{newest:08d}"  # the third update differs, unless it was waited for


@pytest.mark.slow
@pytest.mark.parametrize("engine", [{}, FSDP2], ids=["ddp", "fsdp2"])
def test_rows_by_tokens_are_the_same_on_two_ranks(llama_recipe: Path, tmp_path: Path, engine: dict[str, str]) -> None:
    flags: list[Any] = ["--packing", "True", "--max_tokens_per_micro_batch", 128]
    flags += ["--global_batch_size", 6, "--max_steps", 4]
    run(llama_recipe, tmp_path / "one", 1, *flags)
    words = ("train/main.py", "--config", llama_recipe, "--output_dir", tmp_path / "two", *flags)
    done = forked(*words, env={**ENVIRONMENT, **engine})
    assert done.returncode == EXIT_DONE, done.stderr[-3000:]
    assert "in micro-batches of up to 128 tokens" in done.stdout
    one, two = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("one", "two"))
    assert [row["kind"] for row in one] == [row["kind"] for row in two] == ["train"] * 4 + ["evaluation"]
    for left, right in zip(one, two, strict=True):
        assert left["loss"] == pytest.approx(right["loss"], rel=1e-4)
        assert left.get("tokens_seen") == right.get("tokens_seen")


def killed_at_step_4(folder: Path) -> Path:
    """``train/main.py``, but rank 1 is killed as step 4 begins."""
    script = folder / "killed.py"
    script.write_text(
        "import os, signal, sys\n"
        "import train.loop as loop\n"
        "from train.main import main\n"
        "plain = loop.seed_step\n"
        "def seed_step(seed, step, rank):\n"
        "    if step == 4 and os.environ['RANK'] == '1':\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    plain(seed, step, rank)\n"
        "loop.seed_step = seed_step\n"
        "status = main(sys.argv[1:])\n"
        "os._exit(status)\n"
    )
    return script


@pytest.mark.slow
def test_two_ranks_killed_and_resumed_are_exact(recipe: Path, tmp_path: Path) -> None:
    flags = ("--save_every_steps", 1)
    run(recipe, tmp_path / "whole", 2, *flags)
    pieces = tmp_path / "pieces"
    killed = torchrun(killed_at_step_4(tmp_path), "--config", recipe, "--output_dir", pieces, *flags)
    assert killed.returncode != EXIT_DONE
    assert f"exitcode  : {-signal.SIGKILL}" in killed.stderr
    resumed = run(recipe, pieces, 2, *flags)
    assert "resumed from" in resumed.stdout
    assert checkpoint_digests(tmp_path / "whole", STEPS) == checkpoint_digests(pieces, STEPS)
    assert killed.stderr.count("error: rank 1 (host ") == 1
    assert re.search("resume from step [34]", killed.stderr)


def test_processes_find_each_other_without_being_told_of_cpus(recipe: Path, tmp_path: Path) -> None:
    """accelerate alone leaves such processes strangers that train the same thing side by side."""
    if torch.cuda.is_available():
        pytest.skip("with a GPU the processes meet there")
    plain = {k: v for k, v in ENVIRONMENT.items() if k != "ACCELERATE_USE_CPU"}
    flags = ("--config", recipe, "--output_dir", tmp_path / "run", "--max_steps", 1)
    done = forked("train/main.py", *flags, env=plain)
    assert done.returncode == EXIT_DONE, done.stderr[-3000:]
    assert "device: 2 × CPU" in done.stdout
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["world_size"], summary["gradient_accumulation_steps"]) == (2, 2)


@pytest.mark.slow
def test_fsdp2_trains_a_pretrained_model_with_a_buffer_and_a_new_head(tmp_path: Path) -> None:
    """Routers of deepseek_v3 have a buffer that is saved. A launch file may ask for the first rank's weights."""
    sizes = {"vocab_size": 300, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "v_head_dim": 4}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "n_group": 1}
    ranks = {"topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 8, "kv_lora_rank": 8}
    config = AutoConfig.for_model("deepseek_v3", **sizes, **heads, **experts, **ranks)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "pretrained")
    rows = [f"the {number}th text is {kind},{kind}\n" for number in range(40) for kind in ("good", "bad")]
    (tmp_path / "rows.csv").write_text("text,label\n" + "".join(rows))
    flags = (
        "--task",
        "sequence_classification",
        "--model",
        tmp_path / "pretrained",
        "--dataset",
        tmp_path / "rows.csv",
    )
    flags += ("--tokenizer", "bytes", "--max_length", 32, "--max_steps", 3, "--global_batch_size", 4)
    losses = []
    for processes, engine in ((1, {}), (2, FSDP2)):
        words = ("train/main.py", *flags, "--output_dir", tmp_path / f"{processes}", "--log_every_steps", 1)
        done = forked(*words, processes=processes, env={**ENVIRONMENT, **engine})
        assert done.returncode == EXIT_DONE, done.stderr[-3000:]
        losses.append([row["loss"] for row in read_metrics(tmp_path / f"{processes}" / "metrics.jsonl")])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert len(losses[0]) == 4
