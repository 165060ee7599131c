"""Models from scratch: what follows from a few fields of a recipe, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from made_tokenizers import tokenizer_of
from support import run_for
from test_model import BYTES, CLASSES, END, GPT2, LLAMA, MASKED, PAD, SHAPE, built
from torch import Tensor

from train.config import Config
from train.extras.new_models import Extra
from train.records import UserError
from train.tasks import pad_token_id


@pytest.mark.parametrize("model_type", ["roberta", "mpnet", "longformer", "esm", "ibert"])
def test_positions_that_begin_after_the_padding_token_are_as_many_as_the_longest_example(
    model_type: str, tmp_path: Path
) -> None:
    """RoBERTa's family numbers a row's tokens from padding_idx + 1 on: so many rows of its table are never used."""
    shape = {"model_type": model_type, **SHAPE, **({"attention_window": 8} if model_type == "longformer" else {})}
    network, ids = built(shape, MASKED), torch.arange(3, 67).view(2, 32)
    skipped = network.config.max_position_embeddings - 32
    assert skipped == (2 if model_type == "mpnet" else PAD + 1)
    row = network(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
    assert row.shape == (2, 32, len(BYTES)) and row.isfinite().all()
    with pytest.raises(UserError, match=f"max_length: 33 is more than the model's {33 - skipped} positions"):
        built({**shape, "max_position_embeddings": 33}, MASKED, max_length=33)
    network.save_pretrained(tmp_path)
    assert built(None, MASKED, model=str(tmp_path)).config.max_position_embeddings == 32 + skipped
    with pytest.raises(UserError, match="max_length: 33 is more than the model's 32 positions"):
        built(None, MASKED, model=str(tmp_path), max_length=33)


def test_a_model_without_a_limit_on_positions_is_given_none() -> None:
    network = built({"model_type": "xlnet", "d_model": 16, "n_layer": 1, "n_head": 2, "d_inner": 16}, CLASSES)
    assert network(input_ids=torch.arange(3, 43).view(1, 40)).logits.shape == (1, 2)


def test_fields_that_a_configuration_reads_but_does_not_declare_may_be_given() -> None:
    mixture = {"model_type": "qwen3_moe", **SHAPE, "num_key_value_heads": 2, "num_experts": 2, "num_experts_per_tok": 1}
    wide = built({**mixture, "moe_intermediate_size": 8, "head_dim": 32})
    assert wide.model.layers[0].self_attn.q_proj.out_features == SHAPE["num_attention_heads"] * 32
    heads = {"num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 8}
    inputs = {"vocab_size_per_layer_input": 300, "hidden_size_per_layer_input": 8}  # or they take a gigabyte
    layers = built({"model_type": "gemma4_text", **SHAPE, **heads, **inputs, "num_hidden_layers": 6}).model.layers
    widths = [layer.self_attn.q_proj.out_features for layer in layers]
    assert widths == [SHAPE["num_attention_heads"] * size for size in (16, 16, 16, 16, 16, 8)]


@pytest.mark.skipif(not hasattr(transformers, "InternLM3Config"), reason="transformers does not have it")
def test_an_architecture_that_uses_the_layers_of_another_is_built() -> None:
    """It has no file of its own in which its fields would be read."""
    model = built({"model_type": "internlm3", **SHAPE, "num_key_value_heads": 2, "head_dim": 8})
    assert model.config.model_type == "internlm3"


def test_decoder_of_a_new_encoder_decoder_has_a_start() -> None:
    t5 = {"model_type": "t5", "d_model": 16, "d_ff": 24, "num_layers": 2, "num_heads": 2, "d_kv": 8}
    network = built(t5, CLASSES, label_names=("no", "yes"))
    ids = torch.tensor([[3, 4, 5, END], [6, 7, 8, END]])
    assert network(input_ids=ids).logits.shape == (2, 2)
    assert network.config.decoder_start_token_id == PAD
    bart = {"model_type": "bart", "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": 300}
    assert built(bart, CLASSES, label_names=("no", "yes")).config.decoder_start_token_id == 2  # its own, not ours


def test_fields_of_the_recipe_win_over_what_data_and_tokenizer_say() -> None:
    model = built({**LLAMA, "vocab_size": 300, "max_position_embeddings": 64, "eos_token_id": 5})
    config = model.config
    assert (config.vocab_size, config.max_position_embeddings, config.eos_token_id) == (300, 64, 5)


def test_field_under_its_other_name_counts_as_given() -> None:
    assert built({**GPT2, "n_positions": 48}).config.max_position_embeddings == 48


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "lama"}, r"transformers has no model_type lama\. Did you mean llama\?$"),
        ({"model_type": "xxxxxx"}, r"transformers has no model_type xxxxxx\.$"),
        ({"hiden_size": 32}, r"llama has no field hiden_size\. Did you mean hidden_size\?$"),
        ({"hidden_size": "wide"}, "model_config: llama: .*hidden_size"),
        ({"num_attention_heads": 3}, "llama.*attention heads"),
        ({"hidden_act": "rellu"}, "llama.* cannot be built: .*rellu"),
        ({"vocab_size": 258}, "258 embeddings, the tokenizer 259 tokens"),
        ({"max_position_embeddings": 31}, "max_length: 32 is more than the model's 31 positions"),
    ],
)
def test_architecture_that_cannot_work_is_refused_by_name(change: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        built({**LLAMA, **change})


def test_a_start_token_that_also_pads_is_still_learned() -> None:
    tokenizer = tokenizer_of("bytes")
    tokenizer.pad_token = None
    assert pad_token_id(tokenizer) == END
    model = built(LLAMA, tokenizer=tokenizer)
    model(torch.tensor([[END, 5, 6]])).logits.sum().backward()
    gradient = model.get_input_embeddings().weight.grad
    assert isinstance(gradient, Tensor) and gradient[END].abs().sum() > 0


def _raised(folder: Path, what: Exception) -> Exception:
    """``what`` as a file in ``folder`` raises it."""
    code = compile("raise what", str(folder / "modeling_llama.py"), "exec")
    try:
        exec(code, {"what": what})
    except Exception as error:
        return error
    raise AssertionError


MISFIT = "The size of tensor a (4) must match the size of tensor b (3) at non-singleton dimension 1"


@pytest.mark.parametrize(
    ("where", "what", "is_told"),
    [
        ("transformers/models/llama", RuntimeError(MISFIT), True),
        ("models/my_fork", RuntimeError(MISFIT), False),  # a bug in one's own code keeps its traceback
        ("transformers/models/llama", RuntimeError("expected scalar type Long but found Int"), False),
        ("transformers/models/llama", OSError(28, "No space left on device"), False),
        ("transformers/models/llama", MemoryError(), False),
        ("transformers/models/llama", RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"), False),
        ("transformers/models/llama", IndexError("index out of range in self"), False),
    ],
)
def test_only_sizes_that_do_not_fit_each_other_are_told_in_place_of_a_traceback(
    where: str, what: Exception, is_told: bool, tmp_path: Path
) -> None:
    run = run_for(Config().changed(model_config={"model_type": "llama"}, tokenizer="bytes"))
    said = Extra().failed(run, _raised(tmp_path / where, what))
    assert (said is not None) is is_told
    if said is not None:
        assert said.startswith(f"model_config: llama fails in modeling_llama.py:1: {MISFIT}. Do its sizes")
