"""The model card: front matter the Hub can read, results, and nothing of the machine's folders."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from train.config import Config, from_values
from train.extras.report.model_card import model_card
from train.tasks import Task
from train.tasks.causal_lm import Task as CausalLM
from train.tasks.sequence_classification import Task as SequenceClassification


class _MyTask(Task):
    name = "my_task"
    auto_class = "AutoModel"


def _config(**values: Any) -> Config:
    return from_values({"tokenizer": "bytes", "model_config": {"model_type": "llama"}, **values})


def _front_matter(card: str) -> dict[str, Any]:
    return yaml.safe_load(card.split("---")[1])


def test_front_matter_by_task():
    assert _front_matter(model_card(_config(), CausalLM, {})) == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["accelerate", "long-context", "causal-lm"],
    }
    config = _config(
        task="sequence_classification", model_config=None, model="answerdotai/ModernBERT-base", dataset="stanford/imdb"
    )
    matter = _front_matter(model_card(config, SequenceClassification, {}))
    assert matter["pipeline_tag"] == "text-classification"
    assert matter["base_model"] == "answerdotai/ModernBERT-base" and matter["datasets"] == ["stanford/imdb"]
    assert "pipeline_tag" not in _front_matter(model_card(_config(task="my_task"), _MyTask, {}))


def test_front_matter_of_what_a_function_builds(tmp_path: Path):
    (tmp_path / "final").mkdir()
    config = _config(model="nets:build", model_config=None, output_dir=str(tmp_path))
    for written, library, pipeline in ("", None, None), ("adapter_config.json", "peft", None):
        if written:
            (tmp_path / "final" / written).write_text("{}")
        matter = _front_matter(model_card(config, CausalLM, {}))
        assert (matter.get("library_name"), matter.get("pipeline_tag")) == (library, pipeline)


def test_classes_and_code_of_the_hub():
    config = _config(model="user/name", model_config=None, tokenizer=None, trust_remote_code=True)
    card = model_card(config, SequenceClassification, {"label_names": ["bad", "good"]})
    assert "| classes | bad, good |" in card and '("path/to/this/folder", trust_remote_code=True)' in card


def test_results_settings_and_machine():
    summary = {
        "steps": 300,
        "tokens": 1_228_800,
        "training_seconds": 92,
        "peak_allocated_bytes": 5 * 2**30,
        "hardware": {
            "platform": "Linux 6.8",
            "cpu": "A CPU",
            "gpus": [{"name": "NVIDIA L4", "memory_bytes": 24 * 2**30}],
        },
        "versions": {"torch": "2.13.0"},
        "final_step": 300,
        "result": {
            "validation": {"loss": 1.875, "confusion_matrix": [[1]], "data": "fc411ea23b1ccca9"},
            "test": {"loss": 1.92, "bits_per_byte": 2.63},
        },
    }
    card = model_card(_config(learning_rate=1e-3), CausalLM, summary)
    assert "| split | step | loss | bits per byte |" in card
    assert "| validation | 300 | 1.875 |  |" in card and "| test | 300 | 1.920 | 2.630 |" in card
    for row in ("| steps | 300 |", "| tokens | 1228800 |", "| max_length | 1024 |", "| learning_rate | 0.001 |"):
        assert row in card
    for row in ("| GPU | NVIDIA L4 (24.00 GiB) |", "| training time | 1 min 32 s |"):
        assert row in card
    assert 'AutoModelForCausalLM.from_pretrained("path/to/this/folder")' in card
    assert "Linux" not in card and "PeftModel" not in card


def test_adapters_name_their_base():
    own = {"adapter": "lora", "lora_rank": 6}
    card = model_card(_config(**own, model="answerdotai/ModernBERT-base", model_config=None), CausalLM, {})
    assert "model fine-tuned from `answerdotai/ModernBERT-base` by LoRA of rank 6 on `" in card
    assert "`PeftModel.from_pretrained(base, ...)`; its base is `answerdotai/ModernBERT-base`, loaded with `" in card
    scratch = model_card(_config(**own, seed=5), CausalLM, {})
    assert "trained from scratch by LoRA" in scratch and "its base is this model as seed 5 initialises it." in scratch


@pytest.mark.parametrize(("name", "is_of_the_hub"), [("gpt2", True), ("user/name", True), ("some/own/folder", False)])
def test_a_name_of_the_hub_has_one_slash_at_most(name: str, is_of_the_hub: bool):
    matter = _front_matter(model_card(_config(model=name, model_config=None), CausalLM, {}))
    assert matter.get("base_model") == (name if is_of_the_hub else None)


def test_local_paths_are_not_published(tmp_path: Path):
    data = tmp_path / "secret-client" / "texts.jsonl"
    config = _config(
        dataset=str(data), model=str(tmp_path / "home" / "base"), model_config=None, output_dir=str(tmp_path)
    )
    card = model_card(config, CausalLM, {})
    assert str(tmp_path) not in card and "secret-client" not in card and "base_model" not in card
    assert "`texts.jsonl`" in card and "fine-tuned from `base`" in card


def test_a_model_of_ones_own_code_says_how_to_load_it():
    card = model_card(_config(model="my_package.nets:build", model_config=None), CausalLM, {})
    assert "safetensors.torch.load_model" in card and "base_model" not in card
    assert "A causal language model that `my_package.nets:build` builds, trained on `" in card


@pytest.mark.parametrize(
    ("written", "said"),
    [("adapter_config.json", "`PeftModel.from_pretrained(base, "), ("config.json", "CausalLM.from_pretrained(")],
)
def test_what_a_function_builds_of_a_library_is_loaded_by_that(tmp_path: Path, written: str, said: str):
    (tmp_path / "final").mkdir()
    (tmp_path / "final" / written).write_text("{}")
    config = _config(model="nets:build", model_config=None, output_dir=str(tmp_path))
    card = model_card(config, CausalLM, {})
    assert said in card and "load_model" not in card


def test_a_file_of_ones_own_code_is_no_folder_and_is_named_without_its_place(tmp_path: Path):
    (tmp_path / "clients").mkdir()
    (tmp_path / "clients" / "nets.py").touch()
    data, model = (f"{tmp_path}/clients/{name}" for name in ("texts.py:documents", "nets.py:build"))
    card = model_card(_config(dataset=data, model=model, model_config=None), CausalLM, {})
    assert "build the model with `nets.py:build` and fill it with `safetensors.torch.load_model`" in card
    assert "`texts.py:documents`" in card and "clients" not in card and "base_model" not in card


def test_a_relative_place_of_ones_own_code_is_not_shown():
    card = model_card(_config(dataset="clients/texts.py:documents"), CausalLM, {})
    assert "on `texts.py:documents`" in card and "clients" not in card


def test_html_and_control_characters_do_not_pass():
    bad = "<script>\n\n\x1b[31m`<img src=x>"
    card = model_card(_config(run_name="<b>x", dataset=f"/{bad}"), CausalLM, {"hardware": {"cpu": bad}})
    outside = re.sub("`[^`\n]*`", "", card.split("---")[2])
    assert "# &lt;b&gt;x" in card and "<" not in outside and "\x1b" not in card
    assert "`<script> \\x1b[31m'<img src=x>`" in card


def test_a_pipe_does_not_break_the_table():
    summary = {"hardware": {"cpu": "A | B"}}
    assert "| CPU | A \\| B |" in model_card(_config(), CausalLM, summary)
