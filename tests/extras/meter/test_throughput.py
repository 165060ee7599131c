"""Costs and peaks against figures worked out by hand."""

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import transformers
from support import needs_transformers_5_23
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from train.config import Config
from train.extras.activations.tiling import tile_mlps
from train.extras.meter import Extra
from train.extras.meter.cards import peak_flops_per_second
from train.extras.meter.flops import MAX_OPERATORS, attended, count_flops, text_lengths
from train.records import MicroBatch
from train.tasks import load_task

# The oldest transformers that are allowed multiply for the angles of rotary positions: 8 operations a token more.
alike = partial(pytest.approx, rel=1e-4)


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
        ("NVIDIA GB200", "bf16", 2500e12),
        ("NVIDIA GeForce RTX 4060 Ti", "bf16", 44.1e12),
        ("NVIDIA GeForce RTX 4070 Ti", "bf16", 80.2e12),
        ("NVIDIA GeForce RTX 4070", "fp16", 58.3e12),
        ("NVIDIA GeForce RTX 4080 SUPER", "bf16", None),
        ("NVIDIA GeForce RTX 3060", "bf16", 25.5e12),
        ("NVIDIA GeForce RTX 2080 Ti", "fp16", 53.8e12),
        ("NVIDIA GeForce RTX 2080 Ti", "bf16", None),
        ("Tesla P100-PCIE-16GB", "fp16", 9.3e12),
        ("AMD Instinct MI250X/MI250", "bf16", 181e12),
        ("AMD Instinct MI250X", "bf16", 191.5e12),
        ("AMD Instinct MI300X", "bf16", 1307.4e12),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16", None),
        ("NVIDIA GeForce RTX 4090 D", "bf16", None),
        ("NVIDIA GeForce RTX 3060 with Max-Q Design", "bf16", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bf16", None),
        ("GRID T4-16Q", "fp16", None),
        ("NVIDIA L40S-24Q", "bf16", None),
        ("NVIDIA A1000", "bf16", None),
        ("some CPU", "no", None),
        ("NVIDIA H200", "fp8", None),
    ],
)
def test_peak_of_a_device(name: str, precision: str, peak: float | None):
    assert peak_flops_per_second(name, precision) == peak


def model_flops_per_token(model: nn.Module, length: int, **told: bool) -> float | None:
    counted = count_flops(model, length, **told)
    return None if counted is None else counted.of(length) / length


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


# Per layer 4·32² (q, k, v, o) + 3·32·48 (mlp); a table or head is 100·32. Norms multiply no matrix.
_LLAMA_BODY = 3 * (4 * 32 * 32 + 3 * 32 * 48)
_LLAMA_ATTENTION = 12 * 3 * 32 * 512 / 2  # half of the square: no token sees later ones


@pytest.mark.parametrize("tied", [False, True])
def test_model_counts_the_head_once_and_the_lookup_never(tied: bool):
    model = _llama(tie_word_embeddings=tied)
    expected = 6 * (_LLAMA_BODY + 100 * 32) + _LLAMA_ATTENTION
    assert model_flops_per_token(model, 512) == alike(expected)


def test_counting_leaves_the_model_and_the_generators_alone():
    torch.manual_seed(0)
    model = _llama().train()
    before, state = {name: value.clone() for name, value in model.state_dict().items()}, torch.get_rng_state()
    implementation = model.config._attn_implementation  # type: ignore
    model_flops_per_token(model, 512)
    assert model.training and model.config._attn_implementation == implementation  # type: ignore
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None and p.device.type == "cpu" for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("length", [1, 2, 7, 64, 200, 131072])
def test_any_length_is_the_same_polynomial(length: int):
    expected = 6 * (_LLAMA_BODY + 100 * 32) + 12 * 3 * 32 * length / 2
    assert model_flops_per_token(_llama(max_position_embeddings=length), length) == alike(expected)


@pytest.mark.parametrize("longest", [3, 5, 100, 191])
def test_no_more_tokens_are_tried_than_a_model_has_positions(longest: int):
    shape: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 50}
    config = transformers.BertConfig(**shape, num_attention_heads=2, max_position_embeddings=longest)
    expected = 6 * (2 * (4 * 32 * 32 + 2 * 32 * 64) + 32 * 32 + 50 * 32) + 12 * 2 * 32 * longest
    assert model_flops_per_token(transformers.BertForMaskedLM(config), longest) == alike(expected)


def test_below_the_first_trained_weight_there_is_no_backward():
    model = _llama()
    model.requires_grad_(False)
    model.lm_head.requires_grad_(True)
    assert model_flops_per_token(model, 512) == alike(2 * _LLAMA_BODY + 4 * 100 * 32 + _LLAMA_ATTENTION / 3)
    model.requires_grad_(False)
    assert model_flops_per_token(model, 512) == alike(2 * (_LLAMA_BODY + 100 * 32) + _LLAMA_ATTENTION / 3)


def test_frozen_weights_have_no_gradient_of_their_own():
    model = _llama()
    model.requires_grad_(False)
    model.get_input_embeddings().requires_grad_(True)  # type: ignore
    assert model_flops_per_token(model, 512) == alike(4 * (_LLAMA_BODY + 100 * 32) + _LLAMA_ATTENTION)


def test_adapters_are_counted_and_what_they_adapt_is_frozen():
    peft = pytest.importorskip("peft")
    rank = 4
    model = peft.get_peft_model(_llama(), peft.LoraConfig(r=rank, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    model.enable_input_require_grads()
    adapters = 3 * rank * (32 + 32)
    assert model_flops_per_token(model, 512) == alike(4 * (_LLAMA_BODY + 100 * 32) + 6 * adapters + _LLAMA_ATTENTION)


def test_weights_in_4_bits_count_as_what_they_stand_for():
    bitsandbytes = pytest.importorskip("bitsandbytes")
    model: Any = _llama()
    plain = model.model.layers[0].mlp.down_proj
    packed = bitsandbytes.nn.Linear4bit(48, 32, bias=False)
    packed.load_state_dict(plain.state_dict())
    model.model.layers[0].mlp.down_proj = packed.to("cpu")
    assert packed.weight.numel() < plain.weight.numel()
    assert model_flops_per_token(model, 512) == alike(6 * (_LLAMA_BODY + 100 * 32) - 2 * 32 * 48 + _LLAMA_ATTENTION)


def test_model_with_wide_heads_counts_heads_times_head_size():
    narrow, wide = _llama(), _llama(head_dim=16)
    more_weights = 6 * 3 * 4 * 32 * 32
    before, after = model_flops_per_token(narrow, 512), model_flops_per_token(wide, 512)
    assert before is not None and after == alike(before + more_weights + _LLAMA_ATTENTION)


def test_model_reads_gpt2s_names_and_leaves_out_both_tables():
    config = transformers.GPT2Config(n_layer=2, n_embd=16, n_head=2, n_positions=64, vocab_size=50)
    model = transformers.GPT2LMHeadModel(config)
    matrices = 2 * 12 * 16 * 16 + 50 * 16  # 4·H² of attention and 8·H² of the MLP in each layer, and the tied head
    assert model_flops_per_token(model, 64) == alike(6 * matrices + 12 * 2 * 16 * 64 / 2)


def test_a_head_for_a_whole_text_is_shared_by_its_tokens():
    shape: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 2, "vocab_size": 50, "num_labels": 3}
    config = transformers.BertConfig(**shape)
    layers, heads = 2 * (4 * 32 * 32 + 2 * 32 * 64), 32 * 32 + 32 * 3
    found = model_flops_per_token(transformers.BertForSequenceClassification(config), 96)
    assert found == pytest.approx(6 * layers + 12 * 2 * 32 * 96 + 6 * heads / 96, rel=1e-12)


@pytest.mark.parametrize(
    ("kind", "window_of_config", "window", "full"),
    [
        pytest.param(
            "modernbert", {"local_attention": 128}, 128, 2, marks=pytest.mark.slow
        ),  # to both sides together; layers 0 and 3 see everything
        ("modernbert-decoder", {"local_attention": 128}, 64, 2),  # half of it lies to the left
        pytest.param(
            "mistral", {"sliding_window": 128}, 128, 0, marks=pytest.mark.slow
        ),  # names no kinds of layers: all of them slide
    ],
)
def test_sliding_windows_count_their_window(kind: str, window_of_config: dict[str, int], window: int, full: int):
    shape: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "vocab_size": 64}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 4, "pad_token_id": 0}
    config = transformers.AutoConfig.for_model(kind, **shape, **window_of_config)
    is_causal, auto = kind != "modernbert", transformers.AutoModelForCausalLM
    model = (auto if is_causal else transformers.AutoModelForMaskedLM).from_config(config)
    short, long = model_flops_per_token(model, 32), model_flops_per_token(model, 1024)
    assert short is not None and long is not None
    more = [attended(1024, width, is_causal) - attended(32, width, is_causal) for width in (None, window)]
    assert long - short == pytest.approx(12 * 32 * (full * more[0] + (4 - full) * more[1]))


@pytest.mark.slow
def test_windows_of_a_text_model_inside_another_count() -> None:
    """As of ``google/gemma-3-4b``, whose configuration has one for text and one for images."""
    shape: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "vocab_size": 64}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 128}
    shape |= {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"]}
    alone = transformers.AutoConfig.for_model("gemma3_text", **shape)
    inside = transformers.AutoConfig.for_model("gemma3", text_config={"model_type": "gemma3_text", **shape})
    with torch.device("meta"):
        models = [transformers.AutoModelForCausalLM.from_config(config) for config in (alone, inside)]
    counts = [count_flops(model, 4096, is_causal=True) for model in models]
    assert counts[0] is not None and counts[1] is not None
    assert counts[1].of(4096) == pytest.approx(counts[0].of(4096), rel=1e-12)


@pytest.mark.parametrize(
    ("kinds", "layers"),
    [
        (["full_attention", "chunked_attention", "full_attention"], {(None, None): 2 / 3, (None, 64): 1 / 3}),
        (["linear_attention", "conv", "sliding_attention"], {(128, None): 1}),
        (["hybrid", "linear_attention", "hybrid_sliding"], {(None, None): 1 / 2, (128, None): 1 / 2}),
        (["indexed_attention"] * 3, {(None, None): 1}),
    ],
)
def test_layers_with_attention_share_its_cost_and_unknown_ones_see_everything(kinds: list[str], layers: Any):
    model: Any = _FillsUp(1)
    model.config = SimpleNamespace(layer_types=kinds, sliding_window=128, attention_chunk_size=64)
    counted = count_flops(model, 512, is_causal=True)
    assert counted is not None and counted.layers == layers


@pytest.mark.slow
def test_chunks_of_attention_count_their_length():
    shape: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "intermediate_size_mlp": 48, "head_dim": 8}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 4, "vocab_size": 64}
    kinds = ["chunked_attention"] * 3 + ["full_attention"]
    config = transformers.Llama4TextConfig(**shape, attention_chunk_size=128, layer_types=kinds, num_local_experts=2)
    model = transformers.Llama4ForCausalLM(config)
    short, long = model_flops_per_token(model, 128), model_flops_per_token(model, 1024)
    assert short is not None and long is not None
    assert long - short == alike(12 * 1 * 32 * (1024 - 128) / 2)  # one layer of four sees everything before it
    shorter = model_flops_per_token(model, 64)
    assert shorter is not None and short - shorter == alike(12 * 4 * 32 * (128 - 64) / 2)  # less than a chunk


def test_a_model_that_asks_for_constants_of_its_own_is_counted():
    config = transformers.GPT2Config(n_layer=2, n_embd=16, n_head=2, n_positions=64, vocab_size=50, pad_token_id=0)
    model = transformers.GPT2ForSequenceClassification(config)
    assert model_flops_per_token(model, 64) == alike(6 * (2 * 12 * 16 * 16 + 2 * 16) + 12 * 2 * 16 * 64 / 2)


def test_model_without_config_counts_its_matrices():
    with torch.no_grad():  # training has gradients in any case
        assert model_flops_per_token(_FillsUp(1), 1024) == 6 * 16


def test_kernels_of_a_card_are_not_needed():
    model: Any = _llama()
    model.config._attn_implementation = "flash_attention_2"
    assert model_flops_per_token(model, 512) == alike(6 * (_LLAMA_BODY + 100 * 32) + _LLAMA_ATTENTION)


@pytest.mark.parametrize("balanced", [False, pytest.param(True, marks=needs_transformers_5_23)])
def test_a_mixture_of_experts_counts_those_a_token_is_sent_to(balanced: bool):
    """Also where the model answers with the loss that balances its experts before the logits."""
    shape: dict[str, Any] = {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.MixtralConfig(
        **shape,
        num_key_value_heads=2,
        intermediate_size=48,
        num_local_experts=8,
        num_experts_per_tok=2,
        output_router_logits=balanced,
    )
    attention, router, experts = 3 * 32 * 32, 32 * 8, 2 * 3 * 32 * 48
    expected = 6 * (2 * (attention + router + experts) + 100 * 32) + 12 * 2 * 32 * 512 / 2
    assert model_flops_per_token(transformers.MixtralForCausalLM(config), 512) == alike(expected)


_T5: dict[str, Any] = {
    "vocab_size": 50,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_heads": 4,
    "num_layers": 2,
    "decoder_start_token_id": 0,
}


@pytest.mark.parametrize(
    ("build", "head"),
    [(transformers.T5ForConditionalGeneration, 32 * 50), (transformers.T5ForSequenceClassification, 0)],
)
def test_the_decoder_of_an_encoder_decoder_reads_as_many_tokens(build: Callable[[Any], nn.Module], head: int):
    """A classifier looks for the end of each text, which only data has: its head, two products a text, is left out."""
    model = build(transformers.T5Config(**_T5))
    encoder, decoder = 2 * (4 * 32 * 32 + 2 * 32 * 64), 2 * (8 * 32 * 32 + 2 * 32 * 64)
    attention = 12 * (2 + 2 * 2) * 32 * 512  # the decoder attends to itself and to the encoder
    assert model_flops_per_token(model, 512) == alike(6 * (encoder + decoder + head) + attention)


def test_texts_of_a_decoder_s_own_are_not_counted():
    """There is no MFU then: how long they are is not in the model's cost by tokens."""
    ids = torch.ones((2, 8), dtype=torch.long)
    batch = MicroBatch({"input_ids": ids}, ids, 16, (0, 1), 16)
    assert text_lengths(batch) == [8, 8]
    assert text_lengths(replace(batch, inputs={"input_ids": ids, "decoder_input_ids": ids[:, :3]})) == []


class _Recomputed(nn.Module):
    """Keeps no activation of its layer, as tiled and checkpointed layers do, also in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 4)
        self.layer = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Tanh(), nn.Linear(4, 4, bias=False))

    def forward(self, input_ids: Tensor) -> Tensor:
        return checkpoint(self.layer, self.table(input_ids), use_reentrant=False)  # type: ignore


def test_what_is_computed_again_does_not_count():
    assert model_flops_per_token(_Recomputed(), 1024) == alike(6 * 2 * 16)


def test_tiles_do_not_count_what_they_compute_again():
    plain, tiled = _llama(), _llama()
    tile_mlps(tiled)
    assert count_flops(tiled, 4096) == count_flops(plain, 4096) is not None


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_of_a_model_of_transformers_does_not_count(reentrant: bool):
    model: Any = _llama()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.train()
    assert model_flops_per_token(model, 512) == alike(6 * (_LLAMA_BODY + 100 * 32) + _LLAMA_ATTENTION)


class _Asks(nn.Module):
    """Needs data to know what to do."""

    def forward(self, input_ids: Tensor) -> Tensor:
        return input_ids * int(input_ids.max())


class _AsksAtTheHead(transformers.LlamaForCausalLM):
    """Could be counted up to its head, which a language model must not go without."""

    def forward(self, input_ids: Tensor) -> Tensor:  # type: ignore
        return self.lm_head(self.model(input_ids)[0] * int(input_ids.max()))


class _Loops(nn.Module):
    """Treats one position after the other, with many operators for each."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 4)

    def forward(self, input_ids: Tensor) -> Tensor:
        states = self.table(input_ids).unbind(1)
        for _ in range(100):
            states = [state * 2 for state in states]
        return torch.stack(list(states), 1)


@pytest.mark.parametrize("build", [_Asks, lambda: _AsksAtTheHead(_llama().config), _Loops])  # type: ignore
def test_model_that_cannot_be_counted_has_no_figure(build: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch):
    if build is _Loops:  # ten times as many take seconds
        monkeypatch.setattr("train.extras.meter.flops.MAX_OPERATORS", MAX_OPERATORS // 10)
    assert model_flops_per_token(build(), 512) is None


def test_fake_tensors_that_ask_where_they_lie_are_no_operators(monkeypatch: pytest.MonkeyPatch):
    """An error at such a question, as of too many operators, would end the process."""
    config = transformers.GPT2Config(n_layer=1, n_embd=16, n_head=2, n_positions=64, vocab_size=50, pad_token_id=0)
    model = transformers.GPT2ForSequenceClassification(config)
    for most, is_counted in [(300, True), *((most, False) for most in range(60, 80))]:
        monkeypatch.setattr("train.extras.meter.flops.MAX_OPERATORS", most)
        assert (count_flops(model, 64) is not None) == is_counted


@pytest.mark.slow
def test_counting_a_large_model_takes_little_time():
    shape: dict[str, Any] = {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24}
    config = transformers.Qwen2Config(**shape, num_attention_heads=14, num_key_value_heads=2, vocab_size=151936)
    with torch.device("meta"):
        model = transformers.Qwen2ForCausalLM(config)
    model_flops_per_token(_llama(), 512)  # imports
    started = time.perf_counter()
    assert model_flops_per_token(model, 131072)
    assert time.perf_counter() - started < 60  # 0.9 s on 2 cores of a Xeon at 2.5 GHz: a machine may be very busy


def test_positions_attend_to_those_before_them_in_their_window() -> None:
    def pairs(length: int, window: int, is_causal: bool) -> float:
        seen = [q - k for q in range(length) for k in range(length) if not is_causal or k <= q]
        return sum(distance < window for distance in seen) / length

    assert (attended(1000), attended(1000, is_causal=True)) == (1000, 500)
    for window in (100, 600, 1000):
        assert attended(1000, window, is_causal=True) == pytest.approx(pairs(1000, window, True), rel=0.01)
    assert attended(64, 128) == 64


def test_only_a_model_that_no_one_may_look_ahead_in_counts_half_the_square() -> None:
    """By the task, which has tried it, or as all of its layers say."""
    bert: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    model = transformers.BertModel(transformers.BertConfig(**bert, vocab_size=50))
    whole, causal = (model_flops_per_token(model, 96, is_causal=causal) for causal in (False, True))
    assert whole and causal and whole - causal == pytest.approx(12 * 2 * 32 * 96 / 2)


class _FillsUp(nn.Module):
    """As Longformer does, which fills short texts up to its window."""

    def __init__(self, multiple: int) -> None:
        super().__init__()
        self.table, self.layer, self.multiple = nn.Embedding(10, 4), nn.Linear(4, 4, bias=False), multiple

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.layer(nn.functional.pad(self.table(input_ids), (0, 0, 0, -input_ids.shape[1] % self.multiple)))


def test_a_cost_that_is_not_a_polynomial_has_no_figure() -> None:
    assert count_flops(_FillsUp(512), 192) is not None  # up to there it is constant
    assert count_flops(_FillsUp(512), 2048) is None
    assert model_flops_per_token(_FillsUp(8), 2047) == 6 * 16  # within a percent


class _Convolves(_FillsUp):
    def forward(self, input_ids: Tensor) -> Tensor:
        weight = self.layer.weight.unsqueeze(-1).expand(4, 4, 3)
        return nn.functional.conv1d(super().forward(input_ids).mT, weight, padding=1).mT


def test_a_convolution_counts_its_products():
    assert model_flops_per_token(_Convolves(1), 1024) == 6 * 16 + 6 * 16 * 3


class _LinearAttention(_FillsUp):
    """Each chunk of 64 tokens attends to one matrix, the sum of what those up to it leave behind."""

    def forward(self, input_ids: Tensor) -> Tensor:
        chunks = super().forward(input_ids).split(64, 1)
        matrix, seen = torch.zeros(4, 4, device=input_ids.device), []
        for chunk in chunks:
            matrix = matrix + chunk.mT @ chunk
            seen.append(chunk @ matrix)
        return torch.cat(seen, 1)


def test_linear_attention_is_counted_in_whole_chunks_and_not_in_many_of_them() -> None:
    """Over the whole length it would be too many operators."""
    assert model_flops_per_token(_LinearAttention(64), 2**19) == 6 * 3 * 16


def test_longformer_has_no_figure() -> None:
    shape: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 2}
    config = transformers.LongformerConfig(**shape, vocab_size=50, attention_window=512, max_position_embeddings=2050)
    assert count_flops(transformers.LongformerForMaskedLM(config), 2048) is None


def _mfu_of(batches: list[MicroBatch], monkeypatch: pytest.MonkeyPatch) -> float:
    """As a run logs it at 1,000 tokens/s on a device of 10^12 FLOP/s, by a rank that made a step of each of these."""
    accelerator = SimpleNamespace(device=torch.device("cpu"), num_processes=1, mixed_precision="no")
    run: Any = SimpleNamespace(is_planned=False, accelerator=accelerator, config=Config().changed(max_length=4096))
    monkeypatch.setattr("train.extras.meter.cards.peak_flops_per_second", lambda *args: 1e12)
    extra, values = Extra(), dict[str, Any](tokens_per_second=1000.0)
    extra.change_model(run, _llama(), load_task("causal_lm"))

    def logged(*steps: MicroBatch) -> float | None:
        for batch in steps:
            with extra.computing("forward", [batch]):
                pass
        extra.measured(run, values)
        return values["mfu"]

    found = logged(*batches)
    assert found is not None and logged() is None  # nothing was trained in between
    assert logged(*batches) == found
    return found


@pytest.mark.parametrize(
    ("more", "lengths"),
    [
        ({}, [2048.0, 2048.0]),
        ({"attention_mask": torch.arange(4096) < torch.tensor([[4096], [1024]])}, [4096, 1024]),
        ({"attention_mask": torch.arange(4096) < torch.tensor([[0], [1024]])}, [1024]),
        ({"documents": SimpleNamespace(lengths=[[1024] * 4, [96, 4000]])}, [1024, 1024, 1024, 1024, 96, 4000]),
    ],
    ids=["rows", "padded", "one empty", "packed"],
)
def test_utilization_counts_the_lengths_that_there_are(
    more: dict[str, Any], lengths: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = MicroBatch({"input_ids": torch.zeros(2, 4096), **more}, torch.zeros(2, 4096), 4096, (0, 1), 4096)
    token = 6 * (_LLAMA_BODY + 100 * 32)
    work = sum(n * (token + 12 * 3 * 32 * n / 2) for n in lengths)
    assert _mfu_of([batch], monkeypatch) == pytest.approx(1000 * work / sum(lengths) / 1e12, rel=1e-4)


def test_utilization_counts_all_steps_since_the_last_line(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = [MicroBatch({"input_ids": torch.zeros(1, n)}, torch.zeros(1, n), n, (0,), n) for n in (256, 2048, 512)]
    token = 6 * (_LLAMA_BODY + 100 * 32)
    work, tokens = sum(n * (token + 12 * 3 * 32 * n / 2) for n in (256, 2048, 512)), 256 + 2048 + 512
    assert _mfu_of(batches, monkeypatch) == pytest.approx(1000 * work / tokens / 1e12, rel=1e-4)


@pytest.mark.parametrize(("other", "expected"), [(3e12, 1 / 4), (None, None)])
def test_utilization_of_different_cards_is_told_where_all_are_known(
    other: float | None, expected: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that know their card would else wait for one that does not."""
    batch = MicroBatch({"input_ids": torch.zeros(1, 256)}, torch.zeros(1, 256), 256, (0,), 256)
    alone = _mfu_of([batch], monkeypatch)
    monkeypatch.setattr("train.extras.meter.exchange", lambda own: [own, other if own == 1e12 else own])
    extra, values = Extra(), dict[str, Any](tokens_per_second=1000.0)
    accelerator = SimpleNamespace(device=torch.device("cpu"), num_processes=2, mixed_precision="no")
    run: Any = SimpleNamespace(is_planned=False, accelerator=accelerator, config=Config().changed(max_length=4096))
    extra.change_model(run, _llama(), load_task("causal_lm"))
    with extra.computing("forward", [batch]):
        pass
    extra.measured(run, values)
    assert values["mfu"] == (expected and pytest.approx(alone * expected))


def test_without_a_meter_a_run_tells_the_highest_peak_alone() -> None:
    run: Any = SimpleNamespace(accelerator=SimpleNamespace(device=torch.device("cpu")))
    extra, values = Extra(), dict[str, Any](tokens_per_second=1000.0)
    extra.measured(run, values)
    assert values.keys() == {"tokens_per_second", "mfu", "peak_allocated_bytes"} and values["mfu"] is None
    extra.finished(run, cast("Any", None), summary := {})
    assert summary.keys() == {"peak_allocated_bytes"}
    extra.meter = SimpleNamespace(summary=lambda: {"peak_allocated_bytes": 7}, interval=lambda: {"phase_bytes": 3})
    extra.measured(run, values := {"tokens_per_second": 1000.0})
    assert values == {"tokens_per_second": 1000.0, "mfu": None, "phase_bytes": 3}
    extra.finished(run, cast("Any", None), summary)
    assert summary == {"peak_allocated_bytes": 7}


@pytest.mark.parametrize(
    ("device", "asked", "expected"),
    [
        ("cpu", {}, "CpuMeter"),
        ("cuda", {}, "CudaMeter"),
        ("mps", {}, "MpsMeter"),
        ("xpu", {}, None),
        ("cpu", {"measure_memory": False}, None),
        ("cuda", {"measure_memory": False, "memory_snapshot": True}, "snapshot"),
        ("cpu", {"measure_memory": False, "memory_snapshot": True}, None),
    ],
)
def test_each_device_has_its_own_meter_if_memory_is_measured(
    device: str, asked: dict[str, bool], expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    for path in ("cpu.CpuMeter", "cpu.MpsMeter", "cuda.CudaMeter"):
        name = path.partition(".")[2]
        monkeypatch.setattr(f"train.extras.meter.{path}", lambda *given, name=name: made.append((name, *given)) or name)
    monkeypatch.setattr(Extra, "_record_history", lambda extra, run: made.append(("snapshot",)))
    run: Any = SimpleNamespace(
        accelerator=SimpleNamespace(device=torch.device(device)),
        config=SimpleNamespace(of=lambda options: options(**asked)),
        outputs=SimpleNamespace(say=print),
    )
    parts: Any = SimpleNamespace(
        data=SimpleNamespace(label_names=["no", "yes"], tokenizer="tokens"),
        state=SimpleNamespace(model="a model"),
        optimizer=SimpleNamespace(optimizer="an optimizer"),
    )
    extra = Extra()
    extra.ready(run, parts)
    assert [name for name, *_ in made] == [expected] * (expected is not None)
    if expected not in (None, "snapshot"):
        assert extra.meter == expected
        assert made[0][1:] == (torch.device(device), "a model", "an optimizer", 2, print)


def test_steps_evaluations_and_phases_are_the_meters_if_there_is_one() -> None:
    batch: Any = "a micro-batch"
    heard: list[Any] = []
    extra = Extra()
    for meter in (
        None,
        SimpleNamespace(measure=lambda *given: heard.append(given) or nullcontext(), mark=heard.append),
    ):
        extra.meter = meter
        with extra.computing("forward", [batch, batch]):
            extra.mark("backward")
        with extra.computing("evaluation", [batch]):
            pass
        assert meter is not None or heard == []
    assert heard == [("forward", [batch, batch]), "backward", ("evaluation", [batch])]


def test_a_run_that_is_only_planned_counts_nothing() -> None:
    run: Any = SimpleNamespace(is_planned=True)  # it may have no device
    (extra := Extra()).change_model(run, _llama(), load_task("causal_lm"))
    assert extra._flops is None
