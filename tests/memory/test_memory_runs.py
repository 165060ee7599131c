"""Memory in whole runs: rehearsed without a trace, chosen, recovered and explained."""

from __future__ import annotations

import copy
import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from support import Run, causal_data, run_for

from train import extras
from train.batching import Loading
from train.config import Config, parse
from train.extras.readers.own_tokenizers import build_tokenizer
from train.figures import gib
from train.launch import Launch
from train.main import main
from train.memory import session
from train.records import EXIT_DONE, EXIT_ERROR, UsageError, UserError
from train.tasks import load_task

MESSAGE = (
    "CUDA out of memory. Tried to allocate 3.00 GiB. GPU 0 has a total capacity of 23.53 GiB of which 1.00 GiB is "
    "free. Of the allocated memory 21.00 GiB is allocated by PyTorch, and 512.00 MiB is reserved by PyTorch but "
    "unallocated."
)
FAULTY = f"""
import os
import torch
from torch import nn


class Faulty(nn.Module):
    'Runs out of memory where a batch has more examples than it may, and after some forwards for good.'

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(400, 8), nn.Linear(8, 400)
        self.forwards = 0

    def forward(self, input_ids, attention_mask=None):
        if self.training and type(input_ids) is torch.Tensor:  # not where it is predicted
            self.forwards += 1
            many = len(input_ids) > int(os.environ.get("MOST_EXAMPLES", "99"))
            if many or self.forwards > int(os.environ.get("MOST_FORWARDS", "999999")):
                raise torch.OutOfMemoryError({MESSAGE!r})
        return self.head(torch.tanh(self.embedding(input_ids).cumsum(1)))


def build():
    return Faulty()
"""


@pytest.fixture
def faulty(tmp_path: Path) -> dict[str, str]:
    """The environment in which ``--model faulty:build`` is found."""
    (tmp_path / "faulty.py").write_text(FAULTY)
    return {"PYTHONPATH": str(tmp_path)}


def summary_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "summary.json").read_text())


def losses_of(folder: Path) -> list[tuple[Any, ...]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(row["kind"], row["step"], row["loss"], row.get("grad_norm", 0.0)) for row in rows]


@pytest.mark.parametrize(
    ("free_kib", "expected"),
    [
        (20, r"error: host memory: the weights need \S+ MiB, but 0\.0 MiB is free\. Give a smaller model, --dtype "),
        (
            300,
            r"error: host memory: the longest step needs \S+ MiB by prediction, but 0\.3 MiB is free for it\. To try "
            r"it: --rehearse False\.\nWhat fills it by prediction, .*\nWhat to change, .*−.*--micro_batch_size 1 ",
        ),
    ],
)
def test_a_step_beyond_host_memory_is_refused(
    free_kib: int, expected: str, recipe: Path, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    """The system would kill the process, which could not even say why."""
    flags = ["--config", str(recipe), "--output_dir", str(tmp_path / "run"), "--predict_memory", "True"]
    monkeypatch.setattr(session.psutil, "swap_memory", lambda: SimpleNamespace(free=0))
    monkeypatch.setattr(session, "free_host_bytes", lambda: free_kib * 2**10)
    assert main(flags) == EXIT_ERROR
    assert re.search(expected, capsys.readouterr().err, re.DOTALL)
    assert main([*flags, "--rehearse", "False"]) == EXIT_DONE


def test_every_rank_needs_room_for_all_weights_under_fsdp2_too(recipe: Path, monkeypatch: Any) -> None:
    """Each builds them before they are shared out."""
    monkeypatch.setattr(session.psutil, "swap_memory", lambda: SimpleNamespace(free=0))
    monkeypatch.setattr(session, "free_host_bytes", lambda: 20 * 2**10)
    run: Any = run_for(parse(["--config", str(recipe)]), launch=Launch(world_size=1000, engine="fsdp2"))
    monkeypatch.setattr(type(run.accelerator), "is_fsdp2", True)
    tokenizer = build_tokenizer("bytes", ())
    data = SimpleNamespace(task=load_task("causal_lm")(run.config), tokenizer=tokenizer, label_names=())
    with pytest.raises(UserError, match="host memory: the weights need"):
        session.MemorySession._refuse_weights(SimpleNamespace(_run=run, _data=data))  # type: ignore


def test_rehearsal_leaves_no_trace(recipe: Path, run_main: Run, tmp_path: Path) -> None:
    for rehearse in (True, False):
        done = run_main("--config", recipe, "--rehearse", rehearse, "--output_dir", tmp_path / str(rehearse))
        assert done.returncode == 0, done.stderr
        assert ("the longest step (2 × " in done.stdout) is rehearse
    assert losses_of(tmp_path / "True") == losses_of(tmp_path / "False")
    weights = [(tmp_path / name / "final/model.safetensors").read_bytes() for name in ("True", "False")]
    assert weights[0] == weights[1]


CENTRED = """
import torch
from torch import nn


class Centred(nn.Module):
    'Subtracts the mean of what it has seen: a new buffer each time, weighed by an attribute that counts.'

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head, self.batches = nn.Embedding(300, 8), nn.Linear(8, 300), 0
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, input_ids):
        hidden = self.embedding(input_ids)
        if self.training:
            self.batches += 1
            self.mean = self.mean + (hidden.detach().mean((0, 1)) - self.mean) / (1 + self.batches)
        return self.head(hidden - self.mean)
"""


def test_rehearsal_leaves_what_a_model_counts_and_puts_in_place_of_a_buffer(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "centred.py").write_text(CENTRED)
    monkeypatch.chdir(tmp_path)
    for rehearse in (True, False):
        model = ("--model", "centred:Centred", "--tokenizer", "bytes", "--check_model", "False")
        flags = ("--config", recipe, *model, "--rehearse", rehearse, "--output_dir", tmp_path / str(rehearse))
        assert main([*map(str, flags)]) == EXIT_DONE
    assert losses_of(tmp_path / "True") == losses_of(tmp_path / "False")
    found, expected = (load_file(tmp_path / name / "final/model.safetensors")["mean"] for name in ("True", "False"))
    assert expected.any() and torch.equal(found, expected)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"optimizer": "adafactor"},
        {"optimizer": "sgd"},
        {"optimizer": "adamw_8bit"},
        {"optimizer_offload": True},
        {"optimizer_in_backward": True, "max_grad_norm": None},
        {"bf16_update": "stochastic"},
        {"bf16_update": "kahan"},
        {"adagrad": True},
    ],
    ids=str,
)
def test_rehearsal_moves_no_weight_whatever_the_optimizer(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if "adamw_8bit" in options.values():
        pytest.importorskip("bitsandbytes")
    import torch

    from train.config import Config
    from train.memory.session import rehearse
    from train.model import ModelWithLoss
    from train.optim import build_optimizer, parameter_groups
    from train.records import MicroBatch
    from train.step import Engine, seed_step

    class Network(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.norm = torch.nn.Embedding(11, 6), torch.nn.BatchNorm1d(6)
            self.head = torch.nn.Linear(6, 11)

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            hidden = torch.nn.functional.dropout(self.embedding(input_ids), 0.3, self.training)
            return self.head(self.norm(hidden.transpose(1, 2)).transpose(1, 2))

    def bits(tensor: torch.Tensor) -> torch.Tensor:
        return torch.atleast_1d(tensor).view(torch.uint8)

    torch.manual_seed(0)
    known = {name: value for name, value in options.items() if name != "adagrad"}
    run, network = run_for(Config().changed(weight_decay=0.1, learning_rate=0.1, **known)), Network()
    with torch.no_grad():
        network.head.weight[0, :3] = torch.tensor([0.0, -0.0, 1e-40])  # what arithmetic might tidy up
    if "bf16_update" in options:
        network.bfloat16()
    groups = parameter_groups(network, run.config.optimization)
    own: Any = run.extras.first("build_optimizer", run.config, groups, torch.device("cuda"))
    if "adagrad" in options:  # which makes its state before the first step
        own = torch.optim.Adagrad(groups, lr=0.1)
    model, prepared = run.accelerator.prepare(ModelWithLoss(network), own or build_optimizer(run, network))
    engine = run.extras.pipe("wrap_step", run, Engine(run.accelerator, run.config))
    ids = torch.randint(11, (2, 7))
    batch = MicroBatch({"input_ids": ids}, ids, 14, (0, 1), 14)
    before = {k: v.clone() for k, v in network.state_dict().items()}
    state = copy.deepcopy(prepared.optimizer.state_dict()["state"])
    evaluated: list[MicroBatch] = []
    monkeypatch.setattr("train.memory.session.score", lambda run, parts, batch: evaluated.append(batch))
    data = causal_data(run.config, validation=[4, 5])
    parts: Any = SimpleNamespace(model=model, optimizer=prepared, engine=engine, data=data)
    rehearse(run, parts, [batch])
    assert [shown.shape for shown in evaluated] == [(1, 5)]
    after = network.state_dict()
    for name, value in before.items():
        assert torch.equal(bits(value), bits(after[name])), name
    assert len(prepared.optimizer.state) == (5 if "adagrad" in options else 0)
    left = prepared.optimizer.state_dict()["state"]
    assert all(torch.equal(left[number][k], v) for number, own in state.items() for k, v in own.items())
    assert {group["lr"] for group in prepared.param_groups} == {0.1}
    assert all(p.grad is None for p in network.parameters())
    seed_step(0, 0, 0)
    engine.step(model, prepared, [batch])
    assert not torch.equal(before["head.weight"], network.head.weight)


def test_run_says_predicted_beside_measured(recipe: Path, run_main: Run, tmp_path: Path) -> None:
    done = run_main("--config", recipe, "--predict_memory", "True", "--output_dir", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    found = summary_of(tmp_path / "run")
    assert found["predicted_peak_bytes"] == pytest.approx(found["peak_allocated_bytes"], rel=5e-4)
    assert ", predicted 1.0 MiB" in done.stdout
    assert sum(found["bytes_by_kind"].values()) == found["peak_allocated_bytes"]


def test_short_texts_do_not_shorten_a_table_of_positions(recipe: Path, run_main: Run, tmp_path: Path) -> None:
    flags = ("--predict_memory", True, "--max_length", 1024, "--output_dir", tmp_path / "run")  # of which 61 are used
    assert run_main("--config", recipe, *flags).returncode == 0
    found = summary_of(tmp_path / "run")
    assert found["predicted_peak_bytes"] == pytest.approx(found["peak_allocated_bytes"], rel=5e-4)


def test_the_evaluation_that_is_predicted_is_the_one_that_is_made(
    llama_recipe: Path, run_main: Run, tmp_path: Path
) -> None:
    """Of longer documents than those that are trained on, and of fewer than a batch could take."""
    for name, words in (("train", 20), ("validation", 300)):
        rows = [{"text": f"{'ab ' * words}{number}"} for number in range(8)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ["--predict_memory", True, "--dataset", tmp_path / "train.jsonl"]
    flags += ["--validation_dataset", tmp_path / "validation.jsonl"]
    flags += ["--max_length", 512, "--eval_batch_size", 256, "--eval_every_steps", 1, "--max_steps", 2]
    done = run_main("--config", llama_recipe, *flags, "--output_dir", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    summary = summary_of(tmp_path / "run")
    assert summary["predicted_peak_bytes"] == pytest.approx(summary["peak_allocated_bytes"], rel=0.02)


FEW = """
from train.records import IGNORE
from train.tasks import causal_lm


class Task(causal_lm.Task):
    def inputs_and_labels(self, example, seed):
        tokens, labels = super().inputs_and_labels(example, seed)
        if len(tokens) > 1000:
            labels[:-20] = IGNORE
        return tokens, labels
"""


def test_the_longest_step_is_rehearsed_and_predicted_with_as_many_targets_as_others_may_have(
    run_main: Run, tmp_path: Path
) -> None:
    """Its head would otherwise compute 20 positions, that of the shorter ones 980."""
    (tmp_path / "few.py").write_text(FEW)
    rows = [{"text": "x" * (1020 if n == 3 else 980)} for n in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "short.jsonl").write_text('{"text": "short"}\n')
    model = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    model |= {"num_attention_heads": 2, "vocab_size": 8192}
    flags = ["--dataset", tmp_path / "rows.jsonl", "--validation_dataset", tmp_path / "short.jsonl"]
    flags += ["--model_config", json.dumps(model), "--tokenizer", "bytes", "--max_length", 1021, "--max_steps", 1]
    flags += ["--predict_memory", True, "--mixed_precision", "no", "--loss", "chunked"]
    peaks = []
    for task in ("causal_lm", f"{tmp_path / 'few.py'}:Task"):
        done = run_main(*flags, "--task", task, "--output_dir", tmp_path / "run", "--resume", "never")
        assert done.returncode == 0, done.stderr
        assert "the longest step (1 × 1,021 tokens) peaks at" in done.stdout
        found = summary_of(tmp_path / "run")
        assert found["predicted_peak_bytes"] == pytest.approx(found["peak_allocated_bytes"], rel=0.002)
        peaks.append(found["predicted_peak_bytes"])
    assert peaks[1] == peaks[0]


BERT = {"model_type": "bert", "vocab_size": 300, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
BERT |= {"intermediate_size": 128, "max_position_embeddings": 1024}
OF_BERT = ("--task", "sequence_classification", "--model_config", json.dumps(BERT), "--tokenizer", "bytes")


CUT = pytest.param([1200, 1200, 1200, 1200, 300], id="cut", marks=pytest.mark.slow)


@pytest.mark.parametrize("lengths", [pytest.param([980, 120, 110, 100, 90], id="vary"), CUT])
def test_an_evaluation_is_predicted_and_rehearsed_with_a_mask_if_it_may_have_one(
    run_main: Run, tmp_path: Path, lengths: list[int]
) -> None:
    """A micro-batch of one example has none; nor has the first of several, where the longest are cut to one length."""
    rows = [{"text": "x" * length, "label": "ab"[n % 2]} for n, length in enumerate(lengths * 4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = [*OF_BERT, "--dataset", tmp_path / "rows.jsonl", "--validation_dataset", tmp_path / "more.jsonl"]
    (tmp_path / "more.jsonl").write_text((tmp_path / "rows.jsonl").read_text())
    flags += ["--max_length", 512, "--eval_batch_size", 3, "--max_steps", 1, "--attn_implementation", "eager"]
    flags += ["--predict_memory", True, "--mixed_precision", "no", "--output_dir", tmp_path / "run"]
    done = run_main(*flags)
    assert done.returncode == 0, done.stderr
    found = summary_of(tmp_path / "run")
    assert found["predicted_peak_bytes"] == pytest.approx(found["peak_allocated_bytes"], rel=0.002)


@pytest.mark.slow
def test_a_budget_of_tokens_rehearses_and_predicts_the_micro_batch_that_takes_most(
    run_main: Run, tmp_path: Path
) -> None:
    """Of a model that keeps its scores the one with the longest text, not the one with the most tokens."""
    rows = [{"text": "x" * (126 if n else 980), "label": "ab"[n % 2]} for n in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = [*OF_BERT, "--dataset", tmp_path / "rows.jsonl", "--max_length", 1024, "--max_tokens_per_micro_batch", 1024]
    flags += ["--attn_implementation", "eager", "--global_batch_size", 10, "--max_steps", 4, "--max_eval_samples", 1]
    flags += ["--predict_memory", True, "--mixed_precision", "no", "--output_dir", tmp_path / "run"]
    done = run_main(*flags)
    assert done.returncode == 0, done.stderr
    found = summary_of(tmp_path / "run")
    assert found["predicted_peak_bytes"] == pytest.approx(found["peak_allocated_bytes"], rel=0.002)
    assert "the longest step (8 × 128 and 1 × 982 tokens) peaks at" in done.stdout


@pytest.mark.slow
def test_a_test_split_of_longer_texts_is_predicted_and_rehearsed(
    llama_recipe: Path, run_main: Run, tmp_path: Path
) -> None:
    """It is evaluated at the end; auto leaves room for it, too."""
    for name, count, words in (("train", 8, 20), ("validation", 4, 5), ("test", 64, 120)):
        rows = [{"text": f"{'ab ' * words}{number}"} for number in range(count)]
        (tmp_path / "data").mkdir(exist_ok=True)
        (tmp_path / f"data/{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ["--predict_memory", True, "--dataset", tmp_path / "data", "--max_length", 512, "--eval_batch_size", 64]
    flags += ["--max_steps", 2, "--num_epochs", None, "--micro_batch_size", "auto"]
    done = run_main("--config", llama_recipe, *flags, "--output_dir", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    summary = summary_of(tmp_path / "run")
    assert summary["predicted_peak_bytes"] == pytest.approx(summary["peak_allocated_bytes"], rel=0.02)
    assert f"peaks at {gib(summary['peak_allocated_bytes'])}, predicted" in done.stdout
    flags += ["--memory_budget_gib", summary["peak_allocated_bytes"] / 2**31]
    done = run_main("--config", llama_recipe, *flags, "--output_dir", tmp_path / "other")
    assert done.returncode == 1 and "is predicted to need" in done.stderr


def test_logits_are_told_by_the_vocabulary_of_the_model(llama_recipe: Path, run_main: Run, tmp_path: Path) -> None:
    """It has 600 entries, the tokenizer 259."""
    model = json.dumps({"model_type": "llama", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
                        "num_attention_heads": 2, "vocab_size": 600})  # fmt: skip
    options = ("--model_config", model, "--loss", "full", "--max_steps", 1, "--output_dir", tmp_path / "run")
    assert run_main("--config", llama_recipe, *options).returncode == 0
    assert summary_of(tmp_path / "run")["bytes_by_kind"]["logits and loss"] >= 2 * 4 * 600 * 64


def test_without_a_measurement_none_is_shown(recipe: Path, run_main: Run, tmp_path: Path) -> None:
    done = run_main("--config", recipe, "--measure_memory", "False", "--output_dir", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert "tokens) is not measured" in done.stdout and "0.0 MiB" not in done.stdout


def test_auto_takes_what_is_predicted_to_fit(recipe: Path, run_main: Run, tmp_path: Path) -> None:
    flags = ("--micro_batch_size", "auto", "--global_batch_size", 7)
    done = run_main("--config", recipe, *flags, "--output_dir", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert "micro_batch_size: 7 × 62 tokens, predicted to take" in done.stdout  # the whole global batch, on any machine
    assert yaml.safe_load((tmp_path / "run/config.yaml").read_text())["micro_batch_size"] == 7
    assert summary_of(tmp_path / "run")["micro_batch_size"] == 7


@pytest.mark.slow
def test_auto_recomputes_only_as_much_as_a_budget_asks_for(llama_recipe: Path, run_main: Run, tmp_path: Path) -> None:
    flags = ("--gradient_checkpointing", "auto", "--max_steps", 1, "--num_epochs", "None", "--rehearse", "False")
    flags += ("--gradient_checkpointing_offload", "True", "--micro_batch_size", 8)
    done = run_main("--config", llama_recipe, *flags, "--memory_budget_gib", 0.0022, "--output_dir", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("gradient_checkpointing: ")]
    assert "predicted to take 2.1 MiB of 2.2 MiB that may be taken; none would take" in line
    assert "gradient_checkpointing_offload: does nothing on CPU" in done.stdout
    resolved = yaml.safe_load((tmp_path / "run/config.yaml").read_text())
    assert resolved["gradient_checkpointing"] in ("selective", "full")
    assert resolved["gradient_checkpointing_offload"] is True


class NextToACard:
    """A :class:`MemorySession` of a run on a card that is not there; a prediction is what the test says."""

    def settle(self) -> Any:
        return self.session.settle(self.run.config)

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        free_host_bytes: int,
        device: str = "cuda",
        launch: Launch = Launch(precision="bf16"),  # noqa: B008
        **values: Any,
    ) -> None:
        import torch

        from train.config import from_values
        from train.memory import session
        from train.memory.devices import find_device

        monkeypatch.setattr(session, "this_device", lambda: find_device("l4"))
        monkeypatch.setattr(session, "free_host_bytes", lambda: free_host_bytes)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (20 * 2**30, 22 * 2**30))
        marks = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
        tokenizer: Any = type("Tokenizer", (), {**marks, "__len__": lambda tokenizer: 300})()
        config = from_values({"tokenizer": "bytes", "model_config": {"model_type": "llama"}, **values})
        data = replace(causal_data(config, [32] * 99 + [48], train=[64] * 300), tokenizer=tokenizer)
        self.run = run_for(config, launch=launch)
        monkeypatch.setitem(self.run.accelerator.state._shared_state, "device", torch.device(device, 0))
        self.jobs: list[Any] = []
        predictor: Any = SimpleNamespace(predict=self.predict)
        loaded = self.run.extras.by_name["long_sequences"].change_data(self.run, data)
        self.session = session.MemorySession(self.run, loaded, predictor)

    def predict(self, job: Any) -> Any:
        self.jobs.append(job)
        way, offloads = job.values["gradient_checkpointing"], job.values["gradient_checkpointing_offload"]
        size = 8 if offloads else {"none": 90, "selective": 60, "full": 16}[way]
        state = job.values["optimizer_offload"] * 3 * 2**30
        on_host = {"activations": offloads * 4 * 2**30, "optimizer state": state}
        return SimpleNamespace(least_reserved_bytes=size * 2**30, host_bytes_by_kind=on_host)


def test_auto_counts_what_is_offloaded_against_the_hosts_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs of layers (4 GiB), and with an optimizer on the host its fp32 weights and moments (3 GiB)."""
    from train.records import UserError

    def checkpointing(free_gib: float, budget_gib: float, **values: Any) -> tuple[Any, Any]:
        values = {"gradient_checkpointing": "auto", "memory_budget_gib": budget_gib, "micro_batch_size": 2, **values}
        with monkeypatch.context() as patch:
            config = NextToACard(patch, int(free_gib * 2**30), **values).settle()
        return config.get("gradient_checkpointing"), config.get("gradient_checkpointing_offload")

    assert checkpointing(16, 10) == ("full", True)
    with pytest.raises(UserError, match=r"would take 4\.00 GiB of host memory, but only 2\.00 GiB is free"):
        checkpointing(2, 10)
    assert checkpointing(2, 20) == ("full", False)
    assert checkpointing(8, 10, optimizer_offload=True) == ("full", True)
    with pytest.raises(UserError, match=r"would take 7\.00 GiB of host memory, but only 6\.00 GiB is free"):
        checkpointing(6, 10, optimizer_offload=True)


def test_auto_is_about_the_data_s_own_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its longest documents have 64 tokens, and 48 to validate on: not as many as max_length allows."""
    found = NextToACard(monkeypatch, 2**40, gradient_checkpointing="auto", micro_batch_size=2, max_length=8192)
    found.settle()
    sizes = {(job.micro_batch_size, job.length, job.eval_length, job.eval_batch_size) for job in found.jobs}
    assert sizes == {(2, 64, 48, 2)} and {job.values["max_length"] for job in found.jobs} == {8192}
    of_tokens = ((-1,), "int64")
    assert [job.tensors for job in found.jobs] == [{"input_ids": of_tokens, "labels": of_tokens}] * len(found.jobs)
    budget: dict[str, Any] = {"max_tokens_per_micro_batch": 8192, "global_batch_size": 256}
    found = NextToACard(monkeypatch, 2**40, gradient_checkpointing="auto", max_length=8192, **budget)
    found.settle()
    assert {(job.micro_batch_size, job.length) for job in found.jobs} == {(128, 64)}  # not one of 8,192
    assert {job.accumulates for job in found.jobs} == {True}
    budget = {"max_tokens_per_micro_batch": 8192, "global_batch_size": 8}
    found = NextToACard(monkeypatch, 2**40, gradient_checkpointing="auto", max_length=1024, **budget)
    found.settle()
    assert {job.accumulates for job in found.jobs} == {False}  # the whole batch always fits in one


@pytest.mark.parametrize("launch", [Launch(2, tp_size=2), Launch(2, engine="deepspeed")], ids=str)
@pytest.mark.parametrize("left_open", ["micro_batch_size", "gradient_checkpointing"])
def test_auto_is_refused_where_nothing_is_predicted(left_open: str, launch: Launch) -> None:
    config = Config().changed(global_batch_size=8, model="gpt2")
    extras.check(config, launch)
    with pytest.raises(UsageError, match=f"auto is not known for {re.escape(str(launch))}: give micro_batch_size"):
        extras.check(config.changed(**{left_open: "auto"}), launch)


def test_a_run_on_the_cpu_is_predicted_for_it_although_a_card_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"gradient_checkpointing": "auto", "gradient_checkpointing_offload": True, "micro_batch_size": 2}
    for device in ("cpu", "cuda"):
        found = NextToACard(monkeypatch, 2**40, device, **values)
        found.settle()
        assert {job.target.device_type for job in found.jobs} == {device}


@pytest.mark.parametrize(("offloads", "sharding"), [(True, "fsdp2_offload"), (False, "fsdp2")])
def test_auto_predicts_shards_where_they_are(offloads: bool, sharding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a single process, which FSDP2 serves with weights and optimizer on the host."""
    from accelerate import FullyShardedDataParallelPlugin
    from accelerate.utils import DistributedType

    from train.launch import read_launch

    found = NextToACard(monkeypatch, 2**40, gradient_checkpointing="auto", micro_batch_size=2)
    shared = found.run.accelerator.state._shared_state
    monkeypatch.setitem(shared, "distributed_type", DistributedType.FSDP)
    monkeypatch.setitem(shared, "fsdp_plugin", FullyShardedDataParallelPlugin(fsdp_version=2))
    found.run.launch = read_launch(
        {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_OFFLOAD_PARAMS": str(offloads)}
    )
    found.settle()
    assert {job.sharding for job in found.jobs} == {sharding}


def test_a_rank_without_an_example_rehearses_the_one_that_it_is_lent() -> None:
    """A held-out split may have fewer examples than there are ranks."""
    from datasets import Dataset

    from train.memory.session import _evaluated

    @dataclass
    class Data:
        loading: Any
        examples: dict[str, Dataset]
        lent: Any

        def evaluation_batches(self, run: Any, examples: Dataset) -> Any:
            return iter([self.lent])

    examples = Dataset.from_dict({"input_ids": [[1, 2]], "length": [2]})
    lent = SimpleNamespace(example_ids=(), shape=(1, 2))
    data: Any = Data(Loading(lambda *_: pytest.fail("it is loaded")), {"validation": examples}, lent)
    assert _evaluated(SimpleNamespace(), data) is lent  # type: ignore


def test_replicas_of_shards_are_not_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """HSDP: a rank holds more than its share of all ranks."""
    from train.memory import is_known

    assert is_known(Launch(8, engine="fsdp2"))
    monkeypatch.setenv("PARALLELISM_CONFIG_DP_REPLICATE_SIZE", "2")
    assert not is_known(Launch(8, engine="fsdp2"))


def test_nothing_is_predicted_of_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    from train.config import Config
    from train.memory import Extra, Predictor
    from train.records import UsageError

    launch, started = Launch(2, engine="deepspeed"), list[object]()
    monkeypatch.setattr(Predictor, "start", lambda predictor: started.append(predictor))
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "")  # which it would set
    for each in (launch, Launch(2)):
        with Extra().open(Config(), each, []):
            assert len(started) == (each is not launch)
    for name in ("micro_batch_size", "gradient_checkpointing"):
        config = Config().changed(**{name: "auto", "global_batch_size": 8})
        Extra().check(config, Launch(2))
        with pytest.raises(UsageError, match="for deepspeed: give micro_batch_size and gradient_checkpointing"):
            Extra().check(config, launch)
    found = NextToACard(monkeypatch, 2**40, launch=launch)
    found.session.ask()
    assert not found.jobs and not found.session._asked


def test_a_snapshot_is_written_whenever_memory_runs_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also where the step recovers; torch's record keeps its last events, and does not grow with the run."""
    import torch

    observers: list[Any] = []
    kept: list[dict[str, Any]] = []
    found = NextToACard(monkeypatch, 2**40, memory_snapshot=True, measure_memory=False, output_dir=str(tmp_path))
    monkeypatch.setattr(torch._C, "_cuda_attach_out_of_memory_observer", observers.append, raising=False)
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **options: kept.append(options))
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda path: Path(path).write_text("record"))
    parts: Any = SimpleNamespace()
    found.run.extras.by_name["meter"].ready(found.run, parts)
    assert [options["max_entries"] for options in kept] == [100_000]
    path = tmp_path / "memory_snapshot-0.pickle"
    error = torch.OutOfMemoryError(MESSAGE)
    assert not path.exists() and "snapshot" not in found.session.explain(error)
    observers[0](0, 2**30, 2**34, 0)  # as torch calls it where an allocation fails
    assert path.read_text() == "record"
    assert f"memory snapshot: {path} (open it at" in found.session.explain(error)
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda path: Path("/nowhere/at/all").write_text(""))
    observers[0](0, 2**30, 2**34, 0)  # a disk that refuses hides nothing


def test_advice_is_about_the_phase_that_failed_and_does_without_what_cannot_be_predicted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch

    from train.config import to_values
    from train.memory import session
    from train.memory.predict import Job, Target
    from train.records import UserError

    class Predictor:
        def __enter__(self) -> Predictor:
            return self

        def __exit__(self, *exception: object) -> None:
            pass

        def predict(self, job: Any) -> Any:
            if job.values["gradient_checkpointing"] != "none":
                raise UserError("this model cannot recompute")
            assert job.values["eval_batch_size"] in (16, 1)  # not another because micro_batch_size follows
            size = max(3 * job.micro_batch_size, job.eval_batch_size or 0) * 2**30
            return SimpleNamespace(peak_bytes=size, bytes_by_kind={})

    found = NextToACard(monkeypatch, 2**40, gradient_checkpointing="none", loss="full", eval_batch_size=16)
    monkeypatch.setattr(session, "Predictor", Predictor)
    asked = Job(to_values(found.run.config), Target("cuda"), 300, 8, 64, eval_batch_size=16)
    found.session._asked = [asked]
    error = torch.OutOfMemoryError(MESSAGE)
    error.fault = SimpleNamespace(phase="evaluation", shape=(16, 64), error=MESSAGE)  # type: ignore
    text = found.session.explain(error)
    assert "−13.00 GiB  --eval_batch_size 1 " in text
    assert "--micro_batch_size" not in text and "peak 16.00 GiB" in text  # not that of the training step


@pytest.mark.parametrize(("accumulation", "made"), [(1, 1), (3, 2)])
def test_ranks_that_share_a_sequence_rehearse_as_often_as_they_accumulate(
    accumulation: int, made: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An odd global batch, which the number of processes does not divide: it is one of their single data rank."""
    import torch

    from train.memory import session
    from train.records import BatchArithmetic, MicroBatch

    launch, rehearsed = Launch(2, engine="fsdp2", cp_size=2), list[int]()
    found = NextToACard(monkeypatch, 2**40, "cpu", launch, global_batch_size=accumulation, rehearse=True)
    ids = torch.ones(1, 64, dtype=torch.long)
    longest = MicroBatch({"input_ids": ids}, ids, 64, (0,), 64)
    monkeypatch.setattr(session, "longest_of", lambda batches: [longest])
    monkeypatch.setattr(session, "rehearse", lambda run, parts, batches: rehearsed.append(len(batches)))
    monkeypatch.setattr(found.session._predictor, "close", lambda: None, raising=False)
    found.session.ask()
    batches, task = SimpleNamespace(arithmetic=BatchArithmetic(1, accumulation, 1)), load_task("causal_lm")
    parts: Any = SimpleNamespace(batches=batches, data=SimpleNamespace(task=task))
    found.session.rehearse(parts)
    assert rehearsed == [made]


def test_a_full_host_is_explained_as_such_next_to_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    from train.extras.host_memory import page_locked

    monkeypatch.setattr("train.extras.host_memory.free_host_bytes", lambda: 2**30)
    with pytest.raises(MemoryError) as raised:
        page_locked(2**32)
    text = NextToACard(monkeypatch, 2**30).session.explain(raised.value)
    assert text.startswith("Main memory (RAM) was full: 4.00 GiB more did not fit.")
    assert "--optimizer_offload True" not in text and "--optimizer_offload False" in text


def test_run_out_of_memory_splits_the_micro_batch_and_learns_the_same(
    recipe: Path, run_main: Run, tmp_path: Path, faulty: dict[str, str]
) -> None:
    flags = ("--config", recipe, "--model", "faulty:build", "--tokenizer", "bytes", "--micro_batch_size", "4")
    whole = run_main(*flags, "--output_dir", tmp_path / "whole", env=faulty)
    assert whole.returncode == 0, whole.stderr
    split = run_main(*flags, "--output_dir", tmp_path / "split", env={**faulty, "MOST_EXAMPLES": "1"})
    assert split.returncode == 0, split.stderr
    assert "out of memory in forward, micro-batch of 4 × " in split.stdout
    assert summary_of(tmp_path / "whole")["oom_recoveries"] == 0
    assert summary_of(tmp_path / "split")["oom_recoveries"] >= 2  # four examples, then two
    for one, other in zip(losses_of(tmp_path / "whole"), losses_of(tmp_path / "split"), strict=True):
        assert one[:2] == other[:2]
        assert one[2:] == pytest.approx(other[2:], rel=1e-5)


def test_run_that_cannot_go_on_saves_its_last_step_and_explains(
    recipe: Path, run_main: Run, tmp_path: Path, faulty: dict[str, str]
) -> None:
    flags = ("--config", recipe, "--model", "faulty:build", "--tokenizer", "bytes", "--rehearse", "False")
    out = tmp_path / "run"
    done = run_main(*flags, "--output_dir", out, env={**faulty, "MOST_FORWARDS": "9"})  # of 4 a step: in the third
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "out of memory" in done.stderr.lower() and "forward" in done.stderr
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["step-00000002"]
    resumed = run_main(*flags, "--output_dir", out, env=faulty)
    assert resumed.returncode == 0, resumed.stderr
    assert "resumed from" in resumed.stdout and summary_of(out)["steps"] == 6


@pytest.mark.slow
def test_stop_ends_at_the_first_fault(recipe: Path, run_main: Run, tmp_path: Path, faulty: dict[str, str]) -> None:
    flags = ("--model", "faulty:build", "--tokenizer", "bytes", "--on_oom", "stop")
    env = {**faulty, "MOST_EXAMPLES": "1"}
    done = run_main("--config", recipe, *flags, "--output_dir", tmp_path / "run", env=env)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "23.53 GiB" in done.stderr and "--micro_batch_size 1" in done.stderr
