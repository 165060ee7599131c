"""The recipe for preferences: its loss against one computed by hand, what it reads, and what a run learns."""

from __future__ import annotations

import json
import math
import pickle
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from support import ROOT, Run, checkpoint_digests, sampled
from test_routes import CHATML, FORGETFUL, chat_tokenizer
from transformers import PreTrainedTokenizerFast

from train.config import Config
from train.extras.endurance.recovery import halves
from train.figures import read_metrics
from train.main import main
from train.memory import __main__ as memory
from train.memory.session import most_work
from train.model import ModelWithLoss
from train.records import EXIT_DONE, EXIT_ERROR, EXIT_USAGE, IGNORE, UserError

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
ASK = {"role": "user", "content": "two?"}


def say(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


@pytest.fixture
def recipe(load_recipe: Callable[[str], ModuleType]) -> ModuleType:
    return load_recipe("dpo")


@pytest.fixture
def tokenizer(tmp_path: Path) -> Any:
    chat_tokenizer(tmp_path / "chat", CHATML)
    return PreTrainedTokenizerFast.from_pretrained(tmp_path / "chat")


def task_of(recipe: ModuleType, **values: Any) -> Any:
    return recipe.Task(Config().changed(**{"dataset_options": {"path": "pairs.jsonl"}, "max_length": 64, **values}))


def pair(prompt: str, chosen: str, rejected: str) -> str:
    messages = [{**ASK, "content": prompt}]
    return json.dumps({"messages": messages, "chosen": [say(chosen)], "rejected": [say(rejected)]})


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "two?", "chosen": "2", "rejected": "3"},
        {"prompt": [ASK], "chosen": [say("2")], "rejected": [say("3")]},
        {"chosen": [ASK, say("2")], "rejected": [ASK, say("3")], "score_chosen": 9},
        {"prompt": "two?", "chosen": [ASK, say("2")], "rejected": [{"from": "human", "value": "two?"}, say("3")]},
        {"chosen": "\n\nHuman: two?\n\nAssistant: 2", "rejected": "\n\nHuman: two?\n\nAssistant: 3"},
        {"prompt": "\n\nHuman: two?\n\nAssistant:", "chosen": "2", "rejected": "3"},
        {"question": "two?", "chosen": "2", "rejected": "3"},
        {"instruction": "", "input": "two?", "chosen": "2", "rejected": "3"},
    ],
)
def test_pairs_are_read_in_the_forms_that_data_sets_have(recipe: ModuleType, row: dict[str, Any]) -> None:
    found = {name: value for name, value in recipe.pair_of(row, "row 1").items() if value}
    assert found == {"messages": [ASK], "chosen": [say("2")], "rejected": [say("3")]}


def test_a_text_in_which_two_people_talk_differs_in_what_is_said_last(recipe: ModuleType) -> None:
    """As in Anthropic's hh-rlhf; an instruction and its input stand one below the other."""
    begin = "\n\nHuman: hi\n\nAssistant: hello\n\nHuman: two?\n\nor more\n\nAssistant:"
    found = recipe.pair_of({"chosen": f"{begin} 2", "rejected": f"{begin} 3\n\nHuman: no\n\nAssistant: 2"}, "row 1")
    asked = [{"role": "user", "content": "hi"}, say("hello"), {"role": "user", "content": "two?\n\nor more"}]
    assert found["messages"] == asked and found["chosen"] == [say("2")]
    assert found["rejected"] == [say("3"), {"role": "user", "content": "no"}, say("2")]
    assert recipe.pair_of({"chosen": f"{begin} 2", "rejected": begin}, "row 1")["messages"] == []
    found = recipe.pair_of({"instruction": "add", "input": "1, 1", "chosen": "2", "rejected": "3"}, "row 1")
    assert found["messages"] == [{"role": "user", "content": "add\n\n1, 1"}]


def test_tools_and_a_system_text_come_along(recipe: ModuleType, tokenizer: Any) -> None:
    row = {"prompt": "two?", "chosen": "2", "rejected": "3", "system": "be brief", "tools": '[{"name": "f"}]'}
    found = recipe.pair_of(row, "row 1")
    assert found["messages"] == [{"role": "system", "content": "be brief"}, ASK] and found["tools"] == [{"name": "f"}]
    assert recipe.pair_of({**row, "system": None, "system_prompt": "be brief"}, "row 1") == found
    tokenizer.chat_template = "{{ tools | length if tools else 0 }}" + CHATML
    [example] = task_of(recipe).cut(json.dumps(found), [], None, tokenizer)
    for name, said in (("tokens", "2"), ("rejected", "3")):
        shown = f"1<|system|>be brief<|end|><|user|>two?<|end|><|assistant|>{said}<|end|>"
        assert tokenizer.decode(example[name]) == shown


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "two?", "chosen": "2", "rejected": "2"},
        {"prompt": "two?", "chosen": "2", "rejected": ""},
        {"prompt": "", "chosen": "2", "rejected": "3"},
        {"chosen": [ASK, say("2")], "rejected": [{**ASK, "content": "three?"}, say("3")]},
        {"chosen": [ASK, say("2")], "rejected": [ASK]},
        {"prompt": "two?", "chosen": [say("2")], "rejected": [say(" ")]},
    ],
)
def test_without_a_preference_there_is_no_pair(recipe: ModuleType, row: dict[str, Any]) -> None:
    assert recipe.pair_of(row, "row 1")["messages"] == []


def test_the_targets_are_the_answers_and_what_ends_them(recipe: ModuleType, tokenizer: Any) -> None:
    task = task_of(recipe, max_length=12)
    examples = [{**e, "id": 0} for e in task.cut(pair("two?", "2", "three, four, five"), [], None, tokenizer)]
    batch = task.collate(examples, (0,), 7)
    assert batch.labels.tolist() == [1] and batch.num_targets == 1 and batch.num_tokens == 8
    assert batch.inputs["input_ids"].shape == batch.inputs["rejected_ids"].shape == batch.shape == (1, 12)
    for name, shown in (("targets", "2<|end|>"), ("rejected_targets", "three,")):
        targets = batch.inputs[name][0]
        assert tokenizer.decode(targets[targets != IGNORE]) == shown
    assert examples[0]["document_length"] == len("<two?<<three, four, five<") - 1  # each mark is one token
    assert list(task.cut(pair("a" * 40, "2", "3"), [], None, tokenizer)) == []  # nothing of the answers is left
    assert list(task.cut(pair("two?", "a" * 40, "a" * 50), [], None, tokenizer)) == []  # nor of what they differ in


def test_where_the_answers_begin_stays_on_the_host_until_a_rehearsal(recipe: ModuleType, tokenizer: Any) -> None:
    """Of all pairs in the batch, and of each half of it after running out of memory."""
    task = task_of(recipe)
    texts = pair("two?", "2", "three"), pair("a longer one?", "no", "maybe")
    examples = [{**e, "id": n} for n, text in enumerate(texts) for e in task.cut(text, [], None, tokenizer)]
    batch = task.collate(examples, (0,), 7)
    start = len("<two?<<") - 1  # the last mark of the shorter prompt predicts its answer
    moved = pickle.loads(pickle.dumps(batch)).to(torch.device("meta"))
    assert moved.inputs["start"] == batch.inputs["start"] == start and moved.inputs["targets"].is_meta
    assert [half.inputs["start"] for half in halves(batch)] == [start, start]
    assert "start" not in most_work(batch, task).inputs


def logs_by_hand(network: Any, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    logs = network(input_ids=ids).logits.double().log_softmax(-1)
    found = logs.gather(2, targets.clamp_min(0).unsqueeze(2)).squeeze(2)
    return (found * (targets != IGNORE)).sum(1)


@pytest.mark.parametrize("adapter", [False, True])
@pytest.mark.parametrize(("kind", "is_chunked"), [("llama", True), ("gemma2", False)])  # which caps its logits
def test_the_loss_and_its_gradient_are_those_of_the_paper(
    recipe: ModuleType, tokenizer: Any, kind: str, is_chunked: bool, adapter: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **SIZES, num_key_value_heads=2, head_dim=16, vocab_size=300)
    network: Any = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    start = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    start.load_state_dict(network.state_dict())
    if adapter:
        peft = pytest.importorskip("peft")
        peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["q_proj", "down_proj"]), network)
    its = {"dataset_options": {"path": "-", "beta": 0.3}, "adapter": "lora" if adapter else "none"}
    task, model = task_of(recipe, **its), ModelWithLoss(network)
    task.change_loss(model)
    assert (type(network.lm_head).__name__ == "LossHead") is is_chunked
    assert hasattr(model, "reference") is not adapter
    trained = [p for p in model.parameters() if p.requires_grad]
    with torch.no_grad():
        for parameter in trained:
            parameter += 0.05 * torch.randn_like(parameter)

    texts = pair("two?", "2, or so", "three"), pair("a longer one?", "no", "it may be, but who knows")
    examples = [{**e, "id": n} for n, text in enumerate(texts) for e in task.cut(text, [], None, tokenizer)]
    batch = task.collate(examples, (0,), 1)
    chosen, rejected = (batch.inputs[name] for name in ("input_ids", "rejected_ids"))
    targets = [batch.inputs[name] for name in ("targets", "rejected_targets")]
    gains = [
        logs_by_hand(network, ids, own) - logs_by_hand(start, ids, own).detach()
        for ids, own in zip((chosen, rejected), targets, strict=True)
    ]
    expected = -torch.nn.functional.logsigmoid(0.3 * (gains[0] - gains[1]))
    by_hand = torch.autograd.grad(expected.sum(), trained)
    in_head: list[int] = []
    original = recipe.chunked_sum
    monkeypatch.setattr(recipe, "chunked_sum", lambda row, *rest: in_head.append(len(row)) or original(row, *rest))
    loss = model(batch.inputs, batch.labels, num_targets=batch.num_targets)
    torch.testing.assert_close(loss.double(), expected.sum(), rtol=1e-5, atol=0)
    prompt = len("<two?<<")  # the shorter one; its last mark predicts the answer
    assert set(in_head) == ({batch.shape[1] - prompt + 1} if is_chunked else set())
    loss.backward()
    for parameter, wanted in zip(trained, by_hand, strict=True):
        found = parameter.grad
        assert found is not None
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-5 * float(wanted.abs().max()))
    scores = model(batch.inputs, batch.labels, scored=True)
    torch.testing.assert_close(scores.loss_sums.double(), expected, rtol=1e-5, atol=0)
    assert scores.predictions.tolist() == (gains[0] > gains[1]).long().tolist()
    torch.testing.assert_close(scores.counts[0].double(), 0.3 * gains[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("adapter", [False, True])
def test_the_reference_has_no_dropout(
    recipe: ModuleType, tokenizer: Any, adapter: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": 300, "n_positions": 64}
    network = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, embd_pdrop=0.5))
    if adapter:
        peft = pytest.importorskip("peft")
        peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["c_proj"], fan_in_fan_out=True), network)
    task, model = task_of(recipe, adapter="lora" if adapter else "none"), ModelWithLoss(network)
    task.change_loss(model)
    [example] = task.cut(pair("two?", "2, or so", "three"), [], None, tokenizer)
    batch, seen = task.collate([{**example, "id": 0}], (0,), 1), []
    real = recipe.log_p
    monkeypatch.setattr(recipe, "log_p", lambda *arguments: seen.append(real(*arguments)) or seen[-1])
    model.train()
    for _ in range(2):
        model(batch.inputs, batch.labels)
    assert torch.equal(seen[0], seen[2]) and not torch.equal(seen[1], seen[3]) and network.training


def test_the_adapters_of_a_model_that_a_function_gives_belong_to_the_reference(recipe: ModuleType) -> None:
    """They were trained before: without them the reference would be another model than the one that training begins."""
    peft = pytest.importorskip("peft")
    config = transformers.AutoConfig.for_model("llama", **SIZES, vocab_size=300)
    network: Any = transformers.AutoModelForCausalLM.from_config(config)
    made = peft.LoraConfig(target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    peft.inject_adapter_in_model(made, network)
    task, model = task_of(recipe), ModelWithLoss(network)
    task.change_loss(model)
    ids = torch.randint(0, 300, (2, 12), generator=torch.Generator().manual_seed(0))
    shared = {"targets": ids, "rejected_targets": ids}
    batch = {"input_ids": ids, "rejected_ids": ids.flip(1), **shared}
    assert model(batch, torch.ones(2)).item() == pytest.approx(2 * math.log(2), rel=1e-6)  # nothing gained yet


@pytest.fixture
def flags(tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Of a run in which the chosen answer repeats the prompt in capitals."""
    monkeypatch.chdir(ROOT)
    draw, rows = random.Random(0), []
    for _ in range(60):
        word = "".join(draw.choices("abcdefgh", k=draw.randint(3, 9)))
        rows.append({"prompt": word, "chosen": word.upper(), "rejected": word * draw.randint(1, 3)})
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = {"model_type": "llama", **SIZES, "tie_word_embeddings": False}
    its = {
        "task": "recipes/dpo.py:Task",
        "dataset": "recipes/dpo.py:documents",
        "dataset_options": json.dumps({"path": str(tmp_path / "pairs.jsonl")}),
        "tokenizer": tmp_path / "chat",
        "model_config": json.dumps(made),
        "max_length": 64,
    }
    its |= {"micro_batch_size": 4, "global_batch_size": 16, "learning_rate": 0.005, "max_steps": 8}
    its |= {"log_every_steps": 1, "validation_fraction": 0.2, "predict_memory": True}
    return [str(word) for name, value in its.items() for word in (f"--{name}", value)]


@pytest.mark.parametrize("adapter", [(), pytest.param(("--adapter", "lora"), marks=pytest.mark.slow)])
def test_a_run_learns_what_is_preferred_as_predicted_and_resumes_exactly(
    flags: list[str], adapter: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    its = [*flags, *adapter, "--gradient_checkpointing", "full", "--save_every_steps", "4"]
    assert main([*its, "--output_dir", str(tmp_path / "whole")]) == EXIT_DONE
    rows = read_metrics(tmp_path / "whole" / "metrics.jsonl")
    losses = [row["loss"] for row in rows if row["kind"] == "train"]
    assert all(0 <= row["padding_share"] < 0.7 for row in rows if row["kind"] == "train")
    assert losses[0] == pytest.approx(math.log(2), rel=1e-6) and losses[-1] < 0.6
    summary = json.loads((tmp_path / "whole" / "summary.json").read_text())
    found = summary["result"]["validation"]
    assert found["accuracy"] == 1 and found["reward_chosen"] > 0 > found["reward_rejected"]
    assert found["margin"] == pytest.approx(found["reward_chosen"] - found["reward_rejected"])
    # What the meter of a CPU does not see of a second model: embedding and norms, which give no view.
    unseen = 0 if adapter else (260 + 5) * 32 * 4
    assert summary["predicted_peak_bytes"] == pytest.approx(summary["peak_allocated_bytes"] + unseen, rel=0.001)
    assert not any("reference" in name for name in load_file(tmp_path / "whole" / "final" / "model.safetensors"))

    cut = tmp_path / "cut"  # as after a power failure: the newest checkpoint is of step 4
    shutil.copytree(tmp_path / "whole" / "checkpoints" / "step-00000004", cut / "checkpoints" / "step-00000004")
    assert main([*its, "--output_dir", str(cut)]) == EXIT_DONE
    assert "at step 4" in (said := capsys.readouterr().out), said
    assert checkpoint_digests(tmp_path / "cut", 8) == checkpoint_digests(tmp_path / "whole", 8)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("kind", "adapter"),
    [*sampled([(k, a) for a in (("--adapter", "lora"), ()) for k in ("fsdp2", "ddp")], 4), ("deepspeed_zero2", ())],
)
def test_two_ranks_learn_what_one_does(
    flags: list[str], kind: str, adapter: tuple[str, ...], tmp_path: Path, run_main: Run
) -> None:
    """Also where shards stay gathered after the forward, in which the adapter was off."""
    if kind.startswith("deepspeed"):
        pytest.importorskip("deepspeed", exc_type=ImportError)
    assert main([*flags, *adapter, "--output_dir", str(tmp_path / "one")]) == EXIT_DONE
    file = Path(ROOT, "accelerate_configs", f"{kind}.yaml").read_text()
    file = file.replace("mixed_precision: bf16", "mixed_precision: 'no'")  # as on one process
    (tmp_path / "launch.yaml").write_text(file.replace("reshard_after_forward: true", "reshard_after_forward: false"))
    launch = ("accelerate", "launch", "--config_file", str(tmp_path / "launch.yaml"), "--num_processes", "2")
    both = *flags, *adapter, "--micro_batch_size", 2, "--output_dir", tmp_path / "two"
    done = run_main(*both, prefix=(*launch, "--main_process_port", "0"))
    assert done.returncode == EXIT_DONE, done.stderr
    if adapter:
        one, two = (load_file(tmp_path / name / "final/adapter/adapter_model.safetensors") for name in ("one", "two"))
        assert one.keys() == two.keys() and len(one) == 2 * 2 * 7  # A and B of 7 matrices in 2 layers
        for name, tensor in one.items():
            torch.testing.assert_close(two[name], tensor, rtol=1e-3, atol=1e-4)
    one, two = (
        [row["loss"] for row in read_metrics(tmp_path / name / "metrics.jsonl") if row["kind"] == "train"]
        for name in ("one", "two")
    )
    assert two == pytest.approx(one, rel=1e-5)


@pytest.mark.slow
def test_a_plan_is_of_two_answers_as_long_as_they_may_be(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    its = [*flags, "--max_length", "32", "--max_steps", "1", "--mixed_precision", "no"]
    assert main([*its, "--output_dir", str(tmp_path / "run")]) == EXIT_DONE
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    capsys.readouterr()
    assert memory.main(["predict", "--device", "cpu", "--json", *its]) == EXIT_DONE
    found = json.loads(capsys.readouterr().out)
    assert found["prediction"]["peak_bytes"] == summary["predicted_peak_bytes"]


@pytest.mark.parametrize(
    ("changed", "status", "said"),
    [
        (["--packing", "True"], EXIT_USAGE, "packing: the two answers of a pair have a row each"),
        (["--task", "causal_lm"], EXIT_USAGE, "give --task recipes/dpo.py:Task"),
        (["--dataset_options", '{"path": "pairs.jsonl", "beta": 0}'], EXIT_USAGE, "beta > 0"),
        (["--dataset_options", '{"path": "pairs.jsonl", "gamma": 1}'], EXIT_USAGE, "takes path, config, split, valida"),
        (["--label_smoothing", "0.1"], EXIT_ERROR, "this run has another loss"),
        (["--tokenizer", "bytes"], EXIT_ERROR, "chat"),
    ],
)
def test_what_does_not_fit_is_refused_in_a_line(
    flags: list[str], changed: list[str], status: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*flags, *changed, "--output_dir", str(tmp_path / "run")]) == status
    error = capsys.readouterr().err
    assert said in error and "Traceback" not in error, error


def test_a_row_without_answers_and_a_template_that_rewrites_prompts_are_named(
    recipe: ModuleType, tokenizer: Any
) -> None:
    with pytest.raises(UserError, match=re.escape("row 3: chosen and rejected are needed; the columns are question.")):
        recipe.pair_of({"question": "two?"}, "row 3")
    with pytest.raises(UserError, match="row 3: two answers without a prompt; the columns are query, chosen, reject"):
        recipe.pair_of({"query": "two?", "chosen": "2", "rejected": "3"}, "row 3")
    with pytest.raises(UserError, match="row 3: its chosen is neither a text nor a list of messages"):
        recipe.pair_of({"prompt": "two?", "chosen": 2, "rejected": "3"}, "row 3")
    with pytest.raises(UserError, match="a text without chosen and rejected: give --dataset recipes/dpo"):
        next(task_of(recipe).cut(json.dumps({"messages": [ASK]}), [], None, tokenizer))
    tokenizer.chat_template = FORGETFUL
    with pytest.raises(UserError, match="writes a prompt in another way once it is answered"):
        next(task_of(recipe).cut(pair("wow! two?", "2", "3"), [], None, tokenizer))
