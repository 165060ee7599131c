"""LoRA and QLoRA: what is trained, what a checkpoint holds, and what ``final/`` computes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from safetensors.torch import load_file
from support import run_for
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from train.config import Config, parse
from train.extras.adapters.lora import add_adapter
from train.extras.losses.in_head import obstacle_to_chunks, use_loss_in_head
from train.extras.readers.own_tokenizers import build_tokenizer
from train.main import main
from train.model import ModelWithLoss, build_model
from train.optim import parameter_counts
from train.records import EXIT_DONE, EXIT_ERROR, EXIT_USAGE, UsageError, UserError
from train.tasks import Task, load_task

pytest.importorskip("peft")
needs_bitsandbytes = pytest.mark.skipif(
    __import__("importlib.util").util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed"
)
KINDS = ["lora", pytest.param("qlora", marks=needs_bitsandbytes)]

BYTES = build_tokenizer("bytes", ())
CAUSAL, CLASSES = map(load_task, ("causal_lm", "sequence_classification"))
SHAPE = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
LLAMA = {"model_type": "llama", **SHAPE, "num_key_value_heads": 2}
STEPS = 5


def built(
    model_config: Any = LLAMA, task: type[Task] = CAUSAL, precision: str = "no", max_length: int = 32, **settings: Any
) -> Any:
    """The network that a run with these settings would train."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    torch.manual_seed(settings.get("seed", 0))
    names = ("no", "yes") if task is CLASSES else ()
    config = Config().changed(task=task.name, model_config=model_config, max_length=max_length, **settings)
    return build_model(run_for(config, Accelerator(cpu=True, mixed_precision=precision)), task, BYTES, names).model


def batch() -> tuple[dict[str, Tensor], Tensor]:
    ids = torch.arange(3, 27).view(2, 12)
    return {"input_ids": ids}, ids.clone()


def gradients(model: nn.Module, chunked: bool = False) -> tuple[Tensor, dict[str, Tensor]]:
    torch.manual_seed(1)
    inputs, labels = batch()
    with_loss = ModelWithLoss(model.train())
    if chunked:
        use_loss_in_head(with_loss, "chunked")
    loss = with_loss(inputs, labels)
    loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), found


def moved(model: nn.Module) -> nn.Module:
    """``model`` with adapters that do something: fresh ones add nothing."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.1, generator=generator)
    return model


@pytest.mark.parametrize("adapter", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapters_alone_are_trained_in_fp32(adapter: str, dtype: str) -> None:
    model = built(adapter=adapter, dtype=dtype, lora_rank=4)
    assert hasattr(model, "peft_config") and not hasattr(built(), "peft_config")
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert len(trained) == 2 * 7 * 2  # A and B of seven layers in two blocks; none of the head
    assert all("lora_" in name and p.dtype == torch.float32 for name, p in trained.items())
    _, found = gradients(moved(model))
    assert found.keys() == trained.keys()
    assert all(g.abs().sum() > 0 for g in found.values())


@pytest.mark.parametrize("adapter", KINDS)
def test_parameters_are_counted_as_weights_not_as_bytes(adapter: str) -> None:
    everything = sum(p.numel() for p in built().parameters())
    trained = 4 * 2 * (4 * (64 + 64) + 3 * (64 + 96))  # rank × blocks × (in + out) of each layer
    assert parameter_counts(built(adapter=adapter, lora_rank=4)) == (trained, everything + trained)


@pytest.mark.parametrize("adapter", KINDS)
@pytest.mark.parametrize("mode", ["full", "selective"])
def test_checkpointing_and_chunks_change_no_gradient(adapter: str, mode: str) -> None:
    loss, expected = gradients(moved(built(adapter=adapter, lora_dropout=0.1)))
    again = moved(built(adapter=adapter, lora_dropout=0.1, gradient_checkpointing=mode))
    assert obstacle_to_chunks(again)[0] is None
    chunked_loss, found = gradients(again, chunked=True)
    torch.testing.assert_close(chunked_loss, loss, rtol=1e-6, atol=0)
    assert found.keys() == expected.keys()
    for name, gradient in found.items():  # fp32 sums in another order
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-5, msg=name)


@needs_bitsandbytes
def test_layers_that_a_model_keeps_whole_are_not_kept_in_four_bits() -> None:
    """T5 casts what goes through its MLPs to the type of a weight: to bytes, if that one had 4 bits."""
    sizes = {"d_model": 64, "d_ff": 128, "d_kv": 16, "num_heads": 4, "num_layers": 2, "decoder_start_token_id": 0}
    t5 = {"model_type": "t5", **sizes, "dropout_rate": 0.0}
    model = built(t5, CLASSES, adapter="qlora")
    outer = model.transformer.encoder.block[0].layer[-1].DenseReluDense.wo
    assert type(outer.get_base_layer()) is nn.Linear and outer.get_base_layer().weight.dtype == torch.float32
    ids = torch.arange(3, 27).view(2, 12)
    ids[:, -1] = model.config.eos_token_id
    model(input_ids=ids).logits.sum().backward()
    assert outer.lora_B.default.weight.grad.abs().sum() > 0
    with torch.no_grad():
        whole, small = (m.eval()(input_ids=ids).logits for m in (built(t5, CLASSES, adapter="lora"), model))
    assert torch.dist(small, whole) < 0.4 * whole.norm()  # the error of 4 bits; 1.3 with MLPs of bytes


@needs_bitsandbytes
def test_a_model_that_casts_to_bytes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """LongT5 is like T5, but does not say which of its layers have to be whole."""
    monkeypatch.setattr(transformers.T5PreTrainedModel, "_keep_in_fp32_modules", None)
    sizes = {"d_model": 64, "d_ff": 128, "d_kv": 16, "num_heads": 4, "num_layers": 2, "decoder_start_token_id": 0}
    model = built({"model_type": "t5", **sizes, "dropout_rate": 0.0}, CLASSES, adapter="qlora")
    with pytest.raises(UserError, match=r"qlora does not work here: this model casts to the type of a weight, .*lora"):
        model(input_ids=torch.arange(3, 27).view(2, 12))


@needs_bitsandbytes
def test_weights_in_four_bits_take_an_eighth_and_multiply_in_the_runs_precision() -> None:
    from bitsandbytes.nn import Linear4bit

    model = built(adapter="qlora", precision="bf16")
    layers: list[Any] = [m for m in model.modules() if isinstance(m, Linear4bit)]
    assert len(layers) == 14
    for layer in layers:
        assert layer.weight.quant_state.nested and layer.weight.quant_state.quant_type == "nf4"
        assert layer.weight.numel() * layer.weight.element_size() * 2 == layer.in_features * layer.out_features
        assert layer.compute_dtype == torch.bfloat16
    assert type(model.get_output_embeddings()) is nn.Linear
    assert built(adapter="qlora").model.layers[0].mlp.up_proj.get_base_layer().compute_dtype == torch.float32


@pytest.mark.parametrize("adapter", KINDS)
def test_training_goes_on_after_an_evaluation(adapter: str) -> None:
    """Some layers in 4 bits repack their weights in evaluation, and have no gradient from then on."""
    model = moved(built(adapter=adapter))
    _, before = gradients(model)
    model.zero_grad()
    with torch.no_grad():
        model.eval()(**batch()[0])
    _, after = gradients(model)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_head_of_a_classifier_is_trained_whole() -> None:
    for architecture in (LLAMA, {"model_type": "modernbert", **SHAPE}, {"model_type": "bert", **SHAPE}):
        model = built(architecture, CLASSES, adapter="lora")
        heads = {n for n, p in model.named_parameters() if p.requires_grad and "lora_" not in n}
        assert heads and all(not n.startswith(model.base_model_prefix) for n in heads)
        inside = [n for n, _ in model.named_parameters() if "lora_" in n]
        assert inside and all(n.startswith(model.base_model_prefix) for n in inside)


@pytest.mark.parametrize(
    ("kind", "task_type", "heads"),
    [
        ("SequenceClassification", "SEQ_CLS", {"classifier"}),
        ("TokenClassification", "TOKEN_CLS", {"classifier"}),
        ("QuestionAnswering", None, {"qa_outputs"}),
        ("MaskedLM", None, set()),
    ],
)
def test_a_head_that_no_pretrained_model_brings_is_trained_whole(kind: str, task_type: str, heads: set[str]) -> None:
    config: Any = AutoConfig.for_model("bert", vocab_size=300, **SHAPE)
    model = getattr(transformers, f"AutoModelFor{kind}").from_config(config)
    add_adapter(model, run_for(Config().changed(adapter="lora")), f"AutoModelFor{kind}")
    assert {n.partition(".")[0] for n, p in model.named_parameters() if p.requires_grad and "lora_" not in n} == heads
    settings = model.peft_config["default"]
    assert settings.task_type == task_type and set(settings.modules_to_save or ()) == heads


@pytest.mark.parametrize("model_type", ["llama", "modernbert", "bert"])
def test_head_in_fp32_takes_what_layers_in_16_bits_give(model_type: str) -> None:
    """Without autocast; the loss is that of the same weights in fp32, as far as bf16 goes."""
    losses = []
    for dtype in (torch.float32, torch.bfloat16):
        model = built({"model_type": model_type, **SHAPE}, CLASSES, adapter="lora", dtype="bfloat16").eval()
        model = model.float() if dtype == torch.float32 else model
        loss = ModelWithLoss(model, task=CLASSES)(batch()[0], torch.tensor([0, 1]))
        loss.backward()
        trained = [p for p in model.parameters() if p.requires_grad]
        assert all(p.grad is not None and p.dtype == p.grad.dtype == torch.float32 for p in trained)
        losses.append(loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=0.05)


@pytest.mark.parametrize("adapter", KINDS)
def test_experts_that_are_left_out_are_said_with_their_share(
    adapter: str, recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mixture = {**LLAMA, "model_type": "mixtral", "num_local_experts": 8, "intermediate_size": 64}
    experts = 2 * 8 * 3 * 64 * 64  # blocks × experts × matrices
    every = sum(p.numel() for p in built(mixture).parameters())
    flags = ("--adapter", adapter, "--lora_rank", 1, "--max_steps", 1, "--model_config", json.dumps(mixture))
    assert train(recipe, tmp_path / "run", *flags) == EXIT_DONE
    [said] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("adapter: ")]
    trained = json.loads((tmp_path / "run" / "summary.json").read_text())["num_trained_parameters"]
    assert f"{experts / (every + trained):.0%} of the parameters" in said and "experts.gate_up_proj" in said
    assert ("stay in full precision" in said) == (adapter == "qlora") and said.endswith("get no adapters")
    assert train(recipe, tmp_path / "dense", *flags[:-1], json.dumps(LLAMA)) == EXIT_DONE
    assert "adapter: " not in capsys.readouterr().out


DENSE_FIRST = {"model_type": "glm4_moe", "moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2}
DENSE_FIRST |= {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "head_dim": 8, "num_key_value_heads": 2}


def test_dense_layers_next_to_experts_get_adapters_of_their_own() -> None:
    """peft would take their names for those of the experts, and leave them out."""
    model = built({**LLAMA, **DENSE_FIRST}, adapter="lora")
    adapted = {n.split(".lora_")[0] for n, p in model.named_parameters() if ".lora_" in n and p.requires_grad}
    assert {f"model.layers.0.mlp.{name}_proj" for name in ("gate", "up", "down")} <= adapted
    assert not any("experts" in name and "shared" not in name for name in adapted)


def test_a_linear_layer_with_a_forward_of_its_own_gets_an_adapter() -> None:
    """Falcon's multiplies by itself."""
    model = built(
        {"model_type": "falcon", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}, adapter="lora"
    )
    assert {n.split(".lora_")[0].rpartition(".")[2] for n, p in model.named_parameters() if p.requires_grad} == {
        "query_key_value",
        "dense",
        "dense_h_to_4h",
        "dense_4h_to_h",
    }


def test_a_router_that_gives_more_than_a_product_gets_no_adapter() -> None:
    """phimoe's is a linear layer that returns a tuple."""
    mixture = {**LLAMA, "model_type": "phimoe", "num_local_experts": 4, "num_experts_per_tok": 2}
    model = built(mixture, adapter="lora")
    adapted = {n.split(".lora_")[0] for n, p in model.named_parameters() if ".lora_" in n}
    assert any(name.endswith("q_proj") for name in adapted) and not any("router" in name for name in adapted)
    model(input_ids=torch.tensor([[1, 2, 3]]))


def test_chosen_layers_get_adapters_and_wrong_names_are_refused() -> None:
    model = built(adapter="lora", lora_target_modules=("q_proj", "v_proj"))
    assert {n.split(".lora_")[0].rpartition(".")[2] for n, p in model.named_parameters() if p.requires_grad} == {
        "q_proj",
        "v_proj",
    }
    with pytest.raises(UserError, match=r"adapter: lora does not work with this model: .*no_such_layer"):
        built(adapter="lora", lora_target_modules=("no_such_layer",))
    with pytest.raises(UserError, match="lora_target_modules: no layer that takes adapters is called v_porj, x"):
        built(adapter="lora", lora_target_modules=("q_proj", "v_porj", "x"))


class Blocks(nn.Module):
    """A classifier that is not of transformers, whose linear layers have numbers for names, as their blocks have."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.score = nn.Embedding(300, 8), nn.Linear(8, 2)
        self.blocks = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)) for _ in range(12)])


@pytest.mark.parametrize("auto_class", ["AutoModelForCausalLM", "AutoModelForSequenceClassification"])
def test_all_linear_layers_of_any_model_get_adapters_whatever_their_names(auto_class: str) -> None:
    model = Blocks()
    add_adapter(model, run_for(Config().changed(adapter="lora")), auto_class)
    adapted = {name.split(".lora_")[0] for name, p in model.named_parameters() if p.requires_grad}
    assert adapted == {"score", *(f"blocks.{block}.{layer}" for block in range(12) for layer in (0, 2))}


# Runs


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A folder with a pretrained model."""
    folder = tmp_path / "base"
    config = {**LLAMA, "max_position_embeddings": 64, "tie_word_embeddings": True}
    built(config, max_length=64, seed=5).save_pretrained(folder)
    BYTES.save_pretrained(folder)
    return folder


def test_a_functions_model_may_bring_adapters_of_its_own(recipe: Path, base: Path, tmp_path: Path) -> None:
    from peft import PeftModel

    (tmp_path / "with_peft.py").write_text(
        "from peft import LoraConfig, get_peft_model\nfrom transformers import AutoModelForCausalLM\n\n"
        f"def build():\n    base = AutoModelForCausalLM.from_pretrained({str(base)!r})\n"
        "    return get_peft_model(base, LoraConfig(r=2, target_modules=['q_proj']))\n"
    )
    flags = ("--model", f"{tmp_path}/with_peft.py:build", "--tokenizer", "bytes", "--max_steps", 1)
    assert train(recipe, tmp_path / "run", *flags) == EXIT_DONE
    final = tmp_path / "run" / "final"
    saved = load_file(final / "adapter_model.safetensors")
    assert len(saved) == 4 and all("q_proj" in name for name in saved)
    # transformers finds the base by the adapters; a config.json next to them would send it for whole weights.
    loaded, plain = (AutoModelForCausalLM.from_pretrained(folder).eval() for folder in (final, base))
    of_peft = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(final)).eval()
    inputs = batch()[0]
    with torch.no_grad():
        torch.testing.assert_close(loaded(**inputs).logits, of_peft(**inputs).logits)
        assert (loaded(**inputs).logits - plain(**inputs).logits).abs().max() > 0


def train(recipe: Path, output: Path, *flags: Any) -> int:
    return main(["--config", str(recipe), "--output_dir", str(output), *map(str, flags)])


@pytest.mark.parametrize("adapter", [pytest.param("lora", marks=pytest.mark.slow), KINDS[1]])
def test_final_holds_the_merged_model_and_the_adapter(adapter: str, recipe: Path, base: Path, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import BitsAndBytesConfig

    output = tmp_path / "run"
    flags = ("--model", base, "--adapter", adapter, "--lora_rank", 4, "--gradient_checkpointing", "full")
    assert train(recipe, output, *flags) == EXIT_DONE
    inputs = batch()[0]
    with torch.no_grad():
        merged = AutoModelForCausalLM.from_pretrained(output / "final").eval()
        quantized = {}
        if adapter == "qlora":
            quantized["quantization_config"] = BitsAndBytesConfig(
                load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
            )
        plain = AutoModelForCausalLM.from_pretrained(base, **quantized).eval()
        layer: Any
        for layer in plain.modules():
            if hasattr(layer, "support_avx512bf16_for_cpu"):
                layer.support_avx512bf16_for_cpu = False  # its kernel takes no 96 inputs
        before = plain(**inputs).logits
        beside = PeftModel.from_pretrained(plain, str(output / "final" / "adapter")).eval()(**inputs).logits
        after = merged(**inputs).logits
    assert {p.dtype for p in merged.parameters()} == {torch.float32}
    assert not hasattr(merged.config, "quantization_config")
    assert (before - beside).abs().max() > 0.05  # it has learned something
    torch.testing.assert_close(after, beside, rtol=1e-4, atol=1e-4)  # fp32: (W + BA)x against Wx + B(Ax)
    summary = json.loads((output / "summary.json").read_text())
    assert 0 < summary["num_trained_parameters"] < summary["num_parameters"] / 5
    card = (output / "final" / "README.md").read_text()
    assert f"fine-tuned from `base` by {'QLoRA' if adapter == 'qlora' else 'LoRA'} " in card
    assert "its base is `base`" in card


def free_bytes_of(free: int) -> Callable[..., int]:
    return lambda *args, **options: free


@pytest.mark.slow
@pytest.mark.parametrize("adapter", ["lora", KINDS[1]])
def test_without_room_for_the_whole_model_final_holds_the_adapter_alone(
    adapter: str, recipe: Path, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a notebook's host of 12 GB after a run of an 8B model; whoever wants no other can say so."""
    from peft import PeftModel

    flags = ("--model", base, "--adapter", adapter, "--max_steps", 3)
    merged, asked, full = (tmp_path / name for name in ("merged", "asked", "full"))
    assert train(recipe, merged, *flags) == EXIT_DONE
    assert train(recipe, asked, *flags, "--merge_adapter", "False") == EXIT_DONE
    expected = load_file(merged / "final" / "adapter" / "adapter_model.safetensors")
    weights = list(load_file(merged / "final" / "model.safetensors").values())
    needed = sum(t.nbytes for t in (*weights, *expected.values())) + 12 * max(t.numel() for t in weights)
    monkeypatch.setattr("train.extras.host_memory.free_host_bytes", free_bytes_of(needed))
    assert train(recipe, full, *flags) == EXIT_DONE
    notes = [json.loads((run / "summary.json").read_text())["notes"] for run in (asked, full)]
    said = "final/ holds the adapter alone: the merged model needs "
    assert [any(note.startswith(said) for note in each) for each in notes] == [False, True]
    for run in (asked, full):
        final = run / "final"
        assert not list(final.glob("*.safetensors"))
        found = load_file(final / "adapter" / "adapter_model.safetensors")
        assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)
        card = (final / "README.md").read_text()
        assert "library_name: peft" in card and "The adapter is in `adapter/`" in card
        assert "It is not merged: the whole model is not in this folder." in card
        assert '`config=AutoConfig.from_pretrained("path/to/this/folder")`' in card and "import AutoModel" not in card
        config = AutoConfig.from_pretrained(final)
        assert config.use_cache and not hasattr(config, "quantization_config")
        plain = AutoModelForCausalLM.from_pretrained(base, config=config)
        PeftModel.from_pretrained(plain, str(final / "adapter"))
        AutoModelForCausalLM.from_pretrained(final / "adapter")  # by the name of its base
    assert train(recipe, asked, *flags) == EXIT_DONE  # it is no other run
    monkeypatch.setattr("train.extras.host_memory.free_host_bytes", free_bytes_of(needed + 1))
    (full / "summary.json").unlink()
    assert train(recipe, full, *flags) == EXIT_DONE
    assert (full / "final" / "model.safetensors").exists()


def test_a_merged_model_stays_where_a_finished_run_is_evaluated_again(
    recipe: Path, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held_out = tmp_path / "held_out.jsonl"
    flags = ("--model", base, "--adapter", "lora", "--max_steps", 2, "--validation_dataset", held_out)
    held_out.write_text('{"text": "abc def abc"}\n')
    assert train(recipe, tmp_path / "run", *flags) == EXIT_DONE
    weights = load_file(tmp_path / "run" / "final" / "model.safetensors")
    held_out = tmp_path / "others.jsonl"
    held_out.write_text('{"text": "something else"}\n')
    monkeypatch.setattr("train.extras.host_memory.free_host_bytes", free_bytes_of(1))
    assert train(recipe, tmp_path / "run", *flags[:-1], held_out) == EXIT_DONE
    after = load_file(tmp_path / "run" / "final" / "model.safetensors")
    assert all(torch.equal(weights[name], after[name]) for name in weights)


def test_an_adapter_needs_the_configuration_that_the_run_has_changed(recipe: Path, tmp_path: Path) -> None:
    """As the model card says."""
    from peft import PeftModel

    base, output = tmp_path / "base", tmp_path / "run"
    built({**LLAMA, "model_type": "mistral", "max_position_embeddings": 64}, max_length=64, seed=5).save_pretrained(
        base
    )
    BYTES.save_pretrained(base)
    assert train(recipe, output, "--model", base, "--adapter", "lora", "--sliding_window", 4) == EXIT_DONE
    with torch.no_grad():
        whole = AutoModelForCausalLM.from_pretrained(output / "final").eval()(**batch()[0]).logits
        found = [
            PeftModel.from_pretrained(
                AutoModelForCausalLM.from_pretrained(base, **how).eval(), str(output / "final" / "adapter")
            )
            for how in ({"config": AutoConfig.from_pretrained(output / "final")}, {})
        ]
        right, wrong = (model.eval()(**batch()[0]).logits for model in found)
    torch.testing.assert_close(right, whole, rtol=1e-4, atol=1e-4)
    assert (wrong - whole).abs().max() > 0.01
    assert '`config=AutoConfig.from_pretrained("path/to/this/folder")`' in (output / "final" / "README.md").read_text()


def test_adapters_of_embeddings_and_the_head_are_merged_too(recipe: Path, tmp_path: Path) -> None:
    """(W + BA)x in ``final/`` against Wx + B(Ax) beside it, for tokens and logits as well as for attention."""
    from peft import PeftModel

    base, output = tmp_path / "base", tmp_path / "run"
    built({**LLAMA, "max_position_embeddings": 64}, max_length=64, seed=5).save_pretrained(base)
    BYTES.save_pretrained(base)
    names = ("embed_tokens", "q_proj", "lm_head")
    assert train(recipe, output, "--model", base, "--adapter", "lora", "--lora_target_modules", *names) == EXIT_DONE
    learned = load_file(output / "final" / "adapter" / "adapter_model.safetensors")
    assert {key for key in learned if "embed_tokens" in key} == {
        "base_model.model.model.embed_tokens.lora_embedding_A",
        "base_model.model.model.embed_tokens.lora_embedding_B",
    }
    with torch.no_grad():
        plain: Any = AutoModelForCausalLM.from_pretrained(base).eval()
        before = plain.get_input_embeddings().weight.clone()
        beside = PeftModel.from_pretrained(plain, str(output / "final" / "adapter")).eval()(**batch()[0]).logits
        merged: Any = AutoModelForCausalLM.from_pretrained(output / "final").eval()
        after = merged(**batch()[0]).logits
    assert (merged.get_input_embeddings().weight - before).abs().max() > 0.01
    torch.testing.assert_close(after, beside, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("name", "other"), [("lm_head", "embed_tokens"), ("embed_tokens", "lm_head")])
def test_adapters_of_one_of_two_tied_layers_are_refused_before_the_first_step(
    name: str, other: str, recipe: Path, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--model", base, "--adapter", "lora", "--lora_target_modules", name, "q_proj")
    assert train(recipe, tmp_path / "run", *flags) == EXIT_ERROR
    said = capsys.readouterr().err
    assert "lora_target_modules: " in said and f"shares {other}.weight" in said.replace("model.", "")
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


TIED = """
from torch import nn


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.mix, self.head = nn.Embedding(300, 64), nn.Linear(64, 64), nn.Linear(64, 300, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, input_ids):
        return self.head(self.mix(self.embedding(input_ids)))


class Normalised(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(300, 64), nn.Linear(64, 300)
        self.mix = nn.utils.parametrizations.weight_norm(nn.Conv1d(64, 64, 1))

    def forward(self, input_ids):
        return self.head(self.mix(self.embedding(input_ids).transpose(1, 2)).transpose(1, 2))
"""


@pytest.mark.parametrize("adapter", KINDS)
def test_a_head_of_ones_own_that_shares_its_weight_is_refused_before_the_first_step(
    adapter: str, recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In four bits it would have a copy of its own, and the embedding another weight."""
    (tmp_path / "tied.py").write_text(TIED)
    flags = ("--model", f"{tmp_path / 'tied.py'}:Tied", "--tokenizer", "bytes", "--adapter", adapter)
    assert train(recipe, tmp_path / "run", *flags) == EXIT_ERROR
    assert "one of them shares embedding.weight" in capsys.readouterr().err


@pytest.mark.parametrize("adapter", KINDS)
def test_final_has_weights_that_torch_parametrises(adapter: str, recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "normalised.py").write_text(TIED)
    flags = ("--model", f"{tmp_path / 'normalised.py'}:Normalised", "--tokenizer", "bytes", "--adapter", adapter)
    assert train(recipe, tmp_path / "run", *flags) == EXIT_DONE
    assert load_file(tmp_path / "run" / "final" / "model.safetensors").keys() == {
        *("embedding.weight", "head.weight", "head.bias", "mix.bias"),
        *(f"mix.parametrizations.weight.original{number}" for number in (0, 1)),
    }


def test_adapters_that_cannot_be_merged_are_refused_before_the_first_step(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Convolutions can have adapters, but the product of these is not the change of a weight."""
    (tmp_path / "convolution.py").write_text(
        "from torch import nn\n\n\nclass Convolution(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n        self.embedding = nn.Embedding(300, 8)\n"
        "        self.mix, self.head = nn.Conv1d(8, 8, 3, padding=2), nn.Linear(8, 300)\n\n"
        "    def forward(self, input_ids):\n        mixed = self.mix(self.embedding(input_ids).transpose(1, 2))\n"
        "        return self.head(mixed[..., : input_ids.shape[1]].transpose(1, 2))\n"
    )
    network = f"{tmp_path / 'convolution.py'}:Convolution"
    flags = ("--model", network, "--tokenizer", "bytes", "--adapter", "lora", "--lora_target_modules", "mix", "head")
    assert train(recipe, tmp_path / "run", *flags) == EXIT_ERROR
    assert "lora_target_modules: what adapters of these layers learn cannot be added" in capsys.readouterr().err
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.parametrize("adapter", ["lora", pytest.param("qlora", marks=[needs_bitsandbytes, pytest.mark.slow])])
def test_stopped_and_resumed_equals_uninterrupted_and_checkpoints_are_small(
    adapter: str, recipe: Path, base: Path, tmp_path: Path
) -> None:
    flags = ("--model", base, "--adapter", adapter, "--lora_dropout", 0.1, "--lr_scheduler", "constant")
    whole, pieces = tmp_path / "whole", tmp_path / "pieces"
    assert train(recipe, whole, *flags, "--max_steps", STEPS) == EXIT_DONE
    for steps in (2, STEPS):
        assert train(recipe, pieces, *flags, "--max_steps", steps) == EXIT_DONE
    last = Path("checkpoints") / f"step-{STEPS:08d}"
    for name in ("model-00000.safetensors", "optimizer-00000.safetensors"):
        one, other = load_file(whole / last / name), load_file(pieces / last / name)
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key], other[key]) for key in one)
    stored = load_file(whole / last / "model-00000.safetensors")
    assert stored and all("lora_" in name for name in stored)


@pytest.mark.parametrize("digest", ["xxh3_128", "sha256"])
def test_a_base_that_has_changed_is_refused_by_name(
    digest: str,
    recipe: Path,
    base: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flags = ("--model", base, "--adapter", "lora")
    with monkeypatch.context() as patched:
        if digest == "sha256":  # which earlier versions kept
            from train.extras.adapters.lora import AdapterState

            own = property(lambda state: state.digest_frozen(hashlib.sha256))
            patched.setattr(AdapterState, "frozen_digest", own)
        assert train(recipe, tmp_path / "run", *flags, "--max_steps", 1) == EXIT_DONE
    kept = json.loads((tmp_path / "run/checkpoints/step-00000001/state.json").read_text())["frozen"]
    assert len(kept) == (64 if digest == "sha256" else 32)
    assert train(recipe, tmp_path / "run", *flags, "--max_steps", 2) == EXIT_DONE
    config = {**LLAMA, "max_position_embeddings": 64, "tie_word_embeddings": True}
    built(config, max_length=64, seed=6).save_pretrained(base)
    assert train(recipe, tmp_path / "run", *flags, "--max_steps", 3) == EXIT_ERROR
    assert "the frozen weights have the digest" in capsys.readouterr().err


def test_resuming_with_another_adapter_names_it(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(recipe, tmp_path / "run", "--adapter", "lora", "--max_steps", 1) == EXIT_DONE
    assert train(recipe, tmp_path / "run", "--adapter", "lora", "--lora_rank", 8, "--max_steps", 2) == EXIT_ERROR
    assert "lora_rank: was 16, is 8" in capsys.readouterr().err


# What cannot work


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--lora_rank", "8"), "lora_rank needs adapter. Give that, too, or leave lora_rank out."),
        (("--adapter", "lora", "--lora_rank", "0"), "lora_rank: 0 is not valid: it must be at least 1"),
        (("--adapter", "lora", "--lora_alpha", "0"), "lora_alpha: 0 is not valid: it must be above 0"),
        (
            ("--adapter", "lora", "--lora_dropout", "1"),
            "lora_dropout: 1 is not valid: it must be at least 0 and below 1",
        ),
        (("--adapter", "lora", "--lora_target_modules", "all-linear", "q_proj"), "lora_target_modules: all-linear"),
    ],
)
def test_wrong_settings_are_refused_by_name(flags: tuple[str, ...], message: str, recipe: Path) -> None:
    with pytest.raises(UsageError, match=message):
        parse(["--config", str(recipe), *flags])


def test_missing_packages_are_said_with_the_line_that_installs_them(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert train(recipe, tmp_path / "run", "--adapter", "qlora") == EXIT_USAGE
    said = capsys.readouterr().err
    assert "adapter: qlora needs peft and bitsandbytes" in said and "pip install -e '.[qlora]'" in said
