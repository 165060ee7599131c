"""The study of context: what is measured of a model, and the faults that its sentences tell."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from support import sampled, takes_minutes, write_recipe
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from scripts.benchmarks import building, study
from scripts.benchmarks.study import context
from train.main import main as train

VOCABULARY, LENGTH = 24, 63


class Copier(nn.Module):
    """Expects what followed the last occurrence of a token within its memory, and otherwise nothing in particular."""

    def __init__(self, memory: int, entries: int) -> None:
        super().__init__()
        self.memory, self.entries, self.weight = memory, entries, nn.Parameter(torch.zeros(()))

    def forward(self, input_ids: Tensor) -> Tensor:
        logits = torch.zeros(*input_ids.shape, self.entries)
        for row, ids in enumerate(input_ids.tolist()):
            for place, token in enumerate(ids):
                seen = range(max(0, place - self.memory), place)
                if known := [ids[i + 1] for i in seen if ids[i] == token]:
                    logits[row, place, known[-1]] = 9.0
        return logits


def periodic(count: int, seed: int) -> Tensor:
    """(count, LENGTH + 1) rows that repeat random tokens, each at a period of its own."""
    generator, rows = torch.Generator().manual_seed(seed), []
    for _ in range(count):
        period = int(torch.randint(8, LENGTH - 8, (), generator=generator))
        once = torch.randint(VOCABULARY, (period,), generator=generator)
        rows.append(once.repeat(-(-(LENGTH + 1) // period))[: LENGTH + 1])
    return torch.stack(rows)


def test_losses_are_those_of_the_next_token_at_each_position() -> None:
    rows = torch.tensor([[5, 6, 5, 6, 7]])
    certain = torch.log_softmax(torch.tensor([9.0, *[0.0] * 9]), 0)
    found = context.losses_at(Copier(8, 10), rows, [0, 2, 3])
    assert found[0].tolist() == pytest.approx(
        [torch.tensor(10.0).log().item(), -certain[0].item(), -certain[1].item()], rel=1e-3
    )


@pytest.mark.parametrize(("memory", "reach"), [(400, 232), (100, 64), (30, 16), (10, None)])
def test_a_repetition_is_recalled_from_as_far_as_memory_reaches(memory: int, reach: int | None) -> None:
    rows = torch.stack([torch.randperm(4000)[:256] for _ in range(4)])  # no token twice, but for what is repeated
    model = Copier(memory, 4000)
    found = context.measured(model, rows, [64, 128], 8)
    assert [needle["distance"] for needle in found["needles"]] == [8, 16, 32, 64, 128, 232]
    assert context.reach_of(found) == reach
    assert not any("PROBLEM" in sentence for sentence in context.sentences(found))


def test_what_lies_further_back_is_measured_against_the_last_tokens_alone() -> None:
    half = torch.randperm(4000)[:32]
    rows = torch.stack([torch.cat([half.roll(i), half.roll(i), half.roll(i)[:1]]) for i in range(4)])
    found = context.measured(Copier(400, 4000), rows, [16, 40], 64)
    few, enough = context.gain_of(found, "16"), context.gain_of(found, "40")
    assert few.is_shown and few.mean == pytest.approx(0.66 * 8.29, rel=0.05)  # from position 32 of 16 to 63 on
    assert enough.mean == 0.0
    said = context.sentences(found)
    assert "Beyond the last 16 tokens: what lies further back takes" in said[0] and "show no use" in said[1]


def test_a_context_that_harms_is_called_a_problem() -> None:
    class Distracted(Copier):
        def forward(self, input_ids: Tensor) -> Tensor:
            found = super().forward(input_ids)
            return found if input_ids.shape[1] <= 40 else 0.1 * found

    rows = torch.stack([torch.randperm(VOCABULARY)[:8].repeat(8) for _ in range(4)])
    found = context.measured(Distracted(400, VOCABULARY), rows, [32], 16)
    assert "PROBLEM: seeing only the last 32 tokens is better by" in context.sentences(found)[0]


def test_refusals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert study.main(["context", "--run", str(tmp_path), "--output_dir", str(tmp_path / "out")]) == 2
    assert "there is no final/ in it" in capsys.readouterr().err
    few = ["context", "--run", str(tmp_path), "--output_dir", str(tmp_path / "out"), "--positions", "0"]
    assert study.main(few) == 2 and "--positions" in capsys.readouterr().err
    with pytest.raises(Exception, match="--windows 64: give numbers from 1 to 62"):
        context.measured(Copier(8, VOCABULARY), periodic(2, 1)[:, :64], [64], 4)


def test_a_finished_run_is_studied(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe, run, texts = write_recipe(tmp_path), tmp_path / "run", tmp_path / "long.jsonl"
    texts.write_text("".join(json.dumps({"text": f"{n} " * 200}) + "\n" for n in range(100, 140)))
    words = ["--dataset", str(texts), "--max_steps", "1", "--max_length", "64", "--output_dir", str(run)]
    assert train(["--config", str(recipe), *words]) == 0
    words = ["--run", str(run), "--output_dir", str(tmp_path / "out"), "--rows", "4", "--positions", "4"]
    assert study.main(["context", *words]) == 0, capsys.readouterr().err
    found = json.loads((tmp_path / "out" / "context.json").read_text())
    assert len(found["losses"]) == 4 and set(found["windows"]) == {str(found["length"] // n) for n in (2, 4)}
    page = (tmp_path / "out" / "index.html").read_text()
    assert "Loss by position" in page and "tokens between" in page and "mathdefault" not in page


MODULE = """
from torch import nn

class Next(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.head = nn.Embedding(300, 8), nn.Linear(8, 300)

    def forward(self, input_ids):
        return self.head(self.tokens(input_ids))
"""


def test_a_function_s_model_has_the_weights_that_were_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, run, texts, source = (tmp_path / name for name in ("r.yaml", "run", "long.jsonl", "own.py"))
    texts.write_text("".join(json.dumps({"text": "ab" * 200}) + "\n" for _ in range(9)))
    source.write_text(MODULE)
    recipe.write_text(f"dataset: {texts}\nmodel: {source}:Next\ntokenizer: bytes\nmax_length: 64\nmax_steps: 30\n")
    flags = ["--learning_rate", "0.1", "--predict_memory", "False", "--output_dir", str(run)]
    assert train(["--config", str(recipe), *flags]) == 0
    words = ["--run", str(run), "--output_dir", str(tmp_path / "out"), "--rows", "4", "--positions", "1"]
    assert study.main(["context", *words]) == 0, capsys.readouterr().err
    found = json.loads((tmp_path / "out" / "context.json").read_text())
    assert max(map(max, found["losses"])) < 0.1  # random weights: 5.7


def test_a_function_s_adapters_are_those_that_were_trained(tmp_path: Path) -> None:
    recipe, run, base = write_recipe(tmp_path), tmp_path / "run", tmp_path / "base"
    config = LlamaConfig(vocab_size=384, hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
    LlamaForCausalLM(config).save_pretrained(base)
    (tmp_path / "own.py").write_text(
        "from peft import LoraConfig, get_peft_model\nfrom transformers import AutoModelForCausalLM\n\n"
        f"def build():\n    base = AutoModelForCausalLM.from_pretrained({str(base)!r})\n"
        "    return get_peft_model(base, LoraConfig(r=2, target_modules=['q_proj'], task_type='CAUSAL_LM'))\n"
    )
    flags = ["--model", f"{tmp_path}/own.py:build", "--tokenizer", "bytes", "--max_steps", "2"]
    assert train(["--config", str(recipe), *flags, "--output_dir", str(run)]) == 0
    model: Any = building.finished_run(run, [])[0]
    found = {name.replace(".default", ""): tensor for name, tensor in model.state_dict().items() if "lora_" in name}
    saved = load_file(run / "final" / "adapter_model.safetensors")
    torch.testing.assert_close(found, saved, rtol=0, atol=0)
    assert any(tensor.any() for name, tensor in saved.items() if "lora_B" in name)  # zero before training


# ---- faults planted in a model that can copy -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def able() -> LlamaForCausalLM:
    """A llama of two layers that has learned to copy over its whole length; about half a minute."""
    torch.manual_seed(0)
    sizes: Any = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    rope = {"rope_type": "default", "rope_theta": 100.0}
    config = LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=LENGTH + 1, rope_parameters=rope, **sizes)
    model, steps = LlamaForCausalLM(config), 900
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.0)
    for step in range(steps):
        rows = periodic(32, step)
        logits = model(input_ids=rows[:, :-1]).logits
        F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1.0, (step + 1) / 50) * (1 - 0.9 * step / steps)
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


class Broken(nn.Module):
    """A model whose inputs pass through ``change`` first."""

    def __init__(self, model: nn.Module, change: Callable[[dict[str, Any]], None]) -> None:
        super().__init__()
        self.model, self.change = model, change

    def forward(self, **inputs: Any) -> Any:
        ids = inputs["input_ids"]
        inputs["position_ids"] = torch.arange(ids.shape[1]).expand(ids.shape).clone()
        self.change(inputs)
        return self.model(**inputs)


def positions(change: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Any]], None]:
    return lambda inputs: inputs.update(position_ids=change(inputs["position_ids"]))


def visible(rule: Callable[[Tensor, Tensor], Tensor]) -> Callable[[dict[str, Any]], None]:
    """Attention from query to key places only where the rule says so, and where both are causal."""

    def change(inputs: dict[str, Any]) -> None:
        batch, length = inputs["input_ids"].shape
        query, key = torch.arange(length)[:, None], torch.arange(length)[None]
        allowed = (key <= query) & rule(query, key) | (key == query)
        inputs["attention_mask"] = allowed.expand(batch, 1, length, length)

    return change


def tokens(change: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Any]], None]:
    return lambda inputs: inputs.update(input_ids=change(inputs["input_ids"]))


def without_head(ids: Tensor) -> Tensor:
    return torch.cat([torch.zeros_like(ids[:, : ids.shape[1] // 2]), ids[:, ids.shape[1] // 2 :]], 1)


FAULTS: dict[str, Callable[[dict[str, Any]], None]] = {
    "rope: linear factor 2": positions(lambda p: p // 2),
    "rope: linear factor 4": positions(lambda p: p // 4),
    "rope: stretched twice": positions(lambda p: 2 * p),
    "rope: stretched five times": positions(lambda p: 5 * p),
    "rope: reversed": positions(lambda p: -p),
    "rope: the same everywhere": positions(torch.zeros_like),
    "rope: ends at 16": positions(lambda p: p.clamp(max=16)),
    "rope: ends at 32": positions(lambda p: p.clamp(max=32)),
    "rope: starts again at 16": positions(lambda p: p % 16),
    "rope: starts again at 32": positions(lambda p: p % 32),
    "rope: a jump of 200": positions(lambda p: p + 200 * (p >= 32)),
    "mask: a window of 4": visible(lambda query, key: query - key < 4),
    "mask: a window of 8": visible(lambda query, key: query - key < 8),
    "mask: a window of 16": visible(lambda query, key: query - key < 16),
    "mask: a window of 32": visible(lambda query, key: query - key < 32),
    "mask: itself alone": visible(lambda query, key: query == key),
    "mask: not the token before": visible(lambda query, key: query - key != 1),
    "mask: only every other": visible(lambda query, key: (query - key) % 2 == 0),
    "mask: not the first half": visible(lambda query, key: key >= 32),
    "packing: documents of 8": visible(lambda query, key: query // 8 == key // 8),
    "packing: documents of 16": visible(lambda query, key: query // 16 == key // 16),
    "packing: documents of 32": visible(lambda query, key: query // 32 == key // 32),
    "truncation: the first half is lost": tokens(without_head),
    "truncation: every other token is lost": tokens(lambda ids: ids * (torch.arange(ids.shape[1]) % 2)),
    "truncation: moved by half": tokens(lambda ids: ids.roll(ids.shape[1] // 2, 1)),
}


def study_of(model: nn.Module) -> dict[str, Any]:
    return context.measured(model, periodic(32, 10**6), [16, 32], 32)


@pytest.mark.slow
@takes_minutes
def test_faults_of_positions_masks_packing_and_truncation_are_found(
    able: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(context, "NEEDLE_TOKENS", 8)
    healthy = study_of(Broken(able, lambda inputs: None))
    far = healthy["needles"][-1]["distance"]
    assert context.reach_of(healthy) == far
    assert not any("PROBLEM" in sentence for sentence in context.sentences(healthy))
    assert context.gain_of(healthy, "16").mean > 0.5
    missed = []
    for name, change in sampled(FAULTS.items(), 3):
        found = study_of(Broken(able, change))
        is_told = any("PROBLEM" in sentence for sentence in context.sentences(found))
        if (context.reach_of(found) or 0) == far and not is_told:
            missed.append(name)
    assert missed == ["rope: linear factor 2"]  # which doubles the loss, but at all positions alike
