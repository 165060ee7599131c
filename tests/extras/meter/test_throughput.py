"""Costs and peaks against figures worked out by hand."""

from typing import Any

import pytest
import transformers
from torch import nn

from train.extras.meter.cards import peak_flops_per_second
from train.extras.meter.throughput import flops_per_token, mfu, model_flops_per_token


@pytest.mark.parametrize(
    ("name", "precision", "peak"),
    [
        ("NVIDIA H200", "bf16", 989.4e12),
        ("NVIDIA H100 80GB HBM3", "fp16", 989.4e12),
        ("NVIDIA H100 PCIe", "bf16", 756.5e12),
        ("NVIDIA H100 NVL", "bf16", 835.5e12),
        ("NVIDIA A100-SXM4-80GB", "bf16", 312e12),
        ("NVIDIA A100-SXM4-80GB", "no", 19.5e12),
        ("NVIDIA A10", "bf16", 125e12),
        ("NVIDIA A10G", "bf16", 70e12),
        ("NVIDIA L4", "bf16", 121e12),
        ("NVIDIA L40S", "bf16", 362e12),
        ("Tesla T4", "fp16", 65e12),
        ("Tesla T4", "bf16", None),
        ("Tesla V100-SXM2-16GB", "fp16", 125e12),
        ("Tesla V100-PCIE-16GB", "fp16", 112e12),
        ("Tesla V100-SXM2-16GB", "bf16", None),
        ("NVIDIA GeForce RTX 4090", "bf16", 165.2e12),
        ("NVIDIA GeForce RTX 3090", "fp16", 71e12),
        ("NVIDIA RTX A6000", "bf16", 154.8e12),
        ("NVIDIA B200", "bf16", 2250e12),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16", None),
        ("NVIDIA GeForce RTX 4090 D", "bf16", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bf16", None),
        ("NVIDIA A1000", "bf16", None),
        ("some CPU", "no", None),
        ("NVIDIA H200", "fp8", None),
    ],
)
def test_peak_of_a_device(name: str, precision: str, peak: float | None):
    assert peak_flops_per_second(name, precision) == peak


def test_flops_per_token_of_gpt3_shape():
    # 175e9 parameters, 96 layers, hidden 12,288, 2,048 tokens: 6N = 1.05e12, attention 12·96·12288·2048 = 2.8991e10
    assert flops_per_token(175_000_000_000, 0, 96, 12288, 2048) == 1.05e12 + 28_991_029_248


def test_flops_per_token_leaves_out_what_is_only_looked_up():
    assert flops_per_token(1000, 400, 2, 8, 16) == 6 * 600 + 12 * 2 * 8 * 16


def _llama(**changes: Any) -> nn.Module:
    shape: dict[str, Any] = {
        "vocab_size": 100,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
    }
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**(shape | changes)))


# Per layer 4·32² (q, k, v, o) + 3·32·48 (mlp) + 2·32 (norms); then the last norm; a table or head is 100·32.
_LLAMA_BODY = 3 * (4 * 32 * 32 + 3 * 32 * 48 + 2 * 32) + 32
_LLAMA_ATTENTION = 12 * 3 * 32 * 512


@pytest.mark.parametrize("tied", [False, True])
def test_model_counts_the_head_once_and_the_lookup_never(tied: bool):
    model = _llama(tie_word_embeddings=tied)
    expected = 6 * (_LLAMA_BODY + 100 * 32) + _LLAMA_ATTENTION
    assert model_flops_per_token(model, 512) == expected


def test_frozen_weights_have_no_gradient_of_their_own():
    model = _llama()
    model.requires_grad_(False)
    model.lm_head.requires_grad_(True)
    assert model_flops_per_token(model, 512) == 4 * _LLAMA_BODY + 6 * 100 * 32 + _LLAMA_ATTENTION


def test_model_with_wide_heads_counts_heads_times_head_size():
    narrow, wide = _llama(), _llama(head_dim=16)
    more_weights = 6 * 3 * 4 * 32 * 32
    before, after = model_flops_per_token(narrow, 512), model_flops_per_token(wide, 512)
    assert before is not None and after == before + more_weights + _LLAMA_ATTENTION


def test_model_reads_gpt2s_names_and_leaves_out_both_tables():
    config = transformers.GPT2Config(n_layer=2, n_embd=16, n_head=2, n_positions=64, vocab_size=50)
    model = transformers.GPT2LMHeadModel(config)
    total = sum(parameter.numel() for parameter in model.parameters())
    assert model_flops_per_token(model, 64) == 6 * (total - 64 * 16) + 12 * 2 * 16 * 64


def test_sliding_windows_count_their_window():
    shape: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 2,
        "num_hidden_layers": 4,
        "vocab_size": 64,
        "local_attention": 128,
        "global_attn_every_n_layers": 3,
        "pad_token_id": 0,
    }
    config = transformers.ModernBertConfig(**shape)
    model = transformers.ModernBertForMaskedLM(config)
    short, long = model_flops_per_token(model, 128), model_flops_per_token(model, 1024)
    assert short is not None and long is not None
    assert long - short == 12 * 2 * 32 * (1024 - 128)  # layers 0 and 3 of 4 see everything


def test_model_without_config_counts_its_matrices():
    model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 3, bias=False))
    assert model_flops_per_token(model, 1024) == 6 * 12


class _Configured(nn.Linear):
    def __init__(self, **config: Any) -> None:
        super().__init__(2, 2)
        self.config = type("Config", (), config)()


@pytest.mark.parametrize("config", [{"num_experts": 8}, {"n_routed_experts": 256}, {"is_encoder_decoder": True}])
def test_model_that_one_number_does_not_describe(config: dict[str, Any]):
    assert model_flops_per_token(_Configured(**config), 8) is None


def test_mfu():
    assert mfu(1000.0, 6e9, 12e12, 2) == 0.25
    assert mfu(1000.0, None, 12e12) is None
    assert mfu(1000.0, 6e9, None) is None
